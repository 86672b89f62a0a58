"""NeMo-Run as it is on PyPI, under a version of its own."""

__version__ = "0.11.1"
