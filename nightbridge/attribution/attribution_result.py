"""What an attribution has found so far: its runs, the cause that they support, and the search inside a commit range."""

import math
import statistics
from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath
from typing import Literal

from pydantic import Field

from nightbridge.attribution.attribution_plan import (
    ROOT,
    AttributionPlan,
    PlannedRun,
    begun_designs,
    design_run,
    folder_of,
    plans_of,
)
from nightbridge.attribution.axes import AXIS_WORDS, Factor
from nightbridge.attribution.factor_search import Cause, Design, Exchange, descent_into
from nightbridge.bisect.plan import BUMPS, RANGES, BisectPlan, BisectRequest, Searched, Step, short_name
from nightbridge.bisect.result import NOTHING_SAID, TRIES, BisectResult, SearchRun, measured_by, target_text
from nightbridge.bisect.search import Failure
from nightbridge.bisect.shift import FAILURE, LOSSES
from nightbridge.errors import InvalidInput
from nightbridge.harvest.manifest import load_record, run_key_of
from nightbridge.history.nightly_values import BROKEN
from nightbridge.models import RunRecord, StoredModel, Verdict, VerdictStatus, has_date, night_order, utc_now
from nightbridge.nights.records import read_verdict
from nightbridge.numbers import format_count, format_percent, format_value
from nightbridge.store.object_store import ObjectStore, read_stored

Stop = Literal["", "runs", "budget"]
"""What ended it undecided; empty where the answer did."""

INNOCENT = 0.05
"""An axis is cleared where it has a part in the cause with less than this probability, however small a part."""

OTHER_STEPS = 0.01
"""Probability, beforehand, of the commits of a range that belong to other factors than the cause."""


class ExchangeRun(SearchRun):
    """One run of an attribution."""

    design: Design
    prefix: str = ""


class AttributionResult(StoredModel):
    """The answer, and what it rests on."""

    plan: AttributionPlan
    cause: Cause
    runs: tuple[ExchangeRun, ...]
    descents: tuple[BisectResult, ...] = Field((), description="The searches inside commit ranges of the cause.")
    notes: tuple[str, ...] = Field((), description="Why a range of the cause was not searched.")
    stopped: Stop = ""

    @property
    def gpu_hours(self) -> float:
        """What all runs cost."""
        return sum(run.gpu_seconds for run in self.runs) / 3600 + sum(one.gpu_hours for one in self.descents)

    @property
    def run_count(self) -> int:
        """How many runs were made."""
        return len(self.runs) + sum(len(one.points) for one in self.descents)

    @property
    def factors(self) -> tuple[Factor, ...]:
        """The factors of the cause; those that cannot be distinguished where it is indistinct."""
        return tuple(self.plan.factors[number] for number in self.cause.factors)

    @property
    def probability(self) -> float:
        """Of the whole answer, its commits included."""
        return self.cause.probability * math.prod(one.answer.probability for one in self.descents if one.culprits)

    @property
    def is_found(self) -> bool:
        """Whether a cause is named, and in every range of commits that was searched its commit."""
        return self.cause.kind == "found" and all(one.culprits for one in self.descents) and not self.notes

    def answers(self, plan: AttributionPlan) -> bool:
        """Whether it is decided, and as surely as a plan for the same change wants it: then nothing is run again.

        It is not where a range could not be searched: a registry may be open, or a repository whole by now.
        """
        is_decided = self.cause.kind != "undecided" and not self.stopped and not self.notes
        return is_decided and self.plan.policy.confidence >= plan.policy.confidence


def run_of(plan: AttributionPlan, planned: PlannedRun, verdict: Verdict, record: RunRecord | None) -> ExchangeRun:
    """What the run of a design measured, by its verdict and, where it was harvested, its record."""
    fields = measured_by(plan, verdict, record)
    return ExchangeRun(number=planned.number, design=planned.design, prefix=verdict.prefix, **fields)


def stored_runs(
    store: ObjectStore, plan: AttributionPlan, bad: RunRecord
) -> tuple[tuple[ExchangeRun, ...], tuple[PlannedRun, ...]]:
    """Of the designs that were begun, the runs that have ended, and those that have not.

    Raises:
        DamagedData: A stored run or its verdict is not what was committed.
    """
    ended, open_ones = [], []
    for planned in begun_designs(store, plan):
        run = design_run(plan, bad, planned)
        verdict = read_verdict(store, run.run_key, run.night)
        if verdict is None:
            open_ones.append(planned)
        else:
            record = load_record(store, verdict.prefix) if verdict.prefix else None
            ended.append(run_of(plan, planned, verdict, record))
    return tuple(ended), tuple(open_ones)


