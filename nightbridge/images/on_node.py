"""Import on a compute node, for sites whose login nodes have neither enroot nor the room.

The tag is resolved here, by the registry's own API. The import is one job that runs this package on the node: the same
code as on this machine, with the tools, the folders and the space that the node has. It leaves its file on the shared
file system, where it is checked like any other. How a program gets onto a node is the caller's: this package knows no
Slurm.
"""

import logging
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from pydantic import SecretStr, ValidationError

from nightbridge.errors import NightbridgeError, PermanentError, TransientError
from nightbridge.images.enroot import IMPORT_TIMEOUT_SECONDS
from nightbridge.images.node_import import NodeAnswer, NodeOrder
from nightbridge.images.references import ImageReference
from nightbridge.images.registry import registry_digest
from nightbridge.images.work import work_name
from nightbridge.models import ImageImport
from nightbridge.processes import Finished

log = logging.getLogger(__name__)

# The digits of a digest that a job's name shows: enough to tell the images of one folder apart.
_DIGITS = 16
# What a shell and srun say of a program that was killed: 128 and the signal's number.
_FIRST_KILLED_CODE = 129
# enroot's own variables, those by which it and the standard tools find proxies and certificates, and the folders of a
# user in which they look for logins.
_PASSED_ON = re.compile(
    r"ENROOT_\w+|(https?|no|all)_proxy|SSL_CERT_\w+|SOURCE_DATE_EPOCH|XDG_\w+_HOME|REGISTRY_AUTH_FILE|DOCKER_CONFIG",
    re.IGNORECASE,
)


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
        """Run `argv` as the job `name`."""


class NodeImporter:
    """Imports by a job on a compute node.

    Args:
        run_on_node: How a program gets there.
        settings: Folders of imports, as the nodes know them.
        credentials: Logins as lines of netrc(5).

    """

    tool = "a job on a compute node"
    work_folders: tuple[Path, ...] = ()

    def __init__(self, run_on_node: RunOnNode, settings: ImageImport, credentials: str = "") -> None:
        self._run_on_node = run_on_node
        self._settings = settings.model_copy(update={"credentials": None})
        self._credentials = SecretStr(credentials)

    def digest(self, reference: ImageReference) -> str:
        """The digest that a reference means now; see `registry_digest`. No job is needed for that."""
        return registry_digest(reference, self._credentials.get_secret_value())

    def import_image(self, reference: ImageReference, output: Path) -> str:
        """Import an image of known digest into a file that does not exist yet; return what made it, and on which node.

        What a failed import left is removed.

        Raises:
            InvalidInput: There is no such image.
            LaunchRefused: The cluster refused the job for good.
            PermanentError: The registry refuses us, a disk is or would be full, or the node has no tool or no Python.
            TransientError: The registry cannot be reached or is busy, or the cluster did not let the import end.

        """
        order = NodeOrder(reference=reference, output=output, settings=self._settings)
        try:
            finished = self._run_on_node(
                # The folder's own part keeps apart the jobs of several workspaces that import the same image.
                work_name(output).partition(".")[0] + f"-{str(reference.digest).removeprefix('sha256:')[:_DIGITS]}",
                [*_program(), order.model_dump_json()],
                environment={name: value for name, value in os.environ.items() if _PASSED_ON.fullmatch(name)},
                timeout=IMPORT_TIMEOUT_SECONDS,
                given=self._credentials.get_secret_value().encode(),
                on_line=lambda line: log.info("%s", line),
            )
            answer = _answer_of(finished, reference)
            if error := answer.error():
                raise error
        except BaseException:
            output.unlink(missing_ok=True)
            raise
        if not output.exists():
            raise TransientError(
                "the image that a compute node made is not to be seen here",
                thing=str(output),
                advice="The images' folder must be on a file system that the nodes share",
            )
        return answer.tool


def _program() -> list[str]:
    """The Python that runs here, which the nodes see under the same path, and what it runs there."""
    root = str(Path(__file__).resolve().parents[2])
    start = (
        f"import sys; sys.path.append({root!r}); "
        "from nightbridge.images.node_import import main; sys.exit(main(sys.argv[1:]))"
    )
    # Isolated (-I): what the node's environment says about Python is not ours.
    return [sys.executable, "-I", "-c", start]


def _answer_of(finished: Finished, reference: ImageReference) -> NodeAnswer:
    said = finished.stdout.decode(errors="replace").strip().splitlines()
    try:
        return NodeAnswer.model_validate_json(said[-1])
    except (IndexError, ValidationError):
        raise _no_answer(finished, reference) from None


def _no_answer(finished: Finished, reference: ImageReference) -> NightbridgeError:
    if finished.code == 0 or finished.code >= _FIRST_KILLED_CODE:
        return TransientError(
            f"the import on a compute node was killed (code {finished.code}: {finished.tail or 'it said nothing'})",
            thing=str(reference),
            advice="Was its memory or its time too small?",
        )
    return PermanentError(
        f"a compute node could not start the import (code {finished.code}: {finished.tail or 'it said nothing'})",
        thing=str(reference),
        advice=f"The nodes must see {sys.executable} under the same path; or set image_import.on to host",
    )
