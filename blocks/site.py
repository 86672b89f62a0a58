"""Site: everything a run needs to know about the place it runs in, put together from the other blocks."""

import logging
from pathlib import Path
from typing import TypeVar, cast

from prefect.blocks.core import Block
from pydantic import Field

from nightbridge import models
from nightbridge.blocks.cluster import SlurmCluster
from nightbridge.blocks.images import ImageCache
from nightbridge.blocks.notifications import Notifications
from nightbridge.blocks.repositories import SourceRepositories
from nightbridge.blocks.store import HarvestStore
from nightbridge.config.sites import plain_site
from nightbridge.errors import InvalidInput

B = TypeVar("B", bound=Block)

log = logging.getLogger(__name__)


class Site(Block):
    """The place that runs run in: workspace, cluster, store, images, repositories.

    Example:
        ```python
        from nightbridge.blocks import Site

        site = Site.load("BLOCK_NAME").settings()
        ```
    """

    _block_type_name = "Site"
    _block_type_slug = "nightbridge-site"
    _description = "The workspace, cluster, store, image cache and repositories that belong together."

    workspace: str = Field(".nightbridge", description="Folder that the compute nodes see under the same path.")
    cluster: SlurmCluster | None = Field(None, description="The cluster; this machine when empty.")
    store: HarvestStore | None = Field(None, description="The store; a folder of the workspace when empty.")
    images: ImageCache | None = Field(None, description="The image cache; a folder of the workspace when empty.")
    repositories: SourceRepositories | None = Field(None, description="Settings for git and launcher environments.")
    notifications: Notifications | None = Field(None, description="Who is told what matters; nobody when empty.")

    def settings(self) -> models.Site:
        """Build the settings that the domain works with."""
        images = self.images or ImageCache()
        repositories = self.repositories or SourceRepositories()
        return models.Site(
            workspace=Path(self.workspace).absolute(),
            cluster=self.cluster.settings() if self.cluster else models.ClusterSettings(),
            store=self.store.settings() if self.store else None,
            images=Path(images.folder) if images.folder else None,
            image_import=images.settings(),
            harvest=self.store.place() if self.store else models.HarvestPlace(),
            wheels=Path(repositories.wheels) if repositories.wheels else None,
            environments=Path(repositories.environments) if repositories.environments else None,
            git_timeout=repositories.git_timeout,
            git_credentials=repositories.credentials_reference(),
            notify=self.notifications.settings() if self.notifications else models.NotifySettings(),
        )


def load_site(
    system: str | None = None, *, cluster: str | None = None, store: str | None = None, workspace: str | None = None
) -> models.Site:
    """Put a site together from what a person names; the embedded default when nothing is named.

    Args:
        system: Name of a Site block, or path of a site or CloudAI system file.
        cluster: `local`, `slurm`, or the name of a Slurm Cluster block; wins over the site's.
        store: `file://` or `s3://` URL, or the name of a Harvest Store block; wins over the site's.
        workspace: Folder; wins over the site's.

    Raises:
        InvalidInput: A block or file of that name does not exist.
    """
    plain = plain_site(system, cluster=cluster, store=store, workspace=workspace)
    if plain is None:
        return _site_with_blocks(system, cluster, store, workspace)
    site, warnings = plain
    for warning in warnings:
        log.warning("%s", warning)
    return site


def _site_with_blocks(system: str | None, cluster: str | None, store: str | None, workspace: str | None) -> models.Site:
    """Put a site together when at least one of the names is a block's."""
    plain = plain_site(system)
    site = plain[0] if plain else _load(Site, system, "a path ending in .toml").settings()
    changes: dict[str, object] = {"workspace": Path(workspace or site.workspace).absolute()}
    if cluster and cluster not in (site.cluster.kind, site.cluster.name):
        known = plain_site(cluster=cluster)
        changes["cluster"] = known[0].cluster if known else _load(SlurmCluster, cluster, "local or slurm").settings()
    if store and "://" in store:
        changes["store"] = (site.store or models.StoreSettings(url=store)).model_copy(update={"url": store})
    elif store:
        block = _load(HarvestStore, store, "a file:// or s3:// URL")
        changes |= {"store": block.settings(), "harvest": block.place()}
    return site.model_copy(update=changes)


def _load(kind: type[B], name: str | None, otherwise: str) -> B:
    try:
        # A coroutine only within a running event loop, which none of the callers has.
        return cast(B, kind.load(str(name)))
    except ValueError as error:
        title = kind._block_type_name
        raise InvalidInput(
            f"no {title} block of this name", thing=str(name), advice=f"Make one in the Prefect UI, or give {otherwise}"
        ) from error
