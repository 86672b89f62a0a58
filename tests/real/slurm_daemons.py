"""A real two-node Slurm on loopback, in a folder of its own: munge, MariaDB, slurmdbd, slurmctld and two slurmds.

Everything is private: the munge key and socket, the database, the slurm.conf (reached through `SLURM_CONF`), and every
port is one that was free. Started in about ten seconds from Debian's packages, as root. No system service is used.
"""

import contextlib
import ctypes
import fcntl
import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

NODES = ("node1", "node2")
PROGRAMS = (
    "munged",
    "mariadbd",
    "mariadb-install-db",
    "slurmdbd",
    "slurmctld",
    "slurmd",
    "sbatch",
    "sacct",
    "sacctmgr",
)
_PR_SET_PDEATHSIG = 1
_PORTS = range(20_000, 32_000)
"""Below those of outgoing connections (/proc/sys/net/ipv4/ip_local_port_range begins at 32768)."""
_DAEMON_VARIABLE = "NIGHTBRIDGE_TEST_DAEMON"
"""Names the daemon in its environment, which slurmstepd inherits from slurmd."""
_SEARCH_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin:/sbin"
COMMANDS = Path(shutil.which("sbatch", path=_SEARCH_PATH) or "/usr/bin/sbatch").parent
"""The folder of Slurm's commands: another Slurm that stands first on PATH is tested instead of the system's."""


def missing_reason() -> str | None:
    """Say why these daemons cannot run here; None when they can."""
    if os.geteuid() != 0:
        return "the Slurm daemons need root"
    missing = [program for program in PROGRAMS if shutil.which(program, path=_SEARCH_PATH) is None]
    return f"not installed: {', '.join(missing)}" if missing else None


def free_ports(count: int) -> list[int]:
    """Return ports of 127.0.0.1 that are free and stay so for this process, all different.

    They are none that the kernel gives to whoever connects somewhere, and another test run that takes ports the same
    way finds them locked: a daemon may bind its port long after it was chosen, and again after it was killed.
    """
    # Another user's files cannot be opened.
    folder = Path(tempfile.gettempdir()) / f"nightbridge-test-ports-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    ports: list[int] = []
    for port in random.sample(_PORTS, len(_PORTS)):
        if len(ports) == count:
            break
        if _lock_for_good(folder / str(port)) and not _is_bound(port):
            ports.append(port)
    assert len(ports) == count, f"no {count} free ports in {_PORTS}"
    return ports


