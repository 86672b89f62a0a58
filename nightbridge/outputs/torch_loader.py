"""Load a checkpoint as a training does: run by an interpreter that has torch, and nothing of this package.

    python - FOLDER < torch_loader.py

`.metadata` and its shards are loaded by torch.distributed.checkpoint without a process group, every other file by
torch.load or safetensors; into the CPU's memory, `BATCH` or one tensor at a time. The last line of stdout is JSON:
`torch`, `tensors`, `objects`, `bytes`; or `problem`; or `missing`, a module; or `memory`, which it lacks.
"""

import json
import sys
from pathlib import Path

BATCH = 1 << 30
"""Bytes of tensors loaded with one reading of `.metadata`."""


def load(folder: Path) -> dict[str, object]:
    """Load everything; returns what was loaded, or why it cannot be."""
    loaded = {"tensors": 0, "objects": 0, "bytes": 0}
    file = folder
    try:
        import torch

        for file in sorted(each for each in folder.rglob("*") if each.is_file()):
            if loader := _LOADERS.get(file.suffix or file.name):
                loader(file, loaded)
    except ImportError as error:
        return {"missing": error.name or str(error)}
    except MemoryError as error:
        return {"memory": str(error)}
    except Exception as error:  # whatever torch raises about a file
        if "can't allocate memory" in str(error):
            return {"memory": str(error)}
        return {"problem": f"{file.name}: {type(error).__name__}: {error}"}
    return {"torch": torch.__version__, **loaded}


def _distributed(metadata: Path, loaded: dict[str, int]) -> None:
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    batch: dict[str, object] = {}
    size = 0

    def load_batch() -> None:
        # Neither flattened: the names are those of the file, whatever they were made of.
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        dcp.load(batch, storage_reader=dcp.FileSystemReader(metadata.parent), planner=planner, no_dist=True)
        batch.clear()

    for name, entry in dcp.FileSystemReader(metadata.parent).read_metadata().state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            batch[name] = tensor = torch.empty(entry.size, dtype=entry.properties.dtype)
            loaded["tensors"] += 1
            loaded["bytes"] += tensor.nbytes
            size += tensor.nbytes
        else:
            batch[name] = None
            loaded["objects"] += 1
        if size >= BATCH:
            load_batch()
            size = 0
    load_batch()


def _archive(path: Path, loaded: dict[str, int]) -> None:
    import torch

    torch.load(path, map_location="cpu", weights_only=False)
    loaded["objects"] += 1


def _safetensors(path: Path, loaded: dict[str, int]) -> None:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as opened:
        for name in opened.keys():  # noqa: SIM118 - it is no dictionary
            loaded["bytes"] += opened.get_tensor(name).nbytes
            loaded["tensors"] += 1


_LOADERS = {
    ".metadata": _distributed,
    ".pt": _archive,
    ".pth": _archive,
    ".safetensors": _safetensors,
}

if __name__ == "__main__":
    print(json.dumps(load(Path(sys.argv[1]))))
