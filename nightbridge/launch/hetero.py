"""Heterogeneous-parallel MIMO training: RunSpec, Checkout and Image to a `LaunchPlan` with a batch script of its own.

Megatron-LM's `examples/mimo` has no launcher that submits: its program is started by torchrun. Flags and grid
arguments as in Megatron-LM's `examples/mimo/training/args.py` and `megatron/training/arguments.py`, mid 2026.
"""

import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nightbridge.errors import InvalidInput
from nightbridge.launch.flags import FORMATS, expands
from nightbridge.launch.hetero_arguments import DEFAULT_GPUS_PER_NODE, PASSED, Grids, grids_of, option_of_field
from nightbridge.launch.parser_source import Option, ProgramParser, flags_in, newest_parser, read_parser
from nightbridge.launch.resources import (
    gpus_per_node,
    nodes_for,
    num_gpus,
    site_options,
    time_limit_seconds,
    variables_of,
)
from nightbridge.launch.versions import HEAD
from nightbridge.models import (
    LAUNCHER_HOME,
    ClusterLimits,
    Image,
    LaunchPlan,
    PinnedRepository,
    RunSpec,
    Site,
    TestDefinition,
)

PROGRAMS = ("examples/mimo/pretrain_mimo.py", "examples/mimo/train_hetero.py")
"""Where Megatron-LM keeps the program, the newest path first."""

GRID_PARSERS = ("examples/mimo/training/args.py", "examples/mimo/training/hetero/args.py")
"""Where the flags of the grids are declared."""

STANDALONE = "examples/mimo/train_hetero.py"
"""The program whose parser is its own, so that it refuses every flag of Megatron-LM that it does not name itself."""

_STANDALONE_PARSERS = ("examples/mimo/training/hetero/args.py", "examples/mimo/model_providers/*.py")

# What only a node of the running job knows. The port is torchrun's own default; a job has its nodes for itself.
_RENDEZVOUS = ('--node-rank="$SLURM_NODEID"', '--master-addr="$NIGHTBRIDGE_FIRST_NODE"', "--master-port=29500")

JOB = "hetero"
"""Name of the job's directory below the attempt's `experiments`, and a part of its logs' names."""


@dataclass(frozen=True, slots=True)
class _Program:
    """A program of the pinned commit, and its parser; None where that is not known."""

    path: str
    parser: ProgramParser | None

    @property
    def options(self) -> Mapping[str, Option]:
        """What it takes; of a program that has not been read, what a recent main does."""
        return (self.parser or newest_parser()).options

    def option_of_field(self, field: str) -> str:
        """The option of a key: the standalone program calls some of them by the key's own name."""
        option, own = option_of_field(field), f"--{field.replace('_', '-')}"
        return own if own in self.options and option not in self.options else option

    def words(self, option: str, values: Sequence[str]) -> Sequence[str]:
        """The words that an option's values are passed as."""
        known = self.options.get(option)
        try:
            return known.words(values) if known else values
        except ValueError as error:
            raise _unclosed(values[0], option, error) from error


_AXES = {"tp": "tp", "cp": "cp", "pp": "pp", "dp": "dp", "ep": "ep", "etp": "expt-tp"}
ENCODER = {axis: f"--encoder-{name}" for axis, name in _AXES.items()}
SHARDS = {
    "weight_shards": "--tensor-parallel-num-weight-shards",
    "expert_weight_shards": "--expert-tensor-parallel-num-weight-shards",
}
LANGUAGE_MODEL = {axis: f"--llm-{name}" for axis, name in _AXES.items()}

_NEGATED = frozenset({"dynamic_resolution"})
"""Switches of which `false` is written as well, as `--no-`."""

OFFSET = "--llm-offset"

_LOGGING = ("--log-timers-to-tensorboard", "--log-memory-to-tensorboard", "--log-throughput", "--log-memory")
"""Megatron-LM writes step time, memory and TFLOP/s to its log and event files only on request; as far as it can."""

_TENSORBOARD = "--tensorboard-dir"
_NO_CURVES = f"the pinned program has no {_TENSORBOARD}: its curves come from the log, which rounds"

_OWN_OPTIONS = {option for grid in (ENCODER, LANGUAGE_MODEL, SHARDS) for option in grid.values()}
_OWN_OPTIONS |= {*map(option_of_field, PASSED), "--num-moe-experts", OFFSET, _TENSORBOARD}


