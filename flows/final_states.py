"""Final states of flow runs: their type and name show the night's result, so that a bad night is never green."""

import functools
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

from prefect.client.schemas.objects import State
from prefect.context import FlowRunContext
from prefect.states import Cancelled, Completed, Failed

from nightbridge.errors import InvalidInput, NightbridgeError, RunCancelled
from nightbridge.flows.threads import heeds_cancellation
from nightbridge.models import Model, NightReport, Verdict, VerdictStatus, worst_status
from nightbridge.tasks.context import CancelledByPerson, raise_if_interrupted, run_log

P = ParamSpec("P")
R = TypeVar("R")

TAG = "nightbridge"
"""Tag of every flow run of ours, by which automations know them."""


class BadEnd(Exception):
    """What Prefect raises for the result of a run that did its work and ended badly.

    Prefect wants an exception with a Failed state: with anything else a worker's log, and `state.result()`, end in a
    TypeError about it instead of the verdict.

    Args:
        message: The verdict, or the tests that ended badly.
        returned: What the flow returned.
    """

    def __init__(self, message: str, returned: Verdict | NightReport) -> None:
        super().__init__(message, returned)
        self.message = message
        self.returned = returned

    def __str__(self) -> str:
        return self.message


_TASK_RUNS = "prefect.task_runs"


class _PlainErrors(logging.Filter):
    """Lets an error of ours speak for itself where Prefect logs "unexpected exception" and a traceback.

    Prefect does so when a stage's retries are used up, and at the end of every flow run of a deployment that did not
    end in Completed, whoever chose that end. A defect keeps its traceback.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, BadEnd | NightbridgeError):
            record.exc_info = None
            if record.name != _TASK_RUNS:
                record.msg, record.args = str(error), ()
        return True


_LOGGERS = (_TASK_RUNS, "prefect.flow_runs", "prefect.engine")
_PLAIN_ERRORS = _PlainErrors()


def ends_plainly(call: Callable[P, State[R]]) -> Callable[P, State[R]]:
    """Let a flow that raises an error of ours, and so has no report, end as Failed; its result is the error.

    Prefect logs the end of a flow run after the flow has returned, so such errors are logged without a traceback until
    the process ends, which a worker has started for this flow run alone; the Python API takes it back (`plain_errors`).

    One that a person cancels, and that has no worker which would end it, ends as Cancelled.
    """

    @functools.wraps(call)
    def run(*arguments: P.args, **named: P.kwargs) -> State[R]:
        _log_errors_plainly()
        try:
            with heeds_cancellation():
                return call(*arguments, **named)
        except CancelledByPerson:
            return _cancelled()
        except NightbridgeError as error:
            run_log().error("%s", error, extra={"ends_flow": True})  # who called it as a function says it, too
            status = VerdictStatus.INVALID if isinstance(error, InvalidInput) else VerdictStatus.INFRASTRUCTURE
            return Failed(name=_title(status), message=str(error), data=error)

    return run


def _cancelled() -> State[Any]:
    """The end of a flow run that a person cancelled, after its hooks: Prefect calls them where it ends one itself."""
    context = FlowRunContext.get()
    assert context is not None
    assert context.flow is not None
    assert context.flow_run is not None
    run_log().warning("a person cancelled this flow run")
    state: State[Any] = Cancelled(message="A person cancelled it")
    for hook in context.flow.on_cancellation_hooks:
        try:
            hook(context.flow, context.flow_run, state)
        except Exception as error:  # the reaper repeats what is not recorded as done
            run_log().error("its jobs may live: %s", error)
    return state


def _log_errors_plainly() -> None:
    for name in _LOGGERS:
        logging.getLogger(name).addFilter(_PLAIN_ERRORS)  # once, however often it is added


@contextmanager
def plain_errors() -> Iterator[None]:
    """Log errors of ours without a traceback within the block."""
    _log_errors_plainly()
    try:
        yield
    finally:
        for name in _LOGGERS:
            logging.getLogger(name).removeFilter(_PLAIN_ERRORS)


def state_of_verdict(verdict: Verdict) -> State[Any]:
    """Completed for good verdicts, Failed for the rest; named after the verdict."""
    name, message = _title(verdict.status), "; ".join(verdict.reasons)
    if verdict.exit_code == 0:
        return Completed(name=name, message=message or None, data=verdict)
    end = BadEnd(f"{verdict.test_id}: {verdict.status}: {message}", verdict)
    return Failed(name=name, message=message or None, data=end)


def state_of_night(report: NightReport) -> State[Any]:
    """Completed when every verdict is good, else Failed; named after the worst, with the tests it befell."""
    name = _title(worst_status(verdict.status for verdict in report.verdicts))
    bad = [f"{verdict.test_id}: {verdict.status}" for verdict in report.verdicts if verdict.exit_code]
    again = " (found again)" if report.found_again else ""
    if not bad:
        counts = Counter(verdict.status.replace("_", " ") for verdict in report.verdicts)
        said = ", ".join(f"{count} {status}" for status, count in counts.items())
        return Completed(name=f"{name}{again}", message=f"{len(report.verdicts)} test(s): {said}", data=report)
    message = ", ".join(bad)
    return Failed(name=f"{name}{again}", message=message, data=BadEnd(message, report))


def result_of(state: State[Any]) -> Any:
    """What a flow returned, also when it ended in a Failed state that it chose itself.

    A state that came back from Prefect's server holds only where its result is kept. That is what a flow ends with,
    too, when the server's answer to its last state was lost and the state was sent again.

    Raises:
        RunCancelled: A person cancelled it.
        CancelledByPerson: The flow run around it is cancelled.
        Exception: What the flow died of, when it did not choose its end.
    """
    # Cancelling where it ended by itself before it heard of it: Prefect takes no other end then.
    if state.is_cancelled() or state.is_cancelling():
        raise_if_interrupted()
        flow_run, advice = state.state_details.flow_run_id, "`nightbridge status` shows what became of its jobs"
        raise RunCancelled("a person cancelled it in Prefect", subject=f"flow run {flow_run}", advice=advice)
    # Called from an async flow, Prefect would return a coroutine.
    returned = state.result(raise_on_failure=False, _sync=True)  # type: ignore[call-overload]
    if isinstance(returned, BadEnd):
        return returned.returned
    if isinstance(returned, Model):
        return returned
    return state.result(_sync=True)  # type: ignore[call-overload]


def _title(status: VerdictStatus) -> str:
    if status is VerdictStatus.FAILED:
        return "RunFailed"  # Failed is Prefect's own name, for a defect, and an automation reports that
    return status.value.replace("_", " ").title().replace(" ", "")
