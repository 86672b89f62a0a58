import io
import math
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nightbridge.outputs.failure_patterns import FLAKY_MARKERS
from nightbridge.outputs.logs import (
    LogReading,
    LogTail,
    Perf,
    StepRecord,
    latest_steps,
    match_perf,
    parse_steps,
    raw_lines,
    read_logs,
)
from tests.nightbridge.outputs.builders import StepLine


@pytest.fixture
def read(tmp_path: Path) -> Any:
    def read_text(*texts: str | bytes) -> Any:
        paths = []
        for number, text in enumerate(texts):
            path = tmp_path / f"log_{number}.out"
            path.write_bytes(text if isinstance(text, bytes) else text.encode())
            paths.append(path)
        return read_logs(paths)

    return read_text


def test_steps_whose_numbers_are_lost_were_done_all_the_same(read: Any, step_line: type[StepLine]) -> None:
    """A killed job of several nodes may lose what its last rank printed, and rank 0 prints no numbers."""
    rank_0 = (
        "Starting training loop at iteration 20\n" + "Step Time : 1.22s GPU utilization: 444.0MODEL_TFLOP/s/GPU\n" * 11
    )
    saved = "  successfully saved checkpoint from iteration      40 to /out [ t 1/1, p 1/1 ]\n"

    assert (read(rank_0).last_iteration, read(rank_0).iterations_seen) == (0, 31)
    assert read(rank_0, saved).iterations_seen == 40
    assert read(rank_0, f"{step_line(7, total=50).step}\n").iterations_seen == 7
    assert read("nothing\n").iterations_seen == 0


class TestStepLines:
    def test_a_step_line_is_read_in_full(self, step_line: type[StepLine]) -> None:
        line = step_line(7, total=50, seconds=0.2304, loss=11.89415, grad_norm=1.5, throughput=True, tflops=712.3)
        (record,) = parse_steps(line.step)
        assert record == StepRecord(
            7,
            50,
            elapsed_ms=230.4,
            tflops_per_gpu=712.3,
            lm_loss=11.89415,
            grad_norm=1.5,
            learning_rate=3e-4,
            global_batch_size=128,
            consumed_samples=896,
        )

    def test_the_optional_fields_of_newer_versions_do_not_disturb(self) -> None:
        text = (
            " [2026-11-20 22:51:38] iteration       10/      50 | consumed samples:         1280 |"
            " skipped samples:          128 | elapsed time per iteration (ms): 230.1 |"
            " throughput per GPU (TFLOP/s/GPU): 700.1 | energy per GPU (J/iter/GPU): 150.0 | power per GPU (W/GPU): 651.9 |"
            " learning rate: 3.000000E-04 | global batch size:   128 | lm loss: 2.500000E+00 |"
            " mtp_1 loss: 9.000000E+00 | load_balancing_loss: 1.000000E+00 | loss scale: 1.0 | grad norm: 1.250 |"
            " num zeros: 5 | params norm: 12.000 | max attention logit: 3.000 |"
            " number of skipped iterations:   0 | number of nan iterations:   0 |"
        )
        assert parse_steps(text) == [StepRecord(10, 50, 230.1, 700.1, 2.5, 1.25, 0, 0, 3e-4, 128, 1280)]

    def test_a_loss_that_is_not_finite_is_left_out_and_read_as_missing(self, step_line: type[StepLine]) -> None:
        (record,) = parse_steps(step_line(7, loss=math.nan, nan=1).step)
        assert record.lm_loss is None
        assert record.nan_iterations == 1

    def test_an_infinite_loss_and_a_nan_gradient_are_kept_as_they_are(self, step_line: type[StepLine]) -> None:
        (record,) = parse_steps(step_line(7, loss=math.inf, grad_norm=math.nan).step)
        assert record.lm_loss == math.inf
        assert record.grad_norm is not None
        assert math.isnan(record.grad_norm)

    def test_the_zero_that_a_skipped_iteration_prints_is_not_a_loss(self, step_line: type[StepLine]) -> None:
        (record,) = parse_steps(step_line(7, loss=0.0, skipped=1).step)
        assert (record.lm_loss, record.skipped_iterations) == (None, 1)

    def test_a_loss_of_zero_in_a_step_that_was_done_is_a_loss(self, step_line: type[StepLine]) -> None:
        (record,) = parse_steps(step_line(7, loss=0.0).step)
        assert record.lm_loss == 0.0

    def test_a_line_cut_anywhere_never_gives_a_wrong_number(self, step_line: type[StepLine]) -> None:
        whole = step_line(7, seconds=0.2304, loss=11.89415, grad_norm=1.5).step
        (complete,) = parse_steps(whole)
        for size in range(len(whole)):
            for record in parse_steps(whole[:size]):
                assert not record.whole
                assert all(value in (None, full) for value, full in zip(record[:-1], complete, strict=False)), whole[
                    :size
                ]

    def test_two_records_on_one_line_are_two_records(self, step_line: type[StepLine]) -> None:
        text = step_line(7, loss=1.0).step + step_line(8, loss=2.0).step
        assert [(record.iteration, record.lm_loss) for record in parse_steps(text)] == [(7, 1.0), (8, 2.0)]


