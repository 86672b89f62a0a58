"""`data/*.metadata` were written by torch 2.13.0: two ranks saved a small model with torch.distributed.checkpoint, once as
it is, and once with the local plans that Megatron-Core keeps in it (`all_local_plans`).
`data/megatron_core_0_19_second_save.metadata` is that of the second asynchronous save of two ranks with Megatron-Core
0.19.2, nvidia-resiliency-ext of August 2026 and `ckpt_assume_constant_structure`."""

import builtins
import os
import pickle
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nightbridge.errors import DamagedData
from nightbridge.outputs.checkpoint_metadata import read_metadata
from tests.builders import saved_metadata, torch_files

DATA = Path(__file__).parent / "data"
REAL = DATA / "torch_2_13_two_ranks.metadata"


@pytest.mark.parametrize("name", ["torch_2_13_two_ranks.metadata", "torch_2_13_with_plans.metadata"])
def test_what_torch_wrote_is_read_without_torch(name: Any) -> None:
    metadata = read_metadata(DATA / name)
    entries = metadata.items
    assert (entries[0].name, *entries[0][1:4]) == ("rng_state/rank_0.seed", "__0_0.distcp", 0, 1261)
    assert {(entry.name, entry.dtype, entry.size) for entry in entries if entry.dtype} == {
        ("model.weight", "float32", 256),
        ("model.bias", "bfloat16", 14),
        ("optimizer.exp_avg", "float16", 16),
    }
    assert metadata.nested
    assert metadata.has("common_state")
    assert metadata.unknown == ()
    ends = {
        shard: max(entry.offset + entry.length for entry in entries if entry.relative_path == shard)
        for shard in ("__0_0.distcp", "__1_0.distcp")
    }
    assert ends == {"__0_0.distcp": 4671, "__1_0.distcp": 7509}  # the sizes of the shards that torch wrote


def test_a_second_save_that_took_over_the_plans_of_the_first_has_no_unknown_class() -> None:
    metadata = read_metadata(DATA / "megatron_core_0_19_second_save.metadata")
    assert metadata.unknown == ()
    assert metadata.has("common_state")
    assert not metadata.nested


