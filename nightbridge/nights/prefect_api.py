"""Why a night has not begun, as Prefect's server knows it: queried over plain HTTP, and done without where it is away.

The domain imports no Prefect, and the watchdog is for the mornings on which Prefect is what has failed.
"""

import base64
import json
import os
import ssl
import tomllib
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, timedelta
from pathlib import Path, PurePath
from typing import Any
from urllib.parse import quote, urlsplit

from nightbridge.models import Model
from nightbridge.nights.expected_verdicts import MissingCause

TIMEOUT_SECONDS = 5.0
"""For each answer."""

FLOW = "nightly-regression"
"""The flow of a night, by its name."""

_BEFORE_SLOT = timedelta(minutes=1)
_SETTINGS = ("PREFECT_API_URL", "PREFECT_API_AUTH_STRING", "PREFECT_API_SSL_CERT_FILE")
_AWAY = (OSError, ValueError, KeyError, TypeError, AttributeError)
"""What an answer may end in: no connection, an error's status, or something that is no answer of Prefect's."""


class WhyNot(Model):
    """Why a night has not begun: the gravest cause, and everything that was found in words."""

    cause: MissingCause
    words: str


class PrefectServer:
    """A Prefect server's HTTP API.

    Args:
        url: Its `/api` address.
        login: `USER:PASSWORD`, for a server that wants one.
        certificates: File of the authorities that count; the system's own when empty. One that cannot be read is a
            server's absence.
    """

    def __init__(self, url: str, login: str = "", certificates: str = "") -> None:
        self._url = url.rstrip("/")
        self._certificates = certificates
        self._headers = {"Content-Type": "application/json"}
        if login:
            self._headers["Authorization"] = f"Basic {base64.b64encode(login.encode()).decode()}"
        # A user and a password may stand before the host.
        self.host = urlsplit(url).netloc.rpartition("@")[2]

    def find(self, path: str, body: Mapping[str, object]) -> list[dict[str, Any]]:
        """What a filter of the API finds."""
        found: list[dict[str, Any]] = self._answer(path, json.dumps(body).encode())
        return found

    def version(self) -> str:
        """The release of Prefect that it runs, as 3.8.8; empty where it does not say."""
        try:
            return str(self._answer("/admin/version", None))
        except urllib.error.HTTPError as error:
            error.close()
            return ""

    def lease_storage(self) -> str:
        """The module that keeps who holds a slot of a limit; empty where the server does not say."""
        try:
            return str(self._answer("/admin/settings", None)["server"]["concurrency"]["lease_storage"])
        except urllib.error.HTTPError as error:
            error.close()
        except (KeyError, TypeError):
            pass  # another release
        return ""

    def _answer(self, path: str, body: bytes | None) -> Any:
        request = urllib.request.Request(f"{self._url}{path}", body, self._headers)
        trust = ssl.create_default_context(cafile=self._certificates) if self._certificates else None
        with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS, context=trust) as answer:
            return json.load(answer)

    def is_open(self) -> bool:
        """Whether it answers whoever asks, without a login."""
        try:
            PrefectServer(self._url, certificates=self._certificates).find("/flows/filter", {"limit": 1})
        except urllib.error.HTTPError as error:
            error.close()
            return error.code not in (401, 403)
        return True


def configured_server(environment: Mapping[str, str] = os.environ) -> PrefectServer | None:
    """The server that Prefect's own clients would ask: of the environment, else of the active profile; None without."""
    settings = {**_profile(environment), **{name: environment[name] for name in _SETTINGS if environment.get(name)}}
    url, login, certificates = (str(settings.get(name) or "") for name in _SETTINGS)
    return PrefectServer(url, login, certificates) if url.startswith(("http://", "https://")) else None


def prefect_home(environment: Mapping[str, str] = os.environ) -> Path:
    """The folder in which Prefect keeps its settings, its database and results."""
    return Path(environment.get("PREFECT_HOME") or "~/.prefect").expanduser()


def _profile(environment: Mapping[str, str]) -> Mapping[str, Any]:
    path = Path(environment.get("PREFECT_PROFILES_PATH") or prefect_home(environment) / "profiles.toml").expanduser()
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
        profile = document["profiles"][environment.get("PREFECT_PROFILE") or document["active"]]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return profile if isinstance(profile, dict) else {}


