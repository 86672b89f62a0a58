"""The morning's list of all tests: of the newest night of each the gravest run, whether or not it was harvested."""

from datetime import timedelta
from pathlib import Path

import pytest

from nightbridge.gate.decisions import record_decision
from nightbridge.models import NightReport, Verdict, VerdictStatus, utc_now
from nightbridge.nights.records import NightStart, NightTest, record_end, record_start
from nightbridge.report.overview import TestOverview, index_html, overview_of_tests
from nightbridge.store.directory import DirectoryStore
from tests.builders import make_decision

PASSED, REGRESSED = VerdictStatus.PASSED, VerdictStatus.REGRESSED
INFRASTRUCTURE, INVALID = VerdictStatus.INFRASTRUCTURE, VerdictStatus.INVALID


def verdict_of(test_id: str, night: str, status: VerdictStatus, run: str = "a", prefix: str = "kept") -> Verdict:
    return Verdict(run_key=f"{test_id}-{night}-{run * 10}", test_id=test_id, night=night, status=status, prefix=prefix)


def store_verdict(store: DirectoryStore, verdict: Verdict) -> None:
    folder = f"runs/{verdict.test_id}/{verdict.night}/{verdict.run_key}"
    store.put(f"{folder}/verdict.json", verdict.model_dump_json().encode())


def begin_night(store: DirectoryStore, scenario: str, *verdicts: Verdict) -> None:
    """A night that has begun with the tests of its later verdicts."""
    tests = tuple(NightTest(test_id=verdict.test_id, run_key=verdict.run_key) for verdict in verdicts)
    begun = {"night": verdicts[0].night, "begun_at": utc_now(), "tests": tests}
    record_start(store, NightStart(scenario=scenario, cluster="c", workspace=Path("/w"), **begun))


def end_night(store: DirectoryStore, scenario: str, *verdicts: Verdict) -> None:
    """A night as it is kept; the store has the verdicts of harvested runs alone."""
    night = verdicts[0].night
    begin_night(store, scenario, *verdicts)
    for verdict in verdicts:
        if verdict.prefix:
            store_verdict(store, verdict)
    record_end(store, NightReport(scenario=scenario, night=night, verdicts=verdicts))


def shown(store: DirectoryStore) -> dict[str, TestOverview]:
    return {test.test_id: test for test in overview_of_tests(store)}


def test_a_test_is_as_bad_as_the_gravest_of_its_runs_in_the_newest_night(store: DirectoryStore) -> None:
    night = "2026-11-21"
    end_night(store, "one", verdict_of("llama", night, REGRESSED, "a"), verdict_of("llama", night, PASSED, "b"))
    end_night(store, "two", verdict_of("llama", night, PASSED, "c"))

    llama = shown(store)["llama"]

    assert (llama.verdict, llama.run_key, llama.nights) == (REGRESSED, f"llama-{night}-{'a' * 10}", {night: REGRESSED})


def test_a_night_without_a_date_hides_none_of_those_since_a_date(store: DirectoryStore) -> None:
    end_night(store, "one", verdict_of("llama", "2026-11-21", PASSED))
    end_night(store, "by hand", verdict_of("mixtral", "007", PASSED))

    assert [test.test_id for test in overview_of_tests(store, since="2026-11-20")] == ["llama", "mixtral"]


def test_a_decision_since_the_night_counts_for_its_run(store: DirectoryStore) -> None:
    runs = [verdict_of("llama", "2026-11-21", REGRESSED, run) for run in "ab"]
    end_night(store, "one", *runs)

    for run, expected in zip(runs, (REGRESSED, PASSED), strict=True):
        store_verdict(store, run.model_copy(update={"status": PASSED}))
        llama = shown(store)["llama"]
        assert (llama.verdict, llama.nights) == (expected, {"2026-11-21": expected})


@pytest.mark.parametrize(
    ("series", "text"), [("llama-0123456789ab", "known"), ("llama-ffffffffffff", ""), ("", "known")]
)
def test_a_decision_is_shown_beside_the_configuration_that_it_is_about(
    store: DirectoryStore, series: str, text: str
) -> None:
    end_night(store, "one", verdict_of("llama", "2026-11-21", PASSED).model_copy(update={"series": series}))
    record_decision(store, make_decision("llama"))

    assert shown(store)["llama"].decision.endswith(text)
    assert bool(shown(store)["llama"].decision) == bool(text)


