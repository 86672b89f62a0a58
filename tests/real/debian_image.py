"""A container image of Debian packages: Debian's smallest system with Python and NumPy, made once and kept in a folder.

Needs root, debootstrap, umoci, and Debian's package servers, under the address that apt uses here.
"""

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

PACKAGES = ("python3", "python3-numpy", "python3-yaml")
TOOLS = ("debootstrap", "umoci", "chroot")
# What a container has no use for: half of its size.
LEFT_OUT = (
    "var/cache/apt",
    "var/lib/apt/lists",
    "usr/share/doc",
    "usr/share/man",
    "usr/share/locale",
    "usr/share/info",
)
_SEARCH_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


def missing_reason(folder: Path) -> str | None:
    """Why there is no image in a folder and none can be made; None when there is one, or it can."""
    if _suite() is None:
        return "the image is made on Debian only"
    if _layout(folder).is_dir():
        return None
    if os.geteuid() != 0:
        return "making an image of Debian packages needs root"
    missing = [tool for tool in TOOLS if shutil.which(tool, path=_SEARCH_PATH) is None]
    return f"not installed: {', '.join(missing)}" if missing else None


def debian_layout(folder: Path) -> Path:
    """The OCI layout in a folder with one image called `image`, made now unless it is there. It must not be changed.

    Raises:
        subprocess.CalledProcessError: A step failed; what it said stands in the error's output.

    """
    layout = _layout(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not layout.is_dir():
            with _temporary_folder(folder) as work:
                _bootstrap(work / "rootfs")
                _pack(work / "rootfs", work / "layout")
                (work / "layout").rename(layout)
    return layout


def insert(layout: Path, source: Path, target: str) -> None:
    """Add a folder to the image of a layout, as one more layer.

    The archive is not umoci's own: `umoci insert` 0.4.7 leaves it without its end, which GNU tar, and so enroot, refuses.
    """
    archive = layout.with_name(f"{layout.name}.tar")
    with tarfile.open(archive, "w", format=tarfile.PAX_FORMAT) as layer:
        layer.add(source, arcname=target.strip("/") or ".")
    _run("umoci", "raw", "add-layer", "--image", f"{layout}:image", str(archive))
    archive.unlink()


def configure(layout: Path, *environment: str) -> None:
    """Add variables, each as `NAME=value`, to the image of a layout."""
    words = [word for variable in environment for word in ("--config.env", variable)]
    _run("umoci", "config", "--image", f"{layout}:image", *words)


def _layout(folder: Path) -> Path:
    recipe = repr((_suite(), PACKAGES, LEFT_OUT))
    return folder / f"debian-{_suite()}-{hashlib.sha256(recipe.encode()).hexdigest()[:12]}"


def _suite() -> str | None:
    release = Path("/etc/os-release")
    lines = release.read_text().splitlines() if release.exists() else []
    fields = dict(line.replace('"', "").split("=", 1) for line in lines if "=" in line)
    return fields.get("VERSION_CODENAME") if fields.get("ID") == "debian" else None


def _mirror() -> str:
    """Where apt gets this suite from on this machine."""
    listed = _run("apt-get", "indextargets", "--format", "$(CODENAME) $(REPO_URI)", "Created-By: Packages")
    places = [line.split() for line in listed.splitlines()]
    return next((uri for suite, uri in places if suite == _suite()), "http://deb.debian.org/debian")


def _bootstrap(rootfs: Path) -> None:
    include = f"--include={','.join(PACKAGES)}"
    _run("debootstrap", "--variant=minbase", include, str(_suite()), str(rootfs), _mirror())
    _unmount(rootfs)
    for name in LEFT_OUT:
        shutil.rmtree(rootfs / name, ignore_errors=True)


def _unmount(rootfs: Path) -> None:
    """Unmount what debootstrap left mounted, since it failed or something was using it: it must not be walked into."""
    for name in ("proc", "sys"):
        subprocess.run(["umount", "-l", str(rootfs / name)], stderr=subprocess.DEVNULL, check=False)


def _pack(rootfs: Path, layout: Path) -> None:
    _run("umoci", "init", "--layout", str(layout))
    _run("umoci", "new", "--image", f"{layout}:image")
    insert(layout, rootfs, "/")
    configure(layout, "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")


def _run(*argv: str) -> str:
    environment = os.environ | {"PATH": _SEARCH_PATH, "LC_ALL": "C"}
    done = subprocess.run(
        argv, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode:
        raise subprocess.CalledProcessError(done.returncode, argv, done.stdout[-3000:])
    return done.stdout


@contextlib.contextmanager
def _temporary_folder(parent: Path) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(dir=parent, prefix="making-"))
    try:
        yield folder
    finally:
        _unmount(folder / "rootfs")
        shutil.rmtree(folder, ignore_errors=True)
