"""Which rows of a scalar table no longer count, because the run went back in its steps and did them again."""

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


def done_again(tags: "NDArray[np.int32]", steps: "NDArray[np.int64]") -> "NDArray[np.bool_]":
    """Which rows, in the order of writing, a later row of their tag has done again: its step is no larger.

    A run that goes on from a checkpoint writes into another file, or goes back in its steps. What the life before it
    had after the checkpoint is no part of the run, even where the later life did not come as far. Steps below 1 are
    no iterations: of these only equal ones are done again.
    """
    again = np.zeros(len(steps), dtype=bool)
    # Stable: the rows of each tag stay in their order. Of 16 bits numpy sorts by counting.
    order = np.argsort(tags.astype(np.int16) if tags.max(initial=0) < 1 << 15 else tags, kind="stable")
    tags, steps = tags[order], steps[order]
    same_tag = tags[1:] == tags[:-1]
    back = np.flatnonzero(same_tag & (steps[1:] <= steps[:-1]))
    borders = np.concatenate(([0], np.flatnonzero(~same_tag) + 1, [len(tags)]))
    # A tag whose steps only grow, as almost every one's do, has nothing done again.
    for segment in np.unique(np.searchsorted(borders, back, side="right")).tolist():
        rows = slice(borders[segment - 1], borders[segment])
        again[order[rows]] = _again_of_one_tag(steps[rows])
    return again


def _again_of_one_tag(steps: "NDArray[np.int64]") -> "NDArray[np.bool_]":
    again = np.zeros(len(steps), dtype=bool)
    iterations, others = np.flatnonzero(steps > 0), np.flatnonzero(steps <= 0)
    later = np.minimum.accumulate(steps[iterations][::-1])[::-1]
    again[iterations[:-1]] = steps[iterations[:-1]] >= later[1:]
    if len(others):
        again[others] = True
        again[others[len(others) - 1 - np.unique(steps[others][::-1], return_index=True)[1]]] = False
    return again
