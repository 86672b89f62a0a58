"""The submit stage killed at random moments, many attempts at once, on real daemons: one job each, however it ends.

In a second test slurmctld or slurmdbd is killed with SIGKILL while the shim has declared its intent and has recorded no
job. `make test` runs a few seeds, `make soak` hundreds. A launcher that only writes a script and calls sbatch keeps the time
in the part that matters. sbatch is slow, so that many of the moments are in the middle of it. A failing seed is named,
and `NIGHTBRIDGE_SEED=17` runs it alone. `NIGHTBRIDGE_SOAK_KIND=pyslurm` submits through the pyslurm of
`NIGHTBRIDGE_CONFORMANCE_PYSLURM_PYTHON`.
"""

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

from nightbridge.errors import TransientError
from nightbridge.files import write_model
from nightbridge.models import ClusterSettings, Job, LaunchPlan
from nightbridge.slurm.attempt_files import AttemptContext, newest_intent, read_claim, read_exit_code, read_submission
from nightbridge.slurm.factory import open_cluster
from nightbridge.slurm.protocol import Cluster
from nightbridge.slurm.states import TERMINAL
from nightbridge.slurm.submission import submit_attempt
from tests.conftest import SEEDS, need
from tests.nightbridge.slurm.conftest import opened_attempt
from tests.real.slurm_daemons import COMMANDS, SlurmDaemons, missing_reason, start_slurm
from tests.waiting import wait_until

pytestmark = [pytest.mark.slurm, pytest.mark.random_kill, pytest.mark.timeout(7200)]

AT_ONCE = 12
AT_ONCE_WITHOUT_DAEMONS = 6
MOST_KILLS = 3
LOST_AFTER = 10
"""Answers of slurmctld in a row, a second apart, that list no live job of an attempt without an exit file."""
LAUNCHER = """
set -e
exp=$NEMORUN_HOME/experiments/train/train_$$
mkdir -p "$exp/train"
printf '#!/bin/bash\\n#SBATCH --output=/dev/null\\necho $SLURM_JOB_ID >> RAN\\n' > "$exp/train_sbatch.sh"
sbatch --requeue --parsable "$exp/train_sbatch.sh"
"""
STAGE = """
import sys; from pathlib import Path; from nightbridge.models import LaunchPlan
from nightbridge.slurm.attempts import read_attempt; from nightbridge.slurm.factory import open_cluster
from nightbridge.slurm.submission import submit_attempt
plan = LaunchPlan.model_validate_json(Path(sys.argv[1]).read_bytes()); context = read_attempt(plan.attempt_dir)
submit_attempt(plan, context, open_cluster(context.cluster, context.workspace), {})
"""


class Killed(NamedTuple):
    """What became of one attempt."""

    seed: int
    kills: int
    job: Job
    jobs: tuple[int, ...]
    ran: tuple[int, ...]
    crashed_unrecorded: bool
    ended: bool


@pytest.fixture(scope="module")
def slurm_cluster() -> Iterator[SlurmDaemons]:
    """Daemons for this module alone: hundreds of jobs would slow the others' questions."""
    need(missing_reason())
    daemons = start_slurm(min_job_age=300)
    yield daemons
    daemons.stop()


@pytest.fixture
def tools(workspace: Path) -> Path:
    """Slurm's commands, with an sbatch that takes its time before and after."""
    folder = workspace / "tools"
    folder.mkdir()
    for name in ("squeue", "sacct", "scancel", "scontrol"):
        (folder / name).symlink_to(COMMANDS / name)
    (folder / "sbatch").write_text(f'#!/bin/sh\nsleep 0.3; {COMMANDS}/sbatch "$@"; code=$?; sleep 0.3; exit $code\n')
    (folder / "sbatch").chmod(0o755)
    return folder


class DaemonKiller:
    """Kills one daemon at a time, in the window between an attempt's intent and its record, and starts it again."""

    def __init__(self, daemons: SlurmDaemons) -> None:
        self._daemons = daemons
        # A slurmctld of 25.11 that is killed before it has saved everything once does not start again
        # ("No Assoc usage file to recover"). One that is stopped saves it.
        daemons.kill_daemon("slurmctld", signal.SIGTERM)
        daemons.start_daemon("slurmctld")
        wait_until(lambda: daemons.command("squeue").returncode == 0, "slurmctld")
        self._one_at_a_time = threading.Lock()
        self.kills = {"slurmctld": 0, "slurmdbd": 0}

    def kill_in_window(self, name: str, attempt: AttemptContext, seconds: float) -> None:
        """Take a daemon away for so long, unless the attempt has its record by now."""
        with self._one_at_a_time:
            if is_unrecorded(attempt):
                self._daemons.kill_daemon(name)
                self.kills[name] += 1
                time.sleep(seconds)
                self._daemons.start_daemon(name)
                # A slurmctld that finds neither slurmdbd nor a saved state gives up: nobody restarts it here.
                wait_until(lambda: self._daemons.command("sacct").returncode == 0, f"slurmdbd after {name}")
                wait_until(lambda: self._daemons.command("squeue").returncode == 0, f"slurmctld after {name}")


