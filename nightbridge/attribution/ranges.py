"""Ranges inside a factor that no commit of a repository makes: images, and a submodule that the test itself moves."""

from collections.abc import Sequence

from nightbridge.attribution.axes import Factor
from nightbridge.attribution.plan import AttributionPlan
from nightbridge.bisect.lineage import ListInner, SearchedRange, Step, short_name, steps_of
from nightbridge.bisect.plan import BisectPlan
from nightbridge.errors import InvalidInput
from nightbridge.models import Bump, RangeCommit, RunRecord


def images_range(factor: Factor, versions: Sequence[str], bad: RunRecord) -> SearchedRange:
    """The range of the images between two.

    Args:
        factor: The image.
        versions: What came after the good one, up to the bad one, as of `versions_between`.
        bad: The bad run: no image of another time is known.
    """
    when = bad.job.submitted_at
    before = (factor.good, *versions)
    steps = tuple(
        Step(commit=one, subject=f"after {short_name(old)}", author="", authored_at=when)
        for old, one in zip(before, versions, strict=False)
    )
    return SearchedRange(repository="image", url="", good=factor.good, bad=factor.bad, commits=steps)


def submodule_range(factor: Factor, bad: RunRecord, list_inner: ListInner) -> SearchedRange:
    """The range of a submodule that the test moved: its repository stays where the bad run has it.

    Args:
        factor: The submodule.
        bad: The bad run.
        list_inner: Lists the commits of its repository's submodules.

    Raises:
        InvalidInput: The commits cannot be listed.
    """
    pinned = bad.checkout.megatron_bridge
    moved = Bump(folder=factor.folder, before=factor.good, after=factor.bad, base=factor.good)
    when = pinned.committed_at or bad.job.submitted_at
    as_one = RangeCommit(
        commit=pinned.commit, subject=pinned.subject, author="", authored_at=when, bumps=(moved,), only_bumps=True
    )
    *steps, last = steps_of(pinned.commit, [as_one], list_inner)
    if last.kind == "bump":
        raise InvalidInput("its commits cannot be listed", thing=factor.name, advice=last.subject)
    # No commit of the repository pins it there, the last of them neither.
    steps = [*steps, last.model_copy(update={"moved": {factor.folder: factor.bad}})]
    return SearchedRange(
        repository="megatron_bridge",
        url=pinned.url,
        good=pinned.commit,
        bad=pinned.commit,
        commits=tuple(step.model_copy(update={"bump": ""}) for step in steps),
        moved={factor.folder: factor.good},
    )


def plan_of_range(plan: AttributionPlan, searched: SearchedRange) -> BisectPlan:
    """The bisect of a range inside a factor, before anything is known of it."""
    asked = ("test_id", "cluster", "series", "metric", "statistic", "unit", "since", "levels", "policy")
    count = len(searched.commits)
    return BisectPlan(
        bisect_id=plan.attribution_id,
        base=plan.bad,
        prior=(1 / count,) * count,
        **dict(searched),
        **{name: getattr(plan, name) for name in asked},
    )
