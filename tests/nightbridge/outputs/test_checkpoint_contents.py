"""`data/torch_2_13_checkpoints.tar.xz` has one checkpoint of each layout of `benchmarks/checkpoint_damage.py`, written by
torch 2.13.0; `...harmful_flips.json` names bits of them that, flipped, made torch load other values or fail.
`data/torch_2_13_saved.pt` is what torch 2.13.0's `torch.save` wrote for a dictionary of two tensors and a list. In
`data/torch_2_13_saved.harmful_flips` a bit is set for each of its bits that, flipped, made torch load other values or fail:
7,819 of 17,192."""

import io
import json
import random
import shutil
import tarfile
import zipfile
import zlib
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from benchmarks.checkpoint_damage import LAYOUTS, damages, flip, folder_of, harmless
from nightbridge.errors import DamagedData
from nightbridge.models import CheckpointState
from nightbridge.outputs.checkpoint_contents import BadArchive, Record, read_archive
from nightbridge.outputs.checkpoints import checkpoint_state, files_below, prove_checkpoint
from tests.builders import saved_shards, torch_files

DATA = Path(__file__).parent / "data"
HARMFUL = json.loads((DATA / "torch_2_13_checkpoints.harmful_flips.json").read_text())
UNPROVEN = {
    "Hugging Face": "is a safetensors file, which has no checksum",
    "Megatron-LM, torch": "without .metadata it is unknown which files it has to have",
    "Megatron-LM, torch_dcp": "without metadata.json it is torch_dcp or fsdp_dtensor, unless that file was lost",
    "checksums off": "the writer of __0_0.distcp had checksums switched off",
}

UNKNOWN_FORMAT = "metadata.json names a format that this release does not know"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    with tarfile.open(DATA / "torch_2_13_checkpoints.tar.xz") as archive:
        # Python 3.11 before 3.11.4, as Debian 12 has it, knows no filter.
        archive.extraction_filter = getattr(tarfile, "data_filter", None)
        archive.extractall(folder)
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


@pytest.mark.parametrize(
    ("common", "unknown"),
    [
        ({"common_backend": "torch", "common_backend_version": 1}, ""),
        ({"common_backend": "torch", "common_backend_version": 2}, UNKNOWN_FORMAT),
        ({"common_backend": "zarr"}, UNKNOWN_FORMAT),
        ({"sharded_backend_version": 2}, UNKNOWN_FORMAT),
    ],
)
def test_megatron_core_before_0_19_names_its_common_backend_too(
    copy: Any, common: dict[str, Any], unknown: str
) -> None:
    path = folder_of(copy("Bridge, common.pt"))
    content = json.loads((path / "metadata.json").read_text())
    (path / "metadata.json").write_text(json.dumps(content | common))
    state = CheckpointState.UNPROVEN if unknown else CheckpointState.VERIFIED
    assert checkpoint_state(path) == (state, unknown)


@pytest.mark.parametrize("layout", HARMFUL)
def test_a_flipped_bit_that_torch_loads_wrong_or_not_at_all_is_damage(copy: Any, layout: str) -> None:
    root = copy(layout)
    for name, bit in HARMFUL[layout]:
        flip(root / name, bit)
        state, _ = checkpoint_state(folder_of(root))
        assert state is CheckpointState.DAMAGED, (name, bit)
        flip(root / name, bit)


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
    chance, root = random.Random(5), copy(layout)
    files = [path for path in sorted(root.rglob("*")) if path.is_file()]
    for _ in range(30):
        path = chance.choice(files)
        bit = chance.randrange(path.stat().st_size * 8)
        flip(path, bit)
        assert checkpoint_state(folder_of(root))[0] in CheckpointState
        flip(path, bit)


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


def test_an_archive_of_torch_is_looked_into_under_its_other_name(tmp_path: Path) -> None:
    path = _save(tmp_path / "step-1")
    whole = torch_files.torch_save({"weight": np.arange(100.0)})
    for content, state in (
        (whole, CheckpointState.VERIFIED),
        (whole[:700], CheckpointState.DAMAGED),
        (whole.replace(np.arange(100.0).tobytes(), bytes(800)), CheckpointState.DAMAGED),
    ):
        (path / "modelopt_state.pth").write_bytes(content)
        assert checkpoint_state(path)[0] is state, len(content)


