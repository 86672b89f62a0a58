"""A program that runs once on a compute node, through srun, while we wait: for what the submitting host cannot do."""

import logging
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from nightbridge.errors import NightbridgeError, TransientError
from nightbridge.models import ClusterSettings
from nightbridge.processes import Finished, run
from nightbridge.slurm.command_line import CommandLineCluster
from nightbridge.slurm.sbatch_errors import last_line, refusal_of
from nightbridge.slurm.states import TERMINAL, live_jobs

log = logging.getLogger(__name__)

ENDING_SECONDS = 180.0
"""How long a cancelled job may take to be gone: Slurm's KillWait, 30 s unless the site changed it, and an epilog."""

_KEPT_VARIABLES = ("PATH", "HOME", "USER", "LOGNAME", "LANG", "TZ", "SLURM_CONF", "SLURM_CONF_SERVER")

# Slurm's messages when a job was ended early, and when there never was one; texts of Slurm 22.05 to 26.05.
_ENDED_EARLY = re.compile(
    r"CANCELLED AT|DUE TO (TIME LIMIT|NODE FAILURE|PREEMPTION)|[Jj]ob allocation .* has been revoked|Node failure"
    r"|Force Terminated job|oom-kill|Out Of Memory",
    re.IGNORECASE,
)
_NO_JOB = re.compile(
    r"^srun: error: (Unable to (allocate|create|contact|confirm)|Invalid|Job submit|.*(unrecognized|invalid) option)"
    r"|^srun: (unrecognized|invalid) option|^srun: fatal:",
    re.MULTILINE,
)


def run_on_node(
    settings: ClusterSettings,
    name: str,
    argv: Sequence[str],
    *,
    environment: Mapping[str, str],
    timeout: float,
    options: Sequence[str] = (),
    given: bytes = b"",
    on_line: Callable[[str], None] | None = None,
) -> Finished:
    """Run a program as a job of one task, and return how it ended once it has.

    The caller makes sure that no other process uses the name: a job of this name that still lives belongs to a process
    that was killed, and is ended first.

    Args:
        settings: The cluster.
        name: The job's name.
        argv: The program and its arguments, as the node knows them.
        environment: Variables of the program besides PATH and HOME, which are this process's.
        timeout: Seconds for waiting in the queue and running together; then the job is cancelled.
        options: Further options of srun.
        given: The program's standard input; it passes through Slurm and is written down nowhere.
        on_line: Called with each line of the program's stderr as it comes.

    Raises:
        LaunchRefused: Slurm refused the job for good.
        PermanentError: There is no srun here.
        TransientError: Slurm accepts no job now or does not answer, the job was cancelled, ran into its time or memory
            limit, or lost its node, or `timeout` is over.
    """
    cluster = CommandLineCluster(settings)
    # What srun needs; the rest of this process's environment, with its keys and tokens, stays out of the job.
    kept = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
    variables = {"PATH": os.defpath, **kept, **cluster.launch_environment(), **environment}
    program = cluster.program("srun")
    _wait_for_end(cluster, _cancel_all(cluster, name), name)
    try:
        finished = run(
            [
                *(program, f"--job-name={name}", "--nodes=1", "--ntasks=1", "--mpi=none", "--chdir=/"),
                *settings.options("partition", "account", "qos", "reservation"),
                *(*options, *argv),
            ],
            environment=variables,
            timeout=timeout,
            given=given,
            on_line=on_line,
        )
    except BaseException:
        with suppress(NightbridgeError):
            _cancel_all(cluster, name)
        raise
    if finished.code and (error := _slurm_error(finished, name)):
        raise error
    return finished


def _cancel_all(cluster: CommandLineCluster, name: str) -> list[int]:
    """Cancel the jobs of a name that live; return their ids."""
    live = live_jobs(name, cluster.find(name), cluster.states)
    for job_id in live:
        log.info("cancelling job %d, %s: orphaned", job_id, name)
        cluster.cancel(job_id)
    return live


def _wait_for_end(cluster: CommandLineCluster, job_ids: Sequence[int], name: str) -> None:
    """Wait until cancelled jobs are gone: what they are still writing must not interfere with the next one."""
    patience = time.monotonic() + ENDING_SECONDS
    while any(job.state not in TERMINAL for job in cluster.states(job_ids).values()):
        if time.monotonic() > patience:
            raise TransientError("an earlier job of this name was cancelled and does not end", subject=name)
        time.sleep(1)


def _slurm_error(finished: Finished, name: str) -> NightbridgeError | None:
    """The error of a job that Slurm did not run, or did not let end; None where the program itself failed."""
    if _ENDED_EARLY.search(finished.stderr):
        return TransientError(
            f"Slurm did not let the job end ({finished.tail})",
            subject=name,
            advice="Will retry; if its time or memory was too small, raise the limits with srun_args",
        )
    if _NO_JOB.search(finished.stderr):
        return refusal_of(finished.stderr, name)
    if finished.code < 0:
        return TransientError(
            f"srun was killed by signal {-finished.code} ({last_line(finished.stderr)})", subject=name
        )
    return None
