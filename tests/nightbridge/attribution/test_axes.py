"""What differs between two runs, and the run that has each difference at either level."""

from pathlib import Path
from typing import Any

import pytest

from nightbridge.attribution.axes import (
    MAX_NODE_FACTORS,
    Factor,
    base_of_descent,
    exchanged_run,
    exchanged_site,
    find_factors,
    nodes_at,
    not_exchanged,
    weights_of,
)
from nightbridge.launch.resources import variables_given
from nightbridge.models import ClusterSettings, GitRepo, RunRecord, Site
from tests.builders import BRIDGE_URL, make_record

GOOD, BAD = "a" * 40, "e" * 40
SUBMODULE = "3rdparty/Megatron-LM"


def record(*, nodes: str = "node[1-2]", argv: tuple[str, ...] = (), **fields: Any) -> RunRecord:
    """A harvested run; further fields are those of `make_record`."""
    made = make_record(**fields)
    status = made.job.status.model_copy(update={"nodes": nodes}) if made.job.status else None
    jobs = (made.job.model_copy(update={"status": status}),)
    plan = made.plan.model_copy(update={"argv": ("python", *argv)})
    return made.model_copy(update={"jobs": jobs, "plan": plan})


def with_submodule(made: RunRecord, commit: str) -> RunRecord:
    bridge = made.checkout.megatron_bridge.model_copy(update={"submodules": {SUBMODULE: commit}})
    return made.model_copy(update={"checkout": made.checkout.model_copy(update={"megatron_bridge": bridge})})


def factors_of(good: RunRecord, bad: RunRecord) -> list[tuple[str, str, Any, Any]]:
    return [(each.axis, each.key, each.good, each.bad) for each in find_factors(good, bad, same_nodes=False)]


def levels(good: dict[str, Any], bad: dict[str, Any]) -> tuple[RunRecord, RunRecord, tuple[Factor, ...]]:
    """Two runs of different tests, and what differs between them."""
    before, after = record(**good), record(night="2026-11-11", **bad)
    return before, after, find_factors(before, after, same_nodes=False)


# --- what differs ----------------------------------------------------------------------------------------------------


def test_two_runs_that_are_alike_have_no_factor() -> None:
    assert factors_of(record(), record(night="2026-11-11")) == []


def test_an_image_is_known_by_its_digest() -> None:
    before = record()
    after = before.model_copy(update={"image": before.image.model_copy(update={"digest": "sha256:" + "e" * 64})})

    (factor,) = find_factors(before, after, same_nodes=False)

    assert (factor.axis, factor.name) == ("image", "image")
    assert (factor.good[-3:], factor.bad[-3:]) == ("ddd", "eee")
    assert "@sha256:" in factor.bad


def test_a_bump_is_two_factors_the_commit_and_its_submodule() -> None:
    repos = (GitRepo(url=BRIDGE_URL, init_submodules=True),)
    before = with_submodule(record(git_repos=repos, commit=GOOD), "1" * 40)
    after = with_submodule(record(git_repos=repos, commit=BAD), "2" * 40)

    assert factors_of(before, after) == [
        ("megatron_bridge", "megatron_bridge", GOOD, BAD),
        ("submodule", f"megatron_bridge/{SUBMODULE}", "1" * 40, "2" * 40),
    ]


def test_a_submodule_that_is_not_checked_out_is_no_factor() -> None:
    before, after = with_submodule(record(), "1" * 40), with_submodule(record(commit=BAD), "2" * 40)

    assert [axis for axis, *_ in factors_of(before, after)] == ["megatron_bridge"]


def test_keys_of_both_tables_and_options_of_sbatch_are_factors_each() -> None:
    before, after, factors = levels(
        {"cmd_args": {"mbs": 1, "gbs": 8}, "extra_cmd_args": {"+a.b": "1"}, "sbatch_args": ("--qos=low",)},
        {"cmd_args": {"mbs": 2, "gbs": 8, "cp": 2}, "extra_cmd_args": {"a.b": "2"}, "sbatch_args": ("--exclusive",)},
    )

    assert factors_of(before, after) == [
        ("configuration", "cmd_args.cp", None, 2),
        ("configuration", "cmd_args.mbs", 1, 2),
        ("configuration", "extra_cmd_args.a.b", "1", "2"),
        ("configuration", "sbatch.exclusive", None, "--exclusive"),
        ("configuration", "sbatch.qos", "--qos=low", None),
    ]
    assert weights_of(factors) == (0.2,) * 5


def test_variables_of_the_test_and_of_the_site_are_factors() -> None:
    before = record(argv=("-E", "NCCL_ALGO=Ring", "-cb", "export A=1,2"), extra_env_vars={"X": "1"})
    after = record(argv=("-E", "NCCL_ALGO=Tree"), extra_env_vars={"X": "1", "HF_HOME": "/cache"})

    assert variables_given(before) == {"NCCL_ALGO": "Ring", "A": "1,2", "X": "1"}
    assert factors_of(before, after) == [
        ("environment", "A", "1,2", None),
        ("environment", "NCCL_ALGO", "Ring", "Tree"),
    ]


def test_a_value_that_only_carries_the_run_s_own_name_is_no_factor() -> None:
    before, after = record(), record(night="2026-11-11")
    named = [
        each.model_copy(update={"plan": each.plan.model_copy(update={"argv": ("-E", f"OUT=/o/{each.spec.run_key}")})})
        for each in (before, after)
    ]

    assert factors_of(*named) == []


def test_nodes_are_exchanged_one_for_one() -> None:
    before, after = record(nodes="node[1-4]"), record(nodes="node[3-6]")
    factors = find_factors(before, after, same_nodes=False)

    assert [(each.good, each.bad) for each in factors] == [(["node1"], ["node5"]), (["node2"], ["node6"])]
    assert nodes_at(factors, (True, False), after) == "node3,node4,node5,node2"
    assert nodes_at(factors, (False, False), after) == "node3,node4,node1,node2"


def test_many_nodes_are_exchanged_in_groups() -> None:
    before, after = record(nodes="node[1-100]"), record(nodes="node[101-200]")

    factors = find_factors(before, after, same_nodes=False)

    assert len(factors) == MAX_NODE_FACTORS
    assert sum(len(each.bad) for each in factors) == 100


@pytest.mark.parametrize("nodes", ["node[3-5]", "node[1-2]"])
def test_nodes_of_another_number_and_the_same_nodes_are_no_factor(nodes: str) -> None:
    assert factors_of(record(nodes="node[1-2]"), record(nodes=nodes)) == []


def test_where_pairs_have_shown_that_it_is_not_the_nodes_they_are_not_exchanged() -> None:
    assert find_factors(record(nodes="node1"), record(nodes="node2"), same_nodes=True) == ()
    assert nodes_at((), (), record()) == ""


def test_what_cannot_be_exchanged_is_said() -> None:
    before, after = (record().model_copy(update={"facts": {"driver": driver}}) for driver in ("550", "560"))

    assert not_exchanged(before, after, ()) == ("driver 550 → 560",)


def test_what_is_not_exchanged_of_how_a_run_was_started_is_said() -> None:
    before = record(argv=("-p", "fast", "-cm", "/data:/data"))
    repos = (GitRepo(url=BRIDGE_URL, init_submodules=True),)
    after = record(argv=("-p", "slow", "-cm", "/data:/data,/lib:/lib"), git_repos=repos, sbatch_args=("--comment=x",))
    options = ("--comment=x", "--exclude=node3", "--cpu-freq=low")
    after = after.model_copy(update={"plan": after.plan.model_copy(update={"sbatch_args": options})})

    assert not_exchanged(before, after, ()) == (
        "init_submodules False → True",
        "mounts /data:/data → /data:/data,/lib:/lib",
        "partition fast → slow",
        "the site's options of sbatch none → --cpu-freq=low",
    )


def test_where_each_run_only_has_its_own_folder_and_checkout_mounted_nothing_changed() -> None:
    nights = [record(night=f"2026-11-{day}", commit=commit) for day, commit in ((20, GOOD), (21, BAD))]
    mounted = [(made, f"{made.plan.attempt_dir}/x:/x,{made.checkout.megatron_bridge.path}:/opt/x") for made in nights]
    before, after = (
        made.model_copy(update={"plan": made.plan.model_copy(update={"argv": ("python", "-cm", mounts)})})
        for made, mounts in mounted
    )

    assert not_exchanged(before, after, ()) == ()


# --- the run of a design ---------------------------------------------------------------------------------------------


