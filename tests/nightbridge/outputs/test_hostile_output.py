"""Whatever a job leaves is read within seconds, without an exception; time grows with its size and no faster."""

import io
import os
import re
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

import pandas as pd
import pytest

from nightbridge.launch.config_container import check_yaml
from nightbridge.models import CheckpointState, GatePolicy, LaunchPlan
from nightbridge.outputs.checkpoints import layout_state
from nightbridge.outputs.experiment import LINES, read_run
from nightbridge.outputs.logs import MAX_BYTES, MAX_LINE_BYTES, TrainingProgress, progress_in_log, read_logs
from nightbridge.outputs.measurements import RunToMeasure, measure_run
from nightbridge.outputs.run_evidence import RunToRead, evidence_of
from nightbridge.slurm.attempt_files import read_claim, read_exit_code, unreadable_numbers
from tests.builders import make_spec
from tests.hostile import CHECKPOINT, CORPUS, FOLDERS, MADE, corpus, path_of, plant
from tests.nightbridge.outputs.builders import RunFolder, StepLine, measure

STEPS = 20
T = TypeVar("T")
pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def run(run_folder: RunFolder, step_line: type[StepLine], write_checkpoint: Callable[..., Path]) -> RunFolder:
    """A good run with all that a run leaves."""
    run_folder.log("".join(f"{step_line(number).step}\n" for number in range(1, STEPS + 1)))
    run_folder.curves(range(1, STEPS + 1))
    write_checkpoint(run_folder.job_dir / "checkpoints")
    return run_folder


@pytest.mark.thorough
@pytest.mark.parametrize("name", [*corpus(), *MADE])
def test_a_run_is_read_whatever_one_of_its_files_is(name: str, run: RunFolder) -> None:
    plant(name, run.job)
    to_read = RunToRead(jobs=(run.job,), plan=plan_of(run))
    to_measure = RunToMeasure(jobs=(run.job,), plan=plan_of(run), spec=make_spec())
    found = within_five_seconds(partial(evidence_of, to_read))
    measured, metrics = within_five_seconds(partial(measure_run, to_measure))

    assert measured.summary.steps_done == found.steps_done
    assert measured.summary.steps_done >= STEPS
    assert len(pd.read_parquet(io.BytesIO(metrics))) >= STEPS


def within_five_seconds(work: Callable[[], T]) -> T:
    """Of processor time, the children's with it, which is the same on a busy machine; by the clock, it does not block."""
    busy, started = time.process_time() + readers_seconds(), time.monotonic()
    found = work()
    assert time.process_time() + readers_seconds() - busy < 5
    assert time.monotonic() - started < 30
    return found


def readers_seconds() -> float:
    """Processor time of this process's reader server and its children, those that have ended among them, in seconds."""
    servers = children(os.getpid())
    ticks = 0
    for pid in (*servers, *(child for server in servers for child in children(server))):
        with suppress(OSError):  # it has just ended
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def children(pid: int) -> list[int]:
    with suppress(OSError):  # it has just ended
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def plan_of(run: RunFolder) -> LaunchPlan:
    job = run.job
    return LaunchPlan(
        run_key=job.run_key,
        attempt=job.attempt,
        attempt_dir=job.attempt_dir,
        argv=("python",),
        cwd=job.attempt_dir,
        nodes=1,
        tasks_per_node=1,
        max_steps=STEPS,
    )


OF_CHECKPOINTS = ("metadata/", "metadata_json/", "run_config/")
ALL = (*corpus(), *MADE)


@pytest.mark.parametrize("name", [name for name in ALL if name.startswith(OF_CHECKPOINTS)])
def test_a_hostile_part_of_a_checkpoint_is_damage(name: str, run: RunFolder) -> None:
    plant(name, run.job)

    state, reason = layout_state(run.job_dir / CHECKPOINT)

    assert state is not CheckpointState.COMPLETE
    assert reason


@pytest.mark.parametrize("name", [name for name in ALL if name.startswith("event_file/")])
def test_a_hostile_event_file_is_named_and_the_other_one_counts(name: str, run: RunFolder) -> None:
    plant(name, run.job)

    output = read_run(run.job, None)
    summary, _ = measure(output, GatePolicy(), STEPS)

    assert summary.source == "tensorboard"
    assert summary.final_loss is not None
    left_out = len(output.event_files) == 1
    harmless = name.endswith(("dimensions", "values", "megabyte", "numbers"))
    assert left_out or harmless or any("tfevents.1750000000" in line for line in summary.damage)


@pytest.mark.parametrize("kind", ["event_file", "log", "environment", "tracker"])
def test_a_fifo_among_the_files_of_a_run_is_named(kind: str, run: RunFolder) -> None:
    plant(f"{kind}/fifo", run.job)
    name = path_of(kind, run.job).name

    output = read_run(run.job, None)
    summary, _ = measure(output, GatePolicy(), STEPS)

    named = [*summary.damage, *(f"{each.path}: {each.reason}" for each in output.not_stored)]
    assert [line for line in named if name in line and line.endswith("not a regular file")], named
    assert any(name in line for line in summary.damage) is (kind in ("event_file", "log"))


