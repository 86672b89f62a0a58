"""A stored run, checked and restored: what `nightbridge verify` and `nightbridge fetch` do.

Objects are read in ranges, several at once, and every part is checked against the manifest as it arrives: one pass,
and what is lost on the way is requested again from where it broke off. A large file grows under a name of its own, so
that a fetch that was killed resumes with the parts of it that are whole.
"""

import base64
import contextlib
import fcntl
import functools
import hashlib
import itertools
import os
import random
import re
import shutil
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal, NamedTuple

from nightbridge.errors import DamagedData, InvalidInput, PermanentError, TransientError
from nightbridge.files import new_file, read_regular, write_atomically, write_errors, write_model
from nightbridge.harvest.manifest import MANIFEST, Manifest, object_problem, read_manifest
from nightbridge.harvest.selection import stored_save_dirs, untracked_save_dirs
from nightbridge.models import StoredFile
from nightbridge.outputs.checkpoints import TRACKER, TRACKERS, TRAIN_STATE
from nightbridge.store.checksum import sha256_of_file
from nightbridge.store.object_store import ObjectStore, checked_key
from nightbridge.store.parallel import FILES, WORKERS, Meter, Progress, in_parallel

STREAMS = min(16, max(4, 2 * len(os.sched_getaffinity(0))))
"""Ranges of large files read at once: those that the processors cannot keep up with wait for each other's locks."""

RANGE = 32 << 20
"""Bytes of such a range, in whole parts: each request costs the server, and the processors, as much as 1 MiB."""

TRIES = 6
"""How often a part is requested without a byte coming back."""

ARRIVALS = 3
"""How often a part is read whose bytes are not those of the manifest, before its object counts as damaged."""

CHUNK = 1 << 20

DIGEST = 32
"""Bytes of a SHA-256."""

_TEMPORARY = re.compile(r"\..*\.(part|tmp)", re.DOTALL)
"""Names of files that a fetch which was killed has left; nothing loads them."""

Product = Literal["checkpoint", "tensorboard", "logs"]

FOLDERS: dict[Product, str] = {"checkpoint": "checkpoints/", "tensorboard": "tensorboard/", "logs": "logs/"}
"""Where below a run's prefix its products are."""

_write_errors = functools.partial(
    write_errors, what="the restored file", advice="Free space there, or choose another folder"
)

Write = Callable[[int, memoryview], None]
"""Takes bytes of a file and where in it they begin."""


class _Range(NamedTuple):
    """A range of an object; `sha256` None where only the checksum of the whole is known."""

    start: int
    end: int
    sha256: bytes | None


def verify_run(store: ObjectStore, prefix: str, on_progress: Callable[[Progress], None] | None = None) -> list[str]:
    """Check a run against its manifest; returns one line per problem, none when every object is there and intact.

    Checks presence, size and checksum. A directory's checksums are computed from its bytes; those of S3 are the ones
    recorded with the objects, and the server's own ETags. `verify_content` reads the bytes.
    """
    return _verify(store, prefix, lambda file: object_problem(store, prefix, file), on_progress)


def verify_content(store: ObjectStore, prefix: str, on_progress: Callable[[Progress], None] | None = None) -> list[str]:
    """Read every byte of a run and check it against its manifest; returns one line per problem."""
    sizes = _sizes(store, prefix)
    with ThreadPoolExecutor(STREAMS, thread_name_prefix="nightbridge-ranges") as pool:

        def check(file: StoredFile) -> str:
            reader = _RangeReader(store, f"{prefix}/{file.path}", lambda received: None)
            try:
                reader.check_size(file, sizes)
                digests = _of_each_range(
                    pool, lambda parts: list(reader.read(parts, lambda start, chunk: None)), _parts(file)
                )
                _check_digests(reader.subject, file, digests)
            except (DamagedData, PermanentError) as error:
                return f"{file.path}: {error.what}"
            return ""

        return _verify(store, prefix, check, on_progress)


INCOMPLETE = "INCOMPLETE.txt"
"""Lies in the folder of a fetch until every file is there: an interrupted one, or one of a damaged run, keeps it.

It names the run, and the product unless all of them are fetched.
"""


