"""Numbers in text that others wrote, such as a job's log: read within bounds, and never an error.

Python refuses to convert more than 4,300 digits, takes `²` for a digit and `inf` for a number, and no table takes more
than 64 bits.
"""

MAX_DIGITS = 18
"""Of a whole number: whatever has as many fits in 64 bits."""

_MAX_LENGTH = 64


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
