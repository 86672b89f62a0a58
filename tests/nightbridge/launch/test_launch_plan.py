"""The launch plan: the argv, and everything that is refused before a launcher starts."""

import argparse
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from nightbridge.errors import InvalidInput
from nightbridge.launch.flags import escaped, known_in, why_unsafe, why_unsafe_escaped
from nightbridge.launch.launch_plan import make_launch_plan, placeholder_plan
from nightbridge.launch.parser_source import PARSER
from nightbridge.launch.versions import Version
from nightbridge.models import (
    Checkout,
    ClusterLimits,
    ClusterSettings,
    GitRepo,
    HarvestPolicy,
    Image,
    LauncherEnvironment,
    LaunchPlan,
    PinnedRepository,
    RunSpec,
    SecretRef,
    Site,
)
from tests.builders import make_test

Planner = Callable[..., LaunchPlan]

SLURM = ClusterSettings(kind="slurm", name="c", account="acct", partition="batch", gpus_per_node=8)
TENSORBOARD = (
    "logger.tensorboard_dir=/nemo_run/tb_logs",
    "logger.log_timers_to_tensorboard=true",
    "logger.log_throughput_to_tensorboard=true",
    "logger.log_memory_to_tensorboard=true",
)


def spec(args: dict[str, Any] | None = None, *, version: str = "v0.4.2", **fields: Any) -> RunSpec:
    mounted = GitRepo(url="https://x/Megatron-Bridge", commit=version, mount_as="/opt/Megatron-Bridge")
    test = make_test(args, **{"git_repos": (mounted,), **fields})
    return RunSpec(scenario="s", night="2026-11-21", test=test)


def without(run: RunSpec, *fields: Any) -> RunSpec:
    args = {key: value for key, value in run.test.cmd_args.items() if key not in fields}
    return run.model_copy(update={"test": run.test.model_copy(update={"cmd_args": args})})


@pytest.fixture
def plan(tmp_path: Path) -> Planner:
    """Plan a run against a checkout whose parser has the flags of the run's version."""

    def _plan(
        run: Any,
        *,
        image: Image | None = None,
        cluster: Any = SLURM,
        limits: ClusterLimits | None = None,
        attempt: int = 1,
        attempt_dir: Any = tmp_path / "runs/k/a1",
        parser: Any = PARSER,
    ) -> LaunchPlan:
        bridge = tmp_path / "bridge"
        version = Version(*(int(part) for part in run.test.megatron_bridge.commit[1:].split(".")))
        lines = [f"parser.add_argument({name!r}, choices={choices!r})" for name, choices in known_in(version).items()]
        (bridge / parser).parent.mkdir(parents=True, exist_ok=True)
        (bridge / parser).write_text("\n".join(lines))
        pinned = PinnedRepository(url="u", ref="r", commit="0" * 40, path=bridge)
        environment = LauncherEnvironment(python=Path("/envs/x/bin/python"), digest="d")
        checkout = Checkout(megatron_bridge=pinned, nemo_run=pinned, environment=environment)
        image = image or Image(kind="sqsh", path=Path("/images/nemo.sqsh"))
        site = Site(workspace=tmp_path, cluster=cluster)
        return make_launch_plan(run, checkout, image, limits or ClusterLimits(), site, attempt, attempt_dir)

    return _plan


def after(plan: LaunchPlan, option: str) -> str | None:
    """The word behind a flag; None where the flag is not there."""
    return plan.argv[plan.argv.index(option) + 1] if option in plan.argv else None


# --- argv ------------------------------------------------------------------------------------------------------------


def test_the_argv_is_what_was_written_and_what_a_run_cannot_do_without(plan: Planner, tmp_path: Path) -> None:
    made = plan(spec(time_limit="00:20:00"))

    bridge = tmp_path / "bridge"
    assert made.argv == (
        "/envs/x/bin/python", f"{bridge}/scripts/performance/setup_experiment.py",
        "-a", "acct", "-p", "batch", "-g", "h100", "-t", "00:20:00", "-i", "/images/nemo.sqsh",
        "-ng", "16", "-gn", "8", "-cm", f"{bridge}:/opt/Megatron-Bridge",
        "-m", "llama", "-mr", "llama3_8b", "-ms", "50", "--detach", "true", "--packager", "none",
        "--save_interval", "50", "--save_config_filepath", "/nemo_run/configs/ConfigContainer.yaml",
        *TENSORBOARD,
    )  # fmt: skip
    assert (made.nodes, made.tasks_per_node, made.time_limit_seconds, made.max_steps) == (2, 8, 1200, 50)
    assert made.cwd == bridge
    assert made.output_dir is None


