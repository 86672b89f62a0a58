"""Slurm's commands on the embedded cluster: `python -m nightbridge.slurm.local_commands squeue -j 12`.

They read and write the same folders as `LocalCluster`, so a batch script, NeMo-Run, and a person with a shell see the
same jobs. Standard library only; what one command alone needs is imported when it runs, because srun starts often.
"""

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from nightbridge.errors import InvalidInput, NightbridgeError
from nightbridge.slurm.local_jobs import LocalJob, all_jobs, job_dir, live_jobs, look_at, root_of
from nightbridge.slurm.local_names import expand_expression
from nightbridge.slurm.local_options import SBATCH, OptionTable, Takes, split_options


def main(arguments: list[str]) -> int:
    """Run the command that the first argument names; return its exit code."""
    if not arguments or arguments[0] not in _COMMANDS:
        sys.stderr.write(f"error: name one of {', '.join(_COMMANDS)}\n")
        return 2
    name = arguments[0]
    try:
        return _COMMANDS[name](arguments[1:])
    except NightbridgeError as error:
        sys.stderr.write(f"{name}: error: {error}\n")
    except OSError as error:
        sys.stderr.write(f"{name}: error: {error.strerror}: {error.filename}\n")
    return 1


def _root() -> Path:
    return root_of(os.environ)


# --- jobs ------------------------------------------------------------------------------------------------------------


def _sbatch(arguments: list[str]) -> int:
    from nightbridge.slurm.local_submit import submit

    options, rest = split_options(arguments, SBATCH)
    if not rest:
        raise InvalidInput("no batch script", thing="sbatch", advice="Name a script file")
    words = arguments[: len(arguments) - len(rest)]
    script = Path(rest[0])
    job_id = submit(_root(), script, words, arguments=rest[1:], environment=os.environ, directory=Path.cwd())
    print(job_id if "parsable" in options else f"Submitted batch job {job_id}")
    return 0


def _srun(arguments: list[str]) -> int:
    from nightbridge.slurm.local_srun import main as srun

    return srun(arguments)


_SQUEUE = OptionTable(
    command="squeue",
    takes=dict.fromkeys(
        ("account", "clusters", "format", "jobs", "name", "nodelist", "partition", "qos", "sort", "states", "user"),
        Takes.VALUE,
    )
    | {"jobs": Takes.MAYBE, "Format": Takes.VALUE, "json": Takes.MAYBE}
    | dict.fromkeys(("all", "array", "hide", "local", "long", "me", "noheader", "start", "verbose"), Takes.NOTHING),
    short={
        "A": "account",
        "M": "clusters",
        "O": "Format",
        "S": "sort",
        "a": "all",
        "h": "noheader",
        "j": "jobs",
        "l": "long",
        "n": "name",
        "o": "format",
        "p": "partition",
        "r": "array",
        "t": "states",
        "u": "user",
        "v": "verbose",
        "w": "nodelist",
    },
    refused={
        "Format": "the embedded cluster knows --format",
        "json": "the embedded cluster prints text",
        "clusters": "the embedded cluster is the only one here",
    },
)


def _squeue(arguments: list[str]) -> int:
    from nightbridge.slurm.local_listings import (
        LIVE_STATES,
        SHORT_STATES,
        SQUEUE_DEFAULT,
        SQUEUE_START_DEFAULT,
        percent_rows,
    )

    # "-j 12" has its number in the next word, and "-j" alone means all.
    options, _ = split_options(_join_value(arguments, "-j", "--jobs"), _SQUEUE)
    root = _root()
    ids = _numbers(options.get("jobs", ""))
    anything = ids or "states" in options
    jobs = _find_jobs(root, ids) if anything else list(live_jobs(root))
    if ids and not jobs:
        sys.stderr.write("slurm_load_jobs error: Invalid job id specified\n")
        return 1
    long_names = {short: name for name, short in SHORT_STATES.items()}
    states = {long_names.get(state.upper(), state.upper()) for state in options.get("states", "").split(",") if state}
    states = {"PENDING"} if "start" in options else states or set(LIVE_STATES)
    jobs = [job for job in jobs if (job.state in states or "ALL" in states) and _matches(job, options)]
    form = options.get("format") or (SQUEUE_START_DEFAULT if "start" in options else SQUEUE_DEFAULT)
    _print_lines(percent_rows(form, root, jobs, heading="noheader" not in options))
    return 0


