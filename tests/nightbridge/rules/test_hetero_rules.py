"""The rules of a heterogeneous-parallel test: what breaks each, and that the published topologies break none."""

from pathlib import Path
from typing import Any

import pytest

from examples.practice.repositories import TEMPLATE
from nightbridge.config.scenarios import load
from nightbridge.models import (
    Checkout,
    ClusterLimits,
    GitRepo,
    PinnedRepository,
    TestDefinition,
)
from nightbridge.rules import check_test, errors_of

TOPOLOGIES = sorted(Path("conf/examples/hetero").glob("*.toml"))
ENCODER = {"dp": 8}
LANGUAGE_MODEL = {"tp": 2, "dp": 32, "ep": 16}
SIZES = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 128}
SAMPLES = {"max_steps": None, "train_samples": 1_000_000}


def make_test(
    args: dict[str, Any] | None = None,
    *,
    encoder: dict[str, Any] | None = None,
    language_model: dict[str, Any] | None = None,
    extra_cmd_args: dict[str, str] | None = None,
    **fields: Any,
) -> TestDefinition:
    """A sound test on nine nodes of eight GPUs, with changes."""
    written = {
        "container_image": "none",
        "gb": 192,
        "mb": 1,
        "max_steps": 50,
        **SIZES,
        "encoder": {**ENCODER, **(encoder or {})},
        "language_model": {**LANGUAGE_MODEL, **(language_model or {})},
        **(args or {}),
    }
    return TestDefinition(
        id="vlm",
        name="vlm",
        source="vlm.toml",
        test_template_name="HeteroMIMO",
        cmd_args={key: value for key, value in written.items() if value is not None},
        git_repos=(GitRepo(url="https://x/Megatron-LM"),),
        nemo_run_repo=GitRepo(url="https://x/Run"),
        extra_cmd_args={"use-distributed-optimizer": "", **(extra_cmd_args or {})},
        **fields,
    )


def broken(test: TestDefinition, limits: ClusterLimits | None = None) -> dict[str, str]:
    return {violation.rule: violation.message for violation in check_test(test, limits)}


def test_an_interval_as_long_as_the_run_leaves_one_step_time() -> None:
    assert "write at most 25" in broken(make_test({"log_interval": 50}))["steps-timed"]
    assert "steps-timed" not in broken(make_test({"log_interval": 25}))
    assert "steps-timed" not in broken(make_test({"log_interval": 100, **SAMPLES}))


@pytest.mark.parametrize("path", TOPOLOGIES, ids=lambda path: path.stem)
def test_a_published_topology_breaks_no_rule(path: Path) -> None:
    scenario = load(path)

    assert scenario.invalid == ()
    assert errors_of(check_test(scenario.tests[0])) == ()


