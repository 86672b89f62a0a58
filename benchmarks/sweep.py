"""How fast a large sweep is expanded and checked, in how much memory, and how fast one configuration is.

    python benchmarks/sweep.py [--cloudai-python PYTHON] [--points N] [--values N]

The grid has 1.8 million points: tp, pp, cp, ep, mb, gb, and the choices of CUDA graphs. With --cloudai-python, the
interpreter of an environment in which NVIDIA's cloudai is installed, CloudAI's model build and constraint check run
over N points drawn from the same grid (default 20000), its logging off, so that the ratio is of one machine and one
moment. The number of points that both call valid is compared as well. With --values each axis has
its first N values only.
"""

import argparse
import json
import random
import resource
import statistics
import subprocess
import time
from collections.abc import Callable
from typing import Any

from nightbridge.launch.resources import at_point
from nightbridge.models import Compat, GitRepo, HarvestPolicy, SweepAxis, TestDefinition
from nightbridge.rules import check_test, errors_of, grid_of
from nightbridge.rules.checking import CLOUDAI_RULES
from nightbridge.rules.rule import RuleContext
from nightbridge.rules.sweep_points import expansion_of

Axes = dict[str, list[Any]]

AXES: Axes = {
    "tp": [1, 2, 4, 8],
    "pp": [1, 2, 4, 8, 16],
    "cp": [1, 2, 4],
    "ep": [1, 2, 4, 8, 16],
    "mb": [1, 2, 4, 8, 16],
    "gb": [64 * factor for factor in range(1, 26)],
    "cuda_graph_impl": ["none", "local", "transformer_engine"],
    "cuda_graph_scope": [
        *(["attn"], ["mlp"], ["moe"], ["moe_router"], ["moe_router", "moe_preprocess"], ["full_iteration"]),
        *(["attn", "moe_router", "moe_preprocess"], ["attn", "mlp"]),
    ],
    "moe_a2a_overlap": [True, False],
}
FIXED = {"num_gpus": 64, "model_family_name": "qwen", "model_recipe_name": "qwen3_30b_a3b", "gpu_type": "h100"}

SINGLE_GOAL = 10_000
"""Configurations per second that are to be checked one by one, every rule asked and every message written."""

# Runs in CloudAI's own environment: points on stdin as JSON, seconds and verdicts on stdout.
CLOUDAI = """
import json, logging, sys, time
from cloudai.workloads.megatron_bridge.megatron_bridge import MegatronBridgeCmdArgs, MegatronBridgeTestDefinition
logging.disable(logging.CRITICAL)
points = json.load(sys.stdin)
repo = {"url": "https://github.com/NVIDIA-NeMo/Megatron-Bridge.git", "commit": "v0.4.2"}
start = time.perf_counter()
verdicts = []
for point in points:
    test = MegatronBridgeTestDefinition(
        name="t", description="t", test_template_name="MegatronBridge", git_repos=[repo],
        cmd_args=MegatronBridgeCmdArgs(hf_token="none", **point),
    )
    verdicts.append(test.constraint_check(None, None))
both = time.perf_counter() - start
tests = [
    MegatronBridgeTestDefinition.model_construct(cmd_args=MegatronBridgeCmdArgs(hf_token="none", **point))
    for point in points
]
start = time.perf_counter()
for test in tests:
    test.constraint_check(None, None)
print(json.dumps({"both": both, "checks": time.perf_counter() - start, "verdicts": verdicts}))
"""


def swept(compat: Compat, axes: Axes) -> TestDefinition:
    return TestDefinition(
        id="sweep",
        name="sweep",
        cmd_args={**FIXED, "container_image": "nvcr.io#nvidia/nemo:26.04"},
        git_repos=(GitRepo(url="https://github.com/NVIDIA-NeMo/Megatron-Bridge.git", commit="v0.4.2"),),
        nemo_run_repo=GitRepo(url="https://github.com/NVIDIA-NeMo/Run.git"),
        axes=tuple(SweepAxis(field=f"cmd_args.{name}", values=tuple(values)) for name, values in axes.items()),
        compat=compat,
        harvest=HarvestPolicy(checkpoint="none"),
    )


def median_seconds(action: Callable[[], object], repeats: int = 3) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def peak_megabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def grid_rate(compat: Compat, axes: Axes) -> float:
    test = swept(compat, axes)
    expansion = expansion_of(grid_of(test))
    # A new grid each time: the answers that rules have given are not kept from one to the next.
    seconds = median_seconds(lambda: expansion_of(grid_of(test)))
    rate = expansion.points / seconds
    print(
        f"grid, {'CloudAI rules' if compat == 'cloudai' else 'our rules':13} {expansion.points:>9,} points "
        f"({expansion.valid:,} valid) in {seconds:5.2f} s: {rate:>10,.0f} points/s, peak {peak_megabytes():.0f} MB"
    )
    return rate


def single_rate(points: int = 2000) -> float:
    """Configurations drawn from the whole grid, most of them invalid, so that messages are written as well."""
    dice = random.Random(1)
    test = swept("none", AXES)
    drawn = [{name: dice.choice(values) for name, values in AXES.items()} for _ in range(points)]
    tests = [at_point(test, point) for point in drawn]
    found = [check_test(test) for test in tests]
    busy = time.process_time()
    seconds = median_seconds(lambda: [check_test(test) for test in tests], repeats=5)
    busy = (time.process_time() - busy) / 5
    invalid = sum(bool(errors_of(violations)) for violations in found)
    rate = len(tests) / seconds
    print(
        f"one configuration after the other, all rules and {sum(map(len, found)):,} messages: {rate:,.0f} /s "
        f"({len(tests) / busy:,.0f} per second of CPU time; {invalid:,} of {len(tests):,} invalid; "
        f"goal {SINGLE_GOAL:,} /s)"
    )
    return rate


def compare_with_cloudai(python: str, count: int, rates: dict[str, float]) -> None:
    dice = random.Random(1)
    points = [{**FIXED, **{name: dice.choice(values) for name, values in AXES.items()}} for _ in range(count)]
    # CloudAI writes a list of scopes as text where it is one value.
    theirs = [{**point, "cuda_graph_scope": ",".join(point["cuda_graph_scope"])} for point in points]
    done = subprocess.run([python, "-c", CLOUDAI], input=json.dumps(theirs), capture_output=True, text=True, check=True)
    answer = json.loads(done.stdout)
    peer = count / answer["both"]
    print(f"CloudAI, model build and check: {peer:,.0f} points/s; the checks alone: {count / answer['checks']:,.0f} /s")
    base = swept("cloudai", {})
    runs = [RuleContext(base.model_copy(update={"cmd_args": point})) for point in points]
    passes = [not any(message for rule in CLOUDAI_RULES for message in rule.check(run)) for run in runs]
    agree = sum(ours == said for ours, said in zip(passes, answer["verdicts"], strict=True))
    print(f"same verdict on {agree} of {count} points")
    for name, rate in rates.items():
        print(f"ratio, {name}: {rate / peer:.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cloudai-python", help="interpreter that can import cloudai")
    parser.add_argument("--points", type=int, default=20_000, help="points that CloudAI is given")
    parser.add_argument("--values", type=int, help="values of each axis; all of them by default")
    given = parser.parse_args()
    axes = {name: values[: given.values] for name, values in AXES.items()}
    rates = {"our rules": grid_rate("none", axes), "CloudAI rules": grid_rate("cloudai", axes)}
    rates["one by one"] = single_rate(2000 if given.values is None else 100)
    if given.cloudai_python:
        compare_with_cloudai(given.cloudai_python, given.points, rates)


if __name__ == "__main__":
    main()
