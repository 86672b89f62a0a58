"""Tonight's values over the configuration that the last good run dumped."""

from pathlib import Path
from typing import Any

import pytest

from nightbridge.launch.config_container import ConfigContainer
from nightbridge.launch.config_schema import CONTAINER, ConfigClass, ConfigSchema
from nightbridge.rules import check_dumped, check_test
from nightbridge.rules.checking import check_defaults
from tests.builders import make_test

LAYOUT = "pipeline_model_parallel_layout"


def dump(**transformer: Any) -> ConfigContainer:
    table = {
        "model": {
            "seq_length": 4096,
            "transformer": {"num_layers": 30, "tensor_model_parallel_size": 1, **transformer},
        },
        "train": {"train_iters": 50, "global_batch_size": 16, "micro_batch_size": 1},
        "optimizer": {"lr": 1e-3},
        "scheduler": {"lr_decay_iters": 50},
    }
    return ConfigContainer(Path("runs/a/configs/ConfigContainer.yaml"), table)


def test_the_same_values_break_nothing_and_differ_in_nothing() -> None:
    test = make_test({"num_gpus": 16, "max_steps": 50, "gb": 16, "mb": 1, "tp": 1})

    assert check_dumped(dump(), test) == ((), ())


def test_what_tonights_flags_and_overrides_break_is_told_and_what_differs() -> None:
    args = {"num_gpus": 16, "max_steps": 50, "gb": 13, "mb": 1, "pp": 4}
    test = make_test(args, version="v0.6.0", extra_cmd_args={"optimizer.lr": "three", "train.not_there": "1"})
    container = dump(pipeline_model_parallel_size=1, pipeline_dtype="bf16")

    violations, differences = check_dumped(container, test)

    assert {found.rule for found in violations} == {
        "container-types",
        "container-layers",
        "container-train-batch",
        "container-eval-batch",
    }
    assert {found.path: (found.before, found.after) for found in differences} == {
        "model.transformer.pipeline_model_parallel_size": (1, 4),
        "optimizer.lr": (1e-3, "three"),
        "train.global_batch_size": (16, 13),
    }
    assert all(found.places for found in violations)


def test_what_is_broken_is_told_with_the_lines_of_the_keys_that_set_it() -> None:
    lines = {"git_repos": "t.toml:2", "cmd_args": "t.toml:5", "extra_cmd_args": "t.toml:20"}
    lines |= {f"cmd_args.{key}": f"t.toml:{line}" for key, line in (("gb", 9), ("mb", 10), ("pp", 11))}
    lines |= {"extra_cmd_args.scheduler.lr_decay_iters": "t.toml:21"}
    overrides = {"scheduler.lr_decay_iters": "0"}
    test = make_test({"num_gpus": 16, "gb": 13, "mb": 1, "pp": 4}, extra_cmd_args=overrides, lines=lines)

    violations, _ = check_dumped(dump(pipeline_model_parallel_size=1, pipeline_dtype="bf16"), test)

    assert {found.rule: found.places for found in violations} == {
        "container-schedule-length": ("t.toml:21",),
        "container-layers": ("t.toml:11",),
        "container-train-batch": ("t.toml:9", "t.toml:10"),
        "container-eval-batch": ("t.toml:9", "t.toml:11"),
    }


SCHEMA = ConfigSchema(
    classes={
        CONTAINER: ConfigClass(
            fields={
                "checkpoint": "c:Checkpoint",
                "scheduler": "c:Scheduler",
                "model": "c:Model",
                "mixed_precision": "c:Precision | str",
            }
        ),
        "c:Precision": ConfigClass(defaults={"bf16": False}, fields={"bf16": "bool"}),
        "c:Model": ConfigClass(defaults={"cpu_offloading": True}, fields={"cpu_offloading": "bool"}),
        "c:Checkpoint": ConfigClass(
            defaults={"load_main_params_from_ckpt": False, "load_optim": True, "async_save": False},
            fields={"load_main_params_from_ckpt": "bool", "load_optim": "bool", "async_save": "bool"},
        ),
        "c:Scheduler": ConfigClass(bases=("c:Schedule",)),
        "c:Schedule": ConfigClass(
            defaults={"lr_warmup_fraction": None, "lr_warmup_iters": 0, "lr_decay_iters": None},
            fields={"lr_warmup_fraction": "float | None", "lr_warmup_iters": "int", "lr_decay_iters": "int | None"},
        ),
    }
)


