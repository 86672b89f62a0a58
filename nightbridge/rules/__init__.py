"""Named validation rules: whether the values of a run go together, with the launcher, and with the cluster.

A rule has an id to look up, the fields it reads, a severity, the versions it holds for, and messages with
the values and the way out. Keys and types are checked before, in `config`. Rules read models and the flag table only.
"""

from nightbridge.rules.checking import (
    check_container,
    check_dumped,
    check_read,
    check_scenario,
    check_test,
    errors_of,
    grid_of,
    points_of,
)

__all__ = [
    "check_container",
    "check_dumped",
    "check_read",
    "check_scenario",
    "check_test",
    "errors_of",
    "grid_of",
    "points_of",
]
