import hashlib
import math
import struct
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import pytest

from nightbridge.history.rows import measured as measured_value
from nightbridge.launch.launch_plan import ProfiledSteps
from nightbridge.models import Arm, GatePolicy, Job, JobState, JobStatus, Summary
from nightbridge.models.metrics import METRIC_BY_NAME
from nightbridge.outputs.curves import logging_interval
from nightbridge.outputs.event_files import COLUMNS, metrics_parquet
from nightbridge.outputs.experiment import read_run
from nightbridge.outputs.measurements import RunSettings, RunToMeasure, measure_run
from tests.builders import make_plan, make_spec
from tests.nightbridge.outputs.builders import EventFileBuilder, RunFolder, StepLine, measure


@pytest.fixture
def measured(run_folder: RunFolder) -> Callable[..., Summary]:
    def run(
        steps_expected: int | None = 50,
        warmup_steps: int = 10,
        settings: RunSettings | None = None,
        job: Job | None = None,
        post_profiling_steps: int = 0,
    ) -> Summary:
        gate = GatePolicy(warmup_steps=warmup_steps, post_profiling_steps=post_profiling_steps)
        return measure(read_run(run_folder.job, None), gate, steps_expected, settings, job)[0]

    return run


class TestFromTensorboard:
    def test_a_whole_run_is_summarised_over_its_steady_window(
        self, run_folder: RunFolder, measured: Callable[..., Summary]
    ) -> None:
        run_folder.curves(range(1, 51))
        summary = measured()
        window = np.array([0.25 + step / 10_000 for step in range(11, 51)], dtype="float32")
        assert summary.source == "tensorboard"
        assert (summary.steps_done, summary.steady_first_step, summary.steady_last_step) == (50, 11, 50)
        assert summary.step_time == pytest.approx(np.median(window), rel=1e-6)
        assert summary.step_time_p05 == pytest.approx(np.quantile(window, 0.05), rel=1e-6)
        assert summary.step_time_p95 == pytest.approx(np.quantile(window, 0.95), rel=1e-6)
        assert summary.step_time_midmean == pytest.approx(np.sort(window)[10:30].mean(), rel=1e-6)
        assert summary.tflops_per_gpu == pytest.approx(669.5)
        assert summary.peak_memory == pytest.approx(43.0)
        assert summary.final_loss == pytest.approx(3.0 / math.sqrt(50), rel=1e-6)
        assert (summary.non_finite_steps, summary.damage, summary.notes) == (0, (), ())

    @pytest.mark.parametrize(
        ("done", "warmup", "first"), [(50, 10, 11), (20, 10, 11), (19, 10, 10), (4, 10, 3), (1, 10, 1), (50, 0, 1)]
    )
    def test_the_steady_window_leaves_out_the_warm_up_or_the_first_half_of_a_short_run(
        self, run_folder: RunFolder, measured: Callable[..., Summary], done: Any, warmup: Any, first: Any
    ) -> None:
        run_folder.curves(range(1, done + 1))
        summary = measured(done, warmup)
        assert (summary.steady_first_step, summary.steady_last_step) == (first, done)

    def test_after_a_restart_the_later_values_count(
        self, run_folder: RunFolder, measured: Callable[..., Summary]
    ) -> None:
        run_folder.curves(range(1, 41), loss=lambda step: 9.0, time=1_760_000_000)
        run_folder.curves(range(31, 51), loss=lambda step: 1.0, time=1_760_001_000)
        table = measure(read_run(run_folder.job, None), GatePolicy(), 50)[1]
        losses = table[(table["tag"] == "lm loss") & ~table["superseded"]].set_index("step")["value"]
        assert [losses[30], losses[31], losses[40]] == [9.0, 1.0, 1.0]
        assert table["superseded"].sum() == 10 * 5
        assert measured().final_loss == 1.0

    def test_the_lives_of_a_restarted_run_are_measured_each_and_noted(
        self, run_folder: RunFolder, measured: Callable[..., Summary]
    ) -> None:
        run_folder.curves(range(1, 41))
        run_folder.curves(range(31, 36), time=1_760_001_000)
        summary = measured()
        assert [(life.first_step, life.last_step) for life in summary.lives] == [(1, 40), (31, 35)]
        assert [life.median_step_time for life in summary.lives] == pytest.approx([0.25215, 0.2533], rel=1e-4)
        assert summary.steps_done == 35
        assert summary.notes == (
            "restarted once: iterations 1 to 40 at 0.2521 s, 31 to 35 at 0.2533 s; 10 were done again or thrown away",
        )

    def test_the_warm_up_of_each_life_is_no_steady_step(
        self, run_folder: RunFolder, measured: Callable[..., Summary]
    ) -> None:
        run_folder.curves(range(1, 41))
        run_folder.curves(range(31, 51), time=1_760_001_000)
        assert measured(50, 5).steady_steps == 50 - 5 - 5
        run_folder.curves(range(1, 5), time=1_760_002_000)
        assert measured(50, 5).steady_steps == 2  # of four iterations there is no more to leave out than two

    def test_lives_are_found_in_the_log_where_there_is_no_event_file(
        self, run_folder: RunFolder, step_line: type[StepLine], measured: Callable[..., Summary]
    ) -> None:
        run_folder.log("\n".join(step_line(step, seconds=0.25).step for step in range(1, 21)))
        run_folder.log("\n".join(step_line(step, seconds=0.5).step for step in range(11, 51)), restart=1)
        lives = measured().lives
        assert [(life.first_step, life.last_step, life.median_step_time) for life in lives] == [
            (1, 20, 0.25),
            (11, 50, 0.5),
        ]

    def test_a_life_whose_events_were_never_flushed_is_found_in_the_log(
        self, run_folder: RunFolder, step_line: type[StepLine], measured: Callable[..., Summary]
    ) -> None:
        run_folder.curves(range(21, 51))
        lines = [step_line(step, seconds=0.25 + step / 10_000) for step in (*range(1, 31), *range(21, 51))]
        run_folder.log("\n".join(line.step for line in lines))
        summary = measured(50, 5)
        assert [(life.first_step, life.last_step) for life in summary.lives] == [(1, 30), (21, 50)]
        assert summary.steady_steps == 50 - 5 - 5
        assert summary.notes[0].startswith("restarted once: iterations 1 to 30")

    def test_step_lines_that_a_launcher_wrote_twice_are_no_restarts(
        self, run_folder: RunFolder, step_line: type[StepLine], measured: Callable[..., Summary]
    ) -> None:
        lines = [step_line(step, seconds=0.25 + step / 1000) for step in range(1, 51)]
        run_folder.log("\n".join(text for line in lines for text in (line.perf, line.perf, line.step, line.step)))
        summary = measured()
        assert [(life.first_step, life.last_step) for life in summary.lives] == [(1, 50)]
        assert (summary.steps_done, summary.steady_steps, summary.notes) == (50, 40, ())

    def test_a_run_that_was_not_restarted_has_one_life_and_no_note(
        self, run_folder: RunFolder, measured: Callable[..., Summary]
    ) -> None:
        run_folder.curves(range(1, 51))
        assert [(life.first_step, life.last_step) for life in measured().lives] == [(1, 50)]

    def test_a_run_with_a_longer_logging_interval_misses_nothing(
        self, run_folder: RunFolder, measured: Callable[..., Summary]
    ) -> None:
        run_folder.curves(range(10, 101, 10))
        summary = measured(100)
        assert (summary.steps_done, summary.non_finite_steps, summary.damage) == (100, 0, ())
        assert (summary.steady_first_step, summary.steady_last_step) == (20, 100)

    @pytest.mark.parametrize("lost", [None, 60])
    def test_times_may_follow_a_longer_interval_than_losses(
        self,
        run_folder: RunFolder,
        event_file: Callable[..., EventFileBuilder],
        measured: Callable[..., Summary],
        lost: int | None,
    ) -> None:
        """Megatron-Bridge writes losses at `tensorboard_log_interval`, and times at `log_interval`."""
        builder = event_file(run_folder.job_dir / "tb_logs")
        for step in range(1, 106):
            builder.scalar("lm loss", step, 2.5).scalar("grad-norm", step, 1.0)
            if step % 10 == 0 and step != lost:
                builder.scalar("iteration-time", step, 1.0 if step == 50 else 0.25)
        builder.write()
        summary = measured(105)
        assert (summary.steps_done, summary.non_finite_steps, summary.steady_steps) == (105, 0, 95)
        damage = ("`iteration-time` is missing or not finite at 1 of 9 steady iterations",) if lost else ()
        assert (summary.step_time, summary.damage) == (None if lost else 0.25, damage)
        assert summary.slow_pattern == "1 of 9 steps take 4.0 times as long"

    @pytest.mark.parametrize("losses", [1, 25], ids=["in each step", "with the times"])
    def test_a_mean_with_the_warm_up_in_it_is_no_steady_step(
        self,
        run_folder: RunFolder,
        event_file: Callable[..., EventFileBuilder],
        measured: Callable[..., Summary],
        losses: int,
    ) -> None:
        builder = event_file(run_folder.job_dir / "tb_logs")
        for step in range(losses, 51, losses):
            builder.scalar("lm loss", step, 2.5).scalar("grad-norm", step, 1.0)
            if step % 25 == 0:  # the first step compiles, and takes a minute
                seconds = 3.4 if step == 25 else 1.0
                builder.scalar("iteration-time", step, seconds).scalar("throughput/tflops/device", step, 700 / seconds)
        builder.write()
        summary = measured(50)
        assert (summary.step_time, summary.tflops_per_gpu, summary.wall_step_time) == (1.0, 700.0, 1.0)
        assert summary.warmup_step_time == pytest.approx(3.4)
        assert summary.damage == ()

    def test_a_mean_with_the_warm_up_in_it_counts_where_there_is_no_other(
        self, run_folder: RunFolder, event_file: Callable[..., EventFileBuilder], measured: Callable[..., Summary]
    ) -> None:
        builder = event_file(run_folder.job_dir / "tb_logs")
        for step in range(1, 75):
            builder.scalar("lm loss", step, 2.5)
            if step % 25 == 0:
                builder.scalar("iteration-time", step, 3.4 if step == 25 else 1.0)
        builder.write()
        assert (measured(74, 37).step_time, measured(74, 37).steady_first_step) == (1.0, 38)

    @pytest.mark.parametrize(
        ("recorded", "end", "done"),
        [
            (range(10, 106, 10), "[after training is done] datetime: now", 105),
            (range(10, 106, 10), "", 100),
            (range(10, 96, 10), "[after training is done] datetime: now", 90),
            (range(10, 106, 10), "[exiting program at iteration 103]\n[after training is done]", 100),
            (range(1, 105), "[after training is done] datetime: now", 104),
        ],
        ids=["done", "killed", "one record lost", "ended earlier", "the last line lost"],
    )
    def test_iterations_after_the_last_whole_interval_are_done_where_training_says_so(
        self,
        run_folder: RunFolder,
        step_line: type[StepLine],
        measured: Callable[..., Summary],
        recorded: range,
        end: str,
        done: int,
    ) -> None:
        lines = [step_line(n, total=105, loss=5.0 - n / 50).step for n in recorded]
        run_folder.log("\n".join(("Starting training loop at iteration 0", *lines, end)))
        summary = measured(105)
        assert (summary.steps_done, summary.non_finite_steps, summary.damage) == (done, 0, ())
        assert summary.final_loss == (3.0 if done == 105 else None)

    def test_a_resumed_run_misses_nothing_before_its_start(
        self, run_folder: RunFolder, measured: Callable[..., Summary]
    ) -> None:
        run_folder.log("Starting training loop at iteration 100\n")
        run_folder.curves(range(101, 151))
        summary = measured(150)
        assert (summary.steps_done, summary.non_finite_steps, summary.steady_first_step) == (150, 0, 111)


