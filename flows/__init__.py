"""The public flow API: what runs, as Python functions.

    from nightbridge import bisect_regression, nightly_regression, run_pipeline

    report = nightly_regression("conf/practice/nightly.toml")
    verdict = run_pipeline("conf/practice/llama_small.toml")
    culprits = bisect_regression("llama-small").culprits

They run as Prefect flow runs, shown in the UI, and return the answer whatever it is; `check_parity`, `compare_runs`,
`read_history` and `verify_run` only read the store. Each may be called where an event loop runs, as in a notebook, and
has a twin with an `a` before its name that is awaited. The flows themselves, for deployments, are `nightly`,
`pipeline`, `bisect_flow` and `attribute_flow`, in the modules `nightly`, `pipeline`, `bisect` and `attribute`. Flows
compose tasks: no subprocess, no boto3 and no parsing here.

The functions are loaded when the first of them is used: a worker that runs one of the flows does not load them all.
"""

import atexit
import gc
from importlib import import_module
from typing import TYPE_CHECKING

from nightbridge import __all__ as __all__  # the same functions

if TYPE_CHECKING:
    from nightbridge.flows.api import *  # noqa: F403

# Python walks through all that Prefect has imported once more when it ends, a fifth of what a flow run's start takes.
atexit.register(gc.freeze)


def __getattr__(name: str) -> object:
    if name in __all__:
        return getattr(import_module("nightbridge.flows.api"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
