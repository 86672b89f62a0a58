"""When it is known that no job of a run lives on: through commands that answer as Slurm's do, or not at all."""

import os
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import pytest

from nightbridge.errors import DamagedData, StatusUnknown
from nightbridge.files import write_model
from nightbridge.models import ClusterSettings, utc_now
from nightbridge.slurm.attempt_files import AttemptContext, CannotKnow, Intent, open_attempt, read_submission
from nightbridge.slurm.attempts import cancel_jobs
from nightbridge.slurm.command_line import CommandLineCluster
from nightbridge.slurm.local import LocalCluster
from nightbridge.slurm.node_command import run_on_node
from nightbridge.slurm.sbatch_shim import find_submission
from tests.builders import record_submission

KEYS = tuple(f"llama-2026-11-21-000000000{number}" for number in (1, 2, 3))

COMMANDS = {
    "squeue": 'cat "$(dirname "$0")/squeue.txt" || { echo "Unable to contact slurm controller" >&2; exit 1; }',
    "sacct": 'cat "$(dirname "$0")/sacct.txt" || { echo "Problem talking to the database" >&2; exit 1; }',
    "scancel": 'echo "$1" >> "$(dirname "$0")/cancelled"; cat "$(dirname "$0")/refused-$1" >&2 2>/dev/null',
}


class Slurm(CommandLineCluster):
    """Slurm whose commands answer with what a test writes; a source without an answer is away."""

    def __init__(self, folder: Path) -> None:
        super().__init__(ClusterSettings(kind="slurm", name="c", bin_dir=folder))
        self.folder = folder
        self.slurm_name = "alps"
        self.scripts: dict[int, Path] = {}
        for name, body in COMMANDS.items():
            (folder / name).write_text(f"#!/bin/sh\n{body}\n")
            (folder / name).chmod(0o755)

    def say(self, *, live: dict[int, str] | None, past: dict[int, str] | None) -> None:
        """Let squeue and sacct report running jobs of these names, by their ids."""
        at = "2026-11-21T01:00:00|2026-11-21T01:01:00"
        rows = {
            "squeue.txt": live and {i: f"{i}|RUNNING|{at}|N/A|node1|None|{name}" for i, name in live.items()},
            "sacct.txt": past and {i: f"{i}|RUNNING|{at}|Unknown|node1|None|0:0|{name}" for i, name in past.items()},
        }
        for file, answer in zip(rows, (live, past), strict=True):
            (self.folder / file).unlink(missing_ok=True)
            if answer is not None:
                (self.folder / file).write_text("".join(f"{row}\n" for row in (rows[file] or {}).values()))

    def submit_another_day(self) -> None:
        """Let squeue's jobs be others than those of the same ids that sacct reports."""
        listing = self.folder / "squeue.txt"
        listing.write_text(listing.read_text().replace("2026-11-21T", "2026-11-22T"))

    def script_of(self, job_id: int) -> Path | None:
        return self.scripts.get(job_id)

    def configured(self, key: str) -> str | None:
        return self.slurm_name

    @property
    def cancelled(self) -> Sequence[int]:
        path = self.folder / "cancelled"
        return sorted(map(int, path.read_text().split())) if path.exists() else ()


@pytest.fixture
def slurm(tmp_path: Path) -> Slurm:
    (tmp_path / "bin").mkdir()
    return Slurm(tmp_path / "bin")


@pytest.fixture
def attempts(slurm: Slurm, tmp_path: Path) -> list[AttemptContext]:
    """The first attempts of three runs, whose jobs 100, 101 and 102 run."""
    opened = [open_attempt(tmp_path, key, slurm.settings) for key in KEYS]
    slurm.say(live={100 + n: attempt.name for n, attempt in enumerate(opened)}, past={})
    return opened


@pytest.fixture
def theirs(slurm: Slurm, attempts: list[AttemptContext], tmp_path: Path) -> AttemptContext:
    """The first run's attempt in another workspace: job 100, which has the name of ours as well, runs its script."""
    opened = open_attempt(tmp_path / "production", KEYS[0], slurm.settings)
    slurm.scripts = {100: opened.attempt_dir / "job.sh"}
    return opened


