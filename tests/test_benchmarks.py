"""Every benchmark, once and in a small form: they run on the code of today, and print what their page promises."""

import gzip
import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import error_rate, polling, practice_month, reader, restore, upload
from examples.practice.repositories import add_submodule, bump_submodule, commit_many, make_practice_repositories
from nightbridge.cli.main import run as nightbridge
from tests.real.prefect_server import PrefectServer
from tests.real.s3_servers import S3Server
from tests.real.slurm_daemons import SlurmDaemons

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).parents[1]

CHANGE = "--changes=step +3 %"

SMALL = {
    "attribution.py": (
        ["--noise", "NOISE", "--causes", "8", "--processes", "1"],
        r"1 cause\(s\): right (87.5|100.0)%(?s:.*)bump 0",
    ),
    "bisect_searches.py": (["10"], r"hang +right (90|100).0%"),
    "clone.py": (["--scale", "0.01", "--repeats", "1"], "ratio .* x"),
    "detection.py": (["--series", "1", "--steps", "1", "--kinds", "gaussian", "--processes", "1"], "FA/year"),
    "error_rate.py": (
        ["--series", "1", "--steps", "1", "--nights", "70", "--kinds", "gaussian", "--processes", "1", CHANGE],
        "alarms/year 0.000",
    ),
    "event_files.py": (["--events", "2000", "--repeats", "1"], r"nightbridge .* M events/s"),
    "masking.py": (["1"], r"log: \d+ MB/s; weights: \d+ MB/s"),
    "containers.py": (["DUMP", "--count", "3"], r"moved +nightbridge refuses \d of 3\n(?s:.*)switches +nightbridge"),
    "overrides.py": (["DUMP", "4", "1"], "same answer as Hydra for 4 of 4\n"),
    "parity.py": (["--pairs", "5"], "5 synthetic pairs"),
    "reader.py": (["1", "1", "2000", "1", "1"], r"for each run\n(?s:.*)6 MiB of shards: .* s in children"),
    "reading_commands.py": (["8", "2", "1"], r"history .* s of processor time"),
    "report_page.py": (
        ["3", "6", "3", "4"],
        r"report, 3 tests: .*; 3 tests on it\nindex, 3 tests x 4 nights: .* s of processor time, .*; 3 tests on it",
    ),
    "startup.py": (["1"], "nightbridge validate .* s"),
    "submitting.py": (["1"], r"forked: 1 submissions in .*\n.*\nratio of processor time [1-9]"),
    "sweep.py": (["--values", "2"], "ratio|one configuration after the other"),
    "distribution.py": (["--noise", "NOISE"], "narrowest band"),
    "upload.py": (["--repeats", "0", "--sparse-gb", "0.03"], "one sparse file of 0.03 GB"),
    "verdict.py": (["--tests", "2", "--nights", "150", "--processes", "1"], "verdicts: .* s"),
}
"""Arguments, and what is printed then. Those that need a real part have a test of their own below."""

IN_TESTS_OF_THEIR_OWN = {
    "checkpoint_damage.py",
    "lineage.py",
    "night_scale.py",
    "polling.py",
    "practice_month.py",
    "restore.py",
}
PROGRAM_OF_ANOTHER = {"discarding_server.py"}


