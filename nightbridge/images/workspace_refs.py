"""Which workspaces use a folder of images: several may share one, and each knows its own jobs only."""

import hashlib
from pathlib import Path

from nightbridge.errors import PermanentError
from nightbridge.files import write_model
from nightbridge.models import Model

# Beside the images, where every user of the folder can write.
_PREFIX = ".workspace-"


class WorkspaceRef(Model):
    """A workspace whose runs use images in a folder outside it."""

    workspace: Path


def add_workspace_ref(images: Path, workspace: Path) -> None:
    """Record in a folder of images that a workspace uses it; the workspace's own folder needs no record."""
    ref = WorkspaceRef(workspace=workspace.absolute())
    path = images / f"{_PREFIX}{hashlib.sha256(str(ref.workspace).encode()).hexdigest()[:16]}.json"
    if not images.is_relative_to(ref.workspace) and not path.exists():
        write_model(path, ref)


def workspace_refs(images: Path) -> set[Path]:
    """The workspaces that use a folder of images besides the one that it lies in.

    Raises:
        PermanentError: A record cannot be read, so the jobs that use these images are unknown.

    """
    try:
        records = images.glob(f"{_PREFIX}*.json")
        return {WorkspaceRef.model_validate_json(path.read_bytes()).workspace for path in records}
    except (OSError, ValueError) as error:
        raise PermanentError(
            f"cannot read which workspaces use these images: {error}",
            thing=str(images),
            advice=f"Remove the unreadable {_PREFIX}*.json there; the workspace's next pull writes it again",
        ) from error
