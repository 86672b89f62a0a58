"""How many damaged checkpoints are called whole, and how many whole ones damaged, with PyTorch's own answer beside it.

    .venv/bin/python benchmarks/checkpoint_damage.py --torch-python PYTHON [--seed 17] [--copies 4] [--keep FOLDER]

PYTHON needs torch (CPU will do), safetensors and PyYAML. Ranks of a gloo group save small checkpoints with
torch.distributed.checkpoint in the layouts below. Copies of them are damaged in every way that is listed, PyTorch loads
each and compares every value, and `checkpoint_state` judges the same files, as `nightbridge checkpoint` does. Counted
apart is what no checksum can tell: bit flips in files that have none, and whole files of another save.
"""

import argparse
import io
import json
import os
import pickle
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

ITERATION = 10
NO_CHECKSUM = (
    ".metadata",
    "run_config.yaml",
    "metadata.json",
    ".safetensors",
    ".safetensors.index.json",
    "config.json",
)
CONFIG = "_target_: megatron.bridge.training.config.ConfigContainer\ncheckpoint:\n  ckpt_format: {format}\n"
CONFIG += "model:\n  hidden_size: 8\n  num_layers: 2\ntrain:\n  global_batch_size: 16\n  train_iters: 10\n"

# Layout: ranks, threads of each writer, whether torch flattens the state dict, and the files beside the shards.
LAYOUTS: dict[str, tuple[int, int, bool, tuple[str, ...]]] = {
    "Bridge, common.pt": (2, 1, False, ("common.pt", "metadata.json", "train_state.pt", "run_config.yaml")),
    "Bridge, common state in shards": (2, 1, False, ("metadata.json", "train_state.pt", "run_config.yaml")),
    "Bridge, 2 threads a rank": (2, 2, False, ("common.pt", "metadata.json", "train_state.pt", "run_config.yaml")),
    "Bridge, one rank": (1, 1, False, ("common.pt", "metadata.json", "train_state.pt", "run_config.yaml")),
    "Bridge, fsdp_dtensor": (2, 1, True, ("train_state.pt", "run_config.yaml")),
    "Megatron-LM, common.pt": (2, 1, False, ("common.pt", "metadata.json")),
    "Megatron-LM, common state in shards": (2, 2, False, ("metadata.json",)),
    "Megatron-LM, nested by torch": (2, 1, True, ("common.pt", "metadata.json")),
    "Megatron-LM, torch_dcp": (2, 1, True, ()),
    "torch.distributed.checkpoint": (2, 1, True, ()),
    "Megatron-LM, torch": (1, 1, False, ()),
    "Hugging Face": (1, 1, False, ()),
    "checksums off": (1, 1, True, ()),
}
WITHOUT_TRACKER = ("torch.distributed.checkpoint", "checksums off", "Hugging Face")


def folder_of(root: Path) -> Path:
    """Where the checkpoint lies in the folder of one case."""
    return next(path for path in (root / f"iter_{ITERATION:07d}", root / "step-10") if path.is_dir())


# --- in PYTHON: saving -----------------------------------------------------------------------------------------------


def state_of(copy: int) -> dict[str, Any]:
    """The values of one copy; all copies have the same names, types and shapes."""
    import torch

    made = torch.Generator().manual_seed(copy)
    return {
        "model.decoder.weight": torch.randn(16, 8, generator=made),
        "model.decoder.bias": torch.randn(8, generator=made).bfloat16(),
        "optimizer.exp_avg": torch.randn(4, 4, generator=made).half(),
        "optimizer.step": torch.tensor(1000 + copy),
        "mask": torch.randn(6, generator=made) > 0,
        "scales": torch.rand(8, generator=made).to(torch.float8_e4m3fn),
        "empty": torch.zeros(0, 3),
        "common_state": {"iteration": ITERATION, "consumed": 160 + copy, "names": ["a", "b"]},
    }


