"""Git repositories for practice, in the shapes of Megatron-Bridge, of NeMo-Run, and of Megatron-LM.

Their files lie in `template/`; the history is made of them, with the same commits on every machine. A behaviour is a
file in those that train, so a regression is a commit.
"""

import hashlib
import shlex
import shutil
import uuid
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, ValidationError

from examples.practice.git_writer import Change, add_commits, create, git
from nightbridge.errors import InvalidInput
from nightbridge.files import write_atomically
from nightbridge.models import Model

TEMPLATE = Path(__file__).with_name("template")
BEHAVIOUR_FILE = "src/megatron/bridge/behaviour.yaml"

Workload = Literal["bridge", "megatron_lm"]
"""The repositories that train."""

_BEHAVIOUR_FILES: dict[Workload, str] = {
    "bridge": BEHAVIOUR_FILE,
    "megatron_lm": "examples/mimo/behaviour.yaml",
}

SUBMODULE = "3rdparty/Megatron-LM"
"""Where `add_submodule` puts the Megatron-LM-shaped repository into the bridge."""

_SHARED = ("behaviour.py", "faults.py", "language_model.py", "measurements.py", "ranks.py", "torch_files.py")
"""Modules of the bridge's training that the Megatron-LM-shaped repository has as well."""

_VERSION_FILE = "src/megatron/bridge/package_info.py"
_RUN_VERSION_FILE = "src/nemo_run_practice/__init__.py"
_BEGINNING = datetime(2026, 1, 5, 12, tzinfo=UTC)
_DAY = timedelta(days=1)
_COFFEE = timedelta(minutes=12)


class Behaviour(Model):
    """What a commit makes the job do; every field is a key of `behaviour.yaml`, and numbers `*_at` are iterations."""

    step_time_factor: float = Field(1.0, gt=0, description="Multiplies the declared step time.")
    memory_factor: float = Field(1.0, gt=0, description="Multiplies the declared memory.")
    loss_offset: float = Field(0.0, description="Is added to the reported loss.")
    lr_factor: float = Field(1.0, ge=0, description="Multiplies the learning rate that is really used.")
    checkpoint_layout: Literal["0.18", "0.19"] = Field(
        "0.19", description="Megatron-Core version whose layout is written: up to 0.18 with common.pt."
    )
    nan_at: int | None = Field(None, ge=1, description="The first iteration whose loss is NaN; training continues.")
    hang_at: int | None = Field(None, ge=1, description="All ranks sleep for ever before this iteration.")
    crash_at: int | None = Field(None, ge=1, description="All ranks exit with 1 before this iteration.")
    crash_share: float = Field(0.0, ge=0, le=1, description="In so many runs a rank exits with 1 at its start.")
    stop_at: int | None = Field(None, ge=1, description="Training ends after this iteration, with exit code 0.")
    partial_checkpoint: int | None = Field(
        None, ge=1, description="The first save from this iteration on dies in its middle: no .metadata, exit code 1."
    )
    print_flaky: int | None = Field(
        None, ge=1, description="Before this iteration the job prints what a broken network prints, and exits with 1."
    )
    crash_in_teardown: bool = Field(False, description="Exits with 1 after everything is done and saved.")
    slow_wall: float = Field(0.0, ge=0, description="Seconds that each iteration really sleeps.")


class PracticeCommit(Model):
    """One commit of the history that the repositories begin with."""

    repository: Literal["bridge", "run", "megatron_lm"]
    name: str = Field(description="Its tag, or `main` for the commit that the branch begins at.")
    sha: str


class PracticeRepositories(Model):
    """The repositories; their URLs are absolute paths, which git takes as such."""

    bridge_url: str
    run_url: str
    megatron_lm_url: str
    commits: tuple[PracticeCommit, ...]

    def folder(self, workload: Workload) -> Path:
        """The bare repository of a workload."""
        return Path({"bridge": self.bridge_url, "megatron_lm": self.megatron_lm_url}[workload])

    def sha(self, name: str, repository: Literal["bridge", "run", "megatron_lm"] = "bridge") -> str:
        """The commit that a tag, or `main` at the beginning, stands for.

        Raises:
            InvalidInput: There is no such commit.

        """
        for commit in self.commits:
            if (commit.repository, commit.name) == (repository, name):
                return commit.sha
        raise InvalidInput("no such practice commit", subject=f"{repository} {name}")


