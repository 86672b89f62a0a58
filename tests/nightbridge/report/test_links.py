"""Links of the report: what the store has of a run, each at the address that the store itself gives."""

from pathlib import Path

import pytest

from nightbridge.harvest.manifest import MANIFEST, read_manifest
from nightbridge.models import StoreSettings
from nightbridge.report.night_report import run_links
from nightbridge.store.object_store import STORES, open_store
from tests.nightbridge.harvest.left_run import make_run


def test_every_kind_of_store_has_links_to_all_of_a_run_but_its_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(STORES, "memory", "tests.nightbridge.store.memory_store:MemoryStore")
    store = open_store(StoreSettings(url="memory://links"))
    record = make_run(tmp_path, shard_size=1000).harvest(store)
    manifest = read_manifest(store, record.prefix)
    assert manifest is not None

    links = dict(run_links(store, manifest))

    assert list(links)[:2] == ["summary.json", "metrics.parquet"]
    assert MANIFEST in links
    assert not [path for path in links if path.startswith("checkpoints/")]
    assert links["summary.json"] == store.link_of(f"{record.prefix}/summary.json")
    assert links["summary.json"].startswith("https://memory.example.org/")
