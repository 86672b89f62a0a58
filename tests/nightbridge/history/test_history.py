"""The rows of a series: what they say, where they lie, and which of them are read."""

import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, date, datetime, time, timedelta

import pytest

from nightbridge.errors import DamagedData
from nightbridge.gate.run_verdict import compare
from nightbridge.history.history_store import Pack, RowKey, compact, put_row, series_folder, write_generation
from nightbridge.history.nightly_values import nights_of, rows_until
from nightbridge.history.reading import (
    DUMPED,
    LOOK_BACK,
    find_series,
    is_good,
    last_good_dump,
    read_history,
    read_recent,
    series_of,
)
from nightbridge.history.rows import HistoryRow, row_of
from nightbridge.models import RunRecord, RunSpec, Summary, VerdictStatus
from nightbridge.models.series import former_series_id, series_id
from nightbridge.store.directory import DirectoryStore
from nightbridge.store.object_store import ObjectInfo
from tests.builders import make_summary


def test_a_row_says_what_the_run_was_what_became_of_it_and_what_it_measured(
    make_record: Callable[..., RunRecord],
) -> None:
    record = make_record(subject="Fuse the softmax", sweep_point={"tp": 2})

    row = row_of(record, compare(record, ()))

    assert row.run_key == record.spec.run_key
    assert (row.cluster, row.series, row.nodes, row.job_id) == ("dgx", record.series, "node[1-2]", 4711)
    assert (row.megatron_bridge.commit, row.megatron_bridge.subject) == ("a" * 40, "Fuse the softmax")
    assert row.nemo_run is not None
    assert row.nemo_run.commit == "b" * 40
    assert row.image_digest == "sha256:" + "d" * 64
    assert row.summary == record.summary
    assert row.verdict is VerdictStatus.NO_BASELINE
    assert row.sweep_point == {"tp": 2}


def test_rows_lie_where_the_design_says(store: DirectoryStore, make_row: Callable[..., HistoryRow]) -> None:
    row = make_row()

    put_row(store, row)

    (key,) = [found.key for found in store.list("history")]
    assert re.fullmatch(rf"history/dgx/{row.series}/{row.night}-{row.run_key}\.[0-9a-f]{{20}}\.json", key)


def test_what_was_added_is_read_back_in_the_order_of_nights_and_harvests(
    store: DirectoryStore, make_row: Callable[..., HistoryRow]
) -> None:
    late = make_row(night="2026-11-08", repeat=1).model_copy(
        update={"harvested_at": datetime(2026, 11, 8, 9, tzinfo=UTC)}
    )
    early = make_row(night="2026-11-08").model_copy(update={"harvested_at": datetime(2026, 11, 8, 5, tzinfo=UTC)})
    rows = [make_row(night="2026-11-09"), late, early, make_row(night="2026-11-07")]
    for row in rows:
        put_row(store, row)

    read = read_history(store, "dgx", rows[0].series)

    assert read == (rows[3], early, late, rows[0])


def test_adding_again_replaces_the_row_of_an_earlier_attempt(
    store: DirectoryStore, make_row: Callable[..., HistoryRow]
) -> None:
    row = make_row(Summary())
    again = make_row().model_copy(update={"attempt": 2})

    for each in (row, row, again):
        put_row(store, each)

    assert read_history(store, "dgx", row.series) == (again,)


def test_series_and_clusters_are_kept_apart(store: DirectoryStore, make_row: Callable[..., HistoryRow]) -> None:
    row = make_row()
    put_row(store, row)
    put_row(store, row.model_copy(update={"cluster": "other"}))
    put_row(store, row.model_copy(update={"series": row.series + "0"}))

    assert read_history(store, "dgx", row.series) == (row,)
    assert read_history(store, "dgx", "llama3-8b-ffffffffffff") == ()


def test_a_cluster_may_be_called_anything(store: DirectoryStore, make_row: Callable[..., HistoryRow]) -> None:
    row = make_row().model_copy(update={"cluster": "dgx/h100 ../Süd"})

    put_row(store, row)

    assert read_history(store, "dgx/h100 ../Süd", row.series) == (row,)


def test_runs_side_by_side_lose_no_row(store: DirectoryStore, make_row: Callable[..., HistoryRow]) -> None:
    rows = [make_row(night=f"2026-11-{day:02}") for day in range(1, 29)]

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda row: put_row(store, row), rows))

    assert read_history(store, "dgx", rows[0].series) == tuple(rows)


