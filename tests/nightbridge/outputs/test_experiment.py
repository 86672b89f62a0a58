import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nightbridge.models import CheckpointState, Job, JobState, JobStatus, Outcome
from nightbridge.outputs.experiment import evidence, read_facts, read_run
from nightbridge.slurm.outcome import classify_job
from tests.nightbridge.outputs.builders import EventFileBuilder, RunFolder, StepLine


class TestReadRun:
    def test_a_job_that_left_nothing_has_only_empty_fields(self, run_folder: RunFolder) -> None:
        run_folder.job_dir.rmdir()
        output = read_run(run_folder.job, None)
        assert output.logs + output.sbatch_logs + output.event_files == ()
        assert (output.checkpoints, output.not_stored) == ((), ())
        assert (output.config_container, output.repo_status, output.launcher_log) == (None, None, None)

    def test_everything_that_a_run_in_a_container_leaves_is_found(
        self, run_folder: RunFolder, write_checkpoint: Callable[..., Path]
    ) -> None:
        log = run_folder.log("text")
        batch = run_folder.write(f"sbatch_acct-acct.{run_folder.job.name}_4711.out", "text")
        events = run_folder.curves(range(1, 3))
        config = run_folder.write("configs/ConfigContainer.yaml", "a: 1")
        status = run_folder.write("configs/repo_status.json", "[]")
        profile = run_folder.write("nsys_profile/profile_0.nsys-rep", "x")
        write_checkpoint(run_folder.job_dir / "checkpoints", iteration=10)
        for name in ("launcher.log", "job.sh", "submission.json", "exit_code"):
            (run_folder.attempt_dir / name).write_text("x")

        output = read_run(run_folder.job, None)

        assert (output.logs, output.sbatch_logs, output.event_files) == ((log,), (batch,), (events,))
        assert (output.config_container, output.repo_status, output.profiles) == (config, status, (profile,))
        assert [(found.iteration, found.state) for found in output.checkpoints] == [(10, CheckpointState.COMPLETE)]
        assert output.launcher_log == run_folder.attempt_dir / "launcher.log"
        assert [path.name for path in output.attempt_files] == [
            "job.sh",
            "submission.json",
            "exit_code",
            "launcher.log",
        ]

    @pytest.mark.parametrize(
        "name",
        [
            "nsys_profile/profile_0.nsys-rep",
            "torch_profile/rank-0.json.gz",
            "chakra/rank-0.json.gz",
            "tb_logs/node1_4242.1760000000000000000.pt.trace.json",  # v0.3
            "pytorch_profile/snapshot_0.pickle",
            "snapshot_0.pickle",
            "snapshot_oom_rank-7.pickle",
        ],
    )
    def test_what_a_profiler_of_any_release_writes_is_a_profile(self, run_folder: RunFolder, name: str) -> None:
        profile = run_folder.write(name, "x")
        output = read_run(run_folder.job, None)
        assert (output.profiles, output.not_stored) == ((profile,), ())

    def test_a_run_without_a_container_is_found_in_its_output_folder(
        self, run_folder: RunFolder, event_file: Callable[..., EventFileBuilder], write_checkpoint: Callable[..., Path]
    ) -> None:
        output_dir = run_folder.attempt_dir / "output"
        events = event_file(output_dir / "tb_logs").scalar("lm loss", 1, 1.0).write()
        write_checkpoint(output_dir / "checkpoints")
        (output_dir / "configs").mkdir()
        (output_dir / "configs" / "ConfigContainer.yaml").write_text("a: 1")
        output = read_run(run_folder.job, output_dir)
        assert output.event_files == (events,)
        assert len(output.checkpoints) == 1
        assert output.config_container == output_dir / "configs" / "ConfigContainer.yaml"

    def test_folders_that_an_experiment_name_puts_elsewhere_are_found(
        self, run_folder: RunFolder, event_file: Callable[..., EventFileBuilder], write_checkpoint: Callable[..., Path]
    ) -> None:
        write_checkpoint(run_folder.job_dir / "my_experiment" / "checkpoints")
        events = event_file(run_folder.job_dir / "my_experiment" / "tb_logs").scalar("lm loss", 1, 1.0).write()
        output = read_run(run_folder.job, None)
        assert output.event_files == (events,)
        assert len(output.checkpoints) == 1

    def test_restarts_are_in_order_and_logs_of_other_jobs_are_not_ours(self, run_folder: RunFolder) -> None:
        restarts = [run_folder.log("x", restart=number) for number in (10, 2, 0)]
        run_folder.log("foreign", job_id=4712)
        assert read_run(run_folder.job, None).logs == tuple(reversed(restarts))

    def test_a_title_that_ends_with_the_jobs_number_is_not_taken_for_it(self, run_folder: RunFolder) -> None:
        run_folder.write("log-acct.title_4711_9_0.out", "job 9")
        assert read_run(run_folder.job, None).logs == ()

    def test_logs_that_name_no_job_are_the_fallback(self, run_folder: RunFolder) -> None:
        plain = run_folder.write("log.out", "text")
        assert read_run(run_folder.job, None).logs == (plain,)
        own = run_folder.log("text")
        assert read_run(run_folder.job, None).logs == (own,)

    def test_the_archive_of_the_launchers_repository_is_not_output(
        self, run_folder: RunFolder, event_file: Callable[..., EventFileBuilder]
    ) -> None:
        event_file(run_folder.job_dir / "code" / "tests" / "data").scalar("lm loss", 1, 1.0).write()
        assert read_run(run_folder.job, None).event_files == ()

    def test_links_out_of_the_tree_are_not_followed_and_reported(
        self,
        run_folder: RunFolder,
        event_file: Callable[..., EventFileBuilder],
        tmp_path: Path,
        write_checkpoint: Callable[..., Path],
    ) -> None:
        foreign = event_file("foreign").scalar("lm loss", 1, 1.0).write()
        write_checkpoint(tmp_path / "foreign_checkpoints")
        inside = run_folder.curves(range(1, 2))
        (run_folder.job_dir / "tb_link").symlink_to(foreign.parent)
        (run_folder.job_dir / "checkpoints").symlink_to(tmp_path / "foreign_checkpoints")
        (run_folder.job_dir / foreign.name).symlink_to(foreign)
        output = read_run(run_folder.job, None)
        assert output.event_files == (inside,)
        assert output.checkpoints == ()
        assert len(output.not_stored) == 3
        assert all("link to outside" in reason for _path, reason in output.not_stored)

    def test_products_that_no_rule_knows_are_noted_with_their_bytes(
        self, run_folder: RunFolder, write_checkpoint: Callable[..., Path]
    ) -> None:
        checkpoint = write_checkpoint(run_folder.job_dir / "checkpoints", iteration=10)
        (checkpoint.parent / "latest_checkpointed_iteration.txt").write_text("10")
        run_folder.curves(range(1, 2))
        for own in ("title.tar.gz", "scripts/title.sh", "configs/title_executor.yaml", "env_4711.log", "train.sh"):
            run_folder.write(own, "of the launcher")
        for shard in ("model-1.safetensors", "nested/model-2.safetensors"):
            run_folder.write(f"hf_export/{shard}", "x" * 500)
        run_folder.write("answers: all.jsonl", "{}")
        assert read_run(run_folder.job, None).not_stored == (
            (f"{run_folder.job_dir}/answers: all.jsonl", "no rule stores it (1 file, 2 bytes)"),
            (f"{run_folder.job_dir}/hf_export", "no rule stores it (2 files, 1000 bytes)"),
        )

    def test_where_a_data_loader_stood_is_no_checkpoint_of_its_own(
        self, run_folder: RunFolder, write_checkpoint: Callable[..., Path]
    ) -> None:
        save_dir = run_folder.job_dir / "checkpoints"
        write_checkpoint(save_dir, iteration=10)
        run_folder.write("checkpoints/energon/iter_0000010/train_dataloader_dprank000.pt", "state")
        assert [found.path for found in read_run(run_folder.job, None).checkpoints] == [save_dir / "iter_0000010"]

    def test_output_inside_the_job_folder_is_found_once(self, run_folder: RunFolder) -> None:
        run_folder.curves(range(1, 2))
        assert len(read_run(run_folder.job, run_folder.job_dir / "tb_logs").event_files) == 1

    def test_the_model_survives_json(self, run_folder: RunFolder, write_checkpoint: Callable[..., Path]) -> None:
        run_folder.curves(range(1, 3))
        write_checkpoint(run_folder.job_dir / "checkpoints")
        output = read_run(run_folder.job, None)
        assert type(output).model_validate_json(output.model_dump_json()) == output


