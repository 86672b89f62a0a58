"""Charts: text that can be read without colour, gaps that stay gaps."""

import functools
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from xml.etree import ElementTree

import pandas as pd
import pytest

from nightbridge.report.charts import (
    FONT_SIZE,
    HEIGHT,
    LOSS_TAG,
    MAX_NIGHTS,
    STEP_TIME_TAG,
    ChosenPoint,
    NightPoint,
    PointKind,
    choice_chart,
    nights_chart,
    spread_chart,
    step_times,
    steps_chart,
)

SVG = "{http://www.w3.org/2000/svg}"


def texts(drawing: str) -> list[str]:
    return ["".join(element.itertext()).strip() for element in ElementTree.fromstring(drawing).iter(f"{SVG}text")]


def curve(steps: Sequence[int], values: Sequence[float], tag: str = "lm loss") -> pd.DataFrame:
    return pd.DataFrame({"tag": tag, "step": steps, "value": values, "superseded": False})


def loss_chart(metrics: pd.DataFrame, baseline: pd.DataFrame | None = None) -> str:
    return steps_chart(metrics, baseline, LOSS_TAG, "loss")


def step_time_chart(metrics: pd.DataFrame, baseline: pd.DataFrame | None = None) -> str:
    return steps_chart(metrics, baseline, STEP_TIME_TAG, "step time, s", cut=True)


def nights(values: Sequence[float | None], kind: PointKind = "good") -> list[NightPoint]:
    return [NightPoint(f"2026-11-{day:02}", value, None, None, kind) for day, value in enumerate(values, 1)]


def test_nights_are_labelled_and_tonights_value_is_written() -> None:
    drawing = nights_chart(nights([1.0, 1.01, 1.234]), "step time, s", 1.0, 0.05)

    assert {"11-01", "11-02", "11-03", "1.234", "step time, s", "night"} <= set(texts(drawing))


@functools.cache
def drawings_with(value: float) -> list[str]:
    """A drawing of each kind in which this number occurs."""
    losses = curve(range(36), [5.0, -value, 4.0, value] * 9)
    times = losses.assign(tag="iteration-time")
    chosen = [ChosenPoint(0, 1.0, is_best=True), ChosenPoint(1, value, is_best=False)]
    seconds = step_times(times, None, None)
    return [
        nights_chart([*nights([1.0]), NightPoint("n", value, -value, value, "good")], "s", value, 0.05),
        loss_chart(losses, losses),
        step_time_chart(times, times),
        spread_chart(seconds, seconds),
        choice_chart(chosen, ["1", "2"], "tp", "s"),
    ]


@pytest.mark.parametrize("absurd", [1e308, -1e308, 1e100])
def test_a_number_that_no_axis_has_room_for_costs_no_drawing(absurd: float) -> None:
    assert drawings_with(absurd) == drawings_with(math.nan)
    assert all(drawings_with(absurd))


def test_marks_are_one_line_however_many_there_are() -> None:
    """A run that diverged has thousands: with a line for each its chart took seconds."""
    few, many = (loss_chart(curve(range(2 * count), [5.0, math.nan] * count)) for count in (4, 400))

    assert many.count("<use") > few.count("<use") + 390
    assert many.count("<g") < few.count("<g") + 50


@pytest.mark.parametrize("scale", [1e-7, 0.13, 1.0, 123456.0])
@pytest.mark.parametrize("spread", [0.0, 0.001, 0.02, 0.5])
def test_the_names_of_the_axes_are_within_the_drawing_however_long_the_numbers_beside_them_are(
    scale: float, spread: float
) -> None:
    points = [point._replace(high=scale * (1 + spread)) for point in nights([scale, scale * (1 - spread)])]
    root = ElementTree.fromstring(nights_chart(points, "step time, s", scale, 0.05))
    across, upright = (
        next(text for text in root.iter(f"{SVG}text") if text.text == name) for name in ("night", "step time, s")
    )

    assert float(upright.get("x", 0)) > 0.7 * FONT_SIZE  # where the feet of its letters are
    assert float(across.get("y", 0)) < 72 * HEIGHT - 0.2 * FONT_SIZE


