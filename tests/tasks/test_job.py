"""What a job is submitted with, and what the watch stage says about its end, on the embedded cluster."""

import contextvars
import threading
from functools import partial
from pathlib import Path

import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.logging.handlers import APILogWorker

from nightbridge.errors import LaunchRefused, TransientError
from nightbridge.files import write_model
from nightbridge.masking import MASK
from nightbridge.models import (
    ClusterSettings,
    Job,
    JobState,
    JobStatus,
    Outcome,
    RunDependency,
    SecretRef,
    Site,
    utc_now,
)
from nightbridge.outputs import run_evidence
from nightbridge.outputs.run_evidence import RunToRead
from nightbridge.slurm.attempt_files import (
    AttemptContext,
    declare_intent,
    open_attempt,
    read_ended,
    read_waiting,
    record_ended,
)
from nightbridge.slurm.attempts import attempts_of
from nightbridge.slurm.factory import open_cluster
from nightbridge.slurm.outcome import RunEvidence
from nightbridge.slurm.script import CLAIM, EXIT_CODE
from nightbridge.slurm.states import parse_squeue
from nightbridge.slurm.watcher import Graces, Watcher
from nightbridge.tasks import context, job
from nightbridge.tasks.context import shared_night
from nightbridge.tasks.job import needs_another_job, state_of, submit, submit_and_watch, wait_for_dependencies, watch
from nightbridge.tasks.limits import job_slots
from nightbridge.tasks.stage import DELAY_VARIABLE, RETRIES
from tests.builders import make_job, make_plan, make_spec, record_submission
from tests.waiting import wait_until

pytestmark = pytest.mark.usefixtures("flows_here")

KNOWN = "a known value"
SHAPED = "hf_" + "AbCdEfGhIjKlMnOpQrStUvWxYz01234567"


def logged() -> str:
    """The newest lines of all logs, those that this process has still to send among them."""
    APILogWorker.drain_all(timeout=60)
    with get_client(sync_client=True) as client:
        newest = client.request("POST", "/logs/filter", json={"sort": "TIMESTAMP_DESC"}).json()
    return "\n".join(log["message"] for log in newest)


@pytest.mark.parametrize("is_known", [True, False])
def test_the_error_that_ended_a_job_is_kept_and_told_without_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_known: bool
) -> None:
    """Also where whoever resumes the night has no such variable: then the error is neither kept nor told."""
    if is_known:
        monkeypatch.setenv("KNOWN_SECRET", KNOWN)
    site = Site(workspace=tmp_path)
    attempt_dir = tmp_path / "runs" / "watched" / "a1"
    attempt_dir.mkdir(parents=True)
    script = attempt_dir / "job.sh"
    script.write_text(
        "#!/bin/bash\n#SBATCH --output=/dev/null\n"
        f"echo '[rank0]: OSError: {KNOWN} and {SHAPED} refused' > {attempt_dir}/log-x_${{SLURM_JOB_ID}}_0.out\nexit 1\n"
    )
    job_id = open_cluster(site.cluster, tmp_path).submit("watched-a1", script, [])
    job = make_job("watched", attempt_dir, job_id=job_id, cluster="local", submitted_at=utc_now())
    secret = SecretRef(source="env", name="KNOWN_SECRET")
    plan = make_plan("watched", attempt_dir, tasks_per_node=1, secret_environment={"TOKEN": secret})

    @flow
    def night() -> Job:
        ended: Job = watch(job, plan, site)
        return ended

    ended = night()

    assert ended.outcome is Outcome.PROGRAM_ERROR
    reason = f"OSError: {MASK} and {MASK} refused" if is_known else "not shown, as it may quote secrets"
    assert reason in ended.outcome_reason
    assert read_ended(attempt_dir) == ended
    told = logged()
    assert reason in told
    assert KNOWN not in ended.outcome_reason
    assert KNOWN not in told
    assert SHAPED not in told


