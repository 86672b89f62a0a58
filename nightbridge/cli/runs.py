"""Runs and nights: `run`, `nights`, `ls`, `status`, `logs`, `cancel`; and `watchdog`, for verdicts that are missing."""

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nightbridge.cli.options import (
    EXIT_INTERNAL,
    RUN_HELP,
    JsonOption,
    RunKeyArgument,
    ScenarioArgument,
    block_values,
    check_folder,
    load_site,
    named_run,
    note_no_site,
    open_site_store,
    refuse_ignored,
    with_site_options,
)
from nightbridge.cli.output import (
    is_terminal,
    log_of,
    note,
    note_all,
    print_all,
    printable,
    quiet,
    show,
    show_in_place,
    show_text_file,
    spoken,
    verdict_lines,
    write_file,
)
from nightbridge.errors import InvalidInput, NightbridgeError

if TYPE_CHECKING:
    from rich.table import Table

    from nightbridge.models import NightReport, Site, SiteChoice
    from nightbridge.nights.records import Night, NightStart
    from nightbridge.nights.status import RunStatus
    from nightbridge.notify import Notice
    from nightbridge.slurm.attempt_files import AttemptContext
    from nightbridge.slurm.protocol import Cluster
    from nightbridge.store.object_store import ObjectStore


LAST_LINES = 30
WATCH_INTERVAL, FOLLOW_INTERVAL = 5.0, 2.0
"""Seconds between two looks at a night, and at a log."""


class Terminated(BaseException):
    """SIGTERM was received."""


@with_site_options("system", "cluster", "store", "workspace")
def run_scenario(
    choice: "SiteChoice",
    file: ScenarioArgument,
    as_json: JsonOption = False,
    night: Annotated[
        str | None, typer.Option("--night", metavar="ID", help="Night id; the same id resumes the same night.")
    ] = None,
    retry: Annotated[
        bool, typer.Option("--retry", help="Run again the runs of the night that ended badly, and no others.")
    ] = False,
    new_attempt: Annotated[
        bool, typer.Option("--new-attempt", help="Run again every run of the night that has ended, good ones too.")
    ] = False,
    junit: Annotated[
        Path | None, typer.Option("--junit", metavar="FILE.xml", help="Write the verdicts there as JUnit XML.")
    ] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Show the log of the night; without it, it is in a file alone.")
    ] = False,
) -> int:
    """Run every test of a file through all stages and compare it with its history.

    The exit code is the result of the night: 0 good, 1 regressed, 2 invalid, 3 failed, 4 infrastructure.
    """
    from nightbridge import config
    from nightbridge.nights.records import checked_night, new_night
    from nightbridge.rules import check_scenario

    check_folder(junit)
    tonight = new_night() if night is None else checked_night(night)
    scenario = check_scenario(config.load(file))
    log = log_of(choice, tonight)
    note_no_site(choice)
    note(f"night {tonight}{'' if verbose else f', log {log}'}")
    try:
        # Prefect with it: for some seconds, in which people see what they mistyped.
        from nightbridge.flows import nightly_regression

        with spoken() if verbose else quiet(log):
            report = nightly_regression(
                scenario, night=tonight, retry=retry, new_attempt=new_attempt, **choice.parameters()
            )
    except (KeyboardInterrupt, Terminated):
        note(f"interrupted: the jobs keep running. To resume, run the same command with --night {tonight}")
        note(f"cancel: nightbridge cancel --night {tonight}{choice.as_options()}")
        raise
    document = {**report.model_dump(mode="json"), "exit_code": report.exit_code}
    show(as_json, document, lambda: _night_lines(report, file, choice.as_options()))
    if junit is not None:  # the night is over and stored, whether or not this file can be written
        from nightbridge.models import utc_now
        from nightbridge.report.tables import junit_xml

        now = utc_now()
        write_file(
            junit, junit_xml(report.scenario, report.night, report.verdicts, report=report.report, written_at=now)
        )
    return report.exit_code


@with_site_options("system", "store", "workspace")
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


