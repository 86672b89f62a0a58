"""The launch plan of a heterogeneous-parallel test: the program's words, and a batch script that carries them whole."""

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from examples.practice.repositories import TEMPLATE
from nightbridge.errors import InvalidInput
from nightbridge.launch.launch_plan import make_launch_plan, placeholder_plan
from nightbridge.models import (
    Checkout,
    ClusterLimits,
    ClusterSettings,
    GitRepo,
    HarvestPolicy,
    Image,
    LaunchPlan,
    PinnedRepository,
    RunSpec,
    SecretRef,
    Site,
    TestDefinition,
)
from nightbridge.sbatch_options import SBATCH, script_options, split_options
from tests.nightbridge.launch.test_parser_source import write_program

SITE = Site(cluster=ClusterSettings(kind="slurm", name="c", account="acct", partition="batch"))


def spec(args: dict[str, Any] | None = None, **fields: Any) -> RunSpec:
    """Nine nodes of eight GPUs, the encoder's first."""
    written = {
        "container_image": "none",
        "mb": 1,
        "gb": 192,
        "max_steps": 50,
        "encoder": {"nodes": 1, "dp": 8},
        "language_model": {"nodes": 8, "tp": 2, "dp": 32, "ep": 16},
        **(args or {}),
    }
    test = TestDefinition(
        id="vlm",
        name="vlm",
        source="vlm.toml",
        test_template_name="HeteroMIMO",
        cmd_args={key: value for key, value in written.items() if value is not None},
        git_repos=(GitRepo(url="https://x/Megatron-LM", commit="main"),),
        nemo_run_repo=GitRepo(url="https://x/Run"),
        **fields,
    )
    return RunSpec(scenario="s", night="2026-11-21", test=test)


def program_words(script: str) -> list[str]:
    """What each node executes, as the shells leave it."""
    match = re.search(r"bash -c (.*)\Z", script, re.S)
    assert match is not None
    return shlex.split(shlex.split(match[1])[0])


def option(words: list[str], name: str) -> str:
    return words[words.index(name) + 1]


def test_the_grids_become_flags_and_the_language_model_begins_after_the_encoder() -> None:
    words = program_words(placeholder_plan(spec(), SITE).batch_script or "")

    message = (
        "--encoder-tp",
        "--encoder-dp",
        "--llm-offset",
        "--llm-tp",
        "--llm-cp",
        "--llm-pp",
        "--llm-dp",
        "--llm-ep",
    )
    assert [option(words, name) for name in message] == ["1", "8", "8", "2", "1", "1", "32", "16"]
    assert "--encoder-pp" not in words  # the newest published program has none


def test_torchrun_starts_the_program_on_every_node() -> None:
    plan = placeholder_plan(spec(), SITE)

    words = program_words(plan.batch_script or "")
    assert words[:7] == [
        "exec", "torchrun", "--nnodes=9", "--nproc-per-node=8",
        "--node-rank=$SLURM_NODEID", "--master-addr=$NIGHTBRIDGE_FIRST_NODE", "--master-port=29500",
    ]  # fmt: skip
    assert words[7] == "examples/mimo/pretrain_mimo.py"
    assert (plan.nodes, plan.tasks_per_node) == (9, 8)


def test_the_job_is_submitted_by_sbatch_itself() -> None:
    plan = placeholder_plan(spec(time_limit="04:00:00"), SITE, ClusterLimits(gpus_per_node=8))

    assert plan.argv[:2] == ("sbatch", "--parsable")
    lines = (plan.batch_script or "").splitlines()
    assert lines[0] == "#!/bin/bash"
    for line in (
        "--nodes=9",
        "--ntasks-per-node=1",
        "--gpus-per-node=8",
        "--time=240",
        "--account=acct",
        "--partition=batch",
    ):
        assert f"#SBATCH {line}" in lines


