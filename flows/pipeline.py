"""One run: the stages in order, with a new attempt after a failure of the cluster, its own or a dependency's."""

from contextlib import ExitStack
from typing import Any

from prefect import flow
from prefect.client.schemas.objects import FlowRun, State
from prefect.flows import Flow
from prefect.logging import get_run_logger
from prefect.runtime import flow_run

from nightbridge.errors import NightbridgeError
from nightbridge.flows.final_states import ends_plainly, result_of, state_of_verdict
from nightbridge.flows.threads import mark_started
from nightbridge.gate.run_verdict import verdict_for_error
from nightbridge.models import ClusterLimits, RunRecord, RunSpec, Site, Verdict
from nightbridge.models.series import series_id
from nightbridge.nights.liveness import alive
from nightbridge.slurm.attempts import NO_REQUEST, AttemptRequest, choose_attempt, ended_jobs, next_attempt
from nightbridge.tasks.cancel import cancel_runs
from nightbridge.tasks.compare import compare
from nightbridge.tasks.context import is_in_night, shared_night
from nightbridge.tasks.harvest import harvest
from nightbridge.tasks.job import needs_another_job, submit_and_watch
from nightbridge.tasks.prefect_calls import add_tags
from nightbridge.tasks.prepare import clone, container, prepare, validate


def cancel_hook(flow: Flow[..., Any], flow_run: FlowRun, state: State[Any]) -> None:
    """Cancel the job of a cancelled flow run. Prefect may run this in another process: the job is found by its name."""
    run_key = RunSpec.model_validate(flow_run.parameters["run"]).run_key
    cancel_runs(run_key, [run_key], Site.model_validate(flow_run.parameters["site"]))


@flow(name="run-pipeline", flow_run_name="{run.run_key}", on_cancellation=[cancel_hook], persist_result=True)
@ends_plainly
def pipeline(run: RunSpec, site: Site, request: AttemptRequest = NO_REQUEST) -> State[Verdict]:
    """Clone, container, validate, submit, watch, harvest, compare.

    Args:
        run: The concrete configuration.
        site: Where it runs and where its results are kept.
        request: For which of its ended attempts a new one is opened.
    """
    mark_started()
    with ExitStack() as process:
        if not is_in_night():  # the process of a night or a search shows its own sign of life
            process.enter_context(alive(site.workspace, str(flow_run.id)))
        process.enter_context(shared_night())
        try:
            limits = prepare(run, site)
            verdict = compare(_run_and_harvest(run, site, limits, request), site)
        except NightbridgeError as error:
            get_run_logger().error("%s", error)
            verdict = verdict_for_error(run, error, series_id(run, site.cluster.name))
    add_tags(f"verdict:{verdict.status}")
    return state_of_verdict(verdict)


def pipeline_verdict(run: RunSpec, site: Site) -> Verdict:
    """Run one pipeline as a subflow; whatever becomes of it is a verdict."""
    try:
        verdict: Verdict = result_of(pipeline(run, site, return_state=True))
    except Exception as error:
        get_run_logger().error("%s: %s", run.run_key, error)
        return verdict_for_error(run, error)
    return verdict


def _run_and_harvest(run: RunSpec, site: Site, limits: ClusterLimits, request: AttemptRequest) -> RunRecord:
    checkout = clone(run, site)
    image = container(run, site)
    attempt = choose_attempt(request, run, site)
    ended = tuple(job for job in ended_jobs(run, site) if job.attempt < attempt.attempt)
    while True:
        plan = validate(run, checkout, image, site, limits, attempt.attempt, attempt.attempt_dir, ended)
        ended = (*ended, submit_and_watch(run, plan, site))
        if not needs_another_job(run, ended, site):
            return harvest(run, checkout, image, plan, ended, site)
        attempt = next_attempt(run, site, after=attempt.attempt)
        get_run_logger().warning("%s: %s; retrying as %s", ended[-1].name, ended[-1].outcome_reason, attempt.name)
