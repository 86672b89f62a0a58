"""A flow process may die at any moment: the same night goes on, with one job per attempt, one manifest, one verdict."""

import json
import os
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from examples.practice.repositories import PracticeRepositories, commit_behaviour
from nightbridge.embedded.jobs import all_jobs
from nightbridge.models import ClusterSettings, JobStatus
from nightbridge.slurm.local import LocalCluster
from nightbridge.slurm.states import TERMINAL
from tests.conftest import SEEDS
from tests.flows.practice_night import NIGHTBRIDGE, Entry, nightbridge_here, write_scenario, write_site
from tests.real.prefect_server import PrefectServer

pytestmark = [pytest.mark.launcher, pytest.mark.usefixtures("flows_here")]

LONGEST_RUN = 12.0
"""Seconds that a run of the practice test takes here when nothing disturbs it; a little later nothing can be killed."""
PATIENCE = 600.0
QUICK = {"NIGHTBRIDGE_RETRY_DELAY": "0.5"}


@dataclass(frozen=True)
class Night:
    """One night of one practice test on the embedded cluster, run as often as a test wants."""

    folder: Path
    server: PrefectServer
    output: pytest.CaptureFixture[str]

    @property
    def workspace(self) -> Path:
        return self.folder / "workspace"

    @property
    def cluster(self) -> LocalCluster:
        return LocalCluster(ClusterSettings(), self.workspace / "cluster")

    @property
    def command(self) -> list[str | Path]:
        return [
            "run",
            self.folder / "conf" / "llama_small.toml",
            "--system",
            self.folder / "site.toml",
            "--night",
            "n1",
        ]

    @property
    def run_key(self) -> str:
        (folder,) = (self.workspace / "runs").iterdir()
        return folder.name

    def start(self) -> "subprocess.Popen[str]":
        """Start the run as a shell does: in a process group of its own."""
        return subprocess.Popen(
            [NIGHTBRIDGE, *self.command],
            env=self.server.environment | QUICK,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            process_group=0,
        )

    def finish(self, *options: str) -> dict[str, object]:
        """Run it to its end, within this process, and return its one verdict."""
        finished = nightbridge_here(self.output, *self.command, "--json", *options, **QUICK)
        assert "Traceback" not in finished.stderr, finished.stderr
        (verdict,) = json.loads(finished.stdout)["verdicts"]
        return {**verdict, "exit_code": finished.returncode}

    def about(self, command: str, *options: str) -> "subprocess.CompletedProcess[str]":
        """Ask about the run from the command line, or cancel it."""
        return nightbridge_here(self.output, command, self.run_key, "--workspace", self.workspace, *options)

    def statuses(self) -> list[JobStatus]:
        """Every job that the cluster has ever had."""
        return list(self.cluster.states([job.job_id for job in all_jobs(self.cluster.root)]).values())

    def jobs(self) -> Counter[str]:
        """How many jobs of each name there have been."""
        return Counter(status.name for status in self.statuses())

    def states(self) -> list[str]:
        return [str(status.state) for status in self.statuses()]

    def stored(self, name: str) -> list[Path]:
        """The store's objects of this name."""
        return sorted((self.workspace / "store").rglob(name))


@pytest.fixture
def night(
    tmp_path: Path,
    repositories: PracticeRepositories,
    environments_dir: Path,
    prefect_server: PrefectServer,
    capfd: pytest.CaptureFixture[str],
) -> Iterator[Night]:
    write_scenario(tmp_path / "conf", repositories, "unused", Entry(id="unused"))
    write_site(tmp_path / "site.toml", workspace=tmp_path / "workspace", environments=environments_dir)
    made = Night(tmp_path, prefect_server, capfd)
    yield made
    for job in all_jobs(made.cluster.root):
        made.cluster.cancel(job.job_id)
    wait_until(lambda: all(status.state in TERMINAL for status in made.statuses()))


def wait_until(true: Callable[[], object], process: "subprocess.Popen[str] | None" = None) -> None:
    """Wait until something is true; fail at once when the process that should make it so ends before that."""
    deadline = time.monotonic() + PATIENCE
    while not true():
        assert process is None or process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


