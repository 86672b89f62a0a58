"""Flows in threads; the calls are real, what is called stands in for flows."""

import asyncio
import contextvars
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import httpx
import pytest
from prefect import flow, runtime
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import State
from prefect.exceptions import ObjectNotFound
from prefect.states import Cancelling, Completed

from nightbridge.errors import InvalidInput, RunCancelled
from nightbridge.flows.final_states import ends_plainly, result_of
from nightbridge.flows.threads import EXIT_TERMINATED, async_twin, mark_started, outside_of_loops, side_by_side
from nightbridge.processes import run
from nightbridge.tasks.context import raise_if_interrupted

# --- side by side: in order, in this flow run's context, and ended together -------------------------------------------


def test_results_come_in_the_arguments_order_whoever_ends_first() -> None:
    def call(delay: float) -> float:
        mark_started()
        time.sleep(delay)
        return delay

    assert side_by_side(call, [0.2, 0.0, 0.1], most=3) == [0.2, 0.0, 0.1]


def test_each_call_begins_only_after_the_one_before_it_has_begun() -> None:
    begun: list[int] = []

    def call(number: int) -> None:
        time.sleep(0.05 * (3 - number))  # the first would begin last if nobody waited
        begun.append(number)
        mark_started()

    side_by_side(call, range(4), most=4)

    assert begun == [0, 1, 2, 3]


def test_they_go_on_at_the_same_time() -> None:
    meeting = threading.Barrier(3, timeout=60)

    def call(_: int) -> None:
        mark_started()
        meeting.wait()

    side_by_side(call, range(3), most=3)


def test_a_call_that_never_says_that_it_has_begun_holds_nobody_up_when_it_ends() -> None:
    assert side_by_side(lambda number: number, [1, 2], most=2) == [1, 2]


def test_when_one_is_interrupted_the_others_end_and_no_further_one_starts() -> None:
    started = []

    def call(number: int) -> None:
        started.append(number)
        mark_started()
        if number == 0:
            raise KeyboardInterrupt
        while True:
            raise_if_interrupted()
            time.sleep(0.05)

    with pytest.raises(KeyboardInterrupt):
        side_by_side(call, range(20), most=2)

    assert len(started) < 20


def test_one_that_hears_nothing_is_left_behind_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nightbridge.flows.threads.GRACE_SECONDS", 0.5)
    for_ever, begun = threading.Event(), time.monotonic()

    def call(number: int) -> None:
        mark_started()
        if number == 1:
            raise KeyboardInterrupt
        for_ever.wait(120)

    with pytest.raises(KeyboardInterrupt):
        side_by_side(call, range(2), most=2)

    assert time.monotonic() - begun < 60
    for_ever.set()


def test_programs_that_the_others_wait_for_are_ended() -> None:
    def call(number: int) -> None:
        mark_started()
        if number == 1:
            raise KeyboardInterrupt
        run(["sleep", "120"], environment=os.environ, timeout=600)

    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        side_by_side(call, range(2), most=2)

    assert time.monotonic() - begun < 60