def make_practice_repositories(folder: Path) -> PracticeRepositories:
    """Make `Megatron-Bridge.git`, `Run.git` and `Megatron-LM.git` below `folder`, unless they are there.

    What is there keeps its later commits and its branch; repositories of another version of the template are made
    again. Each appears whole or not at all.

    Raises:
        InvalidInput: Something else stands in their place.
        PermanentError: git is not installed, or it failed.

    """
    bridge = _make(folder.absolute() / "Megatron-Bridge.git", _bridge_history())
    run = _make(folder.absolute() / "Run.git", _run_history())
    megatron_lm = _make(folder.absolute() / "Megatron-LM.git", _megatron_lm_history())
    commits = (*_commits(bridge, "bridge"), *_commits(run, "run"), *_commits(megatron_lm, "megatron_lm"))
    return PracticeRepositories(
        bridge_url=str(bridge), run_url=str(run), megatron_lm_url=str(megatron_lm), commits=commits
    )


def install_torchrun(folder: Path, python: Path) -> Path:
    """Write `bin/torchrun` below `folder`, which stands in for the real one where a job has no container.

    Args:
        folder: Where the practice repositories are.
        python: The interpreter of the ranks; it needs numpy, PyYAML and TensorBoard, as the launcher's has them.

    """
    path = folder.absolute() / "bin" / "torchrun"
    words = [str(python), str(Path(__file__).with_name("torchrun.py"))]
    write_atomically(path, f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n'.encode())
    path.chmod(0o755)
    return path


def commit_behaviour(
    repositories: PracticeRepositories, message: str, *, workload: Workload = "bridge", **behaviour: Any
) -> str:
    """Add a commit to `main` of a workload whose behaviour differs from the one before it in these fields.

    Args:
        repositories: The practice repositories.
        message: The commit's message.
        workload: Which repository.
        behaviour: Fields of `Behaviour`; those that are not named stay as they are on `main`.

    Returns:
        The full commit. It is the same for the same parent, message and behaviour.

    Raises:
        InvalidInput: There is no such behaviour, or a value is out of its range.

    """
    repository, file = repositories.folder(workload), _BEHAVIOUR_FILES[workload]
    present = yaml.safe_load(git(repository, "show", f"main:{file}"))
    try:
        wanted = Behaviour.model_validate(present | behaviour)
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}" for problem in error.errors()]
        raise InvalidInput("no such behaviour", subject=message, violations=problems) from error
    change = Change(message=message, made_at=_made_at(repository) + _DAY, files={file: _behaviour_text(wanted)})
    add_commits(repository, [change])
    return git(repository, "rev-parse", "main")


def commit_nemo_run(
    repositories: PracticeRepositories, messages: Sequence[str], changed: Mapping[int, Mapping[str, str]]
) -> tuple[str, ...]:
    """Add commits to `main` of the practice NeMo-Run; what some of them change is what it gives every job.

    Args:
        repositories: The practice repositories.
        messages: One for each commit, oldest first. A commit that changes no variable changes a note.
        changed: Environment variables of jobs from the commits with these places (from 0) on.

    Returns:
        The full commits, oldest first.

    """
    repository = Path(repositories.run_url)
    tip, began = git(repository, "rev-parse", "main"), _made_at(repository)
    version = git(repository, "show", f"main:{_RUN_VERSION_FILE}")
    changes = []
    for place, message in enumerate(messages):
        given = f"{version}\nVARIABLES = {dict(changed.get(place, {}))!r}\n"
        files = {_RUN_VERSION_FILE: given} if place in changed else {"NOTES.md": f"{message}\n"}
        encoded = {name: text.encode() for name, text in files.items()}
        changes.append(Change(message=message, made_at=began + (place + 1) * _COFFEE, files=encoded))
    add_commits(repository, changes)
    return tuple(git(repository, "rev-list", "--reverse", f"{tip}..main").split())


