"""The page of the morning, and its short forms."""

import io
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import quote, unquote, urljoin

import pandas as pd
import pytest
from pydantic import ValidationError
from rich.console import Console

from nightbridge.attribution.attribution_plan import folder_of, keep_plan
from nightbridge.attribution.attribution_result import AttributionResult, evaluate, keep_result, sentence
from nightbridge.errors import LaunchRefused, TransientError
from nightbridge.gate.decisions import record_decision
from nightbridge.gate.run_verdict import compare, verdict_for_error, verdict_for_invalid
from nightbridge.harvest.manifest import Manifest
from nightbridge.history.history_store import put_row
from nightbridge.history.reading import series_of
from nightbridge.history.rows import HistoryRow, Pin, row_of
from nightbridge.models import (
    InvalidTest,
    Outcome,
    RangeCommit,
    RepositoryChange,
    RunRecord,
    RunSpec,
    StoredFile,
    Summary,
    Suspects,
    ValueChange,
    Verdict,
    VerdictStatus,
    Violation,
)
from nightbridge.models.metrics import COLUMNS
from nightbridge.models.series import former_series_id, series_id
from nightbridge.models.verdict import exit_code_of
from nightbridge.outputs.event_files import empty_table, metrics_parquet
from nightbridge.report import overview
from nightbridge.report.night_page import MAX_CHARTED, ReportedRun, headline_of
from nightbridge.report.night_report import link_from_night_before, night_report_html, render_report
from nightbridge.report.overview import index_html
from nightbridge.report.tables import (
    STATUS_WORDS,
    compact_lines,
    markdown_table,
    next_lines,
    reason_lines,
    short_reason,
    verdict_table,
)
from nightbridge.store.directory import DirectoryStore
from nightbridge.store.parallel import WORKERS
from tests.builders import (
    ATTRIBUTED_FACTORS,
    ATTRIBUTION_PLAN,
    exchange_runs,
    make_decision,
    make_summary,
    make_verdict,
    store_night,
)
from tests.conftest import need
from tests.real.browser import Page as Tab
from tests.real.browser import browser, browser_missing_reason

Records = Callable[..., RunRecord]
Specs = Callable[..., RunSpec]
Summaries = Callable[..., Summary]
Nights = Callable[..., tuple[Verdict, tuple[HistoryRow, ...]]]

HOSTILE = "<script>alert('x')</script> | **bold** [red]x[/red] \"&"


