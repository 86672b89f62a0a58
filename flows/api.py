"""The functions that Python users call; see `flows/__init__.py`.

A flow takes Prefect a tenth of a second to load: those that are no part of a night are loaded by the function that runs
them.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from prefect import Flow, tags
from prefect.client.schemas.objects import State
from pydantic import ValidationError

from nightbridge import config
from nightbridge.attribution.attribution_plan import AttributionRequest
from nightbridge.attribution.attribution_result import AttributionResult
from nightbridge.bisect.plan import BisectRequest
from nightbridge.bisect.result import BisectResult
from nightbridge.blocks import load_site
from nightbridge.errors import InvalidInput
from nightbridge.flows.final_states import TAG, plain_errors, result_of
from nightbridge.flows.nightly import nightly
from nightbridge.flows.pipeline import pipeline
from nightbridge.flows.server import reach_blocks, reach_server
from nightbridge.flows.threads import async_twin, outside_of_loops
from nightbridge.gate.paired_trial import ProposedChange, Trial, plan_trial
from nightbridge.goldens.parity import Parity
from nightbridge.harvest import restore
from nightbridge.models import (
    ClusterLimits,
    Model,
    NightReport,
    ReferencePolicy,
    RunSpec,
    Scenario,
    Site,
    SiteChoice,
    SweepResult,
    Verdict,
    utc_now,
)
from nightbridge.nights.records import checked_night, new_night
from nightbridge.report import queries
from nightbridge.report.queries import TestHistory, Verification
from nightbridge.rules import check_scenario
from nightbridge.slurm.attempts import AttemptRequest
from nightbridge.tasks.context import shared_night
from nightbridge.tasks.prepare import node_limits
from nightbridge.tasks.site_access import store_of

R = TypeVar("R")
_Request = TypeVar("_Request", bound=Model)


@outside_of_loops
def nightly_regression(
    scenario: str | Path | Scenario,
    *,
    night: str | None = None,
    system: str | None = None,
    cluster: str | None = None,
    store: str | None = None,
    workspace: str | Path | None = None,
    retry: bool = False,
    new_attempt: bool = False,
) -> NightReport:
    """Run a scenario for one night, and return every test's verdict and the address of the report.

    What the other functions have of the same name they have in the same sense.

    Args:
        scenario: Path of a scenario or test file, or the scenario itself, read with `config.load` and checked with
            `rules.check_scenario`.
        night: Night id; the same id finds everything again. Default: a new one.
        system: Name of a Site block, or path of a site file.
        cluster: `local`, `slurm`, or the name of a Slurm Cluster block.
        store: `file://` or `s3://` URL, or the name of a Harvest Store block.
        workspace: Folder that the compute nodes see under the same path; `.nightbridge` by default.
        retry: Run again the runs of the night that ended badly, and no others.
        new_attempt: Run again every run of the night that has ended, good ones too.

    Raises:
        InvalidInput: The scenario, the night id or a named block is wrong, or no test can run; nothing was started.
        PermanentError: The workspace or the store cannot be written.
        TransientError: The store or the Prefect server does not answer.
    """
    checked = scenario if isinstance(scenario, Scenario) else check_scenario(config.load(Path(scenario)))
    _require_a_test(checked)
    tonight = new_night() if night is None else checked_night(night)
    choice = SiteChoice(system=system, cluster=cluster, store=store, workspace=workspace)
    file = checked.source if isinstance(scenario, Scenario) else str(scenario)
    with shared_night(checked):
        return _returned(nightly, choice, file, night=tonight, retry=retry, new_attempt=new_attempt)


@outside_of_loops
def run_pipeline(  # noqa: D417  (`nightly_regression` describes the others)
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
        night: Night id, where the test is a file; a `RunSpec` has its own.

    Raises:
        InvalidInput: The file is wrong or has several runs, or a named block does not exist; nothing was started.
        TransientError: The Prefect server does not answer.
    """
    choice = SiteChoice(system=system, cluster=cluster, store=store, workspace=workspace)
    if isinstance(test, RunSpec):
        run, site = test, _reach_site(choice)
    else:
        checked = check_scenario(config.load(Path(test)))
        run = _only_run(checked, new_night() if night is None else checked_night(night))
        site = _reach_site(choice)
        if limits := node_limits(checked, site):
            run = _only_run(check_scenario(checked, limits), run.night, limits)
    request = AttemptRequest(new=utc_now() if new_attempt else None)
    with tags(TAG), plain_errors():
        verdict: Verdict = result_of(pipeline(run, site, request, return_state=True))
    return verdict


