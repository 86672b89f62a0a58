"""A deterministic test: its losses are the same bit for bit every night, and whatever else it computes is news."""

import hashlib
import random
import shutil
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from nightbridge.gate.decisions import Decision, record_decision
from nightbridge.gate.evidence import gather_evidence
from nightbridge.gate.run_verdict import compare
from nightbridge.history.rows import HistoryRow, row_of
from nightbridge.models import Arm, GatePolicy, Life, RunRecord, StoreSettings, Verdict
from nightbridge.store.directory import DirectoryStore
from tests.builders import commit_run, make_record, make_summary

Losses = tuple[float, ...]

USUAL = tuple(10.0 - 0.1 * step for step in range(1, 51))
OTHER = tuple(loss * (1 + 2e-7 * (step > 7)) for step, loss in enumerate(USUAL, 1))
"""The same for seven iterations, and then the number after the next one that an event file can hold."""
THIRD = tuple(loss * (1 - 2e-7 * (step > 9)) for step, loss in enumerate(USUAL, 1))


@dataclass
class Nights:
    """Nights of one test, one after the other; each is judged by those before it."""

    store: DirectoryStore
    deterministic: bool | None = None
    rows: list[HistoryRow] = field(default_factory=list)
    count: int = 0
    name: str = ""

    @property
    def date(self) -> str:
        return self.name or str(date(2026, 10, 1) + timedelta(days=self.count))

    def run(
        self,
        losses: Losses,
        source: str = "tensorboard",
        repeat: int = 0,
        arm: Arm | None = None,
        lives: tuple[Life, ...] = (),
    ) -> RunRecord:
        digest = hashlib.sha256(struct.pack(f"<{len(losses)}d", *losses)).hexdigest()
        anchors = tuple((step, losses[step - 1]) for step in (1, 13, 25, 38, 50))
        summary = make_summary(losses=losses).model_copy(
            update={"loss_digest": f"{source}:{digest}", "loss_anchors": anchors, "lives": lives}
        )
        record = make_record(summary, self.date, gate=GatePolicy(deterministic=self.deterministic), repeat=repeat)
        record = record.model_copy(update={"spec": record.spec.model_copy(update={"arm": arm})})
        return commit_run(self.store, record, dict(enumerate(losses, 1)))

    def night(self, losses: Losses, *, again: Sequence[Losses] = (), control: Losses = (), **fields: Any) -> Verdict:
        """A night whose run has these losses, whose further runs those; `control`: those of its control arm."""
        self.count += 1
        own = self.run(losses, **fields)
        base = next((row for row in reversed(self.rows) if row.verdict == "passed"), None)
        further = [self.run(again_losses, repeat=number) for number, again_losses in enumerate(again, 1)]
        if control and base:
            arm = Arm(role="control", pair=1, reference=base.run_key)
            further.append(self.run(control, repeat=2, arm=arm))
        beside = [row_of(run, None) for run in further]
        history = [*self.rows, *beside]
        verdict = compare(own, history, gather_evidence(self.store, own, history=history))
        self.rows += [row_of(own, verdict), *beside]
        return verdict

    def accept(self, since: str) -> None:
        record_decision(
            self.store,
            Decision(
                kind="baseline",
                cluster=self.rows[-1].cluster,
                series=self.rows[-1].series,
                test_id=self.rows[-1].test_id,
                since=since,
                night=self.rows[-1].night,
                who="ada",
                why="a new kernel",
                when=datetime(2026, 12, 1, tzinfo=UTC),
            ),
        )


def store_in(folder: Path) -> DirectoryStore:
    return DirectoryStore(StoreSettings(url=f"file://{folder}/store"))


@pytest.fixture
def nights(tmp_path: Path) -> Nights:
    return Nights(store_in(tmp_path))


@pytest.fixture(scope="module")
def first_found(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Nights]:
    """What `found` is a copy of, and its folder."""
    folder = tmp_path_factory.mktemp("found")
    nights = Nights(store_in(folder))
    for _night in range(8):
        verdict = nights.night(USUAL)
        assert verdict.exit_code == 0, verdict.reasons
    return folder, nights


