"""nightbridge as a person installs it: a clone, a Prefect server, `make deploy`, `make worker`, and a night by the clock.

The clone is a copy of this checkout's files, so that its workspace is its own. Only the schedule's hour is changed.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from examples.practice.repositories import make_practice_repositories
from nightbridge.embedded.jobs import all_jobs
from nightbridge.models import ClusterSettings, JobStatus
from nightbridge.repos.environments import prepare_base
from nightbridge.slurm.local import LocalCluster
from tests.real.prefect_harness import STRAIGHT
from tests.real.prefect_server import PrefectServer

ROOT = Path(__file__).parents[2]
SHIPPED = ("blocks", "conf", "flows", "nightbridge", "tasks", "Makefile", "prefect.yaml", "pyproject.toml")
"""What of the checkout a deployment uses."""

SHIPPED_CRON = 'cron: "0 1 * * *"'
EVERY_MINUTE = 'cron: "* * * * *"'

PATIENCE = 600.0
"""Seconds after which a test stops waiting for something: it has not become late, it does not happen."""

T = TypeVar("T")


@dataclass
class Installation:
    """A clone and the Prefect server that it is deployed to.

    Attributes:
        folder: The clone; its workspace is `.nightbridge`, as for everybody.
        server: The server.
        settings: Environment variables of whatever is run in the clone.
    """

    folder: Path
    server: PrefectServer
    settings: Mapping[str, str] = field(default_factory=dict)

    @property
    def workspace(self) -> Path:
        return self.folder / ".nightbridge"

    @property
    def environment(self) -> dict[str, str]:
        # Not a make below the one that runs the tests.
        own = {name: value for name, value in self.server.environment.items() if not name.startswith("MAKE")}
        return {**own, **self.settings}

    def make(self, *arguments: str) -> str:
        """Run a target of the Makefile to its end, and return what it printed."""
        done = subprocess.run(
            make_command(*arguments), cwd=self.folder, env=self.environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"make {' '.join(arguments)}: {done.stdout}\n{done.stderr}"
        return done.stdout

    def start_worker(self, **settings: str) -> "Worker":
        """Start `make worker`, with further environment variables."""
        number = len(list(self.folder.glob("worker-*.log")))
        log = self.folder / f"worker-{number}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                make_command("worker"),
                cwd=self.folder,
                env={**self.environment, **settings},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return Worker(process, log)

    def go_straight(self, *deployments: str) -> None:
        """Let workers start these deployments' flow runs without the two processes that prepare a workspace."""
        for name in deployments:
            found = self.server.ask("GET", f"deployments/name/{name}")
            self.server.ask("PATCH", f"deployments/{found['id']}", {"job_variables": found["job_variables"] | STRAIGHT})

    def flow_runs(self, deployment: str, **filters: Any) -> list[dict[str, Any]]:
        """Flow runs of a deployment, the first to be due first."""
        body = {
            "sort": "EXPECTED_START_TIME_ASC",
            "deployments": {"name": {"any_": [deployment]}},
            "flow_runs": filters or None,
        }
        answer: list[dict[str, Any]] = self.server.ask("POST", "flow_runs/filter", body)
        return answer

    def scheduled_runs(self) -> list[dict[str, Any]]:
        """The nightly deployment's flow runs by the clock that a worker has started, the first first."""
        started = {"state": {"type": {"not_any_": ["SCHEDULED"]}}}
        return [run for run in self.flow_runs("nightly", **started) if run["auto_scheduled"]]

    def events(self, name: str) -> list[dict[str, Any]]:
        """Every event of this name."""
        body = {"filter": {"event": {"name": [name]}}, "limit": 50}
        answer: list[dict[str, Any]] = self.server.ask("POST", "events/filter", body)["events"]
        return answer

    def jobs(self) -> list[JobStatus]:
        """Every job that the embedded cluster of the workspace has ever had."""
        cluster = LocalCluster(ClusterSettings(), self.workspace / "cluster")
        return list(cluster.states([job.job_id for job in all_jobs(cluster.root)]).values())

    def stored(self, pattern: str) -> list[Path]:
        """The store's objects whose keys fit a glob pattern."""
        return sorted((self.workspace / "store").glob(pattern))


@dataclass
class Worker:
    """A running `make worker`, in a process group of its own."""

    process: "subprocess.Popen[bytes]"
    log: Path

    @property
    def pids(self) -> list[int]:
        """The worker itself, below make."""
        return children(self.process.pid)

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the worker alone; what it started is not told."""
        for pid in self.pids:
            os.kill(pid, number)

    def kill(self) -> None:
        """End the worker without a word; the flows that it runs go on."""
        self.send(signal.SIGKILL)
        self.process.wait(60)

    def lose_host(self) -> None:
        """End the worker and every flow that it runs without a word, as a host does that loses its power."""
        for pid in list(descendants(self.process.pid)):  # those of a dead process are nobody's
            with contextlib.suppress(ProcessLookupError):  # it may have ended since it was listed
                os.kill(pid, signal.SIGKILL)
        self.process.wait(60)

    def stop(self) -> None:
        """End it as Ctrl-C in its terminal does."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGINT)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.lose_host()


def make_command(*arguments: str) -> list[str]:
    """A call of make in the clone: it runs the programs of this test's virtual environment, and installs nothing."""
    programs = Path(sys.executable).parent
    return ["make", "--no-print-directory", "--assume-old=install", f"BIN={programs}", *arguments]


def clone(folder: Path, environments: Path, *, cron: str = EVERY_MINUTE) -> Path:
    """Copy what is shipped, with another schedule, and prepare the practice workload as `make install` does."""
    for name in SHIPPED:
        folder.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, symlinks=True)
        else:
            shutil.copy(ROOT / name, folder / name)
    deployments = (folder / "prefect.yaml").read_text(encoding="utf-8")
    assert SHIPPED_CRON in deployments
    (folder / "prefect.yaml").write_text(deployments.replace(SHIPPED_CRON, cron), encoding="utf-8")
    make_practice_repositories(folder / ".nightbridge" / "practice")
    # What is made for a commit names the folder that it was made in, so only what takes a minute to install is shared.
    (folder / ".nightbridge" / "envs").mkdir()
    base = prepare_base(environments)
    (folder / ".nightbridge" / "envs" / base.name).symlink_to(base)
    return folder


def read_json(path: Path) -> Any:
    """A stored document."""
    return json.loads(path.read_text(encoding="utf-8"))


def wait_for(what: str, answer: Callable[[], T], *, patience: float = PATIENCE) -> T:
    """Ask once a second until the answer is true, and return it. Each time costs a server 10 ms and more."""
    deadline = time.monotonic() + patience
    while not (found := answer()):
        assert time.monotonic() < deadline, f"after {patience:g} s there is no {what}"
        time.sleep(1)
    return found


def children(pid: int) -> list[int]:
    """The processes that a process has started and that are still its own."""
    return [int(word) for path in Path(f"/proc/{pid}/task").glob("*/children") for word in path.read_text().split()]


def descendants(pid: int) -> Iterator[int]:
    """A process and everything below it."""
    yield pid
    for child in children(pid):
        yield from descendants(child)
