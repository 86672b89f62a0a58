"""Harvest Store: where runs, histories and reports are kept; and what all blocks share.

A block's fields are those of the domain's settings, and its secrets become references.
"""

import asyncio
import json
from functools import cache
from typing import Annotated, Any, TypeVar, cast

from prefect.blocks.core import Block
from prefect.filesystems import WritableFileSystem
from pydantic import ConfigDict, Field, HttpUrl, SecretStr, WithJsonSchema, model_validator
from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_exponential

from nightbridge.config.sites import at_home
from nightbridge.errors import TransientError
from nightbridge.models import HarvestPlace, Model, Place, RetentionPolicy, SecretRef, StoreLocation, StoreSettings
from nightbridge.store.object_store import ObjectStore, open_store

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

    @classmethod
    def model_json_schema(cls, *given: Any, **named: Any) -> dict[str, Any]:
        """Make it once: Prefect asks for it several times where a class is made, and for each field that it saves."""
        return cast(dict[str, Any], json.loads(cls._schema_as_text(given, tuple(named.items()))))

    @classmethod
    @cache
    def _schema_as_text(cls, given: tuple[Any, ...], named: tuple[tuple[str, Any], ...]) -> str:
        return json.dumps(super().model_json_schema(*given, **dict(named)))

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


_RESULTS = "results/"
_PATIENT = Retrying(
    retry=retry_if_exception_type(TransientError),
    stop=stop_after_delay(12 * 3600.0),
    wait=wait_exponential(multiplier=1, max=60),
    reraise=True,
)


class HarvestStore(StoreLocation, SettingsBlock, WritableFileSystem):
    """An S3 bucket, or a directory. As Prefect's result storage it keeps the results of stages below `results/`.

    Example:
        ```python
        from nightbridge.blocks import HarvestStore

        store = HarvestStore.load("BLOCK_NAME").open()
        ```
    """

    _block_type_name = "Harvest Store"
    _block_type_slug = "nightbridge-harvest-store"
    _documentation_url = HttpUrl("https://docs.aws.amazon.com/AmazonS3/latest/userguide/Welcome.html")
    _description = "The S3 bucket or directory that keeps checkpoints, curves, logs, histories and reports."

    url: str = Field("file:///var/lib/nightbridge/store", description="s3://BUCKET/PREFIX or file:///DIRECTORY.")
    access_key_id: Password = Field(None, description="S3 access key; boto3's own search when empty.")
    secret_access_key: Password = Field(None, description="S3 secret key; boto3's own search when empty.")
    access_key: SecretRef | None = Field(None, description="Where a worker finds the access key, in place of the key.")
    secret_key: SecretRef | None = Field(None, description="Where a worker finds the secret key, in place of the key.")
    retention_days: float | None = Field(None, description="prune removes runs stored before so many days.")
    retention_nights: int | None = Field(None, description="prune leaves so many nights of each test.")
    retention_max_gb: float | None = Field(None, description="prune leaves so many GB of each test.")
    harvest_on: Place = Field(
        "host", description="Where runs are harvested: on the host of the flow, or through srun on a compute node."
    )
    harvest_srun_args: list[str] = Field([], description="Further srun options of a harvest on a node: --mem=8G.")
    harvest_load_with: str | None = Field(
        None, description="Python with torch, or a command that runs one, that loads each checkpoint; none when empty."
    )

    def settings(self) -> StoreSettings:
        """Build the settings that the domain works with; secrets become references to this block.

        Raises:
            ValueError: The block holds secrets and was never saved, so nothing could refer to it.
        """
        retention = RetentionPolicy(
            days=self.retention_days, nights=self.retention_nights, max_gb=self.retention_max_gb
        )
        return self.build(
            StoreSettings,
            access_key=self.reference("access_key_id") or self.access_key,
            secret_key=self.reference("secret_access_key") or self.secret_key,
            retention=retention,
        )

    def harvest_place(self) -> HarvestPlace:
        """Where what goes to this store is harvested, and what loads its checkpoints."""
        return HarvestPlace(
            on=self.harvest_on, srun_args=tuple(self.harvest_srun_args), load_with=self.harvest_load_with or None
        )

    def open(self) -> ObjectStore:
        """Open the store with the keys of this block; nothing is read or written yet.

        Raises:
            InvalidInput: The URL is neither `file://` nor `s3://`, or the settings cannot work.
            ValueError: The block holds keys and was never saved.
        """
        return open_store(self.settings(), self._value)

    # Prefect calls these with `_sync`, and the twins with an `a` from async flows.
    def read_path(self, path: str, _sync: bool = True) -> bytes:  # type: ignore[override]
        """Read a result that Prefect has kept here.

        Raises:
            ValueError: It is not there; Prefect expects this error.
        """
        content = self.open().get(_RESULTS + path)
        if content is None:
            raise ValueError(f"{self.url}: no result {path}")
        return content

    def write_path(self, path: str, content: bytes, _sync: bool = True) -> None:  # type: ignore[override]
        """Keep a result of Prefect's; a store that is away is waited for, as by the stages."""
        _PATIENT.copy()(self.open().put, _RESULTS + path, content)

    async def aread_path(self, path: str) -> bytes:
        """As `read_path`."""
        return await asyncio.to_thread(self.read_path, path)

    async def awrite_path(self, path: str, content: bytes) -> None:
        """As `write_path`."""
        await asyncio.to_thread(self.write_path, path, content)

    def _value(self, reference: str) -> str:
        """The value of a secret of this block, by the name of the reference to it."""
        value: SecretStr = getattr(self, reference.rpartition("#")[2])
        return value.get_secret_value()
