"""A run that a job left on disk, the same on every call, and a harvest of it; also as a process that can be killed."""

import json
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

import pandas as pd

from nightbridge.harvest.harvesting import HarvestRequest, store_run
from nightbridge.models import (
    Checkout,
    Checkpoint,
    CheckpointState,
    GitRepo,
    HarvestPolicy,
    Image,
    Job,
    JobState,
    JobStatus,
    LauncherEnvironment,
    LaunchPlan,
    Outcome,
    PinnedRepository,
    RunRecord,
    RunSpec,
    StoreSettings,
    Summary,
    TestDefinition,
)
from nightbridge.outputs.checkpoints import checkpoint_size
from nightbridge.outputs.event_files import metrics_parquet
from nightbridge.outputs.experiment import RunOutput
from nightbridge.outputs.measurements import MeasuredRun
from nightbridge.store.object_store import ObjectStore, open_store
from nightbridge.store.parallel import Progress
from tests.builders import saved_shards, torch_files

TOKEN = "hf_PlantedTokenThatMustStayHere"
MIB = 1 << 20
NOON = datetime(2026, 5, 4, 12, tzinfo=UTC)


@dataclass(frozen=True)
class LeftRun:
    """Everything that the harvest takes, and the folder it lies in."""

    spec: RunSpec
    checkout: Checkout
    image: Image
    plan: LaunchPlan
    jobs: tuple[Job, ...]
    output: RunOutput
    summary: Summary
    metrics: pd.DataFrame

    @property
    def job_dir(self) -> Path:
        return self.output.job_dir

    def with_sizes_of_now(self) -> "LeftRun":
        """The run after somebody has written into its checkpoints, as if they had been found as they are now."""
        found = (each.model_copy(update={"size": checkpoint_size(each.path)}) for each in self.output.checkpoints)
        return replace(self, output=self.output.model_copy(update={"checkpoints": tuple(found)}))

    def harvest(
        self,
        store: ObjectStore,
        secrets: tuple[str, ...] = (TOKEN,),
        on_progress: Callable[[Progress], None] | None = None,
        earlier: Sequence[RunOutput] = (),
        tainted: tuple[str, ...] = (),
        training_report: dict[str, Any] | None = None,
        load_with: str | None = None,
    ) -> RunRecord:
        request = HarvestRequest(
            run=self.spec,
            checkout=self.checkout,
            image=self.image,
            plan=self.plan,
            jobs=self.jobs,
            store=StoreSettings(url=store.url),
            series=f"{self.spec.test_slug}-0123456789ab",
            tainted=tainted,
            load_with=load_with,
        )
        measured = MeasuredRun(
            output=self.output, summary=self.summary, earlier=tuple(earlier), training_report=training_report
        )
        return store_run(request, measured, metrics_parquet(self.metrics), store, secrets, on_progress)