@pytest.mark.parametrize(
    ("overrides", "severity", "message"),
    [
        (
            {"checkpoint.load_main_params_from_ckpt": "true"},
            "warning",
            "by the defaults of the pinned code checkpoint.load_main_params_from_ckpt needs load_optim = false; "
            "the recipe may set it",
        ),
        (
            {"checkpoint.load_main_params_from_ckpt": "true", "checkpoint.load_optim": "true"},
            "error",
            "checkpoint.load_main_params_from_ckpt needs load_optim = false",
        ),
        (
            {"scheduler.lr_warmup_fraction": "0.1", "scheduler.lr_warmup_iters": "5"},
            "error",
            "scheduler.lr_warmup_fraction and lr_warmup_iters are both set; keep one",
        ),
        (
            {"scheduler.lr_decay_iters": "0"},
            "error",
            "scheduler.lr_decay_iters 0: the learning rate needs at least one step to decay",
        ),
        ({"mixed_precision": "bf17_mixed"}, "error", "mixed_precision 'bf17_mixed' is not a recipe; use bf16_mixed"),
    ],
)
def test_overrides_are_checked_in_the_defaults_of_the_pinned_classes(
    overrides: dict[str, str], severity: str, message: str
) -> None:
    found = list(check_defaults(SCHEMA, make_test(extra_cmd_args=overrides)))

    assert [(each.severity, each.message) for each in found] == [(severity, message)]


@pytest.mark.parametrize("override", ["checkpoint.load_optim", "model.cuda_graph_impl"])
def test_what_no_override_names_or_the_recipe_decides_is_not_judged_by_defaults(override: str) -> None:
    assert list(check_defaults(SCHEMA, make_test(extra_cmd_args={override: "true"}))) == []


BOTH = {"dist.use_megatron_fsdp": "true", "dist.use_torch_fsdp2": "true"}


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({"version": "v0.4.2", "extra_cmd_args": BOTH}, [("container-fsdp-choice", "error")]),
        ({"version": "main", "extra_cmd_args": BOTH}, [("container-fsdp-choice", "warning")]),
        ({"url": "/my/bridge", "extra_cmd_args": BOTH}, []),
        ({"version": "v0.4.2", "extra_cmd_args": {"dist.use_megatron_fsdp": "true"}}, []),
        ({"version": "v0.4.2", "extra_cmd_args": {"rng.seed": "0"}}, [("container-seed", "error")]),
        ({"version": "v0.4.2", "extra_cmd_args": {"rng.seed": "1"}}, []),
        (
            {"version": "v0.4.2", "extra_cmd_args": {"mixed_precision": "bf16_mixed", "mixed_precision.fp8": "hybrid"}},
            [],
        ),
        ({"version": "v0.4.2", "extra_cmd_args": {"model": "x", "checkpoint.async_save": "true", "a..b": "1"}}, []),
    ],
)
def test_overrides_that_exclude_each_other_are_found_without_the_pinned_code(fields: Any, found: Any) -> None:
    broken = check_test(make_test(**fields))

    assert [(each.rule, each.severity) for each in broken if each.rule.startswith("container-")] == found


@pytest.mark.parametrize(
    ("overrides", "found"),
    [
        ({"optimizer.lr": "-1"}, ["container-learning-rate"]),
        ({"optimizer.lr": "1e-4", "optimizer.min_lr": "1e-3"}, ["container-learning-rate"]),
        ({"optimizer.lr": "1e-4", "optimizer.min_lr": "0"}, []),
        ({"optimizer.min_lr": "1e-3"}, []),
    ],
)
def test_learning_rates_that_the_scheduler_asserts_are_refused_as_overrides(overrides: Any, found: Any) -> None:
    broken = check_test(make_test(extra_cmd_args=overrides))

    assert [each.rule for each in broken] == found


def test_what_the_dump_broke_as_well_is_not_told_for_it_ran() -> None:
    test = make_test({"num_gpus": 16, "max_steps": 50, "gb": 16, "mb": 1})

    assert check_dumped(dump(num_attention_heads=3, tensor_model_parallel_size=2), test) == ((), ())


@pytest.mark.parametrize(
    ("args", "found"),
    [
        ({"pp": 4, LAYOUT: "Et*15|t*15L"}, {"container-layout"}),
        ({"pp": 2, LAYOUT: "Et*15|t*15L"}, set()),
        ({"pp": 2, "vp": 1, LAYOUT: "Et*7|t*8|t*7|t*8L"}, set()),
        ({"pp": 2, "vp": "None", LAYOUT: "Et*7|t*8|t*7|t*8L"}, set()),
        ({"pp": 4}, {"container-layout"}),
        # The launcher makes these recipes' layouts anew where a flag sets the pipeline.
        ({"pp": 4, "model_recipe_name": "deepseek_v3"}, set()),
        ({"pp": 4, "model_recipe_name": "deepseek_v3", LAYOUT: "Et*15|t*15L"}, {"container-layout"}),
    ],
)
def test_a_layout_is_tonights_or_the_dumps_where_the_launcher_makes_no_other(
    args: dict[str, Any], found: set[str]
) -> None:
    sizes = {"pipeline_model_parallel_size": 3, "virtual_pipeline_model_parallel_size": None, "pipeline_dtype": "bf16"}
    container = dump(**sizes, pipeline_model_parallel_layout="Et*10|t*10|t*10L")
    test = make_test({"num_gpus": 16, "max_steps": 50, "gb": 16, "mb": 1, **args}, version="v0.6.0")

    assert {violation.rule for violation in check_dumped(container, test)[0]} == found
