"""`validate`, `render` and `rules`: every violation, the plan of every run, and why a rule exists."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from nightbridge.errors import StatusUnknown
from nightbridge.rules.checking import CONTAINER_RULES, PROFILES
from tests.nightbridge.cli.conftest import BROKEN, EXAMPLES, NIGHTLY, TEST, Program


@pytest.fixture
def broken(tmp_path: Path) -> Callable[[str], str]:
    """Write a test file with these lines of [cmd_args] besides; returns its path."""

    def write(lines: str) -> str:
        path = tmp_path / "broken.toml"
        path.write_text(BROKEN + lines)
        return str(path)

    return write


# --- validate ---------------------------------------------------------------------------------------------------------


def test_validate_accepts_the_samples(nightbridge: Program) -> None:
    code, out, _ = nightbridge("validate", NIGHTLY, TEST)

    assert code == 0
    assert out.count(": ok") == 4


def test_validate_tells_every_violation_of_every_file(nightbridge: Program, broken: Callable[[str], str]) -> None:
    code, out, _ = nightbridge("validate", broken("tpp = 1\n"), "missing.toml", TEST)

    assert code == 2
    assert "cmd_args.tpp: unknown key" in out
    assert "missing.toml: no such file" in out
    assert "llama3_8b_h100: ok" in out


def test_validate_checks_rules_as_well_as_keys(nightbridge: Program, broken: Callable[[str], str]) -> None:
    code, out, _ = nightbridge("validate", broken("tp = 3\ngb = 0\n"))

    assert code == 2
    assert "error: num_gpus 8 is not a multiple of tp 3" in out
    assert "[sizes-positive]" in out


def test_scenarios_whose_tests_share_a_history_are_told(nightbridge: Program, tmp_path: Path) -> None:
    """Their ids are the same, and so is all that a series goes by: the slower branch would regress every night."""
    repository = "git_repos = [{{ url = 'https://github.com/NVIDIA-NeMo/Megatron-Bridge.git', commit = '{}' }}]"
    files = {}
    for file, (test, commit) in {
        "nightly": ("llama", "v0.4.2"),
        "weekly": ("llama", "v0.4.2"),
        "release": ("llama", "v0.4.1"),
        "other": ("llama-on-main", "v0.4.1"),
    }.items():
        entry = f'[[Tests]]\nid = "{test}"\ntest_name = "llama3_8b_h100"\n{repository.format(commit)}\n'
        (tmp_path / f"{file}.toml").write_text(f'name = "{file}"\n\n{entry}')
        files[file] = str(tmp_path / f"{file}.toml")
    library = ("--tests-dir", str(Path(TEST).parent))

    code, out, err = nightbridge("validate", TEST, *files.values(), *library)
    alone = nightbridge("validate", TEST, files["nightly"], files["weekly"], files["other"], *library)

    assert code == 0, out + err
    assert [line for line in out.splitlines() if "warning" in line and "Tests" in line] == [
        f"  {files['release']}: warning: Tests: {files['nightly']} has 'llama' with other code or another image: on one "
        "cluster both scenarios share a history, in which the slower one regresses every night; give each an id of its "
        "own"
    ]
    assert "share a history" not in alone[1]


def test_a_folder_of_tests_that_is_not_there_is_told(nightbridge: Program) -> None:
    code, out, _ = nightbridge("validate", TEST, "--tests-dir", "nowhere")

    assert code == 2
    assert "nowhere: no such directory" in out


@pytest.mark.parametrize("form", ["text", "json", "github"])
def test_a_file_whose_name_is_not_utf_8_is_told_beside_the_others(
    nightbridge: Program, tmp_path: Path, form: str
) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "good.toml").write_text(Path(TEST).read_text())
    for ending in ("toml", "yaml"):
        Path(tmp_path, "tests", os.fsdecode(b"\xff.") + ending).write_text(Path(TEST).read_text())

    files = ("tests/good.toml", os.fsdecode(b"tests/\xff.toml"), os.fsdecode(b"tests/\xff.yaml"))
    code, out, _ = nightbridge("validate", *files, "--format", form)

    assert code == 2
    assert "its path is not UTF-8" in out
    assert "\\xff.toml" in out
    assert "\\xff.yaml" in out
    assert form == "github" or "llama3_8b_h100" in out


def test_validate_prints_one_json_document_and_nothing_else(nightbridge: Program, broken: Callable[[str], str]) -> None:
    code, out, _ = nightbridge("validate", "--json", broken("tp = 3\n"), TEST, "missing.toml")

    document = json.loads(out)
    assert code == 2
    assert document["valid"] is False
    broken_file, sample, missing = document["files"]
    assert broken_file["tests"][0]["findings"][0]["rule"] == "gpus-divide"
    assert sample["valid"] is True
    assert "no such file" in missing["error"]


def test_validate_asks_the_cluster_only_when_one_is_named(
    nightbridge: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nightbridge.models import ClusterLimits
    from nightbridge.slurm import factory

    class Opened:
        def limits(self) -> ClusterLimits:
            return ClusterLimits(has_pyxis=True, max_nodes=1)

    monkeypatch.setattr(factory, "open_cluster", lambda settings, workspace: Opened())

    without, _, _ = nightbridge("validate", NIGHTLY)
    code, out, _ = nightbridge("validate", NIGHTLY, "--cluster", "slurm")

    assert without == 0
    assert code == 2
    assert "error: num_gpus 16 need 2 nodes" in out


def test_validate_does_the_offline_part_while_the_cluster_does_not_answer(
    nightbridge: Program, monkeypatch: pytest.MonkeyPatch, broken: Callable[[str], str]
) -> None:
    def refuse(*_given: object) -> None:
        raise StatusUnknown("slurmctld is away", subject="dgx")

    monkeypatch.setattr("nightbridge.slurm.factory.open_cluster", refuse)

    good, _, told = nightbridge("validate", NIGHTLY, "--cluster", "slurm")
    bad, out, _ = nightbridge("validate", broken("tp = 3\n"), "--cluster", "slurm")

    assert (good, bad) == (0, 2)
    assert "partition, nodes, GPUs and time limit. dgx: slurmctld is away" in told
    assert "error: num_gpus 8 is not a multiple of tp 3" in out


def test_validate_says_how_many_points_of_a_sweep_are_skipped_and_why(
    nightbridge: Program, broken: Callable[[str], str]
) -> None:
    some, out, _ = nightbridge("validate", broken("tp = [1, 2, 3]\n"))
    none, refused, _ = nightbridge("validate", broken("tp = [3, 5]\n"))

    assert (some, none) == (0, 2)
    assert "warning: 1 of 3 points of the sweep are skipped" in out
    assert "ok (3 points)" in out
    assert "error: 2 of 2 points" in refused


def test_validate_takes_the_configuration_that_a_run_has_dumped(nightbridge: Program, tmp_path: Path) -> None:
    path = tmp_path / "ConfigContainer.yaml"
    path.write_text("model: {num_layers: 32}\ntrain: {train_iters: 50, global_batch_size: 16, micro_batch_size: 1}\n")

    sound, out, _ = nightbridge("validate", str(path), "--gpus", "8")
    changed, found, _ = nightbridge("validate", str(path), "--gpus", "6", "--override", "train.train_iters=0", "--json")

    assert (sound, changed) == (0, 2)
    assert "ConfigContainer: ok" in out
    rules = {finding["rule"] for finding in json.loads(found)["files"][0]["tests"][0]["findings"]}
    assert rules == {"container-eval-batch", "container-train-batch", "container-no-training"}


def test_a_violation_in_a_dump_names_the_lines_of_its_keys(nightbridge: Program, tmp_path: Path) -> None:
    path = tmp_path / "ConfigContainer.yaml"
    path.write_text(
        "model:\n  transformer:\n    num_layers: 31\n    pipeline_model_parallel_size: 2\n    pipeline_dtype: bf16\n"
        "train:\n  train_iters: 5\n  global_batch_size: 16\n  micro_batch_size: 1\noptimizer:\n  optimizer: adam\n  lr: x\n"
    )

    code, out, _ = nightbridge("validate", str(path))
    unknown, told, _ = nightbridge("validate", str(path), "--override", "train.iters=0")

    assert (code, unknown) == (2, 2)
    assert f"\n  {path}:3: error: model.num_layers 31 is not a multiple of the pipeline's 2 stages" in out
    assert f"\n  {path}:12: error: optimizer.lr is a number or null, not 'x' [container-types]" in out
    assert "'train.iters=0' does not name a key" in told


LAUNCHER_PARSER = """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("-i", "--container_image")
parser.add_argument("-c", "--compute_dtype")
parser.add_argument("-g", "--gpu")
parser.add_argument("--task")
parser.add_argument("-m", "--model_family_name")
parser.add_argument("-mr", "--model_recipe_name")
parser.add_argument("-ng", "--num_gpus")
parser.add_argument("-tp", "--tensor_model_parallel_size")
parser.add_argument("-ms", "--max_steps")
"""

# --- every violation, with its line, in each form ---------------------------------------------------------------------

WRONG = """name = "wrong"
test_template_name = "MegatronBridge"
foo = 1

