"""Plausibility: what contradicts the plan, what is physically impossible, and what only looks as if it were."""

from collections.abc import Mapping
from typing import Any

import pytest

from nightbridge.gate.plausibility import implausible, missing_steps
from nightbridge.gate.run_verdict import compare
from nightbridge.gate.tonight import Evidence
from nightbridge.history.rows import row_of
from nightbridge.models import GatePolicy, Limits, RunRecord, VerdictStatus
from tests.builders import make_record, make_summary

ARGUMENTS = {"model_recipe_name": "llama3_8b", "gpu_type": "h100", "num_gpus": 8, "max_steps": 50}

PEAK = {"largest learning rate": {"its configuration": 3e-4, "the log": 1.99e-4, "TensorBoard": 3e-4}}
TENTH = {"largest learning rate": {"its configuration": 3e-4, "the log": 3e-5, "TensorBoard": 3e-5}}
TWICE = {"largest learning rate": {"its configuration": 3e-4, "the log": 6e-4}}
OTHER_PLAN = {"largest learning rate": {"its configuration": 2e-4, "the log": 2e-4}}


def reasons(
    arguments: dict[str, Any] | None = None,
    overrides: dict[str, str] | None = None,
    facts: dict[str, str] | None = None,
    gate: GatePolicy | None = None,
    **summary: Any,
) -> tuple[str, ...]:
    """Why a run of which this was measured is not plausible."""
    record = make_record(
        make_summary().model_copy(update=summary),
        cmd_args=ARGUMENTS | (arguments or {}),
        extra_cmd_args=overrides or {},
        gate=gate or GatePolicy(),
    )
    return implausible(record.model_copy(update={"facts": facts or {}}))


def test_a_run_that_says_nothing_of_itself_contradicts_nothing() -> None:
    assert reasons({"gb": 128, "lr": 3e-4, "compute_dtype": "bf16"}) == ()


def test_a_contradiction_names_every_value_and_who_says_it() -> None:
    ran = {"global batch size": {"its configuration": 64, "the log": 64, "TensorBoard": 64.0}}

    assert reasons({"gb": 128}, ran=ran) == (
        "not what was planned, global batch size: 128 planned, 64 by its configuration, 64 by the log, 64 by TensorBoard",
    )


def test_a_first_night_with_a_contradiction_is_failed() -> None:
    summary = make_summary().model_copy(update={"ran": {"world size": {"TensorBoard": 4}}})

    verdict = compare(make_record(summary, cmd_args=ARGUMENTS), ())

    assert verdict.status is VerdictStatus.FAILED
    assert verdict.reasons == ("not what was planned, world size: 8 planned, 4 by TensorBoard",)


def test_what_ran_otherwise_than_in_the_last_good_night_is_said_and_no_fault() -> None:
    """A recipe that the test leaves a size to may have changed it."""

    def run(night: str, size: int) -> RunRecord:
        ran = {"tensor parallel size": {"its configuration": size}, "sequence length": {"its configuration": 8192}}
        return make_record(make_summary().model_copy(update={"ran": ran}), night=night, cmd_args=ARGUMENTS)

    good = run("2026-11-20", 1)
    same, other = (compare(run("2026-11-21", size), [row_of(good, compare(good, ()))]) for size in (1, 2))

    assert (same.status, other.status) == (VerdictStatus.INSUFFICIENT_DATA, VerdictStatus.INSUFFICIENT_DATA)
    assert "ran otherwise than in 2026-11-20, by its configuration: tensor parallel size 1 → 2" in other.reasons
    assert not [reason for reason in same.reasons if "otherwise" in reason]


def test_another_logging_interval_than_in_the_last_good_night_is_named_first_and_no_fault() -> None:
    def run(night: str, every: Mapping[str, float]) -> RunRecord:
        summary = make_summary().model_copy(update={"ran": {"iterations a record": dict(every)}})
        return make_record(summary, night=night, cmd_args=ARGUMENTS)

    good = run("2026-11-20", {"the log": 1, "TensorBoard": 1})
    history = [row_of(good, compare(good, ()))]
    same, other, log_only = (
        compare(run("2026-11-21", every), history)
        for every in ({"the log": 1, "TensorBoard": 1}, {"the log": 10, "TensorBoard": 1}, {"the log": 1})
    )

    assert other.reasons[0] == (
        "logs at another interval than in 2026-11-20, iterations a record: the log 1 → 10; single steps, curves and "
        "start-up are not measured as they were"
    )
    assert other.status is VerdictStatus.INSUFFICIENT_DATA
    assert not [reason for verdict in (same, log_only) for reason in verdict.reasons if "interval" in reason]


def test_what_the_cluster_owes_and_nobody_measured_is_said_and_no_fault() -> None:
    """A pattern of the contract may name tests that cannot measure it."""
    summary = make_summary().model_copy(update={"checkpoint_time": None, "startup_time": 60.0})
    contract = {"checkpoint_time": Limits(max=30), "startup_time": Limits(max=90), "step_time": Limits(max=100)}

    verdict = compare(make_record(summary, cmd_args=ARGUMENTS), (), Evidence(contract=contract))

    assert verdict.exit_code == 0
    assert [reason for reason in verdict.reasons if "owes" in reason] == [
        "what dgx owes it was not measured: checkpoint time"
    ]


