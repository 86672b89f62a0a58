"""A practice job, run as Slurm would run it: one process per rank, in the job's folder."""

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pytest

from examples.practice.repositories import PracticeRepositories, commit_behaviour

STEPS = 12
TENSORBOARD = (
    "logger.log_timers_to_tensorboard=true",
    "logger.log_throughput_to_tensorboard=true",
    "logger.log_memory_to_tensorboard=true",
)


@dataclass(frozen=True)
class JobRun:
    """How a job ended and what it left. `codes` and `said` are by rank; `said` is stdout and stderr together."""

    output: Path
    codes: tuple[int, ...]
    said: tuple[str, ...]

    @property
    def log(self) -> Path:
        """All ranks' texts in one file, as in a real log."""
        path = self.output / "log.out"
        path.write_text("".join(self.said), encoding="utf-8")
        return path


class RunJob(Protocol):
    def __call__(
        self, *flags: str, ranks: int = 2, name: str = "practice", timeout: float = 300, **behaviour: Any
    ) -> JobRun: ...


@pytest.fixture
def checkout(repositories: PracticeRepositories, tmp_path: Path) -> Path:
    return clone(repositories.bridge_url, tmp_path / "Megatron-Bridge")


@pytest.fixture
def run_job(repositories: PracticeRepositories, tmp_path: Path) -> RunJob:
    """Run the job of a commit with this behaviour; two ranks and twelve iterations unless said otherwise."""
    return runner(repositories, tmp_path)


@pytest.fixture(scope="module")
def usual(session_repositories: PracticeRepositories, tmp_path_factory: pytest.TempPathFactory) -> JobRun:
    """What `run_job()` gives, for the tests that only look at it."""
    return runner(session_repositories, tmp_path_factory.mktemp("usual"))()


def runner(repositories: PracticeRepositories, folder: Path) -> RunJob:
    runs = 0

    def run(*flags: str, ranks: int = 2, name: str = "practice", timeout: float = 300, **behaviour: Any) -> JobRun:
        nonlocal runs
        runs += 1
        if behaviour:
            commit_behaviour(repositories, "Behave differently", **behaviour)
        place = folder / f"job{runs}"
        tree = clone(repositories.bridge_url, place / "Megatron-Bridge")
        output = place / "output"
        argv = [
            *("-m", "llama", "-mr", "llama_small", "-g", "h100", "-ng", str(ranks), "-gn", str(ranks)),
            *("-ms", str(STEPS), "--save_dir", str(output / "checkpoints"), "--save_interval", "5"),
            *("--save_config_filepath", str(output / "configs" / "ConfigContainer.yaml")),
            *(f"logger.tensorboard_dir={output / 'tb_logs'}", *TENSORBOARD),
            *flags,
        ]
        return run_ranks(tree, argv, output, ranks, name, timeout)

    return run


def clone(url: str, folder: Path) -> Path:
    subprocess.run(["git", "clone", "--quiet", url, str(folder)], check=True)
    return folder


def run_ranks(tree: Path, argv: list[str], output: Path, ranks: int, name: str, timeout: float) -> JobRun:
    code = output.parent / "job" / "code"
    code.mkdir(parents=True, exist_ok=True)
    output.mkdir(exist_ok=True)
    processes = [
        subprocess.Popen(
            [sys.executable, str(tree / "scripts/performance/bootstrap.py"), *argv],
            env=_step_environment(rank, ranks, name),
            cwd=code,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        said = tuple(process.communicate(timeout=timeout)[0] for process in processes)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return JobRun(output, tuple(process.returncode for process in processes), said)


def _step_environment(rank: int, ranks: int, name: str) -> Mapping[str, str]:
    kept = {variable: value for variable, value in os.environ.items() if not variable.startswith("SLURM_")}
    return kept | {
        "SLURM_PROCID": str(rank),
        "SLURM_NTASKS": str(ranks),
        "SLURM_JOB_ID": "17",
        "SLURM_JOB_NAME": name,
        "PYTHONDONTWRITEBYTECODE": "1",
    }