class TestSpread:
    def test_it_is_the_median_deviation_in_units_of_a_normal_sigma_and_ignores_a_spike(
        self, run_folder: RunFolder, event_file: Callable[..., EventFileBuilder], measured: Callable[..., Summary]
    ) -> None:
        times = np.array([1.0 + step / 100 for step in range(11, 51)], dtype="float32")
        times[5] = 40.0
        builder = event_file(run_folder.job_dir / "tb_logs")
        for step, seconds in zip(range(11, 51), times, strict=True):
            builder.scalar("iteration-time", step, seconds)
            builder.scalar("throughput/tflops/device", step, 100.0 / seconds)
        builder.write()
        summary = measured(50, 0)
        expected = 1.4826 * np.median(np.abs(times - np.median(times))) / np.median(times)
        assert summary.step_time_spread == pytest.approx(expected, rel=1e-6)
        assert summary.tflops_per_gpu_p05 == pytest.approx(np.quantile(100.0 / times, 0.05), rel=1e-5)
        assert summary.tflops_per_gpu_p95 == pytest.approx(np.quantile(100.0 / times, 0.95), rel=1e-5)
        assert summary.tflops_per_gpu_spread == pytest.approx(expected, rel=0.3)


class TestDistribution:
    @pytest.fixture
    def summary_of(
        self, run_folder: RunFolder, event_file: Callable[..., EventFileBuilder], measured: Callable[..., Summary]
    ) -> Callable[..., Summary]:
        """The summary of a run with these step times, and so many seconds from each event to the next."""

        def write(seconds: list[float], apart: float = 0.0) -> Summary:
            builder = event_file(run_folder.job_dir / "tb_logs")
            clock = builder.start
            for step, value in enumerate(seconds, 1):
                clock += max(apart, value)
                builder.scalar("iteration-time", step, value)
                builder.events[-1].wall_time = clock
            builder.write()
            return measured()

        return write

    def test_the_first_step_the_warm_up_and_the_rest_are_told_apart(self, summary_of: Callable[..., Summary]) -> None:
        summary = summary_of([45.0] + [2.0] * 9 + [1.0] * 40)
        assert (summary.first_step_time, summary.warmup_step_time, summary.wall_step_time) == (45.0, 2.0, 1.0)
        assert (summary.slow_steps, summary.slow_pattern) == (1.0, "")

    def test_some_slow_steps_move_mean_and_percentile_and_no_median(self, summary_of: Callable[..., Summary]) -> None:
        summary = summary_of([2.0 if step % 5 == 0 else 1.0 for step in range(1, 51)])
        assert [summary.step_time, summary.wall_step_time, summary.slow_steps] == [
            1.0,
            pytest.approx(1.2, abs=0.02),
            2.0,
        ]
        assert summary.slow_pattern == "8 of 40 steps take 2.0 times as long, every 5 steps"

    def test_a_slow_stretch_is_named(self, summary_of: Callable[..., Summary]) -> None:
        summary = summary_of([3.0 if 42 <= step <= 46 else 1.0 for step in range(1, 51)])
        assert summary.slow_pattern == "5 of 40 steps take 3.0 times as long, 42 to 46"

    def test_steps_that_are_said_to_take_no_time_are_measured_as_any_other(
        self, summary_of: Callable[..., Summary]
    ) -> None:
        summary = summary_of([1.0 if step > 48 else 0.0 for step in range(1, 51)])
        assert (summary.step_time, summary.slow_steps, summary.slow_pattern) == (0.0, None, "")

    def test_pauses_between_steps_count(self, summary_of: Callable[..., Summary]) -> None:
        summary = summary_of([1.0] * 50, apart=1.5)
        assert (summary.step_time, summary.wall_step_time) == (1.0, 1.5)

    @pytest.mark.parametrize("paused", [2, 6, 10])
    def test_a_pause_in_the_warm_up_counts_there(
        self,
        run_folder: RunFolder,
        event_file: Callable[..., EventFileBuilder],
        measured: Callable[..., Summary],
        paused: int,
    ) -> None:
        builder = event_file(run_folder.job_dir / "tb_logs")
        for step in range(1, 51):
            builder.start += 90 * (step == paused)
            builder.scalar("iteration-time", step, 1.0)
        builder.write()
        summary = measured()
        assert (summary.warmup_step_time, summary.wall_step_time) == (11.0, 1.0)

    @pytest.mark.parametrize("pause", [0, 20])
    def test_the_pause_of_a_restart_is_no_steps(
        self,
        run_folder: RunFolder,
        event_file: Callable[..., EventFileBuilder],
        measured: Callable[..., Summary],
        pause: int,
    ) -> None:
        """The machine took ten minutes to start the run again; `pause` is one of the code's own."""
        for life, steps in enumerate((range(1, 31), range(21, 51))):
            builder = event_file(run_folder.job_dir / "tb_logs", time=1_760_000_000 + 600 * life)
            for step in steps:
                builder.start += pause * (step == 45)
                builder.scalar("iteration-time", step, 1.0).scalar("lm loss", step, 2.0)
            builder.write()
        # Steady are 11 to 20 and, warm again, 31 to 50: nine steps and nineteen.
        assert measured().wall_step_time == pytest.approx((28 + pause) / 28)


