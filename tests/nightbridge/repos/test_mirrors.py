"""A ref becomes a full commit, and a mirror is fetched only when it must be."""

import shutil
import subprocess
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from nightbridge.errors import InvalidInput, TransientError
from nightbridge.repos import mirrors
from nightbridge.repos.checkouts import check_out
from nightbridge.repos.commits import commits_in_range
from nightbridge.repos.mirrors import Mirror

TIMEOUT = 60.0


def away(origin: Any) -> None:
    """From now on the repository cannot be reached."""
    origin.path.rename(origin.path.with_name("away"))


@pytest.fixture
def mirror(origin: Any, workspace: Path) -> Mirror:
    return Mirror(origin.url, workspace, timeout=TIMEOUT)


def test_a_branch_a_tag_and_a_commit_full_or_abbreviated_are_resolved(origin: Any, workspace: Path) -> None:
    second = origin.git("rev-parse", "main")
    first = origin.git("rev-parse", "main~1")

    found = {
        ref: Mirror(origin.url, workspace, timeout=TIMEOUT).resolve(ref)
        for ref in ("main", "HEAD", "v1.0", second, first[:9])
    }

    assert found == {"main": second, "HEAD": second, "v1.0": first, second: second, first[:9]: first}


def test_a_relative_path_is_a_repository_too(origin: Any, workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(origin.path.parent)

    assert Mirror("Megatron-Bridge", workspace, timeout=TIMEOUT).resolve("main") == origin.git("rev-parse", "main")


def test_the_head_of_a_pull_request_is_resolved(origin: Any, mirror: Mirror) -> None:
    commit = origin.commit("Proposed", {"README.md": "three\n"})
    origin.git("update-ref", "refs/pull/7/head", commit)
    origin.git("reset", "--quiet", "--hard", "HEAD~1")

    assert mirror.resolve("refs/pull/7/head") == commit
    # By its commit as well, although no branch and no tag holds it.
    assert Mirror(origin.url, mirror.path.parent.parent / "other", timeout=TIMEOUT).resolve(commit) == commit


def test_a_branch_that_moved_is_fetched_again(origin: Any, mirror: Mirror) -> None:
    mirror.resolve("main")
    moved = origin.commit("Third", {"README.md": "three\n"})

    assert mirror.resolve("main") == moved


def test_a_rewritten_branch_is_followed_and_its_old_commit_kept(origin: Any, mirror: Mirror) -> None:
    old = mirror.resolve("main")
    origin.git("reset", "--quiet", "--hard", "HEAD~1")
    new = origin.commit("Other second", {"README.md": "other\n"})

    assert mirror.resolve("main") == new
    assert mirror.has(old)


def test_a_deleted_branch_is_gone_and_its_name_may_become_a_folder(origin: Any, mirror: Mirror) -> None:
    origin.git("branch", "fix")
    mirror.resolve("fix")
    origin.git("branch", "--delete", "--force", "fix")
    origin.git("branch", "fix/part")

    assert mirror.resolve("fix/part") == origin.git("rev-parse", "fix/part")
    with pytest.raises(InvalidInput, match="no such branch"):
        mirror.resolve("fix")


def test_a_full_name_that_became_a_folder_is_resolved(origin: Any, mirror: Mirror) -> None:
    origin.git("branch", "release")
    mirror.resolve("refs/heads/release")
    origin.git("branch", "--delete", "release")
    origin.git("branch", "release/26.02")

    assert mirror.resolve("refs/heads/release/26.02") == origin.git("rev-parse", "main")


def test_a_full_commit_that_is_there_needs_no_repository(origin: Any, mirror: Mirror) -> None:
    commit = mirror.resolve("main")
    away(origin)

    assert mirror.resolve(commit) == commit
    assert mirror.resolve(commit.upper()) == commit


def test_a_second_fetch_brings_only_what_is_new(origin: Any, mirror: Mirror) -> None:
    origin.commit("Large", {"large": "0123456789abcdef" * 50_000})
    mirror.resolve("main")
    before = {path for path in mirror.path.rglob("*") if path.is_file()}
    origin.commit("Small", {"README.md": "three\n"})

    mirror.resolve("main")

    new = [path for path in mirror.path.rglob("*") if path.is_file() and path not in before and "objects" in path.parts]
    assert 0 < sum(path.stat().st_size for path in new) < 10_000


def test_an_unknown_ref_names_the_nearest_one(origin: Any, mirror: Mirror) -> None:
    with pytest.raises(
        InvalidInput, match=r"mian of .*Megatron-Bridge.*no such branch, tag or commit.*nearest is main"
    ):
        mirror.resolve("mian")
    with pytest.raises(InvalidInput, match=r"nearest is v1\.0"):
        mirror.resolve("1.0")


@pytest.mark.parametrize("ref", ["f" * 40, "refs/pull/404/head", "deadbeef"])
def test_an_unknown_commit_or_pull_request_is_invalid_input(origin: Any, mirror: Mirror, ref: str) -> None:
    with pytest.raises(InvalidInput, match=ref):
        mirror.resolve(ref)


@pytest.mark.parametrize("ref", ["main", "HEAD", "{commit}"])
def test_a_shallow_clone_is_said_to_be_one(origin: Any, workspace: Path, tmp_path: Path, ref: str) -> None:
    shallow = tmp_path / "shallow"
    subprocess.run(["git", "clone", "--quiet", "--depth=1", origin.url, shallow], check=True)
    mirror = Mirror(str(shallow), workspace, timeout=TIMEOUT)
    commit = origin.git("rev-parse", "main")

    with pytest.raises(InvalidInput, match=r"shallow: the repository is a shallow clone.*git fetch --unshallow"):
        mirror.resolve(ref.format(commit=commit))

    assert not mirror.path.exists()
    subprocess.run(["git", "-C", shallow, "fetch", "--quiet", "--unshallow"], check=True)
    assert mirror.resolve(ref.format(commit=commit)) == commit


@pytest.mark.parametrize("ref", ["", "-x", "--upload-pack=x", "a b", "main~1", "a..b", "x^{tree}"])
def test_what_cannot_be_a_ref_is_refused_before_anything_is_fetched(mirror: Mirror, ref: str) -> None:
    with pytest.raises(InvalidInput, match="not a ref"):
        mirror.resolve(ref)

    assert not mirror.path.exists()


def test_a_name_that_is_a_branch_and_another_tag_is_refused(origin: Any, mirror: Mirror) -> None:
    origin.git("branch", "v1.0", "main")

    with pytest.raises(InvalidInput, match=r"refs/heads/v1\.0 or refs/tags/v1\.0"):
        mirror.resolve("v1.0")
    assert mirror.resolve("refs/tags/v1.0") == origin.git("rev-parse", "main~1")
    assert mirror.resolve("refs/heads/v1.0") == origin.git("rev-parse", "main")


def test_an_abbreviation_of_several_commits_is_refused(origin: Any, mirror: Mirror) -> None:
    commits: dict[str, str] = {}
    for number in range(400):
        commit = origin.git("commit-tree", "main^{tree}", "-p", "main", "-m", str(number))
        if commit[:4] in commits:
            break
        commits[commit[:4]] = commit
    else:
        pytest.skip("no two commits began alike")
    origin.git("branch", "one", commits[commit[:4]])
    origin.git("branch", "two", commit)

    with pytest.raises(InvalidInput, match="2 commits begin with these digits"):
        mirror.resolve(commit[:4])
    assert mirror.resolve(commit[:12]) == commit


def test_a_repository_that_is_not_there_leaves_nothing_behind(workspace: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"nothing.*no such repository.*Check its address"):
        Mirror(str(tmp_path / "nothing"), workspace, timeout=TIMEOUT).resolve("main")

    assert list((workspace / "repos").iterdir()) == []


def test_a_fetch_that_cannot_reach_the_repository_is_transient(workspace: Path) -> None:
    with pytest.raises(TransientError, match=r"127\.0\.0\.1"):
        Mirror("http://127.0.0.1:1/Run.git", workspace, timeout=TIMEOUT).resolve("main")


def test_a_damaged_mirror_is_made_again(origin: Any, mirror: Mirror) -> None:
    commit = mirror.resolve("main")
    (mirror.path / "HEAD").unlink()

    assert mirror.resolve("main") == commit


def test_what_a_killed_fetch_left_is_no_obstacle(origin: Any, mirror: Mirror, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirrors, "_LOCK_PATIENCE_SECONDS", 0.2)
    mirror.resolve("main")
    (mirror.path / "packed-refs.lock").write_text("")
    (mirror.path / "refs" / "heads" / "main.lock").write_text("")
    half = mirror.path.with_name(f".{mirror.path.name}.0123.tmp")
    shutil.copytree(mirror.path, half)
    moved = origin.commit("Third", {"README.md": "three\n"})

    assert mirror.resolve("main") == moved
    assert not half.exists()


def test_a_commit_is_described(origin: Any, mirror: Mirror) -> None:
    about = mirror.about(mirror.resolve("main"))

    assert about.subject == "Second"
    assert about.committed_at.isoformat() == "2026-11-20T21:00:00+01:00"
    assert about.describe.startswith("v1.0-1-g")


def test_a_commit_without_a_message_is_described_by_the_rest(origin: Any, mirror: Mirror) -> None:
    origin.git("commit", "--quiet", "--allow-empty", "--allow-empty-message", "--message", "")

    about = mirror.about(mirror.resolve("main"))

    assert about.subject == ""
    assert about.committed_at.isoformat() == "2026-11-20T21:00:00+01:00"


@pytest.mark.parametrize(
    ("author", "shown"),
    [
        ("J\xfcrg <a@b> 1700000000 +0000".encode("latin-1"), "2023-11-14T22:13:20+00:00"),
        (b"A <a@b> 1700000000 +051800", "1970-01-01T00:00:00+00:00"),
        (b"A <a@b> 1700000000 -7200", "1970-01-01T00:00:00+00:00"),
        (b"A <a@b> 99999999999999 +0000", "1970-01-01T00:00:00+00:00"),
        (b"A <a@b>", "1970-01-01T00:00:00+00:00"),
    ],
)
def test_a_commit_in_no_utf_8_and_at_no_time_is_described_and_listed(
    origin: Any, mirror: Mirror, author: bytes, shown: str
) -> None:
    before = mirror.resolve("main")
    commit = origin.odd_commit(author, "Gr\xfc\xdfe\x1b[31m".encode("latin-1"))
    checkout = check_out(mirror, "main", mirror.resolve("main"), mirror.path.parents[1])
    (listed,) = commits_in_range(mirror, before, commit)

    assert (checkout.subject, listed.subject) == ("Gr\ufffd\ufffde [31m",) * 2
    assert checkout.committed_at == listed.authored_at == datetime.fromisoformat(shown)
    assert mirror.commits_between(before, commit) == (f"{commit[:7]} Gr\ufffd\ufffde [31m",)
    assert "\ufffd" in checkout.model_dump_json()
    assert "\ufffd" in listed.model_dump_json()


def test_what_a_user_has_git_say_besides_is_no_part_of_a_commit(
    origin: Any, mirror: Mirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    signature = b"gpgsig -----BEGIN PGP SIGNATURE-----\n \n iQEzBAABCAAdFiEE\n -----END PGP SIGNATURE-----\n"
    origin.odd_commit(b"A <a@b> 1700000000 +0000", "Grüße".encode(), signature)
    settings = (
        "[log]\nshowSignature = true\n[safe]\nbareRepository = explicit\n[i18n]\nlogOutputEncoding = ISO-8859-1\n"
    )
    (tmp_path / "gitconfig").write_text(settings)
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "gitconfig"))

    assert mirror.about(mirror.resolve("main")).subject == "Grüße"


