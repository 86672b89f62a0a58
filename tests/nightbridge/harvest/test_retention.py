"""Which stored runs go and which stay, and that a removal leaves nothing that could be taken for a run."""

import json
import os
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from nightbridge.cli.main import run as nightbridge
from nightbridge.errors import DamagedData, TransientError
from nightbridge.harvest.restore import verify_run
from nightbridge.harvest.retention import StoredRun, choose_runs, find_old_runs, remove_runs
from nightbridge.models import RetentionPolicy, StoreSettings, Verdict, VerdictStatus
from nightbridge.store.object_store import ObjectStore, open_store
from nightbridge.store.s3 import S3Store
from tests.nightbridge.harvest.left_run import make_run
from tests.real.s3_servers import S3Server

NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)


def stored(
    key: str, days_ago: float, *, test: str = "llama", size: int = 10**9, search: str = "", **verdict: object
) -> StoredRun:
    """A committed run; `verdict` fields make it a judged one, `search` is the end of the name of what had it run."""
    written = NOW - timedelta(days=days_ago)
    night = f"{written:%Y-%m-%d}{search}"
    return StoredRun(
        prefix=f"runs/{test}/{night}/{key}",
        test=test,
        night=night,
        run_key=key,
        size=size,
        objects=3,
        committed=True,
        stored_at=written,
        written_at=written,
        verdict=judged(key, night, **verdict) if verdict else None,
    )


def judged(key: str, night: str, **fields: object) -> Verdict:
    values = {"run_key": key, "test_id": "llama", "night": night, "status": VerdictStatus.PASSED, "series": "llama-1"}
    return Verdict.model_validate(values | fields)


def gone(runs: list[StoredRun], policy: RetentionPolicy, decisions: str = "") -> set[str]:
    return {run.run_key for run, _ in choose_runs(runs, policy, decisions, now=NOW)}


# --- the limits -----------------------------------------------------------------------------------------------------


def test_no_limit_removes_nothing() -> None:
    assert gone([stored("old", 4000)], RetentionPolicy()) == set()


def test_runs_go_by_age() -> None:
    assert gone([stored("old", 31), stored("new", 29)], RetentionPolicy(days=30)) == {"old"}


def test_a_verdict_that_was_made_again_makes_no_run_younger(tmp_path: Path) -> None:
    store = open_store(StoreSettings(url=f"file://{tmp_path}"))
    folder = "runs/llama/2026-11-21/llama-2026-11-21-0123456789"
    verdict = judged("llama-2026-11-21-0123456789", "2026-11-21", status=VerdictStatus.FAILED).model_dump_json()
    for name, days_ago in (("a1/summary.json", 41), ("a1/manifest.json", 40), ("verdict.json", 2)):
        store.put(f"{folder}/{name}", verdict.encode())
        os.utime(tmp_path / folder / name, (time.time() - days_ago * 86_400,) * 2)

    (old,) = find_old_runs(store, RetentionPolicy(days=30))

    assert (old.run.prefix, old.reason) == (folder, "stored 40 days ago")


def test_nights_are_counted_per_test_and_all_runs_of_a_night_stay_together() -> None:
    sweep = [stored(f"p{point}-n{night}", 2 + night + point / 100) for night in range(3) for point in range(5)]
    other = [stored("other", 50, test="deepseek")]
    assert gone(sweep + other, RetentionPolicy(nights=2)) == {f"p{point}-n2" for point in range(5)}


# The last is the search among the commits of an attribution's factor 0.
SEARCHES = ["-try-{}", "-bisect-{}", "-attribute-{}", "-attribute-{}-0"]


@pytest.mark.parametrize("search", SEARCHES)
def test_trials_and_searches_are_no_nights_and_go_with_those_of_their_time(search: str) -> None:
    nights = [stored(f"n{night}", 2 + night) for night in range(4)]
    recent = [stored(f"recent{one}", 2.5, search=search.format(f"0000000{one}")) for one in range(5)]
    old = [stored(f"old{one}", 4.5, search=search.format(f"0000001{one}")) for one in range(5)]
    assert gone(nights + recent + old, RetentionPolicy(nights=2)) == {"n2", "n3", *(run.run_key for run in old)}


