"""What `nightbridge doctor` and a block's check look at: what a night needs on this host."""

import importlib.metadata
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from nightbridge.errors import NightbridgeError, PermanentError, TransientError
from nightbridge.files import open_workspace
from nightbridge.images.enroot import find_enroot
from nightbridge.launch.launch_plan import check_workspace
from nightbridge.models import Model, Site
from nightbridge.nights.prefect_api import configured_server, prefect_home
from nightbridge.repos.environments import is_base_ready
from nightbridge.repos.git import git_version
from nightbridge.secrets import named_secrets, resolve_secret
from nightbridge.slurm.factory import cluster_of
from nightbridge.slurm.protocol import Cluster
from nightbridge.slurm.script import GUARD_CODES
from nightbridge.store.directory import DirectoryStore
from nightbridge.store.object_store import ObjectStore

LEAST_FREE = 2_000_000_000
"""Bytes on the file system of the workspace: a checkout of Megatron-Bridge and the launcher's packages take one."""

MAX_CLOCK_DIFFERENCE = 5.0
"""Seconds between this host's clock and the file server's: what came first in a night is told by both."""

_USUAL_ENDS = frozenset({*range(3), *GUARD_CODES, *range(124, 144)})
"""Exit codes of batch scripts: done, failed, called wrongly; the guard's; a shell's for timeouts, missing programs and
signals."""

_LEASE_STORAGE = "prefect.server.concurrency.lease_storage."


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
    """Try what the stages of a night will do: nothing is submitted, and nothing is created.

    Returns:
        One check per subject, in the order of the stages. An error of ours is a failed check, never raised.
    """
    by_subject: dict[str, Callable[[], str]] = {
        "workspace": lambda: _workspace(site),
        "secrets": lambda: _secrets(site),
        "git": git_version,
        "launcher environment": lambda: _environment(site),
        "containers": lambda: _containers(site),
        "cluster": lambda: _cluster(site),
        "store": lambda: _store(site, open_store),
        "Prefect API": lambda: _prefect_api(site),
    }
    for subject, check in by_subject.items():
        try:
            yield Check(subject=subject, healthy=True, what=check())
        except NightbridgeError as error:
            yield Check(subject=subject, healthy=False, what=error.happened, advice=error.advice)


def _workspace(site: Site) -> str:
    check_workspace(site.workspace)
    found = _folder(site.workspace.absolute())
    if site.workspace.is_dir():
        open_workspace(site.workspace)
        _check_clock(site.workspace)
    return f"{found}; the compute nodes must see it under the same path"


def _check_clock(folder: Path) -> None:
    """Compare this host's clock with the one that dates the files in a folder, which may be another machine's.

    Raises:
        PermanentError: They are too far apart.
    """
    before = time.time()
    with tempfile.TemporaryFile(dir=folder) as stream:
        of_files = os.fstat(stream.fileno()).st_mtime
    after = time.time()
    if max(before - of_files, of_files - after) > MAX_CLOCK_DIFFERENCE:
        what = f"this host's clock and that of its files are {abs(after - of_files):,.0f} s apart"
        raise PermanentError(what, subject=str(folder), advice="Set the clocks of this host and of its file server")


def _folder(folder: Path) -> str:
    """Whether a folder can be written or made by the first night, on which mount, and how much is free there.

    Raises:
        PermanentError: It does not exist and neither does the folder above it, it is a file, not writable or full.
    """
    there = folder if folder.exists() else folder.parent
    if not there.exists():
        what = f"does not exist, and neither does {there}"
        raise PermanentError(what, subject=str(folder), advice="Mount it, or correct the path")
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        advice = "Choose another folder, or get write access to this one"
        raise PermanentError("not a folder that can be written", subject=str(there), advice=advice)
    mount, kind = _mount_of(there)
    free = shutil.disk_usage(there).free
    if free < LEAST_FREE:
        what = f"{free / 1e6:,.0f} MB are free on the {kind} mounted at {mount}"
        advice = f"Free space: a night needs {LEAST_FREE / 1e9:.0f} GB for checkouts and launchers alone"
        raise PermanentError(what, subject=str(folder), advice=advice)
    state = "can be written" if there == folder else "the first night makes it"
    return f"{folder}: {state}; {kind} mounted at {mount}, {free / 1e9:,.0f} GB free"


def _check_beside(site: Site, folder: Path) -> None:
    """As `_folder`, for one that may lie elsewhere; in the workspace it is made with it."""
    if folder.exists() or not folder.is_relative_to(site.workspace.absolute()):
        _folder(folder)


