"""Results of the comparison: verdicts, their evidence, sweeps and the report of a night."""

from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from pydantic import Field

from nightbridge.models.base import Model, StoredModel, StoredWord, WordTable
from nightbridge.models.metrics import MetricName
from nightbridge.models.scenario import RewardKind

if TYPE_CHECKING:
    import pandas as pd


class VerdictStatus(StoredWord):
    """The answer in the morning."""

    PASSED = "passed"
    IMPROVED = "improved"
    NO_BASELINE = "no_baseline"
    INSUFFICIENT_DATA = "insufficient_data"  # good as far as too few nights can tell
    REGRESSED = "regressed"
    SUSPICIOUS = "suspicious"  # better than can be believed: no baseline until a user accepts it
    UNSTABLE = "unstable"
    SHORT = "short"
    FAILED = "failed"
    CANCELLED = "cancelled"
    INFRASTRUCTURE = "infrastructure"
    INVALID = "invalid"


News = Literal["", "new", "worse", "standing", "better", "over"]
"""What a verdict is against the nights before it; empty for nothing of the kind."""

GOLDEN = "golden"
"""What a run is worse in that is not as good as golden values or its reference run, beside the names of metrics."""

ComparisonStatus = Literal["passed", "improved", "suspicious", "regressed", "missing", "no_baseline"]


class Comparison(Model):
    """One metric of a run against its baseline."""

    metric: str
    unit: str
    lower_is_better: bool
    value: float | None
    baseline: float | None
    change: float | None = Field(None, description="(value - baseline) / baseline, signed.")
    threshold: float
    status: ComparisonStatus
    by_itself: bool = Field(False, description="Whether it breaks a floor or ceiling, which no decision excuses.")
    since: str = Field("", description="First night of those that show it together; empty where one night does.")
    golden: float | None = Field(None, description="The golden values' own, over the same steps; None without any.")


class RangeCommit(Model):
    """One commit between two pins. Texts are the author's own and may hold anything."""

    commit: str = Field(description="Full 40-character commit.")
    subject: str
    author: str = Field(description="Name, without address.")
    authored_at: datetime
    url: str = Field("", description="Its repository, where that is not the range's own but the one before it moved.")
    bumps: tuple["Bump", ...] = Field((), description="Submodules that it moves.")
    only_bumps: bool = Field(False, description="Whether it does nothing else.")


class Bump(Model):
    """A submodule that a commit moves, and the submodule's commits in between."""

    folder: str
    url: str = ""
    before: str = Field(description="Full commit that was pinned.")
    after: str = Field(description="Full commit that is pinned now.")
    base: str = Field("", description="Their merge base: `before`, unless they are on different branches.")
    commits: tuple[RangeCommit, ...] = Field((), description="What came with it, oldest first.")
    reverted: tuple[RangeCommit, ...] = Field((), description="What only the old branch has, oldest first.")
    more: int = Field(0, description="Commits that are not named here.")
    note: str = Field("", description="Why commits are missing here.")

    def __str__(self) -> str:
        count = len(self.commits) + len(self.reverted) + self.more
        of = f" of {count} commit{'s' if count > 1 else ''}" if count else ""
        back = f", {len(self.reverted)} of them reverted" if self.reverted else ""
        return f"bump{of} of {self.folder} {self.before[:12]}..{self.after[:12]}{back}"


class ListedCommit(NamedTuple):
    """A commit as a list of suspects shows it.

    `text`: its subject, with what is to be said of its bumps, or after the submodule that it is of. `url`: of its
    repository. `is_bump`: it only moves submodules whose commits are listed, so that these are the suspects.
    """

    commit: RangeCommit
    url: str
    text: str
    is_bump: bool


class RepositoryChange(Model):
    """A repository that was pinned to another commit in the suspect night."""

    name: str = Field(description="`Megatron-Bridge` or `NeMo-Run`.")
    url: str
    before: str = Field(description="Full commit of the last good night.")
    after: str = Field(description="Full commit of the suspect night.")
    commits: tuple[RangeCommit, ...] = Field((), description="What came after `before`, up to `after`, newest first.")
    note: str = Field("", description="Why commits are missing here.")

    @property
    def listed(self) -> tuple[ListedCommit, ...]:
        """The commits, newest first, and after each that moves submodules those inside of its bumps."""
        return tuple(one for commit in self.commits for one in _listed(commit, self.url))


def _listed(commit: RangeCommit, url: str) -> Iterator[ListedCommit]:
    bumps = "; ".join(f"{bump}: {bump.note}" if bump.note else str(bump) for bump in commit.bumps)
    is_bump = commit.only_bumps and all(bump.commits or bump.reverted for bump in commit.bumps)
    yield ListedCommit(commit, commit.url or url, f"{commit.subject} ({bumps})" if bumps else commit.subject, is_bump)
    for bump in commit.bumps:
        for one in reversed(bump.commits):
            yield ListedCommit(one, bump.url, f"{bump.folder}: {one.subject}", is_bump=False)
        for one in bump.reverted:
            yield ListedCommit(one, bump.url, f"{bump.folder}, reverted: {one.subject}", is_bump=False)


