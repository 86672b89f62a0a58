"""The outcome of a job, from Slurm's state, the exit file and the run's own evidence together."""

import contextlib
import pwd
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from nightbridge.files import used_up_quota
from nightbridge.models import Job, JobState, JobStatus, Model, Outcome
from nightbridge.slurm.attempt_files import (
    Cancellation,
    CancelPolicy,
    claimed_at,
    read_cancellation,
    read_claim,
    script_ended_at,
)
from nightbridge.slurm.script import ALREADY_CLAIMED, GUARD_CODES
from nightbridge.slurm.states import LOST, QUEUED_AGAIN, TERMINAL, WAITING, hopeless_advice

# The last two are slurmstepd's, for a site without cgroups, where Slurm itself calls the job FAILED.
_OUT_OF_MEMORY = re.compile(r"out of memory|OutOfMemoryError|oom[-_ ]?kill|exceeded (job )?memory limit", re.IGNORECASE)
# As Python, Rust and the C library write EDQUOT, with the path that Python names.
_QUOTA = re.compile(r"[Dd]isk quota exceeded(?:[^'\"]*['\"](?P<path>/[^'\"]+)['\"])?")
# slurmstepd's signal when it cannot open the batch script's output file: the script was never started.
_NO_OUTPUT_FILE = 53
# slurmctld's signal of a job whose prolog failed and that it may not requeue (25.11).
_PROLOG_FAILED = 54
_NOT_LAUNCHED = frozenset({"joblaunchfailure", "launchfailed"})


class RunEvidence(Model):
    """The evidence of the run itself, read from its logs and event files."""

    steps_done: int
    steps_expected: int | None
    losses_finite: bool
    finished_marker: bool
    flaky_marker: str | None
    timeout_marker: bool
    last_error: str
    steps_seen: int = 0
    """Iterations that some line proves, where those that number them are lost: for words alone."""

    @property
    def all_steps_done(self) -> bool:
        """Whether the last iteration was reached; without an expected number, whether the program reports its end."""
        if self.steps_expected is None:
            return self.finished_marker
        return self.steps_done >= self.steps_expected


class _Case(NamedTuple):
    """Everything that the rules look at."""

    status: JobStatus
    exit_file: int | None
    evidence: RunEvidence
    claimed: bool
    attempt_dir: Path
    cancellation: Cancellation | None = None

    @property
    def state(self) -> JobState:
        return self.status.state

    @property
    def script_code(self) -> int | None:
        """The batch script's exit code: the exit file's, else Slurm's, which has 1 for a lost node (25.11)."""
        if self.exit_file is None and self.state in _INFRASTRUCTURE_STATES:
            return None
        return self.exit_file if self.exit_file is not None else self.status.exit_code

    @property
    def guard_code(self) -> int | None:
        """The guard's exit code: it leaves no exit file, so the same code of a script is not taken for it."""
        return self.status.exit_code if self.exit_file is None and self.status.exit_code in GUARD_CODES else None

    @property
    def started_twice(self) -> bool:
        """The guard ended a second start of the job, and the first one had not ended by itself: Slurm kills it."""
        return self.status.exit_code == ALREADY_CLAIMED and self.claimed and self.exit_file in _KILLED

    @property
    def started(self) -> bool:
        return self.claimed or self.status.started_at is not None

    @property
    def lost(self) -> bool:
        """Slurm lost it: no user cancelled it, although accounting may call it cancelled."""
        return self.status.reason.startswith(f"{LOST}:")

    @property
    def cancelled(self) -> bool:
        """A user cancelled it before its script had ended with 0.

        A slurmctld that was killed before it saved a job's start cancels, when it is back, what has long ended.
        """
        ended_before = self.exit_file == 0 and self.trained
        return self.state is JobState.CANCELLED and not ended_before and not self.lost

    @property
    def ended_well(self) -> bool:
        """Slurm and the exit file both report success, or the only one of them that exists."""
        if self.state not in TERMINAL:
            return self.exit_file == 0
        return self.state is JobState.COMPLETED and self.exit_file in (None, 0)

    @property
    def trained(self) -> bool:
        return self.evidence.all_steps_done and self.evidence.losses_finite

    @property
    def steps(self) -> str:
        expected = self.evidence.steps_expected
        done = max(self.evidence.steps_done, self.evidence.steps_seen)
        return f"{done} of {'?' if expected is None else expected} steps"

    @property
    def nodes(self) -> str:
        return self.status.nodes or "its node"

    @property
    def guard(self) -> str:
        return GUARD_CODES[self.guard_code or 0]

    @property
    def hopeless(self) -> str | None:
        """What to do about a pending reason that could never clear."""
        return hopeless_advice(self.status.reason)

    @property
    def canceller(self) -> str:
        """The name of whom Slurm names by a uid, where this host knows it."""
        who = self.status.cancelled_by
        with contextlib.suppress(KeyError):
            return pwd.getpwuid(int(who)).pw_name if who.isdecimal() else who or "an unknown user"
        return f"uid {who}"

    @property
    def failed_prolog(self) -> str:
        """The nodes whose prolog failed; empty where no source says so."""
        named = re.findall(r"([\w.-]+): [^;]*[Pp]rolog", self.status.node_reason)
        return ",".join(named) or (self.nodes if self.status.signal == _PROLOG_FAILED else "")

    @property
    def before_script(self) -> bool:
        """Slurm itself cancelled it after it got nodes and before its script began there."""
        by_slurm = self.status.cancelled_by in ("", "0", "root")
        began = self.claimed or self.exit_file is not None or self.evidence.steps_done > 0
        return self.state is JobState.CANCELLED and bool(self.status.nodes) and by_slurm and not began

    @property
    def ended_by(self) -> CancelPolicy | None:
        """The policy by which the watcher cancelled it."""
        return self.cancellation.policy if self.state is JobState.CANCELLED and self.cancellation else None

    @property
    def policy(self) -> str:
        """Why the watcher cancelled it, with advice."""
        return f"{self.cancellation.reason}. {self.cancellation.advice}" if self.cancellation is not None else ""

    @property
    def why(self) -> str:
        """Slurm's state with its reason, and the last error of the log."""
        said = self.state.value
        if self.status.reason:
            said += f" ({self.status.reason})"
        if self.script_code:
            said += f", exit code {self.script_code}"
        if self.status.exit_code == ALREADY_CLAIMED and self.exit_file not in (None, ALREADY_CLAIMED):
            said += "; Slurm then started it again, which ended at once"
        if self.evidence.last_error:
            said += f": {self.evidence.last_error}"
        if quota := _QUOTA.search(self.evidence.last_error):
            said += f" ({used_up_quota(Path(quota['path'] or self.attempt_dir / 'log'))})"
        return said


