"""The watchdog: each way in which a verdict can be missing, on real stores, real jobs and real processes."""

import dataclasses
import json
import shutil
import signal
import tempfile
from collections.abc import Iterator
from datetime import datetime, time, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, cast
from zoneinfo import ZoneInfo

import pytest

from nightbridge.errors import InvalidInput
from nightbridge.models import (
    ClusterSettings,
    NightReport,
    Site,
    StoreSettings,
    Verdict,
    VerdictStatus,
    make_run_key,
    utc_now,
)
from nightbridge.nights.expected_verdicts import MissingCause
from nightbridge.nights.liveness import alive
from nightbridge.nights.missing_verdicts import (
    MissingVerdict,
    Watch,
    WatchedNight,
    look,
    notice_of,
    summary,
    watch_lines,
    watch_settings,
)
from nightbridge.nights.records import NightStart, NightTest, record_end, record_start
from nightbridge.slurm.attempt_files import (
    SUBMISSION_FILE,
    note_waiting,
    open_attempt,
)
from nightbridge.slurm.factory import open_cluster
from nightbridge.store.object_store import ObjectStore, open_store
from tests.builders import record_submission
from tests.nightbridge.embedded.local_cluster import local_cluster, wait_for_end, wait_for_state
from tests.nightbridge.nights.flow_process import flow_process
from tests.real.slurm_daemons import SlurmDaemons, free_ports
from tests.waiting import wait_until

if TYPE_CHECKING:
    from nightbridge.slurm.local import LocalCluster

BERLIN = ZoneInfo("Europe/Berlin")
TODAY = (datetime.now(BERLIN) - timedelta(hours=9)).date()  # a morning that is over: its night has ended by now
NIGHT = TODAY.isoformat()
NOW = datetime.combine(TODAY, time(8, 0, 1), BERLIN)
SLOT = datetime.combine(TODAY, time(1), BERLIN)
FLOW_RUN = "0b5e8a4e-8a53-4b5f-9a46-0d1c6d3f3a11"
NEXT = "next in line: it starts when enough nodes are free"
GONE = "the night's process is gone"


@dataclasses.dataclass
class Place:
    """A site with its store, in which a night of the tests has begun."""

    site: Site
    start: NightStart

    @property
    def store(self) -> ObjectStore:
        return open_store(self.site.store_settings)

    @property
    def cluster(self) -> "LocalCluster":
        return cast("LocalCluster", open_cluster(self.site.cluster, self.site.workspace))

    def key(self, test: str) -> str:
        return next(one.run_key for one in self.start.tests if one.test_id == test)

    def judge(self, test: str, status: VerdictStatus = VerdictStatus.PASSED) -> Verdict:
        """Store the verdict of a run as its compare stage does."""
        key = self.key(test)
        verdict = Verdict(run_key=key, test_id=test, night=NIGHT, status=status)
        self.store.put(f"runs/{test}/{NIGHT}/{key}/verdict.json", verdict.model_dump_json().encode())
        return verdict

    def submit(self, test: str, body: str, *options: str) -> int:
        """Submit a run's job, as the submit stage does."""
        attempt = open_attempt(self.site.workspace, self.key(test), self.site.cluster)
        script = attempt.attempt_dir / "job.sh"
        script.write_text(f"#!/bin/bash\n{body}\n")
        job_id = self.cluster.submit(attempt.name, script, ["--output=/dev/null", *options])
        record_submission(attempt.attempt_dir, attempt.name, job_id, cluster=self.site.cluster.name, script=script)
        return job_id

    def look(self, **changes: object) -> Watch:
        site = self.site.model_copy(update=changes)
        return look(watch_settings("08:00", timezone="Europe/Berlin"), site, lambda: self.store, now=NOW)

    def missing(self, test: str = "llama") -> MissingVerdict:
        """Why one test has no verdict."""
        watch = self.look()
        assert watch.exit_code == 4
        (found,) = (missing for missing in watch.missing if missing.test_id == test)
        return found


