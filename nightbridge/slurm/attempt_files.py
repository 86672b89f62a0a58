"""The files of an attempt's folder: what is written there, when, and by which process. They make a job exactly one.

attempt.json      opened, before anything else                       `AttemptContext`
intent.json       about to submit; later intents intent-2.json, ...  `Intent`
job.sh            the script as submitted
submission.json   submitted: the job's id                            `Submission`
refusal.json      why the shim did not submit, the last time         `SubmitRefusal`
cancellation.json why the watcher cancelled the job                  `Cancellation`
ended.json        its end, with what the run left as evidence        `Job`
claim, exit_code  left by the job itself (see `script`)

Beside the attempts, in the run's folder:
waiting.json      what a stage of the run waits for, while it does   `Waiting`
"""

import contextlib
import os
import re
import signal
import socket
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import Field

from nightbridge.errors import (
    DamagedData,
    LaunchRefused,
    NightbridgeError,
    PermanentError,
    StatusUnknown,
    TransientError,
)
from nightbridge.files import RefusedFile, create_model, read_model, read_regular, write_model
from nightbridge.models import ClusterSettings, Job, Model, RunKey, StoredModel, utc_now
from nightbridge.numbers import whole_number
from nightbridge.slurm.protocol import Cluster, JobNotAccepted, Lookup
from nightbridge.slurm.script import ATTEMPT_FILE as ATTEMPT_FILE
from nightbridge.slurm.script import CLAIM, EXIT_CODE, PID

SUBMISSION_FILE = "submission.json"
REFUSAL_FILE = "refusal.json"
CANCELLATION_FILE = "cancellation.json"
ENDED_FILE = "ended.json"
WAITING_FILE = "waiting.json"
JOB_SCRIPT = "job.sh"

CLUSTER_NAME = "ClusterName"
"""Slurm's own name of a cluster in its configuration; `ClusterSettings.name` is the site's."""

_M = TypeVar("_M", bound=Model)
CancelPolicy = Literal["hopeless", "max_pending", "max_runtime"]
_Kind = Literal["not_accepted", "unknown", "transient", "permanent"]

_ATTEMPT_FOLDER = re.compile(r"a([1-9]\d*)")
_MAX_NUMBER_BYTES = 512
_INTENT_FILE = re.compile(r"intent(?:-([1-9]\d*))?\.json")
# How far apart the clocks of this host and of slurmctld may be when a found job is matched with its intent.
_CLOCK_SLACK = timedelta(seconds=5)


class AttemptContext(StoredModel):
    """An opened attempt: all that the shim needs to submit, whichever process started it."""

    run_key: RunKey
    attempt: int = Field(ge=1)
    attempt_dir: Path
    workspace: Path
    cluster: ClusterSettings
    sbatch_options: tuple[str, ...] = Field((), description="Added after the launcher's own options, so they win.")
    opened_at: datetime

    @property
    def name(self) -> str:
        """The attempt's name, which is the Slurm job's name."""
        return f"{self.run_key}-a{self.attempt}"


class CannotKnow(PermanentError):
    """A cluster, as this process queries it, cannot know an attempt's job: another cluster or user has it."""


class Intent(StoredModel):
    """A process is about to submit. Until the intent is older than the accounting horizon, no other process does."""

    at: datetime
    host: str
    pid: int
    launcher_script: Path
    experiment_dir: Path
    slurm_cluster: str | None = Field(None, description="Where to: Slurm's own ClusterName; None where it had none.")
    uid: int | None = Field(None, description="Whose job it becomes; None in those of earlier releases.")


class Submission(StoredModel):
    """The attempt's job."""

    job_id: int
    name: str
    cluster: str
    script: Path = Field(description="The submitted copy.")
    launcher_script: Path
    experiment_dir: Path
    submitted_at: datetime
    found: bool = Field(False, description="Found in Slurm by its name: its submitter died before recording it.")