class _Rule(NamedTuple):
    applies: Callable[[_Case], object]
    outcome: Outcome
    reason: str
    """Filled in from the case."""


_INFRASTRUCTURE_STATES = frozenset({JobState.NODE_FAIL, JobState.BOOT_FAIL, JobState.PREEMPTED})
# What the exit file of a lost job holds: slurmd kills the job, and its recorder may or may not still write.
_KILLED = (None, 128 + signal.SIGTERM, 128 + signal.SIGKILL)
_OVER_TIME = frozenset({JobState.TIMEOUT, JobState.DEADLINE})

# The first rule that applies decides.
_RULES: tuple[_Rule, ...] = (
    # The guard ended the job before the script began.
    _Rule(
        lambda case: case.started_twice and not case.trained,
        Outcome.INFRASTRUCTURE,
        "Slurm started the job a second time, on {case.nodes}; that start ended at once",
    ),
    _Rule(
        lambda case: case.guard_code == ALREADY_CLAIMED,
        Outcome.NEVER_STARTED,
        "another job of this attempt runs; this one ended at once",
    ),
    _Rule(lambda case: case.guard_code is not None, Outcome.INFRASTRUCTURE, "{case.guard} on {case.nodes}"),
    _Rule(
        lambda case: not case.claimed and case.status.signal == _NO_OUTPUT_FILE and case.state is JobState.FAILED,
        Outcome.INFRASTRUCTURE,
        "workspace not visible on {case.nodes}: the output file could not be opened there",
    ),
    _Rule(
        lambda case: not case.claimed and case.status.reason.lower().replace(" ", "") in _NOT_LAUNCHED,
        Outcome.INFRASTRUCTURE,
        "could not be launched on {case.nodes}",
    ),
    _Rule(
        lambda case: case.before_script and case.failed_prolog,
        Outcome.INFRASTRUCTURE,
        "the prolog failed on {case.failed_prolog}: Slurm ended the job before its script began",
    ),
    _Rule(
        lambda case: case.before_script and case.status.cancelled_by and not case.cancellation,
        Outcome.INFRASTRUCTURE,
        "ended on {case.nodes} before its script began: by Slurm, as after a failed PrologSlurmctld, or by root",
    ),
    # Our own policies.
    _Rule(
        lambda case: case.ended_by and not case.started,
        Outcome.NEVER_STARTED,
        "cancelled before it started: {case.policy}",
    ),
    _Rule(lambda case: case.ended_by == "max_runtime", Outcome.TIMEOUT, "cancelled after {case.steps}: {case.policy}"),
    # A cancellation by a person is final, whatever had been reached.
    _Rule(
        lambda case: case.state is JobState.CANCELLED and not case.started and case.hopeless,
        Outcome.NEVER_STARTED,
        "it could never start ({case.status.reason}). {case.hopeless}",
    ),
    _Rule(lambda case: case.cancelled, Outcome.CANCELLED, "cancelled by {case.canceller} after {case.steps}"),
    _Rule(
        lambda case: case.state is JobState.DEADLINE and not case.started,
        Outcome.NEVER_STARTED,
        "its deadline passed while it was pending",
    ),
    # The training is whole. What comes after it does not count against it.
    _Rule(lambda case: case.trained and case.ended_well, Outcome.SUCCEEDED, "{case.steps}"),
    _Rule(
        lambda case: case.trained and (case.state in TERMINAL or case.exit_file is not None),
        Outcome.TEARDOWN,
        "{case.steps} done, then {case.why}",
    ),
    _Rule(
        lambda case: case.evidence.all_steps_done and case.ended_well, Outcome.PROGRAM_ERROR, "losses are not finite"
    ),
    # It is not.
    # No infrastructure failure, which would submit a second job beside the one that a sibling cluster may run.
    _Rule(
        lambda case: case.state is JobState.REVOKED,
        Outcome.NEVER_STARTED,
        "REVOKED after {case.steps}: another cluster of the federation has the job, and it is not followed there. "
        "Find it with `squeue --federation` before this run is started again",
    ),
    _Rule(
        lambda case: case.state in _INFRASTRUCTURE_STATES or (case.lost and case.exit_file in _KILLED),
        Outcome.INFRASTRUCTURE,
        "{case.why} after {case.steps}",
    ),
    _Rule(lambda case: case.state is JobState.OUT_OF_MEMORY, Outcome.OUT_OF_MEMORY, "{case.why} after {case.steps}"),
    _Rule(lambda case: case.state in _OVER_TIME, Outcome.TIMEOUT, "{case.state.value} after {case.steps}"),
    _Rule(lambda case: case.ended_well, Outcome.SHORT, "ended after {case.steps} as if all were done"),
    _Rule(
        lambda case: case.state not in TERMINAL and case.exit_file is None,
        Outcome.INFRASTRUCTURE,
        "neither Slurm nor an exit file reports its end after {case.steps}",
    ),
    _Rule(lambda case: case.evidence.timeout_marker, Outcome.TIMEOUT, "killed at its limit after {case.steps}"),
    _Rule(
        lambda case: _OUT_OF_MEMORY.search(case.evidence.last_error) is not None,
        Outcome.OUT_OF_MEMORY,
        "{case.why} after {case.steps}",
    ),
    # A loss that is not finite is the program's, although upstream calls it flaky.
    _Rule(
        lambda case: case.evidence.flaky_marker is not None and case.evidence.losses_finite,
        Outcome.INFRASTRUCTURE,
        "{case.evidence.flaky_marker} in the log after {case.steps}",
    ),
    _Rule(lambda case: True, Outcome.PROGRAM_ERROR, "{case.why} after {case.steps}"),
)


