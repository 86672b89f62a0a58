import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nightbridge.models import CheckpointState
from nightbridge.outputs.checkpoints import (
    TRACKER,
    checkpoints_in,
    find_checkpoints,
    layout_state,
    tracked_iteration,
    trackers_of,
)

COMPLETE, IN_PROGRESS, DAMAGED = CheckpointState.COMPLETE, CheckpointState.IN_PROGRESS, CheckpointState.DAMAGED


class TestWriteOrder:
    def test_a_checkpoint_with_all_parts_is_complete_without_a_common_pt(
        self, tmp_path: Path, write_checkpoint: Callable[..., Path]
    ) -> None:
        path = write_checkpoint(tmp_path)
        assert layout_state(path) == (COMPLETE, "")

    @pytest.mark.parametrize(
        ("until", "missing"),
        [
            ("__0_0.distcp", ".metadata"),
            ("__1_0.distcp", ".metadata"),
            (".metadata", "train_state.pt"),
            ("metadata.json", "train_state.pt"),
            ("train_state.pt", TRACKER),
            ("latest_train_state.pt", TRACKER),
            (TRACKER, "run_config.yaml"),
        ],
    )
    def test_one_that_is_still_being_written_is_in_progress_at_every_moment(
        self, tmp_path: Path, write_checkpoint: Callable[..., Path], until: str, missing: str
    ) -> None:
        state, reason = layout_state(write_checkpoint(tmp_path, until=until))
        assert state is IN_PROGRESS
        assert missing in reason

    @pytest.mark.parametrize("tracker", ["", "1", "10\n"])
    def test_a_tracker_that_is_being_written_is_no_damage(
        self, tmp_path: Path, write_checkpoint: Callable[..., Path], tracker: str
    ) -> None:
        path = write_checkpoint(tmp_path, until=TRACKER)
        (tmp_path / TRACKER).write_text(tracker)
        assert layout_state(path)[0] is IN_PROGRESS

    def test_a_second_save_in_progress_leaves_the_first_complete(
        self, tmp_path: Path, write_checkpoint: Callable[..., Path]
    ) -> None:
        write_checkpoint(tmp_path, iteration=10)
        write_checkpoint(tmp_path, iteration=20, until="__0_0.distcp")
        assert [(found.iteration, found.state) for found in find_checkpoints(tmp_path)] == [
            (10, COMPLETE),
            (20, IN_PROGRESS),
        ]

    @pytest.mark.parametrize("tracker", ["", None, "\0\0"], ids=["empty", "absent", "zeros"])
    def test_whole_ones_stay_whole_when_a_later_save_is_killed_before_it_has_written_the_tracker(
        self, tmp_path: Path, write_checkpoint: Callable[..., Path], tracker: Any
    ) -> None:
        write_checkpoint(tmp_path, iteration=10)
        write_checkpoint(tmp_path, iteration=20)
        write_checkpoint(tmp_path, iteration=30, until=TRACKER)
        (tmp_path / TRACKER).unlink() if tracker is None else (tmp_path / TRACKER).write_text(tracker)
        found = {each.iteration: (each.state, each.reason) for each in find_checkpoints(tmp_path)}
        assert found[10] == found[20] == (COMPLETE, "")
        assert found[30] == (IN_PROGRESS, f"{TRACKER} names nothing, not this one yet")

    def test_one_that_was_never_finished_before_a_later_one_is_damaged(
        self, tmp_path: Path, write_checkpoint: Callable[..., Path]
    ) -> None:
        path = write_checkpoint(tmp_path, iteration=10, until="__0_0.distcp")
        write_checkpoint(tmp_path, iteration=20)
        state, reason = layout_state(path)
        assert state is DAMAGED
        assert ".metadata" in reason

    def test_one_whose_last_part_was_never_written_before_a_later_one_is_damaged(
        self, tmp_path: Path, write_checkpoint: Callable[..., Path]
    ) -> None:
        path = write_checkpoint(tmp_path, iteration=10, until=TRACKER)
        write_checkpoint(tmp_path, iteration=20)
        state, reason = layout_state(path)
        assert state is DAMAGED
        assert "run_config.yaml" in reason

    @pytest.mark.parametrize("part", [".metadata", "metadata.json", "train_state.pt"])
    def test_a_part_missing_before_one_that_is_there_is_damage(
        self, tmp_path: Path, write_checkpoint: Callable[..., Path], part: str
    ) -> None:
        path = write_checkpoint(tmp_path)
        (path / part).unlink()
        state, reason = layout_state(path)
        assert state is DAMAGED
        assert part in reason

    def test_a_whole_directory_that_the_tracker_does_not_reach_is_not_complete(
        self, tmp_path: Path, write_checkpoint: Callable[..., Path]
    ) -> None:
        path = write_checkpoint(tmp_path, iteration=20)
        (tmp_path / TRACKER).write_text("10")
        state, reason = layout_state(path)
        assert state is DAMAGED
        assert "names iteration 10" in reason

    def test_fsdp_dtensor_has_no_metadata_json(self, tmp_path: Path, write_checkpoint: Callable[..., Path]) -> None:
        path = write_checkpoint(tmp_path)
        (path / "metadata.json").unlink()
        (path / "run_config.yaml").write_text("checkpoint:\n  ckpt_format: fsdp_dtensor\n")
        assert layout_state(path) == (COMPLETE, "")


