"""A launcher environment is the locked base with one NeMo-Run commit in front of it, whole or not there at all.

The bases here are tiny and come from a wheel folder, as on a site without network; the last tests use the real one.
"""

import hashlib
import json
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nightbridge.errors import DamagedData, InvalidInput, PermanentError, TransientError
from nightbridge.models import LauncherEnvironment, PinnedRepository
from nightbridge.repos.checkouts import check_out, find_changes
from nightbridge.repos.environments import make_environment, prepare_base, site_packages
from nightbridge.repos.mirrors import Mirror
from tests.conftest import SEEDS

# A build back end that a checkout brings along: a wheel is a zip file of the packages and three facts.
BACK_END = """
import pathlib, zipfile
def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    file = f"{NAME}-{VERSION}-py3-none-any.whl"
    info = f"{NAME}-{VERSION}.dist-info"
    pathlib.Path("built-here").write_text("a build writes into its source tree")
    with zipfile.ZipFile(pathlib.Path(wheel_directory) / file, "w") as wheel:
        for path in sorted(pathlib.Path("packages").rglob("*.py")):
            wheel.write(path, path.relative_to("packages").as_posix())
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\\nName: {NAME}\\nVersion: {VERSION}\\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr(f"{info}/RECORD", "")
    return file
"""
PROJECT = """
[build-system]
requires = []
build-backend = "back_end"
backend-path = ["."]
"""


def project_files(name: str, version: str, **modules: str) -> dict[str, str]:
    """The files of a Python project with one package for each of `modules`."""
    packages = {f"packages/{module}/__init__.py": source for module, source in modules.items()}
    return {"pyproject.toml": PROJECT, "back_end.py": f"NAME, VERSION = {name!r}, {version!r}{BACK_END}", **packages}


def write_wheel(folder: Path, name: str, version: str, module: str, source: str) -> None:
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{module}/__init__.py", source)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def locked(wheels: Path, *requirements: str) -> str:
    """Lines of a lock file, with the hashes of the wheels that are there and a wrong one for those that are not."""
    lines = []
    for requirement in requirements:
        name, version = requirement.split("==")
        wheel = wheels / f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
        digest = hashlib.sha256(wheel.read_bytes() if wheel.exists() else b"").hexdigest()
        lines.append(f"{requirement} \\\n    --hash=sha256:{digest}\n")
    return "".join(lines)


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheels")
    write_wheel(folder, "nemo_run", "0.11.1", "nemo_run", "import helper\n__version__ = '0.11.1'\n")
    write_wheel(folder, "helper", "1.0", "helper", "")
    return folder


@pytest.fixture(scope="module")
def envs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the tests of layers keep one base together; their commits differ."""
    return tmp_path_factory.mktemp("envs")


@pytest.fixture(scope="module")
def empty_environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("venv") / "empty"
    venv.create(folder, with_pip=True, symlinks=True)
    return folder


@pytest.fixture
def copied_environments(empty_environment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python takes four seconds of a core to make an environment, most of them for pip's own installation: once here."""
    create = venv.create

    def copy(folder: Path, *, with_pip: bool, symlinks: bool) -> None:
        if with_pip:
            shutil.copytree(empty_environment, folder, symlinks=True, dirs_exist_ok=True)
        else:
            create(folder, symlinks=symlinks)

    monkeypatch.setattr(venv, "create", copy)


