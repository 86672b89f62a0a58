"""sbatch's options as the attributes of pyslurm's `JobSubmitDescription` (25.11).

pyslurm's own reading of #SBATCH lines drops or misreads many of them, so they are read here. An option or a value that
is not in the table is submitted by sbatch itself: a job must not differ from what its script requests.
"""

import os
import re
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nightbridge.embedded.options import SBATCH, parse_early_signal, parse_time_limit, script_options, split_options
from nightbridge.errors import InvalidInput


class Inexpressible(Exception):
    """An option that pyslurm cannot express."""


_Read = Callable[[str], object]
"""Turns an option's value into the attribute's; None where pyslurm cannot express it."""


def _matching(pattern: str, convert: _Read = str) -> _Read:
    return lambda value: convert(value) if re.fullmatch(pattern, value) else None


def _minutes(value: str) -> int | None:
    """Whole minutes: a string of digits alone is a type error in pyslurm, and Slurm rounds seconds up."""
    seconds = parse_time_limit(value)
    return -(-seconds // 60) if seconds else None


def _signal(value: str) -> dict[str, Any] | None:
    try:
        early = parse_early_signal(value)
    except InvalidInput:
        return None
    if early.to_script and "R" in value.partition(":")[0]:
        return None
    return {"signal": early.number, "time": int(early.seconds_before), "batch_only": early.to_script}


_TEXT = _matching(r".+")
_COUNT = _matching(r"[1-9]\d*", int)
# Zero means a node's whole memory to sbatch, and nothing to pyslurm.
_MEMORY = _matching(r"[1-9]\d*[KMGT]?")
# Names with a count each: pyslurm stumbles over a bare name and over units.
_GRES = _matching(r"(\w+(:[\w.]+)?:\d+)(,\w+(:[\w.]+)?:\d+)*")

_ATTRIBUTES: Mapping[str, tuple[str, _Read]] = {
    "account": ("account", _TEXT),
    "begin": ("begin_time", _TEXT),
    "chdir": ("working_directory", _TEXT),
    "comment": ("comment", _TEXT),
    "constraint": ("constraints", _TEXT),
    "contiguous": ("requires_contiguous_nodes", _matching("", lambda _: True)),
    "cpus-per-task": ("cpus_per_task", _COUNT),
    "dependency": ("dependencies", _TEXT),
    "error": ("standard_error", _TEXT),
    "exclude": ("excluded_nodes", _TEXT),
    "exclusive": ("resource_sharing", _matching("|user|mcs", lambda value: value or "no")),
    "gpus-per-node": ("gres_per_node", _matching(r"([\w.]+:)?[1-9]\d*", lambda value: f"gpu:{value}")),
    "gres": ("gres_per_node", _GRES),
    "input": ("standard_in", _TEXT),
    "job-name": ("name", _TEXT),
    "licenses": ("licenses", _TEXT),
    "mem": ("memory_per_node", _MEMORY),
    "mem-per-cpu": ("memory_per_cpu", _MEMORY),
    "no-requeue": ("is_requeueable", _matching("", lambda _: False)),
    "nodelist": ("required_nodes", _TEXT),
    "nodes": ("nodes", _matching(r"[1-9]\d*(-[1-9]\d*)?")),
    "ntasks": ("ntasks", _COUNT),
    "ntasks-per-node": ("ntasks_per_node", _COUNT),
    "open-mode": ("log_files_open_mode", _TEXT),
    "output": ("standard_output", _TEXT),
    "partition": ("partitions", _TEXT),
    "qos": ("qos", _TEXT),
    "reservation": ("reservations", _TEXT),
    "segment": ("segment_size", _COUNT),
    "signal": ("signal", _signal),
    "time": ("time_limit", _minutes),
    "time-min": ("time_limit_min", _minutes),
    "wckey": ("wckey", _TEXT),
}
_MEANINGLESS = frozenset({"parsable", "quiet", "verbose", "requeue"})


def job_attributes(name: str, script: str, options: Sequence[str], folder: str) -> dict[str, Any]:
    """What a `JobSubmitDescription` is made of.

    Args:
        name: The job's name.
        script: The batch script's text. `options` win over its #SBATCH lines.
        options: Further sbatch options.
        folder: Where the job runs unless an option says otherwise, absolute.

    Raises:
        Inexpressible: pyslurm cannot express an option, or sbatch has to refuse it.

    """
    given = _options_of(script_options(script)) | _options_of(options)
    given["no-requeue"] = ""
    attributes: dict[str, Any] = {"working_directory": folder}
    for option, value in given.items():
        if option in _MEANINGLESS:
            continue
        if option not in _ATTRIBUTES:
            raise Inexpressible(f"--{option}")
        attribute, read = _ATTRIBUTES[option]
        if attribute == "gres_per_node" and attribute in attributes:
            raise Inexpressible("--gres beside --gpus-per-node")
        attributes[attribute] = read(value)
        if attributes[attribute] is None:
            raise Inexpressible(f"--{option}={value}" if value else f"--{option}")
    if "nodes" not in attributes and attributes.get("ntasks", 1) > 1:
        raise Inexpressible("--ntasks without --nodes")  # pyslurm makes that one node
    # One task by default to pyslurm, whatever the nodes; sbatch counts at least one for each.
    smallest = int(str(attributes.get("nodes", "1")).partition("-")[0])
    attributes.setdefault("ntasks", smallest * attributes.get("ntasks_per_node", 1))
    return attributes | {"name": name, "script": script}


def submit_environment(environment: Mapping[str, str], attributes: Mapping[str, Any], folder: str) -> dict[str, str]:
    """The job's environment with the variables that sbatch itself would add (sbatch(1), "OUTPUT ENVIRONMENT")."""
    tasks = None if "-" in str(attributes.get("nodes", "")) else attributes["ntasks"]
    added: dict[str, object] = {
        "SLURM_SUBMIT_DIR": folder,
        "SLURM_SUBMIT_HOST": socket.gethostname(),
        "SLURM_JOB_NAME": attributes["name"],
        "SLURM_PRIO_PROCESS": os.getpriority(os.PRIO_PROCESS, 0),
        "SLURM_NTASKS_PER_NODE": attributes.get("ntasks_per_node"),
        "SLURM_CPUS_PER_TASK": attributes.get("cpus_per_task"),
        "SLURM_NTASKS": tasks,
        "SLURM_NPROCS": tasks,
    }
    return dict(environment) | {key: str(value) for key, value in added.items() if value is not None}


def _options_of(words: Sequence[str]) -> dict[str, str]:
    try:
        options, rest = split_options(words, SBATCH)
    except (InvalidInput, ValueError) as error:
        # sbatch refuses it in its own words, or knows the option after all.
        raise Inexpressible(str(error)) from error
    if rest:
        raise Inexpressible(rest[0])
    return options
