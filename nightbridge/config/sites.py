"""System files of CloudAI and nightbridge's own site files to `Site`."""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import Field

from nightbridge.config.arguments import looks_secret, names_secret, read_secret
from nightbridge.config.cloudai_compat import check_options, sbatch_options
from nightbridge.config.documents import (
    AnyModel,
    Document,
    Findings,
    KeyPath,
    Layer,
    Layered,
    overlay,
    read_document,
    validated,
)
from nightbridge.errors import InvalidInput
from nightbridge.launch.flags import why_unsafe_variable
from nightbridge.models import ClusterKind, ClusterSettings, Model, Site, SiteChoice, StoreSettings

_CLOUDAI_ONLY = frozenset({"scheduler", "install_path", "output_path", "default_partition", "partitions"})

CLOUDAI_IGNORED: Mapping[str, str] = {
    "hf_home_path": "has no effect: set HF_HOME in the tests' extra_env_vars",
    "partitions": "has no effect: partitions are read from the cluster",
    "distribution": "has no effect in this version",
    "mpi": "has no effect: the launcher requests pmix itself",
    "ntasks_per_node": "has no effect: the launcher starts one task for each GPU",
    "cache_docker_images_locally": "has no effect: images are always imported, verified and kept",
    "extra_transient_status_errors": "has no effect: failed status queries are always retried",
    "status_retry_pause_seconds": "has no effect: failed status queries are always retried",
    "container_mount_home": "has no effect: the launcher never mounts the home directory",
    "data_repository": "has no effect: results go to the store",
    "reports": "has no effect: every night has one report",
}
"""Fields of a CloudAI system file that are accepted and do nothing here."""

PLAIN_CLUSTERS: Mapping[str, ClusterSettings] = {
    kind: ClusterSettings(kind=kind, name="local" if kind == "local" else "slurm") for kind in get_args(ClusterKind)
}
"""Clusters that need no file and no block."""

THIS_MACHINE = "this-machine"
"""What the cluster `local` is called beside a site's own Slurm of that name."""

_SECRETS = (
    *(("git_credentials",), ("store", "access_key"), ("store", "secret_key"), ("image_import", "credentials")),
    *(("notify", "smtp_password"), ("notify", "webhook")),
)
"""The keys of a site file that are secrets."""


class CloudaiSystem(Model):
    """The fields of a CloudAI system file that have an effect here."""

    name: str
    scheduler: Literal["slurm"] = "slurm"
    install_path: Path | None = None
    output_path: Path | None = None
    default_partition: str | None = None
    account: str | None = None
    gpus_per_node: int | None = None
    extra_sbatch_args: tuple[str, ...] = ()
    extra_srun_args: str | tuple[str, ...] = ()
    global_env_vars: dict[str, str] = Field(default={})
    monitor_interval: float | None = None


def read_site_file(path: Path) -> tuple[Site, tuple[str, ...]]:
    """Read a CloudAI system file or a site file.

    A site file has the fields of `Site`: `workspace`, `[cluster]`, `[store]` and so on. Secrets, such as the store's
    keys, are written as `env:NAME` or `block:NAME`.

    Returns:
        The site, and warnings about the file.

    Raises:
        InvalidInput: The file cannot be read or something in it is wrong; every violation is reported.
    """
    document = read_document(Path(path))
    findings = Findings(Layered([Layer(document.table, document)]))
    read = _cloudai_site if _CLOUDAI_ONLY & document.table.keys() else _own_site
    site = validated(Site, read(document, findings), findings)
    if site is not None:
        check_options(site.cluster.extra_sbatch_args, ("cluster", "extra_sbatch_args"), findings)
        _check_variables(site.cluster.env_vars, findings)
        site = at_home(site)
        if document.table.get("workspace") == "":
            findings.problem(("workspace",), "is empty; write the folder that the compute nodes see")
        for key in ("url", "endpoint_url"):
            if site.store is not None and looks_secret(getattr(site.store, key) or ""):
                what = "contains a password, which logs would show; write access_key and secret_key"
                findings.problem(("store", key), what)
    if site is None or findings.problems:
        raise InvalidInput("the system file is not valid", subject=str(path), violations=[*map(str, findings.problems)])
    return site, tuple(map(str, findings.warnings))


def at_home(settings: AnyModel) -> AnyModel:
    """The same settings, with the home that `~` is in every path: no shell has read the file or the block."""
    changed: dict[str, object] = {}
    for name, value in settings:
        there = at_home(value) if isinstance(value, Model) else value
        there = Path(os.path.expanduser(value)) if isinstance(value, Path) else there
        if there != value:
            changed[name] = there
    return settings.model_copy(update=changed)


def _check_variables(variables: Mapping[str, str], findings: Findings) -> None:
    """Refuse variables of every run without a valid name, and warn of secrets: all are in the launcher's arguments.

    One of a CloudAI system file that is named like a secret is refused.
    """
    is_cloudai = "global_env_vars" in findings.source.table
    base: KeyPath = ("global_env_vars",) if is_cloudai else ("cluster", "env_vars")
    for name, value in variables.items():
        if problem := why_unsafe_variable(name, ""):
            findings.problem((*base, name), problem)
        named = names_secret(name, value)
        if named and is_cloudai:
            findings.problem((*base, name), "contains a secret; write it as env:NAME in the tests' extra_env_vars")
        elif named or looks_secret(value):
            findings.warn(
                (*base, name),
                "contains a secret, which process lists and logs will show; write it as env:NAME in the tests' "
                "extra_env_vars",
            )


