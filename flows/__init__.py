"""The public flow API: what runs, as Python functions.

    from flows import bisect_regression, nightly_regression, run_pipeline

    report = nightly_regression("conf/practice/nightly.toml")
    verdict = run_pipeline("conf/practice/llama_small.toml")
    culprits = bisect_regression("llama-small").culprits

They run as Prefect flow runs, shown in the UI, and return the answer whatever it is; `flows.nightly.nightly`,
`flows.pipeline.pipeline` and `flows.bisect.bisect_flow` are the flows themselves, for deployments. Flows compose tasks:
no subprocess, no boto3 and no parsing here.
"""

from flows.api import bisect_regression, nightly_regression, run_pipeline

__all__ = ["bisect_regression", "nightly_regression", "run_pipeline"]
