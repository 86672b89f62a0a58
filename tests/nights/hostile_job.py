"""What a hostile job does at its end, run inside the job: every file of the corpus, and what git cannot keep.

The tail of the practice workload's program runs this with the interpreter of its ranks: standard library only. A test
whose id is a row of `ROWS` does what stands there, and any other all of it at once. What the job's own end would undo
is left to an accomplice, as a process on another node is: `python hostile_job.py WORKSPACE` goes on until it is ended.
"""

import atexit
import base64
import html
import json
import os
import sys
import time
import urllib.parse
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

CORPUS = Path(os.path.realpath(__file__)).parents[1] / "data" / "hostile"
FOREIGN = Path(os.path.realpath(__file__)).parent / "installation.py"
"""Stands for a credentials file of this machine: links lead to it."""
RECORDS = ("claim", "cancellation.json", "refusal.json", "ended.json", "harvest.lease")
TRACKER = "latest_checkpointed_iteration.txt"
SHAPED = f"ghp_{'0123456789abcdefghij' * 2}"
"""A token that nobody named."""


class Run(NamedTuple):
    """The folders of the job's attempt."""

    attempt: Path
    save: Path
    board: Path

    @property
    def job(self) -> Path:
        return next(self.attempt.glob("nemorun/experiments/*"))

    @property
    def test_id(self) -> str:
        return self.attempt.parent.name.rsplit("-n1-", 1)[0]

    def checkpoints(self, *kinds: tuple[str, str]) -> None:
        """Beside its own, for each file of the corpus a copy of a whole one but for the hostile part."""
        whole = next(self.save.glob("iter_00000*"))
        for kind, name in kinds:
            for number, path in enumerate(sorted((CORPUS / kind).iterdir())):
                folder = self.save / f"iter_{ord(kind[-1])}{len(kind)}{number:05d}"
                folder.mkdir()
                for part in whole.iterdir():
                    if part.is_file():
                        (folder / part.name).write_bytes(part.read_bytes())
                (folder / name).write_bytes(path.read_bytes())
                if name == "run_config.yaml":  # which only Megatron-Bridge writes, after these
                    (folder / "train_state.pt").write_bytes(b"state")
                    (self.save / TRACKER).write_text("9" * 12)

    def yaml(self) -> None:
        self.checkpoints(("run_config", "run_config.yaml"))
        for name, source in (
            ("ConfigContainer.yaml", "config_container/100000_braces"),
            ("repo_status.json", "repo_status/100000_brackets"),
        ):
            (self.save.parent / "configs").mkdir(exist_ok=True)
            (self.save.parent / "configs" / name).write_bytes((CORPUS / source).read_bytes())

    def metadata(self) -> None:
        self.checkpoints(("metadata", ".metadata"), ("metadata_json", "metadata.json"))

    def lines(self) -> None:
        self.print(*(path.read_bytes() for path in sorted((CORPUS / "log").iterdir())))

    def fifos(self) -> None:
        with suppress(FileNotFoundError):
            (self.save / TRACKER).unlink()
        os.mkfifo(self.save / TRACKER)
        os.mkfifo(self.board / "events.out.tfevents.1799999998.fifo")
        (self.attempt / "claim").unlink()
        os.mkfifo(self.attempt / "claim")
        job_id = os.environ["SLURM_JOB_ID"]
        os.mkfifo(self.job / f"env_{job_id}.log")
        os.mkfifo(self.job / f"log-fifo_{job_id}_9.out")

    def records(self) -> None:
        for name in RECORDS:
            (self.attempt / name).unlink(missing_ok=True)
            os.mkfifo(self.attempt / name)

    def numbers(self) -> None:
        step = "iteration 9/ 10 | number of skipped iterations: {0} | number of nan iterations: {0} |"
        self.print(*(step.format(number).encode() for number in ("inf", "9" * 4301, "²", "1e999", "-1")))
        # A ref with a NUL, as git's own HEAD is one.
        (self.save.parent / "repo_status.json").write_text(json.dumps([{"sha": "refs/heads/ma\0in", "name": "a\0b"}]))

    def links(self) -> None:
        (self.board / "events.out.tfevents.1799999997.link").symlink_to(FOREIGN)
        for folder in (self.save, self.board, self.attempt):
            (folder / "nsys_profile").symlink_to(FOREIGN.parent)
            (folder / "loop").symlink_to("loop")
            (folder / "\x1b[2Jname\n").touch()
        deep = self.board
        for _ in range(100):
            deep = deep / "deep"
            deep.mkdir()

    def sparse(self) -> None:
        for number, path in enumerate(sorted((CORPUS / "event_file").iterdir())):
            (self.board / f"events.out.tfevents.17{number:08d}.evil").write_bytes(path.read_bytes())
        sparse = self.board / "events.out.tfevents.1799999999.sparse"
        sparse.write_bytes((CORPUS / "event_file" / "record_of_2_gib").read_bytes()[:12])
        os.truncate(sparse, 2 << 30)

    def secrets(self) -> None:
        self.print(*(text.encode() for value in (globals()["PLANTED"], SHAPED) for text in forms(value)))

    def print(self, *lines: bytes) -> None:
        sys.stdout.flush()
        for line in lines:
            os.write(1, line + b"\n")