def why_not_begun(
    server: PrefectServer,
    deployment: str,
    scenario_file: str,
    between: tuple[datetime, datetime],
    clock: Callable[[datetime], str],
) -> WhyNot:
    """What Prefect's server knows of a night that has left nothing in the store.

    Args:
        server: Whom to ask.
        deployment: Name of the scenario's deployment; empty where unknown, then the scenario's file identifies it.
        scenario_file: Path or name of the file; empty where it is unknown.
        between: When the night should have begun, and until when that counts.
        clock: Writes a time for people.
    """
    try:
        deployed = _deployments(server, deployment, scenario_file)
        found = [one for each in deployed for one in _found(server, each, between, clock)]
    except _AWAY as error:
        reason = str(getattr(error, "reason", "") or error)
        words = f"the Prefect server {server.host} does not answer: {reason}"
        return WhyNot(cause=MissingCause.SERVER_AWAY, words=words)
    if not deployed:
        name = deployment or scenario_file or FLOW
        return WhyNot(cause=MissingCause.NOT_STARTED, words=f"the Prefect server has no deployment for {name}")
    gravest = min((kind for kind, _ in found), key=list(MissingCause).index, default=MissingCause.NOT_STARTED)
    return WhyNot(cause=gravest, words="; ".join(dict.fromkeys(words for _, words in found)))


def _deployments(server: PrefectServer, name: str, scenario_file: str) -> list[dict[str, Any]]:
    wanted: dict[str, object] = {"flows": {"name": {"any_": [FLOW]}}}
    if name:
        wanted["deployments"] = {"name": {"any_": [name]}}
    found = server.find("/deployments/filter", wanted)
    file = PurePath(scenario_file).name
    named = [one for one in found if PurePath(str(one["parameters"].get("scenario", ""))).name == file]
    return found if name else named


def _found(
    server: PrefectServer,
    deployment: Mapping[str, Any],
    between: tuple[datetime, datetime],
    clock: Callable[[datetime], str],
) -> Iterator[tuple[MissingCause, str]]:
    name = deployment["name"]
    if deployment["paused"]:
        yield MissingCause.SCHEDULE_OFF, f"schedule off: the deployment {name} is paused"
    elif not any(schedule["active"] for schedule in deployment["schedules"]):
        yield MissingCause.SCHEDULE_OFF, f"schedule off: the deployment {name} has no active schedule"
    pool, queue = deployment["work_pool_name"], deployment["work_queue_name"]
    if pool:
        yield from _of_pool(server, pool, queue, clock)
    runs = server.find(
        "/flow_runs/filter",
        {
            "deployments": {"id": {"any_": [deployment["id"]]}},
            "flow_runs": {
                "expected_start_time": {
                    "after_": (between[0] - _BEFORE_SLOT).isoformat(),
                    "before_": between[1].isoformat(),
                }
            },
            "sort": "EXPECTED_START_TIME_DESC",
            "limit": 1,
        },
    )
    if runs:
        yield _of_flow_run(runs[0], clock)
    else:
        yield MissingCause.NOT_STARTED, f"no flow run of the deployment {name} was scheduled for it"


def _of_pool(
    server: PrefectServer, pool: str, queue: str | None, clock: Callable[[datetime], str]
) -> Iterator[tuple[MissingCause, str]]:
    if any(one["is_paused"] for one in server.find("/work_pools/filter", {"work_pools": {"name": {"any_": [pool]}}})):
        yield MissingCause.SCHEDULE_OFF, f"the work pool {pool} is paused"
    queues = server.find(f"/work_pools/{quote(pool)}/queues/filter", {})
    if any(one["is_paused"] for one in queues if one["name"] == queue):
        yield MissingCause.SCHEDULE_OFF, f"the work queue {queue} is paused"
    workers = server.find(f"/work_pools/{quote(pool)}/workers/filter", {})
    if not any(worker["status"] == "ONLINE" for worker in workers):
        beats = [datetime.fromisoformat(worker["last_heartbeat_time"]) for worker in workers]
        last = f"the last heartbeat was at {clock(max(beats))}" if beats else "none has ever been"
        yield MissingCause.WORKER_AWAY, f"worker away: no worker of the work pool {pool} is online, {last}"


def _of_flow_run(run: Mapping[str, Any], clock: Callable[[datetime], str]) -> tuple[MissingCause, str]:
    state = run["state"]
    due = clock(datetime.fromisoformat(run["expected_start_time"]))
    reached = clock(datetime.fromisoformat(state["timestamp"]))
    message = f": {' '.join(state['message'].split())}" if state.get("message") else ""
    if state["type"] in ("SCHEDULED", "PENDING"):
        return MissingCause.LATE, f"its flow run {run['name']} is due since {due}, and {state['name']}"
    if state["type"] in ("FAILED", "CRASHED", "CANCELLED", "COMPLETED"):
        return MissingCause.CRASHED, f"its flow run {run['name']} ended {state['name']} at {reached}{message}"
    return MissingCause.NOT_STARTED, f"its flow run {run['name']} is {state['name']} since {reached}"
