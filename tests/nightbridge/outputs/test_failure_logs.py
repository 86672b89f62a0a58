"""The useful line of real failure logs: named, with the first rank and node that failed, and certain only for reason."""

import itertools
import tomllib
from pathlib import Path
from typing import Any

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


@pytest.mark.parametrize("part", dict.fromkeys(log["part"] for log in LOGS))
def test_the_cause_is_named(part: str, tmp_path: Path) -> None:
    """Of each log of a part: 838 tests of their own take longer to run than to read the logs."""
    path, wrong = tmp_path / "log.out", {}
    for log in LOGS:
        if log["part"] == part:
            path.write_text(log["text"])
            error = read_logs([path]).last_error
            if not is_named(log, error):
                wrong[log["source"]] = error

    assert wrong == {}


START = """\
W0314 09:12:44.128000 3961 torch/distributed/run.py:793] *****************************************
E external/local_xla/cuda_dnn.cc:9261] Unable to register cuDNN factory: one has already been registered
fatal: not a git repository (or any of the parent directories): .git
[W314 09:12:47.771002 socket.cpp:752] [c10d] The client socket has failed to connect to [gpu-07]:29500 (errno: 111).
  error_injection_rate ............................ 0
    will not load any checkpoints and will start from random
[after model, optimizer, and learning rate scheduler are built] datetime: 2025-03-14 09:13:21
 [2025-03-14 09:14:02] iteration       10/   50000 | consumed samples:         2560 | lm loss: 1.091034E+01 |
"""


def test_the_cause_is_named_behind_what_megatron_prints_at_its_start(tmp_path: Path) -> None:
    path, wrong = tmp_path / "log.out", {}
    for log in LOGS:
        if log["cause"] and not log.get("left"):
            path.write_text(START + log["text"].lstrip("\n"))
            error = read_logs([path]).last_error
            if not is_named(log, error):
                wrong[log["source"]] = error

    assert wrong == {}


def is_named(log: dict[str, Any], error: str) -> bool:
    """Whether it is the log's cause, with where it was, and is no cause where the log has none."""
    if log.get("left"):
        return error == "" or error.startswith("possibly: ")
    return (
        any(line in error for line in (log["cause"], *log.get("also", ())))
        and bool(log["cause"] or error == "" or error.startswith("possibly: "))
        and log.get("where", "") in error
    )


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
        "tornado.iostream.StreamClosedError: Stream is closed",
        "mpirun noticed that process rank 7 with PID 0 on node n1 exited on signal 9 (Killed).",
        "(raylet) The process is dead, probably it crashed during start.",
        "graph/topo.h:230 NCCL WARN Could not find NET with id 0",
        "ERROR: ld.so: object 'x.so' from LD_PRELOAD cannot be preloaded (cannot open shared object file): ignored.",
        "If you encounter CUDA error, try fewer workers; an error is not the end",
        "Killed",
        "Process 3 exit with status code 250.",
        "  what():  Transport endpoint is not connected",
        "cp: cannot stat 'x': No such file or directory, retrying in 1 s",
    ],
)
def test_what_only_reports_an_end_or_speaks_of_another_process_is_possible(line: str) -> None:
    assert best_of(line).startswith(f"possibly: {line.strip()}")


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
    said = "ValueError: bad shape"

    assert best_of(*TRACEBACK, said, TIME_LIMIT) == f"possibly: {said}; also: {TIME_LIMIT}"


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


def test_a_complaint_that_a_program_ran_after_is_possible() -> None:
    complaint = "prolog.sh: line 5: /run/gpustat/0: Permission denied"
    assert best_of(complaint, TRACEBACK[0], '  File "main.py"') == f"possibly: {complaint}"
    assert best_of(complaint, "srun: Terminating StepId=7.0", "  a continuation") == complaint


def test_an_exception_that_others_outlived_is_certain_only_with_an_end() -> None:
    lines = (*TRACEBACK, "ValueError: bad shape", "2026-01-08 - INFO - epoch 2")
    assert best_of(*lines) == "possibly: ValueError: bad shape"
    assert best_of(*lines, "srun: error: n1: task 0: Exited with exit code 1") == "ValueError: bad shape (rank 0, n1)"


def test_a_long_line_keeps_its_end() -> None:
    error = best_of(f"[ERROR] [launch.py:434] ['python', '{'x' * 900}'] exits with return code = -9")
    assert error.startswith("possibly: [ERROR] [launch.py:434]")
    assert error.endswith("exits with return code = -9")


