"""Test and scenario files to a `Scenario` and back, and a scenario to a night's runs in their dependencies' order."""

import os
import re
import shlex
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

from nightbridge.config.arguments import CMD_ARGS
from nightbridge.config.definitions import NEMO_RUN, define_test
from nightbridge.config.documents import (
    Document,
    KeyPath,
    Layer,
    Layered,
    finding,
    meant,
    read_document,
    toml_assignments,
    toml_value,
    unknown_key,
)
from nightbridge.config.schema import ENTRY_KEYS, REFUSED_FOR_CLOUDAI, SCENARIO_IGNORED, SCENARIO_KEYS
from nightbridge.errors import InvalidInput
from nightbridge.launch.resources import at_point
from nightbridge.models import (
    ClusterLimits,
    InvalidTest,
    RunDependency,
    RunSpec,
    Scenario,
    SweepAxis,
    TestDefinition,
    Violation,
    is_run_key,
)
from nightbridge.models.series import series_id
from nightbridge.numbers import format_count
from nightbridge.rules import points_of

_TEST_DIRS = (".", "test", "tests", "../test", "../tests")
"""Directories that are searched for a scenario's tests, relative to the scenario's own."""

LONGEST_NAME = 200
"""Bytes of a scenario's name. The files of its reports are called so, and a file system takes 255."""

_SYSTEM_KEYS = frozenset({"scheduler", "install_path", "default_partition", "cluster", "store", "workspace"})


def load(path: Path, *, tests_dirs: Sequence[Path] = ()) -> Scenario:
    """Read a test file, or a scenario file with the tests that it names.

    A test file is a scenario of one test. An invalid test goes to `Scenario.invalid` with all of its violations; the
    others stay. No defaults are added.

    Args:
        path: The file.
        tests_dirs: Further directories of test files, searched before those near the scenario.

    Raises:
        InvalidInput: The file cannot be read, is neither a test nor a scenario, or the scenario itself is wrong; or a
            directory does not exist.
    """
    for directory in tests_dirs:
        if not Path(directory).is_dir():
            raise InvalidInput("no such directory", subject=str(directory), advice="Name one that holds test files")
    return scenario_of(read_document(Path(path)), tests_dirs=tests_dirs)


def scenario_of(document: Document, *, tests_dirs: Sequence[Path] = ()) -> Scenario:
    """As `load`, from a file that has been read."""
    if "Tests" in document.table:
        return _scenario(document, tests_dirs)
    if "cmd_args" in document.table or "test_template_name" in document.table:
        return _single_test(document)
    if _SYSTEM_KEYS & document.table.keys():
        raise InvalidInput(
            "this is a system or site file, not a test", subject=str(document.path), advice="Pass it with --system"
        )
    what = "neither a test (with [cmd_args]) nor a scenario (with [[Tests]])"
    raise InvalidInput(what, subject=str(document.path), advice="See conf/examples for both")


def only_tests(scenario: Scenario, wanted: Collection[str]) -> Scenario:
    """These tests of a scenario, with those that they depend on or are judged by.

    Raises:
        InvalidInput: The scenario has no test of one of these names; each is reported.
    """
    by_id = {test.id: test for test in scenario.tests}
    known = set(scenario.test_ids)
    if unknown := [name for name in wanted if name not in known]:
        advice = f"It has {', '.join(sorted(known))}"
        raise InvalidInput("no such test", subject=scenario.source, violations=unknown, advice=advice)
    chosen: set[str] = set()
    waiting = set(wanted)
    while waiting:
        chosen |= waiting
        tests = [by_id[name] for name in waiting & by_id.keys()]
        judges = {name for test in tests for name in (test.gate.reference, test.gate.canary) if name}
        waiting = ({each.id for test in tests for each in test.dependencies} | judges) & known - chosen
    valid = tuple(test for test in scenario.tests if test.id in chosen)
    invalid = tuple(test for test in scenario.invalid if test.id in chosen)
    return scenario.model_copy(update={"tests": valid, "invalid": invalid})


Histories = dict[tuple[str, ...], tuple[str, tuple[object, ...]]]
"""What has each history so far: the file of its scenario, and the code and image that it asks for."""


