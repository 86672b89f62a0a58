"""What the stages open of a site, with its secrets: its store, and its repositories logged in.

Prefect blocks are one of the places where secrets may be kept, so they are looked up here and not in the domain.
"""

import contextlib
import functools
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import cast

from prefect.blocks.core import Block
from prefect.blocks.system import Secret
from prefect.settings import get_current_settings
from pydantic import SecretStr

from nightbridge.blocks import HarvestStore
from nightbridge.errors import InvalidInput
from nightbridge.models import RangeCommit, SecretRef, Site, SiteChoice
from nightbridge.node_programs import RunOnNode
from nightbridge.repos import commits
from nightbridge.repos.git import git_logins
from nightbridge.secrets import named_secrets, resolve_secret
from nightbridge.slurm.node_command import run_on_node
from nightbridge.store.object_store import ObjectStore, open_store
from nightbridge.tasks.context import this_flow_run
from nightbridge.tasks.prefect_calls import away_is_transient, insist, on_server, tagged


def block_value(name: str) -> str:
    """Read a secret from a block: `NAME` of a Secret block, or `BLOCK TYPE/NAME#FIELD` of any other.

    Raises:
        InvalidInput: There is no such block or field.
        PrefectAway: Prefect's server does not answer.
    """
    document, _, field = name.partition("#")
    try:
        with away_is_transient(f"block {document}"):
            # Called from an async flow, Prefect would return a coroutine.
            block = (Block if field else Secret).load(document, _sync=True)  # type: ignore[call-arg]
            value = getattr(block, field) if field else cast("Secret[str]", block).get()
    except (ValueError, AttributeError) as error:
        raise InvalidInput("no such Prefect block", subject=name, advice="Make it in the Prefect UI") from error
    return value.get_secret_value() if isinstance(value, SecretStr) else str(value)


def store_of(site: Site) -> ObjectStore:
    """Open a site's store. Nothing is read or written yet.

    Raises:
        InvalidInput: The store's URL or settings cannot work, or a secret is not where the site names it.
    """
    return open_store(site.store_settings, block_value)


def check_as_deployed(site: Site) -> None:
    """Refuse a site that lacks the cluster or the store that its deployment was made with.

    A Site block whose Slurm Cluster or Harvest Store block was deleted loads as one that never had any. The night would
    run on the worker's own machine, or begin another history: nothing to compare with, and green. Where a form named
    another site, that one is meant.

    Raises:
        InvalidInput: It does.
    """
    flow_run = this_flow_run()
    without_cluster, without_store = site.cluster.kind == "local", site.store is None
    if flow_run is None or flow_run.deployment_id is None or not (without_cluster or without_store):
        return
    deployment_id, given = flow_run.deployment_id, flow_run.parameters
    made = insist("the deployment", on_server(lambda client: client.read_deployment(deployment_id)))
    if any(made.parameters.get(name) != given.get(name) for name in SiteChoice.model_fields):
        return
    cluster = tagged(made.tags, "cluster")
    if without_cluster and cluster not in ("", site.cluster.name):
        raise _is_gone(f"Slurm Cluster block, and its deployment is for the cluster {cluster}")
    kept = get_current_settings().results.default_storage_block or ""
    kind, _, name = kept.partition("/")
    if without_store and kind == HarvestStore.get_block_type_slug():
        read = on_server(lambda client: client.read_block_document_by_name(name, kind))
        url = str(insist("the deployment's store", read).data.get("url", ""))
        if not (url.startswith("file://") and url.endswith("/store")):  # not that of a workspace, which may have moved
            raise _is_gone(f"Harvest Store block, and its deployment keeps everything in {url}")


def _is_gone(what: str) -> InvalidInput:
    advice = "Pick the block again, or call `nightbridge deploy` with the site as it is now"
    return InvalidInput(f"has no {what}", subject="the Site block", advice=advice)


def resolve_all(references: Mapping[str, SecretRef]) -> dict[str, str]:
    """Look up the values of a plan's secrets, for the environment of the process that needs them."""
    return {variable: resolve_secret(reference, block_value) for variable, reference in references.items()}


def resolve_secrets(references: Iterable[SecretRef | None]) -> dict[SecretRef, str]:
    """Look up the values of secrets, by their references."""
    return {found: resolve_secret(found, block_value) for found in references if found}


def site_secrets(site: Site) -> dict[SecretRef, str]:
    """The values of all secrets that a site names, by their references, to be masked: one that is missing has none.

    Raises:
        PrefectAway: Prefect's server does not answer.
    """
    found = {}
    for _, reference in named_secrets(site):
        with contextlib.suppress(InvalidInput):
            found[reference] = resolve_secret(reference, block_value)
    return found


def secret_variables(site: Site) -> frozenset[str]:
    """The environment variables that hold secrets of the site, which no launcher and no job should inherit."""
    return frozenset(reference.name for _, reference in named_secrets(site) if reference.source == "env")


def node_runner(site: Site, options: Sequence[str], what: str, advice: str) -> RunOnNode:
    """What runs a program on a compute node of the site, through srun.

    Args:
        site: The site.
        options: Further options of srun.
        what: What is to be done there, for the error.
        advice: What to do where the cluster has no nodes to do it on.

    Raises:
        InvalidInput: The site's cluster is the embedded one.
    """
    if site.cluster.kind == "local":
        raise InvalidInput(
            f"{what} on a compute node, and this cluster has no Slurm", subject=site.cluster.name, advice=advice
        )
    return functools.partial(run_on_node, site.cluster, options=options)


def image_login(site: Site) -> str:
    """The site's logins to registries, as lines of netrc(5); empty where the tools' own files have them.

    Raises:
        InvalidInput: The secret is not where the site names it.
    """
    named = site.image_import.credentials
    return resolve_secret(named, block_value) if named else ""


def site_logins(site: Site) -> AbstractContextManager[None]:
    """Let git log in with the site's secret for the length of a block; git's own helpers do where it names none.

    Raises:
        InvalidInput: The secret is not where the site names it.
    """
    named = site.git_credentials
    return git_logins(resolve_secret(named, block_value) if named else "")


def commits_between(site: Site, url: str, good: str, bad: str) -> tuple[RangeCommit, ...]:
    """As `nightbridge.repos.commits.commits_between`, logged in: a commit that the mirror lacks is fetched."""
    with site_logins(site):
        return commits.commits_between(site, url, good, bad)


def commit_named(site: Site, url: str, name: str) -> str:
    """As `nightbridge.repos.commits.commit_named`, logged in."""
    with site_logins(site):
        return commits.commit_named(site, url, name)


def open_bumps(site: Site, url: str, commit: RangeCommit) -> RangeCommit:
    """As `nightbridge.repos.commits.open_bumps`, logged in: submodules that are not mirrored yet are."""
    with site_logins(site):
        return commits.open_bumps(site, url, commit)
