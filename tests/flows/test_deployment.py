"""The deployments, and a night by hand, on a real Prefect server."""

import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import chdir
from contextvars import copy_context
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
import yaml
from prefect.automations import Automation
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import WorkPoolUpdate
from prefect.client.schemas.objects import State, StateType, WorkPool, WorkQueue
from prefect.events.actions import ChangeFlowRunState
from prefect.events.schemas.automations import EventTrigger, Posture
from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES, PREFECT_HOME, temporary_settings
from prefect.states import Cancelled, Crashed, Failed, Late, Pending, Running, Suspended

from nightbridge.errors import InvalidInput
from nightbridge.flows.by_hand import main, start_night
from nightbridge.flows.deploy import Request, deploy, without_server
from nightbridge.models import SiteChoice, StoreSettings, utc_now
from nightbridge.nights.records import NightStart, record_start
from nightbridge.store.object_store import open_store
from tests.real.prefect_server import PrefectServer

ROOT = Path(__file__).parents[2]
NIGHTLY = "nightly-regression/nightly"
FORMER_AUTOMATION = "nightbridge: crash flow runs without a heartbeat"


Described = dict[str, tuple[object, ...]]


@dataclass(frozen=True)
class Deployments:
    """What a server had after `make deploy`, after `prefect deploy --all`, and after some of them were deployed again.

    An older release and a person had been at it before the last one.
    """

    first: Described
    by_prefect: Described
    again: Described
    said_again: list[str]
    queue_again: WorkQueue
    pool_again: WorkPool


@pytest.fixture(scope="module")
def deployments(prefect_server: PrefectServer, tmp_path_factory: pytest.TempPathFactory) -> Deployments:
    with temporary_settings({PREFECT_API_URL: prefect_server.api_url}), get_client(sync_client=True) as client:
        former_automation().create()
        nightbridge(prefect_server, "deploy")
        first = described(client)
        prefect_server.prefect("--no-prompt", "deploy", "--all", cwd=ROOT)
        by_prefect = described(client)
        nightly = client.read_deployment_by_name(NIGHTLY)
        prefect_server.ask("PATCH", f"deployments/{nightly.id}", {"concurrency_limit": 1})
        assert client.read_deployment(nightly.id).global_concurrency_limit
        queue = client.read_work_queue_by_name("nights", work_pool_name="nightbridge")
        client.update_work_queue(queue.id, concurrency_limit=2)
        client.update_work_pool("nightbridge", WorkPoolUpdate(description="ours", concurrency_limit=7))
        said_again = deploy_again(tmp_path_factory.mktemp("again"))
        found = Deployments(
            first=first,
            by_prefect=by_prefect,
            said_again=said_again,
            again={name: each for name, each in described(client).items() if name in DEPLOYED_AGAIN},
            queue_again=client.read_work_queue_by_name("nights", work_pool_name="nightbridge"),
            pool_again=client.read_work_pool("nightbridge"),
        )
        client.update_work_queue(queue.id, concurrency_limit=1)
        client.update_work_pool("nightbridge", WorkPoolUpdate(concurrency_limit=None))
    return found


DEPLOYED_AGAIN = ("nightly", "accept", "reaper")
"""A schedule in the queue of nights, a form with parameters of the site, and a schedule that does not pile up."""


def deploy_again(folder: Path) -> list[str]:
    """Deploy these alone from a folder of its own, as `make deploy` does: the server has most work with each of them."""
    ship(folder, *DEPLOYED_AGAIN)
    (folder / "conf").symlink_to(ROOT / "conf")
    with chdir(folder):
        return list(deploy(Request()))


@pytest.fixture(scope="module")
def deployed(prefect_server: PrefectServer, deployments: Deployments) -> PrefectServer:
    """What `make deploy` leaves on a server that an older release was deployed to."""
    return prefect_server