def test_tensorboard_and_the_last_checkpoint_are_written_below_the_attempt() -> None:
    plan = placeholder_plan(spec(), SITE)

    words = program_words(plan.batch_script or "")
    assert option(words, "--tensorboard-dir") == f"{plan.attempt_dir}/output/tb_logs"
    assert option(words, "--save") == f"{plan.attempt_dir}/output/checkpoints"
    assert option(words, "--save-interval") == "50"
    assert "--log-timers-to-tensorboard" in words


def test_nothing_is_saved_where_no_checkpoint_is_kept() -> None:
    plan = placeholder_plan(spec(harvest=HarvestPolicy(checkpoint="none")), SITE)

    assert "--save" not in program_words(plan.batch_script or "")


def test_a_folder_that_the_test_names_gets_the_attempt_appended() -> None:
    run = spec({"save_dir": "/lustre/checkpoints/"})

    plan = placeholder_plan(run, SITE)

    assert plan.checkpoint_dir == Path(f"/lustre/checkpoints/{run.run_key}-a1")
    assert option(program_words(plan.batch_script or ""), "--save") == str(plan.checkpoint_dir)


def test_samples_take_precedence_over_iterations() -> None:
    plan = placeholder_plan(spec({"train_samples": 1000}), SITE)

    words = program_words(plan.batch_script or "")
    assert option(words, "--train-samples") == "1000"
    assert "--train-iters" not in words
    assert plan.max_steps == 6


@pytest.mark.parametrize(("value", "written"), [(True, "--dynamic-resolution"), (False, "--no-dynamic-resolution")])
def test_a_flag_with_two_forms_is_written_either_way(value: bool, written: str) -> None:
    assert written in program_words(placeholder_plan(spec({"dynamic_resolution": value}), SITE).batch_script or "")


def test_other_flags_go_on_by_their_own_names() -> None:
    run = spec(extra_cmd_args={"bf16": "", "--hybrid-layer-pattern": "MEMEM*EMEMEM*"})

    words = program_words(placeholder_plan(run, SITE).batch_script or "")

    assert "--bf16" in words
    assert option(words, "--hybrid-layer-pattern") == "MEMEM*EMEMEM*"


def test_the_log_of_a_job_lies_in_its_folder_whatever_that_is_called() -> None:
    code = PinnedRepository(url="x", ref="main", commit="0" * 40, path=Path("/none"))
    folder, image = Path("/my work's/runs/a1"), Image(kind="none")

    plan = make_launch_plan(spec(), Checkout(megatron_bridge=code), image, ClusterLimits(), SITE, 1, folder)

    options, rest = split_options(script_options(plan.batch_script or ""), SBATCH)
    assert Path(options["output"]).is_relative_to(folder)
    assert rest == []


def test_several_values_of_an_option_are_words_of_their_own() -> None:
    run = spec(extra_cmd_args={"data-path": "30 a 70 'b c'", "hybrid-layer-pattern": "M E", "eod": "-1", "split": "-M"})

    words = program_words(placeholder_plan(run, SITE).batch_script or "")

    first = words.index("--data-path")
    assert words[first : first + 5] == ["--data-path", "30", "a", "70", "b c"]
    assert option(words, "--hybrid-layer-pattern") == "M E"
    # argparse takes a word that begins with a dash for an option, unless it is a number.
    assert option(words, "--eod") == "-1"
    assert "--split=-M" in words


@pytest.mark.parametrize(
    ("args", "extra", "subject"),
    [({"torchrun": "a 'b"}, {}, "cmd_args.torchrun"), ({}, {"data-path": "1 'b"}, "--data-path")],
)
def test_a_quote_that_is_not_closed_is_refused(args: dict[str, Any], extra: dict[str, str], subject: str) -> None:
    with pytest.raises(InvalidInput, match=f"{subject}.* cannot be split into words"):
        placeholder_plan(spec(args, extra_cmd_args=extra), SITE)