class TestMegatronLM:
    """Megatron-LM on its own writes neither a training state nor a configuration, and its tracker last."""

    @pytest.fixture
    def write(self, write_checkpoint: Callable[..., Path]) -> Callable[..., Path]:
        def write_one(folder: Path, iteration: int = 10, tracker: str | None = None) -> Path:
            path = write_checkpoint(folder, iteration=iteration)
            for part in (path / "train_state.pt", path / "run_config.yaml", folder / "latest_train_state.pt"):
                part.unlink(missing_ok=True)
            (folder / TRACKER).write_text(str(iteration if tracker is None else tracker))
            return path

        return write_one

    def test_a_checkpoint_that_the_tracker_names_is_complete(self, tmp_path: Path, write: Any) -> None:
        assert layout_state(write(tmp_path)) == (COMPLETE, "")

    def test_so_is_one_before_it(self, tmp_path: Path, write: Any) -> None:
        write(tmp_path, 10)
        write(tmp_path, 20)
        assert [found.state for found in find_checkpoints(tmp_path)] == [COMPLETE, COMPLETE]

    def test_one_that_the_tracker_does_not_reach_is_not_complete(self, tmp_path: Path, write: Any) -> None:
        write(tmp_path, 10)
        state, reason = layout_state(write(tmp_path, 20, tracker=10))
        assert state is IN_PROGRESS
        assert TRACKER in reason

    @pytest.mark.parametrize("part", [".metadata", "__0_0.distcp"])
    def test_a_missing_part_is_damage(self, tmp_path: Path, write: Any, part: str) -> None:
        path = write(tmp_path)
        (path / part).unlink()
        assert layout_state(path)[0] is DAMAGED

    @pytest.mark.parametrize("tracker", ["release", "release\n", "10"])
    def test_so_is_a_release_that_the_tracker_names_or_named_before_it_named_an_iteration(
        self, tmp_path: Path, write: Any, tracker: str
    ) -> None:
        path = write(tmp_path, tracker=tracker).rename(tmp_path / "release")
        (tmp_path / "latest_train_state.pt").write_bytes(b"of a later iteration")
        assert layout_state(path) == (COMPLETE, "")

    @pytest.mark.parametrize("name", ["iter_0000010", "release"])
    def test_one_without_a_tracker_is_not_complete(self, tmp_path: Path, write: Any, name: str) -> None:
        path = write(tmp_path).rename(tmp_path / name)
        (tmp_path / TRACKER).unlink()
        assert layout_state(path)[0] is IN_PROGRESS

    def test_one_that_the_tracker_does_not_name_yet_is_not_complete(self, tmp_path: Path, write: Any) -> None:
        assert layout_state(write(tmp_path, tracker="release"))[0] is IN_PROGRESS

    def test_a_tracker_that_is_no_file_says_of_none_that_it_is_complete(self, tmp_path: Path, write: Any) -> None:
        path = write(tmp_path)
        (tmp_path / TRACKER).unlink()
        os.mkfifo(tmp_path / TRACKER)

        assert layout_state(path)[0] is IN_PROGRESS

    @pytest.mark.parametrize("tracker", ["", "\0\0"], ids=["empty", "zeros"])
    def test_a_save_that_is_killed_within_the_tracker_leaves_all_of_them_complete(
        self, tmp_path: Path, write: Any, tracker: str
    ) -> None:
        """It writes the tracker last, so that even the newest is there as a whole."""
        write(tmp_path, 10)
        write(tmp_path, 20, tracker=tracker)
        (write(tmp_path, 30, tracker=tracker) / ".metadata").unlink()
        assert [found.state for found in find_checkpoints(tmp_path)] == [COMPLETE, COMPLETE, DAMAGED]

    def test_a_release_with_a_missing_part_is_damaged(self, tmp_path: Path, write: Any) -> None:
        path = write(tmp_path, tracker="release").rename(tmp_path / "release")
        (path / ".metadata").unlink()
        assert layout_state(path)[0] is DAMAGED

    def test_a_release_is_found_beside_iterations(self, tmp_path: Path, write: Any) -> None:
        write(tmp_path)
        (tmp_path / TRACKER).write_text("release\n")
        assert checkpoints_in(tmp_path) == [tmp_path / "release", tmp_path / "iter_0000010"]

    @pytest.mark.parametrize("left", ["train_state.pt", "run_config.yaml", "latest_train_state.pt"])
    def test_whatever_is_left_of_megatron_bridges_parts_asks_for_the_others(
        self, tmp_path: Path, write_checkpoint: Callable[..., Path], left: Any
    ) -> None:
        path = write_checkpoint(tmp_path)
        for part in (path / "train_state.pt", path / "run_config.yaml", tmp_path / "latest_train_state.pt"):
            if part.name != left:
                part.unlink()
        assert layout_state(path)[0] is not COMPLETE


