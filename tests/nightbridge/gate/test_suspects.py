"""What changed when a run became worse: between which nights it began, and the commits and settings of those nights."""

from collections.abc import Callable, Sequence
from datetime import UTC, date, datetime, timedelta
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples.practice.repositories import PracticeRepositories, commit_behaviour
from nightbridge.errors import InvalidInput, PermanentError
from nightbridge.gate.run_verdict import compare
from nightbridge.gate.stored_verdicts import find_suspects
from nightbridge.gate.suspects import MAX_COMMITS, suspects_between
from nightbridge.gate.trend import suspect_nights, trends, trends_with_commits
from nightbridge.history.rows import HistoryRow, row_of
from nightbridge.masking import MASK
from nightbridge.models import (
    Bump,
    Outcome,
    RangeCommit,
    RepositoryChange,
    RunRecord,
    Site,
    Suspects,
    ValueChange,
    Verdict,
    VerdictStatus,
)
from nightbridge.report.trend_table import trend_lines
from nightbridge.repos.commits import commits_between, known_commits_between
from nightbridge.store.directory import DirectoryStore
from tests.builders import make_record, make_summary

Records = Callable[..., RunRecord]
Nights = Callable[..., tuple[Verdict, list[HistoryRow]]]


def no_commits(_url: str, _before: str, _after: str) -> Sequence[RangeCommit]:
    return ()


def commit_of(number: int) -> RangeCommit:
    at = datetime(2026, 11, 1, tzinfo=UTC) + timedelta(minutes=number)
    return RangeCommit(commit=f"{number:040x}", subject=f"Change {number}", author="Ada", authored_at=at)


@cache
def earlier_nights(step_times: tuple[float, ...]) -> tuple[HistoryRow, ...]:
    """Their rows: many tests have some in common, and each is judged once."""
    return judged(step_times)[1] if step_times else ()


def judged(step_times: tuple[float, ...], **tonight: Any) -> tuple[Verdict, tuple[HistoryRow, ...]]:
    """The last night's verdict, and all rows; further fields are the last night's."""
    rows = earlier_nights(step_times[:-1])
    number = len(rows)
    night = str(date(2026, 8, 1) + timedelta(days=number))
    record = make_record(make_summary([step_times[-1]] * 50), night, **{"commit": f"{number:040x}"} | tonight)
    verdict = compare(record, rows)
    return verdict, (*rows, row_of(record, verdict))


@pytest.fixture
def nights() -> Nights:
    """Judge consecutive nights with these step times, each night with a commit of its own."""

    def judge(step_times: Sequence[float], **tonight: Any) -> tuple[Verdict, list[HistoryRow]]:
        verdict, rows = judged(tuple(step_times), **tonight)
        return verdict, [*rows]

    return judge


