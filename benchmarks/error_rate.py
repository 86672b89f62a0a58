"""How often the whole gate raises a false alarm, and how soon it finds what became worse: every metric, every re-run.

    PYTHONPATH=. python benchmarks/error_rate.py [--noise FILE.json.gz] [--series N] [--steps N] [--kinds KIND...]

Each series is one test, night by night through `compare`: its verdict, the pairs with the last good point or the
re-runs that it requests, and the verdict on all of them, as the night's flow does it. The nights are those of
`detection.py` (its four kinds, and its noise), and kinds that are harder:

    bimodal          a fifth of the runs is 3 % slower, whatever the code
    two speeds       a fifth of the runs is 10 % slower
    autocorrelated   nights follow each other (AR(1), 0.7, 1 %), and no canary tells it
    drift alone      as drift, without the canary
    driver steps     every 60 nights or so the cluster has another speed for good, 6 % slower to 4 % faster
    bad nodes alike  in 3 % of the nights all runs are slowed by 5 to 30 %: the scheduler gives them the same bad node

Nodes and cluster are common to the two arms of a pair, which run one after the other on the same nodes; a run's own
noise is not. What a run measures besides its steps is modelled: start-up and checkpoint 12 % log-normal, the time after
the last step 50 % around 90 s, first step and warm-up 5 %, grad norm 5 %, loss 0.1 %, memory 0.05 % from run to run;
reserved memory --reserved, 1 %, and with --layouts that share of the runs has 8 % more of it.

An alarm is a verdict that is not green and is news (`gate.trend`); unstable ones are counted apart. Printed are alarms
for each series and year, after night 60 and before it, which metrics raised them, how many series were ever called
unstable, runs a night, and of planted changes the share found and the night in which half of them were (it begins after
--good nights, and the further runs of the night found are counted), of all tests and of those whose single runs scatter
by less than 2 %. Whether a series has two speeds is told by the density of 20,000 of its runs, which the gate never
sees: real runs whose steps fall into two groups make series that do, in every kind, and noise may hide a slow mode.
With --saves-once the test saves at its end alone, which no arm does, with --busy that share of the saves takes three
times as long, and with --only some metrics are all that is judged. With --others the same nights are judged by one
golden value, Perfherder's rule and Otava as well (`detection.py`), each by the nights' own runs.
"""

import argparse
import math
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from datetime import date, timedelta
from functools import partial
from pathlib import Path
from typing import NamedTuple, get_args

import numpy as np

from benchmarks.detection import (
    SAME_CHANGE,
    Array,
    Method,
    Nights,
    ar1,
    golden,
    otava,
    perfherder,
    poisson_interval,
    read_noise,
    synthetic_noise,
    wilson_interval,
)
from benchmarks.verdict import STEPS, record_of
from nightbridge.gate import run_verdict
from nightbridge.gate.control_arm import arm_of
from nightbridge.gate.run_verdict import compare
from nightbridge.gate.tonight import Evidence
from nightbridge.history.rows import HistoryRow, row_of
from nightbridge.models import (
    Arm,
    ControlMode,
    GatePolicy,
    JobState,
    JobStatus,
    RunRecord,
    Summary,
    Verdict,
    VerdictStatus,
)
from nightbridge.models.metrics import METRIC_BY_NAME

SLOW_MODES = {"bimodal": 1.03, "two speeds": 1.10}
FOUR = ("gaussian", "bad nodes", "node sets", "drift")
KINDS = (*FOUR, *SLOW_MODES, "autocorrelated", "drift alone", "driver steps", "bad nodes alike")
CHANGES = {
    "step +3 %": 4,
    "step +2 %": 7,
    "memory +1 %": 3,
    "loss +1 %": 3,
    "step +1 %": 14,
    "teardown +4000 %": 1,
    "checkpoint +20 %": 14,
    "checkpoint +50 %": 3,
    "checkpoint +100 %": 3,
    "reserved +10 %": 3,
    "reserved +20 %": 3,
    "step +10 %": 1,
    "step +30 %": 1,
}
"""What is planted, and within how many nights it is to be found. Seeds go by the place: new ones come last."""
BY_DEFAULT = [name for name in CHANGES if not name.startswith(("checkpoint", "reserved", "step +1", "step +30 "))]

