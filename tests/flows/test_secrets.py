"""No secret is left anywhere, and no stranger is called: one night with planted values, whose jobs print them in every form.

The embedded cluster, the real NeMo-Run and an S3 store. Home and temporary folder are the test's own, so that nothing
which the night writes escapes the search. Every process of ours writes down whom it talks to.
"""

import contextlib
import html
import json
import os
import platform
import re
import secrets
import sqlite3
import stat
import subprocess
import sys
import threading
import tomllib
from base64 import b64encode, urlsafe_b64encode
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import quote, quote_plus, urlsplit

import pytest

from examples.practice.git_writer import Change, add_commits, git
from examples.practice.repositories import commit_behaviour, make_practice_repositories
from nightbridge.masking import MASK
from nightbridge.models import SecretRef, StoreSettings
from tests.conftest import BUCKET
from tests.flows.practice_night import Entry, nightbridge, nightbridge_here, toml, write_scenario, write_site
from tests.real.prefect_server import make_home
from tests.real.s3_servers import S3Server
from tests.real.socket_audit import called_hosts, make_audited_python

pytestmark = [pytest.mark.s3, pytest.mark.launcher]


TALKATIVE = """
import base64, bz2, contextlib, html, json, lzma, os, quopri, urllib.parse
from pathlib import Path
printed, foreign = json.load(open('FILE'))
printed += [os.environ[name] for name in ('HF_TOKEN', 'SERVICE_API_KEY') if name in os.environ]
print(foreign, flush=True)
for value in printed:
    raw = value.encode()
    for text in (
        value, repr(value), json.dumps({'token': value}), html.escape(value), raw.hex(), raw.hex(':'),
        urllib.parse.quote(value, safe=''), urllib.parse.quote_plus(value), ''.join(f'%{byte:02X}' for byte in raw),
        *('Basic ' + base64.b64encode(b'x' * n + raw + b'y' * n).decode() for n in range(4)),
        *(base64.urlsafe_b64encode(b'x' * n + raw).decode() for n in range(3)),
        *(base64.encodebytes(b'x' * n + raw + b'y' * 99).decode() for n in range(40, 43)),
        json.dumps(json.dumps(value)), value.replace('/', '\\\\/'),
    ):
        print(text)
        print('\\x1b[1m'.join(text))
        print(text[:9] + '\\n        ' + text[9:], flush=True)
    print(quopri.encodestring(b'x' * 60 + raw).decode(), flush=True)
    os.write(1, value.encode('utf-16-be') + value.encode('utf-32-le') + b'\\n')
token = os.environ['HF_TOKEN']
profile, boards = Path.cwd().parent / 'nsys_profile', Path.cwd().parent / 'tb_logs'
for folder in (profile, boards, profile / token):
    folder.mkdir(exist_ok=True)
for name, data in {
    'report.nsys-rep': bytes(99) + base64.b64encode(token.encode()) + bytes(99),
    'wide.nsys-rep': token.encode('utf-32-be'),
    'trace.json.bz2': bz2.compress(token.encode()),
    'trace.json.xz': lzma.compress(token.encode()),
    f'{token}.nsys-rep': b'nothing',
    f'{token}/report.nsys-rep': b'nothing',
}.items():
    (profile / name).write_bytes(data)
with contextlib.suppress(FileExistsError):
    (profile / 'link').symlink_to('/nowhere/' + token)
if 'MUST_FAIL' in os.environ:
    (boards / 'events.out.tfevents.1799999999.damaged').write_bytes(token.encode() * 9)
    (boards / f'events.out.tfevents.1799999999.{token}').write_bytes(b'damaged')
    raise RuntimeError(f'401 Client Error: invalid {token} for https://me:{token}@huggingface.co/api?token={token}')
"""
"""What a job does before it trains: print secrets in every form, and hide one in names and in files that cannot be masked.
One of them then fails over it."""

HIDDEN = {
    *(
        f"profiles/nsys_profile/{name}"
        for name in ("report.nsys-rep", "wide.nsys-rep", "trace.json.bz2", "trace.json.xz")
    ),
    *(f"profiles/nsys_profile/{MASK}{name}" for name in (".nsys-rep", "/report.nsys-rep")),
}
"""What of that is not stored."""