@pytest.mark.parametrize("search", SEARCHES)
def test_a_good_run_of_a_search_takes_no_place_among_those_that_the_next_night_is_compared_with(search: str) -> None:
    nights = [stored(f"n{age}", age, status=VerdictStatus.PASSED) for age in range(100, 107)]
    found = [stored(f"s{one}", 90, search=search.format("01234567"), status=VerdictStatus.PASSED) for one in range(7)]
    assert gone(nights + found, RetentionPolicy(days=30)) == {run.run_key for run in found}


def test_old_nights_whose_verdicts_are_written_again_stay_the_old_ones() -> None:
    """As `accept --undo` does, or a Retry of an old night."""
    nights = [stored(f"n{age}", age, status=VerdictStatus.PASSED) for age in range(100, 120)]
    again = [run.model_copy(update={"written_at": NOW - timedelta(days=2)}) for run in nights[-5:]]
    assert gone(nights[:-5] + again, RetentionPolicy(nights=7)) == {f"n{age}" for age in range(107, 120)}
    assert gone(nights[:-5] + again, RetentionPolicy(max_gb=0)) == {f"n{age}" for age in range(107, 120)}


def test_a_night_that_is_named_by_a_word_is_as_old_as_its_runs() -> None:
    nights = [stored(f"n{age}", age) for age in (2, 4)]
    word = stored("by-hand", 3).model_copy(update={"night": "release-check"})
    assert gone([*nights, word], RetentionPolicy(nights=2)) == {"n4"}


def test_the_oldest_go_until_the_others_fit() -> None:
    runs = [stored(f"n{night}", 2 + night, size=4 * 10**9) for night in range(4)]
    assert gone(runs, RetentionPolicy(max_gb=8)) == {"n2", "n3"}


def test_what_was_written_within_a_day_is_never_removed() -> None:
    assert gone([stored("n0", 0.1), stored("n1", 0.9), stored("n2", 1.1)], RetentionPolicy(max_gb=0)) == {"n2"}


# --- what is referred to --------------------------------------------------------------------------------------------


def test_what_the_verdict_of_a_run_that_stays_refers_to_stays_and_what_that_refers_to_may_go() -> None:
    runs = [
        stored("oldest", 90, series="another"),
        stored("base", 60, status=VerdictStatus.REGRESSED, baseline_runs=("older",)),
        stored("older", 70, status=VerdictStatus.REGRESSED),
        stored("tonight", 2, status=VerdictStatus.REGRESSED, baseline_runs=("base",)),
    ]
    assert gone(runs, RetentionPolicy(days=30)) == {"older"}


def test_the_run_that_a_control_arm_repeats_stays_with_the_verdict_that_says_so() -> None:
    """It may be of any of the last fourteen good nights; the next night's pairs repeat it once more."""
    arm = {"run_key": "n60", "night": "2026-09-22", "prefix": "runs/llama/2026-09-22/n60/a1"}
    runs = [stored("bad", 2, status=VerdictStatus.REGRESSED, control=arm), stored("n60", 60), stored("n61", 61)]
    assert gone(runs, RetentionPolicy(days=30)) == {"n61"}


def test_the_run_that_a_test_names_as_its_reference_stays() -> None:
    runs = [
        stored("reference", 90, test="recipe"),
        stored("other", 91, test="recipe"),
        stored("tonight", 2, test="hetero", reference_run="reference"),
    ]
    assert gone(runs, RetentionPolicy(days=30)) == {"other"}


def test_the_good_runs_that_the_next_night_is_compared_with_stay_whatever_their_age() -> None:
    runs = [stored(f"n{age}", age, status=VerdictStatus.PASSED) for age in range(100, 112)]
    assert gone(runs, RetentionPolicy(days=30, nights=1, max_gb=0)) == {f"n{age}" for age in range(107, 112)}


def test_a_test_with_a_longer_baseline_keeps_as_many_as_it_takes() -> None:
    runs = [stored(f"n{age}", age, baseline_runs=tuple(f"x{n}" for n in range(9))) for age in range(100, 112)]
    assert gone(runs, RetentionPolicy(days=30)) == {"n110", "n111"}


def test_a_test_that_runs_several_times_a_night_keeps_as_many_nights() -> None:
    """The next verdict compares each of the runs with one run of each of those nights."""
    runs = [
        stored(f"n{age}-i{number}", age + number / 100, status=VerdictStatus.PASSED)
        for age in range(100, 120)
        for number in range(3)
    ]
    kept = {f"n{age}-i{number}" for age in range(100, 107) for number in range(3)}
    assert gone(runs, RetentionPolicy(days=30)) == {run.run_key for run in runs} - kept


