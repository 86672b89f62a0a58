"""`nightbridge deploy`: everything that a Prefect server needs for nights."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nightbridge.cli.options import site_options
from nightbridge.cli.output import note

if TYPE_CHECKING:
    from nightbridge.models import SiteChoice


@site_options("system", "cluster", "store", "workspace")
def deploy(
    choice: "SiteChoice",
    files: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[FILE...]", help="Scenarios; what prefect.yaml defines when left out."),
    ] = None,
    cron: Annotated[str | None, typer.Option("--cron", help='When nights begin, such as "0 1 * * *".')] = None,
    timezone: Annotated[str | None, typer.Option("--timezone", metavar="TZ", help="Zone of the schedules.")] = None,
    git: Annotated[
        str | None, typer.Option("--git", metavar="URL", help="Workers pull the scenarios from this repository.")
    ] = None,
    branch: Annotated[str | None, typer.Option("--branch", help="Its branch.")] = None,
    git_token: Annotated[
        str | None, typer.Option("--git-token", metavar="BLOCK", help="Secret block with a token for it.")
    ] = None,
) -> None:
    """Make the deployments for a site on the Prefect server: nightly, test, bisect, attribute, prune and so on.

    PREFECT_API_URL names the server. Work pool, work queues, block types, result storage and the choices of the forms
    are made as well. Run it again after a change of the scenarios: what exists is updated.
    """
    from nightbridge.flows.deploy import Request, deploy
    from nightbridge.flows.server import reach_server

    reach_server()
    pulled = {"git": git, "branch": branch, "git_token": git_token}
    for line in deploy(Request(files=tuple(files or ()), choice=choice, cron=cron, timezone=timezone, **pulled)):
        note(line)
