"""Submitting an attempt through the upstream launcher, with our `sbatch` first on its PATH. See `sbatch_shim`."""

import os
import re
from collections import deque
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import NamedTuple

from nightbridge.errors import LaunchRefused, PermanentError, StatusUnknown, TransientError
from nightbridge.files import write_atomically, write_model
from nightbridge.masking import mask_text
from nightbridge.models import LAUNCHER_HOME, Job, LaunchPlan, utc_now
from nightbridge.processes import run
from nightbridge.secrets import holds_secret
from nightbridge.slurm.attempt_files import (
    ATTEMPT_FILE,
    AttemptContext,
    Submission,
    newest_intent,
    read_refusal,
    read_submission,
)
from nightbridge.slurm.attempts import fitting_options
from nightbridge.slurm.protocol import Cluster
from nightbridge.slurm.sbatch_shim import ATTEMPT_VARIABLE, find_submission, install_shim, launcher_base
from nightbridge.slurm.warm_launchers import WARM_LAUNCHERS

LAUNCHER_TIMEOUT = 1800.0
"""Seconds for the launcher: it packages the repository, which is slow on a shared file system, and calls sbatch."""

_REMEMBERED_LINES = 50
_LAUNCHER_LOG = "launcher.log"

_CREDENTIAL_NAME = re.compile(
    r"(?:TOKEN|KEY|KEY_ID|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|_(?:AUTH|PASS|PAT|PWD))$", re.IGNORECASE
)


class _Environment(NamedTuple):
    """A launcher's variables: what those of a cluster share, and its own, which go before them."""

    shared: dict[str, str]
    own: dict[str, str]


def submit_attempt(
    plan: LaunchPlan,
    context: AttemptContext,
    cluster: Cluster,
    secrets: Mapping[str, str],
    *,
    dependencies: Callable[[], tuple[str, ...]] = tuple,
    withheld: Collection[str] = (),
    timeout: float = LAUNCHER_TIMEOUT,
) -> Job:
    """Return the attempt's one job: the recorded one, the one that the cluster knows, else a new one.

    Args:
        plan: What is started.
        context: The attempt, opened and recorded.
        cluster: Where it is submitted.
        secrets: Environment variables with their values, for the launcher's environment alone; masked in its log.
        dependencies: Returns the options of sbatch for the jobs that this one waits for, as they are now. Called only
            when it is certain that there is no job yet; what it raises is raised.
        withheld: Environment variables that neither the launcher nor the job may see, such as the store's keys. What
            else looks like a credential is withheld as well, unless `plan` or `secrets` name it.
        timeout: Seconds after which the launcher is killed.

    Raises:
        TransientError: It is not certain whether there is a job, the cluster takes none now, or the launcher hung.
        LaunchRefused: Slurm refused the job for good.
        PermanentError: The launcher failed before it submitted anything.
    """
    seen = newest_intent(context.attempt_dir)
    if submission := find_submission(context, cluster):
        return _job_of(context, submission)
    plan = plan.model_copy(update={"sbatch_args": tuple(dict.fromkeys((*plan.sbatch_args, *dependencies())))})
    _check(plan, context, cluster)
    # Where the shim finds them. An earlier start without a job may have had others: of a site that was corrected since,
    # or switched to another cluster.
    current = context.model_copy(update={"cluster": cluster.settings, "sbatch_options": plan.sbatch_args})
    if current != context:
        write_model(context.attempt_dir / ATTEMPT_FILE, current)
    if plan.batch_script is not None:
        write_atomically(Path(plan.argv[-1]), plan.batch_script.encode())
    began = utc_now()
    code, last_words = _run_launcher(plan, _environment(plan, context, cluster, secrets, withheld), secrets, timeout)
    # The records decide, whatever the launcher's exit code is: upstream's ends with 0 or 1 for many reasons that have
    # nothing to do with the job.
    if submission := read_submission(context.attempt_dir):
        return _job_of(context, submission)
    refusal = read_refusal(context.attempt_dir, since=began)
    error = refusal.error() if refusal else None
    # A shim that was refused takes its intent back. One whose intent stands has died, perhaps with a job in Slurm.
    if newest_intent(context.attempt_dir) > seen and not isinstance(error, TransientError):
        raise StatusUnknown(
            "it may have been submitted: the sbatch shim ended without a record",
            subject=context.name,
            advice="Will look it up",
        ) from error
    if error:
        raise error
    log = str(context.attempt_dir / _LAUNCHER_LOG)
    if code is None:
        raise TransientError(f"the launcher: {last_words}", subject=log, advice="Will retry")
    raise PermanentError(
        f"the launcher ended with {code} and submitted nothing: {last_words}", subject=log, advice="Read the log"
    )


