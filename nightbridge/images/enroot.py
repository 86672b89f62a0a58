"""enroot: imports images from registries, and the scratch folders in which it works.

Its exit codes and messages stand here with what they mean for us. Scratch folders are named so that those of a killed
import are found and removed; the unfinished image has one of its own too. The programs of a killed import run for a
while longer, here or on another machine; once their folders are gone they fail, instead of leaving an orphaned image.
"""

import hashlib
import logging
import os
import re
import shutil
import tempfile
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from pydantic import SecretStr

from nightbridge.errors import (
    DamagedData,
    ErrorPattern,
    InvalidInput,
    NightbridgeError,
    PermanentError,
    TransientError,
    classify,
)
from nightbridge.files import check_writable, remove_tree, write_error
from nightbridge.images.registry import (
    ANSWERS,
    ImageReference,
    enroot_config,
    enroot_settings,
    login_advice,
    registry_digest,
)
from nightbridge.models import ImageImport, Model
from nightbridge.processes import Finished, run

log = logging.getLogger(__name__)

IMPORT_TIMEOUT_SECONDS = 4 * 3600.0
DIGEST_TIMEOUT_SECONDS = 600.0

# enroot's own defaults never time out and never retry (docker.sh). Per transfer, so leave time for a large layer.
DEFAULTS: Mapping[str, str] = {
    "ENROOT_TRANSFER_TIMEOUT": "1800",
    "ENROOT_TRANSFER_RETRIES": "3",
    "ENROOT_CONNECT_TIMEOUT": "30",
}
"""Settings of enroot where the site has none."""


class Enroot(Model):
    """The enroot that is installed here: imports images."""

    program: Path
    version: str
    settings: ImageImport = ImageImport()
    credentials: SecretStr = SecretStr("")

    @property
    def major(self) -> int:
        """The first number of the version."""
        return int(self.version.split(".")[0])

    @property
    def tool(self) -> str:
        """What made an image, for its sidecar."""
        return f"enroot {self.version}"

    def digest(self, reference: ImageReference) -> str:
        """The digest that a reference means now; see `registry_digest`."""
        if self.major < 4:  # the first with `enroot digest` and `@sha256:`
            return registry_digest(reference, self.credentials.get_secret_value())
        with enroot_config(self.credentials.get_secret_value()) as config:
            finished = run(
                [self.program, "digest", *_arch_option(reference), reference.uri(self.major)],
                environment={**self._environment(), **config},
                timeout=DIGEST_TIMEOUT_SECONDS,
            )
        found = re.search(r"(?:sha256:)?([0-9a-f]{64})", finished.stdout.decode(errors="replace"))
        if finished.code or not found:
            raise classify_failure(finished, reference)
        return f"sha256:{found[1]}"

    @property
    def scratch_parents(self) -> tuple[Path, ...]:
        """Where an import works that must be cleared after a killed one."""
        return (temporary_folder(self.settings.temp),)

    def import_image(self, reference: ImageReference, output: Path) -> str:
        """Import an image into a file that does not exist yet; return what made it, for its sidecar.

        The file of a failed import is removed.

        Raises:
            InvalidInput: There is no such image, or none for the wanted processor.
            PermanentError: The registry refuses us, a disk is full, or enroot lacks a tool.
            TransientError: The registry is unreachable or busy, a layer was corrupted, or enroot was killed.
        """
        temp = temporary_folder(self.settings.temp)
        # Where it is not configured, enroot's own default.
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        cache = self.settings.cache or Path(enroot_settings().get("ENROOT_CACHE_PATH") or home / "enroot")
        for folder, what in ((cache, "the cache of images"), (temp, "the folder in which images are unpacked")):
            check_writable(folder, what=what, advice=OTHER_FOLDERS)
        try:
            # A killed enroot leaves its folder behind; in one of ours it is found again.
            with scratch_dir(output, temp) as folder, enroot_config(self.credentials.get_secret_value()) as config:
                finished = run(
                    [self.program, "import", *_arch_option(reference), "--output", output, reference.uri(self.major)],
                    environment={**self._environment(), **config, "ENROOT_TEMP_PATH": str(folder)},
                    timeout=IMPORT_TIMEOUT_SECONDS,
                    on_line=lambda line: log.info("enroot: %s", line) if line.startswith("[INFO]") else None,
                )
            if finished.code:
                raise classify_failure(finished, reference)
            _check_arch(finished, reference)
        except BaseException:
            output.unlink(missing_ok=True)
            raise
        return self.tool

    def _environment(self) -> Mapping[str, str]:
        cache = {"ENROOT_CACHE_PATH": str(self.settings.cache)} if self.settings.cache else {}
        known = enroot_settings()
        defaults = {name: value for name, value in DEFAULTS.items() if known.get(name, "0") == "0"}
        return {**defaults, **os.environ, **cache}


