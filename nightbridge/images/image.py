"""The container stage: a verified image of known digest, or the declared absence of one.

An image is a whole squashfs file with a sidecar that proves it. Several workspaces may share a folder of images; each
knows its own jobs only, so the folder records which workspaces use it.
"""

import hashlib
import logging
import os
import re
import shutil
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from nightbridge.errors import DamagedData, InvalidInput, NightbridgeError, PermanentError, TransientError
from nightbridge.files import read_model, reading, write_model
from nightbridge.images.enroot import (
    IMPORT_TIMEOUT_SECONDS,
    Enroot,
    find_enroot,
    named_write_errors,
    remove_leftovers,
    unfinished,
)
from nightbridge.images.node_import import NodeImporter
from nightbridge.images.registry import ImageReference, parse_reference
from nightbridge.locking import get_or_create, lease
from nightbridge.models import Image, RunSpec, Site, StoredModel, utc_now
from nightbridge.processes import run

log = logging.getLogger(__name__)

NO_CONTAINER = "none"

_ARCH: Mapping[str, str] = dict.fromkeys(("gb200", "gb300", "vr200"), "aarch64")
"""The nodes' processor, where a GPU type is only built with that one; login nodes often have another."""


class ImageRecord(StoredModel):
    """The sidecar of an image file: what it is, and that exactly this file was verified. Written last."""

    reference: str
    digest: str
    sha256: str
    size: int
    mtime_ns: int
    tool: str
    verified_at: datetime


class ImagePin(StoredModel):
    """The digest that a reference resolved to when the night first needed it."""

    reference: str
    digest: str
    resolved_at: datetime


Importer = Enroot | NodeImporter
"""Makes a .sqsh file of an image in a registry."""


def pull_image(spec: RunSpec, site: Site, importer: Callable[[], Importer] | None = None) -> Image:
    """Return the image that a run names with `container_image`.

    `none` is the declared absence of a container. The path of a .sqsh file is checked and used where it lies. A
    reference is resolved to a digest once per night and imported once per digest, to `<images>/<digest>.sqsh`. For GPU
    types whose nodes are known to be aarch64 that image of several is taken, to `<images>/<digest>-aarch64.sqsh`.

    `importer` finds what imports, once there is something to import: this machine's enroot when unset.

    Raises:
        InvalidInput: No image is named, or there is no such file or image.
        DamagedData: The file is no whole squashfs image.
        PermanentError: enroot is not installed, the registry refuses us, or a disk is full.
        TransientError: The registry is unreachable, or another import of this image took too long.
    """
    written = _written(spec)
    if not written:
        raise InvalidInput(
            "no container_image", subject=spec.test.id, advice='Name an image, a .sqsh file, or "none" in [cmd_args]'
        )
    if written == NO_CONTAINER:
        return Image(kind="none")
    images = site.images_dir.absolute()
    if is_path(written):
        return _local_image(written, site.workspace)
    find = importer or (lambda: find_enroot(site.image_import))
    reference = _reference(spec)
    if reference.digest is None:
        pin = get_or_create(
            site.workspace.absolute() / "nights" / spec.night / "images" / f"{reference.identity}.json",
            ImagePin,
            lambda: ImagePin(reference=str(reference), digest=find().digest(reference), resolved_at=utc_now()),
        )
        reference = reference.model_copy(update={"digest": pin.digest})
    return _registry_image(reference, images, site.workspace, find)


def _written(spec: RunSpec) -> str:
    return str(spec.test.cmd_args.get("container_image") or "").strip()


def _reference(spec: RunSpec) -> ImageReference:
    arch = _ARCH.get(str(spec.test.cmd_args.get("gpu_type")).lower())
    return parse_reference(_written(spec)).model_copy(update={"arch": arch})


def current_image(spec: RunSpec, importer: Callable[[], Importer]) -> str:
    """What the image that a run names means at this moment: a digest, or the size and time of a file.

    Raises:
        InvalidInput: There is no such file or image.
        PermanentError: The registry refuses us.
        TransientError: The registry is unreachable.
    """
    written = _written(spec)
    if written == NO_CONTAINER:
        return written
    if is_path(written):
        status = image_file(written).stat()
        return f"{status.st_size} {status.st_mtime_ns}"
    reference = _reference(spec)
    return reference.digest or importer().digest(reference)


def is_path(text: str) -> bool:
    """Whether an image is named by its path: pyxis' rule, and a relative path to a file that is there."""
    return text.startswith(("/", ".", "~")) or text.endswith(".sqsh") or os.path.isfile(text)


def image_file(written: Path | str) -> Path:
    """The file of an image that is named by its path.

    Raises:
        InvalidInput: It is not there.
    """
    path = Path(os.path.expanduser(written)).absolute()
    if not os.path.isfile(path):
        raise InvalidInput("no such image file", subject=str(path), advice="Check container_image")
    return path


