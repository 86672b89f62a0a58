"""The program itself: help, completion, start-up, and how every error ends."""

import importlib.metadata
import os
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import httpx
import pytest

from nightbridge.cli import file_checks
from nightbridge.errors import PermanentError, TransientError
from nightbridge.models import StoreSettings, VerdictStatus
from nightbridge.store.directory import DirectoryStore
from tests.builders import store_night
from tests.nightbridge.cli.conftest import NIGHTLY, TEST, Program


def test_version_is_the_installed_one(nightbridge: Program) -> None:
    assert nightbridge("--version") == (0, f"nightbridge {importlib.metadata.version('nightbridge')}\n", "")


@pytest.mark.parametrize("command", [(), ("validate",), ("accept",)])
def test_h_is_short_for_help(nightbridge: Program, command: tuple[str, ...]) -> None:
    assert nightbridge(*command, "-h") == nightbridge(*command, "--help")


@pytest.mark.parametrize(
    ("command", "told"),
    [
        (("logs",), "Missing argument 'RUN'. See nightbridge logs --help."),
        (("ls", "--limits", "2"), "See nightbridge ls --help."),
        (("accept", "llama-small", "--why"), "Option '--why' requires an argument. See nightbridge accept --help."),
        ((), "Missing command. See nightbridge --help."),
    ],
)
def test_a_wrong_command_line_is_answered_with_the_help_that_explains_it(
    nightbridge: Program, command: tuple[str, ...], told: str
) -> None:
    code, _, said = nightbridge(*command)

    assert code == 2
    assert told in said


def test_a_shell_completes_commands_and_their_options() -> None:
    def completions(words: str, index: int) -> list[str]:
        request = {"_NIGHTBRIDGE_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(index)}
        program = Path(sys.executable).with_name("nightbridge")
        finished = subprocess.run([program], env=os.environ | request, capture_output=True, text=True, check=True)
        return finished.stdout.split()

    assert completions("nightbridge hist", 1) == ["history"]
    assert completions("nightbridge validate --pin", 2) == ["--pinned"]


# --- how a command ends -----------------------------------------------------------------------------------------------


def refused(status: int) -> httpx.HTTPStatusError:
    """An answer of Prefect's server; what is between user and host, or behind a question mark, may be secret."""
    request = httpx.Request("POST", "http://user:hidden@prefect/api/deployments/?key=hidden")
    return httpx.HTTPStatusError("no", request=request, response=httpx.Response(status, request=request))


@pytest.mark.parametrize(
    ("error", "code", "told"),
    [
        (PermanentError("no such thing", subject="x", advice="Look"), 4, "nightbridge: x: no such thing. Look"),
        (TransientError("nobody answers", subject="slurm"), 4, "nightbridge: slurm: nobody answers"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (ValueError("defect"), 4, "internal error: ValueError: defect"),
        (
            refused(500),
            4,
            "POST http://prefect/api/deployments/: Prefect's server answered 500. Look at the server's log",
        ),
        (refused(401), 4, "Prefect's server answered 401. Set PREFECT_API_AUTH_STRING"),
        (PermissionError(13, "Permission denied", "/x"), 4, "nightbridge: /x: Permission denied. Check the path"),
    ],
)
def test_every_error_is_one_message_and_an_exit_code(
    nightbridge: Program, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, told: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(file_checks, "check_file", fail)

    ended, out, err = nightbridge("validate", TEST)

    assert (ended, out) == (code, "")
    assert told in err
    assert "hidden" not in err


@pytest.mark.parametrize("arguments", [[], ["frobnicate"], ["validate"], ["render", "--frob", "x"]])
def test_a_wrong_command_line_is_invalid_input(nightbridge: Program, arguments: list[str]) -> None:
    code, out, err = nightbridge(*arguments)

    assert (code, out) == (2, "")
    assert err.startswith("nightbridge: ")
    assert len(err.splitlines()) == 1


# --- start-up ---------------------------------------------------------------------------------------------------------


HEAVY = ("prefect", "pandas", "boto3", "numpy", "matplotlib", "pyarrow", "tenacity", "jinja2", "flows")
UNREAD = (
    "nightbridge.config.scenarios",
    "nightbridge.rules",
    "nightbridge.gate.run_verdict",
    "nightbridge.report.night_page",
)


def test_commands_that_must_start_fast_import_nothing_heavy() -> None:
    commands = [["--help"], ["validate", "--help"], ["validate", NIGHTLY, TEST], ["render", TEST]]
    code = (
        "import sys\nfrom nightbridge.cli import main as cli\n"
        f"for arguments in {commands!r}:\n"
        "    ended = cli.run(arguments)\n"
        f"    heavy = [name for name in {HEAVY!r} if name in sys.modules]\n"
        "    if heavy or ended:\n"
        "        sys.exit(f'{arguments}: {ended}, imported {heavy}')"
    )

    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)

    assert (ended.returncode, ended.stderr) == (0, "")


def test_what_lists_the_store_reads_no_scenario_and_draws_no_page(tmp_path: Path) -> None:
    store = DirectoryStore(StoreSettings(url=f"file://{tmp_path}/store"))
    store_night(store, "2026-11-20", {"llama-small": VerdictStatus.PASSED}, tmp_path)
    code = (
        "import sys\nfrom nightbridge.cli import main as cli\n"
        "for command in ('history', 'ls', 'status'):\n"
        f"    ended = cli.run([command, '--workspace', {str(tmp_path)!r}])\n"
        f"    unwanted = [name for name in {(*HEAVY, *UNREAD)!r} if name in sys.modules]\n"
        "    if unwanted or ended:\n"
        "        sys.exit(f'{command}: {ended}, imported {unwanted}')"
    )

    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)

    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize(
    "setting",
    [
        None,
        # A process that imports Prefect.
        pytest.param(("prefect.toml", '[api]\nurl = "http://127.0.0.1:9/api"\n'), marks=pytest.mark.thorough),
    ],
)
def test_a_cluster_that_does_not_exist_is_told_without_prefect_unless_its_files_name_a_server(
    tmp_path: Path, setting: tuple[str, str] | None
) -> None:
    if setting:
        (tmp_path / setting[0]).write_text(setting[1])
    code = (
        "import sys\nfrom nightbridge.cli import main as cli\n"
        f"ended = cli.run(['validate', {str(Path(TEST).absolute())!r}, '--cluster', 'nosuch'])\n"
        "print(ended, 'prefect' in sys.modules)"
    )
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}

    ended = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**variables, "PREFECT_HOME": str(tmp_path / "prefect")},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )

    assert ended.stdout == ("4 True\n" if setting else "2 False\n")
    assert ("Give local, slurm, pyslurm, auto" in ended.stderr) == (setting is None)


