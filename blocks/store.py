"""Harvest Store: where runs, histories and reports are kept."""

from pydantic import Field, SecretStr

from nightbridge.blocks.base import SettingsBlock
from nightbridge.models import HarvestPlace, Place, RetentionPolicy, StoreLocation, StoreSettings
from nightbridge.store.factory import open_store
from nightbridge.store.protocol import ObjectStore


class HarvestStore(StoreLocation, SettingsBlock):
    """An S3 bucket, or a directory.

    Example:
        ```python
        from nightbridge.blocks import HarvestStore

        store = HarvestStore.load("BLOCK_NAME").open()
        ```
    """

    _block_type_name = "Harvest Store"
    _block_type_slug = "nightbridge-harvest-store"
    _description = "The S3 bucket or directory that keeps checkpoints, curves, logs, histories and reports."

    url: str = Field("file:///var/lib/nightbridge/store", description="s3://BUCKET/PREFIX or file:///DIRECTORY.")
    access_key_id: SecretStr | None = Field(None, description="S3 access key; boto3's own search when empty.")
    secret_access_key: SecretStr | None = Field(None, description="S3 secret key; boto3's own search when empty.")
    retention_days: float | None = Field(None, description="prune removes runs stored before so many days.")
    retention_nights: int | None = Field(None, description="prune leaves so many nights of each test.")
    retention_max_gb: float | None = Field(None, description="prune leaves so many GB of each test.")
    harvest_on: Place = Field(
        "host", description="Where runs are harvested: on the host of the flow, or through srun on a compute node."
    )
    harvest_srun_args: list[str] = Field([], description="Further srun options of a harvest on a node: --mem=8G.")

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
            access_key=self.reference("access_key_id"),
            secret_key=self.reference("secret_access_key"),
            retention=retention,
        )

    def harvest_place(self) -> HarvestPlace:
        """Where what goes to this store is harvested."""
        return HarvestPlace(on=self.harvest_on, srun_args=tuple(self.harvest_srun_args))

    def open(self) -> ObjectStore:
        """Open the store with the keys of this block; nothing is read or written yet.

        Raises:
            InvalidInput: The URL is neither `file://` nor `s3://`, or the settings cannot work.
            ValueError: The block holds keys and was never saved.
        """
        return open_store(self.settings(), self._value)

    def _value(self, reference: str) -> str:
        """The value of a secret of this block, by the name of the reference to it."""
        value: SecretStr = getattr(self, reference.rpartition("#")[2])
        return value.get_secret_value()
