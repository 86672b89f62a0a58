"""Time limits of tests, as CloudAI reads them, and the forms of sbatch(1) that it does not know."""

import re
from functools import lru_cache

from nightbridge.errors import InvalidInput

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_WITH_UNIT = re.compile(r"^(\d{1,6})([smhdw])$", re.IGNORECASE)
_CLOCK = re.compile(r"^(?:(\d{1,5})-)?(\d{1,6})(?::(\d{1,2}))?(?::(\d{1,2}))?$")


@lru_cache(maxsize=256)
def seconds_of(text: str) -> int:
    """Return the seconds of a time limit.

    `hours:minutes:seconds`, `days-hours:minutes:seconds` and a number with one of the units s, m, h, d, w, as in
    CloudAI; `minutes`, `days-hours`, `days-hours:minutes`, as in sbatch(1); and `hours:minutes`, as in CloudAI, which
    sbatch would take for minutes and seconds.

    Raises:
        InvalidInput: It is none of these, or no time at all.

    """
    text = text.strip()
    if match := _WITH_UNIT.match(text):
        seconds = int(match[1]) * _UNITS[match[2].lower()]
    elif match := _CLOCK.match(text):
        days, *parts = match.groups()
        seconds = _clock_seconds(None if days is None else int(days), [int(part) for part in parts if part is not None])
    else:
        seconds = 0
    if seconds <= 0:
        raise InvalidInput("not a time limit", thing=repr(text), advice="Write HH:MM:SS, D-HH:MM:SS or minutes")
    return seconds


def _clock_seconds(days: int | None, parts: list[int]) -> int:
    if days is not None:
        hours, minutes, seconds = (*parts, 0, 0)[:3]
        return days * 86400 + hours * 3600 + minutes * 60 + seconds
    if len(parts) == 3:
        return parts[0] * 3600 + parts[1] * 60 + parts[2]
    if len(parts) == 2:
        return parts[0] * 3600 + parts[1] * 60
    return parts[0] * 60


def is_read_differently_by_sbatch(text: str) -> bool:
    """Whether it is `hours:minutes`, which sbatch takes for `minutes:seconds`."""
    return text.count(":") == 1 and "-" not in text


def clock(seconds: int) -> str:
    """Write seconds as `HH:MM:SS`, with `D-` in front from one day on."""
    days, rest = divmod(seconds, 86400)
    hours, rest = divmod(rest, 3600)
    return (f"{days}-" if days else "") + f"{hours:02}:{rest // 60:02}:{rest % 60:02}"