def _arch_option(reference: ImageReference) -> Sequence[str]:
    return ("--arch", reference.arch) if reference.arch else ()


def _check_arch(finished: Finished, reference: ImageReference) -> None:
    """Raise if enroot only warned that the image is for another processor than the one that was wanted."""
    other = re.search(r"architecture doesn't match the requested one: (\S+) != (\S+)", finished.stderr)
    if other and reference.arch:
        raise InvalidInput(
            f"the image is for {other[1]}, and the nodes of this GPU type are {other[2]}",
            subject=str(reference),
            advice="Name an image that is built for both, or the one for these nodes",
        )


def find_enroot(settings: ImageImport | None = None, credentials: str = "") -> Enroot:
    """Find enroot on PATH.

    `credentials` are logins as lines of netrc(5), which come in the place of those in its own file.

    Raises:
        PermanentError: There is none, or its version cannot be read.
    """
    program = shutil.which("enroot")
    if program is None:
        raise PermanentError(
            "enroot is not installed here",
            subject="enroot",
            advice='Install it, import where it is installed (on = "host" or "node" in [image_import], or import_on of '
            'the Image Cache), or set container_image to the path of a .sqsh file or to "none"',
        )
    finished = run([program, "version"], environment=os.environ, timeout=DIGEST_TIMEOUT_SECONDS)
    version = finished.stdout.decode(errors="replace").strip()
    if finished.code or not re.match(r"\d+\.", version):
        raise PermanentError(f"cannot read enroot's version: {finished.tail or version}", subject=program)
    return Enroot(program=Path(program), version=version, settings=settings or ImageImport(), credentials=credentials)


# Read from the top. A status of the registry is more precise than curl's exit code; a full disk shows itself
# as a failed write of curl or zstd.
_ERRORS = (
    ErrorPattern(
        r"Invalid image reference|curl: \(3\)",
        InvalidInput, "enroot cannot read this reference", "Write REGISTRY/IMAGE:TAG",
    ),
    ErrorPattern(
        r"No space left on device|Disk quota exceeded|Failed to write to output filesystem"
        r"|zstd: error 70|curl: \(23\)",
        PermanentError, "no space left on a disk",
        "Free up space for images, or set the Image Cache's cache and temp (ENROOT_CACHE_PATH, "
        "ENROOT_TEMP_PATH) to larger disks",
    ),
    *ANSWERS,
    ErrorPattern(
        r"returned error(?: code)?: 400", PermanentError, "enroot does not support this image's manifest format",
        "Push the image again in Docker's format with `skopeo copy --format v2s2`",
    ),
    ErrorPattern(
        r"corrupted|Checksum mismatch|invalid compressed data|unexpected end of file",
        TransientError, "a layer was corrupted in transit",
    ),
    ErrorPattern(
        r"curl: \((5|6|7|16|18|22|28|35|52|55|56|92)\)",
        TransientError, "the registry is unreachable, or the transfer was interrupted",
    ),
    ErrorPattern(
        r"[Cc]ommand not found|[Cc]ould not find (a )?(command|program)",
        PermanentError, "enroot is missing a required program", "Install the named program on this machine",
    ),
    ErrorPattern(
        r"File already exists|will not overwrite", TransientError, "another import wrote the same file",
    ),
)  # fmt: skip

# curl's exit codes that enroot passes on: no connection, cut off, HTTP error, timed out.
_TRANSIENT_CODES = {7, 18, 22, 28}
# A shell's exit codes for a child that was killed.
_KILLED_CODES = {137, 143}


