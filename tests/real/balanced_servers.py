"""Two Prefect API servers behind nginx, and one process of background services, on one PostgreSQL and one Redis.

nginx and Redis are Debian's, as docs/how-to/operations.md names them; no system service is used.
"""

import getpass
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path

from tests.real.prefect_server import BUSY_MACHINE, PREFECT, PrefectServer
from tests.real.slurm_daemons import free_ports
from tests.waiting import wait_until

PROGRAMS = ("nginx", "redis-server")

NGINX = """
daemon off;
user {user};
pid {folder}/nginx.pid;
error_log {folder}/nginx.log;
events {{}}
http {{
  access_log off;
  client_body_temp_path {folder}/body;
  proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi;
  scgi_temp_path {folder}/scgi;
  {documented}
}}
"""

OPERATIONS = Path(__file__).parents[2] / "docs" / "how-to" / "operations.md"


def nginx_as_documented(folder: Path, port: int, upstreams: Sequence[int]) -> list[str]:
    """A command that serves what the documentation has for nginx, on loopback and without TLS.

    Args:
        folder: Where its files go.
        port: Where it listens.
        upstreams: Ports of the servers that it passes requests on to.
    """
    server, upstream = re.findall(r"^```nginx\n(.*?)^```$", OPERATIONS.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    server = re.sub(r"^ *ssl_certificate.*\n", "", server, flags=re.MULTILINE)
    server = server.replace("443 ssl", f"127.0.0.1:{port}").replace("http://127.0.0.1:4200", "http://prefect")
    for line, member in zip_longest(re.findall(r"^ *server .*\n", upstream, re.MULTILINE), upstreams):
        upstream = upstream.replace(line, re.sub(r"\S+:4200", f"127.0.0.1:{member}", line) if member else "")
    configuration = folder / "nginx.conf"
    configuration.write_text(NGINX.format(user=getpass.getuser(), folder=folder, documented=upstream + server))
    return ["/usr/sbin/nginx", "-p", str(folder), "-c", str(configuration)]


def balanced_missing_reason() -> str | None:
    """Say what is missing; None when nothing is."""
    missing = [name for name in PROGRAMS if shutil.which(name, path="/usr/sbin:/usr/bin") is None]
    return f"not installed: {', '.join(missing)}" if missing else None


@dataclass
class BalancedServers(PrefectServer):
    """Two API servers under one address, which is nginx's.

    Attributes:
        members: The API servers.
    """

    members: tuple[PrefectServer, ...] = ()
    redis_port: int = field(default_factory=lambda: free_ports(1)[0])
    others: list["subprocess.Popen[bytes]"] = field(default_factory=list)

    @property
    def shared(self) -> Mapping[str, str]:
        """What the API servers and the services have to have in common, besides the database."""
        redis = f"redis://127.0.0.1:{self.redis_port}"
        return {
            **self.settings,
            "PREFECT_MESSAGING_BROKER": "prefect_redis.messaging",
            "PREFECT_MESSAGING_CACHE": "prefect_redis.messaging",
            "PREFECT_SERVER_EVENTS_CAUSAL_ORDERING": "prefect_redis.ordering",
            "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect_redis.lease_storage",
            "PREFECT_REDIS_MESSAGING_URL": f"{redis}/0",
            "PREFECT_SERVER_DOCKET_URL": f"{redis}/1",
        }

    def start(self, *, patience: float = 900) -> None:
        """Start Redis, the servers, the services and nginx, and wait until nginx passes requests on."""
        self.home.mkdir(parents=True, exist_ok=True)
        redis = ["redis-server", "--port", str(self.redis_port), "--bind", "127.0.0.1", "--save", ""]
        self._start([*redis, "--dir", str(self.folder)], {})
        self.members = tuple(
            PrefectServer(self.folder / name, self.shared, self.database_url, ("--no-services",))
            for name in ("first", "second")
        )
        # One after the other: the first migrates the database.
        for member in self.members:
            member.start(patience=patience)
        assert self.database_url is not None
        database = {"PREFECT_API_DATABASE_CONNECTION_URL": self.database_url, "PREFECT_HOME": str(self.home)}
        self._start([*PREFECT, "server", "services", "start"], {**BUSY_MACHINE, **self.shared, **database})
        self._start(nginx_as_documented(self.folder, self.port, [member.port for member in self.members]), {})
        wait_until(self.answers)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        """End all of them."""
        for member in self.members:
            member.stop(number)
        while self.others:
            process = self.others.pop()
            process.send_signal(number)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _start(self, command: list[str], settings: Mapping[str, str]) -> None:
        programs = f"{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/bin"
        with self.log.open("ab") as output:
            self.others.append(
                subprocess.Popen(
                    command,
                    env={"PATH": programs, "HOME": str(self.home), **settings},
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )
