"""A cluster through pyslurm, in a helper process of its own (see `pyslurm_process`). pyslurm 25.11 with Slurm 25.11.

Slurm's commands have to be on PATH all the same: the launcher and the jobs call them, and what pyslurm cannot do is
done through them, which is said once in the log.
"""

import getpass
import logging
import os
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from nightbridge.errors import LaunchRefused, PermanentError, StatusUnknown, TransientError
from nightbridge.models import ClusterLimits, ClusterSettings, JobStatus
from nightbridge.slurm.command_line import QUERY_TIMEOUT, SUBMIT_TIMEOUT, CommandLineCluster
from nightbridge.slurm.environment import without_slurm
from nightbridge.slurm.protocol import Lookup
from nightbridge.slurm.pyslurm_options import Inexpressible, job_attributes, submit_environment
from nightbridge.slurm.pyslurm_process import PyslurmFault, PyslurmProcess, helper_command
from nightbridge.slurm.sbatch_errors import refusal_of
from nightbridge.slurm.states import ACTIVE, SHORTER_RANGES, TERMINAL, lookup_of, parse_state, statuses_of

log = logging.getLogger(__name__)

# slurm_errno.h of 25.11.
_NO_SUCH_JOB = 2017
_ALREADY_DONE = 2021
_ACCESS_DENIED = 2002
_POLICY = 2050
"""A limit of an association or a QOS; sbatch says which, pyslurm does not."""
_LEAST_SLURM_ERROR = 1000
"""Below are the C library's own numbers: after a cancel pyslurm reads whatever happens to stand there."""

_TEXTS: Mapping[int, str] = {
    1800: "Unable to contact slurm controller (connect failure)",
    1801: "Unable to contact slurm controller (send failure)",
    1802: "Unable to contact slurm controller (receive failure)",
    2000: "Invalid partition name specified",
    2072: "Invalid generic resource (gres) specification",
}
"""sbatch's words for numbers that come without any."""

_DAY = 86_400


