"""What a run of Llama 3 8B on eight H100 leaves (log, event file, dumped configuration), as the real writers make it,
harvested as the pipeline does it: measured, classified, committed to a store, compared with twenty good nights.
"""

import random
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pandas as pd
import yaml
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary as EventSummary
from tensorboard.summary.writer.record_writer import RecordWriter

from nightbridge.gate.evidence import gather_evidence
from nightbridge.gate.run_verdict import compare
from nightbridge.harvest.manifest import MANIFEST, METRICS, RECORD, Manifest, commit_manifest
from nightbridge.history.rows import HistoryRow, row_of
from nightbridge.models import GatePolicy, Job, JobState, JobStatus, RunRecord, StoredFile, Verdict
from nightbridge.outputs.curves import read_curves
from nightbridge.outputs.experiment import read_facts, read_run
from nightbridge.outputs.measurements import read_settings, summarise
from nightbridge.outputs.run_evidence import evidence
from nightbridge.slurm.outcome import classify_job
from nightbridge.store.checksum import sha256_hex
from nightbridge.store.object_store import ObjectStore
from tests.builders import make_record

STEPS, GLOBAL_BATCH, SEQUENCE = 50, 128, 8192
STARTED = datetime(2026, 11, 1, 3, tzinfo=UTC)
START_UP, FIRST_STEP, STEP_TIME, TFLOPS = 90.0, 45.0, 10.0, 700.0

DUMP: dict[str, Any] = {
    "_target_": "megatron.bridge.training.config.ConfigContainer",
    "comm_overlap": {"data_parallel_size": 4},
    "dataset": {"seq_length": SEQUENCE, "random_seed": 1234},
    "mixed_precision": {"bf16": True, "fp16": False, "fp8": None, "fp8_recipe": "tensorwise", "fp4": None},
    "model": {
        "seq_length": SEQUENCE,
        "vocab_size": 128256,
        "transformer": {
            "bf16": True,
            "tensor_model_parallel_size": 1,
            "pipeline_model_parallel_size": 1,
            "context_parallel_size": 2,
            "num_layers": 32,
            "hidden_size": 4096,
            "ffn_hidden_size": 14336,
            "gated_linear_unit": True,
            "num_attention_heads": 32,
            "num_query_groups": 8,
            "kv_channels": 128,
            "num_moe_experts": None,
            "deterministic_mode": False,
        },
    },
    "optimizer": {"lr": 3e-4, "min_lr": 3e-5, "clip_grad": 1.0},
    "profiling": None,
    "scheduler": {"lr_decay_style": "cosine", "lr_decay_iters": STEPS, "lr_warmup_iters": 10},
    "train": {"train_iters": STEPS, "global_batch_size": GLOBAL_BATCH, "micro_batch_size": 1},
}
"""The keys that matter of what Megatron-Bridge v0.4 dumps of this recipe, with its values."""

ARGUMENTS = {
    "model_family_name": "llama",
    "model_recipe_name": "llama3_8b",
    "gpu_type": "h100",
    "num_gpus": 8,
    "compute_dtype": "bf16",
    "max_steps": STEPS,
    "gb": GLOBAL_BATCH,
    "mb": 1,
    "tp": 1,
    "pp": 1,
    "cp": 2,
}

NVIDIA_SMI = (
    "| NVIDIA-SMI 570.133.20     Driver Version: 570.133.20     CUDA Version: 12.8     |\n"
    "|   0  NVIDIA H100 80GB HBM3          On  |   00000000:1B:00.0 Off |                    0 |\n"
)

Numbers = tuple[float, ...]


@dataclass(frozen=True)
class Left:
    """What a run left, iteration by iteration. Rates are those of the last rank; `dump` is laid over `DUMP` by path."""

    seconds: Numbers
    loss: Numbers
    grad_norm: Numbers
    memory: Numbers
    reserved: Numbers
    rate: Numbers
    tflops: Numbers | None = None
    pauses: Numbers = (0.0,) * STEPS
    skipped: Numbers = (0,) * STEPS
    nan: Numbers = (0,) * STEPS
    start: int = 0
    total: int = STEPS
    batch: int = GLOBAL_BATCH
    samples_per_step: int = GLOBAL_BATCH
    world_size: int | None = 8
    start_up: float = START_UP
    banner: str = NVIDIA_SMI
    dump: Mapping[str, Any] | None = None
    log: Callable[[str], str] = str
    board: bool = True
    tag_filter: Callable[[str, int], bool] = lambda tag, step: True
    damage: Callable[[Path], None] | None = None
    ending: str = "[after training is done] datetime: 2026-11-01 03:12:00\n"
    batch_log: str = ""
    validation: Numbers = ()
    state: JobState = JobState.COMPLETED
    exit_code: int = 0

    @property
    def rates(self) -> Numbers:
        return self.tflops or tuple(TFLOPS * STEP_TIME / seconds for seconds in self.seconds)

    @property
    def steps(self) -> range:
        return range(self.start + 1, self.start + 1 + len(self.seconds))


