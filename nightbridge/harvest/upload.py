"""Files into the store, many at once: each read once, checked for secrets, sent unless already there.

A unit is stored completely or not at all: a checkpoint is one, so is a log. A bad file (unreadable, modified since it
was chosen, a secret inside a binary) leaves its unit out; an error of the store ends the upload. Of an event file that
a writer is still adding to, and of one that is huge and damaged, the whole records are stored.
"""

import contextlib
import functools
import os
import stat
import threading
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from nightbridge.errors import DamagedData, InvalidInput, TransientError
from nightbridge.files import LEAST_HOLE, copy_regular, data_from, open_regular, reading
from nightbridge.harvest.manifest import MANIFEST, LeftOut
from nightbridge.masking import copy_masked
from nightbridge.models import Checkpoint, FileKind, Model, StoredFile
from nightbridge.outputs.event_files import sound_length
from nightbridge.store.checksum import FileSource, Stamp, part_size
from nightbridge.store.object_store import ObjectStore, checked_key
from nightbridge.store.parallel import FILES, WORKERS, Meter, Progress, in_parallel

TEXT_KINDS = frozenset({"log", "config", "summary"})
"""Kinds whose secrets are masked in the copy that is sent. Every other kind is sent as it is or not at all."""

MAX_EVENTS = 256 << 20
"""Bytes of an event file, of which more are stored only as far as its records are whole: a file with a hole of
gigabytes costs its writer nothing, and the store all of it."""


@dataclass(frozen=True, slots=True)
class LocalFile:
    """A file to store: its path here, and its path relative to the run's prefix; as text, which takes the least memory.

    `below` is the run's folder that it lies in; without one it is a file that this program has written. `extents` are
    ranges with the CRC-32 that each must have, checked while the file is sent, as for `checksum.CrcCheck`.
    """

    source: str
    path: str
    kind: FileKind
    below: Path | None = None
    extents: Sequence[int] = ()


class Unit(Model):
    """Files that are stored together or not at all. `path` names the unit, e.g. `checkpoints/iter_0000050`.

    `checkpoint`: what a checkpoint is once every byte of it was sent and had the CRC-32 that it should have.
    """

    path: str
    files: tuple[LocalFile, ...]
    checkpoint: Checkpoint | None = None

    @classmethod
    def of(cls, source: Path, path: str, kind: FileKind, below: Path | None = None) -> "Unit":
        """A unit of one file."""
        return cls(path=path, files=(LocalFile(str(source), path, kind, below),))


class Uploaded(Model):
    """What an upload has stored."""

    files: tuple[StoredFile, ...]
    left_out: tuple[LeftOut, ...]
    masks: int


_Result = StoredFile | LeftOut | None
"""None: not tried, because another file of the unit could not be stored."""


def upload(
    store: ObjectStore,
    prefix: str,
    units: Sequence[Unit],
    secrets: Iterable[str],
    scratch: Path,
    on_progress: Callable[[Progress], None] | None = None,
) -> Uploaded:
    """Store every unit under `prefix`; what is there already with the same bytes is not sent again.

    The units' paths are unique. `secrets` are masked in text files and looked for in others; `scratch` is an empty
    folder with room for masked copies of the text files in progress. `on_progress` is called in this thread, at
    intervals and at the end.

    Raises:
        TransientError: The store did not answer; the same call resumes where this one stopped.
        PermanentError: The store refuses.
    """
    sender = _Sender(store, prefix, units, tuple(secrets), scratch, on_progress)
    files, unit_of = sender.files, sender.unit_of
    results = in_parallel(sender.send, range(len(files)), sender.meter, FILES)
    left_out = _first_failures(zip(unit_of, files, results, strict=True))
    kept: list[StoredFile] = []
    for number, result in enumerate(results):
        if unit_of[number] not in left_out and isinstance(result, StoredFile):
            kept.append(result)
        elif isinstance(result, StoredFile) or sender.had(files[number]):
            # Sent now or by an earlier try, before its unit turned out to be incomplete.
            sender.discard(files[number])
    store.remove_leftovers(prefix)
    kept.sort(key=lambda file: file.path)
    return Uploaded(
        files=tuple(kept),
        left_out=(
            *left_out.values(),
            *(rest for number, rest in sender.rests.items() if unit_of[number] not in left_out),
        ),
        masks=sum(masks for number, masks in sender.masks.items() if unit_of[number] not in left_out),
    )


def _stamp_of(file: LocalFile) -> Stamp:
    checked_key(file.path)
    with reading(Path(file.source)):
        status = os.lstat(file.source)
    if not stat.S_ISREG(status.st_mode):
        raise DamagedData("not a regular file")
    return Stamp.of(status)


