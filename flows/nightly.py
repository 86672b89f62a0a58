"""A night: every run of a scenario side by side, each with its own verdict, then the report."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from prefect import flow
from prefect.client.schemas.objects import FlowRun, State
from prefect.flows import Flow
from prefect.logging import get_run_logger
from prefect.runtime import flow_run

from blocks import load_site
from flows.confirm import confirmed, repeat_of
from flows.pipeline import pipeline
from flows.starts import side_by_side
from flows.states import result_of, state_of_error, state_of_night
from nightbridge import config
from nightbridge.errors import NightbridgeError
from nightbridge.models import NightReport, RunSpec, Scenario, Site, Verdict
from nightbridge.regression.gate import verdict_for_error, verdict_for_invalid
from nightbridge.regression.series import series_id
from nightbridge.regression.sweeps import sweep_results
from nightbridge.rules import check_scenario
from nightbridge.slurm.ledger import AttemptChoice
from tasks.cancel import cancel_run
from tasks.compare import confirm
from tasks.dependencies import run_is_over, runs_begin
from tasks.interrupt import allow_stages
from tasks.night import fix_night
from tasks.prepare import check_place, node_limits
from tasks.report import report
from tasks.validate import show_violations
from tasks.watch import stop_watching

# Runs of one night that are followed at once; each is a thread that mostly waits.
MOST_RUNS_AT_ONCE = 64


def cancel_jobs(flow: Flow[..., Any], flow_run: FlowRun, state: State[Any]) -> None:
    """Cancel the jobs of a cancelled night. Prefect runs this in another process, so they are found by their names."""
    given = flow_run.parameters
    night = given["night"]
    site = load_site(
        given.get("system"), cluster=given.get("cluster"), store=given.get("store"), workspace=given.get("workspace")
    )
    tests = config.load(Path(given["scenario"]))
    for run in config.runs(tests, night, node_limits(tests, site)):
        for number in range(2 * run.test.gate.confirm + 1):
            cancel_run(repeat_of(run, number), site)


def _flow_run_name() -> str:
    given = flow_run.parameters
    return f"{Path(given['scenario']).stem} {given.get('night') or flow_run.scheduled_start_time.date()}"


@flow(
    name="nightly-regression",
    flow_run_name=_flow_run_name,
    on_cancellation=[cancel_jobs],
    persist_result=True,
)
def nightly(
    scenario: str,
    night: str | None = None,
    system: str | None = None,
    cluster: str | None = None,
    store: str | None = None,
    workspace: str | None = None,
    new_attempt: bool = False,
) -> State[NightReport]:
    """Run every test of a scenario, compare each with its history, and write the report.

    Args:
        scenario: Path of a scenario or test file.
        night: Night id; the same id finds everything again. Default: the scheduled date, or a new one by hand.
        system: Name of a Site block, or path of a site file.
        cluster: `local`, `slurm`, or the name of a Slurm Cluster block.
        store: `file://` or `s3://` URL, or the name of a Harvest Store block.
        workspace: Folder that the compute nodes see under the same path.
        new_attempt: Open a new attempt for runs whose last one ended.
    """
    try:
        site = load_site(system, cluster=cluster, store=store, workspace=workspace)
        written = config.load(Path(scenario))
        limits = node_limits(written, site)
        tests = check_scenario(written, limits)
        for warning in tests.warnings:
            get_run_logger().warning("%s", warning)
        show_violations(tests)
        night = fix_night(night).night
        check_place(site)
        runs = config.runs(tests, night, limits)
        verdicts = _verdicts(tests, runs, night, site, new_attempt)
        return state_of_night(report(tests.name, night, verdicts, site, sweep_results(tests, runs, verdicts, limits)))
    except NightbridgeError as error:
        # Without a place for its report a night has none, only a message.
        get_run_logger().error("%s", error)
        return state_of_error(error)


def _verdicts(
    tests: Scenario, runs: Sequence[RunSpec], night: str, site: Site, new_attempt: bool
) -> tuple[Verdict, ...]:
    """Run everything that can run, side by side; every test has a verdict."""
    allow_stages()
    verdicts = [verdict_for_invalid(test, tests.name, night) for test in tests.invalid]
    one_run = partial(_verdict_of, site=site, attempt=_asked_attempt(new_attempt))
    runs_begin(run.run_key for run in runs)

    def run_all(some: Sequence[RunSpec]) -> list[Verdict]:
        return side_by_side(one_run, some, most=MOST_RUNS_AT_ONCE, on_interrupt=stop_watching)

    ahead = [run for run in runs if _comes_first(run, runs)]
    others = [run for run in runs if run not in ahead]
    first = [*run_all(ahead), *run_all(others)]
    verdicts += confirmed([*ahead, *others], first, run_all, partial(_judge_again, site=site))
    return tuple(verdicts)


def _comes_first(run: RunSpec, runs: Sequence[RunSpec]) -> bool:
    """Whether others are judged by what this run did tonight: a canary, or a reference that follows no other one."""
    named = any(other.test.gate.reference == run.test.id for other in runs)
    return not run.after and (run.test.canary or (named and run.test.gate.reference is None))


def _judge_again(run: RunSpec, asked: int, site: Site) -> Verdict:
    """The verdict on a run that was run again; one that cannot be given is a verdict, too."""
    try:
        verdict: Verdict = confirm(run, site, asked)
    except NightbridgeError as error:
        get_run_logger().error("%s: %s", run.run_key, error)
        return verdict_for_error(run, error, series_id(run, site.cluster.name))
    return verdict


def _asked_attempt(new_attempt: bool) -> AttemptChoice:
    if flow_run.run_count > 1:  # a person retries the night: the new attempt once asked for has been opened
        return AttemptChoice.AFTER_FAILURE
    return AttemptChoice.NEW if new_attempt else AttemptChoice.CURRENT


def _verdict_of(run: RunSpec, site: Site, attempt: AttemptChoice) -> Verdict:
    """Run one pipeline; whatever becomes of it is a verdict, so that one failing run never stops the others."""
    try:
        state = pipeline(run, site, attempt, return_state=True)
    finally:
        run_is_over(run.run_key)
    try:
        verdict: Verdict = result_of(state)
    except Exception as error:
        get_run_logger().error("%s: %s", run.run_key, error)
        return verdict_for_error(run, error, series_id(run, site.cluster.name))
    return verdict
