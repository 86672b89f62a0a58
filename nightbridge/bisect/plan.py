"""From a stored change to a question that bisect can answer: which commits, which metric, which levels, which run.

The plan is kept in the store, `bisects/<id>/plan.json`, and a bisect with the same id resumes it. Its id is
also the night id of its runs, so that every point is found again, whoever started it.
"""

import hashlib
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from pydantic import Field

from nightbridge.bisect.search import BisectPolicy, Levels, Measured, Search, prior_of_nights
from nightbridge.errors import InvalidInput
from nightbridge.gate.trend import trends
from nightbridge.history.metrics import COMPLETE_OUTCOMES, measured
from nightbridge.history.nightly_values import Night, nights_of
from nightbridge.history.rows import HistoryRow, Pin
from nightbridge.models import (
    GitRepo,
    HarvestPolicy,
    Model,
    RangeCommit,
    RunRecord,
    RunSpec,
    StoredModel,
    VerdictStatus,
)
from nightbridge.models.metrics import COLUMNS, METRIC_BY_NAME, Metric
from nightbridge.store.protocol import ObjectStore, read_stored

Repository = Literal["megatron_bridge", "nemo_run"]
REPOSITORIES: dict[Repository, str] = {"megatron_bridge": "Megatron-Bridge", "nemo_run": "NeMo-Run"}

FindCommits = Callable[[str, str, str], tuple[RangeCommit, ...]]
"""Repository address, good and bad commit to the commits after the good one, oldest first."""

ROOT = "bisects"

NOISE_FLOOR = 0.003
"""Least noise between runs that is assumed, relative: a quiet history proves little."""
NOISE_NIGHTS = 60
"""Nights on each side of the change that the noise is taken from."""
RUNS_OF_A_POINT = 1000
"""More than any point is ever given; the number of a point's run is `place * RUNS_OF_A_POINT + n`."""


class BisectRequest(Model):
    """What to search: all of it is found in the test's history when left out."""

    metric: str | None = Field(None, description="Which metric; the one that became worse last when unset.")
    repository: Repository | None = Field(
        None, description="Which repository; the one whose commit changed when unset, Megatron-Bridge where both did."
    )
    good: str | None = Field(
        None, description="Commit to start after, any name of it; that of the last night with the old level when unset."
    )
    bad: str | None = Field(
        None, description="Commit to end with; that of the first night with the new level when unset."
    )
    bisect_id: str | None = Field(
        None, description="Resume this bisect, however the history has grown; the same search has the same id."
    )
    confidence: float = Field(0.99, gt=0.5, lt=1, description="Probability at which a commit is named.")
    most_runs: int = Field(100, ge=1, description="Runs after which the search ends undecided.")
    at_once: int | None = Field(None, ge=1, description="Runs at once; as many as the cluster has room for when unset.")

    @property
    def policy(self) -> BisectPolicy:
        """When a commit is certain enough."""
        return BisectPolicy(confidence=self.confidence, most_runs=self.most_runs)


DEFAULT_REQUEST = BisectRequest()


class BisectPlan(StoredModel):
    """What is searched. Nothing in it changes once the first run was started."""

    bisect_id: str
    test_id: str
    cluster: str
    series: str
    metric: str
    statistic: str
    unit: str
    since: str
    repository: Repository
    url: str
    good: str
    bad: str
    commits: tuple[RangeCommit, ...]
    levels: Levels
    prior: tuple[float, ...]
    base: str
    policy: BisectPolicy

    @property
    def search(self) -> Search:
        """The decisions over this range."""
        return Search(len(self.commits), self.levels, self.prior, self.policy)

    @property
    def places(self) -> range:
        """Every place that can be measured: 0 is the good commit."""
        return range(len(self.commits) + 1)

    def commit_at(self, place: int) -> str:
        """The commit of a place."""
        return self.commits[place - 1].commit if place else self.good


class Shift(NamedTuple):
    """A metric became worse between two nights."""

    metric: Metric
    statistic: str
    since: str
    good: HistoryRow
    bad: HistoryRow
    before: float
    after: float


def metric_named(name: str) -> Metric:
    """The gated metric of a name.

    Raises:
        InvalidInput: There is none.
    """
    if name not in METRIC_BY_NAME:
        raise InvalidInput("no such metric", thing=name, advice=f"Use one of {', '.join(METRIC_BY_NAME)}")
    return METRIC_BY_NAME[name]