def place_of(site: Site, *tests: str) -> Place:
    start = NightStart(
        night=NIGHT,
        scenario="practice nightly",
        cluster=site.cluster.name,
        workspace=site.workspace,
        begun_at=SLOT + timedelta(seconds=7),
        slot=SLOT,
        flow_run=FLOW_RUN,
        deployment="nightly",
        tests=tuple(
            NightTest(
                test_id=test,
                run_key=make_run_key(
                    scenario="practice nightly", night=NIGHT, test_id=test, sweep_point={}, iteration=1, repeat=0
                ),
            )
            for test in tests
        ),
        invalid=("broken",),
    )
    place = Place(site, start)
    record_start(place.store, start)
    return place


def end(place: Place, *verdicts: Verdict) -> None:
    record_end(
        place.store,
        NightReport(scenario=place.start.scenario, night=NIGHT, verdicts=verdicts, report="file:///r.html"),
    )


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    """A night of two tests on the embedded cluster, which has one slot."""
    with local_cluster(tmp_path, slots=1) as cluster:
        yield place_of(Site(workspace=tmp_path, cluster=cluster.settings), "llama", "vlm")


@pytest.fixture
def living(place: Place) -> Iterator[None]:
    """The night's process lives."""
    with alive(place.site.workspace, FLOW_RUN):
        yield


@pytest.fixture
def killed(place: Place) -> None:
    """The night's process was killed."""
    with flow_process(place.site.workspace, FLOW_RUN) as process:
        process.send_signal(signal.SIGKILL)
        process.wait()


def clock(moment: datetime) -> str:
    local = moment.astimezone(BERLIN)
    return f"{local:%H:%M}" if local.date() == TODAY else f"{local:%Y-%m-%d %H:%M}"


class TestWhenEveryVerdictIsThere:
    def test_a_night_with_its_report_is_good(self, place: Place) -> None:
        end(place, place.judge("llama"), place.judge("vlm"))

        watch = place.look()

        assert watch.exit_code == 0
        assert list(watch_lines(watch)) == [f"practice nightly, night {NIGHT}: 2 verdicts", "  report: file:///r.html"]

    def test_a_bad_verdict_is_listed_and_is_no_alarm(self, place: Place) -> None:
        end(place, place.judge("llama"), place.judge("vlm", VerdictStatus.REGRESSED))

        watch = place.look()

        assert watch.exit_code == 0
        assert "  bad verdicts: vlm regressed" in watch_lines(watch)

    def test_a_report_without_one_of_the_runs_is_an_alarm(self, place: Place) -> None:
        end(place, place.judge("llama"))

        missing = place.missing("vlm")

        assert (missing.cause, missing.why) == (MissingCause.CRASHED, "the night ended without it")

    def test_a_test_of_the_named_file_that_the_night_was_begun_without_is_an_alarm(
        self, place: Place, tmp_path: Path
    ) -> None:
        end(place, place.judge("llama"), place.judge("vlm"))
        shipped = Path(__file__).parents[3] / "conf" / "practice" / "llama_small.toml"
        shutil.copy(shipped, tmp_path)
        tests = "".join(f'[[Tests]]\nid = "{test}"\ntest_name = "llama_small"\n' for test in ("new", "llama"))
        (tmp_path / "nightly.toml").write_text(f'name = "{place.start.scenario}"\n{tests}')
        asked = watch_settings("08:00", timezone="Europe/Berlin", files=[tmp_path / "nightly.toml"])

        watch = look(asked, place.site, lambda: place.store, now=NOW)

        assert watch.exit_code == 4
        assert "  new: not started: the night was begun without it" in watch_lines(watch)

    @pytest.mark.usefixtures("killed")
    def test_a_night_that_never_wrote_its_report_is_an_alarm(self, place: Place) -> None:
        place.judge("llama"), place.judge("vlm", VerdictStatus.REGRESSED)

        watch = place.look()

        assert (watch.exit_code, watch.missing) == (4, ())
        assert f"  every verdict is stored, and there is no report: {GONE}" in watch_lines(watch)
        assert "  bad verdicts: vlm regressed, broken invalid" in watch_lines(watch)
        assert summary(watch) == f"no report: practice nightly, night {NIGHT}"

    @pytest.mark.usefixtures("living")
    def test_a_night_that_was_begun_again_after_its_report_counts_as_under_way(self, place: Place) -> None:
        end(place, place.judge("llama"))
        again = place.start.model_copy(update={"begun_at": utc_now() + timedelta(seconds=1)})
        record_start(place.store, again)

        assert place.missing("vlm").cause is MissingCause.IN_PROGRESS


