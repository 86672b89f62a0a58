"""The harvest as a job of the cluster, for sites whose flows run where nothing big may run, such as a login node.

The flow writes an order, submits a job of a name that follows from the run's key, and waits; the job harvests as the
flow would have, and the flow reads the committed record. The order holds no secret's value: their values travel in the
job's environment, as those of the training do. A job is submitted once, as an attempt of a run is (see `slurm.front`),
in a folder of its own below the attempt's.
"""

import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from nightbridge.errors import PermanentError, TransientError
from nightbridge.files import write_atomically, write_model
from nightbridge.models import (
    Checkout,
    Image,
    Job,
    LaunchPlan,
    Model,
    RunRecord,
    RunSpec,
    SecretRef,
    Site,
    StoreSettings,
    utc_now,
)
from nightbridge.outputs.experiment import read_run
from nightbridge.outputs.measurements import measure
from nightbridge.outputs.settings import read_settings
from nightbridge.secrets import mask_secrets, resolve_secret
from nightbridge.slurm.attempts import (
    AttemptContext,
    Submission,
    current_attempt,
    open_attempt,
    read_exit_code,
    read_refusal,
    read_submission,
)
from nightbridge.slurm.cluster import open_cluster
from nightbridge.slurm.environment import launcher_base
from nightbridge.slurm.front import ATTEMPT_VARIABLE, find_submission, install_front
from nightbridge.slurm.ledger import read_ended
from nightbridge.store.harvest import harvest, load_record, run_prefix
from nightbridge.store.objects import ObjectStore, open_store
from nightbridge.store.progress import Progress

FOLDER = "harvest"
"""Below the attempt's folder: the harvest's own attempts."""
ORDER, FAILURE, LOG = "order.json", "failure.json", "harvest.log"

VARIABLES = "NIGHTBRIDGE_HARVEST_"
"""How the variables of the job's environment that hold secrets begin."""

SUBMIT_TIMEOUT = 300.0
"""Seconds for the front, which asks Slurm for the job before it submits one."""

_LONGEST_NAME = 100


class HarvestOrder(Model):
    """Everything that a harvest works on. Secrets are references, to the environment when a job carries it out."""

    run: RunSpec
    checkout: Checkout
    image: Image
    plan: LaunchPlan
    jobs: tuple[Job, ...]
    store: StoreSettings
    tainted: tuple[str, ...] = ()
    secrets: tuple[SecretRef, ...] = ()

    @property
    def prefix(self) -> str:
        """Where the run goes in the store."""
        return run_prefix(self.run, self.jobs[-1].attempt)


class _Failure(Model):
    kind: Literal["transient", "permanent"]
    what: str
    thing: str
    advice: str


def carry_out(
    order: HarvestOrder,
    store: ObjectStore,
    secrets: Iterable[str],
    on_progress: Callable[[Progress], None] | None = None,
) -> RunRecord:
    """Measure a run and store it.

    Args:
        order: What to harvest.
        store: The opened store of the order.
        secrets: Values that must not leave this machine.
        on_progress: As for `harvest`.

    """
    left = read_run(order.jobs[-1], order.plan.output_dir, order.plan.checkpoint_dir)
    settings = read_settings(order.run, left.config_container)
    summary, metrics = measure(left, order.run.test.gate, order.plan.max_steps, settings, order.jobs[-1])
    return harvest(
        order.run,
        order.checkout,
        order.image,
        order.plan,
        order.jobs,
        output=left,
        summary=summary,
        metrics=metrics,
        store=store,
        secrets=secrets,
        on_progress=on_progress,
        tainted=order.tainted,
    )


def for_a_job(order: HarvestOrder, references: Iterable[SecretRef]) -> tuple[HarvestOrder, dict[str, SecretRef]]:
    """Make an order for a job.

    Args:
        order: The order as the flow has it.
        references: Every secret that the run or the store used.

    Returns:
        The order with all secrets in the job's environment, and where the values of those variables are found now.

    """
    variables = {f"{VARIABLES}{number}": found for number, found in enumerate(dict.fromkeys(references))}
    renamed = {found: SecretRef(source="env", name=name) for name, found in variables.items()}
    keys = {
        field: renamed[key] for field in ("access_key", "secret_key") if (key := getattr(order.store, field)) in renamed
    }
    store = order.store.model_copy(update=keys)
    return order.model_copy(update={"store": store, "secrets": tuple(renamed.values())}), variables


