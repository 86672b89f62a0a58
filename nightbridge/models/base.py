"""What all models share, and the names of nights and runs."""

import hashlib
import re
from datetime import UTC, datetime
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, StringConstraints


class Model(BaseModel):
    """Base of every model: frozen, and an unknown field is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def utc_now() -> datetime:
    """The current time, UTC, to the microsecond."""
    return datetime.now(UTC)


# --- names -----------------------------------------------------------------------------------------------------------

NightId = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?$")]
RunKey = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9-]{0,99}$")]

RUN_KEY_LIMIT = 100

LAUNCHER_HOME = "nemorun"
"""NEMORUN_HOME, below the attempt's folder. Without a container NeMo-Run replaces "/nemo_run" wherever it stands in its
batch script, also inside a path, so the folder must not be called that."""


def slug(text: str, limit: int = 40) -> str:
    """Turn a test id into `[a-z0-9-]`, at most `limit` characters, never empty."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:limit].strip("-") or "test"


def make_run_key(
    *, scenario: str, night: str, test_id: str, sweep_point: dict[str, Any], iteration: int, repeat: int
) -> str:
    """Name a run: `<test slug>-<night>-<10 hex>`, the same for the same arguments on every machine.

    The hex part is a hash over all arguments, so two tests whose slugs agree still have different keys.
    """
    point = "&".join(f"{name}={sweep_point[name]!r}" for name in sorted(sweep_point))
    identity = "\n".join((scenario, night, test_id, point, str(iteration), str(repeat)))
    digest = hashlib.sha256(identity.encode()).hexdigest()[:10]
    tail = f"-{night}-{digest}"
    return slug(test_id, RUN_KEY_LIMIT - len(tail)) + tail
