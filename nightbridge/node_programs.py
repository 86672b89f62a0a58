"""Programs of this package on a compute node: how they start there, and how they report their result.

The nodes see the shared file system, and on it the Python that runs here. How a program gets onto a node is the
caller's (`slurm.node_command` is how); the response is the last line of its stdout that has a "failure", as JSON.
"""

import logging
import signal
import sys
from collections.abc import Callable
from typing import Protocol, TypeVar

from pydantic import ValidationError

from nightbridge.errors import (
    DamagedData,
    InvalidInput,
    LaunchRefused,
    NightbridgeError,
    PermanentError,
    TransientError,
)
from nightbridge.masking import mask_text
from nightbridge.models import Model
from nightbridge.processes import Finished

# The exit code of a shell or srun for a program that was killed: 128 and the signal's number.
_FIRST_KILLED_CODE = 129
_TERMINATED = 128 + signal.SIGTERM

_KINDS: dict[str, type[NightbridgeError]] = {
    kind.__name__: kind for kind in (TransientError, PermanentError, InvalidInput, LaunchRefused, DamagedData)
}


class RunOnNode(Protocol):
    """Runs a program once on a compute node and waits for its end; the cluster's own failures are raised."""

    def __call__(
        self,
        name: str,
        argv: list[str],
        *,
        environment: dict[str, str],
        timeout: float,
        given: bytes,
        on_line: Callable[[str], None],
    ) -> Finished:
        """Run `argv` as the job `name`; `given` is its stdin, `on_line` gets each line of its stderr."""


class SerializedError(Model):
    """An error that crosses from one process to another. `kind` is the name of its class, or of the nearest known."""

    kind: str
    what: str
    subject: str = ""
    advice: str = ""

    @classmethod
    def of(cls, error: NightbridgeError, secrets: tuple[str, ...] = ()) -> "SerializedError":
        """The data of an error, without the values of secrets."""
        kind = next(parent.__name__ for parent in type(error).__mro__ if parent.__name__ in _KINDS)
        what, subject, advice = (mask_text(text, secrets) for text in (error.what, error.subject, error.advice))
        return cls(kind=kind, what=what, subject=subject, advice=advice)

    def error(self) -> NightbridgeError:
        """The error of the data."""
        return _KINDS[self.kind](self.what, subject=self.subject, advice=self.advice)


class NodeResponse(Model):
    """How a program on a node ended."""

    failure: SerializedError | None = None


_Response = TypeVar("_Response", bound=NodeResponse)


def begin_on_node() -> None:
    """Set up this process as such a program: logs go to stderr, and a cancelled job cleans up as it ends."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(_TERMINATED))


def read_response(
    finished: Finished, response: type[_Response], *, doing: str, subject: str, instead: str
) -> _Response:
    """The response of a program on a node.

    `doing` is what it was to do, as a noun; `instead` the setting by which this host does it.

    Raises:
        TransientError: It was killed before it could answer.
        PermanentError: It could not start.
        NightbridgeError: It failed.
    """
    # A site's SrunProlog and SrunEpilog write there as well.
    lines = [line for line in finished.stdout.decode(errors="replace").splitlines() if '"failure"' in line]
    try:
        given = response.model_validate_json(lines[-1])
    except (IndexError, ValidationError):
        how = f"code {finished.code}: {finished.tail or 'no output'}"
    else:
        if given.failure:
            raise given.failure.error()
        return given
    if finished.code == 0 or finished.code >= _FIRST_KILLED_CODE:
        raise TransientError(
            f"the {doing} on a compute node was killed ({how})",
            subject=subject,
            advice="Will retry; if it ran out of memory or time, raise the limits with srun_args",
        )
    raise PermanentError(
        f"a compute node could not start the {doing} ({how})",
        subject=subject,
        advice=f"The nodes must see {sys.executable} under the same path; or set {instead}. "
        "Where nightbridge was upgraded during the night, Retry the flow run: it resumes the jobs that ran",
    )
