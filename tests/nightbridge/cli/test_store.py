"""`events`, `verify` and `fetch`: stored files and event files."""

import json
import os
import random
import sys
from pathlib import Path

import pandas as pd
import pytest

from tests.builders import saved_shards
from tests.nightbridge.cli.conftest import Program


@pytest.fixture
def event_folder(tmp_path: Path) -> str:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(str(tmp_path / "tb"))
    for step in (1, 2, 3):
        value = Summary.Value(tag="lm loss", simple_value=10.0 / step)
        writer.add_event(Event(step=step, wall_time=step, summary=Summary(value=[value])))
    writer.close()
    return str(tmp_path / "tb")


def test_events_prints_one_line_for_each_tag(nightbridge: Program, event_folder: str) -> None:
    code, out, _ = nightbridge("events", event_folder)

    assert code == 0
    assert out.splitlines()[1] == "lm loss\t3\t1\t3\t3.33333"


def test_the_name_of_a_tag_cannot_drive_the_terminal(nightbridge: Program, event_folder: str) -> None:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(event_folder)
    writer.add_event(Event(step=1, summary=Summary(value=[Summary.Value(tag="\x1bc\x9b2Jtime\r", simple_value=1.0)])))
    writer.close()

    _, out, _ = nightbridge("events", event_folder)

    assert "c2Jtime\t1\t1\t1\t1" in out.splitlines()


@pytest.mark.parametrize("size", ["inf", "1e300"])
def test_any_size_is_a_limit_of_images(nightbridge: Program, tmp_path: Path, size: str) -> None:
    code, _, err = nightbridge("prune", "--max-gb", size, "--workspace", str(tmp_path / "ws"))

    assert (code, "0 images" in err) == (0, True)


def test_events_counts_what_is_no_scalar(nightbridge: Program, event_folder: str) -> None:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import HistogramProto, Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(event_folder)
    values = [Summary.Value(tag="weights", histo=HistogramProto()), Summary.Value(tag="seen", image=Summary.Image())]
    for value in (*values, values[0]):
        writer.add_event(Event(summary=Summary(value=[value])))
    writer.close()

    code, out, err = nightbridge("events", event_folder)

    assert (code, len(out.splitlines())) == (0, 2)
    assert "not scalars, left out: 2 histogram, 1 image" in err


def test_events_writes_the_table_as_parquet(nightbridge: Program, event_folder: str, tmp_path: Path) -> None:
    code, out, _ = nightbridge("events", event_folder, "--out", str(tmp_path / "x.parquet"))

    assert (code, out) == (0, "")
    assert list(pd.read_parquet(tmp_path / "x.parquet")["step"]) == [1, 2, 3]


