"""One night of the second workload: two grids on two nodes each, and one of the tests follows the other."""

import json
from pathlib import Path

import pytest

from examples.practice.repositories import install_torchrun, make_practice_repositories
from nightbridge.flows import nightly_regression
from nightbridge.models import NightReport, Outcome, RunRecord, Verdict, VerdictStatus
from nightbridge.outputs.checkpoints import find_checkpoints
from tests.flows.practice_night import SAMPLES, write_site
from tests.nightbridge.outputs.builders import scalars

pytestmark = [pytest.mark.launcher, pytest.mark.usefixtures("flows_here")]

STEPS = 12
NIGHT = f"""\
name = "grids"

[[Tests]]
id = "recipe"
test_name = "vlm_small"
cmd_args.train_samples = {8 * STEPS}
cmd_args.save_interval = 6

# Micro-batches of two samples are added up in another order: not the same bits, and the same training.
[[Tests]]
id = "vlm"
test_name = "vlm_small"
cmd_args.train_samples = {8 * STEPS}
cmd_args.save_interval = 6
cmd_args.mb = 2
gate.reference = "recipe"
gate.reference_rules = {{ later = 0.011 }}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hetero")


@pytest.fixture(scope="module")
def night(folder: Path, launcher_python: Path, environments_dir: Path) -> NightReport:
    make_practice_repositories(folder / "practice")
    install_torchrun(folder / "practice", launcher_python)
    sample = (SAMPLES / "vlm_small.toml").read_text().replace(".nightbridge/practice", str(folder / "practice"))
    (folder / "vlm_small.toml").write_text(sample)
    (folder / "grids.toml").write_text(NIGHT)
    write_site(folder / "site.toml", workspace=folder / "workspace", environments=environments_dir)
    return nightly_regression(folder / "grids.toml", night="n1", system=str(folder / "site.toml"))


def verdict_of(night: NightReport, test_id: str) -> Verdict:
    (found,) = (verdict for verdict in night.verdicts if verdict.test_id == test_id)
    return found


def record_of(folder: Path, verdict: Verdict) -> RunRecord:
    manifest = folder / "workspace/store" / verdict.prefix / "manifest.json"
    return RunRecord.model_validate(json.loads(manifest.read_text())["record"])


def test_a_test_of_two_grids_goes_through_every_stage(folder: Path, night: NightReport) -> None:
    recipe = verdict_of(night, "recipe")
    record = record_of(folder, recipe)

    assert (recipe.status, recipe.reasons) == (
        VerdictStatus.NO_BASELINE,
        ("no earlier good run of this configuration to compare with",),
    )
    assert (record.job.outcome, record.plan.nodes, record.tainted) == (Outcome.SUCCEEDED, 2, ())
    assert (record.summary.steps_done, record.summary.source, record.summary.damage) == (STEPS, "tensorboard", ())
    for value in (record.summary.step_time, record.summary.peak_memory, record.summary.final_loss):
        assert value is not None


def test_what_is_stored_is_whole(folder: Path, night: NightReport) -> None:
    record = record_of(folder, verdict_of(night, "recipe"))
    run = folder / "workspace/store" / record.prefix

    table, damage = scalars(run / "tensorboard")

    assert not damage
    assert {"lm loss", "learning-rate", "grad-norm", "iteration-time-ms", "seq_load_balancing_loss"} <= set(
        table["tag"]
    )
    assert [found.iteration for found in find_checkpoints(run / "checkpoints")] == [STEPS]
    assert [found.state for found in find_checkpoints(run / "checkpoints")] == ["complete"]
    assert any((run / "logs").glob("log-hetero_*.out"))


def test_the_run_that_names_a_reference_follows_it(folder: Path, night: NightReport) -> None:
    recipe, vlm = verdict_of(night, "recipe"), verdict_of(night, "vlm")

    assert vlm.status is VerdictStatus.PASSED
    assert record_of(folder, vlm).summary.loss_digest != record_of(folder, recipe).summary.loss_digest