[cmd_args]
model_family_name = "llama"
model_recipe_name = "llama3_8b"
gpu_type = "h100"
container_image = "nvcr.io/nvidia/nemo:25.09"
num_gpus = 7
compute_dtype = "fp9"
tp = 2
gb = 13
mb = 2
cp = "x"
max_steps = %s

[extra_cmd_args]
"train.train_iterz" = "5"

[[git_repos]]
url = "https://github.com/NVIDIA-NeMo/Megatron-Bridge.git"
commit = "v0.5.0"
"""
FOUND = {
    ("configuration", 3),
    ("configuration", 15),
    ("gpus-divide", 10),
    ("gpus-divide", 12),
    ("batch-divides", 13),
    ("batch-divides", 14),
    ("choice", 11),
    ("override-known", 19),
}


@pytest.mark.parametrize("steps", ["10", "[10, 20]"], ids=["one run", "sweep"])
def test_keys_and_rules_are_checked_in_one_pass_and_each_violation_has_its_lines(
    nightbridge: Program, tmp_path: Path, steps: str
) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(WRONG % steps)

    code, out, _ = nightbridge("validate", "--json", str(path))

    findings = json.loads(out)["files"][0]["tests"][0]["findings"]
    errors = [each for each in findings if each["severity"] == "error"]
    assert code == 2
    assert {(each["rule"], int(place.rpartition(":")[2])) for each in errors for place in each["places"]} == FOUND
    assert {place.rpartition(":")[0] for each in errors for place in each["places"]} == {str(path)}


def test_what_could_not_be_read_is_not_told_as_missing(nightbridge: Program, broken: Callable[[str], str]) -> None:
    path = Path(broken("max_steps = 10\n"))
    path.write_text(path.read_text().replace('gpu_type = "h100"', "gpu_type = 100"))
    _, unread, _ = nightbridge("validate", str(path))

    assert "cmd_args.gpu_type: must be text" in unread
    assert "required-fields" not in unread


def test_violations_are_annotations_of_github_actions(nightbridge: Program, tmp_path: Path) -> None:
    path, syntax = tmp_path / "a,b.toml", tmp_path / "syntax.toml"
    path.write_text(WRONG % 10)
    syntax.write_text("name = \n")

    code, out, _ = nightbridge("validate", "--format", "github", str(path), str(syntax))

    assert code == 2
    assert f"::error file={str(path).replace(',', '%2C')},line=3,title=configuration::foo: unknown key" in out
    assert f"::error file={syntax},line=1,title=configuration::not valid TOML" in out
    assert all(line.startswith(("::error file=", "::warning file=")) for line in out.splitlines())


# --- rules ------------------------------------------------------------------------------------------------------------


def test_rules_lists_every_rule_that_validate_may_name(nightbridge: Program) -> None:
    code, out, _ = nightbridge("rules", "--json")

    listed = {rule["id"] for rule in json.loads(out)["rules"]}
    assert code == 0
    assert {rule.id for profile in PROFILES.values() for rule in profile} <= listed
    assert {rule.id for rule in CONTAINER_RULES} <= listed
    assert {"configuration", "pinned-code", "sweep-size"} <= listed


def test_every_rule_has_a_reason_and_a_source(nightbridge: Program) -> None:
    rules = json.loads(nightbridge("rules", "--json")[1])["rules"]

    assert [rule["id"] for rule in rules if not (rule["reason"].endswith(".") and rule["source"])] == []


def test_a_rule_that_follows_megatrons_code_names_the_commit_that_it_was_read_at(nightbridge: Program) -> None:
    rules = json.loads(nightbridge("rules", "--json")[1])["rules"]
    following = [rule for rule in rules if rule["source"].startswith("Megatron-")]

    named = re.compile(r"(from|at) ([0-9a-f]{8}\b|the pinned commit)")
    assert len(following) > 60
    assert [rule["id"] for rule in following if not named.search(rule["source"])] == []
    versions = {rule["id"]: rule["versions"] for rule in rules}
    assert (versions["overlap-graphs"], versions["overlap-layer-graphs"]) == ("to v0.4.2", "from v0.5.0")


def test_validate_checks_what_a_checkout_ships(nightbridge: Program, tmp_path: Path) -> None:
    scripts = tmp_path / "scripts" / "performance"
    folder = scripts / "configs" / "llama"
    folder.mkdir(parents=True)
    (scripts / "argument_parser.py").write_text(LAUNCHER_PARSER)
    (folder / "llama3_workload_base_configs.py").write_text(
        "LLAMA3_8B_PRETRAIN_CONFIG_H100_BF16_V1 = WorkloadBaseConfig(num_gpus=8, tensor_model_parallel_size=2)\n"
        "LLAMA3_8B_PRETRAIN_CONFIG_B200_BF16_V1 = WorkloadBaseConfig(num_gpus=8, tensor_model_parallel_size=3)\n"
    )

    code, out, _ = nightbridge("validate", "--shipped", str(tmp_path))
    nothing, _, told = nightbridge("validate", "--shipped", str(tmp_path / "scripts" / "performance"))
    neither, _, _ = nightbridge("validate")

    assert (code, nothing, neither) == (2, 2, 2)
    assert "LLAMA3_8B_PRETRAIN_CONFIG_H100_BF16_V1: ok" in out
    assert re.search(r"llama3_workload_base_configs.py:2: error: .*\[gpus-divide\]", out)
    assert "ships no configurations that can be read" in told


def test_rules_shows_one_rule_in_full(nightbridge: Program) -> None:
    code, out, _ = nightbridge("rules", "qwen3-tokenizer")
    listing = nightbridge("rules")[1]

    assert code == 0
    assert re.search(r"severity +error\n", out)
    assert re.search(r"versions +from v0\.4\.0\n", out)
    assert re.search(r"source +Megatron-Bridge", out)
    assert "qwen3-tokenizer" in listing


def test_a_rule_that_does_not_exist_is_refused_with_the_next_best(nightbridge: Program) -> None:
    code, _, told = nightbridge("rules", "gpu-divides")

    assert (code, told) == (2, "nightbridge: gpu-divides: no such rule. Did you mean gpus-divide?\n")


# --- render -----------------------------------------------------------------------------------------------------------


def test_render_shows_the_command_line_of_every_run_and_masks_secrets(nightbridge: Program) -> None:
    code, out, _ = nightbridge("render", NIGHTLY, "--system", str(EXAMPLES / "site.toml"))

    assert code == 0
    assert out.count("scripts/performance/setup_experiment.py -a llm-perf -p batch") == 3
    assert "export HF_TOKEN=********" in out


def test_render_shows_the_batch_script_of_a_workload_without_a_launcher(nightbridge: Program) -> None:
    code, out, _ = nightbridge("render", str(EXAMPLES / "hetero" / "9_nodes.toml"))

    assert code == 0
    assert "train.sh:\n#!/bin/bash\n#SBATCH --nodes=9\n" in out
    assert "examples/mimo/pretrain_mimo.py --encoder-tp 1 --encoder-dp 8 --llm-tp 2" in out


def test_render_prints_one_json_document(nightbridge: Program) -> None:
    code, out, _ = nightbridge("render", "--json", NIGHTLY)

    runs = json.loads(out)["runs"]
    assert code == 0
    assert [run["nodes"] for run in runs] == [1, 1, 2]
    assert runs[2]["environment"]["HF_TOKEN"] == "********"
    assert runs[2]["secret_environment"] == {"HF_TOKEN": {"source": "env", "name": "HF_TOKEN"}}


def test_render_never_shows_a_token_that_stands_in_the_file(nightbridge: Program, broken: Callable[[str], str]) -> None:
    code, out, err = nightbridge("render", broken('hf_token = "hf_verysecret"\n'))

    assert code == 0
    assert "verysecret" not in out + err
    assert "cmd_args.hf_token" in err


def test_render_shows_the_valid_runs_and_says_which_are_not(nightbridge: Program, broken: Callable[[str], str]) -> None:
    code, out, err = nightbridge("render", "--json", broken("tp = 3\n"))

    assert code == 2
    assert json.loads(out)["runs"] == []
    assert "gpus-divide" in err
