"""CloudAI's fields that map to a field of ours: agents, sampled parameters, reports, options of srun.

Where a file has both, ours wins. A part of such a field without a counterpart gives a warning.
"""

import math
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field

from nightbridge.config.documents import Findings, KeyPath, unknown_key
from nightbridge.models import GatePolicy, MetricName, Model, RewardKind, SweepAxis, SweepPolicy
from nightbridge.sbatch_options import NOT_ONE_JOB, OWN_OPTIONS, option_names

GRID_SEARCH = "grid_search"
"""CloudAI's default agent: every point."""

METRICS: Mapping[str, MetricName] = {
    "default": "step_time",
    "step-time": "step_time",
    "tflops-per-gpu": "tflops_per_gpu",
}
"""CloudAI's metrics of this workload, and ours."""

_WORK = frozenset({"gb", "seq_length", "num_gpus", "num_nodes"})
"""What a step's work, or the GPUs that share it, is changed by: the least step time is then that of the least work."""

_SEED = "random_seed"
_MAX_POINTS = 1000
_WEIGHT_TOLERANCE = 1e-6
"""Tolerance of the sum of a sampled parameter's weights, as in CloudAI."""


class TrainingReport(Model):
    """CloudAI's `[training_report]`."""

    exclude_start_steps: int = Field(5, ge=0, description="Becomes `gate.warmup_steps`, unless that is written.")
    exclude_post_profiling_steps: int = Field(2, ge=0, description="Becomes `gate.post_profiling_steps`, likewise.")


class DrawnParameter(Model):
    """An entry of CloudAI's `[env_params]`: a list of `[cmd_args]` of which each point gets one value, drawn."""

    weights: tuple[float, ...] | None = None
    encoding: dict[str, Any] | None = None


class AgentFields(Model):
    """CloudAI's settings of the agent that chooses the points of a sweep."""

    agent: str = Field(GRID_SEARCH, description="CloudAI's agent; `grid_search` runs every point.")
    agent_steps: int = Field(1, ge=1, description="Points that another agent draws; use `sweep.points`.")
    agent_metrics: tuple[str, ...] = Field((), description="CloudAI's name of `sweep.metric`.")
    agent_reward_function: RewardKind | None = Field(None, description="CloudAI's name of `sweep.reward`.")
    agent_config: dict[str, Any] | None = Field(None, description="Settings of CloudAI's agent, such as its seed.")
    env_params: dict[str, DrawnParameter] = Field(
        default={}, description="Keys of `[cmd_args]` of whose list each point draws one value (CloudAI)."
    )


def sbatch_options(written: str | Sequence[str], findings: Findings) -> tuple[str, ...]:
    """The `--name value`, `--name=value` and `--name` of `extra_srun_args` as options of sbatch.

    CloudAI passes options of srun to the batch job, too, and drops short ones silently; here they are refused.
    """
    path = ("extra_srun_args",)
    try:
        words = shlex.split(written) if isinstance(written, str) else " ".join(written).split()
    except ValueError:
        findings.problem(path, "has an unclosed quote")
        return ()
    options: list[str] = []
    open_option = False
    for word in words:
        if word.startswith("--") and len(word) > len("--"):
            options.append(word)
            open_option = "=" not in word
        elif open_option and not word.startswith("-"):
            options[-1] += f"={word}"
            open_option = False
        else:
            findings.problem(path, f"{word!r} is not an option of the form --name or --name=value; write the long one")
    return tuple(options)


def check_options(options: Sequence[str], path: KeyPath, findings: Findings) -> None:
    """Refuse options of sbatch with which an attempt has not one job, and warn of those that nightbridge decides."""
    for option in options:
        for name in sorted(option_names(option)):
            if name in NOT_ONE_JOB:
                findings.problem(path, f"{option!r} {'; '.join(NOT_ONE_JOB[name])}")
            elif name in OWN_OPTIONS:
                findings.warn(path, f"{option!r} has no effect: nightbridge decides it for every job")


def gate_of(gate: GatePolicy, report: TrainingReport | None, findings: Findings) -> GatePolicy:
    """The gate, with the steps that `[training_report]` leaves out where `[gate]` has none of its own."""
    if report is None:
        return gate
    changes = {}
    names = {"exclude_start_steps": "warmup_steps", "exclude_post_profiling_steps": "post_profiling_steps"}
    for name, field in names.items():
        if field not in gate.model_fields_set:
            changes[field] = getattr(report, name)
        elif name in report.model_fields_set or field == "warmup_steps":
            findings.warn(("training_report", name), f"has no effect: gate.{field} is set as well")
    return gate.model_copy(update=changes)


