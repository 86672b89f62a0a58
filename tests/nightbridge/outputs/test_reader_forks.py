"""Files read in forks: the same answers in the same order, and no death is passed over."""

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from nightbridge.errors import DamagedData
from nightbridge.outputs import reader_forks
from nightbridge.outputs.reader_forks import map_files
from tests.nightbridge.outputs.builders import EventFileBuilder, scalars


@pytest.fixture
def forks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Three processors, no size too small, and the forks that were made."""
    made, fork = [], os.fork

    def counted() -> int:
        made.append(fork())
        return made[-1]

    monkeypatch.setattr(reader_forks, "FORK_FROM", 0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    monkeypatch.setattr(threading, "active_count", lambda: 1)
    monkeypatch.setattr(os, "fork", counted)
    return made


def files(folder: Path, number: int) -> list[Path]:
    for index in range(number):
        (folder / f"{index:03}").write_text(f"content {index}")
    return sorted(folder.iterdir())


def test_every_file_is_read_once_and_in_its_place(tmp_path: Path, forks: list[int]) -> None:
    found = map_files(lambda path: (path.read_text(), os.getpid()), files(tmp_path, 20))
    assert [text for text, _ in found] == [f"content {index}" for index in range(20)]
    assert {process for _, process in found} == set(forks)
    assert len(forks) == 3


def test_the_table_of_many_event_files_is_that_of_one_process(
    tmp_path: Path, event_file: Callable[..., EventFileBuilder], forks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(7):
        builder = event_file(time=1_760_000_000 + number)
        for step in range(10 * number + 1, 10 * number + 12):
            builder.scalar("lm loss", step, step / 7)
        path = builder.write()
    path.write_bytes(path.read_bytes()[:-3])
    table, damage = scalars(path.parent)
    assert len(forks) == 3

    monkeypatch.setattr(reader_forks, "FORK_FROM", 1 << 40)
    alone, alone_damage = scalars(path.parent)

    assert table.equals(alone)
    assert damage == alone_damage
    assert len(damage) == 1
    assert len(forks) == 3


def test_small_files_are_read_without_a_fork(tmp_path: Path, forks: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_forks, "FORK_FROM", 1000)
    assert len(map_files(Path.read_text, files(tmp_path, 4))) == 4
    assert forks == []


def test_the_death_of_a_fork_is_damage_where_no_caller_can_try_again(tmp_path: Path, forks: list[int]) -> None:
    def die(path: Path) -> str:
        return "read" if path.name != "004" else str(os._exit(1))

    with pytest.raises(DamagedData, match="its reader died"):
        map_files(die, files(tmp_path, 6))
    for process in forks:
        with pytest.raises(ChildProcessError):
            os.waitpid(process, 0)