@pytest.fixture
def lock(tmp_path: Path, wheels: Path, copied_environments: None, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A lock file of two packages, one of them `nemo_run` 0.11.1, that pip finds in a folder and nowhere else."""
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    path = tmp_path / "tiny.lock"
    path.write_text(locked(wheels, "helper==1.0", "nemo-run==0.11.1"))
    return path


@pytest.fixture
def no_packages(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From the call on, nothing can be installed."""
    return lambda: monkeypatch.setenv("PIP_FIND_LINKS", "/nonexistent")


@pytest.fixture
def run_checkout(
    make_origin: Callable[[str], Any], workspace: Path, request: pytest.FixtureRequest
) -> Callable[[dict[str, str]], PinnedRepository]:
    """Commit files to a NeMo-Run repository and check the commit out."""
    origin = make_origin("Run")

    def commit_and_check_out(files: dict[str, str]) -> PinnedRepository:
        commit = origin.commit(f"Change for {request.node.name}", files)
        return check_out(Mirror(origin.url, workspace, timeout=60), "main", commit, workspace)

    return commit_and_check_out


def record_of(environment: LauncherEnvironment) -> dict[str, str]:
    return dict(json.loads((environment.python.parent.parent / "environment.json").read_text()))


def says(environment: LauncherEnvironment | Path, code: str) -> str:
    python = environment / "bin" / "python" if isinstance(environment, Path) else environment.python
    return subprocess.run([python, "-c", code], check=True, capture_output=True, text=True, cwd="/").stdout.strip()


def test_the_base_holds_the_locked_requirements_and_is_installed_once(
    envs: Path, lock: Path, no_packages: Callable[[], None]
) -> None:
    base = prepare_base(envs, lock=lock)
    no_packages()

    assert says(base, "import nemo_run; print(nemo_run.__version__)") == "0.11.1"
    assert prepare_base(envs, lock=lock) == base


def test_another_lock_file_makes_another_base(envs: Path, lock: Path, wheels: Path) -> None:
    base = prepare_base(envs, lock=lock)
    lock.write_text(locked(wheels, "helper==1.0"))

    assert prepare_base(envs, lock=lock) != base


def test_an_interrupted_base_is_made_again(tmp_path: Path, envs: Path, lock: Path) -> None:
    whole = prepare_base(envs, lock=lock)
    # As a kill in the middle of pip's work leaves it: a folder without the link that says it is whole.
    half_built = tmp_path / "envs" / f"{whole.name}.01234567"
    shutil.copytree(whole, half_built, symlinks=True)
    shutil.rmtree(site_packages(half_built) / "helper")

    base = prepare_base(tmp_path / "envs", lock=lock)

    assert says(base, "import nemo_run; print(nemo_run.__version__)") == "0.11.1"
    assert not half_built.exists()
    assert sorted(path.name for path in base.parent.iterdir()) == sorted([base.name, base.resolve().name])


def test_a_base_whose_interpreter_is_gone_is_made_again(tmp_path: Path, envs: Path, lock: Path) -> None:
    name = prepare_base(envs, lock=lock).name
    old = tmp_path / "envs" / f"{name}.01234567"
    (old / "bin").mkdir(parents=True)
    (old / "bin" / "python").symlink_to("/nonexistent/python3.11")
    (tmp_path / "envs" / name).symlink_to(old.name)

    assert says(prepare_base(tmp_path / "envs", lock=lock), "print(1)") == "1"


def test_a_requirement_that_is_nowhere_is_named_and_nothing_is_left(tmp_path: Path, lock: Path, wheels: Path) -> None:
    lock.write_text(locked(wheels, "helper==2.0"))

    with pytest.raises(PermanentError, match=r"helper==2\.0.*PIP_FIND_LINKS"):
        prepare_base(tmp_path / "envs", lock=lock)

    assert list((tmp_path / "envs").iterdir()) == []


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (f"helper==1.0 --hash=sha256:{'0' * 64}\n", "DO NOT MATCH THE HASHES.*holds another file"),
        ("helper==1.0\n", "hashes are required"),
    ],
    ids=["another file under the same name", "no hash"],
)
def test_what_is_not_the_locked_file_is_not_installed(tmp_path: Path, lock: Path, content: str, reason: str) -> None:
    lock.write_text(content)

    with pytest.raises(PermanentError, match=f"(?is){reason}"):
        prepare_base(tmp_path / "envs", lock=lock)

    assert list((tmp_path / "envs").iterdir()) == []


def test_a_wheel_folder_of_the_site_needs_no_network_and_no_settings_of_pip(
    tmp_path: Path, lock: Path, wheels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PIP_NO_INDEX", "PIP_FIND_LINKS"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:1/simple")

    base = prepare_base(tmp_path / "envs", lock=lock, wheels=wheels)

    assert says(base, "import nemo_run; print(nemo_run.__version__)") == "0.11.1"
    for nowhere in ("nowhere", f"{'long' * 99}-nowhere"):
        with pytest.raises(InvalidInput, match=r"nowhere: no such wheel folder.*pip download"):
            prepare_base(tmp_path / "other", lock=lock, wheels=tmp_path / nowhere)


