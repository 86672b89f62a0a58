"""Where each run of a night is, asked of a real embedded cluster."""

import io
import re
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from rich.console import Console

from nightbridge.errors import StatusUnknown
from nightbridge.models import (
    ClusterSettings,
    JobStatus,
    StoreSettings,
    Verdict,
    VerdictStatus,
    utc_now,
)
from nightbridge.nights.records import Night, NightEnd, NightStart, NightTest, NightVerdict
from nightbridge.nights.status import RunPhase, RunStatus, nights_table, run_statuses
from nightbridge.slurm.attempt_files import note_waiting, open_attempt
from nightbridge.slurm.local import LocalCluster
from nightbridge.store.object_store import ObjectStore, open_store
from tests.builders import record_submission

RUN_KEY = "llama-2026-11-21-0123456789"
ITERATION = " iteration {:>8}/ 60000 | elapsed time per iteration (ms): 1220.0 | lm loss: 2.5E+00 | "


class Silent(LocalCluster):
    """A cluster that does not answer."""

    def states(self, job_ids: object) -> dict[int, JobStatus]:
        raise StatusUnknown("slurmctld is away", subject="dgx")


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    cluster = LocalCluster(ClusterSettings(slots=1), tmp_path / "cluster")
    yield cluster
    for job_id in cluster.states(range(1, 4)):
        cluster.cancel(job_id)


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return open_store(StoreSettings(url=f"file://{tmp_path}/store"))


def submit(cluster: LocalCluster, workspace: Path, run_key: str, body: str) -> None:
    attempt = open_attempt(workspace, run_key, cluster.settings)
    script = attempt.attempt_dir / "job.sh"
    script.write_text(f"#!/bin/bash\n{body}\n")
    job_id = cluster.submit(attempt.name, script, ["--output=/dev/null"])
    record_submission(attempt.attempt_dir, attempt.name, job_id, script=script)


def status_of(
    workspace: Path, store: ObjectStore, cluster: LocalCluster, *ended: VerdictStatus, hours_ago: int = 0
) -> RunStatus:
    """Of the night's only run; `ended` and `hours_ago`: how the night ended, and when, if it did."""
    start = NightStart(
        night="2026-11-21",
        scenario="nightly",
        cluster="local",
        workspace=workspace,
        begun_at=utc_now(),
        tests=(NightTest(test_id="llama", run_key=RUN_KEY),),
    )
    end = NightEnd(
        night=start.night,
        scenario=start.scenario,
        ended_at=utc_now() - timedelta(hours=hours_ago),
        exit_code=2,
        verdicts=tuple(NightVerdict(test_id="llama", run_key=RUN_KEY, status=status) for status in ended),
    )
    (status,) = run_statuses(start, store, lambda: cluster, end if ended else None)
    return status


def until(call: Callable[[], RunStatus], phase: RunPhase) -> RunStatus:
    deadline = time.monotonic() + 60
    while (status := call()).phase is not phase:
        assert time.monotonic() < deadline, status
        time.sleep(0.1)
    return status


def test_a_run_is_followed_from_its_attempt_to_the_end_of_its_job(
    tmp_path: Path, store: ObjectStore, cluster: LocalCluster
) -> None:
    def now() -> RunStatus:
        return status_of(tmp_path, store, cluster)

    assert now().phase is RunPhase.NOT_STARTED
    open_attempt(tmp_path, RUN_KEY, cluster.settings)
    assert now().phase is RunPhase.PREPARING
    submit(cluster, tmp_path, RUN_KEY, f"until [ -e {tmp_path}/go ]; do sleep 0.1; done")
    running = until(now, RunPhase.RUNNING)
    assert str(running).startswith("running, job 1, since ")
    (tmp_path / "go").touch()
    assert until(now, RunPhase.ENDED).reason == "COMPLETED"


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (
            "00:10:00",
            r"384/60,000 steps, its time limit ends it \d\d-\d\d \d\d:\d\d UTC, before its last step, 1.220 s",
        ),
        ("2-00:00:00", r"384/60,000 steps, ends ~\d\d-\d\d \d\d:\d\d UTC, 1.220 s"),
        ("0", r"384/60,000 steps, ends ~\d\d-\d\d \d\d:\d\d UTC, 1.220 s"),  # sbatch's word for none
    ],
)
def test_a_job_whose_time_limit_comes_before_its_last_step_says_so(
    tmp_path: Path, store: ObjectStore, cluster: LocalCluster, limit: str, expected: str
) -> None:
    submit(cluster, tmp_path, RUN_KEY, f"#SBATCH --time={limit}\nsleep 600")
    log = open_attempt(tmp_path, RUN_KEY, cluster.settings).attempt_dir / "log_1.out"
    log.write_text("".join(f"{ITERATION.format(step)}\n" for step in range(371, 385)))

    running = until(lambda: status_of(tmp_path, store, cluster), RunPhase.RUNNING)

    assert re.search(expected, str(running))


def test_of_two_jobs_of_an_attempt_the_one_that_claimed_it_is_shown(
    tmp_path: Path, store: ObjectStore, cluster: LocalCluster
) -> None:
    submit(cluster, tmp_path, RUN_KEY, "sleep 600")
    attempt = open_attempt(tmp_path, RUN_KEY, cluster.settings)
    record_submission(attempt.attempt_dir, attempt.name, 99)
    (attempt.attempt_dir / "claim").write_text("1 0 node1 77\n")

    assert until(lambda: status_of(tmp_path, store, cluster), RunPhase.RUNNING).job_id == 1


