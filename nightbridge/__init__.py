"""nightbridge: nightly regression runs of Megatron-Bridge on Slurm, from a TOML file to a verdict.

    from nightbridge import nightly_regression, run_pipeline

The flow API loads Prefect when one of its names is first used: importing the package, or validating a file, does not.
"""

# ruff: noqa: F403, F405
import os
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nightbridge.flows.api import *

__version__ = "0.1.0"
# Prefect reads both once, when it is imported: its telemetry, and that of a server that we start, stays off.
os.environ.update(PREFECT_SERVER_ANALYTICS_ENABLED="false", DO_NOT_TRACK="1")

__all__ = [
    "aattribute_regression",
    "abisect_regression",
    "acheck_parity",
    "acompare_runs",
    "anightly_regression",
    "aread_history",
    "arun_pipeline",
    "arun_sweep",
    "atry_change",
    "attribute_regression",
    "averify_run",
    "bisect_regression",
    "check_parity",
    "compare_runs",
    "nightly_regression",
    "read_history",
    "run_pipeline",
    "run_sweep",
    "try_change",
    "verify_run",
]


def __getattr__(name: str) -> object:
    if name in __all__:
        return getattr(import_module("nightbridge.flows"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
