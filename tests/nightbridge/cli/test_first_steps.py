"""The first files, what a key means, and the demo: works from a checkout, wherever it is called, else is refused."""

import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from nightbridge.cli import first_steps
from nightbridge.models import NightReport, Verdict, VerdictStatus
from tests.builders import make_verdict
from tests.nightbridge.cli.conftest import Program
from tests.nightbridge.config.test_script_import import SCRIPT

ROOT = Path(__file__).parents[3]


def test_init_writes_a_test_that_is_valid_and_a_site_that_loads(nightbridge: Program, tmp_path: Path) -> None:
    code, _, err = nightbridge("init", "llama3_8b", "--gpus", "16", "--partition", "gpu", "--workspace", str(tmp_path))

    assert code == 0
    assert "next: nightbridge doctor --system site.toml" in err
    valid, out, _ = nightbridge("validate", "llama3_8b.toml")
    assert (valid, out) == (0, "llama3_8b.toml: llama3_8b_h100: ok\n")
    assert tomllib.loads((tmp_path / "llama3_8b.toml").read_text())["cmd_args"]["num_gpus"] == 16
    rendered, out, _ = nightbridge("render", "llama3_8b.toml", "--system", "site.toml")
    assert rendered == 0
    assert "gpu" in out


def test_init_overwrites_nothing(nightbridge: Program, tmp_path: Path) -> None:
    (tmp_path / "site.toml").write_text("workspace = 'mine'\n")
    nightbridge("init", "llama3_8b")
    mine = (tmp_path / "llama3_8b.toml").read_text()

    code, _, err = nightbridge("init", "llama3_8b", "--gpus", "64")

    assert code == 2
    assert "llama3_8b.toml: exists already" in err
    assert (tmp_path / "llama3_8b.toml").read_text() == mine
    assert (tmp_path / "site.toml").read_text() == "workspace = 'mine'\n"


def test_init_quotes_what_it_is_given(nightbridge: Program, tmp_path: Path) -> None:
    nightbridge("init", "llama3_70b", "--account", 'a"b', "--partition", "a\\b", "--store", "file:///a#b")

    site = tomllib.loads((tmp_path / "site.toml").read_text())
    assert (site["cluster"]["account"], site["cluster"]["partition"]) == ('a"b', "a\\b")
    assert site["store"]["url"] == "file:///a#b"


@pytest.mark.parametrize("workspace", ["~/nights", "nights"])
def test_the_store_that_init_writes_is_where_its_workspace_is(
    nightbridge: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workspace: str
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert nightbridge("init", "llama3_8b", "--workspace", workspace)[0] == 0
    assert nightbridge("nights", "--system", "site.toml")[2] == f"no night in file://{tmp_path}/nights/store yet\n"


def test_init_names_the_recipes_that_are_like_it(nightbridge: Program, tmp_path: Path) -> None:
    code, _, err = nightbridge("init", "llama3_9b")

    assert code == 2
    assert "llama3_9b: no such recipe in v0.4.2. Name one of llama3_8b" in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("cmd_args.mb", "micro_batch_size"),
        ("mb", "cmd_args.mb: "),
        ("micro_batch_size", "cmd_args.mb: "),
        ("gate.pairs", "maximum  5"),
        ("harvest", "checkpoint  Which complete checkpoints are kept"),
        ("git_repos.commit", "git_repos.commit"),
    ],
)
def test_explain_says_what_a_key_means(nightbridge: Program, key: str, said: str) -> None:
    code, out, _ = nightbridge("explain", key)

    assert code == 0
    assert said in out


@pytest.mark.parametrize(
    ("key", "advice"),
    [
        ("cmd_args.micro_batch_size", "unknown key; write mb"),
        ("cmd_args.train_iters", "unknown key; write max_steps"),
        ("cmd_args.extra_cmd_args", "unknown key; it is a table of the test, [extra_cmd_args]"),
        ("checkpoint", "several tables have this key. Name one of extra_cmd_args.checkpoint, harvest.checkpoint"),
        ("gate.step_tme", "unknown key; did you mean 'step_time'?"),
    ],
)
def test_the_names_of_megatron_and_nemo_lead_to_ours(nightbridge: Program, key: str, advice: str) -> None:
    code, _, err = nightbridge("explain", key)

    assert code == 2
    assert advice in err


