"""Stage 2, container: a verified image, or the declared absence of one."""

import functools
from collections.abc import Callable, Mapping

from prefect.logging import get_run_logger

from nightbridge.errors import InvalidInput
from nightbridge.images.enroot import find_enroot
from nightbridge.images.image import Importer, pull_image
from nightbridge.images.on_node import NodeImporter
from nightbridge.models import Image, RunSpec, Site
from nightbridge.secrets import resolve_secret
from nightbridge.slurm.node_command import run_on_node
from nightbridge.tasks.mirror import PrefectAway
from nightbridge.tasks.secrets import block_value
from nightbridge.tasks.stage import stage


@stage("container", waits_for=(PrefectAway,))
def container(run: RunSpec, site: Site) -> Image:
    """Pull and verify the run's container image."""
    image = pull_image(run, site, lambda: _importer(site))
    get_run_logger().info("container: %s", image.path or "none, as the configuration says")
    return image


def _importer(site: Site) -> Importer:
    """What imports where the site wants it, with the site's login. Asked only when there is something to import."""
    named = site.image_import.credentials
    return _IMPORTERS[site.image_import.on](site, resolve_secret(named, block_value) if named else "")


def _on_this_host(site: Site, credentials: str) -> Importer:
    return find_enroot(site.image_import, credentials)


def _on_a_node(site: Site, credentials: str) -> Importer:
    if site.cluster.kind == "local":
        raise InvalidInput(
            "images are to be imported on a compute node, and this cluster has no Slurm",
            thing=site.cluster.name,
            advice='Set on = "host" in [image_import], or import_on of the Image Cache block',
        )
    srun = functools.partial(run_on_node, site.cluster, options=site.image_import.srun_args)
    return NodeImporter(srun, site.image_import, credentials)


_IMPORTERS: Mapping[str, Callable[[Site, str], Importer]] = {"host": _on_this_host, "node": _on_a_node}
