"""Bad input: one message that says what, where and what to do, the exit code, and nothing left half done."""

import json
import subprocess
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest

from examples.practice.repositories import PracticeRepositories
from tests.flows.practice_night import Entry, nightbridge, nightbridge_here, write_scenario, write_site
from tests.real.prefect_server import PrefectServer
from tests.real.s3_servers import S3Server

INVALID, INFRASTRUCTURE = 2, 4

Finished = subprocess.CompletedProcess[str]


@dataclass(frozen=True)
class Place:
    """A folder with the samples, a site file and a workspace that nothing has used yet."""

    folder: Path
    site: Path
    server: PrefectServer
    output: pytest.CaptureFixture[str]

    @property
    def workspace(self) -> Path:
        return self.folder / "workspace"

    @property
    def test(self) -> Path:
        return self.folder / "conf" / "llama_small.toml"

    def change(self, old: str, new: str) -> Path:
        """Write the sample test with one of its texts changed."""
        text = self.test.read_text()
        assert old in text
        path = self.folder / "conf" / "changed.toml"
        path.write_text(text.replace(old, new))
        return path

    def nightbridge(self, *arguments: str | Path, **variables: str) -> Finished:
        return nightbridge_here(self.output, *arguments, **variables)

    def program(self, *arguments: str | Path, **variables: str) -> Finished:
        """Run a command as a person does."""
        return nightbridge(*arguments, environment={**self.server.environment, **variables})

    def run_command(self, file: Path) -> list[str | Path]:
        return ["run", file, "--system", self.site, "--night", "n1"]

    def run(self, file: Path, *options: str | Path) -> Finished:
        return self.nightbridge(*self.run_command(file), *options)

    def leftovers(self) -> list[str]:
        """What a run that never started must not leave: checkouts, attempts, stored runs, jobs, half-written files."""
        begun = ("checkouts/*", "runs/*", "store/runs/*", "store/history/*", "cluster/jobs/*")
        halves = ("*.tmp", "*.lease", "*.lock", "*.check-*")
        found = [path for pattern in begun for path in self.workspace.glob(pattern)]
        found += [path for pattern in halves for path in self.workspace.rglob(pattern)]
        return [str(path.relative_to(self.workspace)) for path in found]


@pytest.fixture
def place(
    tmp_path: Path,
    repositories: PracticeRepositories,
    environments_dir: Path,
    prefect_server: PrefectServer,
    flows_here: None,
    capfd: pytest.CaptureFixture[str],
) -> Place:
    write_scenario(tmp_path / "conf", repositories, "one", Entry(id="one"))
    site = write_site(tmp_path / "site.toml", workspace=tmp_path / "workspace", environments=environments_dir)
    return Place(tmp_path, site, prefect_server, capfd)


def the_message(finished: Finished, code: int) -> str:
    """The one message of a command that was refused."""
    told = [line for line in finished.stderr.splitlines() if line.startswith("nightbridge: ")]
    assert finished.returncode == code, finished.stderr
    assert "Traceback" not in finished.stderr + finished.stdout
    assert finished.stdout == ""
    assert len(told) == 1, finished.stderr
    return finished.stderr[finished.stderr.index(told[0]) :].strip()


def the_reason(finished: Finished, code: int) -> str:
    """The one reason below the table of a night with one test."""
    lines = [line for line in finished.stdout.splitlines() if line.startswith("llama_small: ")]
    told = [line for line in lines if ". next: nightbridge " not in line]
    assert finished.returncode == code, finished.stderr
    assert "Traceback" not in finished.stderr + finished.stdout
    assert len(told) == 1, finished.stdout
    return told[0].removeprefix("llama_small: ")


# --- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [["run"], ["run", "--json"], ["render"]])
def test_a_missing_file(place: Place, command: list[str]) -> None:
    finished = place.program(*command, place.folder / "nowhere.toml")

    assert the_message(finished, INVALID) == f"nightbridge: {place.folder}/nowhere.toml: no such file. Check the path"


def test_a_folder_in_place_of_a_file(place: Place) -> None:
    finished = place.run(place.folder)

    assert the_message(finished, INVALID).startswith(f"nightbridge: {place.folder}: cannot be read: Is a directory.")


