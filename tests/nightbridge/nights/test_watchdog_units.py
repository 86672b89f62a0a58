"""The examples for systemd and cron: what stands in them is what systemd takes, and what the command line runs."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CONF = Path(__file__).parents[3] / "conf"
UNITS = ("nightbridge-watchdog.service", "nightbridge-watchdog.timer")
OF_PREFECT = ("nightbridge-server.service", "nightbridge-worker.service")


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A host with nightbridge in /opt and its site file in /etc, both below a folder; its units lie in it, too."""
    folder = tmp_path / "opt" / "nightbridge"
    (folder / ".venv").mkdir(parents=True)
    (folder / ".venv" / "bin").symlink_to(Path(sys.executable).parent)
    (folder / "conf").symlink_to(CONF)
    (tmp_path / "etc" / "nightbridge").mkdir(parents=True)
    (tmp_path / "etc" / "nightbridge" / "site.toml").write_text(f'workspace = "{tmp_path}/workspace"\n')
    for unit in (*UNITS, *OF_PREFECT):
        text = (CONF / "systemd" / unit).read_text(encoding="utf-8")
        (tmp_path / unit).write_text(below(tmp_path, text).replace("User=nightbridge\n", ""))
    return tmp_path


def below(folder: Path, text: str) -> str:
    return re.sub(r"(?<![\w.])/(opt|etc)/nightbridge", rf"{folder}/\1/nightbridge", text)


def the_value(text: str, key: str) -> str:
    (value,) = re.findall(rf"^{key}=(.*)$", text, re.MULTILINE)
    return str(value)


def the_alarm(command: str, installed: Path) -> str:
    """What a command says on a host without any night, run as cron runs it."""
    done = subprocess.run(
        ["/bin/sh", "-c", command],
        env={"PATH": "/usr/bin:/bin", "HOME": str(installed), "PREFECT_HOME": str(installed / "prefect")},
        cwd=installed,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 4, done.stderr
    return done.stdout


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="this host has no systemd")
def test_systemd_takes_the_units(installed: Path) -> None:
    for unit in (*UNITS, *OF_PREFECT):
        verified = subprocess.run(
            ["systemd-analyze", "verify", installed / unit], capture_output=True, text=True, check=False
        )
        assert (verified.returncode, verified.stderr) == (0, "")


def test_the_workers_unit_shares_the_folder_of_prefects_workers_with_other_users(tmp_path: Path) -> None:
    text = (CONF / "systemd" / "nightbridge-worker.service").read_text(encoding="utf-8")
    (before,) = re.findall(r"^ExecStartPre=(.*runner_storage.*)$", text, re.MULTILINE)
    command = shlex.split(before.replace("$$", "$"))
    shared = tmp_path / "runner_storage"

    for _ in range(2):
        subprocess.run(command, env={"PATH": "/usr/bin:/bin", "TMPDIR": str(tmp_path)}, check=True)
        assert shared.stat().st_mode & 0o7777 == 0o1777

    shared.rmdir()
    shared.touch()  # as little use as another user's folder, which root could write to
    refused = subprocess.run(
        command, env={"PATH": "/usr/bin:/bin", "TMPDIR": str(tmp_path)}, capture_output=True, text=True, check=False
    )
    assert refused.returncode != 0
    assert f"{shared} is of no use to this user" in refused.stderr


@pytest.mark.parametrize(
    ("given", "starts"),
    [
        ({"PREFECT_API_URL": "http://prefect/api", "PREFECT_API_AUTH_STRING": "a:b"}, True),
        ({"PREFECT_API_URL": "http://prefect/api"}, False),
        ({"PREFECT_API_AUTH_STRING": "a:b"}, False),  # it would wait beside a server of its own
    ],
)
def test_the_workers_unit_does_not_start_without_the_servers_address_or_login(
    given: dict[str, str], starts: bool
) -> None:
    text = (CONF / "systemd" / "nightbridge-worker.service").read_text(encoding="utf-8")
    (before,) = re.findall(r"^ExecStartPre=(.*PREFECT_API_AUTH_STRING.*)$", text, re.MULTILINE)
    command = shlex.split(before.replace("$$", "$"))

    tried = subprocess.run(command, env={"PATH": "/usr/bin:/bin", **given}, check=False)

    assert (tried.returncode == 0) is starts


def test_the_timer_and_the_service_mean_the_same_hour() -> None:
    service, timer = ((CONF / "systemd" / unit).read_text(encoding="utf-8") for unit in UNITS)
    arguments = shlex.split(the_value(service, "ExecStart"))
    by, zone = (arguments[arguments.index(option) + 1] for option in ("--by", "--timezone"))

    assert the_value(timer, "OnCalendar") == f"*-*-* {by}:00 {zone}"


def test_the_services_command_runs(installed: Path) -> None:
    service = (installed / UNITS[0]).read_text(encoding="utf-8")
    folder = the_value(service, "WorkingDirectory")

    said = the_alarm(f"cd {folder} && {the_value(service, 'ExecStart')}", installed)

    assert "llama-small, deepseek-small: not started" in said


def test_the_crontabs_line_runs(installed: Path) -> None:
    crontab = (CONF / "examples" / "crontab").read_text(encoding="utf-8")
    (line,) = (line for line in crontab.splitlines() if re.match(r"[\d*]", line))
    minute, hour, *_, command = line.split(maxsplit=5)

    said = the_alarm(below(installed, command), installed)

    assert f"--by {int(hour):02}:{int(minute):02} " in command
    assert "%" not in command  # to cron the end of a line
    assert "llama-small, deepseek-small: not started" in said


def test_the_crontab_has_every_variable_that_the_example_of_a_site_names() -> None:
    site = (CONF / "examples" / "site.toml").read_text(encoding="utf-8")
    crontab = (CONF / "examples" / "crontab").read_text(encoding="utf-8")

    assert set(re.findall(r'"env:(\w+)"', site)) <= set(re.findall(r"^(\w+)=", crontab, re.MULTILINE))
