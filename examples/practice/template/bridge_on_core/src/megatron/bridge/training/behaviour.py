"""What a commit makes the run do, from `behaviour.yaml`: its own, and that of the submodule."""

import dataclasses
import os
from pathlib import Path

import yaml

BEHAVIOUR = Path(__file__).parents[1] / "behaviour.yaml"
CORE = Path(__file__).parents[4] / "3rdparty/Megatron-LM/examples/mimo/behaviour.yaml"
FACTORS = ("step_time_factor", "memory_factor", "lr_factor")


@dataclasses.dataclass(frozen=True)
class Behaviour:
    """See `behaviour.yaml` for what each field does."""

    step_time_factor: float = 1.0
    memory_factor: float = 1.0
    loss_offset: float = 0.0
    lr_factor: float = 1.0
    checkpoint_layout: str = "0.19"
    nan_at: int | None = None
    hang_at: int | None = None
    crash_at: int | None = None
    crash_share: float = 0.0
    stop_at: int | None = None
    partial_checkpoint: int | None = None
    print_flaky: int | None = None
    crash_in_teardown: bool = False
    slow_wall: float = 0.0

    def cuts_save(self, iteration):
        """Whether the job dies in the middle of this iteration's save."""
        return self.partial_checkpoint is not None and iteration >= self.partial_checkpoint


def read_behaviour(path=BEHAVIOUR, core=CORE):
    """Read both files, of which the submodule's factors multiply and its other changes win.

    The variable PRACTICE_STEP_TIME_FACTOR multiplies the step time as well. An unknown key is an error (TypeError).
    """
    own, inner = (Behaviour(**(yaml.safe_load(file.read_text(encoding="utf-8")) or {})) for file in (path, core))
    plain = Behaviour()
    changed = {name: value for name, value in vars(inner).items() if value != getattr(plain, name)}
    changed |= {name: getattr(own, name) * getattr(inner, name) for name in FACTORS}
    changed["step_time_factor"] *= float(os.environ.get("PRACTICE_STEP_TIME_FACTOR", "1"))
    return dataclasses.replace(own, **changed)
