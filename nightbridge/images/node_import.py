"""Import on a compute node, for sites whose login nodes lack enroot or the room.

The tag is resolved here, by the registry's own API. The import is one job that runs this module as a program on the
node: the same code as on this machine, with the node's enroot and disks. It gets an `ImportRequest` as its argument and
logins on stdin, logs to stderr, and prints an `ImportResult` as its last line. The file lands on the shared file
system, where it is checked like any other. How a program gets onto a node is the caller's: this package knows no Slurm.
"""

import logging
import os
import re
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from pydantic import SecretStr

from nightbridge.errors import NightbridgeError, TransientError
from nightbridge.images.enroot import (
    IMPORT_TIMEOUT_SECONDS,
    find_enroot,
    named_write_errors,
    remove_scratch_dirs,
    scratch_name,
)
from nightbridge.images.registry import ImageReference, registry_digest
from nightbridge.models import ImageImport, Model
from nightbridge.node_programs import NodeResponse, RunOnNode, SerializedError, begin_on_node, read_response
from nightbridge.processes import own_program

log = logging.getLogger(__name__)

# The digits of a digest that a job's name shows: enough to tell the images of one folder apart.
_DIGITS = 16
# enroot's own variables, those by which curl and mksquashfs, which it runs, find proxies, certificates and the time of
# files, and the folders of a user in which it looks for logins and layers.
_PASSED_ON = re.compile(r"ENROOT_\w+|(https?|no|all)_proxy|SSL_CERT_\w+|SOURCE_DATE_EPOCH|XDG_\w+_HOME", re.IGNORECASE)


class NodeImporter:
    """Imports by a job on a compute node.

    `credentials` are logins as lines of netrc(5).
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

        The file of a failed import is removed.

        Raises:
            InvalidInput: There is no such image.
            LaunchRefused: The cluster refused the job for good.
            PermanentError: The registry refuses us, a disk is full, or the node has no enroot or no Python.
            TransientError: The registry cannot be reached or is busy, or the cluster did not let the import end.
        """
        request = ImportRequest(reference=reference, output=output, settings=self._settings)
        try:
            finished = self._run_on_node(
                # The folder's own part keeps apart the jobs of several workspaces that import the same image.
                scratch_name(output).partition(".")[0] + f"-{reference.file_name[:_DIGITS]}{reference.file_name[64:]}",
                own_program("nightbridge.images.node_import", [request.model_dump_json()]),
                environment={name: value for name, value in os.environ.items() if _PASSED_ON.fullmatch(name)},
                timeout=IMPORT_TIMEOUT_SECONDS,
                given=self._credentials.get_secret_value().encode(),
                on_line=lambda line: log.info("%s", line),
            )
            response = read_response(
                finished, ImportResult, doing="import", subject=str(reference), instead="image_import.on to host"
            )
        except BaseException:
            output.unlink(missing_ok=True)
            raise
        if not output.exists():
            raise TransientError(
                "the image imported on a compute node is not visible here",
                subject=str(output),
                advice="Keep images on a file system shared with the nodes",
            )
        return response.tool


class ImportRequest(Model):
    """The image to import, and into which file (see `unfinished`); the digest of the reference is known."""

    reference: ImageReference
    output: Path
    settings: ImageImport


class ImportResult(NodeResponse):
    """How an import on a node ended: what made the image and where, or the error."""

    tool: str = ""


def run_import(request: ImportRequest, credentials: str) -> ImportResult:
    """Import an image on this node, after removing what a killed import of it left here."""
    node = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    try:
        with named_write_errors(request.reference, request.output.parent):
            importer = find_enroot(request.settings, credentials)
            images = request.output.parent.parent
            remove_scratch_dirs(images, request.reference.file_name, importer.scratch_parents)
            return ImportResult(tool=f"{importer.import_image(request.reference, request.output)} on {node}")
    except NightbridgeError as error:
        failure = SerializedError.of(error)
        return ImportResult(failure=failure.model_copy(update={"what": f"{failure.what} (on {node})"}))


def main(arguments: Sequence[str]) -> int:
    """Run the import that the only argument requests; return the exit code."""
    begin_on_node()
    response = run_import(ImportRequest.model_validate_json(arguments[0]), sys.stdin.read())
    print(response.model_dump_json())
    return 1 if response.failure else 0
