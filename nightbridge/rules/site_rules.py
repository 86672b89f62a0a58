"""Container, mounts, time and nodes: what the site must be able to give."""

import math
import os
import re
from collections.abc import Collection, Iterator

from nightbridge.errors import InvalidInput
from nightbridge.launch.parser_source import launcher_of, passes_every_image_on
from nightbridge.launch.resources import clock, is_read_differently_by_sbatch, time_limit_seconds
from nightbridge.models.metrics import METRICS
from nightbridge.models.scenario import is_ref
from nightbridge.rules.rule import OVERRIDDEN, PARALLEL, UPSTREAM, RuleContext, cmd_args, is_local, rule
from nightbridge.sbatch_options import NOT_ONE_JOB, option_names

_LAUNCHER = "Megatron-Bridge: setup_experiment.py and utils/executors.py of scripts/performance at 067f987d (main)"
_PYXIS = "pyxis 0.24: its options of srun"
_SLURM = "Slurm: the limits of partition and account"

# The grammar of github.com/distribution/reference, with enroot's `USER@` and `REGISTRY#`; a slash means the same.
_IMAGE = re.compile(
    r"(?:docker://)?(?:[^@/#\s]+@(?!sha256:))?(?:[A-Za-z0-9._-]+(?::\d+)?[#/])?[a-z0-9]+(?:[._/-]+[a-z0-9]+)*"
    r"(?::[A-Za-z0-9_][A-Za-z0-9._-]{0,127})?(?:@sha256:[0-9a-f]{64})?"
)

_MOUNT = re.compile(r"[^:]+:/[^:]*(?::[a-z0-9+_.=-]+)?")


@rule("container-named", _LAUNCHER, cmd_args("container_image"))
def _image_named(run: RuleContext) -> Iterator[str]:
    """A moving default image makes every night incomparable with the one before."""
    if not run.args.get("container_image"):
        yield (
            "cmd_args.container_image is not written: the launcher would use the moving tag nemo:dev, whose image "
            'keeps changing; name one, or "none" for a launcher that runs without'
        )


@rule("container-needed", _LAUNCHER, (*cmd_args("container_image"), "git_repos"))
def _image_needed(run: RuleContext) -> Iterator[str]:
    """NVIDIA's launchers always start jobs in a container and fail without one."""
    url = run.test.megatron_bridge.url
    if run.test.has_launcher and run.args.get("container_image") == "none" and UPSTREAM.search(url):
        yield (
            f'cmd_args.container_image = "none", and the launcher of {url} starts jobs in a container only; '
            "name an image"
        )


@rule("container-launcher", _LAUNCHER, cmd_args("container_image"), needs="checkout")
def _image_passed_on(run: RuleContext) -> Iterator[str]:
    """A launcher that never looks at the image hands "none" to srun as one, and srun refuses it without pyxis."""
    if run.checkout is None or not run.test.has_launcher or run.args.get("container_image") != "none":
        return
    if passes_every_image_on(run.checkout.megatron_bridge.path, launcher_of(run.test)):
        yield (
            'cmd_args.container_image = "none", and the pinned launcher hands every image to srun, "none" too; '
            "name an image, or pin a launcher that leaves the container out"
        )


@rule("nodes-filled", _LAUNCHER, (*cmd_args("num_gpus gpus_per_node gpu_type", *PARALLEL), *OVERRIDDEN), "warning")
def _nodes_filled(run: RuleContext) -> Iterator[str]:
    """The launcher starts one task for each GPU of a node, so more GPUs train than requested."""
    per_node, nodes = run.gpus_per_node, run.nodes
    unknown = run.limits is None and not run.args.get("gpus_per_node")
    if unknown and is_local(run.test.megatron_bridge.url):
        return
    if run.test.has_launcher and per_node and nodes and run.gpus % per_node:
        guess = f" (as {run.args.get('gpu_type')} nodes usually have; the cluster may differ)" if unknown else ""
        sizes = run.layout(*PARALLEL)
        odd = nodes * per_node % math.prod(sizes.values())
        fails = f", which is not a multiple of {run.shown(sizes)}, and Megatron-Core refuses them" if odd else ""
        yield (
            f"num_gpus {run.gpus} do not fill nodes of {per_node} GPUs{guess}: the launcher starts {per_node} tasks "
            f"on each of {nodes}, so {nodes * per_node} GPUs train{fails}; write num_gpus = {nodes * per_node}, or "
            "gpus_per_node"
        )


@rule("hub-token", "Hugging Face Hub", cmd_args("task tokenizer_type use_recipes offline"), "warning")
def _token(run: RuleContext) -> Iterator[str]:
    """Without a token the Hub refuses gated models and limits the rate of others, hours into the queue."""
    if "HF_TOKEN" in run.test.secrets or run.args.get("offline"):
        return
    if run.args.get("task") in ("sft", "lora", "peft"):
        yield _fetches(f"task = {run.args['task']!r}")
    if run.args.get("tokenizer_type") == "HuggingFaceTokenizer":
        yield _fetches("tokenizer_type = 'HuggingFaceTokenizer'")
    if run.args.get("use_recipes"):
        yield _fetches("use_recipes = true")


