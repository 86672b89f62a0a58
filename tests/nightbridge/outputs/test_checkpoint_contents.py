"""`data/torch_2_13_checkpoints.tar.xz` has one checkpoint of each layout of `benchmarks/checkpoint_damage.py`, written by
torch 2.13.0; `...harmful_flips.json` names bits of them that, flipped, made torch load other values or fail."""

import json
import random
import shutil
import tarfile
from pathlib import Path
from typing import Any

import pytest

from benchmarks.checkpoint_damage import LAYOUTS, damages, flip, folder_of, harmless
from nightbridge.models import CheckpointState
from nightbridge.outputs.checkpoints import checkpoint_state
from tests.builders import saved_shards, torch_files

DATA = Path(__file__).parent / "data"
HARMFUL = json.loads((DATA / "torch_2_13_checkpoints.harmful_flips.json").read_text())
UNPROVEN = {
    "Hugging Face": "is a safetensors file, which has no checksum",
    "Megatron-LM, torch": "without .metadata nothing says which files it has to have",
    "Megatron-LM, torch_dcp": "without metadata.json it is torch_dcp or fsdp_dtensor, unless that file was lost",
    "checksums off": "the writer of __0_0.distcp had checksums switched off",
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    with tarfile.open(DATA / "torch_2_13_checkpoints.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Any:
    def make(layout: str) -> Path:
        shutil.rmtree(tmp_path / "copy", ignore_errors=True)
        return Path(shutil.copytree(saved / layout, tmp_path / "copy"))

    return make


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_torch_wrote_is_verified_or_says_what_has_no_checksum(saved: Path, copy: Any, layout: str) -> None:
    for kind, name, change in harmless(saved / layout):
        root = copy(layout)
        change(root / name)
        state, reason = checkpoint_state(folder_of(root))
        assert (state is CheckpointState.VERIFIED) == (layout not in UNPROVEN), (kind, state, reason)
        if layout in UNPROVEN:
            assert state is CheckpointState.UNPROVEN
            assert UNPROVEN[layout] in reason


@pytest.mark.parametrize("layout", HARMFUL)
def test_a_flipped_bit_that_torch_loads_wrong_or_not_at_all_is_damage(copy: Any, layout: str) -> None:
    for name, bit in HARMFUL[layout]:
        root = copy(layout)
        flip(root / name, bit)
        state, _ = checkpoint_state(folder_of(root))
        assert state is CheckpointState.DAMAGED, (name, bit)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_file_that_is_cut_off_lost_or_full_of_zeros_is_never_part_of_a_verified_checkpoint(
    saved: Path, copy: Any, layout: str
) -> None:
    """What may go without notice is a part that a layout can do without; then it says that something is not proven."""
    tried = 0
    for kind, name, change in damages(saved / layout, saved / layout, random.Random(3)):
        if kind not in ("truncated", "missing", "zeros", "swapped"):
            continue
        root = copy(layout)
        change(root / name)
        state, reason = checkpoint_state(folder_of(root))
        assert state in (CheckpointState.DAMAGED, CheckpointState.IN_PROGRESS) or (
            kind == "missing" and state is CheckpointState.UNPROVEN
        ), (kind, name, state, reason)
        tried += 1
    assert tried >= 14


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_flip_ends_in_a_state_and_never_in_an_error(saved: Path, copy: Any, layout: str) -> None:
    chance = random.Random(5)
    files = [path for path in sorted((saved / layout).rglob("*")) if path.is_file()]
    for _ in range(30):
        path = chance.choice(files)
        root = copy(layout)
        flip(root / path.relative_to(saved / layout), chance.randrange(path.stat().st_size * 8))
        assert checkpoint_state(folder_of(root))[0] in CheckpointState


def _save(folder: Path) -> Path:
    """A checkpoint of torch.distributed.checkpoint alone, of two shards."""
    folder.mkdir()
    for name, content in saved_shards({"__0_0.distcp": 4000, "__1_0.distcp": 4000}, random.Random(1)).items():
        (folder / name).write_bytes(content)
    return folder


def test_an_item_that_the_metadata_does_not_name_is_damage_and_other_bytes_are_not(tmp_path: Path) -> None:
    path = _save(tmp_path / "step-1")
    with (path / "__0_0.distcp").open("ab") as stream:
        stream.write(b"not an item")
    assert checkpoint_state(path) == (CheckpointState.VERIFIED, "")
    (path / "__1_0.distcp").write_bytes((path / "__1_0.distcp").read_bytes() + torch_files.torch_save({"lost": 1}))
    state, reason = checkpoint_state(path)
    assert state is CheckpointState.DAMAGED
    assert "are an item that .metadata does not name" in reason


@pytest.mark.parametrize(
    ("content", "state"),
    [
        (b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02M\xe9\x03.", CheckpointState.UNPROVEN),
        (b"\x80\x02}q\x00.", CheckpointState.DAMAGED),
        (b"", CheckpointState.DAMAGED),
    ],
    ids=["saved before torch 1.6", "a bare pickle", "empty"],
)
def test_what_else_may_lie_in_a_pt_file(tmp_path: Path, content: bytes, state: CheckpointState) -> None:
    path = _save(tmp_path / "step-1")
    (path / "extra.pt").write_bytes(content)
    assert checkpoint_state(path)[0] is state


def test_a_folder_of_shards_without_metadata_is_not_finished(tmp_path: Path) -> None:
    path = _save(tmp_path / "step-1")
    (path / ".metadata").unlink()
    assert checkpoint_state(path) == (CheckpointState.IN_PROGRESS, "there is no .metadata yet")


def test_a_run_config_that_is_cut_off_at_the_end_of_a_line_is_damage(copy: Any) -> None:
    root = copy("Bridge, common.pt")
    path = folder_of(root) / "run_config.yaml"
    lines = path.read_bytes().splitlines(keepends=True)
    for kept in range(1, next(number for number, line in enumerate(lines) if line == b"train:\n")):
        path.write_bytes(b"".join(lines[:kept]))
        assert checkpoint_state(folder_of(root))[0] is CheckpointState.DAMAGED, kept