@pytest.fixture
def found(first_found: tuple[Path, Nights], tmp_path: Path) -> Nights:
    """Eight good nights with the same losses, of a test that says nothing of itself."""
    folder, nights = first_found
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    return replace(nights, store=store_in(tmp_path), rows=[*nights.rows])


@pytest.fixture
def declared(nights: Nights) -> Nights:
    """One good night of a test that says that it is deterministic."""
    nights.deterministic = True
    nights.night(USUAL)
    return nights


def test_other_losses_are_a_regression_that_names_the_first_iteration(found: Nights) -> None:
    verdict = found.night(OTHER)

    assert (verdict.status, verdict.reruns) == ("regressed", 2)
    (reason,) = [reason for reason in verdict.reasons if "bit for bit" in reason]
    assert "not the same, bit for bit, as in the last 8 good nights" in reason
    assert reason.endswith("first at iteration 8, 9.20000184 against 9.2")
    assert verdict.metric("loss_curve").status == "regressed"  # type: ignore[union-attr]


def test_a_night_whose_name_is_a_word_is_held_to_the_last_nights_and_not_to_the_last_of_the_alphabet(
    found: Nights,
) -> None:
    january = {"night": "demo", "run_key": "demo", "harvested_at": datetime(2026, 1, 5, tzinfo=UTC)}
    found.rows.append(row_of(found.run(OTHER), None).model_copy(update=january | {"verdict": "passed"}))
    found.name = "qualify-26"

    verdict = found.night(OTHER)

    assert verdict.status == "regressed"
    assert any("bit for bit, as in the last 8 good nights" in reason for reason in verdict.reasons)


def test_a_run_again_that_agrees_makes_it_certain(found: Nights) -> None:
    verdict = found.night(OTHER, again=[OTHER])

    assert (verdict.status, verdict.certainty) == ("regressed", "2 of 2 runs")


@pytest.mark.thorough
def test_it_stands_for_sixty_nights_and_costs_no_further_runs(found: Nights) -> None:
    found.night(OTHER, again=[OTHER])

    later = [found.night(OTHER) for _night in range(60)]

    assert {(verdict.status.value, verdict.news, verdict.reruns) for verdict in later} == {("regressed", "standing", 0)}


def test_it_stands_where_each_night_computes_something_else(found: Nights) -> None:
    verdicts = [found.night(losses) for losses in (OTHER, THIRD, OTHER, THIRD)]

    assert {verdict.status.value for verdict in verdicts} == {"regressed"}


def test_the_same_losses_again_end_it(found: Nights) -> None:
    found.night(OTHER, again=[OTHER])

    verdict = found.night(USUAL)

    assert (verdict.status, verdict.news) == ("passed", "over")


def test_accepted_losses_are_what_later_nights_are_held_to(declared: Nights) -> None:
    declared.night(OTHER, again=[OTHER])
    declared.accept(declared.date)

    assert declared.night(OTHER).exit_code == 0
    assert declared.night(USUAL).status == "regressed"


def test_accepted_losses_are_not_those_of_the_accepted_night_s_control_arm(declared: Nights) -> None:
    for _ in range(7):
        declared.night(USUAL)
    declared.night(OTHER, again=[OTHER], control=USUAL)
    declared.accept(declared.date)

    assert declared.night(OTHER).exit_code == 0
    assert declared.night(USUAL).status == "regressed"


def test_one_good_night_is_enough_for_a_test_that_says_so(declared: Nights) -> None:
    verdict = declared.night(OTHER)

    assert verdict.status == "regressed"
    assert any("bit for bit, as in 2026-10-02: first at iteration 8" in reason for reason in verdict.reasons)


def test_one_run_of_two_makes_a_test_that_says_so_unstable(declared: Nights) -> None:
    verdict = declared.night(OTHER, again=[USUAL])

    assert verdict.status == "unstable"
    assert any("not the same in 1 of 2 runs, bit for bit" in reason for reason in verdict.reasons)