class ValueChange(Model):
    """A value that is not the same in both nights; empty text for one that is not there."""

    name: str
    before: str
    after: str


class Suspects(Model):
    """What changed between the last night of the good level and the night that is suspect."""

    last_good: str = Field(description="The last night that certainly had the good level.")
    night: str = Field(description="The last night with which the other level may have begun.")
    run_before: str = Field(description="Run key of the former.")
    run_after: str = Field(description="Run key of the latter.")
    repositories: tuple[RepositoryChange, ...] = ()
    configuration: tuple[ValueChange, ...] = Field((), description="Of the test, and of what the run itself dumped.")
    environment: tuple[ValueChange, ...] = Field((), description="Image, launcher, nodes, environment variables.")
    notes: tuple[str, ...] = Field((), description="What could not be compared, and why.")


class ControlArm(Model):
    """The last good point that ran, or is to run, beside tonight's."""

    run_key: str = Field(description="Of the last good point.")
    night: str
    prefix: str = Field(description="Where its record is, relative to the store.")
    pairs: int = Field(0, description="Pairs that tonight has.")
    on_nodes: tuple[str, ...] = Field((), description="Nodes that the last wanted pair should have: the suspects.")
    slow_nodes: tuple[str, ...] = Field((), description="Nodes on which both arms were slow, and elsewhere not.")


class Verdict(StoredModel):
    """Stage 6, compare: what the night means for one test."""

    run_key: str
    test_id: str
    night: str
    status: VerdictStatus
    reasons: tuple[str, ...] = ()
    comparisons: tuple[Comparison, ...] = ()
    baseline_runs: tuple[str, ...] = Field((), description="Run keys of the runs compared with.")
    reference_run: str | None = Field(None, description="Run key of the run that its test names as reference.")
    as_golden: bool = Field(True, description="Whether it is as good as golden values in what no metric says.")
    job_id: int | None = None
    store_url: str = ""
    prefix: str = ""
    series: str = Field("", description="The series it was compared in; empty if unknown.")
    news: News = Field("", description="Whether it is new, worse, standing, better or over; empty for no news.")
    since: str = Field("", description="The first night of what stands; empty where nothing does.")
    certainty: str = Field("", description="How sure a bad one is, as `3 of 3 runs`; empty where nothing is known.")
    reruns: int = Field(0, description="Runs of this night that are still wanted before the verdict counts.")
    rerun_reason: str = Field("", description="Why further runs of this night are, or were, wanted.")
    further_runs: int = Field(0, description="Further runs that this night had: pairs' arms and re-runs.")
    repeat: int = Field(0, description="Which of those the run was itself; 0 for the night's own run.")
    suspect_nodes: tuple[str, ...] = Field((), description="Nodes that those runs should do without, if they can.")
    control: ControlArm | None = Field(None, description="The control arm; None where none was wanted.")
    moved: dict[str, float] = Field({}, description="As in the run's history row.")
    steps: int | None = Field(None, description="Steps that the run did; None where no run did any, or it is unknown.")
    steps_expected: int | None = None
    gpu_hours: float = Field(0.0, description="What the run cost: GPUs times hours.")
    confirmation_gpu_hours: float = Field(0.0, description="What its pairs and re-runs of this night cost.")
    suspects: Suspects | None = Field(None, description="What changed, where the run is not as the good ones were.")

    @property
    def exit_code(self) -> int:
        """The command line's exit code for this verdict alone."""
        return EXIT_CODES[self.status]

    @property
    def worse(self) -> dict[str, float]:
        """By metric that regressed, its signed relative change; and `GOLDEN`, which has none."""
        regressed = {item.metric: item.change or 0.0 for item in self.comparisons if item.status == "regressed"}
        return regressed if self.as_golden else {**regressed, GOLDEN: 0.0}

    def metric(self, name: str) -> Comparison | None:
        """The comparison of a metric such as `step_time`; None where it was not compared."""
        return next((comparison for comparison in self.comparisons if comparison.metric == name), None)


_STATUSES_BY_CODE = {
    0: "passed improved no_baseline insufficient_data",
    1: "regressed suspicious unstable",
    2: "invalid",
    3: "failed short cancelled",
    4: "infrastructure",
}

# A verdict that only a newer release knows is to be looked at.
EXIT_CODES = WordTable(
    {VerdictStatus(name): code for code, names in _STATUSES_BY_CODE.items() for name in names.split()}, lambda _: 1
)

GOOD_VERDICTS = frozenset(status for status, code in EXIT_CODES.items() if code == 0)
"""Nights with these make the baseline of later ones."""

