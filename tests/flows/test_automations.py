"""Notifications of a site's `[notify]` by Prefect's automations, really received over SMTP and HTTP."""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from uuid import uuid4

import pytest
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import State
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Crashed, Failed, Late

from nightbridge.flows.deploy import Request, deploy
from nightbridge.models import NightReport, SiteChoice, Verdict, VerdictStatus
from nightbridge.tasks.events import night_event, send_report_events
from nightbridge.tasks.prefect_calls import send_events, written_events
from tests.real.notify_servers import mail_server, webhook_server
from tests.real.prefect_server import PrefectServer
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]


@pytest.fixture
def client(prefect_server: PrefectServer) -> Iterator[SyncPrefectClient]:
    """What a test deploys for its cluster goes in the end: another file's deployments do not replace that."""
    with temporary_settings({PREFECT_API_URL: prefect_server.api_url}), get_client(sync_client=True) as made:
        yield made
        for each in made.read_deployments():
            if "cluster:hopper" in each.tags:
                made.delete_deployment(each.id)


def verdict(test_id: str, news: str) -> Verdict:
    return Verdict(
        run_key=f"{test_id}-{uuid4().hex[:6]}",
        test_id=test_id,
        night="2026-11-21",
        status=VerdictStatus.REGRESSED,
        news=news,
        reasons=("step time 12 % longer",),
    )


def night_of(*verdicts: Verdict) -> NightReport:
    night = f"n{uuid4().hex[:6]}"
    return NightReport(scenario="practice", night=night, verdicts=verdicts, report="file:///r")


def test_what_is_news_late_crashed_or_failed_arrives_by_mail_and_webhook_and_nothing_of_others(
    client: SyncPrefectClient, prefect_server: PrefectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site_file = tmp_path / "site.toml"
    with mail_server() as mail, webhook_server() as webhook:
        monkeypatch.setenv("HOOK", webhook.url)
        site_file.write_text(
            f'workspace = "{tmp_path}"\n[cluster]\nkind = "local"\nname = "hopper"\n[notify]\nsmtp_host = "127.0.0.1"\n'
            f'smtp_port = {mail.port}\nsmtp_security = "none"\nmail_from = "nightly@example.org"\n'
            'mail_to = ["team@example.org", "night@example.org"]\nwebhook = "env:HOOK"\n'
        )
        monkeypatch.chdir(ROOT)
        made = list(deploy(Request(choice=SiteChoice(system=str(site_file)))))
        assert sum("automation nightbridge: " in line for line in made) == 4

        few = night_of(verdict("llama", "worse"), verdict("standing", "standing"), verdict("first", ""))
        many = night_of(*(verdict(f"t{number:03}", "new") for number in range(300)))
        for told, cluster in ((night_of(verdict("of-another", "new")), "grace"), (few, "hopper"), (many, "hopper")):
            last = night_event("practice", told.night, "regressed", cluster=cluster).id
            for _start in range(2):  # a night that is started again
                send_report_events(told, "regressed", cluster)
                wait_until(partial(written_events, [last]), "the night's events", interval=0.5)
        ended = night_event("practice", f"n{uuid4().hex[:6]}", "infrastructure", cluster="hopper", message="no store")
        send_events([ended])
        nightly = client.read_deployment_by_name("nightly-regression/nightly")
        states: tuple[State[None], ...] = (Late(), Crashed(message="gone"), Failed(), Failed(name="Regressed"))
        runs = [
            client.create_flow_run_from_deployment(nightly.id, name=f"{state.name}-run", state=state)
            for state in states
        ]

        reaper = client.read_deployment_by_name("reaper/reaper")
        client.create_flow_run_from_deployment(reaper.id, name="Foreign-run", state=Crashed())

        wanted = (
            "llama: regressed (worse)",
            "practice: 300 regressed (new)",
            "infrastructure",
            "is late: Late-run",
            "crashed: Crashed-run",
            "failed: Failed-run",
        )
        wait_until(
            lambda: len(webhook.received) >= len(wanted) and len(mail.received) >= 2 * len(wanted), "notifications"
        )

    ui_url = prefect_server.api_url.removesuffix("/api")
    texts = [json.loads(body)["text"] for body in webhook.received]
    subjects = [message["Subject"] for message in mail.received]
    for each in wanted:
        assert sum(each in text for text in texts) == 1, texts
        assert sum(each in subject for subject in subjects) == 2, subjects  # a mail for each person
    for run in runs[:3]:
        (told,) = (text for text in texts if run.name in text)
        assert told.endswith(f"\n{ui_url}/runs/flow-run/{run.id}")
        assert run.name != "Late-run" or "due since 20" in told
    assert not any(
        other in text
        for text in texts
        for other in ("None", "of-another", "standing", "first", "Foreign-run", "Regressed")
    )
    assert {to for envelope in mail.envelopes for to in envelope.rcpt_tos} == {"team@example.org", "night@example.org"}
