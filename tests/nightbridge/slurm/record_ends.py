"""Make the ends of `ends.toml` on the Slurm that stands first on PATH, and print each as a row of that table.

    PATH=/opt/slurm-25.11/bin:/opt/slurm-25.11/sbin:$PATH .venv/bin/python -m tests.nightbridge.slurm.record_ends > rows.toml

A release that is new here is recorded once; a person reads the rows, corrects what the outcome has to be, and adds them.
Root is needed, and five minutes. An argument makes only the ends that have it in their description.
"""

import json
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from nightbridge.models import ClusterSettings, Job, utc_now
from nightbridge.outputs.experiment import read_run
from nightbridge.outputs.run_evidence import evidence
from nightbridge.slurm.attempt_files import read_claim, read_exit_code
from nightbridge.slurm.command_line import CommandLineCluster
from nightbridge.slurm.outcome import RunEvidence, classify_job
from nightbridge.slurm.script import ATTEMPT_FILE, wrap_script
from nightbridge.slurm.states import SACCT_FORMAT, SQUEUE_FORMAT, TERMINAL
from tests.real.slurm_daemons import SlurmDaemons

HOOKS = ("Prolog", "Epilog", "PrologSlurmctld", "ResumeProgram")
EXTRA_CONF = (
    *(f"{name}=HOOKS/{name}" for name in HOOKS),
    "PrologFlags=Alloc",
    "Licenses=gold:1",
    "PartitionName=here Nodes=node[1-2] MaxTime=08:00:00",
    "PreemptType=preempt/partition_prio",
    "PreemptMode=CANCEL",
    "PartitionName=low Nodes=node2 PriorityTier=1 MaxTime=08:00:00",
    "PartitionName=high Nodes=node2 PriorityTier=10 MaxTime=08:00:00",
    "SlurmdTimeout=6",
    "MessageTimeout=5",
    "JobAcctGatherType=jobacct_gather/linux",
    "JobAcctGatherFrequency=task=1",
    "JobAcctGatherParams=OverMemoryKill",
    "BurstBufferType=burst_buffer/lua",
    "ResumeTimeout=4",
    "SuspendTime=300",
    "SuspendExcNodes=node[1-2]",
    "SuspendProgram=/bin/true",
    "NodeName=cloud1 NodeHostname=nowhere NodeAddr=127.0.0.1 Port=19999 CPUs=4 RealMemory=2000 State=CLOUD",
    "PartitionName=cloud Nodes=cloud1 MaxTime=08:00:00",
)
BURST_BUFFER = "\n".join(
    f"function {name}(...) return {value} end"
    for name, value in {
        "slurm_bb_job_process": "slurm.SUCCESS",
        "slurm_bb_pools": 'slurm.SUCCESS, \'{"pools":[{"id":"p","quantity":10,"granularity":1}]}\'',
        "slurm_bb_setup": "slurm.SUCCESS",
        "slurm_bb_data_in": 'slurm.ERROR, "no space on /bb"',
        "slurm_bb_test_data_in": "slurm.SUCCESS",
        "slurm_bb_real_size": 'slurm.SUCCESS, "10"',
        "slurm_bb_paths": "slurm.SUCCESS",
        "slurm_bb_pre_run": "slurm.SUCCESS",
        "slurm_bb_post_run": "slurm.SUCCESS",
        "slurm_bb_data_out": "slurm.SUCCESS",
        "slurm_bb_test_data_out": "slurm.SUCCESS",
        "slurm_bb_get_status": 'slurm.SUCCESS, ""',
        "slurm_bb_job_teardown": "slurm.SUCCESS",
    }.items()
)
CGROUPS = (
    "TaskPlugin=task/cgroup",
    "JobAcctGatherType=jobacct_gather/linux",
    "PartitionName=here Nodes=node[1-2] MaxTime=08:00:00",
)
CGROUP_CONF = "CgroupMountpoint=/sys/fs/cgroup\nConstrainRAMSpace=yes\nAllowedSwapSpace=0\n"
EAT = "python3 -c 'import time; held = bytearray(b\"x\") * (300 << 20); time.sleep(60)'"
OVER = frozenset(state.value for state in TERMINAL)