EARLY, YEAR, FOUND_WITHIN = 60, 365, 14
PLACES = 40
"""Allocations of a night: its own run's, and one for each re-run or pair."""
BUSY_TIMES = 3.0
"""How many times as long a save takes on a busy file system."""
LAYOUT_TIMES = 1.08
"""How many times as much the allocator reserves where its blocks fell another way."""

QUIET = np.exp(0.003 * np.random.default_rng(0).standard_normal(40))
"""The steps of the canary, as steady as people choose one."""

FIRST = date(2025, 1, 1)

QUIET_SCATTER = 0.02
"""Single runs that scatter by more need more of them to show 3 % than a night's most pairs are."""

SLOW_SHARE = 0.2
"""Of the runs of a test with two speeds, those in the slow mode."""

ONE_SPEED, TWO_SPEEDS = 0.1, 0.5
"""A test has one speed where its `valley` is at most the former, two where it is at least the latter."""

MANY_RUNS, BIN, LEAST_SHARE = 20_000, 0.003, 0.05
"""Runs whose density tells the valley, the width of its bins, and the least share of the runs that makes a speed."""

Seed = tuple[int, ...]


class Tally(NamedTuple):
    """What was said of one series: alarms before and after night 60 with their metrics, the night found, its runs.

    `further`: runs besides its own of the night found. `scatter`: relative standard deviation of the step time of
    single runs, on the same nodes in the same hour. `valley`: of those runs, as `valley_of` has it.
    """

    early: int
    late: int
    metrics: tuple[str, ...]
    unstable: bool
    found: int | None
    runs: float = 1.0
    further: int = 0
    scatter: float = math.nan
    valley: float = math.nan


class Simulated(NamedTuple):
    """One test's nights: the factor of the cluster on all step times, that of each allocation's nodes, their names, a
    run's own noise, the factor of the slow mode of a fifth of the runs, and the canary's step time.
    """

    cluster: Array
    places: Array
    nodes: Sequence[str]
    sigma: float
    slow_mode: float
    canary: Array | None

    def speed(self, number: int, place: int, rng: np.random.Generator) -> float:
        """The factor of one run on its step times."""
        mode = self.slow_mode if rng.random() < SLOW_SHARE else 1.0
        own = 1 + self.sigma * float(rng.standard_normal())
        return float(self.cluster[number] * self.places[number, place]) * own * mode


def simulate(kind: str, nights: int, rng: np.random.Generator) -> Simulated:
    shape = (nights, PLACES)
    cluster: Array = np.ones(nights)
    places: Array = np.ones(shape)
    canary: Array | None = None
    sigma = {"autocorrelated": 0.001, "drift": 0.005, "drift alone": 0.005}.get(kind, 0.01)
    nodes = ["node[1-4]"] * nights
    slowed = 1 + rng.uniform(0.05, 0.30, shape)
    if kind == "bad nodes":
        places += (slowed - 1) * (rng.random(shape) < 0.03)
    elif kind == "bad nodes alike":
        places += (slowed[:, :1] - 1) * (rng.random((nights, 1)) < 0.03)
    elif kind == "node sets":
        second = rng.random(nights) < 0.2
        cluster += 0.03 * second
        nodes = ["node[5-8]" if other else "node[1-4]" for other in second]
    elif kind == "driver steps":
        cluster *= np.cumprod(1 + rng.uniform(-0.04, 0.06, nights) * (rng.random(nights) < 1 / 60))
    elif kind in ("drift", "drift alone", "autocorrelated"):
        drift = ar1(rng, nights, 0.7, 0.01)
        cluster = np.exp(drift)
        if kind == "drift":
            canary = np.exp(drift + 0.005 * rng.standard_normal(nights))
    return Simulated(cluster, places, nodes, sigma, SLOW_MODES.get(kind, 1.0), canary)