def test_what_interrupted_one_call_is_over_for_the_next() -> None:
    def call(number: int) -> int:
        raise_if_interrupted()
        return number

    def interrupted(_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        side_by_side(interrupted, [1], most=1)

    raise_if_interrupted()
    assert side_by_side(call, [1, 2], most=2) == [1, 2]


@pytest.mark.parametrize(("cause", "codes"), [(OSError("stale"), []), (KeyboardInterrupt(), [EXIT_TERMINATED])])
def test_the_process_of_a_flow_run_has_to_end_soon_when_it_is_interrupted_and_not_when_the_flow_handles_an_error(
    monkeypatch: pytest.MonkeyPatch, cause: BaseException, codes: list[int]
) -> None:
    ends: list[int] = []
    monkeypatch.setattr("nightbridge.flows.threads._has_own_process", lambda: True)
    monkeypatch.setattr("nightbridge.flows.threads.end_within", lambda _seconds, code: ends.append(code))

    def call(_: int) -> None:
        raise cause

    with pytest.raises(type(cause)):
        side_by_side(call, [1], most=1)

    assert ends == codes


# --- where an event loop runs ----------------------------------------------------------------------------------------

WHO = contextvars.ContextVar("WHO", default="nobody")


@outside_of_loops
def where() -> tuple[str, bool]:
    """The thread's name, and whether a loop runs in it."""
    return threading.current_thread().name, asyncio._get_running_loop() is not None


def test_without_a_loop_it_is_an_ordinary_call() -> None:
    assert where() == (threading.current_thread().name, False)


def test_without_a_loop_an_error_is_the_calls_own_and_no_consequence_of_another() -> None:
    @outside_of_loops
    def refuse() -> None:
        raise InvalidInput("no such test", subject="llama")

    with pytest.raises(InvalidInput, match="llama: no such test") as refused:
        refuse()

    assert refused.value.__context__ is None


def test_where_a_loop_runs_the_call_runs_without_it_and_returns() -> None:
    async def notebook_cell() -> tuple[str, bool]:
        return where()

    thread, in_a_loop = asyncio.run(notebook_cell())

    assert thread != threading.current_thread().name
    assert not in_a_loop


@pytest.mark.parametrize("kind", ["called", "awaited"])
def test_an_error_is_raised_and_the_context_is_the_callers(kind: str) -> None:
    def refuse() -> None:
        raise InvalidInput("no such test", subject=WHO.get())

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


def test_a_notebooks_interrupt_ends_what_is_awaited_though_it_does_not_wake_up_the_loop(night: Night) -> None:
    async def cell() -> None:
        loop, waiting = asyncio.get_running_loop(), asyncio.create_task(async_twin(night.__call__)())
        # As ipykernel does it: a plain handler, so that select() goes on waiting after the signal.
        before = signal.signal(signal.SIGINT, lambda *_: loop.call_soon(waiting.cancel))
        press = threading.Timer(0.5, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
        press.start()
        try:
            await asyncio.wait([waiting])
        finally:
            signal.signal(signal.SIGINT, before)
        assert waiting.cancelled()

    asyncio.run(cell())

    assert night.wait_out() == "KeyboardInterrupt"


def test_a_cancelled_task_leaves_the_programs_of_others_alone_and_starts_none(tmp_path: Path) -> None:
    codes: dict[str, int] = {}
    go_on = threading.Event()

    def program(name: str, seconds: int) -> None:
        script = f"touch {tmp_path}/{name}; sleep {seconds}"
        codes[name] = run(["sh", "-c", script], environment=os.environ, timeout=600).code

    def left_behind() -> None:
        program("cancelled", 600)
        go_on.wait(60)
        program("later", 600)

    async def cell() -> None:
        calls = [async_twin(left_behind)(), async_twin(program)("other", 2)]
        cancelled, other = (asyncio.create_task(call) for call in calls)
        while not {"cancelled", "other"} <= {path.name for path in tmp_path.iterdir()}:
            await asyncio.sleep(0.01)
        cancelled.cancel()
        await asyncio.wait([cancelled, other])

    asyncio.run(cell())
    go_on.set()
    over = time.monotonic() + 60
    while "later" not in codes and time.monotonic() < over:
        time.sleep(0.01)

    assert codes == {"cancelled": -signal.SIGKILL, "later": -signal.SIGKILL, "other": 0}


# --- cancelled where no worker is: nights of this kind are in test_cancel.py ------------------------------------------


def cancel(flow_run: str | None) -> None:
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(flow_run, Cancelling())  # type: ignore[arg-type]  # takes a text, too


@pytest.mark.usefixtures("flows_here")
@pytest.mark.parametrize("caller", ["inner", "middle", "outer"])
def test_it_hears_of_it_from_whichever_flow_around_it_is_cancelled(
    monkeypatch: pytest.MonkeyPatch, caller: str
) -> None:
    monkeypatch.setattr("nightbridge.flows.threads.CANCELLED_SECONDS", 0.2)
    callers: dict[str, str | None] = {}
    ends: list[str | None] = []

    @flow
    @ends_plainly
    def night() -> State[int]:
        cancel(callers[caller])
        end = time.monotonic() + 20
        while time.monotonic() < end:
            raise_if_interrupted()
            time.sleep(0.1)
        return Completed(data=1)

    @flow
    def inner() -> None:
        callers["inner"] = runtime.flow_run.id
        ends.append(night(return_state=True).name)

    @flow
    def middle() -> None:
        callers["middle"] = runtime.flow_run.id
        inner(return_state=True)

    @flow
    def outer() -> None:
        callers["outer"] = runtime.flow_run.id
        middle(return_state=True)

    outer(return_state=True)

    assert ends == ["Cancelled"]


@pytest.mark.usefixtures("flows_here")
def test_it_hears_of_its_own_where_the_flow_around_it_was_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nightbridge.flows.threads.CANCELLED_SECONDS", 0.2)
    unheard: list[bool] = []

    @flow
    @ends_plainly
    def night() -> State[int]:
        cancel(runtime.flow_run.id)
        end = time.monotonic() + 20
        while time.monotonic() < end:
            raise_if_interrupted()
            time.sleep(0.1)
        unheard.append(True)
        return Completed(data=1)

    @flow
    def outer() -> None:
        gone = httpx.Response(404, request=httpx.Request("GET", "http://prefect/task_runs"))
        failure = httpx.HTTPStatusError("404", request=gone.request, response=gone)
        monkeypatch.setattr(SyncPrefectClient, "read_task_run", mock.Mock(side_effect=ObjectNotFound(failure)))
        assert night(return_state=True).name == "Cancelled"

    outer()

    assert not unheard


@pytest.mark.usefixtures("flows_here")
def test_one_that_ends_before_it_has_looked_is_cancelled_all_the_same() -> None:
    @flow
    @ends_plainly
    def night() -> State[int]:
        cancel(runtime.flow_run.id)
        return Completed(data=1)

    with pytest.raises(RunCancelled, match="a person cancelled it"):
        result_of(night(return_state=True))
