"""What exactly one job left on disk, as one model.

Everything is found from the job's own folder, never from "the newest" one: titles repeat every night. Nothing that is
missing is an error; it is an empty field. Links that lead out of the run's folders are not followed, since they would
carry foreign files into the store.

What the job itself says about the machines and the image that it ran with (driver, CUDA, NCCL, the image's release) is
read from these sources, in the order in which they count:

* `env_<job id>.log`, which the launcher's `--dump_env` writes. Images of NVIDIA's registry name their parts in
  environment variables. Only the names in `VARIABLES` are looked at: an environment holds secrets.
* The ranks' and the batch script's logs: NCCL's own line, the banner and the notes of those images, `nvidia-smi`.
* `repo_status.json`: the commits of the repositories that lie in the image.
"""

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from nightbridge.errors import InvalidInput
from nightbridge.files import open_regular, unless_away, walk
from nightbridge.launch.config_container import ConfigContainer, read_container
from nightbridge.models import Checkpoint, Job, Model
from nightbridge.outputs.checkpoints import LOADER_STATES, TRACKERS, find_checkpoints

ATTEMPT_FILES = (
    "attempt.json",
    "intent.json",
    "job.sh",
    "submission.json",
    "claim",
    "cancellation.json",
    "exit_code",
    "refusal.json",
    "launcher.log",
)
"""The files of an attempt's folder that document it, in the order in which they are written."""

_CODE_FOLDERS = frozenset(("code", ".git"))
"""The job folder holds an unpacked archive of the launcher's repository, which may contain logs and event files."""
_CHECKPOINT = re.compile(r"iter_\d{7,}")
_EVENT_FILE = "tfevents"
_LOG_SUFFIX = ".out"
EVENT_FOLDER = "tb_logs"
"""The folder of the event files, below the job's folder or a run's own output folder (`launch/launch_plan.py`)."""
_PROFILE_FOLDERS = frozenset(("nsys_profile", "pytorch_profile", "torch_profile", "chakra"))
"""nsys writes into the first; PyTorch's profiler beside the event files, its memory snapshots into the second."""
_PROFILES = ("snapshot*.pickle", "*.pt.trace.json*")
"""Memory snapshots, one for each rank; and PyTorch's traces, which before v0.4 lie among the event files."""
_LAUNCHER_FILES = ("*.tar.gz", "scripts/*", "configs/*_executor.yaml", "configs/*_config.yaml", "env_*.log", "train.sh")
"""What NeMo-Run itself writes into the job's folder. It names secrets in clear text, so it is never stored. The last is
the script of a test without NeMo-Run, which is stored as the attempt's `job.sh`."""


class NotStored(NamedTuple):
    """Something that the job left and that is not stored, printable, and the reason."""

    path: str
    reason: str


class RunOutput(Model):
    """What a job left. Every path is absolute or below the folders that the job's models name."""

    job_dir: Path
    attempt_dir: Path
    output_dir: Path | None = None
    logs: tuple[Path, ...] = ()
    """The ranks' text, one file per restart, oldest first."""
    sbatch_logs: tuple[Path, ...] = ()
    launcher_log: Path | None = None
    event_files: tuple[Path, ...] = ()
    config_container: Path | None = None
    """`ConfigContainer.yaml`, the run's effective configuration."""
    repo_status: Path | None = None
    """`repo_status.json`, the commits inside the image."""
    checkpoints: tuple[Checkpoint, ...] = ()
    profiles: tuple[Path, ...] = ()
    attempt_files: tuple[Path, ...] = ()
    not_stored: tuple[NotStored, ...] = ()
    """Links out of the tree, and products that no rule knows, with their bytes."""


def read_run(job: Job, output_dir: Path | None, checkpoint_dir: Path | None = None) -> RunOutput:
    """Find everything that exactly this job left.

    Args:
        job: The job; `experiment_dir` is its folder, `attempt_dir` the attempt's.
        output_dir: The host folder that a run without a container wrote `tb_logs/`, `configs/`, `checkpoints/` to;
            None in a container, where the job folder holds them.
        checkpoint_dir: The attempt's own part of a `save_dir` that the test names; None when it names none.
    """
    tree = _Tree(job.experiment_dir, output_dir, checkpoint_dir)
    output = _sorted_files(tree, job, output_dir)
    bridge_dir = _saved_by_bridge(tree.save_dirs, dumped_container(output.config_container))
    return output.model_copy(
        update={
            "checkpoints": tuple(found for folder in tree.save_dirs for found in find_checkpoints(folder, bridge_dir)),
            "not_stored": (*tree.not_stored, *_unknown_products(tree, output)),
        }
    )


