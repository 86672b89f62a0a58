"""Settings of the outside world: the site, its cluster, store, images and notifications."""

import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from nightbridge.models.base import Model
from nightbridge.models.metrics import MetricName


class SecretRef(Model):
    """Where a secret is found; its value is looked up only in the process that needs it.

    `source` env: `name` is an environment variable. block: a Prefect `Secret` block. toml: `FILE#dotted.key`, a literal
    token that somebody wrote in a TOML file.
    """

    source: Literal["env", "block", "toml"]
    name: str


class SiteChoice(Model):
    """What a person names of a site: the options and flow parameters `system`, `cluster`, `store` and `workspace`."""

    system: str | None = Field(None, description="Name of a Site block, or path of a site or CloudAI system file.")
    cluster: str | None = Field(
        None, description="`local`, `slurm`, `pyslurm`, `auto`, a site file, or the name of a Slurm Cluster block."
    )
    store: str | None = Field(None, description="`file://` or `s3://` URL, or the name of a Harvest Store block.")
    workspace: Path | None = Field(None, description="Folder that the compute nodes see under the same path.")

    @field_validator("system", "cluster", "store", "workspace", mode="before")
    @classmethod
    def _by_its_path(cls, value: object) -> object:
        """A path as text, with the home that `~` is: no shell replaces it behind a `=`, in a unit or in a crontab."""
        return os.path.expanduser(value) if isinstance(value, str | Path) else value

    @classmethod
    def of(cls, parameters: Mapping[str, Any]) -> "SiteChoice":
        """The choice in the parameters of a flow run or a deployment; what else they hold is ignored."""
        return cls.model_validate({name: parameters.get(name) for name in cls.model_fields})

    def parameters(self) -> dict[str, Any]:
        """The choice as parameters of a flow run."""
        return self.model_dump(mode="json")

    def as_options(self) -> str:
        """The options that name the same site, for a command that a message proposes; empty or with a leading space."""
        return "".join(f" --{name} {shlex.quote(value)}" for name, value in self.parameters().items() if value)

    def from_anywhere(self) -> "SiteChoice":
        """The same choice for somebody in another folder: files are named by their absolute paths."""
        named = {name: Path(value) for name, value in self.parameters().items() if value}
        return self.model_copy(update={name: str(path.absolute()) for name, path in named.items() if path.exists()})


class Limits(Model):
    """A floor and a ceiling that a metric never may pass, in its own unit; a limit that is unset limits nothing."""

    min: float | None = Field(None, description="Smallest value that is allowed.")
    max: float | None = Field(None, description="Largest value that is allowed.")


ClusterKind = Literal["local", "slurm", "pyslurm", "auto"]
"""The ways to reach a cluster; `nightbridge.slurm.factory.OPENERS` opens each."""

ContainerSupport = Literal["pyxis", "none"]


class ClusterSettings(Model):
    """How to reach a cluster.

    `kind` local runs batch scripts on this machine, slurm uses Slurm's command-line tools, pyslurm its Python binding,
    and auto takes pyslurm where it works, else the tools.
    """

    kind: ClusterKind = Field(
        "local",
        description="Slurm's commands, pyslurm, pyslurm where it works (auto), or jobs on this machine (local).",
    )
    name: str = Field("local", description="The cluster's name in histories and reports.")
    partition: str | None = Field(None, description="Partition to submit to; the site's default when unset.")
    account: str | None = Field(None, description="Slurm account to charge.")
    qos: str | None = Field(None, description="Quality of service to request.")
    reservation: str | None = Field(None, description="Reservation to run in.")
    gpus_per_node: int | None = Field(None, ge=1, description="GPUs of one node; the launcher's default when unset.")
    extra_sbatch_args: tuple[str, ...] = Field((), description="Further sbatch options, as `--name=value`.")
    env_vars: dict[str, str] = Field({}, description="Environment variables of every run here; a test's own win.")
    bin_dir: Path | None = Field(None, description="Folder of sbatch, squeue, sacct...; found on PATH when unset.")
    slurm_conf: Path | None = Field(None, description="The slurm.conf to use (SLURM_CONF); the system's when unset.")
    containers: ContainerSupport = Field("none", description="How jobs can run in containers here.")
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
        240.0, ge=0, description="Seconds for which an earlier intent to submit forbids another one."
    )
    poll_interval: float = Field(15.0, gt=0, description="Longest interval between two questions to Slurm, seconds.")
    segment: int | None = Field(
        None, ge=1, description="Nodes that must lie close together (--segment); the site's default when unset."
    )
    exclusive: bool = Field(False, description="Request whole nodes where the launcher does not.")
    max_pending: float | None = Field(
        None, gt=0, description="Seconds after which a job that has not started is cancelled; never when unset."
    )
    max_runtime: float | None = Field(
        None,
        gt=0,
        description="Seconds after which a running job is cancelled, whatever its time limit; never when unset.",
    )

    def options(self, *names: str) -> tuple[str, ...]:
        """Those of these options of sbatch and srun that are set, as `--name=value`; each has the name of its field."""
        return tuple(f"--{name}={value}" for name in names if (value := getattr(self, name)))


