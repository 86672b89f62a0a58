"""The files through which an image says how it is started, where enroot writes them and pyxis looks for them.

As seen in imports of enroot 4.1.2: `/etc/environment` holds the image's variables, one `NAME=value` a line;
`/etc/rc` goes to the working directory and starts the entrypoint with the arguments that it is given, or with the
image's command; `/etc/rc.local` is empty but for a comment; `/etc/fstab` mounts the image's volumes.
"""

import os
import shlex
import stat
from pathlib import Path
from typing import Any

from pydantic import AliasGenerator, BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_pascal

from nightbridge.errors import PermanentError


class ImageConfig(BaseModel):
    """The part of an image's configuration that a Dockerfile sets (OCI image specification, `config`)."""

    model_config = ConfigDict(frozen=True, alias_generator=AliasGenerator(validation_alias=to_pascal))

    env: list[str] | None = None
    entrypoint: list[str] | None = None
    cmd: list[str] | None = None
    working_dir: str | None = None
    labels: dict[str, str] | None = None
    volumes: dict[str, Any] | None = Field(None, description="Folder to an empty object.")


def write_start_files(rootfs: Path, config: ImageConfig) -> None:
    """Write `/etc/environment`, `/etc/rc`, `/etc/rc.local` and `/etc/fstab`, and make the working directory.

    What the image itself has under these names is replaced. Nothing outside `rootfs` is touched, whatever symbolic
    links an image brings.

    Raises:
        PermanentError: The image's `/etc` is no folder.

    """
    etc = rootfs / "etc"
    if etc.is_symlink() or (etc.exists() and not etc.is_dir()):
        raise PermanentError("/etc of this image is no folder", thing=str(rootfs))
    etc.mkdir(exist_ok=True)
    workdir = config.working_dir or "/"
    _make_inside(rootfs, workdir)
    contents = {
        "fstab": [f"${{ENROOT_ROOTFS}}{path} {path} none x-create=dir,bind,rw,nosuid,nodev"
                  for path in sorted(config.volumes or {})],
        "environment": config.env or [],
        "rc": _start_script(config, workdir),
        "rc.local": ["# Read by /etc/rc before it starts anything: `set -- ...` here changes the arguments."],
    }  # fmt: skip
    for name, lines in contents.items():
        path = etc / name
        path.unlink(missing_ok=True)
        path.write_text("".join(f"{line}\n" for line in lines))
        path.chmod(0o644)


def open_to_owner(folder: Path) -> None:
    """Let the owner into every folder and read every file, as enroot does: packing must not need root's privileges."""
    waiting = [folder]
    while waiting:
        here = waiting.pop()
        _add_mode(here, 0o700)
        with os.scandir(here) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(Path(entry.path))
                elif entry.is_file(follow_symlinks=False):
                    executable = entry.stat(follow_symlinks=False).st_mode & 0o111
                    _add_mode(Path(entry.path), 0o500 if executable else 0o400)


def _start_script(config: ImageConfig, workdir: str) -> list[str]:
    entrypoint = "".join(f"{shlex.quote(word)} " for word in config.entrypoint or ())
    command = config.cmd or ([] if config.entrypoint else ["/bin/sh"])
    labels = [f"# {name} {' '.join(value.splitlines())}" for name, value in sorted((config.labels or {}).items())]
    return [
        *labels,
        *([""] if labels else []),
        f"mkdir -p {shlex.quote(workdir)} 2>/dev/null",
        f"cd {shlex.quote(workdir)} || exit 1",
        "unset OLDPWD",
        "[ ! -s /etc/rc.local ] || . /etc/rc.local",
        f"[ $# -gt 0 ] || set -- {shlex.join(command)}",
        f'exec {entrypoint}"$@"',
    ]


def _make_inside(rootfs: Path, folder: str) -> None:
    """Make a folder of the image, unless that would leave the image through a link; /etc/rc tries again inside."""
    path = rootfs / folder.lstrip("/")
    if path.resolve().is_relative_to(rootfs.resolve()) and not path.exists():
        path.mkdir(parents=True)


def _add_mode(path: Path, bits: int) -> None:
    mode = stat.S_IMODE(path.lstat().st_mode)
    if mode & bits != bits:
        path.chmod(mode | bits)
