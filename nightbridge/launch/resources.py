"""How many GPUs, nodes and seconds a test needs."""

from nightbridge.launch import grids
from nightbridge.launch.flags import GPUS_PER_NODE, LAUNCHER_TIME_LIMIT
from nightbridge.launch.time_limits import seconds_of
from nightbridge.launch.versions import Version
from nightbridge.models import ClusterLimits, ClusterSettings, TestDefinition

DEFAULT_NUM_GPUS = 8
"""What CloudAI passes on where a test does not say."""

_GPUS_PER_NODE_0_3 = 8


def num_gpus(test: TestDefinition) -> int:
    """The GPUs that the launcher uses; of two grids, all their ranks."""
    if not test.has_launcher:
        return grids.grids_of(test).ranks
    return int(test.cmd_args.get("num_gpus", DEFAULT_NUM_GPUS))


def gpus_per_node(
    test: TestDefinition, version: Version, cluster: ClusterSettings | None = None, limits: ClusterLimits | None = None
) -> int | None:
    """GPUs of one node: the cluster's setting, else the test's, else what the cluster says, else the GPU type's.

    CloudAI's launcher flag is the system's, too, whatever `[cmd_args]` says. Where only the limits are known they
    carry the setting, apart from what the cluster itself says: the local one pretends to have two GPUs.

    None when unknown.
    """
    if cluster is not None and cluster.gpus_per_node:
        return cluster.gpus_per_node
    if limits is not None and limits.configured_gpus_per_node:
        return limits.configured_gpus_per_node
    if test.cmd_args.get("gpus_per_node"):
        return int(test.cmd_args["gpus_per_node"])
    if limits is not None and limits.gpus_per_node:
        return limits.gpus_per_node
    if not test.has_launcher:
        return grids.GPUS_PER_NODE
    if version < Version(0, 4):
        return _GPUS_PER_NODE_0_3
    return GPUS_PER_NODE.get(str(test.cmd_args.get("gpu_type", "")).lower())


def nodes_for(gpus: int, per_node: int) -> int:
    """Nodes, rounded up as the launcher does: seven GPUs on nodes of eight are one node with eight tasks."""
    return -(-gpus // per_node)


def time_limit_seconds(test: TestDefinition) -> int:
    """The job's time limit; the launcher's own where the test has none.

    Raises:
        InvalidInput: What the test says is no time limit.

    """
    return seconds_of(test.time_limit or LAUNCHER_TIME_LIMIT)
