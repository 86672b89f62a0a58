"""The shared builders as fixtures, and a store in a folder of the test."""

from collections.abc import Callable
from pathlib import Path

import pytest

from nightbridge.history.rows import HistoryRow
from nightbridge.models import RunRecord, RunSpec, StoreSettings, Summary
from nightbridge.store.directory import DirectoryStore
from tests import builders


@pytest.fixture
def summary_of() -> Callable[..., Summary]:
    return builders.make_summary


@pytest.fixture
def make_spec() -> Callable[..., RunSpec]:
    return builders.make_spec


@pytest.fixture
def make_record() -> Callable[..., RunRecord]:
    return builders.make_record


@pytest.fixture
def make_row() -> Callable[..., HistoryRow]:
    return builders.make_row


@pytest.fixture
def commit() -> Callable[..., RunRecord]:
    return builders.commit_run


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    return DirectoryStore(StoreSettings(url=f"file://{tmp_path}/store"))