class SubmitRefusal(StoredModel):
    """Why the shim did not submit; `thing` is the subject of the error."""

    kind: _Kind
    what: str
    thing: str = ""
    advice: str = ""
    at: datetime

    @classmethod
    def of(cls, error: TransientError | PermanentError) -> "SubmitRefusal":
        """The record of an error."""
        kind = next((kind for kind, made in _REFUSALS.items() if isinstance(error, made)), "permanent")
        return cls(kind=kind, what=error.what, thing=error.subject, advice=error.advice, at=utc_now())

    def error(self) -> TransientError | LaunchRefused:
        """The error of a record."""
        return _REFUSALS[self.kind](self.what, subject=self.thing, advice=self.advice)


# The first class that fits.
_REFUSALS: dict[_Kind, type[TransientError] | type[LaunchRefused]] = {
    "not_accepted": JobNotAccepted,
    "unknown": StatusUnknown,
    "transient": TransientError,
    "permanent": LaunchRefused,
}


class Cancellation(StoredModel):
    """Why the watcher cancelled a job, recorded before it did."""

    job_id: int
    policy: CancelPolicy
    reason: str
    advice: str
    at: datetime


def attempt_numbers(run_dir: Path) -> list[int]:
    """The numbers of a run's attempts, recorded or not, ascending.

    Args:
        run_dir: `<workspace>/runs/<run key>`.
    """
    found = (_ATTEMPT_FOLDER.fullmatch(entry.name) for entry in run_dir.glob("a*"))
    return sorted(int(match[1]) for match in found if match)


def last_attempt(run_dir: Path) -> int:
    """The number of the newest attempt of a run, 0 when there is none."""
    return max(attempt_numbers(run_dir), default=0)


def open_attempt(workspace: Path, run_key: str, cluster: ClusterSettings, number: int = 1) -> AttemptContext:
    """Open an attempt of a run, by its number: make its folder, and record it before anything else.

    Of several processes that open the same one, the first one's record counts, and all of them work on it: they get one
    job, where attempts of their own would get several. An attempt whose opener died before recording it has submitted
    nothing, and is recorded here.

    The folder is `<workspace>/runs/<run key>/a<n>`, absolute.
    """
    workspace = workspace.absolute()
    folder = workspace / "runs" / run_key / f"a{number}"
    if not (folder / ATTEMPT_FILE).exists():
        context = AttemptContext(
            run_key=run_key,
            attempt=number,
            attempt_dir=folder,
            workspace=workspace,
            cluster=cluster,
            opened_at=utc_now(),
        )
        create_model(folder / ATTEMPT_FILE, context)
    return read_attempt(folder)


def current_attempt(workspace: Path, run_key: str, cluster: ClusterSettings) -> AttemptContext:
    """The newest attempt of a run, the first one opened now if there is none."""
    newest = last_attempt(workspace.absolute() / "runs" / run_key)
    return open_attempt(workspace, run_key, cluster, max(newest, 1))


def read_attempt(attempt_dir: Path) -> AttemptContext:
    """The record of an opened attempt.

    Raises:
        DamagedData: There is none, or it cannot be read.
    """
    context = _read(AttemptContext, attempt_dir / ATTEMPT_FILE)
    if context is None:
        advice = "Start the run again; where the workspace was moved, leave a link to it at its former path first"
        raise DamagedData("no such attempt", subject=str(attempt_dir), advice=advice)
    return context


def read_submission(attempt_dir: Path) -> Submission | None:
    """The attempt's job, None when none is recorded."""
    return _read(Submission, attempt_dir / SUBMISSION_FILE)


def claiming_submission(attempt_dir: Path) -> Submission | None:
    """The attempt's job; of several, the one that has claimed the attempt, with the folder that was made for itself."""
    submission, claimant = read_submission(attempt_dir), read_claim(attempt_dir)
    if submission is None or claimant in (None, submission.job_id):
        return submission
    others = [each for each in read_intents(attempt_dir) if each.launcher_script != submission.launcher_script]
    folder = others[-1].experiment_dir if others else submission.experiment_dir
    return submission.model_copy(update={"job_id": claimant, "experiment_dir": folder})


