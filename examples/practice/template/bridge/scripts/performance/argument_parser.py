"""The command line that the launcher and the job share."""

import argparse
import re

CUDA_GRAPH_IMPLS = ["none", "local", "transformer_engine"]
CUDA_GRAPH_SCOPES = ["full_iteration", "attn", "mlp", "moe", "moe_router", "moe_preprocess", "mamba"]
DISPATCHER_BACKENDS = ["deepep", "hybridep", "None"]

GPUS_PER_NODE = {"h100": 8, "b200": 8, "b300": 8, "gb200": 4, "gb300": 4, "vr200": 4, "r100": 1}

_TRUE = ("true", "1", "t", "yes", "y")
_FALSE = ("false", "0", "f", "no", "n")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def lower(text):
    """Lower case."""
    return text.lower()


def boolean(text):
    """One of the usual words for true or false."""
    if text.lower() in _TRUE:
        return True
    if text.lower() in _FALSE:
        return False
    raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")


def texts(text):
    """Items between commas."""
    return text.split(",")


def integers(text):
    """Whole numbers between commas."""
    try:
        return [int(item) for item in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of whole numbers") from None


def integer_or_none(text):
    """A whole number, or the word None."""
    return None if text == "None" else int(text)


def backend_or_none(text):
    """A dispatcher backend, or the word None."""
    if text in DISPATCHER_BACKENDS:
        return None if text == "None" else text
    raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(DISPATCHER_BACKENDS)}")


def graph_scopes(text):
    """CUDA graph scopes between commas."""
    scopes = text.split(",")
    if all(scope in CUDA_GRAPH_SCOPES for scope in scopes):
        return scopes
    raise argparse.ArgumentTypeError(f"{text!r}: every scope must be one of {', '.join(CUDA_GRAPH_SCOPES)}")


def variable(text):
    """One NAME=VALUE."""
    name, equals, value = text.partition("=")
    if not equals or not _VARIABLE.fullmatch(name):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value


def variables(text):
    """NAME=VALUE between commas; values hold neither commas nor equals signs."""
    items = [item.split("=") for item in text.split(",")]
    if any(len(item) != 2 for item in items):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE,NAME=VALUE")
    return dict(items)


def slurm_parameters(text):
    """NAME=VALUE or NAME between semicolons (or blanks, where there is no semicolon)."""
    parts = text.split(";") if ";" in text else text.split()
    named = (part.strip().partition("=") for part in parts if part.strip())
    return {name.strip(): value.strip() if equals else True for name, equals, value in named}


def parse_cli_args():
    """Make the parser; what it does not know is left over and goes to the configuration as overrides."""
    parser = argparse.ArgumentParser(description="Launch a practice training run")
    parser.add_argument("--domain", type=lower, choices=["llm", "vlm", "qwen3vl", "diffusion"], default="llm")
    parser.add_argument("-m", "--model_family_name", type=lower, required=True, help="e.g. llama")
    parser.add_argument("-mr", "--model_recipe_name", type=lower, required=True, help="e.g. llama_small")
    parser.add_argument("--use_recipes", action="store_true")
    parser.add_argument("-nh", "--nemo_home", help="accepted; nothing is cached there")
    parser.add_argument("--detach", type=boolean, default=True, help="return once the job is submitted")
    parser.add_argument("--max_retries", type=int, default=2)
    parser.add_argument("-ng", "--num_gpus", type=int, required=True)
    parser.add_argument("--hidden_size", type=int)
    parser.add_argument("--num_layers", type=int)
    parser.add_argument("--num_moe_experts", type=int)
    parser.add_argument("--pipeline_model_parallel_layout")
    parser.add_argument("--first_k_dense_replace", type=int)
    parser.add_argument("-d", "--dryrun", action="store_true", help="show the batch script and submit nothing")
    _add_training(parser.add_argument_group("training"))
    _add_data(parser.add_argument_group("data and tokenizer"))
    _add_parallelism(parser.add_argument_group("parallelism"))
    _add_slurm(parser.add_argument_group("Slurm"))
    _add_kubeflow(parser.add_argument_group("Kubeflow: accepted, and refused by the launcher"))
    _add_performance(parser.add_argument_group("performance"))
    _add_logging(parser.add_argument_group("logging"))
    _add_testing(parser.add_argument_group("testing: accepted; nothing is judged here"))
    return parser


