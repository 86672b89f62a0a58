"""What a launch script starts, told without executing it; and a script of two grids as a test."""

from pathlib import Path

import pytest

from nightbridge.config.scenarios import load
from nightbridge.config.script_import import Launch, OptionsDiff, compare_command_lines, import_script, read_launch
from nightbridge.errors import InvalidInput


def read(tmp_path: Path, text: str, **given: str) -> Launch:
    script = tmp_path / "run.sh"
    script.write_text(f"#!/bin/bash\nset -euo pipefail\n{text}\n")
    return read_launch(script, given)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("N=3\ntorchrun p.py --n $N", ["--n", "3"]),
        ("N=${N:-20}\ntorchrun p.py --n ${N}", ["--n", "20"]),
        ("A=2\nB=$((A * 3 * 2))\ntorchrun p.py --n ${B}", ["--n", "12"]),
        ("ARGS=(\n  --n 1   # the first\n  --m 'a b'\n)\nARGS+=(--k)\ntorchrun p.py \"${ARGS[@]}\"", "--n 1 --m|a b --k"),
        ("torchrun p.py \\\n  --pattern \"ME*M\" \\\n  \"$@\"", ["--pattern", "ME*M"]),
        ("torchrun p.py --n 1 2>&1 | tee log", ["--n", "1"]),
        ("OUT=\"${HOME_DIR:-/tmp}/x\"\ntorchrun p.py --save '$OUT' --load \"$OUT\"", ["--save", "$OUT", "--load", "/tmp/x"]),
        ("NOW=$(date)\ntorchrun p.py --n 1", ["--n", "1"]),
        ("if [ -z \"$X\" ]; then\n  N=7\nfi\nN=1\ntorchrun p.py --n $N", ["--n", "1"]),
    ],
)  # fmt: skip
def test_words_are_those_that_bash_would_pass(tmp_path: Path, text: str, words: list[str] | str) -> None:
    expected = words if isinstance(words, list) else ["--n", "1", "--m", "a b", "--k"]

    assert read(tmp_path, text).arguments == tuple(expected)


@pytest.mark.parametrize(
    ("command", "program"),
    [
        ("torchrun --nproc-per-node 8 --nnodes=2 examples/mimo/train.py --a", "examples/mimo/train.py"),
        ("uv run python -m torch.distributed.run --standalone -m examples.mimo.train --a", "examples/mimo/train.py"),
    ],
)
def test_the_program_follows_torchruns_own_words(tmp_path: Path, command: str, program: str) -> None:
    launch = read(tmp_path, f"export CUDA_DEVICE_MAX_CONNECTIONS=1\n{command}")

    assert (launch.program, launch.arguments) == (program, ("--a",))
    assert launch.variables == {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}


def test_a_variable_that_is_given_wins_over_the_scripts_default(tmp_path: Path) -> None:
    assert read(tmp_path, "N=${N:-20}\ntorchrun p.py --n $N", N="5").arguments == ("--n", "5")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("torchrun p.py --n $N", "run.sh:3: $N has no value"),
        ("NOW=$(date)\ntorchrun p.py --n $NOW", "run.sh:4: $NOW has no value, for line 3 cannot be determined"),
        ("if true; then\n  torchrun p.py\nfi", "starts nothing with torchrun outside of branches"),
        ("torchrun --standalone", "torchrun gets no program"),
    ],
)
def test_what_cannot_be_told_is_an_error_with_its_line(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        read(tmp_path, text)

    assert says in str(refused.value)


@pytest.mark.parametrize(
    ("name", "reason"), [("nowhere.sh", "No such file"), (".", "Is a directory"), ("latin.sh", "it is not UTF-8")]
)
def test_a_script_that_cannot_be_read_is_invalid_input(tmp_path: Path, name: str, reason: str) -> None:
    (tmp_path / "latin.sh").write_bytes("# für\n".encode("latin-1"))

    with pytest.raises(InvalidInput, match=f"cannot be read: {reason}"):
        read_launch(tmp_path / name, {})


def test_nothing_of_a_script_is_executed(tmp_path: Path) -> None:
    read(tmp_path, f"X=$(touch {tmp_path}/ran)\n`touch {tmp_path}/ran`\ntorchrun p.py --n 1")

    assert not (tmp_path / "ran").exists()


# --- as a test, and both command lines ---------------------------------------------------------------------------------

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


def imported(tmp_path: Path, text: str = SCRIPT) -> tuple[Path, OptionsDiff]:
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


def test_an_option_with_a_dot_in_its_name_is_one_key(tmp_path: Path) -> None:
    target, compared = imported(tmp_path, SCRIPT.replace("--log-interval 1", "--log-interval 1 --vision.depth 4"))

    assert load(target).tests[0].extra_cmd_args["vision.depth"] == "4"
    assert (compared.only_script, compared.different) == ((), ())


def test_a_script_of_another_program_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"starts examples/mimo/train.py, which has no two grids"):
        imported(tmp_path, SCRIPT.replace("pretrain_mimo", "train"))


def test_a_script_that_cannot_be_a_test_is_refused_with_its_lines(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput) as refused:
        imported(tmp_path, SCRIPT.replace("--global-batch-size 8", ""))

    assert "cmd_args.gb: is required" in str(refused.value)