def fetch_run(
    store: ObjectStore,
    prefix: str,
    destination: Path,
    on_progress: Callable[[Progress], None] | None = None,
    only: Product | None = None,
) -> Manifest:
    """Restore a run below `destination` as it is in the store, every byte verified, the manifest last.

    Files that are there already with the right bytes are kept, so an interrupted fetch resumes. Nothing is flushed to
    disk: after a power failure fetch again.

    `destination` is a folder, made when it is not there; what is in it is of this run. `on_progress` is called in this
    thread, at intervals and at the end. With `only` just one product is restored, straight into the folder: of
    checkpoints, one that a training can load from. Where the newest checkpoint was not stored, nor the trackers that
    name it, they are written for the newest that was.

    Raises:
        InvalidInput: `destination` has something of another run in it, or another product was begun there.
        PermanentError: The run was never committed, has no such product, or `destination` cannot be written.
        DamagedData: An object is missing or differs from the manifest, which may also be another run's.
        TransientError: The store did not answer, or another fetch is restoring the same file.
    """
    manifest = read_manifest(store, prefix)
    if manifest is None:
        advice = "Check the run key; its harvest may still be running"
        raise PermanentError("no committed run under this prefix", subject=store.url_of(prefix), advice=advice)
    if manifest.prefix != prefix:
        what = f"its {MANIFEST} belongs to {manifest.prefix}"
        raise DamagedData(what, subject=store.url_of(prefix), advice="It was copied there in the store; fetch that run")
    files = [file for file in manifest.files if file.path.startswith(FOLDERS[only] if only else "")]
    if not files:
        advice = "See its `left_out`, and `checkpoint` in the test's [harvest]"
        raise PermanentError(f"the run has no stored {only}", subject=store.url_of(prefix), advice=advice)
    marker, begun = destination / INCOMPLETE, f"{only} of {store.url_of(prefix)}" if only else store.url_of(prefix)
    mark = f"{begun} is not wholly here; fetch it again, or remove this folder\n"
    with _write_errors(destination):
        foreign = _foreign(destination, manifest, mark)
    if foreign:
        advice = "Name an empty folder, or remove what is in this one"
        raise InvalidInput(foreign, subject=str(destination), advice=advice)
    with _write_errors(marker):
        destination.mkdir(parents=True, exist_ok=True)
        marker.write_text(mark)
        if not only:
            (destination / MANIFEST).unlink(missing_ok=True)
    folder = _left_out(manifest, only)
    paths = [destination / checked_key(file.path.removeprefix(folder)) for file in files]
    for parent in {path.parent for path in paths}:
        with _write_errors(parent):
            parent.mkdir(parents=True, exist_ok=True)
    sizes = _sizes(store, prefix)
    meter = Meter("fetching", [file.size for file in files], on_progress)
    turns = threading.Semaphore(WORKERS)
    with ThreadPoolExecutor(STREAMS, thread_name_prefix="nightbridge-ranges") as pool:

        def fetch(numbered: tuple[int, StoredFile]) -> None:
            number, file = numbered
            path = paths[number]
            reader = _RangeReader(store, f"{prefix}/{file.path}", lambda received: meter.moved(number, received))
            # Of large files fewer are written at once: their ranges share the same few streams.
            with turns if file.part_size else contextlib.nullcontext(), _write_errors(path):
                if not _is_there(path, file):
                    reader.check_size(file, sizes)
                    _restore(reader, pool, file, path)

        in_parallel(fetch, list(enumerate(files)), meter, FILES)
    for save_dir, iteration in untracked_save_dirs(files).items():
        _track(destination / save_dir.removeprefix(folder), iteration)
    if not only:
        write_model(destination / MANIFEST, manifest)
    marker.unlink(missing_ok=True)
    return manifest.model_copy(update={"files": tuple(files)})


def _left_out(manifest: Manifest, only: Product | None) -> str:
    """The folder that the stored paths begin with and the restored ones do not.

    A training loads from the folder that its checkpoints are in, which has a name of its own where `save_dir` is set.
    """
    folder = FOLDERS[only] if only else ""
    save_dirs = stored_save_dirs(manifest.files) if only == "checkpoint" else {}
    return next(iter(save_dirs)) if len(save_dirs) == 1 else folder


def _track(save_dir: Path, iteration: int) -> None:
    """Name the newest checkpoint as its writer does: a training that finds none named starts from scratch."""
    state = save_dir / f"iter_{iteration:07d}" / "train_state.pt"
    with _write_errors(save_dir / TRACKER):
        if state.exists():
            with state.open("rb") as own, new_file(save_dir / TRAIN_STATE) as copy:
                shutil.copyfileobj(own, copy)
        if not (save_dir / TRACKER).exists():
            write_atomically(save_dir / TRACKER, str(iteration).encode())


