"""What differs between two stored runs besides their commits: configuration, and the environment that they ran in.

The configuration is compared as the test requests it and as the run itself dumped it (`ConfigContainer.yaml`): a commit
that changes a recipe's default changes only the latter. What carries a run's own name or commit differs always
and says nothing, so those are made the same first.
"""

import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from nightbridge.config.containers import Container, container_differences
from nightbridge.errors import DamagedData
from nightbridge.models import RunRecord, ValueChange
from nightbridge.regression.rows import HistoryRow
from nightbridge.regression.series import NOT_IN_ARGUMENTS, NOT_IN_ENVIRONMENT, NOT_IN_OVERRIDES
from nightbridge.store.harvest import load_record
from nightbridge.store.objects import ObjectStore

CONTAINER = "configs/ConfigContainer.yaml"

MAX_LETTERS = 200
"""Of one value; a longer one is cut."""

Side = tuple[HistoryRow, RunRecord | None]


class Differences(NamedTuple):
    """What differs, and what could not be compared."""

    configuration: tuple[ValueChange, ...]
    environment: tuple[ValueChange, ...]
    notes: tuple[str, ...]


def differences(store: ObjectStore, before: HistoryRow, after: HistoryRow) -> Differences:
    """Compare two runs by their rows, and by what the store still has of them."""
    notes: list[str] = []
    records = [_record(store, row, notes) for row in (before, after)]
    configuration = _dumped(store, (before, after), notes)
    environment = list(_plain_changes(_of_row(before), _of_row(after)))
    old, new = records
    if old and new:
        configuration = [*_plain_changes(_asked(old), _asked(new)), *configuration]
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


def _of_row(row: HistoryRow) -> dict[str, Any]:
    return {"image": row.image, "image digest": row.image_digest, "nodes": row.nodes, **row.facts}


def _asked(record: RunRecord) -> dict[str, Any]:
    """What the test requests, without what never counts."""
    test = record.spec.test
    tables: tuple[tuple[str, Mapping[str, Any], tuple[str, ...]], ...] = (
        ("cmd_args", test.cmd_args, NOT_IN_ARGUMENTS),
        ("extra_cmd_args", {key.lstrip("+"): value for key, value in test.extra_cmd_args.items()}, NOT_IN_OVERRIDES),
    )
    return {
        f"{table}.{name}": _neutral(value, record)
        for table, values, left_out in tables
        for name, value in values.items()
        if not any(fnmatchcase(name, pattern) for pattern in left_out)
    }


def _surroundings(record: RunRecord) -> dict[str, Any]:
    """Where and with what the run was launched. Secrets are no part of a plan's environment."""
    plan, launcher = record.plan, record.checkout.environment
    return {
        "launcher environment": launcher.digest[:12] if launcher else None,
        "NeMo-Run version": launcher.nemo_run_version if launcher else None,
        "number of nodes": plan.nodes,
        "tasks per node": plan.tasks_per_node,
        "sbatch options": " ".join(_neutral(option, record) for option in plan.sbatch_args),
        **{
            f"${name}": _neutral(value, record)
            for name, value in plan.environment.items()
            if not any(fnmatchcase(name, pattern) for pattern in NOT_IN_ENVIRONMENT)
        },
    }


def _dumped(store: ObjectStore, rows: tuple[HistoryRow, HistoryRow], notes: list[str]) -> list[ValueChange]:
    """What differs between what the two runs dumped themselves."""
    containers = [_container(store, row, notes) for row in rows]
    before, after = containers
    if before is None or after is None:
        return []
    return [
        ValueChange(name=found.path, before=_text(found.before), after=_text(found.after))
        for found in container_differences(before, after)
        if not any(fnmatchcase(found.path, pattern) for pattern in NOT_IN_OVERRIDES)
    ]


def _container(store: ObjectStore, row: HistoryRow, notes: list[str]) -> Container | None:
    import yaml

    key = f"{row.prefix}/{CONTAINER}"
    data = store.get(key) if row.prefix else None
    if data is None:
        return None
    try:
        table = yaml.safe_load(_neutral_text(data.decode(), row))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        notes.append(f"{store.url_of(key)}: not valid YAML: {' '.join(str(error).split())}")
        return None
    return Container(Path(key), table) if isinstance(table, dict) else None


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


def _neutral(value: Any, record: RunRecord) -> str:
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


def _neutral_text(text: str, row: HistoryRow) -> str:
    commits = [row.megatron_bridge.commit, *([row.nemo_run.commit] if row.nemo_run else [])]
    return _replaced(text, row.run_key, row.attempt, dict.fromkeys(commits, "COMMIT"))


def _replaced(text: str, run_key: str, attempt: int, words: Mapping[str, str]) -> str:
    """Only what cannot be a value by itself is replaced: a night or a job may be called 50, and so may the steps."""
    for word, neutral in {run_key: "RUN", **words}.items():
        text = text.replace(word, neutral)
    return re.sub(rf"(?<=RUN[/-])a{attempt}\b", "ATTEMPT", text)
