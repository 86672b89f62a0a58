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
"""

from nightbridge.flows.api import (
    aattribute_regression,
    abisect_regression,
    acheck_parity,
    acompare_runs,
    anightly_regression,
    aread_history,
    arun_pipeline,
    arun_sweep,
    atry_change,
    attribute_regression,
    averify_run,
    bisect_regression,
    check_parity,
    compare_runs,
    nightly_regression,
    read_history,
    run_pipeline,
    run_sweep,
    try_change,
    verify_run,
)

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
