"""Loading a checkpoint with torch: what each answer of the child means, and torch itself where there is one."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from nightbridge.errors import DamagedData, InvalidInput, PermanentError
from nightbridge.outputs.torch_check import load_with_torch

TORCH_PYTHON = os.environ.get("NIGHTBRIDGE_TORCH_PYTHON", "")
"""An interpreter with torch and safetensors: several GB, so no requirement of the tests."""

SAVE = """
import sys, torch, torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
state = {"w": torch.ones(64, 64), "b": torch.ones(8).bfloat16(), "empty": torch.zeros(0, 3), "args": {"tp": 2}}
dcp.save(state, checkpoint_id=sys.argv[1] + "/iter_0000001", no_dist=True)
torch.save({"step": torch.tensor(3)}, sys.argv[1] + "/iter_0000001/train_state.pt")
save_file({"w": torch.ones(4, 4)}, sys.argv[1] + "/iter_0000001/model.safetensors")
"""


def answering(text: str, code: int = 0) -> str:
    """A command that answers so, whatever it is asked."""
    return shlex.join(["sh", "-c", f"cat > /dev/null; printf %s {shlex.quote(text)}; exit {code}"])


def test_an_interpreter_without_torch_is_named_with_the_option_that_names_another(tmp_path: Path) -> None:
    with pytest.raises(PermanentError, match=r"no module torch\. Name an interpreter .* with --python"):
        load_with_torch(tmp_path, sys.executable)


@pytest.mark.parametrize(
    ("python", "kind", "message"),
    [
        (answering('{"problem": "train_state.pt: EOFError"}'), DamagedData, "torch cannot load it: train_state.pt"),
        (answering('{"missing": "megatron"}'), PermanentError, "no module megatron"),
        (answering('{"memory": "tried 80 GB"}'), PermanentError, "not enough memory to load it: tried 80 GB"),
        (answering("", 3), PermanentError, "ended with code 3"),
        (answering("done\n[1]\nnull\n{}\n"), PermanentError, "ended with code 0"),
        (answering('{"torch": "2.13.0"}'), PermanentError, "ended with code 0"),
        (
            answering('{"torch": "2", "tensors": 0, "objects": 0, "bytes": 0}'),
            PermanentError,
            "it holds nothing that torch can load",
        ),
        ("sh -c 'kill -9 $$'", PermanentError, "one that is killed lacks memory"),
        ("no-such-python", PermanentError, "not installed"),
        ("srun 'python3", InvalidInput, "not a command: no closing quotation"),
        (" ", InvalidInput, "no program is named"),
    ],
)
def test_only_what_torch_itself_refuses_is_damage(
    python: str, kind: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(PermanentError, match=message) as caught:
        load_with_torch(tmp_path, python)
    assert type(caught.value) is kind


def test_what_the_interpreter_prints_before_its_answer_is_passed_over(tmp_path: Path) -> None:
    answer = '{"torch": "2.13.0", "tensors": 2, "objects": 1, "bytes": 8}'
    loaded = load_with_torch(tmp_path, answering(f"Welcome to node7\n{answer}\n"))
    assert str(loaded) == "torch 2.13.0 loaded 2 tensors (8 bytes) and 1 objects"


@pytest.mark.parametrize("after", ["done", "null", "[1]", "{}", '{"torch": 2}', "7", "srun: {", "{" * 9, "[" * 100_000])
def test_what_it_prints_after_its_answer_or_before_it_on_the_line_is_passed_over(tmp_path: Path, after: str) -> None:
    answer = '0: {"torch": "2.13.0", "tensors": 2, "objects": 1, "bytes": 8}'
    (tmp_path / "answer").write_text(f"{answer}\n{after}\n")
    loaded = load_with_torch(tmp_path, shlex.join(["sh", "-c", f"cat > /dev/null; cat {tmp_path / 'answer'}"]))
    assert loaded.tensors == 2


def test_every_archive_of_torch_is_loaded_and_nothing_of_another_program(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules/torch.py").write_text("__version__ = '0'\ndef load(path, **_): return None\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "modules"))
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    for name in ("train_state.pt", "modelopt_state.pth"):
        (folder / name).write_bytes(b"PK\3\4 an archive")
    (folder / "vocabulary.bin").write_bytes(b"something else")
    assert load_with_torch(folder, sys.executable).objects == 2


def test_code_that_is_pickled_in_a_checkpoint_finds_no_secret(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "SLURM_JWT", "SLURM_JOB_ID"):
        monkeypatch.setenv(name, "secret")
    environment = tmp_path / "environment"

    with pytest.raises(PermanentError):
        load_with_torch(tmp_path, shlex.join(["sh", "-c", f"env > {environment}; exit 1"]))

    assert [line for line in environment.read_text().splitlines() if line.endswith("=secret")] == [
        "SLURM_JOB_ID=secret"
    ]


@pytest.mark.skipif(not TORCH_PYTHON, reason="set NIGHTBRIDGE_TORCH_PYTHON to an interpreter with torch")
def test_torch_loads_what_it_has_saved_and_not_what_was_cut(tmp_path: Path) -> None:
    subprocess.run([TORCH_PYTHON, "-c", SAVE, str(tmp_path)], check=True, capture_output=True)
    folder = tmp_path / "iter_0000001"

    loaded = load_with_torch(folder, TORCH_PYTHON)

    assert (loaded.tensors, loaded.objects, loaded.bytes) == (4, 2, 64 * 64 * 4 + 8 * 2 + 4 * 4 * 4)
    (folder / "train_state.pt").write_bytes((folder / "train_state.pt").read_bytes()[:100])
    with pytest.raises(DamagedData, match=r"torch cannot load it: train_state\.pt"):
        load_with_torch(folder, TORCH_PYTHON)