class TestWhyAVerdictIsMissing:
    @pytest.mark.usefixtures("living")
    def test_running_since(self, place: Place) -> None:
        job = place.submit("llama", "sleep 600")
        wait_for_state(place.cluster, job, "RUNNING")

        missing = place.missing()

        assert (missing.cause, missing.job_id) == (MissingCause.RUNNING, job)
        assert missing.since is not None
        assert missing.why == f"running since {clock(missing.since)}, job {job}"

    @pytest.mark.usefixtures("living")
    def test_waiting_since_with_the_reason_of_the_cluster(self, place: Place) -> None:
        wait_for_state(place.cluster, place.submit("vlm", "sleep 600"), "RUNNING")
        job = place.submit("llama", "true")

        missing = place.missing()

        assert (missing.cause, missing.job_id) == (MissingCause.WAITING, job)
        assert missing.since is not None
        assert missing.why == f"waiting since {clock(missing.since)} (Resources, {NEXT}), job {job}"

    @pytest.mark.usefixtures("killed")
    def test_a_job_that_nobody_follows_any_more(self, place: Place) -> None:
        running = place.submit("vlm", "sleep 600")
        wait_for_state(place.cluster, running, "RUNNING")
        waiting = place.submit("llama", "true")

        assert place.missing("vlm").why.endswith(f"job {running}; {GONE}")
        assert place.missing("llama").why.endswith(f"(Resources, {NEXT}), job {waiting}; {GONE}")

    @pytest.mark.usefixtures("killed")
    def test_crashed_after_its_job_had_ended(self, place: Place) -> None:
        job = place.submit("llama", "exit 3")
        ended = wait_for_end(place.cluster, job).ended_at
        assert ended is not None

        missing = place.missing()

        assert (missing.cause, missing.job_id) == (MissingCause.CRASHED, job)
        assert missing.why == f"crashed: job {job} ended at {clock(ended)} (FAILED), and {GONE}"

    @pytest.mark.usefixtures("living")
    def test_in_progress_after_its_job_has_ended(self, place: Place) -> None:
        job = place.submit("llama", "true")
        wait_for_end(place.cluster, job)

        missing = place.missing()

        assert missing.cause is MissingCause.IN_PROGRESS
        assert missing.why.startswith(f"in progress: job {job} ended at ")
        assert missing.why.endswith("(COMPLETED) and is being judged")

    @pytest.mark.usefixtures("killed")
    def test_crashed_before_anything_of_it_began(self, place: Place) -> None:
        missing = place.missing()

        assert (missing.cause, missing.why) == (MissingCause.CRASHED, f"crashed: nothing of it was begun, and {GONE}")

    @pytest.mark.usefixtures("living")
    def test_in_progress_before_its_job(self, place: Place) -> None:
        attempt = open_attempt(place.site.workspace, place.key("llama"), place.site.cluster)

        missing, other = place.missing("llama"), place.missing("vlm")

        assert missing.cause is other.cause is MissingCause.IN_PROGRESS
        assert missing.why == f"in progress since {clock(attempt.opened_at)}: it has no job yet"
        assert other.why == "in progress: it has no job yet"

    @pytest.mark.usefixtures("living")
    def test_waiting_for_a_cluster_that_is_away(self, place: Place) -> None:
        note_waiting(
            place.key("llama"), place.site.workspace, "hopper: sinfo failed: Unable to contact slurm controller"
        )

        missing = place.missing("llama")

        assert missing.cause is MissingCause.IN_PROGRESS
        assert missing.why.startswith("in progress: it has no job yet, waiting since ")
        assert missing.why.endswith("hopper: sinfo failed: Unable to contact slurm controller")

    def test_a_process_that_never_said_that_it_lives_counts_as_gone(self, place: Place) -> None:
        assert place.missing().why == f"crashed: nothing of it was begun, and {GONE}"

    @pytest.mark.usefixtures("living")
    def test_a_workspace_that_does_not_say_whether_the_process_lives_is_told(self, place: Place) -> None:
        wait_for_end(place.cluster, place.submit("llama", "true"))
        running = place.submit("vlm", "sleep 600")
        wait_for_state(place.cluster, running, "RUNNING")
        nights = place.site.workspace / "nights"
        nights.rename(nights.with_name("moved"))
        nights.touch()  # neither a folder nor nothing: what a broken mount looks like

        watch = place.look()
        nights.unlink()
        nights.with_name("moved").rename(nights)

        ended, going = watch.missing
        assert ended.cause is MissingCause.UNKNOWN
        assert ended.why.endswith("(COMPLETED), and whether the night's process is alive is unknown")
        assert going.cause is MissingCause.RUNNING
        assert any(str(nights) in trouble for trouble in watch.troubles)

    def test_a_workspace_that_cannot_be_seen_from_here(self, place: Place) -> None:
        away = place.start.model_copy(update={"workspace": Path("/lustre/{away}")})
        record_start(place.store, away)

        missing = place.missing()

        assert missing.cause is MissingCause.UNKNOWN
        assert missing.why == "unknown: /lustre/{away} cannot be seen from this machine"

    @pytest.mark.usefixtures("living")
    def test_a_night_on_another_cluster_than_the_sites_is_asked_where_it_was_planned(self, place: Place) -> None:
        from nightbridge.models import Scenario
        from nightbridge.nights.records import NightPlan, write_plan

        write_plan(NightPlan(start=place.start, scenario=Scenario(name="p", tests=()), runs=(), site=place.site))
        job = place.submit("llama", "sleep 600")
        wait_for_state(place.cluster, job, "RUNNING")

        watch = place.look(cluster=ClusterSettings(kind="slurm", name="another", bin_dir=Path("/nowhere")))

        assert [missing.cause for missing in watch.missing] == [MissingCause.RUNNING, MissingCause.IN_PROGRESS]

    @pytest.mark.usefixtures("living")
    def test_a_damaged_record_is_told_and_hides_nothing(self, place: Place) -> None:
        place.submit("llama", "true")
        (place.site.workspace / "runs" / place.key("llama") / "a1" / SUBMISSION_FILE).write_text("{")

        watch = place.look()

        assert [missing.cause for missing in watch.missing] == [MissingCause.UNKNOWN, MissingCause.UNKNOWN]
        assert any("submission.json" in trouble for trouble in watch.troubles)


