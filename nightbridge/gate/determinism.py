"""Determinism: whether a deterministic test still computes the losses that it computed, bit for bit.

A test is deterministic where it says so (`[gate] deterministic = true`), or where its last good nights, `MIN_SAME` at
least, have one digest of all losses, and no night since has computed these and others. Such a test has no noise: any
other digest is news, however little the losses are apart, and no band sees that. It is a regression until the losses
are the same again or a user accepts them. One run of several that computes something else makes a test that was only
found to be deterministic one that is not; a test that declares it is unstable then. Where a night's losses cannot be
compared, such as the log's with TensorBoard's, a test that declares it does not pass.

Where a control arm ran tonight and does not compute what its own night did either, it is the cluster.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from nightbridge.history.nightly_values import Agreement, arms_of, nights_of, repeats_of
from nightbridge.history.rows import HistoryRow, comparable_digest, loss_source, other_losses
from nightbridge.models import Verdict, VerdictStatus
from nightbridge.numbers import format_count

if TYPE_CHECKING:
    from nightbridge.goldens.parity import Curve

MIN_SAME = 5
"""Good nights with the same losses from which on a test is found to be deterministic."""


class Numerics(NamedTuple):
    """What tonight's digests say of a deterministic test: how many runs have another one than the last good nights.

    `is_worse`: whether that is the test's, and lasting as far as tonight can tell. `stands`: whether it was so last
    night. `reason`: what differs, in words; empty where nothing does. `is_unknown`: whether it is not known of a test
    that declares it whether the losses are the same.
    """

    agreement: Agreement
    is_worse: bool = False
    stands: bool = False
    reason: str = ""
    is_unknown: bool = False


def compare_numerics(
    own: HistoryRow,
    history: Sequence[HistoryRow],
    good: Sequence[HistoryRow],
    declared: bool | None,
    losses: "Callable[[str], Curve]",
) -> Numerics | None:
    """Compare tonight's losses with those of the last good nights; None where they are the same.

    So it is where the test is not deterministic, or does not declare it and they cannot be compared.

    Args:
        own: Tonight's run.
        history: Rows of its series.
        good: Those of them whose losses tonight's may be compared with, oldest first.
        declared: What the test says of itself; None for nothing.
        losses: The loss by step of the run that is stored below a prefix; read only where digests differ.
    """
    if declared is False or own.resumed:
        return None
    tonights = comparable_digest(own.summary)
    known = [row for row in good if other_losses(tonights, row.summary) is not None]
    # A log rounds: that its losses are another log's does not prove that they are what TensorBoard had before.
    had_board = "tensorboard" in (loss_source(row.summary.loss_digest or "") for row in good)
    is_unknown = bool(declared and good) and (not known or (had_board and loss_source(tonights) == "log"))
    nothing_else = Numerics(Agreement(0, 0), is_unknown=True) if is_unknown else None
    if not known:
        return nothing_else
    expected = comparable_digest(known[-1].summary)
    compared = [(row, other_losses(expected, row.summary)) for row in (own, *repeats_of(own, history))]
    apart = [row for row, differs in compared if differs]
    if not apart:
        return nothing_else
    same = next((at for at, row in enumerate(reversed(known)) if other_losses(expected, row.summary)), len(known))
    if not declared and (same < MIN_SAME or _computed_both(expected, known[-same], own, history)):
        return None
    agreement = Agreement(sum(differs is not None for _row, differs in compared), len(apart))
    if moved := _moved_control(own, history):
        again = f"and those of {moved}, run again beside them, are not either: the cluster, no regression"
        return Numerics(agreement, reason=f"losses are not the same, bit for bit, {again}")
    lasting = bool(declared) or agreement.is_worse
    earlier = (row for row in history if is_of_earlier_night(row, own) and not row.repeat)
    last = max(earlier, key=lambda row: row.order)
    which = f" in {agreement}" if agreement.runs > 1 else ""
    after = f"as in the last {format_count(same, 'good night')}" if same > 1 else f"as in {known[-1].night}"
    return Numerics(
        agreement,
        is_worse=lasting,
        stands="loss_curve" in last.worse,
        reason=f"losses are not the same{which}, bit for bit, {after}"
        + _first_difference(losses(known[-1].prefix), losses(apart[0].prefix))
        + ("" if lasting else ": the test is not deterministic"),
    )


def is_of_earlier_night(row: HistoryRow, own: HistoryRow) -> bool:
    """Whether a row is of a night before a run's; a night whose name has no date is as old as its runs."""
    return row.night != own.night and row.order < own.order


def with_unknown(verdict: Verdict, found: Numerics | None) -> Verdict:
    """The same; no pass of a test that declares that it is deterministic where nobody knows whether it was."""
    if found is None or not found.is_unknown or verdict.status not in _PASSES:
        return verdict
    reason = f"whether the losses are the same, bit for bit, is unknown: {_WHY_UNKNOWN}"
    update = {"status": VerdictStatus.INSUFFICIENT_DATA, "reasons": (*verdict.reasons, reason)}
    return verdict.model_copy(update=update)


_WHY_UNKNOWN = "tonight's run or the good ones lack TensorBoard's losses of a run without a restart, and a log rounds"
_PASSES = frozenset({VerdictStatus.PASSED, VerdictStatus.IMPROVED, VerdictStatus.INSUFFICIENT_DATA})


def _computed_both(expected: str, since: HistoryRow, own: HistoryRow, history: Sequence[HistoryRow]) -> bool:
    """Whether runs of one night since then, of the same pins, had the expected digest and another one."""
    between = (row for row in history if row.night == since.night or row.order > since.order)
    nights = nights_of(row for row in between if is_of_earlier_night(row, own))
    return any({True, False} <= {other_losses(expected, run.summary) for run in night.runs} for night in nights)


def _moved_control(own: HistoryRow, history: Sequence[HistoryRow]) -> str:
    """The night of the last good point, where most of its runs tonight do not compute what it did; empty else."""
    bases = {row.run_key: row for row in history}
    arms = [row for row in arms_of(own, history) if row.arm and row.arm.role == "control"]
    pairs = [(row, bases[row.arm.reference]) for row in arms if row.arm and row.arm.reference in bases]
    found = [(base.night, other_losses(comparable_digest(base.summary), row.summary)) for row, base in pairs]
    moved = [night for night, differs in found if differs]
    return moved[0] if 2 * len(moved) > sum(differs is not None for _night, differs in found) else ""


def _first_difference(expected: "Curve", found: "Curve") -> str:
    """Where two curves part, in words; empty where one of them is gone."""
    from nightbridge.goldens.parity import compare_curves  # numpy is slow to import, and hardly ever needed here

    parity = compare_curves(expected, found)
    if parity.first_difference is None:
        return f" ({parity.gaps[0]})" if expected and found and parity.gaps else ""
    step = parity.first_difference
    return f": first at iteration {step}, {found[step]:.9g} against {expected[step]:.9g}"