def test_what_was_logged_above_a_consequence_is_named_with_it() -> None:
    heading = "2026-01-08 - worker - ERROR - Failed to communicate with the scheduler."
    error = best_of(heading, *TRACEBACK, "StreamClosedError: Stream is closed")
    assert error == f"possibly: {heading} StreamClosedError: Stream is closed"


def test_an_exception_of_a_rank_that_srun_labels_or_that_says_more_below_is_named() -> None:
    assert best_of("15: [rank15]: ValueError: bad shape") == "ValueError: bad shape (rank 15)"
    assert best_of("[1830] [rank3]: ValueError: bad shape") == "ValueError: bad shape (rank 3)"
    assert best_of("3: ValueError: bad shape") == "ValueError: bad shape"
    assert best_of("lightning.MisconfigurationException: ", "   You requested 2 GPUs") == (
        "lightning.MisconfigurationException: You requested 2 GPUs"
    )


def test_the_first_complaint_of_sbatch_says_more_than_its_unspecified_error() -> None:
    complaint = "sbatch: error: submitted without an account"
    assert best_of(complaint, "sbatch: error: Batch job submission failed: Unspecified error") == complaint


def test_what_an_exception_of_cpp_says_is_named() -> None:
    assert best_of("terminate called after throwing an instance of 'x'", "  what():  a <= b. 2 vs 1") == (
        "what():  a <= b. 2 vs 1"
    )


def test_the_rank_that_mpirun_tags_a_line_with_is_named() -> None:
    assert best_of("[1,6]<stderr>:[n1:98:0] Caught signal 11 (Segmentation fault)") == (
        "[n1:98:0] Caught signal 11 (Segmentation fault) (rank 6)"
    )


def test_two_ranks_that_say_different_things_leave_it_possible() -> None:
    first = ("[rank3]: Traceback (most recent call last):", "[rank3]: ValueError: bad shape")
    assert best_of(*first, "[rank0]: KeyError: 'x'") == "possibly: ValueError: bad shape (rank 3)"
    assert best_of(*first, "[rank0]: ValueError: bad shape") == "ValueError: bad shape (rank 3)"


@pytest.mark.parametrize(
    "line",
    [
        "Lattice 7 is stuck in an unknown state",
        "[worker-3] quota of file handles exceeded",
        "[ERROR] Lattice 7 gave up",
        "the solver quit: residual is not finite",
    ],
)
def test_a_line_that_no_table_knows_but_sounds_like_a_failure_is_possible(line: str) -> None:
    assert best_of("loading the data", line, "saving the log") == f"possibly: {line}"


def test_an_exception_beside_another_line_that_sounds_like_a_failure_is_possible_and_both_are_named() -> None:
    said = "RuntimeError: no engine can execute this computation"

    assert best_of(*TRACEBACK, said) == said
    assert best_of("Could not load library libx.so. Error: symbol f is not defined", *TRACEBACK, said) == (
        f"possibly: {said}; also: Could not load library libx.so. Error: symbol f is not defined"
    )


def test_what_a_process_outlived_does_not_compete_with_its_exception() -> None:
    said, before = (
        "RuntimeError: no engine can execute this computation",
        "Could not load library libx.so. Error: symbol f",
    )

    assert best_of(before, "2026-01-08 - INFO - epoch 2", *TRACEBACK, said) == said
    assert best_of(*TRACEBACK, "KeyError: 1", TIME_LIMIT, " iteration 2/ 50 |", *TRACEBACK, said) == said


@pytest.mark.parametrize("before", ["[rank3]: ", "3: ", "3: [rank3]: ", "[default3]:[rank3]: "])
def test_the_statement_of_a_traceback_behind_a_prefix_is_no_other_reason(before: str) -> None:
    raised = [f"{before}{line}" for line in (*TRACEBACK, "    assert x == y", "AssertionError: bad shape")]

    assert best_of(*raised) == "AssertionError: bad shape (rank 3)"


@pytest.mark.parametrize("marked", [(), ("           ^^^^^^^^^^^",)])
def test_an_exception_without_a_message_is_named_with_its_statement(marked: tuple[str, ...]) -> None:
    assert best_of(*TRACEBACK, "    assert samples > 0", *marked, "AssertionError") == (
        "AssertionError at assert samples > 0"
    )
    assert best_of(*TRACEBACK, "    assert samples > 0, name", "AssertionError: train") == "AssertionError: train"
    assert best_of(*TRACEBACK, "AssertionError") == "AssertionError"


