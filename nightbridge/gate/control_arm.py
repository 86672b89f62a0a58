"""The control arm: the last good point beside tonight's, on the same nodes in the same hour.

A re-run repeats only the new code, so that a driver that changed at noon or a slow switch confirms any commit. A *pair*
runs both points, one job each, one after the other on one list of nodes: what the cluster does moves both arms, and
their difference is the code's. Pairs alternate which arm comes first (ABBA), so that a drift within the hour cancels.

The differences of the last nights are weighed by a sequential test (Page's CUSUM of the log-likelihood ratio, Page
1954): how much likelier they are if the new point is worse by the smallest change that counts than if it is as good.
Three ends: at `PROOF` the regression is proven; where tonight's pairs are `CLEAR`, what was seen is the cluster's;
otherwise another pair is wanted, up to `MAX_TIMES` as many as the test's policy begins with, `LONGER` times that where
they speak for a regression, and the next night continues where this one ended. Of a metric that is no average, such as
the 95th percentile, the likelihood is that of being out of the band at all: a share of all runs is, whatever the code,
and a regression is in nearly all of them.

The point that is run is not last night's: a small change needs some nights to be seen, and until then those nights
pass. It is as many good nights old as evidence may take to build up, if it was as good then as the best since.
"""

import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

from nightbridge.gate.decisions import Decision, is_good_by_decision, is_left_out, passed_by_ended
from nightbridge.gate.trend import CERTAINLY_BACK
from nightbridge.history.nightly_values import NightRuns, run_value, times_worse, values_of
from nightbridge.history.reading import is_good
from nightbridge.history.rows import HistoryRow
from nightbridge.models import Arm, GatePolicy, GitRepo, HarvestPolicy, PinnedRepository, RunRecord, RunSpec
from nightbridge.models.metrics import METRIC_BY_NAME, METRICS, Metric
from nightbridge.numbers import format_change, format_count, format_percent, format_value

PROOF = 10.0
"""Least log-likelihood ratio that proves a regression: chance reaches it once in 22,000 pairs at most (Lorden 1971)."""

NIGHTS_OF_A_MONTH = 30

CLEAR = 1.5
"""Log-likelihood ratio of tonight's pairs at which the new point is as good as the last good one."""

OPEN = 2.0
"""What earlier nights left that is above this is gone on with, whatever tonight's run says."""

MAX_TIMES = 8
"""Pairs of a night at most, as a multiple of those that it begins with."""

LONGER = 3
"""How many times as many where their score is above `OPEN`: a test that scatters much takes them."""

WINDOW = 14
"""Nights whose pairs are weighed together, and how many good nights old the control point is, where it can be."""

FINE_CHANGE = 0.01
"""The smallest change that nightly pairs look for; relative."""

SIZES = {1: 0.8, 2: 0.1, 4: 0.1}
"""How likely a regression is by so many times the smallest change that counts: a large one takes fewer pairs."""

MIN_SPREAD = 0.2
"""Least noise of a run that is assumed, as a share of the change looked for: a quiet history proves little."""

MAX_SIGMAS = 5.0
"""A difference that is farther out counts as this many of its standard deviations: one accident is no proof."""

SHOWN = 0.95
"""Share of its runs in which a regression of a metric that is no average shows."""

UNKNOWN_SIGMAS = 3.3
"""A test without much history is taken to be quiet enough for its widest band to be so many standard deviations."""

NOISE_NIGHTS = 90
"""Nights before these whose pairs tell how far pairs are apart."""

NOISE_WEIGHT = 8
"""What the noise of the nights counts beside the pairs' own, in pairs."""

MIN_PAIRS = 16
"""Pairs from which on their own spread is known better than the noise between nights says."""

ACCIDENT_SIGMAS = 3.0
"""What is farther out says little of how far pairs usually are apart."""

ASKS_FOR_PAIRS = "step_time"
"""The metric whose nights are worth pairs by themselves: of all others pairs only confirm what was seen without."""

TRIED_NIGHTS = 3
"""Nights in which what is worse is given pairs, where none of them had both of its arms."""

SUSPECT_SIGMAS = 1.0
"""From here on a night's step time is worth a pair; most such nights are chance, and the pair says so."""


