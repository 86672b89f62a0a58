"""Configurations broken by seed, judged by nightbridge and by Megatron-Bridge's own code on a CPU.

Each mutation of a dumped ConfigContainer is one or a few overrides of one kind. Megatron-Bridge's answer is that of
what a job runs before it trains: Hydra's merge (`process_config_with_overrides`), `runtime_config_update`, which ends
in `ConfigContainer.validate()`, then Megatron-Core's calculator of micro batches and its division of layers among
pipeline stages. What needs a GPU (Transformer Engine, NVRx) is a module of empty classes. nightbridge's answer is that
of `nightbridge validate DUMP --gpus 8 --override ...`.

    PYTHONPATH=. python benchmarks/containers.py DUMP [--python PYTHON --checkout FOLDER] [--count N] [--seed N]

FOLDER is a checkout of Megatron-Bridge with 3rdparty/Megatron-LM, and PYTHON has torch, transformers, hydra-core and
einops. Without them only nightbridge answers. The first three of each disagreement are printed.
"""

import argparse
import json
import os
import random
import subprocess
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from nightbridge.errors import InvalidInput
from nightbridge.launch.config_container import ConfigContainer, read_container, with_overrides
from nightbridge.rules import check_container, errors_of

GPUS = 8
CORE = "model.transformer"

# Runs where torch is: lists of overrides on stdin as JSON, what the code raised for each on stdout; null where nothing.
BRIDGE = r"""
import copy, importlib.abc, importlib.machinery, importlib.metadata, io, json, logging, os, sys, types
import typing, typing_extensions
typing.override = typing_extensions.override
WITHOUT_GPU = ("transformer_engine", "apex", "flash_attn", "causal_conv1d", "mamba_ssm", "nvidia_resiliency_ext", "fla",
               "megatron.energon", "deep_ep", "grouped_gemm", "modelopt", "multistorageclient")
class Meta(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Empty
class Empty(metaclass=Meta):
    def __init__(self, *args, **kwargs): pass
    def __call__(self, *args, **kwargs): return Empty()
class Module(types.ModuleType):
    def __getattr__(self, name):
        if name == "__version__":
            return "2.16.0"
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (Empty,), {})
class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path, target=None):
        if any(name == known or name.startswith(known + ".") for known in WITHOUT_GPU):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
    def create_module(self, spec):
        module = Module(spec.name)
        module.__path__ = []
        return module
    def exec_module(self, module): pass
sys.meta_path.insert(0, Finder())
version = importlib.metadata.version
importlib.metadata.version = lambda name: "2.16.0" if name.startswith("transformer_engine") else version(name)
logging.disable(logging.CRITICAL)
printed, sys.stdout = sys.stdout, io.StringIO()
from megatron.bridge.training.config import ConfigContainer, runtime_config_update
from megatron.bridge.training.utils.omegaconf_utils import process_config_with_overrides
from megatron.core.num_microbatches_calculator import (
    destroy_num_microbatches_calculator, init_num_microbatches_calculator,
)
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.training.config.instantiate_utils import InstantiationMode
import yaml
dump = yaml.safe_load(open(sys.argv[1]))
def container():
    return ConfigContainer.from_dict(copy.deepcopy(dump), mode=InstantiationMode.LENIENT)
def start(overrides):
    config = process_config_with_overrides(container(), cli_overrides=overrides)
    runtime_config_update(config)
    train, model = config.train, config.model.transformer
    destroy_num_microbatches_calculator()
    init_num_microbatches_calculator(
        0, train.rampup_batch_size, train.global_batch_size, train.micro_batch_size, config.data_parallel_size,
        train.decrease_batch_size_if_needed,
    )
    virtual = model.virtual_pipeline_model_parallel_size
    for stage in range(model.pipeline_model_parallel_size):
        get_num_layers_to_build(model, vp_stage=0 if virtual else None, pp_rank=stage)
environment, answers = dict(os.environ), []
for overrides in json.load(sys.stdin):
    os.environ.clear()
    os.environ.update(environment)
    try:
        start(overrides)
        answers.append(None)
    except Exception as error:
        answers.append(f"{type(error).__name__}: {error}"[:300])
json.dump(answers, printed)
"""

Mutation = list[str]
Draw = random.Random


def moved(draw: Draw, dump: ConfigContainer) -> Mutation:
    """A field of the transformer, named where it is, or where it was before v0.6.0."""
    fields = dump.table["model"]["transformer"]
    name = draw.choice(sorted(key for key, value in fields.items() if _is_plain(value) and not key.startswith("_")))
    return [f"{draw.choice((CORE, 'model'))}.{name}={_text(fields[name])}"]


