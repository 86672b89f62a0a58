"""Writes the reference pages of the site from the code: MkDocs calls `on_files` when it builds.

Nothing of it is kept in a file, so it cannot be out of date.
"""

import inspect
import textwrap
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args, get_origin

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from nightbridge import blocks, errors, flows, models
from nightbridge.cli import main as cli
from nightbridge.config import schema, sites
from nightbridge.launch.flags import CHOICES, NO_EFFECT, TEST_FLAGS, Flag
from nightbridge.launch.hetero_arguments import HeteroArguments
from nightbridge.models.metrics import METRIC_BY_NAME
from nightbridge.report.queries import TestHistory, Verification
from nightbridge.rules.checking import RuleEntry, rule_entries

Cells = Sequence[str]


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the generated pages to the site."""
    for name, page in PAGES.items():
        files.append(File.generated(config, f"reference/{name}.md", content="\n".join(page())))
    return files


# --- configuration ---------------------------------------------------------------------------------------------------


def configuration() -> Iterator[str]:
    """Every table and key of test, scenario and site files."""
    yield "# Configuration\n"
    yield "Test and scenario files are TOML in CloudAI's format. Unknown keys are errors, with the line they stand on."
    yield "A list where a key takes one value is a sweep.\n"
    yield "## Test files\n"
    yield from _model_table(schema.TestTable)
    for name in ("git_repos", "harvest", "gate", "sweep", "dependencies", "training_report"):
        yield from _sub_table(schema.TestTable, name)
    yield "### [gate.golden_rules]\n"
    yield from _model_table(models.GoldenPolicy)
    yield "### [gate.reference_rules]\n"
    yield from _model_table(models.ReferencePolicy)
    yield "### [gate.limits]\n"
    yield "One table for each metric, such as `limits.tflops_per_gpu = { min = 600 }`.\n"
    yield from _model_table(models.Limits)
    yield "### Metrics\n"
    rows = [(f"`{metric.name}`", metric.label, metric.unit or "-") for metric in METRIC_BY_NAME.values()]
    yield from _table(("name", "metric", "unit"), rows)
    yield '### [cmd_args] of test_template_name = "MegatronBridge"\n'
    yield "Only keys that are written are passed to the launcher. Secrets travel in the environment instead.\n"
    yield from _table(("key", "option", "value", "versions"), (_flag_row(flag) for flag in TEST_FLAGS.values()))
    yield '### [cmd_args] of test_template_name = "HeteroMIMO"\n'
    yield from _model_table(HeteroArguments)
    yield "Each of `[cmd_args.encoder]` and `[cmd_args.language_model]` takes whole numbers for `nodes`, `tp`, `cp`,"
    yield "`pp`, `dp`, `ep` and `etp`.\n"
    yield "### Keys without effect\n"
    yield "CloudAI's files may hold them; nightbridge warns and continues.\n"
    ignored = {**schema.IGNORED, **{f"cmd_args.{key}": reason for key, reason in NO_EFFECT.items()}}
    yield from _table(("key", "reason"), ((f"`{key}`", reason) for key, reason in ignored.items()))
    yield "## Scenario files\n"
    yield "A scenario has a `name` and a `[[Tests]]` entry for each test. An entry has an `id`, and either `test_name`"
    yield "(a test file beside the scenario, in a `tests` folder there, or in `--tests-dir`) or a whole test. Any other"
    yield "key of a test file replaces the file's.\n"
    yield from _table(
        ("key without effect", "reason"), ((f"`{key}`", reason) for key, reason in schema.SCENARIO_IGNORED.items())
    )
    yield "## Site files\n"
    yield from _model_table(models.Site)
    for name in ("cluster", "store", "image_import", "harvest", "notify", "budget"):
        yield from _sub_table(models.Site, name)
    yield "### [store.retention]\n"
    yield from _model_table(models.RetentionPolicy)
    yield '### [contract."PATTERN"]\n'
    yield "Limits by metric, as in `[gate.limits]`, for every test whose id matches the pattern.\n"
    yield '### [successors."URL"]\n'
    yield from _model_table(models.Successor)
    yield "### Secrets\n"
    yield "A secret is written as `env:NAME`, `block:NAME` or `toml:FILE#key`: the place where its value is found.\n"
    yield "## CloudAI system files\n"
    yield "A CloudAI system file serves as a site file.\n"
    yield from _model_table(sites.CloudaiSystem)
    yield from _table(
        ("key without effect", "reason"), ((f"`{key}`", reason) for key, reason in sites.CLOUDAI_IGNORED.items())
    )


def _sub_table(model: type[BaseModel], name: str) -> Iterator[str]:
    inner = _model_in(model.model_fields[name].annotation)
    if inner is None:
        raise TypeError(f"{model.__name__}.{name} is no table")
    yield f"### [{name}]\n"
    if text := inspect.getdoc(inner):
        yield f"{text}\n"
    yield from _model_table(inner)


def _model_table(model: type[BaseModel]) -> Iterator[str]:
    own_first = sorted(model.model_fields.items(), key=lambda item: item[0] not in model.__annotations__)
    rows = [
        (f"`{name}`", _type(field.annotation), _default(field), _described(name, field)) for name, field in own_first
    ]
    yield from _table(("key", "type", "default", "meaning"), rows)


def _described(name: str, field: FieldInfo) -> str:
    if not field.description and name in METRIC_BY_NAME:
        return f"Widest band of the {METRIC_BY_NAME[name].label}, as a share."
    if not field.description and _model_in(field.annotation):
        return f"See `{name}` below."
    return field.description or ""


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value is None or value is PydanticUndefined or value in ((), [], {}, "") or isinstance(value, BaseModel):
        return ""
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


_PLAIN: Mapping[Any, str] = {
    str: "text",
    int: "whole number",
    float: "number",
    bool: "true or false",
    Path: "path",
    Any: "any value",
    models.SecretRef: "secret",
}


def _type(annotation: Any) -> str:
    """The name of a type, as somebody who writes TOML would call it."""
    if annotation in _PLAIN:
        return _PLAIN[annotation]
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is typing.Annotated:
        return _type(inner[0])
    if origin is typing.Literal:
        return ", ".join(f"`{value}`" for value in inner)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(_type(one) for one in inner if one is not type(None)))
    if origin in (tuple, list):
        return f"list of {_type(inner[0])}"
    if origin is dict:
        return f"table of {_type(inner[1])}"
    return "table"


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for one in get_args(annotation) if (found := _model_in(one))), None)


_KINDS: Mapping[str, str] = {
    "text": "text",
    "integer": "whole number",
    "number": "number",
    "boolean": "true or false",
    "texts": "list of text",
    "integers": "list of whole numbers",
    "integer_or_none": 'whole number or `"None"`',
    "text_or_none": "text",
}


def _flag_row(flag: Flag) -> Cells:
    choices = CHOICES.get(flag.field)
    value = ", ".join(f"`{choice}`" for choice in choices[-1][1]) if choices else _KINDS[flag.kind]
    option = f"environment variable `{flag.secret}`" if flag.secret else f"`{flag.option}`" if flag.option else "-"
    return f"`{flag.field}`", option, value, f"from {flag.first}"


# --- command line ----------------------------------------------------------------------------------------------------


def command_line() -> Iterator[str]:
    """Every command with its arguments and options."""
    program: Any = typer.main.get_command(cli.app)
    context = program.make_context("nightbridge", ["--help"], resilient_parsing=True)
    yield "# Command line\n"
    yield "`nightbridge --install-completion` sets up completion for the current shell. With `--json` a command prints"
    yield "one JSON document on stdout and everything else on stderr. [Exit codes](errors.md#exit-codes).\n"
    yield from _parameters(program, context)
    for name, command in program.commands.items():
        inner = command.make_context(name, ["--help"], parent=context, resilient_parsing=True)
        yield f"\n## nightbridge {name}\n"
        yield f"{inspect.cleandoc(command.help or '')}\n"
        yield f"```text\n{command.get_usage(inner).removeprefix('Usage: ')}\n```\n"
        yield from _parameters(command, inner)


def _parameters(command: Any, context: Any) -> Iterator[str]:
    rows = [
        (f"`{record[0]}`", record[1])
        for parameter in command.get_params(context)
        if (record := parameter.get_help_record(context)) is not None
    ]
    yield from _table(("argument or option", "meaning"), rows)


# --- rules -----------------------------------------------------------------------------------------------------------


def rules() -> Iterator[str]:
    """Every validation rule."""
    yield "# Rules\n"
    yield "`nightbridge validate` checks them before anything is fetched or queued. An error keeps the test from"
    yield "starting, a warning does not. `nightbridge rules ID` shows one of them in the terminal."
    groups: dict[str, list[RuleEntry]] = {}
    for entry in rule_entries():
        groups.setdefault(", ".join(entry.applies_to), []).append(entry)
    for group, entries in groups.items():
        yield f"\n## For {group}\n"
        for entry in entries:
            yield f"### {entry.id}\n"
            yield f"{entry.reason}\n"
            facts = {"severity": entry.severity, "versions": entry.versions, "needs": entry.needs}
            facts |= {"fields": ", ".join(f"`{field}`" for field in entry.fields), "source": entry.source}
            yield from (f"- {name}: {value}" for name, value in facts.items() if value)
            yield ""


# --- errors ----------------------------------------------------------------------------------------------------------


def error_classes() -> Iterator[str]:
    """Exit codes, and the classes of errors."""
    yield "# Exit codes and errors\n"
    yield "## Exit codes\n"
    by_code: dict[int, list[str]] = {}
    for status, code in models.EXIT_CODES.items():
        by_code.setdefault(code, []).append(f"`{status.value}`")
    meanings = {
        0: "good",
        1: "a regression",
        2: "invalid input; nothing was started",
        3: "the run failed",
        4: "infrastructure or internal error",
        cli.EXIT_INTERRUPTED: "interrupted; the job keeps running",
        cli.EXIT_UNREAD: "what reads the lines that go on (`logs --follow`, `status --watch`) has ended",
        cli.EXIT_TERMINATED: "terminated; the job keeps running",
    }
    yield from _table(
        ("code", "meaning", "verdicts"),
        ((str(code), meaning, ", ".join(by_code.get(code, ()))) for code, meaning in meanings.items()),
    )
    yield "A night of several tests exits with the first of 1, 3, 4 and 2 that occurred, else 0.\n"
    yield "## Errors\n"
    yield "A message states what happened, to what, and what to do. Python users catch these classes, from"
    yield "`nightbridge.errors`:\n"
    tree = next(part for part in (inspect.getdoc(errors) or "").split("\n\n") if "├──" in part)
    yield f"```text\n{textwrap.dedent(tree)}\n```\n"
    classes = [kind for kind in vars(errors).values() if inspect.isclass(kind) and kind.__module__ == errors.__name__]
    for kind in classes:
        yield f"### {kind.__name__}\n"
        yield f"{_first_paragraph(kind)}\n"


# --- blocks and the Python interface ---------------------------------------------------------------------------------


def prefect_blocks() -> Iterator[str]:
    """Every block type with its fields."""
    from prefect.blocks.core import Block

    yield "# Blocks\n"
    yield "Blocks hold the settings of a site in Prefect and are edited in its UI. `make deploy` registers them."
    for name in blocks.__all__:
        kind = getattr(blocks, name)
        if not (inspect.isclass(kind) and issubclass(kind, Block)):
            continue
        yield f"\n## {kind._block_type_name}\n"
        yield f"{kind._description} Class `blocks.{name}`, slug `{kind._block_type_slug}`.\n"
        fields = {key: field for key, field in kind.model_fields.items() if key not in Block.model_fields}
        rows = [
            (f"`{key}`", _block_type(field), _default(field), _described(key, field)) for key, field in fields.items()
        ]
        yield from _table(("field", "type", "default", "meaning"), rows)


def _block_type(field: FieldInfo) -> str:
    text = str(field.annotation)
    if "SecretStr" in text:
        return "secret"
    inner = _model_in(field.annotation)
    title = getattr(inner, "_block_type_name", None)
    return f"block [{title}](#{title.lower().replace(' ', '-')})" if title else _type(field.annotation)


def python_interface() -> Iterator[str]:
    """The functions of `flows`, with their docstrings."""
    yield "# Python\n"
    yield "```python\nfrom nightbridge import nightly_regression, run_pipeline\n```\n"
    functions: dict[str, Callable[..., Any]] = {name: getattr(flows, name) for name in flows.__all__}
    yield "Each has a twin that is awaited, with the same parameters: `anightly_regression`, `arun_pipeline`.\n"
    for name, function in functions.items():
        if inspect.iscoroutinefunction(function):
            continue
        yield f"## {name}\n"
        parameters = ",\n".join(f"    {parameter}" for parameter in inspect.signature(function).parameters.values())
        yield f"```python\n{name}(\n{parameters},\n)\n```\n"
        yield f"```text\n{inspect.getdoc(function)}\n```\n"
    yield "## Results\n"
    for model in (models.NightReport, models.Verdict, models.Comparison, models.SweepResult, TestHistory, Verification):
        yield f"### {model.__name__}\n"
        yield f"{_first_paragraph(model)}\n"
        yield from _table(
            ("field", "meaning"),
            ((f"`{key}`", field.description or _type(field.annotation)) for key, field in model.model_fields.items()),
        )


# --- Markdown --------------------------------------------------------------------------------------------------------


def _first_paragraph(documented: object) -> str:
    return (inspect.getdoc(documented) or "").split("\n\n")[0]


def _table(head: Cells, rows: Iterable[Cells]) -> Iterator[str]:
    """A table without the columns in which nothing stands."""
    body = list(rows)
    used = [index for index in range(len(head)) if any(cells[index] for cells in body)]
    for cells in (head, ["---"] * len(head), *body) if body else ():
        yield "| " + " | ".join(cells[index].replace("|", "\\|").replace("\n", " ") for index in used) + " |"
    yield ""


PAGES: Mapping[str, Callable[[], Iterator[str]]] = {
    "configuration": configuration,
    "cli": command_line,
    "rules": rules,
    "errors": error_classes,
    "blocks": prefect_blocks,
    "python": python_interface,
}
