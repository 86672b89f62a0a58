"""What may happen to workers, flow processes, files and Prefect's server while a night goes on.

It ends in its verdicts all the same: one job for each run, a verdict for each test in the store, one report, one event of
the night's end, and no process left.
"""

import random
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from nightbridge.slurm.states import TERMINAL
from tests.conftest import need
from tests.flows.practice_night import NIGHTBRIDGE
from tests.nights.conftest import EVERY_STAGE, PLAIN, SEED, SHARP_EYES, Rig, in_any_stage, in_one_night, names
from tests.nights.installation import wait_for
from tests.nights.night import GOOD_STATES, STAGES, Night
from tests.real.postgres import postgres_missing_reason
from tests.real.prefect_harness import STRAIGHT
from tests.real.prefect_proxy import at_random

pytestmark = pytest.mark.launcher

Begin = Callable[..., Night]

WITH_SIGN_OF_LIFE = tuple(STAGES)[1:]
"""Before a night has its plan only its heartbeats, which are rare, tell the reaper whether it lives."""

WITH_TIME_LEFT = ("clone", "validate", "submit", "watch")
"""In later stages a night may be over before what comes next."""

OUTAGE = 12.0
"""Seconds: longer than two retries of Prefect's client, and than the reaper's patience."""


# --- processes that die -----------------------------------------------------------------------------------------------


@in_any_stage(*WITH_TIME_LEFT)
def test_a_killed_flow_is_retried_by_its_first_files_may_be_suspended_and_passes_though_a_tenth_of_all_calls_fails(
    rig: Rig, begin: Begin, stage: str
) -> None:
    night = begin()
    night.wait_until(stage)

    spoil_files(night)
    night.kill()
    # A person sees it on the page of the flow run; the worker's second report of the crash may come after the retry.
    night.wait_for_state("Crashed")
    retried = night.from_here()
    retried.retry()
    if not EVERY_STAGE:  # there a suspended night is one of its own
        retried.wait_until(random.Random(SEED).choice(("submit", "watch")))
        suspend_and_resume(night)
    rig.proxy.fault = at_random(SEED, 0.1)

    night.passes()
    assert rig.proxy.faults > 2  # a tenth of the fifty calls of a short night, more or less


def worker_is_killed(rig: Rig) -> None:
    """What it runs goes on."""
    rig.workers[-1].kill()
    rig.start_worker()


def worker_is_stopped(rig: Rig) -> None:
    rig.workers[-1].send(signal.SIGTERM)
    rig.start_worker()


def host_is_lost(rig: Rig) -> None:
    rig.workers[-1].lose_host()
    rig.start_worker()
    time.sleep(SHARP_EYES["silence"])  # the reaper believes it at its first look


ENDS_OF_WORKERS = (host_is_lost, worker_is_stopped, worker_is_killed)
"""What a worker runs dies at once with its host only: in one night that comes first."""


@pytest.mark.parametrize("ends", in_one_night(ENDS_OF_WORKERS), ids=names)
@in_any_stage(*(WITH_SIGN_OF_LIFE if EVERY_STAGE else WITH_TIME_LEFT))
def test_a_night_goes_on_by_itself_when_its_host_is_lost_its_worker_stopped_or_its_worker_killed(
    rig: Rig, begin: Begin, ends: Sequence[Callable[[Rig], None]], stage: str
) -> None:
    """One after another in one night; in `make soak` each in a night of its own, and in the last stages, too."""
    night = begin()
    night.wait_until(stage)

    for number, end in enumerate(ends, start=1):
        end(rig)
        if number < len(ends):
            night.wait_for_times(number, "Resuming", meanwhile=rig.reap)
            rig.wait_for_reapers()  # one that dies with its worker keeps its one slot for five minutes
            night.wait_for_times(number + 1, "Running")
            time.sleep(random.Random(SEED + number).uniform(0, 2))
            assert night.state[1] == "Running", "it was over before the next one"

    night.passes(meanwhile=rig.reap)


@in_any_stage()
def test_two_workers_and_a_person_run_one_night_at_once(rig: Rig, begin: Begin, stage: str) -> None:
    rig.start_worker()
    night = begin(job_variables=STRAIGHT)
    night.wait_until(stage)

    again = begin(night.night, job_variables=STRAIGHT)
    by_hand = subprocess.run(
        [
            NIGHTBRIDGE,
            "run",
            night.workspace.parent / "conf/faults.toml",
            "--system",
            night.workspace.parent / "site.toml",
            "--night",
            night.night,
        ],
        env=rig.installed.environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )

    assert by_hand.returncode == 0, by_hand.stderr
    # Whichever is over last has found the night again.
    wait_for("end of both flow runs", lambda: all(run.state[1].startswith(GOOD_STATES) for run in (night, again)))
    night.keeps_its_promise()


