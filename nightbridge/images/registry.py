"""Image references, and what they mean now by the registry's own HTTP API (OCI distribution specification).

Logins go to the registry and to the token server that it names, never through a redirect to a third host. They come
from a secret of ours, which has the lines of netrc(5) and is handed on in memory alone, else from enroot's
`.credentials`.
"""

import base64
import hashlib
import http.client
import json
import logging
import os
import re
import shutil
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from email.message import Message
from pathlib import Path

from nightbridge.errors import (
    DamagedData,
    ErrorPattern,
    InvalidInput,
    NightbridgeError,
    PermanentError,
    TransientError,
    classify,
)
from nightbridge.models import Model
from nightbridge.processes import run
from nightbridge.secrets import Login, file_in_memory, read_netrc

log = logging.getLogger(__name__)

# enroot's own default, and what other tools call it.
_DOCKER_HUB_NAMES = {"docker.io", "index.docker.io", "registry-1.docker.io"}

_DIGEST = r"sha256:[0-9a-f]{64}"
# The grammar of github.com/distribution/reference, with enroot's `USER@` and `REGISTRY#`.
_REFERENCE = re.compile(
    r"(?:docker://)?"
    r"(?:(?P<user>[^@/#\s]+)@(?!sha256:))?"
    r"(?:(?P<registry>[A-Za-z0-9._-]+(?::\d+)?)(?P<separator>[#/]))?"
    r"(?P<name>[a-z0-9]+(?:[._/-]+[a-z0-9]+)*)"
    r"(?::(?P<tag>[A-Za-z0-9_][A-Za-z0-9._-]{0,127}))?"
    rf"(?:@(?P<digest>{_DIGEST}))?"
)


class ImageReference(Model):
    """A reference in its parts. `registry` None is Docker Hub; a digest, where there is one, decides over the tag.

    `arch` is the processor for which an image of several is wanted, as `uname -m` names it; None is that of the machine
    that imports.
    """

    user: str | None = None
    registry: str | None = None
    name: str
    tag: str | None = None
    digest: str | None = None
    arch: str | None = None

    def __str__(self) -> str:
        return (
            (f"{self.registry}/" if self.registry else "")
            + self.name
            + (f":{self.tag}" if self.tag else "")
            + (f"@{self.digest}" if self.digest else "")
        )

    @property
    def identity(self) -> str:
        """Sixteen hex digits, and the processor, for this reference, whichever way it was written."""
        return hashlib.sha256(str(self).encode()).hexdigest()[:16] + self._of_arch

    @property
    def file_name(self) -> str:
        """The name, without ending, of the file of an image of known digest, which may be that of several images."""
        return str(self.digest).removeprefix("sha256:") + self._of_arch

    @property
    def _of_arch(self) -> str:
        return f"-{self.arch}" if self.arch else ""

    def uri(self, enroot_major: int) -> str:
        """The address that `enroot import` takes.

        `REGISTRY#IMAGE` is understood by every enroot; `REGISTRY/IMAGE` means Docker Hub to versions before 4. Those
        know no `@sha256:`, but query the registry for a tag's manifest in the same way as for a digest's.
        """
        user = f"{self.user}@" if self.user else ""
        registry = f"{self.registry}#" if self.registry else ""
        if self.digest:
            version = f"@{self.digest}" if enroot_major >= 4 else f":{self.digest}"
        else:
            version = f":{self.tag or 'latest'}"
        return f"docker://{user}{registry}{self.name}{version}"


def parse_reference(text: str) -> ImageReference:
    """Take a reference apart: `nvcr.io#nvidia/nemo:tag`, `nvcr.io/nvidia/nemo:tag`, `docker://...`, `...@sha256:...`.

    Raises:
        InvalidInput: It is none, or it carries a password.
    """
    match = _REFERENCE.fullmatch(text.strip())
    parts = match.groupdict() if match else {"name": "", "separator": "", "registry": ""}
    registry, name = parts["registry"], parts["name"]
    # What comes first names a registry by the rule of docker and of enroot 4.
    if parts["separator"] == "/" and not ("." in registry or ":" in registry or registry == "localhost"):
        registry, name = None, f"{registry}/{name}"
    if not name or name != name.lower():
        raise InvalidInput(
            "not an image reference",
            subject=text,
            advice="Write REGISTRY/IMAGE:TAG or REGISTRY#IMAGE:TAG in lower case, the path of a .sqsh file, or none",
        )
    if parts["user"] and ":" in parts["user"]:
        raise InvalidInput(
            "a password in an image reference would be shown in process lists and logs",
            subject=name,
            advice="Put it in enroot's .credentials file",
        )
    return ImageReference(
        user=parts["user"],
        registry=None if registry in _DOCKER_HUB_NAMES else registry,
        name=name,
        tag=parts["tag"],
        digest=parts["digest"],
    )


