"""A run's attempts: which one is gone on with, when another is opened, and what is cancelled."""

import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from nightbridge.errors import DamagedData
from nightbridge.models import GitRepo, Job, Outcome, RunSpec, Site, TestDefinition, utc_now
from nightbridge.slurm import attempt_files
from nightbridge.slurm.attempt_files import (
    AttemptContext,
    declare_intent,
    last_attempt,
    read_attempt,
    read_ended,
    read_submission,
    record_ended,
)
from nightbridge.slurm.attempts import (
    NO_REQUEST,
    AttemptRequest,
    attempts_of,
    cancel_jobs,
    choose_attempt,
    ended_jobs,
    may_try_again,
    next_attempt,
)
from nightbridge.slurm.local import LocalCluster
from nightbridge.slurm.sbatch_shim import find_submission, submit_once
from tests.nightbridge.embedded.local_cluster import KILL_WAIT, wait_for_end, wait_for_state, write_script

LATER = datetime.now(UTC) + timedelta(days=1)
NEW, AFTER_FAILURE = AttemptRequest(new=LATER), AttemptRequest(after_failure=LATER)
"""Requests that are made when everything in a test has happened."""

TEST = TestDefinition(
    id="llama3-8b",
    name="llama3_8b",
    cmd_args={},
    git_repos=(GitRepo(url="https://example.org/Megatron-Bridge.git"),),
    nemo_run_repo=GitRepo(url="https://example.org/Run.git"),
)
RUN = RunSpec(scenario="nightly", night="2026-11-21", test=TEST)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(workspace=tmp_path)


def end(attempt: AttemptContext, outcome: Outcome) -> Job:
    """Record that the attempt's job ended like this."""
    job = Job(
        run_key=attempt.run_key,
        attempt=attempt.attempt,
        job_id=100 + attempt.attempt,
        cluster=attempt.cluster.name,
        attempt_dir=attempt.attempt_dir,
        script=attempt.attempt_dir / "job.sh",
        experiment_dir=attempt.attempt_dir,
        submitted_at=utc_now(),
        outcome=outcome,
    )
    record_ended(job)
    return job


def numbers(site: Site) -> list[int]:
    return [attempt.attempt for attempt in attempts_of(RUN.run_key, site.workspace)]


# --- which attempt ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("requested", [NO_REQUEST, NEW, AFTER_FAILURE])
def test_a_new_run_begins_with_its_first_attempt(site: Site, requested: AttemptRequest) -> None:
    attempt = choose_attempt(requested, RUN, site)

    assert attempt.name == f"{RUN.run_key}-a1"
    assert attempt.attempt_dir == site.workspace / "runs" / RUN.run_key / "a1"
    assert numbers(site) == [1]


@pytest.mark.parametrize("requested", [NO_REQUEST, NEW, AFTER_FAILURE])
def test_an_attempt_that_has_not_ended_is_always_resumed(site: Site, requested: AttemptRequest) -> None:
    first = choose_attempt(NO_REQUEST, RUN, site)

    assert choose_attempt(requested, RUN, site) == first
    assert numbers(site) == [1]


def test_a_copy_of_an_attempts_folder_is_no_attempt(site: Site) -> None:
    first = choose_attempt(NO_REQUEST, RUN, site)
    end(first, Outcome.INFRASTRUCTURE)

    shutil.copytree(first.attempt_dir, first.attempt_dir.with_name("a1.old"))

    assert numbers(site) == [1]
    assert len(ended_jobs(RUN, site)) == 1


def test_an_attempt_of_a_workspace_that_was_moved_is_found_by_a_link_at_its_former_path(tmp_path: Path) -> None:
    site = Site(workspace=tmp_path / "former")
    opened = choose_attempt(NO_REQUEST, RUN, site)
    moved = site.workspace.rename(tmp_path / "moved")
    (recorded,) = attempts_of(RUN.run_key, moved)

    with pytest.raises(DamagedData, match="a link to it at its former path"):
        read_attempt(recorded.attempt_dir)

    site.workspace.symlink_to(moved)
    assert read_attempt(recorded.attempt_dir) == opened


GOOD = (Outcome.SUCCEEDED, Outcome.TEARDOWN)


@pytest.mark.parametrize("outcome", list(Outcome))
def test_an_ended_attempt_is_kept_unless_the_user_requests_another(site: Site, outcome: Outcome) -> None:
    end(choose_attempt(NO_REQUEST, RUN, site), outcome)

    assert choose_attempt(NO_REQUEST, RUN, site).attempt == 1
    assert choose_attempt(NEW, RUN, site).attempt == 2