HIDDEN_BY_FAILING = {f"tensorboard/events.out.tfevents.1799999999.{name}" for name in ("damaged", MASK)}


def planted(prefix: str) -> str:
    return prefix + secrets.token_hex(16)


@dataclass(frozen=True)
class Planted:
    """The secrets of the night: from the environment, written in a TOML file, and where none belongs."""

    hf_token: str = field(default_factory=lambda: planted("hf_"))
    literal_token: str = field(default_factory=lambda: planted("hf_"))
    literal_variable: str = field(default_factory=lambda: planted("key-"))
    s3_access: str = field(default_factory=lambda: planted("AKIA"))
    literal_s3_secret: str = field(default_factory=lambda: planted("s3/+\"<&'"))
    git_login: str = field(default_factory=lambda: planted("git&'%"))
    image_login: str = field(default_factory=lambda: planted("registry-"))
    smtp_password: str = field(default_factory=lambda: planted("mail-"))
    webhook_path: str = field(default_factory=lambda: planted("/services/"))
    git_password: str = field(default_factory=lambda: planted("glpat-"))
    git_token: str = field(default_factory=lambda: planted("ghp_"))
    registry_password: str = field(default_factory=lambda: planted("nvapi-"))
    host_token: str = field(default_factory=lambda: planted("gho_"))
    host_address: str = field(default_factory=lambda: planted("word-"))
    foreign_token: str = field(default_factory=lambda: planted("ghp_0123"))
    foreign_key: str = field(default_factory=lambda: planted("MIIE") + planted(""))

    @property
    def in_environment(self) -> dict[str, str]:
        return {
            "HF_TOKEN": self.hf_token,
            "PLANTED_S3_ACCESS": self.s3_access,
            "PLANTED_GIT": f"machine git.example.org login me password {self.git_login}",
            "PLANTED_IMAGES": f"machine nvcr.io login $oauthtoken password {self.image_login}",
            "PLANTED_MAIL": self.smtp_password,
            "PLANTED_WEBHOOK": f"http://127.0.0.1:9{self.webhook_path}",
            "GITHUB_TOKEN": self.host_token,
            "DATABASE": f"postgres://me:{self.host_address}@127.0.0.1/nightbridge",
        }

    @property
    def foreign(self) -> str:
        """What nobody named, and everybody recognises."""
        return f"{self.foreign_token} -----BEGIN PRIVATE KEY-----\n{self.foreign_key}\n-----END PRIVATE KEY-----"

    @property
    def printed(self) -> list[str]:
        """What each job prints in every form beside its own secrets: those that the site names."""
        store = (self.s3_access, self.literal_s3_secret)
        return [*store, self.git_login, self.image_login, self.smtp_password, self.webhook_path]

    @property
    def all(self) -> dict[str, str]:
        return {**vars(self)}


@dataclass
class Watched:
    """What /proc showed while the night ran."""

    command_lines: set[bytes] = field(default_factory=set)
    environments: set[tuple[bytes, bytes]] = field(default_factory=set)
    """Of every process, each after its command line."""

    job_environments: dict[str, dict[str, str]] = field(default_factory=dict)
    """Of one training process of each job, by the job's name."""

    _others: set[str] = field(default_factory=lambda: {*os.listdir("/proc")})
    """What was there before the night, and is no part of it."""

    _seen: set[tuple[str, bytes]] = field(default_factory=set)
    """Processes as they were looked at: one has another environment only where it runs another command."""

    def look(self) -> None:
        there = {*os.listdir("/proc")}
        self._others &= there
        for pid in filter(str.isdigit, there - self._others):
            with contextlib.suppress(OSError):
                command_line = read_bytes(f"/proc/{pid}/cmdline")
                if (pid, command_line) in self._seen:
                    continue
                self.command_lines.add(command_line)
                found = read_bytes(f"/proc/{pid}/environ")
                if found:  # nothing while the command begins
                    self._seen.add((pid, command_line))
                self.environments.add((command_line, found))
                if b"bootstrap.py" in command_line:
                    variables = found.decode().split("\0")
                    environment = dict(line.split("=", 1) for line in variables if "=" in line)
                    if job := environment.get("SLURM_JOB_NAME"):
                        self.job_environments[job] = environment