_MANIFEST_TYPES = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
_TIMEOUT_SECONDS = 60.0
_MAX_ANSWER_BYTES = 16 << 20
# Attempts when the registry sends `Retry-After`; without it the stage's own retries apply.
_TRIES = 4
_MAX_PAUSE_SECONDS = 60.0


# The script reads its settings between two lines that it has had since 2019; no command of enroot's shows them.
_READ_SETTINGS = 'eval "$(sed -n "/^# -* BEGIN CONFIG/,/^# -* END CONFIG/p" "$1")"; env -0'
_SETTINGS_TIMEOUT_SECONDS = 60.0


def enroot_settings() -> dict[str, str]:
    """What enroot finds as its settings: the environment's, else those of the site's enroot.conf, else its own.

    Without an enroot here, or one whose script says nothing of them, they are the environment's alone.
    """
    known: Mapping[str, str] = os.environ
    if program := shutil.which("enroot"):
        argv = ["bash", "-c", _READ_SETTINGS, "bash", program]
        finished = run(argv, environment=os.environ, timeout=_SETTINGS_TIMEOUT_SECONDS)
        if not finished.code:
            lines = finished.stdout.decode(errors="surrogateescape").split("\0")
            known = dict(line.split("=", 1) for line in lines if "=" in line)
    return {name: value for name, value in known.items() if name.startswith("ENROOT_")}


def http_is_allowed() -> bool:
    """Whether plain HTTP to registries is allowed: enroot's own switch, `ENROOT_ALLOW_HTTP`."""
    return enroot_settings().get("ENROOT_ALLOW_HTTP", "").lower() in {"1", "y", "yes", "true", "on"}


def registry_digest(reference: ImageReference, credentials: str = "") -> str:
    """The digest of the manifest that a reference means now, `sha256:<64 hex>`.

    `credentials` are logins that come before those of the tools' files.

    Raises:
        InvalidInput: There is no such image.
        PermanentError: The registry refuses us, or its certificate is not trusted.
        TransientError: The registry cannot be reached, or is busy.
        DamagedData: It answered with no digest and no manifest, as a proxy's login page.
    """
    path = f"manifests/{reference.digest or reference.tag or 'latest'}"
    digest = _request_path(reference, path, "HEAD", credentials).headers.get("Docker-Content-Digest")
    if digest is None:
        # The header is optional; the digest is by definition that of the manifest's bytes.
        with _request_path(reference, path, "GET", credentials) as answer:
            manifest = _read(answer, reference)
        if not _is_manifest(manifest):
            raise DamagedData("the registry returned no manifest", subject=str(reference), advice="Look at its answer")
        digest = f"sha256:{hashlib.sha256(manifest).hexdigest()}"
    if not re.fullmatch(_DIGEST, digest):
        raise DamagedData(f"the registry returned an unsupported digest ({digest[:80]!r})", subject=str(reference))
    return digest


def _is_manifest(data: bytes) -> bool:
    """Whether an answer is a manifest or an index of some: what all of them have."""
    try:
        return "schemaVersion" in json.loads(data)
    except (ValueError, TypeError, RecursionError):
        return False


def registry_tags(reference: ImageReference, credentials: str = "") -> tuple[str, ...]:
    """Every tag of an image, in the registry's order.

    Arguments and errors are those of `registry_digest`.
    """
    found: list[str] = []
    query = "tags/list?n=1000"
    for _ in range(100):  # pages: no registry has more, and a list that never ends is none
        with _request_path(reference, query, "GET", credentials) as answer:
            try:
                found += [str(tag) for tag in json.loads(_read(answer, reference)).get("tags") or ()]
            except (ValueError, AttributeError, TypeError, RecursionError) as error:
                raise DamagedData("the registry returned no list of tags", subject=str(reference)) from error
            further = re.search(r"/tags/list(\?[^>]*)>;\s*rel=\"?next", answer.headers.get("Link", ""))
        if further is None:
            break
        query = f"tags/list{further[1]}"
    return tuple(found)


