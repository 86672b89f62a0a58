"""How many more jobs a cluster can start at once: for work that may be spread, but need not wait in a queue."""

import os
import shutil
from pathlib import Path

from nightbridge.models import ClusterSettings
from nightbridge.processes import run
from nightbridge.slurm.environment import without_slurm

TIMEOUT = 30.0


def available_slots(settings: ClusterSettings, nodes: int) -> int:
    """Jobs of so many nodes that would start now; at least 1, also where the cluster does not say.

    On Slurm the idle nodes of the partition are counted (sinfo); on this machine the slots.
    """
    if settings.kind == "local":
        return settings.slots
    program = settings.bin_dir / "sinfo" if settings.bin_dir else shutil.which("sinfo")
    if program is None or not Path(program).exists():
        return 1
    environment = dict(without_slurm(os.environ))
    if settings.slurm_conf:
        environment["SLURM_CONF"] = str(settings.slurm_conf)
    partition = (f"--partition={settings.partition}",) if settings.partition else ()
    said = run(
        [program, "--noheader", "--states=idle", "--format=%D", *partition], environment=environment, timeout=TIMEOUT
    )
    idle = sum(int(word) for word in _text(said.stdout).split() if word.isdigit())
    return max(1, idle // max(nodes, 1))


def _text(output: bytes) -> str:
    return output.decode(errors="replace")
