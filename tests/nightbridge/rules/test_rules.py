"""Every rule: what breaks it, what does not, and the way out that it tells."""

import difflib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from nightbridge.launch.flags import TEST_FLAGS
from nightbridge.launch.launch_plan import placeholder_plan
from nightbridge.launch.parser_source import PARSER
from nightbridge.launch.resources import parameters_of
from nightbridge.models import (
    Checkout,
    ClusterLimits,
    ClusterSettings,
    GatePolicy,
    GitRepo,
    HarvestPolicy,
    LauncherEnvironment,
    PinnedRepository,
    RunSpec,
    Scenario,
    SecretRef,
    Site,
    TestDefinition,
)
from nightbridge.rules import check_scenario, check_test, errors_of
from nightbridge.rules.checking import RULES, rule_entries
from nightbridge.rules.rule import RuleContext
from nightbridge.slurm.factory import open_cluster
from tests.builders import make_test

ROOMY = ClusterLimits(max_nodes=64, max_time_seconds=7 * 86400, gpus_per_node=8, has_pyxis=True)
FULL = {"tp": 1, "pp": 1, "cp": 1, "mb": 1}
TE = {"cuda_graph_impl": "transformer_engine"}
WHOLE = {"cuda_graph_impl": "local", "cuda_graph_scope": "full_iteration"}
NVIDIA = {"url": "https://github.com/NVIDIA-NeMo/Megatron-Bridge.git"}
V6 = {"version": "v0.6.0"}
CP, EP = "model.context_parallel_size", "model.expert_model_parallel_size"
TP, ET = "model.tensor_model_parallel_size", "model.expert_tensor_parallel_size"
PP, MB = "model.pipeline_model_parallel_size", "train.micro_batch_size"
VP = "model.virtual_pipeline_model_parallel_size"
NEW_MODULE = {"recompute_modules": "a_new_one"}
DEEPSEEK = {"model_family_name": "deepseek", "model_recipe_name": "deepseek_v3"}
RECOMPUTED = "model.recompute_modules"
MXFP8 = {"mixed_precision": "bf16_with_mxfp8_mixed"}
HYBRID = {"model_family_name": "nemotronh", "model_recipe_name": "nemotronh_56b"}
LAYOUT = "pipeline_model_parallel_layout"
GPT_OSS = {"model_family_name": "gpt_oss", "model_recipe_name": "gpt_oss_120b", "moe_a2a_overlap": True}
BIASES = {"model.add_bias_linear": "false", "model.add_qkv_bias": "false"}
V4 = {"version": "v0.4.0"}
LIBRARY = {"use_recipes": True, "max_steps": 50, "model_family_name": "qwen", "model_recipe_name": "qwen3_30b_a3b"}


def broken(test: TestDefinition, limits: ClusterLimits | None = None) -> dict[str, str]:
    return {violation.rule: violation.message for violation in check_test(test, limits)}


def test_a_sound_test_breaks_no_rule() -> None:
    assert check_test(make_test(), ROOMY) == ()


def test_what_the_launcher_does_not_start_without_is_named_first() -> None:
    test = make_test({"gpu_type": None, "tp": 3, "num_gpus": 16})

    assert list(broken(test))[:2] == ["required-fields", "gpus-divide"]


def test_rules_have_ids_of_their_own_and_name_fields_that_exist() -> None:
    assert len({rule.id for rule in RULES}) == len(RULES)
    tables = {
        "cmd_args",
        "git_repos",
        "nemo_run_repo",
        "time_limit",
        "gate",
        "harvest",
        "extra_container_mounts",
        "extra_cmd_args",
        "extra_env_vars",
    }
    for rule in RULES:
        for field in rule.fields:
            assert field in tables or field.removeprefix("cmd_args.") in TEST_FLAGS, (rule.id, field)