def test_the_reason_below_an_error_of_nccl_that_no_table_knows_is_named_with_it() -> None:
    assert best_of("Group.cpp:12, internal error, NCCL version 2.14.3", "Last error:", "Net : closed by peer x") == (
        "possibly: Group.cpp:12, internal error, NCCL version 2.14.3 Net : closed by peer x"
    )


def test_a_log_that_is_cut_before_a_message_has_the_statement_that_raised() -> None:
    cut = (
        "    return pwd.getpwuid(os.getuid())[0]",
        "torch._dynamo.exc.BackendCompilerFailed: backend='inductor' raised:",
    )
    assert best_of(*TRACEBACK, *cut) == f"possibly: {cut[1]} at {cut[0].strip()}"
    assert best_of("AssertionError", *TRACEBACK, "    assert n > 0") == "possibly: AssertionError at assert n > 0"


def test_what_is_set_in_below_an_exception_belongs_to_it() -> None:
    error = "[rank5]: pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig"
    detail = "[rank5]:   Value error, Model architectures ['X'] are not supported for now."
    ranked = [f"[rank5]: {line}" for line in TRACEBACK]

    assert best_of(*ranked, error, detail) == f"{error[9:]} {detail[11:]} (rank 5)"
    assert best_of(*ranked, error) == f"possibly: {error[9:]} (rank 5)"
    assert best_of(*TRACEBACK, "ValueError: bad shape", "  of layer 3", "  of 12") == "ValueError: bad shape of layer 3"
    assert best_of(*TRACEBACK, "ValueError: bad shape", "training ends") == "ValueError: bad shape"


def test_a_folder_that_is_not_there_is_no_cause_where_slurm_takes_another() -> None:
    refused = "slurmstepd: error: execve(): /shared/run.sh: Permission denied"

    assert best_of(
        "slurmstepd: error: couldn't chdir to `/shared': No such file or directory: going to /tmp instead", refused
    ) == (refused)


def test_that_somebody_cancelled_the_job_says_more_than_what_its_processes_wrote_then() -> None:
    job = "slurmstepd: error: *** JOB 1809577 ON r6i5n1 CANCELLED AT 2021-05-23T08:46:02 ***"

    assert best_of("Killing subprocess 74367", job) == f"possibly: {job}"
    assert best_of("Killing subprocess 74367", job.replace("JOB 1809577", "STEP 1809577.0")) != f"possibly: {job}"


def test_the_same_exception_of_another_rank_does_not_hide_what_nccl_said_below_the_first() -> None:
    error = "torch.distributed.DistBackendError: NCCL error in: x.cpp:93 (run with NCCL_DEBUG=WARN for details)"
    told = (f"34: {error}", "34: Last error:", "34: Failed to initialize any NET plugin", f"35: {error}")

    assert best_of(*TRACEBACK, *told).startswith(f"possibly: {error} Failed to initialize any NET plugin")


def test_what_ended_the_job_for_all_after_a_complaint_is_named_with_it() -> None:
    node = "srun: error: Node failure on jz-49"

    assert best_of("  what():  CUDA error: unknown error", node) == (
        f"possibly: what():  CUDA error: unknown error; also: {node} (jz-49)"
    )
    assert best_of(node) == node


def test_the_rank_and_node_that_megatron_names_with_a_gradient_that_is_no_number() -> None:
    said = "AssertionError: Rank 13: found NaN in local grad norm in backward pass. Device: 5, node: node-15-11"

    assert best_of(*TRACEBACK, said) == f"{said} (rank 13)"


def test_of_the_complaints_of_a_container_that_did_not_start_the_last_one_is_why() -> None:
    logged = [
        f"slurmstepd: error: pyxis:     {text}: No such file or directory" for text in ("/bin/check", "cd: /workspace")
    ]
    assert best_of(*logged, "slurmstepd: error: pyxis: couldn't start container") == (
        f"possibly: {logged[1]}; also: {logged[0]}"
    )


def test_the_reason_below_an_exception_of_nccl_that_several_lines_tell_is_named() -> None:
    told = (
        "torch.distributed.DistBackendError: NCCL error in: x.cpp:7, unhandled cuda error",
        "ncclUnhandledCudaError: Call",
    )
    assert "Cuda failure 'invalid argument'" in best_of(
        *TRACEBACK, *told, "Last error:", "Cuda failure 'invalid argument'"
    )


