"""The one program that imports pyslurm: a process of its own, started with `python -I`, that answers questions.

It stands alone (standard library and pyslurm), so that any Python that has pyslurm can run it. One JSON object a line:

    at the start      {"ready": {"pyslurm": "25.11.2"}}   or   {"error": ...}
    question          {"id": 1, "call": "live", "arguments": {...}}
    answer            {"id": 1, "result": ...}            or   {"id": 1, "error": {"kind", "errno", "message"}}

`kind` is `rpc` for what Slurm said, with its error number, and `python` for everything else. Slurm's C library prints
what it likes on file descriptor 1 and may end the process: answers go through a copy of that descriptor, and whoever
asked notices the end. Times are seconds since 1970, UTC.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from typing import Any

SHORTER_RANGE = (7006, 7007)
"""Accounting's "result too large" and "query too wide" (slurm_errno.h)."""
NO_VALUES = (None, 0, 0xFFFFFFFE)
"""What a job that has no such number has: NO_VAL of slurm.h is handed on as it is for rows of accounting."""


def _text(value: Any) -> str:
    return "" if value is None else str(value)


def _number(value: Any) -> int | None:
    """A number, or None for pyslurm's None and "UNLIMITED"."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _wanted(job: Any, ids: set[int] | None, name: str | None, uid: int | None) -> bool:
    # Tasks of an array and later components of a heterogeneous job are parts of a job.
    if job.array_task_id is not None or job.heterogeneous_offset not in NO_VALUES:
        return False
    if ids is not None:
        return job.id in ids
    return bool(job.name == name and job.user_id == uid)


def _row(job: Any, nodes: Any) -> dict[str, Any]:
    return {
        "id": job.id,
        "name": _text(job.name),
        "state": _text(job.state),
        "reason": _text(job.state_reason),
        "exit_code": _number(job.exit_code),
        "signal": _number(job.exit_code_signal),
        "submitted": _number(job.submit_time),
        "started": _number(job.start_time),
        "ended": _number(job.end_time),
        "nodes": "" if nodes == "None assigned" else _text(nodes),
    }


def probe(pyslurm: Any) -> int:
    """Ask slurmctld something small."""
    return len(pyslurm.Partitions.load())


def submit(pyslurm: Any, attributes: dict[str, Any], environment: dict[str, str]) -> int:
    """Submit a batch job; return its id."""
    return int(pyslurm.JobSubmitDescription(environment=environment, **attributes).submit())


def live(
    pyslurm: Any, ids: list[int] | None = None, name: str | None = None, uid: int | None = None
) -> list[dict[str, Any]]:
    """What slurmctld knows of these ids, or of this user's jobs of this name."""
    wanted = None if ids is None else set(ids)
    return [_row(job, job.allocated_nodes) for job in pyslurm.Jobs.load().values() if _wanted(job, wanted, name, uid)]


def past(
    pyslurm: Any,
    ids: list[int] | None = None,
    name: str | None = None,
    uid: int | None = None,
    starts: tuple[int, ...] = (1,),
) -> list[dict[str, Any]]:
    """What accounting knows of them; of several starts the earliest that the site allows."""
    for start in starts:
        chosen: dict[str, Any] = {"ids": list(ids)} if ids is not None else {"names": [name], "start_time": start}
        try:
            jobs = pyslurm.db.Jobs.load(pyslurm.db.JobFilter(**chosen))
        except pyslurm.RPCError as error:
            if error.errno in SHORTER_RANGE and start != starts[-1]:
                continue
            raise
        wanted = None if ids is None else set(ids)
        return [
            {**_row(job, job.nodelist), "cancelled_by": _text(job.cancelled_by)}
            for job in jobs.values()
            if _wanted(job, wanted, name, uid)
        ]
    return []


def cancel(pyslurm: Any, job_id: int) -> None:
    """Cancel a job."""
    pyslurm.Job(job_id).cancel()


def limits(pyslurm: Any) -> list[dict[str, Any]]:
    """The partitions, with the generic resources of their nodes."""
    nodes = list(pyslurm.Nodes.load().values())
    return [
        {
            "name": partition.name,
            "default": bool(partition.is_default),
            "nodes": partition.total_nodes,
            "max_nodes": _number(partition.max_nodes),
            "max_minutes": _number(partition.max_time),
            "accounts": list(partition.allowed_accounts or ()),
            "gres": [dict(node.configured_gres or {}) for node in nodes if partition.name in (node.partitions or ())],
        }
        for partition in pyslurm.Partitions.load().values()
    ]


def enforced(pyslurm: Any) -> list[str]:
    """What accounting insists on, such as ASSOCIATIONS."""
    return list(pyslurm.slurmctld.Config.load().accounting_storage_enforce or ())


def associations(pyslurm: Any, user: str) -> list[list[str]]:
    """The accounts of a user, each with the partition that it is good for, if only one."""
    found = pyslurm.db.Associations.load(pyslurm.db.AssociationFilter(users=[user]))
    return [[_text(one.account), _text(one.partition)] for one in found.values()]


CALLS: dict[str, Any] = {
    call.__name__: call for call in (probe, submit, live, past, cancel, limits, enforced, associations)
}


def _error(error: Exception, rpc_error: Any) -> dict[str, Any]:
    kind = "rpc" if rpc_error is not None and isinstance(error, rpc_error) else "python"
    message = str(error) if kind == "rpc" else f"{type(error).__name__}: {error}"
    return {"kind": kind, "errno": getattr(error, "errno", None), "message": message}


def _load() -> Any:
    # Without this, the import itself ends the process where no slurm.conf can be found.
    os.environ["PYSLURM_DISABLE_AUTO_INIT"] = "1"
    pyslurm = importlib.import_module("pyslurm")
    pyslurm.slurm_init()
    return pyslurm


def main() -> int:
    """Answer until the questions end."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    questions = os.fdopen(os.dup(0), encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)

    def say(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    try:
        pyslurm = _load()
    except Exception as error:
        say({"error": _error(error, None)})
        return 1
    say({"ready": {"pyslurm": _text(getattr(pyslurm, "__version__", "")), "python": sys.executable}})
    for line in questions:
        question = json.loads(line)
        try:
            answer = {"result": CALLS[question["call"]](pyslurm, **question["arguments"])}
        except Exception as error:
            answer = {"error": _error(error, pyslurm.RPCError)}
        say({"id": question["id"], **answer})
    return 0


if __name__ == "__main__":
    sys.exit(main())
