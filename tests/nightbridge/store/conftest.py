"""Stores of every kind, on real servers that a file or a session starts."""

import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from nightbridge.models import StoreSettings
from nightbridge.store.object_store import STORES, ObjectStore, open_store
from tests.conftest import BUCKET
from tests.real.s3_servers import S3Server


@pytest.fixture
def settings_of(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], StoreSettings]:
    """Settings of an empty store of a kind: `directory`, `memory`, `ministack`, `ceph` or `ceph-https`."""

    def make(kind: str) -> StoreSettings:
        if kind == "directory":
            return StoreSettings(url=f"file://{tmp_path}/the store")
        if kind == "memory":
            monkeypatch.setitem(STORES, "memory", "tests.nightbridge.store.memory_store:MemoryStore")
            return StoreSettings(url=f"memory://{tmp_path}")
        server: S3Server = request.getfixturevalue(kind.removesuffix("-https"))
        endpoint = server.https_url if kind.endswith("-https") else None
        return server.store_settings(BUCKET, f"tests/{uuid.uuid4().hex}", endpoint_url=endpoint)

    return make


STORE_KINDS = [
    "directory",
    "memory",
    pytest.param("ministack", marks=pytest.mark.s3),
    pytest.param("ceph", marks=pytest.mark.s3),
    pytest.param("ceph-https", marks=pytest.mark.s3),
]


@pytest.fixture(params=STORE_KINDS)
def store(request: pytest.FixtureRequest, settings_of: Callable[[str], StoreSettings]) -> ObjectStore:
    """An empty store of every kind in turn."""
    return open_store(settings_of(request.param))