class TestWholeLogs:
    def test_both_ranks_lines_are_put_together(
        self, read: Callable[..., LogReading], step_line: type[StepLine]
    ) -> None:
        lines = [step_line(n, seconds=0.2 + n / 100, tflops=700.0 + n) for n in range(1, 6)]
        reading = read("\n".join(f"{line.perf}\n{line.step}" for line in lines))
        assert [(step.iteration, step.tflops_per_gpu) for step in reading.steps] == [
            (n, 700.0 + n) for n in range(1, 6)
        ]

    @pytest.mark.parametrize(
        "text",
        [
            "{perf}{step}\n\n",
            "{step}{perf}\n\n",
            "{step}Number of parameters in transformer layers in billions:  6.98\n{perf}\n",
            "ain_fp8_mx/0 {perf}\nain_fp8_mx/0 {step}\n",
            "0: {perf}\n15: {step}\n",
            "\x1b[32m{perf}\x1b[0m\r\n\x1b[1;31m{step}\x1b[0m\r\n",
            "progress 10%\rprogress 20%\r{perf}\r{step}",
            "\ufeff\x00garbage \ufffd {perf} {step}",
        ],
    )
    def test_ranks_text_is_found_wherever_it_stands(
        self, read: Callable[..., LogReading], step_line: type[StepLine], text: str
    ) -> None:
        line = step_line(3, seconds=0.25, tflops=701.5, loss=2.5)
        (step,) = read(text.format(perf=line.perf, step=line.step)).steps
        assert (step.iteration, step.lm_loss, step.tflops_per_gpu) == (3, 2.5, 701.5)

    def test_a_perf_line_in_the_middle_of_a_step_line_spoils_neither(
        self, read: Callable[..., LogReading], step_line: type[StepLine]
    ) -> None:
        line = step_line(3, seconds=0.25, tflops=701.5, loss=2.5)
        middle = line.step.index("lm loss") + 12
        (step,) = read(line.step[:middle] + line.perf + line.step[middle:]).steps
        assert (step.lm_loss, step.tflops_per_gpu) == (2.5, 701.5)

    def test_a_log_without_a_newline_at_its_end_counts_its_last_line(
        self, read: Callable[..., LogReading], step_line: type[StepLine]
    ) -> None:
        assert read(step_line(1).step + "\n" + step_line(2).step).last_iteration == 2

    def test_a_line_that_a_killed_job_did_not_finish_is_no_step_without_a_loss(
        self, read: Callable[..., LogReading], step_line: type[StepLine]
    ) -> None:
        text = f"{step_line(1).step}\n{step_line(2).step}"
        assert [step.iteration for step in read(text[:-20]).steps] == [1]

    def test_a_line_that_was_torn_in_the_middle_of_the_log_is_a_step_without_a_loss(
        self, read: Callable[..., LogReading], step_line: type[StepLine]
    ) -> None:
        torn = step_line(1).step[:70]
        steps = read(f"{torn}\n{step_line(2).step}\n").steps
        assert [(step.iteration, step.lm_loss) for step in steps] == [(1, None), (2, 2.5)]

    def test_after_a_restart_the_later_record_wins(
        self, read: Callable[..., LogReading], step_line: type[StepLine]
    ) -> None:
        first = "\n".join(step_line(n, loss=9.0).step for n in range(1, 6))
        second = "\n".join(step_line(n, loss=1.0).step for n in range(4, 8))
        steps = latest_steps(read(first, second).steps)
        assert list(steps) == list(range(1, 8))
        assert [steps[n].lm_loss for n in (3, 4, 7)] == [9.0, 1.0, 1.0]

    def test_what_a_dead_life_did_beyond_the_last_one_is_dropped(
        self, read: Callable[..., LogReading], step_line: type[StepLine]
    ) -> None:
        dead = "\n".join(step_line(n).step for n in range(1, 10))
        alive = "\n".join(step_line(n).step for n in range(4, 6))
        assert list(latest_steps(read(dead, alive).steps)) == [1, 2, 3, 4, 5]

    def test_a_zero_throughput_is_a_value(self, read: Callable[..., LogReading], step_line: type[StepLine]) -> None:
        line = step_line(1, tflops=0.0)
        assert read(f"{line.perf}\n{line.step}\n").steps[0].tflops_per_gpu == 0.0

    def test_the_largest_memory_of_all_ranks_is_kept(self, read: Callable[..., LogReading]) -> None:
        text = (
            "[Rank 0] (after 2 iterations) memory (GB) | mem-allocated-gigabytes: 30.5 | mem-active-gigabytes: 31.0"
            " | mem-max-allocated-gigabytes: 40.25 | mem-max-reserved-gigabytes: 99.0 | mem-alloc-retires: 0"
            "[Rank 8] (after 2 iterations) memory (GB) | mem-max-allocated-gigabytes: 41.5 | mem-alloc-retires: 0\n"
        )
        assert max(read(text).values["peak_memory"]) == 41.5
        assert max(read(text).values["reserved_memory"]) == 99.0

    @pytest.mark.parametrize(
        "text",
        [
            " [mem] iter=2 rank=0 alloc_MB=30000 max_alloc_MB=39000 reserved_MB=50000 max_reserved_MB=50000\n"
            " [mem] iter=2 rank=9 alloc_MB=30000 max_alloc_MB=40000 reserved_MB=50000 max_reserved_MB=50000\n",
            "[Rank 0] (after 2 iterations) memory (MB) | allocated: 30000.0 | max allocated: 40000.0 | reserved: 49000.0"
            " | max reserved: 50000.0\n",
        ],
        ids=["heterogeneous loop", "Megatron-LM"],
    )
    def test_memory_in_mebibytes_is_read_as_gigabytes(self, read: Callable[..., LogReading], text: str) -> None:
        assert max(read(text).values["peak_memory"]) == pytest.approx(40000 * 1024**2 / 1e9)
        assert max(read(text).values["reserved_memory"]) == pytest.approx(50000 * 1024**2 / 1e9)

    def test_saved_checkpoints_are_listed_and_scheduled_ones_are_not(self, read: Callable[..., LogReading]) -> None:
        text = (
            "saving checkpoint at iteration      10 to /nemo_run/check points in torch_dist format\n"
            "  scheduled an async checkpoint save at iteration      20 to /nemo_run/check points\n"
            "  successfully saved checkpoint from iteration      10 to /nemo_run/check points [ t 1/1, p 1/1 ]\n"
        )
        assert read(text).saved_iterations == (10,)

    @pytest.mark.parametrize(
        ("text", "finished"),
        [
            ("[after training is done] datetime: 2026-11-20 22:51:38", True),
            ("[exiting program at iteration 50] datetime: 2026-11-20 22:51:38", True),
            ("Heterogeneous MIMO training completed", True),
            ("[exiting program after receiving SIGTERM.]", False),
            ("Starting training loop at iteration 0", False),
            ("[after training is done] datetime: x\nStarting training loop at iteration 20", False),
        ],
    )
    def test_the_end_of_training_is_recognised(
        self, read: Callable[..., LogReading], text: str, finished: bool
    ) -> None:
        assert read(text).finished is finished

    def test_the_first_start_is_the_runs_start(self, read: Callable[..., LogReading]) -> None:
        reading = read("Starting training loop at iteration 100\n", "Starting training loop at iteration 120\n")
        assert reading.start_iteration == 100

    def test_the_heterogeneous_loop_starts_after_the_iteration_that_it_loaded(
        self, read: Callable[..., LogReading]
    ) -> None:
        line = "Starting hetero MIMO training: world_size=8, encoder_size=4, llm_size=4, iters=4..5, dataset_provider=mock\n"
        assert read(line).start_iteration == 3

    @pytest.mark.parametrize("marker", FLAKY_MARKERS)
    def test_every_flaky_marker_is_found(self, read: Callable[..., LogReading], marker: str) -> None:
        assert read(f"rank 3: {marker} at node7\n").flaky_marker == marker

    def test_nan_is_the_codes_result_and_not_the_machines_fault(self, read: Callable[..., LogReading]) -> None:
        reading = read("RuntimeError: found NaN in local grad norm\n")
        assert reading.flaky_marker is None
        assert reading.nan_marker

    def test_the_time_limit_is_recognised(self, read: Callable[..., LogReading]) -> None:
        text = "slurmstepd: error: *** JOB 4711 ON node1 CANCELLED AT 2026-11-20T22:00:00 DUE TO TIME LIMIT ***\n"
        assert read(text).timeout_marker

    def test_a_log_that_cannot_be_read_is_named_and_the_others_count(
        self, tmp_path: Path, step_line: type[StepLine]
    ) -> None:
        good = tmp_path / "log_1.out"
        good.write_text(step_line(1).step)
        reading = read_logs([tmp_path / "log_0.out", good])
        assert reading.last_iteration == 1
        assert len(reading.damage) == 1
        assert "log_0.out" in reading.damage[0]

    def test_nothing_is_read_from_nothing(self, read: Callable[..., LogReading]) -> None:
        reading = read("")
        assert (reading.steps, reading.last_iteration, reading.last_error, reading.finished) == ((), 0, "", False)

    @given(st.binary(max_size=2000))
    def test_random_bytes_never_raise(self, tmp_path_factory: pytest.TempPathFactory, content: Any) -> None:
        path = tmp_path_factory.mktemp("log") / "log.out"
        path.write_bytes(content)
        assert read_logs([path]).damage == ()

    @pytest.mark.thorough
    def test_memory_does_not_grow_with_the_log(self, tmp_path: Path, step_line: type[StepLine]) -> None:
        path = tmp_path / "log.out"
        noise = b"x" * 200 + b"\n"
        with path.open("wb") as stream:
            for n in range(1, 11):
                stream.write(noise * 5_000)
                stream.write(b"y" * 3_000_000 + b"\n")
                stream.write(step_line(n).step.encode() + b"\n")
        tracemalloc.start()
        try:
            assert len(read_logs([path]).steps) == 10
            assert tracemalloc.get_traced_memory()[1] < 16 << 20
        finally:
            tracemalloc.stop()

    def test_lines_are_found_across_blocks(self) -> None:
        text = b"\n".join(b"line %d" % number for number in range(300_000))
        assert list(raw_lines(io.BytesIO(text)))[-1] == b"line 299999"
        assert sum(1 for _ in raw_lines(io.BytesIO(text))) == 300_000