def proof_needed(runs: int, false_alarms: float) -> float:
    """The log-likelihood ratio that proves a regression, so that a whole night keeps its budget of false alarms.

    A ratio of e^h is reached by chance once in e^h tries at most (Wald 1945), and there is one for each metric of each
    run in each night.

    Args:
        runs: How many runs a night has.
        false_alarms: How many of them all may be false in a month.
    """
    tries = max(runs, 1) * len(METRICS) * NIGHTS_OF_A_MONTH
    return max(PROOF, math.log(tries / false_alarms))


class SequentialTest(NamedTuple):
    """What pairs say of a metric. Differences are relative, positive for worse.

    `needed`: the `score` that proves a regression. `pairs`: tonight's. `score`: the log-likelihood ratio for a
    regression, over the nights since it was last zero. `clear`: the same for none, of tonight's pairs alone.
    `difference`: mean since then, or of tonight. `weighed`: pairs that this is the mean of.
    """

    pairs: int
    score: float
    clear: float
    difference: float
    weighed: int
    needed: float = PROOF

    @property
    def is_worse(self) -> bool:
        """Whether the new point is proven to be worse, and by tonight's pairs."""
        return self.clear < 0 and self.score >= self.needed

    def __str__(self) -> str:
        return format_count(self.weighed, "pair")


def weigh(
    nights: Sequence[Sequence[float]], noise: float, change: float, earlier: Sequence[float] = ()
) -> SequentialTest:
    """Weigh the pairs of the last nights.

    Args:
        nights: Of each night the differences of its pairs, relative, positive for worse; tonight last.
        noise: Relative standard deviation of single runs.
        change: The smallest relative change that counts.
        earlier: Differences of pairs of the good nights before those: how far pairs are apart by chance.
    """
    least = math.sqrt(2) * MIN_SPREAD * change
    spread = max(math.sqrt(2) * noise, least)
    known = [difference for night in nights for difference in night]
    if len(known) > 2:
        # Nights may have been quieter than they usually are: the pairs' own spread weighs against that.
        pooled = NOISE_WEIGHT * spread**2 + statistics.variance(known) * (len(known) - 1)
        spread = max(spread, math.sqrt(pooled / (NOISE_WEIGHT + len(known) - 1)))
    middle = statistics.median(known) if known else 0.0
    if len(apart := [*earlier, *(difference - middle for difference in known)]) >= MIN_PAIRS:
        spread = max(_scatter(apart), least)
    most = _gain(math.inf, spread, change)

    def gain_by(size: float) -> Callable[[float], float]:
        # Of one pair a large change would prove itself: whatever is looked for, it says as much as of the smallest.
        return lambda difference: min(_gain(difference, spread, size), most)

    proofs = {times: _proof(nights, gain_by(times * change)) for times in SIZES}
    scores = {times: proofs[times].score + math.log(share) for times, share in SIZES.items()}
    likeliest = max(scores, key=scores.__getitem__)
    return proofs[likeliest]._replace(score=max(scores[likeliest], 0.0), clear=proofs[1].clear)


def _scatter(apart: Sequence[float]) -> float:
    """Standard deviation of differences around zero, accidents cut off; by its own standard error too large."""
    usual = 1.4826 * statistics.median(map(abs, apart))
    squares = [min(abs(difference), ACCIDENT_SIGMAS * usual) ** 2 for difference in apart]
    return math.sqrt(statistics.fmean(squares)) * (1 + 1 / math.sqrt(2 * len(apart)))


def weigh_strays(nights: Sequence[Sequence[float]], strays: float, width: float) -> SequentialTest:
    """Weigh the pairs of a metric that is no average.

    Args:
        nights: As of `weigh`.
        strays: Share of the runs that are out of the band, whatever the code.
        width: Of the band, relative: a difference beyond it is a run out of the band beside one that is not.
    """
    shown, hidden = math.log(SHOWN / strays), math.log((1 - SHOWN) / (1 - strays))
    return _proof(nights, lambda difference: shown if difference > width else hidden)


