"""Many files read, sent, fetched or removed at once, and how far that is: files, bytes, rate and time left.

A `Meter` counts inside one big file as well. The threads report how much of their file they have read; the thread that
waits for them calls the listener, every `INTERVAL` seconds and at the end.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, Literal, TypeVar

from nightbridge.models import Model

WORKERS = 8
"""Files read, or of large ones sent, at once."""

FILES = 96
"""Files sent or fetched at once: of small ones, most wait for the server's answer."""

QUICK = 0.001
"""Seconds in which an item costs less than a thread that takes it: on a local disk."""

INTERVAL = 0.5
"""Seconds between two calls of the listener."""

TransferStep = Literal["reading", "sending", "fetching", "removing"]

_Item = TypeVar("_Item")
Result = TypeVar("Result")


class Progress(Model):
    """How far a step is. `bytes_done` counts what has been read of files in progress, too."""

    step: TransferStep
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
        return left / self.rate if self.rate else None

    @property
    def percent(self) -> float:
        """Share of the bytes, and where there are none of the files, 0 to 100."""
        done, total = (self.bytes_done, self.bytes_total) if self.bytes_total else (self.files_done, self.files_total)
        return 100.0 * done / total if total else 100.0

    def __str__(self) -> str:
        left = f", {_duration(self.seconds_left)} left" if self.seconds_left else ""
        size, total, rate = (_size(count) for count in (self.bytes_done, self.bytes_total, self.rate))
        return f"{self.step}: {self.files_done} of {self.files_total} files, {size} of {total}, {rate}/s{left}"


class Meter:
    """Counts one step. `moved` and `done` are for any thread, `report` for the one that waits for the others."""

    def __init__(self, step: TransferStep, sizes: Sequence[int], listener: Callable[[Progress], None] | None) -> None:
        self._step, self._sizes, self._listener = step, sizes, listener
        self._total = sum(sizes)
        self._began = time.monotonic()
        self._files = self._bytes = 0
        self._in_progress: dict[int, int] = {}
        self._counting = threading.Lock()

    def moved(self, number: int, position: int) -> None:
        """Record how many bytes of a file have been read since its beginning."""
        self._in_progress[number] = position

    def done(self, number: int) -> None:
        """Record that a file is done."""
        with self._counting:
            self._in_progress.pop(number, None)
            self._files += 1
            self._bytes += self._sizes[number]

    def report(self) -> None:
        """Call the listener."""
        if self._listener is None:
            return
        with self._counting:
            # A file that grows is refused in the end; it must not count for more than it was.
            moved = sum(min(position, self._sizes[number]) for number, position in self._in_progress.copy().items())
            files, done = self._files, self._bytes + moved
        progress = Progress(
            step=self._step,
            files_done=files,
            files_total=len(self._sizes),
            bytes_done=done,
            bytes_total=self._total,
            seconds=time.monotonic() - self._began,
        )
        self._listener(progress)


def in_parallel(
    function: Callable[[_Item], Result], items: Sequence[_Item], meter: Meter | None = None, workers: int = WORKERS
) -> list[Result]:
    """Apply `function` to all items, `workers` at once; without a meter in this thread, as long as each is `QUICK`.

    The first exception is raised, and what has not begun by then never does; one of this thread, such as an interrupt,
    before any other. The meter's listener is called in this thread: at intervals, and when all is done.
    """
    results: list[Any] = [] if meter is not None else list(_until_slow(function, items))
    if len(results) == len(items):
        return results
    failures: list[BaseException] = []
    # The threads take the items themselves: to be handed each costs as much as to send a small file.
    numbers = iter(range(len(results), len(items)))
    results += [None] * (len(items) - len(results))

    def work() -> None:
        try:
            for number in numbers:
                if failures:
                    return
                results[number] = function(items[number])
                if meter is not None:
                    meter.done(number)
        except BaseException as error:
            failures.append(error)

    with ThreadPoolExecutor(workers, thread_name_prefix="nightbridge-store") as pool:
        try:
            running = [pool.submit(work) for _ in range(min(workers, len(items)))]
            while wait(running, INTERVAL).not_done:
                if meter is not None:
                    meter.report()
        except BaseException as error:
            failures.append(error)  # which stops the others
            raise
    if failures:
        raise failures[0]
    if meter is not None:
        meter.report()
    return results


def _until_slow(function: Callable[[_Item], Result], items: Iterable[_Item]) -> Iterator[Result]:
    """The results of the first items, until one was not `QUICK`."""
    for item in items:
        began = time.perf_counter()
        yield function(item)
        if time.perf_counter() - began > QUICK:
            return


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:  # what is more has four digits when it is rounded to three
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.4g} TB"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s" if minutes else f"{rest} s"
