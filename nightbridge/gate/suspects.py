"""The suspects: what is not the same in two runs of a series, of the last good night and of the one with the change.

By their rows: what is pinned, with the commits in between, the image, the nodes and the topology. By what the store
still has of them: configuration and environment. (`trend` says which two nights these are.)

The configuration is compared as the test requests it and as the run itself dumped it (`ConfigContainer.yaml`): a commit
that changes a recipe's default changes only the latter. What carries a run's own name or commit differs always
and says nothing, so those are made the same first.
"""

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeVar

from nightbridge.errors import DamagedData, NightbridgeError
from nightbridge.harvest.manifest import load_record
from nightbridge.history.reading import DUMPED
from nightbridge.history.rows import HistoryRow
from nightbridge.launch.config_container import ConfigContainer, container_differences, load_yaml
from nightbridge.launch.resources import variables_given
from nightbridge.models import RangeCommit, RepositoryChange, RunRecord, Suspects, ValueChange
from nightbridge.models.series import NOT_IN_ARGUMENTS, NOT_IN_ENVIRONMENT, NOT_IN_OVERRIDES
from nightbridge.store.object_store import ObjectStore

_Change = TypeVar("_Change", bound=RepositoryChange)

MAX_COMMITS = 200
"""Commits that a verdict names; the newest, since bisect knows the others."""

SHARED_NIGHTS = 30
"""Nights in which two are looked for that share a series."""

TURNS = 3
"""So many changes from one to another and back are two that run by turns: a trial that is taken back has two."""

CommitsBetween = Callable[[str, str, str], Sequence[RangeCommit]]
"""The commits of a repository (its URL) after one commit, up to another, oldest first."""


def suspects_between(
    store: ObjectStore, before: HistoryRow, after: HistoryRow, commits_between: CommitsBetween
) -> Suspects:
    """All that is not the same in two runs. What cannot be found out is a note: a mirror is lost, or a run pruned."""
    notes: list[str] = []
    rows = (before, after)
    old, new = (_record(store, row, notes) for row in rows)
    configuration = _dumped(store, rows, notes)
    of_rows = ({"image": row.image, "image digest": row.image_digest, "nodes": row.nodes, **row.facts} for row in rows)
    environment = _plain_changes(*of_rows)
    if old and new:
        configuration = [*_plain_changes(_requested(old), _requested(new)), *configuration]
        environment += _plain_changes(_surroundings(old), _surroundings(new))
    return Suspects(
        last_good=before.night,
        night=after.night,
        run_before=before.run_key,
        run_after=after.run_key,
        repositories=repository_changes(before, after, commits_between),
        configuration=tuple(configuration),
        environment=tuple(environment),
        notes=tuple(notes),
    )


class ChangedPin(RepositoryChange):
    """What is not pinned the same before and after a change: a repository, the image, or the nodes, without a URL."""

    url: str = ""


def changed_pins(before: HistoryRow, after: HistoryRow) -> tuple[ChangedPin, ...]:
    """What is not pinned the same in two runs, by their rows: repositories, image, nodes, and each of the topology."""
    old, new = (
        {
            **{name: pin.commit for name, pin in row.pins.items()},
            "Image": row.image_digest or row.image,
            "Nodes": row.nodes,
            **row.topology,
        }
        for row in (before, after)
    )
    urls = {name: pin.url for name, pin in after.pins.items()}
    return tuple(
        ChangedPin(name=name, before=old[name] or "–", after=value or "–", url=urls.get(name, ""))
        for name, value in new.items()
        if name in old and (old[name] or "–") != (value or "–")
    )


def changed_topology(before: HistoryRow, after: HistoryRow) -> tuple[str, ...]:
    """What two runs do not have in common of their topology, `nodes 4 → 8`; what one does not know is no difference."""
    if before.topology == after.topology:  # nearly always, and evaluated for each night of a history
        return ()
    return tuple(
        f"{name} {before.topology[name] or 'none'} → {value or 'none'}"
        for name, value in after.topology.items()
        if before.topology.get(name, value) != value
    )


def shared_series(own: HistoryRow, history: Sequence[HistoryRow]) -> tuple[str, ...]:
    """That a series has the nights of two by turns, which are compared with each other; nothing where it has not.

    Two branches, or scenarios, that have one configuration under one test id are one series: the slower one regresses
    every night. What has changed once is no second one, nor what was tried in between.

    Args:
        own: The run that is judged.
        history: Rows of its series, in any order.
    """
    at = own.order, own.harvested_at
    before = (row for row in history if not row.repeat and (row.order, row.harvested_at) < at)
    rows = sorted(before, key=lambda row: (row.order, row.harvested_at))
    recent = {*[*dict.fromkeys(row.night for row in rows)][-SHARED_NIGHTS:]}
    rows = [row for row in rows if row.night in recent and not changed_topology(row, own)]
    asked, ours = [_asked(row) for row in rows], _asked(own)
    seen: list[dict[str, str]] = []
    for row, theirs in reversed([*zip(rows, asked, strict=True)]):
        if theirs in seen:
            continue
        seen.append(theirs)
        turns = [one for one in (*asked, ours) if one in (ours, theirs)]
        if sum(one != following for one, following in itertools.pairwise(turns)) >= TURNS:
            ours, theirs = {"scenario": own.scenario, **ours}, {"scenario": row.scenario, **theirs}
            names = [name for name in ours if ours[name] != theirs.get(name, "")]
            of_own, of_row = (
                ", ".join(f"{name} {each.get(name) or 'none'}" for name in names) for each in (ours, theirs)
            )
            return (
                f"two runs by turns share the history of this test id, and are compared with each other: tonight's is "
                f"of {of_own}; that of {row.night} of {of_row}. Give the test of one of them another id",
            )
    return ()


def _asked(row: HistoryRow) -> dict[str, str]:
    """What a run's test names: branch, tag or commit, and their repositories, and the image."""
    refs = {name: pin.ref for name, pin in row.pins.items()}
    return {**refs, **{f"repository of {name}": pin.url for name, pin in row.pins.items()}, "image": row.image or ""}


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
    return tuple(with_commits(change, url, commits_between) for change, url in changes)


def with_commits(change: _Change, url_before: str, commits_between: CommitsBetween) -> _Change:
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
