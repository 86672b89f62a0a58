"""The block of a site, and those that it is put together from: cluster, images, repositories, notifications."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

from prefect.blocks.core import Block
from prefect.blocks.notifications import AppriseNotificationBlock
from prefect.client.orchestration import get_client
from pydantic import ConfigDict, Field, HttpUrl, SecretStr, ValidationError, field_validator, model_validator

from nightbridge import models
from nightbridge.blocks.store_block import HarvestStore, Password, SettingsBlock
from nightbridge.config.sites import PLAIN_CLUSTERS, cluster_called, plain_site
from nightbridge.errors import InvalidInput
from nightbridge.models import (
    ClusterKind,
    ClusterSettings,
    ContainerSupport,
    ImageImport,
    ImportFolders,
    MailSettings,
    NotifySettings,
    SiteChoice,
)
from nightbridge.sbatch_options import NOT_ONE_JOB, option_names
from nightbridge.slurm.factory import open_cluster
from nightbridge.slurm.protocol import Cluster

B = TypeVar("B", bound=Block)

log = logging.getLogger(__name__)


class SlurmCluster(ClusterSettings, SettingsBlock):
    """A Slurm cluster, or this machine as the embedded one.

    Example:
        ```python
        from nightbridge.blocks import SlurmCluster

        limits = SlurmCluster.load("BLOCK_NAME").open().limits()
        ```
    """

    _block_type_name = "Slurm Cluster"
    _block_type_slug = "nightbridge-slurm-cluster"
    _documentation_url = HttpUrl("https://slurm.schedmd.com/sbatch.html")
    _description = "How to reach a Slurm cluster, and under which account, partition and QOS to run there."

    kind: ClusterKind = Field("slurm", description=str(ClusterSettings.model_fields["kind"].description))
    name: str = Field("slurm", description="The cluster's name in histories and reports.")
    containers: ContainerSupport = Field("pyxis", description="How jobs can run in containers here.")

    @model_validator(mode="before")
    @classmethod
    def _read_former_name(cls, values: Any) -> Any:
        """Read a block that was saved when `name` was called `cluster_name`."""
        if not isinstance(values, dict) or "cluster_name" not in values:
            return values
        kept = {field: value for field, value in values.items() if field != "cluster_name"}
        return {"name": values["cluster_name"], **kept} if values["cluster_name"] else kept

    @field_validator("extra_sbatch_args")
    @classmethod
    def _check_one_job(cls, options: tuple[str, ...]) -> tuple[str, ...]:
        for option in options:
            for name in sorted(option_names(option) & NOT_ONE_JOB.keys()):
                raise ValueError(f"{option!r} {'; '.join(NOT_ONE_JOB[name])}")
        return options

    def settings(self) -> ClusterSettings:
        """Build the settings that the domain works with."""
        return self.build(ClusterSettings)

    def open(self, workspace: str | Path = ".nightbridge") -> Cluster:
        """Open the cluster.

        Args:
            workspace: Folder that the compute nodes see under the same path; the embedded cluster keeps its jobs there.
        """
        return open_cluster(self.settings(), Path(workspace).absolute())


class ImageCache(ImportFolders, SettingsBlock):
    """A folder of verified .sqsh images that the compute nodes see.

    Example:
        ```python
        from nightbridge.blocks import ImageCache

        folder = ImageCache.load("BLOCK_NAME").folder
        ```
    """

    _block_type_name = "Image Cache"
    _block_type_slug = "nightbridge-image-cache"
    _documentation_url = HttpUrl("https://github.com/NVIDIA/enroot/blob/master/doc/cmd/import.md")
    _description = "Where pulled container images are kept, on a file system that the compute nodes see."

    folder: str | None = Field(None, description="Folder of images; the workspace's own when empty.")
    import_on: models.Place = Field(
        "host", description="Where imports run: on the host of the flow, or through srun on a compute node."
    )
    credentials: Password = Field(
        None, description="Lines machine HOST login USER password PASSWORD; enroot's own file when empty."
    )

    def settings(self) -> ImageImport:
        """Build the settings that the domain works with; the credentials become a reference to this block.

        Raises:
            ValueError: The block holds credentials and was never saved, so nothing could refer to it.
        """
        return self.build(ImageImport, on=self.import_on)


class SourceRepositories(SettingsBlock):
    """Settings for clones, checkouts and launcher environments.

    Example:
        ```python
        from nightbridge.blocks import SourceRepositories

        timeout = SourceRepositories.load("BLOCK_NAME").git_timeout
        ```
    """

    _block_type_name = "Source Repositories"
    _block_type_slug = "nightbridge-source-repositories"
    _documentation_url = HttpUrl("https://git-scm.com/docs/gitcredentials")
    _description = "How repositories are fetched, and where launcher environments are kept."

    git_timeout: float = Field(600.0, description="Longest time that one git command may take, in seconds.")
    environments: Path | None = Field(None, description="Folder of launcher environments; the workspace's when empty.")
    wheels: Path | None = Field(
        None, description="Folder of wheels to install environments from without network; pip's sources when empty."
    )
    credentials: Password = Field(
        None, description="Lines machine HOST login USER password TOKEN; git's own credential helpers when empty."
    )


class Notifications(MailSettings, SettingsBlock):
    """Mail, a webhook, or both.

    Example:
        ```python
        from nightbridge.blocks import Notifications

        settings = Notifications.load("BLOCK_NAME").settings()
        ```
    """

    _block_type_name = "Notifications"
    _block_type_slug = "nightbridge-notifications"
    _documentation_url = HttpUrl("https://docs.prefect.io/v3/concepts/automations")
    _description = "The mail server, recipients and webhook to notify when a night has no verdict."

    smtp_password: Password = Field(None, description="The user's password.")
    webhook: Password = Field(None, description="URL of a webhook of Slack, Mattermost or Teams.")

    def settings(self) -> NotifySettings:
        """Build the settings that the domain works with; secrets become references to this block.

        Raises:
            ValueError: The block holds secrets and was never saved, or a mail server without anybody to write to.
        """
        return self.build(NotifySettings)


class MailNotification(AppriseNotificationBlock):
    """Mail that an automation sends: Prefect itself has blocks for chats only.

    The server loads it, so nightbridge is to be installed there as well.

    Example:
        ```python
        from nightbridge.blocks import MailNotification

        mail = MailNotification.load("BLOCK_NAME")
        mail.notify("The night is over.")
        ```
    """

    _block_type_name = "Mail Notification"
    _block_type_slug = "nightbridge-mail-notification"
    _documentation_url = HttpUrl("https://docs.prefect.io/v3/concepts/automations")
    _description = "Mail for automations; nightbridge deploy makes one of the [notify] of a site."

    url: SecretStr = Field(
        SecretStr("mailto://localhost"),
        title="Mail server",
        description="Server, login and recipients, as a mailto address of Apprise.",
    )


class SiteBlock(SettingsBlock):
    """Where runs run: workspace, cluster, store, images, repositories.

    Example:
        ```python
        from nightbridge.blocks import SiteBlock

        site = SiteBlock.load("BLOCK_NAME").settings()
        ```
    """

    # Forms, errors and Prefect's schemas show the title: it stays what it was when blocks were saved.
    model_config = ConfigDict(title="Site")

    _block_type_name = "Site"
    _block_type_slug = "nightbridge-site"
    _documentation_url = HttpUrl("https://docs.prefect.io/v3/concepts/blocks")
    _description = "The workspace, cluster, store, image cache and repositories that belong together."

    workspace: str = Field(".nightbridge", description="Folder that the compute nodes see under the same path.")
    cluster: SlurmCluster | None = Field(None, description="The cluster; this machine when empty.")
    store: HarvestStore | None = Field(None, description="The store; a folder of the workspace when empty.")
    images: ImageCache | None = Field(None, description="The image cache; a folder of the workspace when empty.")
    repositories: SourceRepositories | None = Field(None, description="Settings for git and launcher environments.")
    notifications: Notifications | None = Field(
        None, description="Who is notified of a missing verdict; no one when empty."
    )

    def settings(self) -> models.Site:
        """Build the settings that the domain works with."""
        images, repositories = self.images or ImageCache(), self.repositories or SourceRepositories()
        site = repositories.build(
            models.Site,
            workspace=self.workspace,
            cluster=self.cluster.settings() if self.cluster else ClusterSettings(),
            store=self.store.settings() if self.store else None,
            images=images.folder,
            image_import=images.settings(),
            harvest=self.store.harvest_place() if self.store else models.HarvestPlace(),
            git_credentials=repositories.reference("credentials"),
            notify=self.notifications.settings() if self.notifications else NotifySettings(),
        )
        return site.model_copy(update={"workspace": site.workspace.absolute()})


def site_choice(given: Mapping[str, Any]) -> SiteChoice:
    """The choice in the parameters of a flow, a flow run or a deployment; of a block its name counts.

    A flow gets a block that was picked in a form as the block itself, and its flow run has a reference to it.

    Raises:
        InvalidInput: A block was never saved, or does not exist any more.
    """
    return SiteChoice.of({name: _name_of(given.get(name)) for name in SiteChoice.model_fields})


def _name_of(value: Any) -> Any:
    if isinstance(value, dict):
        reference = value["$ref"]
        try:
            value = Block.load_from_ref(reference, _sync=True)  # type: ignore[call-arg]
        except ValueError as error:
            advice = "Pick another one, or save the deployment with one"
            raise InvalidInput("no such block", subject=str(reference), advice=advice) from error
        except RuntimeError as error:
            raise _not_valid(str(reference), error) from error
    if not isinstance(value, Block):
        return value
    if not value._block_document_name:
        raise InvalidInput("a block without a name", subject=value._block_type_name or "block", advice="Save it first")
    return value._block_document_name


def site_of(**given: Any) -> models.Site:
    """Load the site that the parameters of a flow or a flow run name (`site_choice`, `load_site`)."""
    return load_site(site_choice(given))


def load_site(choice: SiteChoice = SiteChoice()) -> models.Site:  # noqa: B008  (frozen)
    """Put a site together from what a person names; the embedded default when nothing is named.

    A cluster, store or workspace that is named wins over the site's.

    Raises:
        InvalidInput: A block or file of that name does not exist, or a field of it is wrong.
    """
    plain = plain_site(choice)
    if plain is None:
        try:
            return _site_with_blocks(choice)
        except ValidationError as error:  # of fields that fit each by itself
            named = ", ".join(filter(None, (choice.system, choice.cluster, choice.store)))
            raise _not_valid(named, error) from error
    site, warnings = plain
    for warning in warnings:
        log.warning("%s", warning)
    return site


def _site_with_blocks(choice: SiteChoice) -> models.Site:
    """Put a site together when at least one of the names is a block's."""
    system, cluster, store = choice.system, choice.cluster, choice.store
    plain = plain_site(SiteChoice(system=system))
    site = plain[0] if plain else _load(SiteBlock, system, "a path ending in .toml").settings()
    changes: dict[str, object] = {"workspace": (choice.workspace or site.workspace).absolute()}
    if cluster:
        named = cluster_called(cluster, site.cluster)
        otherwise = f"{', '.join(PLAIN_CLUSTERS)} or a file ending in .toml"
        changes["cluster"] = named[0] if named else _load(SlurmCluster, cluster, otherwise).settings()
    if store and "://" in store:
        changes["store"] = (site.store or models.StoreSettings(url=store)).model_copy(update={"url": store})
    elif store:
        block = _load(HarvestStore, store, "a file:// or s3:// URL")
        changes |= {"store": block.settings(), "harvest": block.harvest_place()}
    return site.model_copy(update=changes)


