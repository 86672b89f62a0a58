import bisect
import math
import os
import struct
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import HistogramProto, Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.summary.writer.event_file_writer import EventFileWriter
from tensorboard.summary.writer.record_writer import RecordWriter
from tensorboard.util.tensor_util import make_tensor_proto

from nightbridge.errors import DamagedData
from nightbridge.outputs import event_blocks
from nightbridge.outputs.event_blocks import done_again
from nightbridge.outputs.event_decoder import Columns
from nightbridge.outputs.event_files import (
    COLUMNS,
    canonical_tag,
    find_event_files,
    metrics_parquet,
    read_event_file,
)
from nightbridge.outputs.following import EventTail
from tests.nightbridge.outputs.builders import EventFileBuilder, scalars


def _record_offsets(path: Path) -> list[int]:
    """Where each record starts, and the end, walked without our reader."""
    data, offsets = path.read_bytes(), [0]
    while offsets[-1] < len(data):
        offsets.append(offsets[-1] + 16 + struct.unpack_from("<Q", data, offsets[-1])[0])
    return offsets


def _scalar_metadata(plugin: str) -> SummaryMetadata:
    return SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name=plugin))


class TestAgainstTensorboard:
    def test_the_rows_are_those_of_tensorboards_own_accumulator(self, tmp_path: Path) -> None:
        writer = EventFileWriter(str(tmp_path))
        rng = np.random.default_rng(1)
        for step in range(1, 301):
            for tag in ("lm loss", "grad-norm", "throughput/tflops/device"):
                value = Summary.Value(tag=tag, simple_value=float(rng.normal()))
                writer.add_event(Event(wall_time=1e9 + step / 7, step=step, summary=Summary(value=[value])))
        writer.close()
        accumulator = EventAccumulator(str(tmp_path), size_guidance={"scalars": 0})
        accumulator.Reload()

        table, damage = scalars(tmp_path)

        assert damage == []
        for tag in accumulator.Tags()["scalars"]:
            expected = accumulator.Scalars(tag)
            ours = table[table["tag"] == tag]
            assert ours["step"].tolist() == [event.step for event in expected]
            assert ours["value"].tolist() == [event.value for event in expected]
            assert ours["wall_time"].tolist() == [event.wall_time for event in expected]

    @pytest.mark.parametrize("starts", [(), (0,), (0, 51), (0, 51, 30), (51, 60)])
    def test_what_a_session_start_voids_is_what_tensorboards_accumulator_drops(
        self, tmp_path: Path, starts: tuple[int, ...]
    ) -> None:
        writer = EventFileWriter(str(tmp_path))
        for life, start in enumerate((*starts, None)):
            # The steps go on, so that only the starts decide.
            for step in range(70 * life + 1, 70 * life + 71):
                for tag in ("lm loss", "grad-norm")[: 1 + step % 2]:
                    summary = Summary(value=[Summary.Value(tag=tag, simple_value=step / 7)])
                    writer.add_event(Event(wall_time=1e9 + step, step=step, summary=summary))
            if start is not None:
                log = SessionLog(status=SessionLog.START)
                writer.add_event(Event(wall_time=1e9 + step, step=start, session_log=log))
        writer.close()
        accumulator = EventAccumulator(str(tmp_path), size_guidance={"scalars": 0})
        accumulator.Reload()

        table, _ = scalars(tmp_path)

        for tag in ("lm loss", "grad-norm"):
            kept = table[(table["tag"] == tag) & ~table["superseded"]]
            assert kept["step"].tolist() == [event.step for event in accumulator.Scalars(tag)]
        assert table["superseded"].any() == bool(starts)
        assert table.groupby("session")["step"].agg(["min", "max"]).to_numpy().tolist() == [
            [70 * life + 1, 70 * life + 70] for life in range(len(starts) + 1)
        ]

    def test_a_step_that_goes_back_drops_what_tensorboards_accumulator_drops(self, tmp_path: Path) -> None:
        (tmp_path / "events.out.tfevents.1760000000.node1").write_bytes(b"")
        path = tmp_path / "events.out.tfevents.1760000001.node1"
        with path.open("wb") as stream:
            records = RecordWriter(stream)
            # Without a file version, as writers that know no session have it.
            for step in (1, 2, 3, 4, 5, 6, 3, 4, 2, 3):
                value = Summary.Value(tag="lm loss", simple_value=float(step))
                records.write(Event(wall_time=1e9, step=step, summary=Summary(value=[value])).SerializeToString())
        accumulator = EventAccumulator(str(path), size_guidance={"scalars": 0})
        accumulator.Reload()

        table, _ = scalars(tmp_path)

        assert [event.step for event in accumulator.Scalars("lm loss")] == [1, 2, 3]
        assert table.loc[~table["superseded"], "step"].tolist() == [1, 2, 3]

    def test_values_of_many_tags_in_one_event_are_all_read(self, tmp_path: Path) -> None:
        values = [Summary.Value(tag=f"tag {n}", simple_value=n) for n in range(5)]
        writer = EventFileWriter(str(tmp_path))
        writer.add_event(Event(wall_time=1.0, step=3, summary=Summary(value=values)))
        writer.close()
        (path,) = find_event_files(tmp_path)
        assert [(row.tag, row.step, row.value) for row in read_event_file(path).rows] == [
            (f"tag {n}", 3, float(n)) for n in range(5)
        ]

    @pytest.mark.parametrize("step", [0, 1, 127, 128, 16_383, 2**21, 2**28 - 1, 2**28, 2**40, 2**63 - 1, -1])
    def test_every_length_of_a_step_is_read(self, event_file: Callable[..., EventFileBuilder], step: Any) -> None:
        path = event_file().scalar("lm loss", step, 1.5).write()
        (row,) = read_event_file(path).rows
        assert (row.step, row.value) == (step, 1.5)

    def test_of_a_number_that_has_more_than_64_bits_the_lower_ones_count_as_for_protobuf(
        self, event_file: Callable[..., EventFileBuilder]
    ) -> None:
        summary = Summary(value=[Summary.Value(tag="lm loss", simple_value=1.5)])
        record = Event(wall_time=1.0, summary=summary).SerializeToString() + b"\x10" + b"\xff" * 9 + b"\x7f"
        path = event_file().write()
        with path.open("ab") as stream:
            RecordWriter(stream).write(record)
        (row,) = read_event_file(path).rows
        assert (row.step, row.value) == (Event.FromString(record).step, 1.5) == (-1, 1.5)

    @pytest.mark.parametrize("length", [1, 100, 101, 110, 111, 120, 127, 128, 5_000])
    def test_every_length_of_a_tag_is_read(self, event_file: Callable[..., EventFileBuilder], length: Any) -> None:
        path = event_file().scalar("ü" + "x" * length, 7, 1.5).write()
        (row,) = read_event_file(path).rows
        assert row.tag == "ü" + "x" * length

    @given(
        st.lists(
            st.tuples(st.text(min_size=1), st.integers(0, 2**62), st.floats(width=32), st.floats(0, 1e12)), max_size=20
        )
    )
    def test_whatever_is_written_is_read(self, tmp_path_factory: pytest.TempPathFactory, events: Any) -> None:
        folder = tmp_path_factory.mktemp("events")
        writer = EventFileWriter(str(folder))
        for tag, step, value, wall_time in events:
            summary = Summary(value=[Summary.Value(tag=tag, simple_value=value)])
            writer.add_event(Event(wall_time=wall_time, step=step, summary=summary))
        writer.close()
        (path,) = find_event_files(folder)
        read = [(row.tag, row.step, row.value, row.wall_time) for row in read_event_file(path).rows]
        assert repr(read) == repr(events)


