"""Submitting an attempt through the upstream launcher, with our `sbatch` first on its PATH. See `sbatch_shim`."""

import contextlib
import os
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import IO

from nightbridge.errors import PermanentError, TransientError
from nightbridge.files import write_atomically, write_model
from nightbridge.models import LAUNCHER_HOME, Job, LaunchPlan, utc_now
from nightbridge.processes import GUARD
from nightbridge.secrets import mask_secrets
from nightbridge.slurm import preflight
from nightbridge.slurm.attempt_files import (
    ATTEMPT_FILE,
    AttemptContext,
    Submission,
    read_refusal,
    read_submission,
)
from nightbridge.slurm.attempts import merged_options
from nightbridge.slurm.environment import launcher_base
from nightbridge.slurm.protocol import Cluster
from nightbridge.slurm.sbatch_shim import ATTEMPT_VARIABLE, find_submission, install_shim

LAUNCHER_TIMEOUT = 1800.0
"""Seconds for the launcher: it packages the repository, which is slow on a shared file system, and calls sbatch."""

_KILL_WAIT = 10.0
_REMEMBERED_LINES = 50
_LAUNCHER_LOG = "launcher.log"


def submit_attempt(
    plan: LaunchPlan,
    context: AttemptContext,
    cluster: Cluster,
    secrets: Mapping[str, str],
    *,
    withheld: Collection[str] = (),
    timeout: float = LAUNCHER_TIMEOUT,
) -> Job:
    """Return the attempt's one job: the recorded one, the one that the cluster knows, else a new one.

    Args:
        plan: What is started.
        context: The attempt, opened and recorded.
        cluster: Where it is submitted.
        secrets: Environment variables with their values, for the launcher's environment alone; masked in its log.
        withheld: Environment variables that neither the launcher nor the job may see, such as the store's keys.
        timeout: Seconds after which the launcher is killed.

    Raises:
        TransientError: It is not certain whether there is a job, the cluster takes none now, or the launcher hung.
        LaunchRefused: Slurm refused the job for good.
        PermanentError: The launcher failed before it submitted anything.

    """
    if submission := find_submission(context, cluster):
        return _job_of(context, submission)
    preflight.check(plan, context, cluster)
    _record_options(plan, context)
    if plan.batch_script is not None:
        write_atomically(Path(plan.argv[-1]), plan.batch_script.encode())
    began = utc_now()
    launcher = _Launcher(plan, _environment(plan, context, cluster, secrets, withheld), secrets)
    code = launcher.run(timeout)
    # Whatever the launcher says of its end: with a job recorded, the job goes on, and without one there is none to wait
    # for. Upstream's launcher ends with 0 or 1 for many reasons that have nothing to do with the job.
    if submission := read_submission(context.attempt_dir):
        return _job_of(context, submission)
    if refusal := read_refusal(context.attempt_dir, since=began):
        raise refusal.error()
    log = str(context.attempt_dir / _LAUNCHER_LOG)
    if code is None:
        raise TransientError(f"the launcher did not end within {timeout:.0f} s", thing=log, advice="It was killed")
    raise PermanentError(
        f"the launcher ended with {code} and submitted nothing: {launcher.last_words()}",
        thing=log,
        advice="Read the log",
    )


class _Launcher:
    """One run of the launcher, its output masked line by line on the way to its log."""

    def __init__(self, plan: LaunchPlan, environment: Mapping[str, str], secrets: Mapping[str, str]) -> None:
        self._plan = plan
        self._environment = environment
        self._secrets = tuple(secrets.values())
        self._last_lines: deque[str] = deque(maxlen=_REMEMBERED_LINES)

    def run(self, timeout: float) -> int | None:
        """Run it to its end; return its exit code, None when it ran into the time limit and was killed."""
        process = self._start()
        reader = threading.Thread(target=self._copy, args=(process.stdout,), daemon=True)
        with GUARD.over(process):
            reader.start()
            try:
                return process.wait(timeout=timeout)
            except subprocess.TimeoutExpired:
                return None
            finally:
                _end_group(process)
                # Not for ever: what left the launcher's session may hold its output open.
                reader.join(timeout=_KILL_WAIT)

    def last_words(self) -> str:
        """The last line that says something: an error's rather than what follows it."""
        lines = [line.strip() for line in self._last_lines if any(letter.isalnum() for letter in line)]
        errors = [line for line in lines if "Error" in line or "error:" in line]
        return (errors or lines or ["it printed nothing"])[-1][:500]

    def _start(self) -> "subprocess.Popen[str]":
        try:
            return subprocess.Popen(
                self._plan.argv,
                cwd=self._plan.cwd,
                env=dict(self._environment),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                # Its own session: Ctrl-C of a person reaches us first, and everything that it started can be ended.
                start_new_session=True,
            )
        except OSError as error:
            raise PermanentError(
                f"the launcher cannot be started: {error.strerror}", thing=str(error.filename or self._plan.argv[0])
            ) from error

    def _copy(self, output: IO[str]) -> None:
        began = f"--- {utc_now().isoformat(timespec='seconds')} {self._masked(' '.join(self._plan.argv))}\n"
        try:
            with (self._plan.attempt_dir / _LAUNCHER_LOG).open("a", encoding="utf-8") as log:
                log.write(began)
                for line in output:
                    self._last_lines.append(self._masked(line))
                    log.write(self._last_lines[-1])
                    log.flush()
        except OSError as error:
            # The launcher would hang at a full pipe: it is read on, without a log.
            self._last_lines.append(f"the log cannot be written: {error.strerror}\n")
            self._last_lines.extend(self._masked(line) for line in output)

    def _masked(self, text: str) -> str:
        return mask_secrets(text, self._secrets)


def _environment(
    plan: LaunchPlan,
    context: AttemptContext,
    cluster: Cluster,
    secrets: Mapping[str, str],
    withheld: Collection[str],
) -> dict[str, str]:
    inherited = {name: value for name, value in launcher_base(os.environ).items() if name not in withheld}
    environment = inherited | plan.environment | dict(secrets) | cluster.launch_environment()
    shim = install_shim(context.attempt_dir)
    return environment | {
        "PATH": f"{shim}{os.pathsep}{environment.get('PATH', os.defpath)}",
        "NEMORUN_HOME": str(context.attempt_dir / LAUNCHER_HOME),
        ATTEMPT_VARIABLE: str(context.attempt_dir),
        # Rich wraps its lines at 80 columns where there is no terminal.
        "COLUMNS": "400",
        # The checkout is shared by many jobs and none may change it.
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def _record_options(plan: LaunchPlan, context: AttemptContext) -> None:
    """Leave the plan's sbatch options where the shim finds them."""
    options = merged_options((*context.sbatch_options, *plan.sbatch_args))
    if options != context.sbatch_options:
        write_model(context.attempt_dir / ATTEMPT_FILE, context.model_copy(update={"sbatch_options": options}))


def _job_of(context: AttemptContext, submission: Submission) -> Job:
    return Job(
        run_key=context.run_key,
        attempt=context.attempt,
        job_id=submission.job_id,
        cluster=submission.cluster,
        attempt_dir=context.attempt_dir,
        script=submission.script,
        experiment_dir=submission.experiment_dir,
        submitted_at=submission.submitted_at,
    )


def _end_group(process: "subprocess.Popen[str]") -> None:
    """End whatever is left of the launcher's session: with SIGTERM, and after a while with SIGKILL.

    A shim that dies here while it submits has left its intent, so the next try looks its job up.
    """
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=_KILL_WAIT)