BREAKS: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("required-fields", {"gpu_type": None}, {}, "cmd_args.gpu_type is required"),
    ("required-fields", {"model_recipe_name": ""}, {}, "cmd_args.model_recipe_name is required"),
    ("num-gpus-default", {"num_gpus": None}, {}, "8 are used"),
    ("launcher-returns-early", {"dryrun": True}, {}, "nightbridge render"),
    ("launcher-returns-early", {"list_config_variants": True}, {}, "config_variant"),
    ("recipe-steps", {"use_recipes": True, "max_steps": None}, {}, "needs max_steps"),
    ("qwen3-tokenizer", {"model_family_name": "qwen3", "model_recipe_name": "qwen3_30b_a3b"}, {}, "offline = true"),
    ("sizes-positive", {"tp": 0}, {}, "cmd_args.tp = 0 must be at least 1"),
    ("sizes-positive", {"max_steps": -1}, {}, "cmd_args.max_steps = -1"),
    ("override-known", {}, {"extra_cmd_args": {"train.train_iterz": "5"}}, "did you mean train.train_iters?"),
    ("override-known", {}, {"extra_cmd_args": {"optimizer.lr": "three"}}, "optimizer.lr is a number"),
    ("override-known", {}, {"extra_cmd_args": {"+ddp": "5"}}, "ddp is a table of DistributedDataParallelConfig"),
    ("recipe-known", {"model_family_name": "qwenn"}, NVIDIA, "'llama3_8b' belongs to model_family_name 'llama'"),
    ("recipe-known", {"model_family_name": "lama", "model_recipe_name": "llama4"}, NVIDIA, "name 'lama'; use llama"),
    ("recipe-known", {"model_recipe_name": "llama3_9b"}, NVIDIA, "in family llama; use llama3_8b"),
    ("recipe-known", {"model_recipe_name": "llama3_9b"}, {**NVIDIA, "version": "v0.4.1"}, "in family llama"),
    ("version-unknown", {}, {**NVIDIA, "version": "v0.9.9"}, "'v0.9.9' is none of the releases known"),
    ("experts-parallel", {"ep": 4}, {}, "llama3_8b is a dense model without experts"),
    ("experts-parallel", {"ep": 256, "model_recipe_name": "qwen3_30b_a3b"}, {}, "the 128 experts of qwen3_30b_a3b"),
    ("image-file", {"container_image": "/no/such/image.sqsh"}, {}, "no such file on this machine"),
    # As in a folder that this user cannot enter, which is none to root, the system answers with an error.
    ("image-file", {"container_image": f"/{'long' * 99}.sqsh"}, {}, "no such file on this machine"),
    ("gpus-of-type", {"gpu_type": "gb200", "gpus_per_node": 8}, {}, "nodes of gb200 have 4 GPUs"),
    (
        "flag-decided",
        {},
        {"extra_cmd_args": {"--num_gpus": "4"}},
        "'--num_gpus' is decided by [cmd_args]; write it there",
    ),
    ("flag-decided", {}, {"extra_cmd_args": {"-ng=4": ""}}, "as num_gpus"),
    ("flag-decided", {}, {"extra_cmd_args": {"--tensor_model_parallel_size": "4"}}, "as tp"),
    ("flag-decided", {}, {"extra_cmd_args": {"--hf_token=hf_x": ""}}, "'--hf_token' is decided by [cmd_args]; write"),
    ("flag-decided", {}, {"extra_cmd_args": {"-hf": "hf_x"}}, 'as hf_token = "env:HF_TOKEN"'),
    ("flag-decided", {}, {"extra_cmd_args": {"--account": "a"}}, "the site's"),
    ("flag-decided", {}, {"extra_cmd_args": {"--detach": "false"}}, "remove it"),
    ("flag-decided", {}, {"extra_cmd_args": {"--dryrun": ""}}, "before it submits a job"),
    ("flag-decided", {}, {"extra_cmd_args": {"-l": "/logs"}}, "past the attempt's own folder"),
    ("override-known-later", {}, {"extra_cmd_args": {"modle.lr": "5"}, "version": "main"}, "no field modle"),
    ("override-known-later", {}, {"extra_cmd_args": {"modle.lr": "5"}, "version": "r0.4.0"}, "no field modle"),
    ("override-twice", {}, {"extra_cmd_args": {"train.train_samples": "5"}}, "cmd_args.max_steps"),
    ("override-twice", {"tp": 2}, {"extra_cmd_args": {"model.tensor_model_parallel_size": "2"}}, "cmd_args.tp"),
    (
        "override-twice",
        {"recompute_modules": "mlp"},
        {"extra_cmd_args": {"model.recompute_modules": "[mlp]"}},
        "_modules",
    ),
    ("override-twice", {}, {"extra_cmd_args": {"checkpoint.save_interval": "10"}}, "write cmd_args.save_interval"),
    ("override-twice", {}, {"extra_cmd_args": {"checkpoint.save": "/c"}}, "write cmd_args.save_dir"),
    ("override-twice", {"seq_length": 8192}, {"extra_cmd_args": {"model.seq_length": "4096"}}, "data's to 8192"),
    ("flag-unread", {"seq_length": 4096}, {}, 'write the override model.seq_length = "4096" beside it'),
    ("gpus-divide", {"tp": 3}, {}, "num_gpus 16 is not a multiple of tp 3; use 15 or 18 GPUs"),
    ("gpus-divide", {"tp": 4, "pp": 8}, {}, "tp 4 * pp 8 = 32; use 32 GPUs, or"),
    ("sizes-positive", {}, {"extra_cmd_args": {TP: "0"}}, f"extra_cmd_args: {TP} = 0 must be at least 1"),
    ("sizes-positive", {}, {"extra_cmd_args": {f"++{CP}": " -1 "}}, f"{CP} = -1 must be at least 1"),
    ("gpus-divide", {}, {"extra_cmd_args": {CP: "5"}}, f"num_gpus 16 is not a multiple of {CP} 5; use 15 or 20"),
    ("gpus-divide", {"tp": 4}, {"extra_cmd_args": {CP: "8"}}, f"a multiple of tp 4 * {CP} 8 = 32"),
    (
        "gpus-divide",
        {},
        {**V6, "extra_cmd_args": {"model.transformer.context_parallel_size": "5"}},
        "model.transformer.context_parallel_size 5",
    ),
    ("expert-gpus-divide", {"et": 1}, {"extra_cmd_args": {EP: "12"}}, f"et 1 * {EP} 12 = 12"),
    ("experts-parallel", {}, {"extra_cmd_args": {EP: "2"}}, "llama3_8b is a dense model"),
    ("batch-divides", {"mb": 1, "gb": 12, "pp": 1, "cp": 1}, {"extra_cmd_args": {TP: "2"}}, "data parallel size 8"),
    (
        "gpus-divide",
        {"num_gpus": 12, "tp": 3, "pp": 2, "gpus_per_node": 8},
        {},
        "num_gpus 12, for which 16 train on nodes of 8, is not a multiple of tp 3 * pp 2 = 6; use 24 GPUs",
    ),
    ("expert-gpus-divide", {"num_gpus": 12, "ep": 12, "gpus_per_node": 8}, {}, "for which 16 train on nodes of 8, is"),
    (
        "batch-divides",
        {**FULL, "num_gpus": 12, "gb": 12, "gpus_per_node": 8},
        {},
        "* data parallel size 16 (num_gpus 12,",
    ),
    ("nodes-filled", {"num_gpus": 12, "tp": 3}, {}, "so 16 GPUs train, which is not a multiple of tp 3, and Megatron-"),
    ("learning-rate", {"use_recipes": True, "lr": -1.0}, {}, "cmd_args.lr = -1 must not be negative"),
    ("learning-rate", {"use_recipes": True, "lr": 1e-4, "min_lr": 1e-3}, {}, "min_lr 0.001 is more than lr 0.0001"),
    ("expert-gpus-divide", {"et": 1, "ep": 12}, {}, "et 1 * ep 12 = 12"),
    ("batch-divides", {"mb": 2, "gb": 5}, {}, "gb 5 is not a multiple of mb 2; use 4 or 6"),
    ("batch-divides", {"mb": 1, "gb": 12, "tp": 2, "pp": 1, "cp": 1}, {}, "data parallel size 8"),
    ("batch-divides", {"mb": 4, "gb": 2}, {}, "use 4"),
    ("expert-gpus-divide", {"ep": 12}, {}, "ep 12; change"),
    (
        "batch-divides",
        {**FULL, "gb": 16, "use_megatron_fsdp": True, "num_distributed_optimizer_instances": 2},
        {},
        "* num_distributed_optimizer_instances 2 = 32",
    ),
    (
        "batch-interleaves",
        {**FULL, "pp": 4, "vp": 2, "gb": 24},
        {},
        "gb 24 is not a multiple of mb 1 * data parallel size 4 (num_gpus 16 / (tp 1 * pp 4 * cp 1)) * pp 4 of a "
        "virtual pipeline = 16; use 16 or 32",
    ),
    ("batch-interleaves", {**FULL, "pp": 4, "gb": 8}, {"extra_cmd_args": {VP: "2"}}, "= 16; use 16"),
    ("override-grammar", {}, {"extra_cmd_args": {RECOMPUTED: "[core_attn,mlp"}}, "for '[' in it; write a list as"),
    ("override-grammar", {}, {"extra_cmd_args": {RECOMPUTED: "[core_attn,]"}}, "cannot read '[core_attn,]'"),
    ("override-grammar", {}, {"extra_cmd_args": {RECOMPUTED: "[core_attn]]"}}, "cannot read '[core_attn]]'"),
    ("override-grammar", {}, {"extra_cmd_args": {RECOMPUTED: "[core_attn}"}}, "cannot read '[core_attn}'"),
    ("precision-gpu", {"gpu_type": "h100"}, {"extra_cmd_args": MXFP8}, "no H100 has mxfp8 or nvfp4"),
    (
        "precision-gpu",
        {"gpu_type": "h100"},
        {"extra_cmd_args": {"+mixed_precision": "'bf16_with_nvfp4_mixed'"}},
        "use fp8 or bf16, unless the nodes are newer",
    ),
    ("fsdp-sizes", {"use_megatron_fsdp": True, "pp": 2, "vp": 4}, {}, "not pp 2 * vp 4"),
    ("optimizer-instances", {"num_distributed_optimizer_instances": 2}, {}, "needs use_megatron_fsdp = true"),
    ("virtual-pipeline", {"pp": 1, "vp": 2}, {}, "use vp = 1 or pp > 1"),
    ("virtual-pipeline", {**HYBRID, "pp": 2, "vp": 2}, {}, "vp 2: models of Mamba's layers have no virtual pipeline"),
    ("layers-divide", {"num_layers": 32, "pp": 3}, {}, "num_layers 32 is not a multiple of pp 3; change"),
    ("layers-divide", {"num_layers": 32, "pp": 4, "vp": 3}, {}, "pp 4 * vp 3 = 12"),
    (
        "layers-divide",
        {"pp": 4},
        {"extra_cmd_args": {"model.num_layers": "30"}},
        "model.num_layers 30 is not a multiple of pp 4;",
    ),
    (
        "layers-divide",
        {},
        {"extra_cmd_args": {PP: "3", "model.transformer.num_layers": "32"}, "version": "v0.6.0"},
        f"model.transformer.num_layers 32 is not a multiple of {PP} 3;",
    ),
    (
        "virtual-pipeline",
        {"pp": 1},
        {"extra_cmd_args": {"model.virtual_pipeline_model_parallel_size": "2"}},
        "model.virtual_pipeline_model_parallel_size 2 splits the stages of a pipeline, and pp 1 is none",
    ),
    ("virtual-pipeline", {"pp": 1}, {"extra_cmd_args": {VP: "1"}}, f"{VP} 1 splits the stages"),
    ("dispatcher-gpu", {"gpu_type": "gb200", "moe_flex_dispatcher_backend": "deepep"}, {}, "is ignored on gb200"),
    ("recompute-known", {"recompute_modules": ["mlp", "core_atn"]}, {}, "'core_atn' is not a module"),
    (
        "recompute-known",
        {"recompute_modules": "MLP"},
        {"version": "main"},
        "'MLP' is not a module to recompute; use mlp",
    ),
    ("recompute-known", {"recompute_modules": "attention"}, {}, "use core_attn, moe_act"),
    ("fsdp-sizes", {"use_megatron_fsdp": True}, {"extra_cmd_args": {CP: "2"}}, f"not {CP} 2;"),
    (
        "batch-divides",
        {"tp": 1, "pp": 1, "cp": 1, "gb": 100},
        {"extra_cmd_args": {MB: "3"}},
        f"not a multiple of {MB} 3 * data parallel",
    ),
    ("sizes-positive", {}, {"extra_cmd_args": {MB: "0"}}, f"{MB} = 0 must be at least 1"),
    (
        "batch-override-divides",
        {"mb": 3},
        {"extra_cmd_args": {"train.global_batch_size": "100"}},
        "train.global_batch_size 100 is not a multiple of mb 3; use 99 or 102, and write it as cmd_args.gb",
    ),
    ("gpus-divide", {"num_gpus": 12, "tp": 8, "gpus_per_node": 8}, {"version": "v0.6.0"}, "is not a multiple of tp 8"),
    ("layers-counted", {"num_layers": 4}, {}, "write the override model.num_layers instead"),
    ("layers-counted", {"num_layers": 4}, V6, "override model.transformer.num_layers"),
    ("layers-counted", {"num_layers": 4, "model_recipe_name": "qwen3_30b_a3b"}, {}, "fails with it for qwen3_30b_a3b"),
    ("graph-scope-needed", TE, {"version": "v0.4.1"}, "needs a cuda_graph_scope before v0.4.2"),
    ("recompute-one", {"recompute_num_layers": 2, "recompute_modules": ["mlp"]}, {}, "_layers and recompute_modules"),
    ("recompute-one", {"activation_offload_layers": 2, "recompute_modules": "mlp"}, {}, "exclude each other; keep one"),
    ("fsdp-graphs", {"use_megatron_fsdp": True, "cuda_graph_impl": "local"}, {}, 'write cuda_graph_impl = "none"'),
    ("offload-graphs", {"activation_offload_layers": 4, "cuda_graph_impl": "local"}, {}, "whatever the scope"),
    ("offload-pipeline", {"activation_offload_layers": 4, "pp": 2}, {}, "needs pp 1, not 2"),
    ("offload-layer-graphs", {"activation_offload_layers": 4, **TE}, V6, '"full_iteration"'),
    ("local-graph-scope", {"cuda_graph_impl": "local", "cuda_graph_scope": "attn"}, V6, "needs transformer_engine"),
    ("graph-full-recompute", {**TE, "recompute_num_layers": 2}, {}, "excludes CUDA graphs of layers"),
    ("graph-full-recompute", {**TE, "recompute_num_layers": 2}, V6, "excludes CUDA graphs of layers"),
    ("overlap-layer-graphs", {"moe_a2a_overlap": True, **TE, "cuda_graph_scope": ["attn", "mlp"]}, V6, "captures mlp"),
    ("choice", {"cuda_graph_impl": "full_iteration"}, V6, 'cuda_graph_impl = "local" and cuda_graph_scope'),
    ("graph-scope", {**TE, "cuda_graph_scope": "full_iteration"}, {}, 'cuda_graph_impl = "local"'),
    ("graph-scope", {"cuda_graph_scope": ["attn", "full_iteration"]}, {}, "excludes all others"),
    ("graph-moe-router", {"cuda_graph_scope": ["moe", "moe_router"]}, {}, "keep one of them"),
    ("graph-moe-preprocess", {**TE, "cuda_graph_scope": ["moe_preprocess"]}, {}, "add moe_router"),
    ("graph-recompute", {**TE, "cuda_graph_scope": "moe_router", "recompute_modules": "moe"}, {}, "remove moe"),
    (
        "graph-recompute-dropout",
        {**TE, "cuda_graph_scope": ["attn"], "recompute_modules": ["core_attn"]},
        {},
        "core_attn is recomputed inside the captured attn",
    ),
    ("overlap-graphs", {"moe_a2a_overlap": True, "cuda_graph_impl": "local"}, {}, "is local"),
    ("overlap-graphs", {"moe_a2a_overlap": True, **TE, "cuda_graph_scope": ["moe"]}, {}, "captures moe"),
    ("overlap-needs", {"moe_a2a_overlap": True, "ep": 1}, {}, "needs ep > 1"),
    ("overlap-needs", {"moe_a2a_overlap": True, "pp": 2, "vp": 1}, {}, "needs a virtual pipeline"),
    ("overlap-needs", {"moe_a2a_overlap": True, "recompute_num_layers": 1}, {}, "remove recompute_num_layers"),
    ("overlap-needs", {"moe_a2a_overlap": True, "recompute_modules": ["moe"]}, {}, "recomputing moe"),
    ("overlap-biases", {**GPT_OSS, **TE, "cuda_graph_scope": "attn"}, V4, "leave attn out of cuda_graph_scope"),
    ("overlap-biases", {**GPT_OSS, **TE, "cuda_graph_scope": ["moe_router", "attn"]}, V6, "gpt_oss_120b has biases"),
    ("expert-gpus-divide", {"et": 3, "ep": 4, "use_recipes": True}, V6, "et 3 * ep 4 = 12"),
    ("tokendrop-dispatcher", {**DEEPSEEK, "use_tokendrop": True, "gpu_type": "gb300"}, V6, "by HybridEP; remove it"),
    ("tokendrop-dispatcher", {**DEEPSEEK, "use_tokendrop": False, "gpu_type": "gb200"}, V6, "true or false, fails"),
    ("deepseek-layout", {**DEEPSEEK, "pp": 4, "vp": 8}, {}, "write pipeline_model_parallel_layout"),
    ("pipeline-layout", {**DEEPSEEK, "pp": 5, LAYOUT: "Et*4|(t*4|)*14tmL"}, {}, "16 stages, which 5 ranks of the pipe"),
    (
        "pipeline-layout",
        {**DEEPSEEK, "pp": 4, "vp": 2, LAYOUT: "Et*4|(t*4|)*14tmL"},
        {},
        "has 16 stages, not 4 * 2 of a",
    ),
    ("pipeline-layout", {**DEEPSEEK, LAYOUT: "Et*4|(t*4|)*14ttmL"}, {}, "62 decoder layers (t), not the model's 61"),
    (
        "pipeline-layout",
        {**DEEPSEEK, "num_layers": 8, LAYOUT: "Et*4|t*5L"},
        {},
        "9 decoder layers (t), not the model's 8",
    ),
    ("pipeline-layout", {**DEEPSEEK, LAYOUT: "Et*4|(t*4|)*14dmL"}, {}, "'d', which is not a layer; write E, t, m, L"),
    (
        "hybridep-domain",
        {**DEEPSEEK, "ep": 128, "gpu_type": "gb300"},
        V6,
        "ep 128 is more than the 72 GPUs of an NVLink",
    ),
    ("container-named", {"container_image": None}, {}, 'or "none"'),
    (
        "container-needed",
        {"container_image": "none"},
        {"url": "https://github.com/NVIDIA-NeMo/Megatron-Bridge.git"},
        "in a container only; name an image",
    ),
    (
        "image-reference",
        {"container_image": "nvcr.io#nvidia/nemo:26 04"},
        {},
        "is not a valid image reference; write REGISTRY/IMAGE:TAG",
    ),
    ("image-reference", {"container_image": "nvcr.io#Nvidia/NeMo:26.04"}, {}, "REGISTRY#IMAGE:TAG"),
    ("hub-token", {"task": "sft"}, {}, 'hf_token = "env:HF_TOKEN"'),
    ("hub-token", {"tokenizer_type": "HuggingFaceTokenizer"}, {}, "no token is set"),
    (
        "checkpoint-size",
        {"model_recipe_name": "llama3_70b"},
        {},
        "about 980 GB (70 billion parameters of 14 bytes with the optimiser's state), more than "
        'harvest.max_checkpoint_bytes, 200 GB; write harvest.checkpoint = "none"',
    ),
    ("checkpoint-size-unknown", {"num_layers": 4}, {}, "cannot tell the size of a checkpoint of llama3_8b"),
    ("gate-band", {}, {"gate": GatePolicy(step_time=5)}, "gate.step_time = 5 is 500%; write 0.05 for 5 %"),
    (
        "steps-timed",
        {"max_steps": 50},
        {"extra_cmd_args": {"logger.log_interval": "26"}},
        "'logger.log_interval' = 26 logs one time in 50 steps, so every night would fail for missing step times; "
        "write at most 25, best 1",
    ),
    ("steps-timed", {"max_steps": 50}, {"extra_cmd_args": {"++logger.log_interval": "51"}}, "logs no time in 50 steps"),
    (
        "steps-timed",
        {"max_steps": 50},
        {"extra_cmd_args": {"logger.log_interval": "0"}},
        "must be at least 1: the job fails",
    ),
    ("checkpoint-interval", {}, {"harvest": HarvestPolicy(checkpoint="all")}, "write cmd_args.save_interval"),
    ("resumes", {"load_dir": "/old"}, {}, "it cannot be a baseline"),
    ("nodes-filled", {"num_gpus": 12}, {}, "tasks on each of 2, so 16 GPUs train; write num_gpus = 16"),
    ("nodes-filled", {"num_gpus": 7}, {}, "8 tasks on each of 1, so 8 GPUs train"),
    ("nodes-filled", {"num_gpus": 7}, {}, "8 GPUs (as h100 nodes usually have; the cluster may differ):"),
    ("nodes-filled", {"num_gpus": 7, "gpus_per_node": 4}, {}, "do not fill nodes of 4 GPUs: the launcher"),
    ("mount-syntax", {}, {"extra_container_mounts": ("/a",)}, "HOST_PATH:/CONTAINER_PATH"),
    ("mount-syntax", {}, {"extra_container_mounts": ("/a:b",)}, "HOST_PATH:/CONTAINER_PATH"),
    ("time-limit-syntax", {}, {"time_limit": "soon"}, "HH:MM:SS"),
    ("one-cluster", {"additional_slurm_params": "qos=high;clusters=other"}, {}, "sends the job to another cluster"),
    ("path-absolute", {"save_dir": "ckpt"}, {}, "save_dir = 'ckpt' is not an absolute path; write the full path"),
    ("path-absolute", {"load_dir": "~/old"}, {}, "cmd_args.load_dir"),
    (
        "data-needs",
        {"data": "rp2", "dataset_paths": ["/a"]},
        {},
        "cmd_args.data = 'rp2' needs cmd_args.index_mapping_dir",
    ),
    (
        "data-recipes",
        {"data": "c4", "c4_root": "/c4", "use_recipes": True},
        {"version": "v0.6.0"},
        "remove use_recipes",
    ),
    ("data-needs", {"tokenizer_type": "SentencePieceTokenizer"}, {}, "needs cmd_args.tokenizer_model; write it"),
    ("pin-syntax", {}, {"version": ""}, "git_repos: commit = '' is not a branch, tag or commit"),
    (
        "pin-syntax",
        {},
        {"nemo_run_repo": GitRepo(url="https://x", commit="v0.4 .2")},
        "nemo_run_repo: commit = 'v0.4 .2'",
    ),
    ("pin-syntax", {}, {"nemo_run_repo": GitRepo(url=" ")}, "nemo_run_repo: url is empty"),
    (
        "mount-syntax",
        {},
        {"git_repos": (GitRepo(url="Megatron-Bridge", mount_as="/opt/a,b"),)},
        "mount_as = '/opt/a,b'",
    ),
    ("one-job", {"additional_slurm_params": "array=0-3"}, {}, "makes several jobs of an attempt"),
    ("one-job", {"additional_slurm_params": "qos=high;test_only"}, {}, "submits nothing"),
    ("time-limit-ambiguous", {}, {"time_limit": "01:30"}, "is read as hours and minutes"),
    ("one-profiler", {"enable_nsys": True, "pytorch_profiler": True}, {}, "switch one off"),
    ("profiling-window", {"enable_nsys": True, "profiling_start_step": 12, "profiling_stop_step": 11}, {}, "12 to 11"),
    ("profiling-window", {"pytorch_profiler": True, "max_steps": 10}, {}, "10 to 11 is not inside the run's 10 steps"),
    (
        "steps-unprofiled",
        {"enable_nsys": True, "profiling_start_step": 10, "profiling_stop_step": 49},
        {},
        "slows every step after the warm-up of 10",
    ),
    (
        "steps-unprofiled",
        {"pytorch_profiler": True, "profiling_start_step": 12, "profiling_stop_step": 46},
        {"gate": GatePolicy(post_profiling_steps=3)},
        "the warm-up of 10",
    ),
    (
        "steps-unprofiled",
        {"enable_nsys": True, "profiling_start_step": 1, "profiling_stop_step": 5, "max_steps": 6},
        {},
        "the warm-up of 3",
    ),
    ("flag-exists", {"num_moe_experts": 8}, {}, "it exists from v0.6.0 on"),
    (
        "flag-unread",
        {"lr": 1e-3},
        {},
        "cmd_args.lr has no effect without use_recipes, so the recipe's own value trains",
    ),
    ("flag-unread", {"warmup_iters": 0}, {}, "write the override scheduler.lr_warmup_iters"),
    ("flag-unread", {"packed_sequence": True}, {}, "nothing in this version of Megatron-Bridge reads it"),
    ("flag-unread", {"optimizer_type": "muon"}, V6, "cmd_args.optimizer_type has no effect: nothing"),
    (
        "flag-unread",
        {"use_recipes": True, "et": 2},
        {"version": "v0.5.1"},
        "cmd_args.et has no effect with use_recipes",
    ),
    ("flag-unread", {"use_recipes": True, "num_layers": 4}, {}, "cmd_args.num_layers has no effect with use_recipes"),
    ("flag-unread", {"use_recipes": True, "compute_dtype": "fp8_mx"}, {}, "cmd_args.compute_dtype has no effect"),
    ("flag-unread", {"use_recipes": True}, {"extra_cmd_args": {"optimizer.lr": "1e-3"}}, "drops all overrides"),
    ("choice", {"gpu_type": "h10"}, {}, "did you mean 'h100'?"),
    ("choice", {"gpu_type": "H100"}, {}, "did you mean 'h100'?"),
    ("launch-safe", {"save_dir": "a b"}, {}, "white space"),
    ("launch-safe", {"additional_slurm_params": "qos=high;constraint=gpu"}, {}, "a shell character"),
    ("launch-safe", {"additional_slurm_params": "qos=high;comment=a b"}, V6, "white space"),
    ("version-unknown", {}, {"version": "main"}, "names no version"),
    ("override-grammar", {}, {"extra_cmd_args": {"a b": "1"}}, "'a b' is not an override"),
    ("override-grammar", {}, {"extra_cmd_args": {"+++a": "1"}}, "is not an override"),
    ("override-grammar", {}, {"extra_cmd_args": {"train.iters": ""}}, "has no value"),
    ("override-grammar", {}, {"extra_cmd_args": {"logger.wandb_exp_name": "a=b"}}, "cannot read 'a=b', for '=' in it"),
    ("override-grammar", {}, {"extra_cmd_args": {"logger.wandb_exp_name": "a,b"}}, "write a list as [a,b]"),
    ("override-grammar", {}, {"extra_cmd_args": {"logger.wandb_exp_name": "x(1)"}}, "for '(' in it"),
    ("override-known", {}, {"extra_cmd_args": {"rng.seed": "007"}}, "rng.seed is a whole number"),
    (
        "override-moved",
        {},
        {"extra_cmd_args": {"model.num_layers": "4"}, "version": "v0.6.0"},
        "model.transformer.num_layers",
    ),
    (
        "wandb-together",
        {"wandb_project_name": "p"},
        {"secrets": {"WANDB_API_KEY": SecretRef(source="env", name="WANDB_API_KEY")}},
        "both wandb_project_name and wandb_experiment_name",
    ),
    (
        "wandb-together",
        {"wandb_project_name": "p", "wandb_experiment_name": "a=b"},
        {"secrets": {"WANDB_API_KEY": SecretRef(source="env", name="WANDB_API_KEY")}},
        "cmd_args.wandb_experiment_name has '=', which Hydra cannot read",
    ),
    (
        "wandb-together",
        {"wandb_project_name": "1.10", "wandb_experiment_name": "e"},
        {"secrets": {"WANDB_API_KEY": SecretRef(source="env", name="WANDB_API_KEY")}},
        "cmd_args.wandb_project_name = '1.10' is not text to Hydra",
    ),
]