class TestTail:
    @staticmethod
    def write(event_file: Callable[..., EventFileBuilder], run_folder: RunFolder, seconds: Any) -> None:
        builder = event_file(run_folder.job_dir / "tb_logs")
        for step, value in enumerate(seconds, 1):
            builder.scalar("iteration-time", step, value)
        builder.write()

    def test_half_speed_in_the_last_steps_alone_shows_there_and_nowhere_else(
        self, run_folder: RunFolder, event_file: Callable[..., EventFileBuilder], measured: Callable[..., Summary]
    ) -> None:
        self.write(event_file, run_folder, [1.0] * 46 + [2.0] * 4)
        summary = measured()
        assert (summary.step_time, summary.tail_slowdown) == (1.0, 2.0)

    def test_one_slow_step_at_the_end_is_no_slow_end(
        self, run_folder: RunFolder, event_file: Callable[..., EventFileBuilder], measured: Callable[..., Summary]
    ) -> None:
        self.write(event_file, run_folder, [1.0] * 48 + [9.0, 1.0])
        assert measured().tail_slowdown == 1.0

    def test_in_a_long_run_it_is_the_last_twentieth(
        self, run_folder: RunFolder, event_file: Callable[..., EventFileBuilder], measured: Callable[..., Summary]
    ) -> None:
        self.write(event_file, run_folder, [1.0] * 206 + [3.0] * 4)
        assert measured(210).tail_slowdown == 1.0

    def test_a_window_of_a_few_steps_has_no_end_of_its_own(
        self, run_folder: RunFolder, event_file: Callable[..., EventFileBuilder], measured: Callable[..., Summary]
    ) -> None:
        self.write(event_file, run_folder, [1.0] * 16)
        assert measured(16).tail_slowdown is None