class TestTensorScalars:
    @pytest.mark.parametrize(("dtype", "number"), [("float32", 1.5), ("float64", 1e300)])
    def test_every_number_type_is_read_from_content_and_from_typed_values(
        self, event_file: Callable[..., EventFileBuilder], dtype: Any, number: int
    ) -> None:
        array = np.array(number, dtype=dtype)
        typed = make_tensor_proto(array)
        content = TensorProto(dtype=typed.dtype, tensor_shape=typed.tensor_shape, tensor_content=array.tobytes())
        builder = event_file()
        for step, tensor in enumerate((typed, content)):
            builder.value(step, Summary.Value(tag="x", tensor=tensor, metadata=_scalar_metadata("scalars")))
        assert [row.value for row in read_event_file(builder.write()).rows] == [float(number)] * 2

    def test_numbers_of_types_that_no_writer_of_scalars_uses_are_counted(
        self, event_file: Callable[..., EventFileBuilder]
    ) -> None:
        builder = event_file()
        for tensor in (make_tensor_proto(np.array(3)), TensorProto(dtype=14, tensor_content=b"\xc0\x3f")):
            builder.value(1, Summary.Value(tag="x", tensor=tensor, metadata=_scalar_metadata("scalars")))
        file = read_event_file(builder.write())
        assert (len(file), file.skipped) == (0, {"scalars": 2})

    def test_the_plugin_that_only_the_first_value_names_holds_for_the_tag(
        self, event_file: Callable[..., EventFileBuilder]
    ) -> None:
        tensor = make_tensor_proto(np.array(2.0))
        builder = event_file().value(1, Summary.Value(tag="h", tensor=tensor, metadata=_scalar_metadata("hparams")))
        builder.value(2, Summary.Value(tag="h", tensor=tensor))
        file = read_event_file(builder.write())
        assert len(file) == 0
        assert file.skipped == {"hparams": 2}

    def test_text_and_histograms_are_counted_and_not_taken_for_numbers(
        self, event_file: Callable[..., EventFileBuilder]
    ) -> None:
        text = TensorProto(dtype=7, string_val=[b"hello"], tensor_shape=TensorShapeProto())
        vector = make_tensor_proto(np.array([1.0, 2.0]))
        builder = event_file()
        builder.value(1, Summary.Value(tag="t", tensor=text, metadata=_scalar_metadata("text")))
        builder.value(1, Summary.Value(tag="h1", histo=HistogramProto(min=0, max=1)))
        builder.value(1, Summary.Value(tag="h2", tensor=vector, metadata=_scalar_metadata("histograms")))
        builder.value(1, Summary.Value(tag="v", tensor=vector))
        builder.scalar("lm loss", 1, 2.0)
        file = read_event_file(builder.write())
        assert [row.tag for row in file.rows] == ["lm loss"]
        assert file.skipped == {"text": 1, "histogram": 1, "histograms": 1, "tensor": 1}


