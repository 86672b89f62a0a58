"""What a commit makes the run do, from `behaviour.yaml`."""

import dataclasses
from pathlib import Path

import yaml

BEHAVIOUR = Path(__file__).parents[1] / "behaviour.yaml"


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


def read_behaviour(path=BEHAVIOUR):
    """Read the file; an unknown key is an error (TypeError)."""
    return Behaviour(**(yaml.safe_load(path.read_text(encoding="utf-8")) or {}))
