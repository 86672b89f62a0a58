"""The builders of what a run leaves, as fixtures."""

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests.builders import make_job
from tests.nightbridge.outputs.builders import EventFileBuilder, RunFolder, StepLine

DATA = Path(__file__).parent / "data"


@pytest.fixture
def event_file(tmp_path: Path) -> Callable[..., EventFileBuilder]:
    def build(folder: Path | str = "tb_logs", time: int = 1_760_000_000, uid: int = 0) -> EventFileBuilder:
        name = f"events.out.tfevents.{time:010d}.node1.4242.{uid}"
        return EventFileBuilder(tmp_path / folder / name, float(time))

    return build


@pytest.fixture
def step_line() -> type[StepLine]:
    return StepLine


@pytest.fixture
def run_folder(tmp_path: Path) -> RunFolder:
    name = "llama3-8b-2026-11-20-0123456789-a1"
    attempt_dir = tmp_path / "runs" / "llama3-8b-2026-11-20-0123456789" / "a1"
    experiment_dir = attempt_dir / "nemorun" / "experiments" / name / f"{name}_1763679098" / name
    experiment_dir.mkdir(parents=True)
    job = make_job(
        attempt_dir.parent.name,
        attempt_dir,
        cluster="local",
        experiment_dir=experiment_dir,
        submitted_at=datetime(2026, 11, 20, 22, 0, tzinfo=UTC),
    )
    return RunFolder(attempt_dir, job)


# What torch.distributed.checkpoint 2.13.0 wrote for two ranks; their shards had exactly these sizes.
SHARDS = {"__0_0.distcp": 4671, "__1_0.distcp": 7509}


@pytest.fixture
def write_checkpoint() -> Callable[..., Path]:
    """Write the parts of a checkpoint in their real order, up to and including `until`."""

    def write(save_dir: Path, iteration: int = 10, until: str = "run_config.yaml") -> Path:
        path = save_dir / f"iter_{iteration:07d}"
        parts: list[tuple[str, bytes]] = [(f"iter/{name}", bytes(size)) for name, size in SHARDS.items()]
        parts += [
            ("iter/.metadata", (DATA / "torch_2_13_two_ranks.metadata").read_bytes()),
            ("iter/metadata.json", b'{"sharded_backend": "torch_dist", "sharded_backend_version": 1}'),
            ("iter/train_state.pt", b"state"),
            ("latest_train_state.pt", b"state"),
            ("latest_checkpointed_iteration.txt", str(iteration).encode()),
            ("iter/run_config.yaml", b"checkpoint:\n  ckpt_format: torch_dist\nmodel:\n  _target_: megatron.X\n"),
        ]
        path.mkdir(parents=True)
        for name, content in parts:
            target = path / name[5:] if name.startswith("iter/") else save_dir / name
            target.write_bytes(content)
            if target.name == until:
                break
        return path

    return write
