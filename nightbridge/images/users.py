"""Which workspaces use a folder of images: several may share one, and each knows its own jobs only."""

import hashlib
from pathlib import Path

from nightbridge.errors import PermanentError
from nightbridge.files import write_model
from nightbridge.models import Model

# Beside the images, where everybody who shares them can write.
_PREFIX = ".workspace-"


class User(Model):
    """A workspace whose runs have images in a folder outside it."""

    workspace: Path


def note_user(images: Path, workspace: Path) -> None:
    """Leave word in a folder of images that a workspace uses it; the workspace's own folder needs none."""
    user = User(workspace=workspace.absolute())
    path = images / f"{_PREFIX}{hashlib.sha256(str(user.workspace).encode()).hexdigest()[:16]}.json"
    if not images.is_relative_to(user.workspace) and not path.exists():
        write_model(path, user)


def noted_users(images: Path) -> set[Path]:
    """The workspaces that use a folder of images besides the one that it lies in.

    Raises:
        PermanentError: One cannot be read, so nobody knows whose jobs use these images.

    """
    try:
        notes = images.glob(f"{_PREFIX}*.json")
        return {User.model_validate_json(path.read_bytes()).workspace for path in notes}
    except (OSError, ValueError) as error:
        raise PermanentError(
            f"which workspaces use these images cannot be read: {error}",
            thing=str(images),
            advice=f"Remove the {_PREFIX}*.json there that cannot be read; that workspace's next pull writes it again",
        ) from error