def add_submodule(repositories: PracticeRepositories) -> str:
    """Let the bridge train on the Megatron-LM-shaped repository as its submodule, from a commit of `main` on.

    From then on the submodule's behaviour counts beside the bridge's, and PRACTICE_STEP_TIME_FACTOR in the environment.

    Returns:
        The full commit of the bridge, which pins the submodule's `main`.

    """
    declared = (
        f'[submodule "{SUBMODULE}"]\n\tpath = {SUBMODULE}\n\turl = ../{Path(repositories.megatron_lm_url).name}\n'
    )
    pinned = git(Path(repositories.megatron_lm_url), "rev-parse", "main")
    files = _template("bridge_on_core") | {".gitmodules": declared.encode()}
    return _commit_to_bridge(repositories, "Train on the core", files, pinned)


def bump_submodule(repositories: PracticeRepositories, message: str, commit: str, **behaviour: Any) -> str:
    """Add a commit to `main` of the bridge that moves the submodule, and changes fields of `Behaviour`, if any.

    Args:
        repositories: The practice repositories, after `add_submodule`.
        message: The commit's message.
        commit: Full commit of the submodule.
        behaviour: What the commit of the bridge does besides.

    Returns:
        The full commit of the bridge.

    """
    own = Behaviour.model_validate(read_behaviour(repositories).model_dump() | behaviour)
    files = {BEHAVIOUR_FILE: _behaviour_text(own)} if behaviour else {}
    return _commit_to_bridge(repositories, message, files, commit)


def _commit_to_bridge(repositories: PracticeRepositories, message: str, files: Mapping[str, bytes], pinned: str) -> str:
    bridge = repositories.folder("bridge")
    made_at = _made_at(bridge) + _COFFEE
    change = Change(message=message, made_at=made_at, files=dict(files), submodules={SUBMODULE: pinned})
    add_commits(bridge, [change])
    return git(bridge, "rev-parse", "main")


def _made_at(repository: Path) -> datetime:
    """When the last commit of `main` was made."""
    return datetime.fromtimestamp(int(git(repository, "show", "--no-patch", "--format=%ct", "main")), UTC)


def commit_many(
    repositories: PracticeRepositories,
    messages: Sequence[str],
    changed: Mapping[int, Mapping[str, Any]],
    workload: Workload = "bridge",
) -> tuple[str, ...]:
    """Add many commits to `main` of a workload at once, as a busy day does.

    Args:
        repositories: The practice repositories.
        messages: One for each commit, oldest first. A commit that changes no behaviour changes a note.
        changed: Fields of `Behaviour` that the commits with these places (from 0) change, for those after them, too.
        workload: Which repository.

    Returns:
        The full commits, oldest first.

    Raises:
        InvalidInput: There is no such behaviour, or a value is out of its range.

    """
    repository = repositories.folder(workload)
    tip = git(repository, "rev-parse", "main")
    behaviour = read_behaviour(repositories, workload=workload)
    parent_time = _made_at(repository)
    changes = []
    for place, message in enumerate(messages):
        if place in changed:
            behaviour = Behaviour.model_validate(behaviour.model_dump() | dict(changed[place]))
            files = {_BEHAVIOUR_FILES[workload]: _behaviour_text(behaviour)}
        else:
            files = {"NOTES.md": f"{message}\n".encode()}
        changes.append(Change(message=message, made_at=parent_time + (place + 1) * _COFFEE, files=files))
    add_commits(repository, changes)
    return tuple(git(repository, "rev-list", "--reverse", f"{tip}..main").split())


def read_behaviour(
    repositories: PracticeRepositories, commit: str = "main", workload: Workload = "bridge"
) -> Behaviour:
    """What a commit of a workload makes the job do."""
    text = git(repositories.folder(workload), "show", f"{commit}:{_BEHAVIOUR_FILES[workload]}")
    return Behaviour.model_validate(yaml.safe_load(text))


def move_main(repositories: PracticeRepositories, commit: str, workload: Workload = "bridge") -> None:
    """Let a workload's branch `main` name another commit, as if that were what was pushed last.

    Raises:
        PermanentError: The repository has no such commit.

    """
    repository = repositories.folder(workload)
    git(repository, "update-ref", "refs/heads/main", git(repository, "rev-parse", "--verify", f"{commit}^{{commit}}"))


# --- how they begin --------------------------------------------------------------------------------------------------