def _mount_of(folder: Path) -> tuple[str, str]:
    """Mount point and file system type of a folder, from proc_pid_mountinfo(5); a later mount hides earlier ones."""
    mounts = [line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    points = {fields[4]: fields[fields.index("-") + 1] for fields in mounts}
    point = next(str(path) for path in (folder.resolve(), *folder.resolve().parents) if str(path) in points)
    return point, points[point]


def _secrets(site: Site) -> str:
    """The secrets that the site names; those in Prefect blocks are left to the checks that need them.

    Raises:
        PermanentError: Some are missing: all of them are named, each by its key in the site file.
    """
    named = dict(named_secrets(site))
    missing = []
    for key, ref in named.items():
        try:
            if ref.source != "block":
                resolve_secret(ref)
        except NightbridgeError as error:
            missing.append(f"{key}: {error.happened}")
    if missing:
        raise PermanentError("; ".join(missing), advice="Set them where nights are started")
    return f"{', '.join(named)}: all there" if named else "the site names none"


def _environment(site: Site) -> str:
    folder = site.environments_dir.absolute()
    _check_beside(site, folder)  # each new commit of NeMo-Run adds to it
    return f"{folder}: installed" if is_base_ready(folder) else f"{folder}: the first run installs it"


def _containers(site: Site) -> str:
    if site.cluster.containers == "none":
        return 'the cluster has none: tests need container_image = "none"'
    _check_beside(site, site.images_dir.absolute())
    if site.image_import.on == "node":
        return "images are imported on a compute node, with its enroot"
    return f"images are imported by {find_enroot(site.image_import).tool}"


def _cluster(site: Site) -> str:
    cluster = cluster_of(site)
    limits = cluster.limits()
    if site.cluster.containers == "pyxis" and not limits.has_pyxis:
        advice = 'Install pyxis, or set containers = "none"'
        raise PermanentError("srun has no pyxis, but the settings require it", subject=site.cluster.name, advice=advice)
    if not limits.has_partition:
        there_are = f"Name {' or '.join(limits.partitions)} as the cluster's partition"
        raise PermanentError(f"no partition {limits.partition!r}", subject=site.cluster.name, advice=there_are)
    if not limits.has_account:
        these_may = f"Name {' or '.join(limits.accounts or ())} as the cluster's account"
        what = f"account {limits.account!r} may not submit to partition {limits.partition!r}"
        raise PermanentError(what, subject=site.cluster.name, advice=these_may)
    facts = {
        "partition": limits.partition,
        "account": limits.account,
        "nodes of one job": limits.max_nodes,
        "GPUs of a node": limits.gpus_per_node,
    }
    known = [f"{name} {value}" for name, value in facts.items() if value is not None]
    return f"{site.cluster.name}: " + ", ".join((cluster.description, *known, *_rerun_exits(cluster)))


def _rerun_exits(cluster: Cluster) -> Iterator[str]:
    """The exit codes with which Slurm puts an ended job back into the queue: `--no-requeue` does not prevent that.

    Raises:
        PermanentError: Batch scripts usually end with one of them.
    """
    effects = {"RequeueExit": "starts it again, which the guard ends", "RequeueExitHold": "holds it in the queue"}
    for key, effect in effects.items():
        if (value := cluster.configured(key)) is None:
            continue
        ranges = re.findall(r"(\d+)(?:-(\d+))?", value)
        codes = {code for first, last in ranges for code in range(int(first), int(last or first) + 1)}
        what = f"{key} {value} (a job that ends with such a code is not over: Slurm {effect}, --no-requeue or not)"
        if codes & _USUAL_ENDS:
            raise PermanentError(
                what,
                subject=cluster.settings.name,
                advice="Ask the site to leave out of it how batch scripts end: 0 to 2, 77 to 79 (nightbridge's guard) "
                "and 124 to 143 (timeouts, missing programs, signals)",
            )
        yield what


def _store(site: Site, open_store: Callable[[], ObjectStore]) -> str:
    store = open_store()
    if isinstance(store, DirectoryStore) and not store.root.exists():
        inside = store.root.is_relative_to(site.workspace.absolute())
        return f"{store.url}: the first night makes it" if inside else _folder(store.root)
    store.check_writable()
    return f"{store.url}: can be written"


def _prefect_api(site: Site) -> str:
    """Whether others may use the configured Prefect server, and which release it runs.

    Raises:
        PermanentError: It is reached from other hosts, and takes whatever anybody sends; or it is older than this
            host's Prefect, which may request what it does not know; or it keeps in memory who holds a slot of the
            cluster's limits; or Prefect has no folder that can be written.
        TransientError: It does not answer.
    """
    home = prefect_home()
    there = next(folder for folder in (home, *home.parents) if os.path.exists(folder))
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        advice = "Set PREFECT_HOME, or HOME, to a folder that can be written"
        raise PermanentError("Prefect's folder cannot be written", subject=str(home), advice=advice)
    server = configured_server()
    if server is None:
        return "no server is configured: flows bring their own"
    try:
        is_open, version, storage = server.is_open(), server.version(), server.lease_storage()
    except (OSError, ValueError) as error:
        advice = "Start it, or unset PREFECT_API_URL to go without"
        raise TransientError(f"does not answer ({error})", subject=server.host, advice=advice) from error
    if is_open and not server.host.startswith(("127.", "localhost", "[::1]")):
        what = "everybody who reaches it may start and change deployments"
        advice = "Set PREFECT_SERVER_API_AUTH_STRING for the server and PREFECT_API_AUTH_STRING for its clients"
        raise PermanentError(what, subject=server.host, advice=advice)
    own = importlib.metadata.version("prefect")
    if version and _release(version) < _release(own):
        what = f"it runs Prefect {version}, and this host the newer {own}"
        raise PermanentError(what, subject=server.host, advice="Upgrade the server first, then its clients")
    is_limited = (site.cluster.max_jobs or site.cluster.max_jobs_per_account) is not None
    if is_limited and storage == f"{_LEASE_STORAGE}memory":
        what = "it keeps in memory who holds a slot of max_jobs: once it is started again, slots stay taken for ever"
        advice = (
            f"Set PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE={_LEASE_STORAGE}filesystem for the server; where slots are "
            "taken while no night runs: prefect gcl update NAME --active-slots 0"
        )
        raise PermanentError(what, subject=server.host, advice=advice)
    login = "on this host alone, without a login" if is_open else "wants a login"
    return f"{server.host}: {login}{version and f', Prefect {version}'}"


def _release(version: str) -> list[int]:
    """The first two numbers: releases that differ in the third one alone belong together."""
    return [int(number) for number in re.findall(r"\d+", version)[:2]]
