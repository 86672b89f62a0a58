"""The practice job: what it computes, prints, writes, and how it goes wrong."""

import json
import math
import os
import pickletools
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from nightbridge.models import CheckpointState
from nightbridge.outputs.checkpoints import find_checkpoints, tracked_iteration
from nightbridge.outputs.logs import read_logs

from .conftest import STEPS, JobRun, RunJob

pytestmark = pytest.mark.thorough

STEADY = slice(5, None)


def seconds(run: JobRun) -> list[float]:
    return [step.elapsed_ms / 1000 for step in read_logs([run.log]).steps if step.elapsed_ms]


def median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def scalars(run: JobRun) -> dict[str, dict[int, float]]:
    accumulator = EventAccumulator(str(run.output / "tb_logs"), size_guidance={"scalars": 0})
    accumulator.Reload()
    return {
        tag: {event.step: event.value for event in accumulator.Scalars(tag)} for tag in accumulator.Tags()["scalars"]
    }


# --- a good run ------------------------------------------------------------------------------------------------------


def test_a_run_prints_the_lines_that_megatron_bridge_prints(usual: JobRun) -> None:
    first, last = usual.said
    assert usual.codes == (0, 0)
    assert len(re.findall(r"^Step Time : \d+\.\d\ds GPU utilization: \d+\.\dMODEL_TFLOP/s/GPU$", first, re.M)) == STEPS
    assert len(re.findall(
        r"^ \[[-\d]{10} [:\d]{8}\] iteration +\d+/ +12 \| consumed samples: +\d+ \| "
        r"elapsed time per iteration \(ms\): \d+\.\d \| learning rate: \d\.\d{6}E-\d\d \| global batch size: +\d+ \| "
        r"lm loss: \d\.\d{6}E[+-]\d\d \| loss scale: 1\.0 \| grad norm: \d\.\d{3} \| "
        r"number of skipped iterations:   0 \| number of nan iterations:   0 \|$", last, re.M)) == STEPS  # fmt: skip
    assert re.findall(r"^\[Rank 0\] \(after (\d) iterations\) memory \(GB\) \| mem-allocated-gig", first, re.M) == [
        "1",
        "2",
    ]
    assert "Starting training loop at iteration 0" in first
    assert "> setting tensorboard ..." in last
    assert f"saving checkpoint at iteration {10:7d} to {usual.output}/checkpoints in torch_dist format" in first
    assert (
        f"  successfully saved checkpoint from iteration {10:7d} to {usual.output}/checkpoints [ t 1/1, p 1/1 ]"
        in first
    )
    assert "[after training is done] datetime: " in first


def test_ranks_between_the_ends_are_silent(run_job: RunJob) -> None:
    run = run_job(ranks=4)

    assert [bool(text) for text in run.said] == [True, False, False, True]
    assert run.codes == (0, 0, 0, 0)


def test_the_loss_is_computed_and_falls(run_job: RunJob) -> None:
    losses = [step.lm_loss for step in read_logs([run_job("-ms", "30").log]).steps]

    assert losses[0] == pytest.approx(math.log(64), rel=0.05)  # knows nothing yet of 64 tokens
    assert losses[-1] is not None
    assert losses[-1] < 2.9


def test_a_job_repeats_exactly_and_another_job_differs_by_noise(run_job: RunJob) -> None:
    first, again, another = (run_job(name=name) for name in ("night-1", "night-1", "night-2"))

    assert scalars(first) == scalars(again)
    assert seconds(first) != seconds(another)
    assert median(seconds(another)[STEADY]) == pytest.approx(median(seconds(first)[STEADY]), rel=0.03)
    assert scalars(another)["lm loss"][STEPS] == pytest.approx(scalars(first)["lm loss"][STEPS], rel=0.05)


def test_the_first_iterations_are_slow(usual: JobRun) -> None:
    times = seconds(usual)

    assert times[0] > 20 * median(times[STEADY])


# --- event files -----------------------------------------------------------------------------------------------------


def test_event_files_hold_the_tags_that_their_flags_switch_on(usual: JobRun) -> None:
    written = scalars(usual)
    assert {"lm loss", "learning-rate", "batch-size", "grad-norm", "loss-scale", "iteration-time",
            "throughput/tflops/device", "throughput/tflops", "lm loss vs samples",
            "memory/mem-max-allocated-gigabytes", "memory/mem-alloc-retires"} <= set(written)  # fmt: skip
    assert list(written["lm loss"]) == list(range(1, STEPS + 1))
    assert list(written["lm loss vs samples"]) == [32 * step for step in range(1, STEPS + 1)]
    # The window of rates is 100 iterations long by default, which a short run never fills.
    assert not [tag for tag in written if tag.endswith("_per_sec")]
    assert written["iteration-time"][STEPS] == pytest.approx(seconds(usual)[-1], abs=1e-3)


def test_event_files_are_not_written_without_a_folder(run_job: RunJob) -> None:
    run = run_job("logger.tensorboard_dir=null")

    assert run.codes == (0, 0)
    assert not (run.output / "tb_logs").exists()


