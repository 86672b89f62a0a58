"""Readers that do in a child what hostile output would have them do. Each takes a folder and reads its files by name."""

import ctypes
import errno
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

from nightbridge.files import open_regular
from nightbridge.models import Model


class Answer(Model):
    read: dict[str, str]


def _reads(each: Callable[[bytes], str]) -> Callable[[Path], tuple[Answer, bytes]]:
    def read(folder: Path) -> tuple[Answer, bytes]:
        answer = {}
        for path in sorted(folder.iterdir()):
            try:
                with open_regular(path) as stream:
                    answer[path.name] = each(stream.read())
            except OSError as error:
                answer[path.name] = error.strerror or ""
        return Answer(read=answer), b"blob"

    return read


def _crash(data: bytes) -> str:
    return ctypes.string_at(0).decode() if b"bad" in data else "read"


def _hang(data: bytes) -> str:
    if b"bad" in data:
        libc = ctypes.PyDLL(None)  # holds the interpreter, as a regular expression does
        while True:
            libc.usleep(1)
    return "read"


def _sleep(data: bytes) -> str:
    time.sleep(60 if b"bad" in data else 0)
    return "read"


def _allocate(_data: bytes) -> str:
    return str(len(bytearray(64 << 30)))


def _attempts(data: bytes) -> str:
    """What of these succeeds."""
    done = []
    for name, attempt in (
        ("open", lambda: Path(data.decode()).read_text()),
        ("write", lambda: Path(data.decode()).with_name("written").write_text("x")),
        ("connect", lambda: socket.create_connection(("127.0.0.1", int(os.environ.get("PORT", "9"))), timeout=1)),
        ("environment", lambda: 1 / ("SECRET" in " ".join(os.environ))),
        ("threads", lambda: 1 / (len(os.listdir("/proc/self/task")) > 1)),
    ):
        try:
            attempt()
        except (OSError, ZeroDivisionError, ValueError):
            continue
        done.append(name)
    return " ".join(done)


def crash(folder: Path) -> tuple[Answer, bytes]:
    return _reads(_crash)(folder)


def hang(folder: Path) -> tuple[Answer, bytes]:
    return _reads(_hang)(folder)


def sleep(folder: Path) -> tuple[Answer, bytes]:
    return _reads(_sleep)(folder)


def allocate(folder: Path) -> tuple[Answer, bytes]:
    return _reads(_allocate)(folder)


def attempts(folder: Path) -> tuple[Answer, bytes]:
    return _reads(_attempts)(folder)


def raises(_folder: Path) -> tuple[Answer, bytes]:
    raise IndexError("no such thing")


def is_away(folder: Path) -> tuple[Answer, bytes]:
    raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(folder))


def exits(_folder: Path) -> tuple[Answer, bytes]:
    """Die before any file is opened."""
    os._exit(1)