def test_a_job_in_the_queue_says_why_it_waits(tmp_path: Path, store: ObjectStore, cluster: LocalCluster) -> None:
    submit(cluster, tmp_path, "other-2026-11-21-0123456789", "sleep 600")
    submit(cluster, tmp_path, RUN_KEY, "sleep 600")

    waiting = until(lambda: status_of(tmp_path, store, cluster), RunPhase.WAITING)

    assert waiting.reason
    assert waiting.since is not None


def test_a_run_that_waits_for_its_cluster_says_so_since_when(
    tmp_path: Path, store: ObjectStore, cluster: LocalCluster
) -> None:
    note_waiting(RUN_KEY, tmp_path, "hopper: sinfo failed: Unable to contact slurm controller")
    before = status_of(tmp_path, store, cluster)
    open_attempt(tmp_path, RUN_KEY, cluster.settings)
    opened = status_of(tmp_path, store, cluster)
    note_waiting(RUN_KEY, tmp_path, None)

    for status in (before, opened):
        assert status.phase is RunPhase.PREPARING
        assert status.reason.startswith("waiting since 20")
        assert "Unable to contact slurm controller" in str(status)
    assert status_of(tmp_path, store, cluster).reason == ""


def test_a_cluster_that_does_not_answer_is_not_taken_for_no_job(
    tmp_path: Path, store: ObjectStore, cluster: LocalCluster
) -> None:
    submit(cluster, tmp_path, RUN_KEY, "true")

    status = status_of(tmp_path, store, Silent(cluster.settings, tmp_path / "cluster"))

    assert status.phase is RunPhase.UNKNOWN
    assert "slurmctld is away" in status.reason


def test_a_run_with_a_verdict_is_done_whatever_the_cluster_says(
    tmp_path: Path, store: ObjectStore, cluster: LocalCluster
) -> None:
    verdict = Verdict(run_key=RUN_KEY, test_id="llama", night="2026-11-21", status=VerdictStatus.NO_BASELINE, job_id=7)
    verdict = verdict.model_copy(update={"steps": 1500, "steps_expected": 2000})
    store.put(f"runs/llama/2026-11-21/{RUN_KEY}/verdict.json", verdict.model_dump_json().encode())

    status = status_of(tmp_path, store, Silent(cluster.settings, tmp_path / "cluster"))

    assert str(status) == "no baseline, job 7, 1,500/2,000 steps"


def test_a_run_that_died_before_its_harvest_is_what_its_night_says(
    tmp_path: Path, store: ObjectStore, cluster: LocalCluster
) -> None:
    died = status_of(tmp_path, store, cluster, VerdictStatus.INVALID)
    again = status_of(tmp_path, store, cluster, VerdictStatus.INVALID, hours_ago=1)

    assert (died.phase, str(died)) == (RunPhase.DONE, "invalid")
    assert again.phase is RunPhase.NOT_STARTED  # the night has begun once more


def test_a_night_that_was_begun_again_has_no_end_among_the_nights(tmp_path: Path) -> None:
    test, now = NightTest(test_id="llama", run_key=RUN_KEY), utc_now()
    start = NightStart(night="n1", scenario="s", cluster="c", workspace=tmp_path, begun_at=now, tests=(test,))
    bad = NightVerdict(test_id="llama", run_key=RUN_KEY, status=VerdictStatus.FAILED)
    ended_at = now - timedelta(hours=1)
    end = NightEnd(night="n1", scenario="s", ended_at=ended_at, exit_code=3, verdicts=(bad,))

    table = nights_table([Night(start=start, end=end)])

    shown = [str(next(iter(column.cells))) for column in table.columns]
    assert shown[3:] == ["–", "not ended, and its process is gone", "1"]


def test_nights_of_two_years_have_their_year(tmp_path: Path) -> None:
    def begun(year: int) -> Night:
        at = datetime(year, 1, 1, 2, tzinfo=UTC)
        return Night(start=NightStart(night="n", scenario="s", cluster="c", workspace=tmp_path, begun_at=at))

    def shown(*years: int) -> list[str]:
        return [str(cell) for cell in nights_table([begun(year) for year in years]).columns[2].cells]

    assert shown(2027, 2026) == ["2027-01-01 02:00", "2026-01-01 02:00"]
    assert shown(2027, 2027) == ["01-01 02:00", "01-01 02:00"]


def test_eighty_columns_have_room_for_the_names_of_bad_tests(tmp_path: Path) -> None:
    names, now = ("llama-small", "mixtral-small"), utc_now()
    start = NightStart(night="2026-11-22", scenario="nightly", cluster="c", workspace=tmp_path, begun_at=now)
    nights = []
    for status in (VerdictStatus.REGRESSED, VerdictStatus.INSUFFICIENT_DATA):
        verdicts = tuple(NightVerdict(test_id=name, run_key=name, status=status) for name in names)
        end = NightEnd(night=start.night, scenario="nightly", ended_at=now, exit_code=1, verdicts=verdicts)
        nights.append(Night(start=start, end=end))
    text = io.StringIO()

    Console(width=80, file=text).print(nights_table(nights))

    assert {start.night, "nightly", "regressed", "llama-small,", "mixtral-small"} <= set(text.getvalue().split())