def _foreign(destination: Path, manifest: Manifest, mark: str) -> str:
    """What in a folder no fetch of this run has written, or which other one has begun there; empty when nothing is.

    Of two runs in one folder a training may load the other one's checkpoint: its tracker, or its iteration, counts.
    """
    marker = destination / INCOMPLETE
    if marker.exists() and (other := read_regular(marker, limit=CHUNK).decode(errors="replace")) != mark:
        return f"another fetch into it has not ended: {other.partition(';')[0].strip()}"
    if (destination / MANIFEST).exists() and (of := _prefix_of(destination / MANIFEST)) != manifest.prefix:
        return f"its {MANIFEST} is not of {manifest.prefix}, but of {of or 'something else'}"
    paths = {file.path for file in manifest.files}
    paths |= {save_dir + name for save_dir in untracked_save_dirs(manifest.files) for name in TRACKERS}
    folders = ("", *FOLDERS.values(), _left_out(manifest, "checkpoint"))
    ours = {INCOMPLETE, MANIFEST, *(path.removeprefix(folder) for path in paths for folder in folders)}
    # Through links as well: a training that loads from there follows them.
    for parent, _, names in os.walk(destination, followlinks=True):
        for name in names:
            path = os.path.relpath(os.path.join(parent, name), destination)
            if path not in ours and not _TEMPORARY.fullmatch(name):
                return f"{path!r} in it is not of {manifest.prefix}"
    return ""


def _prefix_of(path: Path) -> str:
    """The prefix that a restored manifest names; empty where it is none."""
    try:  # as it was read from the store, without the limit of a file that a job may have written
        return Manifest.model_validate_json(read_regular(path, limit=path.stat().st_size)).prefix
    except (OSError, ValueError):
        return ""


class _RangeReader:
    """Reads ranges of one object, again where the connection breaks, and checks what arrives part by part."""

    def __init__(self, store: ObjectStore, key: str, on_received: Callable[[int], None]) -> None:
        self._store, self._key, self._on_received = store, key, on_received
        self._received = 0
        self.subject = store.url_of(key)

    def check_size(self, file: StoredFile, sizes: Mapping[str, int]) -> None:
        """The ranges that are read show neither what stands behind them, nor that an empty object is there.

        Raises:
            DamagedData: The object is missing, or shorter or longer than the manifest says.
        """
        if sizes.get(file.path) == file.size:
            return
        found = self._store.stat(self._key)  # a listing may lag behind
        if found is None:
            raise DamagedData("missing", subject=self.subject, advice="It was deleted in the store")
        if found.size != file.size:
            raise _differs(self.subject, f": {found.size} bytes, expected {file.size}")

    def read(self, parts: Sequence[_Range], write: Write) -> Iterator[bytes]:
        """Pass on the bytes of adjacent parts, with one request for all; yields the SHA-256 of each that is whole.

        Raises:
            TransientError: The store did not answer.
            DamagedData: The object is shorter, or its bytes are others.
        """
        for part, digest in zip(parts, self._receive(parts, write), strict=True):
            arrivals = 1
            while part.sha256 not in (None, digest):
                if arrivals == ARRIVALS:
                    raise _differs(self.subject)
                (digest,) = self._receive([part], write)
                arrivals += 1
            yield digest

    def _receive(self, parts: Sequence[_Range], write: Write) -> Iterator[bytes]:
        chunks = self._chunks(parts[0].start, parts[-1].end)
        chunk = memoryview(b"")
        for part in parts:
            digest, at = hashlib.sha256(), part.start
            while at < part.end:
                chunk = chunk or next(chunks)
                piece, chunk = chunk[: part.end - at], chunk[part.end - at :]
                write(at, piece)
                digest.update(piece)
                at += len(piece)
            yield digest.digest()

    def _chunks(self, at: int, end: int) -> Iterator[memoryview]:
        failures = 0
        while at < end:
            begun = at
            try:
                for chunk in self._store.read(self._key, at, end - at):
                    at += len(chunk)
                    self._received += len(chunk)
                    self._on_received(self._received)
                    yield chunk
            except TransientError:
                failures = 1 if at > begun else failures + 1
                if failures == TRIES:
                    raise
                time.sleep(random.uniform(0, 0.1 * 2**failures))
            else:
                if at < end:
                    raise _differs(self.subject, f": it ends after {at} bytes")


def _sizes(store: ObjectStore, prefix: str) -> dict[str, int]:
    """The bytes of each object of a run by its path, as a listing shows them."""
    return {found.key.removeprefix(f"{prefix}/"): found.size for found in store.list(prefix)}


def _is_there(path: Path, file: StoredFile) -> bool:
    try:
        status = path.stat()
    except FileNotFoundError:
        return False
    same_size = stat.S_ISREG(status.st_mode) and status.st_size == file.size
    return same_size and sha256_of_file(path, file.part_size) == file.sha256


