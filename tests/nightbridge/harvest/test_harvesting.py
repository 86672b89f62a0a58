"""The harvest on every kind of store: complete and verified, or not there at all."""

import errno
import io
import json
import os
import pkgutil
import random
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from nightbridge.errors import DamagedData, PermanentError, TransientError
from nightbridge.harvest.manifest import load_record, read_manifest, run_prefix
from nightbridge.harvest.restore import fetch_run, verify_run
from nightbridge.masking import MASK
from nightbridge.models import CheckpointState, Outcome, RunRecord, StoredFile, StoreSettings
from nightbridge.outputs import checkpoints
from nightbridge.store.checksum import FileSource, sha256_hex
from nightbridge.store.directory import DirectoryStore
from nightbridge.store.object_store import ObjectInfo, ObjectStore, open_store
from nightbridge.store.parallel import Progress
from tests.builders import torch_files
from tests.conftest import BUCKET, SEEDS
from tests.hostile import FOLDERS
from tests.nightbridge.harvest.left_run import NOON, TOKEN, LeftRun, make_run
from tests.real.s3_proxy import Answer, proxy_to, s3_error
from tests.real.s3_servers import S3Server

ROOT = Path(__file__).parents[3]


@pytest.fixture
def left(tmp_path: Path) -> LeftRun:
    return make_run(tmp_path / "workspace", shard_size=100_000)


@pytest.fixture
def directory(tmp_path: Path) -> ObjectStore:
    return open_store(StoreSettings(url=f"file://{tmp_path}/store"))


def objects(store: ObjectStore, prefix: str = "") -> dict[str, bytes]:
    """Every object below a prefix, by its path there."""
    keys = [found.key for found in store.list(prefix)]
    return {key.removeprefix(f"{prefix}/"): store.get(key) or b"" for key in keys}


# --- what is stored -------------------------------------------------------------------------------------------------


def test_every_object_is_byte_for_byte_what_the_job_wrote(store: ObjectStore, left: LeftRun) -> None:
    record = left.harvest(store)

    stored = objects(store, record.prefix)
    masked = {"logs/log-account.exp_4711_0.out", "configs/ConfigContainer.yaml", "attempt/job.sh"}
    originals = {
        "logs/sbatch_account.exp_4711.out": left.job_dir / "sbatch_account.exp_4711.out",
        "logs/launcher.log": left.plan.attempt_dir / "launcher.log",
        "tensorboard/events.out.tfevents.1.host.2.0": left.output.event_files[0],
        **{
            f"checkpoints/{path.relative_to(left.job_dir / 'checkpoints')}": path
            for path in (left.job_dir / "checkpoints").rglob("*")
            if path.is_file() and not {"iter_0000020", "iter_0000060"} & set(path.parts)
        },
    }
    made = {"manifest.json", "summary.json", "metrics.parquet"}
    assert set(stored) == {*originals, *masked, *made}
    for path, original in originals.items():
        assert stored[path] == original.read_bytes(), path
    assert json.loads(stored["summary.json"]) == left.summary.model_dump(mode="json")
    assert verify_run(store, record.prefix) == []


def test_logs_and_curves_of_earlier_attempts_are_kept_beside_the_runs_and_masked(
    directory: ObjectStore, left: LeftRun, tmp_path: Path
) -> None:
    first = left.output.model_copy(update={"attempt_dir": tmp_path / "a1"})
    last = left.output.model_copy(update={"attempt_dir": tmp_path / "a2"})
    jobs = (left.jobs[0], left.jobs[0].model_copy(update={"attempt": 2, "job_id": 4712}))
    record = LeftRun(**{**vars(left), "jobs": jobs, "output": last}).harvest(directory, earlier=[first])

    stored = objects(directory, record.prefix)
    of_the_first = {path.removeprefix("earlier/a1/"): data for path, data in stored.items() if "earlier/" in path}
    of_the_last = {path: data for path, data in stored.items() if path in of_the_first}
    assert of_the_first == of_the_last
    assert {path.split("/")[0] for path in of_the_first} == {"logs", "configs", "attempt", "tensorboard"}
    assert [path for path, data in stored.items() if TOKEN.encode() in data] == []


def test_cloudais_report_is_stored_where_a_test_asks_for_it(directory: ObjectStore, left: LeftRun) -> None:
    record = left.harvest(directory, training_report={"steps": [{"iteration": 1}]})

    assert json.loads(objects(directory, record.prefix)["training_report.json"]) == {"steps": [{"iteration": 1}]}
    assert verify_run(directory, record.prefix) == []


def test_a_planted_token_is_in_no_object_and_nothing_else_of_the_text_changes(
    store: ObjectStore, left: LeftRun
) -> None:
    job = left.jobs[0].model_copy(update={"outcome_reason": f"last line: token {TOKEN} refused"})
    record = LeftRun(**{**vars(left), "jobs": (job,)}).harvest(store)

    stored = objects(store)
    assert [key for key, data in stored.items() if TOKEN.encode() in data] == []
    assert record.job.outcome_reason == f"last line: token {MASK} refused"
    log = left.output.logs[0].read_text()
    assert log.count(TOKEN) == 40
    assert stored[f"{record.prefix}/{'logs/log-account.exp_4711_0.out'}"].decode() == log.replace(TOKEN, MASK)
    manifest = read_manifest(store, record.prefix)
    assert manifest is not None
    assert manifest.masks == 42


