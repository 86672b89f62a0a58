"""Runs and nights: `run`, `nights`, `status`, `logs` and `cancel`."""

from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nightbridge.cli.options import (
    JsonOption,
    RunKeyArgument,
    ScenarioArgument,
    load_site,
    open_site_cluster,
    open_site_store,
    site_options,
)
from nightbridge.cli.output import note, note_all, show, show_text_file, verdict_lines, write_file
from nightbridge.errors import InvalidInput

if TYPE_CHECKING:
    from rich.table import Table

    from nightbridge.models import NightReport, Site, SiteChoice
    from nightbridge.slurm.attempt_files import AttemptContext


class Terminated(BaseException):
    """SIGTERM was received."""


@site_options("system", "cluster", "store", "workspace")
def run_scenario(
    choice: "SiteChoice",
    file: ScenarioArgument,
    as_json: JsonOption = False,
    night: Annotated[
        str | None, typer.Option("--night", metavar="ID", help="Night id; the same id resumes the same night.")
    ] = None,
    new_attempt: Annotated[
        bool, typer.Option("--new-attempt", help="Open a new attempt for runs whose last one ended.")
    ] = False,
    junit: Annotated[
        Path | None, typer.Option("--junit", metavar="FILE.xml", help="Write the verdicts there as JUnit XML.")
    ] = None,
) -> int:
    """Run every test of a file through all stages and compare it with its history.

    The exit code is the result of the night: 0 good, 1 regressed, 2 invalid, 3 failed, 4 infrastructure.
    """
    from nightbridge import config
    from nightbridge.nights.records import checked_night, new_night
    from nightbridge.rules import check_scenario

    if junit is not None and not junit.absolute().parent.is_dir():
        # Refused before the night begins, not after it.
        raise InvalidInput("its folder does not exist", thing=str(junit), advice="Create it, or name another file")
    tonight = new_night() if night is None else checked_night(night)
    scenario = check_scenario(config.load(file))
    note(f"night {tonight}")
    from nightbridge.flows import nightly_regression

    try:
        report = nightly_regression(
            scenario,
            night=tonight,
            new_attempt=new_attempt,
            **choice.parameters(),
        )
    except (KeyboardInterrupt, Terminated):
        note(f"interrupted: the jobs keep running. To resume, run the same command with --night {tonight}")
        note_all(f"cancel: nightbridge cancel {run.run_key}" for run in config.runs(scenario, tonight))
        raise
    document = {**report.model_dump(mode="json"), "exit_code": report.exit_code}
    show(as_json, document, lambda: _night_lines(report))
    if junit is not None:
        _write_junit(junit, report)
    return report.exit_code


@site_options("system", "store", "workspace")
def list_nights(
    choice: "SiteChoice",
    limit: Annotated[int, typer.Option("--limit", min=1, help="How many nights at most, the newest first.")] = 14,
    as_json: JsonOption = False,
) -> None:
    """List the nights in the store: when each began, and how it ended."""
    from nightbridge.nights.records import find_nights
    from nightbridge.nights.status import nights_table

    opened = open_site_store(load_site(choice))
    found = find_nights(opened, limit=limit)
    show(as_json, {"nights": found}, lambda: [nights_table(found)] if found else [])
    if not found and not as_json:
        note(f"no night in {opened.url} yet")