class TestErrors:
    def test_the_last_line_of_a_traceback_is_the_error(self, read: Callable[..., LogReading]) -> None:
        text = (
            "Traceback (most recent call last):\n"
            '  File "/opt/x.py", line 3, in <module>\n'
            "    main()\n"
            "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB\n"
            "srun: error: node1: task 3: Exited with exit code 1\n"
        )
        assert read(text).last_error == (
            "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB (rank 3, node1)"
        )

    def test_an_error_cannot_drive_the_terminal_in_which_its_verdict_is_shown(
        self, read: Callable[..., LogReading]
    ) -> None:
        # A colour as tput ends it, a reset, the window's title, an 8-bit code, text that is written over and backwards.
        text = "Traceback (most recent call last):\n  File x\nValueError: \x1b[1mbad\x1b(B\x1b[m \x1bc\x1b]0;t\x07shape"

        assert read(f"{text}\n").last_error == "ValueError: bad shape"
        assert read(f"{text}\t\x9b2J\x08\u202e\n").last_error == "ValueError: bad shape 2J"

    def test_the_rank_prefix_of_torch_is_taken_off(self, read: Callable[..., LogReading]) -> None:
        text = "[rank3]: Traceback (most recent call last):\n[rank3]:   File x\n[rank3]: ValueError: bad shape\n"
        assert read(text).last_error == "ValueError: bad shape (rank 3)"

    def test_the_exception_that_a_rank_names_is_the_error_without_a_traceback_too(
        self, read: Callable[..., LogReading]
    ) -> None:
        text = (
            "[rank0]: RuntimeError: out of patience\n[rank1]: RuntimeError: out of patience\n"
            "srun: error: node1: tasks 0-1: Exited with exit code 1\n"
        )
        assert read(text).last_error == "RuntimeError: out of patience (rank 0, node1)"

    def test_a_rank_that_noticed_anothers_death_is_not_the_cause(self, read: Callable[..., LogReading]) -> None:
        text = (
            "[rank0]: Traceback (most recent call last):\n[rank0]: ValueError: bad shape\n"
            "[rank1]: Traceback (most recent call last):\n[rank1]: torch.distributed.DistBackendError: NCCL error\n"
        )
        assert read(text).last_error == "ValueError: bad shape (rank 0)"

    def test_a_traceback_that_was_handled_early_is_not_the_cause(self, read: Callable[..., LogReading]) -> None:
        text = (
            "Traceback (most recent call last):\n  File x\nModuleNotFoundError: No module named 'apex'\n"
            "training goes on\n"
            "Traceback (most recent call last):\n  File x\nRuntimeError: the real one\n"
        )
        assert read(text).last_error == "RuntimeError: the real one"

    def test_without_a_traceback_slurms_first_complaint_is_the_error(self, read: Callable[..., LogReading]) -> None:
        text = (
            "slurmstepd: error: Detected 1 oom_kill event in StepId=4711.0. Some of the step tasks have been OOM Killed.\n"
            "srun: error: node1: task 0: Out Of Memory\n"
        )
        assert read(text).last_error.startswith("slurmstepd: error: Detected 1 oom_kill")

    def test_a_newer_slurmstepd_gives_the_time_in_place_of_its_name(self, read: Callable[..., LogReading]) -> None:
        line = "[2026-11-22T08:02:36.924] error: Exceeded job memory limit"
        assert read(f"{line}\n").last_error == line


