"""What `nightbridge doctor` checks: what a night needs on this host, tried in the order of the stages."""

from collections.abc import Callable, Iterator

from nightbridge.errors import NightbridgeError, PermanentError
from nightbridge.files import open_workspace
from nightbridge.images.enroot import find_enroot
from nightbridge.models import Model, Site
from nightbridge.repos.environments import is_base_ready
from nightbridge.repos.git import git_version
from nightbridge.slurm.factory import cluster_of
from nightbridge.store.protocol import ObjectStore


class Check(Model):
    """The result of one check."""

    subject: str
    healthy: bool
    what: str
    advice: str = ""

    def __str__(self) -> str:
        advice = f". {self.advice}" if self.advice else ""
        return f"{'✓' if self.healthy else '✗'} {self.subject:22}{self.what}{advice}"


def checks(site: Site, open_store: Callable[[], ObjectStore]) -> Iterator[Check]:
    """Try what the stages of a night will do: nothing is submitted, and nothing that is written stays.

    Args:
        site: The site to check.
        open_store: Opens its store.

    Returns:
        One check per subject, in the order of the stages. An error of ours is a failed check, never raised.
    """
    by_subject: dict[str, Callable[[], str]] = {
        "workspace": lambda: _workspace(site),
        "git": git_version,
        "launcher environment": lambda: _environment(site),
        "containers": lambda: _containers(site),
        "cluster": lambda: _cluster(site),
        "store": lambda: _store(open_store()),
    }
    for subject, check in by_subject.items():
        try:
            yield Check(subject=subject, healthy=True, what=check())
        except NightbridgeError as error:
            yield Check(subject=subject, healthy=False, what=error.happened, advice=error.advice)


def _workspace(site: Site) -> str:
    open_workspace(site.workspace)
    return f"{site.workspace.absolute()}: can be written; the compute nodes must see it under the same path"


def _environment(site: Site) -> str:
    folder = site.environments_dir.absolute()
    return f"{folder}: installed" if is_base_ready(folder) else f"{folder}: the first run installs it"


def _containers(site: Site) -> str:
    if site.cluster.containers == "none":
        return 'the cluster has none: tests need container_image = "none"'
    if site.image_import.on == "node":
        return "images are imported on a compute node, with its enroot"
    return f"images are imported by {find_enroot(site.image_import).tool}"


def _cluster(site: Site) -> str:
    cluster = cluster_of(site)
    limits = cluster.limits()
    if site.cluster.containers == "pyxis" and not limits.has_pyxis:
        raise PermanentError(
            "srun has no pyxis, but the settings require it",
            thing=site.cluster.name,
            advice='Install pyxis, or set containers = "none"',
        )
    facts = {
        "partition": limits.partition,
        "account": limits.account,
        "nodes of one job": limits.max_nodes,
        "GPUs of a node": limits.gpus_per_node,
    }
    known = [f"{name} {value}" for name, value in facts.items() if value is not None]
    return f"{site.cluster.name}: " + ", ".join((cluster.description, *known))


def _store(store: ObjectStore) -> str:
    store.check_writable()
    return f"{store.url}: can be written"
