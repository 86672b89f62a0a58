"""The models that flow from stage to stage, and the settings of the outside world.

Every model is frozen and serialises to JSON, so that a stage's result can be persisted, shown, and picked up again
after a crash. No model ever holds a secret's value: a `SecretRef` names where it is found. Times are UTC and aware,
sizes are bytes, durations seconds unless a name says otherwise.
"""

import enum
import hashlib
import re
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, model_validator
from pydantic.dataclasses import dataclass
from pydantic_core import PydanticCustomError


class Model(BaseModel):
    """Base of every model: frozen, and an unknown field is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def utc_now() -> datetime:
    """The current time, UTC, to the microsecond."""
    return datetime.now(UTC)


# --- names -----------------------------------------------------------------------------------------------------------

NightId = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?$")]
RunKey = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9-]{0,99}$")]

RUN_KEY_LIMIT = 100

LAUNCHER_HOME = "nemorun"
"""NEMORUN_HOME, below the attempt's folder. Without a container NeMo-Run replaces "/nemo_run" wherever it stands in its
batch script, also inside a path, so the folder must not be called that."""


def slug(text: str, limit: int = 40) -> str:
    """Turn a test id into `[a-z0-9-]`, at most `limit` characters, never empty."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:limit].strip("-") or "test"


def make_run_key(
    *, scenario: str, night: str, test_id: str, sweep_point: dict[str, Any], iteration: int, repeat: int
) -> str:
    """Name a run: `<test slug>-<night>-<10 hex>`, the same for the same arguments on every machine.

    The hex part is a hash over all arguments, so two tests whose slugs agree still have different keys.
    """
    point = "&".join(f"{name}={sweep_point[name]!r}" for name in sorted(sweep_point))
    identity = "\n".join((scenario, night, test_id, point, str(iteration), str(repeat)))
    digest = hashlib.sha256(identity.encode()).hexdigest()[:10]
    tail = f"-{night}-{digest}"
    return slug(test_id, RUN_KEY_LIMIT - len(tail)) + tail


# --- settings of the outside world -----------------------------------------------------------------------------------


class SecretRef(Model):
    """Where a secret is found; its value is looked up only in the process that needs it.

    `source` env: `name` is an environment variable. block: a Prefect `Secret` block. toml: `FILE#dotted.key`, a literal
    token that somebody wrote in a TOML file.
    """

    source: Literal["env", "block", "toml"]
    name: str


MetricName = Literal[
    "step_time",
    "tflops_per_gpu",
    "tokens_per_gpu",
    "peak_memory",
    "startup_time",
    "checkpoint_time",
    "final_loss",
    "loss_curve",
    "grad_norm",
    "tail_slowdown",
]
"""The metrics that a gate knows, by their names in `[gate]`."""


class Limits(Model):
    """A floor and a ceiling that a metric never may pass, in its own unit; a limit that is unset limits nothing."""

    min: float | None = Field(None, description="Smallest value that is allowed.")
    max: float | None = Field(None, description="Largest value that is allowed.")


class ClusterSettings(Model):
    """How to reach a cluster.

    `kind` local runs batch scripts on this machine, slurm uses Slurm's command-line tools, pyslurm its Python binding,
    and auto takes pyslurm where it works, else the tools.
    """

    kind: Literal["local", "slurm", "pyslurm", "auto"] = "local"
    name: str = Field("local", description="The cluster's name in histories and reports.")
    partition: str | None = Field(None, description="Partition to submit to; the site's default when unset.")
    account: str | None = Field(None, description="Slurm account to charge.")
    qos: str | None = Field(None, description="Quality of service to ask for.")
    reservation: str | None = Field(None, description="Reservation to run in.")
    gpus_per_node: int | None = Field(None, ge=1, description="GPUs of one node; the launcher's default when unset.")
    extra_sbatch_args: tuple[str, ...] = Field((), description="Further sbatch options, as `--name=value`.")
    env_vars: dict[str, str] = Field({}, description="Environment variables of every run here; a test's own win.")
    bin_dir: Path | None = Field(None, description="Folder of sbatch, squeue, sacct...; found on PATH when unset.")
    slurm_conf: Path | None = Field(None, description="The slurm.conf to use (SLURM_CONF); the system's when unset.")
    containers: Literal["pyxis", "none"] = Field("none", description="How jobs can run in containers here.")
    pyslurm_python: Path | None = Field(
        None, description="The Python that has pyslurm, built for this site's Slurm; this one when unset."
    )
    max_jobs: int | None = Field(None, ge=1, description="Jobs of ours that this cluster has at once; any when unset.")
    max_jobs_per_account: int | None = Field(
        None, ge=1, description="Jobs of ours that one account has here at once; any when unset."
    )
    max_attempts: int = Field(
        3, ge=1, description="Attempts of a run that the cluster itself may fail (a lost node) before it is given up."
    )
    slots: int = Field(2, ge=1, description="Local cluster only: how many jobs run at once.")
    root: Path | None = Field(
        None, description="Local cluster only: where it keeps jobs; `<workspace>/cluster` when unset."
    )
    accounting_horizon: float = Field(
        120.0, ge=0, description="Seconds for which an earlier intent to submit forbids another one."
    )
    poll_interval: float = Field(15.0, gt=0, description="Longest interval between two questions to Slurm, seconds.")
    segment: int | None = Field(
        None, ge=1, description="Nodes that must lie close together (--segment); the site's default when unset."
    )
    exclusive: bool = Field(False, description="Ask for whole nodes where the launcher does not.")
    max_pending: float | None = Field(
        None, gt=0, description="Seconds after which a job that has not started is cancelled; never when unset."
    )
    max_runtime: float | None = Field(
        None,
        gt=0,
        description="Seconds after which a running job is cancelled, whatever its time limit; never when unset.",
    )


