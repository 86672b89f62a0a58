"""Secrets in a configuration: named places stay references, and a literal token becomes one at once."""

import re
from typing import Literal

from nightbridge.config.documents import Layered
from nightbridge.config.positions import KeyPath
from nightbridge.models import SecretRef

_PREFIXES: tuple[tuple[str, Literal["env", "block", "toml"]], ...] = (
    ("env:", "env"),
    ("block:", "block"),
    ("toml:", "toml"),
)

PLACES = tuple(prefix for prefix, _place in _PREFIXES)
"""How a value begins that names the place of a secret: a variable, a Prefect block, or `FILE#dotted.key`."""

SECRET_NAME = re.compile(r"(?:^|_)(?:TOKEN|KEY|SECRET|PASSWORD|PASSWD|CREDENTIALS?)$", re.IGNORECASE)
"""What an environment variable is called that holds a secret."""

LITERAL = "the file contains a token; prefer env:NAME or block:NAME, or set only the variable"

# A token is often the user of an https address; ssh's user, and the one before an image's registry, is public.
_IN_ADDRESS = re.compile(r"https?://[^/@\s]+@|(?:[a-z][a-z0-9+.-]*://)?[^/@#\s]*:[^/@#\s]+@(?!sha256:)", re.IGNORECASE)


def shows_secret(address: str) -> bool:
    """Whether the address of a repository or an image carries a password or a token."""
    return _IN_ADDRESS.match(address.strip()) is not None


def reference(value: str, source: Layered, path: KeyPath) -> SecretRef | None:
    """Return where the secret is found: `env:NAME`, `block:NAME`, `toml:FILE#KEY`, or the place of the literal itself.

    None for a literal that is in no file: only its value could be kept.
    """
    for prefix, place in _PREFIXES:
        if value.startswith(prefix):
            return SecretRef(source=place, name=value.removeprefix(prefix).strip())
    layer = source.origin(path)
    if layer.document is None:
        return None
    key = ".".join(str(part) for part in (*layer.base, *path))
    return SecretRef(source="toml", name=f"{layer.document.path.absolute()}#{key}")
