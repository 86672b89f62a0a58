"""Stored results, compared: `history`, `compare`, `accept`, `golden` and `parity`."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from nightbridge.cli.options import (
    RUN_HELP,
    JsonOption,
    RunKeyArgument,
    load_site,
    named_run,
    open_site_store,
    refuse_ignored,
    with_site_options,
)
from nightbridge.cli.output import note, note_all, print_all, print_csv, show, verdict_lines, write_file, writing
from nightbridge.errors import InvalidInput

if TYPE_CHECKING:
    from nightbridge.models import Site, SiteChoice
    from nightbridge.report.queries import TestHistory
    from nightbridge.store.object_store import ObjectStore

_REST_OF_DATE = {4: "-01-01", 7: "-01"}
"""What a year, and a month, lack of a date, by their characters."""


@with_site_options("system", "store", "workspace")
def history(
    choice: "SiteChoice",
    test_id: Annotated[
        str, typer.Argument(metavar="[TEST]", help="A test's id, TEST@NIGHT or a run key; all tests when left out.")
    ] = "",
    since: Annotated[str, typer.Option("--since", metavar="NIGHT", help="Show nights from this one on.")] = "",
    as_csv: Annotated[bool, typer.Option("--csv", help="Print comma-separated values on stdout.")] = False,
    rebuild: Annotated[bool, typer.Option("--rebuild", help="First write the rows of all stored runs again.")] = False,
    as_json: JsonOption = False,
    cluster: Annotated[str | None, typer.Option("--cluster", help="Name of the cluster; any when left out.")] = None,
    of_all: Annotated[bool, typer.Option("--all", help="Of all tests; with --out.")] = False,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="With --all: write a table, .parquet or .csv.")
    ] = None,
) -> None:
    """Show the trend of a test, and when the level of a metric shifted; without a test the last nights of all."""
    if of_all != (out is not None) or (of_all and test_id):
        raise InvalidInput("--all and --out belong together, without a test", advice="Give --all --out FILE")
    if out is not None:
        refuse_ignored("with --out", {"--since": since, "--csv": as_csv, "--json": as_json})
    refuse_ignored("with --csv", {"--json": as_csv and as_json})
    refuse_ignored("without a test", {"--cluster": cluster and not test_id})
    _check_since(since)
    from nightbridge.models import is_run_key
    from nightbridge.nights.records import find_test

    site = load_site(choice)
    opened = open_site_store(site)
    run_key = test_id if is_run_key(test_id) else None
    test_id, until = find_test(opened, test_id) if test_id else ("", None)
    if rebuild:
        from nightbridge.history.reading import rebuild_history

        note_all(rebuild_history(opened, test_id or None).damaged)
    if test_id:
        from nightbridge.report.queries import history_of

        found = history_of(opened, test_id, cluster, until=until, run_key=run_key)
        _show_trends(site, opened, found, since, as_json, as_csv)
    elif out is None:
        _show_all_tests(opened, since, as_json, as_csv)
    else:
        from nightbridge.history.reading import export_history

        with writing(out):
            done = export_history(opened, out)
        note_all(done.damaged)
        note(f"{done.number} rows written to {out}")


def _check_since(since: str) -> None:
    """A night, a day, a month or a year: nights are compared by their names, and before other text are all, or none."""
    from nightbridge.models import is_day

    if since and not is_day(since + _REST_OF_DATE.get(len(since), "")):
        raise InvalidInput("no date", subject=f"--since {since}", advice="Write it as 2026-11-21")


def _show_trends(
    site: "Site", store: "ObjectStore", found: "TestHistory", since: str, as_json: bool, as_csv: bool
) -> None:
    from nightbridge.gate.decisions import list_decisions
    from nightbridge.gate.trend import trends_with_commits
    from nightbridge.report.trend_table import history_cells, standing_lines, trend_lines, trend_table
    from nightbridge.repos.commits import known_commits_between

    if as_csv:
        print_csv(history_cells(found.trends, found.rows, since))
        return
    found = found.model_copy(update={"trends": trends_with_commits(found.trends, partial(known_commits_between, site))})
    decided = (f"{one.id}  {one.text}" for one in list_decisions(store, found.cluster, found.series))
    show(
        as_json,
        found,
        lambda: [
            trend_table(found.trends, found.rows, since),
            *trend_lines(found.trends),
            *standing_lines(found.rows, found.trends),
            *decided,
            *found.which_lines,
        ],
    )


def _show_all_tests(store: "ObjectStore", since: str, as_json: bool, as_csv: bool) -> None:
    from nightbridge.report.overview import overview_of_tests

    found = overview_of_tests(store, since)
    if as_csv:
        names = ("test_id", "night", "verdict", "since", "step_time", "cause", "decision", "run_key")
        print_csv([names, *([getattr(test, name) for name in names] for test in found)])
        return
    width = max((len(test.test_id) for test in found), default=0)
    show(as_json, {"tests": found}, lambda: (f"{test.test_id:{width}}  {test}" for test in found))
    if not found and not as_json:
        note(f"no night that ended in {store.url}")


@with_site_options("system", "store", "workspace")
def migrate(choice: "SiteChoice") -> None:
    """Give the history that an earlier version wrote its columns; may be killed, and run again."""
    from nightbridge.history.reading import migrate_history

    opened = open_site_store(load_site(choice))
    done = migrate_history(opened)
    note_all(done.damaged)
    note(f"{done.number} series migrated in {opened.url}")


@with_site_options("system", "store", "workspace")
def compare(
    choice: "SiteChoice",
    run_key: RunKeyArgument,
    baseline: Annotated[str | None, typer.Argument(metavar="BASELINE", help="Another run.")] = None,
    as_json: JsonOption = False,
) -> int:
    """Judge a stored run again: against the good runs before it, or against one other run."""
    from nightbridge.nights.records import find_run
    from nightbridge.report.queries import compare_stored

    site = load_site(choice)
    opened = open_site_store(site)
    other = find_run(opened, baseline) if baseline else None
    run_key = find_run(opened, run_key)
    if other:
        note(f"{run_key} against {other}")
    verdict = compare_stored(opened, run_key, other, site.contract)
    document = {**verdict.model_dump(mode="json"), "exit_code": verdict.exit_code}
    show(as_json, document, lambda: verdict_lines([verdict], choice.as_options()))
    return verdict.exit_code


@with_site_options("system", "store", "workspace")
def accept(
    choice: "SiteChoice",
    target: Annotated[str, typer.Argument(metavar="[RUN|SERIES]", help=f"{RUN_HELP} Or a series.")] = "",
    why: Annotated[str, typer.Option("--why", help="The reason, as verdicts will show it.")] = "",
    kind: Annotated[str, typer.Option("--as", help="acknowledged, fixed or baseline.")] = "acknowledged",
    who: Annotated[str, typer.Option("--who", help="Who decides; the user who is logged in when left out.")] = "",
    metric: Annotated[list[str] | None, typer.Option("--metric", help="Only this one; may be repeated.")] = None,
    until: Annotated[str, typer.Option("--until", metavar="NIGHT", help="The last night that it holds for.")] = "",
    undo: Annotated[
        str, typer.Option("--undo", metavar="ID|RUN|SERIES", help="Withdraw this decision; judge its nights again.")
    ] = "",
    list_all: Annotated[bool, typer.Option("--list", help="List the decisions, all or those about a run.")] = False,
    as_json: JsonOption = False,
    cluster: Annotated[
        str | None, typer.Option("--cluster", help="Name of the cluster, for a series; the site's when left out.")
    ] = None,
) -> None:
    """Acknowledge a regression, mark it as fixed, or make its level the new baseline; silences the alert.

    Nothing is deleted: verdicts and history show the decision with its reason. `--undo` withdraws it.
    """
    import getpass

    from nightbridge.gate.accept import accept as decide
    from nightbridge.gate.accept import checked_kind, checked_metrics, is_series

    if sum(map(bool, (target and not list_all, undo, list_all))) != 1:
        raise InvalidInput("nothing to decide", subject="accept", advice="Name a run to accept, --undo ID, or --list")
    site = load_site(choice)
    if list_all:
        _show_decisions(open_site_store(site), _named_decision(site, target), as_json)
        return
    who = who or getpass.getuser()
    if undo:
        _withdraw(site, _named_decision(site, undo), who, why, as_json)
        return
    opened = open_site_store(site)
    decision = decide(
        opened,
        target if is_series(target) else named_run(site, target),
        checked_kind(kind),
        who=who,
        why=why,
        metrics=checked_metrics(metric or ()),
        until=until,
        cluster=cluster or site.cluster.name,
    )
    show(as_json, decision, lambda: [f"{decision.series}: {decision.text}"])


def _named_decision(site: "Site", name: str) -> str:
    """What a decision is named by: the key of a run that a short name means, or the name itself."""
    return named_run(site, name) if "@" in name or name == "last" else name


def _show_decisions(store: "ObjectStore", about: str, as_json: bool) -> None:
    from nightbridge.gate.decisions import list_decisions

    found = [
        one
        for one in list_decisions(store)
        if about in ("", one.id, one.decision.run_key, one.decision.series, one.decision.test_id)
    ]
    document = {"decisions": [{"id": one.id, **one.model_dump(mode="json")} for one in found]}
    show(as_json, document, lambda: (f"{one.id}  {one.decision.test_id}: {one.text}" for one in found))
    if not found and not as_json:
        note(f"no decision {f'about {about} ' if about else ''}in {store.url}")


def _withdraw(site: "Site", target: str, who: str, why: str, as_json: bool) -> None:
    from nightbridge.gate.accept import withdraw
    from nightbridge.gate.decisions import Withdrawal
    from nightbridge.models import utc_now
    from nightbridge.repos.commits import known_commits_between

    withdrawal = Withdrawal(who=who, why=why, when=utc_now())
    stored, rejudged = withdraw(
        open_site_store(site), target, withdrawal, site.contract, partial(known_commits_between, site)
    )
    document = {"withdrawn": stored.id, **rejudged._asdict()}
    level = f"the level since {stored.decision.since}{' alerts again' if rejudged.alarms else ''}"
    show(as_json, document, lambda: [f"withdrawn: {stored.decision.text}", f"{level} ({rejudged})"])


@with_site_options("system", "store", "workspace")
def golden(
    choice: "SiteChoice",
    run_key: RunKeyArgument,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE.json", help="Write the values there, not to the terminal.")
    ] = None,
) -> None:
    """Record the golden values of a stored run that went well, in Megatron-Bridge's format."""
    from nightbridge.nights.records import find_run
    from nightbridge.report.queries import golden_stored

    opened = open_site_store(load_site(choice))
    values = golden_stored(opened, find_run(opened, run_key))
    if out is None:
        print_all(values.splitlines())
    else:
        write_file(out, values.encode())
        note(f"written: {out}")


