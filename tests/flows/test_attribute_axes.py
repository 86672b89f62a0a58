"""`nightbridge attribute` end to end, a planted cause on each axis that `test_attribute` has not: for `make soak`."""

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from examples.practice.git_writer import git
from examples.practice.repositories import (
    SUBMODULE,
    PracticeRepositories,
    add_submodule,
    commit_many,
    commit_nemo_run,
)
from nightbridge.attribution.attribution_result import AttributionResult, sentence
from tests.flows.attributed_practice import SLOW, TEST, Practice
from tests.flows.practice_night import NIGHTBRIDGE
from tests.real.prefect_server import PrefectServer
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.launcher,
    pytest.mark.usefixtures("flows_here"),
    pytest.mark.skipif("NIGHTBRIDGE_EVERY_STAGE" not in os.environ, reason="minutes for each axis; in make soak"),
]


@pytest.fixture
def practice(tmp_path: Path, environments_dir: Path) -> Practice:
    return Practice(tmp_path, environments_dir)


def test_a_commit_of_nemo_run(practice: Practice) -> None:
    slow = practice.folder / "slow.json"
    slow.write_text(json.dumps({"factor": 1.1}))
    practice.run("n1", 1.0)
    commit_many(practice.repositories, ["Tidy"], {})
    messages = ["Tidy NeMo-Run", "Give jobs a default", "Document"]
    commits = commit_nemo_run(practice.repositories, messages, {1: {"PRACTICE_CLUSTER": str(slow)}})
    practice.run("n2", 1.0)
    result = practice.attribute(good="n1", bad="n2", metric="step_time")

    assert result.plan.axes == ("megatron_bridge", "nemo_run", "environment")
    assert sentence(result).startswith(f'NeMo-Run {commits[1][:12]} "Give jobs a default", 9')
    assert said_innocent(result) == "not Megatron-Bridge, not the environment"


def test_a_key_of_the_configuration(practice: Practice) -> None:
    plain = practice.sample
    practice.sample = plain.replace("[cmd_args]", "[cmd_args]\ngb = 128\nseq_length = 1024")
    practice.run("n1", 1.0)
    commit_many(practice.repositories, ["Tidy"], {})
    practice.sample = plain.replace("[cmd_args]", "[cmd_args]\ngb = 128\nseq_length = 1126")
    practice.run("n2", 1.0)
    result = practice.attribute(good="n1", bad="n2", metric="step_time")

    assert result.plan.axes == ("megatron_bridge", "configuration", "environment")
    assert sentence(result).startswith("cmd_args.seq_length (1024 → 1126), 9")
    assert said_innocent(result) == "not Megatron-Bridge, not the environment"


def test_a_node(practice: Practice) -> None:
    slow = {"node2": 1.1}
    practice.run("n1", 1.0, slow_nodes=slow)
    commit_many(practice.repositories, ["Tidy"], {})
    practice.run("n2", 1.0, exclude=["node1"], slow_nodes=slow)
    result = practice.attribute(good="n1", bad="n2", metric="step_time")

    assert result.plan.axes == ("megatron_bridge", "environment", "nodes")
    assert sentence(result).startswith("node node2 (node1 → node2), 9")
    assert said_innocent(result) == "not Megatron-Bridge, not the environment"


# --- images ----------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(os.geteuid() != 0, reason="containers of the front of pyxis need mounts of their own")
def test_an_image_among_those_of_its_folder(practice: Practice) -> None:
    practice.run_in_containers()
    images = [make_image(practice, f"nemo-26.0{month}", 1.1 if month > 4 else 1.0) for month in range(2, 8)]
    practice.use_image(images[0])
    practice.run("n1", 1.0)
    commit_many(practice.repositories, ["Tidy"], {})
    practice.use_image(images[-1])
    practice.run("n2", 1.0)
    result = practice.attribute(good="n1", bad="n2", metric="step_time")

    assert result.plan.axes == ("image", "megatron_bridge")
    assert sentence(result).startswith("image nemo-26.05.sqsh, after nemo-26.04.sqsh, 9")
    assert said_innocent(result) == "not Megatron-Bridge"


def make_image(practice: Practice, name: str, factor: float) -> Path:
    """An image with nothing but its variables: the rest of its root is this machine's, mounted."""
    root, speed, image = (practice.folder / f"{name}{ending}" for ending in ("", ".json", ".sqsh"))
    speed.write_text(json.dumps({"factor": factor}))
    (root / "etc").mkdir(parents=True)
    (root / "etc" / "environment").write_text(f"PRACTICE_CLUSTER={speed}\n")
    for link in ("bin", "lib", "lib64", "sbin"):
        (root / link).symlink_to(f"usr/{link}")
    subprocess.run(["mksquashfs", root, image, "-noappend", "-quiet", "-no-progress"], check=True, capture_output=True)
    return image


# --- ranges that are not one line of good builds ---------------------------------------------------------------------