class TestDamage:
    def test_a_whole_file_is_complete(self, event_file: Callable[..., EventFileBuilder]) -> None:
        path = event_file().scalar("lm loss", 1, 2.0).write()
        file = read_event_file(path)
        assert (file.status, file.bytes_total, file.damage) == ("complete", path.stat().st_size, "")

    @pytest.mark.parametrize("content", [b"", None])
    def test_an_empty_file_and_one_with_only_a_header_are_complete_and_have_no_rows(
        self, event_file: Callable[..., EventFileBuilder], content: Any
    ) -> None:
        path = event_file().write()
        if content is not None:
            path.write_bytes(content)
        file = read_event_file(path)
        assert (file.status, len(file)) == ("complete", 0)

    def test_a_cut_at_every_byte_of_the_last_record_keeps_all_records_before_it(
        self, event_file: Callable[..., EventFileBuilder]
    ) -> None:
        builder = event_file()
        for step in range(1, 6):
            builder.scalar("lm loss", step, float(step))
        path = builder.write()
        whole, offsets = path.read_bytes(), _record_offsets(path)
        for size in range(offsets[-2] + 1, offsets[-1]):
            path.write_bytes(whole[:size])
            file = read_event_file(path)
            assert list(file.steps) == [1, 2, 3, 4]
            assert (file.status, file.damage_offset) == ("truncated", offsets[-2]), size

    def test_a_cut_between_two_records_cannot_be_seen(self, event_file: Callable[..., EventFileBuilder]) -> None:
        path = event_file().scalar("lm loss", 1, 1.0).scalar("lm loss", 2, 2.0).write()
        path.write_bytes(path.read_bytes()[: _record_offsets(path)[-2]])
        assert (read_event_file(path).status, list(read_event_file(path).steps)) == ("complete", [1])

    def test_a_flipped_bit_anywhere_in_a_record_is_reported_with_the_records_offset(
        self, event_file: Callable[..., EventFileBuilder]
    ) -> None:
        builder = event_file()
        for step in range(1, 6):
            builder.scalar("lm loss", step, float(step))
        path = builder.write()
        whole, offsets = path.read_bytes(), _record_offsets(path)
        start, end = offsets[3], offsets[4]  # the third scalar; the first record names the version
        for position in range(start, end):
            damaged = bytearray(whole)
            damaged[position] ^= 0x10
            path.write_bytes(damaged)
            file = read_event_file(path)
            assert (file.status, file.damage_offset) == ("corrupt", start), position
            assert list(file.steps) == [1, 2]
        assert f"corrupt at byte {start} of {len(whole)}" in file.damage
        assert "2 scalars" in file.damage

    @pytest.mark.parametrize("zeros", [1, 11, 12, 4096])
    def test_a_tail_of_zeros_ends_the_file(self, event_file: Callable[..., EventFileBuilder], zeros: Any) -> None:
        path = event_file().scalar("lm loss", 1, 1.0).write()
        whole = path.read_bytes()
        path.write_bytes(whole + bytes(zeros) + whole * (zeros > 11))
        file = read_event_file(path)
        assert (file.status, file.damage_offset, list(file.steps)) == ("truncated", len(whole), [1])

    def test_a_record_with_a_right_checksum_that_is_no_event_is_counted(
        self, event_file: Callable[..., EventFileBuilder]
    ) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        path = event_file().scalar("lm loss", 1, 1.0).write()
        with path.open("ab") as stream:
            RecordWriter(stream).write(b"\xff" * 30)
        file = read_event_file(path)
        assert (file.status, file.skipped) == ("complete", {"malformed": 1})
        assert "1 records are not events" in file.damage

    def test_a_record_whose_inner_lengths_are_wrong_is_not_guessed_at(
        self, event_file: Callable[..., EventFileBuilder]
    ) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        value = Summary.Value(tag="lm loss", simple_value=1.0)
        record = bytearray(Event(wall_time=1.0, step=1, summary=Summary(value=[value])).SerializeToString())
        # Summary (key, length), value (key, length), tag (key, length, 7 letters), number (key, 4 bytes).
        summary_length, value_length = len(record) - 17, len(record) - 15
        assert (record[summary_length], record[value_length]) == (16, 14)
        path = event_file().write()
        for index in (summary_length, value_length):
            wrong = bytearray(record)
            wrong[index] += 1
            with path.open("ab") as stream:
                RecordWriter(stream).write(bytes(wrong))
        file = read_event_file(path)
        assert len(file) == 0
        assert file.skipped["malformed"] == 2

    def test_a_missing_file_is_a_clear_error(self, tmp_path: Path) -> None:
        with pytest.raises(DamagedData, match="cannot read the event file"):
            read_event_file(tmp_path / "events.out.tfevents.1")

    @given(st.binary(max_size=300))
    def test_random_bytes_are_reported_and_never_raise(
        self, tmp_path_factory: pytest.TempPathFactory, content: Any
    ) -> None:
        path = tmp_path_factory.mktemp("random") / "events.out.tfevents.1"
        path.write_bytes(content)
        file = read_event_file(path)
        assert len(file) == 0
        assert file.status == "complete" or file.damage

    @given(st.binary(max_size=200))
    def test_random_records_raise_nothing(self, record: Any) -> None:
        Columns().add(record)


