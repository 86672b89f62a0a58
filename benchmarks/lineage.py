"""How much hides inside the bumps of a range of commits, and how long bisect takes to list it.

    PYTHONPATH=. .venv/bin/python benchmarks/lineage.py GOOD BAD

The repository and its submodules are mirrored into the workspace where they are not there yet; that is not counted.
"""

import argparse
import time
from collections import Counter
from pathlib import Path

from nightbridge.bisect.plan import steps_of
from nightbridge.models import Site
from nightbridge.repos.commits import commits_between, open_bumps

BRIDGE = "https://github.com/NVIDIA-NeMo/Megatron-Bridge.git"


def main() -> None:
    """List a range twice, and print what the second time found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("good", help="full commit")
    parser.add_argument("bad", help="full commit")
    parser.add_argument("--url", default=BRIDGE)
    parser.add_argument("--workspace", type=Path, default=Path(".nightbridge"))
    given = parser.parse_args()
    site = Site(workspace=given.workspace)
    for commit in commits_between(site, given.url, given.good, given.bad):
        open_bumps(site, given.url, commit)
    started = time.monotonic()
    found = commits_between(site, given.url, given.good, given.bad)
    steps = steps_of(given.good, found, lambda commit: commit)
    seconds = time.monotonic() - started
    bumps = [bump for commit in found for bump in commit.bumps]
    kinds = Counter(step.kind for step in steps)
    print(f"{len(found)} commits, {len(bumps)} bumps, {sum(bool(bump.reverted) for bump in bumps)} to another branch")
    print(f"{sum(commit.only_bumps for commit in found)} commits do nothing else; not listed: ", end="")
    print(f"{sum(bool(bump.note) for bump in bumps)}")
    print(f"{len(steps)} points in {seconds:.1f} s: {dict(kinds)}")


if __name__ == "__main__":
    main()
