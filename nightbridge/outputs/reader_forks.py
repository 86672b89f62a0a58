"""Many large files of one run, read in several forks of the process that reads the run.

A fork has its child's fences, a share of its memory, and its time for each file. What it opens, its child reports as
its own. Where a fork dies over a file, so does the child, and its caller leaves that file out.
"""

import contextlib
import os
import pickle
import resource
import selectors
import signal
import socket
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from nightbridge.errors import DamagedData
from nightbridge.files import bytes_of, report_opened
from nightbridge.outputs.reader_process import (
    ANSWER,
    CALLER,
    CPU_SECONDS,
    MEMORY,
    OPENED,
    SECONDS,
    arm,
    note_opened,
    receive,
    send,
)

FORKS = 4
"""Forks of one process at once, at most."""

FORK_FROM = 8 << 20
"""Bytes of all files from which that is faster."""

_Found = TypeVar("_Found")


def map_files(function: Callable[[Path], _Found], paths: Sequence[Path]) -> list[_Found]:
    """Apply a function to files: to large ones in as many forks as there are processors. Threads are never forked.

    Raises:
        DamagedData: In a process that is no child: a fork has died.
    """
    forks = min(FORKS, len(os.sched_getaffinity(0)), len(paths))
    if forks < 2 or threading.active_count() > 1 or sum(map(bytes_of, paths)) < FORK_FROM:
        return [function(path) for path in paths]
    found: dict[Path, _Found] = {}
    shares = [_Share(function, paths[first::forks]) for first in range(forks)]
    with contextlib.ExitStack() as ended, selectors.DefaultSelector() as selector:
        for share in shares:
            ended.callback(share.end)
            selector.register(share.connection, selectors.EVENT_READ, share)
        while selector.get_map():
            for key, _ in selector.select():
                share, message = key.data, receive(key.data.connection)
                if message is None:
                    selector.unregister(share.connection)
                    share.check_done()
                elif message[0] == ANSWER:
                    found[share.pending.pop(0)] = pickle.loads(message[1])
                else:
                    share.opened = message[1]
                    _report(message[1], max(other.seconds for other in shares))
    return [found[path] for path in paths]


class _Share:
    """A fork, the files that it has yet to read, and its last report of one."""

    def __init__(self, function: Callable[[Path], object], paths: Sequence[Path]) -> None:
        self.pending = list(paths)
        self.opened = SECONDS.pack(CPU_SECONDS) + os.fsencode(paths[0])
        self.connection, theirs = socket.socketpair()
        self._process = os.fork()
        if not self._process:
            _read(theirs, function, paths)
        theirs.close()

    @property
    def seconds(self) -> float:
        """Of processor time, for the file that it reads."""
        return float(SECONDS.unpack_from(self.opened)[0]) if self.pending else 0.0

    def end(self) -> None:
        """End the fork, whatever it does."""
        os.kill(self._process, signal.SIGKILL)
        os.waitpid(self._process, 0)
        self.connection.close()

    def check_done(self) -> None:
        """End this child where its fork has died over a file."""
        if self.pending:
            _report(self.opened, 0)
            if CALLER:
                os._exit(1)
            raise DamagedData("its reader died", subject=os.fsdecode(self.opened[SECONDS.size :]))


def _read(connection: socket.socket, function: Callable[[Path], object], paths: Sequence[Path]) -> None:
    """Be a fork, to its end."""
    try:
        if CALLER:
            limit = resource.getrlimit(resource.RLIMIT_AS)[0] - MEMORY + MEMORY // FORKS
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        report_opened(partial(note_opened, connection, CPU_SECONDS))
        for path in paths:
            send(connection, ANSWER, pickle.dumps(function(path), protocol=5))
    finally:
        os._exit(0)


def _report(opened: bytes, seconds: float) -> None:
    """Tell the caller of this child, which waits for all forks, what one of them reads."""
    for caller in CALLER:
        arm(seconds)
        send(caller, OPENED, SECONDS.pack(seconds) + opened[SECONDS.size :])