def _request_path(reference: ImageReference, path: str, method: str, credentials: str) -> http.client.HTTPResponse:
    registry = reference.registry or DOCKER_HUB
    name = reference.name if reference.registry or "/" in reference.name else f"library/{reference.name}"
    scheme = "http" if http_is_allowed() else "https"
    url = f"{scheme}://{registry}/v2/{name}/{path}"
    headers = {"Accept": ", ".join(_MANIFEST_TYPES)}
    try:
        return _request(url, headers, method, reference)
    except urllib.error.HTTPError as error:
        if error.code != http.HTTPStatus.UNAUTHORIZED:
            raise _refusal(error, reference) from error
        headers["Authorization"] = _authorization(error.headers, registry, reference, credentials)
        return _checked_request(url, headers, method, reference)


def _request(url: str, headers: Mapping[str, str], method: str, reference: ImageReference) -> http.client.HTTPResponse:
    """One request; HTTPError is the caller's to read, everything below it is explained here."""
    for last_try in [False] * (_TRIES - 1) + [True]:
        request = urllib.request.Request(url, method=method, headers={"User-Agent": "nightbridge"})
        for name, value in headers.items():
            request.add_unredirected_header(name, value)
        try:
            answer: http.client.HTTPResponse = urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS)
        except urllib.error.HTTPError as error:
            pause = error.headers.get("Retry-After", "") if error.code in (429, 503) else ""
            if last_try or not pause.isdecimal() or float(pause) > _MAX_PAUSE_SECONDS:
                raise
            log.info("%s: rate limited, retrying in %s s", reference, pause)
            time.sleep(float(pause))
        except (OSError, http.client.HTTPException, ValueError) as error:  # ValueError: a host or header that is none
            raise _no_answer(error, url, reference) from error
        else:
            return answer
    raise AssertionError("unreachable")


def _read(answer: http.client.HTTPResponse, reference: ImageReference) -> bytes:
    """The body of an answer, which a registry may send without an end."""
    try:
        data = answer.read(_MAX_ANSWER_BYTES + 1)
    except (OSError, http.client.HTTPException) as error:
        raise _no_answer(error, answer.geturl(), reference) from error
    if len(data) > _MAX_ANSWER_BYTES:
        raise DamagedData(f"the registry's answer has over {_MAX_ANSWER_BYTES >> 20} MiB", subject=str(reference))
    return data


def _checked_request(
    url: str, headers: Mapping[str, str], method: str, reference: ImageReference
) -> http.client.HTTPResponse:
    try:
        return _request(url, headers, method, reference)
    except urllib.error.HTTPError as error:
        raise _refusal(error, reference) from error


_PARAMETER = r'(\w++)\s*=\s*("[^"]*"|[^\s,]+)'
_CHALLENGE = re.compile(rf"(\w++)((?:[\s,]+{_PARAMETER})*)")


def _challenges(headers: Message) -> dict[str, dict[str, str]]:
    """The parameters of each login scheme that a registry offers, in one header or several (RFC 9110, 11.6.1)."""
    return {
        scheme.lower(): {name.lower(): value.strip('"') for name, value in re.findall(_PARAMETER, parameters)}
        for header in headers.get_all("WWW-Authenticate", ())
        for scheme, parameters, *_ in _CHALLENGE.findall(header)
    }


def _authorization(headers: Message, registry: str, reference: ImageReference, credentials: str) -> str:
    """What the `Authorization` header must be for a registry that answered 401."""
    challenges = _challenges(headers)
    fields = challenges.get("bearer", {})
    realm = fields.get("realm", "")
    if "basic" in challenges and "bearer" not in challenges:
        login = find_login(registry, credentials=credentials)
        if login is None:
            raise PermanentError(
                "the registry requires a login", subject=str(reference), advice=login_advice(reference)
            )
        return _basic(login)
    if not realm.startswith(("https://", "http://")):
        offered = ", ".join(headers.get_all("WWW-Authenticate", ())) or "none"
        what = f"the registry requires an unsupported login scheme ({offered[:80]!r})"
        raise PermanentError(what, subject=str(reference))
    if realm.startswith("http://") and not http_is_allowed():
        raise PermanentError("the registry requires the login to be sent unencrypted", subject=str(reference))
    try:
        server = urllib.parse.urlsplit(realm).hostname or ""
    except ValueError as error:
        raise PermanentError(
            f"the registry's login server is not a valid address ({realm[:80]!r})", subject=str(reference)
        ) from error
    login = find_login(registry, token_server=server, credentials=credentials)
    query = urllib.parse.urlencode([(name, fields[name]) for name in ("service", "scope") if name in fields])
    basic = {"Authorization": _basic(login)} if login else {}
    with _checked_request(f"{realm}?{query}", basic, "GET", reference) as answer:
        try:
            given = json.loads(_read(answer, reference))
            token = str(given.get("token") or given["access_token"])
            if not (token.isascii() and token.isprintable()):
                raise ValueError("not the value of a header")
        except (ValueError, KeyError, AttributeError, RecursionError) as error:
            raise TransientError("the registry's token server returned no token", subject=str(reference)) from error
    return f"Bearer {token}"


