"""Container, mounts, time and nodes: what the site must be able to give."""

import re
from collections.abc import Iterator

from nightbridge.errors import InvalidInput
from nightbridge.launch.resources import clock, is_read_differently_by_sbatch, time_limit_seconds
from nightbridge.rules.context import Facts
from nightbridge.rules.rule import Rule, from_source

_UPSTREAM = re.compile(r"github\.com[:/]+NVIDIA(?:-NeMo)?/", re.IGNORECASE)
# The grammar of github.com/distribution/reference, with enroot's `USER@` and `REGISTRY#`; a slash means the same.
_IMAGE = re.compile(
    r"(?:docker://)?(?:[^@/#\s]+@(?!sha256:))?(?:[A-Za-z0-9._-]+(?::\d+)?[#/])?[a-z0-9]+(?:[._/-]+[a-z0-9]+)*"
    r"(?::[A-Za-z0-9_][A-Za-z0-9._-]{0,127})?(?:@sha256:[0-9a-f]{64})?"
)
_TUNING = frozenset({"sft", "lora", "peft"})
_MOUNT = re.compile(r"[^:]+:/[^:]*(?::[a-z0-9+_.=-]+)?")


def _image_named(facts: Facts) -> Iterator[str]:
    """A moving default image makes every night incomparable with the one before."""
    if not facts.args.get("container_image"):
        yield (
            "cmd_args.container_image is not written: the launcher would use the moving tag nemo:dev, whose image "
            'keeps changing; name one, or "none" for a launcher that runs without'
        )


def _image_grammar(facts: Facts) -> Iterator[str]:
    """A mistyped reference is found by the registry minutes later, or names an image of Docker Hub."""
    image = str(facts.args.get("container_image") or "none")
    if image.startswith(("/", ".")) or image == "none" or _IMAGE.fullmatch(image):
        return
    yield (
        f"cmd_args.container_image = {image!r} is not a valid image reference; write REGISTRY/IMAGE:TAG, "
        'REGISTRY#IMAGE:TAG, the path of a .sqsh file, or "none"'
    )


def _image_needed(facts: Facts) -> Iterator[str]:
    """NVIDIA's launchers always start jobs in a container and fail without one."""
    url = facts.test.megatron_bridge.url
    if facts.test.has_launcher and facts.args.get("container_image") == "none" and _UPSTREAM.search(url):
        yield (
            f'cmd_args.container_image = "none", and the launcher of {url} starts jobs in a container only; '
            "name an image"
        )


def _token(facts: Facts) -> Iterator[str]:
    """Without a token the Hub refuses gated models and limits the rate of others, hours into the queue."""
    if "HF_TOKEN" in facts.test.secrets or facts.args.get("offline"):
        return
    if facts.args.get("task") in _TUNING:
        yield _fetches(f"task = {facts.args['task']!r}")
    if facts.args.get("tokenizer_type") == "HuggingFaceTokenizer":
        yield _fetches("tokenizer_type = 'HuggingFaceTokenizer'")
    if facts.args.get("use_recipes"):
        yield _fetches("use_recipes = true")


def _fetches(reason: str) -> str:
    return (
        f"cmd_args.{reason} downloads from the Hugging Face Hub, and no token is set; "
        'write hf_token = "env:HF_TOKEN", or offline = true with a filled cache'
    )


def _partition(facts: Facts) -> Iterator[str]:
    """Slurm would refuse the job."""
    limits = facts.limits
    if limits is not None and limits.partition and limits.partitions and limits.partition not in limits.partitions:
        yield f"the cluster has no partition {limits.partition!r}; it has {', '.join(limits.partitions)}"


def _account(facts: Facts) -> Iterator[str]:
    """Slurm would refuse the job, or hold it for ever."""
    limits = facts.limits
    if limits is not None and limits.accounts and limits.account and limits.account not in limits.accounts:
        yield f"account {limits.account!r} may not submit here; these may: {', '.join(limits.accounts)}"


def _resources(facts: Facts) -> Iterator[str]:
    """Slurm would refuse a generic resource that no node of the partition has."""
    requested, known = facts.args.get("gres"), facts.limits.gres if facts.limits else None
    if not requested or known is None:
        return
    for item in str(requested).split(","):
        name = item.split(":", 1)[0]
        if name not in known:
            has = ", ".join(known) if known else "none at all"
            yield f"cmd_args.gres = {requested!r}: the partition has no resource {name!r}, but {has}; fix or remove it"


def _runtime(facts: Facts) -> Iterator[str]:
    """Without pyxis srun does not know the options that start a container."""
    image = facts.args.get("container_image")
    if facts.limits is not None and image and image != "none" and not facts.limits.has_pyxis:
        yield (
            f"cmd_args.container_image = {image!r}, and this cluster has no pyxis to run containers with; "
            'write container_image = "none" if the pinned launcher can run without, or use another cluster'
        )