class TestBlocks:
    """Whole files are read in blocks; record by record, as a running job's are, must give the same."""

    def _mixed(self, event_file: Callable[..., EventFileBuilder]) -> Any:
        builder = event_file()
        for step in (1, 127, 128, 20_000, 2**21, 2**28 - 1, 2**28, 2**40, -1):
            builder.scalar("lm loss", step, step / 3).scalar("a tag that is longer than others" * 5, step, math.nan)
            builder.value(step, Summary.Value(tag="h", histo=HistogramProto(min=0, max=1, bucket=[1.0] * (step % 90))))
            builder.value(step, Summary.Value(tag="t", tensor=make_tensor_proto(2.5, dtype=np.float32)))
        return builder.write()

    def _one_by_one(self, path: Path, content: Any) -> Any:
        path.write_bytes(content)
        return EventTail(path.parent).new_rows()

    @pytest.mark.parametrize("size", [1, 60, 61, 100, 4096, 1 << 20])
    def test_blocks_of_any_size_give_the_rows_that_single_records_give(
        self, event_file: Callable[..., EventFileBuilder], monkeypatch: pytest.MonkeyPatch, size: int
    ) -> None:
        path = self._mixed(event_file)
        rows = self._one_by_one(path, path.read_bytes())
        monkeypatch.setattr(event_blocks, "BLOCK", size)
        file = read_event_file(path)
        assert file.status == "complete"
        assert repr(list(file.rows)) == repr(rows)  # NaN is not equal to itself
        assert len(rows) == 27
        assert file.skipped == {"histogram": 9}

    @pytest.mark.thorough
    @pytest.mark.parametrize("size", [100, 1 << 20])
    def test_damage_anywhere_leaves_the_rows_that_single_records_leave(
        self, event_file: Callable[..., EventFileBuilder], monkeypatch: pytest.MonkeyPatch, size: int
    ) -> None:
        path = self._mixed(event_file)
        whole = path.read_bytes()
        monkeypatch.setattr(event_blocks, "BLOCK", size)
        for position in range(0, len(whole), 7):
            damaged = bytearray(whole)
            damaged[position] ^= 4
            rows = self._one_by_one(path, bytes(damaged))
            file = read_event_file(path)
            assert (file.status, repr(list(file.rows))) == ("corrupt", repr(rows)), position

    @pytest.mark.thorough
    def test_every_flipped_byte_of_records_like_those_before_is_found(
        self, event_file: Callable[..., EventFileBuilder]
    ) -> None:
        builder = event_file()
        for step in (*range(1, 12), *range(126, 132), 16383, 16384, 2**21):
            builder.scalar("lm loss", step, step / 3).scalar("grad-norm", step, math.inf)
        path = builder.write()
        whole, offsets = path.read_bytes(), _record_offsets(path)
        rows = list(read_event_file(path).rows)
        for position in range(offsets[1], len(whole)):
            damaged = bytearray(whole)
            damaged[position] ^= 1 << position % 8
            path.write_bytes(damaged)
            file, before = read_event_file(path), bisect.bisect_right(offsets, position) - 1
            assert (file.status, file.damage_offset) == ("corrupt", offsets[before]), position
            assert list(file.rows) == rows[: before - 1], position

    def test_what_looks_like_a_record_within_another_is_none(self, event_file: Callable[..., EventFileBuilder]) -> None:
        inner = event_file().scalar("within", 5, 1.0).write()
        within = inner.read_bytes()[_record_offsets(inner)[1] :]
        inner.unlink()
        builder = event_file(time=1_760_000_900)
        for step in range(300):
            builder.scalar("lm loss", step, 1.0)
            text = make_tensor_proto([within * (1 + step % 3)])
            builder.value(step, Summary.Value(tag="text", tensor=text, metadata=_scalar_metadata("text")))
        rows = self._one_by_one(path := builder.write(), path.read_bytes())
        file = read_event_file(path)
        assert (file.status, list(file.rows)) == ("complete", rows)
        assert len(rows) == file.skipped["text"] == 300

    def test_more_tags_than_are_told_apart_together(self, event_file: Callable[..., EventFileBuilder]) -> None:
        builder = event_file()
        for step in (1, 2):
            for number in range(5000):
                builder.scalar(f"tag {number}", step, number)
        file = read_event_file(builder.write())
        assert [file.names[number] for number in file.tag_numbers] == [f"tag {number}" for number in range(5000)] * 2
        assert list(file.values) == [float(number) for number in range(5000)] * 2

    @pytest.mark.parametrize("length", [*range(16), 254, 255, 256, 257, 258])
    def test_a_record_of_any_length_with_a_right_checksum(
        self, tmp_path: Path, event_file: Callable[..., EventFileBuilder], length: int
    ) -> None:
        path = event_file().scalar("lm loss", 1, 2.5).write()
        with path.open("ab") as stream:
            RecordWriter(stream).write(b"\x09" + bytes(length - 1) if length else b"")
        rows = self._one_by_one(path, path.read_bytes())
        assert (read_event_file(path).status, list(read_event_file(path).rows)) == ("complete", rows)


