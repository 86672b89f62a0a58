"""Large nights on PostgreSQL: are all verdicts there, and what does a run cost beside a bare Prefect flow?

    PYTHONPATH=. python benchmarks/night_scale.py [COUNT ...]     default: 20 50 100 200

For each COUNT a night of so many tests runs through the whole pipeline against a real server on PostgreSQL, then a
bare flow with as many subflows and task runs and with persisted results. Compared is the processor time of the flow's
own process: jobs, the embedded cluster and other programs are processes of their own. Printed per COUNT: verdicts,
seconds from start to report, processor time per run of both and the difference, and the peak memory of server, worker
and flow together. The exit code is 0 when every verdict is there, the difference is at most 0.5 s and the memory at
most 3 GB.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path

SHARE_LIMIT_SECONDS = 0.5
MEMORY_LIMIT_BYTES = 3e9
STAGES = ("prepare", "clone", "container", "validate", "submit", "watch", "harvest", "compare")
SLOTS = 4


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("counts", nargs="*", type=int, default=[20, 50, 100, 200])
    parser.add_argument("--measure", choices=["night", "bare"], help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        return measure(given.measure, given.counts[0], given.folder)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="night-scale-")))
        return compare(given.counts, folder, stack)


def compare(counts: list[int], folder: Path, stack: ExitStack) -> int:
    """Run both for each count and print what they took."""
    from examples.practice.repositories import install_torchrun, make_practice_repositories
    from nightbridge.repos.environments import prepare_base
    from tests.real.postgres import start_postgres
    from tests.real.prefect_server import PrefectServer

    postgres = start_postgres()
    stack.callback(postgres.remove)
    server = PrefectServer(folder / "server", database_url=postgres.make_database("prefect"))
    stack.callback(server.stop)
    server.start()
    server.prefect("work-pool", "create", "scale", "--type", "process")
    prefect = Path(sys.executable).with_name("prefect")
    worker = subprocess.Popen(
        [prefect, "worker", "start", "--pool", "scale"],
        env=server.environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.STDOUT,
    )
    stack.callback(worker.terminate)
    make_practice_repositories(folder / "practice")
    python = prepare_base(Path(".nightbridge/envs").absolute()) / "bin" / "python"
    install_torchrun(folder / "practice", python)
    print("tests  verdicts  seconds  CPU s/run  bare CPU s/run  difference  memory MB", flush=True)
    kept = True
    for count in counts:
        night, bare = (run(what, count, folder, server, worker.pid) for what in ("night", "bare"))
        difference = (night["cpu"] - bare["cpu"]) / count
        print(
            f"{count:5}  {night['verdicts']:8}  {night['seconds']:7.0f}  {night['cpu'] / count:9.3f}"
            f"  {bare['cpu'] / count:14.3f}  {difference:10.3f}  {night['memory'] / 1e6:9.0f}",
            flush=True,
        )
        kept &= night["verdicts"] == count and difference <= SHARE_LIMIT_SECONDS
        kept &= night["memory"] <= MEMORY_LIMIT_BYTES
    return 0 if kept else 1


def run(what: str, count: int, folder: Path, server: object, worker: int) -> dict[str, float]:
    """Run one of the two in a process of its own, and watch what memory all of Prefect's processes take."""
    process = subprocess.Popen(
        [sys.executable, __file__, str(count), "--measure", what, "--folder", folder],
        env={**server.environment, "PREFECT_LOGGING_LEVEL": "ERROR"},  # type: ignore[attr-defined]
        stdout=subprocess.PIPE,
    )
    peaks: dict[int, int] = {}
    over = threading.Event()

    def watch() -> None:
        while not over.wait(1.0):
            for pid in (server.process.pid, worker, process.pid):  # type: ignore[attr-defined]
                peaks[pid] = max(peaks.get(pid, 0), memory_of(pid))

    watcher = threading.Thread(target=watch)
    watcher.start()
    out, _ = process.communicate()
    over.set()
    watcher.join()
    assert process.returncode == 0, f"{what} of {count} ended with {process.returncode}"
    measured: dict[str, float] = json.loads(out.splitlines()[-1])
    return {**measured, "memory": sum(peaks.values())}


def memory_of(pid: int) -> int:
    """Resident memory of a process, bytes; 0 once it is gone."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (FileNotFoundError, ProcessLookupError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def measure(what: str, count: int, folder: Path) -> int:
    """Run one of the two here; print what it took of this process's own time."""
    began = time.monotonic()
    verdicts = _night(count, folder) if what == "night" else _bare(count)
    own = resource.getrusage(resource.RUSAGE_SELF)
    print(json.dumps({"seconds": time.monotonic() - began, "cpu": own.ru_utime + own.ru_stime, "verdicts": verdicts}))
    return 0


def _night(count: int, folder: Path) -> int:
    from nightbridge.flows import nightly_regression

    here = folder / f"night-{count}"
    here.mkdir()
    samples = Path("conf/practice/vlm_small.toml").read_text(encoding="utf-8")
    (here / "vlm_small.toml").write_text(samples.replace(".nightbridge/practice", str(folder / "practice")))
    tests = "".join(
        f'[[Tests]]\nid = "t{number}"\ntest_name = "vlm_small"\ncmd_args.train_samples = 16\n'
        "cmd_args.save_interval = 2\ncmd_args.lr_warmup_samples = 0\ncmd_args.lr_decay_samples = 16\n"
        "cmd_args.lr_wsd_decay_samples = 8\n"
        for number in range(count)
    )
    (here / "scale.toml").write_text(f'name = "scale"\n{tests}')
    site = (
        f'workspace = "{here}"\nenvironments = "{Path(".nightbridge/envs").absolute()}"\n[cluster]\nslots = {SLOTS}\n'
    )
    (here / "site.toml").write_text(site)
    report = nightly_regression(here / "scale.toml", night="n1", system=str(here / "site.toml"))
    bad = [verdict for verdict in report.verdicts if verdict.exit_code]
    for verdict in bad[:3]:
        print(f"{verdict.test_id}: {verdict.status}: {'; '.join(verdict.reasons)}", file=sys.stderr)
    return len(report.verdicts) - len(bad)


def _bare(count: int) -> int:
    """A flow that does nothing but what Prefect does: subflows in threads, tasks with persisted results."""
    from prefect import flow, task

    from nightbridge.flows.nightly import MAX_RUNS_AT_ONCE
    from nightbridge.flows.threads import mark_started, side_by_side

    def nothing(key: str, stage: str) -> dict[str, str]:
        return {"key": key, "stage": stage}

    stages = [task(name=stage, persist_result=True, result_serializer="json")(nothing) for stage in STAGES]

    @flow(name="bare-run", persist_result=True)
    def bare_run(key: str) -> int:
        mark_started()
        for stage in stages:
            stage(key, stage.name)
        return 1

    @flow(name="bare-night")
    def bare_night() -> int:
        keys = [f"run-{number}" for number in range(count)]
        return sum(side_by_side(bare_run, keys, most=MAX_RUNS_AT_ONCE))

    return bare_night()


if __name__ == "__main__":
    sys.exit(main())
