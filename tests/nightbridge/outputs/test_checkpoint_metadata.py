"""`data/*.metadata` were written by torch 2.13.0: two ranks saved a small model with torch.distributed.checkpoint, once as
it is, and once with the local plans that Megatron-Core keeps in it (`all_local_plans`)."""

import builtins
import os
import pickle
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nightbridge.errors import DamagedData
from nightbridge.outputs.checkpoints import StorageEntry, read_storage_entries

DATA = Path(__file__).parent / "data"
REAL = DATA / "torch_2_13_two_ranks.metadata"


@pytest.mark.parametrize("name", ["torch_2_13_two_ranks.metadata", "torch_2_13_with_plans.metadata"])
def test_what_torch_wrote_is_read_without_torch(name: Any) -> None:
    entries = read_storage_entries(DATA / name)
    assert StorageEntry("__0_0.distcp", 0, 1261) in entries
    ends = {
        shard: max(entry.offset + entry.length for entry in entries if entry.relative_path == shard)
        for shard in ("__0_0.distcp", "__1_0.distcp")
    }
    assert ends == {"__0_0.distcp": 4671, "__1_0.distcp": 7509}  # the sizes of the shards that torch wrote


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
        read_storage_entries(path)
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
        read_storage_entries(path)


@given(st.binary(max_size=200))
def test_random_bytes_raise_only_damage(tmp_path_factory: pytest.TempPathFactory, content: Any) -> None:
    path = tmp_path_factory.mktemp("pickle") / ".metadata"
    path.write_bytes(content)
    with pytest.raises(DamagedData):
        read_storage_entries(path)


@given(st.integers(0, REAL.stat().st_size - 1), st.integers(0, 255))
def test_a_real_file_with_one_byte_changed_never_raises_anything_else(
    tmp_path_factory: pytest.TempPathFactory, position: int, byte: int
) -> None:
    path = tmp_path_factory.mktemp("pickle") / ".metadata"
    content = bytearray(REAL.read_bytes())
    content[position] = byte
    path.write_bytes(content)
    try:
        entries = read_storage_entries(path)
    except DamagedData:
        return
    assert all(entry.offset >= 0 and entry.length >= 0 for entry in entries)
