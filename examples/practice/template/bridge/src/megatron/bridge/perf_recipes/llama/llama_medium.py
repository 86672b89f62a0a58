"""A dense model of 8 billion parameters."""

from megatron.bridge.perf_recipes.common import benchmark


def _llama_medium(gpus, dtype):
    return benchmark(seq_length=8192, global_batch_size=8 * gpus, micro_batch_size=1, dtype=dtype, lr=0.05)


def llama_medium_pretrain_2gpu_h100_bf16_config():
    """2 H100, bf16."""
    return _llama_medium(2, "bf16")


def llama_medium_pretrain_2gpu_h100_fp8cs_config():
    """2 H100, fp8cs."""
    return _llama_medium(2, "fp8cs")


def llama_medium_pretrain_4gpu_h100_bf16_config():
    """4 H100, bf16."""
    return _llama_medium(4, "bf16")


def llama_medium_pretrain_4gpu_h100_fp8cs_config():
    """4 H100, fp8cs."""
    return _llama_medium(4, "fp8cs")


def llama_medium_pretrain_8gpu_h100_bf16_config():
    """8 H100, bf16."""
    return _llama_medium(8, "bf16")


def llama_medium_pretrain_8gpu_h100_fp8cs_config():
    """8 H100, fp8cs."""
    return _llama_medium(8, "fp8cs")


def llama_medium_pretrain_2gpu_gb200_bf16_config():
    """2 GB200, bf16."""
    return _llama_medium(2, "bf16")


def llama_medium_pretrain_2gpu_gb200_fp8cs_config():
    """2 GB200, fp8cs."""
    return _llama_medium(2, "fp8cs")


def llama_medium_pretrain_4gpu_gb200_bf16_config():
    """4 GB200, bf16."""
    return _llama_medium(4, "bf16")


def llama_medium_pretrain_4gpu_gb200_fp8cs_config():
    """4 GB200, fp8cs."""
    return _llama_medium(4, "fp8cs")


def llama_medium_pretrain_8gpu_gb200_bf16_config():
    """8 GB200, bf16."""
    return _llama_medium(8, "bf16")


def llama_medium_pretrain_8gpu_gb200_fp8cs_config():
    """8 GB200, fp8cs."""
    return _llama_medium(8, "fp8cs")
