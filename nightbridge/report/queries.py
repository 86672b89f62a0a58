"""Queries about stored runs: what the trend is, how two runs compare, whether they are alike, also as a page."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from pydantic import Field

from nightbridge.errors import DamagedData, InvalidInput
from nightbridge.gate.decisions import read_decisions
from nightbridge.gate.evidence import Contract, own_bands
from nightbridge.gate.run_verdict import compare_with
from nightbridge.gate.stored_verdicts import judge
from nightbridge.gate.trend import Trend, trends
from nightbridge.goldens.goldens import GoldenValues, run_values, write_golden
from nightbridge.harvest.manifest import foreign_objects, last_attempt_prefix, load_record, read_manifest, read_scalars
from nightbridge.harvest.restore import verify_run
from nightbridge.history.nightly_values import rows_until
from nightbridge.history.reading import StoredSeries, find_series, read_history
from nightbridge.history.rows import HistoryRow, row_of
from nightbridge.models import Model, ReferencePolicy, RunRecord, Verdict
from nightbridge.nights.records import like_test, read_verdict
from nightbridge.report.tables import sweep_point_of
from nightbridge.store.object_store import ObjectStore
from nightbridge.store.parallel import Progress

if TYPE_CHECKING:
    import pandas as pd

    from nightbridge.goldens.parity import Parity, ParityGate

MAX_OTHERS = 5
"""Further series of a test that are named."""

OnProgress = Callable[[Progress], None]


class TestHistory(Model):
    """A test's latest series with its trends, and what other series the store has of it."""

    __test__ = False  # not a pytest class

    test_id: str
    cluster: str
    series: str
    rows: tuple[HistoryRow, ...]
    trends: tuple[Trend, ...]
    others: tuple[StoredSeries, ...]

    @property
    def which_lines(self) -> tuple[str, ...]:
        """Which of the test's series this is, and what others there are; nothing where it is the only one."""
        if not self.others:
            return ()
        point = sweep_point_of(self.rows[-1]) if self.rows else ""
        shown = ", ".join(filter(None, (self.series, point)))
        others = [f"{one.series} until {one.last_night}" for one in self.others[:MAX_OTHERS]]
        more = len(self.others) - len(others)
        rest = ", ".join([*others, *([f"{more} more"] if more else [])])
        return (f"shown: {shown}; also there: {rest}. `nightbridge history RUN_KEY` shows the series of a run",)

    def to_dataframe(self) -> "pd.DataFrame":
        """One row for each run, the oldest first: the fields of `HistoryRow`, those of its summary beside them."""
        import pandas as pd

        rows = [row.model_dump(mode="json", exclude={"summary"}) | row.summary.model_dump() for row in self.rows]
        return pd.DataFrame(rows)


class Verification(Model):
    """What a stored run was found to be."""

    run_key: str
    url: str = Field(description="Where the run is.")
    problems: tuple[str, ...] = Field(description="One line for each object that is missing or damaged.")
    foreign: tuple[str, ...] = Field(description="Paths below the run's prefix that its manifest does not name.")

    @property
    def is_whole(self) -> bool:
        """Whether every object is there and is what was committed."""
        return not self.problems


def verify_stored(
    store: ObjectStore,
    run_key: str,
    *,
    check: Callable[[ObjectStore, str, OnProgress | None], list[str]] = verify_run,
    on_progress: OnProgress | None = None,
) -> Verification:
    """Check every stored object of a run's last attempt against its manifest.

    Args:
        store: Where the run is.
        run_key: The run.
        check: `verify_run` trusts stored checksums; `verify_content` reads every byte.
        on_progress: Called with how far it is.

    Raises:
        InvalidInput: The run is not in the store.
    """
    prefix = last_attempt_prefix(store, run_key)
    problems, manifest = check(store, prefix, on_progress), read_manifest(store, prefix)
    return Verification(
        run_key=run_key,
        url=store.url_of(prefix),
        problems=tuple(problems),
        foreign=tuple(foreign_objects(store, manifest) if manifest else ()),
    )


def history_of(
    store: ObjectStore,
    test_id: str,
    cluster: str | None = None,
    *,
    until: str | None = None,
    run_key: str | None = None,
) -> TestHistory:
    """The history of a test up to a night: its series with the latest night, on one cluster or on any.

    With a run key it is the series of that run: of a sweep another point, or an earlier configuration.

    Raises:
        InvalidInput: The store has no history of the test, or none of that run or night.
        DamagedData: A row cannot be read.
    """
    found = find_series(store, test_id, cluster)
    of_others: set[StoredSeries] = set()
    for latest in found:
        rows = read_history(store, latest.cluster, latest.series)
        # Ids that differ only in what a slug leaves out are found together.
        if rows and rows[0].test_id != test_id:
            of_others.add(latest)
        elif rows and (run_key is None or any(row.run_key == run_key for row in rows)):
            rows = rows_until(rows, until)
            return TestHistory(
                test_id=test_id,
                cluster=latest.cluster,
                series=latest.series,
                rows=rows,
                trends=trends(rows, decisions=read_decisions(store, latest.cluster, latest.series)),
                others=tuple(one for one in found if one != latest and one not in of_others),
            )
    where = f"{store.url}, cluster {cluster}" if cluster else store.url
    if run_key and len(of_others) < len(found):
        advice = f"It may have died before it was stored; `nightbridge history {test_id}` shows the runs that were"
        raise InvalidInput("no such run in the history", subject=f"{run_key} in {where}", advice=advice)
    raise InvalidInput("no history of this test", subject=f"{test_id} in {where}", advice=like_test(store, test_id))


