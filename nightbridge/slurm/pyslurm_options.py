"""sbatch's options as the attributes of pyslurm's `JobSubmitDescription` (25.11).

pyslurm's own reading of #SBATCH lines drops or misreads many of them, so they are read here. What it cannot express is
said by name, and such a job is submitted by sbatch itself: a job must not differ from what its script asks for.
"""

import os
import re
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nightbridge.embedded.sbatch_options import (
    SBATCH,
    parse_early_signal,
    parse_time_limit,
    script_options,
    split_options,
)
from nightbridge.errors import InvalidInput
from nightbridge.slurm.sbatch_errors import refusal_of


class Inexpressible(Exception):
    """An option that pyslurm cannot express; its name."""


def _text(option: str, value: str) -> str:
    if not value:
        raise Inexpressible(f"--{option}")
    return value


def _count(option: str, value: str) -> int:
    if not value.isdigit() or int(value) == 0:
        raise Inexpressible(f"--{option}={value}")
    return int(value)


def _minutes(option: str, value: str) -> int:
    """Whole minutes: a string of digits alone is a type error in pyslurm, and Slurm rounds seconds up."""
    seconds = parse_time_limit(value)
    if seconds is None:
        if value.upper() in {"UNLIMITED", "INFINITE", "-1"}:
            raise Inexpressible(f"--{option}={value}")
        raise refusal_of(f"Invalid --{option} specification", value)
    if seconds == 0:
        raise Inexpressible(f"--{option}={value}")
    return -(-seconds // 60)


def _nodes(option: str, value: str) -> str:
    if not re.fullmatch(r"[1-9]\d*(-[1-9]\d*)?", value):
        raise refusal_of(f"Invalid --nodes specification: {value}", value)
    return value


def _memory(option: str, value: str) -> str:
    """Megabytes, or with a unit. Zero means a node's whole memory to sbatch, and nothing to pyslurm."""
    if not re.fullmatch(r"[1-9]\d*[KMGT]?", value):
        raise Inexpressible(f"--{option}={value}")
    return value


def _gpus(option: str, value: str) -> str:
    if not re.fullmatch(r"([\w.]+:)?[1-9]\d*", value):
        raise Inexpressible(f"--{option}={value}")
    return f"gpu:{value}"


def _gres(option: str, value: str) -> str:
    """Names with a count each: pyslurm stumbles over a bare name and over units."""
    if not re.fullmatch(r"(\w+(:[\w.]+)?:\d+)(,\w+(:[\w.]+)?:\d+)*", value):
        raise Inexpressible(f"--{option}={value}")
    return value


def _sharing(option: str, value: str) -> str:
    sharing = {"": "no", "user": "user", "mcs": "mcs"}.get(value)
    if sharing is None:
        raise Inexpressible(f"--{option}={value}")
    return sharing


def _signal(option: str, value: str) -> dict[str, Any]:
    early = parse_early_signal(value)
    if early.to_script and "R" in value.partition(":")[0]:
        raise Inexpressible(f"--{option}={value}")
    return {"signal": early.number, "time": int(early.seconds_before), "batch_only": early.to_script}


def _set(value: object) -> Callable[[str, str], object]:
    return lambda option, text: value


_ATTRIBUTES: Mapping[str, tuple[str, Callable[[str, str], object]]] = {
    "account": ("account", _text),
    "begin": ("begin_time", _text),
    "chdir": ("working_directory", _text),
    "comment": ("comment", _text),
    "constraint": ("constraints", _text),
    "contiguous": ("requires_contiguous_nodes", _set(True)),
    "cpus-per-task": ("cpus_per_task", _count),
    "dependency": ("dependencies", _text),
    "error": ("standard_error", _text),
    "exclude": ("excluded_nodes", _text),
    "exclusive": ("resource_sharing", _sharing),
    "gpus-per-node": ("gres_per_node", _gpus),
    "gres": ("gres_per_node", _gres),
    "input": ("standard_in", _text),
    "job-name": ("name", _text),
    "licenses": ("licenses", _text),
    "mem": ("memory_per_node", _memory),
    "mem-per-cpu": ("memory_per_cpu", _memory),
    "no-requeue": ("is_requeueable", _set(False)),
    "nodelist": ("required_nodes", _text),
    "nodes": ("nodes", _nodes),
    "ntasks": ("ntasks", _count),
    "ntasks-per-node": ("ntasks_per_node", _count),
    "open-mode": ("log_files_open_mode", _text),
    "output": ("standard_output", _text),
    "partition": ("partitions", _text),
    "qos": ("qos", _text),
    "reservation": ("reservations", _text),
    "segment": ("segment_size", _count),
    "signal": ("signal", _signal),
    "time": ("time_limit", _minutes),
    "time-min": ("time_limit_min", _minutes),
    "wckey": ("wckey", _text),
}
_MEANINGLESS = frozenset({"parsable", "quiet", "verbose", "requeue"})


def job_attributes(name: str, script: str, options: Sequence[str], folder: str) -> dict[str, Any]:
    """What a `JobSubmitDescription` is made of.

    Args:
        name: The job's name.
        script: The batch script's text. Its #SBATCH lines count, less what `options` say otherwise.
        options: Further sbatch options.
        folder: Where the job runs unless an option says otherwise, absolute.

    Raises:
        Inexpressible: pyslurm cannot express an option.
        LaunchRefused: An option's value is wrong, in sbatch's own words.

    """
    given = _options(script) | _options_of(options)
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
        attributes[attribute] = read(option, value)
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


def _options(script: str) -> dict[str, str]:
    return _options_of(script_options(script))


def _options_of(words: Sequence[str]) -> dict[str, str]:
    try:
        options, rest = split_options(words, SBATCH)
    except (InvalidInput, ValueError) as error:
        # sbatch says it in its own words, or knows the option after all.
        raise Inexpressible(str(error)) from error
    if rest:
        raise Inexpressible(rest[0])
    return options
