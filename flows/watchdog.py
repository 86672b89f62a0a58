"""The watchdog as a deployment: a flow run that fails when a test has no verdict by a time of the morning.

It cannot report that its own worker or server is away. `nightbridge watchdog` from cron or a systemd timer can, best on
another machine than the worker's.
"""

from functools import partial
from pathlib import Path
from typing import Annotated

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.logging import get_run_logger
from prefect.states import Completed, Failed
from pydantic import Field

from nightbridge.blocks import site_of
from nightbridge.errors import NightbridgeError
from nightbridge.flows.final_states import ends_plainly
from nightbridge.flows.forms import ClockField, ClusterField, StoreField, SystemField
from nightbridge.models import Site
from nightbridge.nights.missing_verdicts import (
    DAYS,
    MAX_DAYS,
    VerdictsMissing,
    Watch,
    look,
    notice_of,
    summary,
    watch_lines,
    watch_settings,
)
from nightbridge.nights.prefect_api import configured_server
from nightbridge.notify import notify
from nightbridge.tasks.site_access import block_value, store_of


@flow(name="watchdog", flow_run_name="watchdog by {by}")
@ends_plainly
def watchdog(  # noqa: D417  (`SiteChoice` describes the others)
    by: ClockField = "08:00",
    timezone: str | None = None,
    scenarios: list[str] | None = None,
    days: Annotated[int, Field(ge=1, le=MAX_DAYS)] = DAYS,
    system: SystemField = None,
    cluster: ClusterField = None,
    store: StoreField = None,
    workspace: str | None = None,
) -> State[Watch]:
    """Say which test has no verdict by a time of the morning, and why.

    Args:
        by: When every verdict has to be there, local time as 08:00.
        timezone: Zone of it, as Europe/Berlin; that of the worker's machine when empty.
        scenarios: Scenario files to expect; all that had a scheduled night lately when empty.
        days: How far back nights count as expected again.
    """
    wanted = watch_settings(by, timezone=timezone, files=map(Path, scenarios or ()), days=days)
    site = site_of(system=system, cluster=cluster, store=store, workspace=workspace)
    watch = look(wanted, site, partial(store_of, site), configured_server())
    lines = "\n".join(watch_lines(watch))
    get_run_logger().info("%s", lines)
    not_sent = _notify(watch, site) if watch.exit_code else ""
    message = "\n".join(filter(None, (lines, not_sent)))
    if watch.exit_code:
        return Failed(name="VerdictsMissing", message=message, data=VerdictsMissing(summary(watch)))
    return Completed(name="VerdictsThere", message=message, data=watch)


def _notify(watch: Watch, site: Site) -> str:
    """Notify the recipients; return why that failed, where it did."""
    try:
        for way in notify(notice_of(watch), site.notify, block_value):
            get_run_logger().info("sent: %s", way)
    except NightbridgeError as error:
        get_run_logger().error("%s", error)
        return f"not notified: {error}"
    return ""
