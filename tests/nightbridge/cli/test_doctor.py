"""Doctor: what a night needs of this host is tried, every trouble is told, and nothing stays behind."""

import json
import os
import re
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from nightbridge import doctor
from nightbridge.cli import main as cli
from nightbridge.doctor import Check, checks
from nightbridge.models import ClusterLimits, ClusterSettings, ImageImport, SecretRef, Site, StoreSettings
from nightbridge.slurm.local import LocalCluster
from nightbridge.store.object_store import ObjectStore, open_store
from tests.nightbridge.cli.conftest import Program
from tests.real.slurm_daemons import SlurmDaemons

SUBJECTS = ["workspace", "secrets", "git", "launcher environment", "containers", "cluster", "store", "Prefect API"]


def findings_of(site: Site, store: Callable[[], ObjectStore] | None = None) -> dict[str, Check]:
    return {each.subject: each for each in checks(site, store or (lambda: open_store(site.store_settings)))}


def test_the_embedded_default_has_all_that_a_night_needs(tmp_path: Path) -> None:
    found = findings_of(Site(workspace=tmp_path / "workspace"))

    assert list(found) == SUBJECTS
    assert all(finding.healthy for finding in found.values()), found
    assert "embedded" in found["cluster"].what
    assert "the first run installs it" in found["launcher environment"].what


def test_nothing_is_created(tmp_path: Path) -> None:
    site = Site(workspace=tmp_path / "workspace")

    found = findings_of(site)

    assert list(tmp_path.iterdir()) == []
    assert "the first night makes it; " in found["workspace"].what
    assert " GB free" in found["workspace"].what


@pytest.mark.parametrize("subject", ["workspace", "store"])
def test_a_mistyped_path_is_bad_and_is_not_made(tmp_path: Path, subject: str) -> None:
    mistyped = tmp_path / "lustr" / "nightbridge"
    places = {"workspace": tmp_path / "workspace", "store": tmp_path / "store"} | {subject: mistyped}
    site = Site(workspace=places["workspace"], store=StoreSettings(url=f"file://{places['store']}"))

    found = findings_of(site)

    assert [each.subject for each in found.values() if not each.healthy] == [subject]
    assert f"does not exist, and neither does {mistyped.parent}" in found[subject].what
    assert not mistyped.parent.exists()


def test_a_workspace_whose_path_the_launcher_would_alter_is_bad(tmp_path: Path) -> None:
    found = findings_of(Site(workspace=tmp_path / "my repo"))

    assert [each.subject for each in found.values() if not each.healthy] == ["workspace"]
    assert "my repo: its path contains white space, which the batch script would split" in found["workspace"].what


def test_a_disk_that_is_almost_full_is_bad(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "LEAST_FREE", 1 << 60)

    found = findings_of(Site(workspace=tmp_path / "workspace"))

    assert [each.subject for each in found.values() if not each.healthy] == ["workspace"]
    assert " MB are free on the " in found["workspace"].what


def test_launcher_environments_that_nobody_can_add_to_are_bad(tmp_path: Path) -> None:
    environments = tmp_path / "envs"
    environments.write_text("a file")

    found = findings_of(Site(workspace=tmp_path / "workspace", environments=environments))

    assert [each.subject for each in found.values() if not each.healthy] == ["launcher environment"]


def test_the_mount_of_a_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "workspace").mkdir()
    point = subprocess.run(["df", "--output=target,fstype", tmp_path], capture_output=True, text=True, check=True)
    target, kind = point.stdout.splitlines()[1].split()

    what = findings_of(Site(workspace=tmp_path / "workspace"))["workspace"].what

    assert f"can be written; {kind} mounted at {target}, " in what


def test_every_missing_secret_is_named_by_its_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NB_THERE", "x")
    ref = {name: SecretRef(source="env", name=name) for name in ("NB_A", "NB_B", "NB_THERE")}
    store = StoreSettings(url=f"file://{tmp_path}/s", access_key=ref["NB_A"], secret_key=ref["NB_THERE"])
    site = Site(workspace=tmp_path, store=store, git_credentials=ref["NB_B"])

    finding = findings_of(site)["secrets"]

    assert not finding.healthy
    assert "store.access_key: NB_A: secret not found" in finding.what
    assert "git_credentials: NB_B: secret not found" in finding.what
    assert "NB_THERE" not in finding.what