def declare(
    attempt: AttemptContext, *, seconds_ago: float, slurm_cluster: str | None = None, uid: int | None = None
) -> None:
    folder = attempt.attempt_dir
    at = utc_now() - timedelta(seconds=seconds_ago)
    intent = Intent(at=at, host="login1", pid=4711, launcher_script=folder / "job.sh", experiment_dir=folder)
    write_model(folder / "intent.json", intent.model_copy(update={"slurm_cluster": slurm_cluster, "uid": uid}))


def test_every_live_job_of_the_runs_is_cancelled(slurm: Slurm, attempts: list[AttemptContext], tmp_path: Path) -> None:
    found = cancel_jobs(KEYS, tmp_path, slurm)

    found.check("night")
    assert found.jobs == ((KEYS[0], 100), (KEYS[1], 101), (KEYS[2], 102))
    assert slurm.cancelled == [100, 101, 102]


def test_slurm_is_asked_once_of_what_the_queue_lists(
    slurm: Slurm, attempts: list[AttemptContext], tmp_path: Path
) -> None:
    for name, body in COMMANDS.items():
        (slurm.folder / name).write_text(f'#!/bin/sh\necho {name} >> "$(dirname "$0")/asked"\n{body}\n')

    cancel_jobs(KEYS[:1], tmp_path, slurm)

    assert slurm.cancelled == [100]
    assert sorted((slurm.folder / "asked").read_text().split()) == ["sacct", "scancel", "squeue"]


def test_a_job_whose_name_the_site_has_changed_is_cancelled(
    slurm: Slurm, attempts: list[AttemptContext], tmp_path: Path
) -> None:
    slurm.say(live={100: f"acct_{KEYS[0]}\t{attempts[0].attempt_dir}/job.sh", 7: "theirs\t/home/u/job.sh"}, past={})

    found = cancel_jobs(KEYS[:1], tmp_path, slurm)

    assert found.jobs == ((KEYS[0], 100),)
    assert slurm.cancelled == [100]


@pytest.mark.parametrize(("live", "past"), [(None, None), ({}, None), (None, {})])
def test_a_source_that_does_not_answer_leaves_open_whether_a_job_lives(
    slurm: Slurm,
    attempts: list[AttemptContext],
    tmp_path: Path,
    live: dict[int, str] | None,
    past: dict[int, str] | None,
) -> None:
    slurm.say(live=live, past=past)

    found = cancel_jobs(KEYS[:1], tmp_path, slurm)

    assert found.jobs == ()
    with pytest.raises(StatusUnknown, match=rf"{attempts[0].name}: squeue or sacct did not answer"):
        found.check("night")


def test_accounting_that_is_away_keeps_no_job_alive(
    slurm: Slurm, attempts: list[AttemptContext], tmp_path: Path
) -> None:
    slurm.say(live={100: attempts[0].name}, past=None)

    found = cancel_jobs(KEYS[:1], tmp_path, slurm)

    assert (found.jobs, slurm.cancelled) == (((KEYS[0], 100),), [100])
    assert found.doubts


@pytest.mark.parametrize("refusal", ["Socket timed out on send/recv operation", "Access/permission denied"])
def test_a_job_that_cannot_be_cancelled_is_named_and_spares_no_other(
    slurm: Slurm, attempts: list[AttemptContext], tmp_path: Path, refusal: str
) -> None:
    (slurm.folder / "refused-100").write_text(f"scancel: error: Kill job error on job id 100: {refusal}\n")

    found = cancel_jobs(KEYS, tmp_path, slurm)

    assert slurm.cancelled == [100, 101, 102]
    assert found.jobs == ((KEYS[1], 101), (KEYS[2], 102))
    with pytest.raises(StatusUnknown, match=rf"not every job .*{attempts[0].name}: job 100: .*{refusal}"):
        found.check("night")


def test_a_job_is_found_by_its_attempts_folder_whatever_became_of_the_record(
    slurm: Slurm, attempts: list[AttemptContext], tmp_path: Path
) -> None:
    (attempts[0].attempt_dir / "attempt.json").write_text("{")
    (attempts[1].attempt_dir / "attempt.json").unlink()

    found = cancel_jobs(KEYS, tmp_path, slurm)

    assert (slurm.cancelled, found.doubts) == ([100, 101, 102], ())