def _proof(nights: Sequence[Sequence[float]], gain: Callable[[float], float]) -> SequentialTest:
    """Sum up what each pair adds to the log-likelihood ratio."""
    known = [difference for night in nights for difference in night]
    score, since = 0.0, 0
    for place, difference in enumerate(known):
        score += gain(difference)
        if score <= 0:
            score, since = 0.0, place + 1
    tonight = list(nights[-1]) if nights else []
    weighed = known[since:] or tonight
    return SequentialTest(
        pairs=len(tonight),
        score=score,
        clear=-sum(map(gain, tonight)),
        difference=statistics.fmean(weighed) if weighed else 0.0,
        weighed=len(weighed),
    )


class Seen(NamedTuple):
    """What is known of a metric without its pairs.

    `regressed`: whether band or history call it worse. `excess`: how far tonight is on the worse side of its reference,
    relative. `stood`: by how much last night was worse, and was not accepted; 0 where it was not. `noise`: relative
    standard deviation of single runs, of `field` of the summary. `change`: the smallest relative change that is looked
    for. `explained`: what takes the known moves of the cluster out of a value of tonight. `reference`: what is compared
    with, without these. `width`: of the band, relative. `strays`: of a metric that is no average, the share of good
    runs that were out of it; 0 of an average. `needed`: the score that proves a regression. `as_step_time`: whether
    tonight's pairs say of it what they prove of the step time.
    """

    regressed: bool
    excess: float
    stood: float
    noise: float
    change: float
    field: str
    explained: float
    reference: float
    width: float
    strays: float
    needed: float
    as_step_time: bool = False

    def proof(self, nights: Sequence[Sequence[float]], earlier: Sequence[float] = ()) -> SequentialTest:
        """What the pairs of the last nights say, and how far those of `earlier` good nights were apart."""
        if self.strays:
            return weigh_strays(nights, self.strays, self.width)._replace(needed=self.needed)
        return weigh(nights, self.noise, self.change, earlier)._replace(needed=self.needed)


class Ruling(NamedTuple):
    """What the pairs say of a metric.

    `kind`: quiet, nothing to be proven. ask, so many `pairs` are wanted. alone, no pair has both of its arms. stands,
    it is as bad as last night. unpaired, no pair says that it is over. worse, it is the code. clear, it is not. open,
    it may be. `moved`: how many times the good level the cluster has it. `new`, `control`: medians of tonight's arms.
    """

    kind: Literal["quiet", "ask", "alone", "stands", "unpaired", "worse", "clear", "open"]
    proof: SequentialTest
    pairs: int = 0
    moved: float | None = None
    new: float = math.nan
    control: float = math.nan


def ruling_of(metric: Metric, gate: GatePolicy, nights: Sequence[NightRuns], seen: Seen) -> Ruling:
    """What tonight's pairs, and those of the nights before, say of a metric. `nights`: oldest first, tonight last."""
    # A regression that was reported is over or stands: its own pairs say nothing of a further one.
    reported = max((at for at, night in enumerate(nights[:-1]) if metric.name in night.own.worse), default=-1)
    since = max(reported + 1, len(nights) - WINDOW)
    earlier = [
        difference
        for night in nights[max(0, since - NOISE_NIGHTS) : since]
        if metric.name not in night.own.worse
        for difference in pair_differences(night, metric, seen.field)
    ]
    proof = seen.proof([pair_differences(night, metric, seen.field) for night in nights[since:]], earlier)
    is_as_bad = seen.regressed or (seen.excess >= seen.stood / 2 and proof.clear < CLEAR)
    # What is worse than last night by more than a band is another change, of the code or of the cluster.
    if seen.stood and is_as_bad and seen.excess <= seen.stood + seen.width and _had_its_pairs(metric, nights[:-1]):
        return Ruling("stands", proof)
    is_back = not seen.regressed and seen.excess < seen.stood / 2 - CERTAINLY_BACK * seen.noise
    # Where the cluster had moved, its recovery looks like the code's: of 6 and 4 % together 6 is as near to 4 as to 10.
    is_doubtful = is_back and seen.stood > 0 and nights[-1].own.moved.get(metric.name, 1.0) != 1.0
    asks = metric.name == ASKS_FOR_PAIRS
    # The more runs tonight's point has, the pairs' new arms included, the less of their median is chance.
    least = max(SUSPECT_SIGMAS * seen.noise, FINE_CHANGE) / math.sqrt(len(nights[-1].runs))
    far = asks and seen.excess >= least
    # Of a metric that is no average, or that no cluster moves, pairs only confirm what the band says.
    every_night = asks and gate.control == "every_night"
    is_open = proof.score > (OPEN / 2 if every_night else OPEN)
    goes_on = metric.follows_cluster and not metric.least_change and is_open
    suspicious = seen.regressed or far or goes_on or is_doubtful or (seen.stood > 0 and not is_back)
    started = max((row.arm.pair for row in nights[-1].arms if row.arm and not row.arm.on_suspects), default=0)
    most = most_pairs(gate, proof.score > OPEN)
    if (suspicious or every_night) and started < (first := min(gate.pairs, most)):
        return Ruling("ask", proof, first)
    if not suspicious:
        return Ruling("quiet", proof)
    if not proof.pairs:
        # Another pair would hardly be better: what tonight's own runs say counts.
        if is_doubtful:
            return Ruling("unpaired" if started and not _tried_in_vain(nights) else "alone", proof)
        return Ruling("stands" if seen.stood else "alone", proof)
    is_worse = proof.is_worse or seen.as_step_time
    kind: Literal["worse", "clear", "open"] = "worse" if is_worse else "clear" if proof.clear >= CLEAR else "open"
    if kind == "open" and started < most:
        return Ruling("ask", proof, started + 1)
    if kind == "open" and seen.stood and not is_doubtful:
        return Ruling("stands", proof)
    return _with_levels(Ruling(kind, proof), metric, nights[-1], seen)


