"""A rule and what it finds."""

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Literal

from nightbridge.launch.versions import HEAD, Version
from nightbridge.models import Model
from nightbridge.rules.context import Facts

Severity = Literal["error", "warning"]
Need = Literal["nothing", "limits", "checkout"]

OLDEST = Version(0, 0)


class Violation(Model):
    """One rule broken by one run.

    Attributes:
        rule: The rule's id; `nightbridge rules ID` describes it.
        severity: An error keeps the run from starting, a warning does not.
        fields: The fields that the rule looked at.
        message: What is wrong, with the values, and the way out.

    """

    rule: str
    severity: Severity
    fields: tuple[str, ...]
    message: str

    def __str__(self) -> str:
        return f"{self.message} [{self.rule}]"


@dataclass(frozen=True, slots=True)
class Rule:
    """A named rule.

    Attributes:
        id: Its name, stable: users look it up and scripts match it.
        severity: What breaking it means.
        fields: The fields that it reads; it has nothing to say where none of them changed.
        check: Yields a message for each way in which a run breaks it; its docstring is the reason for the rule.
        needs: What must be known before it can be checked.
        first: First version of Megatron-Bridge for which it holds.
        last: Last version for which it holds.
        alone: Whether it looks at every value by itself, so that no combination of values is worth asking it.
        source: Whose code or documentation the rule follows.
        why: The reason, where the check has no docstring of its own.

    """

    id: str
    severity: Severity
    fields: tuple[str, ...]
    check: Callable[[Facts], Iterable[str]]
    needs: Need = "nothing"
    first: Version = OLDEST
    last: Version = HEAD
    alone: bool = False
    source: str = ""
    why: str = ""

    @property
    def reason(self) -> str:
        """Why the rule exists, in one sentence."""
        return self.why or inspect.getdoc(self.check) or ""

    def applies(self, facts: Facts) -> bool:
        """Whether what it needs is known and the run's version is in its range."""
        return self.holds(facts.version, facts.available)

    def holds(self, version: Version, available: frozenset[str]) -> bool:
        """The same for all runs of a version of which the same things are known (`Facts.available`)."""
        return self.needs in available and self.first <= version <= self.last

    def violation(self, message: str) -> Violation:
        """What the rule found, with the id to look it up."""
        return Violation(rule=self.id, severity=self.severity, fields=self.fields, message=message)


def from_source(source: str, *rules: Rule) -> tuple[Rule, ...]:
    """The rules, each with the source that they share."""
    return tuple(replace(rule, source=source) for rule in rules)
