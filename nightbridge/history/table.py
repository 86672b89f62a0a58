"""The history as a table that any tool reads: a row for each run, a column for each plain value of its history row.

Columns have the names that the values have in `HistoryRow` and `Summary`, and their types; a value that is not there is
null. Pins are columns of their commits. What has names of its own (facts, sweep points) is JSON. See docs/store.md.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from functools import cache
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args, get_origin

from nightbridge.history.rows import HistoryRow
from nightbridge.models import Summary

if TYPE_CHECKING:
    import pyarrow as pa

TIME = "time"
"""The column of the harvest's time, as a timestamp in UTC: the one that charts go by."""

_PINS = ("megatron_bridge", "nemo_run")
_MIN, _MAX = -(1 << 63), (1 << 63) - 1


class _Column(NamedTuple):
    """Where the value of a column is in the JSON of a row, and its type."""

    path: tuple[str, ...]
    kind: type


@cache
def columns() -> Mapping[str, _Column]:
    """Every column but `TIME`, by name."""
    found = {name: _Column((name,), kind) for name, kind in _kinds(HistoryRow)}
    found |= {f"{pin}_commit": _Column((pin, "commit"), str) for pin in _PINS}
    of_summary = {name: _Column(("summary", name), kind) for name, kind in _kinds(Summary)}
    return {name: column for name, column in (of_summary | found).items() if name != "schema_version"}


def _kinds(model: type[HistoryRow | Summary]) -> Iterator[tuple[str, type]]:
    """The fields of a model that are one plain value, or values by name."""
    for name, field in model.model_fields.items():
        choices = get_args(field.annotation)
        one = next(kind for kind in choices if kind is not NoneType) if NoneType in choices else field.annotation
        kind: Any = get_origin(one) or one
        if kind is Literal or (isinstance(kind, type) and issubclass(kind, str)):
            yield name, str
        elif isinstance(kind, type) and kind in (bool, int, float, dict):
            yield name, kind


def table_of(rows: Sequence[str], names: Sequence[str] | None = None) -> "pa.Table":
    """The table of rows.

    Args:
        rows: Each as JSON. What is no JSON, and a value of another type than its column, is null.
        names: The columns; all when left out, `TIME` first.

    """
    import pyarrow as pa

    documents = [_document(text) for text in rows]
    wanted = columns() if names is None else {name: columns()[name] for name in names}
    arrays = {
        name: pa.array([_value(row, column) for row in documents], _type(column)) for name, column in wanted.items()
    }
    times = pa.array([_time(row) for row in documents], pa.timestamp("us", tz="UTC"))
    return pa.table({TIME: times, **arrays})


def _type(column: _Column) -> "pa.DataType":
    import pyarrow as pa

    return {bool: pa.bool_(), int: pa.int64(), float: pa.float64()}.get(column.kind, pa.string())


def _document(text: str) -> Mapping[str, Any]:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


def _value(row: Mapping[str, Any], column: _Column) -> Any:
    value: Any = row
    for name in column.path:
        value = value.get(name) if isinstance(value, dict) else None
    if isinstance(value, bool) != (column.kind is bool) or (isinstance(value, int) and not _MIN <= value <= _MAX):
        return None
    if isinstance(value, int) and column.kind is float:
        return float(value)
    if not isinstance(value, column.kind):
        return None
    text = json.dumps(value) if isinstance(value, dict) else value
    return text.encode(errors="replace").decode() if isinstance(text, str) else value


def _time(row: Mapping[str, Any]) -> datetime | None:
    try:
        return datetime.fromisoformat(row["harvested_at"])
    except (KeyError, TypeError, ValueError):
        return None