def may_have_job(attempt_dir: Path) -> bool:
    """Whether an attempt has a job, ended or not, or may have one that is not recorded: to refuse it is too late."""
    try:
        return attempt_dir.is_dir() and bool(read_submission(attempt_dir) or read_intents(attempt_dir))
    except DamagedData:
        return True


def own_jobs(attempt_dir: Path, cluster: Cluster) -> Lookup:
    """Look up the jobs of an attempt's name, and tell apart those of another workspace: `others` of the answer."""
    lookup = cluster.find(_name_of(attempt_dir))
    others = tuple(job for job in lookup.jobs if _is_of_another_workspace(job.job_id, attempt_dir, cluster))
    jobs = tuple(job for job in lookup.jobs if job not in others)
    return lookup.model_copy(update={"jobs": jobs, "others": others})


def _name_of(attempt_dir: Path) -> str:
    return f"{attempt_dir.parent.name}-{attempt_dir.name}"


def _is_of_another_workspace(job_id: int, attempt_dir: Path, cluster: Cluster) -> bool:
    """Whether a job that has this attempt's name was submitted by a workspace with the same night, scenario and test.

    Only where that is proven: this attempt has not recorded it as submitted, and the job's script lies in the folder of
    an attempt that was opened at another time. A record that is damaged or missing must not keep a job of ours alive.
    """
    with contextlib.suppress(NightbridgeError, OSError):
        recorded = read_submission(attempt_dir)
        is_ours = recorded is not None and recorded.job_id == job_id and not recorded.found
        script = None if is_ours else cluster.script_of(job_id)
        if script is not None:
            return read_attempt(script.parent).opened_at != read_attempt(attempt_dir).opened_at
    return False


def read_refusal(attempt_dir: Path, *, since: datetime) -> SubmitRefusal | None:
    """Why the shim refused at or after `since`, None when it did not."""
    refusal = _read(SubmitRefusal, attempt_dir / REFUSAL_FILE)
    return refusal if refusal is not None and refusal.at >= since else None


class Waiting(StoredModel):
    """What a stage of a run waits for: a cluster, a store or Prefect's server that is away, a queue that is full."""

    what: str
    since: datetime

    def __str__(self) -> str:
        return f"waiting since {self.since:%Y-%m-%d %H:%M} UTC: {self.what}"


def note_waiting(run_key: str, workspace: Path, what: str | None) -> None:
    """Note what a run waits for, for `nightbridge status` and the watchdog; None when it waits no more.

    A workspace that is away may be what it waits for: then there is no note.
    """
    path = workspace.absolute() / "runs" / run_key / WAITING_FILE
    with contextlib.suppress(OSError, TransientError, PermanentError):
        if what is None:
            path.unlink(missing_ok=True)
        elif workspace.is_dir():
            write_model(path, Waiting(what=what, since=utc_now()))


def read_waiting(run_key: str, workspace: Path) -> Waiting | None:
    """What a run waits for; None where nothing is noted, or the note cannot be read."""
    with contextlib.suppress(OSError, DamagedData):
        return _read(Waiting, workspace.absolute() / "runs" / run_key / WAITING_FILE)
    return None


def read_intents(attempt_dir: Path) -> list[Intent]:
    """Every intent to submit that still stands, oldest first."""
    intents = (_read(Intent, path) for _, path in _intent_files(attempt_dir))
    return [intent for intent in intents if intent is not None]


def declare_intent(
    attempt_dir: Path, launcher_script: Path, experiment_dir: Path, *, after: int, slurm_cluster: str | None = None
) -> Path | None:
    """Declare that this process is about to submit; None when another process did so first.

    Intents are numbered, and each number can be made once. `after` is how many the caller saw before it looked for the
    job: a caller that has not seen the newest one loses. The launcher has passed `launcher_script` to sbatch, and made
    `experiment_dir` for exactly this job.
    """
    intent = Intent(
        at=utc_now(),
        host=socket.gethostname(),
        pid=os.getpid(),
        launcher_script=launcher_script,
        experiment_dir=experiment_dir,
        slurm_cluster=slurm_cluster,
        uid=os.getuid(),
    )
    path = attempt_dir / ("intent.json" if after == 0 else f"intent-{after + 1}.json")
    return path if create_model(path, intent) else None


