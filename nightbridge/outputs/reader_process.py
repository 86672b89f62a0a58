"""The reader process: what a job wrote is parsed in a child that can do no harm, and whose death is only damage.

A job is other people's code, and its output reaches C code (pickle, libyaml, Arrow) that was not written for attacks.
So each run is read in a child of its own, with limits on memory and time, without a network, and with Landlock, where
the kernel has it, on nothing but the run's folders and Python's own. Children are forked from a warm server, which has
imported what they need, and never held a secret or a thread. A child writes no file; it answers with JSON.

The child reports each file that it opens. If it dies, that file is the cause, and a second child reads all others: to
it the file is one that cannot be read, which its reader notes as damage under the file's name.

Standard library only, but for what the server imports: its start is paid once, and by a process that needs no answer of
it yet.
"""

import contextlib
import ctypes
import gc
import importlib
import json
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

from pydantic import TypeAdapter, ValidationError

from nightbridge.errors import DamagedData, NightbridgeError, TransientError
from nightbridge.files import Confinement, confine, unless_away
from nightbridge.models import Model
from nightbridge.node_programs import SerializedError
from nightbridge.processes import own_program

AT_ONCE = 4
"""Children of one process that read whole runs; one more for each folder of runs whose logs are followed."""

CPU_SECONDS, CPU_SECONDS_PER_MIB = 10.0, 10.0
"""For each file, and for what is computed from it: ten times what the slowest takes, a log full of short complaints."""
WALL_PER_CPU = 6
"""How much longer a child may take by the clock: other processes need the machine as well, and a disk may be slow."""
MEMORY = 4 << 30
"""Bytes of address space beyond the server's own."""
_DEATHS = 3
_BACKSTOP_SECONDS = 60.0

_Argument = TypeVar("_Argument")
_Answer = TypeVar("_Answer")
_ReadFunction = Callable[[_Argument], tuple[_Answer, bytes]]
"""A function at the top of its module, which the child imports. Its one argument and its answer go between the two as
JSON, by their annotations; the bytes as they are."""

_OPENED, _ANSWER, _FAILURE = b"o", b"a", b"f"


class Setup(Model):
    """The first message to a child: what it is to call, and where it may read."""

    module: str
    function: str
    roots: tuple[Path, ...]
    refused: tuple[tuple[Path, str], ...] = ()
    cpu_seconds: float
    """For each file; see `CPU_SECONDS`."""


@dataclass(eq=False)
class ReaderDied(Exception):
    """A child has ended without an answer. `path` is the file that it had opened last."""

    path: Path | None
    reason: str


# --- both ends -------------------------------------------------------------------------------------------------------

_HEADER = struct.Struct("<cQ")
_SECONDS = struct.Struct("<d")
_LARGEST_MESSAGE = 1 << 30


def _send(connection: socket.socket, kind: bytes, data: bytes) -> None:
    """Send one message."""
    connection.sendall(_HEADER.pack(kind, len(data)))
    connection.sendall(data)


def _receive(connection: socket.socket) -> tuple[bytes, bytes] | None:
    """The next message; None at the end."""
    header = _exactly(connection, _HEADER.size)
    if header is None:
        return None
    kind, size = _HEADER.unpack(header)
    data = _exactly(connection, size) if size <= _LARGEST_MESSAGE else None
    return None if data is None else (kind, data)


def _exactly(connection: socket.socket, size: int) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        piece = connection.recv(min(size - len(data), 1 << 20))
        if not piece:
            return None
        data += piece
    return bytes(data)


# --- the caller ------------------------------------------------------------------------------------------------------