def _bridge_history() -> list[Change]:
    files = _template("bridge")
    newest = files[_VERSION_FILE]
    older = {
        _VERSION_FILE: newest.replace(b"0.6.0", b"0.5.0"),
        BEHAVIOUR_FILE: files[BEHAVIOUR_FILE].replace(b'checkpoint_layout: "0.19"', b'checkpoint_layout: "0.18"'),
        "README.md": files["README.md"].split(b"\n\n")[0] + b"\n",
    }
    return [
        Change(message="Train something small", made_at=_BEGINNING, files=files | older, tag="v0.5.0"),
        Change(
            message="Keep the common state in the shards\n\nA checkpoint has no common.pt any more.",
            made_at=_BEGINNING + 28 * _DAY,
            files={BEHAVIOUR_FILE: files[BEHAVIOUR_FILE], _VERSION_FILE: newest},
            tag="v0.6.0",
        ),
        Change(
            message="Say what is computed and what is declared",
            made_at=_BEGINNING + 30 * _DAY,
            files={"README.md": files["README.md"]},
        ),
    ]


def _run_history() -> list[Change]:
    files = _template("run")
    newest = files[_RUN_VERSION_FILE]
    return [
        Change(
            message="Build on the released NeMo-Run",
            made_at=_BEGINNING,
            files=files | {_RUN_VERSION_FILE: newest.replace(b"0.11.1", b"0.11.1a1")},
            tag="v0.11.1a1",
        ),
        Change(
            message="Release",
            made_at=_BEGINNING + 7 * _DAY,
            files={_RUN_VERSION_FILE: newest},
            tag="v0.11.1",
        ),
    ]


def _megatron_lm_history() -> list[Change]:
    file = _BEHAVIOUR_FILES["megatron_lm"]
    training = TEMPLATE / "bridge/src/megatron/bridge/training"
    shared = {f"examples/mimo/training/{name}": (training / name).read_bytes() for name in _SHARED}
    files = _template("megatron_lm") | shared | {file: (TEMPLATE / "bridge" / BEHAVIOUR_FILE).read_bytes()}
    older = {file: files[file].replace(b'checkpoint_layout: "0.19"', b'checkpoint_layout: "0.18"')}
    return [
        Change(message="Train on two grids", made_at=_BEGINNING, files=files | older, tag="core_v0.18.0"),
        Change(
            message="Keep the common state in the shards",
            made_at=_BEGINNING + 28 * _DAY,
            files={file: files[file]},
            tag="core_v0.19.0",
        ),
    ]


def _template(name: str) -> dict[str, bytes]:
    """Path to content of a template's files, without what running them may have left."""
    root = TEMPLATE / name
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }


def _make(repository: Path, history: list[Change]) -> Path:
    edition = hashlib.sha256(repr(history).encode()).hexdigest()
    present = _edition(repository)
    if present == edition:
        return repository
    if present is None and repository.exists():
        raise InvalidInput("is there already, and is no practice repository", subject=str(repository))
    temporary = repository.with_name(f".{repository.name}.{uuid.uuid4().hex}.tmp")
    settings = {
        "practice.edition": edition,
        "gc.auto": "0",  # commits that no branch names any more stay: `main` may move back to them
        "uploadpack.allowAnySHA1InWant": "true",  # as on GitHub
        "uploadpack.allowFilter": "true",
    }
    try:
        create(temporary, settings)
        add_commits(temporary, history)
        git(temporary, "config", "practice.main", git(temporary, "rev-parse", "main"))
        if repository.exists():
            shutil.rmtree(repository)
        temporary.rename(repository)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return repository


def _edition(repository: Path) -> str | None:
    if not (repository / "config").is_file():
        return None
    return git(repository, "config", "--default=", "--get", "practice.edition") or None


def _commits(repository: Path, name: Literal["bridge", "run", "megatron_lm"]) -> list[PracticeCommit]:
    lines = git(repository, "for-each-ref", "--format=%(refname:short) %(*objectname)", "refs/tags").splitlines()
    tags = [PracticeCommit(repository=name, name=tag, sha=sha) for tag, sha in map(str.split, lines)]
    return [*tags, PracticeCommit(repository=name, name="main", sha=git(repository, "config", "practice.main"))]


def _behaviour_text(behaviour: Behaviour) -> bytes:
    return (
        b"# What this commit does differently.\n\n" + yaml.safe_dump(behaviour.model_dump(), sort_keys=False).encode()
    )
