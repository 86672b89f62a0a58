"""Secrets: looked up in the process that needs them, and masked wherever text leaves it.

A `SecretRef` is all that models hold. The domain resolves environment variables and TOML keys; blocks are Prefect's, so
the tasks layer passes a function for them.
"""

import os
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path

from nightbridge.errors import InvalidInput
from nightbridge.models import SecretRef

MASK = "********"


def resolve_secret(ref: SecretRef, block_value: Callable[[str], str] | None = None) -> str:
    """Return the secret's value.

    Args:
        ref: Where it is found.
        block_value: Returns the value of a Prefect `Secret` block by name; None where there is no Prefect.

    Raises:
        InvalidInput: The place does not exist or is empty. The message names the place, never a value.

    """
    value = _RESOLVERS[ref.source](ref.name, block_value)
    if not value:
        raise InvalidInput(f"secret not found in {ref.source}", thing=ref.name, advice="Set it, or name another place")
    return value


def mask_secrets(text: str, values: Iterable[str]) -> str:
    """Replace every secret value in `text`. Values under four characters are left: they would mask ordinary words."""
    for value in sorted({value for value in values if len(value) >= 4}, key=len, reverse=True):
        text = text.replace(value, MASK)
    return text


def _from_environment(name: str, _: Callable[[str], str] | None) -> str:
    return os.environ.get(name, "")


def _from_block(name: str, block_value: Callable[[str], str] | None) -> str:
    if block_value is None:
        raise InvalidInput("a Prefect Secret block cannot be read here", thing=name, advice="Run it as a flow")
    return block_value(name)


def _from_toml(name: str, _: Callable[[str], str] | None) -> str:
    file, _hash, dotted = name.partition("#")
    try:
        table: object = tomllib.loads(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidInput(
            "the file that holds this secret cannot be read any more", thing=name, advice="Mend it, or start a new run"
        ) from error
    for part in dotted.split("."):
        if isinstance(table, list) and part.isdecimal() and int(part) < len(table):
            table = table[int(part)]  # an element of [[Tests]]
            continue
        if not isinstance(table, dict) or part not in table:
            return ""
        table = table[part]
    return table if isinstance(table, str) else ""


_RESOLVERS: dict[str, Callable[[str, Callable[[str], str] | None], str]] = {
    "env": _from_environment,
    "block": _from_block,
    "toml": _from_toml,
}