def find_shift(rows: Sequence[HistoryRow], metric: str | None = None) -> Shift:
    """The latest change for the worse: a change point of the history, else what the gate called a regression.

    Raises:
        InvalidInput: There is none, or no such metric.
    """
    if metric is not None:
        metric_named(metric)
    nights = {night.own.night: night.own for night in nights_of(rows)}
    worse = [
        (change.night, abs(change.change), trend.metric, change)
        for trend in trends(rows)
        for change in trend.changes
        if change.worse and metric in (None, trend.metric)
    ]
    if not worse:
        return _regressed_shift(rows, metric)
    change = max(worse, key=lambda item: item[:3])[3]
    return Shift(
        metric_named(change.metric),
        change.statistic,
        change.night,
        nights[change.last_night_before],
        nights[change.latest_night],
        change.before,
        change.after,
    )


def make_plan(
    rows: Sequence[HistoryRow], find_commits: FindCommits, request: BisectRequest = DEFAULT_REQUEST
) -> BisectPlan:
    """Find the change and the commits that may have done it.

    Args:
        rows: The rows of one series.
        find_commits: Lists the commits of a range.
        request: What to search.

    Raises:
        InvalidInput: Nothing became worse, or no commit changed.
    """
    shift = find_shift(rows, request.metric)
    searched = request.repository or _changed_repository(shift, explicit=bool(request.good and request.bad))
    before, after = _pin(shift.good, searched), _pin(shift.bad, searched)
    good, bad = request.good or before.commit, request.bad or after.commit
    if good == bad:
        raise InvalidInput(
            f"{REPOSITORIES[searched]} had the same commit before and after",
            thing=f"{shift.good.test_id} since {shift.since}",
            advice="Look at the image, the configuration and the nodes, or name --good and --bad",
        )
    commits = find_commits(after.url, good, bad)
    levels = Levels(good=shift.before, bad=shift.after, noise=_noise(rows, shift))
    identity = "\n".join((shift.bad.series, searched, good, bad, shift.metric.name, shift.statistic))
    digest = hashlib.sha256(identity.encode()).hexdigest()[:8]
    return BisectPlan(
        bisect_id=f"{shift.bad.night[:23].rstrip('-')}-bisect-{digest}",
        test_id=shift.bad.test_id,
        cluster=shift.bad.cluster,
        series=shift.bad.series,
        metric=shift.metric.name,
        statistic=shift.statistic,
        unit=shift.metric.unit,
        since=shift.since,
        repository=searched,
        url=after.url,
        good=good,
        bad=bad,
        commits=commits,
        levels=levels,
        prior=prior_of_nights(len(commits), levels, _nights_inside(rows, shift, searched, commits), request.policy),
        base=shift.bad.prefix,
        policy=request.policy,
    )


def keep_plan(store: ObjectStore, plan: BisectPlan) -> BisectPlan:
    """Keep a plan, and return the one that holds: the first that was kept under this id."""
    store.put_if_absent(_key(plan.bisect_id), plan.model_dump_json(indent=2).encode() + b"\n")
    return load_plan(store, plan.bisect_id)


def load_plan(store: ObjectStore, bisect_id: str) -> BisectPlan:
    """Read a plan.

    Raises:
        InvalidInput: There is no bisect of this id.
        DamagedData: It cannot be read.
    """
    key = _key(bisect_id)
    plan = read_stored(store, key, BisectPlan, what="not a bisect plan", advice="Delete it to start over")
    if plan is None:
        raise InvalidInput("no bisect of this id", thing=store.url_of(key), advice="Check the id and the store")
    return plan


def point_run(plan: BisectPlan, base: RunRecord, place: int, number: int) -> RunSpec:
    """The run of a point: the configuration and the other pins of the bad night, at the point's commit.

    Args:
        plan: What is searched.
        base: The bad night's own run.
        place: Which commit.
        number: The how-manieth run of it, from 1.
    """
    test = base.spec.test
    pins = {"megatron_bridge": base.checkout.megatron_bridge.commit}
    if base.checkout.nemo_run is not None:
        pins["nemo_run"] = base.checkout.nemo_run.commit
    pins[plan.repository] = plan.commit_at(place)
    bridge = test.megatron_bridge
    changes = {
        "git_repos": tuple(_at(repo, pins["megatron_bridge"]) if repo == bridge else repo for repo in test.git_repos),
        "nemo_run_repo": _at(test.nemo_run_repo, pins.get("nemo_run", test.nemo_run_repo.commit)),
        "cmd_args": {**test.cmd_args, **_pinned_image(base)},
        "harvest": HarvestPolicy(checkpoint="none"),
        # A point is one measurement: whether it has to be repeated is bisect's decision.
        "gate": test.gate.model_copy(update={"confirm": 0}),
    }
    return base.spec.model_copy(
        update={
            "night": plan.bisect_id,
            "test": test.model_copy(update=changes),
            "repeat": place * RUNS_OF_A_POINT + number,
        }
    )