class RetentionPolicy(Model):
    """How much of each test `prune` leaves in the store; a limit that is unset removes nothing.

    What a baseline, the verdict of a run that stays, or an accepted decision refers to stays, whatever the limits say.
    """

    days: float | None = Field(None, ge=1, description="Runs that were stored before so many days go.")
    nights: int | None = Field(None, ge=1, description="Only the runs of each test's newest so many nights stay.")
    max_gb: float | None = Field(
        None, ge=0, description="The oldest runs of a test go until the others fit, 1e9 bytes."
    )


class StoreSettings(Model):
    """Where harvested runs, histories and reports are kept. `url`: `file:///dir` or `s3://bucket/prefix`."""

    url: str = Field(description="`file:///DIRECTORY` or `s3://BUCKET/PREFIX`.")
    endpoint_url: str | None = Field(None, description="S3 endpoint; AWS when unset.")
    region: str | None = Field(None, description="S3 region.")
    profile: str | None = Field(None, description="Profile of the AWS configuration files.")
    access_key: SecretRef | None = Field(
        None, description="Where the access key id is found; boto3's own search when unset."
    )
    secret_key: SecretRef | None = Field(None, description="Where the secret access key is found.")
    ca_bundle: Path | None = Field(None, description="Certificate authorities to trust for this endpoint.")
    path_style: bool = Field(True, description="Address buckets by path, as most own S3 servers need it.")
    role_arn: str | None = Field(None, description="Role to assume (STS); the keys above are what it is assumed with.")
    encryption: Literal["none", "AES256", "aws:kms"] = Field(
        "none", description="Server-side encryption to ask for; the bucket's own default when none."
    )
    kms_key_id: str | None = Field(None, description="Key for `aws:kms`; the bucket's default key when unset.")
    storage_class: str | None = Field(None, description="Storage class of new objects, e.g. STANDARD_IA.")
    tags: dict[str, str] = Field({}, description="Tags of every new object, for lifecycle rules and cost reports.")
    retention: RetentionPolicy = RetentionPolicy()


class ImageImport(Model):
    """How container images are imported."""

    on: Literal["host", "node"] = Field(
        "host", description="Where imports run: on the host of the flow, or through srun on a compute node."
    )
    srun_args: tuple[str, ...] = Field((), description="Further srun options of an import on a node: `--name=value`.")
    cache: Path | None = Field(
        None, description="Fetched layers; `ENROOT_CACHE_PATH`, else the user's cache, when unset."
    )
    temp: Path | None = Field(
        None, description="Where images are unpacked, a local disk; `ENROOT_TEMP_PATH`, else the system's, when unset."
    )
    credentials: SecretRef | None = Field(
        None,
        description="A secret of lines `machine HOST login USER password PASSWORD`; enroot's and docker's own files "
        "when unset.",
    )


class HarvestPlace(Model):
    """Where runs are harvested."""

    on: Literal["host", "node"] = Field(
        "host", description="On the host of the flow, or through srun on a compute node: a login node may be too small."
    )
    srun_args: tuple[str, ...] = Field((), description="Further srun options of a harvest on a node: `--name=value`.")
    timeout: float = Field(86_400.0, gt=0, description="Seconds on a node, waiting in the queue included.")


def _checked_address(text: str) -> str:
    if not text or not text.isprintable() or any(character in " ,;<>" for character in text):
        raise PydanticCustomError("mail_address", "must be one address, as name@example.org")
    return text


