"""The `sbatch` on the launcher's PATH, so that an attempt has exactly one job.

The launcher calls `sbatch --requeue --parsable SCRIPT`. The shim looks the attempt's job up, declares its intent,
submits a guarded copy of the script under the attempt's name, records the job, and prints its numeric id alone. It
prints the same id again when it is called again.

Exit codes: 0 with an id on stdout; 75 (EX_TEMPFAIL) for what may work later; 1 for what will not. A refusal leaves
`refusal.json` in the attempt's folder and one line on stderr.
"""

import contextlib
import errno
import os
import shlex
import shutil
import socket
import stat
import subprocess
import sys
import uuid
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path

from nightbridge.errors import DamagedData, InvalidInput, PermanentError, StatusUnknown, TransientError
from nightbridge.files import create_model, quota_error, write_atomically, write_model
from nightbridge.models import utc_now
from nightbridge.processes import own_program
from nightbridge.sbatch_options import OWN_OPTIONS, SBATCH, SUBMITS_NOTHING, split_options
from nightbridge.slurm.attempt_files import (
    CLUSTER_NAME,
    JOB_SCRIPT,
    REFUSAL_FILE,
    SUBMISSION_FILE,
    AttemptContext,
    Intent,
    Submission,
    SubmitRefusal,
    check_can_know,
    claimed_at,
    declare_intent,
    intent_of,
    newest_intent,
    own_jobs,
    read_attempt,
    read_claim,
    read_intents,
    read_submission,
)
from nightbridge.slurm.attempts import fitting_options
from nightbridge.slurm.command_line import without_slurm
from nightbridge.slurm.factory import open_cluster
from nightbridge.slurm.protocol import Cluster, JobNotAccepted
from nightbridge.slurm.script import read_script, wrap_script

TEMPORARY_FAILURE = 75
PERMANENT_FAILURE = 1

ATTEMPT_VARIABLE = "NIGHTBRIDGE_ATTEMPT"