@site_options("system", "cluster", "store", "workspace")
def status(
    choice: "SiteChoice",
    name: Annotated[
        str | None, typer.Argument(metavar="[NIGHT|RUN_KEY]", help="A night or a run; the newest night when left out.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show the progress of each run of a night, or every attempt of one run."""
    from nightbridge.slurm.attempts import attempts_of

    site = load_site(choice)
    attempts = attempts_of(name, site.workspace) if name is not None else ()
    if name is not None and attempts:
        _show_run_status(name, attempts, site, as_json)
    else:
        _show_night_status(name, site, as_json)


@site_options("system", "workspace")
def logs(choice: "SiteChoice", run_key: RunKeyArgument) -> None:
    """Print the log of a run's newest job, or the launcher's where no job has written one."""
    from nightbridge.slurm.attempt_files import read_submission

    attempt = _attempts(run_key, load_site(choice))[-1]
    submission = read_submission(attempt.attempt_dir)
    written = sorted(submission.experiment_dir.glob("log*.out")) if submission else []
    launcher = attempt.attempt_dir / "launcher.log"
    found = written or ([launcher] if launcher.exists() else [])
    if not found:
        note(f"{attempt.name} has no log yet")
    for path in found:
        note(f"==> {path}")
        show_text_file(path)


@site_options("system", "cluster", "workspace")
def cancel(
    choice: "SiteChoice",
    run_key: RunKeyArgument,
) -> None:
    """Cancel the live jobs of a run."""
    from nightbridge.slurm.attempts import cancel_jobs

    site = load_site(choice)
    _attempts(run_key, site)
    cancelled = cancel_jobs(run_key, site.workspace, open_site_cluster(site))
    print("\n".join(f"cancelled job {job_id}" for job_id in cancelled) or "no job of this run is live")


def _night_lines(report: "NightReport") -> "Iterator[str | Table]":
    from nightbridge.report.sweeps import best_line, sweep_table

    yield from verdict_lines(report.verdicts)
    for sweep in report.sweeps:
        yield sweep_table(sweep)
        yield f"{sweep.test_id}: {best_line(sweep)}"
        if sweep.note:
            yield f"{sweep.test_id}: {sweep.note}"
    yield f"report: {report.report}"


def _write_junit(path: Path, report: "NightReport") -> None:
    """Write the verdicts for a CI system; the night is over and stored, whether or not this file can be written."""
    from nightbridge.models import utc_now
    from nightbridge.report.junit import junit_xml

    write_file(
        path, junit_xml(report.scenario, report.night, report.verdicts, report=report.report, written_at=utc_now())
    )


def _show_night_status(name: str | None, site: "Site", as_json: bool) -> None:
    from nightbridge.nights.records import find_nights
    from nightbridge.nights.status import night_lines, run_statuses

    opened = open_site_store(site)
    found = find_nights(opened, limit=1, night=name)
    if not found:
        raise InvalidInput(
            "no night and no run of this name" if name else "no night yet",
            thing=f"{name or opened.url} in {site.workspace}",
            advice="`nightbridge nights` lists the nights; check --store and --workspace",
        )
    runs_of = [(night, run_statuses(night.start, opened, partial(open_site_cluster, site))) for night in found]
    document = {"nights": [{**night.model_dump(mode="json"), "runs": runs} for night, runs in runs_of]}
    show(as_json, document, lambda: (line for night, runs in runs_of for line in night_lines(night, runs)))


def _show_run_status(run_key: str, attempts: "Iterable[AttemptContext]", site: "Site", as_json: bool) -> None:
    from nightbridge.slurm.attempts import jobs_of, read_ended

    cluster = open_site_cluster(site)
    shown: list[dict[str, Any]] = []
    for attempt in attempts:
        ended = read_ended(attempt.attempt_dir)
        shown.append(
            {
                "attempt": attempt.name,
                "folder": attempt.attempt_dir,
                "jobs": jobs_of(attempt, cluster),
                "outcome": ended.outcome if ended else None,
                "reason": ended.outcome_reason if ended else "",
            }
        )
    show(as_json, {"run_key": run_key, "attempts": shown}, lambda: map(_attempt_line, shown))


def _attempt_line(attempt: dict[str, Any]) -> str:
    jobs = ", ".join(f"job {job.job_id} {job.state} {job.reason}".rstrip() for job in attempt["jobs"])
    return f"{attempt['attempt']}: {jobs or 'no job'}; {attempt['outcome'] or 'not ended'} {attempt['reason']}".rstrip()


def _attempts(run_key: str, site: "Site") -> "tuple[AttemptContext, ...]":
    from nightbridge.slurm.attempts import attempts_of

    attempts = attempts_of(run_key, site.workspace)
    if not attempts:
        raise InvalidInput(
            "no run of this key", thing=f"{run_key} in {site.workspace}", advice="Check the key and --workspace"
        )
    return attempts
