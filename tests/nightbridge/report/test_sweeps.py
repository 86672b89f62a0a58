"""What became of a sweep: the best point, every point, and what was not run, with its reason."""

import io
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console

from nightbridge.config.documents import parse_document
from nightbridge.config.scenarios import scenario_of
from nightbridge.launch.resources import at_point
from nightbridge.models import (
    Comparison,
    ComparisonStatus,
    GitRepo,
    MetricName,
    NightReport,
    RewardKind,
    RunSpec,
    Scenario,
    SweepAxis,
    SweepPolicy,
    SweepResult,
    TestDefinition,
    Verdict,
    VerdictStatus,
)
from nightbridge.report.charts import ChosenPoint, choice_chart
from nightbridge.report.night_report import render_report
from nightbridge.report.sweeps import (
    best_line,
    reward_kind,
    sweep_charts,
    sweep_markdown,
    sweep_results,
    sweep_rows,
    sweep_table,
)
from nightbridge.report.tables import format_point

NIGHT = "2026-11-21"
HOSTILE = "<b>|$x$ [red]"

Values = dict[int, float | None]
Sweep = Callable[..., SweepResult]


def swept(policy: SweepPolicy | None = None, tp: tuple[int, ...] = (1, 2, 3, 4), iterations: int = 1) -> TestDefinition:
    """A sweep over tp on 8 GPUs, of which 3 divides none."""
    return TestDefinition(
        id="llama3-sweep",
        name="llama3-sweep",
        cmd_args={
            "gpu_type": "h100",
            "num_gpus": 8,
            "container_image": "none",
            "model_family_name": "llama",
            "model_recipe_name": "llama3_8b",
        },
        git_repos=(GitRepo(url="https://x/Megatron-Bridge", commit="v0.4.2"),),
        nemo_run_repo=GitRepo(url="https://x/Run"),
        axes=(SweepAxis(field="cmd_args.tp", values=tp),),
        sweep=policy or SweepPolicy(),
        iterations=iterations,
    )


def run_at(test: TestDefinition, tp: int, iteration: int = 1) -> RunSpec:
    point = {"tp": tp}
    return RunSpec(scenario="s", night=NIGHT, test=at_point(test, point), sweep_point=point, iteration=iteration)


def verdict_of(
    run: RunSpec,
    value: float | None,
    metric: MetricName = "step_time",
    status: VerdictStatus = VerdictStatus.PASSED,
    reasons: tuple[str, ...] = (),
) -> Verdict:
    comparison = Comparison(
        metric=metric, unit="", lower_is_better=True, value=value, baseline=None, threshold=0.05, status="passed"
    )
    return Verdict(
        run_key=run.run_key,
        test_id=run.test.id,
        night=NIGHT,
        status=status,
        reasons=reasons,
        comparisons=(comparison,),
    )


@pytest.fixture
def sweep() -> Sweep:
    """The result of a sweep over tp, of which each point has this value."""

    def make(values: Values, policy: SweepPolicy | None = None) -> SweepResult:
        test = swept(policy)
        runs = [run_at(test, tp) for tp in values]
        verdicts = [verdict_of(run, value, test.sweep.metric) for run, value in zip(runs, values.values(), strict=True)]
        (result,) = sweep_results(Scenario(name="s", tests=(test,)), runs, verdicts)
        return result

    return make


# --- the best point --------------------------------------------------------------------------------------------------


def test_the_fastest_point_is_the_best_one_and_stands_first(sweep: Sweep) -> None:
    result = sweep({1: 2.0, 2: 0.5, 4: 1.0})

    assert result.best is not None
    assert result.best.point == {"tp": 2}
    assert [(point.point["tp"], point.value, point.reward) for point in result.points] == [
        (2, 0.5, 2.0),
        (4, 1.0, 1.0),
        (1, 2.0, 0.5),
    ]


@pytest.mark.parametrize(
    ("reward", "best", "rewarded"),
    [("inverse", 2, 2.0), ("negative", 2, -0.5), ("identity", 1, 2.0)],
)
def test_a_reward_that_the_test_asks_for_decides(sweep: Sweep, reward: RewardKind, best: int, rewarded: float) -> None:
    result = sweep({1: 2.0, 2: 0.5}, SweepPolicy(reward=reward))

    assert result.best is not None
    assert (result.best.point["tp"], result.best.reward) == (best, rewarded)


@pytest.mark.parametrize(
    ("metric", "kind"),
    [
        ("step_time", "inverse"),
        ("peak_memory", "inverse"),
        ("tflops_per_gpu", "identity"),
        ("tokens_per_gpu", "identity"),
        ("final_loss", "negative"),
        ("grad_norm", "negative"),
    ],
)
def test_without_a_wish_the_better_value_has_the_larger_reward(metric: MetricName, kind: RewardKind) -> None:
    assert reward_kind(metric, None) == kind