@pytest.mark.usefixtures("theirs")
def test_the_job_of_another_workspace_with_the_same_night_is_left_alone(
    slurm: Slurm, attempts: list[AttemptContext], tmp_path: Path
) -> None:
    """Staging beside production: the later one's attempt was refused because of this job, and has none of its own."""
    slurm.scripts[101] = attempts[1].attempt_dir / "job.sh"

    found = cancel_jobs(KEYS, tmp_path, slurm)

    assert (slurm.cancelled, found.doubts) == ([101, 102], ())
    assert found.jobs == ((KEYS[1], 101), (KEYS[2], 102))


def test_of_two_workspaces_that_both_submitted_a_night_each_has_its_own_job(
    slurm: Slurm, attempts: list[AttemptContext], theirs: AttemptContext, tmp_path: Path
) -> None:
    ours = attempts[0]
    slurm.say(live={100: theirs.name, 200: ours.name}, past={})
    slurm.scripts[200] = ours.attempt_dir / "job.sh"
    for attempt in (ours, theirs):
        declare(attempt, seconds_ago=86_400)

    found = find_submission(ours, slurm)
    cancelled = cancel_jobs(KEYS[:1], tmp_path, slurm)

    assert found is not None
    assert found.job_id == 200
    assert (slurm.cancelled, cancelled) == ([200], (((KEYS[0], 200),), ()))
    assert cancel_jobs(KEYS[:1], tmp_path / "production", slurm).jobs == ((KEYS[0], 100),)


@pytest.mark.usefixtures("theirs")
def test_the_job_of_another_workspace_is_not_taken_for_that_of_a_submitter_that_died(
    slurm: Slurm, attempts: list[AttemptContext]
) -> None:
    ours = attempts[0]

    declare(ours, seconds_ago=3)
    with pytest.raises(StatusUnknown, match="login1 may have submitted this attempt"):
        find_submission(ours, slurm)
    declare(ours, seconds_ago=86_400)
    with pytest.raises(DamagedData, match="If another workspace of yours runs this night"):
        find_submission(ours, slurm)

    assert read_submission(ours.attempt_dir) is None


@pytest.mark.usefixtures("theirs")
def test_the_job_of_another_workspace_does_not_make_it_certain_that_there_is_none_of_ours(
    slurm: Slurm, attempts: list[AttemptContext], tmp_path: Path
) -> None:
    ours = attempts[0]

    declare(ours, seconds_ago=3)
    doubts = cancel_jobs(KEYS[:1], tmp_path, slurm).doubts
    declare(ours, seconds_ago=86_400, slurm_cluster="eos")
    elsewhere = cancel_jobs(KEYS[:1], tmp_path, slurm).doubts
    declare(ours, seconds_ago=86_400)

    assert len(doubts) == 1
    assert "login1 may have submitted it 3 s ago" in doubts[0]
    assert len(elsewhere) == 1
    assert "submitted to Slurm's cluster eos" in elsewhere[0]
    assert cancel_jobs(KEYS[:1], tmp_path, slurm) == ((), ())
    assert slurm.cancelled == ()


@pytest.mark.parametrize("reason", ["a record of ours", "our record is lost", "their record is lost", "an alias"])
def test_what_may_be_our_job_is_cancelled_wherever_its_script_lies(
    slurm: Slurm, attempts: list[AttemptContext], theirs: AttemptContext, tmp_path: Path, reason: str
) -> None:
    if reason == "a record of ours":
        record_submission(attempts[0].attempt_dir, attempts[0].name, 100)
    elif reason == "an alias":
        (tmp_path / "mount").symlink_to(tmp_path)
        slurm.scripts = {100: tmp_path / "mount" / (attempts[0].attempt_dir / "job.sh").relative_to(tmp_path)}
    else:
        lost = theirs if reason == "their record is lost" else attempts[0]
        (lost.attempt_dir / "attempt.json").unlink()

    assert cancel_jobs(KEYS[:1], tmp_path, slurm).jobs == ((KEYS[0], 100),)
    assert slurm.cancelled == [100]


