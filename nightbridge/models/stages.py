"""The results of the stages, each made from the models before it."""

import enum
from datetime import datetime
from pathlib import Path
from typing import Literal

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from nightbridge.models.base import Model, StoredModel, StoredWord
from nightbridge.models.scenario import RunSpec
from nightbridge.models.site import SecretRef


class PinnedRepository(Model):
    """A repository at an exact commit, checked out as a tree that many jobs share and none changes."""

    url: str
    ref: str
    commit: str = Field(description="Full 40-character commit.")
    path: Path
    subject: str = ""
    committed_at: datetime | None = None
    describe: str = Field("", description="`git describe --tags --always` of the commit.")
    previous: str | None = Field(None, description="The commit that the ref meant the night before this one.")
    commits_since: tuple[str, ...] = Field((), description="Hash and subject of what came since, newest first.")
    submodules: dict[str, str] = Field({}, description="Commits that the tree pins, by folder, checked out or not.")
    lfs_pointers: tuple[str, ...] = Field((), description="Files whose content lies in Git LFS and is not here.")


class LauncherEnvironment(Model):
    """The Python environment that the launcher runs in: locked requirements plus the pinned NeMo-Run."""

    python: Path
    digest: str = Field(description="Hash over Python version, locked requirements and NeMo-Run commit.")
    nemo_run_version: str = ""


class Checkout(Model):
    """Stage 1, clone: both repositories at exact commits and the launcher's environment.

    A workload without a launcher has its own code in the place of Megatron-Bridge, and neither of the others.
    """

    megatron_bridge: PinnedRepository
    nemo_run: PinnedRepository | None = None
    environment: LauncherEnvironment | None = None

    @property
    def repositories(self) -> tuple[PinnedRepository, ...]:
        """Everything that was checked out."""
        return (self.megatron_bridge, *((self.nemo_run,) if self.nemo_run else ()))


class Image(Model):
    """Stage 2, container: a verified .sqsh known by its digest, or the declared absence of a container."""

    kind: Literal["none", "sqsh"]
    reference: str | None = None
    path: Path | None = None
    digest: str | None = Field(None, description="Registry digest, or `sha256:` of the file for a local .sqsh.")
    sha256: str | None = None
    size: int | None = None


class LaunchPlan(Model):
    """Stage 3, validate: exactly what will be started, with secrets as references."""

    run_key: str
    attempt: int = Field(ge=1)
    attempt_dir: Path = Field(description="`<workspace>/runs/<run key>/a<n>`, absolute.")
    argv: tuple[str, ...] = Field(description="The launcher's command line, Python interpreter first.")
    cwd: Path
    environment: dict[str, str] = Field(default_factory=dict)
    secret_environment: dict[str, SecretRef] = Field(default_factory=dict)
    batch_script: str | None = Field(
        None, description="Text of the script that `argv` submits, for a workload that has no launcher to write one."
    )
    sbatch_args: tuple[str, ...] = Field((), description="Options our sbatch shim adds before the script.")
    nodes: int = Field(ge=1)
    tasks_per_node: int = Field(ge=1)
    time_limit_seconds: int | None = None
    max_steps: int | None = None
    output_dir: Path | None = Field(
        None, description="Host folder of tb_logs/, configs/, checkpoints/; None in a container (job folder)."
    )
    checkpoint_dir: Path | None = Field(
        None, description="Host folder of the checkpoints where the test names its own save_dir; else with the rest."
    )
    warnings: tuple[str, ...] = ()


class JobState(enum.StrEnum):
    """Slurm's job states (squeue(1), sacct(1)), and UNKNOWN for a job that neither squeue nor sacct lists."""

    PENDING = "PENDING"
    CONFIGURING = "CONFIGURING"
    RUNNING = "RUNNING"
    COMPLETING = "COMPLETING"
    SUSPENDED = "SUSPENDED"
    STOPPED = "STOPPED"
    RESIZING = "RESIZING"
    REQUEUED = "REQUEUED"
    REQUEUE_HOLD = "REQUEUE_HOLD"
    SPECIAL_EXIT = "SPECIAL_EXIT"
    SIGNALING = "SIGNALING"
    STAGE_OUT = "STAGE_OUT"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"
    TIMEOUT = "TIMEOUT"
    DEADLINE = "DEADLINE"
    NODE_FAIL = "NODE_FAIL"
    BOOT_FAIL = "BOOT_FAIL"
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    PREEMPTED = "PREEMPTED"
    REVOKED = "REVOKED"
    UNKNOWN = "UNKNOWN"

    @classmethod
    def _missing_(cls, value: object) -> "JobState | None":
        # The name that records of 0.1 have.
        return cls.UNKNOWN if value == "UNHEARD" else None