NO_VALUE = frozenset({VerdictStatus.FAILED, VerdictStatus.SHORT, VerdictStatus.CANCELLED, VerdictStatus.INFRASTRUCTURE})
"""A run with one of these was measured over less than it should have been: its numbers do not stand for the test."""


def exit_code_of(statuses: Iterable[VerdictStatus]) -> int:
    """The first of 1, 3, 4, 2 that occurred, else 0."""
    codes = {EXIT_CODES[status] for status in statuses}
    return next((code for code in (1, 3, 4, 2) if code in codes), 0)


def worst_status(statuses: Iterable[VerdictStatus]) -> VerdictStatus:
    """What a night is called after: the first of its worst verdicts; where all are good, passed, or what all lack."""
    found = list(statuses)
    if worst := exit_code_of(found):
        return next(status for status in found if EXIT_CODES[status] == worst)
    if set(found) == {VerdictStatus.NO_BASELINE}:
        return VerdictStatus.NO_BASELINE
    lacking = {VerdictStatus.NO_BASELINE, VerdictStatus.INSUFFICIENT_DATA}
    return VerdictStatus.INSUFFICIENT_DATA if found and lacking.issuperset(found) else VerdictStatus.PASSED


class ReferenceResult(NamedTuple):
    """What golden values or a reference run say: whether the data are whole, whether they are as good, and why not.

    `values`: what the golden run measured, by metric and in its unit. `run_key`: that of the stored run that was used.
    `only_slower`: whether nothing but its speed is not as good.
    """

    whole: bool
    as_good: bool
    reasons: tuple[str, ...] = ()
    values: Mapping[MetricName, float] = {}
    run_key: str | None = None
    only_slower: bool = False


class SweepPoint(Model):
    """One point of a sweep that was run, `iterations` times."""

    point: dict[str, Any] = Field(description="Axis name to value, as in `RunSpec.sweep_point`.")
    run_keys: tuple[str, ...]
    status: VerdictStatus = Field(description="The gravest verdict of its runs.")
    value: float | None = Field(None, description="Median over its runs, in the metric's unit; None without one.")
    reward: float | None = Field(None, description="More is better; None where there is no value to reward.")
    reason: str = Field("", description="Why there is no reward; empty where there is one.")


class SkippedPart(Model):
    """The points of a sweep that a rule, as the first of all, refuses; they were not run."""

    point: dict[str, Any] = Field(
        description="The first of them, axis name to value; an axis that is not named may have any of its own."
    )
    points: int = Field(ge=1, description="How many there are.")
    rule: str
    reason: str = Field(description="The rule's message about the first.")


class SweepResult(Model):
    """What became of a swept test in one night."""

    test_id: str
    night: str
    metric: MetricName
    unit: str
    reward: RewardKind
    points: tuple[SweepPoint, ...] = Field(description="Best first; those without a reward last.")
    skipped: tuple[SkippedPart, ...] = ()
    skipped_points: int = Field(0, description="Points that were skipped, in all.")
    configuration: str = Field("", description="The best point alone as a scenario file, TOML; empty without one.")

    @property
    def best(self) -> SweepPoint | None:
        """The point with the highest reward; of several the one that was written first. None where no point has one."""
        return self.points[0] if self.points and self.points[0].reward is not None else None

    def to_dataframe(self) -> "pd.DataFrame":
        """One row for each point, best first: its axes, then `status`, `value`, `reward`, `reason` and `run_keys`."""
        import pandas as pd

        return pd.DataFrame([{**point.point, **point.model_dump(exclude={"point"})} for point in self.points])


class NightReport(Model):
    """What `nightly_regression` returns: every test's verdict and where the report is."""

    scenario: str
    night: str
    verdicts: tuple[Verdict, ...]
    report: str = Field("", description="Where the HTML report is kept.")
    sweeps: tuple[SweepResult, ...] = Field((), description="One for each swept test, in the scenario's order.")
    note: str = Field("", description="About the night as a whole, such as that it ran late.")
    found_again: bool = Field(False, description="Whether an earlier flow run of this night had every verdict already.")

    @property
    def exit_code(self) -> int:
        """The first of 1, 3, 4, 2 that occurred, else 0."""
        return exit_code_of(verdict.status for verdict in self.verdicts)

    def to_dataframe(self) -> "pd.DataFrame":
        """One row for each verdict; of each metric, `<metric>`, `<metric>_baseline` and `<metric>_change`."""
        import pandas as pd

        return pd.DataFrame(_flat(verdict) for verdict in self.verdicts)


def _flat(verdict: Verdict) -> dict[str, Any]:
    """A verdict as a row of a table."""
    names = {"run_key", "test_id", "night", "status", "news", "since", "job_id", "series", "store_url", "prefix"}
    row = {**verdict.model_dump(mode="json", include=names), "reasons": "; ".join(verdict.reasons)}
    for each in verdict.comparisons:
        row |= {each.metric: each.value, f"{each.metric}_baseline": each.baseline, f"{each.metric}_change": each.change}
    return row