def _had_its_pairs(metric: Metric, past: Sequence[NightRuns]) -> bool:
    """Whether what stands was seen beside the last good point; where an arm died, it is tried again for some nights."""
    stood = [*itertools.takewhile(lambda night: metric.name in night.own.worse, reversed(past))]
    return len(stood) >= TRIED_NIGHTS or any(pair_differences(night, METRIC_BY_NAME[ASKS_FOR_PAIRS]) for night in stood)


def _tried_in_vain(nights: Sequence[NightRuns]) -> bool:
    """Whether there were arms in the last nights, and never both of a pair."""
    step_time = METRIC_BY_NAME[ASKS_FOR_PAIRS]
    return all(night.arms and not pair_differences(night, step_time) for night in nights[-TRIED_NIGHTS:])


def most_pairs(gate: GatePolicy, longer: bool = True) -> int:
    """How many pairs of the two points a night has at most. `longer`: where they speak for a regression."""
    times = MAX_TIMES * LONGER if longer else MAX_TIMES
    return times * gate.pairs if gate.max_runs is None else gate.max_runs // 2


def _with_levels(ruling: Ruling, metric: Metric, night: NightRuns, seen: Seen) -> Ruling:
    """The same with what tonight's arms measured, and with where the cluster has the good level now."""
    arms = zip(*pairs_of(night), strict=True)
    news, controls = (values_of(runs, metric) for runs in arms)
    if not news or not controls or not seen.reference:
        return ruling
    own = values_of(night.runs, metric)
    # Where the code is as good as before, every run of the night shows the level; else only the control's.
    shown = {"clear": [*own, *controls], "worse": controls}.get(ruling.kind, [])
    moved = None
    if shown:
        level = statistics.median(shown) * seen.explained / seen.reference
        if abs(level - 1) >= max(FINE_CHANGE, 2 * seen.noise / math.sqrt(len(shown))):
            moved = night.own.moved.get(metric.name, 1.0) * level
    return ruling._replace(moved=moved, new=statistics.median(news), control=statistics.median(controls))


def rerun_reason(metric: Metric, ruling: Ruling, seen: Seen) -> str:
    """Why further pairs are wanted, in words."""
    away, stood = (format_change(metric.sign * change) for change in (seen.excess, seen.stood))
    over = f" after {stood} last night: whether that is over" if seen.stood and not seen.regressed else ""
    left = f", left open by {format_count(ruling.proof.pairs, 'pair')}" if ruling.proof.pairs else ""
    noise, change = (format_percent(round(value, 3)) for value in (seen.noise, seen.change))
    why = f"single runs of this test are taken to scatter by {noise}, changes of {change} are looked for"
    if seen.strays:  # neither weighs in its proof
        why = f"of its good runs {format_percent(round(seen.strays, 3))} are taken to be out of its band"
    return f"{metric.label} {away} from its reference{over}{left}; {why}"