MailAddress = Annotated[str, AfterValidator(_checked_address)]


class NotifySettings(Model):
    """Whom nightbridge tells what a person has to know, and how: by mail, by a webhook, or both."""

    smtp_host: str | None = Field(None, description="Host that takes mail; no mail when unset.")
    smtp_port: int | None = Field(
        None, ge=1, le=65535, description="Its port; when unset 587 with starttls, 465 with tls, 25 with none."
    )
    smtp_security: Literal["none", "starttls", "tls"] = Field(
        "starttls", description="starttls begins in the clear and then encrypts, tls is encrypted from the start."
    )
    smtp_user: str | None = Field(None, description="User to log in as; no login when unset.")
    smtp_password: SecretRef | None = Field(None, description="Where the user's password is found.")
    ca_bundle: Path | None = Field(None, description="Certificate authorities to trust; the system's when unset.")
    mail_from: MailAddress | None = Field(None, description="Sender; nightbridge@ this host when unset.")
    mail_to: tuple[MailAddress, ...] = Field((), description="Everybody who gets the mail.")
    webhook: SecretRef | None = Field(
        None, description="Where the URL of a webhook is found, which is a secret for Slack, Mattermost and Teams."
    )

    @model_validator(mode="after")
    def _mail_is_whole(self) -> "NotifySettings":
        if (self.smtp_host is None) != (not self.mail_to):
            raise PydanticCustomError("mail", "mail needs both smtp_host and mail_to")
        if (self.smtp_user is None) != (self.smtp_password is None):
            raise PydanticCustomError("smtp_login", "a login needs both smtp_user and smtp_password")
        return self


class Site(Model):
    """Everything a run needs to know about the place it runs in. Built from blocks, a system file or options."""

    workspace: Path = Field(Path(".nightbridge"), description="Folder that the compute nodes see under the same path.")
    cluster: ClusterSettings = Field(ClusterSettings(), description="The cluster; this machine when unset.")
    store: StoreSettings | None = Field(None, description="Default: `file://<workspace>/store`.")
    environments: Path | None = Field(None, description="Launcher environments; default `<workspace>/envs`.")
    images: Path | None = Field(None, description="Container images; default `<workspace>/images`.")
    image_import: ImageImport = ImageImport()
    harvest: HarvestPlace = HarvestPlace()
    wheels: Path | None = Field(
        None,
        description="Folder of wheels that launcher environments are installed from; pip's own sources when unset.",
    )
    git_timeout: float = Field(600.0, gt=0, description="Longest time one git command may take, seconds.")
    git_credentials: SecretRef | None = Field(
        None, description="A secret of lines `machine HOST login USER password TOKEN`; git's own helpers when unset."
    )
    contract: dict[str, dict[MetricName, Limits]] = Field(
        {}, description="What this cluster owes each test: limits by metric, by a pattern of test ids."
    )
    notify: NotifySettings = NotifySettings()

    @property
    def environments_dir(self) -> Path:
        """Where launcher environments are kept."""
        return self.environments or self.workspace / "envs"

    @property
    def images_dir(self) -> Path:
        """Where container images are kept."""
        return self.images or self.workspace / "images"

    @property
    def store_settings(self) -> StoreSettings:
        """The store to use: the configured one, else a folder of the workspace."""
        return self.store or StoreSettings(url=f"file://{self.workspace.absolute()}/store")


class ClusterLimits(Model):
    """What the cluster allows, as far as it says so; None means unknown, never unlimited."""

    partitions: tuple[str, ...] = ()
    partition: str | None = Field(None, description="The partition that jobs go to.")
    account: str | None = Field(None, description="The account that they are charged to.")
    max_nodes: int | None = None
    max_time_seconds: int | None = None
    gpus_per_node: int | None = Field(None, description="GPUs of one node, as the cluster says or is configured.")
    configured_gpus_per_node: int | None = Field(
        None, description="GPUs of one node by the cluster's settings alone; they win over what a test says."
    )
    has_pyxis: bool = False
    accounts: tuple[str, ...] | None = Field(None, description="Accounts that may submit to the partition.")
    gres: tuple[str, ...] | None = Field(None, description="Generic resources of the partition, such as `gpu`.")


# --- what the person asked for ---------------------------------------------------------------------------------------


def _checked_repository_path(text: str) -> str:
    path = PurePosixPath(text)
    if not text or path.is_absolute() or ".." in path.parts:
        raise PydanticCustomError("repository_path", "must be a path inside the repository, without ..")
    return str(path)


RepositoryPath = Annotated[str, AfterValidator(_checked_repository_path)]

MOUNT_POINT = "/opt/Megatron-Bridge"
"""Where Megatron-Bridge lies in NVIDIA's images."""


