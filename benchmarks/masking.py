"""How fast secrets are looked for: megabytes per second of processor time, in a log and in random weights.

    .venv/bin/python benchmarks/masking.py [MIB]

Twenty secrets of 32 characters in every encoding; the log has the lines of Megatron-LM, the weights are random bytes.
MIB (default 32) is the size of the log, and half of the weights'.
"""

import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from nightbridge.masking import SecretFinder, copy_masked

LINE = (
    b"2026-11-23 01:02:03 [rank0]: iteration   12/ 1000 | consumed samples:   1234 | elapsed time per iteration (ms): "
    b"1234.5 | lm loss: 1.23456E+00 | grad norm: 0.123 | number of skipped iterations:   0 |\n"
)
MIB = 1 << 20
REPEATS = 3


def measure(work: Callable[[], object], size: int) -> float:
    """Megabytes per second of processor time, the best of some runs."""
    best = float("inf")
    for _ in range(REPEATS):
        began = time.process_time()
        work()
        best = min(best, time.process_time() - began)
    return size / 1e6 / best


def main(mib: int) -> None:
    numbers = random.Random(1)
    secrets = [numbers.randbytes(16).hex() for _ in range(20)]
    weights = bytearray(numbers.randbytes(MIB))
    with tempfile.TemporaryDirectory() as folder:
        log, copy = Path(folder, "log"), Path(folder, "copy")
        log.write_bytes(LINE * (mib * MIB // len(LINE)))
        text = measure(lambda: copy_masked(log, copy, secrets), log.stat().st_size)

    def search() -> None:
        finder = SecretFinder(secrets)
        for _ in range(2 * mib):
            finder.feed(weights, MIB)

    print(f"log: {text:.0f} MB/s; weights: {measure(search, 2 * mib * MIB):.0f} MB/s of processor time")


if __name__ == "__main__":
    main(int(sys.argv[1]) if sys.argv[1:] else 32)
