"""A stored run, checked and downloaded: what `nightbridge verify` and `nightbridge fetch` do."""

from collections.abc import Callable
from pathlib import Path

from nightbridge.errors import DamagedData, PermanentError
from nightbridge.files import write_model
from nightbridge.harvest.manifest import MANIFEST, Manifest, read_manifest
from nightbridge.models import StoredFile
from nightbridge.store.checksum import sha256_of_file
from nightbridge.store.protocol import ObjectInfo, ObjectStore, checked_key
from nightbridge.store.transfers import Meter, Progress, in_parallel


def missing_objects(store: ObjectStore, manifest: Manifest) -> list[str]:
    """What one listing shows to be wrong: objects that are missing or have another size or ETag. One line each."""
    found = {each.key: each for each in store.list(manifest.prefix)}
    problems = (_wrong(file, found.get(f"{manifest.prefix}/{file.path}")) for file in manifest.files)
    return [problem for problem in problems if problem]


def verify_run(store: ObjectStore, prefix: str, on_progress: Callable[[Progress], None] | None = None) -> list[str]:
    """Check a run against its manifest; returns one line per problem, none when every object is there and intact.

    Checks presence, size and checksum. A directory's checksums are computed from its bytes; those of S3 are the ones
    recorded with the objects, or the ETags of those sent in parts. Their bytes `fetch_run` checks.
    """
    manifest = read_manifest(store, prefix)
    if manifest is None:
        return [f"{MANIFEST}: missing; this run was never committed"]
    wrong_prefix = "" if manifest.prefix == prefix else f"{MANIFEST}: belongs to {manifest.prefix}"
    problems = in_parallel(
        lambda file: _problem(store, prefix, file),
        manifest.files,
        Meter("reading", [file.size for file in manifest.files], on_progress),
    )
    return [problem for problem in (wrong_prefix, *problems) if problem]


def fetch_run(
    store: ObjectStore, prefix: str, destination: Path, on_progress: Callable[[Progress], None] | None = None
) -> Manifest:
    """Restore a whole run below `destination` as it is in the store, every byte verified, the manifest last.

    Files that are there already with the right bytes are kept, so an interrupted fetch resumes.

    Raises:
        PermanentError: The run was never committed, or `destination` cannot be written.
        DamagedData: An object is missing or differs from the manifest.

    """
    manifest = read_manifest(store, prefix)
    if manifest is None:
        advice = "Check the run key; its harvest may still be running"
        raise PermanentError("no committed run under this prefix", thing=store.url_of(prefix), advice=advice)
    in_parallel(
        lambda file: _fetch(store, prefix, file, destination / checked_key(file.path)),
        manifest.files,
        Meter("fetching", [file.size for file in manifest.files], on_progress),
    )
    write_model(destination / MANIFEST, manifest)
    return manifest


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
            return f"{file.path}: {name} {has}, expected {expected}"
    return ""


def _problem(store: ObjectStore, prefix: str, file: StoredFile) -> str:
    found = store.stat(f"{prefix}/{file.path}", file.part_size)
    if found and not (found.sha256 or (found.etag and file.etag)):
        return f"{file.path}: no checksum in the store; use --deep"
    return _wrong(file, found)


def _fetch(store: ObjectStore, prefix: str, file: StoredFile, path: Path) -> None:
    if path.is_file() and sha256_of_file(path, file.part_size) == file.sha256:
        return
    key = f"{prefix}/{file.path}"
    store.get_file(key, path)
    if sha256_of_file(path, file.part_size) != file.sha256:
        path.unlink()
        raise DamagedData(
            "differs from the manifest", thing=store.url_of(key), advice="It was modified or damaged in the store"
        )
