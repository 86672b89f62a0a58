"""What goes wrong at night, on real daemons: each fault ends with one job per attempt and the right outcome.

The daemons here are this module's own, since the tests kill them. The jobs run for real; only how far a run came is
said by the test, as what reads it from logs is specified elsewhere.
"""

import contextlib
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from nightbridge.errors import DamagedData, LaunchRefused, PermanentError, TransientError
from nightbridge.models import ClusterSettings, Job, JobState, JobStatus, LaunchPlan, Outcome
from nightbridge.outputs.experiment import read_run
from nightbridge.outputs.run_evidence import evidence
from nightbridge.slurm.attempt_files import AttemptContext, declare_intent, open_attempt, read_exit_code
from nightbridge.slurm.attempts import cancel_jobs
from nightbridge.slurm.command_line import CommandLineCluster
from nightbridge.slurm.outcome import RunEvidence, classify_job
from nightbridge.slurm.sbatch_shim import find_submission
from nightbridge.slurm.script import wrap_script
from nightbridge.slurm.submission import submit_attempt
from nightbridge.slurm.watcher import Graces, Watcher
from tests.conftest import need
from tests.real.slurm_daemons import SlurmDaemons, missing_reason, start_slurm
from tests.waiting import wait_until

pytestmark = pytest.mark.slurm

PARTITIONS = (
    "PreemptType=preempt/partition_prio",
    "PreemptMode=REQUEUE",
    "PartitionName=low Nodes=node2 PriorityTier=1 MaxTime=08:00:00",
    "PartitionName=high Nodes=node2 PriorityTier=10 MaxTime=08:00:00",
    # A node that does not answer is down after this many seconds, and a client without slurmctld gives up soon.
    "SlurmdTimeout=4",
    "MessageTimeout=3",
    # Without cgroups a job above its memory is killed by slurmstepd, which looks once a second.
    "JobAcctGatherType=jobacct_gather/linux",
    "JobAcctGatherFrequency=task=1",
    "JobAcctGatherParams=OverMemoryKill",
)

LAUNCHER = """
set -e
exp=$NEMORUN_HOME/experiments/train/train_$(date +%s%N)
mkdir -p "$exp/train"
{ echo '#!/bin/bash'; echo "#SBATCH --output=$exp/train/sbatch_%j.out"; cat BODY; } > "$exp/train_sbatch.sh"
sbatch --requeue --parsable "$exp/train_sbatch.sh"
"""


@pytest.fixture(scope="module")
def slurm_cluster() -> Iterator[SlurmDaemons]:
    """Daemons for this module alone."""
    need(missing_reason())
    daemons = start_slurm(min_job_age=5, extra_conf=(*PARTITIONS, "RequeueExit=42", "RequeueExitHold=43"))
    yield daemons
    daemons.stop()


@pytest.fixture
def settings(slurm_cluster: SlurmDaemons) -> ClusterSettings:
    return ClusterSettings(
        kind="slurm", name="debian", slurm_conf=slurm_cluster.slurm_conf, accounting_horizon=3.0, poll_interval=1.0
    )


