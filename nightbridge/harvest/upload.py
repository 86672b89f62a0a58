"""Files into the store, many at once: each read once, checked for secrets, sent unless already there.

A unit is stored completely or not at all: a checkpoint is one, so is a log. A bad file (unreadable, modified since it
was chosen, a secret inside a binary) leaves its unit out; an error of the store ends the upload. Of an event file that
a writer is still adding to, and of one that is huge and damaged, the whole records are stored.
"""

import contextlib
import functools
import stat
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from nightbridge.errors import DamagedData, InvalidInput, TransientError
from nightbridge.files import copy_regular
from nightbridge.harvest.manifest import MANIFEST, LeftOut
from nightbridge.models import Checkpoint, Model, StoredFile
from nightbridge.outputs.event_files import sound_length
from nightbridge.secrets import copy_masked
from nightbridge.store.checksum import FileSource, Stamp, part_size
from nightbridge.store.protocol import ObjectStore, checked_key
from nightbridge.store.transfers import FILES, WORKERS, Meter, Progress, in_parallel

TEXT_KINDS = frozenset({"log", "config", "summary"})
"""Kinds whose secrets are masked in the copy that is sent. Every other kind is sent as it is or not at all."""

MOST_EVENTS = 256 << 20
"""Bytes of an event file, of which more are stored only as far as its records are whole: a file with a hole of
gigabytes costs its writer nothing, and the store all of it."""

Kind = Literal["checkpoint", "tensorboard", "log", "config", "summary", "metrics", "other"]


@dataclass(frozen=True, slots=True)
class LocalFile:
    """A file to store: its path here, and its path relative to the run's prefix.

    `below` is the run's folder that it lies in; without one it is a file that this program has written. `extents` are
    ranges with the CRC-32 that each must have, checked while the file is sent, as for `checksum.CrcCheck`.
    """

    source: Path
    path: str
    kind: Kind
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
    def of(cls, source: Path, path: str, kind: Kind) -> "Unit":
        """A unit of one file."""
        return cls(path=path, files=(LocalFile(source=source, path=path, kind=kind),))


class Uploaded(Model):
    """What an upload has stored."""

    files: tuple[StoredFile, ...]
    left_out: tuple[LeftOut, ...]
    masks: int


@dataclass(frozen=True, slots=True)
class _Task:
    """A file to send, its unit, and what it was when the upload began (None: it cannot be read, for this reason)."""

    number: int
    unit: str
    file: LocalFile
    stamp: Stamp | None
    reason: str


@dataclass(frozen=True, slots=True)
class _Sent:
    """A file that the store has; `rest` is what of it the store does not have."""

    stored: StoredFile
    masks: int = 0
    rest: LeftOut | None = None


