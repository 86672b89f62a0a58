"""`history --all --out` and `migrate`: the whole history as a table, and the store of an earlier version."""

from pathlib import Path

import pandas as pd
import pytest

from nightbridge.history.history_store import put_row
from nightbridge.models import StoreSettings
from nightbridge.store.directory import DirectoryStore
from tests.builders import make_row
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
    assert [nightbridge("migrate", *options)[2] for _ in range(2)] == ["1 series migrated\n", "0 series migrated\n"]


@pytest.mark.parametrize(
    "arguments", [("--all",), ("--all", "llama3-8b", "--out", "x.csv"), ("llama3-8b", "--out", "x.csv")]
)
def test_an_export_is_of_all_tests_and_has_a_file(nightbridge: Program, url: str, arguments: tuple[str, ...]) -> None:
    code, _, err = nightbridge("history", *arguments, "--store", url)
    assert (code, "Give --all --out FILE" in err) == (2, True)
