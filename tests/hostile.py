"""Hostile output of a job: the corpus in `data/hostile`, and what git cannot keep: FIFOs, links, sparse files."""

import contextlib
import os
import socket
from collections.abc import Callable
from pathlib import Path

from nightbridge.models import Job

CORPUS = Path(__file__).parent / "data" / "hostile"
EVENTS = "tb_logs/events.out.tfevents.1750000000.node2.1.0"
TRACKER = "checkpoints/latest_checkpointed_iteration.txt"
CHECKPOINT = "checkpoints/iter_0000010"
PLACES = {
    "event_file": EVENTS,
    "metadata": f"{CHECKPOINT}/.metadata",
    "metadata_json": f"{CHECKPOINT}/metadata.json",
    "run_config": f"{CHECKPOINT}/run_config.yaml",
    "tracker": TRACKER,
    "config_container": "configs/ConfigContainer.yaml",
    "repo_status": "configs/repo_status.json",
}
"""Where a kind of file lies below the job's folder. Logs are appended to the job's own; a number is claim and exit code."""


def corpus(*kinds: str) -> list[str]:
    """The names of the files, `kind/name`, of all kinds or of these."""
    found = (path.relative_to(CORPUS) for path in CORPUS.glob("*/*"))
    return sorted(str(path) for path in found if not kinds or path.parent.name in kinds)


def path_of(kind: str, job: Job) -> Path:
    """Where a kind of file lies in a run."""
    if kind == "log":
        return next(job.experiment_dir.glob("log-*.out"))
    if kind == "environment":
        return job.experiment_dir / f"env_{job.job_id}.log"
    return job.attempt_dir / "exit_code" if kind == "number" else job.experiment_dir / PLACES[kind]


def plant(name: str, job: Job) -> None:
    """Put a file of the corpus, `kind/name`, where a run has such a file, or one of `MADE`."""
    kind, _, _ = name.partition("/")
    path = path_of(kind, job)
    path.parent.mkdir(parents=True, exist_ok=True)
    if name in MADE:
        path.unlink(missing_ok=True)
        MADE[name](path)
    elif kind == "log":
        with path.open("ab") as stream:
            stream.write((CORPUS / name).read_bytes())
    else:
        path.write_bytes((CORPUS / name).read_bytes())


def _sparse(path: Path) -> None:
    """A record of 2 GiB of zeros with a right header, in a file that takes no space."""
    path.write_bytes((CORPUS / "event_file/record_of_2_gib").read_bytes()[:12])
    os.truncate(path, 12 + (2 << 30) + 4)


def _large(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)


MADE: dict[str, Callable[[Path], None]] = {
    **{f"{kind}/fifo": os.mkfifo for kind in (*PLACES, "environment", "number", "log")},
    **{
        f"{kind}/link_to_a_device": lambda path: path.symlink_to("/dev/zero")
        for kind in (*PLACES, "environment", "log")
    },
    **{f"{kind}/folder": Path.mkdir for kind in (*PLACES, "environment", "number", "log")},
    **{f"{kind}/a_terabyte": _large for kind in PLACES if kind != "event_file"},
    "event_file/sparse": _sparse,
}
"""What is made in place of a kind of file."""


# --- folders ---------------------------------------------------------------------------------------------------------


def deep_folders(folder: Path, levels: int = 300) -> None:
    """Folders within folders. From a thousand levels on, pytest itself cannot remove them."""
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.chdir(folder):
        for _ in range(levels):
            os.mkdir("d")
            os.chdir("d")
        Path("events.out.tfevents.1799999996.deep").touch()


def loops(folder: Path) -> None:
    """Links to themselves, to each other and to their own folder, and what is no file."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, target in (("itself", "itself"), ("one", "other"), ("other", "one"), ("parent", "..")):
        (folder / name).symlink_to(target)
    (folder / "log-loop_4711_1.out").symlink_to("log-loop_4711_1.out")
    with contextlib.chdir(folder), socket.socket(socket.AF_UNIX) as listening:
        listening.bind("socket")


def strange_names(folder: Path) -> None:
    """Names that are no text, that drive a terminal, or turn the direction of writing."""
    names = (b"line\nend", b"\x1b[2Jcleared", b"\xff\xfe", "\u202etxt.lmth".encode(), b"events.out.tfevents.1\x1b")
    for name in names:
        (inner := folder / os.fsdecode(b"in" + name)).mkdir(parents=True)
        for path in (folder / os.fsdecode(name), inner / "events.out.tfevents.1799999995.x"):
            path.touch()


FOLDERS: dict[str, Callable[[Path], None]] = {"deep": deep_folders, "loops": loops, "names": strange_names}
"""What is made in any folder of a run."""
