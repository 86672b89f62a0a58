"""What git says decides between trying again and asking a person; addresses are made absolute and show no password."""

import re
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from nightbridge.errors import InvalidInput, PermanentError, TransientError
from nightbridge.models import Site
from nightbridge.processes import Finished
from nightbridge.repos.clone import make_code
from nightbridge.repos.git import (
    absolute_url,
    classify_failure,
    git,
    git_logins,
    git_version,
    masked,
    pull_request_ref,
    repository_name,
)
from tests.builders import make_spec

URL = "https://git.example.org/team/Run.git"
LOGINS = "machine git.example.org login me password hidden"

PERMANENT = {
    f"remote: Repository not found.\nfatal: repository '{URL}/' not found": "no such repository",
    "fatal: '/srv/x' does not appear to be a git repository\nfatal: Could not read from remote repository.": "no such repository",
    f"fatal: unable to access '{URL}/': The requested URL returned error: 404": "no such repository",
    "fatal: couldn't find remote ref refs/pull/9/head": "no such ref",
    "fatal: remote error: upload-pack: not our ref 1111111111111111111111111111111111111111": "no such ref",
    f"fatal: unable to access '{URL}/': The requested URL returned error: 403": "refused our credentials",
    f"fatal: Authentication failed for '{URL}/'": "refused our credentials",
    f"fatal: could not read Username for '{URL}': terminal prompts disabled": "refused our credentials",
    "git@x: Permission denied (publickey).\nfatal: Could not read from remote repository.": "refused our credentials",
    "Host key verification failed.\nfatal: Could not read from remote repository.": "host's ssh key",
    "fatal: detected dubious ownership in repository at '/srv/x'": "does not trust",
    "fatal: unsafe repository ('/srv/x' is owned by someone else)": "does not trust",
    "fatal: unable to access 'https://x/': SSL certificate problem: self-signed certificate": "certificate",
    "remote: aborting due to possible repository corruption on the remote side.\nfatal: early EOF": "damaged or incomplete",
    "fatal: write error: No space left on device": "no space left",
    "error: unable to write file src/a.py\nerror: unable to write file src/b.py": "a file could not be written",
    "git: 'remote-htps' is not a git command\nfatal: unable to find remote helper for 'htps'": "does not support this address",
}

TRANSIENT = [
    f"fatal: unable to access '{URL}/': Could not resolve host: git.example.org",
    f"fatal: unable to access '{URL}/': Failed to connect to git.example.org port 443: Connection refused",
    f"fatal: unable to access '{URL}/': The requested URL returned error: 503",
    f"fatal: unable to access '{URL}/': The requested URL returned error: 429",
    f"fatal: unable to access '{URL}/': Operation too slow. Less than 1000 bytes/sec transferred the last 60 seconds",
    "error: RPC failed; curl 56 GnuTLS recv error (-9)\nfetch-pack: unexpected disconnect while reading sideband packet\nfatal: early EOF",
    "fatal: early EOF\nfatal: index-pack failed",
    "ssh: connect to host x port 22: Connection timed out\nfatal: Could not read from remote repository.",
    "kex_exchange_identification: Connection closed by remote host\nfatal: Could not read from remote repository.",
    "fatal: unable to connect to localhost:\nlocalhost[0: 127.0.0.1]: errno=Connection refused",
    "fatal: Unable to create '/w/repos/x.git/packed-refs.lock': File exists.",
    "error: cannot lock ref 'refs/heads/main': is at 1 but expected 2",
]


@pytest.mark.parametrize(("stderr", "what"), PERMANENT.items())
def test_what_the_user_must_change_is_permanent_and_has_advice(stderr: str, what: str) -> None:
    error = classify_failure(Finished(code=128, stdout=b"", stderr=stderr), URL)

    assert isinstance(error, PermanentError)
    assert what in str(error)
    assert error.advice
    assert error.subject == URL


def test_a_repository_that_is_not_there_may_have_been_looked_for_in_the_wrong_folder() -> None:
    stderr = "fatal: '/home/ada/conf/.nightbridge/practice/Run.git' does not appear to be a git repository"

    error = classify_failure(
        Finished(code=128, stdout=b"", stderr=stderr), "/home/ada/conf/.nightbridge/practice/Run.git"
    )

    assert "a relative one is taken from the folder that the command runs in" in error.advice


@pytest.mark.parametrize("stderr", TRANSIENT)
def test_what_may_pass_is_transient(stderr: str) -> None:
    assert isinstance(classify_failure(Finished(code=128, stdout=b"", stderr=stderr), URL), TransientError)


def test_a_killed_git_is_transient_and_an_unknown_failure_is_not() -> None:
    assert isinstance(classify_failure(Finished(code=-9, stdout=b"", stderr=""), URL), TransientError)
    assert isinstance(
        classify_failure(Finished(code=1, stdout=b"", stderr="fatal: odd"), URL, ("fetch",)), PermanentError
    )


def test_no_message_shows_a_password() -> None:
    stderr = "fatal: unable to access 'https://me:hunter22@git.example.org/Run.git/': Could not resolve host"

    error = classify_failure(
        Finished(code=128, stdout=b"", stderr=stderr), "https://me:hunter22@git.example.org/Run.git"
    )

    assert "hunter22" not in str(error)


