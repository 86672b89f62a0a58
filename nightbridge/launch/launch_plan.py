"""RunSpec, Checkout and Image to the `LaunchPlan`: exactly what will be started.

Also what of a test the launcher of one version or commit would not take, which the rules ask before, and which texts
survive the way to the job.

The launcher hands its argv to NeMo-Run, which writes it into a batch script without quoting anything and HTML-escapes
quotes (seen with NeMo-Run 0.11.1). So a space splits a word, `;` or `&` starts another command, and a quote arrives as
`&#39;`. Such values are refused here, with the reason, before anything is started. Words that only the job reads, and
not the launcher itself, may hold some of these characters: a backslash carries them through the one shell on the way.
"""

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from nightbridge.errors import InvalidInput
from nightbridge.launch.config_schema import hydra_value, unreadable
from nightbridge.launch.flags import (
    FLAGS,
    FORMATS,
    TEST_FLAGS,
    KnownFlags,
    escaped,
    expands,
    known_in,
    why_unsafe,
    why_unsafe_escaped,
    why_unsafe_variable,
    words_of,
    written,
)
from nightbridge.launch.hetero import hetero_plan
from nightbridge.launch.parser_source import known_flags, launcher_of
from nightbridge.launch.resources import (
    clock,
    gpus_per_node,
    nodes_for,
    num_gpus,
    site_options,
    time_limit_seconds,
    variables_of,
)
from nightbridge.launch.versions import V0_3_0, V0_5_0, Version, version_for_pin
from nightbridge.models import (
    LAUNCHER_HOME,
    Checkout,
    ClusterLimits,
    ClusterSettings,
    Image,
    LauncherEnvironment,
    LaunchPlan,
    Model,
    PinnedRepository,
    RunSpec,
    Site,
    TestDefinition,
)

NO_ACCOUNT = "nightbridge"
"""NeMo-Run insists on an account; the local cluster has none, and Slurm without enforced accounts takes any."""

JOB_FOLDER = "/nemo_run"
"""Where NeMo-Run mounts the job's directory in its container."""

RECIPE_STEPS = 50
"""Steps of every flat performance recipe, unless the test sets them."""

# Megatron-Bridge's handle_profiling_step() looks at the steps that are done, so a window A to B is the iterations A + 1
# to B. It is left after iteration B was measured, so stopping falls into B + 1. PyTorch's profiler counts one step
# further and warms up one step before its window.
_TEARDOWN = 1
_NSYS_LEAD, _PYTORCH_LEAD = 1, -1


class ProfiledSteps(Model):
    """Iterations whose time a profiler spoils, first and last."""

    first: int
    last: int

    def spoils(self, iteration: int, interval: int) -> bool:
        """Whether a record at `iteration` over the last `interval` iterations has one of them in it."""
        return self.first <= iteration and iteration - interval < self.last


def steps_profiled(start: int, stop: int, *, nsys: bool, pytorch: bool) -> ProfiledSteps | None:
    """What a window of one of the profilers spoils; None without one."""
    if stop <= start or not (nsys or pytorch):
        return None
    lead = _PYTORCH_LEAD if pytorch else _NSYS_LEAD
    return ProfiledSteps(first=max(start + lead, 1), last=stop + _TEARDOWN)


def profiling_window(args: Mapping[str, Any]) -> tuple[int, int]:
    """The first and the last step of the window of `[cmd_args]`, or of the launcher's own."""
    return int(args.get("profiling_start_step", 10)), int(args.get("profiling_stop_step", 11))


def profiled_steps(args: Mapping[str, Any]) -> ProfiledSteps | None:
    """The same by the keys of `[cmd_args]`."""
    return steps_profiled(
        *profiling_window(args), nsys=bool(args.get("enable_nsys")), pytorch=bool(args.get("pytorch_profiler"))
    )


_LOGGING: Mapping[str, str] = {
    "logger.log_timers_to_tensorboard": "true",
    "logger.log_throughput_to_tensorboard": "true",
    "logger.log_memory_to_tensorboard": "true",
}

WANDB: Mapping[str, str] = {
    "wandb_project_name": "logger.wandb_project",
    "wandb_experiment_name": "logger.wandb_exp_name",
    "wandb_entity_name": "logger.wandb_entity",
    "wandb_save_dir": "logger.wandb_save_dir",
}
"""Keys of `[cmd_args]`, each with the override that does the same."""