@pytest.mark.parametrize(
    ("names", "missing"),
    [
        (("00", "01", "02", "03"), ""),
        (("00", "01", "03"), "there is no mp_rank 2, but a mp_rank 3"),
        (("01",), "there is no mp_rank 0, but a mp_rank 1"),
        (("00_000", "00_001", "01_000", "01_001"), ""),
        (("00_000", "00_002", "01_000"), "there is no mp_rank 1, but a mp_rank 2"),
        (("00_000_000", "00_000_001", "01_000_001", "01_000_002"), ""),
    ],
)
def test_ranks_of_megatron_lm_have_no_gap(copy: Any, names: tuple[str, ...], missing: str) -> None:
    path = folder_of(copy("Megatron-LM, torch"))
    content = (path / "mp_rank_00/model_optim_rng.pt").read_bytes()
    shutil.rmtree(path)
    for name in names:
        (path / f"mp_rank_{name}").mkdir(parents=True)
        (path / f"mp_rank_{name}/model_optim_rng.pt").write_bytes(content)
    state, reason = checkpoint_state(path)
    assert (state, reason) == (
        (CheckpointState.DAMAGED, missing) if missing else (CheckpointState.UNPROVEN, UNPROVEN["Megatron-LM, torch"])
    )


@pytest.mark.parametrize(("ranks", "state"), [((0, 1, 2), "whole"), ((0, 2), "damaged"), ((1,), "damaged")])
def test_data_loaders_ranks_have_no_gap(copy: Any, ranks: tuple[int, ...], state: str) -> None:
    root = copy("Bridge, common.pt")
    loaders = root / "energon" / folder_of(root).name
    loaders.mkdir(parents=True)
    for rank in ranks:
        (loaders / f"train_dataloader_dprank{rank:03d}.pt").write_bytes(torch_files.torch_save({"at": 7}))
    files = [*files_below(folder_of(root)), *loaders.iterdir()]
    with nullcontext() if state == "whole" else pytest.raises(DamagedData, match="there is no train_dataloader_dprank"):
        prove_checkpoint(folder_of(root), files)


@pytest.mark.parametrize("where", [".", "hf"])
@pytest.mark.parametrize(
    ("lost", "missing"),
    [
        (("model.safetensors.index.json", "model-00002-of-00002.safetensors"), "model-00002-of-00002.safetensors"),
        (("model.safetensors.index.json", "model-00001-of-00002.safetensors"), "model-00001-of-00002.safetensors"),
        (("model.safetensors.index.json",), ""),
        ((), ""),
    ],
)
def test_an_export_that_was_killed_before_its_last_weights_is_damaged(
    copy: Any, tmp_path: Path, where: str, lost: tuple[str, ...], missing: str
) -> None:
    path = export = folder_of(copy("Hugging Face"))
    if where == "hf":
        shutil.copytree(export, tmp_path / "export")
        path = folder_of(copy("Bridge, common.pt"))
        export = shutil.copytree(tmp_path / "export", path / "hf")
    for name in lost:
        (export / name).unlink()

    state, reason = checkpoint_state(path)

    assert state is (CheckpointState.DAMAGED if missing else CheckpointState.UNPROVEN)
    assert (f"there is no {missing}" if missing else "model-00001-of-00002.safetensors is a safetensors") in reason


@pytest.mark.parametrize(
    ("named", "reason"),
    [
        ("weights/{}", ""),
        ("weights/../weights/{}", "model-00001-of-00002.safetensors lies outside the checkpoint"),
        ("/weights/{}", "model-00001-of-00002.safetensors lies outside the checkpoint"),
        ("{}", "shard model-00001-of-00002.safetensors is missing, and model.safetensors.index.json names it"),
    ],
)
def test_an_index_names_its_files_by_their_path_in_the_export(copy: Any, named: str, reason: str) -> None:
    """Megatron-Bridge keeps the folders that the source's own index names."""
    path = folder_of(copy("Hugging Face"))
    index = json.loads((path / "model.safetensors.index.json").read_text())
    index["weight_map"] = {tensor: named.format(file) for tensor, file in index["weight_map"].items()}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    (path / "weights").mkdir()
    for file in path.glob("*.safetensors"):
        file.rename(path / "weights" / file.name)

    state, said = checkpoint_state(path)

    assert state is (CheckpointState.DAMAGED if reason else CheckpointState.UNPROVEN)
    assert (reason or "is a safetensors file, which has no checksum") in said