@pytest.mark.parametrize(
    ("arguments", "overrides", "ran", "plausible"),
    [
        ({}, {"+train.global_batch_size": "256"}, {"global batch size": {"the log": 256}}, True),
        ({}, {"train.global_batch_size": "256"}, {"global batch size": {"the log": 128}}, False),
        ({}, {"train.global_batch_size": "${oc.env:GBS}"}, {"global batch size": {"the log": 128}}, True),
        # Which of the two wins depends on the launcher.
        ({"gb": 128}, {"train.global_batch_size": "256"}, {"global batch size": {"the log": 256}}, True),
        ({}, {}, {"sequence length": {"a": 4096}, "sequence length of the data": {"a": 8192}}, False),
        ({"compute_dtype": "fp8_mx"}, {}, {"precision": {"its configuration": "fp8"}}, True),
        ({"compute_dtype": "nvfp4"}, {}, {"precision": {"its configuration": "fp4"}}, True),
        ({"compute_dtype": "fp8_mx"}, {}, {"precision": {"its configuration": "bf16"}}, False),
        ({"lr": 3e-4}, {}, {"largest learning rate": {"the log": 2.85e-4}}, True),
        ({"lr": 3e-4}, {}, {"largest learning rate": {"the log": 3e-3}}, False),
        ({"lr": 3e-4}, {}, {"largest learning rate": {"its configuration": 3e-5, "the log": 3e-5}}, False),
        # A warm-up may be longer than the run: only its own configuration knows.
        ({"lr": 3e-4}, {}, {"largest learning rate": {"the log": 7.5e-6, "TensorBoard": 7.5e-6}}, True),
        ({}, {"optimizer.lr": "3e-4"}, {"largest learning rate": {"the log": 7.5e-6}}, True),
        ({"lr": 3e-4}, {}, {"largest learning rate": {"the log": 0.0}}, False),
        # Of every 25th iteration the largest rate is one of the decay.
        ({}, {}, {**PEAK, "iterations a record": {"the log": 25, "TensorBoard": 1}}, True),
        ({}, {}, {**PEAK, "iterations a record": {"the log": 1, "TensorBoard": 1}}, False),
        ({}, {}, {**TENTH, "iterations a record": {"the log": 25, "TensorBoard": 25}}, False),
        ({}, {}, {**TWICE, "iterations a record": {"the log": 25}}, False),
        ({"lr": 3e-4}, {}, {**OTHER_PLAN, "iterations a record": {"the log": 25}}, False),
    ],
)
def test_the_plan_is_what_the_test_writes(
    arguments: dict[str, Any], overrides: dict[str, str], ran: dict[str, Any], plausible: bool
) -> None:
    assert (reasons(arguments, overrides, ran=ran) == ()) is plausible


@pytest.mark.parametrize(
    ("planned", "found", "plausible"),
    [
        ("h100", "H100 80GB HBM3", True),
        ("b200", "B200", True),
        ("b200", "GB200", False),
        ("h100", "A100-SXM4-80GB", False),
        ("a100", "A100-SXM4-80GB", True),
    ],
)
def test_a_gpu_is_known_by_a_word_of_its_name(planned: str, found: str, plausible: bool) -> None:
    assert (reasons({"gpu_type": planned}, facts={"GPU": found}, tflops_per_gpu=200.0) == ()) is plausible


def test_what_a_resume_moves_is_no_contradiction() -> None:
    ran = {"largest learning rate": {"its configuration": 3e-4, "the log": 3e-5}}

    assert reasons(ran=ran) != ()
    assert reasons(ran=ran, start_step=25) == ()


@pytest.mark.parametrize(
    ("measured", "text"),
    [
        ({"loss_min": 0.0, "loss_max": 2.0}, "a loss of 0"),
        ({"loss_min": -1.0, "loss_max": 2.0}, "a loss of -1"),
        ({"loss_min": 2.5, "loss_max": 2.5}, "the loss is 2.5 at every iteration"),
        ({"grad_norm_min": 0.0, "grad_norm_max": 1.0, "source": "tensorboard"}, "a gradient norm of 0"),
        ({"grad_norm_min": 0.0, "grad_norm_max": 0.0}, "a gradient norm of 0"),
        ({"grad_norm_min": -0.5, "grad_norm_max": 1.0}, "a gradient norm of -0.5"),
        ({"skipped_iterations": 1}, "1 iteration counted as skipped by the log, 0 allowed"),
        ({"nan_iterations": 2}, "2 iterations counted as NaN by the log, 0 allowed"),
        ({"tflops_per_gpu": 1100.0}, "where h100 does 989 in bf16"),
        ({"step_time": 1.0, "model_flops": 1.2e16}, "for which h100 needs 1.38 s"),
        ({"peak_memory": 102.0}, "on a GPU that has 101 GB"),
    ],
)
def test_what_cannot_be_is_told(measured: dict[str, Any], text: str) -> None:
    (reason,) = reasons(**measured)

    assert text in reason