def test_a_step_that_waits_for_busy_nodes_is_a_hint() -> None:
    said = "srun: Job 13 step creation still disabled, retrying (Requested nodes are busy)"

    assert best_of(said, said) == f"possibly: {said}"


def test_a_line_that_sounds_like_a_failure_says_more_than_the_report_of_the_end_below_it() -> None:
    report = "[E] failed (exitcode: 1) local_rank: 0 (pid: 130182) of binary: /usr/bin/python3.8"
    assert best_of("[ERROR] lattice 7 is singular", report) == "possibly: [ERROR] lattice 7 is singular"
    assert best_of(report, "[ERROR] see the log of the job") == f"possibly: {report}"


def test_the_first_line_after_the_last_sign_of_going_on_is_possible() -> None:
    lines = (
        "ERROR: plugin x failed",
        "2026-01-08 - INFO - epoch 2",
        "ERROR: lattice 7 failed",
        "ERROR: stage 2 failed",
    )
    assert best_of(*lines) == "possibly: ERROR: lattice 7 failed"
    assert best_of(*lines[:2]) == "possibly: ERROR: plugin x failed"


def test_what_training_went_on_after_is_the_last_that_is_possible() -> None:
    progress = " iteration       10/     100 | consumed samples: 2560"
    assert best_of("ERROR: plugin x failed", progress, "the queue is not empty") == "possibly: the queue is not empty"
    assert best_of("ERROR: plugin x failed", progress) == "possibly: ERROR: plugin x failed"


@pytest.mark.parametrize("little", ["STAGE 2 FAILED", "stage 2 failed with error code: 1", "stage 2 failed, log:"])
def test_what_only_announces_a_failure_is_less_than_what_says_why(little: str) -> None:
    assert best_of(little, "", "  lattice 7 is not regular").endswith("lattice 7 is not regular")


def test_lines_of_a_stack_and_of_code_are_not_named() -> None:
    stack = (
        "frame #3: lattice::fail() + 0x10f (0x7fe705ea9a0f in libx.so)",
        "    raise LatticeError(",
        "  #2 abort ()",
    )
    assert best_of(*stack) == ""


@pytest.mark.parametrize("before", ["Nov 13 17:26:57 ", "(worker1, rank=1, pid=229) ", "job/7 | 12:00:01.25 | ", "  "])
def test_a_traceback_behind_any_prefix_is_read(before: str) -> None:
    lines = [f"{before}{line}" for line in (*TRACEBACK, "LatticeFault: 7 is singular")]
    lines[2] = lines[2].replace("57", "58").replace("229", "2290").replace(".25", ".31")
    assert best_of(*lines).startswith("LatticeFault: 7 is singular")


def test_the_rank_in_a_bracket_before_an_exception_is_named() -> None:
    lines = [f"(worker1, rank=5, pid=229) {line}" for line in (*TRACEBACK, "ValueError: bad shape")]
    assert best_of(*lines) == "ValueError: bad shape (rank 5)"


def test_a_warning_with_the_number_of_a_system_error_counts_as_an_error() -> None:
    warning = "[W socket.cpp:426] [c10d] failed to bind to [::]:29500 (errno: 98 - in use)."
    assert best_of(warning, "[E socket.cpp:462] [c10d] failed to listen") == f"possibly: {warning}"


def test_two_tracebacks_that_end_differently_are_certain_only_where_one_process_went_on_between() -> None:
    first, last = (*TRACEBACK, "KeyError: 'x'"), (*TRACEBACK, "ValueError: bad shape")
    assert best_of(*first, *last) == "possibly: ValueError: bad shape"
    chained = "During handling of the above exception, another exception occurred:"
    assert best_of(*first, "", chained, "", *last) == "ValueError: bad shape; after: KeyError: 'x'"
    assert best_of(*first, "", "training goes on", "", *last) == "ValueError: bad shape"


def test_a_known_line_that_a_process_informs_after_is_certain_only_with_an_end() -> None:
    lines = ("Failed to initialize NVML: Driver/library version mismatch", "2026-01-08 - INFO - epoch 2")
    assert best_of(*lines) == f"possibly: {lines[0]}"
    assert best_of(*lines, "srun: error: n1: task 0: Exited with exit code 1") == f"{lines[0]} (rank 0, n1)"


