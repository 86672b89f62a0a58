"""The `[cmd_args]` of a heterogeneous-parallel test, and the two process grids of its job.

A vision encoder and a language model train on disjoint ranks, the encoder's first.
"""

import re
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, StringConstraints
from pydantic_core import PydanticCustomError

from nightbridge.models import Model, TestDefinition

DEFAULT_GPUS_PER_NODE = 8
"""GPUs of a node in every published topology; a test or a cluster may override it."""


def _number(value: object) -> object:
    """Refuse what pydantic would take for a number as well: a switch."""
    if isinstance(value, bool):
        raise PydanticCustomError("number", "must be a number, not true or false")
    return value


def _whole_number(value: object) -> object:
    """Refuse a switch, and a text such as 0-3, which pydantic would take for -3."""
    if isinstance(value, str) and re.search(r".[+-]", value.strip()):
        raise PydanticCustomError("number", "must be a whole number")
    return _number(value)


Text = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]
Whole = Annotated[int, BeforeValidator(_whole_number)]
Count = Annotated[Whole, Field(ge=1, le=2**62)]
Amount = Annotated[Whole, Field(ge=0, le=2**62)]
Finite = Annotated[float, Field(allow_inf_nan=False), BeforeValidator(_number)]


class ProcessGrid(Model):
    """How one module is spread over its ranks: `[cmd_args.encoder]` or `[cmd_args.language_model]`.

    Attributes:
        nodes: Nodes of the grid as written; None where they follow from the sizes.
        tp: Tensor parallel.
        cp: Context parallel.
        pp: Pipeline parallel.
        dp: Data parallel.
        ep: Expert parallel.
        etp: Expert tensor parallel.
        weight_shards: Parts of each dense weight, a multiple of `tp`; None for as many as `tp`.
        expert_weight_shards: Parts of each expert's weights, a multiple of `etp`; None for as many as `etp`.
    """

    nodes: Count | None = None
    tp: Count = 1
    cp: Count = 1
    pp: Count = 1
    dp: Count = 1
    ep: Count = 1
    etp: Count = 1
    weight_shards: Count | None = None
    expert_weight_shards: Count | None = None

    @property
    def data_ranks(self) -> int:
        """Ranks that read data of their own: `dp`, times the ranks over which a weight is spread beyond `tp`."""
        return self.dp * max((self.weight_shards or self.tp) // self.tp, 1)

    @property
    def ranks(self) -> int:
        """GPUs of the grid, by its dense sizes; the experts share the same ranks."""
        return self.tp * self.cp * self.pp * self.data_ranks

    @property
    def expert_block(self) -> int:
        """Ranks of one copy of all experts; the grid must be a whole number of them."""
        return self.etp * self.ep * self.pp * max((self.expert_weight_shards or self.etp) // self.etp, 1)


@dataclass(frozen=True)
class Grids:
    """Encoder and language model of one run; without an encoder where the language model runs alone."""

    encoder: ProcessGrid | None
    language_model: ProcessGrid

    @property
    def ranks(self) -> int:
        """GPUs of the whole job."""
        return (self.encoder.ranks if self.encoder else 0) + self.language_model.ranks


def grids_of(test: TestDefinition) -> Grids:
    """The grids of `[cmd_args.encoder]` and `[cmd_args.language_model]`, with 1 for each size that is not written."""
    encoder, language_model = (test.cmd_args.get(name) or {} for name in ("encoder", "language_model"))
    alone = test.cmd_args.get("llm_only") and not encoder
    return Grids(None if alone else ProcessGrid(**encoder), ProcessGrid(**language_model))


class HeteroArguments(Model):
    """The keys of `[cmd_args]` of a heterogeneous-parallel test.

    Each is passed to the program as an option (`option_of_field`), except for those of `NOT_PASSED`. Options that are
    not listed here go into `[extra_cmd_args]`, by their own names.
    """

    encoder: ProcessGrid | None = None
    language_model: ProcessGrid
    llm_only: bool | None = None
    container_image: Text | None = None
    gpus_per_node: Count | None = None
    program: Text | None = None
    torchrun: Text | None = None
    model_provider: Text | None = None
    training_stage: Literal["stage1", "stage2", "stage3"] | None = None
    freeze_projection: bool | None = None
    mb: Count | None = None
    gb: Count
    seq_length: Count | None = None
    num_layers: Count | None = None
    hidden_size: Count | None = None
    num_attention_heads: Count | None = None
    max_position_embeddings: Count | None = None
    num_moe_experts: Count | None = None
    max_steps: Count | None = None
    train_samples: Count | None = None
    lr: Finite | None = None
    min_lr: Finite | None = None
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] | None = None
    warmup_iters: Amount | None = None
    lr_warmup_samples: Amount | None = None
    lr_decay_samples: Count | None = None
    lr_wsd_decay_samples: Count | None = None
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] | None = None
    save_dir: Text | None = None
    load_dir: Text | None = None
    save_interval: Count | None = None
    load_nemotron_checkpoint: Text | None = None
    finetune: bool | None = None
    no_save_optim: bool | None = None
    no_save_rng: bool | None = None
    no_load_optim: bool | None = None
    no_load_scheduler: bool | None = None
    no_load_rng: bool | None = None
    dist_ckpt_optim_fully_reshardable: bool | None = None
    log_interval: Count | None = None
    overlap_param_gather: bool | None = None
    ddp_num_buckets: Count | None = None
    ddp_bucket_size: Amount | None = None
    ddp_pad_buckets_for_high_nccl_busbw: bool | None = None
    dynamic_resolution: bool | None = None
    dynamic_resolution_min_patches: Count | None = None
    dynamic_resolution_max_patches: Count | None = None
    num_image_tiles: Count | None = None
    use_thumbnail: bool | None = None
    correct_encoder_grad_for_partial_participation: bool | None = None
    num_workers: Amount | None = None
    tokenizer_model: Text | None = None
    vocab_size: Count | None = None


NOT_PASSED = frozenset({"encoder", "language_model", "container_image", "gpus_per_node", "program", "torchrun"})
"""Keys that are no options of the program."""

_OPTIONS = {
    "mb": "--micro-batch-size",
    "gb": "--global-batch-size",
    "num_moe_experts": "--num-experts",
    "max_steps": "--train-iters",
    "warmup_iters": "--lr-warmup-iters",
    "save_dir": "--save",
    "load_dir": "--load",
}

PASSED = tuple(field for field in HeteroArguments.model_fields if field not in NOT_PASSED)
"""Keys that are passed on, in the order in which they are written."""


def option_of_field(field: str) -> str:
    """The option of a key: its own name with dashes, unless Megatron-LM has another."""
    return _OPTIONS.get(field) or f"--{field.replace('_', '-')}"
