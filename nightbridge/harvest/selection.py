"""What of a run is stored, and where below its prefix: logs and curves always, checkpoints by policy when complete.

logs/          the ranks' and the batch script's logs, launcher.log      masked text
configs/       ConfigContainer.yaml, repo_status.json                    masked text
attempt/       what nightbridge wrote about the attempt (job.sh, ...)    masked text
tensorboard/   event files                                               as they are
profiles/      output of profilers                                       as they are
checkpoints/   iter_0000050/..., and beside it the trackers that name    as they are
               it, and energon/iter_0000050/... (its data loader's)
earlier/       a1/..., of each earlier attempt, but for its checkpoints  likewise
"""

import logging
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from nightbridge.errors import DamagedData, InvalidInput, PermanentError, TransientError
from nightbridge.files import unless_away, walk
from nightbridge.harvest.manifest import LeftOut
from nightbridge.harvest.upload import LocalFile, Unit
from nightbridge.models import Checkpoint, CheckpointState, FileKind, StoredFile
from nightbridge.outputs.checkpoints import (
    LOADER_STATES,
    TRACKER,
    TRAIN_STATE,
    checkpoint_size,
    prove_in_child,
    proved_state,
    trackers_of,
)
from nightbridge.outputs.experiment import RunOutput
from nightbridge.outputs.torch_check import load_with_torch
from nightbridge.store.object_store import checked_key

_STORED_CHECKPOINT = re.compile(rf"(checkpoints/(?:(?!{LOADER_STATES}/)[^/]+/)*?)iter_(\d{{7,18}})/", re.ASCII)
"""The folder that a stored checkpoint is in, and its iteration."""

_log = logging.getLogger(__name__)


def files_to_store(
    output: RunOutput, policy: str, earlier: Sequence[RunOutput] = (), load_with: str | None = None
) -> tuple[tuple[Unit, ...], tuple[LeftOut, ...]]:
    """Choose what of a run is stored; `policy` is `HarvestPolicy.checkpoint`, `load_with` is `HarvestPlace.load_with`.

    Of `earlier` attempts, which an infrastructure failure ended, everything that documents it is kept: what the last
    attempt's checkpoints have is theirs already, or was not worth resuming.

    Returns:
        Units with unique paths relative to the run's prefix, and what should be there and cannot be: incomplete
        checkpoints, links out of the run's folders, a second file for one path.
    """
    checkpoints, left_out = _checkpoint_units(output, policy, load_with)
    of_earlier = (unit for each in earlier for unit in _single_files(each, f"earlier/{each.attempt_dir.name}/"))
    units, doubles = _unique((*_single_files(output), *checkpoints, *of_earlier))
    return units, (*left_out, *(LeftOut(path=path, reason=reason) for path, reason in output.not_stored), *doubles)


def stored_path(output: RunOutput, checkpoint: Checkpoint) -> str:
    """Where a checkpoint goes, relative to the run's prefix."""
    return f"{_below(output, checkpoint.path.parent, 'checkpoints', 'checkpoints')}/{checkpoint.path.name}"


def stored_save_dirs(files: Iterable[StoredFile]) -> dict[str, int]:
    """The stored folders that checkpoints are in, as `checkpoints/`, each with the newest iteration there."""
    newest: dict[str, int] = {}
    for file in files:
        if match := _STORED_CHECKPOINT.match(file.path):
            newest[match[1]] = max(newest.get(match[1], 0), int(match[2]))
    return newest


def untracked_save_dirs(files: Sequence[StoredFile]) -> dict[str, int]:
    """Those of `stored_save_dirs` that lack a tracker: it is of a newer checkpoint, which could not be stored.

    Megatron-Bridge goes by the copy of the training state, Megatron-LM, which has none, by the text.
    """
    paths = {file.path for file in files}
    return {
        folder: newest
        for folder, newest in stored_save_dirs(files).items()
        if folder + TRACKER not in paths
        or (folder + TRAIN_STATE not in paths and f"{folder}iter_{newest:07d}/train_state.pt" in paths)
    }