class Child:
    """A child that one function is called in, any number of times. Use it in a `with` block.

    Threads that share it call in turn, each while it holds `lock`.
    """

    def __init__(self, setup: Setup) -> None:
        self.lock = threading.Lock()
        self._connection = SERVER.connect()
        self._path: Path | None = None
        _send(self._connection, b"s", setup.model_dump_json().encode())

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def call(self, argument: bytes) -> tuple[bytes, bytes]:
        """The answer, as JSON, and its bytes.

        Raises:
            ReaderDied: There was none.
            NightbridgeError: What the function has raised.
        """
        began, self._path = time.monotonic(), None  # what an earlier call has opened is no cause of this one's death
        # The child ends itself in time, but for one that waits for a file system which does not answer.
        self._connection.settimeout(CPU_SECONDS * WALL_PER_CPU + _BACKSTOP_SECONDS)
        try:
            _send(self._connection, b"c", argument)
            while (message := _receive(self._connection)) is not None:
                kind, data = message
                if kind == _FAILURE:
                    raise SerializedError.model_validate_json(data).error()
                if kind == _ANSWER:
                    size = int.from_bytes(data[:8], "little")
                    return data[8 : 8 + size], data[8 + size :]
                (seconds,) = _SECONDS.unpack_from(data)
                self._path = Path(os.fsdecode(data[_SECONDS.size :]))
                self._connection.settimeout(seconds * WALL_PER_CPU + _BACKSTOP_SECONDS)
            raise ReaderDied(self._path, f"its reader died after {time.monotonic() - began:.1f} s")
        except TimeoutError as error:
            raise ReaderDied(self._path, f"its reader did not answer for {time.monotonic() - began:.0f} s") from error
        except OSError as error:
            raise ReaderDied(self._path, f"its reader died: {error.strerror}") from error


def _setup(reader: Callable[..., object], roots: Sequence[Path], refused: Mapping[Path, str]) -> Setup:
    return Setup(
        module=reader.__module__,
        function=reader.__name__,
        roots=tuple(roots),
        refused=tuple(refused.items()),
        cpu_seconds=CPU_SECONDS,
    )


@lru_cache(maxsize=16)
def _types(reader: Callable[..., object]) -> tuple[TypeAdapter[Any], TypeAdapter[Any]]:
    """Those of a reader's argument and of its answer."""
    *arguments, returned = get_type_hints(reader).values()
    return TypeAdapter(*arguments), TypeAdapter(get_args(returned)[0])


_slots = threading.BoundedSemaphore(AT_ONCE)


def read_in_child(
    reader: _ReadFunction[_Argument, _Answer], argument: _Argument, roots: Sequence[Path], *, subject: str
) -> tuple[_Answer, bytes]:
    """Call a reader in a child; a file over which one dies is left to it as one that cannot be read.

    It may read the folders `roots`; `subject` is whose output it is, for messages.

    Raises:
        DamagedData: Children died over several files.
        NightbridgeError: What the reader has raised.
    """
    refused: dict[Path, str] = {}
    deaths: list[str] = []
    given = _types(reader)[0].dump_json(argument)
    while True:
        setup = _setup(reader, roots, refused)
        try:
            with _slots, Child(setup) as child:
                found, data = child.call(given)
            return _validated(reader, found), data
        except ReaderDied as death:
            deaths.append(f"{death.path or 'no file'}: {death.reason}")
            # What is no file's fault may be a server that has just ended: once is tried again.
            if len(deaths) > _DEATHS or (death.path is None and len(deaths) > len(refused) + 1):
                what = f"its output cannot be read: {'; '.join(deaths)}"
                raise DamagedData(what, subject=subject, advice="Look at the files that the job left") from death
            if death.path is not None:
                refused[death.path] = death.reason


def _validated(reader: _ReadFunction[_Argument, _Answer], found: bytes) -> _Answer:
    try:
        answer: _Answer = _types(reader)[1].validate_json(found)
    except ValidationError as error:
        raise DamagedData(f"its reader's answer is none: {error.errors()[0]['msg']}") from error
    return answer


_shared: dict[Setup, Child] = {}
_shared_lock = threading.Lock()


