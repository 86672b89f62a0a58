"""The product: what `make deploy` and `make worker` set up runs a night by the clock, from its cron line to its verdict.

Nothing is passed to these nights, neither an id nor a file: the schedule starts them, as it does at one in the morning. They
are on PostgreSQL where it can be had: `test_clock_and_disk.py` has the schedule's nights on SQLite. `make soak` has both here.
"""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from tests.conftest import need
from tests.nights.conftest import EVERY_STAGE
from tests.nights.installation import Installation, clone, read_json, wait_for
from tests.real.postgres import postgres_missing_reason, start_postgres
from tests.real.prefect_server import PrefectServer, make_database

pytestmark = pytest.mark.launcher

TESTS = {"llama-small", "deepseek-small"}
"""Of `conf/practice/nightly.toml`."""
ZONE = ZoneInfo("Europe/Berlin")
"""Of the schedule in `prefect.yaml`."""

DATABASES = ("SQLite", "PostgreSQL") if EVERY_STAGE else ("SQLite" if postgres_missing_reason() else "PostgreSQL",)


@pytest.fixture(scope="module")
def deployed(
    tmp_path_factory: pytest.TempPathFactory, environments_dir: Path
) -> Iterator[dict[str, Future[Installation]]]:
    """An installation on each database whose first two scheduled nights are over.

    They wait for the clock at the same time.
    """
    with ExitStack() as stack, ThreadPoolExecutor() as threads:
        urls: dict[str, str | None] = {"SQLite": None} if "SQLite" in DATABASES else {}
        if postgres_missing_reason() is None:
            postgres = start_postgres()
            stack.callback(postgres.remove)
            urls["PostgreSQL"] = make_database(postgres)
        yield {
            name: threads.submit(run_two_nights, tmp_path_factory.mktemp(name), environments_dir, url, stack)
            for name, url in urls.items()
        }


def run_two_nights(folder: Path, environments: Path, database_url: str | None, stack: ExitStack) -> Installation:
    """Install and deploy, start the worker, and stop it after two nights."""
    server = PrefectServer(folder / "server", database_url=database_url)
    stack.callback(server.stop)
    server.start()
    installed = Installation(clone(folder / "nightbridge", environments), server)
    installed.make("deploy")
    worker = installed.start_worker()
    stack.callback(worker.stop)
    wait_for("two ended nights", lambda: len(ended_runs(installed)) >= 2)
    worker.stop()
    return installed


@pytest.fixture(params=DATABASES)
def two_nights(request: pytest.FixtureRequest, deployed: dict[str, Future[Installation]]) -> Installation:
    if request.param == "PostgreSQL":
        need(postgres_missing_reason())
    return deployed[request.param].result()


def ended_runs(installed: Installation) -> list[dict[str, Any]]:
    """The scheduled flow runs that have ended, the first first.

    Where two nights take longer than two minutes one is let go, as the catch-up policy has it.
    """
    return [run for run in installed.scheduled_runs() if run["end_time"] and run["state_name"] != "Skipped"]


def test_two_slots_of_the_schedule_are_two_nights_that_end_in_a_verdict(two_nights: Installation) -> None:
    runs = ended_runs(two_nights)[:2]

    assert [(run["state_type"], run["state_name"]) for run in runs] == [
        ("COMPLETED", "NoBaseline"),
        ("COMPLETED", "InsufficientData"),
    ]
    slots = [datetime.fromisoformat(run["expected_start_time"]).astimezone(ZONE) for run in two_nights.scheduled_runs()]
    assert first_nights(two_nights) == [slot_night(run, slots) for run in runs]


def test_each_night_has_jobs_of_its_own_and_every_test_a_verdict_in_the_store(two_nights: Installation) -> None:
    first, second = first_nights(two_nights)

    # The second one has the first to compare with, which a run that was only found again would not have.
    for night, status in ((first, "no_baseline"), (second, "insufficient_data")):
        verdicts = [read_json(path) for path in two_nights.stored(f"runs/*/{night}/*/verdict.json")]
        assert {verdict["test_id"]: verdict["status"] for verdict in verdicts} == dict.fromkeys(TESTS, status)
        own_jobs = [job.name for job in two_nights.jobs() if night_of_job(job.name) == night]
        assert sorted(own_jobs) == sorted(f"{verdict['run_key']}-a1" for verdict in verdicts)


def test_each_night_has_a_report(two_nights: Installation) -> None:
    for night in first_nights(two_nights):
        (page,) = two_nights.stored(f"reports/{night}/*.html")
        assert all(test in page.read_text() for test in TESTS)


def test_each_verdict_and_the_end_of_each_night_is_one_event_in_prefect(two_nights: Installation) -> None:
    nights = first_nights(two_nights)

    def told(name: str) -> list[dict[str, Any]]:
        return [event["payload"] for event in two_nights.events(name) if event["payload"]["night"] in nights]

    # Prefect's server keeps events in memory for a while before it writes them to its database.
    wait_for("event of each night's end", lambda: len(told("nightbridge.night")) >= 2)
    ends = sorted((event["night"], event["end"]) for event in told("nightbridge.night"))
    assert ends == list(zip(nights, ("no_baseline", "insufficient_data"), strict=True))
    assert sorted((event["night"], event["test_id"]) for event in told("nightbridge.verdict")) == sorted(
        (night, test) for night in nights for test in TESTS
    )


def first_nights(installed: Installation) -> list[str]:
    """The first two nights in the store."""
    return sorted(path.name for path in installed.stored("reports/*"))[:2]


def night_of_job(name: str) -> str:
    """The night in a job's name, which ends in a hash and the attempt."""
    return "-".join(name.split("-")[2:-2])


def slot_night(run: dict[str, Any], slots: list[datetime]) -> str:
    """The id of the night that a flow run's slot stands for: with the date alone the first of its day."""
    slot = datetime.fromisoformat(run["expected_start_time"]).astimezone(ZONE)
    is_first = slot == min(each for each in slots if each.date() == slot.date())
    return slot.strftime("%Y-%m-%d" if is_first else "%Y-%m-%d-%H%M")
