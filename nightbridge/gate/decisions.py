"""Users' decisions about a change: it is known, it was fixed, or it is the new normal.

A decision is one small object, `decisions/<cluster>/<series>/<time>-<10 hex>.json`, written once and never changed; a
later one takes its place where they disagree. What each does to the history of the metrics that it is about:

    acknowledged   the level since `since` is what later nights are compared with, and every verdict says that it is
                   bad and known. Getting worse still raises an alert.
    baseline       the same, and nothing is bad about it.
    fixed          the nights from `since` to `night` count for nothing; what was before them is compared with.

An acknowledged level and a baseline may end with a night (`until`): later nights are compared with what was before the
level, and the nights that passed by the decision make no baseline. A decision is withdrawn by a second object,
`<the same>.withdrawn`, as if it had never been made; the nights that it let pass are judged again (`stored_verdicts`).

Nights are compared by their `order`: a night that is named by a word would be after every date, so that a decision
about it names the time of its harvest.

Nothing is deleted: the nights stay in the history, and the changes in the trend, where they are shown as decided.
"""

import hashlib
from collections.abc import Sequence
from typing import Literal

from pydantic import AwareDatetime, Field

from nightbridge.errors import InvalidInput
from nightbridge.history.rows import HistoryRow
from nightbridge.models import MetricName, Model, StoredModel, VerdictStatus, night_order
from nightbridge.models.metrics import METRIC_BY_NAME
from nightbridge.store.object_store import ObjectStore, folder_of_series, read_stored

ROOT = "decisions"
WITHDRAWN = ".withdrawn"

DecisionKind = Literal["acknowledged", "fixed", "baseline"]

KIND_WORDS: dict[DecisionKind, str] = {
    "acknowledged": "acknowledged",
    "fixed": "marked as fixed",
    "baseline": "accepted as the new baseline",
}


class Withdrawal(StoredModel):
    """That a decision is withdrawn, by whom and why."""

    who: str
    why: str
    when: AwareDatetime


class Decision(StoredModel):
    """A user's decision about one series."""

    kind: DecisionKind
    cluster: str
    series: str
    test_id: str
    run_key: str = Field("", description="The run that it was about; empty where a whole series was meant.")
    metrics: tuple[MetricName, ...] = Field((), description="The metrics that it is about; empty for all.")
    since: str = Field(description="First night of the level that was decided about, by its `order`.")
    night: str = Field(description="Last night of it that was known then, by its `order`.")
    until: str = Field("", description="Last night that it holds for; empty for one without an end.")
    who: str
    why: str
    when: AwareDatetime
    ended: bool = Field(False, exclude=True, description="Whether it is over for the night that is judged.")

    @property
    def holds(self) -> bool:
        """Whether its level is what nights are compared with."""
        return self.kind != "fixed" and not self.ended

    def is_about(self, metric: str) -> bool:
        """Whether it says something about a metric."""
        return not self.metrics or metric in self.metrics

    @property
    def text(self) -> str:
        """One line for reports."""
        about = ", ".join(METRIC_BY_NAME[name].label for name in self.metrics) or "the level"
        until = f" until {self.until}{', which is over,' * self.ended}" if self.until else ""
        made = f"{KIND_WORDS[self.kind]}{until} by {self.who} on {self.when:%Y-%m-%d}"
        return f"{about} since {self.since} {made}: {self.why}"


class StoredDecision(Model):
    """A decision in the store, and its withdrawal."""

    key: str = Field(description="Its object.")
    decision: Decision
    withdrawn: Withdrawal | None = None

    @property
    def id(self) -> str:
        """What names it on the command line: ten hexadecimal digits."""
        return self.key.removesuffix(".json")[-10:]

    @property
    def text(self) -> str:
        """One line for reports."""
        if not self.withdrawn:
            return self.decision.text
        gone = f"withdrawn by {self.withdrawn.who} on {self.withdrawn.when:%Y-%m-%d}: {self.withdrawn.why}"
        return f"{self.decision.text}; {gone}"


def record_decision(store: ObjectStore, decision: Decision) -> str:
    """Write a decision, and return its key. Writing the same one again changes nothing.

    Raises:
        InvalidInput: It lacks who or why.
    """
    _check_author(decision, decision.series)
    data = decision.model_dump_json(indent=2).encode() + b"\n"
    name = f"{decision.when:%Y%m%dT%H%M%S%f}-{hashlib.sha256(data).hexdigest()[:10]}.json"
    key = f"{folder_of_series(ROOT, decision.cluster, decision.series)}/{name}"
    store.put_if_absent(key, data)
    return key


def record_withdrawal(store: ObjectStore, stored: StoredDecision, withdrawal: Withdrawal) -> None:
    """Withdraw a decision; one that is withdrawn already stays so, with its first reason.

    Raises:
        InvalidInput: The withdrawal lacks who or why.
    """
    _check_author(withdrawal, stored.decision.series)
    store.put_if_absent(f"{stored.key}{WITHDRAWN}", withdrawal.model_dump_json(indent=2).encode() + b"\n")


def read_decisions(store: ObjectStore, cluster: str, series: str) -> tuple[Decision, ...]:
    """The decisions about a series that are not withdrawn, oldest first. Raises as `list_decisions` does."""
    return tuple(one.decision for one in list_decisions(store, cluster, series) if not one.withdrawn)