def make_run(folder: Path, policy: str = "last", shard_size: int = 3 * MIB, rest: int | None = None) -> LeftRun:
    """Write a run below `folder` and return it: two checkpoints, the older whole, a newer whole, one unfinished.

    The first shard of each has three times `shard_size`, in bytes; the others have `rest`, or else `shard_size` itself.
    """
    other = shard_size if rest is None else rest
    spec = _spec(policy)
    attempt_dir = folder / "runs" / spec.run_key / "a1"
    job_dir = attempt_dir / "nemorun/experiments/exp/exp_1/exp"
    logs = job_dir / "log-account.exp_4711_0.out"
    write(logs, "".join(f"iteration {n}/ 40 | lm loss: 2.{n}E+00 | token {TOKEN}\n" for n in range(40)).encode())
    batch_log = write(job_dir / "sbatch_account.exp_4711.out", b"\xff not UTF-8 \r progress \r done\n")
    event_file = write(job_dir / "tb_logs/events.out.tfevents.1.host.2.0", random.Random(7).randbytes(5000))
    config = write(job_dir / "configs/ConfigContainer.yaml", f"hf_token: {TOKEN}\n".encode())
    launcher_log = write(attempt_dir / "launcher.log", b"Launching\n")
    job_script = write(attempt_dir / "job.sh", f"export HF_TOKEN={TOKEN}\n".encode())
    save_dir = job_dir / "checkpoints"
    for iteration, shards in _shards_of_checkpoints(shard_size, other).items():
        checkpoint = save_dir / f"iter_{iteration:07d}"
        for name, content in shards.items():
            write(checkpoint / name, content)
        write(checkpoint / "run_config.yaml", b"a: 1\n")
        write(checkpoint / "tokenizer/vocab file.json", b"{}")
    write(save_dir / "latest_checkpointed_iteration.txt", b"40")
    write(save_dir / "latest_train_state.pt", torch_files.torch_save({"step": 40}, "train_state"))
    states = {20: CheckpointState.COMPLETE, 40: CheckpointState.COMPLETE, 60: CheckpointState.IN_PROGRESS}
    job = _job(spec, attempt_dir, job_dir)
    return LeftRun(
        spec=spec,
        checkout=_checkout(folder),
        image=Image(kind="none"),
        plan=LaunchPlan(
            run_key=spec.run_key,
            attempt=1,
            attempt_dir=attempt_dir,
            argv=("python", "setup_experiment.py"),
            cwd=folder,
            nodes=1,
            tasks_per_node=1,
        ),
        jobs=(job,),
        output=RunOutput(
            job_dir=job_dir,
            attempt_dir=attempt_dir,
            logs=(logs,),
            sbatch_logs=(batch_log,),
            launcher_log=launcher_log,
            event_files=(event_file,),
            config_container=config,
            checkpoints=tuple(
                Checkpoint(
                    path=save_dir / f"iter_{n:07d}",
                    iteration=n,
                    state=state,
                    reason="" if n < 60 else "no shard",
                    size=checkpoint_size(save_dir / f"iter_{n:07d}"),
                )
                for n, state in states.items()
            ),
            attempt_files=(job_script, launcher_log),
        ),
        summary=Summary(steps_expected=40, steps_done=40, step_time=0.25, final_loss=2.39),
        metrics=pd.DataFrame({"tag": ["lm loss"] * 3, "step": [1, 2, 3], "value": [3.0, 2.5, 2.4]}),
    )


@lru_cache(maxsize=2)  # up to 54 MB each
def _shards_of_checkpoints(shard_size: int, other: int) -> Mapping[int, Mapping[str, bytes]]:
    """The files of each iteration's checkpoint, made once for all tests; the first is large enough to be sent in parts."""
    chance = random.Random(8)
    sizes = {f"__{number}_0.distcp": other if number else 3 * shard_size for number in range(4)}
    return {iteration: saved_shards(sizes, chance) for iteration in (20, 40, 60)}


def write(path: Path, data: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        path.write_bytes(data)
    return path


def _spec(policy: str) -> RunSpec:
    repo = GitRepo(url="https://example.org/NVIDIA-NeMo/Megatron-Bridge.git")
    test = TestDefinition(
        id="llama3 8b",
        name="llama3 8b",
        cmd_args={"max_steps": 40},
        git_repos=(repo,),
        nemo_run_repo=repo,
        harvest=HarvestPolicy(checkpoint=policy),
    )
    return RunSpec(scenario="nightly", night="2026-05-04", test=test)


def _checkout(folder: Path) -> Checkout:
    repository = PinnedRepository(url="https://example.org/x.git", ref="main", commit="a" * 40, path=folder)
    environment = LauncherEnvironment(python=folder / "python", digest="e" * 64)
    return Checkout(megatron_bridge=repository, nemo_run=repository, environment=environment)


def _job(spec: RunSpec, attempt_dir: Path, job_dir: Path) -> Job:
    return Job(
        run_key=spec.run_key,
        attempt=1,
        job_id=4711,
        cluster="local",
        attempt_dir=attempt_dir,
        script=attempt_dir / "job.sh",
        experiment_dir=job_dir,
        submitted_at=NOON,
        status=JobStatus(job_id=4711, state=JobState.COMPLETED, exit_code=0, submitted_at=NOON, ended_at=NOON),
        outcome=Outcome.SUCCEEDED,
    )


def main() -> None:
    """Harvest once a line arrives on standard input: a test starts the clock there, and may kill this process."""
    folder, settings = Path(sys.argv[1]), StoreSettings.model_validate(json.loads(sys.argv[2]))
    left, store = make_run(folder), open_store(settings)
    print("ready", flush=True)
    sys.stdin.readline()
    left.harvest(store)
    print("done", flush=True)


if __name__ == "__main__":
    main()