class Page(HTMLParser):
    """What a browser would see: tags with their attributes, and the text outside of styles."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self._open = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._open = tag

    def handle_data(self, data: str) -> None:
        if self._open != "style":
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def links(self) -> list[str]:
        return [attributes["href"] or "" for tag, attributes in self.tags if tag == "a"]


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    need(browser_missing_reason())
    with browser(tmp_path_factory.mktemp("browser")) as tab:
        yield tab


@pytest.fixture
def nights(make_record: Records, summary_of: Summaries) -> Nights:
    """Consecutive nights of a test with these step times, each judged by those before; the last one is tonight."""

    def run(
        step_times: list[float], test_id: str = "llama3-8b", **tonight: object
    ) -> tuple[Verdict, tuple[HistoryRow, ...]]:
        rows: list[HistoryRow] = []
        for day, step_time in enumerate(step_times, 21 - len(step_times) + 1):
            fields = tonight if day == 21 else {}
            record = make_record(
                summary_of([step_time] * 50),
                f"2026-11-{day:02}",
                **{"test_id": test_id, "commit": f"{day:040x}", "subject": f"Change of night {day}"} | fields,
            )
            verdict = compare(record, rows)
            rows.append(row_of(record, verdict))
        return verdict, tuple(rows)

    return run


def render(*tests: tuple[Verdict, tuple[HistoryRow, ...]]) -> Page:
    return Page(render_report("2026-11-21", "nightly", [ReportedRun(verdict, rows) for verdict, rows in tests]))


# --- the headline ----------------------------------------------------------------------------------------------------


def test_one_regression_is_the_headline(nights: Nights) -> None:
    page = render(nights([1.0, 1.0, 1.08]), nights([2.0, 2.0, 2.0], "other"))

    assert "Look at llama3-8b: step time +8.0 %." in page.text
    assert "2 tests: 1 regressed, 1 insufficient data." in page.text


def test_several_calls_are_counted(nights: Nights) -> None:
    verdicts = [nights([1.0, 1.2], f"test-{n}")[0] for n in range(3)] + [nights([1.0, 1.0], "fine")[0]]

    assert headline_of(verdicts)[0] == "3 of 4 tests need attention."


def test_the_head_says_what_the_nights_runs_cost_and_how_much_of_it_was_confirmation() -> None:
    verdicts = [
        make_verdict(VerdictStatus.PASSED, gpu_hours=1200.0),
        make_verdict(VerdictStatus.REGRESSED, test_id="other", gpu_hours=2.5, confirmation_gpu_hours=10.0),
    ]

    assert headline_of(verdicts)[1].endswith(" 1,212.50 GPU-hours, 10.00 of them confirmation.")
    assert "GPU-hours" not in headline_of([make_verdict(VerdictStatus.INVALID)])[1]


@pytest.mark.parametrize("step_times", [[1.0], [1.0, 1.0], [1.0, 0.8]])
def test_a_good_night_asks_nothing(nights: Nights, step_times: list[float]) -> None:
    page = render(nights(step_times))

    assert "Nothing to do this morning." in page.text


def test_an_empty_night_is_not_a_good_night() -> None:
    assert "Nothing ran tonight." in render().text


def test_every_verdict_has_words_and_only_good_ones_ask_for_nothing() -> None:
    assert set(STATUS_WORDS) == set(VerdictStatus)
    for status, words in STATUS_WORDS.items():
        exit_code = Verdict(run_key="k", test_id="t", night="n", status=status).exit_code
        assert bool(words.task) == (exit_code != 0)


# --- the page --------------------------------------------------------------------------------------------------------


def test_the_matrix_shows_each_metric_with_value_change_and_judgement(nights: Nights) -> None:
    text = render(nights([1.0, 1.0, 1.08])).text

    assert "1.080 ▲ +8.0 % worse" in text
    assert "700.0 ±0.0 %" in text
    assert all(metric.label in text and metric.unit in text for metric in COLUMNS)


def test_each_number_stands_below_its_own_heading_where_a_metric_was_not_measured(nights: Nights) -> None:
    verdict, _rows = nights([1.0, 1.0, 1.08])
    measured = tuple(item for item in verdict.comparisons if item.metric in ("step_time", "final_loss"))

    html = render_report("2026-11-21", "nightly", [ReportedRun(verdict.model_copy(update={"comparisons": measured}))])

    row = html[html.index('<table class="matrix">') : html.index("</tbody>")]
    cells = re.findall(r'<td class="number" data-label="([^",]*)[^>]*>(?:<span[^>]*>)+([^<]*)', row)
    values = {"step_time": "1.080", "final_loss": "5.100"}
    assert cells == [(metric.label, values.get(metric.name, "–")) for metric in COLUMNS]


def test_the_chart_of_the_nights_shows_tonights_value_as_the_table_does(nights: Nights) -> None:
    verdict, rows = nights([1.0, 1.0, 1.0123])
    repeats = tuple(
        rows[-1].model_copy(
            update={
                "run_key": f"{rows[-1].run_key}-{number}",
                "repeat": number,
                "summary": rows[-1].summary.model_copy(update={"step_time": step_time}),
            }
        )
        for number, step_time in enumerate((1.0234, 1.0345), 1)
    )

    paired = tuple(
        item.model_copy(update={"value": 1.0456}) if item.metric == "step_time" else item
        for item in verdict.comparisons
    )
    page = render((verdict.model_copy(update={"comparisons": paired}), (*rows, *repeats)))

    assert "1.046" in page.words  # of the chart: the table's has a change beside it
    assert "1.046 ▲ +1.2 %" in page.text


def test_the_gravest_test_comes_first(nights: Nights) -> None:
    text = render(nights([1.0, 1.0], "aaa"), nights([1.0, 2.0], "zzz")).text

    assert text.rindex("zzz-2026") < text.rindex("aaa-2026")


def test_numbers_of_a_failed_run_are_not_judged(nights: Nights) -> None:
    text = render(nights([1.0, 1.0, 3.0], outcome=Outcome.TIMEOUT)).text

    assert "3.000 ▲ +200.0 %" in text
    assert "worse" not in text


def test_a_missing_metric_is_said_in_words(make_record: Records, summary_of: Summaries) -> None:
    record = make_record(summary_of(tflops=None))
    verdict = compare(record, ())

    text = render((verdict, (row_of(record, verdict),))).text

    assert "– not measured" in text
    assert "throughput was not measured" in text


def test_the_page_says_which_pins_changed_since_the_last_good_night(nights: Nights) -> None:
    page = render(nights([1.0, 1.0, 1.08]))

    assert "Tonight against the last good night, 2026-11-20" in page.text
    assert "Change of night 21" in page.text
    assert "Change of night 20" in page.text
    assert [tag for tag, _ in page.tags].count("strong") == 1  # "changed", once
    compare_page = "https://github.com/NVIDIA-NeMo/Megatron-Bridge/compare"
    assert page.links()[-1] == f"{compare_page}/{20:040x}...{21:040x}"


def test_a_first_night_has_nothing_to_compare(nights: Nights) -> None:
    text = render(nights([1.0])).text

    assert "there is no good night before it" in text
    assert "nothing to compare with" in text
    assert " changed" not in text


def test_the_page_says_where_to_look_further(nights: Nights) -> None:
    verdict, rows = nights([1.0, 1.0], outcome_reason="all 50 steps, exit code 0")
    text = render((verdict, rows)).text

    assert "Job 4711" in text
    assert f"s3://bucket/nightly/{verdict.prefix}" in text
    assert verdict.run_key in text
    assert "the job succeeded (all 50 steps, exit code 0)" in text
    assert "node[1-2]" in text
    assert "nvcr.io/nvidia/nemo:26.08 (dddddddddddd)" in text


def test_where_values_came_from_is_told(make_record: Records, summary_of: Summaries) -> None:
    record = make_record(summary_of().model_copy(update={"notes": ("TensorBoard lacks `lm loss` at 3 iterations",)}))
    verdict = compare(record, ())

    assert "TensorBoard lacks `lm loss` at 3 iterations" in render((verdict, (row_of(record, verdict),))).text


def test_runs_that_never_started_have_a_section_too(make_spec: Specs, nights: Nights) -> None:
    refused = verdict_for_error(make_spec("2026-11-21"), LaunchRefused("invalid account", subject="sbatch"), "series")
    invalid = verdict_for_invalid(
        InvalidTest(id="bad", findings=(Violation(message="no such key"),)), "nightly", "2026-11-21"
    )
    earlier = nights([1.0, 1.0, 1.0])[1][:-1]

    text = render((refused, earlier), (invalid, ())).text

    assert "sbatch: invalid account" in text
    assert "no such key" in text
    assert text.count("no measurements") == 2
    assert "Median step time of each night" in text


def test_a_run_that_died_has_the_history_that_an_older_release_named_otherwise(
    store: DirectoryStore, make_spec: Specs, nights: Nights
) -> None:
    spec = make_spec("2026-11-21", cmd_args={"num_gpus": 8, "max_steps": "50"})
    for row in nights([1.0, 1.0, 1.0])[1][:-1]:
        put_row(store, row.model_copy(update={"series": former_series_id(spec, "dgx")}))
    former, present = series_of(store, spec, "dgx"), series_id(spec, "dgx")
    died = verdict_for_error(spec, LaunchRefused("invalid account", subject="sbatch"), present)

    page = night_report_html(store, "nightly", "2026-11-21", [died], cluster="dgx")

    assert former != present
    assert "Median step time of each night" in page


def test_a_verdict_that_only_a_newer_release_gives_is_shown_by_its_name_and_alarms(nights: Nights) -> None:
    verdict, rows = nights([1.0, 1.0])
    newer = Verdict.model_validate_json(verdict.model_dump_json().replace(verdict.status, "partly_passed", 1))

    assert "partly passed" in render((newer, rows)).text
    assert "| ? partly passed |" in markdown_table([newer])
    assert headline_of([verdict, newer])[1].startswith("2 tests: 1 partly passed, 1 ")
    assert (newer.exit_code, exit_code_of([newer.status])) == (1, 1)
    with pytest.raises(ValidationError):
        Verdict.model_validate_json(verdict.model_dump_json().replace(verdict.status, "no word", 1))


def test_a_metric_that_only_a_newer_release_measures_is_shown_by_its_name(nights: Nights) -> None:
    verdict, rows = nights([1.0] * 8 + [1.5])
    newer = Verdict.model_validate_json(verdict.model_dump_json().replace('"step_time"', '"stall_time"'))

    assert newer.status is VerdictStatus.REGRESSED
    assert short_reason(newer).startswith("stall time +50.0 %")
    assert "stall time" in render((newer, rows)).text
    assert "| ◆ regressed |" in markdown_table([newer])


def test_sweep_points_of_one_test_are_told_apart(nights: Nights) -> None:
    text = render(
        nights([1.0], sweep_point={"cmd_args.tensor_model_parallel_size": 2}),
        nights([1.0], sweep_point={"cmd_args.tensor_model_parallel_size": 4}),
    ).text

    assert "tensor_model_parallel_size = 2" in text
    assert "tensor_model_parallel_size = 4" in text


def test_later_nights_are_not_on_the_page(nights: Nights) -> None:
    verdict, rows = nights([1.0, 1.0])
    later = rows[0].model_copy(update={"night": "2026-12-01", "nodes": "from-the-future"})

    assert render((verdict, (*rows, later))).text == render((verdict, rows)).text


def test_nights_after_one_that_is_named_by_a_word_are_not_on_its_page(nights: Nights) -> None:
    verdict, rows = nights([1.0, 1.0])
    verdict = verdict.model_copy(update={"night": "try-1"})
    word = rows[-1].model_copy(update={"night": "try-1"})
    later = rows[0].model_copy(update={"night": f"{word.harvested_at + timedelta(days=1):%Y-%m-%d}", "nodes": "future"})

    assert render((verdict, (*rows[:-1], word, later))).text == render((verdict, (*rows[:-1], word))).text


def test_the_page_needs_nothing_but_itself(nights: Nights) -> None:
    verdict, rows = nights([1.0, 1.0, 1.08])
    page = render((verdict, rows))

    assert not {tag for tag, _ in page.tags} & {"script", "link", "img", "iframe", "object", "embed", "base", "form"}
    loading = [value for _, attributes in page.tags for name, value in attributes.items() if name in ("src", "srcset")]
    handlers = [name for _, attributes in page.tags for name in attributes if name.startswith("on")]
    assert (loading, handlers) == ([], [])
    html = render_report("2026-11-21", "nightly", [ReportedRun(verdict, rows)])
    assert "@import" not in html
    assert "url(http" not in html


def test_text_from_outside_stays_text(nights: Nights) -> None:
    verdict, rows = nights([1.0, 1.0, 1.2], f"test {HOSTILE}", subject=HOSTILE, sweep_point={HOSTILE: HOSTILE})
    verdict = verdict.model_copy(update={"reasons": (HOSTILE,)})
    bad_link = Pin(url="javascript:alert(1)", commit="e" * 40, describe=HOSTILE, subject=HOSTILE)
    rows = (*rows[:-1], rows[-1].model_copy(update={"megatron_bridge": bad_link, "nodes": HOSTILE}))

    page = Page(render_report("2026-11-21", HOSTILE, [ReportedRun(verdict, rows, notes=[HOSTILE])]))

    assert "script" not in {tag for tag, _ in page.tags}
    assert page.text.count("<script>alert('x')</script>") >= 8
    assert all(link.startswith(("#", "../", "https://github.com/")) for link in page.links())


def test_two_tests_of_ten_nights_take_seconds_and_not_minutes(nights: Nights) -> None:
    tests = [nights([1.0] * 9 + [1.08]), nights([2.0] * 10, "other")]
    render(*tests)  # imports matplotlib

    began = time.process_time()
    render(*tests)

    assert time.process_time() - began < 30.0


# --- what changed since the good level -------------------------------------------------------------------------------


@pytest.fixture
def suspects() -> Suspects:
    commits = tuple(
        RangeCommit(
            commit=f"{number:040x}",
            subject=f"Change {number} {HOSTILE}",
            author="Ada <ada@example.org>",
            authored_at=datetime(2026, 11, number, tzinfo=UTC),
        )
        for number in (3, 2)
    )
    return Suspects(
        last_good="2026-11-18",
        night="2026-11-19",
        run_before="before",
        run_after="after",
        repositories=(
            RepositoryChange(
                name="Megatron-Bridge",
                url="https://github.com/NVIDIA-NeMo/Megatron-Bridge.git",
                before=f"{1:040x}",
                after=f"{3:040x}",
                commits=commits,
                note="and 7 older commits",
            ),
            RepositoryChange(
                name="NeMo-Run", url="javascript:alert(1)", before="c" * 40, after="d" * 40, commits=commits[:1]
            ),
        ),
        configuration=(ValueChange(name="model.moe.capacity", before="1.0", after=HOSTILE),),
        environment=(ValueChange(name="$NCCL_TIMEOUT", before="", after="1200"),),
        notes=("the older run is gone",),
    )


class TestSuspects:
    def page(self, nights: Nights, suspects: Suspects) -> Page:
        verdict, rows = nights([1.0, 1.0, 1.08, 1.08])
        return render((verdict.model_copy(update={"suspects": suspects}), rows))

    def test_commits_have_subject_author_date_and_a_link(self, nights: Nights, suspects: Suspects) -> None:
        page = self.page(nights, suspects)

        assert "What changed between the last good night, 2026-11-18, and 2026-11-19" in page.text
        assert "Megatron-Bridge: 2 commits," in page.text
        assert f"Change 3 {HOSTILE}" in page.text
        assert "Ada <ada@example.org>, 2026-11-03" in page.text
        assert "and 7 older commits" in page.text
        assert f"https://github.com/NVIDIA-NeMo/Megatron-Bridge/commit/{3:040x}" in page.links()
        assert f"https://github.com/NVIDIA-NeMo/Megatron-Bridge/compare/{1:040x}...{3:040x}" in page.links()

    def test_a_repository_of_an_unknown_host_has_no_links(self, nights: Nights, suspects: Suspects) -> None:
        page = self.page(nights, suspects)

        assert "NeMo-Run: 1 commit," in page.text
        assert all(link.startswith(("#", "../", "https://github.com/")) for link in page.links())

    def test_configuration_and_environment_are_told_with_what_they_were(
        self, nights: Nights, suspects: Suspects
    ) -> None:
        text = self.page(nights, suspects).text

        assert f"model.moe.capacity {HOSTILE} was 1.0" in text
        assert "$NCCL_TIMEOUT 1200 was not set" in text
        assert "the older run is gone" in text

    def test_where_nothing_changed_the_machines_are_suspect(self, nights: Nights) -> None:
        nothing = Suspects(last_good="2026-11-18", night="2026-11-19", run_before="before", run_after="after")

        assert "suspect the machines" in self.page(nights, nothing).text

    def test_many_commits_are_folded_and_a_few_are_not(self, nights: Nights, suspects: Suspects) -> None:
        many = suspects.repositories[0].model_copy(update={"commits": suspects.repositories[0].commits * 20})
        page = self.page(nights, suspects.model_copy(update={"repositories": (many, suspects.repositories[1])}))

        assert [("open" in attributes) for tag, attributes in page.tags if tag == "details"][1:] == [False, True]


# --- in a browser -----------------------------------------------------------------------------------------------------

SEEN = """(() => {
  const number = text => (text.match(/[\\d.]+/g) || []).map(Number);
  const light = rgb => {
    const [r, g, b] = rgb.map(c => c / 255).map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = element => {
    for (let each = element; each; each = each.parentElement) {
      const colour = number(getComputedStyle(each).backgroundColor);
      if (colour.length && (colour.length < 4 || colour[3] > 0)) return colour.slice(0, 3);
    }
    return [255, 255, 255];
  };
  const found = {wide: document.documentElement.scrollWidth - innerWidth, words: [], dim: [], letters: 99};
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const text = walker.currentNode.data.trim(), element = walker.currentNode.parentElement;
    const range = document.createRange();
    range.selectNodeContents(walker.currentNode);
    const box = range.getBoundingClientRect();
    if (!text || !box.width || element.closest("style, thead, details:not([open]) > :not(summary)")) continue;
    const style = getComputedStyle(element), drawn = element.closest("svg");
    const ink = light(number(drawn ? style.fill : style.color).slice(0, 3)), paper = light(ground(element));
    const contrast = (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05);
    if (contrast < (/[a-z\\d]/i.test(text) ? 4.5 : 3)) found.dim.push(`${text}: ${contrast.toFixed(1)}`);
    if (drawn) found.letters = Math.min(found.letters, box.height);
    if (!drawn && element.closest("th") && box.height > 12 * box.width) found.words.push(text);
  }
  return found;
})()"""
"""How far the page is too wide, texts of little contrast, names that stand letter under letter, and the lowest label."""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_is_legible_on_a_telephone_as_on_a_wide_screen(
    tab: Tab, scheme: str, nights: Nights, tmp_path: Path
) -> None:
    """390 to 1600 px, as its reader prefers it light or dark; contrast as in WCAG 2.2, 1.4.3 and 1.4.11 (AA)."""
    slow, well = nights([1.0] * 5 + [1.08], "deepseek-v3-671b-fp8"), nights([1.0] * 6, "llama3-8b")
    verdict = slow[0].model_copy(update={"suspects": suspected("Synchronise more")})
    curves = [ReportedRun(verdict, slow[1], loss_table()), ReportedRun(*well, loss_table())]
    page = tmp_path / "page.html"
    page.write_text(render_report("2026-11-21", "nightly", curves, site_options=f" --system {tmp_path}/a-site.toml"))
    tab.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    seen = {}
    for width in (390, 600, 768, 820, 1024, 1100, 1280, 1600):
        tab.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 500)
        tab.open(page.as_uri())
        tab.wait("document.readyState === 'complete'")
        seen[width] = tab.evaluate(SEEN)

    assert {width: found for width, found in seen.items() if found["wide"] > 0} == {}
    assert {width: found["words"] for width, found in seen.items() if found["words"]} == {}
    assert {width: found["dim"] for width, found in seen.items() if found["dim"]} == {}
    assert min(found["letters"] for found in seen.values()) >= 11, "pixels"


def test_on_paper_tests_are_rows_facts_stand_side_by_side_and_what_is_folded_is_there(
    tab: Tab, nights: Nights, tmp_path: Path
) -> None:
    """A sheet of A4 is 718 px wide within the browser's margins, and Letter 740."""
    page = tmp_path / "page.html"
    slow, well = nights([1.0] * 5 + [1.08], "deepseek-v3-671b-fp8"), nights([1.0] * 6, "llama3-8b")
    page.write_text(render_report("2026-11-21", "nightly", [ReportedRun(*slow), ReportedRun(*well)]))
    tab.call("Emulation.setDeviceMetricsOverride", width=718, height=1047, deviceScaleFactor=1, mobile=False)
    tab.call("Emulation.setEmulatedMedia", media="print")
    try:
        tab.open(page.as_uri())
        tab.wait("document.readyState === 'complete'")
        laid_out = tab.evaluate(
            "['.matrix', '.matrix tr', '.matrix thead', '.pins', 'details > dl']"
            ".map(found => getComputedStyle(document.querySelector(found)).display)"
        )
        folded = tab.evaluate("document.querySelector('details:not([open]) dl').checkVisibility()")
        wide = tab.evaluate("document.documentElement.scrollWidth - innerWidth")
    finally:
        tab.call("Emulation.setEmulatedMedia", media="")

    assert laid_out == ["table", "table-row", "table-header-group", "table", "grid"]
    assert folded
    assert wide <= 0


