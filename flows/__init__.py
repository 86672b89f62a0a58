"""The public flow API: what runs, as Python functions.

    from nightbridge import bisect_regression, nightly_regression, run_pipeline

    report = nightly_regression("conf/practice/nightly.toml")
    verdict = run_pipeline("conf/practice/llama_small.toml")
    culprits = bisect_regression("llama-small").culprits

They run as Prefect flow runs, shown in the UI, and return the answer whatever it is. The flows themselves, for
deployments, are `nightly`, `pipeline` and `bisect_flow`, in the modules `nightly`, `pipeline` and `bisect`. Flows
compose tasks: no subprocess, no boto3 and no parsing here.
"""

from nightbridge.flows.api import bisect_regression, nightly_regression, run_pipeline

__all__ = ["bisect_regression", "nightly_regression", "run_pipeline"]
