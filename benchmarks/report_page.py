"""How long the pages of a large night take, and how large they are.

    PYTHONPATH=. python benchmarks/report_page.py [TESTS NIGHTS INDEX_TESTS INDEX_NIGHTS]      default: 100 60 500 1000

The report of a night of TESTS tests, a tenth of them regressed, each with NIGHTS nights of history and scalars in the
store; and `reports/index.html` from INDEX_NIGHTS nights of INDEX_TESTS tests.
"""

import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date, timedelta
from pathlib import Path

from nightbridge.gate.run_verdict import compare
from nightbridge.history.history_store import put_row
from nightbridge.history.rows import row_of
from nightbridge.models import StoreSettings, Verdict, VerdictStatus, utc_now
from nightbridge.nights.records import NightEnd, NightStart, NightTest, NightVerdict, record_start
from nightbridge.outputs.event_files import metrics_parquet
from nightbridge.report.night_report import night_report_html
from nightbridge.report.overview import index_html
from nightbridge.store.object_store import ObjectStore, open_store
from tests.builders import commit_run, make_record, make_row, make_summary, scalar_table

FIRST_NIGHT = date(2024, 3, 1)


def main(tests: int, nights: int, index_tests: int, index_nights: int) -> None:
    with tempfile.TemporaryDirectory(prefix="report-page-") as folder:
        store = open_store(StoreSettings(url=Path(folder).as_uri()))
        verdicts = [judged(store, number, nights) for number in range(tests)]
        night = verdicts[0].night
        show(
            f"report, {tests} tests",
            lambda: night_report_html(store, "nightly", night, verdicts, cluster=make_record().job.cluster),
            tests,
        )
    with tempfile.TemporaryDirectory(prefix="report-page-") as folder:
        store = open_store(StoreSettings(url=Path(folder).as_uri()))
        write_nights(store, index_tests, index_nights)
        show(f"index, {index_tests} tests x {index_nights} nights", lambda: index_html(store), index_tests)


def judged(store: ObjectStore, number: int, nights: int) -> Verdict:
    """A test with so many nights in the store, the last one judged; each tenth test is 8 % slower in that."""
    rows = []
    for at in range(nights):
        noise = 1 + 0.002 * ((at * 7 + number) % 5 - 2)
        row = make_row(make_summary([noise] * 50, tflops=700 / noise), night_of(at))
        rows.append(row.model_copy(update={"test_id": f"test-{number:03}", "series": f"test-{number:03}-0123456789ab"}))
        put_row(store, rows[-1])
    step_time = 1.08 if number % 10 == 0 else 1.0
    record = make_record(
        make_summary([step_time] * 50, tflops=700 / step_time), night_of(nights), test_id=f"test-{number:03}"
    )
    record = commit_run(store, record.model_copy(update={"series": rows[-1].series}))
    curves = {tag: {step: 10.0 / step + step_time for step in range(1, 51)} for tag in ("lm_loss", "iteration_time")}
    store.put(f"{record.prefix}/metrics.parquet", metrics_parquet(scalar_table(**curves)))
    verdict = compare(record, rows)
    put_row(store, row_of(record, verdict))
    return verdict


def write_nights(store: ObjectStore, tests: int, nights: int) -> None:
    """The beginnings and ends of so many nights, one test in seventy bad."""
    for at in range(nights):
        night = night_of(at)
        verdicts = tuple(
            NightVerdict(
                test_id=f"test-{number:03}",
                run_key=f"test-{number:03}-{night}-0123456789",
                status=VerdictStatus.REGRESSED if (at * 31 + number * 17) % 70 == 0 else VerdictStatus.PASSED,
                gpu_hours=10.0,
                step_time=1 + 0.001 * ((at * 7 + number) % 9),
            )
            for number in range(tests)
        )
        named = {"night": night, "scenario": "nightly"}
        runs = tuple(NightTest(test_id=verdict.test_id, run_key=verdict.run_key) for verdict in verdicts)
        start = NightStart(**named, cluster="local", workspace=Path("/shared"), begun_at=utc_now(), tests=runs)
        record_start(store, start)
        end = NightEnd(**named, ended_at=utc_now(), exit_code=1, verdicts=verdicts)
        store.put(f"nights/{night}/nightly/ended.json", end.model_dump_json().encode())


def night_of(number: int) -> str:
    return str(FIRST_NIGHT + timedelta(days=number))


def show(what: str, make: Callable[[], str], tests: int) -> None:
    processor, wall = time.process_time(), time.perf_counter()
    page = make()
    processor, wall = time.process_time() - processor, time.perf_counter() - wall
    shown = sum(f"test-{number:03}" in page for number in range(tests))
    print(f"{what}: {len(page) / 1e6:.2f} MB, {processor:.2f} s of processor time, {wall:.2f} s; {shown} tests on it")


if __name__ == "__main__":
    main(*(int(argument) for argument in (sys.argv[1:5] or ("100", "60", "500", "1000"))))
