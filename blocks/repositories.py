"""Source Repositories: how git and the launcher's environments are handled."""

from prefect.blocks.core import Block
from pydantic import Field


class SourceRepositories(Block):
    """Settings for clones, checkouts and launcher environments.

    Example:
        ```python
        from blocks import SourceRepositories

        timeout = SourceRepositories.load("BLOCK_NAME").git_timeout
        ```
    """

    _block_type_name = "Source Repositories"
    _block_type_slug = "nightbridge-source-repositories"
    _description = "How repositories are fetched, and where launcher environments are kept."

    git_timeout: float = Field(600.0, description="Longest time that one git command may take, in seconds.")
    environments: str | None = Field(None, description="Folder of launcher environments; the workspace's when empty.")
    wheels: str | None = Field(
        None, description="Folder of wheels to install environments from without network; pip's sources when empty."
    )