def save(layout: str, copy: int, rank: int, root: Path) -> None:
    """Save one copy in a layout, as one rank of the group."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    ranks, threads, nested, files = LAYOUTS[layout]
    path = root / ("step-10" if layout in WITHOUT_TRACKER else f"iter_{ITERATION:07d}")
    state = state_of(copy)
    if rank == 0:
        path.mkdir(parents=True)
        torch.save(state, root / "reference")
    if layout in ("Hugging Face", "Megatron-LM, torch"):
        save_elsewise(layout, state, path)
    else:
        mesh = init_device_mesh("cpu", (ranks,))
        if "common.pt" in files or layout == "Bridge, fsdp_dtensor":
            state.pop("common_state")
        for name in ("model.decoder.weight", "optimizer.exp_avg"):
            state[name] = distribute_tensor(state[name], mesh, [Shard(0)])
        torch.serialization.set_crc32_options(layout != "checksums off")
        dcp.save(
            nest(state) if nested else state,
            storage_writer=dcp.FileSystemWriter(path, thread_count=threads),
            planner=DefaultSavePlanner(flatten_state_dict=nested, flatten_sharded_tensors=nested),
        )
    if rank == 0:
        save_files(layout, state_of(copy), path)


def nest(state: dict[str, Any]) -> dict[str, Any]:
    """Names with dots as dictionaries in dictionaries."""
    result: dict[str, Any] = {}
    for name, value in state.items():
        *outer, last = name.split(".")
        inner = result
        for each in outer:
            inner = inner.setdefault(each, {})
        inner[last] = value
    return result


def save_elsewise(layout: str, state: dict[str, Any], path: Path) -> None:
    """The formats that are not torch.distributed.checkpoint's."""
    import torch
    from safetensors.torch import save_file

    if layout == "Megatron-LM, torch":
        for number in range(2):
            (path / f"mp_rank_{number:02d}").mkdir()
            torch.save(state, path / f"mp_rank_{number:02d}" / "model_optim_rng.pt")
        return
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    files = {f"model-0000{number}-of-00002.safetensors": list(tensors)[number - 1 :: 2] for number in (1, 2)}
    for file, names in files.items():
        save_file({name: tensors[name] for name in names}, path / file)
    index = {"metadata": {}, "weight_map": {name: file for file, names in files.items() for name in names}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    (path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "hidden_size": 8}, indent=2))


def save_files(layout: str, state: dict[str, Any], path: Path) -> None:
    """The files beside the shards, and the trackers."""
    import torch

    contents: dict[str, Callable[[Path], Any]] = {
        "common.pt": lambda to: torch.save(state["common_state"], to),
        "train_state.pt": lambda to: torch.save({"step": torch.tensor(ITERATION), "floats": torch.rand(3)}, to),
        "metadata.json": lambda to: to.write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}'),
        "run_config.yaml": lambda to: to.write_text(
            CONFIG.format(format="fsdp_dtensor" if "fsdp" in layout else "torch_dist")
        ),
    }
    for name in LAYOUTS[layout][3]:
        contents[name](path / name)
    if layout in WITHOUT_TRACKER:
        return
    if (path / "train_state.pt").exists():
        shutil.copy(path / "train_state.pt", path.parent / "latest_train_state.pt")
    (path.parent / "latest_checkpointed_iteration.txt").write_text(str(ITERATION))


def make(folder: Path, copies: int, rank: int, ranks: int) -> None:
    """Save every layout of this many ranks."""
    import torch.distributed

    torch.distributed.init_process_group(
        "gloo", rank=rank, world_size=ranks, init_method=f"file://{folder}/rendezvous-{ranks}"
    )
    for layout in (each for each, (wanted, *_) in LAYOUTS.items() if wanted == ranks):
        for copy in range(copies):
            torch.distributed.barrier()
            save(layout, copy, rank, folder / layout / str(copy))
    torch.distributed.barrier()


# --- in PYTHON: damage, and what PyTorch says about it ---------------------------------------------------------------

Way = tuple[str, str, Callable[[Path], Any]]
"""Kind of damage, the file, and what is done to a copy of it."""


def damages(root: Path, other: Path, chance: random.Random) -> Iterator[Way]:
    """Every way to damage one checkpoint; `other` is another copy in the same layout."""
    for path in sorted(root.rglob("*")):
        if path.is_file() and path.name not in ("reference", "config.json") and path.suffix != ".txt":
            yield from damages_of_file(path, str(path.relative_to(root)), other, chance)
    inside = folder_of(root)
    shards = sorted(inside.glob("*.distcp"))
    for shard in shards:
        name = str(shard.relative_to(root))
        yield "hole of zeros", name, partial(overwrite, piece=bytes(64), chance=chance)
        yield "hole of noise", name, partial(overwrite, piece=chance.randbytes(64), chance=chance)
    if len(shards) > 1:
        yield "swapped", str(shards[0].relative_to(root)), partial(swap, name=shards[1].name)
    if (inside / ".metadata").exists():
        for kind, change in METADATA_CHANGES.items():
            yield kind, str((inside / ".metadata").relative_to(root)), partial(rewrite, change=change)