class End(NamedTuple):
    """One way for a job to end."""

    what: str
    body: str
    options: tuple[str, ...] = ()
    act: Callable[["Recorder", str], None] | None = None
    """What is done to the job once it runs (or is pending, with --begin)."""
    fails: str = ""
    """The hook that fails meanwhile."""
    steps: int = 20
    of_log: bool = False
    """Whether its log says why."""
    may_requeue: bool = False
    is_lost: bool = False
    """Whether Slurm knows nothing of it in the end."""


class Recorder:
    """The daemons, and what is done to jobs on them."""

    def __init__(self, daemons: SlurmDaemons, folder: Path, hooks: Path) -> None:
        self.daemons = daemons
        self.folder = folder
        self.hooks = hooks
        settings = ClusterSettings(kind="slurm", name="record", slurm_conf=daemons.slurm_conf, accounting_horizon=3.0)
        self.cluster = CommandLineCluster(settings)
        self.release = daemons.command("sacct", "--version").stdout.split()[-1]
        """Of Slurm, such as `22.05.8`."""

    def run(self, *argv: str) -> str:
        """The output of one of Slurm's commands; what it refuses goes to stderr."""
        done = self.daemons.command(*argv)
        if done.returncode:
            print(f"# {' '.join(argv)}: {done.stderr.strip()}", file=sys.stderr)
        return done.stdout.strip()

    def state(self, job: str) -> str:
        """As squeue tells it, else sacct."""
        live = self.daemons.command("squeue", "-h", "-t", "all", "-o", "%T", "-j", job).stdout.strip()
        return live or self.daemons.command("sacct", "-X", "-n", "-P", "-o", "State", "-j", job).stdout.strip()

    def until(self, what: str, ready: Callable[[], object], seconds: float = 200) -> None:
        end = time.monotonic() + seconds
        while not ready() and time.monotonic() < end:
            time.sleep(0.3)
        if time.monotonic() >= end:
            print(f"# not reached in {seconds:.0f} s: {what}", file=sys.stderr)

    def until_state(self, job: str, *states: str) -> None:
        self.until(f"{job} {states}", lambda: self.state(job).split(" ")[0] in states)

    def in_accounting(self, job: str, pattern: str) -> None:
        def told() -> object:
            return re.search(pattern, self.run("sacct", "-X", "-n", "-P", "-o", "State", "-j", job))

        self.until(f"sacct of {job} has {pattern}", told, 40)

    def make(self, end: End) -> None:
        """Make one end, and print it."""
        attempt = self.folder / re.sub(r"\W+", "-", end.what)
        attempt.mkdir()
        (attempt / ATTEMPT_FILE).touch()
        text = wrap_script(f"#!/bin/bash\n{end.body}\n", attempt)
        script = attempt / "job.sh"
        script.write_text(text.replace("#SBATCH --no-requeue\n", "") if end.may_requeue else text)
        with self.failing(end.fails):
            options = (f"--output={attempt}/log.out", "--partition=here", "--mem=100", "--job-name=nb", *end.options)
            answer = self.run("sbatch", "--parsable", *options, str(script))
            if not answer:
                return
            job = answer.split(";")[0]
            if end.act is not None:
                end.act(self, job)
            if not end.is_lost:
                self.until_state(job, *OVER)
        time.sleep(3)
        print(self.row(end, job, attempt), flush=True)

    @contextmanager
    def failing(self, hook: str) -> Iterator[None]:
        if not hook:
            yield
            return
        (self.hooks / f"{hook}.fail").touch()
        try:
            yield
        finally:
            (self.hooks / f"{hook}.fail").unlink()

    def row(self, end: End, job: str, attempt: Path) -> str:
        """The end as a row of the table."""
        past = self.run("sacct", "-X", "-n", "-P", f"--format={SACCT_FORMAT}", "-j", job).splitlines()
        live = self.run("squeue", "-h", "-t", "all", "-o", SQUEUE_FORMAT, "-j", job)
        claimed, code = read_claim(attempt), read_exit_code(attempt)
        status = self.cluster.states([int(job)]).get(int(job))
        done = Job(
            run_key="r", attempt=1, job_id=int(job), cluster="record", attempt_dir=attempt, script=attempt / "job.sh",
            experiment_dir=attempt, submitted_at=utc_now(), status=status, exit_file_code=code,
        )  # fmt: skip
        error = evidence(read_run(done, None), 50).last_error if end.of_log else ""
        judged = classify_job(done, RunEvidence(
            steps_done=end.steps if claimed else 0, steps_expected=50, losses_finite=True,
            finished_marker=end.steps == 50, flaky_marker=None, timeout_marker=False, last_error=error,
        ))  # fmt: skip
        fields = {"from": f"{self.release}: {end.what}", "sacct": "\n".join(past)}
        if live:
            reason = live.split("|")[6]
            fields |= {"reason": reason} if reason != "None" else {}
            if past and live.split("|")[1] not in past[-1]:
                fields["squeue"] = live
        if status is not None and status.node_reason:
            fields["nodes"] = status.node_reason
        fields |= {"log": error} if error else {}
        fields["script"] = "none" if claimed is None else "began" if code is None else str(code)
        lines = [f"{name} = {json.dumps(value)}" for name, value in fields.items()]
        lines += [f"steps = {end.steps}"] if end.steps != 20 else []
        lines += [] if live else ["live = false"]
        lines += [f'outcome = "{judged.outcome}"', f"says = {json.dumps(judged.outcome_reason)}"]
        return "\n".join(("[[end]]", *lines, ""))

    def show_wait(self, what: str, job: str) -> None:
        """Print what a job waits for, as a row."""
        time.sleep(3)
        live = self.run("squeue", "-h", "-t", "all", "-o", SQUEUE_FORMAT, "-j", job)
        print(f'[[wait]]\nfrom = "{self.release}: {what}"\nsqueue = "{live}"\n', flush=True)


