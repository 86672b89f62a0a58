"""Harvest Store: where runs, histories and reports are kept."""

from pathlib import Path
from typing import Literal

from prefect.blocks.core import Block
from pydantic import Field, SecretStr

from nightbridge.blocks.secrets import secret_reference
from nightbridge.models import HarvestPlace, RetentionPolicy, StoreSettings


class HarvestStore(Block):
    """An S3 bucket, or a directory.

    Example:
        ```python
        from nightbridge.blocks import HarvestStore

        settings = HarvestStore.load("BLOCK_NAME").settings()
        ```
    """

    _block_type_name = "Harvest Store"
    _block_type_slug = "nightbridge-harvest-store"
    _description = "The S3 bucket or directory that keeps checkpoints, curves, logs, histories and reports."

    url: str = Field("file:///var/lib/nightbridge/store", description="s3://BUCKET/PREFIX or file:///DIRECTORY.")
    endpoint_url: str | None = Field(None, description="S3 endpoint; AWS when empty.")
    region: str | None = Field(None, description="S3 region.")
    profile: str | None = Field(None, description="Profile of the AWS configuration files.")
    access_key_id: SecretStr | None = Field(None, description="S3 access key; boto3's own search when empty.")
    secret_access_key: SecretStr | None = Field(None, description="S3 secret key; boto3's own search when empty.")
    ca_bundle: str | None = Field(None, description="File of certificate authorities to trust for this endpoint.")
    path_style: bool = Field(True, description="Address buckets by path, as most own S3 servers need it.")
    role_arn: str | None = Field(
        None, description="Role to assume; the keys or the profile are what it is assumed with."
    )
    encryption: Literal["none", "AES256", "aws:kms"] = Field(
        "none", description="Server-side encryption to ask for; the bucket's own default when none."
    )
    kms_key_id: str | None = Field(None, description="Key for aws:kms; the bucket's default key when empty.")
    storage_class: str | None = Field(None, description="Storage class of a run's files, e.g. STANDARD_IA.")
    tags: dict[str, str] = Field({}, description="Tags of every new object, for lifecycle rules and cost reports.")
    retention_days: float | None = Field(None, description="prune removes runs stored before so many days.")
    retention_nights: int | None = Field(None, description="prune leaves so many nights of each test.")
    retention_max_gb: float | None = Field(None, description="prune leaves so many GB of each test.")
    harvest_on: Literal["host", "node"] = Field(
        "host", description="Where runs are harvested: on the host of the flow, or through srun on a compute node."
    )
    harvest_srun_args: list[str] = Field([], description="Further srun options of a harvest on a node: --mem=8G.")

    def settings(self) -> StoreSettings:
        """Build the settings that the domain works with; secrets become references to this block.

        Raises:
            ValueError: The block holds secrets and was never saved, so nothing could refer to it.
        """
        return StoreSettings(
            url=self.url,
            endpoint_url=self.endpoint_url,
            region=self.region,
            profile=self.profile,
            access_key=secret_reference(self, "access_key_id"),
            secret_key=secret_reference(self, "secret_access_key"),
            ca_bundle=Path(self.ca_bundle) if self.ca_bundle else None,
            path_style=self.path_style,
            role_arn=self.role_arn,
            encryption=self.encryption,
            kms_key_id=self.kms_key_id,
            storage_class=self.storage_class,
            tags=self.tags,
            retention=RetentionPolicy(
                days=self.retention_days, nights=self.retention_nights, max_gb=self.retention_max_gb
            ),
        )

    def place(self) -> HarvestPlace:
        """Where what goes to this store is harvested."""
        return HarvestPlace(on=self.harvest_on, srun_args=tuple(self.harvest_srun_args))