@pytest.mark.parametrize("name", [name for name in ALL if name.startswith("number/")])
def test_what_is_no_number_says_nothing_and_is_named(name: str, run: RunFolder) -> None:
    assert unreadable_numbers(run.attempt_dir) == ()
    plant(name, run.job)

    assert read_exit_code(run.attempt_dir) == (10**18 - 1 if name == "number/huge" else None)
    assert read_claim(run.attempt_dir) is None
    measured, _ = measure_run(RunToMeasure(jobs=(run.job,), plan=plan_of(run), spec=make_spec()))
    assert ("exit_code: not a file with a number" in measured.summary.damage) is (name != "number/huge")


def test_checkpoints_of_an_earlier_attempt_are_not_looked_into(run: RunFolder) -> None:
    """They are not stored, so that nothing in them can cost the run its reader."""
    measured, _ = measure_run(RunToMeasure(jobs=(run.job, run.job), plan=plan_of(run), spec=make_spec()))

    (earlier,) = measured.earlier
    assert (earlier.logs, earlier.checkpoints) == (measured.output.logs, ())
    assert measured.output.checkpoints


# --- names and folders -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attack", FOLDERS)
@pytest.mark.parametrize("place", ["", "tb_logs", CHECKPOINT])
def test_a_run_is_read_whatever_its_folders_hold(attack: str, place: str, run: RunFolder) -> None:
    FOLDERS[attack](run.job_dir / place)
    to_read = RunToRead(jobs=(run.job,), plan=plan_of(run))
    found = within_five_seconds(partial(evidence_of, to_read))
    measured, _ = within_five_seconds(
        partial(measure_run, RunToMeasure(jobs=(run.job,), plan=plan_of(run), spec=make_spec()))
    )

    assert found.steps_done == measured.summary.steps_done == STEPS
    assert len(measured.output.event_files) == 1
    reasons = {each.reason for each in measured.output.not_stored if each.reason in FOLDER_REASONS[attack]}
    assert reasons == (FOLDER_REASONS[attack] if place != CHECKPOINT else set())
    assert all(each.path.isprintable() for each in measured.output.not_stored)


FOLDER_REASONS = {
    "deep": {"cannot be read: its folders lie more than 64 deep"},
    "loops": {"it is not a regular file"},
    "names": {"its name is not UTF-8", "its name has characters that cannot be shown"},
}