def test_a_submodule_that_only_the_test_moved(practice: Practice) -> None:
    add_submodule(practice.repositories)
    bridge, plain = 'Megatron-Bridge.git"\n', practice.sample
    messages = [f"Core change {number}" for number in range(4)]
    core = commit_many(practice.repositories, messages, {2: SLOW[1]}, workload="megatron_lm")

    def use(commit: str) -> None:
        pinned = f'init_submodules = true\nsubmodules = {{ "{SUBMODULE}" = "{commit}" }}\n'
        practice.sample = plain.replace(bridge, f"{bridge}{pinned}")

    use(core[0])
    practice.run("n1", 1.0)
    use(core[3])
    practice.run("n2", 1.0)
    result = practice.attribute(good="n1", bad="n2", metric="step_time")

    assert result.plan.axes == ("submodule", "environment")
    assert sentence(result).startswith(f'Megatron-LM {core[2][:12]} "Core change 2", 9')
    assert said_innocent(result) == "not the environment"


def test_a_commit_of_before_the_repository_moved(practice: Practice) -> None:
    old = practice.repositories
    practice.run("n1", 1.0)
    commits = commit_many(old, ["Tidy", "Synchronise after every bucket", "Move away"], SLOW)
    new, came = fold(old, practice.folder / "new" / "Megatron-Bridge.git")
    commit_many(new, ["Document"], {})
    practice.sample = practice.sample.replace(old.bridge_url, new.bridge_url)
    practice.more = f'[successors."{old.bridge_url}"]\nurl = "{new.bridge_url}"\ncommit = "{came}"\nlast = "main"\n'
    practice.run("n2", 1.0)
    result = practice.attribute(good="n1", bad="n2", metric="step_time")

    assert result.plan.axes == ("megatron_bridge", "environment")
    assert sentence(result).startswith(f'Megatron-Bridge {commits[1][:12]} "Synchronise after every bucket", 9')
    (within,) = result.descents
    assert len(within.plan.commits) == len([*commits, came, "Document"])


def fold(old: PracticeRepositories, folder: Path) -> tuple[PracticeRepositories, str]:
    """A new repository whose first commit has the files of the old one's last, and that commit."""
    git(old.folder("bridge"), "init", "--quiet", "--bare", "--initial-branch=main", str(folder))
    author = ("-c", "user.name=Practice", "-c", "user.email=practice@example.org")
    came = git(old.folder("bridge"), *author, "commit-tree", "main^{tree}", "-m", "Fold the bridge in")
    git(old.folder("bridge"), "push", "--quiet", str(folder), f"{came}:refs/heads/main")
    return old.model_copy(update={"bridge_url": str(folder)}), came


def test_commits_that_do_not_start_always_or_now_and_then(practice: Practice) -> None:
    messages = ["Tidy", "Break the build", "Slow down", "Repair the build", "Start now and then", "Repair that, too"]
    broken: dict[int, dict[str, Any]] = {
        1: {"crash_at": 1},
        2: {"step_time_factor": 1.1},
        3: {"crash_at": None},
        4: {"crash_share": 0.6},
        5: {"crash_share": 0.0},
    }
    practice.run("n1", 1.0)
    commits = commit_many(practice.repositories, messages, broken)
    practice.run("n2", 1.0)
    result = practice.attribute(good="n1", bad="n2", metric="step_time")

    (within,) = result.descents
    assert {culprit.commit for culprit in within.culprits} == {*commits[1:4]}
    assert {1 + 1, 1 + 2} <= set(within.skipped)
    assert sentence(result).count(" or ") == 2
    assert result.is_found


# --- killed ----------------------------------------------------------------------------------------------------------


def test_a_search_that_is_killed_three_times_goes_on_and_buys_no_run_twice(
    practice: Practice, prefect_server: PrefectServer
) -> None:
    practice.run("n1", 1.0)
    commits = commit_many(practice.repositories, ["Tidy", "Synchronise after every bucket", "Document"], SLOW)
    practice.run("n2", 1.0, exclude=["node1"])
    command: list[str | Path] = [NIGHTBRIDGE, "attribute", TEST, "--system", practice.site, "--yes", "--json"]
    nights = len(practice.jobs)
    for wanted in (1, 3, 6):
        searching = subprocess.Popen(
            command, env=prefect_server.environment, stdout=subprocess.DEVNULL, start_new_session=True
        )
        wait_until(lambda: len(practice.jobs) >= nights + wanted or searching.poll() is not None)  # noqa: B023
        assert searching.poll() is None, "it was over before it could be killed"
        os.killpg(searching.pid, signal.SIGKILL)
        searching.wait()
    ended = subprocess.run(command, env=prefect_server.environment, check=True, capture_output=True)

    found = json.loads(ended.stdout)
    (within,) = found["descents"]
    assert found["cause"]["kind"] == "found"
    assert commits[1] in ended.stdout.decode()
    assert set(practice.jobs.values()) == {1}
    assert len(practice.jobs) == nights + len(found["runs"]) + len(within["points"])


def said_innocent(result: AttributionResult) -> str:
    """The axes that the sentence clears."""
    return sentence(result).split("; ")[1]