# --- from the store --------------------------------------------------------------------------------------------------


def loss_table() -> pd.DataFrame:
    rows = pd.DataFrame({"tag": "lm loss", "step": range(1, 51), "value": [9 - step / 10 for step in range(50)]})
    times = pd.DataFrame(
        {"tag": "iteration-time", "step": range(1, 51), "value": [1 + step % 7 / 50 for step in range(50)]}
    )
    return pd.concat(
        [empty_table(), *(each.assign(wall_time=0.0, file="events", superseded=False) for each in (rows, times))]
    )


def test_history_and_curves_come_from_the_store(store: DirectoryStore, nights: Nights) -> None:
    verdict, rows = nights([1.0, 1.0, 1.08])
    for row in rows:
        put_row(store, row)
    store.put(f"{verdict.prefix}/metrics.parquet", metrics_parquet(loss_table()))

    html = night_report_html(store, "nightly", "2026-11-21", [verdict], cluster="dgx")

    assert "Loss of every step tonight." in html
    assert "Tonight against the last good night, 2026-11-20" in html
    assert "Dashed: the last good night" not in html


def test_a_good_night_tells_the_commits_since_the_one_before(
    store: DirectoryStore, make_record: Records, commit: Callable[..., RunRecord]
) -> None:
    record = make_record(night="2026-11-21")
    came = record.checkout.megatron_bridge.model_copy(update={"commits_since": ("0a1b2c3 Fuse <the> optimiser",)})
    checkout = record.checkout.model_copy(update={"megatron_bridge": came})
    verdict = compare(commit(store, record.model_copy(update={"checkout": checkout})), ())

    text = Page(night_report_html(store, "nightly", "2026-11-21", [verdict], cluster="dgx")).text

    assert "Megatron-Bridge: what came since the night before 0a1b2c3 Fuse <the> optimiser" in text


