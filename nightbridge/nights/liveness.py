"""Signs of life: the process of a night or a search refreshes a file in the workspace as long as it lives.

    <workspace>/nights/<flow run id>.alive      Holder: host, process and its start; refreshed every few seconds

Prefect's heartbeats pass through its server, so they are missing when the server is away. A night that continues
without the server still writes to its workspace, and so does one whose heartbeats are rare.
"""

import logging
import os
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from nightbridge.errors import NightbridgeError, TransientError
from nightbridge.files import make_workspace, open_regular, write_model
from nightbridge.locking import Holder, lives, parse_holder, read_holder, this_process
from nightbridge.models import Model

log = logging.getLogger(__name__)

INTERVAL_SECONDS = 15.0
SILENCE_SECONDS = 180.0
_LAST_BEAT_SECONDS = 5.0


class LastSign(Model):
    """The last sign of life of a flow run's process. `silent_for` counts seconds by the file system's own clock."""

    holder: Holder | None
    silent_for: float

    def is_of_the_living(self, silence: float = SILENCE_SECONDS) -> bool:
        """Whether that process lives: looked up where it is this host's, else judged by its silence in seconds."""
        found = lives(self.holder) if self.holder else None
        return self.silent_for <= silence if found is None else found


def alive_path(workspace: Path, flow_run: str) -> Path:
    """The file that the process of a flow run refreshes as long as it lives."""
    return workspace / "nights" / f"{flow_run}.alive"


@contextmanager
def alive(workspace: Path, flow_run: str, *, interval: float = INTERVAL_SECONDS) -> Iterator[None]:
    """Say for the length of the block that this process runs the flow run; the file is removed afterwards.

    A file system that does not answer raises nothing and does not hold up the end of the block: the next beat, after
    `interval` seconds, tries again. The process that began last has the file: one that finds another's there has been
    replaced, and falls silent.
    """
    with suppress(OSError):  # whoever needs the workspace says so
        make_workspace(workspace)
    beats = _Beats(alive_path(workspace, flow_run), interval)
    try:
        yield
    finally:
        beats.stop()


def is_alive(workspace: Path, flow_run: str, *, silence: float = SILENCE_SECONDS) -> bool | None:
    """Whether the process of a flow run lives; None without a sign of life: it has not begun, or has ended its night.

    A process of another host is dead when it was silent for longer than `silence` seconds. A file system that was away
    makes all processes silent: ask twice, some beats apart, before you act on a death.

    Raises:
        TransientError: The workspace does not answer.
    """
    sign = last_sign(workspace, flow_run)
    return sign.is_of_the_living(silence) if sign else None


def living(workspace: Path) -> Iterator[str]:
    """The flow runs of nights and searches in a workspace whose process lives. Raises as `is_alive` does."""
    signs = (path.stem for path in alive_path(workspace, "").parent.glob("*.alive"))
    return (flow_run for flow_run in signs if is_alive(workspace, flow_run))


def last_sign(workspace: Path, flow_run: str) -> LastSign | None:
    """The last sign of life of a flow run's process; None where there is none.

    Raises:
        TransientError: The workspace does not answer.
    """
    path = alive_path(workspace, flow_run)
    try:
        # Opened, because NFS promises fresh attributes only to those who open a file.
        with open_regular(path) as stream:
            beat = os.fstat(stream.fileno()).st_mtime
            holder = parse_holder(stream.read())
        return LastSign(holder=holder, silent_for=_clock_of(path.parent) - beat)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise TransientError(
            f"cannot be read just now: {error.strerror or error}", subject=str(path), advice="It is tried again"
        ) from error


def _clock_of(folder: Path) -> float:
    """What time it is for the file system, which need not agree with any host's clock."""
    probe = folder / f".{uuid.uuid4().hex}.probe"
    try:
        probe.touch(exist_ok=False)
        os.utime(probe)
        return probe.stat().st_mtime
    finally:
        probe.unlink(missing_ok=True)


class _Beats:
    """The thread that refreshes the sign of life, until it is stopped or another process takes over."""

    def __init__(self, path: Path, interval: float) -> None:
        self._path = path
        self._interval = interval
        self._me = this_process()
        self._stopped = threading.Event()
        self._taken = False
        self._try(self._refresh, "could not record that this process is alive")
        self._thread = threading.Thread(target=self._beat, name=path.name, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join(_LAST_BEAT_SECONDS)

    def _beat(self) -> None:
        while not self._stopped.wait(self._interval):
            self._try(self._refresh, "could not record that this process is alive")
        self._try(self._remove, "could not be removed")

    def _refresh(self) -> None:
        found = read_holder(self._path)
        if self._taken and found and found.token != self._me.token:
            log.warning("%s: another process has taken over this flow run: %s", self._path, found)
            self._stopped.set()
            return
        if not self._taken or found is None:
            write_model(self._path, self._me)
            self._taken = True
        # As the probe's: a time of the file system's server, not of this host.
        os.utime(self._path)

    def _remove(self) -> None:
        found = read_holder(self._path)
        if found and found.token == self._me.token:
            self._path.unlink()

    def _try(self, step: Callable[[], None], failure: str) -> None:
        """Take a step on a file system that may be away for a moment."""
        try:
            step()
        except (OSError, NightbridgeError) as error:
            log.warning("%s: %s: %s", self._path, failure, error)
