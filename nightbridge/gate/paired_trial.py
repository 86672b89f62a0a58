"""A change that is tried before it lands: pairs of runs with and without it, weighed as the control arm's are.

Each pair runs both on the same nodes, one after the other, and which comes first alternates (ABBA), so that what the
cluster does moves both. Pairs are run until the step time is decided and no other metric looks suspicious: worse or
better is what a sequential test proves, as good is what makes a change of the smallest size that counts unlikely.
"""

import hashlib
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Literal

from pydantic import Field

from nightbridge.errors import InvalidInput
from nightbridge.gate.control_arm import CLEAR, MAX_TIMES, OPEN, PROOF, arm_of, change_looked_for, weigh
from nightbridge.history.nightly_values import BROKEN, nights_of, run_value
from nightbridge.history.rows import HistoryRow, measured, row_of
from nightbridge.models import (
    NO_VALUE,
    Arm,
    GatePolicy,
    HarvestPolicy,
    Model,
    RunRecord,
    RunSpec,
    StoredModel,
    Verdict,
    VerdictStatus,
)
from nightbridge.models.metrics import COLUMNS, METRIC_BY_NAME, Metric
from nightbridge.numbers import format_change, format_count, format_value
from nightbridge.repos.git import pull_request_ref

CORE_FOLDER = "3rdparty/Megatron-LM"
"""Where Megatron-Bridge has Megatron-Core."""

TrialAnswer = Literal["as good", "better", "worse", "fails", "open", "control fails"]

TRIAL_EXIT_CODES: Mapping[TrialAnswer, int] = {
    "as good": 0,
    "better": 0,
    "worse": 1,
    "open": 1,
    "fails": 3,
    "control fails": 4,
}

QUIET_SIGMAS = 5.0
"""Standard deviations of a test without a history that are its widest band: quieter than a night takes it to be, whose
alarm wakes people. Whoever tries a change waits for few pairs."""

_HEADLINES: Mapping[TrialAnswer, str] = {
    "as good": "no regression",
    "better": "improves",
    "worse": "regresses",
    "fails": "fails, and the control does not",
    "open": "undecided: more pairs would be needed",
    "control fails": "nothing is known: the control fails, too",
}


class ProposedChange(Model):
    """What is tried, beside what the test's file says."""

    bridge: str | None = Field(None, description="Ref of Megatron-Bridge: branch, tag, commit, or a pull request.")
    core: str | None = Field(None, description="Ref of its submodule Megatron-LM.")
    image: str | None = Field(None, description="Container image.")

    def __str__(self) -> str:
        named = {"Megatron-Bridge": self.bridge, "Megatron-LM": self.core, "image": self.image}
        return ", ".join(f"{name} {value}" for name, value in named.items() if value)


class TrialArm(Model):
    """One run of a trial."""

    arm: Arm
    run_key: str
    status: VerdictStatus
    reason: str = ""
    commit: str = Field("", description="Of Megatron-Bridge.")
    nodes: str = ""
    gpu_hours: float = 0.0
    values: dict[str, float] = Field({}, description="By metric.")


class Finding(Model):
    """What the pairs say of a metric."""

    metric: str
    kind: Literal["as good", "better", "worse", "open"]
    new: float = Field(description="Median, in the metric's unit.")
    control: float
    difference: float = Field(description="Mean over the pairs, relative, positive for worse.")
    pairs: int
    score: float = Field(description="Log-likelihood ratio for its being worse, or better.")


class Trial(StoredModel):
    """A trial: its runs so far, and what they say."""

    trial_id: str
    test_id: str
    change: ProposedChange
    noise: dict[str, float] = Field({}, description="Of single runs, relative, by metric, as the history has it.")
    arms: tuple[TrialArm, ...] = ()
    findings: tuple[Finding, ...] = ()
    answer: TrialAnswer = "open"

    @property
    def gpu_hours(self) -> float:
        """What all runs cost."""
        return sum(arm.gpu_hours for arm in self.arms)


def plan_trial(run: RunSpec, change: ProposedChange, now: datetime) -> tuple[Trial, RunSpec]:
    """A trial's name, and its control: the file's run, without its own confirmation and checkpoints.

    The same question has the same name all day, so that an interrupted trial is resumed; see `interrupted` for later.
    Which commits and which image it is about is only known at the site: see `of_commits`.

    Raises:
        InvalidInput: Nothing is changed, or the test does not check out the submodule that is to change.
    """
    if not str(change):
        raise InvalidInput("nothing to try", subject=run.test.id, advice="Name --bridge, --core or --image")
    if change.core and not run.test.megatron_bridge.init_submodules:
        raise InvalidInput(
            "the test does not check out submodules: its image brings its own Megatron-Core",
            subject=run.test.id,
            advice="Set init_submodules = true in [[git_repos]], or try another --image",
        )
    identity = f"{run.test.model_dump_json()}\n{change.model_dump_json()}"
    name = f"{now:%Y-%m-%d}-try-{hashlib.sha256(identity.encode()).hexdigest()[:8]}"
    test = run.test.model_copy(
        update={
            "harvest": HarvestPolicy(checkpoint="none"),
            "gate": run.test.gate.model_copy(update={"pairs": 0, "control": "off"}),
        }
    )
    control = run.model_copy(update={"night": name, "test": test, "after": ()})
    return Trial(trial_id=name, test_id=run.test.id, change=change), control