def cancel(recorder: Recorder, job: str) -> None:
    recorder.until_state(job, "RUNNING")
    time.sleep(1)
    recorder.run("scancel", job)


def cancel_as_operator(recorder: Recorder, job: str) -> None:
    recorder.run("sacctmgr", "-i", "add", "account", "ops")
    recorder.run("sacctmgr", "-i", "add", "user", "daemon", "account=ops", "adminlevel=operator")
    recorder.until_state(job, "RUNNING")
    time.sleep(2)
    recorder.run("setpriv", "--reuid=daemon", "--clear-groups", "scancel", job)


def cancel_pending(recorder: Recorder, job: str) -> None:
    recorder.until_state(job, "PENDING")
    time.sleep(1)
    recorder.run("scancel", job)


def kill_batch(recorder: Recorder, job: str) -> None:
    recorder.until_state(job, "RUNNING")
    time.sleep(1)
    recorder.run("scancel", "--signal=KILL", "--batch", job)


def set_down(recorder: Recorder, job: str) -> None:
    recorder.until_state(job, "RUNNING")
    recorder.run("scontrol", "update", "node=node2", "state=down", "reason=gpu-check")


def lose_node(recorder: Recorder, job: str) -> None:
    recorder.until_state(job, "RUNNING")
    time.sleep(1)
    recorder.daemons.lose_node("node2")
    recorder.until_state(job, *OVER)
    recorder.daemons.start_daemon("node2")


def lose_state(state: str) -> Callable[[Recorder, str], None]:
    def act(recorder: Recorder, job: str) -> None:
        recorder.until_state(job, state)
        recorder.in_accounting(job, state)
        recorder.daemons.lose_state()
        recorder.daemons.start_daemon("slurmctld")
        recorder.until("slurmctld", lambda: recorder.daemons.command("squeue").returncode == 0)
        # Accounting of 22.05 closes it within seconds; that of 25.11 and 26.05 does not.
        time.sleep(20)

    return act


