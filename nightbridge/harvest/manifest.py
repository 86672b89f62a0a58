"""What the store has of a run: where its attempts are, the manifest of each, and its record.

The manifest is written last, only if absent, and is the one sign that a run is complete.
"""

import io
import re
from datetime import datetime
from typing import TYPE_CHECKING, Literal

import pydantic
from pydantic import Field
from pydantic_core import to_json

from nightbridge.errors import DamagedData, InvalidInput
from nightbridge.models import Job, Model, RunRecord, RunSpec, StoredFile, StoredModel
from nightbridge.store.checksum import FileDigest, sha256_hex
from nightbridge.store.object_store import ObjectInfo, ObjectStore, read_stored
from nightbridge.store.parallel import in_parallel

if TYPE_CHECKING:
    import pandas as pd

MANIFEST = "manifest.json"
RECORD = "record.json"
"""Where version 0.1 kept the record; now it is part of the manifest."""

SUMMARY = "summary.json"
METRICS = "metrics.parquet"
TRAINING_REPORT = "training_report.json"


class LeftOut(Model):
    """A file or a whole checkpoint of the run's output that the store does not hold, and the reason."""

    path: str = Field(description="Where it would be, relative to the prefix.")
    reason: str

    @pydantic.field_validator("path", "reason")
    @classmethod
    def _printable(cls, text: str) -> str:
        # A file name need not be UTF-8; JSON must.
        return text.encode(errors="backslashreplace").decode()

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


class Manifest(StoredModel):
    """What the store has of one attempt of a run: exactly these objects, with exactly these bytes."""

    version: Literal[1] = Field(1, description="Of the layout of `files`: a release refuses one that it does not know.")
    run_key: str
    attempt: int = Field(ge=1)
    prefix: str = Field(description="The folder of the store that `files` are relative to.")
    files: tuple[StoredFile, ...] = Field(description="Every object but the manifest itself, by path.")
    left_out: tuple[LeftOut, ...] = ()
    masks: int = Field(0, ge=0, description="How many secret values were masked in text files.")
    pins: dict[str, str] = Field({}, description="What the run used: commits, image digest, environment.")
    job: Job
    versions: dict[str, str] = Field({}, description="What wrote this: nightbridge and Python.")
    committed_at: datetime
    record: RunRecord | None = Field(
        None, description="The run. A part of the manifest, so that the one conditional write decides which counts."
    )

    def file(self, path: str) -> StoredFile | None:
        """The entry of one path, None when the run has no such file."""
        return next((file for file in self.files if file.path == path), None)


def read_manifest(store: ObjectStore, prefix: str) -> Manifest | None:
    """Read the manifest of a run; None when the run was never committed, and then nothing of it may be read.

    Raises:
        DamagedData: There is one, and it is not a manifest.
    """
    advice = "It was modified in the store, or written by a newer nightbridge"
    return read_stored(store, f"{prefix}/{MANIFEST}", Manifest, what="not a manifest", advice=advice)


def commit_manifest(store: ObjectStore, manifest: Manifest) -> bool:
    """Write the manifest unless there is one; return whether this call committed the run."""
    data = to_json(manifest, indent=2) + b"\n"
    return store.put_if_absent(f"{manifest.prefix}/{MANIFEST}", data)


def load_record(store: ObjectStore, prefix: str) -> RunRecord | None:
    """Read the record of a stored run; None when the run was never committed.

    Raises:
        DamagedData: The run was committed, and its record is missing or not the one that was committed.
    """
    manifest = read_manifest(store, prefix)
    return None if manifest is None else committed_record(store, manifest)


def load_scalars(store: ObjectStore, prefix: str) -> "pd.DataFrame | None":
    """Read the scalars of a stored run: tag, step, value, superseded, and file where known; None when it has none.

    Raises:
        DamagedData: They are not those that were committed, or not a table of scalars.
    """
    key = f"{prefix}/{METRICS}"
    data = store.get(key)
    if data is None:
        return None
    # A flipped bit in a compressed page is read as other numbers, without any error.
    manifest = read_manifest(store, prefix)
    if manifest and (entry := manifest.file(METRICS)):
        digest = FileDigest(entry.part_size)
        digest.update(data)
        if (len(data), digest.hexdigest()) != (entry.size, entry.sha256):
            advice = "Run `nightbridge verify` for details"
            raise DamagedData("not what was committed", subject=store.url_of(key), advice=advice)
    import pandas as pd
    import pyarrow as pa
    from pyarrow import parquet

    try:
        known = {"file"}.intersection(parquet.read_schema(io.BytesIO(data)).names)
        columns = ["tag", "step", "value", "superseded", *known]
        return pd.read_parquet(io.BytesIO(data), columns=columns, read_dictionary=known)
    except (pa.ArrowException, ValueError, OSError) as error:  # pyarrow has an OSError for many a damaged page
        raise DamagedData(
            "not a table of scalars", subject=store.url_of(key), advice="Harvest the run again"
        ) from error