def test_the_entry_point_ends_with_the_commands_exit_code() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "nightbridge", "validate", "nowhere.toml"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )

    assert ended.returncode == 2
    assert "nowhere.toml: no such file" in ended.stdout


LEFT_BEHIND = """
import logging, sys, threading
from nightbridge.cli.main import main

class ToServer(logging.Handler):
    def emit(self, record):
        try:
            raise RuntimeError("can't register atexit after shutdown")
        except RuntimeError:
            self.handleError(record)

def left_behind():
    threading.main_thread().join()
    logging.getLogger("prefect").error("Crash detected!")
    print("logged")

logging.getLogger("prefect").addHandler(ToServer())
threading.Thread(target=left_behind).start()
sys.argv = ["nightbridge", "--version"]
main()
"""


def test_what_a_thread_logs_while_the_program_ends_is_no_traceback() -> None:
    ended = subprocess.run([sys.executable, "-c", LEFT_BEHIND], capture_output=True, text=True, timeout=60, check=True)

    assert ended.stdout.endswith("logged\n")
    assert ended.stderr == ""


@pytest.mark.parametrize("options", [(), ("--json",), ("--format", "github")], ids=["text", "json", "github"])
def test_a_reader_that_ends_early_changes_no_exit_code(options: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "nightbridge", "validate", "nowhere.toml", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()

        assert (process.stderr.read(), process.wait(timeout=300)) == (b"", 2)


def test_a_closed_stdout_changes_no_exit_code() -> None:
    command = f"exec {shlex.quote(sys.executable)} -m nightbridge rules >&-"
    ended = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE, timeout=300, check=False)

    assert ended.returncode == 0


def test_a_terminal_that_is_gone_changes_no_exit_code() -> None:
    terminal, ours = os.openpty()
    os.close(terminal)
    command = [sys.executable, "-m", "nightbridge", "validate", "nowhere.toml"]
    with os.fdopen(ours, "w") as stdout:
        ended = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, timeout=300, check=False)

    assert (ended.returncode, ended.stderr) == (2, b"")


# --- the usual site ---------------------------------------------------------------------------------------------------


def site_file(path: Path, workspace: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'workspace = "{workspace}"\n')
    return path


def test_a_site_is_taken_from_the_variable_the_folder_and_the_user_in_this_order(
    nightbridge: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    own = site_file(tmp_path / "config" / "nightbridge" / "site.toml", f"{tmp_path}/own")
    assert nightbridge("nights")[2] == f"site: {own}\nno night in file://{tmp_path}/own/store yet\n"

    site_file(tmp_path / "site.toml", f"{tmp_path}/folder")
    assert nightbridge("nights")[2] == f"site: site.toml\nno night in file://{tmp_path}/folder/store yet\n"

    named = site_file(tmp_path / "named.toml", f"{tmp_path}/named")
    monkeypatch.setenv("NIGHTBRIDGE_SITE", str(named))
    assert nightbridge("nights")[2] == f"site: {named}\nno night in file://{tmp_path}/named/store yet\n"

    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NIGHTBRIDGE_SITE", "~/named.toml")
    assert nightbridge("nights")[2].startswith(f"site: {named}\n")


def test_an_option_that_names_another_place_keeps_the_usual_site_out(
    nightbridge: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NIGHTBRIDGE_SITE", str(site_file(tmp_path / "named.toml", f"{tmp_path}/named")))

    assert nightbridge("nights", "--workspace", "ws")[2] == f"no night in file://{tmp_path}/ws/store yet\n"


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("list", "ls"), ("version", "--version"), ("undo", "accept --undo"), ("results", "history"), ("prun", "prune")],
)
def test_an_unknown_command_leads_to_the_one_that_is_meant(nightbridge: Program, typed: str, meant: str) -> None:
    code, _, err = nightbridge(typed)

    assert code == 2
    assert f"No such command '{typed}'. Did you mean `nightbridge {meant}`?" in err


_INTERRUPTED_IMPORT = """
import os, runpy, signal, sys

class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == "typer":
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupting())
runpy.run_module("nightbridge", run_name="__main__")
"""


def test_ctrl_c_has_its_exit_code_while_the_commands_are_loaded() -> None:
    """An installed program begins there, too."""
    command = [sys.executable, "-c", _INTERRUPTED_IMPORT]

    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    assert (ended.returncode, ended.stderr) == (130, "nightbridge: interrupted\n")
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"nightbridge": "nightbridge.__main__:start"}