def test_a_damaged_record_is_named_on_the_page(
    store: DirectoryStore, make_record: Records, commit: Callable[..., RunRecord]
) -> None:
    verdict = compare(commit(store, make_record(night="2026-11-21")), ())
    store.put(f"{verdict.prefix}/manifest.json", b"{}")

    text = Page(night_report_html(store, "nightly", "2026-11-21", [verdict], cluster="dgx")).text

    assert "not a manifest" in text


def test_tonights_curves_are_laid_over_those_of_the_last_good_night(store: DirectoryStore, nights: Nights) -> None:
    verdict, rows = nights([1.0, 1.0, 1.08])
    for row in rows:
        put_row(store, row)
        store.put(f"{row.prefix}/metrics.parquet", metrics_parquet(loss_table()))

    page = Page(night_report_html(store, "nightly", "2026-11-21", [verdict], cluster="dgx"))

    assert page.text.count("Dashed: the last good night, 2026-11-20.") == 3
    assert "How the 50 step times of the steady window are distributed." in page.text
    assert {"Loss of every step", "Time of every step", "Distribution of step times"} <= {
        attributes.get("aria-label") for _tag, attributes in page.tags
    }


def test_a_confirmed_night_says_that_its_values_are_a_median_and_its_curves_the_first_runs(
    store: DirectoryStore, nights: Nights, make_record: Records, summary_of: Summaries
) -> None:
    verdict, rows = nights([1.0, 1.0, 1.08])
    tonight = {"test_id": "llama3-8b", "commit": f"{21:040x}", "subject": "Change of night 21"}
    again = [make_record(summary_of([1.09] * 50), "2026-11-21", repeat=number, **tonight) for number in (1, 2)]
    for row in (*rows, *(row_of(record, None) for record in again)):
        put_row(store, row)
    store.put(f"{verdict.prefix}/metrics.parquet", metrics_parquet(loss_table()))

    text = Page(night_report_html(store, "nightly", "2026-11-21", [verdict], cluster="dgx")).text

    assert "Compared median of tonight's 3 runs" in text
    assert "Loss of every step of the first of tonight's 3 runs." in text
    assert "Time of every step of the first of tonight's 3 runs;" in text


