"""Image Cache: where container images are kept, and how they get there."""

from pathlib import Path
from typing import Literal

from prefect.blocks.core import Block
from pydantic import Field, SecretStr

from nightbridge.blocks.secrets import secret_reference
from nightbridge.models import ImageImport


class ImageCache(Block):
    """A folder of verified .sqsh images that the compute nodes see.

    Example:
        ```python
        from nightbridge.blocks import ImageCache

        folder = ImageCache.load("BLOCK_NAME").folder
        ```
    """

    _block_type_name = "Image Cache"
    _block_type_slug = "nightbridge-image-cache"
    _description = "Where pulled container images are kept, on a file system that the compute nodes see."

    folder: str | None = Field(None, description="Folder of images; the workspace's own when empty.")
    cache: str | None = Field(None, description="Folder of fetched layers (ENROOT_CACHE_PATH); enroot's when empty.")
    temp: str | None = Field(None, description="Local folder to unpack in (ENROOT_TEMP_PATH); the system's when empty.")
    import_on: Literal["host", "node"] = Field(
        "host", description="Where imports run: on the host of the flow, or through srun on a compute node."
    )
    srun_args: list[str] = Field([], description="Further srun options of an import on a node: --time=2:00:00.")
    credentials: SecretStr | None = Field(
        None, description="Lines machine HOST login USER password PASSWORD; the files of enroot and docker when empty."
    )

    def settings(self) -> ImageImport:
        """Build the settings that the domain works with; the credentials become a reference to this block.

        Raises:
            ValueError: The block holds credentials and was never saved, so nothing could refer to it.
        """
        return ImageImport(
            on=self.import_on,
            srun_args=tuple(self.srun_args),
            cache=Path(self.cache) if self.cache else None,
            temp=Path(self.temp) if self.temp else None,
            credentials=secret_reference(self, "credentials"),
        )
