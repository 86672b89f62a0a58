"""The practice job of two grids, started by its stand-in for torchrun as the batch script does it."""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from examples.practice.repositories import (
    PracticeRepositories,
    commit_behaviour,
    install_torchrun,
)
from nightbridge.models import CheckpointState
from nightbridge.models.metrics import METRIC_BY_NAME
from nightbridge.outputs.checkpoints import TRACKER, find_checkpoints
from nightbridge.outputs.curves import Curves, read_curves, value_of

STEPS = 6
GRIDS = (
    *("--encoder-tp", "1", "--encoder-pp", "1", "--encoder-dp", "1"),
    *("--llm-offset", "1", "--llm-tp", "1", "--llm-pp", "1", "--llm-dp", "1", "--llm-ep", "1"),
)


@dataclass(frozen=True)
class HeteroRun:
    """How a node's torchrun ended, and what the job left."""

    code: int
    said: str
    output: Path

    @property
    def curves(self) -> Curves:
        # A job that does not know its flags ends before it writes anything.
        self.output.mkdir(parents=True, exist_ok=True)
        log = self.output / "log.out"
        log.write_text(self.said, encoding="utf-8")
        return read_curves(sorted((self.output / "tb_logs").glob("*tfevents*")), [log])


RunHetero = Callable[..., HeteroRun]


@pytest.fixture
def run_hetero(repositories: PracticeRepositories, tmp_path: Path) -> RunHetero:
    """Run two ranks of the newest commit; its behaviour is changed where asked."""
    torchrun = install_torchrun(tmp_path, Path(sys.executable))

    def run(*flags: str, name: str = "practice", **behaviour: object) -> HeteroRun:
        if behaviour:
            commit_behaviour(repositories, "Behave differently", workload="megatron_lm", **behaviour)
        folder = tmp_path / name
        subprocess.run(["git", "clone", "-q", repositories.megatron_lm_url, str(folder / "code")], check=True)
        output = folder / "output"
        words = [
            *("--micro-batch-size", "1", "--global-batch-size", "4", "--train-samples", str(4 * STEPS)),
            *("--lr", "0.02", "--log-memory", "--tensorboard-dir", str(output / "tb_logs")),
            *("--save", str(output / "checkpoints"), "--save-interval", "3", *flags),
        ]
        done = subprocess.run(
            [torchrun, "--nproc-per-node=2", "examples/mimo/train_hetero.py", *GRIDS, *words],
            cwd=folder / "code",
            env={**os.environ, "SLURM_JOB_NAME": name, "PYTHONDONTWRITEBYTECODE": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=600,
            check=False,
        )
        return HeteroRun(done.returncode, done.stdout, output)

    return run


@pytest.mark.thorough
def test_it_trains_saves_and_goes_on_as_if_it_had_never_stopped(run_hetero: RunHetero) -> None:
    whole = run_hetero(name="whole")
    saved = find_checkpoints(whole.output / "checkpoints")
    (whole.output / "checkpoints" / TRACKER).write_text("3")
    second = run_hetero("--load", str(whole.output / "checkpoints"), name="second")

    assert (whole.code, second.code) == (0, 0)
    assert [(found.iteration, found.state) for found in saved] == [
        (3, CheckpointState.COMPLETE),
        (6, CheckpointState.COMPLETE),
    ]
    curves, later = whole.curves, second.curves
    assert (curves.source, curves.damage, curves.notes) == ("tensorboard", (), ())
    assert curves.steps.index.tolist() == list(range(1, STEPS + 1))
    assert curves.steps[["step_time", "loss", "grad_norm"]].notna().all(axis=None)
    assert curves.steps["loss"].iloc[-1] < curves.steps["loss"].iloc[0]
    assert value_of(METRIC_BY_NAME["peak_memory"], curves, curves.steps) is not None
    assert curves.log.finished
    assert (later.start, later.steps.index.tolist()) == (3, [4, 5, 6])
    assert later.steps["loss"].tolist() == curves.steps["loss"].loc[4:].tolist()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--llm-offset", "0"), "the grids share the ranks"),
        (("--bf16",), "unrecognized arguments: --bf16"),
    ],
)
def test_flags_that_contradict_each_other_end_it_before_it_trains(
    run_hetero: RunHetero, flags: tuple[str, ...], said: str
) -> None:
    run = run_hetero(*flags)

    assert run.code == 1
    assert said in run.said
    assert run.curves.steps_done == 0


def test_a_commit_may_crash_it_and_all_ranks_end(run_hetero: RunHetero) -> None:
    run = run_hetero(crash_at=3)

    assert run.code == 1
    assert run.curves.steps_done == 2
    assert "planned crash before iteration 3" in run.curves.log.last_error
