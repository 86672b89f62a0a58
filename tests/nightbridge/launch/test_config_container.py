"""Overrides laid over a dumped ConfigContainer."""

from pathlib import Path

import pytest

from nightbridge.errors import InvalidInput
from nightbridge.launch.config_container import ConfigContainer, parse_container, with_overrides
from nightbridge.masking import mask_text


def test_a_configuration_with_masked_values_is_read() -> None:
    dumped = "model: {name: token}\ntrain:\n  key: token\n  all: [token, token]\n  url: https://token@x\n"

    container = parse_container(mask_text(dumped, ["token"]).encode(), Path("c.yaml"))

    assert container.table["model"] == {"name": "(masked)"}
    assert container.table["train"] == {"key": "(masked)", "all": ["(masked)"] * 2, "url": "https://(masked)@x"}
    assert container.lines["train.key"] == "c.yaml:3"


DOUBLED = "\n".join(f"k{number}: &a{number} {{p: *a{number - 1}, q: *a{number - 1}}}" for number in range(1, 40))


DEEPER = "\n".join(f"k{number}: &a{number} {'{x: ' * 60}*a{number - 1}{'}' * 60}" for number in range(1, 30))


@pytest.mark.parametrize(
    "more", [DOUBLED, DEEPER, "m: &m {x: 1, y: *m}"], ids=["2^40 values", "1,740 levels", "a part of itself"]
)
def test_references_cannot_make_a_file_larger_than_it_may_be(more: str) -> None:
    with pytest.raises(InvalidInput, match="not valid YAML"):
        parse_container(f"model: &a0 {{x: 1}}\ntrain: {{y: 1}}\n{more}\n".encode(), Path("c.yaml"))


def test_a_value_that_is_there_twice_is_read_twice() -> None:
    container = parse_container(b"model: &m {x: [1, 2]}\ntrain: *m\n", Path("c.yaml"))

    assert container.table["train"] == {"x": [1, 2]}


@pytest.mark.parametrize(
    ("override", "meant"),
    [
        ("model.num_layers=8", "model.transformer.num_layers"),
        ("train.train_iterz=5", "train.train_iters"),
    ],
)
def test_an_override_that_names_no_key_is_refused_with_the_one_that_was_meant(override: str, meant: str) -> None:
    container = ConfigContainer(
        Path("c.yaml"), {"model": {"transformer": {"num_layers": 4}}, "train": {"train_iters": 1}}
    )

    with pytest.raises(InvalidInput, match=f"did you mean {meant}") as refused:
        with_overrides(container, [override])

    assert len(refused.value.violations) == 1


@pytest.mark.parametrize("value", ["[1", "[2026-02-30]", f"[{'1' * 5000}]", "[" * 3000])
def test_a_list_that_has_no_value_is_refused(value: str) -> None:
    container = ConfigContainer(Path("c.yaml"), {"model": {"sizes": [1]}, "train": {}})

    with pytest.raises(InvalidInput) as refused:
        with_overrides(container, [f"model.sizes={value}"])

    assert refused.value.violations == (f"'model.sizes={value}' has an invalid value",)


def test_numbers_are_hydras_and_names_of_variables_are_free() -> None:
    container = ConfigContainer(
        Path("c.yaml"), {"model": {"transformer": {}}, "env_vars": {}, "optimizer": {"lr": 1e-3}}
    )

    changed = with_overrides(container, ["optimizer.lr=1e-05", "+env_vars.NCCL_ALGO=Ring"])

    assert (changed.value("optimizer.lr"), changed.value("env_vars.NCCL_ALGO")) == (1e-05, "Ring")
    for override in ("env_vars.NCCL_ALGO=Ring", "+optimizer.rate=1"):
        with pytest.raises(InvalidInput):
            with_overrides(container, [override])