def test_what_is_kept_can_be_opened_from_the_page(
    store: DirectoryStore, make_record: Records, commit: Callable[..., RunRecord]
) -> None:
    record = commit(store, make_record(night="2026-11-21"))
    verdict = compare(record, ())

    page = Page(night_report_html(store, "nightly", "2026-11-21", [verdict], cluster="dgx"))

    folder = f"{store.url}/{record.prefix}"
    assert [f"{folder}/{name}" for name in ("metrics.parquet", "manifest.json")] == [
        link for link in page.links() if link.startswith("file:")
    ]


def test_every_test_has_its_nights_as_a_small_line_in_the_matrix(nights: Nights) -> None:
    page = render(nights([1.0, 1.0, 1.08]), nights([1.0], "first night"))

    assert sum(attributes.get("aria-label") == "Step time of the last nights" for _tag, attributes in page.tags) == 1


def test_the_matrix_shows_the_change_against_the_golden_value_too(nights: Nights) -> None:
    verdict, rows = nights([1.0, 1.0, 1.08])
    beside = tuple(
        item.model_copy(update={"golden": 1.2}) if item.metric == "step_time" else item for item in verdict.comparisons
    )

    page = render((verdict.model_copy(update={"comparisons": beside}), rows))

    assert "and against the golden values" in page.text
    assert "golden −10.0 %" in page.text
    assert "golden" not in render((verdict, rows)).text


# --- which change did it ---------------------------------------------------------------------------------------------


def kept_cause(store: DirectoryStore, verdict: Verdict) -> AttributionResult:
    """What was found about the change that a verdict tells; a key of it may hold anything."""
    factors = [factor.model_copy(update={"key": HOSTILE}) if factor.key else factor for factor in ATTRIBUTED_FACTORS]
    plan = ATTRIBUTION_PLAN.model_copy(update={"series": verdict.series, "factors": tuple(factors)})
    result = evaluate(keep_plan(store, plan), exchange_runs([2], plan))
    keep_result(store, result)
    return result