def resampled(rng: np.random.Generator, residual: Array, runs: int) -> Array:
    """The steps of so many runs, a row each: a real run's residuals in blocks of five."""
    starts = rng.integers(0, residual.size, (runs, 8, 1))
    steps: Array = residual[(starts + np.arange(5)).reshape(runs, -1) % residual.size]
    return steps


def summary_of(
    rng: np.random.Generator, residual: Array, factor: float, memory: float, loss: float, teardown: float = 1.0
) -> Summary:
    """One run: steps resampled from a real run's, and the rest as modelled."""
    steps = resampled(rng, residual, 1)[0] * factor
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
        teardown_time=max(180.0, 90 * (math.exp(0.5 * float(normal[7])) + teardown - 1)),
        checkpoint_time=30 * math.exp(0.12 * float(normal[6])),
        source="tensorboard",
    )


def night_of(number: int) -> str:
    return str(FIRST + timedelta(days=number))


def record_at(
    template: RunRecord, number: int, nodes: str, summary: Summary, arm: Arm | None = None, repeat: int = 0
) -> RunRecord:
    """A run of a night; of a control arm, with the commit of the night of its reference."""
    spec = template.spec.model_copy(update={"night": night_of(number), "repeat": repeat, "arm": arm})
    at = template.harvested_at + timedelta(days=number, minutes=repeat)
    status = JobStatus(job_id=4711, state=JobState.COMPLETED, nodes=nodes)
    job = template.jobs[0].model_copy(update={"status": status})
    fields = {"spec": spec, "summary": summary, "harvested_at": at, "jobs": (job,), "prefix": f"runs/{spec.run_key}"}
    return template.model_copy(update=fields)


class Saving(NamedTuple):
    """Whether a test saves once, at the end, which arms do not, and the share of its saves on a busy file system."""

    once: bool = False
    busy: float = 0.0

    def time(self, arm: Arm | None, seconds: float | None, draw: float) -> float | None:
        """What a run takes for a save that is else so long. `draw`: uniform, from 0 to 1."""
        if seconds is None or (arm and self.once):
            return None
        return seconds * (BUSY_TIMES if draw < self.busy else 1.0)


OFTEN = Saving()
"""As most tests of the benchmark: `save_interval` is written, and arms save as well."""


class Reserving(NamedTuple):
    """How the allocator's reserved memory scatters from run to run, relative, and the share of runs with more of it."""

    scatter: float = 0.01
    layouts: float = 0.0

    def memory(self, rng: np.random.Generator) -> float:
        """Of one run, in GB."""
        other = LAYOUT_TIMES if rng.random() < self.layouts else 1.0
        return 90.0 * other * (1 + self.scatter * float(rng.standard_normal()))


STEADY = Reserving()


class Simulation(NamedTuple):
    """One simulated test: its nights, the noise of its steps, its policy, and what is planted after `good` nights."""

    template: RunRecord
    simulated: Simulated
    residual: Array
    seed: tuple[int, ...]
    what: str
    factor: float
    saving: Saving = OFTEN
    reserving: Reserving = STEADY
    good: int = EARLY

    def run(self, number: int, repeat: int = 0, verdict: Verdict | None = None) -> RunRecord:
        """A run of a night: its own, or the further one of that number that a verdict requests."""
        control = verdict.control if verdict else None
        arm = arm_of(repeat, control.run_key, bool(control.on_nodes)) if control else None
        place = 0 if arm and arm.on_suspects else arm.pair if arm else repeat
        code = number_of(control.night) if control and arm and arm.role == "control" else number
        worse = {self.what: self.factor} if code >= self.good else {}
        rng = np.random.default_rng((*self.seed, number, repeat))
        speed = self.simulated.speed(number, place, rng) * worse.get("step", 1.0)
        others = (worse.get(name, 1.0) for name in ("memory", "loss", "teardown"))
        summary = summary_of(rng, self.residual, speed, *others)
        slow = (summary.checkpoint_time or 0.0) * worse.get("checkpoint", 1.0)
        update = {"checkpoint_time": self.saving.time(arm, slow, float(rng.random()))}
        update["reserved_memory"] = self.reserving.memory(rng) * worse.get("memory", 1.0) * worse.get("reserved", 1.0)
        summary = summary.model_copy(update=update | ({"teardown_time": None} if arm else {}))
        return record_at(self.template, number, self.simulated.nodes[number], summary, arm, repeat)

    @property
    def scatter(self) -> float:
        """Relative standard deviation of the step times of single runs that nothing but chance tells apart."""
        rng = np.random.default_rng((*self.seed, 2))
        quiet = self.simulated._replace(cluster=np.ones(1), places=np.ones((1, 1)), slow_mode=1.0)
        runs = [summary_of(rng, self.residual, quiet.speed(0, 0, rng), 1.0, 1.0).step_time or 0.0 for _ in range(100)]
        return float(np.std(runs) / np.mean(runs))

    @property
    def valley(self) -> float:
        """How much its runs on quiet nodes fall into two speeds."""
        rng = np.random.default_rng((*self.seed, 3))
        medians = np.median(resampled(rng, self.residual, MANY_RUNS), axis=1)
        own = 1 + self.simulated.sigma * rng.standard_normal(MANY_RUNS)
        return valley_of(medians * own * np.where(rng.random(MANY_RUNS) < SLOW_SHARE, self.simulated.slow_mode, 1.0))