def damages_of_file(path: Path, name: str, other: Path, chance: random.Random) -> Iterator[Way]:
    """The ways to damage any file."""
    size = path.stat().st_size
    for _ in range(4 if path.suffix in (".distcp", ".safetensors") or path.name == ".metadata" else 2):
        yield "bit flip", name, partial(flip, bit=chance.randrange(size * 8))
    for kept in (0, 1, size // 2, chance.randrange(size), size - 2):
        yield "truncated", name, partial(cut, kept=kept, zeros=0)
    if path.name != "latest_train_state.pt":
        yield "missing", name, Path.unlink
    yield "zeros", name, partial(cut, kept=0, zeros=size)
    for begin in (size // 2, chance.randrange(size), max(size - 200, 1)):
        yield "zero tail", name, partial(cut, kept=begin, zeros=size - begin)
    if path.suffix in (".distcp", ".pt") or path.name == ".metadata":
        yield "of another save", name, partial(shutil.copy, other / name)


def harmless(root: Path) -> Iterator[Way]:
    """What may be done to a whole checkpoint."""
    yield "whole", "", lambda to: None
    for shard in sorted(folder_of(root).glob("*.distcp"))[:1]:
        name = str(shard.relative_to(root))
        yield "bytes appended", name, lambda to: to.write_bytes(to.read_bytes() + b"tail" * 25)
        yield "zeros appended", name, lambda to: to.write_bytes(to.read_bytes() + bytes(4096))
        yield "a stale shard", name, lambda to: shutil.copy(to, to.parent / "__7_0.distcp")


def flip(path: Path, bit: int) -> None:
    """Flip one bit of a file."""
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def cut(path: Path, kept: int, zeros: int) -> None:
    """Keep the beginning of a file, and put zeros behind it."""
    path.write_bytes(path.read_bytes()[:kept] + bytes(zeros))


def overwrite(path: Path, piece: bytes, chance: random.Random) -> None:
    """Write a piece somewhere into a file."""
    with path.open("r+b") as stream:
        stream.seek(chance.randrange(max(path.stat().st_size - len(piece), 1)))
        stream.write(piece)


def swap(one: Path, name: str) -> None:
    """Exchange a file and the one of another name beside it."""
    other = one.parent / name
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)


def rewrite(path: Path, change: Callable[[Any], None]) -> None:
    """Change a `.metadata` as an object."""
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))


def _weight(metadata: Any) -> Any:
    return metadata.state_dict_metadata["model.decoder.weight"]


def _places(metadata: Any) -> list[Any]:
    return list(metadata.storage_data)


def _set_dtype(metadata: Any) -> None:
    import torch

    _weight(metadata).properties.dtype = torch.float16


def _set_size(metadata: Any) -> None:
    import torch

    _weight(metadata).size = torch.Size([12, 8])


def _move_chunk(metadata: Any) -> None:
    import torch

    _weight(metadata).chunks[-1].offsets = torch.Size([4, 0])


METADATA_CHANGES: dict[str, Callable[[Any], Any]] = {
    "an item not stored": lambda metadata: metadata.storage_data.pop(_places(metadata)[0]),
    "an item dropped": lambda metadata: (
        metadata.storage_data.pop(_places(metadata)[-1]),
        metadata.state_dict_metadata.pop("mask", None),
        metadata.storage_data.pop(next(key for key in _places(metadata) if key.fqn == "mask"), None),
    ),
    "another offset": lambda metadata: setattr(metadata.storage_data[_places(metadata)[1]], "offset", 64),
    "another length": lambda metadata: setattr(metadata.storage_data[_places(metadata)[0]], "length", 100),
    "another file": lambda metadata: setattr(
        metadata.storage_data[_places(metadata)[0]], "relative_path", "__9_0.distcp"
    ),
    "two items exchanged": lambda metadata: metadata.storage_data.update(
        {
            _places(metadata)[0]: metadata.storage_data[_places(metadata)[-1]],
            _places(metadata)[-1]: metadata.storage_data[_places(metadata)[0]],
        }
    ),
    "another type": _set_dtype,
    "another size": _set_size,
    "another chunk": _move_chunk,
}


