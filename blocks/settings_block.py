"""What the blocks share: their fields are those of the domain's settings, and their secrets become references."""

from typing import Annotated, Any, TypeVar

from prefect.blocks.core import Block
from pydantic import ConfigDict, SecretStr, WithJsonSchema, model_validator

from nightbridge.config.sites import at_home
from nightbridge.models import Model, SecretRef

M = TypeVar("M", bound=Model)

Password = Annotated[
    SecretStr | None, WithJsonSchema({"type": "string", "format": "password", "writeOnly": True, "default": None})
]
"""A secret that may be empty. A choice between a secret and nothing would be drawn as a text area that shows it."""


class SettingsBlock(Block):
    """A block that builds a settings model of the domain, whose plain fields it inherits."""

    # A block is edited, and Prefect adds its own fields; the settings that it inherits from are frozen.
    model_config = ConfigDict(frozen=False, extra="allow")

    @model_validator(mode="before")
    @classmethod
    def _unset_what_is_empty(cls, values: Any) -> Any:
        """The UI sends an empty text for a field that was cleared; a parameter may be a name in place of a block."""
        if not isinstance(values, dict):
            return values
        return {name: value for name, value in values.items() if value != ""}

    def build(self, kind: type[M], **given: object) -> M:
        """Build settings from the fields of the same names; a secret becomes a reference to this block.

        Args:
            kind: The settings model.
            given: Fields that this block names differently.

        Raises:
            ValueError: The block holds secrets and was never saved, so nothing could refer to it.
        """
        names = kind.model_fields.keys() & type(self).model_fields.keys()
        values = {name: getattr(self, name) for name in names}
        values |= {name: self.reference(name) for name, value in values.items() if isinstance(value, SecretStr)}
        return at_home(kind.model_validate(values | given))

    def reference(self, field: str) -> SecretRef | None:
        """Where the secret of a field is found; None when the field is empty.

        Raises:
            ValueError: The block was never saved, so nothing could refer to it.
        """
        if getattr(self, field) is None:
            return None
        if not self._block_document_name:
            raise ValueError(
                f"save the {self._block_type_name} block before using its secrets: they are looked up by its name"
            )
        return SecretRef(source="block", name=f"{self._block_type_slug}/{self._block_document_name}#{field}")
