"""What one srun of the embedded cluster runs: which tasks, on which simulated nodes, with what environment."""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nightbridge.errors import InvalidInput, PermanentError
from nightbridge.slurm.local_jobs import LocalJob, job_dir, read_config, read_job, root_of, write_fact
from nightbridge.slurm.local_names import (
    expand_expression,
    node_expression,
    node_names,
    spread_evenly,
    tasks_expression,
)
from nightbridge.slurm.local_options import parse_count
from nightbridge.slurm.local_processes import identify


@dataclass(frozen=True)
class Step:
    """What one srun runs: its program, and on which nodes how many tasks."""

    job: LocalJob
    number: int
    argv: tuple[str, ...]
    nodes: tuple[str, ...]
    tasks_by_node: tuple[int, ...]
    directory: str
    output: str | None
    error: str | None
    append: bool
    label: bool
    kill_on_bad_exit: bool
    wait: float | None
    kill_wait: float

    @property
    def name(self) -> str:
        """Slurm's name of the step: `12.0`."""
        return f"{self.job.job_id}.{self.number}"

    @property
    def places(self) -> list[tuple[int, int, int]]:
        """Task, node and local number of every task, filled node by node (srun's block distribution)."""
        pairs = [(node, local) for node, count in enumerate(self.tasks_by_node) for local in range(count)]
        return [(task, node, local) for task, (node, local) in enumerate(pairs)]


def make_step(options: Mapping[str, str], argv: Sequence[str], environment: Mapping[str, str]) -> Step:
    """Turn srun's options into a step, and give it the job's next number.

    Args:
        options: By long name.
        argv: The program and its arguments.
        environment: srun's own; it says which job this is.

    Raises:
        InvalidInput: An option asks for more than the job has.
        PermanentError: This is not inside a job.

    """
    job = _surrounding_job(environment)
    nodes = _choose_nodes(options, job)
    tasks_by_node = [count for count in _spread_tasks(options, len(nodes), environment) if count]
    if len(tasks_by_node) < len(nodes):
        tasks = sum(tasks_by_node)
        fewer = f"can't run {tasks} processes on {len(nodes)} nodes, setting nnodes to {len(tasks_by_node)}"
        sys.stderr.write(f"srun: Warning: {fewer}\n")
    directory = options.get("chdir") or os.getcwd()
    if not os.path.isdir(directory):
        # What slurmd does, in its words.
        sys.stderr.write(f"slurmstepd: error: couldn't chdir to `{directory}': going to /tmp instead\n")
        directory = "/tmp"
    wait = options.get("wait", "0")
    if not wait.isdigit():
        raise InvalidInput("invalid number of seconds for --wait", thing=wait)
    return Step(
        job=job,
        number=_claim_step(job),
        argv=tuple(argv),
        nodes=tuple(nodes[: len(tasks_by_node)]),
        tasks_by_node=tuple(tasks_by_node),
        directory=directory,
        output=options.get("output"),
        error=options.get("error"),
        append=options.get("open-mode", "truncate").startswith("a"),
        label="label" in options,
        kill_on_bad_exit=options.get("kill-on-bad-exit", "0") not in {"0", "no"},
        wait=float(wait) or None,
        kill_wait=read_config(job.folder.parents[1]).kill_wait,
    )


def _surrounding_job(environment: Mapping[str, str]) -> LocalJob:
    number = environment.get("SLURM_JOB_ID", "")
    job = read_job(job_dir(root_of(environment), int(number))) if number.isdigit() else None
    if job is None:
        raise PermanentError(
            "not inside a job", thing="srun", advice="The embedded cluster starts steps from batch scripts only"
        )
    return job


def _choose_nodes(options: Mapping[str, str], job: LocalJob) -> list[str]:
    """The first nodes of the job, or the named ones."""
    of_job = node_names(job.request.nodes)
    if "nodelist" in options:
        try:
            named = expand_expression(options["nodelist"])
        except ValueError as error:
            raise InvalidInput(str(error), thing="srun") from error
        if strange := [name for name in named if name not in of_job]:
            raise InvalidInput("requested nodes are not in this job", thing=",".join(strange))
        rest = [name for name in of_job if name not in named]
        count = parse_count(options["nodes"], "nodes") if "nodes" in options else len(named)
        chosen = (named + rest)[:count]
    else:
        count = parse_count(options["nodes"], "nodes") if "nodes" in options else len(of_job)
        chosen = of_job[:count]
    if count > len(chosen):
        raise InvalidInput("more nodes than the job has", thing=f"--nodes={count}")
    return chosen


def _spread_tasks(options: Mapping[str, str], nodes: int, environment: Mapping[str, str]) -> list[int]:
    """Tasks of each node: --ntasks, else --ntasks-per-node, else as the job says."""
    if "ntasks" not in options:
        per_node = options.get("ntasks-per-node") or environment.get("SLURM_NTASKS_PER_NODE", "1")
        return [parse_count(per_node, "ntasks-per-node")] * nodes
    tasks = parse_count(options["ntasks"], "ntasks")
    if "ntasks-per-node" in options:
        per_node_limit = parse_count(options["ntasks-per-node"], "ntasks-per-node")
        counts = [max(0, min(per_node_limit, tasks - node * per_node_limit)) for node in range(nodes)]
        if sum(counts) < tasks:
            raise InvalidInput("more tasks than the nodes may have", thing=f"--ntasks={tasks}")
        return counts
    return spread_evenly(tasks, nodes)


def _claim_step(job: LocalJob) -> int:
    """Take the job's next step number; mkdir gives each to one srun only."""
    steps = job.folder / "steps"
    steps.mkdir(exist_ok=True)
    number = len(os.listdir(steps))
    while True:
        try:
            (steps / str(number)).mkdir()
            break
        except FileExistsError:
            number += 1
    me = identify(os.getpid())
    assert me is not None
    write_fact(steps / str(number) / "srun.json", me)
    return number


def task_environment(step: Step, environment: Mapping[str, str], task: int, node: int, local: int) -> dict[str, str]:
    """One task's environment: srun's, and what Slurm tells a task (srun(1), "OUTPUT ENVIRONMENT VARIABLES")."""
    tasks = sum(step.tasks_by_node)
    nodes = ",".join(step.nodes)
    if list(step.nodes) == node_names(len(step.nodes)):
        nodes = node_expression(len(step.nodes))
    told: dict[str, object] = {
        "SLURMD_NODENAME": step.nodes[node],
        "SLURM_JOB_ID": step.job.job_id,
        "SLURM_GTIDS": ",".join(str(other) for other, where, _ in step.places if where == node),
        "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1",
        "SLURM_LOCALID": local,
        "SLURM_NNODES": len(step.nodes),
        "SLURM_NODEID": node,
        "SLURM_NODELIST": nodes,
        "SLURM_NPROCS": tasks,
        "SLURM_NTASKS": tasks,
        "SLURM_PROCID": task,
        "SLURM_STEPID": step.number,
        "SLURM_STEP_ID": step.number,
        "SLURM_STEP_NODELIST": nodes,
        "SLURM_STEP_NUM_NODES": len(step.nodes),
        "SLURM_STEP_NUM_TASKS": tasks,
        "SLURM_STEP_TASKS_PER_NODE": tasks_expression(step.tasks_by_node),
        "SLURM_SUBMIT_DIR": os.getcwd(),
        "SLURM_TASKS_PER_NODE": tasks_expression(step.tasks_by_node),
    }
    return dict(environment) | {name: str(value) for name, value in told.items()}