def shared_histories(scenario: Scenario, known: Histories) -> Iterator[Violation]:
    """Warn of tests that share a history with another scenario's although they ask for other code or another image.

    The slower of the two then regresses every night. On which cluster a scenario runs is not written in it.

    Args:
        scenario: The scenario.
        known: What those that were looked at before have; this one's is added.
    """
    shared: dict[str, list[TestDefinition]] = {}
    for test in scenario.tests:
        series = series_id(RunSpec(scenario=scenario.name, night="any", test=test), "")
        # Sweeps, and what a test says of its topology: other ones are not compared.
        history = (series, str((*test.axes, *test.drawn)), *test.sbatch_args, str(test.gate.warmup_steps))
        asked = (test.git_repos, test.nemo_run_repo, test.cmd_args.get("container_image"))
        file, theirs = known.setdefault(history, (scenario.source, asked))
        if theirs != asked and file != scenario.source:
            shared.setdefault(file, []).append(test)
    for file, tests in shared.items():
        more = f" and {format_count(len(tests) - 1, 'other test')}" if len(tests) > 1 else ""
        message = (
            f"{file} has {tests[0].id!r}{more} with other code or another image: on one cluster both scenarios share a "
            "history, in which the slower one regresses every night; give each an id of its own"
        )
        yield finding(scenario.source, ("Tests",), message, "warning")


def sweeps_nodes(scenario: Scenario) -> bool:
    """Whether a test sweeps over its number of nodes, so that its GPUs depend on the cluster's nodes."""
    return any(axis.field == "num_nodes" for test in scenario.tests for axis in test.axes)


def runs(scenario: Scenario, night: str, limits: ClusterLimits | None = None) -> tuple[RunSpec, ...]:
    """The runs of a scenario in one night, in order: every point of every test repeated for its `iterations`.

    A test comes after those that it depends on, so that whoever starts the runs in this order never waits for a later
    one.

    Points that break a rule are left out; `check_test` reports them. A test has 1000 points at most: `check_scenario`
    sets one with more aside. The limits of the cluster are queried if a test `sweeps_nodes`.
    """
    made: dict[str, tuple[RunSpec, ...]] = {}
    for test in in_order(scenario.tests):
        after = tuple(
            RunDependency(
                type=dependency.type,
                id=dependency.id,
                run_keys=tuple(run.run_key for run in made.get(dependency.id, ())),
            )
            for dependency in test.dependencies
        )
        made[test.id] = tuple(
            RunSpec(
                scenario=scenario.name,
                night=night,
                test=at_point(test, point, limits=limits) if point else test,
                sweep_point=dict(point),
                iteration=iteration,
                after=after,
            )
            for point in points_of(test, limits)
            for iteration in range(1, test.iterations + 1)
        )
    return tuple(run for test_runs in made.values() for run in test_runs)


def _single_test(document: Document) -> Scenario:
    name = document.table.get("name")
    test_id = name.strip() if isinstance(name, str) and name.strip() else document.path.stem
    source = Layered([Layer(document.table, document)])
    test, warnings = define_test(source, test_id=test_id, file=str(document.path))
    if isinstance(test, TestDefinition) and test.dependencies:
        message = "has no effect: the file contains a single test"
        warnings = (*warnings, finding(document.where(("dependencies",)), ("dependencies",), message, "warning"))
        test = test.model_copy(update={"dependencies": ()})
    return _assembled(test_id, document, [test], warnings)


def _assembled(
    name: str, document: Document, tests: Iterable[TestDefinition | InvalidTest], warnings: Iterable[Violation]
) -> Scenario:
    if why := _no_name_of_files(name):
        problem = _problem(document, ("name",), f"{why}; the reports of its nights are files of this name")
        raise InvalidInput("the scenario is not valid", subject=str(document.path), violations=[problem])
    tests = list(tests)
    return Scenario(
        name=name,
        source=str(document.path),
        tests=_with_canary(_valid(tests)),
        invalid=tuple(test for test in tests if isinstance(test, InvalidTest)),
        findings=tuple(dict.fromkeys(warnings)),
    )


