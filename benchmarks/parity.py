"""How often the parity gate flags pairs of runs that are the same, and how often it finds what was put into one.

    python benchmarks/parity.py [--losses FILE.json.gz] [--pairs 300]

FILE is a list of objects with `path`, `t` (time) and `lm`: the losses of real runs. Two consecutive versions of one
path with equally many finite losses, at least 40, which differ at some step but nowhere by 2 %, are a null pair: the
same test with other numerics. Faults are put into the second of each pair:

    +0.5 %, +1 %, +3 %   in the second half      lag        learns 10 % slower
    drift                up to +2 % at the end   spike      one loss doubled, two thirds in
    reversal             the curve backwards     NaN        the second half

Printed: share flagged by our gate with its default bands, by Megatron-LM's rule (5 % per step, 1 % of the steps may
fail), and by a correlation of 0.95, with Wilson's 95 % intervals. Without a file, synthetic pairs are used, so many.
"""

import argparse
import gzip
import itertools
import json
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nightbridge.goldens.parity import compare_curves

Array = NDArray[np.float64]
Pair = tuple[Array, Array]

LEAST_STEPS = 40
NULL_LIMIT = 0.02


def read_pairs(path: Path) -> list[Pair]:
    """Null pairs of a file of real losses."""
    with gzip.open(path, "rt") as file:
        runs = json.load(file)
    versions: dict[str, list[tuple[float, Array]]] = defaultdict(list)
    for run in runs:
        if run["lm"]:
            versions[run["path"]].append((run["t"], np.array(run["lm"], dtype=float)))
    pairs = []
    for each in versions.values():
        each.sort(key=lambda version: version[0])
        for (_, a), (_, b) in itertools.pairwise(each):
            if a.size == b.size >= LEAST_STEPS and np.isfinite([a, b]).all() and (a > 0).all():
                largest = float(np.max(np.abs(b / a - 1)))
                if 0 < largest < NULL_LIMIT:
                    pairs.append((a, b))
    return pairs


def synthetic_pairs(count: int, seed: int) -> list[Pair]:
    """Losses that fall like those of real tests, and a second run whose differences grow as rounding errors do."""
    rng = np.random.default_rng(seed)
    pairs = []
    for _ in range(count):
        steps = int(rng.choice([50, 100]))
        at = np.arange(steps)
        loss = rng.uniform(5, 9) + rng.uniform(1.5, 4) * np.exp(-at / rng.uniform(10, 40))
        loss *= 1 + 0.003 * rng.standard_normal(steps)
        width = math.exp(rng.normal(math.log(3e-5), 1.6))
        noise = width * (at / steps) * rng.standard_normal(steps)
        pairs.append((loss, loss * (1 + np.clip(noise, -NULL_LIMIT, NULL_LIMIT))))
    return pairs


def second_half(share: float) -> Callable[[Array], Array]:
    """Multiply the second half by 1 + share; NaN makes it NaN."""

    def fault(loss: Array) -> Array:
        changed = loss.copy()
        changed[loss.size // 2 :] *= 1 + share
        return changed

    return fault


def lag(loss: Array) -> Array:
    at = np.arange(loss.size)
    stretched: Array = np.interp(0.9 * at, at, loss)
    return stretched


def drift(loss: Array) -> Array:
    return loss * np.linspace(1.0, 1.02, loss.size)


def spike(loss: Array) -> Array:
    changed = loss.copy()
    changed[2 * loss.size // 3] *= 2
    return changed


FAULTS: dict[str, Callable[[Array], Array]] = {
    "null": lambda loss: loss,
    "+0.5 %": second_half(0.005),
    "+1 %": second_half(0.01),
    "+3 %": second_half(0.03),
    "lag": lag,
    "drift": drift,
    "spike": spike,
    "reversal": lambda loss: loss[::-1],
    "NaN": second_half(math.nan),
}


def ours(a: Array, b: Array) -> bool:
    """Whether our gate flags the pair."""
    left, right = (dict(enumerate(curve.tolist(), start=1)) for curve in (a, b))
    return bool(compare_curves(left, right).faults)


def megatron_lm(a: Array, b: Array) -> bool:
    far = np.count_nonzero(~(np.abs(b - a) <= 0.05 * np.abs(a)))
    return int(far) > max(1, a.size // 100)


def correlation(a: Array, b: Array) -> bool:
    return not float(np.corrcoef(a, b)[0, 1]) >= 0.95


GATES = {"nightbridge": ours, "Megatron-LM": megatron_lm, "correlation": correlation}


def interval(hits: int, total: int) -> str:
    """A share with Wilson's 95 % interval, in percent."""
    z, share = 1.96, hits / total
    centre = (share + z * z / (2 * total)) / (1 + z * z / total)
    half = z / (1 + z * z / total) * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    return f"{100 * share:5.1f} [{100 * max(0, centre - half):4.1f}-{100 * min(1, centre + half):5.1f}]"


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--losses", type=Path, help="losses of real runs, .json.gz")
    parser.add_argument("--pairs", type=int, default=300, help="synthetic pairs, where there is no file")
    given = parser.parse_args(arguments)
    pairs = read_pairs(given.losses) if given.losses else synthetic_pairs(given.pairs, 11)
    print(f"{len(pairs)} {'real' if given.losses else 'synthetic'} pairs; flagged, % with 95 % interval")
    print(f"{'':10}" + "".join(f"{name:22}" for name in GATES))
    for name, fault in FAULTS.items():
        flagged = (sum(gate(a, fault(b)) for a, b in pairs) for gate in GATES.values())
        print(f"{name:10}" + "".join(f"{interval(hits, len(pairs)):22}" for hits in flagged))


if __name__ == "__main__":
    main(sys.argv[1:])
