"""The error tree: what happened, to what, and how to fix it.

    NightbridgeError
    ├── TransientError          a retry may succeed (network, controller down, lock held)
    │   └── StatusUnknown       no source could report a job's state; it is unknown, not failed
    └── PermanentError          a retry gives the same result
        ├── InvalidInput        the user's input is wrong; nothing was started
        ├── AccessRefused       a repository does not let us in
        ├── LaunchRefused       Slurm or the launcher refused the job for good
        ├── RunCancelled        a person cancelled the flow run in Prefect
        └── DamagedData         something that was written is not what it should be

A stage retries after a `TransientError` only (see `tasks/stage.py`); every other error ends it at once.

`ErrorPattern` and `classify` turn the error messages of other programs into these. Each program's table of patterns
stands beside the code that runs it.
"""

import re
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple


class NightbridgeError(Exception):
    """Base of every error that nightbridge raises on purpose.

    Args:
        what: What happened, one clause without a final stop.
        subject: The file, repository, job or object that it happened to.
        advice: How the user can fix it; empty where nothing can be advised.
    """

    def __init__(self, what: str, *, subject: str = "", advice: str = "") -> None:
        super().__init__(what, subject, advice)
        self.what = what
        self.subject = subject
        self.advice = advice

    def __reduce__(self) -> tuple[object, ...]:
        # Prefect pickles exceptions between processes; keyword-only arguments need a hand.
        return partial(type(self), self.what, subject=self.subject, advice=self.advice), (), vars(self)

    @property
    def happened(self) -> str:
        """What happened to what, without the advice."""
        return f"{self.subject}: {self.what}" if self.subject else self.what

    def __str__(self) -> str:
        stop = "" if self.happened.endswith("?") else "."
        return f"{self.happened}{stop} {self.advice}" if self.advice else self.happened


class TransientError(NightbridgeError):
    """A retry may succeed."""


class StatusUnknown(TransientError):
    """No source could report a job's state. Unknown is not failed: query again."""


class PermanentError(NightbridgeError):
    """A retry gives the same result; the user has to change something."""


class InvalidInput(PermanentError):
    """The user's input is wrong: exit code 2, nothing started, nothing left half done.

    Args:
        what: The summary, or the only violation.
        subject: The file or option.
        advice: The way out; to fix the violations where there are some.
        violations: Every violation found, not only the first; the `str` of each is one line.
    """

    def __init__(self, what: str, *, subject: str = "", advice: str = "", violations: Sequence[Any] = ()) -> None:
        super().__init__(what, subject=subject, advice=advice or ("Fix the following" if violations else ""))
        self.violations = tuple(violations)

    def __str__(self) -> str:
        return "\n".join((super().__str__(), *(f"  {violation}" for violation in self.violations)))


class AccessRefused(PermanentError):
    """A repository does not let us in (login, host key, certificate): that says nothing about what lies here."""


class LaunchRefused(PermanentError):
    """Slurm or the launcher refused the job for good (account, partition, QOS, a bad flag)."""


class RunCancelled(PermanentError):
    """A person cancelled the flow run in Prefect; its jobs are cancelled, too."""


class DamagedData(PermanentError):
    """Something that was written is not what it should be: a checksum, a manifest, a half-written file."""


class ErrorPattern(NamedTuple):
    """A message of another program, and the error that it stands for.

    Args:
        pattern: Regular expression that occurs in the message.
        kind: The error.
        what: What happened, one clause.
        advice: How the user can fix it; `{name}` is filled in from the fields given to `error`.
    """

    pattern: str
    kind: type[NightbridgeError]
    what: str
    advice: str = ""

    def error(self, subject: str, detail: str, **fields: str) -> NightbridgeError:
        """Build the error about `subject`, with the program's own words as `detail`."""
        what = f"{self.what} ({detail})" if detail else self.what
        return self.kind(what, subject=subject, advice=self.advice.format(**fields) if fields else self.advice)


def classify(message: str, patterns: Iterable[ErrorPattern]) -> ErrorPattern | None:
    """Return the first pattern that occurs in a message; None when no pattern does."""
    return next((known for known in patterns if re.search(known.pattern, message)), None)
