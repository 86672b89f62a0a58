import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nightbridge.models import CheckpointState
from nightbridge.outputs.experiment import read_facts, read_run
from tests.nightbridge.outputs.builders import EventFileBuilder, RunFolder


class TestReadRun:
    def test_a_job_that_left_nothing_has_only_empty_fields(self, run_folder: RunFolder) -> None:
        run_folder.job_dir.rmdir()
        output = read_run(run_folder.job, None)
        assert output.logs + output.sbatch_logs + output.event_files == ()
        assert (output.checkpoints, output.not_stored) == ((), ())
        assert (output.config_container, output.repo_status, output.launcher_log) == (None, None, None)

    def test_everything_that_a_run_in_a_container_leaves_is_found(
        self, run_folder: RunFolder, write_checkpoint: Callable[..., Path]
    ) -> None:
        log = run_folder.log("text")
        batch = run_folder.write(f"sbatch_acct-acct.{run_folder.job.name}_4711.out", "text")
        events = run_folder.curves(range(1, 3))
        config = run_folder.write("configs/ConfigContainer.yaml", "a: 1")
        status = run_folder.write("configs/repo_status.json", "[]")
        profile = run_folder.write("nsys_profile/profile_0.nsys-rep", "x")
        write_checkpoint(run_folder.job_dir / "checkpoints", iteration=10)
        for name in ("launcher.log", "job.sh", "submission.json", "exit_code"):
            (run_folder.attempt_dir / name).write_text("x")

        output = read_run(run_folder.job, None)

        assert (output.logs, output.sbatch_logs, output.event_files) == ((log,), (batch,), (events,))
        assert (output.config_container, output.repo_status, output.profiles) == (config, status, (profile,))
        assert [(found.iteration, found.state) for found in output.checkpoints] == [(10, CheckpointState.COMPLETE)]
        assert output.launcher_log == run_folder.attempt_dir / "launcher.log"
        assert [path.name for path in output.attempt_files] == [
            "job.sh",
            "submission.json",
            "exit_code",
            "launcher.log",
        ]

    @pytest.mark.parametrize(
        "name",
        [
            "nsys_profile/profile_0.nsys-rep",
            "torch_profile/rank-0.json.gz",
            "chakra/rank-0.json.gz",
            "tb_logs/node1_4242.1760000000000000000.pt.trace.json",  # v0.3
            "pytorch_profile/snapshot_0.pickle",
            "snapshot_0.pickle",
            "snapshot_oom_rank-7.pickle",
        ],
    )
    def test_what_a_profiler_of_any_release_writes_is_a_profile(self, run_folder: RunFolder, name: str) -> None:
        profile = run_folder.write(name, "x")
        output = read_run(run_folder.job, None)
        assert (output.profiles, output.not_stored) == ((profile,), ())

    def test_a_run_without_a_container_is_found_in_its_output_folder(
        self, run_folder: RunFolder, event_file: Callable[..., EventFileBuilder], write_checkpoint: Callable[..., Path]
    ) -> None:
        output_dir = run_folder.attempt_dir / "output"
        events = event_file(output_dir / "tb_logs").scalar("lm loss", 1, 1.0).write()
        write_checkpoint(output_dir / "checkpoints")
        (output_dir / "configs").mkdir()
        (output_dir / "configs" / "ConfigContainer.yaml").write_text("a: 1")
        output = read_run(run_folder.job, output_dir)
        assert output.event_files == (events,)
        assert len(output.checkpoints) == 1
        assert output.config_container == output_dir / "configs" / "ConfigContainer.yaml"

    def test_folders_that_an_experiment_name_puts_elsewhere_are_found(
        self, run_folder: RunFolder, event_file: Callable[..., EventFileBuilder], write_checkpoint: Callable[..., Path]
    ) -> None:
        write_checkpoint(run_folder.job_dir / "my_experiment" / "checkpoints")
        events = event_file(run_folder.job_dir / "my_experiment" / "tb_logs").scalar("lm loss", 1, 1.0).write()
        output = read_run(run_folder.job, None)
        assert output.event_files == (events,)
        assert len(output.checkpoints) == 1

    def test_restarts_are_in_order_and_logs_of_other_jobs_are_not_ours(self, run_folder: RunFolder) -> None:
        restarts = [run_folder.log("x", restart=number) for number in (10, 2, 0)]
        run_folder.log("foreign", job_id=4712)
        assert read_run(run_folder.job, None).logs == tuple(reversed(restarts))

    def test_a_title_that_ends_with_the_jobs_number_is_not_taken_for_it(self, run_folder: RunFolder) -> None:
        run_folder.write("log-acct.title_4711_9_0.out", "job 9")
        assert read_run(run_folder.job, None).logs == ()

    def test_logs_that_name_no_job_are_the_fallback(self, run_folder: RunFolder) -> None:
        plain = run_folder.write("log.out", "text")
        assert read_run(run_folder.job, None).logs == (plain,)
        own = run_folder.log("text")
        assert read_run(run_folder.job, None).logs == (own,)

    def test_the_archive_of_the_launchers_repository_is_not_output(
        self, run_folder: RunFolder, event_file: Callable[..., EventFileBuilder]
    ) -> None:
        event_file(run_folder.job_dir / "code" / "tests" / "data").scalar("lm loss", 1, 1.0).write()
        assert read_run(run_folder.job, None).event_files == ()

    def test_links_out_of_the_tree_are_not_followed_and_reported(
        self,
        run_folder: RunFolder,
        event_file: Callable[..., EventFileBuilder],
        tmp_path: Path,
        write_checkpoint: Callable[..., Path],
    ) -> None:
        foreign = event_file("foreign").scalar("lm loss", 1, 1.0).write()
        write_checkpoint(tmp_path / "foreign_checkpoints")
        inside = run_folder.curves(range(1, 2))
        (run_folder.job_dir / "tb_link").symlink_to(foreign.parent)
        (run_folder.job_dir / "checkpoints").symlink_to(tmp_path / "foreign_checkpoints")
        (run_folder.job_dir / foreign.name).symlink_to(foreign)
        output = read_run(run_folder.job, None)
        assert output.event_files == (inside,)
        assert output.checkpoints == ()
        assert len(output.not_stored) == 3
        assert all("link to outside" in reason for _path, reason in output.not_stored)

    def test_products_that_no_rule_knows_are_noted_with_their_bytes(
        self, run_folder: RunFolder, write_checkpoint: Callable[..., Path]
    ) -> None:
        checkpoint = write_checkpoint(run_folder.job_dir / "checkpoints", iteration=10)
        (checkpoint.parent / "latest_checkpointed_iteration.txt").write_text("10")
        run_folder.curves(range(1, 2))
        for own in ("title.tar.gz", "scripts/title.sh", "configs/title_executor.yaml", "env_4711.log", "train.sh"):
            run_folder.write(own, "of the launcher")
        for shard in ("model-1.safetensors", "nested/model-2.safetensors"):
            run_folder.write(f"hf_export/{shard}", "x" * 500)
        run_folder.write("answers: all.jsonl", "{}")
        assert read_run(run_folder.job, None).not_stored == (
            (f"{run_folder.job_dir}/answers: all.jsonl", "no rule stores it (1 file, 2 bytes)"),
            (f"{run_folder.job_dir}/hf_export", "no rule stores it (2 files, 1000 bytes)"),
        )

    def test_local_checkpoints_among_stored_ones_are_noted_by_their_own_folder(
        self, run_folder: RunFolder, write_checkpoint: Callable[..., Path]
    ) -> None:
        write_checkpoint(run_folder.job_dir / "checkpoints", iteration=10)
        for rank in (0, 1):
            run_folder.write(f"checkpoints/local/{rank}/iter_0000015_{rank}_local.pt", "x" * 50)
        output = read_run(run_folder.job, None)
        assert [(each.iteration, each.state) for each in output.checkpoints] == [(10, "complete")]
        assert output.not_stored == (
            (f"{run_folder.job_dir}/checkpoints/local", "no rule stores it (2 files, 100 bytes)"),
        )

    def test_where_a_data_loader_stood_is_no_checkpoint_of_its_own(
        self, run_folder: RunFolder, write_checkpoint: Callable[..., Path]
    ) -> None:
        save_dir = run_folder.job_dir / "checkpoints"
        write_checkpoint(save_dir, iteration=10)
        run_folder.write("checkpoints/energon/iter_0000010/train_dataloader_dprank000.pt", "state")
        assert [found.path for found in read_run(run_folder.job, None).checkpoints] == [save_dir / "iter_0000010"]

    @pytest.mark.parametrize(
        ("dump", "state"),
        [
            (
                "_target_: megatron.bridge.training.config.ConfigContainer\ncheckpoint: {save: /nemo_run/ckpt}\n",
                "damaged",
            ),
            (
                "_target_: megatron.bridge.training.config.ConfigContainer\ncheckpoint: {save: /nemo_run/own}\n",
                "complete",
            ),
            ("_target_: megatron.bridge.training.config.ConfigContainer\ncheckpoint: {save: null}\n", "complete"),
            ("_target_: lm.Config\ncheckpoint: {save: /nemo_run/ckpt}\n", "complete"),
            ("checkpoint: {save: /nemo_run/ckpt}\n", "complete"),
        ],
    )
    def test_what_bridge_saved_needs_what_bridge_writes(
        self, run_folder: RunFolder, write_checkpoint: Callable[..., Path], dump: str, state: str
    ) -> None:
        save_dir = run_folder.job_dir / "ckpt"
        path = write_checkpoint(save_dir)
        run_folder.write("configs/ConfigContainer.yaml", dump + "model: {}\ntrain: {}\n")
        (whole,) = read_run(run_folder.job, None).checkpoints
        for part in (path / "train_state.pt", path / "run_config.yaml", save_dir / "latest_train_state.pt"):
            part.unlink()
        (found,) = read_run(run_folder.job, None).checkpoints
        assert (whole.state, found.state) == (CheckpointState.COMPLETE, state)
        assert found.reason == ("there is no train_state.pt, although later files are present" * (state == "damaged"))

    def test_of_two_folders_of_the_name_that_bridge_saved_to_either_may_be_megatron_lms(
        self, run_folder: RunFolder, write_checkpoint: Callable[..., Path]
    ) -> None:
        run_folder.write(
            "configs/ConfigContainer.yaml",
            "_target_: megatron.bridge.X\ncheckpoint: {save: /nemo_run/ckpt}\nmodel: {}\ntrain: {}\n",
        )
        write_checkpoint(run_folder.job_dir / "ckpt")
        converted = write_checkpoint(run_folder.job_dir / "megatron-lm/ckpt")
        for part in (
            converted / "train_state.pt",
            converted / "run_config.yaml",
            converted.parent / "latest_train_state.pt",
        ):
            part.unlink()
        states = [found.state for found in read_run(run_folder.job, None).checkpoints]
        assert states == [CheckpointState.COMPLETE] * 2

    def test_output_inside_the_job_folder_is_found_once(self, run_folder: RunFolder) -> None:
        run_folder.curves(range(1, 2))
        assert len(read_run(run_folder.job, run_folder.job_dir / "tb_logs").event_files) == 1

    def test_the_model_survives_json(self, run_folder: RunFolder, write_checkpoint: Callable[..., Path]) -> None:
        run_folder.curves(range(1, 3))
        write_checkpoint(run_folder.job_dir / "checkpoints")
        output = read_run(run_folder.job, None)
        assert type(output).model_validate_json(output.model_dump_json()) == output


