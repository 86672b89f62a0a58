"""Which texts survive the way to the job.

The launcher hands its argv to NeMo-Run, which writes it into a batch script without quoting anything and HTML-escapes
quotes (seen with NeMo-Run 0.11.1). So a space splits a word, `;` or `&` starts another command, and a quote arrives as
`&#39;`. Such values are refused here, with the reason, before anything is started. Words that only the job reads, and
not the launcher itself, may hold some of these characters: a backslash carries them through the one shell on the way.
"""

import re
from functools import lru_cache

_SAFE = re.compile(r"[A-Za-z0-9_@%+=:,./\[\]~#-]*")
_HOME = re.compile(r"(?:^|[=:])~")
_CARRIED = re.compile(r"[;|()!*?{}~#]")
_VARIABLE = re.compile(r"\$\{[A-Za-z_][A-Za-z0-9_]*\}")
_VARIABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

_REASONS = (
    (frozenset(" \t\r\n"), "white space, which the batch script would split into two words"),
    (frozenset("\"'<>&"), "a quote or one of <>&, which would arrive HTML-escaped"),
    (frozenset(";|()`\\!"), "a shell character, which the batch script would execute"),
    (frozenset("*?{}"), "a shell pattern, which the batch script would expand"),
    (frozenset("$"), "$, which the batch script would expand"),
)


@lru_cache(maxsize=4096)
def danger_in(text: str) -> str | None:
    """Say why a word cannot be passed to the launcher; None when it can."""
    if text.startswith("#"):
        return "begins with #: the batch script would drop the rest of the line"
    if _HOME.search(text):
        return "begins with ~, or has it behind = or :, which the batch script would expand; write the full path"
    if _SAFE.fullmatch(text):
        return None
    for characters, reason in _REASONS:
        if characters & set(text):
            return f"contains {reason}"
    return (
        f"contains {next(character for character in text if not _SAFE.fullmatch(character))!r}, which is not passed on"
    )


def escaped(text: str) -> str:
    """A word for the job as the launcher must be given it: the job's shell takes the backslashes away."""
    return _CARRIED.sub(r"\\\g<0>", text)


def danger_in_escaped(text: str) -> str | None:
    """Say why a word cannot be passed on even with backslashes; None when it can."""
    return danger_in(_CARRIED.sub("", text))


def danger_in_variable(name: str, value: str) -> str | None:
    """Say why an environment variable cannot be passed on; `${NAME}` in a value is expanded in the job and is fine."""
    if not _VARIABLE_NAME.fullmatch(name):
        return "is not the name of an environment variable"
    return danger_in(f"{name}={_VARIABLE.sub('', value)}")


def expands(value: str) -> bool:
    """Whether a variable's value refers to another variable of the job."""
    return bool(_VARIABLE.search(value))
