"""Prefect blocks: the settings of the outside world that people edit in the UI.

A block inherits the fields of a settings model and adds secrets. It opens what it describes: `SlurmCluster.open()`
returns a cluster, `HarvestStore.open()` a store. A run carries a block's settings, with references to its secrets.
Register all of them with `prefect block register -m nightbridge.blocks`.
"""

from nightbridge.blocks.site_block import (
    ImageCache,
    MailNotification,
    Notifications,
    SiteBlock,
    SlurmCluster,
    SourceRepositories,
    load_site,
    site_choice,
    site_of,
)
from nightbridge.blocks.store_block import HarvestStore

__all__ = [
    "HarvestStore",
    "ImageCache",
    "MailNotification",
    "Notifications",
    "SiteBlock",
    "SlurmCluster",
    "SourceRepositories",
    "load_site",
    "site_choice",
    "site_of",
]
