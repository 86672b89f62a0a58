"""`run`, `logs` and `demo`: nights, and how they are reported."""

import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import cast
from xml.etree import ElementTree

import pytest

from nightbridge.files import write_model
from nightbridge.gate.decisions import record_decision
from nightbridge.models import (
    ClusterSettings,
    JobState,
    NightReport,
    RunSpec,
    Scenario,
    Site,
    StoreSettings,
    Verdict,
    VerdictStatus,
    make_run_key,
    utc_now,
)
from nightbridge.nights.liveness import alive
from nightbridge.nights.records import NightPlan, NightStart, NightTest, record_end, record_start, write_plan
from nightbridge.slurm.attempt_files import (
    SUBMISSION_FILE,
    AttemptContext,
    declare_intent,
    open_attempt,
    read_submission,
    record_ended,
)
from nightbridge.slurm.local import LocalCluster
from nightbridge.store.object_store import open_store
from tests import builders
from tests.builders import record_submission
from tests.nightbridge.cli.conftest import TEST, Program


@pytest.mark.parametrize("command", [["demo"], ["demo", "--prepare"]])
def test_a_workspace_in_the_place_of_a_file_is_told_in_one_line(
    nightbridge: Program, tmp_path: Path, command: list[str]
) -> None:
    file = tmp_path / "file"
    file.write_text("kept")

    code, out, err = nightbridge(*command, "--workspace", str(file))

    assert (code, out) == (4, "")
    assert err.startswith(f"nightbridge: {file}: the workspace cannot be written: File exists. ")
    assert file.read_text() == "kept"


def test_an_empty_night_is_refused_and_not_a_new_one(nightbridge: Program) -> None:
    code, _, err = nightbridge("run", TEST, "--night", "")

    assert code == 2
    assert "not a night id" in err


class _Interrupted(ModuleType):
    """A module that is interrupted while it is imported."""

    def __getattr__(self, name: str) -> object:
        raise KeyboardInterrupt


def test_how_to_resume_is_said_from_the_line_on_that_names_the_night(
    nightbridge: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "nightbridge.flows", _Interrupted("nightbridge.flows"))

    code, _, err = nightbridge("run", TEST, "--night", "n1", "--cluster", "local")

    assert (code, err.splitlines()[-3:]) == (
        130,
        [
            "interrupted: the jobs keep running. To resume, run the same command with --night n1",
            "cancel: nightbridge cancel --night n1 --cluster local",
            "nightbridge: interrupted; a job that was submitted keeps running",
        ],
    )


def test_a_run_without_a_log_says_so(nightbridge: Program, tmp_path: Path) -> None:
    workspace = tmp_path / "ws"
    site = tmp_path / "site.toml"
    site.write_text(f'workspace = "{workspace}"\n')
    attempt = open_attempt(workspace, "test-2026-11-21-0123456789", ClusterSettings())

    code, out, err = nightbridge("logs", attempt.run_key, "--system", str(site))

    assert (code, out) == (0, "")
    assert err == f"{attempt.name} has no log yet\n"


def test_a_log_cannot_drive_the_terminal(nightbridge: Program, tmp_path: Path) -> None:
    site = tmp_path / "site.toml"
    site.write_text(f'workspace = "{tmp_path}/ws"\n')
    attempt = open_attempt(tmp_path / "ws", "test-2026-11-21-0123456789", ClusterSettings())
    # A colour, the window's title, a report of the cursor that is typed back, an 8-bit code, and a line that is overwritten.
    hostile = "a\x1b[31mred\x1b[0m\x1b]0;title\x07\x1b[6n\x9b31m\tb\r\x08c\n" + "x" * 70_000 + "\x1b[0m grün\n"
    (attempt.attempt_dir / "launcher.log").write_bytes(hostile.encode())

    _, out, _ = nightbridge("logs", attempt.run_key, "--system", str(site))

    assert out == "ared31m\tbc\n" + "x" * 70_000 + " grün\n"


# --- JUnit XML --------------------------------------------------------------------------------------------------------


@pytest.fixture
def night_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[VerdictStatus], None]:
    """A night that ends with this verdict, without running anything."""

    def end_with(status: VerdictStatus) -> None:
        verdict = Verdict(run_key="llama3-8b-n1-0123456789", test_id="llama3-8b", night="n1", status=status)
        report = NightReport(scenario="nightly", night="n1", verdicts=(verdict,), report="file:///reports/n1.html")
        flows = SimpleNamespace(nightly_regression=lambda *_given, **_named: report)
        monkeypatch.setitem(sys.modules, "nightbridge.flows", cast("ModuleType", flows))

    return end_with