def classify_failure(finished: Finished, reference: ImageReference) -> NightbridgeError:
    """Map a failed enroot command to an error."""
    subject = str(reference)
    if known := classify(finished.stderr, _ERRORS):
        return known.error(subject, finished.tail, login=login_advice(reference))
    if finished.code in _TRANSIENT_CODES:
        return TransientError(
            f"the transfer failed with curl's code {finished.code} ({finished.tail})", subject=subject
        )
    if finished.code < 0 or finished.code in _KILLED_CODES:
        return TransientError(f"enroot was killed (code {finished.code}), possibly out of memory", subject=subject)
    if finished.code == 0:
        return DamagedData("enroot returned no digest", subject=subject)
    return PermanentError(f"enroot failed with code {finished.code}: {finished.tail or 'no output'}", subject=subject)


# --- scratch folders --------------------------------------------------------------------------------------------------

OTHER_FOLDERS = "Check it, or set the Image Cache's cache and temp (ENROOT_CACHE_PATH, ENROOT_TEMP_PATH) to other disks"
"""The advice for a folder of imports that cannot be written."""

_SUFFIX = ".sqsh.tmp"


@contextmanager
def unfinished(images: Path, name: str) -> Iterator[Path]:
    """The path, in a fresh folder beside the images, at which the image `name` is made; removed at the end."""
    folder = images / f".{name}.{uuid.uuid4().hex}{_SUFFIX}"
    folder.mkdir(parents=True)
    try:
        yield folder / "image.sqsh"
    finally:
        remove_tree(folder)


@contextmanager
def scratch_dir(output: Path, base: Path) -> Iterator[Path]:
    """A fresh folder in `base` for the import of the file `output` (see `unfinished`), removed at the end."""
    folder = base / scratch_name(output)
    folder.mkdir(parents=True, mode=0o700)
    try:
        yield folder
    finally:
        remove_tree(folder)


def temporary_folder(configured: Path | None) -> Path:
    """Where images are unpacked: the configured folder, enroot's own, else the system's temporary folder.

    Unpacking needs a local file system.
    """
    if configured:
        return configured
    # Where it has none, enroot says TMPDIR, even one that this machine lacks.
    found = enroot_settings().get("ENROOT_TEMP_PATH")
    return Path(tempfile.gettempdir() if found in (None, "", os.environ.get("TMPDIR")) else found)


@contextmanager
def named_write_errors(reference: ImageReference, folder: Path) -> Iterator[None]:
    """Turn an error of the file system during an import into ours, which names the image and the file, else `folder`.

    Raises:
        PermanentError: A file could not be written.
        TransientError: It could not be written now.
    """
    try:
        yield
    except OSError as error:
        what, subject = f"a file of the import of {reference}", str(error.filename or folder)
        raise write_error(error, what=what, subject=subject, advice=OTHER_FOLDERS) from error


def leftover_scratch_dirs(images: Path, bases: Iterable[Path]) -> list[Path]:
    """The folders, beside the images and in `bases`, in which imports work or were killed at work."""
    here = list(images.glob(f".*{_SUFFIX}"))
    return here + [folder for base in bases for folder in base.glob(f"{_prefix(images, '.')}*{_SUFFIX}")]


def remove_leftovers(images: Path, name: str, bases: Iterable[Path]) -> None:
    """Remove what killed imports of an image left beside the images and in `bases`. Only its lease's holder may."""
    for folder in images.glob(f".{name}.*{_SUFFIX}"):
        remove_tree(folder)
    # A sidecar whose writer was killed; a lease's own files may be another process's.
    for leftover in images.glob(f".{name}.json.*.tmp"):
        leftover.unlink(missing_ok=True)
    remove_scratch_dirs(images, name, bases)


def remove_scratch_dirs(images: Path, name: str, bases: Iterable[Path]) -> None:
    """Remove what killed imports of an image left in `bases` alone: on the machine where they worked."""
    for base in bases:
        for leftover in base.glob(f"{_prefix(images, f'.{name}.')}*{_SUFFIX}"):
            remove_tree(leftover)


def scratch_name(output: Path) -> str:
    """The name of the folder in which the import of a file (see `unfinished`) works."""
    return _prefix(output.parent.parent, output.parent.name)


def _prefix(images: Path, name: str) -> str:
    # The system's temporary folder serves other workspaces too, whose imports of the same image are not ours to remove.
    return f"nightbridge-{hashlib.sha256(str(images.absolute()).encode()).hexdigest()[:12]}{name}"