def test_a_further_run_of_a_bad_night_takes_no_place_among_those_that_the_next_night_is_compared_with() -> None:
    """The good arm of a pair has the series of what it repeats, and is good."""
    good = [stored(f"n{age}", age, status=VerdictStatus.PASSED) for age in range(110, 120)]
    bad = [stored(f"bad{age}", age, status=VerdictStatus.REGRESSED) for age in range(100, 110)]
    arms = [stored(f"arm{age}", age - 0.1, status=VerdictStatus.PASSED, repeat=2) for age in range(100, 110)]
    kept = {f"n{age}" for age in range(110, 117)}
    assert {run.run_key for run in (*good, *bad, *arms)} - gone([*good, *bad, *arms], RetentionPolicy(days=30)) == kept


def test_runs_that_regressed_are_no_baseline_and_go() -> None:
    runs = [stored(f"n{age}", age, status=VerdictStatus.REGRESSED) for age in (40, 41)]
    assert gone(runs, RetentionPolicy(days=30)) == {"n40", "n41"}


def test_what_an_accepted_decision_names_stays() -> None:
    runs = [stored("accepted-key", 40), stored("old", 41)]
    assert gone(runs, RetentionPolicy(days=30), '{"accepted": ["accepted-key"]}') == {"old"}


# --- the store ------------------------------------------------------------------------------------------------------


class Later:
    """A store whose objects look `days` older, and in which the `failing`-th deletion fails."""

    def __init__(self, store: ObjectStore, days: float, failing: int = 0) -> None:
        self._store, self._age, self._left = store, timedelta(days=days), failing

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)

    def list(self, prefix: str, begin: str = "") -> object:
        for found in self._store.list(prefix, begin):
            assert found.modified is not None
            yield found._replace(modified=found.modified - self._age)

    def delete(self, key: str) -> None:
        self._left -= 1
        if self._left == 0:
            raise TransientError("the server went away", subject=key)
        self._store.delete(key)


def later(store: ObjectStore, days: float, failing: int = 0) -> ObjectStore:
    return Later(store, days, failing)  # type: ignore[return-value]


MONTH = RetentionPolicy(days=30)


def test_a_dry_run_removes_nothing_and_a_removal_all_of_the_run(store: ObjectStore, tmp_path: Path) -> None:
    left = make_run(tmp_path / "w", shard_size=1000)
    prefix = left.harvest(store).prefix
    store.put("history/local/x/row.json", b"{}")
    everything = {found.key for found in store.list("")}

    found = find_old_runs(later(store, 31), MONTH)
    assert {each.key for each in store.list("")} == everything
    removed = remove_runs(later(store, 31), found)

    assert [removal.run.run_key for removal in removed] == [left.spec.run_key]
    assert removed[0].run.size > 10_000
    assert removed[0].url == store.url_of(prefix.rpartition("/")[0])
    assert [each.key for each in store.list("")] == ["history/local/x/row.json"]
    assert find_old_runs(later(store, 29), MONTH) == []


@pytest.mark.parametrize("failing", range(1, 10))
def test_a_removal_that_breaks_off_leaves_no_run_and_the_next_one_ends_it(
    settings_of: Callable[[str], StoreSettings], tmp_path: Path, failing: int
) -> None:
    store = open_store(settings_of("directory"))
    prefix = make_run(tmp_path / "w", shard_size=1000).harvest(store).prefix
    removals = find_old_runs(later(store, 31), MONTH)
    with pytest.raises(TransientError):
        remove_runs(later(store, 31, failing), removals)

    problems = verify_run(store, prefix)
    again = find_old_runs(later(store, 31), MONTH)
    remove_runs(later(store, 31), again)

    # The first deletion is the manifest's: before it the run is whole, and after it nobody takes the rest for a run.
    assert problems == ([] if failing == 1 else ["manifest.json: missing; this run was never committed"])
    assert list(store.list("")) == []


def test_a_harvest_that_is_under_way_is_not_taken_for_a_leftover(store: ObjectStore) -> None:
    store.put("runs/llama/n1/llama-n1-0123456789/a1/checkpoints/iter_0000010/__0_0.distcp", b"half")
    assert find_old_runs(later(store, 6), RetentionPolicy(nights=1)) == []
    assert len(find_old_runs(later(store, 8), RetentionPolicy(nights=1))) == 1


