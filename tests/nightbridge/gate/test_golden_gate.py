"""Golden values as a gate of a test: upstream's fail-open cases again, against a golden file and without any history.

Each case was fed to the real `scripts/performance/utils/evaluate.py`, which passed it or crashed; the golden run is 50
steps at 700 TFLOP/s per GPU.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nightbridge.errors import DamagedData, InvalidInput
from nightbridge.gate.evidence import golden_result
from nightbridge.gate.run_verdict import compare
from nightbridge.gate.tonight import Evidence
from nightbridge.models import GatePolicy, GoldenPolicy, RunRecord, Verdict, VerdictStatus
from nightbridge.outputs.curves import read_curves
from nightbridge.outputs.event_files import metrics_parquet
from nightbridge.outputs.measurements import RunSettings, summarise
from nightbridge.store.directory import DirectoryStore
from tests.nightbridge.gate.test_fail_open import STEPS, log_of

Judge = Callable[..., Verdict]

BRIDGE: dict[str, Any] = {
    **{
        str(step - 1): {
            "lm loss": round(11.9 - 0.1 * step, 4),
            "elapsed time per iteration (ms)": 1000.0,
            "GPU utilization": 700.0,
        }
        for step in range(1, STEPS + 1)
    },
    "max_alloc": 81.9,
}
MEGATRON_LM: dict[str, Any] = {
    name: {"start_step": 1, "end_step": STEPS, "step_interval": 1, "values": values}
    for name, values in {
        "lm loss": {str(step): round(11.9 - 0.1 * step, 4) for step in range(1, STEPS + 1)},
        "iteration-time": {str(step): 1.0 for step in range(1, STEPS + 1)},
    }.items()
}


@pytest.fixture
def judge(tmp_path: Path, store: DirectoryStore, make_record: Callable[..., RunRecord]) -> Judge:
    """The verdict on a log, by golden values alone."""

    def judge(text: str, golden: Any = BRIDGE, **rules: Any) -> Verdict:
        log, file = tmp_path / "log-account.nightly_0.out", tmp_path / "golden.json"
        log.write_text(text)
        file.write_text(golden if isinstance(golden, str) else json.dumps(golden))
        curves = read_curves((), (log,))
        gate = GatePolicy(golden=str(file), golden_rules=GoldenPolicy(**rules))
        record = make_record(summarise(curves, gate, STEPS, RunSettings(), None), gate=gate)
        store.put(f"{record.prefix}/metrics.parquet", metrics_parquet(curves.table))
        return compare(record, (), Evidence(golden=golden_result(store, record)))

    return judge


def test_a_run_like_the_golden_one_passes_without_any_history(judge: Judge) -> None:
    verdict = judge(log_of())

    assert verdict.status is VerdictStatus.PASSED


@pytest.mark.parametrize("golden", [BRIDGE, MEGATRON_LM])
def test_the_golden_values_stand_beside_tonights(judge: Judge, golden: dict[str, Any]) -> None:
    found = {item.metric: item.golden for item in judge(log_of(tflops=[714.0] * STEPS), golden).comparisons}

    assert found["step_time"] == pytest.approx(1.0)
    assert found["final_loss"] == pytest.approx(6.9)
    assert found["tflops_per_gpu"] == (700.0 if golden is BRIDGE else None)
    assert found["peak_memory"] == (81.9 if golden is BRIDGE else None)


def test_being_faster_never_fails(judge: Judge) -> None:
    assert judge(log_of(tflops=[750.0] * STEPS)).status is VerdictStatus.PASSED


@pytest.mark.parametrize(
    ("log", "status", "rule"),
    [
        pytest.param(log_of(tflops=[650.0] * STEPS), VerdictStatus.REGRESSED, "performance", id="7 % less throughput"),
        pytest.param(log_of(steps=20), VerdictStatus.SHORT, "", id="20 of 50 steps"),
        pytest.param(log_of(steps=20, tflops=[350.0] * 20), VerdictStatus.SHORT, "", id="20 steps, half throughput"),
        pytest.param(log_of(lossless=range(1, 51)), VerdictStatus.FAILED, "", id="every loss is NaN"),
        pytest.param(log_of(tflops=None), VerdictStatus.FAILED, "golden values, steps", id="no throughput at all"),
        pytest.param(log_of(lossless=[10]), VerdictStatus.FAILED, "", id="NaN at iteration 10"),
        pytest.param(
            log_of(tflops=[500.0] * 35 + [700.0] * 15), VerdictStatus.REGRESSED, "slow steps", id="slow for 35 of 50"
        ),
        pytest.param(log_of(tflops=[500.0] * STEPS) + log_of(steps=10), VerdictStatus.SHORT, "", id="two runs"),
        pytest.param("", VerdictStatus.SHORT, "", id="an empty log"),
        pytest.param(log_of(memory=""), VerdictStatus.FAILED, "memory max_alloc", id="no memory line"),
    ],
)
def test_what_passes_there_does_not_pass_here(judge: Judge, log: str, status: VerdictStatus, rule: str) -> None:
    verdict = judge(log)

    assert verdict.status is status
    assert rule in " | ".join(verdict.reasons)


@pytest.mark.parametrize(
    ("log", "only_slower"),
    [
        (log_of(), False),
        (log_of(tflops=[600.0] * STEPS), True),
        (log_of(tflops=[600.0] * STEPS, bias=0.2), False),
    ],
    ids=["as good", "slower", "slower, with other losses"],
)
def test_what_is_only_slower_is_told_from_other_losses(
    tmp_path: Path,
    store: DirectoryStore,
    make_record: Callable[..., RunRecord],
    judge: Judge,
    log: str,
    only_slower: bool,
) -> None:
    judge(log)

    answer = golden_result(store, make_record(gate=GatePolicy(golden=str(tmp_path / "golden.json"))))

    assert answer is not None
    assert answer.only_slower is only_slower


def test_values_are_paired_by_step_and_not_by_position(judge: Judge) -> None:
    golden = {key: value for key, value in BRIDGE.items() if key not in ("0", "1", "2", "3", "4")}

    assert judge(log_of(), golden).status is VerdictStatus.PASSED


def test_a_golden_file_that_lacks_throughput_passes_nothing(judge: Judge) -> None:
    golden = {
        key: {name: number for name, number in value.items() if name == "lm loss"} if key.isdecimal() else value
        for key, value in BRIDGE.items()
    }

    verdict = judge(log_of(), golden)

    assert verdict.status is VerdictStatus.REGRESSED
    assert "golden values, performance: the golden values have no throughput" in verdict.reasons


def test_the_parameters_are_the_tests_own(judge: Judge) -> None:
    slower = log_of(tflops=[650.0] * STEPS)

    assert judge(slower, timing_threshold=0.1).status is VerdictStatus.PASSED


def test_megatron_lms_golden_values_are_compared_too(judge: Judge) -> None:
    rules: dict[str, Any] = {"required_memory": ()}

    assert judge(log_of(), MEGATRON_LM, **rules).status is VerdictStatus.PASSED
    assert judge(log_of(tflops=[600.0] * STEPS), MEGATRON_LM, **rules).status is VerdictStatus.REGRESSED


@pytest.mark.parametrize(("golden", "error"), [("{", DamagedData), ("[]", InvalidInput), ("{}", InvalidInput)])
def test_a_golden_file_that_is_none_is_told(judge: Judge, golden: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        judge(log_of(), golden)


def test_a_golden_file_that_is_gone_is_told(store: DirectoryStore, make_record: Callable[..., RunRecord]) -> None:
    record = make_record(gate=GatePolicy(golden="/nowhere/golden.json"))

    with pytest.raises(InvalidInput, match="cannot be read"):
        golden_result(store, record)


def test_a_run_without_scalars_fails(
    tmp_path: Path, store: DirectoryStore, make_record: Callable[..., RunRecord]
) -> None:
    (tmp_path / "golden.json").write_text(json.dumps(BRIDGE))
    record = make_record(gate=GatePolicy(golden=str(tmp_path / "golden.json")))

    answer = golden_result(store, record)

    assert answer is not None
    assert (answer.whole, answer.as_good) == (False, False)
