"""What may be why a run is not as the good ones were: the nights between which it began, and what changed there.

The night in which a verdict says "regressed" need not be the one in which it began: a small change is sure only after
some nights. Where the history has a change point for a metric that regressed, its range of start nights counts; else
the last good run and the first bad one after it.
"""

from collections.abc import Callable, Sequence

from nightbridge.errors import NightbridgeError
from nightbridge.models import RangeCommit, RepositoryChange, Suspects, Verdict, VerdictStatus
from nightbridge.regression.decisions import Decision
from nightbridge.regression.differences import differences
from nightbridge.regression.gate import good_runs_before
from nightbridge.regression.nightly_values import nights_of
from nightbridge.regression.rows import HistoryRow, Pin
from nightbridge.regression.trend import Change, Trend, trends
from nightbridge.store.objects import ObjectStore

NEEDS_SUSPECTS = frozenset(
    {
        VerdictStatus.REGRESSED,
        VerdictStatus.UNSTABLE,
        VerdictStatus.IMPROVED,
        VerdictStatus.FAILED,
        VerdictStatus.SHORT,
    }
)
"""Verdicts whose possible causes are listed."""

MAX_COMMITS = 200
"""Commits that a verdict names; the newest, since bisect knows the others."""

CommitsBetween = Callable[[str, str, str], Sequence[RangeCommit]]
"""The commits of a repository (its URL) after one commit, up to another, oldest first."""


def find_suspects(
    store: ObjectStore,
    verdict: Verdict,
    rows: Sequence[HistoryRow],
    commits_between: CommitsBetween,
    decisions: Sequence[Decision] = (),
) -> Suspects | None:
    """What changed since the run was as it should be; None for a good run, and for one without a good one before it.

    What cannot be found out is a note: a lost mirror or a pruned run is no reason to lose the verdict.

    Args:
        store: Where the runs are.
        verdict: The verdict on the run.
        rows: The history of its series, the run's own row among them.
        commits_between: Lists commits from the mirror of a repository.
        decisions: Users' decisions about the series: known changes are not suspects.
    """
    if verdict.status not in NEEDS_SUSPECTS:
        return None
    found = suspect_nights(verdict, rows, decisions)
    if found is None:
        return None
    before, after = found
    changed = differences(store, before, after)
    return Suspects(
        last_good=before.night,
        night=after.night,
        run_before=before.run_key,
        run_after=after.run_key,
        repositories=repository_changes(before, after, commits_between),
        configuration=changed.configuration,
        environment=changed.environment,
        notes=changed.notes,
    )


def suspect_nights(
    verdict: Verdict, rows: Sequence[HistoryRow], decisions: Sequence[Decision] = ()
) -> tuple[HistoryRow, HistoryRow] | None:
    """The last run that was certainly good, and the last one with which the change may have begun."""
    nights = [night.own for night in nights_of(row for row in rows if row.night <= verdict.night)]
    if not nights or nights[-1].night != verdict.night:
        return None
    change = _change(verdict, rows, decisions)
    if change is not None:
        by_night = {row.night: row for row in nights}
        return by_night[change.last_night_before], by_night[change.latest_night]
    good = good_runs_before(verdict.night, nights)
    if not good:
        return None
    bad = (row for row in nights if row.night > good[-1].night and row.verdict is verdict.status)
    return good[-1], next(bad, nights[-1])


def repository_changes(
    before: HistoryRow, after: HistoryRow, commits_between: CommitsBetween
) -> tuple[RepositoryChange, ...]:
    """The repositories that are pinned differently in two runs, each with its commits, newest first."""
    pins: tuple[tuple[str, Pin | None, Pin | None], ...] = (
        ("Megatron-Bridge", before.megatron_bridge, after.megatron_bridge),
        ("NeMo-Run", before.nemo_run, after.nemo_run),
    )
    return tuple(
        _repository_change(name, old, new, commits_between)
        for name, old, new in pins
        if old and new and old.commit != new.commit
    )


def with_commits(found: Sequence[Trend], commits_between: CommitsBetween) -> tuple[Trend, ...]:
    """The trends with the commits that lie between the two pins of each change, newest first."""
    return tuple(
        trend.model_copy(update={"changes": tuple(_named(change, commits_between) for change in trend.changes)})
        for trend in found
    )


def _named(change: Change, commits_between: CommitsBetween) -> Change:
    suspects = []
    for suspect in change.suspects:
        if suspect.url:
            old, new = (Pin(url=suspect.url, commit=commit) for commit in (suspect.before, suspect.after))
            said = _repository_change(suspect.name, old, new, commits_between)
            suspect = suspect.model_copy(update={"commits": said.commits, "note": said.note})
        suspects.append(suspect)
    return change.model_copy(update={"suspects": tuple(suspects)})


def _change(verdict: Verdict, rows: Sequence[HistoryRow], decisions: Sequence[Decision]) -> Change | None:
    """The change for the worse that the verdict is about: of the metrics that regressed, the surest last one."""
    if verdict.status is not VerdictStatus.REGRESSED:
        return None
    regressed = {item.metric for item in verdict.comparisons if item.status == "regressed"}
    known = [row for row in rows if row.night <= verdict.night]
    last = [
        worse[-1]
        for trend in trends(known, decisions=decisions)
        if trend.metric in regressed
        and (worse := [change for change in trend.changes if change.worse and change.decision is None])
    ]
    return min(last, key=lambda change: change.p_value, default=None)


def _repository_change(name: str, old: Pin, new: Pin, commits_between: CommitsBetween) -> RepositoryChange:
    change = RepositoryChange(name=name, url=new.url, before=old.commit, after=new.commit)
    if old.url != new.url:
        return change.model_copy(update={"note": f"the repository changed; before: {old.url}"})
    try:
        commits = tuple(reversed(commits_between(new.url, old.commit, new.commit)))
    except NightbridgeError as error:
        return change.model_copy(update={"note": " ".join(str(error).split())})
    more = len(commits) - MAX_COMMITS
    note = f"and {more} older commits" if more > 0 else ""
    return change.model_copy(update={"commits": commits[:MAX_COMMITS], "note": note})
