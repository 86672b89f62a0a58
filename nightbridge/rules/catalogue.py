"""Every rule in one list: what `nightbridge rules` and the reference show."""

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

from nightbridge.errors import InvalidInput
from nightbridge.models import READING_RULE, Model, Severity
from nightbridge.rules import profiles
from nightbridge.rules.rule import OLDEST, Need, Rule
from nightbridge.rules.sweeps import MAX_RUNS

_NEEDS: Mapping[Need, str] = {
    "nothing": "",
    "limits": "the cluster's limits: --cluster or --system",
    "checkout": "the pinned code: --pinned",
}


class RuleEntry(Model):
    """One rule, as people look it up.

    Attributes:
        id: Its stable name.
        severity: What breaking it means.
        applies_to: The files that it checks.
        versions: Versions of Megatron-Bridge for which it holds; empty for all.
        needs: What must be known besides the file before it can be checked; empty for nothing.
        fields: The fields that it reads.
        reason: Why it exists.
        source: Whose code or documentation it follows.
    """

    id: str
    severity: Severity
    applies_to: tuple[str, ...]
    versions: str = ""
    needs: str = ""
    fields: tuple[str, ...] = ()
    reason: str
    source: str


_READING = (
    RuleEntry(
        id=READING_RULE,
        severity="error",
        applies_to=("every file",),
        reason="A key or value that cannot be read would be ignored, or mean something else than was written.",
        source="nightbridge: the tables of the configuration reference",
    ),
    RuleEntry(
        id="pinned-code",
        severity="error",
        applies_to=("tests",),
        needs=_NEEDS["checkout"],
        fields=("git_repos", "nemo_run_repo"),
        reason="A pin that its repository does not have fails every night.",
        source="nightbridge: the repositories of the test",
    ),
    RuleEntry(
        id="sweep-size",
        severity="error",
        applies_to=("tests",),
        reason="A sweep grows with the product of its lists, and a night has an end.",
        source=f"nightbridge: at most {MAX_RUNS} runs of a test in a night",
    ),
)
"""What is found while files are read, besides the rules proper."""


def rule_entries() -> tuple[RuleEntry, ...]:
    """Every rule of every profile, each once."""
    merged: dict[str, RuleEntry] = {}
    for entry in (*_READING, *_entries()):
        known = merged.setdefault(entry.id, entry)
        if known is not entry:
            applies_to, fields = (*known.applies_to, *entry.applies_to), dict.fromkeys((*known.fields, *entry.fields))
            merged[entry.id] = known.model_copy(update={"applies_to": applies_to, "fields": tuple(fields)})
    return tuple(merged.values())


def find_rule(rule_id: str) -> RuleEntry:
    """The rule of this id.

    Raises:
        InvalidInput: There is none.
    """
    entries = {entry.id: entry for entry in rule_entries()}
    if rule_id not in entries:
        close = difflib.get_close_matches(rule_id, entries, n=1)
        advice = f"Did you mean {close[0]}?" if close else "`nightbridge rules` lists all of them"
        raise InvalidInput("no such rule", thing=rule_id, advice=advice)
    return entries[rule_id]


def _entries() -> Iterator[RuleEntry]:
    checked: Mapping[str, tuple[Rule[Any], ...]] = {
        "tests": profiles.RULES,
        'tests with compat = "cloudai"': profiles.CLOUDAI_RULES,
        "heterogeneous tests": profiles.HETERO_RULES,
        "ConfigContainer.yaml": profiles.CONTAINER_RULES,
    }
    for profile, rules in checked.items():
        for rule in rules:
            yield RuleEntry(
                id=rule.id,
                severity=rule.severity,
                applies_to=(profile,),
                versions=" ".join(
                    (f"from {rule.first}" * (rule.first != OLDEST), f"to {rule.last}" * (rule.last is not None))
                ).strip(),
                needs=_NEEDS[rule.needs],
                fields=rule.fields,
                reason=rule.reason,
                source=rule.source,
            )
