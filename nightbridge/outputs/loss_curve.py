"""A loss curve in a few characters: two runs with the same digest had the same loss at every iteration, bit for bit."""

import hashlib
import math
from typing import TYPE_CHECKING

from nightbridge.outputs.curves import LOG_FILE, METRICS, Curves

if TYPE_CHECKING:
    import pandas as pd

_ANCHORS = 5


def loss_digest(curves: Curves) -> str | None:
    """`<source>:<sha256>` over every recorded iteration and its loss, None without a loss.

    Hashed are, in ascending order, the iteration as 8 and the loss as 8 bytes (int64 and IEEE double, little endian;
    any NaN is the same NaN). The source is `tensorboard`, `log`, or `mixed`: the log rounds to seven digits, so only
    digests of one source can be compared.
    """
    import numpy as np

    losses = curves.steps["loss"]
    if not losses.notna().any():
        return None
    pairs = np.empty(len(losses), dtype=[("step", "<i8"), ("loss", "<f8")])
    pairs["step"] = losses.index.to_numpy()
    pairs["loss"] = np.where(losses.isna(), np.nan, losses.to_numpy())
    return f"{_source(curves)}:{hashlib.sha256(pairs.tobytes()).hexdigest()}"


def loss_anchors(curves: Curves) -> "tuple[tuple[int, float], ...]":
    """A few points of the curve, first and last among them, to see at a glance where two curves part."""
    losses: pd.Series[float] = curves.steps["loss"]
    finite = losses[losses.map(math.isfinite)]
    last = len(finite) - 1
    positions = sorted({round(last * part / (_ANCHORS - 1)) for part in range(_ANCHORS)}) if len(finite) else []
    return tuple((int(finite.index[position]), float(finite.iloc[position])) for position in positions)


def _source(curves: Curves) -> str:
    rows = curves.table[(curves.table["tag"] == METRICS["loss"].tag) & (curves.table["step"] > 0)]
    of_log = (rows.loc[~rows["superseded"], "file"] == LOG_FILE).tolist()
    return "log" if all(of_log) else "mixed" if any(of_log) else "tensorboard"
