"""A scenario back to TOML: every test written out whole, so that reading it gives the same tests again.

Overrides are laid over, older spellings are the current ones, directories of tests are not needed. A secret stays a
reference. What has no effect is not written. A TOML library would replace `toml_value` alone: which keys a test
needs, and which are defaults, is decided here.
"""

import json
import shlex
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from nightbridge.config.arguments import CMD_ARGS
from nightbridge.config.definitions import NEMO_RUN
from nightbridge.models import Scenario, SweepAxis, TestDefinition

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


def _assignments(table: Mapping[str, Any]) -> Iterable[str]:
    return (
        f"{key if key.isidentifier() and key.isascii() else _quoted(key)} = {toml_value(value)}"
        for key, value in table.items()
    )


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
