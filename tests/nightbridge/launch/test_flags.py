"""The flag table: which flags a version has, and how each kind of value is written."""

from typing import Any

import pytest

from nightbridge.launch.flags import FLAGS, TEST_FLAGS, choices_of, known_in, written
from nightbridge.launch.versions import HEAD, Version

# cloudai.md 1.5: every field of CloudAI's MegatronBridge cmd_args that has a flag.
CLOUDAI = {
    "gpu_type": "-g", "container_image": "-i", "compute_dtype": "-c", "task": "--task", "nemo_home": "-nh",
    "wandb_project_name": "-wdp", "wandb_entity_name": "-wde", "wandb_experiment_name": "-wdj",
    "wandb_save_dir": "-wds", "max_retries": "--max_retries", "dryrun": "-d", "num_gpus": "-ng", "domain": "--domain",
    "use_recipes": "--use_recipes", "enable_vboost": "-vb", "model_family_name": "-m", "model_recipe_name": "-mr",
    "hidden_size": "--hidden_size", "num_layers": "--num_layers", "first_k_dense_replace": "--first_k_dense_replace",
    "pipeline_model_parallel_layout": "--pipeline_model_parallel_layout", "enable_nsys": "-en",
    "use_tokendrop": "--use_tokendrop", "use_megatron_fsdp": "--use_megatron_fsdp", "nccl_ub": "--nccl_ub",
    "cuda_graph_impl": "--cuda_graph_impl", "cuda_graph_scope": "--cuda_graph_scope", "tp": "-tp", "pp": "-pp",
    "cp": "-cp", "vp": "-vp", "ep": "-ep", "et": "-et", "mb": "-mb", "gb": "-gb", "seq_length": "-sl",
    "moe_a2a_overlap": "--moe_a2a_overlap", "max_steps": "-ms", "recompute_num_layers": "-rl",
    "activation_offload_layers": "-ol", "recompute_modules": "--recompute_modules", "lr": "--lr",
    "min_lr": "--min_lr", "warmup_iters": "--warmup_iters", "pretrained_checkpoint": "--pretrained_checkpoint",
    "save_dir": "--save_dir", "load_dir": "--load_dir", "save_interval": "--save_interval",
    "most_recent_k": "--most_recent_k", "save_config_filepath": "--save_config_filepath", "data": "--data",
    "dataset_paths": "--dataset_paths", "dataset_root": "--dataset_root", "index_mapping_dir": "--index_mapping_dir",
    "dataset_name": "--dataset_name", "packed_sequence": "--packed_sequence", "head_only": "--head_only",
    "tokenizer_type": "--tokenizer_type", "tokenizer_model": "--tokenizer_model", "vocab_size": "--vocab_size",
    "pytorch_profiler": "-pyp", "profiling_start_step": "--profiling_start_step",
    "profiling_stop_step": "--profiling_stop_step", "profiling_ranks": "--profiling_ranks",
    "record_memory_history": "-mh", "profiling_gpu_metrics": "--profiling_gpu_metrics", "nsys_trace": "--nsys_trace",
    "nsys_extra_args": "--nsys_extra_args", "config_variant": "-cv", "list_config_variants": "--list_config_variants",
}  # fmt: skip


def test_every_field_of_cloudai_has_its_flag_in_every_version() -> None:
    for field, option in CLOUDAI.items():
        assert TEST_FLAGS[field].option == option
        assert option in known_in(Version(0, 3))


def test_no_field_and_no_flag_stands_twice() -> None:
    assert len({flag.field for flag in FLAGS}) == len(FLAGS)
    options = [flag.option for flag in FLAGS if flag.option]
    assert len(set(options)) == len(options)


def test_a_flag_is_known_from_its_first_version_on() -> None:
    assert "-E" not in known_in(Version(0, 3, 1))
    assert "-E" in known_in(Version(0, 4))
    assert "-E" in known_in(HEAD)


def test_choices_change_with_the_version() -> None:
    assert choices_of("task", Version(0, 5)) == ("pretrain", "sft", "lora")
    assert choices_of("task", Version(0, 6)) == ("pretrain", "sft", "peft")
    assert choices_of("model_recipe_name", HEAD) is None


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("tp", 4, ("-tp", "4")),
        ("lr", 3e-4, ("--lr", "0.0003")),
        ("enable_vboost", False, ("-vb", "false")),
        ("use_recipes", True, ("--use_recipes",)),
        ("use_recipes", False, ()),
        ("save_dir", "", ()),
        ("vp", 1, ("-vp", "None")),
        ("vp", "None", ("-vp", "None")),
        ("vp", 2, ("-vp", "2")),
        ("cuda_graph_scope", "[moe_router, moe_preprocess]", ("--cuda_graph_scope", "moe_router,moe_preprocess")),
        ("cuda_graph_scope", "'attn'", ("--cuda_graph_scope", "attn")),
        ("recompute_modules", ["core_attn", "mlp"], ("--recompute_modules", "core_attn,mlp")),
        ("recompute_modules", [], ()),
        ("dataset_paths", ["/a", "/b"], ("--dataset_paths", "/a", "/b")),
        ("profiling_ranks", [0, 4], ("--profiling_ranks", "0,4")),
        ("nsys_extra_args", "--stats=true", ("--nsys_extra_args=--stats=true",)),
        ("peak_mem_clk", -1, ("-lmc", "-1")),
        ("hf_token", "secret", ()),
        ("num_distributed_optimizer_instances", 2, ()),
    ],
)
def test_each_kind_of_value_is_written_in_its_way(field: str, value: Any, words: Any) -> None:
    assert written(TEST_FLAGS[field], value) == words
