"""What a person sees of a job while it runs: its log in the run's log, its progress as an artifact."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from prefect import flow
from prefect.client.orchestration import get_client

from nightbridge.models import Job, LaunchPlan, SecretRef, Site, utc_now
from nightbridge.slurm.cluster import open_cluster
from tasks.watch import watch

SCRIPT = """#!/bin/bash
#SBATCH --output=/dev/null
log=JOB/log-train_${SLURM_JOB_ID}_0.out
echo "token $TOKEN" > $log
echo ' iteration 3/ 50 | elapsed time per iteration (ms): 500.0 | lm loss: 1.0E+00 | number of nan iterations: 0 |' >> $log
for _ in $(seq 600); do test -e JOB/go && break; sleep 0.1; done
printf 'the last words' >> $log
"""


pytestmark = pytest.mark.usefixtures("prefect_harness")


def submitted(folder: Path, site: Site) -> tuple[Job, LaunchPlan]:
    """A job that prints a step, waits for the file `go`, and prints its last words."""
    attempt_dir, job_dir = folder / "a1", folder / "a1" / "train"
    job_dir.mkdir(parents=True)
    script = attempt_dir / "job.sh"
    script.write_text(SCRIPT.replace("JOB", str(job_dir)))
    job_id = open_cluster(site.cluster, site.workspace).submit("watched-a1", script, [])
    job = Job(
        run_key="watched", attempt=1, job_id=job_id, cluster="local", attempt_dir=attempt_dir, script=script,
        experiment_dir=job_dir, submitted_at=utc_now(),
    )  # fmt: skip
    plan = LaunchPlan(
        run_key="watched", attempt=1, attempt_dir=attempt_dir, argv=("true",), cwd=folder, nodes=1, tasks_per_node=1,
        max_steps=50, secret_environment={"TOKEN": SecretRef(source="env", name="TOKEN")},
    )  # fmt: skip
    return job, plan


def descriptions() -> list[str]:
    with get_client(sync_client=True) as client:
        answer = client.request("POST", "/artifacts/filter", json={"artifacts": {"type": {"any_": ["progress"]}}})
    return [artifact["description"] for artifact in answer.json()]


def messages() -> str:
    with get_client(sync_client=True) as client:
        answer = client.request("POST", "/logs/filter", json={})
    return "\n".join(log["message"] for log in answer.json())


def wait_until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 240
    while not true():
        assert time.monotonic() < end, "did not happen"
        time.sleep(0.2)


def test_log_and_progress_of_a_running_job_are_shown_and_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKEN", "hf_planted0123456789")
    site = Site(workspace=tmp_path)
    job, plan = submitted(tmp_path, site)
    while_it_runs: list[str] = []

    def let_it_end() -> None:
        wait_until(lambda: any("iteration 3/50" in description for description in descriptions()))
        while_it_runs.extend(descriptions())
        (job.experiment_dir / "go").touch()

    @flow
    def one() -> Job:
        return watch(job, plan, site)

    helper = threading.Thread(target=let_it_end)
    helper.start()
    ended = one()
    helper.join()
    wait_until(lambda: "the last words" in messages())

    assert while_it_runs == [f"job {job.job_id} is RUNNING: iteration 3/50, 0.5 s a step, 0:00:24 left"]
    assert descriptions() == [f"job {job.job_id} is COMPLETED: iteration 3/50, 0.5 s a step, 0:00:24 left"]
    assert ended.status is not None
    assert "token ********" in messages()
    assert "hf_planted0123456789" not in messages()