def valley_of(values: Array) -> float:
    """How much rarer values are between two speeds than around the rarer of these, as a share; 0 where there is one."""
    low, high = np.quantile(values, [0.001, 0.999])
    counts = np.histogram(values, np.arange(low - 2 * BIN, high + 3 * BIN, BIN))[0].astype(float)
    density = np.convolve(counts, np.array([1, 4, 6, 4, 1]) / 16, "same")
    peaks = np.minimum(np.maximum.accumulate(density), np.maximum.accumulate(density[::-1])[::-1])
    below = np.cumsum(counts) / counts.sum()
    between = (below >= LEAST_SHARE) & (below <= 1 - LEAST_SHARE)
    return float(np.max(1 - density[between] / peaks[between], initial=0.0))


def number_of(night: str) -> int:
    return (date.fromisoformat(night) - FIRST).days


def make_simulation(
    kind: str,
    change: str,
    nights: int,
    noise: Sequence[Array],
    gate: GatePolicy,
    seed: Seed,
    saving: Saving = OFTEN,
    reserving: Reserving = STEADY,
) -> Simulation:
    rng = np.random.default_rng(seed)
    residual = noise[int(rng.integers(len(noise)))]
    simulated = simulate(kind, nights, rng)
    what, _, size = change.partition(" +")
    factor = 1 + float(size.rstrip(" %")) / 100 if change else 1.0
    template = record_of(1, 0, Summary())
    test = template.spec.test.model_copy(update={"gate": gate})
    if saving.once:
        arguments = {name: value for name, value in test.cmd_args.items() if name != "save_interval"}
        test = test.model_copy(update={"cmd_args": arguments})
    template = template.model_copy(update={"spec": template.spec.model_copy(update={"test": test})})
    return Simulation(template, simulated, residual, seed, what, factor, saving, reserving)


def run_series(
    kind: str,
    change: str,
    nights: int,
    noise: Sequence[Array],
    gate: GatePolicy,
    seed: Seed,
    saving: Saving = OFTEN,
    reserving: Reserving = STEADY,
    good: int = EARLY,
) -> Tally:
    """One test over so many nights, with a change after so many good ones where one is named."""
    test = make_simulation(kind, change, nights, noise, gate, seed, saving, reserving)._replace(good=good)
    quiet = np.random.default_rng((*seed, 1))
    rows: list[HistoryRow] = []
    canary: list[HistoryRow] = []
    early = late = further = 0
    metrics: list[str] = []
    unstable = False
    for number in range(nights):
        if test.simulated.canary is not None:
            value = summary_of(quiet, QUIET, float(test.simulated.canary[number]), 1.0, 1.0)
            canary.append(row_of(record_at(test.template, number, "node1", value), None))
        evidence = Evidence(canary=canary[-120:])
        record, repeats = test.run(number), 0
        tonight: list[HistoryRow] = []
        verdict = compare(record, rows, evidence)
        while verdict.reruns > repeats:
            wanted = range(repeats + 1, verdict.reruns + 1)
            tonight += [row_of(test.run(number, each, verdict), None) for each in wanted]
            repeats = verdict.reruns
            verdict = compare(record, [*rows, *tonight], evidence)
        further += repeats
        rows = [*rows, row_of(record, verdict), *tonight][-300:]
        unstable |= verdict.status is VerdictStatus.UNSTABLE
        if verdict.exit_code and verdict.status is not VerdictStatus.UNSTABLE and verdict.news in ("new", "worse"):
            if change and number >= good:
                found, runs = number - good + 1, 1 + further / (number + 1)
                return Tally(early, late, tuple(metrics), unstable, found, runs, repeats, test.scatter)
            metrics += [item.metric for item in verdict.comparisons if item.status == "regressed"] or [verdict.status]
            early, late = (early + 1, late) if number < EARLY else (early, late + 1)
    return Tally(early, late, tuple(metrics), unstable, None, 1 + further / nights, 0, test.scatter, test.valley)


