"""`history --all --out`, `migrate` and searches: the whole history as a table, an earlier store, which point is meant."""

from pathlib import Path

import pandas as pd
import pytest

from nightbridge.gate.decisions import record_decision
from nightbridge.history.history_store import put_row
from nightbridge.models import StoreSettings, utc_now
from nightbridge.nights.records import NightStart, NightTest, record_start
from nightbridge.store.directory import DirectoryStore
from tests.builders import make_decision, make_row
from tests.nightbridge.cli.conftest import Program


@pytest.fixture
def url(tmp_path: Path) -> str:
    store = DirectoryStore(StoreSettings(url=f"file://{tmp_path}/store"))
    put_row(store, make_row())
    return store.url


def test_the_history_of_all_tests_is_written_to_a_file(nightbridge: Program, url: str, tmp_path: Path) -> None:
    options = ("--store", url, "--workspace", str(tmp_path / "ws"))
    code, out, err = nightbridge("history", "--all", "--out", "all.csv", *options)
    assert (code, out, err) == (0, "", "1 rows written to all.csv\n")
    assert pd.read_csv("all.csv")["test_id"].tolist() == ["llama3-8b"]
    code, _, err = nightbridge("history", "--all", "--out", "nowhere/all.csv", *options)
    assert (code, "nowhere/all.csv: cannot be written" in err) == (2, True)


def test_a_store_is_migrated_once(nightbridge: Program, url: str, tmp_path: Path) -> None:
    options = ("--store", url, "--workspace", str(tmp_path / "ws"))
    said = [nightbridge("migrate", *options)[2] for _ in range(2)]
    assert said == [f"1 series migrated in {url}\n", f"0 series migrated in {url}\n"]


@pytest.mark.parametrize(
    ("arguments", "ignored"),
    [
        (("--cluster", "dgx"), "--cluster: has no effect without a test"),
        (("llama3-8b", "--csv", "--json"), "--json: has no effect with --csv"),
        (("--all", "--out", "x.csv", "--since", "2026", "--json"), "--since, --json: has no effect with --out"),
    ],
)
def test_an_option_of_the_history_without_effect_is_refused(
    nightbridge: Program, url: str, arguments: tuple[str, ...], ignored: str
) -> None:
    code, out, err = nightbridge("history", *arguments, "--store", url)
    assert (code, out, err) == (2, "", f"nightbridge: {ignored}. Leave it out\n")


def test_decisions_are_listed_by_a_short_name_of_their_run(nightbridge: Program, url: str, tmp_path: Path) -> None:
    row = make_row()
    store = DirectoryStore(StoreSettings(url=url))
    record_decision(store, make_decision(row.test_id).model_copy(update={"run_key": row.run_key}))
    begun = {"scenario": "practice", "cluster": row.cluster, "workspace": tmp_path, "begun_at": utc_now()}
    tests = (NightTest(test_id=row.test_id, run_key=row.run_key),)
    record_start(store, NightStart.model_validate({"night": row.night, "tests": tests, **begun}))
    options = ("--store", url, "--workspace", str(tmp_path / "ws"))

    listed = {name: nightbridge("accept", "--list", name, *options) for name in ("last", f"llama3-8b@{row.night}")}

    assert all("llama3-8b: the level since" in out for _, out, _ in listed.values()), listed
    assert nightbridge("accept", "--list", "other", *options)[2] == f"no decision about other in {url}\n"


@pytest.mark.parametrize("since", ["2026-13-99", "2026-02-30", "30.11.2026", "friday", "20261121"])
def test_nights_since_what_is_no_date_are_not_none_but_refused(nightbridge: Program, url: str, since: str) -> None:
    code, _, err = nightbridge("history", "llama3-8b", "--since", since, "--store", url)
    assert (code, f"--since {since}: no date" in err) == (2, True)


@pytest.mark.parametrize("since", ["2026", "2026-05", "2026-05-04", "2026-05-04-1300"])
def test_nights_are_shown_since_a_year_a_month_or_a_night(nightbridge: Program, url: str, since: str) -> None:
    assert nightbridge("history", "llama3-8b", "--since", since, "--store", url)[0] == 0


@pytest.mark.parametrize(
    "arguments", [("--all",), ("--all", "llama3-8b", "--out", "x.csv"), ("llama3-8b", "--out", "x.csv")]
)
def test_an_export_is_of_all_tests_and_has_a_file(nightbridge: Program, url: str, arguments: tuple[str, ...]) -> None:
    code, _, err = nightbridge("history", *arguments, "--store", url)
    assert (code, "Give --all --out FILE" in err) == (2, True)


def test_the_history_of_a_sweep_says_which_point_it_shows(nightbridge: Program, tmp_path: Path) -> None:
    store = DirectoryStore(StoreSettings(url=f"file://{tmp_path}/store"))
    rows = [
        make_row(sweep_point={"cmd_args.tp": tp}).model_copy(update={"series": f"llama3-8b-{tp:012x}"}) for tp in (1, 2)
    ]
    for row in rows:
        put_row(store, row)
    tests = tuple(NightTest(test_id=row.test_id, run_key=row.run_key) for row in rows)
    begun = {"scenario": "practice", "cluster": "dgx", "workspace": tmp_path, "begun_at": utc_now()}
    record_start(store, NightStart.model_validate({"night": rows[0].night, "tests": tests, **begun}))
    options = ("--store", store.url, "--workspace", str(tmp_path / "ws"))

    latest, first = (nightbridge("history", name, *options)[1] for name in ("llama3-8b", rows[0].run_key))

    assert "shown: llama3-8b-000000000002, tp = 2; also there: llama3-8b-000000000001 until" in latest
    assert "shown: llama3-8b-000000000001, tp = 1; also there: llama3-8b-000000000002 until" in first
