"""The `[gate]` table, the canary, and a site's contract, as a person writes them."""

from pathlib import Path

import pytest

from nightbridge import config
from nightbridge.config.sites import read_site_file
from nightbridge.models import InvalidTest, TestDefinition

COMMIT = "a" * 40
TEST = """
name = "{name}"
test_template_name = "MegatronBridge"
{top}
[cmd_args]
gpu_type = "h100"
model_family_name = "llama"
model_recipe_name = "llama3_8b"
container_image = "none"
num_gpus = 8
[[git_repos]]
url = "https://example.org/Megatron-Bridge.git"
commit = "{commit}"
[nemo_run_repo]
url = "https://example.org/Run.git"
commit = "{commit}"
{tables}
"""


def write(folder: Path, name: str, *, top: str = "", tables: str = "", commit: str = COMMIT) -> Path:
    path = folder / f"{name}.toml"
    path.write_text(TEST.format(name=name, top=top, tables=tables, commit=commit))
    return path


def only(path: Path) -> TestDefinition | InvalidTest:
    scenario = config.load(path)
    both: tuple[TestDefinition | InvalidTest, ...] = (*scenario.tests, *scenario.invalid)
    return both[0]


def test_a_gate_is_read_with_its_floors_and_ceilings_and_the_rules_of_its_golden_values(tmp_path: Path) -> None:
    (tmp_path / "golden.json").write_text('{"0": {"lm loss": 10.5}}')
    path = write(
        tmp_path,
        "t",
        tables="""
[gate]
step_time = 0.03
pairs = 2
control = "every_night"
golden = "golden.json"
limits.tflops_per_gpu = { min = 600 }
[gate.golden_rules]
timing_threshold = 0.1
""",
    )

    test = only(path)

    assert isinstance(test, TestDefinition)
    assert (test.gate.step_time, test.gate.pairs, test.gate.control) == (0.03, 2, "every_night")
    assert test.gate.limits["tflops_per_gpu"].min == 600
    assert test.gate.golden == str(tmp_path / "golden.json")
    assert test.gate.golden_rules.timing_threshold == 0.1


@pytest.mark.parametrize(("runs", "pairs"), [(0, 0), (1, 1), (2, 1), (3, 2)])
def test_confirming_runs_of_an_older_file_are_half_as_many_pairs_and_it_is_said(
    tmp_path: Path, runs: int, pairs: int
) -> None:
    scenario = config.load(write(tmp_path, "t", tables=f"[gate]\nconfirm = {runs}"))

    assert (scenario.tests[0].gate.pairs, scenario.tests[0].gate.confirm) == (pairs, None)
    assert any(f"gate.confirm: is read as pairs = {pairs}" in warning for warning in scenario.warnings)


@pytest.mark.parametrize(
    ("tables", "violation"),
    [
        ('[gate]\ngolden = "nowhere.json"', "no such file"),
        (f'[gate]\ngolden = "{"long" * 99}.json"', "no such file"),
        ("[gate]\nlimits.speed = { max = 1 }", "gate.limits.speed: input should be"),
        ("[gate]\nlimits.step_tme = { max = 1 }", "did you mean 'step_time'?"),
        ("[gate]\nstep_tim = 0.1", "step_tim"),
        ("[gate]\nsigmas = 0", "greater than 0"),
        ("[gate]\nstartup_time = inf", "finite"),
        ('[gate]\nstep_time = "5%"', "gate.step_time: must be a number, without a percent sign; write 0.05 for 5 %"),
        ('[gate]\nstep_time = "2.5 %"', "write 0.025 for 2.5 %"),
        ('[gate]\nstep_time = "five"', "gate.step_time: must be a number, without quotes"),
        ('[gate]\npairs = "5%"', "gate.pairs: must be a whole number, without quotes"),
        ('[gate]\ndeterministic = "maybe"', "gate.deterministic: must be true or false, without quotes"),
    ],
)
def test_a_gate_that_cannot_be_asked_is_a_violation(tmp_path: Path, tables: str, violation: str) -> None:
    test = only(write(tmp_path, "t", tables=tables))

    assert isinstance(test, InvalidTest)
    assert violation in " ".join(test.violations)


@pytest.mark.parametrize(
    ("content", "violation"),
    [
        (b'<<<<<<< HEAD\n{"0": {"lm loss": 3}}', "is not JSON"),
        (bytes(range(7, 256)), "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b"{}", "contains no golden values"),
        (b"[10.5]", "contains no golden values"),
    ],
)
def test_a_golden_file_that_is_none_is_a_violation_before_any_gpu_hour(
    tmp_path: Path, content: bytes, violation: str
) -> None:
    (tmp_path / "golden.json").write_bytes(content)

    test = only(write(tmp_path, "t", tables='[gate]\ngolden = "golden.json"'))

    assert isinstance(test, InvalidTest)
    assert f"gate.golden: {violation}" in " ".join(test.violations)
    assert str(tmp_path / "golden.json") in " ".join(test.violations)


def test_the_pins_of_a_canary_must_not_be_able_to_move(tmp_path: Path) -> None:
    moving, fixed = (
        only(write(tmp_path, "a", top="canary = true", commit="main")),
        only(write(tmp_path, "b", top="canary = true")),
    )

    assert isinstance(moving, InvalidTest)
    assert len(moving.violations) == 2
    assert "a canary needs fixed pins; write the full commit" in moving.violations[0]
    assert isinstance(fixed, TestDefinition)


def test_a_canary_or_reference_that_no_test_of_the_scenario_is_gets_a_warning(tmp_path: Path) -> None:
    key = "other-2026-11-21-0123456789"
    for name, gate in (("a", 'canary = "b"\nreference = "bb"'), ("b", f'canary = "zzz"\nreference = "{key}"')):
        write(tmp_path, name, tables=f"[gate]\n{gate}")
    names = "".join(f'[[Tests]]\nid = "{name}"\ntest_name = "{name}"\n' for name in ("a", "b"))
    (tmp_path / "scenario.toml").write_text(f'name = "s"\n{names}')

    scenario = config.load(tmp_path / "scenario.toml")

    assert scenario.invalid == ()
    found = [warning for warning in scenario.warnings if "gate." in warning]
    assert len(found) == 2
    assert "a.toml" in found[0]
    assert "gate.reference: no test of this scenario is called 'bb'; did you mean 'b'?; another scenario" in found[0]
    assert "gate.canary: no test of this scenario is called 'zzz'; another scenario has to run it" in found[1]


def test_the_other_tests_of_a_scenario_know_its_canary(tmp_path: Path) -> None:
    write(tmp_path, "canary", top="canary = true")
    write(tmp_path, "plain", commit="main")
    write(tmp_path, "own", commit="main", tables='[gate]\ncanary = "another"')
    names = "".join(f'[[Tests]]\nid = "{name}"\ntest_name = "{name}"\n' for name in ("plain", "own", "canary"))
    (tmp_path / "all.toml").write_text(f'name = "all"\n{names}')

    scenario = config.load(tmp_path / "all.toml")

    assert {test.id: test.gate.canary for test in scenario.tests} == {
        "plain": "canary",
        "own": "another",
        "canary": None,
    }


def test_a_site_says_what_its_cluster_owes_each_test(tmp_path: Path) -> None:
    path = tmp_path / "site.toml"
    path.write_text('workspace = "/w"\n[contract."llama*"]\nstep_time = { max = 1.5 }\n')

    site, _warnings = read_site_file(path)

    assert site.contract["llama*"]["step_time"].max == 1.5
