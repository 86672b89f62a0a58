"""`data/torch_2_13_saved.pt` is what torch 2.13.0's `torch.save` wrote for a dictionary of two tensors and a list. In
`data/torch_2_13_saved.harmful_flips` a bit is set for each of its bits that, flipped, made torch load other values or fail:
7,819 of 17,192."""

import io
import random
import zipfile
import zlib
from pathlib import Path

import pytest

from nightbridge.outputs.archives import BadArchive, Record, has_checksums, read_archive

DATA = Path(__file__).parent / "data"
SAVED = (DATA / "torch_2_13_saved.pt").read_bytes()


def _wrong_records(content: bytes) -> list[Record]:
    records = read_archive(io.BytesIO(content), 0, len(content))
    return [each for each in records if zlib.crc32(content[each.offset : each.offset + each.size]) != each.crc32]


def test_the_records_of_what_torch_wrote_are_found_with_their_checksums() -> None:
    records = {record.name: record for record in read_archive(io.BytesIO(SAVED), 0, len(SAVED))}
    assert _wrong_records(SAVED) == []
    assert {name: records[name].size for name in ("data/0", "data/1")} == {"data/0": 280, "data/1": 24}
    assert has_checksums(tuple(records.values()))


def test_an_archive_in_the_middle_of_a_file_is_read_at_its_offset() -> None:
    shard = b"x" * 99 + SAVED + b"y" * 7
    assert [record.offset - 99 for record in read_archive(io.BytesIO(shard), 99, len(SAVED))] == [
        record.offset for record in read_archive(io.BytesIO(SAVED), 0, len(SAVED))
    ]


def test_every_flipped_bit_that_torch_would_load_wrong_or_not_at_all_is_found() -> None:
    harmful = (DATA / "torch_2_13_saved.harmful_flips").read_bytes()
    missed = []
    for position, bits in enumerate(harmful):
        for bit in (bit for bit in range(8) if bits >> bit & 1):
            content = bytearray(SAVED)
            content[position] ^= 1 << bit
            try:
                found = bool(_wrong_records(bytes(content)))
            except BadArchive:
                found = True
            if not found:
                missed.append((position, bit))
    assert sum(bits.bit_count() for bits in harmful) == 7819
    assert missed == []


@pytest.mark.parametrize("size", [0, 1, 21, 22, 100, 1000, len(SAVED) - 12])
def test_a_truncated_or_zero_filled_archive_is_damaged(size: int) -> None:
    for content in (SAVED[:size], SAVED[:size] + bytes(len(SAVED) - size), bytes(size + 1) + SAVED[size + 1 :]):
        with pytest.raises(BadArchive):
            read_archive(io.BytesIO(content), 0, len(content))


def test_random_bytes_raise_nothing_else() -> None:
    ends = random.Random(1)
    for _ in range(300):
        content = ends.randbytes(150) + ends.choice([b"", SAVED[-98:], SAVED[-22:]])
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


def test_an_archive_written_without_checksums_is_told_from_one_with_wrong_ones() -> None:
    assert not has_checksums((Record("data.pkl", 0, 10, 0), Record("data/0", 64, 8, 0)))