def test_repositories_of_one_name_have_mirrors_of_their_own(workspace: Path) -> None:
    one = Mirror("https://a.example.org/Run.git", workspace, timeout=TIMEOUT)
    two = Mirror("https://b.example.org/Run.git", workspace, timeout=TIMEOUT)

    assert one.path.name.startswith("Run-")
    assert one.path != two.path


def spoil(mirror: Mirror, name: str) -> None:
    """Change the middle of an object's file, as a failing disk does; a pack is taken apart to have such files."""
    for pack in (mirror.path / "objects" / "pack").glob("*.pack"):
        aside = pack.rename(mirror.path / pack.name)
        with aside.open("rb") as stream:
            subprocess.run(["git", "-C", mirror.path, "unpack-objects", "-q"], stdin=stream, check=True)
        aside.unlink()
    identity = subprocess.run(
        ["git", "-C", mirror.path, "rev-parse", name], check=True, capture_output=True, text=True
    ).stdout.strip()
    path = mirror.path / "objects" / identity[:2] / identity[2:]
    path.chmod(0o644)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["main", "main:README.md"])
def test_a_mirror_that_fails_git_fsck_is_made_again(
    origin: Any, mirror: Mirror, workspace: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    commit = mirror.resolve("main")
    assert mirror.damage() == []
    spoil(mirror, name)
    assert mirror.damage() != []

    made = check_out(mirror, "main", mirror.resolve("main"), workspace)

    assert made.commit == commit
    assert (made.path / "README.md").read_text() == "two\n"
    assert mirror.damage() == []
    assert "damaged, mirroring again" in caplog.text


def test_the_commits_between_two_are_listed_and_many_are_counted(origin: Any, mirror: Mirror) -> None:
    first, second = mirror.resolve("v1.0"), mirror.resolve("main")

    assert mirror.commits_between(first, second) == (f"{origin.git('rev-parse', '--short', second)} Second",)
    assert mirror.commits_between(second, second) == mirror.commits_between(second, first) == ()
    assert mirror.commits_between("0" * 40, second) == ()
    for number in range(60):
        origin.git("commit", "--quiet", "--allow-empty", "--message", f"Number {number}")
    listed = mirror.commits_between(second, mirror.resolve("main"))
    assert len(listed) == 50
    assert listed[0].endswith("Number 59")
    assert listed[-1] == "... and 11 more"
