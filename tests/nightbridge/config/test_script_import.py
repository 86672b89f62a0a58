"""A launch script of two grids as a test, and both command lines compared."""

from pathlib import Path

import pytest

from nightbridge.config.scenarios import load
from nightbridge.config.script_import import Comparison, compare_command_lines, import_script
from nightbridge.errors import InvalidInput

SCRIPT = """\
ITERS=${ITERS:-20}
ARGS=(
  --num-layers 2 --hidden-size 64 --num-attention-heads 4 --max-position-embeddings 128
  --encoder-tp 2 --encoder-dp 2 --llm-offset 4 --llm-tp 2 --llm-dp 1
  --tensor-parallel-num-weight-shards 4
)
export NCCL_IB_SL=1
python -m torch.distributed.run --nproc-per-node 8 -m examples.mimo.pretrain_mimo \\
  "${ARGS[@]}" --micro-batch-size 1 --global-batch-size 8 --lr 2e-4 --train-iters "${ITERS}" \\
  --use-distributed-optimizer --hybrid-layer-pattern "ME*" --log-interval 1 "$@"
"""


def imported(tmp_path: Path, text: str = SCRIPT) -> tuple[Path, Comparison]:
    script, target = tmp_path / "run_mock.sh", tmp_path / "run_mock.toml"
    script.write_text(text)
    found = import_script(script, "nvcr.io#nvidia/nemo:26.06.00", {})
    target.write_text(found.toml)
    return target, compare_command_lines(found, target)


def test_a_script_becomes_a_test_that_starts_the_same(tmp_path: Path) -> None:
    target, compared = imported(tmp_path)
    (test,) = load(target).tests

    assert (compared.only_script, compared.different) == ((), ())
    assert "--tensorboard-dir" in compared.only_test
    assert test.cmd_args["encoder"] == {"tp": 2, "dp": 2}
    assert test.cmd_args["language_model"] == {"tp": 2, "dp": 1, "weight_shards": 4}
    assert (test.cmd_args["max_steps"], test.cmd_args["lr"], test.cmd_args["gb"]) == (20, 2e-4, 8)
    assert test.extra_cmd_args == {"use-distributed-optimizer": "", "hybrid-layer-pattern": "ME*"}
    assert test.extra_env_vars == {"NCCL_IB_SL": "1"}


def test_an_option_that_the_test_cannot_keep_is_told(tmp_path: Path) -> None:
    _, compared = imported(tmp_path, SCRIPT.replace("--llm-offset 4", "--llm-offset 6"))

    assert compared.different == ("--llm-offset 6 became 4",)
    assert compared.only_script == ()


def test_a_script_of_another_program_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"starts examples/mimo/train.py, which has no two grids"):
        imported(tmp_path, SCRIPT.replace("pretrain_mimo", "train"))


def test_a_script_that_cannot_be_a_test_is_refused_with_its_lines(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput) as refused:
        imported(tmp_path, SCRIPT.replace("--global-batch-size 8", ""))

    assert "cmd_args.gb: is required" in str(refused.value)