def printed_by(name: str, *arguments: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, f"benchmarks/{name}", *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def noise(tmp_path: Path) -> Path:
    """Seconds per step of runs of one test."""
    dice = random.Random(1)
    runs = [{"path": "test", "t": t, "it": [0.2 * dice.uniform(0.99, 1.01) for _ in range(50)]} for t in range(10)]
    path = tmp_path / "noise.json.gz"
    path.write_bytes(gzip.compress(json.dumps(runs).encode()))
    return path


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    """A part of the ConfigContainer that a run writes."""
    path = tmp_path / "ConfigContainer.yaml"
    path.write_text(
        "train: {_target_: c.T, train_iters: 50, global_batch_size: 128, micro_batch_size: 1, manual_gc: true}\n"
        "model: {_target_: c.M, transformer: {_target_: c.C, num_layers: 32, bf16: true, sequence_parallel: false}}\n"
        "ddp: {_target_: c.D, overlap_grad_reduce: true, overlap_param_gather: false}\n"
        "optimizer: {lr: 0.0003, clip_grad: 1.0, use_distributed_optimizer: true}\n"
        "checkpoint: {ckpt_format: torch_dist, save_interval: 50}\n"
    )
    return path


@pytest.mark.parametrize("name", SMALL)
def test_a_benchmark_runs(name: str, noise: Path, dump: Path) -> None:
    arguments, expected = SMALL[name]
    inputs = {"NOISE": str(noise), "DUMP": str(dump)}

    printed = printed_by(name, *(inputs.get(word, word) for word in arguments))

    assert re.search(expected, printed)


def test_the_last_counts_of_the_reader_s_benchmark_may_be_left_out() -> None:
    assert reader.counts_of(["5", "7"]) == [5, 7, 1_000_000, 64, 3]


def test_every_benchmark_is_run_here() -> None:
    scripts = {path.name for path in (ROOT / "benchmarks").glob("*.py")}

    assert scripts == set(SMALL) | IN_TESTS_OF_THEIR_OWN | PROGRAM_OF_ANOTHER


def test_uploads_are_compared_and_a_run_is_harvested_twice(
    ministack: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(upload, "SETTLE", 0.0)
    ministack.make_bucket(upload.BUCKET)
    files = upload.make_files(tmp_path / "large", 2, 1000)

    upload.compare(ministack, files, upload.clients(None), 1)
    upload.harvest_twice(ministack, files)

    printed = capfd.readouterr().out
    assert re.search(r"nightbridge +[\d.]+ s .* x boto3 upload_file", printed)
    assert "second" in printed


def test_restores_are_measured_also_through_cuts_and_many_times(
    ministack: S3Server, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    ministack.make_bucket(upload.BUCKET)
    for prefix in ("large", "cut"):
        restore.store(ministack, upload.make_files(tmp_path / prefix, 3, 1000), prefix)

    restore.compare(ministack, tmp_path / "back", "large", 3, 1000, None, 1)
    restore.through_cuts(ministack, tmp_path / "back", 1)
    restore.store_and_fetch(ministack, tmp_path, 1)

    printed = capfd.readouterr().out
    assert re.search(r"nightbridge +[\d.]+ s .* x nightbridge", printed)
    assert re.search(r"every third body cut: [\d.]+ s", printed)
    assert "1 uploads and restores, 50 in a process: 0 processes failed" in printed


def test_queries_to_slurm_are_counted(
    slurm_cluster: SlurmDaemons, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    polling.measure(slurm_cluster, tmp_path, 2, 2.0, "debug")

    assert re.search(r"ratio \d+", capsys.readouterr().out)


def test_a_bare_flow_is_measured(prefect_server: PrefectServer) -> None:
    printed = printed_by("night_scale.py", "1", "--measure", "bare", **prefect_server.environment)

    assert json.loads(printed.splitlines()[-1])["verdicts"] == 1


def test_the_practice_month_has_a_valid_site_and_test(tmp_path: Path) -> None:
    site, test = practice_month._files(tmp_path, f"file://{tmp_path}/practice/Megatron-Bridge.git")

    assert nightbridge(["validate", str(test), "--system", str(site)]) == 0


def test_the_commits_inside_of_bumps_are_counted(tmp_path: Path) -> None:
    repositories = make_practice_repositories(tmp_path / "practice")
    good = add_submodule(repositories)
    core = commit_many(repositories, ["One", "Two"], {}, workload="megatron_lm")
    bad = bump_submodule(repositories, "Bump", core[-1])

    printed = printed_by(
        "lineage.py", good, bad, "--url", repositories.bridge_url, "--workspace", str(tmp_path / "workspace")
    )

    assert "1 commits, 1 bumps, 0 to another branch" in printed
    assert "{'inner': 2}" in printed


@pytest.mark.parametrize(
    ("distance", "share", "width", "least", "most"),
    [
        (0.10, 0.2, 0.01, error_rate.TWO_SPEEDS, 1.0),
        (0.03, 0.2, 0.01, 0.0, error_rate.ONE_SPEED),  # such a slow mode is a shoulder
        (0.10, 0.03, 0.01, 0.0, error_rate.ONE_SPEED),  # as rare as bad nodes
        (0.0, 0.2, 0.02, 0.0, error_rate.ONE_SPEED),
        (0.0, 0.2, 0.0001, 0.0, error_rate.ONE_SPEED),
    ],
)
def test_a_series_has_two_speeds_where_its_runs_have_a_valley_between(
    distance: float, share: float, width: float, least: float, most: float
) -> None:
    rng = np.random.default_rng(3)
    runs = 1 + width * rng.standard_normal(error_rate.MANY_RUNS) + distance * (rng.random(error_rate.MANY_RUNS) < share)

    assert least <= error_rate.valley_of(runs) <= most


def test_one_speed_of_skewed_runs_has_no_valley() -> None:
    runs = 1 + 0.03 * np.random.default_rng(4).standard_exponential(error_rate.MANY_RUNS)

    assert error_rate.valley_of(runs) <= error_rate.ONE_SPEED
