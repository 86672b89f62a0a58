"""Nodes that failed under one attempt are left out of the next one."""

from pathlib import Path

import pytest

from nightbridge.errors import LaunchRefused
from nightbridge.models import ClusterLimits, Job, JobState, JobStatus, LaunchPlan, Outcome, utc_now
from nightbridge.slurm.attempts import failed_nodes, fitting_options, without_failed_nodes

PLAN = LaunchPlan(
    run_key="r", attempt=2, attempt_dir=Path("/w/a2"), argv=("true",), cwd=Path("/w"), nodes=2, tasks_per_node=1,
    sbatch_args=("--qos=night",),
)  # fmt: skip


def job(
    nodes: str,
    state: JobState = JobState.NODE_FAIL,
    outcome: Outcome = Outcome.INFRASTRUCTURE,
    reason: str = "NODE_FAIL after 3 of 50 steps",
) -> Job:
    return Job(
        run_key="r", attempt=1, job_id=1, cluster="c", attempt_dir=Path("/w/a1"), script=Path("/w/s"),
        experiment_dir=Path("/w/e"), submitted_at=utc_now(), outcome=outcome, outcome_reason=reason,
        status=JobStatus(job_id=1, state=state, nodes=nodes),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("jobs", "nodes"),
    [
        ([job("node1"), job("node2")], ("node1", "node2")),
        ([job("node[1-4]")], ()),
        ([job("node[1-4]", reason="NODE_FAIL: srun: error: Node failure on node3 after 3 of 50 steps")], ("node3",)),
        ([job("node1", reason="workspace not visible on node1", state=JobState.FAILED)], ("node1",)),
        ([job("node1", outcome=Outcome.PROGRAM_ERROR)], ()),
        ([job("node1", state=JobState.PREEMPTED)], ()),
    ],
    ids=["single nodes", "one of many, unknown", "one of many, named", "guard", "the program's fault", "preempted"],
)
def test_the_nodes_that_failed_are_those_that_are_known_to_have(jobs: list[Job], nodes: tuple[str, ...]) -> None:
    assert failed_nodes(jobs) == nodes


def test_a_failed_node_is_excluded_where_enough_others_are_left() -> None:
    enough, too_few = ClusterLimits(max_nodes=3), ClusterLimits(max_nodes=2)
    assert without_failed_nodes(PLAN, [job("node1")], enough).sbatch_args == ("--qos=night", "--exclude=node1")
    assert without_failed_nodes(PLAN, [job("node1")], too_few) == PLAN


SCRIPT = "#!/bin/bash\n#SBATCH --nodelist=node[7-8]\n#SBATCH --exclude=node3\ntrue\n"


@pytest.mark.parametrize(
    ("options", "script", "fitting"),
    [
        # What the script pins stays; Slurm refuses a node that is both required and excluded.
        (["--exclude=node7"], SCRIPT, ["--exclude=node3"]),
        (["--exclude=node7,node9"], SCRIPT, ["--exclude=node9,node3"]),
        (["--exclude=node7", "--time=5"], "#!/bin/bash\n#SBATCH -w node7\n", ["--time=5"]),
        (["--exclude=node7"], "#!/bin/bash\n#SBATCH --nodel=node7\n", []),
        # An option would replace the script's own list.
        (["--exclude=node9"], "#!/bin/bash\n#SBATCH -x node[1-2]\n", ["--exclude=node9,node1,node2"]),
        (["--time=5"], SCRIPT, ["--time=5"]),
        # Lists of nodes to exclude add up.
        (["--exclude=a,b", "--qos=night", "--exclude=c"], "#!/bin/bash\n", ["--qos=night", "--exclude=a,b,c"]),
        (["--nodelist=a,b", "--exclude=a"], "#!/bin/bash\n", ["--nodelist=a,b"]),
        (["--exclude=r[1-2]n[1-2]"], "#!/bin/bash\n", ["--exclude=r1n1,r1n2,r2n1,r2n2"]),
    ],
)
def test_excluded_nodes_fit_what_the_script_says_of_nodes(options: list[str], script: str, fitting: list[str]) -> None:
    assert fitting_options(options, script) == fitting