def _basic(login: Login) -> str:
    return "Basic " + base64.b64encode(":".join(login).encode()).decode()


_STATUS = r"(?:HTTP|returned error(?: code)?:)"
ANSWERS = (
    ErrorPattern(rf"{_STATUS} (408|429|5\d\d)\b", TransientError, "the registry is busy or failing"),
    ErrorPattern(rf"{_STATUS} 40[13]\b", PermanentError, "the registry refused our credentials", "{login}"),
    ErrorPattern(
        rf"{_STATUS} 404\b", InvalidInput, "the registry has no such image",
        "Check name and tag; private images also look missing without a login",
    ),
)  # fmt: skip
"""Statuses of the answers, as `HTTP 404 Not Found` from us or in curl's words from enroot."""

_REFUSALS = (*ANSWERS, ErrorPattern("", PermanentError, "the registry refused the request"))
# Connection errors, as worded by Python's ssl and socket modules.
_FAULTS = (
    ErrorPattern(
        r"CERTIFICATE_VERIFY_FAILED", PermanentError, "the registry's certificate is not trusted here",
        "Install the site's certificate authority, or set SSL_CERT_FILE",
    ),
    ErrorPattern("", TransientError, "the registry is unreachable"),
)  # fmt: skip


def _refusal(error: urllib.error.HTTPError, reference: ImageReference) -> NightbridgeError:
    return _classified(f"HTTP {error.code} {error.reason}", _REFUSALS, reference)


def _no_answer(error: Exception, url: str, reference: ImageReference) -> NightbridgeError:
    host = urllib.parse.urlsplit(url).netloc
    return _classified(f"{host}: {getattr(error, 'reason', None) or error}", _FAULTS, reference)


def _classified(message: str, patterns: Sequence[ErrorPattern], reference: ImageReference) -> NightbridgeError:
    known = classify(message, patterns)
    assert known is not None  # the last pattern of each table occurs in everything
    return known.error(str(reference), message, login=login_advice(reference))


DOCKER_HUB = "registry-1.docker.io"
_DOCKER_HUB_LOGINS = ("auth.docker.io", "docker.io")

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

    The login of `token_server`, the host that gives its tokens, serves as well. `credentials` are lines of netrc(5)
    that come before all files.

    Raises:
        PermanentError: Logins cannot be read.
    """
    hosts = [registry, registry.rpartition(":")[0], token_server]
    if registry == DOCKER_HUB:
        hosts += _DOCKER_HUB_LOGINS
    for table in (_given_logins(credentials), _enroot_logins()):
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
    with tempfile.TemporaryDirectory(prefix="nightbridge-") as folder, file_in_memory(credentials) as path:
        (Path(folder) / ".credentials").symlink_to(path)
        yield {"ENROOT_CONFIG_PATH": folder}


def _given_logins(credentials: str) -> Mapping[str, Login]:
    if not credentials:
        return {}
    with file_in_memory(credentials) as path:
        return _read_netrc(path, "the image credentials")


def _enroot_logins() -> Mapping[str, Login]:
    config = enroot_settings().get("ENROOT_CONFIG_PATH")
    home = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    path = (Path(config) if config else home / "enroot") / ".credentials"
    return _read_netrc(path, str(path)) if os.path.isfile(path) else {}


def _read_netrc(path: Path, name: str) -> Mapping[str, Login]:
    # enroot lets its shell fill in a password that begins with a dollar sign.
    return {host: (user, os.path.expandvars(password)) for host, (user, password) in read_netrc(path, name).items()}
