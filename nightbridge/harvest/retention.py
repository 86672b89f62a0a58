"""Old runs for `prune` to remove from the store: whole ones, to which no run that stays refers.

A run's manifest is removed first: from then on its remains do not count as a run, and the next removal finds the rest.
History rows stay; they are small, and the trend needs them.
"""

import bisect
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime, timedelta

from pydantic import AwareDatetime, Field

from nightbridge.harvest.manifest import MANIFEST
from nightbridge.models import GOOD_VERDICTS, GatePolicy, Model, RetentionPolicy, Verdict, night_order
from nightbridge.store.object_store import ObjectInfo, ObjectStore, read_stored
from nightbridge.store.parallel import Meter, Progress, in_parallel

VERDICT = "verdict.json"
DECISIONS = "decisions"
"""Folder of the store with accepted runs. A run whose key occurs anywhere in it stays."""

NEVER_YOUNGER_THAN = timedelta(days=1)
"""A run that was written to within this time is never removed: its verdict may be in progress."""

LEFTOVER_AGE = timedelta(days=7)
"""Time without a write after which objects without a manifest belong to a harvest or a removal that died."""

_RUN = re.compile(r"runs/([^/]+)/([^/]+)/([^/]+)/")
_SEARCH = re.compile(r"-(?:try|bisect|attribute)-[0-9a-f]{8}(?:-\d+)?$")
"""How the name ends that the runs of a trial, a bisect or an attribution have in place of a night.

The search inside a factor of an attribution has the factor's number behind it.
"""
_ATTEMPT_MANIFEST = re.compile(rf"a\d+/{re.escape(MANIFEST)}")


class StoredRun(Model):
    """A run as the store's listing shows it: all its attempts together."""

    prefix: str = Field(description="`runs/<test slug>/<night>/<run key>`.")
    test: str = Field(description="The test's slug.")
    night: str
    run_key: str
    size: int = Field(description="Bytes of all its objects.")
    objects: int
    committed: bool = Field(description="Whether any attempt has a manifest.")
    stored_at: AwareDatetime = Field(description="When its output was written: that is its age.")
    written_at: AwareDatetime = Field(
        description="When the newest of its objects was written, such as a verdict that was made again."
    )
    verdict: Verdict | None = None


class RunRemoval(Model):
    """A stored run that is no longer needed."""

    run: StoredRun
    url: str
    reason: str


def find_old_runs(store: ObjectStore, policy: RetentionPolicy) -> list[RunRemoval]:
    """The stored runs that `policy` does not keep, oldest first; nothing is removed. No limit at all removes nothing.

    Raises:
        DamagedData: A verdict cannot be read, so the runs that it refers to are unknown.
    """
    if policy == RetentionPolicy():
        return []
    now = datetime.now(UTC)
    runs = _listed(store)
    committed = [run for run in runs if run.committed]
    what = "not a verdict; the runs it was compared with are unknown"
    advice = "Compare the run again, or delete the file"
    verdicts = in_parallel(
        lambda run: read_stored(store, f"{run.prefix}/{VERDICT}", Verdict, what=what, advice=advice), committed
    )
    judged = [run.model_copy(update={"verdict": verdict}) for run, verdict in zip(committed, verdicts, strict=True)]
    leftover = "without a manifest: left by an interrupted harvest or removal"
    leftovers = [(run, leftover) for run in runs if not run.committed and now - run.written_at > LEFTOVER_AGE]
    chosen = [*choose_runs(judged, policy, _decisions(store), now=now), *leftovers]
    return [
        RunRemoval(run=run, url=store.url_of(run.prefix), reason=reason)
        for run, reason in sorted(chosen, key=lambda found: found[0].written_at)
    ]


def choose_runs(
    runs: Sequence[StoredRun], policy: RetentionPolicy, decisions: str, *, now: datetime
) -> list[tuple[StoredRun, str]]:
    """Choose the committed runs that go, each with the reason.

    What a run that stays was compared with stays as well, and so does what the next night will be compared with: the
    newest good runs of every series, and the run that a test names as its reference. That ends there: what such a run
    was itself compared with may go. `decisions` is the text of all accepted ones.
    """
    reasons: dict[str, str] = {}
    by_test: dict[str, list[StoredRun]] = defaultdict(list)
    for run in runs:
        by_test[run.test].append(run)
    for of_test in by_test.values():
        reasons |= _beyond_limits(of_test, policy, now)
    kept = [run for run in runs if run.run_key not in reasons]
    referred = {key for run in kept if run.verdict for key in run.verdict.baseline_runs}
    referred |= {run.verdict.control.run_key for run in kept if run.verdict and run.verdict.control}
    referred |= _next_baselines(runs)
    referred |= {run.verdict.reference_run for run in runs if run.verdict and run.verdict.reference_run}
    return [
        (run, reasons[run.run_key])
        for run in runs
        if run.run_key in reasons
        and run.run_key not in referred
        and run.run_key not in decisions
        and now - run.written_at > NEVER_YOUNGER_THAN
    ]


