"""Stage 1, clone: both repositories at exact commits, and the launcher's environment."""

from prefect.logging import get_run_logger

from nightbridge.models import Checkout, RunSpec, Site
from nightbridge.repos.clone import make_checkout
from nightbridge.tasks.mirror import PrefectAway
from nightbridge.tasks.site import site_logins
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
