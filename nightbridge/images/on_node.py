"""Import on a compute node, for sites whose login nodes lack enroot or the room.

The tag is resolved here, by the registry's own API. The import is one job that runs this package on the node: the same
code as on this machine, with the enroot, the folders and the space that the node has. It leaves its file on the shared
file system, where it is checked like any other. How a program gets onto a node is the caller's: this package knows no
Slurm.
"""

import logging
import os
import re
from pathlib import Path

from pydantic import SecretStr

from nightbridge.errors import TransientError
from nightbridge.images.enroot import IMPORT_TIMEOUT_SECONDS
from nightbridge.images.node_import import NodeAnswer, NodeOrder
from nightbridge.images.references import ImageReference
from nightbridge.images.registry import registry_digest
from nightbridge.images.scratch_dirs import scratch_name
from nightbridge.models import ImageImport
from nightbridge.node_programs import RunOnNode, read_answer
from nightbridge.own_programs import own_program

log = logging.getLogger(__name__)

# The digits of a digest that a job's name shows: enough to tell the images of one folder apart.
_DIGITS = 16
# enroot's own variables, those by which curl and mksquashfs, which it runs, find proxies, certificates and the time of
# files, and the folders of a user in which it looks for logins and layers.
_PASSED_ON = re.compile(r"ENROOT_\w+|(https?|no|all)_proxy|SSL_CERT_\w+|SOURCE_DATE_EPOCH|XDG_\w+_HOME", re.IGNORECASE)


class NodeImporter:
    """Imports by a job on a compute node.

    Args:
        run_on_node: How a program gets there.
        settings: Folders of imports, as the nodes know them.
        credentials: Logins as lines of netrc(5).

    """

    tool = "a job on a compute node"
    scratch_parents: tuple[Path, ...] = ()

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
            PermanentError: The registry refuses us, a disk is full, or the node has no enroot or no Python.
            TransientError: The registry cannot be reached or is busy, or the cluster did not let the import end.

        """
        order = NodeOrder(reference=reference, output=output, settings=self._settings)
        try:
            finished = self._run_on_node(
                # The folder's own part keeps apart the jobs of several workspaces that import the same image.
                scratch_name(output).partition(".")[0] + f"-{str(reference.digest).removeprefix('sha256:')[:_DIGITS]}",
                own_program("nightbridge.images.node_import", [order.model_dump_json()]),
                environment={name: value for name, value in os.environ.items() if _PASSED_ON.fullmatch(name)},
                timeout=IMPORT_TIMEOUT_SECONDS,
                given=self._credentials.get_secret_value().encode(),
                on_line=lambda line: log.info("%s", line),
            )
            answer = read_answer(
                finished,
                NodeAnswer,
                doing="import",
                thing=str(reference),
                instead="image_import.on to host",
            )
            if answer.failure:
                raise answer.failure.error()
        except BaseException:
            output.unlink(missing_ok=True)
            raise
        if not output.exists():
            raise TransientError(
                "the image imported on a compute node is not visible here",
                thing=str(output),
                advice="Keep images on a file system shared with the nodes",
            )
        return answer.tool
