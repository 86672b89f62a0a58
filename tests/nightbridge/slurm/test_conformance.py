"""What every implementation of `Cluster` does, run against each that is present.

By default: the embedded cluster, Slurm's commands and pyslurm (where it works) on Debian's Slurm, started by the tests.
For another Slurm, these variables say which:

    NIGHTBRIDGE_CONFORMANCE_SLURM_CONF        the slurm.conf of a cluster that runs and has two idle nodes
    NIGHTBRIDGE_CONFORMANCE_BIN_DIR           the folder of its commands; found on PATH when unset
    NIGHTBRIDGE_CONFORMANCE_PYSLURM_PYTHON    the Python that has its pyslurm; this one when unset
    NIGHTBRIDGE_CONFORMANCE_KINDS             such as `slurm pyslurm`: these, and no skipping of one that is missing
"""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest

from nightbridge.config.sites import PLAIN_CLUSTERS
from nightbridge.errors import LaunchRefused, NightbridgeError, PermanentError
from nightbridge.models import ClusterKind, ClusterSettings, JobState
from nightbridge.slurm.factory import OPENERS, open_cluster
from nightbridge.slurm.protocol import Cluster, Lookup
from nightbridge.slurm.pyslurm_cluster import PyslurmCluster
from nightbridge.slurm.states import TERMINAL

_PREFIX = "NIGHTBRIDGE_CONFORMANCE_"
_KINDS = os.environ.get(f"{_PREFIX}KINDS", "").split()
_PATIENCE = 240.0


def _path(name: str) -> Path | None:
    value = os.environ.get(_PREFIX + name)
    return Path(value) if value else None


@pytest.fixture(scope="module")
def slurm_settings(request: pytest.FixtureRequest) -> ClusterSettings:
    """How to reach the Slurm under test."""
    return ClusterSettings(
        kind="slurm",
        name="conformance",
        slurm_conf=_path("SLURM_CONF") or request.getfixturevalue("slurm_cluster").slurm_conf,
        bin_dir=_path("BIN_DIR"),
        pyslurm_python=_path("PYSLURM_PYTHON"),
        accounting_horizon=6.0,
    )


@pytest.fixture(scope="module")
def trouble(slurm_settings: ClusterSettings) -> str | None:
    """Why pyslurm does not work here; None when it does."""
    try:
        PyslurmCluster(slurm_settings).version()
    except NightbridgeError as error:
        return str(error)
    return None