def test_the_job_of_somebody_else_who_got_the_id_is_left_alone(
    slurm: Slurm, attempts: list[AttemptContext], tmp_path: Path
) -> None:
    slurm.say(live={100: "of-another-program"}, past={100: attempts[0].name})
    slurm.submit_another_day()

    found = cancel_jobs(KEYS[:1], tmp_path, slurm)

    assert (found.jobs, found.doubts, slurm.cancelled) == ((), (), ())


def test_a_program_on_a_node_that_slurm_has_lost_costs_nobody_else_the_job_that_got_its_id(
    slurm: Slurm, tmp_path: Path
) -> None:
    (slurm.folder / "srun").write_text("#!/bin/sh\necho done\n")
    (slurm.folder / "srun").chmod(0o755)
    slurm.say(live={100: "of-another-program"}, past={100: "harvest"})
    slurm.submit_another_day()

    finished = run_on_node(slurm.settings, "harvest", ["true"], environment={}, timeout=60)

    assert (finished.stdout, slurm.cancelled) == (b"done\n", ())


def test_a_job_that_slurm_has_lost_is_not_cancelled(
    slurm: Slurm, attempts: list[AttemptContext], tmp_path: Path
) -> None:
    slurm.say(live={}, past={100: attempts[0].name})

    found = cancel_jobs(KEYS[:1], tmp_path, slurm)

    assert (found.jobs, found.doubts, slurm.cancelled) == ((), (), ())


def test_a_job_that_only_the_first_of_two_answers_showed_is_cancelled_all_the_same(
    slurm: Slurm, attempts: list[AttemptContext], tmp_path: Path
) -> None:
    """slurmctld goes away between two questions, and accounting does not have the job yet."""
    once = 'cd "$(dirname "$0")"; cat squeue.txt && rm squeue.txt && exit; echo "Unable to contact slurm controller" >&2; exit 1'
    (slurm.folder / "squeue").write_text(f"#!/bin/sh\n{once}\n")
    (slurm.folder / "refused-100").write_text("scancel: error: Unable to contact slurm controller\n")

    found = cancel_jobs(KEYS[:1], tmp_path, slurm)

    assert slurm.cancelled == [100]
    with pytest.raises(StatusUnknown, match=r"job 100: .*Unable to contact slurm controller"):
        found.check("night")


def test_an_sbatch_that_may_still_be_under_way_leaves_open_whether_there_is_a_job(
    slurm: Slurm, attempts: list[AttemptContext], tmp_path: Path
) -> None:
    slurm.say(live={}, past={})
    declare(attempts[0], seconds_ago=3)

    with pytest.raises(StatusUnknown, match=rf"{attempts[0].name}: login1 may have submitted it 3 s ago"):
        cancel_jobs(KEYS, tmp_path, slurm).check("night")

    declare(attempts[0], seconds_ago=slurm.accounting_horizon + 1)
    assert cancel_jobs(KEYS, tmp_path, slurm).doubts == ()


def test_another_cluster_leaves_open_whether_there_is_a_job(
    slurm: Slurm, attempts: list[AttemptContext], tmp_path: Path
) -> None:
    slurm.say(live={}, past={})
    declare(attempts[0], seconds_ago=86_400, slurm_cluster="eos")

    with pytest.raises(StatusUnknown, match=r"submitted to Slurm's cluster eos, and Slurm's commands reach alps here"):
        cancel_jobs(KEYS, tmp_path, slurm).check("night")

    slurm.slurm_name = "eos"
    assert cancel_jobs(KEYS, tmp_path, slurm).doubts == ()


def test_a_cluster_that_has_another_name_by_now_knows_all_once_the_named_file_is_gone(
    slurm: Slurm, attempts: list[AttemptContext], tmp_path: Path
) -> None:
    slurm.say(live={}, past={})
    declare(attempts[0], seconds_ago=86_400, slurm_cluster="eos")
    intent = attempts[0].attempt_dir / "intent.json"

    with pytest.raises(
        CannotKnow,
        match=rf"was renamed, and no job {attempts[0].name} lives, remove {intent} and start the night again",
    ):
        find_submission(attempts[0], slurm)
    intent.unlink()

    assert find_submission(attempts[0], slurm) is None
    assert cancel_jobs(KEYS, tmp_path, slurm).doubts == ()


