"""Launcher environments: the locked requirements once per machine, and each NeMo-Run commit as a thin layer on them.

`<envs>/base-<hash>` is a symbolic link to the folder in which its virtual environment was made; the link is set when
everything is installed, so a base that can be seen is whole. (A virtual environment cannot be moved: its scripts name
their folder.) `<envs>/<digest>/` is a layer: a virtual environment without scripts, which can be moved, so it is made
under a temporary name and renamed. Its site-packages come before the base's.
"""

import contextlib
import hashlib
import importlib.metadata
import json
import logging
import os
import platform
import re
import shutil
import sys
import time
import uuid
import venv
from collections.abc import Collection, Iterator
from datetime import datetime
from pathlib import Path
from typing import Literal

from nightbridge.errors import DamagedData, ErrorPattern, InvalidInput, PermanentError, TransientError, classify
from nightbridge.files import write_model
from nightbridge.locking import lease
from nightbridge.models import LauncherEnvironment, PinnedRepository, StoredModel, utc_now
from nightbridge.processes import run
from nightbridge.repos.git import git, masked

log = logging.getLogger(__name__)

LAUNCHER_LOCK = Path(__file__).with_name("launcher.lock")
"""What every launcher environment holds besides the pinned NeMo-Run: versions that are known to work together."""

INSTALL_TIMEOUT_SECONDS = 1800.0
CHECK_TIMEOUT_SECONDS = 300.0
RECORD_NAME = "environment.json"
BASE_FILE = "nightbridge-base.pth"
"""In the packages of a layer: it puts those of its base behind them."""


# All that pip gets of our environment. A package's build back end is other people's code: it sees no secret of the site
# or of a test, whatever its variable is called. The user's own Python settings must not leak in either.
_KEPT_VARIABLES = re.compile(
    r"PATH|HOME|USER|LOGNAME|SHELL|TMPDIR|TZ|LANG|NETRC|CC|CXX|[A-Z]+FLAGS|LD_LIBRARY_PATH|(?:https?|ftp|all|no)_proxy"
    r"|(?:CURL|REQUESTS)_CA_BUNDLE|(?:LC|SSL|XDG)_\w+|PIP_(?!PREFIX$|REQUIRE_VIRTUALENV$|ROOT$|TARGET$)\w+",
    re.IGNORECASE,
)

# pip reports no version also when it reached no index; the reason is printed above that, so this comes first.
_NOT_INSTALLED = "pip could not install it"
_PIP_ERRORS = (
    ErrorPattern(
        r"NewConnectionError|ConnectTimeout|ReadTimeout|Read timed out|Connection(Error|ResetError| refused| reset"
        r"| broken)|Temporary failure in name resolution|Name or service not known|Max retries exceeded|IncompleteRead"
        r"|ProtocolError|(429|50[0234]) (Client|Server) Error",
        TransientError, _NOT_INSTALLED,
        "The package index did not answer: check the network and pip's index. Without a network fill a folder of wheels"
        " elsewhere (`pip download --no-deps --requirement launcher.lock --dest FOLDER`) and name it: `wheels` of the"
        " site, or PIP_NO_INDEX=1 PIP_FIND_LINKS=FOLDER",
    ),
    ErrorPattern(
        r"DO NOT MATCH THE HASHES",
        PermanentError, _NOT_INSTALLED, "The package index or the wheel folder holds another file than was locked",
    ),
    ErrorPattern(
        r"No space left on device|Disk quota exceeded",
        PermanentError, _NOT_INSTALLED, "Free up space where launcher environments are kept",
    ),
    ErrorPattern(
        r"No matching distribution|Could not find a version",
        PermanentError, _NOT_INSTALLED, "Check pip's package index, or the wheel folder of the site (PIP_FIND_LINKS)",
    ),
    ErrorPattern(
        r"BackendUnavailable|Cannot import '[\w.]+'",
        PermanentError, _NOT_INSTALLED, "This commit needs a build back end that launcher.in does not have",
    ),
    ErrorPattern(
        r"requires a different Python|Requires-Python",
        PermanentError, _NOT_INSTALLED, "Use a Python that this NeMo-Run supports",
    ),
    ErrorPattern("", PermanentError, _NOT_INSTALLED),
)  # fmt: skip
_PIP_KILLED = ErrorPattern("", TransientError, "pip was killed")

_CHECK = """
import importlib.metadata, json, nemo_run
try:
    version = importlib.metadata.version("nemo_run")
except importlib.metadata.PackageNotFoundError:
    version = str(getattr(nemo_run, "__version__", ""))
print(json.dumps({"version": version, "file": nemo_run.__file__}))
"""


class EnvironmentRecord(StoredModel):
    """What a layer is made of: `environment.json` in its folder.

    `nemo_run_from` base: the checkout is a package of another name that builds on the locked NeMo-Run.
    """

    digest: str
    python_version: str
    base: str
    url: str
    commit: str
    project: str
    project_version: str
    nemo_run_version: str
    nemo_run_from: Literal["layer", "base"]
    made_at: datetime