@pytest.mark.parametrize(
    ("secret", "known"),
    [
        ("hf_" + "AbCdEfGhIjKlMnOpQrStUvWxYz01234567", False),
        ("nvapi-" + "Ab_9-" * 12 + "wxyz", False),
        ('quoted " and \\ back', True),
        ("line\nbreak", True),
        ("größe!", True),
    ],
)
def test_what_a_job_said_at_its_end_is_masked_as_its_log_is(
    directory: ObjectStore, left: LeftRun, secret: str, known: bool
) -> None:
    job = left.jobs[0].model_copy(update={"outcome_reason": f"OSError: token {secret} refused"})
    record = LeftRun(**{**vars(left), "jobs": (job,)}).harvest(directory, secrets=(TOKEN, *[secret] * known))

    assert record.job.outcome_reason == f"OSError: token {MASK} refused"
    assert load_record(directory, record.prefix) == record
    manifest = read_manifest(directory, record.prefix)
    assert manifest is not None
    assert manifest.job.outcome_reason == record.job.outcome_reason


def test_the_record_and_the_measurements_come_back(store: ObjectStore, left: LeftRun, tmp_path: Path) -> None:
    record = left.harvest(store)

    assert load_record(store, record.prefix) == record
    assert record.prefix == run_prefix(left.spec, 1) == f"runs/llama3-8b/2026-05-04/{left.spec.run_key}/a1"
    assert (record.spec, record.summary, record.jobs) == (left.spec, left.summary, left.jobs)
    assert record.series.startswith("llama3-8b-")
    table = io.BytesIO(store.get(f"{record.prefix}/metrics.parquet") or b"")
    pd.testing.assert_frame_equal(pd.read_parquet(table), left.metrics)


def test_the_manifest_names_pins_job_versions_and_every_object(directory: ObjectStore, left: LeftRun) -> None:
    record = left.harvest(directory)
    manifest = read_manifest(directory, record.prefix)
    assert manifest is not None
    assert manifest.pins["megatron_bridge"] == "a" * 40
    assert manifest.job.job_id == 4711
    assert set(manifest.versions) == {"nightbridge", "python"}
    assert {file.path for file in manifest.files} | {"manifest.json"} == set(objects(directory, record.prefix))


# --- checkpoints ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "iterations"),
    [
        ("none", set()),
        ("last", {"iter_0000040"}),
        ("every 1", {"iter_0000020", "iter_0000040"}),
        ("every 2", {"iter_0000040"}),
        ("all", {"iter_0000020", "iter_0000040"}),
    ],
)
def test_checkpoints_are_stored_by_policy_and_never_an_incomplete_one(
    directory: ObjectStore, tmp_path: Path, policy: str, iterations: set[str]
) -> None:
    record = make_run(tmp_path / "w", policy, shard_size=1000).harvest(directory)
    stored = {path.split("/")[1] for path in objects(directory, record.prefix) if path.startswith("checkpoints/iter")}
    assert stored == iterations


@pytest.mark.parametrize("outcome", list(Outcome))
def test_logs_and_curves_are_kept_whatever_became_of_the_job_and_whatever_is_kept_of_its_checkpoints(
    directory: ObjectStore, tmp_path: Path, outcome: Outcome
) -> None:
    left = make_run(tmp_path / "w", "none", shard_size=1000)
    job = left.jobs[0].model_copy(update={"outcome": outcome})
    record = LeftRun(**{**vars(left), "jobs": (job,)}).harvest(directory)
    kinds = {path.split("/")[0] for path in objects(directory, record.prefix)}
    assert kinds >= {"logs", "tensorboard", "configs", "attempt", "metrics.parquet", "summary.json"}
    assert "checkpoints" not in kinds


def test_an_incomplete_checkpoint_is_left_out_and_said_so(directory: ObjectStore, left: LeftRun) -> None:
    record = left.harvest(directory)
    assert record.left_out == ("checkpoints/iter_0000060: in_progress: no shard",)


def test_trackers_are_stored_only_with_the_checkpoint_that_they_name(directory: ObjectStore, left: LeftRun) -> None:
    (left.job_dir / "checkpoints/latest_checkpointed_iteration.txt").write_text("60")
    record = left.harvest(directory)
    stored = objects(directory, record.prefix)
    assert "checkpoints/iter_0000040/.metadata" in stored
    assert not [path for path in stored if "latest" in path]


def test_where_the_data_loader_stood_is_stored_with_its_checkpoint(directory: ObjectStore, left: LeftRun) -> None:
    for iteration in (20, 40, 60):
        folder = left.job_dir / f"checkpoints/energon/iter_{iteration:07d}"
        folder.mkdir(parents=True)
        (folder / "train_dataloader_dprank000.pt").write_bytes(torch_files.torch_save({"at": iteration}))

    stored = objects(directory, left.harvest(directory).prefix)

    states = {path: data for path, data in stored.items() if "energon" in path}
    assert states == {
        "checkpoints/energon/iter_0000040/train_dataloader_dprank000.pt": torch_files.torch_save({"at": 40})
    }


def test_a_data_loaders_folder_that_is_a_link_out_of_the_run_leaves_the_checkpoint_out(
    directory: ObjectStore, left: LeftRun, tmp_path: Path
) -> None:
    (tmp_path / "foreign/iter_0000040").mkdir(parents=True)
    (tmp_path / "foreign/iter_0000040/passwords").write_bytes(b"foreign")
    (left.job_dir / "checkpoints/energon").symlink_to(tmp_path / "foreign")

    record = left.harvest(directory)

    assert any("is a link to outside the checkpoints' folder" in line for line in record.left_out)
    assert b"foreign" not in objects(directory, record.prefix).values()