def test_complaints_of_a_client_of_slurm_that_follow_each_other_are_named_together() -> None:
    cause = "sbatch: error: memory of the node is too small"
    refusal = "sbatch: error: Batch job submission failed: Requested node configuration is not available"
    assert best_of(cause, refusal) == f"{cause}; {refusal.removeprefix('sbatch: error: ')}"
    apart = best_of("srun: error: plugin x failed", "step 2 begins", "srun: error: Unable to create step: no nodes")
    assert apart == "possibly: srun: error: Unable to create step: no nodes; also: srun: error: plugin x failed"
    advice = "srun: error: If munged is up, restart with --num-threads=10"
    assert (
        best_of(advice, "srun: error: Munge encode failed: no socket") == "srun: error: Munge encode failed: no socket"
    )


def test_a_line_that_informs_is_not_named() -> None:
    assert best_of('time="2026-01-08T09:30:56Z" level=info msg="running=1, failed=0, no error"') == ""
    assert best_of("2026-01-08 - INFO - caught LatticeError: 7 is singular") == ""


def test_the_command_that_a_shell_prints_is_not_named() -> None:
    error = "[ERROR] step 2 of the chain crashed"
    assert best_of(f"+ echo '{error}'", error) == f"possibly: {error}"


def test_an_exception_cut_short_does_not_hide_what_was_said_above_it() -> None:
    known = "CudaCheck FAIL line=56 error=77 : an illegal memory access was encountered"
    assert best_of(known, *TRACEBACK, "RuntimeErro") == known


def test_an_exception_of_cleaning_up_says_less_than_an_error_above_it() -> None:
    error = "E coordination_agent.cc:481] Failed to leave: deadline exceeded"
    assert best_of(error, "Error in atexit._run_exitfuncs:", *TRACEBACK, "XlaRuntimeError: Deadline Exceeded") == (
        f"possibly: {error}"
    )


def test_what_mpi_was_not_built_with_says_more_than_the_failure_to_start_it() -> None:
    reason = "but OMPI was not built with SLURM's PMI support and therefore cannot"
    assert best_of("PMI2_Init failed to intialize.  Return code: 1", reason) == reason


def test_what_nccl_warns_of_after_another_rank_did_not_answer_is_a_consequence() -> None:
    no_answer = "n5:359:359 [0] net_ib.cu:788 NCCL WARN NET/IB : Got completion with error 12, opcode 1"
    warning = "n5:359:359 [1] init.cu:194 NCCL WARN Cuda failure 'an illegal memory access was encountered'"
    assert best_of(no_answer, warning) == f"possibly: {no_answer}"
    assert best_of(warning, no_answer) == warning


def test_the_watchdog_that_names_its_reason_says_more_than_the_lines_above_it() -> None:
    before = "[rank4]:[E602 11:18:52 ProcessGroupNCCL.cpp:684] [Rank 4] Some NCCL operations have failed or timed out."
    reason = "[rank4]:[E602 11:18:52 ProcessGroupNCCL.cpp:1896] thread terminated with exception: [Rank 4] Watchdog"
    assert best_of(f"[1831] {before}", f"[1833] {reason}") == f"possibly: [1833] {reason} (rank 4)"


@pytest.mark.parametrize(
    "line",
    [
        "WARNING - Caught signal SIGHUP: this job is preempted.",
        "The pod was evicted",
        "The node was low on resource: memory.",
    ],
)
def test_what_takes_a_job_its_node_is_possible(line: str) -> None:
    assert best_of("WARNING Bypassing signal SIGTERM", line, "Stopping the container") == f"possibly: {line}"


def test_a_line_of_another_program_that_quotes_a_traceback_is_possible() -> None:
    line = "[-]E1113 mesh.rs:258] unhandled event (caused by: step 2 failed: Traceback (most recent call last):"
    assert best_of(line, '  File "mesh.py", line 935, in handle', "    result = await step()").startswith(
        f"possibly: {line}"
    )


def test_ray_heads_what_a_worker_raised_with_an_exception_of_its_own() -> None:
    heading = "ray.exceptions.RayTaskError(RuntimeError): ray::Trainer.train() (pid=2407496, ip=172.17.0.2)"
    worker = ('  File "model.py", line 441, in train_one_step', "    raise RuntimeError(message)")

    assert best_of(*TRACEBACK, heading, "           ^^^^^^^^^", *worker, "RuntimeError: loss is not finite") == (
        "RuntimeError: loss is not finite"
    )
    assert best_of(*TRACEBACK, heading, *worker) == f"possibly: {heading}"


