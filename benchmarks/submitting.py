"""The launcher's cost: tests submitted side by side, forked from a warm process, against a process for each.

    PYTHONPATH=. python benchmarks/submitting.py [TESTS]

TESTS (default 20) runs of the practice launcher, with the real NeMo-Run, are submitted to the embedded cluster at the
same moment, first from a warm process, then without; that includes the sbatch shim of each. Printed are the wall time
of all and the processor time of one. Jobs are cancelled at once.
"""

import os
import resource
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from nightbridge.repos.environments import prepare_base
from nightbridge.slurm import warm_launchers
from tests.nightbridge.slurm.test_warm_launchers import processor_seconds, running_cluster, submit, warm_processes


def submit_all(python: Path, tests: int) -> tuple[float, float]:
    """Seconds for all by the clock, and of processor time for each, the warm process's own start not counted."""
    with (
        tempfile.TemporaryDirectory(prefix="nb-submit-") as folder,
        running_cluster(Path(folder) / "workspace") as cluster,
        ThreadPoolExecutor(tests) as threads,
    ):
        before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
        list(threads.map(lambda number: submit(python, cluster, f"run-{number:02}"), range(tests)))
        wall, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
        spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        forked = sum(processor_seconds(warm) for warm in warm_processes())
    return wall, (spent + forked) / tests


def main() -> None:
    """Measure both ways."""
    tests = int(sys.argv[1]) if sys.argv[1:] else 20
    python = prepare_base(Path(".nightbridge/envs")) / "bin" / "python"
    warm = submit_all(python, tests)
    warm_launchers.PACKAGE = "no_such_package"
    fresh = submit_all(python, tests)
    for name, (wall, processor) in (("forked", warm), ("a process each", fresh)):
        print(f"{name}: {tests} submissions in {wall:.1f} s, {processor:.2f} s of processor time each")
    print(f"ratio of processor time {fresh[1] / warm[1]:.1f}; load {os.getloadavg()[0]:.0f}")


if __name__ == "__main__":
    main()
