"""Charts as inline SVG: one drawing per question, readable without colour and on a phone.

Text stays text, so that it uses the page's font and can be searched and copied. Matplotlib is imported when
a chart is drawn: it takes a third of a second, which only the report should pay for.
"""

import contextlib
import functools
import io
import itertools
import math
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from nightbridge.errors import PermanentError, TransientError
from nightbridge.processes import run

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette: safe for every kind of colour vision. Shapes repeat what the colours mean.
BLUE, VERMILLION, INK, GREY, FAINT = "#0072b2", "#d55e00", "#1d2733", "#66717d", "#d9dee4"

# Inches at 72 points: about as wide as a phone, so that letters keep their size there.
WIDTH, HEIGHT = 4.7, 2.5
FONT_SIZE = 11.5
USUAL_PLACE = {"left": 0.16, "bottom": 0.2, "right": 0.98, "top": 0.98}
"""Where the axes are in a drawing, as parts of its size, before its labels are measured."""
ROOM = 0.04
"""Inches between the labels and the edge of the drawing."""
SPARKLINE_SIZE = (108, 26)

PAGE_COLOURS = {
    "#d9dee4": "line",
    "#66717d": "soft",
    "#1d2733": "ink",
    "#0072b2": "blue",
    "#d55e00": "orange",
    "#a33f00": "bad",
}
"""The page's names for these: it has others in the dark."""

AS_TEXT = {VERMILLION: "#a33f00"}
"""Colours of marks that are too light for letters on white."""

MAX_NIGHTS = 60
MAX_NIGHT_LABELS = 5
MAX_CHOICE_LABELS, MAX_CHOICE_LETTERS = 8, 12
MAX_FACTOR_LETTERS = 26

LOSS_TAG, STEP_TIME_TAG = "lm loss", "iteration-time"

SPREAD_BINS = 24

LARGEST_DRAWN = 1e100
"""What is larger, as the loss of a run that diverged, is drawn as if it were not finite: it would break the axes."""

PointKind = Literal["good", "regressed", "other"]


class NightPoint(NamedTuple):
    """One night of a metric: median and, where measured, the 5th and 95th percentile of its steady window."""

    night: str
    value: float | None
    low: float | None
    high: float | None
    kind: PointKind


class ChosenPoint(NamedTuple):
    """One point of a sweep on one of its axes: where its choice is drawn, its value, and whether it is the best."""

    position: int
    value: float
    is_best: bool


# Marker, colour and size of a night.
POINTS: dict[PointKind, tuple[str, str, float]] = {
    "good": ("o", BLUE, 30),
    "regressed": ("D", VERMILLION, 36),
    "other": ("X", GREY, 40),
}


def nights_chart(points: Sequence[NightPoint], label: str, baseline: float | None, threshold: float) -> str:
    """Draw a metric over the nights, oldest first, the last one being tonight.

    Args:
        points: The nights; one without a value gets a cross on the axis.
        label: What the values are, with their unit.
        baseline: What tonight is compared with; a line, with a band of `threshold` (relative) around it.
        threshold: Half the width of the band.
    """
    points = [
        point._replace(value=_drawn(point.value), low=_drawn(point.low), high=_drawn(point.high))
        for point in points[-MAX_NIGHTS:]
    ]
    baseline = _drawn(baseline)
    figure, axes = _new_figure()
    if baseline is not None:
        margin = threshold * abs(baseline)
        axes.axhspan(baseline - margin, baseline + margin, color=BLUE, alpha=0.09, linewidth=0)
        axes.axhline(baseline, color=BLUE, linewidth=1, linestyle=(0, (4, 3)))
    for x, point in enumerate(points):
        if point.low is not None and point.high is not None:
            axes.vlines(x, point.low, point.high, color=GREY, linewidth=1.2, alpha=0.6)
    known = [(x, point.value) for x, point in enumerate(points) if point.value is not None]
    axes.plot([x for x, _ in known], [value for _, value in known], color=GREY, linewidth=0.8, alpha=0.7, zorder=2)
    for kind, (marker, colour, size) in POINTS.items():
        chosen = [(x, value) for x, value in known if points[x].kind == kind]
        _scatter(axes, chosen, marker=marker, color=colour, s=size, edgecolor="white")
    _mark(axes, [x for x, point in enumerate(points) if point.value is None], 0.03, "x", GREY)
    if points[-1].value is not None:
        top = max(points[-1].value, points[-1].high or points[-1].value)
        _label(axes, len(points) - 1, top, points[-1].value, POINTS[points[-1].kind][1])
    _label_nights(axes, [point.night for point in points])
    return _labelled(figure, axes, "night", label)