def good(seed: int) -> Left:
    """A good run: 0.3 % noise from night to night, 0.5 % from step to step; loss 0.1 %, memory to a few megabytes, and
    what the allocator reserves 1 %.
    """
    noise = random.Random(seed)
    level = STEP_TIME * (1 + noise.gauss(0, 0.003))
    warm = [level * (1 + noise.gauss(0, 0.005)) for _ in range(STEPS - 1)]
    bias = 1 + noise.gauss(0, 0.0002)
    return Left(
        seconds=(FIRST_STEP * (1 + noise.gauss(0, 0.05)), *warm),
        loss=tuple((2.6 + 9.3 * 0.93**step) * bias * (1 + noise.gauss(0, 0.001)) for step in range(1, STEPS + 1)),
        grad_norm=tuple(1.0 + 3 * 0.9**step + abs(noise.gauss(0, 0.05)) for step in range(1, STEPS + 1)),
        memory=tuple(40.0 + min(step, 3) + noise.gauss(0, 0.0005) for step in range(1, STEPS + 1)),
        reserved=tuple(
            (45.0 + min(step, 3)) * (1 + 0.01 * random.Random(-seed).gauss(0, 1)) for step in range(1, STEPS + 1)
        ),
        rate=tuple(3e-4 * min(step / 10, 1.0) * (1 - 0.9 * max(step - 10, 0) / 40) for step in range(1, STEPS + 1)),
    )


def log_text(left: Left) -> str:
    """What the ranks print, in the formats of Megatron-Bridge: a NaN or negative loss is left out."""
    lines = [left.banner.rstrip("\n"), f"Starting training loop at iteration {left.start}"]
    clock = STARTED + timedelta(seconds=left.start_up)
    for place, step in enumerate(left.steps):
        clock += timedelta(seconds=left.seconds[place] + left.pauses[place])
        lines.append(
            f"Step Time : {left.seconds[place]:.2f}s GPU utilization: {left.rates[place]:.1f}MODEL_TFLOP/s/GPU"
        )
        loss = f" lm loss: {left.loss[place]:.6E} |" if left.loss[place] >= 0.0 else ""
        lines.append(
            f" [{clock:%Y-%m-%d %H:%M:%S}] iteration {step:8d}/{left.total:8d} |"
            f" consumed samples: {step * left.samples_per_step:12d} |"
            f" elapsed time per iteration (ms): {1000 * left.seconds[place]:.1f} |"
            f" learning rate: {left.rate[place]:.6E} | global batch size: {left.batch:5d} |{loss}"
            f" loss scale: 1.0 | grad norm: {left.grad_norm[place]:.3f} |"
            f" number of skipped iterations: {int(left.skipped[place]):3d} |"
            f" number of nan iterations: {int(left.nan[place]):3d} |"
        )
        if place == 1:
            lines.append(
                f"[Rank 0] (after 2 iterations) memory (GB) | mem-max-allocated-gigabytes: {left.memory[1]:.2f}"
                f" | mem-max-reserved-gigabytes: {left.reserved[1]:.2f} | mem-alloc-retires: 0"
            )
    return left.log("\n".join(lines) + "\n" + left.ending)


