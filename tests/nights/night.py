"""One night of a deployment, asked for as the Prefect UI asks for it, and what has to be true of it whatever failed."""

import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from nightbridge.embedded.jobs import all_jobs
from nightbridge.models import ClusterSettings, JobStatus
from nightbridge.slurm.local import LocalCluster
from tests.nights.installation import Installation, read_json, wait_for

DEPLOYMENT = "nightly-regression/nightly"

STAGES = {
    "begin": "Beginning flow run",
    "clone": "Task run 'prepare' - Finished",
    "validate": "Task run 'container' - Finished",
    "submit": "Task run 'validate' - Finished",
    "watch": "Task run 'submit' - Finished",
    "harvest": "Task run 'watch' - Finished",
    "compare": "Task run 'harvest' - Finished",
    "report": "Task run 'compare' - Finished",
}
"""The stages in which a fault may come, and what a night's log says when the first of its runs gets there."""

GOOD = {"passed", "no_baseline", "insufficient_data"}
GOOD_STATES = ("Passed", "NoBaseline", "InsufficientData")

ENDED = frozenset({"COMPLETED", "FAILED", "CRASHED", "CANCELLED"})


@dataclass(frozen=True)
class Night:
    """A flow run of the nightly deployment.

    Attributes:
        installed: Where it was deployed.
        workspace: The site's workspace.
        night: Night id.
        tests: Ids of its tests.
        flow_run: The flow run's id.
        log_from: How much had been written to each worker's log before.
    """

    installed: Installation
    workspace: Path
    night: str
    tests: tuple[str, ...]
    flow_run: str
    log_from: Mapping[Path, int]

    # --- what it does -------------------------------------------------------------------------------------------------

    @property
    def state(self) -> tuple[str, str]:
        """Type and name of the flow run's state."""
        run = self.installed.server.ask("GET", f"flow_runs/{self.flow_run}")
        return run["state_type"], run["state_name"]

    @property
    def state_history(self) -> list[str]:
        """The names of all its states, the first first."""
        states = self.installed.server.ask("GET", f"flow_run_states/?flow_run_id={self.flow_run}")
        return [state["name"] for state in sorted(states, key=lambda state: state["timestamp"])]

    @property
    def run_states(self) -> set[str]:
        """The names of the states of the runs that the night made."""
        body = {"flow_runs": {"parent_flow_run_id": {"any_": [self.flow_run]}}}
        return {run["state_name"] for run in self.installed.server.ask("POST", "flow_runs/filter", body)}

    @property
    def cluster(self) -> LocalCluster:
        return LocalCluster(ClusterSettings(), self.workspace / "cluster")

    @property
    def jobs(self) -> list[JobStatus]:
        """Every job of the night that there has been."""
        jobs = self.cluster.states([job.job_id for job in all_jobs(self.cluster.root)]).values()
        return [job for job in jobs if f"-{self.night}-" in job.name]

    @property
    def log(self) -> str:
        """What the workers have written since the night was asked for."""
        return "".join(self._log_of(path) for path in sorted(self.installed.folder.glob("worker-*.log")))

    def _log_of(self, path: Path) -> str:
        with path.open("rb") as stream:
            stream.seek(self.log_from.get(path, 0))
            return stream.read().decode(errors="replace")

    def wait_until(self, stage: str, *, patience: float = 300.0) -> None:
        """Wait until the first run of the night is in a stage, looking often: some take no tenth of a second."""
        deadline = time.monotonic() + patience
        while STAGES[stage] not in self.log:
            assert time.monotonic() < deadline, f"no run came to {stage}: {self.state}\n{self.log[-3000:]}"
            time.sleep(0.05)

    def from_here(self) -> "Night":
        """The same, with what its log says from now on."""
        return replace(self, log_from=log_sizes(self.installed))

    def wait_for_end(self, *, patience: float = 300.0) -> tuple[str, str]:
        """Wait until the flow run has ended, and return its state."""
        wait_for(f"end of night {self.night}", lambda: self.state[0] in ENDED, patience=patience)
        return self.state

    def wait_for_state(self, *names: str, patience: float = 300.0, meanwhile: Callable[[], object] = int) -> None:
        """Wait until the flow run is in a state of one of these names, and do something in the meantime."""
        try:
            wait_for(f"state {' or '.join(names)}", lambda: meanwhile() or self.state[1] in names, patience=patience)
        except AssertionError as error:
            raise AssertionError(f"{error}: {self.state_history}\n{self.log[-4000:]}") from None

    def wait_for_times(self, times: int, name: str, *, meanwhile: Callable[[], object] = int) -> None:
        """Wait until the flow run has been in the state of this name so often."""
        wait_for(f"state {name} no. {times}", lambda: meanwhile() or self.state_history.count(name) >= times)

    def passes(self, *, patience: float = 300.0, meanwhile: Callable[[], object] = int) -> None:
        """Wait until the night is over; it has to have passed, and to have left what a night has to leave."""
        self.wait_for_state(*GOOD_STATES, patience=patience, meanwhile=meanwhile)
        self.keeps_its_promise()

    def processes(self) -> list[int]:
        """The processes of its flow run, and of nothing else."""
        return [pid for pid in _pids() if f"PREFECT__FLOW_RUN_ID={self.flow_run}" in environment_of(pid)]

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to the process of its flow run."""
        for pid in self.processes():
            with suppress(ProcessLookupError):  # a git or launcher that has just ended
                os.kill(pid, number)

    def abandon(self) -> None:
        """End whatever of it still goes on, so that the next one has the machine."""
        if self.state[0] not in ENDED:
            self.installed.server.prefect("flow-run", "delete", self.flow_run)
        self.kill()
        for job in self.jobs:
            self.cluster.cancel(job.job_id)

    # --- what a person does to it in the UI ---------------------------------------------------------------------------

    def cancel(self) -> None:
        self._set_state({"type": "CANCELLING", "name": "Cancelling"}, force=True)

    def retry(self) -> None:
        self._set_state({"type": "SCHEDULED", "name": "AwaitingRetry", "message": "Retry from the UI"}, force=False)

    def suspend(self, seconds: int = 300) -> None:
        over = (datetime.now(UTC) + timedelta(seconds=seconds)).isoformat()
        details = {"pause_timeout": over, "pause_reschedule": True}
        self._set_state({"type": "PAUSED", "name": "Suspended", "state_details": details}, force=True)

    def resume(self) -> None:
        answer = self.installed.server.ask("POST", f"flow_runs/{self.flow_run}/resume")
        assert answer["status"] == "ACCEPT", answer

    def _set_state(self, state: dict[str, Any], *, force: bool) -> None:
        answer = self.installed.server.ask(
            "POST", f"flow_runs/{self.flow_run}/set_state", {"state": state, "force": force}
        )
        assert answer["status"] == "ACCEPT", answer

    # --- what has to be true of it ------------------------------------------------------------------------------------

    def verdicts(self) -> dict[str, str]:
        """Each test's verdict in the store."""
        found = [read_json(path) for path in self.stored(f"runs/*/{self.night}/*/verdict.json")]
        return {verdict["test_id"]: verdict["status"] for verdict in found}

    def stored(self, pattern: str) -> list[Path]:
        return sorted((self.workspace / "store").glob(pattern))

    def events(self, name: str) -> list[dict[str, Any]]:
        """What the night's events of this name say."""
        told = [event["payload"] for event in self.installed.events(name)]
        return [event for event in told if event["night"] == self.night]

    def ends(self) -> list[str]:
        """How the night ended, by its events."""
        return [event["end"] for event in self.events("nightbridge.night")]

    def keeps_its_promise(self) -> None:
        """One job for each run, a verdict for each test, one report, an event of each verdict and the end, no process."""
        assert self.verdicts().keys() == set(self.tests)
        assert set(self.verdicts().values()) <= GOOD, self.verdicts()
        assert Counter(job.name for job in self.jobs) == dict.fromkeys(self.job_names(), 1)
        (page,) = self.stored(f"reports/{self.night}/*.html")
        assert all(test in page.read_text() for test in self.tests)
        (end,) = self.told_ends()
        assert end in GOOD
        wait_for("one event of each verdict", lambda: self.told_verdicts() == sorted(self.tests), patience=60)
        self.leaves_nothing()

    def told_ends(self) -> list[str]:
        """How the night ended, by the events of it, once there is one; Prefect's server writes them every 5 s."""
        return wait_for("event of the night's end", self.ends, patience=60)

    def told_verdicts(self) -> list[str]:
        """The tests whose verdicts its events told, each as often as it was told."""
        return sorted(event["test_id"] for event in self.events("nightbridge.verdict"))

    def leaves_nothing(self) -> None:
        """Wait until no process of the night is left; one that had something to tell a server that was away may be late."""
        deadline = time.monotonic() + 120
        while left := list(self._left()):
            assert time.monotonic() < deadline, f"left behind: {left}"
            time.sleep(0.2)

    def job_names(self) -> list[str]:
        """What the jobs of the night's first attempts have to be called: a verdict's run key says which."""
        keys = [path.parent.name for path in self.stored(f"runs/*/{self.night}/*/verdict.json")]
        return sorted(f"{key}-a1" for key in keys)

    def _left(self) -> Iterator[str]:
        for pid in _pids():
            command = _read(pid, "cmdline").replace("\0", " ")
            if str(self.workspace) in command or f"PREFECT__FLOW_RUN_ID={self.flow_run}" in environment_of(pid):
                yield f"{pid}: {command[:200]}"


