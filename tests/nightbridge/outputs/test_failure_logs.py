"""The useful line of real failure logs: named, with the first rank and node that failed, and certain only for reason."""

import tomllib
from pathlib import Path

import pytest

from nightbridge.outputs.log_errors import ErrorFinder
from nightbridge.outputs.logs import read_logs

LOGS = tomllib.loads((Path(__file__).parents[2] / "data" / "failure_logs.toml").read_text())["log"]
TIME_LIMIT = "slurmstepd: error: *** JOB 7 ON node1 CANCELLED AT 2026-01-08T21:23:49 DUE TO TIME LIMIT ***"
OOM_KILL = "slurmstepd: error: Detected 1 oom_kill event in StepId=7.0. Some of the step tasks have been OOM Killed."
WATCHDOG = (
    "[rank1]:[E205 ProcessGroupNCCL.cpp:616] [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(...)"
)
TRACEBACK = ("Traceback (most recent call last):", '  File "train.py", line 3, in <module>')


@pytest.mark.parametrize("log", LOGS, ids=[f"{log['part']} {log['source'][-60:]}" for log in LOGS])
def test_the_cause_is_named(log: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "log.out"
    path.write_text(log["text"])

    error = read_logs([path]).last_error

    assert log["cause"] in error
    assert log["cause"] or error == "" or error.startswith("possibly: ")
    assert log.get("where", "") in error


def best_of(*lines: str) -> str:
    finder = ErrorFinder()
    for line in lines:
        finder.see(line)
    return finder.best


@pytest.mark.parametrize(
    "line",
    [
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:",
        "traceback : Signal 9 (SIGKILL) received by PID 14750",
        "[E] failed (exitcode: 1) local_rank: 0 (pid: 130182) of binary: /usr/bin/python3.8",
        "slurm_script: line 31:  6521 Killed python train.py",
        "srun: error: Unable to allocate resources: No error",
        "srun: error: node7: task 3: Exited with exit code 1",
        "slurmstepd: error: Failed to send MESSAGE_TASK_EXIT: Connection refused",
        "RuntimeError: [gloo/transport/tcp/pair.cc:598] Connection closed by peer [10.0.0.2]:51622",
        "RuntimeError: DataLoader worker (pid(s) 2121) exited unexpectedly",
        "ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.",
        "what():  NCCL error in: ProcessGroupNCCL.cpp:1333, unhandled system error",
        "slurmstepd: error: something that no table knows",
        "cp: cannot stat 'x': No such file or directory, retrying in 1 s",
    ],
)
def test_what_only_reports_an_end_or_speaks_of_another_process_is_possible(line: str) -> None:
    assert best_of(line).startswith(f"possibly: {line}")


@pytest.mark.parametrize(
    "line",
    [
        "[E] failed (exitcode: -11) local_rank: 0 (pid: 28773) of binary: /usr/bin/python3",
        "srun: error: node7: task 3: Out Of Memory",
        "RuntimeError: DataLoader worker (pid 325) is killed by signal: Bus error.",
        "bash: line 1: numactl: command not found",
        TIME_LIMIT,
        OOM_KILL,
        WATCHDOG,
    ],
)
def test_a_process_that_says_why_it_ended_is_certain(line: str) -> None:
    assert best_of(line).startswith(line.removeprefix("[rank1]:"))


def test_nothing_after_slurm_has_ended_the_job_is_the_cause() -> None:
    assert best_of(TIME_LIMIT, *TRACEBACK, "ValueError: I/O operation on closed file") == TIME_LIMIT


def test_an_exception_that_the_job_outlived_until_slurm_ended_it_is_possible() -> None:
    assert best_of(*TRACEBACK, "ValueError: bad shape", TIME_LIMIT) == "possibly: ValueError: bad shape"


def test_an_exception_beside_a_process_killed_for_its_memory_is_possible() -> None:
    assert best_of(*TRACEBACK, "ValueError: bad shape", OOM_KILL) == "possibly: ValueError: bad shape"
    out_of_memory = "torch.OutOfMemoryError: CUDA out of memory."
    assert best_of(*TRACEBACK, out_of_memory, OOM_KILL) == out_of_memory


def test_a_collective_that_waited_for_a_killed_rank_is_possible() -> None:
    assert best_of("srun: error: node7: task 12: Killed", WATCHDOG).startswith("possibly: ")


def test_a_traceback_of_cleaning_up_or_of_a_thread_does_not_hide_the_cause() -> None:
    for heading in ("Exception ignored in: <function Pool.__del__>", "Exception in thread Thread-1:"):
        error = best_of(*TRACEBACK, "ValueError: bad shape", heading, *TRACEBACK, "TypeError: 'NoneType' object")
        assert error == "ValueError: bad shape"


def test_a_complaint_that_the_script_outlived_is_possible() -> None:
    complaint = "job.sh: line 3: module: command not found"
    assert best_of(complaint, "2026-01-08 INFO loading the data") == f"possibly: {complaint}"


def test_two_ranks_that_say_different_things_leave_it_possible() -> None:
    first = ("[rank3]: Traceback (most recent call last):", "[rank3]: ValueError: bad shape")
    assert best_of(*first, "[rank0]: KeyError: 'x'") == "possibly: ValueError: bad shape (rank 3)"
    assert best_of(*first, "[rank0]: ValueError: bad shape") == "ValueError: bad shape (rank 3)"
