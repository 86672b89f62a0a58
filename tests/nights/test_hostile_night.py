"""A night in which two of three tests leave all that could hurt a night: the third gets all that it would have got."""

import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from examples.practice.git_writer import Change, add_commits, git
from examples.practice.repositories import install_torchrun, make_practice_repositories, move_main
from nightbridge.flows import nightly_regression
from nightbridge.harvest.manifest import load_record
from nightbridge.harvest.restore import verify_run
from nightbridge.models import NightReport, StoreSettings, Verdict, VerdictStatus
from nightbridge.store.factory import open_store
from tests.flows.practice_night import Entry, write_scenario, write_site
from tests.real.prefect_harness import prefect_in_this_process

pytestmark = [pytest.mark.launcher, pytest.mark.timeout(300)]

PROGRAM = "examples/mimo/train_hetero.py"
ATTACK = Path(__file__).with_name("hostile_job.py")
STEPS = {"train_samples": 80, "save_interval": 10}


@pytest.fixture(scope="module", autouse=True)
def _server() -> Iterator[None]:
    with prefect_in_this_process():
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hostile")


@pytest.fixture(scope="module")
def night(folder: Path, environments_dir: Path, launcher_python: Path) -> NightReport:
    repositories = make_practice_repositories(folder / "practice")
    install_torchrun(folder / "practice", launcher_python)
    repository = Path(repositories.megatron_lm_url)
    good = git(repository, "rev-parse", "main")
    program = git(repository, "show", f"main:{PROGRAM}")
    hostile = f"import runpy\n\nrunpy.run_path({str(ATTACK)!r})\n{program}\n".encode()
    add_commits(
        repository, [Change(message="Hostile", made_at=datetime(2026, 3, 1, tzinfo=UTC), files={PROGRAM: hostile})]
    )
    commit = git(repository, "rev-parse", "main")
    move_main(repositories, good, "megatron_lm")
    write_site(folder / "site.toml", workspace=folder / "workspace", environments=environments_dir)
    scenario = write_scenario(
        folder / "conf",
        repositories,
        "hostile",
        Entry(id="hostile", sample="vlm_small", cmd_args=STEPS, commit=commit),
        Entry(id="records", sample="vlm_small", cmd_args=STEPS, commit=commit),
        Entry(id="neighbour", sample="vlm_small", cmd_args=STEPS),
    )
    started = time.monotonic()
    report = nightly_regression(scenario, night="n1", system=str(folder / "site.toml"))
    print(f"a hostile night: {time.monotonic() - started:.0f} s")
    return report


def verdict_of(night: NightReport, test_id: str) -> Verdict:
    (found,) = (verdict for verdict in night.verdicts if verdict.test_id == test_id)
    return found


def test_the_neighbour_has_its_verdict_its_report_and_its_harvest(folder: Path, night: NightReport) -> None:
    verdict = verdict_of(night, "neighbour")
    store = open_store(StoreSettings(url=f"file://{folder}/workspace/store"))
    record = load_record(store, verdict.prefix)

    assert record is not None
    assert verdict.status is VerdictStatus.NO_BASELINE
    assert record.summary.steps_done == 10
    assert record.summary.damage == ()
    # The practice workload's shards are no archives, so nothing in them proves what they hold.
    assert [checkpoint.state for checkpoint in record.checkpoints] == ["unproven"]
    assert verify_run(store, verdict.prefix) == []
    assert "neighbour" in Path(night.report.removeprefix("file://")).read_text()


@pytest.mark.parametrize("test_id", ["hostile", "records"])
def test_a_hostile_test_has_a_verdict_that_is_not_good(test_id: str, night: NightReport) -> None:
    verdict = verdict_of(night, test_id)

    assert verdict.status not in {VerdictStatus.PASSED, VerdictStatus.NO_BASELINE, VerdictStatus.IMPROVED}
    assert verdict.reasons


def test_nothing_of_this_machine_is_in_the_store(folder: Path, night: NightReport) -> None:
    secret = (ATTACK.parent / "installation.py").read_bytes()
    stored = [path for path in (folder / "workspace/store").rglob("*") if path.is_file()]

    assert len(stored) > 20
    assert not [path for path in stored if path.stat().st_size == len(secret) and path.read_bytes() == secret]
    assert max(path.stat().st_size for path in stored) < 64 << 20
