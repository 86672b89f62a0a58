"""Test files, scenario files, and what is message when they are wrong."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nightbridge import config
from nightbridge.errors import InvalidInput
from nightbridge.models import GatePolicy, HarvestPolicy, SecretRef

Write = Callable[..., Path]

EXAMPLES = Path(__file__).parents[3] / "conf" / "examples"

BRIDGE = """
[[git_repos]]
url = "https://github.com/NVIDIA-NeMo/Megatron-Bridge.git"
commit = "v0.4.2"
"""
ARGS = """
[cmd_args]
gpu_type = "h100"
num_gpus = 8
container_image = "nvcr.io#nvidia/nemo:26.04"
model_family_name = "llama"
model_recipe_name = "llama3_8b"
"""
HEAD = 'name = "small"\ndescription = "d"\ntest_template_name = "MegatronBridge"\n'
PINNED_RUN = '[nemo_run_repo]\nurl = "https://github.com/NVIDIA-NeMo/Run.git"\ncommit = "v0.7.0"\n'
TEST = HEAD + BRIDGE + PINNED_RUN + ARGS


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    monkeypatch.chdir(tmp_path)

    def _write(text: str, name: str = "test.toml") -> Path:
        path = Path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    return _write


def violations_of(path: Any, **options: Any) -> str:
    scenario = config.load(path, **options)
    assert not scenario.tests
    return "\n".join(scenario.invalid[0].violations)


# --- test files ------------------------------------------------------------------------------------------------------


def test_a_test_file_is_a_scenario_of_one_test(write: Write) -> None:
    scenario = config.load(write(TEST))

    (test,) = scenario.tests
    assert (scenario.name, test.id, test.name) == ("small", "small", "small")
    assert test.megatron_bridge.commit == "v0.4.2"
    assert scenario.warnings == ()


def test_only_what_somebody_wrote_is_in_cmd_args(write: Write) -> None:
    (test,) = config.load(write(TEST)).tests

    assert set(test.cmd_args) == {
        "gpu_type", "num_gpus", "container_image", "model_family_name", "model_recipe_name",
    }  # fmt: skip


def test_own_tables_set_what_is_kept_and_how_far_a_metric_may_move(write: Write) -> None:
    text = TEST + '[harvest]\ncheckpoint = "all"\n[gate]\nstep_time = 0.1\n'

    (test,) = config.load(write(text)).tests

    assert test.harvest == HarvestPolicy(checkpoint="all")
    assert test.gate == GatePolicy(step_time=0.1)


@pytest.mark.parametrize(
    ("harvest", "kept", "warned"),
    [
        ("", "none", ["harvest.checkpoint: none is requested: a checkpoint of llama3_70b takes about 980 GB"]),
        ("[harvest]\nmax_checkpoint_bytes = 1_000_000_000_000\n", "last", []),
        ('[harvest]\ncheckpoint = "last"\n', "last", []),
    ],
)
def test_no_checkpoint_is_requested_that_is_larger_than_the_limit(
    write: Write, harvest: str, kept: str, warned: list[str]
) -> None:
    scenario = config.load(write(TEST.replace("llama3_8b", "llama3_70b") + harvest))

    assert scenario.tests[0].harvest.checkpoint == kept
    found = [line for line in scenario.warnings if "harvest.checkpoint" in line]
    assert len(found) == len(warned)
    assert all(expected in line for expected, line in zip(warned, found, strict=True))


def test_an_unpinned_nemo_run_is_taken_with_a_warning(write: Write) -> None:
    scenario = config.load(write(HEAD + BRIDGE + ARGS))

    (test,) = scenario.tests
    assert (test.nemo_run_repo.url, test.nemo_run_repo.commit) == ("https://github.com/NVIDIA-NeMo/Run.git", "main")
    assert any("nemo_run_repo" in warning and "not pinned" in warning for warning in scenario.warnings)


def test_an_unknown_key_is_reported_with_its_line_and_the_nearest_known_one(write: Write) -> None:
    path = write(TEST + "max_step = 5\n")

    line = (TEST + "max_step = 5\n").split("\n").index("max_step = 5") + 1
    assert f"test.toml:{line}: cmd_args.max_step: unknown key; did you mean 'max_steps'?" in violations_of(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (TEST.replace("description", "descripton"), "test.toml:2: descripton: unknown key; did you mean 'description'?"),
        (TEST.replace("commit = \"v0.4.2\"", "comit = \"v0.4.2\""), "git_repos[0].comit: unknown key; did you mean 'commit'?"),
        (TEST + '[gate]\nstep_tme = 0.1\n', "gate.step_tme: unknown key; did you mean 'step_time'?"),
        (TEST + 'extra_container_mounts = []\n', "unknown key; write it in the test itself, before its tables"),
        (TEST + 'extra_container_mount = []\n', "did you mean 'extra_container_mounts' of the test itself, before its"),
        (TEST + 'warmup_steps = 5\n', "cmd_args.warmup_steps: unknown key; write it in [gate]"),
        (TEST + 'account = "me"\n', "cmd_args.account: unknown key; write it in the site's file"),
        ("max_steps = 5\n" + TEST, "test.toml:1: max_steps: unknown key; write it in [cmd_args]"),
        (TEST + "[harvest]\nmicro_batch_size = 1\n", "harvest.micro_batch_size: unknown key; write mb in [cmd_args]"),
        (TEST + '[harvest]\ncheckpoint = "some"\n', "harvest.checkpoint"),
        (TEST.replace('"MegatronBridge"', '"NcclTest"'), "test_template_name"),
        (TEST.replace("Megatron-Bridge.git", "Other.git"), "git_repos: does not name Megatron-Bridge"),
        (TEST.replace('commit = "v0.4.2"', 'commit = "v0.4.2"\nlauncher = "../x.py"'), "launcher: must be a path inside"),
        (TEST + "time_limit = 1\n", "cmd_args.time_limit: must be text"),
        (TEST + "tp = []\n", "cmd_args.tp: is an empty list, a sweep over nothing"),
        (TEST + 'tp = [1, "two"]\n', "cmd_args.tp: must be a whole number, or a list of such to sweep over, not 'two'"),
        ('dse_excluded_args = ["cmd_args.tp"]\n' + TEST + "tp = [1, 2]\n", "dse_excluded_args excludes it from sweeps"),
        (TEST + 'hf_token = "toml:keys.toml"\n', "hf_token: is not a valid secret reference; write env:HF_TOKEN"),
        (TEST + f'hf_token = "env:hf_{"a1B" * 11}"\n', "hf_token: is not a valid secret reference; write env:HF_TOKEN"),
        (TEST + f'hf_token = "block:local-{"a1" * 20}"\n', "hf_token: is not a valid secret reference; write env:HF_TOKEN"),
        (TEST + '[sweep]\nfields = ["tpp"]\n', "sweep.fields[0]: 'tpp' is not a key of [cmd_args]"),
        (TEST + '[sweep]\nfields = ["tp"]\n', "sweep.fields[0]: 'tp' is not a list in [cmd_args]"),
        (TEST + '[sweep]\nmethod = "bayes"\n', "sweep.method: input should be 'grid' or 'random'"),
        ("num_nodes = [0]\n" + TEST, "num_nodes: must be whole numbers from 1 on"),
        ("num_nodes = 1.5\n" + TEST, "num_nodes: must be a whole number, or a list"),
        ("num_nodes = [1, 2]\n" + TEST.replace("num_gpus = 8", "num_gpus = [8, 16]"), "num_nodes: is swept over together"),
        ("num_nodes = [1, 2]\n" + TEST.replace("h100", "h10"), "the number of GPUs per node is unknown"),
        (TEST + 'tp = "two"\n', "cmd_args.tp: must be a whole number, not 'two'"),
        (TEST + "tp = true\n", "cmd_args.tp: must be a whole number"),
        (TEST + 'profiling_ranks = "0-3"\n', "cmd_args.profiling_ranks: must be a whole number or a list of them"),
        (TEST + "lr = nan\n", "cmd_args.lr: must be a finite number"),
        (TEST + "[extra_env_vars]\nA = []\n", "extra_env_vars.A: is an empty list"),
        (TEST + '[extra_env_vars]\nA_TOKEN = ["first-one", "second-one"]\n', "extra_env_vars.A_TOKEN: contains secrets"),
        (TEST + "[extra_env_vars]\nA = [1]\n", "extra_env_vars.A: must be text, in quotes"),
        (TEST + "[extra_env_vars]\nA = 1\n", "extra_env_vars.A: must be text, in quotes"),
        (HEAD + BRIDGE, "cmd_args: is required"),
        ("nodes = ['batch:g1:2']\n" + TEST, "nodes: names a group"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_reported_with_its_line(write: Write, text: str, message: str) -> None:
    assert message in violations_of(write(text))


def test_all_violations_of_a_test_are_reported_at_once(write: Write) -> None:
    message = violations_of(write(TEST.replace("description", "descripton") + 'tpp = 1\ngb = "x"\n'))

    assert all(key in message for key in ("descripton", "cmd_args.tpp", "cmd_args.gb"))


@pytest.mark.parametrize(
    ("line", "field", "value"),
    [
        ('num_gpus = "16"', "num_gpus", 16),
        ("seq_length = 4096.0", "seq_length", 4096),
        ('enable_vboost = "True"', "enable_vboost", True),
        ("enable_vboost = 1", "enable_vboost", True),
        ('enable_vboost = "off"', "enable_vboost", False),
        ("moe_a2a_overlap = 0", "moe_a2a_overlap", False),
        ('profiling_ranks = "0,4"', "profiling_ranks", [0, 4]),
        ('profiling_ranks = ""', "profiling_ranks", []),
        ('vp = "None"', "vp", "None"),
    ],
)
def test_values_are_read_as_cloudai_reads_them(write: Write, line: Any, field: str, value: Any) -> None:
    text = TEST.replace("num_gpus = 8\n", "") + line + "\n"

    (test,) = config.load(write(text)).tests

    assert test.cmd_args[field] == value


def test_a_list_for_a_flag_that_takes_a_list_is_one_value_and_the_difference_is_reported(write: Write) -> None:
    scenario = config.load(write(TEST + 'cuda_graph_scope = ["moe_router", "moe_preprocess"]\n'))

    assert scenario.tests[0].cmd_args["cuda_graph_scope"] == ["moe_router", "moe_preprocess"]
    assert any("CloudAI would sweep" in warning for warning in scenario.warnings)


# --- older spellings and fields without a meaning --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "warning"),
    [
        (TEST + "tp = [1, 2]\n[sweep]\npoints = 3\n", "sweep.points: has no effect: all valid points are run"),
        ('time_limit = ""\n' + TEST, "test.toml:1: time_limit: is empty, as if it were not written"),
    ],
)
def test_what_is_written_and_changes_nothing_is_a_warning(write: Write, text: str, warning: str) -> None:
    assert warning in "\n".join(config.load(write(text)).warnings)


def test_points_that_are_drawn_are_no_warning(write: Write) -> None:
    drawn = write(TEST + 'tp = [1, 2]\n[sweep]\nmethod = "random"\npoints = 3\n')

    assert not any("points" in warning for warning in config.load(drawn).warnings)


def test_older_fields_are_accepted_with_a_warning_each(write: Write) -> None:
    args = ARGS.replace('model_family_name = "llama"\nmodel_recipe_name = "llama3_8b"\n', "")
    older = (
        'model_name = "llama3"\nmodel_size = "8b"\nwandb_prj_name = "p"\ntime_limit = "00:10:00"\n'
        'gpus_per_node = 8\ncustom_mounts = "/a:/b,/c:/d"\n'
    )

    scenario = config.load(write(HEAD + BRIDGE + PINNED_RUN + args + older))

    (test,) = scenario.tests
    assert (test.cmd_args["model_family_name"], test.cmd_args["model_recipe_name"]) == ("llama", "llama3_8b")
    assert test.cmd_args["wandb_project_name"] == "p"
    assert test.time_limit == "00:10:00"
    assert test.extra_container_mounts == ("/a:/b", "/c:/d")
    for key in ("model_name", "wandb_prj_name", "time_limit", "gpus_per_node", "custom_mounts"):
        assert any(f"cmd_args.{key}" in warning for warning in scenario.warnings)


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("agent_steps = 3\n" + TEST, "agent_steps"),
        (TEST + "[nsys]\nenable = true\n", "nsys"),
        (TEST + 'fp8_recipe = "ds"\n', "cmd_args.fp8_recipe"),
        (TEST + 'log_dir = "/x"\n', "cmd_args.log_dir"),
    ],
)
def test_a_field_without_a_meaning_here_is_never_dropped_silently(write: Write, text: str, field: str) -> None:
    scenario = config.load(write(text))

    assert scenario.tests
    assert any(
        f"{field}: has no effect" in w or f"{field}: is not" in w or f"{field}: has no flag" in w
        for w in scenario.warnings
    )


def test_an_older_spelling_of_another_model_over_a_test_is_refused(write: Write) -> None:
    write(TEST, "test/small.toml")
    entry = '[[Tests]]\nid = "one"\ntest_name = "small"\n[Tests.cmd_args]\nmodel_name = "llama3"\nmodel_size = '
    found = violations_of(write(f'name = "nightly"\n{entry}"70b"\n', "scenario.toml"))
    assert "cmd_args.model_name: is set together with model_recipe_name = 'llama3_8b'; keep one of them" in found
    (same,) = config.load(write(f'name = "nightly"\n{entry}"8b"\n', "scenario.toml")).tests
    assert same.cmd_args["model_recipe_name"] == "llama3_8b"


def test_a_time_limit_at_its_older_place_is_told_to_have_no_effect_beside_the_newer_one(write: Write) -> None:
    text = TEST.replace('description = "d"', 'time_limit = "00:20:00"') + 'time_limit = "00:30:00"\n'
    scenario = config.load(write(text))
    assert scenario.tests[0].time_limit == "00:20:00"
    assert any("cmd_args.time_limit: has no effect: time_limit of the test" in said for said in scenario.warnings)


def test_an_older_and_a_newer_spelling_together_are_refused(write: Write) -> None:
    message = violations_of(write(TEST + 'wandb_prj_name = "a"\nwandb_project_name = "b"\n'))

    assert "wandb_prj_name: is set together with wandb_project_name" in message


def test_node_lists_become_options_of_sbatch(write: Write) -> None:
    (test,) = config.load(write("nodes = ['n[01-03]', 'n7']\nexclude_nodes = ['n5']\n" + TEST)).tests

    assert test.sbatch_args == ("--nodelist=n[01-03],n7", "--exclude=n5")


# --- secrets ---------------------------------------------------------------------------------------------------------


def test_a_literal_token_becomes_a_reference_to_its_place_and_is_reported(write: Write) -> None:
    path = write(TEST + 'hf_token = "hf_verysecret"\nwandb_key = "wb_verysecret"\n')

    scenario = config.load(path)

    (test,) = scenario.tests
    place = f"{path.absolute()}#cmd_args.hf_token"
    assert test.secrets["HF_TOKEN"] == SecretRef(source="toml", name=place)
    assert test.secrets["WANDB_API_KEY"].source == "toml"
    assert any("cmd_args.hf_token" in warning for warning in scenario.warnings)
    assert "verysecret" not in scenario.model_dump_json()


def test_a_literal_token_in_a_scenario_is_found_again_where_it_was_written(write: Write) -> None:
    from nightbridge.secrets import resolve_secret

    write(TEST, "small.toml")
    path = write(
        'name = "s"\n[[Tests]]\nid = "1"\ntest_name = "small"\n[[Tests]]\nid = "2"\ntest_name = "small"\n'
        '[Tests.cmd_args]\nhf_token = "hf_verysecret"\n',
        "scenario.toml",
    )

    test = config.load(path).tests[1]

    assert resolve_secret(test.secrets["HF_TOKEN"]) == "hf_verysecret"


@pytest.mark.parametrize(
    ("value", "ref"),
    [
        ("env:MY_TOKEN", SecretRef(source="env", name="MY_TOKEN")),
        ("block:hf-token", SecretRef(source="block", name="hf-token")),
        ("block:nvapi-key-of-team-megatron", SecretRef(source="block", name="nvapi-key-of-team-megatron")),
    ],
)
def test_a_named_place_is_kept_as_a_reference_without_a_warning(write: Write, value: str, ref: SecretRef) -> None:
    scenario = config.load(write(TEST + f'hf_token = "{value}"\n'))

    assert scenario.tests[0].secrets == {"HF_TOKEN": ref}
    assert scenario.warnings == ()


def test_a_key_of_another_file_is_found_from_every_folder(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write('k = "hf_verysecret"\n', "secrets.toml")
    path = write(TEST + 'hf_token = "toml:secrets.toml#k"\nwandb_key = "toml:~/keys.toml#w"\n').absolute()
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.chdir("/")

    scenario = config.load(path)

    assert {ref.name for ref in scenario.tests[0].secrets.values()} == {
        f"{tmp_path}/secrets.toml#k",
        "/home/me/keys.toml#w",
    }
    assert scenario.warnings == ()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here.toml").write_text('k = "hf_verysecret"\n')
    here = config.load(write(TEST + 'hf_token = "toml:here.toml#k"\n', "below/test.toml"))
    assert here.tests[0].secrets["HF_TOKEN"].name == f"{tmp_path}/here.toml#k"


@pytest.mark.parametrize(
    "address",
    [
        "https://me:verysecret@example.org/Megatron-Bridge.git",
        "https://verysecret@example.org/Megatron-Bridge.git",
        "ssh://me:verysecret@example.org/Megatron-Bridge.git",
    ],
)
def test_a_secret_in_a_repositorys_address_is_refused_and_not_shown(write: Write, address: str) -> None:
    text = TEST.replace("https://github.com/NVIDIA-NeMo/Megatron-Bridge.git", address)

    scenario = config.load(write(text))

    (invalid,) = scenario.invalid
    assert any("git_repos[0].url: contains a user name or token" in violation for violation in invalid.violations)
    assert "verysecret" not in scenario.model_dump_json()


@pytest.mark.parametrize(
    "image", ["me:verysecret@nvcr.io#nvidia/nemo:1", "docker://me:verysecret@nvcr.io#nvidia/nemo:1"]
)
def test_a_password_in_an_image_is_refused_and_not_shown(write: Write, image: str) -> None:
    scenario = config.load(write(TEST.replace("nvcr.io#nvidia/nemo:26.04", image)))

    (invalid,) = scenario.invalid
    assert any("cmd_args.container_image: contains a password" in violation for violation in invalid.violations)
    assert "verysecret" not in scenario.model_dump_json()


@pytest.mark.parametrize(
    "image",
    [
        "$oauthtoken@nvcr.io#nvidia/nemo:1",
        "nemo:26.06@sha256:" + "0a" * 32,
        "localhost:5000/nemo:1",
        "nvcr.io/nvidia/nemo:1@sha256:" + "0a" * 32,
    ],
)
def test_users_ports_and_digests_of_an_image_are_no_passwords(write: Write, image: str) -> None:
    assert (
        config.load(write(TEST.replace("nvcr.io#nvidia/nemo:26.04", image))).tests[0].cmd_args["container_image"]
        == image
    )


@pytest.mark.parametrize(
    "address", ["git@example.org:team/Megatron-Bridge.git", "ssh://git@example.org:2222/Megatron-Bridge.git"]
)
def test_the_user_of_ssh_is_no_secret(write: Write, address: str) -> None:
    assert (
        config.load(write(TEST.replace("https://github.com/NVIDIA-NeMo/Megatron-Bridge.git", address)))
        .tests[0]
        .megatron_bridge.url
        == address
    )


def test_a_repository_of_any_name_that_says_where_the_launcher_lies_is_megatron_bridge(write: Write) -> None:
    folded = TEST.replace("NVIDIA-NeMo/Megatron-Bridge.git", "NVIDIA/Megatron-LM.git").replace(
        'commit = "v0.4.2"', 'commit = "main"\nlauncher = "bridge/scripts/performance/setup_experiment.py"', 1
    )

    (test,) = config.load(write(folded)).tests

    assert test.megatron_bridge.url.endswith("Megatron-LM.git")
    assert test.megatron_bridge.launcher == "bridge/scripts/performance/setup_experiment.py"


def test_an_empty_token_means_the_one_in_the_environment(write: Write) -> None:
    scenario = config.load(write(TEST + 'hf_token = ""\n'))

    assert scenario.tests[0].secrets == {}


def test_an_environment_variable_that_is_named_like_a_secret_becomes_a_reference(write: Write) -> None:
    text = TEST + '[extra_env_vars]\nNGC_API_KEY = "verysecret"\nTOKENIZERS_PARALLELISM = "false"\nX = "env:Y"\n'

    scenario = config.load(write(text))

    (test,) = scenario.tests
    assert set(test.secrets) == {"NGC_API_KEY", "X"}
    assert test.extra_env_vars == {"TOKENIZERS_PARALLELISM": "false"}
    assert "verysecret" not in scenario.model_dump_json()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HF_HUB_DISABLE_IMPLICIT_TOKEN", "true"),
        ("MAX_TOKEN", "4096"),
        ("SORT_KEY", "name"),
        ("MYSQL_ALLOW_EMPTY_PASSWORD", "yes"),
    ],
)
def test_a_switch_or_a_number_is_no_secret_whatever_its_name(write: Write, name: str, value: str) -> None:
    scenario = config.load(write(TEST + f'[extra_env_vars]\n{name} = "{value}"\n'))

    (test,) = scenario.tests
    assert (test.extra_env_vars, test.secrets) == ({name: value}, {})
    assert f"extra_env_vars.{name}: is passed on as written" in "".join(scenario.warnings)


@pytest.mark.parametrize("value", ["letmein", "1234567"])
def test_a_password_is_a_secret_however_short(write: Write, value: str) -> None:
    (test,) = config.load(write(TEST + f'[extra_env_vars]\nDB_PASSWORD = "{value}"\n')).tests

    assert (test.extra_env_vars, set(test.secrets)) == ({}, {"DB_PASSWORD"})


TOKEN = "ghp_" + "verysecret0" * 4


@pytest.mark.parametrize(
    "value", ["http://svc:verysecret@proxy:3128", "--index-url=https://me:verysecret@pypi.example.org/simple", TOKEN]
)
def test_a_variable_that_holds_a_secret_becomes_a_reference_whatever_its_name(write: Write, value: str) -> None:
    from nightbridge.secrets import resolve_secret

    scenario = config.load(write(TEST + f'[extra_env_vars]\nOURS = "{value}"\n'))

    (test,) = scenario.tests
    assert test.extra_env_vars == {}
    assert resolve_secret(test.secrets["OURS"]) == value
    assert any("extra_env_vars.OURS: the file contains a token" in warning for warning in scenario.warnings)
    assert "verysecret" not in scenario.model_dump_json()


@pytest.mark.parametrize(
    "value",
    [
        *("http://proxy:3128", "http://svc@proxy:3128", "http://svc:${PROXY_PASSWORD}@proxy:3128", "hf_home", ""),
        *("git@example.org:team/x", "/a:/b@c", "s3://bucket/ghp_x", "5f" * 20, "env_key=1", "mlx5_0:1,mlx5_1:1"),
    ],
)
def test_a_variable_that_holds_no_secret_stays_as_it_is(write: Write, value: str) -> None:
    scenario = config.load(write(TEST + f'[extra_env_vars]\nOURS = "{value}"\n'))

    assert scenario.tests[0].extra_env_vars == {"OURS": value}
    assert scenario.warnings == ()


def test_a_secret_beside_what_the_job_fills_in_is_reported(write: Write) -> None:
    scenario = config.load(write(TEST + '[extra_env_vars]\nOURS = "http://${ME}:verysecret@proxy"\n'))

    assert set(scenario.tests[0].extra_env_vars) == {"OURS"}
    assert any("OURS: contains a secret, which process lists and logs" in warning for warning in scenario.warnings)


def test_a_switch_that_is_named_like_a_secret_is_swept_over(write: Write) -> None:
    scenario = config.load(write(TEST + '[extra_env_vars]\nHF_HUB_DISABLE_IMPLICIT_TOKEN = ["0", "1"]\n'))
    [axis] = scenario.tests[0].axes
    assert (axis.field, axis.values) == ("extra_env_vars.HF_HUB_DISABLE_IMPLICIT_TOKEN", ("0", "1"))


def test_secrets_are_not_swept_over_whatever_their_names(write: Write) -> None:
    text = TEST + f'[extra_env_vars]\nOURS = ["a", "{TOKEN}"]\n'

    assert "extra_env_vars.OURS: contains secrets" in violations_of(write(text))
    assert "verysecret" not in config.load(write(text)).model_dump_json()


@pytest.mark.parametrize(
    "override", [f'"logger.x" = "{TOKEN}"', f'"--x={TOKEN}" = ""', '"a.b" = "s3://me:verysecret@c"']
)
def test_a_secret_in_an_override_is_refused_and_not_shown(write: Write, override: str) -> None:
    scenario = config.load(write(TEST + f"[extra_cmd_args]\n{override}\n"))

    (invalid,) = scenario.invalid
    assert any("contains a token or a password" in violation for violation in invalid.violations)
    assert "verysecret" not in scenario.model_dump_json()


def test_a_wrong_token_is_refused_without_being_shown(write: Write) -> None:
    assert "4711" not in violations_of(write(TEST + "hf_token = 4711\n"))


# --- scenarios -------------------------------------------------------------------------------------------------------

SCENARIO = """name = "night"
[[Tests]]
id = "one"
test_name = "small"
time_limit = "00:20:00"
[Tests.cmd_args]
max_steps = 20
"""


@pytest.mark.parametrize("place", ["small.toml", "test/x.toml", "tests/x.toml", "../tests/x.toml"])
def test_a_scenario_finds_the_tests_that_it_names_nearby(write: Write, place: str) -> None:
    path = write(SCENARIO, "night/scenario.toml")
    write(TEST, f"night/{place}")

    (test,) = config.load(path).tests

    assert (test.id, test.name, test.time_limit) == ("one", "small", "00:20:00")


def test_a_folder_given_on_purpose_wins_over_those_nearby(write: Write) -> None:
    path = write(SCENARIO, "scenario.toml")
    write(TEST, "small.toml")
    write(TEST.replace("num_gpus = 8", "num_gpus = 32"), "elsewhere/small.toml")

    (test,) = config.load(path, tests_dirs=[Path("elsewhere")]).tests

    assert test.cmd_args["num_gpus"] == 32


def test_an_override_changes_only_what_it_writes(write: Write) -> None:
    write(TEST, "small.toml")

    (test,) = config.load(write(SCENARIO, "scenario.toml")).tests

    assert test.cmd_args == {
        "gpu_type": "h100", "num_gpus": 8, "container_image": "nvcr.io#nvidia/nemo:26.04",
        "model_family_name": "llama", "model_recipe_name": "llama3_8b", "max_steps": 20,
    }  # fmt: skip


def test_a_list_in_an_override_replaces_the_whole_list(write: Write) -> None:
    write(TEST.replace(HEAD, HEAD + 'extra_container_mounts = ["/a:/a"]\n'), "small.toml")
    text = SCENARIO.replace("time_limit", 'extra_container_mounts = ["/b:/b"]\ntime_limit')

    (test,) = config.load(write(text, "scenario.toml")).tests

    assert test.extra_container_mounts == ("/b:/b",)


def test_a_test_can_be_defined_inside_the_scenario(write: Write) -> None:
    inline = TEST.replace("[[git_repos]]", "[[Tests.git_repos]]").replace("[cmd_args]", "[Tests.cmd_args]")
    inline = inline.replace("[nemo_run_repo]", "[Tests.nemo_run_repo]")

    (test,) = config.load(write(f'name = "s"\n[[Tests]]\nid = "in.1"\n{inline}')).tests

    assert (test.id, test.name) == ("in.1", "small")


def test_a_mistake_in_an_override_is_reported_with_the_line_in_the_scenario(write: Write) -> None:
    write(TEST, "small.toml")
    path = write(SCENARIO.replace("max_steps = 20", "max_step = 20"), "scenario.toml")

    assert "scenario.toml:7: cmd_args.max_step: unknown key" in violations_of(path)


def test_an_invalid_test_leaves_the_others_to_run(write: Write) -> None:
    write(TEST, "small.toml")
    text = SCENARIO + '[[Tests]]\nid = "two"\ntest_name = "small"\n[Tests.cmd_args]\ntpp = 1\n'

    scenario = config.load(write(text, "scenario.toml"))

    assert [test.id for test in scenario.tests] == ["one"]
    assert [test.id for test in scenario.invalid] == ["two"]


def test_a_test_that_is_not_found_is_invalid_and_the_nearest_name_is_reported(write: Write) -> None:
    write(TEST, "small.toml")

    message = violations_of(write(SCENARIO.replace('"small"', '"smal"'), "scenario.toml"))

    assert "scenario.toml:4: test_name: no test named 'smal'" in message
    assert "did you mean 'small'?" in message


def test_a_broken_file_nearby_is_mentioned_when_the_test_is_not_found(write: Write) -> None:
    write("name = ", "broken.toml")

    assert "broken.toml" in violations_of(write(SCENARIO, "scenario.toml"))


def test_a_link_to_itself_nearby_is_mentioned_when_the_test_is_not_found(write: Write) -> None:
    Path("loop.toml").symlink_to("loop.toml")

    assert "loop.toml" in violations_of(write(SCENARIO, "scenario.toml"))


def test_one_name_for_two_tests_is_refused(write: Write) -> None:
    write(TEST, "a.toml")
    write(TEST, "tests/b.toml")

    assert "names two tests" in violations_of(write(SCENARIO, "scenario.toml"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (SCENARIO.replace("name = \"night\"\n", "nam = \"night\"\n"), "nam: unknown key; did you mean 'name'?"),
        (SCENARIO.replace('name = "night"\n', ""), "a scenario needs a name"),
        (SCENARIO + '[[Tests]]\nid = "one"\ntest_name = "small"\n', "'one' occurs twice"),
        (SCENARIO.replace('id = "one"\n', ""), "every test needs an id"),
        ('name = "x"\nTests = []\n', "must be one or more [[Tests]] tables"),
        ('name = "x"\nTests = 3\n', "must be one or more [[Tests]] tables"),
    ],
)  # fmt: skip
def test_a_scenario_that_is_wrong_itself_raises_with_everything(write: Write, text: str, message: str) -> None:
    write(TEST, "small.toml")

    with pytest.raises(InvalidInput) as raised:
        config.load(write(text, "scenario.toml"))

    assert message in str(raised.value)


@pytest.mark.parametrize("name", ["../night", "a//b", "/night", ".", "first\\nsecond", "夜" * 67])
@pytest.mark.parametrize(("text", "own"), [(SCENARIO, "night"), (TEST, "small")])
def test_a_name_that_the_files_of_its_reports_cannot_have_is_refused(
    write: Write, text: str, own: str, name: str
) -> None:
    write(TEST, "small.toml")

    with pytest.raises(InvalidInput, match=r"name: has .*; the reports of its nights are files of this name"):
        config.load(write(text.replace(f'name = "{own}"', f'name = "{name}"', 1), "scenario.toml"))


@pytest.mark.parametrize("name", ["GB200 / H100", "nightly (50 %) #1", "夜" * 66])
def test_any_other_name_is_taken(write: Write, name: str) -> None:
    write(TEST, "small.toml")

    assert config.load(write(SCENARIO.replace('"night"', f'"{name}"', 1), "scenario.toml")).name == name


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"name = ", "not valid TOML"),
        (b"\xff\xfe", "not UTF-8"),
        (b"x = " + b"[" * 5000, "nested too deeply"),
        (b"x = " + b"9" * 5000, "not valid TOML"),
        (b"title = 'x'", "neither a test"),
        (b"scheduler = 'slurm'", "--system"),
    ],
)
def test_a_file_that_cannot_be_read_raises(write: Write, content: Any, message: str) -> None:
    path = write("", "bad.toml")
    path.write_bytes(content)

    with pytest.raises(InvalidInput, match=r"bad\.toml") as raised:
        config.load(path)

    assert message in str(raised.value)


def test_a_missing_file_raises_with_its_name() -> None:
    with pytest.raises(InvalidInput, match=r"nowhere\.toml: no such file"):
        config.load(Path("nowhere.toml"))


# --- files that CloudAI users have -----------------------------------------------------------------------------------

PUBLISHED_TEST = """
name = "megatron_bridge_qwen_30b"
description = "-"
test_template_name = "MegatronBridge"
[[git_repos]]
url = "https://github.com/NVIDIA-NeMo/Megatron-Bridge.git"
commit = "v0.3.0"
mount_as = "/opt/Megatron-Bridge"
[cmd_args]
gpu_type = "gb200"
gpus_per_node = 8
num_gpus = 8
container_image = "nvcr.io#nvidia/nemo:26.02.00"
model_family_name = "qwen"
model_recipe_name = "qwen3_30b_a3b"
task = "pretrain"
domain = "llm"
compute_dtype = "fp8_mx"
"""
PUBLISHED_SCENARIO = """
name = "megatron_bridge_qwen_30b"
[[Tests]]
id = "megatron_bridge_qwen_30b"
test_name = "megatron_bridge_qwen_30b"
num_nodes = "2"
"""
PUBLISHED_INLINE = """
name = "megatron-bridge-test"
[[Tests]]
id = "mbridge.1"
num_nodes = 2
time_limit = "00:30:00"
""" + PUBLISHED_TEST.replace("[[git_repos]]", "[[Tests.git_repos]]").replace("[cmd_args]", "[Tests.cmd_args]")


@pytest.mark.parametrize("text", [PUBLISHED_TEST, PUBLISHED_SCENARIO, PUBLISHED_INLINE])
def test_the_shapes_that_cloudai_publishes_run_unchanged(write: Write, text: str) -> None:
    from nightbridge.rules import check_scenario

    write(PUBLISHED_TEST, "test/qwen.toml")

    scenario = check_scenario(config.load(write(text, "any.toml")))

    assert len(scenario.tests) == 1
    assert not scenario.invalid
    assert "num_nodes" not in text or any("num_nodes: has no effect" in warning for warning in scenario.warnings)


# --- runs ------------------------------------------------------------------------------------------------------------


def test_every_iteration_is_a_run_with_a_key_of_its_own(write: Write) -> None:
    scenario = config.load(write("iterations = 3\n" + TEST))

    runs = config.runs(scenario, "2026-11-21")

    assert [run.iteration for run in runs] == [1, 2, 3]
    assert len({run.run_key for run in runs}) == 3


def test_the_same_scenario_and_night_give_the_same_run_keys(write: Write) -> None:
    path = write(TEST)

    first, again = (config.runs(config.load(path), "2026-11-21") for _ in range(2))

    assert [run.run_key for run in first] == [run.run_key for run in again]


# --- samples ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama3_8b.toml", "nightly.toml", "sweep.toml"])
def test_the_samples_are_valid_without_a_word_of_warning(name: str) -> None:
    scenario = config.load(EXAMPLES / name)

    assert scenario.tests
    assert not scenario.invalid
    assert not scenario.warnings


# --- whose verdict counts --------------------------------------------------------------------------------------------


def test_a_test_can_ask_for_cloudais_own_verdict(write: Write) -> None:
    (ours,) = config.load(write(TEST)).tests
    (theirs,) = config.load(write('compat = "cloudai"\n' + TEST)).tests

    assert (ours.compat, theirs.compat) == ("none", "cloudai")
    assert "compat: input should be 'none' or 'cloudai'" in violations_of(write('compat = "x"\n' + TEST))


# --- sweeps ----------------------------------------------------------------------------------------------------------


def test_a_list_is_a_sweep_and_every_valid_point_a_run(write: Write) -> None:
    scenario = config.load(write(TEST + "tp = [1, 2, 3]\ngb = [8, 16]\n"))

    (test,) = scenario.tests
    assert "tp" not in test.cmd_args
    runs = config.runs(scenario, "2026-11-21")
    assert [run.sweep_point for run in runs] == [
        {"tp": 1, "gb": 8}, {"tp": 1, "gb": 16}, {"tp": 2, "gb": 8}, {"tp": 2, "gb": 16},
    ]  # fmt: skip
    assert len({run.run_key for run in runs}) == 4
    assert all(run.test.cmd_args["tp"] == run.sweep_point["tp"] and run.test.axes == () for run in runs)


def test_a_list_for_a_flag_that_takes_lists_is_one_value_and_cloudais_other_reading_is_reported(write: Write) -> None:
    text = TEST + 'cuda_graph_scope = ["moe_router", "moe_preprocess"]\n'

    warned = config.load(write(text))
    excluded = config.load(write('dse_excluded_args = ["cmd_args.cuda_graph_scope"]\n' + text))

    assert warned.tests[0].axes == excluded.tests[0].axes == ()
    assert any("one value, a list; CloudAI would sweep over it" in warning for warning in warned.warnings)
    assert excluded.warnings == ()


def test_what_is_excluded_from_sweeps_is_a_key_whole_as_in_cloudai(write: Write) -> None:
    text = TEST + 'dataset_root = ["/a", "/b"]\ndata = "squad"\n'

    alone = config.load(write(f'dse_excluded_args = "cmd_args.data"\n{text}'))
    wrong = config.load(write(f'dse_excluded_args = ["dataset_root", "cmd_args.dataset_rot"]\n{text}'))

    assert [axis.name for axis in alone.tests[0].axes] == ["dataset_root"]
    assert alone.warnings == ()
    assert len(wrong.warnings) == 2
    assert "dse_excluded_args[0]: 'dataset_root' has no effect" in wrong.warnings[0]
    assert "dse_excluded_args[1]: 'cmd_args.dataset_rot' has no effect" in wrong.warnings[1]
    assert "did you mean 'dataset_root'?" in wrong.warnings[1]


def test_a_whole_table_that_never_sweeps_is_not_said_to_have_no_effect(write: Write) -> None:
    whole = 'dse_excluded_args = ["cmd_args"]\n' + TEST

    assert config.load(write(whole)).warnings == ()
    assert "dse_excluded_args excludes it from sweeps" in str(config.load(write(whole + "tp = [1, 2]\n")).invalid[0])


def test_a_flag_that_takes_lists_sweeps_when_it_is_asked_to_or_given_lists_of_lists(write: Write) -> None:
    asked = config.load(write(TEST + 'cuda_graph_scope = ["attn", "mlp"]\n[sweep]\nfields = ["cuda_graph_scope"]\n'))
    nested = config.load(write(TEST + 'cuda_graph_scope = [["attn"], ["attn", "mlp"]]\n'))

    assert asked.tests[0].axes[0].values == ("attn", "mlp")
    assert nested.tests[0].axes[0].values == (["attn"], ["attn", "mlp"])
    assert asked.warnings == nested.warnings == ()


def test_environment_variables_and_nodes_sweep_as_well(write: Write) -> None:
    text = (
        "num_nodes = [1, 2]\n" + TEST.replace("num_gpus = 8\n", "") + '[extra_env_vars]\nNCCL_ALGO = ["Ring", "Tree"]\n'
    )

    runs = config.runs(config.load(write(text)), "2026-11-21")

    assert [run.sweep_point for run in runs][1] == {"extra_env_vars.NCCL_ALGO": "Ring", "num_nodes": 2}
    assert [run.test.cmd_args["num_gpus"] for run in runs] == [8, 16, 8, 16]
    assert {run.test.extra_env_vars["NCCL_ALGO"] for run in runs} == {"Ring", "Tree"}


def test_a_value_that_is_written_twice_is_run_once(write: Write) -> None:
    scenario = config.load(write(TEST + "tp = [1, 2, 1]\n"))

    assert scenario.tests[0].axes[0].values == (1, 2)
    assert any("lists 1 twice" in warning for warning in scenario.warnings)


def test_a_scenarios_entry_can_replace_a_sweep_by_one_value(write: Write) -> None:
    write(TEST + "tp = [1, 2]\n", "tests/small.toml")
    entry = 'name = "s"\n[[Tests]]\nid = "one"\ntest_name = "small"\n[Tests.cmd_args]\ntp = 4\n'

    (test,) = config.load(write(entry, "scenario.toml")).tests

    assert (test.axes, test.cmd_args["tp"]) == ((), 4)