@pytest.mark.s3
def test_parts_of_interrupted_uploads_go_with_their_run_and_others_in_time(
    settings_of: Callable[[str], StoreSettings], ceph: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = S3Store(settings_of("ceph"))
    prefix = make_run(tmp_path / "w", shard_size=1000).harvest(store).prefix
    of_the_run, of_nobody, of_tonight = f"{prefix}/checkpoints/a", "runs/x/n1/x-n1/a1/b", "runs/x/n2/x-n2/a1/c"

    def begin(key: str) -> None:
        ceph.client().create_multipart_upload(Bucket=store.bucket, Key=store.prefix + key)

    def unfinished() -> set[str]:
        found = ceph.client().list_multipart_uploads(Bucket=store.bucket, Prefix=store.prefix)
        return {upload["Key"].removeprefix(store.prefix) for upload in found.get("Uploads", ())}

    for key in (of_the_run, of_nobody):
        begin(key)
    remove_runs(later(store, 31), find_old_runs(later(store, 31), MONTH))
    assert unfinished() == {of_nobody}

    monkeypatch.setattr("nightbridge.harvest.retention.LEFTOVER_AGE", timedelta(seconds=4))
    time.sleep(5)
    begin(of_tonight)
    remove_runs(store, [])
    assert unfinished() == {of_tonight}


def test_a_run_that_was_accepted_or_written_to_since_it_was_chosen_stays(store: ObjectStore, tmp_path: Path) -> None:
    left = make_run(tmp_path / "w", shard_size=1000)
    record = left.harvest(store)
    removals = find_old_runs(later(store, 31), MONTH)
    assert remove_runs(store, removals) == []  # all its objects are newer than what was chosen
    store.put("decisions/1.json", json.dumps({"run": left.spec.run_key}).encode())
    assert remove_runs(later(store, 31), removals) == []
    assert verify_run(store, record.prefix) == []


def test_a_run_that_is_accepted_while_others_are_being_removed_stays(tmp_path: Path) -> None:
    store = open_store(StoreSettings(url=f"file://{tmp_path}/store"))
    keys = [f"runs/llama/n{night}/llama-n{night}-0123456789/a1/manifest.json" for night in range(3)]
    for key in keys:
        store.put(key, b"{}")

    class Accepting(Later):
        def delete(self, key: str) -> None:
            super().delete(key)
            store.put("decisions/1.json", b'{"run": "llama-n1-0123456789"}')

    busy: ObjectStore = Accepting(store, 31)  # type: ignore[assignment]
    removed = remove_runs(busy, find_old_runs(busy, MONTH))

    assert sorted(removal.run.night for removal in removed) == ["n0", "n2"]
    assert [found.key for found in store.list("runs")] == [keys[1]]


def test_a_verdict_that_cannot_be_read_stops_the_removal(store: ObjectStore, tmp_path: Path) -> None:
    record = make_run(tmp_path / "w", shard_size=1000).harvest(store)
    store.put(f"{record.prefix.rpartition('/')[0]}/verdict.json", b"{")
    with pytest.raises(DamagedData, match=r"not a verdict.*Compare the run again"):
        find_old_runs(later(store, 31), MONTH)


# --- the command ----------------------------------------------------------------------------------------------------


def test_prune_lists_stored_runs_and_removes_them_with_yes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"file://{tmp_path}/store"
    store = open_store(StoreSettings(url=url))
    left = make_run(tmp_path / "w", shard_size=1000)
    record = left.harvest(store)
    monkeypatch.setattr("nightbridge.store.object_store.open_store", lambda *_: later(store, 100))
    site = tmp_path / "site.toml"
    site.write_text(f'workspace = "{tmp_path}/w"\n[store]\nurl = "{url}"\n[store.retention]\ndays = 90\n')

    assert nightbridge(["prune", "--system", str(site), "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert verify_run(store, record.prefix) == []
    assert nightbridge(["prune", "--system", str(site), "--store-days", "200"]) == 0
    assert "0 stored runs" in capsys.readouterr().err
    assert nightbridge(["prune", "--system", str(site), "--yes"]) == 0

    assert [run["run"]["run_key"] for run in listed["runs"]] == [left.spec.run_key]
    assert "stored 100 days ago" in capsys.readouterr().out
    assert list(store.list("runs")) == []
