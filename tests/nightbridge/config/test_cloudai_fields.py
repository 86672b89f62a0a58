"""Every field that CloudAI's files can have: each is honoured, or said to have no meaning here; none is dropped."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nightbridge import config
from nightbridge.config.schema import (
    ENTRY_KEYS,
    IGNORED,
    SCENARIO_IGNORED,
    SCENARIO_KEYS,
    TestTable,
)
from nightbridge.config.sites import CLOUDAI_IGNORED, CloudaiSystem, read_site_file
from nightbridge.errors import InvalidInput
from nightbridge.models import Scenario
from nightbridge.rules.sweep_points import draw

Loader = Callable[..., Scenario]

TEST = """
name = "small"
description = "d"
test_template_name = "MegatronBridge"
{top}
[[git_repos]]
url = "https://github.com/NVIDIA-NeMo/Megatron-Bridge.git"
commit = "v0.4.2"
[nemo_run_repo]
url = "https://github.com/NVIDIA-NeMo/Run.git"
commit = "v0.7.0"
[cmd_args]
gpu_type = "h100"
num_gpus = 8
container_image = "nvcr.io#nvidia/nemo:26.04"
model_family_name = "llama"
model_recipe_name = "llama3_8b"
{args}
{tables}
"""

# CloudAI's models, field by field (its workload, scenario and Slurm system models of August 2026).
TEST_FIELDS = (
    "name description test_template_name cmd_args dse_excluded_args extra_env_vars extra_cmd_args "
    "extra_container_mounts git_repos nsys predictor training_report agent agent_steps agent_metrics "
    "agent_reward_function agent_config env_params nemo_run_repo"
)
ENTRY_FIELDS = "id test_name num_nodes nodes exclude_nodes weight iterations sol ideal_perf time_limit dependencies extra_srun_args"
SCENARIO_FIELDS = "name job_status_check pre_test post_test reports sol_path Tests"
SYSTEM_FIELDS = (
    "name scheduler install_path output_path hf_home_path global_env_vars monitor_interval default_partition "
    "partitions account distribution mpi gpus_per_node ntasks_per_node cache_docker_images_locally extra_srun_args "
    "extra_sbatch_args extra_transient_status_errors status_retry_pause_seconds container_mount_home data_repository "
    "reports"
)


@pytest.mark.parametrize("field", [*TEST_FIELDS.split(), *ENTRY_FIELDS.split()])
def test_a_field_of_a_test_or_an_entry_is_read_or_said_to_do_nothing(field: str) -> None:
    known = {*TestTable.model_fields, *ENTRY_KEYS}

    assert (field in known) != (field in IGNORED)


@pytest.mark.parametrize("field", SCENARIO_FIELDS.split())
def test_a_field_of_a_scenario_is_read_or_said_to_do_nothing(field: str) -> None:
    assert field in SCENARIO_KEYS
    assert field in {"name", "Tests"} or SCENARIO_IGNORED[field]


@pytest.mark.parametrize("field", SYSTEM_FIELDS.split())
def test_a_field_of_a_system_file_is_read_or_said_to_do_nothing(field: str) -> None:
    assert (field in CloudaiSystem.model_fields) != (field in CLOUDAI_IGNORED)


@pytest.fixture
def load(tmp_path: Path) -> Loader:
    def _load(top: str = "", args: str = "", tables: str = "") -> Scenario:
        path = tmp_path / "test.toml"
        path.write_text(TEST.format(top=top, args=args, tables=tables))
        return config.load(path)

    return _load


def only(scenario: Scenario) -> Any:
    assert scenario.invalid == ()
    return scenario.tests[0]


def messages(scenario: Scenario) -> Any:
    return "\n".join(scenario.invalid[0].violations)


@pytest.mark.parametrize(
    ("written", "options"),
    [
        ('"--constraint=a --qos high"', ("--constraint=a", "--qos=high")),
        ('"--exclusive"', ("--exclusive",)),
        ('["--comment=x", "--nice 5"]', ("--comment=x", "--nice=5")),
    ],
)
def test_options_of_srun_reach_the_batch_job(load: Loader, written: Any, options: Any) -> None:
    assert only(load(f"extra_srun_args = {written}")).sbatch_args == options


def test_a_short_option_of_srun_is_refused_and_not_dropped(load: Loader) -> None:
    assert "'-w' is not an option of the form --name" in messages(load('extra_srun_args = "-w node1"'))


@pytest.mark.parametrize(
    ("option", "why"),
    [
        ("--array=0-3", "makes several jobs of an attempt"),
        ("--clusters other", "sends the job to another cluster"),
        ("--wrap true", "instead of the launcher's script"),
        ("--test-only", "submits nothing"),
    ],
)
def test_options_with_which_an_attempt_has_not_one_job_are_refused(load: Loader, option: str, why: str) -> None:
    assert why in messages(load(f'extra_srun_args = "{option}"'))


def test_an_option_that_is_decided_here_is_said_to_have_no_effect(load: Loader) -> None:
    scenario = load('extra_srun_args = "--requeue --comment=--array"')

    assert scenario.invalid == ()
    (warning,) = (warning for warning in scenario.warnings if "extra_srun_args" in warning)
    assert "'--requeue' has no effect" in warning


def test_the_warm_up_of_a_training_report_is_the_gates(load: Loader) -> None:
    assert only(load(tables="[training_report]\nexclude_start_steps = 7")).gate.warmup_steps == 7


def test_the_gates_own_warm_up_wins_and_that_is_reported(load: Loader) -> None:
    scenario = load(tables="[training_report]\nexclude_start_steps = 7\n[gate]\nwarmup_steps = 3")

    assert only(scenario).gate.warmup_steps == 3
    assert any("training_report.exclude_start_steps: has no effect" in warning for warning in scenario.warnings)


def test_the_steps_after_a_profile_are_left_out_as_in_cloudai(load: Loader) -> None:
    tables = "[training_report]\nexclude_post_profiling_steps = 4"

    assert only(load(tables="[training_report]")).gate.post_profiling_steps == 2
    assert only(load(tables="[training_report]")).harvest.training_report
    assert not only(load()).harvest.training_report
    assert only(load(tables=tables)).gate.post_profiling_steps == 4
    both = load(tables=f"{tables}\n[gate]\npost_profiling_steps = 1")
    assert only(both).gate.post_profiling_steps == 1
    assert any("exclude_post_profiling_steps: has no effect" in warning for warning in both.warnings)


@pytest.mark.parametrize("key", ["pre_test", "post_test", "job_status_check"])
def test_a_hook_is_said_to_have_no_effect_and_refused_with_cloudais_own_verdict(tmp_path: Path, key: str) -> None:
    path = tmp_path / "s.toml"

    def write(compat: str) -> Path:
        (tmp_path / "small.toml").write_text(TEST.format(top=f'compat = "{compat}"', args="", tables=""))
        path.write_text(f'name = "s"\n{key} = "x"\n[[Tests]]\nid = "a"\ntest_name = "small"\n')
        return path

    warned = config.load(write("none"))
    with pytest.raises(InvalidInput, match=rf"s\.toml:2: {key}: has no effect here") as refused:
        config.load(write("cloudai"))

    assert any(f"s.toml:2: {key}: has no effect" in line for line in warned.warnings)
    assert len(refused.value.violations) == 1


def test_an_agent_that_learns_becomes_points_drawn_at_random_and_that_is_reported(load: Loader) -> None:
    scenario = load(
        'agent = "bo"\nagent_steps = 4\nagent_metrics = ["tflops-per-gpu"]\nagent_reward_function = "identity"',
        "tp = [1, 2, 4, 8]",
        "[agent_config]\nrandom_seed = 3",
    )

    sweep = only(scenario).sweep
    assert (sweep.method, sweep.points, sweep.seed) == ("random", 4, 3)
    assert (sweep.metric, sweep.reward) == ("tflops_per_gpu", "identity")
    assert any(
        "'bo' is an agent of a plugin, which is neither checked nor run" in warning for warning in scenario.warnings
    )


@pytest.mark.parametrize("axis", ["gb = [64, 128]", "seq_length = [2048, 4096]"])
def test_points_that_do_other_work_in_a_step_are_not_compared_by_its_time(load: Loader, axis: str) -> None:
    written = load(args=axis, tables='[sweep]\nmetric = "step_time"')

    assert only(load(args=axis)).sweep.metric == "tokens_per_gpu"
    assert only(load(args="tp = [1, 2]")).sweep.metric == "step_time"
    assert only(written).sweep.metric == "step_time"
    told = f"sweep.metric: step_time cannot compare points that differ in {axis.split()[0]}: the smallest step wins"
    assert any(told in warning for warning in written.warnings)
    agent = load('agent_metrics = ["default"]', axis)
    assert any("agent_metrics[0]: step_time cannot compare" in warning for warning in agent.warnings)


def test_our_own_sweep_table_wins_over_an_agent(load: Loader) -> None:
    scenario = load('agent = "bo"\nagent_steps = 4', "tp = [1, 2]", '[sweep]\nmethod = "grid"')

    assert only(scenario).sweep.method == "grid"


def test_a_metric_that_this_workload_does_not_have_is_refused(load: Loader) -> None:
    assert "'tflops-per-gpus' is not a metric of this workload; unknown key; did you mean" in messages(
        load('agent_metrics = ["tflops-per-gpus"]', "tp = [1, 2]")
    )


DRAWN = "[env_params.seq_length]\nweights = [0.25, 0.75]"


def test_a_drawn_parameter_is_drawn_for_each_point_and_not_expanded(load: Loader) -> None:
    scenario = load('agent = "random"\nagent_steps = 20', "seq_length = [4096, 8192]\ntp = [1, 2]", DRAWN)

    runs = config.runs(scenario, "2026-11-21")
    assert {axis.name for axis in only(scenario).axes} == {"tp"}
    assert [run.sweep_point["tp"] for run in runs] == [1, 2]
    assert all(run.test.cmd_args["seq_length"] in (4096, 8192) for run in runs)
    assert runs == config.runs(scenario, "2026-11-21")


def test_draws_follow_the_weights_and_depend_on_seed_name_and_trial_alone(load: Loader) -> None:
    test = only(load('agent = "random"', "seq_length = [4096, 8192]\ntp = [1, 2]", DRAWN))

    draws = [draw(test, trial)["seq_length"] for trial in range(1, 401)]

    assert 0.65 < draws.count(8192) / len(draws) < 0.85
    assert draw(test.model_copy(update={"axes": ()}), 7) == draw(test, 7)


@pytest.mark.parametrize(
    ("args", "tables", "reason"),
    [
        ("seq_length = 4096", "[env_params.seq_length]", "env_params.seq_length: is not a list in [cmd_args]"),
        ("seq_length = [1, 2]", "[env_params.seq_length]\nweights = [1.0]", "has 1 weights for 2 values"),
        ("seq_length = [1, 2]", "[env_params.seq_length]\nweights = [0.5, 0.4]", "sum to 0.9, not to 1"),
        ("seq_length = [1, 2]", "[env_params.seq_length]\nweights = [-1.0, 2.0]", "must be finite and not negative"),
    ],
)
def test_a_drawn_parameter_that_makes_no_sense_is_refused(
    load: Loader, args: dict[str, Any], tables: Any, reason: str
) -> None:
    assert reason in messages(load("", args, tables))


SYSTEM = 'name = "s"\ninstall_path = "/i"\noutput_path = "/o"\ndefault_partition = "batch"\n'


def test_variables_and_options_of_a_system_file_reach_every_run(tmp_path: Path) -> None:
    path = tmp_path / "system.toml"
    path.write_text(SYSTEM + 'extra_srun_args = "--constraint=a"\n[global_env_vars]\nNCCL_DEBUG = "WARN"\n')

    site, warnings = read_site_file(path)

    assert site.cluster.env_vars == {"NCCL_DEBUG": "WARN"}
    assert site.cluster.extra_sbatch_args == ("--constraint=a",)
    assert warnings == ()


def test_a_secret_among_the_variables_of_a_system_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "system.toml"
    path.write_text(SYSTEM + '[global_env_vars]\nWANDB_API_KEY = "5f5f5f5f"\nMAX_TOKEN = "4096"\n')

    with pytest.raises(InvalidInput) as raised:
        read_site_file(path)

    (violation,) = raised.value.violations
    assert "global_env_vars.WANDB_API_KEY: contains a secret" in violation


def test_a_password_among_the_variables_of_a_system_file_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "system.toml"
    path.write_text(SYSTEM + '[global_env_vars]\nHTTPS_PROXY = "http://svc:pass@proxy:3128"\n')

    site, (warning,) = read_site_file(path)

    assert site.cluster.env_vars["HTTPS_PROXY"] == "http://svc:pass@proxy:3128"
    assert "global_env_vars.HTTPS_PROXY: contains a secret" in warning