def remove_runs(
    store: ObjectStore, removals: Sequence[RunRemoval], on_progress: Callable[[Progress], None] | None = None
) -> list[RunRemoval]:
    """Remove stored runs, the manifests of each before all else; return those that are gone.

    One that was written to, or accepted, since it was chosen stays. Leftovers of uploads that were interrupted long
    ago, which no listing shows, are removed as well.
    """
    removed: list[RunRemoval] = []
    listed: tuple[ObjectInfo, ...] = ()
    decisions = ""
    meter = Meter("removing", [removal.run.size for removal in removals], on_progress)
    for number, removal in enumerate(removals):
        found = list(store.list(removal.run.prefix))
        if (there := tuple(store.list(DECISIONS))) != listed:  # thousands of runs take long enough for a new one
            listed, decisions = there, _decisions(store)
        if _newest(found) <= removal.run.written_at and removal.run.run_key not in decisions:
            _remove(store, removal.run.prefix, [each.key for each in found])
            removed.append(removal)
        meter.done(number)
        meter.report()
    store.remove_leftovers("runs", datetime.now(UTC) - LEFTOVER_AGE)
    return removed


def _remove(store: ObjectStore, prefix: str, keys: Sequence[str]) -> None:
    manifests = [key for key in keys if _ATTEMPT_MANIFEST.fullmatch(key.removeprefix(f"{prefix}/"))]
    for key in manifests:
        store.delete(key)
    in_parallel(store.delete, sorted(set(keys) - set(manifests)))
    store.remove_leftovers(prefix)


def _beyond_limits(runs: Sequence[StoredRun], policy: RetentionPolicy, now: datetime) -> dict[str, str]:
    """The runs of one test that a limit does not allow, by run key, each with the reason."""
    order_of: dict[str, str] = {}
    for run in runs:
        order_of[run.night] = max(order_of.get(run.night, ""), _order(run))
    orders = sorted(order for night, order in order_of.items() if not _SEARCH.search(night))
    # What a search has run stays as long as the nights of its time.
    newer_nights = {night: len(orders) - bisect.bisect_right(orders, order) for night, order in order_of.items()}
    reasons, kept_bytes = {}, 0
    for run in sorted(runs, key=lambda run: (newer_nights[run.night], -run.written_at.timestamp())):
        age = (now - run.stored_at) / timedelta(days=1)
        gigabytes = (kept_bytes + run.size) / 1e9
        limits = (
            (policy.days, age, f"stored {age:.0f} days ago"),
            (policy.nights, newer_nights[run.night] + 1, f"{policy.nights} newer nights are kept"),
            (policy.max_gb, gigabytes, "newer ones use up the allowed size"),
        )
        reason = next((text for limit, value, text in limits if limit is not None and value > limit), None)
        if reason:
            reasons[run.run_key] = reason
        else:
            kept_bytes += run.size
    return reasons


def _order(run: StoredRun) -> str:
    """What runs sort by: their night, whose verdict may be written again later; of a search, when it was run."""
    return night_order("" if _SEARCH.search(run.night) else run.night, run.written_at)


def _next_baselines(runs: Iterable[StoredRun]) -> set[str]:
    """The good runs of the newest nights of every series that have one, as many as its next verdict may take.

    A night has several where its test is repeated; its further runs, such as the arms of pairs, are no baseline.
    """
    by_series: dict[str, list[StoredRun]] = defaultdict(list)
    for run in runs:
        if run.verdict and run.verdict.series and not run.verdict.repeat and not _SEARCH.search(run.night):
            by_series[run.verdict.series].append(run)
    keys: set[str] = set()
    for of_series in by_series.values():
        newest_first = sorted(of_series, key=lambda run: (_order(run), run.written_at), reverse=True)
        # The test's own setting is not in the verdict, but what it has taken so far is, and tonight it may be one more.
        taken = max(len(run.verdict.baseline_runs) for run in newest_first if run.verdict)
        good = [run for run in newest_first if run.verdict and run.verdict.status in GOOD_VERDICTS]
        nights = list(dict.fromkeys(run.night for run in good))[: max(GatePolicy().baseline_runs, taken + 1)]
        keys.update(run.run_key for run in good if run.night in nights)
    return keys


def _listed(store: ObjectStore) -> list[StoredRun]:
    found: dict[str, list[ObjectInfo]] = defaultdict(list)
    for item in store.list("runs"):
        if match := _RUN.match(item.key):
            found[match[0].rstrip("/")].append(item)
    return [_run_of(prefix, items) for prefix, items in found.items()]


def _run_of(prefix: str, items: Sequence[ObjectInfo]) -> StoredRun:
    _, test, night, run_key = prefix.split("/")
    return StoredRun(
        prefix=prefix,
        test=test,
        night=night,
        run_key=run_key,
        size=sum(item.size for item in items),
        objects=len(items),
        committed=any(_ATTEMPT_MANIFEST.fullmatch(item.key.removeprefix(f"{prefix}/")) for item in items),
        stored_at=_newest([item for item in items if item.key != f"{prefix}/{VERDICT}"] or items),
        written_at=_newest(items),
    )


def _newest(items: Iterable[ObjectInfo]) -> datetime:
    return max((item.modified for item in items if item.modified), default=datetime.min.replace(tzinfo=UTC))


def _decisions(store: ObjectStore) -> str:
    return "\n".join((store.get(found.key) or b"").decode(errors="replace") for found in store.list(DECISIONS))