@pytest.mark.parametrize(
    "name", ["a\0b.safetensors", "a" * 300, "model.safetensors.index.json/b.safetensors", "", 3, None]
)
def test_an_index_that_names_what_can_be_no_file_is_damaged(copy: Any, name: Any) -> None:
    path = folder_of(copy("Hugging Face"))
    index = json.loads((path / "model.safetensors.index.json").read_text())
    index["weight_map"] = dict.fromkeys(index["weight_map"], name)
    (path / "model.safetensors.index.json").write_text(json.dumps(index))

    state, _reason = checkpoint_state(path)

    assert state is CheckpointState.DAMAGED


def test_a_file_that_no_check_covers_is_named(copy: Any) -> None:
    path = folder_of(copy("Bridge, common.pt"))
    for name in ("tokenizer.model", "merges.txt"):
        (path / "tokenizer").mkdir(exist_ok=True)
        (path / "tokenizer" / name).write_bytes(bytes(1000))

    state, reason = checkpoint_state(path)

    assert (state, reason) == (
        CheckpointState.UNPROVEN,
        "merges.txt has no checksum; tokenizer.model has no checksum",
    )


def _configure(path: Path, checkpoint: dict[str, Any], tokenizer: str) -> None:
    settings = yaml.safe_load((path / "run_config.yaml").read_text())
    settings["checkpoint"] = {**settings.get("checkpoint", {}), **checkpoint}
    settings["tokenizer"] = {"tokenizer_type": tokenizer}
    (path / "run_config.yaml").write_text(yaml.safe_dump(settings))


NO_TOKENIZER = "there is no tokenizer/, which run_config.yaml has saved"


@pytest.mark.parametrize(
    ("tokenizer", "saves", "files", "missing"),
    [
        ("HuggingFaceTokenizer", True, (), NO_TOKENIZER),
        ("HuggingFaceTokenizer", True, ("tokenizer_config.json", "tokenizer.json"), ""),
        ("HuggingFaceTokenizer", True, ("tokenizer_config.json", "vocab.json", "special_tokens_map.json"), ""),
        ("HuggingFaceTokenizer", True, ("tokenizer.json",), "tokenizer/ has no tokenizer_config.json"),
        ("HuggingFaceTokenizer", True, ("special_tokens_map.json",), "tokenizer/ has no tokenizer_config.json"),
        (
            "HuggingFaceTokenizer",
            True,
            ("special_tokens_map.json", "tokenizer_config.json"),
            "tokenizer/ has no vocabulary",
        ),
        ("HuggingFaceTokenizer", False, (), ""),
        ("GPT2BPETokenizer", True, ("vocab.json",), ""),
        ("GPT2BPETokenizer", True, (), NO_TOKENIZER),
        ("NullTokenizer", True, (), ""),
    ],
)
def test_a_tokenizer_that_was_to_be_saved_and_is_not_there_as_a_whole_is_named(
    copy: Any, tokenizer: str, saves: bool, files: tuple[str, ...], missing: str
) -> None:
    path = folder_of(copy("Bridge, common.pt"))
    _configure(path, {"save_tokenizer_assets": saves}, tokenizer)
    for name in files:
        (path / "tokenizer").mkdir(exist_ok=True)
        (path / "tokenizer" / name).write_text("{}")

    state = CheckpointState.UNPROVEN if missing else CheckpointState.VERIFIED
    assert checkpoint_state(path) == (state, missing)


@pytest.mark.parametrize("files", [(), ("config.json",)], ids=["no folder", "no weights"])
def test_an_export_that_was_to_be_saved_and_has_no_weights_is_named(copy: Any, files: tuple[str, ...]) -> None:
    path = folder_of(copy("Bridge, common.pt"))
    _configure(path, {"also_save_hf_checkpoint": True}, "NullTokenizer")
    for name in files:
        (path / "hf").mkdir()
        (path / "hf" / name).write_text("{}")
    assert checkpoint_state(path) == (
        CheckpointState.UNPROVEN,
        "there is no hf/*.safetensors, which run_config.yaml has saved",
    )