def moved_back(metric: Metric, nights: Sequence[NightRuns], change: float) -> float | None:
    """An earlier place of the good level, where the cluster has gone back to it; None where it has not.

    `nights` are oldest first, tonight last; `change` is how far tonight is from the good level where that is held to be
    now, relative, signed.
    """
    held = nights[-1].own.moved.get(metric.name, 1.0)
    earlier = {1.0, *(night.own.moved.get(metric.name, 1.0) for night in nights[:-1])}
    places = [held, *(place for place in earlier if metric.worse(held - place))]
    if change <= -1:
        return None
    nearest = min(places, key=lambda place: abs(math.log((1 + change) * held / place)))
    return None if nearest == held else nearest


def said(metric: Metric, control: str, ruling: Ruling, seen: Seen) -> str:
    """What the pairs say, in words; empty where they clear what was not reported. `control`: the good night."""
    change, pairs = format_change(metric.sign * ruling.proof.difference), ruling.proof
    beside = f"beside the last good point, {control}, on the same nodes"
    if ruling.kind == "worse":
        new, old = (format_value(value, metric.unit) for value in (ruling.new, ruling.control))
        same = "" if pairs.is_worse else ", as much as step time"
        return f"{metric.label} regressed by {change} {beside}: {new} against {old}, {pairs}{same}"
    if ruling.kind == "open":
        return f"{metric.label} may be worse, {change} {beside}: left open by {pairs}, the next night continues"
    if ruling.moved is not None:
        level = format_change(ruling.control * seen.explained / seen.reference - 1)
        return f"{metric.label} moved by {level} with the code of {control} too: the cluster, no regression ({pairs})"
    return f"{metric.label} was out of its band, and is as good {beside} ({pairs}): no regression" * seen.regressed


def _gain(difference: float, spread: float, change: float) -> float:
    """Log-likelihood ratio of one pair: of a regression by `change` against none, Gaussian."""
    believed = min(max(difference, -MAX_SIGMAS * spread), MAX_SIGMAS * spread)
    return change * (believed - change / 2) / spread**2


def pair_differences(night: NightRuns, metric: Metric, field: str = "") -> list[float]:
    """Of each pair of a night that measured a metric in both arms, the relative difference, positive for worse."""
    pairs = ([run_value(run, metric, field) for run in pair] for pair in pairs_of(night))
    return [metric.sign * (new - old) / abs(old) for new, old in pairs if new is not None and old]


def pairs_of(night: NightRuns) -> list[tuple[HistoryRow, HistoryRow]]:
    """The pairs of a night that have both arms in the history, the new point's and the control's, in their order.

    Without the pair on suspect nodes: it is about those, and comes when everything else is decided.
    """
    by_pair: dict[int, dict[str, HistoryRow]] = {}
    for row in night.arms:
        if row.arm and not row.arm.on_suspects:
            by_pair.setdefault(row.arm.pair, {})[row.arm.role] = row
    return [(arms["new"], arms["control"]) for _pair, arms in sorted(by_pair.items()) if len(arms) == 2]


def change_looked_for(metric: Metric, gate: GatePolicy) -> float:
    """The smallest relative change of a metric that pairs look for."""
    least = metric.least(gate.minimum_change)
    return min(least, FINE_CHANGE) if gate.control == "every_night" and metric.follows_cluster else least


def control_point(past: Sequence[NightRuns], decisions: Sequence[Decision]) -> HistoryRow | None:
    """The stored run that a control arm repeats; None where no good night is stored.

    A run from before an improvement is none: it would be as bad beside one that fell back, whatever the cluster does.

    Args:
        past: The nights before, oldest first.
        decisions: Users': what was before an accepted level, repaired, or let pass for a while, is no such run; the
            nights that were accepted are.
    """
    held_to = [metric.name for metric in METRICS] if decisions else []
    good = (
        own
        for own in (night.own for night in reversed(past))
        if (is_good(own) or is_good_by_decision(decisions, own))
        and (own.prefix and not own.resumed)
        and not any(is_left_out(decisions, name, own.order) for name in held_to)
        and not any(passed_by_ended(decisions, name, own.order) for name in held_to)
    )
    points = [*itertools.islice(good, WINDOW)][::-1]
    if not points:
        return None
    times = (times_worse(metric, points, metric.least(FINE_CHANGE)) for metric in METRICS)
    worst = [max(each) for each in zip(*times, strict=True)]
    return points[worst.index(min(worst))]


