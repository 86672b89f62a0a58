"""Stage 2, container: a verified image, or the declared absence of one."""

from prefect.logging import get_run_logger

from nightbridge.images.image import Importer, find_importer, pull_image
from nightbridge.models import Image, RunSpec, Site
from nightbridge.secrets import resolve_secret
from tasks.secrets import block_value
from tasks.stage import stage


@stage("container")
def container(run: RunSpec, site: Site) -> Image:
    """Pull and verify the run's container image."""
    image = pull_image(run, site, lambda: _importer(site))
    get_run_logger().info("container: %s", image.path or "none, as the configuration says")
    return image


def _importer(site: Site) -> Importer:
    """What imports here, with the site's login. Asked only when there is something to import."""
    named = site.image_import.credentials
    return find_importer(site.image_import, resolve_secret(named, block_value) if named else "")
