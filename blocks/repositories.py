"""Source Repositories: how git and the launcher's environments are handled."""

from prefect.blocks.core import Block
from pydantic import Field, SecretStr

from nightbridge.blocks.secrets import secret_reference
from nightbridge.models import SecretRef


class SourceRepositories(Block):
    """Settings for clones, checkouts and launcher environments.

    Example:
        ```python
        from nightbridge.blocks import SourceRepositories

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
    credentials: SecretStr | None = Field(
        None, description="Lines machine HOST login USER password TOKEN; git's own credential helpers when empty."
    )

    def credentials_reference(self) -> SecretRef | None:
        """Where the credentials are found: in this block; None without any.

        Raises:
            ValueError: The block holds credentials and was never saved, so nothing could refer to it.
        """
        return secret_reference(self, "credentials")