def test_a_job_whose_output_is_away_when_it_ends_is_judged_once_it_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, impatient: None
) -> None:
    """What takes the file system away ends the job, too, and may last longer than the stage's retries."""
    site, attempt_dir = Site(workspace=tmp_path), tmp_path / "runs" / "away" / "a1"
    attempt_dir.mkdir(parents=True)
    script = attempt_dir / "job.sh"
    script.write_text("#!/bin/bash\n#SBATCH --output=/dev/null\nexit 1\n")
    job_id = open_cluster(site.cluster, tmp_path).submit("away-a1", script, [])
    ended_job = make_job("away", attempt_dir, job_id=job_id, cluster="local", submitted_at=utc_now())
    plan = make_plan("away", attempt_dir, tasks_per_node=1)
    really, away = run_evidence.evidence_of, [TransientError("cannot be read now")] * (RETRIES + 2)

    noted = []

    def evidence_of(run: RunToRead) -> RunEvidence:
        noted.append(read_waiting(plan.run_key, tmp_path))
        if away:
            raise away.pop()
        return really(run)

    monkeypatch.setattr(job, "evidence_of", evidence_of)

    @flow
    def night() -> Job:
        ended: Job = watch(ended_job, plan, site)
        return ended

    assert night().outcome is Outcome.PROGRAM_ERROR
    assert away == []
    assert {waiting.what for waiting in noted[1:] if waiting} == {"cannot be read now"}


@pytest.mark.parametrize(
    "left", [{}, {EXIT_CODE: "143"}, {CLAIM: "12", EXIT_CODE: "143"}], ids=lambda left: "-".join(left)
)
def test_a_job_that_slurm_has_forgotten_since_its_end_was_recorded_ended_as_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: dict[str, str]
) -> None:
    """As of a night that is started once more after accounting was purged: as a lost one it would be submitted again.

    The exit file alone tells no cancellation and no time limit. Another job may have claimed the attempt.
    """
    monkeypatch.setattr(context, "Watcher", partial(Watcher, graces=Graces(silent=0.2, lost=0.2)))
    slurm = FullQueue(tmp_path, "start_post_comp", Outcome.TIMEOUT)
    (tmp_path / "bin" / "squeue").write_text("#!/bin/sh\n")
    attempt_dir = slurm.base.attempt_dir
    for name, number in left.items():
        (attempt_dir / name).write_text(number)
    submitted = make_job("base", attempt_dir, job_id=11, cluster="full", outcome=Outcome.TIMEOUT)
    ended = submitted.model_copy(update={"job_id": int(left.get(CLAIM, 11))})
    plan = make_plan("base", attempt_dir, tasks_per_node=1)

    record_ended(ended)

    @flow
    def night() -> Job:
        forgotten: Job = watch(submitted, plan, slurm.site)
        return forgotten

    assert night() == read_ended(attempt_dir) == ended


HELD = "echo '11|SPECIAL_EXIT|2026-11-23T14:34:46|N/A|N/A||JobHeldUser|base-a1'"
OF_SOMEBODY_ELSE = (
    """case "$*" in *--name=*) ;; *) echo '11|RUNNING|2026-11-23T20:34:46|N/A|N/A|node1|None|other';; esac"""
)
LOST = "11|CANCELLED|2026-11-23T14:34:46|Unknown|2026-11-23T20:34:46|None assigned|None|0:0|base-a1"