class _Reduces:
    """Pickles as a call of anything."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


@pytest.fixture
def canary(tmp_path: Path) -> Path:
    return tmp_path / "the pickle was run"


def _attacks(canary: Path) -> dict[str, bytes]:
    command = f"touch '{canary}'"
    code = f"open({str(canary)!r}, 'w')"
    torch_name = b"\x8c\x25torch.distributed.checkpoint.metadata"
    return {
        "os.system": pickle.dumps(_Reduces(os.system, command)),
        "os.system in protocol 0": pickle.dumps(_Reduces(os.system, command), protocol=0),
        "builtins.eval": pickle.dumps(_Reduces(builtins.eval, code)),
        "builtins.exec": pickle.dumps(_Reduces(builtins.exec, code)),
        "getattr of an import": b"cbuiltins\ngetattr\n(cbuiltins\n__import__\n(S'os'\ntRS'system'\ntR.",
        "subprocess.Popen": pickle.dumps(_Reduces(subprocess.Popen, ["touch", str(canary)])),
        "a class of ours": pickle.dumps(DamagedData("harmless")),
        "an attribute of an allowed module": b"\x80\x04" + torch_name + b"\x8c\x09os.system\x93.",
        "a function of torch": b"\x80\x04\x8c\x05torch\x8c\x04load\x93.",
        "torch's hub": b"\x80\x04\x8c\x09torch.hub\x8c\x04load\x93.",
        "a look-alike module": b"\x80\x04\x8c\x1btorch.distributed.checkpoin\x8c\x01X\x93.",
        "an extension code": b"\x80\x04\x82\x01.",
        "a persistent id": b"\x80\x04K\x01Q.",
        "an instance opcode": b"(cos\nsystem\n" + b".",
        "an old instance": b"(S'" + command.encode().replace(b"'", b"") + b"'\nios\nsystem\n.",
        "a memo of gigabytes": b"\x80\x04K\x01r\xff\xff\xff\x7f.",
        "the call hidden behind a real file": REAL.read_bytes()[:-1] + b"0cos\nsystem\n(S'true'\ntR.",
    }


@pytest.mark.parametrize("name", list(_attacks(Path("unused"))))
def test_nothing_of_a_malicious_file_is_run(
    tmp_path: Path, canary: Path, name: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / ".metadata"
    path.write_bytes(_attacks(canary)[name])
    with pytest.raises(DamagedData) as caught:
        read_metadata(path)
    assert "was not loaded" in str(caught.value)
    assert not canary.exists()


def test_the_attacks_are_real(tmp_path: Path, canary: Path) -> None:
    """Else the test above would pass on files that do nothing anywhere."""
    pickle.loads(_attacks(canary)["os.system"])
    assert canary.exists()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x80\x04.",
        b"not a pickle",
        pickle.dumps({"storage_data": {}}),
        pickle.dumps([1]),
        b"\x80\x04\x8c\x25torch.distributed.checkpoint.metadata\x8c\x08Metadata\x93.",
        b"\x80\x04\x8c\x25torch.distributed.checkpoint.metadata\x8c\x08Metadata\x93)\x81.",
        b"\x80\x04\x8c\x25torch.distributed.checkpoint.metadata\x8c\x08Metadata\x93)\x81}\x8c\x0cstorage_dataNsb.",
        b"\x80\x04\x8c\x25torch.distributed.checkpoint.metadata\x8c\x08Metadata\x93K\x01b.",
    ],
)
def test_anything_else_is_damage_and_says_so(tmp_path: Path, content: Any) -> None:
    path = tmp_path / ".metadata"
    path.write_bytes(content)
    with pytest.raises(DamagedData):
        read_metadata(path)


@given(st.binary(max_size=200))
def test_random_bytes_raise_only_damage(tmp_path_factory: pytest.TempPathFactory, content: Any) -> None:
    path = tmp_path_factory.mktemp("pickle") / ".metadata"
    path.write_bytes(content)
    with pytest.raises(DamagedData):
        read_metadata(path)


@given(st.integers(0, REAL.stat().st_size - 1), st.integers(0, 255))
def test_a_real_file_with_one_byte_changed_never_raises_anything_else(
    tmp_path_factory: pytest.TempPathFactory, position: int, byte: int
) -> None:
    path = tmp_path_factory.mktemp("pickle") / ".metadata"
    content = bytearray(REAL.read_bytes())
    content[position] = byte
    path.write_bytes(content)
    try:
        entries = read_metadata(path).items
    except DamagedData:
        return
    assert all(entry.offset >= 0 and entry.length >= 0 for entry in entries)


def _bomb(levels: int, join: bytes) -> bytes:
    """A dictionary whose one key is a tuple of two tuples, each of two of the next, and so on, made by `join`."""
    nested = b"".join(b"h%c" % number + b"h%c" % number + join + b"q%c" % (number + 1) for number in range(levels))
    return b"\x80\x02}K\x01\x85q\x00" + nested + b"K\x01s."


@pytest.mark.parametrize(
    "content",
    [
        _bomb(60, b"\x86"),
        _bomb(60, b"\x86\x85\x86"),
        b"\x80\x02}K\x01\x85q\x00" + b"ctorch\nSize\n]q\x01(h\x00h\x00e\x85R" * 3 + b"K\x01s.",
        b"\x80\x04}(\x8f(K\x01\x90K\x02u.",
    ],
    ids=["pairs", "pairs in tuples", "a shape of a list", "a set"],
)
def test_a_key_that_would_take_for_ever_to_hash_is_refused_at_once(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / ".metadata"
    path.write_bytes(content)
    begun = time.monotonic()
    with pytest.raises(DamagedData):
        read_metadata(path)
    assert time.monotonic() - begun < 2


def test_a_class_of_torch_that_this_release_does_not_know_is_named(tmp_path: Path) -> None:
    path = tmp_path / ".metadata"
    path.write_bytes(REAL.read_bytes().replace(b"\x0bStorageMeta\x94", b"\x0bStorageMets\x94"))
    assert read_metadata(path).unknown == ("torch.distributed.checkpoint.metadata.StorageMets",)


CONTRADICTIONS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "an item is not stored": (lambda m: m.storage_data.popitem(), "1 parts of the state dict are not stored"),
    "an item is stored twice": (
        lambda m: m.storage_data.update(
            {torch_files.MetadataIndex(fqn="model.b", offset=torch_files.Size((0,)), index=0): _place(m)}
        ),
        "it stores `model.b` twice",
    ),
    "an item is not of the state dict": (
        lambda m: m.state_dict_metadata.pop("model.b"),
        "or stores what the state dict does not have",
    ),
    "a chunk outside": (lambda m: _chunk(m, (990,), (25,)), "lies outside of its tensor"),
    "a hole": (lambda m: _chunk(m, (0,), (999,)), "do not fill its tensor once"),
    "other dimensions": (lambda m: _chunk(m, (0, 0), (5, 5)), "has not its tensor's dimensions"),
    "a negative shape": (lambda m: _chunk(m, (0,), (-1,)), "a shape is not a tuple of numbers"),
    "another path": (
        lambda m: setattr(m, "planner_data", {"model.a": ("model", "a"), "model.b": ("model", "c")}),
        "the name `model.b` does not agree with its path",
    ),
    "a range before the file": (lambda m: setattr(_place(m), "offset", -1), "is not a range of a file"),
}


def _place(metadata: Any) -> Any:
    return next(iter(metadata.storage_data.values()))


def _chunk(metadata: Any, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> None:
    offsets, sizes = torch_files.Size(offsets), torch_files.Size(sizes)
    chunk = torch_files.ChunkStorageMetadata(offsets=offsets, sizes=sizes)
    metadata.state_dict_metadata["model.b"].chunks = [chunk]
    (index,) = (each for each in metadata.storage_data if each.fqn == "model.b")
    index.offset = offsets


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_metadata_that_contradicts_itself_is_damage(tmp_path: Path, name: str) -> None:
    change, reason = CONTRADICTIONS[name]
    path = tmp_path / ".metadata"
    metadata = saved_metadata({"a": (0, 4000), "b": (0, 4000)})
    path.write_bytes(torch_files.pickle_metadata(metadata))
    assert len(read_metadata(path).items) == 2
    change(metadata)
    path.write_bytes(torch_files.pickle_metadata(metadata))
    with pytest.raises(DamagedData, match=reason):
        read_metadata(path)


def test_chunks_that_overlap_are_damage_in_whatever_dimension(tmp_path: Path) -> None:
    path = tmp_path / ".metadata"
    metadata = saved_metadata({"a": (0, 4000)})
    quarters = [(row, column) for row in (0, 2) for column in (0, 3)]
    for corners, whole in ((quarters, True), ([(0, 0), (0, 3), (1, 0), (2, 3)], False)):
        chunks = [
            torch_files.ChunkStorageMetadata(offsets=torch_files.Size(corner), sizes=torch_files.Size((2, 3)))
            for corner in corners
        ]
        tensor = metadata.state_dict_metadata["model.a"]
        tensor.size, tensor.chunks = torch_files.Size((4, 6)), chunks
        place = _place(metadata)
        metadata.storage_data = {
            torch_files.MetadataIndex(fqn="model.a", offset=chunk.offsets, index=number): place
            for number, chunk in enumerate(chunks)
        }
        path.write_bytes(torch_files.pickle_metadata(metadata))
        if whole:
            assert len(read_metadata(path).items) == 4
        else:
            with pytest.raises(DamagedData, match="do not fill its tensor once"):
                read_metadata(path)
