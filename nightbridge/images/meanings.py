"""What the messages of the tools that import images mean: a table of each tool, read from the top."""

import re
from collections.abc import Iterable

from nightbridge.errors import NightbridgeError
from nightbridge.images.logins import login_advice
from nightbridge.images.references import ImageReference
from nightbridge.models import Model

LOGIN = "{login}"
"""An advice that says how to log in to the image's own registry."""


class Meaning(Model):
    """What a message means: the kind of error, in our words, and what to do."""

    pattern: str
    kind: type[NightbridgeError]
    what: str
    advice: str = ""


def error_meant(
    meanings: Iterable[Meaning], message: str, said: str, reference: ImageReference
) -> NightbridgeError | None:
    """The error that a tool's message stands for; None where the table does not know it.

    Args:
        meanings: The tool's table; the first entry whose pattern occurs in the message counts.
        message: Everything that the tool wrote to stderr.
        said: The part of it that a person is shown.
        reference: The image.

    """
    for meaning in meanings:
        if re.search(meaning.pattern, message):
            advice = login_advice(reference) if meaning.advice == LOGIN else meaning.advice
            return meaning.kind(f"{meaning.what} ({said})", thing=str(reference), advice=advice)
    return None
