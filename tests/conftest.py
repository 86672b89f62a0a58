"""Parts that many tests share: the launcher's environment, real daemons, and Prefect's own test server."""

import atexit
import gc
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

# Before anything imports Prefect, which reads its settings once: the tests' state is kept out of the person's own, and
# telemetry stays at home.
os.environ["PREFECT_HOME"] = tempfile.mkdtemp(prefix="nightbridge-prefect-")
os.environ["DO_NOT_TRACK"] = "1"
os.environ["PREFECT_SERVER_ANALYTICS_ENABLED"] = "false"
os.environ.pop("PREFECT_API_URL", None)
# A client of Prefect asks for a token before its first change, and the tests' servers have none to give.
os.environ["PREFECT_CLIENT_CSRF_SUPPORT_ENABLED"] = "false"
os.environ["PREFECT_API_SSL_CERT_FILE"] = os.path.join(os.environ["PREFECT_HOME"], "authority.pem")

import certifi
import pytest
from hypothesis import settings

from examples.practice.repositories import (
    PracticeRepositories,
    make_practice_repositories,
    move_main,
)
from nightbridge.repos.environments import prepare_base
from tests.real.prefect_server import PrefectServer, start_prefect
from tests.real.s3_servers import (
    S3Server,
    ceph_missing_reason,
    ministack_missing_reason,
    seaweedfs_missing_reason,
    start_ceph,
    start_ministack,
    start_seaweedfs,
)
from tests.real.slurm_daemons import SlurmDaemons, missing_reason, start_slurm

# A shell starts what runs in the background with SIGINT ignored, and every process of the tests would inherit that:
# none could be interrupted. A signal that has a handler here has its default in them.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Each of Prefect's clients, a dozen in a process that runs a flow, reads the certificates of all authorities, a fortieth of a
# second of a core. The tests' servers have none.
_FIRST_AUTHORITY = Path(certifi.where()).read_text(encoding="utf-8").partition("-----END CERTIFICATE-----")[:2]
Path(os.environ["PREFECT_API_SSL_CERT_FILE"]).write_text("".join(_FIRST_AUTHORITY), encoding="utf-8")

# A slow machine is no error of the code under test; what must be quick has a benchmark.
settings.register_profile("any-machine", deadline=None)
settings.load_profile("any-machine")

BUCKET = "nightbridge"
"""One bucket per S3 server, each test below a prefix of its own: Ceph needs a while to make one."""

SEEDS = range(int(os.environ.get("NIGHTBRIDGE_SEEDS", "5")))
"""Seeds of each random-kill series: a few in `make test`, hundreds in `make soak`."""


MINUTES = float(os.environ.get("NIGHTBRIDGE_TEST_MINUTES", "inf"))
"""How long tests may go on being started: `make test` bounds it, so that a slow machine still gives a result in time."""

_LAST_LINES = 25
"""Of what failed, as long as the run goes on."""

_STARTED = time.monotonic()
_UMASK = os.umask(0o022)
os.umask(_UMASK)

_MARK_OF_FIXTURE = {
    "slurm_cluster": "slurm",
    "ceph": "s3",
    "ministack": "s3",
    "seaweedfs": "s3",
    "prefect_server": "prefect",
    "launcher_python": "launcher",
    "environments_dir": "launcher",
    "demo_image": "registry",
}
"""Fixtures that start a part, and the mark of the tests that use one."""

_MARK_OF_IMPORT = {"LocalCluster": "embedded", "make_environment": "launcher"}
"""The same for what a test module starts itself."""

_PARTS = frozenset({*_MARK_OF_FIXTURE.values(), *_MARK_OF_IMPORT.values(), "random_kill"})

_NIGHTS = frozenset({Path(__file__).parent / "flows", Path(__file__).parent / "nights"})
"""Folders of tests that run whole flows."""


@cache
def _parts_of(item: pytest.Item) -> set[str]:
    """The marks of all parts that a test needs besides Python."""
    fixtures, module = getattr(item, "fixturenames", ()), vars(getattr(item, "module", object))
    found = {mark.name for mark in item.iter_markers() if mark.name in _PARTS}
    found |= {mark for name, mark in _MARK_OF_FIXTURE.items() if name in fixtures}
    found |= {mark for name, mark in _MARK_OF_IMPORT.items() if name in module}
    return found | ({"prefect"} if item.path.parent in _NIGHTS else set())


_LONGEST = tuple(
    Path(__file__).parent / name
    for name in (
        "nights/test_faults.py",
        "nights/test_clock_and_disk.py",
        "nights/test_scheduled_night.py",
        "nights/test_forms.py",
        "nights/test_two_servers.py",
        "flows/test_container.py",
        "flows/test_real_parts.py",
        "flows/test_restart.py",
        "flows/test_reaper.py",
        "nightbridge/slurm/test_watcher.py",
        "tasks/test_prefect_calls.py",
    )
)
"""Files of minutes, and the longest of `make check`; most of it is waiting. The longest first."""


