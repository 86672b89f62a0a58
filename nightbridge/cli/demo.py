"""`nightbridge demo`: the practice workload of a checkout, on this machine."""

import os
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any

import typer

import nightbridge
from nightbridge.cli.options import WorkspaceOption
from nightbridge.cli.output import note, print_all, verdict_lines
from nightbridge.errors import InvalidInput
from nightbridge.files import open_workspace

if TYPE_CHECKING:
    from nightbridge.models import NightReport


def demo(
    workspace: WorkspaceOption = None,
    prepare_only: Annotated[
        bool, typer.Option("--prepare", help="Only make the launcher's environment and the practice repositories.")
    ] = False,
) -> None:
    """Run the whole pipeline on this machine, from nothing: two tests, several nights, one with a slower commit.

    Needs a checkout of nightbridge, which holds the practice workload.
    """
    examples = Path(nightbridge.__file__).resolve().parents[1] / "examples"
    if not (examples / "practice").is_dir():
        raise InvalidInput(
            "the practice workload is not installed",
            thing=str(examples),
            advice="Clone the repository of nightbridge and run `make demo` there",
        )
    from nightbridge.models import SiteChoice

    folder = Path(workspace or ".nightbridge").absolute()
    # Prefect reads its settings once, when it is imported: the demo has its own server and database, and logs less.
    open_workspace(folder)
    home = folder / "demo-prefect"
    home.mkdir(parents=True, exist_ok=True)
    os.environ.pop("PREFECT_API_URL", None)
    os.environ.update(
        PREFECT_HOME=str(home),
        PREFECT_LOGGING_LEVEL="ERROR",
        # On a slow machine the server meets a locked database, logs that at length, and tries again.
        PREFECT_LOGGING_SERVER_LEVEL="CRITICAL",
    )
    nights = practice_nights(examples)
    if prepare_only:
        repositories = nights.prepare(folder)
        note(f"launcher environment and practice repositories are ready: {repositories.bridge_url}")
        return
    site = folder / "demo" / "site.toml"
    shown = site.relative_to(Path.cwd()) if site.is_relative_to(Path.cwd()) else site
    options = SiteChoice(system=str(shown)).as_options()
    note(f"{len(nights.NIGHTS)} nights of two tests, about a minute in all")

    def show_night(night: Any, report: "NightReport") -> None:
        note(f"night {report.night}: {night.subject}")
        print_all(verdict_lines(report.verdicts, options))

    reports = nights.run_demo(folder, show_night)
    print(f"report of the night that slowed down: {nights.slow_night(reports).report}")
    print(f"report of the last night: {reports[-1].report}")
    print(f"next: nightbridge history llama-small{options}")


def practice_nights(examples: Path) -> ModuleType:
    """Import `examples.practice.demo` from this folder, whatever else is called `examples` where Python looks."""
    package = ModuleType("examples")
    package.__path__ = [str(examples)]
    sys.modules["examples"] = package
    return import_module("examples.practice.demo")
