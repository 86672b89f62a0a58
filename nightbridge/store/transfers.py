"""How far a harvest, a check, a fetch or a removal is: files, bytes, rate and the time that is left.

Also inside one big file: threads report how much of their file they have read, and the thread that waits for them
notifies the listener, at most every `INTERVAL` seconds and after each file.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Literal, TypeVar

from nightbridge.models import Model

INTERVAL = 0.5
"""Seconds after which the listener hears of files that are still under way."""

Step = Literal["reading", "sending", "fetching", "removing"]


class Progress(Model):
    """How far it is. `bytes_done` counts what has been read of files under way, too."""

    step: Step
    files_done: int
    files_total: int
    bytes_done: int
    bytes_total: int
    seconds: float = 0.0

    @property
    def rate(self) -> float:
        """Bytes a second since the beginning, 0 while nothing has moved."""
        return self.bytes_done / self.seconds if self.seconds > 0 else 0.0

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the end at this rate; None while unknown."""
        left = self.bytes_total - self.bytes_done
        if not left:
            return 0.0
        return left / self.rate if self.rate else None

    @property
    def percent(self) -> float:
        """Share of the bytes, and where there are none of the files, 0 to 100."""
        done, total = (self.bytes_done, self.bytes_total) if self.bytes_total else (self.files_done, self.files_total)
        return 100.0 * done / total if total else 100.0

    def __str__(self) -> str:
        left = self.seconds_left
        words = [
            f"{self.step}: {self.files_done} of {self.files_total} files",
            f"{_size(self.bytes_done)} of {_size(self.bytes_total)}",
            f"{_size(self.rate)}/s",
        ]
        if left:
            words.append(f"{_duration(left)} left")
        return ", ".join(words)


class Meter:
    """The account of one step. `moved` is for any thread, the rest for the thread that waits for the others."""

    def __init__(self, step: Step, sizes: Sequence[int], listener: Callable[[Progress], None] | None) -> None:
        self._step, self._sizes, self._listener = step, sizes, listener
        self._total = sum(sizes)
        self._began = self._told = time.monotonic()
        self._files = self._bytes = 0
        self._under_way: dict[int, int] = {}

    def moved(self, number: int, position: int) -> None:
        """Take in how many bytes of a file have been read since its beginning."""
        self._under_way[number] = position

    def done(self, number: int) -> None:
        """Take in that a file is done, and notify the listener."""
        self._under_way.pop(number, None)
        self._files += 1
        self._bytes += self._sizes[number]
        self._tell()

    def waiting(self) -> None:
        """Notify the listener of the files in progress, at most once per interval."""
        if time.monotonic() - self._told >= INTERVAL:
            self._tell()

    def _tell(self) -> None:
        self._told = time.monotonic()
        if self._listener is None:
            return
        # A file that grows is refused in the end; it must not count for more than it was.
        under_way = sum(min(position, self._sizes[number]) for number, position in list(self._under_way.items()))
        self._listener(
            Progress(
                step=self._step,
                files_done=self._files,
                files_total=len(self._sizes),
                bytes_done=self._bytes + under_way,
                bytes_total=self._total,
                seconds=self._told - self._began,
            )
        )


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.4g} TB"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s" if minutes else f"{rest} s"


WORKERS = 8
"""Files read, sent or fetched at once."""


Item = TypeVar("Item")


Result = TypeVar("Result")


def in_parallel(function: Callable[[Item], Result], items: Sequence[Item], meter: Meter | None = None) -> list[Result]:
    """Apply `function` to all items; the first exception is raised, and what has not begun by then never does.

    The meter hears in this thread of each item that is done, and at intervals while none is.
    """
    results: dict[int, Result] = {}
    with ThreadPoolExecutor(WORKERS, thread_name_prefix="nightbridge-store") as pool:
        running: dict[Future[Result], int] = {}
        try:
            # A future takes more memory than the account of a small file: only a few are made ahead.
            for number, item in enumerate(items):
                running[pool.submit(function, item)] = number
                while len(running) >= 2 * WORKERS:
                    _collect(running, results, meter)
            while running:
                _collect(running, results, meter)
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    return [results[number] for number in range(len(items))]


def _collect(running: "dict[Future[Result], int]", results: dict[int, Result], meter: Meter | None) -> None:
    for future in wait(running, timeout=INTERVAL, return_when=FIRST_COMPLETED).done:
        number = running.pop(future)
        results[number] = future.result()
        if meter is not None:
            meter.done(number)
    if meter is not None:
        meter.waiting()