PLACEHOLDER = Path("/placeholder")
"""Root of paths that do not exist before the first stages have run."""

# enroot reads these while it creates the container, so they must be set outside of it as well.
_CONTAINER_RUNTIME = ("MELLANOX_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES")


def make_launch_plan(
    spec: RunSpec,
    checkout: Checkout,
    image: Image,
    limits: ClusterLimits,
    site: Site,
    attempt: int,
    attempt_dir: Path,
    *,
    known: KnownFlags | None = None,
) -> LaunchPlan:
    """Plan one attempt.

    `known` are the launcher's flags, read from the pinned launcher's own parser where they are not given.

    Raises:
        InvalidInput: The pinned launcher has no such flag or value, or a value would not survive the batch script;
            every violation is reported.
    """
    attempt_dir = attempt_dir.absolute()
    if not spec.test.has_launcher:
        return hetero_plan(spec, checkout.megatron_bridge, image, limits, site, attempt, attempt_dir)
    if known is None:
        known = known_flags(checkout.megatron_bridge.path, launcher_of(spec.test))
    test = spec.test
    _check_test(test, known, site.cluster)
    if checkout.environment is None:
        raise InvalidInput("the launcher has no environment to run in", subject=test.id)
    bridge = checkout.megatron_bridge.path
    per_node = gpus_per_node(test, launcher_version(known), site.cluster, limits)
    if per_node is None:
        raise InvalidInput(
            f"the number of GPUs per node with {test.cmd_args.get('gpu_type')!r} is unknown",
            subject=test.source or test.id,
            advice="Set gpus_per_node in the cluster's settings",
        )
    # A container has the job's folder.
    folder = attempt_dir / "output" if image.kind == "none" else None
    attempt_name = f"{spec.run_key}-a{attempt}"
    code = (f"{bridge}:{test.megatron_bridge.mount_as}",) if test.megatron_bridge.mount_as else ()
    values: dict[str, Any] = {
        **test.cmd_args,
        **_output_arguments(spec, folder, attempt_name),
        **_variables(test, site.cluster, known),
        "num_gpus": num_gpus(test),
        "gpus_per_node": per_node,
        "container_image": image.path if image.kind == "sqsh" else "none",
        "account": site.cluster.account or NO_ACCOUNT,
        "partition": site.cluster.partition or "",
        "time_limit": clock(time_limit_seconds(test)) if test.time_limit else "",
        "custom_mounts": (*test.extra_container_mounts, *code) if image.kind == "sqsh" else (),
        "detach": True,
        "packager": "none" if "--packager" in known else "",
    }
    hydra = [_override(key, value) for key, value in _overrides(test, values, folder).items()]
    _check_workspace(image, attempt_dir)
    return LaunchPlan(
        run_key=spec.run_key,
        attempt=attempt,
        attempt_dir=attempt_dir,
        argv=_argv(checkout.environment.python, bridge / launcher_of(test), values, hydra, known),
        cwd=bridge,
        environment=_environment(test, site.cluster, attempt_dir),
        secret_environment=test.secrets,
        sbatch_args=(*site_options(site.cluster), *test.sbatch_args),
        nodes=nodes_for(num_gpus(test), per_node),
        tasks_per_node=per_node,
        time_limit_seconds=time_limit_seconds(test),
        max_steps=spec.test.max_steps,
        output_dir=folder,
        checkpoint_dir=Path(values["save_dir"]) if test.cmd_args.get("save_dir") else None,
        warnings=tuple(_warnings(test, site.cluster, image, per_node)),
    )