@pytest.mark.parametrize(
    ("named", "said"), [((), True), (("--workspace", "ws"), True), (("--cluster", "local"), False)]
)
def test_a_night_without_a_site_says_that_its_jobs_run_on_this_machine(
    nightbridge: Program, night_of: Callable[[VerdictStatus], None], named: tuple[str, ...], said: bool
) -> None:
    night_of(VerdictStatus.PASSED)

    _, _, err = nightbridge("run", TEST, "--night", "n1", *named)

    assert ("no site named: this is the embedded cluster (--cluster local)" in err) is said


@pytest.mark.parametrize(
    ("status", "code", "failures"), [(VerdictStatus.PASSED, 0, "0"), (VerdictStatus.REGRESSED, 1, "1")]
)
def test_run_writes_the_verdicts_for_a_ci_system(
    nightbridge: Program,
    night_of: Callable[[VerdictStatus], None],
    tmp_path: Path,
    status: VerdictStatus,
    code: int,
    failures: str,
) -> None:
    night_of(status)

    ended, out, _ = nightbridge("run", TEST, "--night", "n1", "--json", "--junit", "verdicts.xml")

    suite = ElementTree.parse(tmp_path / "verdicts.xml").getroot()[0]
    assert (ended, suite.get("name"), suite.get("failures")) == (code, "nightly", failures)
    assert json.loads(out)["exit_code"] == code


def test_a_junit_file_without_a_folder_is_refused_before_the_night_begins(
    nightbridge: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_given: object, **_named: object) -> None:
        raise AssertionError("the night began")

    monkeypatch.setitem(sys.modules, "nightbridge.flows", cast("ModuleType", SimpleNamespace(nightly_regression=never)))

    code, _, err = nightbridge("run", TEST, "--night", "n1", "--junit", "no/such/folder.xml")

    assert code == 2
    assert "no/such/folder.xml: its folder does not exist" in err


def test_a_junit_file_that_cannot_be_written_is_told_after_the_verdicts(
    nightbridge: Program, night_of: Callable[[VerdictStatus], None], tmp_path: Path
) -> None:
    night_of(VerdictStatus.PASSED)
    (tmp_path / "taken").mkdir()

    code, out, err = nightbridge("run", TEST, "--night", "n1", "--junit", "taken")

    assert code == 2
    assert "passed" in out
    assert "taken: cannot be written" in err


# --- what there is ----------------------------------------------------------------------------------------------------


ITERATION = " iteration {:>8}/ 60000 | elapsed time per iteration (ms): 1220.0 | lm loss: 2.5E+00 | "


@pytest.fixture
def nights(tmp_path: Path) -> Path:
    """A workspace with two nights that ended, and one with a job that goes on."""
    workspace = tmp_path / "ws"
    store = open_store(StoreSettings(url=f"file://{workspace}/store"))
    for night, status in (("2026-11-20", VerdictStatus.PASSED), ("2026-11-21", VerdictStatus.REGRESSED)):
        builders.store_night(store, night, {"llama": status, "deepseek": VerdictStatus.PASSED}, workspace)
    return workspace


def wait_for(cluster: LocalCluster, state: JobState) -> None:
    deadline = time.monotonic() + 60
    while cluster.states([1])[1].state is not state:
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.fixture
def job(nights: Path) -> Iterator[tuple[LocalCluster, Path, NightStart]]:
    """A night of one run, whose job runs until the file `go` is there; the cluster, the log and the night."""
    key = make_run_key(scenario="nightly", night="2026-11-22", test_id="llama", sweep_point={}, iteration=1, repeat=0)
    start = NightStart(
        night="2026-11-22",
        scenario="nightly",
        cluster="local",
        workspace=nights,
        begun_at=utc_now(),
        tests=(NightTest(test_id="llama", run_key=key),),
    )
    record_start(open_store(StoreSettings(url=f"file://{nights}/store")), start)
    cluster = LocalCluster(ClusterSettings(), nights / "cluster")
    attempt = open_attempt(nights, key, cluster.settings)
    script, log = attempt.attempt_dir / "job.sh", attempt.attempt_dir / "log_1.out"
    script.write_text(f"#!/bin/bash\nuntil [ -e {nights}/go ]; do sleep 0.1; done\n")
    job_id = cluster.submit(attempt.name, script, ["--output=/dev/null"])
    record_submission(attempt.attempt_dir, attempt.name, job_id, script=script)
    log.write_text("".join(f"{ITERATION.format(step)}\n" for step in range(371, 384)))
    wait_for(cluster, JobState.RUNNING)
    yield cluster, log, start
    cluster.cancel(1)