def sparkline(points: Sequence[NightPoint]) -> str:
    """Draw a metric over the nights, oldest first, in the space of a word: line, regressed nights, tonight's point."""
    known = [(x, point.value) for x, point in enumerate(points) if point.value is not None]
    low, high = (edge(value for _x, value in known) for edge in (min, max)) if known else (0.0, 0.0)
    width, height = SPARKLINE_SIZE
    step, scale = (width - 8) / max(len(points) - 1, 1), (height - 8) / ((high - low) or 1.0)
    # Whole tenths: the eye sees no less, and a page has hundreds of these.
    drawn = {x: (round(4 + x * step, 1), round(height - 4 - (value - low) * scale, 1)) for x, value in known}
    line = " ".join(f"{x},{y}" for x, y in drawn.values())
    dots = "".join(
        f'<circle cx="{drawn[x][0]}" cy="{drawn[x][1]}" r="2.5" class="{points[x].kind}"/>'
        for x in drawn
        if points[x].kind == "regressed" or x == len(points) - 1
    )
    return f'<svg viewBox="0 0 {width} {height}"><polyline points="{line}"/>{dots}</svg>'


def exchange_chart(
    factors: Sequence[str], designs: Sequence[Sequence[bool]], parts: Sequence[float | None], shares: Sequence[float]
) -> str:
    """Draw an attribution: a column for each run, with the part of the change that it shows and what was bad in it.

    Args:
        factors: Their names, a line each.
        designs: Of each run, which factors were at their bad level: a filled dot; at their good one: a ring.
        parts: Of each run, what part of the change it shows, 0 to 1: a bar above its column; None for a cross.
        shares: Of each factor the probability that it has a part in the cause: a bar beside its line.
    """
    figure, axes = _new_figure()
    figure.set_size_inches(WIDTH, 0.9 + 0.32 * (len(factors) + 2))
    bars = len(designs) + 0.5
    for x, (design, part) in enumerate(zip(designs, parts, strict=True)):
        for y, bad in enumerate(design):
            _scatter(axes, [(x, y)], s=42, color=VERMILLION if bad else "none", edgecolor=VERMILLION if bad else BLUE)
        if part is None:
            _scatter(axes, [(x, -1.5)], s=36, marker="x", color=GREY)
        else:
            axes.bar(x, -max(part, 0.03), bottom=-1, width=0.6, color=VERMILLION if part > 0.5 else BLUE)
    for y, share in enumerate(shares):
        axes.barh(y, 3 * share, left=bars, height=0.5, color=VERMILLION if share > 0.5 else FAINT)
        axes.annotate(f"{share:.0%}", (bars + 3.2, y), va="center", color=INK, size=FONT_SIZE)
    axes.set_yticks(
        [-1.5, *range(len(factors))], ["measured", *(_plain(name[:MAX_FACTOR_LETTERS]) for name in factors)]
    )
    axes.set_xticks(range(len(designs)), [str(x + 1) for x in range(len(designs))])
    axes.set_xlim(-0.7, bars + 5)
    axes.set_ylim(len(factors) - 0.4, -2.2)
    axes.grid(visible=False)
    return _labelled(figure, axes, "run", "")


