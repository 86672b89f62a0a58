"""A clock that a test sets, for processes that are started with it: Debian's libfaketime.

It goes on at its own pace; what measures how long something takes, the monotonic clock, is left alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path


def faketime_missing_reason() -> str | None:
    """Say why no clock can be set here; None when one can."""
    return None if _library() else "not installed: libfaketime"


def _library() -> Path | None:
    return next(iter(sorted(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"))), None)


@dataclass
class FakeClock:
    """What time it is for the processes whose environment has `environment`; `path` holds how far they are ahead."""

    path: Path
    ahead: timedelta = timedelta()

    @property
    def environment(self) -> Mapping[str, str]:
        library = _library()
        assert library is not None, "libfaketime is not installed"
        return {
            "LD_PRELOAD": str(library),
            "FAKETIME_TIMESTAMP_FILE": str(self.path),
            # Seconds for which a process goes by what it has read of the file.
            "FAKETIME_CACHE_DURATION": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            # Otherwise what waits with a timeout, as every Python thread does for its turn, is woken at once, all the time.
            "FAKETIME_FORCE_MONOTONIC_FIX": "0",
            "FAKETIME_DONT_RESET": "1",
            "PYTHONPATH": str(Path(__file__).with_name("fake_clock_site")),
            # Files keep their times: the file system's clock is another one.
            "NO_FAKE_STAT": "1",
        }

    def now(self) -> datetime:
        return datetime.now(UTC) + self.ahead

    def set(self, time: datetime) -> None:
        """Set it, also back; processes notice within about a second."""
        self.ahead = time - datetime.now(UTC)
        temporary = self.path.with_suffix(".new")
        temporary.write_text(f"{self.ahead.total_seconds():+f}\n")
        temporary.replace(self.path)