def _restore(reader: _RangeReader, pool: ThreadPoolExecutor, file: StoredFile, path: Path) -> None:
    parts = _parts(file)
    # The name of its own may leave no room for more.
    name = hashlib.sha256(os.fsencode(path.name)).hexdigest()
    partial = path.with_name(f".{name[:32]}.{file.sha256[:32]}.part")
    with _opened_alone(partial) as descriptor:
        # A file of one part begins anew: to look for it costs a small file as much as its bytes.
        is_begun = len(parts) > 1 and os.fstat(descriptor).st_size > 0

        def write(start: int, chunk: memoryview) -> None:
            while chunk:
                written = os.pwrite(descriptor, chunk, start)
                start, chunk = start + written, chunk[written:]

        def restore(parts: Sequence[_Range]) -> list[bytes]:
            if not is_begun:
                return list(reader.read(parts, write))
            digests: list[bytes] = []
            for is_whole, adjacent in itertools.groupby(parts, lambda part: _is_on_disk(descriptor, part)):
                some = list(adjacent)
                digests += [part.sha256 or b"" for part in some] if is_whole else reader.read(some, write)
            return digests

        try:
            _check_digests(reader.subject, file, _of_each_range(pool, restore, parts))
        except BaseException as error:
            if isinstance(error, DamagedData) or len(parts) == 1:
                partial.unlink()
            raise
        os.ftruncate(descriptor, file.size)
        partial.replace(path)


def _parts(file: StoredFile) -> list[_Range]:
    step, digests = file.part_size or file.size, base64.b64decode(file.part_digests)
    if not file.part_size:
        digests = bytes.fromhex(file.sha256)
    return [
        _Range(start, min(start + step, file.size), digests[number * DIGEST : (number + 1) * DIGEST] or None)
        for number, start in enumerate(range(0, file.size, step or 1))
    ]


def _check_digests(subject: str, file: StoredFile, digests: Sequence[bytes]) -> None:
    whole = hashlib.sha256(b"".join(digests)).digest() if file.part_size or not digests else digests[0]
    if whole.hex() != file.sha256:
        raise _differs(subject)


def _differs(subject: str, how: str = "") -> DamagedData:
    advice = "It was modified or damaged in the store"
    return DamagedData(f"differs from the manifest{how}", subject=subject, advice=advice)


def _of_each_range(
    pool: ThreadPoolExecutor, function: Callable[[Sequence[_Range]], list[bytes]], parts: Sequence[_Range]
) -> list[bytes]:
    if len(parts) <= 1:
        return function(parts) if parts else []
    step = max(1, RANGE // parts[0].end)
    running = [pool.submit(function, parts[first : first + step]) for first in range(0, len(parts), step)]
    try:
        return [digest for future in running for digest in future.result()]
    finally:
        for future in running:
            # None may write any more once its file is closed.
            if not future.cancel():
                future.exception()


@contextlib.contextmanager
def _opened_alone(path: Path) -> Iterator[int]:
    """Open what a file grows in, for this fetch alone where the file system has locks: its descriptor."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        with contextlib.suppress(OSError):  # such as Lustre mounted without `flock`
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise _restored_by_another(path) from error
        # The other fetch may have ended between the two calls: the file has its own name now, and is whole. A third one
        # may have begun another file of this name since.
        if not _is_at(path, descriptor):
            raise _restored_by_another(path)
        yield descriptor
    finally:
        os.close(descriptor)


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _restored_by_another(path: Path) -> TransientError:
    return TransientError("another fetch is restoring it", subject=str(path), advice="Wait for its end")


def _is_on_disk(descriptor: int, part: _Range) -> bool:
    """Whether an earlier fetch had a part; unknown where the manifest has no digest of it, and then it had not."""
    digest, at = hashlib.sha256(), part.start
    while part.sha256 and (piece := os.pread(descriptor, min(CHUNK, part.end - at), at)):
        digest.update(piece)
        at += len(piece)
    return digest.digest() == part.sha256


def _verify(
    store: ObjectStore,
    prefix: str,
    check: Callable[[StoredFile], str],
    on_progress: Callable[[Progress], None] | None,
) -> list[str]:
    manifest = read_manifest(store, prefix)
    if manifest is None:
        return [f"{MANIFEST}: missing; this run was never committed"]
    wrong_prefix = "" if manifest.prefix == prefix else f"{MANIFEST}: belongs to {manifest.prefix}"
    meter = Meter("reading", [file.size for file in manifest.files], on_progress)
    return [problem for problem in (wrong_prefix, *in_parallel(check, manifest.files, meter, FILES)) if problem]
