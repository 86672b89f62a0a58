"""The part of an import on a compute node that runs there: the import itself, with what the node has for it.

It is given an order as JSON and logins on stdin, and prints its answer as one line of JSON. Everything else that it
says goes to stderr.
"""

import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from nightbridge.errors import NightbridgeError
from nightbridge.failures import Failure
from nightbridge.files import write_error
from nightbridge.images.image import find_importer
from nightbridge.images.references import ImageReference
from nightbridge.images.space import OTHER_FOLDERS
from nightbridge.images.work import remove_leftovers
from nightbridge.models import ImageImport, Model

_TERMINATED = 128 + signal.SIGTERM


class NodeOrder(Model):
    """What is to be imported; the digest of the reference is known."""

    reference: ImageReference
    output: Path
    settings: ImageImport


class NodeAnswer(Model):
    """How an import on a node ended: what made the image and where, or the error."""

    tool: str = ""
    failure: Failure | None = None


def carry_out(order: NodeOrder, credentials: str) -> NodeAnswer:
    """Import an image on this node, after clearing away what a killed import of it left here."""
    node = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    try:
        importer = find_importer(order.settings, credentials)
        name = str(order.reference.digest).removeprefix("sha256:")
        remove_leftovers(order.output.parent, name, importer.work_folders)
        return NodeAnswer(tool=f"{importer.import_image(order.reference, order.output)} on {node}")
    except NightbridgeError as error:
        return _failed(node, error)
    except OSError as error:
        what, thing = f"a file of the import of {order.reference}", str(error.filename or order.output.parent)
        return _failed(node, write_error(error, what=what, thing=thing, advice=OTHER_FOLDERS))


def _failed(node: str, error: NightbridgeError) -> NodeAnswer:
    failure = Failure.of(error)
    return NodeAnswer(failure=failure.model_copy(update={"what": f"{failure.what} (on {node})"}))


def main(arguments: Sequence[str]) -> int:
    """Carry out the order that is the only argument; return the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    # A cancelled job's import ends what it has started and clears up; the default would do neither.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(_TERMINATED))
    answer = carry_out(NodeOrder.model_validate_json(arguments[0]), sys.stdin.read())
    print(answer.model_dump_json())
    return 1 if answer.failure else 0