@pytest.mark.parametrize(
    "line",
    [
        "  error_injection_rate ............................ 0",
        "  error_injection_rate: 0",
        "  exit_on_missing_checkpoint: false",
        "  error_file: <N/A>",
        "[NeMo W 2025-03-14 09:12:57 zarr:68] Could not import Zarr, some checkpoints will not be readable",
        "2025-03-14 09:12:50.114209: E external/local_xla/cuda_dnn.cc:9261] Unable to register cuDNN factory: "
        "Attempting to register factory for plugin cuDNN when one has already been registered",
        "[NeMo W nemo_logging:361] pydub/utils.py:170: RuntimeWarning: Couldn't find ffmpeg - an error may follow",
        "[rank1]:E0314 09:14:45.382967 507 select_algorithm.py:1322] [0/0] Exception out of resource: shared memory, "
        "Required: 163840, Hardware limit: 101376. for benchmark choice TritonTemplateCaller(/tmp/x.py)",
    ],
)
def test_what_every_start_prints_does_not_compete_with_an_exception(line: str) -> None:
    assert best_of(line, *TRACEBACK, "ValueError: bad shape") == "ValueError: bad shape"


def test_what_megatron_went_on_after_does_not_compete_with_what_ended_a_rank() -> None:
    line, phase = "    will not load any checkpoints", "[after model is built] datetime: 2025-03-14 09:13:21"
    ranked = [f"[rank3]: {text}" for text in (*TRACEBACK, "ValueError: bad shape")]

    assert best_of(line, *ranked) == f"possibly: ValueError: bad shape; also: {line.strip()} (rank 3)"
    assert best_of(line, phase, *ranked) == "ValueError: bad shape (rank 3)"


def test_a_statement_of_a_stack_that_the_log_begins_within_does_not_compete() -> None:
    assert best_of("[rank4]:     assert a % b == 0, 'cannot divide'", "[rank4]: AssertionError: 2 is no multiple") == (
        "AssertionError: 2 is no multiple (rank 4)"
    )


def test_what_a_process_outlived_says_less_than_that_one_was_killed_and_a_warning_less_than_both() -> None:
    killed, complaint = "srun: error: c002: task 0: Killed", "fatal: not a git repository"
    warning, informs = "UserWarning: the plugin has failed", "2026-01-08 - INFO - epoch 2"

    for line in (warning, complaint):
        assert best_of(line, informs, killed).startswith(f"possibly: {killed}")
    assert best_of(warning, complaint, informs).startswith(f"possibly: {complaint}")
    report = "[E] failed (exitcode: 1) local_rank: 0 (pid: 130182) of binary: /usr/bin/python3.8"
    assert best_of(complaint, informs, report) == f"possibly: {report}; also: {complaint}"


def test_what_another_rank_tells_and_how_slurm_reports_the_end_explain_no_exception() -> None:
    raised, why = "torch._dynamo.exc.BackendCompilerFailed: backend='inductor' raised:", "KeyError: 'uid 1000'"
    informs, exited = "[NeMo I 2026-01-08 data:12] indices built", "srun: error: c002: task 0: Exited with exit code 1"

    assert best_of(*TRACEBACK, raised, informs, why) == f"{raised} {why}"
    assert best_of(*TRACEBACK, why, informs, "  of another rank") == why
    assert best_of(*TRACEBACK, raised, exited).startswith(f"possibly: {raised} (")


def test_a_complaint_is_named_beside_that_a_process_ended_though_another_rank_went_on() -> None:
    informs = "2026-01-08 - INFO - epoch 2"
    started, complaint = "fatal: not a git repository", "cp: error writing 'iter_10': Disk quota exceeded"
    sounds = "ERROR: the dataset is corrupted"
    report = "[E] failed (exitcode: 1) local_rank: 0 (pid: 130182) of binary: /usr/bin/python3.8"
    exited = "srun: error: c002: task 0: Exited with exit code 1"

    for said, end in itertools.product((complaint, sounds), (report, exited)):
        assert f"; also: {said}" in best_of(started, informs, said, informs, end)


