"""Users' decisions about a change: it is known, it was fixed, or it is the new normal.

A decision is one small object, `decisions/<cluster>/<series>/<time>-<10 hex>.json`, written once and never changed; a
later one takes its place where they disagree. What each does to the history of the metrics that it is about:

    acknowledged   the level since `since` is what later nights are compared with, and every verdict says that it is
                   bad and known. Getting worse still raises an alert.
    baseline       the same, and nothing is bad about it.
    fixed          the nights from `since` to `night` count for nothing; what was before them is compared with.

Nothing is deleted: the nights stay in the history, and the changes in the trend, where they are shown as decided.
"""

import hashlib
from collections.abc import Sequence
from typing import Literal
from urllib.parse import quote

from pydantic import AwareDatetime, Field

from nightbridge.errors import InvalidInput
from nightbridge.models import MetricName, StoredModel, VerdictStatus
from nightbridge.models.metrics import METRIC_BY_NAME
from nightbridge.store.protocol import ObjectStore, read_stored

ROOT = "decisions"

DecisionKind = Literal["acknowledged", "fixed", "baseline"]

KIND_WORDS: dict[DecisionKind, str] = {
    "acknowledged": "acknowledged",
    "fixed": "marked as fixed",
    "baseline": "accepted as the new baseline",
}


class Decision(StoredModel):
    """A user's decision about one series."""

    kind: DecisionKind
    cluster: str
    series: str
    test_id: str
    run_key: str = Field("", description="The run that it was about; empty where a whole series was meant.")
    metrics: tuple[MetricName, ...] = Field((), description="The metrics that it is about; empty for all.")
    since: str = Field(description="First night of the level that was decided about.")
    night: str = Field(description="Last night of it that was known then.")
    who: str
    why: str
    when: AwareDatetime

    def is_about(self, metric: str) -> bool:
        """Whether it says something about a metric."""
        return not self.metrics or metric in self.metrics

    @property
    def text(self) -> str:
        """One line for reports."""
        about = ", ".join(METRIC_BY_NAME[name].label for name in self.metrics) or "the level"
        return f"{about} since {self.since} {KIND_WORDS[self.kind]} by {self.who} on {self.when:%Y-%m-%d}: {self.why}"


def record_decision(store: ObjectStore, decision: Decision) -> str:
    """Write a decision, and return its key. Writing the same one again changes nothing.

    Raises:
        InvalidInput: It lacks who or why.
    """
    if not decision.who.strip() or not decision.why.strip():
        raise InvalidInput(
            "a decision needs an author and a reason", thing=decision.series, advice="Give --who and --why"
        )
    data = decision.model_dump_json(indent=2).encode() + b"\n"
    name = f"{decision.when:%Y%m%dT%H%M%S%f}-{hashlib.sha256(data).hexdigest()[:10]}.json"
    key = f"{_folder(decision.cluster, decision.series)}{name}"
    store.put_if_absent(key, data)
    return key


def read_decisions(store: ObjectStore, cluster: str, series: str) -> tuple[Decision, ...]:
    """All decisions about a series, oldest first.

    Raises:
        DamagedData: One cannot be read. Leaving it out would repeat the alert, or hide later changes.
    """
    found = []
    for info in store.list(_folder(cluster, series)):
        decision = read_stored(store, info.key, Decision, what="not a decision", advice="Fix or delete it")
        found += [decision] if decision else []
    return tuple(sorted(found, key=lambda decision: decision.when))


def in_force(decisions: Sequence[Decision], metric: str) -> tuple[Decision, ...]:
    """The decisions about a metric that no later one has overruled, oldest first.

    A level that was repaired is no baseline any more, and one that is a baseline is not a fault that was repaired.
    """
    kept: list[Decision] = []
    for decision in sorted(decisions, key=lambda one: one.when):
        if decision.is_about(metric):
            kept = [other for other in kept if not _overrules(decision, other)]
            kept.append(decision)
    return tuple(kept)


def level_start(decisions: Sequence[Decision], metric: str) -> str:
    """The first night of the level that a metric is compared with; empty where all of its history counts."""
    starts = [decision.since for decision in in_force(decisions, metric) if decision.kind != "fixed"]
    return max(starts, default="")


def is_left_out(decisions: Sequence[Decision], metric: str, night: str, verdict: VerdictStatus | None = None) -> bool:
    """Whether a night of a metric counts for nothing.

    That is before the present level, at a fault that was repaired, and where it was too good to be believed and nobody
    has accepted it.
    """
    if verdict is VerdictStatus.SUSPICIOUS and not is_accepted(decisions, metric, night):
        return True
    forced = in_force(decisions, metric)
    if not forced:
        return False
    if night < level_start(forced, metric):
        return True
    return any(one.kind == "fixed" and one.since <= night <= one.night for one in forced)


def is_accepted(decisions: Sequence[Decision], metric: str, night: str) -> bool:
    """Whether a night belongs to what was accepted, so that it may be compared with, whatever its verdict was."""
    return any(one.kind != "fixed" and one.since <= night <= one.night for one in in_force(decisions, metric))


def decision_on(decisions: Sequence[Decision], metric: str, last_night_before: str, night: str) -> Decision | None:
    """The latest decision about a change of level: one that was made when its first nights were known.

    Args:
        decisions: Of the series.
        metric: The metric that changed.
        last_night_before: The last night that certainly had the old level.
        night: The first night of the new one.
    """
    made = [one for one in decisions if one.is_about(metric) and _knew(one, last_night_before, night)]
    return max(made, key=lambda one: one.when, default=None)


def _knew(decision: Decision, last_night_before: str, night: str) -> bool:
    if decision.kind == "fixed":
        # Both ends of the fault: where it began, and the night after its last one.
        return decision.since <= night and last_night_before <= decision.night
    return last_night_before < decision.night


def _overrules(later: Decision, earlier: Decision) -> bool:
    if later.kind == "fixed":
        return earlier.since >= later.since and earlier.night <= later.night
    return earlier.kind == "fixed" and earlier.since <= later.since <= earlier.night


def _folder(cluster: str, series: str) -> str:
    return f"{ROOT}/{quote(cluster, safe='')}/{series}/"