_SACCT = OptionTable(
    command="sacct",
    takes=dict.fromkeys(
        ("accounts", "delimiter", "endtime", "format", "jobs", "name", "partition", "starttime", "state", "user"),
        Takes.VALUE,
    )
    | dict.fromkeys(
        ("allocations", "allusers", "duplicates", "noheader", "noconvert", "parsable", "parsable2", "truncate"),
        Takes.NOTHING,
    )
    | {"json": Takes.MAYBE},
    short={
        "A": "accounts",
        "D": "duplicates",
        "E": "endtime",
        "P": "parsable2",
        "S": "starttime",
        "T": "truncate",
        "X": "allocations",
        "a": "allusers",
        "j": "jobs",
        "n": "noheader",
        "o": "format",
        "p": "parsable",
        "r": "partition",
        "s": "state",
        "u": "user",
    },
    refused={"json": "the embedded cluster prints text"},
)


def _sacct(arguments: list[str]) -> int:
    from nightbridge.slurm.local_listings import SACCT_DEFAULT, sacct_rows

    options, _ = split_options(arguments, _SACCT)
    root = _root()
    # Every job there ever was, whatever --starttime says: nothing is forgotten at midnight.
    jobs = [job for job in _find_jobs(root, _numbers(options.get("jobs", ""))) if _matches(job, options)]
    rows = sacct_rows(options.get("format") or SACCT_DEFAULT, root, jobs, heading="noheader" not in options)
    delimiter = options.get("delimiter", "|")
    if "parsable2" in options:
        _print_lines(delimiter.join(row) for row in rows)
    elif "parsable" in options:
        _print_lines(delimiter.join(row) + delimiter for row in rows)
    else:
        _print_lines(" ".join(f"{cell:>12.20}" for cell in row) for row in rows)
    return 0


_SCANCEL = OptionTable(
    command="scancel",
    takes=dict.fromkeys(("name", "user", "state", "partition", "account", "jobname", "signal"), Takes.VALUE)
    | dict.fromkeys(("quiet", "verbose", "full", "batch", "hurry", "me"), Takes.NOTHING),
    short={
        "n": "name",
        "u": "user",
        "t": "state",
        "Q": "quiet",
        "v": "verbose",
        "f": "full",
        "b": "batch",
        "s": "signal",
    },
    refused={"signal": "the embedded cluster ends jobs, it does not signal them"},
)


def _scancel(arguments: list[str]) -> int:
    from nightbridge.slurm.local_jobs import request_cancel
    from nightbridge.slurm.local_submit import user_name

    options, words = split_options(arguments, _SCANCEL)
    options = {"name": options["jobname"]} | options if "jobname" in options else options
    root = _root()
    ids = _numbers(",".join(words))
    if not ids and not {"name", "user", "state", "partition", "account", "me"} & set(options):
        raise InvalidInput("no job identification provided", thing="scancel")
    jobs = _find_jobs(root, ids) if ids else live_jobs(root)
    jobs = [job for job in jobs if job.end is None and _matches(job, options)]
    for job in jobs:
        if "state" not in options or job.state == options["state"].upper():
            request_cancel(job, user_name())
    for missing in [number for number in ids if look_at(job_dir(root, number)) is None]:
        # Slurm's scancel says so and still ends with 0.
        sys.stderr.write(f"scancel: error: Kill job error on job id {missing}: Invalid job id specified\n")
    return 0


def _find_jobs(root: Path, ids: Sequence[int]) -> list[LocalJob]:
    if not ids:
        return list(all_jobs(root))
    found = (look_at(job_dir(root, job_id)) for job_id in sorted(set(ids)))
    return [job for job in found if job is not None]


def _matches(job: LocalJob, options: dict[str, str]) -> bool:
    names = [name for name in options.get("name", "").split(",") if name]
    users = [user for user in options.get("user", "").split(",") if user]
    mine = "me" not in options or job.request.uid == os.getuid()
    return (
        mine
        and (not names or job.request.name in names)
        and (not users or job.request.user in users or str(job.request.uid) in users)
    )


def _numbers(text: str) -> list[int]:
    words = [word for word in text.split(",") if word]
    if strange := [word for word in words if not word.isdigit()]:
        raise InvalidInput("invalid job id specified", thing=strange[0])
    return [int(word) for word in words]


