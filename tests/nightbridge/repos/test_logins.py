"""A site's own secret opens a private repository on a real git server, and stands nowhere afterwards."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nightbridge.cli import main as cli
from nightbridge.errors import PermanentError
from nightbridge.repos.checkouts import check_out
from nightbridge.repos.git import git_logins, login_settings, main
from nightbridge.repos.mirrors import Mirror
from tests.nightbridge.repos.test_mirrors import spoil
from tests.real.git_server import served_over_http

USER, TOKEN = "night-reader", "planted-git-token"
LINES = f"machine 127.0.0.1 login {USER} password {TOKEN}"


@pytest.fixture
def private(origin: Any, tmp_path: Path) -> Iterator[str]:
    """The address of a repository that only the login opens."""
    served = tmp_path / "served"
    served.mkdir()
    (served / "Megatron-Bridge").symlink_to(origin.path / ".git")
    with served_over_http(served, (USER, TOKEN)) as server:
        yield f"{server.url}/Megatron-Bridge"


def test_a_private_repository_is_mirrored_and_no_file_holds_the_token(
    private: str, origin: Any, workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tmp_path / "kept-by-git"
    monkeypatch.setenv("GIT_CONFIG_COUNT", "1")
    monkeypatch.setenv("GIT_CONFIG_KEY_0", "credential.helper")
    monkeypatch.setenv("GIT_CONFIG_VALUE_0", f"store --file={kept}")

    with git_logins(LINES):
        mirror = Mirror(private, workspace, timeout=600)
        commit = mirror.resolve("main")
        check_out(mirror, "main", commit, workspace)
        settings = login_settings()

    assert commit == origin.git("rev-parse", "main")
    assert TOKEN not in repr(settings)
    assert not kept.exists()
    assert [path for path in workspace.rglob("*") if path.is_file() and TOKEN.encode() in path.read_bytes()] == []


def test_a_private_submodule_is_opened_by_the_same_login(
    private: str, origin: Any, make_origin: Callable[[str], Any], workspace: Path, tmp_path: Path
) -> None:
    lm = make_origin("Megatron-LM")
    lm.commit("Core", {"core.py": "x = 1\n"})
    (tmp_path / "served" / "Megatron-LM").symlink_to(lm.path / ".git")
    origin.git("submodule", "--quiet", "add", "../Megatron-LM", "3rdparty/Megatron-LM")
    origin.commit("Add Megatron-LM", {})

    with git_logins(LINES):
        mirror = Mirror(private, workspace, timeout=600)
        made = check_out(mirror, "main", mirror.resolve("main"), workspace, with_submodules=True)

    assert (made.path / "3rdparty" / "Megatron-LM" / "core.py").read_text() == "x = 1\n"


def test_validate_pinned_reads_the_private_code_with_the_sites_login(
    private: str, workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    test, site = tmp_path / "private.toml", tmp_path / "site.toml"
    test.write_text(
        'name = "private"\ndescription = "a fork"\ntest_template_name = "MegatronBridge"\n'
        f'[[git_repos]]\nurl = "{private}"\ncommit = "main"\n'
        '[cmd_args]\ngpu_type = "h100"\nnum_gpus = 8\ncontainer_image = "none"\n'
        'model_family_name = "llama"\nmodel_recipe_name = "llama3_8b"\n'
    )
    site.write_text(f'workspace = "{workspace}"\ngit_credentials = "env:GIT_LOGINS"\n')
    said = {}
    for name, lines in (("wrong", LINES.replace(TOKEN, "wrong-token")), ("right", LINES)):
        monkeypatch.setenv("GIT_LOGINS", lines)
        cli.run(["validate", "--pinned", str(test), "--system", str(site)])
        said[name] = "".join(capsys.readouterr())

    assert "refused our credentials" in said["wrong"]
    assert "refused our credentials" not in said["right"]
    assert "private.toml: private:" in said["right"]
    assert TOKEN not in said["right"] + said["wrong"]


@pytest.mark.parametrize("lines", ["", LINES.replace(TOKEN, "wrong"), LINES.replace("127.0.0.1", "git.example.org")])
def test_without_the_right_login_it_is_refused_with_the_way_out(private: str, workspace: Path, lines: str) -> None:
    with git_logins(lines), pytest.raises(PermanentError, match=r"refused our credentials.*git_credentials"):
        Mirror(private, workspace, timeout=600).resolve("main")


def test_a_login_that_is_refused_is_no_reason_to_look_for_damage_in_the_mirror(
    private: str, workspace: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mirror = Mirror(private, workspace, timeout=600)
    with git_logins(LINES):
        mirror.resolve("main")
    spoil(mirror, "main:README.md")

    with git_logins(LINES.replace(TOKEN, "revoked")), pytest.raises(PermanentError, match="refused our credentials"):
        mirror.resolve("main")

    assert "mirroring again" not in caplog.text


def test_lines_that_cannot_be_read_are_refused_without_showing_them() -> None:
    unreadable = pytest.raises(PermanentError, match="the git credentials: cannot read these logins")
    with unreadable as caught, git_logins(f"machine x {TOKEN}"):
        pass

    assert TOKEN not in str(caught.value)


@pytest.mark.parametrize(
    ("protocol", "host", "known"),
    [("https", "git.example.org", True), ("https", "git.example.org:8443", True), ("https", "other.org", False),
     ("http", "git.example.org", False)],
)  # fmt: skip
def test_a_login_goes_to_its_own_host_and_never_unencrypted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], protocol: str, host: str,
    known: bool,
) -> None:  # fmt: skip
    path = tmp_path / "lines"
    path.write_text(f"machine git.example.org login {USER} password {TOKEN}\n")
    question = tmp_path / "question"
    question.write_text(f"protocol={protocol}\nhost={host}\n")

    with question.open() as stream:
        monkeypatch.setattr("sys.stdin", stream)
        assert main([str(path), "get"]) == 0

    assert capsys.readouterr().out == (f"username={USER}\npassword={TOKEN}\n" if known else "")
