"""No secret is left anywhere: one night with planted values, and then everything that it left is searched for them.

The embedded cluster, the real NeMo-Run and an S3 store. Home and temporary folder are the test's own, so that nothing
which the night writes escapes the search.
"""

import base64
import contextlib
import json
import os
import secrets
import sqlite3
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from examples.practice.repositories import commit_behaviour, make_practice_repositories
from nightbridge.models import SecretRef, StoreSettings
from tests.conftest import BUCKET
from tests.flows.practice_night import Entry, nightbridge, toml, write_scenario, write_site
from tests.real.s3_servers import S3Server

pytestmark = [pytest.mark.s3, pytest.mark.launcher]


def planted(prefix: str) -> str:
    return prefix + secrets.token_hex(16)


@dataclass(frozen=True)
class Planted:
    """The secrets of the night: from the environment, written in a TOML file, and where none belongs."""

    hf_token: str = field(default_factory=lambda: planted("hf_"))
    literal_token: str = field(default_factory=lambda: planted("hf_"))
    literal_variable: str = field(default_factory=lambda: planted("key-"))
    s3_access: str = field(default_factory=lambda: planted("AKIA"))
    literal_s3_secret: str = field(default_factory=lambda: planted("s3-"))
    git_password: str = field(default_factory=lambda: planted("glpat-"))
    git_token: str = field(default_factory=lambda: planted("ghp_"))
    registry_password: str = field(default_factory=lambda: planted("nvapi-"))

    @property
    def in_environment(self) -> dict[str, str]:
        return {"HF_TOKEN": self.hf_token, "PLANTED_S3_ACCESS": self.s3_access}

    @property
    def all(self) -> dict[str, str]:
        return {**vars(self)}


@dataclass
class Watched:
    """What /proc showed while the night ran."""

    command_lines: set[bytes] = field(default_factory=set)
    job_environments: dict[str, dict[str, str]] = field(default_factory=dict)
    """Of one training process of each job, by the job's name."""

    def look(self) -> None:
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                command_line = (process / "cmdline").read_bytes()
                self.command_lines.add(command_line)
                if b"bootstrap.py" in command_line:
                    variables = (process / "environ").read_bytes().decode().split("\0")
                    environment = dict(line.split("=", 1) for line in variables if "=" in line)
                    if job := environment.get("SLURM_JOB_NAME"):
                        self.job_environments[job] = environment


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

    @property
    def written_by_the_person(self) -> list[Path]:
        return [*(self.folder / "conf").glob("*.toml"), self.folder / "site.toml"]

    @property
    def files(self) -> list[Path]:
        """Every file below the night's folder, Prefect's home, the temporary folder and the home folder among them."""
        return [path for path in self.folder.rglob("*") if path.is_file() and path not in self.written_by_the_person]

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
    site.write_text(site.read_text() + f"secret_key = {toml(values.literal_s3_secret)}\n")
    for name in ("home", "tmp", "prefect"):
        (folder / name).mkdir()
    environment = {
        **os.environ,
        **values.in_environment,
        "HOME": str(folder / "home"),
        "TMPDIR": str(folder / "tmp"),
        "PREFECT_HOME": str(folder / "prefect"),
        "PREFECT_LOGGING_LEVEL": "DEBUG",
    }
    with watching() as watched:
        command = nightbridge(
            "run", scenario, "--system", site, "--night", "2026-11-21", "--json", environment=environment
        )
    assert command.stdout, command.stderr
    client = ministack.client()
    listed = client.list_objects_v2(Bucket=BUCKET, Prefix="secrets/")["Contents"]
    objects = {item["Key"]: client.get_object(Bucket=BUCKET, Key=item["Key"])["Body"].read() for item in listed}
    return Left(folder, values, command, watched, objects)


def address_entry(test_id: str, url: str) -> str:
    return "\n".join(
        ("", "[[Tests]]", f'id = "{test_id}"', 'test_name = "llama_small"', "[[Tests.git_repos]]", f'url = "{url}"', "")
    )


def spellings(value: str) -> list[bytes]:
    """A value as it is, and as base64 wherever it may begin in the text that was encoded."""
    padded = (base64.b64encode(b"\0" * shift + value.encode()) for shift in range(3))
    return [value.encode(), *(text[4:-4] for text in padded)]


def found_in(data: bytes, planted: Planted) -> list[str]:
    """The names of the planted secrets that are in some bytes."""
    return [name for name, value in planted.all.items() if any(text in data for text in spellings(value))]


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


def test_no_job_has_the_keys_of_the_store(left: Left) -> None:
    for environment in left.watched.job_environments.values():
        values = "\0".join(environment.values()).encode()
        assert {"s3_access", "literal_s3_secret"}.isdisjoint(found_in(values, left.planted))


@pytest.mark.parametrize("test_id", ["git-password", "git-token", "in-an-image"])
def test_a_secret_in_an_address_is_refused(left: Left, test_id: str) -> None:
    assert left.verdict(test_id)["status"] == "invalid"


# --- nothing is left -------------------------------------------------------------------------------------------------


def test_no_file_holds_a_secret(left: Left) -> None:
    holding = {str(path): names for path in left.files if (names := found_in(path.read_bytes(), left.planted))}

    assert holding == {}


def test_only_the_files_that_the_person_wrote_hold_the_literal_ones(left: Left) -> None:
    written = {name for path in left.written_by_the_person for name in found_in(path.read_bytes(), left.planted)}

    assert written == left.planted.all.keys() - {"hf_token", "s3_access"}


def test_no_object_in_the_bucket_holds_a_secret_in_its_name_or_its_bytes(left: Left) -> None:
    assert [key for key, data in left.objects.items() if found_in(key.encode() + data, left.planted)] == []


def test_neither_stdout_nor_the_log_on_stderr_shows_a_secret(left: Left) -> None:
    assert found_in(left.command.stdout.encode(), left.planted) == []
    assert found_in(left.command.stderr.encode(), left.planted) == []


def test_no_process_ever_has_a_secret_on_its_command_line(left: Left) -> None:
    assert [line for line in left.watched.command_lines if found_in(line, left.planted)] == []


@pytest.mark.parametrize("command", ["render", "validate"])
def test_showing_a_test_shows_no_secret(left: Left, command: str) -> None:
    environment = {**os.environ, **left.planted.in_environment}
    shown = nightbridge(command, left.folder / "conf/with-secrets.toml", "--json", environment=environment)

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

    assert {"nightly-verdicts", "nightly-report", "literal"} <= artifacts
    assert rows["flow_run"] == 3
    assert rows["log"] > 50
    assert any(left.verdict("literal")["run_key"] in path.name for path in results)


def test_the_search_looks_at_the_launchers_and_the_jobs_files(left: Left) -> None:
    names = {path.name for path in left.files}

    assert {"launcher.log", "job.sh", "attempt.json", "ConfigContainer.yaml"} <= names
    assert any(name.startswith("log-") for name in names)
    assert any(key.endswith("/manifest.json") for key in left.objects)
    assert any(b"setup_experiment.py" in line for line in left.watched.command_lines)


@pytest.mark.parametrize("shift", range(3))
def test_the_search_sees_through_base64(shift: int) -> None:
    planted = Planted()

    assert found_in(base64.b64encode(b"x" * shift + planted.hf_token.encode() + b"yz"), planted) == ["hf_token"]
    assert found_in(planted.git_token.encode(), planted) == ["git_token"]
