"""Real git repositories: what all tests begin with is made once, and copied for each."""

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

# A commit would start `git maintenance`, which has nothing to do here.
SETTINGS = ("-c", "protocol.file.allow=always", "-c", "maintenance.auto=false")


class Origin:
    """A git repository that somebody pushes to; it is made where there is none."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.exists():
            path.mkdir(parents=True)
            self.git("init", "--quiet", "--initial-branch=main")

    @property
    def url(self) -> str:
        return f"file://{self.path}"

    def git(self, *arguments: str) -> str:
        variables = {
            **os.environ,
            "GIT_AUTHOR_NAME": "Author",
            "GIT_AUTHOR_EMAIL": "author@example.org",
            "GIT_COMMITTER_NAME": "Author",
            "GIT_COMMITTER_EMAIL": "author@example.org",
            "GIT_AUTHOR_DATE": "2026-11-20T21:00:00+01:00",
            "GIT_COMMITTER_DATE": "2026-11-20T21:00:00+01:00",
        }
        finished = subprocess.run(
            ["git", "-C", str(self.path), *SETTINGS, *arguments],
            env=variables,
            check=True,
            capture_output=True,
            text=True,
        )
        return finished.stdout.strip()

    def beside(self, name: str) -> "Origin":
        """Another one in the same folder."""
        return Origin(self.path.parent / name)

    def copied(self, folder: Path) -> "Origin":
        """The same with all that lie beside it, in another folder."""
        return Origin(shutil.copytree(self.path.parent, folder, dirs_exist_ok=True) / self.path.name)

    def commit(self, message: str, files: dict[str, str]) -> str:
        """Write files and commit them; return the full commit."""
        for name, content in files.items():
            path = self.path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
        self.git("add", "--all")
        self.git("commit", "--quiet", "--allow-empty", "--message", message)
        return self.git("rev-parse", "HEAD")

    def odd_commit(self, author: bytes, message: bytes, headers: bytes = b"") -> str:
        """A further commit of `main` as any other program may have written it; its tree is that of the one before."""
        tree, parent = self.git("rev-parse", "HEAD^{tree}"), self.git("rev-parse", "HEAD")
        begin = f"tree {tree}\nparent {parent}\n".encode()
        file = self.path.parent / "odd-commit"
        file.write_bytes(begin + b"author " + author + b"\ncommitter " + author + b"\n" + headers + b"\n" + message)
        commit = self.git("hash-object", "-t", "commit", "-w", "--literally", str(file))
        self.git("update-ref", "refs/heads/main", commit)
        return commit


@pytest.fixture(scope="session")
def first_origin(tmp_path_factory: pytest.TempPathFactory) -> Origin:
    """What `origin` is a copy of, in a folder that every user may read."""
    made = Origin(tmp_path_factory.mktemp("origin") / "of" / "Megatron-Bridge")
    made.commit("First", {"README.md": "one\n", "scripts/run.sh": "echo one\n"})
    (made.path / "scripts" / "run.sh").chmod(0o755)
    made.git("update-index", "--chmod=+x", "scripts/run.sh")
    made.git("commit", "--quiet", "--amend", "--no-edit")
    made.git("tag", "--annotate", "v1.0", "--message", "one")
    made.commit("Second", {"README.md": "two\n"})
    return made


@pytest.fixture
def origin(first_origin: Origin, tmp_path: Path) -> Origin:
    """A repository with two commits on `main` and the tag `v1.0` on the first."""
    return first_origin.copied(tmp_path / "origin")


@pytest.fixture
def make_origin(tmp_path: Path) -> Callable[[str], Origin]:
    """Make further repositories by name."""
    return lambda name: Origin(tmp_path / "origin" / name)


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    return tmp_path / "workspace"
