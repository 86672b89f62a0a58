"""Failures that are alike: what two runs that broke in the same way have in common, without what differs by chance."""

import re

from nightbridge.models import Verdict, VerdictStatus

FAILED = frozenset({VerdictStatus.FAILED, VerdictStatus.SHORT, VerdictStatus.INVALID})
"""Verdicts on a run whose commit does not do what was asked for."""

# What is another in each run: addresses, numbers of ranks, nodes, steps and bytes; folders and what is in quotes stay
# as long as they hold none of these, for a missing module or file is known by its name.
_BY_CHANCE = re.compile(r"0x[0-9a-f]+|\b[0-9a-f]{12,}\b|\d+(?:[.:,]\d+)*", re.IGNORECASE)
_FOLDERS = re.compile(r"(?:/[\w.@#+-]+)+/")

LONGEST = 200
"""Characters of a signature: what comes after them is detail."""


def failure_of(verdict: Verdict) -> str | None:
    """The signature of a failed run: its verdict and the first reason; None for a run that did not fail."""
    if verdict.status not in FAILED:
        return None
    reason = verdict.reasons[0] if verdict.reasons else ""
    return f"{verdict.status}: {_BY_CHANCE.sub('#', _FOLDERS.sub('', reason))[:LONGEST]}"
