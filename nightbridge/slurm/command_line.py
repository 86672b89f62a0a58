"""Slurm through its own commands: sbatch, squeue, sacct, scancel, scontrol, sinfo. Slurm 22.05 to 26.05.

Every command gets explicit fields in parsable text, UTC, a time limit, and an environment without the caller's
SLURM_*, SBATCH_*, SQUEUE_* and SACCT_* variables.
"""

import getpass
import os
import re
import shutil
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from nightbridge.errors import InvalidInput, LaunchRefused, PermanentError, StatusUnknown, TransientError
from nightbridge.models import ClusterLimits, ClusterSettings, JobState, JobStatus
from nightbridge.numbers import whole_number
from nightbridge.processes import Finished, run
from nightbridge.sbatch_options import parse_time_limit
from nightbridge.slurm.protocol import Lookup
from nightbridge.slurm.sbatch_errors import CHECK_MUNGE, has_reason, known_refusal_of, last_line, refusal_of
from nightbridge.slurm.states import (
    SACCT_FORMAT,
    SQUEUE_FORMAT,
    TERMINAL,
    is_stuck,
    lookup_of,
    parse_sacct,
    parse_squeue,
    statuses_of,
)

QUERY_TIMEOUT = 60.0
"""Seconds for one query. Slurm's clients give up by themselves after a few times MessageTimeout (10 s)."""
SUBMIT_TIMEOUT = 180.0
"""Seconds for sbatch, which itself tries for two minutes where slurmctld has as many jobs as it may (MaxJobCount), and
says then that there is no job. A site's accounting_horizon has to be longer: until then the job may still come."""
SHORTER_RANGES = tuple(24 * days - 1 for days in (90, 30, 7, 1))
"""Hours to go back where a site forbids long ranges in accounting: sites allow whole days, and a range ends a second
after now."""

QUEUE_INTERVAL = 600.0
"""Seconds between two looks at the whole queue."""

# Slurm's own commands read these as options (sbatch(1), "INPUT ENVIRONMENT VARIABLES"), and a caller that is itself a
# job has dozens of them. Two say where the cluster's configuration is: a file, or a slurmctld that hands it out.
_SLURM_VARIABLES = re.compile(r"(?!SLURM_CONF(_SERVER)?$)(SLURMD?|S(BATCH|ALLOC|RUN|QUEUE|ACCT|INFO|CANCEL|CONTROL))_")

_KILLED = range(129, 193)
"""A shell's exit codes for a command that a signal ended; subprocess has negative ones."""

_NO_SUCH_JOB = re.compile(r"Invalid job id specified", re.IGNORECASE)
_RANGE_REFUSED = re.compile(r"(query|time) range|MaxQueryTimeRange|too wide", re.IGNORECASE)
_ALREADY_ENDED = re.compile(
    r"Job/step already completing or completed|Invalid job id|Job has already finished", re.IGNORECASE
)

_NOT_CONFIGURED = re.compile(r"Could not establish a configuration source|[Uu]nable to process configuration")
_HIDDEN = re.compile(r"Access/permission denied")
_ALLOWED_ACCOUNTS = re.compile(r"\bAllowAccounts=(\S+)")
# `limits` and `qos` imply it (slurm.conf(5)).
_NEEDS_ASSOCIATION = re.compile(r"\b(associations|limits|qos|all)\b")
_NO_CREDENTIAL = re.compile(r"Munge encode failed.*")
_NO_SLURMDBD = re.compile(r"PersistInit|slurm_persist_conn_open|Problem talking to")
_NO_ACCOUNTING = re.compile(r"accounting storage is disabled")
# Whom Slurm names when slurmctld itself ends a job, as after a prolog that failed.
_SLURM_ITSELF = frozenset({"", "0", "root"})
_EXIT_CODE = re.compile(r"\bExitCode=(\d+):(\d+)")
_SCRIPT = re.compile(r"\bCommand=(/\S+)")
_LAST_WORD = re.compile(r"\s(/\S+)\s*$")
_ABOUT_NODES = re.compile(r"configuration (is )?not available")
_UP = frozenset({"idle", "mixed", "allocated", "completing"})
# What sinfo puts behind a state, power saving and planned work. A node that does not answer has a `*` and is down.
_NODE_FLAGS = "~#!%@-+"
_ACCEPTED = re.compile(r"^(?:Submitted batch job )?(\d+)(?:(?:;| on cluster )(\S+))?\s*$", re.MULTILINE)
_ASSOCIATIONS = ("sacctmgr", "--noheader", "--parsable2", "show", "associations")
_SQUEUE = ("--noheader", "--all", "--states=all", f"--format={SQUEUE_FORMAT}")
_QUEUE = ("squeue", "--noheader", "--all", "--states=PENDING", "--sort=-p", "--format=%P|%i")
_HIDES_JOBS = re.compile(r"\bjobs\b")
_NO_VALUE = ("", "(null)")
_SACCT = ("--noheader", "--allocations", "--parsable2", f"--format={SACCT_FORMAT}")
_SUBMIT_LINE = ("sacct", "--noheader", "--allocations", "--parsable2", "--format=SubmitLine")
# A night crosses midnight and sacct begins at the last one by itself. Sites can forbid long ranges (MaxQueryTimeRange).
_SACCT_STARTS = ("2000-01-01", *(f"now-{hours}hours" for hours in SHORTER_RANGES))


