"""The harvest of a run: everything it left goes to the store, checked, and counts only once its manifest is there.

Repeating it is always safe. A committed run is checked and its record returned; an interrupted one resumes where it
was; of two harvesters of one run the second waits, and ends with the record of the first.
"""

import contextlib
import json
import logging
import platform
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import pydantic

from nightbridge.errors import DamagedData, PermanentError
from nightbridge.harvest.manifest import LeftOut, Manifest, commit_manifest, read_manifest
from nightbridge.harvest.restore import missing_objects
from nightbridge.harvest.selection import files_to_store, stored_path
from nightbridge.harvest.upload import Unit, upload
from nightbridge.locking import lease
from nightbridge.models import (
    Checkout,
    Checkpoint,
    CheckpointState,
    Image,
    Job,
    LaunchPlan,
    RunRecord,
    RunSpec,
    StoredFile,
    Summary,
    utc_now,
)
from nightbridge.models.series import series_id
from nightbridge.outputs.environment_report import read_facts
from nightbridge.outputs.experiment import RunOutput
from nightbridge.secrets import mask_text
from nightbridge.store.checksum import sha256_hex
from nightbridge.store.protocol import ObjectStore
from nightbridge.store.transfers import Progress

if TYPE_CHECKING:
    import pandas

RECORD = "record.json"
SUMMARY = "summary.json"
METRICS = "metrics.parquet"

LEASE = "harvest.lease"
"""The lease of whoever harvests an attempt, in its folder."""

SCRATCH = ".harvest-"
"""How the name of a harvest's own folder begins, in the attempt's."""

_log = logging.getLogger(__name__)


def run_prefix(spec: RunSpec, attempt: int) -> str:
    """The folder of one attempt in the store: `runs/<test slug>/<night>/<run key>/a<n>`."""
    return f"runs/{spec.test_slug}/{spec.night}/{spec.run_key}/a{attempt}"


def load_record(store: ObjectStore, prefix: str) -> RunRecord | None:
    """Read the record of a stored run; None when the run was never committed.

    Raises:
        DamagedData: The run was committed, and its record is missing or not the one that was committed.

    """
    manifest = read_manifest(store, prefix)
    return None if manifest is None else _committed_record(store, manifest)


def committed_run(store: ObjectStore, prefix: str, job: Job) -> RunRecord | None:
    """The record of a job's committed run whose objects are all there by a listing; None when it was never committed.

    Raises:
        PermanentError: What was committed there is another job's.
        DamagedData: The run was committed, and objects of it are missing.

    """
    manifest = read_manifest(store, prefix)
    return None if manifest is None else _confirm(store, manifest, job)


def harvest(
    spec: RunSpec,
    checkout: Checkout,
    image: Image,
    plan: LaunchPlan,
    jobs: Sequence[Job],
    output: RunOutput,
    summary: Summary,
    metrics: "pandas.DataFrame",
    store: ObjectStore,
    secrets: Iterable[str],
    on_progress: Callable[[Progress], None] | None = None,
    tainted: Sequence[str] = (),
    earlier: Sequence[RunOutput] = (),
) -> RunRecord:
    """Store what a run left and return its record.

    Args:
        spec: The run.
        checkout: The commits it was made from.
        image: The container it ran in.
        plan: How it was launched; its attempt folder also takes the masked copies of the logs for the time being.
        jobs: Every attempt, oldest first; the last one is the run's.
        output: What it left.
        summary: What was measured.
        metrics: The measurements, one row per step and tag.
        store: Where to.
        secrets: Values that must not leave this machine.
        on_progress: Called in this thread after each file, and at intervals while none is done.
        tainted: What in the checked-out code is no longer as its commits say.
        earlier: What the attempts before the last one left; their logs and curves are stored beside the run's.

    Raises:
        TransientError: The store did not answer, or another harvest of the run is under way and takes long; calling
            again resumes from here.
        PermanentError: The store refuses, or has another job's run there, or there is no room for masked copies.
        DamagedData: The run was committed earlier, and objects of it are missing.

    """
    job = jobs[-1]
    prefix = run_prefix(spec, job.attempt)
    values = tuple(secrets)
    # Two at once would write over each other's objects, and what one then commits would be partly the other's.
    with lease(plan.attempt_dir / LEASE) as held, _scratch(plan.attempt_dir) as scratch:
        committed = committed_run(store, prefix, job)
        if committed is not None:
            return committed

        units, left_out = files_to_store(output, spec.test.harvest.checkpoint, earlier)
        masked_copies = scratch / "masked"
        with _needing_room(scratch):
            units += _measurement_units(scratch, summary, metrics)
            masked_copies.mkdir()
        uploaded = upload(store, prefix, units, values, masked_copies, on_progress)
        left_out += uploaded.left_out
        for each in left_out:
            _log.warning("not stored: %s", each)

        record = RunRecord(
            spec=spec,
            checkout=checkout,
            image=image,
            plan=plan,
            jobs=tuple(jobs),
            store_url=store.url,
            prefix=prefix,
            series=series_id(spec, job.cluster),
            summary=summary,
            checkpoints=tuple(
                _as_stored(checkpoint, stored_path(output, checkpoint), left_out) for checkpoint in output.checkpoints
            ),
            left_out=tuple(str(each) for each in left_out),
            tainted=tuple(tainted),
            facts=read_facts(output, job, (repository.commit for repository in checkout.repositories)),
            harvested_at=utc_now(),
        )
        held.ensure_held()
        record, stored_record = _put_record(store, record, values)
        manifest = Manifest(
            run_key=spec.run_key,
            attempt=job.attempt,
            prefix=prefix,
            files=tuple(sorted((*uploaded.files, stored_record), key=lambda file: file.path)),
            left_out=left_out,
            masks=uploaded.masks,
            pins=_pins(checkout, image),
            job=record.job,
            versions={"nightbridge": version("nightbridge"), "python": platform.python_version()},
            committed_at=utc_now(),
        )
        if commit_manifest(store, manifest):
            return record
    first = read_manifest(store, prefix)
    if first is None:
        raise DamagedData("the manifest disappeared while it was committed", thing=store.url_of(prefix))
    return _confirm(store, first, job)