def of_commits(trial: Trial, control: RunSpec, meant: Mapping[str, str]) -> tuple[Trial, RunSpec]:
    """A trial and its control, named for what the change's refs and tag mean: pushed again, it is another change.

    What the test's file names beside the change may move meanwhile: all runs of a trial have the first one's.
    """
    digest = hashlib.sha256(f"{trial.trial_id[-8:]} {sorted(meant.items())}".encode()).hexdigest()[:8]
    name = f"{trial.trial_id[:-8]}{digest}"
    return trial.model_copy(update={"trial_id": name}), control.model_copy(update={"night": name})


def noise_of_history(rows: Sequence[HistoryRow], gate: GatePolicy) -> dict[str, float]:
    """The noise of single runs by metric, as the good nights of a series have it; a short history's is bounded."""
    from nightbridge.history.noise import noise_of_runs

    good = [night.own.summary for night in nights_of(rows) if night.is_good]
    found = {}
    for metric in COLUMNS:
        values = [value for summary in good if (value := measured(metric, summary)) is not None]
        found[metric.name] = noise_of_runs(values, metric.threshold(gate) / QUIET_SIGMAS, gate.cold_start)
    return found


def trial_arm(control: RunSpec, change: ProposedChange, number: int) -> RunSpec:
    """A run of a trial by its number, from 1: new, control, control, new, and so on."""
    arm = arm_of(number, control.run_key)
    run = control.model_copy(update={"repeat": number, "arm": arm})
    if arm.role == "control":
        return run
    test, repo = run.test, run.test.megatron_bridge
    bridge = pull_request_ref(change.bridge, repo.url) if change.bridge else repo.commit
    core = {CORE_FOLDER: pull_request_ref(change.core, repo.url)} if change.core else {}
    changed = repo.model_copy(update={"commit": bridge, "submodules": {**repo.submodules, **core}})
    update = {
        "git_repos": tuple(changed if each == repo else each for each in test.git_repos),
        "cmd_args": {**test.cmd_args, **({"container_image": change.image} if change.image else {})},
    }
    return run.model_copy(update={"test": test.model_copy(update=update)})


def arm_result(run: RunSpec, verdict: Verdict, record: RunRecord | None) -> TrialArm:
    """What a finished run of a trial measured; nothing where it did not do all its steps, whoever ended it."""
    assert run.arm is not None
    reason = verdict.reasons[0] if verdict.reasons else ""
    found = TrialArm(arm=run.arm, run_key=run.run_key, status=verdict.status, reason=reason)
    if record is None:
        return found
    row = row_of(record, verdict)
    update = {
        "commit": row.megatron_bridge.commit,
        "nodes": row.nodes,
        "gpu_hours": row.gpu_hours or 0.0,
        "values": {metric.name: value for metric in COLUMNS if (value := run_value(row, metric)) is not None},
    }
    return found.model_copy(update=update)


def judged(trial: Trial, arms: Sequence[TrialArm], gate: GatePolicy) -> Trial:
    """The trial with all of its runs so far, and their answer."""
    findings = tuple(_findings(arms, gate, trial.noise))
    return trial.model_copy(update={"arms": tuple(arms), "findings": findings, "answer": _answer(arms, findings)})


def needs_another_pair(trial: Trial, gate: GatePolicy, most_pairs: int | None = None) -> bool:
    """Whether another pair is to be run.

    Args:
        trial: With the runs so far.
        gate: The test's policy: how many pairs there are at least, and how many times as many at most.
        most_pairs: Pairs at most, in place of the policy's.
    """
    least = max(gate.pairs, 1)
    started = len(trial.arms) // 2
    if started < min(least, most_pairs or least):
        return True
    if started >= (most_pairs or MAX_TIMES * least) or trial.answer in ("fails", "control fails", "worse"):
        return False
    by_name = {finding.metric: finding for finding in trial.findings}
    speed = by_name.get("step_time")
    suspicious = any(one.kind == "open" and one.score > OPEN for one in trial.findings)
    return speed is None or speed.kind == "open" or suspicious


