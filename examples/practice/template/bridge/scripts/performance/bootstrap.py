#!/usr/bin/env python3
"""What every Slurm task of a practice run executes: find out which rank this is, and train."""

import os
import sys
from pathlib import Path

# The ranks share a few cores; one thread each, said before numpy is imported.
for _library in ("OPENBLAS", "OMP", "MKL"):
    os.environ.setdefault(f"{_library}_NUM_THREADS", "1")

SCRIPTS = Path(__file__).resolve().parent
ROOT = SCRIPTS.parents[1]
sys.path[:0] = [str(SCRIPTS), str(ROOT / "src")]

from argument_parser import parse_cli_args  # noqa: E402
from megatron.bridge.training.behaviour import read_behaviour  # noqa: E402
from megatron.bridge.training.config import build_config, write_config  # noqa: E402
from megatron.bridge.training.provenance import write_provenance  # noqa: E402
from megatron.bridge.training.ranks import Ranks  # noqa: E402
from megatron.bridge.training.train import train  # noqa: E402


def main():
    """Build the configuration, write it down on rank 0, and train unless it is a dry run."""
    args, overrides = parse_cli_args().parse_known_args()
    ranks = Ranks.from_environment(os.environ, alone=args.num_gpus if args.dryrun else 1)
    config = build_config(args, overrides, world_size=ranks.size, job_dir=Path.cwd().parent)
    path = args.save_config_filepath or ("ConfigContainer.yaml" if args.dryrun else None)
    if path and ranks.is_first:
        write_config(config, Path(path))
        write_provenance(Path(path).with_name("repo_status.json"), ROOT)
    if not args.dryrun:
        train(config, read_behaviour(), ranks, job_name=os.environ.get("SLURM_JOB_NAME", "practice"))


if __name__ == "__main__":
    main()