class GitRepo(Model):
    """A repository and the ref to pin, as a test file names it (CloudAI's `git_repos` entry)."""

    url: str = Field(description="Address, without credentials.")
    commit: str = Field("main", description="Branch, tag, or full or abbreviated commit.")
    init_submodules: bool = Field(False, description="Check out submodules as well.")
    mount_as: str | None = Field(None, description="Where the checkout is mounted in the container.")
    launcher: RepositoryPath | None = Field(
        None, description="Where the launcher lies in it: that makes it Megatron-Bridge's repository, whatever its URL."
    )

    @property
    def is_megatron_bridge(self) -> bool:
        """Whether URL or mount point say so, as CloudAI finds it."""
        return "megatron-bridge" in self.url.lower() or (self.mount_as or "").rstrip("/") == MOUNT_POINT


def _checked_checkpoint_policy(text: str) -> str:
    if not re.fullmatch(r"none|last|all|every [1-9]\d{0,5}", text):
        raise PydanticCustomError("checkpoint_policy", 'must be "none", "last", "all" or "every K", as in "every 5"')
    return text


CheckpointPolicy = Annotated[str, AfterValidator(_checked_checkpoint_policy)]


class HarvestPolicy(Model):
    """What of a run is kept."""

    checkpoint: CheckpointPolicy = Field(
        "last", description="Which complete checkpoints are kept: none, last, all, or `every K`, counted from the last."
    )
    max_checkpoint_bytes: int = Field(
        200_000_000_000, ge=0, description="A checkpoint that is likely to be larger is warned of."
    )


class GoldenPolicy(Model):
    """Megatron-Bridge's parameters of a comparison with golden values, and those that failing closed needs."""

    skip_first_percent_loss: float = Field(0.20, ge=0, lt=1, description="Share of loss points that are left out.")
    correlation_threshold: float = Field(0.95, description="Least correlation of the losses.")
    high_loss_tolerance: float = Field(0.10, gt=0, description="Per step, where the golden loss is above 2.")
    medium_loss_tolerance: float = Field(0.05, gt=0, description="Per step, from 0.5 to 2.")
    low_loss_tolerance: float = Field(0.02, gt=0, description="Per step, up to 0.5.")
    max_outlier_ratio: float = Field(
        0.1, ge=0, description="Share of steps that may be beyond, and of 3-sigma outliers."
    )
    final_loss_tolerance: float = Field(0.05, gt=0)
    skip_first_percent_time: float = Field(0.70, ge=0, lt=1, description="Share of steps before the mean throughput.")
    eval_time_start_step: int | None = Field(None, description="First iteration of that mean, in place of the share.")
    eval_time_end_step: int | None = Field(None, description="Last iteration of it.")
    timing_threshold: float = Field(0.05, gt=0)
    memory_threshold: float = Field(0.05, gt=0)
    warmup_share: float = Field(0.2, ge=0, lt=1, description="Share of steps that no throughput rule looks at.")
    max_slow_ratio: float = Field(
        0.25, ge=0, description="Share of the other steps that may be slow, above that of the golden run."
    )
    required_metrics: tuple[str, ...] = Field(
        (),
        description="What golden file and run must have; empty for the format's own: loss, and a time or throughput.",
    )
    required_memory: tuple[str, ...] | None = Field(
        None, description="The same for memory; None for what the golden file has, of which there must be something."
    )
    grad_norm: Literal["required", "if measured"] = "required"


class ReferencePolicy(Model):
    """How far a run's loss may be from that of its reference run, as relative differences of single iterations."""

    first: float = Field(0.005, ge=0, description="At the first iteration, where no update has been made yet.")
    later: float = Field(0.015, ge=0, description="At every later one.")
    steps: int | None = Field(None, ge=1, description="The last iteration that is compared; all are when unset.")


