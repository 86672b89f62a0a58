"""Image references: the forms that users write, and those that each enroot version understands."""

import hashlib
import re

from nightbridge.errors import InvalidInput
from nightbridge.models import Model

# enroot's own default, and what other tools call it.
_DOCKER_HUB = {"docker.io", "index.docker.io", "registry-1.docker.io"}

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
    """A reference in its parts. `registry` None is Docker Hub; a digest, where there is one, decides over the tag."""

    user: str | None = None
    registry: str | None = None
    name: str
    tag: str | None = None
    digest: str | None = None

    def __str__(self) -> str:
        return (
            (f"{self.registry}/" if self.registry else "")
            + self.name
            + (f":{self.tag}" if self.tag else "")
            + (f"@{self.digest}" if self.digest else "")
        )

    @property
    def identity(self) -> str:
        """Sixteen hex digits for this reference, whichever way it was written."""
        return hashlib.sha256(str(self).encode()).hexdigest()[:16]

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
    if parts["separator"] == "/" and not _is_registry(registry):
        registry, name = None, f"{registry}/{name}"
    if not name or name != name.lower():
        raise InvalidInput(
            "not an image reference",
            thing=text,
            advice="Write REGISTRY/IMAGE:TAG or REGISTRY#IMAGE:TAG in lower case, the path of a .sqsh file, or none",
        )
    if parts["user"] and ":" in parts["user"]:
        raise InvalidInput(
            "a password in an image reference would be shown in process lists and logs",
            thing=name,
            advice="Put it in enroot's .credentials file",
        )
    return ImageReference(
        user=parts["user"],
        registry=None if registry in _DOCKER_HUB else registry,
        name=name,
        tag=parts["tag"],
        digest=parts["digest"],
    )


def _is_registry(first: str) -> bool:
    """Whether the first part of a path names a registry; the rule of docker and of enroot 4."""
    return "." in first or ":" in first or first == "localhost"
