"""The server of this process, where none is configured: it ends with the process, however that ends."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from prefect.settings import (
    PREFECT_API_URL,
    PREFECT_HOME,
    PREFECT_SERVER_EPHEMERAL_ENABLED,
    temporary_settings,
)

from nightbridge.errors import InvalidInput, TransientError
from nightbridge.flows.server import reach_server
from nightbridge.locking import lease
from tests.real.prefect_server import make_home
from tests.real.slurm_daemons import free_ports

MOMENT = 10.0
"""Seconds within which nothing is left of a process that was killed."""

STARTS_ONE = """
import json, time
from nightbridge.flows.server import reach_server
from prefect.client.orchestration import get_client
from prefect.server.api.server import SubprocessASGIServer
reach_server()
server = SubprocessASGIServer()
with get_client(sync_client=True) as client:
    asked = str(client.api_url)
told = {"pid": server.server_process.pid, "url": server.api_url, "kind": type(server).__name__, "asked": asked}
print(json.dumps(told), flush=True)
time.sleep(600)
"""


ASKS_AT_ITS_END = """
import atexit
from prefect.client.orchestration import get_client
from nightbridge.flows.server import reach_server

def ask():
    try:
        get_client(sync_client=True)
    except RuntimeError as error:
        print(error, flush=True)

atexit.register(ask)  # comes after what is registered later
reach_server()
"""


@pytest.fixture(autouse=True)
def prefects_own() -> Iterator[type[Any]]:
    """Prefect's class of such servers, and none is left of others; its import takes seconds, which no other file is to pay."""
    from prefect.server.api.server import SubprocessASGIServer

    SubprocessASGIServer().stop()  # there is one for the whole process
    with temporary_settings({PREFECT_API_URL: None}):
        yield SubprocessASGIServer
    SubprocessASGIServer().stop()


@pytest.fixture
def embedded_server() -> type[Any]:
    """Ours, which imports Prefect's."""
    from nightbridge.flows.embedded_server import EmbeddedServer

    return EmbeddedServer


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Settings of a person who has configured nothing, telemetry included, and has run something before."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "DO_NOT_TRACK"))}
    make_home(tmp_path / "prefect")
    return {**kept, "PREFECT_HOME": str(tmp_path / "prefect")}


def start(script: str, environment: dict[str, str]) -> "subprocess.Popen[str]":
    return subprocess.Popen([sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE, text=True)


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(true: Callable[[], object], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


def test_it_is_prefects_and_ends_with_a_process_that_is_killed_and_hears_no_signal_of_its_terminal(
    tmp_path: Path, environment: dict[str, str], embedded_server: type[Any]
) -> None:
    memory = tmp_path / "prefect" / "memo_store.toml"
    believed = memory.read_text()
    process = start(STARTS_ONE, environment)
    assert process.stdout is not None
    own = json.loads(process.stdout.readline())
    server = own["pid"]
    told = dict(entry.split("=", 1) for entry in Path(f"/proc/{server}/environ").read_text().split("\0") if entry)
    group = os.getpgid(server)

    process.kill()
    process.wait()

    wait_until(lambda: not alive(server), MOMENT)
    assert group == server
    assert (told["PREFECT_SERVER_ANALYTICS_ENABLED"], told["DO_NOT_TRACK"]) == ("false", "1")
    assert (own["kind"], own["asked"].rstrip("/")) == (embedded_server.__name__, own["url"].rstrip("/"))
    # It looks for no blocks: what is believed is of another database's types, which are not in this one's.
    assert memory.read_text() == believed


def test_it_ends_with_a_process_that_is_killed_while_it_starts(environment: dict[str, str]) -> None:
    process = start(STARTS_ONE, environment)
    wait_until(lambda: children(process.pid), 120)
    (server,) = children(process.pid)

    process.kill()
    process.wait()

    wait_until(lambda: not alive(server), MOMENT)


def test_a_thread_that_is_left_behind_starts_no_other_one_as_the_process_ends(environment: dict[str, str]) -> None:
    process = start(ASKS_AT_ITS_END, environment)

    said, _ = process.communicate(timeout=300)

    assert said == "the process is ending\n"


def test_one_that_is_already_running_stays(prefects_own: type[Any], embedded_server: type[Any]) -> None:
    running = prefects_own()

    assert embedded_server() is running


def test_threads_that_need_one_at_the_same_moment_start_one(
    monkeypatch: pytest.MonkeyPatch, embedded_server: type[Any]
) -> None:
    started: list[int] = []
    server = object.__new__(embedded_server)
    server.__init__()  # not the one that Prefect keeps
    monkeypatch.setattr(embedded_server, "_run_uvicorn_command", lambda _: started.append(1))
    monkeypatch.setattr(embedded_server, "_wait_until_healthy", lambda *_: time.sleep(0.2))
    monkeypatch.setattr("nightbridge.flows.embedded_server.atexit.register", lambda _: None)

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(lambda _: server.start(), range(3)))

    assert (len(started), server.running) == (1, True)


def test_processes_start_theirs_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, embedded_server: type[Any]
) -> None:
    server = object.__new__(embedded_server)
    server.__init__()  # not the one that Prefect keeps
    monkeypatch.setattr("nightbridge.flows.embedded_server.atexit.register", lambda _: None)

    with (
        temporary_settings({PREFECT_HOME: tmp_path}),
        lease(tmp_path / "nightbridge-server.lease"),
        pytest.raises(TransientError, match="nightbridge-server"),
    ):
        server.start(timeout=1)