def test_a_night_without_a_date_ends_no_decision_that_holds_until_a_later_one(store: DirectoryStore) -> None:
    end_night(store, "one", verdict_of("llama", "2026-11-20", PASSED))
    end_night(store, "by hand", verdict_of("llama", "upgrade", PASSED))
    record_decision(store, make_decision("llama", until="2099-12-31"))

    assert "1 open decision" in index_html(store)
    assert shown(store)["llama"].decision.endswith("known")


def test_what_was_repaired_is_no_open_decision_any_more(store: DirectoryStore) -> None:
    end_night(store, "one", verdict_of("llama", "2026-11-21", PASSED))
    known = make_decision("llama")
    record_decision(store, known)
    assert "1 open decision" in index_html(store)

    record_decision(store, known.model_copy(update={"kind": "fixed", "when": known.when + timedelta(days=1)}))

    assert "open decision" not in index_html(store)
    assert shown(store)["llama"].decision == ""


def test_a_run_that_died_before_its_harvest_is_in_the_list(store: DirectoryStore) -> None:
    end_night(store, "one", verdict_of("llama", "2026-11-20", PASSED), verdict_of("mixtral", "2026-11-20", PASSED))
    died = verdict_of("llama", "2026-11-21", INFRASTRUCTURE, prefix="")
    end_night(store, "one", died, verdict_of("mixtral", "2026-11-21", INVALID, prefix=""))

    tests = shown(store)

    assert list(tests) == ["llama", "mixtral"]
    assert tests["llama"].nights == {"2026-11-20": PASSED, "2026-11-21": INFRASTRUCTURE}
    assert str(tests["llama"]) == f"✓!  infrastructure  –  {died.run_key}"
    assert (tests["mixtral"].verdict, tests["mixtral"].night) == (INVALID, "2026-11-21")


def test_a_new_attempt_that_died_is_not_shown_as_the_one_before_it(store: DirectoryStore) -> None:
    store_verdict(store, verdict_of("llama", "2026-11-21", REGRESSED))
    end_night(store, "one", verdict_of("llama", "2026-11-21", INFRASTRUCTURE, prefix=""))

    assert shown(store)["llama"].verdict is INFRASTRUCTURE


def headline_of(page: str) -> str:
    return page[page.index("<h1>") + 4 : page.index("</h1>")]


def test_a_night_that_has_not_ended_is_said_and_not_all_is_well(store: DirectoryStore) -> None:
    for scenario, test in (("one", "llama"), ("two", "mixtral")):
        end_night(store, scenario, verdict_of(test, "2026-11-20", PASSED))
    tonight = verdict_of("llama", "2026-11-21", PASSED)
    begin_night(store, "one", tonight)
    end_night(store, "two", verdict_of("mixtral", "2026-11-21", PASSED))

    page = index_html(store)

    assert headline_of(page) == "No test needed attention; not every night has ended"
    assert "Night 2026-11-21 of one has not ended" in page

    end_night(store, "one", tonight)

    assert headline_of(index_html(store)) == "No test needs attention"


def test_a_night_that_never_ended_is_over_once_a_later_one_has(store: DirectoryStore) -> None:
    begin_night(store, "one", verdict_of("llama", "2026-11-20", PASSED))
    end_night(store, "one", verdict_of("llama", "2026-11-21", PASSED))

    assert headline_of(index_html(store)) == "No test needs attention"


def test_a_night_that_never_ended_is_open_while_later_ones_had_other_tests_alone(store: DirectoryStore) -> None:
    llama, mixtral = (verdict_of(test, "2026-11-20", PASSED) for test in ("llama", "mixtral"))
    end_night(store, "one", llama, mixtral)
    for night in ("2026-11-21", "2026-11-22"):
        begin_night(store, "one", *(each.model_copy(update={"night": night}) for each in (llama, mixtral)))
    end_night(store, "one", verdict_of("llama", "2026-11-23", PASSED))

    page = index_html(store)

    assert headline_of(page) == "No test needed attention; not every night has ended"
    assert "Night 2026-11-22 of one has not ended" in page
    assert "2026-11-21 of one" not in page

    end_night(store, "two", verdict_of("mixtral", "2026-11-24", PASSED))

    assert headline_of(index_html(store)) == "No test needs attention"
