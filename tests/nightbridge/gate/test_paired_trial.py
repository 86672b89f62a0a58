"""A change beside the control: what the pairs say, and when there are enough of them."""

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pytest

from nightbridge.errors import InvalidInput
from nightbridge.gate.control_arm import MAX_TIMES, arm_of
from nightbridge.gate.paired_trial import (
    ProposedChange,
    Trial,
    TrialArm,
    arm_result,
    judged,
    markdown,
    needs_another_pair,
    noise_of_history,
    of_commits,
    plan_trial,
    trial_arm,
)
from nightbridge.gate.run_verdict import compare
from nightbridge.history.rows import HistoryRow
from nightbridge.models import GatePolicy, GitRepo, Outcome, RunSpec, Verdict, VerdictStatus
from tests.builders import make_record, make_summary

NOW = datetime(2026, 11, 23, tzinfo=UTC)
PASSED, FAILED, INVALID = VerdictStatus.PASSED, VerdictStatus.FAILED, VerdictStatus.INVALID
GATE = GatePolicy()
TRIAL = Trial(trial_id="2026-11-23-try-01234567", test_id="llama", change=ProposedChange(bridge="7"))


def arms(pairs: Sequence[tuple[float | VerdictStatus, float | VerdictStatus]]) -> list[TrialArm]:
    """The runs of pairs, of each the change's step time or status, and the control's; in the order of their running."""
    made = []
    for number in range(1, 2 * len(pairs) + 1):
        arm = arm_of(number, "control")
        value = pairs[arm.pair - 1][arm.role == "control"]
        made.append(
            TrialArm(arm=arm, run_key=f"r{number}", status=value, reason="exploded | twice")
            if isinstance(value, VerdictStatus)
            else TrialArm(arm=arm, run_key=f"r{number}", status=PASSED, values={"step_time": value}, nodes="n1")
        )
    return made


@pytest.mark.parametrize(
    ("pairs", "answer", "more"),
    [
        ([], "open", True),
        ([(1.0, 1.0)], "open", True),
        ([(1.0, 1.0)] * 4, "as good", False),
        ([(1.1, 1.0)] * 4, "worse", False),
        ([(0.9, 1.0)] * 4, "better", False),
        ([(1.008, 1.0)] * MAX_TIMES, "open", False),
        ([(FAILED, 1.0)], "open", True),
        ([(FAILED, 1.0)] * 2, "fails", False),
        ([(INVALID, 1.0)], "fails", False),
        ([(FAILED, FAILED)] * 2, "control fails", False),
        ([(1.0, INVALID)], "control fails", False),
        ([(FAILED, 1.0)] + [(1.0, 1.0)] * 4, "open", False),
    ],
)
def test_the_answer_and_whether_another_pair_is_run(
    pairs: Sequence[tuple[float | VerdictStatus, float | VerdictStatus]], answer: str, more: bool
) -> None:
    trial = judged(TRIAL, arms(pairs), GATE)

    assert (trial.answer, needs_another_pair(trial, GATE)) == (answer, more)


def test_no_more_pairs_are_run_than_were_asked_for() -> None:
    trial = judged(TRIAL, arms([(1.0, 1.0)]), GATE)

    assert needs_another_pair(trial, GATE, 2)
    assert not needs_another_pair(trial, GATE, 1)


def test_what_a_cluster_does_to_both_arms_is_no_regression() -> None:
    trial = judged(TRIAL, arms([(1.0, 1.0), (1.3, 1.3), (1.3, 1.3), (1.0, 1.0)]), GATE)

    assert trial.answer == "as good"


def spec(**repo: object) -> RunSpec:
    run = make_record().spec
    bridge = run.test.megatron_bridge.model_copy(update=repo)
    return run.model_copy(update={"test": run.test.model_copy(update={"git_repos": (bridge,)})})


def test_only_the_change_is_different_in_its_arm() -> None:
    change = ProposedChange(bridge="7", core="main", image="nemo:next")
    trial, control = plan_trial(spec(init_submodules=True), change, NOW)

    new, other = (trial_arm(control, change, number) for number in (1, 2))

    assert other.test == control.test
    bridge: GitRepo = new.test.megatron_bridge
    assert (bridge.commit, bridge.submodules) == ("refs/pull/7/head", {"3rdparty/Megatron-LM": "main"})
    assert new.test.cmd_args == {**other.test.cmd_args, "container_image": "nemo:next"}
    assert new.test.model_copy(update={"git_repos": (), "cmd_args": {}}) == other.test.model_copy(
        update={"git_repos": (), "cmd_args": {}}
    )
    assert {new.night, other.night} == {trial.trial_id}
    assert new.run_key != other.run_key
    assert plan_trial(spec(init_submodules=True), change, NOW)[0] == trial
    assert plan_trial(spec(init_submodules=True), ProposedChange(bridge="8"), NOW)[0].trial_id != trial.trial_id


