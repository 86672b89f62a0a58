"""When an attribution was answered before."""

from pathlib import Path

from nightbridge.attribution.result import evaluate, keep_result
from nightbridge.bisect.search import BisectPolicy
from nightbridge.models import Site
from nightbridge.tasks.attribute import earlier_result
from nightbridge.tasks.site import store_of
from tests.builders import ATTRIBUTION_PLAN, exchange_runs


def test_an_answer_that_is_not_as_sure_as_requested_is_none(tmp_path: Path) -> None:
    site = Site(workspace=tmp_path)
    answer = evaluate(ATTRIBUTION_PLAN, exchange_runs([1]))
    keep_result(store_of(site), answer)
    surer = BisectPolicy(confidence=0.9999)

    assert earlier_result(ATTRIBUTION_PLAN, site) == answer
    assert earlier_result(ATTRIBUTION_PLAN.model_copy(update={"policy": surer}), site) is None
