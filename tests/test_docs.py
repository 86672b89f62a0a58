"""The README and the documentation: commands exist and work, links lead somewhere, and the site builds."""

import os
import pkgutil
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime
from functools import cache
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from nightbridge.cli import main as cli
from nightbridge.gate.accept import accept
from nightbridge.gate.run_verdict import compare
from nightbridge.history.history_store import put_row
from nightbridge.history.rows import row_of
from nightbridge.models import ClusterSettings, RunRecord, StoreSettings, utc_now
from nightbridge.nights.records import NightStart, NightTest, record_start
from nightbridge.slurm.attempt_files import open_attempt
from nightbridge.store.directory import DirectoryStore
from tests.builders import commit_run, make_record

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("docs/**/*.md"), *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md"))])

_BLOCK = re.compile(r"^ *```sh\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
_COMMAND = re.compile(r"(?:\w+=\S+ )*(?:\.venv/bin/)?(?:nightbridge|make|pytest|python) +\S")
_SETTING = re.compile(r"[A-Z_]+=")


def _commands_of(page: Path) -> Iterator[str]:
    """Every line of a shell block, and every span that is a command; one that only names a command asks for its help."""
    text = page.read_text(encoding="utf-8")
    for block in _BLOCK.findall(text):
        yield from (line.strip() for line in block.replace("\\\n", " ").splitlines() if line.strip())
    for span in _SPAN.findall(_BLOCK.sub("", text)):
        if _COMMAND.match(span):
            yield f"{span} --help" if re.fullmatch(r"nightbridge [a-z]+", span) else span


COMMANDS = sorted({(str(page.relative_to(ROOT)), command) for page in PAGES for command in _commands_of(page)})


def _words(command: str) -> list[str]:
    """A command without settings of the environment, without the virtual environment's folder, without its comment."""
    words = shlex.split(command, comments=True)
    while words and _SETTING.match(words[0]):
        words.pop(0)
    return [words[0].removeprefix(".venv/bin/"), *words[1:]] if words else []


# --- commands exist --------------------------------------------------------------------------------------------------


@cache
def _program() -> Any:
    return typer.main.get_command(cli.app)


def _parse_nightbridge(arguments: list[str]) -> None:
    """Parse a command line as the program does, without running it."""
    group = _program()
    if arguments[0].startswith("-"):
        assert arguments[0] in {"-h", "--help", *(name for option in group.params for name in option.opts)}
        return
    with group.make_context("nightbridge", list(arguments), resilient_parsing=True) as context:
        try:
            name, command, rest = group.resolve_command(context, list(arguments))
            if rest != ["--help"]:
                command.make_context(name, rest, parent=context)
        except Exception as error:
            raise AssertionError(str(error)) from error


def _check_make(arguments: list[str]) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = re.findall(r"^([a-z][\w-]*):", makefile, re.MULTILINE)
    for word in arguments:
        name, is_setting, _ = word.partition("=")
        known = f"$({name})" in makefile if is_setting else name in targets
        assert known, f"make has no {word}"


def _check_python(arguments: list[str]) -> None:
    """A script of ours exists and has the options; a module of ours exists."""
    if arguments[0] == "-m":
        assert find_spec(arguments[1])
        return
    source = (ROOT / arguments[0]).read_text(encoding="utf-8")
    assert [word for word in arguments[1:] if word.startswith("--") and f'"{word}"' not in source] == []


def _check_pytest(arguments: list[str]) -> None:
    assert [word for word in arguments if "/" in word and not (ROOT / word.split("::")[0]).exists()] == []


_CHECKS = {"nightbridge": _parse_nightbridge, "make": _check_make, "python": _check_python, "pytest": _check_pytest}


@pytest.mark.parametrize(("page", "command"), COMMANDS)
def test_every_command_exists_with_its_options(page: str, command: str) -> None:
    words = _words(command)

    if words and words[0] in _CHECKS:
        _CHECKS[words[0]](words[1:])


def test_the_workflow_and_the_hooks_run_commands_that_exist() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8"))
    steps = [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    entries = [hook["entry"].split()[0] for repository in hooks["repos"] for hook in repository["hooks"]]

    targets = [words[1:] for step in steps if (words := _words(step))[0] == "make"]
    assert targets
    for target in targets:
        _check_make([*target])
    assert [entry for entry in entries if not Path(sys.executable).with_name(Path(entry).name).exists()] == []


@pytest.mark.parametrize(
    "wrong",
    [
        *("nightbridge frobnicate", "nightbridge validate --frob x", "nightbridge compare", "nightbridge --frob"),
        *("make frob", "make night FROB=1", ".venv/bin/pytest tests/test_frob.py"),
        ".venv/bin/python benchmarks/startup.py --frob",
    ],
)
def test_the_check_finds_what_does_not_exist(wrong: str) -> None:
    words = _words(wrong)

    with pytest.raises(AssertionError):
        _CHECKS[words[0]](words[1:])


# --- commands work ---------------------------------------------------------------------------------------------------

_WITHOUT_CLUSTER = frozenset(
    {
        *("validate", "render", "rules", "history", "compare", "verify", "fetch", "nights", "status", "logs", "cancel"),
        *("parity", "accept", "prune", "--version"),
    }
)
"""Commands that end in seconds, on a store made for the test."""


def _runnable() -> list[str]:
    commands = {shlex.join(words[1:]) for _, command in COMMANDS if (words := _words(command))[:1] == ["nightbridge"]}
    return sorted(
        command
        for command in commands
        if (words := shlex.split(command))[:1] and words[0] in _WITHOUT_CLUSTER and not _asks_elsewhere(words)
    )


def _asks_elsewhere(words: list[str]) -> bool:
    """Whether it asks a real cluster or the network, stands for any file of a person's, takes a checkpoint along, or
    goes on until a run has ended.
    """
    return (
        not {"--pinned", "--help", "-f", "--watch"}.isdisjoint(words)
        or (words[0] == "validate" and "--system" in words)
        or not {"FILE", "checkpoint"}.isdisjoint(words)
    )


@pytest.fixture(scope="module")
def first_site(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, dict[str, str]]:
    """A folder with the samples, a workspace and a store of four nights, a copy, and what stands for placeholders."""
    used = tmp_path_factory.mktemp("site") / "used"
    used.mkdir()
    (used / "conf").symlink_to(ROOT / "conf")
    workspace = used / ".nightbridge"
    store = DirectoryStore(StoreSettings(url=f"file://{workspace}/store"))
    records: list[RunRecord] = [
        make_record(None, f"2026-11-{day}", test_id="llama-small").model_copy(
            update={"series": "llama-small-0123456789ab"}
        )
        for day in (20, 21, 22, 23)
    ]
    for record in records:
        commit_run(store, record)
        put_row(store, row_of(record, compare(record, ())))
        record_start(store, _start_of(record, workspace))
        open_attempt(workspace, record.spec.run_key, ClusterSettings())
    accept(store, records[-1].spec.run_key, "acknowledged", who="Ada", why="known")
    last, before = records[-1].spec.run_key, records[0].spec.run_key
    words = {"RUN_KEY": last, "OTHER_RUN_KEY": before, "RUN_A": last, "RUN_B": before, "ID": "gpus-divide"}
    return used, shutil.copytree(used, used.with_name("copy"), symlinks=True), words


@pytest.fixture
def used_site(first_site: tuple[Path, Path, dict[str, str]], monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """That folder as it was at first, to work in; returns what stands for the placeholders."""
    used, copy, words = first_site
    shutil.rmtree(used)
    shutil.copytree(copy, used, symlinks=True)
    monkeypatch.chdir(used)
    return words


def _start_of(record: RunRecord, workspace: Path) -> NightStart:
    begun: datetime = utc_now()
    return NightStart(
        night=record.spec.night,
        scenario="practice-nightly",
        cluster="local",
        workspace=workspace,
        begun_at=begun,
        tests=(NightTest(test_id=record.spec.test.id, run_key=record.spec.run_key),),
    )


@pytest.mark.parametrize("command", _runnable())
def test_what_needs_no_cluster_runs(
    used_site: dict[str, str], command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [used_site.get(word, word) for word in shlex.split(command)]

    code = cli.run(words)

    assert (code, capsys.readouterr().err if code else "") == (0, "")


def test_enough_of_the_commands_are_run() -> None:
    assert {shlex.split(command)[0] for command in _runnable()} == _WITHOUT_CLUSTER


# --- names of the code -----------------------------------------------------------------------------------------------

_PATH = re.compile(r"(?:nightbridge|flows|tasks|blocks|tests|conf|benchmarks|docs)/[\w./-]+")
_NAME = re.compile(r"(?:nightbridge|flows|tasks|blocks)(?:\.\w+)+")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_modules_and_functions_that_are_named_exist(page: Path) -> None:
    spans = _SPAN.findall(re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL))

    assert [span for span in spans if _PATH.fullmatch(span) and not (ROOT / span).exists()] == []
    for span in spans:
        # Prefect's events are named like modules.
        if _NAME.fullmatch(span) and span.partition(".")[2] not in {"verdict", "night", "watchdog", "end", "news"}:
            pkgutil.resolve_name(span)


# --- links and the site ----------------------------------------------------------------------------------------------


def _links_of(page: Path) -> list[str]:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    return [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"])
def test_a_link_leads_to_a_file(name: str) -> None:
    page = ROOT / name

    missing = [link for link in _links_of(page) if not (page.parent / link.split("#")[0]).exists()]

    assert missing == []


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


class _Resources(HTMLParser):
    """Collects what a page loads from another host."""

    def __init__(self) -> None:
        super().__init__()
        self.foreign: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        loaded = {"script": "src", "img": "src", "link": "href", "iframe": "src"}.get(tag)
        self.foreign += [str(value) for name, value in attrs if name == loaded and "//" in str(value)]


@pytest.mark.thorough
def test_the_site_builds_without_a_warning_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    built = subprocess.run(
        [Path(sys.executable).with_name("mkdocs"), "build", "--strict", "--quiet", "--site-dir", tmp_path],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )

    assert (built.returncode, built.stdout, built.stderr) == (0, "", "")
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) > 20
    for page in pages:
        resources = _Resources()
        resources.feed(page.read_text(encoding="utf-8"))
        assert (page.name, resources.foreign) == (page.name, [])


@pytest.mark.parametrize(
    ("page", "content"),
    [
        ("configuration", ["checkpoint", "pipeline_model_parallel_layout", "endpoint_url", "lr_wsd_decay_style"]),
        ("cli", ["nightbridge validate", "--pinned", "nightbridge rules"]),
        ("rules", ["gpus-divide", "container-world-size", "cloudai-18-deepseek-layout"]),
        ("errors", ["TransientError", "130"]),
        ("blocks", ["Slurm Cluster", "nightbridge-harvest-store"]),
        ("python", ["nightly_regression", "run_pipeline"]),
    ],
)
def test_the_reference_is_made_from_the_code(page: str, content: list[str], reference: dict[str, str]) -> None:
    assert [text for text in content if text not in reference[page]] == []


def test_every_table_that_the_reference_of_keys_refers_to_is_there(reference: dict[str, str]) -> None:
    page = reference["configuration"]
    named = set(re.findall(r"See `(\w+)` below", page)) | {"successors"}
    assert {
        name for name in named if not re.search(rf"^#+ \[(\w+\.)?{name}\b|`\[cmd_args\.{name}\]`", page, re.M)
    } == set()


@pytest.fixture(scope="module")
def reference() -> dict[str, str]:
    """The generated pages, as Markdown."""
    pages = runpy.run_path(str(ROOT / "docs" / "reference.py"))["PAGES"]
    return {name: "\n".join(page()) for name, page in pages.items()}
