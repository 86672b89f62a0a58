"""The program, also as `python -m nightbridge`: Ctrl-C has its exit code while the commands are loaded, too."""

import signal
import sys
from typing import NoReturn


def start() -> NoReturn:
    """Load the command line and run it."""
    try:
        from nightbridge.cli.main import main

        main()
    except KeyboardInterrupt:  # before a command could answer it
        print("nightbridge: interrupted", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)


if __name__ == "__main__":
    start()
