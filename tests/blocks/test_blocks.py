"""The blocks: registered by one command, described for the UI, and never showing a secret."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from prefect.blocks.core import Block
from prefect.testing.standard_test_suites.blocks import BlockStandardTestSuite
from pydantic import SecretStr, ValidationError

from examples.practice.repositories import PracticeRepositories
from nightbridge import blocks, models
from nightbridge.blocks import (
    HarvestStore,
    ImageCache,
    Notifications,
    SiteBlock,
    SlurmCluster,
    SourceRepositories,
    load_site,
    site_choice,
)
from nightbridge.errors import InvalidInput
from nightbridge.models import ClusterSettings, ImageImport, SecretRef, SiteChoice
from tests.real.git_server import served_over_http
from tests.real.notify_servers import webhook_server
from tests.real.prefect_server import PrefectServer

RELEASED = Path(__file__).parents[1] / "data" / "released"
"""What earlier releases wrote: blocks as their `save` left them in a Prefect server, secrets in the clear."""

BLOCKS = [getattr(blocks, name) for name in blocks.__all__ if isinstance(getattr(blocks, name), type)]


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.__name__, indirect=True)
class TestEveryBlock(BlockStandardTestSuite):
    @pytest.fixture
    def block(self, request: pytest.FixtureRequest) -> type[Block]:
        kind: type[Block] = request.param
        return kind

    @pytest.mark.skip(reason="Prefect takes a logo from an http address only, and the project has none")
    def test_has_a_valid_image(self, block: type[Block]) -> None: ...

    def test_types_its_secrets_into_password_inputs(self, block: type[Block]) -> None:
        schema = block.model_json_schema()
        secrets = [name for name in schema["secret_fields"] if "." not in name]

        assert [schema["properties"][name].get("format") for name in secrets] == ["password"] * len(secrets)
        assert not [name for name in secrets if "anyOf" in schema["properties"][name]]

    def test_has_a_default_for_every_field(self, block: type[Block]) -> None:
        # A saved block must still load after an upgrade that adds fields.
        assert not [name for name, field in block.model_fields.items() if field.is_required()]


@pytest.mark.parametrize("kind", [SiteBlock, HarvestStore])
def test_who_changes_the_schema_of_a_block_changes_nobody_elses(kind: type[Block]) -> None:
    text = json.dumps(kind.model_json_schema())
    asked = kind.model_json_schema()
    asked["properties"].clear()
    asked.clear()

    assert json.dumps(kind.model_json_schema()) == text


def test_one_command_registers_all_blocks_from_a_fresh_install(prefect_server: PrefectServer, tmp_path: Path) -> None:
    printed = prefect_server.prefect("block", "register", "-m", "nightbridge.blocks", cwd=tmp_path)

    assert f"Successfully registered {len(BLOCKS)} blocks" in printed


class TestSiteBlock:
    def test_is_the_embedded_default_when_nothing_is_named(self, tmp_path: Path) -> None:
        site = load_site(SiteChoice(workspace=tmp_path))

        assert site.cluster.kind == "local"
        assert site.store_settings.url == f"file://{tmp_path}/store"

    def test_workspace_is_always_absolute(self) -> None:
        assert load_site().workspace.is_absolute()

    def test_every_path_may_begin_with_the_home(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOME", "/home/nightly")

        site = SiteBlock(
            workspace="~/nights",
            cluster=SlurmCluster(slurm_conf=Path("~/slurm.conf")),
            images=ImageCache(folder="~/images"),
            repositories=SourceRepositories(wheels=Path("~/wheels")),
        ).settings()

        found = [site.workspace, site.cluster.slurm_conf, site.images, site.wheels]
        assert found == [Path("/home/nightly", name) for name in ("nights", "slurm.conf", "images", "wheels")]

    def test_puts_the_other_blocks_together(self) -> None:
        block = SiteBlock(
            workspace="/shared/nightbridge",
            cluster=SlurmCluster(name="eos", account="nemo", extra_sbatch_args=["--switches=1"]),
            store=HarvestStore(url="s3://nightly/llm", endpoint_url="http://127.0.0.1:1"),
        )

        site = block.settings()

        assert (site.cluster.name, site.cluster.account) == ("eos", "nemo")
        assert site.cluster.extra_sbatch_args == ("--switches=1",)
        assert site.store_settings.url == "s3://nightly/llm"
        assert site.images_dir == Path("/shared/nightbridge/images")

    def test_a_block_s_own_slurm_can_be_asked_another_way(self, monkeypatch: pytest.MonkeyPatch) -> None:
        saved = SiteBlock(workspace="/shared/nightbridge", cluster=SlurmCluster(name="eos", account="nemo"))
        monkeypatch.setattr("nightbridge.blocks.site_block._load", lambda kind, name, otherwise: saved)

        cluster = load_site(SiteChoice(system="eos", cluster="pyslurm")).cluster

        assert (cluster.kind, cluster.name, cluster.account) == ("pyslurm", "eos", "nemo")

    def test_a_store_url_keeps_the_endpoint_of_the_site_file(self, tmp_path: Path) -> None:
        file = tmp_path / "site.toml"
        file.write_text('[store]\nurl = "s3://a/b"\nendpoint_url = "http://127.0.0.1:9"\n')

        site = load_site(SiteChoice(system=str(file), store="s3://other/prefix"))

        assert site.store_settings.url == "s3://other/prefix"
        assert site.store_settings.endpoint_url == "http://127.0.0.1:9"


@pytest.mark.parametrize(
    ("option", "what"),
    [
        *((option, "another cluster") for option in ("--clusters=other", "--cluster=other", "-Mother")),
        *((option, "several jobs") for option in ("--array=0-3", "--arr=0-3", "-a0-3")),
        ("--wrap=true", "instead of the launcher's script"),
        ("--test-only", "submits nothing"),
    ],
)
def test_a_cluster_with_which_an_attempt_has_not_one_job_is_refused_when_it_is_made(option: str, what: str) -> None:
    with pytest.raises(ValidationError, match=what):
        SlurmCluster(name="eos", extra_sbatch_args=["--account=nemo", option])


class TestWhatABlockOpens:
    def test_a_cluster_block_opens_its_cluster(self, tmp_path: Path) -> None:
        opened = SlurmCluster(kind="local", name="here", slots=3).open(tmp_path)

        assert (opened.settings.kind, opened.settings.name, opened.settings.slots) == ("local", "here", 3)

    def test_a_store_block_opens_its_store(self, tmp_path: Path) -> None:
        opened = HarvestStore(url=f"file://{tmp_path}/store").open()
        opened.put("a", b"1")

        assert opened.get("a") == b"1"

    def test_keys_of_a_block_that_was_never_saved_are_refused(self) -> None:
        with pytest.raises(ValueError, match="save the Harvest Store block before using its secrets"):
            HarvestStore(url="s3://a/b", access_key_id=SecretStr("key")).open()


class TestFields:
    def test_every_setting_of_the_domain_can_be_set(self) -> None:
        assert [name for name in ClusterSettings.model_fields if name not in SlurmCluster.model_fields] == []

    def test_a_text_that_was_cleared_in_the_ui_is_unset(self) -> None:
        settings = SlurmCluster.model_validate({"partition": "", "bin_dir": ""}).settings()

        assert (settings.partition, settings.bin_dir, settings.kind) == (None, None, "slurm")

    def test_a_cluster_that_was_saved_under_the_former_name_of_a_field_is_read(self) -> None:
        assert SlurmCluster.model_validate({"cluster_name": "eos"}).settings().name == "eos"


def test_blocks_that_the_last_release_saved_still_load(prefect_server: PrefectServer, tmp_path: Path) -> None:
    saved: dict[str, str] = {}
    for block in json.loads((RELEASED / "0.1.0-blocks.json").read_text()):
        saved[block["name"]] = save_as_released(prefect_server, block, saved)
    script = tmp_path / "load.py"
    script.write_text(
        "from nightbridge.blocks import load_site\n"
        "from nightbridge.models import SiteChoice\n"
        "from nightbridge.tasks.site_access import block_value\n"
        "site = load_site(SiteChoice(system='eos-site'))\n"
        "print(site.model_dump_json())\n"
        "print(block_value(site.git_credentials.name))\n"
    )

    done = subprocess.run(
        [sys.executable, script], env=prefect_server.environment, capture_output=True, text=True, check=False
    )
    for document in reversed(saved.values()):  # what is left on the server, other tests' sentences would list
        prefect_server.ask("DELETE", f"block_documents/{document}")

    assert done.returncode == 0, done.stderr
    dumped, credentials = done.stdout.splitlines()
    site = models.Site.model_validate_json(dumped)
    assert site.workspace == Path("/lustre/nightbridge")
    assert (site.cluster.name, site.cluster.account, site.cluster.gpus_per_node) == ("eos", "nemo", 8)
    assert (site.cluster.bin_dir, site.cluster.max_pending) == (Path("/opt/slurm/bin"), 7200)
    assert site.store_settings.url == "s3://nightly/llm"
    assert site.store_settings.secret_key == SecretRef(
        source="block", name="nightbridge-harvest-store/nightly#secret_access_key"
    )
    assert (site.store_settings.retention.nights, site.harvest.on) == (60, "node")
    assert (site.images_dir, site.image_import.on) == (Path("/lustre/images"), "node")
    assert (site.git_timeout, site.wheels) == (300, Path("/lustre/wheels"))
    assert credentials == "machine github.com login bot password planted-git"


def save_as_released(server: PrefectServer, block: dict[str, Any], saved: Mapping[str, str]) -> str:
    """Save a block by the API as a release did, with its schema of then; returns the document's id."""
    kinds = {kind["slug"]: kind["id"] for kind in server.ask("POST", "block_types/filter", {})}
    kind = kinds.get(block["type"]["slug"]) or server.ask("POST", "block_types/", block["type"])["id"]
    schema = {"fields": block["fields"], "block_type_id": kind, "capabilities": block["capabilities"]}
    schema_id = server.ask("POST", "block_schemas/", schema)["id"]
    inner = {field: {"$ref": {"block_document_id": saved[name]}} for field, name in block["references"].items()}
    document = {"name": block["name"], "data": {**block["data"], **inner}}
    made = server.ask("POST", "block_documents/", {**document, "block_schema_id": schema_id, "block_type_id": kind})
    return str(made["id"])


