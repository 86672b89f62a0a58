"""What the user requested: tests, scenarios, and the concrete runs of a night."""

import re
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from nightbridge.models.base import Model, NightId, make_run_key, slug_in
from nightbridge.models.metrics import METRIC_BY_NAME, MetricName
from nightbridge.models.site import Limits, SecretRef


def _checked_repository_path(text: str) -> str:
    path = PurePosixPath(text)
    if not text or path.is_absolute() or ".." in path.parts:
        raise PydanticCustomError("repository_path", "must be a path inside the repository, without ..")
    return str(path)


RepositoryPath = Annotated[str, AfterValidator(_checked_repository_path)]

MOUNT_POINT = "/opt/Megatron-Bridge"
"""Where Megatron-Bridge lies in NVIDIA's images."""


def is_ref(text: str) -> bool:
    """Whether a branch, a tag or a commit may be called this: git check-ref-format, as far as it matters here."""
    return bool(text) and not text.startswith("-") and not re.search(r"[\s~^:?*\[\\]|\.\.|@\{", text)


class GitRepo(Model):
    """A repository and the ref to pin, as a test file names it (CloudAI's `git_repos` entry)."""

    url: str = Field(description="Address, without credentials.")
    commit: str = Field("main", description="Branch, tag, or full or abbreviated commit.")
    init_submodules: bool = Field(False, description="Check out submodules as well.")
    submodules: dict[str, str] = Field(
        {}, description="Submodules at other refs than the tree pins, by folder; needs `init_submodules`."
    )
    mount_as: str | None = Field(None, description="Where the checkout is mounted in the container.")
    launcher: RepositoryPath | None = Field(
        None, description="Where the launcher lies in it: that makes it Megatron-Bridge's repository, whatever its URL."
    )

    @property
    def is_megatron_bridge(self) -> bool:
        """Whether URL or mount point are those of Megatron-Bridge, as CloudAI decides it."""
        return "megatron-bridge" in self.url.lower() or (self.mount_as or "").rstrip("/") == MOUNT_POINT


def _checked_checkpoint_policy(text: str) -> str:
    if not re.fullmatch(r"none|last|all|every [1-9]\d{0,5}", text):
        raise PydanticCustomError("checkpoint_policy", 'must be "none", "last", "all" or "every K", as in "every 5"')
    return text


CheckpointPolicy = Annotated[str, AfterValidator(_checked_checkpoint_policy)]