def placeholder_plan(spec: RunSpec, site: Site, limits: ClusterLimits | None = None) -> LaunchPlan:
    """Plan a run without a checkout: the version comes from a pin that looks like a tag, paths are placeholders.

    Raises:
        InvalidInput: As for `make_launch_plan`, by the flag table of that version.
    """
    bridge, nemo_run = spec.test.megatron_bridge, spec.test.nemo_run_repo
    # A real checkout is named by its commit, so whatever a branch is called is passed on.
    folder = re.sub(r"[^A-Za-z0-9._/-]", "_", bridge.commit)
    checkout = Checkout(
        megatron_bridge=PinnedRepository(
            url=bridge.url,
            ref=bridge.commit,
            commit="0" * 40,
            path=PLACEHOLDER / "checkouts" / "Megatron-Bridge" / folder,
        ),
        nemo_run=PinnedRepository(
            url=nemo_run.url, ref=nemo_run.commit, commit="0" * 40, path=PLACEHOLDER / "checkouts" / "Run"
        ),
        environment=LauncherEnvironment(python=PLACEHOLDER / "envs" / "launcher" / "bin" / "python", digest=""),
    )
    reference = str(spec.test.cmd_args.get("container_image", ""))
    image = Image(kind="none") if reference == "none" else Image(kind="sqsh", path=PLACEHOLDER / "images/image.sqsh")
    attempt_dir = PLACEHOLDER / "runs" / spec.run_key / "a1"
    known = known_in(version_for_pin(bridge.commit))
    return make_launch_plan(spec, checkout, image, limits or ClusterLimits(), site, 1, attempt_dir, known=known)


def launcher_version(known: KnownFlags) -> Version:
    """The oldest release that has all the flags which a launcher is known to have."""
    return max((flag.first for flag in FLAGS if flag.option in known), default=V0_3_0)


def _check_test(test: TestDefinition, known: KnownFlags, cluster: ClusterSettings) -> None:
    problems = [*unknown_flags(test, known), *wrong_choices(test, known), *unsafe_values(test, launcher_version(known))]
    problems += [
        f"env_vars.{name} of {cluster.name}: {value!r} {reason}"
        for name, value in cluster.env_vars.items()
        if (reason := why_unsafe_variable(name, value))
    ]
    if problems:
        raise InvalidInput(
            "the pinned launcher cannot run this test",
            subject=f"{test.source or test.id} at {test.megatron_bridge.commit}",
            violations=problems,
        )


def _argv(
    python: Path, launcher: Path, values: Mapping[str, Any], hydra: Sequence[str], known: KnownFlags
) -> tuple[str, ...]:
    words = list(_words(values, known))
    carried = [word for flag in FLAGS if flag.format == "escaped" for word in written(flag, values.get(flag.field, ""))]
    carried += [values.get(_KEPT_BY_LAUNCHER, "")]
    _check_words((str(launcher), *words), {*values.get("custom_bash_cmds", ()), *carried}, why_unsafe)
    _check_words(hydra, set(), why_unsafe_escaped)
    return (str(python), str(launcher), *words, *map(escaped, hydra))


def _words(values: Mapping[str, Any], known: KnownFlags) -> Iterator[str]:
    """Every flag with a value, in the table's order."""
    for flag in FLAGS:
        words = written(flag, values[flag.field]) if flag.field in values else ()
        if words and flag.option not in known:
            raise InvalidInput(
                f"the pinned launcher has no flag {flag.option}, which every run needs",
                subject=flag.field,
                advice="Pin a Megatron-Bridge commit from v0.3.0 on",
            )
        yield from words


def _overrides(test: TestDefinition, values: Mapping[str, Any], folder: Path | None) -> dict[str, str]:
    """The Hydra overrides: TensorBoard and W&B switched on unless the test switches them off, then the test's own."""
    given = test.extra_cmd_args
    taken = {key.lstrip("+~") for key in given}
    output = folder or JOB_FOLDER
    added = {"logger.tensorboard_dir": f"{output}/tb_logs", **_LOGGING, **_wandb(test, values, f"{output}/wandb")}
    return {key: value for key, value in added.items() if key not in taken} | dict(given)


def _wandb(test: TestDefinition, values: Mapping[str, Any], folder: str) -> dict[str, str]:
    """W&B's names as overrides: a performance recipe takes its flags only beside a key, and that is in no argv."""
    given = {field: wandb_text(str(values[field])) for field in WANDB if values.get(field)}
    named = {"wandb_save_dir": folder, **given}
    is_whole = "wandb_project_name" in named and "wandb_experiment_name" in named
    if "WANDB_API_KEY" not in test.secrets or test.cmd_args.get("use_recipes") or not is_whole:
        return {}
    texts = {WANDB[field]: text for field in WANDB if (text := named.get(field)) is not None}
    return texts if len(texts) == len(named) else {}


