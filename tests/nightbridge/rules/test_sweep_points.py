"""Grids: every point is checked as if it stood alone, without visiting it alone."""

import itertools
import tracemalloc
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nightbridge.launch.resources import at_point
from nightbridge.models import ClusterLimits, Compat, SkippedPart, SweepAxis, SweepPolicy, TestDefinition
from nightbridge.rules import check_scenario, check_test, checking, errors_of, grid_of, points_of
from nightbridge.rules.checking import PROFILES
from nightbridge.rules.rule import Rule, RuleContext
from nightbridge.rules.sweep_points import MAX_RUNS, Cut, PointValues, expansion_of, skipped_parts
from tests.builders import make_test
from tests.nightbridge.rules.test_rules import BREAKS


def swept(
    args: dict[str, Any] | None = None, /, *, compat: Any = "none", sweep: Any = None, **axes: Any
) -> TestDefinition:
    return make_test(
        {**dict.fromkeys(axes), **(args or {})},
        compat=compat,
        sweep=sweep or SweepPolicy(),
        axes=tuple(
            SweepAxis(field=field if field == "num_nodes" else f"cmd_args.{field}", values=tuple(values))
            for field, values in axes.items()
        ),
    )


def every_point(test: TestDefinition) -> list[dict[str, Any]]:
    names = [axis.name for axis in test.axes]
    return [dict(zip(names, values, strict=True)) for values in itertools.product(*(axis.values for axis in test.axes))]


def is_valid(test: TestDefinition, point: PointValues, limits: ClusterLimits | None = None) -> bool:
    return not errors_of(check_test(at_point(test, point), limits))


# --- what a rule may read --------------------------------------------------------------------------------------------


class Watched(dict[str, Any]):
    """A table that notes which keys are asked for."""

    def __init__(self, table: dict[str, Any], read: set[str]) -> None:
        super().__init__(table)
        self.read = read

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self.read.add(str(key))
        return super().__contains__(key)


@pytest.mark.parametrize("rule", [rule for rules in PROFILES.values() for rule in rules], ids=lambda rule: rule.id)
def test_a_rule_reads_no_field_that_it_does_not_name(rule: Rule[RuleContext]) -> None:
    if "cmd_args" in rule.fields:
        return  # it names all of them
    limits = ClusterLimits(max_nodes=1, max_time_seconds=60, has_pyxis=False)
    for _, args, fields, _ in BREAKS:
        read: set[str] = set()
        test = make_test(args, **fields)
        watched = test.model_copy(update={"cmd_args": Watched(test.cmd_args, read)})

        list(rule.check(RuleContext(watched, limits)))

        assert {f"cmd_args.{field}" for field in read} <= set(rule.fields), rule.id


# --- a grid against its points one by one ----------------------------------------------------------------------------

AXES = {
    "tp": st.sampled_from([1, 2, 3, 4, 0]),
    "pp": st.sampled_from([1, 2, 4]),
    "ep": st.sampled_from([1, 2, 8, 12]),
    "mb": st.sampled_from([1, 2]),
    "gb": st.sampled_from([7, 8, 16, 32]),
    "gpu_type": st.sampled_from(["h100", "gb200", "h10"]),
    "num_nodes": st.sampled_from([1, 2, 3]),
    "cuda_graph_impl": st.sampled_from(["none", "local", "transformer_engine"]),
    "cuda_graph_scope": st.sampled_from([["attn"], ["moe", "moe_router"], ["full_iteration"], "odd"]),
    "use_megatron_fsdp": st.booleans(),
    "save_dir": st.sampled_from(["/a", "/a b"]),
}
GRIDS = st.lists(st.sampled_from(sorted(AXES)), min_size=1, max_size=4, unique=True).flatmap(
    lambda names: st.fixed_dictionaries({name: st.lists(AXES[name], min_size=1, max_size=3) for name in names})
)


