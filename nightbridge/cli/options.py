"""Arguments and options that commands share, and the site and the store that they name."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nightbridge.cli.output import note_all

if TYPE_CHECKING:
    from nightbridge.models import SecretRef, Site
    from nightbridge.slurm.protocol import Cluster
    from nightbridge.store.protocol import ObjectStore

EXIT_INVALID, EXIT_INTERNAL = 2, 4

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout, and nothing else there.")]
SystemOption = Annotated[str | None, typer.Option("--system", help="Site or CloudAI system file, or a Site block.")]
ClusterOption = Annotated[
    str | None, typer.Option("--cluster", help="local, slurm, pyslurm, auto, a file, or a Slurm Cluster block.")
]
StoreOption = Annotated[str | None, typer.Option("--store", help="file:// or s3:// URL, or a Harvest Store block.")]
WorkspaceOption = Annotated[str | None, typer.Option("--workspace", help="Folder that the compute nodes see, too.")]
TestsDirOption = Annotated[
    list[Path] | None, typer.Option("--tests-dir", help="Folder of tests that a scenario names; may be repeated.")
]
ScenarioArgument = Annotated[Path, typer.Argument(metavar="FILE", help="A test or scenario file.")]
RunKeyArgument = Annotated[str, typer.Argument(metavar="RUN_KEY", help="The run's name, as reports and jobs show it.")]
TestIdArgument = Annotated[
    str, typer.Argument(metavar="TEST_ID", help="A test's id, as scenarios and reports show it.")
]


def load_site(
    system: str | None = None, cluster: str | None = None, store: str | None = None, workspace: str | None = None
) -> "Site":
    """Return the site that these options name; Prefect is loaded only for a name that must be a block's."""
    from nightbridge.config.sites import plain_site
    from nightbridge.models import SiteChoice

    choice = SiteChoice.of({"system": system, "cluster": cluster, "store": store, "workspace": workspace})
    plain = plain_site(choice)
    if plain is None:
        from nightbridge import blocks
        from nightbridge.flows.server import reach_server

        reach_server()
        return blocks.load_site(choice)
    site, warnings = plain
    note_all(warnings)
    return site


def open_site_cluster(site: "Site") -> "Cluster":
    """Open the site's cluster."""
    from nightbridge.slurm.factory import cluster_of

    return cluster_of(site)


def open_site_store(site: "Site") -> "ObjectStore":
    """Open the site's store."""
    from nightbridge.store.factory import open_store

    settings = site.store_settings
    return open_store(settings, block_values(settings.access_key, settings.secret_key))


def block_values(*secrets: "SecretRef | None") -> Callable[[str], str] | None:
    """Return the reader of Prefect blocks, or None if none of these secrets is in a block: Prefect stays unloaded."""
    if not any(secret and secret.source == "block" for secret in secrets):
        return None
    from nightbridge.flows.server import reach_server
    from nightbridge.tasks.site import block_value

    reach_server()
    return block_value
