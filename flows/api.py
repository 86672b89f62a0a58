"""The functions that Python users call; see `flows/__init__.py`."""

from pathlib import Path

from prefect.client.orchestration import get_client
from prefect.settings import PREFECT_API_URL

from blocks import load_site
from flows.nightly import nightly
from flows.pipeline import pipeline
from flows.states import result_of
from nightbridge import config
from nightbridge.errors import InvalidInput, TransientError
from nightbridge.models import NightReport, RunSpec, Scenario, Verdict
from nightbridge.nights import checked_night, new_night
from nightbridge.rules import check_scenario
from nightbridge.slurm.ledger import AttemptChoice


def nightly_regression(
    scenario: str | Path,
    *,
    night: str | None = None,
    system: str | None = None,
    cluster: str | None = None,
    store: str | None = None,
    workspace: str | Path | None = None,
    new_attempt: bool = False,
) -> NightReport:
    """Run a scenario for one night, and return every test's verdict and the report's place.

    Args:
        scenario: Path of a scenario or test file.
        night: Night id; the same id finds everything again. Default: a new one.
        system: Name of a Site block, or path of a site file.
        cluster: `local`, `slurm`, or the name of a Slurm Cluster block.
        store: `file://` or `s3://` URL, or the name of a Harvest Store block.
        workspace: Folder that the compute nodes see under the same path; `.nightbridge` by default.
        new_attempt: Open a new attempt for runs whose last one ended.

    Raises:
        InvalidInput: The scenario, the night id or a named block is wrong, or no test can run; nothing was started.
        PermanentError: The workspace or the store cannot be written.
        TransientError: The store or the Prefect server does not answer.
    """
    _valid_tests(scenario)
    _check_server()
    load_site(system, cluster=cluster, store=store, workspace=_text(workspace))
    state = nightly(
        str(scenario),
        night=checked_night(night) if night else new_night(),
        system=system,
        cluster=cluster,
        store=store,
        workspace=_text(workspace),
        new_attempt=new_attempt,
        return_state=True,
    )
    report: NightReport = result_of(state)
    return report


def run_pipeline(
    test: str | Path | RunSpec,
    *,
    night: str | None = None,
    system: str | None = None,
    cluster: str | None = None,
    store: str | None = None,
    workspace: str | Path | None = None,
    new_attempt: bool = False,
) -> Verdict:
    """Run one test through all stages, and return its verdict.

    Args:
        test: Path of a file with exactly one run in it, or the run itself.
        night: As for `nightly_regression`; a `RunSpec` has its own.
        system: As for `nightly_regression`.
        cluster: As for `nightly_regression`.
        store: As for `nightly_regression`.
        workspace: As for `nightly_regression`.
        new_attempt: As for `nightly_regression`.

    Raises:
        InvalidInput: The file is wrong or has several runs, or a named block does not exist; nothing was started.
        TransientError: The Prefect server does not answer.
    """
    run = test if isinstance(test, RunSpec) else _only_run(test, checked_night(night) if night else new_night())
    _check_server()
    site = load_site(system, cluster=cluster, store=store, workspace=_text(workspace))
    verdict: Verdict = result_of(
        pipeline(run, site, AttemptChoice.NEW if new_attempt else AttemptChoice.CURRENT, return_state=True)
    )
    return verdict


def _valid_tests(file: str | Path) -> Scenario:
    """The file's tests, of which at least one can run."""
    scenario = check_scenario(config.load(Path(file)))
    if scenario.invalid and not scenario.tests:
        violations = [violation for test in scenario.invalid for violation in test.violations]
        raise InvalidInput("no test of it can run", thing=str(file), advice="Mend what follows", violations=violations)
    return scenario


def _only_run(file: str | Path, night: str) -> RunSpec:
    scenario = _valid_tests(file)
    runs = config.runs(scenario, night)
    count = len(runs) + len(scenario.invalid)
    if count != 1:
        raise InvalidInput(f"holds {count} runs, not one", thing=str(file), advice="Use nightly_regression for several")
    return runs[0]


def _check_server() -> None:
    """Tell here that the configured Prefect server is away; further on it would look like a defect of ours."""
    url = PREFECT_API_URL.value()
    if url is None:
        return  # Prefect starts one for this process
    with get_client(sync_client=True) as client:
        error = client.api_healthcheck()
    if error is not None:
        raise TransientError(
            "the Prefect server does not answer", thing=url, advice="Start it, or unset PREFECT_API_URL to go without"
        ) from error


def _text(path: str | Path | None) -> str | None:
    return None if path is None else str(path)