def nightbridge(server: PrefectServer, *arguments: str) -> list[str]:
    """Run the command in the checkout, and return what it says, a line each."""
    command = [str(Path(sys.executable).with_name("nightbridge")), *arguments]
    done = subprocess.run(command, env=server.environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stderr.splitlines()


@pytest.fixture
def client(deployed: PrefectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SyncPrefectClient]:
    """For calls in this process, in a folder of the test's own, which holds the default site's workspace."""
    monkeypatch.chdir(tmp_path)
    with temporary_settings({PREFECT_API_URL: deployed.api_url}), get_client(sync_client=True) as made:
        yield made


def former_automation() -> Automation:
    trigger = EventTrigger(expect={"prefect.flow-run.*"}, posture=Posture.Proactive, threshold=1, within=540)
    return Automation(name=FORMER_AUTOMATION, trigger=trigger, actions=[ChangeFlowRunState(state=StateType.CRASHED)])


def make_night(server: PrefectServer, folder: Path, *arguments: str) -> str:
    """What `make night` runs."""
    command = [sys.executable, "-m", "nightbridge.flows.by_hand", *arguments]
    done = subprocess.run(command, env=server.environment, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


def new_night() -> str:
    """A night that no other test has."""
    return f"2026-11-21-{uuid4().hex[:6]}"


SHIPPED = {
    *("nightly", "test", "sweep", "bisect", "attribute", "try", "accept", "withdraw", "parity", "prune", "check"),
    *("watchdog", "reaper"),
}


def described(client: SyncPrefectClient) -> Described:
    """Every deployment of ours by its name, without what the form offers and where results are kept.

    The server may have those of other tests.
    """
    return {
        each.name: (
            each.entrypoint,
            each.description,
            each.parameters,
            each.work_queue_name,
            [(schedule.slug, schedule.schedule.model_dump(exclude={"day_or"})) for schedule in each.schedules],
            each.concurrency_options,
            each.pull_steps,
            {name: value for name, value in each.job_variables["env"].items() if "STORAGE" not in name},
        )
        for each in client.read_deployments()
        if each.work_pool_name == "nightbridge" and "env" in each.job_variables
    }


def test_a_prefect_yaml_that_cannot_be_read_is_an_error_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prefect.yaml").write_text("name: nightbridge\ndeployments: [\n")

    with pytest.raises(InvalidInput, match=r"prefect\.yaml: cannot be read: while parsing"):
        next(deploy(Request()))


@pytest.mark.parametrize(
    ("deployment", "said"),
    [
        ("{name: ours, entrypoint: nightbridge.flows.nightly.nightly}", "lacks description, tags, work_pool"),
        ("ours", "lacks description, entrypoint, name, tags, work_pool"),
        ("{name: ours, entrypoint: a.b, description: A night., tags: [], work_pool: {}}", r"lacks work_pool\.name"),
        (
            "{name: ours, entrypoint: a.b, description: , tags: , work_pool: {name: p}, schedules: [{interval: 60}]}",
            r"lacks description, tags, schedules\.cron, schedules\.slug",
        ),
        (
            "{name: ours, entrypoint: nightbridge.flows.nightly.nigthly, description: A night., tags: [], work_pool: {name: p}}",
            r"nightly\.nigthly: no such flow: .*\. Correct the entrypoint of ours in prefect\.yaml",
        ),
    ],
)
def test_a_deployment_that_none_can_be_made_of_is_an_error_of_its_own(
    deployment: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prefect.yaml").write_text(f"name: nightbridge\ndeployments: [{deployment}]\n")

    with pytest.raises(InvalidInput, match=said):
        next(deploy(Request()))


@pytest.mark.parametrize("own", ["name: shop\ndeployments: [{name: tills}]\n", "flows/prefect.yaml"])
def test_another_projects_prefect_yaml_is_left_alone(own: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prefect.yaml").write_text(own)

    with pytest.raises(InvalidInput, match=r"conf/practice/\w+\.toml"):  # of the shipped one, and not here
        next(deploy(Request()))


def test_outside_of_a_checkout_files_are_asked_for_before_a_server_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("nightbridge.flows.deploy.reach_server", lambda: pytest.fail("a server was looked for"))

    with pytest.raises(InvalidInput) as refused:
        next(deploy(Request()))

    assert str(refused.value) == (
        "conf/practice/nightly.toml, conf/practice/sweep.toml: deployed by prefect.yaml where no FILE is named, and not in "
        "this folder. Name your own: nightbridge deploy FILE..."
    )


def scenario_file(path: Path, name: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    test = (ROOT / "conf/practice/llama_small.toml").read_text()
    path.write_text(test.replace('name = "llama_small"', f'name = "{name}"'))
    return path


def ship(folder: Path, *names: str) -> None:
    """Only these of the deployments that are shipped: the server takes a third of a second of a core for each."""
    document = yaml.safe_load((ROOT / "prefect.yaml").read_text())
    document["deployments"] = [each for each in document["deployments"] if each["name"] in names]
    (folder / "prefect.yaml").write_text(yaml.safe_dump(document))


@pytest.mark.parametrize("names", [("a/nightly", "b/nightly"), (f"{'nightly_' * 5}fp8", f"{'nightly_' * 5}bf16")])
def test_two_files_whose_deployments_would_have_one_name_are_refused(
    names: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    files = tuple(scenario_file(Path(f"{name}.toml"), name) for name in names)

    with pytest.raises(InvalidInput, match=f"{files[0]} and {files[1]}: both would be the deployment nightly-nightly-"):
        next(deploy(Request(files=files)))


def test_a_scenario_that_would_have_no_nights_is_refused_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("nightbridge.flows.deploy.reach_server", lambda: pytest.fail("a server was looked for"))
    for copy in ("one", "two"):
        scenario_file(Path(f"{copy}.toml"), "llama")
    Path("night.toml").write_text('name = "night"\n\n[[Tests]]\nid = "llama"\ntest_name = "llama"\n')

    with pytest.raises(InvalidInput, match=r"^night\.toml: no test of it can run") as refused:
        next(deploy(Request(files=(Path("night.toml"),))))

    assert "night.toml:5: llama: test_name: 'llama' names two tests: one.toml and two.toml" in str(refused.value)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"cron": "0 25 * * *"}, r'0 25 \* \* \*: Invalid cron string: "0 25'),
        ({"timezone": "Europe/Berln"}, 'Europe/Berln: Invalid timezone: "Europe/Berln"'),
    ],
)
def test_a_schedule_that_is_none_is_refused_before_anything_is_made(
    wrong: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("nightbridge.flows.deploy.get_client", None)

    with pytest.raises(InvalidInput, match=said):
        next(deploy(Request(files=(scenario_file(Path("one.toml"), "one"),), **wrong)))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"git": "https://git.example/tests.git"}, r"/one\.toml: a file of this machine, and workers pull"),
        ({"branch": "main"}, "--branch, --git-token: no repository is named"),
        ({"git_token": "token"}, "--branch, --git-token: no repository is named"),
    ],
)
def test_what_does_not_come_from_the_repository_is_refused_before_anything_is_made(
    wrong: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nightbridge.flows.deploy.get_client", None)

    with pytest.raises(InvalidInput, match=said):
        next(deploy(Request(files=(scenario_file(tmp_path / "one.toml", "one"),), **wrong)))


@pytest.fixture
def without_ours(client: SyncPrefectClient) -> Iterator[None]:
    """Removes in the end what a test has deployed of its own."""
    before = {each.id for each in client.read_deployments()}
    yield
    for each in client.read_deployments():
        if each.id not in before:
            client.delete_deployment(each.id)


@pytest.mark.usefixtures("client", "without_ours")
def test_a_deployment_of_another_scenario_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def deploy_in(folder: str, scenario: str) -> list[str]:
        file = scenario_file(tmp_path / folder / "ours.toml", scenario)
        ship(file.parent, "nightly")
        monkeypatch.chdir(file.parent)
        return [line for line in deploy(Request(files=(Path(file.name),))) if "nightly-ours-local" in line]

    name = "nightly-regression/nightly-ours-local"
    first, renamed, elsewhere = deploy_in("one", "first"), deploy_in("one", "renamed"), deploy_in("two", "renamed")
    with pytest.raises(
        InvalidInput, match=rf"ours\.toml: it would replace the deployment {name} of the scenario renamed"
    ):
        deploy_in("three", "second")

    assert first == renamed == elsewhere == [f"deployment {name}"]


@pytest.mark.usefixtures("client", "without_ours")
def test_scenarios_that_would_share_a_history_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ship(tmp_path, "nightly")
    one, two = (scenario_file(Path(f"{name}.toml"), "shared") for name in ("one", "two"))
    same = list(deploy(Request(files=(one, two))))
    two.write_text(two.read_text().replace('commit = "main"', 'commit = "release"', 1))

    others = list(deploy(Request(files=(one, two))))

    assert not any("warning" in line for line in same)
    (line,) = (line for line in others if "warning" in line)
    assert line.startswith("warning: two.toml: Tests: one.toml has 'shared' with other code or another image")


@pytest.mark.usefixtures("without_ours")
def test_what_somebody_chose_in_the_ui_is_named_when_the_files_replaces_it(
    deployed: PrefectServer, client: SyncPrefectClient, tmp_path: Path
) -> None:
    ship(tmp_path, "nightly")
    request = Request(files=(scenario_file(tmp_path / "moved.toml", "moved").relative_to(tmp_path),))
    name = "nightly-regression/nightly-moved-local"
    list(deploy(request))
    first = client.read_deployment_by_name(name)
    moved = {"schedule": {"cron": "52 7 * * *", "timezone": "Europe/Berlin"}, "parameters": {"tests": ["small"]}}
    deployed.ask("PATCH", f"deployments/{first.id}/schedules/{first.schedules[0].id}", moved)
    # Its form as the UI sends it: every field, be it as it was.
    form = first.parameters | {"tests": [], "night": None, "new_attempt": False, "catch_up": "all"}
    deployed.ask("PATCH", f"deployments/{first.id}", {"parameters": form})

    moved_hour, parameter, of_schedule = (
        "its schedule was 52 7 * * * Europe/Berlin",
        'its parameter catch_up was "all"',
        'its parameter tests was ["small"]',
    )
    assert f"deployment {name}, {moved_hour}, {parameter}, {of_schedule}" in list(deploy(request))
    assert f"deployment {name}" in list(deploy(request))
    again = client.read_deployment_by_name(name)
    assert (again.schedules[0].schedule, again.parameters) == (first.schedules[0].schedule, first.parameters)


@pytest.mark.usefixtures("without_ours")
def test_a_schedule_that_somebody_switched_off_stays_off(
    deployed: PrefectServer, client: SyncPrefectClient, tmp_path: Path
) -> None:
    ship(tmp_path, "nightly", "watchdog")
    request = Request(files=(scenario_file(tmp_path / "rested.toml", "rested").relative_to(tmp_path),))
    name = "nightly-regression/nightly-rested-local"
    list(deploy(request))
    first = client.read_deployment_by_name(name)
    deployed.ask("PATCH", f"deployments/{first.id}/schedules/{first.schedules[0].id}", {"active": False})

    said = list(deploy(request))

    assert f"deployment {name}, its schedule stays switched off" in said
    assert [each.active for each in client.read_deployment_by_name(name).schedules] == [False]
    assert all(each.active for each in client.read_deployment_by_name("watchdog/watchdog-local").schedules)


@pytest.mark.usefixtures("without_ours")
def test_a_secret_of_notify_that_is_not_there_is_said_before_anything_is_made(
    client: SyncPrefectClient, tmp_path: Path
) -> None:
    scenario_file(tmp_path / "unheard.toml", "unheard")
    (tmp_path / "site.toml").write_text('[cluster]\nname = "quiet"\n[notify]\nwebhook = "env:NO_SUCH_HOOK"\n')
    request = Request(files=(Path("unheard.toml"),), choice=SiteChoice(system="site.toml"))

    with pytest.raises(InvalidInput, match="NO_SUCH_HOOK: secret not found in env"):
        list(deploy(request))

    assert not [each.name for each in client.read_deployments() if "quiet" in each.name]


@pytest.mark.usefixtures("without_ours")
def test_a_workspace_is_not_in_the_clone_that_goes_with_the_flow_run_and_every_form_finds_its_store(
    client: SyncPrefectClient, tmp_path: Path
) -> None:
    ship(tmp_path, "nightly", "accept")
    file = scenario_file(tmp_path / "pulled.toml", "pulled").relative_to(tmp_path)

    list(deploy(Request(files=(file,), git="https://git.example/tests.git")))
    nightly = client.read_deployment_by_name("nightly-regression/nightly-pulled-local").parameters
    accept = client.read_deployment_by_name("accept/accept-local").parameters

    assert nightly == {"scenario": "pulled.toml", "workspace": f"{tmp_path}/.nightbridge"}
    assert accept == {"store": f"file://{tmp_path}/.nightbridge/store"}
    with pytest.raises(InvalidInput, match="no-such-token: no Secret block of this name"):
        next(deploy(Request(files=(file,), git="https://git.example/tests.git", git_token="no-such-token")))


ONE_DEPLOYMENT = """
name: nightbridge
deployments:
  - name: ours
    entrypoint: nightbridge.flows.nightly.nightly
    description: A night.
    tags: [nightbridge]
    parameters: {scenario: ours.toml}
    work_pool: {name: nightbridge, work_queue_name: nights}
"""


@pytest.mark.usefixtures("client", "without_ours")
def test_the_deployments_of_another_site_are_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "prefect.yaml").write_text(ONE_DEPLOYMENT)
    scenario_file(tmp_path / "ours.toml", "ours")

    def deploy_for(system: str, cluster: str) -> list[str]:
        site = f'workspace = "{tmp_path}/{cluster}"\n[cluster]\nkind = "local"\nname = "{cluster}"\n'
        (tmp_path / system).write_text(site)
        return [line for line in deploy(Request(choice=SiteChoice(system=system))) if "ours" in line]

    name = "nightly-regression/ours"
    first, renamed = deploy_for("a.toml", "a"), deploy_for("a.toml", "a2")
    with pytest.raises(InvalidInput, match=f"b: it would replace the deployment {name} of the cluster a2"):
        deploy_for("b.toml", "b")

    assert first == renamed == [f"deployment {name}"]


