"""Builders for what a run leaves: event files written by tensorboard, log lines in the real formats, checkpoints."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from nightbridge import models
from nightbridge.models import GatePolicy, Job
from nightbridge.outputs.curves import read_curves
from nightbridge.outputs.event_files import find_event_files, read_event_files, scalar_table
from nightbridge.outputs.experiment import RunOutput
from nightbridge.outputs.measurements import RunSettings, summarise


@dataclass
class EventFileBuilder:
    """An event file that tensorboard's own record writer makes, with a name and times of our choice."""

    path: Path
    start: float = 1_760_000_000.0
    events: list[Event] = field(default_factory=list)

    def scalar(self, tag: str, step: int, value: float) -> "EventFileBuilder":
        return self.value(step, Summary.Value(tag=tag, simple_value=value))

    def value(self, step: int, value: Summary.Value) -> "EventFileBuilder":
        self.events.append(Event(wall_time=self.start + step, step=step, summary=Summary(value=[value])))
        return self

    def write(self) -> Path:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("wb") as stream:
            writer = RecordWriter(stream)
            for event in [Event(wall_time=self.start, file_version="brain.Event:2"), *self.events]:
                writer.write(event.SerializeToString())
        return self.path


def scalars(source: Path | Sequence[Path]) -> tuple[pd.DataFrame, list[str]]:
    """The scalars of a run, and the damage of its event files."""
    files, damage = read_event_files(find_event_files(source) if isinstance(source, Path) else source)
    return scalar_table(files), damage


def measure(
    output: RunOutput,
    gate: GatePolicy,
    steps_expected: int | None,
    settings: RunSettings | None = None,
    job: Job | None = None,
) -> tuple[models.Summary, pd.DataFrame]:
    """The summary of a run, and its scalar table."""
    curves = read_curves(output.event_files, output.logs)
    return summarise(curves, gate, steps_expected, settings or RunSettings(), job), curves.table


@dataclass
class StepLine:
    """The text of one iteration as Megatron-Bridge prints it."""

    iteration: int
    total: int = 50
    seconds: float = 0.25
    tflops: float = 700.0
    loss: float = 2.5
    grad_norm: float | None = 1.25
    skipped: int = 0
    nan: int = 0
    throughput: bool = False

    @property
    def perf(self) -> str:
        return f"Step Time : {self.seconds:.2f}s GPU utilization: {self.tflops:.1f}MODEL_TFLOP/s/GPU"

    @property
    def step(self) -> str:
        text = f" [2026-11-20 22:51:38] iteration {self.iteration:8d}/{self.total:8d} |"
        text += f" consumed samples: {self.iteration * 128:12d} |"
        text += f" elapsed time per iteration (ms): {self.seconds * 1000:.1f} |"
        if self.throughput:
            text += f" throughput per GPU (TFLOP/s/GPU): {self.tflops:.1f} |"
        text += f" learning rate: {3e-4:.6E} | global batch size: {128:5d} |"
        if self.loss >= 0.0:  # as upstream: NaN is left out
            text += f" lm loss: {self.loss:.6E} |"
        text += f" loss scale: {1.0:.1f} |"
        if self.grad_norm is not None:
            text += f" grad norm: {self.grad_norm:.3f} |"
        text += f" number of skipped iterations: {self.skipped:3d} | number of nan iterations: {self.nan:3d} |"
        return text


@dataclass
class RunFolder:
    """A job folder as the launcher and a job with a container leave it."""

    attempt_dir: Path
    job: Job

    @property
    def job_dir(self) -> Path:
        return self.job.experiment_dir

    def write(self, name: str, text: str) -> Path:
        path = self.job_dir / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def log(self, text: str, *, restart: int = 0, job_id: int | None = None) -> Path:
        return self.write(f"log-acct-acct.{self.job.name}_{job_id or self.job.job_id}_{restart}.out", text)

    def curves(
        self,
        steps: range,
        *,
        loss: Callable[[int], float] = lambda step: 3.0 / math.sqrt(step),
        time: int = 1_760_000_000,
    ) -> Path:
        name = f"events.out.tfevents.{time}.node1.4242.0"
        builder = EventFileBuilder(self.job_dir / "tb_logs" / name, float(time))
        for step in steps:
            builder.scalar("iteration-time", step, 5.0 if step == 1 else 0.25 + step / 10_000)
            builder.scalar("throughput/tflops/device", step, 700.0 - step)
            builder.scalar("lm loss", step, loss(step))
            builder.scalar("lm loss vs samples", step * 128, loss(step))
            builder.scalar("grad-norm", step, 1.0)
            builder.scalar("memory/mem-max-allocated-gigabytes", step, 40.0 + min(step, 3))
        return builder.write()