@pytest.mark.parametrize("slurm_cluster", ["eos", None])
def test_a_site_of_the_embedded_cluster_names_the_slurm_that_an_attempt_belongs_to(
    slurm: Slurm, attempts: list[AttemptContext], tmp_path: Path, slurm_cluster: str | None
) -> None:
    embedded = LocalCluster(ClusterSettings(name="laptop"), tmp_path / "cluster")
    declare(attempts[0], seconds_ago=86_400, slurm_cluster=slurm_cluster)

    said = r"submitted to the cluster c \(kind = slurm\), and this site's is laptop \(kind = local\)"
    with pytest.raises(CannotKnow, match=rf"{said}\. Start the night again with a site file whose \[cluster\] is that"):
        find_submission(attempts[0], embedded)
    with pytest.raises(StatusUnknown, match=said):
        cancel_jobs(KEYS, tmp_path, embedded).check("night")


def test_a_job_of_the_embedded_cluster_is_not_lost_for_slurm(slurm: Slurm, tmp_path: Path) -> None:
    attempt = open_attempt(tmp_path, KEYS[0], ClusterSettings(name="laptop"))
    slurm.say(live={}, past={})
    declare(attempt, seconds_ago=86_400)

    with pytest.raises(CannotKnow, match=r"submitted to the cluster laptop \(kind = local\)"):
        find_submission(attempt, slurm)


def test_a_job_of_another_user_may_be_hidden(slurm: Slurm, attempts: list[AttemptContext], tmp_path: Path) -> None:
    """PrivateData=jobs, and a workspace of two users; jobs are found by name among the user's own anyway."""
    slurm.say(live={}, past={})
    declare(attempts[0], seconds_ago=86_400, uid=os.getuid() + 1)

    said = rf"submitted by uid {os.getuid() + 1}, and uid {os.getuid()} queries Slurm here"
    with pytest.raises(CannotKnow, match=rf"{said}.* Start the night again as uid {os.getuid() + 1}"):
        find_submission(attempts[0], slurm)
    with pytest.raises(StatusUnknown, match=said):
        cancel_jobs(KEYS, tmp_path, slurm).check("night")

    declare(attempts[0], seconds_ago=86_400, uid=os.getuid())
    assert find_submission(attempts[0], slurm) is None


def test_of_a_job_whose_end_is_recorded_another_cluster_leaves_nothing_open(
    slurm: Slurm, attempts: list[AttemptContext], tmp_path: Path
) -> None:
    slurm.say(live={}, past={})
    declare(attempts[0], seconds_ago=86_400, slurm_cluster="eos")
    (attempts[0].attempt_dir / "ended.json").write_text("{}")

    assert cancel_jobs(KEYS, tmp_path, slurm).doubts == ()


def test_an_intent_whose_job_is_there_leaves_nothing_open(
    slurm: Slurm, attempts: list[AttemptContext], tmp_path: Path
) -> None:
    declare(attempts[0], seconds_ago=3)

    assert cancel_jobs(KEYS, tmp_path, slurm).doubts == ()
    assert slurm.cancelled == [100, 101, 102]


def test_a_night_without_an_answer_is_told_in_one_line(
    slurm: Slurm, attempts: list[AttemptContext], tmp_path: Path
) -> None:
    for number in (2, 3):
        open_attempt(tmp_path, KEYS[0], slurm.settings, number)
    slurm.say(live=None, past=None)

    with pytest.raises(StatusUnknown) as raised:
        cancel_jobs(KEYS, tmp_path, slurm).check("night 2026-11-21")

    assert raised.value.happened.startswith("night 2026-11-21: not every job is known to be cancelled: ")
    assert raised.value.happened.endswith(f"{KEYS[0]}-a3: squeue or sacct did not answer; and 2 more")
