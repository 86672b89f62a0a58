"""The verdict: what fails closed, what makes the baseline, and what counts as a change."""

import math
import random
from collections.abc import Callable, Sequence
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from nightbridge.errors import (
    InvalidInput,
    LaunchRefused,
    PermanentError,
    StatusUnknown,
    TransientError,
)
from nightbridge.gate.decisions import Decision
from nightbridge.gate.run_verdict import OUTCOMES, compare, verdict_for_error, verdict_for_invalid
from nightbridge.gate.tonight import Evidence
from nightbridge.history.nightly_values import good_runs_before
from nightbridge.history.rows import HistoryRow, row_of
from nightbridge.models import (
    GOOD_VERDICTS,
    Arm,
    Checkpoint,
    CheckpointState,
    GatePolicy,
    HarvestPolicy,
    InvalidTest,
    Outcome,
    RunRecord,
    RunSpec,
    Summary,
    Verdict,
    VerdictStatus,
    Violation,
    make_run_key,
    utc_now,
)
from nightbridge.models.metrics import COLUMNS
from tests.builders import make_checkpoint, make_summary

Records = Callable[..., RunRecord]
Rows = Callable[..., HistoryRow]
Specs = Callable[..., RunSpec]
Summaries = Callable[..., Summary]


def status_of(verdict: Verdict, metric: str) -> str:
    return next(comparison.status for comparison in verdict.comparisons if comparison.metric == metric)


@pytest.fixture
def history(make_row: Rows) -> tuple[HistoryRow, ...]:
    """Nine good nights before 2026-11-10: 50 steps of 1 s, 700 TFLOP/s per GPU, 80 GB."""
    return tuple(make_row(night=f"2026-11-{day:02}") for day in range(1, 10))


# --- comparing -------------------------------------------------------------------------------------------------------


def test_the_same_numbers_pass(make_record: Records, history: tuple[HistoryRow, ...]) -> None:
    record = make_record()

    verdict = compare(record, history)

    assert verdict.status is VerdictStatus.PASSED
    assert verdict.reasons == ()
    assert [comparison.metric for comparison in verdict.comparisons] == [metric.name for metric in COLUMNS]
    assert all(comparison.change == 0.0 for comparison in verdict.comparisons)
    assert (verdict.job_id, verdict.prefix, verdict.series) == (4711, record.prefix, record.series)


@pytest.mark.parametrize(
    ("metric", "worse", "better"),
    [
        ("step_time", 1.08, 0.92),
        ("tflops_per_gpu", 644.0, 756.0),
        ("peak_memory", 86.4, 73.6),
        ("final_loss", 5.51, 4.69),
    ],
)
def test_each_metric_has_its_direction(
    make_record: Records,
    summary_of: Summaries,
    history: tuple[HistoryRow, ...],
    metric: str,
    worse: float,
    better: float,
) -> None:
    slow = compare(make_record(summary_of().model_copy(update={metric: worse})), history)
    fast = compare(make_record(summary_of().model_copy(update={metric: better})), history)

    assert (slow.status, status_of(slow, metric)) == (VerdictStatus.REGRESSED, "regressed")
    assert (fast.status, status_of(fast, metric)) == (VerdictStatus.IMPROVED, "improved")
    assert (slow.exit_code, fast.exit_code) == (1, 0)


def test_the_reason_names_metric_values_change_and_limit(
    make_record: Records, summary_of: Summaries, history: tuple[HistoryRow, ...]
) -> None:
    verdict = compare(make_record(summary_of([1.081] * 50)), history)

    assert verdict.reasons[0] == (
        "step time regressed by +8.1 %: 1.081 s against 1.000 s, the median of the last 7 good runs (limit 2 %)"
    )


def test_one_regression_outweighs_improvements(
    make_record: Records, summary_of: Summaries, history: tuple[HistoryRow, ...]
) -> None:
    verdict = compare(make_record(summary_of([0.5] * 50, tflops=1400.0, memory=90.0)), history)

    assert verdict.status is VerdictStatus.REGRESSED
    assert verdict.reasons[0].startswith("peak memory regressed")


@pytest.mark.parametrize(
    ("step_time", "status"),
    [(1.02, VerdictStatus.PASSED), (1.0200001, VerdictStatus.REGRESSED), (0.98, VerdictStatus.PASSED)],
)
def test_exactly_the_limit_passes(
    make_record: Records,
    summary_of: Summaries,
    history: tuple[HistoryRow, ...],
    step_time: float,
    status: VerdictStatus,
) -> None:
    assert compare(make_record(summary_of([step_time] * 50)), history).status is status


def test_the_threshold_is_the_tests_own(
    make_record: Records, summary_of: Summaries, history: tuple[HistoryRow, ...]
) -> None:
    slower = summary_of([1.03] * 50)
    first_nights = history[:3]

    young = compare(make_record(slower), first_nights)
    assert young.status is VerdictStatus.INSUFFICIENT_DATA
    assert young.reasons[-1].endswith("own noise is known: up to 5 % in step time is within the band")
    strict = compare(make_record(slower, gate=GatePolicy(step_time=0.02)), first_nights)
    assert strict.status is VerdictStatus.REGRESSED


