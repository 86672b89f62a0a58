"""The program, also as `python -m nightbridge`: Ctrl-C has its exit code while the commands are loaded, too."""

import atexit
import gc
import signal
import sys
from typing import NoReturn

_OBJECTS_PER_COLLECTION = 50_000
"""Python's 700 has all that is imported walked through again and again, a tenth of the start of a night."""


def start() -> NoReturn:
    """Load the command line and run it."""
    gc.set_threshold(_OBJECTS_PER_COLLECTION, *gc.get_threshold()[1:])
    atexit.register(gc.freeze)  # nor is it walked through once more at the end
    try:
        from nightbridge.cli.main import main

        main()
    except KeyboardInterrupt:  # before a command could answer it
        print("nightbridge: interrupted", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)


if __name__ == "__main__":
    start()