@pytest.mark.parametrize(
    "line",
    [
        "W0314 09:15:12.310000 3961 torch/distributed/elastic/api.py:897] Sending process 9 closing signal SIGTERM",
        "[rank0]:[W314 09:15:11 ProcessGroupNCCL.cpp:1496] Warning: WARNING: destroy_process_group() was not called",
    ],
)
def test_what_torch_warns_of_at_an_end_is_no_sign_of_going_on_and_explains_nothing(line: str) -> None:
    complaint, cut = "main.c:1:10: fatal error: stddef.h: No such file or directory", "x.BuildFailure: raised:"

    assert best_of(complaint, line) == complaint
    assert best_of(*TRACEBACK, cut, line) == f"possibly: {cut}"


def test_a_statement_of_a_stack_is_no_complaint() -> None:
    warning = "n1:139:1092 [7] socket.c:485 NCCL WARN socketStartConnect: Connect to 10.0.0.82<38455> failed : Reason"
    heading = f"[07:28:41 TP0] Scheduler hit an exception: {TRACEBACK[0]}"
    raised = (
        TRACEBACK[1],
        '    raise RuntimeError(f"NCCL error: {error}")',
        "RuntimeError: NCCL error: unhandled system error",
    )

    assert best_of(warning, heading, *raised).removeprefix("possibly: ").startswith(warning)


def test_what_a_launcher_raises_at_its_end_does_not_hide_what_a_rank_said() -> None:
    said = "RuntimeError: [unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation to complete"
    ranked = [f"[rank2]: {line}" for line in (*TRACEBACK, said)]
    launcher = (*TRACEBACK, "torch.distributed.elastic.rendezvous.api.RendezvousConnectionError: No store")

    assert best_of(*ranked, *launcher) == f"possibly: {said} (rank 2)"


def test_what_led_to_a_consequence_is_named_with_it() -> None:
    killed = "RuntimeError: DataLoader worker (pid 9) is killed by signal: Killed."
    chained = "The above exception was the direct cause of the following exception:"
    noticed = "RuntimeError: DataLoader worker (pid(s) 9) exited unexpectedly"

    assert best_of(*TRACEBACK, killed, "", chained, "", *TRACEBACK, noticed) == f"possibly: {noticed}; after: {killed}"


def test_what_a_compiler_complains_of_says_more_than_that_it_failed() -> None:
    complaint = "main.c:1:10: fatal error: stddef.h: No such file"
    raised = "torch.exc.InductorError: CalledProcessError: Command '['/usr/bin/gcc']' returned non-zero exit status 1."

    assert best_of(complaint, *TRACEBACK, raised) == f"possibly: {complaint}"
    assert best_of(*TRACEBACK, raised) == f"possibly: {raised}"


def test_how_torchrun_ends_by_the_signal_of_slurm_leaves_no_doubt_why() -> None:
    ended = "torch.distributed.elastic.multiprocessing.api.SignalException: Process 3961 got signal: 15"

    assert best_of(*TRACEBACK, ended, TIME_LIMIT) == TIME_LIMIT


def test_the_same_chain_of_exceptions_of_two_ranks_is_certain() -> None:
    chain = (
        *TRACEBACK,
        "ImportError: x.so: undefined symbol",
        "The above exception was the direct cause of the following exception:",
        *TRACEBACK,
        "RuntimeError: no model",
    )
    ranked = [f"[rank{rank}]: {line}" for rank in (4, 7) for line in chain]

    assert best_of(*ranked) == "RuntimeError: no model; after: ImportError: x.so: undefined symbol (rank 4)"


def test_a_progress_bar_is_no_part_of_a_message_and_no_line_is_named_twice() -> None:
    assert best_of(*TRACEBACK, "OSError: [Errno 116] Stale file handle", " 21%|██  | 42/200 [1:10<4:24, 1.0s/it]") == (
        "OSError: [Errno 116] Stale file handle"
    )
    raised = [
        f"[rank{rank}]: {line}" for rank in (0, 1) for line in (*TRACEBACK, "x.BuildFailure: raised:", "KeyError: 1")
    ]
    assert best_of(*raised) == "x.BuildFailure: raised: KeyError: 1 (rank 0)"


def test_that_srun_stops_waiting_says_less_than_that_the_step_was_cancelled() -> None:
    ended = (
        "slurmstepd: error: *** STEP 6.0 STEPD TERMINATED ON n1 AT 2020-12-14 DUE TO JOB NOT ENDING WITH SIGNALS ***"
    )
    waited = "srun: error: Timed out waiting for job step to complete"

    assert best_of(ended, waited).startswith(f"possibly: {ended}")
