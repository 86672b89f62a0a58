"""The installed package: one name at the top level, usable in any folder, and Prefect only where it is needed."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from nightbridge import __all__ as public

ROOT = Path(__file__).parents[2]
TEST_FILE = ROOT / "conf" / "examples" / "llama3_8b.toml"

BEFORE_PREFECT = "import sys; import nightbridge; assert 'prefect' not in sys.modules"
COLLECTIONS = (
    "import prefect.plugins; found = prefect.plugins.load_prefect_collections();print(found['nightbridge'].__file__)"
)


@pytest.fixture(scope="module")
def site_packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built wheel, unpacked as pip does it."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site-packages")
    return folder / "site-packages"


@pytest.fixture
def own_project(tmp_path: Path) -> Path:
    """A folder with modules of the user that are called like ours; importing one of them is a failure."""
    for name in ("flows/__init__.py", "blocks/__init__.py", "tasks.py", "examples/__init__.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("raise AssertionError('a module of the user was imported')\n")
    return tmp_path


def python(*arguments: str, cwd: Path, site_packages: Path | None = None) -> "subprocess.CompletedProcess[str]":
    """Run Python in a folder, which is the first that it imports from."""
    environment = os.environ | {"PREFECT_SERVER_ANALYTICS_ENABLED": "false", "DO_NOT_TRACK": "1"}
    if site_packages:
        environment["PYTHONPATH"] = str(site_packages)
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, timeout=300, check=False
    )


def test_a_wheel_installs_one_package(site_packages: Path) -> None:
    assert [path.name for path in site_packages.iterdir() if path.suffix != ".dist-info"] == ["nightbridge"]
    assert (site_packages / "nightbridge/flows/nightly.py").is_file()
    assert (site_packages / "nightbridge/py.typed").is_file()


def test_importing_it_loads_no_prefect_and_the_flows_load_it(tmp_path: Path) -> None:
    names = ", ".join(public)

    ended = python("-c", f"{BEFORE_PREFECT}; from nightbridge import {names}; print(type(run_pipeline))", cwd=tmp_path)

    assert (ended.returncode, ended.stdout) == (0, "<class 'function'>\n")


def test_validate_runs_beside_modules_of_the_same_names_and_loads_no_prefect(own_project: Path) -> None:
    ended = python("-X", "importtime", "-m", "nightbridge", "validate", str(TEST_FILE), cwd=own_project)

    assert (ended.returncode, ended.stdout) == (0, f"{TEST_FILE}: llama3_8b_h100: ok\n")
    assert " prefect" not in ended.stderr


@pytest.mark.prefect
def test_a_run_begins_beside_modules_of_the_same_names(own_project: Path) -> None:
    (own_project / "site.toml").write_text('workspace = "/proc/nowhere"\n')

    ended = python("-m", "nightbridge", "run", str(TEST_FILE), "--system", "site.toml", cwd=own_project)

    assert ended.returncode == 4
    assert "nightbridge: /proc/nowhere: " in ended.stderr


def test_the_flows_and_blocks_are_ours_beside_modules_of_the_same_names(own_project: Path) -> None:
    flows = python("-c", "from nightbridge import nightly_regression as flow; print(flow.__module__)", cwd=own_project)
    blocks = python("-c", COLLECTIONS, cwd=own_project)

    assert (flows.returncode, flows.stdout) == (0, "nightbridge.flows.api\n")
    assert (blocks.returncode, Path(blocks.stdout.strip()).parts[-3:]) == (0, ("nightbridge", "blocks", "__init__.py"))


def test_the_demo_is_refused_without_a_checkout_and_leaves_nothing(site_packages: Path, tmp_path: Path) -> None:
    ended = python("-m", "nightbridge", "demo", cwd=tmp_path, site_packages=site_packages)

    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == (
        f"nightbridge: {site_packages}/examples: the practice workload is not installed. "
        "Clone the repository of nightbridge and run `make demo` there\n"
    )
    assert list(tmp_path.iterdir()) == []


def test_the_demo_takes_its_own_workload_beside_a_folder_of_that_name(own_project: Path) -> None:
    code = (
        "from pathlib import Path; from nightbridge.cli.demo import practice_nights; "
        f"print(practice_nights(Path({str(ROOT / 'examples')!r})).__file__)"
    )

    ended = python("-c", code, cwd=own_project)

    assert (ended.returncode, ended.stdout.strip()) == (0, str(ROOT / "examples/practice/demo.py"))
