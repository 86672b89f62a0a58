"""What Megatron-LM's own parser said to the examples of two grids: `mimo_tries.jsonl`, written anew by hand with

    python -m tests.nightbridge.launch.mimo_tries --checkout FOLDER --python PYTHON

from a checkout of NVIDIA/Megatron-LM and an interpreter with torch, einops and transformers. The program's own
`_parse_and_validate` and `build_module_grid_specs` read each command line for as many ranks as the test has, in a
process of its own; torch is told of a GPU of architecture 9.0, which they ask for and use for nothing else.
"""

import argparse
import os
import re
import shlex
import subprocess
from pathlib import Path

from nightbridge.config import load, runs
from nightbridge.launch.launch_plan import placeholder_plan
from nightbridge.models import Model, Site

EXAMPLES = sorted(Path("conf/examples/hetero").glob("*.toml"))
RECORD = Path(__file__).with_name("mimo_tries.jsonl")

_READ = """
import os, sys
import torch
torch.cuda.get_device_capability = lambda *_: (9, 0)
import megatron.training.arguments
megatron.training.arguments.get_device_arch_version = lambda: 9
sys.path.insert(0, os.getcwd())
from examples.mimo import pretrain_mimo
from examples.mimo.training.args import build_module_grid_specs
args = pretrain_mimo._parse_and_validate()
build_module_grid_specs(args, args.world_size, "encoder")
"""


class Try(Model):
    """One command line and the parser's answer.

    Attributes:
        commit: Of Megatron-LM.
        example: The example's file.
        ranks: Processes of the whole job.
        argv: The program's options, output folders named after the attempt.
        refusal: The parser's last line; empty where it accepts.

    """

    commit: str
    example: str
    ranks: int
    argv: tuple[str, ...]
    refusal: str


def argv_of(example: Path) -> tuple[int, tuple[str, ...]]:
    """The processes of an example's job and the options that its program gets; `RUN` stands for the run's name."""
    (spec,) = runs(load(example), "2026-11-23")
    plan = placeholder_plan(spec, Site())
    script = re.search(r"bash -c (.*)\Z", plan.batch_script or "", re.DOTALL)
    assert script is not None
    words = shlex.split(shlex.split(script[1])[0])
    program = next(position for position, word in enumerate(words) if word.endswith(".py"))
    return plan.nodes * plan.tasks_per_node, tuple(
        word.replace(str(plan.attempt_dir), "RUN") for word in words[program + 1 :]
    )


def tried(checkout: Path, python: Path, ranks: int, argv: tuple[str, ...]) -> str:
    """The last line of a refusal; empty where the program's parser accepts."""
    environment = {"PATH": os.environ["PATH"], "WORLD_SIZE": str(ranks), "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    command = (str(python), "-W", "ignore", "-c", _READ, *argv)
    answer = subprocess.run(
        command,
        cwd=checkout,
        env=environment | {"PYTHONPATH": str(checkout)},
        capture_output=True,
        text=True,
        check=False,
    )
    return answer.stderr.strip().splitlines()[-1] if answer.returncode else ""


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkout", type=Path, required=True, help="a checkout of Megatron-LM")
    parser.add_argument("--python", type=Path, required=True, help="an interpreter with torch")
    given = parser.parse_args()
    git = ("git", "-C", given.checkout, "rev-parse", "HEAD")
    commit = subprocess.run(git, check=True, text=True, stdout=subprocess.PIPE).stdout.strip()
    lines = []
    for example in EXAMPLES:
        ranks, argv = argv_of(example)
        refusal = tried(given.checkout.absolute(), given.python.absolute(), ranks, argv)
        print(f"{example.name}: {refusal or 'accepted'}")
        lines.append(Try(commit=commit, example=example.name, ranks=ranks, argv=argv, refusal=refusal))
    RECORD.write_text("".join(f"{line.model_dump_json()}\n" for line in lines))
