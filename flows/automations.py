"""What `nightbridge deploy` makes of a site's `[notify]`: Prefect's notification blocks, and automations that send.

They run on the Prefect server, so they also report a run whose process or worker is gone. Each is of one cluster's
deployments, by their tags: flow runs of others on the same server are none of its business. The secrets of `[notify]`
become those of blocks, which Prefect keeps encrypted.
"""

from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import NamedTuple
from urllib.parse import quote, urlencode

from prefect.blocks.core import Block
from prefect.blocks.notifications import CustomWebhookNotificationBlock, MicrosoftTeamsWebhook, SlackWebhook
from prefect.client.orchestration import SyncPrefectClient
from prefect.events.actions import SendNotification
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
from prefect.utilities.urls import url_for
from pydantic import SecretStr

from nightbridge.blocks import MailNotification
from nightbridge.flows.final_states import TAG
from nightbridge.models import NotifySettings, Site, slug
from nightbridge.notify import host_of, is_teams, smtp_port
from nightbridge.secrets import resolve_secret
from nightbridge.tasks.events import NEWS_EVENT, NIGHT_EVENT
from nightbridge.tasks.site_access import block_value


class _Reported(NamedTuple):
    """What one automation reports: events, the labels of their resource, and what it says."""

    events: tuple[str, ...]
    labels: Mapping[str, list[str]]
    subject: str
    body: str

    @property
    def is_own(self) -> bool:
        """Whether its events are nightbridge's, and not Prefect's of a flow run."""
        return all(event.startswith("nightbridge.") for event in self.events)


REPORTED = {
    "news": _Reported(
        (NEWS_EVENT,),
        {},
        "{{ event.payload.subject }}",
        "{{ event.payload.text }}",
    ),
    "no report": _Reported(
        (NIGHT_EVENT,),
        {"nightbridge.end": ["invalid", "infrastructure"]},
        "{{ event.payload.scenario }}, night {{ event.payload.night }}: {{ event.payload.end }}",
        "{{ event.payload.message }}",
    ),
    "late": _Reported(
        ("prefect.flow-run.Late",),
        {},
        "{{ deployment.name }} is late: {{ flow_run.name }}",
        "due since {{ flow_run.expected_start_time.isoformat(' ', 'minutes') }}",  # the name is random until it begins
    ),
    "crashed": _Reported(
        # Ends that we choose have other names: Failed is a defect, or a suspension that nobody ended in time.
        ("prefect.flow-run.Crashed", "prefect.flow-run.Failed"),
        {},
        "{{ deployment.name }} {{ flow_run.state.name|lower }}: {{ flow_run.name }}",
        "{{ flow_run.state.message or '' }}",
    ),
}
"""Each automation by the end of its name. What stands as the night before sends no event, so it is not reported."""


def notification_blocks(site: Site) -> dict[str, Block]:
    """The recipients of a site's `[notify]` as blocks, by the names under which they are saved.

    Raises:
        InvalidInput: A secret of `[notify]` is not where it refers to, or is no URL.
    """
    settings, cluster = site.notify, slug(site.cluster.name)
    found: dict[str, Block] = {}
    if settings.smtp_host:
        found[f"{cluster}-mail"] = MailNotification(url=SecretStr(_mail_url(settings)))
    if settings.webhook is not None:
        found[f"{cluster}-webhook"] = _webhook(resolve_secret(settings.webhook, block_value).strip())
    return found


def make_automations(client: SyncPrefectClient, cluster: str, recipients: Mapping[str, Block]) -> Iterator[str]:
    """Make a cluster's automations, to these recipients, and remove them where there is none.

    One that somebody has paused stays paused.

    Returns:
        What there is now, a line each.
    """
    blocks = [block.save(name, overwrite=True, _sync=True) for name, block in recipients.items()]  # type: ignore[call-arg]
    for name, reported in REPORTED.items():
        wanted = AutomationCore(
            name=f"nightbridge: {name} ({cluster})",
            description="Made by `nightbridge deploy` of the site's [notify].",
            tags=[TAG],
            trigger=_trigger(reported, cluster),
            actions=[
                SendNotification(block_document_id=block, subject=reported.subject, body=_body(reported))
                for block in blocks
            ],
        )
        known = client.read_automations_by_name(wanted.name)
        for each in known[1:] if blocks else known:
            client.delete_automation(each.id)
        if blocks and known:
            client.update_automation(known[0].id, wanted.model_copy(update={"enabled": known[0].enabled}))
        elif blocks:
            client.create_automation(wanted)
        if blocks:
            yield f"automation {wanted.name}, to {', '.join(recipients)}"


_SOME_RUN = "00000000-0000-0000-0000-000000000000"


def _body(reported: _Reported) -> str:
    """What it says, with the flow run's address in the UI as this process reaches it: few servers know their own."""
    if reported.is_own:
        return reported.body
    # Prefect 3.9 quotes what stands in a path, so the template comes in afterwards.
    address = url_for("flow-run", obj_id=_SOME_RUN)
    template = address.replace(_SOME_RUN, "{{ flow_run.id }}") if address else "{{ flow_run|ui_url or '' }}"
    return f"{reported.body}\n{template}"


def _trigger(reported: _Reported, cluster: str) -> EventTrigger:
    by_cluster = {**reported.labels, "nightbridge.cluster": [cluster]}
    # A night's runs are flow runs without a deployment: the night reports for them.
    of_flow_run = [
        {"prefect.resource.role": "tag", "prefect.resource.id": f"prefect.tag.{tag}"}
        for tag in (TAG, f"cluster:{cluster}")
    ] + [{"prefect.resource.role": "deployment"}]
    return EventTrigger(
        expect=set(reported.events),
        match=by_cluster if reported.is_own else {"prefect.resource.id": "prefect.flow-run.*"},
        match_related=[] if reported.is_own else of_flow_run,
        posture=Posture.Reactive,
        threshold=1,
        within=timedelta(0),
    )


def _webhook(url: str) -> Block:
    host = host_of(url).partition(":")[0]
    if host == "hooks.slack.com":
        return SlackWebhook(url=SecretStr(url))
    if is_teams(host):
        return MicrosoftTeamsWebhook(url=SecretStr(url))
    return CustomWebhookNotificationBlock(
        name="nightbridge", url="{{url}}", json_data={"text": "{{subject}}\n{{body}}"}, secrets={"url": url}
    )


def _mail_url(settings: NotifySettings) -> str:
    """The mail server as Apprise's `mailto://` names it."""
    password = resolve_secret(settings.smtp_password, block_value) if settings.smtp_password else ""
    login = f"{quote(settings.smtp_user, safe='')}:{quote(password, safe='')}@" if settings.smtp_user else ""
    sender = settings.mail_from or f"nightbridge@{settings.smtp_host}"
    mode = {"none": "insecure", "starttls": "starttls", "tls": "ssl"}[settings.smtp_security]
    scheme = "mailto" if settings.smtp_security == "none" else "mailtos"
    options = urlencode(
        {"smtp": settings.smtp_host, "from": sender, "to": ",".join(settings.mail_to), "mode": mode, "format": "text"}
    )
    return f"{scheme}://{login}{settings.smtp_host}:{smtp_port(settings)}?{options}"
