"""A night: every run of a scenario side by side, each with its own verdict, then the report."""

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from prefect import flow, tags
from prefect.client.schemas.objects import FlowRun, State
from prefect.events import Event
from prefect.flows import Flow
from prefect.logging import get_run_logger
from prefect.runtime import flow_run
from prefect.states import Completed

from nightbridge.blocks import load_site
from nightbridge.errors import InvalidInput, NightbridgeError
from nightbridge.flows.confirm import confirmed
from nightbridge.flows.pipeline import pipeline
from nightbridge.flows.side_by_side import side_by_side
from nightbridge.flows.states import TAG, result_of, state_of_error, state_of_night
from nightbridge.gate.verdict import verdict_for_error, verdict_for_invalid
from nightbridge.models import NightReport, RunSpec, Site, Verdict
from nightbridge.models.series import series_id
from nightbridge.nights.liveness import alive
from nightbridge.nights.records import NightPlan, new_night
from nightbridge.report.sweeps import sweep_results
from nightbridge.slurm.attempts import AttemptChoice
from nightbridge.tasks.cancel import cancel_night, record_cancelled
from nightbridge.tasks.compare import confirm, stored_verdict
from nightbridge.tasks.events import night_event
from nightbridge.tasks.limits import own_turn
from nightbridge.tasks.mirror import insist, send_events
from nightbridge.tasks.plan import (
    CatchUp,
    NightSkipped,
    check_catch_up,
    choose_night,
    fix_night,
    make_plan,
    plan_of,
    plan_of_this_run,
    show_name,
)
from nightbridge.tasks.report import report
from nightbridge.tasks.restarts import this_start
from nightbridge.tasks.submit import run_is_over, runs_begin
from nightbridge.tasks.this_run import run_log

# Runs of one night that are followed at once; each is a thread that mostly waits.
MAX_RUNS_AT_ONCE = 64


def cancel_jobs(flow: Flow[..., Any], flow_run: FlowRun, state: State[Any]) -> None:
    """Cancel the jobs of a cancelled night, by the plan that it made. Prefect runs this in another process."""
    plan = plan_of(flow_run) or plan_of(flow_run, _workspace_of(flow_run))
    by_plan = [partial(step, plan) for step in (cancel_night, record_cancelled, _tell_cancelled)] if plan else []
    for step in by_plan or [partial(_tell_cancelled_unplanned, flow_run)]:
        try:
            step()
        except NightbridgeError as error:  # the other steps are due all the same
            run_log().error("%s", error)


def _tell_cancelled(plan: NightPlan) -> None:
    send_events([_end_of(plan, "cancelled")])


def _tell_cancelled_unplanned(flow_run: FlowRun) -> None:
    """Tell the end of a night that was cancelled before it had its plan: it has no job and no record."""
    given = flow_run.parameters
    chosen = choose_night(given.get("night"), flow_run)
    send_events([night_event(Path(given["scenario"]).stem, chosen.night, "cancelled")])


def _end_of(plan: NightPlan, end: str, message: str = "") -> Event:
    start = plan.start
    return night_event(start.scenario, start.night, end, cluster=start.cluster, message=message)


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
    catch_up: CatchUp = "last",
) -> State[NightReport]:
    """Run every test of a scenario, compare each with its history, and write the report.

    Args:
        scenario: Path of a scenario or test file.
        night: Night id; the same id finds everything again. Default: the schedule's slot, or a new one by hand.
        system: Name of a Site block, or path of a site file.
        cluster: `local`, `slurm`, or the name of a Slurm Cluster block.
        store: `file://` or `s3://` URL, or the name of a Harvest Store block.
        workspace: Folder that the compute nodes see under the same path.
        new_attempt: Open a new attempt for runs whose last one ended.
        catch_up: Which scheduled nights are run later when they could not begin in time: `last`, `all` or `none`.
    """
    with ExitStack() as process:
        try:
            plan = plan_of_this_run()
            if plan is None:
                plan = _new_plan(process, scenario, night, catch_up, system, cluster, store, workspace)
            else:
                process.enter_context(alive(plan.site.workspace, plan.start.flow_run))
        except NightSkipped as skipped:
            return Completed(name="Skipped", message=str(skipped))
        except NightbridgeError as error:
            # Without a place for its report a night has none, only a message.
            get_run_logger().error("%s", error)
            return state_of_error(error)
        show_name(f"{Path(scenario).stem} {plan.start.night}")
        return _end_state(plan, new_attempt)


def _end_state(plan: NightPlan, new_attempt: bool) -> State[NightReport]:
    try:
        with tags(TAG), own_turn(plan.site):
            return state_of_night(_run(plan, _asked_attempt(new_attempt)))
    except NightbridgeError as error:
        get_run_logger().error("%s", error)
        send_events([_end_of(plan, "infrastructure", str(error))])
        return state_of_error(error)