def check_can_know(attempt_dir: Path, cluster: Cluster) -> None:
    """Raise where this cluster's ignorance of an attempt's job proves nothing: another cluster, or user, may have it.

    A site without `slurm_conf` means the cluster that the shell does, by a module or by SLURM_CONF. Jobs are found by
    name among those of this user, and PrivateData hides all others. Of a job whose end is recorded nothing is left to
    be concluded.

    Raises:
        CannotKnow: It was submitted to another cluster, or by another user.
        StatusUnknown: This cluster does not tell its name now.
    """
    intents = read_intents(attempt_dir)
    if not intents or (attempt_dir / ENDED_FILE).exists():
        return
    if uids := {str(intent.uid) for intent in intents if intent.uid not in (None, os.getuid())}:
        whose = " and ".join(sorted(uids))
        raise _cannot_know(
            attempt_dir,
            f"submitted by uid {whose}, and uid {os.getuid()} queries Slurm here, which may hide that user's jobs",
            f"Start the night again as uid {whose}",
        )
    here = cluster.settings
    with contextlib.suppress(DamagedData):
        there = read_attempt(attempt_dir).cluster
        if (there.kind == "local") != (here.kind == "local"):
            raise _cannot_know(
                attempt_dir,
                f"submitted to the cluster {there.name} (kind = {there.kind}), and this site's is {here.name} "
                f"(kind = {here.kind})",
                "Start the night again with a site file whose [cluster] is that one",
            )
    names = {intent.slurm_cluster for intent in intents if intent.slurm_cluster}
    name = cluster.configured(CLUSTER_NAME) if names else None
    if names and name is None:
        raise StatusUnknown("cannot tell which cluster this is", subject=here.name, advice="Will retry")
    if others := names - {name}:
        raise _cannot_know(
            attempt_dir,
            f"submitted to Slurm's cluster {' and '.join(sorted(others))}, and Slurm's commands reach {name} here",
            "Start the night again where they reach that cluster, or set slurm_conf in the site file",
        )


def _cannot_know(attempt_dir: Path, happened: str, advice: str) -> CannotKnow:
    """The error, whose advice ends with what helps where that cluster or user is gone, or has another name by now."""
    files = " and ".join(str(path) for _, path in _intent_files(attempt_dir))
    lives = f"no job {_name_of(attempt_dir)} lives"
    gone = f"if that is gone or was renamed, and {lives}, remove {files} and start the night again"
    return CannotKnow(happened, subject=str(attempt_dir), advice=f"{advice}; {gone}")


def newest_intent(attempt_dir: Path) -> int:
    """The number of the newest intent, 0 when there is none."""
    return max((number for number, _ in _intent_files(attempt_dir)), default=0)


def intent_of(attempt_dir: Path, submitted_at: datetime) -> Intent | None:
    """The intent with which a job was submitted at that time, by slurmctld's clock; None when none stands."""
    intents = read_intents(attempt_dir)
    earlier = [intent for intent in intents if intent.at <= submitted_at + _CLOCK_SLACK] or intents
    return earlier[-1] if earlier else None


def in_its_folder(job: Job) -> Job:
    """A job that is followed in place of another one of its attempt, with the folder that was made for itself."""
    submitted_at = job.status.submitted_at if job.status else None
    intent = intent_of(job.attempt_dir, submitted_at or claimed_at(job.attempt_dir))
    return job if intent is None else job.model_copy(update={"experiment_dir": intent.experiment_dir})


def record_cancellation(attempt_dir: Path, cancellation: Cancellation) -> None:
    """Record why the attempt's job is about to be cancelled; the last record counts: an earlier one had no effect."""
    write_model(attempt_dir / CANCELLATION_FILE, cancellation)


