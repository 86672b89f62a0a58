"""How long a night's verdicts take when every test has years of history, and how much memory.

    python benchmarks/verdict.py [--tests 500] [--nights 1800] [--processes 2] [--folder DIRECTORY]

Writes a store with one series per test: every metric with noise, a slower and a repaired level on the way, most rows
compacted and the last ones each an object of its own, as a store has them between two compactions. Then it judges
tonight's run of every test as the compare stage does, history and decisions read from the store, in so many processes.
Prints seconds and the largest resident memory of all processes together, and, for a few tests, the ratio to judging
them with every row decoded.
"""

import argparse
import multiprocessing
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

import numpy as np

from nightbridge.gate.evidence import gather_evidence
from nightbridge.gate.run_verdict import compare
from nightbridge.history.history_store import COMPACT_AT, put_row, write_generation
from nightbridge.history.reading import read_history, read_recent
from nightbridge.history.rows import HistoryRow, row_of
from nightbridge.models import (
    Checkout,
    GitRepo,
    Image,
    Job,
    LaunchPlan,
    Outcome,
    PinnedRepository,
    RunRecord,
    RunSpec,
    StoreSettings,
    Summary,
    TestDefinition,
    Verdict,
    VerdictStatus,
)
from nightbridge.store.directory import DirectoryStore
from nightbridge.store.object_store import ObjectStore

CLUSTER, FIRST_NIGHT = "dgx", date(2021, 11, 21)
STEPS = 50
SMALL_OBJECTS = COMPACT_AT // 2
COMPARED_WITH_ALL = 3
NODES = ("node[1-2]", "node[3-4]", "node[5-6]")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tests", type=int, default=500)
    parser.add_argument("--nights", type=int, default=1800)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="nightbridge-verdict-") as scratch:
        url = f"file://{scratch}/store"
        # Spawned: a fork would begin with the memory of whoever made the histories.
        processes = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(options.processes, mp_context=processes) as pool:
            list(pool.map(make_history, *zip(*((url, n, options.nights) for n in range(options.tests)), strict=True)))
        print(f"{options.tests} tests, {options.tests * options.nights:,} rows", flush=True)
        with ProcessPoolExecutor(options.processes, mp_context=processes) as pool:
            shares = [range(first, options.tests, options.processes) for first in range(options.processes)]
            judged = list(pool.map(judge_all, [url] * options.processes, shares, [options.nights] * options.processes))
        statuses = [status for share in judged for status in share.statuses]
        cpu = sum(share.cpu for share in judged) / options.tests
        print(f"verdicts: {max(share.seconds for share in judged):.2f} s, {cpu * 1e3:.1f} ms of processor time each")
        print(f"memory: {sum(share.memory for share in judged) / 1e6:.0f} MB in {options.processes} processes")
        print(f"found: {', '.join(f'{statuses.count(each)} {each}' for each in sorted(set(statuses)))}")
        few = range(min(COMPARED_WITH_ALL, options.tests))
        store = DirectoryStore(StoreSettings(url=url))
        part, whole = ([timed(store, n, options.nights, read) for n in few] for read in (recent, everything))
        print(f"every row decoded: {statistics.median(whole) / statistics.median(part):.1f} times as long")


class Share(NamedTuple):
    """What one process did: seconds, seconds of processor time, bytes of its peak memory, and the verdicts."""

    seconds: float
    cpu: float
    memory: int
    statuses: list[VerdictStatus]


def judge_all(url: str, numbers: Sequence[int], nights: int) -> Share:
    """Judge some tests, the first of them once before the clock starts: a night has long imported all that it needs."""
    store = DirectoryStore(StoreSettings(url=url))
    for number in numbers[:1]:
        judge(store, number, nights, recent)
    began, used = time.perf_counter(), time.process_time()
    statuses = [judge(store, number, nights, recent).status for number in numbers]
    seconds, cpu = time.perf_counter() - began, time.process_time() - used
    return Share(seconds, cpu, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, statuses)


Reader = Callable[[ObjectStore, RunRecord], tuple[HistoryRow, ...]]


def recent(store: ObjectStore, record: RunRecord) -> tuple[HistoryRow, ...]:
    return read_recent(store, CLUSTER, record.series, record.spec.night)


def everything(store: ObjectStore, record: RunRecord) -> tuple[HistoryRow, ...]:
    return read_history(store, CLUSTER, record.series)


def judge(store: ObjectStore, number: int, nights: int, read: Reader) -> Verdict:
    """Tonight's verdict on one test, as the compare stage makes it."""
    record = record_of(number, nights, summary_of(number, nights, nights))
    history = read(store, record)
    return compare(record, history, gather_evidence(store, record, history=history))


