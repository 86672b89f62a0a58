"""The whole pipeline on a real two-node Slurm, the real NeMo-Run, and Ceph's real S3 gateway.

Nights of one scenario in one bucket: two good tests beside those that fail or cannot run; a slower commit for one, run from
the command line and over HTTPS; and the same night once more.
"""

import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from prefect.settings import PREFECT_API_URL
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from examples.practice.repositories import (
    PracticeRepositories,
    commit_behaviour,
    make_practice_repositories,
    move_main,
)
from nightbridge.flows import nightly_regression
from nightbridge.harvest.manifest import Manifest
from nightbridge.models import NightReport, RunRecord, Verdict, VerdictStatus
from nightbridge.slurm.attempt_files import read_submission
from tests.conftest import BUCKET
from tests.flows.practice_night import NIGHTBRIDGE, Entry, nightbridge, nightbridge_here, write_scenario, write_site
from tests.real.s3_servers import S3Server
from tests.real.slurm_daemons import SlurmDaemons

pytestmark = [pytest.mark.slurm, pytest.mark.s3, pytest.mark.launcher, pytest.mark.usefixtures("flows_here")]

STEPS = 40
WARMUP = 10
TWO_NODES = {"num_gpus": 4}
LLAMA = Entry(id="llama-small", sample="llama_small", cmd_args=TWO_NODES)
DEEPSEEK = Entry(id="deepseek-small", sample="deepseek_small", cmd_args=TWO_NODES)


@dataclass(frozen=True)
class Place:
    """Where the nights run: one cluster, one bucket, one workspace."""

    slurm: SlurmDaemons
    s3: S3Server
    repositories: PracticeRepositories
    folder: Path
    workspace: Path
    site: Path
    https_site: Path

    def scenario(self, *entries: Entry) -> Path:
        return write_scenario(self.folder / "conf", self.repositories, "real-nightly", *entries)

    def night(self, scenario: Path, night: str) -> NightReport:
        return nightly_regression(scenario, night=night, system=str(self.site))

    def attempt_dir(self, verdict: Verdict, attempt: int = 1) -> Path:
        return self.workspace / "runs" / verdict.run_key / f"a{attempt}"

    def objects(self, prefix: str) -> dict[str, Any]:
        """Key below the prefix to what S3 lists of the object."""
        pages = self.s3.client().get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=f"real/{prefix}/")
        return {
            item["Key"].removeprefix(f"real/{prefix}/"): item for page in pages for item in page.get("Contents", ())
        }

    def read(self, key: str) -> bytes:
        return bytes(self.s3.client().get_object(Bucket=BUCKET, Key=f"real/{key}")["Body"].read())

    def job_ids(self) -> list[int]:
        """Every job that accounting has ever heard of."""
        listed = self.slurm.command("sacct", "-nPX", "--starttime=2000-01-01", "--format=JobID").stdout
        return sorted(int(line) for line in listed.split())