def _add_training(group):
    group.add_argument("--task", choices=["pretrain", "sft", "peft"], default="pretrain")
    group.add_argument("-ms", "--max_steps", type=int)
    group.add_argument("-gb", "--global_batch_size", type=int)
    group.add_argument("-mb", "--micro_batch_size", type=int)
    group.add_argument("-sl", "--seq_length", type=int)
    group.add_argument("--distributed_timeout_minutes", type=int)
    group.add_argument("--lr", type=float)
    group.add_argument("--min_lr", type=float)
    group.add_argument("--warmup_iters", type=int, default=10)
    group.add_argument("--pretrained_checkpoint")
    group.add_argument("--save_dir")
    group.add_argument("--load_dir")
    group.add_argument("--save_interval", type=int)
    group.add_argument("--most_recent_k", type=int)


def _add_data(group):
    group.add_argument("--data", choices=["mock", "rp2", "squad", "squad_packed", "c4"], default="mock")
    group.add_argument("--c4_root")
    group.add_argument("--c4_train_shards", type=int, nargs="+", default=[6])
    group.add_argument("--dataset_paths", nargs="*")
    group.add_argument("--dataset_root")
    group.add_argument("--index_mapping_dir")
    group.add_argument("--dataset_name")
    group.add_argument("--packed_sequence", action="store_true")
    group.add_argument("--head_only", action="store_true")
    group.add_argument("--diffusion_dataset_path")
    group.add_argument("--tokenizer_type", choices=["NullTokenizer", "HuggingFaceTokenizer", "SentencePieceTokenizer"])
    group.add_argument("--tokenizer_model")
    group.add_argument("--vocab_size", type=int, default=32000)
    group.add_argument("-hf", "--hf_token", help="accepted, and kept out of every file")
    group.add_argument("--offline", action="store_true")


def _add_parallelism(group):
    group.add_argument("-tp", "--tensor_model_parallel_size", type=int)
    group.add_argument("-pp", "--pipeline_model_parallel_size", type=int)
    group.add_argument("-cp", "--context_parallel_size", type=int)
    group.add_argument("-vp", "--virtual_pipeline_model_parallel_size", type=integer_or_none, default=-1)
    group.add_argument("-ep", "--expert_model_parallel_size", type=int)
    group.add_argument("-et", "--expert_tensor_parallel_size", type=integer_or_none, nargs="?", const=None)


def _add_slurm(group):
    group.add_argument("-a", "--account")
    group.add_argument("-p", "--partition")
    group.add_argument("-t", "--time_limit", default="00:30:00")
    group.add_argument("--preempt_time", type=int, default=60)
    group.add_argument("-gn", "--gpus_per_node", type=int)
    group.add_argument("-i", "--container_image", help="absent or none: no container")
    group.add_argument("-cm", "--custom_mounts", type=texts, default=[])
    group.add_argument("-ce", "--custom_env_vars", type=variables, default={})
    group.add_argument("-E", "--env", type=variable, action="append")
    group.add_argument("-cs", "--custom_srun_args", type=texts, default=[])
    group.add_argument("-cb", "--custom_bash_cmds", nargs="*", action="append")
    group.add_argument("--gres")
    group.add_argument("--additional_slurm_params", type=slurm_parameters)
    group.add_argument("--packager", choices=["git", "none"], default="git")
    group.add_argument("--enable_pct_binding", type=boolean, default=True)


def _add_kubeflow(group):
    group.add_argument("--kubeflow_namespace")
    group.add_argument("--csp", choices=["aws", "gcp"])
    group.add_argument("--kubeflow_workdir_pvc")
    group.add_argument("--kubeflow_workdir_pvc_path", default="/nemo_run")
    group.add_argument("--kubeflow_workdir_local_path")
    group.add_argument("--kubeflow_image_pull_secrets", type=texts, default=[])
    group.add_argument("--kubeflow_volumes_json")
    group.add_argument("--kubeflow_volume_mounts_json")
    group.add_argument("--kubeflow_tolerations_json")
    group.add_argument("--kubeflow_affinity_json")
    group.add_argument("--kubeflow_env_list_json")
    group.add_argument("--kubeflow_extra_resource_requests_json")
    group.add_argument("--kubeflow_extra_resource_limits_json")
    group.add_argument("--kubeflow_pod_spec_overrides_json")
    group.add_argument("--kubeflow_pod_annotations_json")
    group.add_argument("--kubeflow_container_kwargs_json")
    group.add_argument("--kubeflow_labels_json")


