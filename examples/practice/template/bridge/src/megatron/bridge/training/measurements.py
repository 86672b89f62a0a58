"""Step times, memory and TFLOP/s as `practice_model.yaml` declares them, with noise that a seed repeats."""

import functools
import hashlib
import json
import math
import os
import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import yaml

DECLARATION = Path(__file__).parents[1] / "practice_model.yaml"


@functools.cache
def read_declaration():
    """The declared model as nested tables."""
    return yaml.safe_load(DECLARATION.read_text(encoding="utf-8"))


def seed_of(*names):
    """A seed that is the same for the same names on every machine."""
    return int.from_bytes(hashlib.sha256("\n".join(names).encode()).digest()[:8], "big")


@dataclass(frozen=True)
class Measurements:
    """What the run reports, one value per iteration, all declared."""

    seconds: np.ndarray
    tflops_per_gpu: np.ndarray
    gigabytes: float
    flops_per_iteration: float

    def memory(self, iteration):
        """The allocator's statistics by their logged names: gigabytes to five digits, and two counts."""
        peak = self.gigabytes * (0.93 if iteration < 2 else 1.0)  # the optimizer's state comes with the first step
        shares = {
            "mem-allocated": 0.87,
            "mem-active": 0.87,
            "mem-inactive": 0.011,
            "mem-reserved": 1.06,
            "mem-max-allocated": 1.0,
            "mem-max-active": 1.004,
            "mem-max-inactive": 0.024,
            "mem-max-reserved": 1.06,
        }
        report = {f"{name}-gigabytes": _five_digits(peak * share) for name, share in shares.items()}
        return {**report, "mem-alloc-retires": 0, "mem-allocated-count": 1841}


def _five_digits(value):
    return round(value, 4 - math.floor(math.log10(abs(value)))) if value else 0.0


def cluster_factor():
    """What the cluster does to every step: the JSON file that PRACTICE_CLUSTER names, 1 without one.

    `factor`: of all nodes. `slow_nodes`: of some, by name. `slow_mode`: a share of the runs, and their factor.
    """
    file = os.environ.get("PRACTICE_CLUSTER")
    if not file or not Path(file).is_file():
        return 1.0
    state = json.loads(Path(file).read_text(encoding="utf-8"))
    share, slow = state.get("slow_mode", (0.0, 1.0))
    node = state.get("slow_nodes", {}).get(os.environ.get("SLURMD_NODENAME"), 1.0)
    return state.get("factor", 1.0) * node * (slow if random.random() < share else 1.0)


def declared_measurements(config, behaviour, world_size, seed):
    """Declare a whole run. The order of the draws is fixed, so that a factor changes nothing but what it multiplies."""
    declared = read_declaration()
    recipe = declared["recipes"][config["model"]["recipe"]]
    noise = declared["noise"]
    iterations = config["train"]["train_iters"]
    generator = np.random.default_rng(seed)
    run_factor = math.exp(generator.normal(0.0, noise["between_runs"]))
    memory_factor = math.exp(generator.normal(0.0, noise["memory"]))
    factors = np.exp(generator.normal(0.0, noise["within_run"], iterations))
    factors *= np.where(generator.random(iterations) < noise["slow_iterations"], noise["slow_factor"], 1.0)
    warm_up = declared["warm_up"][:iterations]
    factors[: len(warm_up)] *= warm_up

    tokens = config["train"]["global_batch_size"] * config["model"]["seq_length"]
    load = tokens / world_size / recipe["tokens"]
    speed = (
        declared["gpu_speed"][config["env_vars"]["PRACTICE_GPU"]] * declared["dtype_speed"][config["mixed_precision"]]
    )
    seconds = recipe["seconds"] * load / speed * run_factor * behaviour.step_time_factor * cluster_factor() * factors
    # Six operations for each parameter and token, and as many again of attention as sequence and width make.
    attention = 6 * recipe["layers"] * recipe["hidden_size"] * config["model"]["seq_length"]
    flops = tokens * (6 * recipe["parameters"] + attention)
    return Measurements(
        seconds=seconds,
        tflops_per_gpu=flops / seconds / world_size / 1e12,
        gigabytes=recipe["gigabytes"] * memory_factor * behaviour.memory_factor,
        flops_per_iteration=float(flops),
    )
