"""Slurm through pyslurm, in a helper process. pyslurm 25.11 with Slurm 25.11.

pyslurm submits, finds, queries and cancels jobs. The rest is done by Slurm's commands, which have to be on PATH all the
same: the launcher and the jobs call them. A job with an option that is not in the table of `job_attributes` is
submitted by sbatch too, which is logged once: pyslurm's own reading of #SBATCH lines drops or misreads many of them,
and a job must not differ from what its script requests.

pyslurm is never imported here. It can end its process from C, and it holds the interpreter's lock for 10 to 20 seconds
while slurmctld is away, which would stop everything else. Every call is one run of `pyslurm_helper`.
"""

import json
import logging
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nightbridge.errors import (
    InvalidInput,
    LaunchRefused,
    NightbridgeError,
    PermanentError,
    StatusUnknown,
    TransientError,
)
from nightbridge.models import ClusterSettings, JobStatus
from nightbridge.processes import run
from nightbridge.sbatch_options import SBATCH, parse_time_limit, script_options, split_options
from nightbridge.slurm.command_line import QUERY_TIMEOUT, SHORTER_RANGES, SUBMIT_TIMEOUT, CommandLineCluster
from nightbridge.slurm.sbatch_errors import refusal_of
from nightbridge.slurm.script import read_script
from nightbridge.slurm.states import job_status, time_of

log = logging.getLogger(__name__)

_HELPER = Path(__file__).with_name("pyslurm_helper.py")

# slurm_errno.h of 25.11.
_NO_SUCH_JOB = 2017
_ALREADY_DONE = 2021
_ACCESS_DENIED = 2002
_POLICY = 2050
"""A limit of an association or a QOS; sbatch names it, pyslurm does not."""
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


class PyslurmError(NightbridgeError):
    """What pyslurm raised. `errno` is Slurm's error number; None for any other exception, such as a wrong type."""

    errno: int | None = None


