"""Two Prefect API servers behind one address: one of them may die, and the night does not notice."""

import subprocess
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from prefect.settings import PREFECT_LOGGING_TO_API_BATCH_SIZE

from tests.conftest import need
from tests.nights.conftest import EVERY_STAGE, PLAIN, Rig, in_any_stage, make_rig
from tests.nights.night import Night
from tests.real.balanced_servers import BalancedServers, balanced_missing_reason, nginx_as_documented
from tests.real.postgres import postgres_missing_reason, start_postgres
from tests.real.prefect_harness import STRAIGHT
from tests.real.prefect_proxy import proxy_to
from tests.real.prefect_server import make_database
from tests.real.slurm_daemons import free_ports
from tests.waiting import wait_until

pytestmark = pytest.mark.launcher


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BalancedServers]:
    need(balanced_missing_reason())
    need(postgres_missing_reason())
    with ExitStack() as stack:
        postgres = start_postgres()
        stack.callback(postgres.remove)
        pair = BalancedServers(tmp_path_factory.mktemp("servers"), database_url=make_database(postgres))
        stack.callback(pair.stop)
        pair.start()
        yield pair


@pytest.fixture(scope="module")
def whole_rig(
    servers: BalancedServers, tmp_path_factory: pytest.TempPathFactory, environments_dir: Path, launcher_python: Path
) -> Iterator[Rig]:
    with proxy_to(servers.api_url) as proxy:
        rig = make_rig(tmp_path_factory.mktemp("rig"), servers, proxy, environments_dir, launcher_python, {})
        rig.pause_schedules("nightly", "reaper", "watchdog")
        yield rig
        rig.stop()


@in_any_stage()
def test_one_of_them_is_killed_and_the_night_passes_and_so_does_what_is_started_after_it(
    servers: BalancedServers, rig: Rig, begin: Callable[..., Night], stage: str
) -> None:
    for member in servers.members:
        if not member.answers():
            member.start()
    night = begin(entries=PLAIN, job_variables=STRAIGHT)
    night.wait_until(stage)

    servers.members[0].kill()

    night.passes()
    assert "Crashed" not in night.state_history
    if EVERY_STAGE:
        begin(entries=PLAIN, job_variables=STRAIGHT).passes()
    earlier = {run["id"] for run in rig.reapers()}
    rig.reap()
    rig.wait_for_reapers()
    assert {run["state_type"] for run in rig.reapers() if run["id"] not in earlier} == {"COMPLETED"}


class _Counting(BaseHTTPRequestHandler):
    """Answers with how long the body was."""

    def do_POST(self) -> None:
        length = str(len(self.rfile.read(int(self.headers["Content-Length"])))).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(length)))
        self.end_headers()
        self.wfile.write(length)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Nothing on stderr."""


def test_nginx_as_it_is_documented_passes_on_as_much_as_prefect_sends_at_once(tmp_path: Path) -> None:
    need(balanced_missing_reason())
    (port,) = free_ports(1)
    with ThreadingHTTPServer(("127.0.0.1", 0), _Counting) as upstream:
        threading.Thread(target=upstream.serve_forever, args=(0.05,), daemon=True).start()
        nginx = subprocess.Popen(nginx_as_documented(tmp_path, port, [upstream.server_port]))
        try:
            wait_until(lambda: (tmp_path / "nginx.pid").exists())
            size = PREFECT_LOGGING_TO_API_BATCH_SIZE.value()
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/logs/", data=b"x" * size, timeout=60) as answer:
                assert answer.read() == str(size).encode()
        finally:
            nginx.terminate()
            nginx.wait(20)
            upstream.shutdown()