def test_a_run_has_each_factor_at_the_level_that_its_design_says() -> None:
    _good, bad, factors = levels(
        {"commit": GOOD, "cmd_args": {"mbs": 1}, "extra_env_vars": {"X": "1"}, "sbatch_args": ("--qos=low",)},
        {"commit": BAD, "cmd_args": {"mbs": 2}, "sbatch_args": ("--comment=y",)},
    )
    names = [factor.name for factor in factors]
    assert names == ["Megatron-Bridge", "cmd_args.mbs", "sbatch.comment", "sbatch.qos", "$X"]

    everything_good = exchanged_run(bad, factors, (False,) * 5).test
    everything_bad = exchanged_run(bad, factors, (True,) * 5).test
    one_good = exchanged_run(bad, factors, (False, True, True, True, True)).test

    assert everything_good.megatron_bridge.commit == GOOD
    assert (everything_good.cmd_args["mbs"], everything_good.extra_env_vars) == (1, {"X": "1"})
    assert everything_good.sbatch_args == ("--qos=low",)
    assert everything_bad.megatron_bridge.commit == BAD
    assert (everything_bad.cmd_args["mbs"], everything_bad.extra_env_vars) == (2, {})
    assert everything_bad.sbatch_args == ("--comment=y",)
    assert (one_good.megatron_bridge.commit, one_good.cmd_args["mbs"]) == (GOOD, 2)


def test_an_override_is_replaced_however_it_is_written() -> None:
    _good, bad, factors = levels({"extra_cmd_args": {"+a.b": "1"}}, {"extra_cmd_args": {"++a.b": "2"}})

    assert exchanged_run(bad, factors, (False,)).test.extra_cmd_args == {"++a.b": "1"}
    assert exchanged_run(bad, factors, (True,)).test.extra_cmd_args == {"++a.b": "2"}


def test_the_site_s_own_variables_do_not_come_back_by_the_site(tmp_path: Path) -> None:
    site = Site(workspace=tmp_path, cluster=ClusterSettings(env_vars={"NCCL_ALGO": "Tree", "KEPT": "1"}))
    factors = find_factors(record(), record(argv=("-E", "NCCL_ALGO=Tree")), same_nodes=False)

    assert exchanged_site(site, factors).cluster.env_vars == {"KEPT": "1"}


def test_variables_of_the_site_are_factors_of_a_run_without_a_launcher_as_well() -> None:
    def exporting(*lines: str) -> RunRecord:
        made = record()
        script = "\n".join(
            ("#!/bin/bash", *(f"export {line}" for line in lines), "srun --label program", "export LATER=1")
        )
        return made.model_copy(update={"plan": made.plan.model_copy(update={"batch_script": script})})

    before = exporting("PYTHONPATH=/checkouts/a", "NCCL_ALGO='Ring, Tree'", 'CACHE="$HOME/cache"')
    after = exporting("PYTHONPATH=/checkouts/b", "NCCL_ALGO=Tree", 'CACHE="$HOME/cache"')

    assert variables_given(before) == {"NCCL_ALGO": "Ring, Tree", "CACHE": "$HOME/cache"}
    assert factors_of(before, after) == [("environment", "NCCL_ALGO", "Ring, Tree", "Tree")]


def test_a_search_inside_a_factor_has_the_variables_of_the_bad_run_s_site() -> None:
    before, after = record(argv=("-E", "NCCL_ALGO=Ring", "-E", "GONE=1")), record(argv=("-E", "NCCL_ALGO=Tree"))
    factors = find_factors(before, after, same_nodes=False)

    base = base_of_descent(after, factors, ())

    assert base.spec.test.extra_env_vars == {"NCCL_ALGO": "Tree"}
    assert base.spec.run_key == after.spec.run_key


def test_a_search_inside_a_factor_has_the_bad_run_s_nodes_where_they_have_a_part_in_it() -> None:
    before = record(nodes="node[1,3]", commit=GOOD)
    after = record(nodes="node[1-2]", commit=BAD, sbatch_args=("--exclude=node3", "--comment=x"))
    factors = find_factors(before, after, same_nodes=False)
    commit = [factor for factor in factors if factor.is_commit]

    assert base_of_descent(after, factors, commit).spec == after.spec
    assert base_of_descent(after, factors, factors).spec.test.sbatch_args == ("--comment=x", "--nodelist=node1,node2")
