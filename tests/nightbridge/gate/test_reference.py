"""A run follows the run that its test names, iteration by iteration, or its verdict says where it does not."""

import math
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from nightbridge import config
from nightbridge.gate.evidence import gather_evidence
from nightbridge.gate.run_verdict import compare
from nightbridge.goldens.parity import follow
from nightbridge.history.history_store import put_row
from nightbridge.history.rows import row_of
from nightbridge.models import GatePolicy, ReferencePolicy, RunRecord, Verdict, VerdictStatus
from nightbridge.store.directory import DirectoryStore

NIGHT = "2026-11-10"
REFERENCE = {1: 2.750, **{step: 2.7 - 0.01 * step for step in range(2, 51)}}

Losses = Mapping[int, float]
Point = Mapping[str, int]
NO_POINT: Point = {}
Judge = Callable[..., Verdict]


@pytest.fixture
def reference(
    store: DirectoryStore, make_record: Callable[..., RunRecord], commit: Callable[..., RunRecord]
) -> Callable[..., RunRecord]:
    """Store a run of the reference recipe, in its history as well."""

    def make(losses: Losses = REFERENCE, night: str = NIGHT, point: Point = NO_POINT, **fields: Any) -> RunRecord:
        made = make_record(night=night, test_id="recipe", sweep_point=dict(point))
        made = made.model_copy(update={"series": "recipe-0123456789ab"} | fields)
        record = commit(store, made, losses)
        put_row(store, row_of(record, compare(record, ())))
        return record

    return make


@pytest.fixture
def judge(store: DirectoryStore, make_record: Callable[..., RunRecord], commit: Callable[..., RunRecord]) -> Judge:
    """The verdict on a run of the hetero test with these losses, which names that reference."""

    def make(losses: Losses, name: str, night: str = NIGHT, point: Point = NO_POINT, **rules: float) -> Verdict:
        gate = GatePolicy(reference=name, reference_rules=ReferencePolicy(**rules))
        made = make_record(night=night, test_id="hetero", gate=gate, sweep_point=dict(point))
        record = commit(store, made, losses)
        return compare(record, (), gather_evidence(store, record))

    return make


def changed(changes: Mapping[int, float]) -> dict[int, float]:
    """The reference's losses, some of them multiplied."""
    return {step: loss * changes.get(step, 1.0) for step, loss in REFERENCE.items()}


def test_a_run_that_follows_its_reference_passes_without_any_history(
    judge: Judge, reference: Callable[..., RunRecord]
) -> None:
    # What two real runs of one model on two layouts gave: +0.22 % at first, then within 1.1 %.
    verdict = judge(changed({1: 1.0022, 2: 1.011, 3: 0.99}), reference().spec.run_key)

    assert (verdict.status, verdict.reasons[:1]) == (
        VerdictStatus.PASSED,
        ("no earlier good run of this configuration to compare with",),
    )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({1: 1.006}, "at iteration 1, +0.60 % (limit 0.5 %)"),
        ({1: 2.898 / 2.757}, "at iteration 1, +5.11 % (limit 0.5 %)"),  # a layer norm was missing
        ({20: 0.98}, "at iteration 20, -2.00 % (limit 1.5 %)"),
        (
            {step: 1 + step / 1000 for step in range(1, 51)},
            "beyond the limit at 35 of 50 iterations, most at 50: +5.00 %",
        ),
    ],
)
def test_a_run_that_leaves_it_is_a_regression_that_names_the_iteration(
    judge: Judge, reference: Callable[..., RunRecord], changes: Mapping[int, float], said: str
) -> None:
    run_key = reference().spec.run_key

    verdict = judge(changed(changes), run_key)

    assert verdict.status is VerdictStatus.REGRESSED
    assert f"reference {run_key}: lm loss: " in " ".join(verdict.reasons)
    assert said in " ".join(verdict.reasons)


def test_the_limits_and_how_long_they_hold_are_the_tests_own(judge: Judge, reference: Callable[..., RunRecord]) -> None:
    run_key = reference().spec.run_key
    losses = changed({1: 1.006, 2: 1.02, 40: 2.0})

    assert judge(losses, run_key, first=0.01, later=0.03, steps=30).status is VerdictStatus.PASSED
    assert judge(losses, run_key, first=0.01, later=0.03).status is VerdictStatus.REGRESSED


@pytest.mark.parametrize(
    ("losses", "said"),
    [
        ({step: loss for step, loss in REFERENCE.items() if step != 7}, "step 7 missing in one of the two"),
        (REFERENCE | {9: math.nan}, "step 9 not finite"),
        ({}, "no iteration in common"),
    ],
)
def test_what_cannot_be_compared_never_passes(
    judge: Judge, reference: Callable[..., RunRecord], losses: Losses, said: str
) -> None:
    verdict = judge(losses, reference().spec.run_key)

    assert verdict.status is VerdictStatus.FAILED
    assert said in " ".join(verdict.reasons)


