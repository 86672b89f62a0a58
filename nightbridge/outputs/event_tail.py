"""Event files read on while a job writes them.

The writer buffers, so a file may end in the middle of a record at any moment: such a tail is no damage yet, and is read
again at the next look. Once the writer has ended, it is what `event_files.read_event_file` calls it.
"""

import os
from pathlib import Path

from nightbridge.outputs.event_files import Columns, RecordsEnd, Row, file_time, find_event_files, read_on


class EventFileTail:
    """One event file, read on from the last record that was whole.

    `damage` is set, and nothing more is read, once a record is there that is not what was written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.damage = ""
        self._offset = 0
        self._inode: int | None = None
        self._columns = Columns()

    def new_rows(self) -> list[Row]:
        """The scalars of the records that were finished since the last look, tags as written.

        A file that is missing has none yet; one that was replaced or became shorter is read from its beginning.

        Raises:
            OSError: The file is there and cannot be read.

        """
        try:
            with self.path.open("rb") as stream:
                status = os.fstat(stream.fileno())
                if self._inode != status.st_ino or status.st_size < self._offset:
                    self._inode, self._offset, self.damage, self._columns = status.st_ino, 0, "", Columns()
                if self.damage:
                    return []
                try:
                    for offset in read_on(stream, status.st_size, self._columns, self._offset):
                        self._offset = offset
                except RecordsEnd as end:
                    if end.status == "corrupt":
                        self.damage = f"{self.path.name}: corrupt at byte {end.offset} ({end.reason})"
        except FileNotFoundError:
            return []
        return self._columns.take()


class EventTail:
    """All event files of a folder; a restart of the job adds another one, and a look finds it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._tails: dict[Path, EventFileTail] = {}

    def new_rows(self) -> list[Row]:
        """What was written since the last look, the older file first. A folder that is missing has nothing yet."""
        for path in find_event_files(self.folder):
            self._tails.setdefault(path, EventFileTail(path))
        oldest_first = sorted(self._tails, key=lambda path: (file_time(path), path.name))
        return [row for path in oldest_first for row in self._tails[path].new_rows()]

    @property
    def damage(self) -> tuple[str, ...]:
        """One line per file that is damaged so far."""
        return tuple(tail.damage for tail in self._tails.values() if tail.damage)