def sweep_of(sweep: SweepPolicy, agent: AgentFields, axes: Sequence[SweepAxis], findings: Findings) -> SweepPolicy:
    """`[sweep]`, completed from CloudAI's agent fields and from what is swept over."""
    work = [axis.name for axis in axes if axis.name in _WORK]
    derived: dict[str, Any] = {"metric": "tokens_per_gpu"} if work else {}
    if agent.agent != GRID_SEARCH:
        derived |= {"method": "random", "points": min(agent.agent_steps, _MAX_POINTS)}
        findings.warn(
            ("agent",),
            f"{agent.agent!r} is an agent of a plugin, which is neither checked nor run; it chooses each point by "
            f"earlier results, and here {derived['points']} points (agent_steps) are drawn at random",
        )
    elif "agent_steps" in agent.model_fields_set:
        findings.warn(("agent_steps",), "has no effect: grid_search runs every point, in CloudAI too")
    derived |= _seed(agent, findings)
    if agent.agent_metrics:
        derived |= _metric(agent.agent_metrics, findings)
    if agent.agent_reward_function is not None:
        derived["reward"] = agent.agent_reward_function
    kept = {key: value for key, value in derived.items() if key not in sweep.model_fields_set}
    completed = sweep.model_copy(update=kept)
    if work and completed.metric == "step_time":
        path = ("sweep", "metric") if "metric" in sweep.model_fields_set else ("agent_metrics", 0)
        findings.warn(
            path,
            f"step_time cannot compare points that differ in {', '.join(work)}: the smallest step wins; "
            "use tokens_per_gpu, the default there",
        )
    return completed


def _seed(agent: AgentFields, findings: Findings) -> dict[str, int]:
    config = agent.agent_config or {}
    for key in config:
        if key != _SEED:
            findings.warn(("agent_config", key), "has no effect: points are drawn at random, or all are run")
    seed = config.get(_SEED)
    if seed is None:
        return {}
    if isinstance(seed, bool) or not isinstance(seed, int):
        findings.problem(("agent_config", _SEED), "must be a whole number")
        return {}
    return {"seed": seed}


def _metric(metrics: Sequence[str], findings: Findings) -> dict[str, MetricName]:
    path = ("agent_metrics", 0)
    if metrics[0] not in METRICS:
        findings.problem(path, f"{metrics[0]!r} is not a metric of this workload; {unknown_key(metrics[0], METRICS)}")
        return {}
    for index, metric in enumerate(metrics[1:], 1):
        findings.warn(("agent_metrics", index), f"{metric!r} has no effect: the best point is best in the first metric")
    return {"metric": METRICS[metrics[0]]}


def split_drawn(
    axes: Sequence[SweepAxis], agent: AgentFields, findings: Findings
) -> tuple[tuple[SweepAxis, ...], tuple[SweepAxis, ...]]:
    """The axes that are swept over, and those that `[env_params]` samples for each point."""
    parameters = agent.env_params
    by_name = {axis.name: axis for axis in axes}
    drawn = []
    for name, parameter in parameters.items():
        path = ("env_params", name)
        if name not in by_name:
            findings.problem(
                path, "is not a list in [cmd_args], and a single value is not sampled; write its values there"
            )
            continue
        axis = by_name[name]
        if parameter.encoding is not None:
            findings.warn((*path, "encoding"), "has no effect: no agent learns from what was drawn")
        if reason := _wrong_weights(parameter.weights, len(axis.values)):
            findings.problem((*path, "weights"), reason)
        drawn.append(axis.model_copy(update={"weights": parameter.weights}))
    if parameters and agent.agent == GRID_SEARCH:
        findings.warn(("env_params",), "each point of the grid gets its own draw; CloudAI's grid_search refuses them")
    return tuple(axis for axis in axes if axis.name not in parameters), tuple(drawn)


def _wrong_weights(weights: tuple[float, ...] | None, values: int) -> str | None:
    if weights is None:
        return None
    if len(weights) != values or values < 2:
        return f"has {len(weights)} weights for {values} values; write one for each of two values or more"
    if not all(math.isfinite(weight) and weight >= 0 for weight in weights):
        return "must be finite and not negative"
    if abs(sum(weights) - 1) > _WEIGHT_TOLERANCE:
        return f"sum to {sum(weights):g}, not to 1"
    return None