def test_a_checkpoint_is_verified_by_its_own_checksums_while_it_is_sent(store: ObjectStore, left: LeftRun) -> None:
    states = {checkpoint.iteration: checkpoint.state for checkpoint in left.harvest(store).checkpoints}
    assert states == {
        20: CheckpointState.COMPLETE,  # not stored, so not read
        40: CheckpointState.VERIFIED,
        60: CheckpointState.IN_PROGRESS,
    }


def flip_a_bit(shard: Path) -> None:
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)


def iterations(store: ObjectStore, prefix: str) -> set[str]:
    """The checkpoints of which the store has anything."""
    return {path.split("/")[1] for path in objects(store, prefix) if path.startswith("checkpoints/iter_")}


def test_a_flipped_bit_in_a_shard_leaves_its_whole_checkpoint_out(store: ObjectStore, left: LeftRun) -> None:
    flip_a_bit(left.job_dir / "checkpoints/iter_0000040/__2_0.distcp")

    record = left.harvest(store)

    assert iterations(store, record.prefix) == set()
    (checkpoint,) = (each for each in record.checkpoints if each.iteration == 40)
    assert checkpoint.state is CheckpointState.DAMAGED
    assert "__2_0.distcp: bytes" in checkpoint.reason
    assert "do not have the CRC-32 recorded for them" in checkpoint.reason
    assert verify_run(store, record.prefix) == []


def test_a_checkpoint_with_a_shard_of_zeros_is_left_out(directory: ObjectStore, left: LeftRun) -> None:
    shard = left.job_dir / "checkpoints/iter_0000040/__2_0.distcp"
    shard.write_bytes(bytes(shard.stat().st_size))

    record = left.harvest(directory)

    assert iterations(directory, record.prefix) == set()
    states = {checkpoint.iteration: checkpoint.state for checkpoint in record.checkpoints}
    assert states[40] is CheckpointState.DAMAGED
    assert any("iter_0000040: damaged: shard __2_0.distcp" in line for line in record.left_out)


@pytest.mark.parametrize(("name", "content"), [("metadata.json", b"[" * 100_000), ("\udcff", b"x")])
def test_a_checkpoint_that_became_hostile_after_it_was_judged_is_left_out(
    directory: ObjectStore, left: LeftRun, name: str, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is looked into in a child: here whatever would do that is gone."""
    monkeypatch.setattr(checkpoints, "prove", None)
    (left.job_dir / "checkpoints/iter_0000040" / name).write_bytes(content)

    record = left.with_sizes_of_now().harvest(directory)

    assert iterations(directory, record.prefix) == set()
    assert any(line.startswith("checkpoints/iter_0000040: ") for line in record.left_out)


def test_a_checkpoint_whose_writer_made_no_checksums_is_stored_and_called_unproven(
    directory: ObjectStore, left: LeftRun
) -> None:
    path = left.job_dir / "checkpoints/iter_0000040/hf/model.safetensors"
    path.parent.mkdir()
    header = json.dumps({"weight": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))

    record = left.with_sizes_of_now().harvest(directory)

    (checkpoint,) = (each for each in record.checkpoints if each.iteration == 40)
    assert checkpoint.state is CheckpointState.UNPROVEN
    assert checkpoint.reason == "model.safetensors is a safetensors file, which has no checksum"
    assert "checkpoints/iter_0000040/hf/model.safetensors" in objects(directory, record.prefix)


@pytest.mark.parametrize(
    ("names", "seconds", "reason"),
    [
        (("__0_0.distcp", "__2_0.distcp"), 301, "2 files such as __0_0.distcp are newer than .metadata"),
        (("common.pt",), 301, "1 file such as common.pt is newer than .metadata"),
        (("__0_0.distcp", "__2_0.distcp"), 299, ""),  # clocks of two nodes
        (("train_state.pt", "run_config.yaml"), 301, ""),  # written after it
    ],
)
def test_a_save_over_a_checkpoint_that_did_not_end_is_not_called_verified(
    directory: ObjectStore, left: LeftRun, names: tuple[str, ...], seconds: int, reason: str
) -> None:
    """A job that is queued again trains from its first step into the same folder; its writer leaves the old parts."""
    path = left.job_dir / "checkpoints/iter_0000040"
    for name in ("common.pt", "train_state.pt"):
        (path / name).write_bytes(torch_files.torch_save({"step": 40}, Path(name).stem))
    (path / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    (path.parent / "latest_train_state.pt").write_bytes((path / "train_state.pt").read_bytes())
    saved = (path / ".metadata").stat().st_mtime
    for name in names:
        os.utime(path / name, (saved + seconds, saved + seconds))

    record = left.with_sizes_of_now().harvest(directory)

    (checkpoint,) = (each for each in record.checkpoints if each.iteration == 40)
    assert checkpoint.state is (CheckpointState.UNPROVEN if reason else CheckpointState.VERIFIED)
    assert checkpoint.reason.startswith(reason)
    assert iterations(directory, record.prefix) == {"iter_0000040"}


LOADER = """
cat > /dev/null
case $1 in
  *40) echo '{"problem": "__1_0.distcp: no such tensor"}' ;;
  *) echo '{"torch": "2.13.0", "tensors": 2, "objects": 1, "bytes": 8}' ;;