@pytest.mark.parametrize(
    ("live", "past", "cancelled"), [(HELD, "", "11\n"), (OF_SOMEBODY_ELSE, LOST, "")], ids=["held", "lost"]
)
def test_a_job_that_slurm_holds_after_its_end_is_recorded_and_leaves_the_queue(
    live: str, past: str, cancelled: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RequeueExitHold: nobody would release it, and it would count against the site's limits.

    Where slurmctld has lost it, its id may be another job's by now.
    """
    monkeypatch.setattr(context, "Watcher", partial(Watcher, graces=Graces(silent=0.2, detail=0.2)))
    slurm = FullQueue(tmp_path, "start_post_comp", Outcome.TIMEOUT)
    attempt_dir = slurm.base.attempt_dir
    (attempt_dir / CLAIM).write_text("11 0 node1.99")
    (attempt_dir / EXIT_CODE).write_text("43")
    (tmp_path / "cancelled").touch()
    scancel = f'[ -e {attempt_dir}/ended.json ] && echo "$*" >> {tmp_path}/cancelled'
    for name, body in (("squeue", live), ("sacct", f"echo '{past}'"), ("scancel", scancel)):
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    job = make_job("base", attempt_dir, job_id=11, cluster="full")
    plan = make_plan("base", attempt_dir, tasks_per_node=1)

    @flow
    def night() -> Job:
        ended: Job = watch(job, plan, slurm.site)
        return ended

    ended = night()

    assert (ended.outcome, ended.exit_file_code) == (Outcome.PROGRAM_ERROR, 43)
    assert ("queued again by Slurm after its script" in ended.outcome_reason) is (live == HELD)
    assert read_ended(attempt_dir) == ended
    assert (tmp_path / "cancelled").read_text() == cancelled


# --- dependencies ----------------------------------------------------------------------------------------------------

LAUNCHER = """
mkdir -p "$NEMORUN_HOME"
printf '#!/bin/bash\\ntrue\\n' > "$NEMORUN_HOME/../train_sbatch.sh"
sbatch --requeue --parsable "$NEMORUN_HOME/../train_sbatch.sh"
"""


class FullQueue:
    """A Slurm whose queue is full at first. Meanwhile the job 11 ends, that the run of these tests depends on."""

    def __init__(self, folder: Path, kind: str, outcome: Outcome) -> None:
        self.site = Site(
            workspace=folder / "workspace",
            cluster=ClusterSettings(kind="slurm", name="full", bin_dir=folder / "bin", max_jobs=1),
        )
        self.base = self.add_to_base(11)
        ended = make_job("base", self.base.attempt_dir, job_id=11, cluster="full", outcome=outcome)
        write_model(folder / "ended.json", ended)
        self._calls = folder / "calls"
        self._calls.touch()
        row = "{}|RUNNING|2026-11-23T14:34:46|2026-11-23T14:34:46|N/A|node1|None|base-a{}"
        self._install(
            folder / "bin",
            squeue=f"echo '{row.format(11, 1)}'; echo '{row.format(13, 2)}'",
            sacct="",
            sbatch=f"""case "$*" in *--test-only*) exit 0;; esac
                echo "$*" >> {self._calls}
                [ $(wc -l < {self._calls}) = 1 ] || {{ echo 12; exit 0; }}
                cp {folder}/ended.json {self.base.attempt_dir}
                echo 'sbatch: error: QOSMaxSubmitJobPerUserLimit' >&2; exit 1""",
        )
        base = RunDependency(type=kind, id="base", run_keys=("base",))
        self.run = make_spec().model_copy(update={"after": (base,)})
        attempt = open_attempt(self.site.workspace, self.run.run_key, self.site.cluster)
        (folder / "launcher.sh").write_text(LAUNCHER)
        argv = ("/bin/bash", str(folder / "launcher.sh"))
        self.plan = make_plan(self.run.run_key, attempt.attempt_dir, argv=argv, tasks_per_node=1)

    def add_to_base(self, job_id: int) -> AttemptContext:
        """Another attempt of the run that is depended on, whose job is in Slurm."""
        number = len(attempts_of("base", self.site.workspace)) + 1
        attempt = open_attempt(self.site.workspace, "base", self.site.cluster, number)
        record_submission(attempt.attempt_dir, attempt.name, job_id, cluster="full")
        return attempt

    def dependencies(self) -> list[str]:
        """The dependency that each call of sbatch was given; empty where it was given none."""
        words = [line.split() for line in self._calls.read_text().splitlines()]
        return [" ".join(word for word in call if word.startswith("--dependency=")) for call in words]

    def _install(self, folder: Path, **scripts: str) -> None:
        folder.mkdir()
        for name, body in scripts.items():
            (folder / name).write_text(f"#!/bin/sh\n{body}\n")
            (folder / name).chmod(0o755)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DELAY_VARIABLE, "0.01")


@pytest.mark.usefixtures("impatient")
def test_a_run_whose_dependency_fails_while_the_queue_is_full_is_not_submitted(tmp_path: Path) -> None:
    """By the next try Slurm may have forgotten that job, and would start this one as if nothing had happened."""
    slurm = FullQueue(tmp_path, "start_post_success", Outcome.PROGRAM_ERROR)

    @flow
    def night() -> None:
        with pytest.raises(LaunchRefused, match="'base' has ended well, and that ended as program_error"):
            submit(slurm.run, slurm.plan, slurm.site)

    night()

    assert slurm.dependencies() == ["--dependency=afterok:11"]


@pytest.mark.usefixtures("impatient")
def test_what_has_ended_while_the_queue_was_full_is_not_waited_for_by_its_job(tmp_path: Path) -> None:
    slurm = FullQueue(tmp_path, "start_post_comp", Outcome.PROGRAM_ERROR)

    @flow
    def night() -> Job:
        submitted: Job = submit(slurm.run, slurm.plan, slurm.site)
        return submitted

    assert night().job_id == 12
    assert slurm.dependencies() == ["--dependency=afterany:11", ""]


@pytest.mark.usefixtures("impatient")
def test_a_job_whose_dependency_is_over_is_not_submitted_before_that_end_is_recorded(tmp_path: Path) -> None:
    """As of a night that is resumed hours later: Slurm has forgotten the job, and would start this one at once."""
    slurm = FullQueue(tmp_path, "start_post_success", Outcome.PROGRAM_ERROR)
    (tmp_path / "bin" / "squeue").write_text("#!/bin/sh\n")
    ended = make_job("base", slurm.base.attempt_dir, job_id=11, outcome=Outcome.PROGRAM_ERROR)
    recording = threading.Timer(1, record_ended, args=(ended,))

    @flow
    def night() -> None:
        with shared_night() as shared:
            shared.register_runs(["base"])
            recording.start()
            with pytest.raises(LaunchRefused, match="'base' has ended well, and that ended as program_error"):
                submit(slurm.run, slurm.plan, slurm.site)

    night()

    assert slurm.dependencies() == []


def test_a_job_whose_dependency_is_over_is_refused_where_nobody_is_there_to_record_that_end(tmp_path: Path) -> None:
    """As of a resumed night in which the run that it depends on has failed before it found its job's end."""
    slurm = FullQueue(tmp_path, "start_post_success", Outcome.PROGRAM_ERROR)
    (tmp_path / "bin" / "squeue").write_text("#!/bin/sh\n")

    @flow
    def night() -> None:
        with pytest.raises(LaunchRefused, match="'base' has ended well, and that failed before it recorded how job 11"):
            submit(slurm.run, slurm.plan, slurm.site)

    night()

    assert slurm.dependencies() == []


