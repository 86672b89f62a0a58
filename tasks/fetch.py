"""Stages 1 and 2, clone and container: what a run is made of, verified.

Both repositories at exact commits with the launcher's environment, and an image or the declared absence of one.
"""

from prefect.logging import get_run_logger

from nightbridge.errors import StatusUnknown
from nightbridge.images.enroot import find_enroot
from nightbridge.images.image import Importer, pull_image
from nightbridge.images.on_node import NodeImporter
from nightbridge.models import Checkout, Image, RunSpec, Site
from nightbridge.repos.clone import make_checkout
from nightbridge.slurm.protocol import JobNotAccepted
from nightbridge.tasks.mirror import PrefectAway
from nightbridge.tasks.site import image_login, node_runner, site_logins
from nightbridge.tasks.stage import stage


@stage("clone", waits_for=(PrefectAway,))
def clone(run: RunSpec, site: Site) -> Checkout:
    """Pin Megatron-Bridge and NeMo-Run for this night and make their checkouts."""
    with site_logins(site):
        checkout = make_checkout(run, site)
    log = get_run_logger()
    for repository in checkout.repositories:
        log.info("%s at %s (%s) %s", repository.url, repository.commit[:12], repository.ref, repository.subject)
    return checkout


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