def test_ls_lists_runs_and_how_far_the_live_ones_are(
    nightbridge: Program, nights: Path, job: tuple[LocalCluster, Path, NightStart]
) -> None:
    code, out, _ = nightbridge("ls", "--workspace", str(nights))
    _, one, _ = nightbridge("ls", "deepseek", "--workspace", str(nights), "--json")

    assert code == 0
    assert out.index("night 2026-11-22") < out.index("night 2026-11-21") < out.index("night 2026-11-20")
    (live,) = [line for line in out.splitlines() if job[2].tests[0].run_key in line]
    assert re.search(
        r"  running, job 1, 383/60,000 steps, ends ~\d\d-\d\d \d\d:\d\d UTC, 1.220 s a step, since 20", live
    )
    found = [run["test_id"] for night in json.loads(one)["nights"] for run in night["runs"]]
    assert found == ["deepseek", "deepseek"]


@pytest.mark.parametrize(
    ("command", "problem"), [("ls", "no run of this test"), ("history", "no history of this test")]
)
def test_a_test_that_is_not_there_is_told_with_the_one_that_is_meant(
    nightbridge: Program, nights: Path, command: str, problem: str
) -> None:
    code, out, err = nightbridge(command, "deepsek", "--workspace", str(nights))

    assert (code, out) == (2, "")
    assert f"{problem}. Did you mean deepseek?" in err


def test_history_without_a_test_shows_all_of_them(nightbridge: Program, nights: Path) -> None:
    store = open_store(StoreSettings(url=f"file://{nights}/store"))
    record_decision(store, builders.make_decision("deepseek"))
    _, out, _ = nightbridge("history", "--workspace", str(nights))
    _, table, _ = nightbridge("history", "--workspace", str(nights), "--csv", "--since", "2026-11-21")

    deepseek, llama = out.splitlines()
    assert deepseek.startswith(
        "deepseek  ✓✓  passed: the level since 2026-11-19 acknowledged by ada on 2026-11-21: known  "
    )
    assert re.fullmatch(r"llama     ✓◆  regressed  –  llama-2026-11-21-[0-9a-f]{10}", llama)
    assert table.splitlines()[0] == "test_id,night,verdict,since,step_time,cause,decision,run_key"
    assert [line.split(",")[:3] for line in table.splitlines()[1:]] == [
        ["deepseek", "2026-11-21", "passed"],
        ["llama", "2026-11-21", "regressed"],
    ]


def test_a_store_without_nights_is_told(nightbridge: Program, tmp_path: Path) -> None:
    site = ("--workspace", str(tmp_path / "empty"))

    assert nightbridge("ls", *site)[0] == 2
    assert "no night that ended" in nightbridge("history", *site)[2]
    for command in ("status", "ls"):
        assert "One that has just been started is here within a minute" in nightbridge(command, *site)[2]


def test_a_log_is_followed_to_the_end_of_its_job(
    nightbridge: Program, nights: Path, job: tuple[LocalCluster, Path, NightStart], monkeypatch: pytest.MonkeyPatch
) -> None:
    def end_the_job(_seconds: float) -> None:
        job[1].write_text(f"{job[1].read_text()}one more\nand a last one")
        (nights / "go").touch()
        sleep(0.5)

    sleep = time.sleep
    monkeypatch.setattr(time, "sleep", end_the_job)
    _, out, _ = nightbridge("logs", "-f", "llama@2026-11-22", "--workspace", str(nights))

    assert out.count(" 383/ 60000") == 1
    assert out.splitlines()[-1] == "and a last one"


