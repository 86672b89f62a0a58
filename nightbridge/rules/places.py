"""Container, mounts, time and nodes: what the site must be able to give."""

import re
from collections.abc import Iterator

from nightbridge.errors import InvalidInput
from nightbridge.launch.resources import time_limit_seconds
from nightbridge.launch.time_limits import clock
from nightbridge.rules.facts import Facts
from nightbridge.rules.rule import Rule

_MOUNT = re.compile(r"[^:]+:/[^:]*(?::[a-z0-9+_.=-]+)?")


def _image_named(facts: Facts) -> Iterator[str]:
    if not facts.args.get("container_image"):
        yield (
            "cmd_args.container_image is not written: the launcher would take the moving tag nemo:dev, another image "
            'every other night; name one, or "none" for a launcher that runs without'
        )


def _runtime(facts: Facts) -> Iterator[str]:
    image = facts.args.get("container_image")
    if facts.limits is not None and image and image != "none" and not facts.limits.has_pyxis:
        yield (
            f"cmd_args.container_image = {image!r}, and this cluster has no pyxis to run containers with; "
            'write container_image = "none" if the pinned launcher can run without, or use another cluster'
        )


def _mounts(facts: Facts) -> Iterator[str]:
    for mount in facts.test.extra_container_mounts:
        if not _MOUNT.fullmatch(mount):
            yield f"extra_container_mounts: {mount!r} is not HOST_PATH:/CONTAINER_PATH[:flags]; write it so"


def _time_limit(facts: Facts) -> Iterator[str]:
    try:
        time_limit_seconds(facts.test)
    except InvalidInput as error:
        yield f"time_limit: {error}"


def _time_allowed(facts: Facts) -> Iterator[str]:
    longest = facts.limits.max_time_seconds if facts.limits else None
    try:
        seconds = time_limit_seconds(facts.test)
    except InvalidInput:
        return  # told by the rule on its syntax
    if longest is not None and seconds > longest:
        said = "time_limit" if facts.test.time_limit else "the launcher's own time limit"
        yield f"{said} {clock(seconds)} is longer than the partition allows, {clock(longest)}; write a shorter one"


def _nodes_allowed(facts: Facts) -> Iterator[str]:
    most = facts.limits.max_nodes if facts.limits else None
    if most is not None and facts.nodes is not None and facts.nodes > most:
        yield (
            f"num_gpus {facts.gpus} need {facts.nodes} nodes, and the partition has {most}; "
            "use fewer GPUs or another partition"
        )


RULES = (
    Rule("container-named", "error", ("cmd_args.container_image",), _image_named),
    Rule("container-runtime", "error", ("cmd_args.container_image",), _runtime, needs="limits"),
    Rule("mount-syntax", "error", ("extra_container_mounts",), _mounts),
    Rule("time-limit-syntax", "error", ("time_limit",), _time_limit),
    Rule("time-limit-allowed", "error", ("time_limit",), _time_allowed, needs="limits"),
    Rule(
        "nodes-allowed",
        "error",
        ("cmd_args.num_gpus", "cmd_args.gpus_per_node", "cmd_args.gpu_type"),
        _nodes_allowed,
        needs="limits",
    ),
)
