"""TOML files to models: tests and scenarios to `Scenario` and `RunSpec`, system and site files to `Site`.

Files are read here, keys and types are checked, and problems are reported with file and line. What a value means, and
whether values go together, is decided in `rules`. Nothing here reaches for the network, the cluster or a checkout.

Scenarios are loaded when one of their names is first used: a command that reads the store needs a site alone.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from nightbridge.config.sites import read_site_file

if TYPE_CHECKING:
    from nightbridge.config.scenarios import load, only_tests, runs

__all__ = ["load", "only_tests", "read_site_file", "runs"]


def __getattr__(name: str) -> object:
    if name in __all__:
        return getattr(import_module("nightbridge.config.scenarios"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