def test_one_trouble_does_not_hide_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "workspace").write_text("a file")
    monkeypatch.setenv("PATH", str(tmp_path))
    cluster = ClusterSettings(kind="slurm", name="big", containers="pyxis")

    found = findings_of(Site(workspace=tmp_path / "workspace", cluster=cluster, store=StoreSettings(url="ftp://there")))

    assert [subject for subject, finding in found.items() if not finding.healthy] == [
        "workspace", "git", "containers", "cluster", "store"
    ]  # fmt: skip
    assert all(found[subject].advice for subject in ("workspace", "git", "containers", "cluster", "store"))


def test_a_cluster_that_is_said_to_have_pyxis_and_has_none_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As a real cluster answers whose srun has no --container-image; the embedded one goes by its settings.
    monkeypatch.setattr(LocalCluster, "limits", lambda _: ClusterLimits(partitions=("all",), has_pyxis=False))
    site = Site(workspace=tmp_path, cluster=ClusterSettings(containers="pyxis"), image_import=ImageImport(on="node"))

    found = findings_of(site)

    assert found["containers"].what == "images are imported on a compute node, with its enroot"
    assert "has no pyxis" in found["cluster"].what


@pytest.mark.parametrize(
    ("limits", "what", "advice"),
    [
        (
            {"partitions": ("batch", "debug"), "partition": "bach"},
            "no partition 'bach'",
            "Name batch or debug as the cluster's partition",
        ),
        (
            {"partitions": ("batch",), "partition": "batch", "account": "me", "accounts": ("llm", "perf")},
            "account 'me' may not submit to partition 'batch'",
            "Name llm or perf as the cluster's account",
        ),
    ],
)
def test_a_partition_or_an_account_that_slurm_would_refuse_is_bad(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limits: dict[str, Any], what: str, advice: str
) -> None:
    monkeypatch.setattr(LocalCluster, "limits", lambda _: ClusterLimits(**limits))

    found = findings_of(Site(workspace=tmp_path / "workspace"))

    assert [subject for subject, finding in found.items() if not finding.healthy] == ["cluster"]
    assert (found["cluster"].what, found["cluster"].advice) == (f"local: {what}", advice)


@pytest.mark.parametrize(
    ("key", "codes", "healthy"),
    [
        ("RequeueExit", "1-9,18", False),
        ("RequeueExit", "18,99", True),
        ("RequeueExitHold", "137", False),
        ("RequeueExitHold", "78", False),
        ("RequeueExit", None, True),
    ],
)
def test_exit_codes_that_put_a_job_back_into_the_queue_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, codes: str | None, healthy: bool
) -> None:
    """As a real slurmctld 22.05 does: such a job ran again two minutes later though it had Requeue=0."""
    monkeypatch.setattr(LocalCluster, "configured", lambda _, asked: codes if asked == key else None)

    found = findings_of(Site(workspace=tmp_path / "workspace"))["cluster"]

    assert found.healthy is healthy
    assert (f"{key} {codes} (a job that ends with such a code is not over" in found.what) is (codes is not None)
    assert ("77 to 79 (nightbridge's guard)" in found.advice) is not healthy


@pytest.mark.slurm
def test_slurm_says_where_jobs_go(tmp_path: Path, slurm_cluster: SlurmDaemons) -> None:
    settings = ClusterSettings(kind="slurm", name="debian", slurm_conf=slurm_cluster.slurm_conf, gpus_per_node=4)

    finding = findings_of(Site(workspace=tmp_path, cluster=settings))["cluster"]

    assert finding.healthy
    assert finding.what == "debian: using Slurm's commands, partition debug, nodes of one job 2, GPUs of a node 4"
    mistyped = settings.model_copy(update={"partition": "debugg"})
    wrong = findings_of(Site(workspace=tmp_path, cluster=mistyped))["cluster"]
    assert (wrong.healthy, wrong.what) == (False, "debian: no partition 'debugg'")


