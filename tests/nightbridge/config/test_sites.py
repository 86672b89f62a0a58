"""CloudAI's system files, our site files, and the site that a person names."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nightbridge.config import read_site_file
from nightbridge.config.sites import plain_site
from nightbridge.errors import InvalidInput
from nightbridge.models import ClusterSettings, SecretRef, SiteChoice

Write = Callable[..., Path]

EXAMPLES = Path(__file__).parents[3] / "conf" / "examples"


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def _write(text: str) -> Path:
        path = tmp_path / "site.toml"
        path.write_text(text)
        return path

    return _write


def test_a_site_file_says_everything_about_a_place() -> None:
    site, warnings = read_site_file(EXAMPLES / "site.toml")

    assert (site.cluster.kind, site.cluster.account, site.cluster.containers) == ("slurm", "llm-perf", "pyxis")
    assert site.store is not None
    assert site.store.access_key == SecretRef(source="env", name="NIGHTBRIDGE_S3_ACCESS_KEY")
    assert warnings == ()


def test_a_cloudai_system_file_is_read_as_it_is() -> None:
    site, warnings = read_site_file(EXAMPLES / "cloudai_system.toml")

    assert (site.cluster.kind, site.cluster.name, site.cluster.partition) == ("slurm", "hopper", "batch")
    assert site.cluster.containers == "pyxis"
    assert site.workspace == Path("/lustre/cloudai/results")
    assert len(warnings) == 1
    assert "cloudai_system.toml:11: partitions: has no effect" in warnings[0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[cluster]\nacount = 'x'\n", "site.toml:2: cluster.acount: unknown key; did you mean 'account'?"),
        ("workspce = '/x'\n", "site.toml:1: workspce: unknown key; did you mean 'workspace'?"),
        ("[cluster]\ngpus_per_node = 0\n", "site.toml:2: cluster.gpus_per_node"),
        ("[cluster]\nkind = 'pbs'\n", "site.toml:2: cluster.kind"),
        ("name = 'x'\ndefault_partition = 'b'\nscheduler = 'k8s'\n", "site.toml:3: scheduler"),
        ("name = 'x'\ndefault_partition = 'b'\nacount = 'y'\n", "acount: unknown key; did you mean 'account'?"),
        ("[store]\nurl = 3\n", "site.toml:2: store.url"),
        ('[store]\nurl = "s3://k:sec@b/x"\n', "site.toml:2: store.url: contains a password"),
        ('[store]\nurl = "s3://b"\nendpoint_url = "https://k:sec@s3"\n', "store.endpoint_url: contains a password"),
        ('workspace = ""\n', "site.toml:1: workspace: is empty"),
        ('[cluster.env_vars]\n"A B" = "x"\n', "site.toml:2: cluster.env_vars.A B: is not the name of an environment"),
    ],
)
def test_what_is_wrong_is_reported_with_its_line(write: Write, text: str, message: str) -> None:
    with pytest.raises(InvalidInput) as raised:
        read_site_file(write(text))

    assert message in "\n".join(raised.value.violations)


def test_an_option_of_sbatch_that_is_decided_here_is_said_to_have_no_effect(write: Write) -> None:
    site, warnings = read_site_file(write('[cluster]\nkind = "slurm"\nextra_sbatch_args = ["--requeue", "--hold"]\n'))

    assert site.cluster.extra_sbatch_args == ("--requeue", "--hold")
    (warning,) = warnings
    assert "site.toml:3: cluster.extra_sbatch_args: '--requeue' has no effect" in warning


def test_a_path_in_this_users_home_is_there(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")

    top = 'workspace = "~/nights"\nenvironments = "~/envs"\nimages = "~/images"\n'
    site, _ = read_site_file(write(top + '[cluster]\nslurm_conf = "~/slurm.conf"\n[image_import]\ntemp = "/tmp"\n'))

    assert (site.workspace, site.environments_dir) == (Path("/home/me/nights"), Path("/home/me/envs"))
    assert (site.images_dir, site.cluster.slurm_conf) == (Path("/home/me/images"), Path("/home/me/slurm.conf"))
    assert site.image_import.temp == Path("/tmp")


def test_a_site_in_this_users_home_is_named_without_a_shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "s.toml").write_text('[cluster]\nname = "hopper"\n')

    found = plain_site(SiteChoice.of({"system": "~/s.toml", "workspace": "~/nights"}))

    assert found is not None
    assert (found[0].cluster.name, found[0].workspace) == ("hopper", tmp_path / "nights")


def test_a_secret_among_the_variables_of_every_run_is_reported(write: Write) -> None:
    text = '[cluster.env_vars]\nHTTPS_PROXY = "http://svc:verysecret@proxy"\nHF_TOKEN = "hf_x"\nNCCL_DEBUG = "INFO"\n'
    site, warnings = read_site_file(write(text))

    assert set(site.cluster.env_vars) == {"HTTPS_PROXY", "HF_TOKEN", "NCCL_DEBUG"}
    assert ["site.toml:2: cluster.env_vars.HTTPS_PROXY: contains a secret" in warning for warning in warnings] == [1, 0]
    assert "site.toml:3: cluster.env_vars.HF_TOKEN: contains a secret" in warnings[1]
    assert "verysecret" not in "".join(warnings)


def test_a_literal_store_key_becomes_a_reference_and_is_reported(write: Write) -> None:
    path = write('[store]\nurl = "s3://b/p"\nsecret_key = "verysecret"\n')

    site, warnings = read_site_file(path)

    assert site.store is not None
    assert site.store.secret_key == SecretRef(source="toml", name=f"{path}#store.secret_key")
    assert len(warnings) == 1
    assert "verysecret" not in site.model_dump_json()


def test_nothing_named_is_the_embedded_default_with_an_absolute_workspace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    named = plain_site(SiteChoice())

    assert named is not None
    assert (named[0].cluster.kind, named[0].workspace) == ("local", tmp_path / ".nightbridge")


def test_the_cluster_of_another_file_can_be_named() -> None:
    named = plain_site(SiteChoice.of({"cluster": EXAMPLES / "site.toml", "workspace": Path("/w")}))

    assert named is not None
    assert (named[0].cluster.name, named[0].workspace, named[0].store) == ("hopper", Path("/w"), None)


def test_local_is_this_machine_though_a_cluster_without_a_name_is_called_so(tmp_path: Path) -> None:
    (tmp_path / "site.toml").write_text('[cluster]\nkind = "slurm"\npartition = "batch"\n')
    own = plain_site(SiteChoice(system=str(tmp_path / "site.toml")))
    here = plain_site(SiteChoice(system=str(tmp_path / "site.toml"), cluster="local"))
    assert own is not None
    assert (own[0].cluster.kind, own[0].cluster.name) == ("slurm", "local")
    assert here is not None
    # Nights and series go by the name alone: a trial here is none of the Slurm's.
    assert here[0].cluster == ClusterSettings(name="this-machine")


def test_this_machine_named_by_a_file_does_not_bear_the_name_of_the_site_s_slurm(tmp_path: Path) -> None:
    (tmp_path / "site.toml").write_text('[cluster]\nkind = "slurm"\npartition = "batch"\n')
    (tmp_path / "here.toml").write_text('[cluster]\nkind = "local"\nslots = 3\n')
    here = plain_site(SiteChoice(system=str(tmp_path / "site.toml"), cluster=str(tmp_path / "here.toml")))
    assert here is not None
    assert here[0].cluster == ClusterSettings(name="this-machine", slots=3)


def test_the_site_s_own_slurm_can_be_asked_another_way() -> None:
    named = plain_site(SiteChoice(system=str(EXAMPLES / "site.toml"), cluster="auto"))

    assert named is not None
    assert (named[0].cluster.kind, named[0].cluster.name, named[0].cluster.partition) == ("auto", "hopper", "batch")


def test_a_store_url_keeps_endpoint_and_credentials_of_the_system_file() -> None:
    named = plain_site(SiteChoice(system=str(EXAMPLES / "site.toml"), store="s3://other/place"))

    assert named is not None
    assert named[0].store is not None
    assert (named[0].store.url, named[0].store.endpoint_url) == ("s3://other/place", "https://s3.example.org")


@pytest.mark.parametrize("named", [{"system": "a-block"}, {"cluster": "a-block"}, {"store": "a-block"}])
def test_a_name_that_only_a_block_can_have_is_left_to_prefect(named: Any) -> None:
    assert plain_site(SiteChoice.of(named)) is None


def test_the_login_of_git_is_named(write: Write) -> None:
    site, warnings = read_site_file(write('git_credentials = "env:GIT_LOGINS"\n'))

    assert site.git_credentials == SecretRef(source="env", name="GIT_LOGINS")
    assert warnings == ()


def test_the_import_of_images_is_a_table_whose_credentials_are_named(write: Write) -> None:
    path = write(
        '[image_import]\ntemp = "/local"\ncredentials = "env:NGC"\non = "node"\nsrun_args = ["--time=2:00:00"]\n'
    )

    site, warnings = read_site_file(path)

    assert site.image_import.temp == Path("/local")
    assert (site.image_import.on, site.image_import.srun_args) == ("node", ("--time=2:00:00",))
    assert site.image_import.credentials == SecretRef(source="env", name="NGC")
    assert warnings == ()


def test_what_loads_checkpoints_is_a_command(write: Write) -> None:
    site, warnings = read_site_file(write('[harvest]\nload_with = "srun --container-image=nemo.sqsh python3"\n'))

    assert site.harvest.load_with == "srun --container-image=nemo.sqsh python3"
    assert warnings == ()


@pytest.mark.parametrize(
    ("command", "problem"), [("srun 'python3", "not a command: no closing quotation"), (" ", "must name a program")]
)
def test_what_is_no_command_is_refused_with_its_place(write: Write, command: str, problem: str) -> None:
    with pytest.raises(InvalidInput, match=rf"harvest\.load_with.*{problem}"):
        read_site_file(write(f'[harvest]\nload_with = "{command}"\n'))