def test_one_that_cannot_start_is_said_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prefects_own: type[Any]
) -> None:
    (tmp_path / "prefect.db").write_bytes(b"no database" * 1000)
    database = f"sqlite+aiosqlite:///{tmp_path}/prefect.db"
    monkeypatch.setenv("PREFECT_SERVER_DATABASE_CONNECTION_URL", database)
    begun = time.monotonic()

    with pytest.raises(TransientError, match="own server ended with code 3 while it was starting"):
        reach_server()

    assert time.monotonic() - begun < 120
    assert not prefects_own().running


def test_a_home_that_cannot_be_written_is_told_in_seconds_with_the_way_out(environment: dict[str, str]) -> None:
    del environment["PREFECT_HOME"]
    script = "from nightbridge.cli.main import run; import sys; sys.exit(run(sys.argv[1:]))"
    command = ["run", "conf/examples/llama3_8b.toml"]
    begun = time.monotonic()

    ended = subprocess.run(
        [sys.executable, "-c", script, *command],
        env={**environment, "HOME": "/proc/nowhere"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )

    last = ended.stderr.splitlines()[-1]
    assert (ended.returncode, "Traceback" in ended.stderr) == (4, False)
    assert last.startswith("nightbridge: /proc/nowhere/.prefect: Prefect's folder cannot be written: ")
    assert last.endswith("Set PREFECT_HOME, or HOME, to a folder that can be written")
    assert time.monotonic() - begun < 120


def test_where_none_is_configured_and_none_is_allowed_the_person_is_told() -> None:
    with (
        temporary_settings({PREFECT_SERVER_EPHEMERAL_ENABLED: False}),
        pytest.raises(InvalidInput, match=r"PREFECT_SERVER_EPHEMERAL_ENABLED forbids one.*Set PREFECT_API_URL"),
    ):
        reach_server()


def test_who_has_a_server_elsewhere_needs_not_wait_for_the_imports_of_one_and_tells_prefect_nothing(
    environment: dict[str, str],
) -> None:
    script = """
import sys
from nightbridge.flows.server import reach_server
from nightbridge.errors import TransientError
from prefect._internal.analytics.enabled import is_telemetry_enabled
from prefect.settings import get_current_settings
try:
    reach_server()
except TransientError as error:
    print(error)
print("prefect.server.api.server" in sys.modules)
print(is_telemetry_enabled(), get_current_settings().server.analytics_enabled)
"""
    elsewhere = {"PREFECT_API_URL": f"http://127.0.0.1:{free_ports(1)[0]}/api"}
    process = start(script, {**environment, **elsewhere, "PREFECT_SERVER_ANALYTICS_ENABLED": "true", "CI": ""})

    told, imported, telemetry = process.communicate(timeout=120)[0].splitlines()

    assert "the Prefect server does not answer" in told
    assert imported == "False"
    assert telemetry == "False False"