def test_the_cause_of_what_became_worse_stands_on_the_page_with_its_picture(
    store: DirectoryStore, nights: Nights
) -> None:
    verdict, _rows = nights([1.0, 1.0, 1.08])
    result = kept_cause(store, verdict)

    html = night_report_html(store, "nightly", "2026-11-21", [verdict], cluster="dgx")
    page = Page(html)

    assert " ".join(sentence(result).split()) in page.text
    assert "run" in page.text
    assert ("div", "What each run had at its bad level, what it showed, and the probability of each change") in [
        (tag, attributes.get("aria-label")) for tag, attributes in page.tags
    ]
    assert "<script" not in html


def test_a_test_that_is_good_again_shows_no_cause(store: DirectoryStore, nights: Nights) -> None:
    kept_cause(store, nights([1.0, 1.0, 1.08])[0])
    good, _rows = nights([1.0, 1.0, 1.0])

    assert "which change did it" not in night_report_html(store, "nightly", "2026-11-21", [good], cluster="dgx")


def test_a_cause_that_cannot_be_read_is_named_and_holds_nobody_up(store: DirectoryStore, nights: Nights) -> None:
    verdict, _rows = nights([1.0, 1.0, 1.08])
    result = kept_cause(store, verdict)
    store.put(f"{folder_of(result.plan)}/result.json", b"{")

    text = Page(night_report_html(store, "nightly", "2026-11-21", [verdict], cluster="dgx")).text

    assert "not an attribution's result" in text
    assert "Look at llama3-8b" in text


def test_damaged_evidence_is_named_and_holds_nobody_up(store: DirectoryStore, nights: Nights) -> None:
    verdict, _rows = nights([1.0, 1.0])
    store.put(f"history/dgx/{verdict.series}/2026-11-01-bad.json", b"{")
    store.put(f"{verdict.prefix}/metrics.parquet", b"PAR1 not really")
    other = verdict.model_copy(update={"run_key": "other", "test_id": "other", "series": "", "prefix": ""})

    text = Page(night_report_html(store, "nightly", "2026-11-21", [verdict, other], cluster="dgx")).text

    assert "2026-11-01-bad.json: not a history row" in text
    assert "metrics.parquet: not a table of scalars" in text
    assert "2 tests: 2 insufficient data." in text