def test_a_measured_nan_comes_back_as_not_measured(store: DirectoryStore, make_row: Callable[..., HistoryRow]) -> None:
    row = make_row().model_copy(update={"summary": Summary(step_time=float("nan"), final_loss=float("inf"))})

    put_row(store, row)

    (read,) = read_history(store, "dgx", row.series)
    assert (read.summary.step_time, read.summary.final_loss) == (None, None)


def test_a_row_of_the_time_before_versions_had_names_of_their_own_is_read_and_replaced(
    store: DirectoryStore, make_row: Callable[..., HistoryRow]
) -> None:
    old, other = make_row(night="2026-11-08"), make_row(night="2026-11-09")
    for row in (old, other):
        key = f"history/dgx/{row.series}/{row.night}-{row.run_key}.json"
        store.put(key, row.model_dump_json(indent=2).encode())
    confirmed = old.model_copy(update={"verdict": VerdictStatus.REGRESSED})

    put_row(store, confirmed)

    assert read_history(store, "dgx", old.series) == (confirmed, other)
    assert find_series(store, "llama3-8b")[0][2:] == (2, "2026-11-09")


def test_the_night_from_which_on_rows_are_wanted_may_be_named(
    store: DirectoryStore, make_row: Callable[..., HistoryRow]
) -> None:
    rows = [make_row(night=f"2026-11-{day:02}") for day in range(1, 29)]
    for row in rows:
        put_row(store, row)
    compact(store, "dgx", rows[0].series)
    late = make_row(night="2026-11-29")
    put_row(store, late)

    assert read_history(store, "dgx", late.series, since="2026-11-20") == (*rows[19:], late)


class TestRecentRows:
    """What a verdict reads of a long history: the nights that it looks at, and those alone."""

    def nights(self, make_row: Callable[..., HistoryRow], verdicts: list[VerdictStatus]) -> list[HistoryRow]:
        row = make_row()
        night = [str(date(2025, 1, 1) + timedelta(days=number)) for number in range(len(verdicts))]
        return [
            row.model_copy(update={"night": name, "run_key": f"llama3-8b-{name}-0123456789", "verdict": verdict})
            for name, verdict in zip(night, verdicts, strict=True)
        ]

    @pytest.mark.parametrize("bad", [0, 1, 30])
    def test_a_hundred_nights_up_to_the_last_good_one_and_all_later_ones(
        self, store: DirectoryStore, make_row: Callable[..., HistoryRow], bad: int
    ) -> None:
        rows = self.nights(make_row, [VerdictStatus.PASSED] * (300 - bad) + [VerdictStatus.REGRESSED] * bad)
        write_generation(store, "dgx", rows[0].series, rows, datetime.now(UTC))

        assert read_recent(store, "dgx", rows[0].series, "2026-11-10") == tuple(rows[-(LOOK_BACK + bad) :])

    def test_nights_after_the_one_in_question_do_not_shorten_the_look_back(
        self, store: DirectoryStore, make_row: Callable[..., HistoryRow]
    ) -> None:
        rows = self.nights(make_row, [VerdictStatus.PASSED] * 300)
        write_generation(store, "dgx", rows[0].series, rows, datetime.now(UTC))

        recent = read_recent(store, "dgx", rows[0].series, rows[250].night)

        assert recent == tuple(rows[150:])

    @pytest.mark.parametrize(("bad", "groups"), [(0, {2}), (100, {2}), (400, {2, 8})])
    def test_of_years_only_the_newest_groups_are_decoded_unless_the_last_good_night_is_before_them(
        self,
        store: DirectoryStore,
        make_row: Callable[..., HistoryRow],
        monkeypatch: pytest.MonkeyPatch,
        bad: int,
        groups: set[int],
    ) -> None:
        rows = self.nights(make_row, [VerdictStatus.PASSED] * (1000 - bad) + [VerdictStatus.REGRESSED] * bad)
        write_generation(store, "dgx", rows[0].series, rows, datetime.now(UTC))
        decoded, keys_of = set(), Pack.row_keys

        def counted(pack: Pack, group: int = 0) -> list[RowKey]:
            decoded.add(pack.groups - group)
            return keys_of(pack, group)

        monkeypatch.setattr(Pack, "row_keys", counted)

        assert read_recent(store, "dgx", rows[0].series, "2028-01-01") == tuple(rows[-(LOOK_BACK + bad) :])
        assert decoded == groups

    def test_the_verdict_is_the_one_that_the_whole_history_gives(
        self, store: DirectoryStore, make_row: Callable[..., HistoryRow], make_record: Callable[..., RunRecord]
    ) -> None:
        rows = self.nights(make_row, [VerdictStatus.PASSED] * 200 + [VerdictStatus.REGRESSED] * 3)
        write_generation(store, "dgx", rows[0].series, rows, datetime.now(UTC))
        record = make_record()

        recent = read_recent(store, "dgx", rows[0].series, record.spec.night)

        assert len(recent) == LOOK_BACK + 3
        assert compare(record, recent) == compare(record, rows)