def end_of_script(job: Job, status: JobStatus, code: int, nodes: str) -> JobStatus:
    """The end of a job whose script had ended by itself, where Slurm then put it back into its queue.

    Args:
        job: The job.
        status: Slurm's last one: it waits there, a user cancelled it there, or its second start has ended at once. Any
            other is returned as it is.
        code: The exit file's.
        nodes: Those of the start that ran the script; empty where it was not watched.
    """
    is_queued = status.state in WAITING or (bool(status.cancelled_by) and not status.nodes)
    if not is_queued and status.exit_code != ALREADY_CLAIMED:
        return status
    times = {"started_at": claimed_at(job.attempt_dir), "ended_at": script_ended_at(job.attempt_dir)}
    status = status.model_copy(update={"nodes": nodes or status.nodes, **times})
    if not is_queued:
        return status
    state = JobState.FAILED if code else JobState.COMPLETED
    reason = f"{QUEUED_AGAIN} after its script had ended: RequeueExit or RequeueExitHold in slurm.conf?"
    return status.model_copy(update={"state": state, "reason": reason, "exit_code": code, "signal": 0})


def classify_job(job: Job, evidence: RunEvidence) -> Job:
    """Set the outcome of an ended job, and the reason in a few words.

    Success needs Slurm's state (or the exit file, where Slurm was silent) and the run's own evidence to agree.
    """
    cancellation = read_cancellation(job.attempt_dir)
    case = _Case(
        job.status or JobStatus(job_id=job.job_id, state=JobState.UNKNOWN),
        job.exit_file_code,
        evidence,
        read_claim(job.attempt_dir) == job.job_id,
        job.attempt_dir,
        cancellation if cancellation is not None and cancellation.job_id == job.job_id else None,
    )
    rule = next(rule for rule in _RULES if rule.applies(case))
    return job.model_copy(update={"outcome": rule.outcome, "outcome_reason": rule.reason.format(case=case)})
