"""What a run itself says: how far it came, for the judgement of its end; and what really ran, by who says it.

A run tells of itself three times, and the three are not the same evidence: its dumped `ConfigContainer.yaml` is what it
was going to do, its log and TensorBoard what it did. The gate compares them with each other and with the plan.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from nightbridge.launch.config_container import ConfigContainer
from nightbridge.models import Job, LaunchPlan, Model
from nightbridge.outputs.curves import LOG_FILE, STEP_COLUMNS, Curves, logging_interval, read_curves
from nightbridge.outputs.experiment import RunOutput, read_files
from nightbridge.outputs.failure_patterns import FLAKY_MARKERS
from nightbridge.outputs.log_errors import POSSIBLY
from nightbridge.outputs.logs import LogReading, latest_steps, read_logs
from nightbridge.outputs.reader_process import read_in_child
from nightbridge.slurm.outcome import RunEvidence


class RunToRead(Model):
    """A run whose output is read: its jobs, oldest first, the last of which counts, and how it was launched."""

    jobs: tuple[Job, ...]
    plan: LaunchPlan

    @property
    def job(self) -> Job:
        """The job that counts."""
        return self.jobs[-1]

    @property
    def roots(self) -> tuple[Path, ...]:
        """The folders that its jobs have written."""
        plan = self.plan
        folders = [folder for job in self.jobs for folder in (job.attempt_dir, job.experiment_dir)]
        return tuple(
            dict.fromkeys(folder for folder in (*folders, plan.output_dir, plan.checkpoint_dir) if folder is not None)
        )


def evidence_of(run: RunToRead) -> RunEvidence:
    """What a run itself says about how far it came, read in a child.

    Raises:
        DamagedData: Its output cannot be read.
    """
    return read_in_child(_read_evidence, run, run.roots, subject=run.job.name)[0]


def _read_evidence(run: RunToRead) -> tuple[RunEvidence, bytes]:
    plan = run.plan
    return evidence(read_files(run.job, plan.output_dir, plan.checkpoint_dir), plan.max_steps), b""


def evidence(output: RunOutput, steps_expected: int | None) -> RunEvidence:
    """What the run itself says about how far it came, for the judgement of how it ended."""
    curves = read_curves(output.event_files, output.logs)
    # Slurm's own complaints (time limit, memory) go to the batch script's output.
    batch = read_logs(output.sbatch_logs)
    return RunEvidence(
        steps_done=curves.steps_done,
        steps_expected=steps_expected,
        losses_finite=curves.non_finite_steps == 0 and not curves.log.nan_marker,
        finished_marker=curves.log.finished,
        flaky_marker=_flaky_marker(curves.log, batch),
        timeout_marker=curves.log.timeout_marker or batch.timeout_marker,
        # The one against which less speaks; the ranks', if neither is better.
        last_error=min(
            (curves.log.last_error, batch.last_error),
            key=lambda error: (not error, "Exited with exit code" in error, error.startswith(POSSIBLY)),
        ),
        steps_seen=curves.log.iterations_seen,
    )


def _flaky_marker(ranks: LogReading, batch: LogReading) -> str | None:
    """The text after which trying again is worth it; none where the program of a rank says that itself failed.

    Its peers then report the connection that they lost, which is no failure of the network.
    """
    own = ranks.own_error or batch.own_error
    if own and not any(marker in own for marker in FLAKY_MARKERS):
        return None
    return ranks.flaky_marker or batch.flaky_marker


# --- what really ran --------------------------------------------------------------------------------------------------

Scalar = float | str

BATCH_SIZE_TAG = "batch-size"
WORLD_SIZE_TAG = "world-size"
_RATE_TAG = "learning-rate"


def dumped(container: ConfigContainer) -> dict[str, float | str]:
    """What a run dumped of what it was going to do, by the names of `Summary.ran`."""
    copies = container.integer("comm_overlap.data_parallel_size")
    found = {
        "world size": copies * container.model_parallel_size if copies else None,
        "global batch size": container.integer("train.global_batch_size"),
        "micro batch size": container.integer("train.micro_batch_size"),
        "sequence length": container.integer("model.seq_length"),
        "sequence length of the data": container.integer("dataset.seq_length"),
        "tensor parallel size": container.integer("model.tensor_model_parallel_size"),
        "pipeline parallel size": container.integer("model.pipeline_model_parallel_size"),
        "context parallel size": container.integer("model.context_parallel_size"),
        "iterations": container.integer("train.train_iters"),
        "precision": _precision(container),
        "gradient clipping": container.number("optimizer.clip_grad"),
        **_scheduled_rates(container),
    }
    return {name: value for name, value in found.items() if value is not None}


def _precision(container: ConfigContainer) -> str | None:
    """The smallest type that matrices are multiplied in; None where the dump does not say any."""
    if not isinstance(container.value("mixed_precision"), Mapping):
        return None
    names = (("fp4", "fp4"), ("fp8", "fp8"), ("bf16", "bf16"), ("fp16", "fp16"))
    return next((name for field, name in names if container.is_on(f"mixed_precision.{field}")), "fp32")


def _scheduled_rates(container: ConfigContainer) -> dict[str, float | str | None]:
    """The largest learning rate, where the warm-up ends within the run, and the last one, where the decay does."""
    samples, rate = container.decay_samples, container.number("optimizer.lr")
    iterations, batch = container.integer("train.train_iters"), container.integer("train.global_batch_size")
    if not (samples and rate and iterations and batch):
        return {}
    warm_up = (
        container.integer("scheduler.lr_warmup_steps") or (container.integer("scheduler.lr_warmup_iters") or 0) * batch
    )
    fraction = container.number("scheduler.lr_warmup_fraction")
    style, done = container.value("scheduler.lr_decay_style"), iterations * batch
    decays = style in ("cosine", "linear") and done >= samples
    return {
        "largest learning rate": rate if max(warm_up, (fraction or 0) * samples) < done else None,
        "last learning rate": container.number("optimizer.min_lr") if decays else None,
    }


def what_ran(curves: Curves, planned: Mapping[str, Scalar]) -> dict[str, dict[str, float | str]]:
    """What really ran, by quantity and source (`Summary.ran`): the run's own dump, its log, and TensorBoard."""
    records = latest_steps(curves.log.steps)
    steps = list(records.values())
    # One of the two may end earlier: a torn line, events that were never flushed. The other is then held to the plan.
    by_log = (steps[-1].iteration if steps else 0, None)
    at, samples = max(curves.samples or (0, None), by_log, key=lambda found: found[0])
    log_ends, events_end = (iteration == curves.steps_done for iteration in (by_log[0], curves.last_recorded))
    reported: dict[str, dict[str, float | None]] = {
        "the log": {
            "iterations": steps[-1].total if steps else None,
            "iterations a record": _interval(list(records)),
            "global batch size": steps[-1].global_batch_size if steps else None,
            "consumed samples": records[at].consumed_samples if at in records else None,
            **_rates([step.learning_rate for step in steps if step.learning_rate is not None], is_last=log_ends),
        },
        "TensorBoard": {
            "world size": _last(curves, WORLD_SIZE_TAG),
            "iterations a record": _interval(_recorded_losses(curves)),
            "global batch size": _last(curves, BATCH_SIZE_TAG),
            "consumed samples": None if samples is None else float(samples),
            **(_rates(_values(curves, _RATE_TAG), is_last=events_end) if _is_whole(curves) else {}),
        },
    }
    ran: dict[str, dict[str, float | str]] = {name: {"its configuration": value} for name, value in planned.items()}
    for source, values in reported.items():
        for name, value in values.items():
            if value is not None:
                ran.setdefault(name, {})[source] = value
    batches = ({step.global_batch_size for step in steps} | set(_values(curves, BATCH_SIZE_TAG))) - {None}
    batch = next(iter(batches), None)
    if "consumed samples" in ran and len(batches) == 1 and batch and not curves.start:
        ran["consumed samples"]["iterations and batch"] = at * batch
    # JSON has no number for an infinite limit of gradients, and for a rate that is none.
    return {
        name: {
            source: value if isinstance(value, str) or math.isfinite(value) else str(value)
            for source, value in of.items()
        }
        for name, of in ran.items()
    }


