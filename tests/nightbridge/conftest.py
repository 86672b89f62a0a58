"""Runs as the harvest hands them over, made from measured steps with the project's own definition of a summary."""

import io
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from nightbridge.gate.gate import compare
from nightbridge.harvest.manifest import Manifest, commit_manifest
from nightbridge.history.reading import HistoryRow, row_of
from nightbridge.models import (
    Checkout,
    GatePolicy,
    GitRepo,
    Image,
    Job,
    JobState,
    JobStatus,
    LauncherEnvironment,
    LaunchPlan,
    Outcome,
    PinnedRepository,
    RunRecord,
    RunSpec,
    StoredFile,
    StoreSettings,
    Summary,
    TestDefinition,
    Verdict,
    VerdictStatus,
)
from nightbridge.store.checksum import sha256_hex
from nightbridge.store.directory import DirectoryStore

STEPS = 50
WARMUP = 10
BRIDGE_URL = "https://github.com/NVIDIA-NeMo/Megatron-Bridge.git"
RUN_URL = "https://github.com/NVIDIA-NeMo/Run.git"


def summary_of(
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


@pytest.fixture(name="summary_of")
def _summary_of() -> Callable[..., Summary]:
    return summary_of


@pytest.fixture
def make_spec() -> Callable[..., RunSpec]:
    def make(
        night: str = "2026-11-10",
        *,
        test_id: str = "llama3-8b",
        sweep_point: dict[str, Any] | None = None,
        repeat: int = 0,
        **fields: Any,
    ) -> RunSpec:
        given = {
            "cmd_args": {"model_recipe_name": "llama3_8b", "num_gpus": 8, "max_steps": STEPS},
            "git_repos": (GitRepo(url=BRIDGE_URL),),
            "nemo_run_repo": GitRepo(url=RUN_URL),
        } | fields
        test = TestDefinition(id=test_id, name=test_id, **given)
        return RunSpec(scenario="nightly", night=night, test=test, sweep_point=sweep_point or {}, repeat=repeat)

    return make


@pytest.fixture
def make_record(make_spec: Callable[..., RunSpec]) -> Callable[..., RunRecord]:
    def make(
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
        if gate:
            spec_fields["gate"] = gate
        spec = make_spec(night, **spec_fields)
        folder = Path("/shared/runs") / spec.run_key / "a1"
        status = JobStatus(job_id=4711, state=JobState.COMPLETED, nodes="node[1-2]")
        return RunRecord(
            spec=spec,
            checkout=Checkout(
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
            ),
            image=Image(kind="sqsh", reference="nvcr.io/nvidia/nemo:26.08", digest="sha256:" + "d" * 64),
            plan=LaunchPlan(
                run_key=spec.run_key,
                attempt=1,
                attempt_dir=folder,
                argv=("python",),
                cwd=folder,
                nodes=1,
                tasks_per_node=8,
                max_steps=max_steps,
            ),
            jobs=(
                Job(
                    run_key=spec.run_key,
                    attempt=1,
                    job_id=4711,
                    cluster="dgx",
                    attempt_dir=folder,
                    script=folder / "job.sh",
                    experiment_dir=folder,
                    submitted_at=datetime(2026, 11, 10, tzinfo=UTC),
                    status=status,
                    outcome=outcome,
                    outcome_reason=outcome_reason,
                ),
            ),
            store_url="s3://bucket/nightly",
            prefix=f"runs/{spec.test_slug}/{night}/{spec.run_key}/a1",
            series="llama3-8b-0123456789ab",
            summary=summary or summary_of(),
            harvested_at=datetime(2026, 11, 1, 3, tzinfo=UTC) + timedelta(days=int(night[8:10])),
        )

    return make


@pytest.fixture
def make_row(make_record: Callable[..., RunRecord]) -> Callable[..., HistoryRow]:
    """A row as the compare stage adds it, with the verdict the gate gives, or another one."""

    def make(
        summary: Summary | None = None,
        night: str = "2026-11-09",
        *,
        verdict: VerdictStatus | None = None,
        **fields: Any,
    ) -> HistoryRow:
        record = make_record(summary, night, **fields)
        judged: Verdict = compare(record, ())
        return row_of(record, judged.model_copy(update={"status": verdict}) if verdict else judged)

    return make


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    return DirectoryStore(StoreSettings(url=f"file://{tmp_path}/store"))


def scalar_table(**curves: Mapping[int, float]) -> pd.DataFrame:
    """Scalars as `metrics.parquet` has them; `lm_loss` stands for `lm loss`, `grad_norm` for `grad-norm`."""
    names = {"lm_loss": "lm loss", "grad_norm": "grad-norm", "learning_rate": "learning-rate"}
    rows = [
        (names[name], step, value, False) for name, curve in curves.items() for step, value in sorted(curve.items())
    ]
    return pd.DataFrame(rows, columns=["tag", "step", "value", "superseded"])


def commit_run(
    store: DirectoryStore, record: RunRecord, losses: Mapping[int, float] | None = None, attempt: int = 1
) -> RunRecord:
    """Store a run as the harvest does: record and scalars, then the manifest."""
    losses = {step: 10.0 - 0.1 * step for step in range(1, 51)} if losses is None else losses
    table = io.BytesIO()
    scalar_table(lm_loss=losses).to_parquet(table, index=False)
    files = []
    for path, data in (("record.json", record.model_dump_json().encode()), ("metrics.parquet", table.getvalue())):
        store.put(f"{record.prefix}/{path}", data)
        files.append(StoredFile(path=path, size=len(data), sha256=sha256_hex(data), kind="other"))
    manifest = Manifest(
        run_key=record.spec.run_key,
        attempt=attempt,
        prefix=record.prefix,
        files=tuple(files),
        job=record.job,
        committed_at=datetime.now(UTC),
    )
    commit_manifest(store, manifest)
    return record


@pytest.fixture
def commit() -> Callable[..., RunRecord]:
    """Stores a run as the harvest does, scalars included."""
    return commit_run