def prepare_base(envs_dir: Path, *, lock: Path = LAUNCHER_LOCK, wheels: Path | None = None) -> Path:
    """Install the locked requirements, unless they are; return the base's folder.

    Takes about half a minute once per Python version and lock file; the install step calls it, so that runs find it
    done.

    Args:
        envs_dir: Where launcher environments are kept.
        lock: Pinned requirements, each with its hashes.
        wheels: Folder in which all of them lie, for a site without network; pip's own configuration sets where packages
            come from when it is unset.

    Raises:
        InvalidInput: There is no such wheel folder.
        PermanentError: A requirement cannot be installed here, or its file does not have the hash of the lock file.
        TransientError: The package index is unreachable, or another process took too long to install.
    """
    base = envs_dir.absolute() / f"base-{_base_hash(lock)}"
    if _is_usable(base):
        return base
    sources = _sources(wheels)
    with lease(base.with_name(f".{base.name}.lease")) as held:
        if _is_usable(base):
            return base
        for leftover in base.parent.glob(f"{base.name}.*"):  # of a killed install: only the lease's holder makes these
            shutil.rmtree(leftover, ignore_errors=True)
        folder = base.with_name(f"{base.name}.{uuid.uuid4().hex[:8]}")
        count = len(re.findall(r"^[\w.-]+==", lock.read_text(encoding="utf-8"), re.MULTILINE))
        log.info("launcher environment: installing %d packages, once per machine; takes about a minute", count)
        started = time.monotonic()
        try:
            venv.create(folder, with_pip=True, symlinks=True)
            # The lock file is complete, so nothing is left for pip to resolve; what is not in it is not installed.
            _pip(folder, *sources, "--no-deps", "--require-hashes", "--requirement", lock)
            held.ensure_held()
            link = base.with_name(f".{base.name}.{uuid.uuid4().hex}.tmp")
            link.symlink_to(folder.name)
            link.replace(base)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        log.info("launcher environment: installed in %.0f s", time.monotonic() - started)
    return base


def is_base_ready(envs_dir: Path) -> bool:
    """Whether the locked requirements are installed, so that a run need not."""
    return _is_usable(envs_dir.absolute() / f"base-{_base_hash(LAUNCHER_LOCK)}")


def make_environment(
    nemo_run: PinnedRepository, envs_dir: Path, *, lock: Path = LAUNCHER_LOCK, wheels: Path | None = None
) -> LauncherEnvironment:
    """Return the environment of a NeMo-Run checkout: the base, and the checkout's package in front of it.

    The checkout is not written to: the package is built from a copy. `lock` and `wheels` are those of `prepare_base`.

    Raises:
        InvalidInput: There is no such wheel folder.
        PermanentError: The checkout's package cannot be installed, or `import nemo_run` fails in the environment.
        DamagedData: `nemo_run` does not come from where it must.
        TransientError: The package index is unreachable, or another process holds the lease for too long.
    """
    base = prepare_base(envs_dir, lock=lock, wheels=wheels)
    digest = hashlib.sha256(f"{base.name} {nemo_run.commit}".encode()).hexdigest()[:16]
    layer = envs_dir.absolute() / digest
    with lease(layer.with_name(f".{digest}.lease")) as held:
        record = _read_record(layer)
        if record is None:
            for leftover in layer.parent.glob(f".{digest}.*.tmp"):
                shutil.rmtree(leftover, ignore_errors=True)
            started = time.monotonic()
            temporary = layer.with_name(f".{digest}.{uuid.uuid4().hex}.tmp")
            try:
                record = _make_layer(nemo_run, base, temporary, digest)
                held.ensure_held()
                shutil.rmtree(layer, ignore_errors=True)
                temporary.rename(layer)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
            log.info(
                "launcher environment of NeMo-Run %s made in %.1f s", nemo_run.commit[:12], time.monotonic() - started
            )
        # When it was used last, for `prune`; another user's may be shared and not be written.
        with contextlib.suppress(PermissionError):
            os.utime(layer)
            os.utime(base)
    return LauncherEnvironment(python=layer / "bin" / "python", digest=digest, nemo_run_version=record.nemo_run_version)


def unneeded_bases(envs_dir: Path, kept: Collection[Path]) -> Iterator[Path]:
    """The bases, as links, that none of the kept layers builds on, nor one of this machine's Python and lock file."""
    records = (_read_record(layer) for layer in kept)
    needed = {f"base-{_base_hash(LAUNCHER_LOCK)}", *(record.base for record in records if record)}
    links = (path for path in envs_dir.absolute().glob("base-*") if path.is_symlink())
    yield from (link for link in links if link.name not in needed)