def _no_name_of_files(name: str) -> str:
    """Why no file can have a name; empty where one can."""
    if len(name.encode()) > LONGEST_NAME:
        return f"has {len(name.encode())} bytes, and {LONGEST_NAME} is the most"
    if not {"", ".", ".."}.isdisjoint(name.split("/")):
        return "has an empty part, or a part of dots, between slashes"
    return "has control characters" if re.search(r"[\x00-\x1f\x7f]", name) else ""


def _valid(tests: Iterable[TestDefinition | InvalidTest]) -> list[TestDefinition]:
    return [test for test in tests if isinstance(test, TestDefinition)]


def _with_canary(tests: Sequence[TestDefinition]) -> tuple[TestDefinition, ...]:
    """Each test's gate knows the scenario's first canary, unless it names another one itself."""
    canary = next((test.id for test in tests if test.canary), None)
    return tuple(
        test
        if canary is None or test.canary or test.gate.canary
        else test.model_copy(update={"gate": test.gate.model_copy(update={"canary": canary})})
        for test in tests
    )


# --- scenarios -------------------------------------------------------------------------------------------------------


def _scenario(document: Document, tests_dirs: Sequence[Path]) -> Scenario:
    entries = document.table["Tests"]
    problems = list(_scenario_problems(document, entries))
    warnings = [
        finding(document.where((key,)), (key,), SCENARIO_IGNORED[key], "warning")
        for key in document.table
        if key in SCENARIO_IGNORED
    ]
    tests: list[TestDefinition | InvalidTest] = []
    library = _Library(document.path, tests_dirs)
    for index, entry in enumerate(entries if isinstance(entries, list) else ()):
        if isinstance(entry, dict):
            test, found = _entry_test(document, index, entry, library)
            tests.append(test)
            warnings.extend(found)
    problems += [] if problems else dependency_problems(document, [library.completed(entry) for entry in entries])
    if any(test.compat == "cloudai" for test in _valid(tests)):
        message = 'has no effect here, and compat = "cloudai" promises CloudAI\'s own; remove one of them'
        problems += [_problem(document, (key,), message) for key in document.table if key in REFUSED_FOR_CLOUDAI]
    if problems:
        problems.extend(found for test in tests if isinstance(test, InvalidTest) for found in test.findings)
        raise InvalidInput("the scenario is not valid", subject=str(document.path), violations=problems)
    warnings += _unknown_judges(tests)
    return _assembled(str(document.table["name"]).strip(), document, tests, warnings)


def _unknown_judges(tests: Iterable[TestDefinition | InvalidTest]) -> Iterator[Violation]:
    """Warn of a canary or a reference that no test of the scenario is, nor the key of a run."""
    ids = {test.id for test in tests}
    for test in _valid(tests):
        for key, name in (("canary", test.gate.canary), ("reference", test.gate.reference)):
            if name and name not in ids and not is_run_key(name):
                message = (
                    f"no test of this scenario is called {name!r}{meant(name, ids)}; another scenario has to run it"
                )
                yield finding(test.lines.get(f"gate.{key}") or test.source, ("gate", key), message, "warning")


def _problem(document: Document, path: KeyPath, message: str) -> Violation:
    return finding(document.where(path), path, message)


def _scenario_problems(document: Document, entries: Any) -> Iterator[Violation]:
    """Problems of the scenario as a whole, which make its tests indistinguishable."""
    for key in document.table:
        if key not in SCENARIO_KEYS:
            yield _problem(document, (key,), unknown_key(key, SCENARIO_KEYS))
    name = document.table.get("name")
    if not isinstance(name, str) or not name.strip():
        yield _problem(document, ("name",), "a scenario needs a name")
    if not isinstance(entries, list) or not entries or not all(isinstance(entry, dict) for entry in entries):
        yield _problem(document, ("Tests",), "must be one or more [[Tests]] tables")
        return
    ids = Counter(str(entry.get("id", "")).strip() for entry in entries)
    for index, entry in enumerate(entries):
        path, test_id = ("Tests", index, "id"), entry.get("id")
        if not isinstance(test_id, str) or not test_id.strip():
            yield _problem(document, path, "every test needs an id, as text")
        elif ids[test_id.strip()] > 1:
            yield _problem(document, path, f"{test_id!r} occurs twice")


