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


class Folder(Model):
    folder: Path


class Answer(Model):
    read: dict[str, str]


def _reads(each: Callable[[bytes], str]) -> Callable[[bytes], tuple[Answer, bytes]]:
    def read(argument: bytes) -> tuple[Answer, bytes]:
        folder = Folder.model_validate_json(argument).folder
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


def crash(argument: bytes) -> tuple[Answer, bytes]:
    return _reads(_crash)(argument)


def hang(argument: bytes) -> tuple[Answer, bytes]:
    return _reads(_hang)(argument)


def sleep(argument: bytes) -> tuple[Answer, bytes]:
    return _reads(_sleep)(argument)


def allocate(argument: bytes) -> tuple[Answer, bytes]:
    return _reads(_allocate)(argument)


def attempts(argument: bytes) -> tuple[Answer, bytes]:
    return _reads(_attempts)(argument)


def raises(_argument: bytes) -> tuple[Answer, bytes]:
    raise IndexError("no such thing")


def is_away(argument: bytes) -> tuple[Answer, bytes]:
    raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(Folder.model_validate_json(argument).folder))


def exits(_argument: bytes) -> tuple[Answer, bytes]:
    """Die before any file is opened."""
    os._exit(1)
