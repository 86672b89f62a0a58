"""Other programs' names for what Megatron-Bridge's TensorBoard tags say, and their units."""

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import pandas as pd


class OtherTag(NamedTuple):
    """A tag that says the same as one of Megatron-Bridge's, once it is multiplied by `factor`."""

    usual: str
    name: str
    factor: float


OTHER_TAGS = (
    OtherTag("iteration-time", "iteration-time-ms", 1e-3),  # the heterogeneous loop of examples/mimo
    OtherTag("throughput/tflops/device", "throughput", 1.0),
    OtherTag("memory/mem-max-allocated-gigabytes", "mem-max-allocated-bytes", 1e-9),
)
"""Megatron-LM's own, where they differ. Its `iteration-time`, `lm loss` and the like are the same."""


def with_usual_tags(table: "pd.DataFrame") -> "pd.DataFrame":
    """Add the values under Megatron-Bridge's tags to a scalar table that has them under other ones only.

    What the program wrote stays in the table as well. A tag that it wrote itself is never added to.
    """
    import pandas as pd

    present = set(table["tag"].unique())
    added = [
        _renamed(table[table["tag"] == other.name], other)
        for other in OTHER_TAGS
        if other.name in present and other.usual not in present
    ]
    return pd.concat([table, *added], ignore_index=True) if added else table


def _renamed(rows: "pd.DataFrame", other: OtherTag) -> "pd.DataFrame":
    return rows.assign(tag=other.usual, value=rows["value"] * other.factor)
