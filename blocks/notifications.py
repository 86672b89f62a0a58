"""Notifications: whom nightbridge tells what a person has to know, and how."""

from pathlib import Path
from typing import Literal

from prefect.blocks.core import Block
from pydantic import Field, SecretStr

from nightbridge.blocks.secrets import secret_reference
from nightbridge.models import NotifySettings


class Notifications(Block):
    """Mail, a webhook, or both.

    Example:
        ```python
        from nightbridge.blocks import Notifications

        settings = Notifications.load("BLOCK_NAME").settings()
        ```
    """

    _block_type_name = "Notifications"
    _block_type_slug = "nightbridge-notifications"
    _description = "The mail server, the people and the webhook that are told when a night has no verdict."

    smtp_host: str | None = Field(None, description="Host that takes mail; no mail when empty.")
    smtp_port: int | None = Field(
        None, description="Its port; when empty 587 with starttls, 465 with tls, 25 with none."
    )
    smtp_security: Literal["none", "starttls", "tls"] = Field(
        "starttls", description="starttls begins in the clear and then encrypts, tls is encrypted from the start."
    )
    smtp_user: str | None = Field(None, description="User to log in as; no login when empty.")
    smtp_password: SecretStr | None = Field(None, description="The user's password.")
    ca_bundle: str | None = Field(None, description="File of certificate authorities; the system's when empty.")
    mail_from: str | None = Field(None, description="Sender; nightbridge@ this host when empty.")
    mail_to: list[str] = Field([], description="Addresses of everybody who gets the mail.")
    webhook: SecretStr | None = Field(None, description="URL of a webhook of Slack, Mattermost or Teams.")

    def settings(self) -> NotifySettings:
        """Build the settings that the domain works with; secrets become references to this block.

        Raises:
            ValueError: The block holds secrets and was never saved, or a mail server without anybody to write to.
        """
        return NotifySettings(
            smtp_host=self.smtp_host or None,
            smtp_port=self.smtp_port,
            smtp_security=self.smtp_security,
            smtp_user=self.smtp_user or None,
            smtp_password=secret_reference(self, "smtp_password"),
            ca_bundle=Path(self.ca_bundle) if self.ca_bundle else None,
            mail_from=self.mail_from or None,
            mail_to=tuple(self.mail_to),
            webhook=secret_reference(self, "webhook"),
        )
