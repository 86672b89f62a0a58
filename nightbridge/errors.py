"""The error tree: what happened, to which thing, and what a person can do about it.

    NightbridgeError
    ├── TransientError          trying the same thing again may work (network, controller down, lock held)
    │   └── StatusUnknown       nobody answered about a job; it has neither failed nor ended
    └── PermanentError          trying again gives the same result
        ├── InvalidInput        what the person wrote is wrong; nothing was started
        ├── LaunchRefused       Slurm or the launcher refused the job for good
        └── DamagedData         something that was written is not what it should be

A stage's retry policy looks at `TransientError` only (see `tasks/stage.py`); everything else ends the stage at once.
"""

from collections.abc import Sequence


class NightbridgeError(Exception):
    """Base of every error that nightbridge raises on purpose.

    Args:
        what: What happened, one clause without a final stop.
        thing: The file, repository, job or object that it happened to.
        advice: What the person can do about it; empty where nothing can be advised.

    """

    def __init__(self, what: str, *, thing: str = "", advice: str = "") -> None:
        super().__init__(what, thing, advice)
        self.what = what
        self.thing = thing
        self.advice = advice

    def __reduce__(self) -> tuple[object, ...]:
        # Prefect pickles exceptions between processes; keyword-only arguments need a hand.
        return (_rebuild, (type(self), self.what, self.thing, self.advice), vars(self))

    @property
    def happened(self) -> str:
        """What happened to which thing, without the advice."""
        return f"{self.thing}: {self.what}" if self.thing else self.what

    def __str__(self) -> str:
        return f"{self.happened}. {self.advice}" if self.advice else self.happened


def _rebuild(kind: type[NightbridgeError], what: str, thing: str, advice: str) -> NightbridgeError:
    return kind(what, thing=thing, advice=advice)


class TransientError(NightbridgeError):
    """Trying the same thing again may work."""


class StatusUnknown(TransientError):
    """Nobody answered about a job. Unknown is not failed: ask again."""


class PermanentError(NightbridgeError):
    """Trying again gives the same result; a person has to change something."""


class InvalidInput(PermanentError):
    """What the person wrote is wrong: exit code 2, nothing started, nothing left half done.

    Args:
        what: The summary, or the only violation.
        thing: The file or option.
        advice: The way out.
        violations: Every violation found, one line each, not only the first.

    """

    def __init__(self, what: str, *, thing: str = "", advice: str = "", violations: Sequence[str] = ()) -> None:
        super().__init__(what, thing=thing, advice=advice)
        self.violations = tuple(violations)

    def __str__(self) -> str:
        return "\n".join((super().__str__(), *(f"  {violation}" for violation in self.violations)))


class LaunchRefused(PermanentError):
    """Slurm or the launcher refused the job for good (account, partition, QOS, a bad flag)."""


class DamagedData(PermanentError):
    """Something that was written is not what it should be: a checksum, a manifest, a half-written file."""
