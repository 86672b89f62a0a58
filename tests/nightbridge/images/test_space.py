"""Whether there is room is asked of each file system once, for all that is going to be written there."""

import re
import shutil
from pathlib import Path

import pytest

from nightbridge.errors import PermanentError
from nightbridge.images.references import parse_reference
from nightbridge.images.space import Need, check_space

NEMO = parse_reference("nvcr.io/nvidia/nemo:26.02.00")


def test_the_folder_what_it_needs_and_what_is_free_are_named(tmp_path: Path) -> None:
    folder = tmp_path / "not" / "there" / "yet"

    with pytest.raises(PermanentError) as caught:
        check_space([Need(folder=folder, size=10**18)], NEMO)

    found = re.search(
        r"too little space in (\S+): the import needs ([\d,]+) bytes, and ([\d,]+) are free", str(caught.value)
    )
    assert found is not None
    assert found[1] == str(folder)
    assert found[2] == "1,000,000,000,000,000,000"
    assert 0 < int(found[3].replace(",", "")) < shutil.disk_usage(tmp_path).total
    assert "ENROOT_TEMP_PATH" in str(caught.value)


def test_folders_of_one_file_system_share_its_space(tmp_path: Path) -> None:
    part = int(shutil.disk_usage(tmp_path).free * 0.7)
    cache, temp = Need(folder=tmp_path / "cache", size=part), Need(folder=tmp_path / "temp", size=part)

    check_space([cache], NEMO)
    check_space([temp], NEMO)
    with pytest.raises(PermanentError, match=r"cache and .*temp: the import needs"):
        check_space([cache, temp], NEMO)
