"""What a job itself says about the machines and the image that it ran with: driver, CUDA, NCCL, the image's release.

Sources, in the order in which they count:

* `env_<job id>.log`, which the launcher's `--dump_env` writes. Images of NVIDIA's registry name their parts in
  environment variables. Only the names in `VARIABLES` are looked at: an environment holds secrets.
* The ranks' and the batch script's logs: NCCL's own line, the banner and the notes of those images, `nvidia-smi`.
* `repo_status.json`: the commits of the repositories that lie in the image.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from nightbridge.models import Job
from nightbridge.outputs.experiment import RunOutput

VARIABLES: Mapping[str, str] = {
    "CUDA_VERSION": "CUDA",
    "CUDA_DRIVER_VERSION": "driver that CUDA brings",
    "NCCL_VERSION": "NCCL",
    "CUDNN_VERSION": "cuDNN",
    "NVIDIA_PYTORCH_VERSION": "image release",
    "PYTORCH_VERSION": "PyTorch",
    "TRANSFORMER_ENGINE_VERSION": "Transformer Engine",
}

_VERSION = r"(\d+(?:\.\d+)+\w*)"
LINES: tuple[tuple[re.Pattern[str], tuple[str, ...]], ...] = (
    (re.compile(rf"\bkernel driver version {_VERSION}"), ("driver",)),
    (re.compile(rf"\bDriver Version: {_VERSION}\s+CUDA Version: {_VERSION}"), ("driver", "CUDA of the driver")),
    (re.compile(rf"\bNCCL version {_VERSION}(?:\+cuda{_VERSION})?"), ("NCCL", "CUDA of NCCL")),
    (re.compile(r"\bNVIDIA Release (\d\d\.\d\d\S*)"), ("image release",)),
    (re.compile(r"\bPyTorch Version (\d\S*)"), ("PyTorch",)),
)
"""Texts of a log, and the names of the facts that their groups hold."""

_MAX_BYTES = 1 << 22
"""Of a log: all this is said before the first step."""
_MAX_LETTERS = 80


def read_facts(output: RunOutput, job: Job, pinned: Iterable[str] = ()) -> dict[str, str]:
    """The facts of one job by name; those that nothing says are left out.

    Args:
        output: What the job left.
        job: The job.
        pinned: Commits that the run was pinned to: a repository at one of them is no news of the image.
    """
    found: dict[str, str] = {}
    sources = (
        _of_environment(output.job_dir / f"env_{job.job_id}.log"),
        *(_of_log(path) for path in (*output.logs, *output.sbatch_logs)),
        _of_repositories(output.repo_status, frozenset(pinned)),
    )
    for name, value in (fact for source in sources for fact in source):
        found.setdefault(name, value[:_MAX_LETTERS])
    return dict(sorted(found.items()))


def _of_environment(path: Path) -> Iterator[tuple[str, str]]:
    for line in _head(path).splitlines():
        name, _, value = line.partition("=")
        if name in VARIABLES and value:
            yield VARIABLES[name], value


def _of_log(path: Path) -> Iterator[tuple[str, str]]:
    text = _head(path)
    for pattern, names in LINES:
        if match := pattern.search(text):
            yield from ((name, value) for name, value in zip(names, match.groups(), strict=True) if value)


def _of_repositories(path: Path | None, pinned: frozenset[str]) -> Iterator[tuple[str, str]]:
    """Name and commit of each repository in the image. What is no such file says nothing."""
    try:
        listed = json.loads(_head(path)) if path else []
    except (ValueError, RecursionError):
        return
    for entry in listed if isinstance(listed, list) else ():
        if isinstance(entry, dict) and isinstance(commit := entry.get("sha"), str) and commit not in pinned:
            yield f"{entry.get('name', 'repository')} in the image", commit[:12]


def _head(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(_MAX_BYTES).decode(errors="replace")
    except OSError:
        return ""