def read_cancellation(attempt_dir: Path) -> Cancellation | None:
    """Why the watcher cancelled the attempt's job, None when it did not."""
    return _read(Cancellation, attempt_dir / CANCELLATION_FILE)


def read_claim(attempt_dir: Path) -> int | None:
    """The id of the job that claimed the attempt, None when none has (yet)."""
    return _read_number(attempt_dir / CLAIM)


def claimed_at(attempt_dir: Path) -> datetime:
    """When the attempt was claimed, by the clock of the file server; now where that is not known."""
    return _written_at(attempt_dir / CLAIM)


def script_ended_at(attempt_dir: Path) -> datetime:
    """When the exit file was written, by the clock of the file server; now where that is not known."""
    return _written_at(attempt_dir / EXIT_CODE)


def _written_at(path: Path) -> datetime:
    with contextlib.suppress(OSError):
        return datetime.fromtimestamp(path.lstat().st_mtime, UTC)
    return utc_now()


def ended_by_itself(attempt_dir: Path, job_id: int) -> bool:
    """Whether a job's script has ended, and no signal has ended it: the guard lets no later start of the job run.

    Raises:
        OSError: The file system is away.
    """
    # First: a start that may run removes this file after the exit file.
    with contextlib.suppress(FileNotFoundError):
        (attempt_dir / f"{PID}.{job_id}").lstat()
        return False
    # The guard of earlier releases removed the file of a script that was killed, too.
    killed = (128 + signal.SIGTERM, 128 + signal.SIGKILL)
    return read_claim(attempt_dir) == job_id and read_exit_code(attempt_dir) not in (None, *killed)


def read_exit_code(attempt_dir: Path) -> int | None:
    """The exit code that the job's script left, None when it has not (yet)."""
    return _read_number(attempt_dir / EXIT_CODE)


def exit_code_written_at(attempt_dir: Path) -> int | None:
    """When the exit file was written, in nanoseconds of the file server's clock; None where there is none (yet)."""
    with contextlib.suppress(FileNotFoundError):
        return (attempt_dir / EXIT_CODE).lstat().st_mtime_ns
    return None


def unreadable_numbers(attempt_dir: Path) -> tuple[str, ...]:
    """A line for each file of the attempt that has to hold a number, and is there without one."""
    there = (attempt_dir / name for name in (CLAIM, EXIT_CODE) if os.path.lexists(attempt_dir / name))
    return tuple(f"{path.name}: not a file with a number" for path in there if _read_number(path) is None)


def _intent_files(attempt_dir: Path) -> list[tuple[int, Path]]:
    found = ((_INTENT_FILE.fullmatch(entry.name), entry) for entry in attempt_dir.iterdir())
    return sorted((int(match[1] or 1), path) for match, path in found if match)


def _read_number(path: Path) -> int | None:
    # A job can leave anything here: what is no file with a number says nothing.
    with contextlib.suppress(FileNotFoundError, RefusedFile, PermissionError, UnicodeDecodeError):
        text = read_regular(path, below=path.parent, limit=_MAX_NUMBER_BYTES).decode("ascii")
        return whole_number(text.split(" ", 1)[0] if path.name == CLAIM else text)
    return None


def _read(kind: type[_M], path: Path) -> _M | None:
    return read_model(
        path, kind, what=f"cannot be read as {kind.__name__}", advice="Changed by hand: remove it, and start again"
    )


def record_ended(job: Job) -> None:
    """Record an attempt's ended job, beside the attempt."""
    write_model(job.attempt_dir / ENDED_FILE, job)


def read_ended(attempt_dir: Path) -> Job | None:
    """The ended job of an attempt; None while it lives, or until its end has been recorded.

    Raises:
        DamagedData: The record cannot be read.
    """
    return read_model(
        attempt_dir / ENDED_FILE, Job, what="cannot be read", advice="Remove it; the job is looked up again"
    )