@with_site_options("system", "cluster", "store", "workspace")
def status(
    choice: "SiteChoice",
    name: Annotated[
        str | None, typer.Argument(metavar="[NIGHT|RUN]", help="A night or a run; the newest night when left out.")
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Show it again until the night has ended.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show the progress of each run of a night, or every attempt of one run."""
    from nightbridge.nights.records import find_nights
    from nightbridge.slurm.attempts import attempts_of

    refuse_ignored("with --watch", {"--json": watch and as_json})
    site = load_site(choice)
    store = open_site_store(site)
    found = find_nights(store, limit=1, night=name)
    if found and watch:
        _watch_night(name, store, site)
    elif found or name is None:
        _show_nights(found, store, site, as_json)
    else:
        run_key = named_run(site, name)
        if watch:
            advice = f"`nightbridge logs -f {name}` follows it; or name its night"
            raise InvalidInput("a run, and --watch shows nights", subject=run_key, advice=advice)
        attempts = attempts_of(run_key, site.workspace)
        if not attempts:
            what = "no night of this name, and no run of it in this workspace"
            advice = "`nightbridge ls` lists the runs that are stored; check --store and --workspace"
            raise InvalidInput(what, subject=f"{name} in {site.workspace}", advice=advice)
        _show_run_status(run_key, attempts, site, as_json)


@with_site_options("system", "cluster", "store", "workspace")
def list_runs(
    choice: "SiteChoice",
    test_id: Annotated[str, typer.Argument(metavar="[TEST_ID]", help="Only the runs of this test.")] = "",
    limit: Annotated[int, typer.Option("--limit", min=1, help="How many nights at most, the newest first.")] = 3,
    as_json: JsonOption = False,
) -> None:
    """List the runs of the last nights: verdict or state, job, steps done, speed, expected end and run key."""
    from nightbridge.nights.records import find_nights

    site = load_site(choice)
    store = open_site_store(site)
    _show_nights(find_nights(store, limit=limit), store, site, as_json, test_id)


@with_site_options("system", "cluster", "store", "workspace")
def logs(
    choice: "SiteChoice",
    run_key: RunKeyArgument,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Print what is added, until the job ends.")] = False,
    errors: Annotated[
        bool, typer.Option("--errors", help=f"Only the error that ended it and the last {LAST_LINES} lines.")
    ] = False,
) -> None:
    """Print the log of a run's newest job, or the launcher's where no job has written one."""
    from nightbridge.slurm.attempts import attempts_of

    refuse_ignored("with --follow", {"--errors": follow and errors})
    site = load_site(choice)
    run_key = named_run(site, run_key)
    attempts = attempts_of(run_key, site.workspace)
    if not attempts:
        raise _no_run(run_key, site)
    attempt = attempts[-1]
    found = _logs_of(attempt)
    if not found:
        note(f"{attempt.name} has no log yet")
    if follow:
        _follow(attempt, site)
        return
    for path in found:
        note(f"==> {path}")
        show_text_file(path) if not errors else print_all(_errors_in(path))


@with_site_options("system", "cluster", "store", "workspace")
def cancel(
    choice: "SiteChoice",
    run_key: Annotated[str, typer.Argument(metavar="[RUN]", help=RUN_HELP)] = "",
    night: Annotated[str, typer.Option("--night", metavar="ID", help="Every run of this night.")] = "",
) -> None:
    """Cancel the live jobs of a run, or of a night."""
    from nightbridge.nights.records import find_nights
    from nightbridge.slurm.attempt_files import last_attempt
    from nightbridge.slurm.attempts import cancel_jobs
    from nightbridge.slurm.factory import cluster_of

    if bool(run_key) == bool(night):
        raise InvalidInput("nothing to cancel", subject="cancel", advice="Name a run, or a night with --night ID")
    site = load_site(choice)
    if night:
        nights = find_nights(open_site_store(site), night=night)
        keys = [key for found in nights for key in _keys_of_night(found.start, site.workspace)]
    else:
        keys = [named_run(site, run_key)]
        if not last_attempt(site.workspace / "runs" / keys[0]):
            raise _no_run(keys[0], site)
    if not keys:
        raise InvalidInput("no such night", subject=night, advice="`nightbridge nights` lists the nights")
    cancelled = cancel_jobs(keys, site.workspace, cluster_of(site))
    print_all(f"cancelled job {job_id} of {key}" for key, job_id in cancelled.jobs)
    cancelled.check(f"night {night}" if night else keys[0])
    if not cancelled.jobs:
        print_all([f"no job of this {'night' if night else 'run'} is live"])


def _keys_of_night(start: "NightStart", workspace: Path) -> "Iterator[str]":
    """The keys of all runs of a night; without its plan, those that it began with."""
    from nightbridge.nights.records import plan_path, read_plan

    plan = read_plan(plan_path(workspace, start.flow_run))
    if plan is not None and (plan.start.night, plan.start.scenario) == (start.night, start.scenario):
        yield from plan.run_keys()
    else:
        yield from (run.run_key for run in start.tests)


def _night_lines(report: "NightReport", file: Path, options: str) -> "Iterator[str | Table]":
    from nightbridge.report.sweeps import best_line, sweep_table
    from nightbridge.report.tables import compact_lines

    shown = verdict_lines if is_terminal(sys.stdout) else compact_lines
    for line in shown(report.verdicts, options):
        # Only here it is known which file the night came from.
        yield line.replace("nightbridge run FILE ", f"nightbridge run {file} ") if isinstance(line, str) else line
    for sweep in report.sweeps:
        yield sweep_table(sweep)
        yield f"{sweep.test_id}: {best_line(sweep)}"
    yield f"report: {report.report}"


def _show_nights(
    found: "Sequence[Night]", store: "ObjectStore", site: "Site", as_json: bool, test_id: str = ""
) -> None:
    from nightbridge.nights.records import like_test
    from nightbridge.nights.status import night_lines

    if not found:
        # A night is recorded once Prefect has started, which takes some seconds.
        advice = "One that has just been started is here within a minute; else check --store and --workspace"
        raise InvalidInput("no night yet", subject=f"{store.url} in {site.workspace}", advice=advice)
    runs_of = [(night, _statuses(night, store, site, test_id)) for night in found]
    if test_id and not any(runs for _night, runs in runs_of):
        where = f"{test_id} in the last {len(found)} nights of {store.url}"
        raise InvalidInput("no run of this test", subject=where, advice=like_test(store, test_id))
    document = {"nights": [{**night.model_dump(mode="json"), "runs": runs} for night, runs in runs_of]}
    show(as_json, document, lambda: (line for night, runs in runs_of for line in night_lines(night, runs)))


def _statuses(night: "Night", store: "ObjectStore", site: "Site", test_id: str = "") -> "tuple[RunStatus, ...]":
    from nightbridge.nights.status import run_statuses
    from nightbridge.slurm.factory import cluster_of

    tests = tuple(test for test in night.start.tests if test_id in ("", test.test_id))
    start = night.start.model_copy(update={"tests": tests})
    return run_statuses(start, store, partial(cluster_of, site), night.end)


def _watch_night(name: str | None, store: "ObjectStore", site: "Site") -> None:
    """Show a night until it has ended: in place on a terminal, else whenever a line of it has changed."""
    if is_terminal(sys.stdout):
        show_in_place(_looks_at(name, store, site))
        return
    shown: list[str] = []
    for lines in _looks_at(name, store, site):
        for line in lines:
            if line not in shown:
                print(printable(line), flush=True)
        shown = lines


def _looks_at(name: str | None, store: "ObjectStore", site: "Site") -> Iterator[list[str]]:
    """The lines of a night, or of the newest one, every few seconds until it has ended."""
    from nightbridge.nights.records import find_nights
    from nightbridge.nights.status import night_lines

    while True:
        nights = find_nights(store, limit=1, night=name)
        yield [line for night in nights for line in night_lines(night, _statuses(night, store, site))]
        if all(night.ended for night in nights):
            return
        time.sleep(WATCH_INTERVAL)


def _logs_of(attempt: "AttemptContext") -> list[Path]:
    """The logs of the job that works on an attempt, else the launcher's."""
    from nightbridge.nights.status import LOGS
    from nightbridge.slurm.attempt_files import claiming_submission

    submission = claiming_submission(attempt.attempt_dir)
    launcher = attempt.attempt_dir / "launcher.log"
    return (sorted(submission.experiment_dir.glob(LOGS)) if submission else []) or [launcher] * launcher.exists()


def _follow(attempt: "AttemptContext", site: "Site") -> None:
    """Print the finished lines of an attempt's logs until its job has ended; a log that begins later is found, too."""
    from nightbridge.outputs.logs import LogTail
    from nightbridge.slurm.factory import cluster_of

    cluster = cluster_of(site)
    tails: dict[Path, LogTail] = {}
    ended = False
    while not ended:
        # The state first: what a job wrote before its end is then read below.
        ended = _is_over(attempt, cluster)
        for path in _logs_of(attempt):
            tail = tails.setdefault(path, LogTail(path))
            for line in [*tail.new_lines(), *(tail.last_line() if ended else ())]:
                print(printable(line), flush=True)
        if not ended:
            time.sleep(FOLLOW_INTERVAL)


def _is_over(attempt: "AttemptContext", cluster: "Cluster") -> bool:
    """Whether the job of an attempt has ended."""
    from nightbridge.slurm.attempt_files import own_jobs, read_ended
    from nightbridge.slurm.states import TERMINAL

    jobs = own_jobs(attempt.attempt_dir, cluster).jobs
    if read_ended(attempt.attempt_dir) is not None:  # accounting may have purged it since
        return True
    return bool(jobs) and all(job.state in TERMINAL for job in jobs)


def _errors_in(path: Path) -> "Iterator[str]":
    """The error of a log, where it has one, and its last lines."""
    from nightbridge.outputs.logs import end_of_log

    end = end_of_log(path)
    if end.error:
        yield f"error: {end.error}"
    yield from end.lines[-LAST_LINES:]


def _show_run_status(run_key: str, attempts: "Iterable[AttemptContext]", site: "Site", as_json: bool) -> None:
    from nightbridge.slurm.attempt_files import own_jobs, read_ended
    from nightbridge.slurm.factory import cluster_of

    cluster = cluster_of(site)
    shown: list[dict[str, Any]] = [
        {
            "attempt": attempt.name,
            "folder": attempt.attempt_dir,
            "jobs": own_jobs(attempt.attempt_dir, cluster).jobs,
            "outcome": ended.outcome if ended else None,
            "reason": ended.outcome_reason if ended else "",
        }
        for attempt in attempts
        for ended in [read_ended(attempt.attempt_dir)]
    ]
    show(as_json, {"run_key": run_key, "attempts": shown}, lambda: map(_attempt_line, shown))


def _attempt_line(attempt: dict[str, Any]) -> str:
    jobs = ", ".join(f"job {job.job_id} {job.state} {job.reason}".rstrip() for job in attempt["jobs"])
    return f"{attempt['attempt']}: {jobs or 'no job'}; {attempt['outcome'] or 'not ended'} {attempt['reason']}".rstrip()


def _no_run(run_key: str, site: "Site") -> InvalidInput:
    advice = (
        f"Check the key and --workspace; `nightbridge fetch {run_key} DEST --only logs` downloads a stored run's logs"
    )
    return InvalidInput("no run of this key", subject=f"{run_key} in {site.workspace}", advice=advice)


@with_site_options("system", "cluster", "store", "workspace")
def watchdog(
    choice: "SiteChoice",
    by: Annotated[str, typer.Option("--by", metavar="HH:MM", help="When every verdict has to be there.")],
    files: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[FILE...]", help="Scenarios to expect; all that had a scheduled night lately when left out."
        ),
    ] = None,
    timezone: Annotated[
        str | None, typer.Option("--timezone", metavar="TZ", help="Zone of --by; this machine's own when left out.")
    ] = None,
    days: Annotated[
        int, typer.Option("--days", min=1, max=36500, help="Days to look back for the scenarios to expect.")
    ] = 7,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print nothing when every verdict is there.")] = False,
    send_test: Annotated[
        bool, typer.Option("--send-test", help="Only send a test notification, as [notify] of the site configures it.")
    ] = False,
    as_json: JsonOption = False,
) -> int:
    """Report which test has no verdict by a time of the morning, and why; alert by mail and webhook ([notify]).

    It reads the store and queries Slurm, and needs no Prefect server. Each scenario's nights of the 24 hours before
    --by count: today's --by, or yesterday's when that is more than five minutes ahead. A bad verdict is listed and
    raises no alert. Exit code 0 when every verdict is there, 4 when one is missing or cannot be looked up, or the
    alert cannot be sent, 2 for invalid input.
    """
    from nightbridge.nights.missing_verdicts import look, notice_of, trial_notice, watch_lines, watch_settings
    from nightbridge.nights.prefect_api import configured_server

    wanted = watch_settings(by, timezone=timezone, files=files or (), days=days)
    site = load_site(choice)
    if send_test:
        if not _send(trial_notice(), site):
            raise InvalidInput("no recipient", subject=choice.system or "the site", advice="Give it a [notify] table")
        return 0
    watch = look(wanted, site, lambda: open_site_store(site), configured_server())
    if as_json or watch.exit_code or not quiet:
        document = {**watch.model_dump(mode="json"), "exit_code": watch.exit_code}
        show(as_json, document, lambda: watch_lines(watch))
    return _alert(notice_of(watch), site, watch.exit_code) if watch.exit_code else 0


def _alert(notice: "Notice", site: "Site", code: int) -> int:
    """Send the alert; return the exit code, or that of an error of its own."""
    try:
        if not _send(notice, site):
            note("no alert was sent: the site has no [notify]")
    except NightbridgeError as error:
        note(f"nightbridge: {error}")
        return EXIT_INTERNAL
    return code


def _send(notice: "Notice", site: "Site") -> bool:
    """Send a notice in every way that the site has; return whether it has any."""
    from nightbridge.notify import notify

    sent = notify(notice, site.notify, block_values(site.notify.smtp_password, site.notify.webhook))
    note_all(f"sent: {way}" for way in sent)
    return bool(sent)
