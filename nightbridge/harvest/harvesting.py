"""The harvest of a run: its output is stored and checked, and counts only once its manifest is there.

It is the same on the flow's host and on a compute node, and works on one model, `HarvestRequest`. Repeating it is
always safe. A committed run is checked and its record returned; an interrupted harvest resumes where it was; of two
harvesters of one run the second waits, and returns the record of the first.
"""

import contextlib
import json
import logging
import platform
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from importlib.metadata import version
from pathlib import Path

import pydantic

from nightbridge.errors import DamagedData, PermanentError, TransientError
from nightbridge.files import PASSING
from nightbridge.harvest.manifest import (
    METRICS,
    SUMMARY,
    TRAINING_REPORT,
    LeftOut,
    Manifest,
    commit_manifest,
    committed_record,
    missing_objects,
    read_manifest,
    run_prefix,
)
from nightbridge.harvest.selection import files_to_store, stored_path
from nightbridge.harvest.upload import Unit, upload
from nightbridge.locking import lease
from nightbridge.masking import SecretFinder, mask_text
from nightbridge.models import (
    Checkout,
    Checkpoint,
    CheckpointState,
    Image,
    Job,
    RunRecord,
    RunSpec,
    StoreSettings,
    utc_now,
)
from nightbridge.outputs.measurements import MeasuredRun, RunToMeasure, measure_run
from nightbridge.outputs.run_evidence import RunToRead
from nightbridge.store.object_store import ObjectStore
from nightbridge.store.parallel import Progress

SCRATCH = ".harvest-"
"""How the name of a harvest's own folder begins, in the attempt's."""

_ONE_SUBMISSION = timedelta(seconds=2)
"""Slurm tells times in whole seconds; times that differ by more are of two submissions."""

_log = logging.getLogger(__name__)


class HarvestRequest(RunToRead):
    """Everything that a harvest works on. It holds no secret, only references to where secrets are found.

    The attempt folder of its `plan` also takes the masked copies of the logs while they are sent.
    """

    run: RunSpec
    checkout: Checkout
    image: Image
    store: StoreSettings
    series: str
    """That of the run in this store."""
    tainted: tuple[str, ...] = ()
    """What in the checked-out code is no longer as its commits are."""
    load_with: str | None = None
    """`HarvestPlace.load_with`."""

    @property
    def prefix(self) -> str:
        """The run's folder in the store."""
        return run_prefix(self.run, self.job.attempt)


def run_harvest(
    request: HarvestRequest,
    store: ObjectStore,
    secrets: Iterable[str],
    on_progress: Callable[[Progress], None] | None = None,
) -> RunRecord:
    """Measure a run and store it; of one that is committed already, only what the store has is read.

    `store` is the opened one of the request, `secrets` must not leave this machine, and `on_progress` is called in this
    thread, at intervals and at the end.

    Raises:
        TransientError: The store did not answer, or another harvest of the run is in progress and takes long; calling
            again resumes from here.
        PermanentError: The store refuses, or has another job's run there, or there is no room for masked copies.
        DamagedData: The run was committed earlier, and objects of it are missing.
    """
    committed = _committed_run(request, store)
    if committed is not None:
        return committed
    pinned = tuple(repository.commit for repository in request.checkout.repositories)
    to_measure = RunToMeasure(jobs=request.jobs, plan=request.plan, spec=request.run, pinned=pinned)
    return store_run(request, *measure_run(to_measure), store, secrets, on_progress)


def store_run(
    request: HarvestRequest,
    measured: MeasuredRun,
    metrics: bytes,
    store: ObjectStore,
    secrets: Iterable[str],
    on_progress: Callable[[Progress], None] | None = None,
) -> RunRecord:
    """Store a run's output and return its record; `metrics` is `metrics.parquet`, all else is as for `run_harvest`."""
    attempt_dir, values = request.plan.attempt_dir, tuple(secrets)
    # Two at once would write over each other's objects, and what one then commits would be partly the other's.
    with lease(attempt_dir / "harvest.lease") as held, _scratch(attempt_dir) as scratch:
        committed = _committed_run(request, store)
        if committed is not None:
            return committed

        policy = request.run.test.harvest.checkpoint
        units, left_out = files_to_store(measured.output, policy, measured.earlier, request.load_with)
        masked_copies = scratch / "masked"
        with _needing_room(scratch):
            units += _measurement_units(scratch, measured, metrics)
            masked_copies.mkdir()
        named = [unit.path for unit in units if _names_secret(unit, values)]
        uploaded = upload(
            store,
            request.prefix,
            [unit for unit in units if unit.path not in named],
            secrets=values,
            scratch=masked_copies,
            on_progress=on_progress,
        )
        unsent = (*(LeftOut(path=path, reason="its name contains a secret") for path in named), *uploaded.left_out)
        unmasked = (*left_out, *unsent)
        left_out = tuple(
            LeftOut(path=mask_text(each.path, values), reason=mask_text(each.reason, values)) for each in unmasked
        )
        for each in left_out:
            _log.warning("not stored: %s", each)

        held.ensure_held()
        proved = {unit.path: unit.checkpoint for unit in units if unit.checkpoint is not None}
        for each in unsent:
            proved.pop(each.path, None)
        record = _masked_record(_record_of(request, measured, store, unmasked, proved), values)
        manifest = Manifest(
            run_key=request.run.run_key,
            attempt=request.job.attempt,
            prefix=request.prefix,
            files=uploaded.files,
            left_out=left_out,
            masks=uploaded.masks,
            pins=_pins(request.checkout, request.image),
            job=record.job,
            versions={"nightbridge": version("nightbridge"), "python": platform.python_version()},
            committed_at=utc_now(),
            record=record,
        )
        # Whatever the store answered to the uploads: a listing proves that it has what the manifest will promise.
        if problems := missing_objects(store, manifest):
            raise TransientError(
                f"{len(problems)} objects are not as they were sent ({problems[0]})",
                subject=store.url_of(manifest.prefix),
                advice="Harvest the run again; if it persists, check that the endpoint is the S3 server itself",
            )
        commit_manifest(store, manifest)
    # Read back, whoever committed it: what counts is what the store returns.
    committed = _committed_run(request, store)
    if committed is None:
        subject = store.url_of(request.prefix)
        raise TransientError("the store does not return the manifest that was committed", subject=subject)
    return committed