def _interval(iterations: Sequence[int]) -> float | None:
    """The commonest distance of two records; None where there are not two."""
    return logging_interval(iterations) if len(iterations) > 1 else None


def _recorded_losses(curves: Curves) -> list[int]:
    """The iterations at which an event file, and not the log alone, has a loss."""
    rows = curves.rows_of(STEP_COLUMNS["loss"].tag)
    iterations: list[int] = rows.loc[rows["file"] != LOG_FILE, "step"].tolist()
    return iterations


def _is_whole(curves: Curves) -> bool:
    """Whether TensorBoard's curves go to the end: a killed job's last events were never flushed."""
    table = curves.table
    steps = table.loc[(table["tag"] == _RATE_TAG) & ~table["superseded"], "step"]
    return bool(len(steps)) and int(steps.max()) == curves.last_recorded


def _rates(rates: Sequence[float], *, is_last: bool) -> dict[str, float | None]:
    """The largest and the last of a source's rates; `is_last`: whether the source goes to the run's last iteration."""
    if not rates:
        return {}
    return {"largest learning rate": max(rates), "last learning rate": rates[-1] if is_last else None}


def _values(curves: Curves, tag: str) -> list[float]:
    """Of a tag, the values of all iterations, in their order."""
    values: list[float] = curves.rows_of(tag)["value"].tolist()
    return values


def _last(curves: Curves, tag: str) -> float | None:
    return next(iter(_values(curves, tag)[-1:]), None)
