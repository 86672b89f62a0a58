"""Slurm's commands on the embedded cluster, in the forms that batch scripts and NeMo-Run 0.11 call; no others.

For users at a shell there are `nightbridge status` and `nightbridge cancel`. Standard library only; a module that one
command alone needs is imported when it runs, because srun starts often.
"""

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from nightbridge.embedded.jobs import inspect, job_dir
from nightbridge.embedded.notation import hostnames
from nightbridge.errors import InvalidInput, NightbridgeError


def main(arguments: Sequence[str]) -> int:
    """Run a command; return its exit code. First comes the cluster's folder, then the command's name."""
    root, name, *words = arguments
    try:
        if name not in _COMMANDS:
            raise _unknown_form(name, words)
        return _COMMANDS[name](Path(root), words)
    except NightbridgeError as error:
        sys.stderr.write(f"{name}: error: {error}\n")
    except OSError as error:
        sys.stderr.write(f"{name}: error: {error.strerror}: {error.filename}\n")
    return 1


def _sbatch(root: Path, words: list[str]) -> int:
    from nightbridge.embedded.sbatch import main as sbatch

    return sbatch(root, words)


def _srun(root: Path, words: list[str]) -> int:
    from nightbridge.embedded.srun import main as srun

    return srun(words)


def _squeue(root: Path, words: list[str]) -> int:
    """NeMo-Run's query whether a job still waits: `squeue --start --noheader -j ID -o '%i|%S|%T'`."""
    match words:
        case ["--start", "--noheader", "-j", job_id, "-o", "%i|%S|%T"] if job_id.isdigit():
            job = inspect(job_dir(root, int(job_id)))
        case _:
            raise _unknown_form("squeue", words)
    if job is None:
        sys.stderr.write("slurm_load_jobs error: Invalid job id specified\n")
        return 1
    if job.state == "PENDING":
        print(f"{job_id}|N/A|PENDING")
    return 0


def _sacct(root: Path, words: list[str]) -> int:
    """NeMo-Run's query for the state of a job: `sacct --parsable2 -j ID`."""
    match words:
        case ["--parsable2", "-j", job_id] if job_id.isdigit():
            job = inspect(job_dir(root, int(job_id)))
        case _:
            raise _unknown_form("sacct", words)
    print("JobID|JobName|Partition|Account|AllocCPUS|State|ExitCode")
    if job is not None:
        request, end = job.request, job.end
        state = {"COMPLETING": "RUNNING", "CANCELLED": f"CANCELLED by {request.uid}"}.get(job.state, job.state)
        code = f"{end.exit_code or 0}:{end.signal or 0}" if end is not None else "0:0"
        cells = (job.job_id, request.name, request.partition, request.account, request.tasks, state, code)
        print("|".join(str(cell) for cell in cells))
    return 0


def _scontrol(root: Path, words: list[str]) -> int:
    """Batch scripts' query for the names of their nodes: `scontrol show hostnames LIST`."""
    match words:
        case ["show", "hostnames", expression]:
            pass
        case ["show", "hostnames"] if "SLURM_JOB_NODELIST" in os.environ:
            expression = os.environ["SLURM_JOB_NODELIST"]
        case _:
            raise _unknown_form("scontrol", words)
    print("\n".join(hostnames(expression)))
    return 0


def _unknown_form(command: str, words: Sequence[str]) -> InvalidInput:
    advice = "See its jobs with `nightbridge status`, end them with `nightbridge cancel`"
    return InvalidInput("not possible on the embedded cluster", subject=" ".join([command, *words]), advice=advice)


_COMMANDS: dict[str, Callable[[Path, list[str]], int]] = {
    "sbatch": _sbatch,
    "srun": _srun,
    "squeue": _squeue,
    "sacct": _sacct,
    "scontrol": _scontrol,
}