@pytest.mark.parametrize(
    ("lost", "state", "reason"),
    [
        ((), CheckpointState.VERIFIED, ""),
        ((".metadata",), CheckpointState.DAMAGED, "modelopt_state has no .metadata"),
        (("__0_0.distcp",), CheckpointState.DAMAGED, "shard __0_0.distcp is missing"),
        ((".metadata", "__0_0.distcp", "__1_0.distcp"), CheckpointState.DAMAGED, "modelopt_state has no .metadata"),
    ],
    ids=["nothing", "metadata", "a shard", "all"],
)
def test_a_distributed_checkpoint_within_a_checkpoint_is_looked_into_too(
    copy: Any, lost: tuple[str, ...], state: CheckpointState, reason: str
) -> None:
    path = folder_of(copy("Bridge, common.pt"))
    part = _save(path / "modelopt_state")
    for name in lost:
        (part / name).unlink()
    assert checkpoint_state(path) == (state, reason)


def test_shards_in_any_folder_of_a_checkpoint_have_a_metadata(copy: Any) -> None:
    path = folder_of(copy("Bridge, common.pt"))
    (_save(path / "part") / ".metadata").unlink()
    assert checkpoint_state(path) == (CheckpointState.DAMAGED, "part has no .metadata")


@pytest.mark.parametrize("target", ["/nonexistent", "../common.pt", "/etc/hostname"])
def test_a_link_in_place_of_a_file_is_named(copy: Any, target: str) -> None:
    path = folder_of(copy("Bridge, common.pt"))
    (path / "tokenizer").mkdir()
    (path / "tokenizer/tokenizer.json").symlink_to(target)
    assert checkpoint_state(path) == (
        CheckpointState.UNPROVEN,
        "tokenizer/tokenizer.json is a link, which is not followed",
    )


@pytest.mark.parametrize("step", [10, 20])
@pytest.mark.parametrize("storage", ["LongStorage", "IntStorage"])
def test_a_checkpoint_with_the_training_state_of_another_iteration_is_damaged(
    copy: Any, step: int, storage: str
) -> None:
    """Megatron-Bridge has written the step in 32 bits, too."""
    content, root = io.BytesIO(), copy("Bridge, common.pt")
    saved_state = torch_files.torch_save({"step": np.array(step)}, "train_state")
    with zipfile.ZipFile(io.BytesIO(saved_state)) as whole, zipfile.ZipFile(content, "w") as written:
        for name in whole.namelist():
            data = whole.read(name).replace(b"LongStorage", storage.encode())
            written.writestr(name, data[:4] if name.endswith("data/0") and storage == "IntStorage" else data)
    for path in (folder_of(root) / "train_state.pt", root / "latest_train_state.pt"):
        path.write_bytes(content.getvalue())
    right = (CheckpointState.VERIFIED, "")
    wrong = (CheckpointState.DAMAGED, "train_state.pt is of iteration 20")
    assert checkpoint_state(folder_of(root)) == (right if step == 10 else wrong)


def test_the_training_state_that_torch_wrote_tells_its_iteration(copy: Any) -> None:
    root = copy("Bridge, common.pt")
    shutil.copytree(folder_of(root), root / "iter_0000005")
    assert checkpoint_state(root / "iter_0000005") == (CheckpointState.DAMAGED, "train_state.pt is of iteration 10")


def test_a_folder_of_shards_without_metadata_is_not_finished(tmp_path: Path) -> None:
    path = _save(tmp_path / "step-1")
    (path / ".metadata").unlink()
    assert checkpoint_state(path) == (CheckpointState.IN_PROGRESS, "there is no .metadata yet")


@pytest.mark.parametrize(
    ("lost", "state"),
    [
        (("metadata.json",), CheckpointState.DAMAGED),
        (("train_state.pt",), CheckpointState.DAMAGED),
        (("metadata.json", "run_config.yaml", "train_state.pt"), CheckpointState.IN_PROGRESS),
        ((), CheckpointState.VERIFIED),
    ],
)
@pytest.mark.parametrize("layout", ["Bridge, common.pt", "Bridge, common state in shards"])
def test_a_copy_under_another_name_is_whole_only_with_all_that_its_writer_wrote(
    saved: Path, tmp_path: Path, layout: str, lost: tuple[str, ...], state: CheckpointState
) -> None:
    best = Path(shutil.copytree(folder_of(saved / layout), tmp_path / "best"))
    for name in lost:
        (best / name).unlink()
    assert checkpoint_state(best)[0] is state