def test_a_loss_of_zero_in_history_needs_no_division(
    make_record: Records, make_row: Rows, summary_of: Summaries
) -> None:
    history = [make_row(summary_of(losses=[0.0] * 50))]

    verdict = compare(make_record(summary_of(losses=[0.1] * 50)), history)
    same = compare(make_record(summary_of(losses=[0.0] * 50)), history)

    assert (verdict.status, verdict.comparisons[3].change) == (VerdictStatus.REGRESSED, None)
    assert "away from zero" in verdict.reasons[0]
    assert same.status is VerdictStatus.INSUFFICIENT_DATA


def test_a_negative_loss_keeps_its_direction(make_record: Records, make_row: Rows, summary_of: Summaries) -> None:
    history = [make_row(summary_of(losses=[-2.0] * 50))]

    verdict = compare(make_record(summary_of(losses=[-1.0] * 50)), history)

    assert verdict.status is VerdictStatus.REGRESSED
    assert verdict.comparisons[3].change == pytest.approx(0.5)


# --- a program without Megatron-Bridge's launcher --------------------------------------------------------------------

HETERO = {"test_template_name": "HeteroMIMO"}


def test_a_program_that_measures_neither_throughput_nor_memory_is_judged_by_the_rest(
    make_record: Records, make_row: Rows, summary_of: Summaries
) -> None:
    bare = summary_of(tflops=None, memory=None)
    history = tuple(make_row(bare, night=f"2026-11-{day:02}", **HETERO) for day in range(1, 10))

    good = compare(make_record(bare, **HETERO), history)
    slow = compare(make_record(summary_of([1.2] * 50, tflops=None, memory=None), **HETERO), history)

    assert good.status is VerdictStatus.PASSED
    assert slow.status is VerdictStatus.REGRESSED


def test_what_it_has_once_measured_it_has_to_measure(
    make_record: Records, make_row: Rows, summary_of: Summaries
) -> None:
    history = tuple(make_row(summary_of(tflops=None), night=f"2026-11-{day:02}", **HETERO) for day in range(1, 10))

    verdict = compare(make_record(summary_of(tflops=None, memory=None), **HETERO), history)

    assert verdict.status is VerdictStatus.FAILED
    assert "peak memory was not measured" in " ".join(verdict.reasons)


# --- what makes the baseline -----------------------------------------------------------------------------------------


def test_the_first_run_has_no_baseline(make_record: Records) -> None:
    verdict = compare(make_record(), ())

    assert verdict.status is VerdictStatus.NO_BASELINE
    assert verdict.reasons == ("no earlier good run of this configuration to compare with",)
    assert verdict.exit_code == 0


def test_the_baseline_is_the_median_of_the_last_good_runs(
    make_record: Records, make_row: Rows, summary_of: Summaries
) -> None:
    times = {1: 9.0, 2: 9.0, 3: 1.00, 4: 1.02, 5: 3.00}
    history = [
        make_row(summary_of([time] * 50), f"2026-11-{day:02}", verdict=VerdictStatus.PASSED)
        for day, time in times.items()
    ]

    verdict = compare(make_record(summary_of([1.02] * 50), gate=GatePolicy(baseline_runs=3)), history)

    assert verdict.comparisons[0].baseline == 1.02
    assert verdict.baseline_runs == tuple(row.run_key for row in history[2:])


@pytest.mark.parametrize("verdict", [status for status in VerdictStatus if status not in GOOD_VERDICTS])
def test_a_bad_run_never_becomes_the_baseline(make_record: Records, make_row: Rows, verdict: VerdictStatus) -> None:
    assert compare(make_record(), [make_row(verdict=verdict)]).status is VerdictStatus.NO_BASELINE


def test_a_run_that_nobody_judged_is_no_baseline(make_record: Records, make_row: Rows) -> None:
    row = make_row().model_copy(update={"verdict": None})

    assert compare(make_record(), [row]).status is VerdictStatus.NO_BASELINE


@pytest.mark.parametrize("outcome", [outcome for outcome in Outcome if OUTCOMES[outcome][0]])
def test_a_good_verdict_on_a_bad_job_is_no_baseline(make_record: Records, make_row: Rows, outcome: Outcome) -> None:
    row = make_row().model_copy(update={"outcome": outcome})

    assert compare(make_record(), [row]).status is VerdictStatus.NO_BASELINE


def test_only_earlier_nights_count_and_never_the_run_itself(make_record: Records, make_row: Rows) -> None:
    record = make_record(night="2026-11-10")
    history = [make_row(night="2026-11-10"), make_row(night="2026-11-10-120000"), make_row(night="2026-11-11")]

    assert compare(record, history).status is VerdictStatus.NO_BASELINE


def test_confirming_re_runs_are_no_baseline(make_record: Records, make_row: Rows) -> None:
    assert compare(make_record(), [make_row(repeat=1)]).status is VerdictStatus.NO_BASELINE


@pytest.mark.parametrize(
    ("tonight", "status"),
    [(1.0, VerdictStatus.UNSTABLE), (0.8, VerdictStatus.UNSTABLE), (1.3, VerdictStatus.REGRESSED)],
)
@pytest.mark.parametrize("arm", [None, Arm(role="new", pair=1, reference="good")])
def test_a_further_run_of_the_same_code_that_crashed_is_no_pass(
    make_record: Records,
    make_row: Rows,
    summary_of: Summaries,
    history: tuple[HistoryRow, ...],
    tonight: float,
    status: VerdictStatus,
    arm: Arm | None,
) -> None:
    ended = {"outcome": Outcome.PROGRAM_ERROR, "outcome_reason": "CUDA error: an illegal memory access"}
    crashed = make_row(night="2026-11-10", repeat=1, **ended).model_copy(update={"arm": arm})
    fine = make_row(summary_of([tonight] * 50), "2026-11-10", repeat=2)

    verdict = compare(make_record(summary_of([tonight] * 50), "2026-11-10"), [*history, crashed, fine])

    assert verdict.status is status
    said = f"1 of 2 further runs of the same pins broke, {crashed.run_key} failed: the program failed: CUDA error"
    assert any(reason.startswith(said) for reason in verdict.reasons)