@pytest.mark.parametrize(
    "data", [{"dataset_paths": ["/data/a", "/data/b"]}, {"data": "c4", "c4_root": "/c4", "c4_train_shards": [0, 1]}]
)
def test_no_override_is_taken_for_an_item_of_a_list(plan: Planner, data: dict[str, Any]) -> None:
    made = plan(spec(data, version="v0.5.0", extra_cmd_args={"ddp.overlap_grad_reduce": "false"}))

    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--c4_train_shards", nargs="+", type=int)
    parser.add_argument("--dataset_paths", nargs="*")
    taken, others = parser.parse_known_args(made.argv)
    assert (taken.c4_train_shards, taken.dataset_paths) == (data.get("c4_train_shards"), data.get("dataset_paths"))
    assert others[-5:] == [*TENSORBOARD, "ddp.overlap_grad_reduce=false"]


def test_flags_follow_the_pinned_commit(plan: Planner) -> None:
    made = plan(spec(version="v0.3.0", extra_env_vars={"A": "1", "B": "x,y", "C": "k=v"}))

    assert "--packager" not in made.argv
    assert "-E" not in made.argv
    exports = [made.argv[index + 1] for index, word in enumerate(made.argv) if word == "-cb"]
    assert exports == ["export A=1", "export B=x,y", "export C=k=v"]


def test_variables_go_by_their_own_flag_where_the_launcher_has_one(plan: Planner) -> None:
    made = plan(spec(extra_env_vars={"B": "x,y=z", "A": "1"}))

    assert [made.argv[index + 1] for index, word in enumerate(made.argv) if word == "-E"] == ["A=1", "B=x,y=z"]


def test_a_variable_that_refers_to_another_is_exported_inside_the_container(plan: Planner) -> None:
    made = plan(spec(extra_env_vars={"PYTHONPATH": "/opt/x:${PYTHONPATH}"}))

    assert after(made, "-cb") == "export PYTHONPATH=/opt/x:${PYTHONPATH}"


def test_variables_that_the_container_runtime_reads_are_set_outside_too(plan: Planner) -> None:
    made = plan(spec(extra_env_vars={"NVIDIA_VISIBLE_DEVICES": "all", "NCCL_DEBUG": "WARN"}))

    assert made.environment["NVIDIA_VISIBLE_DEVICES"] == "all"
    assert "NCCL_DEBUG" not in made.environment


def test_the_attempt_has_a_launcher_home_of_its_own(plan: Planner, tmp_path: Path) -> None:
    made = plan(spec())

    assert made.environment["NEMORUN_HOME"] == str(tmp_path / "runs/k/a1/nemorun")
    assert made.environment["NIGHTBRIDGE_ATTEMPT"] == str(tmp_path / "runs/k/a1")


def test_a_token_travels_as_a_reference_and_lets_the_libraries_go_online(plan: Planner) -> None:
    made = plan(spec(secrets={"HF_TOKEN": SecretRef(source="env", name="HF_TOKEN")}))

    assert made.secret_environment == {"HF_TOKEN": SecretRef(source="env", name="HF_TOKEN")}
    assert after(made, "-E") == "TRANSFORMERS_OFFLINE=0"
    assert "-hf" not in made.argv


def test_parameters_that_the_launcher_keeps_to_itself_are_separated_as_it_wants(plan: Planner) -> None:
    run = spec({"additional_slurm_params": "qos=high;constraint=gpu"}, version="v0.5.0")
    assert after(plan(run), "--additional_slurm_params") == "qos=high;constraint=gpu"
    with pytest.raises(InvalidInput, match="a shell character"):
        plan(spec({"additional_slurm_params": "qos=high;constraint=gpu"}))


def test_a_secret_of_the_test_wins_over_a_variable_of_the_cluster(plan: Planner) -> None:
    cluster = SLURM.model_copy(update={"env_vars": {"HF_TOKEN": "old", "NCCL_DEBUG": "INFO"}})
    made = plan(spec(secrets={"HF_TOKEN": SecretRef(source="env", name="MINE")}), cluster=cluster)
    assert [word for word in made.argv if "HF_TOKEN" in word or "NCCL" in word] == ["NCCL_DEBUG=INFO"]