def wandb_text(name: str) -> str | None:
    """A name as the value of an override that Hydra reads as this text; None where no spelling does."""
    value = hydra_value(name)
    if isinstance(value, str):
        return None if unreadable(name) else name
    # 2026 is a number to Hydra, and so are 1.10 and 1e5, which it would write in another way.
    return f"str({name})" if str(value).lower() == name else None


def _output_arguments(spec: RunSpec, folder: Path | None, attempt_name: str) -> dict[str, Any]:
    """The fields of the launcher that decide where and when the run writes; they replace the test's own.

    A directory that the test names gets the attempt appended, so that no earlier run's checkpoint is resumed.
    """
    given = spec.test.cmd_args
    fields: dict[str, Any] = {}
    for field in ("save_dir", "wandb_save_dir"):
        if given.get(field):
            fields[field] = f"{str(given[field]).rstrip('/')}/{attempt_name}"
    if not given.get("save_config_filepath"):
        fields["save_config_filepath"] = f"{folder or JOB_FOLDER}/configs/ConfigContainer.yaml"
    if spec.test.harvest.checkpoint != "none" and not given.get("save_interval"):
        fields["save_interval"] = spec.test.max_steps or RECIPE_STEPS
    saves = "save_interval" in fields or bool(given.get("save_interval"))
    if saves and folder is not None and "save_dir" not in fields:
        fields["save_dir"] = f"{folder}/checkpoints"
    return fields


def _variables(test: TestDefinition, cluster: ClusterSettings, known: KnownFlags) -> dict[str, list[str]]:
    """The cluster's and the test's variables, each carried whole: by -E where the launcher has it, else exported."""
    variables = variables_of(test, cluster)
    if "HF_TOKEN" in test.secrets and not test.cmd_args.get("offline"):
        # The launcher's own -hf does this as well: a token is of no use to a library that stays offline.
        variables.setdefault("TRANSFORMERS_OFFLINE", "0")
    fields: dict[str, list[str]] = {}
    for name in sorted(variables):
        value = variables[name]
        if "-E" in known and not expands(value):
            fields.setdefault("env", []).append(f"{name}={value}")
        else:
            # Only a command in the container sees the variables of the container. And v0.3 has no -E but -ce, which
            # takes no comma and no equals sign; an export takes both, as CloudAI found.
            fields.setdefault("custom_bash_cmds", []).append(f"export {name}={value}")
    return fields


def _check_words(words: Iterable[str], known_good: set[str], check: Callable[[str], str | None]) -> None:
    """Refuse words of this site, such as paths, that the batch script would alter."""
    problems = [f"{word!r} {reason}" for word in words if word not in known_good and (reason := check(word))]
    if problems:
        raise InvalidInput(
            "a path or setting would be altered by the launcher's batch script",
            advice="Use a workspace and settings without special characters",
            violations=problems,
        )


def check_workspace(workspace: Path) -> None:
    """Refuse a workspace whose path, which is in almost every word, the launcher's batch script would alter.

    Raises:
        InvalidInput: White space, a quote or another character that is not passed on.
    """
    if reason := why_unsafe(str(workspace.absolute())):
        raise InvalidInput(f"its path {reason}", subject=str(workspace), advice="Choose another workspace")


def _check_workspace(image: Image, attempt_dir: Path) -> None:
    """Without a container NeMo-Run replaces "/nemo_run" in its whole batch script, also inside a longer path."""
    if image.kind == "none" and JOB_FOLDER in str(attempt_dir):
        raise InvalidInput(
            f"the workspace's path contains {JOB_FOLDER}, which NeMo-Run would replace in the batch script",
            subject=str(attempt_dir),
            advice="Choose another workspace",
        )


def _environment(test: TestDefinition, cluster: ClusterSettings, attempt_dir: Path) -> dict[str, str]:
    variables = variables_of(test, cluster)
    runtime = {name: variables[name] for name in _CONTAINER_RUNTIME if name in variables}
    return {
        **runtime,
        "NEMORUN_HOME": str(attempt_dir / LAUNCHER_HOME),
        "NIGHTBRIDGE_ATTEMPT": str(attempt_dir),
        "COLUMNS": "400",  # rich wraps what NeMo-Run prints at 80 columns otherwise
        "PYTHONDONTWRITEBYTECODE": "1",  # the checkout is shared and must stay unmodified
    }