@pytest.mark.parametrize("about", [{"outcome": Outcome.INFRASTRUCTURE}, {"commit": "e" * 40}, {"night": "2026-11-09"}])
def test_a_further_run_that_the_cluster_lost_or_of_another_point_says_nothing_of_the_code(
    make_record: Records, make_row: Rows, history: tuple[HistoryRow, ...], about: dict[str, Any]
) -> None:
    usual = {"night": "2026-11-10", "repeat": 1, "outcome": Outcome.PROGRAM_ERROR}

    verdict = compare(make_record(night="2026-11-10"), [*history, make_row(**{**usual, **about})])

    assert verdict.status is VerdictStatus.PASSED


RESUMED = {"model_recipe_name": "llama3_8b", "num_gpus": 8, "max_steps": 50, "load_dir": "/checkpoints/old"}
RESUMED_SUMMARY = make_summary().model_copy(update={"start_step": 25})


@pytest.mark.parametrize(
    "fields",
    [{"cmd_args": RESUMED}, {"extra_cmd_args": {"+checkpoint.load": "/checkpoints/old"}}],
    ids=["load_dir", "override"],
)
def test_a_run_that_declared_a_resume_is_no_baseline(
    make_record: Records, make_row: Rows, fields: dict[str, dict[str, object]]
) -> None:
    nights = tuple(make_row(RESUMED_SUMMARY, f"2026-11-{day:02}", **fields) for day in range(1, 10))

    verdict = compare(make_record(RESUMED_SUMMARY, **fields), nights)

    assert all(row.resumed and row.verdict in GOOD_VERDICTS for row in nights)
    assert good_runs_before("2026-11-10", nights) == ()
    assert (verdict.status, verdict.baseline_runs) == (VerdictStatus.NO_BASELINE, ())
    assert all(comparison.baseline is None for comparison in verdict.comparisons)
    assert (
        "the run resumed from /checkpoints/old, where another one ended; it is not used as a baseline"
        in verdict.reasons
    )


def test_a_planned_resume_that_started_from_scratch_is_failed(
    make_record: Records, history: tuple[HistoryRow, ...]
) -> None:
    verdict = compare(make_record(cmd_args=RESUMED), history)

    assert verdict.status is VerdictStatus.FAILED
    assert verdict.reasons == (
        "not what was planned, start: iteration 0, where /checkpoints/old was to be resumed; with "
        "`checkpoint.finetune=true` a run that takes its weights alone begins there",
    )


def test_resumed_nights_are_no_level_that_a_later_night_is_held_to(
    make_record: Records, make_row: Rows, summary_of: Summaries
) -> None:
    resumed = summary_of([0.5] * 50).model_copy(update={"start_step": 25})
    fast = [make_row(resumed, f"2026-11-{day:02}", cmd_args=RESUMED) for day in range(1, 9)]
    own = [make_row(night=f"2026-11-{day:02}") for day in (9,)]

    assert compare(make_record(), [*fast, *own]).status is VerdictStatus.INSUFFICIENT_DATA
    assert compare(make_record(), [row.model_copy(update={"resumed": False}) for row in fast] + own).status is (
        VerdictStatus.REGRESSED
    )


def test_weights_alone_are_no_resume(make_row: Rows) -> None:
    tuned = make_row(cmd_args=RESUMED, extra_cmd_args={"checkpoint.finetune": "true"})

    assert not tuned.resumed
    assert good_runs_before("2026-11-10", [tuned]) == (tuned,)


def test_a_teardown_failure_with_good_numbers_makes_a_baseline(make_record: Records, make_row: Rows) -> None:
    assert compare(make_record(), [make_row(outcome=Outcome.TEARDOWN)]).status is VerdictStatus.INSUFFICIENT_DATA


def test_a_slow_down_is_reported_every_night_until_somebody_repairs_it(
    make_record: Records, summary_of: Summaries, history: tuple[HistoryRow, ...]
) -> None:

    rows, verdicts = list(history), []
    for day in range(10, 26):
        record = make_record(summary_of([1.2 if day < 25 else 1.0] * 50), f"2026-11-{day}")
        verdict = compare(record, rows)
        rows.append(row_of(record, verdict))
        verdicts.append(verdict.status)

    assert verdicts == [VerdictStatus.REGRESSED] * 15 + [VerdictStatus.PASSED]


def test_the_order_of_the_rows_does_not_matter(make_record: Records, history: tuple[HistoryRow, ...]) -> None:
    shuffled = list(history)
    random.Random(1).shuffle(shuffled)

    assert compare(make_record(), shuffled) == compare(make_record(), history)
    assert good_runs_before("2026-11-10", shuffled) == history


def test_a_metric_that_no_good_run_has_measured_cannot_pass(
    make_record: Records, make_row: Rows, summary_of: Summaries
) -> None:
    history = [make_row(summary_of(tflops=None), verdict=VerdictStatus.PASSED)]

    verdict = compare(make_record(), history)

    assert verdict.status is VerdictStatus.NO_BASELINE
    assert verdict.reasons == ("no earlier good run measured throughput",)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 0.0])
