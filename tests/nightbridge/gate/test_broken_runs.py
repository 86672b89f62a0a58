"""Broken runs: each row is one way in which a run was not what it should have been, and the verdict that it must get.

What each row changes of a good run's log, event file and dumped configuration is written down; everything after that is
the pipeline's own: reading, measuring, classifying, committing, comparing with twenty good nights.
"""

import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from nightbridge.history.rows import HistoryRow
from nightbridge.models import JobState, StoreSettings, VerdictStatus
from nightbridge.store.directory import DirectoryStore
from nightbridge.store.object_store import ObjectStore
from tests.nightbridge.gate.left_runs import (
    NVIDIA_SMI,
    STEPS,
    Left,
    Numbers,
    changed,
    deterministic,
    good,
    good_nights,
    harvest,
    judge,
)

pytestmark = pytest.mark.thorough

NIGHT = "2026-11-21"

Change = Callable[[Numbers], Numbers]


class Broken(NamedTuple):
    """A broken run: what it is called, the kind of fault, the verdict it must get, and the fields that differ.

    `of`: the good run that it differs from, by a seed.
    """

    name: str
    mechanism: str
    verdict: str
    fields: dict[str, Any]
    of: Callable[[int], Left] = good


def broken(name: str, mechanism: str, verdict: str, **fields: Any) -> Broken:
    return Broken(name, mechanism, verdict, fields)


def times(factor: float, steps: Sequence[int] = range(1, STEPS + 1)) -> Change:
    """The values of some iterations multiplied."""
    return lambda values: tuple(value * (factor if at in steps else 1) for at, value in enumerate(values, start=1))


def to(value: float, steps: Sequence[int] = range(1, STEPS + 1)) -> Change:
    """The values of some iterations replaced."""
    return lambda values: tuple(value if at in steps else old for at, old in enumerate(values, start=1))


def first(count: int) -> Change:
    return lambda values: values[:count]


def last(count: int) -> Change:
    return lambda values: values[-count:]


def noisy(sigma: float) -> Change:
    noise = random.Random(7)
    return lambda values: tuple(value * (1 + noise.gauss(0, sigma)) for value in values)


def lagging(share: float) -> Change:
    """A curve that needs so much longer to get anywhere."""
    return lambda values: tuple(values[math.floor(at * (1 - share))] for at in range(len(values)))


def growing(to_share: float) -> Change:
    return lambda values: tuple(value * (1 + to_share * at / (len(values) - 1)) for at, value in enumerate(values))


def rising_after(step: int) -> Change:
    return lambda values: tuple(
        value if at < step else values[step - 1] * 1.08 ** (at - step + 1) for at, value in enumerate(values)
    )


def cut(change: Callable[[int], Change], count: int, **fields: Any) -> dict[str, Any]:
    """Fields of a run that has only some of its iterations."""
    per_step = ("seconds", "loss", "grad_norm", "memory", "reserved", "rate", "pauses", "skipped", "nan")
    return {name: change(count) for name in per_step} | fields


def without(*texts: str) -> Callable[[str], str]:
    """The log without the parts of its lines that begin so, up to the next bar."""

    def remove(log: str) -> str:
        lines = []
        for line in log.splitlines():
            parts = [part for part in line.split("|") if not any(part.strip().startswith(text) for text in texts)]
            lines.append("|".join(parts))
        return "\n".join(lines) + "\n"

    return remove


def no_tag(*tags: str) -> Callable[[str, int], bool]:
    return lambda tag, step: tag not in tags


def flip_a_bit(job_dir: Path) -> None:
    (path,) = (job_dir / "tb_logs").iterdir()
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(bytes(data))


def crashed(error: str) -> dict[str, Any]:
    text = f'Traceback (most recent call last):\n  File "train.py", line 1, in <module>\n{error}\n'
    return {"ending": text, "state": JobState.FAILED, "exit_code": 1}


