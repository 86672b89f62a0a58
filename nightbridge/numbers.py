"""Numbers as text: read within bounds from what others wrote, such as a job's log, and written for people.

Reading is never an error: Python refuses to convert more than 4,300 digits, takes `²` for a digit and `inf` for a
number, and no table takes more than 64 bits.
"""

from datetime import timedelta

MAX_DIGITS = 18
"""Of a whole number: whatever has as many fits in 64 bits."""

_MAX_LENGTH = 64

SMALLEST_SHOWN_CHANGE = 0.0005
"""Below this a change is rounding, and a sign in front of it would only mislead."""


def whole_number(text: str) -> int | None:
    """A whole number of up to `MAX_DIGITS` digits, with white space around it or not; None for anything else."""
    digits = text.strip()
    return int(digits) if digits.isascii() and digits.isdecimal() and len(digits) <= MAX_DIGITS else None


def real_number(text: str) -> float | None:
    """A number as a log prints it, NaN and infinities too; None for anything else."""
    try:
        return float(text) if len(text) <= _MAX_LENGTH else None
    except ValueError:
        return None


MAX_WITHOUT_EXPONENT = 1e9
"""From here on, as of a loss that diverged, a number has an exponent: in full it is wider than a page."""


def format_percent(share: float) -> str:
    """A share as a percentage, `5 %` or `2.5 %`."""
    percent = share * 100
    form = ",.0f" if 999.5 <= abs(percent) < MAX_WITHOUT_EXPONENT else ".3g"
    return f"{percent:{form}} %"


def format_change(change: float | None) -> str:
    """A signed relative change, `+8.1 %`; empty where there is none."""
    if change is None:
        return ""
    if abs(change) < SMALLEST_SHOWN_CHANGE:
        return "±0.0 %"
    percent = abs(change) * 100
    form = ",.1f" if percent < MAX_WITHOUT_EXPONENT else ".3g"
    return f"{'+' if change > 0 else '−'}{percent:{form}} %"


def format_value(value: float | None, unit: str = "") -> str:
    """A value with four significant digits and its unit; a dash where there is none."""
    if value is None:
        return "–"
    number = f"{value:,.0f}" if 1000 <= abs(value) < MAX_WITHOUT_EXPONENT else f"{value:#.4g}".rstrip(".")
    return f"{number} {unit}".rstrip()


def format_count(count: int, noun: str) -> str:
    """A count with its noun, `1 run` or `12 runs`."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def format_duration(duration: timedelta) -> str:
    """A duration in words: `8 h 12 min`, `45 min`, `30 s`."""
    seconds = round(duration.total_seconds())
    if seconds < 60:
        return f"{seconds} s"
    hours, minutes = divmod(seconds // 60, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"
