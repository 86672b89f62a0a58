"""A night: every run of a scenario side by side, each with its own verdict, then the report.

A suspicious run is proven before it counts as regressed: the loop around the verdicts of a night runs the last good
point beside it.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

from prefect import flow, tags
from prefect.client.schemas.objects import FlowRun, State
from prefect.flows import Flow
from prefect.logging import get_run_logger
from prefect.runtime import flow_run
from prefect.states import Completed

from nightbridge.blocks import load_site, site_choice
from nightbridge.errors import InvalidInput, NightbridgeError, PermanentError
from nightbridge.flows.final_states import TAG, ends_plainly, result_of, state_of_night
from nightbridge.flows.forms import ClusterField, StoreField, SystemField
from nightbridge.flows.pipeline import pipeline
from nightbridge.flows.threads import side_by_side
from nightbridge.gate.nodes import on_nodes
from nightbridge.gate.run_verdict import verdict_for_error, verdict_for_invalid
from nightbridge.models import NightReport, RunSpec, Site, SiteChoice, Verdict, VerdictStatus, worst_status
from nightbridge.models.base import NightId
from nightbridge.models.series import series_id
from nightbridge.nights.liveness import alive
from nightbridge.nights.prefect_api import FLOW
from nightbridge.nights.records import NightPlan, new_night
from nightbridge.report.sweeps import sweep_results
from nightbridge.report.tables import further_runs_of
from nightbridge.slurm.attempts import AttemptRequest
from nightbridge.tasks.cancel import cancel_night, cancel_searches, record_cancelled
from nightbridge.tasks.compare import (
    Spending,
    Wanted,
    attribution_budget,
    confirm,
    further_runs,
    nodes_of,
    stored_verdict,
    without_confirmation,
)
from nightbridge.tasks.context import NightContext, run_log, shared_night
from nightbridge.tasks.events import night_event
from nightbridge.tasks.limits import own_turn
from nightbridge.tasks.night import (
    CatchUp,
    NightSkipped,
    check_catch_up,
    check_same_tests,
    choose_night,
    fix_night,
    keep_start,
    last_retry,
    make_night_plan,
    own_night,
    plan_of,
    plan_of_this_run,
    read_scenario,
    workspace_of,
)
from nightbridge.tasks.prefect_calls import add_tags, insist, night_tags, run_tags, send_events, tagged
from nightbridge.tasks.report import report
from nightbridge.tasks.site_access import check_as_deployed, store_of

MAX_RUNS_AT_ONCE = 64
"""Runs of one night that are followed at once; each is a thread that mostly waits."""


# --- cancellation ----------------------------------------------------------------------------------------------------


def cancel_hook(flow: Flow[..., Any], flow_run: FlowRun, state: State[Any]) -> None:
    """Cancel the jobs of a cancelled night, by the plan that it made. Prefect runs this in another process.

    It is recorded as done once no job can live on; until then the reaper repeats it.
    """
    plan = plan_of(flow_run) or plan_of(flow_run, _named_workspace(flow_run))
    if plan is None:
        _succeeds(partial(_report_cancelled_unplanned, flow_run))
        return
    steps = (partial(cancel_night, plan), partial(cancel_searches, flow_run, plan.site))
    if all([_succeeds(step) for step in steps]):
        _succeeds(partial(record_cancelled, plan))
    _succeeds(partial(_send_end, plan, "cancelled"))


def _succeeds(step: Callable[[], None]) -> bool:
    """Take a step of a cancellation; an error is logged, for the other steps are due all the same."""
    try:
        step()
    except (NightbridgeError, OSError) as error:
        run_log().error("%s", error)
        return False
    return True


def _named_workspace(flow_run: FlowRun) -> Path | None:
    try:
        return workspace_of(flow_run)
    except NightbridgeError:  # what the parameters name cannot be read now
        return None


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


@flow(name=FLOW, flow_run_name=_flow_run_name, on_cancellation=[cancel_hook], persist_result=True)
@ends_plainly
def nightly(  # noqa: D417  (`SiteChoice` describes the others)
    scenario: str,
    tests: list[str] | None = None,
    night: NightId | None = None,
    system: SystemField = None,
    cluster: ClusterField = None,
    store: StoreField = None,
    workspace: str | None = None,
    retry: bool = False,
    new_attempt: bool = False,
    catch_up: CatchUp = "last",
) -> State[NightReport]:
    """Run every test of a scenario, compare each with its history, and write the report.

    Args:
        scenario: Path of a scenario or test file.
        tests: Ids of the tests to run, with those that they depend on; all of the scenario when empty.
        night: Night id; the same id finds everything again, and is refused with `tests` that leave out some of that
            night's. Default: the schedule's slot, or a new one by hand.
        retry: Run again the runs of the night that ended badly, as *Retry* does.
        new_attempt: Run again every run of the night that has ended, good ones too.
        catch_up: Which scheduled nights are run later when they could not begin in time: `last`, `all` or `none`.
    """
    with shared_night() as shared, ExitStack() as process:
        try:
            plan = plan_of_this_run()
            if plan is None:
                choice = site_choice({"system": system, "cluster": cluster, "store": store, "workspace": workspace})
                plan = _new_plan(process, scenario, tests or (), night, catch_up, choice)
            else:
                process.enter_context(alive(plan.site.workspace, plan.start.flow_run))
        except NightSkipped as skipped:
            return Completed(name="Skipped", message=str(skipped))
        # Prefect names the flow run before anybody knows the night, and again at each start.
        add_tags(*_tags_of(plan), name=f"{Path(scenario).stem} {plan.start.night}")
        return _end_state(plan, retry, new_attempt, shared)


def _new_plan(
    process: ExitStack, scenario: str, tests: Sequence[str], night: str | None, catch_up: CatchUp, choice: SiteChoice
) -> NightPlan:
    """Choose the night and plan it; whatever keeps it from starting is reported as its end."""
    decided = night or new_night()
    on = tagged(flow_run.tags or (), "cluster")
    try:
        chosen = fix_night(night)
        decided = chosen.night
        check_catch_up(chosen, catch_up)
        site = insist("the site's blocks", partial(load_site, choice))
        check_as_deployed(site)
        on = site.cluster.name
        # From here on, so that the loss of this host is noticed even before the plan is kept.
        process.enter_context(alive(site.workspace, str(flow_run.id)))
        wanted = read_scenario(scenario, tests)
        chosen, earlier = own_night(chosen, wanted, site)
        decided = chosen.night
        if tests and earlier:
            check_same_tests(wanted, earlier)
        return make_night_plan(wanted, chosen, site, choice)
    except Exception as error:  # a defect, too, is an end that somebody has to hear of
        ends = {NightSkipped: "skipped", InvalidInput: "invalid"}
        end = next((end for kind, end in ends.items() if isinstance(error, kind)), "infrastructure")
        send_events([night_event(Path(scenario).stem, decided, end, cluster=on, message=_in_words(error))])
        raise


def _in_words(error: Exception) -> str:
    """What an event says of an error; of a defect no more than its kind, for nothing has masked its text."""
    known = isinstance(error, NightSkipped | NightbridgeError)
    return str(error) if known else f"internal error: {type(error).__name__}; its flow run has the log"


def _tags_of(plan: NightPlan) -> tuple[str, ...]:
    return night_tags(plan.start.scenario, plan.start.night, plan.start.cluster)


def _end_state(plan: NightPlan, retry: bool, new_attempt: bool, shared: NightContext) -> State[NightReport]:
    try:
        keep_start(plan.start, plan.site)
        with tags(TAG):
            with own_turn(plan.site):
                # Every restart repeats the request: a start may end before each run has had its attempt.
                begun_at = plan.start.begun_at
                request = AttemptRequest(
                    new=begun_at if new_attempt else None, after_failure=last_retry() or (begun_at if retry else None)
                )
                written = _run(plan, request, shared)
            written = _attributed(plan, written)
        worst = worst_status(verdict.status for verdict in written.verdicts)
        add_tags(*_tags_of(plan), f"verdict:{worst}")
        return state_of_night(written)
    except Exception as error:
        _send_end(plan, "invalid" if isinstance(error, InvalidInput) else "infrastructure", _in_words(error))
        raise


def _run(plan: NightPlan, request: AttemptRequest, shared: NightContext) -> NightReport:
    """Run everything that can run, and write the report; every test has a verdict."""
    runs, start = plan.runs, plan.start
    invalid = [verdict_for_invalid(test, start.scenario, start.night) for test in plan.scenario.invalid]
    one_run = partial(_verdict_of, site=plan.site, request=request, shared=shared)
    shared.register_runs(run.run_key for run in runs)
    first = [run for run in runs if _comes_first(run, runs)]
    others = [run for run in runs if run not in first]
    judged = [each for some in (first, others) for each in side_by_side(one_run, some, most=MAX_RUNS_AT_ONCE)]
    verdicts = (*invalid, *_confirmed([*first, *others], judged, one_run, plan.site))
    return report(start, verdicts, plan.site, sweep_results(plan.scenario, runs, verdicts, plan.limits))


def _attributed(plan: NightPlan, written: NightReport) -> NightReport:
    """Find the causes of what is newly and certainly worse, where the site pays for it, and add them to the report.

    The report is there before, and the next night may begin: an attribution takes longer than people wait.
    """
    sure = {run.run_key for run in plan.runs if not run.test.gate.pairs}
    worse = [
        verdict
        for verdict in written.verdicts
        if verdict.status is VerdictStatus.REGRESSED
        and verdict.news != "standing"
        and (verdict.further_runs or verdict.run_key in sure)
    ]
    if not worse or not plan.site.budget.attribution:
        return written
    # Here, and not with every start of a night: most nights need no cause.
    from nightbridge.attribution.attribution_plan import AttributionRequest
    from nightbridge.flows.attribute import attribute

    reported = {verdict.run_key: verdict for verdict in written.verdicts}
    is_news = False
    # Of a sweep one point: what made it worse is hardly ever another cause in the others.
    for verdict in {each.test_id: each for each in reversed(worse)}.values():
        try:
            budget = attribution_budget(plan.start.night, plan.site)
            attribute(verdict.test_id, AttributionRequest(budget=budget, run_key=verdict.run_key), plan.site)
            is_news = True
        except PermanentError as error:  # such as a budget that is spent
            if _is_answered(verdict, plan.site):
                continue
            why = f"no cause is known: {' '.join(str(error).split())}"
            get_run_logger().warning("%s: %s", verdict.test_id, why)
            reported[verdict.run_key] = verdict.model_copy(update={"reasons": (*verdict.reasons, why)})
            is_news = True
        except Exception as error:  # the verdict stands without its cause
            get_run_logger().warning("%s: no cause is known: %s", verdict.test_id, error or type(error).__name__)
    if not is_news:
        return written
    again = report(plan.start, tuple(reported.values()), plan.site, written.sweeps)
    # The end that it finds in the store is this flow run's own.
    return again.model_copy(update={"found_again": written.found_again})


def _is_answered(verdict: Verdict, site: Site) -> bool:
    """Whether the report has the answer of a search, such as this night's before it was started again."""
    from nightbridge.attribution.attribution_result import result_for

    with suppress(NightbridgeError):
        return result_for(store_of(site), verdict, site.cluster.name) is not None
    return False