def test_flags_switch_tags_off_and_a_full_window_gives_rates(run_job: RunJob) -> None:
    written = scalars(run_job(
        "logger.log_timers_to_tensorboard=false", "logger.log_memory_to_tensorboard=false", "logger.throughput_window_size=4",
    ))  # fmt: skip

    assert "iteration-time" not in written
    assert not [tag for tag in written if tag.startswith("memory/")]
    assert list(written["throughput/tokens_per_sec"]) == list(range(4, STEPS + 1))
    assert written["throughput/device/samples_per_sec"][9] == pytest.approx(
        written["throughput/samples_per_sec"][9] / 2
    )


# --- checkpoints -----------------------------------------------------------------------------------------------------


def test_checkpoints_are_complete_on_the_interval_and_at_the_end(usual: JobRun) -> None:
    folder = usual.output / "checkpoints"

    found = find_checkpoints(folder)
    assert [(checkpoint.iteration, checkpoint.state) for checkpoint in found] == [
        (iteration, CheckpointState.COMPLETE) for iteration in (5, 10, STEPS)
    ]
    assert tracked_iteration(folder) == STEPS
    assert sorted(path.name for path in (folder / "iter_0000010").iterdir()) == [
        ".metadata", "__0_0.distcp", "__1_0.distcp", "metadata.json", "run_config.yaml", "train_state.pt",
    ]  # fmt: skip


def test_the_older_layout_has_a_common_file(run_job: RunJob) -> None:
    target = run_job(checkpoint_layout="0.18").output / "checkpoints" / "iter_0000010"

    assert (target / "common.pt").is_file()
    assert b"common_state" not in (target / ".metadata").read_bytes()


def test_a_checkpoints_index_names_what_torch_names(usual: JobRun) -> None:
    """The classes that torch 2.13 was seen to write; real torch loads these files."""
    content = (usual.output / "checkpoints/iter_0000010/.metadata").read_bytes()

    strings: list[str] = []
    names = set()
    for opcode, argument, _ in pickletools.genops(content):
        if opcode.name == "STACK_GLOBAL":
            names.add(strings[-1])
        if isinstance(argument, str):
            strings.append(argument)
    assert names == {
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties",
        "MetadataIndex", "StorageMeta", "_StorageInfo", "_MEM_FORMAT_ENCODING", "_get_layout", "float32", "Size", "PosixPath",
    }  # fmt: skip


def test_only_the_most_recent_checkpoints_are_kept(run_job: RunJob) -> None:
    folder = run_job("-ms", "20", "--most_recent_k", "2", ranks=3).output / "checkpoints"

    assert [checkpoint.iteration for checkpoint in find_checkpoints(folder)] == [15, 20]


def test_an_interval_without_a_folder_saves_in_the_jobs_folder(checkout: Path, tmp_path: Path) -> None:
    code = tmp_path / "job" / "code"
    code.mkdir(parents=True)

    subprocess.run(
        [sys.executable, "-B", str(checkout / "scripts/performance/bootstrap.py"), "-m", "llama", "-mr", "llama_small",
         "-g", "h100", "-ng", "1", "-ms", "3", "--save_interval", "3"],
        cwd=code, check=True, capture_output=True,
        env={name: value for name, value in os.environ.items() if not name.startswith("SLURM_")},
    )  # fmt: skip

    assert [checkpoint.iteration for checkpoint in find_checkpoints(tmp_path / "job" / "checkpoints")] == [3]


# --- configuration ---------------------------------------------------------------------------------------------------


def test_the_configuration_is_written_with_overrides_and_flags_applied(run_job: RunJob) -> None:
    run = run_job("-gb", "64", "+model.new_knob=[1, two]", "train.global_batch_size=16")

    config = yaml.safe_load((run.output / "configs/ConfigContainer.yaml").read_text())
    assert config["train"]["global_batch_size"] == 64  # a flag has the last word
    assert config["train"]["train_iters"] == STEPS
    assert config["model"]["new_knob"] == [1, "two"]
    assert config["logger"]["log_timers_to_tensorboard"] is True
    assert config["checkpoint"]["save"] == str(run.output / "checkpoints")
    assert yaml.safe_load((run.output / "checkpoints/iter_0000010/run_config.yaml").read_text()) == config


def test_the_commit_that_ran_is_written_down(usual: JobRun) -> None:
    head = subprocess.run(
        ["git", "-C", str(usual.output.parent / "Megatron-Bridge"), "rev-parse", "HEAD"], capture_output=True, text=True
    )
    (status,) = json.loads((usual.output / "configs/repo_status.json").read_text())
    assert status["name"] == "Megatron-Bridge"
    assert status["sha"] == head.stdout.strip()


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("-mr", "no_such_model"), "no recipe no_such_model for pretrain on h100 in bf16"),
        (("logger.tensorbord_dir=/x",), "could not override 'logger.tensorbord_dir'"),
        (("-tp", "4"), "2 GPUs do not divide into copies of 4"),
        (("-gb", "33"), "global batch size 33 is not a multiple of 4"),
    ],
)
def test_a_configuration_that_cannot_be_fails_on_the_nodes(run_job: RunJob, flags: tuple[str, ...], told: str) -> None:
    run = run_job(*flags)

    assert run.codes == (1, 1)
    assert told in run.said[0]