class TestContent:
    def test_a_missing_shard_is_damage(self, tmp_path: Path, write_checkpoint: Callable[..., Path]) -> None:
        path = write_checkpoint(tmp_path)
        (path / "__1_0.distcp").unlink()
        assert layout_state(path) == (DAMAGED, "shard __1_0.distcp is missing")

    def test_a_shard_one_byte_short_is_damage(self, tmp_path: Path, write_checkpoint: Callable[..., Path]) -> None:
        path = write_checkpoint(tmp_path)
        (path / "__1_0.distcp").write_bytes(bytes(7508))
        assert layout_state(path) == (DAMAGED, "shard __1_0.distcp has 7508 of 7509 bytes")

    def test_a_shard_that_is_a_link_is_damage(self, tmp_path: Path, write_checkpoint: Callable[..., Path]) -> None:
        path = write_checkpoint(tmp_path)
        (path / "__1_0.distcp").rename(tmp_path / "elsewhere")
        (path / "__1_0.distcp").symlink_to(tmp_path / "elsewhere")
        assert layout_state(path) == (DAMAGED, "shard __1_0.distcp is not a regular file")

    def test_stale_shards_of_a_larger_run_are_named_and_no_damage(
        self, tmp_path: Path, write_checkpoint: Callable[..., Path]
    ) -> None:
        path = write_checkpoint(tmp_path)
        (path / "__7_0.distcp").write_bytes(b"old")
        state, reason = layout_state(path)
        assert state is COMPLETE
        assert "__7_0.distcp" in reason

    @pytest.mark.parametrize(
        ("part", "content"),
        [
            (".metadata", b"\x80\x04K\x01."),
            (".metadata", b"no pickle"),
            ("metadata.json", b'{"sharded_backend": '),
            ("metadata.json", b"[]"),
            ("metadata.json", b"[" * 100_000),
            ("run_config.yaml", b"model: [1, 2"),
            ("run_config.yaml", b"\xff\xfe\x00"),
            ("run_config.yaml", b"just text"),
        ],
    )
    def test_a_small_file_that_cannot_be_parsed_is_damage(
        self, tmp_path: Path, write_checkpoint: Callable[..., Path], part: str, content: Any
    ) -> None:
        path = write_checkpoint(tmp_path)
        (path / part).write_bytes(content)
        assert layout_state(path)[0] is DAMAGED

    def test_a_metadata_that_names_no_shard_is_damage(
        self, tmp_path: Path, write_checkpoint: Callable[..., Path]
    ) -> None:
        path = write_checkpoint(tmp_path)
        (path / ".metadata").write_bytes(
            b"\x80\x04\x8c\x25torch.distributed.checkpoint.metadata\x8c\x08Metadata\x93)\x81}\x8c\x0cstorage_data}sb."
        )
        assert layout_state(path) == (DAMAGED, ".metadata names no shard")

    def test_a_metadata_that_is_cut_off_is_damage(self, tmp_path: Path, write_checkpoint: Callable[..., Path]) -> None:
        path = write_checkpoint(tmp_path)
        whole = (path / ".metadata").read_bytes()
        for size in range(1, len(whole), 97):
            (path / ".metadata").write_bytes(whole[:size])
            assert layout_state(path)[0] is DAMAGED, size

    def test_tags_of_the_writers_own_classes_do_not_make_a_configuration_unreadable(
        self, tmp_path: Path, write_checkpoint: Callable[..., Path]
    ) -> None:
        path = write_checkpoint(tmp_path)
        (path / "run_config.yaml").write_text("model: !!python/object/apply:os.system ['touch /tmp/no']\n")
        assert layout_state(path)[0] is COMPLETE


