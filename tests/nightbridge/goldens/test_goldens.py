"""Upstream's golden files, and upstream's rules made to fail closed."""

import json
import math
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nightbridge.errors import DamagedData, InvalidInput
from nightbridge.goldens.goldens import (
    GoldenValues,
    compare_golden,
    golden_of_steps,
    read_golden,
    read_golden_file,
    write_golden,
)
from nightbridge.models import GoldenPolicy

STEPS = 50
LOSS, TIME, RATE, NORM = "lm loss", "elapsed time per iteration (ms)", "GPU utilization", "grad norm"
MEMORY = {"alloc": 70.2, "max_alloc": 81.9, "max_reserved": 90.0}
ENDLESS = [(1, 10**10, 1), (10**10, 10**10 + 10**9, 1), (1, 10**30, 1), (1, math.inf, 1), (1, 15, 0)]
"""First step, last step and interval of series whose steps nobody could list."""


def run_of(
    *,
    steps: int = STEPS,
    losses: Mapping[int, float | None] | None = None,
    rates: Mapping[int, float | None] | None = None,
    norms: Mapping[int, float | None] | None = None,
    memory: Mapping[str, float | None] = MEMORY,
) -> GoldenValues:
    """A run of 50 steps at 700 TFLOP/s per GPU, or what is given of it."""
    every = range(1, steps + 1)
    metrics: dict[str, Mapping[int, float | None]] = {
        LOSS: {step: 11.9 - 0.1 * step for step in every} | dict(losses or {}),
        TIME: dict.fromkeys(every, 1000.0),
        RATE: dict.fromkeys(every, 700.0) | dict(rates or {}),
        NORM: dict.fromkeys(every, 1.2) | dict(norms or {}),
    }
    return golden_of_steps(metrics, memory)


@pytest.fixture
def golden() -> GoldenValues:
    """What was recorded: the good run, as its file has it, without gradient norms."""
    run = run_of()
    metrics = {name: values for name, values in run.metrics.items() if name != NORM}
    return run.model_copy(update={"metrics": metrics})


def test_what_is_written_is_read_again_and_is_as_good_as_itself() -> None:
    run = run_of()

    again = read_golden(write_golden(run))

    assert again == run
    assert failures(run, again) == []


def failures(run: GoldenValues, golden: GoldenValues, policy: GoldenPolicy | None = None) -> list[str]:
    return [fault.rule for fault in compare_golden(run, golden, policy or GoldenPolicy())]


class TestMegatronBridgesFiles:
    CONTENT: Mapping[str, Any] = {
        "0": {LOSS: 11.89415, TIME: 53048.6, RATE: 1.0},
        "1": {LOSS: 11.5, TIME: 1000.0, RATE: 700.0},
        "alloc": 81.904,
        "max_alloc": 93.2,
        "job_id": 4711,
    }

    def test_keys_count_from_0_and_iterations_from_1(self) -> None:
        golden = read_golden(json.dumps(self.CONTENT))

        assert golden.format == "megatron-bridge"
        assert golden.metrics[LOSS] == {1: 11.89415, 2: 11.5}
        assert golden.metrics[RATE] == {1: 1.0, 2: 700.0}
        assert golden.memory == {"alloc": 81.904, "max_alloc": 93.2}

    def test_a_wrapped_file_holds_the_same_and_the_baseline_comes_first(self) -> None:
        flat = read_golden(json.dumps(self.CONTENT))

        assert read_golden(json.dumps({"current": self.CONTENT})) == flat
        assert read_golden(json.dumps({"current": {"0": {LOSS: 1.0}}, "baseline": self.CONTENT})) == flat

    @pytest.mark.parametrize("value", ["NaN", "Infinity", "null", '"nan"'])
    def test_a_value_that_is_none_is_a_step_without_one(self, value: str) -> None:
        golden = read_golden(f'{{"0": {{"{LOSS}": 1.0}}, "1": {{"{LOSS}": {value}}}}}')

        assert golden.metrics[LOSS] == {1: 1.0}
        assert golden.not_recorded == {LOSS: (2,)}

    def test_a_metric_that_some_steps_lack_has_gaps_there(self) -> None:
        golden = read_golden(json.dumps({"0": {LOSS: 1.0, RATE: 7.0}, "1": {LOSS: 1.0}}))

        assert golden.not_recorded == {RATE: (2,)}