def read_bytes(path: str) -> bytes:
    """A file of /proc, without what Python does for other files: each process is looked at fifty times a second."""
    with open(path, "rb", buffering=0) as file:
        return file.read()


@contextlib.contextmanager
def watching() -> Iterator[Watched]:
    watched, ended = Watched(), threading.Event()

    def look() -> None:
        while not ended.wait(0.02):
            watched.look()

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield watched
    finally:
        ended.set()
        thread.join()


@dataclass(frozen=True)
class Left:
    """A night and what it left."""

    folder: Path
    planted: Planted
    command: "subprocess.CompletedProcess[str]"
    watched: Watched
    objects: dict[str, bytes]
    """Everything in the bucket."""

    hosts: dict[str, set[str]]
    """Whom the night talked to, with the command lines of who did."""

    @property
    def written_by_the_person(self) -> list[Path]:
        return [*(self.folder / "conf").iterdir(), self.folder / "site.toml"]

    @property
    def written_by_jobs(self) -> list[Path]:
        """What the jobs themselves wrote into the workspace, with their own hands."""
        runs = self.folder / "workspace" / "runs"
        return [path for path in runs.rglob("*") if path.is_file() and {"nemorun", "output"} & {*path.parts}]

    @property
    def files(self) -> list[Path]:
        """Every file below the night's folder, Prefect's home, the temporary folder and the home folder among them."""
        others = {*self.written_by_the_person, *self.written_by_jobs}
        return [path for path in self.folder.rglob("*") if path.is_file() and path not in others]

    def verdict(self, test_id: str) -> dict[str, str]:
        (verdict,) = (each for each in json.loads(self.command.stdout)["verdicts"] if each["test_id"] == test_id)
        return dict(verdict)