def recorded_image(spec: RunSpec, site: Site) -> Image | None:
    """What the file was that a run names with `container_image`, whether or not it is there now; None if not known."""
    written = _written(spec)
    path = Path(os.path.expanduser(written)).absolute()
    sidecar = _sidecar(path, site.workspace)
    record = read_model(sidecar, ImageRecord, what="not the record of an image", advice="Remove it")
    return _image(written, path, record) if record else None


def _sidecar(path: Path, workspace: Path) -> Path:
    """Where the record of an image file is that somebody else made."""
    return workspace.absolute() / "images" / "local" / f"{hashlib.sha256(str(path).encode()).hexdigest()[:16]}.json"


def _local_image(written: str, workspace: Path) -> Image:
    path = image_file(written)
    sidecar = _sidecar(path, workspace)
    with lease(sidecar.with_suffix(".lease")):
        record = _valid_record(sidecar, path)
        if record is None:
            with reading(path):
                check_squashfs(path)
                record = _record(path, reference=written, digest=None, tool="")
            write_model(sidecar, record)
    return _image(written, path, record)


def _registry_image(reference: ImageReference, images: Path, workspace: Path, find: Callable[[], Importer]) -> Image:
    name = reference.file_name
    path = images / f"{name}.sqsh"
    sidecar = path.with_suffix(".json")
    with lease(images / f".{name}.lease", timeout=IMPORT_TIMEOUT_SECONDS) as held:
        with named_write_errors(reference, images):
            add_workspace_ref(images, workspace)
        record = _valid_record(sidecar, path)
        if record is None:
            importer = find()
            remove_leftovers(images, name, importer.scratch_parents)
            log.info("importing %s with %s", reference, importer.tool)
            started = time.monotonic()
            with named_write_errors(reference, images), unfinished(images, name) as made:
                tool = importer.import_image(reference, made)
                _check_import(made, tool, reference)
                record = _record(made, reference=str(reference), digest=reference.digest, tool=tool)
                held.ensure_held()
                sidecar.unlink(missing_ok=True)
                made.replace(path)
                write_model(sidecar, record)
            log.info("imported %s: %d MB in %.0f s", reference, record.size >> 20, time.monotonic() - started)
        with suppress(PermissionError):  # another user's, in a folder that both share
            os.utime(sidecar)  # it is wanted now: what `prune` goes by
    return _image(str(reference), path, record)


def _check_import(path: Path, tool: str, reference: ImageReference) -> None:
    try:
        check_squashfs(path)
    except (DamagedData, FileNotFoundError) as error:
        # The tool reported success, so this may be a fault that another import does not meet.
        raise TransientError(f"{tool} produced an incomplete image: {error}", subject=str(reference)) from error


def _record(path: Path, *, reference: str, digest: str | None, tool: str) -> ImageRecord:
    status = path.stat()
    checksum = sha256_of(path)
    return ImageRecord(
        reference=reference,
        digest=digest or f"sha256:{checksum}",
        sha256=checksum,
        size=status.st_size,
        mtime_ns=status.st_mtime_ns,
        tool=tool,
        verified_at=utc_now(),
    )


def _valid_record(sidecar: Path, path: Path) -> ImageRecord | None:
    """The record of an image file that is still the one it was made of; else None.

    A file of the same size and time is taken for the same; of another time, as after a copy, it is read again, once.

    Raises:
        PermanentError: It is another user's, who does not let us read it.
    """
    try:
        record = ImageRecord.model_validate_json(sidecar.read_bytes())
        status = path.stat()
    except (FileNotFoundError, ValueError):
        return None
    except PermissionError as error:
        raise PermanentError(
            "this image was imported by another user and cannot be read",
            subject=str(path),
            advice=f"Let the owner open {sidecar.name} and it (chmod g+r), or set images in the site file to a folder "
            "of your own",
        ) from error
    if status.st_size != record.size:
        return None
    if status.st_mtime_ns != record.mtime_ns:
        if sha256_of(path) != record.sha256:
            return None
        record = record.model_copy(update={"mtime_ns": status.st_mtime_ns})
        with suppress(OSError, NightbridgeError):  # another user's: it is read again by each run
            write_model(sidecar, record)
    return record


def _image(reference: str, path: Path, record: ImageRecord) -> Image:
    known = record.model_dump(include={"digest", "sha256", "size"})
    return Image(kind="sqsh", reference=reference, path=path, **known)


MAGIC = b"hsqs"
# The superblock of squashfs 4 is 96 bytes; the file system's length is a 64-bit number at offset 40 (kernel
# documentation, filesystems/squashfs). mksquashfs writes the superblock last, so a killed one leaves none.
_SUPERBLOCK_BYTES = 96
_LENGTH_OFFSET = 40
_UNSQUASHFS_TIMEOUT_SECONDS = 120.0


