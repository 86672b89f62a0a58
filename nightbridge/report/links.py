"""Addresses of stored objects that a browser can open."""

from urllib.parse import quote, urlsplit

from nightbridge.harvest.manifest import MANIFEST, Manifest
from nightbridge.models import StoreSettings

MAX_LINKS = 20
FIRST = ("record.json", "summary.json", "metrics.parquet")
"""The files that are opened most often come first."""


def object_link(settings: StoreSettings, key: str) -> str:
    """The web address of a key of a store; empty where there is none.

    A folder's objects are `file://` URLs. An S3 object has the address by which its endpoint serves it, path style or
    with the bucket in the host name, AWS's own where a region and no endpoint is set. Whether the browser may read it
    is the store's decision.
    """
    scheme, _, rest = settings.url.partition("://")
    if scheme == "file":
        return f"{settings.url.rstrip('/')}/{quote(key)}"
    if scheme != "s3":
        return ""
    bucket, _, prefix = rest.partition("/")
    path = quote("/".join(part for part in (prefix.strip("/"), key) if part))
    if settings.endpoint_url:
        endpoint = urlsplit(settings.endpoint_url)
        if settings.path_style:
            return f"{endpoint.scheme}://{endpoint.netloc}{endpoint.path.rstrip('/')}/{bucket}/{path}"
        return f"{endpoint.scheme}://{bucket}.{endpoint.netloc}{endpoint.path.rstrip('/')}/{path}"
    return f"https://{bucket}.s3.{settings.region}.amazonaws.com/{path}" if settings.region else ""


def run_links(settings: StoreSettings, manifest: Manifest) -> tuple[tuple[str, str], ...]:
    """Path and address of a stored run's objects, checkpoints left out; none where there are no addresses."""
    paths = [file.path for file in manifest.files if file.kind != "checkpoint"]
    paths.sort(key=lambda path: (FIRST.index(path) if path in FIRST else len(FIRST), path))
    shown = [*paths[:MAX_LINKS], MANIFEST]
    links = ((path, object_link(settings, f"{manifest.prefix}/{path}")) for path in shown)
    return tuple((path, link) for path, link in links if link)
