"""What made a test worse: `bisect` and `attribute` search for it, and `try` judges a change before it lands.

All three submit runs of their own.
"""

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nightbridge.cli.options import (
    JsonOption,
    ScenarioArgument,
    TestIdArgument,
    check_folder,
    load_site,
    note_no_site,
    open_site_store,
    with_site_options,
)
from nightbridge.cli.output import is_terminal, logged, note, show, write_file
from nightbridge.errors import InvalidInput

if TYPE_CHECKING:
    from nightbridge.bisect.plan import Repository
    from nightbridge.models import Site, SiteChoice


YesOption = Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation of the cost.")]
MetricOption = Annotated[
    str | None, typer.Option("--metric", help="Which metric, failure or losses; what broke or became worse last.")
]
AtOnceOption = Annotated[
    int | None, typer.Option("--at-once", min=1, help="Runs at once; as many as the cluster has room for.")
]


@with_site_options("system", "cluster", "store", "workspace")
def bisect(
    choice: "SiteChoice",
    test_id: TestIdArgument,
    metric: MetricOption = None,
    repository: Annotated[
        str | None, typer.Option("--repository", help="megatron-bridge or nemo-run; each whose commit changed.")
    ] = None,
    good: Annotated[str | None, typer.Option("--good", metavar="COMMIT", help="Begin after it; from history.")] = None,
    bad: Annotated[str | None, typer.Option("--bad", metavar="COMMIT", help="End with it; from history.")] = None,
    bisect_id: Annotated[str | None, typer.Option("--id", help="Resume this bisect.")] = None,
    confidence: Annotated[float, typer.Option("--confidence", help="How probable the commit must be.")] = 0.99,
    most_runs: Annotated[int, typer.Option("--most-runs", min=1, help="Runs after which it ends undecided.")] = 100,
    at_once: AtOnceOption = None,
    yes: YesOption = False,
    as_json: JsonOption = False,
) -> int:
    """Find the commit that broke a test or made it worse, by running commits between a good and a bad night.

    Prints the expected cost first, and on a terminal asks for confirmation. The same command resumes an interrupted
    bisect. Exit code 0 when the commit is found, 1 when not.
    """
    from nightbridge.bisect.plan import BisectRequest
    from nightbridge.bisect.result import result_lines
    from nightbridge.flows import bisect_regression
    from nightbridge.models import slug
    from nightbridge.tasks.bisect import price

    known: dict[str, Repository] = {"megatron-bridge": "megatron_bridge", "nemo-run": "nemo_run"}
    if repository is not None and repository.lower() not in known:
        raise InvalidInput("no such repository", subject=repository, advice="Use megatron-bridge or nemo-run")
    site = load_site(choice)
    test_id, search = _named_search(site, test_id)
    search |= {
        "metric": metric,
        "repository": known[repository.lower()] if repository else None,
        "good": good,
        "bad": bad,
        "bisect_id": bisect_id,
        "confidence": confidence,
        "most_runs": most_runs,
        "at_once": at_once,
    }
    what = f"bisect of {test_id}"
    if not _is_confirmed(what, lambda: f"about {price(test_id, BisectRequest.model_validate(search), site)}", yes):
        return 1
    with logged(choice, f"bisect-{slug(test_id)}"):
        result = bisect_regression(test_id, **search, **choice.parameters())
    document = {**result.model_dump(mode="json"), "culprits": result.culprits, "gpu_hours": result.gpu_hours}
    show(as_json, document, lambda: result_lines(result))
    return 0 if result.culprits else 1