_Result = _Sent | LeftOut | None
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

    Args:
        store: Where to.
        prefix: The run's folder in the store.
        units: What to store; paths are unique.
        secrets: Values masked in text files and looked for in others.
        scratch: An empty folder with room for masked copies of the text files in progress.
        on_progress: Called in this thread after each file, and at intervals while none is done.

    Raises:
        TransientError: The store did not answer; the same call resumes where this one stopped.
        PermanentError: The store refuses.

    """
    files = [(unit.path, file) for unit in units for file in unit.files]
    tasks = [_task(number, unit, file) for number, (unit, file) in enumerate(files)]
    meter = Meter("sending", [task.stamp.size if task.stamp else 0 for task in tasks], on_progress)
    sender = _Sender(store, prefix, tuple(secrets), scratch, meter)
    results = list(zip(tasks, in_parallel(sender.send, tasks, meter, FILES), strict=True))
    left_out = _first_failures(results)
    kept: list[_Sent] = []
    for task, result in results:
        if task.unit not in left_out and isinstance(result, _Sent):
            kept.append(result)
        elif isinstance(result, _Sent) or sender.had(task.file):
            # Sent now or by an earlier try, before its unit turned out to be incomplete.
            sender.discard(task.file)
    store.remove_leftovers(prefix)
    return Uploaded(
        files=tuple(sorted((each.stored for each in kept), key=lambda file: file.path)),
        left_out=(*left_out.values(), *(each.rest for each in kept if each.rest is not None)),
        masks=sum(each.masks for each in kept),
    )


def _task(number: int, unit: str, file: LocalFile) -> _Task:
    stamp, reason = None, ""
    try:
        checked_key(file.path)
        status = file.source.lstat()
        if stat.S_ISREG(status.st_mode):
            stamp = Stamp.of(status)
        else:
            reason = "not a regular file"
    except InvalidInput as error:
        reason = error.what
    except OSError as error:
        reason = f"cannot be read: {error.strerror}"
    return _Task(number, unit, file, stamp, reason)


class _Sender:
    """Sends the files of one upload. State: what an earlier try has stored, and the units that failed."""

    def __init__(self, store: ObjectStore, prefix: str, secrets: Sequence[str], scratch: Path, meter: Meter) -> None:
        self._store, self._prefix, self._secrets, self._scratch, self._meter = store, prefix, secrets, scratch, meter
        self._there = {found.key for found in store.list(prefix)}
        self._failed: set[str] = set()
        self._turns = threading.Semaphore(WORKERS)

    def had(self, file: LocalFile) -> bool:
        """Whether an earlier try had sent a file under this name."""
        return f"{self._prefix}/{file.path}" in self._there

    def discard(self, file: LocalFile) -> None:
        """Delete what an earlier try has stored, unless it belongs to a committed run by now."""
        if self._store.stat(f"{self._prefix}/{MANIFEST}") is not None:
            thing = self._store.url_of(self._prefix)
            raise TransientError("another harvest has committed the run", thing=thing, advice="Ask for its record")
        self._store.delete(f"{self._prefix}/{file.path}")

    def send(self, task: _Task) -> _Result:
        """Send one file; nothing is read of a unit that has already failed."""
        if task.unit in self._failed:
            return None
        try:
            if task.stamp is None:
                raise DamagedData(task.reason)
            if task.file.kind in TEXT_KINDS:
                return self._send_masked(task, task.stamp)
            file = task.file
            huge = file.kind == "tensorboard" and task.stamp.size > MOST_EVENTS
            if huge and (length := _sound_length(file)) < task.stamp.size:
                return self._send_sound_records(task, task.stamp, length, "damaged")
            source = FileSource(file.source, task.stamp, self._secrets, file.below, file.extents)
            try:
                return self._send(task, task.stamp, source)
            except DamagedData:
                if file.kind != "tensorboard" or not _grew(file.source, task.stamp):
                    raise
                return self._send_sound_records(task, task.stamp, _sound_length(file), "still growing")
        except DamagedData as error:
            self._failed.add(task.unit)
            return LeftOut(path=task.file.path, reason=error.what)

    def _send_sound_records(self, task: _Task, stamp: Stamp, length: int, why: str) -> _Sent:
        """Send the whole records of an event file, from a copy that nobody adds to."""
        if not length:
            raise DamagedData(f"{why}, and no record of it is whole")
        copy = self._scratch / str(task.number)
        try:
            copy_regular(task.file.source, copy, below=task.file.below, length=length)
            sent = self._send(task, stamp, FileSource(copy, secrets=self._secrets))
        finally:
            copy.unlink(missing_ok=True)
        reason = f"{why}; the whole records in its first {length} bytes are stored, and the rest is not"
        return replace(sent, rest=LeftOut(path=task.file.path, reason=reason))

    def _send_masked(self, task: _Task, stamp: Stamp) -> _Sent:
        masked = self._scratch / str(task.number)
        masks = copy_masked(task.file.source, masked, self._secrets, task.file.below)
        try:
            return self._send(task, stamp, FileSource(masked), masks)
        finally:
            masked.unlink()

    def _send(self, task: _Task, stamp: Stamp, source: FileSource, masks: int = 0) -> _Sent:
        # Of large files, which are read from one disk, fewer are in progress than of small ones.
        with self._turns if part_size(stamp.size) else contextlib.nullcontext():
            return self._stored(task, stamp, source, masks)

    def _stored(self, task: _Task, stamp: Stamp, source: FileSource, masks: int) -> _Sent:
        source.on_read = functools.partial(self._meter.moved, task.number)
        key = f"{self._prefix}/{task.file.path}"
        found = self._store.holds(key, source) if key in self._there else None
        if found is None:
            if key in self._there:
                self.discard(task.file)
            found = self._store.put_file(key, source)
        assert found.sha256 is not None
        stored = StoredFile(
            path=task.file.path,
            size=found.size,
            sha256=found.sha256,
            part_size=found.part_size,
            etag=found.etag,
            part_digests=source.digest.base64() if found.part_size else "",
            mtime_ns=stamp.mtime_ns,
            kind=task.file.kind,
        )
        return _Sent(stored, masks)


def _sound_length(file: LocalFile) -> int:
    return sound_length(file.source, file.below or file.source.parent)


def _grew(path: Path, stamp: Stamp) -> bool:
    """Whether a file is the one that was chosen, and longer than it was then."""
    try:
        now = Stamp.of(path.lstat())
    except OSError:
        return False
    return now.inode == stamp.inode and now.size > stamp.size


def _first_failures(results: Iterable[tuple[_Task, _Result]]) -> dict[str, LeftOut]:
    """The units that are incomplete, by path, each with the reason of its first bad file."""
    failures: dict[str, LeftOut] = {}
    for task, result in results:
        if isinstance(result, LeftOut) and task.unit not in failures:
            reason = result.reason if task.file.path == task.unit else f"{task.file.path}: {result.reason}"
            failures[task.unit] = LeftOut(path=task.unit, reason=reason)
    return failures