class RetentionPolicy(Model):
    """How much of each test `prune` leaves in the store; a limit that is unset removes nothing.

    What a baseline, the verdict of a run that stays, or an accepted decision refers to stays, whatever the limits.
    """

    days: float | None = Field(None, ge=1, description="Runs that were stored before so many days go.")
    nights: int | None = Field(None, ge=1, description="Only the runs of each test's newest so many nights stay.")
    max_gb: float | None = Field(
        None, ge=0, description="The oldest runs of a test go until the others fit, 1e9 bytes."
    )


Place = Literal["host", "node"]
"""Where a stage does heavy work: on the flow's host, or through srun on a compute node."""


class StoreLocation(Model):
    """A store without its keys. `url`: `file:///dir` or `s3://bucket/prefix`."""

    url: str = Field(description="`file:///DIRECTORY` or `s3://BUCKET/PREFIX`.")
    endpoint_url: str | None = Field(None, description="S3 endpoint; AWS when unset.")
    region: str | None = Field(None, description="S3 region.")
    profile: str | None = Field(None, description="Profile of the AWS configuration files.")
    ca_bundle: Path | None = Field(None, description="Certificate authorities to trust for this endpoint.")
    path_style: bool = Field(True, description="Address buckets by path, as most own S3 servers need it.")
    role_arn: str | None = Field(None, description="Role to assume (STS), with the keys or the profile.")
    encryption: Literal["none", "AES256", "aws:kms"] = Field(
        "none", description="Server-side encryption to request; the bucket's own default when none."
    )
    kms_key_id: str | None = Field(None, description="Key for `aws:kms`; the bucket's default key when unset.")
    storage_class: str | None = Field(None, description="Storage class of new objects, e.g. STANDARD_IA.")
    tags: dict[str, str] = Field({}, description="Tags of every new object, for lifecycle rules and cost reports.")


class StoreSettings(StoreLocation):
    """Where harvested runs, histories and reports are kept."""

    access_key: SecretRef | None = Field(
        None, description="Where the access key id is found; boto3's own search when unset."
    )
    secret_key: SecretRef | None = Field(None, description="Where the secret access key is found.")
    retention: RetentionPolicy = RetentionPolicy()


class ImportFolders(Model):
    """Where container images are unpacked, and with which options of srun."""

    srun_args: tuple[str, ...] = Field((), description="Further srun options of an import on a node: `--name=value`.")
    cache: Path | None = Field(
        None, description="Fetched layers; as ENROOT_CACHE_PATH or enroot.conf say, else the user's cache, when unset."
    )
    temp: Path | None = Field(
        None, description="Where images are unpacked, a local disk; as ENROOT_TEMP_PATH or enroot.conf say, when unset."
    )


class ImageImport(ImportFolders):
    """How container images are imported."""

    on: Place = Field(
        "host", description="Where imports run: on the host of the flow, or through srun on a compute node."
    )
    credentials: SecretRef | None = Field(
        None, description="A secret of lines `machine HOST login USER password PASSWORD`; enroot's own file when unset."
    )


def _checked_command(text: str) -> str:
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise PydanticCustomError("command", "not a command: {why}", {"why": str(error).lower()}) from error
    if not words:
        raise PydanticCustomError("command", "must name a program")
    return text


