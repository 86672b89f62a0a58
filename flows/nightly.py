"""A night: every run of a scenario side by side, each with its own verdict, then the report.

A suspicious run is repeated before it counts as regressed: the loop around the verdicts of a night.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from prefect import flow, tags
from prefect.client.schemas.objects import FlowRun, State
from prefect.flows import Flow
from prefect.logging import get_run_logger
from prefect.runtime import flow_run
from prefect.states import Completed

from nightbridge.blocks import load_site
from nightbridge.errors import InvalidInput, NightbridgeError
from nightbridge.flows.final_states import TAG, log_errors_plainly, result_of, state_of_error, state_of_night
from nightbridge.flows.pipeline import pipeline
from nightbridge.flows.side_by_side import side_by_side
from nightbridge.gate.verdict import verdict_for_error, verdict_for_invalid
from nightbridge.models import NightReport, RunSpec, Site, SiteChoice, Verdict
from nightbridge.models.series import series_id
from nightbridge.nights.liveness import alive
from nightbridge.nights.records import NightPlan, new_night
from nightbridge.report.sweeps import sweep_results
from nightbridge.slurm.attempts import AttemptChoice, merged_options
from nightbridge.tasks.cancel import cancel_night, record_cancelled
from nightbridge.tasks.compare import confirm, stored_verdict
from nightbridge.tasks.context import NightContext, run_log, shared_night
from nightbridge.tasks.events import night_event
from nightbridge.tasks.limits import own_turn
from nightbridge.tasks.mirror import insist, send_events
from nightbridge.tasks.night import (
    CatchUp,
    NightSkipped,
    check_catch_up,
    choose_night,
    fix_night,
    make_plan,
    plan_of,
    plan_of_this_run,
    read_scenario,
    show_name,
    this_start,
    workspace_of,
)
from nightbridge.tasks.report import report

MAX_RUNS_AT_ONCE = 64
"""Runs of one night that are followed at once; each is a thread that mostly waits."""


# --- cancellation ----------------------------------------------------------------------------------------------------


def cancel_hook(flow: Flow[..., Any], flow_run: FlowRun, state: State[Any]) -> None:
    """Cancel the jobs of a cancelled night, by the plan that it made. Prefect runs this in another process."""
    plan = plan_of(flow_run) or plan_of(flow_run, _named_workspace(flow_run))
    by_plan = [partial(step, plan) for step in (cancel_night, record_cancelled, _report_cancelled)] if plan else []
    for step in by_plan or [partial(_report_cancelled_unplanned, flow_run)]:
        try:
            step()
        except NightbridgeError as error:  # the other steps are due all the same
            run_log().error("%s", error)


def _named_workspace(flow_run: FlowRun) -> Path | None:
    try:
        return workspace_of(flow_run)
    except NightbridgeError:  # what the parameters name cannot be read now
        return None


def _report_cancelled(plan: NightPlan) -> None:
    _send_end(plan, "cancelled")


def _report_cancelled_unplanned(flow_run: FlowRun) -> None:
    """Report the end of a night that was cancelled before it had its plan: it has no job and no record."""
    given = flow_run.parameters
    chosen = choose_night(given.get("night"), flow_run)
    send_events([night_event(Path(given["scenario"]).stem, chosen.night, "cancelled")])


def _send_end(plan: NightPlan, end: str, message: str = "") -> None:
    start = plan.start
    send_events([night_event(start.scenario, start.night, end, cluster=start.cluster, message=message)])


# --- the flow --------------------------------------------------------------------------------------------------------


def _flow_run_name() -> str:
    given = flow_run.parameters
    return f"{Path(given['scenario']).stem} {given.get('night') or flow_run.scheduled_start_time.date()}"


@flow(
    name="nightly-regression",
    flow_run_name=_flow_run_name,
    on_cancellation=[cancel_hook],
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
    log_errors_plainly()
    choice = SiteChoice.of({"system": system, "cluster": cluster, "store": store, "workspace": workspace})
    with shared_night() as shared, ExitStack() as process:
        try:
            plan = plan_of_this_run()
            if plan is None:
                plan = _new_plan(process, scenario, night, catch_up, choice)
            else:
                process.enter_context(alive(plan.site.workspace, plan.start.flow_run))
        except NightSkipped as skipped:
            return Completed(name="Skipped", message=str(skipped))
        except NightbridgeError as error:
            # Without a site for its report a night has none, only a message.
            return state_of_error(error)
        show_name(f"{Path(scenario).stem} {plan.start.night}")
        return _end_state(plan, new_attempt, shared)


def _new_plan(process: ExitStack, scenario: str, night: str | None, catch_up: CatchUp, choice: SiteChoice) -> NightPlan:
    """Choose the night and plan it; whatever keeps it from starting is reported as its end."""
    name, decided, on = Path(scenario).stem, night or new_night(), ""
    try:
        chosen = fix_night(night)
        decided = chosen.night
        check_catch_up(chosen, catch_up)
        site = insist("the site's blocks", partial(load_site, choice))
        on = site.cluster.name
        # From here on, so that the loss of this host is noticed even before the plan is kept.
        process.enter_context(alive(site.workspace, str(flow_run.id)))
        return make_plan(read_scenario(scenario), chosen, site)
    except (NightSkipped, NightbridgeError) as error:
        ends = {NightSkipped: "skipped", InvalidInput: "invalid"}
        end = next((end for kind, end in ends.items() if isinstance(error, kind)), "infrastructure")
        send_events([night_event(name, decided, end, cluster=on, message=str(error))])
        raise


def _end_state(plan: NightPlan, new_attempt: bool, shared: NightContext) -> State[NightReport]:
    try:
        with tags(TAG), own_turn(plan.site):
            return state_of_night(_run(plan, _requested_attempt(new_attempt), shared))
    except NightbridgeError as error:
        _send_end(plan, "infrastructure", str(error))
        return state_of_error(error)


def _requested_attempt(new_attempt: bool) -> AttemptChoice:
    first = AttemptChoice.NEW if new_attempt else AttemptChoice.CURRENT
    # After the first start, the new attempt that was requested has been opened.
    return {"first": first, "retry": AttemptChoice.AFTER_FAILURE, "resumption": AttemptChoice.CURRENT}[this_start()]


def _run(plan: NightPlan, attempt: AttemptChoice, shared: NightContext) -> NightReport:
    """Run everything that can run, and write the report; every test has a verdict."""
    runs, start = plan.runs, plan.start
    invalid = [verdict_for_invalid(test, start.scenario, start.night) for test in plan.scenario.invalid]
    one_run = partial(_verdict_of, site=plan.site, attempt=attempt, shared=shared)
    shared.register_runs(run.run_key for run in runs)

    def run_all(some: Sequence[RunSpec]) -> list[Verdict]:
        return side_by_side(one_run, some, most=MAX_RUNS_AT_ONCE)

    first = [run for run in runs if _comes_first(run, runs)]
    others = [run for run in runs if run not in first]
    judged = [*run_all(first), *run_all(others)]
    confirmed = _confirmed([*first, *others], judged, run_all, partial(_judge_again, site=plan.site))
    verdicts = (*invalid, *confirmed)
    return report(start, verdicts, plan.site, sweep_results(plan.scenario, runs, verdicts, plan.limits))


def _comes_first(run: RunSpec, runs: Sequence[RunSpec]) -> bool:
    """Whether others are judged by what this run did tonight: a canary, or a reference that follows no other one."""
    named = any(other.test.gate.reference == run.test.id for other in runs)
    return not run.after and (run.test.canary or (named and run.test.gate.reference is None))


def _verdict_of(run: RunSpec, site: Site, attempt: AttemptChoice, shared: NightContext) -> Verdict:
    """Run one pipeline; whatever becomes of it is a verdict, so that one failing run never stops the others."""
    tries = iter((attempt,))

    def run_once() -> Verdict:
        while True:
            # When Prefect's server did not answer, a further try finds what the one before it has done: it must not
            # open another attempt.
            choice = next(tries, AttemptChoice.CURRENT)
            verdict: Verdict = result_of(pipeline(run, site, choice, return_state=True))
            # Prefect finds subflows of a retried flow run again by counting them, and a further try shifts the count.
            if verdict.run_key == run.run_key:
                return verdict

    try:
        return insist(f"the flow run of {run.run_key}", run_once)
    except Exception as error:
        get_run_logger().error("%s: %s", run.run_key, error)
        return stored_verdict(run, site) or verdict_for_error(run, error, series_id(run, site.cluster.name))
    finally:
        shared.unregister_run(run.run_key)


# --- confirming re-runs ----------------------------------------------------------------------------------------------


def _confirmed(
    runs: Sequence[RunSpec],
    verdicts: Sequence[Verdict],
    run_again: Callable[[Sequence[RunSpec]], object],
    judge_again: Callable[[RunSpec, int], Verdict],
) -> list[Verdict]:
    """Repeat each run as often as its verdict requests, and judge it again, until no verdict requests more.

    A round's repeats are started in the order of the runs, so that a retried night finds them again. Each is started
    once, whatever becomes of it: how many a verdict may request is bounded by its test's policy.
    """
    judged = list(verdicts)
    repeats = [0] * len(runs)
    while True:
        lacking = [index for index, verdict in enumerate(judged) if verdict.reruns > repeats[index]]
        if not lacking:
            return judged
        run_again(
            [
                repeat_of(runs[index], number, judged[index].suspect_nodes)
                for index in lacking
                for number in range(repeats[index] + 1, judged[index].reruns + 1)
            ]
        )
        for index in lacking:
            repeats[index] = judged[index].reruns
            judged[index] = judge_again(runs[index], repeats[index])


def repeat_of(run: RunSpec, number: int, without: Iterable[str] = ()) -> RunSpec:
    """The same run once more, as a run of its own; not on the given nodes, unless the test names its nodes itself."""
    options = run.test.sbatch_args
    if nodes := ",".join(sorted(without)):
        options = merged_options((*options, f"--exclude={nodes}"))
    test = run.test.model_copy(update={"sbatch_args": options})
    return run.model_copy(update={"repeat": number, "test": test})


def _judge_again(run: RunSpec, repeats: int, site: Site) -> Verdict:
    """The verdict on a run that was repeated; an error is a verdict, too."""
    try:
        return confirm(run, site, repeats)
    except Exception as error:
        get_run_logger().error("%s: %s", run.run_key, error)
        return verdict_for_error(run, error, series_id(run, site.cluster.name))
