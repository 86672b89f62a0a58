"""How often the whole gate raises a false alarm, and how soon it finds what became worse: every metric, every re-run.

    PYTHONPATH=. python benchmarks/error_rate.py [--noise FILE.json.gz] [--series N] [--steps N] [--kinds KIND...]

Each series is one test, night by night through `compare`: its verdict, the re-runs that it requests, and the verdict on
all of them, as the night's flow does it. The nights are those of `detection.py` (its four kinds, and its noise), and
three kinds that are harder:

    bimodal         a fifth of the runs is 3 % slower, whatever the code
    two speeds      a fifth of the runs is 10 % slower
    autocorrelated  nights follow each other (AR(1), 0.7, 1 %), and no canary tells it
    drift alone     as drift, without the canary

What a run measures besides its steps is modelled: start-up and checkpoint 12 % log-normal, first step and warm-up 5 %,
grad norm 5 %, loss 0.1 %, memory 0.05 % from run to run.

An alarm is a verdict that is not green and is news (`gate.news`); unstable ones are counted apart. Printed are alarms
for each series and year, after night 60 and before it, which metrics raised them, the share of series that were ever
called unstable, and of planted changes the share found and the night in which half of them were.
"""

import argparse
import math
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from datetime import date, timedelta
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.detection import Array, ar1, poisson_interval, read_noise, synthetic_noise
from benchmarks.verdict import STEPS, record_of
from nightbridge.gate.comparison import Evidence
from nightbridge.gate.verdict import compare
from nightbridge.history.rows import HistoryRow, row_of
from nightbridge.models import JobState, JobStatus, RunRecord, Summary, VerdictStatus

SLOW_MODES = {"bimodal": 1.03, "two speeds": 1.10}
FOUR = ("gaussian", "bad nodes", "node sets", "drift")
KINDS = (*FOUR, *SLOW_MODES, "autocorrelated", "drift alone")
CHANGES = {"step +3 %": 4, "step +2 %": 7, "memory +1 %": 3, "loss +1 %": 3}
"""What is planted, and within how many nights it is to be found."""

EARLY, YEAR, FOUND_WITHIN = 60, 365, 14
RUNS = 7
QUIET = np.exp(0.003 * np.random.default_rng(0).standard_normal(40))
"""The steps of the canary, as steady as people choose one."""

FIRST = date(2025, 1, 1)


class Tally(NamedTuple):
    """What the gate said of one series: alarms before and after night 60 with their metrics, and the night found."""

    early: int
    late: int
    metrics: tuple[str, ...]
    unstable: bool
    found: int | None


class Simulated(NamedTuple):
    """Of each night the factor of each of its runs on all step times, its nodes, and the canary's step time."""

    factors: Array
    nodes: Sequence[str]
    canary: Array | None


def simulate(kind: str, nights: int, rng: np.random.Generator) -> Simulated:
    shape = (nights, RUNS)
    nodes, canary = ["node[1-4]"] * nights, None
    factors = 1 + 0.01 * rng.standard_normal(shape)
    if kind == "bad nodes":
        factors *= np.where(rng.random(shape) < 0.03, 1 + rng.uniform(0.05, 0.30, shape), 1.0)
    elif kind == "node sets":
        second = rng.random(nights) < 0.2
        factors *= np.where(second, 1.03, 1.0)[:, None]
        nodes = ["node[5-8]" if other else "node[1-4]" for other in second]
    elif kind in SLOW_MODES:
        factors *= np.where(rng.random(shape) < 0.2, SLOW_MODES[kind], 1.0)
    elif kind != "gaussian":
        drift = ar1(rng, nights, 0.7, 0.01)
        own = 0.001 if kind == "autocorrelated" else 0.005
        factors = np.exp(drift[:, None] + own * rng.standard_normal(shape))
        if kind == "drift":
            canary = np.exp(drift + 0.005 * rng.standard_normal(nights))
    return Simulated(factors, nodes, canary)


def summary_of(rng: np.random.Generator, residual: Array, factor: float, memory: float, loss: float) -> Summary:
    """One run: steps bootstrapped from a real run's residuals in blocks of five, and the rest as modelled."""
    starts = rng.integers(0, residual.size, 8)
    steps = residual[(starts[:, None] + np.arange(5)).ravel() % residual.size] * factor
    ordered, median = np.sort(steps), float(np.median(steps))
    normal = rng.standard_normal(8)
    loss *= 1 + 0.001 * float(normal[0])
    return Summary(
        steps_expected=STEPS,
        steps_done=STEPS,
        step_time=median,
        step_time_p05=float(ordered[2]),
        step_time_p95=float(ordered[37]),
        step_time_midmean=float(ordered[10:30].mean()),
        wall_step_time=float(steps.mean()),
        slow_steps=float(ordered[37]) / median,
        tail_slowdown=float(np.median(steps[-8:])) / median,
        warmup_step_time=factor * (1 + 0.05 * float(normal[1])),
        first_step_time=30.0 * (1 + 0.05 * float(normal[2])),
        tflops_per_gpu=700 / median,
        tokens_per_second_per_gpu=9000 / median,
        peak_memory=80.0 * memory * (1 + 0.0005 * float(normal[3])),
        final_loss=6.5 * loss,
        loss_anchors=tuple((step, (11.0 - step * 0.09) * loss) for step in range(1, STEPS + 1, 10)),
        grad_norm_min=0.8,
        grad_norm_max=2 * (1 + 0.05 * float(normal[4])),
        startup_time=120 * math.exp(0.12 * float(normal[5])),
        checkpoint_time=30 * math.exp(0.12 * float(normal[6])),
        source="tensorboard",
    )


