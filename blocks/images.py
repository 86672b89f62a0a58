"""Image Cache: where container images are kept."""

from prefect.blocks.core import Block
from pydantic import Field


class ImageCache(Block):
    """A folder of verified .sqsh images that the compute nodes see.

    Example:
        ```python
        from blocks import ImageCache

        folder = ImageCache.load("BLOCK_NAME").folder
        ```
    """

    _block_type_name = "Image Cache"
    _block_type_slug = "nightbridge-image-cache"
    _description = "Where pulled container images are kept, on a file system that the compute nodes see."

    folder: str | None = Field(None, description="Folder of images; the workspace's own when empty.")