def test_of_too_many_files_the_first_are_looked_at_and_the_rest_is_named(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nightbridge.files.MAX_NAMES", 50)
    for number in range(60):
        (run.job_dir / "configs" / str(number)).mkdir(parents=True)

    output = read_run(run.job, None)

    (left_out,) = (each for each in output.not_stored if "more than 50 files and folders lie below" in each.reason)
    assert left_out.path.endswith("configs")
    assert len(output.logs) == 1


# --- time ------------------------------------------------------------------------------------------------------------

PIECES = (
    "iteration 1/ 10 |", " ", "a", "a: ", ":", "|", "lm loss: ", "iteration ", "iteration 1", "9", "1.", "(",
    "Step Time : ", "Step Time : 1s GPU utilization: ", "slurmstepd-", "slurmstepd: error: ", "error: ",
    "Starting hetero MIMO training: ", "Starting hetero MIMO training: iters=1.", "iters=1",
    "successfully saved checkpoint from iteration ", "successfully saved checkpoint from iteration 1 to x", " [ t 1/",
    "memory (MB) |", "memory (MB) | max allocated: ", "mem-max-allocated-gigabytes: ", "max_alloc_MB=", "save-checkpoint ",
    "save-checkpoint .", "save-checkpoint : (1, ", "[rank0]: ", "[1]: ", "Traceback (most recent call last)", "A.",
    "[2026-11-20T22:00:00", "\x1b[", "\x1b[0", "\x1b]0;", "\x1b", "\x00", "\xff", "é", "found NaN in", "EOFError", "\t",
    "kernel driver version ", "Driver Version: 1.1 ", "Driver Version: 1.1", "NCCL version 1.1+cuda", "PyTorch Version 1",
)  # fmt: skip
PREFIXES = ("", "iteration 1/ 10 |", "Traceback (most recent call last)\n", "memory (MB) |", "error: ")


def seconds(work: Callable[[], object]) -> float:
    """Of processor time, the shortest of three: what another process takes does not count."""
    times = []
    for _ in range(3):
        started = time.thread_time()
        work()
        times.append(time.thread_time() - started)
    return min(times)


def quick(work: Callable[[], object], limit: float) -> bool:
    """Whether one of three tries takes less processor time, in seconds: a bound needs no exact figure."""
    for _ in range(3):
        started = time.thread_time()
        work()
        if time.thread_time() - started < limit:
            return True
    return False


@pytest.mark.parametrize("prefix", PREFIXES)
def test_a_line_of_64_kib_of_any_shape_is_read_in_a_fifth_of_a_second(prefix: str, tmp_path: Path) -> None:
    path = tmp_path / "log_0.out"
    for piece in PIECES:
        path.write_bytes(((prefix + piece * (65536 // len(piece))) + "\n").encode())

        assert quick(lambda: read_logs([path]), 0.2), repr(piece)


@pytest.mark.thorough
@pytest.mark.parametrize("line_end", ["", "\n"])
def test_progress_is_told_by_the_end_of_a_log_of_a_terabyte_whatever_stands_there(
    line_end: str, tmp_path: Path, step_line: type[StepLine]
) -> None:
    path, told = tmp_path / "log_0.out", list[TrainingProgress | None]()
    for piece in (PREFIXES[1] + piece + line_end for piece in PIECES):
        with path.open("wb") as stream:
            stream.truncate(1 << 40)
            stream.seek(0, os.SEEK_END)
            stream.write(f"{piece * (MAX_BYTES // len(piece))}\n{step_line(7).step}\n".encode())

        assert quick(lambda: told.append(progress_in_log(path)), 0.5), piece
        assert {each and each.iteration for each in told} == {7}, piece


@pytest.mark.parametrize("name", corpus("log"))
def test_no_line_of_a_log_keeps_progress_from_an_answer(name: str, run: RunFolder) -> None:
    plant(name, run.job)

    assert progress_in_log(path_of("log", run.job)) is not None


def test_what_is_no_log_is_an_error_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "log_0.out")

    with pytest.raises(OSError, match="not a regular file"):
        progress_in_log(tmp_path / "log_0.out")


GROWTH = 3.0
"""Of the time when the input doubles: two, and what a measurement of milliseconds is off by."""


@pytest.mark.thorough
@pytest.mark.parametrize("prefix", PREFIXES)
def test_the_time_of_a_line_grows_with_its_length_and_no_faster(
    prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if no line were cut."""
    monkeypatch.setattr("nightbridge.outputs.logs.MAX_LINE_BYTES", 1 << 30)
    path = tmp_path / "log_0.out"
    for piece in PIECES:
        lines = [((prefix + piece * (size // len(piece))) + "\n").encode() for size in (1 << 14, 1 << 16)]
        path.write_bytes(lines[0])
        limit = 0.005 + GROWTH**2 * seconds(lambda: read_logs([path]))
        path.write_bytes(lines[1])
        assert quick(lambda: read_logs([path]), limit), f"{piece!r}: {limit}"


@pytest.mark.parametrize("pattern", [pattern for pattern, _ in LINES], ids=lambda pattern: pattern.pattern[:20])
def test_the_time_for_the_facts_grows_with_the_log_and_no_faster(pattern: re.Pattern[str]) -> None:
    for piece in PIECES:
        short, long = (piece * (size // len(piece)) for size in (1 << 14, 1 << 16))
        limit = 0.005 + GROWTH**2 * seconds(partial(pattern.search, short))
        assert quick(partial(pattern.search, long), limit), f"{piece!r}: {limit}"


YAML = ("[", "{", "a: ", "- ", "? ", "- a\n", "a: b\n", "'", '"', "&a ", "*a ", "!a ", "#", "<<: ", "1", "|\n", "[a,")


@pytest.mark.parametrize("piece", YAML)
def test_the_time_of_a_configuration_grows_with_its_size_and_no_faster(piece: str) -> None:
    def check(data: bytes) -> None:
        with suppress(ValueError):
            check_yaml(data)

    short, long = ((piece * (size // len(piece))).encode() for size in (1 << 16, 1 << 18))
    limit = 0.005 + GROWTH**2 * seconds(partial(check, short))
    assert quick(partial(check, long), limit), limit


def test_a_line_that_is_too_long_is_cut_and_counted(run: RunFolder, step_line: type[StepLine]) -> None:
    path = run.log(f"{'x' * MAX_LINE_BYTES}\n{'y' * 3_000_000}\n{step_line(1).step}\n" + "z" * (MAX_LINE_BYTES + 1))

    reading = read_logs([path])

    assert reading.cut_lines == 2
    assert [step.iteration for step in reading.steps] == [1]
    summary, _ = measure(read_run(run.job, None), GatePolicy(), STEPS)
    assert any("2 lines of the log are longer than 8192 bytes" in note for note in summary.notes)


def test_the_corpus_has_every_kind() -> None:
    assert {path.name for path in CORPUS.iterdir() if path.is_dir()} >= {"log", "metadata", "event_file", "number"}
    assert len(corpus()) > 70
