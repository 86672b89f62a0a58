"""Repository addresses are made absolute and never show a password."""

from pathlib import Path

import pytest

from nightbridge.errors import InvalidInput
from nightbridge.repos.git import absolute_url, masked, repository_name


@pytest.mark.parametrize(
    "url",
    [
        "https://github.com/NVIDIA-NeMo/Run.git",
        "ssh://git@github.com/NVIDIA-NeMo/Run.git",
        "git@github.com:NVIDIA-NeMo/Run.git",
        "/srv/git/Run.git",
    ],
)
def test_an_absolute_address_stays_as_it_is(url: str) -> None:
    assert absolute_url(url) == url


def test_a_relative_path_is_relative_to_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    assert absolute_url("repos/Run") == str(tmp_path / "repos" / "Run")
    assert absolute_url("./Run") == str(tmp_path / "Run")


def test_a_file_url_is_the_same_repository_as_its_path() -> None:
    assert absolute_url("file:///srv/git/My%20Run.git") == absolute_url("/srv/git/My Run.git")


@pytest.mark.parametrize("url", ["", "  ", "--upload-pack=touch /tmp/x"])
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(InvalidInput, match="not a repository address"):
        absolute_url(url)


def test_a_password_in_an_address_is_refused_without_showing_it() -> None:
    with pytest.raises(InvalidInput, match="credential helper") as caught:
        absolute_url("https://me:hunter22@git.example.org/Run.git")

    assert "hunter22" not in str(caught.value)


def test_messages_show_no_login_but_an_ssh_user() -> None:
    text = "fatal: https://token123@a.org/x and https://me:pw@b.org/y and ssh://git@c.org/z failed"

    assert masked(text) == "fatal: https://********@a.org/x and https://********@b.org/y and ssh://git@c.org/z failed"


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("https://github.com/NVIDIA-NeMo/Megatron-Bridge.git", "Megatron-Bridge"),
        ("git@github.com:Run.git", "Run"),
        ("/srv/some repo/", "some-repo"),
        ("/srv/Run/.git", "Run"),
        ("/srv/..", "srv"),
    ],
)
def test_a_repository_is_named_after_the_last_part(url: str, name: str) -> None:
    assert repository_name(url) == name