@pytest.mark.parametrize("count", [1, 5, 6, 23, MAX_NIGHTS + 40])
def test_however_many_nights_there_are_a_few_are_labelled_and_tonight_is(count: int) -> None:
    points = [NightPoint(f"n{night}", 1.0, 0.9, 1.1, "good") for night in range(count)]

    labels = [text for text in texts(nights_chart(points, "s", 1.0, 0.05)) if text.startswith("n")]

    assert labels.count(f"n{count - 1}") == 1
    assert len(labels) <= 6  # five nights and the axis


def test_nights_without_a_value_are_drawn() -> None:
    with_value = nights_chart(nights([1.0, 1.0]), "s", None, 0.0)
    without = nights_chart(nights([1.0, None]), "s", None, 0.0)
    nothing = nights_chart(nights([None]), "s", None, 0.0)

    assert without.count("<use") > with_value.count("<use") - 1
    assert "11-01" in texts(nothing)


def test_a_regressed_night_has_another_shape_and_not_only_another_colour() -> None:
    good, bad = (nights_chart(nights([1.0], kind), "s", None, 0.0) for kind in ("good", "regressed"))

    def shapes(drawing: str) -> set[str | None]:
        return {path.get("d") for path in ElementTree.fromstring(drawing).iter(f"{SVG}path")}

    assert shapes(good) != shapes(bad)


def test_equal_charts_are_equal_bytes() -> None:
    assert nights_chart(nights([1.0, 1.1]), "s", 1.0, 0.05) == nights_chart(nights([1.0, 1.1]), "s", 1.0, 0.05)


def test_the_page_gives_the_size_and_ids_do_not_repeat_between_charts() -> None:
    one, other = nights_chart(nights([1.0]), "s", 1.0, 0.05), loss_chart(curve([1, 2], [5.0, 4.0]))

    for drawing in (one, other):
        root = ElementTree.fromstring(drawing)
        assert root.get("viewBox")
        assert (root.get("width"), root.get("height")) == (None, None)
        assert not [group for group in root.iter(f"{SVG}g") if group.get("id")]


def test_the_loss_ends_with_its_last_value() -> None:
    drawing = loss_chart(curve([1, 2, 3], [11.9, 9.0, 6.527]))

    assert {"6.527", "step", "loss"} <= set(texts(drawing))


def test_only_the_loss_that_counts_is_drawn() -> None:
    resumed = curve([1, 2, 2], [11.9, 99.0, 6.5])
    resumed["superseded"] = [False, True, False]

    assert loss_chart(pd.concat([resumed, curve([1, 2], [1, 1], "grad-norm")])) == loss_chart(
        curve([1, 2], [11.9, 6.5])
    )


def test_steps_that_are_not_finite_are_marked_and_break_the_line() -> None:
    whole = loss_chart(curve(range(1, 11), [5.0] * 10))
    broken = loss_chart(curve(range(1, 11), [5.0] * 4 + [math.nan] + [5.0] * 5))

    assert broken.count("<use") == whole.count("<use") + 1


def test_missing_steps_are_a_gap() -> None:
    def pieces(drawing: str) -> int:
        paths = ElementTree.fromstring(drawing).iter(f"{SVG}path")
        return max(path.get("d", "").count("M") for path in paths)

    assert pieces(loss_chart(curve(range(1, 21), [5.0] * 20))) == 1
    assert pieces(loss_chart(curve([*range(1, 6), *range(12, 21)], [5.0] * 14))) == 2
    assert pieces(loss_chart(curve(range(10, 210, 10), [5.0] * 20))) == 1


@pytest.mark.parametrize("table", [curve([], []), curve([1], [math.nan]), curve([1], [3.0], "grad-norm")])
def test_without_a_loss_there_is_no_chart(table: pd.DataFrame) -> None:
    table["superseded"] = table["superseded"].astype(bool)

    assert loss_chart(table) == ""