def test_the_verdict_names_the_reference_so_that_it_is_not_removed(
    judge: Judge, reference: Callable[..., RunRecord]
) -> None:
    run_key = reference().spec.run_key
    assert judge(REFERENCE, run_key).reference_run == run_key
    assert judge(REFERENCE, "recipe").reference_run == run_key
    assert judge(REFERENCE, "nobody").reference_run is None


def test_a_reference_that_nobody_knows_never_passes(judge: Judge) -> None:
    verdict = judge(REFERENCE, "recipe")

    assert verdict.status is VerdictStatus.FAILED
    assert "reference recipe: no such run" in " ".join(verdict.reasons)


def test_a_tests_id_means_its_newest_run_until_this_night(judge: Judge, reference: Callable[..., RunRecord]) -> None:
    reference(changed({1: 1.1}), "2026-11-09")
    tonight = reference()
    reference(changed({1: 1.1}), "2026-11-11")

    verdict = judge(changed({1: 1.01}), "recipe")

    assert verdict.status is VerdictStatus.REGRESSED
    assert f"reference {tonight.spec.run_key}: lm loss: 2.777 against 2.75 at iteration 1" in " ".join(verdict.reasons)


@pytest.mark.parametrize("tonight", ["qualify-26", NIGHT])
def test_a_night_whose_name_is_a_word_is_as_old_as_its_runs(
    judge: Judge, reference: Callable[..., RunRecord], tonight: str
) -> None:
    january = datetime(2026, 1, 5, tzinfo=UTC)
    old = reference(changed({1: 1.1}), "release-01", harvested_at=january)
    assert judge(REFERENCE, "recipe", night=tonight).reference_run == old.spec.run_key

    newest = reference(night="2026-11-09")

    assert judge(REFERENCE, "recipe", night=tonight).reference_run == newest.spec.run_key
    own = reference(changed({1: 1.2}), tonight)
    reference(changed({1: 1.2}), "release-30")
    assert judge(REFERENCE, "recipe", night=tonight).reference_run == own.spec.run_key


def test_of_a_test_that_is_swept_the_run_of_the_same_point_is_meant(
    judge: Judge, reference: Callable[..., RunRecord]
) -> None:
    points = [reference(changed({1: seq / 2048}), point={"seq": seq}) for seq in (2048, 4096, 8192)]

    for point in points:
        assert judge(REFERENCE, "recipe", point=point.spec.sweep_point).reference_run == point.spec.run_key
    reference(night="2026-11-11", point={"seq": 4096})
    old = judge(REFERENCE, "recipe", "2026-11-11", point={"seq": 2048})
    assert old.reference_run == points[0].spec.run_key


@pytest.mark.parametrize("point", [{}, {"seq": 16384}])
def test_which_point_of_a_sweep_is_meant_is_never_guessed(
    judge: Judge, reference: Callable[..., RunRecord], point: dict[str, int]
) -> None:
    for seq in (2048, 4096):
        reference(point={"seq": seq})

    verdict = judge(REFERENCE, "recipe", point=point)

    assert verdict.status is VerdictStatus.FAILED
    assert "reference recipe: no such run, and no complete run of such a test at this run's point" in " ".join(
        verdict.reasons
    )


def test_every_point_may_follow_one_run_of_a_test_that_is_not_swept(
    judge: Judge, reference: Callable[..., RunRecord]
) -> None:
    for seq in (2048, 4096):
        reference(changed({1: 1.1}), "2026-11-09", point={"seq": seq})
    run_key = reference().spec.run_key

    assert [judge(REFERENCE, "recipe", point={"seq": seq}).reference_run for seq in (2048, 4096)] == [run_key] * 2


def test_the_first_limit_is_that_of_the_references_first_iteration() -> None:
    found = follow({1: 2.0, 2: 2.0}, {2: 2.02}, ReferencePolicy())

    assert (found.missing, found.beyond, [step.limit for step in found.steps]) == ((1,), (), [0.015])


def test_a_difference_from_zero_is_beyond_any_limit() -> None:
    assert follow({1: 0.0}, {1: 1e-9}, ReferencePolicy()).beyond


def test_a_test_cannot_follow_itself(tmp_path: Path) -> None:
    sample = Path(__file__).parents[3] / "conf/practice/vlm_small.toml"
    file = tmp_path / "vlm.toml"
    file.write_text(sample.read_text() + '\n[gate]\nreference = "vlm_small"\n')

    (invalid,) = config.load(file).invalid

    assert "gate.reference: names this test itself" in " ".join(invalid.violations)