@pytest.mark.parametrize("outcome", list(Outcome))
def test_a_retry_opens_another_attempt_after_a_bad_end_only(site: Site, outcome: Outcome) -> None:
    end(choose_attempt(NO_REQUEST, RUN, site), outcome)

    assert choose_attempt(AFTER_FAILURE, RUN, site).attempt == (1 if outcome in GOOD else 2)


@pytest.mark.parametrize("field", ["new", "after_failure"])
def test_a_request_that_is_repeated_opens_one_attempt_however_that_ends(site: Site, field: str) -> None:
    end(choose_attempt(NO_REQUEST, RUN, site), Outcome.SHORT)
    requested = AttemptRequest.model_validate({field: wait_for_the_clock()})

    end(choose_attempt(requested, RUN, site), Outcome.SHORT)

    assert choose_attempt(requested, RUN, site).attempt == 2
    assert numbers(site) == [1, 2]


def test_an_attempt_that_ran_when_another_was_requested_is_enough_when_it_has_ended(site: Site) -> None:
    first = choose_attempt(NO_REQUEST, RUN, site)
    requested = AttemptRequest(new=wait_for_the_clock())
    assert choose_attempt(requested, RUN, site) == first

    end(first, Outcome.SHORT)

    assert choose_attempt(requested, RUN, site) == first


def wait_for_the_clock() -> datetime:
    """A time that is later than that of any file so far, and earlier than that of any file from now on."""
    time.sleep(0.02)  # file systems stamp with the time of the last tick
    now = utc_now()
    time.sleep(0.02)
    return now


def test_attempts_are_in_the_order_of_their_numbers_and_not_of_their_names(site: Site) -> None:
    for after in range(11):
        next_attempt(RUN, site, after=after)

    assert numbers(site) == list(range(1, 12))
    assert choose_attempt(NO_REQUEST, RUN, site).attempt == 11


def test_an_unrecorded_folder_is_no_attempt_until_it_is_resumed(site: Site) -> None:
    (site.workspace / "runs" / RUN.run_key / "a1").mkdir(parents=True)
    assert numbers(site) == []

    assert choose_attempt(NO_REQUEST, RUN, site).attempt == 1
    assert numbers(site) == [1]


def test_an_attempt_whose_record_is_damaged_is_not_overlooked(site: Site) -> None:
    attempt = next_attempt(RUN, site, after=0)
    (attempt.attempt_dir / "attempt.json").write_text("{}")

    with pytest.raises(DamagedData, match=r"attempt\.json.* remove it, and start again"):
        numbers(site)

    (attempt.attempt_dir / "attempt.json").unlink()
    assert choose_attempt(NO_REQUEST, RUN, site).name == attempt.name
    assert numbers(site) == [1]


def test_processes_that_see_one_attempt_end_go_on_with_one_next_attempt(site: Site) -> None:
    """A host that comes back after it was given up, or a person's run of the night beside the worker's."""
    first = choose_attempt(NO_REQUEST, RUN, site)
    end(first, Outcome.INFRASTRUCTURE)

    second = next_attempt(RUN, site, after=first.attempt)
    end(second, Outcome.INFRASTRUCTURE)
    third = next_attempt(RUN, site, after=second.attempt)

    assert next_attempt(RUN, site, after=first.attempt) == second
    assert next_attempt(RUN, site, after=second.attempt) == third
    assert numbers(site) == [1, 2, 3]


