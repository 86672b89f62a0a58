"""Builders of models that many tests share: plain functions with usual values, of which a test names what it is about.

Fixtures of the same names in the conftest files only hand them on. Nothing here starts, reads or writes anything but
what a test passes in.
"""

import importlib.util
import io
import math
import random
import statistics
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from nightbridge.attribution.attribution_plan import AttributionPlan
from nightbridge.attribution.attribution_result import ExchangeRun, next_designs
from nightbridge.attribution.axes import Factor
from nightbridge.attribution.factor_search import Design
from nightbridge.bisect.search import BisectPolicy, Levels
from nightbridge.files import write_model
from nightbridge.gate.decisions import Decision
from nightbridge.gate.run_verdict import compare
from nightbridge.harvest.manifest import Manifest, commit_manifest
from nightbridge.history.rows import HistoryRow, row_of
from nightbridge.models import (
    Checkout,
    Checkpoint,
    CheckpointState,
    GatePolicy,
    GitRepo,
    Image,
    Job,
    JobState,
    JobStatus,
    LauncherEnvironment,
    LaunchPlan,
    NightReport,
    Outcome,
    PinnedRepository,
    RunRecord,
    RunSpec,
    StoredFile,
    Summary,
    TestDefinition,
    Verdict,
    VerdictStatus,
    make_run_key,
    utc_now,
)
from nightbridge.nights.records import NightStart, NightTest, record_end, record_start
from nightbridge.slurm.attempt_files import SUBMISSION_FILE, Submission
from nightbridge.store.checksum import sha256_hex
from nightbridge.store.object_store import ObjectStore

STEPS = 50
WARMUP = 10
BRIDGE_URL = "https://github.com/NVIDIA-NeMo/Megatron-Bridge.git"
RUN_URL = "https://github.com/NVIDIA-NeMo/Run.git"


_TORCH_FILES = Path(__file__).parents[1] / (
    "examples/practice/template/bridge/src/megatron/bridge/training/torch_files.py"
)
_specification = importlib.util.spec_from_file_location("torch_files", _TORCH_FILES)
assert _specification is not None
assert _specification.loader is not None
torch_files: Any = importlib.util.module_from_spec(_specification)
"""What writes files as torch does, of the practice workload."""
_specification.loader.exec_module(torch_files)