def test_an_index_that_does_not_answer_is_transient_and_what_helps_without_a_network_is_told(
    tmp_path: Path, lock: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:1/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    lock.write_text(locked(tmp_path, "missing-here==1.0"))

    with pytest.raises(TransientError, match=r"pip could not install it.* index did not answer.*PIP_FIND_LINKS=FOLDER"):
        prepare_base(tmp_path / "envs", lock=lock)


def test_nemo_run_comes_from_its_checkout_and_the_rest_from_the_base(
    envs: Path, lock: Path, run_checkout: Callable[[dict[str, str]], PinnedRepository]
) -> None:
    checkout = run_checkout(project_files("nemo_run", "0.12.0", nemo_run="import helper\n__version__ = '0.12.0'\n"))

    made = make_environment(checkout, envs, lock=lock)

    layer = made.python.parent.parent
    assert made.nemo_run_version == "0.12.0"
    assert layer == envs / made.digest
    assert says(made, "import nemo_run; print(nemo_run.__file__)").startswith(str(layer))
    assert says(made, "import helper; print(helper.__file__)").startswith(str(envs / "base-"))
    record = record_of(made)
    assert (record["project"], record["nemo_run_from"], record["commit"]) == ("nemo_run", "layer", checkout.commit)


def test_the_checkout_is_not_written_to(
    envs: Path, lock: Path, run_checkout: Callable[[dict[str, str]], PinnedRepository]
) -> None:
    checkout = run_checkout(project_files("nemo_run", "0.12.0", nemo_run="import helper\n"))

    make_environment(checkout, envs, lock=lock)

    assert find_changes(checkout.path, checkout.commit) == []


def test_a_package_of_another_name_builds_on_the_locked_nemo_run(
    envs: Path, lock: Path, run_checkout: Callable[[dict[str, str]], PinnedRepository]
) -> None:
    checkout = run_checkout(project_files("practice_run", "3.0", practice_run="import nemo_run\n"))

    made = make_environment(checkout, envs, lock=lock)

    record = record_of(made)
    assert made.nemo_run_version == "0.11.1"
    assert (record["project"], record["project_version"], record["nemo_run_from"]) == ("practice_run", "3.0", "base")
    assert says(made, "import practice_run; print(practice_run.nemo_run.__version__)") == "0.11.1"


def test_each_commit_is_a_layer_of_its_own_and_made_once(
    envs: Path,
    lock: Path,
    run_checkout: Callable[[dict[str, str]], PinnedRepository],
    no_packages: Callable[[], None],
) -> None:
    first = run_checkout(project_files("nemo_run", "0.12.0", nemo_run="value = 1\n"))
    second = run_checkout(project_files("nemo_run", "0.12.0", nemo_run="value = 2\n"))

    environments = [make_environment(checkout, envs, lock=lock) for checkout in (first, second)]

    assert [says(environment, "import nemo_run; print(nemo_run.value)") for environment in environments] == ["1", "2"]
    assert environments[0].digest != environments[1].digest
    assert len({record_of(environment)["base"] for environment in environments}) == 1
    made_at = environments[0].python.parent.parent.stat().st_ino
    no_packages()
    assert make_environment(first, envs, lock=lock) == environments[0]
    assert environments[0].python.parent.parent.stat().st_ino == made_at


def test_a_half_made_layer_is_made_again(
    envs: Path, lock: Path, run_checkout: Callable[[dict[str, str]], PinnedRepository]
) -> None:
    checkout = run_checkout(project_files("nemo_run", "0.12.0", nemo_run="value = 1\n"))
    made = make_environment(checkout, envs, lock=lock)
    layer = made.python.parent.parent
    half = layer.with_name(f".{made.digest}.0123.tmp")
    shutil.copytree(layer, half, symlinks=True)
    (layer / "environment.json").unlink()
    shutil.rmtree(site_packages(layer) / "nemo_run")

    make_environment(checkout, envs, lock=lock)

    assert says(made, "import nemo_run; print(nemo_run.value)") == "1"
    assert not half.exists()


def test_in_a_workspace_that_was_moved_layers_find_their_base(
    tmp_path: Path, envs: Path, lock: Path, run_checkout: Callable[[dict[str, str]], PinnedRepository]
) -> None:
    checkout = run_checkout(project_files("nemo_run", "0.12.0", nemo_run="import helper\nvalue = 1\n"))
    former, moved = tmp_path / "former", tmp_path / "moved"
    shutil.copytree(prepare_base(envs, lock=lock).resolve().parent, former, symlinks=True)
    recorded = record_of(make_environment(checkout, former, lock=lock))
    former.rename(moved)

    made = make_environment(checkout, moved, lock=lock)

    assert made.python.is_relative_to(moved)
    assert record_of(made) == recorded
    assert says(made, "import nemo_run; print(nemo_run.value)") == "1"


def test_a_nemo_run_that_cannot_be_imported_is_refused_and_nothing_is_left(
    envs: Path, lock: Path, run_checkout: Callable[[dict[str, str]], PinnedRepository]
) -> None:
    checkout = run_checkout(project_files("nemo_run", "0.13.0", nemo_run="import leptonai_of_tomorrow\n"))
    prepare_base(envs, lock=lock)
    before = set(envs.iterdir())

    with pytest.raises(PermanentError, match=r"import nemo_run. fails: .*leptonai_of_tomorrow.*launcher\.lock"):
        make_environment(checkout, envs, lock=lock)

    assert set(envs.iterdir()) == before


def test_a_nemo_run_checkout_that_installs_none_is_damaged(
    envs: Path, lock: Path, run_checkout: Callable[[dict[str, str]], PinnedRepository]
) -> None:
    checkout = run_checkout(project_files("nemo_run", "0.12.0", other="value = 1\n"))

    with pytest.raises(DamagedData, match="not from its own checkout"):
        make_environment(checkout, envs, lock=lock)


def test_a_persons_python_path_does_not_reach_into_it(
    envs: Path,
    tmp_path: Path,
    lock: Path,
    run_checkout: Callable[[dict[str, str]], PinnedRepository],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "mine" / "nemo_run").mkdir(parents=True)
    (tmp_path / "mine" / "nemo_run" / "__init__.py").write_text("raise RuntimeError('not this one')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "mine"))
    checkout = run_checkout(project_files("nemo_run", "0.12.0", nemo_run=""))

    assert make_environment(checkout, envs, lock=lock).nemo_run_version == "0.12.0"


def test_a_package_that_is_built_sees_no_secret_of_the_site_whatever_its_variable_is_called(
    envs: Path,
    lock: Path,
    run_checkout: Callable[[dict[str, str]], PinnedRepository],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "OUR_STORE", "PREFECT_API_KEY"):
        monkeypatch.setenv(name, "planted-value")
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:1")
    files = project_files("nemo_run", "0.12.0", nemo_run="")
    files["back_end.py"] += (
        "import os\npathlib.Path('packages/nemo_run/seen.py').write_text(f'variables = {dict(os.environ)!r}')\n"
    )

    seen = says(make_environment(run_checkout(files), envs, lock=lock), "from nemo_run.seen import *; print(variables)")

    assert "planted-value" not in seen
    assert "http://127.0.0.1:1" in seen


def test_many_who_ask_at_once_share_one(
    tmp_path: Path,
    lock: Path,
    run_checkout: Callable[[dict[str, str]], PinnedRepository],
    caplog: pytest.LogCaptureFixture,
) -> None:
    checkout = run_checkout(project_files("nemo_run", "0.12.0", nemo_run=""))
    found: list[LauncherEnvironment] = []
    caplog.set_level("INFO", logger="nightbridge")

    threads = [
        threading.Thread(target=lambda: found.append(make_environment(checkout, tmp_path / "envs", lock=lock)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(found) == 4
    assert len(set(found)) == 1
    assert caplog.text.count("packages, once per machine") == 1
    assert caplog.text.count(f"NeMo-Run {checkout.commit[:12]} made in") == 1


@pytest.mark.random_kill
@pytest.mark.parametrize("seed", SEEDS)
def test_killed_at_any_moment_the_next_one_succeeds(
    tmp_path: Path, lock: Path, run_checkout: Callable[[dict[str, str]], PinnedRepository], seed: int
) -> None:
    checkout = run_checkout(project_files("nemo_run", "0.12.0", nemo_run="import helper\nvalue = 1\n"))
    program = f"""
from pathlib import Path
from nightbridge.models import PinnedRepository
from nightbridge.repos.environments import make_environment
checkout = PinnedRepository.model_validate_json({checkout.model_dump_json()!r})
make_environment(checkout, Path({str(tmp_path / "envs")!r}), lock=Path({str(lock)!r}))
"""
    process = subprocess.Popen([sys.executable, "-c", program])
    time.sleep(random.Random(seed).uniform(0.2, 5.0))
    process.send_signal(signal.SIGKILL)
    process.wait()

    made = make_environment(checkout, tmp_path / "envs", lock=lock)

    assert says(made, "import nemo_run, helper; print(nemo_run.value)") == "1"


@pytest.mark.launcher
def test_the_real_base_imports_the_real_nemo_run_under_a_thin_checkout(
    environments_dir: Path, run_checkout: Callable[[dict[str, str]], PinnedRepository]
) -> None:
    pyproject = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "thin-run"
version = "1.0"
dependencies = ["nemo-run==0.11.1"]
[tool.hatch.build.targets.wheel]
packages = ["thin_run"]
"""
    checkout = run_checkout({"pyproject.toml": pyproject, "thin_run/__init__.py": "import nemo_run\n"})
    prepare_base(environments_dir)

    started = time.monotonic()
    made = make_environment(checkout, environments_dir)
    seconds = time.monotonic() - started

    try:
        assert made.nemo_run_version == "0.11.1"
        executor = "import nemo_run, thin_run; print(nemo_run.SlurmExecutor(account='a', tunnel=None).ntasks_per_node)"
        assert says(made, executor) == "1"
        assert seconds < 300
    finally:
        shutil.rmtree(made.python.parent.parent)