def _new_plan(
    process: ExitStack,
    scenario: str,
    night: str | None,
    catch_up: CatchUp,
    system: str | None,
    cluster: str | None,
    store: str | None,
    workspace: str | None,
) -> NightPlan:
    """Choose the night and plan it; whatever keeps it from beginning is told as its end."""
    name, decided, on = Path(scenario).stem, night or new_night(), ""
    try:
        chosen = fix_night(night)
        decided = chosen.night
        check_catch_up(chosen, catch_up)
        site = insist(
            "the site's blocks", partial(load_site, system, cluster=cluster, store=store, workspace=workspace)
        )
        on = site.cluster.name
        # From here on, so that a host that is lost before the plan is kept is missed soon.
        process.enter_context(alive(site.workspace, str(flow_run.id)))
        return make_plan(scenario, chosen, site)
    except NightSkipped as skipped:
        send_events([night_event(name, decided, "skipped", cluster=on, message=str(skipped))])
        raise
    except NightbridgeError as error:
        end = "invalid" if isinstance(error, InvalidInput) else "infrastructure"
        send_events([night_event(name, decided, end, cluster=on, message=str(error))])
        raise


def _run(plan: NightPlan, attempt: AttemptChoice) -> NightReport:
    """Run everything that can run, and write the report, from what the store holds where a run could not say itself."""
    verdicts = _verdicts(plan, attempt)
    sweeps = sweep_results(plan.scenario, plan.runs, verdicts, plan.limits)
    written: NightReport = report(plan.start, verdicts, plan.site, sweeps)
    return written


def _verdicts(plan: NightPlan, attempt: AttemptChoice) -> tuple[Verdict, ...]:
    """Run everything that can run, side by side; every test has a verdict."""
    runs, start = plan.runs, plan.start
    verdicts = [verdict_for_invalid(test, start.scenario, start.night) for test in plan.scenario.invalid]
    one_run = partial(_verdict_of, site=plan.site, attempt=attempt)
    runs_begin(run.run_key for run in runs)

    def run_all(some: Sequence[RunSpec]) -> list[Verdict]:
        return side_by_side(one_run, some, most=MAX_RUNS_AT_ONCE)

    ahead = [run for run in runs if _comes_first(run, runs)]
    others = [run for run in runs if run not in ahead]
    first = [*run_all(ahead), *run_all(others)]
    verdicts += confirmed([*ahead, *others], first, run_all, partial(_judge_again, site=plan.site))
    return tuple(verdicts)


def _comes_first(run: RunSpec, runs: Sequence[RunSpec]) -> bool:
    """Whether others are judged by what this run did tonight: a canary, or a reference that follows no other one."""
    named = any(other.test.gate.reference == run.test.id for other in runs)
    return not run.after and (run.test.canary or (named and run.test.gate.reference is None))


def _judge_again(run: RunSpec, asked: int, site: Site) -> Verdict:
    """The verdict on a run that was run again; one that cannot be given is a verdict, too."""
    try:
        verdict: Verdict = confirm(run, site, asked)
    except Exception as error:
        get_run_logger().error("%s: %s", run.run_key, error)
        return verdict_for_error(run, error, series_id(run, site.cluster.name))
    return verdict


def _asked_attempt(new_attempt: bool) -> AttemptChoice:
    first = AttemptChoice.NEW if new_attempt else AttemptChoice.CURRENT
    # After the first start, the new attempt that was asked for has been opened.
    return {"first": first, "retry": AttemptChoice.AFTER_FAILURE, "resumption": AttemptChoice.CURRENT}[this_start()]


def _verdict_of(run: RunSpec, site: Site, attempt: AttemptChoice) -> Verdict:
    """Run one pipeline; whatever becomes of it is a verdict, so that one failing run never stops the others."""
    subflow = _Subflow(run, site, attempt)
    try:
        return insist(f"the flow run of {run.run_key}", subflow.verdict)
    except Exception as error:
        get_run_logger().error("%s: %s", run.run_key, error)
        return stored_verdict(run, site) or verdict_for_error(run, error, series_id(run, site.cluster.name))
    finally:
        run_is_over(run.run_key)


class _Subflow:
    """The subflow of one run, begun anew when Prefect's server did not answer while it was made or ended.

    A further try finds what the one before it has done; it must not open another attempt.
    """

    def __init__(self, run: RunSpec, site: Site, attempt: AttemptChoice) -> None:
        self._run = run
        self._site = site
        self._attempt = attempt

    def verdict(self) -> Verdict:
        """Run it once and return its verdict."""
        while True:
            attempt, self._attempt = self._attempt, AttemptChoice.CURRENT
            verdict: Verdict = result_of(pipeline(self._run, self._site, attempt, return_state=True))
            # Prefect finds subflows of a retried flow run again by counting them, and a try more shifts the count.
            if verdict.run_key == self._run.run_key:
                return verdict


def _workspace_of(flow_run: FlowRun) -> Path | None:
    """The workspace that a flow run's parameters name; None where they name none that can be read now."""
    given = {name: flow_run.parameters.get(name) for name in ("system", "cluster", "store", "workspace")}
    try:
        return load_site(given.pop("system"), **given).workspace
    except NightbridgeError:
        return None