class Run:
    """One attempt on its way through the submit stage and the watcher."""

    def __init__(self, attempt: AttemptContext, cluster: CommandLineCluster) -> None:
        self.attempt = attempt
        self.cluster = cluster
        self.seen: list[JobStatus] = []
        self.watcher = Watcher(cluster, Graces(silent=3, detail=20, hopeless=2, lost=5))
        self._pool = ThreadPoolExecutor(1)
        self._end: Future[Job] | None = None

    def submit(self, body: str, *options: str) -> Job:
        launcher, text = self.attempt.workspace / "launcher.sh", self.attempt.workspace / "body"
        text.write_text(body + "\n")
        launcher.write_text(LAUNCHER.replace("BODY", str(text)))
        plan = LaunchPlan(
            run_key=self.attempt.run_key,
            attempt=self.attempt.attempt,
            attempt_dir=self.attempt.attempt_dir,
            argv=("/bin/bash", str(launcher)),
            cwd=self.attempt.workspace,
            nodes=1,
            tasks_per_node=1,
            sbatch_args=("--mem=100", *options),
        )
        return submit_attempt(plan, self.attempt, self.cluster, {})

    def recorded(self) -> Job:
        """The job that the cluster has under the attempt's name."""
        found = find_submission(self.attempt, self.cluster)
        assert found is not None
        return Job(
            run_key=self.attempt.run_key, attempt=1, job_id=found.job_id, cluster="debian",
            attempt_dir=self.attempt.attempt_dir, script=found.script, experiment_dir=found.experiment_dir,
            submitted_at=found.submitted_at,
        )  # fmt: skip

    def follow(self, job: Job) -> None:
        self._end = self._pool.submit(self.watcher.follow, job, self.seen.append)

    def start(self, body: str, *options: str) -> Job:
        """Submit, watch, and wait until it runs."""
        job = self.submit(body, *options)
        self.follow(job)
        self.wait_for(JobState.RUNNING)
        return job

    def wait_for(self, state: JobState) -> None:
        wait_until(lambda: any(status.state is state for status in self.seen))

    def ended(self, steps_done: int = 20, evidence_of: Callable[[Job], RunEvidence] | None = None) -> Job:
        """The classified end of a run of 50 steps."""
        assert self._end is not None
        job = self._end.result(timeout=250)
        done = RunEvidence(
            steps_done=steps_done, steps_expected=50, losses_finite=True, finished_marker=steps_done == 50,
            flaky_marker=None, timeout_marker=False, last_error="",
        )  # fmt: skip
        return classify_job(job, evidence_of(job) if evidence_of else done)

    def jobs(self) -> list[int]:
        return sorted({job.job_id for job in self.cluster.find(self.attempt.name).jobs})

    def close(self) -> None:
        self.watcher.stop()
        self._pool.shutdown()


@pytest.fixture
def run(attempt: AttemptContext, cluster: CommandLineCluster) -> Iterator[Run]:
    run = Run(attempt, cluster)
    yield run
    run.close()


@pytest.fixture
def other(workspace: Path, settings: ClusterSettings, cluster: CommandLineCluster, run_key: str) -> Iterator[Run]:
    """Another one, of a run and a workspace of its own, watched as patiently as by default."""
    run = Run(open_attempt(workspace / "other", f"{run_key}-other", settings), cluster)
    run.watcher = Watcher(cluster)
    yield run
    run.close()


@pytest.fixture(scope="module", autouse=True)
def limited(slurm_cluster: SlurmDaemons) -> Iterator[Run]:
    """A job with the shortest time limit that Slurm knows, one minute: it runs through the other tests' faults."""
    settings = ClusterSettings(
        kind="slurm", name="debian", slurm_conf=slurm_cluster.slurm_conf, accounting_horizon=3.0, poll_interval=1.0
    )
    workspace = Path(tempfile.mkdtemp(prefix="nb-ws-"))
    run = Run(open_attempt(workspace, "limited", settings), CommandLineCluster(settings))
    run.follow(run.submit("sleep 1000", "--time=1", "--nodelist=node1"))
    yield run
    run.close()
    shutil.rmtree(workspace, ignore_errors=True)


def until_submitted(run: Run, body: str, *options: str) -> Job:
    """The submit stage as its task runs it: again after each error that may pass."""
    end = time.monotonic() + 240
    while time.monotonic() < end:
        with contextlib.suppress(TransientError):
            return run.submit(body, *options)
        time.sleep(0.5)
    raise AssertionError("it never submitted")


@contextlib.contextmanager
def down(daemons: SlurmDaemons, name: str, number: signal.Signals = signal.SIGKILL) -> Iterator[None]:
    """A daemon is killed, and back at the end of the block."""
    daemons.kill_daemon(name, number)
    try:
        yield
    finally:
        daemons.start_daemon(name)
        wait_until(lambda: daemons.command("squeue").returncode == 0)
        wait_until(lambda: daemons.command("sacct").returncode == 0)