class JobStatus(Model):
    """One answer about one job."""

    job_id: int
    name: str = ""
    state: JobState
    reason: str = ""
    exit_code: int | None = Field(None, description="The batch script's exit code, 0-255.")
    signal: int | None = Field(None, description="The signal that ended the script, 0 or None for none.")
    submitted_at: datetime | None = None
    started_at: datetime | None = None
    ended_at: datetime | None = None
    nodes: str = Field("", description="Slurm's node expression, e.g. `node[1-2]`.")
    cancelled_by: str = Field("", description="User name or uid that cancelled it.")
    expected_start: datetime | None = Field(None, description="Of a pending job, as Slurm's scheduler estimates it.")
    queue_position: int | None = Field(None, description="Among the pending jobs of its partition, 1 is next.")
    node_reason: str = Field(
        "", description="`node2: Prolog error`: of a cancelled job's nodes, those down or drained."
    )


class Outcome(StoredWord):
    """What became of a job, from Slurm's state and the run's own evidence together."""

    SUCCEEDED = "succeeded"
    TEARDOWN = "teardown"  # all steps done, then failed while shutting down
    SHORT = "short"  # ended before the last iteration, in whatever state
    INFRASTRUCTURE = "infrastructure"
    TIMEOUT = "timeout"
    OUT_OF_MEMORY = "out_of_memory"
    PROGRAM_ERROR = "program_error"
    CANCELLED = "cancelled"
    NEVER_STARTED = "never_started"


class Job(StoredModel):
    """Stages 4 and watch: exactly one Slurm job per attempt; `status` and `outcome` are set once it has ended."""

    run_key: str
    attempt: int = Field(ge=1)
    job_id: int
    cluster: str
    attempt_dir: Path
    script: Path = Field(description="The submitted copy of the batch script.")
    experiment_dir: Path = Field(description="What the launcher made for exactly this job.")
    submitted_at: datetime
    status: JobStatus | None = None
    exit_file_code: int | None = Field(None, description="Exit code that the script left in its exit file.")
    outcome: Outcome | None = None
    outcome_reason: str = ""

    @property
    def name(self) -> str:
        """The attempt's name, which is the Slurm job's name."""
        return f"{self.run_key}-a{self.attempt}"


FileKind = Literal["checkpoint", "tensorboard", "log", "config", "summary", "metrics", "other"]


# Slots, since a run may have 100,000 of them: a model takes ten times the memory.
@dataclass(frozen=True, slots=True, kw_only=True, config=ConfigDict(extra="forbid"))
class StoredFile:
    """One object of a run in the store."""

    path: str = Field(description="Relative to the attempt's prefix, with `/`.")
    size: int
    sha256: str = Field(description="Lower-case hex.")
    part_size: int = Field(
        default=0,
        ge=0,
        description="Above 0: `sha256` is that of the SHA-256s of the file's parts of so many bytes, as S3 makes its "
        "composite checksums. 0: it is that of the file.",
    )
    etag: str = Field(default="", description="What S3 calls these bytes.")
    part_digests: str = Field(
        default="", description="Base64 of the SHA-256 of each part, in order: a restore checks each as it arrives."
    )
    mtime_ns: int = 0
    kind: FileKind


class CheckpointState(enum.StrEnum):
    """How whole a checkpoint directory is."""

    VERIFIED = "verified"  # every byte of its archives has the CRC-32 that its writer recorded
    UNPROVEN = "unproven"  # nothing is wrong with it, and its layout or its writer leaves parts without a proof
    COMPLETE = "complete"  # every file is there in its full length; the contents were not read
    IN_PROGRESS = "in_progress"
    DAMAGED = "damaged"


class Checkpoint(Model):
    """One `iter_*` directory of a run."""

    path: Path
    iteration: int
    state: CheckpointState
    reason: str = Field("", description="Why it is not complete.")
    size: int = Field(0, description="Bytes of its regular files when it was judged.")


class Life(Model):
    """One life of a run: from its start, or its restart from a checkpoint, to its end or the next restart."""

    first_step: int
    last_step: int
    median_step_time: float | None = Field(None, description="Of all its steps, seconds.")