class TestDoneAgain:
    """What a later row of the tag has done again, against the definition, row by row."""

    @given(st.lists(st.tuples(st.integers(0, 3), st.integers(-2, 9)), max_size=30))
    def test_it_is_what_each_later_row_says(self, rows: list[tuple[int, int]]) -> None:
        def again(number: int) -> bool:
            tag, step = rows[number]
            later = [other for other_tag, other in rows[number + 1 :] if other_tag == tag]
            return any(0 < other <= step for other in later) if step > 0 else step in later

        tags, steps = np.array(rows, dtype=np.int64).reshape(-1, 2).T
        assert done_again(tags.astype(np.int32), steps).tolist() == [again(number) for number in range(len(rows))]


class TestTable:
    def test_a_missing_folder_gives_an_empty_table_with_the_right_columns(self, tmp_path: Path) -> None:
        table, damage = scalars(tmp_path / "nothing")
        assert (len(table), damage, tuple(table.columns)) == (0, [], COLUMNS)

    def test_after_a_restart_the_later_file_wins_and_the_earlier_rows_are_kept(
        self, event_file: Callable[..., EventFileBuilder], tmp_path: Path
    ) -> None:
        later = event_file(time=1_760_000_900)
        for step in range(80, 91):
            later.scalar("lm loss", step, 2.0)
        later.write()
        earlier = event_file(time=1_760_000_100)
        for step in range(70, 86):
            earlier.scalar("lm loss", step, 1.0)
        earlier.write()
        os.utime(later.path, (1, 1))  # copies do not keep modification times

        table, _ = scalars(tmp_path)

        assert len(table) == 11 + 16
        current = table[~table["superseded"]].set_index("step")["value"]
        assert current.index.is_unique
        assert current[79] == 1.0
        assert current[80] == 2.0
        assert set(table.loc[table["superseded"], "file"]) == {earlier.path.name}

    def test_what_a_dead_life_had_after_its_last_checkpoint_is_no_part_of_the_run(
        self, event_file: Callable[..., EventFileBuilder], tmp_path: Path
    ) -> None:
        dead, alive = event_file(time=1_760_000_000), event_file(time=1_760_000_900)
        for step in (0, *range(1, 71)):
            dead.scalar("lm loss", step, 1.0).scalar("only here", step, 1.0)
        for step in (0, *range(51, 61)):
            alive.scalar("lm loss", step, 2.0)
        dead.write()
        alive.write()

        table, _ = scalars(tmp_path)

        current = table[~table["superseded"]]
        assert sorted(current.loc[current["tag"] == "lm loss", "step"]) == list(range(61))
        # Of a tag that the later life does not have, nothing was done again; step 0 is no iteration.
        assert (current["tag"] == "only here").sum() == 71

    def test_files_of_one_second_are_ordered_by_their_first_event(
        self, event_file: Callable[..., EventFileBuilder], tmp_path: Path
    ) -> None:
        second = event_file(uid=0)
        second.start += 0.9
        second.scalar("lm loss", 1, 2.0).write()
        event_file(uid=1).scalar("lm loss", 1, 1.0).write()
        table, _ = scalars(tmp_path)
        assert table.loc[~table["superseded"], "value"].tolist() == [2.0]

    def test_curves_over_samples_are_dropped_and_sanitised_tags_get_their_names_back(
        self, event_file: Callable[..., EventFileBuilder], tmp_path: Path
    ) -> None:
        builder = event_file().scalar("lm loss vs samples", 128, 1.0).scalar("lm_loss_vs_samples", 128, 1.0)
        builder.scalar("lm_loss", 1, 2.0).scalar("mtp_1_loss", 1, 3.0).scalar("grad-norm", 1, 4.0).write()
        table, _ = scalars(tmp_path)
        assert dict(zip(table["tag"], table["value"], strict=True)) == {
            "lm loss": 2.0,
            "mtp_1 loss": 3.0,
            "grad-norm": 4.0,
        }

    def test_nan_and_infinities_are_kept(self, event_file: Callable[..., EventFileBuilder], tmp_path: Path) -> None:
        event_file().scalar("lm loss", 1, math.nan).scalar("lm loss", 2, math.inf).write()
        table, _ = scalars(tmp_path)
        assert math.isnan(table["value"][0])
        assert table["value"][1] == math.inf

    def test_a_damaged_file_is_named_and_the_others_count(
        self, event_file: Callable[..., EventFileBuilder], tmp_path: Path
    ) -> None:
        event_file(time=1_760_000_000).scalar("lm loss", 1, 1.0).write()
        broken = event_file(time=1_760_000_001).scalar("lm loss", 2, 1.0).write()
        broken.write_bytes(broken.read_bytes()[:-1])
        table, damage = scalars(tmp_path)
        assert table["step"].tolist() == [1]
        assert len(damage) == 1
        assert damage[0].startswith(broken.name)

    def test_links_are_not_followed(self, event_file: Callable[..., EventFileBuilder], tmp_path: Path) -> None:
        path = event_file("elsewhere").scalar("lm loss", 1, 1.0).write()
        folder = tmp_path / "tb_logs"
        folder.mkdir()
        (folder / path.name).symlink_to(path)
        assert find_event_files(folder) == ()

    def test_the_table_survives_parquet_bit_by_bit(
        self, event_file: Callable[..., EventFileBuilder], tmp_path: Path
    ) -> None:
        event_file().scalar("lm loss", 1, 0.1).scalar("lm loss", 1, math.nan).write()
        table, _ = scalars(tmp_path)
        content = metrics_parquet(table)
        pd.testing.assert_frame_equal(pd.read_parquet(BytesIO(content)), table)
        assert metrics_parquet(table) == content

    def test_an_empty_table_can_be_written(self, tmp_path: Path) -> None:
        table, _ = scalars(tmp_path)
        assert tuple(pd.read_parquet(BytesIO(metrics_parquet(table))).columns) == COLUMNS

    @pytest.mark.parametrize(("tag", "expected"), [("lm loss", "lm loss"), ("loss-scale vs samples", None)])
    def test_canonical_tag(self, tag: str, expected: Any) -> None:
        assert canonical_tag(tag) == expected
