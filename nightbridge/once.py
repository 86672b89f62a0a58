"""Decisions that are made once, by whoever comes first, and hold for everybody: one small file each."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from nightbridge.files import create_exclusively, read_model
from nightbridge.leases import lease
from nightbridge.models import Model

M = TypeVar("M", bound=Model)


def decide_once(path: Path, kind: type[M], decide: Callable[[], M]) -> M:
    """Return the decision kept at `path`; if there is none, let `decide` make it while all others wait.

    Args:
        path: The file that keeps the decision. It is created whole, and never changed.
        kind: The decision's model.
        decide: Makes the decision. What it raises is raised here, and nothing is kept.

    Raises:
        DamagedData: The file cannot be read.
        TransientError: Somebody else has been deciding for too long.

    """
    if (found := _read(path, kind)) is not None:
        return found
    with lease(path.with_suffix(".lease")):
        if (found := _read(path, kind)) is not None:
            return found
        made = decide()
        if create_exclusively(path, made.model_dump_json(indent=2).encode() + b"\n"):
            return made
        # Our lease was broken while we decided; the first one holds.
        return _read(path, kind) or made


def _read(path: Path, kind: type[M]) -> M | None:
    return read_model(
        path,
        kind,
        what="this record of a decision cannot be read",
        advice="Remove it if nothing that depends on it was started; it is decided again",
    )
