"""The bases of all models, and the names of nights and runs."""

import enum
import hashlib
import re
from collections.abc import Callable, Mapping
from datetime import UTC, date, datetime
from functools import lru_cache
from typing import Annotated, Any, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

_Word = TypeVar("_Word")
_Meaning = TypeVar("_Meaning")


class Model(BaseModel):
    """Base of every model: frozen, and an unknown field is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def __setstate__(self, state: dict[Any, Any]) -> None:
        """Read a pickle, as Prefect keeps what a flow returns; another release's lacks some fields, or has more.

        Raises:
            KeyError: It lacks one that has no default.
        """
        pickled, known = state["__dict__"], {}
        for name, field in type(self).model_fields.items():
            is_there = name in pickled or field.is_required()
            known[name] = pickled[name] if is_there else field.get_default(call_default_factory=True)
        super().__setstate__({**state, "__dict__": known})


class StoredModel(Model):
    """Base of every document that outlives the process that wrote it: in the store, the workspace or the history.

    Unknown fields of such a document are ignored, at every depth, so that a release reads what a newer one wrote.
    """

    schema_version: int = Field(1, description="Raised when a field changes its meaning; new fields do not raise it.")

    @classmethod
    def model_validate_json(cls, json_data: str | bytes | bytearray, **options: Any) -> Self:
        """Read a document; `options` are pydantic's."""
        return super().model_validate_json(json_data, **{"extra": "ignore", **options})


class StoredWord(enum.StrEnum):
    """Base of the words of stored documents: a newer release's, which this one does not know, is kept by its name.

    It is none of the members, so what asks for these takes it for neither good nor complete.
    """

    @classmethod
    def _missing_(cls, value: object) -> Self | None:
        if not isinstance(value, str) or not _WORD.fullmatch(value):
            return None
        word = str.__new__(cls, value)
        word._name_, word._value_ = value.upper(), value
        return word


_WORD = re.compile(r"[a-z][a-z_]{1,39}")


class WordTable(dict[_Word, _Meaning]):
    """What each stored word means here. One that only a newer release knows has what `of_newer` gives it."""

    def __init__(self, known: Mapping[_Word, _Meaning], of_newer: Callable[[_Word], _Meaning]) -> None:
        super().__init__(known)
        self._of_newer = of_newer

    def __missing__(self, word: _Word) -> _Meaning:
        return self._of_newer(word)


def utc_now() -> datetime:
    """The current time, UTC, to the microsecond."""
    return datetime.now(UTC)


# --- names -----------------------------------------------------------------------------------------------------------

NightId = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?$")]
RunKey = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9-]{0,99}$")]

_DATED = re.compile(r"\d{4}-\d\d-\d\d")
_DAY = re.compile(r"(\d{4}-\d\d-\d\d)(-[a-z0-9-]+)?")
_RUN_KEY = re.compile(r".+-[0-9a-f]{10}")

RUN_KEY_LIMIT = 100

LAUNCHER_HOME = "nemorun"
"""NEMORUN_HOME, below the attempt's folder. Without a container NeMo-Run replaces "/nemo_run" wherever it stands in its
batch script, also inside a path, so the folder must not be called that."""


def slug(text: str, limit: int = 40) -> str:
    """Turn a test id into `[a-z0-9-]`, at most `limit` characters, never empty."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:limit].strip("-") or "test"


@lru_cache(maxsize=4096)  # a verdict sorts hundreds of rows by their nights, several times
def has_date(night: str) -> bool:
    """Whether a night's name begins with its date; one by hand may be named by a word."""
    return _DATED.match(night) is not None


def is_day(text: str) -> bool:
    """Whether a text is a date that exists, or the name of a night that begins with one."""
    found = _DAY.fullmatch(text)
    try:
        return found is not None and bool(date.fromisoformat(found[1]))
    except ValueError:
        return False


def night_order(night: str, written: datetime) -> str:
    """What nights sort by: their name, or where that has no date, when they were written.

    By its name a night that is named by a word would be the newest for ever.
    """
    return night if has_date(night) else f"{written.astimezone(UTC):%Y-%m-%d-%H%M%S}"


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


def slug_in(run_key: str, night: str) -> str:
    """The test's part of a run key: everything before `-<night>-<hash>`."""
    return run_key[: -len(f"-{night}-") - 10]


def is_run_key(name: str) -> bool:
    """Whether a name has the form of a run key."""
    return bool(_RUN_KEY.fullmatch(name))
