"""What needs no run: `validate`, `render` and `rules`."""

import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from nightbridge.cli.options import (
    EXIT_INVALID,
    JsonOption,
    ScenarioArgument,
    TestsDirOption,
    block_values,
    load_site,
    with_site_options,
)
from nightbridge.cli.output import is_terminal, note, note_all, show
from nightbridge.errors import InvalidInput, NightbridgeError

if TYPE_CHECKING:
    from rich.table import Table

    from nightbridge.cli.file_checks import FileReport
    from nightbridge.config.scenarios import Histories
    from nightbridge.models import ClusterLimits, Site, SiteChoice, Violation
    from nightbridge.rules.checking import RuleEntry

OutputForm = Literal["text", "json", "github"]


@with_site_options("system", "cluster", "workspace")
def validate(
    choice: "SiteChoice",
    files: Annotated[
        list[Path] | None,
        typer.Argument(metavar="FILE...", help="Test and scenario files, and ConfigContainer.yaml files."),
    ] = None,
    as_json: JsonOption = False,
    form: Annotated[
        OutputForm, typer.Option("--format", help="Text, JSON, or annotations of GitHub Actions.")
    ] = "text",
    tests_dir: TestsDirOption = None,
    pinned: Annotated[
        bool, typer.Option("--pinned", help="Fetch the pinned code and check against its own launcher and recipes.")
    ] = False,
    gpus: Annotated[int | None, typer.Option("--gpus", min=1, help="GPUs that a ConfigContainer is to run on.")] = None,
    shipped: Annotated[
        list[Path] | None,
        typer.Option(
            "--shipped", metavar="CHECKOUT", help="Check what a checkout of Megatron-Bridge ships; may be repeated."
        ),
    ] = None,
    override: Annotated[
        list[str] | None,
        typer.Option("--override", metavar="KEY=VALUE", help="Applied to a ConfigContainer; may be repeated."),
    ] = None,
) -> int:
    """Check tests, scenarios and ConfigContainers and report every violation; needs no network and no checkout.

    With --cluster or --system the site's limits are queried and checked, too, if it answers; with --pinned every test
    is checked against the code that it pins. Megatron-Bridge dumps the ConfigContainer.yaml of a run: its own checks
    are made, and those that it misses.
    """
    from nightbridge.cli.file_checks import check_container_file, check_file, check_shipped, code_of_site

    if not files and not shipped:
        raise InvalidInput("nothing to validate", advice="Name files, or a checkout with --shipped")

    named = choice.cluster or choice.system
    site = load_site(choice) if named or pinned else None
    limits = _limits_of(site) if site and named else None
    code_of = code_of_site(site, block_values(site.git_credentials)) if site and pinned else None
    histories: Histories = {}
    reports = [
        check_container_file(file, override or [], gpus)
        if file.suffix in (".yaml", ".yml")
        else check_file(file, tests_dir or [], limits, code_of, histories)
        for file in files or ()
    ]
    reports += [check_shipped(checkout) for checkout in shipped or ()]
    valid = all(report.valid for report in reports)
    lines = _annotations if form == "github" else _report_lines
    show(as_json or form == "json", {"valid": valid, "files": reports}, lambda: lines(reports))
    return 0 if valid else EXIT_INVALID


def _limits_of(site: "Site") -> "ClusterLimits | None":
    """The limits of the site's cluster; None, and a line about it, while it does not answer."""
    from nightbridge.slurm.factory import cluster_of

    try:
        return cluster_of(site).limits()
    except NightbridgeError as error:
        if isinstance(error, InvalidInput):
            raise
        note(f"not checked, for the cluster does not answer: partition, nodes, GPUs and time limit. {error}")
        return None


@with_site_options("system", "cluster")
def render(
    choice: "SiteChoice", file: ScenarioArgument, as_json: JsonOption = False, tests_dir: TestsDirOption = None
) -> int:
    """Show the launch plan of every run: command line, environment with secrets masked, resources.

    No checkout is needed: the launcher's version comes from the pin, and folders are placeholders.
    """
    from nightbridge import config
    from nightbridge.launch.launch_plan import placeholder_plan
    from nightbridge.masking import MASK
    from nightbridge.rules import check_scenario

    site = load_site(choice)
    scenario = check_scenario(config.load(file, tests_dirs=tests_dir or ()))
    plans = [placeholder_plan(run, site) for run in config.runs(scenario, "render")]
    note_all(scenario.warnings)
    for test in scenario.invalid:
        note_all(test.violations)
    runs = []
    for plan in plans:
        masked = {**plan.environment, **dict.fromkeys(plan.secret_environment, MASK)}
        runs.append({**plan.model_dump(mode="json"), "environment": masked, "command": shlex.join(plan.argv)})
    show(as_json, {"runs": runs, "invalid": scenario.invalid}, lambda: _plan_lines(runs))
    return EXIT_INVALID if scenario.invalid else 0