def _turn(item: pytest.Item) -> int:
    """When a test's file has its turn: the longest, then what needs no other part, real daemons, whole nights."""
    if item.path in _LONGEST:
        return _LONGEST.index(item.path) - len(_LONGEST)
    return 2 if item.path.parent in _NIGHTS else int(bool(_parts_of(item)))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark each test with the parts it needs, and put them in the order of their files' turns.

    A file is one worker's. The longest begin at once, so that the others' work fills their waiting and no worker is
    waited for at the end. Of the rest as much as possible has been tested where the time does not suffice for all.

    `make test` gives what fails a second try, since daemons that share two cores may be late. A kill series gets none:
    one bad moment out of many is just what it looks for.
    """
    items.sort(key=_turn)
    for item in items:
        for mark in _parts_of(item):
            item.add_marker(mark)
        if item.get_closest_marker("random_kill"):
            item.add_marker(pytest.mark.flaky(reruns=0))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Keep Python's garbage collector away from what stays until the end: eight thousand tests and what they import.

    It would walk through all of it again and again, which is half the time of collecting them.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
        atexit.register(gc.unfreeze)  # libraries look for what they have leaked when Python ends


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    first_try = getattr(item, "execution_count", 1) == 1
    if first_try and time.monotonic() - _STARTED > MINUTES * 60:
        pytest.skip(f"not run: the {MINUTES:g} minutes for tests are over (NIGHTBRIDGE_TEST_MINUTES)")


@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Say at once what failed: pytest does so at its end, which a run that is killed for its time never reaches."""
    if report.outcome not in ("passed", "skipped") and "PYTEST_XDIST_WORKER" not in os.environ:
        last_lines = report.longreprtext.splitlines()[-_LAST_LINES:]
        title = f"{report.outcome}: {report.nodeid} ({report.when})"
        print("", title, *last_lines, sep="\n", file=sys.__stdout__, flush=True)


def pytest_unconfigure() -> None:
    shutil.rmtree(os.environ["PREFECT_HOME"], ignore_errors=True)


def need(reason: str | None) -> None:
    """Skip a test whose part is missing; in CI a part that can be installed and is not there is a failure."""
    if reason is None:
        return
    if os.environ.get("CI") == "true":
        pytest.fail(f"missing in CI: {reason}")
    pytest.skip(reason)


@pytest.fixture(autouse=True)
def umask_of_this_process() -> Iterator[None]:
    """What opens a workspace, be it a test or a fixture, makes the files of the process private; not those of others."""
    os.umask(_UMASK)
    yield
    os.umask(_UMASK)


@pytest.fixture(scope="session")
def environments_dir() -> Path:
    """Launcher environments, kept between test runs: the install step makes the base there."""
    return Path(os.environ.get("NIGHTBRIDGE_TEST_ENVIRONMENTS", Path(".nightbridge/envs"))).absolute()


@pytest.fixture(scope="session")
def launcher_python(environments_dir: Path) -> Path:
    """A Python with the locked launcher requirements, real NeMo-Run included."""
    return prepare_base(environments_dir) / "bin" / "python"


@pytest.fixture(scope="session")
def practice_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("practice")


@pytest.fixture(scope="session")
def session_repositories(practice_folder: Path) -> PracticeRepositories:
    return make_practice_repositories(practice_folder)


@pytest.fixture
def repositories(session_repositories: PracticeRepositories) -> Iterator[PracticeRepositories]:
    """The practice repositories with each `main` where it begins."""
    _move_back(session_repositories)
    yield session_repositories
    _move_back(session_repositories)


def _move_back(repositories: PracticeRepositories) -> None:
    move_main(repositories, repositories.sha("main"))
    move_main(repositories, repositories.sha("main", "megatron_lm"), "megatron_lm")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of one megabyte, the folder `small` in the test's own."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small file system needs root")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture
def silent_remote() -> Iterator[str]:
    """A git server that takes calls and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"git://127.0.0.1:{listening.getsockname()[1]}"


@pytest.fixture(scope="session")
def slurm_cluster() -> Iterator[SlurmDaemons]:
    """A real two-node Slurm with slurmdbd, started once."""
    need(missing_reason())
    # Tests ask slurmctld about a job when a whole night with its harvest is over; those of forgotten jobs have their own.
    daemons = start_slurm(min_job_age=3600)
    yield daemons
    daemons.stop()


@pytest.fixture(scope="module")
def ceph(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A real Ceph gateway, over HTTP and HTTPS, for one file: to start it takes less of a core than to keep it idle for a minute."""
    need(ceph_missing_reason())
    server = start_ceph(folder := tmp_path_factory.mktemp("ceph") / "c")
    server.make_bucket(BUCKET)
    yield server
    server.stop()
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def seaweedfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """An S3 server that checks signatures and digests, though no body by its signature."""
    need(seaweedfs_missing_reason())
    server = start_seaweedfs(tmp_path_factory.mktemp("seaweedfs"))
    server.make_bucket(BUCKET)
    yield server
    server.stop()


@pytest.fixture(scope="session")
def ministack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """An S3 server that rejects wrong digests."""
    need(ministack_missing_reason())
    server = start_ministack(tmp_path_factory.mktemp("ministack"))
    server.make_bucket(BUCKET)
    yield server
    server.stop()


@pytest.fixture(scope="module", autouse=True)
def events_of_this_server() -> None:
    """Prefect has one sender of events in a process, bound to the server it first spoke to.

    A file's own server would never hear of its task runs where the file before it used another one.
    """
    send_events()


def send_events() -> None:
    """Let what this process has to tell a server reach it."""
    worker = sys.modules.get("prefect.events.worker")
    if worker is not None:
        worker.EventsWorker.drain_all(timeout=10.0, at_exit=False)


@pytest.fixture(scope="session")
def resting_prefect_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrefectServer]:
    """A real Prefect server for the whole session, for `prefect_server` to wake."""
    server = start_prefect(tmp_path_factory.mktemp("prefect-server"))
    yield server
    server.stop()


@pytest.fixture(scope="module")
def prefect_server(resting_prefect_server: PrefectServer) -> Iterator[PrefectServer]:
    """The session's Prefect server; client processes reach it through its `environment`.

    It rests between the files that use it, as Ceph does.
    """
    resting_prefect_server.wake()
    yield resting_prefect_server
    send_events()
    resting_prefect_server.rest()
