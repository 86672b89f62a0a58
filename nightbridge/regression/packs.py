"""Many history rows in one Parquet object: a few columns to choose rows by, and each row's JSON.

The rows' text is kept as it is, so that a row which a later version of the model reads is read the same from both. It
lies in groups of `ROWS_TOGETHER`, oldest first: whoever wants the latest nights decodes only the last groups.
"""

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from nightbridge.errors import DamagedData

if TYPE_CHECKING:
    import pyarrow as pa

ROWS_TOGETHER = 128

DAMAGE_ADVICE = "Rebuild the history from the runs: nightbridge history TEST_ID --rebuild"


class RowKey(NamedTuple):
    """What rows are chosen by. Of two versions of a run's row the one with the greater `precedence` counts.

    `harvested_at` is in microseconds since 1970; `stamp` says when the version was written, and is empty for rows of
    a time when they had none.
    """

    night: str
    harvested_at: int
    run_key: str
    attempt: int
    stamp: str
    repeat: int
    verdict: str | None
    outcome: str | None

    @property
    def precedence(self) -> tuple[int, str]:
        """Later attempts before earlier ones, and later versions of an attempt before earlier ones."""
        return self.attempt, self.stamp


class Pack:
    """The rows of one Parquet object, decoded on first use.

    Args:
        data: The object.
        url: Its name in messages.

    Raises:
        DamagedData: It is no pack. Methods raise it, too: parts of the object are only looked at when needed.
    """

    def __init__(self, data: bytes, url: str) -> None:
        import pyarrow.parquet as pq

        self._url = url
        with self._reading():
            self._file = pq.ParquetFile(io.BytesIO(data), page_checksum_verification=True)

    def row_keys(self) -> list[RowKey]:
        """The key of every row, in the order in which they lie."""
        with self._reading():
            table = self._file.read(columns=list(RowKey._fields), use_threads=False)
            columns = (table[name].to_pylist() for name in RowKey._fields)
            return [RowKey(*values) for values in zip(*columns, strict=True)]

    def texts(self, first: int = 0) -> list[str]:
        """The JSON of the rows from place `first` on."""
        with self._reading():
            groups = range(first // ROWS_TOGETHER, self._file.num_row_groups)
            found: list[str] = (
                self._file.read_row_groups(groups, columns=["row"], use_threads=False)["row"].to_pylist()
                if groups
                else []
            )
        return found[first % ROWS_TOGETHER :]

    @contextmanager
    def _reading(self) -> Iterator[None]:
        import pyarrow as pa

        try:
            yield
        except (pa.ArrowException, OSError, KeyError, TypeError) as error:
            raise DamagedData("not a table of history rows", thing=self._url, advice=DAMAGE_ADVICE) from error


def packed(rows: Sequence[tuple[RowKey, str]]) -> bytes:
    """The Parquet object of some rows, each with its JSON.

    Args:
        rows: Oldest first.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    keys = list(zip(*(key for key, _text in rows), strict=True))
    columns = [pa.array(values, type=kind) for values, kind in zip(keys, _types(), strict=True)]
    table = pa.table([*columns, pa.array([text for _key, text in rows])], names=[*RowKey._fields, "row"])
    buffer = io.BytesIO()
    pq.write_table(
        table,
        buffer,
        row_group_size=ROWS_TOGETHER,
        compression="zstd",
        use_dictionary=["night", "repeat", "verdict", "outcome"],
        write_statistics=False,
        write_page_checksum=True,
    )
    return buffer.getvalue()


def _types() -> "list[pa.DataType]":
    import pyarrow as pa

    return [pa.int64() if name in ("harvested_at", "attempt", "repeat") else pa.string() for name in RowKey._fields]
