"""A ref means one commit for a whole night."""

import json
from pathlib import Path
from typing import Any

import pytest

from nightbridge.errors import InvalidInput
from nightbridge.repos.commits import pinned
from nightbridge.repos.mirrors import Mirror

TIMEOUT = 60.0


def test_a_night_stays_with_what_it_resolved_first(origin: Any, workspace: Path) -> None:
    first = pinned(Mirror(origin.url, workspace, timeout=TIMEOUT), "main", "2026-11-21", workspace).commit
    moved = origin.commit("Third", {"README.md": "three\n"})

    # Asked again as after a restart, then by the next night.
    assert pinned(Mirror(origin.url, workspace, timeout=TIMEOUT), "main", "2026-11-21", workspace).commit == first
    assert pinned(Mirror(origin.url, workspace, timeout=TIMEOUT), "main", "2026-11-22", workspace).commit == moved


def test_the_record_holds_what_was_resolved(origin: Any, workspace: Path) -> None:
    commit = pinned(Mirror(origin.url, workspace, timeout=TIMEOUT), "v1.0", "2026-11-21", workspace).commit

    (path,) = (workspace / "nights" / "2026-11-21" / "pins").iterdir()
    record = json.loads(path.read_text())
    assert path.name.startswith("Megatron-Bridge-")
    assert (record["url"], record["ref"], record["commit"]) == (str(origin.path), "v1.0", commit)


def test_a_ref_that_cannot_be_resolved_is_not_recorded(origin: Any, workspace: Path) -> None:
    with pytest.raises(InvalidInput):
        pinned(Mirror(origin.url, workspace, timeout=TIMEOUT), "later", "2026-11-21", workspace)
    origin.git("branch", "later")

    commit = pinned(Mirror(origin.url, workspace, timeout=TIMEOUT), "later", "2026-11-21", workspace).commit
    assert commit == origin.git("rev-parse", "main")


def test_a_pin_holds_the_commit_of_the_night_before(origin: Any, workspace: Path) -> None:
    mirror = Mirror(origin.url, workspace, timeout=TIMEOUT)
    first = pinned(mirror, "main", "2026-11-20", workspace)
    moved = origin.commit("Third", {"README.md": "three\n"})
    second = pinned(mirror, "main", "2026-11-21", workspace)

    assert first.previous is None
    assert (second.previous, second.commit) == (first.commit, moved)
    assert pinned(mirror, "v1.0", "2026-11-21", workspace).previous is None
    assert pinned(mirror, "main", "2026-11-21", workspace) == second