def _add_performance(group):
    group.add_argument(
        "-g", "--gpu", type=lower, choices=["h100", "b200", "b300", "gb200", "gb300", "vr200", "r100"], required=True
    )
    group.add_argument("-c", "--compute_dtype", choices=["bf16", "fp8_cs", "fp8_mx", "fp8_sc", "nvfp4"], default="bf16")
    group.add_argument("--optimizer_type", choices=["adam", "muon"], default="muon")
    group.add_argument("-vb", "--enable_vboost", type=boolean)
    group.add_argument("-lgc", "--lock_gpu_freq", type=int)
    group.add_argument("-lmc", "--peak_mem_clk", type=int)
    group.add_argument("-en", "--enable_nsys", action="store_true")
    group.add_argument("--export_nsys_sqlite", action="store_true")
    group.add_argument("-pyp", "--pytorch_profiler", type=boolean, default=False)
    group.add_argument("--profiling_start_step", type=int, default=10)
    group.add_argument("--profiling_stop_step", type=int, default=11)
    group.add_argument("-mh", "--record_memory_history", type=boolean, default=True)
    group.add_argument("--profiling_gpu_metrics", action="store_true")
    group.add_argument("--profiling_ranks", type=integers)
    group.add_argument("--nsys_trace", type=texts)
    group.add_argument("--nsys_extra_args", type=texts)
    group.add_argument("--use_tokendrop", type=boolean)
    group.add_argument("--use_megatron_fsdp", type=boolean)
    group.add_argument("--nccl_ub", type=boolean)
    group.add_argument("--cuda_graph_impl", choices=CUDA_GRAPH_IMPLS)
    group.add_argument("--cuda_graph_scope", type=graph_scopes)
    group.add_argument("--moe_a2a_overlap", type=boolean)
    group.add_argument("-rl", "--recompute_num_layers", type=int)
    group.add_argument("-ol", "--activation_offload_layers", type=int)
    group.add_argument("--recompute_modules", type=texts)
    group.add_argument("--moe_flex_dispatcher_backend", type=backend_or_none, default=-1)
    group.add_argument("--deterministic", action="store_true")


def _add_logging(group):
    group.add_argument("-wdk", "--wandb_key", help="accepted, and kept out of every file")
    group.add_argument("-wdp", "--wandb_project_name")
    group.add_argument("-wde", "--wandb_entity_name")
    group.add_argument("-wdj", "--wandb_experiment_name", help="also the experiment's name")
    group.add_argument("-wds", "--wandb_save_dir")
    group.add_argument("-l", "--log_dir", help="instead of NEMORUN_HOME")
    group.add_argument("--save_config_filepath")
    group.add_argument("--dump_env", action="store_true")
    group.add_argument("-cv", "--config_variant")
    group.add_argument("--list_config_variants", action="store_true")


def _add_testing(group):
    group.add_argument("--is_long_convergence_run", action="store_true")
    group.add_argument("--retry_on_testing_failure", action="store_true")
    group.add_argument("--golden_values_path")
    group.add_argument("--timing_threshold", type=float, default=0.05)
    group.add_argument("--skip_first_percent_time", type=float, default=0.7)
    group.add_argument("--correlation_threshold", type=float, default=0.95)
    group.add_argument("--high_loss_tolerance", type=float, default=0.1)
    group.add_argument("--medium_loss_tolerance", type=float, default=0.05)
    group.add_argument("--low_loss_tolerance", type=float, default=0.02)
    group.add_argument("--final_loss_tolerance", type=float, default=0.05)
    group.add_argument("--max_outlier_ratio", type=float, default=0.1)
    group.add_argument("--outlier_threshold", type=float, default=3.0)
    group.add_argument("--skip_first_percent_loss", type=float, default=0.2)
    group.add_argument("--memory_threshold", type=float, default=0.05)
    group.add_argument("--eval_time_start_step", type=int)
    group.add_argument("--eval_time_end_step", type=int)
