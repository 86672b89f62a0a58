"""A practice workload with the shape of Megatron-Bridge."""

from megatron.bridge.package_info import __version__

__all__ = ["__version__"]
