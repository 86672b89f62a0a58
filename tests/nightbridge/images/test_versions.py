"""The images between two of them."""

import os
from pathlib import Path

import pytest

from nightbridge.images.image import versions_between
from nightbridge.images.registry import ImageReference

TAGS = ("26.02", "26.10", "26.04", "26.04.rc1", "latest", "nightly-20261120-4f1c2ab", "nightly-20261121-90ab12c",
        "nightly-20261123-8e7d6c5")  # fmt: skip


def listed(reference: ImageReference) -> tuple[str, ...]:
    assert (reference.registry, reference.name) == ("nvcr.io", "nvidia/nemo")
    return TAGS


def no_list(reference: ImageReference) -> tuple[str, ...]:
    raise AssertionError(f"the registry was asked for {reference}")


def test_tags_that_differ_in_numbers_are_in_the_order_of_these_numbers_and_other_tags_are_no_versions() -> None:
    bad = f"nvcr.io#nvidia/nemo:26.10@sha256:{'b' * 64}"

    found = versions_between(f"nvcr.io#nvidia/nemo:26.02@sha256:{'a' * 64}", bad, listed)

    assert found == ("nvcr.io/nvidia/nemo:26.04", bad)


def test_a_commit_in_a_tag_is_no_number_of_it() -> None:
    good, bad = (f"nvcr.io/nvidia/nemo:{TAGS[at]}" for at in (5, 7))

    assert versions_between(good, bad, listed) == (f"nvcr.io/nvidia/nemo:{TAGS[6]}", bad)


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        (f"nvcr.io/nvidia/nemo:dev@sha256:{'a' * 64}", f"nvcr.io/nvidia/nemo:dev2@sha256:{'b' * 64}"),
        ("nvcr.io/nvidia/nemo:26.02", "nvcr.io/nvidia/other:26.04"),
        ("nvcr.io/nvidia/nemo:26.02", "/images/nemo.sqsh"),
        (f"nvcr.io/nvidia/nemo@sha256:{'a' * 64}", "nvcr.io/nvidia/nemo:26.04"),
        ("none", "nvcr.io/nvidia/nemo:26.04"),
        ("/other/nemo-1.sqsh", "/images/nemo-3.sqsh"),
    ],
)
def test_images_of_two_kinds_have_none_between_them(good: str, bad: str) -> None:
    assert versions_between(good, bad, no_list) == (bad,)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    names = ("nemo-26.10", "nemo-26.02", "nemo-26.04", "mine", "base")
    for age, name in enumerate(names):
        (tmp_path / f"{name}.sqsh").touch()
        os.utime(tmp_path / f"{name}.sqsh", (1000 + age, 1000 + age))
    return tmp_path


def test_files_are_in_the_order_of_the_numbers_in_their_names(folder: Path) -> None:
    good, bad = (str(folder / f"nemo-26.{month}.sqsh") for month in ("02", "10"))

    assert versions_between(good, bad, no_list) == (str(folder / "nemo-26.04.sqsh"), bad)


def test_files_whose_names_say_nothing_are_in_the_order_of_their_dates(folder: Path) -> None:
    good, bad = (str(folder / f"{name}.sqsh") for name in ("nemo-26.02", "base"))

    assert versions_between(good, bad, no_list) == (str(folder / "nemo-26.04.sqsh"), str(folder / "mine.sqsh"), bad)