def test_options_of_cluster_and_test_reach_sbatch(plan: Planner) -> None:
    limits = {"qos": "high", "reservation": "r1", "segment": 4, "exclusive": True}
    cluster = SLURM.model_copy(update={**limits, "extra_sbatch_args": ("--comment=x",)})

    made = plan(spec(sbatch_args=("--nodelist=n1",)), cluster=cluster)

    assert made.sbatch_args == (
        "--qos=high", "--reservation=r1", "--segment=4", "--exclusive", "--comment=x", "--nodelist=n1"
    )  # fmt: skip


def test_a_cluster_without_accounts_gets_a_name_that_nemo_run_accepts(plan: Planner) -> None:
    assert after(plan(spec(), cluster=ClusterSettings()), "-a") == "nightbridge"


def test_a_slurm_cluster_without_an_account_is_reported(plan: Planner) -> None:
    made = plan(spec(), cluster=SLURM.model_copy(update={"account": None}))

    assert any("no account" in warning for warning in made.warnings)


def test_what_only_the_job_reads_gets_backslashes_for_its_shell(plan: Planner) -> None:
    overrides = {"~logger.y": "", "model.x": "{a:[1,2],b:(c|d)*}"}

    made = plan(spec({"pipeline_model_parallel_layout": "Et*4|(t*4|)*14tmL"}, extra_cmd_args=overrides))

    assert after(made, "--pipeline_model_parallel_layout") == r"Et\*4\|\(t\*4\|\)\*14tmL"
    assert made.argv[-2] == r"\~logger.y"
    assert made.argv[-1] == r"model.x=\{a:[1,2],b:\(c\|d\)\*\}"
    said = subprocess.run(["bash", "-c", f"printf '%s\\n' {' '.join(made.argv[-3:])}"], capture_output=True, text=True)
    assert said.stdout.splitlines()[-1] == "model.x={a:[1,2],b:(c|d)*}"


def test_every_character_that_is_carried_arrives_through_a_shell() -> None:
    text = "".join(chr(code) for code in range(33, 127) if not why_unsafe_escaped(chr(code)))

    said = subprocess.run(["bash", "-c", f"printf %s x{escaped(text)}"], capture_output=True, text=True)

    assert {*"|()*;!?{}"} < {*text}
    assert said.stdout == f"x{text}"


@given(st.text("a1_@%+=:,./[]~#-", min_size=1))
@settings(max_examples=50)
def test_what_is_called_safe_arrives_through_a_shell_as_it_is(text: str) -> None:
    assume(why_unsafe(text) is None)

    said = subprocess.run(["bash", "-c", f"printf '%s,' {text} end"], cwd="/", capture_output=True, text=True)

    assert said.stdout == f"{text},end,"


def test_the_launcher_may_lie_elsewhere_in_another_repository(plan: Planner, tmp_path: Path) -> None:
    folded = GitRepo(url="https://x/Megatron-LM", commit="v0.4.2", launcher="bridge/scripts/performance/launch.py")
    run = spec()
    run = run.model_copy(update={"test": run.test.model_copy(update={"git_repos": (*run.test.git_repos, folded)})})

    made = plan(run, parser="bridge/scripts/performance/argument_parser.py")

    assert made.argv[1] == f"{tmp_path}/bridge/bridge/scripts/performance/launch.py"
    assert "-cm" not in made.argv  # it has no mount_as, so the image's own copy is used


# --- resources -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cluster_has", "test_says", "limits_say", "gpu", "version", "tasks"),
    [
        (4, 8, 2, "h100", "v0.4.2", 4),
        (None, 2, 16, "h100", "v0.4.2", 2),
        (None, None, 16, "h100", "v0.4.2", 16),
        (None, None, None, "gb200", "v0.4.2", 4),
        (None, None, None, "gb200", "v0.3.0", 8),
    ],
)
def test_the_gpus_of_a_node_come_from_the_one_who_knows_best(
    plan: Planner, cluster_has: Any, test_says: Any, limits_say: Any, gpu: Any, version: str, tasks: Any
) -> None:
    args = {"gpu_type": gpu, **({"gpus_per_node": test_says} if test_says else {})}

    made = plan(
        spec(args, version=version),
        cluster=SLURM.model_copy(update={"gpus_per_node": cluster_has}),
        limits=ClusterLimits(gpus_per_node=limits_say),
    )

    assert (made.tasks_per_node, after(made, "-gn")) == (tasks, str(tasks))
    assert made.nodes == 16 // tasks