def test_one_step_is_a_point() -> None:
    assert "5" in texts(loss_chart(curve([1], [5.0])))


def dashed(drawing: str) -> int:
    return drawing.count("stroke-dasharray")


def times(values: Sequence[float]) -> pd.DataFrame:
    return curve(range(1, len(values) + 1), values, "iteration-time")


@pytest.mark.parametrize("draw", [loss_chart, step_time_chart])
def test_a_baseline_is_dashed_below_tonights_curve(draw: Callable[..., str]) -> None:
    tag = "lm loss" if draw is loss_chart else "iteration-time"
    tonight, before = curve(range(1, 9), [5.0] * 8, tag), curve(range(1, 9), [4.0] * 8, tag)

    assert dashed(draw(tonight, before)) == dashed(draw(tonight)) + 1
    assert draw(tonight, curve([], [], tag).astype({"superseded": bool})) == draw(tonight)


def test_a_start_up_that_takes_long_does_not_flatten_the_other_steps() -> None:
    drawing = step_time_chart(times([35.0] + [1.0] * 40))

    numbers = [float(text) for text in texts(drawing) if re.fullmatch(r"[\d.]+", text)]
    assert max(number for number in numbers if number != int(number)) < 2
    # The arrow is one marker more than a run without such a step has.
    assert drawing.count("<use") > step_time_chart(times([1.0] * 41)).count("<use")


def test_a_run_without_step_times_has_neither_chart() -> None:
    assert step_time_chart(curve([1], [3.0])) == ""
    assert spread_chart([], [1.0]) == ""
    assert spread_chart([math.nan], [1.0]) == ""


def test_the_distribution_shows_both_runs_and_tonights_is_filled() -> None:
    alone, both = spread_chart([1.0, 1.1, 1.2], []), spread_chart([1.0, 1.1, 1.2], [0.9, 1.0, 1.1])

    assert dashed(both) > dashed(alone)
    assert {"step time, s", "share of steps"} <= set(texts(alone))


def test_equal_step_times_are_one_bar() -> None:
    assert "share of steps" in texts(spread_chart([1.0] * 40, [1.0] * 40))


def test_the_steps_of_the_steady_window_are_chosen() -> None:
    table = pd.concat([times([9.0, 1.0, 2.0, 3.0, 8.0]), curve([2, 3], [5.0, 5.0])])
    table.loc[(table["tag"] == "iteration-time") & (table["step"] == 3), "superseded"] = True

    assert step_times(table, 2, 4) == [1.0, 3.0]
    assert step_times(table, None, None) == [9.0, 1.0, 3.0, 8.0]


def test_what_lists_the_fonts_of_a_new_machine_sees_no_secret(tmp_path: Path) -> None:
    """Matplotlib asks fc-list the first time that it is imported."""
    seen = tmp_path / "environment"
    program = tmp_path / "bin/fc-list"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\nenv > {seen}\n")
    program.chmod(0o755)
    environment = os.environ | {
        "PATH": f"{program.parent}:{os.environ['PATH']}",
        "MPLCONFIGDIR": str(tmp_path / "matplotlib"),
        "HF_TOKEN": "hf_secret",
    }

    code = "from nightbridge.report import charts; charts._new_figure()"
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)

    assert "PATH=" in seen.read_text()
    assert "hf_secret" not in seen.read_text()


def test_the_names_of_the_axes_take_nothing_from_the_drawing_however_long_they_are() -> None:
    chosen = [ChosenPoint(0, 1.0, is_best=False), ChosenPoint(1, 2.0, is_best=True)]

    def marks(across: str, upright: str) -> list[tuple[str | None, str | None]]:
        root = ElementTree.fromstring(choice_chart(chosen, ["1", "2"], across, upright))
        return [(mark.get("x"), mark.get("y")) for mark in root.iter(f"{SVG}use")]

    assert marks("x" * 200, "y") == marks("x", "y" * 200) == marks("x", "y") != []