def _confirm(store: ObjectStore, manifest: Manifest, job: Job) -> RunRecord:
    there = manifest.job
    if (there.cluster, there.job_id) != (job.cluster, job.job_id):
        raise PermanentError(
            f"the store already has another run with this run key: job {there.job_id} of {there.cluster},"
            f" not of job {job.job_id} of {job.cluster}",
            thing=store.url_of(manifest.prefix),
            advice="Give each cluster a store of its own, such as a prefix in the store's URL, or the night another id",
        )
    problems = missing_objects(store, manifest)
    if problems:
        raise DamagedData(
            f"committed, but {len(problems)} of its objects are damaged ({problems[0]})",
            thing=store.url_of(manifest.prefix),
            advice="Run `nightbridge verify` for details; delete its manifest.json to harvest it again",
        )
    return _committed_record(store, manifest)


def _committed_record(store: ObjectStore, manifest: Manifest) -> RunRecord:
    key = f"{manifest.prefix}/{RECORD}"
    data, entry = store.get(key), manifest.file(RECORD)
    if data is None or entry is None or sha256_hex(data) != entry.sha256:
        raise DamagedData(
            "not the committed record", thing=store.url_of(key), advice="Run `nightbridge verify` for details"
        )
    try:
        return RunRecord.model_validate_json(data)
    except pydantic.ValidationError as error:
        raise DamagedData(
            f"not a run record: {error.errors()[0]['msg']}",
            thing=store.url_of(key),
            advice="It was written by another version of nightbridge",
        ) from error


def _put_record(store: ObjectStore, record: RunRecord, secrets: Sequence[str]) -> tuple[RunRecord, StoredFile]:
    """Store the record without secrets; returns it as it is stored."""
    spelled = {spelling for value in secrets for spelling in (value, json.dumps(value, ensure_ascii=False)[1:-1])}
    data = mask_text(record.model_dump_json(indent=2), spelled).encode() + b"\n"
    key = f"{record.prefix}/{RECORD}"
    try:
        masked = RunRecord.model_validate_json(data)
    except pydantic.ValidationError as error:
        raise PermanentError(
            "a secret's value also occurs as an ordinary word in the record", thing=key, advice="Use a longer secret"
        ) from error
    store.put(key, data)
    return masked, StoredFile(path=RECORD, size=len(data), sha256=sha256_hex(data), kind="summary")


def _measurement_units(scratch: Path, summary: Summary, metrics: "pandas.DataFrame") -> tuple[Unit, ...]:
    (scratch / SUMMARY).write_text(summary.model_dump_json(indent=2) + "\n", encoding="utf-8")
    metrics.to_parquet(scratch / METRICS, index=False)
    return (Unit.of(scratch / SUMMARY, SUMMARY, "summary"), Unit.of(scratch / METRICS, METRICS, "metrics"))


def _as_stored(checkpoint: Checkpoint, path: str, left_out: Iterable[LeftOut]) -> Checkpoint:
    """A complete checkpoint that could not be stored counts as incomplete in the record."""
    reason = next((each.reason for each in left_out if each.path == path), None)
    if reason is None or checkpoint.state is not CheckpointState.COMPLETE:
        return checkpoint
    return checkpoint.model_copy(update={"state": CheckpointState.DAMAGED, "reason": f"not stored: {reason}"})


def _pins(checkout: Checkout, image: Image) -> dict[str, str]:
    return {
        "megatron_bridge": checkout.megatron_bridge.commit,
        **({"nemo_run": checkout.nemo_run.commit} if checkout.nemo_run else {}),
        **({"environment": checkout.environment.digest} if checkout.environment else {}),
        "image": image.digest or image.kind,
    }


@contextlib.contextmanager
def _scratch(attempt_dir: Path) -> Iterator[Path]:
    """A folder beside the run, where there is room for copies of its logs; /tmp of a login node may be small.

    For who holds the lease: any other such folder was left by a harvest that died.
    """
    with _needing_room(attempt_dir):
        for left in attempt_dir.glob(f"{SCRATCH}*"):
            shutil.rmtree(left, ignore_errors=True)
        scratch = tempfile.TemporaryDirectory(prefix=SCRATCH, dir=attempt_dir, ignore_cleanup_errors=True)
    with scratch as path:
        yield Path(path)


@contextlib.contextmanager
def _needing_room(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise PermanentError(
            f"cannot write masked copies and measurements: {error.strerror}",
            thing=str(folder),
            advice="Free space there, or make it writable",
        ) from error
