"""Notices: really received by a mail server and by a webhook, or told as not sent; no secret in any of it."""

import json
import logging
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from nightbridge import notify as module
from nightbridge.config import read_site_file
from nightbridge.errors import InvalidInput, PermanentError, TransientError
from nightbridge.models import NotifySettings, SecretRef
from nightbridge.notify import Notice, is_teams, notify
from tests.real.notify_servers import MailServer, Webhook, mail_server, webhook_server
from tests.real.s3_servers import make_certificate
from tests.real.slurm_daemons import free_ports

NOTICE = Notice(
    subject="nightbridge: 1 verdict is missing",
    text="llama-small: wartet seit 02:10 – Gerät fehlt\n",
    facts={"night": "2026-11-22", "missing": [{"test_id": "llama-small"}]},
)
PASSWORD = "planted-pass-phrase"
HOOK_PATH = "/services/T000/planted-token"


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_certificate(tmp_path_factory.mktemp("certificate"))


@pytest.fixture
def server() -> Iterator[MailServer]:
    with mail_server() as running:
        yield running


@pytest.fixture
def hook() -> Iterator[Webhook]:
    with webhook_server(HOOK_PATH) as running:
        yield running


@pytest.fixture(autouse=True)
def secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMTP_PASSWORD", PASSWORD)


@pytest.fixture
def at_short_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_FIRST_DELAY_SECONDS", 0.05)
    monkeypatch.setattr(module, "_LONGEST_DELAY_SECONDS", 0.1)


def in_the_clear(server: MailServer, *to: str) -> NotifySettings:
    return NotifySettings(
        smtp_host=server.host,
        smtp_port=server.port,
        smtp_security="none",
        mail_from="nightbridge@example.org",
        mail_to=to or ("night@example.org",),
    )


def encrypted(server: MailServer, certificate: tuple[Path, Path], **others: object) -> NotifySettings:
    return NotifySettings.model_validate(
        {
            "smtp_host": server.host,
            "smtp_port": server.port,
            "smtp_user": "nightly",
            "smtp_password": SecretRef(source="env", name="SMTP_PASSWORD"),
            "ca_bundle": certificate[0],
            "mail_to": ("night@example.org",),
            **others,
        }
    )


def calling(url: str, monkeypatch: pytest.MonkeyPatch) -> NotifySettings:
    monkeypatch.setenv("HOOK", url)
    return NotifySettings(webhook=SecretRef(source="env", name="HOOK"))