# --- the daemons -----------------------------------------------------------------------------------------------------


def test_slurmctld_away_for_half_a_minute_ends_nothing_and_doubles_nothing(
    run: Run, other: Run, slurm_cluster: SlurmDaemons
) -> None:
    """A job ends meanwhile, and slurmstepd tells so after the outage; another one is submitted all the time."""
    job = run.start("sleep 2; exit 3")

    with ThreadPoolExecutor(1) as pool, down(slurm_cluster, "slurmctld", signal.SIGTERM):
        with pytest.raises(TransientError):
            other.submit("true")
        submitting = pool.submit(until_submitted, other, "true")
        wait_until(lambda: read_exit_code(job.attempt_dir) == 3)
        time.sleep(30)
        assert not submitting.done()
    submitted = submitting.result(timeout=250)
    other.follow(submitted)
    ended = run.ended()

    assert run.jobs() == [job.job_id]
    assert (ended.outcome, ended.exit_file_code) == (Outcome.PROGRAM_ERROR, 3)
    assert other.ended(50).outcome is Outcome.SUCCEEDED
    assert other.jobs() == [submitted.job_id]


def test_a_host_without_munged_is_told_so(run: Run, slurm_cluster: SlurmDaemons) -> None:
    with (
        down(slurm_cluster, "munged", signal.SIGTERM),
        pytest.raises(TransientError, match=r"Munge encode failed.*Did you start munged.*Check munge on this host"),
    ):
        run.cluster.limits()


def test_slurmctld_restarted_between_submission_and_record_leads_to_one_job(
    run: Run, slurm_cluster: SlurmDaemons
) -> None:
    job = run.submit("true", "--begin=now+5")
    with down(slurm_cluster, "slurmctld", signal.SIGTERM):
        (job.attempt_dir / "submission.json").unlink()

    again = until_submitted(run, "true")
    run.follow(again)

    assert again.job_id == job.job_id
    assert run.ended(50).outcome is Outcome.SUCCEEDED
    assert run.jobs() == [job.job_id]


def test_accounting_a_minute_behind_and_a_slurmctld_that_forgets_in_seconds(
    run: Run, other: Run, slurm_cluster: SlurmDaemons
) -> None:
    """Of a job's whole life only its exit file tells; what became of one that left none is told a minute later.

    Who has no patience for that gets an error, and the job no outcome.
    """
    cancelled = other.start("sleep 1000")
    with down(slurm_cluster, "slurmdbd"):
        behind_until = time.monotonic() + 60
        other.cluster.cancel(cancelled.job_id)
        # The lookup before a submission needs accounting; a job that is already in Slurm does not.
        script = run.attempt.attempt_dir / "job.sh"
        script.write_text(wrap_script(f"#!/bin/bash\n#SBATCH -o {run.attempt.attempt_dir}/out\ntrue\n", script.parent))
        declare_intent(run.attempt.attempt_dir, script, script.parent, after=0)
        run.cluster.submit(run.attempt.name, script, ["--mem=100"])
        job = run.recorded()
        wait_until(lambda: read_exit_code(job.attempt_dir) == 0)
        wait_until(lambda: not run.cluster.states([job.job_id, cancelled.job_id]))
        run.follow(job)
        ended = run.ended(50)
        (cancelled.attempt_dir / "exit_code").unlink(missing_ok=True)
        with pytest.raises(PermanentError, match=f"squeue has not known job {cancelled.job_id} since .*, and sacct"):
            Watcher(other.cluster, Graces(lost=5, unanswered=5)).follow(cancelled)
        time.sleep(max(0, behind_until - time.monotonic()))
    told = other.ended()

    assert (ended.outcome, ended.exit_file_code) == (Outcome.SUCCEEDED, 0)
    assert ended.status is not None
    assert "exit file" in ended.status.reason
    wait_until(lambda: run.jobs() == [job.job_id])
    assert told.status is not None
    assert (told.status.state, told.status.cancelled_by, told.outcome) == (JobState.CANCELLED, "0", Outcome.CANCELLED)
    assert other.jobs() == [cancelled.job_id]