def judge_by(
    method: Method, kind: str, change: str, nights: int, noise: Sequence[Array], gate: GatePolicy, seed: Seed
) -> Tally:
    """The same nights by another method, which sees the step time of each night's own run. Only alarms for the worse
    count, and those of one change once.
    """
    test = make_simulation(kind, change, nights, noise, gate, seed)
    values = np.array([test.run(number).summary.step_time for number in range(nights)])
    known: list[int] = []
    for night, start in method(Nights(values[:, None, None], None, None, 0.0, []), EARLY):
        worse = np.median(values[start : night + 1]) > np.median(values[max(0, start - 14) : max(start, 1)])
        if worse and all(abs(start - other) > SAME_CHANGE for other in known):
            if change and abs(start - EARLY) <= SAME_CHANGE:
                return Tally(0, 0, (), False, night - EARLY + 1)
            known.append(start)
    return Tally(0, len(known), (), False, None)


def rate(count: int, years: float) -> str:
    low, high = poisson_interval(count)
    return f"{count / years:.3f} [{low / years:.3f}-{high / years:.3f}]"


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--noise", type=Path, help="per-step times of real runs, .json.gz")
    parser.add_argument("--series", type=int, default=20, help="series without a change, per kind")
    parser.add_argument("--steps", type=int, default=20, help="series with a planted change, per kind and change")
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS)
    parser.add_argument("--changes", nargs="*", default=BY_DEFAULT)
    parser.add_argument("--nights", type=int, default=YEAR + EARLY)
    parser.add_argument("--control", default="on_suspicion", choices=get_args(ControlMode))
    parser.add_argument("--pairs", type=int, default=1)
    parser.add_argument("--saves-once", action="store_true", help="the test saves at its end, and its arms do not")
    parser.add_argument("--busy", type=float, default=0.0, help="share of saves that take three times as long")
    parser.add_argument("--reserved", type=float, default=0.01, help="relative scatter of the reserved memory")
    parser.add_argument("--layouts", type=float, default=0.0, help="share of runs that reserve 8 %% more memory")
    parser.add_argument("--only", nargs="+", help="these metrics are all that is judged, in a tenth of the time")
    parser.add_argument("--others", action="store_true", help="judge the same nights by other methods as well")
    parser.add_argument("--otava", help="a Python that has apache-otava")
    parser.add_argument("--good", type=int, default=EARLY, help="good nights before what is planted begins")
    parser.add_argument("--seed", type=int, default=990018)
    parser.add_argument("--processes", type=int, default=2)
    given = parser.parse_args(arguments)
    noise = read_noise(given.noise) if given.noise else synthetic_noise(500, 7)
    gate = GatePolicy(control=given.control, pairs=given.pairs)
    print(f"noise of {len(noise)} runs, seed {given.seed}, {given.series} series of {given.nights} nights of each kind")
    if given.only:
        run_verdict.METRICS = tuple(METRIC_BY_NAME[name] for name in given.only)  # type: ignore[attr-defined]
    by_gate = partial(
        run_series,
        saving=Saving(given.saves_once, given.busy),
        reserving=Reserving(given.reserved, given.layouts),
        good=given.good,
    )
    series: dict[str, Callable[..., Tally]] = {f"control {given.control}": by_gate}
    if given.others:
        series |= {"golden, 5 %": partial(judge_by, golden), "Perfherder": partial(judge_by, perfherder)}
    if given.otava:
        series["Otava"] = partial(judge_by, partial(otava, given.otava))
    with ProcessPoolExecutor(given.processes) as pool:
        for kind in given.kinds:
            for name, one in series.items():
                print(f"{kind}, {name}: {alarm_text(pool, partial(one, kind), given, noise, gate)}", flush=True)
                for change in given.changes if given.steps else ():
                    print(
                        f"    {change}: {found_text(pool, partial(one, kind), change, given, noise, gate)}", flush=True
                    )


