"""Secrets that a block holds, as references that a run may carry."""

from prefect.blocks.core import Block

from nightbridge.models import SecretRef


def secret_reference(block: Block, field: str) -> SecretRef | None:
    """Where the value of a block's field is found; None when the field is empty.

    Raises:
        ValueError: The block was never saved, so nothing could refer to it.
    """
    if getattr(block, field) is None:
        return None
    if not block._block_document_name:
        raise ValueError(
            f"save the {block._block_type_name} block before using its secrets: they are looked up by its name"
        )
    return SecretRef(source="block", name=f"{block._block_type_slug}/{block._block_document_name}#{field}")
