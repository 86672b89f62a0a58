"""Prefect blocks: the settings of the outside world that people edit in the UI.

A block holds settings and secrets and builds the `nightbridge` object that uses them; it does no work of its own.
Register all of them with `prefect block register -m nightbridge.blocks`.
"""

from nightbridge.blocks.cluster import SlurmCluster
from nightbridge.blocks.images import ImageCache
from nightbridge.blocks.notifications import Notifications
from nightbridge.blocks.repositories import SourceRepositories
from nightbridge.blocks.site import Site, load_site
from nightbridge.blocks.store import HarvestStore

__all__ = [
    "HarvestStore",
    "ImageCache",
    "Notifications",
    "Site",
    "SlurmCluster",
    "SourceRepositories",
    "load_site",
]