def timed(store: ObjectStore, number: int, nights: int, read: Reader) -> float:
    began = time.process_time()
    judge(store, number, nights, read)
    return time.process_time() - began


# --- histories -------------------------------------------------------------------------------------------------------


def make_history(url: str, number: int, nights: int) -> None:
    """Write the rows of one test."""
    store = DirectoryStore(StoreSettings(url=url))
    model = row_of(record_of(number, 0, Summary()), None)
    node = np.random.default_rng(number).integers(len(NODES), size=nights)
    rows = [
        model.model_copy(
            update={
                "night": night_of(place),
                "run_key": f"test-{number}-{night_of(place)}-{place:010x}",
                "verdict": VerdictStatus.PASSED,
                "nodes": NODES[node[place]],
                "harvested_at": datetime.combine(FIRST_NIGHT + timedelta(days=place), datetime.min.time(), UTC),
                "summary": summary_of(number, place, nights),
                "megatron_bridge": model.megatron_bridge.model_copy(update={"commit": f"{place:040x}"}),
            }
        )
        for place in range(nights)
    ]
    write_generation(store, CLUSTER, model.series, rows[:-SMALL_OBJECTS], datetime.now(UTC))
    for row in rows[-SMALL_OBJECTS:]:
        put_row(store, row)


def summary_of(number: int, place: int, nights: int) -> Summary:
    """What one night of a test measured, of a history of so many: slower for a sixth of it, then repaired."""
    noise = 1 + 0.01 * np.random.default_rng((number, place)).standard_normal(4)
    slowed = nights // 3 <= place < nights // 2
    step_time = float(noise[0] * (1.04 if slowed else 1.0))
    return Summary(
        steps_expected=STEPS,
        steps_done=STEPS,
        steady_first_step=11,
        steady_last_step=STEPS,
        steady_steps=40,
        step_time=step_time,
        step_time_p05=step_time * 0.99,
        step_time_p95=step_time * 1.03,
        step_time_spread=0.01,
        tflops_per_gpu=700 / step_time,
        tflops_per_gpu_p05=690 / step_time,
        tflops_per_gpu_p95=710 / step_time,
        tflops_per_gpu_spread=0.01,
        tokens_per_second_per_gpu=9000 / step_time,
        peak_memory=80.0,
        final_loss=float(6.5 * (1 + (noise[1] - 1) / 20)),
        loss_digest="tensorboard:" + "0" * 64,
        loss_anchors=tuple((step, 11.0 - step * 0.09) for step in range(1, STEPS + 1, 3)),
        grad_norm_min=0.8,
        grad_norm_max=float(2 * noise[2]),
        queue_time=30.0,
        startup_time=float(120 * noise[3]),
        source="tensorboard",
    )


def night_of(place: int) -> str:
    return str(FIRST_NIGHT + timedelta(days=place))


def record_of(number: int, place: int, summary: Summary) -> RunRecord:
    """A run of a test as the harvest hands it over."""
    url = "https://github.com/NVIDIA-NeMo/Megatron-Bridge.git"
    test = TestDefinition(
        id=f"test-{number}",
        name=f"test-{number}",
        # Both arms of a pair save, so that pairs tell of checkpoints, too.
        cmd_args={"num_gpus": 8, "max_steps": STEPS, "save_interval": STEPS // 2},
        git_repos=(GitRepo(url=url),),
        nemo_run_repo=GitRepo(url=url),
    )
    spec = RunSpec(scenario="nightly", night=night_of(place), test=test)
    folder = Path("/shared/runs") / spec.run_key / "a1"
    pinned = PinnedRepository(url=url, ref="main", commit="a" * 40, path=Path("/shared/code"), subject="Tidy the docs")
    return RunRecord(
        spec=spec,
        checkout=Checkout(megatron_bridge=pinned, nemo_run=pinned),
        image=Image(kind="sqsh", reference="nvcr.io/nvidia/nemo:26.08", digest="sha256:" + "d" * 64),
        plan=LaunchPlan(
            run_key=spec.run_key, attempt=1, attempt_dir=folder, argv=("python",), cwd=folder, nodes=1, tasks_per_node=8
        ),
        jobs=(
            Job(
                run_key=spec.run_key,
                attempt=1,
                job_id=4711,
                cluster=CLUSTER,
                attempt_dir=folder,
                script=folder / "job.sh",
                experiment_dir=folder,
                submitted_at=datetime.now(UTC),
                outcome=Outcome.SUCCEEDED,
            ),
        ),
        store_url="s3://bucket/nightly",
        prefix=f"runs/{spec.test_slug}/{spec.night}/{spec.run_key}/a1",
        series=f"test-{number}-0123456789ab",
        summary=summary,
        harvested_at=datetime.now(UTC),
    )


if __name__ == "__main__":
    main()
