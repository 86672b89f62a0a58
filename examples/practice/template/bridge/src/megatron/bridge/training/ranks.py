"""Which of the job's processes this is, and how they wait for each other."""

import sys
import time
from pathlib import Path

PATIENCE = 600.0  # seconds that a rank waits for the others, as long as NCCL does


class Ranks:
    """This process's rank and how many there are.

    Every rank computes the same; the ends of the row also report. They meet where real ranks have a barrier around a
    checkpoint: each writes the number of the meeting to a file of its own and waits until all files say as much.
    """

    def __init__(self, rank, size, folder):
        self.rank = rank
        self.size = size
        self._folder = folder
        self._meetings = 0

    @classmethod
    def from_environment(cls, environment, alone=1):
        """Read what Slurm says; without Slurm this is rank 0 of `alone`."""
        if "SLURM_PROCID" not in environment:
            return cls(0, alone, Path())
        size = int(environment.get("SLURM_NTASKS") or environment.get("SLURM_STEP_NUM_TASKS") or 1)
        # The working directory is the job's own; a requeued job starts its meetings anew.
        start = f"{environment.get('SLURM_JOB_ID', 0)}_{environment.get('SLURM_RESTART_COUNT', 0)}"
        return cls(int(environment["SLURM_PROCID"]), size, Path.cwd() / f".ranks_{start}")

    @property
    def is_first(self):
        """The rank that saves, and reports speed and memory."""
        return self.rank == 0

    @property
    def is_last(self):
        """The rank that reports losses and writes event files."""
        return self.rank == self.size - 1

    def meet(self):
        """Wait until every rank has come this far.

        Raises:
            TimeoutError: One has not come.

        """
        if self.size == 1:
            return
        self._meetings += 1
        self._folder.mkdir(exist_ok=True)
        own = self._folder / str(self.rank)
        own.with_suffix(".new").write_text(str(self._meetings), encoding="ascii")
        own.with_suffix(".new").replace(own)
        deadline = time.monotonic() + PATIENCE
        missing = list(range(self.size))
        while missing := [rank for rank in missing if self._meetings_of(rank) < self._meetings]:
            if time.monotonic() > deadline:
                raise TimeoutError(f"rank {missing[0]} did not come to meeting {self._meetings}")
            time.sleep(0.002)

    def _meetings_of(self, rank):
        try:
            return int((self._folder / str(rank)).read_text(encoding="ascii"))
        except FileNotFoundError:
            return 0

    def say_first(self, text):
        """Print on rank 0."""
        if self.is_first:
            _say(sys.stdout, text)

    def say_last(self, text):
        """Print on the last rank."""
        if self.is_last:
            _say(sys.stdout, text)

    def complain(self, text):
        """Print to stderr, on every rank."""
        _say(sys.stderr, f"[rank{self.rank}]: {text}")


def _say(stream, text):
    # One write for text and newline: all ranks share one file.
    stream.write(f"{text}\n")
    stream.flush()
