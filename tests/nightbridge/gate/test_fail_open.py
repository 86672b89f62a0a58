"""Upstream's gate on broken runs, and ours on the same ones: from the log's text, through the measurements, to a verdict.

Each case was fed to the real `scripts/performance/utils/evaluate.py`; its answer is in the case's name. The good night
is 50 steps at 700 TFLOP/s per GPU.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from nightbridge.gate.run_verdict import compare
from nightbridge.history.rows import HistoryRow
from nightbridge.models import GatePolicy, Summary, Verdict, VerdictStatus
from nightbridge.outputs.curves import read_curves
from nightbridge.outputs.experiment import read_run
from nightbridge.outputs.measurements import RunSettings, summarise
from tests.builders import make_record, make_row

STEPS = 50
MEMORY = (
    "[Rank 0] (after 2 iterations) memory (GB) | mem-allocated-gigabytes: 70.2 | mem-max-allocated-gigabytes: 81.9 |"
)

Judge = Callable[[str], Verdict]


def log_of(
    *,
    steps: int = STEPS,
    tflops: Sequence[float] | None = (700.0,) * STEPS,
    lossless: Sequence[int] = (),
    memory: str = MEMORY,
    bias: float = 0.0,
) -> str:
    """What both ranks print, in Megatron-Bridge's formats. A NaN loss is not printed at all.

    `bias` is a relative one of every loss but the last.
    """
    lines = []
    for step in range(1, steps + 1):
        rate = tflops[step - 1] if tflops else None
        seconds = 700.0 / (rate or 700.0)
        if rate is not None:
            lines.append(f"Step Time : {seconds:.2f}s GPU utilization: {rate:.1f}MODEL_TFLOP/s/GPU")
        throughput = "" if rate is None else f" throughput per GPU (TFLOP/s/GPU): {rate:.1f} |"
        loss = "" if step in lossless else f" lm loss: {(11.9 - 0.1 * step) * (1 + bias * (step < steps)):.6E} |"
        lines.append(
            f" [2026-11-10 03:00:{step:02}] iteration {step:8d}/{STEPS:8d} | consumed samples: {step * 128:12d} |"
            f" elapsed time per iteration (ms): {1000 * seconds:.1f} |{throughput} learning rate: 3.000000E-04 |"
            f" global batch size: {128:5d} |{loss} loss scale: 1.0 | grad norm: 1.234 |"
            f" number of skipped iterations: {0:3d} | number of nan iterations: {int(step in lossless):3d} |"
        )
        if step == 2:
            lines.append(memory)
    return "\n".join(lines) + "\n"


def summary_of_log(folder: Path, text: str) -> Summary:
    log = folder / "log-account.nightly_0.out"
    log.write_text(text)
    return summarise(read_curves((), (log,)), GatePolicy(), STEPS, RunSettings(), None)


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> list[HistoryRow]:
    """Nine good nights."""
    good = summary_of_log(tmp_path_factory.mktemp("good"), log_of())
    return [make_row(good, f"2026-11-0{day}") for day in range(1, 10)]


@pytest.fixture
def judge(tmp_path: Path, history: list[HistoryRow]) -> Judge:
    """The verdict on a log, against nine good nights."""
    return lambda text: compare(make_record(summary_of_log(tmp_path, text)), history)


def test_identical_passes_there_and_here(judge: Judge) -> None:
    assert judge(log_of()).status is VerdictStatus.PASSED


def test_seven_percent_less_throughput_fails_there_and_here(judge: Judge) -> None:
    assert judge(log_of(tflops=[650.0] * STEPS)).status is VerdictStatus.REGRESSED


def test_seven_percent_more_throughput_fails_there_and_is_an_improvement_here(judge: Judge) -> None:
    assert judge(log_of(tflops=[750.0] * STEPS)).status is VerdictStatus.IMPROVED


@pytest.mark.parametrize(
    ("log", "status"),
    [
        pytest.param(log_of(steps=20), VerdictStatus.SHORT, id="only 20 of 50 steps"),
        pytest.param(log_of(steps=20, tflops=[350.0] * 20), VerdictStatus.SHORT, id="20 steps at half the throughput"),
        pytest.param(log_of(lossless=range(1, 51)), VerdictStatus.FAILED, id="every loss is NaN"),
        pytest.param(log_of(tflops=None), VerdictStatus.FAILED, id="no throughput line at all"),
        pytest.param(log_of(lossless=[10]), VerdictStatus.FAILED, id="NaN at iteration 10"),
        pytest.param(log_of(lossless=[50]), VerdictStatus.FAILED, id="the last loss is NaN"),
        pytest.param(
            log_of(tflops=[500.0] * 35 + [700.0] * 15), VerdictStatus.REGRESSED, id="slow for 35 of 50 steps, then fine"
        ),
        pytest.param(log_of(tflops=[500.0] * STEPS) + log_of(steps=10), VerdictStatus.SHORT, id="two runs in one log"),
        pytest.param(log_of(memory=""), VerdictStatus.FAILED, id="no memory line"),
        pytest.param(log_of(bias=0.09), VerdictStatus.REGRESSED, id="losses 9 % too high, all but the last"),
        pytest.param(
            log_of(tflops=[700.0] * 46 + [350.0] * 4), VerdictStatus.REGRESSED, id="half speed in the last 9 % of steps"
        ),
    ],
)
def test_passes_there_and_not_here(judge: Judge, log: str, status: VerdictStatus) -> None:
    assert judge(log).status is status


@pytest.mark.parametrize("log", ["", "\n", "srun: error: node1: task 0: Killed\n"])
def test_an_empty_log_crashes_there_and_is_short_here(judge: Judge, log: str) -> None:
    verdict = judge(log)

    assert verdict.status is VerdictStatus.SHORT
    assert verdict.reasons == ("0 of 50 steps recorded",)


def test_a_nan_moves_later_losses_to_other_steps_there_and_none_here(tmp_path: Path) -> None:
    log = tmp_path / "log-account.nightly_0.out"
    log.write_text(log_of(lossless=[10]))

    losses = read_curves((), (log,)).steps["loss"]

    assert losses.loc[9] == pytest.approx(11.0)
    assert 10 not in losses.dropna().index
    assert losses.loc[11] == pytest.approx(10.8)
    assert losses.loc[50] == pytest.approx(6.9)


@pytest.mark.parametrize(("old", "new", "status"), [(500.0, 700.0, "passed"), (700.0, 500.0, "regressed")])
@pytest.mark.parametrize("old_id", [4, 99999])
def test_the_log_of_an_earlier_run_decides_by_chance_there_and_is_never_read_here(
    judge: Judge,
    tmp_path: Path,
    old: float,
    new: float,
    status: str,
    old_id: int,
) -> None:
    folder = tmp_path / "experiment"
    folder.mkdir()
    job = make_record().job.model_copy(update={"experiment_dir": folder, "attempt_dir": tmp_path})
    (folder / f"log-account.nightly_{old_id}_0.out").write_text(log_of(tflops=[old] * STEPS))
    (folder / f"log-account.nightly_{job.job_id}_0.out").write_text(log_of(tflops=[new] * STEPS))

    (log,) = read_run(job, None).logs

    assert judge(log.read_text()).status == status