class GatePolicy(Model):
    """When a test has become worse. Relative numbers are shares: 0.05 is 5 %.

    The number of a metric is the widest band that a steady test gets, and its band while there is little history.
    Changes in the good direction beyond the band are improvements, never failures.
    """

    step_time: float = Field(0.05, gt=0)
    tflops_per_gpu: float = Field(0.05, gt=0)
    tokens_per_gpu: float = Field(0.05, gt=0)
    peak_memory: float = Field(0.05, gt=0)
    startup_time: float = Field(0.5, gt=0)
    checkpoint_time: float = Field(0.5, gt=0)
    final_loss: float = Field(0.05, gt=0)
    loss_curve: float = Field(0.05, gt=0)
    grad_norm: float = Field(0.5, gt=0)
    tail_slowdown: float = Field(0.5, gt=0)
    warmup_steps: int = Field(10, ge=0, description="Steps at the start that no statistic uses.")
    baseline_runs: int = Field(7, ge=1, description="How many last good runs make the baseline.")
    cold_start: int = Field(7, ge=2, description="Good nights from which on a band comes from the test's own history.")
    sigmas: float = Field(4.0, gt=0, description="Half a band, in standard deviations of the test's own nights.")
    least_change: float = Field(0.02, gt=0, description="No smaller change of one night alone is news.")
    p_value: float = Field(1e-5, gt=0, lt=1, description="Largest p-value of a change of level that counts.")
    minimum_change: float = Field(0.015, gt=0, description="Smallest change of level that counts.")
    limits: dict[MetricName, Limits] = Field({}, description="Floors and ceilings, by metric.")
    required: tuple[MetricName, ...] = Field((), description="Metrics that must be measured, besides those always.")
    canary: str | None = Field(None, description="Id of the test that tells the cluster's drift from the code's.")
    confirm: int = Field(2, ge=0, le=10, description="Runs that a suspicious result is given before it counts.")
    golden: str | None = Field(None, description="Golden values to compare with, besides history: a JSON file.")
    golden_rules: GoldenPolicy = GoldenPolicy()
    reference: str | None = Field(
        None, min_length=1, description="Run key of the run, or id of the test, whose losses this one has to follow."
    )
    reference_rules: ReferencePolicy = ReferencePolicy()


Compat = Literal["none", "cloudai"]


class SweepAxis(Model):
    """One field of a test and the values that it takes in turn, in the order in which they were written."""

    field: str = Field(description="`cmd_args.<key>`, `extra_env_vars.<NAME>` or `num_nodes`.")
    values: tuple[Any, ...] = Field(min_length=1)
    weights: tuple[float, ...] | None = Field(
        None, description="How likely each value is where one is drawn; all the same when unset."
    )

    @property
    def name(self) -> str:
        """The field's name in `RunSpec.sweep_point`: keys of `[cmd_args]` stand for themselves, as in CloudAI."""
        return self.field.removeprefix("cmd_args.")


RewardKind = Literal["inverse", "negative", "identity"]
"""How a value becomes a reward, of which more is better: 1 / value, -value, or the value itself. CloudAI's words."""


class SweepPolicy(Model):
    """Which points of a sweep are run, and which lists are one."""

    fields: tuple[str, ...] = Field((), description="Keys of [cmd_args] that take a list and are to sweep over it.")
    method: Literal["grid", "random"] = Field("grid", description="Every valid point, or `points` drawn at random.")
    points: int = Field(10, ge=1, le=1000, description="How many points to draw; for `random` only.")
    seed: int = Field(0, description="The same seed draws the same points every night.")
    metric: MetricName = Field("step_time", description="What the best point is best in.")
    reward: RewardKind | None = Field(
        None, description="How the metric becomes a reward, of which more is better; by the metric when unset."
    )


HETERO_MIMO = "HeteroMIMO"
"""`test_template_name` of Megatron-LM's heterogeneous-parallel multimodal training, which has no launcher."""


class Dependency(Model):
    """When a test of a scenario may start, seen from another one of it. The first two types are CloudAI's."""

    type: Literal["start_post_comp", "start_post_init", "start_post_success"] = Field(
        description="When the other one has ended, has started, or has ended well."
    )
    id: str = Field(description="The other test's id.")