def spread_chart(tonight: Sequence[float], baseline: Sequence[float]) -> str:
    """Draw how the step times of a run are distributed, and those of the run that it is compared with.

    Args:
        tonight: Of the steps that its statistics are made of, seconds; nothing is drawn without any.
        baseline: The same of the other run; may be empty.
    """
    shown = [[value for value in values if math.isfinite(value)] for values in (tonight, baseline)]
    if not shown[0]:
        return ""
    ends = _inner_range([*shown[0], *shown[1]])
    bins = [ends[0] + (ends[1] - ends[0]) * edge / SPREAD_BINS for edge in range(SPREAD_BINS + 1)]
    figure, axes = _new_figure()
    for values, colour, style, fills in ((shown[1], GREY, (0, (4, 3)), False), (shown[0], BLUE, "solid", True)):
        if values:
            # What lies beyond the ends is counted in the outermost bins.
            inside = [min(max(value, ends[0]), ends[1]) for value in values]
            shares = [1 / len(values)] * len(values)
            look: dict[str, Any] = {"color": colour, "linestyle": style, "linewidth": 1.4}
            axes.hist(inside, bins=bins, weights=shares, histtype="step", **look)
            if fills:
                axes.hist(inside, bins=bins, weights=shares, color=colour, alpha=0.15)
    axes.locator_params(axis="x", nbins=5)
    return _labelled(figure, axes, "step time, s", "share of steps")


def step_times(metrics: "pd.DataFrame", first: int | None, last: int | None) -> list[float]:
    """The step times of a run, seconds, from one step to another; None for the run's ends."""
    begins, ends = first if first is not None else -math.inf, last if last is not None else math.inf
    return [value for step, value in zip(*_curve(metrics, STEP_TIME_TAG), strict=True) if begins <= step <= ends]


def steps_chart(
    metrics: "pd.DataFrame", baseline: "pd.DataFrame | None", tag: str, label: str, *, cut: bool = False
) -> str:
    """Draw a quantity of each step of one run; empty when the run has none.

    Args:
        metrics: The run's scalar table: columns tag, step, value and superseded.
        baseline: That of another run; dashed, below the first one's.
        tag: The quantity.
        label: What it is called, with its unit.
        cut: End the axis where most values are, and mark the cut with arrows: the first steps take many times as long
            as the others.
    """
    steps, values = _curve(metrics, tag)
    finite = [(step, value) for step, value in zip(steps, values, strict=True) if math.isfinite(value)]
    if not finite:
        return ""
    figure, axes = _new_figure()
    others = _curve(baseline, tag) if baseline is not None else ([], [])
    if others[0]:
        axes.plot(*_with_gaps(*others), color=GREY, linewidth=1.2, linestyle=(0, (4, 3)))
    axes.plot(*_with_gaps(steps, values), color=BLUE, linewidth=1.6)
    if len(finite) == 1:
        axes.plot(*finite[0], marker="o", color=BLUE)
    unknown = [step for step, value in zip(steps, values, strict=True) if not math.isfinite(value)]
    _mark(axes, unknown, 0.03, "x", VERMILLION)
    if cut:
        low, high = _inner_range([value for value in (*values, *others[1]) if math.isfinite(value)])
        axes.set_ylim(low, high)
        _mark(axes, [step for step, value in finite if value > high], 0.97, "^", BLUE, size=5)
    else:
        _label(axes, finite[-1][0], finite[-1][1], finite[-1][1], BLUE)
    return _labelled(figure, axes, "step", label)


def has_gaps(metrics: "pd.DataFrame") -> bool:
    """Whether a step's loss is not finite, or too large to be drawn, so that the chart has a cross there."""
    return not all(map(math.isfinite, _curve(metrics, LOSS_TAG)[1]))


def differences_chart(steps: Sequence[int], differences: Sequence[float], limits: Sequence[float]) -> str:
    """Draw how far two curves are apart at each iteration; empty without any.

    Args:
        steps: The iterations, in order.
        differences: Relative and signed: 0.01 is 1 % above the reference.
        limits: How far they may be apart there, to either side.
    """
    if not steps:
        return ""
    figure, axes = _new_figure()
    bounds = [100 * limit for limit in limits]
    axes.fill_between(steps, [-bound for bound in bounds], bounds, step="mid", color=BLUE, alpha=0.09, linewidth=0)
    axes.axhline(0, color=GREY, linewidth=0.8)
    axes.plot(*_with_gaps(steps, [100 * difference for difference in differences]), color=BLUE, linewidth=1.4)
    beyond = [
        (step, 100 * difference)
        for step, difference, limit in zip(steps, differences, limits, strict=True)
        if not abs(difference) <= limit and math.isfinite(difference)
    ]
    marker, colour, size = POINTS["regressed"]
    _scatter(axes, beyond, marker=marker, color=colour, s=size)
    return _labelled(figure, axes, "step", "difference, %")