LOG = """\
=============
== PyTorch ==
=============

NVIDIA Release 25.09 (build 204519324)
PyTorch Version 2.9.0a0+50eac811a6
NOTE: CUDA Forward Compatibility mode ENABLED.
  Using CUDA 13.0 driver version 580.82.07 with kernel driver version 550.54.15.
node1:4242:4242 [0] NCCL INFO NCCL version 2.27.7+cuda13.0
"""


@pytest.fixture
def facts(run_folder: RunFolder) -> Any:
    return lambda *pinned: read_facts(read_run(run_folder.job, None), run_folder.job, pinned)


def test_the_log_tells_driver_nccl_and_the_images_release(
    run_folder: RunFolder, facts: Callable[..., dict[str, str]]
) -> None:
    run_folder.log(LOG)

    assert facts() == {
        "driver": "550.54.15",
        "NCCL": "2.27.7",
        "CUDA of NCCL": "13.0",
        "image release": "25.09",
        "PyTorch": "2.9.0a0+50eac811a6",
    }


def test_nvidia_smi_in_a_prologue_tells_the_driver(run_folder: RunFolder, facts: Callable[..., dict[str, str]]) -> None:
    run_folder.log("| NVIDIA-SMI 550.54.15    Driver Version: 550.54.15    CUDA Version: 12.4     |\n")

    assert facts() == {"driver": "550.54.15", "CUDA of the driver": "12.4"}


