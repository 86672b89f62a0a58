"""Files that appear whole or not at all, on local and shared file systems."""

import os
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    # The embedded cluster's commands write files and start too often to pay for pydantic's import.
    from pydantic import BaseModel


def write_atomically(path: Path, data: bytes) -> None:
    """Write `data` beside `path`, flush it to disk, then rename it into place; readers never see a part of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with temporary.open("wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_model(path: Path, model: "BaseModel") -> None:
    """Write a model as indented JSON, atomically."""
    write_atomically(path, model.model_dump_json(indent=2).encode() + b"\n")


def create_exclusively(path: Path, data: bytes) -> bool:
    """Create `path` whole with `data` unless it exists; return whether this call created it.

    A hard link is the one creation that is atomic on NFS as well and never shows a half-written file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    write_atomically(temporary, data)
    try:
        os.link(temporary, path)
    except FileExistsError:
        return False
    finally:
        temporary.unlink(missing_ok=True)
    return True


def flush_folder(folder: Path) -> None:
    """Put a folder's names on disk: the name of a new file survives a power cut only when its folder does."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
