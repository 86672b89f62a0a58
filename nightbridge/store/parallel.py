"""Many files at once in a bounded pool of threads."""

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import TypeVar

from nightbridge.store.progress import INTERVAL, Meter

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