def run_sweep(  # noqa: D417  (`nightly_regression` describes the others)
    test: str | Path,
    *,
    night: str | None = None,
    system: str | None = None,
    cluster: str | None = None,
    store: str | None = None,
    workspace: str | Path | None = None,
    retry: bool = False,
    new_attempt: bool = False,
) -> SweepResult:
    """Run every valid point of one swept test, and return what became of them, the best first.

    Args:
        test: Path of a file with one test that has lists in `[cmd_args]`.

    Raises:
        InvalidInput: The file is wrong or has no sweep, or several tests; nothing was started.
        TransientError: The store or the Prefect server does not answer.
    """
    checked = check_scenario(config.load(Path(test)))
    _require_a_test(checked)
    if len(checked.tests) != 1 or not checked.tests[0].axes:
        raise InvalidInput("not one test that is swept", subject=checked.source, advice="Use nightly_regression")
    choice = SiteChoice(system=system, cluster=cluster, store=store, workspace=workspace)
    report = nightly_regression(checked, night=night, retry=retry, new_attempt=new_attempt, **choice.parameters())
    return report.sweeps[0]


@outside_of_loops
def bisect_regression(  # noqa: D417  (`nightly_regression` describes the others)
    test_id: str,
    *,
    system: str | None = None,
    cluster: str | None = None,
    store: str | None = None,
    workspace: str | Path | None = None,
    **search: Any,
) -> BisectResult:
    """Find the commit that made a metric of a test worse, by running commits between a good and a bad night.

    Args:
        test_id: The test, as its history knows it.
        search: Fields of `nightbridge.bisect.plan.BisectRequest`, such as `metric` and `most_runs`.

    Raises:
        InvalidInput: The test has no history, nothing became worse, no commit changed, or a field of the request is
            unknown or out of range; nothing was started.
        PermanentError: The store cannot be read or written.
        TransientError: The store or the Prefect server does not answer.
    """
    from nightbridge.flows.bisect import bisect_flow

    request = _request(BisectRequest, test_id, search)
    choice = SiteChoice(system=system, cluster=cluster, store=store, workspace=workspace)
    return _returned(bisect_flow, choice, test_id, request)


@outside_of_loops
def attribute_regression(  # noqa: D417  (`nightly_regression` describes the others)
    test_id: str,
    *,
    system: str | None = None,
    cluster: str | None = None,
    store: str | None = None,
    workspace: str | Path | None = None,
    **search: Any,
) -> AttributionResult:
    """Find what made a metric of a test worse: image, commit, submodule, configuration, environment or nodes.

    Args:
        test_id: The test, as its history knows it.
        search: Fields of `nightbridge.attribution.attribution_plan.AttributionRequest`, such as `metric` and `budget`.

    Raises:
        InvalidInput: The test has no history, nothing became worse, nothing changed that can be exchanged, or a field
            of the request is unknown or out of range; nothing was started.
        PermanentError: The store cannot be read or written.
        TransientError: The store or the Prefect server does not answer.
    """
    from nightbridge.flows.attribute import attribute_flow

    request = _request(AttributionRequest, test_id, search)
    choice = SiteChoice(system=system, cluster=cluster, store=store, workspace=workspace)
    return _returned(attribute_flow, choice, test_id, request)


@outside_of_loops
def compare_runs(  # noqa: D417  (`nightly_regression` describes the others)
    run_key: str,
    baseline: str | None = None,
    *,
    system: str | None = None,
    store: str | None = None,
    workspace: str | Path | None = None,
) -> Verdict:
    """Judge a stored run again: against the good runs before it, or against one other run.

    Args:
        run_key: The run.
        baseline: The run key of the other one; None for the run's own history.

    Raises:
        InvalidInput: One of the runs is not in the store, or a named block does not exist.
        DamagedData: One of them is not what was committed.
        TransientError: The store does not answer.
    """
    site = _stored_site(system, store, workspace)
    return queries.compare_stored(store_of(site), run_key, baseline, site.contract)


@outside_of_loops
def read_history(  # noqa: D417  (`nightly_regression` describes the others)
    test_id: str,
    *,
    on: str | None = None,
    system: str | None = None,
    store: str | None = None,
    workspace: str | Path | None = None,
) -> TestHistory:
    """Return every stored run of a test and its trends.

    Args:
        test_id: The test.
        on: Name of the cluster; any when None.

    Raises:
        InvalidInput: The store has no history of the test, or a named block does not exist.
        DamagedData: A row cannot be read.
        TransientError: The store does not answer.
    """
    return queries.history_of(store_of(_stored_site(system, store, workspace)), test_id, on)


@outside_of_loops
def check_parity(  # noqa: D417  (`nightly_regression` describes the others)
    run_a: str,
    run_b: str,
    policy: ReferencePolicy | None = None,
    *,
    system: str | None = None,
    store: str | None = None,
    workspace: str | Path | None = None,
) -> Parity:
    """Compare two stored runs step by step: whether they compute the same, or converge alike.

    Args:
        run_a: Run key of the run that is compared with.
        run_b: Run key of the run that is compared.
        policy: How far the losses may be apart at single iterations; the usual limits when None.

    Raises:
        InvalidInput: One of the runs is not in the store, or a named block does not exist.
        DamagedData: One of them is not what was committed, or has no scalars.
        TransientError: The store does not answer.
    """
    return queries.parity_stored(store_of(_stored_site(system, store, workspace)), run_a, run_b, policy)


