"""`watchdog`: which verdicts are missing, and who is notified. See `test_doctor.py` for `doctor`."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from nightbridge.models import NightReport, Verdict, VerdictStatus
from tests.nightbridge.cli.conftest import Program


@pytest.fixture
def nobody_scheduled(monkeypatch: pytest.MonkeyPatch) -> None:
    """No Prefect server, wherever this machine has one."""
    monkeypatch.delenv("PREFECT_API_URL", raising=False)


@pytest.fixture
def night_began(tmp_path: Path) -> Callable[[VerdictStatus], None]:
    """A night by schedule of one test, an hour ago; returns what records its end."""
    from datetime import timedelta

    from nightbridge.models import Site, StoreSettings, utc_now
    from nightbridge.nights.records import NightStart, NightTest, record_end, record_start
    from nightbridge.store.object_store import open_store

    store = open_store(StoreSettings(url=f"file://{tmp_path}/.nightbridge/store"))
    begun = utc_now() - timedelta(hours=1)
    record_start(
        store,
        NightStart(
            night="2026-11-21",
            scenario="practice",
            cluster="local",
            workspace=Site(workspace=tmp_path / ".nightbridge").workspace,
            begun_at=begun,
            slot=begun,
            tests=(NightTest(test_id="llama", run_key="llama-2026-11-21-0123456789"),),
        ),
    )
    (tmp_path / ".nightbridge" / "runs").mkdir()

    def _end(status: VerdictStatus) -> None:
        verdict = Verdict(run_key="llama-2026-11-21-0123456789", test_id="llama", night="2026-11-21", status=status)
        record_end(store, NightReport(scenario="practice", night="2026-11-21", verdicts=(verdict,), report="r.html"))

    return _end


@pytest.fixture
def by_now() -> tuple[str, ...]:
    """`--by` and `--timezone` of a deadline that has just passed."""
    from nightbridge.models import utc_now

    return ("--by", f"{utc_now():%H:%M}", "--timezone", "UTC")


@pytest.mark.usefixtures("nobody_scheduled")
class TestWatchdog:
    def test_says_that_every_verdict_is_there(
        self, nightbridge: Program, night_began: Callable[[VerdictStatus], None], by_now: tuple[str, ...]
    ) -> None:
        night_began(VerdictStatus.FAILED)

        code, out, err = nightbridge("watchdog", *by_now)

        assert (code, err) == (0, "")
        assert out == ("practice, night 2026-11-21: 1 verdict\n  bad verdicts: llama failed\n  report: r.html\n")

    def test_says_nothing_then_when_it_is_to_be_quiet(
        self, nightbridge: Program, night_began: Callable[[VerdictStatus], None], by_now: tuple[str, ...]
    ) -> None:
        night_began(VerdictStatus.PASSED)

        assert nightbridge("watchdog", *by_now, "--quiet") == (0, "", "")

    def test_says_which_verdict_is_missing_and_why_however_quiet(
        self, nightbridge: Program, night_began: Callable[[VerdictStatus], None], by_now: tuple[str, ...]
    ) -> None:
        code, out, err = nightbridge("watchdog", *by_now, "--quiet")

        assert code == 4
        assert "practice, night 2026-11-21: 1 of 1 verdict missing\n  llama: crashed: " in out
        assert "no alert was sent: the site has no [notify]" in err

    def test_prints_one_json_document(
        self, nightbridge: Program, night_began: Callable[[VerdictStatus], None], by_now: tuple[str, ...]
    ) -> None:
        code, out, _ = nightbridge("watchdog", *by_now, "--json")

        document = json.loads(out)
        assert code == document["exit_code"] == 4
        assert document["nights"][0]["missing"][0]["cause"] == "crashed"

    def test_alarms_by_mail_and_webhook_once_each(
        self,
        nightbridge: Program,
        night_began: Callable[[VerdictStatus], None],
        by_now: tuple[str, ...],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        from tests.real.notify_servers import mail_server, webhook_server

        with mail_server() as mail, webhook_server("/planted-token") as hook:
            monkeypatch.setenv("HOOK", hook.url)
            (tmp_path / "site.toml").write_text(
                f'[notify]\nsmtp_host = "{mail.host}"\nsmtp_port = {mail.port}\nsmtp_security = "none"\n'
                'mail_to = ["night@example.org"]\nwebhook = "env:HOOK"\n'
            )
            code, out, err = nightbridge("watchdog", *by_now, "--system", "site.toml")

        (message,), (received,) = mail.received, hook.received
        body = json.loads(received)
        assert code == 4
        assert message["Subject"] == "nightbridge: 1 verdict missing: practice, night 2026-11-21"
        assert "  llama: crashed: " in message.get_content()
        assert (body["night"], body["missing"][0]["test_id"]) == ("2026-11-21", "llama")
        assert body["text"].replace("\n", "") in message.get_content().replace("\r\n", "").replace("\n", "")
        assert "sent: mail to night@example.org\nsent: webhook\n" in err
        assert "planted-token" not in out + err

    def test_tells_nobody_of_a_good_night(
        self,
        nightbridge: Program,
        night_began: Callable[[VerdictStatus], None],
        by_now: tuple[str, ...],
        tmp_path: Path,
    ) -> None:
        from tests.real.notify_servers import webhook_server

        night_began(VerdictStatus.REGRESSED)
        with webhook_server() as hook:
            (tmp_path / "site.toml").write_text(f'[notify]\nwebhook = "{hook.url}"\n')
            code, _, _ = nightbridge("watchdog", *by_now, "--system", "site.toml")

        assert (code, hook.received) == (0, [])

    def test_an_alarm_that_cannot_be_sent_is_an_error_after_what_was_seen(
        self,
        nightbridge: Program,
        night_began: Callable[[VerdictStatus], None],
        by_now: tuple[str, ...],
        tmp_path: Path,
    ) -> None:
        (tmp_path / "site.toml").write_text('[notify]\nwebhook = "env:NOWHERE"\n')

        code, out, err = nightbridge("watchdog", *by_now, "--system", "site.toml")

        assert code == 4
        assert "1 of 1 verdict missing" in out
        assert "NOWHERE: secret not found in env" in err

    def test_sends_a_trial_notice(self, nightbridge: Program, tmp_path: Path) -> None:
        from tests.real.notify_servers import webhook_server

        with webhook_server() as hook:
            (tmp_path / "site.toml").write_text(f'[notify]\nwebhook = "{hook.url}"\n')
            code, _, err = nightbridge("watchdog", "--by", "08:00", "--system", "site.toml", "--send-test")

        assert (code, len(hook.received)) == (0, 1)
        assert "sent: webhook" in err

    def test_a_trial_notice_to_nobody_is_invalid(self, nightbridge: Program) -> None:
        code, _, err = nightbridge("watchdog", "--by", "08:00", "--send-test")

        assert code == 2
        assert "[notify]" in err

    @pytest.mark.parametrize(
        ("arguments", "told"),
        [
            (("--by", "8 o'clock"), "8 o'clock: not a time of day. Write hours and minutes, as 08:00"),
            (("--by", "08:00", "--timezone", "Berlin"), "Berlin: no such time zone. Write it as Europe/Berlin"),
            (("--by", "08:00", "--days", "0"), "'--days': Input should be greater than or equal to 1"),
            (("--by", "08:00", "--days", "99999999"), "'--days': Input should be less than or equal to 36500"),
            ((), "Missing option '--by'"),
        ],
    )
    def test_refuses_what_it_cannot_read(self, nightbridge: Program, arguments: tuple[str, ...], told: str) -> None:
        code, _, err = nightbridge("watchdog", *arguments)

        assert code == 2
        assert told in err

    def test_a_file_that_cannot_be_read_is_invalid_and_told(self, nightbridge: Program, tmp_path: Path) -> None:
        from tests.real.notify_servers import webhook_server

        with webhook_server() as hook:
            (tmp_path / "site.toml").write_text(f'[notify]\nwebhook = "{hook.url}"\n')
            code, out, _ = nightbridge("watchdog", "gone.toml", "--by", "08:00", "--system", "site.toml")

        assert code == 2
        assert "gone.toml: no such file" in out
        assert "gone.toml" in hook.received[0].decode()