def _mounts(facts: Facts) -> Iterator[str]:
    """Pyxis refuses other forms when the job starts."""
    for mount in facts.test.extra_container_mounts:
        if not _MOUNT.fullmatch(mount):
            yield f"extra_container_mounts: {mount!r} is not of the form HOST_PATH:/CONTAINER_PATH[:flags]"


def _time_limit(facts: Facts) -> Iterator[str]:
    """Slurm would refuse the job."""
    try:
        time_limit_seconds(facts.test)
    except InvalidInput as error:
        yield f"time_limit: {error}"


def _time_ambiguous(facts: Facts) -> Iterator[str]:
    """CloudAI and sbatch read two numbers with a colon differently: 30:00 is 30 hours or 30 minutes."""
    written = facts.test.time_limit
    if written and is_read_differently_by_sbatch(written):
        yield (
            f"time_limit {written!r} is read as hours and minutes, as CloudAI reads it, and sbatch itself would read "
            "minutes and seconds; write HH:MM:SS"
        )


def _time_allowed(facts: Facts) -> Iterator[str]:
    """Slurm would refuse the job, or leave it pending with PartitionTimeLimit."""
    longest = facts.limits.max_time_seconds if facts.limits else None
    try:
        seconds = time_limit_seconds(facts.test)
    except InvalidInput:
        return  # reported by the rule on its syntax
    if longest is not None and seconds > longest:
        said = "time_limit" if facts.test.time_limit else "the launcher's own time limit"
        yield f"{said} {clock(seconds)} is longer than the partition allows, {clock(longest)}; write a shorter one"


def _nodes_filled(facts: Facts) -> Iterator[str]:
    """The launcher starts one task for each GPU of a node, so more GPUs train than requested."""
    per_node, nodes = facts.gpus_per_node, facts.nodes
    if facts.test.has_launcher and per_node and nodes and facts.gpus % per_node:
        unknown = facts.limits is None and not facts.args.get("gpus_per_node")
        guess = (
            f" (as {facts.args.get('gpu_type')} nodes usually have; the cluster may say otherwise)" if unknown else ""
        )
        yield (
            f"num_gpus {facts.gpus} do not fill nodes of {per_node} GPUs{guess}: the launcher starts {per_node} tasks "
            f"on each of {nodes}, so {nodes * per_node} GPUs train; write num_gpus = {nodes * per_node}, or "
            "gpus_per_node"
        )


def _nodes_allowed(facts: Facts) -> Iterator[str]:
    """The job would be pending for ever with PartitionNodeLimit."""
    most = facts.limits.max_nodes if facts.limits else None
    if most is not None and facts.nodes is not None and facts.nodes > most:
        yield (
            f"num_gpus {facts.gpus} need {facts.nodes} nodes, and the partition has {most}; "
            "use fewer GPUs or another partition"
        )


_NODES = ("cmd_args.num_gpus", "cmd_args.gpus_per_node", "cmd_args.gpu_type")

RULES = (
    *from_source(
        "Megatron-Bridge: scripts/performance, its launcher and its executor",
        Rule("container-named", "error", ("cmd_args.container_image",), _image_named),
        Rule("container-needed", "error", ("cmd_args.container_image", "git_repos"), _image_needed),
        Rule("nodes-filled", "warning", _NODES, _nodes_filled),
    ),
    *from_source(
        "Hugging Face Hub",
        Rule(
            "hub-token",
            "warning",
            tuple(f"cmd_args.{field}" for field in ("task", "tokenizer_type", "use_recipes", "offline")),
            _token,
        ),
    ),
    *from_source(
        "enroot: the grammar of docker:// references",
        Rule("image-reference", "error", ("cmd_args.container_image",), _image_grammar),
    ),
    *from_source(
        "pyxis: its options of srun",
        Rule("container-runtime", "error", ("cmd_args.container_image",), _runtime, needs="limits"),
        Rule("mount-syntax", "error", ("extra_container_mounts",), _mounts),
    ),
    *from_source(
        "Slurm: the limits of partition and account",
        Rule("partition-exists", "error", (), _partition, needs="limits"),
        Rule("account-allowed", "error", (), _account, needs="limits"),
        Rule("resources-exist", "error", ("cmd_args.gres",), _resources, needs="limits"),
        Rule("time-limit-syntax", "error", ("time_limit",), _time_limit),
        Rule("time-limit-ambiguous", "warning", ("time_limit",), _time_ambiguous),
        Rule("time-limit-allowed", "error", ("time_limit",), _time_allowed, needs="limits"),
        Rule("nodes-allowed", "error", _NODES, _nodes_allowed, needs="limits"),
    ),
)
