"""One pass over a file: its checksum, and the checksums of its parts."""

import base64
import hashlib
import random
import zlib
from pathlib import Path

import pytest

from nightbridge.errors import DamagedData
from nightbridge.store.checksum import CrcCheck, FileDigest, FileSource, sha256_of_file

DATA = random.Random(1).randbytes(10_000)


def of_parts(size: int) -> list[bytes]:
    return [hashlib.sha256(DATA[start : start + size]).digest() for start in range(0, len(DATA), size)]


@pytest.mark.parametrize("piece", [1, 7, 999, 1000, 1001, 2500, 10_000])
@pytest.mark.parametrize("part_size", [1000, 3000, 9999, 10_000, 10_001])
def test_pieces_of_any_size_give_the_checksum_of_the_parts(piece: int, part_size: int) -> None:
    digest = FileDigest(part_size)
    for start in range(0, len(DATA), piece):
        digest.update(DATA[start : start + piece])
    assert digest.all_parts() == of_parts(part_size)
    assert digest.hexdigest() == hashlib.sha256(b"".join(of_parts(part_size))).hexdigest()


def test_without_parts_it_is_the_files_own(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(DATA)
    digest = FileDigest()
    digest.update(DATA)
    assert digest.hexdigest() == sha256_of_file(tmp_path / "file") == hashlib.sha256(DATA).hexdigest()


def test_a_file_on_disk_has_the_same_as_one_that_is_sent(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(DATA * 300)
    digest = FileDigest(1 << 20)
    digest.update(DATA * 300)
    assert digest.hexdigest() == sha256_of_file(tmp_path / "file", 1 << 20)


def test_it_is_what_s3_documents_as_a_composite_checksum() -> None:
    digest = FileDigest(4000)
    digest.update(DATA)
    composite = base64.b64encode(hashlib.sha256(b"".join(of_parts(4000))).digest()).decode() + "-3"
    assert base64.b64encode(bytes.fromhex(digest.hexdigest())).decode() + f"-{len(digest.all_parts())}" == composite


RANGES = [(0, 100), (100, 0), (100, 1), (500, 2500), (3000, 1000), (9999, 1)]


def extents(data: bytes) -> list[int]:
    return [number for start, size in RANGES for number in (start, size, zlib.crc32(data[start : start + size]))]


@pytest.mark.parametrize("piece", [1, 7, 999, 1000, 2501, 10_000])
def test_a_range_with_another_crc_is_found_in_pieces_of_any_size_and_bytes_between_ranges_do_not_matter(
    piece: int,
) -> None:
    for position in (0, 99, 100, 101, 499, 500, 2999, 3000, 3999, 4000, 9998, 9999):
        flipped = bytearray(DATA)
        flipped[position] ^= 4
        check = CrcCheck(extents(DATA))
        damaged = False
        for start in range(0, len(DATA), piece):
            try:
                check.update(flipped[start : start + piece])
            except DamagedData:
                damaged = True
                break
        assert damaged == any(start <= position < start + size for start, size in RANGES), position


def test_a_file_whose_range_has_another_crc_is_not_read_to_its_end(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(DATA)
    with FileSource(tmp_path / "file", extents=extents(DATA)) as source:
        source.read_into(bytearray(6000))
        source.rewind()
        assert source.read_into(bytearray(20_000)) == len(DATA)
        assert source.sha256 == hashlib.sha256(DATA).hexdigest()
    with (
        FileSource(tmp_path / "file", extents=extents(DATA[::-1])) as source,
        pytest.raises(DamagedData, match="bytes 0 to 100 do not have the CRC-32 recorded"),
    ):
        source.read_into(bytearray(20_000))
