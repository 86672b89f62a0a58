"""A mixture of 64 experts, of which 2.4 billion parameters work on a token."""

from megatron.bridge.perf_recipes.common import benchmark


def _deepseek_small(gpus, dtype):
    return benchmark(seq_length=4096, global_batch_size=16 * gpus, micro_batch_size=1, dtype=dtype, lr=0.05)


def deepseek_small_pretrain_2gpu_h100_bf16_config():
    """2 H100, bf16."""
    return _deepseek_small(2, "bf16")


def deepseek_small_pretrain_2gpu_h100_fp8mx_config():
    """2 H100, fp8mx."""
    return _deepseek_small(2, "fp8mx")


def deepseek_small_pretrain_4gpu_h100_bf16_config():
    """4 H100, bf16."""
    return _deepseek_small(4, "bf16")


def deepseek_small_pretrain_4gpu_h100_fp8mx_config():
    """4 H100, fp8mx."""
    return _deepseek_small(4, "fp8mx")


def deepseek_small_pretrain_8gpu_h100_bf16_config():
    """8 H100, bf16."""
    return _deepseek_small(8, "bf16")


def deepseek_small_pretrain_8gpu_h100_fp8mx_config():
    """8 H100, fp8mx."""
    return _deepseek_small(8, "fp8mx")


def deepseek_small_pretrain_2gpu_gb200_bf16_config():
    """2 GB200, bf16."""
    return _deepseek_small(2, "bf16")


def deepseek_small_pretrain_2gpu_gb200_fp8mx_config():
    """2 GB200, fp8mx."""
    return _deepseek_small(2, "fp8mx")


def deepseek_small_pretrain_4gpu_gb200_bf16_config():
    """4 GB200, bf16."""
    return _deepseek_small(4, "bf16")


def deepseek_small_pretrain_4gpu_gb200_fp8mx_config():
    """4 GB200, fp8mx."""
    return _deepseek_small(4, "fp8mx")


def deepseek_small_pretrain_8gpu_gb200_bf16_config():
    """8 GB200, bf16."""
    return _deepseek_small(8, "bf16")


def deepseek_small_pretrain_8gpu_gb200_fp8mx_config():
    """8 GB200, fp8mx."""
    return _deepseek_small(8, "fp8mx")