OF_PEERS = (
    "[rank1]: Traceback (most recent call last):\n"
    "[rank1]:     torch.distributed.all_reduce(t)\n"
    "[rank1]: torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:2251, remote process exited or "
    "there was a network error, NCCL version 2.26.2\n"
    "[rank1]: ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.\n"
    "[rank1]: Last error:\n"
    "[rank1]: socketProgress: Connection closed by remote peer n1",
    "[rank1]:[E1126 01:02:03.1 ProcessGroupNCCL.cpp:632] [Rank 1] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum=10, OpType=ALLREDUCE) ran for 600000 milliseconds before timing out.",
    "WARNING urllib3.connectionpool: Retrying (Retry(total=4)) after connection broken by 'ConnectionResetError(104, "
    "'Connection reset by peer')': /api/models/x",
)
_TRACEBACK = "[rank3]: Traceback (most recent call last):\n[rank3]:     y = layer(x)\n[rank3]: "
OF_THE_CODE = (
    f"{_TRACEBACK}AssertionError: shape mismatch",
    f"{_TRACEBACK}TypeError: __init__() got an unexpected keyword argument 'timeout'",
    f"{_TRACEBACK}torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 258.00 MiB.",
    f"{_TRACEBACK}RuntimeError: CUDA error: device-side assert triggered\n"
    "[rank3]: For debugging consider passing CUDA_LAUNCH_BLOCKING=1",
)
OF_THE_MACHINE = (
    f"{_TRACEBACK}RuntimeError: CUDA error: uncorrectable ECC error encountered",
    f"{_TRACEBACK}RuntimeError: CUDA error: unknown error\n"
    "[rank3]: For debugging consider passing CUDA_LAUNCH_BLOCKING=1",
    f"{_TRACEBACK}torch.distributed.DistNetworkError: The client socket has failed to connect to n1:29500.",
    f"{_TRACEBACK}RuntimeError: Socket Timeout",
    f"{_TRACEBACK}RuntimeError: NCCL communicator was aborted on rank 3.",
    f"{_TRACEBACK}RuntimeError: Unexpected error from cudaGetDeviceCount(). Error 802: system not yet initialized",
    f"{_TRACEBACK}OSError: [Errno 28] No space left on device",
    f"{_TRACEBACK}OSError: [Errno 116] Stale file handle: '/lustre/data'",
    f"{_TRACEBACK}OSError: We couldn't connect to 'https://huggingface.co' to load this file",
    "[rank3]: Traceback (most recent call last):\n[rank3]: ConnectionResetError: [Errno 104] Connection reset by peer\n"
    "[rank3]: During handling of the above exception, another exception occurred:\n"
    f"{_TRACEBACK}ValueError: no tokenizer",
    "n1:359:359 [0] transport/net_ib.cc:94 NCCL WARN NET/IB : n1:359 Got async event : port error",
    "srun: error: Node failure on n1",
    "[rank3]:[W1126 01:02:03.1 TCPStore.cpp:125] [c10d] recvValue failed on SocketImpl(fd=76): Connection reset by peer",
)


