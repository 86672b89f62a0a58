"""Who ended a job: every end in `ends.toml`, and those that are quick to make, made by real daemons."""

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nightbridge.models import ClusterSettings, JobState, Outcome
from nightbridge.slurm.attempt_files import AttemptContext
from nightbridge.slurm.attempts import failed_nodes
from nightbridge.slurm.command_line import CommandLineCluster
from nightbridge.slurm.outcome import classify_job
from nightbridge.slurm.script import CLAIM
from nightbridge.slurm.states import (
    LOST,
    TERMINAL,
    hopeless_advice,
    parse_sacct,
    parse_squeue,
    statuses_of,
    waiting_words,
)
from nightbridge.slurm.watcher import Graces, Watcher, _Watched
from tests.conftest import need
from tests.nightbridge.slurm.test_faults import Run
from tests.nightbridge.slurm.test_outcome import ended, evidence
from tests.real.slurm_daemons import SlurmDaemons, missing_reason, start_slurm
from tests.waiting import wait_until

_TABLE = tomllib.loads(Path(__file__).with_name("ends.toml").read_text())
ENDS, WAITS = _TABLE["end"], _TABLE["wait"]


@pytest.mark.parametrize("end", ENDS, ids=[end["from"] for end in ENDS])
def test_an_end_that_slurm_makes_has_its_outcome(end: dict[str, Any], tmp_path: Path) -> None:
    (row,) = parse_sacct(end["sacct"])
    live = []
    if end.get("live", True):
        job_id, state, submitted, started, over, nodes, _, _, name = end["sacct"].split("|")
        fields = (job_id, state.split()[0], submitted, started, over, nodes, end.get("reason", "None"), name)
        live = parse_squeue(end.get("squeue", "|".join(fields)))
    # Of a job that only accounting calls live nothing is known: the watcher calls it lost.
    lost = row.model_copy(update={"state": JobState.UNKNOWN, "reason": f"{LOST}: unknown to Slurm"})
    status = statuses_of("c", [row.job_id], live, [row]).get(row.job_id, lost)
    script = end["script"]
    job = ended(tmp_path, None, exit_file=int(script) if script.isdigit() else None)
    job = job.model_copy(
        update={
            "job_id": status.job_id,
            "status": status.model_copy(update={"node_reason": end.get("nodes", "")}),
        }
    )
    if script != "none":
        (tmp_path / CLAIM).write_text(f"{job.job_id}\n")
    steps = 0 if script == "none" else end.get("steps", 20)

    judged = classify_job(job, evidence(steps, last_error=end.get("log", "")))

    assert judged.outcome == end["outcome"], judged.outcome_reason
    assert end.get("says", "") in judged.outcome_reason


@pytest.mark.parametrize("wait", WAITS, ids=[wait["from"] for wait in WAITS])
def test_what_a_job_waits_for_is_told_in_words(wait: dict[str, Any]) -> None:
    (status,) = parse_squeue(wait["squeue"])

    assert status.state not in TERMINAL
    assert wait["says"] in waiting_words(status)
    assert (hopeless_advice(status.reason) is not None) == wait["hopeless"]


def test_what_accounting_forgets_at_a_restart_was_read_before(tmp_path: Path) -> None:
    watched = _Watched(ended(tmp_path, None), 0.0)
    (told,) = parse_sacct(
        "7|CANCELLED by 9|2026-11-23T10:59:28|2026-11-23T10:59:29|2026-11-23T10:59:33|node2|None|0:0|j"
    )
    (later,) = parse_sacct("7|CANCELLED|2026-11-23T10:59:28|2026-11-23T10:59:29|2026-11-23T10:59:33|node2|None|0:0|j")

    watched.report(told, 1.0)
    watched.report(later, 2.0)

    assert watched.status is not None
    assert watched.status.cancelled_by == "9"


# --- on real daemons -------------------------------------------------------------------------------------------------

HOOK = '#!/bin/sh\nif [ -e "$0.fail" ]; then exit 3; fi\n'