def test_there_is_a_sample_of_each_published_topology() -> None:
    assert {path.stem for path in TOPOLOGIES} >= {
        "1_node", "3_nodes", "9_nodes", "17_nodes", "33_nodes", "68_nodes", "100_nodes",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("test", "rule", "says"),
    [
        (make_test(encoder={"nodes": 1, "dp": 4}), "grid-fills-nodes", "do not fill its 1 nodes of 8"),
        (make_test(encoder={"dp": 4}), "grid-fills-nodes", "do not fill whole nodes of 8"),
        (make_test(encoder={"dp": 24}), "lanes-per-encoder", "32 is not a multiple of encoder.dp 24"),
        (make_test(language_model={"ep": 24}), "grid-experts", "64 GPUs are not a multiple of etp 1 x ep 24"),
        (make_test({"num_moe_experts": 100}), "grid-experts", "100 is not a multiple of language_model.ep 16"),
        (make_test({"gb": 200}), "grid-micro-batches", "6.25 micro-batches"),
        (make_test(language_model={"cp": 2, "dp": 16}), "grid-context-parallel", "refuses more than 1"),
        (make_test({"max_steps": None}), "training-length", "neither"),
        (make_test({"train_samples": 9600}), "samples-precede", "50 iterations"),
        (
            make_test({**SAMPLES, "lr_decay_style": "WSD", "lr_wsd_decay_samples": 1000}),
            "sample-schedule",
            "without lr_wsd_decay_style",
        ),
        (make_test({**SAMPLES, "lr_decay_style": "WSD"}), "sample-schedule", "needs lr_wsd_decay_samples"),
        (
            make_test({**SAMPLES, "lr_wsd_decay_samples": 1000, "lr_wsd_decay_style": "linear"}),
            "sample-schedule",
            "no effect without lr_decay_style = 'WSD'",
        ),
        (make_test({"lr_warmup_samples": 1000}), "sample-schedule", "write train_samples"),
        (make_test({**SAMPLES, "warmup_iters": 10}), "sample-schedule", "write lr_warmup_samples"),
        (make_test({**SAMPLES, "lr_warmup_samples": 2_000_000}), "sample-schedule-order", "do not end before"),
        (make_test({"training_stage": "stage1", "freeze_projection": True}), "nothing-trained", "nothing would be"),
        (
            make_test({"dynamic_resolution_min_patches": 9, "dynamic_resolution_max_patches": 4}),
            "image-resolution",
            "9 is more than",
        ),
        (make_test({"dynamic_resolution": True, "num_image_tiles": 12}), "image-resolution", "excludes tiles"),
        (make_test(extra_cmd_args={"llm-tp": "4"}), "flag-once", "decided by [cmd_args]"),
        (make_test({"num_layers": None}), "program-needs", "without --num-layers; write num_layers"),
        (make_test(extra_cmd_args={"encoder-ddp-overlap": ""}), "program-needs", "needs --overlap-grad-reduce"),
        (make_test(extra_cmd_args={"mimo-encoder-prefetch": ""}), "program-needs", "needs --freeze-vit"),
        (make_test(extra_cmd_args={"bogus-flag": "1"}), "program-flags", "--bogus-flag: the program has no such flag"),
        (make_test(extra_cmd_args={"squared-relux": ""}), "program-flags", "did you mean --squared-relu?"),
        (make_test(extra_cmd_args={"kv-channels": "many"}), "program-flags", "'many' is no int"),
        (make_test(extra_cmd_args={"kv-channels": ""}), "program-flags", "needs a value"),
        (make_test(extra_cmd_args={"bf16": "yes"}), "program-flags", "takes no value, and 'yes' is written"),
        (make_test(extra_cmd_args={"normalization": "RMS"}), "program-flags", "is not one of LayerNorm, RMSNorm"),
        (make_test({"llm_only": True}), "grid-encoder", "leaves no ranks to [cmd_args.encoder]"),
        (make_test({"encoder": None}), "grid-encoder", "llm_only = true to train the language model alone"),
        (make_test(language_model={"weight_shards": 3}), "grid-weight-shards", "3 is not a multiple of tp 2"),
        (make_test(encoder={"weight_shards": 8}), "grid-weight-shards", "only the language model's"),
        (
            make_test(language_model={"nodes": 8, "weight_shards": 4}),
            "grid-fills-nodes",
            "x 2 for its weight shards = 128 GPUs",
        ),
        (make_test({"load_dir": "~/old"}), "path-absolute", "is not an absolute path"),
        (make_test({"load_dir": "/old"}), "resumes", "from /old, where another one ended"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_broken_rule_says_the_values_and_the_way_out(test: TestDefinition, rule: str, says: str) -> None:
    assert says in broken(test)[rule]


def test_a_sound_test_breaks_no_rule() -> None:
    limits = ClusterLimits(max_nodes=16, max_time_seconds=86400, gpus_per_node=8, has_pyxis=True)

    assert check_test(make_test(), limits) == ()


def test_spread_weights_count_as_ranks_that_read_data() -> None:
    spread = {"tp": 2, "dp": 16, "ep": 8, "weight_shards": 4, "expert_weight_shards": 2}

    assert check_test(make_test(language_model=spread)) == ()
    assert "6.25 micro-batches" in broken(make_test({"gb": 200}, language_model=spread))["grid-micro-batches"]


def test_a_language_model_alone_needs_no_encoder() -> None:
    alone = make_test({"encoder": None, "llm_only": True, "gb": 64})

    assert check_test(alone) == ()
    assert "need 8 nodes" in broken(alone, ClusterLimits(max_nodes=7, gpus_per_node=8))["nodes-allowed"]


def test_both_grids_count_against_the_nodes_of_the_partition() -> None:
    assert "need 9 nodes" in broken(make_test(), ClusterLimits(max_nodes=8, gpus_per_node=8))["nodes-allowed"]


def test_iterations_of_a_schedule_in_samples_are_rounded_up() -> None:
    assert make_test({**SAMPLES, "train_samples": 193}).max_steps == 2


def test_an_axis_that_the_pinned_program_lacks_is_refused(tmp_path: Path) -> None:
    (tmp_path / "examples/mimo/training").mkdir(parents=True)
    (tmp_path / "examples/mimo/pretrain_mimo.py").touch()
    flags = ("encoder-tp", "encoder-dp", "llm-offset", "llm-tp", "llm-dp", "llm-ep")
    lines = "".join(f"parser.add_argument('--{flag}', type=int)\n" for flag in flags)
    (tmp_path / "examples/mimo/training/args.py").write_text(lines)
    code = PinnedRepository(url="https://x/Megatron-LM", ref="main", commit="0" * 40, path=tmp_path)
    test = make_test(language_model={"pp": 2, "dp": 16})

    found = {
        violation.rule: violation.message for violation in check_test(test, checkout=Checkout(megatron_bridge=code))
    }

    assert "no flag --llm-pp, so pp = 2 is not possible" in found["grid-flag-exists"]


def test_each_flag_that_the_pinned_program_lacks_is_told_with_its_line_and_that_of_the_program() -> None:
    code = PinnedRepository(url="https://x/Megatron-LM", ref="main", commit="0" * 40, path=TEMPLATE / "megatron_lm")
    given = {"program": "examples/mimo/train_hetero.py", **dict.fromkeys(SIZES)}
    lines = {"cmd_args": "vlm.toml:5", "cmd_args.program": "vlm.toml:6", "extra_cmd_args": "vlm.toml:20"}
    lines |= {"extra_cmd_args.bogus-flag": "vlm.toml:21", "extra_cmd_args.use-distributed-optimizer": "vlm.toml:22"}
    test = make_test(given, extra_cmd_args={"bogus-flag": "1"}, lines=lines)

    found = check_test(test, checkout=Checkout(megatron_bridge=code))

    assert {violation.places: violation.message.partition(":")[0] for violation in errors_of(found)} == {
        ("vlm.toml:6", "vlm.toml:21"): "the pinned program rejects --bogus-flag",
        ("vlm.toml:6", "vlm.toml:22"): "the pinned program rejects --use-distributed-optimizer",
    }
