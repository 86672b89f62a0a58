"""The watchdog in a flow: it looks, tells people by the site's own ways, and leaves an event for automations.

Plain functions, no stages: a retry of the watchdog is a new look.
"""

from prefect.events import Event, Resource

from nightbridge.models import Site
from nightbridge.nights.prefect_api import configured_server
from nightbridge.nights.watchdog import Question, Watch, look, notice_of, summary
from nightbridge.notify import notify
from nightbridge.store.factory import open_store
from nightbridge.tasks.mirror import send_events
from nightbridge.tasks.secrets import block_value

WATCHDOG_EVENT = "nightbridge.watchdog"


def look_for_verdicts(asked: Question, site: Site) -> Watch:
    """Look which test has no verdict, and why."""
    return look(asked, site, lambda: open_store(site.store_settings, block_value), configured_server())


def alarm(watch: Watch, site: Site) -> tuple[str, ...]:
    """Tell people what is missing; return in which ways."""
    return notify(notice_of(watch), site.notify, block_value)


def send_event(watch: Watch) -> None:
    """Tell Prefect what was seen: automations match on the label `nightbridge.watchdog`, `missing` or `complete`."""
    send_events(
        [
            Event(
                event=WATCHDOG_EVENT,
                resource=Resource(
                    {
                        "prefect.resource.id": "nightbridge.watchdog",
                        "prefect.resource.name": "watchdog",
                        "nightbridge.watchdog": "missing" if watch.exit_code else "complete",
                    }
                ),
                payload={"message": summary(watch), "by": watch.by.isoformat(), **notice_of(watch).facts},
            )
        ]
    )