def test_a_container_sees_the_code_and_the_attempt() -> None:
    run = spec({"container_image": "nvcr.io#nvidia/nemo:26.06"}, extra_container_mounts=("/data:/data",))

    plan = placeholder_plan(run, SITE)

    mounts = f"--container-mounts={plan.cwd}:{plan.cwd},{plan.attempt_dir}:{plan.attempt_dir},/data:/data"
    assert mounts in (plan.batch_script or "")
    assert "--container-image=/placeholder/images/image.sqsh" in (plan.batch_script or "")
    assert f"--container-workdir={plan.cwd}" in (plan.batch_script or "")


def test_the_clusters_variables_are_set_and_the_tests_own_win_secrets_too() -> None:
    variables = {
        "NCCL_DEBUG": "INFO",
        "NCCL_IB_HCA": "mlx5",
        "HF_TOKEN": "old",
        "CACHE": "${TMPDIR}/c",
        "PYTHONPATH": "/x",
    }
    site = Site(cluster=SITE.cluster.model_copy(update={"env_vars": variables}))
    secrets = {"HF_TOKEN": SecretRef(source="env", name="MINE")}
    run = spec(extra_env_vars={"NCCL_DEBUG": "WARN"}, secrets=secrets)

    script = placeholder_plan(run, site).batch_script or ""

    assert 'export CACHE="${TMPDIR}/c"\n' in script
    assert "export NCCL_DEBUG=WARN\nexport NCCL_IB_HCA=mlx5\n" in script
    assert "HF_TOKEN" not in script
    assert "export PYTHONPATH=/placeholder/" in script


def test_whatever_a_value_holds_arrives_as_it_was_written(tmp_path: Path) -> None:
    """The script really runs, with an srun that executes its command and a torchrun that prints its words."""
    odd = "a 'b' \"c\" $HOME `id` ; é *"
    run = spec({"torchrun": "printf '%s\\n'", "program": odd}, extra_env_vars={"ODD": odd})
    script = (placeholder_plan(run, SITE).batch_script or "").replace("/placeholder", str(tmp_path))
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "scontrol").write_text("#!/bin/sh\necho first\n")
    (tools / "srun").write_text('#!/bin/bash\nwhile [[ $1 == --* ]]; do shift; done\necho "$ODD"\nexec "$@"\n')
    for tool in tools.iterdir():
        tool.chmod(0o755)

    environment = {"PATH": f"{tools}:/usr/bin:/bin", "SLURM_JOB_NODELIST": "n[1-9]", "SLURM_NODEID": "3"}
    done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, check=True)

    said = done.stdout.splitlines()
    assert said[0] == odd
    assert said[1:7] == [
        "--nnodes=9", "--nproc-per-node=8", "--node-rank=3", "--master-addr=first", "--master-port=29500", odd,
    ]  # fmt: skip


# --- the program with a parser of its own ----------------------------------------------------------------------------


def plan_standalone(args: dict[str, Any] | None = None, **fields: Any) -> LaunchPlan:
    """Plan against the practice program, which has Megatron-LM's standalone parser's flags and no others."""
    code = PinnedRepository(url="x", ref="main", commit="0" * 40, path=TEMPLATE / "megatron_lm")
    run = spec({"program": "examples/mimo/train_hetero.py", **(args or {})}, **fields)
    image = Image(kind="none")
    return make_launch_plan(run, Checkout(megatron_bridge=code), image, ClusterLimits(), SITE, 1, Path("/runs/a1"))


def test_a_program_with_its_own_parser_is_reported_what_it_knows() -> None:
    plan = plan_standalone({"num_moe_experts": 128, "overlap_param_gather": True, "dynamic_resolution": False})

    words = program_words(plan.batch_script or "")
    assert option(words, "--num-moe-experts") == "128"
    assert option(words, "--encoder-pp") == "1"  # its default is another one
    assert "--overlap-param-gather" in words
    assert "--no-dynamic-resolution" in words
    assert "--log-memory" in words
    assert not {"--num-experts", "--log-timers-to-tensorboard", "--log-throughput"} & set(words)