def test_a_file_that_is_no_toml(place: Place) -> None:
    file = place.change('name = "llama_small"', 'name = "llama_small')

    message = the_message(place.run(file), INVALID)

    assert message.startswith(f"nightbridge: {file}: not valid TOML: Illegal character '\\n' (at line ")
    assert message.endswith("Fix the syntax there")
    assert not place.workspace.exists()


def test_an_unknown_key_is_told_with_its_line_and_the_nearest_known_one(place: Place) -> None:
    file = place.change("num_gpus = 2", "num_gpuss = 2")
    line = 1 + file.read_text().splitlines().index("num_gpuss = 2")

    message = the_message(place.run(file), INVALID)

    assert message.splitlines() == [
        f"nightbridge: {file}: no test of it can run. Fix the following",
        f"  {file}:{line}: cmd_args.num_gpuss: unknown key; did you mean 'num_gpus'?",
    ]
    assert not place.workspace.exists()


def test_a_broken_rule_starts_nothing(place: Place) -> None:
    file = place.change("num_gpus = 2", "num_gpus = 2\ntp = 3")
    line = 1 + file.read_text().splitlines().index("num_gpus = 2")

    message = the_message(place.run(file), INVALID)

    assert f"\n  {file}:{line}, {file}:{line + 1}: num_gpus 2 is not a multiple of tp 3" in message
    assert "[gpus-divide]" in message
    assert not place.workspace.exists()


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ('name = "llama_small"', 'name = "llama_small', "not valid TOML"),
        ("num_gpus = 2", "num_gpuss = 2", "did you mean 'num_gpus'?"),
    ],
)
def test_validate_tells_the_same(place: Place, old: str, new: str, told: str) -> None:
    file = place.change(old, new)

    finished = place.nightbridge("validate", file)

    assert (finished.returncode, finished.stderr) == (INVALID, "")
    assert f"{file}:" in finished.stdout
    assert told in finished.stdout


# --- repositories ----------------------------------------------------------------------------------------------------


def test_an_unknown_commit_is_told_with_its_repository_and_the_nearest_one(place: Place) -> None:
    file = place.change('commit = "main"', 'commit = "mian"')
    url = tomllib.loads(file.read_text())["git_repos"][0]["url"]

    reason = the_reason(place.run(file), INVALID)

    assert reason == f"mian of {url}: the repository has no such branch, tag or commit. The nearest is main"
    assert place.leftovers() == []


def test_a_repository_that_does_not_exist(place: Place, repositories: PracticeRepositories) -> None:
    file = place.change(repositories.bridge_url, "file:///nowhere/Megatron-Bridge.git")

    finished = place.run(file, "--json")

    document = json.loads(finished.stdout)
    (verdict,) = document["verdicts"]
    (reason,) = verdict["reasons"]
    assert finished.returncode == document["exit_code"] == INVALID
    assert verdict["status"] == "invalid"
    assert reason.startswith("/nowhere/Megatron-Bridge.git: no such repository")
    assert "Check its address" in reason
    assert place.leftovers() == []


def test_a_repository_that_cannot_be_reached_is_tried_again_and_then_given_up(
    place: Place, repositories: PracticeRepositories
) -> None:
    url = "http://127.0.0.1:1/Megatron-Bridge.git"
    file = place.change(repositories.bridge_url, url)

    finished = place.program(*place.run_command(file), NIGHTBRIDGE_RETRY_DELAY="0.02")

    reason = the_reason(finished, INFRASTRUCTURE)
    assert reason.startswith(f"{url}: the repository is unreachable")
    assert (place.folder / "workspace/nights/n1/log").read_text().count("Retry ") == 5
    assert finished.stderr.count("the repository is unreachable") == 1
    assert place.leftovers() == []


# --- places ----------------------------------------------------------------------------------------------------------


def test_a_store_that_cannot_be_written(place: Place) -> None:
    file = place.folder / "file"
    file.write_text("kept")

    message = the_message(place.run(place.test, "--store", f"file://{file}"), INFRASTRUCTURE)

    assert message == (
        f"nightbridge: {file}: a part of the path is a file, not a directory. "
        "Remove that file, or choose another directory"
    )
    assert place.leftovers() == []
    assert file.read_text() == "kept"