@pytest.fixture
def server() -> Iterator[HTTPServer]:
    """A web server on loopback that answers everything with the status it was told."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(self.server.status)  # type: ignore[attr-defined]
            self.send_header("WWW-Authenticate", 'Basic realm="git"')
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Answer) as made:
        thread = threading.Thread(target=made.serve_forever, args=(0.05,))
        thread.start()
        yield made
        made.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("status", "kind", "what"),
    [
        (401, PermanentError, "refused our credentials"),
        (403, PermanentError, "refused our credentials"),
        (404, InvalidInput, "no such repository"),
        (429, TransientError, "unreachable"),
        (500, TransientError, "unreachable"),
        (503, TransientError, "unreachable"),
    ],
)
def test_the_messages_of_a_real_git_about_a_real_servers_answers(
    server: HTTPServer, status: int, kind: type[Exception], what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    server.status = status  # type: ignore[attr-defined]

    with pytest.raises(kind, match=what):
        git("ls-remote", f"http://127.0.0.1:{server.server_port}/Run.git", timeout=30)


def test_a_connection_that_is_not_answered_is_transient(tmp_path: Path) -> None:
    with pytest.raises(TransientError, match="unreachable"):
        git("ls-remote", "git://127.0.0.1:1/x.git", timeout=30)


def test_git_runs_into_its_time_limit(tmp_path: Path) -> None:
    with pytest.raises(TransientError, match="did not end within"):
        git("-c", "alias.wait=!sleep 30", "wait", timeout=0.3)


def test_a_folder_inside_another_repository_is_not_taken_for_it(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    (tmp_path / "inside").mkdir()

    with pytest.raises(PermanentError, match="not a git repository"):
        git("status", timeout=30, folder=tmp_path / "inside")


def test_a_surrounding_hook_changes_nothing_for_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subprocess.run(["git", "init", "--quiet", str(tmp_path / "mine")], check=True)
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))

    assert git("rev-parse", "--show-toplevel", timeout=30, folder=tmp_path / "mine") == str(tmp_path / "mine")


def test_an_invalid_ref_error_is_invalid_input() -> None:
    error = classify_failure(Finished(code=128, stdout=b"", stderr="fatal: couldn't find remote ref x"), URL)

    assert isinstance(error, InvalidInput)


@pytest.mark.parametrize(
    ("said", "too_old"),
    [
        ("git version 1.8.3.1", True),
        ("git version 2.25.1", True),
        ("git version 2.29.0", False),
        ("git version 2.39.5 (Apple Git-154)", False),
        ("git version 10.0", False),
        ("git of our own", False),
    ],
)
def test_a_git_that_is_too_old_is_refused_before_it_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, too_old: bool
) -> None:
    (tmp_path / "git").write_text(f"#!/bin/sh\necho '{said}'\n")
    (tmp_path / "git").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    test = make_spec().test

    if too_old:
        with pytest.raises(
            PermanentError, match=rf"{re.escape(said)} is too old\. Put git 2\.29 or newer first on PATH"
        ):
            make_code(test, Site(workspace=tmp_path / "workspace"), "n1")
    else:
        assert git_version() == said


@pytest.mark.parametrize(
    ("command", "lines", "given"),
    [
        ("rev-parse", "", False),
        ("rev-parse", LOGINS, False),
        ("fetch", LOGINS, False),
        ("fetch", "", True),  # a credential helper of the user's own may read any variable
    ],
)
def test_git_inherits_what_it_reads_and_no_secret(
    command: str, lines: str, given: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "git").write_text("#!/bin/sh\nenv\n")
    (tmp_path / "git").chmod(0o755)
    kept = {"HOME": "/home/me", "GIT_SSL_CAINFO": "/ca.pem", "SSH_AUTH_SOCK": "/agent", "https_proxy": "http://proxy:3"}
    for name, value in {**kept, "PATH": f"{tmp_path}:/usr/bin:/bin", "SITE_VALUE": "secret", "GIT_DIR": "/x"}.items():
        monkeypatch.setenv(name, value)

    with git_logins(lines):
        shown = dict(line.split("=", 1) for line in git(command, timeout=60).splitlines() if "=" in line)

    assert shown.items() >= kept.items()
    assert "GIT_DIR" not in shown
    assert ("SITE_VALUE" in shown) == given


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
    assert absolute_url("~no-such-user/Run") == str(tmp_path / "~no-such-user" / "Run")


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


@pytest.mark.parametrize(
    ("text", "url", "ref"),
    [
        ("5129", "https://github.com/a/b.git", "refs/pull/5129/head"),
        ("#5129", "https://github.com/a/b.git", "refs/pull/5129/head"),
        ("7", "https://gitlab.example.org/a/b.git", "refs/merge-requests/7/head"),
        ("main", "https://github.com/a/b.git", "main"),
        ("0123456789ab", "https://github.com/a/b.git", "0123456789ab"),
    ],
)
def test_a_number_is_a_pull_request(text: str, url: str, ref: str) -> None:
    assert pull_request_ref(text, url) == ref