def list_decisions(store: ObjectStore, cluster: str = "", series: str = "") -> tuple[StoredDecision, ...]:
    """All decisions of a store or about one series, withdrawn ones too, oldest first.

    Raises:
        DamagedData: One cannot be read. Leaving it out would repeat the alert, or hide later changes.
    """
    what, advice = "not a decision", "Fix or delete it"
    keys = {found.key for found in store.list(folder_of_series(ROOT, cluster, series) if series else ROOT)}
    found = []
    for key in keys:
        if key.endswith(WITHDRAWN):
            continue
        decision = read_stored(store, key, Decision, what=what, advice=advice)
        gone = f"{key}{WITHDRAWN}"
        withdrawn = read_stored(store, gone, Withdrawal, what=what, advice=advice) if gone in keys else None
        found += [StoredDecision(key=key, decision=_by_order(decision), withdrawn=withdrawn)] if decision else []
    return tuple(sorted(found, key=lambda one: one.decision.when))


def _by_order(decision: Decision) -> Decision:
    """The same; of a last night that an older release stored by a word it is known that it was before the decision."""
    return decision.model_copy(update={"night": night_order(decision.night, decision.when)})


def as_of(night: str, decisions: Sequence[Decision]) -> tuple[Decision, ...]:
    """The decisions as they stand when a night is judged: those that ended before it are over.

    Those about a level that begins after it say nothing of it: a night may be judged late, or again.
    """
    return tuple(
        one.model_copy(update={"ended": True, "night": one.until}) if one.until and one.until < night else one
        for one in decisions
        if one.since <= night
    )


def in_force(decisions: Sequence[Decision], metric: str) -> tuple[Decision, ...]:
    """The decisions about a metric that no later one has overruled, oldest first.

    A level that was repaired is no baseline any more, and one that is a baseline is not a fault that was repaired.
    """
    if not decisions:  # nearly always, and evaluated for each night of each metric
        return ()
    kept: list[Decision] = []
    for decision in sorted(decisions, key=lambda one: one.when):
        if decision.is_about(metric):
            kept = [other for other in kept if not _overrules(decision, other)]
            kept.append(decision)
    return tuple(kept)


def level_start(decisions: Sequence[Decision], metric: str) -> str:
    """The first night of the level that a metric is compared with; empty where all of its history counts."""
    starts = [decision.since for decision in in_force(decisions, metric) if decision.holds]
    return max(starts, default="")


def is_left_out(decisions: Sequence[Decision], metric: str, night: str, verdict: VerdictStatus | None = None) -> bool:
    """Whether a night of a metric counts for nothing.

    That is before the present level, at a fault that was repaired, and where it was too good to be believed and nobody
    has accepted it.
    """
    if verdict is VerdictStatus.SUSPICIOUS and not is_accepted(decisions, metric, night):
        return True
    forced = in_force(decisions, metric)
    if not forced:  # nearly always, and asked for each night of each metric
        return False
    is_fixed = any(one.kind == "fixed" and one.since <= night <= one.night for one in forced)
    return is_fixed or night < level_start(forced, metric)


def is_accepted(decisions: Sequence[Decision], metric: str, night: str) -> bool:
    """Whether a night belongs to what was accepted, so that it may be compared with, whatever its verdict was."""
    return any(one.holds and one.since <= night <= one.night for one in in_force(decisions, metric))


def is_good_by_decision(decisions: Sequence[Decision], row: HistoryRow) -> bool:
    """Whether all that was bad in a night was accepted, so that its code is a last good point as well.

    Nobody knows in what a night was too good to be believed: then all has to be accepted.
    """
    if row.verdict not in (VerdictStatus.REGRESSED, VerdictStatus.SUSPICIOUS) or row.broken:
        return False
    # One that regressed in no metric is worse than golden values, which no decision changes.
    bad = list(row.worse if row.verdict is VerdictStatus.REGRESSED else METRIC_BY_NAME)
    return bool(bad) and all(is_accepted(decisions, metric, row.order) for metric in bad)


def as_decided(row: HistoryRow, decisions: Sequence[Decision]) -> HistoryRow:
    """A run as it counts since users decided about it: good where all that was bad in it is accepted."""
    good = is_good_by_decision(decisions, row)
    if not row.worse and not good:
        return row
    worse = {
        name: change
        for name, change in row.worse.items()
        if name in row.broken or not is_accepted(decisions, name, row.order)
    }
    return row.model_copy(update={"worse": worse, "verdict": VerdictStatus.PASSED if good else row.verdict})


def passed_by_ended(decisions: Sequence[Decision], metric: str, night: str) -> bool:
    """Whether a night was compared with a level whose decision is over, so that passing proves nothing."""
    return any(one.ended and one.since <= night <= one.night for one in in_force(decisions, metric))


def decision_on(decisions: Sequence[Decision], metric: str, last_night_before: str, night: str) -> Decision | None:
    """The latest decision about a change of level: one that was made when its first nights were known.

    Args:
        decisions: Of the series.
        metric: The metric that changed.
        last_night_before: The last night that certainly had the old level.
        night: The first night of the new one.
    """
    made = [one for one in decisions if one.is_about(metric) and not one.ended and _knew(one, last_night_before, night)]
    return max(made, key=lambda one: one.when, default=None)


def _knew(decision: Decision, last_night_before: str, night: str) -> bool:
    if decision.kind == "fixed":
        # Both ends of the fault: where it began, and the night after its last one.
        return decision.since <= night and last_night_before <= decision.night
    return last_night_before < decision.night


def _overrules(later: Decision, earlier: Decision) -> bool:
    if later.kind == "fixed":
        return earlier.since >= later.since and earlier.night <= later.night
    return not earlier.holds and earlier.since <= later.since <= earlier.night


def _check_author(said: Decision | Withdrawal, series: str) -> None:
    if not said.who.strip() or not said.why.strip():
        raise InvalidInput("a decision needs an author and a reason", subject=series, advice="Give --who and --why")
