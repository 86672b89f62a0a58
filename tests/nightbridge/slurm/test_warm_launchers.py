"""Launchers forked from a warm process leave what fresh ones leave, with the real NeMo-Run on the embedded cluster."""

import base64
import contextlib
import os
import re
import signal
import subprocess
import sys
import zlib
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest

from nightbridge.embedded.jobs import all_jobs
from nightbridge.errors import TransientError
from nightbridge.models import LaunchPlan
from nightbridge.processes import Process, run
from nightbridge.slurm import submission, warm_launchers
from nightbridge.slurm.attempt_files import current_attempt
from nightbridge.slurm.local import LocalCluster
from nightbridge.slurm.submission import submit_attempt
from nightbridge.slurm.warm_launchers import WarmLaunchers
from tests.nightbridge.embedded.local_cluster import is_running, local_cluster, wait_for_state, write_script
from tests.waiting import wait_until

pytestmark = pytest.mark.launcher

LAUNCHER = Path("examples/practice/template/bridge/scripts/performance/setup_experiment.py").absolute()
FLAGS = (
    "-a", "tests", "-m", "llama", "-mr", "llama_small", "-g", "h100", "-ng", "2", "-gn", "2", "-t", "00:07:00",
    "-i", "none", "-E", "GREETING=good night; sleep well", "--packager", "none", "--detach", "true", "-wdj",
)  # fmt: skip

SECRET = "hf_verysecretverysecret"


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    """The cluster of the workspace; no process outlives it, the warm ones of this test neither."""
    with running_cluster(tmp_path / "workspace") as cluster:
        yield cluster


@contextlib.contextmanager
def running_cluster(workspace: Path, *, slots: int = 2) -> Iterator[LocalCluster]:
    workspace.mkdir()
    with local_cluster(workspace, slots=slots) as cluster, pytest.MonkeyPatch.context() as patched:
        patched.setattr(submission, "WARM_LAUNCHERS", WarmLaunchers())
        yield cluster
        for pid in warm_processes():
            os.kill(pid, signal.SIGKILL)


def warm_processes(parent: int = os.getpid()) -> list[int]:
    """The warm processes of a process."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            parent_of = int(Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[1])
            if parent_of == parent and b"warm_launchers" in Path(f"/proc/{name}/cmdline").read_bytes():
                found.append(int(name))
    return found


def occupy(cluster: LocalCluster) -> None:
    """Take a cluster's only slot: what a launcher prints of its job's state depends on no race with the job's start."""
    script = write_script(cluster.root.parent / "occupant.sh", "sleep 600")
    wait_for_state(cluster, cluster.submit("occupant", script, ["--output=/dev/null"]), "RUNNING")


def submit(python: Path, cluster: LocalCluster, run_key: str) -> Path:
    """Submit a run through the practice launcher, and cancel its job; return the attempt's folder."""
    attempt = current_attempt(cluster.root.parent, run_key, cluster.settings)
    plan = LaunchPlan(
        run_key=run_key,
        attempt=1,
        attempt_dir=attempt.attempt_dir,
        argv=(str(python), str(LAUNCHER), *FLAGS, f"{run_key}-a1"),
        cwd=LAUNCHER.parents[2],
        nodes=1,
        tasks_per_node=2,
    )
    job = submit_attempt(plan, attempt, cluster, {"HF_TOKEN": SECRET})
    cluster.cancel(job.job_id)
    return attempt.attempt_dir


def files_of(attempt_dir: Path) -> dict[str, str]:
    """Every file of an attempt but what its job wrote, without times and process ids; what is packed is unpacked."""
    files = (path for path in attempt_dir.rglob("*") if path.is_file() and path.suffix != ".out")
    found = {str(path.relative_to(attempt_dir)): PACKED.sub(unpacked, path.read_text()) for path in files}
    for of_shim in ("intent.json", "submission.json"):
        del found[of_shim]
    # Rich leaves the time out where it is that of the line before; a thread of NeMo-Run tells that the job is pending.
    log = re.sub(rf"^\[\d\d:\d\d:\d\d\]|{PENDING}", "", found["launcher.log"], flags=re.MULTILINE)
    found["launcher.log"] = " ".join(log.split())
    return {TIMES.sub("TIME", name): TIMES.sub("TIME", text) for name, text in found.items()}


TIMES = re.compile(r"\d{19}|\d{4}-\d\d-\d\d[T ][\d:.]+(Z|\+00:00)?")
PENDING = r"\[SLURM\] Job \d+ - State: PENDING, Estimated start: N/A, Current time: [\d-]+ [\d:]+"
PACKED = re.compile(r"eJ[\w-]{40,}=*")
"""How NeMo-Run keeps configurations: in JSON, compressed."""


def unpacked(found: re.Match[str]) -> str:
    return zlib.decompress(base64.urlsafe_b64decode(found[0])).decode()


def processor_seconds(warm: int) -> float:
    """What the submissions of a warm process have taken, with all that they started and waited for."""
    children = Path(f"/proc/{warm}/task/{warm}/children").read_text().split()
    fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15] for pid in (warm, *children)]
    ticks = sum(map(int, fields[0][2:])) + sum(int(each) for child in fields[1:] for each in child)
    return ticks / os.sysconf("SC_CLK_TCK")


