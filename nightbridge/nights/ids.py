"""Night ids: which night a run belongs to, fixed once and never "today"."""

from collections.abc import Iterable
from datetime import UTC, datetime

from pydantic import TypeAdapter, ValidationError

from nightbridge.errors import InvalidInput
from nightbridge.models import NightId, utc_now

_NIGHT_ID: TypeAdapter[str] = TypeAdapter(NightId)


def night_of_slot(slot: datetime, slots_of_the_day: Iterable[datetime]) -> str:
    """The night of a scheduled flow run, from the schedule's own slot.

    `YYYY-MM-DD` for the first slot of a day, `YYYY-MM-DD-HHMM` for each further one. Where clocks are set back, the
    same local time comes twice: the second one ends in `-2`.

    Args:
        slot: When the schedule wanted the run to start, in the schedule's own time zone.
        slots_of_the_day: Every slot of the deployment on the slot's local date, in any order.
    """
    day = slot.date().isoformat()
    if slot <= min(slots_of_the_day, default=slot):
        return day
    return f"{day}-{slot:%H%M}{'-2' if _is_second_time_round(slot) else ''}"


def new_night(started: datetime | None = None) -> str:
    """A night id for a run by hand: its start (default now) in UTC, `YYYY-MM-DD-HHMMSS`.

    It sorts between the scheduled nights of its own and of the next day.
    """
    return (started or utc_now()).astimezone(UTC).strftime("%Y-%m-%d-%H%M%S")


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


def _is_second_time_round(slot: datetime) -> bool:
    return slot.fold == 1 and slot.utcoffset() != slot.replace(fold=0).utcoffset()
