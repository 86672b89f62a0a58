"""The public flow API: what runs, as Python functions.

    from flows import nightly_regression, run_pipeline

    report = nightly_regression("conf/practice/nightly.toml")
    verdict = run_pipeline("conf/practice/llama_small.toml")

Both run as Prefect flow runs, shown in the UI, and return the verdict whatever it is; `flows.nightly.nightly` and
`flows.pipeline.pipeline` are the flows themselves, for deployments. Flows compose tasks: no subprocess, no boto3 and no
parsing here.
"""

from flows.api import nightly_regression, run_pipeline

__all__ = ["nightly_regression", "run_pipeline"]
