"""Try a change before it lands: pairs of runs with and without it through the same pipeline."""

from pathlib import Path
from typing import Annotated

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.logging import get_run_logger
from prefect.runtime import flow_run
from prefect.states import Completed, Failed
from pydantic import Field

from nightbridge import config
from nightbridge.blocks import site_of
from nightbridge.errors import InvalidInput
from nightbridge.flows.final_states import ends_plainly
from nightbridge.flows.forms import ClusterField, StoreField, SystemField
from nightbridge.flows.pipeline import pipeline_verdict
from nightbridge.gate.nodes import on_nodes
from nightbridge.gate.paired_trial import (
    TRIAL_EXIT_CODES,
    ProposedChange,
    Trial,
    TrialArm,
    arm_result,
    judged,
    needs_another_pair,
    of_commits,
    plan_trial,
    trial_arm,
)
from nightbridge.models import RunSpec, Site, utc_now
from nightbridge.nights.liveness import alive
from nightbridge.rules import check_scenario
from nightbridge.tasks.cancel import cancel_hook, note_search
from nightbridge.tasks.compare import interrupted, keep_trial, record_of, stored_verdict, with_noise
from nightbridge.tasks.context import shared_night
from nightbridge.tasks.prepare import resolve_change

PairsField = Annotated[int, Field(ge=1)] | None


@flow(name="try", flow_run_name="try {change}", on_cancellation=[cancel_hook], persist_result=True)
@ends_plainly
def try_flow(  # noqa: D417  (`SiteChoice` describes the others)
    scenario: str,
    change: ProposedChange,
    test_id: str | None = None,
    most_pairs: PairsField = None,
    system: SystemField = None,
    cluster: ClusterField = None,
    store: StoreField = None,
    workspace: str | None = None,
) -> State[Trial]:
    """Run a change beside the test as its file says, pair by pair, until the difference is decided.

    Args:
        scenario: File with the test.
        change: What is tried.
        test_id: Which of its tests; needed where it has several.
        most_pairs: Pairs at most; by the test's policy when unset.
    """
    trial, control = plan_trial(tried_run(scenario, test_id), change, utc_now())
    site = site_of(system=system, cluster=cluster, store=store, workspace=workspace)
    trial, control = interrupted(*of_commits(trial, control, resolve_change(change, control, site)), site)
    trial = with_noise(trial, control, site)
    note_search(trial.trial_id, site)
    with shared_night(), alive(site.workspace, str(flow_run.id)):
        arms: list[TrialArm] = []
        while needs_another_pair(trial, control.test.gate, most_pairs):
            arms += _pair(trial, control, len(arms), site)
            trial = judged(trial, arms, control.test.gate)
        keep_trial(trial, site)
    kind = Failed if TRIAL_EXIT_CODES[trial.answer] else Completed
    return kind(name=trial.answer.title().replace(" ", ""), message=f"{trial.change}: {trial.answer}", data=trial)


def tried_run(file: str, test_id: str | None) -> RunSpec:
    """The one run of a file, or of the test of it that is named.

    Raises:
        InvalidInput: There are several, or none that can run.
    """
    scenario = check_scenario(config.load(Path(file)))
    violations = [found.line(test.id) for test in scenario.invalid for found in test.findings]
    runs = [run for run in config.runs(scenario, "try") if test_id in (None, run.test.id)]
    if not runs and violations:
        raise InvalidInput("no test of it can run", subject=file, violations=violations)
    if len(runs) != 1 or (test_id is None and scenario.invalid):
        named = f"{test_id} has" if test_id else "holds"
        advice = f"Name one of its tests, and none that is a sweep: {', '.join(scenario.test_ids)}"
        raise InvalidInput(f"{named} {len(runs) or 'no'} runs, not one", subject=file, advice=advice)
    return runs[0]


def _pair(trial: Trial, control: RunSpec, started: int, site: Site) -> list[TrialArm]:
    """Run both arms of the next pair, the second one on the nodes of the first."""
    arms: list[TrialArm] = []
    for number in (started + 1, started + 2):
        run = on_nodes(trial_arm(control, trial.change, number), arms[-1].nodes if arms else "")
        get_run_logger().info("pair %d: %s", (number + 1) // 2, run.arm.role if run.arm else "")
        verdict = stored_verdict(run, site) or pipeline_verdict(run, site)
        arms.append(arm_result(run, verdict, record_of(verdict, site)))
    return arms