def call_shared(reader: _ReadFunction[_Argument, _Answer], argument: _Argument, roots: Sequence[Path]) -> _Answer:
    """Call a reader in the one child of its roots, which stays, and keeps what the reader keeps.

    Raises:
        ReaderDied: It has died; the next call makes a new one, which knows nothing yet.
        NightbridgeError: What the reader has raised.
    """
    setup, given = _setup(reader, roots, {}), _types(reader)[0].dump_json(argument)
    while True:
        with _shared_lock:
            if setup not in _shared:
                _shared[setup] = Child(setup)
            child = _shared[setup]
        with child.lock:
            if _shared.get(setup) is not child:
                continue  # it has died over the files of a call that this one waited for
            try:
                return _validated(reader, child.call(given)[0])
            except NightbridgeError:
                raise
            except BaseException:  # it has died, or its answer to an interrupted call is still to come
                with _shared_lock:  # under which another thread may just have found it
                    del _shared[setup]
                raise


class _Server:
    """The warm server of this process, started when it is first needed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._control: socket.socket | None = None

    def connect(self) -> socket.socket:
        """A connection to a new child.

        Raises:
            TransientError: The server cannot be started.
        """
        ours, theirs = socket.socketpair()
        with self._lock, theirs:
            if self._control is not None:
                with contextlib.suppress(OSError):
                    socket.send_fds(self._control, [b"c"], [theirs.fileno()])
                    return ours
            self._control = self._start()
            socket.send_fds(self._control, [b"c"], [theirs.fileno()])
        return ours

    @staticmethod
    def _start() -> socket.socket:
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                subprocess.Popen(
                    own_program(__name__),
                    env=_environment(os.environ),
                    cwd="/",
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                )
            except OSError as error:
                raise TransientError(
                    f"no process can be started: {error.strerror}", subject="the reader", advice="Will retry"
                ) from error
        return ours


SERVER = _Server()
"""Process-wide. It ends with this process, when its standard input ends."""


def _environment(environment: Mapping[str, str]) -> dict[str, str]:
    """What the server gets of an environment that may hold secrets: where libraries lie, and nothing else."""
    kept = {name: environment[name] for name in ("PATH", "LD_LIBRARY_PATH", "LANG", "TZ") if name in environment}
    # Threads do not survive a fork, and allocators that reserve address space do not fit into a child's limit.
    alone = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}
    return {**kept, **alone, "ARROW_DEFAULT_MEMORY_POOL": "system"}


# --- the server and its children -------------------------------------------------------------------------------------

_WARM = ("pandas", "pyarrow.parquet", "yaml", "nightbridge.outputs.measurements", "nightbridge.outputs.following")


def main(_arguments: Sequence[str]) -> int:
    """The server: fork a child for each connection that comes through standard input, until that ends."""
    control = socket.socket(fileno=0)
    for module in _WARM:
        importlib.import_module(module)
    _leave_network()
    gc.freeze()
    while descriptors := socket.recv_fds(control, 1, 1)[1]:
        if os.fork() == 0:
            control.close()
            _serve(socket.socket(fileno=descriptors[0]))
        os.close(descriptors[0])
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass  # those that have ended by now
    return 0


def _serve(connection: socket.socket) -> None:
    """Be a child, to its end."""
    try:
        message = _receive(connection)
        if message is not None:
            setup = Setup.model_validate_json(message[1])
            reader: _ReadFunction[Any, Any] = getattr(importlib.import_module(setup.module), setup.function)
            _set_limits()
            # Under both names, where a workspace lies behind a link; a root that is one itself stays one.
            roots = (*setup.roots, *(root.parent.resolve() / root.name for root in setup.roots))
            _restrict_files(roots)
            confine(Confinement(roots, dict(setup.refused), partial(_note_opened, connection, setup.cpu_seconds)))
        while (message := _receive(connection)) is not None:
            _arm(setup.cpu_seconds)
            _send(connection, *_answer(reader, message[1]))
            _arm(0)
    finally:
        os._exit(0)


def _answer(reader: _ReadFunction[Any, Any], argument: bytes) -> tuple[bytes, bytes]:
    try:
        taken, given = _types(reader)
        answer, data = _read(reader, taken.validate_json(argument))
        # NaN stays NaN, and half of a surrogate pair, which no JSON may hold, becomes a question mark.
        found = json.dumps(given.dump_python(answer, mode="json"), ensure_ascii=False).encode(errors="replace")
        return _ANSWER, len(found).to_bytes(8, "little") + found + data
    except NightbridgeError as error:
        failure = SerializedError.of(error)
    except Exception as error:  # a reader that does not know this damage: it is damage all the same
        detail = "it takes too much memory" if isinstance(error, MemoryError) else f"{type(error).__name__}: {error}"
        failure = SerializedError(kind=DamagedData.__name__, what=f"its output cannot be read: {detail}")
    return _FAILURE, failure.model_dump_json().encode()


def _read(reader: _ReadFunction[_Argument, _Answer], argument: _Argument) -> tuple[_Answer, bytes]:
    try:
        return reader(argument)
    except OSError as error:
        unless_away(error)
        raise


def _note_opened(connection: socket.socket, cpu_seconds: float, path: Path, size: int) -> None:
    """Tell the caller which file is read now, and give it its time."""
    seconds = cpu_seconds + CPU_SECONDS_PER_MIB * size / (1 << 20)
    _arm(seconds)
    _send(connection, _OPENED, _SECONDS.pack(seconds) + os.fsencode(path))


def _arm(seconds: float) -> None:
    """End this process by a signal that no Python code has to see, when its time is over; 0 is no limit."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, seconds * WALL_PER_CPU)