def _drawn(value: float | None) -> float | None:
    return value if value is not None and abs(value) < LARGEST_DRAWN else None


def _curve(metrics: "pd.DataFrame", tag: str) -> tuple[list[int], list[float]]:
    """The steps of a curve and their values, NaN for those that cannot be drawn."""
    rows = metrics[(metrics["tag"] == tag) & ~metrics["superseded"]].sort_values("step")
    values = rows["value"].where(rows["value"].abs() < LARGEST_DRAWN)
    return rows["step"].tolist(), values.tolist()


def _inner_range(values: Sequence[float]) -> tuple[float, float]:
    """Where most values are, with room on both sides: start-up and a stray slow step must not flatten all others."""
    import numpy as np

    low, middle, high = (float(value) for value in np.quantile(values, (0.02, 0.5, 0.9)))
    room = max((high - low) / 2, abs(middle) * 0.02)
    return low - room, high + room


def choice_chart(points: Sequence[ChosenPoint], choices: Sequence[str], axis: str, label: str) -> str:
    """Draw a metric over the choices of one axis of a sweep: every point, and the best one with a shape of its own.

    Args:
        points: The points that have a value, at least one.
        choices: What the axis may be, in the order of the drawing.
        axis: The axis' name.
        label: What the values are, with their unit.
    """
    figure, axes = _new_figure()
    points = [point for point in points if _drawn(point.value) is not None]
    others = [(point.position, point.value) for point in points if not point.is_best]
    _scatter(axes, others, marker="o", color=BLUE, s=24, alpha=0.6, edgecolor="white")
    for best in (point for point in points if point.is_best):
        _scatter(axes, [(best.position, best.value)], marker="*", color=VERMILLION, s=110, edgecolor="white", zorder=4)
        _label(axes, best.position, best.value, best.value, VERMILLION)
    shown = range(0, len(choices), math.ceil(len(choices) / MAX_CHOICE_LABELS))
    axes.set_xticks(list(shown), [_plain(choices[index][:MAX_CHOICE_LETTERS]) for index in shown])
    axes.set_xlim(-0.5, len(choices) - 0.5)
    return _labelled(figure, axes, _plain(axis), label)