@pytest.mark.parametrize(("rule", "args", "fields", "expected"), BREAKS)
def test_what_breaks_a_rule_is_reported_with_the_way_out(
    rule: str, args: dict[str, Any], fields: Any, expected: str
) -> None:
    assert expected in broken(make_test(args, **fields))[rule]


@pytest.mark.parametrize(
    ("rule", "args", "fields"),
    [
        ("gpus-divide", {"tp": 2, "pp": 4}, {}),
        ("learning-rate", {"use_recipes": True, "lr": 1e-4, "min_lr": 1e-4}, {}),
        ("learning-rate", {"use_recipes": True, "lr": 0.0, "min_lr": 1e-4}, {}),
        (
            "learning-rate",
            {"use_recipes": True, "lr": 1e-4, "min_lr": 1e-3},
            {"extra_cmd_args": {"optimizer.min_lr": "1e-5"}},
        ),
        ("gpus-divide", {"num_gpus": 0, "tp": 2}, {}),
        ("gpus-divide", {"num_gpus": 12, "tp": 3}, {}),  # a guess at the nodes' GPUs refuses nothing
        ("gpus-divide", {"num_gpus": 12, "tp": 4, "gpus_per_node": 8}, {}),
        ("batch-divides", {**FULL, "num_gpus": 12, "gb": 16, "gpus_per_node": 8}, {}),
        ("gpus-divide", {"tp": 2}, {"extra_cmd_args": {CP: "4", "model.virtual_pipeline_model_parallel_size": "null"}}),
        ("gpus-divide", {}, {"extra_cmd_args": {f"~{CP}": "", TP: "a", "model.num_layers": "5"}}),
        ("gpus-divide", {"use_recipes": True}, {"extra_cmd_args": {CP: "5"}}),
        ("gpus-divide", {"cp": 2}, {"extra_cmd_args": {CP: "5"}}),
        ("expert-gpus-divide", {}, {"extra_cmd_args": {ET: "12"}}),
        ("expert-gpus-divide", {"et": 12}, {}),
        ("fsdp-sizes", {"use_megatron_fsdp": True, "pp": 1, "vp": 1, "tp": 2}, {}),
        ("optimizer-instances", {"num_distributed_optimizer_instances": 1}, {}),
        ("batch-interleaves", {**FULL, "pp": 4, "vp": 2, "gb": 32}, {}),
        ("batch-interleaves", {**FULL, "pp": 4, "vp": 1, "gb": 24}, {}),
        ("batch-interleaves", {**FULL, "pp": 4, "vp": 2, "gb": 26}, {}),  # another rule's
        ("batch-interleaves", {"pp": 4, "vp": 2, "gb": 24, "mb": 1}, {}),
        ("batch-interleaves", {**FULL, "pp": 4, "vp": 2, "gb": 24, "use_recipes": True}, {}),
        (
            "batch-interleaves",
            {**FULL, "pp": 4, "vp": 2, "gb": 24},
            {"extra_cmd_args": {"model.microbatch_group_size_per_vp_stage": "6"}},
        ),
        (
            "batch-interleaves",
            {**FULL, "pp": 4, "vp": 2, "gb": 24},
            {"extra_cmd_args": {"train.rampup_batch_size": "[16,8,1000000]"}},
        ),
        ("override-grammar", {}, {"extra_cmd_args": {RECOMPUTED: "[core_attn,mlp]"}}),
        ("override-grammar", {}, {"extra_cmd_args": {RECOMPUTED: "[]"}}),
        ("override-grammar", {}, {"extra_cmd_args": {"model.cp_comm_type": "[[a,{b:1}],{}]"}}),
        ("precision-gpu", {"gpu_type": "b200"}, {"extra_cmd_args": MXFP8}),
        (
            "precision-gpu",
            {"gpu_type": "h100"},
            {"extra_cmd_args": {"mixed_precision": "bf16_with_fp8_current_scaling_mixed"}},
        ),
        ("virtual-pipeline", {"vp": 2}, {}),
        ("virtual-pipeline", {**HYBRID, "pp": 2, "vp": 2}, {"version": "main"}),
        ("virtual-pipeline", {**HYBRID, "pp": 2, "vp": 1}, {}),
        ("virtual-pipeline", {"pp": 1, "vp": "None"}, {}),
        ("layers-divide", {"num_layers": 32, "pp": 4, "vp": 2}, {}),
        ("layers-divide", {"num_layers": 61, "pp": 4, "pipeline_model_parallel_layout": "Et*15|t*46L"}, {}),
        ("virtual-pipeline", {}, {"extra_cmd_args": {VP: "1"}}),
        ("virtual-pipeline", {"pp": 1, "vp": 1}, {}),
        ("dispatcher-gpu", {"gpu_type": "gb200", "moe_flex_dispatcher_backend": "hybridep"}, {}),
        ("dispatcher-gpu", {"gpu_type": "b200", "moe_flex_dispatcher_backend": "deepep"}, {}),
        ("recompute-known", {"recompute_modules": "[core_attn, mhc]"}, {}),
        ("recompute-known", {"recompute_modules": "[gdn, gdp_qkv]"}, {}),
        ("recompute-known", {"recompute_modules": "a_new_one, moe_expert"}, {"version": "main"}),
        ("layers-divide", {"num_layers": 126, "pp": 8, "vp": 8, "model_recipe_name": "llama31_405b"}, {}),
        (
            "layers-divide",
            {"pp": 4},
            {"extra_cmd_args": {"model.num_layers": "30", "+model.account_for_loss_in_pipeline_split": "true"}},
        ),
        ("batch-divides", {"mb": 3}, {"extra_cmd_args": {"train.global_batch_size": "100"}}),
        ("batch-override-divides", {"mb": 3, "gb": 100}, {}),
        ("gpus-divide", {"num_gpus": 12, "tp": 8, "gpus_per_node": 8}, {"version": "v0.5.1"}),
        ("fsdp-graphs", {"use_megatron_fsdp": True, "cuda_graph_impl": "none", "cuda_graph_scope": "attn"}, {}),
        ("offload-graphs", {"activation_offload_layers": 4, "cuda_graph_impl": "none"}, {}),
        ("offload-pipeline", {"activation_offload_layers": 4}, {}),
        ("graph-scope", {"cuda_graph_impl": "local", "cuda_graph_scope": "full_iteration"}, {}),
        ("graph-scope", {"cuda_graph_impl": "local", "cuda_graph_scope": ["attn", "mlp"]}, {}),
        ("graph-moe-router", {"cuda_graph_impl": "none", "cuda_graph_scope": ["moe", "moe_router"]}, {}),
        ("graph-moe-preprocess", {"cuda_graph_impl": "local", "cuda_graph_scope": ["moe_preprocess"]}, {}),
        (
            "graph-recompute",
            {"cuda_graph_impl": "none", "cuda_graph_scope": "moe_router", "recompute_modules": "moe"},
            {},
        ),
        ("graph-recompute-dropout", {**TE, "cuda_graph_scope": ["attn"], "recompute_modules": ["mla_up_proj"]}, {}),
        ("overlap-graphs", {"moe_a2a_overlap": True, **TE, "cuda_graph_scope": ["moe_router", "moe_preprocess"]}, {}),
        ("overlap-needs", {"moe_a2a_overlap": True, "ep": 8, "pp": 2, "vp": 12}, {}),
        ("tokendrop-dispatcher", {**DEEPSEEK, "use_tokendrop": True, "gpu_type": "h100"}, V6),
        ("tokendrop-dispatcher", {**DEEPSEEK, "gpu_type": "gb200"}, V6),
        ("tokendrop-dispatcher", {**DEEPSEEK, "use_tokendrop": True, "gpu_type": "gb200", "use_recipes": True}, V6),
        (
            "tokendrop-dispatcher",
            {**DEEPSEEK, "use_tokendrop": True, "gpu_type": "gb200"},
            {**V6, "extra_cmd_args": {"model.moe_token_dispatcher_type": "alltoall"}},
        ),
        ("overlap-biases", {**GPT_OSS, **TE, "cuda_graph_scope": "attn"}, {"version": "v0.3.1"}),
        ("overlap-biases", {**GPT_OSS, **TE, "cuda_graph_scope": "moe_router"}, V6),
        ("overlap-biases", {**GPT_OSS, **TE, "cuda_graph_scope": "attn", "moe_a2a_overlap": False}, V6),
        ("overlap-biases", {**GPT_OSS, "cuda_graph_scope": "attn"}, V6),  # the recipe may capture nothing
        ("overlap-biases", {**GPT_OSS, **TE, "cuda_graph_scope": "attn", "use_recipes": True}, V6),
        ("overlap-biases", {**GPT_OSS, **TE, "cuda_graph_scope": "attn"}, {**V6, "extra_cmd_args": BIASES}),
        ("overlap-biases", {**GPT_OSS, **DEEPSEEK, **TE, "cuda_graph_scope": "attn"}, V6),
        ("deepseek-layout", {**DEEPSEEK, "pp": 2, "vp": 8}, {}),
        ("deepseek-layout", {**DEEPSEEK, "pp": 3, "vp": 1, "pipeline_model_parallel_layout": "Et*20|t*20|t*21mL"}, {}),
        ("deepseek-layout", {**DEEPSEEK, "pp": 3}, {}),
        ("pipeline-layout", {**DEEPSEEK, "pp": 4, "vp": 4, LAYOUT: "Et*4|(t*4|)*14tmL"}, {}),
        ("pipeline-layout", {**DEEPSEEK, "pp": 4, "vp": 1, LAYOUT: "Et*4|(t*4|)*14tmL"}, {}),
        ("pipeline-layout", {**DEEPSEEK, "pp": 4, "vp": "None", LAYOUT: "Et*4|(t*4|)*14tmL"}, {}),
        ("pipeline-layout", {**DEEPSEEK, "pp": 3, "use_recipes": True, LAYOUT: "Et|tL"}, {}),
        ("pipeline-layout", {"model_recipe_name": "qwen4", LAYOUT: "Et|tL"}, {}),
        ("hybridep-domain", {**DEEPSEEK, "ep": 64, "gpu_type": "gb300"}, V6),
        ("hybridep-domain", {**DEEPSEEK, "ep": 128, "gpu_type": "h100"}, V6),
        ("hybridep-domain", {**DEEPSEEK, "ep": 128, "gpu_type": "gb300"}, {"version": "v0.5.0"}),
        ("hybridep-domain", {"model_recipe_name": "gpt_oss_120b", "ep": 128, "gpu_type": "gb300"}, V6),
        ("batch-divides", {"mb": 1, "gb": 12, "tp": 2}, {}),
        ("batch-divides", {"mb": 1, "gb": 16, "tp": 1, "pp": 1, "cp": 1}, {}),
        ("batch-divides", {"gb": 5}, {}),
        ("mount-syntax", {}, {"extra_container_mounts": ("/a:/b:ro", "./x:/y")}),
        ("data-recipes", {"data": "c4", "c4_root": "/c4"}, {}),
        ("data-recipes", {"data": "c4", "use_recipes": True, "model_family_name": "wan"}, {}),
        ("data-needs", {"data": "c4", "c4_root": "/c4", "tokenizer_type": "NullTokenizer"}, {}),
        ("pin-syntax", {}, {"version": "refs/pull/12/head"}),
        ("pin-syntax", {}, {"version": "5f" * 20}),
        ("path-absolute", {"save_dir": "/ckpt", "load_dir": "msc://profile/ckpt", "wandb_save_dir": ""}, {}),
        ("nodes-filled", {"num_gpus": 2, "gpus_per_node": 2}, {}),
        ("nodes-filled", {"num_gpus": 7, "gpu_type": "none we know"}, {}),
        ("time-limit-ambiguous", {}, {"time_limit": "1-02:30"}),
        ("profiling-window", {"max_steps": 5}, {}),
        ("steps-unprofiled", {"enable_nsys": True, "profiling_start_step": 10, "profiling_stop_step": 48}, {}),
        ("steps-unprofiled", {"enable_nsys": True, "profiling_start_step": 11, "profiling_stop_step": 50}, {}),
        ("steps-unprofiled", {"profiling_start_step": 1, "profiling_stop_step": 50}, {}),
        (
            "steps-unprofiled",
            {"enable_nsys": True, "profiling_start_step": 0, "profiling_stop_step": 50, "load_dir": "/a"},
            {},
        ),
        ("steps-timed", {"max_steps": 50}, {"extra_cmd_args": {"logger.log_interval": "25"}}),
        ("steps-timed", {"max_steps": 2}, {"extra_cmd_args": {"logger.log_interval": "2"}}),
        ("steps-timed", {"max_steps": 50}, {"extra_cmd_args": {"logger.tensorboard_log_interval": "50"}}),
        (
            "steps-timed",
            {"max_steps": 50, "use_recipes": True},
            {"extra_cmd_args": {"logger.log_interval": "50"}, "version": "v0.4.2"},
        ),
        ("qwen3-tokenizer", {"model_family_name": "qwen", "model_recipe_name": "qwen3_30b_a3b"}, {}),
        (
            "qwen3-tokenizer",
            {"model_family_name": "qwen3", "model_recipe_name": "qwen3_30b_a3b"},
            {"version": "v0.3.1"},
        ),
        ("layers-counted", {"num_layers": 4, "model_recipe_name": "deepseek_v3"}, {}),
        ("layers-counted", {"num_layers": 4, "first_k_dense_replace": 4}, {}),
        ("layers-counted", {"num_layers": 8, "first_k_dense_replace": 0, "model_recipe_name": "qwen3_30b_a3b"}, {}),
        ("graph-scope-needed", TE, {}),
        ("graph-scope-needed", {**TE, "cuda_graph_scope": ["attn"]}, {"version": "v0.4.1"}),
        ("recompute-one", {"recompute_num_layers": 2, "recompute_modules": [], "activation_offload_layers": 0}, {}),
        ("launch-safe", {"additional_slurm_params": "qos=high;constraint=gpu"}, {"version": "v0.5.0"}),
        ("override-twice", {"recompute_modules": []}, {"extra_cmd_args": {"model.recompute_modules": "[mlp]"}}),
        (
            "override-twice",
            {"recompute_modules": ["mlp"]},
            {"url": "/my/bridge", "extra_cmd_args": {"model.recompute_modules": "[mlp]"}},
        ),
        ("recompute-one", {"use_recipes": True, "recompute_num_layers": 2, "recompute_modules": ["mlp"]}, {}),
        (
            "override-twice",
            {},
            {"extra_cmd_args": {"checkpoint.save": "/c"}, "harvest": HarvestPolicy(checkpoint="none")},
        ),
        ("override-twice", {"seq_length": 4096}, {"extra_cmd_args": {"model.seq_length": "4096"}}),
        ("flag-unread", {"use_recipes": True, "et": 2}, {"version": "v0.6.0"}),
        ("flag-unread", {"seq_length": 4096}, {"extra_cmd_args": {"model.seq_length": "4096"}}),
        ("flag-unread", {"seq_length": 4096}, {"extra_cmd_args": {"++model.seq_length": "4096"}}),
        ("flag-unread", {"seq_length": 4096}, V6),
        ("flag-unread", {"use_recipes": True, "lr": 1e-3, "warmup_iters": 5, "compute_dtype": "bf16"}, {}),
        ("flag-unread", {"use_recipes": True, "nccl_ub": True}, {**V6, "extra_cmd_args": {"optimizer.lr": "1e-3"}}),
        ("flag-unread", {"optimizer_type": "muon", "packed_sequence": False, "dataset_name": ""}, {}),
        ("flag-unread", {"lr": 1e-3}, {"url": "/practice/bridge"}),
        ("flag-unread", {"lr": 1e-3}, {"git_repos": (GitRepo(url="https://x/own", launcher="setup_experiment.py"),)}),
        ("choice", {"domain": "LLM"}, {}),
        ("choice", {"cuda_graph_scope": ["attn", "mlp"]}, {}),
        ("launcher-returns-early", {"dryrun": False}, {}),
        ("version-unknown", {}, {"version": "r0.4.0"}),
        (
            "override-grammar",
            {},
            {"extra_cmd_args": {"a": "s3://b/c-1.5", "b": "{x:[1,-2]}", "c": "int(5)", "d": "a@b:1"}},
        ),
        ("override-grammar", {}, {"extra_cmd_args": {"a.b_c.0": "[1,2]", "++a": "1", "~x.y": "", "--new_flag": ""}}),
        (
            "flag-decided",
            {},
            {"extra_cmd_args": {"--csp": "x", "-E": "A=1", "--num_g": "4", "--unknown": "", "-tpx": "1"}},
        ),
        ("override-moved", {}, {"extra_cmd_args": {"model.num_layers": "4"}}),
        ("override-moved", {}, {"extra_cmd_args": {"model.seq_length": "4"}, "version": "v0.6.0"}),
        ("wandb-together", {"wandb_project_name": "p"}, {}),
        ("overlap-graphs", {"moe_a2a_overlap": True, **WHOLE}, {"version": "v0.5.0"}),
        ("overlap-layer-graphs", {"moe_a2a_overlap": True, **WHOLE}, {"version": "v0.5.0"}),
        ("overlap-layer-graphs", {"moe_a2a_overlap": True, **TE, "cuda_graph_scope": "attn"}, V6),
        ("offload-graphs", {"activation_offload_layers": 4, **WHOLE}, {"version": "v0.5.0"}),
        ("offload-layer-graphs", {"activation_offload_layers": 4, **WHOLE}, {"version": "v0.5.0"}),
        ("local-graph-scope", WHOLE, V6),
        ("local-graph-scope", {"cuda_graph_impl": "local", "cuda_graph_scope": "attn"}, {"version": "v0.5.0"}),
        ("graph-full-recompute", {**WHOLE, "recompute_num_layers": 2}, V6),
        ("graph-full-recompute", {"recompute_num_layers": 2}, V6),
        ("override-known", {}, {"extra_cmd_args": {"optimizer.lr": "1e-4", "~logger.wandb_project": ""}}),
        ("override-known", {}, {"extra_cmd_args": {"train.no_such": "1"}, "version": "a_branch"}),
        ("override-known", {}, {"extra_cmd_args": {"train.no_such": "1"}, "version": "r0.4.0"}),
        ("recipe-known", {"model_recipe_name": "newer_than_its_releases"}, {**NVIDIA, "version": "r0.5.0"}),
        ("flag-exists", {"enable_pct_binding": True}, {"version": "r0.4.0"}),
        ("override-twice", {}, {"extra_cmd_args": {"model.tensor_model_parallel_size": "2"}}),
    ],
)
def test_what_a_rule_does_not_forbid_passes(rule: str, args: dict[str, Any], fields: Any) -> None:
    assert rule not in broken(make_test(args, **fields))


