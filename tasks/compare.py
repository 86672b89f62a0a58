"""Stage 6, compare: the run against its history, a verdict, and the further runs that it requests.

Those are pairs with the last good point, or the same run once more, as far as the site's budget goes. A trial runs such
pairs as well, for a change before it lands.
"""

from collections.abc import Iterable, Iterator, Sequence
from datetime import date, timedelta
from functools import partial
from typing import NamedTuple

from prefect.logging import get_run_logger

from nightbridge.errors import DamagedData, InvalidInput, NightbridgeError, TransientError
from nightbridge.gate.control_arm import arm_run, proof_needed
from nightbridge.gate.nodes import on_nodes
from nightbridge.gate.paired_trial import Trial, markdown, noise_of_history
from nightbridge.gate.stored_verdicts import judge_and_record
from nightbridge.harvest.manifest import committed_attempts, load_record, run_prefix
from nightbridge.history.history_store import compact
from nightbridge.history.reading import read_history
from nightbridge.models import RunRecord, RunSpec, Site, Verdict, night_order, utc_now
from nightbridge.models.series import series_id
from nightbridge.nights.records import confirmation_cost, read_verdict
from nightbridge.report.tables import markdown_table
from nightbridge.slurm.attempts import NO_REQUEST, AttemptRequest, attempts_of
from nightbridge.store.object_store import ObjectStore
from nightbridge.tasks.context import run_log, this_night
from nightbridge.tasks.prefect_calls import artifact_key, show_markdown
from nightbridge.tasks.site_access import commits_between, store_of
from nightbridge.tasks.stage import never_reused, patiently, stage

TRIAL_DAYS = 3
"""Days on which an interrupted trial is resumed: after that its base is not what it would be tried on."""


@stage("compare", waits_for=(TransientError,))
def compare(record: RunRecord, site: Site) -> Verdict:
    """Judge the run, then make it part of the history that later runs are judged by."""
    return _judge(record, store_of(site), site)


@stage("confirm", waits_for=(TransientError,), key=never_reused)
def confirm(run: RunSpec, site: Site, attempt: int) -> Verdict:
    """Judge a stored run again, now that its night has further runs; `attempt` is how many were requested."""
    store = store_of(site)
    attempts = committed_attempts(store, run.run_key)
    record = load_record(store, attempts[-1]) if attempts else None
    if record is None:
        raise DamagedData("no record", subject=run.run_key, advice="Harvest the run again")
    return _judge(record, store, site)


def stored_verdict(run: RunSpec, site: Site, request: AttemptRequest = NO_REQUEST) -> Verdict | None:
    """The verdict that a run of this night already has; None without one, or where it cannot be read.

    That of an earlier attempt than the newest, or than the one that is requested, is none: it says nothing about the
    job that has ended or failed since.
    """
    try:
        verdict = read_verdict(store_of(site), run.run_key, run.night)
        attempts = attempts_of(run.run_key, site.workspace)
        if verdict is None or not attempts:  # without any the workspace has been emptied since
            return verdict
        is_tonights = verdict.prefix == run_prefix(run, attempts[-1].attempt) and not request.is_open_for(attempts[-1])
        return verdict if is_tonights else None
    except (NightbridgeError, OSError) as error:
        run_log().warning("the stored verdict of %s cannot be read: %s", run.run_key, error)
        return None


def _judge(record: RunRecord, store: ObjectStore, site: Site) -> Verdict:
    night, log = this_night(), get_run_logger()
    proof = proof_needed(night.runs, site.budget.false_alarms)
    commits = partial(commits_between, site)
    verdict = judge_and_record(store, record, site.contract, commits, night.canary_series, proof)
    test, cluster = record.spec.test.id, record.job.cluster
    key = artifact_key("verdict", record.spec.scenario, cluster, test)
    show_markdown(f"the verdict of {test}", markdown_table((verdict,)), key=key, description=f"Verdict of {test}")
    log.info("%s: %s %s", test, verdict.status, "; ".join(verdict.reasons))
    try:
        compact(store, cluster, record.series)
    except NightbridgeError as error:  # it only keeps the history quick to read
        log.warning("the history was not compacted: %s", error)
    return verdict


# --- the further runs of a night -------------------------------------------------------------------------------------


class Wanted(NamedTuple):
    """A run whose verdict requests further ones, and how many of them were started already."""

    run: RunSpec
    verdict: Verdict
    started: int


def further_runs(wanted: Wanted, site: Site) -> Iterator[Sequence[RunSpec]]:
    """The runs that a verdict requests: those of one item run one after the other on the same nodes."""
    run, verdict, started = wanted
    base = _last_good_point(verdict, site)
    numbers = range(started + 1, verdict.reruns + 1)
    if base is None:
        yield from ([_without(run.model_copy(update={"repeat": number}), verdict.suspect_nodes)] for number in numbers)
        return
    suspects = verdict.control.on_nodes if verdict.control else ()
    arms = [arm_run(run, base, number, bool(suspects)) for number in numbers]
    if suspects:
        arms = [on_nodes(arm, ",".join(suspects)) for arm in arms]
    elif not started:
        arms = [_without(arm, verdict.suspect_nodes) if arm.arm and arm.arm.pair == 1 else arm for arm in arms]
    yield from (arms[at : at + 2] for at in range(0, len(arms), 2))


def _last_good_point(verdict: Verdict, site: Site) -> RunRecord | None:
    """The record of the run that a control arm repeats; None where none is wanted, or where it is gone."""
    if (control := verdict.control) is None:
        return None
    try:
        record = patiently(lambda: load_record(store_of(site), control.prefix))
    except (NightbridgeError, OSError) as error:
        run_log().warning("%s: no control arm: %s", verdict.run_key, error)
        return None
    if record is None:
        run_log().warning("%s: no control arm: %s is not stored any more", verdict.run_key, control.run_key)
    return record