def test_the_metric_that_the_test_names_counts(sweep: Sweep) -> None:
    result = sweep({1: 500.0, 2: 700.0}, SweepPolicy(metric="tflops_per_gpu"))

    assert result.best is not None
    assert (result.best.point["tp"], result.best.value, result.unit) == (2, 700.0, "TFLOP/s/GPU")


def test_of_two_equal_points_the_one_that_was_written_first_is_the_best(sweep: Sweep) -> None:
    best = sweep({4: 1.0, 1: 1.0}).best

    assert best is not None
    assert best.point == {"tp": 4}


def test_the_best_point_is_kept_as_a_file_that_runs_it_alone(sweep: Sweep) -> None:
    result = sweep({1: 2.0, 2: 0.5})

    best = scenario_of(parse_document(result.configuration, Path("best.toml")))
    (test,) = best.tests
    assert (test.id, test.cmd_args["tp"], test.axes, best.invalid) == ("llama3-sweep", 2, (), ())
    assert sweep({1: None}).configuration == ""


def test_a_point_that_ran_several_times_has_the_median_of_its_runs() -> None:
    test = swept(iterations=3)
    runs = [run_at(test, 1, iteration) for iteration in (1, 2, 3)]
    verdicts = [verdict_of(run, value) for run, value in zip(runs, (1.0, 9.0, 2.0), strict=True)]

    (result,) = sweep_results(Scenario(name="s", tests=(test,)), runs, verdicts)

    assert [(point.value, len(point.run_keys)) for point in result.points] == [(2.0, 3)]


# --- points without a reward -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "status", [VerdictStatus.FAILED, VerdictStatus.SHORT, VerdictStatus.CANCELLED, VerdictStatus.INFRASTRUCTURE]
)
def test_a_run_that_did_not_end_well_is_never_the_best_however_fast_it_was(status: VerdictStatus) -> None:
    test = swept()
    runs = [run_at(test, 1), run_at(test, 2)]
    verdicts = [verdict_of(runs[0], 1.0), verdict_of(runs[1], 0.1, status=status, reasons=("node lost",))]

    (result,) = sweep_results(Scenario(name="s", tests=(test,)), runs, verdicts)

    assert result.best is not None
    assert result.best.point == {"tp": 1}
    assert (result.points[-1].reward, result.points[-1].reason) == (None, "node lost")


def compared(metric: MetricName, status: ComparisonStatus) -> Comparison:
    return Comparison(
        metric=metric, unit="", lower_is_better=True, value=1.0, baseline=0.9, threshold=0.05, status=status
    )


@pytest.mark.parametrize(
    ("status", "found", "as_golden"),
    [
        (VerdictStatus.SUSPICIOUS, compared("peak_memory", "suspicious"), True),
        (VerdictStatus.REGRESSED, compared("loss_curve", "regressed"), True),
        (VerdictStatus.REGRESSED, compared("grad_norm", "regressed"), True),
        (VerdictStatus.REGRESSED, compared("peak_memory", "passed"), False),
    ],
)
def test_a_point_that_may_have_done_less_than_it_should_is_never_the_best(
    status: VerdictStatus, found: Comparison, as_golden: bool
) -> None:
    test = swept()
    runs = [run_at(test, 1), run_at(test, 2)]
    fast = verdict_of(runs[1], 0.1, status=status, reasons=("look at it",))
    fast = fast.model_copy(update={"comparisons": (*fast.comparisons, found), "as_golden": as_golden})

    (result,) = sweep_results(Scenario(name="s", tests=(test,)), runs, [verdict_of(runs[0], 1.0), fast])

    assert result.best is not None
    assert result.best.point == {"tp": 1}
    assert (result.points[-1].value, result.points[-1].reward, result.points[-1].reason) == (0.1, None, "look at it")


@pytest.mark.parametrize(
    ("metric", "worse"),
    [
        ("step_time", "step_time"),
        ("step_time", "peak_memory"),
        ("step_time", "startup_time"),
        ("final_loss", "final_loss"),
        ("final_loss", "loss_curve"),
    ],
)
def test_a_point_that_regressed_may_be_the_best_where_its_losses_are_what_they_were_or_are_compared(
    metric: MetricName, worse: MetricName
) -> None:
    test = swept(SweepPolicy(metric=metric))
    runs = [run_at(test, 1), run_at(test, 2)]
    fast = verdict_of(runs[1], 0.1, metric, status=VerdictStatus.REGRESSED, reasons=("regressed by +3 %",))
    fast = fast.model_copy(update={"comparisons": (*fast.comparisons, compared(worse, "regressed"))})

    (result,) = sweep_results(Scenario(name="s", tests=(test,)), runs, [verdict_of(runs[0], 1.0, metric), fast])

    assert result.best is not None
    assert (result.best.point, result.best.status, result.best.reason) == ({"tp": 2}, VerdictStatus.REGRESSED, "")