@pytest.mark.parametrize(
    ("args", "version"),
    [
        ({"et": 3, "ep": 4}, "v0.5.1"),
        ({"use_megatron_fsdp": True, "pp": 2, **TE}, "v0.6.0"),
        ({"moe_a2a_overlap": True, "ep": 1, "pp": 2, "vp": 1}, "v0.4.2"),
        ({"moe_a2a_overlap": True, "recompute_num_layers": 1, "recompute_modules": "moe, nonsense"}, "v0.5.1"),
        ({"num_layers": 7, "pp": 2}, "v0.6.0"),
        ({"num_moe_experts": 9, "ep": 2}, "v0.6.0"),
        ({"activation_offload_layers": 2, "pp": 2, "cuda_graph_impl": "local", "cuda_graph_scope": "attn"}, "v0.6.0"),
        ({**TE, "cuda_graph_scope": ["moe", "moe_router"], "recompute_modules": "moe"}, "v0.6.0"),
    ],
)
def test_what_a_recipe_of_the_library_is_not_given_refuses_nothing(args: dict[str, Any], version: str) -> None:
    test = make_test({**LIBRARY, **args}, version=version)

    errors = {violation.rule for violation in check_test(test) if violation.severity == "error"}

    assert errors <= {"checkpoint-size"}
    assert "flag-unread" in broken(test)


