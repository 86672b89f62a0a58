"""Models that survive the way through JSON, what they answer, and exit codes."""

import inspect
import math
from datetime import UTC, datetime
from pathlib import Path

import pytest
from pydantic import TypeAdapter, ValidationError

from nightbridge import models
from nightbridge.models import (
    Checkout,
    Checkpoint,
    CheckpointState,
    ClusterLimits,
    ClusterSettings,
    Comparison,
    GatePolicy,
    GitRepo,
    HarvestPolicy,
    Image,
    InvalidTest,
    Job,
    JobState,
    JobStatus,
    LauncherEnvironment,
    LaunchPlan,
    Model,
    NightReport,
    Outcome,
    PinnedRepository,
    RunRecord,
    RunSpec,
    Scenario,
    SecretRef,
    Site,
    SiteChoice,
    StoredFile,
    StoreSettings,
    Summary,
    TestDefinition,
    Verdict,
    VerdictStatus,
    Violation,
)

NOON = datetime(2026, 11, 21, 12, 30, 15, 123456, tzinfo=UTC)


def test_the_parts_of_a_run_key_can_be_told_apart() -> None:
    spec = SPEC.model_copy(update={"night": "try-2-b"})

    assert spec.run_key.startswith(f"{spec.test_slug}-try-2-b-")
    assert spec.test_slug == "llama3-70b"


def test_the_same_site_is_named_in_proposed_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my site.toml").touch()
    choice = SiteChoice(system="my site.toml", workspace=Path("/ws"))

    assert choice.as_options() == " --system 'my site.toml' --workspace /ws"
    assert choice.from_anywhere().as_options() == f" --system '{tmp_path}/my site.toml' --workspace /ws"
    assert SiteChoice(system="a-block").from_anywhere().as_options() == " --system a-block"
    assert SiteChoice().as_options() == ""


# --- the way through JSON --------------------------------------------------------------------------------------------

REPOSITORY = PinnedRepository(
    url="https://example.org/x.git", ref="main", commit="a" * 40, path=Path("/w/x"), subject="ü", committed_at=NOON
)
TEST = TestDefinition(
    id="llama3 70B",
    name="llama3_70b",
    source="conf/a.toml",
    cmd_args={"tp": 2, "lr": 3e-4, "vp": None, "domain": "llm", "sp": True, "many": [1, 2], "recompute": {"n": 1}},
    extra_env_vars={"NCCL_DEBUG": "INFO"},
    extra_cmd_args={"train.log_interval": "1"},
    extra_container_mounts=("/data:/data:ro",),
    git_repos=(GitRepo(url="https://example.org/Megatron-Bridge.git", init_submodules=True),),
    nemo_run_repo=GitRepo(url="https://example.org/Run.git", commit="v0.11.1"),
    time_limit="01:00:00",
    harvest=HarvestPolicy(checkpoint="all"),
    gate=GatePolicy(step_time=0.02),
    secrets={"HF_TOKEN": SecretRef(source="env", name="HF_TOKEN")},
    sbatch_args=("--exclusive",),
)
SPEC = RunSpec(scenario="nightly", night="2026-11-21", test=TEST, sweep_point={"mb": 1, "lr": 0.1}, iteration=2)
CHECKOUT = Checkout(
    megatron_bridge=REPOSITORY,
    nemo_run=REPOSITORY,
    environment=LauncherEnvironment(python=Path("/w/envs/x/bin/python"), digest="d" * 16),
)
IMAGE = Image(kind="sqsh", reference="docker://x:1", path=Path("/w/i.sqsh"), digest="sha256:0", size=1 << 40)
PLAN = LaunchPlan(
    run_key=SPEC.run_key,
    attempt=2,
    attempt_dir=Path("/w/runs/x/a2"),
    argv=("python", "setup_experiment.py", "--x", "a b\n'c'"),
    cwd=Path("/w/x"),
    environment={"A": "ü"},
    secret_environment={"HF_TOKEN": SecretRef(source="block", name="hf-token")},
    nodes=2,
    tasks_per_node=8,
    output_dir=Path("/w/runs/x/a2/output"),
)
STATUS = JobStatus(job_id=4711, name="x-a2", state=JobState.NODE_FAIL, exit_code=1, signal=9, ended_at=NOON)
JOB = Job(
    run_key=SPEC.run_key,
    attempt=2,
    job_id=4711,
    cluster="a",
    attempt_dir=Path("/w/runs/x/a2"),
    script=Path("/w/runs/x/a2/job.sh"),
    experiment_dir=Path("/w/e"),
    submitted_at=NOON,
    status=STATUS,
    exit_file_code=1,
    outcome=Outcome.INFRASTRUCTURE,
    outcome_reason="a node failed",
)
SUMMARY = Summary(
    steps_expected=50, steps_done=50, step_time=1.217000000000001, tflops_per_gpu=700.0, peak_memory=80.1, damage=("x",)
)
RECORD = RunRecord(
    spec=SPEC,
    checkout=CHECKOUT,
    image=IMAGE,
    plan=PLAN,
    jobs=(JOB, JOB),
    store_url="s3://nightly/llm",
    prefix="runs/x/y/z/a2",
    series="s" * 12,
    summary=SUMMARY,
    checkpoints=(Checkpoint(path=Path("/c/iter_0000050"), iteration=50, state=CheckpointState.COMPLETE, size=9),),
    harvested_at=NOON,
)
COMPARISON = Comparison(
    metric="step_time",
    unit="s",
    lower_is_better=True,
    value=1.08,
    baseline=1.0,
    change=0.08,
    threshold=0.05,
    status="regressed",
)
VERDICT = Verdict(
    run_key=SPEC.run_key,
    test_id="llama3 70B",
    night="2026-11-21",
    status=VerdictStatus.REGRESSED,
    reasons=("step time +8.0 %",),
    comparisons=(COMPARISON,),
    job_id=4711,
)
REPORT = NightReport(scenario="nightly", night="2026-11-21", verdicts=(VERDICT,), report="file:///x.html")
INVALID = InvalidTest(id="b", findings=(Violation(message="x", places=("b.toml:3",)),))
SCENARIO = Scenario(
    name="nightly", tests=(TEST,), invalid=(INVALID,), findings=(Violation(severity="warning", message="w"),)
)
SITE = Site(
    workspace=Path("/w"),
    cluster=ClusterSettings(kind="slurm", name="a", extra_sbatch_args=("--x=1",), slurm_conf=Path("/etc/slurm.conf")),
    store=StoreSettings(url="s3://nightly", secret_key=SecretRef(source="env", name="KEY"), ca_bundle=Path("/ca")),
)
LIMITS = ClusterLimits(partitions=("a", "b"), max_nodes=4, has_pyxis=True)
STORED = StoredFile(path="logs/x", size=1, sha256="0" * 64, kind="log")


