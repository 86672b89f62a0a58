"""A real PostgreSQL on loopback, in a folder of its own, from Debian's package; no system service is used."""

import os
import shutil
import signal
import subprocess
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from tests.real.slurm_daemons import free_ports

USER = "postgres"
"""Who it runs as where the tests are root, which PostgreSQL refuses; a role of this name owns the databases."""

FAST = {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off"}
"""Settings of a database that need not outlive the machine. Killed processes lose nothing by them."""


def _programs() -> Path | None:
    """The folder of the newest PostgreSQL's programs; Debian has them on nobody's PATH."""
    versions = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: float(path.parts[-3]))
    found = versions[-1] if versions else shutil.which("initdb")
    return Path(found).parent if found else None


def postgres_missing_reason() -> str | None:
    """Say why PostgreSQL cannot run here; None when it can."""
    return None if _programs() else "not installed: postgresql"


@dataclass
class Postgres:
    """A server that can be stopped, killed, and started again on the same port and data."""

    folder: Path
    port: int = field(default_factory=lambda: free_ports(1)[0])
    process: "subprocess.Popen[bytes] | None" = None

    def start(self) -> None:
        """Start it, and wait until it takes connections."""
        settings = FAST | {"port": str(self.port), "listen_addresses": "127.0.0.1", "unix_socket_directories": ""}
        with (self.folder / "postgres.log").open("ab") as output:
            self.process = subprocess.Popen(
                [
                    _program("postgres"),
                    "-D",
                    self._data,
                    *(word for name, value in settings.items() for word in ("-c", f"{name}={value}")),
                ],
                cwd=self.folder,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                user=_user(),
                group=_user(),
            )
        deadline = time.monotonic() + 120
        while self.process.poll() is None and time.monotonic() < deadline:
            if self._sql("SELECT 1").returncode == 0:
                return
            time.sleep(0.1)
        raise RuntimeError(f"PostgreSQL did not start: {(self.folder / 'postgres.log').read_text()[-2000:]}")

    def stop(self, number: signal.Signals = signal.SIGINT) -> None:
        """End it by a signal: SIGINT, PostgreSQL's fast shutdown, ends every connection."""
        if self.process is None:
            return
        self.process.send_signal(number)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self.process = None

    def make_database(self, name: str) -> str:
        """Make an empty database, and return its URL for Prefect."""
        made = self._sql(f'CREATE DATABASE "{name}"')
        assert made.returncode == 0, made.stderr
        return f"postgresql+asyncpg://{USER}@127.0.0.1:{self.port}/{name}"

    def dump(self, name: str) -> str:
        """What makes a database's contents again, as SQL."""
        return subprocess.run(
            [_program("pg_dump"), *self._where(name)], capture_output=True, text=True, check=True
        ).stdout

    def restore(self, name: str, dump: str) -> None:
        """Fill an empty database with what `dump` has returned."""
        options = ["--no-psqlrc", "--quiet", "--single-transaction", "--set", "ON_ERROR_STOP=1"]
        done = subprocess.run(
            [_program("psql"), *options, *self._where(name)], input=dump, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr

    def size(self, name: str) -> int:
        """How many bytes a database has on disk."""
        return int(self._sql(f"SELECT pg_database_size('{name}')").stdout)

    def remove(self) -> None:
        """Stop it, and remove its folder."""
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def _data(self) -> Path:
        return self.folder / "data"

    def _sql(self, statement: str) -> "subprocess.CompletedProcess[str]":
        options = ["--no-psqlrc", "--tuples-only", "--no-align", *self._where("postgres")]
        return subprocess.run(
            [_program("psql"), *options, "--command", statement], capture_output=True, text=True, check=False
        )

    def _where(self, name: str) -> list[str]:
        return ["--host", "127.0.0.1", "--port", str(self.port), "--username", USER, "--dbname", name]


def start_postgres() -> Postgres:
    """Make a PostgreSQL with no database of ours yet, and start it."""
    # Below pytest's own folders only root could read it.
    folder = Path(tempfile.mkdtemp(prefix="nightbridge-postgres-"))
    if user := _user():
        shutil.chown(folder, user, user)
    server = Postgres(folder)
    subprocess.run(
        [_program("initdb"), "--auth", "trust", "--username", USER, "--encoding", "UTF8", "--no-sync", "-D", "data"],
        cwd=folder,
        stdout=subprocess.DEVNULL,
        user=_user(),
        group=_user(),
        check=True,
    )
    server.start()
    return server


def _program(name: str) -> Path:
    folder = _programs()
    assert folder is not None, "PostgreSQL is not installed"
    return folder / name


def _user() -> str | None:
    return USER if os.geteuid() == 0 else None
