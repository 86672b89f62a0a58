"""Every deployment from its form to its end: a browser fills the forms, a worker runs what they start."""

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import need
from tests.nights.installation import Installation, clone, wait_for
from tests.real.browser import Page, browser, browser_missing_reason
from tests.real.prefect_server import PrefectServer

pytestmark = pytest.mark.launcher

UI_DELAY = 1.5
"""Seconds after which Prefect's form has taken over what was typed."""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory, environments_dir: Path) -> Iterator[Installation]:
    """What `make deploy` and `make worker` make, with room for several nights at once."""
    need(browser_missing_reason())
    folder = tmp_path_factory.mktemp("forms")
    server = PrefectServer(folder / "server")
    server.settings = {"PREFECT_SERVER_UI_API_URL": server.api_url}
    server.start()
    made = Installation(clone(folder / "nightbridge", environments_dir, cron='cron: "0 1 * * *"'), server)
    made.make("deploy")
    # How a worker prepares a workspace is the same for all: the flow runs of `test` and of the shipped schedule have it.
    made.go_straight("bisect/bisect", "attribute/attribute", "try/try", "watchdog/watchdog", "check-site/check")
    made.go_straight(*(f"{name}/{name}" for name in ("accept", "withdraw", "parity", "prune")))
    server.ask("PATCH", "work_pools/nightbridge/queues/nights", {"concurrency_limit": 3})
    worker = made.start_worker()
    yield made
    worker.stop()
    server.stop()


@pytest.fixture(scope="module")
def page(installed: Installation, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browser(tmp_path_factory.mktemp("chromium"), height=1400) as opened:
        yield opened


LAST_OF_FORM = {"": "Validate parameters", "/v2": "Enforce Parameter Schema"}
"""What stands below the fields, by the path of Prefect's UI: its first one and its second."""


def open_form(page: Page, installed: Installation, deployment: str, ui: str = "") -> None:
    found = installed.server.ask("POST", "deployments/filter", {"deployments": {"name": {"any_": [deployment]}}})
    page.open(f"{installed.server.api_url.removesuffix('/api')}{ui}/deployments/deployment/{found[0]['id']}/run")
    page.wait_text(LAST_OF_FORM[ui])


def fill(page: Page, fields: Mapping[str, str | Sequence[str]]) -> None:
    """Type a text, or choose from what a list names."""
    for name, value in fields.items():
        if isinstance(value, str):
            page.type(name, value)
        else:
            page.choose(name, *value)
    if fields:
        time.sleep(UI_DELAY)


def submit(page: Page, installed: Installation, deployment: str, ui: str = "", **fields: str | Sequence[str]) -> None:
    open_form(page, installed, deployment, ui)
    fill(page, fields)

    def left() -> bool:
        """A server that is busy may refuse, and then the form stays."""
        page.click("Submit")
        given_up = time.monotonic() + 3 * UI_DELAY
        while not (gone := page.evaluate("!location.pathname.endsWith('/run')")) and time.monotonic() < given_up:
            time.sleep(0.2)
        return bool(gone)

    wait_for(f"start from the form of {deployment}", left)
    page.open("about:blank")  # the page of a flow run draws its graph all the time, without a graphics card


def end_of(installed: Installation, deployment: str) -> tuple[str, str]:
    """Name and message of the final state of a deployment's flow run by hand."""

    def ended() -> dict[str, Any] | None:
        runs = [run for run in installed.flow_runs(deployment) if not run["auto_scheduled"]]
        return runs[-1] if runs and runs[-1]["end_time"] else None

    state = (wait_for(f"end of {deployment}", ended) or {})["state"]
    return state["name"], state["message"]


def test_deployments_run_from_their_forms_in_either_ui_to_their_end(page: Page, installed: Installation) -> None:
    submit(page, installed, "check")
    submit(page, installed, "prune")
    submit(page, installed, "watchdog", timezone=["Europe/Paris"])
    submit(page, installed, "test", tests=["llama-small"], night="by-hand")
    assert end_of(installed, "check")[0] == "Healthy"
    assert end_of(installed, "prune")[0] == "Listed"
    assert end_of(installed, "watchdog")[0] in ("VerdictsMissing", "VerdictsThere")
    assert end_of(installed, "test") == ("NoBaseline", "1 test(s): 1 no baseline")

    submit(page, installed, "parity", run_a="llama-small@by-hand", run_b="llama-small@by-hand")
    submit(page, installed, "accept", run="llama-small@by-hand", why="new image", who="anna", kind=["baseline"])
    submit(page, installed, "bisect", test_id=["llama-small"])
    submit(page, installed, "attribute", test_id=["llama-small"])
    submit(page, installed, "try", test_id=["llama-small"])
    assert end_of(installed, "parity") == ("Alike", "compute the same, bit for bit")
    assert end_of(installed, "accept")[0] == "Decided"
    submit(page, installed, "withdraw", ui="/v2", decision="llama-small", why="by mistake", who="anna")
    assert end_of(installed, "bisect")[0] == "Invalid"
    assert end_of(installed, "attribute")[0] == "Invalid"
    assert end_of(installed, "try")[0] == "Invalid"
    assert "nothing to try" in end_of(installed, "try")[1]
    name, message = end_of(installed, "withdraw")
    assert (name, "1 night judged again" in message) == ("Withdrawn", True)
    # Another worker's host finds the results there.
    assert installed.stored("results/*-clone-*")


@pytest.mark.skipif("NIGHTBRIDGE_EVERY_STAGE" not in os.environ, reason="minutes; the flow of `test`, in make soak")
def test_a_sweep_and_a_whole_night_run_from_their_forms(page: Page, installed: Installation) -> None:
    submit(page, installed, "sweep", tests=["llama-batch"])
    submit(page, installed, "nightly")
    assert end_of(installed, "sweep")[0] == "NoBaseline"
    assert end_of(installed, "nightly")[0] in ("NoBaseline", "Passed")


def test_a_form_refuses_wrong_input_every_field_at_once(page: Page, installed: Installation) -> None:
    before = len(installed.flow_runs("test"))
    open_form(page, installed, "test")
    fill(page, {"tests": ["llama-batch"], "night": "BAD Night!"})

    page.click("Submit")

    page.wait_text("'BAD Night!' does not match")
    page.wait_text("['llama-batch'] should not be valid under")
    assert len(installed.flow_runs("test")) == before


def test_the_form_of_the_second_ui_refuses_as_the_first_one_does(page: Page, installed: Installation) -> None:
    before = len(installed.flow_runs("test"))
    open_form(page, installed, "test", ui="/v2")
    fill(page, {"night": "BAD Night!"})

    page.click("Submit")

    page.wait_text("'BAD Night!' does not match")
    assert len(installed.flow_runs("test")) == before