def _make_layer(nemo_run: PinnedRepository, base: Path, folder: Path, digest: str) -> EnvironmentRecord:
    venv.create(folder, with_pip=False, symlinks=True)
    packages = site_packages(folder)
    source = folder / "source"
    git("clone", "--quiet", "--local", "--template=", nemo_run.path, source, timeout=INSTALL_TIMEOUT_SECONDS)
    _pip(base, "--no-index", "--no-deps", "--no-build-isolation", "--target", packages, source)
    shutil.rmtree(source)
    # addsitedir also reads the base's own .pth files, which a plain line in a .pth file would not. The base is found
    # from the layer: a workspace may be moved.
    of_base = f"/../{site_packages(Path(base.name))}"
    (packages / BASE_FILE).write_text(f"import site, sys; site.addsitedir(sys.prefix + {of_base!r})\n")
    project = next(iter(importlib.metadata.distributions(path=[str(packages)])), None)
    if project is None:
        raise PermanentError("it installs no package", subject=f"{nemo_run.url} at {nemo_run.commit[:12]}")
    name = project.metadata["Name"]
    version, origin = _imported(folder, nemo_run)
    from_layer = origin.is_relative_to(packages)
    if re.sub(r"[-_.]+", "-", name).lower() == "nemo-run" and not from_layer:
        what = f"nemo_run comes from {origin} and not from its own checkout"
        advice = "Check which packages this commit's pyproject.toml installs"
        raise DamagedData(what, subject=f"{nemo_run.url} at {nemo_run.commit[:12]}", advice=advice)
    record = EnvironmentRecord(
        digest=digest,
        python_version=platform.python_version(),
        base=base.name,
        url=masked(nemo_run.url),
        commit=nemo_run.commit,
        project=name,
        project_version=project.version,
        nemo_run_version=version,
        nemo_run_from="layer" if from_layer else "base",
        made_at=utc_now(),
    )
    write_model(folder / RECORD_NAME, record)
    return record


def site_packages(environment: Path) -> Path:
    """The folder of a virtual environment in which packages lie."""
    return environment / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"


def _imported(environment: Path, nemo_run: PinnedRepository) -> tuple[str, Path]:
    """Version and file of `nemo_run` as the environment's own interpreter imports it."""
    finished = run(
        [environment / "bin" / "python", "-P", "-c", _CHECK],
        environment=_environment(),
        timeout=CHECK_TIMEOUT_SECONDS,
        cwd=environment,
    )
    try:
        found = json.loads(finished.stdout.splitlines()[-1]) if finished.code == 0 else None
    except (IndexError, ValueError):
        found = None
    if found is None:
        what = f"`import nemo_run` fails: {finished.tail}"
        advice = "This commit does not work with the locked requirements (launcher.lock); pin another one"
        raise PermanentError(what, subject=f"{nemo_run.url} at {nemo_run.commit[:12]}", advice=advice)
    return found["version"], Path(found["file"])


def _base_hash(lock: Path) -> str:
    machine = f"{sys.implementation.cache_tag} {platform.python_version()} {platform.system()} {platform.machine()}"
    return hashlib.sha256(machine.encode() + b"\n" + lock.read_bytes()).hexdigest()[:16]


def _is_usable(base: Path) -> bool:
    # The interpreter is a link to the machine's own, which an upgrade may have removed.
    return base.is_symlink() and os.access(base / "bin" / "python", os.X_OK)


def _read_record(layer: Path) -> EnvironmentRecord | None:
    if not os.access(layer / "bin" / "python", os.X_OK):
        return None
    try:
        return EnvironmentRecord.model_validate_json((layer / RECORD_NAME).read_bytes())
    except (FileNotFoundError, ValueError):
        return None


def _sources(wheels: Path | None) -> list[str | Path]:
    """Options of pip for where packages come from."""
    if wheels is None:
        return []
    if not os.path.isdir(wheels):
        advice = "Where there is a network: `pip download --no-deps --requirement launcher.lock --dest FOLDER`"
        raise InvalidInput("no such wheel folder", subject=str(wheels), advice=advice)
    return ["--no-index", "--find-links", wheels.absolute()]


def _pip(environment: Path, *arguments: str | Path) -> None:
    finished = run(
        [
            environment / "bin" / "python", "-m", "pip", "install",
            "--quiet", "--disable-pip-version-check", "--no-input", "--root-user-action=ignore", *arguments,
        ],
        environment=_environment(),
        timeout=INSTALL_TIMEOUT_SECONDS,
    )  # fmt: skip
    if finished.code:
        known = _PIP_KILLED if finished.code < 0 else classify(finished.stderr, _PIP_ERRORS)
        assert known is not None  # the last pattern occurs in everything
        lines = [line for line in finished.tail.split(" | ") if not line.startswith(("WARNING:", "[notice]"))]
        raise known.error(str(arguments[-1]), masked(" | ".join(lines[-4:])))


def _environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if _KEPT_VARIABLES.fullmatch(name)}
    return kept | {"PIP_USER": "0", "LC_ALL": "C.UTF-8"}