class PyslurmCluster:
    """Slurm through pyslurm as a `Cluster`.

    Args:
        settings: The cluster's; `pyslurm_python` names the Python that has pyslurm.
        process: The helper; the one of this process for these settings when unset.

    """

    def __init__(self, settings: ClusterSettings, process: PyslurmProcess | None = None) -> None:
        self.settings = settings
        self._commands = CommandLineCluster(settings)
        self._process = process or helper_of(settings)
        self._told: set[str] = set()

    @property
    def accounting_horizon(self) -> float:
        """Seconds after an intent to submit during which a lookup that finds nothing proves nothing."""
        return self.settings.accounting_horizon

    def submit(self, name: str, script: Path, options: Sequence[str]) -> int:
        """Submit `script` as `name`.

        The job gets this process's environment without the caller's SLURM_* variables, and those that sbatch adds.
        A job with an option that pyslurm cannot express, such as `--mem=0`, is submitted by sbatch.

        Raises:
            StatusUnknown: The helper did not answer, or slurmctld was lost meanwhile; the job may exist.
            JobNotAccepted: Not now (`refusals.REFUSALS`).
            LaunchRefused: Never, with the advice that fits.

        """
        folder = str(Path.cwd())
        try:
            text = script.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise LaunchRefused(f"the batch script cannot be read: {error}", thing=str(script)) from error
        try:
            attributes = job_attributes(name, text, options, folder)
        except Inexpressible as error:
            self._tell(f"pyslurm cannot express {error}: sbatch submits such jobs")
            return self._commands.submit(name, script, options)
        environment = submit_environment(self._environment(), attributes, folder)
        try:
            return int(self._process.call("submit", SUBMIT_TIMEOUT, attributes=attributes, environment=environment))
        except PyslurmFault as fault:
            if fault.errno == _POLICY:  # no job exists: sbatch is asked for the limit's name
                return self._commands.submit(name, script, options)
            if fault.errno is None:
                raise LaunchRefused(f"pyslurm refused the job: {fault.what}", thing=name) from fault
            raise refusal_of(f"Batch job submission failed: {_words(fault)}", name) from fault

    def test_only(self, name: str, options: Sequence[str]) -> LaunchRefused | None:
        """Why Slurm would refuse a job with these options for good, asked of sbatch: pyslurm has no such question."""
        try:
            return self._commands.test_only(name, options)
        except PermanentError as error:
            self._tell(f"whether Slurm would take a job is not asked: {error}")
            return None

    def find(self, name: str) -> Lookup:
        """Find this user's jobs of exactly this name in slurmctld and in accounting, however old.

        A site that forbids long ranges in accounting gets shorter ones; then "however old" is what the site allows.
        """
        uid = os.getuid()
        now = int(time.time())
        starts = (1, *(now - days * _DAY for days in SHORTER_RANGES))
        return lookup_of(
            name,
            self._rows("live", name=name, uid=uid),
            self._rows("past", name=name, uid=uid, starts=starts),
        )

    def states(self, job_ids: Sequence[int]) -> dict[int, JobStatus]:
        """Ask slurmctld and slurmdbd once each about all these jobs."""
        if not job_ids:
            return {}
        ids = sorted(set(job_ids))
        return statuses_of(self.settings.name, job_ids, self._rows("live", ids=ids), self._rows("past", ids=ids))

    def cancel(self, job_id: int) -> None:
        """Cancel a job; one that has ended is no error.

        Raises:
            TransientError: slurmctld did not answer.
            PermanentError: The job is somebody else's.

        """
        try:
            self._process.call("cancel", QUERY_TIMEOUT, job_id=job_id)
        except PyslurmFault as fault:
            number = fault.errno
            if number in (_NO_SUCH_JOB, _ALREADY_DONE) or (number is not None and 0 <= number < _LEAST_SLURM_ERROR):
                return
            if number == _ACCESS_DENIED:
                raise PermanentError(f"Slurm refused: {_words(fault)}", thing=f"job {job_id}") from fault
            raise TransientError(f"the job was not cancelled: {_words(fault)}", thing=f"job {job_id}") from fault

    def limits(self) -> ClusterLimits:
        """What Slurm says about the partition of the settings, else the default one, and whether srun knows pyxis.

        Raises:
            PermanentError: pyslurm cannot be used here.
            TransientError: slurmctld did not answer.

        """
        try:
            listed = self._process.call("limits", QUERY_TIMEOUT)
        except PyslurmFault as fault:
            raise TransientError(f"slurmctld did not answer: {_words(fault)}", thing=self.settings.name) from fault
        default = next((one["name"] for one in listed if one["default"]), None)
        partition = self.settings.partition or default
        ours = next((one for one in listed if one["name"] == partition), None)
        known = ClusterLimits(
            partitions=tuple(one["name"] for one in listed),
            partition=partition,
            account=self.settings.account,
            configured_gpus_per_node=self.settings.gpus_per_node,
            gpus_per_node=self.settings.gpus_per_node,
            has_pyxis=self._commands.has_pyxis(),
        )
        if ours is None:
            return known
        gpus = max((_gpus(gres) for gres in ours["gres"]), default=0)
        return known.model_copy(
            update={
                "accounts": self._accounts(ours),
                "gres": tuple(sorted({name.partition(":")[0] for gres in ours["gres"] for name in gres})),
                "max_nodes": min(ours["nodes"], ours["max_nodes"] or ours["nodes"]),
                "max_time_seconds": None if ours["max_minutes"] is None else 60 * ours["max_minutes"],
                "gpus_per_node": known.gpus_per_node or gpus or None,
            }
        )

    def launch_environment(self) -> dict[str, str]:
        """PATH with the settings' folder first, and SLURM_CONF, where they are set."""
        return self._commands.launch_environment()

    def _environment(self) -> dict[str, str]:
        return without_slurm(os.environ) | self.launch_environment()

    def _rows(self, source: str, **arguments: Any) -> list[JobStatus] | None:
        """What one source knows; None when it does not answer."""
        try:
            return [_status(row) for row in self._process.call(source, QUERY_TIMEOUT, **arguments)]
        except PyslurmFault as fault:
            if fault.errno is None:
                self._tell(f"pyslurm failed at what {source} jobs there are: {fault.what}")
            return None
        except StatusUnknown:
            return None

    def _accounts(self, partition: Mapping[str, Any]) -> tuple[str, ...] | None:
        """The accounts that this user may charge there; None where any will do, or where Slurm does not say."""
        allowed = {account for account in partition["accounts"] if account.upper() != "ALL"} or None
        try:
            if "ASSOCIATIONS" not in self._process.call("enforced", QUERY_TIMEOUT):
                return None if allowed is None or self.settings.account is None else tuple(sorted(allowed))
            rows = self._process.call("associations", QUERY_TIMEOUT, user=getpass.getuser())
        except (PyslurmFault, StatusUnknown):
            return None
        of_user = {account for account, only_there in rows if only_there in ("", partition["name"])}
        if not of_user:
            return None
        return tuple(sorted(of_user if allowed is None else of_user & allowed))

    def _tell(self, message: str) -> None:
        if message not in self._told:
            self._told.add(message)
            log.info("%s: %s", self.settings.name, message)


