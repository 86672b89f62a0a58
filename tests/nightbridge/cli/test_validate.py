"""`validate`, `render` and `rules`: every violation, the plan of every run, and why a rule exists."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from nightbridge.errors import StatusUnknown
from nightbridge.rules import CONTAINER_RULES, PROFILES
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
    assert "error [gpus-divide]" in out
    assert "error [sizes-positive]" in out


def test_a_folder_of_tests_that_is_not_there_is_told(nightbridge: Program) -> None:
    code, out, _ = nightbridge("validate", TEST, "--tests-dir", "nowhere")

    assert code == 2
    assert "nowhere: no such directory" in out


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
    assert "error [nodes-allowed] num_gpus 16 need 2 nodes" in out


def test_validate_does_the_offline_part_while_the_cluster_does_not_answer(
    nightbridge: Program, monkeypatch: pytest.MonkeyPatch, broken: Callable[[str], str]
) -> None:
    def refuse(*_given: object) -> None:
        raise StatusUnknown("slurmctld is away", thing="dgx")

    monkeypatch.setattr("nightbridge.slurm.factory.open_cluster", refuse)

    good, _, told = nightbridge("validate", NIGHTLY, "--cluster", "slurm")
    bad, out, _ = nightbridge("validate", broken("tp = 3\n"), "--cluster", "slurm")

    assert (good, bad) == (0, 2)
    assert "partition, nodes, GPUs and time limit. dgx: slurmctld is away" in told
    assert "error [gpus-divide]" in out


def test_validate_says_how_many_points_of_a_sweep_are_skipped_and_why(
    nightbridge: Program, broken: Callable[[str], str]
) -> None:
    some, out, _ = nightbridge("validate", broken("tp = [1, 2, 3]\n"))
    none, refused, _ = nightbridge("validate", broken("tp = [3, 5]\n"))

    assert (some, none) == (0, 2)
    assert "warning [gpus-divide] 1 of 3 points of the sweep are skipped" in out
    assert "error [gpus-divide] 2 of 2 points" in refused


def test_validate_takes_the_configuration_that_a_run_has_dumped(nightbridge: Program, tmp_path: Path) -> None:
    path = tmp_path / "ConfigContainer.yaml"
    path.write_text("model: {num_layers: 32}\ntrain: {train_iters: 50, global_batch_size: 16, micro_batch_size: 1}\n")

    sound, out, _ = nightbridge("validate", str(path), "--gpus", "8")
    changed, found, _ = nightbridge("validate", str(path), "--gpus", "6", "--override", "train.train_iters=0", "--json")
    unknown, told, _ = nightbridge("validate", str(path), "--override", "train.iters=0")

    assert (sound, changed, unknown) == (0, 2, 2)
    assert "ConfigContainer: ok" in out
    rules = {finding["rule"] for finding in json.loads(found)["files"][0]["tests"][0]["findings"]}
    assert rules == {"container-eval-batch", "container-train-batch", "container-no-training"}
    assert "'train.iters=0' does not name a key" in told


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
