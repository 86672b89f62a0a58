"""All tests of the last nights in a line each. It reads records and verdicts alone, so that it needs no numpy."""

import itertools

from pydantic import Field

from nightbridge.models import Model, Verdict, VerdictStatus
from nightbridge.nights.records import newest_first, read_verdict
from nightbridge.report.tables import STATUS_WORDS, cause_of, short_reason
from nightbridge.store.protocol import ObjectStore
from nightbridge.store.transfers import in_parallel

OVERVIEW_NIGHTS = 14


class TestOverview(Model):
    """A test's last nights and its newest verdict."""

    __test__ = False  # not a pytest class

    test_id: str
    run_key: str
    night: str
    verdict: VerdictStatus
    reason: str = Field("", description="What is wrong, in a few words.")
    since: str = Field("", description="The first night of what stands.")
    cause: str = ""
    step_time: float | None = Field(None, description="Seconds.")
    nights: dict[str, VerdictStatus] = Field(description="Verdict of each night, oldest first; the gravest of a sweep.")

    def __str__(self) -> str:
        signs = "".join(STATUS_WORDS[status].symbol for status in self.nights.values())
        said = " ".join(filter(None, (self.reason, self.cause and f"; {self.cause}")))
        words = STATUS_WORDS[self.verdict].label
        return f"{signs}  {words}{f': {said}' if STATUS_WORDS[self.verdict].task else ''}"


def overview_of_tests(store: ObjectStore, since: str = "", limit: int = OVERVIEW_NIGHTS) -> tuple[TestOverview, ...]:
    """Every test of the last nights that ended, by id.

    Args:
        store: Where the nights are.
        since: The first night; empty for the last ones.
        limit: How many nights at most, where `since` names none.

    Raises:
        DamagedData: A record of a night or a verdict cannot be read.
    """
    nights = itertools.takewhile(lambda night: night.start.night >= since, newest_first(store))
    ended = [night for night in (nights if since else itertools.islice(nights, limit)) if night.end]
    runs = [
        (night.start.night, verdict)
        for night in reversed(ended)
        for verdict in (night.end.verdicts if night.end else ())
    ]
    newest = {verdict.test_id: (verdict.run_key, night) for night, verdict in runs}
    judged = in_parallel(lambda test_id: read_verdict(store, *newest[test_id]), sorted(newest))
    seen: dict[str, dict[str, VerdictStatus]] = {}
    for night, verdict in runs:
        known = seen.setdefault(verdict.test_id, {})
        known[night] = min(known.get(night, verdict.status), verdict.status, key=list(STATUS_WORDS).index)
    return tuple(_overview(verdict, seen[verdict.test_id]) for verdict in judged if verdict)


def _overview(verdict: Verdict, nights: dict[str, VerdictStatus]) -> TestOverview:
    step_time = next((item.value for item in verdict.comparisons if item.metric == "step_time"), None)
    return TestOverview(
        test_id=verdict.test_id,
        run_key=verdict.run_key,
        night=verdict.night,
        verdict=verdict.status,
        reason=short_reason(verdict) if STATUS_WORDS[verdict.status].task else "",
        since=verdict.since,
        cause=cause_of(verdict),
        step_time=step_time,
        nights={**nights, verdict.night: verdict.status},
    )