def check_squashfs(path: Path) -> None:
    """Raise unless a file is a whole squashfs file system.

    Raises:
        DamagedData: It is empty, no squashfs, shorter than its own superblock claims, or unsquashfs refuses it.
    """
    with path.open("rb") as stream:
        superblock = stream.read(_SUPERBLOCK_BYTES)
    size = path.stat().st_size
    if not size:
        raise DamagedData("the image is empty", subject=str(path))
    if len(superblock) < _SUPERBLOCK_BYTES or not superblock.startswith(MAGIC):
        raise DamagedData("not a complete squashfs image", subject=str(path))
    (length,) = struct.unpack_from("<Q", superblock, _LENGTH_OFFSET)
    if size < length:
        raise DamagedData(f"the image is truncated: {size} of {length} bytes", subject=str(path))
    program = shutil.which("unsquashfs")
    if program:
        finished = run([program, "-s", path], environment=os.environ, timeout=_UNSQUASHFS_TIMEOUT_SECONDS)
        if finished.code:
            raise DamagedData(f"unsquashfs cannot read the image: {finished.tail}", subject=str(path))


def sha256_of(path: Path) -> str:
    """The hex SHA-256 of a file."""
    with path.open("rb", buffering=0) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


# Beside the images, where every user of the folder can write.
_PREFIX = ".workspace-"


class WorkspaceRef(StoredModel):
    """A workspace whose runs use images in a folder outside it."""

    workspace: Path


def add_workspace_ref(images: Path, workspace: Path) -> None:
    """Record in a folder of images that a workspace uses it; the workspace's own folder needs no record."""
    ref = WorkspaceRef(workspace=workspace.absolute())
    path = images / f"{_PREFIX}{hashlib.sha256(str(ref.workspace).encode()).hexdigest()[:16]}.json"
    if not images.is_relative_to(ref.workspace) and not path.exists():
        write_model(path, ref)


def workspace_refs(images: Path) -> set[Path]:
    """The workspaces that use a folder of images besides the one that it lies in.

    Raises:
        PermanentError: A record cannot be read, so the jobs that use these images are unknown.
    """
    try:
        records = images.glob(f"{_PREFIX}*.json")
        return {WorkspaceRef.model_validate_json(path.read_bytes()).workspace for path in records}
    except (OSError, ValueError) as error:
        raise PermanentError(
            f"cannot read which workspaces use these images: {error}",
            subject=str(images),
            advice=f"Remove the unreadable {_PREFIX}*.json there; the workspace's next pull writes it again",
        ) from error


# --- the images between two -------------------------------------------------------------------------------------------

_COMMIT = re.compile(r"(?<![0-9a-z])(?=[0-9a-f]*[a-f])(?=[0-9a-f]*\d)[0-9a-f]{7,40}(?![0-9a-z])")


def versions_between(good: str, bad: str, list_tags: Callable[[ImageReference], Sequence[str]]) -> tuple[str, ...]:
    """The images after a good one, up to and with a bad one, oldest first; just the bad one where there is no list.

    Of a registry by their tags, of files by their names or else by their dates. Versions are of one kind where their
    names differ in numbers alone, as `nemo-26.04.sqsh` and `nemo-26.06.sqsh`, or `nightly-2026-11-20-4f1c2ab` and
    `nightly-2026-11-23-90ab12c`: what looks like a commit counts for nothing.

    Both are written as in `container_image`: a reference, or the path of a .sqsh file.

    Raises what `list_tags` raises.
    """
    files = [is_path(one) for one in (good, bad)]
    if all(files):
        return _files_between(Path(good), Path(bad))
    if any(files) or NO_CONTAINER in (good, bad):
        return (bad,)
    ends = [parse_reference(one) for one in (good, bad)]
    before, after = ends
    if (before.registry, before.name) != (after.registry, after.name) or not (before.tag and after.tag):
        return (bad,)
    between = _between(before.tag, after.tag, list_tags(after) if _kind(before.tag) == _kind(after.tag) else ())
    bare = after.model_copy(update={"digest": None})
    return (*(str(bare.model_copy(update={"tag": tag})) for tag in between), bad)


def _files_between(good: Path, bad: Path) -> tuple[str, ...]:
    if good.parent != bad.parent:
        return (str(bad),)
    names = [path.name for path in bad.parent.glob("*.sqsh")]
    if _kind(good.name) == _kind(bad.name):
        between = _between(good.name, bad.name, names)
    else:
        if not (good.exists() and bad.exists()):
            return (str(bad),)
        made = {name: (bad.parent / name).stat().st_mtime_ns for name in {*names, good.name, bad.name}}
        first, last = made[good.name], made[bad.name]
        between = sorted((name for name in names if first < made[name] < last), key=made.__getitem__)
    return (*(str(bad.parent / name) for name in between), str(bad))


def _between(good: str, bad: str, names: Sequence[str]) -> list[str]:
    """Names of the ends' own kind that lie between both by their numbers, in their order."""
    first, last = _numbers(good), _numbers(bad)
    own = {name for name in names if _kind(name) == _kind(bad) and first < _numbers(name) < last}
    return sorted(own, key=_numbers)


def _kind(name: str) -> str:
    return re.sub(r"\d+", "#", _COMMIT.sub("*", name))


def _numbers(name: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", _COMMIT.sub("*", name))]
