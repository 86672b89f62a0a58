"""What goes wrong on purpose."""

import random
import time

_NETWORK = "torch.distributed.DistBackendError: a collective failed: ncclRemoteError: no answer"


class Fault(Exception):
    """A planned end with exit code 1."""


def before_iteration(iteration, behaviour):
    """Do what the behaviour plans before this iteration.

    Raises:
        Fault: The job is to end here.

    """
    if iteration == behaviour.hang_at:
        while True:
            time.sleep(3600)
    if iteration == behaviour.crash_at:
        raise Fault(f"RuntimeError: planned crash before iteration {iteration}")
    if iteration == 1 and random.random() < behaviour.crash_share:
        raise Fault("RuntimeError: planned failure of some starts")
    if iteration == behaviour.print_flaky:
        raise Fault(_NETWORK)
    if behaviour.slow_wall:
        time.sleep(behaviour.slow_wall)


def poison(iteration, behaviour, parameters):
    """Make the parameters NaN in the planned iteration; from there on training itself computes NaN."""
    if iteration == behaviour.nan_at:
        for value in parameters.values():
            value.fill(float("nan"))


def in_teardown(behaviour):
    """Fail when all is done, if that is planned.

    Raises:
        Fault: The job is to end with 1.

    """
    if behaviour.crash_in_teardown:
        raise Fault("RuntimeError: planned failure while the process group shuts down")
