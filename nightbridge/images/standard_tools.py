"""Import without enroot: skopeo fetches, umoci unpacks, mksquashfs packs. All three are Debian packages.

The result is what enroot makes of the same image: all files owned by root, nothing below /dev, readable to its owner,
the same compression, and the files of `rootfs.py` that say how it is started. Layers are kept: what one image has
fetched, another with the same layers does not fetch again.
"""

import base64
import json
import logging
import os
import re
import shlex
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from pydantic import SecretStr, ValidationError

from nightbridge.errors import InvalidInput, NightbridgeError, PermanentError, TransientError
from nightbridge.images.layers import drop_damaged, keep_used, layout_over
from nightbridge.images.logins import DOCKER_HUB, find_login
from nightbridge.images.meanings import LOGIN, Meaning, error_meant
from nightbridge.images.references import ImageReference
from nightbridge.images.registry import http_is_allowed, registry_digest
from nightbridge.images.rootfs import ImageConfig, open_to_owner, write_start_files
from nightbridge.images.space import check_folders, known_size
from nightbridge.images.work import layers_folder, remove_tree, temporary_folder, work_folder
from nightbridge.models import ImageImport, Model
from nightbridge.netrc_lines import Login, file_in_memory
from nightbridge.processes import Finished, Progress, Stalled, run

log = logging.getLogger(__name__)

PROGRAMS = ("skopeo", "umoci", "mksquashfs")

_STEP_TIMEOUT_SECONDS = 2 * 3600.0
_VERSION_TIMEOUT_SECONDS = 60.0
_DEFAULT_RETRIES = "3"
STALL_SECONDS = 180.0
# enroot's own default.
_DEFAULT_SQUASH_OPTIONS = "-comp lzo -noD -exit-on-error"
_POLICIES = (Path("/etc/containers/policy.json"), Path("~/.config/containers/policy.json"))


