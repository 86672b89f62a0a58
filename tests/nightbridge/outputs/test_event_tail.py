"""Event files that are read while tensorboard's own writer, or a job that is killed, is still at them."""

from collections.abc import Callable
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from nightbridge.outputs.event_files import Row, read_event_file
from nightbridge.outputs.following import EventFileTail, EventTail
from tests.nightbridge.outputs.builders import EventFileBuilder


def scalar(step: int) -> Event:
    summary = Summary(value=[Summary.Value(tag="lm loss", simple_value=float(step))])
    return Event(wall_time=1.76e9 + step, step=step, summary=summary)


def steps(rows: list[Row]) -> list[int]:
    return [row.step for row in rows]


def test_each_look_gives_what_tensorboards_writer_has_flushed_since(tmp_path: Path) -> None:
    writer, tail = EventFileWriter(str(tmp_path)), EventTail(tmp_path)
    seen = []
    for first in (1, 11, 21):
        for step in range(first, first + 10):
            writer.add_event(scalar(step))
        writer.flush()
        seen.append(steps(tail.new_rows()))
    writer.close()
    assert seen == [list(range(1, 11)), list(range(11, 21)), list(range(21, 31))]
    assert (tail.new_rows(), tail.damage) == ([], ())


def test_a_record_written_by_halves_at_any_byte_comes_once_and_whole(
    tmp_path: Path, event_file: Callable[..., EventFileBuilder]
) -> None:
    whole = event_file().scalar("lm loss", 1, 2.5).scalar("lm loss", 2, 2.25).write()
    content, rows = whole.read_bytes(), list(read_event_file(whole).rows)
    for cut in range(len(content) + 1):
        growing = tmp_path / f"events.out.tfevents.1.cut{cut}"
        growing.write_bytes(content[:cut])
        tail = EventFileTail(growing)
        first = tail.new_rows()
        with growing.open("ab") as stream:
            stream.write(content[cut:])
        assert first + tail.new_rows() == rows
        assert tail.damage == ""


def test_room_that_the_file_system_allocated_ahead_is_filled_later(
    tmp_path: Path, event_file: Callable[..., EventFileBuilder]
) -> None:
    content = event_file().scalar("lm loss", 1, 2.5).scalar("lm loss", 2, 2.25).write().read_bytes()
    path = tmp_path / "events.out.tfevents.1.ahead"
    path.write_bytes(content[:-30] + bytes(4096))
    tail = EventFileTail(path)
    assert steps(tail.new_rows()) == [1]
    path.open("r+b").write(content)
    assert steps(tail.new_rows()) == [2]
    assert tail.damage == ""


def test_a_restart_of_the_job_adds_a_file_that_is_found(
    tmp_path: Path, event_file: Callable[..., EventFileBuilder]
) -> None:
    tail = EventTail(tmp_path / "tb_logs")
    assert tail.new_rows() == []
    event_file(time=1_760_000_000).scalar("lm loss", 1, 2.5).write()
    assert steps(tail.new_rows()) == [1]
    event_file(time=1_760_001_000).scalar("lm loss", 1, 2.0).scalar("lm loss", 2, 1.5).write()
    assert [(row.step, row.value) for row in tail.new_rows()] == [(1, 2.0), (2, 1.5)]


def test_a_file_that_was_written_anew_is_read_from_its_beginning(event_file: Callable[..., EventFileBuilder]) -> None:
    path = event_file().scalar("lm loss", 1, 2.5).scalar("lm loss", 2, 2.25).write()
    tail = EventFileTail(path)
    assert steps(tail.new_rows()) == [1, 2]
    event_file().scalar("lm loss", 7, 2.0).write()
    assert steps(tail.new_rows()) == [7]


def test_damage_is_told_with_its_place_and_what_was_before_it_is_kept(
    event_file: Callable[..., EventFileBuilder],
) -> None:
    path = event_file().scalar("lm loss", 1, 2.5).scalar("lm loss", 2, 2.25).write()
    content = bytearray(path.read_bytes())
    content[-6] ^= 1
    path.write_bytes(content)
    tail = EventFileTail(path)
    assert steps(tail.new_rows()) == [1]
    assert tail.damage.startswith(f"{path.name}: corrupt at byte {read_event_file(path).damage_offset} (")
    assert tail.new_rows() == []