def _single_files(output: RunOutput, stored_below: str = "") -> Iterator[Unit]:
    """What of a run is stored besides its checkpoints, each file a unit."""
    logs = (*output.logs, *output.sbatch_logs, output.launcher_log)
    attempt_files = (path for path in output.attempt_files if path != output.launcher_log)
    files: tuple[tuple[Path, str, FileKind], ...] = (
        *((path, f"logs/{path.name}", "log") for path in logs if path),
        *((path, f"configs/{path.name}", "config") for path in (output.config_container, output.repo_status) if path),
        *((path, f"attempt/{path.name}", "config") for path in attempt_files),
        *((path, _below(output, path, "tb_logs", "tensorboard"), "tensorboard") for path in output.event_files),
        *((path, _below(output, path, "profiles", "profiles"), "other") for path in output.profiles),
    )
    for path, stored, kind in files:
        yield Unit.of(path, stored_below + stored, kind, _folder_of(output, path))


def _checkpoint_units(output: RunOutput, policy: str, load_with: str | None) -> tuple[list[Unit], list[LeftOut]]:
    """The checkpoints of the policy, each a unit, and those that it wants and cannot have. Each folder counts alone."""
    units: list[Unit] = []
    left_out: list[LeftOut] = []
    if policy == "none":
        return units, left_out
    for folder in dict.fromkeys(checkpoint.path.parent for checkpoint in output.checkpoints):
        of_folder = sorted(
            (checkpoint for checkpoint in output.checkpoints if checkpoint.path.parent == folder),
            key=lambda checkpoint: checkpoint.iteration,
        )
        complete = [checkpoint for checkpoint in of_folder if checkpoint.state is CheckpointState.COMPLETE]
        for checkpoint in of_folder:
            if checkpoint not in complete:
                reason = f"{checkpoint.state}: {checkpoint.reason}" if checkpoint.reason else str(checkpoint.state)
                left_out.append(LeftOut(path=stored_path(output, checkpoint), reason=reason))
        for checkpoint in chosen(complete, policy):
            found = _checkpoint_unit(output, checkpoint, load_with)
            if isinstance(found, Unit):
                units.append(found)
            else:
                left_out.append(found)
    return units, left_out


def _checkpoint_unit(output: RunOutput, checkpoint: Checkpoint, load_with: str | None) -> Unit | LeftOut:
    """A checkpoint with what its bytes are checked by while they are sent, and what it is then; or why it stays out."""
    path, below = stored_path(output, checkpoint), _folder_of(output, checkpoint.path)
    try:
        files = tuple(_files_of(checkpoint, path))
        for file in files:
            checked_key(file.path)
        proof = prove_in_child(checkpoint.path, [Path(file.source) for file in files], below)
        state, reason = proved_state(proof, checkpoint.reason)
        if load_with is not None:
            reason = "; ".join(filter(None, (reason, _loaded(checkpoint.path, load_with))))
    except (OSError, DamagedData, InvalidInput, _NotAsJudged) as error:
        if isinstance(error, OSError):
            unless_away(error)
        reason = f"damaged: {error.what}" if isinstance(error, DamagedData) else str(error)
        return LeftOut(path=path, reason=reason)
    return Unit(
        path=path,
        files=tuple(replace(file, below=below, extents=proof.extents.get(Path(file.source), ())) for file in files),
        checkpoint=checkpoint.model_copy(update={"state": state, "reason": reason}),
    )


def _loaded(path: Path, load_with: str) -> str:
    """What loading a checkpoint said; that it could not be tried says nothing about it, and costs no run its harvest.

    Raises:
        DamagedData: It cannot be loaded.
    """
    try:
        return str(load_with_torch(path, load_with))
    except DamagedData:
        raise
    except (PermanentError, TransientError) as error:
        # In the record, which is masked: torch's last words may quote what it read.
        _log.warning("%s was not loaded: the run's record says why", path)
        return f"not loaded: {error.what}"