class StandardTools(Model):
    """The three programs that are installed here, by their paths, and their versions."""

    skopeo: Path
    umoci: Path
    mksquashfs: Path
    versions: tuple[str, ...]
    settings: ImageImport = ImageImport()
    credentials: SecretStr = SecretStr("")
    patience: float = STALL_SECONDS

    @property
    def tool(self) -> str:
        """What makes an image, for its sidecar."""
        return ", ".join(f"{name} {version}" for name, version in zip(PROGRAMS, self.versions, strict=True))

    @property
    def work_folders(self) -> tuple[Path, ...]:
        """Where an import works that must be cleared after a killed one."""
        return (temporary_folder(self.settings.temp), self._layers)

    @property
    def _layers(self) -> Path:
        return layers_folder(self.settings.cache)

    def digest(self, reference: ImageReference) -> str:
        """The digest that a reference means now; see `registry_digest`."""
        return registry_digest(reference, self.credentials.get_secret_value())

    def import_image(self, reference: ImageReference, output: Path) -> str:
        """Import an image into a file that does not exist yet; return what made it, for its sidecar.

        What a failed import left is removed, but for the layers that are whole.

        Raises:
            InvalidInput: There is no such image.
            PermanentError: The registry refuses us, a disk is or would be full, or the image cannot be unpacked.
            TransientError: The registry cannot be reached, is busy or got stuck, a layer arrived damaged, or a tool was
                killed.

        """
        temp = temporary_folder(self.settings.temp)
        size = known_size(reference, self.credentials.get_secret_value())
        check_folders(self._layers, temp, output.parent, size=size, reference=reference)
        try:
            # skopeo moves what it has fetched from the layout to the layers, which must be on one file system.
            with work_folder(output, temp) as folder, work_folder(output, self._layers) as layout:
                rootfs = folder / "rootfs"
                self._fetch_and_unpack(reference, layout_over(layout, self._layers), rootfs)
                open_to_owner(rootfs)
                write_start_files(rootfs, _read_config(layout, reference))
                self._pack(reference, rootfs, output)
                keep_used(layout, self._layers)
        except BaseException:
            output.unlink(missing_ok=True)
            raise
        return self.tool

    def _fetch_and_unpack(self, reference: ImageReference, layout: Path, rootfs: Path) -> None:
        self._fetch(reference, layout)
        try:
            self._unpack(reference, layout, rootfs)
        except NightbridgeError:
            # umoci checks each layer against its digest; one of long ago may have been spoilt on the disk since.
            if not drop_damaged(layout):
                raise
            log.warning("%s: layers in %s were damaged, and are fetched again", reference, self._layers)
            remove_tree(rootfs)
            self._fetch(reference, layout)
            self._unpack(reference, layout, rootfs)

    def _fetch(self, reference: ImageReference, layout: Path) -> None:
        """Fetch what is missing. A transfer that got stuck is killed and goes on with the layers that it had."""
        for _ in range(int(_retries())):
            try:
                return self._fetch_once(reference, layout)
            except Stalled as error:
                log.warning("%s: %s", reference, error)
        return self._fetch_once(reference, layout)

    def _fetch_once(self, reference: ImageReference, layout: Path) -> None:
        registry = reference.registry or DOCKER_HUB
        # Content is known by its digest; a site's own signature policy is kept where there is one.
        policy = [] if any(path.expanduser().exists() for path in _POLICIES) else ["--insecure-policy"]
        options = ["--quiet", f"--retry-times={_retries()}", *(["--src-tls-verify=false"] if http_is_allowed() else [])]
        version = f"@{reference.digest}" if reference.digest else f":{reference.tag or 'latest'}"
        source = f"docker://{reference.registry or 'docker.io'}/{reference.name}{version}"
        limit = float(os.environ.get("ENROOT_TRANSFER_TIMEOUT") or 0) or _STEP_TIMEOUT_SECONDS
        login = find_login(registry, credentials=self.credentials.get_secret_value())
        with _login_option(login, reference) as option:
            _step(
                [self.skopeo, *policy, "--override-os=linux", "copy", *options, *option, source, f"oci:{layout}:image"],
                reference,
                timeout=limit,
                progress=Progress(lambda: _bytes_below(layout), self.patience),
            )

    def _unpack(self, reference: ImageReference, layout: Path, rootfs: Path) -> None:
        rootless = [] if os.geteuid() == 0 else ["--rootless"]
        # Raw: a bundle's list of every file with its checksum would take longer than the unpacking itself.
        _step([self.umoci, "raw", "unpack", *rootless, "--image", f"{layout}:image", rootfs], reference)

    def _pack(self, reference: ImageReference, rootfs: Path, output: Path) -> None:
        options = shlex.split(os.environ.get("ENROOT_SQUASH_OPTIONS", _DEFAULT_SQUASH_OPTIONS))
        # Without root, umoci notes the true owners in attributes of its own, which are of no use in the image.
        attributes = [] if os.geteuid() == 0 else ["-no-xattrs"]
        argv: list[str | Path] = [self.mksquashfs, rootfs, output, "-noappend", "-all-root", "-no-progress"]
        _step([*argv, *attributes, *options, "-wildcards", "-e", "dev/*"], reference)


def _retries() -> str:
    return os.environ.get("ENROOT_TRANSFER_RETRIES", _DEFAULT_RETRIES)


def _bytes_below(layout: Path) -> int:
    """What a fetch has written so far; a file may be moved or removed at any moment."""
    total = 0
    for folder in (layout, layout / "blobs" / "sha256"):
        with suppress(OSError), os.scandir(folder) as entries:
            for entry in entries:
                with suppress(OSError):
                    total += entry.stat().st_size
    return total


def find_standard_tools(settings: ImageImport | None = None, credentials: str = "") -> StandardTools | None:
    """Find the three programs on PATH; None unless all are there.

    Args:
        settings: Folders of imports.
        credentials: Logins as lines of netrc(5), which come before those in files.

    Raises:
        PermanentError: One of them does not tell its version.

    """
    programs = [shutil.which(name) for name in PROGRAMS]
    if None in programs:
        return None
    skopeo, umoci, mksquashfs = (Path(str(program)) for program in programs)
    versions = (_version(skopeo, "--version"), _version(umoci, "--version"), _version(mksquashfs, "-version"))
    return StandardTools(
        skopeo=skopeo,
        umoci=umoci,
        mksquashfs=mksquashfs,
        versions=versions,
        settings=settings or ImageImport(),
        credentials=SecretStr(credentials),
    )


def _version(program: Path, option: str) -> str:
    finished = run([program, option], environment=os.environ, timeout=_VERSION_TIMEOUT_SECONDS)
    found = re.search(rb"version (\d[\w.+~-]*)", finished.stdout)
    if not found:
        raise PermanentError(f"{program.name} does not tell its version: {finished.tail}", thing=str(program))
    return found[1].decode()