class PyslurmCluster(CommandLineCluster):
    """Slurm through pyslurm as a `Cluster`.

    Args:
        settings: The cluster's; `pyslurm_python` names the Python that has pyslurm, this one when unset.
    """

    description = "using pyslurm"

    def __init__(self, settings: ClusterSettings) -> None:
        super().__init__(settings)
        self._logged: set[str] = set()

    def version(self) -> str:
        """The version of pyslurm, after a small query that slurmctld has answered.

        Raises:
            NightbridgeError: pyslurm does not work with this Slurm, and why.
        """
        conf = self.settings.slurm_conf
        if conf is not None and not conf.exists():
            raise PermanentError("is not there", subject=str(conf))  # Slurm's library would wait a minute for it
        try:
            return str(self._call("probe"))
        except PyslurmError as error:
            raise TransientError(f"slurmctld does not answer pyslurm: {_text_of(error)}") from error

    def submit(self, name: str, script: Path, options: Sequence[str]) -> int:
        """Submit `script` as `name`.

        The job gets this process's environment without the caller's SLURM_* variables, and those that sbatch adds.
        A job with an option that pyslurm cannot express, such as `--mem=0`, is submitted by sbatch.
        """
        folder = str(Path.cwd())
        text = read_script(script)
        try:
            attributes = job_attributes(name, text, options, folder)
        except Inexpressible as error:
            self._log_once(f"pyslurm cannot express {error}: using sbatch for such jobs")
            return super().submit(name, script, options)
        gpus = _given(text, options).get("gpus-per-node")
        environment = submit_environment(self._environment(), attributes, folder, gpus)
        try:
            return int(self._call("submit", SUBMIT_TIMEOUT, attributes=attributes, environment=environment))
        except PyslurmError as error:
            if error.errno == _POLICY:  # no job exists: sbatch names the limit
                return super().submit(name, script, options)
            if error.errno is None:
                raise LaunchRefused(f"pyslurm refused the job: {error.what}", subject=name) from error
            raise refusal_of(f"Batch job submission failed: {_text_of(error)}", name) from error

    def cancel(self, job_id: int) -> None:
        """Cancel a job; one that has ended is no error."""
        try:
            self._call("cancel", job_id=job_id)
        except PyslurmError as error:
            number = error.errno
            if number in (_NO_SUCH_JOB, _ALREADY_DONE) or (number is not None and 0 <= number < _LEAST_SLURM_ERROR):
                return
            if number == _ACCESS_DENIED:
                raise PermanentError(f"Slurm refused: {_text_of(error)}", subject=f"job {job_id}") from error
            raise TransientError(f"the job was not cancelled: {_text_of(error)}", subject=f"job {job_id}") from error

    def _live_jobs(self, ids: Sequence[int] = ()) -> list[JobStatus] | None:
        return self._jobs("live", ids=list(ids), uid=os.getuid())

    def _past_jobs(self, *, ids: Sequence[int] = (), name: str = "") -> list[JobStatus] | None:
        now = int(time.time())
        starts = (1, *(now - hours * 3600 for hours in SHORTER_RANGES))
        return self._jobs("past", ids=list(ids), name=name, uid=os.getuid(), starts=starts)

    def _jobs(self, source: str, **arguments: Any) -> list[JobStatus] | None:
        """What one source knows; None when it does not answer."""
        try:
            rows = self._call(source, **arguments)
        except PyslurmError as error:
            if error.errno is None:
                self._log_once(f"pyslurm cannot list {source} jobs: {error.what}")
            return None
        except StatusUnknown:
            return None
        return [_status(**row) for row in rows]

    def _call(self, call: str, timeout: float | None = None, **arguments: Any) -> Any:
        """Run one call of the helper.

        Isolated (`-I`): neither PYTHONPATH nor the current folder can put another module in its way.

        Raises:
            PyslurmError: pyslurm raised something.
            StatusUnknown: No answer in time, or the helper died; the call may have had its effect.
            PermanentError: pyslurm cannot be used here.
        """
        python = str(self.settings.pyslurm_python or sys.executable)
        question = json.dumps({"call": call, "arguments": arguments}).encode()
        timeout = timeout or QUERY_TIMEOUT
        try:
            finished = run([python, "-I", _HELPER], environment=self._environment(), timeout=timeout, given=question)
        except PermanentError as error:
            raise PermanentError(error.what, subject=python, advice="Correct the cluster's pyslurm_python") from error
        except TransientError as error:
            raise StatusUnknown(f"pyslurm did not answer in {timeout:.0f} s", advice="Will retry") from error
        imported, *answers = [json.loads(line) for line in finished.stdout.splitlines()] or [{}]
        if not imported.get("ready"):
            reason = imported.get("error") or finished.tail or "no output"
            raise PermanentError(f"pyslurm cannot be used here: {reason}", subject=python)
        if not answers:
            raise StatusUnknown(f"pyslurm's process died: {finished.tail or 'no output'}", advice="Will retry")
        if "error" in answers[0]:
            raised = PyslurmError(answers[0]["error"], subject="pyslurm")
            raised.errno = answers[0]["errno"]
            raise raised
        return answers[0]["result"]

    def _log_once(self, message: str) -> None:
        if message not in self._logged:
            self._logged.add(message)
            log.info("%s: %s", self.settings.name, message)


def _text_of(error: PyslurmError) -> str:
    return error.what or _TEXTS.get(error.errno or 0, f"error {error.errno}")


def _status(*, submitted: int | None, started: int | None, ended: int | None, **fields: Any) -> JobStatus:
    return job_status(submitted=time_of(submitted), started=time_of(started), ended=time_of(ended), **fields)


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


_TEXT = _matching(r".+")
_COUNT = _matching(r"[1-9]\d*", int)