@pytest.mark.parametrize("by", ["first", "again"])
def test_prefect_deploy_makes_the_same_deployments_of_the_same_file(deployments: Deployments, by: str) -> None:
    by_prefect, by_nightbridge = deployments.by_prefect, vars(deployments)[by]

    for name, each in by_nightbridge.items():
        assert (name, each[:-2], each[-1]) == (name, by_prefect[name][:-2], by_prefect[name][-1])
    assert set(by_prefect) == SHIPPED
    assert set(by_nightbridge) == (SHIPPED if by == "first" else set(DEPLOYED_AGAIN))


def flow_run_in(printed: str) -> str:
    return printed.split("flow run ")[1].split(",")[0]


def test_a_cron_deployment_really_gets_scheduled_runs(deployed: PrefectServer) -> None:
    # With SQLAlchemy 2.1, or whenever 0.10 for Prefect 3.9.1, its server looks healthy and schedules nothing at all.
    deadline = time.monotonic() + 600
    by_the_clock = {"flow_runs": {"state": {"type": {"any_": ["SCHEDULED"]}}, "tags": {"all_": ["auto-scheduled"]}}}
    while not (runs := deployed.ask("POST", "flow_runs/filter", by_the_clock)) and time.monotonic() < deadline:
        time.sleep(1)

    assert runs, f"no scheduled run within ten minutes: {deployed.log.read_text()[-2000:]}"


