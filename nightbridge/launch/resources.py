"""How many GPUs, nodes, seconds, bytes and which variables a test needs, also at one point of its sweep.

Time limits are read as CloudAI reads them, and in the forms of sbatch(1) that it does not know.
"""

import itertools
import re
import shlex
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from nightbridge.errors import InvalidInput
from nightbridge.launch.flags import GPUS_PER_NODE, LAUNCHER_TIME_LIMIT
from nightbridge.launch.hetero_arguments import DEFAULT_GPUS_PER_NODE, grids_of
from nightbridge.launch.versions import Version, version_for_pin
from nightbridge.models import ClusterLimits, ClusterSettings, RunRecord, TestDefinition
from nightbridge.models.series import DEFAULT_NUM_GPUS

_GPUS_PER_NODE_0_3 = 8

# The code's own path is where it lies that night, and no variable of anybody's.
_EXPORT = re.compile(r"^export (?!PYTHONPATH=)(\w+)=(.*)$", re.MULTILINE)


def num_gpus(test: TestDefinition) -> int:
    """The GPUs that the launcher uses; of two grids, all their ranks."""
    if not test.has_launcher:
        return grids_of(test).ranks
    return int(test.cmd_args.get("num_gpus", DEFAULT_NUM_GPUS))


def gpus_per_node(
    test: TestDefinition, version: Version, cluster: ClusterSettings | None = None, limits: ClusterLimits | None = None
) -> int | None:
    """GPUs of one node: the cluster's setting, else the test's, else what the cluster reports, else the GPU type's.

    CloudAI's launcher flag is the system's, too, whatever `[cmd_args]` has. Where only the limits are known they
    carry the setting, apart from what the cluster itself reports: the local one emulates two GPUs.

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
        return DEFAULT_GPUS_PER_NODE
    if version < Version(0, 4):
        return _GPUS_PER_NODE_0_3
    return GPUS_PER_NODE.get(str(test.cmd_args.get("gpu_type", "")).lower())


def variables_of(test: TestDefinition, cluster: ClusterSettings) -> dict[str, str]:
    """The variables of a run: the cluster's, and the test's own, which win, also where these are secrets."""
    variables = {**cluster.env_vars, **test.extra_env_vars}
    return {name: value for name, value in variables.items() if name not in test.secrets}


def variables_given(record: RunRecord) -> dict[str, str]:
    """The environment variables of a run: its test's, and those of the site that its launcher was given."""
    given: dict[str, str] = {}
    for option, word in itertools.pairwise(record.plan.argv):
        assignment = word if option == "-E" else word.removeprefix("export ") if option == "-cb" else ""
        name, equals, value = assignment.partition("=")
        if equals:
            given[name] = value
    # A workload without a launcher has them in the head of its own script.
    for name, word in _EXPORT.findall((record.plan.batch_script or "").partition("\nsrun ")[0]):
        given[name] = "".join(shlex.split(word))
    return given | record.spec.test.extra_env_vars