class TestMail:
    def test_everybody_gets_one_mail_with_the_whole_text(self, server: MailServer) -> None:
        sent = notify(NOTICE, in_the_clear(server, "night@example.org", "day@example.org"))

        (message,), (envelope,) = server.received, server.envelopes
        assert sent == ("mail to night@example.org, day@example.org",)
        assert envelope.rcpt_tos == ["night@example.org", "day@example.org"]
        assert message["Subject"] == NOTICE.subject
        assert message["From"] == "nightbridge@example.org"
        assert message["Auto-Submitted"] == "auto-generated"
        assert message.get_content().replace("\r\n", "\n") == NOTICE.text

    def test_starttls_comes_before_the_login(self, certificate: tuple[Path, Path]) -> None:
        with mail_server(certificate=certificate, login=("nightly", PASSWORD)) as server:
            notify(NOTICE, encrypted(server, certificate))

        assert server.logins == ["nightly"]
        assert len(server.received) == 1

    # It takes encryption from the start for none at all.
    @pytest.mark.filterwarnings("ignore:Requiring AUTH while not requiring TLS:UserWarning")
    def test_tls_from_the_first_byte(self, certificate: tuple[Path, Path]) -> None:
        with mail_server(certificate=certificate, login=("nightly", PASSWORD), at_once=True) as server:
            notify(NOTICE, encrypted(server, certificate, smtp_security="tls"))

        assert len(server.received) == 1

    def test_a_certificate_that_nobody_vouches_for_gets_no_password(self, certificate: tuple[Path, Path]) -> None:
        with (
            mail_server(certificate=certificate, login=("nightly", PASSWORD)) as server,
            pytest.raises(PermanentError, match=r"not sent: self-signed certificate\. Set ca_bundle"),
        ):
            notify(NOTICE, encrypted(server, certificate, ca_bundle=None))

        assert server.logins == []

    def test_a_wrong_password_is_told_at_once_and_never_shown(
        self, certificate: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("SMTP_PASSWORD", "planted-and-wrong")

        with (
            mail_server(certificate=certificate, login=("nightly", PASSWORD)) as server,
            pytest.raises(PermanentError, match=rf"127\.0\.0\.1:{server.port}: the mail was not sent: 535") as raised,
        ):
            notify(NOTICE, encrypted(server, certificate))

        assert "planted-and-wrong" not in str(raised.value)
        assert server.received == []

    def test_a_server_that_says_later_is_tried_again(self, server: MailServer, at_short_intervals: None) -> None:
        server.answers = ["451 greylisted, come back", "421 too busy"]

        notify(NOTICE, in_the_clear(server))

        assert len(server.received) == 1

    def test_a_server_that_says_no_is_not(self, server: MailServer) -> None:
        server.answers = ["554 this is spam"]

        with pytest.raises(PermanentError, match="not sent: 554 this is spam"):
            notify(NOTICE, in_the_clear(server))
        assert server.received == []

    def test_one_unknown_address_is_told_and_the_others_get_the_mail_once(self, server: MailServer) -> None:
        server.unknown = ("gone@example.org",)

        with pytest.raises(PermanentError, match=r"was sent, but not to gone@example\.org"):
            notify(NOTICE, in_the_clear(server, "night@example.org", "gone@example.org"))
        assert [envelope.rcpt_tos for envelope in server.envelopes] == [["night@example.org"]]

    def test_a_server_that_is_away_is_waited_for(
        self, at_short_intervals: None, caplog: pytest.LogCaptureFixture
    ) -> None:
        away = MailServer(port=free_ports(1)[0])

        began = time.monotonic()
        with pytest.raises(TransientError, match=rf"127\.0\.0\.1:{away.port}: .*Connection refused.*smtp_port"):
            notify(NOTICE, in_the_clear(away), patience=1.5)

        assert 0.3 < time.monotonic() - began < 10
        assert caplog.text.count("retrying: 127.0.0.1") >= 3

    def test_a_server_that_comes_back_within_the_patience_gets_it(
        self, at_short_intervals: None, caplog: pytest.LogCaptureFixture
    ) -> None:
        port = free_ports(1)[0]

        with ThreadPoolExecutor(1) as pool:
            sending = pool.submit(notify, NOTICE, in_the_clear(MailServer(port=port)))
            while "retrying" not in caplog.text:
                assert not sending.done()
                time.sleep(0.01)
            with mail_server(port=port) as server:
                sending.result(60)

        assert len(server.received) == 1


class TestWebhook:
    def test_gets_the_text_and_the_facts_as_json(self, hook: Webhook, monkeypatch: pytest.MonkeyPatch) -> None:
        assert notify(NOTICE, calling(hook.url, monkeypatch)) == ("webhook",)

        (body,) = hook.received
        assert json.loads(body) == {"text": NOTICE.text, **NOTICE.facts}

    def test_a_workflow_of_teams_gets_an_adaptive_card(self, hook: Webhook, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "is_teams", lambda host: host == hook.url.split("/")[2])
        long = NOTICE.model_copy(update={"text": "two verdicts\nare missing\n" + "夜" * 10_000})

        notify(long, calling(hook.url, monkeypatch))

        (body,) = hook.received
        (card,) = json.loads(body)["attachments"]
        assert card["contentType"] == "application/vnd.microsoft.card.adaptive"
        assert card["content"]["body"][0]["text"].startswith("two verdicts\n\nare missing\n\n夜")
        assert len(body) < 28_000

    def test_the_hosts_of_teams_are_known(self) -> None:
        assert is_teams("prod-01.westeurope.logic.azure.com:443")
        assert is_teams("default1234.ab.environment.api.powerplatform.com")
        assert not is_teams("hooks.slack.com")

    @pytest.mark.parametrize("status", [429, 500, 503])
    def test_one_that_says_later_is_tried_again(
        self, hook: Webhook, monkeypatch: pytest.MonkeyPatch, at_short_intervals: None, status: int
    ) -> None:
        hook.answers = [status, status]

        notify(NOTICE, calling(hook.url, monkeypatch))

        assert len(hook.received) == 1

    def test_a_url_that_is_gone_is_told_by_its_host_alone(
        self, hook: Webhook, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        host = hook.url.removeprefix("http://").partition("/")[0]

        with pytest.raises(PermanentError, match=rf"{host}: the webhook answered 404") as raised:
            notify(NOTICE, calling(f"{hook.url}-revoked", monkeypatch))
        assert "planted-token" not in str(raised.value) + caplog.text

    @pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
    @pytest.mark.parametrize("moved_to", ["https://login.example.org/planted-token", "//[", "/planted-token", ""])
    def test_one_that_has_moved_has_not_got_it(
        self, hook: Webhook, monkeypatch: pytest.MonkeyPatch, status: int, moved_to: str
    ) -> None:
        hook.answers, hook.moved_to = [status], moved_to
        where = "https://login.example.org" if moved_to.startswith("https") else "another address"

        with pytest.raises(PermanentError, match=rf"the webhook answered {status} .*: it refers to {where}") as raised:
            notify(NOTICE, calling(hook.url, monkeypatch))
        assert hook.received == []
        assert "planted-token" not in str(raised.value)

    def test_one_that_is_away_is_waited_for_and_its_url_is_in_no_message(
        self, monkeypatch: pytest.MonkeyPatch, at_short_intervals: None, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.DEBUG)

        with pytest.raises(TransientError, match=r"the webhook does not answer: .*Connection refused") as raised:
            notify(NOTICE, calling(f"http://127.0.0.1:{free_ports(1)[0]}{HOOK_PATH}", monkeypatch), patience=1.5)
        assert "planted-token" not in str(raised.value) + caplog.text
        assert "retrying" in caplog.text

    @pytest.mark.parametrize("url", ["planted-token", "ftp://h/planted-token", "http:///planted-token", "http://h/a b"])
    def test_what_is_no_url_is_not_shown(self, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(InvalidInput, match=r"\[notify\] webhook: not a URL") as raised:
            notify(NOTICE, calling(url, monkeypatch))
        assert "planted" not in str(raised.value)


def test_what_fails_in_one_way_is_still_sent_in_the_other(hook: Webhook, monkeypatch: pytest.MonkeyPatch) -> None:
    away = in_the_clear(MailServer(port=free_ports(1)[0]))
    both = away.model_copy(update={"webhook": calling(hook.url, monkeypatch).webhook})

    with pytest.raises(TransientError, match="the mail was not sent"):
        notify(NOTICE, both, patience=0)
    assert len(hook.received) == 1


def test_every_way_that_failed_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    away = in_the_clear(MailServer(port=free_ports(1)[0]))
    both = away.model_copy(update={"webhook": calling("not-a-url", monkeypatch).webhook})

    with pytest.raises(TransientError, match=r"the mail was not sent.*not a URL"):
        notify(NOTICE, both, patience=0)


def test_nobody_is_told_where_nothing_is_set() -> None:
    assert notify(NOTICE, NotifySettings()) == ()


def test_a_secret_that_is_not_set_is_named(server: MailServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SMTP_PASSWORD")
    settings = in_the_clear(server).model_copy(
        update={"smtp_user": "nightly", "smtp_password": SecretRef(source="env", name="SMTP_PASSWORD")}
    )

    with pytest.raises(InvalidInput, match="SMTP_PASSWORD: secret not found in env"):
        notify(NOTICE, settings)


class TestSiteFile:
    @pytest.fixture
    def site_file(self, tmp_path: Path) -> Path:
        return tmp_path / "site.toml"

    def test_names_the_places_of_secrets(self, site_file: Path) -> None:
        site_file.write_text(
            '[notify]\nsmtp_host = "mail.example.org"\nsmtp_user = "n"\nsmtp_password = "env:SMTP_PASSWORD"\n'
            'mail_to = ["night@example.org"]\nwebhook = "env:SLACK"\n'
        )

        site, warnings = read_site_file(site_file)

        assert site.notify.smtp_password == SecretRef(source="env", name="SMTP_PASSWORD")
        assert site.notify.webhook == SecretRef(source="env", name="SLACK")
        assert warnings == ()

    def test_a_url_that_stands_in_the_file_is_read_when_it_is_called(self, site_file: Path, hook: Webhook) -> None:
        site_file.write_text(f'[notify]\nwebhook = "{hook.url}"\n')

        site, _ = read_site_file(site_file)
        notify(NOTICE, site.notify)

        assert "planted-token" not in site.model_dump_json()
        assert len(hook.received) == 1

    @pytest.mark.parametrize(
        ("text", "told"),
        [
            ('smtp_host = "m"', "mail needs both smtp_host and mail_to"),
            ('mail_to = ["a@b"]', "mail needs both smtp_host and mail_to"),
            ('smtp_host = "m"\nmail_to = ["a@b"]\nsmtp_user = "u"', "a login needs both smtp_user and smtp_password"),
            ('smtp_host = "m"\nmail_to = ["a@b\\nBcc: c@d"]', "notify.mail_to[0]: must be one address"),
            ('smtp_host = "m"\nmail_to = ["a@b, c@d"]', "notify.mail_to[0]: must be one address"),
            ('smtp_host = "m"\nmail_to = ["a@b"]\nsmtp_port = 0', "notify.smtp_port"),
            ('smtp_security = "ssl"', "notify.smtp_security"),
            ('smpt_host = "m"', "did you mean 'smtp_host'?"),
        ],
    )
    def test_what_cannot_work_is_told_with_its_line(self, site_file: Path, text: str, told: str) -> None:
        site_file.write_text(f"[notify]\n{text}\n")

        with pytest.raises(InvalidInput) as raised:
            read_site_file(site_file)
        assert told in str(raised.value)