def exchanges_of(runs: Sequence[ExchangeRun]) -> list[Exchange]:
    """The runs as evidence: without those that the cluster lost, unless it always loses that design."""
    lost = [run.design for run in runs if run.status in NOTHING_SAID]
    return [
        Exchange(design=run.design, value=run.value)
        for run in runs
        if run.status not in NOTHING_SAID or lost.count(run.design) >= TRIES
    ]


def next_designs(
    plan: AttributionPlan, runs: Sequence[ExchangeRun], at_once: int, usual_cost: float
) -> tuple[tuple[Design, ...], Stop]:
    """The designs to run next, and what has ended it undecided; both empty where the answer has.

    At most `at_once`; `usual_cost` is that of one run, in GPU-hours, and 0 where it is not known.
    """
    designs = plan.search.next_designs(exchanges_of(runs), min(at_once, max(plan.policy.most_runs - len(runs), 0)))
    if not designs:
        full = len(runs) >= plan.policy.most_runs and plan.search.answer(exchanges_of(runs)).kind == "undecided"
        return (), "runs" if full else ""
    if plan.budget is not None:
        left = plan.budget - _hours_spent(runs, usual_cost)
        affordable = max(int(left / usual_cost), 0) if usual_cost > 0 else len(designs) * (left > 0)
        designs = designs[:affordable]
    return designs, "" if designs else "budget"


def _hours_spent(runs: Sequence[ExchangeRun], usual_cost: float) -> float:
    """GPU-hours of runs; one that died before its cost was known counts as a usual one, or a budget would never end.

    One that was refused, or cancelled before it began, has cost nothing.
    """
    free = (VerdictStatus.INVALID, VerdictStatus.CANCELLED)
    return sum(run.gpu_seconds / 3600 or usual_cost * (run.status not in free) for run in runs)


def evaluate(plan: AttributionPlan, runs: Sequence[ExchangeRun], stopped: Stop = "") -> AttributionResult:
    """Sum up all runs."""
    cause = plan.search.answer(exchanges_of(runs))
    return AttributionResult(plan=plan, cause=cause, runs=tuple(runs), stopped=stopped)


# --- into a range of commits -----------------------------------------------------------------------------------------


Group = tuple[int, ...]
"""The factors of a cause that are searched in one range of commits: a repository's, and its submodules'."""


def ranges_of(result: AttributionResult) -> tuple[Group, ...]:
    """The factors of a cause that was found which are ranges, by the repository, or image, that is searched."""
    groups: dict[Searched, list[int]] = {}
    for number in result.cause.factors if result.cause.kind == "found" else ():
        factor = result.plan.factors[number]
        if factor.is_range:
            groups.setdefault(factor.repository, []).append(number)
    return tuple(map(tuple, groups.values()))


def descent_request(result: AttributionResult, group: Group) -> BisectRequest:
    """The bisect of the range of a repository that a group of factors lies in."""
    plan, factor = result.plan, result.plan.factors[group[0]]
    # Its ends are those of the nights, or an older good one where these have no common line.
    return BisectRequest(
        metric=plan.metric,
        run_key=run_key_of(plan.bad),
        repository="nemo_run" if factor.axis == "nemo_run" else "megatron_bridge",
        confidence=plan.policy.confidence,
        most_runs=plan.policy.most_runs,
    )


def descent_plan(result: AttributionResult, group: Group, searched: BisectPlan) -> BisectPlan:
    """A bisect inside a group of factors, with what the exchanged runs say of it.

    Raises:
        InvalidInput: The range has no commit of these factors.
    """
    plan = result.plan
    folders = {plan.factors[number].folder for number in group}
    own = [step.folder in folders for step in searched.all_commits]
    if not any(own):
        names = " and ".join(plan.factors[number].name for number in group)
        raise InvalidInput("its commits cannot be listed", subject=names, advice="Bisect the repository that pins it")
    descent = descent_into(group, result.cause, plan.levels, exchanges_of(result.runs), len(own))
    fitting = [run for run in result.runs if run.value is not None and not any(run.design[at] for at in descent.good)]
    shares = [(1 - OTHER_STEPS) / sum(own) if mine else OTHER_STEPS / len(own) for mine in own]
    return searched.model_copy(
        update={
            "bisect_id": f"{plan.attribution_id}-{group[0]}",
            "levels": descent.levels,
            "known": descent.known,
            "prior": tuple(share / sum(shares) for share in shares),
            # Where another factor of the cause has to be good, a run in which it was.
            "base": max(fitting, key=lambda run: sum(run.design)).prefix if descent.good else plan.bad,
        }
    )


