"""The guard around a batch script, run as slurmd runs it: a copy elsewhere, with SLURM_JOB_ID set."""

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from nightbridge.errors import LaunchRefused
from nightbridge.slurm.script import ALREADY_CLAIMED, ATTEMPT_FILE, NOT_VISIBLE, wrap_script
from tests.waiting import wait_until

SHELLS = [
    shell for shell in ("/bin/bash", "/bin/sh", "/bin/bash -l", "/usr/bin/env bash") if Path(shell.split()[0]).exists()
]


@pytest.fixture
def attempt(tmp_path: Path) -> Path:
    folder = tmp_path / "an attempt"
    folder.mkdir()
    (folder / ATTEMPT_FILE).touch()
    return folder


def start(script: str, attempt: Path, job_id: int = 7, **options: str) -> "subprocess.Popen[str]":
    spool = attempt.parent / f"spool-{job_id}"
    spool.mkdir(exist_ok=True)
    copy = spool / "slurm_script"
    copy.write_text(wrap_script(script, attempt))
    copy.chmod(0o755)
    return subprocess.Popen(
        [str(copy), "one", "two words"],
        env={"PATH": os.environ["PATH"], "HOME": str(attempt.parent), "SLURM_JOB_ID": str(job_id), **options},
        cwd=attempt.parent,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def run(script: str, attempt: Path, job_id: int = 7, **options: str) -> "subprocess.CompletedProcess[str]":
    process = start(script, attempt, job_id, **options)
    out, err = process.communicate(timeout=120)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("true", 0),
        ("exit 3", 3),
        ("set -evx\nfalse\necho not reached", 1),
        ("exec sh -c 'exit 5'", 5),
        ("trap 'exit 9' EXIT\nexit 1", 9),
        ("kill -KILL $$", 137),
        ("this is no command", 127),
    ],
)
def test_the_exit_code_is_left_however_the_script_ends(shell: str, body: str, code: int, attempt: Path) -> None:
    result = run(f"#!{shell}\n{body}\n", attempt)

    assert result.returncode == code
    assert (attempt / "exit_code").read_text() == f"{code}\n"
    assert (attempt / "claim").read_text().startswith("7 0 ")
    assert sorted(path.name for path in attempt.iterdir()) == [ATTEMPT_FILE, "claim", "exit_code"]


def test_the_script_sees_what_it_saw_before(attempt: Path) -> None:
    body = 'echo "$0|$#|$2|$PWD|$SLURM_JOB_ID|$(env | grep -c NIGHTBRIDGE)"; read line || echo no input'

    result = run(f"#!/bin/bash\n#SBATCH --nodes=2\n{body}\n", attempt)

    parent = attempt.parent
    assert result.stdout == f"{parent}/spool-7/slurm_script|2|two words|{parent}|7|0\nno input\n"
    assert result.stderr == ""


def test_sbatch_still_sees_every_option_and_neither_a_requeue_nor_a_wait(attempt: Path) -> None:
    script = "#!/bin/bash\n#\n# made by a launcher\n#SBATCH --nodes=2\n#SBATCH --requeue\n#SBATCH --requeue --exclusive\n#SBATCH --wait\n#SBATCH -W --wait-all-nodes=1\n\n#SBATCH --time=10\nset -e\n#SBATCH --late\n"

    wrapped = wrap_script(script, attempt).split("\n")

    head = wrapped[: next(i for i, line in enumerate(wrapped) if line and not line.startswith("#"))]
    assert head[0] == "#!/bin/bash"
    assert [line for line in head if line.startswith("#SBATCH")] == [
        "#SBATCH --no-requeue",
        "#SBATCH --nodes=2",
        "#SBATCH --exclusive",
        "#SBATCH --wait-all-nodes=1",
        "#SBATCH --time=10",
    ]
    assert wrapped[-3:] == ["set -e", "#SBATCH --late", ""]


def test_a_second_job_ends_at_once_and_names_the_holder_of_the_attempt(attempt: Path) -> None:
    run("#!/bin/bash\nexit 0\n", attempt, job_id=7)

    second = run(f"#!/bin/bash\ntouch '{attempt}/ran-twice'\n", attempt, job_id=8)

    assert second.returncode == ALREADY_CLAIMED
    assert "job 7 has claimed" in second.stderr
    assert (attempt / "claim").read_text().startswith("7 0 ")
    assert (attempt / "exit_code").read_text() == "0\n"
    assert not (attempt / "ran-twice").exists()