@pytest.mark.parametrize(
    "model",
    [SITE, LIMITS, SCENARIO, SPEC, CHECKOUT, IMAGE, PLAN, STATUS, JOB, STORED, SUMMARY, RECORD, VERDICT, REPORT],
    ids=lambda model: type(model).__name__,
)
def test_every_model_is_the_same_after_json(model: Model | StoredFile) -> None:
    adapter = TypeAdapter(type(model))

    assert adapter.validate_json(adapter.dump_json(model)) == model


def test_a_run_keeps_its_key_through_json() -> None:
    assert RunSpec.model_validate_json(SPEC.model_dump_json()).run_key == SPEC.run_key


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_measurement_that_is_no_number_comes_back_as_not_measured(value: float) -> None:
    summary = SUMMARY.model_copy(update={"step_time": value})

    assert Summary.model_validate_json(summary.model_dump_json()).step_time is None


ALL_MODELS = [kind for _, kind in inspect.getmembers(models, inspect.isclass) if issubclass(kind, Model)]


@pytest.mark.parametrize("kind", ALL_MODELS, ids=lambda kind: kind.__name__)
def test_every_model_is_frozen_and_refuses_what_it_does_not_know(kind: type[Model]) -> None:
    assert kind.model_config["frozen"]
    assert kind.model_config["extra"] == "forbid"


def test_a_value_that_was_changed_on_disk_is_refused() -> None:
    with pytest.raises(ValidationError, match="steps_done"):
        Summary.model_validate_json(SUMMARY.model_dump_json().replace('"steps_done":50', '"steps_done":"5O"'))


# --- what they answer ------------------------------------------------------------------------------------------------


def test_tests_with_the_usual_policy_share_it() -> None:
    one, other = (TestDefinition.model_validate(TEST.model_dump(exclude={"gate"})) for _ in range(2))

    assert one.gate is other.gate  # a copy for each costs more than the rest of the validation


def test_the_last_job_counts() -> None:
    first = JOB.model_copy(update={"attempt": 1})

    assert RECORD.model_copy(update={"jobs": (first, JOB)}).job == JOB
    assert JOB.name == f"{SPEC.run_key}-a2"


def test_without_a_store_the_workspace_holds_it() -> None:
    assert Site(workspace=Path("/w")).store_settings.url == "file:///w/store"
    assert SITE.store_settings.url == "s3://nightly"


@pytest.mark.parametrize(
    ("urls", "mounts", "chosen"),
    [
        (["https://x/Run.git", "https://x/Megatron-Bridge.git"], [None, None], 1),
        (["https://x/other.git", "https://x/fork.git"], [None, "/opt/Megatron-Bridge/"], 1),
        (["https://x/a.git", "https://x/b.git"], [None, None], 0),
    ],
)
def test_the_repository_of_the_launcher(urls: list[str], mounts: list[str | None], chosen: int) -> None:
    repositories = tuple(GitRepo(url=url, mount_as=mount) for url, mount in zip(urls, mounts, strict=True))

    assert TEST.model_copy(update={"git_repos": repositories}).megatron_bridge == repositories[chosen]


@pytest.mark.parametrize("status", list(VerdictStatus))
def test_every_verdict_has_an_exit_code_of_the_command_line(status: VerdictStatus) -> None:
    good = {"passed", "improved", "no_baseline", "insufficient_data"}

    code = VERDICT.model_copy(update={"status": status}).exit_code

    assert code in range(5)
    assert (code == 0) == (status in good)


@pytest.mark.parametrize(
    ("statuses", "code"),
    [
        (("passed", "improved", "no_baseline", "insufficient_data"), 0),
        (("passed", "invalid"), 2),
        (("invalid", "infrastructure"), 4),
        (("invalid", "infrastructure", "failed"), 3),
        (("short", "cancelled"), 3),
        (("invalid", "infrastructure", "failed", "unstable"), 1),
        (("regressed", "passed"), 1),
        ((), 0),
    ],
)
def test_a_night_ends_with_the_first_of_1_3_4_2_that_occurred(statuses: tuple[str, ...], code: int) -> None:
    verdicts = tuple(VERDICT.model_copy(update={"status": VerdictStatus(status)}) for status in statuses)

    assert REPORT.model_copy(update={"verdicts": verdicts}).exit_code == code