def test_a_broken_number_in_history_is_not_compared_with(
    make_record: Records, make_row: Rows, summary_of: Summaries, value: float
) -> None:
    broken = summary_of().model_copy(update={"step_time": value})
    history = [make_row(broken, "2026-11-08", verdict=VerdictStatus.PASSED), make_row(night="2026-11-09")]

    verdict = compare(make_record(), history)

    assert (verdict.status, verdict.comparisons[0].baseline) == (VerdictStatus.INSUFFICIENT_DATA, 1.0)


# --- failing closed --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("outcome", "status"),
    [
        (Outcome.SHORT, VerdictStatus.SHORT),
        (Outcome.TIMEOUT, VerdictStatus.FAILED),
        (Outcome.OUT_OF_MEMORY, VerdictStatus.FAILED),
        (Outcome.PROGRAM_ERROR, VerdictStatus.FAILED),
        (Outcome.CANCELLED, VerdictStatus.CANCELLED),
        (Outcome.INFRASTRUCTURE, VerdictStatus.INFRASTRUCTURE),
        (Outcome.NEVER_STARTED, VerdictStatus.INFRASTRUCTURE),
        (None, VerdictStatus.INFRASTRUCTURE),
    ],
)
def test_a_job_that_failed_fails_with_the_best_of_numbers(
    make_record: Records, history: tuple[HistoryRow, ...], outcome: Outcome | None, status: VerdictStatus
) -> None:
    verdict = compare(make_record(outcome=outcome, outcome_reason="node2 went down"), history)

    assert verdict.status is status
    assert verdict.reasons == (f"{OUTCOMES[outcome][1]}: node2 went down",)


def test_every_outcome_has_its_verdict_and_its_words() -> None:
    assert set(OUTCOMES) == {*Outcome, None}


def test_a_failed_job_that_measured_nothing_says_only_what_happened(
    make_record: Records, history: tuple[HistoryRow, ...]
) -> None:
    record = make_record(Summary(steps_expected=50), outcome=Outcome.OUT_OF_MEMORY)

    verdict = compare(record, history)
    assert verdict.reasons == ("the job ran out of memory", "0 of 50 steps recorded")
    assert (verdict.steps, verdict.steps_expected) == (0, 50)


def test_a_teardown_failure_is_compared_and_told(
    make_record: Records, summary_of: Summaries, history: tuple[HistoryRow, ...]
) -> None:
    fine = compare(make_record(outcome=Outcome.TEARDOWN, outcome_reason="exit code 134"), history)
    slow = compare(make_record(summary_of([1.2] * 50), outcome=Outcome.TEARDOWN), history)

    assert fine.status is VerdictStatus.PASSED
    assert fine.reasons == ("all steps done, then the job failed in teardown: exit code 134",)
    assert slow.status is VerdictStatus.REGRESSED
    assert slow.reasons[-1] == "all steps done, then the job failed in teardown"