def plain_site(choice: SiteChoice) -> tuple[Site, tuple[str, ...]] | None:
    """Put a site together from files, URLs and the plain cluster names; None where a name can only be a block's.

    Of a cluster that is the path of a file, that file's cluster is meant. Endpoint and credentials of a store that is
    named by its URL stay those of the system file.

    Returns:
        The site, and warnings about the files.

    Raises:
        InvalidInput: A file cannot be read or something in it is wrong.
    """
    system, cluster, store = choice.system, choice.cluster, choice.store
    if (system and not system.endswith(".toml")) or (store and "://" not in store):
        return None
    site, warnings = read_site_file(Path(system)) if system else (Site(), ())
    changes: dict[str, Any] = {"workspace": (choice.workspace or site.workspace).absolute()}
    if cluster:
        named = cluster_called(cluster, site.cluster)
        if named is None:
            return None
        changes["cluster"], warnings = named[0], (*warnings, *named[1])
    if store:
        changes["store"] = (site.store or StoreSettings(url=store)).model_copy(update={"url": store})
    return site.model_copy(update=changes), warnings


_SERVER_SETTING = re.compile(r"PREFECT_API_URL|^\s*(?:api\.)?url\s*=", re.MULTILINE)


def may_have_blocks() -> bool:
    """Whether the files and variables of Prefect's settings may name a server; importing Prefect takes a second."""
    home = Path(os.environ.get("PREFECT_HOME", "~/.prefect")).expanduser()
    profiles = Path(os.environ.get("PREFECT_PROFILES_PATH", home / "profiles.toml"))
    files = filter(Path.is_file, (Path(".env"), Path("prefect.toml"), Path("pyproject.toml"), profiles))
    return "PREFECT_API_URL" in os.environ or any(
        _SERVER_SETTING.search(file.read_text(encoding="utf-8", errors="replace")) for file in files
    )


def no_block(choice: SiteChoice, server: str = "no Prefect server is configured") -> InvalidInput:
    """The error of a name that only a block could have, where there is no server with blocks; `server` says why."""
    named = (name for name in (choice.cluster, choice.store, choice.system) if name)
    what = f"no cluster, store or site of this name, and {server} that could have a block of it"
    advice = f"Give {', '.join(PLAIN_CLUSTERS)}, a URL or a file ending in .toml, or set PREFECT_API_URL"
    return InvalidInput(what, subject=next(named, ""), advice=advice)


def cluster_called(name: str, own: ClusterSettings) -> tuple[ClusterSettings, tuple[str, ...]] | None:
    """The cluster that a name means at a site with a cluster of its own, and warnings about its file.

    `local` is this machine, also where a Slurm bears that name. For the site's own Slurm a plain name only selects the
    interface. None where the name can only be a block's.
    """
    warnings: tuple[str, ...] = ()
    if name == own.kind or (name == own.name and name != "local"):
        return own, warnings
    if name.endswith(".toml"):
        site, warnings = read_site_file(Path(name))
        other = site.cluster
    elif name not in PLAIN_CLUSTERS:
        return None
    elif "local" in (name, own.kind):
        other = PLAIN_CLUSTERS[name]
    else:
        return own.model_copy(update={"kind": name}), warnings
    # Never under the name of the site's own: nights, series and turns go by that alone.
    is_twice = other.kind == "local" != own.kind and other.name == own.name
    return other.model_copy(update={"name": THIS_MACHINE}) if is_twice else other, warnings


def _cloudai_site(document: Document, findings: Findings) -> dict[str, Any]:
    system = validated(
        CloudaiSystem, findings.taken(document.table, CLOUDAI_IGNORED), findings, also_known=CLOUDAI_IGNORED
    )
    if system is None:
        return {}
    cluster: dict[str, Any] = {
        "kind": "slurm",
        "name": system.name,
        "partition": system.default_partition,
        "account": system.account,
        "gpus_per_node": system.gpus_per_node,
        "extra_sbatch_args": (*system.extra_sbatch_args, *sbatch_options(system.extra_srun_args, findings)),
        "env_vars": system.global_env_vars,
        "poll_interval": system.monitor_interval,
        "containers": "pyxis",  # CloudAI refuses a cluster without it
    }
    changes: dict[str, Any] = {"cluster": {key: value for key, value in cluster.items() if value not in (None, (), {})}}
    if system.output_path is not None:
        changes["workspace"] = system.output_path
    if system.install_path is not None:
        changes |= {"environments": system.install_path / "envs", "images": system.install_path / "images"}
    return changes


def _own_site(document: Document, findings: Findings) -> dict[str, Any]:
    """A secret written as text is a reference; a literal one becomes a reference to its own file and key."""
    table = document.table
    for path in _SECRETS:
        *outer, key = path
        inner = table.get(outer[0]) if outer else table
        if isinstance(inner, dict) and isinstance(inner.get(key), str):
            read = {key: read_secret(inner[key], path, findings)}
            table = overlay(table, {outer[0]: read} if outer else read)
    return table
