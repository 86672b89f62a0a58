"""Slurm's load from watching many jobs: the watcher's one question for all, against one poll for each job.

    python benchmarks/polling.py [JOBS] [SECONDS]

Starts a real Slurm of its own (Debian's packages, as root), runs JOBS (default 200) jobs, and counts with `sdiag` the
RPCs that slurmctld served and with `sacctmgr show stats` those that slurmdbd served. First the watcher follows all jobs
from their submission for SECONDS (default 60), its busiest time; some jobs end, and the time from a job's exit file to
the watcher's answer is taken. Then, with nobody else asking, each job is polled once as NeMo-Run does, with
`sacct --parsable2 -j ID`; it repeats that every 2 seconds, so a minute has 30 such rounds.
"""

import os
import re
import statistics
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from nightbridge.models import ClusterSettings, Job, utc_now
from nightbridge.slurm.attempt_files import open_attempt
from nightbridge.slurm.command_line import CommandLineCluster
from nightbridge.slurm.script import wrap_script
from nightbridge.slurm.watcher import SHORTEST_INTERVAL, Watcher
from tests.real.slurm_daemons import SlurmDaemons, missing_reason, start_slurm

POLL_SECONDS = 2.0
"""NeMo-Run's interval between two polls of one job."""
ENDINGS = 5
WIDE = (
    "MaxJobCount=5000",
    "PartitionName=wide Nodes=ALL OverSubscribe=FORCE:64 MaxTime=01:00:00 State=UP",
)


def rpcs(daemons: SlurmDaemons) -> tuple[int, int]:
    """Questions that slurmctld and slurmdbd have answered since they started."""
    ctld = daemons.command("sdiag").stdout
    by_type = ctld.partition("Remote Procedure Call statistics by message type")[2].partition("by user")[0]
    # sdiag's and sacctmgr's own questions are not the subject.
    counted = [
        int(count)
        for name, count in re.findall(r"^\s+(\w+)\s+\(\s*\d+\) count:(\d+)", by_type, re.MULTILINE)
        if name not in ("REQUEST_STATS_INFO", "MESSAGE_NODE_REGISTRATION_STATUS", "MESSAGE_EPILOG_COMPLETE")
        and not name.startswith("REQUEST_COMPLETE")
        and name != "REQUEST_SUBMIT_BATCH_JOB"
    ]
    dbd = daemons.command("sacctmgr", "show", "stats").stdout
    by_type = dbd.partition("by message type")[2].partition("by user")[0]
    asked = [
        int(count) for name, count in re.findall(r"^\s+(DBD_GET\w+)\s+\(\s*\d+\) count:(\d+)", by_type, re.MULTILINE)
    ]
    return sum(counted), sum(asked)


def submit_waiting(cluster: CommandLineCluster, workspace: Path, number: int, partition: str) -> Job:
    """A job that ends when its pipe is opened."""
    attempt = open_attempt(workspace, f"bench-{number}", cluster.settings)
    pipe, script = attempt.attempt_dir / "pipe", attempt.attempt_dir / "job.sh"
    os.mkfifo(pipe)
    text = f"#!/bin/bash\n#SBATCH --output=/dev/null\ncat {pipe}\n"
    script.write_text(wrap_script(text, attempt.attempt_dir))
    return Job(
        run_key=attempt.run_key,
        attempt=1,
        job_id=cluster.submit(attempt.name, script, [f"--partition={partition}", "--mem=5"]),
        cluster=cluster.settings.name,
        attempt_dir=attempt.attempt_dir,
        script=script,
        experiment_dir=attempt.attempt_dir,
        submitted_at=utc_now(),
    )


def lag_of(watcher: Watcher, job: Job) -> float:
    """Seconds from the exit file to the watcher's answer."""
    watcher.follow(job)
    answered = time.time()
    return answered - (job.attempt_dir / "exit_code").stat().st_mtime


def ends_seen(watcher: Watcher, jobs: list[Job]) -> list[float]:
    """Seconds from the exit files of jobs that end one after the other to the watcher's answers."""
    lags = []
    with ThreadPoolExecutor(len(jobs)) as pool:
        ends = [pool.submit(lag_of, watcher, job) for job in jobs]
        time.sleep(15)
        for job, end in zip(jobs, ends, strict=True):
            threading.Thread(target=(job.attempt_dir / "pipe").write_text, args=("",), daemon=True).start()
            lags.append(end.result(timeout=120))
            time.sleep(0.7)
    watcher.stop()
    return lags


def main(jobs: int, seconds: float) -> None:
    if reason := missing_reason():
        raise SystemExit(f"cannot run here: {reason}")
    daemons = start_slurm(extra_conf=WIDE)
    try:
        with tempfile.TemporaryDirectory(prefix="nb-bench-") as folder:
            measure(daemons, Path(folder), jobs, seconds)
    finally:
        daemons.stop()


def measure(daemons: SlurmDaemons, workspace: Path, count: int, seconds: float, partition: str = "wide") -> None:
    settings = ClusterSettings(kind="slurm", name="bench", slurm_conf=daemons.slurm_conf)
    cluster = CommandLineCluster(settings)
    short = Watcher(CommandLineCluster(settings.model_copy(update={"poll_interval": 1.0})))
    watcher = Watcher(cluster)
    jobs = [submit_waiting(cluster, workspace, number, partition) for number in range(count)]
    with ThreadPoolExecutor(count) as pool:
        before, began = rpcs(daemons), time.monotonic()
        ends = [pool.submit(lag_of, watcher, job) for job in jobs]
        time.sleep(seconds)
        after, took = rpcs(daemons), time.monotonic() - began
        running = daemons.command("squeue", "-h", "-t", "running", "-o", "%i").stdout.count("\n")
        ours = [(late - early) * 60 / took for early, late in zip(before, after, strict=True)]

        chosen = range(0, count, max(2, count // ENDINGS))  # some are left for the other interval
        for number in chosen:
            threading.Thread(target=(jobs[number].attempt_dir / "pipe").write_text, args=("",), daemon=True).start()
            time.sleep(1.3)
        lags = [ends[number].result(timeout=120) for number in chosen]
        watcher.stop()
    quick = ends_seen(short, [job for number, job in enumerate(jobs) if number not in chosen][:ENDINGS])
    before = rpcs(daemons)
    for job in jobs:
        daemons.command("sacct", "--parsable2", "-j", str(job.job_id))
    # A whole round of polls by itself, and 30 rounds in a minute: no machine of this size could do them in that time.
    theirs = [(late - early) * 60 / POLL_SECONDS for early, late in zip(before, rpcs(daemons), strict=True)]
    ratio = sum(theirs) / sum(ours)
    print(f"{count} jobs, {running} of them running, watched for {took:.0f} s from their submission")
    print(f"{'RPCs per minute':40} {'slurmctld':>10} {'slurmdbd':>10}")
    print(f"{'watcher, one question for all':40} {ours[0]:10.0f} {ours[1]:10.0f}")
    print(f"{'one poll per job every 2 s, as NeMo-Run':40} {theirs[0]:10.0f} {theirs[1]:10.0f}")
    print(f"ratio {ratio:.0f}")
    print(
        f"end seen where a site asks for 1 s: {statistics.median(quick):.2f} s (median), {max(quick):.2f} s (longest)"
    )
    print(
        f"end seen after {statistics.median(lags):.2f} s (median), {max(lags):.2f} s (longest of {len(lags)}); "
        f"the short interval is {SHORTEST_INTERVAL:.0f} s"
    )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 200, float(sys.argv[2]) if len(sys.argv) > 2 else 60.0)