class TestMatching:
    """Rank 0's lines carry no iteration: order and step time must do."""

    @staticmethod
    def _steps(*seconds: float) -> list[StepRecord]:
        return [StepRecord(n, 50, elapsed_ms=s * 1000) for n, s in enumerate(seconds, 1)]

    def test_equal_counts_match_in_order_whatever_the_interleaving(self) -> None:
        perfs = [Perf(0.25, 700.0 + n) for n in range(4)]
        assert match_perf(perfs, self._steps(0.25, 0.25, 0.25, 0.25)) == dict(enumerate(perfs))

    def test_after_a_lost_perf_line_the_rest_still_matches(self) -> None:
        perfs = [Perf(5.0, 30.0), Perf(0.40, 400.0), Perf(0.50, 300.0)]
        matched = match_perf(perfs, self._steps(5.0, 0.30, 0.40, 0.50))
        assert matched == {0: perfs[0], 2: perfs[1], 3: perfs[2]}

    def test_after_a_lost_step_line_the_rest_still_matches(self) -> None:
        perfs = [Perf(5.0, 30.0), Perf(0.30, 500.0), Perf(0.40, 400.0), Perf(0.50, 300.0)]
        matched = match_perf(perfs, self._steps(5.0, 0.40, 0.50))
        assert matched == {0: perfs[0], 1: perfs[2], 2: perfs[3]}

    def test_the_perf_line_of_a_step_whose_own_line_was_never_printed_is_left_over(self) -> None:
        perfs = [Perf(0.25, 700.0), Perf(0.25, 701.0), Perf(0.25, 702.0)]
        assert match_perf(perfs, self._steps(0.25, 0.25)) == {0: perfs[0], 1: perfs[1]}

    def test_lines_that_agree_with_nothing_are_matched_with_nothing(self) -> None:
        assert match_perf([Perf(9.0, 1.0)], self._steps(0.25)) == {}

    @given(st.lists(st.floats(0.01, 100), min_size=1, max_size=30), st.lists(st.floats(0.01, 100), max_size=30))
    def test_whatever_is_matched_agrees_and_keeps_its_order(self, step_seconds: Any, perf_seconds: Any) -> None:
        steps = self._steps(*step_seconds)
        perfs = [Perf(seconds, float(n)) for n, seconds in enumerate(perf_seconds)]
        matched = match_perf(perfs, steps)
        numbers = [perf.tflops_per_gpu for _, perf in sorted(matched.items())]
        assert numbers == sorted(set(numbers))
        assert all(abs(perf.seconds - step_seconds[position]) < 0.0052 for position, perf in matched.items())