def read_files(job: Job, output_dir: Path | None, checkpoint_dir: Path | None = None) -> RunOutput:
    """As `read_run`, but for the checkpoints, whose judgement takes the most time, and for what is not stored."""
    return _sorted_files(_Tree(job.experiment_dir, output_dir, checkpoint_dir), job, output_dir)


def dumped_container(path: Path | None) -> ConfigContainer | None:
    """What a run dumped; None where that is no ConfigContainer."""
    try:
        return None if path is None else read_container(path)
    except InvalidInput:
        return None


def _saved_by_bridge(save_dirs: Iterable[Path], container: ConfigContainer | None) -> Path | None:
    """The folder that Megatron-Bridge saved its checkpoints into; None where nothing says which one that is.

    It is known by its name: the container's path of it is not the host's. Of several with that name, one may hold what
    the job converted for Megatron-LM.
    """
    if container is None or not str(container.value("_target_")).startswith("megatron.bridge."):
        return None
    name = PurePosixPath(str(container.value("checkpoint.save"))).name
    named = [folder for folder in save_dirs if folder.name == name]
    return named[0] if len(named) == 1 else None


def _sorted_files(tree: "_Tree", job: Job, output_dir: Path | None) -> RunOutput:
    files = tree.files
    attempt_files = [job.attempt_dir / name for name in ATTEMPT_FILES]
    launcher_log = job.attempt_dir / "launcher.log"
    return RunOutput(
        job_dir=job.experiment_dir,
        attempt_dir=job.attempt_dir,
        output_dir=output_dir,
        logs=_logs(files, job, _RANK_LOG),
        sbatch_logs=_logs(files, job, _BATCH_LOG),
        launcher_log=launcher_log if _is_own_file(launcher_log) else None,
        event_files=tuple(path for path in files if _EVENT_FILE in path.name),
        config_container=_first_named(files, "ConfigContainer.yaml"),
        repo_status=_first_named(files, "repo_status.json"),
        profiles=tuple(path for path in files if _is_profile(path, job)),
        attempt_files=tuple(path for path in attempt_files if _is_own_file(path)),
    )


def _unknown_products(tree: "_Tree", output: RunOutput) -> Iterator[NotStored]:
    """One for each entry of the run's and the checkpoints' folders that is, or holds, files that no rule knows.

    That are those which are neither stored, nor part of a checkpoint, nor the launcher's own.
    """
    known = {*output.logs, *output.sbatch_logs, *output.event_files, *output.profiles, *output.attempt_files}
    known |= {path for path in (output.config_container, output.repo_status) if path is not None}
    known |= {folder / name for folder in tree.save_dirs for name in TRACKERS}
    folders = (*tree.folders, *tree.save_dirs)
    found: dict[Path, list[int]] = {}
    for path in tree.files:
        inside = path.relative_to(output.job_dir).as_posix() if path.is_relative_to(output.job_dir) else ""
        if path in known or any(fnmatchcase(inside, pattern) for pattern in _LAUNCHER_FILES):
            continue
        root = max((each for each in folders if path.is_relative_to(each)), key=lambda each: len(each.parts))
        found.setdefault(root / path.relative_to(root).parts[0], []).append(_bytes_of(path))
    for entry, sizes in found.items():
        files = f"{len(sizes)} file{'s' * (len(sizes) != 1)}, {sum(sizes)} bytes"
        yield NotStored(_printable(entry), f"no rule stores it ({files})")


def _bytes_of(path: Path) -> int:
    """Bytes of a file that was listed; 0 where it has been deleted since."""
    try:
        return path.lstat().st_size
    except OSError:
        return 0


def _printable(path: Path) -> str:
    text = os.fsencode(path).decode(errors="backslashreplace")
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