def test_the_same_job_runs_again_after_a_requeue(attempt: Path) -> None:
    """Slurm ends what it puts back into the queue; a program may turn that SIGTERM into any exit code."""
    for restarts in ("0", "1"):
        first = start(
            f"#!/bin/bash\ntrap 'exit 1' TERM\ntouch '{attempt}/up'\nsleep 100 & wait\n",
            attempt,
            SLURM_RESTART_COUNT=restarts,
        )
        wait_until((attempt / "up").exists)
        os.killpg(first.pid, signal.SIGTERM)
        assert first.wait(timeout=120) == 1
        (attempt / "up").unlink()

    again = run("#!/bin/bash\nexit 0\n", attempt, SLURM_RESTART_COUNT="2")

    assert again.returncode == 0
    assert (attempt / "claim").read_text().startswith("7 2 ")
    assert (attempt / "exit_code").read_text() == "0\n"


@pytest.mark.parametrize("code", [1, 143])
def test_a_requeue_that_ends_the_ranks_before_the_batch_shell_runs_the_script_again(code: int, attempt: Path) -> None:
    """Slurm ends the ranks of another node first, srun and the script with them, and this node a moment later."""
    first = start(f"#!/bin/bash\nexit {code}\n", attempt, SLURM_JOB_NUM_NODES="2")
    wait_until((attempt / "exit_code").exists)
    time.sleep(1)
    os.killpg(first.pid, signal.SIGTERM)
    first.communicate(timeout=60)

    second = run("#!/bin/bash\nexit 0\n", attempt, SLURM_RESTART_COUNT="1", SLURM_JOB_NUM_NODES="2")

    assert first.returncode == code
    assert second.returncode == 0, second.stderr
    assert (attempt / "exit_code").read_text() == "0\n"


@pytest.mark.parametrize("code", [0, 13])
def test_a_script_that_ended_by_itself_is_not_run_again(code: int, attempt: Path) -> None:
    """RequeueExit of slurm.conf does not honour --no-requeue."""
    run(f"#!/bin/bash\nexit {code}\n", attempt)

    for restarts in ("1", "2"):
        again = run(f"#!/bin/bash\ntouch '{attempt}/ran-twice'\n", attempt, SLURM_RESTART_COUNT=restarts)

        assert again.returncode == ALREADY_CLAIMED
        assert f"job 7 ends: its script ended with {code} by itself, and Slurm started it again" in again.stderr
    assert (attempt / "exit_code").read_text() == f"{code}\n"
    assert not (attempt / "ran-twice").exists()
    assert sorted(entry.name for entry in attempt.iterdir()) == [ATTEMPT_FILE, "claim", "exit_code"]


@pytest.mark.parametrize("restarts", ["0", "1"])
def test_a_job_that_slurm_starts_twice_without_a_requeue_runs_once(restarts: str, attempt: Path) -> None:
    """A slurmctld that was killed before it had saved a start makes it again; what was started runs on elsewhere."""
    run("#!/bin/bash\nexit 5\n", attempt, SLURM_RESTART_COUNT="1")

    again = run(f"#!/bin/bash\ntouch '{attempt}/ran-twice'\n", attempt, SLURM_RESTART_COUNT=restarts)

    assert again.returncode == ALREADY_CLAIMED
    assert (attempt / "exit_code").read_text() == "5\n"
    assert not (attempt / "ran-twice").exists()


def test_of_many_jobs_at_once_one_runs(attempt: Path) -> None:
    script = f"#!/bin/bash\necho $SLURM_JOB_ID >> '{attempt.parent}/ran'\nsleep 0.3\n"

    processes = [start(script, attempt, job_id) for job_id in range(10, 22)]
    codes = [process.wait(timeout=300) for process in processes]
    for process in processes:
        process.communicate()

    assert sorted(codes) == [0] + [ALREADY_CLAIMED] * 11
    assert (attempt.parent / "ran").read_text().split() == (attempt / "claim").read_text().split()[:1]


