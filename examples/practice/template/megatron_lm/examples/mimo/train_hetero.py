#!/usr/bin/env python3
"""Train a small vision-language model on two grids of ranks. Started by torchrun, once for each rank."""

import os
import sys
from pathlib import Path

# The ranks share a few cores; one thread each, said before numpy is imported.
for _library in ("OPENBLAS", "OMP", "MKL"):
    os.environ.setdefault(f"{_library}_NUM_THREADS", "1")

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.mimo.training.hetero.args import parse_args  # noqa: E402
from examples.mimo.training.hetero.loop import run_train_loop  # noqa: E402
from examples.mimo.training.ranks import Ranks  # noqa: E402


def main():
    """Parse, train, and say that it is done."""
    args = parse_args()
    ranks = _ranks(args)
    run_train_loop(args, ranks, job_name=os.environ.get("SLURM_JOB_NAME", "practice"))
    ranks.meet()
    ranks.say_first("Heterogeneous MIMO training completed")


def _ranks(args):
    """This process's rank, as torchrun says it. A folder of the job stands in for the network between the ranks."""
    start = f"{os.environ.get('SLURM_JOB_ID', 0)}_{os.environ.get('SLURM_RESTART_COUNT', 0)}"
    shared = Path(args.tensorboard_dir or args.save or ".").absolute()
    shared.mkdir(parents=True, exist_ok=True)
    return Ranks(int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1)), shared / f".ranks_{start}")


if __name__ == "__main__":
    main()
