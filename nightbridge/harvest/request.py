"""What a harvest works on, as one model, and the harvest itself: the same on the flow's host and on a compute node."""

from collections.abc import Callable, Iterable
from pathlib import Path

from nightbridge.harvest.archive import committed_run, harvest, run_prefix
from nightbridge.models import (
    Checkout,
    Image,
    Job,
    LaunchPlan,
    Model,
    RunRecord,
    RunSpec,
    StoreSettings,
)
from nightbridge.outputs.experiment import read_run
from nightbridge.outputs.measurements import measure, read_settings
from nightbridge.store.protocol import ObjectStore
from nightbridge.store.transfers import Progress


class HarvestOrder(Model):
    """Everything that a harvest works on. It holds no secret, only the names of the places where they are found."""

    run: RunSpec
    checkout: Checkout
    image: Image
    plan: LaunchPlan
    jobs: tuple[Job, ...]
    store: StoreSettings
    tainted: tuple[str, ...] = ()

    @property
    def prefix(self) -> str:
        """Where the run goes in the store."""
        return run_prefix(self.run, self.jobs[-1].attempt)


def carry_out(
    order: HarvestOrder,
    store: ObjectStore,
    secrets: Iterable[str],
    on_progress: Callable[[Progress], None] | None = None,
) -> RunRecord:
    """Measure a run and store it; of one that is committed already, nothing is read here but what the store has.

    Args:
        order: What to harvest.
        store: The opened store of the order.
        secrets: Values that must not leave this machine.
        on_progress: As for `harvest`.

    Raises:
        TransientError: The store did not answer.
        PermanentError: The store refuses, or has another job's run there, or there is no room for masked copies.
        DamagedData: The run was committed earlier, and objects of it are missing.

    """
    committed = committed_run(store, order.prefix, order.jobs[-1])
    if committed is not None:
        return committed
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
        earlier=[read_run(job, _output_dir_of(job, order.plan)) for job in order.jobs[:-1]],
    )


def _output_dir_of(earlier: Job, plan: LaunchPlan) -> Path | None:
    """Where an earlier attempt wrote: the place in its own folder that the last one's plan has in its."""
    if plan.output_dir is None or not plan.output_dir.is_relative_to(plan.attempt_dir):
        return None
    return earlier.attempt_dir / plan.output_dir.relative_to(plan.attempt_dir)
