"""Stands in for torchrun in practice runs: starts a node's ranks, and ends all of them when one fails.

Standard library only: it is run as a file by the launcher environment's Python. It takes the options that our batch
scripts write, and sets the environment variables of each rank as torchrun does. A real torchrun also connects the
nodes; here the programs meet in a folder.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

_LOOK_INTERVAL = 0.05
_PATIENCE = 10.0


def main(arguments: Sequence[str]) -> int:
    """Run a program's ranks on this node; return 0, or 1 when one of them failed."""
    parser = argparse.ArgumentParser("torchrun", allow_abbrev=False)
    parser.add_argument("--nnodes", type=int, default=1)
    parser.add_argument("--nproc-per-node", type=int, default=1)
    parser.add_argument("--node-rank", type=int, default=0)
    parser.add_argument("--master-addr", default="127.0.0.1")
    parser.add_argument("--master-port", type=int, default=29500)
    parser.add_argument("program")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)
    ranks = [_start(options, local_rank) for local_rank in range(options.nproc_per_node)]
    signal.signal(signal.SIGTERM, lambda *_: _stop(ranks))
    return _wait(options, ranks)


def _start(options: argparse.Namespace, local_rank: int) -> "subprocess.Popen[bytes]":
    rank = options.node_rank * options.nproc_per_node + local_rank
    variables = {
        "RANK": rank,
        "LOCAL_RANK": local_rank,
        "GROUP_RANK": options.node_rank,
        "WORLD_SIZE": options.nnodes * options.nproc_per_node,
        "LOCAL_WORLD_SIZE": options.nproc_per_node,
        "MASTER_ADDR": options.master_addr,
        "MASTER_PORT": options.master_port,
        "TORCHELASTIC_RESTART_COUNT": 0,
    }
    environment = {"OMP_NUM_THREADS": "1", **os.environ, **{name: str(value) for name, value in variables.items()}}
    return subprocess.Popen([sys.executable, "-u", options.program, *options.arguments], env=environment)


def _wait(options: argparse.Namespace, ranks: "list[subprocess.Popen[bytes]]") -> int:
    """Wait until all have ended, or one has failed; then the others are ended, too."""
    while True:
        codes = [rank.poll() for rank in ranks]
        failed = [(local_rank, code) for local_rank, code in enumerate(codes) if code]
        if failed:
            _stop(ranks)
            local_rank, code = failed[0]
            sys.stderr.write(
                f"torch.distributed.elastic.multiprocessing.errors.ChildFailedError: {options.program} FAILED: "
                f"local_rank: {local_rank}, exitcode: {code}\n"
            )
            return 1
        if all(code == 0 for code in codes):
            return 0
        time.sleep(_LOOK_INTERVAL)


def _stop(ranks: "list[subprocess.Popen[bytes]]") -> None:
    for rank in ranks:
        if rank.poll() is None:
            rank.terminate()
    deadline = time.monotonic() + _PATIENCE
    for rank in ranks:
        try:
            rank.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            rank.kill()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
