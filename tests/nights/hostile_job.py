"""What a hostile job does at its end, run inside the job: every file of the corpus, and what git cannot keep, all at once.

The tail of the practice workload's program runs this with the interpreter of its ranks: standard library only.
"""

import atexit
import os
import sys
from pathlib import Path

CORPUS = Path(os.path.realpath(__file__)).parents[1] / "data" / "hostile"
SECRET = Path(os.path.realpath(__file__)).parent / "installation.py"
RECORDS = ("claim", "cancellation.json", "refusal.json", "ended.json", "harvest.lease")


def attack() -> None:
    """Leave everything that could hurt who reads it."""
    save = Path(sys.argv[sys.argv.index("--save") + 1])
    board = Path(sys.argv[sys.argv.index("--tensorboard-dir") + 1])
    attempt = next(parent for parent in save.parents if (parent / "attempt.json").exists())
    if attempt.parent.name.startswith("records"):
        for name in RECORDS:
            (attempt / name).unlink(missing_ok=True)
            os.mkfifo(attempt / name)
        return
    for kind, name in (
        ("run_config", "run_config.yaml"),
        ("metadata", ".metadata"),
        ("metadata_json", "metadata.json"),
    ):
        for number, path in enumerate(sorted((CORPUS / kind).iterdir())):
            # Beside its own, each a copy of a whole one but for the hostile part.
            folder = save / f"iter_{ord(kind[-1])}{len(kind)}{number:05d}"
            whole = next(save.glob("iter_*"))
            folder.mkdir(parents=True)
            for part in whole.iterdir():
                if part.is_file():
                    (folder / part.name).write_bytes(part.read_bytes())
            (folder / name).write_bytes(path.read_bytes())
    for number, path in enumerate(sorted((CORPUS / "event_file").iterdir())):
        (board / f"events.out.tfevents.17{number:08d}.evil").write_bytes(path.read_bytes())
    sparse = board / "events.out.tfevents.1799999999.sparse"
    sparse.write_bytes((CORPUS / "event_file" / "record_of_2_gib").read_bytes()[:12])
    os.truncate(sparse, 2 << 30)
    os.mkfifo(board / "events.out.tfevents.1799999998.fifo")
    (board / "events.out.tfevents.1799999997.link").symlink_to(SECRET)
    (save / "latest_checkpointed_iteration.txt").unlink()
    os.mkfifo(save / "latest_checkpointed_iteration.txt")
    (save.parent / "configs").mkdir(exist_ok=True)
    (save.parent / "configs" / "ConfigContainer.yaml").write_bytes(
        (CORPUS / "config_container/100000_braces").read_bytes()
    )
    (save.parent / "repo_status.json").write_bytes((CORPUS / "repo_status/100000_brackets").read_bytes())
    for folder in (save, board, attempt):
        (folder / "nsys_profile").symlink_to(SECRET.parent)
    sys.stdout.flush()
    for path in sorted((CORPUS / "log").iterdir()):
        os.write(1, path.read_bytes() + b"\n")


if os.environ.get("RANK", "0") == "0":
    atexit.register(attack)