def read_scalars(store: ObjectStore, prefix: str) -> "pd.DataFrame":
    """The scalars of a run that must have some.

    Raises:
        DamagedData: There are none, or they are not a table of scalars.
    """
    scalars = load_scalars(store, prefix)
    if scalars is None:
        raise DamagedData("no scalars", subject=store.url_of(f"{prefix}/{METRICS}"), advice="Harvest the run again")
    return scalars


def committed_record(store: ObjectStore, manifest: Manifest) -> RunRecord:
    """The record of a manifest, or the one that an older manifest names.

    Raises:
        DamagedData: It is missing, or not the one that was committed.
    """
    if manifest.record is not None:
        return manifest.record
    key, entry = f"{manifest.prefix}/{RECORD}", manifest.file(RECORD)
    data = store.get(key)
    if data is None or entry is None or sha256_hex(data) != entry.sha256:
        raise DamagedData(
            "not the committed record", subject=store.url_of(key), advice="Run `nightbridge verify` for details"
        )
    try:
        return RunRecord.model_validate_json(data)
    except pydantic.ValidationError as error:
        raise DamagedData(
            f"not a run record: {error.errors()[0]['msg']}",
            subject=store.url_of(key),
            advice="It was written by another version of nightbridge",
        ) from error


def missing_objects(store: ObjectStore, manifest: Manifest) -> list[str]:
    """Objects that are missing or others, a line each; a listing may lag behind, so what it doubts is looked at."""
    missing, doubted = {file.path: file for file in manifest.files}, []
    for found in store.list(manifest.prefix):
        file = missing.pop(found.key.removeprefix(f"{manifest.prefix}/"), None)
        if file is not None and _wrong(file, found):
            doubted.append(file)
    doubted = [*missing.values(), *doubted]
    return list(filter(None, in_parallel(lambda file: object_problem(store, manifest.prefix, file), doubted)))


def foreign_objects(store: ObjectStore, manifest: Manifest) -> list[str]:
    """Paths below the run's prefix that its manifest does not name."""
    ours = {MANIFEST, *(file.path for file in manifest.files)}
    paths = (found.key.removeprefix(f"{manifest.prefix}/") for found in store.list(manifest.prefix))
    return [path for path in paths if path not in ours]


def _wrong(file: StoredFile, found: ObjectInfo | None) -> str:
    """How an object differs from the manifest's entry in what is known of it, empty where it does not."""
    if found is None:
        return f"{file.path}: missing"
    if found.size != file.size:
        return f"{file.path}: {found.size} bytes, expected {file.size}"
    for name, has, expected in (
        ("sha256", found.sha256, file.sha256),
        # The server's own: a recorded checksum says what the writer sent, or what somebody copied beside other bytes.
        ("ETag", found.etag, file.etag),
    ):
        if has and expected and has != expected:
            # The ETag of one that was sent in parts says of how many bytes these were.
            copied = "; other bytes, or copied in other parts: check with --deep" * ("-" in has + expected)
            return f"{file.path}: {name} {has}, expected {expected}{copied}"
    return ""


def object_problem(store: ObjectStore, prefix: str, file: StoredFile) -> str:
    """What is wrong with a stored object, by its size and the checksums that the store has of it; empty for nothing."""
    found = store.stat(f"{prefix}/{file.path}", file.part_size)
    if found and not (found.sha256 or (found.etag and file.etag)):
        return f"{file.path}: no checksum in the store; use --deep"
    return _wrong(file, found)


def run_prefix(spec: RunSpec, attempt: int) -> str:
    """The folder of one attempt in the store: `runs/<test slug>/<night>/<run key>/a<n>`."""
    return f"runs/{spec.test_slug}/{spec.night}/{spec.run_key}/a{attempt}"


def run_key_of(prefix: str) -> str:
    """The run key in such a prefix."""
    return prefix.split("/")[-2]


def committed_attempts(store: ObjectStore, run_key: str) -> tuple[str, ...]:
    """The prefixes of a run's committed attempts, oldest first.

    A run key is `<test slug>-<night>-<hash>` and the store's folders are named after slug and night, both of which may
    hold dashes: every split of the key is tried.
    """
    found: dict[int, str] = {}
    words = re.sub(r"-[0-9a-f]{10}$", "", run_key).split("-")
    for cut in range(1, len(words)):
        folder = f"runs/{'-'.join(words[:cut])}/{'-'.join(words[cut:])}/{run_key}"
        manifest = re.compile(rf"{re.escape(folder)}/a(\d+)/{re.escape(MANIFEST)}")
        for item in store.list(f"{folder}/"):
            if match := manifest.fullmatch(item.key):
                found[int(match[1])] = item.key.removesuffix(f"/{MANIFEST}")
    return tuple(found[number] for number in sorted(found))


def last_attempt_prefix(store: ObjectStore, run_key: str) -> str:
    """The prefix of the attempt that counts.

    Raises:
        InvalidInput: No attempt of that run has been committed: the run key or the store is wrong.
    """
    attempts = committed_attempts(store, run_key)
    if not attempts:
        subject = f"{run_key} in {store.url}"
        raise InvalidInput("no stored run with this run key", subject=subject, advice="Check the run key and the store")
    return attempts[-1]