def test_the_nights_of_a_cluster_share_a_queue_that_lets_one_run_at_a_time(client: SyncPrefectClient) -> None:
    nightly = client.read_deployment_by_name(NIGHTLY)
    queue = client.read_work_queue_by_name("nights", work_pool_name="nightbridge")

    assert (nightly.work_queue_name, queue.concurrency_limit) == ("nights", 1)
    # A limit of the deployment itself, which older releases had, ends a night whose server was away.
    assert nightly.global_concurrency_limit is None


def test_the_reaper_waits_for_no_night_and_does_not_pile_up(client: SyncPrefectClient) -> None:
    reaper = client.read_deployment_by_name("reaper/reaper")

    assert reaper.work_queue_name == "default"
    assert reaper.concurrency_options is not None
    assert reaper.concurrency_options.collision_strategy == "CANCEL_NEW"


def test_deploying_again_keeps_what_a_person_changed_of_the_queue_and_the_pool(deployments: Deployments) -> None:
    pool = deployments.pool_again

    assert "work queue nights of nightbridge: 2 flow run(s) at a time" in deployments.said_again
    assert deployments.queue_again.concurrency_limit == 2
    assert (pool.type, pool.description, pool.concurrency_limit) == ("process", "ours", 7)


def test_the_automation_that_crashed_the_living_is_removed(client: SyncPrefectClient) -> None:
    assert client.read_automations_by_name(FORMER_AUTOMATION) == []


