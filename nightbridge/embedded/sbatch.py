"""Submission to the embedded cluster: register a job, with its runner, in one atomic step.

The runner is started first, beside a folder under a temporary name, and waits. The folder, complete, is then renamed to
the job's id: that is the registration, and only the submitter can do it. When the submitter is done, or dies, the
runner looks at what its folder is called now. So a crash at any moment leaves either no job, or one that is
found and runs. The environment passes from process to process and is never written down.
"""

import itertools
import os
import pwd
import select
import shlex
import shutil
import subprocess
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

from nightbridge.embedded import notation
from nightbridge.embedded.jobs import JOB_VARIABLE, JobRequest, job_dir, job_ids, write_record
from nightbridge.errors import InvalidInput, LaunchRefused, TransientError
from nightbridge.files import flush_folder, write_atomically
from nightbridge.processes import own_program
from nightbridge.sbatch_options import script_options, split_options

START_PATIENCE = 60.0
"""Seconds that a runner may take to start."""


def main(root: Path, words: Sequence[str]) -> int:
    """The command on a cluster: submits the one script that its words name; returns its exit code."""
    options, rest = split_options(words, notation.EMBEDDED_SBATCH)
    if len(rest) != 1:
        raise InvalidInput("not one batch script", subject="sbatch", advice="Name a script file, without arguments")
    job_id = submit(root, Path(rest[0]), words[:-1], environment=os.environ, directory=Path.cwd())
    print(job_id if "parsable" in options else f"Submitted batch job {job_id}")
    return 0


def submit(root: Path, script: Path, words: Sequence[str], *, environment: Mapping[str, str], directory: Path) -> int:
    """Submit a batch script; return the job's id once the job is registered for good.

    Args:
        root: The cluster's folder.
        script: The batch script. A copy of it is run.
        words: sbatch options; they win over the script's #SBATCH lines.
        environment: The submitter's environment. The job gets it without SLURM_* and SBATCH_*.
        directory: Where it is submitted from: relative paths start here, and the job runs here.

    Raises:
        LaunchRefused: The script is no batch script.
        InvalidInput: An option is wrong, or means what this cluster cannot do.
        TransientError: The runner did not start.
    """
    text = _read_script(script)
    given, rest = split_options(words, notation.EMBEDDED_SBATCH)
    in_script, rest_of_script = split_options(script_options(text), notation.EMBEDDED_SBATCH)
    if rest + rest_of_script:
        advice = "The embedded cluster runs no hetjob"
        raise LaunchRefused("not an sbatch option", subject=(rest + rest_of_script)[0], advice=advice)
    options = in_script | given
    notation.check_export(options, "sbatch")
    request = _make_request(script, options, directory)
    for kind, number in request.dependencies:
        if not job_dir(root, number).exists():
            raise LaunchRefused("job dependency problem: no such job", subject=f"{kind}:{number}")
    write_shims(root)
    # A job that was submitted from a job belongs to itself, not to the other.
    foreign = ("SLURM_", "SLURMD_", "SBATCH_", JOB_VARIABLE)
    own = {name: value for name, value in environment.items() if not name.startswith(foreign)}
    return _register(root, request, text, own)


def _read_script(script: Path) -> str:
    """The script's text, refused where sbatch refuses it, in its words. Like sbatch's, it need not be executable."""
    try:
        text = script.read_bytes().decode(errors="surrogateescape")
    except OSError as error:
        raise LaunchRefused(f"unable to open file: {error.strerror}", subject=str(script)) from error
    if text[:2] != "#!":
        what = "this does not look like a batch script: its first line must be #! and an interpreter"
        raise LaunchRefused(what, subject=str(script))
    return text


def _make_request(script: Path, options: Mapping[str, str], directory: Path) -> JobRequest:
    nodes, tasks, tasks_per_node = _count_tasks(options)
    return JobRequest(
        name=options.get("job-name") or script.name,
        user=user_name(),
        uid=os.getuid(),
        submitted_at=time.time(),
        submit_dir=str(directory),
        directory=str(directory / options.get("chdir", "")),
        output=options.get("output", "slurm-%j.out"),
        error=options.get("error"),
        append=options.get("open-mode", "truncate").startswith("a"),
        nodes=nodes,
        tasks=tasks,
        tasks_per_node=tasks_per_node,
        time_limit=notation.parse_time(options["time"]) if "time" in options else None,
        partition=options.get("partition", "local"),
        account=options.get("account", ""),
        dependencies=notation.parse_dependencies(options["dependency"]) if options.get("dependency") else (),
        hosts=_choose_hosts(nodes, options),
    )