@pytest.fixture(
    params=[
        pytest.param(kind, marks=pytest.mark.embedded if kind == "local" else pytest.mark.slurm)
        for kind in _KINDS or ("local", "slurm", "pyslurm")
    ]
)
def cluster(request: pytest.FixtureRequest, workspace: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """Each implementation, its launcher's environment in place, and a caller that is itself a job."""
    kind = request.param
    if kind == "local":
        settings = ClusterSettings(slots=8)
    else:
        settings = request.getfixturevalue("slurm_settings").model_copy(update={"kind": kind})
    if kind == "pyslurm" and (trouble := request.getfixturevalue("trouble")):
        assert kind not in _KINDS, trouble
        pytest.skip(f"pyslurm: {trouble}")
    opened = open_cluster(settings, workspace)
    for name, value in opened.launch_environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    monkeypatch.setenv("SLURM_NTASKS", "7")
    monkeypatch.setenv("SBATCH_PARTITION", "of-the-caller")
    monkeypatch.setenv("SQUEUE_STATES", "FAILED")
    monkeypatch.setenv("TZ", "Pacific/Auckland")
    monkeypatch.chdir(workspace)
    return opened


@pytest.fixture
def script(workspace: Path) -> Callable[..., Path]:
    def write(*lines: str) -> Path:
        path = workspace / f"script-{len(list(workspace.glob('script-*')))}.sh"
        path.write_text(
            "\n".join(("#!/bin/bash", f"#SBATCH --output={workspace}/out-%j", "#SBATCH --time=10", *lines, ""))
        )
        return path

    return write


def ended(cluster: Cluster, *job_ids: int) -> list[Any]:
    """The status of each job once all have ended and accounting has said how."""
    end = time.monotonic() + _PATIENCE
    while True:
        states = cluster.states(job_ids)
        if len(states) == len(job_ids) and all(
            row.state in TERMINAL and row.exit_code is not None for row in states.values()
        ):
            return [states[job_id] for job_id in job_ids]
        assert time.monotonic() < end, f"still {states}"
        time.sleep(0.2)


def found(cluster: Cluster, name: str, right: Callable[[Lookup], bool]) -> Lookup:
    end = time.monotonic() + _PATIENCE
    while not right(answer := cluster.find(name)):
        assert time.monotonic() < end, f"still {answer}"
        time.sleep(0.2)
    return answer


def test_a_job_is_found_by_its_exact_name_live_and_ended(
    cluster: Cluster, script: Callable[..., Path], run_key: str
) -> None:
    job_id = cluster.submit(run_key, script("#SBATCH --job-name=of-the-script", "sleep 1; exit 3"), ["--nodes=2"])

    live = cluster.find(run_key)
    last = found(cluster, run_key, lambda lookup: all(job.exit_code is not None for job in lookup.jobs))

    assert [job.job_id for job in live.jobs] == [job.job_id for job in last.jobs] == [job_id]
    assert live.complete
    job = last.jobs[0]
    assert (job.name, job.state, job.exit_code) == (run_key, JobState.FAILED, 3)
    assert job.nodes
    assert job.submitted_at is not None
    assert job.started_at is not None
    assert job.ended_at is not None
    assert abs(job.submitted_at.timestamp() - time.time()) < _PATIENCE
    assert job.started_at <= job.ended_at
    shorter = cluster.find(run_key[:-1])
    assert (shorter.jobs, shorter.complete) == ((), True)


def test_many_jobs_are_queried_at_once_and_unknown_ones_are_left_out(
    cluster: Cluster, script: Callable[..., Path], run_key: str
) -> None:
    good = cluster.submit(f"{run_key}-good", script("true"), [])
    killed = cluster.submit(f"{run_key}-killed", script("kill -TERM $$"), [])

    first, second = ended(cluster, good, killed)

    assert (first.state, first.exit_code, first.signal) == (JobState.COMPLETED, 0, 0)
    assert (second.state, second.signal) == (JobState.FAILED, 15)
    assert cluster.states([999_999_999]) == {}
    assert cluster.states([]) == {}


def test_a_job_has_its_size_its_own_environment_and_its_tasks(
    cluster: Cluster, script: Callable[..., Path], run_key: str, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FROM_THE_CALLER", "kept")
    names = "FROM_THE_CALLER SLURM_JOB_ID SLURM_JOB_NAME SLURM_JOB_NUM_NODES SLURM_NTASKS_PER_NODE SLURM_SUBMIT_DIR PWD"
    job_id = cluster.submit(
        run_key,
        script(
            "#SBATCH --nodes=2 --ntasks-per-node=2",
            f'for name in {names}; do echo "$name=${{!name}}"; done > seen',
            "srun bash -c 'echo $SLURM_PROCID/$SLURM_NTASKS' > tasks",
        ),
        [],
    )

    assert ended(cluster, job_id)[0].state is JobState.COMPLETED, (workspace / f"out-{job_id}").read_text()
    seen = dict(line.split("=", 1) for line in (workspace / "seen").read_text().splitlines())
    assert seen == {
        "FROM_THE_CALLER": "kept", "SLURM_JOB_ID": str(job_id), "SLURM_JOB_NAME": run_key, "SLURM_JOB_NUM_NODES": "2",
        "SLURM_NTASKS_PER_NODE": "2", "SLURM_SUBMIT_DIR": str(workspace), "PWD": str(workspace),
    }  # fmt: skip
    assert sorted((workspace / "tasks").read_text().split()) == ["0/4", "1/4", "2/4", "3/4"]


def test_a_job_has_its_submitters_umask_and_is_not_profiled(
    cluster: Cluster, script: Callable[..., Path], run_key: str, workspace: Path
) -> None:
    os.umask(0o027)

    job_id = cluster.submit(
        run_key,
        script("srun --ntasks=1 sh -c umask > seen", 'umask >> seen; echo "profile: $SLURM_PROFILE" >> seen'),
        [],
    )

    assert ended(cluster, job_id)[0].state is JobState.COMPLETED, (workspace / f"out-{job_id}").read_text()
    assert (workspace / "seen").read_text().splitlines() == ["0027", "0027", "profile: "]
    assert (workspace / f"out-{job_id}").stat().st_mode & 0o777 == 0o640


def test_a_cancelled_job_is_cancelled_and_cancelling_it_again_is_no_error(
    cluster: Cluster, script: Callable[..., Path], run_key: str
) -> None:
    job_id = cluster.submit(run_key, script("sleep 600"), [])

    cluster.cancel(job_id)
    last = found(cluster, run_key, lambda lookup: any(job.cancelled_by for job in lookup.jobs))
    cluster.cancel(job_id)

    assert last.jobs[0].state is JobState.CANCELLED
    assert last.jobs[0].cancelled_by in ("0", "root")


def test_a_job_waits_for_the_one_it_depends_on(cluster: Cluster, script: Callable[..., Path], run_key: str) -> None:
    first = cluster.submit(f"{run_key}-1", script("sleep 1"), [])
    second = cluster.submit(f"{run_key}-2", script("true"), [f"--dependency=afterok:{first}"])

    one, two = ended(cluster, first, second)

    assert two.state is JobState.COMPLETED
    assert two.started_at >= one.ended_at


@pytest.mark.parametrize("option", ["--time=tomorrow", "--nodes=many", "--no-such-option"])
def test_what_can_never_run_is_refused_for_good(
    option: str, cluster: Cluster, script: Callable[..., Path], run_key: str
) -> None:
    with pytest.raises(PermanentError):
        cluster.submit(run_key, script("true"), [option])

    assert cluster.find(run_key).jobs == ()


@pytest.mark.parametrize(
    ("option", "what"),
    [("--partition=nope", "no such partition"), ("--gres=gpu:8", "GPUs"), ("--reservation=nope", "reservation")],
)
def test_what_slurm_refuses_for_good_is_refused_with_advice(
    option: str, what: str, cluster: Cluster, script: Callable[..., Path], run_key: str
) -> None:
    if cluster.settings.kind == "local":
        pytest.skip("the embedded cluster takes every place and size")

    with pytest.raises(LaunchRefused, match=what) as refusal:
        cluster.submit(run_key, script("true"), [option])

    assert refusal.value.advice


def test_a_test_only_submission_reports_a_refusal_and_makes_no_job(cluster: Cluster, run_key: str) -> None:
    assert cluster.test_only(run_key, ["--nodes=2", "--time=5"]) is None
    refusal = cluster.test_only(run_key, ["--nodes=9999"])

    assert (refusal is None) == (cluster.settings.kind == "local")
    assert cluster.find(run_key).jobs == ()


def test_every_kind_of_cluster_can_be_opened() -> None:
    assert set(OPENERS) == set(get_args(ClusterKind)) == set(PLAIN_CLUSTERS)


def test_limits_name_the_partition(cluster: Cluster) -> None:
    limits = cluster.limits()

    assert limits.partitions
    if cluster.settings.kind != "local":
        assert limits.partition in limits.partitions
        assert limits.max_nodes is not None
        assert limits.max_nodes >= 2
        assert limits.gres is not None


def test_slots_are_available(cluster: Cluster) -> None:
    assert cluster.available_slots(1) >= 1
    assert cluster.available_slots(999) >= 1