def test_a_test_that_contradicts_the_cluster_is_reported(plan: Planner) -> None:
    made = plan(spec({"gpus_per_node": 4}))

    assert any("gpus_per_node is 4" in warning for warning in made.warnings)


def test_nodes_are_rounded_up(plan: Planner) -> None:
    assert plan(spec({"num_gpus": 9})).nodes == 2


# --- what the run writes ---------------------------------------------------------------------------------------------


def test_without_a_container_everything_is_written_below_the_attempt(plan: Planner, tmp_path: Path) -> None:
    made = plan(spec({"container_image": "none"}), image=Image(kind="none"))

    output = tmp_path / "runs/k/a1/output"
    assert made.output_dir == output
    assert after(made, "-i") == "none"
    assert after(made, "--save_dir") == f"{output}/checkpoints"
    assert after(made, "--save_config_filepath") == f"{output}/configs/ConfigContainer.yaml"
    assert f"logger.tensorboard_dir={output}/tb_logs" in made.argv
    assert "-cm" not in made.argv


def test_no_checkpoint_is_asked_for_where_none_is_kept(plan: Planner) -> None:
    made = plan(spec(harvest=HarvestPolicy(checkpoint="none")))

    assert "--save_interval" not in made.argv


def test_the_persons_own_interval_stays(plan: Planner) -> None:
    assert after(plan(spec({"save_interval": 10})), "--save_interval") == "10"


def test_a_recipe_of_unknown_length_is_saved_after_the_steps_of_every_performance_recipe(plan: Planner) -> None:
    assert after(plan(without(spec(), "max_steps")), "--save_interval") == "50"


def test_a_folder_that_the_test_names_gets_the_attempt_so_that_no_night_resumes_another(plan: Planner) -> None:
    run = spec({"save_dir": "/lustre/ckpt/", "wandb_save_dir": "/lustre/wandb"})

    made = plan(run, attempt=2)

    assert after(made, "--save_dir") == f"/lustre/ckpt/{run.run_key}-a2"
    assert after(made, "-wds") == f"/lustre/wandb/{run.run_key}-a2"
    assert made.checkpoint_dir == Path(f"/lustre/ckpt/{run.run_key}-a2")


def test_a_key_of_wandb_that_is_in_no_argv_logs_to_the_project_nevertheless(plan: Planner) -> None:
    names = {"wandb_project_name": "p", "wandb_experiment_name": "e", "wandb_entity_name": "o"}
    key = {"WANDB_API_KEY": SecretRef(source="env", name="WANDB_API_KEY")}

    def of_wandb(args: dict[str, Any], **fields: Any) -> list[str]:
        return [word for word in plan(spec(args, **fields)).argv if word.startswith("logger.wandb")]

    assert of_wandb(names, secrets=key) == [
        "logger.wandb_project=p",
        "logger.wandb_exp_name=e",
        "logger.wandb_entity=o",
        "logger.wandb_save_dir=/nemo_run/wandb",
    ]
    assert of_wandb(names, secrets=key, extra_cmd_args={"logger.wandb_exp_name": "x"})[-1] == "logger.wandb_exp_name=x"
    assert of_wandb({**names, "wandb_project_name": "2026"}, secrets=key)[0] == r"logger.wandb_project=str\(2026\)"
    assert of_wandb({**names, "wandb_project_name": "null"}, secrets=key) == []
    assert of_wandb({**names, "wandb_project_name": "1e5"}, secrets=key) == []
    assert of_wandb(names) == []
    assert of_wandb({"wandb_project_name": "p"}, secrets=key) == []
    assert of_wandb({**names, "use_recipes": True}, secrets=key) == []
    assert of_wandb({**names, "wandb_project_name": "a=b"}, secrets=key) == []


