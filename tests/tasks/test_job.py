"""What the watch stage says about a job's end, on the embedded cluster."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from prefect import flow
from prefect.client.orchestration import get_client

from nightbridge.masking import MASK
from nightbridge.models import Job, Outcome, SecretRef, Site, utc_now
from nightbridge.slurm.attempts import read_ended
from nightbridge.slurm.factory import open_cluster
from nightbridge.slurm.states import parse_squeue
from nightbridge.tasks.job import state_of, watch
from tests.builders import make_job, make_plan
from tests.real.prefect_harness import prefect_in_this_process

KNOWN = "a known value"
SHAPED = "hf_" + "AbCdEfGhIjKlMnOpQrStUvWxYz01234567"


@pytest.fixture(scope="module", autouse=True)
def _server() -> Iterator[None]:
    with prefect_in_this_process():
        yield


def logged() -> str:
    with get_client(sync_client=True) as client:
        return "\n".join(log["message"] for log in client.request("POST", "/logs/filter", json={}).json())


def test_the_error_that_ended_a_job_is_kept_and_told_without_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    assert f"OSError: {MASK} and {MASK} refused" in ended.outcome_reason
    assert read_ended(attempt_dir) == ended
    assert KNOWN not in logged()
    assert SHAPED not in logged()


@pytest.mark.parametrize("state", ["PENDING", "REQUEUE_HOLD", "SPECIAL_EXIT"])
def test_a_job_in_the_queue_says_since_when_and_what_to_type(state: str) -> None:
    (held,) = parse_squeue(f"7|{state}|2026-11-23T14:34:46|N/A|N/A||JobHeldUser|job")

    assert state_of(held) == (
        f"{state} since 2026-11-23 14:34 UTC (JobHeldUser, held by its user: `scontrol release 7`)"
    )


def test_a_job_that_runs_says_no_old_reason() -> None:
    (running,) = parse_squeue("7|RUNNING|2026-11-23T14:34:46|2026-11-23T14:40:00|N/A|node1|JobHeldUser|job")

    assert state_of(running) == "RUNNING"
