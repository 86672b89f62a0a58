"""TOML files to models: tests and scenarios to `Scenario` and `RunSpec`, system and site files to `Site`.

Files are read here, keys and types are checked, and problems are reported with file and line. What a value means, and
whether values go together, is decided in `rules`. Nothing here reaches for the network, the cluster or a checkout.
"""

from nightbridge.config.scenarios import load, only_tests, runs
from nightbridge.config.sites import load_site

__all__ = ["load", "load_site", "only_tests", "runs"]