STEADY = range(11, STEPS + 1)
SECOND_HALF = range(26, STEPS + 1)
TWO_OF_FIVE = [step for step in STEADY if step % 5 in (1, 3)]

BROKEN = (
    # --- time ------------------------------------------------------------------------------------------------------
    broken("every step 8 % slower", "slow", "regressed", seconds=times(1.08)),
    broken("every step 30 % slower", "slow", "regressed", seconds=times(1.3)),
    broken("every step at half speed", "slow", "regressed", seconds=times(2)),
    broken("40 % of the steps at half speed", "some steps slow", "regressed", seconds=times(2, TWO_OF_FIVE)),
    broken("every fifth step takes twice as long", "some steps slow", "regressed", seconds=times(2, range(5, 51, 5))),
    broken(
        "every tenth step takes six times as long", "some steps slow", "regressed", seconds=times(6, range(10, 51, 10))
    ),
    broken("every other step 40 % slower", "some steps slow", "regressed", seconds=times(1.4, range(11, 51, 2))),
    broken("every fourth step 50 % slower", "some steps slow", "regressed", seconds=times(1.5, range(12, 51, 4))),
    broken("steps 42 to 46 at half speed", "slow stretch", "regressed", seconds=times(2, range(42, 47))),
    broken("steps 20 to 24 at a third of the speed", "slow stretch", "regressed", seconds=times(3, range(20, 25))),
    broken("the last six steps 25 % slower", "slow end", "regressed", seconds=times(1.25, range(45, 51))),
    broken("the last ten steps 30 % slower", "slow end", "regressed", seconds=times(1.3, range(41, 51))),
    broken("one step hangs for five minutes", "one step hangs", "regressed", seconds=times(30, [33])),
    broken("two steps hang for a minute", "one step hangs", "regressed", seconds=times(7, [20, 40])),
    broken("two seconds lost after every step", "time between steps", "regressed", pauses=to(2.0)),
    broken(
        "a pause of two minutes every ten steps", "time between steps", "regressed", pauses=to(120.0, range(10, 51, 10))
    ),
    broken("a pause of ten minutes in the middle", "time between steps", "regressed", pauses=to(600.0, [30])),
    broken("warm-up steps ten times slower", "slow warm-up", "regressed", seconds=times(10, range(2, 11))),
    broken("warm-up steps twice as slow", "slow warm-up", "regressed", seconds=times(2, range(2, 11))),
    broken("a pause of five minutes in the warm-up", "slow warm-up", "regressed", pauses=to(300.0, [5])),
    broken("first step 300 s", "slow first step", "regressed", seconds=to(300.0, [1])),
    broken("first step 20 minutes", "slow first step", "regressed", seconds=to(1200.0, [1])),
    broken("start-up takes 15 minutes", "slow start-up", "regressed", start_up=900.0),
    broken("start-up takes six minutes", "slow start-up", "regressed", start_up=360.0),
    broken("slower from step to step", "gets slower", "regressed", seconds=growing(0.3)),
    broken("step time 0", "impossible time", "failed", seconds=to(1e-9), tflops=(700.0,) * STEPS),
    broken("a tenth of the step time", "impossible time", "failed", seconds=times(0.1), tflops=(700.0,) * STEPS),
    broken("half of the step time", "impossible time", "failed", seconds=times(0.5), tflops=(700.0,) * STEPS),
    broken("a quarter faster", "too good", "suspicious", seconds=times(0.75)),
    # --- throughput and memory ---------------------------------------------------------------------------------------
    broken("TFLOP/s 8 % lower", "throughput", "regressed", tflops=(645.0,) * STEPS),
    broken("TFLOP/s above the H100's peak", "impossible throughput", "failed", tflops=(1200.0,) * STEPS),
    broken("TFLOP/s ten times too high", "impossible throughput", "failed", tflops=(7000.0,) * STEPS),
    broken("TFLOP/s 30 % higher at the same speed", "too good", "suspicious", tflops=(910.0,) * STEPS),
    broken("TFLOP/s printed as 0", "metric missing", "failed", tflops=(0.0,) * STEPS),
    broken("memory 8 % more", "memory", "regressed", memory=times(1.08)),
    broken("memory 1 % more", "memory", "regressed", memory=times(1.01)),
    broken("memory grows by 5 %", "memory leak", "regressed", memory=growing(0.05)),
    broken("a peak of memory at step 37", "memory peak", "regressed", memory=times(1.5, [37])),
    broken("20 % more memory reserved", "memory reserved", "regressed", reserved=times(1.2)),
    broken("reserved memory grows by a fifth", "memory fragments", "regressed", reserved=growing(0.2)),
    broken("memory above the GPU's", "impossible memory", "failed", memory=to(130.0)),
    broken("half of the memory", "too good", "suspicious", memory=times(0.5)),
    # --- loss --------------------------------------------------------------------------------------------------------
    broken("loss 0", "impossible loss", "failed", loss=to(0.0)),
    broken("loss 1e-6", "impossible loss", "failed", loss=to(1e-6)),
    broken("loss negative", "impossible loss", "failed", loss=times(-1)),
    broken("loss negative at one step", "impossible loss", "failed", loss=to(-2.0, [30])),
    broken("loss 0 at one step", "impossible loss", "failed", loss=to(0.0, [30])),
    broken("loss 0 from step 30 on", "impossible loss", "failed", loss=to(0.0, range(30, 51))),
    broken("loss flat", "flat loss", "failed", loss=to(2.85)),
    broken("loss flat at its first value", "flat loss", "failed", loss=to(11.9)),
    broken("loss flat from step 20 on", "flat loss", "regressed", loss=to(4.8, range(20, 51))),
    broken("loss NaN at step 10", "loss not finite", "failed", loss=to(math.nan, [10])),
    broken("loss NaN at the last step", "loss not finite", "failed", loss=to(math.nan, [50])),
    broken("loss NaN from step 30 on", "loss not finite", "failed", loss=to(math.nan, range(30, 51))),
    broken("loss infinite at step 25", "loss not finite", "failed", loss=to(math.inf, [25])),
    broken("validation loss NaN", "validation not finite", "failed", validation=(3.1, math.nan)),
    broken("loss 9 % higher but at the last step", "loss biased", "regressed", loss=times(1.09, range(1, 50))),
    broken("loss 3 % higher", "loss biased", "regressed", loss=times(1.03)),
    broken("loss 1 % higher in the second half", "loss biased", "regressed", loss=times(1.01, SECOND_HALF)),
    broken("loss 1 % higher", "loss biased", "regressed", loss=times(1.01)),
    broken("loss 20 % higher in steps 15 to 20", "loss bump", "regressed", loss=times(1.2, range(15, 21))),
    broken("loss 6 % higher in steps 25 to 34", "loss bump", "regressed", loss=times(1.06, range(25, 35))),
    broken("loss doubled at step 30", "loss spike", "regressed", loss=times(2, [30])),
    broken("loss 40 % higher at step 12", "loss spike", "regressed", loss=times(1.4, [12])),
    broken("2 % of noise on the loss", "loss noisy", "regressed", loss=noisy(0.02)),
    broken("5 % of noise on the loss", "loss noisy", "regressed", loss=noisy(0.05)),
    broken("loss lags by 10 %", "loss lags", "regressed", loss=lagging(0.1)),
    broken("loss lags by 20 %", "loss lags", "regressed", loss=lagging(0.2)),
    broken("loss drifts to +2 %", "loss drifts", "regressed", loss=growing(0.02)),
    broken("loss diverges from step 40 on", "loss diverges", "regressed", loss=rising_after(40)),
    broken("loss 20 % lower", "too good", "suspicious", loss=times(0.8)),
    broken("loss reversed in time", "loss reversed", "regressed", loss=lambda values: values[::-1]),
    # --- gradients and iterations that were no updates ---------------------------------------------------------------
    broken("gradient norm 0", "no gradient", "failed", grad_norm=to(0.0)),
    broken("gradient norm 0 from step 20 on", "no gradient", "failed", grad_norm=to(0.0, range(20, 51))),
    broken("gradient norm negative", "no gradient", "failed", grad_norm=times(-1)),
    broken("gradient norm a hundredth", "gradients vanish", "suspicious", grad_norm=times(0.01)),
    broken("gradient norm NaN at step 20", "gradient not finite", "failed", grad_norm=to(math.nan, [20])),
    broken("gradient norm infinite at step 20", "gradient not finite", "failed", grad_norm=to(math.inf, [20])),
    broken("gradient norm ten times as large", "gradients explode", "regressed", grad_norm=times(10)),
    broken("gradient norm 100 at step 40", "gradients explode", "regressed", grad_norm=to(100.0, [40])),
    broken("30 of 50 iterations skipped", "skipped iterations", "failed", skipped=to(1, range(11, 41))),
    broken("one iteration skipped", "skipped iterations", "failed", skipped=to(1, [20])),
    broken("30 of 50 iterations counted as NaN", "NaN iterations", "failed", nan=to(1, range(11, 41))),
    broken("one iteration counted as NaN", "NaN iterations", "failed", nan=to(1, [20])),
    # --- not what was planned ----------------------------------------------------------------------------------------
    broken("4 GPUs for 8, by TensorBoard", "world size", "failed", world_size=4),
    broken("16 GPUs for 8, by TensorBoard", "world size", "failed", world_size=16),
    broken("4 GPUs for 8, by the dump", "world size", "failed", dump={"comm_overlap.data_parallel_size": 2}),
    broken("batch 64 for 128", "global batch", "failed", batch=64, samples_per_step=64),
    broken(
        "batch 64 for 128 in twice the speed",
        "global batch",
        "failed",
        batch=64,
        samples_per_step=64,
        seconds=times(0.65),
    ),
    broken("batch 64 for 128, by the dump", "global batch", "failed", dump={"train.global_batch_size": 64}),
    broken("half of the samples consumed", "consumed samples", "failed", samples_per_step=64),
    broken("micro batch 2 for 1", "micro batch", "failed", dump={"train.micro_batch_size": 2}),
    broken(
        "sequences of 4096 where the data set has 8192", "sequence length", "failed", dump={"model.seq_length": 4096}
    ),
    broken(
        "tensor parallel 2 for 1",
        "parallelism",
        "failed",
        dump={"model.transformer.tensor_model_parallel_size": 2, "comm_overlap.data_parallel_size": 2},
    ),
    broken(
        "no context parallelism",
        "parallelism",
        "failed",
        dump={"model.transformer.context_parallel_size": 1, "comm_overlap.data_parallel_size": 8},
    ),
    broken("learning rate a tenth", "learning rate", "failed", rate=times(0.1)),
    broken("learning rate ten times as high", "learning rate", "failed", rate=times(10)),
    broken("learning rate 0", "learning rate", "failed", rate=to(0.0)),
    broken("learning rate a tenth in the dump", "learning rate", "failed", dump={"optimizer.lr": 3e-5}),
    broken("learning rate never decays", "schedule", "failed", rate=to(3e-4, STEADY)),
    broken("learning rate never gets out of the warm-up", "schedule", "failed", rate=to(6e-5, range(2, 51))),
    broken("100 iterations for 50, by the log", "iterations", "failed", total=100),
    broken("100 iterations for 50, by the dump", "iterations", "failed", dump={"train.train_iters": 100}),
    broken("fp16 for bf16", "precision", "failed", dump={"mixed_precision.bf16": False, "mixed_precision.fp16": True}),
    broken("fp8 for bf16", "precision", "failed", dump={"mixed_precision.fp8": "hybrid"}),
    broken("fp32 for bf16", "precision", "failed", dump={"mixed_precision.bf16": False}),
    broken("A100 for H100", "GPU", "failed", banner=NVIDIA_SMI.replace("H100 80GB HBM3", "A100-SXM4-80GB")),
    broken("H200 for H100", "GPU", "failed", banner=NVIDIA_SMI.replace("H100 80GB HBM3", "H200")),
    # --- not all of it ------------------------------------------------------------------------------------------------
    broken("steps 26 to 50 after an undeclared resume", "undeclared resume", "short", **cut(last, 25, start=25)),
    broken("steps 2 to 50", "undeclared resume", "short", **cut(last, 49, start=1)),
    broken("steps 41 to 50 after an undeclared resume", "undeclared resume", "short", **cut(last, 10, start=40)),
    broken(
        "steps 26 to 50, and no line about it",
        "undeclared resume",
        "failed",
        **cut(last, 25, start=25, log=lambda text: text.replace("Starting training loop at iteration 25\n", "")),
    ),
    broken("20 of 50 steps", "short", "short", **cut(first, 20)),
    broken("49 of 50 steps", "short", "short", **cut(first, 49)),
    broken("warm-up alone", "short", "short", **cut(first, 10)),
    broken("20 of 50 steps, exit code 0, at half speed", "short", "short", **cut(first, 20, seconds=first(20))),
    broken("no step at all", "short", "short", **cut(first, 0)),
    broken(
        "no throughput anywhere",
        "metric missing",
        "failed",
        log=lambda text: "\n".join(line for line in text.splitlines() if not line.startswith("Step Time")) + "\n",
        tag_filter=no_tag("throughput/tflops/device"),
    ),
    broken(
        "no memory anywhere",
        "metric missing",
        "failed",
        log=without("[Rank 0] (after", "mem-max"),
        tag_filter=no_tag("memory/mem-max-allocated-gigabytes"),
    ),
    broken("no loss anywhere", "metric missing", "failed", log=without("lm loss"), tag_filter=no_tag("lm loss")),
    broken(
        "no step time anywhere",
        "metric missing",
        "failed",
        log=without("elapsed time"),
        tag_filter=no_tag("iteration-time"),
    ),
    broken(
        "throughput missing at one step",
        "metric has gaps",
        "failed",
        log=lambda text: text.replace("Step Time", "Stp Time"),
        tag_filter=lambda tag, step: (tag, step) != ("throughput/tflops/device", 30),
    ),
    broken(
        "TensorBoard and log disagree on step times",
        "two stories",
        "failed",
        log=lambda text: text.replace("elapsed time per iteration (ms): 1", "elapsed time per iteration (ms): 2"),
    ),
    broken(
        "TensorBoard and log disagree on losses",
        "two stories",
        "failed",
        log=lambda text: text.replace("lm loss: 3.", "lm loss: 4."),
    ),
    broken("a bit of the event file is flipped", "damaged file", "failed", damage=flip_a_bit),
    broken(
        "the profiler was left on",
        "profiler",
        "failed",
        dump={"profiling": {"use_nsys_profiler": True, "profile_step_start": 1, "profile_step_end": 50}},
    ),
    # --- no longer deterministic: the loss of each iteration was the same bit for bit for weeks -------------------------
    Broken("one loss in its last bit", "another digest", "regressed", {"loss": times(1 + 2e-7, [40])}, deterministic),
    Broken("all losses by a millionth", "another digest", "regressed", {"loss": times(1 + 1e-6)}, deterministic),
    Broken("losses a little lower", "another digest", "regressed", {"loss": times(1 - 1e-4)}, deterministic),
    # --- did not end well ----------------------------------------------------------------------------------------------
    broken("an assertion at step 30", "crash", "failed", **cut(first, 30), **crashed("AssertionError: shapes differ")),
    broken(
        "CUDA out of memory at step 12",
        "out of memory",
        "failed",
        **cut(first, 12),
        **crashed("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"),
    ),
    broken(
        "killed by the kernel for its memory",
        "out of memory",
        "failed",
        **cut(first, 12, ending="", state=JobState.OUT_OF_MEMORY, exit_code=137),
    ),
    broken(
        "ran into its time limit",
        "time limit",
        "failed",
        **cut(first, 40, ending="", state=JobState.TIMEOUT, exit_code=0),
    ),
    broken(
        "its node failed",
        "node failure",
        "infrastructure",
        **cut(first, 30, ending="", state=JobState.NODE_FAIL, exit_code=1),
    ),
    broken("cancelled", "cancelled", "cancelled", **cut(first, 30, ending="", state=JobState.CANCELLED, exit_code=0)),
    broken(
        "an NCCL watchdog ended it",
        "network",
        "infrastructure",
        **cut(first, 30),
        **crashed("torch.distributed.DistBackendError: Watchdog caught collective operation timeout"),
    ),
)