class TestProfiledSteps:
    def test_they_are_left_out_of_the_statistics_and_counted(
        self, run_folder: RunFolder, event_file: Callable[..., EventFileBuilder], measured: Callable[..., Summary]
    ) -> None:
        builder = event_file(run_folder.job_dir / "tb_logs")
        for step in range(1, 51):
            builder.scalar("iteration-time", step, 9.0 if 20 <= step <= 45 else 0.25)
        builder.write()
        summary = measured(settings=RunSettings(profiled=ProfiledSteps(first=20, last=45)))
        assert (summary.step_time, summary.step_time_p95) == (0.25, 0.25)
        assert (summary.steady_first_step, summary.steady_last_step) == (11, 50)
        assert (summary.steady_steps, summary.profiled_steps) == (14, 26)
        assert measured().step_time == 9.0
        after = measured(settings=RunSettings(profiled=ProfiledSteps(first=20, last=43)), post_profiling_steps=2)
        assert (after.step_time, after.profiled_steps) == (0.25, 26)

    def test_a_record_over_several_iterations_goes_when_one_of_them_was_profiled(
        self, run_folder: RunFolder, measured: Callable[..., Summary]
    ) -> None:
        run_folder.curves(range(10, 101, 10))
        summary = measured(100, settings=RunSettings(profiled=ProfiledSteps(first=35, last=41)))
        assert (summary.steady_steps, summary.profiled_steps) == (7, 2)

    def test_a_run_that_was_profiled_throughout_has_no_statistics(
        self, run_folder: RunFolder, measured: Callable[..., Summary]
    ) -> None:
        run_folder.curves(range(1, 51))
        summary = measured(settings=RunSettings(profiled=ProfiledSteps(first=1, last=50)))
        assert (summary.step_time, summary.tflops_per_gpu, summary.steady_first_step) == (None, None, None)
        assert (summary.steady_steps, summary.profiled_steps) == (0, 40)

    @pytest.mark.parametrize(("done", "warmup"), [(0, 10), (1, 10), (50, 0)])
    def test_a_run_without_a_step_or_without_a_warm_up_is_measured_as_any_other(
        self, run_folder: RunFolder, measured: Callable[..., Summary], done: int, warmup: int
    ) -> None:
        run_folder.curves(range(1, done + 1))
        summary = measured(50, warmup, RunSettings(profiled=ProfiledSteps(first=11, last=12)))
        assert (summary.steps_done, summary.profiled_steps) == (done, 2 if done > 2 else 0)


