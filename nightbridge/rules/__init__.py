"""Named validation rules: whether the values of a run go together, with the launcher, and with the cluster.

A rule has an id to look up, the fields it reads, a severity, the versions it holds for, and messages with
the values and the way out. Keys and types are checked before, in `config`. Rules read models and the flag table only.

`required`, `launcher`, `megatron_core` and `site_rules` have the rules of tests, `hetero_rules` those of two grids,
`cloudai` CloudAI's own, and `config_container_model`, `config_container_compute` and `config_container_training` those
of a `ConfigContainer.yaml`. `checking` checks by them; `sweep_points` does it for every point of a sweep.
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
