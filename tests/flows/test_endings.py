"""`nightbridge run` ends when it is told to, in seconds, at any moment; a server and programs of its own end with it."""

import os
import signal
import sqlite3
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from examples.practice.repositories import PracticeRepositories, commit_behaviour
from nightbridge.embedded.jobs import all_jobs
from nightbridge.models import ClusterSettings
from nightbridge.slurm.local import LocalCluster
from nightbridge.slurm.states import TERMINAL
from tests.flows.moments import any_of, pick
from tests.flows.practice_night import NIGHTBRIDGE, Entry, set_remote, write_scenario, write_site
from tests.real.prefect_server import make_home

pytestmark = pytest.mark.launcher

PROMPT = 10.0
"""Seconds within which the process, or everything that a killed one had started, is gone; of a machine of its own."""
PATIENCE = 300.0
MARK = "XDG_TEST_MARK"
"""A variable of a kind that every program of a run keeps: the embedded server is given no other."""
_RUNNER = b"nightbridge.embedded.runner"
"""In the command of a process that stands for Slurm: it runs a job to its end, whatever becomes of its submitter."""


def prompt() -> float:
    """`PROMPT` on this machine, whose processors others may have to share."""
    return PROMPT * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


@dataclass
class Run:
    """A `nightbridge run` of two tests with a Prefect server of its own, as a person starts it in a terminal."""

    folder: Path
    process: "subprocess.Popen[str]"
    mark: str
    ended: int | None = None

    @property
    def cluster(self) -> LocalCluster:
        return LocalCluster(ClusterSettings(), self.folder / "workspace" / "cluster")

    def job_states(self) -> list[str]:
        jobs = [job.job_id for job in all_jobs(self.cluster.root)]
        return [str(status.state) for status in self.cluster.states(jobs).values()]

    def processes(self) -> dict[int, str]:
        """Every process that this one has started, by its environment, with its command line; none of a job."""
        found = {}
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit() and self._is_ours(folder):
                found[int(folder.name)] = (folder / "cmdline").read_text().replace("\0", " ")
        return found

    def flow_runs(self) -> dict[str, str]:
        """The state of every flow run in Prefect's database, by name."""
        with sqlite3.connect(f"file:{self.folder / 'prefect' / 'prefect.db'}?mode=ro", uri=True) as database:
            return dict(database.execute("select name, state_type from flow_run"))

    def wait_until(self, true: Callable[[], object], seconds: float = PATIENCE) -> None:
        deadline = time.monotonic() + seconds
        while not true():
            assert self.process.poll() in (None, self.ended), self.process.communicate()
            assert time.monotonic() < deadline, f"it did not happen in time: {self.processes()}"
            time.sleep(0.1)  # a look at every process of the machine is no small thing

    def _is_ours(self, folder: Path) -> bool:
        try:
            words = (folder / "environ").read_bytes().split(b"\0")
            of_a_job = (
                any(word.startswith(b"SLURM_JOB_ID=") for word in words) or _RUNNER in (folder / "cmdline").read_bytes()
            )
            return f"{MARK}={self.mark}".encode() in words and not of_a_job
        except OSError:
            return False


@pytest.fixture
def start(tmp_path: Path, repositories: PracticeRepositories, environments_dir: Path) -> Iterator[Callable[[], Run]]:
    # The first job has to run still when the second begins, however busy the machine is.
    commit_behaviour(repositories, "Take seconds for each step", slow_wall=5.0)
    scenario = write_scenario(tmp_path / "conf", repositories, "two", Entry(id="a"), Entry(id="b"))
    site = write_site(tmp_path / "site.toml", workspace=tmp_path / "workspace", environments=environments_dir)
    make_home(tmp_path / "prefect")
    mark = uuid.uuid4().hex
    runs: list[Run] = []

    def started() -> Run:
        process = subprocess.Popen(
            [NIGHTBRIDGE, "run", scenario, "--system", site, "--night", "n1"],
            env={**os.environ, "PREFECT_HOME": str(tmp_path / "prefect"), MARK: mark, "NIGHTBRIDGE_RETRY_DELAY": "60"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            process_group=0,
        )
        runs.append(Run(tmp_path, process, mark))
        return runs[-1]

    yield started
    for run in runs:
        run.process.kill()
        run.process.communicate()
        run.ended = run.process.returncode
        for job in all_jobs(run.cluster.root):
            run.cluster.cancel(job.job_id)
        run.wait_until(partial(_has_no_live_job, run))


def _has_no_live_job(run: Run) -> bool:
    return all(state in TERMINAL for state in run.job_states())


# --- moments ---------------------------------------------------------------------------------------------------------


def imports(run: Run) -> None:
    time.sleep(0.7)


def server_start(run: Run) -> None:
    run.wait_until(lambda: any("server_process" in command for command in run.processes().values()))


def clone(run: Run) -> None:
    run.wait_until(
        lambda: any(
            "fetch" in command or "clone" in command or "ls-remote" in command for command in run.processes().values()
        )
    )


def launcher(run: Run) -> None:
    run.wait_until(lambda: len(list((run.folder / "workspace").glob("runs/*/a1/launcher.log"))) == 2)


def watch(run: Run) -> None:
    run.wait_until(lambda: run.job_states() == ["RUNNING", "RUNNING"])


MOMENTS = {"imports": imports, "server_start": server_start, "clone": clone, "launcher": launcher, "watch": watch}


def stop_at(moment: str, run: Run, number: signal.Signals) -> tuple[int, str, float]:
    """Signal the run's process group at this moment; return exit code, stderr and the seconds that it took."""
    MOMENTS[moment](run)
    begun = time.monotonic()
    os.killpg(run.process.pid, number)
    _, err = run.process.communicate(timeout=PATIENCE)
    run.ended = run.process.returncode
    return run.process.returncode, err, time.monotonic() - begun


@pytest.mark.parametrize("told", any_of(f"{moment} {name}" for moment in MOMENTS for name in ("SIGINT", "SIGTERM")))
def test_told_to_end_it_ends_within_seconds_and_no_flow_run_stays_running(
    start: Callable[[], Run], tmp_path: Path, silent_remote: str, told: str
) -> None:
    moment, name = pick(told).split()
    number = signal.Signals[name]
    if moment == "clone":
        set_remote(tmp_path / "conf", silent_remote)
    run = start()

    code, err, seconds = stop_at(moment, run, number)

    print(f"{moment} {number.name}: {seconds:.1f} s, {code}, {run.flow_runs()}")
    print(err)
    assert code == 128 + number
    assert "Traceback" not in err
    assert seconds < prompt()
    assert set(run.flow_runs().values()) <= {"CRASHED"}
    run.wait_until(lambda: not run.processes(), prompt())
    assert set(run.job_states()) <= {"RUNNING", "PENDING", "COMPLETED"}


@pytest.mark.parametrize("moment", any_of(MOMENTS))
def test_killed_it_leaves_nothing_behind_but_the_job(
    start: Callable[[], Run], tmp_path: Path, silent_remote: str, moment: str
) -> None:
    moment = pick(moment)
    if moment == "clone":
        set_remote(tmp_path / "conf", silent_remote)
    run = start()

    stop_at(moment, run, signal.SIGKILL)

    run.wait_until(lambda: not run.processes(), prompt())
    assert set(run.job_states()) <= {"RUNNING", "PENDING", "COMPLETED"}