class HarvestPolicy(Model):
    """What of a run is kept."""

    checkpoint: CheckpointPolicy = Field(
        "last",
        description="Which complete checkpoints are kept: none, last, all, or `every K`, counted from the last. "
        "By default none where it is likely to be larger than `max_checkpoint_bytes`.",
    )
    training_report: bool = Field(
        False, description="Whether CloudAI's training_report.json is stored; on where `[training_report]` is written."
    )
    max_checkpoint_bytes: int = Field(
        200_000_000_000, ge=0, description="A test that requests a checkpoint which is likely to be larger is invalid."
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


def _band(name: str) -> Any:
    metric = METRIC_BY_NAME[name]
    description = f"Widest band of {metric.label}, relative, and its band while there is little history."
    return Field(metric.band, gt=0, allow_inf_nan=False, description=description)


ControlMode = Literal["off", "on_suspicion", "every_night"]


GOLDEN_LIMIT = 64 << 20
"""Bytes of the largest file of golden values that is read."""


class GatePolicy(Model):
    """When a test has become worse. Relative numbers are shares: 0.05 is 5 %.

    The number of a metric is the widest band that a steady test gets, and its band while there is little history.
    Changes in the good direction beyond the band are improvements, never failures.
    """

    step_time: float = _band("step_time")
    tflops_per_gpu: float = _band("tflops_per_gpu")
    tokens_per_gpu: float = _band("tokens_per_gpu")
    peak_memory: float = _band("peak_memory")
    reserved_memory: float = _band("reserved_memory")
    startup_time: float = _band("startup_time")
    teardown_time: float = _band("teardown_time")
    checkpoint_time: float = _band("checkpoint_time")
    final_loss: float = _band("final_loss")
    loss_curve: float = _band("loss_curve")
    grad_norm: float = _band("grad_norm")
    wall_step_time: float = _band("wall_step_time")
    slow_steps: float = _band("slow_steps")
    tail_slowdown: float = _band("tail_slowdown")
    warmup_step_time: float = _band("warmup_step_time")
    first_step_time: float = _band("first_step_time")
    warmup_steps: int = Field(
        10, ge=0, description="Steps at the start that no statistic uses; of a run with fewer than twice as many, half."
    )
    post_profiling_steps: int = Field(0, ge=0, description="Steps after a profile that no statistic uses.")
    baseline_runs: int = Field(7, ge=1, description="How many last good runs make the baseline.")
    cold_start: int = Field(7, ge=2, description="Good nights from which on a band comes from the test's own history.")
    sigmas: float = Field(4.0, gt=0, description="Half a band, in standard deviations of the test's own nights.")
    least_change: float = Field(0.02, gt=0, description="Changes of a single night below this are ignored.")
    p_value: float = Field(1e-5, gt=0, lt=1, description="Largest p-value of a change of level that counts.")
    minimum_change: float = Field(0.015, gt=0, description="Smallest change of level that counts.")
    skipped_iterations: int = Field(
        0, ge=0, description="Iterations that may be skipped; fp16's loss scaling needs some."
    )
    nan_iterations: int = Field(0, ge=0, description="Iterations that the log may count as NaN.")
    deterministic: bool | None = Field(
        None,
        description="Whether losses are the same bit for bit every night, so that any change is a regression. Unset: "
        "where those of the last five good nights were.",
    )
    limits: dict[MetricName, Limits] = Field(
        {}, description="Floors and ceilings, by metric, which has to be measured then."
    )
    required: tuple[MetricName, ...] = Field((), description="Metrics that must be measured, besides those always.")
    canary: str | None = Field(None, description="Id of the test that separates the cluster's drift from the code's.")
    control: ControlMode = Field(
        "on_suspicion",
        description="When the last good point runs beside tonight's, on the same nodes: never (further runs of "
        "tonight's confirm), when a result is suspicious, or every night, which finds 1 %.",
    )
    pairs: int = Field(
        1,
        ge=0,
        le=5,
        description="Such pairs, two runs each, that a suspicious result is given before it counts; eight times as "
        "many at most, 24 times where they speak for a regression. 0: one run is enough.",
    )
    max_runs: int | None = Field(None, ge=0, description="Further runs of a night at most, whatever requests them.")
    confirm: int | None = Field(None, ge=0, le=10, description="Up to 0.2: runs; read as half as many pairs.")
    golden: str | None = Field(None, description="Golden values to compare with, besides history: a JSON file.")
    golden_rules: GoldenPolicy = GoldenPolicy()
    reference: str | None = Field(
        None, min_length=1, description="Run key of the run, or id of the test, whose losses this one has to follow."
    )
    reference_rules: ReferencePolicy = ReferencePolicy()

    @model_validator(mode="before")
    @classmethod
    def _confirm_as_pairs(cls, written: Any) -> Any:
        runs = written.get("confirm") if isinstance(written, dict) else None
        return {"pairs": -(-runs // 2), **written} if isinstance(runs, int) else written

    def __hash__(self) -> int:
        # `limits` has no hash, and a default without one is copied by every validation of a test.
        return hash(self.model_dump_json())

    def warmup_of(self, steps: int) -> int:
        """How many of a run's steps are its warm-up; of a short run the first half."""
        return self.warmup_steps if steps >= 2 * self.warmup_steps else steps // 2

    def without_golden(self) -> "GatePolicy":
        """The same, held to no golden values and no reference run."""
        return self.model_copy(update={"golden": None, "reference": None})


Compat = Literal["none", "cloudai"]

Severity = Literal["error", "warning"]

READING_RULE = "configuration"
"""The rule of what cannot be read: an unknown key, a value of a wrong type."""


class Violation(Model):
    """One thing that is wrong with a test, or odd about it.

    Attributes:
        rule: The rule's id; `nightbridge rules ID` describes it.
        severity: An error keeps the run from starting, a warning does not.
        fields: The fields that the rule looked at.
        message: What is wrong, with the values, and the way out.
        places: `FILE:LINE` of each key that it is about; FILE alone where the line is not known.
    """

    rule: str = READING_RULE
    severity: Severity = "error"
    fields: tuple[str, ...] = ()
    message: str
    places: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.line()

    def line(self, hint: str = "") -> str:
        """The violation as compilers write theirs, `FILE:LINE: HINT: MESSAGE [RULE]`, so that editors can jump to it.

        Args:
            hint: Its severity, or the id of its test, where what surrounds the line does not tell it.
        """
        text = self.message if self.rule == READING_RULE else f"{self.message} [{self.rule}]"
        return ": ".join(filter(None, (", ".join(self.places), hint, text)))


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
    """One test, after its scenario's overrides: exactly what the user wrote.

    `cmd_args` holds exactly the keys of `[cmd_args]` (checked against the flag table in `launch/flags.py`).
    """

    __test__ = False  # not a pytest class

    id: str
    name: str
    description: str = ""
    test_template_name: str = "MegatronBridge"
    source: str = Field("", description="The file it was read from.")
    cmd_args: dict[str, Any]
    extra_env_vars: dict[str, str] = Field(default_factory=dict)
    extra_cmd_args: dict[str, str] = Field(default_factory=dict)
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
    drawn: tuple[SweepAxis, ...] = Field((), description="What is drawn again for each point (CloudAI's env_params).")
    sweep: SweepPolicy = SweepPolicy()
    sbatch_args: tuple[str, ...] = Field((), description="sbatch options of this test, such as its node list.")
    dependencies: tuple[Dependency, ...] = Field((), description="Tests of the same scenario that come before it.")
    lines: dict[str, str] = Field({}, description="`FILE:LINE` of each key that is written, as in `cmd_args.tp`.")

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
        """The repository of the launcher, or the program: the one with `launcher`, else by its URL or mount point."""
        if len(self.git_repos) == 1:
            return self.git_repos[0]
        return next(
            (repo for repo in self.git_repos if repo.launcher is not None),
            next((repo for repo in self.git_repos if repo.is_megatron_bridge), self.git_repos[0]),
        )


class InvalidTest(Model):
    """A test that cannot run, with every violation found in it. It gets its own verdict; the others run."""

    id: str
    source: str = ""
    findings: tuple[Violation, ...] = ()
    readable: TestDefinition | None = Field(
        None, description="What could be read of it, for the rules that have not been checked yet."
    )

    @model_validator(mode="before")
    @classmethod
    def _from_lines(cls, data: Any) -> Any:
        """Read a night's plan of before violations had fields: a line for each."""
        if not isinstance(data, dict) or "violations" not in data:
            return data
        lines = data["violations"]
        kept = {name: value for name, value in data.items() if name != "violations"}
        return {**kept, "findings": [{"message": line} for line in lines]}

    @property
    def violations(self) -> tuple[str, ...]:
        """The findings as lines, each with the place where it was written."""
        return tuple(map(str, self.findings))


class Scenario(Model):
    """A named set of tests that run in one night."""

    name: str
    source: str = ""
    tests: tuple[TestDefinition, ...]
    invalid: tuple[InvalidTest, ...] = ()
    findings: tuple[Violation, ...] = Field((), description="What is odd, and keeps no test from running.")

    @property
    def test_ids(self) -> tuple[str, ...]:
        """Of all its tests, those last that cannot run."""
        return (*(test.id for test in self.tests), *(test.id for test in self.invalid))

    @property
    def warnings(self) -> tuple[str, ...]:
        """The findings as lines, each with the place where it was written."""
        return tuple(dict.fromkeys(map(str, self.findings)))


class RunDependency(Dependency):
    """A dependency on every run of another test."""

    run_keys: tuple[str, ...] = Field((), description="Its runs of this night; none where it cannot run.")


class Arm(Model):
    """One of the two runs of a pair, which run one after the other on the same nodes."""

    role: Literal["new", "control"] = Field(description="Tonight's point, or the last good one.")
    pair: int = Field(ge=1, description="Which pair of its night.")
    reference: str = Field(description="Run key of the last good point.")
    on_suspects: bool = Field(False, description="Whether it is there to tell whether suspect nodes are slow.")


class RunSpec(Model):
    """One concrete configuration, nothing left to choose."""

    scenario: str
    night: NightId
    test: TestDefinition
    sweep_point: dict[str, Any] = Field(default_factory=dict)
    iteration: int = 1
    repeat: int = 0
    arm: Arm | None = Field(None, description="What a further run of a night is for; None for a plain one.")
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
        return slug_in(self.run_key, self.night)
