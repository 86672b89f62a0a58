"""Nights on the embedded cluster that slow down for different reasons: the cluster, a node, and a commit."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from examples.practice.repositories import commit_behaviour, make_practice_repositories
from nightbridge.embedded.jobs import all_jobs
from nightbridge.flows import nightly_regression
from nightbridge.history.reading import find_series, read_history
from nightbridge.history.rows import HistoryRow
from nightbridge.models import StoreSettings, Verdict, VerdictStatus
from nightbridge.store.directory import DirectoryStore
from tests.flows.practice_night import Entry, write_scenario, write_site

pytestmark = [pytest.mark.launcher, pytest.mark.usefixtures("flows_here")]

FEW_STEPS = {"max_steps": 14, "save_interval": 14}


class Nights:
    """The verdicts of the nights, and what the history has of them."""

    def __init__(self, folder: Path, environments: Path) -> None:
        self.folder, self.repositories = folder, make_practice_repositories(folder / "practice")
        self.cluster = folder / "cluster.json"
        self.scenario = write_scenario(folder / "conf", self.repositories, "one", Entry(id="t", cmd_args=FEW_STEPS))
        sample = self.scenario.parent / "llama_small.toml"
        sample.write_text(sample.read_text().replace("[harvest]", '[harvest]\ncheckpoint = "none"'))
        self.site = write_site(folder / "site.toml", workspace=folder / "workspace", environments=environments)
        self.site.write_text(f'{self.site.read_text()}\n[cluster.env_vars]\nPRACTICE_CLUSTER = "{self.cluster}"\n')
        self.verdicts: dict[str, Verdict] = {}

    def run(self, night: str, **cluster: Any) -> None:
        self.cluster.write_text(json.dumps(cluster))
        (self.verdicts[night],) = nightly_regression(self.scenario, night=night, system=str(self.site)).verdicts

    def rows(self, night: str) -> list[HistoryRow]:
        store = DirectoryStore(StoreSettings(url=f"file://{self.folder}/workspace/store"))
        (series,) = find_series(store, "t", "local")
        return [row for row in read_history(store, "local", series.series) if row.night == night]


@pytest.fixture(scope="module")
def nights(tmp_path_factory: pytest.TempPathFactory, environments_dir: Path, flows_here: None) -> Nights:
    nights = Nights(tmp_path_factory.mktemp("control"), environments_dir)
    sample = nights.scenario.parent / "llama_small.toml"
    text = sample.read_text()
    nights.run("n1")
    sample.write_text(text.replace("\n[cmd_args]", '\nexclude_nodes = ["node1"]\n[cmd_args]', 1))
    nights.run("n2")
    sample.write_text(text)
    nights.run("n3", factor=1.1)
    nights.run("n4", factor=1.1)
    nights.run("n5", factor=1.1, slow_nodes={"node1": 1.2})
    commit_behaviour(nights.repositories, "Synchronise after every bucket", step_time_factor=1.1)
    nights.run("n6", factor=1.1)
    return nights


def test_a_cluster_that_slows_down_is_no_regression_and_the_next_night_needs_no_proof(nights: Nights) -> None:
    moved, after = nights.verdicts["n3"], nights.verdicts["n4"]

    assert (moved.status, moved.exit_code) == (VerdictStatus.INSUFFICIENT_DATA, 0)
    assert any("too: the cluster, no regression (1 pair)" in reason for reason in moved.reasons)
    assert moved.moved["step_time"] == pytest.approx(1.1, rel=0.02)
    assert (after.status, len(nights.rows("n4"))) == (VerdictStatus.INSUFFICIENT_DATA, 1)


def test_a_node_that_is_slow_with_either_code_is_named(nights: Nights) -> None:
    verdict = nights.verdicts["n5"]

    assert verdict.status is VerdictStatus.INSUFFICIENT_DATA
    assert verdict.control is not None
    assert verdict.control.slow_nodes == ("node1",)
    assert [row.nodes for row in nights.rows("n5")] == ["node1", "node2", "node2", "node1", "node1"]


def test_a_slower_commit_is_proven_beside_the_last_good_point_on_the_same_nodes(nights: Nights) -> None:
    verdict = nights.verdicts["n6"]
    _own, *arms = nights.rows("n6")

    assert verdict.status is VerdictStatus.REGRESSED
    assert any(
        "step time regressed by +" in reason and "beside the last good point" in reason for reason in verdict.reasons
    )
    assert verdict.metric("step_time").change == pytest.approx(0.1, abs=0.03)  # type: ignore[union-attr]
    assert [row.arm.role for row in arms if row.arm][:2] == ["new", "control"]
    assert {row.nodes for row in arms[:2]} == {"node2"}
    pairs = [{row.nodes for row in arms if row.arm and row.arm.pair == pair} for pair in range(1, len(arms) // 2 + 1)]
    assert all(len(nodes) == 1 for nodes in pairs)
    assert len({row.megatron_bridge.commit for row in arms}) == 2


def test_each_arm_is_a_job_of_its_own(nights: Nights) -> None:
    jobs = [job.request.name for job in all_jobs(nights.folder / "workspace" / "cluster")]
    rows = [row for night in nights.verdicts for row in nights.rows(night)]

    assert sorted(jobs) == sorted(f"{row.run_key}-a1" for row in rows)


@pytest.mark.skipif("NIGHTBRIDGE_EVERY_STAGE" not in os.environ, reason="a month of nights, minutes; in make soak")
@pytest.mark.timeout(3600)
def test_a_test_whose_runs_fall_into_two_speeds_is_unstable_and_nobody_is_blamed(
    tmp_path: Path, environments_dir: Path
) -> None:
    nights = Nights(tmp_path, environments_dir)
    names = [f"2026-11-{day:02}" for day in range(1, 31)] + ["2026-12-01", "2026-12-02"]
    for night in names:
        nights.run(night, slow_mode=(0.4, 1.12))

    ended = [nights.verdicts[night] for night in names[-3:]]
    assert {verdict.status for verdict in ended} == {VerdictStatus.UNSTABLE}
    assert all("in the slow mode" in verdict.reasons[0] for verdict in ended)
    assert VerdictStatus.REGRESSED not in {verdict.status for verdict in nights.verdicts.values()}
