"""The `[cmd_args]` table of a heterogeneous-parallel test: two grids, a schedule, and where it saves."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, ValidationError

from nightbridge.config.arguments import CMD_ARGS, Arguments
from nightbridge.config.documents import Layered
from nightbridge.config.findings import Findings
from nightbridge.models import Model, SweepAxis

Text = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]
Count = Annotated[int, Field(ge=1, le=2**62)]
Amount = Annotated[int, Field(ge=0, le=2**62)]
Finite = Annotated[float, Field(allow_inf_nan=False)]


class GridArguments(Model):
    """`[cmd_args.encoder]` or `[cmd_args.language_model]`."""

    nodes: Count | None = None
    tp: Count = 1
    cp: Count = 1
    pp: Count = 1
    dp: Count = 1
    ep: Count = 1
    etp: Count = 1


class HeteroArguments(Model):
    """The arguments of Megatron-LM's training program `examples/mimo`; a key means here what it means elsewhere.

    Flags that are not here go into `[extra_cmd_args]`, by their own names.
    """

    encoder: GridArguments
    language_model: GridArguments
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


GRID_FIELDS = frozenset({"encoder", "language_model"})


def read_hetero_arguments(source: Layered, findings: Findings) -> Arguments:
    """Read the merged `[cmd_args]` of a heterogeneous-parallel test; whatever is wrong with it goes to `findings`.

    A list where one value is expected is a sweep; a grid is swept over by one test per topology.
    """
    table = source.table.get(CMD_ARGS)
    if not isinstance(table, Mapping):
        return Arguments()
    swept = {key: value for key, value in table.items() if isinstance(value, list)}
    if empty := [key for key, value in swept.items() if not value]:
        for key in empty:
            findings.problem((CMD_ARGS, key), "is an empty list, a sweep over nothing; write a value or remove it")
        return Arguments()
    points = [{**table, **{key: values[0] for key, values in swept.items()}}]
    points += [{**points[0], key: value} for key, values in swept.items() for value in values[1:]]
    read = [_read(point, findings) for point in points]
    first = read[0]
    if first is None or None in read:
        return Arguments()
    kept = {key: value for key, value in first.items() if key not in swept}
    later = iter(read[1:])
    axes = []
    for key, values in swept.items():
        taken = [first[key], *(point[key] for _ in values[1:] if (point := next(later)) is not None)]
        axes.append(SweepAxis(field=f"{CMD_ARGS}.{key}", values=tuple(dict.fromkeys(taken))))
    return Arguments(values=kept, axes=tuple(axes))


def _read(table: Mapping[str, Any], findings: Findings) -> dict[str, Any] | None:
    try:
        return HeteroArguments.model_validate(table).model_dump(exclude_unset=True, exclude_none=True)
    except ValidationError as error:
        for problem in error.errors(include_url=False, include_context=False, include_input=False):
            _tell(problem["type"], problem["loc"], problem["msg"], findings)
        return None


def _tell(kind: str, path: tuple[int | str, ...], message: str, findings: Findings) -> None:
    where = (CMD_ARGS, *path)
    if kind == "extra_forbidden":
        known = GridArguments.model_fields if path[0] in GRID_FIELDS else HeteroArguments.model_fields
        if not any(line.startswith(f"{findings.source.where(where)}: ") for line in findings.problems):
            findings.unknown(where, known)
    elif kind == "missing":
        findings.problem_once(where, "is required")
    else:
        findings.problem_once(where, message[:1].lower() + message[1:])