def test_a_run_config_that_is_cut_off_at_the_end_of_a_line_is_damage(copy: Any) -> None:
    root = copy("Bridge, common.pt")
    path = folder_of(root) / "run_config.yaml"
    lines = path.read_bytes().splitlines(keepends=True)
    for kept in range(1, next(number for number, line in enumerate(lines) if line == b"train:\n")):
        path.write_bytes(b"".join(lines[:kept]))
        assert checkpoint_state(folder_of(root))[0] is CheckpointState.DAMAGED, kept


ARCHIVE = (DATA / "torch_2_13_saved.pt").read_bytes()


def _wrong_records(content: bytes) -> list[Record]:
    records = read_archive(io.BytesIO(content), 0, len(content))
    return [each for each in records if zlib.crc32(content[each.offset : each.offset + each.size]) != each.crc32]


def test_the_records_of_what_torch_wrote_are_found_with_their_checksums() -> None:
    records = {record.name: record for record in read_archive(io.BytesIO(ARCHIVE), 0, len(ARCHIVE))}
    assert _wrong_records(ARCHIVE) == []
    assert {name: records[name].size for name in ("data/0", "data/1")} == {"data/0": 280, "data/1": 24}


def test_an_archive_in_the_middle_of_a_file_is_read_at_its_offset() -> None:
    shard = b"x" * 99 + ARCHIVE + b"y" * 7
    assert [record.offset - 99 for record in read_archive(io.BytesIO(shard), 99, len(ARCHIVE))] == [
        record.offset for record in read_archive(io.BytesIO(ARCHIVE), 0, len(ARCHIVE))
    ]


def test_every_flipped_bit_that_torch_would_load_wrong_or_not_at_all_is_found() -> None:
    harmful = (DATA / "torch_2_13_saved.harmful_flips").read_bytes()
    missed = []
    for position, bits in enumerate(harmful):
        for bit in (bit for bit in range(8) if bits >> bit & 1):
            content = bytearray(ARCHIVE)
            content[position] ^= 1 << bit
            try:
                found = bool(_wrong_records(bytes(content)))
            except BadArchive:
                found = True
            if not found:
                missed.append((position, bit))
    assert sum(bits.bit_count() for bits in harmful) == 7819
    assert missed == []


@pytest.mark.parametrize("size", [0, 1, 21, 22, 100, 1000, len(ARCHIVE) - 12])
def test_a_truncated_or_zero_filled_archive_is_damaged(size: int) -> None:
    for content in (ARCHIVE[:size], ARCHIVE[:size] + bytes(len(ARCHIVE) - size), bytes(size + 1) + ARCHIVE[size + 1 :]):
        with pytest.raises(BadArchive):
            read_archive(io.BytesIO(content), 0, len(content))


def test_random_bytes_raise_nothing_else() -> None:
    ends = random.Random(1)
    for _ in range(300):
        content = ends.randbytes(150) + ends.choice([b"", ARCHIVE[-98:], ARCHIVE[-22:]])
        with pytest.raises(BadArchive):
            read_archive(io.BytesIO(content), 0, len(content))


def test_sizes_of_more_than_32_bits_are_read_from_their_extra_field(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 10)
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for name in ("data.pkl", "data/0"):
            archive.writestr(f"archive/{name}", b"a" * 20)
    content = stream.getvalue()
    assert content.count(b"\xff\xff\xff\xff") > 2
    assert [(record.name, record.size) for record in read_archive(stream, 0, len(content))] == [
        ("data.pkl", 20),
        ("data/0", 20),
    ]
    assert _wrong_records(content) == []


def test_a_record_beyond_what_a_file_can_hold_is_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", -1)
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("archive/data.pkl", b"a" * 20)
    content = bytearray(stream.getvalue())
    extra = content.index(b"\x01\x00", content.index(b"PK\1\2") + 46)
    content[extra + 4 : extra + 4 + 24] = b"\xff" * 24
    with pytest.raises(BadArchive, match="one after the other"):
        read_archive(io.BytesIO(content), 0, len(content))


def test_a_compressed_record_is_none_of_torchs() -> None:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"a" * 100)
    with pytest.raises(BadArchive, match="compressed"):
        read_archive(stream, 0, len(stream.getvalue()))
