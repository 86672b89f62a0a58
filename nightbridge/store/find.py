"""Where the runs of a run key lie in the store."""

import re

from nightbridge.errors import InvalidInput
from nightbridge.store.manifest import MANIFEST
from nightbridge.store.objects import ObjectStore

_TAIL = re.compile(r"-[0-9a-f]{10}$")


def committed_attempts(store: ObjectStore, run_key: str) -> tuple[str, ...]:
    """The prefixes of a run's committed attempts, oldest first.

    A run key is `<test slug>-<night>-<hash>` and the store's folders are named after slug and night, both of which may
    hold dashes: every place where the key can be cut is tried.
    """
    found: dict[int, str] = {}
    words = _TAIL.sub("", run_key).split("-")
    for cut in range(1, len(words)):
        folder = f"runs/{'-'.join(words[:cut])}/{'-'.join(words[cut:])}/{run_key}"
        manifest = re.compile(rf"{re.escape(folder)}/a(\d+)/{re.escape(MANIFEST)}")
        for item in store.list(f"{folder}/"):
            if match := manifest.fullmatch(item.key):
                found[int(match[1])] = item.key.removesuffix(f"/{MANIFEST}")
    return tuple(found[number] for number in sorted(found))


def last_attempt(store: ObjectStore, run_key: str) -> str:
    """The prefix of the attempt that counts.

    Raises:
        InvalidInput: No attempt of that run has been committed: the run key or the store is wrong.

    """
    attempts = committed_attempts(store, run_key)
    if not attempts:
        raise InvalidInput(
            "no stored run with this run key",
            thing=f"{run_key} in {store.url}",
            advice="Check the run key and the store",
        )
    return attempts[-1]