def compare_stored(
    store: ObjectStore, run_key: str, baseline: str | None = None, contract: Contract | None = None
) -> Verdict:
    """Judge a stored run again: against the good runs before it, or against one other run.

    Args:
        store: Where both are.
        run_key: The run.
        baseline: The run key of the other one; None for the run's own history.
        contract: What the site owes each test; of no account against one other run.

    Raises:
        InvalidInput: One of them is not in the store.
        DamagedData: One of them is not what was committed.
    """
    record = _record(store, run_key)
    if baseline is None:
        verdict, stored = judge(store, record, contract or {})[0], read_verdict(store, run_key, record.spec.night)
        # What changed was looked up when the night ended; it takes git, which a reading command does without.
        same = stored is not None and stored.status is verdict.status
        return verdict.model_copy(update={"suspects": stored.suspects}) if stored and same else verdict
    other = _record(store, baseline)
    return compare_with(record, (row_of(other, compare_with(other, ())),))


def parity_stored(store: ObjectStore, run_a: str, run_b: str, policy: ReferencePolicy | None = None) -> "Parity":
    """Compare the curves of two stored runs: B against A, by the bands that the good nights before the later one keep.

    Args:
        store: Where both are.
        run_a: The reference's run key.
        run_b: The other one's.
        policy: How far the losses may be apart at single iterations; the usual limits when None.

    Raises:
        InvalidInput: One of them is not in the store.
        DamagedData: One of them is not what was committed, or has no scalars.
    """
    from nightbridge.goldens.parity import DEFAULT_ITERATIONS, run_parity

    a, b = _metrics(store, run_a), _metrics(store, run_b)
    records = (_record(store, run) for run in (run_a, run_b))
    bands = own_bands(store, max(records, key=lambda record: row_of(record, None).order))
    return run_parity(a, b, names=(run_a, run_b), policy=policy or DEFAULT_ITERATIONS, bands=bands)


def golden_stored(store: ObjectStore, run_key: str) -> str:
    """What a stored run measured, as a file of golden values for `[gate] golden` and for Megatron-Bridge's own tests.

    Raises:
        InvalidInput: It is not in the store, or its verdict is not of a run that went well.
        DamagedData: It is not what was committed, or has no scalars.
    """
    record = _record(store, run_key)
    verdict = read_verdict(store, run_key, record.spec.night)
    if verdict is None or verdict.exit_code:
        status = verdict.status if verdict else "not judged"
        raise InvalidInput(
            f"this run is {status}: whatever is compared with its values would pass",
            subject=run_key,
            advice="Name a run that passed",
        )
    measured = run_values(_metrics(store, run_key), record.summary, GoldenValues(format="megatron-bridge", metrics={}))
    return write_golden(measured)


def parity_page_stored(store: ObjectStore, found: "Parity", gate: "ParityGate") -> str:
    """The page about two stored runs that `parity_stored` has compared. Raises as it does."""
    return parity_html(found, _metrics(store, found.a), _metrics(store, found.b), gate)


def parity_html(found: "Parity", a: "pd.DataFrame", b: "pd.DataFrame", gate: "ParityGate") -> str:
    """Render one self-contained HTML page about B beside A; the headline speaks of `gate`."""
    from nightbridge.goldens.parity import GRAD_NORM, LEARNING_RATE, LOSS
    from nightbridge.report.charts import differences_chart, steps_chart
    from nightbridge.report.night_page import render_page

    faults = found.faults_of(gate)
    steps = found.following.steps
    labels = {LOSS: "loss", GRAD_NORM: "grad norm", LEARNING_RATE: "learning rate"}
    named = [(labels.get(curve.tag, curve.tag), curve) for curve in found.curves]
    return render_page(
        "parity.html.j2",
        found=found,
        tone="bad" if faults else "good",
        headline=f"The two runs {found.words_of(gate)}",
        faults=faults,
        differences=differences_chart(
            [step.step for step in steps], [step.difference for step in steps], [step.limit for step in steps]
        ),
        sections=[
            {"label": label, "overlay": steps_chart(b, a, curve.tag, label), "facts": curve.facts}
            for label, curve in named
        ],
    )


def _record(store: ObjectStore, run_key: str) -> RunRecord:
    prefix = last_attempt_prefix(store, run_key)
    record = load_record(store, prefix)
    if record is None:
        raise DamagedData("no record", subject=store.url_of(prefix), advice="Harvest the run again")
    return record


def _metrics(store: ObjectStore, run_key: str) -> "pd.DataFrame":
    return read_scalars(store, last_attempt_prefix(store, run_key))
