"""The night as CI systems read it, held against the form that they agree on."""

import re
from datetime import UTC, datetime
from xml.etree import ElementTree

import pytest

from nightbridge.models import Verdict, VerdictStatus
from nightbridge.report.tables import junit_kind, junit_xml
from tests.builders import make_verdict

# The schema that Jenkins, GitLab and GitHub's readers have in common: of each element the attributes that it must and
# may have, and its children in their order, each with how often it may occur.
COUNTS = {"tests": r"\d+", "failures": r"\d+", "errors": r"\d+", "skipped": r"\d+"}
REQUIRED: dict[str, dict[str, str]] = {
    "testsuites": {},
    "testsuite": {"name": ".+", "tests": r"\d+"},
    "properties": {},
    "property": {"name": ".+", "value": "(?s).*"},
    "testcase": {"name": ".+", "classname": ".+"},
    "failure": {},
    "error": {},
    "skipped": {},
    "system-out": {},
}
OPTIONAL: dict[str, dict[str, str]] = {
    "testsuites": {"name": ".+", "time": r"[\d.]+", **COUNTS},
    "testsuite": {"time": r"[\d.]+", "timestamp": r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d", "hostname": ".+", **COUNTS},
    "testcase": {"time": r"[\d.]+", "file": ".+"},
    "failure": {"message": "(?s).*", "type": ".+"},
    "error": {"message": "(?s).*", "type": ".+"},
    "skipped": {"message": "(?s).*"},
}
CHILDREN: dict[str, str] = {
    "testsuites": r"(testsuite )*",
    "testsuite": r"(properties )?(testcase )*(system-out )?(system-err )?",
    "properties": r"(property )*",
    "testcase": r"(skipped |failure |error )?(system-out )?(system-err )?",
}


def check(element: ElementTree.Element) -> None:
    """Fail where an element is not as the schema has it."""
    required, optional = REQUIRED[element.tag], OPTIONAL.get(element.tag, {})
    assert not required.keys() - set(element.keys()), f"{element.tag} lacks an attribute"
    for name, value in element.attrib.items():
        assert re.fullmatch({**optional, **required}[name], value), f"{element.tag} has {name}={value!r}"
    assert re.fullmatch(CHILDREN.get(element.tag, ""), "".join(f"{child.tag} " for child in element))
    for child in element:
        check(child)


def verdict_of(status: VerdictStatus, *reasons: str, test_id: str = "llama3-8b") -> Verdict:
    return make_verdict(status, *reasons or (f"because it {status.value}",), test_id=test_id)


def read(*verdicts: Verdict, scenario: str = "nightly") -> ElementTree.Element:
    document = junit_xml(
        scenario,
        "2026-11-21",
        verdicts,
        report="s3://bucket/report.html",
        written_at=datetime(2026, 11, 21, tzinfo=UTC),
    )
    root = ElementTree.fromstring(document)
    check(root)
    return root


@pytest.mark.parametrize("status", VerdictStatus)
def test_every_verdict_has_a_case_of_the_schema(status: VerdictStatus) -> None:
    (case,) = read(verdict_of(status)).iter("testcase")

    assert case.get("name") == "llama3-8b-2026-11-21-0123456789"
    assert case.get("classname") == "nightly.llama3-8b"
    assert "kept at s3://bucket/nightly/runs/llama3-8b" in (case.findtext("system-out") or "")


@pytest.mark.parametrize("status", VerdictStatus)
def test_what_ends_with_an_exit_code_is_a_failure_or_an_error_and_nothing_else_is(status: VerdictStatus) -> None:
    verdict = verdict_of(status)
    (case,) = read(verdict).iter("testcase")

    bad = case.find("failure") is not None or case.find("error") is not None
    assert bad == (verdict.exit_code != 0)


def test_every_status_has_its_kind() -> None:
    kinds: dict[str | None, set[str]] = {"failure": set(), "error": set(), "skipped": set(), None: set()}
    for status in VerdictStatus:
        kinds[junit_kind(status)].add(status.value)

    assert kinds == {
        "failure": {"regressed", "suspicious", "unstable", "short", "failed"},
        "error": {"cancelled", "infrastructure", "invalid"},
        "skipped": {"no_baseline"},
        None: {"passed", "improved", "insufficient_data"},
    }


def test_a_failure_says_why() -> None:
    root = read(verdict_of(VerdictStatus.REGRESSED, "step time regressed by +8.0 %", "nothing pinned has changed"))

    failure = next(root.iter("failure"))
    assert failure.get("type") == "regressed"
    assert "step time regressed by +8.0 %" in (failure.get("message") or "")
    assert failure.text == "step time regressed by +8.0 %\nnothing pinned has changed"


def test_the_counts_are_those_of_the_cases() -> None:
    statuses = [*VerdictStatus, VerdictStatus.PASSED]
    root = read(*(verdict_of(status, test_id=f"test-{number}") for number, status in enumerate(statuses)))

    for element in (root, root[0]):
        assert element.get("tests") == str(len(list(root.iter("testcase")))) == str(len(statuses))
        for attribute, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
            assert element.get(attribute) == str(len(list(root.iter(tag))))


def test_the_gravest_comes_first() -> None:
    root = read(verdict_of(VerdictStatus.PASSED, test_id="a"), verdict_of(VerdictStatus.REGRESSED, test_id="z"))

    assert [case.get("classname") for case in root.iter("testcase")] == ["nightly.z", "nightly.a"]


def test_night_and_report_are_properties() -> None:
    properties = {found.get("name"): found.get("value") for found in read().iter("property")}

    assert properties == {"night": "2026-11-21", "report": "s3://bucket/report.html"}


def test_any_text_of_a_log_makes_a_document_that_can_be_read() -> None:
    hostile = "<b>&\"' ]]> \x1b[31mred\x00\x0b \ud800 \ufffe Süd"
    root = read(verdict_of(VerdictStatus.FAILED, hostile, test_id="a<b"), scenario='n"<&>')

    text = next(root.iter("failure")).text or ""
    assert text.startswith("<b>&\"' ]]> \ufffd[31mred")
    assert text.endswith("Süd")