# --- the nodes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lost", ["the node", "slurmd alone"])
def test_a_node_that_dies_under_the_job_is_infrastructure(lost: str, run: Run, slurm_cluster: SlurmDaemons) -> None:
    job = run.start("sleep 100", "--nodelist=node2")

    if lost == "the node":
        slurm_cluster.lose_node("node2")
    else:  # the script runs on for a while, and nobody hears of it
        slurm_cluster.kill_daemon("node2")
    try:
        ended = run.ended()
    finally:
        slurm_cluster.start_daemon("node2")
        wait_until(lambda: slurm_cluster.command("sinfo", "-h", "-o", "%T", "-n", "node2").stdout.strip() == "idle")

    assert ended.status is not None
    assert (ended.status.state, ended.status.nodes) == (JobState.NODE_FAIL, "node2")
    assert ended.outcome is Outcome.INFRASTRUCTURE
    assert run.jobs() == [job.job_id]


def test_a_job_on_a_drained_node_waits_until_the_node_is_resumed(run: Run, slurm_cluster: SlurmDaemons) -> None:
    slurm_cluster.command("scontrol", "update", "node=node2", "state=drain", "reason=disk")
    job = run.submit("true", "--nodelist=node2")
    run.follow(job)
    wait_until(lambda: any(status.reason not in ("", "Priority") for status in run.seen))
    waited = {status.state for status in run.seen}

    slurm_cluster.command("scontrol", "update", "node=node2", "state=resume")
    ended = run.ended(50)

    assert waited == {JobState.PENDING}
    assert ended.outcome is Outcome.SUCCEEDED
    assert run.jobs() == [job.job_id]


def test_a_job_above_its_memory_is_out_of_memory(run: Run) -> None:
    """Without cgroups slurmstepd kills it, and Slurm calls it FAILED for JobLaunchFailure: its log tells."""
    program = "import time; held = bytearray(b'x') * (300 << 20); time.sleep(60)"
    job = run.start(f'{sys.executable} -c "{program}"')

    ended = run.ended(evidence_of=lambda job: evidence(read_run(job, None), 50))

    assert ended.status is not None
    assert ended.status.state is JobState.FAILED
    assert ended.outcome is Outcome.OUT_OF_MEMORY
    assert run.jobs() == [job.job_id]


# --- people and other jobs -------------------------------------------------------------------------------------------


def test_a_job_that_an_operator_cancels_names_the_operator(run: Run, slurm_cluster: SlurmDaemons) -> None:
    slurm_cluster.command("sacctmgr", "-i", "add", "account", "ops")
    slurm_cluster.command("sacctmgr", "-i", "add", "user", "daemon", "account=ops", "adminlevel=operator")
    job = run.start("sleep 100")

    subprocess.run(
        ["scancel", str(job.job_id)], env=slurm_cluster.environment(), user="daemon", check=True, capture_output=True
    )
    ended = run.ended()

    assert ended.outcome is Outcome.CANCELLED
    assert ended.status is not None
    assert ended.status.cancelled_by == str(pwd.getpwnam("daemon").pw_uid)
    assert run.jobs() == [job.job_id]


def test_a_job_that_no_node_can_run_is_submitted_once_it_was_corrected(run: Run, slurm_cluster: SlurmDaemons) -> None:
    """Slurm keeps a FAILED record of what sbatch was refused. With a node drained, `--test-only` cannot tell."""
    slurm_cluster.command("scontrol", "update", "nodename=node2", "state=drain", "reason=a test")
    try:
        with pytest.raises(LaunchRefused, match="no node of the partition can run this"):
            run.submit("true", "--mem=99G")
        wait_until(lambda: "FAILED" in slurm_cluster.command("sacct", "-n", f"--name={run.attempt.name}").stdout)

        job = run.submit("true")
        run.follow(job)
        ended = run.ended(50)
    finally:
        slurm_cluster.command("scontrol", "update", "nodename=node2", "state=resume")

    assert ended.outcome is Outcome.SUCCEEDED
    assert run.jobs() == [job.job_id]


