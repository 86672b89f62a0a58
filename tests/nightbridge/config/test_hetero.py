"""A heterogeneous-parallel test as a file: what is read, and what is refused with its line."""

from pathlib import Path
from typing import Any

import pytest

from nightbridge.config.scenarios import load, runs
from nightbridge.rules.checking import check_read

GOOD = """\
name = "vlm"
test_template_name = "HeteroMIMO"

[cmd_args]
container_image = "none"
gb = 8
max_steps = 5

[cmd_args.encoder]
tp = 2
dp = 2

[cmd_args.language_model]
tp = 2
dp = 2
ep = 4

[[git_repos]]
url = "https://github.com/NVIDIA/Megatron-LM.git"
commit = "main"
"""


def read(tmp_path: Path, text: str) -> Any:
    path = tmp_path / "vlm.toml"
    path.write_text(text)
    return load(path)


def test_only_what_was_written_is_kept(tmp_path: Path) -> None:
    scenario = read(tmp_path, GOOD)

    assert scenario.invalid == ()
    assert scenario.warnings == ()
    assert scenario.tests[0].cmd_args == {
        "container_image": "none",
        "gb": 8,
        "max_steps": 5,
        "encoder": {"tp": 2, "dp": 2},
        "language_model": {"tp": 2, "dp": 2, "ep": 4},
    }


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("tp = 2\ndp = 2\n\n", "tpp = 2\n\n", "vlm.toml:10: cmd_args.encoder.tpp: unknown key; did you mean 'tp'?"),
        ("gb = 8", "global_batch = 8", "cmd_args.gb: is required"),
        ("max_steps = 5", "max_step = 5", "cmd_args.max_step: unknown key; did you mean 'max_steps'?"),
        ("gb = 8", "gb = 0", "cmd_args.gb: input should be greater than or equal to 1"),
        ("max_steps = 5", 'lr_wsd_decay_style = "sqrt"', "cmd_args.lr_wsd_decay_style: input should be"),
        ("max_steps = 5", "max_steps = []", "cmd_args.max_steps: is an empty list"),
        (
            "[cmd_args.encoder]",
            "[[cmd_args.encoder]]",
            "vlm.toml:9: cmd_args.encoder: is a list, and grids are not swept",
        ),
        ("max_steps = 5", "mb = true", "cmd_args.mb: must be a number, not true or false"),
        ("max_steps = 5", "lr = true", "cmd_args.lr: must be a number, not true or false"),
        ("max_steps = 5", 'num_workers = "0-3"', "cmd_args.num_workers: must be a whole number"),
    ],
)
def test_a_mistake_is_reported_with_its_line(tmp_path: Path, old: str, new: str, says: str) -> None:
    scenario = read(tmp_path, GOOD.replace(old, new, 1))

    assert says in "\n".join(scenario.invalid[0].violations)


def test_one_wrong_value_makes_no_rule_miss_what_is_written(tmp_path: Path) -> None:
    scenario = read(tmp_path, GOOD.replace("gb = 8", "gb = 0", 1))

    (found,) = check_read(scenario.invalid[0])
    assert "cmd_args.gb" in found.message


def test_a_list_is_a_sweep(tmp_path: Path) -> None:
    sizes = "num_layers = 2\nhidden_size = 64\nnum_attention_heads = 4\nmax_position_embeddings = 128\n"
    text = GOOD.replace("gb = 8", f"{sizes}gb = [8, 16]")
    scenario = read(tmp_path, text + '\n[extra_cmd_args]\nuse-distributed-optimizer = ""\n')

    assert [run.test.cmd_args["gb"] for run in runs(scenario, "n")] == [8, 16]


def test_a_nemo_run_repository_is_said_to_have_no_effect(tmp_path: Path) -> None:
    scenario = read(tmp_path, GOOD + '\n[nemo_run_repo]\nurl = "https://x/Run"\ncommit = "main"\n')

    assert ["nemo_run_repo: has no effect" in warning for warning in scenario.warnings] == [True]