def arm_of(number: int, reference: str, on_suspects: bool = False) -> Arm:
    """The arm that a night's further run of a number (from 1) is: A B, then B A, and so on."""
    pair, second = (number + 1) // 2, number % 2 == 0
    is_control = second == bool(pair % 2)
    return Arm(role="control" if is_control else "new", pair=pair, reference=reference, on_suspects=on_suspects)


def arm_run(run: RunSpec, base: RunRecord, number: int, on_suspects: bool = False) -> RunSpec:
    """The run of an arm: tonight's, or the last good point as it was, as a run of tonight.

    What no series id has may be another since: where secrets are, and how long a job may take, are tonight's. And it is
    no longer held to golden values or a reference: it passed by them, and their files may have been moved or replaced.
    """
    arm = arm_of(number, base.spec.run_key, on_suspects)
    test = run.test
    if arm.role == "control":
        test, tonights = run_at(base, {}).test, {name: getattr(test, name) for name in _OF_TONIGHT}
        test = test.model_copy(update={**tonights, "gate": test.gate.without_golden()})
    test = test.model_copy(update={"harvest": HarvestPolicy(checkpoint="none")})
    return run.model_copy(update={"repeat": number, "arm": arm, "test": test, "after": ()})


_OF_TONIGHT = ("sbatch_args", "time_limit", "secrets")
"""What a control arm has of tonight's test."""


def run_at(base: RunRecord, commits: Mapping[str, str], repos: Mapping[str, GitRepo] = {}) -> RunSpec:
    """A stored run once more with all of its pins, but those of other commits.

    Args:
        base: The stored run.
        commits: Commits that take the place of its own, by `megatron_bridge`, `nemo_run`, and either's submodules as
            in `megatron_bridge/3rdparty/Megatron-LM`; and an image, by `image`.
        repos: Repositories that take the place of its own, by the same names: of before it moved.
    """
    test, checkout = base.spec.test, base.checkout
    own = repos.get("megatron_bridge", test.megatron_bridge)
    bridge = _at(own, checkout.megatron_bridge, "megatron_bridge", commits)
    changes = {
        "git_repos": tuple(bridge if repo == test.megatron_bridge else repo for repo in test.git_repos),
        "nemo_run_repo": _at(repos.get("nemo_run", test.nemo_run_repo), checkout.nemo_run, "nemo_run", commits),
        "cmd_args": {
            **test.cmd_args,
            **({"container_image": commits["image"]} if "image" in commits else pinned_image(base)),
        },
        "harvest": HarvestPolicy(checkpoint="none"),
        # It is one measurement: whether it has to be repeated is decided by who requested it.
        "gate": test.gate.model_copy(update={"pairs": 0}),
    }
    return base.spec.model_copy(update={"test": test.model_copy(update=changes)})


def _at(repo: GitRepo, pinned: PinnedRepository | None, name: str, commits: Mapping[str, str]) -> GitRepo:
    """A repository, and those of its submodules that are named, at the given commits, else as it was pinned."""
    known = pinned.submodules if pinned else {}
    inner = {path: known.get(path, ref) for path, ref in repo.submodules.items()}
    inner |= {key.removeprefix(f"{name}/"): commit for key, commit in commits.items() if key.startswith(f"{name}/")}
    commit = commits.get(name, pinned.commit if pinned else repo.commit)
    return repo.model_copy(update={"commit": commit, "submodules": inner})


def pinned_image(base: RunRecord) -> dict[str, str]:
    """The image by its digest: a tag may mean another image today. A file is what it is."""
    reference, digest = base.image.reference, base.image.digest
    if base.image.kind == "none" or not reference or not digest or reference.startswith(("/", ".", "~")):
        return {}
    return {"container_image": reference if "@" in reference else f"{reference}@{digest}"}