class TestNightsWithoutADate:
    """A night by hand may be named by a word; it is as old as its runs, not the newest for ever."""

    def row_of_word(self, make_row: Callable[..., HistoryRow], series: str, day: int) -> HistoryRow:
        harvested = datetime(2026, 11, day, 12, tzinfo=UTC)
        return make_row(night="2026-11-01").model_copy(
            update={
                "night": "try-1",
                "run_key": "llama3-8b-try-1-0123456789",
                "series": series,
                "harvested_at": harvested,
            }
        )

    @pytest.mark.parametrize("least", [100, 1])
    def test_they_lie_where_their_runs_were_harvested(
        self, store: DirectoryStore, make_row: Callable[..., HistoryRow], least: int
    ) -> None:
        rows = [make_row(night=f"2026-11-{day:02}") for day in (5, 6, 7)]
        word = self.row_of_word(make_row, rows[0].series, 6)
        for row in (word, *rows):
            put_row(store, row)
        compact(store, "dgx", word.series, least)

        assert read_history(store, "dgx", word.series) == (rows[0], rows[1], word, rows[2])
        assert read_history(store, "dgx", word.series, "try-1") == (word, rows[2])
        assert read_history(store, "dgx", word.series, "2026-11-07") == (rows[2],)
        assert read_recent(store, "dgx", word.series, "try-2") == (rows[0], rows[1], word, rows[2])
        assert [night.own.night for night in nights_of((word, *rows))][2:] == ["try-1", "2026-11-07"]
        assert rows_until((*rows[:2], word, rows[2]), "try-1") == (*rows[:2], word)

    @pytest.mark.parametrize("at", [50, 150, 350])
    def test_those_after_it_do_not_shorten_the_look_back_of_one_that_is_judged_again(
        self, store: DirectoryStore, make_row: Callable[..., HistoryRow], at: int
    ) -> None:
        rows = TestRecentRows().nights(make_row, [VerdictStatus.PASSED] * 400)
        day = datetime.combine(date.fromisoformat(rows[at].night), time(), UTC)
        word = self.row_of_word(make_row, rows[0].series, 1).model_copy(update={"harvested_at": day})
        write_generation(store, "dgx", word.series, [*rows, word], datetime.now(UTC))

        assert read_recent(store, "dgx", word.series, "try-1")[0] == rows[max(0, at + 1 - LOOK_BACK)]

    @pytest.mark.parametrize(("day", "last"), [(6, "2026-11-07"), (8, "try-1")])
    @pytest.mark.parametrize("least", [100, 1])
    def test_the_series_with_the_last_harvest_comes_first(
        self, store: DirectoryStore, make_row: Callable[..., HistoryRow], least: int, day: int, last: str
    ) -> None:
        new = make_row(night="2026-11-07")
        word = self.row_of_word(make_row, "llama3-8b-00000000beef", day)
        for row in (word, new):
            put_row(store, row)
            compact(store, "dgx", row.series, least)

        found = find_series(store, "llama3-8b")

        assert (len(found), found[0].last_night) == (2, last)


