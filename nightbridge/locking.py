"""Locks that work on shared file systems and outlive no process, and values that one process makes for all.

A lease is a file, created atomically, that names its holder. A thread of the holder refreshes its modification time.
A lease is broken when its holder is known to be dead (same machine, no such process), or when it was not refreshed for
its time to live. That time is measured by the waiter's own clock, from one look to the next, so clocks of different
machines need not agree.
"""

import errno
import logging
import os
import random
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from nightbridge.errors import NightbridgeError, PermanentError, TransientError
from nightbridge.files import RefusedFile, create_exclusively, create_model, open_regular, read_model, read_regular
from nightbridge.models import Model, StoredModel, utc_now

log = logging.getLogger(__name__)

M = TypeVar("M", bound=Model)

BEATS_PER_TTL = 4
FIRST_PAUSE_SECONDS = 0.02
MAX_PAUSE_SECONDS = 1.0
LOG_AFTER_SECONDS = 2.0
_MAX_HOLDER_BYTES = 64 << 10

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT}
_UNWRITABLE = {errno.EEXIST, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, *_NO_ROOM}


class Holder(StoredModel):
    """Who holds a lease: the content of its file."""

    token: str
    host: str
    pid: int
    process_space: str = ""
    process_started: str = ""
    since: datetime

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since:%Y-%m-%d %H:%M:%S} UTC"


class Lease:
    """A lease that this process holds. Only `lease` makes one."""

    def __init__(self, path: Path, holder: Holder, ttl: float) -> None:
        self.path = path
        self._holder = holder
        self._pause = ttl / BEATS_PER_TTL
        self._released = threading.Event()
        self._lost = False
        self._thread = threading.Thread(target=self._beat, name=f"lease {path.name}", daemon=True)
        self._thread.start()

    def ensure_held(self) -> None:
        """Raise unless the lease is still ours: to be called right before something is put in its final place.

        Raises:
            TransientError: The lease was broken, because this process was stopped for longer than its time to live.
        """
        if self._lost or not self._is_ours():
            raise TransientError("lost the lease while working", subject=str(self.path), advice="Will retry")

    def release(self) -> None:
        """Stop refreshing, and remove the file if it is still ours."""
        self._released.set()
        self._thread.join()
        if self._is_ours():
            self.path.unlink(missing_ok=True)

    def _is_ours(self) -> bool:
        found = read_holder(self.path)
        return found is not None and found.token == self._holder.token

    def _beat(self) -> None:
        while not self._released.wait(self._pause):
            try:
                if not self._is_ours():
                    self._lost = True
                    log.warning("%s: another process broke this lease", self.path)
                    return
                os.utime(self.path)
            except OSError as error:
                # A shared file system may be unavailable for a moment; the next beat shows whether the lease survived.
                log.warning("%s: could not refresh the lease: %s", self.path, error)


@contextmanager
def lease(
    path: Path, *, ttl: float = 60.0, timeout: float = 3600.0, on_wait: Callable[[], None] = lambda: None
) -> Iterator[Lease]:
    """Hold the lease at `path` for the length of the block; wait while another process does.

    Args:
        path: The lease file. Its folder is made.
        ttl: Seconds without a heartbeat after which a waiter breaks the lease.
        timeout: Longest time to wait for it, seconds.
        on_wait: Called now and then while another process holds it; ends the wait by raising.

    Raises:
        TransientError: Another process held it until the timeout; the message names it.
        PermanentError: The folder cannot be written.
    """
    held = _acquire(path, ttl, timeout, on_wait)
    try:
        yield held
    finally:
        held.release()


@contextmanager
def brief_lease(path: Path) -> Iterator[None]:
    """Hold a lease for much less than its time to live, be the disk full: whoever frees space needs none.

    Where there is no room for the holder's name, the file is empty. Nobody refreshes it, and who waits for it breaks
    it after its time to live, as one that cannot be read.

    Raises:
        TransientError: Another process held it until the timeout; the message names it.
        PermanentError: The folder cannot be written.
    """
    with ExitStack() as stack:
        try:
            stack.enter_context(lease(path))
        except NightbridgeError as error:
            if getattr(error.__cause__, "errno", None) not in _NO_ROOM:
                raise
            try:
                path.touch(exist_ok=False)
            except OSError:
                raise error from error.__cause__
            stack.callback(path.unlink, missing_ok=True)
        yield


def get_or_create(path: Path, kind: type[M], create: Callable[[], M]) -> M:
    """Return the value stored at `path`; if there is none, call `create` and store its result while all others wait.

    Args:
        path: The file that stores the value. It is created whole and never changed.
        kind: The value's model.
        create: Makes the value. What it raises is raised here, and nothing is stored.

    Raises:
        DamagedData: The file cannot be read.
        TransientError: Another process held the lock for too long.
    """
    advice = "If nothing that depends on it was started, remove the file; it is then created again"
    read = partial(read_model, path, kind, what="cannot read this stored value", advice=advice)
    if (found := read()) is not None:
        return found
    with lease(path.with_suffix(".lease")):
        if (found := read()) is not None:
            return found
        made = create()
        if create_model(path, made):
            return made
        # Our lease was broken meanwhile; the first value holds.
        return read() or made