def test_an_override_counts_where_the_flag_of_the_same_size_is_not_read() -> None:
    test = make_test({**LIBRARY, "ep": 4, "et": 1}, version="v0.5.1", extra_cmd_args={ET: "3"})

    assert f"{ET} 3 * ep 4 = 12" in broken(test)["expert-gpus-divide"]


def test_every_rule_that_needs_nothing_is_broken_by_some_test_here() -> None:
    tested = {rule for rule, *_ in BREAKS}

    assert {rule.id for rule in RULES if rule.needs == "nothing"} <= tested


def test_each_rule_that_was_read_from_code_names_its_commit_or_release() -> None:
    unversioned = ("nightbridge: ", "Slurm: ", "git ", "Hugging Face Hub")
    sources = [entry.source for entry in rule_entries() if not entry.source.startswith(unversioned)]

    assert [said for said in sources if not re.search(r"\b[0-9a-f]{8}\b|\d\.\d|the pinned commit", said)] == []


# --- the cluster's limits --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "limits", "expected"),
    [
        ("container-runtime", {"has_pyxis": False}, 'write container_image = "none"'),
        ("time-limit-allowed", {"max_time_seconds": 600}, "longer than the partition allows, 00:10:00"),
        ("nodes-allowed", {"max_nodes": 1}, "num_gpus 16 need 2 nodes, and the partition has 1"),
        ("nodes-allowed", {"gpus_per_node": 1, "max_nodes": 8}, "need 16 nodes"),
    ],
)
def test_what_the_cluster_cannot_give_is_refused(rule: str, limits: dict[str, Any], expected: str) -> None:
    test = make_test(time_limit="00:30:00")

    assert expected in broken(test, ROOMY.model_copy(update=limits))[rule]
    assert rule not in broken(test, ROOMY)
    assert rule not in broken(test)