@pytest.mark.parametrize("metric", [metric.name for metric in COLUMNS])
@pytest.mark.parametrize("value", [None, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("earlier", [0, 9])
def test_a_missing_or_broken_number_never_passes(
    make_record: Records,
    summary_of: Summaries,
    history: tuple[HistoryRow, ...],
    metric: str,
    value: float | None,
    earlier: int,
) -> None:
    record = make_record(summary_of().model_copy(update={metric: value}))

    verdict = compare(record, history[:earlier])

    assert verdict.status is VerdictStatus.FAILED
    assert status_of(verdict, metric) == "missing"
    assert "was not measured" in verdict.reasons[0]
    assert Verdict.model_validate_json(verdict.model_dump_json()) == verdict


@pytest.mark.parametrize("metric", ["step_time", "tflops_per_gpu", "peak_memory"])
def test_a_zero_that_cannot_be_is_no_measurement(make_record: Records, summary_of: Summaries, metric: str) -> None:
    verdict = compare(make_record(summary_of().model_copy(update={metric: 0.0})), ())

    assert verdict.status is VerdictStatus.FAILED


@pytest.mark.parametrize("earlier", [0, 9])
def test_a_step_that_is_not_finite_never_passes(
    make_record: Records, summary_of: Summaries, history: tuple[HistoryRow, ...], earlier: int
) -> None:
    losses = [5.0] * 9 + [math.nan] + [5.1] * 40

    verdict = compare(make_record(summary_of(losses=losses)), history[:earlier])

    assert verdict.status is VerdictStatus.FAILED
    assert verdict.reasons == ("1 step without a finite loss or gradient norm",)


def test_damaged_files_never_pass(make_record: Records, summary_of: Summaries, history: tuple[HistoryRow, ...]) -> None:
    summary = summary_of().model_copy(update={"damage": ("events.1: bad checksum at byte 812",)})

    verdict = compare(make_record(summary), history)

    assert verdict.status is VerdictStatus.FAILED
    assert verdict.reasons == ("damaged data: events.1: bad checksum at byte 812",)


@pytest.mark.parametrize("kept", ["last", "none"])
def test_a_damaged_checkpoint_never_passes(make_record: Records, history: tuple[HistoryRow, ...], kept: str) -> None:
    why = "shard __0_0.distcp has 10 of 4000 bytes"
    damaged = make_checkpoint(Path("/run"), CheckpointState.DAMAGED, why)
    whole = make_checkpoint(Path("/run"), iteration=25)

    record = make_record(harvest=HarvestPolicy(checkpoint=kept))
    verdict = compare(record.model_copy(update={"checkpoints": (whole, damaged)}), history)

    assert verdict.status is VerdictStatus.FAILED
    assert verdict.reasons == (f"damaged checkpoint iter_0000050: {why}",)


@pytest.mark.parametrize(
    ("checkpoints", "reason"),
    [
        ((), 'no checkpoint was left, although harvest.checkpoint is "last"'),
        (
            (make_checkpoint(Path("/run"), CheckpointState.IN_PROGRESS, "there is no .metadata yet"),),
            "the checkpoint iter_0000050 is half written and not stored: there is no .metadata yet",
        ),
    ],
    ids=["none", "half of one"],
)
def test_a_verdict_names_the_checkpoint_that_is_not_there(
    make_record: Records,
    history: tuple[HistoryRow, ...],
    checkpoints: tuple[Checkpoint, ...],
    reason: str,
) -> None:
    update = {"checkpoints": checkpoints}
    stored = compare(make_record().model_copy(update=update), history)
    unwanted = compare(make_record(harvest=HarvestPolicy(checkpoint="none")).model_copy(update=update), history)
    died = compare(make_record(outcome=Outcome.PROGRAM_ERROR).model_copy(update=update), history)

    assert (stored.status, stored.reasons) == (VerdictStatus.PASSED, (reason,))
    assert (unwanted.status, unwanted.reasons) == (VerdictStatus.PASSED, ())
    assert died.reasons == ("the program failed",)


@pytest.mark.parametrize("earlier", [0, 9])
@pytest.mark.parametrize("steps", [0, 5, 20, 49])
def test_a_run_that_lacks_steps_never_passes(
    make_record: Records, summary_of: Summaries, history: tuple[HistoryRow, ...], steps: int, earlier: int
) -> None:
    verdict = compare(make_record(summary_of([1.0] * steps)), history[:earlier])

    assert verdict.status is VerdictStatus.SHORT
    assert verdict.reasons == (f"{steps} of 50 steps recorded",)


def test_what_the_plan_asked_for_counts_when_the_run_says_less(
    make_record: Records, summary_of: Summaries, history: tuple[HistoryRow, ...]
) -> None:
    record = make_record(summary_of([1.0] * 20, expected=20), max_steps=50)

    assert compare(record, history).status is VerdictStatus.SHORT


def test_without_a_number_of_steps_a_run_must_reach_what_earlier_ones_did(
    make_record: Records, summary_of: Summaries, make_row: Rows
) -> None:
    free = {"max_steps": None, "cmd_args": {"model_recipe_name": "llama3_8b"}}
    history = [make_row(summary_of(expected=None), **free)]

    short = compare(make_record(summary_of([1.0] * 20, expected=None), **free), history)
    whole = compare(make_record(summary_of(expected=None), **free), history)
    nothing = compare(make_record(Summary(), **free), ())

    assert (short.status, short.reasons) == (VerdictStatus.SHORT, ("20 of 50 steps recorded",))
    assert whole.status is VerdictStatus.INSUFFICIENT_DATA
    assert (nothing.status, nothing.reasons) == (VerdictStatus.SHORT, ("0 of 1 steps recorded",))


def test_a_damaged_history_cannot_be_made_to_pass_a_bad_run(
    make_record: Records, history: tuple[HistoryRow, ...]
) -> None:
    emptied = [row.model_copy(update={"summary": Summary()}) for row in history]

    assert compare(make_record(), emptied).status is VerdictStatus.NO_BASELINE


# --- runs that have no record ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        (
            InvalidInput("no such commit", subject="main~x", advice="Name one that exists"),
            VerdictStatus.INVALID,
            "main~x: no such commit. Name one that exists",
        ),
        (
            LaunchRefused("invalid account", subject="sbatch", advice="Ask for one"),
            VerdictStatus.INFRASTRUCTURE,
            "sbatch: invalid account. Ask for one",
        ),
        (PermanentError("disk full", subject="/shared"), VerdictStatus.INFRASTRUCTURE, "/shared: disk full"),
        (TransientError("timed out", subject="s3"), VerdictStatus.INFRASTRUCTURE, "s3: timed out"),
        (StatusUnknown("slurmdbd is silent"), VerdictStatus.INFRASTRUCTURE, "slurmdbd is silent"),
        (KeyError("step"), VerdictStatus.INFRASTRUCTURE, "internal error, KeyError: 'step'"),
        (RuntimeError(), VerdictStatus.INFRASTRUCTURE, "internal error, RuntimeError"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_run_that_died_in_a_stage_says_what_and_what_to_do(
    make_spec: Specs, error: Exception, status: VerdictStatus, reason: str
) -> None:
    spec = make_spec()

    verdict = verdict_for_error(spec, error)

    assert (verdict.status, verdict.reasons) == (status, (reason,))
    assert (verdict.run_key, verdict.test_id, verdict.night) == (spec.run_key, "llama3-8b", "2026-11-10")


def test_every_violation_is_a_reason(make_spec: Specs) -> None:
    error = InvalidInput(
        "2 rules are violated", subject="a.toml", violations=("tp = 3 does not divide 8", "vp needs pp")
    )

    verdict = verdict_for_error(make_spec(), error)

    assert verdict.reasons == (
        "a.toml: 2 rules are violated. Fix the following",
        "tp = 3 does not divide 8",
        "vp needs pp",
    )


def test_a_foreign_error_gives_away_its_first_line_only(make_spec: Specs) -> None:
    with pytest.raises(ValidationError) as caught:
        Summary.model_validate({"steps_done": "hf_secret"})

    (reason,) = verdict_for_error(make_spec(), caught.value).reasons

    assert reason == "internal error, ValidationError: 1 validation error for Summary"


def test_an_invalid_test_gets_the_key_its_run_would_have_had() -> None:
    test = InvalidTest(
        id="llama3-8b",
        source="conf/a.toml",
        findings=(Violation(message="tp = 3", places=("conf/a.toml:3",)), Violation(message="conf/a.toml: no")),
    )

    verdict = verdict_for_invalid(test, "nightly", "2026-11-10")

    assert verdict.status is VerdictStatus.INVALID
    assert verdict.exit_code == 2
    assert verdict.reasons == ("conf/a.toml:3: tp = 3", "conf/a.toml: no")
    assert verdict.run_key == make_run_key(
        scenario="nightly", night="2026-11-10", test_id="llama3-8b", sweep_point={}, iteration=1, repeat=0
    )


def test_a_run_whose_code_was_changed_says_so(make_record: Records, history: tuple[HistoryRow, ...]) -> None:
    record = make_record().model_copy(update={"tainted": ("repo: deleted: a.py", "repo: changed: b.py")})

    (reason,) = compare(record, history).reasons

    assert reason.startswith("the checkout was modified; the tested code is unknown")
    assert "(repo: deleted: a.py, and 1 more)" in reason


def test_a_run_that_failed_for_what_it_did_not_measure_is_not_run_again(make_record: Records) -> None:
    rows = rows_with([1.0] * 9, make_record)
    slow = make_summary([1.2] * 50, tflops=600.0).model_copy(update={"peak_memory": None})

    verdict = compare(make_record(slow, "2026-11-10"), rows)

    assert (verdict.status, verdict.reruns, verdict.control) == (VerdictStatus.FAILED, 0, None)
    assert any(reason.startswith("step time regressed by +20") for reason in verdict.reasons)


# --- too good to be believed -----------------------------------------------------------------------------------------


def rows_with(levels: list[float], make_record: Records) -> list[HistoryRow]:
    rows: list[HistoryRow] = []
    for day, level in enumerate(levels, start=1):
        record = make_record(make_summary([level] * 50, tflops=700.0 / level), f"2026-11-{day:02}")
        rows.append(row_of(record, compare(record, rows)))
    return rows


def test_what_is_too_good_stays_suspicious_and_is_never_compared_with(make_record: Records) -> None:
    rows = rows_with([1.0] * 8 + [0.5] * 12, make_record)

    assert [row.verdict for row in rows[8:]] == [VerdictStatus.SUSPICIOUS] * 12
    verdict = compare(make_record(make_summary([0.5] * 50, tflops=1400.0), "2026-11-21"), rows)
    assert verdict.exit_code == 1
    assert verdict.reasons[0] == (
        "step time is better than can be believed, not a baseline until it is accepted, by −50.0 %: 0.5000 s against "
        "1.000 s, the median of the last 7 good runs (limit 20 %); throughput +100.0 %"
    )
    assert verdict.reruns == 0


@pytest.mark.parametrize(
    ("level", "status"),
    [(1.0, VerdictStatus.PASSED), (1.1, VerdictStatus.REGRESSED), (0.5, VerdictStatus.SUSPICIOUS)],
)
def test_after_twelve_nights_of_a_false_improvement_the_old_level_counts(
    make_record: Records, level: float, status: VerdictStatus
) -> None:
    rows = rows_with([1.0] * 8 + [0.5] * 12, make_record)

    tonight = make_record(make_summary([level] * 50, tflops=700.0 / level), "2026-11-21")

    assert compare(tonight, rows).status is status


def test_what_was_accepted_is_compared_with(make_record: Records) -> None:
    rows = rows_with([1.0] * 8 + [0.5] * 4, make_record)
    accepted = Decision(
        kind="baseline",
        cluster="dgx",
        series=rows[-1].series,
        test_id="llama3-8b",
        since="2026-11-09",
        night="2026-11-12",
        who="ada",
        why="the batch was halved on purpose",
        when=utc_now(),
    )
    evidence = Evidence(decisions=(accepted,))

    same = compare(make_record(make_summary([0.5] * 50, tflops=1400.0), "2026-11-13"), rows, evidence)
    back = compare(make_record(make_summary(), "2026-11-13"), rows, evidence)

    assert (same.status, back.status) == (VerdictStatus.PASSED, VerdictStatus.REGRESSED)


def test_a_drift_is_no_noise_of_nights_that_follow_each_other(make_record: Records) -> None:
    """No single night of it is far from the week before; without pairs nothing else tells it from the cluster."""
    alone = GatePolicy(control="off", pairs=0)
    scatter = random.Random(5)
    rows: list[HistoryRow] = []
    for day in range(50):
        level = (1 + 0.005 * max(0, day - 7)) * (1 + scatter.gauss(0, 0.002))
        record = make_record(make_summary([level] * 50), str(date(2026, 9, 1) + timedelta(days=day)))
        test = record.spec.test.model_copy(update={"gate": alone})
        record = record.model_copy(update={"spec": record.spec.model_copy(update={"test": test})})
        rows.append(row_of(record, compare(record, rows)))

    assert {row.verdict for row in rows[20:]} == {VerdictStatus.REGRESSED}


# --- two that share a series ------------------------------------------------------------------------------------------

MAIN, RELEASE = ("main", 1.0), ("release", 1.1)


def verdicts_of(branches: Sequence[tuple[str, float]], make_record: Records, **changed: Any) -> list[Verdict]:
    """The verdicts on nights of a branch with a step time each; `changed` are those of the runs of `release`."""
    rows: list[HistoryRow] = []
    verdicts = []
    for day, (branch, level) in enumerate(branches, start=1):
        record = make_record(make_summary([level] * 50, tflops=700.0 / level), f"2026-11-{day:02}")
        pin = record.checkout.megatron_bridge.model_copy(update={"ref": branch})
        checkout = record.checkout.model_copy(update={"megatron_bridge": pin})
        spec = record.spec.model_copy(update={"scenario": f"of {branch}"})
        record = record.model_copy(update={"spec": spec, "checkout": checkout})
        verdicts.append(compare(placed(record, **changed) if branch == "release" else record, rows))
        rows.append(row_of(record, verdicts[-1]))
    return verdicts


def test_two_branches_that_share_a_test_id_are_named_where_one_is_worse_every_night(make_record: Records) -> None:
    verdicts = verdicts_of([MAIN, RELEASE] * 6, make_record)

    assert [verdict.status for verdict in verdicts[1::2]] == ["regressed"] * 6
    assert [sum("by turns" in reason for reason in verdict.reasons) for verdict in verdicts] == [0, 0, 0] + [1] * 9
    assert verdicts[3].reasons[-1] == (
        "two runs by turns share the history of this test id, and are compared with each other: tonight's is of "
        "scenario of release, Megatron-Bridge release; that of 2026-11-03 of scenario of main, Megatron-Bridge main. "
        "Give the test of one of them another id"
    )


@pytest.mark.parametrize(
    "branches",
    [
        [MAIN] * 6 + [RELEASE] * 6,
        [MAIN] * 6 + [RELEASE] + [MAIN] * 3 + [("main", 1.1)],
        [(f"v0.{number}.0", 1.0 + 0.1 * (number % 2)) for number in range(12)],
        [("main", 1.0), ("main", 1.1)] * 6,
        [MAIN, ("release", 1.0)] * 6,
    ],
    ids=["moved once", "tried and taken back", "another tag each night", "one branch", "as fast as each other"],
)
def test_who_moves_to_another_branch_shares_with_nobody(
    make_record: Records, branches: Sequence[tuple[str, float]]
) -> None:
    verdicts = verdicts_of(branches, make_record)

    assert not any("by turns" in reason for verdict in verdicts for reason in verdict.reasons)


# --- another topology ------------------------------------------------------------------------------------------------


def placed(record: RunRecord, **plan: Any) -> RunRecord:
    return record.model_copy(update={"plan": record.plan.model_copy(update=plan)})


def test_what_few_nights_call_an_improvement_is_told_as_what_it_is(make_record: Records, make_row: Rows) -> None:
    """A second start-up is faster than the first one, which found nothing in any cache."""
    cold, warm = (make_summary().model_copy(update={"startup_time": value}) for value in (60.0, 20.0))

    second = compare(make_record(warm, "2026-11-02"), [make_row(cold, "2026-11-01")])

    assert (second.status, status_of(second, "startup_time")) == ("insufficient_data", "improved")
    assert any("start-up" in reason and "improved" in reason for reason in second.reasons)
    assert any("1 of the 7 good nights" in reason for reason in second.reasons)
    assert second.news == ""


@pytest.mark.parametrize(
    ("found", "says"),
    [
        (-37.0, ": the first iteration began 37.00 s before the job did; is the node's clock behind Slurm's, or "),
        (0.0, ": the first iteration began 0.000 s before the job did; is the node's clock behind Slurm's, or "),
        (None, "finite number"),
    ],
)
def test_a_start_up_time_that_two_clocks_measure_wrongly_names_them(
    make_record: Records, make_row: Rows, found: float | None, says: str
) -> None:
    before, tonight = (make_summary().model_copy(update={"startup_time": value}) for value in (60.0, found))

    verdict = compare(make_record(tonight, "2026-11-02"), [make_row(before, "2026-11-01")])

    assert verdict.status is VerdictStatus.FAILED
    assert verdict.reasons[0].startswith("start-up time was not measured")
    assert says in verdict.reasons[0]
    assert ("clock" in verdict.reasons[0]) is (found is not None)


@pytest.mark.parametrize(
    ("usual", "last", "status"),
    [
        ((180.0,), 3610.0, VerdictStatus.REGRESSED),
        ((250.0, 400.0, 180.0), 3850.0, VerdictStatus.REGRESSED),
        ((180.0, 200.0, 180.0), 1200.0, VerdictStatus.PASSED),
        ((250.0, 400.0, 180.0), 1600.0, VerdictStatus.PASSED),
    ],
    ids=["hangs for an hour", "hangs after a long save", "a slow exit", "a busy file system"],
)
def test_a_job_that_hangs_after_its_last_step_is_no_good_night(
    make_record: Records, make_row: Rows, usual: Sequence[float], last: float, status: VerdictStatus
) -> None:
    before = [make_row(ending(usual[day % len(usual)]), f"2026-11-{day:02}") for day in range(1, 10)]

    verdict = compare(make_record(ending(last)), before)

    assert (verdict.status, verdict.reruns) == (status, 0)
    assert bool(verdict.reasons) is (status is VerdictStatus.REGRESSED)
    assert all(reason.startswith("time after the last step regressed by +") for reason in verdict.reasons)


@pytest.mark.parametrize("before", [None, 180.0])
@pytest.mark.parametrize("tonight", [None, 200.0])
def test_an_end_that_slurm_does_not_know_or_that_no_night_had_before_is_no_fault(
    make_record: Records, make_row: Rows, before: float | None, tonight: float | None
) -> None:
    rows = [make_row(ending(before), f"2026-11-{day:02}") for day in range(1, 10)]

    assert compare(make_record(ending(tonight)), rows).status is VerdictStatus.PASSED


def test_a_test_may_require_to_know_its_end(make_record: Records) -> None:
    gate = GatePolicy(required=("teardown_time",))

    verdict = compare(make_record(ending(None), gate=gate), ())

    assert verdict.status is VerdictStatus.FAILED
    assert verdict.reasons[0].startswith("time after the last step was not measured")


@pytest.mark.parametrize("before", [None, 180.0])
def test_a_node_whose_clock_is_ahead_of_slurms_is_named(
    make_record: Records, make_row: Rows, before: float | None
) -> None:
    rows = [make_row(ending(before), f"2026-11-{day:02}") for day in range(1, 10)]

    verdict = compare(make_record(ending(-37.0)), rows)

    assert verdict.status is VerdictStatus.PASSED
    assert verdict.reasons == (
        "the last iteration ended 37.00 s after the job did: is the node's clock ahead of Slurm's?",
    )


def ending(seconds: float | None) -> Summary:
    """A usual run whose job ended so many seconds after its last step."""
    return make_summary().model_copy(update={"teardown_time": seconds})


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda record: placed(record, nodes=2), "nodes 1 → 2"),
        (lambda record: placed(record, tasks_per_node=4), "tasks per node 8 → 4"),
        (lambda record: placed(record, sbatch_args=("-Ca100",)), "constraint none → a100"),
        (
            lambda record: record.model_copy(update={"facts": {"GPU": "A100-SXM4-80GB"}}),
            "GPU H100 80GB HBM3 → A100-SXM4",
        ),
    ],
)
def test_another_topology_ends_the_baseline_and_the_old_level_is_information(
    make_record: Records, change: Callable[[RunRecord], RunRecord], text: str
) -> None:
    rows: list[HistoryRow] = []
    verdicts = []
    for day, level in enumerate([1.0] * 9 + [1.5] * 9 + [1.0], start=1):
        record = make_record(make_summary([level] * 50, tflops=700.0 / level), f"2026-11-{day:02}")
        record = record.model_copy(update={"facts": {"GPU": "H100 80GB HBM3"}})
        verdicts.append(compare(change(record) if 9 < day < 19 else record, rows))
        rows.append(row_of(change(record) if 9 < day < 19 else record, verdicts[-1]))

    assert [verdict.exit_code for verdict in verdicts] == [0] * 19
    assert [verdict.status for verdict in verdicts[8:11]] == ["passed", "no_baseline", "insufficient_data"]
    (reason,) = [reason for reason in verdicts[9].reasons if "topology" in reason]
    assert reason.startswith("another topology than 2026-11-09, " + text)
    assert reason.endswith("a baseline of its own; against that night step time +50.0 %, throughput −33.3 %, "
                           "peak memory ±0.0 %, final loss ±0.0 %")  # fmt: skip
    assert verdicts[18].baseline_runs == tuple(row.run_key for row in rows[2:9])