def _fetches(reason: str) -> str:
    return (
        f"cmd_args.{reason} downloads from the Hugging Face Hub, and no token is set; "
        'write hf_token = "env:HF_TOKEN", or offline = true with a filled cache'
    )


@rule("image-reference", "enroot 4.1: src/docker.sh", cmd_args("container_image"))
def _image_grammar(run: RuleContext) -> Iterator[str]:
    """A mistyped reference is found by the registry minutes later, or names an image of Docker Hub."""
    image = str(run.args.get("container_image") or "none")
    if image.startswith(("/", ".")) or image == "none" or _IMAGE.fullmatch(image):
        return
    yield (
        f"cmd_args.container_image = {image!r} is not a valid image reference; write REGISTRY/IMAGE:TAG, "
        'REGISTRY#IMAGE:TAG, the path of a .sqsh file, or "none"'
    )


@rule("image-file", _PYXIS, cmd_args("container_image"), "warning")
def _image_file(run: RuleContext) -> Iterator[str]:
    """An image file that is not there ends the run before it is submitted; another machine may see more folders."""
    image = str(run.args.get("container_image") or "")
    # Path.exists raises where this user cannot enter a folder.
    if image.startswith("/") and not os.path.exists(image):
        yield f"cmd_args.container_image = {image!r}: no such file on this machine; check the path"


@rule("gpus-of-type", _LAUNCHER, cmd_args("gpus_per_node gpu_type"), "warning")
def _gpus_of_type(run: RuleContext) -> Iterator[str]:
    """The GPUs of a node decide how many tasks start on it, and the sold systems of one type all have as many."""
    written, gpu = run.integer("gpus_per_node"), str(run.args.get("gpu_type")).lower()
    usual = 4 if gpu in ("gb200", "gb300", "vr200") else 8
    if written and gpu != "none" and written > usual:
        yield f"cmd_args.gpus_per_node = {written}, and nodes of {gpu} have {usual} GPUs; write {usual}, or remove it"


@rule("container-runtime", _PYXIS, cmd_args("container_image"), needs="limits")
def _runtime(run: RuleContext) -> Iterator[str]:
    """Without pyxis srun does not know the options that start a container."""
    image = run.args.get("container_image")
    if run.limits is not None and image and image != "none" and not run.limits.has_pyxis:
        yield (
            f"cmd_args.container_image = {image!r}, and this cluster has no pyxis to run containers with; "
            'write container_image = "none" if the pinned launcher can run without, or use another cluster'
        )


_FOLDERS = "save_dir load_dir pretrained_checkpoint wandb_save_dir"
_ABSOLUTE = re.compile(r"/|[a-z][a-z0-9+.-]*://")


@rule("path-absolute", _LAUNCHER, cmd_args(_FOLDERS), alone=True)
def _absolute(run: RuleContext) -> Iterator[str]:
    """The job runs in a checkout of the code, which is shared and never changes, and not where the test file lies."""
    for field in _FOLDERS.split():
        path = str(run.args.get(field) or "")
        if path and not _ABSOLUTE.match(path):
            yield f"cmd_args.{field} = {path!r} is not an absolute path; write the full path"


@rule("mount-syntax", _PYXIS, ("extra_container_mounts", "git_repos"))
def _mounts(run: RuleContext) -> Iterator[str]:
    """Pyxis refuses other forms when the job starts."""
    for mount in run.test.extra_container_mounts:
        if not _MOUNT.fullmatch(mount):
            yield f"extra_container_mounts: {mount!r} is not of the form HOST_PATH:/CONTAINER_PATH[:flags]"
    for repository in run.test.git_repos:
        if (at := repository.mount_as) and not re.fullmatch(r"/[^\s:,]*", at):
            yield f"git_repos: mount_as = {at!r} must be an absolute path without white space, colon or comma"


@rule("pin-syntax", "git check-ref-format", ("git_repos", "nemo_run_repo"))
def _pin(run: RuleContext) -> Iterator[str]:
    """Nothing is found in a repository without an address, or under a name that no ref can have."""
    named = [("git_repos", repository) for repository in run.test.git_repos]
    for table, repository in (*named, ("nemo_run_repo", run.test.nemo_run_repo)):
        if not repository.url.strip():
            yield f"{table}: url is empty; write the address of the repository"
        if not is_ref(repository.commit):
            yield f"{table}: commit = {repository.commit!r} is not a branch, tag or commit; write one"