def requeue_and_cancel(hold: str = "") -> Callable[[Recorder, str], None]:
    def act(recorder: Recorder, job: str) -> None:
        recorder.until_state(job, "RUNNING")
        time.sleep(1)
        recorder.run("scontrol", "update", f"job={job}", "requeue=1")
        recorder.run("scontrol", *(("requeuehold", hold, job) if hold else ("requeue", job)))
        recorder.until_state(job, "SPECIAL_EXIT" if hold else "PENDING")
        recorder.show_wait(f"requeued by an operator {hold}".strip(), job)
        recorder.run("scancel", job)

    return act


def cancel_held(what: str) -> Callable[[Recorder, str], None]:
    def act(recorder: Recorder, job: str) -> None:
        def reason() -> str:
            return recorder.run("squeue", "-h", "-t", "all", "-o", "%r", "-j", job)

        recorder.until(what, lambda: "held" in reason() or "burst" in reason(), 60)
        recorder.show_wait(what, job)
        recorder.run("scancel", job)

    return act


def preempt(recorder: Recorder, job: str) -> None:
    recorder.until_state(job, "RUNNING")
    recorder.run("sbatch", "--partition=high", "--exclusive", "--output=/dev/null", "--wrap=true")


def hold_licence(recorder: Recorder, job: str) -> None:
    recorder.show_wait("all licences are in use", job)


ALONE = (
    End("Prolog exits 3 on node2, PrologFlags=Alloc, job is --no-requeue", "true", ("--nodelist=node2",), fails="Prolog"),
    End("PrologSlurmctld exits 3; no node is drained", "true", ("--nodelist=node2",), fails="PrologSlurmctld"),
    End("launch failed requeued held, then cancelled", "true", ("--nodelist=node2",), cancel_held("the prolog failed for a job that Slurm may requeue"), "Prolog", may_requeue=True),
    End("Epilog exits 3 on node2, which is drained; the job itself ended well", "true", ("--nodelist=node2",), fails="Epilog", steps=50),
    End("a health check sets the node down", "sleep 100", ("--nodelist=node2",), set_down),
    End("the node loses its power", "sleep 100", ("--nodelist=node2",), lose_node),
    End("preempted by a partition of a higher tier", "sleep 100", ("--partition=low", "--exclusive"), preempt),
    End("slurmctld lost its state while the job ran", "sleep 300", ("--nodelist=node2",), lose_state("RUNNING"), is_lost=True),
    End("slurmctld lost its state while the job was pending", "true", ("--begin=now+500",), lose_state("PENDING"), is_lost=True),
)  # fmt: skip
WITH_CGROUPS = (
    End("out of memory in the batch step, with cgroups", EAT, ("--mem=50",), of_log=True),
    End("out of memory in a step, with cgroups", f"srun {EAT}", ("--mem=50",), of_log=True),
)
TOGETHER = (
    End("over the job's time limit", "sleep 300", ("--time=1",)),
    End("a step over its own time limit", "srun --time=1 sleep 300"),
    End("the reservation ended under the running job", "sleep 300", ("--reservation=short",)),
    End("its deadline passed while it was pending", "true", ("--nodelist=node2", "--exclusive", "--deadline=now+70", "--time=1")),
    End("a cloud node was not resumed within ResumeTimeout", "true", ("--partition=cloud",)),
    End("an operator's scancel of a running job", "sleep 100", (), cancel),
    End("scancel of a running job by an operator who is not root", "sleep 100", (), cancel_as_operator),
    End("scancel of a pending job", "true", ("--begin=now+500",), cancel_pending),
    End("--kill-on-invalid-dep=yes, and the job that it depends on failed", "true", ("--dependency=afterok:DEAD", "--kill-on-invalid-dep=yes")),
    End("the script exits 3", "exit 3"),
    End("a step fails, and the script with it", "srun bash -c 'exit 7'"),
    End("a step fails, and the script ends with 0", "srun false; exit 0"),
    End("the batch script is killed by SIGSEGV", "kill -SEGV $$"),
    End("a step is killed by SIGSEGV, and the script ends with its code", "srun bash -c 'kill -SEGV $$'", of_log=True),
    End("scancel --signal=KILL --batch", "sleep 100", (), kill_batch),
    End("slurmstepd cannot open the output file on the node", "true", ("--output=/proc/nowhere/log",)),
    End("requeued by an operator into the special exit state, then cancelled", "sleep 100", (), requeue_and_cancel("State=SpecialExit")),
    End("requeued by an operator, then cancelled", "sleep 100", (), requeue_and_cancel()),
    End("OverMemoryKill of the batch step, without cgroups", EAT, ("--mem=50",), of_log=True),
    End("OverMemoryKill of a step, without cgroups", f"srun {EAT}", ("--mem=50",), of_log=True),
    End("it waited for licences", "true", ("--licenses=gold",), hold_licence, steps=50),
    End("the burst buffer's stage-in failed, and an operator cancelled the held job", "#BB_LUA pool=p\ntrue", ("--uid=daemon",), cancel_held("the burst buffer's stage-in failed")),
)  # fmt: skip