def _with_gaps(steps: Sequence[int], values: Sequence[float]) -> tuple[list[float], list[float]]:
    """Break the line where steps are missing: a gap that is bridged looks like data."""
    distances = sorted(after - before for before, after in itertools.pairwise(steps))
    usual = distances[len(distances) // 2] if distances else 1
    x: list[float] = []
    y: list[float] = []
    for step, value in zip(steps, values, strict=True):
        if x and step - x[-1] > 1.5 * usual:
            x.append((step + x[-1]) / 2)
            y.append(math.nan)
        x.append(float(step))
        y.append(value if math.isfinite(value) else math.nan)
    return x, y


@functools.cache
def _find_fonts() -> None:
    """Have matplotlib list this machine's fonts, where it has not yet, in a process that has none of our secrets.

    It starts fc-list for that, which would inherit our environment.
    """
    import matplotlib as mpl

    if not any(Path(mpl.get_cachedir()).glob("fontlist-*.json")):
        kept = {name: os.environ[name] for name in ("PATH", "HOME", "LD_LIBRARY_PATH") if name in os.environ}
        environment = {**kept, "MPLCONFIGDIR": mpl.get_cachedir()}
        with contextlib.suppress(PermanentError, TransientError):  # then it does so here
            run([sys.executable, "-I", "-c", "import matplotlib.font_manager"], environment=environment, timeout=60)


def _new_figure() -> "tuple[Figure, Axes]":
    _find_fonts()  # before the import below, which does it too
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, HEIGHT))
    figure.subplots_adjust(**USUAL_PLACE)
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GREY)
    axes.tick_params(colors=GREY, labelsize=FONT_SIZE, length=3)
    axes.xaxis.label.set(color=GREY, size=FONT_SIZE)
    axes.yaxis.label.set(color=GREY, size=FONT_SIZE)
    axes.grid(axis="y", color=FAINT, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.margins(x=0.06, y=0.18)
    axes.ticklabel_format(useOffset=False)
    return figure, axes


def _scatter(axes: "Axes", points: Sequence[tuple[float, float]], zorder: int = 3, **look: Any) -> None:
    axes.scatter([x for x, _ in points], [y for _, y in points], zorder=zorder, **look)


def _mark(axes: "Axes", places: Sequence[float], height: float, marker: str, colour: str, size: int = 6) -> None:
    """Marks at a share of the axes' height, whatever the values are: one line of all, as each line takes time."""
    look: dict[str, Any] = {"marker": marker, "color": colour, "markersize": size, "linestyle": "none"}
    axes.plot(places, [height] * len(places), transform=axes.get_xaxis_transform(), **look)


def _label(axes: "Axes", x: float, y: float, value: float, colour: str) -> None:
    """Write the last value above its point: the number that readers look for first."""
    axes.annotate(
        f"{value:.4g}",
        (x, y),
        xytext=(0, 6),
        textcoords="offset points",
        ha="center",
        color=AS_TEXT.get(colour, colour),
        size=12,
        weight="bold",
    )


def _label_nights(axes: "Axes", nights: Sequence[str]) -> None:
    """Label a few nights, tonight always among them. The year is in the page's title."""
    stride = math.ceil(len(nights) / MAX_NIGHT_LABELS)
    shown = range(len(nights) - 1, -1, -stride)
    axes.set_xticks(list(shown), [re.sub(r"^\d{4}-(\d\d-\d\d)", r"\1", nights[x])[:12] for x in shown])


def _plain(text: str) -> str:
    """A text from outside: matplotlib would typeset text between two dollar signs as a formula."""
    return text.replace("$", r"\$")


def _fit(figure: "Figure", axes: "Axes") -> None:
    """Give the axes all the room that their labels leave, with the ticks that they have in `USUAL_PLACE`.

    Matplotlib's constrained layout measures the labels twice and draws everything once for it, which is a third of a
    drawing's time. The ticks stay, since others would have labels of another width.
    """
    from matplotlib.ticker import FixedLocator

    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(FixedLocator([float(place) for place in axis.get_majorticklocs()]))
    # The axes' names are as long as their drawing is wide where they must be, and get no room at their ends.
    labels, inner = axes.get_tightbbox(for_layout_only=True), axes.get_window_extent()
    width, height = figure.bbox.size
    assert labels is not None  # as it is of axes that nobody sees
    room = ROOM * figure.dpi
    figure.subplots_adjust(
        left=(inner.x0 - labels.x0 + room) / width,
        bottom=(inner.y0 - labels.y0 + room) / height,
        right=1 - (labels.x1 - inner.x1 + room) / width,
        top=1 - (labels.y1 - inner.y1 + room) / height,
    )


def _labelled(figure: "Figure", axes: "Axes", x: str, y: str) -> str:
    """The finished drawing."""
    import matplotlib as mpl

    axes.set_xlabel(x)
    axes.set_ylabel(y)
    _fit(figure, axes)
    buffer = io.StringIO()
    # The salt makes equal drawings equal bytes; "none" keeps text as text.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "nightbridge"}):
        no_metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(buffer, format="svg", transparent=True, metadata=no_metadata)
    drawing = buffer.getvalue()
    drawing = drawing[drawing.index("<svg") :]
    # The page sets the size. Group ids repeat from chart to chart, and nothing refers to them.
    drawing = re.sub(r' (?:width|height)="[^"]*"', "", drawing, count=2)
    drawing = re.sub(r'<g id="[^"]*"', "<g", drawing)
    return re.sub("|".join(PAGE_COLOURS), lambda colour: f"var(--{PAGE_COLOURS[colour[0]]})", drawing)
