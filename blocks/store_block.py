"""Harvest Store: where runs, histories and reports are kept."""

import asyncio

from prefect.filesystems import WritableFileSystem
from pydantic import Field, HttpUrl, SecretStr
from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_exponential

from nightbridge.blocks.settings_block import Password, SettingsBlock
from nightbridge.errors import TransientError
from nightbridge.models import HarvestPlace, Place, RetentionPolicy, SecretRef, StoreLocation, StoreSettings
from nightbridge.store.object_store import ObjectStore, open_store

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