@contextmanager
def recorder_on(*extra_conf: str) -> Iterator[Recorder]:
    """Daemons with hooks, burst buffer and cgroups as far as `extra_conf` names them, for the length of a block."""
    folder = Path(tempfile.mkdtemp(prefix="nb-record-"))
    folder.chmod(0o755)
    hooks = folder / "hooks"
    hooks.mkdir()
    for name in HOOKS:
        (hooks / name).write_text('#!/bin/sh\nif [ -e "$0.fail" ]; then exit 3; fi\n')
        (hooks / name).chmod(0o755)
    home = Path(tempfile.mkdtemp(prefix="nb-slurm-"))
    daemons = SlurmDaemons(home, extra_conf=[line.replace("HOOKS", str(hooks)) for line in extra_conf])
    (home / "burst_buffer.lua").write_text(BURST_BUFFER)
    (home / "burst_buffer.conf").touch()
    (home / "cgroup.conf").write_text(CGROUP_CONF)
    try:
        daemons.start()
        yield Recorder(daemons, folder, hooks)
    finally:
        daemons.stop()
        shutil.rmtree(folder)


def make_together(recorder: Recorder, ends: Sequence[End]) -> None:
    with ThreadPoolExecutor(max(1, len(ends))) as pool:
        list(pool.map(recorder.make, ends))


def main(part: str = "") -> None:
    """Make and print them all, those that disturb no others at the same time."""
    with recorder_on(*EXTRA_CONF) as recorder:
        recorder.run(
            "scontrol", "create", "reservation", "reservationname=short", "users=root", "nodes=node1", "starttime=now",
            "duration=1", "flags=overlap,ignore_jobs", "corecnt=1",
        )  # fmt: skip
        # The reserved core is on the other node.
        sbatch = ("sbatch", "--parsable", "--nodelist=node2", "--output=/dev/null")
        dead = recorder.run(*sbatch, "--wrap=exit 1")
        recorder.until_state(recorder.run(*sbatch, "--licenses=gold", "--wrap=sleep 25"), "RUNNING")
        recorder.until_state(dead, "FAILED")
        ends = [end._replace(options=tuple(option.replace("DEAD", dead) for option in end.options)) for end in TOGETHER]
        make_together(recorder, [end for end in ends if part in end.what])
        for end in ALONE:
            if part in end.what:
                recorder.make(end)
                recorder.run("scontrol", "update", "node=node2", "state=resume")
                recorder.until(
                    "idle", lambda: "idle" in recorder.run("sinfo", "-h", "-o", "%T", "-n", "node2").split(), 60
                )
    if wanted := [end for end in WITH_CGROUPS if part in end.what]:
        with recorder_on(*CGROUPS) as recorder:
            make_together(recorder, wanted)


if __name__ == "__main__":
    main(*sys.argv[1:])
