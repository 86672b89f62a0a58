"""What every stage has in common: when it is retried, what it waits out, and under which key its result is kept.

A store, its credentials or a cluster's queue may be unavailable for hours. Giving up gains nothing: the job is there or
may still come, and its output is on disk. Prefect's own retries would wait in a sleep that no interrupt ends, and show
only how often they tried.
"""

import functools
import hashlib
import inspect
import os
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from prefect import Task
from prefect.client.schemas.objects import State, TaskRun
from prefect.context import TagsContext, TaskRunContext
from prefect.tasks import exponential_backoff

from nightbridge.errors import InvalidInput, TransientError
from nightbridge.files import PASSING
from nightbridge.slurm.attempt_files import note_waiting
from nightbridge.tasks.context import PATIENCE, raise_if_interrupted, wait_out

P = ParamSpec("P")
R = TypeVar("R")

RETRIES = 5
FIRST_DELAY_SECONDS = 10.0
DELAY_VARIABLE = "NIGHTBRIDGE_RETRY_DELAY"
"""Environment variable: seconds before a stage's first retry, `FIRST_DELAY_SECONDS` when unset. Each further delay is
twice the one before, so the default waits about five minutes in all before it gives up."""


def first_delay() -> float:
    """Seconds before the first retry.

    Raises:
        InvalidInput: The environment variable is no number of seconds.
    """
    text = os.environ.get(DELAY_VARIABLE, "")
    try:
        seconds = float(text or FIRST_DELAY_SECONDS)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= 3600:
        raise InvalidInput(
            "not a number of seconds", subject=f"{DELAY_VARIABLE}={text}", advice="Give 0 to 3600, or unset it"
        )
    return seconds


class Stage(Task[P, R]):
    """A Prefect task without the tags of its flow run.

    Before each task run Prefect asks its server for a slot of the limits of its tags, though there are none: a third of
    a night's requests, and one that a busy server refuses (503) ends the flow run.
    """

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Any:  # type: ignore[override]  # takes no option of a call
        """Run the stage; raise its error."""
        with TagsContext(current_tags=set()):
            return super().__call__(*args, **kwargs)


def is_transient(task: Task[..., Any], task_run: TaskRun, state: State[Any]) -> bool:
    """Retry condition of every stage: only an error that may pass is worth another try."""
    return isinstance(state.result(raise_on_failure=False), TransientError)


def stage_key(context: TaskRunContext, parameters: dict[str, Any]) -> str:
    """Key of a stage's result: the flow run, the stage, the run and attempt it worked on, and the result's type.

    Prefect's own default also hashes the task's source, so a hot fix between a crash and the retry would run every
    stage again. Ours does not. The flow run's id keeps results from being reused by another night. The type is named
    in the result: of one that an upgrade has moved to another module, Prefect would return the JSON as it is.
    """
    subject, task = _subject_of(parameters), context.task
    attempt = parameters.get("attempt", getattr(subject, "attempt", 0))
    kind = hashlib.sha256(str(inspect.signature(task.fn).return_annotation).encode()).hexdigest()[:8]
    return f"{context.task_run.flow_run_id}-{task.name}-{getattr(subject, 'run_key', 'night')}-a{attempt}-{kind}"


def _subject_of(parameters: dict[str, Any]) -> Any:
    """The plan or the run that a stage works on; None for a stage of the whole night."""
    record = parameters.get("record")
    return record.plan if record else parameters.get("plan") or parameters.get("run")


def _note_of(parameters: dict[str, Any]) -> Callable[[str | None], None]:
    """Notes in the run's folder what its stage waits for; a stage of the whole night has none."""
    run_key, site = getattr(_subject_of(parameters), "run_key", None), parameters.get("site")
    return functools.partial(note_waiting, run_key, site.workspace) if run_key and site else lambda what: None


def _tried(call: Callable[[], R]) -> R:
    """Call; the error of a file system that is away for a moment is one that may pass, like that of any service."""
    try:
        return call()
    except OSError as error:
        if error.errno not in PASSING:
            raise
        what = error.strerror or type(error).__name__
        raise TransientError(what, subject=str(error.filename or ""), advice="Will retry") from error


def patiently(call: Callable[[], R]) -> R:
    """Call outside of any stage, and wait for what is away for as long as a stage and its retries do."""
    return wait_out(call, (TransientError,), first_delay=first_delay(), patience=PATIENCE * (RETRIES + 1))


def never_reused(context: TaskRunContext, parameters: dict[str, Any]) -> None:
    """Key of a stage that is run again by a retried night."""


def stage(
    name: str,
    *,
    waits_for: tuple[type[TransientError], ...] = (),
    key: Callable[[TaskRunContext, dict[str, Any]], str | None] = stage_key,
) -> Callable[[Callable[P, R]], Task[P, R]]:
    """Make a function a stage: persisted as JSON, retried with backoff and jitter for transient errors only.

    Args:
        name: The stage's name.
        waits_for: Errors that may last for hours and are waited out in each try (see `wait_out`).
        key: Under which key its result is found again after a restart.
    """

    def decorate(function: Callable[P, R]) -> Task[P, R]:
        parameters = inspect.signature(function)

        @functools.wraps(function)
        def unless_interrupted(*arguments: P.args, **named: P.kwargs) -> R:
            raise_if_interrupted()
            note = _note_of(parameters.bind(*arguments, **named).arguments)
            return wait_out(
                lambda: _tried(lambda: function(*arguments, **named)), waits_for, first_delay=first_delay(), note=note
            )

        return Stage(
            unless_interrupted,
            name=name,
            task_run_name=name,
            retries=RETRIES,
            retry_delay_seconds=exponential_backoff(first_delay()),
            retry_jitter_factor=0.5,
            retry_condition_fn=is_transient,
            persist_result=True,
            result_serializer="json",
            cache_key_fn=key,
        )

    return decorate
