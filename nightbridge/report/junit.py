"""The night as JUnit XML, the form in which CI systems take test results.

One `testsuite` per night, one `testcase` per verdict. What CI systems agree on is used and nothing more: the counts of
a suite, and in a case one of `failure` (the code is worse, or did not run to its end), `error` (nothing is known about
the code) and `skipped` (there was nothing to compare with yet).
"""

import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Literal
from xml.etree import ElementTree

from nightbridge.models import Verdict, VerdictStatus
from nightbridge.report.tables import STATUS_WORDS, gravest_first, short_reason

Kind = Literal["failure", "error", "skipped"]

# A cancelled run is an error, since CI systems show a skipped test as a good one.
KINDS: Mapping[VerdictStatus, Kind | None] = {
    VerdictStatus.PASSED: None,
    VerdictStatus.IMPROVED: None,
    VerdictStatus.NO_BASELINE: "skipped",
    VerdictStatus.INSUFFICIENT_DATA: None,
    VerdictStatus.REGRESSED: "failure",
    VerdictStatus.SUSPICIOUS: "failure",
    VerdictStatus.UNSTABLE: "failure",
    VerdictStatus.SHORT: "failure",
    VerdictStatus.FAILED: "failure",
    VerdictStatus.CANCELLED: "error",
    VerdictStatus.INFRASTRUCTURE: "error",
    VerdictStatus.INVALID: "error",
}

# What XML 1.0 cannot hold, escaped or not: control characters of logs, halves of surrogate pairs.
_NOT_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def junit_xml(
    scenario: str, night: str, verdicts: Sequence[Verdict], *, report: str = "", written_at: datetime | None = None
) -> bytes:
    """The verdicts of a night as a JUnit document, the gravest first.

    Args:
        scenario: The scenario's name; the suite is called so.
        night: Night id.
        verdicts: One per run. Points of a sweep have one test id, so cases are distinguished by their run keys.
        report: Where the night's report is.
        written_at: Time of the suite; left out when None.
    """
    kinds = [KINDS[verdict.status] for verdict in verdicts]
    counts = {
        "tests": str(len(verdicts)),
        "failures": str(kinds.count("failure")),
        "errors": str(kinds.count("error")),
        "skipped": str(kinds.count("skipped")),
    }
    root = ElementTree.Element("testsuites", {"name": "nightbridge", **counts})
    suite = ElementTree.SubElement(root, "testsuite", {"name": _text(scenario), **counts})
    if written_at is not None:
        suite.set("timestamp", written_at.replace(tzinfo=None).isoformat(timespec="seconds"))
    properties = ElementTree.SubElement(suite, "properties")
    for name, value in (("night", night), ("report", report)):
        ElementTree.SubElement(properties, "property", {"name": name, "value": _text(value)})
    for verdict in gravest_first(verdicts):
        _add_case(suite, scenario, verdict)
    ElementTree.indent(root)
    document: bytes = ElementTree.tostring(root, encoding="utf-8", xml_declaration=True)
    return document + b"\n"


def _add_case(suite: ElementTree.Element, scenario: str, verdict: Verdict) -> None:
    case = ElementTree.SubElement(
        suite, "testcase", {"classname": _text(f"{scenario}.{verdict.test_id}"), "name": _text(verdict.run_key)}
    )
    kind = KINDS[verdict.status]
    reasons = _text("\n".join(verdict.reasons))
    if kind:
        detail = ElementTree.SubElement(case, kind, {"message": _text(short_reason(verdict))})
        if kind != "skipped":
            detail.set("type", verdict.status.value)
            detail.text = reasons
    lines = [STATUS_WORDS[verdict.status].label, reasons]
    if verdict.prefix:
        lines.append(_text(f"kept at {verdict.store_url}/{verdict.prefix}"))
    ElementTree.SubElement(case, "system-out").text = "\n".join(line for line in lines if line)


def _text(text: str) -> str:
    return _NOT_XML.sub("\ufffd", text)
