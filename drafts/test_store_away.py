"""A store that goes away, or whose credentials expire, while a job runs."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prefect import flow
from prefect.client.orchestration import get_client

from nightbridge.models import Job, JobState, LaunchPlan, RunRecord, Site, utc_now
from nightbridge.slurm.attempts import read_cancellation
from nightbridge.slurm.cluster import open_cluster
from nightbridge.store.harvest import load_record
from nightbridge.store.objects import open_store
from tasks.harvest import harvest
from tasks.stage import is_transient
from tasks.watch import watch
from tests.conftest import BUCKET
from tests.nightbridge.store.left_run import make_run
from tests.real.prefect_harness import prefect_in_this_process
from tests.real.s3_proxy import LOST, Answer, Request, proxy_to, s3_error
from tests.real.s3_servers import S3Server

AWAY = 2
"""Tries of the harvest that find no store."""


@pytest.fixture(scope="module", autouse=True)
def prefect() -> Iterator[None]:
    with prefect_in_this_process():
        yield


def running_job(site: Site) -> tuple[Job, LaunchPlan]:
    """A job of the embedded cluster that takes a moment, and its plan."""
    attempt_dir = site.workspace / "runs" / "watched" / "a1"
    attempt_dir.mkdir(parents=True)
    script = attempt_dir / "job.sh"
    script.write_text("#!/bin/bash\n#SBATCH --output=/dev/null\nsleep 2\n")
    job = Job(
        run_key="watched", attempt=1, job_id=open_cluster(site.cluster, site.workspace).submit("watched-a1", script, []),
        cluster="local", attempt_dir=attempt_dir, script=script, experiment_dir=attempt_dir, submitted_at=utc_now(),
    )  # fmt: skip
    plan = LaunchPlan(
        run_key="watched", attempt=1, attempt_dir=attempt_dir, argv=("true",), cwd=attempt_dir, nodes=1,
        tasks_per_node=1,
    )  # fmt: skip
    return job, plan


def messages() -> str:
    with get_client(sync_client=True) as client:
        answer = client.request("POST", "/logs/filter", json={})
    return "\n".join(log["message"] for log in answer.json())


def wait_until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 240
    while not true():
        assert time.monotonic() < end, "did not happen"
        time.sleep(0.2)


@pytest.mark.s3
@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (s3_error(400, "ExpiredToken"), "the credentials have expired"),
        (LOST, "the S3 server does not answer"),
    ],
    ids=["credentials expire", "the server is gone"],
)
def test_the_job_is_untouched_and_the_harvest_waits_and_says_for_what(
    answer: Answer, said: str, tmp_path: Path, ministack: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What was left behind is made up, so there is no checkout to compare.
    monkeypatch.setattr("tasks.harvest.verify_unchanged", lambda checkout: [])
    tries: list[float] = []

    with proxy_to(ministack.endpoint_url) as proxy:
        store = ministack.store_settings(BUCKET, tmp_path.name, endpoint_url=proxy.endpoint_url)
        site = Site(workspace=tmp_path, store=store)
        left = make_run(tmp_path / "left", shard_size=1000)
        job, plan = running_job(site)

        def away(request: Request) -> Answer | None:
            return answer if len(tries) <= AWAY else None

        proxy.before = away

        def may_pass(*given: Any) -> bool:
            tries.append(time.monotonic())
            return is_transient(*given)

        tries.append(time.monotonic())
        again = harvest.with_options(retry_delay_seconds=0.1, retry_jitter_factor=None, retry_condition_fn=may_pass)

        @flow
        def night() -> tuple[Job, int, RunRecord]:
            ended = watch(job, plan, site)
            asked = len(proxy.requests)
            return ended, asked, again(left.spec, left.checkout, left.image, left.plan, left.jobs, site)

        ended, asked_meanwhile, record = night()

        assert ended.status is not None
        assert (ended.status.state, ended.status.exit_code) == (JobState.COMPLETED, 0)
        assert read_cancellation(job.attempt_dir) is None
        assert asked_meanwhile == 0
        assert load_record(open_store(store), record.prefix) == record
    assert len(tries) == AWAY + 1
    wait_until(lambda: messages().count(said) >= AWAY)