@rule("partition-exists", _SLURM, (), needs="limits")
def _partition(run: RuleContext) -> Iterator[str]:
    """Slurm would refuse the job."""
    limits = run.limits
    if limits is not None and not limits.has_partition:
        yield f"the cluster has no partition {limits.partition!r}; name {' or '.join(limits.partitions)} in the site"


@rule("account-allowed", _SLURM, (), needs="limits")
def _account(run: RuleContext) -> Iterator[str]:
    """Slurm would refuse the job, or hold it for ever."""
    limits = run.limits
    if limits is not None and not limits.has_account:
        yield f"account {limits.account!r} may not submit here; these may: {', '.join(limits.accounts or ())}"


@rule("resources-exist", _SLURM, cmd_args("gres"), needs="limits")
def _resources(run: RuleContext) -> Iterator[str]:
    """Slurm would refuse a generic resource that no node of the partition has."""
    requested, known = run.args.get("gres"), run.limits.gres if run.limits else None
    if not requested or known is None:
        return
    for item in str(requested).split(","):
        name = item.split(":", 1)[0]
        if name not in known:
            has = ", ".join(known) if known else "none at all"
            yield f"cmd_args.gres = {requested!r}: the partition has no resource {name!r}, but {has}; fix or remove it"


@rule("one-cluster", _SLURM, cmd_args("additional_slurm_params"))
def _one_cluster(run: RuleContext) -> Iterator[str]:
    """A job on another cluster of the same slurmdbd is submitted there, and never found."""
    return _refused_parameters(run, {"clusters"})


@rule("one-job", _SLURM, cmd_args("additional_slurm_params"))
def _one_job(run: RuleContext) -> Iterator[str]:
    """An attempt has one job: of an array none is found, and it is submitted again."""
    return _refused_parameters(run, NOT_ONE_JOB.keys() - {"clusters"})


def _refused_parameters(run: RuleContext, refused: Collection[str]) -> Iterator[str]:
    """The parameters with one of these names; the launcher writes each into an #SBATCH line."""
    for word in filter(None, map(str.strip, str(run.args.get("additional_slurm_params") or "").split(";"))):
        name = word.lstrip("-").replace("_", "-").partition("=")[0]
        for named in option_names(f"-{name}" if len(name) == 1 else f"--{name}") & set(refused):
            yield f"cmd_args.additional_slurm_params: {word!r} {'; '.join(NOT_ONE_JOB[named])}"


@rule("time-limit-syntax", _SLURM, ("time_limit",))
def _time_limit(run: RuleContext) -> Iterator[str]:
    """Slurm would refuse the job."""
    try:
        time_limit_seconds(run.test)
    except InvalidInput as error:
        yield f"time_limit: {error}"


@rule("time-limit-ambiguous", _SLURM, ("time_limit",), "warning")
def _time_ambiguous(run: RuleContext) -> Iterator[str]:
    """CloudAI and sbatch read two numbers with a colon differently: 30:00 is 30 hours or 30 minutes."""
    written = run.test.time_limit
    if written and is_read_differently_by_sbatch(written):
        yield (
            f"time_limit {written!r} is read as hours and minutes, as CloudAI reads it, and sbatch itself would read "
            "minutes and seconds; write HH:MM:SS"
        )


@rule("time-limit-allowed", _SLURM, ("time_limit",), needs="limits")
def _time_allowed(run: RuleContext) -> Iterator[str]:
    """Slurm would refuse the job, or leave it pending with PartitionTimeLimit."""
    longest = run.limits.max_time_seconds if run.limits else None
    try:
        seconds = time_limit_seconds(run.test)
    except InvalidInput:
        return  # reported by the rule on its syntax
    if longest is not None and seconds > longest:
        name = "time_limit" if run.test.time_limit else "the launcher's own time limit"
        yield f"{name} {clock(seconds)} is longer than the partition allows, {clock(longest)}; write a shorter one"


@rule("nodes-allowed", _SLURM, cmd_args("num_gpus gpus_per_node gpu_type"), needs="limits")
def _nodes_allowed(run: RuleContext) -> Iterator[str]:
    """The job would be pending for ever with PartitionNodeLimit."""
    most = run.limits.max_nodes if run.limits else None
    if most is not None and run.nodes is not None and run.nodes > most:
        yield (
            f"num_gpus {run.gpus} need {run.nodes} nodes, and the partition has {most}; "
            "use fewer GPUs or another partition"
        )


@rule("gate-band", "nightbridge: relative numbers of [gate] are shares", ("gate",))
def _gate_band(run: RuleContext) -> Iterator[str]:
    """A band of more than 100 % never alarms, and is a percentage that was meant as a share."""
    gate = run.test.gate
    for metric in METRICS if gate.model_fields_set else ():
        if (band := getattr(gate, metric.name)) > max(1.0, metric.band):
            yield f"gate.{metric.name} = {band:g} is {band:.0%}; write {band / 100:g} for {band:g} %"
