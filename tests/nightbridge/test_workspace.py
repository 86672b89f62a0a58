"""The workspace: made when it is not there, refused when nothing can be written in it."""

from pathlib import Path

import pytest

from nightbridge.errors import PermanentError
from nightbridge.workspace import check_workspace


def test_a_workspace_is_made_and_left_empty(tmp_path: Path) -> None:
    check_workspace(tmp_path / "a" / "b")

    assert list((tmp_path / "a" / "b").iterdir()) == []


def test_what_is_in_a_workspace_stays(tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("kept")

    check_workspace(tmp_path)

    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


@pytest.mark.parametrize("place", ["{folder}/file", "{folder}/file/workspace", "/proc/nightbridge", "/dev/null/x"])
def test_a_place_that_takes_no_files_is_named_with_a_way_out(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("in the way")
    workspace = Path(place.format(folder=tmp_path))

    with pytest.raises(PermanentError, match=f"{workspace}: the workspace cannot be written: .*--workspace"):
        check_workspace(workspace)
