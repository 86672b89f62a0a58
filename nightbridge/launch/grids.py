"""Two process grids of one job: a vision encoder and a language model on disjoint ranks, the encoder's first."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nightbridge.models import TestDefinition

GPUS_PER_NODE = 8
"""GPUs of a node in every published topology; a test or a cluster may say otherwise."""


@dataclass(frozen=True)
class Grid:
    """How one module is spread over its ranks.

    Attributes:
        nodes: Nodes that the test says it has; None where it leaves them to follow from the sizes.
        tp: Tensor parallel.
        cp: Context parallel.
        pp: Pipeline parallel.
        dp: Data parallel.
        ep: Expert parallel.
        etp: Expert tensor parallel.

    """

    nodes: int | None = None
    tp: int = 1
    cp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    etp: int = 1

    @property
    def ranks(self) -> int:
        """GPUs of the grid: the dense factorisation says it, the experts share the same ranks."""
        return self.tp * self.cp * self.pp * self.dp

    @property
    def expert_block(self) -> int:
        """Ranks of one copy of all experts; the grid must be a whole number of them."""
        return self.etp * self.ep * self.pp


@dataclass(frozen=True)
class Grids:
    """Encoder and language model of one run."""

    encoder: Grid
    language_model: Grid

    @property
    def ranks(self) -> int:
        """GPUs of the whole job."""
        return self.encoder.ranks + self.language_model.ranks

    @property
    def lanes_per_encoder(self) -> float:
        """How many data-parallel lanes of the language model one encoder replica feeds; must be whole."""
        return self.language_model.dp / self.encoder.dp


def grids_of(test: TestDefinition) -> Grids:
    """The grids of `[cmd_args.encoder]` and `[cmd_args.language_model]`; 1 where they are silent."""
    return Grids(_grid(test.cmd_args.get("encoder")), _grid(test.cmd_args.get("language_model")))


def _grid(table: Mapping[str, Any] | None) -> Grid:
    return Grid(**(table or {}))


def micro_batches(test: TestDefinition) -> float | None:
    """Micro-batches of one step: global batch / (micro batch x data parallel of the language model); must be whole.

    None where the test names no global batch size.
    """
    global_batch = test.cmd_args.get("gb")
    if not global_batch:
        return None
    return float(global_batch / (test.cmd_args.get("mb", 1) * grids_of(test).language_model.dp))
