"""The declaration of metrics, and the recipe "Add a metric" of CONTRIBUTING.md, done on a copy of the package."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from nightbridge.models import GatePolicy, Summary
from nightbridge.models.metrics import COLUMNS, METRIC_BY_NAME, METRICS, Metric

ROOT = Path(__file__).parents[3]

ROW = """    Metric(
        "energy_per_token",
        label="energy per token",
        unit="J",
        band=0.05,
        tag="energy/token",
        log=(LogPattern("energy per token", rf"energy per token: {NUMBER} J"),),
        reduce="median",
    ),
)

METRICS ="""

RECIPE = {
    "metrics.py": (")\n\nMETRICS =", ROW),
    "stages.py": (
        "    step_time: float | None = Field(",
        "    energy_per_token: float | None = None\n    step_time: float | None = Field(",
    ),
    "scenario.py": (
        '    step_time: float = _band("step_time")',
        '    energy_per_token: float = _band("energy_per_token")\n    step_time: float = _band("step_time")',
    ),
}
"""By module of `nightbridge/models/`, what the recipe replaces, and by what."""

NIGHTS = """
import json, sys
from pathlib import Path
from nightbridge.gate.trend import trends
from nightbridge.gate.run_verdict import compare
from nightbridge.history.rows import row_of
from nightbridge.models import GatePolicy
from nightbridge.outputs.curves import read_curves
from nightbridge.outputs.measurements import RunSettings, summarise
from nightbridge.report.night_page import ReportedRun
from nightbridge.report.night_report import render_report
from tests.builders import make_record

STEP = (
    "Step Time : 1.00s GPU utilization: 700.0MODEL_TFLOP/s/GPU\\n iteration {step}/50 |"
    " elapsed time per iteration (ms): 1000.0 | lm loss: {loss} | number of skipped iterations: 0 |"
    " number of nan iterations: 0 |\\nmem-max-allocated-gigabytes: 80.0\\nenergy per token: {energy} J\\n"
)
log, rows = Path("log.out"), []
for day, energy in enumerate([1.0, 1.0, 1.0, 1.2], 1):
    log.write_text("".join(STEP.format(step=step, energy=energy, loss=2 + 1 / step) for step in range(1, 51)))
    summary = summarise(read_curves((), (log,)), GatePolicy(), 50, RunSettings(), None)
    record = make_record(summary, f"2026-11-0{day}", gate=GatePolicy(confirm=0, energy_per_token=0.1))
    verdict = compare(record, rows)
    rows.append(row_of(record, verdict))
print(json.dumps({
    "measured": summary.energy_per_token,
    "status": verdict.status,
    "reasons": verdict.reasons,
    "page": render_report("2026-11-04", "nightly", [ReportedRun(verdict, rows)]),
    "trend": [trend.values for trend in trends(rows) if trend.metric == "energy_per_token"],
}))
"""


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_every_metric_has_its_stored_field_and_its_band(metric: Metric) -> None:
    assert metric.field in Summary.model_fields
    assert metric.threshold(GatePolicy()) == metric.band


def test_every_run_must_have_what_the_tables_show() -> None:
    assert [metric.name for metric in COLUMNS] == ["step_time", "tflops_per_gpu", "peak_memory", "final_loss"]
    assert all(metric.always for metric in COLUMNS)


def test_a_policy_names_declared_metrics_only() -> None:
    assert GatePolicy(required=tuple(METRIC_BY_NAME)).required == tuple(METRIC_BY_NAME)
    with pytest.raises(ValidationError, match="'step_time', 'tflops_per_gpu'"):
        GatePolicy(required=("speed",))


def test_a_metric_that_one_row_adds_is_measured_gated_and_shown(tmp_path: Path) -> None:
    # With what is compiled, except for what is being written.
    shutil.copytree(ROOT / "nightbridge", tmp_path / "nightbridge", ignore=shutil.ignore_patterns("*.pyc.*"))
    for name, (before, after) in RECIPE.items():
        module = tmp_path / "nightbridge" / "models" / name
        text = module.read_text()
        assert text.count(before) == 1
        module.write_text(text.replace(before, after))

    done = subprocess.run(
        [sys.executable, "-c", NIGHTS],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["measured"], result["status"]) == (1.2, "regressed")
    assert result["reasons"][0].startswith("energy per token regressed by +20.0 %: 1.200 J against 1.000 J")
    assert "energy per token +20.0 %" in result["page"]
    assert result["trend"] == [[1.0, 1.0, 1.0, 1.2]]
