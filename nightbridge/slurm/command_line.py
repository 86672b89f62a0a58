"""A cluster through Slurm's own commands: sbatch, squeue, sacct, scancel, scontrol, sinfo. Slurm 22.05 to 26.05.

Every command gets explicit fields in parsable text, UTC, a time limit, and an environment without the caller's
SLURM_*, SBATCH_*, SQUEUE_* and SACCT_* variables.
"""

import getpass
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from nightbridge.embedded.sbatch_options import parse_time_limit
from nightbridge.errors import (
    InvalidInput,
    LaunchRefused,
    PermanentError,
    StatusUnknown,
    TransientError,
)
from nightbridge.models import ClusterLimits, ClusterSettings, JobStatus
from nightbridge.slurm.environment import without_slurm
from nightbridge.slurm.protocol import Lookup
from nightbridge.slurm.sbatch_errors import known_refusal_of, last_line, refusal_of
from nightbridge.slurm.states import (
    SACCT_FORMAT,
    SHORTER_RANGES,
    SQUEUE_FORMAT,
    TERMINAL,
    lookup_of,
    parse_sacct,
    parse_squeue,
    statuses_of,
)

QUERY_TIMEOUT = 60.0
"""Seconds for one question. Slurm's clients give up by themselves after a few times MessageTimeout (10 s)."""
SUBMIT_TIMEOUT = 120.0
"""Seconds for sbatch, which itself sleeps and tries again while the controller is busy."""


# What a command writes when the question, not the answer, was the trouble: it can be asked again.
_NO_SUCH_JOB = re.compile(r"Invalid job id specified", re.IGNORECASE)
_RANGE_REFUSED = re.compile(r"(query|time) range|MaxQueryTimeRange|too wide", re.IGNORECASE)
_ALREADY_ENDED = re.compile(
    r"Job/step already completing or completed|Invalid job id|Job has already finished", re.IGNORECASE
)

_NOT_CONFIGURED = re.compile(r"Could not establish a configuration source|[Uu]nable to process configuration")
_ALLOWED_ACCOUNTS = re.compile(r"\bAllowAccounts=(\S+)")
# `limits` and `qos` imply it (slurm.conf(5)).
_NEEDS_ASSOCIATION = re.compile(r"^AccountingStorageEnforce\s*=.*\b(associations|limits|qos|all)\b", re.MULTILINE)
_EXIT_CODE = re.compile(r"\bExitCode=(\d+):(\d+)")
_ABOUT_NODES = re.compile(r"configuration (is )?not available")
_NODES_AT_WORK = frozenset({"idle", "mixed", "allocated", "completing"})
# What sinfo puts behind a state, power saving and planned work. A node that does not answer has a `*` and is not there.
_NODE_FLAGS = "~#!%@-+"
_ACCEPTED = re.compile(r"^(?:Submitted batch job )?(\d+)(?:;\S+)?\s*$", re.MULTILINE)
_ASSOCIATIONS = ("sacctmgr", "--noheader", "--parsable2", "show", "associations")
_SQUEUE = ("--noheader", "--all", "--states=all", f"--format={SQUEUE_FORMAT}")
_SACCT = ("--noheader", "--allocations", "--parsable2", f"--format={SACCT_FORMAT}")
# A night crosses midnight and sacct begins at the last one by itself. Sites can forbid long ranges (MaxQueryTimeRange).
_SACCT_STARTS = ("2000-01-01", *(f"now-{days}days" for days in SHORTER_RANGES))


