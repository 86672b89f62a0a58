"""Stage 2, container: a verified image, or the declared absence of one."""

from prefect.logging import get_run_logger

from nightbridge.images.image import pull_image
from nightbridge.models import Image, RunSpec, Site
from tasks.stage import stage


@stage("container")
def container(run: RunSpec, site: Site) -> Image:
    """Pull and verify the run's container image."""
    image = pull_image(run, site)
    get_run_logger().info("container: %s", image.path or "none, as the configuration says")
    return image