@with_site_options("system", "cluster", "store", "workspace")
def attribute(
    choice: "SiteChoice",
    test_id: TestIdArgument,
    metric: MetricOption = None,
    budget: Annotated[
        float | None, typer.Option("--budget", help="GPU-hours after which it ends undecided, more than 0; no limit.")
    ] = None,
    good: Annotated[str | None, typer.Option("--good", metavar="NIGHT", help="The last good night.")] = None,
    bad: Annotated[str | None, typer.Option("--bad", metavar="NIGHT", help="The first bad night.")] = None,
    confidence: Annotated[float, typer.Option("--confidence", help="How probable the cause must be.")] = 0.99,
    most_runs: Annotated[int, typer.Option("--most-runs", min=2, help="Runs after which it ends undecided.")] = 40,
    at_once: AtOnceOption = None,
    yes: YesOption = False,
    as_json: JsonOption = False,
) -> int:
    """Find what made a test worse: image, commit, submodule, configuration, environment or nodes.

    Runs exchange what changed between a good and a bad night. Prints the expected cost first, and on a terminal asks
    for confirmation. The same command resumes it. Exit code 0 when the cause is found, 1 when not.
    """
    from nightbridge.attribution.attribution_plan import AttributionRequest
    from nightbridge.attribution.attribution_result import result_lines, sentence
    from nightbridge.flows import attribute_regression
    from nightbridge.models import slug
    from nightbridge.tasks.attribute import cost_of

    site = load_site(choice)
    test_id, request = _named_search(site, test_id)
    request |= {
        "metric": metric,
        "good": good,
        "bad": bad,
        "budget": budget,
        "confidence": confidence,
        "most_runs": most_runs,
        "at_once": at_once,
    }
    what = f"attribution of {test_id}"
    if not _is_confirmed(what, lambda: cost_of(test_id, AttributionRequest.model_validate(request), site), yes):
        return 1
    with logged(choice, f"attribute-{slug(test_id)}"):
        result = attribute_regression(test_id, **request, **choice.parameters())
    known = {"sentence": sentence(result), "gpu_hours": result.gpu_hours, "found": result.is_found}
    show(as_json, {**result.model_dump(mode="json"), **known}, lambda: result_lines(result))
    return 0 if result.is_found else 1


def _named_search(site: "Site", name: str) -> tuple[str, dict[str, Any]]:
    """The test that a name means on the command line, and what a request takes of the name itself."""
    from nightbridge.models import is_run_key
    from nightbridge.nights.records import find_test

    test_id, until = find_test(open_site_store(site), name)
    return test_id, {"run_key": name if is_run_key(name) else None, "until": until}


def _is_confirmed(what: str, cost: Callable[[], str], yes: bool) -> bool:
    """Say what a search will about cost, and ask on a terminal whether it may."""
    from pydantic import ValidationError

    with contextlib.suppress(ValidationError):  # what is wrong with a request, the search says itself
        note(f"{what}: {cost()}")
    if yes or not is_terminal(sys.stdin) or typer.confirm("continue?", err=True):
        return True
    note("nothing was started")
    return False


@with_site_options("system", "cluster", "store", "workspace")
def try_change(
    choice: "SiteChoice",
    file: ScenarioArgument,
    bridge: Annotated[
        str | None, typer.Option("--bridge", metavar="REF|PR", help="Megatron-Bridge: a ref, or a pull request.")
    ] = None,
    core: Annotated[
        str | None, typer.Option("--core", metavar="REF|PR", help="Its submodule Megatron-LM, in the same way.")
    ] = None,
    image: Annotated[str | None, typer.Option("--image", metavar="IMG", help="Container image.")] = None,
    most_pairs: Annotated[int | None, typer.Option("--most-pairs", min=1, help="Pairs of runs at most.")] = None,
    page: Annotated[
        Path | None, typer.Option("--markdown", metavar="FILE", help="Write the answer there, for a pull request.")
    ] = None,
    as_json: JsonOption = False,
) -> int:
    """Run a change before it lands beside the test as its file says, in pairs on the same nodes, and judge it.

    Exit code 0 when it is as good or better, 1 when it is worse or undecided, 3 when it fails, 4 when the control does.
    """
    from nightbridge.flows import try_change
    from nightbridge.gate.paired_trial import TRIAL_EXIT_CODES, markdown

    check_folder(page)
    note_no_site(choice)
    with logged(choice, f"try-{file.stem}"):
        found = try_change(file, bridge=bridge, core=core, image=image, most_pairs=most_pairs, **choice.parameters())
    text = markdown(found)
    if page is not None:
        write_file(page, text.encode())
    show(as_json, found.model_dump(mode="json"), text.splitlines)
    return TRIAL_EXIT_CODES[found.answer]
