"""Dependencies between the tests of a scenario: what is wrong with them, and the order that they make."""

from collections.abc import Iterator, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from typing import Any

from nightbridge.config.documents import Document
from nightbridge.config.findings import unknown_key
from nightbridge.models import TestDefinition


def dependency_problems(document: Document, entries: Sequence[Mapping[str, Any]]) -> list[str]:
    """What is wrong between the entries: an unknown test, a test that waits for itself, directly or in a circle.

    What is wrong with an entry alone, such as an unknown type, is its test's own problem.
    """
    ids = [str(entry["id"]).strip() for entry in entries]
    problems = []
    graph: dict[str, set[str]] = {}
    for index, (test_id, entry) in enumerate(zip(ids, entries, strict=True)):
        for number, named in _named(entry):
            where = document.where(("Tests", index, "dependencies", number, "id"))
            path = f"{where}: Tests[{index}].dependencies[{number}].id"
            if named not in ids:
                problems.append(f"{path}: no test has the id {named!r}{_hint(named, ids)}")
            else:
                graph.setdefault(test_id, set()).add(named)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        circle = " waits for ".join(repr(test_id) for test_id in reversed(error.args[1]))
        problems.append(f"{document.where(('Tests',))}: Tests: {circle}; remove one of these dependencies")
    return problems


def in_order(tests: Sequence[TestDefinition]) -> Iterator[TestDefinition]:
    """The tests, each after those that it depends on, and else in the order in which they were written."""
    left = {test.id: test for test in tests}

    def with_those_before(test: TestDefinition) -> Iterator[TestDefinition]:
        if left.pop(test.id, None) is None:
            return
        for dependency in test.dependencies:
            if dependency.id in left:
                yield from with_those_before(left[dependency.id])
        yield test

    for test in tests:
        yield from with_those_before(test)


def _named(entry: Mapping[str, Any]) -> Iterator[tuple[int, str]]:
    """The position of each dependency of an entry, and the test that it names."""
    dependencies = entry.get("dependencies")
    for number, dependency in enumerate(dependencies if isinstance(dependencies, list) else ()):
        if isinstance(dependency, Mapping) and isinstance(dependency.get("id"), str):
            yield number, dependency["id"].strip()


def _hint(named: str, ids: Sequence[str]) -> str:
    return unknown_key(named, ids).removeprefix("unknown key")