@pytest.mark.s3
def test_a_bucket_that_does_not_exist(place: Place, ministack: S3Server, environments_dir: Path) -> None:
    store = ministack.store_settings("bucket-that-nobody-made", "llm")
    site = write_site(place.folder / "s3.toml", workspace=place.workspace, environments=environments_dir, store=store)

    finished = place.nightbridge("run", place.test, "--system", site)

    message = the_message(finished, INFRASTRUCTURE)
    assert message.startswith("nightbridge: s3://bucket-that-nobody-made/llm")
    assert "no such bucket" in message
    assert "Create the bucket, or correct the store's URL" in message
    assert place.leftovers() == []


def test_a_workspace_that_cannot_be_made(place: Place) -> None:
    (place.folder / "file").write_text("kept")
    workspace = f"{place.folder}/file/workspace"

    message = the_message(place.run(place.test, "--workspace", workspace), INFRASTRUCTURE)

    assert message.startswith(f"nightbridge: {workspace}: the workspace cannot be written: ")
    assert message.endswith("Choose another folder with --workspace, or get write access to this one")


@pytest.mark.parametrize(
    ("option", "name", "told"),
    [
        (
            "--cluster",
            "slrum",
            "no Slurm Cluster block of this name. Make one in the Prefect UI, or give local, slurm, pyslurm, auto or a file "
            "ending in .toml",
        ),
        ("--store", "nowhere", "no Harvest Store block of this name"),
        ("--system", "nowhere", "no Site block of this name"),
        ("--system", "nowhere.toml", "no such file"),
        ("--cluster", "nowhere.toml", "no such file"),
    ],
)
def test_a_name_that_nothing_has(place: Place, option: str, name: str, told: str) -> None:
    finished = place.nightbridge("run", place.test, "--workspace", place.workspace, option, name)

    assert the_message(finished, INVALID).startswith(f"nightbridge: {name}: {told}")
    assert not place.workspace.exists()


def test_a_cluster_whose_commands_are_not_there(place: Place, environments_dir: Path) -> None:
    site = write_site(
        place.folder / "slurm.toml",
        workspace=place.workspace,
        environments=environments_dir,
        cluster={"kind": "slurm", "name": "slurm", "bin_dir": place.folder},
    )

    reason = the_reason(place.nightbridge("run", place.test, "--system", site, PATH="/nowhere"), INFRASTRUCTURE)

    assert reason == "sinfo: command not found. Set the cluster's bin_dir to the folder of Slurm's commands"
    assert place.leftovers() == []


# --- names -----------------------------------------------------------------------------------------------------------


def test_a_night_id_that_cannot_be_one(place: Place) -> None:
    message = the_message(place.nightbridge("run", place.test, "--night", "21/11/2026"), INVALID)

    assert message.startswith("nightbridge: 21/11/2026: not a night id. Use up to 40 lower-case letters, digits")


def test_a_night_or_run_that_was_never_started(place: Place) -> None:
    key = "llama-small-2026-11-21-0123456789"

    message = the_message(place.nightbridge("status", key, "--workspace", place.workspace), INVALID)

    assert message.startswith(f"nightbridge: {key} in {place.workspace}: no night of this name, and no run of it in")
    assert not place.workspace.exists()


@pytest.mark.parametrize("command", ["logs", "cancel"])
def test_a_run_that_was_never_started(place: Place, command: str) -> None:
    key = "llama-small-2026-11-21-0123456789"

    message = the_message(place.nightbridge(command, key, "--workspace", place.workspace), INVALID)

    assert message.startswith(f"nightbridge: {key} in {place.workspace}: no run of this key. Check the key and --work")
    assert f"`nightbridge fetch {key} DEST --only logs` downloads a stored run's logs" in message
    assert not place.workspace.exists()


def test_a_retry_delay_that_is_no_number(place: Place) -> None:
    # It is read as the stages are loaded, which the process of the tests may have done before.
    finished = place.program("run", place.test, NIGHTBRIDGE_RETRY_DELAY="soon")

    assert the_message(finished, INVALID).startswith(
        "nightbridge: NIGHTBRIDGE_RETRY_DELAY=soon: not a number of seconds"
    )


def test_a_prefect_server_that_does_not_answer(place: Place) -> None:
    finished = place.program("run", place.test, PREFECT_API_URL="http://127.0.0.1:1/api")

    message = the_message(finished, INFRASTRUCTURE)
    assert message.startswith("nightbridge: http://127.0.0.1:1/api: the Prefect server does not answer")