@pytest.mark.parametrize(
    ("settings_say", "test_says", "cluster_says", "nodes"),
    [(8, 4, None, 2), (8, 4, 2, 2), (None, 4, 8, 4), (None, None, 4, 4), (None, None, None, 2)],
)
def test_nodes_are_counted_as_the_launch_plan_counts_them(
    settings_say: Any, test_says: Any, cluster_says: Any, nodes: Any
) -> None:
    limits = ClusterLimits(configured_gpus_per_node=settings_say, gpus_per_node=cluster_says)
    site = Site(cluster=ClusterSettings(kind="slurm", gpus_per_node=settings_say))
    run = RunSpec(scenario="s", night="n", test=make_test({"gpus_per_node": test_says}))

    assert RuleContext(run.test, limits).nodes == placeholder_plan(run, site, limits).nodes == nodes


def test_the_local_cluster_pretends_two_gpus_and_believes_what_a_test_says(tmp_path: Path) -> None:
    limits = open_cluster(ClusterSettings(), tmp_path).limits()
    run = RunSpec(scenario="s", night="n", test=make_test({"gpus_per_node": 8, "container_image": "none"}))

    assert limits.gpus_per_node == 2
    assert RuleContext(run.test, limits).nodes == placeholder_plan(run, Site(), limits).nodes == 2