def test_one_suspicious_run_of_several_takes_the_points_reward() -> None:
    test = swept(iterations=2)
    runs = [run_at(test, 1, 1), run_at(test, 1, 2)]
    verdicts = [
        verdict_of(runs[0], 1.0, status=VerdictStatus.REGRESSED, reasons=("slower",)),
        verdict_of(runs[1], 0.1, status=VerdictStatus.SUSPICIOUS, reasons=("better than can be believed",)),
    ]

    (result,) = sweep_results(Scenario(name="s", tests=(test,)), runs, verdicts)

    assert (result.best, result.points[0].reason) == (None, "better than can be believed")


def test_one_failed_run_of_several_takes_the_points_reward() -> None:
    test = swept(iterations=2)
    runs = [run_at(test, 1, 1), run_at(test, 1, 2)]
    failed = verdict_of(runs[1], 0.1, status=VerdictStatus.FAILED, reasons=("out of memory",))

    (result,) = sweep_results(Scenario(name="s", tests=(test,)), runs, [verdict_of(runs[0], 1.0), failed])

    assert (result.best, result.points[0].status, result.points[0].reason) == (
        None,
        VerdictStatus.FAILED,
        "out of memory",
    )


def test_a_point_that_did_not_measure_the_metric_says_so(sweep: Sweep) -> None:
    assert sweep({1: None}).points[0].reason == "step time was not measured"


def test_zero_has_no_inverse(sweep: Sweep) -> None:
    (point,) = sweep({1: 0.0}, SweepPolicy(metric="final_loss", reward="inverse")).points

    assert (point.value, point.reward, point.reason) == (0.0, None, "final loss of 0 has no inverse reward")


def test_without_any_reward_there_is_no_best_point(sweep: Sweep) -> None:
    result = sweep({1: None, 2: None})

    assert result.best is None
    assert best_line(result) == "no point of the sweep has a step time to compare (2 points run, 1 skipped)"


# --- what was not run ------------------------------------------------------------------------------------------------


def test_an_invalid_point_is_skipped_with_the_rule_and_its_reason(sweep: Sweep) -> None:
    result = sweep({1: 1.0, 2: 2.0, 4: 3.0})

    assert [(part.point, part.rule) for part in result.skipped] == [({"tp": 3}, "gpus-divide")]
    row = sweep_rows(result)[-1]
    assert (row.point, row.verdict) == ("tp = 3", "skipped")
    assert "num_gpus 8 is not a multiple of tp 3" in row.why


def test_a_point_that_the_pinned_code_refuses_is_skipped_too() -> None:
    test = swept(tp=(1, 2))
    runs = [run_at(test, 1), run_at(test, 2)]
    refused = verdict_of(runs[1], None, status=VerdictStatus.INVALID, reasons=("the launcher has no flag -x",))

    (result,) = sweep_results(Scenario(name="s", tests=(test,)), runs, [verdict_of(runs[0], 1.0), refused])

    assert [point.point for point in result.points] == [{"tp": 1}]
    assert [(part.point, part.reason) for part in result.skipped] == [({"tp": 2}, "the launcher has no flag -x")]
    assert result.skipped_points == 1


def test_a_test_that_sweeps_over_nothing_is_no_sweep() -> None:
    plain = swept().model_copy(update={"axes": ()})
    run = RunSpec(scenario="s", night=NIGHT, test=plain)

    assert sweep_results(Scenario(name="s", tests=(plain,)), [run], [verdict_of(run, 1.0)]) == ()


def test_a_sweep_is_the_same_after_json(sweep: Sweep) -> None:
    report = NightReport(scenario="s", night=NIGHT, verdicts=(), sweeps=(sweep({1: 1.0, 2: None}),))

    assert NightReport.model_validate_json(report.model_dump_json()) == report


# --- what people read ------------------------------------------------------------------------------------------------


def hostile(result: SweepResult) -> SweepResult:
    """The same with texts in it that would be markup in a terminal, in Markdown, in HTML and in a formula."""
    return result.model_copy(
        update={
            "points": tuple(
                point.model_copy(update={"point": {"extra_env_vars.X": f"{HOSTILE}{place}"}})
                for place, point in enumerate(result.points)
            )
        }
    )


