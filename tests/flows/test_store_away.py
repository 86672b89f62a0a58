"""A store that goes away, or whose credentials expire, while a job runs."""

import contextvars
import threading
from datetime import datetime
from pathlib import Path

import pytest
from prefect import flow
from prefect.client.orchestration import get_client

from nightbridge.harvest.manifest import load_record
from nightbridge.models import Job, JobState, LaunchPlan, RunRecord, Site, utc_now
from nightbridge.slurm.attempt_files import read_cancellation
from nightbridge.slurm.factory import open_cluster
from nightbridge.store.object_store import open_store
from nightbridge.tasks.harvest import harvest
from nightbridge.tasks.job import watch
from nightbridge.tasks.stage import DELAY_VARIABLE
from tests.builders import make_job, make_plan
from tests.conftest import BUCKET
from tests.nightbridge.harvest.left_run import make_run
from tests.real.s3_proxy import LOST, Answer, proxy_to, s3_error
from tests.real.s3_servers import S3Server
from tests.waiting import wait_until

pytestmark = pytest.mark.usefixtures("flows_here")


def running_job(site: Site) -> tuple[Job, LaunchPlan]:
    """A job of the embedded cluster that takes a moment, and its plan."""
    attempt_dir = site.workspace / "runs" / "watched" / "a1"
    attempt_dir.mkdir(parents=True)
    script = attempt_dir / "job.sh"
    script.write_text("#!/bin/bash\n#SBATCH --output=/dev/null\nsleep 2\n")
    job_id = open_cluster(site.cluster, site.workspace).submit("watched-a1", script, [])
    job = make_job("watched", attempt_dir, job_id=job_id, cluster="local", submitted_at=utc_now())
    return job, make_plan("watched", attempt_dir, tasks_per_node=1)


def messages(since: datetime) -> str:
    """What was logged since then."""
    wanted = {"timestamp": {"after_": since.isoformat()}}
    with get_client(sync_client=True) as client:
        answer = client.request("POST", "/logs/filter", json={"logs": wanted})
    return "\n".join(log["message"] for log in answer.json())


@pytest.mark.s3
@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (s3_error(400, "ExpiredToken"), "the credentials have expired"),
        (LOST, "the S3 server is unreachable"),
    ],
    ids=["credentials expire", "the server is gone"],
)
def test_the_job_is_untouched_and_the_harvest_waits_and_says_for_what(
    answer: Answer, said: str, tmp_path: Path, ministack: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What was left behind is made up, so there is no checkout to compare.
    monkeypatch.setattr("nightbridge.tasks.harvest.verify_unchanged", lambda checkout, since: [])
    # Both keys are masked in what is kept, and the server's own is an ordinary word; it takes any.
    monkeypatch.setenv(ministack.access_variable, "access-key-of-the-night")
    monkeypatch.setenv(DELAY_VARIABLE, "0.2")
    renewed, begun = threading.Event(), utc_now()

    with proxy_to(ministack.endpoint_url) as proxy:
        proxy.before = lambda request: None if renewed.is_set() else answer
        store = ministack.store_settings(BUCKET, tmp_path.name, endpoint_url=proxy.endpoint_url)
        site = Site(workspace=tmp_path, store=store)
        left = make_run(tmp_path / "left", shard_size=1000)
        job, plan = running_job(site)

        def renew_once_told() -> None:
            wait_until(
                lambda: f"waiting, and trying again: {store.url}" in (told := messages(begun)) and said in told,
                interval=0.2,
            )
            renewed.set()

        @flow
        def night() -> tuple[Job, int, RunRecord]:
            ended = watch(job, plan, site)
            asked = len(proxy.requests)
            return ended, asked, harvest(left.spec, left.checkout, left.image, left.plan, left.jobs, site)

        # With the settings of this module, the address of Prefect's server among them.
        within = contextvars.copy_context().run
        person = threading.Thread(target=within, args=(renew_once_told,), daemon=True)
        person.start()
        ended, asked_meanwhile, record = night()
        person.join()

        assert ended.status is not None
        assert (ended.status.state, ended.status.exit_code) == (JobState.COMPLETED, 0)
        assert read_cancellation(job.attempt_dir) is None
        assert asked_meanwhile == 0
        assert load_record(open_store(store), record.prefix) == record