def within_budget(result: AttributionResult, within: BisectPlan, usual_cost: float) -> BisectPlan:
    """A bisect inside a factor with as many runs as the attribution has left for it.

    `usual_cost` is that of one run, in GPU-hours.
    """
    most = result.plan.policy.most_runs
    if result.plan.budget is not None and usual_cost > 0:
        spent = _hours_spent(result.runs, usual_cost) + sum(one.gpu_hours for one in result.descents)
        most = min(most, int((result.plan.budget - spent) / usual_cost))
    # Those that are known count as well: an end that nothing is left for is no question.
    policy = within.policy.model_copy(update={"most_runs": max(most + len(within.known), 1)})
    return within.model_copy(update={"policy": policy})


def with_descent(result: AttributionResult, found: BisectResult) -> AttributionResult:
    """The answer with what was found inside a factor; undecided there is undecided."""
    most = result.plan.policy.most_runs + len(found.plan.known)
    left: Stop = "budget" if found.plan.policy.most_runs < most else "runs"
    stopped = left if found.answer.kind == "undecided" else result.stopped
    return result.model_copy(update={"descents": (*result.descents, found), "stopped": stopped})


# --- in the store ----------------------------------------------------------------------------------------------------


def keep_result(store: ObjectStore, result: AttributionResult) -> None:
    """Keep the answer with its evidence."""
    store.put(f"{folder_of(result.plan)}/result.json", result.model_dump_json(indent=2).encode() + b"\n")


def load_result(store: ObjectStore, plan: AttributionPlan) -> AttributionResult | None:
    """The answer of an attribution; None where it has none yet."""
    key = f"{folder_of(plan)}/result.json"
    return read_stored(store, key, AttributionResult, what="not an attribution's result", advice="Delete it")


def result_for(store: ObjectStore, verdict: Verdict, cluster: str) -> AttributionResult | None:
    """The answer about what a verdict says became worse: that of its series between nights that overlap with its own.

    An older change, repaired or accepted since, is no cause of it.
    """
    if not verdict.series:
        return None
    found = verdict.suspects
    searched = {item.metric for item in verdict.comparisons if item.status == "regressed"}
    if verdict.status in BROKEN:
        searched = {FAILURE}
    elif "loss_curve" in searched:
        searched |= {LOSSES}
    good_night, bad_night = (found.last_good, found.night) if found else ("", verdict.since or verdict.night)
    for plan in plans_of(store, cluster, verdict.series):
        if has_date(plan.bad_night) and has_date(verdict.night):
            is_now = plan.bad_night <= verdict.night and plan.good_night < bad_night and good_night < plan.bad_night
        else:  # by its name a word is later than every date
            is_now = plan.bad_night in (verdict.night, bad_night)
        if is_now and plan.metric in searched:
            return load_result(store, plan)
    return None


def attribution_cost(store: ObjectStore, month: str) -> float:
    """GPU-hours that attributions of a month's changes (`2026-11`) have cost.

    One of a night without a date is of the month in which its result was written.

    Raises:
        DamagedData: A result cannot be read.
    """
    results = (item for item in store.list(ROOT) if item.key.endswith("/result.json"))
    mine = (
        item.key
        for item in results
        if night_order(item.key.split("/")[-2], item.modified or utc_now()).startswith(month)
    )
    found = (read_stored(store, key, AttributionResult, what="not a result", advice="Delete it") for key in mine)
    return sum(result.gpu_hours for result in found if result)


# --- in words --------------------------------------------------------------------------------------------------------

_TOGETHER = {
    "shared": "{0} and {1}, which share the change",
    "together": "{0} together with {1}, not one alone",
    "either": "{0} and {1}, each on its own",
}


def sentence(result: AttributionResult) -> str:
    """The whole answer in one line: the cause, how sure that is, what it is not, and what it cost."""
    cause, plan = result.cause, result.plan
    sure = format_percent(math.floor(1000 * min(result.probability, 0.999)) / 1000)
    cost = f"{format_count(result.run_count, 'run')}, {result.gpu_hours:.3g} GPU-hours"
    rest = f"; changed as well: {', '.join(plan.rest)}" if plan.rest else ""
    match cause.kind:
        case "already_bad":
            answer = f"nothing that was exchanged: the good point is as bad today, the cluster changed, {sure}{rest}"
        case "still_good":
            answer = f"nothing that changed: the bad point is as good as before today, it has passed, {sure}{rest}"
        case "indistinct":
            answer = f"one of {', '.join(_names(result))}, {sure}; no run that starts distinguishes them"
        case "undecided":
            likely = f", most likely {' and '.join(_names(result))}, {sure}" if result.factors else ""
            answer = f"undecided{_spent(result)}{likely if cause.runs else ', for none of its runs gave a result'}"
        case "found":
            names = _names(result)
            parts = " and ".join(format_percent(round(part, 2)) for part in cause.parts)
            share = {"partly": f", {parts} of the change", "shared": f" ({parts})"}.get(cause.relation, "")
            named = _TOGETHER[cause.relation].format(*names) if len(names) == 2 else names[0]
            answer = f"{named}{share}, {sure}"
            if result.stopped:
                answer += f"; its commit is undecided{_spent(result)}"
            elif not all(one.culprits for one in result.descents):
                answer += ", yet the search inside it did not find the change again"
    innocent = [f"not {words}" for words in _innocent(result)]
    return "; ".join(filter(None, (answer, ", ".join(innocent), cost)))