@pytest.mark.parametrize(
    ("arguments", "measured"),
    [
        ({}, {"loss_min": 0.3, "loss_max": 0.300001}),
        ({}, {"grad_norm_min": 0.0, "grad_norm_max": 1.0}),  # the log has three digits
        ({}, {"grad_norm_min": 0.0, "grad_norm_max": 0.0, "ran": {"gradient clipping": {"its configuration": 0.0}}}),
        ({"compute_dtype": "fp8_cs"}, {"tflops_per_gpu": 1100.0}),
        ({}, {"tflops_per_gpu": 1300.0, "ran": {"precision": {"its configuration": "fp8"}}}),  # an override's
        ({"gpu_type": "vr200"}, {"tflops_per_gpu": 20000.0, "peak_memory": 500.0}),
        ({}, {"step_time": 1.4, "model_flops": 1.2e16}),
        ({}, {"step_time": 0.001}),  # nothing is known of the model
    ],
)
def test_what_can_be_is_not(arguments: dict[str, Any], measured: dict[str, Any]) -> None:
    assert reasons(arguments, **measured) == ()


def test_skipped_iterations_may_be_allowed() -> None:
    assert reasons(gate=GatePolicy(skipped_iterations=12), skipped_iterations=12) == ()


def test_the_memory_that_nvidia_smi_names_counts() -> None:
    assert reasons(facts={"GPU": "H100 80GB HBM3"}, peak_memory=90.0) != ()
    assert reasons(facts={"GPU": "H100 NVL"}, peak_memory=90.0) == ()


Length = tuple[int | None, int]
"""The iterations that a run says it was going to do, where it does, and those that it did."""


def length(iterations: int | None, done: int, night: str = "2026-11-21") -> RunRecord:
    """A run whose recipe decides how long it is."""
    ran = {"iterations": {"its configuration": iterations}} if iterations else {}
    summary = make_summary().model_copy(update={"steps_expected": None, "steps_done": done, "ran": ran})
    record = make_record(summary, night=night, cmd_args={**ARGUMENTS, "max_steps": None})
    return record.model_copy(update={"plan": record.plan.model_copy(update={"max_steps": None})})


@pytest.mark.parametrize(
    ("before", "tonight", "short"),
    [
        pytest.param((50, 50), (40, 40), (), id="the recipe is shorter"),
        pytest.param((50, 50), (40, 39), ("39 of 40 steps recorded",), id="the recipe is shorter, and the run too"),
        pytest.param((50, 50), (60, 50), ("50 of 60 steps recorded",), id="the recipe is longer, and the run is not"),
        pytest.param((50, 50), (60, 60), (), id="the recipe is longer"),
        pytest.param((50, 50), (50, 40), ("40 of 50 steps recorded",), id="the run is shorter"),
        pytest.param((100, 50), (100, 50), (), id="each run stops before its end"),
        pytest.param((100, 50), (200, 50), (), id="each run stops before its end, which is another"),
        pytest.param((100, 50), (40, 40), (), id="a run that stops ends before"),
        pytest.param((50, 50), (None, 40), ("40 of 50 steps recorded",), id="a run that does not say its length"),
        pytest.param((None, 50), (50, 40), ("40 of 50 steps recorded",), id="nights of a release that did not read it"),
        pytest.param((None, 50), (40, 40), (), id="a shorter recipe after nights of such a release"),
        pytest.param((None, 50), (60, 50), (), id="one that may stop before its end, as earlier runs may have"),
    ],
)
def test_a_run_whose_recipe_decides_is_as_long_as_that_says(
    before: Length, tonight: Length, short: tuple[str, ...]
) -> None:
    history = [row_of(length(*before, night=f"2026-11-{day}"), None) for day in (18, 19, 20)]

    assert missing_steps(length(*tonight), history) == short


@pytest.mark.parametrize(
    ("earlier", "tonight", "short"),
    [
        pytest.param([(None, 50), (50, 50)], (40, 40), (), id="a shorter recipe soon after an upgrade"),
        pytest.param([(None, 80), (50, 50)], (50, 50), (), id="a recipe that was longer before an upgrade"),
        pytest.param([(80, 80), (100, 50)], (200, 50), (), id="runs have stopped before their end since then"),
        pytest.param([(100, 50), (80, 80)], (90, 80), ("80 of 90 steps recorded",), id="and do so no more"),
        pytest.param([(50, 50), (40, 40)], (50, 40), ("40 of 50 steps recorded",), id="the recipe is the former one"),
    ],
)
def test_of_several_recipes_before_the_last_one_says_whether_runs_stop_before_their_end(
    earlier: list[Length], tonight: Length, short: tuple[str, ...]
) -> None:
    history = [row_of(length(*one, night=f"2026-11-{day}"), None) for day, one in enumerate(earlier, 18)]

    assert missing_steps(length(*tonight), history) == short