def option_of(key: str) -> str:
    """The option that a key of `[extra_cmd_args]` names, which may be written with its dashes or without."""
    return key if key.startswith("-") else f"--{key}"


def taken_options(test: TestDefinition) -> tuple[str, ...]:
    """Keys of `[extra_cmd_args]` that name what `[cmd_args]` or the grids decide."""
    return tuple(key for key in test.extra_cmd_args if option_of(key) in _OWN_OPTIONS)


def hetero_plan(
    spec: RunSpec,
    code: PinnedRepository,
    image: Image,
    limits: ClusterLimits,
    site: Site,
    attempt: int,
    attempt_dir: Path,
) -> LaunchPlan:
    """Plan one attempt. Where the checkout is not there yet, the newest published program is assumed.

    Raises:
        InvalidInput: The pinned code has no such program, or its program cannot make one of the grids, or has a parser
            of its own that lacks a flag or a choice; all of these are reported.
    """
    test = spec.test
    program = _program(test, code)
    per_node = gpus_per_node(test, HEAD, site.cluster, limits) or DEFAULT_GPUS_PER_NODE
    nodes = nodes_for(num_gpus(test), per_node)
    processes = per_node if nodes > 1 else num_gpus(test)
    job = attempt_dir / LAUNCHER_HOME / "experiments" / JOB
    output = attempt_dir / "output"
    given = variables_of(test, site.cluster)
    mounted = str(code.path) if image.kind == "none" else (test.megatron_bridge.mount_as or str(code.path))
    script = _batch_script(
        directives=_directives(test, site, limits, nodes, per_node, job),
        variables=_variables(test, given, mounted),
        expanded={name for name, value in given.items() if expands(value)},
        srun_options=_srun_options(test, code.path, mounted, image, attempt_dir),
        torchrun=(*_torchrun(test, image), f"--nnodes={nodes}", f"--nproc-per-node={processes}"),
        program=(program.path, *_program_words(spec, code, output, program)),
        log_prefix=str(job / f"log-{JOB}_"),
        output=output,
    )
    return LaunchPlan(
        run_key=spec.run_key,
        attempt=attempt,
        attempt_dir=attempt_dir,
        argv=("sbatch", "--parsable", str(job / "train.sh")),
        batch_script=script,
        cwd=code.path,
        environment={"NIGHTBRIDGE_ATTEMPT": str(attempt_dir)},
        secret_environment=test.secrets,
        sbatch_args=(*site_options(site.cluster), *test.sbatch_args),
        nodes=nodes,
        tasks_per_node=per_node,
        time_limit_seconds=time_limit_seconds(test),
        max_steps=spec.test.max_steps,
        output_dir=output,
        checkpoint_dir=Path(_save_dir(spec, output)) if test.cmd_args.get("save_dir") else None,
        warnings=() if _TENSORBOARD in program.options else (_NO_CURVES,),
    )