def chosen(complete: Sequence[Checkpoint], policy: str) -> Sequence[Checkpoint]:
    """Of a folder's complete checkpoints, oldest first, those of the policy (`HarvestPolicy.checkpoint`).

    `every K` counts back from the last, so the last is always among them.
    """
    step = {"none": 0, "last": len(complete), "all": 1}.get(policy)
    step = int(policy.removeprefix("every ")) if step is None else step
    return complete[::-1][::step][::-1] if step else ()


class _NotAsJudged(Exception):
    """A checkpoint cannot be stored completely: a link is in it, or it was modified since it was judged."""


def _files_of(checkpoint: Checkpoint, stored: str) -> Iterator[LocalFile]:
    yield from _files_below(checkpoint.path, stored)
    # What is all there after it was listed was there when it was listed.
    if checkpoint_size(checkpoint.path) != checkpoint.size:
        raise _NotAsJudged("its files were deleted or modified after it was found complete")
    for tracker in trackers_of(checkpoint.path):
        yield LocalFile(str(tracker), f"{Path(stored).parent}/{tracker.name}", "checkpoint")
    save_dir = checkpoint.path.parent
    loader = save_dir / LOADER_STATES / checkpoint.path.name
    if loader.is_dir():
        if not loader.resolve().is_relative_to(save_dir.resolve()):
            raise _NotAsJudged(f"{loader.relative_to(save_dir)} is a link to outside the checkpoints' folder")
        yield from _files_below(loader, f"{Path(stored).parent}/{LOADER_STATES}/{loader.name}")


def _files_below(root: Path, stored: str) -> Iterator[LocalFile]:
    for folder, folders, names in walk(root):
        folders.sort()
        for name in (*folders, *sorted(names)):
            path = folder / name
            inside = path.relative_to(root).as_posix()
            if path.is_symlink():
                raise _NotAsJudged(f"{inside} is a link, which is not followed")
            if name in names:
                if not path.is_file():
                    raise _NotAsJudged(f"{inside} is not a regular file")
                yield LocalFile(str(path), f"{stored}/{inside}", "checkpoint")


def _folder_of(output: RunOutput, path: Path) -> Path:
    """The run's folder in which nothing on the way to `path` may be a link when it is opened."""
    folders = (output.attempt_dir, output.output_dir, output.job_dir)
    return next((folder for folder in folders if folder is not None and path.is_relative_to(folder)), path.parent)


def _below(output: RunOutput, path: Path, folder: str, stored_folder: str) -> str:
    """`<stored folder>/<path below the run's own folder>`, that folder being `folder` where it has its usual name."""
    roots = [root for root in (output.output_dir, output.job_dir) if root is not None and path.is_relative_to(root)]
    inside = path.relative_to(roots[0] if roots else _parent_of_namesakes(output, path))
    parts = inside.parts[1:] if inside.parts[:1] == (folder,) else inside.parts
    return "/".join((stored_folder, *parts))


def _parent_of_namesakes(output: RunOutput, path: Path) -> Path:
    """What is left out before a path outside the run's own folder: all but its name, where no other folder has that.

    Of folders of one name it is what they have in common: no attempt's number gets into where a checkpoint is stored.
    """
    own = tuple(root for root in (output.output_dir, output.job_dir) if root is not None)
    folders = {checkpoint.path.parent for checkpoint in output.checkpoints}
    namesakes = (each for each in folders if each.name == path.name and not any(map(each.is_relative_to, own)))
    return Path(os.path.commonpath((path.parent, *(each.parent for each in namesakes))))


def _unique(units: Iterable[Unit]) -> tuple[tuple[Unit, ...], list[LeftOut]]:
    taken: dict[str, str] = {}
    kept: list[Unit] = []
    doubles: list[LeftOut] = []
    for unit in units:
        double = next((file for file in unit.files if file.path in taken), None)
        if double is not None:
            doubles.append(LeftOut(path=unit.path, reason=f"{double.source} has the same key as {taken[double.path]}"))
            continue
        kept.append(unit)
        taken |= {file.path: file.source for file in unit.files}
    return tuple(kept), doubles