def alarm_text(
    pool: ProcessPoolExecutor,
    one: Callable[..., Tally],
    given: argparse.Namespace,
    noise: list[Array],
    gate: GatePolicy,
) -> str:
    """The alarms of series without a change."""
    kind = one.args[-1]  # type: ignore[attr-defined]
    seeds = [(given.seed, KINDS.index(kind), 0, each) for each in range(given.series)]
    found = list(pool.map(partial(one, "", given.nights, noise, gate), seeds))
    early, late = sum(tally.early for tally in found), sum(tally.late for tally in found)
    years = len(found) * max(given.nights - EARLY, 1) / YEAR
    metrics = Counter(name for tally in found for name in tally.metrics)
    return (
        f"alarms/year {rate(late, years)} in {years:.1f} years, first {EARLY} nights "
        f"{rate(early, len(found) * EARLY / YEAR)}; {unstable_text(found)}; "
        f"{sum(tally.runs for tally in found) / len(found):.2f} runs a night; by {dict(metrics.most_common())}"
    )


def unstable_text(found: Sequence[Tally]) -> str:
    """How many series were ever called unstable, of those with one speed, with two, and of those in between."""
    one = [tally.unstable for tally in found if tally.valley <= ONE_SPEED]
    two = [tally.unstable for tally in found if tally.valley >= TWO_SPEEDS]
    others = [tally.unstable for tally in found if ONE_SPEED < tally.valley < TWO_SPEEDS]
    return (
        f"unstable {sum(one)} of {len(one)} with one speed, {sum(two)} of {len(two)} with two, "
        f"{sum(others)} of {len(others)} others"
    )


def found_text(
    pool: ProcessPoolExecutor,
    one: Callable[..., Tally],
    change: str,
    given: argparse.Namespace,
    noise: list[Array],
    gate: GatePolicy,
) -> str:
    """When a planted change was found."""
    kind = one.args[-1]  # type: ignore[attr-defined]
    seeds = [(given.seed, KINDS.index(kind), 1 + [*CHANGES].index(change), each) for each in range(given.steps)]
    planted = partial(one, change, given.good + FOUND_WITHIN, noise, gate)
    found = list(pool.map(planted, seeds))
    nights = sorted(tally.found or math.inf for tally in found)
    within = CHANGES[change]
    low, high = wilson_interval(sum(night <= within for night in nights), len(nights))
    further = [tally.further for tally in found if tally.found]
    quiet = [tally.found or math.inf for tally in found if tally.scatter < QUIET_SCATTER]
    return (
        f"{sum(night <= within for night in nights) / len(nights):.1%} [{low:.1%}-{high:.1%}] within {within} nights, "
        f"{sum(map(math.isfinite, nights)) / len(nights):.1%} within {FOUND_WITHIN}, median night "
        f"{nights[len(nights) // 2]}; {sum(tally.runs for tally in found) / len(found):.2f} runs a night until then, "
        f"{sum(further) / max(len(further), 1):.1f} further runs in that night, at most {max(further, default=0)}; "
        f"of those that scatter by less than {QUIET_SCATTER:.0%}, {sum(night <= within for night in quiet)} of "
        f"{len(quiet)} within {within} nights, {sum(map(math.isfinite, quiet))} within {FOUND_WITHIN}"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