def test_a_job_leaves_its_checkout_as_it_was(usual: JobRun) -> None:
    status = ["git", "-C", str(usual.output.parent / "Megatron-Bridge"), "status", "--porcelain", "--ignored"]
    assert subprocess.run(status, capture_output=True, text=True).stdout == ""


# --- behaviour that a commit sets ------------------------------------------------------------------------------------


def test_a_slower_commit_reports_longer_steps_and_nothing_else(run_job: RunJob, usual: JobRun) -> None:
    as_usual = scalars(usual)
    slower = scalars(run_job(step_time_factor=1.25))

    assert slower["iteration-time"][9] == pytest.approx(1.25 * as_usual["iteration-time"][9])
    assert slower["throughput/tflops/device"][9] == pytest.approx(as_usual["throughput/tflops/device"][9] / 1.25)
    assert slower["lm loss"] == as_usual["lm loss"]
    assert slower["memory/mem-allocated-gigabytes"] == as_usual["memory/mem-allocated-gigabytes"]


def test_a_larger_commit_reports_more_memory(run_job: RunJob, usual: JobRun) -> None:
    runs = (usual, run_job(memory_factor=1.2))

    peaks = [max(read_logs([run.log]).values["peak_memory"]) for run in runs]
    assert peaks[0]
    assert peaks[1] == pytest.approx(1.2 * peaks[0], rel=1e-3)


def test_a_worse_commit_reports_a_higher_loss(run_job: RunJob, usual: JobRun) -> None:
    as_usual = scalars(usual)["lm loss"]
    offset = scalars(run_job(loss_offset=0.5))["lm loss"]
    untrained = scalars(run_job(loss_offset=0.0, lr_factor=0.0))["lm loss"]

    assert offset[STEPS] == pytest.approx(as_usual[STEPS] + 0.5, rel=1e-5)
    assert untrained[STEPS] == pytest.approx(math.log(64), rel=0.05)


def test_nan_goes_on_like_a_benchmark_does(run_job: RunJob) -> None:
    run = run_job(nan_at=8)

    reading = read_logs([run.log])
    assert run.codes == (0, 0)
    assert reading.last_iteration == STEPS
    assert [step.iteration for step in reading.steps if step.lm_loss is None] == [8, 9, 10, 11, 12]
    assert math.isnan(scalars(run)["lm loss"][8])


def test_a_crash_ends_all_ranks_before_its_iteration(run_job: RunJob) -> None:
    run = run_job(ranks=3, crash_at=8)

    assert run.codes == (1, 1, 1)
    assert read_logs([run.log]).last_iteration == 7
    assert all("planned crash" in text for text in run.said)
    assert [checkpoint.iteration for checkpoint in find_checkpoints(run.output / "checkpoints")] == [5]


def test_a_hanging_job_stays(run_job: RunJob) -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        run_job(hang_at=3, timeout=3)


def test_a_job_can_end_early_and_say_that_all_is_well(run_job: RunJob) -> None:
    run = run_job(stop_at=7)

    reading = read_logs([run.log])
    assert run.codes == (0, 0)
    assert (reading.last_iteration, reading.exit_iteration, reading.training_done) == (7, 7, False)


def test_a_job_can_fail_after_everything_is_done(run_job: RunJob) -> None:
    run = run_job(crash_in_teardown=True)

    assert run.codes == (1, 1)
    assert read_logs([run.log]).training_done
    assert find_checkpoints(run.output / "checkpoints")[-1].state is CheckpointState.COMPLETE
    assert list(scalars(run)["lm loss"]) == list(range(1, STEPS + 1))


def test_a_job_can_die_in_the_middle_of_a_save(run_job: RunJob) -> None:
    run = run_job(partial_checkpoint=10)

    states = {found.iteration: found.state for found in find_checkpoints(run.output / "checkpoints")}
    cut = run.output / "checkpoints" / "iter_0000010"
    assert run.codes == (1, 1)
    assert states == {5: CheckpointState.COMPLETE, 10: CheckpointState.IN_PROGRESS}
    assert sorted(path.name for path in cut.iterdir()) == ["__0_0.distcp", "__1_0.distcp"]


def test_a_broken_network_leaves_a_marker(run_job: RunJob) -> None:
    run = run_job(print_flaky=4)

    reading = read_logs([run.log])
    assert run.codes == (1, 1)
    assert reading.flaky_marker is not None
    assert reading.last_iteration == 3


def test_a_job_can_take_real_time(run_job: RunJob) -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        run_job(slow_wall=1.0, timeout=3)
