"""The suspects behind a bad verdict: the nights between which it began, and what changed there.

The night in which a verdict says "regressed" need not be the one in which it began: a small change is sure only after
some nights. Where the history has a change point that began the present level of a metric that regressed, its range of
start nights counts; else the last good run and the first bad one after it.

The configuration is compared as the test requests it and as the run itself dumped it (`ConfigContainer.yaml`): a commit
that changes a recipe's default changes only the latter. What carries a run's own name or commit differs always
and says nothing, so those are made the same first.
"""

import re
from collections.abc import Callable, Mapping, Sequence, Set
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from nightbridge.errors import DamagedData, NightbridgeError
from nightbridge.gate.decisions import Decision, as_decided
from nightbridge.gate.trend import LevelChange, Trend, newest_facts, trends
from nightbridge.harvest.manifest import load_record
from nightbridge.history.nightly_values import changed_topology, good_runs_before, nights_of
from nightbridge.history.reading import DUMPED
from nightbridge.history.rows import HistoryRow, facts_of, good_for
from nightbridge.launch.config_container import ConfigContainer, container_differences, load_yaml
from nightbridge.launch.resources import variables_given
from nightbridge.models import RangeCommit, RepositoryChange, RunRecord, Suspects, ValueChange, Verdict, VerdictStatus
from nightbridge.models.series import NOT_IN_ARGUMENTS, NOT_IN_ENVIRONMENT, NOT_IN_OVERRIDES
from nightbridge.store.object_store import ObjectStore

NEEDS_SUSPECTS = frozenset(
    {
        VerdictStatus.REGRESSED,
        VerdictStatus.SUSPICIOUS,
        VerdictStatus.UNSTABLE,
        VerdictStatus.IMPROVED,
        VerdictStatus.FAILED,
        VerdictStatus.SHORT,
    }
)
"""Verdicts whose possible causes are listed."""

_Change = TypeVar("_Change", bound=RepositoryChange)

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
    return Suspects(
        last_good=before.night,
        night=after.night,
        run_before=before.run_key,
        run_after=after.run_key,
        repositories=repository_changes(before, after, commits_between),
        **differences(store, before, after)._asdict(),
    )


def suspect_nights(
    verdict: Verdict, rows: Sequence[HistoryRow], decisions: Sequence[Decision] = ()
) -> tuple[HistoryRow, HistoryRow] | None:
    """The last run that was certainly good, or accepted, and the last one with which the change may have begun."""
    nights = [
        as_decided(night.own, decisions) for night in nights_of(row for row in rows if row.night <= verdict.night)
    ]
    if not nights or nights[-1].night != verdict.night:
        return None
    regressed = set(verdict.worse)
    if verdict.status is VerdictStatus.REGRESSED and regressed:
        # What is worse since tonight has another cause than what was worse before.
        facts = newest_facts(regressed, nights[:-1])
        regressed = {metric for metric in regressed if facts_of([metric]) <= facts}
        nights = [good_for(night, facts) for night in nights]
    change = _change(verdict, regressed, rows, decisions)
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
    both = ((name, before.pins[name], new) for name, new in after.pins.items() if name in before.pins)
    changes = (
        (RepositoryChange(name=name, url=new.url, before=old.commit, after=new.commit), old.url)
        for name, old, new in both
        if old.commit != new.commit
    )
    return tuple(_named(change, url, commits_between) for change, url in changes)


def with_commits(found: Sequence[Trend], commits_between: CommitsBetween) -> tuple[Trend, ...]:
    """The trends with the commits that lie between the two pins of each change, newest first."""

    def named(change: LevelChange) -> LevelChange:
        suspects = (_named(pin, pin.url, commits_between) if pin.url else pin for pin in change.suspects)
        return change.model_copy(update={"suspects": tuple(suspects)})

    return tuple(trend.model_copy(update={"changes": tuple(map(named, trend.changes))}) for trend in found)