@outside_of_loops
def verify_run(  # noqa: D417  (`nightly_regression` describes the others)
    run_key: str,
    *,
    deep: bool = False,
    system: str | None = None,
    store: str | None = None,
    workspace: str | Path | None = None,
) -> Verification:
    """Check every stored object of a run against its manifest, and name those that do not belong to it.

    Args:
        run_key: The run.
        deep: Read every byte, and not only stored checksums.

    Raises:
        InvalidInput: The run is not in the store, or a named block does not exist.
        TransientError: The store does not answer.
    """
    check = restore.verify_content if deep else restore.verify_run
    return queries.verify_stored(store_of(_stored_site(system, store, workspace)), run_key, check=check)


@outside_of_loops
def try_change(  # noqa: D417  (`nightly_regression` describes the others)
    test_file: str | Path,
    *,
    bridge: str | int | None = None,
    core: str | int | None = None,
    image: str | None = None,
    most_pairs: int | None = None,
    system: str | None = None,
    cluster: str | None = None,
    store: str | None = None,
    workspace: str | Path | None = None,
) -> Trial:
    """Run a change before it lands beside the test as its file says, in pairs on the same nodes, and judge it.

    Args:
        test_file: A file with one run.
        bridge: Ref of Megatron-Bridge, or the number of a pull request.
        core: Ref of its submodule Megatron-LM, or the number of a pull request.
        image: Container image.
        most_pairs: Pairs at most; by the test's `[gate] pairs` when unset.

    Raises:
        InvalidInput: The file has not one run, or there is nothing to try, or no pair; nothing was started.
        PermanentError: The store cannot be read or written.
        TransientError: The store or the Prefect server does not answer.
    """
    from nightbridge.flows.trial import try_flow

    choice = SiteChoice(system=system, cluster=cluster, store=store, workspace=workspace)
    if most_pairs is not None and most_pairs < 1:
        raise InvalidInput("not a number of pairs", subject=f"most_pairs={most_pairs}", advice="Give 1 or more")
    numbers = {name: None if ref is None else str(ref) for name, ref in {"bridge": bridge, "core": core}.items()}
    change = ProposedChange(**numbers, image=image)
    plan_trial(_only_run(check_scenario(config.load(Path(test_file))), "try"), change, utc_now())
    return _returned(try_flow, choice, str(test_file), change, most_pairs=most_pairs)


anightly_regression = async_twin(nightly_regression)
arun_pipeline = async_twin(run_pipeline)
arun_sweep = async_twin(run_sweep)
abisect_regression = async_twin(bisect_regression)
aattribute_regression = async_twin(attribute_regression)
atry_change = async_twin(try_change)
acompare_runs = async_twin(compare_runs)
aread_history = async_twin(read_history)
acheck_parity = async_twin(check_parity)
averify_run = async_twin(verify_run)


def _returned(flow: Flow[..., State[R]], choice: SiteChoice, *arguments: object, **named: object) -> R:
    """What a flow returns at a site, once a Prefect server answers."""
    _reach_site(choice)
    with tags(TAG), plain_errors():
        returned: R = result_of(flow(*arguments, return_state=True, **named, **choice.parameters()))
    return returned


def _request(kind: type[_Request], test_id: str, fields: Mapping[str, Any]) -> _Request:
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()]
        raise InvalidInput("not a request", subject=f"{kind.__name__} for {test_id}", violations=problems) from error


def _require_a_test(scenario: Scenario) -> None:
    if scenario.invalid and not scenario.tests:
        several = len(scenario.invalid) > 1
        violations = [found.line(test.id * several) for test in scenario.invalid for found in test.findings]
        raise InvalidInput("no test of it can run", subject=scenario.source, violations=violations)


def _only_run(scenario: Scenario, night: str, limits: ClusterLimits | None = None) -> RunSpec:
    _require_a_test(scenario)
    runs = config.runs(scenario, night, limits)
    count = len(runs) + len(scenario.invalid)
    if count != 1:
        advice = "Name the file of one test; a night runs several, with `nightbridge run` or nightly_regression"
        raise InvalidInput(f"holds {count} runs, not one", subject=scenario.source, advice=advice)
    return runs[0]


def _reach_site(choice: SiteChoice) -> Site:
    """The site, once a Prefect server answers; an invalid file is reported without starting one."""
    reach_blocks(choice)
    reach_server()
    return load_site(choice)


def _stored_site(system: str | None, store: str | None, workspace: str | Path | None) -> Site:
    """The site whose store is read; Prefect's server is queried only for what a block has."""
    choice = SiteChoice(system=system, store=store, workspace=workspace)
    reach_blocks(choice)
    return load_site(choice)
