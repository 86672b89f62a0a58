"""What one iteration has to say, and the lines that say it."""

import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Report:
    """One iteration. Loss, gradient norm and learning rate are computed; seconds, TFLOP/s and memory are declared."""

    iteration: int
    iterations: int
    loss: float
    gradient_norm: float
    learning_rate: float
    consumed_samples: int
    global_batch_size: int
    micro_batch_size: int
    seq_length: int
    world_size: int
    seconds: float
    tflops_per_gpu: float
    memory: dict[str, float]
    past_seconds: np.ndarray

    def performance_line(self):
        """Rank 0's line."""
        return f"Step Time : {self.seconds:.2f}s GPU utilization: {self.tflops_per_gpu:.1f}MODEL_TFLOP/s/GPU"

    def memory_line(self):
        """Rank 0's line after the first two iterations."""
        values = "".join(f" | {name}: {value}" for name, value in self.memory.items())
        return f"[Rank 0] (after {self.iteration} iterations) memory (GB){values}"

    def step_line(self, now, log_throughput):
        """The last rank's line; as in the real one, a loss that is not a number is left out."""
        fields = [
            f" [{now:%Y-%m-%d %H:%M:%S}] iteration {self.iteration:8d}/{self.iterations:8d}",
            f"consumed samples: {self.consumed_samples:12d}",
            f"elapsed time per iteration (ms): {self.seconds * 1000.0:.1f}",
            *([f"throughput per GPU (TFLOP/s/GPU): {self.tflops_per_gpu:.1f}"] if log_throughput else ()),
            f"learning rate: {self.learning_rate:.6E}",
            f"global batch size: {self.global_batch_size:5d}",
            *([f"lm loss: {self.loss:.6E}"] if self.loss >= 0.0 and not math.isnan(self.loss) else ()),
            "loss scale: 1.0",
            f"grad norm: {self.gradient_norm:.3f}",
            f"number of skipped iterations: {0:3d}",
            f"number of nan iterations: {0:3d}",
        ]
        return " | ".join(fields) + " |"

    def window_rates(self, window):
        """Tag and value of the rates over the last `window` iterations; nothing before there are as many."""
        if self.iteration < window:
            return
        batches = window / float(self.past_seconds[-window:].sum())
        samples = batches * self.global_batch_size
        rates = {"batches": batches, "samples": samples, "tokens": samples * self.seq_length}
        for name, rate in rates.items():
            yield f"throughput/{name}_per_sec", rate
            yield f"throughput/device/{name}_per_sec", rate / self.world_size
        yield "throughput/micro_batch_size", self.micro_batch_size
        yield "throughput/global_batch_size", self.global_batch_size
