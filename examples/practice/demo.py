"""The demo: several nights of the practice workload on this machine, one of which brings a slower commit."""

import shutil
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from examples.practice.repositories import (
    PracticeRepositories,
    commit_behaviour,
    install_torchrun,
    make_practice_repositories,
)
from nightbridge.flows.api import nightly_regression
from nightbridge.models import Model, NightReport, utc_now
from nightbridge.repos.environments import prepare_base

SAMPLES = Path(__file__).resolve().parents[2] / "conf" / "practice"
# Where the samples expect the practice repositories.
SAMPLES_REPOSITORIES = ".nightbridge/practice"


class DemoNight(Model):
    """A night of the demo: what is committed on its day, and how that commit behaves."""

    subject: str
    step_time_factor: float | None = None


NIGHTS = (
    DemoNight(subject="Describe the recipes' defaults"),
    DemoNight(subject="Name the timers after what they time"),
    DemoNight(subject="Log the learning rate with more digits"),
    DemoNight(subject="Synchronise after every gradient bucket", step_time_factor=1.085),
    DemoNight(subject="Synchronise once, after the last bucket", step_time_factor=1.0),
)


def prepare(workspace: Path) -> PracticeRepositories:
    """Make what the demo needs and takes a while: the launcher's environment and the repositories."""
    return _prepare_in(workspace / "practice", workspace)


def _prepare_in(folder: Path, workspace: Path) -> PracticeRepositories:
    """Make in a folder what the samples expect in `SAMPLES_REPOSITORIES`."""
    base = prepare_base(workspace / "envs")
    install_torchrun(folder, base.absolute() / "bin" / "python")
    return make_practice_repositories(folder)


def run_demo(workspace: Path, on_night: Callable[[DemoNight, NightReport], None]) -> tuple[NightReport, ...]:
    """Run all nights from nothing, and return their reports.

    Args:
        workspace: The folder to work in. What an earlier demo left in its `demo` folder is removed; the launcher's
            environments beside it are kept.
        on_night: Called after each night.
    """
    prepare(workspace)
    folder = workspace.absolute() / "demo"
    shutil.rmtree(folder, ignore_errors=True)
    repositories = _prepare_in(folder / "practice", workspace)
    scenario = _scenario(folder)
    site = folder / "site.toml"
    site.write_text(f'workspace = "{folder}"\nenvironments = "{workspace.absolute() / "envs"}"\n', encoding="utf-8")
    first = utc_now().date() - timedelta(days=len(NIGHTS) - 1)
    reports = []
    for number, night in enumerate(NIGHTS):
        changed: dict[str, Any] = {} if night.step_time_factor is None else {"step_time_factor": night.step_time_factor}
        commit_behaviour(repositories, night.subject, **changed)
        report = nightly_regression(scenario, night=(first + timedelta(days=number)).isoformat(), system=str(site))
        on_night(night, report)
        reports.append(report)
    return tuple(reports)


def slow_night(reports: Sequence[NightReport]) -> NightReport:
    """The first night whose verdicts are not all good, else the last."""
    return next((report for report in reports if report.exit_code), reports[-1])


def _scenario(folder: Path) -> Path:
    """Copy the samples, with the demo's own repositories in the place of the samples'."""
    copies = folder / "conf"
    copies.mkdir()
    for sample in SAMPLES.glob("*.toml"):
        text = sample.read_text(encoding="utf-8").replace(SAMPLES_REPOSITORIES, str(folder / "practice"))
        (copies / sample.name).write_text(text, encoding="utf-8")
    return copies / "nightly.toml"
