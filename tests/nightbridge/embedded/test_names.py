"""Node expressions, tasks of nodes and file name patterns, as Slurm writes them."""

import pytest

from nightbridge.embedded.names import fill_pattern, hostnames, node_expression, node_names, tasks_expression


@pytest.mark.parametrize(
    ("expression", "names"),
    [
        ("", ()),
        ("node1", ("node1",)),
        ("node[1-3]", ("node1", "node2", "node3")),
        ("gpu[008-010,12],login", ("gpu008", "gpu009", "gpu010", "gpu12", "login")),
        ("r[1-2]n01,x", ("r1n01", "r2n01", "x")),
    ],
)
def test_a_node_expression_has_these_names(expression: str, names: tuple[str, ...]) -> None:
    assert tuple(hostnames(expression)) == names


@pytest.mark.parametrize("count", [1, 2, 12])
def test_node_expressions_expand_and_contract(count: int) -> None:
    assert hostnames(node_expression(node_names(count))) == node_names(count)


def test_nodes_that_are_not_the_first_ones_are_listed() -> None:
    assert node_expression(["node2", "node4"]) == "node2,node4"
    assert hostnames("node2,node4") == ["node2", "node4"]


def test_tasks_of_nodes_contract() -> None:
    assert tasks_expression([2, 2, 2, 1]) == "2(x3),1"


def test_file_name_patterns() -> None:
    values = {"j": 12, "x": "run", "t": 3}

    assert fill_pattern("log-%x_%j_%4t%%_%Q.out", values) == "log-run_12_0003%_%Q.out"
