"""A real Prefect server on loopback, in a folder of its own."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path


def free_port() -> int:
    """A TCP port on loopback that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class PrefectServer:
    """A running server; `environment` is what a client process needs to reach it."""

    process: subprocess.Popen[bytes]
    api_url: str
    home: Path
    log: Path

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "PREFECT_HOME": str(self.home), "PREFECT_API_URL": self.api_url}

    def prefect(self, *arguments: str, cwd: Path | None = None, timeout: float = 900) -> str:
        """Run the `prefect` command against this server and return what it printed."""
        done = subprocess.run(
            [Path(sys.executable).with_name("prefect"), *arguments],
            env=self.environment,
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        assert done.returncode == 0, f"prefect {' '.join(arguments)}: {done.stdout}\n{done.stderr}"
        return done.stdout

    def stop(self) -> None:
        os.killpg(self.process.pid, signal.SIGTERM)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def start_prefect(folder: Path) -> PrefectServer:
    """Start a server with a fresh database and wait until it answers."""
    home, log, port = folder / "home", folder / "server.log", free_port()
    home.mkdir(parents=True)
    environment = {**os.environ, "PREFECT_HOME": str(home), "PREFECT_SERVER_DATABASE_TIMEOUT": "60"}
    with log.open("wb") as output:
        process = subprocess.Popen(
            [Path(sys.executable).with_name("prefect"), "server", "start", "--port", str(port)],
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    server = PrefectServer(process, f"http://127.0.0.1:{port}/api", home, log)
    deadline = time.monotonic() + 900
    while time.monotonic() < deadline and process.poll() is None:
        try:
            urllib.request.urlopen(f"{server.api_url}/health", timeout=2).close()
        except OSError:
            time.sleep(0.3)
        else:
            return server
    server.stop()
    raise RuntimeError(f"Prefect's server did not start: {log.read_text()[-2000:]}")