def start_night(
    installed: Installation,
    workspace: Path,
    night: str,
    tests: Sequence[str],
    *,
    scenario: Path,
    site: Path,
    job_variables: Mapping[str, Any],
) -> Night:
    """Ask for a night, as "Custom run" of the deployment does in the UI."""
    log_from = log_sizes(installed)
    deployment = installed.server.ask("GET", f"deployments/name/{DEPLOYMENT}")
    given = {"scenario": str(scenario), "system": str(site), "night": night}
    # The form offers the deployment's own scenarios; a caller of the API may name another file.
    asked = {
        "state": {"type": "SCHEDULED", "message": "Run from the UI"},
        "parameters": given,
        "job_variables": job_variables,
        "enforce_parameter_schema": False,
    }
    made = installed.server.ask("POST", f"deployments/{deployment['id']}/create_flow_run", asked)
    return Night(installed, workspace, night, tuple(tests), made["id"], log_from)


def log_sizes(installed: Installation) -> dict[Path, int]:
    """How much each worker has written until now."""
    return {path: path.stat().st_size for path in installed.folder.glob("worker-*.log")}


def environment_of(pid: int) -> list[str]:
    """A process's environment as it was started, `NAME=value`."""
    return _read(pid, "environ").split("\0")


def _read(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_text(errors="replace")
    except OSError:  # it has ended since
        return ""


def _pids() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