@with_site_options("system", "store", "workspace")
def parity(
    choice: "SiteChoice",
    run_a: Annotated[str, typer.Argument(metavar="RUN_A", help="The run that is compared with.")],
    run_b: Annotated[str, typer.Argument(metavar="RUN_B", help="The run that is compared.")],
    gate: Annotated[
        Literal["numerics", "convergence", "iterations"],
        typer.Option("--gate", help="What decides: every bit, the course of the loss, or each iteration's loss."),
    ] = "convergence",
    first: Annotated[
        float | None,
        typer.Option("--first", min=0, help="How far the first iteration may be off; as reference_rules has it."),
    ] = None,
    later: Annotated[
        float | None, typer.Option("--later", min=0, help="How far later ones may be off; the same.")
    ] = None,
    steps: Annotated[int | None, typer.Option("--steps", min=1, help="The last iteration that counts.")] = None,
    page: Annotated[
        Path | None, typer.Option("--page", metavar="FILE.html", help="Draw both runs' curves over each other there.")
    ] = None,
    as_json: JsonOption = False,
) -> int:
    """Compare two stored runs step by step: whether they compute the same, or converge alike."""
    from nightbridge.models import ReferencePolicy
    from nightbridge.nights.records import find_run
    from nightbridge.report.queries import parity_page_stored, parity_stored

    options = {"first": first, "later": later, "steps": steps}
    given = {name: limit for name, limit in options.items() if limit is not None}
    if given and gate != "iterations":
        named = ", ".join(f"--{name}" for name in given)
        raise InvalidInput(f"has no effect with --gate {gate}", subject=named, advice="Add --gate iterations")
    opened = open_site_store(load_site(choice))
    policy = ReferencePolicy().model_copy(update=given)
    found = parity_stored(opened, find_run(opened, run_a), find_run(opened, run_b), policy)
    faults = found.faults_of(gate)
    if page is not None:
        write_file(page, parity_page_stored(opened, found, gate).encode())
    if gate == "convergence" and not found.own_bands:
        note("too few good nights before the later run show how far its losses scatter: the usual bands are used")
    document = {**found.model_dump(mode="json"), "gate": gate, "passed": not faults, "faults": faults}
    show(as_json, document, lambda: [*faults, found.result_of(gate)])
    return 1 if faults else 0