# --- killed ----------------------------------------------------------------------------------------------------------


@pytest.mark.random_kill
@pytest.mark.parametrize("seed", SEEDS)
def test_a_run_that_was_killed_at_a_random_moment_goes_on(night: Night, seed: int) -> None:
    moment = random.Random(seed).uniform(1.0, LONGEST_RUN)
    process = night.start()
    try:
        process.communicate(timeout=moment)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()

    verdict = night.finish()

    assert (verdict["status"], verdict["exit_code"]) == ("no_baseline", 0)
    assert night.jobs() == {f"{night.run_key}-a1": 1}
    assert len(night.stored("manifest.json")) == 1
    assert len(night.stored("verdict.json")) == 1
    assert json.loads(night.stored("verdict.json")[0].read_text())["run_key"] == night.run_key
    assert [path.name for path in (night.workspace / "runs" / night.run_key).iterdir()] == ["a1"]


# --- interrupted -----------------------------------------------------------------------------------------------------


@pytest.fixture
def long_night(night: Night, repositories: PracticeRepositories) -> Night:
    """The same with a job that is still running long after its flow has been interrupted."""
    commit_behaviour(repositories, "Take a little longer for each step", slow_wall=0.4)
    return night


def interrupt(night: Night, number: signal.Signals) -> tuple[int, str, str]:
    """Start the run and interrupt it while its job runs; return exit code, stdout and stderr."""
    process = night.start()
    wait_until(lambda: night.states() == ["RUNNING"], process)
    os.killpg(process.pid, number)
    out, err = process.communicate(timeout=PATIENCE)
    return process.returncode, out, err


def test_ctrl_c_leaves_the_job_and_says_how_to_find_and_how_to_cancel_it(long_night: Night) -> None:
    code, out, err = interrupt(long_night, signal.SIGINT)

    assert (code, out) == (130, "")
    assert "Traceback" not in err
    assert "--night n1" in err
    assert "nightbridge cancel --night n1" in err
    assert long_night.states() == ["RUNNING"]
    assert "RUNNING" in long_night.about("status").stdout
    wait_until(lambda: "iteration" in long_night.about("logs").stdout)  # its start may take longer than the flow's end

    # While the job has not been seen to end there is nothing to make anew, whatever is asked for.
    verdict = long_night.finish("--new-attempt")

    assert (verdict["status"], verdict["exit_code"]) == ("no_baseline", 0)
    assert long_night.jobs() == {f"{long_night.run_key}-a1": 1}
    assert "succeeded" in long_night.about("status").stdout


def test_ctrl_c_while_the_launcher_is_at_work_leaves_at_most_one_job(night: Night) -> None:
    process = night.start()
    wait_until(lambda: list(night.workspace.glob("runs/*/a1/launcher.log")), process)
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=PATIENCE)

    assert process.returncode == 130
    assert "Traceback" not in err
    verdict = night.finish()
    assert (verdict["status"], verdict["exit_code"]) == ("no_baseline", 0)
    assert night.jobs() == {f"{night.run_key}-a1": 1}


def test_sigterm_leaves_the_job_and_a_person_can_cancel_it(night: Night, repositories: PracticeRepositories) -> None:
    # However long a busy machine takes to start what cancels it.
    commit_behaviour(repositories, "Take seconds for each step", slow_wall=5.0)
    code, out, err = interrupt(night, signal.SIGTERM)

    assert (code, out) == (143, ""), err
    assert "Traceback" not in err
    assert "--night n1" in err
    assert night.states() == ["RUNNING"]

    cancelled = night.about("cancel")

    assert (cancelled.returncode, cancelled.stdout) == (0, f"cancelled job 1 of {night.run_key}\n")
    wait_until(lambda: night.states() == ["CANCELLED"])
    assert night.about("cancel").stdout == "no job of this run is live\n"
    status = json.loads(night.about("status", "--json").stdout)
    assert [job["state"] for attempt in status["attempts"] for job in attempt["jobs"]] == ["CANCELLED"]
    verdict = night.finish()
    assert (verdict["status"], verdict["exit_code"]) == ("cancelled", 3)
    assert night.jobs() == {f"{night.run_key}-a1": 1}
