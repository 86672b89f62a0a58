"""Checkpoint directories: which there are, and whether each is whole.

Megatron-Bridge writes a checkpoint in a fixed order: shards, `.metadata`, `metadata.json`, `train_state.pt`, the
tracker `latest_checkpointed_iteration.txt` beside the directory, `run_config.yaml`. A directory is complete when all of
that is there and every byte that `.metadata` names lies in its shard. Parts missing at the end of that order mean that
the writer is not there yet (an asynchronous save stays without `.metadata` for long); a part missing before one that is
there, or a short shard, means damage. A tracker that is gone or empty, as a kill leaves it, says nothing about the
checkpoints that have what is written after it. `common.pt` is not required: newer versions do not write it.

Megatron-LM on its own writes neither `train_state.pt` nor `run_config.yaml`: its tracker is the last part. A folder
whose tracker names a checkpoint, and which has nothing of the sort anywhere, is such a one, unless what the run dumped
says that Megatron-Bridge saved there: every release of it has written both.

That is a judgement by names and lengths. `prove` looks into the files: every item of every shard is an archive with
CRC-32s of its own, so are `train_state.pt` and `common.pt`. What it returns is checked by whoever reads the bytes.
"""

import json
import os
import re
import stat
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from nightbridge.errors import DamagedData
from nightbridge.files import read_regular, reading, unless_away, walk
from nightbridge.models import Checkpoint, CheckpointState, Model
from nightbridge.numbers import whole_number
from nightbridge.outputs.checkpoint_contents import Proof, prove
from nightbridge.outputs.checkpoint_metadata import (
    MAX_CONFIG_BYTES,
    is_file,
    read_config,
    read_metadata,
    shard_problem,
    unreadable_json,
)
from nightbridge.outputs.reader_process import read_in_child
from nightbridge.store.checksum import check_crcs, sha256_of_file

TRACKER = "latest_checkpointed_iteration.txt"
TRAIN_STATE = "latest_train_state.pt"
"""The newest checkpoint's training state, beside it."""
TRACKERS = (TRACKER, TRAIN_STATE)
"""Files beside the checkpoints that name the newest."""
RELEASE = "release"
"""The folder, and what Megatron-LM's tracker says, of a checkpoint that stands before all iterations."""
LOADER_STATES = "energon"
"""The folder beside the checkpoints in whose `iter_*` directories the data loader's ranks keep where they stood."""
TOKENIZER = "tokenizer"
"""The folder in a checkpoint with the tokenizer's files."""
EXPORT = "hf"
"""The folder in a checkpoint with the same weights in the format of Hugging Face."""

_SETTINGS_OF_TOKENIZER = {
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
}
"""What a tokenizer's `save_pretrained` writes besides its vocabulary, most of it before."""
_ITERATION = re.compile(r"iter_(\d{7,18})", re.ASCII)
_SHARD_SUFFIX = ".distcp"
_PARTS = (".metadata", "*.distcp", "*.pt", "*.pth", "*.safetensors", "*.bin", "*.ckpt", ".zarray")
"""Files of which every checkpoint has one, whatever wrote it."""
_NAMES_SHOWN = 3
_MAX_REASON = 1000
_TORCH_DIST = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
_COMMON_PT = {"common_backend": "torch", "common_backend_version": 1}
"""The content of `metadata.json`: both before Megatron-Core 0.19, the first alone since."""

_MAX_TRACKER_BYTES = 64

_CLOCKS_APART = 300.0
"""Seconds by which the clocks of two nodes may differ: munge takes no credential that is older."""


def find_checkpoints(save_dir: Path, bridge_dir: Path | None = None) -> tuple[Checkpoint, ...]:
    """Judge every `iter_*` directory under `checkpoint.save`, by iteration.

    A missing folder has none; a directory that is deleted meanwhile (`most_recent_k`) is left out. `bridge_dir` is the
    folder that Megatron-Bridge is known to have saved into, if any.
    """
    found = []
    for path in checkpoint_folders(save_dir):
        # Before it is judged: of one that is found complete after that, every file was there to be counted.
        size = checkpoint_size(path)
        state, reason = layout_state(path, bridge_dir)
        if path.is_dir():
            found.append(Checkpoint(path=path, iteration=_iteration(path), state=state, reason=reason, size=size))
    return tuple(found)


