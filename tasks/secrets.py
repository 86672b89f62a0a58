"""Secrets in flow processes: Prefect blocks are one of the places where they may be kept."""

from collections.abc import Iterable, Mapping

from prefect.blocks.core import Block
from prefect.blocks.system import Secret
from pydantic import SecretStr

from nightbridge.errors import InvalidInput
from nightbridge.models import SecretRef
from nightbridge.secrets import resolve_secret
from tasks.mirror import away_is_transient


def block_value(name: str) -> str:
    """Read a secret from a block: `NAME` of a Secret block, or `BLOCK TYPE/NAME#FIELD` of any other.

    Raises:
        InvalidInput: There is no such block or field.
        PrefectAway: Prefect's server does not answer.
    """
    document, _, field = name.partition("#")
    try:
        with away_is_transient(f"block {document}"):
            value = getattr(Block.load(document), field) if field else Secret.load(name).get()
    except (ValueError, AttributeError) as error:
        raise InvalidInput("no such Prefect block", thing=name, advice="Make it in the Prefect UI") from error
    return value.get_secret_value() if isinstance(value, SecretStr) else str(value)


def resolve_all(references: Mapping[str, SecretRef]) -> dict[str, str]:
    """Look up the values of a plan's secrets, for the environment of the process that needs them."""
    return {variable: resolve_secret(reference, block_value) for variable, reference in references.items()}


def variables_of(references: Iterable[SecretRef | None]) -> frozenset[str]:
    """The environment variables that hold secrets of this process, which none of its children should inherit."""
    return frozenset(reference.name for reference in references if reference and reference.source == "env")