def test_a_job_that_an_administrator_requeues_is_followed_to_its_second_end(
    run: Run, slurm_cluster: SlurmDaemons
) -> None:
    """Our jobs do not allow it; an administrator can. The id stays, so the claim holds and the script runs again."""
    marker = run.attempt.workspace / "ran"
    job = run.start(f"test -e {marker} && exit 0; touch {marker}; sleep 100")
    wait_until(marker.exists)
    job_id = str(job.job_id)

    refused = slurm_cluster.command("scontrol", "requeue", job_id)
    slurm_cluster.command("scontrol", "update", f"job={job_id}", "requeue=1")
    slurm_cluster.command("scontrol", "requeue", job_id)
    # Slurm holds a requeued job back until its old credential has expired, two minutes.
    wait_until(lambda: slurm_cluster.command("squeue", "-h", "-o", "%r", "-j", job_id).stdout.strip() == "BeginTime")
    # slurmd takes a credential of the same second for the revoked one, and the job would end before its script begins.
    time.sleep(2)
    slurm_cluster.command("scontrol", "update", f"job={job_id}", "starttime=now")
    ended = run.ended(50)

    assert refused.returncode != 0
    assert ended.outcome is Outcome.SUCCEEDED
    assert run.jobs() == [job.job_id]


def test_a_job_whose_ranks_end_before_its_batch_shell_is_requeued_is_followed_to_its_second_end(
    run: Run, slurm_cluster: SlurmDaemons
) -> None:
    """Slurm's signal comes to the node of the ranks first: their failure has ended the script when the shell gets its own."""
    marker, end = run.attempt.workspace / "ran", run.attempt.workspace / "end"
    rank = f"srun --nodes=1 --ntasks=1 --nodelist=node2 sh -c 'until test -e {end}; do sleep 0.1; done; exit 9'"
    job = run.start(f"test -e {marker} && exit 0; touch {marker}; {rank}", "--nodes=2", "--ntasks=2")
    job_id = str(job.job_id)
    wait_until(marker.exists)
    slurm_cluster.command("scontrol", "update", f"job={job_id}", "requeue=1")
    end.touch()
    wait_until((run.attempt.attempt_dir / "exit_code").exists)

    slurm_cluster.command("scontrol", "requeue", job_id)
    wait_until(lambda: slurm_cluster.command("squeue", "-h", "-o", "%r", "-j", job_id).stdout.strip() == "BeginTime")
    time.sleep(2)
    slurm_cluster.command("scontrol", "update", f"job={job_id}", "starttime=now")
    ended = run.ended(50)

    assert (ended.outcome, ended.exit_file_code) == (Outcome.SUCCEEDED, 0)
    assert run.jobs() == [job.job_id]


def test_a_job_that_slurm_requeues_for_its_exit_code_runs_once(run: Run, slurm_cluster: SlurmDaemons) -> None:
    """RequeueExit does not honour --no-requeue. Here the second start comes before the first one's end is taken."""
    marker = run.attempt.workspace / "ran"
    run.watcher = Watcher(run.cluster)
    job = run.submit(f"echo again >> {marker}; exit 42")
    run.follow(job)
    job_id = str(job.job_id)
    wait_until(lambda: slurm_cluster.command("squeue", "-h", "-o", "%r", "-j", job_id).stdout.strip() == "BeginTime")
    time.sleep(2)
    slurm_cluster.command("scontrol", "update", f"job={job_id}", "starttime=now")

    ended = run.ended(0)

    assert marker.read_text() == "again\n"
    assert (ended.outcome, ended.exit_file_code) == (Outcome.PROGRAM_ERROR, 42)
    assert "exit code 42; Slurm then started it again, which ended at once" in ended.outcome_reason
    assert ended.status is not None
    assert ended.status.ended_at is not None
    assert ended.status.ended_at.timestamp() == pytest.approx((run.attempt.attempt_dir / "exit_code").stat().st_mtime)
    assert slurm_cluster.command("squeue", "-h", "-j", job_id).stdout == ""
    assert run.jobs() == [job.job_id]


