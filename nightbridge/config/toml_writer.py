"""Test files that are written: a scenario back to TOML, and a published launch script of two grids as a test.

A scenario has every test written out whole, so that reading it gives the same tests again. Overrides are laid over,
older spellings are the current ones, directories of tests are not needed. A secret stays a reference. What has no
effect is not written. A TOML library would replace `toml_value` alone: which keys a test needs, and which are defaults,
is decided here.
"""

import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from nightbridge.config.arguments import CMD_ARGS
from nightbridge.config.definitions import NEMO_RUN
from nightbridge.config.scenarios import load, runs
from nightbridge.errors import InvalidInput
from nightbridge.launch.hetero import ENCODER, LANGUAGE_MODEL, OFFSET, PROGRAMS, SHARDS
from nightbridge.launch.hetero_arguments import PASSED, HeteroArguments, option_of_field
from nightbridge.launch.launch_plan import placeholder_plan
from nightbridge.launch.parser_source import newest_parser
from nightbridge.launch.shell_script import Launch, read_launch
from nightbridge.models import Model, Scenario, Site, SweepAxis, TestDefinition
from nightbridge.models.series import number_in

_VARIABLES = "extra_env_vars"


def scenario_toml(scenario: Scenario) -> str:
    """Write a scenario's valid tests as a scenario file; of an invalid one there is nothing to write."""
    tests = "\n".join(_entry_toml(test) for test in scenario.tests)
    return f"name = {toml_value(scenario.name)}\n\n{tests}"


def toml_value(value: Any) -> str:
    """Text, a number, a boolean, or a mapping, list or tuple of such as TOML, tables inline."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_quoted(key)} = {toml_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    if isinstance(value, bool):
        return "true" if value else "false"
    return _quoted(value) if isinstance(value, str) else repr(value)


def _quoted(text: str) -> str:
    # JSON escapes what TOML wants escaped, but for one control character.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _entry_toml(test: TestDefinition) -> str:
    """The test's own keys first, then its tables; empty ones and defaults are left out, but for the required one."""
    keys = {key: value for key, value in _keys(test).items() if value not in (None, "", (), [])}
    tables = {key: value for key, value in _tables(test).items() if value or key == CMD_ARGS}
    lines = ["[[Tests]]", *_assignments(keys)]
    for repository in test.git_repos:
        lines += ["", "[[Tests.git_repos]]", *_assignments(repository.model_dump(exclude_none=True))]
    for name, table in tables.items():
        lines += ["", f"[Tests.{name}]", *_assignments(table)]
    for dependency in test.dependencies:
        lines += ["", "[[Tests.dependencies]]", *_assignments(dependency.model_dump())]
    return "\n".join(lines) + "\n"


def _assignments(table: Mapping[str, Any]) -> Iterator[str]:
    for key, value in table.items():
        yield f"{key if re.fullmatch(r'[A-Za-z0-9_-]+', key) else _quoted(key)} = {toml_value(value)}"


def _keys(test: TestDefinition) -> dict[str, Any]:
    nodes = next((axis.values for axis in test.axes if axis.field == "num_nodes"), None)
    return {
        "id": test.id,
        "name": test.name,
        "description": test.description,
        "test_template_name": test.test_template_name,
        "time_limit": test.time_limit,
        "iterations": test.iterations,
        "canary": test.canary,
        "compat": test.compat,
        "num_nodes": nodes,
        # Nodes and excluded nodes are options of sbatch by now.
        "extra_srun_args": shlex.join(test.sbatch_args),
        "extra_container_mounts": test.extra_container_mounts,
    }


def _tables(test: TestDefinition) -> dict[str, dict[str, Any]]:
    axes = (*test.axes, *test.drawn)
    return {
        "nemo_run_repo": {} if test.nemo_run_repo == NEMO_RUN else test.nemo_run_repo.model_dump(exclude_none=True),
        CMD_ARGS: {**test.cmd_args, **dict(_swept(axes, CMD_ARGS))},
        _VARIABLES: {
            **test.extra_env_vars,
            **dict(_swept(axes, _VARIABLES)),
            **{name: f"{ref.source}:{ref.name}" for name, ref in test.secrets.items()},
        },
        "extra_cmd_args": dict(test.extra_cmd_args),
        "harvest": test.harvest.model_dump(mode="json", exclude_defaults=True),
        "gate": test.gate.model_dump(mode="json", exclude_defaults=True),
        "sweep": test.sweep.model_dump(mode="json", exclude_defaults=True),
        "env_params": {axis.name: {"weights": axis.weights} if axis.weights else {} for axis in test.drawn},
    }


def _swept(axes: Iterable[SweepAxis], table: str) -> Iterator[tuple[str, list[Any]]]:
    for axis in axes:
        section, _, name = axis.field.partition(".")
        if section == table:
            yield name, list(axis.values)


# --- a launch script as a test, and both command lines compared ------------------------------------------------------

_FIELDS = {option_of_field(field): field for field in PASSED}
_GRIDS = {
    **{option: ("encoder", axis) for axis, option in ENCODER.items()},
    **{option: ("language_model", axis) for axis, option in {**LANGUAGE_MODEL, **SHARDS}.items()},
}
_DECIDED = frozenset({"--tensorboard-dir", OFFSET})
"""What a run decides by itself: where its output goes, and at which rank the language model begins."""

