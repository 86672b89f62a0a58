"""Opening the store that the settings describe."""

from collections.abc import Callable

from nightbridge.errors import InvalidInput
from nightbridge.models import StoreSettings
from nightbridge.store.protocol import ObjectStore


def open_store(settings: StoreSettings, block_value: Callable[[str], str] | None = None) -> ObjectStore:
    """Open the store that the settings describe. Nothing is read or written yet.

    Args:
        settings: Where it is and how it is reached.
        block_value: Returns the value of a Prefect `Secret` block by name; None where there is no Prefect.

    Raises:
        InvalidInput: The URL is neither `file://` nor `s3://`, or the settings cannot work (unknown profile, missing
            secret or certificate file).

    """
    scheme = settings.url.partition("://")[0]
    if scheme == "s3":
        # boto3 takes half a second to import; commands that need no S3 do not pay for it.
        from nightbridge.store.s3 import S3Store

        return S3Store(settings, block_value)
    if scheme == "file":
        from nightbridge.store.directory import DirectoryStore

        return DirectoryStore(settings)
    raise InvalidInput("not a store URL", thing=settings.url, advice="Use file:///DIRECTORY or s3://BUCKET/PREFIX")