@pytest.mark.parametrize(("code", "state"), [(42, "PENDING"), (43, "SPECIAL_EXIT")])
def test_a_job_that_slurm_queues_again_or_holds_for_its_exit_code_is_over(
    code: int, state: str, run: Run, slurm_cluster: SlurmDaemons
) -> None:
    """RequeueExitHold holds it until somebody releases or cancels it."""
    job = run.start(f"sleep 5; exit {code}", "--nodelist=node2")

    ended = run.ended(50)

    assert slurm_cluster.command("squeue", "-h", "-o", "%T", "-j", str(job.job_id)).stdout.strip() == state
    assert (ended.outcome, ended.exit_file_code) == (Outcome.TEARDOWN, code)
    assert "queued again by Slurm after its script had ended" in ended.outcome_reason
    assert ended.status is not None
    assert (ended.status.nodes, ended.status.exit_code) == ("node2", code)
    assert ended.status.started_at is not None
    run.cluster.cancel(job.job_id)
    assert run.jobs() == [job.job_id]


def test_the_forgotten_job_of_another_workspace_is_not_taken_for_that_of_a_submitter_that_died(
    run: Run, workspace: Path, slurm_cluster: SlurmDaemons
) -> None:
    """slurmctld tells a job's script for minutes after its end, and accounting for good."""
    theirs = Run(open_attempt(workspace / "theirs", run.attempt.run_key, run.cluster.settings), run.cluster)
    job = theirs.submit("true")
    declare_intent(run.attempt.attempt_dir, workspace / "launcher.sh", workspace, after=0)
    wait_until(lambda: "Invalid job id" in slurm_cluster.command("scontrol", "show", "job", str(job.job_id)).stderr)
    time.sleep(run.cluster.accounting_horizon)

    with pytest.raises(DamagedData, match="If another workspace of yours runs this night"):
        find_submission(run.attempt, run.cluster)

    assert run.cluster.script_of(job.job_id) == job.script
    theirs.close()


def test_a_preempted_job_is_infrastructure(run: Run, slurm_cluster: SlurmDaemons) -> None:
    job = run.start("sleep 100", "--partition=low", "--exclusive")

    urgent = slurm_cluster.command(
        "sbatch", "--parsable", "--partition=high", "--exclusive", "--output=/dev/null", "--wrap=true"
    )
    ended = run.ended()

    assert urgent.returncode == 0
    assert ended.status is not None
    assert ended.status.state is JobState.PREEMPTED
    assert ended.outcome is Outcome.INFRASTRUCTURE
    assert run.jobs() == [job.job_id]


def test_a_job_that_can_never_start_is_cancelled_with_the_advice(run: Run) -> None:
    # In the launcher's own script: what the plan says is asked of Slurm before the launcher runs.
    job = run.submit("#SBATCH --nodes=3\ntrue")
    run.follow(job)

    ended = run.ended(0)

    assert ended.outcome is Outcome.NEVER_STARTED
    assert "Request a number of nodes that the partition allows" in ended.outcome_reason
    assert run.jobs() == [job.job_id]