def _acquire(path: Path, ttl: float, timeout: float, on_wait: Callable[[], None]) -> Lease:
    watch = _Watch(path, ttl)
    started = time.monotonic()
    pause = FIRST_PAUSE_SECONDS
    logged = False
    while True:
        me = this_process()
        try:
            if not path.exists() and create_exclusively(path, me.model_dump_json().encode()):
                return Lease(path, me, ttl)
            waited = time.monotonic() - started
            if watch.holder_is_gone():
                _break(path, watch.holder, ttl)
                continue
        except OSError as error:
            raise _cannot_write(path, error) from error
        if waited >= timeout:
            raise TransientError(
                f"locked for {waited:.0f} s by {watch.holder or 'an unknown process'}",
                subject=str(path),
                advice="Will retry; if that process hangs, end it",
            )
        if not logged and waited > LOG_AFTER_SECONDS:
            log.info("%s: waiting for the lease of %s", path, watch.holder)
            logged = True
        on_wait()
        time.sleep(min(pause * random.uniform(0.5, 1.0), max(timeout - waited, 0.001)))
        pause = min(pause * 1.5, MAX_PAUSE_SECONDS)


class _Watch:
    """What a waiter has seen of another process's lease."""

    def __init__(self, path: Path, ttl: float) -> None:
        self.holder: Holder | None = None
        self._path = path
        self._ttl = ttl
        self._seen: tuple[str, int] | None = None
        self._seen_at = 0.0

    def holder_is_gone(self) -> bool:
        try:
            # Opened, because NFS promises fresh attributes only to those who open a file.
            with open_regular(self._path, limit=_MAX_HOLDER_BYTES) as stream:
                mtime = os.fstat(stream.fileno()).st_mtime_ns
                self.holder = parse_holder(stream.read())
        except FileNotFoundError:
            self._seen = None
            return False
        except RefusedFile:  # not made by a holder: broken after `ttl`, as is one that cannot be parsed
            self.holder, mtime = None, 0
        now = time.monotonic()
        state = (self.holder.token if self.holder else "", mtime)
        if state != self._seen:
            self._seen, self._seen_at = state, now
        if self.holder and lives(self.holder) is False:
            return True
        return now - self._seen_at > self._ttl


def _break(path: Path, holder: Holder | None, ttl: float) -> None:
    """Remove a dead holder's lease and no other: one waiter at a time does it, and checks again first."""
    guard = path.with_name(f"{path.name}.break")
    me = this_process()
    if not create_exclusively(guard, me.model_dump_json().encode()):
        _clear_dead_guard(guard, ttl)
        time.sleep(FIRST_PAUSE_SECONDS)
        return
    try:
        tombstone = path.with_name(f".{path.name}.{uuid.uuid4().hex}.broken")
        with suppress(FileNotFoundError):
            path.rename(tombstone)
            found = read_holder(tombstone)
            if (found.token if found else "") != (holder.token if holder else ""):
                # Released and taken again between the last look and now: give it back.
                with suppress(FileExistsError):
                    os.link(tombstone, path)
            else:
                log.info("%s: broke the lease of %s", path, holder or "an unknown process")
            tombstone.unlink()
    finally:
        guard.unlink(missing_ok=True)


def _clear_dead_guard(guard: Path, ttl: float) -> None:
    """Remove the guard of a process that died while it broke a lease; holding one takes milliseconds."""
    holder = read_holder(guard)
    try:
        age = time.time() - guard.stat().st_mtime
    except FileNotFoundError:
        return
    if (holder and lives(holder) is False) or age > 10 * ttl:
        guard.unlink(missing_ok=True)


def read_holder(path: Path) -> Holder | None:
    """Who holds the lease at `path`; None where there is no such file, or not the file of a lease."""
    try:
        return parse_holder(read_regular(path, limit=_MAX_HOLDER_BYTES))
    except (FileNotFoundError, RefusedFile):
        return None


def parse_holder(data: bytes) -> Holder | None:
    """The content of a lease file; None for anything else."""
    try:
        return Holder.model_validate_json(data)
    except ValidationError:
        return None


def this_process() -> Holder:
    """Describe this process as the content of a lease file; each call makes a token of its own."""
    pid = os.getpid()
    return Holder(
        token=uuid.uuid4().hex,
        host=socket.gethostname(),
        pid=pid,
        process_space=_process_space(),
        process_started=_process_started(pid),
        since=utc_now(),
    )


def lives(holder: Holder) -> bool | None:
    """Whether the holder's process is there; None where that cannot be seen: in another process table."""
    if holder.host != socket.gethostname() or holder.process_space != _process_space():
        return None
    try:
        os.kill(holder.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return None
    # A living process of this number is another one if it started at another time.
    return not holder.process_started or _process_started(holder.pid) == holder.process_started


def _process_space() -> str:
    """Identity of this machine's process table since its last start; containers have tables of their own."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + " " + os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _process_started(pid: int) -> str:
    """Start of a living process in clock ticks since boot, from proc(5)'s stat; empty where there is no /proc.

    A zombie counts as gone: it has ended, and its parent has not reaped it yet.
    """
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if state in ("Z", "X") else fields[18]


def _cannot_write(path: Path, error: OSError) -> NightbridgeError:
    reason = error.strerror or str(error)
    if error.errno in _UNWRITABLE:
        return PermanentError(f"cannot be written: {reason}", subject=str(path.parent), advice="Check the folder")
    return TransientError(f"cannot be written at the moment: {reason}", subject=str(path.parent))
