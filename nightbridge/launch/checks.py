"""What of a test the launcher of one version or commit would not take. Used by the rules, and by the plan once more.

Which texts survive the way to the job.

The launcher hands its argv to NeMo-Run, which writes it into a batch script without quoting anything and HTML-escapes
quotes (seen with NeMo-Run 0.11.1). So a space splits a word, `;` or `&` starts another command, and a quote arrives as
`&#39;`. Such values are refused here, with the reason, before anything is started. Words that only the job reads, and
not the launcher itself, may hold some of these characters: a backslash carries them through the one shell on the way.
"""

import difflib
from collections.abc import Iterator
from functools import lru_cache

from nightbridge.launch.flags import (
    FORMATS,
    TEST_FLAGS,
    KnownFlags,
    why_unsafe,
    why_unsafe_escaped,
    why_unsafe_variable,
    words_of,
)
from nightbridge.models import TestDefinition

_NUMBERS = (bool, int, float)
"""Written in characters that are safe."""

_SPELLINGS = {
    ("cuda_graph_impl", "full_iteration"): '; write cuda_graph_impl = "local" and cuda_graph_scope = "full_iteration"'
}
"""How the launcher wants what Megatron-Core has another word for."""


def unknown_flags(test: TestDefinition, known: KnownFlags) -> Iterator[tuple[str, str]]:
    """Fields whose flag that launcher does not have, each with the reason."""
    for field, value in test.cmd_args.items():
        flag = TEST_FLAGS[field]
        if flag.option and flag.option not in known and FORMATS[flag.format](flag.option, value):
            since = f"; it exists from {flag.first} on" if flag.first > (0, 3, 0) else ""
            yield f"cmd_args.{field}", f"the launcher has no flag {flag.option}{since}"


def wrong_choices(test: TestDefinition, known: KnownFlags) -> Iterator[tuple[str, str]]:
    """Fields whose value that launcher does not allow, each with the values it does."""
    for field, value in test.cmd_args.items():
        flag = TEST_FLAGS[field]
        allowed = known.get(flag.option)
        if allowed is None or value == "":
            continue
        for word in words_of(flag, value):
            # Two options are lower-cased by the launcher itself.
            if word not in allowed and not (field in ("domain",) and word.lower() in allowed):
                nearest = difflib.get_close_matches(word, allowed, n=1)
                hint = _SPELLINGS.get((field, word)) or (f"; did you mean {nearest[0]!r}?" if nearest else "")
                yield f"cmd_args.{field}", f"{word!r} is not one of {', '.join(allowed)}{hint}"


def unsafe_values(test: TestDefinition) -> Iterator[tuple[str, str]]:
    """Texts that would not reach the job as they are written, each with the reason."""
    for field, value in test.cmd_args.items():
        if not isinstance(value, _NUMBERS):
            for word, problem in _unsafe_words(field, tuple(value) if isinstance(value, list) else value):
                yield f"cmd_args.{field}", f"{word!r} {problem}"
    for key, text in test.extra_cmd_args.items():
        if reason := why_unsafe(key.removeprefix("~")) or why_unsafe_escaped(text):
            yield f"extra_cmd_args.{key}", f"{_override(key, text)!r} {reason}"
    for mount in test.extra_container_mounts:
        if reason := why_unsafe(mount) or ("contains a comma: mounts are separated by it" if "," in mount else None):
            yield "extra_container_mounts", f"{mount!r} {reason}"
    for name, text in test.extra_env_vars.items():
        if reason := why_unsafe_variable(name, text):
            yield f"extra_env_vars.{name}", f"{text!r} {reason}"


@lru_cache(maxsize=4096)
def _unsafe_words(field: str, value: str | tuple[object, ...]) -> tuple[tuple[str, str], ...]:
    flag = TEST_FLAGS[field]
    check = why_unsafe_escaped if flag.format == "escaped" else why_unsafe
    return tuple((word, reason) for word in words_of(flag, value) if (reason := check(word)))


def _override(key: str, value: str) -> str:
    return f"{key}={value}" if value else key