@pytest.fixture(scope="module")
def place(
    slurm_cluster: SlurmDaemons,
    ceph: S3Server,
    environments_dir: Path,
    launcher_python: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Place:
    folder = tmp_path_factory.mktemp("real")
    workspace = folder / "workspace"
    site: dict[str, Any] = {
        "workspace": workspace,
        "environments": environments_dir,
        "cluster": {
            "kind": "slurm",
            "name": "debian",
            "slurm_conf": slurm_cluster.slurm_conf,
            "gpus_per_node": 2,
            "accounting_horizon": 6,
            "poll_interval": 2,
        },
    }
    return Place(
        slurm=slurm_cluster,
        s3=ceph,
        repositories=make_practice_repositories(folder / "practice"),
        folder=folder,
        workspace=workspace,
        site=write_site(folder / "site.toml", **site, store=ceph.store_settings(BUCKET, "real")),
        https_site=write_site(
            folder / "https.toml", **site, store=ceph.store_settings(BUCKET, "real", endpoint_url=ceph.https_url)
        ),
    )


def by_id(report: NightReport) -> dict[str, Verdict]:
    return {verdict.test_id: verdict for verdict in report.verdicts}


# --- the first night -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FirstNight:
    report: NightReport
    queue: str
    """What slurmctld and accounting say right after it."""
    accounting: str


@pytest.fixture(scope="module")
def first_night(place: Place) -> FirstNight:
    faults: dict[str, dict[str, Any]] = {
        "crashes": {"crash_at": 5},
        "ends-early": {"stop_at": 7},
        "diverges": {"nan_at": 12},
    }
    faulty = []
    for test_id, fault in faults.items():
        faulty.append(Entry(id=test_id, commit=commit_behaviour(place.repositories, test_id, **fault)))
        move_main(place.repositories, place.repositories.sha("main"))
    scenario = place.scenario(
        LLAMA,
        DEEPSEEK,
        *faulty,
        Entry(id="in-a-container", cmd_args={"container_image": "nvcr.io/nvidia/nemo:26.06"}),
        Entry(id="too-large", cmd_args={"num_gpus": 16}),
    )
    report = place.night(scenario, "2026-11-01")
    return FirstNight(
        report,
        queue=place.slurm.command("scontrol", "--oneliner", "show", "jobs").stdout,
        accounting=place.slurm.command(
            "sacct", "-nPX", "--starttime=2000-01-01", "--format=JobName%120,State,NNodes,NTasks"
        ).stdout,
    )


@pytest.fixture(scope="module", params=["llama-small", "deepseek-small"])
def verdict(request: pytest.FixtureRequest, first_night: FirstNight) -> Verdict:
    """Each verdict of a good test in the first night."""
    return by_id(first_night.report)[request.param]


@pytest.fixture(scope="module")
def manifest(place: Place, verdict: Verdict) -> Manifest:
    return Manifest.model_validate_json(place.read(f"{verdict.prefix}/manifest.json"))


def test_a_first_night_has_nothing_to_compare_with(first_night: FirstNight) -> None:
    for test_id in (LLAMA.id, DEEPSEEK.id):
        assert by_id(first_night.report)[test_id].status is VerdictStatus.NO_BASELINE


def test_each_attempt_is_one_job_on_two_nodes_that_slurm_never_requeues(
    place: Place, first_night: FirstNight, verdict: Verdict
) -> None:
    name = f"{verdict.run_key}-a1"
    accounted = [line for line in first_night.accounting.splitlines() if line.startswith(name)]
    known = [line for line in first_night.queue.splitlines() if f"JobName={name} " in line]

    assert accounted == [f"{name}|COMPLETED|2|"]
    assert len(known) == 1
    assert f"JobId={verdict.job_id} " in known[0]
    assert "Requeue=0" in known[0]
    assert "NodeList=node[1-2]" in known[0]
    assert "NumTasks=4" in known[0]


def test_the_bucket_holds_what_the_manifest_says_and_nothing_else(
    place: Place, verdict: Verdict, manifest: Manifest
) -> None:
    there = place.objects(verdict.prefix)

    assert set(there) == {file.path for file in manifest.files} | {"manifest.json"}
    assert {path: item["Size"] for path, item in there.items() if path != "manifest.json"} == {
        file.path: file.size for file in manifest.files
    }
    assert manifest.left_out == ()


def test_the_manifest_is_written_last(place: Place, verdict: Verdict) -> None:
    there = place.objects(verdict.prefix)
    manifest = there.pop("manifest.json")

    assert all(item["LastModified"] <= manifest["LastModified"] for item in there.values())


def test_every_object_is_byte_for_byte_what_the_job_wrote(place: Place, verdict: Verdict, manifest: Manifest) -> None:
    attempt = place.attempt_dir(verdict)
    submission = read_submission(attempt)
    assert submission is not None
    checkpoints = attempt / "output/checkpoints"
    newest = checkpoints / f"iter_{STEPS:07d}"
    written = {
        **{f"checkpoints/{path.relative_to(checkpoints)}": path for path in files_below(newest)},
        **{
            f"checkpoints/{name}": checkpoints / name
            for name in ("latest_checkpointed_iteration.txt", "latest_train_state.pt")
        },
        **{
            f"tensorboard/{path.relative_to(attempt / 'output/tb_logs')}": path
            for path in files_below(attempt / "output/tb_logs")
        },
        **{f"configs/{path.name}": path for path in files_below(attempt / "output/configs")},
        **{f"logs/{path.name}": path for path in submission.experiment_dir.glob("*.out")},
        "logs/launcher.log": attempt / "launcher.log",
        **{f"attempt/{name}": attempt / name for name in ATTEMPT_FILES},
    }
    ours = {"summary.json", "metrics.parquet"}

    assert {file.path for file in manifest.files} - ours == set(written)
    assert {path for path in written if "distcp" in path} == {
        f"checkpoints/iter_{STEPS:07d}/__{rank}_0.distcp" for rank in range(4)
    }
    assert len([path for path in written if path.startswith("logs/log-")]) == 1
    assert len([path for path in written if path.startswith("tensorboard/")]) == 1
    assert manifest.masks == 0
    for path, source in written.items():
        assert place.read(f"{verdict.prefix}/{path}") == source.read_bytes(), path


ATTEMPT_FILES = ("attempt.json", "intent.json", "job.sh", "submission.json", "claim", "exit_code")


def files_below(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def test_the_metrics_are_a_table_of_every_scalar_that_the_event_file_holds(
    place: Place, verdict: Verdict, manifest: Manifest, tmp_path: Path
) -> None:
    (tmp_path / "metrics.parquet").write_bytes(place.read(f"{verdict.prefix}/metrics.parquet"))
    table = pd.read_parquet(tmp_path / "metrics.parquet")
    tensorboard = event_file(place, verdict, manifest, tmp_path)

    points = {
        tag: [(event.step, event.value) for event in tensorboard.Scalars(tag)] for tag in scalar_tags(tensorboard)
    }
    assert {"lm loss", "grad-norm", "iteration-time", "throughput/tflops/device"} <= set(points)
    assert len(points["lm loss"]) == STEPS
    for tag, expected in points.items():
        rows = table[(table["tag"] == tag) & ~table["superseded"]].sort_values("step")
        assert list(zip(rows["step"], rows["value"], strict=True)) == expected, tag


def test_the_summary_is_what_the_event_file_says(
    place: Place, verdict: Verdict, manifest: Manifest, tmp_path: Path
) -> None:
    summary = json.loads(place.read(f"{verdict.prefix}/summary.json"))
    tensorboard = event_file(place, verdict, manifest, tmp_path)

    def values(tag: str, first: int = 1) -> list[float]:
        return [event.value for event in tensorboard.Scalars(tag) if event.step >= first]

    assert (summary["steps_expected"], summary["steps_done"], summary["non_finite_steps"]) == (STEPS, STEPS, 0)
    assert (summary["steady_first_step"], summary["steady_last_step"]) == (WARMUP + 1, STEPS)
    assert summary["step_time"] == pytest.approx(statistics.median(values("iteration-time", WARMUP + 1)))
    assert summary["tflops_per_gpu"] == pytest.approx(statistics.median(values("throughput/tflops/device", WARMUP + 1)))
    assert summary["peak_memory"] == pytest.approx(max(values("memory/mem-max-allocated-gigabytes")))
    assert summary["final_loss"] == pytest.approx(values("lm loss")[-1])
    assert summary["final_loss"] < values("lm loss")[0]
    assert (summary["source"], summary["damage"]) == ("tensorboard", [])


def event_file(place: Place, verdict: Verdict, manifest: Manifest, folder: Path) -> EventAccumulator:
    """TensorBoard's own reader on the object in the bucket."""
    (stored,) = (file.path for file in manifest.files if file.kind == "tensorboard")
    path = folder / Path(stored).name
    path.write_bytes(place.read(f"{verdict.prefix}/{stored}"))
    return EventAccumulator(str(path), size_guidance={"scalars": 0, "tensors": 0}).Reload()


def scalar_tags(tensorboard: EventAccumulator) -> list[str]:
    return [tag for tag in tensorboard.Tags()["scalars"] if not tag.endswith(" vs samples")]


def test_the_record_pins_both_repositories_and_the_launchers_environment(place: Place, verdict: Verdict) -> None:
    record = RunRecord.model_validate(json.loads(place.read(f"{verdict.prefix}/manifest.json"))["record"])

    assert record.checkout.nemo_run is not None
    assert record.checkout.environment is not None
    assert record.checkout.megatron_bridge.commit == place.repositories.sha("main")
    assert record.checkout.nemo_run.commit == place.repositories.sha("main", "run")
    assert record.checkout.environment.nemo_run_version == "0.11.1"
    assert (record.plan.nodes, record.plan.tasks_per_node) == (2, 2)
    assert record.job.outcome == "succeeded"


def test_verdict_and_report_lie_beside_the_runs(place: Place, first_night: FirstNight, verdict: Verdict) -> None:
    run = verdict.prefix.rpartition("/")[0]

    assert Verdict.model_validate_json(place.read(f"{run}/verdict.json")) == verdict
    report = place.read("reports/2026-11-01/real-nightly.html").decode()
    assert first_night.report.report.endswith("reports/2026-11-01/real-nightly.html")
    assert verdict.test_id in report


@pytest.mark.parametrize(
    ("test_id", "state", "status", "reason"),
    [
        ("crashes", "FAILED", VerdictStatus.FAILED, "planned crash before iteration 5"),
        ("ends-early", "COMPLETED", VerdictStatus.SHORT, "7 of 40 steps"),
        ("diverges", "COMPLETED", VerdictStatus.FAILED, "29 steps without a finite loss"),
    ],
)
def test_each_fault_gets_its_own_verdict_beside_good_tests_and_is_harvested(
    place: Place, first_night: FirstNight, test_id: str, state: str, status: VerdictStatus, reason: str
) -> None:
    verdict = by_id(first_night.report)[test_id]

    assert verdict.status is status
    assert reason in "; ".join(verdict.reasons)
    assert f"{verdict.run_key}-a1|{state}|1|" in first_night.accounting.splitlines()
    assert "manifest.json" in place.objects(verdict.prefix)
    assert first_night.report.exit_code == 3


@pytest.mark.parametrize(
    ("test_id", "reason"),
    [
        ("in-a-container", "this cluster has no pyxis to run containers with"),
        ("too-large", "num_gpus 16 need 8 nodes, and the partition has 2"),
    ],
)
def test_what_the_cluster_cannot_do_is_told_in_one_line_and_never_started(
    place: Place, first_night: FirstNight, test_id: str, reason: str
) -> None:
    verdict = by_id(first_night.report)[test_id]

    assert (verdict.status, verdict.exit_code) == (VerdictStatus.INVALID, 2)
    assert len([line for line in verdict.reasons if reason in line]) == 1
    assert not (place.workspace / "runs" / verdict.run_key).exists()


# --- a night with a slower commit, from the command line, over HTTPS ---------------------------------------------------


@dataclass(frozen=True)
class SlowNight:
    command: "subprocess.CompletedProcess[str]"
    jobs_before: list[int]
    jobs_after: list[int]

    @property
    def report(self) -> NightReport:
        document = json.loads(self.command.stdout)
        del document["exit_code"]
        return NightReport.model_validate(document)


@pytest.fixture(scope="module")
def slow_commit(place: Place) -> str:
    return commit_behaviour(place.repositories, "Synchronise after every bucket", step_time_factor=1.2)


@pytest.fixture(scope="module")
def slow_night(place: Place, first_night: FirstNight, slow_commit: str) -> SlowNight:
    before = place.job_ids()
    command = run_night(place, place.https_site, "2026-11-02")
    return SlowNight(command, before, place.job_ids())


def run_night(place: Place, site: Path, night: str) -> "subprocess.CompletedProcess[str]":
    scenario = place.scenario(LLAMA)
    return nightbridge("run", scenario, "--system", site, "--night", night, "--json", environment=client_environment())


def client_environment() -> dict[str, str]:
    """What a process needs to reach the tests' Prefect server."""
    return {**os.environ, "PREFECT_API_URL": str(PREFECT_API_URL.value())}


def test_stdout_is_one_json_document_and_the_exit_code_says_regressed(slow_night: SlowNight) -> None:
    document = json.loads(slow_night.command.stdout)

    assert slow_night.command.returncode == 1, slow_night.command.stderr[-3000:]
    assert document["exit_code"] == 1
    assert "night 2026-11-02" in slow_night.command.stderr
    assert "Traceback" not in slow_night.command.stderr


def test_a_slower_commit_is_a_regression_of_step_time_by_what_it_costs(
    place: Place, slow_night: SlowNight, first_night: FirstNight
) -> None:
    for test_id, verdict in by_id(slow_night.report).items():
        changes = {comparison.metric: comparison for comparison in verdict.comparisons}

        assert verdict.status is VerdictStatus.REGRESSED, test_id
        assert changes["step_time"].status == "regressed"
        assert changes["step_time"].change == pytest.approx(0.2, abs=0.03)
        assert changes["peak_memory"].status == "passed"
        assert verdict.baseline_runs == (by_id(first_night.report)[test_id].run_key,)
        assert json.loads(place.read(f"{verdict.prefix}/manifest.json"))["pins"]["megatron_bridge"] != (
            place.repositories.sha("main")
        )


def test_a_harvest_over_https_is_as_whole_as_one_over_http(place: Place, slow_night: SlowNight) -> None:
    for verdict in slow_night.report.verdicts:
        manifest = Manifest.model_validate_json(place.read(f"{verdict.prefix}/manifest.json"))
        checkpoints = place.attempt_dir(verdict) / "output/checkpoints"
        stored = {file.path: file for file in manifest.files if file.kind == "checkpoint"}

        assert set(place.objects(verdict.prefix)) == {file.path for file in manifest.files} | {"manifest.json"}
        assert len(stored) > 4
        for path in stored:
            assert place.read(f"{verdict.prefix}/{path}") == (checkpoints.parent / path).read_bytes(), path


def test_the_same_night_again_submits_nothing_and_says_the_same(place: Place, slow_night: SlowNight) -> None:
    again = place.night(place.scenario(LLAMA), "2026-11-02")

    # The test and the two runs that confirm it, or four where these disagree.
    assert len(slow_night.jobs_after) - len(slow_night.jobs_before) in (3, 5)
    assert place.job_ids() == slow_night.jobs_after
    assert by_id(again) == by_id(slow_night.report)


def test_the_doctor_reaches_a_store_whose_certificate_an_authority_of_the_site_has_signed(
    place: Place, capfd: pytest.CaptureFixture[str]
) -> None:
    well = nightbridge_here(capfd, "doctor", "--system", place.https_site)
    untrusting = place.folder / "untrusting.toml"
    lines = place.https_site.read_text().splitlines()
    untrusting.write_text("\n".join(line for line in lines if not line.startswith("ca_bundle")))
    ill = nightbridge_here(capfd, "doctor", "--system", untrusting)

    assert well.returncode == 0, well.stdout + well.stderr
    assert ill.returncode == 4
    (store,) = (line for line in ill.stdout.splitlines() if line.startswith("✗"))
    assert "store" in store
    assert "ca_bundle" in store


# --- a workspace that the nodes do not see ---------------------------------------------------------------------------


MOST_UNSEEN = 2
"""Attempts, one on each node."""


def test_a_workspace_that_the_nodes_do_not_see_is_said_so_by_name(place: Place) -> None:
    # A held job waits until the workspace is gone; meanwhile the flow, which still sees it, stands still.
    held = place.folder / "held.toml"
    changed = f'[cluster]\nextra_sbatch_args = ["--hold"]\nmax_attempts = {MOST_UNSEEN}'
    held.write_text(place.site.read_text().replace("[cluster]", changed))
    scenario = place.scenario(Entry(id="unseen"))
    command: list[str | Path] = [
        NIGHTBRIDGE,
        "run",
        scenario,
        "--system",
        held,
        "--night",
        "2026-11-04",
        "--json",
        "-v",
    ]
    with subprocess.Popen(
        command, env=client_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        submitted = [
            run_unseen(place, process.pid, found[1])
            for line in process.stderr
            if (found := re.search(r"job (\d+) on debian is unseen-", line))
        ]
        report, code = json.loads(process.communicate()[0]), process.wait()

    (verdict,) = report["verdicts"]
    assert (verdict["status"], code) == ("infrastructure", 4)
    # The second attempt avoids the node of the first.
    assert "workspace not visible on node2" in "; ".join(verdict["reasons"])
    assert len(submitted) == MOST_UNSEEN


def run_unseen(place: Place, pid: int, job_id: str) -> str:
    """Let a held job run to its end while its workspace is away."""
    away = place.workspace.with_name("away")
    os.kill(pid, signal.SIGSTOP)
    place.workspace.rename(away)
    place.slurm.command("scontrol", "release", job_id)
    end = time.monotonic() + 240
    while place.slurm.command("squeue", "-h", "-j", job_id, "-t", "PD,CF,R,CG").stdout.strip():
        assert time.monotonic() < end, f"job {job_id} did not end"
        time.sleep(0.1)
    # Since 23.02 slurmstepd makes the folders of a job's output file.
    shutil.rmtree(place.workspace, ignore_errors=True)
    away.rename(place.workspace)
    os.kill(pid, signal.SIGCONT)
    return job_id
