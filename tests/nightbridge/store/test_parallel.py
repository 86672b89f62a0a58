"""The account of a harvest: files, bytes, rate, time left, also inside one big file."""

import threading
import time
from pathlib import Path

import pytest

from nightbridge.harvest.upload import Unit, upload
from nightbridge.models import StoreSettings
from nightbridge.store import parallel as module
from nightbridge.store.object_store import open_store
from nightbridge.store.parallel import Meter, Progress, in_parallel


def test_a_line_tells_files_bytes_rate_and_what_is_left() -> None:
    halfway = Progress(
        step="sending", files_done=3, files_total=64, bytes_done=10**9, bytes_total=4 * 10**9, seconds=10
    )
    assert str(halfway) == "sending: 3 of 64 files, 1 GB of 4 GB, 100 MB/s, 30 s left"
    assert halfway.percent == 25


def test_a_size_that_rounds_to_a_thousand_has_the_next_unit() -> None:
    nearly = Progress(
        step="sending", files_done=1, files_total=2, bytes_done=999_700, bytes_total=999_800_000, seconds=1
    )
    assert str(nearly).startswith("sending: 1 of 2 files, 1 MB of 1 GB, 1 MB/s")


def test_before_anything_has_moved_nobody_knows_how_long_it_takes() -> None:
    start = Progress(step="sending", files_done=0, files_total=1, bytes_done=0, bytes_total=5)
    assert start.seconds_left is None
    assert "left" not in str(start)


def test_empty_files_are_counted_as_files() -> None:
    assert Progress(step="sending", files_done=1, files_total=4, bytes_done=0, bytes_total=0).percent == 25


def test_a_file_under_way_counts_with_what_was_read_and_never_for_more_than_it_is() -> None:
    seen: list[Progress] = []
    meter = Meter("sending", [100, 50], seen.append)
    meter.moved(0, 60)
    meter.done(1)
    meter.report()
    meter.moved(0, 400)
    meter.done(0)
    meter.report()
    assert [(each.files_done, each.bytes_done) for each in seen] == [(1, 110), (2, 150)]


def test_the_listener_hears_of_one_big_file_before_it_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "INTERVAL", 0.001)
    (tmp_path / "scratch").mkdir()
    with (tmp_path / "shard").open("wb") as stream:
        stream.truncate(40 << 20)
    seen: list[Progress] = []

    store = open_store(StoreSettings(url=f"file://{tmp_path}/store"))
    upload(store, "a", [Unit.of(tmp_path / "shard", "shard", "checkpoint")], (), tmp_path / "scratch", seen.append)

    inside = [each.bytes_done for each in seen if 0 < each.bytes_done < 40 << 20]
    assert inside
    assert inside == sorted(inside)
    assert (seen[-1].files_done, seen[-1].bytes_done) == (1, 40 << 20)


def test_results_are_in_the_order_of_the_items_and_every_item_is_taken_once() -> None:
    taken: list[int] = []

    def square(number: int) -> int:
        taken.append(number)
        time.sleep(0.001 * (number % 3))
        return number**2

    assert in_parallel(square, range(200), workers=16) == [number**2 for number in range(200)]
    assert sorted(taken) == list(range(200))
    assert in_parallel(square, []) == []


def test_the_first_failure_is_raised_and_nothing_begins_after_it() -> None:
    begun: list[int] = []
    failed = threading.Event()

    def work(number: int) -> None:
        begun.append(number)
        if number == 5:
            failed.set()
            raise ValueError(number)
        assert number == 0 or failed.wait(10)  # the first is alone
        time.sleep(0.1)

    with pytest.raises(ValueError, match="5"):
        in_parallel(work, range(100), workers=8)
    assert len(begun) <= 9


def test_items_that_take_no_time_are_worth_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "QUICK", 0.3)
    here = threading.get_ident()

    def taken_by(seconds: float) -> int:
        time.sleep(seconds)
        return threading.get_ident()

    assert set(in_parallel(taken_by, [0] * 20)) == {here}
    first, second, *others = in_parallel(taken_by, [0, 0.4, *[0] * 20])
    assert first == second == here
    assert here not in others


@pytest.mark.parametrize("raised", [KeyboardInterrupt, RuntimeError])
def test_an_interrupt_of_the_waiting_thread_ends_the_work_and_is_raised_itself(
    monkeypatch: pytest.MonkeyPatch, raised: type[BaseException]
) -> None:
    monkeypatch.setattr(module, "INTERVAL", 0.01)
    interrupted, together, begun = threading.Event(), threading.Barrier(4), []

    def interrupt(_: Progress) -> None:
        interrupted.set()
        raise raised

    def work(number: int) -> None:
        begun.append(number)
        together.wait(10)
        if not number:
            raise ValueError
        assert interrupted.wait(10)
        time.sleep(0.1)

    with pytest.raises(raised):
        in_parallel(work, range(100), Meter("sending", [1] * 100, interrupt), workers=4)
    assert sorted(begun) == [0, 1, 2, 3]