def test_one_run_of_two_shows_that_a_test_is_not_deterministic(found: Nights) -> None:
    verdict = found.night(OTHER, again=[USUAL])

    assert verdict.status == "passed"
    assert any(reason.endswith("the test is not deterministic") for reason in verdict.reasons)
    assert found.night(USUAL).status == "passed"
    assert not any("bit for bit" in reason for reason in found.night(THIRD).reasons)


def test_where_the_last_good_point_computes_something_else_too_it_is_the_cluster(found: Nights) -> None:
    verdict = found.night(OTHER, control=OTHER)

    assert verdict.status == "passed"
    assert any(reason.endswith("the cluster, no regression") for reason in verdict.reasons)
    assert found.night(OTHER).status == "passed"


def test_where_the_last_good_point_computes_what_it_did_it_is_the_code(found: Nights) -> None:
    assert found.night(OTHER, control=USUAL).status == "regressed"


def test_a_test_that_says_that_it_is_not_is_left_alone(found: Nights) -> None:
    found.deterministic = False

    assert found.night(OTHER).status == "passed"


@pytest.mark.parametrize("losses", [USUAL, OTHER])
def test_digests_of_log_and_event_file_are_not_compared(found: Nights, losses: Losses) -> None:
    """The log rounds, so that its digest is another one in every run."""
    verdict = found.night(losses, source="log")

    assert not any("bit for bit" in reason for reason in verdict.reasons)


def test_what_a_restart_computed_again_says_nothing(declared: Nights) -> None:
    lives = (Life(first_step=1, last_step=10), Life(first_step=8, last_step=50))

    verdict = declared.night(OTHER, lives=lives)

    assert verdict.status == "insufficient_data"
    assert "bit for bit, is unknown" in verdict.reasons[-1]
    assert declared.night(OTHER).status == "regressed"


@pytest.mark.parametrize("source", ["log", "mixed"])
def test_a_test_that_says_so_passes_no_losses_that_nobody_can_compare(found: Nights, source: str) -> None:
    found.deterministic = True

    verdicts = [found.night(OTHER, source=source) for _night in range(2)]

    assert [verdict.status for verdict in verdicts] == ["insufficient_data", "insufficient_data"]
    assert all("bit for bit, is unknown" in verdict.reasons[-1] for verdict in verdicts)
    assert found.night(USUAL).status == "passed"
    assert found.night(OTHER).status == "regressed"


def test_a_test_that_always_ran_without_tensorboard_is_held_to_its_log(nights: Nights) -> None:
    nights.deterministic = True
    for _night in range(8):
        verdict = nights.night(USUAL, source="log")

    assert verdict.status == "passed"
    assert nights.night(OTHER, source="log").status == "regressed"
    first = nights.night(USUAL)
    assert (first.status, "is unknown" in first.reasons[-1]) == ("insufficient_data", True)
    assert nights.night(USUAL).status == "passed"


def test_noisy_losses_are_nothing_to_hold_a_test_to(nights: Nights) -> None:
    noise = random.Random(7)
    verdicts = [nights.night(tuple(loss * (1 + noise.gauss(0, 0.001)) for loss in USUAL)) for _night in range(8)]

    assert not any("bit for bit" in reason for verdict in verdicts for reason in verdict.reasons)


def test_four_nights_prove_nothing(nights: Nights) -> None:
    for _night in range(4):
        nights.night(USUAL)

    assert nights.night(OTHER).exit_code == 0


def test_the_runs_that_a_test_has_each_night_are_one_night(nights: Nights) -> None:
    for _ in range(5):
        verdict = nights.night(OTHER if nights.count == 4 else USUAL)
        own = nights.rows[-1]
        nights.rows += [own.model_copy(update={"iteration": run, "run_key": f"{own.run_key}-{run}"}) for run in (2, 3)]

    assert verdict.exit_code == 0
    assert "bit for bit" not in " ".join(verdict.reasons)


def test_losses_that_are_gone_from_the_store_are_not_named(found: Nights) -> None:
    for row in found.rows:
        found.store.delete(f"{row.prefix}/metrics.parquet")

    (reason,) = [reason for reason in found.night(OTHER).reasons if "bit for bit" in reason]

    assert reason.endswith("as in the last 8 good nights")
