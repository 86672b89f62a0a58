"""Finding a run by its key alone, and reading what was committed of it."""

from pathlib import Path

import pytest

from nightbridge.errors import DamagedData, InvalidInput
from nightbridge.harvest.manifest import committed_attempts, last_attempt_prefix, load_scalars, object_problem
from nightbridge.models import StoredFile, StoreSettings
from nightbridge.store.object_store import ObjectInfo, ObjectStore, open_store
from tests.builders import commit_run, make_record, scalar_table

KEY = "llama3-8b-2026-11-21-0123456789"
FOLDER = f"runs/llama3-8b/2026-11-21/{KEY}"


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return open_store(StoreSettings(url=f"file://{tmp_path}/store"))


def test_attempts_are_found_in_the_order_of_their_numbers(store: ObjectStore) -> None:
    for number in (10, 9, 1):
        store.put(f"{FOLDER}/a{number}/manifest.json", b"{}")

    assert committed_attempts(store, KEY) == (f"{FOLDER}/a1", f"{FOLDER}/a9", f"{FOLDER}/a10")
    assert last_attempt_prefix(store, KEY) == f"{FOLDER}/a10"


def test_an_attempt_without_a_manifest_is_not_there(store: ObjectStore) -> None:
    store.put(f"{FOLDER}/a1/summary.json", b"{}")
    store.put(f"{FOLDER}/a2/logs/manifest.json", b"{}")

    with pytest.raises(InvalidInput, match=KEY):
        last_attempt_prefix(store, KEY)


def test_the_run_of_another_key_is_not_found(store: ObjectStore) -> None:
    store.put(f"{FOLDER.replace('012345', '112345')}/a1/manifest.json", b"{}")

    assert committed_attempts(store, KEY) == ()


@pytest.mark.parametrize("key", ["x", "", "../../etc", "a-b", "UPPER/slash"])
def test_a_text_that_is_no_run_key_finds_nothing(store: ObjectStore, key: str) -> None:
    with pytest.raises(InvalidInput):
        last_attempt_prefix(store, key)


def test_scalars_that_are_not_those_that_were_committed_are_never_read_as_others(store: ObjectStore) -> None:
    record = commit_run(store, make_record(), {step: 5.0 - 0.01 * step for step in range(1, 301)})
    key = f"{record.prefix}/metrics.parquet"
    whole = store.get(key) or b""
    assert load_scalars(store, record.prefix) is not None

    for at in range(0, len(whole), 97):
        store.put(key, whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :])
        with pytest.raises(DamagedData, match="not what was committed"):
            load_scalars(store, record.prefix)


def test_scalars_that_no_manifest_names_are_read_as_they_are_or_not_at_all(store: ObjectStore) -> None:
    key, table = "runs/a/metrics.parquet", scalar_table(lm_loss={1: 2.0, 2: 1.0}).to_parquet(index=False)
    store.put(key, table)
    scalars = load_scalars(store, "runs/a")
    assert scalars is not None
    assert scalars["value"].tolist() == [2.0, 1.0]

    store.put(key, table[:4] + bytes(len(table) // 2) + table[4 + len(table) // 2 :])
    with pytest.raises(DamagedData, match="not a table of scalars"):
        load_scalars(store, "runs/a")


def test_scalars_say_whether_they_are_a_logs(store: ObjectStore) -> None:
    scalars = scalar_table(lm_loss={1: 2.0, 2: 1.0})
    store.put("runs/a/metrics.parquet", scalars.assign(file=["log", "events.out.tfevents.1"]).to_parquet(index=False))
    store.put("runs/b/metrics.parquet", scalars.to_parquet(index=False))

    known, unknown = load_scalars(store, "runs/a"), load_scalars(store, "runs/b")

    assert known is not None
    assert (known["file"] == "log").tolist() == [True, False]
    assert unknown is not None
    assert "file" not in unknown


MD5, IN_ONE_PART, IN_TWO_PARTS = "0" * 32, f"{'1' * 32}-1", f"{'2' * 32}-2"


@pytest.mark.parametrize(
    ("expected", "has", "said"),
    [
        (MD5, "f" * 32, ""),
        (MD5, IN_ONE_PART, "; other bytes, or copied in other parts: check with --deep"),
        (IN_TWO_PARTS, IN_ONE_PART, "; other bytes, or copied in other parts: check with --deep"),
    ],
)
def test_an_etag_that_a_copy_in_other_parts_may_have_made_is_no_proof_of_damage(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch, expected: str, has: str, said: str
) -> None:
    file = StoredFile(path="logs/log.out", size=3, sha256="a" * 64, kind="log", etag=expected)
    monkeypatch.setattr(store, "stat", lambda key, part_size: ObjectInfo(key=key, size=3, etag=has))

    assert object_problem(store, FOLDER, file) == f"logs/log.out: ETag {has}, expected {expected}{said}"