GREEN = frozenset({"passed", "improved", "no_baseline", "insufficient_data"})


History = tuple[ObjectStore, tuple[HistoryRow, ...]]


def history_of(folder: Path, left: Callable[[int], Left]) -> History:
    store = DirectoryStore(StoreSettings(url=f"file://{folder}/store"))
    return store, good_nights(store, folder / "run", left=left)


@pytest.fixture(scope="module")
def nights(tmp_path_factory: pytest.TempPathFactory) -> History:
    return history_of(tmp_path_factory.mktemp("good"), good)


@pytest.fixture(scope="module")
def deterministic_nights(tmp_path_factory: pytest.TempPathFactory) -> History:
    return history_of(tmp_path_factory.mktemp("deterministic"), deterministic)


def test_the_table_has_many_rows_of_many_mechanisms() -> None:
    names = [row.name for row in BROKEN]
    assert len(names) == len(set(names)) >= 100
    assert len({row.mechanism for row in BROKEN}) >= 35
    assert not {row.verdict for row in BROKEN} & GREEN


@pytest.mark.parametrize(
    "row",
    [pytest.param(row, id=row.name) for row in BROKEN],
)
def test_a_broken_run_is_never_green(
    row: Broken, nights: History, deterministic_nights: History, tmp_path: Path
) -> None:
    store, history = nights if row.of is good else deterministic_nights

    verdict = judge(harvest(changed(row.of(99), **row.fields), store, tmp_path / "run", NIGHT), history, store)

    assert verdict.status.value == row.verdict, verdict.reasons
    assert verdict.exit_code or verdict.status is VerdictStatus.INFRASTRUCTURE
    assert verdict.reasons