def test_all_gpus_of_the_clusters_nodes_are_divided() -> None:
    test = make_test({"num_gpus": 12, "tp": 3, "pp": 2})

    assert "use 24 GPUs" in broken(test, ROOMY)["gpus-divide"]
    assert "gpus-divide" not in broken(test, ROOMY.model_copy(update={"gpus_per_node": 4}))
    assert "gpus-divide" not in broken(test)


def test_limits_that_nobody_knows_forbid_nothing() -> None:
    unknown = ClusterLimits(has_pyxis=True)

    assert check_test(make_test(time_limit="30-0"), unknown) == ()


def test_a_run_without_a_container_needs_no_pyxis() -> None:
    assert "container-runtime" not in broken(make_test({"container_image": "none"}), ClusterLimits())


def test_the_launchers_own_time_limit_counts_where_the_test_has_none() -> None:
    limits = ROOMY.model_copy(update={"max_time_seconds": 600})

    assert "the launcher's own time limit 00:30:00" in broken(make_test(), limits)["time-limit-allowed"]


# --- the pinned code -------------------------------------------------------------------------------------------------


def test_the_pinned_parser_decides_over_the_table(tmp_path: Path) -> None:
    (tmp_path / PARSER).parent.mkdir(parents=True)
    (tmp_path / PARSER).write_text('p.add_argument("-g", choices=["h200"])\np.add_argument("-m")\n')
    pinned = PinnedRepository(url="u", ref="main", commit="0" * 40, path=tmp_path)
    environment = LauncherEnvironment(python=tmp_path, digest="")
    checkout = Checkout(megatron_bridge=pinned, nemo_run=pinned, environment=environment)
    test = make_test({"max_steps": None}, version="main")

    found = {violation.rule: violation.message for violation in check_test(test, checkout=checkout)}

    assert "'h100' is not one of h200" in found["choice"]
    assert "flag -" in found["flag-exists"]
    assert "version-unknown" not in found


@pytest.fixture
def pinned(tmp_path: Path) -> Checkout:
    """A checkout with one recipe file and a launcher that takes every flag used here."""
    recipes = tmp_path / "src/megatron/bridge/perf_recipes/llama"
    recipes.mkdir(parents=True)
    names = (
        "llama3_8b_pretrain_8gpu_h100_bf16",
        "llama3_8b_pretrain_16gpu_h100_fp8cs",
        "llama3_8b_sft_16gpu_h100_bf16_big",
    )
    (recipes / "llama3.py").write_text("".join(f"def {name}_config():\n    pass\n" for name in names))
    (tmp_path / PARSER).parent.mkdir(parents=True)
    (tmp_path / PARSER).write_text("".join(f'p.add_argument("{flag.option}")\n' for flag in TEST_FLAGS.values()))
    repository = PinnedRepository(url="u", ref="main", commit="0" * 40, path=tmp_path)
    environment = LauncherEnvironment(python=tmp_path, digest="")
    return Checkout(megatron_bridge=repository, nemo_run=repository, environment=environment)


def test_a_checkout_of_a_branch_may_recompute_what_no_release_does(pinned: Checkout) -> None:
    """Its launcher has the flags of a release, and its Megatron-Core more modules."""
    rules = {
        version: {violation.rule for violation in check_test(make_test(NEW_MODULE, version=version), checkout=pinned)}
        for version in ("main", "v0.6.0")
    }

    assert "recompute-known" not in rules["main"]
    assert "recompute-known" in rules["v0.6.0"]


def test_a_release_with_another_megatron_lm_may_recompute_what_no_release_does() -> None:
    release = GitRepo(url="https://x/Megatron-Bridge", commit="v0.6.0")
    moved = release.model_copy(update={"submodules": {"3rdparty/Megatron-LM": "dev"}})
    mounted = GitRepo(url="https://x/Megatron-LM", commit="dev", mount_as="/opt/megatron-lm")

    assert "recompute-known" in broken(make_test(NEW_MODULE, git_repos=(release,)))
    for code in ((moved,), (release, mounted)):
        assert "recompute-known" not in broken(make_test(NEW_MODULE, git_repos=code))