@pytest.fixture(scope="module")
def left(
    ministack: S3Server, environments_dir: Path, launcher_python: Path, tmp_path_factory: pytest.TempPathFactory
) -> Left:
    folder = tmp_path_factory.mktemp("secrets")
    values = Planted()
    repositories = make_practice_repositories(folder / "practice")
    commit_behaviour(repositories, "Take long enough to be looked at", slow_wall=0.05)
    (folder / "conf").mkdir()
    (folder / "conf/printed.json").write_text(json.dumps([values.printed, values.foreign]))
    bootstrap = "scripts/performance/bootstrap.py"
    text = git(Path(repositories.bridge_url), "show", f"main:{bootstrap}")
    talk = TALKATIVE.replace("FILE", str(folder / "conf/printed.json"))
    text = text.replace("    args, overrides", f"    exec({talk!r}, {{}})\n    args, overrides", 1)
    change = Change(message="Talk", made_at=datetime(2026, 11, 20, tzinfo=UTC), files={bootstrap: text.encode()})
    add_commits(Path(repositories.bridge_url), [change])
    scenario = write_scenario(
        folder / "conf",
        repositories,
        "with-secrets",
        Entry(id="from-environment", cmd_args={"hf_token": "env:HF_TOKEN"}),
        Entry(id="literal", sample="deepseek_small", cmd_args={"hf_token": values.literal_token}),
        Entry(
            id="in-an-image", cmd_args={"container_image": f"me:{values.registry_password}@nvcr.io#nvidia/nemo:26.06"}
        ),
    )
    with scenario.open("a") as stream:
        stream.write(address_entry("git-password", f"https://me:{values.git_password}@127.0.0.1:9/Megatron-Bridge.git"))
        stream.write(address_entry("git-token", f"https://{values.git_token}@127.0.0.1:9/Megatron-Bridge.git"))
        failing = 'test_name = "llama_small"\ncmd_args.hf_token = "env:HF_TOKEN"\nextra_env_vars.MUST_FAIL = "1"\n'
        stream.write(f'\n[[Tests]]\nid = "failing"\n{failing}')
    literal = folder / "conf/deepseek_small.toml"
    literal.write_text(literal.read_text() + f'\n[extra_env_vars]\nSERVICE_API_KEY = "{values.literal_variable}"\n')
    site = write_site(
        folder / "site.toml",
        workspace=folder / "workspace",
        environments=environments_dir,
        store=StoreSettings(
            url=f"s3://{BUCKET}/secrets",
            endpoint_url=ministack.endpoint_url,
            region="us-east-1",
            access_key=SecretRef(source="env", name="PLANTED_S3_ACCESS"),
        ),
    )
    settings = [
        'git_credentials = "env:PLANTED_GIT"',
        site.read_text() + f"secret_key = {toml(values.literal_s3_secret)}",
        '[image_import]\ncredentials = "env:PLANTED_IMAGES"',
        '[notify]\nsmtp_host = "127.0.0.1"\nsmtp_port = 9\nmail_to = ["me@example.org"]\nsmtp_user = "me"',
        'smtp_password = "env:PLANTED_MAIL"\nwebhook = "env:PLANTED_WEBHOOK"\n',
    ]
    site.write_text("\n".join(settings))
    for name in ("home", "tmp"):
        (folder / name).mkdir()
    make_home(folder / "prefect")
    # What the tests themselves set to keep telemetry at home is not what keeps the night's at home.
    telemetry = {"DO_NOT_TRACK", "PREFECT_SERVER_ANALYTICS_ENABLED", "CI"}
    # And this one night asks for tokens against forged requests, as every client of Prefect does by default.
    of_the_tests = {*telemetry, "PREFECT_CLIENT_CSRF_SUPPORT_ENABLED"}
    environment = {
        **{name: value for name, value in os.environ.items() if name not in of_the_tests},
        **values.in_environment,
        "HOME": str(folder / "home"),
        "TMPDIR": str(folder / "tmp"),
        "PREFECT_HOME": str(folder / "prefect"),
        "PREFECT_LOGGING_LEVEL": "DEBUG",
    }
    with watching() as watched:
        command = nightbridge(
            *("run", scenario, "--system", site, "--night", "2026-11-21", "--json"),
            environment=environment,
            python=make_audited_python(folder / "audited"),
        )
    assert command.stdout, command.stderr
    client = ministack.client()
    listed = client.list_objects_v2(Bucket=BUCKET, Prefix="secrets/")["Contents"]
    objects = {item["Key"]: client.get_object(Bucket=BUCKET, Key=item["Key"])["Body"].read() for item in listed}
    return Left(folder, values, command, watched, objects, called_hosts(folder / "audited"))


def address_entry(test_id: str, url: str) -> str:
    return "\n".join(
        ("", "[[Tests]]", f'id = "{test_id}"', 'test_name = "llama_small"', "[[Tests.git_repos]]", f'url = "{url}"', "")
    )


def spellings(value: str) -> set[bytes]:
    """A value as it is, and in every usual encoding: as base64 wherever it may begin in the text that was encoded."""
    raw = value.encode()
    padded = (encode(b"\0" * shift + raw) for shift in range(3) for encode in (b64encode, urlsafe_b64encode))
    texts = {
        *(value, raw.hex(), raw.hex().upper(), raw.hex(":"), quote(value, safe=""), quote_plus(value)),
        *("".join(f"%{byte:02X}" for byte in raw), json.dumps(value)[1:-1], repr(value)[1:-1], html.escape(value)),
    }
    wide = (value.encode(form).strip(b"\0") for form in ("utf-16-le", "utf-32-le"))
    return {text.encode() for text in texts} | {text[4:-4] for text in padded} | {*wide}


def found_in(data: bytes, planted: Planted) -> list[str]:
    """The names of the planted secrets that are in some bytes, also with escape codes and white space in them."""
    joined = re.sub(rb"\x1b\[[0-9;]*m|\s+", b"", data)
    return [
        name for name, value in planted.all.items() if any(text in data or text in joined for text in spellings(value))
    ]


# --- the night works -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("test_id", ["from-environment", "literal"])
def test_tests_with_secrets_run(left: Left, test_id: str) -> None:
    assert left.verdict(test_id)["status"] == "no_baseline", left.command.stderr[-3000:]