class TestANightThatHasNotBegun:
    @pytest.fixture
    def yesterday(self, place: Place) -> Place:
        day = timedelta(days=1)
        shutil.rmtree(place.site.workspace / "store" / "nights")
        start = place.start.model_copy(
            update={"night": (TODAY - day).isoformat(), "slot": SLOT - day, "begun_at": SLOT - day}
        )
        record_start(place.store, start)
        return place

    def test_each_test_of_the_night_before_is_named(self, yesterday: Place) -> None:
        watch = yesterday.look()

        assert watch.exit_code == 4
        assert [missing.test_id for missing in watch.missing] == ["llama", "vlm", "broken"]
        assert {missing.cause for missing in watch.missing} == {MissingCause.NOT_STARTED}
        assert list(watch_lines(watch)) == [
            f"practice nightly, the night of {NIGHT} 01:00: 3 of 3 verdicts missing",
            "  llama, vlm, broken: not started",
        ]

    def test_each_test_of_a_named_file_is_named_on_the_first_morning(self, tmp_path: Path) -> None:
        file = Path(__file__).parents[3] / "conf" / "examples" / "nightly.toml"
        site = Site(workspace=tmp_path)

        asked = watch_settings("08:00", timezone="Europe/Berlin", files=[file])
        watch = look(asked, site, lambda: open_store(site.store_settings), now=NOW)

        assert watch.exit_code == 4
        assert len(watch.missing) == 3
        assert {missing.why for missing in watch.missing} == {"not started"}
        assert watch.nights[0].title.endswith(f", the night before {NIGHT} 08:00")

    def test_a_test_by_hand_stands_in_for_none_of_the_others(self, yesterday: Place) -> None:
        begun = SLOT + timedelta(hours=6)
        some = yesterday.start.model_copy(
            update={"night": f"{NIGHT}-070000", "slot": None, "begun_at": begun, "tests": yesterday.start.tests[:1]}
        )
        record_start(yesterday.store, some.model_copy(update={"invalid": ()}))
        passed = Verdict(run_key=yesterday.key("llama"), test_id="llama", night=some.night, status=VerdictStatus.PASSED)
        record_end(yesterday.store, NightReport(scenario=some.scenario, night=some.night, verdicts=(passed,)))

        watch = yesterday.look()

        assert watch.exit_code == 4
        assert list(watch_lines(watch)) == [
            f"practice nightly, night {NIGHT}-070000: 1 verdict",
            f"practice nightly, the night of {NIGHT} 01:00: 2 of 2 verdicts missing",
            "  vlm, broken: not started",
        ]


