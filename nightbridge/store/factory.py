"""Opening the store that the settings describe. A new kind of store is one module and one row of `STORES`."""

import pkgutil

from nightbridge.errors import InvalidInput
from nightbridge.models import StoreSettings
from nightbridge.secrets import BlockValue
from nightbridge.store.protocol import ObjectStore

# Imported when one is opened: boto3 takes half a second, and commands that need no S3 do not pay for it.
STORES = {
    "file": "nightbridge.store.directory:DirectoryStore",
    "s3": "nightbridge.store.s3:S3Store",
}
"""Scheme of the store's URL, and the class: called with the settings and with `block_value`."""


def open_store(settings: StoreSettings, block_value: BlockValue | None = None) -> ObjectStore:
    """Open the store that the settings describe. Nothing is read or written yet.

    Args:
        settings: Where it is and how it is reached.
        block_value: Returns the value of a Prefect `Secret` block by name; None where there is no Prefect.

    Raises:
        InvalidInput: No store has this kind of URL, or the settings cannot work (unknown profile, missing secret or
            certificate file).
    """
    name = STORES.get(settings.url.partition("://")[0])
    if name is None:
        raise InvalidInput("not a store URL", thing=settings.url, advice="Use file:///DIRECTORY or s3://BUCKET/PREFIX")
    store: ObjectStore = pkgutil.resolve_name(name)(settings, block_value)
    return store
