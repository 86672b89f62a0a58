"""Flow API functions where an event loop runs; the calls are real, the flows in them stand in for nights."""

import asyncio
import contextvars
import signal
import threading
import time
from collections.abc import Callable

import pytest

from nightbridge.errors import InvalidInput
from nightbridge.flows.event_loop import async_twin, outside_of_loops
from nightbridge.tasks.context import raise_if_interrupted

WHO = contextvars.ContextVar("WHO", default="nobody")


@outside_of_loops
def where() -> tuple[str, bool]:
    """The thread's name, and whether a loop runs in it."""
    return threading.current_thread().name, asyncio._get_running_loop() is not None


def test_without_a_loop_it_is_an_ordinary_call() -> None:
    assert where() == (threading.current_thread().name, False)


def test_where_a_loop_runs_the_call_runs_without_it_and_returns() -> None:
    async def notebook_cell() -> tuple[str, bool]:
        return where()

    thread, in_a_loop = asyncio.run(notebook_cell())

    assert thread != threading.current_thread().name
    assert not in_a_loop


@pytest.mark.parametrize("kind", ["called", "awaited"])
def test_an_error_is_raised_and_the_context_is_the_callers(kind: str) -> None:
    def refuse() -> None:
        raise InvalidInput("no such test", thing=WHO.get())

    async def cell() -> None:
        WHO.set("Ada")
        if kind == "called":
            outside_of_loops(refuse)()
        else:
            await async_twin(refuse)()

    with pytest.raises(InvalidInput, match="Ada: no such test"):
        asyncio.run(cell())


def test_a_twin_leaves_the_loop_to_others() -> None:
    seen: list[str] = []

    def slow() -> str:
        while len(seen) < 3:
            time.sleep(0.01)
        return "done"

    async def cell() -> str:
        waiting = asyncio.create_task(async_twin(slow)())
        while not waiting.done():
            await asyncio.sleep(0.01)
            seen.append("tick")
        return await waiting

    assert asyncio.run(cell()) == "done"


class Night:
    """Waits, as a night does, until something ends it."""

    def __init__(self) -> None:
        self.begun, self.ended = threading.Event(), ""

    def __call__(self) -> None:
        self.begun.set()
        try:
            for _ in range(1000):
                raise_if_interrupted()
                time.sleep(0.01)
            self.ended = "by itself"
        except BaseException as error:
            self.ended = type(error).__name__
            raise

    def wait_out(self) -> str:
        """How it has ended, at most five seconds later."""
        over = time.monotonic() + 5
        while not self.ended and time.monotonic() < over:
            time.sleep(0.01)
        return self.ended


@pytest.fixture
def night() -> Night:
    return Night()


def in_a_loop(night: Night) -> None:
    async def cell() -> None:
        outside_of_loops(night.__call__)()

    asyncio.run(cell())


def awaited(night: Night) -> None:
    async def cell() -> None:
        await async_twin(night.__call__)()

    asyncio.run(cell())


@pytest.mark.parametrize("run", [in_a_loop, awaited])
def test_ctrl_c_ends_what_runs(night: Night, run: Callable[[Night], None]) -> None:
    def press() -> None:
        night.begun.wait(10)
        # As a terminal does it, and while the loop waits: in the instant before, a signal does not wake asyncio up.
        time.sleep(0.5)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    threading.Thread(target=press, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        run(night)

    assert night.wait_out() == "KeyboardInterrupt"


def test_a_cancelled_task_ends_what_it_awaits(night: Night) -> None:
    async def cell() -> None:
        waiting = asyncio.create_task(async_twin(night.__call__)())
        await asyncio.to_thread(night.begun.wait, 10)
        waiting.cancel()
        await asyncio.wait([waiting])
        assert waiting.cancelled()

    asyncio.run(cell())

    assert night.wait_out() == "KeyboardInterrupt"