Options = dict[str, str]
"""Options by name, each with its values as one text."""


class ImportedScript(Model):
    """A launch script as a test file's text, and the options that it gives its program."""

    toml: str
    options: Options


class OptionsDiff(Model):
    """The options of a test beside those of the script which it comes from; `different` ones have both values."""

    only_test: tuple[str, ...]
    only_script: tuple[str, ...]
    different: tuple[str, ...]


def import_script(script: Path, image: str, given: Mapping[str, str]) -> ImportedScript:
    """Turn a launch script into a test file's text.

    Args:
        script: A bash script that starts a program of two grids with torchrun.
        image: Container image of the test; a script names none.
        given: Variables of the environment that the script asks for.

    Raises:
        InvalidInput: The script starts nothing of the kind, or a value in it cannot be determined.
    """
    launch = read_launch(script, given)
    if launch.program not in PROGRAMS:
        raise InvalidInput(
            f"starts {launch.program}, which has no two grids",
            subject=str(script),
            advice=f"Import a script that starts {' or '.join(PROGRAMS)}",
        )
    options = _options(launch.arguments, script)
    return ImportedScript(toml="\n".join(_lines(script, image, launch, options)) + "\n", options=options)


def compare_command_lines(imported: ImportedScript, file: Path) -> OptionsDiff:
    """Read a test file, plan its run, and compare what the program gets with what the script gives it.

    Raises:
        InvalidInput: The file cannot be a test; every violation is reported.
    """
    scenario = load(file)
    if scenario.invalid:
        raise InvalidInput(
            "cannot be a test as it stands",
            subject=str(file),
            advice="Fix these lines, or the script",
            violations=scenario.invalid[0].violations,
        )
    (spec,) = runs(scenario, "import")
    here = _options(_program_words(placeholder_plan(spec, Site()).batch_script or ""), file)
    there = imported.options
    return OptionsDiff(
        only_test=tuple(sorted(here.keys() - there.keys())),
        only_script=tuple(sorted(there.keys() - here.keys())),
        different=tuple(
            f"{name} {there[name]} became {here[name]}"
            for name in sorted(here.keys() & there.keys())
            if not _same(here[name], there[name])
        ),
    )


def _options(words: Iterable[str], script: Path) -> Options:
    """The options of a command line; one that is given again replaces what it was, as for argparse."""
    found: dict[str, list[str]] = {}
    name = ""
    for word in words:
        if word.startswith("-") and not re.fullmatch(r"-\d+(\.\d+)?(e-?\d+)?", word):
            name, _, value = word.partition("=")
            found[name] = [value] if value else []
        elif not name:
            raise InvalidInput(f"the program gets {word!r}, which is no option", subject=str(script))
        else:
            found[name].append(word)
    return {option: values[0] if len(values) == 1 else shlex.join(values) for option, values in found.items()}


def _same(one: str, other: str) -> bool:
    try:
        return one == other or float(one) == float(other)
    except ValueError:
        return False


def _program_words(batch_script: str) -> list[str]:
    match = re.search(r"bash -c (.*)\Z", batch_script, re.DOTALL)
    words = shlex.split(shlex.split(match[1])[0]) if match else []
    return words[next(i for i, word in enumerate(words) if word.endswith(".py")) + 1 :]


def _lines(script: Path, image: str, launch: Launch, options: Options) -> Iterator[str]:
    grids: dict[str, dict[str, Any]] = {}
    arguments: dict[str, Any] = {"container_image": image}
    if launch.program != PROGRAMS[0]:
        arguments["program"] = launch.program
    extra: Options = {}
    for name, value in options.items():
        positive = f"--{name.removeprefix('--no-')}"
        if name in _GRIDS:
            grid, axis = _GRIDS[name]
            grids.setdefault(grid, {})[axis] = number_in(value)
        elif name in _FIELDS:
            arguments[_FIELDS[name]] = number_in(value) if value else True
        elif name.startswith("--no-") and positive in _FIELDS and name not in newest_parser().options:
            arguments[_FIELDS[positive]] = False
        elif name not in _DECIDED:
            extra[name.removeprefix("--")] = value
    yield f"# From {script.name}."
    yield ""
    yield f"name = {toml_value(script.stem)}"
    yield 'test_template_name = "HeteroMIMO"'
    yield from _table("cmd_args", {key: _text_where_asked(key, value) for key, value in arguments.items()})
    for grid, sizes in grids.items():
        yield from _table(f"cmd_args.{grid}", sizes)
    yield from _table("extra_cmd_args", extra)
    yield from _table("extra_env_vars", launch.variables)
    yield from ("", "[[git_repos]]", 'url = "https://github.com/NVIDIA/Megatron-LM.git"', 'commit = "main"')


def _text_where_asked(key: str, value: Any) -> Any:
    annotation = str(HeteroArguments.model_fields[key].annotation)
    return value if isinstance(value, bool) or "int" in annotation or "float" in annotation else str(value)


def _table(name: str, values: Mapping[str, Any]) -> Iterator[str]:
    if values:
        yield from ("", f"[{name}]")
        yield from _assignments(values)
