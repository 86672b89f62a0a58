"""Error messages of other programs as errors of ours. Each program's table stands beside the code that runs it."""

import re
from collections.abc import Iterable
from typing import NamedTuple

from nightbridge.errors import NightbridgeError


class ErrorPattern(NamedTuple):
    """A message of another program, and the error that it stands for.

    Args:
        pattern: Regular expression that occurs in the message.
        kind: The error.
        what: What happened, one clause.
        advice: How the user can fix it; `{name}` is filled in from the fields given to `error`.

    """

    pattern: str
    kind: type[NightbridgeError]
    what: str
    advice: str = ""

    def error(self, thing: str, detail: str, **fields: str) -> NightbridgeError:
        """Build the error about `thing`, with the program's own words as `detail`."""
        what = f"{self.what} ({detail})" if detail else self.what
        return self.kind(what, thing=thing, advice=self.advice.format(**fields) if fields else self.advice)


def classify(message: str, patterns: Iterable[ErrorPattern]) -> ErrorPattern | None:
    """Return the first pattern that occurs in a message; None when no pattern does."""
    return next((known for known in patterns if re.search(known.pattern, message)), None)
