"""Parity: do two runs compute the same numbers, or at least converge alike?

Two curves are aligned by step number, never by position. A step that one of them lacks, or that is not finite, is
reported and never passes: parity must be observed. Three gates:

* *same numerics*: every value is equal to the last bit; for deterministic runs of code that should not change anything.
  What was read from a log, which rounds, never passes: neither beside TensorBoard's nor because two logs agree.
* *same convergence*: an exponential moving average, the mean of the tail, and the largest single step may differ by so
  much and not more. Each sees what the others miss: the average a stretch in the middle, the tail a bias that is
  smaller than the noise, the single step a spike. Correlation, cosine and Kolmogorov-Smirnov are not used: the first
  two do not see a level, the last does not see time.
* *each iteration*: the loss of every single one may differ by so much; for two programs that should compute the same
  in another order, such as one model on two grids and on one.

The default bands pass 97 % of pairs of real runs whose loss differs by less than 2 % at any step, and flag a loss that
is 0.5 % higher in the second half (`benchmarks/parity.py`). They are for losses.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from nightbridge.models import Model, ReferencePolicy
from nightbridge.numbers import format_percent
from nightbridge.outputs.curves import LOG_FILE

if TYPE_CHECKING:
    import pandas as pd

Array = NDArray[np.float64]
Curve = Mapping[int, float]
"""Value by step number."""

ParityGate = Literal["numerics", "convergence", "iterations"]
"""What two runs have to have in common: every bit, the course of the loss, or the loss of every single iteration."""

GATE_WORDS: dict[ParityGate, tuple[str, str]] = {
    "numerics": ("compute the same, bit for bit", "do not compute the same"),
    "convergence": ("converge alike", "do not converge alike"),
    "iterations": ("agree at every iteration", "do not agree at every iteration"),
}
"""How the report words two runs that pass a gate, and two that do not."""

UNKNOWN_WORDS = "may compute the same: it is not known, bit for bit"

LOSS, GRAD_NORM, LEARNING_RATE = "lm loss", "grad-norm", "learning-rate"
TAGS = (LOSS, GRAD_NORM, LEARNING_RATE)

# A few steps are named, the rest counted.
MAX_STEPS_NAMED = 5


class ParityBands(Model):
    """How far two curves may be apart and still converge alike, as relative differences."""

    smoothed: float = Field(0.004, ge=0, description="Of the exponential moving averages, at any step.")
    tail: float = Field(0.0025, ge=0, description="Of the means of the tails.")
    single_step: float = Field(0.10, ge=0, description="Of the values themselves, at any step.")
    smoothing: float = Field(0.1, gt=0, le=1, description="Weight of the newest step in the moving average.")
    tail_share: float = Field(0.25, gt=0, le=1, description="The last part of the steps that makes the tail.")


DEFAULT_BANDS = ParityBands()

LEAST_BANDS = ParityBands(smoothed=0.001, tail=0.0006, single_step=0.005)
"""A few nights that happen to agree prove no smaller ones."""
CALIBRATION = 3.0
"""A band is so many times the largest difference between one good run and the median of the others. Of good runs, 0.3 %
are beyond it with seven runs, before any re-run, and 1.5 % with five."""
MIN_CALIBRATION_RUNS, MAX_CALIBRATION_RUNS = 5, 10
DEFAULT_ITERATIONS = ReferencePolicy()


class StepDifference(Model):
    """One iteration at which two curves were compared."""

    step: int
    reference: float
    value: float
    difference: float = Field(description="(value - reference) / |reference|, signed.")
    limit: float


class Following(Model):
    """A curve laid over its reference, iteration by iteration."""

    steps: tuple[StepDifference, ...] = Field((), description="Every iteration that both have, finite in both.")
    missing: tuple[int, ...] = Field((), description="Iterations that one of them lacks.")
    not_finite: tuple[int, ...] = ()

    @property
    def is_complete(self) -> bool:
        """Whether both have the same iterations, at least one, all of them finite."""
        return bool(self.steps) and not (self.missing or self.not_finite)

    @property
    def beyond(self) -> tuple[StepDifference, ...]:
        """The iterations at which the limit is passed."""
        return tuple(step for step in self.steps if not abs(step.difference) <= step.limit)

    @property
    def faults(self) -> tuple[str, ...]:
        """Why the curve does not follow; empty when it does."""
        faults = [
            f"{LOSS}: {_named(steps)} {what}"
            for what, steps in (("missing in one of the two", self.missing), ("not finite", self.not_finite))
            if steps
        ]
        if not self.steps:
            faults.append(f"{LOSS}: no iteration in common")
        if beyond := self.beyond:
            first, worst = beyond[0], max(beyond, key=lambda step: abs(step.difference))
            text = (
                f"{LOSS}: {first.value:.4g} against {first.reference:.4g} at iteration {first.step},"
                f" {100 * first.difference:+.2f} % (limit {format_percent(first.limit)})"
            )
            if len(beyond) > 1:
                text += f", beyond the limit at {len(beyond)} of {len(self.steps)} iterations"
            if worst is not first:
                text += f", most at {worst.step}: {100 * worst.difference:+.2f} %"
            faults.append(text)
        return tuple(faults)


class CurveParity(Model):
    """Two curves of one quantity, B against A. Differences are relative to A; None where nothing can be compared."""

    tag: str
    steps: int = Field(description="Steps that both curves have and that are finite in both.")
    first_step: int | None = None
    last_step: int | None = None
    only_in_a: tuple[int, ...] = Field((), description="Steps that B lacks.")
    only_in_b: tuple[int, ...] = Field((), description="Steps that A lacks.")
    not_finite: tuple[int, ...] = Field((), description="Steps that are NaN or infinite in A or in B.")
    first_difference: int | None = Field(None, description="First common step whose values are not equal, bit by bit.")
    first_divergence: int | None = Field(None, description="First step at which a band is left.")
    largest: float | None = Field(None, description="Largest relative difference of a single step.")
    largest_at: int | None = None
    smoothed: float | None = Field(None, description="Largest relative difference of the moving averages.")
    smoothed_at: int | None = None
    tail: float | None = Field(None, description="Relative difference of the tails' means, signed.")
    mean: float | None = Field(None, description="Mean relative difference, signed.")
    faults: tuple[str, ...] = Field((), description="Why the two do not converge alike; empty when they do.")
    of_log: Literal["none", "some", "all"] = Field(
        "none", description="How many of the values of both were read from a log, which rounds."
    )

    @property
    def undecided(self) -> tuple[str, ...]:
        """Why nobody knows whether the two are equal to the last bit; empty where the values say it."""
        if self.of_log == "some":
            return (f"{self.tag}: the log's in a part, which rounds, and TensorBoard's in another",)
        if self.of_log == "all" and self.first_difference is None:
            return (f"{self.tag}: the log's in both, which rounds",)
        return ()

    @property
    def gaps(self) -> tuple[str, ...]:
        """What of the curves cannot be compared; empty when both have the same steps, at least one, all finite."""
        missing = (("missing in B", self.only_in_a), ("missing in A", self.only_in_b), ("not finite", self.not_finite))
        gaps = [f"{self.tag}: {_named(steps)} {what}" for what, steps in missing if steps]
        return (*gaps, *([] if self.steps else [f"{self.tag}: no step in common"]))

    @property
    def is_complete(self) -> bool:
        """Whether both have the same steps, at least one, all of them finite."""
        return not self.gaps

    @property
    def facts(self) -> tuple[tuple[str, str], ...]:
        """The comparison for readers: names and values."""
        if not self.steps:
            return (("steps in common", "none"),)
        return (
            ("steps in common", f"{self.steps}, from {self.first_step} to {self.last_step}"),
            ("equal, bit for bit", _until(self.first_difference)),
            ("within the bands", _until(self.first_divergence)),
            ("largest difference of a step", f"{_percent(self.largest)} at step {self.largest_at}"),
            ("of the moving averages", f"{_percent(self.smoothed)} at step {self.smoothed_at}"),
            ("of the tails' means", _percent(self.tail)),
        )

    @property
    def unequal(self) -> tuple[str, ...]:
        """Why the two are not equal to the last bit; empty when they are."""
        if self.undecided or self.first_difference is None:
            return (*self.gaps, *self.undecided)
        return (*self.gaps, f"{self.tag}: first differs at step {self.first_difference}")


class Parity(Model):
    """Two runs, B against A."""

    a: str = Field("", description="What A is called, such as a run key.")
    b: str = ""
    curves: tuple[CurveParity, ...]
    following: Following = Field(Following(), description="The losses, iteration by iteration.")
    own_bands: bool = Field(
        False, description="Whether the loss is held to the bands that good nights of its series keep; else usual ones."
    )
    faults: tuple[str, ...] = Field((), description="What keeps the runs from being compared at all.")

    @property
    def same_numerics(self) -> bool:
        """Whether all curves are equal to the last bit. The loss must be among them."""
        return not self.faults_of("numerics")

    def faults_of(self, gate: ParityGate) -> tuple[str, ...]:
        """Why the runs do not pass a gate, a line each; empty when they do."""
        found: dict[ParityGate, Iterable[str]] = {
            "numerics": (fault for curve in self.curves for fault in curve.unequal),
            "convergence": (
                fault for curve in self.curves for fault in (curve.faults if curve.tag == LOSS else curve.gaps)
            ),
            "iterations": self.following.faults,
        }
        return (*self.faults, *found[gate])

    def words_of(self, gate: ParityGate) -> str:
        """What a gate says of the runs."""
        faults = self.faults_of(gate)
        undecided = {why for curve in self.curves for why in curve.undecided}
        return UNKNOWN_WORDS if faults and undecided.issuperset(faults) else GATE_WORDS[gate][bool(faults)]

    def result_of(self, gate: ParityGate) -> str:
        """The same, or that the runs compute the same, which is more than any gate asks."""
        return GATE_WORDS["numerics"][0] if self.same_numerics else self.words_of(gate)


def compare_curves(a: Curve, b: Curve, tag: str = LOSS, bands: ParityBands = DEFAULT_BANDS) -> CurveParity:
    """Compare two curves step by step; `a` is the reference, `tag` is what the result calls them."""
    not_finite = tuple(
        step
        for step in sorted(a.keys() | b.keys())
        if not (math.isfinite(a.get(step, 0.0)) and math.isfinite(b.get(step, 0.0)))
    )
    steps = sorted((a.keys() & b.keys()).difference(not_finite))
    found = CurveParity(
        tag=tag,
        steps=len(steps),
        only_in_a=tuple(sorted(a.keys() - b.keys())),
        only_in_b=tuple(sorted(b.keys() - a.keys())),
        not_finite=not_finite,
        **(_differences(a, b, steps, bands) if steps else {}),
    )
    return found.model_copy(update={"faults": _faults(found, bands)})


def calibrated(curves: Sequence[Curve]) -> tuple[Curve, ParityBands] | None:
    """The median of some good runs' curves, and the bands that such runs keep; None for too few.

    Only those curves count that have the steps of the last one whose steps enough of them have, and are finite.
    """
    whole = [curve for curve in curves if curve and all(map(math.isfinite, curve.values()))]
    steps_of = [sorted(curve) for curve in whole]
    steps = next((steps for steps in reversed(steps_of) if steps_of.count(steps) >= MIN_CALIBRATION_RUNS), None)
    if steps is None:
        return None
    same = [curve for curve, own in zip(whole, steps_of, strict=True) if own == steps]
    runs = np.array([[curve[step] for step in steps] for curve in same], dtype=np.float64)
    found = [
        compare_curves(_curve(steps, np.median(np.delete(runs, index, axis=0), axis=0)), _curve(steps, run))
        for index, run in enumerate(runs)
    ]
    widest = {
        name: max(getattr(LEAST_BANDS, name), CALIBRATION * max(abs(getattr(one, field) or 0.0) for one in found))
        for name, field in (("smoothed", "smoothed"), ("tail", "tail"), ("single_step", "largest"))
    }
    return _curve(steps, np.median(runs, axis=0)), LEAST_BANDS.model_copy(update=widest)


def _curve(steps: Sequence[int], values: Array) -> Curve:
    return dict(zip(steps, values.tolist(), strict=True))


def follow(reference: Curve, curve: Curve, policy: ReferencePolicy) -> Following:
    """Lay a curve over its reference and measure the relative difference of each iteration.

    The first iteration of the reference has a limit of its own.
    """
    last = policy.steps or max((*reference, *curve), default=0)
    wanted = [step for step in sorted(reference.keys() | curve.keys()) if step <= last]
    common = [step for step in wanted if step in reference and step in curve]
    finite = [step for step in common if math.isfinite(reference[step]) and math.isfinite(curve[step])]
    first = min(reference, default=None)
    differences = relative(np.array([curve[step] for step in finite]), np.array([reference[step] for step in finite]))
    steps = tuple(
        StepDifference(
            step=step,
            reference=reference[step],
            value=curve[step],
            difference=difference,
            limit=policy.first if step == first else policy.later,
        )
        for step, difference in zip(finite, differences.tolist(), strict=True)
    )
    return Following(
        steps=steps,
        missing=tuple(sorted(set(wanted) - set(common))),
        not_finite=tuple(sorted(set(common) - set(finite))),
    )


def run_parity(
    a: "pd.DataFrame",
    b: "pd.DataFrame",
    *,
    names: tuple[str, str] = ("", ""),
    policy: ReferencePolicy = DEFAULT_ITERATIONS,
    bands: ParityBands | None = None,
) -> Parity:
    """Compare the curves of two runs.

    A quantity that neither run has is left out, one that only one of them has is a curve without a common step. The
    loss is always there.

    Args:
        a: The reference's scalars: columns tag, step, value and superseded, as `metrics.parquet` has them, and file,
            without which they are TensorBoard's.
        b: The other run's.
        names: What the two are called.
        policy: How far they may be apart at single iterations.
        bands: How far the losses may be apart and still converge alike; the default ones when None.
    """
    curves = []
    for tag in TAGS:
        left, right = curve_of(a, tag), curve_of(b, tag)
        if left or right or tag == LOSS:
            found = compare_curves(left, right, tag, (tag == LOSS and bands) or DEFAULT_BANDS)
            curves.append(found.model_copy(update={"of_log": _of_log(a, b, tag)}))
    losses = curve_of(a, LOSS), curve_of(b, LOSS)
    faults = tuple(f"{name or 'a run'} has no {LOSS}" for name, loss in zip(names, losses, strict=True) if not loss)
    following, is_own = follow(*losses, policy), bands is not None
    return Parity(a=names[0], b=names[1], curves=tuple(curves), following=following, own_bands=is_own, faults=faults)


def curve_of(metrics: "pd.DataFrame", tag: str) -> dict[int, float]:
    """One quantity of a run, by step; values that a resumed run wrote again are left out."""
    rows = metrics[(metrics["tag"] == tag) & ~metrics["superseded"]]
    return {int(step): float(value) for step, value in zip(rows["step"].tolist(), rows["value"].tolist(), strict=True)}


def _of_log(a: "pd.DataFrame", b: "pd.DataFrame", tag: str) -> Literal["none", "some", "all"]:
    """How many values of a quantity were read from a log."""
    tables = [table[(table["tag"] == tag) & ~table["superseded"]] for table in (a, b)]
    sources = {known for table in tables for known in (table["file"] == LOG_FILE if "file" in table else [False])}
    return "some" if len(sources) > 1 else "all" if True in sources else "none"


def _differences(a: Curve, b: Curve, steps: list[int], bands: ParityBands) -> dict[str, Any]:
    """Statistics of the common steps, as fields of `CurveParity`."""
    left, right = (np.array([curve[step] for step in steps], dtype=np.float64) for curve in (a, b))
    single = relative(right, left)
    smooth_left, smooth_right = _smoothed(left, bands.smoothing), _smoothed(right, bands.smoothing)
    smoothed = relative(smooth_right, smooth_left)
    tail = max(1, math.ceil(bands.tail_share * len(steps)))
    unequal = np.flatnonzero(left.view(np.int64) != right.view(np.int64))
    left_band = np.flatnonzero((np.abs(single) > bands.single_step) | (np.abs(smoothed) > bands.smoothed))
    largest, largest_smoothed = int(np.argmax(np.abs(single))), int(np.argmax(np.abs(smoothed)))
    return {
        "first_step": steps[0],
        "last_step": steps[-1],
        "first_difference": steps[int(unequal[0])] if unequal.size else None,
        "first_divergence": steps[int(left_band[0])] if left_band.size else None,
        "largest": float(abs(single[largest])),
        "largest_at": steps[largest],
        "smoothed": float(abs(smoothed[largest_smoothed])),
        "smoothed_at": steps[largest_smoothed],
        "tail": float(relative(right[-tail:].mean(keepdims=True), left[-tail:].mean(keepdims=True))[0]),
        "mean": float(np.mean(single)),
    }


def relative(value: Array, reference: Array) -> Array:
    """Relative differences; from zero to anything but zero is infinitely far."""
    difference = value - reference
    with np.errstate(divide="ignore", invalid="ignore"):
        found: Array = np.where(difference == 0.0, 0.0, difference / np.abs(reference))
    return found


def _smoothed(values: Array, weight: float) -> Array:
    smooth = values.copy()
    for at in range(1, values.size):
        smooth[at] = weight * values[at] + (1 - weight) * smooth[at - 1]
    return smooth


def _faults(found: CurveParity, bands: ParityBands) -> tuple[str, ...]:
    """Why the two do not converge alike. Every test is for being within: what is not a number is not within."""
    faults = list(found.gaps)
    if not found.steps:
        return tuple(faults)
    limits = (
        ("a single step", found.largest, bands.single_step, "", f" at step {found.largest_at}"),
        ("the moving average", found.smoothed, bands.smoothed, "", f" at step {found.smoothed_at}"),
        ("the mean of the tail", found.tail, bands.tail, "+", ""),  # the others have no sign
    )
    for what, difference, limit, sign, where in limits:
        if difference is None or not abs(difference) <= limit:
            far = "unknown" if difference is None else f"{100 * difference:{sign}.3g} %"
            faults.append(f"{found.tag}: {what} differs by {far}{where} (limit {format_percent(limit)})")
    return tuple(faults)


def _named(steps: Sequence[int]) -> str:
    shown = ", ".join(str(step) for step in steps[:MAX_STEPS_NAMED])
    more = f" and {len(steps) - MAX_STEPS_NAMED} more" if len(steps) > MAX_STEPS_NAMED else ""
    return f"step{'s' * (len(steps) > 1)} {shown}{more}"


def _until(step: int | None) -> str:
    return "at every step" if step is None else f"until step {step}"


def _percent(share: float | None) -> str:
    return "unknown" if share is None else format_percent(share)
