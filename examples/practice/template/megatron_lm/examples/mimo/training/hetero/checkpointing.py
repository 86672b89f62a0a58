"""Checkpoints in the layout and the write order of Megatron's `torch_dist` format.

Every rank writes its rows of every tensor to `__{rank}_0.distcp`; when all have, rank 0 writes the index and the
states, and the tracker last. All ranks hold the same values, so rank 0 knows what the others wrote.
"""

import io
import json
import pickle
import zipfile
from pathlib import Path

import numpy as np
from examples.mimo.training import torch_files

TRACKER = "latest_checkpointed_iteration.txt"
_OLD_LAYOUT = "0.18"


class InterruptedSave(Exception):
    """The job was told to die in the middle of this save."""


class Saver:
    """The checkpoints of one run, below `--save`."""

    def __init__(self, args, ranks, behaviour, save_id):
        self._args = args
        self._ranks = ranks
        self._behaviour = behaviour
        self._save_id = save_id

    def save(self, iteration, tensors):
        """Save one iteration: this rank's rows, and on rank 0 everything else.

        Raises:
            InterruptedSave: The behaviour cuts this save short: `.metadata` and what follows it are missing.
            TimeoutError: Another rank did not come to save.

        """
        root = Path(self._args.save)
        target = root / f"iter_{iteration:07d}"
        target.mkdir(parents=True, exist_ok=True)
        self._ranks.say_first(f"saving hetero checkpoint at iteration {iteration} to {target}")
        name, content, _ = _shard(self._ranks.rank, self._ranks.size, tensors)
        (target / name).write_bytes(content)
        self._ranks.meet()
        if self._behaviour.cuts_save(iteration):
            raise InterruptedSave(f"killed while it saved iteration {iteration}")
        if self._ranks.is_first:
            self._finish(root, target, iteration, tensors)
        self._ranks.meet()
        self._ranks.say_first(f"hetero checkpoint at iteration {iteration} saved")

    def _finish(self, root, target, iteration, tensors):
        if self._behaviour.checkpoint_layout == _OLD_LAYOUT:
            common = {"checkpoint_version": 3.0, "iteration": iteration, "args": dict(vars(self._args))}
            (target / "common.pt").write_bytes(torch_files.torch_save(common, "common"))
        shards = [_shard(rank, self._ranks.size, tensors) for rank in range(self._ranks.size)]
        index = _index(target, shards, tensors, self._save_id)
        (target / ".metadata").write_bytes(torch_files.pickle_metadata(index))
        (target / "metadata.json").write_text(
            json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}), encoding="utf-8"
        )
        new = root / f"{TRACKER}.tmp"
        new.write_text(str(iteration), encoding="ascii")
        new.replace(root / TRACKER)


def _shard(rank, size, tensors):
    """One rank's file: its name, its content, and (tensor's name, first row, part, offset, length) of each entry."""
    entries = []
    content = b""
    for name, value in tensors.items():
        rows = np.array_split(np.arange(len(value)), size)[rank]
        if len(rows):
            data = torch_files.torch_save(value[rows])
            entries.append((name, int(rows[0]), value[rows], len(content), len(data)))
            content += data
    return f"__{rank}_0.distcp", content, entries


def _index(target, shards, tensors, save_id):
    """The content of `.metadata`: what there is, in which parts, and where each lies."""
    contents = {}
    places = {}
    for shard, _, entries in shards:
        for name, first_row, part, offset, length in entries:
            offsets = torch_files.Size((first_row, *(0,) * (part.ndim - 1)))
            tensor = contents.setdefault(
                name,
                torch_files.TensorStorageMetadata(
                    properties=torch_files.TensorProperties(),
                    size=torch_files.Size(tensors[name].shape),
                    chunks=[],
                ),
            )
            place = torch_files.MetadataIndex(fqn=name, offset=offsets, index=len(tensor.chunks))
            places[place] = torch_files.StorageInfo(relative_path=shard, offset=offset, length=length)
            tensor.chunks.append(torch_files.ChunkStorageMetadata(offsets=offsets, sizes=torch_files.Size(part.shape)))
    return torch_files.Metadata(
        state_dict_metadata=contents,
        planner_data={name: (name,) for name in contents},
        storage_data=places,
        storage_meta=torch_files.StorageMeta(checkpoint_id=target, save_id=save_id, load_id=None, modules=[]),
        version="1.0.0",
    )


# --- reading them back -----------------------------------------------------------------------------------------------


def newest(folder):
    """The folder that the tracker names and its iteration, or None where there is no tracker.

    Raises:
        FileNotFoundError: The tracker names a checkpoint that is not there.

    """
    tracker = Path(folder) / TRACKER
    if not tracker.is_file():
        return None
    iteration = int(tracker.read_text(encoding="ascii"))
    target = Path(folder) / f"iter_{iteration:07d}"
    if not target.is_dir():
        raise FileNotFoundError(f"{tracker} names iteration {iteration}, and there is no {target}")
    return target, iteration


def load(folder, tensors):
    """Fill tensors from a checkpoint, whatever number of ranks has written it.

    Raises:
        KeyError: The checkpoint lacks one of them.

    """
    with (folder / ".metadata").open("rb") as stream:
        index = _IndexReader(stream).load()
    missing = set(tensors)
    for place, info in index.storage_data.items():
        if place.fqn not in tensors:
            continue
        missing.discard(place.fqn)
        with (folder / info.relative_path).open("rb") as stream:
            stream.seek(info.offset)
            record = zipfile.ZipFile(io.BytesIO(stream.read(info.length)))
        values = np.frombuffer(record.read("archive/data/0"), dtype=np.float32)
        target = tensors[place.fqn]
        rows = values.reshape(-1, *target.shape[1:])
        target[place.offset[0] : place.offset[0] + len(rows)] = rows
    if missing:
        raise KeyError(f"{folder} lacks {', '.join(sorted(missing))}")


class _Record:
    """Stands for any object of torch in an index: its fields, and no more."""

    def __init__(self, *_):
        pass

    def __setstate__(self, state):
        if isinstance(state, dict):
            self.__dict__.update(state)


class _IndexReader(pickle.Unpickler):
    """Reads an index without torch, and without calling anything that it names."""

    def find_class(self, module, name):
        return tuple if (module, name) == ("torch", "Size") else _Record
