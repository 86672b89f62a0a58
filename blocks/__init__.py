"""Prefect blocks: the settings of the outside world that people edit in the UI.

A block holds settings and secrets and builds the `nightbridge` object that uses them; it does no work of its own.
Register all of them with `prefect block register -m blocks`.
"""

from blocks.cluster import SlurmCluster
from blocks.images import ImageCache
from blocks.notifications import Notifications
from blocks.repositories import SourceRepositories
from blocks.site import Site, load_site
from blocks.store import HarvestStore

__all__ = [
    "HarvestStore",
    "ImageCache",
    "Notifications",
    "Site",
    "SlurmCluster",
    "SourceRepositories",
    "load_site",
]
