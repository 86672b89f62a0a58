"""What a site needs for its nights: `deploy`, `watchdog` and `doctor`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nightbridge.cli.options import (
    EXIT_INTERNAL,
    JsonOption,
    block_values,
    load_site,
    note_no_site,
    open_site_store,
    with_site_options,
)
from nightbridge.cli.output import note, note_all, print_all, show
from nightbridge.errors import InvalidInput, NightbridgeError

if TYPE_CHECKING:
    from nightbridge.models import Site, SiteChoice
    from nightbridge.notify import Notice


@with_site_options("system", "cluster", "store", "workspace")
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

    pulled = {"git": git, "branch": branch, "git_token": git_token}
    for line in deploy(Request(files=tuple(files or ()), choice=choice, cron=cron, timezone=timezone, **pulled)):
        note(line)


@with_site_options("system", "cluster", "store", "workspace")
def watchdog(
    choice: "SiteChoice",
    by: Annotated[str, typer.Option("--by", metavar="HH:MM", help="When every verdict has to be there.")],
    files: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[FILE...]", help="Scenarios to expect; all that had a scheduled night lately when left out."
        ),
    ] = None,
    timezone: Annotated[
        str | None, typer.Option("--timezone", metavar="TZ", help="Zone of --by; this machine's own when left out.")
    ] = None,
    days: Annotated[
        int, typer.Option("--days", min=1, max=36500, help="Days to look back for the scenarios to expect.")
    ] = 7,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print nothing when every verdict is there.")] = False,
    send_test: Annotated[
        bool,
        typer.Option("--send-test", help="Only send a test notification, as [notify] of the site configures it."),
    ] = False,
    as_json: JsonOption = False,
) -> int:
    """Report which test has no verdict by a time of the morning, and why; alert by mail and webhook ([notify]).

    It reads the store and queries Slurm, and needs no Prefect server. Each scenario's nights of the 24 hours before
    --by count: today's --by, or yesterday's when that is more than five minutes ahead. A bad verdict is listed and
    raises no alert. Exit code 0 when every verdict is there, 4 when one is missing or cannot be looked up, or the
    alert cannot be sent, 2 for invalid input.
    """
    from nightbridge.nights.missing_verdicts import look, notice_of, trial_notice, watch_lines, watch_settings
    from nightbridge.nights.prefect_api import configured_server

    wanted = watch_settings(by, timezone=timezone, files=files or (), days=days)
    site = load_site(choice)
    if send_test:
        if not _send(trial_notice(), site):
            raise InvalidInput("no recipient", subject=choice.system or "the site", advice="Give it a [notify] table")
        return 0
    watch = look(wanted, site, lambda: open_site_store(site), configured_server())
    if as_json or watch.exit_code or not quiet:
        document = {**watch.model_dump(mode="json"), "exit_code": watch.exit_code}
        show(as_json, document, lambda: watch_lines(watch))
    return _alert(notice_of(watch), site, watch.exit_code) if watch.exit_code else 0


@with_site_options("system", "cluster", "store", "workspace")
def doctor(
    choice: "SiteChoice",
    as_json: JsonOption = False,
) -> int:
    """Check what a night needs on this host: workspace, git, launcher environment, containers, cluster, store.

    Nothing is submitted and nothing is created. Exits with 4 when a check fails.
    """
    from nightbridge.doctor import Check, checks

    site = load_site(choice)
    note_no_site(choice)
    done: list[Check] = []
    for check in checks(site, lambda: open_site_store(site)):
        done.append(check)
        if not as_json:
            print_all([str(check)])
    bad = [check.subject for check in done if not check.healthy]
    need = "needs" if len(bad) == 1 else "need"
    summary = f"{len(bad)} of {len(done)} {need} you: {', '.join(bad)}" if bad else f"all {len(done)} checks passed"
    show(as_json, {"healthy": not bad, "findings": done}, lambda: [summary])
    return EXIT_INTERNAL if bad else 0


def _alert(notice: "Notice", site: "Site", code: int) -> int:
    """Send the alert; return the exit code, or that of an error of its own."""
    try:
        if not _send(notice, site):
            note("no alert was sent: the site has no [notify]")
    except NightbridgeError as error:
        note(f"nightbridge: {error}")
        return EXIT_INTERNAL
    return code


def _send(notice: "Notice", site: "Site") -> bool:
    """Send a notice in every way that the site has; return whether it has any."""
    from nightbridge.notify import notify

    sent = notify(notice, site.notify, block_values(site.notify.smtp_password, site.notify.webhook))
    note_all(f"sent: {way}" for way in sent)
    return bool(sent)