def night_of(number: int) -> str:
    return str(FIRST + timedelta(days=number))


def record_at(template: RunRecord, number: int, repeat: int, nodes: str, summary: Summary) -> RunRecord:
    spec = template.spec.model_copy(update={"night": night_of(number), "repeat": repeat})
    at = template.harvested_at + timedelta(days=number, minutes=repeat)
    status = JobStatus(job_id=4711, state=JobState.COMPLETED, nodes=nodes)
    job = template.jobs[0].model_copy(update={"status": status})
    return template.model_copy(update={"spec": spec, "summary": summary, "harvested_at": at, "jobs": (job,)})


def run_of(
    template: RunRecord,
    simulated: Simulated,
    worse: Mapping[str, float],
    residual: Array,
    rng: np.random.Generator,
    number: int,
    repeat: int,
) -> RunRecord:
    """One run of a night; `worse`: the factor of what was planted."""
    step, memory, loss = (worse.get(name, 1.0) for name in ("step", "memory", "loss"))
    speed = float(simulated.factors[number, repeat]) * step
    summary = summary_of(rng, residual, speed, memory, loss)
    return record_at(template, number, repeat, simulated.nodes[number], summary)


def run_series(kind: str, change: str, nights: int, noise: Sequence[Array], seed: tuple[int, ...]) -> Tally:
    """One test over so many nights, with a change from night 60 on where one is named."""
    rng = np.random.default_rng(seed)
    residual = noise[int(rng.integers(len(noise)))]
    simulated = simulate(kind, nights, rng)
    what, _, size = change.partition(" +")
    factor = 1 + float(size.rstrip(" %")) / 100 if change else 1.0
    template = record_of(1, 0, Summary())
    rows: list[HistoryRow] = []
    canary: list[HistoryRow] = []
    early = late = 0
    metrics: list[str] = []
    unstable = False
    for number in range(nights):
        worse = {what: factor} if number >= EARLY else {}
        run = partial(run_of, template, simulated, worse, residual, rng, number)
        if simulated.canary is not None:
            value = summary_of(rng, QUIET, float(simulated.canary[number]), 1.0, 1.0)
            canary.append(row_of(record_at(template, number, 0, "node1", value), None))
        record, repeats = run(0), 0
        tonight: list[HistoryRow] = []
        verdict = compare(record, rows, Evidence(canary=canary[-120:]))
        while verdict.reruns > repeats and repeats < RUNS - 1:
            wanted = min(verdict.reruns, RUNS - 1)
            tonight += [row_of(run(each), None) for each in range(repeats + 1, wanted + 1)]
            repeats = wanted
            verdict = compare(record, [*rows, *tonight], Evidence(canary=canary[-120:]))
        rows = [*rows, row_of(record, verdict), *tonight][-300:]
        unstable |= verdict.status is VerdictStatus.UNSTABLE
        if verdict.exit_code and verdict.status is not VerdictStatus.UNSTABLE and verdict.news in ("new", "worse"):
            if change and number >= EARLY:
                return Tally(early, late, tuple(metrics), unstable, number - EARLY + 1)
            metrics += [item.metric for item in verdict.comparisons if item.status == "regressed"] or [verdict.status]
            early, late = (early + 1, late) if number < EARLY else (early, late + 1)
    return Tally(early, late, tuple(metrics), unstable, None)


def rate(count: int, years: float) -> str:
    low, high = poisson_interval(count)
    return f"{count / years:.3f} [{low / years:.3f}-{high / years:.3f}]"


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--noise", type=Path, help="per-step times of real runs, .json.gz")
    parser.add_argument("--series", type=int, default=20, help="series without a change, per kind")
    parser.add_argument("--steps", type=int, default=20, help="series with a planted change, per kind and change")
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS)
    parser.add_argument("--nights", type=int, default=YEAR + EARLY)
    parser.add_argument("--seed", type=int, default=990018)
    parser.add_argument("--processes", type=int, default=2)
    given = parser.parse_args(arguments)
    noise = read_noise(given.noise) if given.noise else synthetic_noise(500, 7)
    print(f"noise of {len(noise)} runs, seed {given.seed}, {given.series} series of {given.nights} nights of each kind")
    with ProcessPoolExecutor(given.processes) as pool:
        for kind in given.kinds:
            seeds = [(given.seed, KINDS.index(kind), 0, each) for each in range(given.series)]
            found = list(pool.map(partial(run_series, kind, "", given.nights, noise), seeds))
            early, late = sum(tally.early for tally in found), sum(tally.late for tally in found)
            years = len(found) * max(given.nights - EARLY, 1) / YEAR
            print(
                f"{kind:14} alarms/year {rate(late, years)}, first {EARLY} nights "
                f"{rate(early, len(found) * EARLY / YEAR)}; unstable {sum(tally.unstable for tally in found)} of "
                f"{len(found)}; by {dict(Counter(name for tally in found for name in tally.metrics).most_common())}",
                flush=True,
            )
            for number, (change, within) in enumerate(CHANGES.items(), start=1):
                if not given.steps:
                    break
                seeds = [(given.seed, KINDS.index(kind), number, each) for each in range(given.steps)]
                planted = partial(run_series, kind, change, EARLY + FOUND_WITHIN, noise)
                nights = sorted(tally.found or math.inf for tally in pool.map(planted, seeds))
                soon = sum(night <= within for night in nights)
                print(
                    f"{'':14} {change}: {soon / len(nights):.1%} within {within} nights, "
                    f"{sum(map(math.isfinite, nights)) / len(nights):.1%} within {FOUND_WITHIN}, "
                    f"median night {nights[len(nights) // 2]}",
                    flush=True,
                )


if __name__ == "__main__":
    main(sys.argv[1:])