@pytest.fixture
def log(tmp_path: Path) -> Any:
    return tmp_path / "log.out"


def append(log: Any, text: str) -> None:
    with log.open("a") as stream:
        stream.write(text)


def test_each_line_is_read_once_when_it_is_finished(log: Any) -> None:
    tail = LogTail(log)
    looks = []
    for text in ("one\ntw", "o\n", "", "three\rfour\n"):
        append(log, text)
        looks.append(tail.new_lines())
    assert looks == [["one"], ["two"], [], ["three", "four"]]


def test_a_log_that_is_not_there_yet_has_no_lines(log: Any) -> None:
    tail = LogTail(log)
    before = tail.new_lines()
    append(log, "one\n")
    assert (before, tail.new_lines()) == ([], ["one"])


def test_a_line_that_is_never_finished_is_told_at_the_end(log: Any) -> None:
    tail = LogTail(log)
    append(log, "one\nhalf")
    assert (tail.new_lines(), tail.last_line(), tail.last_line()) == (["one"], ["half"], [])


def test_a_log_that_is_rotated_is_read_from_its_beginning(log: Any) -> None:
    tail = LogTail(log)
    append(log, "a long line before\nhalf of")
    tail.new_lines()
    log.rename(log.with_suffix(".1"))
    append(log, "new, and longer than what was there before it\n")
    assert tail.new_lines() == ["new, and longer than what was there before it"]