def _change(
    verdict: Verdict, regressed: Set[str], rows: Sequence[HistoryRow], decisions: Sequence[Decision]
) -> LevelChange | None:
    """The change that the verdict is about: of those that began the present levels of what regressed, the surest."""
    if verdict.status is not VerdictStatus.REGRESSED:
        return None
    until = [row for row in rows if row.night <= verdict.night]
    own = next((row for row in until if row.run_key == verdict.run_key), until[-1])
    known = [row for row in until if not changed_topology(row, own)]
    began = [
        trend.ongoing for trend in trends(known, decisions=decisions) if trend.metric in regressed and trend.ongoing
    ]
    return min(began, key=lambda change: change.p_value, default=None)


def _named(change: _Change, url_before: str, commits_between: CommitsBetween) -> _Change:
    """The same with its commits, or with the reason why they are missing."""
    moved = f"the repository changed; before: {url_before}" if url_before != change.url else ""
    try:
        commits = tuple(reversed(commits_between(change.url, change.before, change.after)))
    except NightbridgeError as error:
        return change.model_copy(update={"note": moved or " ".join(str(error).split())})
    kept = _newest(commits)
    more = len(commits) - len(kept)
    note = "; ".join(filter(None, (moved, f"and {more} older commits" if more > 0 else "")))
    return change.model_copy(update={"commits": kept, "note": note})


def _newest(commits: Sequence[RangeCommit]) -> tuple[RangeCommit, ...]:
    """The newest `MAX_COMMITS` of some, newest first; those inside of bumps count, too."""
    kept: list[RangeCommit] = []
    left = MAX_COMMITS
    for commit in commits[:MAX_COMMITS]:
        left -= 1
        bumps = []
        for bump in commit.bumps:
            named = bump.commits[max(len(bump.commits) - max(left, 0), 0) :]
            left -= len(named)
            bumps.append(bump.model_copy(update={"commits": named, "more": len(bump.commits) - len(named)}))
        kept.append(commit.model_copy(update={"bumps": tuple(bumps)}) if bumps else commit)
        if left <= 0:
            break
    return tuple(kept)


MAX_LETTERS = 200
"""Of one value; a longer one is cut."""


class Differences(NamedTuple):
    """What differs, and what could not be compared."""

    configuration: tuple[ValueChange, ...]
    environment: tuple[ValueChange, ...]
    notes: tuple[str, ...]


def differences(store: ObjectStore, before: HistoryRow, after: HistoryRow) -> Differences:
    """Compare two runs by their rows, and by what the store still has of them."""
    notes: list[str] = []
    rows = (before, after)
    old, new = (_record(store, row, notes) for row in rows)
    configuration = _dumped(store, rows, notes)
    of_rows = ({"image": row.image, "image digest": row.image_digest, "nodes": row.nodes, **row.facts} for row in rows)
    environment = _plain_changes(*of_rows)
    if old and new:
        configuration = [*_plain_changes(_requested(old), _requested(new)), *configuration]
        environment += _plain_changes(_surroundings(old), _surroundings(new))
    return Differences(tuple(configuration), tuple(environment), tuple(notes))


def _record(store: ObjectStore, row: HistoryRow, notes: list[str]) -> RunRecord | None:
    try:
        record = load_record(store, row.prefix) if row.prefix else None
    except DamagedData as error:
        notes.append(str(error))
        return None
    if record is None:
        notes.append(f"{row.run_key}: only its history row is stored, so its settings cannot be compared")
    return record


def _requested(record: RunRecord) -> dict[str, Any]:
    """What the test requests, without what never counts."""
    test = record.spec.test
    tables: tuple[tuple[str, Mapping[str, Any], tuple[str, ...]], ...] = (
        ("cmd_args", test.cmd_args, NOT_IN_ARGUMENTS),
        ("extra_cmd_args", {key.lstrip("+"): value for key, value in test.extra_cmd_args.items()}, NOT_IN_OVERRIDES),
    )
    return {
        f"{table}.{name}": neutral(value, record)
        for table, values, left_out in tables
        for name, value in values.items()
        if not any(fnmatchcase(name, pattern) for pattern in left_out)
    }