def test_a_secret_that_is_not_there_is_the_stores_trouble(tmp_path: Path) -> None:
    missing = SecretRef(source="env", name="NIGHTBRIDGE_NOT_SET")
    store = StoreSettings(url="s3://bucket", endpoint_url="http://127.0.0.1:9", access_key=missing, secret_key=missing)

    finding = findings_of(Site(workspace=tmp_path, store=store))["store"]

    assert not finding.healthy
    assert "NIGHTBRIDGE_NOT_SET" in finding.what + finding.advice


def test_the_command_prints_a_line_for_each_and_exits_with_4_when_one_is_bad(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")

    good = cli.run(["doctor", "--workspace", str(tmp_path / "workspace")])
    said = capsys.readouterr()
    *lines, summary = said.out.splitlines()
    without_store = ["doctor", "--workspace", str(tmp_path / "workspace"), "--store", f"file://{tmp_path}/file"]
    bad = cli.run([*without_store, "--json"])
    document = json.loads(capsys.readouterr().out)
    cli.run(without_store)

    assert capsys.readouterr().out.splitlines()[-1] == f"1 of {len(SUBJECTS)} needs you: store"
    assert good == 0
    assert summary == f"all {len(SUBJECTS)} checks passed"
    assert "no site named: this is the embedded cluster" in said.err
    assert [line[2:24].strip() for line in lines] == SUBJECTS
    assert bad == 4
    assert [each["subject"] for each in document["findings"] if not each["healthy"]] == ["store"]


@pytest.mark.parametrize("option", ["--cluster", "--store", "--system"])
def test_a_name_that_only_a_block_could_have_is_refused_without_a_server(
    nightbridge: Program, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    monkeypatch.delenv("PREFECT_API_URL", raising=False)

    status, _, message = nightbridge("doctor", option, "nosuch")

    assert status == 2
    assert message.startswith("nightbridge: nosuch: no cluster, store or site of this name")
    assert "Give local, slurm, pyslurm, auto" in message


def test_a_server_that_does_not_answer_is_told_without_prefect(
    nightbridge: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    with socket.socket() as taken:  # bound, and nobody listens
        taken.bind(("127.0.0.1", 0))
        monkeypatch.setenv("PREFECT_API_URL", f"http://127.0.0.1:{taken.getsockname()[1]}/api")

        status, _, message = nightbridge("doctor", "--cluster", "nosuch")

    assert status == 2
    assert "nosuch: no cluster, store or site of this name, and no Prefect server answers at 127.0.0.1:" in message
    assert "Give local, slurm, pyslurm, auto" in message


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Configures a server of Prefect's API: with what status it answers a question, at which address, which release."""
    with ExitStack() as running:

        def answer(status: int, address: str, version: str | None = None, leases: str = "") -> None:
            class Api(BaseHTTPRequestHandler):
                def do_POST(self) -> None:
                    self.reply(status, [])

                def do_GET(self) -> None:
                    if leases and self.path == "/api/admin/settings":
                        self.reply(200, {"server": {"concurrency": {"lease_storage": leases}}})
                    else:
                        self.reply(200 if version else 404, version)

                def reply(self, status: int, document: object) -> None:
                    self.send_response(status)
                    self.end_headers()
                    self.wfile.write(json.dumps(document).encode())

                def log_message(self, *arguments: Any) -> None:
                    pass

            server = running.enter_context(HTTPServer(("0.0.0.0", 0), Api))
            running.callback(server.shutdown)
            threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
            monkeypatch.setenv("PREFECT_API_URL", f"http://{address}:{server.server_port}/api")

        yield answer


@pytest.mark.parametrize(
    ("answer", "address", "healthy"), [(200, "0.0.0.0", False), (200, "127.0.0.1", True), (401, "0.0.0.0", True)]
)
def test_an_api_that_others_reach_wants_a_login(
    tmp_path: Path, api: Callable[..., None], answer: int, address: str, healthy: bool
) -> None:
    api(answer, address)

    found = findings_of(Site(workspace=tmp_path / "workspace"))["Prefect API"]

    assert found.healthy is healthy
    assert ("may start and change deployments" in found.what) is not healthy


@pytest.mark.parametrize(("version", "healthy"), [("3.7.99", False), ("3.8.0", True), ("3.10.0", True), (None, True)])
def test_a_prefect_server_that_is_older_than_this_host_s_prefect_is_bad(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, api: Callable[..., None], version: str | None, healthy: bool
) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda _: "3.8.8")
    api(200, "127.0.0.1", version)

    found = findings_of(Site(workspace=tmp_path / "workspace"))["Prefect API"]

    assert found.healthy is healthy
    assert version is None or f"Prefect {version}" in found.what
    assert ("Upgrade the server first" in found.advice) is not healthy


MEMORY = "prefect.server.concurrency.lease_storage.memory"


@pytest.mark.parametrize(
    ("leases", "limits", "healthy"),
    [
        (MEMORY, {"max_jobs": 4}, False),
        (MEMORY, {"max_jobs_per_account": 4}, False),
        (MEMORY, {}, True),  # nobody takes a slot
        ("prefect.server.concurrency.lease_storage.filesystem", {"max_jobs": 4}, True),
        ("prefect_redis.lease_storage", {"max_jobs": 4}, True),
        ("", {"max_jobs": 4}, True),  # another release, or a proxy that lets no settings through
    ],
)
def test_a_server_that_forgets_who_holds_a_slot_of_max_jobs_is_bad(
    tmp_path: Path, api: Callable[..., None], leases: str, limits: dict[str, Any], healthy: bool
) -> None:
    api(200, "127.0.0.1", leases=leases)

    found = findings_of(Site(workspace=tmp_path / "workspace", cluster=ClusterSettings(**limits)))["Prefect API"]

    assert found.healthy is healthy
    assert ("slots stay taken for ever" in found.what) is not healthy
    assert ("lease_storage.filesystem for the server" in found.advice) is not healthy


def test_a_configured_server_that_does_not_answer_is_bad_for_no_night_begins_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")

    found = findings_of(Site(workspace=tmp_path / "workspace"))["Prefect API"]

    assert not found.healthy
    assert "does not answer" in found.what
    assert found.advice == "Start it, or unset PREFECT_API_URL to go without"


def test_a_folder_that_prefect_cannot_make_is_bad(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "file" / "home" / ".prefect"))

    found = findings_of(Site(workspace=tmp_path / "workspace"))["Prefect API"]

    assert not found.healthy
    assert "Prefect's folder cannot be written" in found.what
    assert "Set PREFECT_HOME" in found.advice


# --- folders and clocks ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("setting", "subject"), [("images", "containers"), ("environments", "launcher environment")])
def test_a_mistyped_folder_of_images_or_environments_is_bad_and_is_not_made(
    tmp_path: Path, setting: str, subject: str
) -> None:
    cluster, on_node = ClusterSettings(containers="pyxis"), ImageImport(on="node")
    workspace, mistyped = tmp_path / "workspace", tmp_path / "lustr" / "shared"
    inside = Site(workspace=workspace, cluster=cluster, image_import=on_node, **{setting: workspace / "here"})
    elsewhere = inside.model_copy(update={setting: mistyped})

    assert findings_of(inside)[subject].healthy
    assert not findings_of(elsewhere)[subject].healthy
    assert f"does not exist, and neither does {mistyped.parent}" in findings_of(elsewhere)[subject].what
    assert not mistyped.parent.exists()


@pytest.mark.parametrize(("ahead", "healthy"), [(-60.0, False), (0.0, True), (60.0, False)])
def test_a_clock_that_is_far_from_the_file_server_s_is_bad(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead: float, healthy: bool
) -> None:
    now = time.time
    monkeypatch.setattr("time.time", lambda: now() + ahead)

    found = findings_of(Site(workspace=tmp_path))["workspace"]

    assert found.healthy is healthy
    # 59 or 61 where the machine stood still meanwhile.
    assert bool(re.search(r"this host's clock and that of its files are \d\d s apart", found.what)) is not healthy