def test_a_site_s_file_of_excluded_nodes_is_read_and_the_failed_ones_are_added(tmp_path: Path) -> None:
    nodes = tmp_path / "nodes"
    nodes.write_text("# bad memory\nnode[1-2]  # since Monday\n\nnode5\n")
    options = ["--time=5", f"--exclude={nodes}", "--exclude=node9"]

    assert fitting_options(options, "#!/bin/bash\n") == ["--time=5", "--exclude=node1,node2,node5,node9"]
    assert fitting_options(["--exclude=node5,node9"], f"#!/bin/bash\n#SBATCH -w {nodes}\n") == ["--exclude=node9"]
    assert fitting_options(["--exclude=/no/such/file"], "#!/bin/bash\n") == ["--exclude=/no/such/file"]


@pytest.mark.parametrize(
    ("options", "script", "fitting"),
    [
        (["--dependency=singleton", "--time=5"], SCRIPT, ["--time=5", "--dependency=singleton"]),
        (["--dependency=afterok:7", "--dependency=afterany:9"], SCRIPT, ["--dependency=afterok:7,afterany:9"]),
        (["--dependency=afterany:9"], "#!/bin/bash\n#SBATCH -d afterok:7\n", ["--dependency=afterok:7,afterany:9"]),
        ([], "#!/bin/bash\n#SBATCH -d afterok:7\n", []),
        (["--dependency=afterany:9", "-dafterok:7"], "#!/bin/bash\n", ["--dependency=afterany:9,afterok:7"]),
        (["--dependency=afterany:9", "--depend=afterok:7"], "#!/bin/bash\n", ["--dependency=afterany:9,afterok:7"]),
        (
            ["--dependency=afterany:9"],
            "#!/bin/bash\n#SBATCH --my-plugin=3\n#SBATCH --dependency=afterok:7\n",
            ["--dependency=afterok:7,afterany:9"],
        ),
        (["--dependency=afterok:7?afterok:8"], "#!/bin/bash\n", ["--dependency=afterok:7?afterok:8"]),
    ],
)
def test_a_job_waits_for_what_its_user_and_its_scenario_name(
    options: list[str], script: str, fitting: list[str]
) -> None:
    assert fitting_options(options, script) == fitting


@pytest.mark.parametrize(
    ("options", "script"),
    [
        ([], "#!/bin/bash\n#SBATCH --clusters=alps\n"),
        ([], "#!/bin/bash\n#SBATCH -M alps\n"),
        ([], "#!/bin/bash\n#SBATCH --cluster=alps\n"),
        (["--exclude=node9", "--clusters=alps"], SCRIPT),
    ],
    ids=["the script", "the script's -M", "Slurm's other name of it", "the launcher's or the site's option"],
)
def test_a_job_is_not_sent_to_another_cluster(options: list[str], script: str) -> None:
    with pytest.raises(LaunchRefused, match="site file of that cluster"):
        fitting_options(options, script)


@pytest.mark.parametrize(
    ("options", "script", "what"),
    [
        (["--array=0-3"], SCRIPT, "several jobs"),
        ([], "#!/bin/bash\n#SBATCH --array=0-3\n", "several jobs"),
        ([], "#!/bin/bash\n#SBATCH -sa 0-3\n", "several jobs"),
        (["--container-image=/i.sqsh", "--arr=0-3"], SCRIPT, "several jobs"),
        ([], "#!/bin/bash\n#SBATCH --container-image=/i.sqsh\n#SBATCH -a0-3\n", "several jobs"),
        (["--wrap=true"], SCRIPT, "instead of the launcher's script"),
        (["--test-only"], SCRIPT, "submits nothing"),
    ],
    ids=["an option", "the script", "short", "beside a plugin's", "the script's, beside a plugin's", "wrap", "no job"],
)
def test_an_attempt_gets_one_job_whatever_is_asked_of_sbatch(options: list[str], script: str, what: str) -> None:
    with pytest.raises(LaunchRefused, match=what):
        fitting_options(options, script)


def test_what_nightbridge_decides_itself_is_left_out_of_the_options_of_a_site_or_test() -> None:
    given = ["--requeue", "--time=5", "--requ", "-Q", "--job-name", "x", "--comment=--array", "--wait", "--unknown"]
    assert fitting_options(given, SCRIPT) == ["--time=5", "--job-name", "x", "--comment=--array", "--unknown"]