class TestTrackers:
    """`latest_train_state.pt` is copied before the text beside it is written, and neither at once."""

    @pytest.mark.parametrize("copied", [b"", b"lat", b"later state"], ids=["empty", "cut off", "whole"])
    def test_a_training_state_that_a_later_save_has_begun_to_copy_is_not_of_the_checkpoint_before_it(
        self, tmp_path: Path, write_checkpoint: Callable[..., Path], copied: bytes
    ) -> None:
        path = write_checkpoint(tmp_path, iteration=10)
        (write_checkpoint(tmp_path, iteration=20, until="train_state.pt") / "train_state.pt").write_bytes(
            b"later state"
        )
        (tmp_path / "latest_train_state.pt").write_bytes(copied)
        (tmp_path / TRACKER).write_text("10")
        assert list(trackers_of(path)) == [tmp_path / TRACKER]

    @pytest.mark.parametrize("until", ["metadata.json", "train_state.pt"])
    def test_one_that_it_has_not_come_to_is(
        self, tmp_path: Path, write_checkpoint: Callable[..., Path], until: str
    ) -> None:
        path = write_checkpoint(tmp_path, iteration=10)
        write_checkpoint(tmp_path, iteration=20, until=until)
        assert list(trackers_of(path)) == [tmp_path / TRACKER, tmp_path / "latest_train_state.pt"]

    @pytest.mark.parametrize("later", [(), ("metadata.json",)], ids=["no later save", "one that has not come to it"])
    def test_one_that_was_damaged_by_no_later_save_is_not_left_out(
        self, tmp_path: Path, write_checkpoint: Callable[..., Path], later: tuple[str, ...]
    ) -> None:
        path = write_checkpoint(tmp_path, iteration=10)
        for until in later:
            write_checkpoint(tmp_path, iteration=20, until=until)
        (tmp_path / "latest_train_state.pt").write_bytes(b"")
        assert tmp_path / "latest_train_state.pt" in trackers_of(path)

    def test_the_others_have_none(self, tmp_path: Path, write_checkpoint: Callable[..., Path]) -> None:
        path = write_checkpoint(tmp_path, iteration=10)
        write_checkpoint(tmp_path, iteration=20)
        assert list(trackers_of(path)) == []


class TestFind:
    def test_a_missing_folder_has_no_checkpoints(self, tmp_path: Path) -> None:
        assert find_checkpoints(tmp_path / "nothing") == ()

    def test_only_real_iter_directories_count_and_sizes_are_summed(
        self, tmp_path: Path, write_checkpoint: Callable[..., Path]
    ) -> None:
        path = write_checkpoint(tmp_path)
        (tmp_path / "iter_0000020").write_text("a file")
        (tmp_path / "iter_0000030").symlink_to(path)
        (tmp_path / "other").mkdir()
        (found,) = find_checkpoints(tmp_path)
        assert found.path == path
        assert found.size == sum(file.stat().st_size for file in path.iterdir())

    def test_iterations_beyond_seven_digits_are_in_order(
        self, tmp_path: Path, write_checkpoint: Callable[..., Path]
    ) -> None:
        write_checkpoint(tmp_path, iteration=9_999_999)
        write_checkpoint(tmp_path, iteration=10_000_000)
        assert [found.iteration for found in find_checkpoints(tmp_path)] == [9_999_999, 10_000_000]

    def test_a_directory_deleted_in_between_is_left_out(
        self, tmp_path: Path, write_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = write_checkpoint(tmp_path, iteration=10)
        write_checkpoint(tmp_path, iteration=20)

        def judge_while_it_is_deleted(judged: Path, *known: Path | None) -> tuple[CheckpointState, str]:
            shutil.rmtree(path, ignore_errors=True)
            return layout_state(judged, *known)

        monkeypatch.setattr("nightbridge.outputs.checkpoints.layout_state", judge_while_it_is_deleted)
        assert [found.iteration for found in find_checkpoints(tmp_path)] == [20]

    @pytest.mark.parametrize(("content", "expected"), [("10", 10), (" 10\n", 10), ("release", None), ("", None)])
    def test_tracked_iteration(self, tmp_path: Path, content: Any, expected: Any) -> None:
        (tmp_path / TRACKER).write_text(content)
        assert tracked_iteration(tmp_path) == expected