def _load(kind: type[B], name: str | None, otherwise: str) -> B:
    title = kind._block_type_name
    try:
        # A coroutine only within a running event loop, which none of the callers has.
        return cast(B, kind.load(str(name), _sync=True))  # type: ignore[call-arg]
    except ValueError as error:
        with get_client(sync_client=True) as client:
            saved = client.read_block_documents_by_type(kind.get_block_type_slug())
        known = f"; there are {', '.join(str(block.name) for block in saved)}" if saved else ""
        advice = f"Make one in the Prefect UI, or give {otherwise}"
        raise InvalidInput(f"no {title} block of this name{known}", subject=str(name), advice=advice) from error
    except RuntimeError as error:
        raise _not_valid(str(name), error) from error


def _not_valid(subject: str, error: Exception) -> InvalidInput:
    """What is wrong in a block: the UI saves what its schema allows, and Prefect names no field when it loads it.

    Raises:
        Exception: The error itself, where it is none of a field.
    """
    wrong = error if isinstance(error, ValidationError) else error.__cause__
    if not isinstance(wrong, ValidationError):
        raise error
    fields = [(".".join([wrong.title, *map(str, each["loc"])]), each["msg"]) for each in wrong.errors()]
    return InvalidInput(
        "this block, or one in it, has a wrong field",
        subject=subject,
        advice="Correct it in the Prefect UI",
        violations=[f"{field}: {said.removeprefix('Value error, ')}" for field, said in fields],
    )