def failed(job: Job) -> Job:
    status = JobStatus(job_id=job.job_id, state=JobState.FAILED, exit_code=1)
    return job.model_copy(update={"exit_file_code": 1, "status": status})


class TestEvidence:
    def test_a_whole_run_proves_itself(self, run_folder: RunFolder, step_line: type[StepLine]) -> None:
        lines = "\n".join(step_line(n).step for n in range(1, 51))
        run_folder.log(f"{lines}\n[after training is done] datetime: now\n")
        found = evidence(read_run(run_folder.job, None), 50)
        assert (found.steps_done, found.steps_expected) == (50, 50)
        assert found.losses_finite
        assert found.finished_marker
        assert (found.flaky_marker, found.timeout_marker, found.last_error) == (None, False, "")

    def test_the_log_proves_steps_that_a_killed_writer_never_flushed(
        self, run_folder: RunFolder, step_line: type[StepLine]
    ) -> None:
        run_folder.curves(range(1, 21))
        run_folder.log("\n".join(step_line(n).step for n in range(1, 51)))
        assert evidence(read_run(run_folder.job, None), 50).steps_done == 50

    @pytest.mark.parametrize("bad", [math.nan, math.inf])
    def test_one_loss_that_is_not_finite_is_enough(self, run_folder: RunFolder, bad: Any) -> None:
        run_folder.curves(range(1, 51), loss=lambda step: bad if step == 20 else 2.0)
        found = evidence(read_run(run_folder.job, None), 50)
        assert found.steps_done == 50
        assert not found.losses_finite

    def test_a_loss_that_the_log_leaves_out_is_not_finite(
        self, run_folder: RunFolder, step_line: type[StepLine]
    ) -> None:
        run_folder.log("\n".join(step_line(n, loss=math.nan if n == 3 else 2.0).step for n in range(1, 6)))
        assert not evidence(read_run(run_folder.job, None), 5).losses_finite

    def test_a_run_that_stopped_at_a_nan_has_no_finite_losses(
        self, run_folder: RunFolder, step_line: type[StepLine]
    ) -> None:
        run_folder.log(f"{step_line(1).step}\nRuntimeError: found NaN in local grad norm for bucket #0\n")
        assert not evidence(read_run(run_folder.job, None), 50).losses_finite

    def test_a_job_that_never_trained_has_no_steps(self, run_folder: RunFolder) -> None:
        found = evidence(read_run(run_folder.job, None), 50)
        assert (found.steps_done, found.finished_marker, found.last_error) == (0, False, "")

    def test_slurms_complaints_in_the_batch_log_count(self, run_folder: RunFolder, step_line: type[StepLine]) -> None:
        run_folder.log(step_line(1).step)
        text = "slurmstepd: error: *** JOB 4711 ON node1 CANCELLED AT 2026-11-20T22:00:00 DUE TO TIME LIMIT ***\n"
        run_folder.write("sbatch_acct.title_4711.out", text)
        found = evidence(read_run(run_folder.job, None), 50)
        assert found.timeout_marker
        assert "TIME LIMIT" in found.last_error

    def test_a_crash_names_its_marker_and_its_error(self, run_folder: RunFolder, step_line: type[StepLine]) -> None:
        run_folder.log(
            step_line(1).step + "\n[rank0]: Traceback (most recent call last):\n"
            "[rank0]: RuntimeError: CUDA error: an illegal memory access was encountered\n"
        )
        found = evidence(read_run(run_folder.job, None), 50)
        assert found.flaky_marker == "illegal memory access"
        assert found.last_error.startswith("RuntimeError: CUDA error")

    @pytest.mark.parametrize("said", OF_THE_CODE, ids=lambda said: said.splitlines()[-1][:60])
    @pytest.mark.parametrize("peers", OF_PEERS, ids=["a lost peer", "the watchdog", "a try that succeeded later"])
    def test_the_programs_own_error_is_not_the_networks_whatever_its_peers_report(
        self, run_folder: RunFolder, step_line: type[StepLine], said: str, peers: str
    ) -> None:
        for text in (f"{said}\n{peers}\n", f"{peers}\n{said}\n"):
            run_folder.log(f"{step_line(1).step}\n{text}srun: error: n1: task 3: Exited with exit code 1\n")
            found = evidence(read_run(run_folder.job, None), 50)
            assert found.flaky_marker is None
            assert classify_job(failed(run_folder.job), found).outcome in (Outcome.PROGRAM_ERROR, Outcome.OUT_OF_MEMORY)

    @pytest.mark.parametrize("said", ["", *OF_THE_MACHINE], ids=lambda said: said.splitlines()[-1][:60] if said else "")
    @pytest.mark.parametrize("peers", OF_PEERS[:2], ids=["a lost peer", "the watchdog"])
    def test_what_the_network_or_a_machine_did_stays_theirs(
        self, run_folder: RunFolder, step_line: type[StepLine], said: str, peers: str
    ) -> None:
        for text in (f"{said}\n{peers}\n", f"{peers}\n{said}\n"):
            run_folder.log(f"{step_line(1).step}\n{text}srun: error: n1: task 3: Exited with exit code 1\n")
            found = classify_job(failed(run_folder.job), evidence(read_run(run_folder.job, None), 50))
            assert found.outcome is Outcome.INFRASTRUCTURE, found.outcome_reason

    def test_an_option_that_the_program_refused_is_its_error_after_a_try_that_succeeded_later(
        self, run_folder: RunFolder
    ) -> None:
        run_folder.log(f"{OF_PEERS[2]}\ntrain.py: error: unrecognized arguments: --fp4\n")

        assert evidence(read_run(run_folder.job, None), 50).flaky_marker is None

    @pytest.mark.parametrize("went_on", ["INFO - without apex", "WARNING: falling back"])
    def test_an_exception_that_was_logged_before_the_network_failed_does_not_hide_that(
        self, run_folder: RunFolder, went_on: str
    ) -> None:
        logged = "Traceback (most recent call last):\n  import apex\nModuleNotFoundError: No module named 'apex'"
        run_folder.log(f"{logged}\n{went_on}\n{OF_PEERS[0]}\n")

        assert evidence(read_run(run_folder.job, None), 50).flaky_marker

    @pytest.mark.parametrize(
        ("of_the_ranks", "of_the_batch", "named"),
        [
            (
                "ERROR: shard 7 is bad",
                "slurmstepd: error: Detected 1 oom_kill event in StepId=1.0",
                "slurmstepd: error: ",
            ),
            (
                "ValueError: bad shape",
                "slurmstepd: error: Detected 1 oom_kill event in StepId=1.0",
                "ValueError: bad shape",
            ),
            (
                "ERROR: shard 7 is bad",
                "srun: error: node1: task 0: Exited with exit code 1",
                "possibly: ERROR: shard 7",
            ),
        ],
        ids=["the batch's is certain", "both are certain", "the batch's tells an end only"],
    )
    def test_of_two_logs_the_more_certain_error_is_named(
        self, run_folder: RunFolder, of_the_ranks: str, of_the_batch: str, named: str
    ) -> None:
        traceback = "[rank0]: Traceback (most recent call last):\n[rank0]: " if "ValueError" in of_the_ranks else ""
        run_folder.log(f"{traceback}{of_the_ranks}\n")
        run_folder.write("sbatch_acct.title_4711.out", f"{of_the_batch}\n")
        assert evidence(read_run(run_folder.job, None), 50).last_error.startswith(named)


