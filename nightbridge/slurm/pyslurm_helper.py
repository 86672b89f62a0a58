"""The one program that imports pyslurm: a process of its own, started with `python -I`, for one call.

It stands alone (standard library and pyslurm), so that any Python that has pyslurm can run it. On stdin comes the call,
`{"call": "live", "arguments": {...}}`; on stdout go two lines of JSON:

    {"ready": true}      or   {"error": "..."}, when pyslurm cannot be imported
    {"result": ...}      or   {"error": "...", "errno": ...}

`errno` is Slurm's error number, and null for any other exception. Slurm's C library prints what it likes on file
descriptor 1 and may end the process: answers go through a copy of that descriptor, and a missing answer shows the end.
Times are seconds since 1970, UTC.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import resource
import sys
from typing import Any

SHORTER_RANGE = (7006, 7007)
"""Accounting's "result too large" and "query too wide" (slurm_errno.h)."""
NO_VALUES = (None, 0, 0xFFFFFFFE)
"""What a job that has no such number has: NO_VAL of slurm.h is handed on as it is for rows of accounting."""
LIMITS = ("AS", "CORE", "CPU", "DATA", "FSIZE", "MEMLOCK", "NOFILE", "NPROC", "RSS", "STACK")
"""The resource limits that sbatch hands on; the node keeps to slurm.conf's PropagateResourceLimits."""

OUTPUT_OF_AN_ATTEMPT = re.compile(r".*/runs/([^/]+)/(a[1-9][0-9]*)/", re.DOTALL)
"""By the last such folder: a workspace may lie in `/lustre/runs/llama/a100`."""


def _text(value: Any) -> str:
    return "" if value is None else str(value)


def _number(value: Any) -> int | None:
    """A number, or None for pyslurm's None and "UNLIMITED"."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _name(job: Any) -> str:
    """The job's name, and the attempt's where its output is there: a plugin of the site may have made another of it.

    slurmctld knows of no script that pyslurm submitted, and accounting of no output.
    """
    found = OUTPUT_OF_AN_ATTEMPT.match(_text(job.standard_output))
    return "-".join(found.groups()) if found else _text(job.name)


def _is_part(job: Any) -> bool:
    """Whether it is a task of an array, or a later component of a heterogeneous job."""
    return job.array_task_id is not None or job.heterogeneous_offset not in NO_VALUES


def _row(job: Any, name: str, nodes: Any) -> dict[str, Any]:
    return {
        "job_id": job.id,
        "name": name,
        "state": _text(job.state),
        "reason": _text(job.state_reason),
        "exit_code": _number(job.exit_code),
        "signal": _number(job.exit_code_signal),
        "submitted": _number(job.submit_time),
        "started": _number(job.start_time),
        "ended": _number(job.end_time),
        "nodes": _text(nodes),
    }


def probe(pyslurm: Any) -> str:
    """Make a small query to slurmctld; return pyslurm's version."""
    pyslurm.Partitions.load()
    return _text(getattr(pyslurm, "__version__", ""))


def submit(pyslurm: Any, attributes: dict[str, Any], environment: dict[str, str]) -> int:
    """Submit a batch job with the umask and the limits of this process, as sbatch does; return its id."""
    # No type of profile: pyslurm makes None NO_VAL, whose bits are all types.
    attributes = {**attributes, "profile_types": iter(())}
    return int(pyslurm.JobSubmitDescription(environment={**environment, **_handed_on()}, **attributes).submit())


def _handed_on() -> dict[str, str]:
    umask = os.umask(0o077)
    os.umask(umask)
    soft = {name: resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))[0] for name in LIMITS}
    # Slurm prints an unsigned number: no limit is 2**64 - 1.
    limits = {f"SLURM_RLIMIT_{name}": str(limit % 2**64) for name, limit in soft.items()}
    return {"SLURM_UMASK": f"0{umask:03o}", **limits}


def live(pyslurm: Any, ids: list[int], uid: int) -> list[dict[str, Any]]:
    """What slurmctld knows of these ids, or of this user's jobs."""
    return [
        _row(job, _name(job), job.allocated_nodes)
        for job in pyslurm.Jobs.load().values()
        if not _is_part(job) and (job.id in ids if ids else job.user_id == uid)
    ]


def past(pyslurm: Any, ids: list[int], name: str, uid: int, starts: list[int]) -> list[dict[str, Any]]:
    """What accounting knows of these ids, or of this user's jobs of this name.

    Of several starts the earliest that the site allows.
    """
    for start in starts:
        chosen: dict[str, Any] = {"ids": ids} if ids else {"names": [name], "start_time": start}
        try:
            jobs = pyslurm.db.Jobs.load(pyslurm.db.JobFilter(**chosen))
        except pyslurm.RPCError as error:
            if error.errno in SHORTER_RANGE and start != starts[-1]:
                continue
            raise
        return [
            {**_row(job, _text(job.name), job.nodelist), "cancelled_by": _text(job.cancelled_by)}
            for job in jobs.values()
            if not _is_part(job) and (job.id in ids if ids else job.name == name and job.user_id == uid)
        ]
    return []


def cancel(pyslurm: Any, job_id: int) -> None:
    """Cancel a job."""
    pyslurm.Job(job_id).cancel()


CALLS: dict[str, Any] = {call.__name__: call for call in (probe, submit, live, past, cancel)}


def main() -> int:
    """Answer the call on stdin."""
    question = json.load(sys.stdin)
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    # Without this, the import itself ends the process where no slurm.conf can be found.
    os.environ["PYSLURM_DISABLE_AUTO_INIT"] = "1"
    try:
        pyslurm = importlib.import_module("pyslurm")
        pyslurm.slurm_init()
    except Exception as error:
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}), file=answers, flush=True)
        return 1
    print(json.dumps({"ready": True}), file=answers, flush=True)
    try:
        answer = {"result": CALLS[question["call"]](pyslurm, **question["arguments"])}
    except pyslurm.RPCError as error:
        answer = {"error": str(error), "errno": error.errno}
    except Exception as error:
        answer = {"error": f"{type(error).__name__}: {error}", "errno": None}
    print(json.dumps(answer), file=answers, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
