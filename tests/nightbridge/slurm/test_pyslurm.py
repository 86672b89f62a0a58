"""pyslurm in its helper process, against a stand-in that misbehaves as the real one was seen to (see `standin`)."""

import json
import os
import resource
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from nightbridge.errors import LaunchRefused, PermanentError, StatusUnknown, TransientError
from nightbridge.models import ClusterSettings, JobState
from nightbridge.slurm.command_line import CommandLineCluster
from nightbridge.slurm.factory import open_cluster
from nightbridge.slurm.protocol import JobNotAccepted
from nightbridge.slurm.pyslurm_cluster import Inexpressible, PyslurmCluster, job_attributes

STANDIN = Path(__file__).with_name("standin")
NAME = "nightly-a1"


class Scripted:
    """A cluster whose helper imports the stand-in, and whose sbatch is a shell script."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._script: dict[str, Any] = {}
        self.script()
        program = (
            f"import os, sys, runpy; os.environ['PYSLURM_SCRIPT'] = {str(folder / 'script.json')!r};"
            f"sys.path.insert(0, {str(STANDIN)!r}); runpy.run_path(sys.argv[1], run_name='__main__')"
        )
        self.command("python", f'shift; exec {sys.executable} -I -B -c {shlex.quote(program)} "$@"')
        (folder / "slurm.conf").touch()
        settings = ClusterSettings(
            kind="pyslurm", name="scripted", bin_dir=folder, slurm_conf=folder / "slurm.conf",
            pyslurm_python=folder / "python",
        )  # fmt: skip
        self.cluster = PyslurmCluster(settings)
        self.command("sbatch", "echo 'not to be called' >&2; exit 1")

    def script(self, **script: Any) -> None:
        """Change what the stand-in does."""
        self._script |= script
        (self.folder / "script.json").write_text(json.dumps(self._script))

    def command(self, name: str, body: str) -> None:
        path = self.folder / name
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)

    def job(self, *lines: str) -> Path:
        path = self.folder / "job.sh"
        path.write_text("\n".join(("#!/bin/bash", *lines, "true", "")))
        return path

    def done(self) -> list[dict[str, Any]]:
        path = self.folder / "done"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture
def scripted(tmp_path: Path) -> Scripted:
    return Scripted(tmp_path)


def row(**attributes: Any) -> dict[str, Any]:
    return {"id": 7, "name": NAME, "state": "RUNNING", **attributes}


# --- submitting ------------------------------------------------------------------------------------------------------


def test_a_launchers_script_becomes_attributes_of_the_right_types(
    scripted: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "99")
    monkeypatch.setenv("SBATCH_PARTITION", "nope")
    monkeypatch.setenv("TOKEN", "for the job")
    script = scripted.job(
        "#SBATCH --nodes=2", "#SBATCH --ntasks-per-node=4", "#SBATCH --time=5", "#SBATCH --gpus-per-node=8",
        "#SBATCH --exclusive", "#SBATCH --requeue", "#SBATCH --job-name=other",
    )  # fmt: skip

    job_id = scripted.cluster.submit(NAME, script, ["--time=00:10:30", "--partition=batch"])

    submitted = scripted.done()[0]["submit"]
    environment = submitted.pop("environment")
    assert job_id == 4711
    assert submitted == {
        "name": NAME, "script": script.read_text(), "working_directory": str(Path.cwd()), "nodes": "2",
        "ntasks_per_node": 4, "ntasks": 8, "time_limit": 11, "gres_per_node": "gpu:8", "resource_sharing": "no",
        "is_requeueable": False, "partitions": "batch", "profile": 0,
    }  # fmt: skip
    assert environment["TOKEN"] == "for the job"
    assert (environment["SLURM_NTASKS_PER_NODE"], environment["SLURM_GPUS_PER_NODE"]) == ("4", "8")
    assert environment["SLURM_SUBMIT_DIR"] == str(Path.cwd())
    assert not {"SLURM_JOB_ID", "SBATCH_PARTITION", "PYSLURM_SCRIPT", "PYSLURM_DISABLE_AUTO_INIT"} & environment.keys()


def test_a_job_has_this_processs_umask_and_limits_as_from_sbatch(scripted: Scripted) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    os.umask(0o027)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        scripted.cluster.submit(NAME, scripted.job(), [])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    environment = scripted.done()[0]["submit"]["environment"]
    assert (environment["SLURM_UMASK"], environment["SLURM_RLIMIT_NOFILE"]) == ("0027", "256")
    assert all(environment[f"SLURM_RLIMIT_{name}"].isdecimal() for name in ("AS", "CORE", "MEMLOCK", "STACK"))


@pytest.mark.parametrize(
    "option",
    [
        "--mem=0",
        "--hint=nomultithread",
        "--time=UNLIMITED",
        "--ntasks=4",
        "--mail-type=END",
        "--gres=gpu:8",
        "--cpus-per-task=4",
        "--signal=B:USR1@60",
        "--array=1-2",
        "--nodes=1-2",
        "--time=tomorrow",
        "--nodes=many",
    ],
)
def test_what_pyslurm_cannot_express_is_submitted_by_sbatch(option: str, scripted: Scripted) -> None:
    scripted.command("sbatch", 'echo "$*" >> "$(dirname "$0")/called"; echo 12')

    assert scripted.cluster.submit(NAME, scripted.job(f"#SBATCH {option}"), []) == 12

    assert scripted.done() == []
    assert f"--job-name={NAME}" in (scripted.folder / "called").read_text()


@pytest.mark.parametrize(
    ("number", "text", "kind"),
    [
        (1800, "Unable to contact slurm controller (connect failure)", JobNotAccepted),
        (1800, "", JobNotAccepted),
        (1802, "Unable to contact slurm controller (receive failure)", StatusUnknown),
        (1802, "", StatusUnknown),
        (2000, "Invalid partition name specified", LaunchRefused),
        (2072, "", LaunchRefused),
        (2015, "Requested node configuration is not available", LaunchRefused),
        (5004, "Socket timed out on send/recv operation", StatusUnknown),
        (11, "Resource temporarily unavailable", JobNotAccepted),
    ],
)
def test_error_numbers_are_refused_as_sbatchs_texts_are(
    number: int, text: str, kind: type[Exception], scripted: Scripted
) -> None:
    scripted.script(errors={"submit": [number, text]})

    with pytest.raises(kind) as refusal:
        scripted.cluster.submit(NAME, scripted.job(), [])

    assert type(refusal.value) is kind


def test_sbatch_names_the_limit_that_is_reached(scripted: Scripted) -> None:
    scripted.script(errors={"submit": [2050, "Job violates accounting/QOS policy"]})
    scripted.command(
        "sbatch",
        "echo 'sbatch: error: QOSMaxSubmitJobPerUserLimit' >&2;"
        "echo 'sbatch: error: Batch job submission failed: Job violates accounting/QOS policy' >&2; exit 1",
    )

    with pytest.raises(JobNotAccepted, match="submit limit"):
        scripted.cluster.submit(NAME, scripted.job(), [])


@pytest.mark.parametrize("end", ["fatal", "late"])
def test_a_helper_that_dies_or_hangs_leaves_open_whether_there_is_a_job(
    end: str, scripted: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nightbridge.slurm.pyslurm_cluster.SUBMIT_TIMEOUT", 5.0 if end == "late" else 120.0)
    scripted.script(**{end: ["submit"]})

    with pytest.raises(StatusUnknown):
        scripted.cluster.submit(NAME, scripted.job(), [])

    scripted.script(**{end: []})
    assert scripted.cluster.submit(NAME, scripted.job(), []) == 4711


def test_sbatch_reports_what_slurm_would_refuse(scripted: Scripted) -> None:
    scripted.command("sbatch", "echo 'sbatch: error: invalid partition specified: nope' >&2; exit 1")

    refusal = scripted.cluster.test_only(NAME, ["--partition=nope"])

    assert refusal is not None
    assert "no such partition" in refusal.what


# --- asking ----------------------------------------------------------------------------------------------------------


def test_slurmctld_decides_the_state_and_accounting_adds_who_cancelled(scripted: Scripted) -> None:
    scripted.script(
        live=[
            row(state="PENDING", state_reason="Resources", submit_time=1_790_000_000, start_time=1_790_000_900),
            row(id=8, state="CANCELLED", start_time=1_790_000_000, end_time=1_790_000_060, allocated_nodes="node[1-2]"),
            row(id=9, array_task_id=3),
        ],
        past=[
            row(state="NODE_FAIL"),
            row(id=8, state="CANCELLED", cancelled_by="alice", nodelist="node[1-2]", end_time=1_790_000_060),
        ],
    )  # fmt: skip

    states = scripted.cluster.states([7, 8, 9, 10])

    assert states.keys() == {7, 8}
    assert (states[7].state, states[7].reason, states[7].started_at) == (JobState.PENDING, "Resources", None)
    assert (states[8].state, states[8].cancelled_by, states[8].nodes) == (JobState.CANCELLED, "alice", "node[1-2]")
    assert states[8].ended_at is not None
    assert states[8].ended_at.timestamp() == 1_790_000_060


def test_a_job_is_found_by_its_exact_name_and_user_after_slurmctld_forgot_it(scripted: Scripted) -> None:
    ended = {"state": "FAILED", "exit_code": 3, "nodelist": "node1", "end_time": 1_790_000_060}
    scripted.script(past=[row(**ended), row(id=8, name=f"{NAME}0"), row(id=9, user_id=1234)])

    found = scripted.cluster.find(NAME)

    assert found.complete
    assert [(job.job_id, job.state, job.exit_code) for job in found.jobs] == [(7, JobState.FAILED, 3)]


@pytest.mark.parametrize("workspace", ["/work", "/lustre/runs/llama/a100", "/lustre/runs/llama/a100/workspace"])
def test_a_job_that_a_plugin_of_the_site_named_otherwise_is_known_by_its_output(
    scripted: Scripted, workspace: str
) -> None:
    output = f"{workspace}/runs/nightly/a1/nemorun/experiments/it/sbatch_it_7.out"
    scripted.script(
        live=[row(name=f"team-{NAME}", standard_output=output, submit_time=1_790_000_000), row(id=8, name="other")],
        past=[row(name=f"team-{NAME}", submit_time=1_790_000_000)],
    )

    assert [(job.job_id, job.name) for job in scripted.cluster.find(NAME).jobs] == [(7, NAME)]
    assert scripted.cluster.states([7])[7].name == NAME


def test_a_job_cancelled_while_it_was_pending_has_had_no_node(scripted: Scripted) -> None:
    scripted.script(past=[row(state="CANCELLED", cancelled_by="alice", end_time=1_790_000_060)])

    (job,) = scripted.cluster.find(NAME).jobs

    assert (job.state, job.cancelled_by, job.nodes, job.started_at) == (JobState.CANCELLED, "alice", "", None)


def test_components_of_a_heterogeneous_job_are_no_jobs(scripted: Scripted) -> None:
    scripted.script(past=[row(heterogeneous_offset=0), row(id=8, heterogeneous_offset=1)])

    assert [job.job_id for job in scripted.cluster.find(NAME).jobs] == [7]


@pytest.mark.parametrize("failure", [[-1, "Failed to get Jobs from slurmdbd"], [None, "unsupported operand"]])
def test_without_accounting_a_lookup_is_incomplete_and_states_still_come(
    failure: list[Any], scripted: Scripted
) -> None:
    scripted.script(live=[row()], errors={"past": failure})

    found = scripted.cluster.find(NAME)

    assert not found.complete
    assert [job.job_id for job in found.jobs] == [7]
    assert scripted.cluster.states([7])[7].state is JobState.RUNNING


def test_a_site_that_forbids_long_ranges_is_queried_for_shorter_ones(scripted: Scripted) -> None:
    scripted.script(earliest=time.time() - 8 * 86_400, past=[row(state="COMPLETED")])

    found = scripted.cluster.find(NAME)

    assert found.complete
    assert [job.job_id for job in found.jobs] == [7]


def test_without_any_answer_the_status_is_unknown(scripted: Scripted) -> None:
    scripted.script(errors={"live": [1800, "Unable to contact slurm controller"], "past": [-1, "no slurmdbd"]})

    with pytest.raises(StatusUnknown):
        scripted.cluster.states([7])


@pytest.mark.parametrize("number", [2017, 2021, 2, 110])
def test_cancelling_what_has_ended_is_no_error_and_neither_is_a_stale_number(number: int, scripted: Scripted) -> None:
    scripted.script(errors={"cancel": [number, "whatever"]})

    scripted.cluster.cancel(7)


@pytest.mark.parametrize(("number", "kind"), [(2002, PermanentError), (1800, TransientError)])
def test_a_job_that_could_not_be_cancelled_is_an_error(number: int, kind: type[Exception], scripted: Scripted) -> None:
    scripted.script(errors={"cancel": [number, "no"]})

    with pytest.raises(kind, match="job 7"):
        scripted.cluster.cancel(7)


# --- whether it works here -------------------------------------------------------------------------------------------


def test_a_pyslurm_that_reaches_slurmctld_works(scripted: Scripted, caplog: pytest.LogCaptureFixture) -> None:
    assert scripted.cluster.version() == "25.11.2"
    settings = scripted.cluster.settings.model_copy(update={"kind": "auto"})

    with caplog.at_level("INFO"):
        opened = [open_cluster(settings, scripted.folder) for _ in range(2)]

    assert [type(one) for one in opened] == [PyslurmCluster, PyslurmCluster]
    assert caplog.text.count("scripted: using pyslurm 25.11.2") == 1


def test_a_slurmctld_of_another_version_refuses_it(scripted: Scripted) -> None:
    scripted.script(errors={"partitions": [1005, "Incompatible versions of client and server code"]})

    with pytest.raises(TransientError, match="does not answer pyslurm: Incompatible versions"):
        scripted.cluster.version()


def test_auto_uses_the_commands_where_pyslurm_is_missing_and_logs_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nshift\nexec {sys.executable} -I -S "$@"\n')
    python.chmod(0o755)
    settings = ClusterSettings(kind="auto", name="site", pyslurm_python=python)

    with caplog.at_level("INFO"):
        opened = open_cluster(settings, tmp_path)

    assert isinstance(opened, CommandLineCluster)
    assert "site: using Slurm's commands" in caplog.text
    assert "No module named 'pyslurm'" in caplog.text


def test_a_slurm_conf_that_is_not_there_is_an_error_at_once(scripted: Scripted) -> None:
    scripted.script(late=["partitions"])
    (scripted.folder / "slurm.conf").unlink()

    with pytest.raises(PermanentError, match=r"slurm\.conf: is not there"):
        scripted.cluster.version()


def test_an_import_that_ends_the_process_is_an_error_and_not_our_end(
    scripted: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SLURM_CONF", raising=False)
    settings = scripted.cluster.settings.model_copy(update={"slurm_conf": None})

    with pytest.raises(PermanentError, match="Could not establish a configuration source"):
        PyslurmCluster(settings).version()


def test_the_options_that_decide_are_the_last() -> None:
    attributes = job_attributes("n", "#!/bin/sh\n#SBATCH -N 4 -t 30\n", ["--nodes=2"], "/work")

    assert (attributes["nodes"], attributes["ntasks"], attributes["time_limit"]) == ("2", 2, 30)


def test_a_heterogeneous_job_is_not_flattened() -> None:
    with pytest.raises(Inexpressible):
        job_attributes("n", "#!/bin/sh\n#SBATCH -N 4\n#SBATCH hetjob\n#SBATCH -N 2\n", [], "/work")