class TestTokensPerSecond:
    settings = RunSettings(num_gpus=8, global_batch_size=128, sequence_length=4096)

    def test_they_follow_from_batch_sequence_step_time_and_gpus(
        self, run_folder: RunFolder, measured: Callable[..., Summary]
    ) -> None:
        run_folder.curves(range(1, 51))
        summary = measured(settings=self.settings)
        assert summary.step_time is not None
        assert summary.tokens_per_second_per_gpu == pytest.approx(128 * 4096 / summary.step_time / 8)

    def test_what_the_run_recorded_of_batch_and_gpus_counts_more_than_what_was_asked(
        self, run_folder: RunFolder, event_file: Callable[..., EventFileBuilder], measured: Callable[..., Summary]
    ) -> None:
        builder = event_file(run_folder.job_dir / "tb_logs")
        for step in range(1, 51):
            builder.scalar("iteration-time", step, 0.5)
            builder.scalar("batch-size", step, 8.0 if step < 11 else 256.0)
            builder.scalar("world-size", step, 16.0)
        builder.write()
        assert measured(settings=self.settings).tokens_per_second_per_gpu == 256 * 4096 / 0.5 / 16

    def test_without_the_sizes_the_runs_own_tag_is_taken(
        self, run_folder: RunFolder, event_file: Callable[..., EventFileBuilder], measured: Callable[..., Summary]
    ) -> None:
        builder = event_file(run_folder.job_dir / "tb_logs")
        for step in range(1, 51):
            builder.scalar("iteration-time", step, 0.5)
            builder.scalar("throughput/device/tokens_per_sec", step, 1000.0 + step)
        builder.write()
        assert measured().tokens_per_second_per_gpu == 1030.5

    def test_without_either_they_are_not_measured(
        self, run_folder: RunFolder, measured: Callable[..., Summary]
    ) -> None:
        run_folder.curves(range(1, 51))
        assert measured().tokens_per_second_per_gpu is None


class TestLossCurve:
    def test_its_digest_is_over_every_step_and_bit(
        self, run_folder: RunFolder, measured: Callable[..., Summary]
    ) -> None:
        run_folder.curves(range(1, 4), loss=lambda step: step / 3)
        as_written = [struct.unpack("<f", struct.pack("<f", step / 3))[0] for step in range(1, 4)]
        content = b"".join(struct.pack("<qd", step, loss) for step, loss in enumerate(as_written, 1))
        assert measured(3).loss_digest == f"tensorboard:{hashlib.sha256(content).hexdigest()}"

    @pytest.mark.parametrize("step", [1, 25, 50])
    def test_the_last_bit_of_any_step_changes_it(
        self, run_folder: RunFolder, measured: Callable[..., Summary], step: Any
    ) -> None:
        run_folder.curves(range(1, 51), loss=lambda _: 2.5)
        digest = measured().loss_digest
        nudged = float(np.nextafter(np.float32(2.5), np.float32(3)))
        run_folder.curves(range(1, 51), loss=lambda each: nudged if each == step else 2.5)
        assert measured().loss_digest != digest

    def test_a_restart_that_repeats_the_same_steps_leaves_it_as_it_is(
        self, run_folder: RunFolder, measured: Callable[..., Summary]
    ) -> None:
        run_folder.curves(range(1, 51))
        digest = measured().loss_digest
        run_folder.curves(range(31, 51), time=1_760_001_000)
        assert measured().loss_digest == digest

    def test_it_names_its_source(
        self, run_folder: RunFolder, measured: Callable[..., Summary], step_line: type[StepLine]
    ) -> None:
        run_folder.log("\n".join(step_line(step, loss=2.5).step for step in range(1, 51)))
        assert str(measured().loss_digest).startswith("log:")
        run_folder.curves(range(1, 41), loss=lambda _: 2.5)
        assert str(measured().loss_digest).startswith("mixed:")

    def test_without_a_loss_there_is_none(self, measured: Callable[..., Summary]) -> None:
        assert (measured().loss_digest, measured().loss_anchors) == (None, ())

    def test_its_anchors_span_the_run(self, run_folder: RunFolder, measured: Callable[..., Summary]) -> None:
        run_folder.curves(range(1, 51), loss=lambda step: math.nan if step == 50 else float(step))
        assert measured().loss_anchors == ((1, 1.0), (13, 13.0), (25, 25.0), (37, 37.0), (49, 49.0))


class TestGradNormAndCounts:
    def test_the_extremes_are_over_every_finite_step(
        self, run_folder: RunFolder, event_file: Callable[..., EventFileBuilder], measured: Callable[..., Summary]
    ) -> None:
        builder = event_file(run_folder.job_dir / "tb_logs")
        for step, norm in enumerate((7.0, 1.0, math.inf, 0.5, 2.0), 1):
            builder.scalar("grad-norm", step, norm)
        builder.write()
        summary = measured(5)
        assert (summary.grad_norm_min, summary.grad_norm_max) == (0.5, 7.0)

    def test_nan_and_skipped_iterations_are_summed_once_each(
        self, run_folder: RunFolder, measured: Callable[..., Summary], step_line: type[StepLine]
    ) -> None:
        lines = [step_line(step, skipped=step == 3, nan=step in (4, 5)).step for step in range(1, 7)]
        run_folder.log("\n".join([*lines, lines[4]]))
        summary = measured(6)
        assert (summary.skipped_iterations, summary.nan_iterations) == (1, 2)

    def test_without_a_log_nobody_counted(self, run_folder: RunFolder, measured: Callable[..., Summary]) -> None:
        run_folder.curves(range(1, 51))
        assert (measured().skipped_iterations, measured().nan_iterations) == (None, None)


