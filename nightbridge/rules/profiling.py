"""Profilers: one at a time, and inside the run."""

from collections.abc import Iterator

from nightbridge.launch.run_outputs import RECIPE_STEPS
from nightbridge.rules.context import Facts
from nightbridge.rules.rule import Rule, from_source

_DEFAULT_START, _DEFAULT_STOP = 10, 11


def _one_profiler(facts: Facts) -> Iterator[str]:
    """Two profilers slow each other down, and the launcher passes only one of them on."""
    if facts.args.get("enable_nsys") and facts.args.get("pytorch_profiler"):
        yield "enable_nsys and pytorch_profiler are both on, and the launcher takes one of them; switch one off"


def _window(facts: Facts) -> Iterator[str]:
    """A window outside the run profiles nothing and ends without a message."""
    if not (facts.args.get("enable_nsys") or facts.args.get("pytorch_profiler")):
        return
    start = facts.args.get("profiling_start_step", _DEFAULT_START)
    stop = facts.args.get("profiling_stop_step", _DEFAULT_STOP)
    steps = facts.test.max_steps or RECIPE_STEPS
    if not 0 <= start < stop <= steps:
        yield (
            f"the profiling window {start} to {stop} is not inside the run's {steps} steps; "
            "choose 0 <= profiling_start_step < profiling_stop_step <= max_steps"
        )


RULES = (
    *from_source(
        "Megatron-Bridge: ProfilingConfig",
        Rule("one-profiler", "error", ("cmd_args.enable_nsys", "cmd_args.pytorch_profiler"), _one_profiler),
        Rule(
            "profiling-window",
            "error",
            (
                "cmd_args.profiling_start_step",
                "cmd_args.profiling_stop_step",
                "cmd_args.max_steps",
                "cmd_args.enable_nsys",
                "cmd_args.pytorch_profiler",
            ),
            _window,
        ),
    ),
)