def test_a_new_warm_up_redefines_the_step_time_and_ends_the_baseline(make_record: Records) -> None:
    rows = rows_with([1.0] * 8, make_record)

    verdict = compare(make_record(make_summary([1.5] * 50), "2026-11-10", gate=GatePolicy(warmup_steps=2)), rows)

    assert verdict.status is VerdictStatus.NO_BASELINE
    assert "warm-up steps 10 → 2" in verdict.reasons[-1]


def test_what_an_older_row_does_not_know_is_no_other_topology(make_record: Records) -> None:
    rows = [row.model_copy(update={"topology": {}}) for row in rows_with([1.0] * 8, make_record)]

    assert compare(placed(make_record(night="2026-11-10"), nodes=4), rows).status is VerdictStatus.PASSED


def test_a_lasting_improvement_inside_the_band_is_told_once(make_record: Records) -> None:
    scatter = [0.012, -0.011, 0.006, -0.007, 0.011, -0.012, 0.007, -0.006]
    levels = [(1.0 if day < 16 else 0.97) * (1 + scatter[day % 8]) for day in range(27)]

    rows = rows_with(levels, make_record)

    told = [day for day, row in enumerate(rows) if row.verdict is VerdictStatus.IMPROVED]
    assert len(told) == 1
    assert 16 <= told[0] <= 22
    night = make_record(make_summary([levels[told[0]]] * 50, tflops=700.0 / levels[told[0]]), rows[told[0]].night)
    assert "step time improved by −3.0 %" in compare(night, rows[: told[0]]).reasons[0]
    assert "since 2026-11-1" in compare(night, rows[: told[0]]).reasons[0]