@pytest.mark.thorough
@given(GRIDS, st.sampled_from(["none", "cloudai"]), st.sampled_from([None, ClusterLimits(max_nodes=2, has_pyxis=True)]))
@settings(max_examples=150, deadline=None)
def test_a_grid_holds_exactly_the_points_that_are_valid_one_by_one(
    axes: dict[str, list[Any]], compat: Compat, limits: ClusterLimits | None
) -> None:
    test = swept({"cp": 1}, compat=compat, **axes)

    outcomes = list(grid_of(test, limits).outcomes())

    points = [outcome for outcome in outcomes if not isinstance(outcome, Cut)]
    assert points == [point for point in every_point(test) if is_valid(test, point, limits)]
    assert len(points) + sum(cut.points for cut in outcomes if isinstance(cut, Cut)) == len(every_point(test))


def test_a_cut_names_the_rule_the_values_and_how_much_it_leaves_out() -> None:
    grid = grid_of(swept(tp=[1, 3], gb=[8, 16, 32]))

    (cut,) = [outcome for outcome in grid.outcomes() if isinstance(outcome, Cut)]

    assert (cut.rule.id, cut.axis, cut.values, cut.points) == ("gpus-divide", "tp", (3,), 3)
    assert "num_gpus 16 is not a multiple of tp 3" in grid.messages(cut)[0]


def test_a_fixed_field_that_breaks_a_rule_takes_the_whole_grid() -> None:
    expansion = expansion_of(grid_of(swept({"gpu_type": "h10"}, tp=[1, 2], gb=[8, 16])))

    assert (expansion.valid, expansion.points) == (0, 4)
    assert expansion.skipped["choice"].points == 4


def test_a_huge_grid_is_counted_at_once_and_cut_without_walking_it() -> None:
    test = swept(tp=[3], **{name: range(1, 1001) for name in ("gb", "seq_length", "max_steps", "warmup_iters")})

    grid = grid_of(test)

    assert grid.size == 10**12
    (cut,) = grid.outcomes()
    assert isinstance(cut, Cut)
    assert cut.points == 10**12


@pytest.mark.thorough
def test_a_large_grid_needs_little_memory() -> None:
    grid = grid_of(swept(tp=[1, 2, 4, 8], pp=[1, 2, 4], cp=[1, 2], mb=[1, 2, 4], gb=range(8, 1008, 8)))
    tracemalloc.start()

    counted = sum(1 if not isinstance(outcome, Cut) else outcome.points for outcome in grid.outcomes())

    assert counted == grid.size == 9_000
    assert tracemalloc.get_traced_memory()[1] < 5e6
    tracemalloc.stop()


# --- points drawn at random ------------------------------------------------------------------------------------------


def test_the_same_seed_draws_the_same_valid_points() -> None:
    axes = {"tp": [1, 2, 3, 4, 5], "gb": range(1, 101)}
    draw = {
        seed: list(points_of(swept(sweep=SweepPolicy(method="random", points=9, seed=seed), **axes))) for seed in (1, 2)
    }
    again = list(points_of(swept(sweep=SweepPolicy(method="random", points=9, seed=1), **axes)))

    assert draw[1] == again != draw[2]
    assert len({tuple(point.items()) for point in again}) == 9
    assert all(point["tp"] in (1, 2, 4) for point in again)


def test_no_more_points_are_drawn_than_there_are() -> None:
    drawn = list(points_of(swept(sweep=SweepPolicy(method="random", points=50), tp=[1, 2, 3])))

    assert drawn == [{"tp": 1}, {"tp": 2}]


def test_points_are_drawn_from_a_grid_that_nobody_could_walk() -> None:
    axes = {name: range(1, 1001) for name in ("gb", "seq_length", "max_steps", "warmup_iters")}

    assert len(list(points_of(swept(sweep=SweepPolicy(method="random", points=5), **axes)))) == 5


# --- what a person is expected -------------------------------------------------------------------------------------------


def test_skipped_points_are_warnings_with_an_example_while_others_are_left() -> None:
    (skipped,) = check_test(swept(tp=[1, 2, 3], pp=[1, 2]))

    assert (skipped.rule, skipped.severity) == ("gpus-divide", "warning")
    assert skipped.message.startswith("2 of 6 points of the sweep are skipped, for example: num_gpus 16")