def test_of_a_dumped_environment_only_versions_are_taken(
    run_folder: RunFolder, facts: Callable[..., dict[str, str]]
) -> None:
    run_folder.log(LOG)
    dump = run_folder.job_dir / f"env_{run_folder.job.job_id}.log"
    dump.write_text("HF_TOKEN=hf_secret\nCUDA_VERSION=13.0.1.012\nNCCL_VERSION=2.27.6\nCUDA_DRIVER_VERSION=580.82.07\n")

    found = facts()

    assert (found["CUDA"], found["driver that CUDA brings"]) == ("13.0.1.012", "580.82.07")
    assert found["NCCL"] == "2.27.6"  # the environment counts before the log
    assert not any("hf_secret" in value for value in found.values())


def test_commits_inside_the_image_are_facts_and_pinned_ones_are_not(
    run_folder: RunFolder, facts: Callable[..., dict[str, str]]
) -> None:
    status = [{"name": "Megatron-LM", "sha": "c" * 40}, {"name": "Megatron-Bridge", "sha": "a" * 40}, {"name": "TE"}]
    folder = run_folder.job_dir / "configs"
    folder.mkdir(parents=True)
    (folder / "repo_status.json").write_text(json.dumps(status))

    assert facts("a" * 40) == {"Megatron-LM in the image": "c" * 12}


@pytest.mark.parametrize(
    "text", ["", "{", '{"name": 1}', "[1, null]", "[" * 100_000, '[{"sha": "refs/heads/m\\u0000"}]']
)
def test_a_status_that_is_none_says_nothing(
    run_folder: RunFolder, facts: Callable[..., dict[str, str]], text: str
) -> None:
    folder = run_folder.job_dir / "configs"
    folder.mkdir(parents=True)
    (folder / "repo_status.json").write_text(text)

    assert facts() == {}
