"""What `nightbridge validate` finds in a file."""

from collections.abc import Callable, Sequence
from pathlib import Path

from pydantic import computed_field

from nightbridge import config
from nightbridge.errors import InvalidInput, NightbridgeError
from nightbridge.models import Checkout, ClusterLimits, Model, Site, TestDefinition
from nightbridge.rules import Violation, check_test, errors_of

CodeOf = Callable[[TestDefinition], Checkout]


class TestFindings(Model):
    """The findings of one test, or of a ConfigContainer."""

    id: str
    source: str
    findings: tuple[Violation, ...] = ()

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
    warnings: tuple[str, ...] = ()

    @computed_field  # type: ignore[prop-decorator]
    @property
    def valid(self) -> bool:
        """Whether the file can be read and each of its tests is valid."""
        return not self.error and all(test.valid for test in self.tests)


def check_file(
    file: Path, tests_dirs: Sequence[Path], limits: ClusterLimits | None = None, code_of: CodeOf | None = None
) -> FileReport:
    """Check a test or scenario file.

    Args:
        file: A TOML file.
        tests_dirs: Folders of the tests that it names.
        limits: The cluster's; its rules are left out when None.
        code_of: Checks out the code of a test; the rules that read code are left out when None.
    """
    try:
        scenario = config.load(file, tests_dirs=tests_dirs)
    except InvalidInput as error:
        return _unreadable(file, error)
    invalid = (
        TestFindings(id=test.id, source=str(test.source), findings=_reading_errors(test.violations))
        for test in scenario.invalid
    )
    checked = (
        TestFindings(id=test.id, source=str(test.source), findings=_check_test(test, limits, code_of))
        for test in scenario.tests
    )
    return FileReport(
        file=str(file), scenario=scenario.name, tests=(*invalid, *checked), warnings=tuple(scenario.warnings)
    )


def check_container_file(file: Path, overrides: Sequence[str], gpus: int | None = None) -> FileReport:
    """Check a ConfigContainer with these `KEY=VALUE` overrides, for so many GPUs."""
    from nightbridge.launch.config_container import read_container, with_overrides
    from nightbridge.rules import check_container

    try:
        found = check_container(with_overrides(read_container(file), overrides), gpus)
    except InvalidInput as error:
        return _unreadable(file, error)
    test = TestFindings(id="ConfigContainer", source=str(file), findings=tuple(found))
    return FileReport(file=str(file), tests=(test,))


def code_of_site(site: Site, block_value: Callable[[str], str] | None = None) -> CodeOf:
    """Return what checks out the code of a test into the site's workspace; branches are resolved once, now."""
    from nightbridge.nights.records import new_night
    from nightbridge.repos.clone import make_code
    from nightbridge.repos.remotes import git_logins
    from nightbridge.secrets import resolve_secret

    night, credentials = new_night(), site.git_credentials
    lines = resolve_secret(credentials, block_value) if credentials else ""

    def code_of(test: TestDefinition) -> Checkout:
        with git_logins(lines):
            return make_code(test, site, night)

    return code_of


def _check_test(test: TestDefinition, limits: ClusterLimits | None, code_of: CodeOf | None) -> tuple[Violation, ...]:
    """The rules that a test breaks; a pin that does not exist is one more."""
    try:
        return check_test(test, limits, code_of(test) if code_of else None)
    except InvalidInput as error:
        unpinned = Violation(rule="pinned-code", severity="error", fields=("git_repos",), message=str(error))
        return (unpinned, *check_test(test, limits))


def _unreadable(file: Path, error: InvalidInput) -> FileReport:
    message = NightbridgeError.__str__(error)
    return FileReport(file=str(file), error=message, findings=_reading_errors(error.violations))


def _reading_errors(messages: Sequence[str]) -> tuple[Violation, ...]:
    """What was wrong while the file was read, in the form of a broken rule."""
    return tuple(Violation(rule="configuration", severity="error", fields=(), message=message) for message in messages)