def test_a_job_whose_name_the_site_changes_at_its_submission_is_watched_found_and_cancelled(
    run: Run, slurm_cluster: SlurmDaemons
) -> None:
    """A job_submit plugin can do so; nothing has ever seen the job under its own name."""
    job = run.submit("sleep 1000", "--hold")
    slurm_cluster.command("scontrol", "update", f"job={job.job_id}", "jobname=acct_theirs")
    (job.attempt_dir / "submission.json").unlink()

    again = run.submit("true")
    slurm_cluster.command("scontrol", "release", str(job.job_id))
    run.follow(again)
    run.wait_for(JobState.RUNNING)
    time.sleep(7)  # longer than the grace of a lost job
    cancelled = cancel_jobs([run.attempt.run_key], run.attempt.workspace, run.cluster)
    ended = run.ended()

    assert again.job_id == job.job_id
    assert cancelled.jobs == ((run.attempt.run_key, job.job_id),)
    assert ended.status is not None
    assert (ended.outcome, ended.status.name, ended.status.cancelled_by) == (
        Outcome.CANCELLED,
        run.attempt.name,
        "0",
    )


def test_a_job_that_waits_longer_than_the_site_allows_is_cancelled(
    attempt: AttemptContext, cluster: CommandLineCluster
) -> None:
    impatient = CommandLineCluster(cluster.settings.model_copy(update={"max_pending": 2.0}))
    run = Run(attempt, impatient)
    run.follow(run.submit("true", "--begin=now+300"))

    ended = run.ended(0)
    run.close()

    assert ended.outcome is Outcome.NEVER_STARTED
    assert "pending for 2 s, last for BeginTime. Raise the cluster's max_pending" in ended.outcome_reason


LOG = "log-train_${SLURM_JOB_ID}_0.out"  # as NeMo-Run names the ranks' text

# --- the logs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "steps"),
    [
        ("true", 0),
        ("rm -r ../train", 0),
        (
            "printf ' iteration        3/      50 | elapsed time per iteration (ms): 10.0 | lm loss: 1.0E+00 | grad norm: 1.0 |"
            " number of skipped iterations: 0 | number of nan iterations: 0 |' > LOG",
            3,
        ),
        # No disk is used for the hole, which is one line of a gigabyte.
        ("truncate -s 1G LOG", 0),
    ],
    ids=["missing", "folder gone", "without a newline", "huge"],
)
def test_a_log_that_is_not_what_it_should_be_costs_no_verdict(body: str, steps: int, run: Run) -> None:
    job = run.submit(f"cd {run.attempt.attempt_dir}/nemorun/experiments/train/*/train; {body.replace('LOG', LOG)}")
    run.follow(job)

    ended = run.ended(evidence_of=lambda job: evidence(read_run(job, None), 50))

    assert (ended.outcome, ended.exit_file_code) == (Outcome.SHORT, 0)
    assert ended.outcome_reason == f"ended after {steps} of 50 steps as if all were done"


# --- the time limit, and what is lost for ever -------------------------------------------------------------------------------------------


def test_a_job_over_its_time_limit_is_a_timeout(limited: Run) -> None:
    ended = limited.ended()

    assert ended.status is not None
    assert ended.status.state is JobState.TIMEOUT
    assert ended.outcome is Outcome.TIMEOUT
    assert limited.jobs() == [ended.job_id]


def test_a_job_whose_id_another_job_gets_after_slurmctld_lost_its_state_is_infrastructure(
    run: Run, slurm_cluster: SlurmDaemons
) -> None:
    job = run.start("sleep 100")
    wait_until(lambda: str(job.job_id) in slurm_cluster.command("sacct", "-X", "-n", "-o", "jobid").stdout)

    slurm_cluster.lose_state()
    slurm_cluster.start_daemon("slurmctld")
    wait_until(lambda: slurm_cluster.command("sinfo", "-h", "-o", "%T %D").stdout.strip() == "idle 2")
    other = 0
    while other < job.job_id:
        other = run.cluster.submit("theirs", _true(run.attempt.workspace), ["--mem=10"])
    ended = run.ended()

    assert other == job.job_id
    assert ended.outcome is Outcome.INFRASTRUCTURE
    assert ended.status is not None
    assert ended.status.name == run.attempt.name
    assert ended.status.reason.startswith("lost: ")
    assert run.jobs() == [job.job_id]


def _true(folder: Path) -> Path:
    script = folder / "true.sh"
    script.write_text("#!/bin/sh\n#SBATCH --output=/dev/null\n")
    return script