def checkpoint_folders(save_dir: Path) -> list[Path]:
    """The `iter_*` directories under `checkpoint.save`, by iteration; links are not followed."""
    try:
        entries = [Path(entry.path) for entry in os.scandir(save_dir) if entry.is_dir(follow_symlinks=False)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted((path for path in entries if _ITERATION.fullmatch(path.name)), key=_iteration)


def checkpoints_in(folder: Path) -> list[Path]:
    """The checkpoints that somebody who names a folder may mean: those in it, and the one that its tracker names.

    Where neither is there it is those in its `checkpoints/`, as of a run, or the folder itself; none where that has no
    part of a checkpoint.
    """
    for place in (folder, folder / "checkpoints"):
        tracked, iteration = _tracker(place), tracked_iteration(place)
        named = [place / RELEASE] if tracked == RELEASE else []
        named += [] if iteration is None else [place / f"iter_{iteration:07}"]
        if found := sorted({*checkpoint_folders(place), *named}, key=_iteration):
            return found
    return [folder] if _ITERATION.fullmatch(folder.name) or _has_a_part(folder) else []


def _has_a_part(folder: Path) -> bool:
    """Whether a file below is of a checkpoint; a folder that cannot be listed may have one."""
    unknown: list[OSError] = []
    files = (parent / name for parent, _, names in walk(folder, unknown.append) for name in names)
    return any(any(map(file.match, _PARTS)) and not file.is_symlink() for file in files) or bool(unknown)


def _iteration(path: Path) -> int:
    match = _ITERATION.fullmatch(path.name)
    return int(match[1]) if match else 0


def tracked_iteration(save_dir: Path) -> int | None:
    """The iteration that the tracker file names; None without one, while it is written, or when it names a release."""
    return whole_number(_tracker(save_dir))


def _tracker(save_dir: Path) -> str:
    try:
        return read_regular(save_dir / TRACKER, limit=_MAX_TRACKER_BYTES).decode("ascii").strip()
    except OSError as error:
        unless_away(error, save_dir / TRACKER)
        return ""
    except UnicodeDecodeError:
        return ""


def checkpoint_size(path: Path) -> int:
    """Bytes of all regular files below a directory; what vanishes meanwhile, or cannot be listed, counts nothing."""
    total = 0
    for parent, _, names in walk(path, unless_away):
        for name in names:
            try:
                status = os.lstat(parent / name)
            except FileNotFoundError:
                continue
            if stat.S_ISREG(status.st_mode):
                total += status.st_size
    return total


def layout_state(path: Path, bridge_dir: Path | None = None) -> tuple[CheckpointState, str]:
    """Judge one `iter_*` directory by the names and lengths of its files; `bridge_dir` as for `find_checkpoints`.

    Returns:
        The state, and why it is not complete. The reason of a complete one names stale shards, if any: files of an
        earlier, larger run in the same directory that `.metadata` does not name.
    """
    try:
        with reading(path):
            state, reason = _judge(path, _iteration(path), bridge_dir)
        return state, reason[:_MAX_REASON]  # a file can name a shard in a megabyte
    except DamagedData as error:
        return CheckpointState.DAMAGED, error.what


def checkpoint_state(path: Path) -> tuple[CheckpointState, str]:
    """Judge a checkpoint or an export of safetensors by every byte of it.

    Returns:
        The state, and why it is not verified; of a verified one what `layout_state` says.
    """
    if path.is_symlink() or not path.is_dir():
        absent = "is a link, which is not followed" if path.is_symlink() else "is not there"
        return CheckpointState.DAMAGED, f"{TRACKER} names it, and it {absent}"
    state, reason = layout_state(path)
    try:
        with reading(path):
            if _is_anybodys(path):
                state, reason = _judge_contents(path)
            if state is not CheckpointState.COMPLETE:
                return state, reason
            proof = prove_checkpoint(path, files_below(path))
            for file, extents in proof.extents.items():
                check_crcs(file, extents)
            proof = proof._replace(unproven=(*proof.unproven, *_links_below(path)))
    except DamagedData as error:
        return CheckpointState.DAMAGED, error.what
    return proved_state(proof, reason)


def state_in_child(path: Path) -> tuple[CheckpointState, str]:
    """`checkpoint_state` of an absolute path, in a child that reads nothing but the folder that it lies in."""
    try:
        return read_in_child(_state, path, (path.parent,), subject=str(path))[0]
    except DamagedData as error:
        return CheckpointState.DAMAGED, error.what


def _state(path: Path) -> tuple[tuple[CheckpointState, str], bytes]:
    state, reason = checkpoint_state(path)
    # A file's name may hold any bytes, and JSON does not.
    return (state, reason.encode(errors="backslashreplace").decode()), b""


def prove_checkpoint(path: Path, files: Iterable[Path]) -> Proof:
    """Look into the files of a checkpoint whose layout is complete, the trackers beside it included.

    Errors are those of `prove`.
    """
    files = sorted(set(files))
    own, copied = path / "train_state.pt", path.parent / TRAIN_STATE
    if {own, copied} <= set(files) and not _is_copied(path):
        raise DamagedData(f"{copied.name} is not a copy of {own.name}", subject=str(copied))
    proof = prove(path, files)
    unproven = (*_unknown_layout(path, files, proof), *_lost_exports(path, files), *proof.unproven)
    return proof._replace(unproven=unproven)


class _Proved(Model):
    """A proof but for its extents, whose numbers come as bytes: how many of them each file has, in their order."""

    counts: tuple[tuple[Path, int], ...]
    unproven: tuple[str, ...]


def prove_in_child(path: Path, files: Iterable[Path], below: Path) -> Proof:
    """`prove_checkpoint` in a child that reads nothing but the run's folder `below`.

    Raises:
        DamagedData: A file is not what its writer wrote, or cannot be read.
    """
    proved, data = read_in_child(_prove, (path, tuple(files)), (below,), subject=str(path))
    extents, position = {}, 0
    for file, count in proved.counts:
        size = count * array("Q").itemsize
        extents[file] = array("Q", data[position : position + size])
        position += size
    return Proof(extents, proved.unproven)


def _prove(checkpoint: tuple[Path, tuple[Path, ...]]) -> tuple[_Proved, bytes]:
    path, files = checkpoint
    try:
        proof = prove_checkpoint(path, files)
        proof = proof._replace(unproven=(*proof.unproven, *_saved_over(files)))
    except OSError as error:
        unless_away(error, path)
        raise DamagedData(f"cannot be read: {error}", subject=str(path)) from error
    counts = tuple((file, len(numbers)) for file, numbers in proof.extents.items())
    return _Proved(counts=counts, unproven=proof.unproven), b"".join(map(bytes, proof.extents.values()))


def _saved_over(files: Sequence[Path]) -> Iterator[str]:
    """What of a run's checkpoint is of a save over it that did not end, a line for each `.metadata`.

    A job that is queued again may train from its first step into the same folder. Its writer overwrites each shard in
    its place, and leaves the parts of the save before, until it comes to write them. A copy may look the same.
    """
    for metadata in (file for file in files if file.name == ".metadata"):
        beside = (file for file in files if file.parent == metadata.parent)
        saved = (file for file in beside if file.suffix == _SHARD_SUFFIX or file.name == "common.pt")
        latest = metadata.stat().st_mtime + _CLOCKS_APART
        if newer := sorted(file.name for file in saved if file.stat().st_mtime > latest):
            some = f"{len(newer)} file{'s' * (len(newer) > 1)} such as {newer[0]} {'are' if newer[1:] else 'is'}"
            yield f"{some} newer than .metadata, which is written last: a later save did not end, or it is a copy"


def proved_state(proof: Proof, reason: str = "") -> tuple[CheckpointState, str]:
    """The state of a checkpoint whose bytes have the CRCs of its proof. `reason` is that of its layout."""
    if proof.unproven:
        return CheckpointState.UNPROVEN, _some(list(dict.fromkeys(proof.unproven)))
    return CheckpointState.VERIFIED, reason


def _unknown_layout(path: Path, files: Sequence[Path], proof: Proof) -> Iterator[str]:
    """What a whole checkpoint of a known layout would have and this one has not."""
    names = {str(file.relative_to(path)) for file in files if file.is_relative_to(path)}
    if not proof.extents and not proof.unproven:
        yield "nothing in it has a checksum"
    elif ".metadata" not in names:
        yield "without .metadata it is unknown which files it has to have"
    elif "metadata.json" in names:
        content = json.loads(read_regular(path / "metadata.json", limit=MAX_CONFIG_BYTES))
        if content not in (_TORCH_DIST, _TORCH_DIST | _COMMON_PT):
            yield "metadata.json names a format that this release does not know"
        elif "common.pt" not in names and not read_metadata(path / ".metadata").has("common_state"):
            yield "it has neither common.pt nor a common_state, one of which torch_dist has"
    elif "run_config.yaml" not in names and (path.parent / TRACKER).exists():
        yield "without metadata.json it is torch_dcp or fsdp_dtensor, unless that file was lost"


def _lost_exports(path: Path, files: Sequence[Path]) -> Iterator[str]:
    """What Megatron-Bridge writes besides the checkpoint's own parts; where that fails it may only be logged."""
    settings, _problem = read_config(path / "run_config.yaml")
    sections = (settings.get(name) for name in ("checkpoint", "tokenizer"))
    checkpoint, tokenizer = (section if isinstance(section, dict) else {} for section in sections)
    weights = any(file.parent == path / EXPORT and file.suffix == ".safetensors" for file in files)
    if checkpoint.get("also_save_hf_checkpoint") == "true" and not weights:
        yield f"there is no {EXPORT}/*.safetensors, which run_config.yaml has saved"
    kind = str(tokenizer.get("tokenizer_type") or "null")
    # A NullTokenizer has no files.
    if checkpoint.get("save_tokenizer_assets") == "true" and not kind.lower().startswith("null"):
        names = {file.name for file in files if file.is_relative_to(path / TOKENIZER)}
        if not names:
            yield f"there is no {TOKENIZER}/, which run_config.yaml has saved"
        elif kind == "HuggingFaceTokenizer" and (
            "tokenizer_config.json" not in names or names <= _SETTINGS_OF_TOKENIZER
        ):
            yield f"{TOKENIZER}/ has no {'vocabulary' if 'tokenizer_config.json' in names else 'tokenizer_config.json'}"


def files_below(path: Path) -> Iterator[Path]:
    """The regular files of a checkpoint's directory, and the trackers that name it."""
    for parent, _, names in walk(path):
        yield from (file for name in names if (file := parent / name).is_file() and not file.is_symlink())
    yield from trackers_of(path)


def _links_below(path: Path) -> Iterator[str]:
    """What `files_below` passes over, a line each."""
    for parent, folders, names in walk(path):
        links = (parent / name for name in (*folders, *names) if (parent / name).is_symlink())
        yield from (f"{link.relative_to(path)} is a link, which is not followed" for link in links)


def trackers_of(path: Path) -> Iterator[Path]:
    """The files beside a checkpoint that name it.

    They belong to it: without it, a training that starts from the restored folder would look for a missing checkpoint.
    A training state that a later save had begun to copy when it was killed belongs to none.
    """
    save_dir = path.parent
    if not _ITERATION.fullmatch(path.name) or tracked_iteration(save_dir) != _iteration(path):
        return
    later = (each for each in checkpoint_folders(save_dir) if _iteration(each) > _iteration(path))
    overtaken = any((each / "train_state.pt").is_file() for each in later)
    for file in (save_dir / name for name in ((TRACKER,) if overtaken and not _is_copied(path) else TRACKERS)):
        if file.is_file() and not file.is_symlink():
            yield file


def _is_copied(path: Path) -> bool:
    """Whether the training state beside a checkpoint is that of this one."""
    own, copied = path / "train_state.pt", path.parent / TRAIN_STATE
    return own.is_file() and copied.is_file() and sha256_of_file(own) == sha256_of_file(copied)


def _judge(path: Path, iteration: int, bridge_dir: Path | None) -> tuple[CheckpointState, str]:
    settings, problem = read_config(path / "run_config.yaml")
    tracked = iteration if _tracker(path.parent) == path.name == RELEASE else tracked_iteration(path.parent)
    begun = (path.parent / TRACKER).is_file() and _tracker(path.parent) != RELEASE
    of_bridge = (tracked is None and not begun) or path.parent == bridge_dir or _has_parts_of_bridge(path)
    legacy = any(path.glob("mp_rank_*/*.pt")) and not is_file(path / ".metadata")
    # In the order of writing.
    needed = {
        ".metadata": not legacy,
        "metadata.json": not legacy and _needs_metadata_json(path, settings),
        "train_state.pt": of_bridge,
        TRACKER: True,
        "run_config.yaml": of_bridge,
    }
    there = {name: is_file(path / name) for name in needed}
    # A tracker that is empty, as a kill leaves it, names none: that the writer came so far shows in the part after it,
    # and where it is itself the last part, in that it is there.
    there[TRACKER] = (there["run_config.yaml"] or not of_bridge) if tracked is None else tracked >= iteration
    for number, name in enumerate(needed):
        if needed[name] and not there[name]:
            missing = _missing(name, tracked)
            # A later part of this checkpoint, or a later checkpoint's tracker: the writer has gone past this part.
            if any([*there.values()][number:]) or (tracked is not None and tracked > iteration):
                return CheckpointState.DAMAGED, f"{missing}, although later files are present"
            return CheckpointState.IN_PROGRESS, f"{missing} yet"
    if problem := unreadable_json(path) or problem:
        return CheckpointState.DAMAGED, problem
    return (CheckpointState.COMPLETE, "") if legacy else _judge_shards(path)


def _is_anybodys(path: Path) -> bool:
    """Whether neither name, nor tracker, nor the configuration in it says that Megatron-Bridge or LM wrote it."""
    named = _ITERATION.fullmatch(path.name) or (path.parent / TRACKER).exists()
    return not named and "_target_" not in read_config(path / "run_config.yaml")[0]


def _judge_contents(path: Path) -> tuple[CheckpointState, str]:
    """Judge what may be any program's, or a copy under another name: there is nothing but its contents to go by."""
    if not is_file(path / ".metadata"):
        missing = ".metadata" if any(path.glob(f"*{_SHARD_SUFFIX}")) else ""
    else:
        metadata = read_metadata(path / ".metadata")
        of_megatron = is_file(path / "common.pt") or (metadata.has("common_state") and not metadata.nested)
        missing = "metadata.json" if of_megatron and not is_file(path / "metadata.json") else ""
    if missing:
        return CheckpointState.IN_PROGRESS, f"there is no {missing} yet"
    return CheckpointState.COMPLETE, ""


def _has_parts_of_bridge(path: Path) -> bool:
    """Whether this checkpoint, or its folder, holds what Megatron-Bridge writes and Megatron-LM does not.

    Megatron-Bridge writes a copy of the training state beside the tracker before it writes the tracker.
    """
    beside = () if path.name == RELEASE else (path.parent / TRAIN_STATE,)
    return any(is_file(part) for part in (path / "train_state.pt", path / "run_config.yaml", *beside))


def _missing(name: str, tracked: int | None) -> str:
    if name == TRACKER:
        return f"{TRACKER} names {'nothing' if tracked is None else f'iteration {tracked}'}, not this one"
    return f"there is no {name}"


def _needs_metadata_json(path: Path, settings: Mapping[str, Any]) -> bool:
    """Every format but fsdp_dtensor and torch_dcp has a `metadata.json`.

    Without the run's configuration the format is known by what only Megatron-Core's own has: a `common.pt`, or a state
    dict that torch did not have to flatten.
    """
    if not is_file(path / "run_config.yaml"):
        if not is_file(path / ".metadata"):
            return False
        return is_file(path / "common.pt") or not read_metadata(path / ".metadata").nested
    checkpoint = settings.get("checkpoint")
    return not (isinstance(checkpoint, dict) and checkpoint.get("ckpt_format") == "fsdp_dtensor")


def _judge_shards(path: Path) -> tuple[CheckpointState, str]:
    """Compare the shards with what `.metadata` says about them."""
    needed = read_metadata(path / ".metadata").shard_sizes
    if not needed:
        return CheckpointState.DAMAGED, ".metadata names no shard"
    problems = [problem for name, size in sorted(needed.items()) if (problem := shard_problem(path, name, size))]
    if problems:
        return CheckpointState.DAMAGED, _some(problems)
    stale = sorted(name for name in os.listdir(path) if name.endswith(_SHARD_SUFFIX) and name not in needed)
    return CheckpointState.COMPLETE, f"stale shards that .metadata does not name: {_some(stale)}" if stale else ""


def _some(lines: list[str]) -> str:
    more = len(lines) - _NAMES_SHOWN
    return "; ".join(lines[:_NAMES_SHOWN]) + (f"; and {more} more" if more > 0 else "")
