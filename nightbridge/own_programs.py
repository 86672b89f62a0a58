"""Modules of this package as programs of their own. Standard library only: some of them must start quickly."""

import sys
from collections.abc import Sequence
from pathlib import Path


def own_program(module: str, arguments: Sequence[str] = (), *, python_options: Sequence[str] = ()) -> list[str]:
    """The command line that calls `main(arguments) -> int` of one of our modules with the Python that runs here.

    Isolated (`-I`): neither PYTHON* variables nor modules in the folder that it starts in can get in the way.
    """
    root = str(Path(__file__).resolve().parents[1])
    start = f"import sys; sys.path.append({root!r}); from {module} import main; sys.exit(main(sys.argv[1:]))"
    return [sys.executable, "-I", *python_options, "-c", start, *arguments]