class TestNights:
    def test_a_jump_began_between_the_last_good_night_and_this_one(self, nights: Nights) -> None:
        verdict, rows = nights([1.0, 1.0, 1.2])

        assert suspect_nights(verdict, rows) == (rows[1], rows[2])

    def test_nights_later_it_is_still_the_night_in_which_it_began(self, nights: Nights) -> None:
        verdict, rows = nights([1.0, 1.0, 1.2, 1.2, 1.2])

        assert verdict.status is VerdictStatus.REGRESSED
        assert suspect_nights(verdict, rows) == (rows[1], rows[2])

    def test_a_small_change_that_only_many_nights_prove_began_before_the_first_bad_verdict(
        self, nights: Nights
    ) -> None:
        noise = 1 + 0.01 * np.random.default_rng(1).standard_normal(60)
        verdict, rows = nights([float(value) * (1.03 if number >= 45 else 1.0) for number, value in enumerate(noise)])
        first_bad = next(row for row in rows if row.verdict is VerdictStatus.REGRESSED)

        assert verdict.status is VerdictStatus.REGRESSED
        found = suspect_nights(verdict, rows)
        assert found is not None
        before, after = found
        assert before.night < rows[45].night <= after.night
        assert after.night < first_bad.night

    @pytest.mark.parametrize("worse", [1.08, 1.3])
    @pytest.mark.parametrize("count", [4, 5, 6, 7])
    def test_the_last_good_night_is_never_one_that_was_regressed(
        self, nights: Nights, worse: float, count: int
    ) -> None:
        verdict, rows = nights([*(1 + 0.001 * (number % 3 - 1) for number in range(30)), *[worse] * count])

        found = suspect_nights(verdict, rows)

        assert found is not None
        assert (found[0], rows[30].night <= found[1].night) == (rows[29], True)
        assert all(change.night == rows[30].night for trend in trends(rows) for change in trend.changes)

    def test_on_its_second_night_a_regression_does_not_begin_before_itself(self, nights: Nights) -> None:
        noise = 1 + 0.003 * np.random.default_rng(45).standard_normal(42)
        verdict, rows = nights([float(value) * (1.06 if number >= 40 else 1.0) for number, value in enumerate(noise)])

        found = suspect_nights(verdict, rows)

        assert any("(p = " in reason for reason in verdict.reasons)
        assert found is not None
        assert found[0].night < rows[40].night <= found[1].night
        assert f"since {rows[39].night}" not in " ".join(verdict.reasons)

    @pytest.mark.parametrize("tonight", [[1.3], [1.3, 1.3]])
    def test_a_change_that_was_repaired_long_ago_is_no_suspect(self, nights: Nights, tonight: list[float]) -> None:
        verdict, rows = nights([*[1.0] * 15, *[1.1] * 15, *[1.0] * 19, *tonight])

        assert suspect_nights(verdict, rows) == (rows[48], rows[49])

    @pytest.mark.parametrize("repaired", [1, 4, 5])
    @pytest.mark.parametrize("again", [1, 2])
    def test_a_change_that_was_repaired_some_nights_ago_and_came_back_is_no_suspect(
        self, nights: Nights, repaired: int, again: int
    ) -> None:
        verdict, rows = nights([*[1.0] * 15, *[1.06] * 10, *[1.0] * repaired, *[1.06] * again])

        assert suspect_nights(verdict, rows) == (rows[24 + repaired], rows[25 + repaired])
        assert verdict.since == rows[25 + repaired].night
        assert f"since {rows[15].night}" not in " ".join(verdict.reasons)

    @pytest.mark.parametrize("step_times", [[1.2], [1.0, 1.0]])
    def test_a_good_night_and_a_first_night_have_no_suspects(
        self, store: DirectoryStore, nights: Nights, step_times: list[float]
    ) -> None:
        verdict, rows = nights(step_times)

        assert find_suspects(store, verdict, rows, no_commits) is None

    def test_a_run_that_failed_is_held_against_the_last_good_one(self, store: DirectoryStore, nights: Nights) -> None:
        verdict, rows = nights([1.0, 1.0, 1.0], outcome=Outcome.PROGRAM_ERROR)

        found = find_suspects(store, verdict, rows, no_commits)

        assert found is not None
        assert (found.last_good, found.night) == (rows[1].night, rows[2].night)
        assert [change.name for change in found.repositories] == ["Megatron-Bridge"]


