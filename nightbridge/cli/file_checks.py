"""What `nightbridge validate` finds in a file."""

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from pydantic import computed_field

from nightbridge import config
from nightbridge.config.definitions import define_test
from nightbridge.config.documents import Document, Layer, Layered, check_name, printable_path
from nightbridge.config.scenarios import Histories, shared_histories
from nightbridge.errors import InvalidInput, NightbridgeError
from nightbridge.launch.config_container import read_container, with_overrides
from nightbridge.launch.shipped import shipped_configurations
from nightbridge.models import (
    Checkout,
    ClusterLimits,
    InvalidTest,
    Model,
    PinnedRepository,
    Site,
    TestDefinition,
    Violation,
)
from nightbridge.rules import check_container, check_read, errors_of, grid_of
from nightbridge.rules.rule import with_places

CodeOf = Callable[[TestDefinition], Checkout]


class TestFindings(Model):
    """The findings of one test, or of a ConfigContainer; `points` are those of its sweep, valid or not."""

    id: str
    source: str
    findings: tuple[Violation, ...] = ()
    points: int | None = None

    @computed_field  # type: ignore[prop-decorator]
    @property
    def valid(self) -> bool:
        """Whether the test may run: warnings allow that."""
        return not errors_of(self.findings)


class FileReport(Model):
    """The findings of one file."""

    file: str
    error: str | None = None
    findings: tuple[Violation, ...] = ()
    scenario: str | None = None
    tests: tuple[TestFindings, ...] = ()

    @computed_field  # type: ignore[prop-decorator]
    @property
    def valid(self) -> bool:
        """Whether the file can be read and each of its tests is valid."""
        return not self.error and all(test.valid for test in self.tests)


def check_file(
    file: Path,
    tests_dirs: Sequence[Path],
    limits: ClusterLimits | None = None,
    code_of: CodeOf | None = None,
    known: Histories | None = None,
) -> FileReport:
    """Check a test or scenario file.

    Args:
        file: The file.
        tests_dirs: Further directories of test files.
        limits: The cluster's; rules on them are left out without.
        code_of: Checks out the code of a test; rules on the pinned code are left out without.
        known: The histories of the scenarios that were checked before; see `shared_histories`.
    """
    try:
        scenario = config.load(file, tests_dirs=tests_dirs)
    except InvalidInput as error:
        return _unreadable(file, error)
    read: tuple[TestDefinition | InvalidTest, ...] = (*scenario.invalid, *scenario.tests)
    tests = []
    for test in read:
        points = grid_of(test).size if isinstance(test, TestDefinition) and test.axes else None
        findings = _check(test, limits, code_of)
        tests.append(TestFindings(id=test.id, source=test.source, findings=findings, points=points))
    shared: Iterable[Violation] = ()
    if known is not None and scenario.test_ids != (scenario.name,):  # a test file is there for scenarios to lay over
        shared = shared_histories(scenario, known)
    findings = (*scenario.findings, *shared)
    return FileReport(file=str(file), scenario=scenario.name, tests=tuple(tests), findings=findings)


def check_container_file(file: Path, overrides: Sequence[str], gpus: int | None = None) -> FileReport:
    """Check a ConfigContainer with these `KEY=VALUE` overrides, for so many GPUs."""
    try:
        check_name(file)
        container = read_container(file)
        found = [
            with_places(violation, container, str(file))
            for violation in check_container(with_overrides(container, overrides), gpus)
        ]
    except InvalidInput as error:
        return _unreadable(file, error)
    test = TestFindings(id="ConfigContainer", source=str(file), findings=tuple(found))
    return FileReport(file=str(file), tests=(test,))


def check_shipped(checkout: Path) -> FileReport:
    """Check every configuration that a checkout of Megatron-Bridge ships, against its own launcher and classes."""
    shipped = tuple(shipped_configurations(checkout))
    if not shipped:
        advice = "Name a checkout of Megatron-Bridge"
        raise InvalidInput("ships no configurations that can be read", subject=str(checkout), advice=advice)
    code = Checkout(megatron_bridge=PinnedRepository(url=str(checkout), ref="HEAD", commit="HEAD", path=checkout))
    tests = []
    for each in shipped:
        table = {
            "name": each.name,
            "test_template_name": "MegatronBridge",
            "git_repos": [{"url": "https://github.com/NVIDIA-NeMo/Megatron-Bridge.git"}],
            "harvest": {"checkpoint": "none"},
            "cmd_args": {"container_image": "nvcr.io/nvidia/nemo:dev", "max_steps": 50, **each.cmd_args},
        }
        file = str(checkout / each.place)
        test, _ = define_test(Layered([Layer(table, Document(Path(file), "", table))]), test_id=each.name, file=file)
        tests.append(TestFindings(id=each.name, source=file, findings=_check(test, None, lambda _: code)))
    return FileReport(file=str(checkout), tests=tuple(tests))


def code_of_site(site: Site, block_value: Callable[[str], str] | None = None) -> CodeOf:
    """Return what checks out the code of a test into the site's workspace; branches are resolved once, now."""
    from nightbridge.nights.records import new_night
    from nightbridge.repos.clone import make_code
    from nightbridge.repos.git import git_logins
    from nightbridge.secrets import resolve_secret

    night, credentials = new_night(), site.git_credentials
    lines = resolve_secret(credentials, block_value) if credentials else ""

    def code_of(test: TestDefinition) -> Checkout:
        with git_logins(lines):
            return make_code(test, site, night)

    return code_of


def _check(
    test: TestDefinition | InvalidTest, limits: ClusterLimits | None, code_of: CodeOf | None
) -> tuple[Violation, ...]:
    """Everything that is wrong with a test; a pin that does not exist, or holds no launcher, is one more."""
    readable = test.readable if isinstance(test, InvalidTest) else test
    try:
        return check_read(test, limits, code_of(readable) if code_of and readable else None)
    except InvalidInput as error:
        place = (readable.lines.get("git_repos", readable.source),) if readable else ()
        unpinned = Violation(rule="pinned-code", fields=("git_repos",), message=str(error), places=place)
        return (unpinned, *check_read(test, limits))


def _unreadable(file: Path, error: InvalidInput) -> FileReport:
    """What kept a file from being read, each with its place as far as it is known."""
    found = [each if isinstance(each, Violation) else Violation(message=str(each)) for each in error.violations]
    line = re.search(r"at line (\d+)", error.what)
    name = printable_path(file)
    place = f"{name}:{line[1]}" if line else name
    return FileReport(
        file=name,
        error=NightbridgeError.__str__(error),
        findings=tuple(found) or (Violation(message=error.what, places=(place,)),),
    )
