"""Stage 2, container: a verified image, or the declared absence of one."""

from prefect.logging import get_run_logger

from nightbridge.errors import StatusUnknown
from nightbridge.images.enroot import find_enroot
from nightbridge.images.image import Importer, pull_image
from nightbridge.images.on_node import NodeImporter
from nightbridge.models import Image, RunSpec, Site
from nightbridge.slurm.protocol import JobNotAccepted
from nightbridge.tasks.mirror import PrefectAway
from nightbridge.tasks.site import image_login, node_runner
from nightbridge.tasks.stage import stage


@stage("container", waits_for=(JobNotAccepted, StatusUnknown, PrefectAway))
def container(run: RunSpec, site: Site) -> Image:
    """Pull and verify the run's container image."""
    image = pull_image(run, site, lambda: _importer(site))
    get_run_logger().info("container: %s", image.path or "none, as configured")
    return image


def _importer(site: Site) -> Importer:
    """What imports where the site wants it, with the site's login. Made only when there is something to import."""
    settings, login = site.image_import, image_login(site)
    if settings.on == "host":
        return find_enroot(settings, login)
    advice = 'Set on = "host" in [image_import], or import_on of the Image Cache block'
    srun = node_runner(site, settings.srun_args, "images are to be imported", advice)
    return NodeImporter(srun, settings, login)