@pytest.fixture(scope="module")
def hooks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Slurm's prolog and epilog programs; one fails while a file `<program>.fail` is there."""
    folder = tmp_path_factory.mktemp("hooks")
    for name in ("Prolog", "Epilog", "PrologSlurmctld"):
        (folder / name).write_text(HOOK)
        (folder / name).chmod(0o755)
    return folder


@pytest.fixture(scope="module")
def slurm_cluster(hooks: Path) -> Iterator[SlurmDaemons]:
    """Daemons for this module alone, with prolog and epilog."""
    need(missing_reason())
    daemons = start_slurm(
        min_job_age=60, extra_conf=(*(f"{hook.name}={hook}" for hook in hooks.iterdir()), "PrologFlags=Alloc")
    )
    yield daemons
    daemons.stop()


@pytest.fixture
def settings(slurm_cluster: SlurmDaemons) -> ClusterSettings:
    return ClusterSettings(
        kind="slurm", name="debian", slurm_conf=slurm_cluster.slurm_conf, accounting_horizon=3.0, poll_interval=1.0
    )


@pytest.fixture
def run(attempt: AttemptContext, cluster: CommandLineCluster, slurm_cluster: SlurmDaemons) -> Iterator[Run]:
    run = Run(attempt, cluster)
    yield run
    run.close()
    slurm_cluster.command("scontrol", "update", "node=node2", "state=resume")
    wait_until(lambda: slurm_cluster.command("sinfo", "-h", "-o", "%T", "-n", "node2").stdout.strip() == "idle")


@pytest.mark.slurm
@pytest.mark.parametrize(
    ("hook", "says"),
    [("Prolog", "the prolog failed on node2"), ("PrologSlurmctld", "as after a failed PrologSlurmctld")],
)
def test_a_failed_prolog_is_nobodys_cancellation(hook: str, says: str, run: Run, hooks: Path) -> None:
    (hooks / f"{hook}.fail").touch()
    try:
        run.follow(run.submit("true", "--nodelist=node2"))
        job = run.ended(0)
    finally:
        (hooks / f"{hook}.fail").unlink()

    assert job.outcome is Outcome.INFRASTRUCTURE
    assert says in job.outcome_reason
    assert failed_nodes([job]) == ("node2",)


@pytest.mark.slurm
def test_an_epilog_that_fails_costs_no_verdict(run: Run, hooks: Path) -> None:
    (hooks / "Epilog.fail").touch()
    try:
        run.follow(run.submit("true", "--nodelist=node2"))
        job = run.ended(50)
    finally:
        (hooks / "Epilog.fail").unlink()

    assert job.outcome is Outcome.SUCCEEDED


@pytest.mark.slurm
def test_a_node_that_a_health_check_sets_down_is_left_out_next_time(run: Run, slurm_cluster: SlurmDaemons) -> None:
    run.start("sleep 100", "--nodelist=node2")
    slurm_cluster.command("scontrol", "update", "node=node2", "state=down", "reason=gpu-check")

    job = run.ended()

    assert job.outcome is Outcome.INFRASTRUCTURE
    assert failed_nodes([job]) == ("node2",)


@pytest.mark.slurm
def test_a_pending_job_that_slurmctld_lost_was_cancelled_by_nobody(run: Run, slurm_cluster: SlurmDaemons) -> None:
    # 22.05's accounting closes the job when slurmctld is back. That of 25.11 and 26.05 calls it pending for ever.
    run.watcher = Watcher(run.cluster, Graces(silent=3, detail=1, hopeless=300, lost=30))
    job = run.submit("true", "--begin=now+500")
    run.follow(job)
    run.wait_for(JobState.PENDING)
    wait_until(lambda: slurm_cluster.command("sacct", "-X", "-n", "-j", str(job.job_id)).stdout != "")

    slurm_cluster.lose_state()
    slurm_cluster.start_daemon("slurmctld")
    lost = run.ended(0)

    assert lost.outcome is Outcome.INFRASTRUCTURE
    assert "lost: unknown to " in lost.outcome_reason
