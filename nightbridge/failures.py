"""Errors as data: what a program of ours says of its failure elsewhere, and the error that it becomes here."""

from nightbridge.errors import (
    DamagedData,
    InvalidInput,
    LaunchRefused,
    NightbridgeError,
    PermanentError,
    TransientError,
)
from nightbridge.models import Model
from nightbridge.secrets import mask_secrets

_KINDS: dict[str, type[NightbridgeError]] = {
    kind.__name__: kind for kind in (TransientError, PermanentError, InvalidInput, LaunchRefused, DamagedData)
}


class Failure(Model):
    """An error that crosses from one process to another. `kind` is the name of its class, or of the nearest known."""

    kind: str
    what: str
    thing: str = ""
    advice: str = ""

    @classmethod
    def of(cls, error: NightbridgeError, secrets: tuple[str, ...] = ()) -> "Failure":
        """The data of an error, without the values of secrets."""
        kind = next(parent.__name__ for parent in type(error).__mro__ if parent.__name__ in _KINDS)
        what, thing, advice = (mask_secrets(text, secrets) for text in (error.what, error.thing, error.advice))
        return cls(kind=kind, what=what, thing=thing, advice=advice)

    def error(self) -> NightbridgeError:
        """The error of the data."""
        return _KINDS[self.kind](self.what, thing=self.thing, advice=self.advice)
