"""Harvest Store: where runs, histories and reports are kept."""

from pathlib import Path

from prefect.blocks.core import Block
from pydantic import Field, SecretStr

from nightbridge.models import SecretRef, StoreSettings


class HarvestStore(Block):
    """An S3 bucket, or a directory.

    Example:
        ```python
        from blocks import HarvestStore

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
            access_key=self._reference("access_key_id"),
            secret_key=self._reference("secret_access_key"),
            ca_bundle=Path(self.ca_bundle) if self.ca_bundle else None,
            path_style=self.path_style,
        )

    def _reference(self, field: str) -> SecretRef | None:
        if getattr(self, field) is None:
            return None
        if not self._block_document_name:
            raise ValueError("save the Harvest Store block before using its secrets: they are looked up by its name")
        return SecretRef(source="block", name=f"{self._block_type_slug}/{self._block_document_name}#{field}")