def _comes_first(run: RunSpec, runs: Sequence[RunSpec]) -> bool:
    """Whether others are judged by what this run did tonight: a canary, or a reference that follows no other one."""
    named = any(other.test.gate.reference == run.test.id for other in runs)
    return not run.after and (run.test.canary or (named and run.test.gate.reference is None))


def _verdict_of(run: RunSpec, site: Site, request: AttemptRequest, shared: NightContext) -> Verdict:
    """Run one pipeline; whatever becomes of it is a verdict, so that one failing run never stops the others."""

    def run_once() -> Verdict:
        while True:
            with tags(*run_tags(run, site.cluster.name)):
                verdict: Verdict = result_of(pipeline(run, site, request, return_state=True))
            # Prefect finds subflows of a retried flow run again by counting them, and a further try shifts the count.
            if verdict.run_key == run.run_key:
                return verdict

    try:
        return insist(f"the flow run of {run.run_key}", run_once)
    except Exception as error:
        run_log().error("%s: %s", run.run_key, error)
        return stored_verdict(run, site, request) or verdict_for_error(run, error, series_id(run, site.cluster.name))
    finally:
        shared.unregister_run(run.run_key)


# --- confirmation: a control arm, or re-runs --------------------------------------------------------------------------


def _confirmed(
    runs: Sequence[RunSpec], verdicts: Sequence[Verdict], one_run: Callable[[RunSpec], Verdict], site: Site
) -> list[Verdict]:
    """Give each run the further ones that its verdict requests, and judge it again, until no verdict requests more.

    A round's runs are started in the order of the tests, so that a retried night finds them again. Each is started
    once, whatever becomes of it: how many a verdict may request is bounded by its test's policy.
    """
    judged = list(verdicts)
    repeats = [0] * len(runs)
    spending = Spending(runs[0].night, site) if any(verdict.reruns for verdict in verdicts) else None
    while spending:
        lacking = {
            index: Wanted(runs[index], verdict, repeats[index])
            for index, verdict in enumerate(judged)
            if verdict.reruns > repeats[index]
        }
        for index, wanted in list(lacking.items()):
            if why := spending.allows(wanted):
                judged[index] = without_confirmation(wanted.verdict, why, site)
                del lacking[index]
        if not lacking:
            break
        for each in lacking.values():
            get_run_logger().warning("%s: %s", each.run.test.id, further_runs_of(each.verdict))
        _run_together([*lacking.values()], one_run, site)
        for index in lacking:
            repeats[index] = judged[index].reruns
            judged[index] = _judge_again(runs[index], repeats[index], site)
    return judged


def _run_together(wanted: Sequence[Wanted], one_run: Callable[[RunSpec], Verdict], site: Site) -> None:
    """Run what verdicts request: the arms of a pair one after the other on the same nodes, all else side by side."""

    def run_chain(chain: Sequence[RunSpec]) -> None:
        nodes = ""
        for run in chain:
            nodes = nodes_of(one_run(on_nodes(run, nodes)), site)
            if not nodes:  # its other arm would say nothing
                return

    chains = [chain for each in wanted for chain in further_runs(each, site)]
    side_by_side(run_chain, chains, most=MAX_RUNS_AT_ONCE)


def _judge_again(run: RunSpec, repeats: int, site: Site) -> Verdict:
    """The verdict on a run that was repeated; an error is a verdict, too."""
    try:
        return confirm(run, site, repeats)
    except Exception as error:
        get_run_logger().error("%s: %s", run.run_key, error)
        return verdict_for_error(run, error, series_id(run, site.cluster.name))