def _choose_hosts(nodes: int, options: Mapping[str, str]) -> tuple[str, ...]:
    """The named nodes, and the first others that are not excluded: as many as wanted."""
    named, excluded = (notation.hostnames(options.get(option, "")) for option in ("nodelist", "exclude"))
    known = {*named, *excluded}
    others = (name for name in notation.simulated_nodes(nodes + len(known)) if name not in known)
    return tuple(itertools.islice(itertools.chain(named, others), nodes))


def _count_tasks(options: Mapping[str, str]) -> tuple[int, int, int]:
    """Nodes, tasks, and tasks on the fullest node."""
    counts = ("nodes", "ntasks", "ntasks-per-node")
    given = {name: notation.parse_count(options[name], name) for name in counts if name in options}
    nodes, per_node = given.get("nodes", 1), given.get("ntasks-per-node", 1)
    if "ntasks" in given:  # with both, --ntasks-per-node is only an upper bound (sbatch(1))
        return nodes, given["ntasks"], -(-given["ntasks"] // nodes)
    return nodes, nodes * per_node, per_node


def user_name() -> str:
    """The current user's name; the number where the system knows no name."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def _register(root: Path, request: JobRequest, text: str, environment: Mapping[str, str]) -> int:
    folder = job_dir(root, f".new-{uuid.uuid4().hex}")
    folder.mkdir(parents=True)
    write_record(folder / "job.json", request)
    write_atomically(folder / "script", text.encode(errors="surrogateescape"))
    (folder / "script").chmod(0o700)
    with (folder / "runner.log").open("wb") as log:
        # The first process of the runner is gone at once; it leaves the runner behind without a parent, so that a
        # submitter that lives on has no zombies.
        pipe, argv = subprocess.PIPE, python_command("nightbridge.embedded.runner", [str(folder)])
        runner = subprocess.Popen(
            argv, env=dict(environment), cwd=folder, stdin=pipe, stdout=pipe, stderr=log, start_new_session=True
        )
    with runner:
        _wait_until_ready(runner, folder)
        # Leaving this block closes the runner's input: it reads what its folder is called then.
        return _claim_id(root, folder)


def _wait_until_ready(runner: subprocess.Popen[bytes], folder: Path) -> None:
    assert runner.stdout is not None
    readable, _, _ = select.select([runner.stdout], [], [], START_PATIENCE)
    answer = runner.stdout.read() if readable else b""
    if answer.strip() != b"ready":
        log = (folder / "runner.log").read_text(errors="replace").strip().splitlines()
        shutil.rmtree(folder, ignore_errors=True)
        reason = log[-1] if log else "no output"
        raise TransientError("the job's runner did not start", subject=reason, advice="Try again")


def _claim_id(root: Path, folder: Path) -> int:
    """Rename the folder to the next free id. A rename onto a folder that holds something fails, so ids are unique."""
    flush_folder(folder)
    job_id = max(job_ids(root), default=0) + 1
    while True:
        try:
            folder.rename(job_dir(root, job_id))
            break
        except OSError as error:
            if not job_dir(root, job_id).exists():
                what = f"cannot register the job: {error.strerror}"
                raise TransientError(what, subject=str(folder), advice="Try again") from error
            job_id += 1
    flush_folder(folder.parent)
    return job_id


_SERVED = ("sbatch", "srun", "scontrol", "squeue", "sacct")
# These fail and name the alternative: a real Slurm's, later on the PATH, would act on other jobs of that number.
_REFUSED = ("salloc", "sattach", "sbcast", "scancel", "sinfo", "sstat")


def python_command(module: str, arguments: Sequence[str] = ()) -> list[str]:
    """The command line that calls `main(arguments)` of one of our modules.

    Without `site` (`-S`): the environment's packages are not needed, and looking for them takes time.
    """
    return own_program(module, arguments, python_options=("-S",))


def write_shims(root: Path) -> None:
    """Write the commands as small shell scripts that start this Python, where they are not there yet."""
    for command in (*_SERVED, *_REFUSED):
        words = python_command("nightbridge.embedded.commands", [str(root), command])
        text = f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n'
        path = root / "bin" / command
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            write_atomically(path, text.encode())
        if not os.access(path, os.X_OK):
            path.chmod(path.stat().st_mode | 0o100)