esac
"""


def test_what_torch_cannot_load_is_damaged_and_not_stored_where_the_site_has_a_loader(
    directory: ObjectStore, tmp_path: Path
) -> None:
    left = make_run(tmp_path / "w", "all", shard_size=1000)
    record = left.harvest(directory, load_with=shlex.join(["sh", "-c", LOADER]))

    assert iterations(directory, record.prefix) == {"iter_0000020"}
    found = {checkpoint.iteration: (checkpoint.state, checkpoint.reason) for checkpoint in record.checkpoints}
    assert found[20] == (CheckpointState.VERIFIED, "torch 2.13.0 loaded 2 tensors (8 bytes) and 1 objects")
    assert found[40] == (
        CheckpointState.DAMAGED,
        "not stored: damaged: torch cannot load it: __1_0.distcp: no such tensor",
    )


@pytest.mark.parametrize("loader", [sys.executable, "no-such-python", f"sh -c 'echo {TOKEN} >&2; exit 3'"])
def test_a_loader_that_cannot_try_it_is_said_and_costs_no_checkpoint(
    directory: ObjectStore, left: LeftRun, loader: str, caplog: pytest.LogCaptureFixture
) -> None:
    record = left.harvest(directory, load_with=loader)

    (checkpoint,) = (each for each in record.checkpoints if each.iteration == 40)
    assert checkpoint.state is CheckpointState.VERIFIED
    assert checkpoint.reason.startswith("not loaded: ")
    assert "iter_0000040 was not loaded: " in caplog.text
    assert TOKEN not in checkpoint.reason + caplog.text


def test_a_secret_inside_a_shard_leaves_its_whole_checkpoint_out(store: ObjectStore, left: LeftRun) -> None:
    shard = left.job_dir / "checkpoints/iter_0000040/__2_0.distcp"
    with shard.open("r+b") as stream:
        stream.seek(shard.stat().st_size // 2)
        stream.write(TOKEN.encode())

    record = left.harvest(store)

    stored = objects(store)
    assert [key for key, data in stored.items() if "iter_0000040" in key or TOKEN.encode() in data] == []
    assert iterations(store, record.prefix) == set()
    reason = next(line for line in record.left_out if "iter_0000040" in line)
    assert "__2_0.distcp: contains a secret" in reason
    assert TOKEN not in reason
    states = {checkpoint.iteration: checkpoint.state for checkpoint in record.checkpoints}
    assert states[40] is CheckpointState.DAMAGED
    assert verify_run(store, record.prefix) == []


def test_a_file_that_is_named_like_a_secret_is_left_out_under_a_masked_name(
    directory: ObjectStore, left: LeftRun
) -> None:
    named = left.job_dir / f"log-{TOKEN}_1_0.out"
    named.write_text("a log")
    output = left.output.model_copy(update={"logs": (*left.output.logs, named)})

    record = LeftRun(**{**vars(left), "output": output}).harvest(directory)

    assert [line for line in record.left_out if "********" in line] == [
        "logs/log-********_1_0.out: its name contains a secret"
    ]
    assert not [key for key, data in objects(directory).items() if TOKEN in key or TOKEN.encode() in data]


def test_a_checkpoint_below_a_folder_named_like_a_secret_is_not_called_verified(
    directory: ObjectStore, left: LeftRun
) -> None:
    (whole, *_), folder = left.output.checkpoints, left.job_dir / "checkpoints" / TOKEN
    shutil.copytree(whole.path, folder / whole.path.name)
    found = whole.model_copy(update={"path": folder / whole.path.name})
    output = left.output.model_copy(update={"checkpoints": (found,)})

    record = LeftRun(**{**vars(left), "output": output}).harvest(directory)

    assert record.left_out == ("checkpoints/********/iter_0000020: its name contains a secret",)
    assert [each.state for each in record.checkpoints] == [CheckpointState.DAMAGED]


def test_a_secret_inside_an_event_file_leaves_that_file_out(directory: ObjectStore, left: LeftRun) -> None:
    left.output.event_files[0].write_bytes(b"\x00" + TOKEN.encode())
    record = left.harvest(directory)
    assert any(line.startswith("tensorboard/events") for line in record.left_out)
    assert not [path for path in objects(directory, record.prefix) if path.startswith("tensorboard/")]


def test_a_secret_in_the_name_of_a_scalar_is_found_in_the_measurements_too(
    directory: ObjectStore, left: LeftRun
) -> None:
    """As compressed text it would be seen by nobody but who reads the table."""
    tags = [*(f"train/params norm/layer {number}/self_attention" for number in range(40)), f"text/{TOKEN}", "lm loss"]
    table = pd.DataFrame([{"tag": tag, "step": step, "value": 0.5 * step} for tag in tags for step in range(50)])
    record = replace(left, metrics=table).harvest(directory)
    assert "metrics.parquet: contains a secret; binary files are never altered" in record.left_out
    assert "metrics.parquet" not in objects(directory, record.prefix)


class Meddler:
    """Passes everything on to a store, after doing something when a certain file is about to be sent."""

    def __init__(self, store: ObjectStore, name: str, action: Callable[[], object]) -> None:
        self._store, self._name, self._action = store, name, action

    def __getattr__(self, attribute: str) -> object:
        return getattr(self._store, attribute)

    def put_file(self, key: str, source: FileSource) -> ObjectInfo:
        if key.endswith(self._name):
            self._action()
        return self._store.put_file(key, source)


@pytest.mark.parametrize("how", ["grows", "changes", "vanishes"])
def test_a_checkpoint_that_is_altered_or_deleted_while_it_is_sent_is_no_error_of_the_run(
    store: ObjectStore, left: LeftRun, how: str
) -> None:
    shard = left.job_dir / "checkpoints/iter_0000040/__3_0.distcp"
    actions: dict[str, Callable[[], object]] = {
        "grows": lambda: shard.open("ab").write(b"more"),
        "changes": lambda: shard.write_bytes(b"y" * shard.stat().st_size),
        "vanishes": lambda: shutil.rmtree(shard.parent),
    }
    record = left.harvest(Meddler(store, "iter_0000040/__3_0.distcp", actions[how]))  # type: ignore[arg-type]
    assert iterations(store, record.prefix) == set()
    assert any("iter_0000040" in line for line in record.left_out)
    assert verify_run(store, record.prefix) == []


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO, errno.EMFILE])
@pytest.mark.parametrize(
    ("call", "name"),
    [
        ("nightbridge.files._descriptor", "iter_0000040/__1_0.distcp"),
        ("nightbridge.files._descriptor", "tfevents.1.host.2.0"),
        ("nightbridge.files._descriptor", "log-account.exp_4711_0.out"),
        ("os.lstat", "iter_0000040/__1_0.distcp"),
        ("os.lstat", "tfevents.1.host.2.0"),
        ("os.scandir", "checkpoints/iter_0000040"),
    ],
)
def test_a_file_system_that_is_away_for_a_moment_costs_the_run_none_of_its_files(
    directory: ObjectStore, left: LeftRun, monkeypatch: pytest.MonkeyPatch, call: str, name: str, number: int
) -> None:
    """What is left out is left out for good, and a good run without its last checkpoint is a failed one."""
    really, away = pkgutil.resolve_name(call), [number]

    def flaky(path: object, *more: Any, **named: Any) -> object:
        if away and str(path).endswith(name):
            # What is opened from one folder to the next is named by its last part alone.
            raise OSError(away.pop(), os.strerror(number), str(path) if call.startswith("os") else Path(str(path)).name)
        return really(path, *more, **named)

    monkeypatch.setattr(call, flaky)
    with pytest.raises(TransientError, match=f"{name}: cannot be read now: {os.strerror(number)}"):
        left.harvest(directory)
    assert read_manifest(directory, run_prefix(left.spec, 1)) is None

    record = left.harvest(directory)
    assert record.left_out == ("checkpoints/iter_0000060: in_progress: no shard",)
    assert iterations(directory, record.prefix) == {"iter_0000040"}


@pytest.mark.parametrize("gone", ["*", "__0_0.distcp", "run_config.yaml", ".metadata"])
def test_an_older_checkpoint_that_most_recent_k_is_deleting_costs_only_itself(
    directory: ObjectStore, tmp_path: Path, gone: str
) -> None:
    """It goes file by file, after it was found complete and before it is sent."""
    left = make_run(tmp_path / "w", "all", shard_size=1000)
    for file in (left.job_dir / "checkpoints/iter_0000020").glob(gone):
        shutil.rmtree(file) if file.is_dir() else file.unlink()

    record = left.harvest(directory)

    stored = objects(directory, record.prefix)
    assert {path.split("/")[1] for path in stored if "/iter_" in path} == {"iter_0000040"}
    states = {checkpoint.iteration: checkpoint.state for checkpoint in record.checkpoints}
    assert (states[20], states[40]) == (CheckpointState.DAMAGED, CheckpointState.VERIFIED)
    assert verify_run(directory, record.prefix) == []


@pytest.mark.parametrize("swapped", ["log-account.exp_4711_0.out", "tb_logs", "checkpoints/iter_0000040", "."])
def test_what_is_swapped_for_a_link_between_selection_and_upload_is_not_stored(
    directory: ObjectStore, left: LeftRun, tmp_path: Path, swapped: str
) -> None:
    """The link leads to files of the same names, as a credentials file of somebody whose harvester can read it."""
    path = left.job_dir / swapped
    aside = tmp_path / "aside"
    path.rename(aside)
    for file in (each for each in (aside, *aside.rglob("*")) if each.is_file()):
        file.write_bytes(b"a credential")
    path.symlink_to(aside)

    record = left.harvest(directory)

    stored = objects(directory, record.prefix)
    assert b"a credential" not in stored.values()
    assert [line for line in record.left_out if "in_progress" not in line]
    assert verify_run(directory, record.prefix) == []


@pytest.mark.parametrize("attack", FOLDERS)
def test_hostile_folders_and_names_leave_out_the_checkpoint_that_has_them(
    attack: str, directory: ObjectStore, left: LeftRun
) -> None:
    FOLDERS[attack](left.job_dir / "checkpoints/iter_0000040/inner")

    record = left.harvest(directory)

    assert [line for line in record.left_out if line.startswith("checkpoints/iter_0000040: ")]
    assert all(line.isprintable() for line in record.left_out)
    assert [each.state for each in record.checkpoints] == ["complete", "damaged", "in_progress"]


@pytest.mark.parametrize("target", ["/etc/hostname", "../../../../..", "tokenizer", "metadata.json"])
def test_a_link_in_a_checkpoint_leaves_it_out(directory: ObjectStore, left: LeftRun, target: str) -> None:
    (left.job_dir / "checkpoints/iter_0000040/link").symlink_to(target)
    record = left.harvest(directory)
    assert any("link is a link, which is not followed" in line for line in record.left_out)
    assert iterations(directory, record.prefix) == set()


def test_a_log_that_is_no_file_or_has_an_impossible_name_is_left_out(directory: ObjectStore, left: LeftRun) -> None:
    gone, impossible = left.job_dir / "gone.out", left.job_dir / "log-\udcff.out"
    impossible.write_bytes(b"x")
    output = left.output.model_copy(update={"logs": (*left.output.logs, gone, impossible, left.job_dir)})
    record = LeftRun(**{**vars(left), "output": output}).harvest(directory)
    assert [line for line in record.left_out if "gone.out: cannot be read" in line]
    assert [line for line in record.left_out if "not valid UTF-8" in line]
    assert [line for line in record.left_out if "not a regular file" in line]
    assert verify_run(directory, record.prefix) == []


# --- again, together, interrupted -----------------------------------------------------------------------------------


@pytest.mark.s3
def test_a_committed_run_is_confirmed_and_nothing_is_sent_again(ceph: S3Server, left: LeftRun) -> None:
    with proxy_to(ceph.endpoint_url) as proxy:
        store = open_store(ceph.store_settings(BUCKET, "again", endpoint_url=proxy.endpoint_url))
        first = left.harvest(store)
        proxy.requests.clear()
        assert left.harvest(store) == first
        assert {request.method for request in proxy.requests} == {"GET"}


@pytest.mark.s3
def test_an_interrupted_harvest_goes_on_and_sends_nothing_twice(ceph: S3Server, left: LeftRun) -> None:
    with proxy_to(ceph.endpoint_url) as proxy:
        store = open_store(ceph.store_settings(BUCKET, "goes-on", endpoint_url=proxy.endpoint_url))
        proxy.before = lambda request: s3_error(403, "AccessDenied") if "train_state" in request.path else None
        with pytest.raises(PermanentError, match="access denied"):
            left.harvest(store)
        whole = {key for key in objects(store) if "iter_" in key}
        assert load_record(store, run_prefix(left.spec, 1)) is None
        proxy.before = lambda _: None
        proxy.requests.clear()

        record = left.harvest(store)

        sent_again = [
            each.path for each in proxy.requests if each.method == "PUT" and any(k in each.path for k in whole)
        ]
        assert sent_again == []
        assert whole
        assert verify_run(store, record.prefix) == []


@pytest.mark.s3
def test_a_bucket_that_may_only_be_read_is_told_and_the_run_stays_uncommitted(ceph: S3Server, left: LeftRun) -> None:
    ceph.make_bucket("read-only")
    statement = {
        "Effect": "Deny",
        "Principal": "*",
        "Action": "s3:PutObject",
        "Resource": "arn:aws:s3:::read-only/*",
    }
    policy = json.dumps({"Version": "2012-10-17", "Statement": [statement]})
    ceph.client().put_bucket_policy(Bucket="read-only", Policy=policy)
    store = open_store(ceph.store_settings("read-only"))
    for call in (store.check_writable, lambda: left.harvest(store)):
        with pytest.raises(PermanentError, match=r"access denied.*may list, read, write"):
            call()
    assert list(store.list("")) == []

    ceph.client().delete_bucket_policy(Bucket="read-only")
    assert verify_run(store, left.harvest(store).prefix) == []


@pytest.mark.s3
@pytest.mark.parametrize("shard_size", [100_000, 3_000_000], ids=["whole files", "parts"])
def test_a_bucket_that_is_full_is_told_and_the_harvest_goes_on_once_there_is_room(
    ceph: S3Server, tmp_path: Path, shard_size: int
) -> None:
    bucket = f"full-{shard_size}"
    ceph.make_bucket(bucket)
    ceph.fill_bucket_at(bucket, 4 * shard_size)
    left, store = make_run(tmp_path / "w", shard_size=shard_size), open_store(ceph.store_settings(bucket))
    with pytest.raises(PermanentError, match=r"quota exceeded.*Free space in the store or raise its quota"):
        left.harvest(store)
    assert load_record(store, run_prefix(left.spec, 1)) is None

    ceph.fill_bucket_at(bucket, 20 * shard_size)
    assert verify_run(store, left.harvest(store).prefix) == []


def test_two_harvesters_of_one_run_end_with_one_truth(store: ObjectStore, left: LeftRun) -> None:
    with ThreadPoolExecutor(4) as pool:
        records = list(pool.map(lambda _: left.harvest(store), range(4)))
    assert all(record == records[0] for record in records)
    assert load_record(store, records[0].prefix) == records[0]
    assert verify_run(store, records[0].prefix) == []


def test_of_two_harvesters_that_saw_different_things_one_is_the_truth(store: ObjectStore, left: LeftRun) -> None:
    """One has begun to store its files when another begins, which learned something else about the job."""
    learned = left.jobs[0].model_copy(update={"outcome_reason": "what accounting said a moment later"})
    other = LeftRun(
        **{**vars(left), "jobs": (learned,), "summary": left.summary.model_copy(update={"queue_time": 7.0})}
    )
    records: list[RunRecord] = []
    second = threading.Thread(target=lambda: records.append(other.harvest(store)))

    def let_the_other_begin() -> None:
        second.start()
        second.join(1)

    records.append(left.harvest(Meddler(store, "summary.json", let_the_other_begin)))  # type: ignore[arg-type]
    second.join()

    assert records[0] == records[1] == load_record(store, records[0].prefix)
    assert verify_run(store, records[0].prefix) == []


@pytest.mark.parametrize("other", [{"cluster": "ada"}, {"job_id": 4712}])
def test_another_jobs_run_under_the_same_key_is_never_taken_for_ones_own(
    directory: ObjectStore, left: LeftRun, tmp_path: Path, other: dict[str, object]
) -> None:
    """As where two clusters run one scenario in the same night into one store."""
    first = left.harvest(directory)
    theirs = make_run(tmp_path / "their workspace", shard_size=1000)
    job = theirs.jobs[0].model_copy(update=other)

    with pytest.raises(PermanentError, match=r"job 4711 of local.*Give each cluster a store of its own"):
        LeftRun(**{**vars(theirs), "jobs": (job,)}).harvest(directory)

    assert load_record(directory, first.prefix) == first
    assert verify_run(directory, first.prefix) == []


@pytest.mark.parametrize(("seconds", "is_another"), [(90, True), (0.9, False), (None, False)])
def test_of_jobs_with_one_id_the_scheduler_says_by_when_they_were_submitted_whether_they_are_one(
    directory: ObjectStore, left: LeftRun, tmp_path: Path, seconds: float | None, is_another: bool
) -> None:
    """The embedded cluster counts from 1 in every workspace, also in one that was removed and made again."""
    first = left.harvest(directory)
    again = make_run(tmp_path / "workspace made again", shard_size=1000)
    assert again.jobs[0].status is not None
    submitted_at = None if seconds is None else NOON + timedelta(seconds=seconds)
    status = again.jobs[0].status.model_copy(update={"submitted_at": submitted_at})
    # When it was recorded says nothing: a job of Slurm whose workspace was made again is found there, and is recorded anew.
    job = again.jobs[0].model_copy(update={"status": status, "submitted_at": NOON + timedelta(hours=1)})
    later = LeftRun(**{**vars(again), "jobs": (job,)})

    if is_another:
        with pytest.raises(
            PermanentError, match=r"job 4711 of local \(submitted 2026-05-04 12:00:00 UTC\), not of job"
        ):
            later.harvest(directory)
    else:
        assert later.harvest(directory) == first
    assert verify_run(directory, first.prefix) == []


def test_a_committed_run_whose_objects_are_gone_is_damage_not_success(store: ObjectStore, left: LeftRun) -> None:
    record = left.harvest(store)
    store.delete(f"{record.prefix}/checkpoints/iter_0000040/__1_0.distcp")
    with pytest.raises(DamagedData, match=r"__1_0.distcp: missing"):
        left.harvest(store)
    assert verify_run(store, record.prefix) == ["checkpoints/iter_0000040/__1_0.distcp: missing"]


def test_of_two_harvesters_without_a_common_lease_one_commits_and_neither_damages_it(tmp_path: Path) -> None:
    settings = StoreSettings(url=f"file://{tmp_path}/store")
    other = make_run(tmp_path / "copied workspace", shard_size=100_000)
    winners: list[RunRecord] = []

    class Overtaken(DirectoryStore):
        """While its harvest is about to commit, another harvest does."""

        def put_if_absent(self, key: str, data: bytes) -> bool:
            winners.append(other.harvest(open_store(settings)))
            return super().put_if_absent(key, data)

    record = make_run(tmp_path / "workspace", shard_size=100_000).harvest(Overtaken(settings))

    assert [record] == winners
    assert load_record(open_store(settings), record.prefix) == record
    assert verify_run(open_store(settings), record.prefix) == []


@pytest.mark.s3
def test_a_page_instead_of_the_servers_answer_never_counts_as_stored(
    ceph: S3Server, settings_of: Callable[[str], StoreSettings], left: LeftRun
) -> None:
    settings = settings_of("ceph")
    page = Answer(200, b"<html><body>Please log in</body></html>", (("Content-Type", "text/html"),))
    with proxy_to(ceph.endpoint_url) as proxy:
        behind = open_store(settings.model_copy(update={"endpoint_url": proxy.endpoint_url}))
        proxy.before = lambda request: page if request.method == "PUT" else None
        with pytest.raises(TransientError, match="not an S3 response"):
            left.harvest(behind)
        assert list(open_store(settings).list("")) == []
        proxy.before = lambda request: page if len(proxy.requests) % 3 == 0 else None

        record = left.harvest(behind)

    assert verify_run(open_store(settings), record.prefix) == []


def test_what_the_store_lost_after_it_was_sent_is_not_committed(tmp_path: Path, left: LeftRun) -> None:
    class Forgetful(DirectoryStore):
        """Answers that a shard is stored, and has another one."""

        def put_file(self, key: str, source: FileSource) -> ObjectInfo:
            stored = super().put_file(key, source)
            if key.endswith("__0_0.distcp"):
                self.put(key, b"")
            return stored

    store = Forgetful(StoreSettings(url=f"file://{tmp_path}/store"))
    with pytest.raises(TransientError, match=r"not as they were sent .*__0_0.distcp: 0 bytes"):
        left.harvest(store)
    assert load_record(store, run_prefix(left.spec, 1)) is None


def test_a_listing_that_lags_behind_is_no_damage_of_what_was_just_committed(tmp_path: Path, left: LeftRun) -> None:
    class Lagging(DirectoryStore):
        """Has everything, and lists no shard."""

        def list(self, prefix: str, begin: str = "") -> Iterator[ObjectInfo]:
            return (found for found in super().list(prefix, begin) if not found.key.endswith(".distcp"))

    store = Lagging(StoreSettings(url=f"file://{tmp_path}/store"))
    record = left.harvest(store)
    (tmp_path / "store" / record.prefix / "checkpoints/iter_0000040/__1_0.distcp").unlink()
    with pytest.raises(DamagedData, match=r"1 of its objects are damaged .*__1_0.distcp: missing"):
        left.harvest(store)


@pytest.mark.random_kill
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("kind", ["directory", pytest.param("ceph", marks=pytest.mark.s3)])
def test_killed_at_any_moment_a_harvest_leaves_no_manifest_over_missing_data_and_sends_nothing_whole_twice(
    settings_of: Callable[[str], StoreSettings], tmp_path: Path, kind: str
) -> None:
    settings = settings_of(kind)
    left = make_run(tmp_path / "w")
    prefix = run_prefix(left.spec, 1)
    for _ in range(2):  # the first finds a cold server and takes longer than those that will be killed
        started = time.monotonic()
        left.harvest(open_store(settings_of(kind)))
        usual = time.monotonic() - started
        if kind == "directory":
            shutil.rmtree(tmp_path / "the store")
    committed = going_on = 0
    for seed in SEEDS:
        settings = settings.model_copy(update={"url": f"{settings.url}/{seed}"})
        store = open_store(settings)
        with Harvesting(tmp_path / "w", settings) as process:
            time.sleep(random.Random(seed).uniform(0, usual))
            process.kill()
        problems = verify_run(store, prefix)
        assert problems in ([], ["manifest.json: missing; this run was never committed"])
        committed += not problems
        whole = {found.key: found.modified for found in store.list(prefix)}

        record = left.harvest(store)

        after = {found.key: found.modified for found in store.list(prefix)}
        # An object that is sent again has a new time.
        assert {key: after[key] for key in whole} == whole
        going_on += 0 < len(whole) < len(after) - 1
        assert verify_run(store, prefix) == []
        assert fetch_run(store, prefix, tmp_path / f"back-{seed}").record == record
        for shard in (left.job_dir / "checkpoints/iter_0000040").glob("*.distcp"):
            back = tmp_path / f"back-{seed}/checkpoints/iter_0000040" / shard.name
            assert back.read_bytes() == shard.read_bytes()
        assert record.prefix == prefix
        assert list(left.plan.attempt_dir.glob(".harvest-*")) == []
    assert committed < len(SEEDS), "no kill came before the end: the test has tested nothing"
    print(f"{kind}: {len(SEEDS)} kills, {going_on} with some objects there and others not, {committed} after the end")


class Harvesting:
    """A harvest in a process of its own, begun when the block begins."""

    def __init__(self, folder: Path, settings: StoreSettings) -> None:
        command = [sys.executable, "-m", "tests.nightbridge.harvest.left_run", str(folder), settings.model_dump_json()]
        self.process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> "subprocess.Popen[str]":
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        return self.process

    def __exit__(self, *_: object) -> None:
        self.process.communicate()


# --- the rest -------------------------------------------------------------------------------------------------------


def test_progress_counts_up_to_everything(directory: ObjectStore, left: LeftRun) -> None:
    seen: list[Progress] = []
    left.harvest(directory, on_progress=seen.append)
    last = {progress.step: progress for progress in seen}
    assert set(last) == {"sending"}
    assert all(progress.files_done == progress.files_total for progress in last.values())
    assert all(progress.bytes_done == progress.bytes_total > 400_000 for progress in last.values())


def test_a_secret_that_is_a_word_of_the_record_is_refused_not_stored_broken(
    directory: ObjectStore, left: LeftRun
) -> None:
    with pytest.raises(PermanentError, match="Use a longer secret"):
        left.harvest(directory, secrets=("run_key",))


def test_a_run_without_a_manifest_has_no_record(directory: ObjectStore, left: LeftRun) -> None:
    record = left.harvest(directory)
    directory.delete(f"{record.prefix}/manifest.json")
    assert load_record(directory, record.prefix) is None


def test_a_record_beside_an_older_manifest_is_read_and_damage_where_it_was_changed(
    directory: ObjectStore, left: LeftRun
) -> None:
    record = left.harvest(directory)
    manifest = read_manifest(directory, record.prefix)
    assert manifest is not None
    data = record.model_dump_json().encode()
    entry = StoredFile(path="record.json", size=len(data), sha256=sha256_hex(data), kind="summary")
    older = manifest.model_copy(update={"record": None, "files": (*manifest.files, entry)})
    directory.put(f"{record.prefix}/manifest.json", older.model_dump_json().encode())
    directory.put(f"{record.prefix}/record.json", data)
    assert load_record(directory, record.prefix) == record

    directory.put(f"{record.prefix}/record.json", data.replace(b"0.25", b"0.05"))

    with pytest.raises(DamagedData, match="not the committed record"):
        load_record(directory, record.prefix)


def test_an_attempt_folder_that_cannot_be_written_is_named(
    directory: ObjectStore, left: LeftRun, tmp_path: Path
) -> None:
    (tmp_path / "a file").touch()
    plan = left.plan.model_copy(update={"attempt_dir": tmp_path / "a file"})
    with pytest.raises(PermanentError, match=r"a file: cannot be written: .*Check the folder"):
        LeftRun(**{**vars(left), "plan": plan}).harvest(directory)


def test_an_attempt_folder_without_room_is_named(
    directory: ObjectStore, left: LeftRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(PermanentError, match=r"cannot write masked copies and measurements: No space left"):
        left.harvest(directory)
    assert list(left.plan.attempt_dir.glob(".harvest-*")) == []


def test_an_attempt_folder_that_is_away_for_a_moment_is_waited_for(
    directory: ObjectStore, left: LeftRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: object, **__: object) -> None:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr(Path, "write_bytes", away)
    with pytest.raises(TransientError, match=r"cannot write masked copies and measurements: Stale file handle"):
        left.harvest(directory)


def test_what_a_harvest_left_that_died_on_another_machine_is_removed(directory: ObjectStore, left: LeftRun) -> None:
    (left.plan.attempt_dir / ".harvest-node7-4711-x").mkdir()
    left.harvest(directory)
    assert list(left.plan.attempt_dir.glob("*harvest*")) == []
