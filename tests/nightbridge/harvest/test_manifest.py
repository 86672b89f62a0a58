"""Finding a run by its key alone."""

from pathlib import Path

import pytest

from nightbridge.errors import InvalidInput
from nightbridge.harvest.manifest import committed_attempts, last_attempt
from nightbridge.models import StoreSettings
from nightbridge.store.protocol import ObjectStore, open_store

KEY = "llama3-8b-2026-11-21-0123456789"
FOLDER = f"runs/llama3-8b/2026-11-21/{KEY}"


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return open_store(StoreSettings(url=f"file://{tmp_path}/store"))


def test_attempts_are_found_in_the_order_of_their_numbers(store: ObjectStore) -> None:
    for number in (10, 9, 1):
        store.put(f"{FOLDER}/a{number}/manifest.json", b"{}")

    assert committed_attempts(store, KEY) == (f"{FOLDER}/a1", f"{FOLDER}/a9", f"{FOLDER}/a10")
    assert last_attempt(store, KEY) == f"{FOLDER}/a10"


def test_an_attempt_without_a_manifest_is_not_there(store: ObjectStore) -> None:
    store.put(f"{FOLDER}/a1/summary.json", b"{}")
    store.put(f"{FOLDER}/a2/logs/manifest.json", b"{}")

    with pytest.raises(InvalidInput, match=KEY):
        last_attempt(store, KEY)


def test_the_run_of_another_key_is_not_found(store: ObjectStore) -> None:
    store.put(f"{FOLDER.replace('012345', '112345')}/a1/manifest.json", b"{}")

    assert committed_attempts(store, KEY) == ()


@pytest.mark.parametrize("key", ["x", "", "../../etc", "a-b", "UPPER/slash"])
def test_a_text_that_is_no_run_key_finds_nothing(store: ObjectStore, key: str) -> None:
    with pytest.raises(InvalidInput):
        last_attempt(store, key)