def test_flags_and_choices_that_it_would_refuse_are_reported_at_once() -> None:
    with pytest.raises(InvalidInput) as refused:
        plan_standalone(
            {"model_provider": "nemotron"}, extra_cmd_args={"bf16": "", "use-distributed-optimizer": "", "seed": "7"}
        )

    said = str(refused.value)
    assert "--bf16" in said
    assert "--use-distributed-optimizer" in said
    assert "'nemotron' is not one of hetero-vlm, nemotron-moe-vlm" in said
    assert "--seed" not in said


def test_flags_that_the_pinned_megatron_lm_does_not_have_are_refused(tmp_path: Path) -> None:
    fields = ["global_batch_size", "micro_batch_size", "train_iters", "save_interval", "num_layers"]
    write_program(
        tmp_path,
        megatron="".join(f"    parser.add_argument('--{name.replace('_', '-')}', type=int)\n" for name in fields)
        + "    parser.add_argument('--save')\n    parser.add_argument('--log-throughput', action='store_true')\n",
        required="['num_layers']",
    )
    code = PinnedRepository(url="x", ref="main", commit="0" * 40, path=tmp_path)

    def plan(args: dict[str, Any], **extra: str) -> LaunchPlan:
        run = spec(args, extra_cmd_args={key.replace("_", "-"): text for key, text in extra.items()})
        image = Image(kind="none")
        return make_launch_plan(run, Checkout(megatron_bridge=code), image, ClusterLimits(), SITE, 1, Path("/runs/a1"))

    words = program_words(plan({"num_layers": 2, "dynamic_resolution": False}, freeze_vit="").batch_script or "")
    with pytest.raises(InvalidInput) as refused:
        plan({"dynamic_resolution": True}, bogus_flag="", train_itres="3", freeze_vit="yes")

    # What it logs is asked for as far as it can; what it cannot switch off is off.
    assert words[words.index("--num-layers") :] == [
        "--num-layers", "2", "--train-iters", "50", "--save", "/runs/a1/output/checkpoints", "--save-interval", "50",
        "--freeze-vit", "--log-throughput",
    ]  # fmt: skip
    assert refused.value.violations == (
        "the pinned program rejects --dynamic-resolution: the program has no such flag",
        "the pinned program rejects --bogus-flag: the program has no such flag",
        "the pinned program rejects --train-itres: the program has no such flag; did you mean --train-iters?",
        "the pinned program rejects --freeze-vit: it takes no value, and 'yes' is written",
        "the pinned program needs --num-layers",
    )


def test_weight_shards_and_a_language_model_alone_are_passed_on() -> None:
    grid = {"tp": 2, "dp": 2, "weight_shards": 4, "expert_weight_shards": 2}
    plan = placeholder_plan(spec({"encoder": None, "llm_only": True, "language_model": grid, "gb": 8}), SITE)

    words = program_words(plan.batch_script or "")
    assert option(words, "--tensor-parallel-num-weight-shards") == "4"
    assert option(words, "--expert-tensor-parallel-num-weight-shards") == "2"
    assert option(words, "--llm-offset") == "0"
    assert "--llm-only" in words
    assert "--encoder-dp" not in words
    assert (plan.nodes, plan.tasks_per_node) == (1, 8)


def test_without_a_container_torchruns_path_is_taken_from_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    words = program_words(placeholder_plan(spec({"torchrun": "bin/torchrun --no-python"}), SITE).batch_script or "")

    assert words[1:3] == [f"{tmp_path}/bin/torchrun", "--no-python"]


def test_in_a_container_torchruns_path_is_the_containers() -> None:
    run = spec({"torchrun": "bin/torchrun", "container_image": "nvcr.io#nvidia/nemo:26.06"})

    assert program_words(placeholder_plan(run, SITE).batch_script or "")[1] == "bin/torchrun"