def test_a_forked_launcher_leaves_what_a_fresh_one_leaves(
    launcher_python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_cluster(tmp_path / "workspace", slots=1) as cluster:
        occupy(cluster)
        submit(launcher_python, cluster, "first")  # the warm process has forked before
        submit(launcher_python, cluster, "night")
        (warm,) = warm_processes()
        taken = processor_seconds(warm) / 2
    (tmp_path / "workspace").rename(tmp_path / "forked")
    monkeypatch.setattr(warm_launchers, "PACKAGE", "no_such_package")
    with running_cluster(tmp_path / "workspace", slots=1) as cluster:
        occupy(cluster)
        submit(launcher_python, cluster, "first")
        submit(launcher_python, cluster, "night")
        assert warm_processes() == []

    forked, fresh = (files_of(tmp_path / name / "runs/night/a1") for name in ("forked", "workspace"))
    assert forked == fresh
    assert {"job.sh", "launcher.log", "nemorun/.slurm_jobs"} <= set(forked)
    assert str(LAUNCHER) in forked["launcher.log"]
    assert taken < 2.0


# --- the warm process, with a small package in NeMo-Run's place -------------------------------------------------------

PROGRAM = """
import os, sys
print(sorted({**os.environ}.items()), sys.argv, os.getcwd(), sys.path[0], os.getpid() == os.getsid(0), flush=True)
print(__name__, sys.stdin.read(), sorted(os.listdir("/proc/self/fd"))[:-1], file=sys.stderr, flush=True)
sys.exit(int(sys.argv[1]))
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A launcher that shows what it has been given."""
    monkeypatch.setattr(warm_launchers, "PACKAGE", "email")
    (tmp_path / "program.py").write_text(PROGRAM)
    yield tmp_path / "program.py"
    for pid in warm_processes():
        os.kill(pid, signal.SIGKILL)


def is_gone(pid: int) -> bool:
    return not is_running(pid)


def shown(argv: Sequence[str], cwd: Path, started: Process | None) -> tuple[list[str], int]:
    lines: list[str] = []
    environment = {"SHARED": "1", "TOKEN": SECRET}
    code = run(argv, environment=environment, timeout=60, cwd=cwd, on_line=lines.append, merged=True, started=started)
    return lines, code.code


def test_launchers_of_two_workspaces_share_a_warm_process_and_submit_each_to_its_own_cluster(
    launcher_python: Path, tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir()
    with running_cluster(tmp_path / "one") as one, local_cluster(tmp_path / "other") as other:
        for cluster in (one, other):
            submit(launcher_python, cluster, "night")
        warm, jobs = warm_processes(), [len([*all_jobs(cluster.root)]) for cluster in (one, other)]
        for pid in warm:
            os.kill(pid, signal.SIGKILL)

    assert (len(warm), jobs) == (1, [1, 1])


def test_a_fork_is_given_what_a_process_of_its_own_is_given(program: Path, tmp_path: Path) -> None:
    launchers, argv = WarmLaunchers(), (sys.executable, str(program), "7", "a b")

    for _ in range(2):
        forked = launchers.start(argv, {"SHARED": "1"}, {"TOKEN": SECRET}, cwd=tmp_path)
        assert forked is not None
        assert shown(argv, tmp_path, forked) == shown(argv, tmp_path, None)
    (warm,) = warm_processes()

    assert shown(argv, tmp_path, None)[1] == 7
    assert SECRET not in Path(f"/proc/{warm}/environ").read_text()
    mapped = [
        line.split()[0].split("-") for line in Path(f"/proc/{warm}/maps").read_text().splitlines() if " rw-p " in line
    ]
    with Path(f"/proc/{warm}/mem").open("rb") as memory:
        for first, last in mapped:
            memory.seek(int(first, 16))
            assert SECRET.encode() not in memory.read(int(last, 16) - int(first, 16))


def test_a_warm_process_that_was_killed_is_replaced(program: Path, tmp_path: Path) -> None:
    launchers, argv = WarmLaunchers(), (sys.executable, str(program), "0")
    codes = []
    for _ in range(2):
        codes.append(shown(argv, tmp_path, launchers.start(argv, {}, {}, cwd=tmp_path))[1])
        (warm,) = warm_processes()
        os.kill(warm, signal.SIGKILL)
        wait_until(partial(is_gone, warm))
    assert codes == [0, 0]


def test_a_launcher_that_hangs_is_killed_in_its_fork(program: Path, tmp_path: Path) -> None:
    program.write_text("import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(600)\n")
    argv, lines = (sys.executable, str(program)), list[str]()
    forked = WarmLaunchers().start(argv, {}, {}, cwd=tmp_path)
    assert forked is not None

    with pytest.raises(TransientError, match="did not end within 1 s"):
        run(argv, environment={}, timeout=1.0, on_line=lines.append, merged=True, started=forked)

    wait_until(lambda: not is_running(int(lines[0])))


def test_what_cannot_be_imported_starts_nothing(program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm_launchers, "PACKAGE", "no_such_package")
    launchers = WarmLaunchers()
    assert [launchers.start((sys.executable, str(program), "0"), {}, {}, cwd=tmp_path) for _ in range(2)] == [
        None,
        None,
    ]


FLOW = """
import sys
from pathlib import Path
from nightbridge.slurm import warm_launchers
warm_launchers.PACKAGE = "email"
forked = warm_launchers.WARM_LAUNCHERS.start([sys.executable, sys.argv[1], "0"], {}, {}, cwd=Path("/"))
print(forked.wait(), flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("ended_by", [signal.SIGKILL, signal.SIGTERM])
def test_a_warm_process_ends_with_the_one_that_started_it(program: Path, ended_by: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", FLOW, str(program)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as flow:
        assert flow.stdout is not None
        assert flow.stdout.readline() == b"0\n"
        (warm,) = warm_processes(flow.pid)

        flow.send_signal(ended_by)
        wait_until(lambda: not is_running(warm))
