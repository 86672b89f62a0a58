"""CloudAI's training_report.json."""

from pathlib import Path

import pytest

from nightbridge.launch.config_container import ConfigContainer
from nightbridge.models import GatePolicy
from nightbridge.outputs.experiment import read_run
from nightbridge.outputs.training_report import training_report
from tests.builders import make_test
from tests.nightbridge.outputs.builders import EventFileBuilder, RunFolder, measure

TRANSFORMER = {"tensor_model_parallel_size": 2, "num_layers": 32, "sequence_parallel": True}
CONTAINER = ConfigContainer(
    Path("ConfigContainer.yaml"),
    {"model": {"seq_length": 4096, "transformer": TRANSFORMER}, "train": {"global_batch_size": 128}},
)


def test_it_has_the_configuration_every_whole_step_and_statistics_without_warm_up_and_profile(
    run_folder: RunFolder,
) -> None:
    events = EventFileBuilder(run_folder.job_dir / "tb_logs" / "events.out.tfevents.1.node1.1.0", 1.0)
    for step in range(1, 21):
        events.scalar("iteration-time", step, 9.0 if 10 <= step <= 14 else step / 4)
        events.scalar("lm loss", step, 2.0)
        events.scalar("memory/mem-reserved-gigabytes", step, 64.0)
        if step != 20:
            events.scalar("memory/mem-allocated-gigabytes", step, 32.0)
    events.write()
    gate = GatePolicy(warmup_steps=5, post_profiling_steps=2)
    args = {"enable_nsys": True, "profiling_start_step": 10, "profiling_stop_step": 12, "num_gpus": 16}
    test = make_test(args, gate=gate)
    summary, table = measure(read_run(run_folder.job, None), gate, 20)

    report = training_report(table, summary, CONTAINER, test, 16, 2)

    assert [step["iteration"] for step in report["steps"]] == list(range(1, 20))
    assert report["steps"][0] == {
        "iteration": 1,
        "step_time_sec": 0.25,
        "loss": 2.0,
        "memory_reserved_bytes": 64e9,
        "memory_allocated_bytes": 32e9,
    }
    times = report["aggregation"]["step_time_sec"]
    assert (times["min"], times["max"], times["mean"]) == (1.5, 4.75, pytest.approx(28.75 / 9))
    assert report["aggregation"]["tflops_per_gpu"] is None
    expected = {"tensor_parallel_size": 2, "num_layers": 32, "sequence_parallel": True, "seq_length": 4096}
    computed = {"world_size": 16, "num_nodes": 2, "data_parallel_size": 8, "model_name": "llama3_8b"}
    assert report["config"].items() >= (expected | computed | {"global_batch_size": 128}).items()