def types(draw: Draw, dump: ConfigContainer) -> Mutation:
    """A value of another type."""
    path, value = draw.choice(_plain_fields(dump))
    wrong = {bool: ("maybe", "[1,2]"), int: ("abc", "[1,2]", "1.5", "true"), float: ("three", "[1,2]")}
    return [f"{path}={draw.choice(wrong.get(type(value), ('[1,2]', '{a: 1}')))}"]


def graphs(draw: Draw, _dump: ConfigContainer) -> Mutation:
    """CUDA graphs: how they are made, of what, and what goes with them."""
    words = [f"{CORE}.cuda_graph_impl={draw.choice(('none', 'local', 'transformer_engine', 'full_iteration', 'te'))}"]
    modules = ("attn", "mlp", "moe", "moe_router", "moe_preprocess", "full_iteration", "mamba")
    kinds: list[Callable[[], list[str]]] = [
        lambda: [f"{CORE}.cuda_graph_modules=[{','.join(draw.sample(modules, draw.randint(1, 2)))}]"],
        lambda: [f"{CORE}.inference_cuda_graph_scope={draw.choice(('none', 'layer', 'block'))}"],
        lambda: ["rng.te_rng_tracker=true", f"{CORE}.use_te_rng_tracker=true"],
        lambda: [f"{CORE}.cpu_offloading=true", f"{CORE}.cpu_offloading_num_layers={draw.randint(0, 4)}"],
        lambda: [
            f"{CORE}.recompute_granularity={draw.choice(('full', 'selective'))}",
            *(f"{CORE}.recompute_{field}" for field in ("method=uniform", "num_layers=1") * draw.randint(0, 1)),
        ],
        lambda: ["rerun_state_machine.check_for_nan_in_loss=false", "ddp.check_for_nan_in_grad=false"],
    ]
    return [*words, *(word for kind in draw.sample(kinds, draw.randint(0, 3)) for word in kind())]


def precision(draw: Draw, _dump: ConfigContainer) -> Mutation:
    """A recipe of mixed precision by its name, right or misspelt."""
    base, scaling = draw.choice(("bf16", "fp16")), draw.choice(("", "_with_mxfp8", "_with_fp8_current_scaling"))
    name = f"{base}{scaling}_mixed"
    place = draw.randrange(len(name))
    middle = draw.choice((name[place], "", name[place] * 2, "x"))
    return [f"mixed_precision={draw.choice((name[:place] + middle + name[place + 1 :], 'fp32', 'fp8', base, name))}"]


def duration(draw: Draw, _dump: ConfigContainer) -> Mutation:
    """How long it trains, warms up and decays."""
    numbers = (0, -1, 1, 10, 50, 100, "null")
    names = (*("train.train_iters", "train.train_samples", "scheduler.lr_decay_iters", "scheduler.lr_warmup_iters"),)
    more = ("scheduler.lr_decay_samples", "scheduler.lr_warmup_samples", "scheduler.lr_warmup_fraction")
    shares = (0, 0.1, 0.5, 1.0, 1.5, "null")
    return [
        f"{name}={draw.choice(shares if name.endswith('fraction') else numbers)}"
        for name in draw.sample((*names, *more), draw.randint(1, 2))
    ]


def deterministic(draw: Draw, _dump: ConfigContainer) -> Mutation:
    """Deterministic mode, with and without what it needs."""
    algorithm = draw.choice(("Ring", "Tree", "^NVLS", "NVLS", "ring", "CollnetChain", "", None))
    return [
        f"model.transformer.deterministic_mode={draw.choice(('true', 'true', 'true', 'false'))}",
        *([] if algorithm is None else [f"+env_vars.NCCL_ALGO='{algorithm}'"]),
        *draw.sample(
            (f"{CORE}.cross_entropy_loss_fusion={draw.choice(('true', 'false'))}", f"{CORE}.attention_backend=flash"), 1
        ),
    ]


def batches(draw: Draw, _dump: ConfigContainer) -> Mutation:
    """Batch sizes of training and evaluation, some unset."""
    names = ("train.global_batch_size", "train.micro_batch_size")
    more = ("validation.eval_global_batch_size", "validation.eval_micro_batch_size")
    sizes = (1, 2, 3, 4, 7, 8, 12, 16, 64, 100, 128, "null")
    return [f"{name}={draw.choice(sizes)}" for name in draw.sample((*names, *more), draw.randint(1, 3))]