def _entry_test(
    document: Document, index: int, entry: dict[str, Any], library: "_Library"
) -> tuple[TestDefinition | InvalidTest, tuple[Violation, ...]]:
    test_id = str(entry.get("id", "")).strip() or f"Tests[{index}]"
    own = Layer({key: value for key, value in entry.items() if key not in ENTRY_KEYS}, document, ("Tests", index))
    name = entry.get("test_name")
    if name is None:
        return define_test(Layered([own]), test_id=test_id, file=str(document.path))
    where = document.where(("Tests", index, "test_name"))
    try:
        if "name" in entry:
            raise InvalidInput("is set together with name; name a test, or define one here, not both")
        found = library.find(name)
    except InvalidInput as error:
        problem = finding(where, ("test_name",), str(error))
        return InvalidTest(id=test_id, source=str(document.path), findings=(problem,)), ()
    source = Layered([Layer(found.table, found), own])
    return define_test(source, test_id=test_id, file=str(found.path))


class _Library:
    """The test files that a scenario can name, read when the first of them is needed."""

    def __init__(self, scenario: Path, tests_dirs: Sequence[Path]) -> None:
        self._scenario = scenario
        near = [scenario.parent / directory for directory in _TEST_DIRS]
        self._groups = ([Path(directory) for directory in tests_dirs], near)
        self._unread: list[str] = []

    @cached_property
    def _found(self) -> list[dict[str, list[Document]]]:
        return [self._read(group) for group in self._groups]

    def find(self, name: object) -> Document:
        """Return the test file of that name; a directory of --tests-dir wins over those nearby."""
        if not isinstance(name, str) or not name.strip():
            raise InvalidInput("must be the name of a test, as text")
        for tests in self._found:
            documents = tests.get(name.strip(), [])
            if len(documents) > 1:
                files = " and ".join(str(document.path) for document in documents)
                raise InvalidInput(f"{name!r} names two tests: {files}", advice="Rename one")
            if documents:
                return documents[0]
        raise InvalidInput(self._not_found(name))

    def completed(self, entry: dict[str, Any]) -> dict[str, Any]:
        """An entry with the dependencies of its test file, where it has none of its own."""
        if "test_name" not in entry or "dependencies" in entry:
            return entry
        try:
            return {"dependencies": self.find(entry["test_name"]).table.get("dependencies"), **entry}
        except InvalidInput:
            return entry  # told with the test

    def _not_found(self, name: str) -> str:
        known = [test for tests in self._found for test in tests]
        hint = meant(name, known) or "; add a directory with --tests-dir"
        directories = ", ".join(str(path) for group in self._groups for path in group if path.is_dir())
        unread = f" (unreadable: {'; '.join(self._unread)})" if self._unread else ""
        return f"no test named {name!r} in {directories}{unread}{hint}"

    def _read(self, directories: Iterable[Path]) -> dict[str, list[Document]]:
        tests: dict[str, list[Document]] = {}
        here = Path.cwd()
        found = (path for directory in directories for path in sorted(directory.glob("*.toml")))
        # Path.resolve raises at a link to itself, up to Python 3.12.
        for path in dict.fromkeys(map(Path, map(os.path.realpath, found))):
            if path == self._scenario.resolve():
                continue
            try:
                document = read_document(path.relative_to(here) if path.is_relative_to(here) else path)
            except InvalidInput as error:
                self._unread.append(error.happened)
                continue
            name = document.table.get("name")
            if isinstance(name, str) and "Tests" not in document.table and "cmd_args" in document.table:
                tests.setdefault(name.strip(), []).append(document)
        return tests