def _join_value(arguments: Sequence[str], *options: str) -> list[str]:
    """Join an option whose value may be missing with a number in the next word."""
    joined: list[str] = []
    for word in arguments:
        if joined and joined[-1] in options and word[:1].isdigit():
            joined[-1] = f"{joined[-1]}={word}"
        else:
            joined.append(word)
    return joined


# --- the cluster -----------------------------------------------------------------------------------------------------


def _scontrol(arguments: list[str]) -> int:
    words = [word for word in arguments if not word.startswith("-")]
    command, rest = (words or [""])[0], words[1:]
    if command in {"requeue", "requeuehold"}:
        raise InvalidInput(
            "requeue is not possible here", thing="scontrol", advice="A job runs once; submit another attempt"
        )
    if command != "show" or not rest:
        raise InvalidInput(
            "not possible here", thing=" ".join(["scontrol", *words]), advice="There is: show hostnames, show job"
        )
    entity, _, value = rest[0].partition("=")
    value = value or ",".join(rest[1:])
    if entity.lower() not in _SHOWN:
        raise InvalidInput("cannot be shown here", thing=entity, advice=f"There is: {', '.join(sorted(_SHOWN))}")
    return _SHOWN[entity.lower()](value)


def _show_hostnames(expression: str) -> int:
    expression = expression or os.environ.get("SLURM_JOB_NODELIST", "")
    if not expression:
        raise InvalidInput("no host list given, and SLURM_JOB_NODELIST is not set", thing="scontrol")
    try:
        _print_lines(expand_expression(expression))
    except ValueError as error:
        raise InvalidInput(str(error), thing="scontrol") from error
    return 0


def _show_jobs(text: str) -> int:
    from nightbridge.slurm.local_listings import SACCT_FIELDS

    root = _root()
    jobs = _find_jobs(root, _numbers(text))
    if not jobs:
        sys.stderr.write("slurm_load_jobs error: Invalid job id specified\n")
        return 1
    shown = {
        "JobId": "jobid",
        "JobName": "jobname",
        "JobState": "state",
        "Reason": "reason",
        "ExitCode": "exitcode",
        "SubmitTime": "submit",
        "StartTime": "start",
        "EndTime": "end",
        "TimeLimit": "timelimit",
        "Partition": "partition",
        "NodeList": "nodelist",
        "NumNodes": "nnodes",
        "WorkDir": "workdir",
    }
    for job in jobs:
        cells = {label: SACCT_FIELDS[name][1](root, job) for label, name in shown.items()}
        cells |= {"JobState": job.state, "Requeue": "0", "Restarts": "0"}
        print(" ".join(f"{label}={cell}" for label, cell in cells.items()))
    return 0


_SHOWN: dict[str, Callable[[str], int]] = {
    "hostnames": _show_hostnames,
    "hostname": _show_hostnames,
    "job": _show_jobs,
    "jobs": _show_jobs,
}

_SINFO = OptionTable(
    command="sinfo",
    takes={"format": Takes.VALUE, "partition": Takes.VALUE}
    | dict.fromkeys(("noheader", "all", "summarize", "long", "Node"), Takes.NOTHING),
    short={"o": "format", "h": "noheader", "p": "partition", "a": "all", "s": "summarize", "l": "long", "N": "Node"},
    refused={},
)


def _sinfo(arguments: list[str]) -> int:
    from nightbridge.slurm.local_jobs import read_config
    from nightbridge.slurm.local_listings import SINFO_DEFAULT, sinfo_rows

    options, _ = split_options(arguments, _SINFO)
    slots = read_config(_root()).slots
    values = {"D": str(slots), "N": f"node[1-{slots}]" if slots > 1 else "node1", "c": str(os.cpu_count() or 1)}
    _print_lines(sinfo_rows(options.get("format") or SINFO_DEFAULT, values, heading="noheader" not in options))
    return 0


def _print_lines(lines: Iterable[str]) -> None:
    for line in lines:
        print(line)


_COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "sbatch": _sbatch,
    "srun": _srun,
    "scontrol": _scontrol,
    "squeue": _squeue,
    "sacct": _sacct,
    "scancel": _scancel,
    "sinfo": _sinfo,
}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