def test_the_terminal_shows_the_best_point_every_point_and_what_was_skipped(sweep: Sweep) -> None:
    out = io.StringIO()
    Console(file=out, width=100).print(sweep_table(sweep({1: 2.0, 2: 0.5, 4: None})))

    lines = [line.strip() for line in out.getvalue().splitlines() if "tp =" in line]
    assert lines[0].startswith("★ tp = 2")
    assert [line.lstrip("★ ")[:6] for line in lines] == ["tp = 2", "tp = 1", "tp = 4", "tp = 3"]
    assert "0.5000" in lines[0]
    assert "not measured" in lines[2]
    assert "skipped" in lines[3]


def test_markup_in_a_value_stays_what_was_written(sweep: Sweep) -> None:
    result = hostile(sweep({1: 2.0, 2: 0.5}))
    out = io.StringIO()
    Console(file=out, width=200).print(sweep_table(result))

    assert f"X = {HOSTILE}0" in out.getvalue()
    assert "\\<b\\>\\|$x$ \\[red\\]" in sweep_markdown(result)
    assert "<b>" not in render_report(NIGHT, "s", [], sweeps=[result])


def test_markdown_names_the_best_point_and_has_a_line_for_each(sweep: Sweep) -> None:
    text = sweep_markdown(sweep({1: 2.0, 2: 0.5}))

    assert text.startswith("**llama3-sweep**: best point: tp = 2, step time 0.5000 s (2 points run, 1 skipped)")
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert [line.split("|")[2].strip() for line in table[2:]] == ["✓ passed", "✓ passed", "skipped"]


def test_the_page_shows_sentence_plot_and_table(sweep: Sweep) -> None:
    html = render_report(NIGHT, "s", [], sweeps=[sweep({1: 2.0, 2: 0.5})])

    assert "best point: tp = 2, step time 0.5000 s" in html
    assert 'aria-label="step time, s by tp"' in html
    assert "<svg" in html
    assert "num_gpus 8 is not a multiple of tp 3" in html


def test_only_an_axis_with_several_measured_values_is_drawn(sweep: Sweep) -> None:
    assert [axis for axis, _drawing in sweep_charts(sweep({1: 1.0, 2: 2.0}))] == ["tp"]
    assert sweep_charts(sweep({1: 1.0, 2: None})) == []


def test_a_page_without_a_sweep_has_no_section_for_one() -> None:
    assert "sweep-" not in render_report(NIGHT, "s", [])


# --- the plot --------------------------------------------------------------------------------------------------------

SVG = "{http://www.w3.org/2000/svg}"


def texts(drawing: str) -> list[str]:
    return ["".join(element.itertext()).strip() for element in ElementTree.fromstring(drawing).iter(f"{SVG}text")]


def test_the_plot_has_each_choice_in_the_order_of_numbers_and_the_best_value(sweep: Sweep) -> None:
    ((_axis, drawing),) = sweep_charts(sweep({4: 3.25, 1: 2.0, 2: 0.5}))

    labels = texts(drawing)
    assert [label for label in labels if label in ("1", "2", "4")][:3] == ["1", "2", "4"]
    assert {"tp", "step time, s", "0.5"} <= set(labels)


def test_the_best_point_has_another_shape_and_not_only_another_colour() -> None:
    with_best, without = (choice_chart([ChosenPoint(0, 1.0, best)], ["a"], "tp", "s") for best in (True, False))

    def shapes(drawing: str) -> set[str | None]:
        return {path.get("d") for path in ElementTree.fromstring(drawing).iter(f"{SVG}path")}

    assert shapes(with_best) != shapes(without)


@pytest.mark.parametrize("text", ["$x", "a$b$c", "$\\frac{$", "\\$"])
def test_a_choice_with_dollar_signs_is_no_formula(text: str) -> None:
    drawing = choice_chart([ChosenPoint(0, 1.0, True)], [text], text, "s")

    assert any("$" in label for label in texts(drawing))


@pytest.mark.parametrize(
    ("point", "text"),
    [
        ({"tp": 2, "moe_a2a_overlap": True}, "tp = 2, moe_a2a_overlap = true"),
        ({"extra_env_vars.NCCL_ALGO": "Ring"}, "NCCL_ALGO = Ring"),
        ({"cuda_graph_scope": ["moe_router", "moe_preprocess"]}, "cuda_graph_scope = moe_router moe_preprocess"),
        ({}, ""),
    ],
)
def test_a_point_is_written_as_its_file_has_it(point: dict[str, object], text: str) -> None:
    assert format_point(point) == text