def damage_all(folder: Path, copies: int, seed: int) -> list[dict[str, Any]]:
    """Make every case below `folder`/cases and note what PyTorch says about it."""
    chance = random.Random(seed)
    cases: list[dict[str, Any]] = []
    for layout in LAYOUTS:
        for copy in range(copies):
            root, other = folder / layout / str(copy), folder / layout / str((copy + 1) % copies)
            ways = [(True, way) for way in harmless(root)] + [(False, way) for way in damages(root, other, chance)]
            for whole, (kind, name, change) in ways:
                target = folder / "cases" / str(len(cases))
                shutil.copytree(root, target, ignore=shutil.ignore_patterns("reference"))
                before = {path: path.read_bytes() for path in target.rglob("*") if path.is_file()}
                change(target / name)
                if not whole and before == {path: path.read_bytes() for path in target.rglob("*") if path.is_file()}:
                    shutil.rmtree(target)
                    continue
                answer = pytorch_says(layout, target, root)
                cases.append(
                    {"layout": layout, "copy": copy, "kind": kind, "file": name, "whole": whole, "torch": answer}
                )
    return cases


def pytorch_says(layout: str, root: Path, whole: Path) -> str:
    """`right`, `wrong` or `fails`: what loading every file of a checkpoint and comparing every value gives."""
    try:
        with open(os.devnull, "w") as nothing, redirected(nothing):
            return "right" if loads_right(layout, root, whole) else "wrong"
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        return "fails"


class redirected:
    """What torch prints about a damaged file goes nowhere."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        self.stdout, self.stderr = sys.stdout, sys.stderr
        sys.stdout = sys.stderr = self.stream

    def __exit__(self, *_: object) -> None:
        sys.stdout, sys.stderr = self.stdout, self.stderr


def loads_right(layout: str, root: Path, whole: Path) -> bool:
    """Load everything that a training would; whatever torch raises is for the caller."""
    import torch

    path, original = folder_of(root), folder_of(whole)
    reference = torch.load(whole / "reference", weights_only=False)
    for name in ("common.pt", "train_state.pt", "../latest_train_state.pt", "mp_rank_00/model_optim_rng.pt"):
        if (original / name).exists() and not same(
            torch.load(path / name, weights_only=False), torch.load(original / name, weights_only=False)
        ):
            return False
    for name in ("metadata.json", "run_config.yaml"):
        if (original / name).exists() and parsed(path / name) != parsed(original / name):
            return False
    if layout == "Megatron-LM, torch":
        return same(torch.load(path / "mp_rank_01/model_optim_rng.pt", weights_only=False), reference)
    if layout == "Hugging Face":
        return same_as_safetensors(path, reference)
    return same_as_loaded(layout, path, original, reference)


def parsed(path: Path) -> Any:
    """The content of a small text file."""
    import yaml

    return json.loads(path.read_text()) if path.suffix == ".json" else yaml.safe_load(path.read_text())


def same_as_safetensors(path: Path, reference: dict[str, Any]) -> bool:
    """Compare all files that the index names."""
    import torch
    from safetensors.torch import load_file

    places = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
    loaded = {name: load_file(path / file)[name] for name, file in places.items()}
    return same(loaded, {name: value for name, value in reference.items() if isinstance(value, torch.Tensor)})


def same_as_loaded(layout: str, path: Path, original: Path, reference: dict[str, Any]) -> bool:
    """Let torch.distributed.checkpoint load into zeros, and compare."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

    nested = LAYOUTS[layout][2]
    stored = {
        name for name in reference if name in pickle.loads((original / ".metadata").read_bytes()).state_dict_metadata
    }
    if nested:
        stored |= {"common_state"} if LAYOUTS[layout][3] == () else set()
    wanted = {name: value for name, value in reference.items() if name in stored}
    state = {
        name: torch.zeros_like(value) if isinstance(value, torch.Tensor) else blank(value)
        for name, value in wanted.items()
    }
    into = nest(state) if nested else state
    planner = DefaultLoadPlanner(flatten_state_dict=nested, flatten_sharded_tensors=nested)
    dcp.load(into, checkpoint_id=path, planner=planner, no_dist=True)
    return same(into, nest(wanted) if nested else wanted)