@pytest.mark.parametrize("seed", range(100, 110))
def test_a_good_run_is_green(seed: int, nights: History, tmp_path: Path) -> None:
    store, history = nights

    verdict = judge(harvest(good(seed), store, tmp_path / "run", NIGHT), history, store)

    assert verdict.status is VerdictStatus.PASSED, verdict.reasons


def test_a_good_run_of_a_deterministic_test_is_green(deterministic_nights: History, tmp_path: Path) -> None:
    store, history = deterministic_nights

    verdict = judge(harvest(deterministic(99), store, tmp_path / "run", NIGHT), history, store)

    assert verdict.status is VerdictStatus.PASSED, verdict.reasons


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"tag_filter": lambda tag, step: step <= 45}, id="the event file lost its tail, the log has it"),
        pytest.param({"banner": ""}, id="nothing about the GPU"),
        pytest.param({"world_size": None}, id="TensorBoard without the world size"),
        pytest.param({"seconds": times(0.95)}, id="5 % faster"),
        pytest.param({"reserved": times(1.04)}, id="4 % more memory reserved"),
        pytest.param({"validation": (3.1, 2.9)}, id="a validation loss as well"),
    ],
)
def test_what_is_not_broken_is_green(fields: dict[str, Any], nights: History, tmp_path: Path) -> None:
    store, history = nights

    verdict = judge(harvest(changed(good(99), **fields), store, tmp_path / "run", NIGHT), history, store)

    assert verdict.exit_code == 0, verdict.reasons