def test_each_job_has_its_own_token_in_its_environment(left: Left) -> None:
    from_environment = left.watched.job_environments[f"{left.verdict('from-environment')['run_key']}-a1"]
    literal = left.watched.job_environments[f"{left.verdict('literal')['run_key']}-a1"]

    assert from_environment["HF_TOKEN"] == left.planted.hf_token
    assert "SERVICE_API_KEY" not in from_environment
    assert literal["HF_TOKEN"] == left.planted.literal_token
    assert literal["SERVICE_API_KEY"] == left.planted.literal_variable


def test_no_job_has_a_secret_of_the_site_of_the_host_or_of_another_test(left: Left) -> None:
    for environment in left.watched.job_environments.values():
        values = "\0".join(environment.values()).encode()
        own = {"hf_token"} if "SERVICE_API_KEY" not in environment else {"literal_token", "literal_variable"}
        assert {*found_in(values, left.planted)} <= own


@pytest.mark.parametrize("test_id", ["git-password", "git-token", "in-an-image"])
def test_a_secret_in_an_address_is_refused(left: Left, test_id: str) -> None:
    assert left.verdict(test_id)["status"] == "invalid"


def test_the_jobs_have_printed_every_secret_where_only_their_user_reads_it(left: Left) -> None:
    printed = {name for path in left.written_by_jobs for name in found_in(path.read_bytes(), left.planted)}
    modes = {
        stat.S_IMODE(path.stat().st_mode) & 0o077
        for path in (left.folder / "workspace").rglob("*")
        # NeMo-Run gives the scripts that it renders a mode of its own.
        if not path.is_symlink() and path.parent.name != "scripts"
    }

    assert printed >= {name for name, value in left.planted.all.items() if value in left.planted.printed}
    assert printed >= {"hf_token", "literal_token", "literal_variable", "foreign_token", "foreign_key"}
    assert (stat.S_IMODE((left.folder / "workspace").stat().st_mode), modes) == (0o700, {0})


def test_what_was_printed_was_masked_and_what_cannot_be_masked_is_named(left: Left) -> None:
    manifests = [json.loads(data) for key, data in left.objects.items() if key.endswith("/manifest.json")]

    assert [manifest["masks"] > 100 for manifest in manifests] == [True, True, True]
    for manifest in manifests:
        hidden = {entry["path"] for entry in manifest["left_out"] if "contains a secret" in entry["reason"]}
        failed = manifest["run_key"].startswith("failing")
        assert hidden == HIDDEN | (HIDDEN_BY_FAILING if failed else set())


def test_a_job_that_failed_over_its_token_is_told_without_it(left: Left) -> None:
    verdict = left.verdict("failing")

    assert verdict["status"] == "failed"
    assert f"401 Client Error: invalid {MASK}" in str(verdict["reasons"])


# --- nobody else is called -------------------------------------------------------------------------------------------


def test_the_night_talks_to_nobody_but_whom_the_site_file_names_and_this_machine(left: Left) -> None:
    site = tomllib.loads((left.folder / "site.toml").read_text())
    named = {urlsplit(str(site["store"][key])).hostname for key in ("url", "endpoint_url")} | {
        site["notify"]["smtp_host"]
    }
    allowed = {*named, "127.0.0.1", "::1", "localhost", "None", platform.node()}

    assert {host: lines for host, lines in left.hosts.items() if host not in allowed} == {}
    assert any("nightbridge run" in line for line in left.hosts["127.0.0.1"]), left.hosts


def test_the_audit_hears_isolated_processes_and_look_ups(tmp_path: Path) -> None:
    python = make_audited_python(tmp_path)
    call = "import socket; s = socket.socket(); s.settimeout(0.01); s.connect_ex(('192.0.2.1', 9)); socket.getaddrinfo('localhost', 9)"
    subprocess.run([python, "-I", "-c", call], check=True)

    assert called_hosts(tmp_path).keys() == {"192.0.2.1", "localhost"}


# --- nothing is left -------------------------------------------------------------------------------------------------