def _set_limits() -> None:
    memory = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize() + MEMORY
    for kind, limit in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, 64),
    ):
        hard = resource.getrlimit(kind)[1]
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(kind, (limit, limit))


# --- the kernel's own fences -----------------------------------------------------------------------------------------

_libc = ctypes.CDLL(None, use_errno=True)
_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000


def _leave_network() -> None:
    """Move this process and its children to a network of their own that has nothing in it, where the kernel allows it.

    Without privileges that takes a user namespace, as enroot needs one. Where there are none, Landlock forbids TCP.
    """
    user, group = os.geteuid(), os.getegid()
    if _libc.unshare(_CLONE_NEWNET if user == 0 else _CLONE_NEWUSER | _CLONE_NEWNET) or user == 0:
        return
    with contextlib.suppress(OSError):
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1", encoding="ascii")
        Path("/proc/self/setgroups").write_text("deny", encoding="ascii")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1", encoding="ascii")


_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
"""System calls of landlock(7)."""
_RIGHTS = ((0x1FFF, 0, 0), (0x3FFF, 0, 0), (0x7FFF, 0, 0), (0x7FFF, 3, 0), (0xFFFF, 3, 0), (0xFFFF, 3, 3))
"""What each version of it can restrict: all rights on files, on TCP, and the scopes (sockets without a name, signals).
"""
_READ_FILE, _READ_FOLDER = 0x04, 0x0C


def _restrict_files(roots: Sequence[Path]) -> bool:
    """Let this process open nothing but what lies in these folders and what Python is made of; whether it is so."""
    version = _libc.syscall(_LANDLOCK_CREATE, None, ctypes.c_size_t(0), 1)
    if version < 1:
        return False
    rights = struct.pack("<3Q", *_RIGHTS[min(version, len(_RIGHTS)) - 1])
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    rules = _libc.syscall(_LANDLOCK_CREATE, rights, ctypes.c_size_t(size), 0)
    if rules < 0:
        return False
    package = Path(__file__).parents[1]
    # A `.pth` file may add the libraries of another environment; the folder of a checkout, in sys.path too, holds more.
    libraries = {each for each in sys.path if each.endswith("-packages")}
    own = (package, *map(Path, {sys.prefix, sys.base_prefix, *libraries, "/usr", "/lib", "/lib64", "/etc/localtime"}))
    for path in (*own, *roots):
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC | (os.O_NOFOLLOW if path in roots else 0))
            allowed = _READ_FOLDER if path.is_dir() else _READ_FILE
            _libc.syscall(_LANDLOCK_ADD, rules, 1, struct.pack("<Qi", allowed, descriptor), 0)
            os.close(descriptor)
    _libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS, without which only root may restrict itself
    return bool(_libc.syscall(_LANDLOCK_RESTRICT, rules, 0) == 0)
