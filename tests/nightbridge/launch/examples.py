"""CloudAI's published examples as TOML, and the command line that the launcher is given for each of them.

`every flag` is ours: one value for each flag that a version has. The limit of a checkpoint is ours, too: without it none
would be requested of a model of this size, and the launchers were tried with one.
"""

import tempfile
from pathlib import Path

from nightbridge.config.documents import parse_document, toml_value
from nightbridge.config.scenarios import load, runs, scenario_of
from nightbridge.launch.flags import FLAGS, Flag, FlagKind, choices_of
from nightbridge.launch.launch_plan import placeholder_plan
from nightbridge.launch.versions import Version, version_for_pin
from nightbridge.models import ClusterSettings, Scenario, Site

VERSIONS = ("v0.3.0", "v0.4.0", "v0.5.0", "v0.6.0", "main")
SITE = Site(
    cluster=ClusterSettings(
        kind="slurm", name="c", account="acct", partition="batch", gpus_per_node=8, containers="pyxis"
    )
)

TEST = """
name = "megatron_bridge_qwen_30b"
description = "Megatron-Bridge run via CloudAI SlurmSystem for Qwen3 30B A3B"
test_template_name = "MegatronBridge"

[[git_repos]]
url = "https://github.com/NVIDIA-NeMo/Megatron-Bridge.git"
commit = "VERSION"
mount_as = "/opt/Megatron-Bridge"

[harvest]
max_checkpoint_bytes = 1_000_000_000_000

[cmd_args]
gpu_type = "gb200"
gpus_per_node = 8
num_gpus = 8
container_image = "nvcr.io#nvidia/nemo:26.02.00"
model_family_name = "qwen"
model_recipe_name = "qwen3_30b_a3b"
task = "pretrain"
domain = "llm"
compute_dtype = "fp8_mx"
"""
SCENARIO = """
name = "megatron_bridge_qwen_30b"

[[Tests]]
id = "megatron_bridge_qwen_30b"
test_name = "megatron_bridge_qwen_30b"
num_nodes = "2"
"""
TEST_IN_SCENARIO = """
name = "megatron-bridge-test"

[[Tests]]
id = "mbridge.1"
num_nodes = 2
time_limit = "00:30:00"
name = "megatron_bridge_qwen_30b"
description = "Megatron-Bridge run via CloudAI SlurmSystem for Qwen3 30B A3B"
test_template_name = "MegatronBridge"

[[Tests.git_repos]]
url = "https://github.com/NVIDIA-NeMo/Megatron-Bridge.git"
commit = "VERSION"
mount_as = "/opt/Megatron-Bridge"

[Tests.harvest]
max_checkpoint_bytes = 1_000_000_000_000

[Tests.cmd_args]
container_image = "nvcr.io#nvidia/nemo:26.02.01"
model_family_name = "qwen"
model_recipe_name = "qwen3_30b_a3b"
gpu_type = "gb200"
gpus_per_node = 8
num_gpus = 8
task = "pretrain"
domain = "llm"
compute_dtype = "fp8_mx"
"""
MORE_FIELDS = (
    TEST
    + """
hf_token = "env:HF_TOKEN"
wandb_key = "env:WANDB_API_KEY"
wandb_project_name = "nightly"
log_dir = "/logs"
cuda_graph_impl = "transformer_engine"
cuda_graph_scope = "[moe_router,moe_preprocess]"
tp = 2
vp = 1
pipeline_model_parallel_layout = "Et|t*46L"
moe_a2a_overlap = false
recompute_modules = "core_attn,mlp"
dataset_paths = ["/data/a", "/data/b"]
profiling_ranks = "0,4"

[extra_env_vars]
NCCL_DEBUG = "WARN"
LIST = "a,b=c"
"""
)


EXAMPLES = ("test", "test in scenario", "more fields", "every flag", "library recipe")

NIGHT = "2026-11-21"

SAMPLES: dict[FlagKind, object] = {
    "text": "text",
    "integer": 1,
    "number": 0.5,
    "boolean": True,
    "texts": ["a", "b"],
    "integers": [0, 1],
    "integer_or_none": 2,
    "text_or_none": "None",
}
VALUES: dict[str, object] = {
    "model_family_name": "llama",
    "model_recipe_name": "llama3_8b",
    "container_image": "nvcr.io#nvidia/nemo:26.04.01",
    "hf_token": "env:HF_TOKEN",
    "wandb_key": "env:WANDB_API_KEY",
    "num_gpus": 8,
    "gpus_per_node": 8,
    "config_variant": "v1",
    "pytorch_profiler": False,  # the launcher takes one profiler
    "additional_slurm_params": "comment=x",
    "custom_srun_args": ["--label"],
    "gres": "gpu:8",
    "pipeline_model_parallel_layout": "Et*4|(t*4|)*14tmL",
    **{field: f"/tmp/nightbridge-dry-run/{field}" for field in ("nemo_home", "pretrained_checkpoint", "save_dir")},
    **{field: f"/tmp/nightbridge-dry-run/{field}" for field in ("load_dir", "wandb_save_dir", "save_config_filepath")},
}
ALONE = frozenset({"dryrun", "list_config_variants", "use_recipes"})
"""Flags that make the launcher do something else than plan a performance recipe's job."""


def _sample(flag: Flag, version: Version) -> object:
    if flag.field in VALUES:
        return VALUES[flag.field]
    choices = choices_of(flag.field, version)
    if choices is None:
        return SAMPLES[flag.kind]
    return list(choices[:2]) if flag.kind == "texts" else choices[0]


OVERRIDE = """
[extra_cmd_args]
"logger.tags" = "{a:1,b:(2)}"
"""


def _every_flag(version: Version) -> str:
    fields = [flag for flag in FLAGS if flag.source == "test" and flag.first <= version and flag.field not in ALONE]
    args = "\n".join(f"{flag.field} = {toml_value(_sample(flag, version))}" for flag in fields)
    return _ours(f'{args}\n[extra_env_vars]\nNCCL_DEBUG = "WARN"\nPYTHONPATH = "/opt/x:${{PYTHONPATH}}"{OVERRIDE}')


LIBRARY_RECIPE = """
use_recipes = true
gpu_type = "h100"
num_gpus = 8
container_image = "nvcr.io#nvidia/nemo:26.04.01"
model_family_name = "llama"
model_recipe_name = "llama3_8b_pretrain_config"
# With no later key of CloudAI's order: the overrides are no further paths.
dataset_paths = ["/data/a", "/data/b"]
"""


def _ours(args: str) -> str:
    return TEST.partition("[cmd_args]")[0] + f"[cmd_args]\n{args}\n"


def _scenario(example: str, version: str) -> Scenario:
    texts = {
        "test in scenario": TEST_IN_SCENARIO,
        "more fields": MORE_FIELDS,
        "every flag": _every_flag(version_for_pin(version)),
        "library recipe": _ours(LIBRARY_RECIPE),
    }
    if example in texts:
        return scenario_of(parse_document(texts[example].replace("VERSION", version), Path("example.toml")))
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "test.toml").write_text(TEST.replace("VERSION", version))
        Path(folder, "scenario.toml").write_text(SCENARIO)
        return load(Path(folder, "scenario.toml"))


def argv_of(example: str, version: str) -> tuple[str, ...]:
    """The argv of the only run of an example, behind interpreter and launcher."""
    (run,) = runs(_scenario(example, version), NIGHT)
    return placeholder_plan(run, SITE).argv[2:]