def _warnings(test: TestDefinition, cluster: ClusterSettings, image: Image, per_node: int) -> Iterator[str]:
    if (gpus := test.cmd_args.get("gpus_per_node")) and gpus != per_node:
        yield f"cmd_args.gpus_per_node is {gpus}, but {cluster.name} has {per_node}: using {per_node}"
    if unmounted := [repo.url for repo in test.git_repos if repo != test.megatron_bridge]:
        yield f"neither cloned nor mounted, only Megatron-Bridge is: {', '.join(unmounted)}"
    if image.kind == "none" and test.extra_container_mounts:
        yield "without a container nothing is mounted: extra_container_mounts has no effect"
    if cluster.kind != "local" and not cluster.account:
        yield f"{cluster.name} has no account, so {NO_ACCOUNT!r} is used; Slurm may refuse it"


# --- what a launcher does not take -----------------------------------------------------------------------------------

_NUMBERS = (bool, int, float)
"""Written in characters that are safe."""

_SPELLINGS = {
    ("cuda_graph_impl", "full_iteration"): '; write cuda_graph_impl = "local" and cuda_graph_scope = "full_iteration"'
}
"""How the launcher wants what Megatron-Core has another word for."""


def unknown_flags(test: TestDefinition, known: KnownFlags) -> Iterator[str]:
    """Fields whose flag that launcher does not have, each with the reason."""
    for field, value in test.cmd_args.items():
        flag = TEST_FLAGS[field]
        if flag.option and flag.option not in known and FORMATS[flag.format](flag.option, value):
            since = f"; it exists from {flag.first} on" if flag.first > (0, 3, 0) else ""
            yield f"cmd_args.{field}: the launcher has no flag {flag.option}{since}"


def wrong_choices(test: TestDefinition, known: KnownFlags) -> Iterator[str]:
    """Fields whose value that launcher does not allow, each with the values it does."""
    for field, value in test.cmd_args.items():
        flag = TEST_FLAGS[field]
        allowed = known.get(flag.option)
        if allowed is None or value == "":
            continue
        for word in words_of(flag, value):
            # The launcher itself lower-cases this one.
            if word not in allowed and not (field == "domain" and word.lower() in allowed):
                lower = {one.lower(): one for one in allowed}
                nearest = difflib.get_close_matches(word.lower(), lower, n=1)
                hint = _SPELLINGS.get((field, word)) or (f"; did you mean {lower[nearest[0]]!r}?" if nearest else "")
                yield f"cmd_args.{field}: {word!r} is not one of {', '.join(allowed)}{hint}"


_KEPT_BY_LAUNCHER = "additional_slurm_params"
"""Read by the launcher alone from v0.5.0 on, in no batch script: its own separator, a semicolon, is safe there."""


def unsafe_values(test: TestDefinition, version: Version) -> Iterator[str]:
    """Texts that would not reach the job of a version's launcher as they are written, each with the reason."""
    for field, value in test.cmd_args.items():
        if isinstance(value, _NUMBERS):
            continue
        is_kept = field == _KEPT_BY_LAUNCHER and version >= V0_5_0
        for part in str(value).split(";") if is_kept else [value]:
            for word, problem in _unsafe_words(field, tuple(part) if isinstance(part, list) else part):
                yield f"cmd_args.{field}: {word!r} {problem}"
    for key, text in test.extra_cmd_args.items():
        if reason := why_unsafe(key.removeprefix("~")) or why_unsafe_escaped(text):
            yield f"extra_cmd_args.{key}: {_override(key, text)!r} {reason}"
    for mount in test.extra_container_mounts:
        if reason := why_unsafe(mount) or ("contains a comma: mounts are separated by it" if "," in mount else None):
            yield f"extra_container_mounts: {mount!r} {reason}"
    for name, text in test.extra_env_vars.items():
        if reason := why_unsafe_variable(name, text):
            yield f"extra_env_vars.{name}: {text!r} {reason}"


@lru_cache(maxsize=4096)
def _unsafe_words(field: str, value: str | tuple[object, ...]) -> tuple[tuple[str, str], ...]:
    flag = TEST_FLAGS[field]
    check = why_unsafe_escaped if flag.format == "escaped" else why_unsafe
    return tuple((word, reason) for word in words_of(flag, value) if (reason := check(word)))


def _override(key: str, value: str) -> str:
    return f"{key}={value}" if value else key