def blank(value: Any) -> Any:
    """An object of the same shape without its content."""
    if isinstance(value, dict):
        return {key: blank(each) for key, each in value.items()}
    return [blank(each) for each in value] if isinstance(value, list) else type(value)()


def same(one: Any, other: Any) -> bool:
    """Whether two values are the same, tensors bit by bit."""
    import torch

    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        as_bytes = [each.contiguous().reshape(-1).view(torch.uint8) for each in (one, other)]
        return bool(one.dtype == other.dtype and one.shape == other.shape and torch.equal(*as_bytes))
    return bool(one == other)


# --- in our own Python -----------------------------------------------------------------------------------------------


def judge(folder: Path, cases: list[dict[str, Any]]) -> None:
    """Add our state and reason to each case."""
    from nightbridge.outputs.checkpoints import checkpoint_state

    for number, case in enumerate(cases):
        state, case["reason"] = checkpoint_state(folder_of(folder / "cases" / str(number)))
        case["state"] = str(state)


def report(cases: list[dict[str, Any]]) -> Iterator[str]:
    """The confusion matrix, and the cases that matter."""
    groups = {
        "whole or harmless": [case for case in cases if case["whole"]],
        "damaged, torch loads it right": [case for case in cases if not case["whole"] and case["torch"] == "right"],
        "damaged, torch loads it wrong": [case for case in cases if case["torch"] == "wrong" and not apart(case)],
        "damaged, torch cannot load it": [case for case in cases if case["torch"] == "fails" and not apart(case)],
        **{
            f"apart, wrong or not loaded: {kind}": [
                case for case in cases if case["torch"] != "right" and apart(case) and case["kind"] == kind
            ]
            for kind in ("bit flip", "of another save")
        },
    }
    for name, group in groups.items():
        states = Counter(case["state"] for case in group)
        yield f"{name} ({len(group)}): " + ", ".join(f"{state} {count}" for state, count in sorted(states.items()))
    harmful = [case for case in cases if case["torch"] != "right" and not case["whole"] and not apart(case)]
    missed = [case for case in harmful if case["state"] in ("verified", "complete")]
    alarms = [case for case in groups["whole or harmless"] if case["state"] in ("damaged", "in_progress")]
    yield f"harmful damage called whole: {len(missed)} of {len(harmful)} ({len(missed) / max(len(harmful), 1):.2%})"
    yield f"false alarms: {len(alarms)} of {len(groups['whole or harmless'])}"
    for case in (*missed, *alarms):
        yield "  " + json.dumps(case)
    unproven = Counter((case["layout"], case["kind"]) for case in harmful if case["state"] == "unproven")
    yield f"harmful damage called unproven: {dict(unproven)}"


def apart(case: dict[str, Any]) -> bool:
    """Whether no checksum can tell: one bit of a file that has none, or a whole file that another save wrote."""
    return bool(
        case["kind"] == "of another save" or (case["kind"] == "bit flip" and case["file"].endswith(NO_CHECKSUM))
    )


def main() -> None:
    """Run all of it; with --make or --damage, in PYTHON, one part."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--torch-python", default=sys.executable)
    parser.add_argument("--seed", type=int, default=17)
    parser.add_argument("--copies", type=int, default=4)
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--make", nargs=2, type=int, metavar=("RANK", "RANKS"), help=argparse.SUPPRESS)
    parser.add_argument("--damage", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.make:
        return make(given.keep, given.copies, *given.make)
    if given.damage:
        print(json.dumps(damage_all(given.keep, given.copies, given.seed)))
        return None
    with tempfile.TemporaryDirectory() as scratch:
        folder = (given.keep or Path(scratch)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        common = [given.torch_python, "-W", "ignore", __file__, "--keep", str(folder), "--copies", str(given.copies)]
        for ranks in sorted({ranks for ranks, *_ in LAYOUTS.values()}):
            group = [subprocess.Popen([*common, "--make", str(rank), str(ranks)]) for rank in range(ranks)]
            if any(process.wait(300) for process in group):
                sys.exit("a rank failed")
        made = subprocess.run([*common, "--damage", "--seed", str(given.seed)], stdout=subprocess.PIPE, check=True)
        cases = json.loads(io.BytesIO(made.stdout).read())
        judge(folder, cases)
        if given.keep:
            (folder / "cases.json").write_text(json.dumps(cases, indent=1))
        print("\n".join(report(cases)))
    return None


if __name__ == "__main__":
    main()