def _committed_run(request: HarvestRequest, store: ObjectStore) -> RunRecord | None:
    """The record of the committed run whose objects are all there by a listing; None when it was never committed."""
    manifest = read_manifest(store, request.prefix)
    if manifest is None:
        return None
    if not _is_one_job(manifest.job, request.job):
        raise PermanentError(
            f"the store already has another run with this run key: that of {_named(manifest.job)}, not of"
            f" {_named(request.job)}",
            subject=store.url_of(manifest.prefix),
            advice="Give each cluster a store of its own, such as a prefix in the store's URL, or the night another id."
            " An embedded cluster is another one in each workspace",
        )
    problems = missing_objects(store, manifest)
    if problems:
        raise DamagedData(
            f"committed, but {len(problems)} of its objects are damaged ({problems[0]})",
            subject=store.url_of(manifest.prefix),
            advice="Run `nightbridge verify` for details; delete its manifest.json to harvest it again",
        )
    return committed_record(store, manifest)


def _is_one_job(stored: Job, job: Job) -> bool:
    """Whether two records are of one job: an id alone comes again, as in each workspace of an embedded cluster."""
    if (stored.cluster, stored.job_id) != (job.cluster, job.job_id):
        return False
    first, second = _submitted(stored), _submitted(job)
    return first is None or second is None or abs(first - second) <= _ONE_SUBMISSION


def _submitted(job: Job) -> datetime | None:
    """When the cluster says that it got a job; `Job.submitted_at` may be when a workspace made anew found it again."""
    return job.status.submitted_at if job.status else None


def _named(job: Job) -> str:
    when = _submitted(job)
    return f"job {job.job_id} of {job.cluster}" + (f" (submitted {when:%Y-%m-%d %H:%M:%S} UTC)" if when else "")


def _record_of(
    request: HarvestRequest,
    measured: MeasuredRun,
    store: ObjectStore,
    left_out: Sequence[LeftOut],
    proved: Mapping[str, Checkpoint],
) -> RunRecord:
    output, checkout = measured.output, request.checkout
    return RunRecord(
        spec=request.run,
        checkout=checkout,
        image=request.image,
        plan=request.plan,
        jobs=request.jobs,
        store_url=store.url,
        prefix=request.prefix,
        series=request.series,
        summary=measured.summary,
        checkpoints=tuple(_as_stored(each, stored_path(output, each), left_out, proved) for each in output.checkpoints),
        left_out=tuple(str(each) for each in left_out),
        tainted=request.tainted,
        facts=measured.facts,
        harvested_at=utc_now(),
    )


def _masked_record(record: RunRecord, secrets: Sequence[str]) -> RunRecord:
    """The record without secrets."""
    try:
        return RunRecord.model_validate_json(mask_text(record.model_dump_json(), secrets))
    except pydantic.ValidationError as error:
        what = "a secret's value also occurs as an ordinary word in the record"
        raise PermanentError(what, subject=record.prefix, advice="Use a longer secret") from error


def _names_secret(unit: Unit, secrets: Sequence[str]) -> bool:
    """Whether a file of the unit is named like a secret: a key of the store cannot be masked."""
    names = bytearray("\0".join(file.path for file in unit.files), "utf-8", "surrogateescape")
    finder = SecretFinder(secrets)
    finder.feed(names, len(names))
    return finder.found


def _measurement_units(scratch: Path, measured: MeasuredRun, metrics: bytes) -> tuple[Unit, ...]:
    (scratch / SUMMARY).write_text(measured.summary.model_dump_json(indent=2) + "\n", encoding="utf-8")
    (scratch / METRICS).write_bytes(metrics)
    units = (Unit.of(scratch / SUMMARY, SUMMARY, "summary"), Unit.of(scratch / METRICS, METRICS, "metrics"))
    if measured.training_report is None:
        return units
    report = scratch / TRAINING_REPORT
    report.write_text(json.dumps(measured.training_report, indent=2) + "\n", encoding="utf-8")
    return (*units, Unit.of(report, TRAINING_REPORT, "summary"))


def _as_stored(
    checkpoint: Checkpoint, path: str, left_out: Iterable[LeftOut], proved: Mapping[str, Checkpoint]
) -> Checkpoint:
    """A checkpoint that was sent is what its bytes have proved; a complete one that could not be stored is damaged.

    What was left out with the path of one that was sent is another of that path.
    """
    sent = proved.get(path)
    if sent is not None and sent.path == checkpoint.path:
        return sent
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

    For the holder of the lease: any other such folder is the leftover of a harvest that was killed.
    """
    with _needing_room(attempt_dir):
        for leftover in attempt_dir.glob(f"{SCRATCH}*"):
            shutil.rmtree(leftover, ignore_errors=True)
        scratch = tempfile.TemporaryDirectory(prefix=SCRATCH, dir=attempt_dir, ignore_cleanup_errors=True)
    with scratch as path:
        yield Path(path)


@contextlib.contextmanager
def _needing_room(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        kind = TransientError if error.errno in PASSING else PermanentError
        what = f"cannot write masked copies and measurements: {error.strerror}"
        raise kind(what, subject=str(folder), advice="Free space there, or make it writable") from error
