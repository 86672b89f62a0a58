"""What the embedded cluster makes of Slurm's options, and node names, tasks and file patterns as Slurm writes them."""

import pytest

from nightbridge.embedded.notation import (
    EMBEDDED_SBATCH,
    SRUN,
    fill_pattern,
    hostnames,
    node_expression,
    parse_dependencies,
    parse_time,
    simulated_nodes,
    tasks_expression,
)
from nightbridge.errors import InvalidInput
from nightbridge.sbatch_options import split_options


def test_options_end_at_the_first_word_that_is_none() -> None:
    options, rest = split_options(["-N2", "-n", "4", "--wait=60", "-lu", "-K1", "--overlap", "env", "-i", "-n"], SRUN)

    assert options == {
        "nodes": "2",
        "ntasks": "4",
        "wait": "60",
        "label": "",
        "unbuffered": "",
        "kill-on-bad-exit": "1",
        "overlap": "",
    }
    assert rest == ["env", "-i", "-n"]


@pytest.mark.parametrize(
    "words",
    [
        "--account practice --partition=batch --mem=0 --exclusive --gres=gpu:8 --gpus-per-node=8 --segment=4",
        "--mail-type=FAIL --requeue --parsable --qos=high --reservation=night --comment=x --network=sharp -v",
    ],
)
def test_what_cannot_matter_on_one_machine_is_accepted(words: str) -> None:
    assert split_options(words.split(), EMBEDDED_SBATCH)[1] == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--hold"], "--hold is not possible here"),
        (["--array=1-3"], "no job arrays"),
        (["--begin=16:00"], "--begin is not possible here"),
        (["--signal=USR1@60"], "no signal before the time limit"),
    ],
)
def test_what_would_change_the_jobs_meaning_is_refused_by_name(words: list[str], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        split_options(words, EMBEDDED_SBATCH)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30", 1800),
        ("30:15", 1815),
        ("08:00:00", 28800),
        ("1-0", 86400),
        ("1-02:30", 95400),
        ("1-02:30:10", 95410),
        ("UNLIMITED", None),
        ("0", None),
    ],
)
def test_time_limits_are_read_as_slurm_reads_them(text: str, seconds: float | None) -> None:
    assert parse_time(text) == seconds


@pytest.mark.parametrize("text", ["", "soon", "1:2:3:4", "-5", "1-"])
def test_a_wrong_time_limit_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match="time"):
        parse_time(text)


def test_dependencies() -> None:
    assert parse_dependencies("afterok:1:2,afterany:3,after:4") == (
        ("afterok", 1),
        ("afterok", 2),
        ("afterany", 3),
        ("after", 4),
    )
    for wrong in ("afterok", "afterok:x", "afterok:1?afterany:2", "aftercorr:1", "singleton", "afternotok:1"):
        with pytest.raises(InvalidInput, match="dependency"):
            parse_dependencies(wrong)


@pytest.mark.parametrize(
    ("expression", "names"),
    [
        ("", ()),
        ("node1", ("node1",)),
        ("node[1-3]", ("node1", "node2", "node3")),
        ("gpu[008-010,12],login", ("gpu008", "gpu009", "gpu010", "gpu12", "login")),
        ("r[1-2]n01,x", ("r1n01", "r2n01", "x")),
        ("r[1-2]n[1,3]", ("r1n1", "r1n3", "r2n1", "r2n3")),
        ("odd[a-b]", ("odd[a-b]",)),
    ],
)
def test_a_node_expression_has_these_names(expression: str, names: tuple[str, ...]) -> None:
    assert tuple(hostnames(expression)) == names


@pytest.mark.parametrize("count", [1, 2, 12])
def test_node_expressions_expand_and_contract(count: int) -> None:
    assert hostnames(node_expression(simulated_nodes(count))) == simulated_nodes(count)


def test_nodes_that_are_not_the_first_ones_are_listed() -> None:
    assert node_expression(["node2", "node4"]) == "node2,node4"
    assert hostnames("node2,node4") == ["node2", "node4"]


def test_tasks_of_nodes_contract() -> None:
    assert tasks_expression([2, 2, 2, 1]) == "2(x3),1"


def test_file_name_patterns() -> None:
    assert fill_pattern("log-%x_%j%%_%Q.out", {"j": 12, "x": "run"}) == "log-run_12%_%Q.out"