@pytest.fixture(scope="module")
def refusals() -> list[str]:
    """What the steps of each of `ENDLESS` end with, in a process that has little memory."""
    series = [
        {"start_step": first, "end_step": last, "step_interval": interval, "values": {"1": 10.4}}
        for first, last, interval in ENDLESS
    ]
    code = (
        "import resource\n"
        "from nightbridge.goldens.goldens import read_golden\n"
        "resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))\n"
        f"for content in {[json.dumps({LOSS: each}) for each in series]!r}:\n"
        "    try:\n        read_golden(content)\n"
        "    except Exception as error:\n        print(type(error).__name__, error, flush=True)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    return ended.stdout.splitlines()


class TestMegatronLmsFiles:
    def content(self, values: Any, first: int = 1, last: int = 15, interval: int = 5) -> str:
        series = {"start_step": first, "end_step": last, "step_interval": interval, "values": values}
        return json.dumps({LOSS: series})

    def test_the_first_step_and_then_the_multiples_of_the_interval(self) -> None:
        golden = read_golden(self.content({"1": 10.4, "5": 10.3, "10": 10.2, "15": 10.1}))

        assert golden.format == "megatron-lm"
        assert golden.metrics[LOSS] == {1: 10.4, 5: 10.3, 10: 10.2, 15: 10.1}

    def test_every_interval_from_the_first_step(self) -> None:
        golden = read_golden(self.content({"1": 10.4, "6": 10.3, "11": 10.2}, last=15))

        assert golden.metrics[LOSS] == {1: 10.4, 6: 10.3, 11: 10.2}

    def test_a_list_without_step_numbers_ends_before_the_last_step(self) -> None:
        golden = read_golden(self.content([10.4, 10.3, 10.2], first=0, last=15))

        assert golden.metrics[LOSS] == {0: 10.4, 5: 10.3, 10: 10.2}

    def test_nan_as_a_word_is_a_step_that_was_not_recorded(self) -> None:
        golden = read_golden(self.content({"1": "nan", "2": 10.3}, last=2, interval=1))

        assert golden.metrics[LOSS] == {2: 10.3}
        assert golden.not_recorded == {LOSS: (1,)}

    def test_the_largest_memory_of_any_step_counts(self) -> None:
        series = {"start_step": 1, "end_step": 2, "step_interval": 1, "values": {"1": 5.0, "2": 7.0}}

        assert read_golden(json.dumps({"mem-max-allocated-bytes": series})).memory == {"mem-max-allocated-bytes": 7.0}

    @pytest.mark.parametrize(
        "values",
        [{"1": 10.4, "5": "nan", "10": 10.2, "15": 10.1}, {"1": 10.4, "6": 10.3, "11": 10.2}],
        ids=["multiples", "from the first"],
    )
    def test_steps_are_counted_in_either_way(self, values: Mapping[str, Any]) -> None:
        (found,) = read_golden(self.content(values)).metrics.values()

        assert found == {int(step): value for step, value in values.items() if value != "nan"}

    @pytest.mark.parametrize(
        "values",
        [
            {"1": 10.4, "5": 10.3, "10": 10.2},
            {"1": 10.4, "5": 10.3, "12": 10.2, "15": 10.1},
            {"1": 10.4, "x": 10.3},
            {},
            [1.0, 2.0],
            7,
            None,
            {"1": "ten", "5": 10.3, "10": 10.2, "15": 10.1},
            {"1": [], "5": 10.3, "10": 10.2, "15": 10.1},
        ],
    )
    def test_a_metric_without_the_steps_that_it_declares_is_refused(self, values: Any) -> None:
        with pytest.raises(DamagedData, match="lm loss"):
            read_golden(self.content(values))

    @pytest.mark.parametrize("index", range(len(ENDLESS)), ids=map(str, ENDLESS))
    def test_steps_that_nobody_could_list_are_refused_at_once(self, refusals: list[str], index: int) -> None:
        assert refusals[index].startswith("DamagedData golden values: lm loss: ")


class TestOtherFiles:
    def test_a_number_that_is_larger_than_any_float_is_a_step_that_was_not_recorded(self) -> None:
        golden = read_golden(f'{{"0": {{"{LOSS}": 1{"0" * 400}}}, "1": {{"{LOSS}": 2.0}}}}')

        assert (golden.metrics[LOSS], golden.not_recorded) == ({2: 2.0}, {LOSS: (1,)})

    @pytest.mark.parametrize(
        "text", ["", "{", b"\xff\xfe", '{"0": {"lm loss": 1.0}, "0": {"lm loss": 2.0}}', "[" * 9999]
    )
    def test_what_is_no_whole_json_is_damaged(self, text: str | bytes) -> None:
        with pytest.raises(DamagedData, match="not JSON"):
            read_golden(text)

    @pytest.mark.parametrize(
        "content",
        [
            [],
            {},
            7,
            "text",
            {"alloc": 1.0},
            {"0": 7.0},
            {"baseline": {}},
            {"0": {"generated_text": "Once", "latency": 1}},
        ],
    )
    def test_what_is_no_training_metrics_is_refused_with_the_reason(self, content: Any) -> None:
        with pytest.raises(InvalidInput):
            read_golden(json.dumps(content))

    def test_a_missing_file_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(InvalidInput, match=r"gone\.json: cannot be read"):
            read_golden_file(tmp_path / "gone.json")


class TestPassing:
    def test_the_run_itself_passes_every_rule(self, golden: GoldenValues) -> None:
        assert failures(run_of(), golden) == []

    def test_a_run_that_has_nothing_fails_every_rule(self, golden: GoldenValues) -> None:
        nothing = golden.model_copy(update={"metrics": {}, "memory": {}})

        assert set(failures(nothing, golden)) == {
            "metrics",
            "steps",
            "grad norm",
            "loss correlation",
            "point-wise loss",
            "final loss",
            "loss outliers",
            "performance",
            "slow steps",
            "memory alloc",
            "memory max_alloc",
            "memory max_reserved",
        }

    def test_little_noise_passes(self, golden: GoldenValues) -> None:
        rng = np.random.default_rng(1)
        every = range(1, STEPS + 1)
        run = run_of(
            losses={step: (11.9 - 0.1 * step) * (1 + 0.005 * rng.standard_normal()) for step in every},
            rates={step: 700 * (1 + 0.01 * rng.standard_normal()) for step in every},
            memory={name: size * 1.02 for name, size in MEMORY.items()},
        )

        assert failures(run, golden) == []

    def test_being_faster_or_smaller_is_no_failure(self, golden: GoldenValues) -> None:
        faster = compare_golden(run_of(rates=dict.fromkeys(range(1, STEPS + 1), 750.0)), golden)
        smaller = compare_golden(run_of(memory={name: 0.9 * size for name, size in MEMORY.items()}), golden)

        assert faster == smaller == ()

    def test_a_burst_of_slow_steps_passes_when_the_mean_does(self, golden: GoldenValues) -> None:
        assert failures(run_of(rates=dict.fromkeys(range(20, 26), 500.0)), golden) == []

    def test_a_longer_run_is_compared_where_the_golden_run_has_steps(self, golden: GoldenValues) -> None:
        assert failures(run_of(steps=60), golden) == []

    def test_steps_that_the_golden_run_of_megatron_lm_has_not_recorded_are_not_asked_for(self) -> None:
        values = {str(step): "nan" if step <= 10 else 9.0 - 0.01 * step for step in range(1, 41)}
        times = {str(step): "nan" if step <= 11 else 0.5 for step in range(1, 41)}
        steps = {"start_step": 1, "end_step": 40, "step_interval": 1}
        golden = read_golden(
            json.dumps(
                {
                    LOSS: steps | {"values": values},
                    "iteration-time": steps | {"values": times},
                    "mem-max-allocated-bytes": steps | {"values": dict.fromkeys(values, 7e9)},
                }
            )
        )
        slower = golden.model_copy(
            update={"metrics": golden.metrics | {"iteration-time": dict.fromkeys(range(1, 41), 0.6)}}
        )

        assert failures(golden, golden) == []
        assert failures(slower, golden) == ["performance", "slow steps"]


EVERY = range(1, STEPS + 1)

# What upstream's gate makes of these is in the name.
FAIL_OPEN: dict[str, Callable[[], GoldenValues]] = {
    "only 20 of 50 steps (passes)": lambda: run_of(steps=20),
    "20 steps and half the throughput (passes)": lambda: run_of(steps=20, rates=dict.fromkeys(range(1, 21), 350.0)),
    "every loss NaN (passes)": lambda: run_of(losses=dict.fromkeys(EVERY, math.nan)),
    "no throughput at all (passes)": lambda: run_of(rates=dict.fromkeys(EVERY)),
    "one NaN loss, the later ones moved up (passes)": lambda: run_of(losses={10: math.nan}),
    "slow for 35 of 50 steps (passes)": lambda: run_of(rates=dict.fromkeys(range(1, 36), 500.0)),
    "an empty log (crashes)": lambda: golden_of_steps({}, {}),
    "the last loss NaN (passes)": lambda: run_of(losses={STEPS: math.nan}),
    "the last loss infinite": lambda: run_of(losses={STEPS: math.inf}),
    "a gradient norm NaN": lambda: run_of(norms={17: math.nan}),
    "no gradient norms (passes)": lambda: run_of(norms=dict.fromkeys(EVERY)),
    "no memory (passes)": lambda: run_of(memory={}),
    "a memory that is NaN": lambda: run_of(memory=MEMORY | {"max_alloc": math.nan}),
    "7 % slower (fails)": lambda: run_of(rates=dict.fromkeys(EVERY, 650.0)),
    "a step missing in the middle (passes)": lambda: run_of(rates={25: None}),
}


class TestFailingClosed:
    @pytest.mark.parametrize("case", FAIL_OPEN)
    def test_a_broken_run_fails(self, case: str, golden: GoldenValues) -> None:
        found = compare_golden(FAIL_OPEN[case](), golden)

        assert found
        assert all(fault.message for fault in found)

    def test_a_nan_does_not_move_the_later_losses(self, golden: GoldenValues) -> None:
        assert failures(run_of(losses={10: math.nan}), golden) == ["steps"]

    @pytest.mark.parametrize("part", [LOSS, RATE, "memory", "everything"])
    def test_golden_values_that_lack_something_pass_nobody(self, part: str, golden: GoldenValues) -> None:
        kept = {name: values for name, values in golden.metrics.items() if name != part and part != "everything"}
        memory = {} if part in ("memory", "everything") else golden.memory
        poorer = golden.model_copy(update={"metrics": kept, "memory": memory})

        assert compare_golden(run_of(), poorer)

    @pytest.mark.parametrize("loss", [math.nan, math.inf, None])
    def test_golden_values_of_megatron_bridge_whose_loss_is_not_finite_pass_nobody(self, loss: float | None) -> None:
        broken = run_of(losses=dict.fromkeys(range(4, STEPS + 1), loss))

        for run in (broken, run_of()):
            (fault,) = [fault for fault in compare_golden(run, broken) if fault.rule == "metrics"]
            assert fault.message == "the golden values have no finite lm loss at 47 steps, first 4"

    def test_two_golden_losses_that_do_not_move_tell_nothing_about_correlation(self) -> None:
        flat = run_of(losses=dict.fromkeys(EVERY, 2.5))

        assert failures(run_of(losses=dict.fromkeys(EVERY, 2.51)), flat) == ["loss correlation"]


class TestRules:
    def test_a_loss_that_does_not_follow_is_not_correlated(self, golden: GoldenValues) -> None:
        assert "loss correlation" in failures(run_of(losses={s: 6.9 + 0.1 * (s - 1) for s in EVERY}), golden)

    def test_the_first_losses_are_not_looked_at(self, golden: GoldenValues) -> None:
        run = run_of(losses=dict.fromkeys(range(1, 11), 100.0))

        assert failures(run, golden) == []
        assert "point-wise loss" in failures(run, golden, GoldenPolicy(skip_first_percent_loss=0.0))

    @pytest.mark.parametrize(("level", "beyond"), [(5.0, 0.11), (1.0, 0.06), (0.3, 0.03)])
    def test_the_tolerance_per_step_follows_the_level_of_the_loss(self, level: float, beyond: float) -> None:
        losses = {step: level * (1 + 0.001 * (STEPS - step)) for step in EVERY}
        moved = {step: loss * (1 + beyond if 20 < step < 40 else 1) for step, loss in losses.items()}
        less = {step: loss * (1 + beyond - 0.02 if 20 < step < 40 else 1) for step, loss in losses.items()}
        golden = run_of(losses=losses)

        assert "point-wise loss" in failures(run_of(losses=moved), golden)
        assert "point-wise loss" not in failures(run_of(losses=less), golden)

    def test_the_final_loss_has_a_limit_of_its_own(self, golden: GoldenValues) -> None:
        assert failures(run_of(losses={STEPS: 6.9 * 1.06}), golden) == ["final loss"]
        assert failures(run_of(losses={STEPS: 6.9 * 1.05}), golden) == []

    def test_the_mean_throughput_is_that_of_the_last_steps(self, golden: GoldenValues) -> None:
        late = run_of(rates=dict.fromkeys(range(44, STEPS + 1), 550.0))

        assert failures(late, golden) == ["performance"]
        assert failures(late, golden, GoldenPolicy(timing_threshold=0.15)) == []
        assert failures(late, golden, GoldenPolicy(eval_time_start_step=10, eval_time_end_step=43)) == []

    def test_a_window_without_a_step_passes_nobody(self, golden: GoldenValues) -> None:
        assert "performance" in failures(run_of(), golden, GoldenPolicy(eval_time_start_step=51))

    def test_memory_may_grow_by_its_threshold_and_no_more(self, golden: GoldenValues) -> None:
        assert failures(run_of(memory=MEMORY | {"max_alloc": 81.9 * 1.05}), golden) == []
        assert failures(run_of(memory=MEMORY | {"max_alloc": 81.9 * 1.06}), golden) == ["memory max_alloc"]

    def test_what_is_required_may_be_said(self, golden: GoldenValues) -> None:
        without = run_of(norms=dict.fromkeys(EVERY), memory={"alloc": 70.2}).model_copy(update={"not_recorded": {}})
        policy = GoldenPolicy(grad_norm="if measured", required_memory=("alloc",))

        assert failures(without, golden, policy) == []
        assert failures(run_of(), golden, GoldenPolicy(required_metrics=("mtp_1 loss",))) == ["metrics"]
