"""What is wrong or odd in one test, each finding with the place where it was written."""

import difflib
from collections.abc import Iterable

from nightbridge.config.documents import Layered
from nightbridge.config.positions import KeyPath


class Findings:
    """Collects problems and warnings while a test is read, so that all of them are reported at once."""

    def __init__(self, source: Layered) -> None:
        self.source = source
        self.problems: list[str] = []
        self.warnings: list[str] = []

    def problem(self, path: KeyPath, message: str) -> None:
        """Note something that keeps the test from running."""
        self.problems.append(self._line(path, message))

    def problem_once(self, path: KeyPath, message: str) -> None:
        """Note a problem that may be found several times."""
        if (line := self._line(path, message)) not in self.problems:
            self.problems.append(line)

    def warn(self, path: KeyPath, message: str) -> None:
        """Add a warning; the test runs."""
        self.warnings.append(self._line(path, message))

    def unknown(self, path: KeyPath, known: Iterable[str]) -> None:
        """Note a key that does not exist, with the nearest one that does."""
        self.problem(path, unknown_key(str(path[-1]), known))

    def _line(self, path: KeyPath, message: str) -> str:
        return f"{self.source.where(path)}: {dotted(path)}: {message}"


def dotted(path: KeyPath) -> str:
    """`git_repos[0].url` for the path of a key."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".")


def unknown_key(key: str, known: Iterable[str]) -> str:
    """The message for a key that does not exist."""
    nearest = difflib.get_close_matches(key, sorted(known), n=1, cutoff=0.5)
    return f"unknown key; did you mean {nearest[0]!r}?" if nearest else "unknown key"
