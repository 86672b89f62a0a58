"""The workspace: the one folder that everything of ours lies in, and that the compute nodes must see."""

from pathlib import Path

from nightbridge.files import check_writable


def check_workspace(workspace: Path) -> None:
    """Make the workspace if it is not there, and check that files can be written in it.

    Raises:
        PermanentError: They cannot.
        TransientError: They cannot now.
    """
    check_writable(
        workspace,
        what="the workspace",
        advice="Choose another folder with --workspace, or get write access to this one",
    )