def _run_launcher(
    plan: LaunchPlan, environment: _Environment, secrets: Mapping[str, str], timeout: float
) -> tuple[int | None, str]:
    """Run the launcher, its output masked line by line on the way to its log.

    Returns:
        Its exit code, and the last line with text, an error's rather than what follows it; None and why, when it ran
        into the time limit and was killed, or could not be started now.
    """
    log = plan.attempt_dir / _LAUNCHER_LOG
    recent: deque[str] = deque(maxlen=_REMEMBERED_LINES)

    def keep(line: str) -> None:
        recent.append(mask_text(line, tuple(secrets.values())))
        try:
            with log.open("a", encoding="utf-8") as stream:
                stream.write(f"{recent[-1]}\n")
        except OSError as error:
            # The launcher would hang at a full pipe: its output is read all the same.
            recent.append(f"the log cannot be written: {error.strerror}")

    keep(f"--- {utc_now().isoformat(timespec='seconds')} {' '.join(plan.argv)}")
    recent.clear()
    # An upstream launcher, rather than a batch script of ours or another program.
    is_python = plan.batch_script is None and len(plan.argv) > 1 and plan.argv[1].endswith(".py")
    forked = WARM_LAUNCHERS.start(plan.argv, *environment, cwd=plan.cwd) if is_python else None
    try:
        code = run(
            plan.argv,
            environment=environment.shared | environment.own,
            timeout=timeout,
            cwd=plan.cwd,
            on_line=keep,
            merged=True,
            started=forked,
        ).code
    except TransientError as error:
        return None, error.happened
    lines = [line.strip() for line in recent if any(letter.isalnum() for letter in line)]
    errors = [line for line in lines if "Error" in line or "error:" in line]
    return code, (errors or lines or ["it printed nothing"])[-1][:500]


def _check(plan: LaunchPlan, context: AttemptContext, cluster: Cluster) -> None:
    """Raise what sbatch would refuse for good, before a launcher spends minutes on it: a job's size, time or partition.

    What may pass later is left to the submission itself. A dependency is left out: it decides when the job starts,
    not whether it may. What the launcher adds by itself is not known yet, so sbatch may still refuse the job.
    """
    seconds = plan.time_limit_seconds
    options = (
        *(f"--nodes={plan.nodes}", f"--ntasks-per-node={plan.tasks_per_node}"),
        *((f"--time={-(-seconds // 60)}",) if seconds is not None else ()),
        *cluster.settings.options("partition", "account"),
        *fitting_options([option for option in plan.sbatch_args if not option.startswith("--dependency")], script=""),
    )
    refusal = cluster.test_only(context.name, options)
    if refusal is not None:
        raise LaunchRefused(
            f"{refusal.what}; the launcher was not started", subject=refusal.subject, advice=refusal.advice
        ) from refusal


def _environment(
    plan: LaunchPlan, context: AttemptContext, cluster: Cluster, secrets: Mapping[str, str], withheld: Collection[str]
) -> _Environment:
    # What is named like a credential, or is a known kind of token or a URL with a login, is withheld as well.
    inherited = {
        name: value
        for name, value in launcher_base(os.environ).items()
        if name not in withheld and not _CREDENTIAL_NAME.search(name) and not holds_secret(value)
    }
    # Rich wraps its lines at 80 columns where there is no terminal. The checkout is shared by many jobs and none may
    # change it.
    shared = inherited | plan.environment | cluster.launch_environment()
    shared |= {"COLUMNS": "400", "PYTHONDONTWRITEBYTECODE": "1"}
    path = f"{install_shim(context.attempt_dir)}{os.pathsep}{shared.get('PATH', os.defpath)}"
    home = str(context.attempt_dir / LAUNCHER_HOME)
    own = {**secrets, "PATH": path, "NEMORUN_HOME": home, ATTEMPT_VARIABLE: str(context.attempt_dir)}
    # A warm process has no use for the commands of one cluster or attempt, and serves those of every workspace.
    shared = {name: value for name, value in shared.items() if name not in own}
    return _Environment(shared | {"PATH": inherited.get("PATH", os.defpath)}, own)


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