def submit_harvest(order: HarvestOrder, site: Site, secrets: Mapping[str, str]) -> Job:
    """Return the live or ended job of this harvest; a new one where there is none or the last one has failed.

    Args:
        order: From `for_a_job`.
        site: Where the job runs.
        secrets: The variables of `for_a_job` with their values.

    Raises:
        TransientError: It is not certain whether there is a job, or the cluster takes none now.
        LaunchRefused: Slurm refused the job for good.

    """
    cluster = open_cluster(site.cluster, site.workspace)
    context = _attempt(order, site)
    if submission := find_submission(context, cluster):
        return _job_of(context, submission)
    folder = context.attempt_dir
    write_model(folder / ORDER, order)
    script = folder / "harvest.sh"
    write_atomically(script, _script(folder).encode())
    environment = launcher_base(os.environ) | _own_credentials(order.store) | dict(secrets)
    environment |= cluster.launch_environment() | {ATTEMPT_VARIABLE: str(folder)}
    began = utc_now()
    try:
        subprocess.run(
            [str(install_front(folder) / "sbatch"), *_options(site, folder), str(script)],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=SUBMIT_TIMEOUT,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise TransientError("sbatch does not end", thing=context.name, advice="It is looked up again") from error
    if submission := read_submission(folder):
        return _job_of(context, submission)
    if refusal := read_refusal(folder, since=began):
        raise refusal.error()
    raise TransientError("no job was submitted", thing=context.name, advice="It is tried again")


def harvested(order: HarvestOrder, job: Job, store: ObjectStore) -> RunRecord:
    """The record of a run whose harvest job has ended.

    Raises:
        TransientError: The job committed nothing, for a reason that may pass; the next call of `submit_harvest`
            submits another.
        PermanentError: The job committed nothing, for a reason that stays.

    """
    record = load_record(store, order.prefix)
    if record is not None:
        return record
    failure = job.attempt_dir / FAILURE
    if failure.exists():
        known = _Failure.model_validate_json(failure.read_bytes())
        kind = TransientError if known.kind == "transient" else PermanentError
        raise kind(known.what, thing=known.thing, advice=known.advice)
    state = job.status.state if job.status else "unknown"
    raise TransientError(
        f"the harvest job {job.job_id} ended as {state} and committed nothing",
        thing=str(job.attempt_dir / LOG),
        advice="Read its log; nodes must see the workspace and this Python",
    )


def main(arguments: Sequence[str]) -> int:
    """Carry an order out on a node; the exit code is 0, 75 (EX_TEMPFAIL) for what may pass, or 1."""
    folder = Path(arguments[0])
    (folder / FAILURE).unlink(missing_ok=True)
    order = HarvestOrder.model_validate_json((folder / ORDER).read_bytes())
    values: list[str] = []
    try:
        values += [resolve_secret(reference) for reference in order.secrets]
        record = carry_out(order, open_store(order.store), values, lambda progress: print(progress, flush=True))
    except (TransientError, PermanentError) as error:
        transient = isinstance(error, TransientError)
        words = [mask_secrets(text, values) for text in (error.what, error.thing, error.advice)]
        failure = _Failure(
            kind="transient" if transient else "permanent", what=words[0], thing=words[1], advice=words[2]
        )
        write_model(folder / FAILURE, failure)
        print(mask_secrets(str(error), values), file=sys.stderr)
        return 75 if transient else 1
    print(f"kept at {record.store_url}/{record.prefix}")
    return 0


def _attempt(order: HarvestOrder, site: Site) -> AttemptContext:
    """The harvest's attempt to go on with: a new one when the newest has ended, since nothing was committed."""
    head = f"{FOLDER}-a{order.jobs[-1].attempt}-"
    # The end of a run key tells runs apart; the job's name is this and `-a1`.
    key = head + order.run.run_key[-(_LONGEST_NAME - len(head)) :].lstrip("-")
    folder = order.jobs[-1].attempt_dir / FOLDER
    root = site.cluster.root or site.workspace.absolute() / "cluster"
    cluster = site.cluster.model_copy(update={"root": root} if site.cluster.kind == "local" else {})
    newest = current_attempt(folder, key, cluster)
    ended = read_exit_code(newest.attempt_dir) is not None or read_ended(newest.attempt_dir) is not None
    return open_attempt(folder, key, cluster) if ended else newest


def _script(folder: Path) -> str:
    # Isolated (-I) as the front: what lies in the folder that the job starts in is not ours.
    root = str(Path(__file__).resolve().parents[2])
    start = (
        f"import sys; sys.path.append({root!r}); from nightbridge.store.job import main; sys.exit(main(sys.argv[1:]))"
    )
    return f"#!/bin/sh\nexec {shlex.join([sys.executable, '-I', '-c', start, str(folder)])}\n"


def _options(site: Site, folder: Path) -> tuple[str, ...]:
    cluster = site.cluster
    named = {
        "account": cluster.account,
        "partition": cluster.partition,
        "qos": cluster.qos,
        "reservation": cluster.reservation,
    }
    asked = [f"--{name}={value}" for name, value in named.items() if value]
    return ("--nodes=1", "--ntasks=1", f"--output={folder / LOG}", *asked, *site.harvest.sbatch_args)


def _own_credentials(store: StoreSettings) -> dict[str, str]:
    """Where boto3 searches by itself it must find on the node what it finds here."""
    if store.access_key is not None:
        return {}
    return {name: value for name, value in os.environ.items() if name.startswith("AWS_")}


def _job_of(context: AttemptContext, submission: Submission) -> Job:
    return Job(
        run_key=context.run_key,
        attempt=context.attempt,
        job_id=submission.job_id,
        cluster=submission.cluster,
        attempt_dir=context.attempt_dir,
        script=submission.script,
        experiment_dir=submission.experiment_dir,
        submitted_at=submission.submitted_at,
    )
