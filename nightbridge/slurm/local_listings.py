"""What squeue, sacct and sinfo of the embedded cluster print: one table of fields for all of them."""

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nightbridge.errors import InvalidInput
from nightbridge.slurm.local_jobs import LocalJob, pending_reason

Field = Callable[[Path, LocalJob], str]

SHORT_STATES = {
    "CANCELLED": "CA",
    "COMPLETED": "CD",
    "COMPLETING": "CG",
    "FAILED": "F",
    "NODE_FAIL": "NF",
    "PENDING": "PD",
    "RUNNING": "R",
    "TIMEOUT": "TO",
}
LIVE_STATES = frozenset({"PENDING", "RUNNING", "COMPLETING"})


def reason(root: Path, job: LocalJob) -> str:
    """Why a job waits, or how it ended, in squeue's words."""
    if job.end is not None:
        return job.end.reason.replace("|", " ") or "None"
    return pending_reason(root, job) if job.started_at is None else "None"


def clock(seconds: float | None, missing: str) -> str:
    """A time as Slurm writes it, in the zone of TZ."""
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(seconds)) if seconds is not None else missing


def duration(seconds: float) -> str:
    """A duration as Slurm writes it: `1-02:03:04`, `02:03:04`."""
    minutes, second = divmod(max(0, int(seconds)), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    return (f"{days}-" if days else "") + f"{hour:02}:{minute:02}:{second:02}"


def _elapsed(job: LocalJob) -> float:
    if job.started_at is None:
        return 0.0
    return (job.end.ended_at if job.end is not None else time.time()) - job.started_at


def _limit(job: LocalJob) -> str:
    return duration(job.request.time_limit) if job.request.time_limit is not None else "UNLIMITED"


def _ended_at(job: LocalJob) -> float | None:
    if job.end is not None:
        return job.end.ended_at
    limit = job.request.time_limit
    return job.started_at + limit if job.started_at is not None and limit is not None else None


def _accounted_state(job: LocalJob) -> str:
    if job.end is not None and job.end.state == "CANCELLED":
        return f"CANCELLED by {job.request.uid}"
    return "RUNNING" if job.state == "COMPLETING" else job.state


def _exit_code(job: LocalJob) -> str:
    return f"{job.end.exit_code or 0}:{job.end.signal or 0}" if job.end is not None else "0:0"


# squeue(1), "--format".
SQUEUE_FIELDS: Mapping[str, tuple[str, Field]] = {
    "a": ("ACCOUNT", lambda _, job: job.request.account or "(null)"),
    "A": ("JOBID", lambda _, job: str(job.job_id)),
    "C": ("CPUS", lambda _, job: str(job.request.tasks)),
    "D": ("NODES", lambda _, job: str(job.request.nodes)),
    "e": ("END_TIME", lambda _, job: clock(_ended_at(job), "N/A")),
    "i": ("JOBID", lambda _, job: str(job.job_id)),
    "j": ("NAME", lambda _, job: job.request.name),
    "l": ("TIME_LIMIT", lambda _, job: _limit(job)),
    "M": ("TIME", lambda _, job: duration(_elapsed(job))),
    "N": ("NODELIST", lambda _, job: job.nodes),
    "P": ("PARTITION", lambda _, job: job.request.partition),
    "q": ("QOS", lambda _, job: "normal"),
    "r": ("REASON", reason),
    "R": ("NODELIST(REASON)", lambda root, job: job.nodes or f"({reason(root, job)})"),
    "S": ("START_TIME", lambda _, job: clock(job.started_at, "N/A")),
    "t": ("ST", lambda _, job: SHORT_STATES[job.state]),
    "T": ("STATE", lambda _, job: job.state),
    "u": ("USER", lambda _, job: job.request.user),
    "U": ("USER", lambda _, job: str(job.request.uid)),
    "V": ("SUBMIT_TIME", lambda _, job: clock(job.request.submitted_at, "N/A")),
    "Z": ("WORK_DIR", lambda _, job: job.request.directory),
}
SQUEUE_DEFAULT = "%.18i %.9P %.8j %.8u %.2t %.10M %.6D %R"
SQUEUE_START_DEFAULT = "%.18i %.9P %.8j %.8u %.2t %.19S %.6D %R"

# sacct(1), "Job Accounting Fields". By name in lower case, with the name as it is printed.
SACCT_FIELDS: Mapping[str, tuple[str, Field]] = {
    name.lower(): (name, field)
    for name, field in (
        ("JobID", SQUEUE_FIELDS["i"][1]),
        ("JobIDRaw", SQUEUE_FIELDS["i"][1]),
        ("JobName", SQUEUE_FIELDS["j"][1]),
        ("Partition", SQUEUE_FIELDS["P"][1]),
        ("Account", lambda _, job: job.request.account),
        ("AllocCPUS", SQUEUE_FIELDS["C"][1]),
        ("AllocNodes", SQUEUE_FIELDS["D"][1]),
        ("NNodes", SQUEUE_FIELDS["D"][1]),
        ("State", lambda _, job: _accounted_state(job)),
        ("ExitCode", lambda _, job: _exit_code(job)),
        ("Submit", lambda _, job: clock(job.request.submitted_at, "Unknown")),
        ("Start", lambda _, job: clock(job.started_at, "Unknown" if job.end is None else "None")),
        ("End", lambda _, job: clock(job.end.ended_at if job.end else None, "Unknown")),
        ("Elapsed", SQUEUE_FIELDS["M"][1]),
        ("ElapsedRaw", lambda _, job: str(int(_elapsed(job)))),
        ("Timelimit", lambda _, job: _limit(job)),
        ("NodeList", lambda _, job: job.nodes or "None assigned"),
        ("Reason", reason),
        ("User", SQUEUE_FIELDS["u"][1]),
        ("UID", SQUEUE_FIELDS["U"][1]),
        ("WorkDir", SQUEUE_FIELDS["Z"][1]),
        ("QOS", SQUEUE_FIELDS["q"][1]),
    )
}
SACCT_DEFAULT = "JobID,JobName,Partition,Account,AllocCPUS,State,ExitCode"

_PERCENT = re.compile(r"%(\.?)(\d*)([A-Za-z])")


@dataclass(frozen=True)
class Column:
    """One column: heading, text of a job, width (0: as wide as it is), alignment, and what stands before it."""

    heading: str
    text: Field
    width: int
    right: bool
    before: str


def percent_columns(form: str) -> list[Column]:
    """The columns of squeue's `--format`.

    Raises:
        InvalidInput: A letter that is not known here.

    """
    columns, end = [], 0
    for found in _PERCENT.finditer(form):
        if found[3] not in SQUEUE_FIELDS:
            raise InvalidInput("not a field that the embedded cluster knows", thing=found[0])
        heading, text = SQUEUE_FIELDS[found[3]]
        columns.append(Column(heading, text, int(found[2] or 0), bool(found[1]), form[end : found.start()]))
        end = found.end()
    return columns


def percent_rows(form: str, root: Path, jobs: Sequence[LocalJob], *, heading: bool) -> list[str]:
    """The lines of squeue, with its heading or without."""
    columns = percent_columns(form)
    rows = [[column.heading for column in columns]] if heading else []
    rows += [[column.text(root, job) for column in columns] for job in jobs]
    return [
        "".join(column.before + _fit(cell, column) for column, cell in zip(columns, row, strict=True)) for row in rows
    ]


def _fit(cell: str, column: Column) -> str:
    if not column.width:
        return cell
    cut = cell[: column.width]
    return cut.rjust(column.width) if column.right else cut.ljust(column.width)


def sacct_rows(names: str, root: Path, jobs: Sequence[LocalJob], *, heading: bool) -> list[list[str]]:
    """The cells of sacct, row by row, with its heading or without.

    Raises:
        InvalidInput: A field that is not known here.

    """
    wanted = [name.partition("%")[0].lower() for name in names.split(",") if name]
    if unknown := [name for name in wanted if name not in SACCT_FIELDS]:
        raise InvalidInput("not a field that the embedded cluster knows", thing=",".join(unknown))
    fields = [SACCT_FIELDS[name] for name in wanted]
    rows = [[printed for printed, _ in fields]] if heading else []
    return rows + [[text(root, job) for _, text in fields] for job in jobs]


# sinfo(1), "--format".
SINFO_FIELDS = {
    "a": ("AVAIL", "up"),
    "c": ("CPUS", ""),
    "D": ("NODES", ""),
    "G": ("GRES", "(null)"),
    "l": ("TIMELIMIT", "infinite"),
    "N": ("NODELIST", "node1"),
    "P": ("PARTITION", "local*"),
    "s": ("JOB_SIZE", "1-infinite"),
    "t": ("STATE", "idle"),
    "T": ("STATE", "idle"),
}
SINFO_DEFAULT = "%P %a %l %D %t %N"


def sinfo_rows(form: str, values: Mapping[str, str], *, heading: bool) -> list[str]:
    """The lines of sinfo: one partition that has whatever a job asks for.

    Args:
        form: `--format`.
        values: What differs from `SINFO_FIELDS`, by letter.
        heading: Whether the first line names the columns.

    """

    def fill(pick: Callable[[str], str]) -> str:
        return _PERCENT.sub(lambda found: pick(found[3]) if found[3] in SINFO_FIELDS else found[0], form)

    rows = [fill(lambda letter: SINFO_FIELDS[letter][0])] if heading else []
    return [*rows, fill(lambda letter: values.get(letter, SINFO_FIELDS[letter][1]))]