def _key(bisect_id: str) -> str:
    return f"{ROOT}/{bisect_id}/plan.json"


def _at(repo: GitRepo, commit: str) -> GitRepo:
    return repo.model_copy(update={"commit": commit})


def _pinned_image(base: RunRecord) -> dict[str, str]:
    """The image by its digest: a tag may mean another image today. A file is what it is."""
    reference, digest = base.image.reference, base.image.digest
    if base.image.kind == "none" or not reference or not digest or reference.startswith(("/", ".", "~")):
        return {}
    return {"container_image": reference if "@" in reference else f"{reference}@{digest}"}


def _pin(row: HistoryRow, repository: Repository) -> Pin:
    pin: Pin | None = getattr(row, repository)
    if pin is None:
        raise InvalidInput(f"no {REPOSITORIES[repository]} in these runs", thing=row.run_key)
    return pin


def _changed_repository(shift: Shift, explicit: bool) -> Repository:
    for repository in REPOSITORIES:
        before: Pin | None = getattr(shift.good, repository)
        after: Pin | None = getattr(shift.bad, repository)
        if before and after and before.commit != after.commit:
            return repository
    if explicit:
        return "megatron_bridge"
    raise InvalidInput(
        "no commit changed with it",
        thing=f"{shift.metric.label} of {shift.good.test_id} since {shift.since}",
        advice="Look at the image, the configuration and the nodes",
    )


def _regressed_shift(rows: Sequence[HistoryRow], metric: str | None) -> Shift:
    """Between the last good night and the first regressed one after it; of the metric that moved furthest."""
    nights = [night.own for night in nights_of(rows)]
    last_good = next(
        (
            place
            for place in range(len(nights) - 1, -1, -1)
            if nights[place].verdict in (VerdictStatus.PASSED, VerdictStatus.IMPROVED, VerdictStatus.NO_BASELINE)
            and any(night.verdict is VerdictStatus.REGRESSED for night in nights[place + 1 :])
        ),
        None,
    )
    if last_good is None:
        raise InvalidInput(
            "nothing became worse", thing=rows[0].test_id if rows else "history", advice="See `nightbridge history`"
        )
    bad = next(night for night in nights[last_good + 1 :] if night.verdict is VerdictStatus.REGRESSED)
    good = [night for night in nights[: last_good + 1] if night.verdict in (nights[last_good].verdict, "passed")][-7:]
    moved = []
    for one in COLUMNS if metric is None else (metric_named(metric),):
        earlier = [value for row in good if (value := measured(one, row.summary)) is not None]
        now = measured(one, bad.summary)
        if earlier and now is not None and (level := statistics.median(earlier)):
            change = (now - level) / abs(level)
            moved.append((change if one.lower_is_better else -change, one, level, now))
    if not moved or max(item[0] for item in moved) <= 0:
        raise InvalidInput("no metric became worse", thing=bad.run_key, advice="Name one with --metric")
    _, found, level, now = max(moved, key=lambda item: item[0])
    return Shift(found, found.field, bad.night, nights[last_good], bad, level, now)


def _noise(rows: Sequence[HistoryRow], shift: Shift) -> float:
    """Standard deviation of single runs around their level, robust, in the metric's unit."""
    values = [
        (night.own.night, value) for night in nights_of(rows) if (value := _night_value(night, shift)) is not None
    ]
    before = [abs(value - shift.before) for night, value in values if night < shift.since][-NOISE_NIGHTS:]
    after = [abs(value - shift.after) for night, value in values if night >= shift.since][:NOISE_NIGHTS]
    deviations = before + after
    found = 1.4826 * statistics.median(deviations) if len(deviations) >= 5 else 0.0
    # Few nights around their own median look quieter than they are.
    found *= math.sqrt(1 + 4 / max(len(deviations), 1))
    return max(found, NOISE_FLOOR * abs(shift.before))


def _night_value(night: Night, shift: Shift) -> float | None:
    metric = shift.metric._replace(field=shift.statistic)
    values = [
        value
        for run in night.runs
        if run.outcome in COMPLETE_OUTCOMES and (value := measured(metric, run.summary)) is not None
    ]
    return statistics.median(values) if values else None


def _nights_inside(
    rows: Sequence[HistoryRow], shift: Shift, repository: Repository, commits: Sequence[RangeCommit]
) -> list[Measured]:
    """Nights whose pin lies inside the range: they order the search."""
    places = {one.commit: place for place, one in enumerate(commits, start=1)}
    found = []
    for night in nights_of(rows):
        pin: Pin | None = getattr(night.own, repository)
        place = places.get(pin.commit) if pin else None
        value = _night_value(night, shift)
        if place is not None and place < len(commits) and value is not None:
            found.append(Measured(place=place, value=value))
    return found
