"""Logins of registries: a secret of ours, enroot's `.credentials`, else the files of docker and podman.

A secret has the lines of enroot's own file, which are those of netrc(5); it is handed on in memory alone.
"""

import base64
import binascii
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from nightbridge.errors import PermanentError
from nightbridge.images.references import ImageReference
from nightbridge.secrets import Login, file_in_memory, read_netrc, whole_lines

DOCKER_HUB = "registry-1.docker.io"
_DOCKER_HUB_LOGINS = ("auth.docker.io", "docker.io", "https://index.docker.io/v1/")

LOGIN_ADVICE = (
    "Add a line `machine {registry} login {user} password PASSWORD` to $ENROOT_CONFIG_PATH/.credentials "
    "(~/.config/enroot/.credentials), or to the secret that the Image Cache names"
)


def login_advice(reference: ImageReference) -> str:
    """How to log in to the registry of an image; NVIDIA's takes one fixed user name with an API key."""
    return LOGIN_ADVICE.replace("{registry}", reference.registry or "auth.docker.io").replace(
        "{user}", "$oauthtoken" if reference.registry == "nvcr.io" else "USER"
    )


def find_login(registry: str, *, token_server: str = "", credentials: str = "") -> Login | None:
    """The login for a registry, as `registry[:port]`; None when none is configured.

    Args:
        registry: The registry.
        token_server: The host that gives its tokens, whose login serves as well.
        credentials: Lines of netrc(5) that come before all files.

    Raises:
        PermanentError: Logins cannot be read.

    """
    hosts = [registry, registry.rpartition(":")[0], token_server]
    if registry == DOCKER_HUB:
        hosts += _DOCKER_HUB_LOGINS
    for table in (_given_logins(credentials), _enroot_logins(), *map(_docker_logins, _docker_files())):
        for host in hosts:
            if host and (login := table.get(host)):
                return login
    return None


@contextmanager
def enroot_config(credentials: str) -> Iterator[dict[str, str]]:
    """The variable that lets enroot find our credentials; none without any, so that enroot looks in its own place."""
    if not credentials:
        yield {}
        return
    with (
        tempfile.TemporaryDirectory(prefix="nightbridge-") as folder,
        file_in_memory(whole_lines(credentials)) as path,
    ):
        (Path(folder) / ".credentials").symlink_to(path)
        yield {"ENROOT_CONFIG_PATH": folder}


def _given_logins(credentials: str) -> Mapping[str, Login]:
    if not credentials:
        return {}
    with file_in_memory(whole_lines(credentials)) as path:
        return _read_netrc(path, "the image credentials")


def _enroot_logins() -> Mapping[str, Login]:
    config = os.environ.get("ENROOT_CONFIG_PATH")
    home = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    path = (Path(config) if config else home / "enroot") / ".credentials"
    return _read_netrc(path, str(path)) if path.is_file() else {}


def _read_netrc(path: Path, name: str) -> Mapping[str, Login]:
    # enroot lets its shell fill in a password that begins with a dollar sign.
    return {host: (user, os.path.expandvars(password)) for host, (user, password) in read_netrc(path, name).items()}


def _docker_files() -> list[Path]:
    variables = os.environ
    named = variables.get("REGISTRY_AUTH_FILE")
    if named:
        return [Path(named)]
    runtime = variables.get("XDG_RUNTIME_DIR") or f"/run/user/{os.getuid()}"
    docker = Path(variables.get("DOCKER_CONFIG") or Path.home() / ".docker")
    return [Path(runtime) / "containers" / "auth.json", docker / "config.json"]


def _docker_logins(path: Path) -> Mapping[str, Login]:
    logins = {}
    try:
        entries = json.loads(path.read_bytes()).get("auths", {})
        for host, entry in entries.items():
            user, _, password = base64.b64decode(entry.get("auth", "")).decode().partition(":")
            if user and password:
                logins[host] = (user, password)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, AttributeError, binascii.Error):
        raise PermanentError("cannot read these logins", thing=str(path), advice="Log in again") from None
    return logins
