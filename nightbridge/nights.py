"""Night ids: which night a run belongs to, fixed once and never "today"."""

from datetime import datetime
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from pydantic import TypeAdapter, ValidationError

from nightbridge.errors import InvalidInput
from nightbridge.models import NightId, utc_now

_NIGHT_ID: TypeAdapter[str] = TypeAdapter(NightId)


def night_of(scheduled: datetime, timezone: str) -> str:
    """The night of a scheduled flow run: its start date in the deployment's time zone, `YYYY-MM-DD`.

    Raises:
        InvalidInput: There is no such time zone.
    """
    try:
        return scheduled.astimezone(ZoneInfo(timezone)).date().isoformat()
    except (ZoneInfoNotFoundError, ValueError, OSError) as error:  # OSError: the name of a folder of zones
        raise InvalidInput("no such time zone", thing=timezone, advice="Use a name like Europe/Berlin") from error


def new_night() -> str:
    """A night id for a run by hand: date and time of now in UTC, `YYYY-MM-DD-HHMMSS`.

    It sorts between the scheduled nights of its own and of the next day.
    """
    return utc_now().strftime("%Y-%m-%d-%H%M%S")


def checked_night(text: str) -> str:
    """Return `text` if it can be a night id.

    Raises:
        InvalidInput: It cannot; it becomes a part of job names and paths.
    """
    try:
        return _NIGHT_ID.validate_python(text)
    except ValidationError as error:
        raise InvalidInput(
            "not a night id", thing=text, advice="Use up to 40 lower-case letters, digits and dashes, as 2026-11-21"
        ) from error