LOG = """\
=============
== PyTorch ==
=============

NVIDIA Release 25.09 (build 204519324)
PyTorch Version 2.9.0a0+50eac811a6
NOTE: CUDA Forward Compatibility mode ENABLED.
  Using CUDA 13.0 driver version 580.82.07 with kernel driver version 550.54.15.
node1:4242:4242 [0] NCCL INFO NCCL version 2.27.7+cuda13.0
"""


@pytest.fixture
def facts(run_folder: RunFolder) -> Any:
    return lambda *pinned: read_facts(read_run(run_folder.job, None), run_folder.job, pinned)


def test_the_log_tells_driver_nccl_and_the_images_release(
    run_folder: RunFolder, facts: Callable[..., dict[str, str]]
) -> None:
    run_folder.log(LOG)

    assert facts() == {
        "driver": "550.54.15",
        "NCCL": "2.27.7",
        "CUDA of NCCL": "13.0",
        "image release": "25.09",
        "PyTorch": "2.9.0a0+50eac811a6",
    }


def test_nvidia_smi_in_a_prologue_tells_the_driver(run_folder: RunFolder, facts: Callable[..., dict[str, str]]) -> None:
    run_folder.log("| NVIDIA-SMI 550.54.15    Driver Version: 550.54.15    CUDA Version: 12.4     |\n")

    assert facts() == {"driver": "550.54.15", "CUDA of the driver": "12.4"}