def test_a_log_that_is_cut_to_nothing_and_written_again_is_read_from_its_beginning(log: Any) -> None:
    tail = LogTail(log)
    append(log, "a long line before\n")
    tail.new_lines()
    os.truncate(log, 0)
    append(log, "short\n")
    assert tail.new_lines() == ["short"]


def test_a_log_of_a_gigabyte_costs_one_bounded_read(log: Any) -> None:
    log.touch()
    os.truncate(log, 1 << 30)
    append(log, "\nlast\n")
    tail = LogTail(log)
    assert tail.new_lines() == ["last"]


def test_what_is_written_faster_than_it_is_read_leaves_out_the_older_part_and_no_half_line(
    log: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nightbridge.outputs.logs.MAX_BYTES", 25)
    tail = LogTail(log)
    append(log, "first\n")
    tail.new_lines()
    append(log, "".join(f"line {number:03}\n" for number in range(100)))
    assert tail.new_lines() == ["line 098", "line 099"]
    append(log, "after\n")
    assert tail.new_lines() == ["after"]


def test_a_line_without_an_end_is_not_kept_for_ever(log: Any) -> None:
    tail = LogTail(log)
    append(log, "x" * (100 << 10))
    first = tail.new_lines()
    append(log, "end of it\nnext\n")
    assert (first, tail.new_lines(), tail.last_line()) == ([], ["next"], [])