def forms(value: str) -> Iterator[str]:
    """A secret as people and programs print it."""
    raw = value.encode()
    for text in (
        *(value, repr(value), json.dumps({"token": value}), html.escape(value), f"https://me:{value}@127.0.0.1/x.git"),
        *(raw.hex(), raw.hex(":"), urllib.parse.quote(value, safe=""), "".join(f"%{byte:02X}" for byte in raw)),
        *(f"Basic {base64.b64encode(b'x' * before + raw).decode()}" for before in range(3)),
    ):
        yield text
        # Nobody recognises a token that nobody named once it is split or encoded.
        if value != SHAPED:
            yield "\x1b[1m".join(text)
            yield f"{text[:9]}\n        {text[9:]}"
        elif text != value:
            return


ROWS: dict[str, Callable[[Run], None]] = {
    "yaml": Run.yaml,
    "lines": Run.lines,
    "metadata": Run.metadata,
    "fifos": Run.fifos,
    "records": Run.records,
    "numbers": Run.numbers,
    "swapped": Run.links,
    "linked": Run.links,
    "sparse": Run.sparse,
    "secrets": Run.secrets,
}
APART = ("records", "linked")
"""What hides all other attacks from whoever reads the run."""


def attack() -> None:
    """Leave what the test's id says."""
    save = Path(sys.argv[sys.argv.index("--save") + 1])
    board = Path(sys.argv[sys.argv.index("--tensorboard-dir") + 1])
    run = Run(next(parent for parent in save.parents if (parent / "attempt.json").exists()), save, board)
    done = {run.test_id} if run.test_id in ROWS else ROWS.keys() - {*APART, "linked"}
    for name in sorted(done, reverse=True):  # `yaml` writes the tracker that `fifos` makes one
        ROWS[name](run)


# --- the accomplice --------------------------------------------------------------------------------------------------


def replace_exit_code(attempt: Path, test_id: str) -> bool:
    """Once the job has left its exit code: a FIFO, or, when its script has read it, another one."""
    if not (attempt / "exit_code").is_file() or (test_id == "numbers" and any(attempt.glob(".pid.*"))):
        return False
    with suppress(FileNotFoundError):
        (attempt / ".other").unlink()
    if test_id == "numbers":
        (attempt / ".other").write_text("²\n")
    else:
        os.mkfifo(attempt / ".other")
    (attempt / ".other").replace(attempt / "exit_code")
    return True


def swap_logs(attempt: Path) -> None:
    """Between the choice of what is stored and its upload, which the test calls this at: links to a foreign file."""
    for path in [*attempt.glob("nemorun/experiments/*/*.out"), *attempt.glob("output/tb_logs/events*")]:
        (attempt / ".link").symlink_to(FOREIGN)
        (attempt / ".link").replace(path)


def move_away(attempt: Path, test_id: str) -> bool:
    """Once the job has ended: links in place of the run's folders."""
    if not (attempt / "exit_code").exists():
        return False
    for folder in (next(attempt.glob("nemorun/experiments/*")), attempt / "output"):
        elsewhere = attempt.parents[2] / f"{test_id}-{folder.name}"
        folder.rename(elsewhere)
        folder.symlink_to(elsewhere)
    return True


ACCOMPLICE: dict[str, tuple[Callable[[Path, str], bool], ...]] = {
    "hostile": (replace_exit_code,),
    "numbers": (replace_exit_code,),
    "fifos": (replace_exit_code,),
    "linked": (move_away,),
}


def help_the_jobs(workspace: Path) -> None:
    """Go on until this process is ended."""
    done = set()
    while True:
        for attempt in workspace.glob("runs/*/a1"):
            test_id = Run(attempt, attempt, attempt).test_id
            for act in ACCOMPLICE.get(test_id, ()):
                if (attempt, act) not in done and act(attempt, test_id):
                    done.add((attempt, act))
        time.sleep(0.01)


if __name__ == "__main__":
    help_the_jobs(Path(sys.argv[1]))
elif __name__ == "<run_path>" and os.environ.get("RANK", "0") == "0":
    atexit.register(attack)