def rules(
    rule_id: Annotated[
        str | None, typer.Argument(metavar="[ID]", help="One rule in full; a list of all when left out.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """List every validation rule with its severity, versions, reason and source."""
    from nightbridge.rules.checking import find_rule, rule_entries

    entries = rule_entries() if rule_id is None else (find_rule(rule_id),)
    show(as_json, {"rules": entries}, lambda: [_rules_table(entries)] if rule_id is None else _rule_lines(entries[0]))
    if rule_id is None and not as_json:
        note("`nightbridge rules ID` shows the fields, versions and source of one")


def schema() -> None:
    """Print the JSON Schema of test and scenario files, for completion in editors: taplo, VS Code."""
    from nightbridge.config.schema import editor_schema

    show(True, editor_schema(), lambda: ())


def _report_lines(reports: "Iterable[FileReport]") -> "Iterator[str | Table]":
    for report in reports:
        if report.error:
            yield report.error
        if not report.error or report.findings[0].message not in report.error:
            yield from _finding_lines(report.findings)
        for test in report.tests:
            points = f" ({test.points} points)" if test.points else ""
            yield f"{test.source}: {test.id}: {'ok' if test.valid else 'INVALID'}{points}"
            yield from _finding_lines(test.findings)


def _finding_lines(findings: "Sequence[Violation]") -> "Iterator[str | Table]":
    """A table on a terminal, else a line for each."""
    if findings and is_terminal(sys.stdout):
        yield _findings_table(findings)
        return
    yield from (f"  {finding.line(finding.severity)}" for finding in findings)


def _findings_table(findings: "Iterable[Violation]") -> "Table":
    from rich.text import Text

    table = _table("severity", "rule", "where", "problem and solution")
    for finding in findings:
        # Text of a file is Text, never rich's markup.
        style = "bold red" if finding.severity == "error" else "yellow"
        where = Text("\n".join(finding.places))
        table.add_row(Text(finding.severity, style), Text(finding.rule), where, Text(finding.message))
    return table


def _annotations(reports: "Iterable[FileReport]") -> Iterator[str]:
    """One workflow command of GitHub Actions for each place: `::error file=...,line=...,title=...::message`."""
    found = [finding for report in reports for finding in report.findings]
    for finding in [*found, *(each for report in reports for test in report.tests for each in test.findings)]:
        for place in finding.places or ("",):
            file, _, line = place.rpartition(":")
            if not line.isdigit():
                file, line = place, ""
            properties = {"file": file, "line": line, "title": finding.rule}
            written = ",".join(f"{name}={_escaped(value, ':,')}" for name, value in properties.items() if value)
            yield f"::{finding.severity} {written}::{_escaped(finding.message, '')}"


def _escaped(text: str, more: str) -> str:
    """A text in a workflow command, whose separators are percent-encoded."""
    return "".join(f"%{ord(letter):02X}" if letter in f"%\r\n{more}" else letter for letter in text)


def _plan_lines(plans: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    for plan in plans:
        yield f"# {plan['run_key']}: {plan['nodes']} node(s) x {plan['tasks_per_node']} task(s)"
        for name, value in plan["environment"].items():
            yield f"export {name}={value}"
        yield f"cd {plan['cwd']}"
        yield plan["command"]
        if plan["sbatch_args"]:
            yield f"# sbatch options: {' '.join(plan['sbatch_args'])}"
        if plan["batch_script"] is not None:
            yield f"# {plan['argv'][-1]}:"
            yield plan["batch_script"]
        note_all(f"{plan['run_key']}: {warning}" for warning in plan["warnings"])


def _rules_table(entries: "Iterable[RuleEntry]") -> "Table":
    table = _table("rule", "severity", "reason")
    table.columns[0].no_wrap = True
    for entry in entries:
        table.add_row(entry.id, entry.severity, entry.reason)
    return table


def _rule_lines(entry: "RuleEntry") -> Iterator[str]:
    for name, value in entry.model_dump().items():
        shown = value if isinstance(value, str) else ", ".join(value)
        yield f"{name.replace('_', ' '):12}{shown or '-'}"


def _table(*head: str) -> "Table":
    from rich import box
    from rich.table import Table

    return Table(*head, box=box.SIMPLE_HEAD, pad_edge=False)