def test_a_change_that_was_pushed_again_is_another_trial() -> None:
    planned = plan_trial(spec(), ProposedChange(bridge="7"), NOW)

    first, again, pushed = (of_commits(*planned, {".": digit * 40}) for digit in "aab")

    assert first == again
    assert first[0].trial_id == first[1].night
    assert first[0].trial_id != pushed[0].trial_id
    assert first[0].trial_id.startswith("2026-11-23-try-")
    assert trial_arm(first[1], first[0].change, 1).run_key != trial_arm(pushed[1], pushed[0].change, 1).run_key


@pytest.mark.parametrize(
    ("change", "said"),
    [(ProposedChange(), "nothing to try"), (ProposedChange(core="main"), "does not check out submodules")],
)
def test_what_cannot_be_tried_is_said_before_anything_runs(change: ProposedChange, said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        plan_trial(spec(), change, NOW)


def test_a_run_is_measured_by_what_was_harvested() -> None:
    run = trial_arm(spec(), TRIAL.change, 1)
    record = make_record(commit="c" * 40)

    good = arm_result(run, Verdict(run_key=run.run_key, test_id="t", night="n", status=PASSED), record)

    assert good.values["step_time"] == record.summary.step_time
    assert (good.commit, good.nodes) == ("c" * 40, "node[1-2]")


@pytest.mark.parametrize("outcome", [Outcome.PROGRAM_ERROR, Outcome.SHORT, Outcome.CANCELLED, Outcome.INFRASTRUCTURE])
@pytest.mark.parametrize("number", [1, 2])
def test_a_run_that_did_not_do_all_its_steps_measures_nothing_whoever_ended_it(outcome: Outcome, number: int) -> None:
    trial, control = plan_trial(spec(), TRIAL.change, NOW)
    summary = make_summary((3.0,) * 6 + (1.0,) * 6)
    runs = [trial_arm(control, trial.change, each) for each in (1, 2)]
    records = [make_record(summary, outcome=outcome) if each == number else make_record() for each in (1, 2)]

    ended = [arm_result(run, compare(record, ()), record) for run, record in zip(runs, records, strict=True)]
    trial = judged(trial, ended, GATE)

    assert (ended[number - 1].values, trial.findings, trial.answer) == ({}, (), "open")
    assert f"Pair 1, {ended[number - 1].arm.role}: {ended[number - 1].status}: " in markdown(trial)
    assert needs_another_pair(trial, GATE)


def test_the_comment_has_a_row_for_each_metric_and_says_what_failed() -> None:
    text = markdown(judged(TRIAL, arms([(1.1, 1.0)] * 4), GATE))
    failed = markdown(judged(TRIAL, arms([(FAILED, 1.0)] * 2), GATE))

    assert text.startswith("### nightbridge: `llama` regresses\n\nTried: Megatron-Bridge 7, beside the test")
    assert "| step time | 1.000 s | 1.100 s | +10.0 % | 4 | worse |" in text
    assert "Pair 1, new: failed: `exploded | twice`" in failed
    assert "fails, and the control does not" in failed


@pytest.mark.parametrize(
    ("reason", "shown"),
    [
        ("no <tag>,\n no *word*, no @person", "`no <tag>, no *word*, no @person`"),
        ("see `sinfo -R`", "`` see `sinfo -R` ``"),
        ("``a`` and `b`", "``` ``a`` and `b` ```"),
        ("", ""),
    ],
)
def test_nothing_in_a_reason_has_a_meaning_in_the_comment(reason: str, shown: str) -> None:
    lost = [arm.model_copy(update={"reason": reason}) for arm in arms([(FAILED, 1.0)])]

    assert f"Pair 1, new: failed: {shown}" in markdown(judged(TRIAL, lost, GATE)).splitlines()


# --- the noise of the test's own history -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("new", "said"),
    [(1.0, "runs, and the control fails: there is nothing to compare with"), (FAILED, "the control fails, too")],
)
def test_a_change_that_runs_where_the_control_fails_is_not_said_to_fail(new: float | VerdictStatus, said: str) -> None:
    lines = markdown(judged(TRIAL, arms([(new, FAILED)] * 2), GATE)).splitlines()

    assert lines[0].endswith(said)
    assert not any(line.startswith("| metric") for line in lines)  # a table without rows


def test_a_history_that_scatters_lets_the_same_pairs_prove_less() -> None:
    pairs: list[tuple[float | VerdictStatus, float | VerdictStatus]] = [(1.08, 1.0)] * 4
    noisy = TRIAL.model_copy(update={"noise": {"step_time": 0.1}})

    assert judged(TRIAL, arms(pairs), GATE).answer == "worse"
    assert judged(noisy, arms(pairs), GATE).answer == "open"


@pytest.mark.parametrize(("nights", "noise"), [(30, pytest.approx(0.03, rel=0.5)), (3, pytest.approx(0.01, rel=0.01))])
def test_the_noise_is_that_of_the_good_nights_and_a_short_history_s_is_bounded(
    make_row: Callable[..., HistoryRow], summary_of: Callable[..., Any], nights: int, noise: Any
) -> None:
    scatter = np.random.default_rng(1).normal(0, 0.03, 30)
    rows = [
        make_row(summary_of((1 + scatter[number],) * 50), f"2026-10-{number + 1:02d}", verdict=PASSED)
        for number in range(nights)
    ]

    assert noise_of_history(rows, GATE).get("step_time") == noise
