"""Checkpoints in the layout and the write order of Megatron's `torch_dist` format.

Every rank writes its part of every tensor to `__{rank}_0.distcp`; when all have, rank 0 writes the index, the states
and the trackers. All ranks hold the same values, so rank 0 knows what the others wrote.
"""

import json
import shutil

import numpy as np
from megatron.bridge.training import torch_files
from megatron.bridge.training.config import as_path, write_config

_OLD_LAYOUT = "0.18"


class InterruptedSave(Exception):
    """The job was told to die in the middle of this save."""


class Checkpoints:
    """The checkpoints of one run, below `checkpoint.save`."""

    def __init__(self, config, ranks, behaviour, save_id):
        self._config = config
        self._ranks = ranks
        self._behaviour = behaviour
        self._save_id = save_id
        self._saved = None
        self.folder = as_path(config["checkpoint"]["save"])

    def is_due(self, iteration):
        """Whether this iteration lies on the interval."""
        return self.folder is not None and iteration % self._config["checkpoint"]["save_interval"] == 0

    def is_missing(self, iteration):
        """Whether a run that ends here still has to save."""
        return self.folder is not None and iteration > 0 and self._saved != iteration

    def save(self, iteration, tensors, train_state):
        """Save one iteration: this rank's shard, and on rank 0 everything else.

        Raises:
            InterruptedSave: The behaviour cuts this save short: `.metadata` and what follows it are missing.
            TimeoutError: Another rank did not come to save.

        """
        target = self.folder / f"iter_{iteration:07d}"
        say = self._ranks.say_first
        say(f"saving checkpoint at iteration {iteration:7d} to {self.folder} in torch_dist format")
        target.mkdir(parents=True, exist_ok=True)
        common = {"iteration": iteration, "checkpoint_version": 3.0, "content_metadata": {"save_id": self._save_id}}
        if self._behaviour.checkpoint_layout == _OLD_LAYOUT:
            if self._ranks.is_first:
                (target / "common.pt").write_bytes(torch_files.torch_save(common, "common"))
            common = None
        shards = [_Shard(rank, self._ranks.size, tensors, common) for rank in self._ranks_to_build()]
        shards[0].write(target)  # rank 0 builds all and its own first, another rank its own alone
        self._ranks.meet()
        if self._behaviour.cuts_save(iteration):
            raise InterruptedSave(f"killed while it saved iteration {iteration}")
        if self._ranks.is_first:
            self._finish(target, iteration, shards, tensors, train_state)
        self._ranks.meet()
        self._saved = iteration
        say(f"  successfully saved checkpoint from iteration {iteration:7d} to {self.folder} [ t 1/1, p 1/1 ]")
        if self._ranks.is_first:
            self._delete_old()

    def _ranks_to_build(self):
        return range(self._ranks.size) if self._ranks.is_first else [self._ranks.rank]

    def _finish(self, target, iteration, shards, tensors, train_state):
        (target / ".metadata").write_bytes(torch_files.pickle_metadata(_index(target, shards, tensors, self._save_id)))
        (target / "metadata.json").write_text(
            json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}), encoding="utf-8"
        )
        (target / "train_state.pt").write_bytes(torch_files.torch_save(train_state, "train_state"))
        shutil.copy(target / "train_state.pt", self.folder / "latest_train_state.pt")
        (self.folder / "latest_checkpointed_iteration.txt").write_text(str(iteration), encoding="ascii")
        write_config(self._config, target / "run_config.yaml")

    def _delete_old(self):
        keep = self._config["checkpoint"]["most_recent_k"]
        if keep < 0:
            return
        folders = sorted(self.folder.glob("iter_*"))
        for folder in folders[: len(folders) - keep]:
            shutil.rmtree(folder)


class _Shard:
    """What one rank saves: its rows of every tensor, and on rank 0 the common state."""

    def __init__(self, rank, size, tensors, common):
        self.name = f"__{rank}_0.distcp"
        self.entries = []  # (tensor's name or None, first row, part, offset, length)
        self._content = b""
        if common is not None and rank == 0:
            self._add("common_state", None, None, common)
        for name, value in tensors.items():
            rows = np.array_split(np.arange(len(value)), size)[rank]
            if len(rows):
                self._add(name, int(rows[0]), value[rows], value[rows])

    def _add(self, name, first_row, part, value):
        data = torch_files.torch_save(value)
        self.entries.append((name, first_row, part, len(self._content), len(data)))
        self._content += data

    def write(self, folder):
        """Write the file, like torch under its final name."""
        (folder / self.name).write_bytes(self._content)


def _index(target, shards, tensors, save_id):
    """The content of `.metadata`: what there is, in which parts, and where each lies."""
    contents = {}
    places = {}
    for shard in shards:
        for name, first_row, part, offset, length in shard.entries:
            info = torch_files.StorageInfo(relative_path=shard.name, offset=offset, length=length)
            if part is None:
                contents[name] = torch_files.BytesStorageMetadata()
                places[torch_files.MetadataIndex(fqn=name, offset=None, index=None)] = info
                continue
            offsets = torch_files.Size((first_row, *(0,) * (part.ndim - 1)))
            chunk = torch_files.ChunkStorageMetadata(offsets=offsets, sizes=torch_files.Size(part.shape))
            tensor = contents.setdefault(
                name,
                torch_files.TensorStorageMetadata(
                    properties=torch_files.TensorProperties(),
                    size=torch_files.Size(tensors[name].shape),
                    chunks=[],
                ),
            )
            places[torch_files.MetadataIndex(fqn=name, offset=offsets, index=len(tensor.chunks))] = info
            tensor.chunks.append(chunk)
    return torch_files.Metadata(
        state_dict_metadata=contents,
        planner_data={name: (name,) for name in contents},
        storage_data=places,
        storage_meta=torch_files.StorageMeta(checkpoint_id=target, save_id=save_id, load_id=None, modules=[]),
        version="1.0.0",
    )
