"""The options of sbatch that a cluster's settings require, whatever the workload."""

from collections.abc import Mapping

from nightbridge.models import ClusterSettings


def site_options(cluster: ClusterSettings) -> tuple[str, ...]:
    """Further options as `--name=value`; partition and account travel with the workload's own."""
    named: Mapping[str, str | int | None] = {
        "qos": cluster.qos,
        "reservation": cluster.reservation,
        "segment": cluster.segment,
    }
    return (
        *(f"--{option}={value}" for option, value in named.items() if value),
        *(("--exclusive",) if cluster.exclusive else ()),
        *cluster.extra_sbatch_args,
    )
