"""Final states of flow runs: their type and name say what the night was, so that a bad night is never green."""

from typing import Any

from prefect.client.schemas.objects import State
from prefect.states import Completed, Failed

from nightbridge.errors import InvalidInput, NightbridgeError
from nightbridge.models import NightReport, Verdict, VerdictStatus
from nightbridge.regression.bisect_result import BisectResult


def state_of_verdict(verdict: Verdict) -> State[Any]:
    """Completed for passed, improved and no baseline, Failed for the rest; named after the verdict."""
    kind = Completed if verdict.exit_code == 0 else Failed
    return kind(name=_title(verdict.status), message="; ".join(verdict.reasons) or None, data=verdict)


def state_of_night(report: NightReport) -> State[Any]:
    """Completed when every verdict is good, else Failed; named after the worst, with the tests it befell."""
    worst = next(v for v in report.verdicts if v.exit_code == report.exit_code)
    bad = [f"{verdict.test_id}: {verdict.status}" for verdict in report.verdicts if verdict.exit_code]
    kind = Failed if bad else Completed
    message = ", ".join(bad) or f"{len(report.verdicts)} test(s) passed"
    return kind(name=_title(worst.status) if bad else "Passed", message=message, data=report)


def state_of_error(error: NightbridgeError) -> State[Any]:
    """Failed, for a night that has no report; whoever asks for its result gets the error."""
    status = VerdictStatus.INVALID if isinstance(error, InvalidInput) else VerdictStatus.INFRASTRUCTURE
    return Failed(name=_title(status), message=str(error), data=error)


def result_of(state: State[Any]) -> Any:
    """What a flow returned, also when it ended in a Failed state that it chose itself.

    A state that came back from Prefect's server holds only where its result is kept. That is what a flow ends with,
    too, when the server's answer to its last state was lost and the state was sent again.

    Raises:
        Exception: What the flow died of, when it did not choose its end.
    """
    returned = state.result(raise_on_failure=False)
    return returned if isinstance(returned, Verdict | NightReport | BisectResult) else state.result()


def _title(status: VerdictStatus) -> str:
    return status.value.replace("_", " ").title().replace(" ", "")