class TestCommits:
    def test_they_are_named_with_subject_author_and_date_the_newest_first(
        self, store: DirectoryStore, nights: Nights, repositories: PracticeRepositories, tmp_path: Path
    ) -> None:
        good = repositories.sha("main")
        commits = [commit_behaviour(repositories, f"Change {number}", slow_wall=number / 100) for number in (1, 2, 3)]
        verdict, rows = nights([1.0, 1.0, 1.2])
        rows = [
            row.model_copy(
                update={
                    "megatron_bridge": row.megatron_bridge.model_copy(
                        update={"url": repositories.bridge_url, "commit": commit}
                    )
                }
            )
            for row, commit in zip(rows, (good, good, commits[-1]), strict=True)
        ]

        found = find_suspects(store, verdict, rows, partial(commits_between, Site(workspace=tmp_path)))

        assert found is not None
        (change,) = found.repositories
        assert (change.before, change.after, change.url) == (good, commits[-1], repositories.bridge_url)
        assert [commit.commit for commit in change.commits] == commits[::-1]
        assert [commit.subject for commit in change.commits] == ["Change 3", "Change 2", "Change 1"]
        assert {commit.author for commit in change.commits} == {"Practice"}
        assert all(commit.authored_at.tzinfo for commit in change.commits)

    def test_a_mirror_that_does_not_know_them_costs_the_verdict_nothing(
        self, store: DirectoryStore, nights: Nights
    ) -> None:
        def rewritten(_url: str, _before: str, _after: str) -> Sequence[RangeCommit]:
            raise InvalidInput("the branch was rewritten", subject="aaa..bbb")

        verdict, rows = nights([1.0, 1.0, 1.2])

        found = find_suspects(store, verdict, rows, rewritten)

        assert found is not None
        assert found.repositories[0].commits == ()
        assert "the branch was rewritten" in found.repositories[0].note

    def test_of_very_many_the_newest_are_named(self, store: DirectoryStore, nights: Nights) -> None:
        many = [commit_of(number) for number in range(MAX_COMMITS + 7)]
        verdict, rows = nights([1.0, 1.0, 1.2])

        found = find_suspects(store, verdict, rows, lambda *_ends: many)

        assert found is not None
        (change,) = found.repositories
        assert (len(change.commits), change.commits[0]) == (MAX_COMMITS, many[-1])
        assert change.note == "and 7 older commits"

    def test_another_repository_has_no_range(self, store: DirectoryStore, nights: Nights) -> None:
        verdict, rows = nights([1.0, 1.0, 1.2])
        fork = rows[2].megatron_bridge.model_copy(update={"url": "https://example.org/fork.git"})
        rows[2] = rows[2].model_copy(update={"megatron_bridge": fork})

        def unknown(_url: str, _before: str, _after: str) -> Sequence[RangeCommit]:
            raise InvalidInput("no such commit", subject="aaa")

        found = find_suspects(store, verdict, rows, unknown)

        assert found is not None
        assert found.repositories[0].commits == ()
        assert "the repository changed; before" in found.repositories[0].note


def differences(store: DirectoryStore, before: HistoryRow, after: HistoryRow) -> Suspects:
    return suspects_between(store, before, after, lambda _url, _before, _after: ())