class TestDurations:
    written = datetime.fromtimestamp(1_760_000_000, UTC)
    """When `run_folder.curves` begins; its first iteration is over a second later and took five."""

    def _job(self, run_folder: RunFolder, started: datetime | None, ended: datetime | None = None) -> Job:
        submitted = self.written - timedelta(hours=1)
        status = JobStatus(
            job_id=4711, state=JobState.COMPLETED, submitted_at=submitted, started_at=started, ended_at=ended
        )
        return run_folder.job.model_copy(update={"status": status})

    def test_the_queue_is_left_when_the_job_starts(
        self, run_folder: RunFolder, measured: Callable[..., Summary]
    ) -> None:
        job = self._job(run_folder, self.written - timedelta(minutes=10))
        assert measured(job=job).queue_time == 3000.0

    def test_start_up_ends_where_the_first_iteration_begins(
        self, run_folder: RunFolder, measured: Callable[..., Summary]
    ) -> None:
        run_folder.curves(range(1, 51))
        job = self._job(run_folder, self.written - timedelta(seconds=60))
        assert measured(job=job).startup_time == pytest.approx(60 + 1 - 5)

    def test_a_first_record_over_several_iterations_is_taken_off_whole(
        self, run_folder: RunFolder, measured: Callable[..., Summary]
    ) -> None:
        run_folder.curves(range(10, 101, 10))
        job = self._job(run_folder, self.written - timedelta(seconds=60))
        assert measured(100, job=job).startup_time == pytest.approx(60 + 10 - 10 * 0.251, rel=1e-6)

    def test_a_restart_does_not_start_the_job_anew(
        self, run_folder: RunFolder, measured: Callable[..., Summary]
    ) -> None:
        run_folder.curves(range(1, 41))
        run_folder.curves(range(1, 51), time=1_760_001_000)
        job = self._job(run_folder, self.written - timedelta(seconds=60))
        assert measured(job=job).startup_time == pytest.approx(56)

    @pytest.mark.parametrize("late", [2, 3600])
    def test_curves_that_are_older_than_the_job_say_by_how_much_which_is_no_measurement(
        self, run_folder: RunFolder, measured: Callable[..., Summary], late: int
    ) -> None:
        run_folder.curves(range(1, 51))
        summary = measured(job=self._job(run_folder, self.written + timedelta(seconds=late)))
        assert summary.startup_time == pytest.approx(-4 - late)
        assert measured_value(METRIC_BY_NAME["startup_time"], summary) is None

    @pytest.mark.parametrize(
        ("later", "seconds"),
        [(3600, 3600), (181, 181), (12, 180), (0, 180), (-1, 180), (-5, 180), (-6, -6), (-3600, -3600)],
    )
    def test_from_the_last_iteration_to_the_jobs_end_three_minutes_at_least_unless_clocks_are_apart(
        self, run_folder: RunFolder, measured: Callable[..., Summary], later: int, seconds: float
    ) -> None:
        run_folder.curves(range(1, 51))
        ended = self.written + timedelta(seconds=50 + later)
        summary = measured(job=self._job(run_folder, self.written - timedelta(seconds=60), ended))
        assert summary.teardown_time == pytest.approx(seconds)
        assert (measured_value(METRIC_BY_NAME["teardown_time"], summary) is None) is (seconds < 0)

    def test_the_end_counts_from_the_last_life_of_a_restarted_run(
        self, run_folder: RunFolder, measured: Callable[..., Summary]
    ) -> None:
        run_folder.curves(range(1, 41))
        run_folder.curves(range(31, 51), time=1_760_001_000)
        ended = self.written + timedelta(seconds=1000 + 50 + 200)
        job = self._job(run_folder, self.written - timedelta(seconds=60), ended)
        assert measured(job=job).teardown_time == pytest.approx(200)

    @pytest.mark.parametrize(("started", "ended"), [(-60, None), (None, 600), (300, 600)])
    def test_without_its_end_or_of_a_job_that_began_after_all_iterations_nothing_is_measured(
        self, run_folder: RunFolder, measured: Callable[..., Summary], started: int | None, ended: int | None
    ) -> None:
        run_folder.curves(range(1, 51))
        times = (None if at is None else self.written + timedelta(seconds=at) for at in (started, ended))
        assert measured(job=self._job(run_folder, *times)).teardown_time is None

    def test_a_control_arm_saves_nothing_at_its_end_so_that_its_time_is_none_of_its_nights(
        self, run_folder: RunFolder
    ) -> None:
        run_folder.curves(range(1, 51))
        job = self._job(run_folder, self.written - timedelta(seconds=60), self.written + timedelta(seconds=600))
        plan = make_plan(job.run_key, job.attempt_dir)
        night = make_spec()
        arm = night.model_copy(update={"repeat": 1, "arm": Arm(role="new", pair=1, reference="good")})
        of_night, of_arm = (
            measure_run(RunToMeasure(jobs=(job,), plan=plan, spec=spec))[0].summary for spec in (night, arm)
        )
        assert of_night.teardown_time == 550
        assert of_arm == of_night.model_copy(update={"teardown_time": None})

    def test_a_job_that_never_started_has_neither(
        self, run_folder: RunFolder, measured: Callable[..., Summary]
    ) -> None:
        run_folder.curves(range(1, 51))
        summary = measured(job=self._job(run_folder, None))
        assert (summary.queue_time, summary.startup_time) == (None, None)

    def test_saving_is_timed_by_the_slowest_rank(self, run_folder: RunFolder, measured: Callable[..., Summary]) -> None:
        # As printed by Megatron-LM's timers, also where another rank's text stands before it.
        run_folder.log(
            "(min, max) time across ranks (ms):\n"
            "    save-checkpoint ................................: (24895.07, 24895.13)\n"
            "x ] (min, max) time across ranks (ms):     save-checkpoint ................................: (9.00, 1000.00)\n"
            "max time across ranks (ms):\n"
            "    save-checkpoint-non-persistent .................: 3000.50\n"
        )
        assert measured().checkpoint_time == 3.0005

    def test_a_run_without_a_checkpoint_has_no_time_for_it(
        self, run_folder: RunFolder, measured: Callable[..., Summary]
    ) -> None:
        run_folder.curves(range(1, 51))
        assert measured().checkpoint_time is None


