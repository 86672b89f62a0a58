"""What the real launchers said to our command lines: `dry_runs.jsonl`, written anew by hand with

    python -m tests.nightbridge.launch.dry_runs --mirror GIT_DIRECTORY --python PYTHON

from a clone of NVIDIA-NeMo/Megatron-Bridge with its tags and a launcher environment (`prepare_base`). A launcher is run
with `--dryrun`: it parses its flags, looks its recipe up and shows the batch script, and submits nothing. It takes words
that its parser does not know for Hydra overrides and only names them in a warning, so those are recorded, too.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from datetime import UTC, date, datetime
from pathlib import Path

from nightbridge.launch.parser_source import LAUNCHER
from nightbridge.models import Model
from tests.nightbridge.launch.examples import EXAMPLES, VERSIONS, argv_of

RECORD = Path(__file__).with_name("dry_runs.jsonl")

_NOT_RECOGNISED = re.compile(r"Ignoring unrecognized arguments: (.*)")


class DryRun(Model):
    """One try.

    Attributes:
        version: Tag or branch of Megatron-Bridge.
        commit: The commit that it named.
        example: A name of `EXAMPLES`.
        date: Day of the try, in UTC.
        nemo_run: Version of NeMo-Run in the launcher's environment.
        exit_status: The launcher's.
        not_recognised: Words that the launcher's parser did not know.
        argv: What it was given, behind interpreter and launcher, without `--dryrun`.

    """

    version: str
    commit: str
    example: str
    date: date
    nemo_run: str
    exit_status: int
    not_recognised: tuple[str, ...]
    argv: tuple[str, ...]


def recorded() -> dict[tuple[str, str], DryRun]:
    """The tries by version and example."""
    records = [DryRun.model_validate_json(line) for line in RECORD.read_text().splitlines()]
    return {(record.version, record.example): record for record in records}


def _checkout(mirror: Path, version: str, folder: Path) -> str:
    """Check a version out; return its commit."""
    git = ("git", "-C", str(folder))
    subprocess.run(("git", "clone", "-q", "--shared", "--no-checkout", mirror, folder), check=True)
    # Some mirrors lack large pictures, and v0.3 has NeMo-Run package the whole commit.
    (folder / ".git/info/attributes").write_text("docs/** export-ignore\n")
    subprocess.run((*git, "sparse-checkout", "set", "--no-cone", "/*", "!/docs/"), check=True)
    subprocess.run((*git, "checkout", "-q", version), check=True)
    return subprocess.run((*git, "rev-parse", "HEAD"), check=True, text=True, stdout=subprocess.PIPE).stdout.strip()


def _tried(checkout: Path, python: Path, argv: tuple[str, ...]) -> tuple[int, tuple[str, ...]]:
    """Exit status, and the words that the parser did not know."""
    with tempfile.TemporaryDirectory() as home:
        environment = {"PATH": os.environ["PATH"], "HOME": home, "NEMORUN_HOME": f"{home}/nemorun", "COLUMNS": "400"}
        finished = subprocess.run(
            (python, checkout / LAUNCHER, *argv, "--dryrun"),
            cwd=checkout,
            env=environment | {"HF_TOKEN": "none", "WANDB_API_KEY": "none", "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
    if finished.returncode:
        print(finished.stdout, finished.stderr, sep="\n", file=sys.stderr)
    found = _NOT_RECOGNISED.search(finished.stderr)
    return finished.returncode, tuple(found[1].split()) if found else ()


def try_all(mirror: Path, python: Path) -> Iterator[DryRun]:
    """Run each version's launcher with each example."""
    nemo_run = subprocess.run(
        (python, "-c", "import importlib.metadata; print(importlib.metadata.version('nemo-run'))"),
        check=True, text=True, stdout=subprocess.PIPE,
    ).stdout.strip()  # fmt: skip
    for version in VERSIONS:
        with tempfile.TemporaryDirectory() as folder:
            commit = _checkout(mirror, version, Path(folder, "bridge"))
            for example in EXAMPLES:
                argv = argv_of(example, version)
                exit_status, not_recognised = _tried(Path(folder, "bridge"), python, argv)
                print(f"{version} {example}: {exit_status}")
                yield DryRun(
                    version=version,
                    commit=commit,
                    example=example,
                    date=datetime.now(UTC).date(),
                    nemo_run=nemo_run,
                    exit_status=exit_status,
                    not_recognised=not_recognised,
                    argv=argv,
                )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mirror", type=Path, required=True, help="a clone of Megatron-Bridge, bare or not")
    parser.add_argument("--python", type=Path, required=True, help="the interpreter of a launcher environment")
    given = parser.parse_args()
    tries = tuple(try_all(given.mirror.absolute(), given.python.absolute()))
    RECORD.write_text("".join(f"{record.model_dump_json()}\n" for record in tries))