def parallel(draw: Draw, _dump: ConfigContainer) -> Mutation:
    """Sizes of the model and of what splits it."""
    sizes = {
        "tensor_model_parallel_size": (1, 2, 3, 4, 8, 16),
        "pipeline_model_parallel_size": (1, 2, 3, 4, 8),
        "context_parallel_size": (1, 2, 3, 4),
        "virtual_pipeline_model_parallel_size": (1, 2, 3, 4, "null"),
        "expert_model_parallel_size": (1, 2, 4),
        "num_moe_experts": (4, 6, 8, "null"),
        "num_layers": (8, 30, 32),
        "num_attention_heads": (30, 32),
        "num_query_groups": (3, 8),
        "sequence_parallel": ("true", "false"),
        "pipeline_dtype": ("bf16",),
    }
    return [f"{CORE}.{name}={draw.choice(sizes[name])}" for name in draw.sample(sorted(sizes), draw.randint(1, 4))]


def switches(draw: Draw, dump: ConfigContainer) -> Mutation:
    """One to three switches anywhere, turned over."""
    fields = [(path, value) for path, value in _plain_fields(dump) if isinstance(value, bool)]
    return [f"{path}={_text(not value)}" for path, value in draw.sample(fields, draw.randint(1, 3))]


KINDS = (moved, types, graphs, precision, duration, deterministic, batches, parallel, switches)


def _is_plain(value: object) -> bool:
    return isinstance(value, bool | int | float | str)


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _plain_fields(dump: ConfigContainer) -> list[tuple[str, Any]]:
    """Every plain value of the dump, in its order, but those that name classes."""

    def below(table: Mapping[str, Any], prefix: str) -> list[tuple[str, Any]]:
        found: list[tuple[str, Any]] = []
        for key, value in table.items():
            if isinstance(value, Mapping):
                found += below(value, f"{prefix}{key}.") if "_target_" in value and "_args_" not in value else []
            elif _is_plain(value) and not key.startswith("_"):
                found.append((prefix + key, value))
        return found

    return below(dump.table, "")


def refused(dump: ConfigContainer, overrides: Mutation) -> str | None:
    """What nightbridge says against a mutation."""
    try:
        found = errors_of(check_container(with_overrides(dump, overrides), GPUS))
    except InvalidInput as error:
        return str(error)
    return "; ".join(map(str, found)) or None


def bridge_answers(python: str, checkout: Path, dump: Path, mutations: list[Mutation]) -> list[str | None]:
    """What Megatron-Bridge says against each mutation."""
    path = f"{checkout}/src:{checkout}/3rdparty/Megatron-LM"
    done = subprocess.run(
        [python, "-W", "ignore", "-c", BRIDGE, str(dump.resolve())],
        input=json.dumps(mutations),
        env={**os.environ, "PYTHONPATH": path, "WORLD_SIZE": str(GPUS), "RANK": "0", "LOCAL_RANK": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    answers: list[str | None] = json.loads(done.stdout)
    return answers


def main() -> None:
    """Print, for each kind, how often both say the same, and what they disagree about."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dump", type=Path)
    parser.add_argument("--python", help="Interpreter of an environment with torch.")
    parser.add_argument("--checkout", type=Path, help="Megatron-Bridge with its submodule.")
    parser.add_argument("--count", type=int, default=150, help="Mutations of each kind.")
    parser.add_argument("--seed", type=int, default=221123)
    parser.add_argument("--show", type=int, default=3, help="Disagreements to print for each kind and side.")
    parser.add_argument("--only", nargs="*", default=[kind.__name__ for kind in KINDS], help="Kinds of mutations.")
    args = parser.parse_args()
    dump = read_container(args.dump)
    if found := refused(dump, []):
        raise SystemExit(f"nightbridge refuses the dump itself: {found}")
    for kind in (kind for kind in KINDS if kind.__name__ in args.only):
        draw = random.Random(f"{args.seed} {kind.__name__}")
        mutations = [kind(draw, dump) for _ in range(args.count)]
        ours = [refused(dump, mutation) for mutation in mutations]
        if args.python is None:
            print(f"{kind.__name__:14} nightbridge refuses {sum(map(bool, ours))} of {len(ours)}")
            continue
        theirs = bridge_answers(args.python, args.checkout, args.dump, mutations)
        counts = Counter((bool(a), bool(b)) for a, b in zip(theirs, ours, strict=True))
        both, neither = counts[True, True], counts[False, False]
        print(
            f"{kind.__name__:14} {both:4} of {both + counts[True, False]:4} refusals refused; "
            f"{neither:4} of {counts[False, True] + neither:4} accepted ones accepted",
            flush=True,
        )
        for side, name in (((True, False), "missed"), ((False, True), "refused by us alone")):
            shown = [row for row in zip(mutations, theirs, ours, strict=True) if (bool(row[1]), bool(row[2])) == side]
            for mutation, said, own in shown[: args.show]:
                print(f"    {name}: {' '.join(mutation)}: {said or own}")


if __name__ == "__main__":
    main()
