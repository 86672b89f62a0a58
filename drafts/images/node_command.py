"""A program that runs once on a compute node, through srun, while we wait: for what the submitting host cannot do."""

import logging
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from nightbridge.errors import NightbridgeError, PermanentError, TransientError
from nightbridge.models import ClusterSettings
from nightbridge.processes import Finished, run
from nightbridge.slurm.command_line import CommandLineCluster
from nightbridge.slurm.environment import without_slurm
from nightbridge.slurm.refusals import last_line, refusal_of
from nightbridge.slurm.states import TERMINAL

log = logging.getLogger(__name__)

# What srun says when there was no job, or when the job was taken away from it; texts of Slurm 22.05 to 26.05.
_NO_JOB = re.compile(
    r"^srun: error: (Unable to (allocate|create|contact|confirm)|Invalid|Job submit|.*(unrecognized|invalid) option)"
    r"|^srun: (unrecognized|invalid) option|^srun: fatal:",
    re.MULTILINE,
)
_TIME_LIMIT = re.compile(r"DUE TO TIME LIMIT")
_TAKEN_AWAY = re.compile(
    r"CANCELLED AT|Job allocation .* has been revoked|Node failure|DUE TO (NODE FAILURE|PREEMPTION)"
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

    The caller makes sure that nobody else uses the name: a job of this name that still lives belongs to a process that
    was killed, and is cancelled first.

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
        PermanentError: The job ran into Slurm's time limit, or there is no srun here.
        TransientError: Slurm takes no job now or does not answer, the job lost its node, or `timeout` is over.

    """
    cluster = CommandLineCluster(settings)
    variables = _variables(cluster) | dict(environment)
    program = shutil.which("srun", path=variables["PATH"])
    if program is None:
        raise PermanentError("command not found", thing="srun", advice="Set the cluster's bin_dir")
    _cancel_all(cluster, name)
    ended = False
    try:
        finished = run(
            [program, *_options(settings, name), *options, *argv],
            environment=variables,
            timeout=timeout,
            given=given,
            on_line=on_line,
        )
        ended = True
    finally:
        if not ended:
            _cancel_all(cluster, name)
    if finished.code and (error := _slurms_own(finished, name)):
        raise error
    return finished


def _variables(cluster: CommandLineCluster) -> dict[str, str]:
    """What srun needs; the rest of this process's environment, with its keys and tokens, is no business of the job."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "USER", "LOGNAME", "LANG", "TZ") if name in os.environ}
    ours = {name: value for name, value in without_slurm(os.environ).items() if name == "SLURM_CONF"}
    return {"PATH": os.defpath} | kept | ours | cluster.launch_environment()


def _options(settings: ClusterSettings, name: str) -> list[str]:
    named = {
        "partition": settings.partition,
        "account": settings.account,
        "qos": settings.qos,
        "reservation": settings.reservation,
    }
    asked = [f"--{option}={value}" for option, value in named.items() if value]
    return [f"--job-name={name}", "--nodes=1", "--ntasks=1", "--mpi=none", "--chdir=/", *asked]


def _cancel_all(cluster: CommandLineCluster, name: str) -> None:
    # A job that is not found now goes on beside the next one, and works in a folder of its own.
    with suppress(NightbridgeError):
        for job in cluster.find(name).jobs:
            if job.state not in TERMINAL:
                log.info("cancelling job %d, %s: nobody waits for it", job.job_id, name)
                cluster.cancel(job.job_id)


def _slurms_own(finished: Finished, name: str) -> NightbridgeError | None:
    """The error of a job that Slurm did not run, or did not let end; None where the program itself failed."""
    said = finished.stderr
    if _NO_JOB.search(said):
        return refusal_of(said, name)
    if _TIME_LIMIT.search(said):
        return PermanentError(
            f"Slurm's time limit was over ({last_line(said)})",
            thing=name,
            advice="Allow it more with --time in srun_args",
        )
    if _TAKEN_AWAY.search(said):
        return TransientError(f"the job was cancelled or lost its node ({last_line(said)})", thing=name)
    return None