class TestFailsClosed:
    def test_a_run_that_left_nothing_measures_nothing(self, measured: Callable[..., Summary]) -> None:
        summary = measured()
        assert summary == Summary(steps_expected=50)

    def test_a_short_run_has_no_final_loss(self, run_folder: RunFolder, measured: Callable[..., Summary]) -> None:
        run_folder.curves(range(1, 41))
        summary = measured(50)
        assert (summary.steps_done, summary.final_loss) == (40, None)

    def test_without_an_expectation_the_last_step_is_the_final_one(
        self, run_folder: RunFolder, measured: Callable[..., Summary]
    ) -> None:
        run_folder.curves(range(1, 5), loss=lambda step: float(step))
        assert measured(None).final_loss == 4.0

    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    def test_losses_that_are_not_finite_are_counted_and_never_final(
        self, run_folder: RunFolder, measured: Callable[..., Summary], bad: Any
    ) -> None:
        run_folder.curves(range(1, 51), loss=lambda step: bad if step in (20, 50) else 2.0)
        summary = measured()
        assert (summary.non_finite_steps, summary.final_loss) == (2, None)

    def test_a_missing_loss_counts_as_not_finite(
        self, run_folder: RunFolder, event_file: Callable[..., EventFileBuilder], measured: Callable[..., Summary]
    ) -> None:
        builder = event_file(run_folder.job_dir / "tb_logs")
        for step in range(1, 51):
            builder.scalar("iteration-time", step, 0.25)
            if step != 7:
                builder.scalar("lm loss", step, 2.0)
        builder.write()
        assert measured().non_finite_steps == 1

    def test_a_gradient_norm_that_is_not_finite_is_counted_and_none_at_all_is_not(
        self, run_folder: RunFolder, event_file: Callable[..., EventFileBuilder], measured: Callable[..., Summary]
    ) -> None:
        builder = event_file(run_folder.job_dir / "tb_logs")
        for step in range(1, 51):
            builder.scalar("lm loss", step, 2.0)
        builder.write()
        assert measured().non_finite_steps == 0
        builder.scalar("grad-norm", 1, math.inf)
        for step in range(2, 51):
            builder.scalar("grad-norm", step, 1.0)
        builder.write()
        assert measured().non_finite_steps == 1

    @pytest.mark.parametrize("by_events", [True, False])
    @pytest.mark.parametrize(("counted", "non_finite"), [(2, 0), (1, 1), (0, 2)])
    def test_steps_that_the_log_counts_as_skipped_have_no_norm_and_are_not_missing_any(
        self,
        run_folder: RunFolder,
        event_file: Callable[..., EventFileBuilder],
        measured: Callable[..., Summary],
        step_line: type[StepLine],
        by_events: bool,
        counted: int,
        non_finite: int,
    ) -> None:
        """The loss scaling of fp16 skips the first two; the optimizer then returns no gradient norm."""
        first = [step_line(n, loss=0.0, grad_norm=None, skipped=int(n <= counted)).step for n in (1, 2)]
        run_folder.log("\n".join((*first, *(step_line(n).step for n in range(3, 51)))))
        builder = event_file(run_folder.job_dir / "tb_logs")
        for step in range(1, 51) if by_events else ():
            builder.scalar("lm loss", step, 2.5).scalar("iteration-time", step, 0.25)
            if step > 2:
                builder.scalar("grad-norm", step, 1.25)
        builder.write()
        summary = measured()
        assert (summary.non_finite_steps, summary.skipped_iterations) == (non_finite, counted)

    def test_steps_that_were_not_recorded_count_as_not_finite(
        self, run_folder: RunFolder, measured: Callable[..., Summary]
    ) -> None:
        run_folder.curves(range(21, 51))
        summary = measured()
        assert summary.non_finite_steps == 20
        assert "20 iterations up to 50 were not recorded" in summary.damage

    def test_a_statistic_over_a_window_with_a_hole_is_not_measured(
        self, run_folder: RunFolder, event_file: Callable[..., EventFileBuilder], measured: Callable[..., Summary]
    ) -> None:
        builder = event_file(run_folder.job_dir / "tb_logs")
        for step in range(1, 51):
            builder.scalar("lm loss", step, 2.0)
            builder.scalar("throughput/tflops/device", step, 700.0)
            if step != 30:
                builder.scalar("iteration-time", step, 0.25)
        builder.write()
        summary = measured()
        assert (summary.step_time, summary.step_time_p95, summary.tflops_per_gpu) == (None, None, 700.0)
        assert "`iteration-time` is missing or not finite at 1 of 40 steady iterations" in summary.damage

    def test_a_damaged_event_file_is_named_and_does_not_pass_for_a_whole_run(
        self, run_folder: RunFolder, measured: Callable[..., Summary]
    ) -> None:
        path = run_folder.curves(range(1, 51))
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
        summary = measured()
        assert summary.steps_done < 50
        assert summary.final_loss is None
        assert any("corrupt at byte" in line for line in summary.damage)

    def test_a_hostile_step_number_costs_no_memory(
        self, run_folder: RunFolder, event_file: Callable[..., EventFileBuilder], measured: Callable[..., Summary]
    ) -> None:
        event_file(run_folder.job_dir / "tb_logs").scalar("lm loss", 2**62, 1.0).write()
        assert measured().non_finite_steps > 2**61

    def test_an_iteration_beyond_the_logs_own_total_is_garbage(
        self, run_folder: RunFolder, measured: Callable[..., Summary], step_line: type[StepLine]
    ) -> None:
        run_folder.log(f"{step_line(1).step}\n{step_line(99, total=50).step}\n{step_line(0).step}\n")
        summary = measured()
        assert (summary.steps_done, summary.non_finite_steps) == (1, 0)