# --- a server that does not answer ------------------------------------------------------------------------------------


def server_is_away(rig: Rig) -> None:
    """The reaper believes a death after a silence that is longer than the first outage, and shorter than the second."""
    for seconds in (SHARP_EYES["silence"] / 2, OUTAGE):
        rig.server.kill()
        time.sleep(seconds)
        rig.server.start()


def database_is_restarted(rig: Rig) -> None:
    if rig.postgres is not None:
        rig.postgres.stop()
        time.sleep(OUTAGE)
        rig.postgres.start()


OUTAGES = (database_is_restarted, server_is_away)


@pytest.mark.parametrize("outages", in_one_night(OUTAGES), ids=names)
@in_any_stage()
def test_a_database_and_a_server_that_are_away_are_waited_for_and_it_may_die_right_after_a_night_has_told_its_end(
    rig: Rig, begin: Begin, outages: Sequence[Callable[[Rig], None]], stage: str
) -> None:
    """One after another, in either order: what the night still has to ask after the first one waits a while."""
    night = begin(entries=PLAIN, job_variables=STRAIGHT)
    night.wait_until(stage)

    for outage in random.Random(SEED).sample(outages, len(outages)):
        outage(rig)

    night.wait_for_state(*GOOD_STATES, meanwhile=rig.reap)
    assert "Crashed" not in night.state_history

    rig.server.kill()  # It takes events at once, and writes them to its database every few seconds.
    rig.server.start()

    night.keeps_its_promise()
    if database_is_restarted in outages:
        need(postgres_missing_reason())


# --- a person in the UI -----------------------------------------------------------------------------------------------


@in_any_stage()
def test_a_cancelled_night_s_jobs_are_cancelled_whatever_its_files_say_by_now(begin: Begin, stage: str) -> None:
    night = begin(job_variables=STRAIGHT)
    night.wait_until(stage)

    if stage != "begin":  # there the night has not read them yet, and would be invalid
        spoil_files(night)
    asked = time.monotonic()
    night.cancel()

    night.wait_for_state("Cancelled", patience=60)
    cancelled = time.monotonic()
    wait_for("end of every job", lambda: all(job.state in TERMINAL for job in night.jobs), patience=60)
    ended = time.monotonic()
    print(f"cancelled in {stage}: after {cancelled - asked:.1f} s, every job ended after {ended - asked:.1f} s")
    assert night.run_states <= {"Cancelled", "NoBaseline"}
    assert night.told_ends() == ["cancelled"]
    night.leaves_nothing()


@pytest.mark.skipif(not EVERY_STAGE, reason="in make test the night whose flow is killed is suspended, too")
@in_any_stage("submit", "watch", "harvest")
def test_a_suspended_night_leaves_its_process_and_goes_on_when_resumed(begin: Begin, stage: str) -> None:
    night = begin(job_variables=STRAIGHT)
    night.wait_until(stage)

    suspend_and_resume(night)

    night.passes()


def suspend_and_resume(night: Night) -> None:
    """Suspend a night, see that it has left its process, and resume it."""
    night.suspend()
    wait_for("free place", lambda: not night.processes(), patience=60)
    assert night.state[1] == "Suspended"
    assert night.run_states <= {"Suspended", "NoBaseline"}
    night.resume()


# --- files that are edited --------------------------------------------------------------------------------------------


def spoil_files(night: Night) -> None:
    """Edit one of the night's files, break one, and remove one."""
    folder = night.workspace.parent
    kinds = list(SPOILED.items())
    random.Random(SEED).shuffle(kinds)
    for path, (kind, spoil) in zip(
        (folder / "conf/faults.toml", folder / "conf/llama_small.toml", folder / "site.toml"), kinds, strict=True
    ):
        print(f"{path.name} is {kind}")
        spoil(path)


SPOILED: Mapping[str, Callable[[Path], object]] = {
    "edited": lambda path: path.write_text(
        path.read_text().replace("dense", "renamed").replace("workspace", "elsewhere")
    ),
    "broken": lambda path: path.write_text("name = [\n"),
    "gone": lambda path: path.unlink(),
}
