"""What an image says about its start is written where enroot writes it, and nowhere else."""

import os
import stat
import subprocess
from pathlib import Path

import pytest

from nightbridge.errors import PermanentError
from nightbridge.images.rootfs import ImageConfig, open_to_owner, write_start_files


def started(rootfs: Path, *arguments: str) -> list[str]:
    """What /etc/rc starts, one word a line, its folder first."""
    done = subprocess.run(["sh", rootfs / "etc" / "rc", *arguments], check=True, capture_output=True, text=True)
    return done.stdout.splitlines()


@pytest.fixture
def rootfs(tmp_path: Path) -> Path:
    made = tmp_path / "rootfs"
    made.mkdir()
    return made


def show(folder: Path) -> list[str]:
    """An entrypoint that prints its folder and its arguments."""
    program = folder / "show it"
    program.write_text('#!/bin/sh\npwd\nprintf "%s\\n" "$@"\n')
    program.chmod(0o755)
    return [str(program), "it's", "$HOME"]


def test_the_entrypoint_gets_the_command_or_what_it_is_given_in_its_place(rootfs: Path, tmp_path: Path) -> None:
    workdir = str(tmp_path / "work here")
    config = ImageConfig.model_validate({"Entrypoint": show(tmp_path), "Cmd": ["a b", "*"], "WorkingDir": workdir})

    write_start_files(rootfs, config)

    assert started(rootfs) == [workdir, "it's", "$HOME", "a b", "*"]
    assert started(rootfs, "x y", "") == [workdir, "it's", "$HOME", "x y", ""]


def test_without_an_entrypoint_the_command_is_started_and_without_both_a_shell(rootfs: Path) -> None:
    write_start_files(rootfs, ImageConfig.model_validate({"Entrypoint": None, "Cmd": ["echo", "hello"]}))
    assert started(rootfs) == ["hello"]
    assert started(rootfs, "echo", "other") == ["other"]

    write_start_files(rootfs, ImageConfig())
    assert "set -- /bin/sh\n" in (rootfs / "etc" / "rc").read_text()


def test_variables_are_written_as_the_image_has_them(rootfs: Path) -> None:
    write_start_files(rootfs, ImageConfig.model_validate({"Env": ["A=it's $B", "EMPTY="], "Volumes": {"/data": {}}}))

    assert (rootfs / "etc" / "environment").read_text() == "A=it's $B\nEMPTY=\n"
    assert (rootfs / "etc" / "fstab").read_text().split()[1:3] == ["/data", "none"]


def test_links_in_an_image_lead_nowhere_outside_of_it(rootfs: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "environment").write_text("mine\n")
    (rootfs / "etc").mkdir()
    (rootfs / "etc" / "environment").symlink_to(outside / "environment")
    (rootfs / "srv").symlink_to(outside)

    write_start_files(rootfs, ImageConfig.model_validate({"Env": ["A=1"], "WorkingDir": "/srv/deep"}))

    assert (outside / "environment").read_text() == "mine\n"
    assert (rootfs / "etc" / "environment").read_text() == "A=1\n"
    assert [path.name for path in outside.iterdir()] == ["environment"]


def test_an_image_whose_etc_leads_elsewhere_is_refused(rootfs: Path, tmp_path: Path) -> None:
    (rootfs / "etc").symlink_to(tmp_path)

    with pytest.raises(PermanentError, match="/etc of this image is no folder"):
        write_start_files(rootfs, ImageConfig())


def test_everything_is_made_readable_to_its_owner_and_links_are_not_followed(rootfs: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_text("")
    outside.chmod(0o000)
    (rootfs / "closed").mkdir()
    (rootfs / "closed" / "tool").write_text("")
    (rootfs / "closed" / "tool").chmod(0o010)
    (rootfs / "closed" / "text").write_text("")
    (rootfs / "closed" / "text").chmod(0o000)
    (rootfs / "link").symlink_to(outside)
    (rootfs / "closed").chmod(0o000)

    open_to_owner(rootfs)

    modes = {path.name: stat.S_IMODE(os.lstat(path).st_mode) for path in rootfs.rglob("*") if not path.is_symlink()}
    assert modes == {"closed": 0o700, "tool": 0o510, "text": 0o400}
    assert stat.S_IMODE(outside.stat().st_mode) == 0