def write_events(left: Left, path: Path) -> None:
    """The last rank's event file, by tensorboard's own record writer."""
    path.parent.mkdir(parents=True, exist_ok=True)
    clock = STARTED.timestamp() + left.start_up
    with path.open("wb") as stream:
        writer = RecordWriter(stream)
        writer.write(Event(wall_time=clock, file_version="brain.Event:2").SerializeToString())
        for place, step in enumerate(left.steps):
            clock += left.seconds[place] + left.pauses[place]
            values = {
                "lm loss": left.loss[place],
                "grad-norm": left.grad_norm[place],
                "learning-rate": left.rate[place],
                "batch-size": left.batch,
                "iteration-time": left.seconds[place],
                "throughput/tflops/device": left.rates[place],
                "memory/mem-max-allocated-gigabytes": left.memory[place],
                "memory/mem-max-reserved-gigabytes": left.reserved[place],
                **({} if left.world_size is None else {"world-size": left.world_size}),
            }
            rows = [(tag, step, value) for tag, value in values.items() if left.tag_filter(tag, step)]
            if left.tag_filter("lm loss", step):
                rows.append(("lm loss vs samples", step * left.samples_per_step, left.loss[place]))
            if place == len(left.steps) - 1:
                evaluated = zip((step // 2, step), left.validation, strict=False)
                rows += [("lm loss validation", at, value) for at, value in evaluated]
            for tag, at, value in rows:
                summary = EventSummary(value=[EventSummary.Value(tag=tag, simple_value=value)])
                writer.write(Event(wall_time=clock, step=at, summary=summary).SerializeToString())


def write_dump(changes: Mapping[str, Any] | None, path: Path) -> None:
    table = yaml.safe_load(yaml.safe_dump(DUMP))
    for name, value in (changes or {}).items():
        *parents, last = name.split(".")
        inner = table
        for parent in parents:
            inner = inner[parent]
        inner[last] = value
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(table))


def harvest(left: Left, store: ObjectStore, folder: Path, night: str, **spec: Any) -> RunRecord:
    """Write what the run left, and measure, classify and commit it as the harvest stage does."""
    gate = spec.pop("gate", GatePolicy())
    record = make_record(night=night, gate=gate, **{"cmd_args": ARGUMENTS} | spec)
    job_dir = folder / "job"
    shutil.rmtree(folder, ignore_errors=True)
    job_dir.mkdir(parents=True)
    status = JobStatus(
        job_id=4711, state=left.state, nodes="node1", exit_code=left.exit_code, submitted_at=STARTED, started_at=STARTED
    )
    job: Job = record.job.model_copy(
        update={
            "attempt_dir": folder,
            "experiment_dir": job_dir,
            "status": status,
            "exit_file_code": left.exit_code,
            "outcome": None,
        }
    )
    (job_dir / "log-acct.nightly_4711_0.out").write_text(log_text(left))
    (job_dir / "sbatch_acct.nightly_4711.out").write_text(left.batch_log)
    (folder / "claim").write_text("4711\n")
    if left.board:
        write_events(left, job_dir / "tb_logs/events.out.tfevents.1793502000.node1.4242.0")
    write_dump(left.dump, job_dir / "configs/ConfigContainer.yaml")
    if left.damage:
        left.damage(job_dir)
    output = read_run(job, None)
    settings = read_settings(record.spec, output.config_container)
    curves = read_curves(output.event_files, output.logs)
    summary = summarise(curves, gate, record.plan.max_steps, settings, job)
    job = classify_job(job, evidence(output, record.plan.max_steps))
    facts = read_facts(output, job)
    return committed(
        record.model_copy(update={"jobs": (job,), "summary": summary, "facts": facts}), curves.table, store, folder
    )


def committed(record: RunRecord, metrics: pd.DataFrame, store: ObjectStore, folder: Path) -> RunRecord:
    metrics.to_parquet(folder / METRICS, index=False)
    contents = {RECORD: record.model_dump_json().encode(), METRICS: (folder / METRICS).read_bytes()}
    files = []
    for path, data in contents.items():
        store.put(f"{record.prefix}/{path}", data)
        files.append(StoredFile(path=path, size=len(data), sha256=sha256_hex(data), kind="other"))
    manifest = Manifest(
        run_key=record.spec.run_key,
        attempt=1,
        prefix=record.prefix,
        files=tuple(files),
        job=record.job,
        committed_at=STARTED,
    )
    store.delete(f"{record.prefix}/{MANIFEST}")  # of another run that was left here before
    commit_manifest(store, manifest)
    return record


def judge(record: RunRecord, history: Sequence[HistoryRow], store: ObjectStore) -> Verdict:
    """The verdict as the compare stage gives it."""
    return compare(record, history, gather_evidence(store, record, history=history))


def deterministic(seed: int) -> Left:
    """A good run of a deterministic test: times differ from night to night, losses do not."""
    return changed(good(seed), loss=good(0).loss, grad_norm=good(0).grad_norm)


def good_nights(
    store: ObjectStore, folder: Path, count: int = 20, left: Callable[[int], Left] = good
) -> tuple[HistoryRow, ...]:
    """The rows of so many good nights before 2026-11-21, each judged by those before it."""
    rows: list[HistoryRow] = []
    for place in range(count):
        record = harvest(left(place), store, folder, f"2026-11-{place + 1:02}")
        verdict = judge(record, rows, store)
        assert verdict.exit_code == 0, verdict.reasons
        rows.append(row_of(record, verdict))
    return tuple(rows)


def changed(left: Left, **changes: Any) -> Left:
    """The same with some fields replaced, or made from what they were where a function is given."""
    made = {
        name: change(getattr(left, name)) if callable(change) and isinstance(getattr(left, name), tuple) else change
        for name, change in changes.items()
    }
    return replace(left, **made)
