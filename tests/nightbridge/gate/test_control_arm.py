"""The control arm: what pairs of the last good point and tonight's say, and which runs they are."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from nightbridge.gate.control_arm import (
    LONGER,
    MAX_TIMES,
    Ruling,
    Seen,
    arm_of,
    arm_run,
    control_point,
    most_pairs,
    moved_back,
    pairs_of,
    proof_needed,
    rerun_reason,
    run_at,
    weigh,
    weigh_strays,
)
from nightbridge.gate.decisions import Decision, DecisionKind
from nightbridge.gate.run_verdict import compare
from nightbridge.gate.stored_verdicts import judge_and_record
from nightbridge.gate.tonight import Evidence
from nightbridge.gate.trend import suspect_nights
from nightbridge.history.history_store import put_row
from nightbridge.history.nightly_values import nights_of
from nightbridge.history.rows import HistoryRow, row_of
from nightbridge.models import (
    GatePolicy,
    Limits,
    MetricName,
    Outcome,
    RunRecord,
    SecretRef,
    StoreSettings,
    Summary,
    Verdict,
    VerdictStatus,
)
from nightbridge.models.metrics import METRIC_BY_NAME
from nightbridge.models.series import series_id
from nightbridge.report.tables import further_runs_of
from nightbridge.store.directory import DirectoryStore
from tests.builders import make_decision, make_record, make_row, make_summary

BAD = "e" * 40
GOOD_NIGHTS = 9


@pytest.mark.parametrize(
    ("nights", "is_worse", "is_clear"),
    [
        ([[0.03, 0.03, 0.03]], True, False),
        ([[0.0, 0.001, -0.001]], False, True),
        ([[0.015]], False, False),
        ([[0.012], [0.011], [0.02], [0.019], [0.02]], True, False),
        ([[0.03, 0.03, 0.03], []], False, False),
        ([[0.3]], False, False),
        ([], False, False),
    ],
    ids=["proven", "as good", "too few", "over several nights", "no pair tonight", "one accident", "none"],
)
def test_pairs_prove_clear_or_leave_it_open(nights: Sequence[Sequence[float]], is_worse: bool, is_clear: bool) -> None:
    proof = weigh(nights, noise=0.005, change=0.015)

    assert (proof.is_worse, proof.clear >= 1.5) == (is_worse, is_clear)


def test_nights_without_a_difference_do_not_hide_one_that_came_later() -> None:
    proof = weigh([[0.0, 0.0, 0.0]] * 10 + [[0.03, 0.03, 0.03]], noise=0.005, change=0.015)

    assert proof.is_worse
    assert (proof.weighed, round(proof.difference, 6)) == (3, 0.03)


def test_many_pairs_know_their_own_noise_better_than_nights_that_drift() -> None:
    alternating = [[0.011, 0.009]] * 10

    assert weigh(alternating, noise=0.02, change=0.01).is_worse
    assert not weigh(alternating[:3], noise=0.02, change=0.01).is_worse


def test_a_history_that_is_quiet_by_chance_does_not_outweigh_pairs_that_were_apart_before() -> None:
    tonight = [[0.02] * 5]

    assert weigh(tonight, noise=0.003, change=0.015).is_worse
    assert not weigh(tonight, noise=0.003, change=0.015, earlier=[0.02, -0.02] * 10).is_worse
    assert weigh(tonight, noise=0.02, change=0.015, earlier=[0.004, -0.004] * 10).is_worse


def test_what_earlier_nights_left_proves_nothing_where_tonights_pairs_speak_against_it() -> None:
    before = [[0.02] * 4, [0.02] * 4]

    assert weigh([*before, [0.02]], noise=0.005, change=0.015).is_worse
    assert not weigh([*before, [0.003]], noise=0.005, change=0.015).is_worse


@pytest.mark.parametrize(
    ("strays", "pairs", "is_worse"),
    [(1 / 62, 2, False), (1 / 62, 3, True), (0.1, 4, False), (0.1, 5, True), (0.3, MAX_TIMES, False)],
)
def test_of_a_metric_that_strays_by_itself_as_many_pairs_are_needed_as_its_strays_demand(
    strays: float, pairs: int, is_worse: bool
) -> None:
    assert weigh_strays([[0.85] * pairs], strays, width=0.15).is_worse == is_worse


def test_a_run_in_which_a_straying_metric_does_not_show_clears_it() -> None:
    assert weigh_strays([[0.85, 0.02]], 1 / 62, width=0.15).clear < 0 < weigh_strays([[0.02]], 1 / 62, 0.15).clear
    assert weigh_strays([[0.85, -0.9, 0.85]], 1 / 62, width=0.15).score < 10


@pytest.mark.parametrize(("runs", "false_alarms", "needed"), [(2, 1.0, 10.0), (100, 1.0, 10.65), (100, 0.1, 12.95)])
def test_the_more_runs_a_night_has_and_the_fewer_alarms_may_be_false_the_more_is_needed(
    runs: int, false_alarms: float, needed: float
) -> None:
    assert proof_needed(runs, false_alarms) == pytest.approx(needed, abs=0.2)


def test_what_proves_a_regression_to_one_test_may_not_do_so_among_many() -> None:
    record, arms = run(1.08, "2026-11-10", GatePolicy()), judged_row(1.08, (1.08, 1.0))[2]
    rows = [*good_nights(), *arms]

    assert compare(record, rows).reruns == 0
    assert compare(record, rows, Evidence(proof=20.0)).reruns == 4


def test_further_pairs_of_a_metric_that_strays_by_itself_are_explained_by_its_strays() -> None:
    averages, strays = Seen(True, 0.3, 0.0, 0.015, 0.05, "", 1.0, 1.0, 0.05, 0.0, 10.0), 1 / 3
    ruling = Ruling("ask", averages.proof([[]]), 1)

    usual = rerun_reason(METRIC_BY_NAME["step_time"], ruling, averages)
    straying = rerun_reason(METRIC_BY_NAME["wall_step_time"], ruling, averages._replace(strays=strays))

    assert usual.endswith("single runs of this test are taken to scatter by 1.5 %, changes of 5 % are looked for")
    assert straying.endswith("; of its good runs 33.3 % are taken to be out of its band")


def test_pairs_alternate_which_arm_comes_first() -> None:
    assert [arm_of(number, "good").role for number in range(1, 9)] == ["new", "control", "control", "new"] * 2
    assert [arm_of(number, "good").pair for number in range(1, 5)] == [1, 1, 2, 2]


def test_a_control_arm_runs_the_pins_of_the_last_good_point_as_a_run_of_tonight() -> None:
    base, tonight = make_record(night="2026-11-09", commit="b" * 40), make_record(commit=BAD)

    new, control = (arm_run(tonight.spec, base, number) for number in (1, 2))

    assert [repo.commit for repo in control.test.git_repos] == ["b" * 40]
    assert control.test.cmd_args["container_image"] == f"{base.image.reference}@{base.image.digest}"
    assert new.test.git_repos == tonight.spec.test.git_repos
    assert {new.night, control.night} == {tonight.spec.night}
    assert len({new.run_key, control.run_key, base.spec.run_key, tonight.spec.run_key}) == 4


def test_a_control_arm_is_run_and_judged_though_what_its_own_night_named_is_gone() -> None:
    of_then: dict[str, Any] = {
        "gate": GatePolicy(golden="/old/golden.json", reference="recipe", warmup_steps=5),
        "secrets": {"HF_TOKEN": SecretRef(source="env", name="OLD_TOKEN")},
        "time_limit": "00:10:00",
    }
    of_tonight: dict[str, Any] = {
        "gate": GatePolicy(golden="/new/golden.json", warmup_steps=5),
        "secrets": {"HF_TOKEN": SecretRef(source="env", name="NEW_TOKEN")},
        "time_limit": "00:20:00",
    }
    base = make_record(night="2026-11-09", commit="b" * 40, **of_then)
    tonight = make_record(commit=BAD, **of_tonight).spec

    new, control = (arm_run(tonight, base, number).test for number in (1, 2))

    assert (control.gate.golden, control.gate.reference, control.gate.warmup_steps) == (None, None, 5)
    assert (control.secrets, control.time_limit) == (of_tonight["secrets"], "00:20:00")
    assert new.gate == tonight.test.gate


def test_a_stored_run_is_run_with_its_submodules_at_other_commits() -> None:
    base, core = make_record(), "3rdparty/Megatron-LM"
    test = base.spec.test
    branch = test.git_repos[0].model_copy(update={"init_submodules": True, "submodules": {core: "main", "data": "v1"}})
    bridge = base.checkout.megatron_bridge.model_copy(update={"submodules": {core: "c" * 40, "data": "d" * 40}})
    base = base.model_copy(
        update={
            "spec": base.spec.model_copy(update={"test": test.model_copy(update={"git_repos": (branch,)})}),
            "checkout": base.checkout.model_copy(update={"megatron_bridge": bridge}),
        }
    )

    as_it_was = run_at(base, {}).test.megatron_bridge
    moved = run_at(base, {"megatron_bridge": BAD, f"megatron_bridge/{core}": "f" * 40}).test.megatron_bridge

    assert as_it_was.submodules == {core: "c" * 40, "data": "d" * 40}
    assert (moved.commit, moved.submodules) == (BAD, {core: "f" * 40, "data": "d" * 40})
    assert series_id(run_at(base, {}), "eos") == series_id(base.spec, "eos")
    # One measurement, that asks for none of its own.
    assert run_at(base, {}).test.gate.pairs == 0


def judged(own: float, *pairs: tuple[float, float], **gate: object) -> Verdict:
    """The verdict on a night after nine good ones: its own step time, and of each pair the new and the control arm's."""
    return judged_row(own, *pairs, gate=gate)[0]