def nodes_for(gpus: int, per_node: int) -> int:
    """Nodes, rounded up as the launcher does: seven GPUs on nodes of eight are one node with eight tasks."""
    return -(-gpus // per_node)


def time_limit_seconds(test: TestDefinition) -> int:
    """The job's time limit; the launcher's own where the test has none.

    Raises:
        InvalidInput: The test's time limit is not valid.
    """
    return seconds_of(test.time_limit or LAUNCHER_TIME_LIMIT)


_VARIABLES = "extra_env_vars."
_NODES = "num_nodes"


def at_point(
    test: TestDefinition, point: Mapping[str, Any], version: Version | None = None, limits: ClusterLimits | None = None
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


_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_WITH_UNIT = re.compile(r"^(\d{1,6})([smhdw])$", re.IGNORECASE)
_CLOCK = re.compile(r"^(?:(\d{1,5})-)?(\d{1,6})(?::(\d{1,2}))?(?::(\d{1,2}))?$")


@lru_cache(maxsize=256)
def seconds_of(text: str) -> int:
    """Return the seconds of a time limit.

    `hours:minutes:seconds`, `days-hours:minutes:seconds` and a number with one of the units s, m, h, d, w, as in
    CloudAI; `minutes`, `days-hours`, `days-hours:minutes`, as in sbatch(1); and `hours:minutes`, as in CloudAI, which
    sbatch would read as minutes and seconds.

    Raises:
        InvalidInput: It is none of these, or no time at all.
    """
    text = text.strip()
    if match := _WITH_UNIT.match(text):
        seconds = int(match[1]) * _UNITS[match[2].lower()]
    elif match := _CLOCK.match(text):
        days, *parts = match.groups()
        written = [int(part) for part in parts if part is not None]
        if days is None and len(written) == 1:
            written.insert(0, 0)  # minutes alone
        hours, minutes, rest = (*written, 0, 0)[:3]
        seconds = int(days or 0) * 86400 + hours * 3600 + minutes * 60 + rest
    else:
        seconds = 0
    if seconds <= 0:
        raise InvalidInput("not a time limit", subject=repr(text), advice="Write HH:MM:SS, D-HH:MM:SS or minutes")
    return seconds


def is_read_differently_by_sbatch(text: str) -> bool:
    """Whether it is `hours:minutes`, which sbatch reads as `minutes:seconds`."""
    return text.count(":") == 1 and "-" not in text


def clock(seconds: int) -> str:
    """Write seconds as `HH:MM:SS`, with `D-` in front from one day on."""
    days, rest = divmod(seconds, 86400)
    hours, rest = divmod(rest, 3600)
    return (f"{days}-" if days else "") + f"{hours:02}:{rest // 60:02}:{rest % 60:02}"


def site_options(cluster: ClusterSettings) -> tuple[str, ...]:
    """Further options as `--name=value`; partition and account travel with the workload's own."""
    exclusive = ("--exclusive",) if cluster.exclusive else ()
    return (*cluster.options("qos", "reservation", "segment"), *exclusive, *cluster.extra_sbatch_args)


# --- checkpoints ------------------------------------------------------------------------------------------------------

_WEIGHT_BYTES = 2
_MAIN_WEIGHT_BYTES = 4
_MOMENTS: Mapping[str, int] = {"adam": 2, "muon": 1}
_MOMENT_BYTES = 4

_NAMED: Mapping[str, float] = {
    "deepseek_v3": 671e9,
    "deepseek_v2": 236e9,
    "deepseek_v2_lite": 15.7e9,
    "kimi_k2": 1.04e12,
    "nemotron_3_nano": 31.6e9,
    "nemotron_3_super": 124e9,
}
"""Parameters of recipes whose names do not contain them."""

_COUNT = re.compile(r"(?:^|_)(\d{1,6}(?:[.p]\d{1,6})?)([bmt])(?=_|$)")
_COUNT_UNITS: Mapping[str, float] = {"m": 1e6, "b": 1e9, "t": 1e12}
_RESHAPING = ("hidden_size", "num_layers", "num_moe_experts", "first_k_dense_replace")
_LOAD, _FINETUNE = "checkpoint.load", "checkpoint.finetune"
_ADAPTERS = frozenset({"lora", "peft"})


def resumed_from(test: TestDefinition) -> str:
    """The checkpoint that a test resumes from; empty for a run that starts from scratch.

    With `finetune` only the weights are loaded: iterations and optimiser start from scratch, so this is not a resume.
    """
    written = {key.lstrip("+"): value for key, value in test.extra_cmd_args.items()}
    restarts = written.get(_FINETUNE, "").strip().lower() == "true"
    if not test.has_launcher:  # its program has a flag for it
        restarts = restarts or bool(test.cmd_args.get("finetune"))
    return "" if restarts else str(test.cmd_args.get("load_dir") or written.get(_LOAD, "").replace("null", ""))


def trains_adapters(test: TestDefinition) -> bool:
    """Whether only adapters are trained and kept, which are small whatever the model is."""
    return test.cmd_args.get("task") in _ADAPTERS


def parameters_of(test: TestDefinition) -> float | None:
    """The model's parameters, by the recipe's name; None where the name has none or the test changes the model."""
    recipe = str(test.cmd_args.get("model_recipe_name", "")).lower()
    found = _COUNT.search(recipe)
    if any(test.cmd_args.get(field) for field in _RESHAPING):
        return None
    return _NAMED.get(recipe) or (float(found[1].replace("p", ".")) * _COUNT_UNITS[found[2]] if found else None)


def bytes_per_parameter(test: TestDefinition) -> int:
    """Bytes of a parameter in a checkpoint: its bf16 value, the optimiser's fp32 value, and the optimiser's moments."""
    moments = _MOMENTS.get(str(test.cmd_args.get("optimizer_type")), max(_MOMENTS.values()))
    return _WEIGHT_BYTES + _MAIN_WEIGHT_BYTES + moments * _MOMENT_BYTES


def oversized_checkpoint(test: TestDefinition) -> str | None:
    """How large a test's checkpoint is likely to be, where that is beyond its limit; None elsewhere."""
    parameters, limit = parameters_of(test), test.harvest.max_checkpoint_bytes
    if trains_adapters(test) or parameters is None or (size := parameters * bytes_per_parameter(test)) <= limit:
        return None
    return (
        f"a checkpoint of {test.cmd_args.get('model_recipe_name')} takes about {size / 1e9:,.0f} GB "
        f"({parameters / 1e9:g} billion parameters of {bytes_per_parameter(test)} bytes with the optimiser's state), "
        f"more than harvest.max_checkpoint_bytes, {limit / 1e9:,.0f} GB"
    )
