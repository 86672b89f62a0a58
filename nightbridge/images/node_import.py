"""The part of an import on a compute node that runs there: the import itself, with the node's enroot.

It is given an order as JSON and logins on stdin, and prints its answer as one line of JSON. Everything else that it
says goes to stderr.
"""

import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from nightbridge.errors import NightbridgeError
from nightbridge.images.enroot import find_enroot
from nightbridge.images.references import ImageReference
from nightbridge.images.scratch_dirs import named_write_errors, remove_scratch_dirs
from nightbridge.models import ImageImport, Model
from nightbridge.node_programs import Failure, begin_on_node


class NodeOrder(Model):
    """What is to be imported, into which file (see `unfinished`); the digest of the reference is known."""

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
        with named_write_errors(order.reference, order.output.parent):
            importer = find_enroot(order.settings, credentials)
            name = str(order.reference.digest).removeprefix("sha256:")
            remove_scratch_dirs(order.output.parent.parent, name, importer.scratch_parents)
            return NodeAnswer(tool=f"{importer.import_image(order.reference, order.output)} on {node}")
    except NightbridgeError as error:
        failure = Failure.of(error)
        return NodeAnswer(failure=failure.model_copy(update={"what": f"{failure.what} (on {node})"}))


def main(arguments: Sequence[str]) -> int:
    """Carry out the order that is the only argument; return the exit code."""
    begin_on_node()
    answer = carry_out(NodeOrder.model_validate_json(arguments[0]), sys.stdin.read())
    print(answer.model_dump_json())
    return 1 if answer.failure else 0
