"""A checkpoint is really loaded, with torch, by an interpreter that has it: `nightbridge checkpoint --deep`."""

import json
import os
import re
import shlex
from pathlib import Path
from typing import Any

from nightbridge.errors import DamagedData, InvalidInput, PermanentError
from nightbridge.models import Model
from nightbridge.processes import run

LOADER = Path(__file__).with_name("torch_loader.py")
TIMEOUT_SECONDS = 12 * 3600
_MAX_REASON = 1000

# What is pickled in a checkpoint is code of other people's, which may run: it sees no secret of ours.
_KEPT_VARIABLES = re.compile(
    r"PATH|HOME|USER|LOGNAME|SHELL|TMPDIR|TZ|LANG|LD_LIBRARY_PATH|PYTHONPATH|LC_\w+|XDG_\w+|SLURM_(?!JWT$)\w+|ENROOT_\w+"
)
_ANSWERS = ({"missing"}, {"memory"}, {"problem"}, {"torch", "tensors", "objects", "bytes"})
_ADVICE = (
    "Name an interpreter of the training's environment, or a command that runs one on a node, with --python, or with"
    " load_with in [harvest]"
)


class Loaded(Model):
    """What was loaded; `bytes` are those of the tensors."""

    torch: str
    tensors: int
    objects: int
    bytes: int

    def __str__(self) -> str:
        return f"torch {self.torch} loaded {self.tensors} tensors ({self.bytes} bytes) and {self.objects} objects"


def load_with_torch(path: Path, python: str) -> Loaded:
    """Load a checkpoint in a child process, on the CPU; code that is pickled in it runs there, as in a training.

    Args:
        path: Its folder, absolute; a node has to see it under the same path.
        python: The interpreter, or a whole command that runs one, `srun --container-image=nemo.sqsh python3`. It gets
            the program as its standard input, so that nothing of ours has to be there.

    Raises:
        DamagedData: It cannot be loaded.
        InvalidInput: What is given is no command.
        PermanentError: The interpreter is not there, has no torch or another module that the checkpoint needs, or ran
            out of memory.
        TransientError: It took more than `TIMEOUT_SECONDS`.
    """
    kept = {name: value for name, value in os.environ.items() if _KEPT_VARIABLES.fullmatch(name)}
    finished = run(
        [*_words(python), "-", str(path)],
        # Nothing goes onto a GPU that a training may be using.
        environment={**kept, "CUDA_VISIBLE_DEVICES": ""},
        timeout=TIMEOUT_SECONDS,
        given=LOADER.read_bytes(),
    )
    answer = _answer(finished.stdout.decode(errors="replace"))
    if finished.code or not answer:
        what = f"the loading process ended with code {finished.code}: {finished.tail or 'no message'}"
        raise PermanentError(what[:_MAX_REASON], subject=python, advice=f"{_ADVICE}; one that is killed lacks memory")
    if "missing" in answer:
        raise PermanentError(f"it has no module {answer['missing']}", subject=python, advice=_ADVICE)
    if "memory" in answer:
        advice = "Check it on a node with more memory"
        raise PermanentError(f"not enough memory to load it: {answer['memory']}", subject=str(path), advice=advice)
    if "problem" in answer:
        raise DamagedData(f"torch cannot load it: {answer['problem']}"[:_MAX_REASON], subject=str(path))
    loaded = Loaded.model_validate(answer)
    if not loaded.tensors and not loaded.objects:
        advice = "What else is in it needs the program that wrote it"
        raise PermanentError("it holds nothing that torch can load", subject=str(path), advice=advice)
    return loaded


def _answer(output: str) -> dict[str, Any]:
    """The last answer of the program, whatever a command that runs it prints after it or before it on its line."""
    for line in reversed(output.splitlines()):
        _, brace, rest = line.partition("{")
        try:
            answer = json.loads(brace + rest)
        except (ValueError, RecursionError):
            continue
        if any(answer.keys() == keys for keys in _ANSWERS):
            return dict(answer)
    return {}


def _words(command: str) -> list[str]:
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise InvalidInput(f"not a command: {error}".lower(), subject=command, advice=_ADVICE) from error
    if not words:
        raise InvalidInput("no program is named", subject="--python", advice=_ADVICE)
    return words