def record_of(verdict: Verdict, site: Site) -> RunRecord | None:
    """The harvested run that a verdict is about; None where nothing was harvested."""
    return load_record(store_of(site), verdict.prefix) if verdict.prefix else None


def nodes_of(verdict: Verdict, site: Site) -> str:
    """The nodes that a run had, as Slurm writes them; empty where it had none, or its record cannot be read."""
    try:
        record = patiently(lambda: record_of(verdict, site))
    except (NightbridgeError, OSError) as error:
        run_log().warning("%s: its nodes are not known: %s", verdict.run_key, error)
        return ""
    return record.job.status.nodes if record and record.job.status else ""


def _without(run: RunSpec, nodes: Iterable[str]) -> RunSpec:
    """The same run not on the given nodes, but for those that its test requires."""
    excluded = ",".join(sorted(nodes))
    if not excluded:
        return run
    options = (*run.test.sbatch_args, f"--exclude={excluded}")
    return run.model_copy(update={"test": run.test.model_copy(update={"sbatch_args": options})})


# --- what they may cost ----------------------------------------------------------------------------------------------


class Spending:
    """What confirmation may still cost tonight, in GPU-hours, by the site's budget."""

    def __init__(self, night: str, site: Site) -> None:
        self._limits = site.budget
        self._before = self._tonight = 0.0
        self._unknown = ""
        try:
            self._before = 0.0 if site.budget.month is None else patiently(lambda: spent_beside(night, site))
        except (NightbridgeError, OSError) as error:  # the verdicts stand, and so does the night's report
            self._unknown = f"not confirmed: what the month has spent cannot be read: {error}"

    def allows(self, wanted: Wanted) -> str:
        """Take the cost of what a verdict requests from the budget: each further run as long as the night's own.

        Returns:
            Why it is not done; empty where the budget has room for it.
        """
        if self._unknown:
            return self._unknown
        cost = (wanted.verdict.reruns - wanted.started) * wanted.verdict.gpu_hours
        for whose, limit, spent in (
            ("night", self._limits.night, self._tonight),
            ("month", self._limits.month, self._before + self._tonight),
        ):
            if limit is not None and spent + cost > limit:
                left = f"the {whose}'s budget of {limit:g} has {max(limit - spent, 0.0):.2f} left"
                return f"not confirmed: it takes {cost:.2f} GPU-hours, and {left}"
        self._tonight += cost
        return ""


def spent_beside(night: str, site: Site) -> float:
    """GPU-hours that a night's month has spent on confirmation and on the search for causes."""
    # Here, for numpy comes with it, which few nights need so early.
    from nightbridge.attribution.attribution_result import attribution_cost

    store, month = store_of(site), night_order(night, utc_now())[: len("2026-11")]
    return confirmation_cost(store, month) + attribution_cost(store, month)


def attribution_budget(night: str, site: Site) -> float:
    """GPU-hours that the search for the cause of a regression may cost, by the site's budget.

    Raises:
        InvalidInput: The month has nothing left.
    """
    budget, month = site.budget.attribution, site.budget.month
    left = budget if month is None else min(budget, month - spent_beside(night, site))
    if left <= 0:
        raise InvalidInput(
            f"the month's budget of {month:g} GPU-hours is spent", subject=night, advice="Raise [budget]"
        )
    return left


def without_confirmation(verdict: Verdict, why: str, site: Site) -> Verdict:
    """The verdict that nothing more is done about, stored with the reason; the night's report has it in any case."""
    final = verdict.model_copy(update={"reruns": 0, "reasons": (*verdict.reasons, why)})
    run_log().warning("%s: %s", verdict.run_key, why)
    key, document = f"{final.prefix.rpartition('/')[0]}/verdict.json", final.model_dump_json(indent=2).encode()
    try:
        patiently(lambda: store_of(site).put(key, document))
    except (NightbridgeError, OSError) as error:
        run_log().error("%s: the verdict is not stored: %s", verdict.run_key, error)
    return final


# --- trials ----------------------------------------------------------------------------------------------------------


def interrupted(trial: Trial, control: RunSpec, site: Site) -> tuple[Trial, RunSpec]:
    """A trial under the name under which it was begun, if that was before midnight and it has no answer yet."""
    day, question = trial.trial_id[:10], trial.trial_id[10:]
    for back in range(1, TRIAL_DAYS):
        name = f"{date.fromisoformat(day) - timedelta(days=back)}{question}"
        begun = next((site.workspace / "runs").glob(f"*{name}-*"), None)
        if begun and next(store_of(site).list(f"tries/{name}/"), None) is None:
            return trial.model_copy(update={"trial_id": name}), control.model_copy(update={"night": name})
    return trial, control


def with_noise(trial: Trial, control: RunSpec, site: Site) -> Trial:
    """A trial with the noise that the history of its test has; as it is where there is no history."""
    cluster = site.cluster.name
    rows = read_history(store_of(site), cluster, series_id(control, cluster))
    noise = noise_of_history(rows, control.test.gate) if rows else {}
    return trial.model_copy(update={"noise": noise})


@stage("try-result")
def keep_trial(trial: Trial, site: Site) -> None:
    """Keep what a trial found, and show it."""
    store_of(site).put(f"tries/{trial.trial_id}/result.json", trial.model_dump_json(indent=2).encode() + b"\n")
    show_markdown("the trial's answer", markdown(trial), key=f"try-{trial.trial_id}", description=f"{trial.change}")