def test_a_store_that_does_not_answer_is_asked_again(
    store: DirectoryStore, nights: Nights, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(_key: str) -> bytes:
        raise TransientError("connection refused")

    monkeypatch.setattr(store, "get", unreachable)

    with pytest.raises(TransientError):
        night_report_html(store, "nightly", "2026-11-21", [nights([1.0])[0]], cluster="dgx")


def test_tests_are_read_side_by_side_and_stand_as_if_they_were_read_one_by_one(
    store: DirectoryStore, nights: Nights, monkeypatch: pytest.MonkeyPatch
) -> None:
    verdict, rows = nights([1.0, 1.0, 1.08])
    for row in rows:
        put_row(store, row)
    store.put(f"{verdict.prefix}/metrics.parquet", b"PAR1 not really")
    verdicts = [verdict.model_copy(update={"run_key": f"k{at:02}", "test_id": f"t{at:02}"}) for at in range(24)]
    one_by_one = night_report_html(store, "nightly", "2026-11-21", verdicts, cluster="dgx")
    get, reading = store.get, set[int]()
    most = 0

    def slow(key: str) -> bytes | None:
        nonlocal most
        reading.add(threading.get_ident())
        most = max(most, len(reading))
        time.sleep(0.01)
        reading.discard(threading.get_ident())
        return get(key)

    monkeypatch.setattr(store, "get", slow)

    assert night_report_html(store, "nightly", "2026-11-21", verdicts, cluster="dgx") == one_by_one
    assert len(rows) < most <= WORKERS * WORKERS  # a test's own rows are read side by side, too


# --- short forms -----------------------------------------------------------------------------------------------------


def test_markdown_has_one_row_per_verdict_the_gravest_first(nights: Nights, make_spec: Specs) -> None:
    good, bad = nights([1.0, 1.0], "good")[0], nights([1.0, 1.08], "bad")[0]
    refused = verdict_for_error(make_spec(test_id="refused"), LaunchRefused("invalid account"))

    lines = markdown_table([good, refused, bad]).splitlines()

    assert lines[0] == "| test | verdict | step time | throughput | peak memory | final loss | why |"
    assert lines[2].startswith("| bad | ◆ regressed | 1.080 s (▲ +8.0 %) | 700.0 TFLOP/s/GPU (±0.0 %) |")
    assert lines[3] == "| refused | ! infrastructure | – | – | – | – | invalid account |"
    assert lines[4].startswith("| good | ◔ insufficient data |")


def test_markdown_keeps_text_from_outside_in_its_cell(make_spec: Specs) -> None:
    verdict = verdict_for_error(make_spec(test_id="a|b"), LaunchRefused(f"{HOSTILE}\nnext line"))

    *_, line = markdown_table([verdict]).splitlines()

    assert line.replace("\\|", "").count("|") == 8
    assert "<script>" not in line.replace("\\<", "")


def test_the_terminal_table_fits_80_columns(nights: Nights, make_spec: Specs) -> None:
    verdicts = [
        nights([1.0, 1.08], "llama3.1-405b-gb200-fp8-with-a-long-name")[0],
        verdict_for_error(make_spec(test_id=HOSTILE), LaunchRefused("invalid account [red]x[/red]")),
    ]
    terminal = io.StringIO()

    Console(width=80, file=terminal, force_terminal=False).print(verdict_table(verdicts))

    output = terminal.getvalue()
    assert "◆ regressed" in output
    assert "▲ +8.0 %" in output
    assert "…" not in output
    assert max(len(line) for line in output.splitlines()) <= 80


def test_the_reasons_below_the_table_are_one_line_each(make_spec: Specs) -> None:
    words = "an address that is far longer than the terminal is wide " * 3
    verdict = verdict_for_error(make_spec(test_id="bad"), LaunchRefused(f"{words}[red]x[/red]\nand more"))

    assert reason_lines([verdict]) == (f"bad: {words}[red]x[/red]", "bad: and more")


def test_importing_the_report_loads_no_heavy_library() -> None:
    code = (
        "import sys, nightbridge.report.night_report, nightbridge.gate.run_verdict\n"
        "print(sorted({'pandas', 'numpy', 'pyarrow', 'matplotlib', 'rich', 'boto3', 'prefect'} & set(sys.modules)))"
    )

    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout

    assert printed.strip() == "[]"


# --- what to type next ------------------------------------------------------------------------------------------------


def suspected(*subjects: str) -> Suspects:
    """Suspects of as many commits, the newest first."""
    commits = tuple(
        RangeCommit(
            commit=f"{number:040x}", subject=subject, author="Ann", authored_at=datetime(2026, 11, 20, tzinfo=UTC)
        )
        for number, subject in enumerate(subjects, 0xBF75D9E << 132)
    )
    change = RepositoryChange(name="Megatron-Bridge", url="", before="a" * 40, after="b" * 40, commits=commits)
    return Suspects(last_good="n1", night="n2", run_before="a", run_after="b", repositories=(change,))


def test_a_bad_verdict_ends_with_the_suspect_and_the_next_command() -> None:
    verdict = Verdict(
        run_key="a-n2-0123456789",
        test_id="a",
        night="n2",
        status=VerdictStatus.REGRESSED,
        since="n2",
        certainty="3 of 3 runs",
    )
    one, two = (verdict.model_copy(update={"suspects": suspected(*names)}) for names in (["Slow"], ["Slow", "Docs"]))

    assert next_lines([one], " --workspace /ws") == (
        'a: regressed since n2 (3 of 3 runs); suspect bf75d9e "Slow" (only commit). '
        "next: nightbridge bisect a-n2-0123456789 --workspace /ws",
    )
    assert "(newest of 2 commits)" in next_lines([two])[0]


@pytest.mark.parametrize(
    ("status", "command"),
    [
        (VerdictStatus.FAILED, "nightbridge logs --errors a-n2-0123456789"),
        (VerdictStatus.CANCELLED, "nightbridge run FILE --night n2 --retry"),
        (VerdictStatus.UNSTABLE, "nightbridge history a-n2-0123456789"),
        (VerdictStatus.PASSED, ""),
    ],
)
def test_the_next_command_is_that_of_the_verdict(status: VerdictStatus, command: str) -> None:
    lines = next_lines([Verdict(run_key="a-n2-0123456789", test_id="a", night="n2", status=status)])

    assert [line.split(". next: ")[1] for line in lines] == ([command] if command else [])


def test_each_point_of_a_sweep_has_a_next_command_that_names_its_run() -> None:
    keys = ("sweep-n2-0123456789", "sweep-n2-9876543210")
    told = [Verdict(run_key=key, test_id="sweep", night="n2", status=VerdictStatus.REGRESSED) for key in keys]

    expected = [f"nightbridge attribute {key}" for key in keys]
    assert [line.split(". next: ")[1] for line in next_lines(told)] == expected
    assert [line.split(". next: ")[1] for verdict in told for line in compact_lines([verdict])[-1:]] == expected


# --- the page's second week -------------------------------------------------------------------------------------------


def test_tests_with_one_cause_are_one_case_and_the_headline_names_it(nights: Nights) -> None:
    tests = [nights([1.0, 1.0, 1.08], name) for name in ("a", "b")]
    runs = [
        ReportedRun(verdict.model_copy(update={"suspects": suspected("Synchronise more")}), rows)
        for verdict, rows in tests
    ]

    page = Page(render_report("2026-11-21", "nightly", runs))

    assert '2 of 2 tests need attention: suspect bf75d9e "Synchronise more" (only commit).' in page.text
    assert [tag for tag, attributes in page.tags if attributes.get("class") == "command"] == ["code"] * 2
    assert page.text.count('regressed a b suspect bf75d9e "Synchronise more"') == 1


def test_the_command_to_copy_names_the_site(nights: Nights) -> None:
    verdict, rows = nights([1.0, 1.0, 1.08])

    html = render_report("2026-11-21", "nightly", [ReportedRun(verdict, rows)], site_options=" --system /etc/dgx.toml")

    assert f'<code class="command">nightbridge attribute {verdict.run_key} --system /etc/dgx.toml</code>' in html


def test_passed_tests_are_folded(nights: Nights) -> None:
    page = render(nights([1.0, 1.0, 1.08], "slow"), nights([1.0, 1.0, 1.0], "fine"))

    folds = {attributes["id"]: "open" in attributes for tag, attributes in page.tags if attributes.get("id")}
    assert [is_open for run_key, is_open in folds.items() if str(run_key).startswith("slow")] == [True]
    assert [is_open for run_key, is_open in folds.items() if str(run_key).startswith("fine")] == [False]


def test_step_time_and_its_inverses_are_one_sentence(make_record: Records) -> None:
    rows: list[HistoryRow] = []
    for day, step_time in enumerate((1.0, 1.0, 1.0, 1.25), 18):
        record = make_record(make_summary([step_time] * 50, tflops=700 / step_time), f"2026-11-{day}")
        verdict = compare(record, rows)
        rows.append(row_of(record, verdict))

    assert short_reason(verdict) == "step time +25.0 %"
    assert [reason.partition(" by ")[0] for reason in verdict.reasons if "regressed" in reason] == [
        "step time regressed"
    ]
    assert "; throughput −20.0 %" in verdict.reasons[0]


def test_charts_are_drawn_for_the_gravest_tests_alone(nights: Nights) -> None:
    many = [nights([1.0, 1.0, 1.08], f"slow-{number}") for number in range(MAX_CHARTED)]

    page = render(*many, nights([1.0, 1.0, 1.0], "fine"))

    assert [tag for tag, _ in page.tags].count("figure") == MAX_CHARTED


def test_a_failed_run_shows_its_first_error_and_its_last_lines(store: DirectoryStore, make_record: Records) -> None:
    lines = ["step 1", "Traceback (most recent call last):", '  File "a.py"', "ValueError: no <b> \x1b[31mheads\x07"]
    lines += [f"line {number}" for number in range(40)]
    record = make_record(night="2026-11-21", outcome=Outcome.PROGRAM_ERROR)
    data = "\n".join(lines).encode()
    batch = b"+ srun\nslurmstepd: error: *** JOB 1 CANCELLED ***"
    store.put(f"{record.prefix}/logs/log_0.out", data)
    store.put(f"{record.prefix}/logs/sbatch_0.out", batch)
    manifest = Manifest(
        run_key=record.spec.run_key,
        attempt=1,
        prefix=record.prefix,
        files=(
            StoredFile(path="logs/log_0.out", size=len(data), sha256="0" * 64, kind="log", mtime_ns=1),
            StoredFile(path="logs/sbatch_0.out", size=len(batch), sha256="0" * 64, kind="log", mtime_ns=2),
        ),
        job=record.job,
        committed_at=datetime.now(UTC),
        record=record,
    )
    store.put(f"{record.prefix}/manifest.json", manifest.model_dump_json().encode())

    page = Page(night_report_html(store, "nightly", "2026-11-21", [compare(record, ())], cluster="slurm"))

    assert "First error: ValueError: no <b> heads" in page.text
    assert "The last 30 lines of its log line 10 line 11" in page.text
    assert "line 9 " not in page.text
    assert "+ srun" not in page.text


def test_a_page_links_to_the_nights_around_it(store: DirectoryStore) -> None:
    for night in ("2026-11-20", "2026-11-21", "2026-11-22"):
        html = night_report_html(store, "nightly", night, [], cluster="slurm")
        store.put(f"reports/{night}/nightly.html", html.encode())
        store.put(f"reports/{night}/other.html", b"another scenario")
        link_from_night_before(store, "nightly", night)

    links = Page((store.get("reports/2026-11-21/nightly.html") or b"").decode()).links()
    assert links == ["../index.html", "../2026-11-20/nightly.html", "../2026-11-22/nightly.html"]
    assert store.get("reports/2026-11-21/other.html") == b"another scenario"


def test_a_night_that_is_named_by_a_word_is_next_to_none(store: DirectoryStore) -> None:
    for night in ("2026-11-21", "live", "2026-11-22"):
        html = night_report_html(store, "nightly", night, [], cluster="slurm")
        store.put(f"reports/{night}/nightly.html", html.encode())
        link_from_night_before(store, "nightly", night)

    pages = {
        night: Page((store.get(f"reports/{night}/nightly.html") or b"").decode()) for night in ("2026-11-21", "live")
    }
    assert pages["2026-11-21"].links() == ["../index.html", "../2026-11-22/nightly.html"]
    assert pages["live"].links() == ["../index.html"]


@pytest.mark.parametrize("scenario", ["GB200 / H100", "H100", "100 % #1"])
def test_the_links_of_a_page_lead_to_pages_whatever_the_scenario_is_called(
    store: DirectoryStore, scenario: str
) -> None:
    store.put("reports/index.html", b"")
    store.put(f"reports/2026-11-20/GB200/{scenario}.html", b"another scenario")
    for night in ("2026-11-20", "2026-11-21", "2026-11-22"):
        html = night_report_html(store, scenario, night, [], cluster="slurm")
        store.put(f"reports/{night}/{scenario}.html", html.encode())
        link_from_night_before(store, scenario, night)

    key = f"reports/2026-11-21/{scenario}.html"
    links = Page((store.get(key) or b"").decode()).links()
    assert len(links) == 3
    for link in links:
        assert store.get(unquote(urljoin(f"/{quote(key)}", link)).removeprefix("/")) is not None


def test_the_index_shows_every_test_by_nights_those_that_need_somebody_first(
    store: DirectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overview, "INDEX_NIGHTS", 3)
    passed, regressed = VerdictStatus.PASSED, VerdictStatus.REGRESSED
    for day in range(18, 22):
        verdicts = {"aaa": passed, "zzz": regressed if day == 21 else passed}
        store_night(store, f"2026-11-{day}", verdicts, gpu_hours=2.0, confirmation_gpu_hours=0.5)
    record_decision(store, make_decision("aaa"))
    record_decision(store, make_decision("over", until="2026-11-20"))

    page = Page(index_html(store, ("7 GB are free",)))

    assert "1 of 2 tests needs attention" in page.text
    assert page.text.index("zzz ◆ regressed") < page.text.index("aaa ✓ passed")
    assert "15.0 GPU-hours, 3.0 of them confirmation; 0.0 GB went to the store 7 GB are free" in page.text
    assert page.text.count(" 7.5 0.00") == 2
    assert "1 open decision aaa:" in page.text
    assert "2026-11-18" not in page.text
    drawn = [attributes for tag, attributes in page.tags if tag == "svg" and "aria-label" in attributes]
    strips = [(each["role"], each["aria-label"]) for each in drawn]
    assert strips == [("group", "2 passed, 1 regressed"), ("img", "3 passed")]  # links in an image are told to nobody
    assert len([link for link in page.links() if link.startswith("2026-11-21/nightly.html#zzz")]) == 2


@pytest.mark.parametrize(
    ("status", "call"),
    [(VerdictStatus.INSUFFICIENT_DATA, ""), (VerdictStatus.PASSED, ""), (VerdictStatus.REGRESSED, "regressed")],
)
def test_the_list_of_reports_marks_the_nights_that_need_somebody_alone(
    store: DirectoryStore, status: VerdictStatus, call: str
) -> None:
    store_night(store, "2026-11-21", {"aaa": status})

    page = index_html(store)

    assert page.count(f'<span class="change bad">{call}</span>') == bool(call)
    assert page.count('<span class="change bad">') == bool(call)


def test_off_a_terminal_two_tests_are_a_few_lines_with_cause_and_next_command(nights: Nights) -> None:
    slow, fine = nights([1.0, 1.0, 1.08], "slow")[0], nights([1.0, 1.0, 1.0], "fine")[0]
    slow = slow.model_copy(update={"suspects": suspected("Synchronise more")})

    lines = compact_lines((fine, slow), " --system site.toml")

    assert len(lines) == 4
    assert lines[0].startswith("◆ slow  regressed  step time 1.080 s ▲ +8.0 %")
    assert lines[1].startswith("slow: step time regressed by +8.0 %")
    assert lines[2].endswith(f"(only commit). next: nightbridge bisect {slow.run_key} --system site.toml")
    assert " fine  " in lines[3]
    assert "step time 1.000 s ±0.0 %" in lines[3]
