"""Which commit a ref means tonight: decided once per night, the same for all its runs and after a restart."""

import hashlib
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from pydantic import Field

from nightbridge.locking import get_or_create
from nightbridge.models import Model, utc_now
from nightbridge.repos.mirrors import Mirror
from nightbridge.repos.urls import masked


class Pin(Model):
    """The commit that a ref resolved to when the night first needed it."""

    url: str
    ref: str
    commit: str
    resolved_at: datetime
    previous: str | None = Field(None, description="The commit that it resolved to in the latest other night.")


def pin(mirror: Mirror, ref: str, night: str, workspace: Path) -> str:
    """Return the full commit of a ref for a night; see `pinned`."""
    return pinned(mirror, ref, night, workspace).commit


def pinned(mirror: Mirror, ref: str, night: str, workspace: Path) -> Pin:
    """Return the commit of a ref for a night; resolve it on the night's first call.

    Each pin is a file of its own, `nights/<night>/pins/<name>-<hash>.json`, so that many processes have no common
    file to rewrite.

    Raises:
        InvalidInput: No such repository or ref.
        PermanentError: The repository refuses us.
        TransientError: The repository cannot be reached.
        DamagedData: The pin cannot be read.

    """
    identity = hashlib.sha256(f"{mirror.url}\n{ref}".encode()).hexdigest()[:16]
    path = workspace.absolute() / "nights" / night / "pins" / f"{mirror.name}-{identity}.json"
    return get_or_create(
        path,
        Pin,
        lambda: Pin(
            url=masked(mirror.url),
            ref=ref,
            commit=mirror.resolve(ref),
            resolved_at=utc_now(),
            previous=_previous(path),
        ),
    )


def _previous(path: Path) -> str | None:
    """The commit of the newest pin of the same ref that another night has."""
    found = []
    for other in path.parents[2].glob(f"*/pins/{path.name}"):
        with suppress(OSError, ValueError):  # A damaged pin is reported when its own night reads it.
            found.append(Pin.model_validate_json(other.read_bytes()))
    return max(found, key=lambda pin: pin.resolved_at).commit if found else None
