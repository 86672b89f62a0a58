"""A stand-in for pyslurm 25.11 that does what the real one was seen to do, from a script.

`PYSLURM_SCRIPT` names a JSON file, read again at every call:

    live, past        rows of jobs: attributes of `Job` and `db.Job`
    errors            by call, [error number, text] of the RPCError to raise; the number null for a TypeError
    late              calls that never come back, as while slurmctld is away
    fatal             calls at which C ends the process

What is submitted and cancelled is appended to `done`, beside the script, one JSON object a line.
"""

import json
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

__version__ = "25.11.2"
UNLIMITED = "UNLIMITED"
_NO_VAL = 0xFFFFFFFE
_Named = dict[Any, SimpleNamespace]
_SCRIPT = Path(os.environ["PYSLURM_SCRIPT"])
_NOTHING: dict[str, Any] = {
    "exit_code": 0, "exit_code_signal": 0, "submit_time": None, "start_time": None, "end_time": None,
    "user_id": os.getuid(), "state_reason": "None", "allocated_nodes": None, "array_task_id": None,
    "heterogeneous_offset": None, "standard_output": "",
}  # fmt: skip
# Accounting's rows, as the real one showed them on Slurm 25.11.5: a plain job has NO_VAL as its offset.
_NOTHING_PAST = _NOTHING | {"heterogeneous_offset": _NO_VAL, "nodelist": "None assigned", "cancelled_by": None}


class RPCError(Exception):
    def __init__(self, errno: int = -1, msg: str | None = None) -> None:
        super().__init__(msg)
        self.errno = errno
        self.msg = msg


def _fatal() -> None:
    os.write(2, b"standin: fatal: Could not establish a configuration source\n")
    os._exit(1)


def slurm_init() -> None:
    if not os.environ.get("SLURM_CONF"):
        _fatal()


if not os.environ.get("PYSLURM_DISABLE_AUTO_INIT"):
    slurm_init()


def _script(call: str) -> dict[str, Any]:
    """What the script says, after what it wants to go wrong at this call."""
    script: dict[str, Any] = json.loads(_SCRIPT.read_text())
    # The C library writes where it likes.
    os.write(1, b"slurm: debug: printed by C\n")
    if call in script.get("fatal", ()):
        _fatal()
    if call in script.get("late", ()):
        time.sleep(3600)
    if call in script.get("errors", {}):
        number, text = script["errors"][call]
        raise TypeError(text) if number is None else RPCError(number, text)
    return script


def _did(**what: Any) -> None:
    with (_SCRIPT.parent / "done").open("a") as done:
        done.write(json.dumps(what) + "\n")


class JobSubmitDescription:
    _NAMES = frozenset(
        [
            "name", "script", "working_directory", "environment", "account", "begin_time", "comment", "constraints",
            "cpus_per_task", "dependencies", "requires_contiguous_nodes", "standard_error", "excluded_nodes",
            "resource_sharing", "gres_per_node", "standard_in", "licenses", "memory_per_node", "memory_per_cpu",
            "is_requeueable", "required_nodes", "nodes", "ntasks", "ntasks_per_node", "log_files_open_mode",
            "standard_output", "partitions", "qos", "reservations", "segment_size", "signal", "time_limit",
            "time_limit_min", "wckey", "profile_types",
        ]
    )  # fmt: skip

    def __init__(self, **attributes: Any) -> None:
        for name in attributes:
            if name not in self._NAMES:
                raise AttributeError(name)
        types = attributes.pop("profile_types", None)
        self.attributes = attributes | {"profile": sum(types) if types else _NO_VAL}

    def submit(self) -> int:
        if not self.attributes["script"].startswith("#!"):
            raise ValueError("Not a valid Batch script.")
        limit = self.attributes.get("time_limit")
        if isinstance(limit, str) and limit.isdigit():
            raise TypeError("an integer is required")
        script = _script("submit")
        _did(submit=self.attributes)
        return int(script.get("job_id", 4711))


class Job:
    def __init__(self, job_id: int) -> None:
        self.id = job_id

    def cancel(self) -> None:
        _script("cancel")
        _did(cancel=self.id)


def _jobs(rows: Iterable[dict[str, Any]], nothing: Mapping[str, Any] = _NOTHING) -> _Named:
    return {row["id"]: SimpleNamespace(**{**nothing, **row}) for row in rows}


class Jobs:
    @staticmethod
    def load() -> _Named:
        return _jobs(_script("live").get("live", ()))


def _past(chosen: Mapping[str, Any]) -> _Named:
    script = _script("past")
    # A site that forbids long ranges.
    if chosen.get("start_time", time.time()) < script.get("earliest", 0):
        raise RPCError(7007, "Time range exceeds the site's limit")
    return _jobs(script.get("past", ()), _NOTHING_PAST)


db = SimpleNamespace(
    JobFilter=lambda **chosen: chosen,
    Jobs=SimpleNamespace(load=_past),
    AssociationFilter=lambda **chosen: chosen,
    Associations=SimpleNamespace(
        load=lambda chosen: {
            number: SimpleNamespace(account=account, partition=partition)
            for number, (account, partition) in enumerate(_script("associations").get("associations", ()))
        }
    ),
)


class Partitions:
    @staticmethod
    def load() -> _Named:
        script = _script("partitions")
        known = {
            "total_nodes": 0, "max_nodes": UNLIMITED, "max_time": UNLIMITED, "allowed_accounts": ["ALL"],
            "is_default": False,
        }  # fmt: skip
        return {one["name"]: SimpleNamespace(**known | one) for one in script.get("partitions", ())}


class Nodes:
    @staticmethod
    def load() -> _Named:
        return {one["name"]: SimpleNamespace(**one) for one in _script("nodes").get("nodes", ())}


slurmctld = SimpleNamespace(
    Config=SimpleNamespace(
        load=lambda: SimpleNamespace(accounting_storage_enforce=_script("config").get("enforced", []))
    )
)