class HarvestPlace(Model):
    """Where runs are harvested, and what loads their checkpoints."""

    on: Place = Field(
        "host", description="On the host of the flow, or through srun on a compute node: a login node may be too small."
    )
    srun_args: tuple[str, ...] = Field((), description="Further srun options of a harvest on a node: `--name=value`.")
    timeout: float = Field(86_400.0, gt=0, description="Seconds on a node, waiting in the queue included.")
    load_with: Annotated[str, AfterValidator(_checked_command)] | None = Field(
        None,
        description="An interpreter with torch, or a command that runs one, that loads each checkpoint before it is "
        "stored; none is loaded when unset.",
    )


def _checked_address(text: str) -> str:
    if not text or not text.isprintable() or any(character in " ,;<>" for character in text):
        raise PydanticCustomError("mail_address", "must be one address, as name@example.org")
    return text


MailAddress = Annotated[str, AfterValidator(_checked_address)]


class MailSettings(Model):
    """Mail, without the login's password."""

    smtp_host: str | None = Field(None, description="Host that takes mail; no mail when unset.")
    smtp_port: int | None = Field(
        None, ge=1, le=65535, description="Its port; when unset 587 with starttls, 465 with tls, 25 with none."
    )
    smtp_security: Literal["none", "starttls", "tls"] = Field(
        "starttls", description="starttls begins in the clear and then encrypts, tls is encrypted from the start."
    )
    smtp_user: str | None = Field(None, description="User to log in as; no login when unset.")
    ca_bundle: Path | None = Field(None, description="Certificate authorities to trust; the system's when unset.")
    mail_from: MailAddress | None = Field(None, description="Sender; nightbridge@ this host when unset.")
    mail_to: tuple[MailAddress, ...] = Field((), description="Everybody who gets the mail.")


class NotifySettings(MailSettings):
    """Whom nightbridge notifies, and how: by mail, by a webhook, or both."""

    smtp_password: SecretRef | None = Field(None, description="Where the user's password is found.")
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


class Budget(Model):
    """What confirmation may cost on this cluster, in GPU-hours of pairs and re-runs, and how sure it has to be.

    The cause of a confirmed regression is searched for on the same account.
    """

    night: float | None = Field(None, ge=0, description="In one night of a scenario; no limit when unset.")
    month: float | None = Field(None, ge=0, description="In a calendar month, of all scenarios; no limit when unset.")
    attribution: float = Field(
        0.0, ge=0, description="Of each new regression, what the search for its cause may cost; 0: none is started."
    )
    false_alarms: float = Field(
        1.0,
        gt=0,
        allow_inf_nan=False,
        description="At most so many false alarms in a month, of all tests and metrics of a night together.",
    )


class Successor(Model):
    """Where a repository went on that was folded into another one."""

    url: str = Field(description="Address of the new repository.")
    commit: str = Field(description="The commit with which the new repository has the code.")
    last: str = Field("HEAD", description="The last commit of the old repository that counts.")
    folder: str = Field(
        "", description="Only commits of the new repository that touch this folder count; all of them when empty."
    )


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
    budget: Budget = Budget()
    successors: dict[str, Successor] = Field(
        {}, description="By the address of a repository that moved: where to, so that ranges across the move work."
    )

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
    """What the cluster allows, as far as it is known; None means unknown, never unlimited."""

    partitions: tuple[str, ...] = ()
    partition: str | None = Field(None, description="The partition that jobs go to.")
    account: str | None = Field(None, description="The account that they are charged to.")
    max_nodes: int | None = None
    max_time_seconds: int | None = None
    gpus_per_node: int | None = Field(None, description="GPUs of one node, as the cluster reports or is configured.")
    configured_gpus_per_node: int | None = Field(
        None, description="GPUs of one node by the cluster's settings alone; they override those of a test."
    )
    has_pyxis: bool = False
    accounts: tuple[str, ...] | None = Field(None, description="Accounts that may submit to the partition.")
    gres: tuple[str, ...] | None = Field(None, description="Generic resources of the partition, such as `gpu`.")

    @property
    def has_partition(self) -> bool:
        """Whether there is the partition that jobs go to, or each of a list; true where that is not known."""
        return not (self.partition and self.partitions) or {*self.partition.split(",")} <= {*self.partitions}

    @property
    def has_account(self) -> bool:
        """Whether the account may submit to the partition; true where that is not known."""
        return not (self.account and self.accounts) or self.account in self.accounts
