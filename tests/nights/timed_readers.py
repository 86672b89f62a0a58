"""The readers of jobs' files, which a child imports from here: each also says what processor time it took."""

import resource
import struct
import time
from collections.abc import Callable
from typing import Any

from nightbridge.errors import DamagedData
from nightbridge.outputs import checkpoints, measurements, run_evidence

SECONDS = struct.Struct("<d")
_READERS = {**vars(checkpoints), **vars(run_evidence), **vars(measurements)}


def __getattr__(name: str) -> Callable[[Any], tuple[Any, bytes]]:
    """The reader of that name. Its bytes end with the seconds of its child and of that one's forks; so does an error."""
    if name not in _READERS:
        raise AttributeError(name)

    def timed(argument: Any) -> tuple[Any, bytes]:
        try:
            answer, data = _READERS[name](argument)
        except DamagedData as error:
            raise DamagedData(error.what, subject=error.subject, advice=str(_seconds())) from error
        return answer, data + SECONDS.pack(_seconds())

    timed.__name__, timed.__annotations__ = name, _READERS[name].__annotations__
    return timed


def _seconds() -> float:
    forks = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + forks.ru_utime + forks.ru_stime