class _Tree:
    """Walks over the run's folders: its regular files, its checkpoint folders, and what it did not follow."""

    def __init__(self, *folders: Path | None) -> None:
        self.folders = [folder for folder in folders if folder is not None]
        self._roots = [root.resolve() for root in self.folders if not root.is_symlink()]
        self._seen: set[Path] = set()
        self.files: list[Path] = []
        self.save_dirs: list[Path] = []
        self.not_stored: list[NotStored] = []
        for folder in self.folders:
            self._walk(folder)

    def _walk(self, folder: Path) -> None:
        if folder.is_symlink():
            self._note_link(folder)
            return
        for parent, folders, names in walk(folder, self._note_error):
            if parent.resolve() in self._seen:
                folders.clear()
                continue
            self._seen.add(parent.resolve())
            if parent.name != LOADER_STATES and any(_CHECKPOINT.fullmatch(name) for name in folders):
                self.save_dirs.append(parent)
            for name in sorted(folders):
                if (parent / name).is_symlink():
                    self._note_link(parent / name)
            folders[:] = sorted(
                name
                for name in folders
                if name not in _CODE_FOLDERS and not _CHECKPOINT.fullmatch(name) and self._has_name(parent / name)
            )
            self.files += [path for name in sorted(names) if self._is_ours(path := parent / name)]

    def _note(self, path: Path, reason: str) -> None:
        self.not_stored.append(NotStored(_printable(path), reason))

    def _is_ours(self, path: Path) -> bool:
        if path.is_symlink():
            # What it links to inside the run's folders is found there under its own name.
            self._note_link(path)
            return False
        if not self._has_name(path):
            return False
        if path.is_file():
            return True
        # A FIFO among the evidence is damage of it, as its reader says.
        if _EVENT_FILE in path.name or path.suffix == _LOG_SUFFIX:
            return os.path.lexists(path)
        self._note(path, "it is not a regular file")
        return False

    def _has_name(self, path: Path) -> bool:
        """Whether its name can be shown: escape codes drive terminals, and what turns the writing deceives readers."""
        if path.name.isprintable():
            return True
        not_utf8 = any("\udc80" <= letter <= "\udcff" for letter in path.name)
        self._note(path, "its name is not UTF-8" if not_utf8 else "its name has characters that cannot be shown")
        return False

    def _note_link(self, path: Path) -> None:
        # Of a link that leads to itself `Path.resolve` makes an exception.
        target = Path(os.path.realpath(path))
        if not any(target.is_relative_to(root) for root in self._roots):
            self._note(path, "a link to outside the run's folder was not followed")

    def _note_error(self, error: OSError) -> None:
        unless_away(error)
        if not isinstance(error, FileNotFoundError):
            self._note(Path(error.filename), f"cannot be read: {error.strerror}")