# Read from the top. Statuses as skopeo (containers/image) words them; all three tools are written in Go or C and name
# errors of the system in its own words.
_MEANINGS = (
    Meaning(
        pattern=r"(?i)no space left on device|disk quota exceeded|failed to write to output filesystem",
        kind=PermanentError,
        what="a disk is full",
        advice="Free some space for images, or set the Image Cache's cache and temp (ENROOT_CACHE_PATH, "
        "ENROOT_TEMP_PATH) to larger disks",
    ),
    Meaning(
        pattern=r"no image found in (manifest list|image index)|does not match the runtime",
        kind=InvalidInput,
        what="there is no such image for this kind of machine",
        advice="Check that the image is built for this architecture",
    ),
    Meaning(
        pattern=r"(?i)toomanyrequests|too many requests|unexpected http status( code)?:? (408|429|5\d\d)"
        r"|status(code| code|):? (408|429|5\d\d)|\b(408|429|5\d\d) \(",
        kind=TransientError,
        what="the registry is busy or out of order",
    ),
    Meaning(
        pattern=r"(?i)unauthorized|authentication required|denied|invalid username/password|status(code)?:? 40[13]"
        r"|\b40[13] \(",
        kind=PermanentError,
        what="the registry refused our credentials",
        advice=LOGIN,
    ),
    Meaning(
        pattern=r"(?i)manifest unknown|name unknown|blob unknown|not found|status(code)?:? 404|\b404 \(",
        kind=InvalidInput,
        what="the registry has no such image",
        advice="Check name and tag; a private image may say the same to those who are not logged in",
    ),
    Meaning(
        pattern=r"(?i)x509|certificate",
        kind=PermanentError,
        what="the registry's certificate is not trusted here",
        advice="Install the site's certificate authority",
    ),
    Meaning(
        pattern=r"(?i)digest did not match|does not match|mismatch|gzip: |flate: |corrupt|invalid header|checksum",
        kind=TransientError,
        what="a layer arrived damaged",
    ),
    Meaning(
        pattern=r"connection (refused|reset)|no such host|network is unreachable|no route to host|timeout|timed out"
        r"|\bEOF\b|broken pipe|server misbehaving|deadline exceeded",
        kind=TransientError,
        what="the registry could not be reached, or the transfer broke off",
    ),
)


def _step(
    argv: list[str | Path],
    reference: ImageReference,
    *,
    timeout: float = _STEP_TIMEOUT_SECONDS,
    progress: Progress | None = None,
) -> None:
    finished = run(argv, environment=os.environ, timeout=timeout, progress=progress)
    if finished.code:
        raise explained(finished, Path(argv[0]).name, reference)


def explained(finished: Finished, program: str, reference: ImageReference) -> NightbridgeError:
    """The error that a failed step stands for."""
    if error := error_meant(_MEANINGS, finished.stderr, f"{program}: {finished.tail}", reference):
        return error
    thing = str(reference)
    if finished.code < 0:
        return TransientError(
            f"{program} was killed by signal {-finished.code}", thing=thing, advice="Was the memory too small?"
        )
    return PermanentError(
        f"{program} failed with code {finished.code}: {finished.tail or 'it said nothing'}", thing=thing
    )


@contextmanager
def _login_option(login: Login | None, reference: ImageReference) -> Iterator[list[str]]:
    """The option that gives skopeo our login; none without one, so that skopeo looks in its own places."""
    if login is None:
        yield []
        return
    packed = base64.b64encode(":".join(login).encode()).decode()
    with file_in_memory(json.dumps({"auths": {reference.registry or "docker.io": {"auth": packed}}})) as path:
        yield [f"--src-authfile={path}"]


def _read_config(layout: Path, reference: ImageReference) -> ImageConfig:
    """The configuration of the one image of an OCI layout; its blobs were checked when they were fetched."""

    def blob(descriptor: Mapping[str, str]) -> dict[str, object]:
        content = json.loads((layout / "blobs" / descriptor["digest"].replace(":", "/")).read_bytes())
        assert isinstance(content, dict)
        return content

    try:
        index = json.loads((layout / "index.json").read_bytes())
        config = blob(blob(index["manifests"][0])["config"])  # type: ignore[arg-type]
        return ImageConfig.model_validate(config.get("config") or {})
    except (KeyError, IndexError, ValueError, ValidationError, AssertionError) as error:
        raise PermanentError("this image has no configuration that we can read", thing=str(reference)) from error