def test_a_night_asked_for_twice_is_one_flow_run(
    deployed: PrefectServer, client: SyncPrefectClient, tmp_path: Path
) -> None:
    night = new_night()

    with ThreadPoolExecutor(2) as both:
        asked = [both.submit(copy_context().run, start_night, night) for _ in range(2)]
        at_once = [each.result() for each in asked]
    later = start_night(night)
    by_make = make_night(deployed, tmp_path, night)

    assert len({flow_run_in(printed) for printed in [*at_once, later, by_make]}) == 1
    assert at_once[0].startswith(f"night {night}: flow run ")
    assert later.endswith(", still scheduled")


def test_a_night_that_nothing_has_begun_says_what_it_waits_for(client: SyncPrefectClient) -> None:
    night = new_night()
    flow_run = flow_run_in(start_night(night))
    client.set_flow_run_state(flow_run, Late(), force=True)

    assert start_night(night) == (
        f"night {night}: flow run {flow_run}, still late: no worker is there (make worker), or another night of its "
        "cluster has its turn"
    )


@pytest.mark.parametrize(
    ("end", "said"), [(Crashed(), "crashed"), (Failed(name="Regressed"), "failed"), (Cancelled(), "cancelled")]
)
def test_a_night_that_ended_badly_goes_on_as_the_same_flow_run(
    client: SyncPrefectClient, tmp_path: Path, end: State[None], said: str
) -> None:
    night = new_night()
    flow_run = flow_run_in(start_night(night))
    for state in (Running(), end):
        client.set_flow_run_state(flow_run, state, force=True)

    printed = start_night(night)

    assert printed == f"night {night}: flow run {flow_run}, {said} before; resumed"
    assert client.read_flow_run(UUID(flow_run)).state_name == "AwaitingRetry"
    assert start_night(night).endswith(", still awaiting retry")