def markdown(trial: Trial) -> str:
    """The answer as a comment on a pull request."""
    headline, lost = _HEADLINES[trial.answer], [arm for arm in trial.arms if arm.status in BROKEN | NO_VALUE]
    if trial.answer == "control fails" and all(arm.arm.role == "control" for arm in lost):
        headline = "runs, and the control fails: there is nothing to compare with"
    pairs = format_count(len(trial.arms) // 2, "pair")
    nodes = ", ".join(sorted({arm.nodes for arm in trial.arms if arm.nodes}))
    lines = [
        f"### nightbridge: `{trial.test_id}` {headline}",
        "",
        f"Tried: {trial.change}, beside the test as its file says, in {pairs} on the same nodes.",
    ]
    if trial.findings:
        lines += ["", "| metric | control | change | difference | pairs | |", "|---|---:|---:|---:|---:|---|"]
    for one in trial.findings:
        metric = METRIC_BY_NAME[one.metric]
        shown = [format_value(value, metric.unit) for value in (one.control, one.new)]
        difference = format_change(metric.sign * one.difference)
        lines.append(f"| {metric.label} | {' | '.join(shown)} | {difference} | {one.pairs} | {one.kind} |")
    for arm in lost:
        lines += ["", f"Pair {arm.arm.pair}, {arm.arm.role}: {arm.status}: {_code(arm.reason)}"]
    commits = {arm.arm.role: arm.commit[:12] for arm in trial.arms if arm.commit}
    pinned = ", ".join(f"{role} at Megatron-Bridge {commit}" for role, commit in commits.items())
    about = "; ".join(filter(None, (pinned, f"on {nodes}" if nodes else "", f"`{trial.trial_id}`")))
    runs = format_count(len(trial.arms), "run")
    lines += ["", f"<sub>{runs}, {trial.gpu_hours:.2f} GPU-hours; {about}</sub>", ""]
    return "\n".join(lines)


def _code(text: str) -> str:
    """A text from outside as code in one line of Markdown: a terminal shows it as it is, and GitHub notifies nobody."""
    line = " ".join(text.split())
    ticks = "`" * (1 + max(map(len, re.findall("`+", line)), default=0))
    space = " " * ("`" in line)
    return f"{ticks}{space}{line}{space}{ticks}" if line else ""


def _findings(arms: Sequence[TrialArm], gate: GatePolicy, noise: Mapping[str, float]) -> Iterator[Finding]:
    by_pair: dict[int, dict[str, TrialArm]] = {}
    for arm in arms:
        by_pair.setdefault(arm.arm.pair, {})[arm.arm.role] = arm
    whole = [pair for pair in by_pair.values() if len(pair) == 2]
    for metric in COLUMNS:
        values = [(pair["new"].values.get(metric.name), pair["control"].values.get(metric.name)) for pair in whole]
        known = [(new, control) for new, control in values if new is not None and control]
        if known:
            yield _finding(metric, known, gate, noise.get(metric.name))


def _finding(metric: Metric, known: Sequence[tuple[float, float]], gate: GatePolicy, noise: float | None) -> Finding:
    differences = [metric.sign * (new - control) / abs(control) for new, control in known]
    noise = metric.threshold(gate) / QUIET_SIGMAS if noise is None else noise
    change = change_looked_for(metric, gate)
    worse, better = (weigh([[way * one for one in differences]], noise, change) for way in (1, -1))
    kind: Literal["as good", "better", "worse", "open"] = "open"
    if worse.score >= PROOF:
        kind = "worse"
    elif better.score >= PROOF:
        kind = "better"
    elif worse.clear >= CLEAR:
        kind = "as good"
    return Finding(
        metric=metric.name,
        kind=kind,
        new=statistics.median(new for new, _ in known),
        control=statistics.median(control for _, control in known),
        difference=statistics.fmean(differences),
        pairs=len(known),
        score=max(worse.score, better.score),
    )


def _answer(arms: Sequence[TrialArm], findings: Sequence[Finding]) -> TrialAnswer:
    broken = [arm for arm in arms if arm.status in BROKEN]
    new, control = ([arm.status for arm in broken if arm.arm.role == role] for role in ("new", "control"))
    if _is_broken(control):
        return "control fails"
    if _is_broken(new) and not control:
        return "fails"
    kinds = {finding.metric: finding.kind for finding in findings}
    if "worse" in kinds.values():
        return "worse"
    if kinds.get("step_time", "open") == "open" or new:
        return "open"
    return "better" if kinds["step_time"] == "better" else "as good"


def _is_broken(failures: Sequence[VerdictStatus]) -> bool:
    """A single failure may be the cluster's; a run that cannot even begin is its configuration's."""
    return len(failures) > 1 or VerdictStatus.INVALID in failures