def test_the_persons_own_overrides_win_and_come_last(plan: Planner) -> None:
    made = plan(spec(extra_cmd_args={"logger.tensorboard_dir": "/nemo_run/tb", "model.x": "[0,3]", "~model.y": ""}))

    overrides = made.argv[made.argv.index("--save_config_filepath") + 2 :]
    assert overrides == (*TENSORBOARD[1:], "logger.tensorboard_dir=/nemo_run/tb", "model.x=[0,3]", r"\~model.y")


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "fields", "message"),
    [
        ({"num_moe_experts": 8}, {}, "cmd_args.num_moe_experts: the launcher has no flag --num_moe_experts; it exists from v0.6.0 on"),
        ({"task": "peft"}, {}, "cmd_args.task: 'peft' is not one of pretrain, sft, lora"),
        ({"task": "pretrian"}, {}, "did you mean 'pretrain'?"),
        ({"cuda_graph_scope": "attn,mpl"}, {}, "cmd_args.cuda_graph_scope: 'mpl' is not one of"),
        ({"save_dir": "/ckpt/save dir"}, {}, "white space"),
        ({"tokenizer_model": "it's"}, {}, "HTML-escaped"),
        ({"save_dir": "/ckpt|x"}, {}, "a shell character"),
        ({"pipeline_model_parallel_layout": "Et|(t t|)*30mL"}, {}, "white space"),
        ({"tokenizer_model": "/x/*"}, {}, "a shell pattern"),
        ({"wandb_experiment_name": "#1"}, {}, "begins with #"),
        ({"tokenizer_model": "~/x"}, {}, "begins with ~"),
        ({}, {"extra_env_vars": {"A": "~/x"}}, "behind ="),
        ({"tokenizer_model": "$HOME/x"}, {}, "contains $"),
        ({"tokenizer_model": "\u00e9"}, {}, "which is not passed on"),
        ({}, {"extra_cmd_args": {"a.b": "c`d"}}, "extra_cmd_args.a.b: 'a.b=c`d' contains a shell character"),
        ({}, {"extra_cmd_args": {"a;b": "c"}}, "contains a shell character"),
        ({}, {"extra_env_vars": {"A": "a b;c"}}, "extra_env_vars.A: 'a b;c' contains white space"),
        ({}, {"extra_env_vars": {"A-B": "1"}}, "is not the name of an environment variable"),
        ({}, {"extra_env_vars": {"A": "$(id)"}}, "extra_env_vars.A"),
        ({}, {"extra_container_mounts": ("/a:/b,/c:/d",)}, "contains a comma"),
    ],
)  # fmt: skip
def test_what_would_not_reach_the_job_as_written_is_refused_with_the_reason(
    plan: Planner, args: dict[str, Any], fields: Any, message: str
) -> None:
    with pytest.raises(InvalidInput) as raised:
        plan(spec(args, **fields))

    assert message in "\n".join(raised.value.violations)


def test_every_refusal_is_reported_at_once(plan: Planner) -> None:
    with pytest.raises(InvalidInput) as raised:
        plan(spec({"task": "x", "save_dir": "a b"}, extra_env_vars={"A": "'"}))

    assert len(raised.value.violations) == 3


def test_a_site_path_that_would_not_survive_is_refused(plan: Planner) -> None:
    with pytest.raises(InvalidInput, match="without special characters"):
        plan(spec(), cluster=SLURM.model_copy(update={"account": "my account"}))


def test_no_secret_is_in_the_argv_whatever_stands_in_cmd_args(plan: Planner) -> None:
    made = plan(spec({"hf_token": "hf_verysecret", "wandb_key": "wb_verysecret"}))

    assert "verysecret" not in made.model_dump_json()


# --- without a checkout ----------------------------------------------------------------------------------------------


def test_without_a_checkout_the_pin_says_the_version_and_paths_are_placeholders() -> None:
    made = placeholder_plan(spec(version="v0.3.0"), Site(cluster=SLURM))

    assert "--packager" not in made.argv
    assert made.argv[0].startswith("/placeholder/")


def test_without_a_checkout_a_pin_that_is_no_tag_means_the_newest_flags() -> None:
    made = placeholder_plan(spec({"num_moe_experts": 8}, version="main"), Site(cluster=SLURM))

    assert after(made, "--num_moe_experts") == "8"


def test_without_a_container_no_path_may_hold_what_nemo_run_replaces(plan: Planner, tmp_path: Path) -> None:
    attempt_dir = tmp_path / "nemo_run_nightly" / "runs/k/a1"

    with pytest.raises(InvalidInput, match="/nemo_run, which NeMo-Run would replace"):
        plan(spec({"container_image": "none"}), image=Image(kind="none"), attempt_dir=attempt_dir)
    assert plan(spec(), attempt_dir=attempt_dir).attempt_dir == attempt_dir


@pytest.mark.parametrize("branch", ["é", "fix;it", "#12", "user/topic"])
def test_a_branch_of_any_name_is_planned_as_its_checkout_is_named_by_its_commit(branch: str) -> None:
    assert placeholder_plan(spec(version=branch), Site(cluster=SLURM)).argv