def test_no_file_holds_a_secret(left: Left) -> None:
    holding = {str(path): names for path in left.files if (names := found_in(path.read_bytes(), left.planted))}

    assert holding == {}


def test_only_the_files_that_the_person_wrote_hold_the_literal_ones(left: Left) -> None:
    written = {name for path in left.written_by_the_person for name in found_in(path.read_bytes(), left.planted)}

    assert written == left.planted.all.keys() - {"hf_token", "host_token", "host_address"}


def test_no_object_in_the_bucket_holds_a_secret_in_its_name_or_its_bytes(left: Left) -> None:
    found = {key: found_in(key.encode() + data, left.planted) for key, data in left.objects.items()}
    assert {key: names for key, names in found.items() if names} == {}


def test_neither_stdout_nor_the_log_on_stderr_shows_a_secret(left: Left) -> None:
    assert found_in(left.command.stdout.encode(), left.planted) == []
    assert found_in(left.command.stderr.encode(), left.planted) == []


def test_no_process_ever_has_a_secret_on_its_command_line(left: Left) -> None:
    assert [line for line in left.watched.command_lines if found_in(line, left.planted)] == []


def test_no_process_but_the_night_itself_has_more_than_a_tests_own_secrets_in_its_environment(left: Left) -> None:
    """A launcher and a job have what their test names; git, pip and all others have nothing.

    Python's `platform.architecture()`, which Prefect calls while it is imported, runs `file -b` on the interpreter with
    the night's environment: it is part of the night itself.
    """
    own = {"hf_token", "literal_token", "literal_variable"}
    of_the_interpreter = b"file\0-b\0" + os.path.realpath(sys.executable).encode()
    holders = [
        (line.replace(b"\0", b" ")[:150], {*found_in(environment, left.planted)})
        for line, environment in left.watched.environments
        if b"nightbridge\0run\0" not in line and not line.startswith(of_the_interpreter)
    ]

    assert {"literal_token", "literal_variable"} in [names for _, names in holders]
    assert {line for line, names in holders if names - own} == set()


@pytest.mark.parametrize("command", ["render", "validate"])
def test_showing_a_test_shows_no_secret(left: Left, command: str, capfd: pytest.CaptureFixture[str]) -> None:
    scenario = left.folder / "conf/with-secrets.toml"
    shown = nightbridge_here(capfd, command, scenario, "--json", **left.planted.in_environment)

    assert json.loads(shown.stdout)
    assert found_in((shown.stdout + shown.stderr).encode(), left.planted) == []


# --- the search itself would find them -------------------------------------------------------------------------------


def test_the_search_looks_where_prefect_keeps_runs_logs_results_and_artifacts(left: Left) -> None:
    (database,) = (path for path in left.files if path.name == "prefect.db")
    with contextlib.closing(sqlite3.connect(database)) as connection:
        artifacts = {key for (key,) in connection.execute("select key from artifact")}
        rows = {
            table: connection.execute(f"select count(*) from {table}").fetchone()[0] for table in ("flow_run", "log")
        }
    results = [path for path in left.files if path.parent == left.folder / "prefect/storage"]

    assert {"verdicts", "report", "verdict"} <= {key.partition("-")[0] for key in artifacts if key}
    assert rows["flow_run"] == 4
    assert rows["log"] > 50
    assert any(left.verdict("literal")["run_key"] in path.name for path in results)


def test_the_search_looks_at_the_launchers_and_the_jobs_files(left: Left) -> None:
    names = {path.name for path in left.files}

    assert {"launcher.log", "job.sh", "attempt.json"} <= names
    assert any(key.endswith("/manifest.json") for key in left.objects)
    # Launchers are forks of it.
    assert any(b"warm_launchers.py" in line for line in left.watched.command_lines)


@pytest.mark.parametrize("shift", range(3))
def test_the_search_sees_through_base64(shift: int) -> None:
    planted = Planted()

    assert found_in(b64encode(b"x" * shift + planted.hf_token.encode() + b"yz"), planted) == ["hf_token"]
    assert found_in(planted.git_token.encode(), planted) == ["git_token"]
