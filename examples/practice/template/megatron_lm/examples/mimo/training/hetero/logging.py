"""What each interval says, on the language model's logging rank: a line, and scalars."""

import math
import sys
import time
from dataclasses import dataclass
from datetime import datetime

from examples.mimo.training.hetero.event_file import EventFile


@dataclass(frozen=True)
class Step:
    """One iteration. Loss, gradient norm and learning rate are computed; milliseconds are declared."""

    iteration: int
    loss: float
    gradient_norm: float
    zeros: int | None
    learning_rate: float
    milliseconds: float
    load_balancing_loss: float | None


def is_log_rank(args, rank):
    """Whether this is the first rank of the language model's last pipeline stage."""
    return rank == args.llm_offset + args.llm_tp * args.llm_dp * (args.llm_pp - 1)


class TrainingLogger:
    """Gathers the iterations of an interval, and tells them on the rank that logs."""

    def __init__(self, args, ranks, consumed_samples):
        self._args = args
        self._ranks = ranks
        self._samples = consumed_samples
        self._speaks = is_log_rank(args, ranks.rank)
        self._events = EventFile(args.tensorboard_dir) if self._speaks and args.tensorboard_dir else None
        self._interval = []

    def record(self, step, gigabytes):
        """Take in an iteration; the last of an interval is told."""
        self._samples += self._args.global_batch_size
        self._interval.append(step)
        if step.iteration % self._args.log_interval:
            return
        losses = [past.loss for past in self._interval if math.isfinite(past.loss)]
        loss = sum(losses) / len(losses) if losses else None
        milliseconds = sum(past.milliseconds for past in self._interval) / len(self._interval)
        if self._speaks:
            _say(self._line(step, loss, milliseconds, nan=len(self._interval) - len(losses)))
            self._write(step, loss, milliseconds)
        if self._args.log_memory:
            _say(self._memory_line(step.iteration, gigabytes))
        self._interval = []

    def _line(self, step, loss, milliseconds, nan):
        fields = [
            f" [{datetime.now():%Y-%m-%d %H:%M:%S.%f}] iteration {step.iteration:8d}/{self._args.train_iters:8d}",
            f"consumed samples: {self._samples:12d}",
            f"elapsed time per iteration (ms): {milliseconds:.1f}",
            f"learning rate: {step.learning_rate:.6E}",
            f"global batch size: {self._args.global_batch_size:5d}",
            *([f"lm loss: {loss:.6E}"] if loss is not None else ()),
            "loss scale: 1.0",
            f"grad norm: {step.gradient_norm:.3f}",
            *([f"num zeros: {step.zeros}"] if step.zeros is not None else ()),
            f"number of skipped iterations: {0:3d}",
            f"number of nan iterations: {nan:3d}",
        ]
        return " | ".join(fields) + " |"

    def _memory_line(self, iteration, gigabytes):
        mebibytes = gigabytes * 1e9 / 2**20
        return (
            f" [mem] iter={iteration} rank={self._ranks.rank} alloc_MB={0.87 * mebibytes:.0f}"
            f" max_alloc_MB={mebibytes:.0f} reserved_MB={1.06 * mebibytes:.0f} max_reserved_MB={1.06 * mebibytes:.0f}"
        )

    def _write(self, step, loss, milliseconds):
        if self._events is None:
            return
        now = time.time()
        by_samples = {
            "lm loss": loss,
            "learning-rate": step.learning_rate,
            "batch-size": self._args.global_batch_size,
            "grad-norm": step.gradient_norm,
        }
        plain = {
            "loss-scale": 1.0,
            "num-zeros": step.zeros,
            "iteration-time-ms": milliseconds,
            "seq_load_balancing_loss": step.load_balancing_loss,
        }
        for tag, value in (by_samples | plain).items():
            if value is None:
                continue
            self._events.add(tag, value, step.iteration, now)
            if tag in by_samples:
                self._events.add(f"{tag} vs samples", value, self._samples, now)
        self._events.flush()


def _say(line):
    # One write for text and newline: all ranks share one file.
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