def _directives(
    test: TestDefinition, site: Site, limits: ClusterLimits, nodes: int, per_node: int, job: Path
) -> Iterator[tuple[str, str]]:
    """Sbatch's options as the script's own lines; GPUs are requested where the cluster counts them."""
    yield "nodes", str(nodes)
    yield "ntasks-per-node", "1"
    if limits.gpus_per_node:
        yield "gpus-per-node", str(per_node)
    seconds = time_limit_seconds(test)
    # Slurm counts whole minutes, and rounds up.
    yield "time", str(-(-seconds // 60))
    if site.cluster.account:
        yield "account", site.cluster.account
    if site.cluster.partition:
        yield "partition", site.cluster.partition
    yield "output", f"{job}/sbatch_{JOB}_%j.out"
    yield "open-mode", "append"


def _variables(test: TestDefinition, given: Mapping[str, str], code: str) -> dict[str, str]:
    return {
        # Megatron's overlap of communication and computation relies on one hardware queue.
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        **given,
        # A path of the cluster's would hide the code.
        "PYTHONPATH": test.extra_env_vars.get("PYTHONPATH", code),
    }


def _srun_options(test: TestDefinition, code: Path, mounted: str, image: Image, attempt_dir: Path) -> list[str]:
    """The options of pyxis, or the working directory without a container."""
    directory = shlex.quote(mounted)
    if image.kind == "none":
        return [f"--chdir={directory}"]
    mounts = [f"{code}:{mounted}", f"{attempt_dir}:{attempt_dir}"]
    mounts += test.extra_container_mounts
    if save_dir := test.cmd_args.get("save_dir"):
        mounts.append(f"{save_dir}:{save_dir}")
    return [
        f"--container-image={shlex.quote(str(image.path))}",
        f"--container-mounts={shlex.quote(','.join(mounts))}",
        f"--container-workdir={directory}",
        "--no-container-mount-home",
    ]


def _program_words(spec: RunSpec, code: PinnedRepository, output: Path, program: _Program) -> Iterator[str]:
    """The program's options: grids, `[cmd_args]`, `[extra_cmd_args]`, and what it logs."""
    test = spec.test
    arguments = tuple(_arguments(test, _outputs(spec, output), program))
    if program.parser is not None:
        _check_known(test, arguments, program.parser)
    yield from _grid_words(grids_of(test), _grid_flags(code))
    for name, *values in arguments:
        words = program.words(name, values)
        yield from FORMATS["value"](name, words[0]) if len(words) == 1 else (name, *words)
    if _TENSORBOARD in program.options:
        yield from (_TENSORBOARD, f"{output}/tb_logs")
    written = set(map(option_of, test.extra_cmd_args))
    yield from (option for option in _LOGGING if option in program.options and option not in written)


def program_arguments(test: TestDefinition) -> tuple[tuple[str, ...], ...]:
    """The options of `[cmd_args]` and `[extra_cmd_args]` as a recent main is given them, each with its value."""
    return tuple(_arguments(test, {}, _Program(test.cmd_args.get("program") or PROGRAMS[0], None)))


def _torchrun(test: TestDefinition, image: Image) -> list[str]:
    """The command that starts the ranks. Without a container its path, like a repository's, is taken from here."""
    text = test.cmd_args.get("torchrun", "torchrun")
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise _unclosed(text, "cmd_args.torchrun", error) from error
    if image.kind == "none" and "/" in words[0]:
        words[0] = str(Path(words[0]).absolute())
    return words


def _unclosed(text: str, subject: str, error: ValueError) -> InvalidInput:
    return InvalidInput(f"{text!r} cannot be split into words: {error}", subject=subject, advice="Close the quote")


def _program(test: TestDefinition, code: PinnedRepository) -> _Program:
    named = test.cmd_args.get("program")
    candidates = (named,) if named else PROGRAMS
    if not code.path.is_dir():
        return _Program(str(candidates[0]), None)
    for candidate in candidates:
        if (code.path / candidate).is_file():
            return _read_program(str(candidate), code)
    raise InvalidInput(
        f"the pinned commit has no {' or '.join(candidates)}",
        subject=f"{code.url} at {code.commit[:12]}",
        advice="Pin a Megatron-LM commit that has it, or name it with cmd_args.program",
    )


def _read_program(program: str, code: PinnedRepository) -> _Program:
    """A program with its parser, which is its own or Megatron-LM's.

    Which of the two `train_hetero.py` has depends on the commit: only its first versions parse by themselves.
    """
    own = code.path / _STANDALONE_PARSERS[0]
    if program != STANDALONE or not own.is_file() or "ArgumentParser(" not in own.read_text(encoding="utf-8"):
        return _Program(program, read_parser(code.path, program))
    files = [file for pattern in _STANDALONE_PARSERS for file in sorted(code.path.glob(pattern))]
    options = {name: option for file in files for name, option in flags_in(file).items()}
    return _Program(program, ProgramParser(options=options))


def _check_known(test: TestDefinition, given: tuple[tuple[str, ...], ...], parser: ProgramParser) -> None:
    problems = [f"the pinned program rejects {problem}" for problem in parser.problems(given)]
    if missing := parser.missing(given):
        problems.append(f"the pinned program needs {', '.join(missing)}")
    if problems:
        raise InvalidInput(
            "the pinned program rejects flags of this test",
            subject=test.source or test.id,
            advice="Change them, or pin a commit that takes them",
            violations=problems,
        )


def _grid_flags(code: PinnedRepository) -> Collection[str]:
    """The grid flags of the pinned program, read from its source."""
    for parser in GRID_PARSERS:
        if (code.path / parser).is_file():
            return flags_in(code.path / parser)
    return newest_parser().options


def _grid_words(of: Grids, known: Collection[str]) -> Iterator[str]:
    for name, grid, options in (
        ("encoder", of.encoder, ENCODER),
        ("language_model", of.language_model, LANGUAGE_MODEL),
    ):
        for axis, option in options.items() if grid else ():
            size = getattr(grid, axis)
            if option in known:
                yield from (option, str(size))
            elif size != 1:
                raise InvalidInput(
                    f"the pinned program has no flag {option}, so {axis} = {size} is not possible",
                    subject=f"cmd_args.{name}.{axis}",
                    advice="Leave it at 1, or pin a commit that has the flag",
                )
    if OFFSET in known:
        yield from (OFFSET, str(of.encoder.ranks if of.encoder else 0))


def _save_dir(spec: RunSpec, output: Path) -> str:
    """The test's directory with the run's name appended, so that no earlier run's checkpoint is resumed."""
    named = spec.test.cmd_args.get("save_dir")
    if not named:
        return f"{output}/checkpoints"
    return f"{str(named).rstrip('/')}/{spec.run_key}-{output.parent.name}"


def _outputs(spec: RunSpec, output: Path) -> dict[str, Any]:
    written = spec.test.cmd_args
    fields: dict[str, Any] = {}
    if spec.test.harvest.checkpoint != "none" or written.get("save_interval"):
        fields["save_interval"] = written.get("save_interval") or spec.test.max_steps
        fields["save_dir"] = _save_dir(spec, output)
    if written.get("train_samples"):
        # The program takes one of the two; samples take precedence.
        fields["max_steps"] = None
    return fields


def _arguments(test: TestDefinition, outputs: Mapping[str, Any], program: _Program) -> Iterator[tuple[str, ...]]:
    """The options of `[cmd_args]` and `[extra_cmd_args]`, each with its value if it takes one."""
    grid = grids_of(test).language_model
    yield from ((option, str(getattr(grid, key))) for key, option in SHARDS.items() if getattr(grid, key))
    values = {**test.cmd_args, **outputs}
    for field in PASSED:
        value = values.get(field)
        option = program.option_of_field(field)
        negated = f"--no-{option.removeprefix('--')}"
        if value is True:
            yield (option,)
        elif value is False:
            # Where nothing switches it off, it is off unless it is requested.
            if field in _NEGATED and (program.parser is None or negated in program.options):
                yield (negated,)
        elif value is not None:
            yield option, str(value)
    for key, text in test.extra_cmd_args.items():
        yield (option_of(key), text) if text else (option_of(key),)


# --- the batch script -------------------------------------------------------------------------------------------------


def _batch_script(
    *,
    directives: Iterable[tuple[str, str]],
    variables: Mapping[str, str],
    expanded: Collection[str],
    srun_options: Iterable[str],
    torchrun: Iterable[str],
    program: Iterable[str],
    log_prefix: str,
    output: Path,
) -> str:
    """Write a batch script that starts the program once on every node.

    Every word of the test is quoted, but for references to variables of the job in the values of those `expanded`.
    """
    # As NeMo-Run calls its logs.
    log = f'{shlex.quote(log_prefix)}%j_"${{SLURM_RESTART_COUNT:-0}}".out'
    command = ["exec", *map(shlex.quote, torchrun), *_RENDEZVOUS, *map(shlex.quote, program)]
    options = ["--ntasks-per-node=1", "--kill-on-bad-exit=1", f"--output={log}", *srun_options]
    return "\n".join(
        [
            "#!/bin/bash",
            *(f"#SBATCH --{option}={shlex.quote(value)}" for option, value in directives),
            "",
            "set -euo pipefail",
            "",
            *(
                f'export {name}="{value}"' if name in expanded else f"export {name}={shlex.quote(value)}"
                for name, value in sorted(variables.items())
            ),
            'NIGHTBRIDGE_FIRST_NODE=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
            "export NIGHTBRIDGE_FIRST_NODE",
            "",
            f"mkdir -p {shlex.quote(str(output))}",
            "",
            "srun \\",
            *(f"    {option} \\" for option in options),
            f"    bash -c {shlex.quote(' '.join(command))}",
            "",
        ]
    )