@pytest.mark.usefixtures("impatient")
def test_a_slot_is_given_back_for_the_next_attempt_of_what_a_run_depends_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm = FullQueue(tmp_path, "start_post_success", Outcome.INFRASTRUCTURE)
    monkeypatch.setattr(job, "watch", lambda submitted, plan, site: submitted)

    def try_base_again() -> None:
        wait_until((slurm.base.attempt_dir / "ended.json").exists)
        with job_slots(make_plan("base", tmp_path), slurm.site):
            slurm.add_to_base(13)

    @flow
    def night() -> Job:
        with shared_night() as shared:
            shared.register_runs(["base"])
            other = threading.Thread(target=contextvars.copy_context().run, args=(try_base_again,))
            other.start()
            submitted = submit_and_watch(slurm.run, slurm.plan, slurm.site)
            other.join()
        return submitted

    assert night().job_id == 12
    assert slurm.dependencies() == ["--dependency=afterok:11", "--dependency=afterok:13"]


@pytest.mark.usefixtures("impatient")
def test_a_job_that_nothing_has_recorded_is_found_before_its_dependency_is_judged(tmp_path: Path) -> None:
    slurm = FullQueue(tmp_path, "start_post_success", Outcome.PROGRAM_ERROR)
    record_ended(make_job("base", slurm.base.attempt_dir, job_id=11, outcome=Outcome.PROGRAM_ERROR))
    declare_intent(slurm.plan.attempt_dir, tmp_path / "train_sbatch.sh", tmp_path / "train", after=0)
    squeue = tmp_path / "bin" / "squeue"
    row = f"12|PENDING|2026-11-23T14:34:46|N/A|N/A||Dependency|{slurm.run.run_key}-a1"
    squeue.write_text(f"#!/bin/sh\necho '{row}'\n")

    @flow
    def night() -> Job:
        wait_for_dependencies(slurm.run, slurm.plan, slurm.site)
        submitted: Job = submit(slurm.run, slurm.plan, slurm.site)
        return submitted

    assert night().job_id == 12


