"""What of a run's configuration its measurements depend on: GPUs, tokens of one step, steps that a profiler slows.

The dumped `ConfigContainer.yaml` counts where there is one, since it is what really ran; the test file is the fallback.
"""

from pathlib import Path

from nightbridge.config.containers import Container, read_container
from nightbridge.errors import InvalidInput
from nightbridge.launch.resources import num_gpus
from nightbridge.models import Model, RunSpec

# Megatron-Bridge's handle_profiling_step() looks at the steps that are done, so a window A to B is the iterations A + 1
# to B. It is left after iteration B was measured, so stopping falls into B + 1. PyTorch's profiler counts one step
# further and warms up one step before its window.
_TEARDOWN = 1
_NSYS_LEAD, _PYTORCH_LEAD = 1, -1
_DEFAULT_START, _DEFAULT_STOP = 10, 11


class ProfiledSteps(Model):
    """Iterations whose time a profiler spoils, first and last."""

    first: int
    last: int

    def spoils(self, iteration: int, interval: int) -> bool:
        """Whether a record at `iteration` over the last `interval` iterations has one of them in it."""
        return self.first <= iteration and iteration - interval < self.last


class RunSettings(Model):
    """What measurements need to know; None where unknown."""

    num_gpus: int | None = None
    global_batch_size: int | None = None
    sequence_length: int | None = None
    profiled: ProfiledSteps | None = None


def read_settings(spec: RunSpec, config_container: Path | None) -> RunSettings:
    """The settings of a run, from what it dumped and, for what that does not say, from its test.

    A `ConfigContainer.yaml` that is no ConfigContainer is passed over.
    """
    requested = _requested(spec)
    if config_container is None:
        return requested
    try:
        container = read_container(config_container)
    except InvalidInput:
        return requested
    return RunSettings(
        num_gpus=requested.num_gpus,
        global_batch_size=container.integer("train.global_batch_size") or requested.global_batch_size,
        sequence_length=(
            container.integer("model.seq_length")
            or container.integer("dataset.seq_length")
            or requested.sequence_length
        ),
        profiled=_profiled_in(container),
    )


def _requested(spec: RunSpec) -> RunSettings:
    args = spec.test.cmd_args
    return RunSettings(
        num_gpus=num_gpus(spec.test),
        global_batch_size=args.get("gb"),
        sequence_length=args.get("seq_length"),
        profiled=_profiled(
            int(args.get("profiling_start_step", _DEFAULT_START)),
            int(args.get("profiling_stop_step", _DEFAULT_STOP)),
            nsys=bool(args.get("enable_nsys")),
            pytorch=bool(args.get("pytorch_profiler")),
        ),
    )


def _profiled_in(container: Container) -> ProfiledSteps | None:
    return _profiled(
        container.integer("profiling.profile_step_start") or 0,
        container.integer("profiling.profile_step_end") or 0,
        nsys=container.is_on("profiling.use_nsys_profiler"),
        pytorch=container.is_on("profiling.use_pytorch_profiler"),
    )


def _profiled(start: int, stop: int, *, nsys: bool, pytorch: bool) -> ProfiledSteps | None:
    if stop <= start or not (nsys or pytorch):
        return None
    lead = _PYTORCH_LEAD if pytorch else _NSYS_LEAD
    return ProfiledSteps(first=max(start + lead, 1), last=stop + _TEARDOWN)