def judged_row(
    own: float,
    *pairs: tuple[float, float],
    gate: Mapping[str, object] | None = None,
    before: Sequence[HistoryRow] | None = None,
    night: str = "2026-11-10",
    on_nodes: Sequence[tuple[str, bool]] = (),
) -> tuple[Verdict, HistoryRow, list[HistoryRow]]:
    policy = GatePolicy.model_validate(gate or {})
    good = before if before is not None else good_nights()
    record = run(own, night, policy)
    arms = []
    for number, step_time in enumerate([arm for pair in pairs for arm in pair], start=1):
        nodes, on_suspects = on_nodes[(number - 1) // 2] if on_nodes else ("node[1-2]", False)
        arm = arm_of(number, "good", on_suspects)
        step_time = pairs[(number - 1) // 2][0 if arm.role == "new" else 1]
        row = row_of(run(step_time, night, policy, repeat=number, arm=arm), None)
        arms.append(row.model_copy(update={"nodes": nodes}))
    verdict = compare(record, [*good, *arms])
    return verdict, row_of(record, verdict), arms


def good_nights() -> list[HistoryRow]:
    """Nine nights with a noise of a third of a percent."""
    noise = (1.0, 1.003, 0.998, 1.002, 0.997, 1.0, 1.003, 0.999, 1.001)
    return [
        make_row(make_summary([step] * 50, tflops=700 / step), f"2026-11-{day:02}") for day, step in enumerate(noise, 1)
    ]


def run(step_time: float, night: str, gate: GatePolicy, **fields: object) -> RunRecord:
    arm = fields.pop("arm", None)
    summary = make_summary([step_time] * 50, tflops=700 / step_time)
    record = make_record(summary, night, gate=gate, commit=BAD, **fields)  # type: ignore[arg-type]
    return record.model_copy(update={"spec": record.spec.model_copy(update={"arm": arm})})


def test_a_suspicious_night_asks_for_a_pair_with_a_point_that_is_surely_good() -> None:
    verdict = judged(1.08)

    assert (verdict.status, verdict.reruns) == (VerdictStatus.REGRESSED, 2)
    assert verdict.control is not None
    assert verdict.control.night == "2026-11-01"


def test_a_difference_beside_the_last_good_point_is_a_regression() -> None:
    verdict = judged(1.08, (1.079, 1.0))

    assert (verdict.status, verdict.reruns) == (VerdictStatus.REGRESSED, 0)
    assert verdict.reasons[0].startswith("step time regressed by +7.9 % beside the last good point, 2026-11-01")
    assert verdict.certainty == "1 pair"
    assert verdict.metric("step_time").change == pytest.approx(0.079)  # type: ignore[union-attr]


def test_what_moved_both_arms_is_the_clusters_and_the_history_knows() -> None:
    verdict, row, arms = judged_row(1.08, (1.079, 1.081))

    assert (verdict.status, verdict.exit_code, verdict.reruns) == (VerdictStatus.PASSED, 0, 0)
    # How far the arms' TFLOP/s are apart is another comparison than how far the cluster moved.
    assert verdict.reasons[0].endswith("with the code of 2026-11-01 too: the cluster, no regression (1 pair)")
    assert row.moved["step_time"] == pytest.approx(1.08, abs=0.004)

    later, _row, _arms = judged_row(1.081, before=[*good_nights(), *arms, row], night="2026-11-11")
    worse, _row, _arms = judged_row(1.15, before=[*good_nights(), *arms, row], night="2026-11-11")
    assert (later.status, later.reruns) == (VerdictStatus.PASSED, 0)
    assert (worse.status, worse.reruns) == (VerdictStatus.REGRESSED, 2)
    assert later.moved == row.moved


def test_a_cluster_that_goes_back_to_its_old_level_is_nothing_suspicious() -> None:
    _verdict, row, arms = judged_row(1.3, (1.299, 1.301))

    back, _row, _arms = judged_row(1.001, before=[*good_nights(), *arms, row], night="2026-11-11")

    assert row.moved["step_time"] == pytest.approx(1.3, abs=0.01)
    assert (back.status, back.moved["step_time"]) == (VerdictStatus.PASSED, 1.0)
    # It is held to all nights before, as narrowly as before the cluster moved.
    band, usual = (verdict.metric("step_time") for verdict in (back, judged_row(1.001)[0]))
    assert band is not None
    assert usual is not None
    assert band.threshold == pytest.approx(usual.threshold, rel=0.1)


@pytest.mark.parametrize(("change", "place"), [(-1.0, None), (-0.4, 2.0), (-0.1, None)])
def test_a_value_of_zero_is_at_no_earlier_place_of_the_level(change: float, place: float | None) -> None:
    rows = [make_row(night=f"2026-11-{day:02}").model_copy(update={"moved": {"grad_norm": day}}) for day in (2, 3)]

    assert moved_back(METRIC_BY_NAME["grad_norm"], nights_of(rows), change) == place


def test_slower_nodes_move_the_level_of_their_own_nights_and_hide_no_regression_on_others() -> None:
    _verdict, row, arms = judged_row(1.08, (1.079, 1.081))
    slow = [arm.model_copy(update={"nodes": "node[3-4]"}) for arm in (row, *arms)]

    other, _row, _arms = judged_row(1.08, before=[*good_nights(), *slow], night="2026-11-11")

    assert row.moved["step_time"] == pytest.approx(1.08, abs=0.004)
    assert (other.status, other.reruns, other.moved) == (VerdictStatus.REGRESSED, 2, {})


def test_a_single_bad_run_whose_pair_is_fine_moves_nothing() -> None:
    verdict, row, _arms = judged_row(1.08, (1.001, 1.0))

    assert verdict.status is VerdictStatus.PASSED
    assert "was out of its band, and is as good beside the last good point" in verdict.reasons[0]
    assert row.moved == {}


def test_one_pair_proves_nothing_of_a_test_whose_noise_is_not_known_yet() -> None:
    known, _row, _arms = judged_row(1.13, (1.12, 1.0))
    unknown, _row, _arms = judged_row(1.13, (1.12, 1.0), before=good_nights()[:2], night="2026-11-03")

    assert (known.reruns, unknown.reruns) == (0, 4)


def test_the_wall_time_asks_for_no_pair_once_the_step_time_is_proven_worse_by_as_much() -> None:
    one, _row, _arms = young(1.3, (1.3, 1.0))
    two, row, arms = young(1.3, (1.3, 1.0), (1.3, 1.0))
    repaired, _row, _arms = young(1.0, (1.0, 1.0), before=[*young_nights(), *arms, row], night="2026-11-03")
    unanswered, _row, _arms = young(1.0, before=[*young_nights(), *arms, row], night="2026-11-03")

    assert (one.reruns, two.reruns, two.metric("wall_step_time").change) == (4, 0, pytest.approx(0.3))  # type: ignore[union-attr]
    assert "1.300 s against 1.000 s, 2 pairs, as much as step time" in two.reasons[1]
    assert "as much as" not in two.reasons[0]
    assert (repaired.exit_code, repaired.news, repaired.reruns) == (0, "over", 0)
    # A night ago it was worse, which a young test's noise does not let one run end.
    assert unanswered.rerun_reason.startswith(
        "mean wall time of a step ±0.0 % from its reference after +30.0 % last night: whether that is over; "
    )


def test_the_wall_time_does_not_go_on_for_nights_where_the_runs_of_a_night_are_limited() -> None:
    verdict, row, arms = young(1.3, (1.3, 1.0), (1.3, 1.0), gate={"max_runs": 4})
    next_night, _row, _arms = young(1.3, before=[*young_nights(), *arms, row], night="2026-11-03", gate={"max_runs": 4})

    assert [row.worse.get(name, 0.0) > 0.2 for name in ("step_time", "wall_step_time")] == [True, True]
    assert (verdict.reruns, next_night.reruns, next_night.news) == (0, 0, "standing")


def test_a_wall_time_proves_nothing_beside_a_step_time_that_pairs_leave_open() -> None:
    verdict, row, _arms = young(1.3, (1.3, 1.0), gate={"max_runs": 2})

    assert (verdict.status, row.worse) == (VerdictStatus.INSUFFICIENT_DATA, {})
    assert verdict.reasons[0].endswith("on the same nodes: left open by 1 pair, the next night continues")


@pytest.mark.parametrize(
    ("wall", "reruns"),
    [
        ((1.4, 1.0), 6),  # by more than the steps: pauses, which may be another fault
        ((1.3, 1.0), 0),
        ((1.8, 1.4), 6),  # less of it, as the cluster pauses between the steps of both
    ],
)
def test_a_wall_time_that_is_worse_by_another_share_than_the_step_time_asks_on(
    wall: tuple[float, float], reruns: int
) -> None:
    verdict, _row, _arms = young(1.3, (1.3, 1.0), (1.3, 1.0), walls=[wall[0], wall, wall])

    assert verdict.reruns == reruns


def test_a_wall_time_whose_pairs_are_not_all_out_of_its_band_asks_on() -> None:
    verdict, _row, _arms = young(1.3, *[(1.3, 1.0)] * 3, walls=[1.37, (1.37, 1.0), (1.37, 1.0), (1.45, 1.25)])

    assert verdict.reruns == 8


def test_a_cluster_that_moves_the_wall_time_alone_is_cleared_beside_a_step_time_that_is_worse() -> None:
    verdict, row, _arms = young(1.1, *[(1.1, 1.0)] * 4, walls=[1.5, *[(1.5, 1.4)] * 4])

    assert (verdict.status, [*row.worse]) == (VerdictStatus.REGRESSED, ["step_time", "tflops_per_gpu"])
    assert row.moved["wall_step_time"] == pytest.approx(1.45, abs=0.06)
    assert any("mean wall time of a step moved by +40.0 % with the code" in reason for reason in verdict.reasons)


def test_memory_asks_on_beside_a_step_time_that_is_proven() -> None:
    verdict, _row, _arms = young(1.3, (1.3, 1.0), (1.3, 1.0), memory=(86.0, 80.5))

    assert verdict.reruns == 6
    assert verdict.rerun_reason.startswith("peak memory")


def young_nights() -> list[HistoryRow]:
    """One good night of a test whose wall time is its step time."""
    summary = make_summary([1.0] * 50).model_copy(update={"wall_step_time": 1.0})
    return [make_row(summary, "2026-11-01")]


def young(
    own: float,
    *pairs: tuple[float, float],
    walls: Sequence[float | tuple[float, float]] | None = None,
    memory: tuple[float, float] = (80.0, 80.0),
    gate: Mapping[str, object] | None = None,
    before: Sequence[HistoryRow] | None = None,
    night: str = "2026-11-02",
) -> tuple[Verdict, HistoryRow, list[HistoryRow]]:
    """A night of a test with few: step times, and mean wall times where those are others, its own and of the arms.

    `memory`: with the new code, and of those arms of it that are of later pairs.
    """
    policy = GatePolicy.model_validate(gate or {})
    walls = walls or [own, *pairs]

    def summary_of(step_time: float, wall: float, gigabytes: float) -> Summary:
        summary = make_summary([step_time] * 50, tflops=700 / step_time, memory=gigabytes)
        return summary.model_copy(update={"wall_step_time": wall})

    record = run(own, night, policy).model_copy(update={"summary": summary_of(own, walls[0], memory[0])})  # type: ignore[arg-type]
    arms = []
    for number in range(1, 2 * len(pairs) + 1):
        arm, pair = arm_of(number, "good"), (number - 1) // 2
        side = 0 if arm.role == "new" else 1
        summary = summary_of(pairs[pair][side], walls[pair + 1][side], 80.0 if side else memory[pair > 0])  # type: ignore[index]
        further = run(1.0, night, policy, repeat=number, arm=arm).model_copy(update={"summary": summary})
        arms.append(row_of(further, None))
    verdict = compare(record, [*(young_nights() if before is None else before), *arms])
    return verdict, row_of(record, verdict), arms


def test_a_cluster_that_moved_does_not_hide_a_regression() -> None:
    verdict, row, _arms = judged_row(1.16, (1.159, 1.08))

    assert verdict.status is VerdictStatus.REGRESSED
    assert row.moved["step_time"] == pytest.approx(1.08, abs=0.004)


def test_pairs_that_leave_it_open_get_more_and_then_the_next_night() -> None:
    first, last = judged(1.06, (1.0085, 1.0)), judged(1.06, *[(1.0075, 1.0)] * MAX_TIMES)

    assert first.reruns == 4
    assert (last.status, last.reruns) == (VerdictStatus.PASSED, 0)
    assert "left open by 8 pairs, the next night continues" in last.reasons[0]


def test_pairs_that_speak_for_a_regression_go_on_beyond_those_of_other_nights_unless_runs_are_limited() -> None:
    slower, undecided = [(1.008, 1.0)], [(1.0077, 1.0)]

    assert judged(1.06, *slower * MAX_TIMES).reruns == 2 * (MAX_TIMES + 1)
    assert judged(1.06, *slower * MAX_TIMES * LONGER).reruns == 0
    assert judged(1.06, *slower * MAX_TIMES, max_runs=2 * MAX_TIMES).reruns == 0
    assert judged(1.06, *undecided * MAX_TIMES).reruns == 0


def test_the_most_pairs_of_a_night_are_those_of_its_policy_or_what_its_runs_allow() -> None:
    assert most_pairs(GatePolicy(pairs=2)) == 2 * LONGER * MAX_TIMES
    assert most_pairs(GatePolicy(max_runs=100)) == 50


def test_a_night_whose_pairs_do_not_clear_it_goes_on_although_the_median_of_its_runs_is_within_the_noise() -> None:
    asked, begun, cleared = judged(1.013), judged(1.013, (1.004, 0.994)), judged(1.013, (1.004, 1.01))

    assert (asked.reruns, begun.reruns, cleared.reruns) == (2, 4, 0)


def test_a_night_has_no_more_further_runs_than_its_test_allows() -> None:
    undecided = (1.04, 1.0), (1.0, 1.0)

    assert judged(1.08, max_runs=0).reruns == 0
    assert judged(1.08, pairs=3, max_runs=4).reruns == 4
    assert judged(1.08, *undecided).reruns == 6
    assert judged(1.08, *undecided, max_runs=5).reruns <= 4


def test_where_no_arm_of_the_control_ran_tonights_own_runs_confirm() -> None:
    gate = GatePolicy()
    arm = row_of(run(1.08, "2026-11-10", gate, repeat=1, arm=arm_of(1, "good")), None)
    failed = row_of(run(1.0, "2026-11-10", gate, repeat=2, arm=arm_of(2, "good"), outcome=Outcome.PROGRAM_ERROR), None)

    verdict = compare(run(1.08, "2026-11-10", gate), [*good_nights(), arm, failed])

    assert (verdict.status, verdict.reruns) == (VerdictStatus.REGRESSED, 2)
    assert "in 2 of 2 runs" in verdict.reasons[0]


def test_a_quiet_night_runs_no_pair_unless_every_night_does() -> None:
    assert judged(1.0).reruns == 0
    assert judged(1.0, control="every_night", pairs=3).reruns == 6
    assert judged(1.08, control="off").control is None


def test_a_verdict_says_why_it_wants_further_runs_and_what_they_cost() -> None:
    asks, answered = judged(1.08), judged(1.08, (1.079, 1.0))

    wanted, had = further_runs_of(asks), further_runs_of(answered)
    assert wanted.startswith("2 further runs, 0.00 GPU-hours: step time +8.0 % from its reference; single runs of this")
    assert wanted.endswith("test are taken to scatter by 0.3 %, changes of 1.5 % are looked for")
    assert had.startswith("2 further runs")
    assert further_runs_of(judged(1.0)) == ""


def test_after_one_slow_and_repaired_night_good_nights_are_run_once() -> None:
    _verdict, slow, arms = judged_row(1.08, (1.079, 1.0))
    before = [*good_nights(), *arms, slow]

    for day, step_time in enumerate((1.0, 1.002, 0.998, 1.003, 1.001), 11):
        verdict, row, _arms = judged_row(step_time, before=before, night=f"2026-11-{day}")
        assert (verdict.status, verdict.reruns) == (VerdictStatus.PASSED, 0)
        before.append(row)


def test_the_judged_night_keeps_why_its_further_runs_were_wanted(tmp_path: Path) -> None:
    store = DirectoryStore(StoreSettings(url=tmp_path.as_uri()))
    record, series = run(1.08, "2026-11-10", GatePolicy()), make_record().series
    for row in good_nights():
        put_row(store, row.model_copy(update={"series": series}))

    asks = judge_and_record(store, record, {}, lambda *_: ())
    for number, step_time in ((1, 1.079), (2, 1.0)):
        arm = run(step_time, "2026-11-10", GatePolicy(), repeat=number, arm=arm_of(number, "good"))
        put_row(store, row_of(arm, None))
    judged = judge_and_record(store, record, {}, lambda *_: ())

    assert (asks.reruns, asks.further_runs) == (2, 0)
    assert (judged.reruns, judged.further_runs) == (0, 2)
    assert judged.rerun_reason == asks.rerun_reason != ""


def test_what_is_worse_though_the_control_arm_died_is_given_pairs_in_the_next_nights() -> None:
    _verdict, _row, arms = judged_row(1.08, (1.079, 1.081))
    died = {"outcome": Outcome.INFRASTRUCTURE}
    arms = [arm.model_copy(update=died) if arm.arm and arm.arm.role == "control" else arm for arm in arms]
    alone = compare(record := run(1.08, "2026-11-10", GatePolicy()), [*good_nights(), *arms])
    before = [*good_nights(), *arms, row_of(record, alone)]

    asked, row, _arms = judged_row(1.08, before=before, night="2026-11-11")
    cluster, _row, _arms = judged_row(1.08, (1.079, 1.081), before=before, night="2026-11-11")

    assert (alone.status, alone.reruns) == (VerdictStatus.REGRESSED, 2)  # which it has had
    assert "not confirmed beside the last good point: no pair has it from both arms" in alone.reasons[0]
    assert (asked.status, asked.news, asked.reruns) == (VerdictStatus.REGRESSED, "standing", 2)
    assert (cluster.status, cluster.news) == (VerdictStatus.PASSED, "over")
    before.append(row)
    before.append(judged_row(1.08, before=before, night="2026-11-12")[1])
    assert judged_row(1.08, before=before, night="2026-11-13")[0].reruns == 0


def test_a_proven_regression_stands_without_further_pairs_and_ends_when_the_level_is_back() -> None:
    _verdict, row, arms = judged_row(1.08, (1.079, 1.0))
    before = [*good_nights(), *arms, row]

    stands, _row, _arms = judged_row(1.078, before=before, night="2026-11-11")
    back, _row, _arms = judged_row(1.0, before=before, night="2026-11-11")

    assert (stands.status, stands.news, stands.reruns) == (VerdictStatus.REGRESSED, "standing", 0)
    assert stands.certainty == "1 of 1 run"
    assert (back.status, back.news) == (VerdictStatus.PASSED, "over")


def test_what_is_worse_than_a_standing_regression_is_given_pairs_in_its_first_night() -> None:
    """Its level is known to the history, which would take some nights to find another one."""
    standing = good_nights()
    for day in range(10, 18):
        pairs = [(1.05, 1.0)] if day == 10 else []
        _verdict, row, arms = judged_row(1.05, *pairs, before=standing, night=f"2026-11-{day}")
        standing = [*standing, *arms, row]

    usual, unproven, code, clusters = (
        judged_row(own, *pairs, before=standing, night="2026-11-18")
        for own, pairs in [(1.06, []), (1.12, []), (1.12, [(1.12, 1.0)]), (1.12, [(1.12, 1.067)])]
    )
    changes = [verdict.metric("step_time").change for verdict, _row, _arms in (usual, unproven, code, clusters)]  # type: ignore[union-attr]
    news = [(verdict.news, verdict.reruns, verdict.exit_code) for verdict, _row, _arms in (usual, code, clusters)]

    assert (unproven[0].reruns, unproven[0].exit_code) == (2, 1)
    assert changes == pytest.approx([0.05, 0.12, 0.12, 0.05], abs=0.002)
    assert news == [("standing", 0, 1), ("worse", 0, 1), ("standing", 0, 1)]
    assert clusters[1].moved["step_time"] == pytest.approx(1.067, abs=0.002)
    # From then on both stand as what they are.
    for (_verdict, row, arms), change in ((code, 0.12), (clusters, 0.05)):
        later, _row, _arms = judged_row(1.12, before=[*standing, *arms, row], night="2026-11-19")
        assert (later.news, later.reruns) == ("standing", 0)
        assert later.metric("step_time").change == pytest.approx(change, abs=0.003)  # type: ignore[union-attr]


def test_a_regression_on_a_cluster_that_moved_is_not_over_before_a_pair_says_so() -> None:
    # Cluster 6 % and code 4 % slower in one night: a cluster that recovers looks like a code that was repaired.
    _verdict, row, arms = judged_row(1.1, (1.1, 1.06), (1.101, 1.06), (1.1, 1.059))
    nights = {"before": [*good_nights(), *arms, row], "night": "2026-11-11"}

    asked, _row, _arms = judged_row(1.04, **nights)  # type: ignore[arg-type]
    as_bad, _row, _arms = judged_row(1.04, (1.04, 1.0), **nights)  # type: ignore[arg-type]
    repaired, _row, _arms = judged_row(1.06, (1.06, 1.061), **nights)  # type: ignore[arg-type]
    both, _row, _arms = judged_row(1.0, **nights)  # type: ignore[arg-type]

    assert row.moved["step_time"] == pytest.approx(1.06, abs=0.004)
    assert (asked.exit_code, asked.reruns) == (1, 2)
    assert (as_bad.status, as_bad.news, as_bad.moved["step_time"]) == (VerdictStatus.REGRESSED, "standing", 1.0)
    assert (repaired.status, repaired.news, repaired.reruns) == (VerdictStatus.PASSED, "over", 0)
    assert (both.status, both.news, both.reruns) == (VerdictStatus.PASSED, "over", 0)


@pytest.mark.parametrize("step_time", [1.04, 1.06])
def test_a_regression_on_a_cluster_that_moved_is_not_over_for_want_of_a_control_arm(step_time: float) -> None:
    _verdict, row, arms = judged_row(1.1, (1.1, 1.06), (1.101, 1.06), (1.1, 1.059))
    before, found = [*good_nights(), *arms, row], []
    for day in range(11, 15):
        night = f"2026-11-{day}"
        record, dead = run(step_time, night, GatePolicy()), arm_of(1, "new", on_suspects=False)
        before.append(row_of(run(step_time, night, GatePolicy(), repeat=1, arm=dead), None))
        found.append(compare(record, before))
        before.append(row_of(record, found[-1]))

    asked, _row, _arms = judged_row(step_time, before=[*good_nights(), *arms, row], night="2026-11-11")
    assert "from its reference after +3.8 % last night: whether that is over; single runs of" in asked.reasons[0]
    assert [verdict.status for verdict in found[:2]] == [VerdictStatus.REGRESSED] * 2
    unpaired = "where the cluster had moved: no pair with both arms says that it is better"
    assert all(unpaired in verdict.reasons[0] for verdict in found[:2])
    # Three nights without one are enough: what the test itself measures counts.
    assert [verdict.status for verdict in found[2:]] == [VerdictStatus.PASSED] * 2


@pytest.mark.parametrize("metric", ["checkpoint_time", "teardown_time"])
def test_arms_that_save_no_checkpoint_need_no_time_of_one(metric: MetricName) -> None:
    def saving(row: HistoryRow) -> HistoryRow:
        return row.model_copy(update={"summary": row.summary.model_copy(update={metric: 30.0})})

    policy = GatePolicy(limits={metric: Limits(max=60)})
    nights, own = [saving(row) for row in good_nights()], run(1.08, "2026-11-10", policy)
    spec = arm_run(own.spec, run(1.0, "2026-11-01", policy), 1)
    arm = run(1.08, "2026-11-10", policy).model_copy(update={"spec": spec})
    saves = arm.model_copy(update={"spec": own.spec.model_copy(update={"repeat": 1})})

    assert spec.test.harvest.checkpoint == "none"
    assert compare(arm, nights).status is VerdictStatus.REGRESSED
    assert compare(saves, nights).status is VerdictStatus.FAILED
    assert compare(own, nights).status is VerdictStatus.FAILED


@pytest.mark.parametrize(
    ("seconds", "regressed"),
    [
        ((90, 95, 88, 92, 31, 30), (0, 0, 1, 1, 0, 0)),
        ((43, 46, 45, 41, 47), (0, 0, 1, 1, 1)),
        ((90, 30, 91, 31, 95, 30), (0, 0, 0, 0, 0, 0)),
        ((90, 91, 31, 30, 29, 30), (0, 0, 0, 0, 0, 0)),
        ((33, 34, 32, 33, 34, 33), (0, 0, 0, 0, 0, 0)),
        ((90, 91, 34, 30), (0, 0, 0, 0)),
        ((300, 310, 30), (1, 1, 0)),
        ((300, 310, 34, 32), (1, 1, 0, 0)),
        ((300, 150, 31, 30), (1, 1, 0, 0)),
    ],
    ids=[
        *("slower, and repaired", "by half", "busy nights", "two busy nights", "a tenth"),
        *("two busy nights, and an ordinary one", "ten times as long", "ten times as long, and an ordinary one"),
        "ten times as long, then five times",
    ],
)
def test_slow_checkpoints_that_no_arm_saves_are_proven_by_three_nights(
    seconds: Sequence[float], regressed: Sequence[int]
) -> None:
    verdicts = [verdict for verdict, _rows in _saved_once(seconds)]

    assert [verdict.status is VerdictStatus.REGRESSED for verdict in verdicts] == [bool(each) for each in regressed]
    assert all(verdict.exit_code == 0 for verdict in verdicts if verdict.status is not VerdictStatus.REGRESSED)
    assert {verdict.reruns for verdict in verdicts} == {0}


def test_three_slow_nights_name_what_changed_before_the_first_of_them() -> None:
    found = _saved_once((30, 90, 95, 88, 92))
    (second, _), (verdict, rows), (standing, later) = found[2:]

    assert "no regression, unless 3 nights in a row are worse" in second.reasons[0]
    assert verdict.reasons[0].startswith("checkpoint time regressed by +200.0 % since 2026-11-11: 90.00 s against 30.")
    assert [row.night for row in suspect_nights(verdict, rows) or ()] == ["2026-11-10", "2026-11-11"]
    assert (standing.news, standing.comparisons[-1].metric) == ("standing", verdict.comparisons[-1].metric)
    assert [row.night for row in suspect_nights(standing, later) or ()] == ["2026-11-10", "2026-11-11"]


def test_a_night_within_its_ceiling_is_good_after_one_beyond_it() -> None:
    found = _saved_once((41, 39.6, 38), gate=GatePolicy(limits={"checkpoint_time": Limits(max=40)}), times=1.2)

    assert [verdict.status.value for verdict, _rows in found] == ["regressed", "passed", "passed"]


def test_what_was_worse_before_a_level_was_accepted_does_not_stand() -> None:
    about = {"kind": "baseline", "since": "2026-11-13", "night": "2026-11-13", "metrics": ("checkpoint_time",)}
    accepted = make_decision("llama3-8b").model_copy(update=about)
    found = _saved_once((300, 310, 305, 300, 3000, 3100, 3000), decisions={"2026-11-13": accepted})

    assert [verdict.status.value for verdict, _rows in found] == ["regressed"] * 7
    assert {verdict.comparisons[-1].since for verdict, _rows in found[5:]} == {"2026-11-14"}


@pytest.mark.parametrize("usual", [(30,), (30, 28), (30, 40, 28), (30, 28, 33, 31)])
def test_slow_checkpoints_of_a_young_test_are_never_its_usual(usual: Sequence[float]) -> None:
    verdicts = [verdict for verdict, _rows in _saved_once((60, 61, 62, 59, 60, 61, 62, 60, 61, 30), usual)]

    assert [verdict.status is VerdictStatus.REGRESSED for verdict in verdicts] == [False] * 2 + [True] * 7 + [False]
    assert {item.since for verdict in verdicts[2:-1] for item in verdict.comparisons if item.since} == {"2026-11-10"}


def test_a_level_that_was_worse_before_three_nights_were_names_its_own_suspects() -> None:
    creep = (38, 37.5, 38.5, 38, 37.8, 38.2)

    verdict, rows = _saved_once((*creep, *creep, 48, 49, 48.5))[-1]

    assert verdict.reasons[0].startswith("checkpoint time regressed by +26.7 % since 2026-11-10: ")
    assert [row.night for row in suspect_nights(verdict, rows) or ()] == ["2026-11-09", "2026-11-10"]


def test_what_three_nights_proved_is_no_good_night_later() -> None:
    repaired = (90, 91, 92, 30, 31, 30)

    verdicts = [verdict for verdict, _rows in _saved_once((*repaired, 90, 91, 92, 93), (30, 31, 29, 30))]

    assert [verdict.status is VerdictStatus.REGRESSED for verdict in verdicts[6:]] == [False, False, True, True]
    assert verdicts[-1].comparisons[-1].since == "2026-11-16"


@pytest.mark.parametrize("failed", [None, 3])
def test_slow_checkpoints_are_suspect_of_the_same_commits_in_every_night(failed: int | None) -> None:
    seconds: list[float | None] = [90, 95, 88, 92, 91, 90, 93]
    if failed is not None:
        seconds[failed] = None

    nights = _saved_once(seconds)[2:]

    found = [
        [row.night for row in suspect_nights(verdict, rows) or ()]
        for verdict, rows in nights
        if verdict.status is VerdictStatus.REGRESSED
    ]
    assert found == [["2026-11-09", "2026-11-10"]] * (len(nights) - (failed is not None))


def _saved_once(
    seconds: Sequence[float | None],
    usual: Sequence[float] = (30, 28, 33, 31, 27, 30, 32, 29, 31),
    gate: GatePolicy | None = None,
    times: float = 1.0,
    decisions: Mapping[str, Decision] = MappingProxyType({}),
) -> list[tuple[Verdict, list[HistoryRow]]]:
    """The verdicts on nights from 10 November on of a test that saves at its end, with the rows of each and before.

    The usual save takes `times` 30 seconds; the decisions are known from the night after theirs on.
    """

    def saving(record: RunRecord, time: float | None) -> RunRecord:
        return record.model_copy(update={"summary": record.summary.model_copy(update={"checkpoint_time": time})})

    gate = gate or GatePolicy()
    rows = [
        row_of(record, None).model_copy(update={"verdict": VerdictStatus.PASSED, "prefix": f"runs/{day}"})
        for day, time in enumerate(usual, 10 - len(usual))
        for record in [saving(run(1.0, f"2026-11-{day:02}", gate), times * time)]
    ]
    found = []
    for day, time in enumerate(seconds, 10):
        record = saving(run(1.0, f"2026-11-{day}", gate), time)
        known = tuple(decision for night, decision in decisions.items() if night < record.spec.night)
        verdict = compare(record, rows, Evidence(decisions=known))
        rows = [*rows, row_of(record, verdict)]
        found.append((verdict, rows))
    return found


@pytest.mark.parametrize(
    ("written", "reruns"),
    [
        ({}, 0),
        ({"cmd_args": {"save_interval": 20, "num_gpus": 8, "max_steps": 50}}, 2),
        ({"extra_cmd_args": {"++checkpoint.save_interval": "20"}}, 2),
    ],
    ids=["once, at the end", "by its flag", "by an override"],
)
def test_no_pair_is_asked_for_slow_checkpoints_that_no_arm_would_save(
    written: Mapping[str, object], reruns: int
) -> None:
    def saving(record: RunRecord, seconds: float) -> RunRecord:
        return record.model_copy(update={"summary": record.summary.model_copy(update={"checkpoint_time": seconds})})

    saved = saving(run(1.0, "2026-11-01", GatePolicy()), 30.0).summary
    rows = [row.model_copy(update={"summary": saved}) for row in good_nights()]
    slow = compare(saving(run(1.0, "2026-11-10", GatePolicy(), **written), 90.0), rows)
    slower, both = (
        compare(saving(run(1.08, "2026-11-10", GatePolicy(), **written), value), rows) for value in (30, 90)
    )

    status = VerdictStatus.REGRESSED if reruns else VerdictStatus.PASSED
    assert (slow.status, slow.reruns, slower.reruns, both.reruns) == (status, reruns, 2, 2)
    assert slow.reasons[0].startswith(
        "checkpoint time regressed by +200.0 %" if reruns else "checkpoint time was out of"
    )


def test_control_arms_are_no_runs_of_their_night() -> None:
    _verdict, row, arms = judged_row(1.08, (1.079, 1.081))

    (night,) = nights_of([row, *arms])

    assert [run.repeat for run in night.runs] == [0, 1]
    assert [(new.repeat, control.repeat) for new, control in pairs_of(night)] == [(1, 2)]


def test_the_control_point_is_stored_good_and_older_than_what_may_be_undecided() -> None:
    nights = nights_of(good_nights())
    gone = nights_of([row.model_copy(update={"prefix": ""}) for row in good_nights()])

    later = [
        replace(night, own=night.own.model_copy(update={"night": f"2026-12-{at:02}"}))
        for at, night in enumerate(nights)
    ]

    assert control_point(nights, ()).night == "2026-11-01"  # type: ignore[union-attr]
    assert control_point([*nights, *later], ()).night == "2026-11-05"  # type: ignore[union-attr]
    assert control_point(gone, ()) is None


def levels(*parts: tuple[int, Mapping[str, float]]) -> list[HistoryRow]:
    """Good nights, so many at each level of some fields of the summary, with a noise of a third of a percent."""
    noise = (1.0, 1.003, 0.998, 1.002, 0.997)
    known = [fields for count, fields in parts for _night in range(count)]
    summary = make_summary()
    return [
        make_row(
            summary.model_copy(update={name: value * noise[at % len(noise)] for name, value in fields.items()}),
            f"2026-10-{at + 1:02}",
            verdict=VerdictStatus.PASSED,
        )
        for at, fields in enumerate(known)
    ]


@pytest.mark.parametrize(
    ("parts", "night"),
    [
        (((20, {"step_time": 1.08}), (10, {"step_time": 1.0})), "2026-10-21"),
        (((20, {"step_time": 1.02}), (10, {"step_time": 1.0})), "2026-10-21"),
        (((20, {"peak_memory": 80.0}), (8, {"peak_memory": 73.0})), "2026-10-21"),
        (((20, {"final_loss": 2.0}), (5, {"final_loss": 1.95})), "2026-10-21"),
        (((20, {"tflops_per_gpu": 650.0}), (10, {"tflops_per_gpu": 700.0})), "2026-10-21"),
        (((20, {"checkpoint_time": 60.0}), (10, {"checkpoint_time": 30.0})), "2026-10-21"),
        (((1, {"step_time": 1.04}), (8, {"step_time": 1.0})), "2026-10-02"),
        (((10, {"step_time": 1.0}), (5, {"step_time": 1.015})), "2026-10-02"),
        (((20, {"step_time": 1.005}), (10, {"step_time": 1.0})), "2026-10-17"),
    ],
    ids=["speed", "a little", "memory", "loss", "throughput", "no average", "first night", "worse later", "no news"],
)
def test_the_control_point_is_none_whose_code_was_worse_than_the_best_of_the_last_ones(
    parts: Sequence[tuple[int, Mapping[str, float]]], night: str
) -> None:
    assert control_point(nights_of(levels(*parts)), ()).night == night  # type: ignore[union-attr]


def test_a_night_that_the_cluster_slowed_down_may_be_the_control_point() -> None:
    fast, slow = levels((10, {"step_time": 1.0})), levels((20, {"step_time": 1.08}))[10:]
    slow = [row.model_copy(update={"moved": {"step_time": 1.08}}) for row in slow]

    assert control_point(nights_of([*fast, *slow]), ()).night == "2026-10-07"  # type: ignore[union-attr]


def test_of_points_that_each_have_something_worse_the_least_bad_one_is_the_control_point() -> None:
    rows = levels((20, {"step_time": 1.0, "peak_memory": 80.0}), (10, {"step_time": 1.013, "peak_memory": 60.0}))

    assert control_point(nights_of(rows), ()).night == "2026-10-21"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("kind", "ended", "night"), [("fixed", False, "2026-11-05"), ("acknowledged", True, "2026-11-05")]
)
def test_a_fault_that_was_repaired_or_let_pass_for_a_while_is_no_control_point(
    kind: DecisionKind, ended: bool, night: str
) -> None:
    about = {"kind": kind, "since": "2026-11-01", "night": "2026-11-04", "ended": ended, "metrics": ("step_time",)}
    decision = make_decision("llama3-8b").model_copy(update=about)

    assert control_point(nights_of(good_nights()), (decision,)).night == night  # type: ignore[union-attr]


@pytest.mark.parametrize(("own", "reruns"), [(1.06, 0), (1.1, 2)])
@pytest.mark.parametrize("kind", ["baseline", "acknowledged"])
def test_on_the_night_after_a_level_was_accepted_its_run_is_the_last_good_point(
    kind: DecisionKind, own: float, reruns: int
) -> None:
    _verdict, accepted, _arms = judged_row(1.06)
    rows = [*good_nights(), accepted]
    about = {"kind": kind, "since": accepted.night, "night": accepted.night}
    decision = make_decision("llama3-8b").model_copy(update=about)
    of_memory = decision.model_copy(update={"metrics": ("peak_memory",)})

    verdict = compare(run(own, "2026-11-11", GatePolicy()), rows, Evidence(decisions=(decision,)))

    assert accepted.verdict is VerdictStatus.REGRESSED
    assert control_point(nights_of(rows), (decision,)) == accepted
    assert control_point(nights_of(rows), (of_memory,)) is None
    assert verdict.reruns == reruns
    assert reruns == 0 or verdict.control is not None


def test_a_run_that_falls_back_to_the_speed_before_an_improvement_is_a_regression() -> None:
    rows = levels((20, {"step_time": 1.08}), (8, {"step_time": 1.0}))
    asks, _row, _arms = judged_row(1.08, before=rows)

    assert asks.control is not None
    # Runs as the night of the control point did, and as tonight's.
    beside = next(row.summary.step_time for row in rows if row.night == asks.control.night)
    judged, row, _arms = judged_row(1.08, (1.08, beside or 0.0), before=rows)

    assert (judged.status, row.moved) == (VerdictStatus.REGRESSED, {})


ELSEWHERE = ("node[3-4]", False)


def known_nodes() -> list[HistoryRow]:
    return [row.model_copy(update={"nodes": "node[3-4]"}) if at % 2 else row for at, row in enumerate(good_nights())]


def test_the_first_pair_avoids_the_nodes_and_a_clean_one_sends_a_pair_to_them() -> None:
    first, _row, _arms = judged_row(1.12, before=known_nodes())
    clean, _row, _arms = judged_row(1.12, (1.0, 1.001), before=known_nodes(), on_nodes=[ELSEWHERE])

    assert first.suspect_nodes == ("node1", "node2")
    assert (clean.status, clean.reruns) == (VerdictStatus.PASSED, 4)
    assert clean.control is not None
    assert clean.control.on_nodes == ("node1", "node2")


def test_a_node_that_slows_both_points_is_named() -> None:
    pairs, places = [(1.0, 1.001), (1.121, 1.119)], [ELSEWHERE, ("node[1-2]", True)]

    named, _row, _arms = judged_row(1.12, *pairs, before=known_nodes(), on_nodes=places)
    cleared, _row, _arms = judged_row(1.12, pairs[0], (1.0, 1.0), before=known_nodes(), on_nodes=places)

    assert (named.status, named.reruns) == (VerdictStatus.PASSED, 0)
    assert named.control is not None
    assert named.control.slow_nodes == ("node1", "node2")
    assert "node1 or node2 is slow: step time +11.8% with both points, and not on other nodes" in named.reasons
    assert cleared.control is not None
    assert cleared.control.slow_nodes == ()