class TestDefinition(Model):
    """One test, after its scenario's overrides: what the person wrote, nothing that they did not write.

    `cmd_args` holds exactly the keys of `[cmd_args]` (checked against the flag table in `launch/flags.py`).
    """

    __test__ = False  # not a pytest class

    id: str
    name: str
    description: str = ""
    test_template_name: str = "MegatronBridge"
    source: str = Field("", description="The file it was read from.")
    cmd_args: dict[str, Any]
    extra_env_vars: dict[str, str] = {}
    extra_cmd_args: dict[str, str] = {}
    extra_container_mounts: tuple[str, ...] = ()
    git_repos: tuple[GitRepo, ...]
    nemo_run_repo: GitRepo
    time_limit: str | None = None
    iterations: int = Field(1, ge=1)
    harvest: HarvestPolicy = HarvestPolicy()
    gate: GatePolicy = GatePolicy()
    canary: bool = Field(False, description="Its pins never move: what it measures is the cluster.")
    secrets: dict[str, SecretRef] = Field({}, description="Environment variable to the place of its value.")
    compat: Compat = Field("none", description="Whose verdict on sizes and CUDA graphs counts: ours, or CloudAI's own.")
    axes: tuple[SweepAxis, ...] = Field((), description="What is swept over; `cmd_args` holds the other fields.")
    drawn: tuple[SweepAxis, ...] = Field((), description="What is drawn anew for each point (CloudAI's env_params).")
    sweep: SweepPolicy = SweepPolicy()
    sbatch_args: tuple[str, ...] = Field((), description="sbatch options of this test, such as its node list.")
    dependencies: tuple[Dependency, ...] = Field((), description="Tests of the same scenario that come before it.")

    @property
    def has_launcher(self) -> bool:
        """Whether the workload's own repository submits it, through NeMo-Run; else a batch script is rendered here."""
        return self.test_template_name != HETERO_MIMO

    @property
    def max_steps(self) -> int | None:
        """Iterations that a run must reach; None when the configuration leaves it to the recipe.

        Of a schedule in samples, which takes precedence, it is the samples over the global batch, rounded up.
        """
        if not self.has_launcher and self.cmd_args.get("train_samples"):
            return -(-int(self.cmd_args["train_samples"]) // int(self.cmd_args["gb"]))
        steps = self.cmd_args.get("max_steps")
        return int(steps) if steps is not None else None

    @property
    def megatron_bridge(self) -> GitRepo:
        """The repository of the launcher, or the program: the first that says so, else by its URL or mount point."""
        return next(
            (repo for repo in self.git_repos if repo.launcher is not None),
            next((repo for repo in self.git_repos if repo.is_megatron_bridge), self.git_repos[0]),
        )


class InvalidTest(Model):
    """A test that cannot run, with every violation found in it. It gets its own verdict; the others run."""

    id: str
    source: str = ""
    violations: tuple[str, ...] = Field(description="Each names the place where it was written.")


class Scenario(Model):
    """A named set of tests that run in one night."""

    name: str
    source: str = ""
    tests: tuple[TestDefinition, ...]
    invalid: tuple[InvalidTest, ...] = ()
    warnings: tuple[str, ...] = ()


class RunDependency(Dependency):
    """A dependency on every run of another test."""

    run_keys: tuple[str, ...] = Field((), description="Its runs of this night; none where it cannot run.")


class RunSpec(Model):
    """One concrete configuration, nothing left to choose."""

    scenario: str
    night: NightId
    test: TestDefinition
    sweep_point: dict[str, Any] = {}
    iteration: int = 1
    repeat: int = 0
    after: tuple[RunDependency, ...] = ()

    @property
    def run_key(self) -> str:
        """The run's name everywhere: job, store, artifacts."""
        return make_run_key(
            scenario=self.scenario,
            night=self.night,
            test_id=self.test.id,
            sweep_point=self.sweep_point,
            iteration=self.iteration,
            repeat=self.repeat,
        )

    @property
    def test_slug(self) -> str:
        """The test's part of the run key: everything before `-<night>-<hash>`."""
        return self.run_key[: -len(f"-{self.night}-") - 10]

    @property
    def max_steps(self) -> int | None:
        """Iterations that the run must reach (`TestDefinition.max_steps`)."""
        return self.test.max_steps


# --- what the stages produce -----------------------------------------------------------------------------------------


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
    environment: dict[str, str] = {}
    secret_environment: dict[str, SecretRef] = {}
    batch_script: str | None = Field(
        None, description="Text of the script that `argv` submits, for a workload that has no launcher to write one."
    )
    sbatch_args: tuple[str, ...] = Field((), description="Options our sbatch shim adds before the script.")
    nodes: int = Field(ge=1)
    tasks_per_node: int = Field(ge=1)
    time_limit_seconds: int | None = None
    max_steps: int | None = None
    output_dir: Path | None = Field(
        None,
        description="Host folder of tb_logs/, configs/, checkpoints/; None in a container (job folder).",
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


class Outcome(enum.StrEnum):
    """What became of a job, from Slurm's state and the run's own evidence together."""

    SUCCEEDED = "succeeded"
    TEARDOWN = "teardown"  # all steps done, then failed while shutting down
    SHORT = "short"  # ended before the last iteration, whatever Slurm says
    INFRASTRUCTURE = "infrastructure"
    TIMEOUT = "timeout"
    OUT_OF_MEMORY = "out_of_memory"
    PROGRAM_ERROR = "program_error"
    CANCELLED = "cancelled"
    NEVER_STARTED = "never_started"


class Job(Model):
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
    etag: str = Field(default="", description="What S3 calls these bytes; checked where S3 does not record the sha256.")
    mtime_ns: int = 0
    kind: Literal["checkpoint", "tensorboard", "log", "config", "summary", "metrics", "other"]


class CheckpointState(enum.StrEnum):
    """How whole a checkpoint directory is."""

    COMPLETE = "complete"
    IN_PROGRESS = "in_progress"
    DAMAGED = "damaged"


class Checkpoint(Model):
    """One `iter_*` directory of a run."""

    path: Path
    iteration: int
    state: CheckpointState
    reason: str = Field("", description="Why it is not complete.")
    size: int = Field(0, description="Bytes of its regular files when it was judged.")


class Summary(Model):
    """What a run measured. None means not measured, and never passes a gate."""

    steps_expected: int | None = None
    steps_done: int = 0
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
    tail_slowdown: float | None = Field(
        None, description="Median step time of the last steps over that of the whole steady window: 1 is as fast."
    )
    tflops_per_gpu: float | None = Field(None, description="Median over the steady window, TFLOP/s per GPU.")
    tflops_per_gpu_p05: float | None = None
    tflops_per_gpu_p95: float | None = None
    tflops_per_gpu_spread: float | None = Field(None, description="As step_time_spread.")
    tokens_per_second_per_gpu: float | None = Field(None, description="Over the steady window, tokens / s / GPU.")
    peak_memory: float | None = Field(None, description="Largest mem-max-allocated, gigabytes.")
    final_loss: float | None = Field(None, description="lm loss of the last step.")
    loss_digest: str | None = Field(
        None, description="`<source>:<sha256>` of the loss at every step; the same only where every bit is the same."
    )
    loss_anchors: tuple[tuple[int, float], ...] = Field((), description="Step and lm loss, first and last among them.")
    grad_norm_min: float | None = Field(None, description="Smallest finite grad norm of all steps.")
    grad_norm_max: float | None = Field(None, description="Largest finite grad norm of all steps.")
    non_finite_steps: int = Field(0, description="Steps whose loss or grad norm was missing or not finite.")
    nan_iterations: int | None = Field(None, description="Iterations that the log counts as NaN; None without a log.")
    skipped_iterations: int | None = Field(None, description="Iterations that the log counts as skipped; as above.")
    queue_time: float | None = Field(None, description="From submission to the job's start, seconds.")
    startup_time: float | None = Field(None, description="From the job's start to its first iteration, seconds.")
    checkpoint_time: float | None = Field(
        None, description="Median time for which training stood still to save a checkpoint, seconds."
    )
    source: Literal["tensorboard", "log", "none"] = "none"
    damage: tuple[str, ...] = Field((), description="What was wrong with the files that were read.")
    notes: tuple[str, ...] = Field((), description="Where values came from, when not all from one source; no damage.")


class RunRecord(Model):
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
    facts: dict[str, str] = Field({}, description="Driver, CUDA, NCCL, the image's release: as the job itself says.")
    harvested_at: datetime

    @property
    def job(self) -> Job:
        """The attempt that counts."""
        return self.jobs[-1]


class VerdictStatus(enum.StrEnum):
    """The answer in the morning."""

    PASSED = "passed"
    IMPROVED = "improved"
    NO_BASELINE = "no_baseline"
    REGRESSED = "regressed"
    UNSTABLE = "unstable"
    SHORT = "short"
    FAILED = "failed"
    CANCELLED = "cancelled"
    INFRASTRUCTURE = "infrastructure"
    INVALID = "invalid"


class Comparison(Model):
    """One metric of a run against its baseline."""

    metric: str
    unit: str
    lower_is_better: bool
    value: float | None
    baseline: float | None
    change: float | None = Field(None, description="(value - baseline) / baseline, signed.")
    threshold: float
    status: Literal["passed", "improved", "regressed", "missing", "no_baseline"]
    golden: float | None = Field(None, description="The golden values' own, over the same steps; None without any.")


class RangeCommit(Model):
    """One commit between two pins. Texts are the author's own and may hold anything."""

    commit: str = Field(description="Full 40-character commit.")
    subject: str
    author: str = Field(description="Name, without address.")
    authored_at: datetime


class RepositoryChange(Model):
    """A repository that was pinned to another commit in the suspect night."""

    name: str = Field(description="`Megatron-Bridge` or `NeMo-Run`.")
    url: str
    before: str = Field(description="Full commit of the last good night.")
    after: str = Field(description="Full commit of the suspect night.")
    commits: tuple[RangeCommit, ...] = Field((), description="What came after `before`, up to `after`, newest first.")
    note: str = Field("", description="Why commits are missing here.")


class ValueChange(Model):
    """A value that is not the same in both nights; empty text for one that is not there."""

    name: str
    before: str
    after: str


class Suspects(Model):
    """What changed between the last night of the good level and the night that is suspect."""

    last_good: str = Field(description="The last night that certainly had the good level.")
    night: str = Field(description="The last night with which the other level may have begun.")
    run_before: str = Field(description="Run key of the former.")
    run_after: str = Field(description="Run key of the latter.")
    repositories: tuple[RepositoryChange, ...] = ()
    configuration: tuple[ValueChange, ...] = Field((), description="Of the test, and of what the run itself dumped.")
    environment: tuple[ValueChange, ...] = Field((), description="Image, launcher, nodes, environment variables.")
    notes: tuple[str, ...] = Field((), description="What could not be compared, and why.")


class Verdict(Model):
    """Stage 6, compare: what the night means for one test."""

    run_key: str
    test_id: str
    night: str
    status: VerdictStatus
    reasons: tuple[str, ...] = ()
    comparisons: tuple[Comparison, ...] = ()
    baseline_runs: tuple[str, ...] = Field((), description="Run keys of the runs compared with.")
    reference_run: str | None = Field(None, description="Run key of the run that its test names as reference.")
    job_id: int | None = None
    store_url: str = ""
    prefix: str = ""
    series: str = Field("", description="The series it was compared in; empty when nobody could say.")
    reruns: int = Field(0, description="Runs of this night that are still wanted before the verdict counts.")
    suspect_nodes: tuple[str, ...] = Field((), description="Nodes that those runs should do without, if they can.")
    suspects: Suspects | None = Field(None, description="What changed, where the run is not as the good ones were.")

    @property
    def exit_code(self) -> int:
        """DESIGN.md's exit code for this verdict alone."""
        return EXIT_CODES[self.status]


EXIT_CODES: dict[VerdictStatus, int] = {
    VerdictStatus.PASSED: 0,
    VerdictStatus.IMPROVED: 0,
    VerdictStatus.NO_BASELINE: 0,
    VerdictStatus.REGRESSED: 1,
    VerdictStatus.UNSTABLE: 1,
    VerdictStatus.INVALID: 2,
    VerdictStatus.FAILED: 3,
    VerdictStatus.SHORT: 3,
    VerdictStatus.CANCELLED: 3,
    VerdictStatus.INFRASTRUCTURE: 4,
}


class SweepPoint(Model):
    """One point of a sweep that was run, as often as its test's `iterations` say."""

    point: dict[str, Any] = Field(description="Axis name to value, as in `RunSpec.sweep_point`.")
    run_keys: tuple[str, ...]
    status: VerdictStatus = Field(description="The gravest verdict of its runs.")
    value: float | None = Field(None, description="Median over its runs, in the metric's unit; None without one.")
    reward: float | None = Field(None, description="More is better; None where there is no value to reward.")
    reason: str = Field("", description="Why there is no reward; empty where there is one.")


class SkippedPart(Model):
    """A part of a sweep that breaks a rule and was not run: a point, or all points that share some values."""

    point: dict[str, Any] = Field(description="Axis name to value; an axis that is not named may have any of its own.")
    points: int = Field(ge=1, description="How many points it has.")
    rule: str
    reason: str = Field(description="What the rule says of its first point.")


class SweepResult(Model):
    """What became of a swept test in one night."""

    test_id: str
    night: str
    metric: MetricName
    unit: str
    reward: RewardKind
    points: tuple[SweepPoint, ...] = Field(description="Best first; those without a reward last.")
    skipped: tuple[SkippedPart, ...] = ()
    skipped_points: int = Field(0, description="Points in the parts that were skipped, the unlisted ones included.")
    note: str = Field("", description="What is not told of the skipped points; empty where everything is.")
    configuration: str = Field("", description="The best point alone as a scenario file, TOML; empty without one.")

    @property
    def best(self) -> SweepPoint | None:
        """The point with the highest reward; of several the one that was written first. None where no point has one."""
        return self.points[0] if self.points and self.points[0].reward is not None else None


class NightReport(Model):
    """What `nightly_regression` returns: every test's verdict and where the report is."""

    scenario: str
    night: str
    verdicts: tuple[Verdict, ...]
    report: str = Field("", description="Where the HTML report is kept.")
    sweeps: tuple[SweepResult, ...] = Field((), description="One for each swept test, in the scenario's order.")
    note: str = Field("", description="What a person should know about the night as a whole, such as that it ran late.")
    found_again: bool = Field(False, description="Whether an earlier flow run of this night had every verdict already.")

    @property
    def exit_code(self) -> int:
        """The first of 1, 3, 4, 2 that occurred, else 0."""
        codes = {verdict.exit_code for verdict in self.verdicts}
        return next((code for code in (1, 3, 4, 2) if code in codes), 0)
