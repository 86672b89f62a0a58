"""A real Prefect server on loopback, in a folder of its own: on SQLite, or on the PostgreSQL whose URL it is given."""

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.real.postgres import Postgres
from tests.real.slurm_daemons import free_ports

PREFECT = (sys.executable, "-c", "import gc; gc.set_threshold(50_000); from prefect.cli import app; app()")
"""The command `prefect`, which walks through what it imports less often: a fifth of the time that a server's start takes."""

BUSY_MACHINE = {
    "PREFECT_SERVER_DATABASE_TIMEOUT": "60",
    "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
    "PREFECT_SERVER_SERVICES_SCHEDULER_MAX_RUNS": "10",
}
"""What a server needs beside tests that take both cores; the default of 10 s is for an idle one.

For each schedule that is deployed it writes so many flow runs and meanwhile refuses the next deployment, whose client waits
for two seconds; a hundred by default.
"""

BLOCKS_ARE_THERE = {"PREFECT_API_BLOCKS_REGISTER_ON_START": "false", "PREFECT_MEMOIZE_BLOCK_AUTO_REGISTRATION": "false"}
"""For a database that has the types of Prefect's blocks: to look for new ones is a quarter of a server's start."""


@dataclass
class PrefectServer:
    """A server that can be stopped, killed, and started again on the same port and database.

    Attributes:
        folder: Holds its `home`, with the SQLite database where there is no other one, and `server.log`.
        settings: Environment variables of the server alone.
        database_url: Another database than SQLite in `home`.
        options: Further options of `prefect server start`.
    """

    folder: Path
    settings: Mapping[str, str] = field(default_factory=dict)
    database_url: str | None = None
    options: tuple[str, ...] = ()
    port: int = field(default_factory=lambda: free_ports(1)[0])
    process: subprocess.Popen[bytes] | None = None

    @property
    def api_url(self) -> str:
        return f"http://127.0.0.1:{self.port}/api"

    @property
    def home(self) -> Path:
        return self.folder / "home"

    @property
    def log(self) -> Path:
        return self.folder / "server.log"

    @property
    def environment(self) -> dict[str, str]:
        """What a client process needs to reach it."""
        return {**os.environ, "PREFECT_HOME": str(self.home), "PREFECT_API_URL": self.api_url}

    def start(self, *, patience: float = 900) -> None:
        """Start it, and wait until it answers; the first time with an empty database."""
        if not self.database_url and not self.home.exists():
            make_home(self.home)
        self._serve(BLOCKS_ARE_THERE, patience)

    def _serve(self, settings: Mapping[str, str], patience: float) -> None:
        self.home.mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, "PREFECT_HOME": str(self.home), **BUSY_MACHINE, **settings, **self.settings}
        if self.database_url:
            environment["PREFECT_API_DATABASE_CONNECTION_URL"] = self.database_url
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                [*PREFECT, "server", "start", "--port", str(self.port), *self.options],
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline and self.process.poll() is None:
            if self.answers():
                return
            time.sleep(0.3)
        self.stop()
        raise RuntimeError(f"Prefect's server did not start: {self.log.read_text()[-2000:]}")

    def answers(self) -> bool:
        """Whether it takes requests."""
        try:
            urllib.request.urlopen(f"{self.api_url}/health", timeout=2).close()
        except OSError:
            return False
        return True

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        """End it by a signal, and wait until it is gone; one that does not end within 20 s is killed."""
        if self.process is None:
            return
        for sent in (number, signal.SIGKILL):
            if self.process.poll() is None:
                os.killpg(self.process.pid, sent)
                self.wake()  # a process that rests would not hear it
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                continue
            break
        self.process = None

    def rest(self) -> None:
        """Let it stand still; what is asked of it waits."""
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGSTOP)

    def wake(self) -> None:
        """Let it go on."""
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGCONT)

    def kill(self) -> None:
        """End it without a word."""
        self.stop(signal.SIGKILL)

    def prefect(self, *arguments: str, cwd: Path | None = None, timeout: float = 900) -> str:
        """Run the `prefect` command against this server and return what it printed."""
        done = subprocess.run(
            [*PREFECT, *arguments],
            env=self.environment,
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        assert done.returncode == 0, f"prefect {' '.join(arguments)}: {done.stdout}\n{done.stderr}"
        return done.stdout

    def make_pool(self, name: str) -> None:
        """Make a work pool of processes as the command does, which takes seconds to start; one that is there stays."""
        from prefect.workers.process import ProcessWorker

        template = ProcessWorker.get_default_base_job_template()
        try:
            self.ask("POST", "work_pools/", {"name": name, "type": "process", "base_job_template": template})
        except urllib.error.HTTPError as error:
            if error.code != HTTPStatus.CONFLICT:
                raise

    def log_of(self, flow_run: str) -> str:
        """What a flow run has logged, as the UI shows it."""
        wanted = {"logs": {"flow_run_id": {"any_": [flow_run]}}, "sort": "TIMESTAMP_ASC"}
        return "\n".join(line["message"] for line in self.ask("POST", "logs/filter", wanted))

    def ask(self, method: str, path: str, body: Mapping[str, Any] | None = None, *, patience: float = 120) -> Any:
        """Send one request to the API, as the UI does, again while the server is away or busy; return the answer."""
        request = urllib.request.Request(
            f"{self.api_url}/{path}",
            method=method,
            data=None if body is None else json.dumps(body, default=str).encode(),
            headers={"Content-Type": "application/json"},
        )
        deadline = time.monotonic() + patience
        while True:
            try:
                with urllib.request.urlopen(request, timeout=120) as answer:
                    text = answer.read()
                return json.loads(text) if text else None
            except OSError as error:  # HTTP errors are among them
                if getattr(error, "code", 503) < 500 or time.monotonic() > deadline:
                    raise
            time.sleep(0.5)


def make_home(folder: Path) -> None:
    """Make a home of Prefect as a server leaves it that nobody has used: what is started in it has a database at once."""
    shutil.copytree(_empty_home(), folder)


def make_database(postgres: Postgres) -> str:
    """Make the same on PostgreSQL, and return its URL."""
    url = postgres.make_database("prefect")
    postgres.restore("prefect", _empty_database(postgres))
    return url


def _empty_home() -> Path:
    """A home whose SQLite database a server of this release has made, and nobody has used.

    Prefect makes a database by more than a hundred migrations, which take more processor time than the rest of a server's
    start. It is kept beside the Prefect that made it.
    """
    with _kept_empty() as made:
        if not (made / "home").exists():
            with tempfile.TemporaryDirectory(dir=made) as folder:
                server = PrefectServer(Path(folder))
                server._serve({}, patience=900)
                server.stop()
                server.home.rename(made / "home")
    return made / "home"


def _empty_database(postgres: Postgres) -> str:
    """The same on PostgreSQL, as SQL."""
    with _kept_empty() as made:
        kept = made / "postgresql.sql"
        if not kept.exists():
            with tempfile.TemporaryDirectory(dir=made) as folder:
                server = PrefectServer(Path(folder), database_url=postgres.make_database("unused"))
                server._serve({}, patience=900)
                server.stop()
                dump = Path(folder) / kept.name
                dump.write_text(postgres.dump("unused"), encoding="utf-8")
                dump.rename(kept)
    return kept.read_text(encoding="utf-8")


@contextmanager
def _kept_empty() -> Iterator[Path]:
    """The folder of what is kept of databases that nobody has used, for one process at a time."""
    made = Path(sys.prefix) / f"empty-prefect-{version('prefect')}"
    made.mkdir(exist_ok=True)
    with (made / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield made


def start_prefect(folder: Path) -> PrefectServer:
    """Start a server with a fresh SQLite database and wait until it answers."""
    server = PrefectServer(folder)
    server.start()
    return server