@pytest.mark.parametrize("left", ["nothing", "the folders of the output file"])
def test_a_node_that_does_not_see_the_workspace_is_named(left: str, attempt: Path) -> None:
    """slurmstepd makes the folders of an output file, on a node's own disk where the workspace is not mounted."""
    shutil.rmtree(attempt)
    if left != "nothing":
        (attempt / "nemorun/experiments").mkdir(parents=True)

    result = run("#!/bin/bash\necho never\n", attempt, SLURMD_NODENAME="node17")

    assert result.returncode == NOT_VISIBLE
    assert f"workspace not visible on node17: {attempt}" in result.stderr
    assert result.stdout == ""


def test_a_script_killed_with_all_its_processes_by_sigterm_leaves_its_exit_code(attempt: Path) -> None:
    process = start(f"#!/bin/bash\ntouch '{attempt.parent}/up'\nsleep 60\n", attempt)
    wait_until((attempt.parent / "up").exists)

    os.killpg(process.pid, signal.SIGTERM)
    _, err = process.communicate(timeout=120)

    assert process.returncode == 143, err
    assert (attempt / "exit_code").read_text() == "143\n"


@pytest.mark.parametrize(
    ("shell", "name"),
    # A plain sh cannot undo that SIGINT is ignored in background commands; bash can.
    [("/bin/bash", name) for name in ("TERM", "USR1", "INT")] + [("/bin/sh", name) for name in ("TERM", "USR1")],
)
def test_a_signal_to_the_batch_shell_alone_reaches_the_script(shell: str, name: str, attempt: Path) -> None:
    body = f"trap 'echo saved; exit 4' {name}\ntouch '{attempt.parent}/up'\nfor i in $(seq 600); do sleep 0.1; done\n"
    process = start(f"#!{shell}\n{body}", attempt)
    wait_until((attempt.parent / "up").exists)

    process.send_signal(getattr(signal, f"SIG{name}"))
    out, _ = process.communicate(timeout=120)

    assert out == "saved\n"
    assert process.returncode == 4
    assert (attempt / "exit_code").read_text() == "4\n"


def test_a_script_that_survives_a_signal_is_waited_for(attempt: Path) -> None:
    body = (
        f"trap 'echo checkpoint' USR1\ntouch '{attempt.parent}/up'\nfor i in $(seq 20); do sleep 0.05; done\nexit 6\n"
    )
    process = start(f"#!/bin/bash\n{body}", attempt)
    wait_until((attempt.parent / "up").exists)

    process.send_signal(signal.SIGUSR1)
    out, _ = process.communicate(timeout=120)

    assert (out, process.returncode) == ("checkpoint\n", 6)
    assert (attempt / "exit_code").read_text() == "6\n"


@pytest.mark.parametrize("first", ["#!/usr/bin/env python3", "echo no shebang", ""])
def test_what_is_no_shell_script_is_refused(first: str, attempt: Path) -> None:
    with pytest.raises(LaunchRefused, match="not a shell script"):
        wrap_script(f"{first}\nprint(1)\n", attempt)


@pytest.mark.parametrize("shell", ["/bin/bash", "/bin/sh"])
@pytest.mark.parametrize("name", ["exit_code", "claim", ".pid.7"])
def test_a_fifo_in_place_of_a_file_that_the_guard_reads_does_not_hold_the_job(
    shell: str, name: str, attempt: Path
) -> None:
    """Put there in the moment before it is read: by the `mv` and the `ln` that make these files, or by the script."""
    tools = attempt.parent / "tools"
    tools.mkdir()
    swap = f"rm -f '{attempt}/{name}'; mkfifo '{attempt}/{name}'"
    for tool in {"exit_code": ["mv"], "claim": ["ln"]}.get(name, []):
        (tools / tool).write_text(f'#!/bin/sh\n{shutil.which(tool)} "$@"\n{swap}\n')
        (tools / tool).chmod(0o755)
    body = (
        f"trap 'exit 4' TERM\n{swap if name == '.pid.7' else ''}\ntouch '{attempt.parent}/up'\nsleep 1 & wait\nexit 5\n"
    )

    process = start(f"#!{shell}\n{body}", attempt, PATH=f"{tools}:{os.environ['PATH']}")
    if name == ".pid.7":
        wait_until((attempt.parent / "up").exists)
        process.send_signal(signal.SIGTERM)
    try:
        process.communicate(timeout=20)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)

    assert process.returncode == (ALREADY_CLAIMED if name == "claim" else 5)