def test_a_sweep_without_a_valid_point_is_invalid() -> None:
    from nightbridge.models import Scenario

    checked = check_scenario(Scenario(name="s", tests=(swept(tp=[3, 5]),)))

    assert checked.tests == ()
    assert "2 of 2 points" in checked.invalid[0].violations[0]


def test_a_sweep_that_no_night_could_run_is_refused() -> None:
    (violation,) = errors_of(check_test(swept(gb=range(1, MAX_RUNS + 2))))

    assert violation.rule == "sweep-size"
    assert f"{MAX_RUNS + 1} of {MAX_RUNS + 1} points" in violation.message


def test_a_sweep_whose_points_are_repeated_too_often_is_refused() -> None:
    test = swept(gb=range(1, 101)).model_copy(update={"iterations": 100})
    drawn = swept(gb=range(1, 101), sweep=SweepPolicy(method="random", points=10))

    assert errors_of(check_test(test)) == ()
    assert errors_of(check_test(drawn.model_copy(update={"iterations": 1_000}))) == ()
    (violation,) = errors_of(check_test(test.model_copy(update={"iterations": 101})))
    assert violation.rule == "sweep-size"
    assert "100 points of the sweep and iterations = 101 are 10,100 runs" in violation.message


def test_a_grid_that_nobody_could_walk_is_refused_in_time_and_drawn_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checking, "MAX_OUTCOMES", 500)
    axes = {"tp": [1, 3], **{name: range(1, 1001) for name in ("gb", "seq_length", "max_steps")}}

    (violation,) = errors_of(check_test(swept(**axes)))
    drawn = check_test(swept(sweep=SweepPolicy(method="random", points=3), **axes))

    assert "499 of the 1000000499 points checked (there are 2000000000) of the sweep are valid" in violation.message
    assert errors_of(drawn) == ()


def test_nodes_that_are_swept_over_say_the_gpus() -> None:
    test = swept({"gpu_type": "gb200"}, num_nodes=[1, 4])

    assert [at_point(test, point).cmd_args["num_gpus"] for point in points_of(test)] == [4, 16]


def test_every_distinct_violation_of_a_sweep_without_a_valid_point_has_its_count() -> None:
    found = check_test(swept({"compute_dtype": "banana", "max_steps": -3, "gb": 127}, tp=[2, 3], pp=[1]))

    counts = {violation.rule: violation.message.partition(" of the sweep")[0] for violation in errors_of(found)}
    assert counts["choice"] == counts["sizes-positive"] == "2 of 2 points"
    assert counts["gpus-divide"] == "1 of 2 points"


# --- what is not run: by rule, how many points, and why ---------------------------------------------------------------


def skipped(test: TestDefinition) -> tuple[SkippedPart, ...]:
    return skipped_parts(test, grid_of(test))


def test_every_invalid_point_is_counted_once() -> None:
    test = swept(num_gpus=[8, 16], tp=[1, 3, 8], pp=[1, 2, 4], gb=[7, 64], mb=[1])

    assert sum(part.points for part in skipped(test)) == sum(not is_valid(test, point) for point in every_point(test))


def test_a_rule_has_the_first_point_that_it_refuses_and_its_message() -> None:
    (part,) = skipped(swept(tp=[1, 3, 5], seq_length=[1024, 2048]))

    assert (part.point, part.points, part.rule) == ({"tp": 3}, 4, "gpus-divide")
    assert "16 is not a multiple of tp 3" in part.reason


def test_drawn_points_that_break_a_rule_are_counted() -> None:
    drawn = (SweepAxis(field="cmd_args.tp", values=(3, 5)),)
    test = swept(sweep=SweepPolicy(method="random", points=4)).model_copy(update={"drawn": drawn})

    (part,) = skipped(test)

    assert part.point["tp"] in (3, 5)
    assert (part.points, part.rule) == (2, "gpus-divide")


def test_a_sweep_without_an_invalid_point_skips_nothing() -> None:
    assert skipped(swept(seq_length=[1024, 2048])) == ()