def _spent(result: AttributionResult) -> str:
    after_budget = f" after the budget of {result.plan.budget or 0.0:g} GPU-hours"
    return {"": "", "runs": " after all its runs", "budget": after_budget}[result.stopped]


def _names(result: AttributionResult) -> list[str]:
    """Each factor of the answer with its levels; those of a range in which commits were found, these commits."""
    found = {one.plan.repository: one for one in result.descents if one.culprits}
    names = {
        factor.repository if factor.is_range and factor.repository in found else factor.name: factor
        for factor in result.factors
    }
    return [
        _commits(found[key]) if key in found and factor.is_range else f"{factor.name} ({factor.change})"
        for key, factor in names.items()
    ]


def _commits(found: BisectResult) -> str:
    """The commits that a bisect has named, each inside of its bump."""
    both = " and " if found.answer.second else " or "
    return both.join(_point(step, RANGES[found.plan.repository]) for step in found.culprits)


def _point(step: Step, name: str) -> str:
    if name == "image":
        return f"image {short_name(step.commit)}, {step.subject}"
    inside = f", inside bump {step.bump[:12]} of {name}" if step.bump and step.folder else ""
    what = f'{PurePosixPath(step.folder).name or name} {step.commit[:12]} "{step.subject}"{inside}'
    return f"a commit that {what} brings" if step.kind in BUMPS else what


def _innocent(result: AttributionResult) -> Iterator[str]:
    """The axes that have no part in it: those that were exchanged, and the nodes where pairs have shown that."""
    named = {factor.axis for factor in result.factors}
    cause = result.cause
    for axis in AXIS_WORDS:
        own = [cause.marginals[at] for at, factor in enumerate(result.plan.factors) if factor.axis == axis]
        if axis not in named and ((own and sum(own) < INNOCENT) or (axis == "nodes" and result.plan.same_nodes)):
            yield AXIS_WORDS[axis]


def result_lines(result: AttributionResult) -> tuple[str, ...]:
    """The answer for a terminal: the sentence, then every factor with its probability and every run."""
    plan, cause = result.plan, result.cause
    lines = [f"{target_text(plan)} of {plan.test_id} since {plan.since}: {sentence(result)}"]
    for factor, share in sorted(zip(plan.factors, cause.marginals, strict=True), key=lambda each: -each[1]):
        lines.append(
            f"  {100 * share:5.1f} %  {AXIS_WORDS[factor.axis].removeprefix('the ')}: {factor.name}, {factor.change}"
        )
    for run in result.runs:
        shown = format_value(run.value, plan.unit) if run.value is not None else run.status.value
        lines.append(f"  run {run.number}: {shown}, {design_words(plan, run.design)}")
    for one in result.descents:
        ends = f"{short_name(one.plan.good)}..{short_name(one.plan.bad)}"
        lines.append(f"  then {format_count(len(one.points), 'run')} inside {ends}: {one.answer.kind}")
    return (*lines, *(f"  {note}" for note in result.notes), *(f"  not exchanged: {rest}" for rest in plan.rest))


def design_words(plan: AttributionPlan, design: Design) -> str:
    """A design in words: what is at its bad level, or all but what is good."""
    bad, good = (
        [factor.name for factor, at in zip(plan.factors, design, strict=True) if at is side] for side in (True, False)
    )
    if not bad or not good:
        return f"everything {'bad' if bad else 'good'}"
    return f"only {', '.join(bad)} bad" if len(bad) <= len(good) else f"only {', '.join(good)} good"


def shown_part(plan: AttributionPlan, runs: Sequence[ExchangeRun], run: ExchangeRun) -> float | None:
    """What part of the change a run shows, 0 to 1, between the medians of both controls; None for no value."""
    if isinstance(plan.levels, Failure) or run.value is None:
        return run.value
    good, bad = (
        statistics.median(
            [each.value for each in runs if each.value is not None and set(each.design) == {side}] or [level]
        )
        for side, level in ((False, plan.levels.good), (True, plan.levels.bad))
    )
    return None if good == bad else min(max((run.value - good) / (bad - good), 0.0), 1.0)
