"""What is installed: one package, which no folder of a user can hide, and which loads Prefect only where it is needed."""

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]

TEST = """name = "small"
test_template_name = "MegatronBridge"

[cmd_args]
gpu_type = "h100"
model_family_name = "llama"
model_recipe_name = "llama_small"
container_image = "none"
num_gpus = 2
gpus_per_node = 2

[[git_repos]]
url = "https://example.org/Megatron-Bridge.git"
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--wheel-dir", folder, ROOT], check=True, capture_output=True)
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the wheel installs."""
    folder = tmp_path_factory.mktemp("site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A user's folder, with packages and modules of the names that the checkout has at its top."""
    (tmp_path / "small.toml").write_text(TEST, encoding="utf-8")
    for name in ("flows", "blocks"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise ImportError('of the user')\n")
    (tmp_path / "tasks.py").write_text("raise ImportError('of the user')\n")
    return tmp_path


def python(code: str, cwd: Path, path: Path) -> str:
    """Run Python in a folder, with a package's folder before everything that is installed; return what it prints."""
    environment = os.environ | {"PYTHONPATH": str(path)}
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


# --- (a) one top-level package ---------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_a_wheel_holds_one_package_with_the_code_of_the_linked_folders(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if ".dist-info/" not in name]

    assert {name.partition("/")[0] for name in names} == {"nightbridge"}
    assert {"nightbridge/flows/nightly.py", "nightbridge/tasks/prepare.py", "nightbridge/blocks/site_block.py"} <= {
        *names
    }


@pytest.mark.thorough
def test_a_wheel_that_is_made_of_the_sdist_is_the_same(wheel: Path, tmp_path: Path) -> None:
    sdist = [sys.executable, "-m", "hatchling", "build", "--target", "sdist", "--directory", str(tmp_path)]
    subprocess.run(sdist, cwd=ROOT, check=True, capture_output=True)
    (made_of,) = tmp_path.glob("*.tar.gz")
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--wheel-dir", tmp_path, made_of], check=True, capture_output=True)

    made, own = (zipfile.ZipFile(path).namelist() for path in (next(tmp_path.glob("*.whl")), wheel))

    assert sorted(made) == sorted(own)


@pytest.mark.thorough
def test_an_installed_command_works_beside_a_user_s_own_flows_and_tasks(place: Path, installed: Path) -> None:
    command = [sys.executable, "-m", "nightbridge", "validate", "small.toml"]
    environment = os.environ | {"PYTHONPATH": str(installed)}

    ended = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, check=False)

    assert ended.returncode == 0, ended.stderr


# --- (b) where the public functions are imported from ----------------------------------------------------------------


@pytest.mark.thorough
def test_the_public_functions_are_imported_from_the_package_everywhere(place: Path, installed: Path) -> None:
    code = "from nightbridge import nightly_regression, run_pipeline; print(nightly_regression.__module__)"

    assert python(code, place, installed) == "nightbridge.flows.api\n"


@pytest.mark.thorough
def test_the_public_functions_are_imported_from_flows_in_a_checkout() -> None:
    code = "from flows import nightly_regression, run_pipeline; print(nightly_regression.__module__)"

    assert python(code, ROOT, ROOT) == "nightbridge.flows.api\n"


@pytest.mark.thorough
def test_importing_the_package_and_validating_a_file_load_no_prefect(place: Path, installed: Path) -> None:
    code = (
        "import sys, nightbridge\n"
        "from nightbridge.cli import main\n"
        "main.run(['validate', '--json', 'small.toml'])\n"
        "print(sorted({'prefect', 'pandas', 'boto3'} & sys.modules.keys()))\n"
    )

    assert python(code, place, installed).splitlines()[-1] == "[]"


# --- (c) one name for tools, (d) names that cannot collide -----------------------------------------------------------


@pytest.mark.parametrize("name", ["flows", "tasks", "blocks"])
def test_the_folders_at_the_top_hold_the_code_and_the_package_links_to_them(name: str) -> None:
    link = ROOT / "nightbridge" / name

    assert (link.is_symlink(), os.readlink(link)) == (True, f"../{name}")
    assert not (ROOT / name).is_symlink()


def sources_of_the_product() -> list[Path]:
    return [path for name in ("nightbridge", "flows", "tasks", "blocks") for path in (ROOT / name).rglob("*.py")]


def test_no_module_is_longer_than_500_lines() -> None:
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in sources_of_the_product()}

    assert lengths
    assert [path for path, lines in lengths.items() if lines > 500] == []


def test_no_module_imports_the_folders_at_the_top_by_their_short_names() -> None:
    sources = sources_of_the_product()
    short = tuple(f"{word} {name}" for word in ("from", "import") for name in ("flows", "tasks", "blocks"))

    found = [
        f"{path}: {line}"
        for path in sources
        for line in path.read_text(encoding="utf-8").splitlines()
        if line.startswith(short)
    ]

    assert sources
    assert found == []


def test_mypy_and_the_contracts_see_all_of_it() -> None:
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]

    assert tools["mypy"]["strict"]
    assert "nightbridge" in tools["mypy"]["files"]
    assert tools["importlinter"]["root_packages"] == ["nightbridge"]


def test_no_module_imports_what_mypy_skips() -> None:
    mypy = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["mypy"]
    skipped = [override["module"] for override in mypy["overrides"] if override.get("follow_imports") == "skip"]
    names = "|".join(name.removesuffix(".*") for modules in skipped for name in modules)
    imports = re.compile(rf"^ *(?:from|import) +(?:{names})\b.*", re.MULTILINE)
    sources = [path for folder in mypy["files"] for path in (ROOT / folder).rglob("*.py")]

    assert names
    assert [f"{path}: {found}" for path in sources for found in imports.findall(path.read_text(encoding="utf-8"))] == []


def test_entry_points_and_deployments_name_the_package() -> None:
    deployments = yaml.safe_load((ROOT / "prefect.yaml").read_text(encoding="utf-8"))["deployments"]
    own = distribution("nightbridge").entry_points

    assert {point.group for point in own} == {"console_scripts", "prefect.collections"}
    assert [name for name in (point.value for point in own) if not name.startswith("nightbridge.")] == []
    assert {deployment["entrypoint"].partition(".")[0] for deployment in deployments} == {"nightbridge"}