class CommandLineCluster:
    """Slurm's command-line tools as a `Cluster`."""

    def __init__(self, settings: ClusterSettings) -> None:
        self.settings = settings

    @property
    def accounting_horizon(self) -> float:
        """Seconds after an intent to submit during which a lookup that finds nothing proves nothing."""
        return self.settings.accounting_horizon

    def submit(self, name: str, script: Path, options: Sequence[str]) -> int:
        """Submit `script` as `name`.

        The job gets this process's environment without the caller's SLURM_* variables.

        Raises:
            StatusUnknown: sbatch did not end, or says that it lost the controller; the job may exist.
            JobNotAccepted: Not now (`REFUSALS`).
            LaunchRefused: Never (`REFUSALS`), with the advice that fits.

        """
        argv = ("sbatch", "--parsable", "--no-requeue", *options, f"--job-name={name}", str(script))
        answer = self._run(argv, environment=self._environment(), timeout=SUBMIT_TIMEOUT)
        if ids := _ACCEPTED.findall(answer.stdout):
            return int(ids[-1])
        raise refusal_of(answer.stderr or answer.stdout, name)

    def find(self, name: str) -> Lookup:
        """Find this user's jobs of exactly this name in squeue and in sacct, however old.

        A site that forbids long ranges in accounting gets shorter ones; then "however old" is what the site allows.
        """
        user = str(os.getuid())
        live = self._ask(("squeue", *_SQUEUE, f"--user={user}", f"--name={name}"))
        past = self._past_jobs(name, user)
        return lookup_of(name, _rows(parse_squeue, live), _rows(parse_sacct, past))

    def states(self, job_ids: Sequence[int]) -> dict[int, JobStatus]:
        """Ask squeue and sacct once each about all these jobs."""
        if not job_ids:
            return {}
        ids = ",".join(str(job_id) for job_id in sorted(set(job_ids)))
        live = self._ask(("squeue", *_SQUEUE, f"--jobs={ids}"))
        past = self._ask(("sacct", *_SACCT, f"--jobs={ids}"))
        rows = _rows(parse_squeue, live), _rows(parse_sacct, past)
        return statuses_of(self.settings.name, job_ids, *rows, self._with_exit_code)

    def cancel(self, job_id: int) -> None:
        """Cancel a job. scancel's own exit code proves nothing; what it writes does.

        Raises:
            TransientError: slurmctld did not answer.
            PermanentError: The job is somebody else's.

        """
        answer = self._run(("scancel", str(job_id)), environment=self._environment(), timeout=QUERY_TIMEOUT)
        if not answer.stderr.strip() or _ALREADY_ENDED.search(answer.stderr):
            return
        if re.search(r"denied|not permitted", answer.stderr):
            raise PermanentError(f"scancel refused: {last_line(answer.stderr)}", thing=f"job {job_id}")
        raise TransientError(f"scancel failed: {last_line(answer.stderr)}", thing=f"job {job_id}")

    def limits(self) -> ClusterLimits:
        """What Slurm says about the partition of the settings, else the default one, and whether srun knows pyxis.

        The settings' own GPUs of a node win: not every site has its GPUs in Slurm's configuration. Accounts are known
        only where Slurm insists on them, by its associations or by the partition's AllowAccounts.

        Raises:
            InvalidInput: The settings name a slurm.conf that is not there; Slurm's commands would wait a minute for it.
            PermanentError: Slurm is not installed, or not configured, on this machine.
            TransientError: slurmctld did not answer.

        """
        if self.settings.slurm_conf is not None and not self.settings.slurm_conf.exists():
            raise InvalidInput(
                "no such file", thing=str(self.settings.slurm_conf), advice="Correct the cluster's slurm_conf"
            )
        listing = self._must("sinfo", "--noheader", "--all", "--format=%P|%l|%s|%D|%G")
        rows = [line.split("|", 4) for line in listing.splitlines() if line.count("|") >= 4]
        names = tuple(dict.fromkeys(row[0].rstrip("*") for row in rows))
        default = next((row[0].rstrip("*") for row in rows if row[0].endswith("*")), None)
        partition = self.settings.partition or default
        ours = [row for row in rows if row[0].rstrip("*") == partition]
        return ClusterLimits(
            partitions=names,
            partition=partition,
            account=self.settings.account,
            accounts=self._accounts(partition) if ours else None,
            gres=_resource_names(row[4] for row in ours) if ours else None,
            max_nodes=_max_nodes(ours),
            max_time_seconds=_smallest(parse_time_limit(row[1]) for row in ours),
            configured_gpus_per_node=self.settings.gpus_per_node,
            gpus_per_node=self.settings.gpus_per_node
            or max((gpus for row in ours if (gpus := _count_gpus(row[4])) is not None), default=None),
            has_pyxis=self.has_pyxis(),
        )

    def test_only(self, name: str, options: Sequence[str]) -> LaunchRefused | None:
        """Why sbatch would refuse a job with these options for good; None when it would not, or did not say.

        `--test-only` calls a job impossible for which a node is drained or down tonight, though sbatch itself takes it
        and lets it wait (Slurm 22.05). So what it says of nodes counts only where all of them are there.

        Args:
            name: The job, for the message.
            options: As for `submit`. No job is made.

        """
        argv = ("sbatch", "--test-only", "--no-requeue", "--output=/dev/null", *options, "--wrap=true")
        said = self._refusal_of(argv)
        if _ABOUT_NODES.search(said):
            # Asked again, of nodes that all are there: they may have come back just now.
            said = self._refusal_of(argv) if self._all_nodes_are_there() else ""
        return known_refusal_of(said, name)

    def _refusal_of(self, argv: Sequence[str]) -> str:
        """What a command writes when it refuses; empty when it does not, or does not answer."""
        try:
            answer = self._run(argv, environment=self._environment(), timeout=QUERY_TIMEOUT)
        except StatusUnknown:
            return ""
        return answer.stderr if answer.returncode else ""

    def has_pyxis(self) -> bool:
        """Whether srun knows pyxis' options."""
        return "--container-image" in (self._ask(("srun", "--help")) or "")

    def launch_environment(self) -> dict[str, str]:
        """PATH with the settings' folder first, and SLURM_CONF, where they are set."""
        environment = {}
        if self.settings.bin_dir is not None:
            environment["PATH"] = f"{self.settings.bin_dir}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
        if self.settings.slurm_conf is not None:
            environment["SLURM_CONF"] = str(self.settings.slurm_conf)
        return environment

    def _with_exit_code(self, row: JobStatus) -> JobStatus:
        """Add the exit code that slurmctld knows while accounting is behind; asked at a job's end only."""
        if row.state not in TERMINAL or row.exit_code is not None:
            return row
        found = _EXIT_CODE.search(self._ask(("scontrol", "--oneliner", "show", "job", str(row.job_id))) or "")
        return row if found is None else row.model_copy(update={"exit_code": int(found[1]), "signal": int(found[2])})

    def _all_nodes_are_there(self) -> bool:
        states = (self._ask(("sinfo", "--noheader", "--all", "--format=%T")) or "").split()
        return bool(states) and all(state.rstrip(_NODE_FLAGS) in _NODES_AT_WORK for state in states)

    def _environment(self) -> dict[str, str]:
        return without_slurm(os.environ) | self.launch_environment()

    def _accounts(self, partition: str | None) -> tuple[str, ...] | None:
        """The accounts that this user may charge there; None where any will do, or where Slurm does not say.

        Asked only where it matters: the settings name an account, or Slurm insists on one.
        """
        insists = _NEEDS_ASSOCIATION.search(self._ask(("scontrol", "show", "config")) or "") is not None
        if not insists and self.settings.account is None:
            return None
        shown = self._ask(("scontrol", "--oneliner", "show", "partition", partition or "")) or ""
        allowed = _ALLOWED_ACCOUNTS.search(shown)
        of_partition = set(allowed[1].split(",")) if allowed and allowed[1].upper() != "ALL" else None
        if not insists:
            return None if of_partition is None else tuple(sorted(of_partition))
        question = (*_ASSOCIATIONS, f"user={getpass.getuser()}", "format=account,partition")
        try:
            listing = self._ask(question)
        except PermanentError:  # some login nodes have no sacctmgr
            return None
        if not listing:
            return None
        rows = [line.partition("|") for line in listing.splitlines()]
        of_user = {account for account, _, only_there in rows if only_there in ("", partition)}
        return tuple(sorted(of_user if of_partition is None else of_user & of_partition))

    def _past_jobs(self, name: str, user: str) -> str | None:
        for start in _SACCT_STARTS:
            answer = self._query(
                ("sacct", *_SACCT, "--duplicates", f"--user={user}", f"--name={name}", f"--starttime={start}")
            )
            if answer is None or answer.returncode == 0:
                return None if answer is None else answer.stdout
            if not _RANGE_REFUSED.search(answer.stderr):
                return None
        return None

    def _ask(self, argv: Sequence[str]) -> str | None:
        """The answer to a question; None when there was none."""
        answer = self._query(argv)
        if answer is None:
            return None
        # squeue calls one unknown id an error: that is an answer.
        return answer.stdout if answer.returncode == 0 or _NO_SUCH_JOB.search(answer.stderr) else None

    def _must(self, *argv: str) -> str:
        answer = self._query(argv)
        if answer is None or answer.returncode != 0:
            detail = last_line(answer.stderr) if answer else "no answer in time"
            if _NOT_CONFIGURED.search(detail):
                raise PermanentError(
                    f"Slurm is not configured on this machine ({detail})",
                    thing=self.settings.name,
                    advice="Run this where Slurm's commands work, or set the cluster's slurm_conf",
                )
            raise TransientError(f"{argv[0]} failed: {detail}", thing=self.settings.name)
        return answer.stdout

    def _query(self, argv: Sequence[str]) -> subprocess.CompletedProcess[str] | None:
        environment = self._environment() | {"TZ": "UTC", "SLURM_TIME_FORMAT": "standard", "LC_ALL": "C"}
        try:
            answer = self._run(argv, environment=environment, timeout=QUERY_TIMEOUT)
        except StatusUnknown:
            return None
        # sacct says that slurmdbd is away on stderr only, and ends with 0 in some releases.
        if re.search(r"Connection refused|slurm_persist_conn_open|Problem talking to", answer.stderr):
            return None
        return answer

    def _run(
        self, argv: Sequence[str], *, environment: dict[str, str], timeout: float
    ) -> subprocess.CompletedProcess[str]:
        program = shutil.which(argv[0], path=environment.get("PATH"))
        if program is None:
            raise PermanentError(
                "command not found", thing=argv[0], advice="Set the cluster's bin_dir to the folder of Slurm's commands"
            )
        try:
            return subprocess.run(
                [program, *argv[1:]],
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=timeout,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise StatusUnknown(
                f"{argv[0]} did not answer in {timeout:.0f} s", thing=self.settings.name, advice="It is asked again"
            ) from error


def _rows(parse: Callable[[str], list[JobStatus]], listing: str | None) -> list[JobStatus] | None:
    """What a command printed as rows; None where it did not answer."""
    return None if listing is None else parse(listing)


def _max_nodes(rows: Sequence[Sequence[str]]) -> int | None:
    """The partition's nodes, or its largest job (`1-4`, `1-infinite`) where that is less."""
    if not rows:
        return None
    total = sum(int(row[3]) for row in rows if row[3].isdigit())
    largest = _smallest(int(row[2].rpartition("-")[2]) if row[2].rpartition("-")[2].isdigit() else None for row in rows)
    return total if largest is None else min(total, largest)


def _smallest(values: Iterable[int | None]) -> int | None:
    return min((value for value in values if value is not None), default=None)


def _resource_names(listed: Iterable[str]) -> tuple[str, ...]:
    """`gpu` and `nvme` of `gpu:h100:8(S:0-1),nvme:1`; none where a node has none, which sinfo writes as `(null)`."""
    items = (item for gres in listed for item in re.sub(r"\([^)]*\)", "", gres).split(","))
    return tuple(sorted({name for item in items if (name := item.partition(":")[0].strip())}))


def _count_gpus(gres: str) -> int | None:
    """GPUs of one node from `gpu:h100:8(S:0-1),nvme:1`; None without any."""
    counts = [int(found[1]) for found in re.finditer(r"(?:^|,)gpu(?::[^:,()]+)?:(\d+)", gres)]
    return sum(counts) if counts else None