class Summary(StoredModel):
    """What a run measured. None means not measured, and never passes a gate."""

    steps_expected: int | None = None
    steps_done: int = Field(0, description="The last iteration that was recorded.")
    start_step: int = Field(0, description="The iteration that the run started from; 0 from scratch.")
    steady_first_step: int | None = None
    steady_last_step: int | None = None
    steady_steps: int = Field(0, description="Recorded iterations that the statistics are made of.")
    profiled_steps: int = Field(0, description="Recorded iterations left out of them because a profiler ran.")
    step_time: float | None = Field(None, description="Median over the steady window, seconds.")
    step_time_p05: float | None = None
    step_time_p95: float | None = None
    step_time_midmean: float | None = Field(
        None, description="Mean of the middle half of the steady window, seconds: steadier where steps have two speeds."
    )
    step_time_spread: float | None = Field(
        None, description="1.4826 * median absolute deviation / median: the relative sigma, spikes aside."
    )
    wall_step_time: float | None = Field(
        None, description="Mean over the steady window, seconds, with the time between steps where it is known."
    )
    slow_steps: float | None = Field(None, description="95th percentile over median of the steady step times.")
    slow_pattern: str = Field("", description="Which steps are slow, in words; empty where none is.")
    warmup_step_time: float | None = Field(
        None, description="Mean from the second step up to the steady window, seconds, with the time between steps."
    )
    first_step_time: float | None = Field(None, description="The first step, which compiles and captures, seconds.")
    tail_slowdown: float | None = Field(
        None, description="Median step time of the last steps over that of the whole steady window: 1 is as fast."
    )
    tflops_per_gpu: float | None = Field(None, description="Median over the steady window, TFLOP/s per GPU.")
    tflops_per_gpu_p05: float | None = None
    tflops_per_gpu_p95: float | None = None
    tflops_per_gpu_spread: float | None = Field(None, description="As step_time_spread.")
    tokens_per_second_per_gpu: float | None = Field(None, description="Over the steady window, tokens / s / GPU.")
    peak_memory: float | None = Field(None, description="Largest mem-max-allocated, gigabytes.")
    reserved_memory: float | None = Field(None, description="Largest mem-max-reserved, gigabytes.")
    final_loss: float | None = Field(None, description="lm loss of the last step.")
    loss_min: float | None = Field(None, description="Smallest finite lm loss of all steps.")
    loss_max: float | None = Field(None, description="Largest finite lm loss of all steps.")
    loss_digest: str | None = Field(
        None, description="`<source>:<sha256>` of the loss at every step; the same only where every bit is the same."
    )
    loss_anchors: tuple[tuple[int, float], ...] = Field((), description="Step and lm loss, first and last among them.")
    grad_norm_min: float | None = Field(None, description="Smallest finite grad norm of all steps.")
    grad_norm_max: float | None = Field(None, description="Largest finite grad norm of all steps.")
    non_finite_steps: int = Field(0, description="Steps whose loss or grad norm was missing or not finite.")
    nan_iterations: int | None = Field(None, description="Iterations that the log counts as NaN; None without a log.")
    skipped_iterations: int | None = Field(None, description="Iterations that the log counts as skipped; as above.")
    ran: dict[str, dict[str, float | str]] = Field(
        {}, description="What really ran, such as the world size: by quantity, and by the source that says it."
    )
    model_flops: float | None = Field(
        None, description="Least floating-point operations of one step on all GPUs; None where the model is unknown."
    )
    queue_time: float | None = Field(None, description="From submission to the job's start, seconds.")
    startup_time: float | None = Field(
        None, description="From the job's start to its first iteration, seconds; negative where clocks are apart."
    )
    teardown_time: float | None = Field(
        None,
        description="From its last iteration to the job's end, with what is saved then, seconds, at least 180; "
        "negative where clocks are apart. None of a control arm, which saves nothing.",
    )
    checkpoint_time: float | None = Field(
        None, description="Median time for which training stood still to save a checkpoint, seconds."
    )
    source: Literal["tensorboard", "log", "none"] = "none"
    lives: tuple[Life, ...] = Field((), description="Oldest first; more than one where the run was restarted.")
    damage: tuple[str, ...] = Field((), description="What was wrong with the files that were read.")
    notes: tuple[str, ...] = Field((), description="Where values came from, when not all from one source; no damage.")


class RunRecord(StoredModel):
    """Stage 5, harvest: what the run was, what became of it, where it is kept, what it measured."""

    spec: RunSpec
    checkout: Checkout
    image: Image
    plan: LaunchPlan
    jobs: tuple[Job, ...] = Field(description="Every attempt, oldest first; the last one counts.")
    store_url: str
    prefix: str = Field(description="`runs/<test slug>/<night>/<run key>/a<n>`.")
    series: str = Field(description="Identity of the configuration; runs of one series are compared.")
    summary: Summary
    checkpoints: tuple[Checkpoint, ...] = ()
    left_out: tuple[str, ...] = Field((), description="Files that the store does not hold, each with its reason.")
    tainted: tuple[str, ...] = Field((), description="What in the checked-out code was changed when the run had ended.")
    facts: dict[str, str] = Field({}, description="Driver, CUDA, NCCL, the image's release: as the job reports them.")
    harvested_at: datetime

    @property
    def job(self) -> Job:
        """The attempt that counts."""
        return self.jobs[-1]