class _Sender:
    """Sends the files of one upload.

    State: what an earlier try has stored, the units that failed, and by the file's number how many secrets were masked
    in it, and what of it the store does not have.
    """

    def __init__(
        self,
        store: ObjectStore,
        prefix: str,
        units: Sequence[Unit],
        secrets: Sequence[str],
        scratch: Path,
        on_progress: Callable[[Progress], None] | None,
    ) -> None:
        self._store, self._prefix, self._secrets, self._scratch = store, prefix, secrets, scratch
        self.files = [file for unit in units for file in unit.files]
        self.unit_of = [unit.path for unit in units for _ in unit.files]
        # What each file is as the upload begins, in few bytes: there may be 100,000.
        self._stamps, self._unreadable = array("q"), dict[int, str]()
        for number, file in enumerate(self.files):
            try:
                self._stamps.extend(_stamp_of(file))
            except (DamagedData, InvalidInput) as error:
                self._stamps.extend(Stamp(0, 0, 0))
                self._unreadable[number] = error.what
        self.meter = Meter("sending", self._stamps[::3], on_progress)
        self._there = {found.key for found in store.list(prefix)}
        self._failed: set[str] = set()
        self.masks: dict[int, int] = {}
        self.rests: dict[int, LeftOut] = {}
        self._turns = threading.Semaphore(WORKERS)

    def had(self, file: LocalFile) -> bool:
        """Whether an earlier try had sent a file under this name."""
        return f"{self._prefix}/{file.path}" in self._there

    def discard(self, file: LocalFile) -> None:
        """Delete what an earlier try has stored, unless it belongs to a committed run by now."""
        if self._store.stat(f"{self._prefix}/{MANIFEST}") is not None:
            subject = self._store.url_of(self._prefix)
            raise TransientError("another harvest has committed the run", subject=subject, advice="Ask for its record")
        self._store.delete(f"{self._prefix}/{file.path}")

    def send(self, number: int) -> _Result:
        """Send one file; nothing is read of a unit that has already failed."""
        file, stamp = self.files[number], Stamp(*self._stamps[3 * number : 3 * number + 3])
        if self.unit_of[number] in self._failed:
            return None
        try:
            if number in self._unreadable:
                raise DamagedData(self._unreadable[number])
            if file.kind in TEXT_KINDS:
                return self._send_masked(number, file, stamp)
            huge = file.kind == "tensorboard" and stamp.size > MAX_EVENTS
            if huge and (length := _sound_length(file)) < stamp.size:
                return self._send_sound_records(number, file, stamp, length, "damaged")
            if file.kind == "other" and (unwritten := _bytes_in_holes(file)) > max(stamp.size // 2, LEAST_HOLE):
                raise DamagedData(f"{unwritten} of its {stamp.size} bytes were never written")
            source = FileSource(Path(file.source), stamp, self._secrets, file.below, file.extents)
            try:
                return self._send(number, file, stamp, source)
            except DamagedData:
                if file.kind != "tensorboard" or not _grew(Path(file.source), stamp):
                    raise
                return self._send_sound_records(number, file, stamp, _sound_length(file), "still growing")
        except (DamagedData, InvalidInput) as error:  # the latter of a path too long for a key of the store
            self._failed.add(self.unit_of[number])
            return LeftOut(path=file.path, reason=error.what)

    def _send_sound_records(self, number: int, file: LocalFile, stamp: Stamp, length: int, why: str) -> StoredFile:
        """Send the whole records of an event file, from a copy that nobody adds to."""
        if not length:
            raise DamagedData(f"{why}, and no record of it is whole")
        copy = self._scratch / str(number)
        try:
            copy_regular(Path(file.source), copy, file.below, length=length)
            stored = self._send(number, file, stamp, FileSource(copy, secrets=self._secrets))
        finally:
            copy.unlink(missing_ok=True)
        reason = f"{why}; the whole records in its first {length} bytes are stored, and the rest is not"
        self.rests[number] = LeftOut(path=file.path, reason=reason)
        return stored

    def _send_masked(self, number: int, file: LocalFile, stamp: Stamp) -> StoredFile:
        masked = self._scratch / str(number)
        self.masks[number] = copy_masked(Path(file.source), masked, self._secrets, file.below)
        try:
            return self._send(number, file, stamp, FileSource(masked))
        finally:
            masked.unlink()

    def _send(self, number: int, file: LocalFile, stamp: Stamp, source: FileSource) -> StoredFile:
        source.on_read = functools.partial(self.meter.moved, number)
        key = f"{self._prefix}/{file.path}"
        # Of large files, which are read from one disk, fewer are in progress than of small ones.
        with self._turns if part_size(stamp.size) else contextlib.nullcontext():
            found = self._store.holds(key, source) if self.had(file) else None
            if found is None:
                if self.had(file):
                    self.discard(file)
                found = self._store.put_file(key, source)
        assert found.sha256 is not None
        return StoredFile(
            path=file.path,
            size=found.size,
            sha256=found.sha256,
            part_size=found.part_size,
            etag=found.etag,
            part_digests=source.digest.base64() if found.part_size else "",
            mtime_ns=stamp.mtime_ns,
            kind=file.kind,
        )


def _sound_length(file: LocalFile) -> int:
    path = Path(file.source)
    return sound_length(path, file.below or path.parent)


def _bytes_in_holes(file: LocalFile) -> int:
    """A profile of a terabyte may be one hole: it costs its writer nothing, and the store all of it."""
    at = unwritten = 0
    with reading(path := Path(file.source)), open_regular(path, below=file.below, buffering=0) as stream:
        size = os.fstat(stream.fileno()).st_size
        with contextlib.suppress(OSError):  # the file system cannot tell
            while at < size and (hole := os.lseek(stream.fileno(), at, os.SEEK_HOLE)) < size:
                at = min(data_from(stream.fileno(), hole), size)
                unwritten += at - hole
                if at == hole:  # nor any further
                    break
    return unwritten


def _grew(path: Path, stamp: Stamp) -> bool:
    """Whether a file is the one that was chosen, and longer than it was then."""
    try:
        now = Stamp.of(path.lstat())
    except OSError:
        return False
    return now.inode == stamp.inode and now.size > stamp.size


def _first_failures(results: Iterable[tuple[str, LocalFile, _Result]]) -> dict[str, LeftOut]:
    """The units that are incomplete, by path, each with the reason of its first bad file."""
    failures: dict[str, LeftOut] = {}
    for unit, file, result in results:
        if isinstance(result, LeftOut) and unit not in failures:
            reason = result.reason if file.path == unit else f"{file.path}: {result.reason}"
            failures[unit] = LeftOut(path=unit, reason=reason)
    return failures
