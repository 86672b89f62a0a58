"""What reading through a child costs: processor time for each run, and memory while 200 jobs are followed.

    PYTHONPATH=. python benchmarks/reader.py [RUNS [FOLLOWED [SCALARS [MIB [TURNS]]]]]      default: 50 200 1000000 64 3

Each run has a log of 500 steps and an event file of as many. It is read twice in this process and twice in children,
once for the evidence of how it ended and once for its summary, as a night does. Processor time is that of this process,
the server and its children; the server's start is printed apart. Then so many jobs are followed, each with such a log
and such an event file. Last, an event file of so many scalars becomes a table, and a run with shards of so many MiB is
harvested into a folder, here and in children, in so many turns: their median, after one of each that does not count,
and what the readers alone took of it.
"""

import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from unittest.mock import patch

from benchmarks.event_files import write_events
from nightbridge.harvest import selection
from nightbridge.models import Job, LaunchPlan, StoreSettings
from nightbridge.outputs.checkpoints import prove_checkpoint
from nightbridge.outputs.event_files import _find_scalars, find_scalars
from nightbridge.outputs.following import RunFollower
from nightbridge.outputs.measurements import RunToMeasure, _measure_run, measure_run
from nightbridge.outputs.reader_process import SERVER
from nightbridge.outputs.run_evidence import RunToRead, _read_evidence, evidence_of
from nightbridge.store.object_store import open_store
from tests.builders import make_job, make_spec
from tests.nightbridge.harvest.left_run import make_run as make_left_run
from tests.nightbridge.outputs.builders import RunFolder, StepLine

STEPS = 500
TICK = os.sysconf("SC_CLK_TCK")

USUAL = (50, 200, 1_000_000, 64, 3)


def main(runs: int, followed: int, scalars: int, mib: int, turns: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        jobs = [make_run(Path(folder) / "runs" / f"run{number}" / "a1") for number in range(max(runs, followed))]
        plans = {job.name: plan_of(job) for job in jobs}
        read(jobs[0], plans[jobs[0].name])  # the server starts
        print(f"start of the server: {sum(cpu for _, cpu, _ in readers()):.2f} s of processor time")
        for job in jobs[:2]:
            in_process(job, plans[job.name])
        here = cost(lambda: for_each(in_process, jobs[:runs], plans))
        cost(int)
        there = cost(lambda: for_each(read, jobs[:runs], plans))
        print(f"{runs} runs here: {here / runs:.3f} s each; in children: {there / runs:.3f} s each")
        print(f"through the child: {(there - here) / runs:+.3f} s of processor time for each run")
        followers = [RunFollower(job, (), total=STEPS) for job in jobs[:followed]]
        before = own_memory()
        spent = cost(lambda: [follower.look() for follower in followers])
        looks = cost(lambda: [follower.look() for _ in range(10) for follower in followers])
        print(
            f"{followed} jobs followed: {spent:.2f} s for the first looks,"
            f" {1000 * looks / (10 * followed):.2f} ms for each further one;"
            f" this process {own_memory() - before:+.0f} MB; server and child together"
            f" {sum(memory for _, _, memory in readers()):.0f} MB (proportional set size)"
        )

        compare_throughput(Path(folder), scalars, mib, turns)


def compare_throughput(folder: Path, scalars: int, mib: int, turns: int) -> None:
    """Print what an event file and a harvest cost, read here and in children."""
    events = write_events(folder / "events", scalars).parent
    left = make_left_run(folder / "left", shard_size=mib << 20)
    store = folder / "store"

    def harvest() -> None:
        left.harvest(open_store(StoreSettings(url=f"file://{store}")))
        # Stores that stay fill the page cache, and its upkeep counts as the processor time of whoever writes next.
        shutil.rmtree(store)

    def harvest_here() -> None:
        with patch.object(selection, "prove_in_child", lambda path, files, _: prove_checkpoint(path, files)):
            harvest()

    for what, here, there in (
        (f"a table of {scalars:,} scalars", lambda: _find_scalars(events), lambda: find_scalars(events)),
        (f"a harvest of {6 * mib} MiB of shards", harvest_here, harvest),
    ):
        here(), cost(there)
        before = busy()
        taken = [(cost(here), cost(there)) for _ in range(turns)]
        one, other = (statistics.median(seconds) for seconds in zip(*taken, strict=True))
        readers_took = (busy() - before) / turns
        print(
            f"{what}: {one:.2f} s of processor time here, {other:.2f} s in children;"
            f" the readers alone {readers_took:.3f} s",
            flush=True,
        )


def make_run(attempt_dir: Path) -> Job:
    experiment_dir = attempt_dir / "nemorun"
    experiment_dir.mkdir(parents=True)
    key = attempt_dir.parent.name
    job = make_job(key, attempt_dir, cluster="local", experiment_dir=experiment_dir, submitted_at=datetime.now(UTC))
    folder = RunFolder(attempt_dir, job)
    folder.log("".join(f"{StepLine(step).perf}\n{StepLine(step).step}\n" for step in range(1, STEPS + 1)))
    folder.curves(range(1, STEPS + 1))
    return job


def plan_of(job: Job) -> LaunchPlan:
    folder = job.attempt_dir
    return LaunchPlan(
        run_key=job.run_key,
        attempt=1,
        attempt_dir=folder,
        argv=("python",),
        cwd=folder,
        nodes=1,
        tasks_per_node=1,
        max_steps=STEPS,
    )


def read(job: Job, plan: LaunchPlan) -> None:
    evidence_of(RunToRead(jobs=(job,), plan=plan))
    measure_run(RunToMeasure(jobs=(job,), plan=plan, spec=make_spec()))


def for_each(work: Callable[[Job, LaunchPlan], None], jobs: Sequence[Job], plans: Mapping[str, LaunchPlan]) -> None:
    for job in jobs:
        work(job, plans[job.name])


def in_process(job: Job, plan: LaunchPlan) -> None:
    _read_evidence(RunToRead(jobs=(job,), plan=plan))
    _measure_run(RunToMeasure(jobs=(job,), plan=plan, spec=make_spec()))


def cost(work: Callable[[], object]) -> float:
    """Processor time of this process, the server, and its children, those that have ended among them, in seconds."""
    before = time.process_time() + busy()
    work()
    time.sleep(0.2)
    # The server counts children that have ended when it forks another one.
    SERVER.connect().close()
    time.sleep(0.2)
    return time.process_time() + busy() - before


def busy() -> float:
    """Processor time of the servers of this process and of their children, in seconds."""
    return sum(cpu for _, cpu, _ in readers())


def readers() -> list[tuple[int, float, float]]:
    """Id, processor time with that of ended children, and memory in MB of the server and its children."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if b"reader_process" not in path.read_bytes():
                continue
            fields = path.with_name("stat").read_text().rpartition(")")[2].split()
            pss = next(
                line for line in path.with_name("smaps_rollup").read_text().splitlines() if line.startswith("Pss:")
            )
        except OSError:
            continue
        if os.getsid(int(path.parent.name)) in own_sessions():
            found.append((int(path.parent.name), sum(map(int, fields[11:15])) / TICK, int(pss.split()[1]) / 1024))
    return found


def own_sessions() -> set[int]:
    """The sessions of the servers that this process has started."""
    own = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    return set(map(int, own))


def own_memory() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


def counts_of(arguments: Sequence[str]) -> list[int]:
    """The counts that are given, and the usual ones for the rest."""
    return [*map(int, arguments), *USUAL[len(arguments) :]]


if __name__ == "__main__":
    main(*counts_of(sys.argv[1:]))
