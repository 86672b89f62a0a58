"""What a run itself says: how far it came, and what really ran."""

import math
from typing import Any

import pytest

from nightbridge.models import GatePolicy, Job, JobState, JobStatus, Outcome, Summary
from nightbridge.outputs.experiment import read_run
from nightbridge.outputs.measurements import RunSettings
from nightbridge.outputs.run_evidence import evidence
from nightbridge.slurm.outcome import classify_job
from tests.nightbridge.outputs.builders import EventFileBuilder, RunFolder, StepLine, measure


def test_what_is_no_finite_number_is_kept_as_a_word_and_the_summary_can_be_read_again(run_folder: RunFolder) -> None:
    run_folder.log("".join(StepLine(step).step.replace("3.000000E-04", "NAN") + "\n" for step in range(1, 51)))
    settings = RunSettings(dumped={"gradient clipping": math.inf})

    summary = measure(read_run(run_folder.job, None), GatePolicy(), 50, settings)[0]

    assert summary.ran["gradient clipping"] == {"its configuration": "inf"}
    assert summary.ran["last learning rate"] == {"the log": "nan"}
    assert Summary.model_validate_json(summary.model_dump_json()) == summary


def samples_of(run_folder: RunFolder) -> dict[str, float | str]:
    return measure(read_run(run_folder.job, None), GatePolicy(), 50)[0].ran["consumed samples"]


def test_the_samples_of_the_logs_last_line_are_held_to_its_iteration(
    run_folder: RunFolder, step_line: type[StepLine]
) -> None:
    run_folder.log("\n".join(step_line(step).step for step in range(1, 51)))
    assert samples_of(run_folder) == {"the log": 50 * 128, "iterations and batch": 50 * 128}
    events = EventFileBuilder(run_folder.job_dir / "tb_logs" / "events.out.tfevents.1.node1.1.0", 1.0)
    for step in range(1, 51):
        events.scalar("lm loss", step, 2.0)
    events.write()
    # Another rank's text tore the last line.
    run_folder.log("\n".join(step_line(step).step for step in range(1, 50)))
    assert samples_of(run_folder) == {"the log": 49 * 128, "iterations and batch": 49 * 128}


@pytest.mark.parametrize(("logged", "of_log"), [(50, {"the log": 50 * 128}), (49, {}), (0, {})])
def test_the_samples_that_tensorboard_counts_are_held_to_the_last_iteration(
    run_folder: RunFolder, step_line: type[StepLine], logged: int, of_log: dict[str, int]
) -> None:
    """The run took half of its batch each time."""
    run_folder.log("\n".join(step_line(step).step for step in range(1, logged + 1)))
    events = EventFileBuilder(run_folder.job_dir / "tb_logs" / "events.out.tfevents.1.node1.1.0", 1.0)
    for step in range(1, 51):
        events.scalar("lm loss", step, 2.0).scalar("lm loss vs samples", step * 64, 2.0).scalar("batch-size", step, 128)
    events.write()
    assert samples_of(run_folder) == {**of_log, "TensorBoard": 50 * 64, "iterations and batch": 50 * 128}


def test_events_that_were_never_flushed_leave_the_samples_to_the_log(
    run_folder: RunFolder, step_line: type[StepLine]
) -> None:
    run_folder.curves(range(1, 31))
    run_folder.log("\n".join(step_line(step).step for step in range(1, 51)))
    assert samples_of(run_folder) == {"the log": 50 * 128, "iterations and batch": 50 * 128}


def test_how_many_iterations_a_record_has_is_known_of_each_source(
    run_folder: RunFolder, step_line: type[StepLine]
) -> None:
    def found() -> dict[str, float | str] | None:
        return measure(read_run(run_folder.job, None), GatePolicy(), 50)[0].ran.get("iterations a record")

    run_folder.log(step_line(10).step)
    assert found() is None
    run_folder.log("\n".join(step_line(step).step for step in range(10, 51, 10)))
    assert found() == {"the log": 10}
    run_folder.curves(range(1, 46))  # the log fills what was never flushed
    assert found() == {"the log": 10, "TensorBoard": 1}


def test_the_last_rate_is_that_of_the_last_iteration_or_not_known(
    run_folder: RunFolder, step_line: type[StepLine]
) -> None:
    def found() -> dict[str, float | str] | None:
        return measure(read_run(run_folder.job, None), GatePolicy(), 50)[0].ran.get("last learning rate")

    lines = [step_line(step).step for step in range(20, 50, 20)]
    run_folder.log("\n".join(lines))
    assert found() == {"the log": 3e-4}
    run_folder.log("\n".join([*lines, "[after training is done] datetime: 2026-11-21 03:00:00"]))
    assert found() is None


_TRACEBACK = "[rank3]: Traceback (most recent call last):\n[rank3]:     y = layer(x)\n[rank3]: "
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