def _is_own_file(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()


# How NeMo-Run names its logs: by the job, and the ranks' by how often it was restarted before.
_RANK_LOG = re.compile(r"log.*?(?:_(\d+)_(\d+))?\.out", re.DOTALL)  # log-acct.title_4711_1.out
_BATCH_LOG = re.compile(r"sbatch_.*?(?:_(\d+))?\.out", re.DOTALL)  # sbatch_acct.title_4711.out


def _logs(files: list[Path], job: Job, kind: re.Pattern[str]) -> tuple[Path, ...]:
    """The job folder's logs of one kind, oldest first: those with the job's id, else those that name no job."""
    found: list[tuple[list[int], str, Path]] = []
    for path in files:
        if path.parent == job.experiment_dir and (match := kind.fullmatch(path.name)):
            found.append(([int(number) for number in match.groups() if number], path.name, path))
    own = [log for log in found if log[0][:1] == [job.job_id]] or [log for log in found if not log[0]]
    return tuple(path for _, _, path in sorted(own))


def logs_so_far(job: Job) -> tuple[Path, ...]:
    """The logs that a running job has begun: the batch script's output, then the ranks' text, oldest first.

    Looks at the job's own folder alone, so that it can be called repeatedly.
    """
    try:
        files = [Path(entry.path) for entry in os.scandir(job.experiment_dir) if entry.is_file(follow_symlinks=False)]
    except FileNotFoundError:
        return ()
    return (*_logs(files, job, _BATCH_LOG), *_logs(files, job, _RANK_LOG))


def _first_named(files: list[Path], name: str) -> Path | None:
    """The file of that name, the one in a `configs` folder before others."""
    found = [path for path in files if path.name == name]
    return min(found, key=lambda path: (path.parent.name != "configs", len(path.parts)), default=None)


def _is_profile(path: Path, job: Job) -> bool:
    folders = path.parts[len(job.attempt_dir.parts) : -1]
    return any(map(path.match, _PROFILES)) or not _PROFILE_FOLDERS.isdisjoint(folders)


# --- the environment of the job -------------------------------------------------------------------------------------

VARIABLES: Mapping[str, str] = {
    "CUDA_VERSION": "CUDA",
    "CUDA_DRIVER_VERSION": "driver that CUDA brings",
    "NCCL_VERSION": "NCCL",
    "CUDNN_VERSION": "cuDNN",
    "NVIDIA_PYTORCH_VERSION": "image release",
    "PYTORCH_VERSION": "PyTorch",
    "TRANSFORMER_ENGINE_VERSION": "Transformer Engine",
}

_VERSION = r"(\d{1,9}(?:\.\d{1,9}){1,5}\w{0,20})"
LINES: tuple[tuple[re.Pattern[str], tuple[str, ...]], ...] = (
    (re.compile(rf"\bkernel driver version {_VERSION}"), ("driver",)),
    (re.compile(rf"\bDriver Version: {_VERSION}\s{{1,40}}CUDA Version: {_VERSION}"), ("driver", "CUDA of the driver")),
    (re.compile(rf"\bNCCL version {_VERSION}(?:\+cuda{_VERSION})?"), ("NCCL", "CUDA of NCCL")),
    (re.compile(r"\bNVIDIA Release (\d\d\.\d\d\S*)"), ("image release",)),
    (re.compile(r"\bPyTorch Version (\d\S*)"), ("PyTorch",)),
    (re.compile(r"\| +\d+ +NVIDIA ([\w -]+?) +(?:On|Off|N/A) +\|"), ("GPU",)),
)
"""Texts of a log, and the names of the facts that their groups hold."""

_COMMIT = re.compile(r"[0-9a-f]{7,64}")
_MAX_BYTES = 1 << 22
"""Of a log: all of it is logged before the first step."""
_MAX_LETTERS = 80


def read_facts(output: RunOutput, job: Job, pinned: Iterable[str] = ()) -> dict[str, str]:
    """The facts of one job by name; those that nothing says are left out.

    A repository at one of the commits that the run was `pinned` to is no news of the image.
    """
    found: dict[str, str] = {}
    sources = (
        _of_environment(output.job_dir / f"env_{job.job_id}.log"),
        *(_of_log(path) for path in (*output.logs, *output.sbatch_logs)),
        _of_repositories(output.repo_status, frozenset(pinned)),
    )
    for name, value in (fact for source in sources for fact in source):
        found.setdefault(name, value[:_MAX_LETTERS])
    return dict(sorted(found.items()))


def _of_environment(path: Path) -> Iterator[tuple[str, str]]:
    for line in _head(path).splitlines():
        name, _, value = line.partition("=")
        if name in VARIABLES and value:
            yield VARIABLES[name], value


def _of_log(path: Path) -> Iterator[tuple[str, str]]:
    text = _head(path)
    for pattern, names in LINES:
        if match := pattern.search(text):
            yield from ((name, value) for name, value in zip(names, match.groups(), strict=True) if value)


def _of_repositories(path: Path | None, pinned: frozenset[str]) -> Iterator[tuple[str, str]]:
    """Name and commit of each repository in the image. What is no such file says nothing."""
    try:
        listed = json.loads(_head(path)) if path else []
    except (ValueError, RecursionError):
        return
    for entry in listed if isinstance(listed, list) else ():
        name, commit = (str(entry.get(key, "")) for key in ("name", "sha")) if isinstance(entry, dict) else ("", "")
        if _COMMIT.fullmatch(commit) and name.isprintable() and commit not in pinned:
            yield f"{name or 'repository'} in the image", commit[:12]


def _head(path: Path) -> str:
    try:
        with open_regular(path) as stream:
            return stream.read(_MAX_BYTES).decode(errors="replace")
    except OSError:
        return ""
