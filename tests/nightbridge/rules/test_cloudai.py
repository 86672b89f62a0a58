"""CloudAI's verdicts, reproduced, and the configurations that NVIDIA ships: accepted here, all of them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nightbridge.models import Compat, HarvestPolicy, TestDefinition
from nightbridge.rules import check_test, errors_of
from nightbridge.rules.checking import CLOUDAI_RULES, RULES
from nightbridge.rules.rule import Rule, RuleContext
from tests.builders import make_test

SHARED = Path(__file__).parents[4] / "shared" / "data"
VERSIONS = ("0.3.0", "0.4.0")

FITS = {"num_gpus": 16, "tp": 2, "pp": 2, "cp": 1, "mb": 1, "gb": 16, "model_recipe_name": "llama3_8b"}
TE = {"cuda_graph_impl": "transformer_engine"}


def make_cloudai_test(args: dict[str, Any], *, version: str = "v0.4.0", compat: Compat = "cloudai") -> TestDefinition:
    unset = {"num_gpus": None, "model_recipe_name": None, "max_steps": None}
    harvest = HarvestPolicy(checkpoint="none")
    return make_test({**unset, "model_family_name": "x", **args}, version=version, compat=compat, harvest=harvest)


def number_of(rule: Rule[RuleContext]) -> int:
    return int(rule.id.split("-")[1])


def failed_constraints(args: dict[str, Any]) -> tuple[int, ...]:
    run = RuleContext(make_cloudai_test({}).model_copy(update={"cmd_args": args}))
    return tuple(number_of(rule) for rule in CLOUDAI_RULES if any(rule.check(run)))


def shipped(version: str) -> Iterator[tuple[str, dict[str, Any], str]]:
    path = SHARED / f"shipped_configs_v{version}.json"
    if not path.exists():
        pytest.skip(f"the shipped configurations are not beside this repository: {path}")
    for entry in json.loads(path.read_text()):
        args = dict(entry["cmd_args"])
        yield entry["name"], {"model_recipe_name": args.pop("recipe"), **args}, entry["cloudai"]


@pytest.mark.parametrize("version", VERSIONS)
def test_every_shipped_configuration_is_accepted(version: str) -> None:
    refused = {
        name: [str(violation) for violation in found]
        for name, args, _ in shipped(version)
        if (found := errors_of(check_test(make_cloudai_test(args, version=f"v{version}", compat="none"))))
    }

    assert refused == {}


@pytest.mark.parametrize("version", VERSIONS)
def test_the_verdict_on_every_shipped_configuration_is_cloudais(version: str) -> None:
    verdicts, recorded = {}, {}
    for name, args, said in shipped(version):
        failed = failed_constraints(args)
        verdicts[name] = f"FAIL {','.join(map(str, failed))}" if failed else "PASS"
        recorded[name] = said

    assert verdicts == recorded


def test_a_configuration_that_fits_passes() -> None:
    assert failed_constraints(FITS) == failed_constraints({}) == ()


# Recorded from CloudAI's own check at 5b5c0f72: the numbers that its log names.
RECORDED = [
    ({"num_gpus": 15}, (1, 4)),
    ({"num_gpus": 2}, (1, 3, 4)),
    ({"num_gpus": 0}, (3, 4)),
    ({"tp": 0}, ()),
    ({"tp": -2}, (3, 4)),
    ({"tp": -3}, (1, 3, 4)),
    ({"gb": 12, "pp": 1}, (4,)),
    ({"gb": 12, "mb": None}, ()),
    ({"use_megatron_fsdp": True, "pp": 1, "num_distributed_optimizer_instances": 4}, (4,)),
    ({"use_megatron_fsdp": True, "pp": 1, **TE, "cuda_graph_scope": ["attn"]}, (5,)),
    ({"use_megatron_fsdp": True, "pp": 1, **TE}, ()),
    ({"use_megatron_fsdp": True}, (6,)),
    ({"use_megatron_fsdp": True, "pp": 1, "vp": 2}, (6,)),
    ({"et": 1, "ep": 3}, (7,)),
    ({"et": 0, "ep": 8}, (7,)),
    ({"ep": 3}, ()),
    ({"num_distributed_optimizer_instances": 2}, (9,)),
    ({"activation_offload_layers": 4}, (10,)),
    ({"moe_a2a_overlap": True, **TE}, (11,)),
    ({"pp": 1, "activation_offload_layers": 4, **TE, "cuda_graph_scope": "attn"}, (12,)),
    ({"pp": 1, "activation_offload_layers": 4, "cuda_graph_impl": "local"}, ()),
    ({"cuda_graph_impl": "full_iteration"}, (13,)),
    ({"cuda_graph_impl": "local", "cuda_graph_scope": "[attn]"}, (14,)),
    ({"cuda_graph_impl": " Transformer_Engine ", "cuda_graph_scope": ["full_iteration"]}, (14,)),
    ({"cuda_graph_scope": ["odd"]}, ()),
    ({"cuda_graph_impl": "local", "cuda_graph_scope": '[""]'}, (14,)),
    ({"cuda_graph_impl": "local", "cuda_graph_scope": ['[""]']}, ()),
    ({"cuda_graph_impl": "none", "cuda_graph_scope": "'moe', moe_router"}, (15,)),
    ({"cuda_graph_scope": ["moe_preprocess"]}, (16,)),
    ({"cuda_graph_scope": ["attn"], "recompute_modules": ["mla_up_proj"]}, (17,)),
    ({"cuda_graph_scope": ["mlp"], "recompute_modules": "mlp"}, (17,)),
    ({"cuda_graph_scope": ["moe_router"], "recompute_modules": ["shared_experts"]}, (17,)),
    ({"cuda_graph_scope": ["attn", "mlp", "moe_router"], "recompute_modules": ["layernorm"]}, (17,)),
    ({"cuda_graph_scope": ["attn", "mlp"], "recompute_modules": ["layernorm"]}, ()),
    ({"model_recipe_name": "deepseek_v3"}, (18,)),
    ({"model_recipe_name": "DeepSeekV3", "pp": 4, "vp": 2, "gb": None}, ()),
    ({"model_recipe_name": "deepseek_v3", "pp": 4, "vp": 8, "gb": None}, (18,)),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "failed"), RECORDED)
def test_the_constraints_that_fail_are_the_ones_that_cloudai_names(
    changes: dict[str, Any], failed: tuple[int, ...]
) -> None:
    assert failed_constraints({**FITS, **changes}) == failed


def test_every_constraint_that_can_fail_has_been_recorded_failing() -> None:
    never_fail = {2, 8}

    assert {number for _, failed in RECORDED for number in failed} | never_fail == set(range(1, 19))


def test_every_constraint_has_a_rule_of_the_normal_profile_that_stands_for_it() -> None:
    ids = {rule.id for rule in RULES}

    assert [number_of(rule) for rule in CLOUDAI_RULES] == list(range(1, 19))
    for rule in CLOUDAI_RULES:
        assert set(rule.reason.removesuffix(".").partition("profile: ")[2].split(", ")) <= ids


def test_the_compat_profile_reports_cloudais_constraints_by_name_instead_of_ours() -> None:
    ships = {**FITS, "num_gpus": 16, "model_recipe_name": "deepseek_v3", "pp": 2, "vp": 8}

    (violation,) = errors_of(check_test(make_cloudai_test(ships)))

    assert violation.rule == "cloudai-18-deepseek-layout"
    assert "pp 2 with vp 8" in violation.message
    assert errors_of(check_test(make_cloudai_test(ships, compat="none"))) == ()


def test_the_launcher_has_the_last_word_in_the_compat_profile_too() -> None:
    rules = {violation.rule for violation in errors_of(check_test(make_cloudai_test({**FITS, "gpu_type": "h10"})))}

    assert rules == {"choice"}