def test_whose_series_are_looked_for_no_other_test_is_listed(
    store: DirectoryStore, make_row: Callable[..., HistoryRow], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = make_row()
    for row in (own, *(own.model_copy(update={"series": f"t{number}-0123456789ab"}) for number in range(50))):
        put_row(store, row)
    listing, listed = store.list, list[str]()

    def list_and_note(*wanted: str) -> Iterator[ObjectInfo]:
        for found in listing(*wanted):
            listed.append(found.key)
            yield found

    monkeypatch.setattr(store, "list", list_and_note)

    assert find_series(store, "llama3-8b", "dgx") == (("dgx", own.series, 1, own.night),)
    assert [key.rpartition("/")[0] for key in listed] == [series_folder("dgx", own.series)]


@pytest.mark.parametrize("damage", [b"", b"{", b'{"run_key": "x"}', b"\xff\xfe"])
def test_a_damaged_row_is_named_and_never_left_out(
    store: DirectoryStore, make_row: Callable[..., HistoryRow], damage: bytes
) -> None:
    row = make_row()
    put_row(store, row)
    store.put(f"history/dgx/{row.series}/2026-11-01-bad.json", damage)

    with pytest.raises(DamagedData, match=r"2026-11-01-bad\.json.*not a history row.*--rebuild"):
        read_history(store, "dgx", row.series)


def test_a_series_keeps_its_name_where_the_same_configuration_had_another_one(
    store: DirectoryStore, make_row: Callable[..., HistoryRow], make_spec: Callable[..., RunSpec]
) -> None:
    quoted, plain = (make_spec(cmd_args={"num_gpus": 8, "max_steps": steps}) for steps in ("50", 50))
    former = former_series_id(quoted, "dgx")
    put_row(store, make_row().model_copy(update={"series": former}))

    assert series_id(quoted, "dgx") == series_id(plain, "dgx") != former
    assert series_of(store, quoted, "dgx") == former
    assert series_of(store, plain, "dgx") == former
    assert series_of(store, plain, "other") == series_id(plain, "other")
    assert len(list(store.list("aliases"))) == 1


def test_a_series_keeps_its_name_where_a_switch_was_taken_for_a_secret(
    store: DirectoryStore, make_row: Callable[..., HistoryRow], make_spec: Callable[..., RunSpec]
) -> None:
    spec = make_spec()
    test = spec.test.model_copy(update={"extra_env_vars": {"HF_HUB_DISABLE_IMPLICIT_TOKEN": "1", "TOKEN": "2"}})
    switched = spec.model_copy(update={"test": test})
    former = former_series_id(spec, "dgx")
    put_row(store, make_row().model_copy(update={"series": former}))

    assert series_id(switched, "dgx") not in (former, series_id(spec, "dgx"))
    assert series_of(store, switched, "dgx") == former


def test_words_that_only_a_newer_release_knows_are_kept_and_never_good(
    store: DirectoryStore, make_row: Callable[..., HistoryRow], make_record: Callable[..., RunRecord]
) -> None:
    rows = [make_row(night=f"2026-11-{day:02}") for day in range(1, 20)]
    for row in rows[:-2]:
        put_row(store, row)
    newer = {"verdict": "partly_passed"}, {"outcome": "drained"}
    for row, words in zip(rows[-2:], newer, strict=True):
        text = json.dumps(row.model_dump(mode="json") | words)
        store.put(f"{series_folder('dgx', row.series)}/{row.night}-{row.run_key}.json", text.encode())

    for _ in range(2):
        read = read_history(store, "dgx", rows[0].series)
        verdict = compare(make_record(make_summary([1.0] * 50), "2026-11-20"), read)

        assert [row.verdict for row in read[-2:]] == ["partly_passed", rows[-1].verdict]
        assert (read[-1].outcome, [is_good(row) for row in read[-3:]]) == ("drained", [True, False, False])
        assert verdict.status is VerdictStatus.PASSED
        assert verdict.baseline_runs[-1] == rows[-3].run_key
        assert compact(store, "dgx", rows[0].series) in (19, 0)


def test_a_series_without_history_has_its_own_name_and_no_alias(
    store: DirectoryStore, make_spec: Callable[..., RunSpec]
) -> None:
    quoted = make_spec(cmd_args={"num_gpus": 8, "max_steps": "50"})

    assert series_of(store, quoted, "dgx") == series_id(quoted, "dgx")
    assert list(store.list("aliases")) == []


def test_the_dump_of_the_last_good_night_before_is_found(
    store: DirectoryStore, make_row: Callable[..., HistoryRow]
) -> None:
    dumps = {"2026-11-07": 7, "2026-11-08": 8, "2026-11-09": 9, "2026-11-10": 10}
    for night, layers in dumps.items():
        bad = night == "2026-11-09"
        row = make_row(night=night, verdict=VerdictStatus.REGRESSED if bad else VerdictStatus.PASSED)
        put_row(store, row)
        store.put(f"{row.prefix}/{DUMPED}", f"model: {{num_layers: {layers}}}\ntrain: {{train_iters: 1}}\n".encode())

    found = last_good_dump(store, "dgx", row.series, "2026-11-10")
    first = last_good_dump(store, "dgx", row.series, "2026-11-07")

    assert found is not None
    assert found.table["model"] == {"num_layers": 8}
    assert first is None