_helpers: dict[tuple[object, ...], PyslurmProcess] = {}


def helper_of(settings: ClusterSettings) -> PyslurmProcess:
    """The one helper of this process for a Slurm: starting it and its import of pyslurm take a moment."""
    command = helper_command(settings.pyslurm_python)
    environment = without_slurm(os.environ)
    if settings.slurm_conf is not None:
        environment["SLURM_CONF"] = str(settings.slurm_conf)
    return _helpers.setdefault((command, environment.get("SLURM_CONF")), PyslurmProcess(command, environment))


def trouble_with_pyslurm(settings: ClusterSettings, process: PyslurmProcess | None = None) -> str | None:
    """Why pyslurm does not work with this Slurm; None when it does, tried on slurmctld itself."""
    if settings.slurm_conf is not None and not settings.slurm_conf.exists():
        return f"{settings.slurm_conf} is not there"  # Slurm's library would wait a minute for it
    helper = process or helper_of(settings)
    try:
        helper.call("probe", QUERY_TIMEOUT)
    except PyslurmFault as fault:
        return f"slurmctld does not answer pyslurm {helper.version}: {_words(fault)}"
    except (PermanentError, StatusUnknown) as error:
        return error.what
    return None


def _words(fault: PyslurmFault) -> str:
    return fault.what or _TEXTS.get(fault.errno or 0, f"error {fault.errno}")


def _gpus(gres: Mapping[str, int]) -> int:
    return sum(count for name, count in gres.items() if name.partition(":")[0] == "gpu")


def _status(row: Mapping[str, Any]) -> JobStatus:
    state = parse_state(row["state"])
    held_nodes = state in ACTIVE | TERMINAL and bool(row["nodes"])
    by = row.get("cancelled_by", "")
    return JobStatus(
        job_id=row["id"],
        name=row["name"],
        state=state,
        reason="" if row["reason"] == "None" else row["reason"],
        exit_code=row["exit_code"] if state in TERMINAL else None,
        signal=row["signal"] if state in TERMINAL else None,
        submitted_at=_time(row["submitted"]),
        # Of a pending job these are estimates, and of one that was cancelled while pending the time of that.
        started_at=_time(row["started"]) if held_nodes else None,
        ended_at=_time(row["ended"]) if state in TERMINAL else None,
        nodes=row["nodes"] if held_nodes else "",
        cancelled_by=by if row["state"].startswith("CANCELLED") else "",
    )


def _time(seconds: int | None) -> datetime | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC)
