"""Moments at which a run is disturbed: one that a printed seed picks, or each with NIGHTBRIDGE_EVERY_STAGE=1."""

import os
import random
import secrets
from collections.abc import Iterable

SEED = int(os.environ.get("NIGHTBRIDGE_FAULT_SEED") or secrets.randbelow(10**6))


def any_of(moments: Iterable[str]) -> list[str]:
    """Parameters of a test, for `pick`: each moment, or all of them as one."""
    names = list(moments)
    return names if os.environ.get("NIGHTBRIDGE_EVERY_STAGE") == "1" else ["/".join(names)]


def pick(moments: str) -> str:
    """The moment that comes in this run of the test."""
    chosen = random.Random(SEED).choice(moments.split("/"))
    print(f"NIGHTBRIDGE_FAULT_SEED={SEED}: {chosen}")
    return chosen