def test_a_night_that_passed_is_left_alone_and_how_to_run_it_again_is_said(
    client: SyncPrefectClient, tmp_path: Path
) -> None:
    night = new_night()
    flow_run = flow_run_in(start_night(night))
    client.set_flow_run_state(flow_run, State(type=StateType.COMPLETED, name="Passed"), force=True)

    printed = start_night(night)

    assert f"flow run {flow_run}, ended: passed; to run it again: " in printed
    assert printed.endswith(f"prefect deployment run {NIGHTLY} -p night={night}")
    assert client.read_flow_run(UUID(flow_run)).state_name == "Passed"


def test_a_night_that_the_schedule_began_goes_on_as_its_own_flow_run(client: SyncPrefectClient, tmp_path: Path) -> None:
    night = new_night()
    nightly = client.read_deployment_by_name(NIGHTLY)
    flow_run = client.create_flow_run_from_deployment(nightly.id, state=Running()).id
    client.set_flow_run_state(flow_run, Crashed(), force=True)
    keep_start(tmp_path / ".nightbridge", night, str(flow_run))

    printed = start_night(night)

    assert printed == f"night {night}: flow run {flow_run}, crashed before; resumed"


@pytest.fixture
def own_deployment(client: SyncPrefectClient, without_ours: None) -> str:
    """A deployment of nights beside the one of prefect.yaml, as `nightbridge deploy FILE` makes it; its name."""
    nightly = client.read_deployment_by_name(NIGHTLY)
    client.create_deployment(flow_id=nightly.flow_id, name="nightly-ours-hopper", parameters=nightly.parameters)
    return "nightly-ours-hopper"