def test_the_name_that_is_nearest_to_an_unknown_override_is_looked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[str] = []

    class Counted(difflib.SequenceMatcher[str]):
        def set_seq2(self, b: Sequence[str]) -> None:
            looked.append(str(b))
            super().set_seq2(b)

    monkeypatch.setattr(difflib, "SequenceMatcher", Counted)

    found = broken(make_test(extra_cmd_args={"train.global_batch_sizes": "1"}))

    assert "did you mean train.global_batch_size?" in found["override-known"]
    assert looked.count("train.global_batch_sizes") == 1


def test_overrides_of_a_submodule_that_the_image_brings_are_checked_with_the_shipped_classes(pinned: Checkout) -> None:
    source = pinned.megatron_bridge.path / "src/megatron/bridge/training/config.py"
    source.parent.mkdir(parents=True, exist_ok=True)
    source.write_text(
        "from dataclasses import dataclass\nfrom megatron.core.optimizer import OptimizerConfig\n"
        "@dataclass\nclass Own:\n    depth: int = 1\n"
        "@dataclass\nclass ConfigContainer:\n    optimizer: OptimizerConfig\n    own: Own\n"
    )
    written = {"own.depth": "deep", "optimizer.lr": "three", "optimizer.weight_deccay": "0.1"}
    test = make_test({"num_gpus": 8}, version="main", extra_cmd_args=written)

    found = [(each.rule, each.severity, each.message) for each in check_test(test, checkout=pinned)]

    assert [(rule, severity) for rule, severity, _ in found] == [
        ("override-known", "error"),  # the pinned code says so itself
        ("override-known-later", "warning"),
        ("override-known-later", "warning"),
    ]
    assert "own.depth is a whole number" in found[0][2]
    assert "did you mean optimizer.weight_decay?" in found[2][2]


@pytest.mark.parametrize(
    ("args", "found"),
    [
        ({"num_gpus": 8}, {}),
        ({"num_gpus": 16, "compute_dtype": "fp8_cs"}, {}),
        ({"num_gpus": 16, "task": "sft", "config_variant": "BIG", "offline": True}, {}),
        ({"num_gpus": 8, "config_variant": "v2"}, {}),
        ({"model_recipe_name": "other_1b", "use_recipes": True, "offline": True}, {}),
        ({"num_gpus": 32}, {"recipe-gpus": "for 8 GPUs, not for 32"}),
        ({"model_recipe_name": "llama3_9b"}, {"recipe-exists": "there are llama3_8b_pretrain_h100_bf16_config"}),
        ({"gpu_type": "b200"}, {"recipe-exists": "no performance recipe llama3_8b_pretrain_b200_bf16_config"}),
    ],
)
def test_the_recipe_must_stand_in_the_pinned_code(pinned: Checkout, args: dict[str, Any], found: Any) -> None:
    expected = {violation.rule: violation.message for violation in check_test(make_test(args), checkout=pinned)}

    assert expected.keys() == found.keys()
    assert all(text in expected[rule] for rule, text in found.items())


@pytest.mark.parametrize(
    ("launcher", "executors", "refused"),
    [
        # As NVIDIA's hands it on, from v0.3 to 067f987d.
        ("executor = slurm_executor(args.gpu, container_image=args.container_image)\n", "SlurmExecutor()\n", True),
        ("image = None if args.container_image in (None, 'none') else args.container_image\n", "", False),
        ("slurm_executor(args.container_image)\n", "if container_image:\n    srun_args += []\n", False),
        ("def broken(\n", "", False),
    ],
    ids=["handed on", "compared", "tested by the executor", "unreadable"],
)
def test_no_container_needs_a_launcher_that_looks_at_the_image(
    pinned: Checkout, tmp_path: Path, launcher: str, executors: str, refused: bool
) -> None:
    scripts = (tmp_path / PARSER).parent
    (scripts / "utils").mkdir()
    (scripts / "setup_experiment.py").write_text(launcher)
    (scripts / "utils/executors.py").write_text(executors)

    found = {violation.rule for violation in check_test(make_test({"container_image": "none"}), checkout=pinned)}

    assert ("container-launcher" in found) == refused


def test_code_without_flat_recipes_is_not_judged(pinned: Checkout, tmp_path: Path) -> None:
    (tmp_path / "src/megatron/bridge/perf_recipes/llama/llama3.py").unlink()

    assert check_test(make_test({"model_recipe_name": "llama3_9b"}), checkout=pinned) == ()


# --- scenarios -------------------------------------------------------------------------------------------------------


def test_a_test_that_breaks_a_rule_is_set_aside_and_the_others_stay() -> None:
    good, bad = make_test(), make_test({"tp": 3, "gb": 0}).model_copy(update={"id": "bad"})

    checked = check_scenario(Scenario(name="s", tests=(good, bad)))

    assert checked.tests == (good,)
    (invalid,) = checked.invalid
    assert invalid.id == "bad"
    assert len(invalid.violations) == 2
    assert invalid.violations[0].startswith("t.toml: cmd_args.gb = 0")


def test_a_warning_never_keeps_a_test_from_running() -> None:
    test = make_test({"num_gpus": None})

    checked = check_scenario(Scenario(name="s", tests=(test,)))

    assert checked.tests == (test,)
    assert any("num-gpus-default" in warning for warning in checked.warnings)
    assert errors_of(check_test(test)) == ()


# --- checkpoints, images, and what the site allows -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recipe", "billions"),
    [
        ("llama3_8b", 8),
        ("qwen3_30b_a3b", 30),
        ("llama31_405b", 405),
        ("deepseek_v3", 671),
        ("nemotronh_56b", 56),
        ("qwen25_1p5b", 1.5),
        ("llama_small", None),
        ("llama_" + "9" * 400 + "b", None),
    ],
)
def test_the_parameters_of_a_model_follow_from_its_recipes_name(recipe: str, billions: Any) -> None:
    parameters = parameters_of(make_test({"model_recipe_name": recipe}))

    assert parameters == (None if billions is None else billions * 1e9)


@pytest.mark.parametrize(
    ("args", "fields"),
    [
        ({"model_recipe_name": "llama3_8b"}, {}),
        ({"model_recipe_name": "llama3_70b"}, {"harvest": HarvestPolicy(checkpoint="none")}),
        ({"model_recipe_name": "llama3_70b"}, {"harvest": HarvestPolicy(max_checkpoint_bytes=10**12)}),
        ({"model_recipe_name": "llama3_70b", "task": "lora", "offline": True}, {}),
        ({"num_layers": 4}, {"harvest": HarvestPolicy(max_checkpoint_bytes=10**12)}),
    ],
)
def test_a_checkpoint_that_fits_or_was_chosen_is_not_warned_of(args: dict[str, Any], fields: Any) -> None:
    assert "checkpoint-size" not in broken(make_test(args, **fields))


@pytest.mark.parametrize(
    "image",
    [
        "nvcr.io#nvidia/nemo:26.04.01",
        "nvcr.io/nvidia/nemo:26.04.01",
        "docker://user@registry:5000/g/p",
        f"nvcr.io/nvidia/nemo@sha256:{'a' * 64}",
        "/images/nemo.sqsh",
        "none",
    ],
)
def test_images_are_accepted_in_every_form_that_people_write(image: str) -> None:
    assert "image-reference" not in broken(make_test({"container_image": image}))


@pytest.mark.parametrize(
    ("rule", "limits", "expected"),
    [
        ("partition-exists", {"partition": "bach", "partitions": ("batch",)}, "no partition 'bach'; name batch"),
        ("partition-exists", {"partition": "batch,bach", "partitions": ("batch",)}, "no partition 'batch,bach'"),
        ("account-allowed", {"account": "me", "accounts": ("llm", "perf")}, "these may: llm, perf"),
        ("resources-exist", {"gres": ("gpu",)}, "no resource 'shard', but gpu"),
        ("resources-exist", {"gres": ()}, "none at all"),
    ],
)
def test_what_the_site_does_not_have_is_refused(rule: str, limits: dict[str, Any], expected: str) -> None:
    found = broken(make_test({"gres": "shard:2"}), ROOMY.model_copy(update=limits))

    assert expected in found[rule]


def test_jobs_may_go_to_whichever_of_several_partitions_starts_them_first() -> None:
    limits = ROOMY.model_copy(update={"partition": "batch,short", "partitions": ("batch", "long", "short")})

    assert "partition-exists" not in broken(make_test(), limits)


def test_what_the_site_does_not_say_is_no_reason_to_refuse() -> None:
    assert errors_of(check_test(make_test({"gres": "gpu:8"}), ROOMY)) == ()


def test_a_recipe_for_h100_may_run_on_newer_nodes() -> None:
    found = check_test(make_test({"gpu_type": "h100"}, extra_cmd_args=MXFP8))

    assert [each.severity for each in found if each.rule == "precision-gpu"] == ["warning"]