_ATTRIBUTES: Mapping[str, tuple[str, _Read]] = {
    "account": ("account", _TEXT),
    "chdir": ("working_directory", _TEXT),
    "comment": ("comment", _TEXT),
    "constraint": ("constraints", _TEXT),
    "dependency": ("dependencies", _TEXT),
    "error": ("standard_error", _TEXT),
    "exclude": ("excluded_nodes", _TEXT),
    "exclusive": ("resource_sharing", _matching("", lambda _: "no")),
    "gpus-per-node": ("gres_per_node", _matching(r"([\w.]+:)?[1-9]\d*", lambda value: f"gpu:{value}")),
    "job-name": ("name", _TEXT),
    "no-requeue": ("is_requeueable", _matching("", lambda _: False)),
    "nodelist": ("required_nodes", _TEXT),
    # Of a range pyslurm takes the least: it names one task where sbatch leaves the number open.
    "nodes": ("nodes", _matching(r"[1-9]\d*")),
    "ntasks-per-node": ("ntasks_per_node", _COUNT),
    "open-mode": ("log_files_open_mode", _TEXT),
    "output": ("standard_output", _TEXT),
    "partition": ("partitions", _TEXT),
    "qos": ("qos", _TEXT),
    "reservation": ("reservations", _TEXT),
    "segment": ("segment_size", _COUNT),
    "time": ("time_limit", _minutes),
}
"""The options of our own batch scripts and of a site's settings; sbatch submits a job that has another one."""
_MEANINGLESS = frozenset({"parsable", "quiet", "verbose", "requeue"})


def job_attributes(name: str, script: str, options: Sequence[str], folder: str) -> dict[str, Any]:
    """What a `JobSubmitDescription` is made of.

    `options` win over the #SBATCH lines of the script's text. Without `--chdir` the job runs in `folder`, absolute.

    Raises:
        Inexpressible: pyslurm cannot express an option, or sbatch has to refuse it.
    """
    given = _given(script, options) | {"no-requeue": ""}
    attributes: dict[str, Any] = {"working_directory": folder}
    for option, value in given.items():
        if option in _MEANINGLESS:
            continue
        if option not in _ATTRIBUTES:
            raise Inexpressible(f"--{option}")
        attribute, read = _ATTRIBUTES[option]
        attributes[attribute] = read(value)
        if attributes[attribute] is None:
            raise Inexpressible(f"--{option}={value}" if value else f"--{option}")
    # One task by default to pyslurm, whatever the nodes; sbatch counts at least one for each.
    tasks = int(attributes.get("nodes", 1)) * attributes.get("ntasks_per_node", 1)
    return attributes | {"name": name, "script": script, "ntasks": tasks}


def submit_environment(
    environment: Mapping[str, str], attributes: Mapping[str, Any], folder: str, gpus_per_node: str | None
) -> dict[str, str]:
    """The job's environment with the variables that sbatch itself would add (sbatch(1), "OUTPUT ENVIRONMENT")."""
    added: dict[str, object] = {
        "SLURM_SUBMIT_DIR": folder,
        "SLURM_SUBMIT_HOST": socket.gethostname(),
        "SLURM_JOB_NAME": attributes["name"],
        "SLURM_PRIO_PROCESS": os.getpriority(os.PRIO_PROCESS, 0),
        "SLURM_GPUS_PER_NODE": gpus_per_node,
        "SLURM_NTASKS_PER_NODE": attributes.get("ntasks_per_node"),
        "SLURM_NTASKS": attributes["ntasks"],
        "SLURM_NPROCS": attributes["ntasks"],
    }
    return dict(environment) | {key: str(value) for key, value in added.items() if value is not None}


def _given(script: str, options: Sequence[str]) -> dict[str, str]:
    return _options_of(script_options(script)) | _options_of(options)


def _options_of(words: Sequence[str]) -> dict[str, str]:
    try:
        options, rest = split_options(words, SBATCH)
    except (InvalidInput, ValueError) as error:
        # sbatch refuses it in its own words, or knows the option after all.
        raise Inexpressible(str(error)) from error
    if rest:
        raise Inexpressible(rest[0])
    return options