def test_a_night_of_an_own_deployment_is_started_and_goes_on_there(
    client: SyncPrefectClient, own_deployment: str, tmp_path: Path
) -> None:
    night = new_night()
    ours = client.read_deployment_by_name(f"nightly-regression/{own_deployment}").id

    flow_run = flow_run_in(start_night(night, own_deployment))
    client.set_flow_run_state(flow_run, Crashed(), force=True)

    assert client.read_flow_run(UUID(flow_run)).deployment_id == ours
    assert start_night(night) == f"night {night}: flow run {flow_run}, crashed before; resumed"


def test_a_wrong_deployment_a_wrong_night_and_a_server_that_is_away_are_said_without_a_traceback(
    deployed: PrefectServer, own_deployment: str, capsys: pytest.CaptureFixture[str]
) -> None:
    codes = [main(["n1", "no-such"]), main(["2026-11-21 01:00"])]
    away = {PREFECT_API_URL: "http://127.0.0.1:9/api", PREFECT_CLIENT_MAX_RETRIES: 0}
    with temporary_settings(away):
        codes.append(main(["n1"]))

    assert codes == [2, 2, 4]
    wrong_name, wrong_night, not_there = capsys.readouterr().err.splitlines()
    assert "no-such: no such deployment of nights on this server. One of " in wrong_name
    # Another file of tests may have deployments on this server, too.
    assert {"nightly", own_deployment} <= {*wrong_name.rpartition("One of ")[2].split(", ")}
    assert "not a night id" in wrong_night
    assert "Prefect's server does not answer" in not_there


def test_a_night_whose_flow_run_prefect_has_forgotten_is_started(client: SyncPrefectClient, tmp_path: Path) -> None:
    night = new_night()
    keep_start(tmp_path / ".nightbridge", night, str(uuid4()))

    assert start_night(night).endswith(", started")


def keep_start(workspace: Path, night: str, flow_run: str) -> None:
    """Record in the store of the default site that a flow run began a night."""
    start = NightStart(
        night=night, scenario="nightly", cluster="local", workspace=workspace, begun_at=utc_now(), flow_run=flow_run
    )
    record_start(open_store(StoreSettings(url=f"file://{workspace}/store")), start)


def test_a_night_that_ends_badly_is_told_in_its_log_without_a_traceback(
    deployed: PrefectServer, client: SyncPrefectClient
) -> None:
    nightly = client.read_deployment_by_name(NIGHTLY)
    flow_run = str(client.create_flow_run_from_deployment(nightly.id, parameters={"cluster": "nowhere.toml"}).id)

    executed = subprocess.run(
        [sys.executable, "-m", "prefect.engine", flow_run],
        env=deployed.environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    log = deployed.log_of(flow_run)

    assert "nowhere.toml: no such file. Check the path" in log
    assert "Traceback" not in log + executed.stdout + executed.stderr


@pytest.mark.parametrize(
    ("state", "free"), [(Pending(), False), (Running(), False), (Crashed(), True), (Suspended(), True)], ids=str
)
def test_the_place_in_the_queue_is_free_again_when_a_night_crashed_or_is_suspended(
    deployed: PrefectServer, client: SyncPrefectClient, state: State[None], free: bool
) -> None:
    nightly = client.read_deployment_by_name(NIGHTLY)
    first, waiting = (client.create_flow_run_from_deployment(nightly.id).id for _ in range(2))
    client.set_flow_run_state(first, state, force=True)

    offered = deployed.ask("POST", "work_pools/nightbridge/get_scheduled_flow_runs", {"work_queue_names": ["nights"]})

    for flow_run in (first, waiting):
        client.set_flow_run_state(flow_run, Cancelled(), force=True)
    assert bool(offered) is free


def test_a_night_is_not_started_without_a_server(capsys: pytest.CaptureFixture[str]) -> None:
    with temporary_settings(restore_defaults={PREFECT_API_URL}):
        code = main(["n1"])

    assert code == 2
    assert "export PREFECT_API_URL=" in capsys.readouterr().err


def test_what_is_deployed_without_a_server_says_where_it_is(tmp_path: Path) -> None:
    with temporary_settings({PREFECT_HOME: tmp_path}, restore_defaults={PREFECT_API_URL}):
        (said,) = without_server()
    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:4200/api"}):
        nothing = list(without_server())

    assert f"PREFECT_API_URL is not set: this is in Prefect's database in {tmp_path}" in said
    assert nothing == []