def test_a_saved_store_refers_to_its_secrets_by_name(prefect_server: PrefectServer, tmp_path: Path) -> None:
    script = tmp_path / "save.py"
    script.write_text(
        "from nightbridge.blocks import HarvestStore\n"
        "from nightbridge.tasks.site_access import block_value\n"
        "HarvestStore(url='s3://a/b', secret_access_key='planted-token').save('night', overwrite=True)\n"
        "settings = HarvestStore.load('night').settings()\n"
        "assert 'planted-token' not in settings.model_dump_json(), settings\n"
        "print(settings.secret_key.model_dump_json())\n"
        "assert block_value(settings.secret_key.name) == 'planted-token'\n"
    )

    done = subprocess.run(
        [sys.executable, script], env=prefect_server.environment, capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stderr
    assert SecretRef.model_validate_json(done.stdout) == SecretRef(
        source="block", name="nightbridge-harvest-store/night#secret_access_key"
    )


def test_a_saved_image_cache_refers_to_its_credentials_and_the_stage_finds_them(
    prefect_server: PrefectServer, tmp_path: Path
) -> None:
    script = tmp_path / "save.py"
    script.write_text(
        "from nightbridge.blocks import ImageCache, SiteBlock\n"
        "from nightbridge.secrets import resolve_secret\n"
        "from nightbridge.tasks.site_access import block_value\n"
        "lines = 'machine nvcr.io login $oauthtoken password planted-token'\n"
        "ImageCache(temp='/local', credentials=lines, import_on='node').save('images', overwrite=True)\n"
        "site = SiteBlock(images=ImageCache.load('images')).settings()\n"
        "assert 'planted-token' not in site.model_dump_json(), site\n"
        "assert resolve_secret(site.image_import.credentials, block_value) == lines\n"
        "print(site.image_import.model_dump_json())\n"
    )

    done = subprocess.run(
        [sys.executable, script], env=prefect_server.environment, capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stderr
    settings = ImageImport.model_validate_json(done.stdout)
    assert (settings.temp, settings.on) == (Path("/local"), "node")
    assert settings.credentials == SecretRef(source="block", name="nightbridge-image-cache/images#credentials")


def test_saved_notifications_refer_to_their_secrets_and_a_notice_is_sent_with_them(
    prefect_server: PrefectServer, tmp_path: Path
) -> None:
    script = tmp_path / "save.py"
    script.write_text(
        "import sys\n"
        "from nightbridge.blocks import Notifications, SiteBlock\n"
        "from nightbridge.notify import Notice, notify\n"
        "from nightbridge.tasks.site_access import block_value\n"
        "Notifications(webhook=sys.argv[1], mail_to=[]).save('people', overwrite=True)\n"
        "site = SiteBlock(notifications=Notifications.load('people')).settings()\n"
        "assert 'planted-token' not in site.model_dump_json(), site\n"
        "print(notify(Notice(subject='s', text='t'), site.notify, block_value))\n"
    )

    with webhook_server("/planted-token") as hook:
        done = subprocess.run(
            [sys.executable, script, hook.url],
            env=prefect_server.environment, capture_output=True, text=True, check=False,
        )  # fmt: skip

    assert done.returncode == 0, done.stderr
    assert done.stdout == "('webhook',)\n"
    assert hook.received == [b'{"text": "t"}']


def test_saved_repositories_refer_to_their_credentials_and_git_logs_in_with_them(
    prefect_server: PrefectServer, repositories: PracticeRepositories, tmp_path: Path
) -> None:
    script = tmp_path / "save.py"
    script.write_text(
        "import sys\n"
        "from pathlib import Path\n"
        "from nightbridge.blocks import SiteBlock, SourceRepositories\n"
        "from nightbridge.repos.mirrors import Mirror\n"
        "from nightbridge.tasks.site_access import site_logins\n"
        "lines = 'machine 127.0.0.1 login reader password planted-token'\n"
        "SourceRepositories(credentials=lines).save('code', overwrite=True)\n"
        "site = SiteBlock(workspace=sys.argv[2], repositories=SourceRepositories.load('code')).settings()\n"
        "assert 'planted-token' not in site.model_dump_json(), site\n"
        "with site_logins(site):\n"
        "    print(Mirror(sys.argv[1], site.workspace, timeout=60).resolve('main'))\n"
    )
    folder = Path(repositories.bridge_url)

    with served_over_http(folder.parent, ("reader", "planted-token")) as server:
        done = subprocess.run(
            [sys.executable, script, f"{server.url}/{folder.name}", tmp_path / "workspace"],
            env=prefect_server.environment, capture_output=True, text=True, check=False,
        )  # fmt: skip

    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == repositories.sha("main")
    kept = [path for path in (tmp_path / "workspace").rglob("*") if path.is_file()]
    assert kept
    assert not [path for path in kept if b"planted-token" in path.read_bytes()]


def test_an_unknown_block_is_named_with_those_that_exist_and_the_way_out(
    prefect_server: PrefectServer, tmp_path: Path
) -> None:
    script = tmp_path / "load.py"
    script.write_text(
        "from nightbridge.blocks import SiteBlock, load_site\nfrom nightbridge.models import SiteChoice\n"
        "SiteBlock().save('this-site', overwrite=True)\nload_site(SiteChoice(system='no-such-site'))\n"
    )

    done = subprocess.run(
        [sys.executable, script], env=prefect_server.environment, capture_output=True, text=True, check=False
    )

    assert InvalidInput.__name__ in done.stderr
    assert "no-such-site: no Site block of this name; there are " in done.stderr
    assert "this-site" in done.stderr
    assert "Make one in the Prefect UI" in done.stderr


@pytest.mark.parametrize(
    ("saved", "field"),
    [
        (
            SiteBlock.model_construct(cluster=SlurmCluster.model_construct(max_jobs=0)),
            "Site.cluster.max_jobs: Input should",
        ),
        (
            SiteBlock(notifications=Notifications(smtp_host="mail")),
            "NotifySettings: mail needs both smtp_host and mail_to",
        ),
        (SiteBlock(store=HarvestStore(retention_days=-1)), "RetentionPolicy.days: Input should be greater"),
    ],
    ids=["one field", "two fields", "of the store"],
)
def test_a_block_that_was_saved_with_a_wrong_field_is_invalid_input_that_names_it(
    saved: SiteBlock, field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(name: str, **_: object) -> SiteBlock:
        try:
            return SiteBlock.model_validate(saved.model_dump(mode="json"))
        except ValidationError as error:  # as Prefect says it
            raise RuntimeError(f"Unable to load {name!r} of block type 'nightbridge-site'") from error

    monkeypatch.setattr(SiteBlock, "load", load)

    with pytest.raises(InvalidInput, match=rf"hopper: this block, or one in it, has a wrong field(.|\n)*{field}"):
        load_site(SiteChoice(system="hopper"))


class TestResultStorage:
    def test_keeps_results_below_a_folder_of_the_store(self, tmp_path: Path) -> None:
        block = HarvestStore(url=f"file://{tmp_path}/store")

        block.write_path("a-result", b"{}", _sync=True)

        assert block.read_path("a-result", _sync=True) == b"{}"
        assert asyncio.run(block.aread_path("a-result")) == b"{}"
        assert (tmp_path / "store" / "results" / "a-result").is_file()

    def test_a_result_that_is_not_there_is_prefect_s_own_error(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="no result other"):
            HarvestStore(url=f"file://{tmp_path}/store").read_path("other")


def test_a_block_that_a_form_picked_is_a_choice_by_its_name(prefect_server: PrefectServer, tmp_path: Path) -> None:
    script = tmp_path / "choose.py"
    script.write_text(
        "import asyncio\n"
        "from prefect import flow\n"
        "from nightbridge.blocks import SiteBlock, load_site, site_choice\n"
        "block = SiteBlock(workspace='/shared')\n"
        "block.save('picked', overwrite=True, _sync=True)\n"
        "reference = {'$ref': {'block_document_id': str(block._block_document_id)}}\n"
        "@flow\n"
        "async def own():\n"
        "    return [load_site(site_choice({'system': given})).workspace for given in (block, reference, 'picked')]\n"
        "print(*asyncio.run(own()))\n"
    )

    done = subprocess.run(
        [sys.executable, script], env=prefect_server.environment, capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["/shared"] * 3


def test_a_block_that_was_never_saved_cannot_be_chosen() -> None:
    with pytest.raises(InvalidInput, match="Site: a block without a name"):
        site_choice({"system": SiteBlock()})