def _lock_for_good(path: Path) -> bool:
    """Lock a file for the life of this process; whether nobody else has."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return False
    return True


def _is_bound(port: int) -> bool:
    with socket.socket() as probe:
        # What a daemon left in TIME_WAIT does not stop the next one either.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return True
    return False


class SlurmDaemons:
    """The running daemons. Each can be killed and started again by its name: `munged`, `mariadbd`, `slurmdbd`,
    `slurmctld`, `node1`, `node2`.

    Args:
        folder: Where everything lives. It must be short: a Unix socket's path has at most 107 characters.
        min_job_age: Seconds after which slurmctld forgets an ended job.
        extra_conf: Further lines of slurm.conf.

    """

    def __init__(self, folder: Path, *, min_job_age: int = 300, extra_conf: Sequence[str] = ()) -> None:
        self.folder = folder
        self.slurm_conf = folder / "slurm.conf"
        self.munge_socket = folder / "munge.socket"
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._prepare(min_job_age, extra_conf)

    def start(self) -> None:
        """Start every daemon and wait until both nodes are idle and accounting answers."""
        self.start_daemon("munged")
        self.start_daemon("mariadbd")
        _wait_for("munge's socket", self.munge_socket.exists)
        _wait_for("the database", lambda: _listens(self._port_of["mariadbd"]))
        self.start_daemon("slurmdbd")
        _wait_for("slurmdbd", lambda: _listens(self._port_of["slurmdbd"]))
        # A cluster that accounting does not know yet loses its first jobs.
        _wait_for("sacctmgr", lambda: self.command("sacctmgr", "-i", "add", "cluster", "nightbridge").returncode == 0)
        for name in ("slurmctld", *NODES):
            self.start_daemon(name)
        _wait_for("the nodes", lambda: "idle 2" in self.command("sinfo", "-h", "-o", "%T %D").stdout.splitlines())

    def start_daemon(self, name: str, *, programs: Path | None = None) -> None:
        """Start one daemon (again), with a folder first on its PATH; it may need a moment to answer."""
        argv = self._argv[name]
        path = shutil.which(argv[0], path=_SEARCH_PATH)
        assert path is not None, f"{argv[0]} is not installed"
        with (self.folder / f"{name}.out").open("ab") as output:
            self._processes[name] = subprocess.Popen(
                [path, *argv[1:]],
                env=self.environment()
                | {_DAEMON_VARIABLE: name, "PATH": f"{programs}:{_SEARCH_PATH}" if programs else _SEARCH_PATH},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                cwd=self._working_directory(name),
                preexec_fn=_die_with_parent,
            )

    def kill_daemon(self, name: str, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to one daemon and wait until it is gone."""
        process = self._processes.pop(name)
        process.send_signal(number)
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(timeout=10)

    def lose_node(self, name: str) -> None:
        """What a node's power failure does: its slurmd, slurmstepds and jobs are gone in the same moment."""
        marks = {f"{_DAEMON_VARIABLE}={name}".encode(), f"SLURMD_NODENAME={name}".encode()}
        self._kill_processes(lambda environment, folder: marks & environment or folder == self._working_directory(name))
        self.kill_daemon(name)

    def lose_state(self) -> None:
        """End slurmctld and throw away what it knows of jobs; the next one begins to count job ids anew."""
        self.kill_daemon("slurmctld")
        for entry in (self.folder / "state").iterdir():
            if entry.name.startswith(("job_state", "last_", "hash.")):
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        # That of 25.11 starts with a part of its state missing only when it is told to.
        self._argv["slurmctld"] = (*self._argv["slurmctld"], "-i")

    def command(self, *argv: str) -> subprocess.CompletedProcess[str]:
        """Run one of Slurm's commands on this cluster."""
        return subprocess.run(argv, env=self.environment(), capture_output=True, text=True, timeout=300, check=False)

    def environment(self) -> dict[str, str]:
        """This process's environment with this cluster's SLURM_CONF and nothing else of Slurm's."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SBATCH_"))}
        return kept | {"SLURM_CONF": str(self.slurm_conf), "PATH": _SEARCH_PATH}

    def stop(self) -> None:
        """Cancel the jobs, end every daemon and remove the folder."""
        if "slurmctld" in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.command("scancel", "--user=root")
        # slurmd first: a controller that goes away first makes it wait for a last message to get through.
        for name in (*NODES, "slurmctld", "slurmdbd", "mariadbd", "munged"):
            if name in self._processes:
                self.kill_daemon(name, signal.SIGKILL if name == "mariadbd" else signal.SIGTERM)
        self._kill_leftovers()
        shutil.rmtree(self.folder, ignore_errors=True)

    def log(self, name: str) -> str:
        """What a daemon wrote, for messages of failing tests."""
        return (self.folder / f"{name}.out").read_text(errors="replace")

    def _kill_leftovers(self) -> None:
        """End slurmstepds and job processes that outlived their slurmd."""
        self._kill_processes(lambda environment, folder: True)

    def _working_directory(self, name: str) -> Path:
        """A node's own: a slurmstepd of 25.11 has it from its slurmd, and does not show its environment."""
        return self.folder / f"spool-{name}" if name in NODES else self.folder

    def _kill_processes(self, which: Callable[[set[bytes], Path], object]) -> None:
        """Kill processes of this cluster, known by our slurm.conf in their environment or by where they work."""
        needle = f"SLURM_CONF={self.slurm_conf}".encode()
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == os.getpid():
                continue
            with contextlib.suppress(OSError):
                environment = set((entry / "environ").read_bytes().split(b"\0"))
                folder = (entry / "cwd").readlink()
                if (needle in environment or folder.is_relative_to(self.folder)) and which(environment, folder):
                    os.kill(int(entry.name), signal.SIGKILL)

    def _prepare(self, min_job_age: int, extra_conf: Sequence[str]) -> None:
        folder = self.folder
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o755)
        for name in ("state", "spool-node1", "spool-node2", "db"):
            (folder / name).mkdir()
        key = folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        password = secrets.token_hex(8)
        database, dbd, controller, *node_ports = free_ports(3 + len(NODES))
        self._port_of = {"mariadbd": database, "slurmdbd": dbd, "slurmctld": controller}
        (folder / "init.sql").write_text(
            "CREATE DATABASE IF NOT EXISTS slurm_acct_db;\n"
            f"CREATE USER IF NOT EXISTS 'slurm'@'%' IDENTIFIED BY '{password}';\n"
            "GRANT ALL ON slurm_acct_db.* TO 'slurm'@'%';\n"
        )
        (folder / "slurmdbd.conf").write_text(
            f"AuthType=auth/munge\nAuthInfo=socket={self.munge_socket}\nDbdHost=localhost\nDbdPort={dbd}\n"
            f"SlurmUser=root\nPidFile={folder}/slurmdbd.pid\nStorageType=accounting_storage/mysql\n"
            f"StorageHost=127.0.0.1\nStoragePort={database}\nStorageUser=slurm\nStoragePass={password}\n"
            "StorageLoc=slurm_acct_db\nCommitDelay=1\n"
        )
        (folder / "slurmdbd.conf").chmod(0o600)
        host = socket.gethostname().split(".")[0]
        self.slurm_conf.write_text(
            "\n".join(
                (
                    "ClusterName=nightbridge",
                    f"SlurmctldHost={host}(127.0.0.1)",
                    f"SlurmctldPort={controller}",
                    "SlurmUser=root",
                    "SlurmdUser=root",
                    "AuthType=auth/munge",
                    f"AuthInfo=socket={self.munge_socket}",
                    "CredType=cred/munge",
                    f"StateSaveLocation={folder}/state",
                    f"SlurmdSpoolDir={folder}/spool-%n",
                    f"SlurmctldPidFile={folder}/slurmctld.pid",
                    f"SlurmdPidFile={folder}/slurmd-%n.pid",
                    f"PlugStackConfig={folder}/plugstack.conf",
                    "ProctrackType=proctrack/linuxproc",
                    "TaskPlugin=task/none",
                    "JobAcctGatherType=jobacct_gather/none",
                    "MpiDefault=none",
                    "SelectType=select/cons_tres",
                    "SelectTypeParameters=CR_Core_Memory",
                    "SlurmdParameters=config_overrides",
                    "SchedulerParameters=bf_interval=2,sched_interval=5",
                    "ReturnToService=2",
                    "KillWait=2",
                    "MessageTimeout=10",
                    "SlurmdTimeout=20",
                    f"MinJobAge={min_job_age}",
                    "AccountingStorageType=accounting_storage/slurmdbd",
                    "AccountingStorageHost=127.0.0.1",
                    f"AccountingStoragePort={dbd}",
                    f"AccountingStoragePass={self.munge_socket}",
                    f"NodeName=node[1-2] NodeHostname={host} NodeAddr=127.0.0.1 "
                    f"Port=[{','.join(map(str, node_ports))}] CPUs=4 RealMemory=2000 State=UNKNOWN",
                    "PartitionName=debug Nodes=ALL Default=YES MaxTime=08:00:00 DefaultTime=00:10:00 State=UP",
                    *extra_conf,
                    "",
                )
            )
        )
        (folder / "plugstack.conf").touch()
        self._argv: dict[str, tuple[str, ...]] = {
            "munged": (
                "munged", "--foreground", "--force", f"--socket={self.munge_socket}", f"--key-file={key}",
                f"--pid-file={folder}/munged.pid", f"--log-file={folder}/munged.log", f"--seed-file={folder}/munge.seed",
                "--num-threads=2",
            ),
            "mariadbd": (
                "mariadbd", "--no-defaults", "--user=root", f"--datadir={folder}/db", f"--port={database}",
                "--bind-address=127.0.0.1", f"--socket={folder}/db.sock", f"--pid-file={folder}/db.pid",
                f"--init-file={folder}/init.sql", "--innodb-buffer-pool-size=64M", "--innodb-log-file-size=16M",
                "--innodb-lock-wait-timeout=900", "--innodb-flush-log-at-trx-commit=0", "--skip-name-resolve",
                f"--tmpdir={folder}",
            ),
            "slurmdbd": ("slurmdbd", "-D"),
            "slurmctld": ("slurmctld", "-D", "-f", str(self.slurm_conf)),
            **{node: ("slurmd", "-D", "-N", node, "-f", str(self.slurm_conf)) for node in NODES},
        }  # fmt: skip
        installer = shutil.which("mariadb-install-db", path=_SEARCH_PATH)
        assert installer is not None, "mariadb-install-db is not installed"
        subprocess.run(
            [
                installer, "--no-defaults", "--user=root", f"--datadir={folder}/db", "--skip-test-db",
                "--auth-root-authentication-method=normal", "--innodb-log-file-size=16M",
            ],
            # Two servers that bootstrap at once must not share their temporary tables.
            env=os.environ | {"TMPDIR": str(folder)},
            check=True,
            stdout=subprocess.DEVNULL,
        )  # fmt: skip


def start_slurm(folder: Path | None = None, *, min_job_age: int = 300, extra_conf: Sequence[str] = ()) -> SlurmDaemons:
    """Start the daemons in a new subfolder of `folder` (default: the system's temporary folder).

    Raises:
        TimeoutError: A daemon did not come up; the message ends with what the daemons wrote.

    """
    daemons = SlurmDaemons(
        Path(tempfile.mkdtemp(prefix="nb-slurm-", dir=folder)), min_job_age=min_job_age, extra_conf=extra_conf
    )
    try:
        daemons.start()
    except BaseException as error:
        logs = "\n".join(f"--- {name}\n{daemons.log(name)[-1000:]}" for name in list(daemons._processes))
        daemons.stop()
        if isinstance(error, TimeoutError):
            raise TimeoutError(f"{error}\n{logs}") from error
        raise
    return daemons


def _die_with_parent() -> None:
    # A test run that is killed leaves no daemons behind.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _wait_for(what: str, ready: Callable[[], bool], timeout: float = 400.0) -> None:
    end = time.monotonic() + timeout
    while not ready():
        if time.monotonic() > end:
            raise TimeoutError(f"{what} did not come up in {timeout:.0f} s")
        time.sleep(0.1)