# sbatch hands its environment on to the job. These belong to the process that runs the pipeline: where its Prefect and
# its store are, with what keys, and which Python it is.
_OWN_PREFIXES = ("PREFECT_", "AWS_", "NIGHTBRIDGE_")
_OWN_NAMES = frozenset({"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "VIRTUAL_ENV_PROMPT", "__PYVENV_LAUNCHER__"})

# What the submit stage adds for the launcher alone. (Not PYTHONDONTWRITEBYTECODE: a job that has the checkout mounted
# must not write into it either.)
_LAUNCHER_ONLY = frozenset({ATTEMPT_VARIABLE, "COLUMNS"})

# An intent whose process still lives forbids another one for this long: a stopped process may resume and submit.
_STALLED_AFTER = timedelta(minutes=10)


def launcher_base(environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` without Slurm's variables and without what belongs to the pipeline's own process."""
    return {
        name: value
        for name, value in without_slurm(environ).items()
        if name not in _OWN_NAMES and not name.startswith(_OWN_PREFIXES)
    }


def install_shim(attempt_dir: Path) -> Path:
    """Put our `sbatch` into the attempt's `bin` folder, which goes first on the launcher's PATH; return the folder."""
    folder = attempt_dir / "bin"
    command = shlex.join(own_program("nightbridge.slurm.sbatch_shim"))
    text = f'#!/bin/sh\n{ATTEMPT_VARIABLE}={shlex.quote(str(attempt_dir))} exec {command} "$@"\n'
    _write_program(folder / "sbatch", text)
    return folder


def _write_program(path: Path, text: str) -> None:
    """Write an executable in a process of its own.

    In this one, another thread that starts a command at that moment would hand it our open file, and until that command
    has replaced its image the kernel refuses to run ours: "Text file busy".
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    written = subprocess.run(
        ["/bin/sh", "-c", 'cat > "$1" && chmod +x "$1" && mv -f "$1" "$2"', "sh", str(temporary), str(path)],
        input=text.encode(),
        capture_output=True,
        check=False,
        env={"PATH": os.environ.get("PATH", os.defpath)},
    )
    if written.returncode:
        temporary.unlink(missing_ok=True)
        reason = written.stderr.decode(errors="replace").strip()
        if os.strerror(errno.EDQUOT) in reason:
            raise quota_error(path)
        raise TransientError(f"cannot be written: {reason}", subject=str(path), advice="Will retry")


def submit_once(context: AttemptContext, cluster: Cluster, script: Path, options: Sequence[str]) -> Submission:
    """Return the attempt's job, submitting it if there is none.

    `script` and `options` are the launcher's, without the options that the shim decides.

    Raises:
        TransientError: It is not certain that there is no job, or the cluster takes none now.
        PermanentError: The cluster refused the job.
    """
    # Before the lookup: an intent that appears after it means that another process is submitting.
    seen = newest_intent(context.attempt_dir)
    if submission := find_submission(context, cluster):
        return submission
    launcher_text = read_script(script)
    guarded = wrap_script(launcher_text, context.attempt_dir)
    experiment_dir = experiment_dir_of(script)
    name = cluster.configured(CLUSTER_NAME)
    intent = declare_intent(context.attempt_dir, script, experiment_dir, after=seen, slurm_cluster=name)
    if intent is None:
        raise TransientError(
            "another process is submitting this attempt", subject=context.name, advice="Will look it up again"
        )
    try:
        copy = context.attempt_dir / JOB_SCRIPT
        write_atomically(copy, guarded.encode())
        copy.chmod(copy.stat().st_mode | stat.S_IXUSR)
        job_id = cluster.submit(context.name, copy, fitting_options([*options, *context.sbatch_options], launcher_text))
    except (JobNotAccepted, PermanentError):
        intent.unlink(missing_ok=True)  # no job exists, so no process needs to wait for it
        raise
    return _record(context, job_id, script, experiment_dir, submitted_at=utc_now())


def find_submission(context: AttemptContext, cluster: Cluster) -> Submission | None:
    """The attempt's job: as recorded, else found in the cluster by the attempt's name and recorded now.

    Its claim alone is enough where every source has forgotten the job, as when slurmdbd was away for long.

    Returns:
        None only when there certainly is no job: every source answered, no intent is younger than the horizon, and no
        job has claimed the attempt.

    Raises:
        TransientError: It is not certain.
        DamagedData: There is one, and nothing here tells what it runs and where its output is: another workspace has
            submitted it, or this one before it was made anew.
    """
    if submission := read_submission(context.attempt_dir):
        return submission
    lookup = own_jobs(context.attempt_dir, cluster)
    claimant = read_claim(context.attempt_dir)
    if lookup.jobs:
        # Of several jobs of one name, the one that claimed the attempt; else the first, which will.
        job = min(lookup.jobs, key=lambda job: (job.job_id != claimant, job.job_id))
        return _record_found(context, job.job_id, job.submitted_at or utc_now())
    if claimant is not None:
        return _record_found(context, claimant, claimed_at(context.attempt_dir))
    check_can_know(context.attempt_dir, cluster)
    for intent in read_intents(context.attempt_dir):
        _check_intent(context, intent, cluster.accounting_horizon)
    if not lookup.complete:
        raise StatusUnknown(
            "cannot tell whether the job exists: squeue or sacct did not answer",
            subject=context.name,
            advice="Will look it up again",
        )
    if lookup.others:
        raise _foreign(context, lookup.others[0].job_id)
    return None


def experiment_dir_of(script: Path) -> Path:
    """The folder that the launcher made for a job: `<exp>/<title>` for NeMo-Run's `<exp>/<title>_sbatch.sh`."""
    title = script.name.removesuffix("_sbatch.sh")
    return script.parent / title if title != script.name else script.parent


def main(arguments: Sequence[str]) -> int:
    """Stand in for sbatch; return the exit code."""
    folder = os.environ.get(ATTEMPT_VARIABLE)
    if not folder:
        print(f"sbatch: error: {ATTEMPT_VARIABLE} is not set", file=sys.stderr)
        return PERMANENT_FAILURE
    attempt_dir = Path(folder)
    _restore_environment(attempt_dir)
    try:
        context = read_attempt(attempt_dir)
        cluster = open_cluster(context.cluster, context.workspace)
        options, script = _read_arguments(arguments, cluster)
        submission = submit_once(context, cluster, script, options)
    except (TransientError, PermanentError) as error:
        return _refuse(attempt_dir, error)
    except OSError as error:
        name = str(error.filename or attempt_dir)
        return _refuse(attempt_dir, TransientError(error.strerror or str(error), subject=name, advice="Will retry"))
    print(submission.job_id)
    return 0


def _restore_environment(attempt_dir: Path) -> None:
    """Undo what was for the launcher alone: the job gets this environment, and the real sbatch must be found."""
    for name in _LAUNCHER_ONLY:
        os.environ.pop(name, None)
    folders = os.environ.get("PATH", os.defpath).split(os.pathsep)
    os.environ["PATH"] = os.pathsep.join(one for one in folders if one.rstrip("/") != str(attempt_dir / "bin"))


def _read_arguments(arguments: Sequence[str], cluster: Cluster) -> tuple[list[str], Path]:
    options, rest = split_options(arguments, SBATCH)
    if not SUBMITS_NOTHING.isdisjoint(options):
        _become_sbatch(arguments, cluster)
    if not rest or "wrap" in options or "array" in options:
        raise InvalidInput(
            "sbatch was called without a script, or with --wrap or --array", advice="Submit one script file"
        )
    kept = {name: value for name, value in options.items() if name not in OWN_OPTIONS}
    # What follows the script are its own arguments; no launcher passes any.
    if len(rest) > 1:
        raise InvalidInput(f"unexpected arguments after the script: {shlex.join(rest[1:])}", subject=rest[0])
    return [f"--{name}={value}" if value else f"--{name}" for name, value in kept.items()], Path(rest[0]).absolute()


def _become_sbatch(arguments: Sequence[str], cluster: Cluster) -> None:
    """Pass a query that submits nothing to the real command."""
    environment = dict(os.environ) | cluster.launch_environment()
    program = shutil.which("sbatch", path=environment["PATH"])
    if program is None:
        raise PermanentError("command not found", subject="sbatch")
    os.execve(program, [program, *arguments], environment)


def _check_intent(context: AttemptContext, intent: Intent, horizon: float) -> None:
    """Raise while a job of this intent may still appear."""
    age = utc_now() - intent.at
    left = timedelta(seconds=horizon) - age
    if left > timedelta():
        raise StatusUnknown(
            f"{intent.host} may have submitted this attempt {age.total_seconds():.0f} s ago",
            subject=context.name,
            advice=f"Retry in {left.total_seconds():.0f} s, when accounting is guaranteed to list it",
        )
    if age < _STALLED_AFTER and _lives(intent):
        raise TransientError(f"process {intent.pid} on {intent.host} is submitting this attempt", subject=context.name)


def _lives(intent: Intent) -> bool:
    """Whether the process that declared an intent still runs on this host; the processes of other hosts are unknown."""
    if intent.host != socket.gethostname() or intent.pid == os.getpid():
        return False
    try:
        os.kill(intent.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _record_found(context: AttemptContext, job_id: int, submitted_at: datetime) -> Submission:
    intent = intent_of(context.attempt_dir, submitted_at)
    if intent is None:
        raise _foreign(context, job_id)
    script, folder = intent.launcher_script, intent.experiment_dir
    return _record(context, job_id, script, folder, submitted_at=submitted_at, found=True)


def _foreign(context: AttemptContext, job_id: int) -> DamagedData:
    return DamagedData(
        f"Slurm has job {job_id} of the name {context.name}, and no record here says what it runs",
        subject=str(context.attempt_dir),
        advice="If another workspace of yours runs this night, give one of them another night id; else cancel the "
        "job, or let it end, and give this night another id",
    )


def _record(
    context: AttemptContext,
    job_id: int,
    script: Path,
    experiment_dir: Path,
    *,
    submitted_at: datetime,
    found: bool = False,
) -> Submission:
    """Record the job unless another process has; what is recorded first counts.

    Raises:
        StatusUnknown: The job is there, and its record cannot be written now.
    """
    submission = Submission(
        job_id=job_id,
        name=context.name,
        cluster=context.cluster.name,
        script=context.attempt_dir / JOB_SCRIPT,
        launcher_script=script,
        experiment_dir=experiment_dir,
        submitted_at=submitted_at,
        found=found,
    )
    try:
        create_model(context.attempt_dir / SUBMISSION_FILE, submission)
    except (TransientError, PermanentError, OSError) as error:
        # Whatever it is, and a full disk is permanent anywhere else: to give up would leave the job unwatched.
        raise StatusUnknown(
            f"job {job_id} is in Slurm and cannot be recorded ({error})", subject=context.name, advice="Will try again"
        ) from error
    return read_submission(context.attempt_dir) or submission


def _refuse(attempt_dir: Path, error: TransientError | PermanentError) -> int:
    with contextlib.suppress(TransientError, PermanentError, OSError):
        write_model(attempt_dir / REFUSAL_FILE, SubmitRefusal.of(error))
    print(f"sbatch: error: {' '.join(str(error).split())}", file=sys.stderr)
    return TEMPORARY_FAILURE if isinstance(error, TransientError) else PERMANENT_FAILURE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
