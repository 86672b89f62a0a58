"""What is shown of a job while it runs, and how its event files are read on."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from nightbridge.outputs.event_decoder import Row
from nightbridge.outputs.event_files import read_event_file
from nightbridge.outputs.following import MAX_LINES, EventTail, RunFollower
from nightbridge.outputs.logs import TrainingProgress
from tests.nightbridge.outputs.builders import EventFileBuilder, RunFolder


def step(iteration: int, seconds: Any = 0.5, total: int = 50) -> Any:
    return (
        f" [2026-11-21 01:02:03] iteration {iteration:8d}/{total:8d} | consumed samples: 8 |"
        f" elapsed time per iteration (ms): {seconds * 1000:.1f} | lm loss: 2.5E+00 |"
        " number of skipped iterations:   0 | number of nan iterations:   0 |\n"
    )


def test_new_lines_are_shown_once_and_the_last_of_many(run_folder: RunFolder) -> None:
    follower = RunFollower(run_folder.job, ())
    log = run_folder.log("one\n\ntwo\n")
    first, second = follower.look(), follower.look()
    log.write_text(log.read_text() + "".join(f"{number}\n" for number in range(100)))
    third = follower.look()
    assert (first.lines, second.lines) == (("one", "two"), ())
    assert (len(third.lines), third.lines[-1], third.left_out) == (MAX_LINES, "99", 100 - MAX_LINES)
    assert str(third).startswith(f"... {100 - MAX_LINES} more lines in {log}\n")


def test_no_secret_is_shown_not_even_one_that_is_cut_or_has_several_lines(run_folder: RunFolder) -> None:
    secret, key = "hf_0123456789abcdef", "-----BEGIN KEY-----\nMIIEvAIBADANBg\n-----END KEY-----"
    run_folder.log(f"token {secret}\n{'x' * 490}{secret}\n{key}\n")
    shown = str(RunFollower(run_folder.job, (secret, key)).look())
    assert "token ********" in shown
    assert not any(part in shown for part in (secret[:10], "MIIEvAIBADANBg"))


def test_progress_says_how_far_how_fast_and_how_long_still(run_folder: RunFolder) -> None:
    follower = RunFollower(run_folder.job, ())
    run_folder.log("starting\n")
    before = follower.look().progress
    run_folder.log(step(9, 4.0) + step(10) + step(11), restart=1)
    progress = follower.look().progress
    assert before is None
    assert progress == TrainingProgress(iteration=11, total=50, step_time=0.5, loss=2.5)
    assert (progress.percent, str(progress)) == (22.0, "iteration 11/50, loss 2.5, 0.5 s a step, 0:00:20 left")


@pytest.mark.parametrize(("tag", "factor"), [("iteration-time", 1.0), ("iteration-time-ms", 1000.0)])
def test_event_files_say_how_far_a_run_is_before_its_log_does(
    run_folder: RunFolder, event_file: Callable[..., EventFileBuilder], tag: str, factor: float
) -> None:
    output = run_folder.job.attempt_dir / "output"
    follower = RunFollower(run_folder.job, (), output_dir=output, total=50)
    before = follower.look().progress
    events = event_file(output / "tb_logs")
    events.scalar(tag, 1, 0.25 * factor).scalar("lm loss", 1, 2.5).scalar("lm loss vs samples", 128, 2.5)
    events.scalar(tag, 2, 0.75 * factor).scalar("lm loss", 2, math.nan).write()
    progress = follower.look().progress
    assert before is None
    assert str(progress) == "iteration 2/50, loss nan, 0.5 s a step, 0:00:24 left"


def test_a_step_that_log_and_event_files_tell_counts_once_and_a_lagging_file_sets_nothing_back(
    run_folder: RunFolder, event_file: Callable[..., EventFileBuilder]
) -> None:
    follower = RunFollower(run_folder.job, (), total=50)
    run_folder.log(step(1, 1.0) + step(2, 3.0) + step(3, 5.0))
    follower.look()
    event_file(run_folder.job_dir / "tb_logs").scalar("iteration-time", 1, 1.0).write()
    assert follower.look().progress == TrainingProgress(iteration=3, total=50, step_time=3.0, loss=2.5)


def test_a_restart_goes_back_to_its_checkpoint(
    run_folder: RunFolder, event_file: Callable[..., EventFileBuilder]
) -> None:
    follower = RunFollower(run_folder.job, (), total=50)
    event_file(run_folder.job_dir / "tb_logs").scalar("iteration-time", 20, 9.0).write()
    run_folder.log(step(19, 9.0) + step(20, 9.0))
    before = follower.look().progress
    run_folder.log(step(11, 1.0), restart=1)
    after = follower.look().progress
    assert before is not None
    assert after is not None
    assert (before.iteration, before.step_time) == (20, 9.0)
    assert (after.iteration, after.step_time) == (11, 1.0)


def test_a_damaged_event_file_is_followed_up_to_its_damage(
    run_folder: RunFolder, event_file: Callable[..., EventFileBuilder]
) -> None:
    path = event_file(run_folder.job_dir / "tb_logs").scalar("lm loss", 1, 2.5).scalar("lm loss", 2, 2.25).write()
    content = bytearray(path.read_bytes())
    content[-6] ^= 1
    path.write_bytes(content)
    news = RunFollower(run_folder.job, (), total=50).look()
    assert news.progress is not None
    assert news.progress.iteration == 1


def test_a_last_step_without_a_line_end_counts_when_the_job_has_ended(run_folder: RunFolder) -> None:
    follower = RunFollower(run_folder.job, ())
    run_folder.log(step(49) + step(50).rstrip("\n"))
    while_it_runs, at_the_end = follower.look(), follower.look(ended=True)
    assert [look.progress and look.progress.iteration for look in (while_it_runs, at_the_end)] == [49, 50]
    assert len(at_the_end.lines) == 1


def test_a_job_without_a_folder_shows_nothing(run_folder: RunFolder) -> None:
    run_folder.job_dir.rmdir()
    news = RunFollower(run_folder.job, ()).look()
    assert (news.lines, news.progress) == ((), None)


@pytest.mark.parametrize("total", [0, 5])
def test_progress_never_passes_its_end(total: int) -> None:
    assert 0 <= TrainingProgress(iteration=10, total=total, step_time=1.0).percent <= 100
    assert TrainingProgress(iteration=10, total=total, step_time=1.0).seconds_left == 0


@pytest.mark.parametrize("step_time", [math.nan, math.inf, 1e300, -1e300])
def test_a_step_time_that_is_none_says_nothing_of_the_end(step_time: float) -> None:
    progress = TrainingProgress(iteration=10, total=50, step_time=step_time)
    assert progress.seconds_left is None
    assert str(progress) == "iteration 10/50"


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
    assert tail.new_rows() == []


def test_a_record_written_by_halves_at_any_byte_comes_once_and_whole(
    tmp_path: Path, event_file: Callable[..., EventFileBuilder]
) -> None:
    whole = event_file().scalar("lm loss", 1, 2.5).scalar("lm loss", 2, 2.25).write()
    content, rows = whole.read_bytes(), list(read_event_file(whole).rows)
    for cut in range(len(content) + 1):
        growing = tmp_path / str(cut) / "events.out.tfevents.1.cut"
        growing.parent.mkdir()
        growing.write_bytes(content[:cut])
        tail = EventTail(growing.parent)
        first = tail.new_rows()
        with growing.open("ab") as stream:
            stream.write(content[cut:])
        assert first + tail.new_rows() == rows


def test_room_that_the_file_system_allocated_ahead_is_filled_later(
    tmp_path: Path, event_file: Callable[..., EventFileBuilder]
) -> None:
    content = event_file().scalar("lm loss", 1, 2.5).scalar("lm loss", 2, 2.25).write().read_bytes()
    path = tmp_path / "job" / "events.out.tfevents.1.ahead"
    path.parent.mkdir()
    path.write_bytes(content[:-30] + bytes(4096))
    tail = EventTail(path.parent)
    assert steps(tail.new_rows()) == [1]
    path.open("r+b").write(content)
    assert steps(tail.new_rows()) == [2]


def test_a_restart_of_the_job_adds_a_file_that_is_found(
    tmp_path: Path, event_file: Callable[..., EventFileBuilder]
) -> None:
    tail = EventTail(tmp_path / "tb_logs")
    assert tail.new_rows() == []
    event_file(time=1_760_000_000).scalar("lm loss", 1, 2.5).write()
    assert steps(tail.new_rows()) == [1]
    event_file(time=1_760_001_000).scalar("lm loss", 1, 2.0).scalar("lm loss", 2, 1.5).write()
    assert [(row.step, row.value) for row in tail.new_rows()] == [(1, 2.0), (2, 1.5)]
