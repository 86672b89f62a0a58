"""A dense model of 1.2 billion parameters."""

from megatron.bridge.perf_recipes.common import benchmark


def _llama_small(gpus, dtype):
    return benchmark(seq_length=4096, global_batch_size=16 * gpus, micro_batch_size=2, dtype=dtype, lr=0.05)


def llama_small_pretrain_2gpu_h100_bf16_config():
    """2 H100, bf16."""
    return _llama_small(2, "bf16")


def llama_small_pretrain_2gpu_h100_fp8cs_config():
    """2 H100, fp8cs."""
    return _llama_small(2, "fp8cs")


def llama_small_pretrain_4gpu_h100_bf16_config():
    """4 H100, bf16."""
    return _llama_small(4, "bf16")


def llama_small_pretrain_4gpu_h100_fp8cs_config():
    """4 H100, fp8cs."""
    return _llama_small(4, "fp8cs")


def llama_small_pretrain_8gpu_h100_bf16_config():
    """8 H100, bf16."""
    return _llama_small(8, "bf16")


def llama_small_pretrain_8gpu_h100_fp8cs_config():
    """8 H100, fp8cs."""
    return _llama_small(8, "fp8cs")


def llama_small_pretrain_2gpu_gb200_bf16_config():
    """2 GB200, bf16."""
    return _llama_small(2, "bf16")


def llama_small_pretrain_2gpu_gb200_fp8cs_config():
    """2 GB200, fp8cs."""
    return _llama_small(2, "fp8cs")


def llama_small_pretrain_4gpu_gb200_bf16_config():
    """4 GB200, bf16."""
    return _llama_small(4, "bf16")


def llama_small_pretrain_4gpu_gb200_fp8cs_config():
    """4 GB200, fp8cs."""
    return _llama_small(4, "fp8cs")


def llama_small_pretrain_8gpu_gb200_bf16_config():
    """8 GB200, bf16."""
    return _llama_small(8, "bf16")


def llama_small_pretrain_8gpu_gb200_fp8cs_config():
    """8 GB200, fp8cs."""
    return _llama_small(8, "fp8cs")


def llama_small_sft_2gpu_h100_bf16_config():
    """2 H100, bf16."""
    return _llama_small(2, "bf16")


def llama_small_sft_2gpu_h100_fp8cs_config():
    """2 H100, fp8cs."""
    return _llama_small(2, "fp8cs")


def llama_small_sft_4gpu_h100_bf16_config():
    """4 H100, bf16."""
    return _llama_small(4, "bf16")


def llama_small_sft_4gpu_h100_fp8cs_config():
    """4 H100, fp8cs."""
    return _llama_small(4, "fp8cs")


def llama_small_sft_8gpu_h100_bf16_config():
    """8 H100, bf16."""
    return _llama_small(8, "bf16")


def llama_small_sft_8gpu_h100_fp8cs_config():
    """8 H100, fp8cs."""
    return _llama_small(8, "fp8cs")


def llama_small_sft_2gpu_gb200_bf16_config():
    """2 GB200, bf16."""
    return _llama_small(2, "bf16")


def llama_small_sft_2gpu_gb200_fp8cs_config():
    """2 GB200, fp8cs."""
    return _llama_small(2, "fp8cs")


def llama_small_sft_4gpu_gb200_bf16_config():
    """4 GB200, bf16."""
    return _llama_small(4, "bf16")


def llama_small_sft_4gpu_gb200_fp8cs_config():
    """4 GB200, fp8cs."""
    return _llama_small(4, "fp8cs")


def llama_small_sft_8gpu_gb200_bf16_config():
    """8 GB200, bf16."""
    return _llama_small(8, "bf16")


def llama_small_sft_8gpu_gb200_fp8cs_config():
    """8 GB200, fp8cs."""
    return _llama_small(8, "fp8cs")