class CommandLineCluster:
    """Slurm's command-line tools as a `Cluster`."""

    description = "using Slurm's commands"

    def __init__(self, settings: ClusterSettings) -> None:
        self.settings = settings
        self.accounting_horizon = settings.accounting_horizon
        self._queue_due = 0.0
        self._positions: dict[str, int] = {}

    def submit(self, name: str, script: Path, options: Sequence[str]) -> int:
        """Submit `script` as `name`. What sbatch says decides which error is raised: see `sbatch_errors`."""
        argv = ("sbatch", "--parsable", "--no-requeue", *options, f"--job-name={name}", str(script))
        answer = self._run(argv, timeout=SUBMIT_TIMEOUT)
        printed = answer.stdout.decode(errors="replace")
        accepted = _ACCEPTED.findall(printed)
        for job_id, where in accepted:
            self._check_is_here(job_id, where)
        ids = {int(job_id) for job_id, _ in accepted}
        # An sbatch that gives a reason has printed no id: a number is the wrapper's, unless it has tried again.
        failed = bool(answer.code) and has_reason(answer.stderr)
        if len(ids) > 1 or (ids and (failed or printed.count("\n") > 1)):
            ids = self._id_among(ids, name, failed=failed)
        if ids:
            return ids.pop()
        # Of an sbatch that was killed, or ended well, a warning is no refusal.
        refused = answer.code and not _was_killed(answer)
        raise refusal_of((answer.stderr or printed) if refused else "", name)

    def _id_among(self, ids: set[int], name: str, *, failed: bool) -> set[int]:
        """The id of the job that was submitted as `name`, of numbers that sbatch printed among other lines.

        A module system, a plugin of the site or its wrapper of sbatch may have printed them. Where squeue does not
        answer, a number that is the only one is the id.

        Args:
            ids: The numbers.
            name: The job's name.
            failed: Whether sbatch has given a reason why it refused: then there may be none.

        Raises:
            StatusUnknown: None of them is known to be that job's, and nothing says that it was refused.
        """
        rows = self._live_jobs()
        known = {row.job_id for row in rows or () if row.name == name}
        ours = ids if rows is None and not failed else ids & known
        if len(ours) == 1 or (failed and not ours):
            return set(ours)
        knows = "does not answer" if rows is None else "has no such job of this name"
        raise StatusUnknown(
            f"the job may exist: sbatch printed {', '.join(map(str, sorted(ids)))}, and squeue {knows}",
            subject=name,
            advice="It is looked up before the next try",
        )

    def _check_is_here(self, job_id: str, where: str) -> None:
        """Cancel a job that a plugin of the site, or its wrapper of sbatch, has sent to another cluster, and raise.

        Here its id is another job's or nobody's: it would be called lost, and submitted again.

        Raises:
            LaunchRefused: It was sent elsewhere; `where` is what sbatch says, empty where that is this cluster.
        """
        here = self.configured("ClusterName") if where else None
        if here is None or here.lower() == where.lower():
            return
        self._run(("scancel", f"--clusters={where}", job_id))
        raise LaunchRefused(
            f"sbatch sent job {job_id} to Slurm's cluster {where}, and Slurm's commands reach {here} here: cancelled",
            subject=self.settings.name,
            advice=f"See whether it is gone (`squeue -M {where} -j {job_id}`). A cli_filter plugin of the site, or its "
            "wrapper of sbatch, chose that cluster: have it leave such jobs here, or use a site file of that cluster",
        )

    def find(self, name: str) -> Lookup:
        """Find this user's jobs of exactly this name, in slurmctld and in accounting, however old.

        A site that forbids long ranges in accounting gets shorter ones; then "however old" is what the site allows.
        """
        return lookup_of(name, self._live_jobs(), self._past_jobs(name=name))

    def states(self, job_ids: Sequence[int]) -> dict[int, JobStatus]:
        """Query slurmctld once for all these jobs, and accounting once for those that it does not call alive."""
        if not job_ids:
            return {}
        ids = sorted(set(job_ids))
        live = self._live_jobs(ids)
        # Of a job that squeue still calls alive accounting has nothing to add, unless a stuck node keeps it so.
        undecided = (*TERMINAL, JobState.UNKNOWN)
        alive = {row.job_id for row in live or () if row.state not in undecided and not is_stuck(row)}
        others = [job_id for job_id in ids if job_id not in alive]
        past = self._past_jobs(ids=others) if others else []
        return self._with_positions(statuses_of(self.settings.name, job_ids, live, past, self._with_exit_code))

    def _with_positions(self, found: dict[int, JobStatus]) -> dict[int, JobStatus]:
        """Add where jobs that wait for others stand among those of their partition, unless the site hides these."""
        behind = [job_id for job_id, status in found.items() if status.reason in ("Priority", "Resources")]
        if behind and time.monotonic() >= self._queue_due:
            self._queue_due = time.monotonic() + QUEUE_INTERVAL
            hidden = _HIDES_JOBS.search(self.configured("PrivateData") or "")
            listing = "" if hidden else self._ask(_QUEUE) or ""
            length, self._positions = Counter[str](), {}
            for partition, _, job_id in (line.partition("|") for line in listing.splitlines()):
                length[partition] += 1
                self._positions[job_id] = length[partition]
        positions = {job_id: {"queue_position": self._positions.get(str(job_id))} for job_id in behind}
        return found | {job_id: found[job_id].model_copy(update=update) for job_id, update in positions.items()}

    def cancel(self, job_id: int) -> None:
        """Cancel a job. scancel's own exit code proves nothing; what it writes does."""
        answer = self._run(("scancel", str(job_id)))
        if _ALREADY_ENDED.search(answer.stderr) or not (answer.stderr.strip() or _was_killed(answer)):
            return
        if re.search(r"denied|not permitted", answer.stderr):
            raise PermanentError(f"scancel refused: {last_line(answer.stderr)}", subject=f"job {job_id}")
        # A warning of Slurm or of a site's wrapper is no failure: the job tells.
        if any(row.state in (*TERMINAL, JobState.COMPLETING) for row in self._live_jobs([job_id]) or ()):
            return
        raise TransientError(f"scancel failed: {last_line(answer.stderr) or 'killed'}", subject=f"job {job_id}")

    def limits(self) -> ClusterLimits:
        """The limits of the settings' partition, else of the default one, and whether srun has pyxis.

        The settings' own GPUs of a node win: not every site has its GPUs in Slurm's configuration. Accounts are known
        only where Slurm insists on them, by its associations or by the partition's AllowAccounts. Where PrivateData
        hides nodes or partitions from users, what these allow is unknown, and sbatch alone judges a job.

        Raises:
            InvalidInput: The settings name a slurm.conf that is not there; Slurm's commands would wait a minute for it.
            PermanentError: Slurm is not installed, or not configured, on this machine, or keeps no accounting.
            TransientError: slurmctld did not answer.
        """
        if self.settings.slurm_conf is not None and not self.settings.slurm_conf.exists():
            raise InvalidInput(
                "no such file", subject=str(self.settings.slurm_conf), advice="Correct the cluster's slurm_conf"
            )
        listing = self._must("sinfo", "--noheader", "--all", "--format=%P|%l|%s|%D|%G")
        self._check_accounting()
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
            has_pyxis="--container-image" in (self._ask(("srun", "--help")) or ""),
        )

    def test_only(self, name: str, options: Sequence[str]) -> LaunchRefused | None:
        """Why sbatch would refuse a job with these options for good; None when it would not, or did not answer.

        `--test-only` calls a job impossible for which a node is drained or down tonight, though sbatch itself accepts
        it and lets it wait (Slurm 22.05). So an error about nodes counts only where all of them are up.
        """
        argv = ("sbatch", "--test-only", "--no-requeue", "--output=/dev/null", *options, "--wrap=true")
        message = self._refusal_of(argv)
        if _ABOUT_NODES.search(message):
            states = (self._ask(("sinfo", "--noheader", "--all", "--format=%T")) or "").split()
            all_are_up = bool(states) and all(state.rstrip(_NODE_FLAGS) in _UP for state in states)
            # Repeated when all nodes are up: they may have come back just now.
            message = self._refusal_of(argv) if all_are_up else ""
        return known_refusal_of(message, name)

    def _refusal_of(self, argv: Sequence[str]) -> str:
        """What a command writes when it refuses; empty when it does not, or does not answer."""
        try:
            answer = self._run(argv)
        except StatusUnknown:
            return ""
        return answer.stderr if answer.code else ""

    def available_slots(self, nodes: int) -> int:
        """Jobs of so many nodes that would start now, by the partition's idle nodes; 1 where Slurm does not answer."""
        partition = self.settings.options("partition")
        listing = self._ask(("sinfo", "--noheader", "--states=idle", "--format=%D", *partition)) or ""
        idle = sum(whole_number(word) or 0 for word in listing.split())
        return max(1, idle // max(nodes, 1))

    def script_of(self, job_id: int) -> Path | None:
        """The script that sbatch was called with: as slurmctld tells it while it knows the job, then as accounting."""
        asked = (*_SUBMIT_LINE, f"--jobs={job_id}")
        found = _SCRIPT.search(self._ask(("scontrol", "--oneliner", "show", "job", str(job_id))) or "")
        found = found or _LAST_WORD.search(self._ask(asked) or "")
        return Path(found[1]) if found else None

    def configured(self, key: str) -> str | None:
        """The value of a key of slurm.conf, as slurmctld goes by it."""
        found = re.search(rf"^{key}[^\S\n]*=(.*)$", self._ask(("scontrol", "show", "config")) or "", re.MULTILINE)
        value = found[1].strip() if found else ""
        return None if value in _NO_VALUE else value

    def launch_environment(self) -> dict[str, str]:
        """PATH with the settings' folder first, and SLURM_CONF, where they are set."""
        environment = {}
        if self.settings.bin_dir is not None:
            environment["PATH"] = f"{self.settings.bin_dir}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
        if self.settings.slurm_conf is not None:
            environment["SLURM_CONF"] = str(self.settings.slurm_conf)
        return environment

    def program(self, command: str) -> str:
        """The path of one of Slurm's commands.

        Raises:
            PermanentError: It is not installed on this machine.
        """
        found = shutil.which(command, path=self._environment().get("PATH"))
        if found is None:
            raise PermanentError(
                "command not found",
                subject=command,
                advice="Set the cluster's bin_dir to the folder of Slurm's commands",
            )
        return found

    def _with_exit_code(self, row: JobStatus) -> JobStatus:
        """Add what only slurmctld knows, queried at a job's end: its exit code while accounting is behind, and which
        nodes of a job that root or nobody cancelled are down or drained, and why.
        """
        if row.state is JobState.CANCELLED and row.cancelled_by in _SLURM_ITSELF and row.nodes and not row.node_reason:
            row = row.model_copy(update={"node_reason": self._troubles_of(row.nodes)})
        if row.state not in TERMINAL or row.exit_code is not None:
            return row
        found = _EXIT_CODE.search(self._ask(("scontrol", "--oneliner", "show", "job", str(row.job_id))) or "")
        if found is None:
            return row
        return row.model_copy(update={"exit_code": whole_number(found[1]), "signal": whole_number(found[2])})

    def _troubles_of(self, nodes: str) -> str:
        """Those of the nodes that are down or drained, each with Slurm's reason: `node2: Prolog error`."""
        listing = self._ask(("sinfo", "--noheader", "--Node", f"--nodes={nodes}", "--format=%N|%T|%E")) or ""
        rows = dict.fromkeys(tuple(line.strip().split("|", 2)) for line in listing.splitlines() if line.count("|") >= 2)
        return "; ".join(dict.fromkeys(f"{row[0]}: {row[2]}" for row in rows if re.match("down|drain", row[1])))

    def _check_accounting(self) -> None:
        """Raise where Slurm keeps no accounting: no lookup could tell that an attempt has no job."""
        answer = self._query(("sacct", "--noheader", "--jobs=1", "--format=JobID"))
        if answer is not None and _NO_ACCOUNTING.search(answer.stderr):
            raise PermanentError(
                "Slurm keeps no accounting here, and without it a job that squeue has forgotten cannot be found again",
                subject=self.settings.name,
                advice="Have the site set up slurmdbd (AccountingStorageType in slurm.conf)",
            )

    def _environment(self) -> dict[str, str]:
        return without_slurm(os.environ) | self.launch_environment()

    def _accounts(self, partition: str | None) -> tuple[str, ...] | None:
        """The accounts that this user may charge there; None where any will do, or where Slurm does not answer.

        Queried only where it matters: the settings name an account, or Slurm insists on one.
        """
        insists = _NEEDS_ASSOCIATION.search(self.configured("AccountingStorageEnforce") or "") is not None
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

    def _live_jobs(self, ids: Sequence[int] = ()) -> list[JobStatus] | None:
        """What slurmctld knows of these ids, or of this user's jobs, whatever the site calls them; None: no answer."""
        chosen = f"--jobs={','.join(map(str, ids))}" if ids else f"--user={os.getuid()}"
        listing = self._ask(("squeue", *_SQUEUE, chosen))
        return None if listing is None else parse_squeue(listing)

    def _past_jobs(self, *, ids: Sequence[int] = (), name: str = "") -> list[JobStatus] | None:
        """What accounting knows of these ids, or of this user's jobs of a name; None when it did not answer."""
        if ids:
            listing = self._ask(("sacct", *_SACCT, f"--jobs={','.join(map(str, ids))}"))
            return None if listing is None else parse_sacct(listing)
        chosen = ("--duplicates", f"--user={os.getuid()}", f"--name={name}")
        for start in _SACCT_STARTS:
            answer = self._query(("sacct", *_SACCT, *chosen, f"--starttime={start}"))
            if answer is not None and answer.code == 0:
                return parse_sacct(answer.stdout.decode(errors="replace"))
            if answer is None or not _RANGE_REFUSED.search(answer.stderr):
                return None
        return None

    def _ask(self, argv: Sequence[str]) -> str | None:
        """The output of a query; None when it was not answered."""
        answer = self._query(argv)
        # squeue calls one unknown id an error: that is an answer.
        if answer is None or (answer.code and not _NO_SUCH_JOB.search(answer.stderr)):
            return None
        return answer.stdout.decode(errors="replace")

    def _must(self, *argv: str) -> str:
        """The output of a query, empty where PrivateData hides it from this user."""
        answer = self._query(argv)
        if answer is not None and answer.code == 0:
            return answer.stdout.decode(errors="replace")
        detail = last_line(answer.stderr) if answer else "no answer in time"
        if _HIDDEN.search(detail):
            return ""
        if _NOT_CONFIGURED.search(detail):
            raise PermanentError(
                f"Slurm is not configured on this machine ({detail})",
                subject=self.settings.name,
                advice="Run this where Slurm's commands work, or set the cluster's slurm_conf",
            )
        advice = ""
        if answer and (found := _NO_CREDENTIAL.search(answer.stderr)):
            detail, advice = found[0], CHECK_MUNGE
        raise TransientError(f"{argv[0]} failed: {detail}", subject=self.settings.name, advice=advice)

    def _query(self, argv: Sequence[str]) -> Finished | None:
        try:
            answer = self._run(argv, TZ="UTC", SLURM_TIME_FORMAT="standard", LC_ALL="C")
        except StatusUnknown:
            return None
        # sacct reports a missing slurmdbd on stderr only, and ends with 0 in some releases.
        return None if _NO_SLURMDBD.search(answer.stderr) else answer

    def _run(self, argv: Sequence[str], *, timeout: float | None = None, **variables: str) -> Finished:
        environment = self._environment() | variables
        try:
            return run([self.program(argv[0]), *argv[1:]], environment=environment, timeout=timeout or QUERY_TIMEOUT)
        except TransientError as error:
            raise StatusUnknown(error.happened, subject=self.settings.name, advice="Will retry") from error


def without_slurm(environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` without the variables that Slurm's commands would take for options; what selects the cluster stays."""
    return {name: value for name, value in environ.items() if not _SLURM_VARIABLES.match(name)}


def _was_killed(answer: Finished) -> bool:
    return answer.code < 0 or answer.code in _KILLED


def _max_nodes(rows: Sequence[Sequence[str]]) -> int | None:
    """The partition's nodes, or its largest job (`1-4`, `1-infinite`) where that is less."""
    if not rows:
        return None
    total = sum(whole_number(row[3]) or 0 for row in rows)
    largest = _smallest(whole_number(row[2].rpartition("-")[2]) for row in rows)
    return total if largest is None else min(total, largest)


def _smallest(values: Iterable[int | None]) -> int | None:
    return min((value for value in values if value is not None), default=None)


def _resource_names(listed: Iterable[str]) -> tuple[str, ...]:
    """`gpu` and `nvme` of `gpu:h100:8(S:0-1),nvme:1`; none where a node has none, which sinfo writes as `(null)`."""
    items = (item for gres in listed for item in re.sub(r"\([^)]*\)", "", gres).split(","))
    return tuple(sorted({name for item in items if (name := item.partition(":")[0].strip())}))


def _count_gpus(gres: str) -> int | None:
    """GPUs of one node from `gpu:h100:8(S:0-1),nvme:1`; None without any."""
    counts = [whole_number(found[1]) or 0 for found in re.finditer(r"(?:^|,)gpu(?::[^:,()]+)?:(\d+)", gres)]
    return sum(counts) if counts else None
