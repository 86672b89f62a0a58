"""What one srun of the embedded cluster runs: which tasks, on which simulated nodes, with what environment."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nightbridge.embedded import names
from nightbridge.embedded.jobs import JOB_VARIABLE, LocalJob, read_config, read_job
from nightbridge.embedded.options import exported, parse_count
from nightbridge.errors import InvalidInput, PermanentError


@dataclass(frozen=True)
class Step:
    """What one srun runs: its program, and on which nodes how many tasks."""

    job: LocalJob
    number: int
    argv: tuple[str, ...]
    nodes: tuple[str, ...]
    tasks_by_node: tuple[int, ...]
    directory: str
    environment: Mapping[str, str]
    options: Mapping[str, str]
    kill_on_bad_exit: bool
    wait: float
    kill_wait: float

    @property
    def name(self) -> str:
        """Slurm's name of the step: `12.0`."""
        return f"{self.job.job_id}.{self.number}"

    @property
    def places(self) -> list[tuple[int, int]]:
        """Node and local number of every task."""
        return names.places_of(self.tasks_by_node)

    def file_name(self, option: str, task: int) -> str | None:
        """The file that `--output` or `--error` names for a task; None for srun's own output."""
        # Without --error, errors go where the output goes (srun(1)).
        pattern = self.options.get(option, self.options.get("output"))
        if pattern in (None, "all", "none"):
            return os.devnull if pattern == "none" else None
        node = self.places[task][0]
        job, name = self.job.job_id, self.job.request.name
        letters = {"j": job, "A": job, "J": self.name, "s": self.number, "t": task, "n": node, "x": name}
        return names.fill_pattern(pattern, letters | {"N": self.nodes[node], "u": self.job.request.user})

    def task_environment(self, task: int) -> dict[str, str]:
        """One task's environment: srun's, and Slurm's additions (srun(1), "OUTPUT ENVIRONMENT VARIABLES")."""
        nodes, counts, places = self.nodes, self.tasks_by_node, self.places
        added: dict[str, object] = names.place_variables(nodes, counts, task) | {
            "SLURM_GTIDS": ",".join(str(other) for other, place in enumerate(places) if place[0] == places[task][0]),
            "SLURM_JOB_ID": self.job.job_id, "SLURM_STEPID": self.number, "SLURM_STEP_ID": self.number,
            "SLURM_STEP_NODELIST": names.node_expression(nodes), "SLURM_STEP_NUM_NODES": len(nodes),
            "SLURM_STEP_NUM_TASKS": len(places), "SLURM_STEP_TASKS_PER_NODE": names.tasks_expression(counts),
            "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1", "SLURM_SUBMIT_DIR": os.getcwd(),
        }  # fmt: skip
        return dict(self.environment) | {name: str(value) for name, value in added.items()}


def make_step(options: Mapping[str, str], argv: Sequence[str], environment: Mapping[str, str]) -> Step:
    """Turn srun's options into a step, and give it the job's next number.

    Args:
        options: By long name.
        argv: The program and its arguments.
        environment: srun's own; it says which job this is.

    Raises:
        InvalidInput: An option is wrong, or requests more than the job has.
        PermanentError: This is not inside a job.

    """
    job = read_job(Path(environment[JOB_VARIABLE])) if JOB_VARIABLE in environment else None
    if job is None:
        raise PermanentError("not inside a job", thing="srun", advice="Start steps from batch scripts")
    nodes = _choose_nodes(options, job)
    counts = [count for count in _spread_tasks(options, len(nodes), environment) if count]
    directory, wait = options.get("chdir") or os.getcwd(), options.get("wait", "0")
    if not os.path.isdir(directory):
        raise InvalidInput("no such folder for --chdir", thing=directory)
    if not wait.isdigit():
        raise InvalidInput("invalid number of seconds for --wait", thing=wait)
    return Step(
        job=job,
        number=_claim_number(job),
        argv=tuple(argv),
        nodes=tuple(nodes[: len(counts)]),
        tasks_by_node=tuple(counts),
        directory=directory,
        environment=exported(environment, options.get("export", "")),
        options=options,
        kill_on_bad_exit=options.get("kill-on-bad-exit", "0") not in {"0", "no"},
        wait=float(wait),
        kill_wait=read_config(job.root).kill_wait,
    )


def _choose_nodes(options: Mapping[str, str], job: LocalJob) -> list[str]:
    """The named nodes, or the first ones of the job."""
    chosen = of_job = names.node_names(job.request.nodes)
    if "nodelist" in options:
        try:
            chosen = names.expand_expression(options["nodelist"])
        except ValueError as error:
            raise InvalidInput(str(error), thing="srun") from error
        if not set(chosen) <= set(of_job):
            raise InvalidInput("requested nodes are not in this job", thing=options["nodelist"])
    count = parse_count(options["nodes"], "nodes") if "nodes" in options else len(chosen)
    if count > len(chosen):
        raise InvalidInput("more nodes than the job has or --nodelist names", thing=f"--nodes={count}")
    return chosen[:count]


def _spread_tasks(options: Mapping[str, str], nodes: int, environment: Mapping[str, str]) -> list[int]:
    """Tasks of each node: --ntasks, else --ntasks-per-node, else as the job says."""
    wish = options.get("ntasks-per-node") or environment.get("SLURM_NTASKS_PER_NODE", "1")
    limit = parse_count(wish, "ntasks-per-node")
    if "ntasks" not in options:
        return [limit] * nodes
    tasks = parse_count(options["ntasks"], "ntasks")
    if "ntasks-per-node" in options and tasks > limit * nodes:
        raise InvalidInput("more tasks than the nodes may have", thing=f"--ntasks={tasks}")
    return names.spread_evenly(tasks, nodes)


def _claim_number(job: LocalJob) -> int:
    """Take the job's next step number; mkdir gives each to one srun only."""
    steps = job.folder / "steps"
    steps.mkdir(exist_ok=True)
    number = len(os.listdir(steps))
    while True:
        try:
            (steps / str(number)).mkdir()
            return number
        except FileExistsError:
            number += 1
