"""A swept test at one of its points: a test with nothing left to choose."""

from collections.abc import Mapping
from typing import Any

from nightbridge.launch.resources import gpus_per_node
from nightbridge.launch.versions import Version, version_for_pin
from nightbridge.models import ClusterLimits, TestDefinition

_VARIABLES = "extra_env_vars."
_NODES = "num_nodes"


def at_point(
    test: TestDefinition,
    point: Mapping[str, Any],
    version: Version | None = None,
    limits: ClusterLimits | None = None,
) -> TestDefinition:
    """Lay the values of a point over a test.

    Args:
        test: The swept test.
        point: Axis name (`SweepAxis.name`) to value; some axes may be missing, as they are while a grid is cut.
        version: The launcher's version, which decides on the GPUs of a node; by the pin where it is not given.
        limits: The cluster, whose nodes may have another number of GPUs; None where it is not known.

    """
    args = dict(test.cmd_args)
    variables = dict(test.extra_env_vars)
    for name, value in point.items():
        if name.startswith(_VARIABLES):
            variables[name.removeprefix(_VARIABLES)] = value
        elif name != _NODES:
            args[name] = value
    concrete = test.model_copy(update={"cmd_args": args, "extra_env_vars": variables, "axes": (), "drawn": ()})
    if _NODES not in point:
        return concrete
    per_node = gpus_per_node(concrete, version or version_for_pin(test.megatron_bridge.commit), limits=limits)
    args = {**args, "num_gpus": point[_NODES] * per_node} if per_node else args
    return concrete.model_copy(update={"cmd_args": args})