class TestFromTheLog:
    def test_without_event_files_the_log_is_measured(
        self, run_folder: RunFolder, measured: Callable[..., Summary], step_line: type[StepLine]
    ) -> None:
        lines = [step_line(n, seconds=0.25 + n / 1000, tflops=700.0 + n, loss=5.0 - n / 20) for n in range(1, 51)]
        memory = (
            "[Rank 0] (after 2 iterations) memory (GB) | mem-max-allocated-gigabytes: 41.5 | mem-alloc-retires: 0\n"
        )
        run_folder.log("\n".join(f"{line.perf}\n{line.step}" for line in lines) + "\n" + memory)
        summary = measured()
        assert summary.source == "log"
        assert summary.step_time == pytest.approx(0.2805)
        assert summary.tflops_per_gpu == pytest.approx(730.5)
        assert (summary.peak_memory, summary.final_loss) == (41.5, 2.5)
        assert (summary.non_finite_steps, summary.damage, summary.notes) == (0, (), ())

    def test_the_logs_values_are_in_the_table_under_tensorboards_tags(
        self, run_folder: RunFolder, step_line: type[StepLine]
    ) -> None:
        run_folder.log(step_line(1, seconds=0.25, loss=2.5, throughput=True).step)
        _, table = measure(read_run(run_folder.job, None), GatePolicy(), 50)
        assert tuple(table.columns) == COLUMNS
        assert dict(zip(table["tag"], table["value"], strict=True)) == {
            "iteration-time": 0.25,
            "throughput/tflops/device": 700.0,
            "lm loss": 2.5,
            "grad-norm": 1.25,
        }
        assert set(table["file"]) == {"log"}
        assert metrics_parquet(table)

    def test_a_tail_that_was_never_flushed_is_filled_from_the_log_and_noted(
        self, run_folder: RunFolder, measured: Callable[..., Summary], step_line: type[StepLine]
    ) -> None:
        run_folder.curves(range(1, 41), loss=lambda step: 2.5)
        lines = [
            step_line(
                n,
                seconds=5.0 if n == 1 else 0.25 + n / 10_000,
                tflops=700.0 - n,
                loss=2.5,
                grad_norm=1.0,
                throughput=True,
            )
            for n in range(1, 51)
        ]
        run_folder.log("\n".join(line.step for line in lines))
        summary = measured()
        assert (summary.source, summary.steps_done, summary.final_loss) == ("tensorboard", 50, 2.5)
        assert summary.step_time == pytest.approx(0.25 + 30.5 / 10_000, rel=1e-3)
        assert summary.damage == ()
        assert any("lacks `lm loss` at 10 of 50" in note and "41" in note for note in summary.notes)

    def test_the_log_never_replaces_a_nan_of_tensorboard(
        self, run_folder: RunFolder, measured: Callable[..., Summary], step_line: type[StepLine]
    ) -> None:
        run_folder.curves(range(1, 51), loss=lambda step: math.nan if step == 50 else 2.5)
        run_folder.log(step_line(50, seconds=0.255, tflops=650.0, loss=2.5, grad_norm=1.0).step)
        assert measured().final_loss is None

    def test_two_sources_that_disagree_are_damage(
        self, run_folder: RunFolder, measured: Callable[..., Summary], step_line: type[StepLine]
    ) -> None:
        run_folder.curves(range(1, 51))
        run_folder.log(step_line(30, seconds=0.5, loss=3.0 / math.sqrt(30), grad_norm=1.0).step)
        (line,) = measured().damage
        assert "disagree on `iteration-time` at 1 of 1 iterations, first at 30" in line

    def test_a_line_of_rank_0_torn_by_another_nodes_text_is_no_damage(
        self, run_folder: RunFolder, measured: Callable[..., Summary], step_line: type[StepLine]
    ) -> None:
        # Seen with srun on two nodes: a block of one node's text ends in the middle of a line.
        run_folder.curves(range(1, 51))
        lines = [
            step_line(n, seconds=5.0 if n == 1 else 0.25 + n / 10_000, tflops=700.0 - n, loss=3.0 / math.sqrt(n))
            for n in range(1, 51)
        ]
        steps = [replace(line, grad_norm=1.0).step for line in lines]
        text = "\n".join(f"{line.perf}\n{step}" for line, step in zip(lines, steps, strict=True))
        perf = lines[4].perf
        run_folder.log(text.replace(f"{perf}\n{steps[4]}\n", f"{perf[:13]}{steps[4]}\n{perf[13:]}\n"))
        summary = measured()
        assert summary.damage == ()
        assert summary.tflops_per_gpu == pytest.approx(669.5)


@pytest.mark.parametrize(
    ("iterations", "interval"),
    [([], 1), ([7], 1), ([1, 2, 3, 5], 1), ([1, 10, 20, 30], 10), ([10, 20, 40, 50], 10), ([5, 6, 16], 1)],
)
def test_the_logging_interval_is_the_commonest_distance(iterations: list[int], interval: int) -> None:
    assert logging_interval(iterations) == interval
