"""Many files at once in a bounded pool of threads, and the account of how far that is."""

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Literal, TypeVar

from nightbridge.models import Model

WORKERS = 8
"""Files read, sent or fetched at once."""

Step = Literal["reading", "sending", "fetching"]
Item = TypeVar("Item")
Result = TypeVar("Result")


class Progress(Model):
    """How far a harvest (`sending`), a check (`reading`) or a fetch is: files and bytes."""

    step: Step
    files_done: int
    files_total: int
    bytes_done: int
    bytes_total: int


def in_parallel(
    function: Callable[[Item], Result], items: Sequence[Item], on_done: Callable[[int], None]
) -> list[Result]:
    """Apply `function` to all items; the first exception is raised, and what has not begun by then never does.

    `on_done` is called in this thread with the number of each item that is done.
    """
    results: dict[int, Result] = {}
    with ThreadPoolExecutor(WORKERS, thread_name_prefix="nightbridge-store") as pool:
        running: dict[Future[Result], int] = {}
        try:
            # A future takes more memory than the account of a small file: only a few are made ahead.
            for number, item in enumerate(items):
                running[pool.submit(function, item)] = number
                if len(running) >= 2 * WORKERS:
                    _collect(running, results, on_done)
            while running:
                _collect(running, results, on_done)
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    return [results[number] for number in range(len(items))]


def _collect(running: "dict[Future[Result], int]", results: dict[int, Result], on_done: Callable[[int], None]) -> None:
    for future in wait(running, return_when=FIRST_COMPLETED).done:
        number = running.pop(future)
        results[number] = future.result()
        on_done(number)


def meter(step: Step, sizes: Sequence[int], listener: Callable[[Progress], None] | None) -> Callable[[int], None]:
    """Return the `on_done` of `in_parallel` that tells `listener` how many files and bytes are done."""
    done = Progress(step=step, files_done=0, files_total=len(sizes), bytes_done=0, bytes_total=sum(sizes))

    def advance(number: int) -> None:
        nonlocal done
        done = done.model_copy(
            update={"files_done": done.files_done + 1, "bytes_done": done.bytes_done + sizes[number]}
        )
        if listener is not None:
            listener(done)

    return advance
