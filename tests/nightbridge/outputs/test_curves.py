"""Megatron-LM's own tags mean what Megatron-Bridge's do, whatever their names and units."""

from collections.abc import Callable
from pathlib import Path

import pytest
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from nightbridge.models.metrics import METRIC_BY_NAME
from nightbridge.outputs.curves import read_curves, value_of, with_usual_tags
from nightbridge.outputs.event_files import find_event_files
from tests.nightbridge.outputs.builders import EventFileBuilder, scalars


def test_the_heterogeneous_loops_tags_make_whole_curves(event_file: Callable[..., EventFileBuilder]) -> None:
    builder = event_file()
    for step in (1, 2, 3):
        builder.scalar("lm loss", step, 3.0 - step / 10).scalar("iteration-time-ms", step, 4500.0 + step)
        builder.scalar("grad-norm", step, 1.0).scalar("lm loss vs samples", step * 8, 3.0 - step / 10)

    curves = read_curves([builder.write()], [])

    assert curves.steps["step_time"].tolist() == pytest.approx([4.501, 4.502, 4.503])
    assert curves.steps["loss"].tolist() == pytest.approx([2.9, 2.8, 2.7])
    assert (curves.source, curves.damage, curves.notes) == ("tensorboard", (), ())


def test_megatron_lms_throughput_and_memory_are_read_in_the_usual_units(
    event_file: Callable[..., EventFileBuilder],
) -> None:
    builder = event_file()
    for step, peak in ((1, 40e9), (2, 58e9)):
        builder.scalar("throughput", step, 410.0 + step).scalar("mem-max-allocated-bytes", step, peak)

    curves = read_curves([builder.write()], [])

    assert curves.steps["tflops_per_gpu"].tolist() == [411.0, 412.0]
    assert value_of(METRIC_BY_NAME["peak_memory"], curves, curves.steps) == pytest.approx(58.0)


def test_what_the_program_wrote_stays_in_the_table(event_file: Callable[..., EventFileBuilder]) -> None:
    table, _ = scalars([event_file().scalar("iteration-time-ms", 1, 250.0).write()])

    both = with_usual_tags(table)

    assert dict(zip(both["tag"], both["value"], strict=True)) == {"iteration-time-ms": 250.0, "iteration-time": 0.25}


def test_a_usual_tag_is_never_added_to(event_file: Callable[..., EventFileBuilder]) -> None:
    builder = event_file().scalar("iteration-time", 1, 0.5).scalar("iteration-time-ms", 2, 250.0)

    table, _ = scalars([builder.write()])

    assert len(with_usual_tags(table)) == 2


def test_the_later_of_two_values_of_a_restarted_run_counts(event_file: Callable[..., EventFileBuilder]) -> None:
    first = event_file().scalar("iteration-time-ms", 1, 250.0).scalar("iteration-time-ms", 2, 260.0).write()
    second = event_file(time=1_760_000_100).scalar("iteration-time-ms", 2, 300.0).write()

    curves = read_curves([first, second], [])

    assert curves.steps["step_time"].tolist() == pytest.approx([0.25, 0.3])


def test_a_session_that_begins_without_a_step_going_back_is_a_life(tmp_path: Path) -> None:
    writer = EventFileWriter(str(tmp_path))
    for step in range(1, 31):
        if step == 21:
            writer.add_event(Event(step=step, session_log=SessionLog(status=SessionLog.START)))
        value = Summary.Value(tag="iteration-time", simple_value=0.25 if step < 21 else 0.5)
        writer.add_event(Event(wall_time=1e9 + step, step=step, summary=Summary(value=[value])))
    writer.close()

    lives = read_curves(find_event_files(tmp_path), ()).lives

    assert [(life.first_step, life.last_step, life.median_step_time) for life in lives] == [
        (1, 20, 0.25),
        (21, 30, 0.5),
    ]