def requested_changes(before: RunRecord, after: RunRecord) -> list[ValueChange]:
    """What was requested differently of two runs, environment variables included."""
    old, new = (
        _requested(record) | {f"${name}": value for name, value in record.spec.test.extra_env_vars.items()}
        for record in (before, after)
    )
    return _plain_changes(old, new)


def _surroundings(record: RunRecord) -> dict[str, Any]:
    """Where and with what the run was launched. Secrets are no part of a plan's environment."""
    plan, launcher = record.plan, record.checkout.environment
    return {
        "launcher environment": launcher.digest[:12] if launcher else None,
        "NeMo-Run version": launcher.nemo_run_version if launcher else None,
        "number of nodes": plan.nodes,
        "tasks per node": plan.tasks_per_node,
        **{
            f"submodule {folder}": commit
            for repository in record.checkout.repositories
            for folder, commit in repository.submodules.items()
        },
        "sbatch options": " ".join(neutral(option, record) for option in plan.sbatch_args),
        **{
            f"${name}": neutral(value, record)
            for name, value in (variables_given(record) | plan.environment).items()
            if not any(fnmatchcase(name, pattern) for pattern in NOT_IN_ENVIRONMENT)
        },
    }


def _dumped(store: ObjectStore, rows: tuple[HistoryRow, HistoryRow], notes: list[str]) -> list[ValueChange]:
    """What differs between what the two runs dumped themselves."""
    before, after = (_container(store, row, notes) for row in rows)
    if before is None or after is None:
        return []
    return [
        ValueChange(name=found.path, before=_text(found.before), after=_text(found.after))
        for found in container_differences(before, after)
        if not any(fnmatchcase(found.path, pattern) for pattern in NOT_IN_OVERRIDES)
    ]


def _container(store: ObjectStore, row: HistoryRow, notes: list[str]) -> ConfigContainer | None:
    key = f"{row.prefix}/{DUMPED}"
    data = store.get(key) if row.prefix else None
    if data is None:
        return None
    try:
        commits = {pin.commit: "COMMIT" for pin in row.pins.values()}
        table = load_yaml(_replaced(data.decode(), row.run_key, row.attempt, commits).encode())
    except ValueError as error:
        notes.append(f"{store.url_of(key)}: not valid YAML: {error}")
        return None
    return ConfigContainer(Path(key), table) if isinstance(table, dict) else None


def _plain_changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[ValueChange]:
    pairs = ((name, before.get(name), after.get(name)) for name in sorted(before.keys() | after.keys()))
    return [
        ValueChange(name=name, before=_text(old), after=_text(new))
        for name, old, new in pairs
        if _text(old) != _text(new)
    ]


def _text(value: Any) -> str:
    text = "" if value is None else str(value)
    return text if len(text) <= MAX_LETTERS else f"{text[:MAX_LETTERS]}…"


def neutral(value: Any, record: RunRecord) -> str:
    """A value as text, with the same words in every run for what carries the run's own name, commits and folders."""
    repositories = record.checkout.repositories
    return _replaced(
        str(value),
        record.spec.run_key,
        record.job.attempt,
        {
            **{str(repository.path): "CHECKOUT" for repository in repositories},
            **{repository.commit: "COMMIT" for repository in repositories},
        },
    )


def _replaced(text: str, run_key: str, attempt: int, words: Mapping[str, str]) -> str:
    """Only what cannot be a value by itself is replaced: a night or a job may be called 50, and so may the steps."""
    for word, neutral in {run_key: "RUN", **words}.items():
        text = text.replace(word, neutral)
    return re.sub(rf"(?<=RUN[/-])a{attempt}\b", "ATTEMPT", text)
