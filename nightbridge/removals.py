"""What `prune` may remove: which things are old, and which are still needed by a job that may be running."""

import os
import time
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from pydantic import Field

from nightbridge.models import Model
from nightbridge.slurm.attempts import ATTEMPT_FILE, JOB_SCRIPT
from nightbridge.slurm.ledger import ENDED_FILE
from nightbridge.slurm.script import EXIT_CODE

DAY_SECONDS = 24 * 3600.0

# Between a pull and the job's own files lies the rest of a stage, and perhaps its retries.
NEVER_YOUNGER_THAN_SECONDS = DAY_SECONDS
# A job whose node failed never writes its exit code, and an unwatched run has no end on record.
_MAX_LIFE_SECONDS = 14 * DAY_SECONDS
# Where the launcher and the job name what they use: NeMo-Run copies the code, but its scripts name the checkout.
_FILES_THAT_NAME = (JOB_SCRIPT, "launcher.log", "intent*.json", "nemorun/experiments/*/*/*/scripts/*.sh")


class Policy(Model):
    """How much is kept."""

    days: float = Field(30.0, ge=1, description="Remove what was unused for this many days.")
    keep: int = Field(20, ge=1, description="Keep at most this many of each kind, the newest.")
    max_bytes: int | None = Field(None, ge=0, description="Images only: remove the oldest until the rest fits.")


class Removal(Model):
    """Something unused that can be removed."""

    path: Path
    size: int = Field(description="Bytes.")
    last_used: datetime
    reason: str

    def wanted_since(self, last_used: float) -> bool:
        """Whether it was used after it was chosen; `last_used` is Unix time, finer than a `datetime`."""
        return last_used - self.last_used.timestamp() > 0.001


class Candidate(Model):
    """Something that may be removed."""

    path: Path
    size: int
    last_used: float = Field(description="Unix time.")

    def removal(self, reason: str) -> Removal:
        """The decision to remove it."""
        used = datetime.fromtimestamp(self.last_used, UTC)
        return Removal(path=self.path, size=self.size, last_used=used, reason=reason)


def choose(candidates: Sequence[Candidate], policy: Policy, used_by_jobs: str, *, now: float) -> list[Removal]:
    """Choose what goes, oldest first: never what a live job names, and never what was wanted within a day.

    Args:
        candidates: All things of one kind. What has to stay counts among the ones that are kept.
        policy: How much is kept.
        used_by_jobs: `text_of_live_jobs` of the workspace.
        now: Unix time.

    """
    newest_first = sorted(candidates, key=lambda candidate: candidate.last_used, reverse=True)
    chosen, kept_bytes = [], 0
    for place, candidate in enumerate(newest_first):
        age = now - candidate.last_used
        kept_bytes += candidate.size
        reasons = (
            (age > policy.days * DAY_SECONDS, f"unused for {age / DAY_SECONDS:.0f} days"),
            (place >= policy.keep, f"{policy.keep} newer ones are kept"),
            (policy.max_bytes is not None and kept_bytes > policy.max_bytes, "the newer ones fill the allowed size"),
        )
        reason = next((text for holds, text in reasons if holds), None)
        if reason and age > NEVER_YOUNGER_THAN_SECONDS and not is_named(candidate.path, used_by_jobs):
            chosen.append(candidate.removal(reason))
            kept_bytes -= candidate.size
    return chosen[::-1]


def is_named(path: Path, used_by_jobs: str) -> bool:
    """Whether live jobs name an image or a checkout: by its digest or commit alone.

    The folders above may have been spelt in another way, such as through a link.
    """
    return path.name in used_by_jobs


def old_leftovers(folders: Iterable[Path], reason: str) -> list[Removal]:
    """Leftover work folders: those older than a day, longer than any work takes."""
    candidates = [Candidate(path=folder, size=size_of(folder), last_used=folder.stat().st_mtime) for folder in folders]
    latest = time.time() - NEVER_YOUNGER_THAN_SECONDS
    return [candidate.removal(reason) for candidate in candidates if candidate.last_used < latest]


def size_of(folder: Path) -> int:
    """Bytes that removing a folder frees; files with a further name elsewhere are not among them."""
    total = 0
    for parent, _, files in os.walk(folder):
        for name in files:
            status = os.lstat(os.path.join(parent, name))
            total += status.st_blocks * 512 if status.st_nlink == 1 else 0
    return total


def text_of_live_jobs(workspace: Path) -> str:
    """What the attempts of a workspace that have not ended say about the paths they use.

    An attempt has ended when its job left an exit code, or a watcher has seen its end.
    """
    texts = []
    for attempt in (workspace.absolute() / "runs").glob(f"*/a*/{ATTEMPT_FILE}"):
        folder = attempt.parent
        ended = (folder / EXIT_CODE).exists() or (folder / ENDED_FILE).exists()
        if ended or time.time() - attempt.stat().st_mtime > _MAX_LIFE_SECONDS:
            continue
        for pattern in _FILES_THAT_NAME:
            texts += [path.read_text(encoding="utf-8", errors="replace") for path in folder.glob(pattern)]
    return "\n".join(texts)
