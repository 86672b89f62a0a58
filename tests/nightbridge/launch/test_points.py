"""A sweep over nodes: as many GPUs as the cluster's nodes have, for the rules and for the plan alike."""

from pathlib import Path

import pytest

from nightbridge.config.scenarios import load, runs, sweeps_nodes
from nightbridge.launch.launch_plan import placeholder_plan
from nightbridge.launch.resources import num_gpus
from nightbridge.models import ClusterLimits, ClusterSettings, Scenario, Site
from nightbridge.rules import check_scenario

SWEEP = """
num_nodes = [1, 2, 4]

name = "nodes"
test_template_name = "MegatronBridge"

[cmd_args]
gpu_type = "h100"
container_image = "nvcr.io#nvidia/nemo:26.08"
model_family_name = "llama"
model_recipe_name = "llama3_8b"
compute_dtype = "bf16"
tp = 8
gb = 8
mb = 1

[[git_repos]]
url = "https://github.com/NVIDIA-NeMo/Megatron-Bridge.git"
commit = "v0.6.0"

[nemo_run_repo]
url = "https://github.com/NVIDIA-NeMo/Run.git"
commit = "main"
"""

CONFIGURED = ClusterLimits(configured_gpus_per_node=4, has_pyxis=True)
REPORTED = ClusterLimits(gpus_per_node=4, has_pyxis=True)


@pytest.fixture
def scenario(tmp_path: Path) -> Scenario:
    (tmp_path / "nodes.toml").write_text(SWEEP)
    return load(tmp_path / "nodes.toml")


@pytest.mark.parametrize("limits", [CONFIGURED, REPORTED], ids=["configured", "reported"])
def test_a_point_has_the_gpus_of_the_clusters_nodes_and_is_planned_on_as_many_nodes(
    scenario: Scenario, limits: ClusterLimits
) -> None:
    site = Site(cluster=ClusterSettings(gpus_per_node=limits.configured_gpus_per_node))

    made = runs(check_scenario(scenario, limits), "n1", limits)

    # One node of four GPUs cannot hold eight tensor-parallel ranks: that point breaks a rule.
    assert [(run.sweep_point["num_nodes"], num_gpus(run.test)) for run in made] == [(2, 8), (4, 16)]
    assert [placeholder_plan(run, site, limits).nodes for run in made] == [2, 4]


def test_without_a_cluster_they_are_those_of_the_gpu_type(scenario: Scenario) -> None:
    made = runs(scenario, "n1")

    assert [(run.sweep_point["num_nodes"], num_gpus(run.test)) for run in made] == [(1, 8), (2, 16), (4, 32)]


def test_a_run_keeps_its_name_whatever_the_cluster(scenario: Scenario) -> None:
    anywhere = {run.sweep_point["num_nodes"]: run.run_key for run in runs(scenario, "n1")}

    for run in runs(scenario, "n1", CONFIGURED):
        assert anywhere.get(run.sweep_point["num_nodes"], run.run_key) == run.run_key


def test_the_cluster_is_asked_only_where_nodes_are_swept_over(scenario: Scenario) -> None:
    fixed = scenario.model_copy(
        update={"tests": tuple(test.model_copy(update={"axes": ()}) for test in scenario.tests)}
    )

    assert sweeps_nodes(scenario)
    assert not sweeps_nodes(fixed)