class Chain:
    """A run whose first job Slurm never started, since that of the run it depends on had failed."""

    def __init__(self, workspace: Path) -> None:
        self.site = Site(workspace=workspace, cluster=ClusterSettings(max_attempts=3))
        base = RunDependency(type="start_post_success", id="base", run_keys=("base",))
        self.run = make_spec().model_copy(update={"after": (base,)})
        self.base = self.attempt("base", 1)
        self.jobs = [self.never_started(self.attempt(self.run.run_key, 1))]

    def attempt(self, run_key: str, number: int) -> AttemptContext:
        attempt = open_attempt(self.site.workspace, run_key, self.site.cluster, number)
        record_submission(attempt.attempt_dir, attempt.name, number)
        return attempt

    def never_started(self, attempt: AttemptContext, reason: str = "DependencyNeverSatisfied") -> Job:
        status = JobStatus(job_id=attempt.attempt, state=JobState.CANCELLED, reason=reason)
        return make_job(
            self.run.run_key,
            attempt.attempt_dir,
            status=status,
            outcome=Outcome.NEVER_STARTED,
            submitted_at=utc_now(),
        )

    def end_base(self, outcome: Outcome) -> None:
        record_ended(make_job("base", self.base.attempt_dir, outcome=outcome))

    def needs_another_job(self, *active: str) -> bool:
        with shared_night() as night:
            night.register_runs(active)
            return needs_another_job(self.run, self.jobs, self.site)


def test_a_run_is_tried_again_when_what_it_depends_on_is(tmp_path: Path) -> None:
    chain = Chain(tmp_path)
    chain.end_base(Outcome.INFRASTRUCTURE)

    assert chain.needs_another_job("base")

    chain.base = chain.attempt("base", 2)
    chain.end_base(Outcome.SUCCEEDED)

    assert chain.needs_another_job()


def test_a_run_is_tried_again_when_what_it_depends_on_waits_for_another_try_of_a_third_run(tmp_path: Path) -> None:
    chain = Chain(tmp_path)
    record_ended(chain.never_started(chain.base))

    assert chain.needs_another_job("base")
    assert not chain.needs_another_job()


@pytest.mark.parametrize(("outcome", "active"), [(Outcome.PROGRAM_ERROR, ("base",)), (Outcome.INFRASTRUCTURE, ())])
def test_a_run_is_not_tried_again_when_what_it_depends_on_is_not(
    tmp_path: Path, outcome: Outcome, active: tuple[str, ...]
) -> None:
    chain = Chain(tmp_path)
    chain.end_base(outcome)

    assert not chain.needs_another_job(*active)


def test_a_run_is_tried_again_for_what_it_depends_on_as_often_as_for_the_cluster(tmp_path: Path) -> None:
    chain = Chain(tmp_path)
    chain.end_base(Outcome.INFRASTRUCTURE)
    chain.jobs += [chain.never_started(chain.attempt(chain.run.run_key, number)) for number in (2, 3)]

    assert not chain.needs_another_job("base")


def test_a_job_that_never_started_for_another_reason_gets_no_other_one(tmp_path: Path) -> None:
    chain = Chain(tmp_path)
    chain.end_base(Outcome.SUCCEEDED)
    chain.jobs = [chain.never_started(chain.attempt(chain.run.run_key, 2), "QOSNotAllowed")]

    assert not chain.needs_another_job("base")


# --- how a job in the queue is told ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ("PENDING", "held by its user: `scontrol release 7`"),
        ("REQUEUE_HOLD", "held by its user: `scontrol release 7`"),
        ("SPECIAL_EXIT", "its script has ended, and the site holds jobs with its exit code (RequeueExitHold)"),
    ],
)
def test_a_job_in_the_queue_says_since_when_and_what_to_type(state: str, words: str) -> None:
    (held,) = parse_squeue(f"7|{state}|2026-11-23T14:34:46|N/A|N/A||JobHeldUser|job")

    assert state_of(held) == f"{state} since 2026-11-23 14:34 UTC (JobHeldUser, {words})"


def test_a_job_that_runs_says_no_old_reason() -> None:
    (running,) = parse_squeue("7|RUNNING|2026-11-23T14:34:46|2026-11-23T14:40:00|N/A|node1|JobHeldUser|job")

    assert state_of(running) == "RUNNING"