def test_events_into_a_place_that_cannot_be_written_say_so(
    nightbridge: Program, event_folder: str, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")

    code, _, err = nightbridge("events", event_folder, "--out", str(tmp_path / "file" / "x.parquet"))

    assert code == 2
    assert "cannot be written" in err


@pytest.mark.parametrize(("cut", "rows"), [(5, 2), (0, 0)])
def test_events_of_a_damaged_file_are_kept_and_no_success(
    nightbridge: Program, event_folder: str, tmp_path: Path, cut: int, rows: int
) -> None:
    (file,) = Path(event_folder).iterdir()
    file.write_bytes(file.read_bytes()[:-cut] if cut else b"this is no event file at all")

    code, _, err = nightbridge("events", event_folder, "--out", str(tmp_path / "x.parquet"))

    assert (code, len(pd.read_parquet(tmp_path / "x.parquet"))) == (4, rows)
    assert f"{event_folder}: not every event file is whole" in err


def test_events_are_not_written_as_what_they_are_not(nightbridge: Program, event_folder: str, tmp_path: Path) -> None:
    code, _, err = nightbridge("events", event_folder, "--out", str(tmp_path / "x.csv"))

    assert (code, "x.csv: not a kind of table. End its name with .parquet" in err) == (2, True)
    assert not (tmp_path / "x.csv").exists()


def test_events_without_any_say_so(nightbridge: Program, tmp_path: Path) -> None:
    code, _, err = nightbridge("events", str(tmp_path))

    assert code == 2
    assert "no TensorBoard scalars" in err


def test_events_of_a_missing_folder_say_so(nightbridge: Program) -> None:
    code, _, err = nightbridge("events", "nowhere")

    assert (code, "nowhere: no such file or folder" in err) == (2, True)


@pytest.mark.parametrize("command", [["verify"], ["fetch", "dest"], ["compare"], ["accept", "--why", "known"]])
def test_a_run_that_was_never_stored_is_named(nightbridge: Program, tmp_path: Path, command: list[str]) -> None:
    key = "test-2026-11-21-0123456789"

    code, _, err = nightbridge(command[0], key, *command[1:], "--workspace", str(tmp_path / "ws"))

    assert code == 2
    assert key in err


def test_checkpoint_reads_every_byte_and_ends_with_an_error_for_a_damaged_one(
    nightbridge: Program, tmp_path: Path
) -> None:
    folder = tmp_path / "step-1"
    folder.mkdir()
    for name, content in saved_shards({"__0_0.distcp": 4000}, random.Random(1)).items():
        (folder / name).write_bytes(content)
    assert nightbridge("checkpoint", str(folder))[:2] == (0, f"{folder}: verified\n")
    code, _, err = nightbridge("checkpoint", str(folder), "--deep", "--python", sys.executable)
    assert (code, "it has no module torch" in err) == (4, True)

    flipped = bytearray((folder / "__0_0.distcp").read_bytes())
    flipped[3000] ^= 1
    (folder / "__0_0.distcp").write_bytes(flipped)
    code, out, err = nightbridge("checkpoint", str(folder), "--json")

    (found,) = json.loads(out)
    assert (code, found["state"]) == (4, "damaged")
    assert "do not have the CRC-32" in found["reason"]
    assert "1 of 1 checkpoints are not whole" in err


def test_checkpoint_reads_nothing_that_a_link_leads_to(nightbridge: Program, tmp_path: Path) -> None:
    """It is read in a child that is confined to the folder; in this process the shard behind the link was read."""
    folder = tmp_path / "here" / "step-1"
    (tmp_path / "elsewhere").mkdir()
    folder.mkdir(parents=True)
    (folder / "sub").symlink_to(tmp_path / "elsewhere")
    for name, content in saved_shards({"sub/__0_0.distcp": 4000}, random.Random(1)).items():
        (folder / name).write_bytes(content)

    code, out, _ = nightbridge("checkpoint", str(folder), "--json")

    assert (code, json.loads(out)[0]["state"]) == (4, "damaged")


@pytest.mark.parametrize("content", ["nothing", "a text", "a link"])
def test_checkpoint_of_a_folder_without_one_is_no_success(nightbridge: Program, tmp_path: Path, content: str) -> None:
    folder, elsewhere = tmp_path / "save", tmp_path / "elsewhere"
    folder.mkdir()
    elsewhere.mkdir()
    (elsewhere / "model.pt").write_bytes(b"half")
    if content == "a text":
        (folder / "README.md").write_text("soon")
    elif content == "a link":
        (folder / "iter_0000010").symlink_to(elsewhere)

    code, out, err = nightbridge("checkpoint", str(folder))

    assert (code, out) == (2, "")
    assert f"{folder}: no checkpoint" in err


def test_checkpoint_of_a_runs_folder_is_of_the_checkpoints_in_it(nightbridge: Program, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints" / "iter_0000010"
    folder.mkdir(parents=True)
    (folder / "__0_0.distcp").write_bytes(bytes(100))

    code, out, _ = nightbridge("checkpoint", str(tmp_path))

    assert (code, out) == (4, f"{folder}: in_progress  there is no .metadata yet\n")


def test_checkpoint_of_a_folder_whose_path_is_not_utf8_says_so(nightbridge: Program, tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"run-\xff")
    folder.mkdir()

    code, out, err = nightbridge("checkpoint", str(folder))

    assert (code, out) == (2, "")
    assert "its path is not UTF-8" in err


def test_checkpoint_with_a_file_whose_name_is_not_utf8_is_judged(nightbridge: Program, tmp_path: Path) -> None:
    folder = tmp_path / "step-1"
    folder.mkdir()
    for name, content in saved_shards({"__0_0.distcp": 4000}, random.Random(1)).items():
        (folder / name).write_bytes(content)
    (folder / os.fsdecode(b"notes-\xff")).write_text("no part of it")

    code, out, _ = nightbridge("checkpoint", str(folder))

    assert (code, out) == (0, f"{folder}: unproven  notes-\\udcff has no checksum\n")


@pytest.mark.parametrize(("is_link", "why"), [(True, "is a link, which is not followed"), (False, "is not there")])
def test_checkpoint_misses_the_one_that_a_training_would_load(
    nightbridge: Program, tmp_path: Path, is_link: bool, why: str
) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "save").mkdir()
    (tmp_path / "save" / "latest_checkpointed_iteration.txt").write_text("10")
    if is_link:
        (tmp_path / "save" / "iter_0000010").symlink_to(tmp_path / "elsewhere")

    code, out, _ = nightbridge("checkpoint", str(tmp_path / "save"))

    assert code == 4
    assert out.endswith(f"iter_0000010: damaged  latest_checkpointed_iteration.txt names it, and it {why}\n")


def test_checkpoint_of_a_missing_folder_says_so(nightbridge: Program) -> None:
    code, _, err = nightbridge("checkpoint", "nowhere")
    assert (code, "nowhere: no such folder" in err) == (2, True)