@pytest.fixture
def settings(slurm_cluster: SlurmDaemons, tools: Path) -> ClusterSettings:
    python = os.environ.get("NIGHTBRIDGE_CONFORMANCE_PYSLURM_PYTHON")
    return ClusterSettings(
        kind="pyslurm" if os.environ.get("NIGHTBRIDGE_SOAK_KIND") == "pyslurm" else "slurm",
        name="debian",
        slurm_conf=slurm_cluster.slurm_conf,
        bin_dir=tools,
        pyslurm_python=Path(python) if python else None,
        accounting_horizon=5.0,
    )


def test_killed_at_random_moments_every_attempt_has_one_job(
    workspace: Path, settings: ClusterSettings, run_key: str
) -> None:
    began = time.monotonic()

    def soak(seed: int) -> Killed:
        return kill_and_restart(seed, soaked_attempt(workspace, f"{run_key}-s{seed}", settings))

    with ThreadPoolExecutor(AT_ONCE) as pool:
        results = list(pool.map(soak, seeds()))

    jobs = sum(len(result.jobs) for result in results)
    kills = sum(result.kills for result in results)
    print(
        f"\n{len(results)} attempts, {kills} kills, {jobs} jobs, "
        f"{sum(result.crashed_unrecorded for result in results)} attempts killed between intent and record, "
        f"{time.monotonic() - began:.0f} s"
    )
    assert [result.seed for result in results if len(result.jobs) > 1] == [], "double"
    assert [result.seed for result in results if result.jobs != (result.job.job_id,)] == [], "lost"
    assert [result.seed for result in results if result.ran != (result.job.job_id,)] == [], "not run once"


def test_daemons_killed_between_intent_and_record_leave_one_job_for_each_attempt(
    slurm_cluster: SlurmDaemons, workspace: Path, settings: ClusterSettings, run_key: str
) -> None:
    """A slurmctld that is killed before it has saved what it did forgets it: a job that it accepted is lost, which the
    watcher finds, and one that it has started it starts again under the same id. Of no attempt may two jobs run, and none
    that ran may be without its exit code.
    """
    killer, began = DaemonKiller(slurm_cluster), time.monotonic()

    def soak(seed: int) -> Killed:
        return kill_and_restart(seed, soaked_attempt(workspace, f"{run_key}-d{seed}", settings), killer)

    with ThreadPoolExecutor(AT_ONCE_WITHOUT_DAEMONS) as pool:
        results = list(pool.map(soak, seeds()))

    forgotten = [result for result in results if not result.ran]
    print(
        f"\n{len(results)} attempts, {sum(result.kills for result in results)} kills of the stage, "
        f"{killer.kills['slurmctld']} of slurmctld and {killer.kills['slurmdbd']} of slurmdbd between intent and "
        f"record, {sum(len(result.jobs) for result in results)} jobs, {len(forgotten)} forgotten by slurmctld and "
        f"{sum(len(result.ran) > len(set(result.ran)) for result in results)} started again by it, "
        f"{time.monotonic() - began:.0f} s"
    )
    assert sum(killer.kills.values()) > 0
    assert [result.seed for result in results if len(set(result.ran)) > 1] == [], "two jobs ran"
    assert [result.seed for result in results if len(result.jobs) > 1] == [], "double"
    assert [result.seed for result in results if result.ran and not result.ended] == [], "ran, and lost"


def seeds() -> list[int]:
    return [int(os.environ["NIGHTBRIDGE_SEED"])] if "NIGHTBRIDGE_SEED" in os.environ else list(SEEDS)


def soaked_attempt(workspace: Path, run_key: str, settings: ClusterSettings) -> AttemptContext:
    return opened_attempt(workspace, run_key, settings, "--time=5", "--mem=50")


def is_unrecorded(attempt: AttemptContext) -> bool:
    """Whether the attempt is between its intent and its record."""
    return newest_intent(attempt.attempt_dir) > 0 and read_submission(attempt.attempt_dir) is None