def saved_shards(sizes: Mapping[str, int], chance: random.Random) -> dict[str, bytes]:
    """Shards of a distributed checkpoint, each of one float32 tensor of so many bytes, and their `.metadata`."""
    values = {name: np.frombuffer(chance.randbytes(size // 4 * 4), dtype=np.float32) for name, size in sizes.items()}
    files = {name: torch_files.torch_save(each) for name, each in values.items()}
    metadata = saved_metadata({name: (len(file), values[name].nbytes) for name, file in files.items()})
    return files | {".metadata": torch_files.pickle_metadata(metadata)}


def saved_metadata(sizes: Mapping[str, tuple[int, int]]) -> Any:
    """What `.metadata` says of shards of one float32 tensor each, given the bytes of the shard and of the tensor."""
    contents, places = {}, {}
    for name, (length, size) in sizes.items():
        shape, offset = torch_files.Size((size // 4,)), torch_files.Size((0,))
        contents[f"model.{name}"] = torch_files.TensorStorageMetadata(
            properties=torch_files.TensorProperties(),
            size=shape,
            chunks=[torch_files.ChunkStorageMetadata(offsets=offset, sizes=shape)],
        )
        index = torch_files.MetadataIndex(fqn=f"model.{name}", offset=offset, index=0)
        places[index] = torch_files.StorageInfo(relative_path=name, offset=0, length=length)
    return torch_files.Metadata(state_dict_metadata=contents, planner_data=None, storage_data=places)


def make_summary(
    step_times: Sequence[float] = (1.0,) * STEPS,
    losses: Sequence[float | None] | None = None,
    tflops: float | None = 700.0,
    memory: float | None = 80.0,
    expected: int | None = STEPS,
) -> Summary:
    """Summarise measured steps: medians over the steps after the warm-up, loss of the last step."""
    steady = step_times[WARMUP:]
    losses = [10.0 - 0.1 * step for step in range(len(step_times))] if losses is None else losses
    return Summary(
        steps_expected=expected,
        steps_done=len(step_times),
        step_time=statistics.median(steady) if steady else None,
        tflops_per_gpu=tflops,
        peak_memory=memory,
        final_loss=losses[-1] if losses else None,
        non_finite_steps=sum(loss is None or not math.isfinite(loss) for loss in losses),
        source="log",
    )


LAUNCHER_ARGS: Mapping[str, Any] = {
    "gpu_type": "h100",
    "num_gpus": 16,
    "container_image": "nvcr.io#nvidia/nemo:26.04",
    "model_family_name": "llama",
    "model_recipe_name": "llama3_8b",
    "max_steps": STEPS,
}
"""The `[cmd_args]` of a run that the launcher accepts."""


def make_test(
    args: Mapping[str, Any] | None = None,
    *,
    version: str = "v0.4.2",
    url: str = "https://x/Megatron-Bridge",
    **fields: Any,
) -> TestDefinition:
    """A test that the launcher of a version accepts, with further `[cmd_args]`; None removes one."""
    written = {key: value for key, value in {**LAUNCHER_ARGS, **(args or {})}.items() if value is not None}
    given = {
        "id": "t",
        "source": "t.toml",
        "git_repos": (GitRepo(url=url, commit=version),),
        "nemo_run_repo": GitRepo(url="https://x/Run"),
    } | fields
    return TestDefinition(name=given["id"], cmd_args=written, **given)


def make_image_spec(image: str | None, night: str = "2026-11-21", **cmd_args: Any) -> RunSpec:
    """A run in an image; None names none."""
    repo = GitRepo(url="https://git.example.org/x.git")
    if image is not None:
        cmd_args["container_image"] = image
    test = TestDefinition(id="t", name="t", cmd_args=cmd_args, git_repos=(repo,), nemo_run_repo=repo)
    return RunSpec(scenario="s", night=night, test=test)


def make_spec(
    night: str = "2026-11-10",
    *,
    test_id: str = "llama3-8b",
    sweep_point: dict[str, Any] | None = None,
    repeat: int = 0,
    **fields: Any,
) -> RunSpec:
    """A run of a test; further fields are the test's."""
    given = {
        "cmd_args": {"model_recipe_name": "llama3_8b", "num_gpus": 8, "max_steps": STEPS},
        "git_repos": (GitRepo(url=BRIDGE_URL),),
        "nemo_run_repo": GitRepo(url=RUN_URL),
    } | fields
    test = TestDefinition(id=test_id, name=test_id, **given)
    return RunSpec(scenario="nightly", night=night, test=test, sweep_point=sweep_point or {}, repeat=repeat)


def make_checkout(commit: str = "a" * 40, subject: str = "Tidy the docs") -> Checkout:
    """Both repositories at a commit, with a launcher environment."""
    return Checkout(
        megatron_bridge=PinnedRepository(
            url=BRIDGE_URL,
            ref="main",
            commit=commit,
            path=Path("/shared/bridge"),
            subject=subject,
            describe=f"v0.6.0-3-g{commit[:9]}",
        ),
        nemo_run=PinnedRepository(url=RUN_URL, ref="main", commit="b" * 40, path=Path("/shared/run")),
        environment=LauncherEnvironment(python=Path("/shared/env/bin/python"), digest="c" * 64),
    )


def make_plan(run_key: str, folder: Path, **fields: Any) -> LaunchPlan:
    """The launch plan of a run's first attempt, whose folder is given."""
    usual = {"argv": ("python",), "cwd": folder, "nodes": 1, "tasks_per_node": 8}
    return LaunchPlan(run_key=run_key, attempt=1, attempt_dir=folder, **usual | fields)


def make_job(run_key: str, folder: Path, **fields: Any) -> Job:
    """The job of a run's first attempt, whose folder is given."""
    usual: dict[str, Any] = {
        "job_id": 4711,
        "cluster": "dgx",
        "script": folder / "job.sh",
        "experiment_dir": folder,
        "submitted_at": datetime(2026, 11, 10, tzinfo=UTC),
    }
    return Job(run_key=run_key, attempt=1, attempt_dir=folder, **usual | fields)


def record_submission(
    folder: Path, name: str, job_id: int, *, cluster: str = "local", script: Path | None = None
) -> None:
    """Record in an attempt's folder that its job is in Slurm."""
    script = script or folder
    submission = Submission(
        job_id=job_id,
        name=name,
        cluster=cluster,
        script=script,
        launcher_script=script,
        experiment_dir=folder,
        submitted_at=utc_now(),
    )
    write_model(folder / SUBMISSION_FILE, submission)


def make_checkpoint(
    folder: Path, state: CheckpointState = CheckpointState.VERIFIED, reason: str = "", iteration: int = STEPS
) -> Checkpoint:
    """What is known of a checkpoint below a run's folder."""
    return Checkpoint(path=folder / f"checkpoints/iter_{iteration:07}", iteration=iteration, state=state, reason=reason)


def make_record(
    summary: Summary | None = None,
    night: str = "2026-11-10",
    *,
    outcome: Outcome | None = Outcome.SUCCEEDED,
    outcome_reason: str = "",
    gate: GatePolicy | None = None,
    commit: str = "a" * 40,
    subject: str = "Tidy the docs",
    max_steps: int | None = STEPS,
    **spec_fields: Any,
) -> RunRecord:
    """A harvested run; further fields are its spec's."""
    if gate:
        spec_fields["gate"] = gate
    spec = make_spec(night, **spec_fields)
    folder = Path("/shared/runs") / spec.run_key / "a1"
    status = JobStatus(job_id=4711, state=JobState.COMPLETED, nodes="node[1-2]")
    job = make_job(spec.run_key, folder, status=status, outcome=outcome, outcome_reason=outcome_reason)
    return RunRecord(
        spec=spec,
        checkout=make_checkout(commit, subject),
        image=Image(kind="sqsh", reference="nvcr.io/nvidia/nemo:26.08", digest="sha256:" + "d" * 64),
        plan=make_plan(spec.run_key, folder, max_steps=max_steps),
        jobs=(job,),
        store_url="s3://bucket/nightly",
        prefix=f"runs/{spec.test_slug}/{night}/{spec.run_key}/a1",
        series="llama3-8b-0123456789ab",
        summary=summary or make_summary(),
        checkpoints=(make_checkpoint(folder),),
        harvested_at=datetime(2026, 11, 1, 3, tzinfo=UTC) + timedelta(days=int(night[8:10])),
    )


def make_row(
    summary: Summary | None = None,
    night: str = "2026-11-09",
    *,
    verdict: VerdictStatus | None = None,
    **fields: Any,
) -> HistoryRow:
    """A row as the compare stage adds it, with the verdict that the gate gives, or another one."""
    record = make_record(summary, night, **fields)
    judged = compare(record, ())
    return row_of(record, judged.model_copy(update={"status": verdict}) if verdict else judged)


def make_verdict(
    status: VerdictStatus, *reasons: str, test_id: str = "llama3-8b", night: str = "2026-11-21", **fields: Any
) -> Verdict:
    """A verdict on a stored run, with its reasons."""
    run_key = f"{test_id}-{night}-0123456789"
    usual: dict[str, Any] = {
        "run_key": run_key,
        "store_url": "s3://bucket/nightly",
        "prefix": f"runs/{test_id}/{night}/{run_key}/a1",
    }
    return Verdict(test_id=test_id, night=night, status=status, reasons=reasons, **usual | fields)


def scalar_table(**curves: Mapping[int, float]) -> pd.DataFrame:
    """Scalars as `metrics.parquet` has them; `lm_loss` stands for `lm loss`, `grad_norm` for `grad-norm`."""
    names = {
        "lm_loss": "lm loss",
        "grad_norm": "grad-norm",
        "learning_rate": "learning-rate",
        "iteration_time": "iteration-time",
    }
    rows = [
        (names[name], step, value, False) for name, curve in curves.items() for step, value in sorted(curve.items())
    ]
    return pd.DataFrame(rows, columns=["tag", "step", "value", "superseded"])


def commit_run(
    store: ObjectStore, record: RunRecord, losses: Mapping[int, float] | None = None, attempt: int = 1
) -> RunRecord:
    """Store a run as the harvest does: record and scalars, then the manifest."""
    losses = {step: 10.0 - 0.1 * step for step in range(1, 51)} if losses is None else losses
    table = io.BytesIO()
    scalar_table(lm_loss=losses).to_parquet(table, index=False)
    data = table.getvalue()
    store.put(f"{record.prefix}/metrics.parquet", data)
    metrics = StoredFile(path="metrics.parquet", size=len(data), sha256=sha256_hex(data), kind="metrics")
    manifest = Manifest(
        run_key=record.spec.run_key,
        attempt=attempt,
        prefix=record.prefix,
        files=(metrics,),
        job=record.job,
        committed_at=datetime.now(UTC),
        record=record,
    )
    commit_manifest(store, manifest)
    return record


def store_night(
    store: ObjectStore,
    night: str,
    verdicts: Mapping[str, VerdictStatus],
    workspace: Path = Path("/shared"),
    **fields: Any,
) -> tuple[NightStart, tuple[Verdict, ...]]:
    """A night as it is kept: its beginning, a verdict for each test, and its end. `fields` are the verdicts'."""
    keys = {
        test: make_run_key(scenario="nightly", night=night, test_id=test, sweep_point={}, iteration=1, repeat=0)
        for test in verdicts
    }
    start = NightStart(
        night=night,
        scenario="nightly",
        cluster="local",
        workspace=workspace,
        begun_at=utc_now(),
        tests=tuple(NightTest(test_id=test, run_key=key) for test, key in keys.items()),
    )
    record_start(store, start)
    judged = tuple(
        Verdict(run_key=keys[test], test_id=test, night=night, status=status, **fields)
        for test, status in verdicts.items()
    )
    for verdict in judged:
        folder = f"runs/{verdict.test_id}/{night}/{verdict.run_key}"
        store.put(f"{folder}/verdict.json", verdict.model_dump_json().encode())
    record_end(store, NightReport(scenario="nightly", night=night, verdicts=judged, report=""))
    return start, judged


def make_decision(test_id: str, until: str = "") -> Decision:
    """A decision about a level that began on 2026-11-19."""
    return Decision(
        kind="acknowledged",
        cluster="local",
        series=f"{test_id}-0123456789ab",
        test_id=test_id,
        since="2026-11-19",
        night="2026-11-20",
        until=until,
        who="ada",
        why="known",
        when=datetime(2026, 11, 21, tzinfo=UTC),
    )


ATTRIBUTED_FACTORS = (
    Factor(axis="image", good="nemo@sha256:1", bad="nemo@sha256:2"),
    Factor(axis="megatron_bridge", key="megatron_bridge", good="a" * 40, bad="e" * 40),
    Factor(axis="configuration", key="cmd_args.mbs", good=1, bad=2),
    Factor(axis="nodes", good=["node1"], bad=["node7"]),
)
ATTRIBUTION_PLAN = AttributionPlan(
    attribution_id="2026-11-21-attribute-01234567",
    test_id="t",
    cluster="dgx",
    series="llama3-8b-0123456789ab",
    metric="step_time",
    statistic="step_time",
    unit="s",
    since="2026-11-21",
    good_night="2026-11-20",
    bad_night="2026-11-21",
    good_order="2026-11-20",
    bad_order="2026-11-21",
    good="runs/good",
    bad="runs/bad",
    levels=Levels(good=1.0, bad=1.08, noise=0.005),
    factors=ATTRIBUTED_FACTORS,
    policy=BisectPolicy(most_runs=40),
)


def exchange_run(
    design: Design, value: float | None, number: int = 1, status: VerdictStatus = VerdictStatus.PASSED
) -> ExchangeRun:
    """A run of an hour on eight GPUs."""
    return ExchangeRun(
        number=number, design=design, run_key=f"k{number}", status=status, value=value, gpu_seconds=8 * 3600.0,
        prefix=f"runs/{number}",
    )  # fmt: skip


def exchange_runs(
    culprits: Sequence[int], plan: AttributionPlan = ATTRIBUTION_PLAN, most: int = 40
) -> list[ExchangeRun]:
    """The runs until it ends, where these factors share the change."""
    runs: list[ExchangeRun] = []
    while designs := next_designs(plan, runs, 1, 8.0)[0]:
        for design in designs:
            part = sum(design[culprit] for culprit in culprits) / len(culprits)
            runs.append(exchange_run(design, 1.0 + 0.08 * part, len(runs) + 1))
    return runs