def test_a_launch_script_becomes_a_test_that_is_valid(nightbridge: Program, tmp_path: Path) -> None:
    (tmp_path / "two_grids.sh").write_text(SCRIPT)

    code, out, _ = nightbridge("import-script", "two_grids.sh", "--set", "ITERS=5")
    again, _, err = nightbridge("import-script", "two_grids.sh")

    assert (code, again) == (0, 2)
    assert "only in the script: nothing" in out
    assert "exists already" in err
    assert tomllib.loads((tmp_path / "two_grids.toml").read_text())["cmd_args"]["max_steps"] == 5
    assert nightbridge("validate", "two_grids.toml")[0] == 0


# --- the demo ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder with the package alone, as a wheel installs it."""
    folder = tmp_path / "site-packages"
    shutil.copytree(ROOT / "nightbridge", folder / "nightbridge", ignore=shutil.ignore_patterns("__pycache__"))
    return folder


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with packages of the workload's names; importing one of them is a failure."""
    for name in ("examples", "examples/practice"):
        (tmp_path / "place" / name).mkdir(parents=True)
        (tmp_path / "place" / name / "__init__.py").write_text("raise ImportError('of the user')\n")
    return tmp_path / "place"


def test_without_a_checkout_it_is_refused_in_one_line_and_leaves_nothing(installed: Path, place: Path) -> None:
    before = sorted(place.rglob("*"))
    environment = os.environ | {"PYTHONPATH": str(installed)}
    command = [sys.executable, "-m", "nightbridge", "demo"]

    ended = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, check=False)

    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == (
        f"nightbridge: {installed}/examples: the practice workload is not installed. "
        "Clone the repository of nightbridge and run `make demo` there\n"
    )
    assert sorted(place.rglob("*")) == before


@pytest.mark.thorough  # a process that imports Prefect
def test_it_takes_its_own_workload_beside_a_folder_of_that_name(place: Path) -> None:
    code = (
        "from pathlib import Path; from nightbridge.cli.first_steps import practice_nights; "
        f"print(practice_nights(Path({str(ROOT / 'examples')!r})).__file__)"
    )

    ended = subprocess.run([sys.executable, "-c", code], cwd=place, capture_output=True, text=True, check=False)

    assert (ended.returncode, ended.stdout.strip()) == (0, str(ROOT / "examples/practice/demo.py"))


@pytest.fixture
def demo_of(nightbridge: Program, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str, str]]:
    """Run the demo, in which one night ends with these verdicts."""

    def demo(*verdicts: Verdict) -> tuple[int, str, str]:
        report = NightReport(scenario="nightly", night="2026-11-21", verdicts=verdicts, report="report")

        def run_demo(_folder: Path, show: Callable[..., None]) -> list[NightReport]:
            show(SimpleNamespace(subject="Slower"), report)
            return [report]

        nights = SimpleNamespace(NIGHTS=(1,), run_demo=run_demo, slow_night=lambda reports: reports[0])
        monkeypatch.setattr(first_steps, "practice_nights", lambda _examples: nights)
        monkeypatch.setattr(os, "environ", dict(os.environ))  # it sets Prefect's home and level of logging
        return nightbridge("demo")

    return demo


def test_a_demo_whose_runs_are_invalid_ends_with_their_exit_code(demo_of: Callable[..., tuple[int, str, str]]) -> None:
    slow = make_verdict(VerdictStatus.REGRESSED, "slow", test_id="llama-small")
    invalid = make_verdict(VerdictStatus.INVALID, "no such recipe", test_id="deepseek-small")

    assert demo_of(slow, invalid)[0] == 2


def test_a_demo_is_refused_in_a_folder_whose_path_the_launcher_would_alter(
    nightbridge: Program, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "my repo").mkdir()
    monkeypatch.setattr(first_steps, "practice_nights", lambda _examples: None)

    code, _, err = nightbridge("demo", "--workspace", "my repo/.nightbridge")

    assert code == 2
    assert "my repo/.nightbridge: its path contains white space" in err
    assert list((tmp_path / "my repo").iterdir()) == []


def test_what_it_says_to_do_next_names_the_demo_s_own_site(demo_of: Callable[..., tuple[int, str, str]]) -> None:
    slow = make_verdict(VerdictStatus.REGRESSED, "slow", test_id="llama-small")

    code, out, err = demo_of(slow)

    told = [line for line in (out + err).splitlines() if "next: nightbridge" in line]
    assert (code, len(told)) == (0, 2)
    assert all(line.endswith(" --system .nightbridge/demo/site.toml") for line in told)