class TestDifferences:
    def test_image_and_nodes_are_named_also_when_the_runs_are_gone(
        self, store: DirectoryStore, make_row: Callable[..., HistoryRow]
    ) -> None:
        before = make_row(night="2026-11-08")
        after = make_row(night="2026-11-09").model_copy(
            update={"image": "nvcr.io/nvidia/nemo:26.09", "nodes": "node[3-4]"}
        )

        found = differences(store, before, after)

        assert found.environment == (
            ValueChange(name="image", before="nvcr.io/nvidia/nemo:26.08", after="nvcr.io/nvidia/nemo:26.09"),
            ValueChange(name="nodes", before="node[1-2]", after="node[3-4]"),
        )
        assert all("cannot be compared" in note for note in found.notes)
        assert len(found.notes) == 2

    def test_arguments_overrides_and_variables_are_compared_and_places_are_not(
        self, store: DirectoryStore, make_record: Records, commit: Callable[..., RunRecord]
    ) -> None:
        def stored(night: str, tp: int, overlap: str, timeout: str) -> HistoryRow:
            record = make_record(
                night=night,
                cmd_args={"num_gpus": 8, "max_steps": 50, "tp": tp, "save_dir": f"/scratch/{night}"},
                extra_cmd_args={"++comm_overlap.tp_comm_overlap": overlap, "logger.tensorboard_dir": f"/x/{night}"},
                commit=f"{tp:040x}",
            )
            plan = record.plan.model_copy(
                update={
                    # A site's variables reach the job through the launcher's command line.
                    "argv": ("-E", f"NCCL_ALGO={'Ring' if tp == 1 else 'Tree'}"),
                    "environment": {
                        "NCCL_TIMEOUT": timeout,
                        "LOGS": f"/w/runs/{record.spec.run_key}/a1/logs",
                        "TMPDIR": f"/tmp/{night}",
                        "CODE": f"/shared/bridge/{tp:040x}",
                    },
                }
            )
            bridge = record.checkout.megatron_bridge.model_copy(
                update={"submodules": {"3rdparty/Megatron-LM": overlap}}
            )
            checkout = record.checkout.model_copy(update={"megatron_bridge": bridge})
            return row_of(commit(store, record.model_copy(update={"plan": plan, "checkout": checkout})), None)

        found = differences(store, stored("2026-11-08", 1, "true", "600"), stored("2026-11-09", 2, "false", "1200"))

        assert found.notes == ()
        assert found.configuration == (
            ValueChange(name="cmd_args.tp", before="1", after="2"),
            ValueChange(name="extra_cmd_args.comm_overlap.tp_comm_overlap", before="true", after="false"),
        )
        assert found.environment == (
            ValueChange(name="$NCCL_ALGO", before="Ring", after="Tree"),
            ValueChange(name="$NCCL_TIMEOUT", before="600", after="1200"),
            ValueChange(name="submodule 3rdparty/Megatron-LM", before="true", after="false"),
        )

    def test_what_a_commit_changed_in_the_recipe_is_found_in_what_the_runs_dumped(
        self, store: DirectoryStore, make_record: Records, commit: Callable[..., RunRecord]
    ) -> None:
        rows = []
        for night, size in (("2026-11-08", 1), ("2026-11-09", 2)):
            row = row_of(commit(store, make_record(night=night)), None)
            text = (
                f"model: {{num_layers: 32, moe: {{capacity: {size}.0}}}}\n"
                f"train: {{train_iters: 50, micro_batch_size: {size}}}\n"
                f"logger: {{tensorboard_dir: /x/{night}}}\n"
                f"checkpoint: {{save: /y/{night}, load: /w/runs/{row.run_key}/a1/in}}\n"
            )
            store.put(f"{row.prefix}/configs/ConfigContainer.yaml", text.encode())
            rows.append(row)

        found = differences(store, *rows)

        assert found.configuration == (
            ValueChange(name="model.moe.capacity", before="1.0", after="2.0"),
            ValueChange(name="train.micro_batch_size", before="1", after="2"),
        )

    def test_a_masked_value_hides_no_difference_of_another_one(
        self, store: DirectoryStore, make_record: Records, commit: Callable[..., RunRecord]
    ) -> None:
        rows = [row_of(commit(store, make_record(night=night)), None) for night in ("2026-11-08", "2026-11-09")]
        for size, row in enumerate(rows):
            text = f"model: {{size: {size}}}\ntrain: {{}}\nlogger:\n  key: {MASK}\n"
            store.put(f"{row.prefix}/configs/ConfigContainer.yaml", text.encode())

        found = differences(store, *rows)

        assert found.configuration == (ValueChange(name="model.size", before="0", after="1"),)
        assert found.notes == ()

    @pytest.mark.parametrize("damage", [b"\xff", b"model: [", b"- a list"])
    def test_a_damaged_file_is_no_difference(
        self, store: DirectoryStore, make_record: Records, commit: Callable[..., RunRecord], damage: bytes
    ) -> None:
        rows = [row_of(commit(store, make_record(night=night)), None) for night in ("2026-11-08", "2026-11-09")]
        store.put(f"{rows[0].prefix}/configs/ConfigContainer.yaml", b"model: {a: 1}\ntrain: {}\n")
        store.put(f"{rows[1].prefix}/configs/ConfigContainer.yaml", damage)

        assert differences(store, *rows).configuration == ()

    def test_a_store_that_refuses_is_no_difference_but_an_error(
        self, store: DirectoryStore, make_row: Callable[..., HistoryRow], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(_key: str) -> bytes:
            raise PermanentError("permission denied")

        monkeypatch.setattr(store, "get", refuse)

        with pytest.raises(PermanentError):
            differences(store, make_row(night="2026-11-08"), make_row(night="2026-11-09"))


class TestTrends:
    def test_a_change_of_level_names_the_commits_around_it(self, nights: Nights) -> None:
        _verdict, rows = nights([1.0] * 15 + [1.1] * 15)

        def two_commits(url: str, before: str, after: str) -> Sequence[RangeCommit]:
            assert (url, before, after) == (rows[0].megatron_bridge.url, commit_of(14).commit, commit_of(15).commit)
            return commit_of(1), commit_of(2)

        lines = trend_lines(trends_with_commits(trends(rows), two_commits))

        place = next(place for place, line in enumerate(lines) if "Megatron-Bridge:" in line)
        assert lines[place + 1 : place + 3] == (
            f"    {commit_of(2).commit[:10]} Change 2 (Ada, 2026-11-01)",
            f"    {commit_of(1).commit[:10]} Change 1 (Ada, 2026-11-01)",
        )

    def test_a_workspace_without_the_mirror_says_so(self, nights: Nights, tmp_path: Path) -> None:
        _verdict, rows = nights([1.0] * 15 + [1.1] * 15)

        lines = trend_lines(trends_with_commits(trends(rows), partial(known_commits_between, Site(workspace=tmp_path))))

        assert any("this workspace has no mirror of it" in line for line in lines)
        assert list(tmp_path.iterdir()) == []


def test_suspects_survive_json(store: DirectoryStore, nights: Nights) -> None:
    verdict, rows = nights([1.0, 1.0, 1.2])
    found = find_suspects(store, verdict, rows, lambda *_ends: [commit_of(1)])

    assert found is not None
    assert Suspects.model_validate_json(found.model_dump_json()) == found
    kept = verdict.model_copy(update={"suspects": found})
    assert Verdict.model_validate_json(kept.model_dump_json()) == kept


class TestMoves:
    def test_a_repository_that_moved_has_the_commits_of_both(self, store: DirectoryStore, nights: Nights) -> None:
        verdict, rows = nights([1.0, 1.0, 1.2])
        new = rows[2].megatron_bridge.model_copy(update={"url": "https://github.com/a/new.git"})
        rows[2] = rows[2].model_copy(update={"megatron_bridge": new})
        before = commit_of(1).model_copy(update={"url": "https://github.com/a/old.git"})

        found = find_suspects(store, verdict, rows, lambda *_ends: [before, commit_of(2)])

        assert found is not None
        (change,) = found.repositories
        assert [one.url for one in change.listed] == ["https://github.com/a/new.git", "https://github.com/a/old.git"]
        assert change.note.startswith("the repository changed; before: ")


class TestBumps:
    @staticmethod
    def bump(*inner: RangeCommit) -> RangeCommit:
        moved = Bump(folder="core", before="1" * 40, after="2" * 40, commits=inner, url="https://github.com/a/core.git")
        return commit_of(0).model_copy(update={"bumps": (moved,), "only_bumps": True, "subject": "Bump"})

    def test_the_commits_inside_follow_their_bump_which_is_no_suspect(self) -> None:
        change = RepositoryChange(
            name="Megatron-Bridge", url="u", before="a", after="b", commits=(self.bump(*map(commit_of, (1, 2))),)
        )

        first, *inner = change.listed

        assert first.text == f"Bump (bump of 2 commits of core {'1' * 12}..{'2' * 12})"
        assert first.is_bump
        assert [(one.commit, one.url) for one in inner] == [
            (commit_of(2), "https://github.com/a/core.git"),
            (commit_of(1), "https://github.com/a/core.git"),
        ]
        assert inner[0].text == f"core: {commit_of(2).subject}"
        assert not inner[0].is_bump

    def test_of_a_large_bump_the_newest_are_named(self, store: DirectoryStore, nights: Nights) -> None:
        many = [commit_of(number) for number in range(1, MAX_COMMITS + 7)]
        verdict, rows = nights([1.0, 1.0, 1.2])

        found = find_suspects(store, verdict, rows, lambda *_: [commit_of(999), self.bump(*many)])

        assert found is not None
        (bump,) = found.repositories[0].commits
        assert bump.bumps[0].commits == tuple(many[-MAX_COMMITS + 1 :])
        assert str(bump.bumps[0]).startswith(f"bump of {len(many)} commits of core")
        assert found.repositories[0].note == "and 1 older commits"
