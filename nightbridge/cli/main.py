"""The program `nightbridge`: its commands, and the exit code that each error ends with.

A command returns its exit code, or raises a `NightbridgeError` that becomes one message. Whatever is heavier than typer
is imported inside the commands, so that `--help` and `validate` start at once.
"""

import io
import logging
import re
import signal
import sys
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import cache
from typing import Annotated, Any, NoReturn

import typer
import typer.main

from nightbridge import __version__
from nightbridge.cli import causes, first_steps, history, runs, store, validate
from nightbridge.cli.options import EXIT_CANCELLED, EXIT_INTERNAL, EXIT_INVALID
from nightbridge.cli.output import note, write_nowhere
from nightbridge.errors import InvalidInput, NightbridgeError, RunCancelled
from nightbridge.processes import end_after_signals

EXIT_INTERRUPTED, EXIT_UNREAD, EXIT_TERMINATED = 128 + signal.SIGINT, 128 + signal.SIGPIPE, 128 + signal.SIGTERM

COMMANDS: Mapping[str, Callable[..., int | None]] = {
    "init": first_steps.init,
    "import-script": first_steps.import_script,
    "explain": first_steps.explain,
    "validate": validate.validate,
    "render": validate.render,
    "rules": validate.rules,
    "schema": validate.schema,
    "events": store.events,
    "run": runs.run_scenario,
    "nights": runs.list_nights,
    "ls": runs.list_runs,
    "status": runs.status,
    "logs": runs.logs,
    "cancel": runs.cancel,
    "history": history.history,
    "migrate": history.migrate,
    "compare": history.compare,
    "accept": history.accept,
    "golden": history.golden,
    "parity": history.parity,
    "bisect": causes.bisect,
    "attribute": causes.attribute,
    "try": causes.try_change,
    "demo": first_steps.demo,
    "checkpoint": store.checkpoint,
    "verify": store.verify,
    "fetch": store.fetch,
    "du": store.du,
    "prune": store.prune,
    "deploy": first_steps.deploy,
    "watchdog": runs.watchdog,
    "doctor": first_steps.doctor,
}
"""Every command, in the order of `--help`."""

_OTHERS_SAY: Mapping[str, str] = {
    "ls": "list jobs runs ps queue",
    "history": "tests trend results",
    "logs": "log",
    "logs -f": "tail",
    "status --watch": "watch",
    "cancel": "stop kill abort",
    "run": "start submit",
    "run FILE --night ID --retry": "rerun",
    "run FILE --night ID": "resume",
    "status": "show report",
    "validate": "lint check",
    "render": "plan",
    "compare": "diff",
    "accept --undo": "undo revert",
    "accept --list": "decisions",
    "fetch": "download get restore",
    "prune": "clean gc delete",
    "du": "size disk",
    "--version": "version",
    "--help": "help",
    "init": "new create",
    "explain": "describe",
    "attribute": "blame cause",
}
MEANT = {word: command for command, words in _OTHERS_SAY.items() for word in words.split()}
"""What people type who know another tool, and the command that does it."""

app = typer.Typer(
    name="nightbridge",
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for _name, _command in COMMANDS.items():
    app.command(_name)(_command)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"nightbridge {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[  # is_eager: answered before the rest of the command line is parsed
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Nightly regression runs of Megatron-Bridge: from a TOML file to a verdict."""


def main() -> NoReturn:
    """Run the command line; every error becomes one message on stderr and a documented exit code."""
    # Prefect calls this handler again after its own; without one the process would end before it prints anything.
    signal.signal(signal.SIGTERM, _terminate)
    end_after_signals()
    if isinstance(sys.stdout, io.TextIOWrapper):
        # JSON is UTF-8 (RFC 8259), and a test's name that the locale lacks must not fail a night at its last line.
        # A path may hold any bytes.
        sys.stdout.reconfigure(encoding="utf-8", errors="backslashreplace")
    code = run(sys.argv[1:])
    # What a thread that was left behind logs while Python ends, Prefect's handler cannot send: no error of the user's.
    logging.raiseExceptions = False
    sys.exit(code)


def _terminate(_number: int, _frame: object) -> NoReturn:
    raise runs.Terminated


# All commands with their options, which typer would make anew for each call.
_program = cache(typer.main.get_command)


def run(arguments: list[str]) -> int:
    """Run one command and return its exit code."""
    try:
        code = _program(app)(args=arguments, standalone_mode=False)
        if code == EXIT_INTERRUPTED:  # typer's answer to Ctrl-C
            raise KeyboardInterrupt
    except SystemExit as ended:  # typer's, after completions, and where what reads `logs --follow` has ended
        if not ended.code:
            return 0
        write_nowhere(sys.stdout)
        return EXIT_UNREAD
    except (Exception, KeyboardInterrupt, runs.Terminated) as error:
        message, code = _ending(error, *(name for name in arguments[:1] if name in COMMANDS))
        note(f"nightbridge: {message}")
    return code if isinstance(code, int) else 0


def _ending(error: BaseException, *command: str) -> tuple[str, int]:
    """The message and the exit code of an error; `command` is empty where none is named."""
    match error:
        case InvalidInput():
            return str(error), EXIT_INVALID
        case RunCancelled():
            return str(error), EXIT_CANCELLED
        case NightbridgeError():
            return str(error), EXIT_INTERNAL
        case OSError():  # a file or folder that this machine does not let us read or write
            reason = error.strerror or f"{type(error).__name__}: {error}"
            advice = "Check the path, and this user's rights to it"
            return f"{error.filename}: {reason}. {advice}" if error.filename else reason, EXIT_INTERNAL
        case KeyboardInterrupt() | typer.Abort():
            return "interrupted; a job that was submitted keeps running", EXIT_INTERRUPTED
        case runs.Terminated():
            return "terminated; a job that was submitted keeps running", EXIT_TERMINATED
    if status := getattr(getattr(error, "response", None), "status_code", None):  # an HTTPStatusError of httpx
        return _refused_request(error, status), EXIT_INTERNAL
    if format_message := getattr(error, "format_message", None):  # an error of typer's, for a wrong command line
        message = format_message().rstrip(".")
        if unknown := re.match(r"No such command '([^']*)'", message):
            return f"{unknown[0]}. {_command_meant(unknown[1])}See nightbridge --help.", EXIT_INVALID
        return f"{message}. See {' '.join(('nightbridge', *command))} --help.", EXIT_INVALID
    return f"internal error: {type(error).__name__}: {error}", EXIT_INTERNAL


def _refused_request(error: Any, status: int) -> str:
    """The message of an answer of Prefect's server that is neither expected nor a success."""
    request = f"{error.request.method} {error.request.url.copy_with(query=None, userinfo=b'')}"
    advice = "Set PREFECT_API_AUTH_STRING" if status in (401, 403) else "Look at the server's log, and at its proxy's"
    return f"{request}: Prefect's server answered {status}. {advice}"


def _command_meant(name: str) -> str:
    """The command that somebody means by a name, as a sentence; empty where none is near."""
    near = MEANT.get(name) or next(iter(get_close_matches(name, COMMANDS, n=1)), "")
    return f"Did you mean `nightbridge {near}`? " if near else ""


if __name__ == "__main__":
    main()