def dependency_problems(document: Document, entries: Sequence[Mapping[str, Any]]) -> list[Violation]:
    """Problems between the entries: an unknown test, or a test that waits for itself, directly or in a circle.

    A problem of one entry, such as an unknown type, is reported with its test.
    """
    ids = [str(entry["id"]).strip() for entry in entries]
    problems = []
    graph: dict[str, set[str]] = {}
    for index, (test_id, entry) in enumerate(zip(ids, entries, strict=True)):
        dependencies = entry.get("dependencies")
        for number, dependency in enumerate(dependencies if isinstance(dependencies, list) else ()):
            named = dependency.get("id") if isinstance(dependency, Mapping) else None
            if not isinstance(named, str):
                continue
            if (named := named.strip()) in ids:
                graph.setdefault(test_id, set()).add(named)
            else:
                path = ("Tests", index, "dependencies", number, "id")
                problems.append(_problem(document, path, f"no test has the id {named!r}{meant(named, ids)}"))
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        circle = " waits for ".join(repr(test_id) for test_id in reversed(error.args[1]))
        problems.append(_problem(document, ("Tests",), f"{circle}; remove one of these dependencies"))
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


# --- a scenario as a file ---------------------------------------------------------------------------------------------

_ENV_VARS = "extra_env_vars"


def scenario_toml(scenario: Scenario) -> str:
    """Write a scenario's valid tests as a scenario file; of an invalid one there is nothing to write.

    Every test is written out whole, so that reading it gives the same tests again. Overrides are laid over, older
    spellings are the current ones, directories of tests are not needed. A secret stays a reference. What has no effect
    is not written.
    """
    tests = "\n".join(_entry_toml(test) for test in scenario.tests)
    return f"name = {toml_value(scenario.name)}\n\n{tests}"


def _entry_toml(test: TestDefinition) -> str:
    """The test's own keys first, then its tables; empty ones and defaults are left out, but for the required one."""
    keys = {key: value for key, value in _keys(test).items() if value not in (None, "", (), [])}
    tables = {key: value for key, value in _tables(test).items() if value or key == CMD_ARGS}
    lines = ["[[Tests]]", *toml_assignments(keys)]
    for repository in test.git_repos:
        lines += ["", "[[Tests.git_repos]]", *toml_assignments(repository.model_dump(exclude_none=True))]
    for name, table in tables.items():
        lines += ["", f"[Tests.{name}]", *toml_assignments(table)]
    for dependency in test.dependencies:
        lines += ["", "[[Tests.dependencies]]", *toml_assignments(dependency.model_dump())]
    return "\n".join(lines) + "\n"


def _keys(test: TestDefinition) -> dict[str, Any]:
    nodes = next((axis.values for axis in test.axes if axis.field == "num_nodes"), None)
    return {
        "id": test.id,
        "name": test.name,
        "description": test.description,
        "test_template_name": test.test_template_name,
        "time_limit": test.time_limit,
        "iterations": test.iterations,
        "canary": test.canary,
        "compat": test.compat,
        "num_nodes": nodes,
        # Nodes and excluded nodes are options of sbatch by now.
        "extra_srun_args": shlex.join(test.sbatch_args),
        "extra_container_mounts": test.extra_container_mounts,
    }


def _tables(test: TestDefinition) -> dict[str, dict[str, Any]]:
    axes = (*test.axes, *test.drawn)
    return {
        "nemo_run_repo": {} if test.nemo_run_repo == NEMO_RUN else test.nemo_run_repo.model_dump(exclude_none=True),
        CMD_ARGS: {**test.cmd_args, **dict(_swept(axes, CMD_ARGS))},
        _ENV_VARS: {
            **test.extra_env_vars,
            **dict(_swept(axes, _ENV_VARS)),
            **{name: f"{ref.source}:{ref.name}" for name, ref in test.secrets.items()},
        },
        "extra_cmd_args": dict(test.extra_cmd_args),
        "harvest": test.harvest.model_dump(mode="json", exclude_defaults=True),
        "gate": test.gate.model_dump(mode="json", exclude_defaults=True),
        "sweep": test.sweep.model_dump(mode="json", exclude_defaults=True),
        "env_params": {axis.name: {"weights": axis.weights} if axis.weights else {} for axis in test.drawn},
    }


def _swept(axes: Iterable[SweepAxis], table: str) -> Iterator[tuple[str, list[Any]]]:
    for axis in axes:
        section, _, name = axis.field.partition(".")
        if section == table:
            yield name, list(axis.values)