def test_the_log_of_a_job_that_accounting_has_purged_is_not_followed_any_longer(
    nightbridge: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = open_attempt(tmp_path / "ws", "test-2026-11-21-0123456789", ClusterSettings())
    record_submission(attempt.attempt_dir, attempt.name, 7)
    record_ended(builders.make_job(attempt.run_key, attempt.attempt_dir, job_id=7))
    (attempt.attempt_dir / "log_7.out").write_text("the end\n")
    monkeypatch.setattr(time, "sleep", never)

    with alive(tmp_path / "ws", "another night"):
        code, out, _ = nightbridge("logs", "-f", attempt.run_key, "--workspace", str(tmp_path / "ws"))

    assert (code, out) == (0, "the end\n")


def never(_seconds: float) -> None:
    raise AssertionError("it is followed")


@pytest.fixture
def theirs(tmp_path: Path) -> tuple[AttemptContext, str]:
    """An attempt whose job 7 has ended, and the site file. Job 6, of its name, runs in another workspace."""
    (tmp_path / "bin").mkdir()
    settings = ClusterSettings(kind="slurm", name="c", bin_dir=tmp_path / "bin")
    opened = [open_attempt(tmp_path / name, "test-2026-11-21-0123456789", settings) for name in ("theirs", "ours")]
    ours = opened[1]
    record_submission(ours.attempt_dir, ours.name, 7)
    at = "2026-11-21T01:00:00|2026-11-21T01:01:00"
    commands = {
        "squeue": f"echo '6|RUNNING|{at}|N/A|node1|None|{ours.name}'",
        "sacct": f"echo '7|COMPLETED|{at}|2026-11-21T02:00:00|node2|None|0:0|{ours.name}'",
        "scontrol": f"""case "$*" in *" job 6") echo "JobId=6 Command={opened[0].attempt_dir}/job.sh WorkDir=/";; esac""",
    }
    for name, body in commands.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    site = tmp_path / "site.toml"
    site.write_text(
        f'workspace = "{tmp_path}/ours"\n[cluster]\nkind = "slurm"\nname = "c"\nbin_dir = "{tmp_path}/bin"\n'
    )
    return ours, str(site)


def test_a_log_is_followed_to_the_end_of_its_own_job_and_not_of_another_workspaces(
    nightbridge: Program, theirs: tuple[AttemptContext, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (theirs[0].attempt_dir / "log_7.out").write_text("the end\n")
    monkeypatch.setattr(time, "sleep", never)

    assert nightbridge("logs", "-f", theirs[0].run_key, "--system", theirs[1])[:2] == (0, "the end\n")


def test_the_status_of_a_run_shows_no_job_of_another_workspace(
    nightbridge: Program, theirs: tuple[AttemptContext, str]
) -> None:
    _, out, _ = nightbridge("status", theirs[0].run_key, "--system", theirs[1])
    _, document, _ = nightbridge("status", theirs[0].run_key, "--system", theirs[1], "--json")

    assert out == f"{theirs[0].name}: job 7 COMPLETED; not ended\n"
    assert [job["job_id"] for job in json.loads(document)["attempts"][0]["jobs"]] == [7]


def test_the_error_of_a_log_and_its_last_lines_are_shown(nightbridge: Program, tmp_path: Path) -> None:
    attempt = open_attempt(tmp_path / "ws", "test-2026-11-21-0123456789", ClusterSettings())
    lines = [*(f"line {number}" for number in range(100)), "[rank0]: ValueError: no\x07data"]
    (attempt.attempt_dir / "launcher.log").write_text("\n".join(lines))

    _, out, _ = nightbridge("logs", "--errors", attempt.run_key, "--workspace", str(tmp_path / "ws"))

    assert out.splitlines() == ["error: ValueError: nodata (rank 0)", *lines[-30:-1], "[rank0]: ValueError: nodata"]


def test_the_log_is_that_of_the_job_that_claimed_the_attempt_and_not_of_the_one_that_came_too_late(
    nightbridge: Program, tmp_path: Path
) -> None:
    attempt = open_attempt(tmp_path / "ws", "test-2026-11-21-0123456789", ClusterSettings())
    folders = [attempt.attempt_dir / name for name in ("first", "second")]
    for number, folder in enumerate(folders):
        folder.mkdir()
        (folder / "log_1.out").write_text(f"{folder.name}\n")
        declare_intent(attempt.attempt_dir, folder / "run_sbatch.sh", folder, after=number)
    record_submission(attempt.attempt_dir, attempt.name, 5, script=folders[1] / "run_sbatch.sh")
    submission = read_submission(attempt.attempt_dir)
    assert submission
    late = submission.model_copy(update={"experiment_dir": folders[1]})
    write_model(attempt.attempt_dir / SUBMISSION_FILE, late)

    before = nightbridge("logs", attempt.run_key, "--workspace", str(tmp_path / "ws"))[1]
    (attempt.attempt_dir / "claim").write_text("4 0 node1 77\n")
    claimed = nightbridge("logs", attempt.run_key, "--workspace", str(tmp_path / "ws"))[1]

    assert (before, claimed) == ("second\n", "first\n")


def test_all_jobs_of_a_night_are_cancelled(
    nightbridge: Program, nights: Path, job: tuple[LocalCluster, Path, NightStart]
) -> None:
    site = ("--workspace", str(nights))

    code, out, _ = nightbridge("cancel", "--night", "2026-11-22", *site)

    assert (code, out) == (0, f"cancelled job 1 of {job[2].tests[0].run_key}\n")
    wait_for(job[0], JobState.CANCELLED)
    assert nightbridge("cancel", "--night", "2026-01-01", *site)[0] == 2
    assert nightbridge("cancel", *site)[0] == 2


def test_the_runs_that_confirm_a_night_are_cancelled_with_it(
    nightbridge: Program, nights: Path, job: tuple[LocalCluster, Path, NightStart]
) -> None:
    cluster, _log, start = job
    run = RunSpec(scenario=start.scenario, night=start.night, test=builders.make_test(id="llama"))
    plan = NightPlan(
        start=start, scenario=Scenario(name=start.scenario, tests=()), runs=(run,), site=Site(workspace=nights)
    )
    write_plan(plan)
    again = open_attempt(nights, run.model_copy(update={"repeat": 2}).run_key, cluster.settings)
    script = again.attempt_dir / "job.sh"
    script.write_text("#!/bin/bash\nsleep 100\n")
    second = cluster.submit(again.name, script, ["--output=/dev/null"])

    code, out, _ = nightbridge("cancel", "--night", start.night, "--workspace", str(nights))

    keys = start.tests[0].run_key, again.run_key
    assert (code, out) == (0, f"cancelled job 1 of {keys[0]}\ncancelled job {second} of {keys[1]}\n")


def test_a_run_whose_record_is_damaged_is_cancelled(
    nightbridge: Program, nights: Path, job: tuple[LocalCluster, Path, NightStart]
) -> None:
    key = job[2].tests[0].run_key
    (nights / "runs" / key / "a1/attempt.json").write_text("{")

    code, out, _ = nightbridge("cancel", key, "--workspace", str(nights))

    assert (code, out) == (0, f"cancelled job 1 of {key}\n")
    assert nightbridge("cancel", "no-such-run-2026-11-21-0123456789", "--workspace", str(nights))[0] == 2


def test_a_cancellation_that_slurm_does_not_answer_is_no_success(nightbridge: Program, tmp_path: Path) -> None:
    workspace, bin_dir = tmp_path / "ws", tmp_path / "bin"
    settings = ClusterSettings(kind="slurm", name="c", bin_dir=bin_dir)
    attempt = open_attempt(workspace, "test-2026-11-21-0123456789", settings)
    bin_dir.mkdir()
    for name in ("squeue", "sacct"):
        (bin_dir / name).write_text("#!/bin/sh\necho error: no answer >&2\nexit 1\n")
        (bin_dir / name).chmod(0o755)
    system = tmp_path / "site.toml"
    system.write_text(f'workspace = "{workspace}"\n[cluster]\nkind = "slurm"\nname = "c"\nbin_dir = "{bin_dir}"\n')

    code, out, err = nightbridge("cancel", attempt.run_key, "--system", str(system))

    assert (code, out) == (4, "")
    assert f"not every job is known to be cancelled: {attempt.name}: squeue or sacct did not answer" in err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("status", "--watch", "--json"), "--json: has no effect with --watch. Leave it out"),
        (("logs", "--follow", "--errors", "last"), "--errors: has no effect with --follow. Leave it out"),
        (("status", "--watch", "t-2026-11-21-0123456789"), "t-2026-11-21-0123456789: a run, and --watch shows nights."),
    ],
)
def test_what_cannot_be_watched_is_said(
    nightbridge: Program, tmp_path: Path, arguments: tuple[str, ...], told: str
) -> None:
    code, out, err = nightbridge(*arguments, "--workspace", str(tmp_path / "ws"))
    assert (code, out, told in err) == (2, "", True)


def test_a_night_is_watched_until_it_has_ended(
    nightbridge: Program, nights: Path, job: tuple[LocalCluster, Path, NightStart], monkeypatch: pytest.MonkeyPatch
) -> None:
    def end_the_night(_seconds: float) -> None:
        report = NightReport(scenario="nightly", night="2026-11-22", verdicts=(), report="file:///r.html")
        record_end(open_store(StoreSettings(url=f"file://{nights}/store")), report)

    monkeypatch.setattr(time, "sleep", end_the_night)
    code, out, _ = nightbridge("status", "--watch", "--workspace", str(nights))

    assert code == 0
    assert out.count("running, job 1") == 1
    assert out.splitlines()[-1] == "report: file:///r.html"