class TestWhatCannotBeLookedAt:
    def test_a_store_that_is_away_is_an_alarm(self, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        away = StoreSettings(url="s3://nightly", endpoint_url=f"http://127.0.0.1:{free_ports(1)[0]}")

        watch = look(watch_settings("08:00"), place.site, lambda: open_store(away), now=NOW)

        assert (watch.exit_code, watch.missing) == (4, ())
        assert summary(watch) == "not everything could be looked at"
        (line,) = watch_lines(watch)
        assert line.startswith("the store cannot be read: s3://nightly")

    def test_a_store_without_any_scheduled_night_is_an_alarm(self, tmp_path: Path) -> None:
        site = Site(workspace=tmp_path)

        watch = look(watch_settings("08:00"), site, lambda: open_store(site.store_settings), now=NOW)

        assert watch.exit_code == 4
        assert "no night was scheduled in the last 7 days. Check --store" in watch.troubles[0]

    def test_a_store_whose_first_night_came_after_the_deadline_is_none(self, place: Place) -> None:
        later = {"night": f"{NIGHT}-2200", "slot": SLOT + timedelta(hours=20)}
        site = place.site.model_copy(update={"store": StoreSettings(url=f"{place.site.store_settings.url}/new")})
        record_start(open_store(site.store_settings), place.start.model_copy(update=later))

        watch = look(watch_settings("08:00"), site, lambda: open_store(site.store_settings), now=NOW)

        assert (watch.exit_code, watch.nights, watch.troubles) == (0, (), ())

    def test_a_secret_that_is_not_set_is_invalid_input_and_told(self, tmp_path: Path) -> None:
        def open_it() -> ObjectStore:
            raise InvalidInput("secret not found in env", subject="S3_KEY")

        watch = look(watch_settings("08:00"), Site(workspace=tmp_path), open_it, now=NOW)

        assert (watch.exit_code, watch.invalid) == (2, ("S3_KEY: secret not found in env",))

    def test_a_broken_scenario_file_is_told_beside_what_the_others_are(self, place: Place, tmp_path: Path) -> None:
        end(place, place.judge("llama"), place.judge("vlm"))
        broken = tmp_path / "broken.toml"
        broken.write_text("name = \n")

        watch = look(watch_settings("08:00", files=[broken]), place.site, lambda: place.store, now=NOW)

        assert watch.exit_code == 2
        assert str(broken) in "".join(watch_lines(watch))


@pytest.mark.parametrize("by", ["8", "25:00", "08:60", "", "8am", "08:00:00"])
def test_what_is_no_time_of_day_is_refused(by: str) -> None:
    with pytest.raises(InvalidInput, match="not a time of day"):
        watch_settings(by)


@pytest.mark.parametrize("zone", ["Mars/Base", "../etc/passwd", "europe/berlin\0"])
def test_what_is_no_time_zone_is_refused(zone: str) -> None:
    with pytest.raises(InvalidInput, match="no such time zone"):
        watch_settings("08:00", timezone=zone)


@pytest.mark.parametrize("days", [0, -3, 99_999_999])
def test_days_to_look_back_that_no_calendar_has_are_refused(days: int) -> None:
    with pytest.raises(InvalidInput, match="not a number of days"):
        watch_settings("08:00", days=days)


def test_an_alarm_is_one_notice_of_everything(tmp_path: Path) -> None:
    def night(scenario: str, *tests: str) -> WatchedNight:
        missing = (
            MissingVerdict(
                scenario=scenario, night=NIGHT, test_id=test, cause=MissingCause.RUNNING, why="running", job_id=7
            )
            for test in tests
        )
        return WatchedNight(scenario=scenario, night=NIGHT, title=f"{scenario}, night", missing=tuple(missing))

    # Two deployments that are due in one slot have nights of one title where neither has begun.
    nights = (night("a", "w"), night("a", "x", "y"), night("b", "z"))
    watch = Watch(by=NOW, nights=nights, troubles=("Slurm is away",))

    notice = notice_of(watch)

    assert notice.subject == "nightbridge: 4 verdicts missing: a, night, b, night; not everything could be looked at"
    assert "  x, y: running" in notice.text
    assert "Slurm is away" in notice.text
    facts = json.loads(json.dumps(notice.facts))
    assert facts["night"] == NIGHT
    assert [missing["test_id"] for missing in facts["missing"]] == ["w", "x", "y", "z"]
    assert facts["missing"][0]["cause"] == "running"


@pytest.mark.slurm
class TestRealSlurm:
    @pytest.fixture
    def workspace(self) -> Iterator[Path]:
        folder = Path(tempfile.mkdtemp(prefix="nb-ws-"))
        yield folder
        shutil.rmtree(folder, ignore_errors=True)

    @pytest.fixture
    def place(self, slurm_cluster: SlurmDaemons, workspace: Path) -> Place:
        settings = ClusterSettings(kind="slurm", name="debian", slurm_conf=slurm_cluster.slurm_conf)
        return place_of(Site(workspace=workspace, cluster=settings), "llama", "vlm", "moe")

    @pytest.mark.usefixtures("living")
    def test_says_why_and_since_when_jobs_wait_and_run(self, place: Place) -> None:
        running = place.submit("llama", "sleep 60", "--mem=10")
        held = place.submit("vlm", "true", "--mem=10", "--hold")
        later = place.submit("moe", "true", "--mem=10", f"--begin={utc_now() + timedelta(hours=1):%Y-%m-%dT%H:%M:%S}")
        jobs = place.cluster
        try:
            wait_until(lambda: jobs.states([running])[running].state.value == "RUNNING", "the job to run")
            wait_until(lambda: jobs.states([later])[later].reason == "BeginTime", "a reason")
            found = {missing.test_id: missing for missing in place.look().missing}
        finally:
            for job in (running, held, later):
                jobs.cancel(job)

        assert found["llama"].cause is MissingCause.RUNNING
        assert found["llama"].since is not None
        assert found["llama"].why == f"running since {clock(found['llama'].since)}, job {running}"
        assert found["vlm"].why.endswith(f"(JobHeldUser, held by its user: `scontrol release {held}`), job {held}")
        assert f"(BeginTime, its start was set to a later time: `scontrol update job={later} StartTime=now`" in (
            found["moe"].why
        )
        assert found["moe"].why.endswith(f"), job {later}")

    @pytest.mark.usefixtures("living")
    def test_that_does_not_answer_is_never_taken_for_no_job(
        self, place: Place, slurm_cluster: SlurmDaemons, tmp_path: Path
    ) -> None:
        job = place.submit("llama", "sleep 60", "--mem=10")
        place.judge("vlm")
        away = tmp_path / "slurm.conf"
        nobody = iter(free_ports(2))
        away.write_text(
            "".join(
                f"{line.partition('=')[0]}={next(nobody)}\n"
                if line.startswith(("SlurmctldPort=", "AccountingStoragePort="))
                else f"{line}\n".replace("MessageTimeout=10", "MessageTimeout=2")
                for line in slurm_cluster.slurm_conf.read_text().splitlines()
            )
        )
        try:
            watch = place.look(cluster=place.site.cluster.model_copy(update={"slurm_conf": away}))
        finally:
            place.cluster.cancel(job)

        found = {missing.test_id: missing for missing in watch.missing}
        assert set(found) == {"llama", "moe"}
        assert (found["llama"].cause, found["llama"].job_id) == (MissingCause.UNKNOWN, job)
        assert "the cluster does not answer" in found["llama"].why

    @pytest.mark.usefixtures("living")
    def test_that_is_not_on_this_machine_is_said(self, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
        job = place.submit("llama", "true", "--mem=10")
        place.judge("vlm")
        monkeypatch.setenv("PATH", "/nowhere")

        watch = place.look()

        assert [missing.test_id for missing in watch.missing] == ["llama", "moe"]
        assert (watch.missing[0].cause, watch.missing[0].job_id) == (MissingCause.UNKNOWN, job)
        assert "squeue: command not found. Set the cluster's bin_dir" in watch.missing[0].why