def test_processes_that_begin_a_run_at_once_have_one_first_attempt(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    found_none = threading.Barrier(2)

    def look(run_dir: Path) -> int:
        number = last_attempt(run_dir)
        found_none.wait(10)
        return number

    monkeypatch.setattr(attempt_files, "last_attempt", look)
    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(lambda _: choose_attempt(NO_REQUEST, RUN, site), range(2))

    assert one == other
    assert numbers(site) == [1]


# --- how attempts ended ----------------------------------------------------------------------------------------------


def test_every_ended_job_is_kept_oldest_first(site: Site) -> None:
    first = end(next_attempt(RUN, site, after=0), Outcome.INFRASTRUCTURE)
    second = end(next_attempt(RUN, site, after=1), Outcome.SUCCEEDED)
    next_attempt(RUN, site, after=2)

    assert ended_jobs(RUN, site) == (first, second)


def test_a_record_of_an_end_that_cannot_be_read_is_named(site: Site) -> None:
    attempt = next_attempt(RUN, site, after=0)
    end(attempt, Outcome.SUCCEEDED)
    (attempt.attempt_dir / "ended.json").write_text('{"run_key": "x"}')

    with pytest.raises(DamagedData, match=r"ended\.json"):
        read_ended(attempt.attempt_dir)


def test_only_failures_of_the_cluster_are_tried_again(site: Site) -> None:
    may = {}
    for after, outcome in enumerate(Outcome):
        end(next_attempt(RUN, site, after=after), outcome)
        may[outcome] = may_try_again(ended_jobs(RUN, site), site.cluster)

    assert [outcome for outcome, again in may.items() if again] == [Outcome.INFRASTRUCTURE]


def test_a_run_that_has_not_ended_is_not_tried_again(site: Site) -> None:
    assert not may_try_again(ended_jobs(RUN, site), site.cluster)

    next_attempt(RUN, site, after=0)

    assert not may_try_again(ended_jobs(RUN, site), site.cluster)


@pytest.mark.parametrize("most", [1, 3])
def test_the_cluster_may_fail_so_often_and_no_more(site: Site, most: int) -> None:
    site = site.model_copy(update={"cluster": site.cluster.model_copy(update={"max_attempts": most})})
    tries = 0
    while True:
        end(next_attempt(RUN, site, after=tries), Outcome.INFRASTRUCTURE)
        tries += 1
        if not may_try_again(ended_jobs(RUN, site), site.cluster):
            break

    assert tries == most


# --- jobs ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def cluster(site: Site) -> Iterator[LocalCluster]:
    opened = LocalCluster(site.cluster, site.workspace / "cluster", kill_wait=KILL_WAIT)
    yield opened
    for _, job_id in cancel_jobs([RUN.run_key], site.workspace, opened).jobs:
        wait_for_end(opened, job_id)


def start(cluster: LocalCluster, attempt: AttemptContext, body: str) -> int:
    script = write_script(attempt.attempt_dir / "job.sh", f"#SBATCH --output={attempt.attempt_dir}/out\n{body}")
    return cluster.submit(attempt.name, script, [])


def test_the_jobs_of_an_attempt_are_found_without_any_record_of_them(site: Site, cluster: LocalCluster) -> None:
    first, second = next_attempt(RUN, site, after=0), next_attempt(RUN, site, after=1)
    job_id = start(cluster, first, "true")

    assert [job.job_id for job in cluster.find(first.name).jobs] == [job_id]
    assert cluster.find(second.name).jobs == ()


def test_cancelling_a_run_ends_its_live_jobs_and_no_others(site: Site, cluster: LocalCluster) -> None:
    ended = start(cluster, next_attempt(RUN, site, after=0), "true")
    wait_for_end(cluster, ended)
    live = start(cluster, next_attempt(RUN, site, after=1), "sleep 300")
    other_run = RUN.model_copy(update={"repeat": 1})
    other = start(cluster, next_attempt(other_run, site, after=0), "sleep 300")
    wait_for_state(cluster, live, "RUNNING")

    assert cancel_jobs([RUN.run_key], site.workspace, cluster) == (((RUN.run_key, live),), ())

    assert wait_for_end(cluster, live).state == "CANCELLED"
    assert cluster.states([ended])[ended].state == "COMPLETED"
    assert cluster.states([other])[other].state in ("PENDING", "RUNNING")
    assert cancel_jobs([RUN.run_key], site.workspace, cluster) == ((), ())
    assert cancel_jobs([other_run.run_key], site.workspace, cluster) == (((other_run.run_key, other),), ())
    wait_for_end(cluster, other)


def test_a_job_that_every_source_has_forgotten_is_known_by_its_claim(site: Site, cluster: LocalCluster) -> None:
    attempt = next_attempt(RUN, site, after=0)
    declare_intent(attempt.attempt_dir, site.workspace / "job.sh", site.workspace / "exp", after=0)
    assert find_submission(attempt, cluster) is None

    (attempt.attempt_dir / "claim").write_text("4711 0 node1.99\n")
    found = find_submission(attempt, cluster)

    assert found is not None
    assert (found.job_id, found.experiment_dir) == (4711, site.workspace / "exp")
    assert find_submission(attempt, cluster) == found


def test_the_job_of_another_workspace_is_not_taken_for_the_own_one(
    site: Site, cluster: LocalCluster, tmp_path: Path
) -> None:
    """Two deployments of one scenario, of one user on one cluster, in the same night."""
    others = next_attempt(RUN, Site(workspace=tmp_path / "other"), after=0)
    attempt = next_attempt(RUN, site, after=0)
    start(cluster, others, "true")

    with pytest.raises(DamagedData, match="If another workspace of yours runs this night, give one of them another"):
        submit_once(attempt, cluster, write_script(attempt.attempt_dir / "train_sbatch.sh", "true"), [])

    assert len(cluster.find(attempt.name).jobs) == 1
    assert read_submission(attempt.attempt_dir) is None