def test_of_a_dumped_environment_only_versions_are_taken(
    run_folder: RunFolder, facts: Callable[..., dict[str, str]]
) -> None:
    run_folder.log(LOG)
    dump = run_folder.job_dir / f"env_{run_folder.job.job_id}.log"
    dump.write_text("HF_TOKEN=hf_secret\nCUDA_VERSION=13.0.1.012\nNCCL_VERSION=2.27.6\nCUDA_DRIVER_VERSION=580.82.07\n")

    found = facts()

    assert (found["CUDA"], found["driver that CUDA brings"]) == ("13.0.1.012", "580.82.07")
    assert found["NCCL"] == "2.27.6"  # the environment counts before the log
    assert not any("hf_secret" in value for value in found.values())


def test_commits_inside_the_image_are_facts_and_pinned_ones_are_not(
    run_folder: RunFolder, facts: Callable[..., dict[str, str]]
) -> None:
    status = [{"name": "Megatron-LM", "sha": "c" * 40}, {"name": "Megatron-Bridge", "sha": "a" * 40}, {"name": "TE"}]
    folder = run_folder.job_dir / "configs"
    folder.mkdir(parents=True)
    (folder / "repo_status.json").write_text(json.dumps(status))

    assert facts("a" * 40) == {"Megatron-LM in the image": "c" * 12}


@pytest.mark.parametrize(
    "text", ["", "{", '{"name": 1}', "[1, null]", "[" * 100_000, '[{"sha": "refs/heads/m\\u0000"}]']
)
def test_a_status_that_is_none_says_nothing(
    run_folder: RunFolder, facts: Callable[..., dict[str, str]], text: str
) -> None:
    folder = run_folder.job_dir / "configs"
    folder.mkdir(parents=True)
    (folder / "repo_status.json").write_text(text)

    assert facts() == {}