def kill_and_restart(seed: int, attempt: AttemptContext, killer: DaemonKiller | None = None) -> Killed:
    """Kill the stage up to three times, mostly with its launcher and shim; then let it end.

    Args:
        seed: Of the dice.
        attempt: The attempt.
        killer: Kills a daemon in the window before each kill of the stage.
    """
    dice = random.Random(seed)
    cluster = open_cluster(attempt.cluster, attempt.workspace)
    ran = attempt.attempt_dir / "ran"
    plan = LaunchPlan(
        run_key=attempt.run_key,
        attempt=attempt.attempt,
        attempt_dir=attempt.attempt_dir,
        argv=("/bin/bash", "-c", LAUNCHER.replace("RAN", str(ran))),
        cwd=attempt.attempt_dir,
        nodes=1,
        tasks_per_node=1,
        sbatch_args=attempt.sbatch_options,
    )
    write_model(attempt.attempt_dir / "plan.json", plan)
    kills, unrecorded = dice.randint(1, MOST_KILLS), False
    for _ in range(kills):
        stage = subprocess.Popen(
            [sys.executable, "-c", STAGE, str(attempt.attempt_dir / "plan.json")], stderr=subprocess.DEVNULL
        )
        if killer is None and dice.random() < 0.5:
            time.sleep(dice.uniform(0.1, 2.5))
        else:
            wait_for_intent(attempt, stage)
            time.sleep(dice.uniform(0.0, 0.9))
        if killer is not None:
            killer.kill_in_window(dice.choice(("slurmctld", "slurmdbd")), attempt, dice.uniform(0.0, 2.0))
        stage.send_signal(signal.SIGKILL)
        stage.wait()
        if dice.random() < 0.7:
            kill_all_of(attempt)
        unrecorded = unrecorded or is_unrecorded(attempt)
    job = until_submitted(plan, attempt, cluster)
    ended = wait_until_ended(attempt, cluster)
    time.sleep(1)
    return Killed(
        seed=seed,
        kills=kills,
        job=job,
        jobs=tuple(found.job_id for found in cluster.find(attempt.name).jobs),
        ran=tuple(int(line) for line in ran.read_text().split()) if ran.exists() else (),
        crashed_unrecorded=unrecorded,
        ended=ended,
    )


def wait_for_intent(attempt: AttemptContext, stage: "subprocess.Popen[bytes]") -> None:
    """Until the shim is about to submit: from here to its record every moment matters."""
    while newest_intent(attempt.attempt_dir) == 0 and stage.poll() is None:
        time.sleep(0.02)


def kill_all_of(attempt: AttemptContext) -> None:
    """Kill the launcher and the shim: whatever has the attempt in its environment or on its command line."""
    needle = str(attempt.attempt_dir).encode()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            text = (process / "environ").read_bytes() + (process / "cmdline").read_bytes()
            # Not the job itself: its node was not hit.
            if needle in text and b"SLURMD_NODENAME=" not in text and b"slurmstepd" not in text:
                os.kill(int(process.name), signal.SIGKILL)


def until_submitted(plan: LaunchPlan, attempt: AttemptContext, cluster: Cluster) -> Job:
    end = time.monotonic() + 300
    while time.monotonic() < end:
        with contextlib.suppress(TransientError):
            return submit_attempt(plan, attempt, cluster, {})
        time.sleep(0.5)
    raise AssertionError(f"{attempt.name} never submitted")


def wait_until_ended(attempt: AttemptContext, cluster: Cluster) -> bool:
    """Whether the job left its exit file; if not, slurmctld has listed no live job of the attempt for a while.

    Accounting may call a job alive for ever that a killed slurmctld has forgotten. An answer without slurmctld counts
    neither way: it is killed every few seconds.
    """
    end, looks, lookup = time.monotonic() + 300, 0, None
    while read_exit_code(attempt.attempt_dir) is None and looks < LOST_AFTER:
        claim = read_claim(attempt.attempt_dir)
        assert time.monotonic() < end, f"{attempt.name} never ended; claimed by {claim}, last {lookup}"
        with contextlib.suppress(TransientError):
            lookup = cluster.find(attempt.name)
            if lookup.queue_answered:
                lives = any(job.job_id in lookup.queued and job.state not in TERMINAL for job in lookup.jobs)
                looks = 0 if lives else looks + 1
        time.sleep(1)
    return read_exit_code(attempt.attempt_dir) is not None
