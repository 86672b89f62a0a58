"""A night whose runs sleep: it says that it lives as a real one does, and tells a file when it began and ended."""

import time
from pathlib import Path

from prefect import flow, tags
from prefect.runtime import flow_run

from nightbridge.blocks import load_site
from nightbridge.models import SiteChoice
from nightbridge.nights.liveness import alive
from nightbridge.tasks.limits import own_turn


@flow(name="run-pipeline")
def sleeping_run(seconds: float) -> None:
    """Sleep."""
    time.sleep(seconds)


@flow(name="nightly-regression")
def sleeping_night(scenario: str, workspace: str, seconds: float) -> None:
    """Sleep in a subflow; started again, end at once."""
    diary = Path(workspace) / "diary.txt"
    site = load_site(SiteChoice(workspace=Path(workspace)))
    with alive(site.workspace, str(flow_run.id), interval=0.5), tags("nightbridge"), own_turn(site):
        _write(diary, "begins")
        sleeping_run(seconds if flow_run.run_count == 1 else 0.0)
        _write(diary, "ends")


def _write(diary: Path, what: str) -> None:
    with diary.open("a", encoding="utf-8") as stream:
        stream.write(f"{flow_run.id} {what}\n")
