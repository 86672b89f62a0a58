"""What is old goes, what may still be needed stays; nothing goes before it was listed."""

import contextlib
import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from nightbridge.cli.main import run
from nightbridge.errors import PermanentError
from nightbridge.files import remove_tree
from nightbridge.images.enroot import scratch_name, unfinished
from nightbridge.images.image import add_workspace_ref
from nightbridge.models import (
    ImageImport,
    NightReport,
    Scenario,
    Site,
    StoreSettings,
    Verdict,
    VerdictStatus,
    utc_now,
)
from nightbridge.nights.liveness import alive
from nightbridge.nights.records import NightPlan, NightStart, record_end, record_start, write_plan
from nightbridge.prune import (
    DAY_SECONDS,
    Policy,
    Removal,
    choose,
    find_old_checkouts,
    find_old_environments,
    find_old_images,
    find_old_run_folders,
    remove_checkouts,
    remove_environments,
    remove_images,
    remove_run_folders,
    size_of,
)
from nightbridge.slurm.attempt_files import note_waiting
from nightbridge.store.object_store import open_store
from tests.hostile import deep_folders


def candidate(name: str, days: float, size: int = 10) -> Removal:
    return Removal.candidate(Path("/w") / name, size, time.time() - days * DAY_SECONDS)


def names(candidates: list[Removal], policy: Policy, used: str = "") -> list[str]:
    return [removal.path.name for removal in choose(candidates, policy, used, now=time.time())]


def test_what_was_not_wanted_for_long_goes_oldest_first() -> None:
    found = [candidate("new", 2), candidate("old", 31), candidate("older", 60)]

    assert names(found, Policy(days=30)) == ["older", "old"]


def test_more_than_are_kept_go_even_when_they_are_young() -> None:
    found = [candidate(f"n{days}", days) for days in (5, 2, 4, 3)]

    assert names(found, Policy(keep=2)) == ["n5", "n4"]


def test_the_oldest_go_until_the_rest_fits() -> None:
    found = [candidate("a", 2, 60), candidate("b", 3, 50), candidate("c", 4, 40)]

    assert names(found, Policy(max_gb=101e-9)) == ["b"]
    assert names(found, Policy(max_gb=61e-9)) == ["c", "b"]


def test_what_was_wanted_today_and_what_a_live_job_names_stays() -> None:
    found = [candidate("today", 0.5), candidate("used", 99), candidate("old", 99)]

    assert names(found, Policy(keep=1, days=1), "srun --container-image /w/used x") == ["old"]


# --- real folders ----------------------------------------------------------------------------------------------------


class Place:
    """A workspace with checkouts, images and attempts of a given age."""

    def __init__(self, workspace: Path) -> None:
        self.workspace = workspace
        self.images = workspace / "images"

    def checkout(self, digit: str, days: float, ending: str = "") -> Path:
        folder = self.workspace / "checkouts" / "Bridge" / f"{digit * 40}{ending}"
        folder.mkdir(parents=True)
        (folder / "code.py").write_text("x = 1\n")
        (folder / "code.py").chmod(0o444)
        self.age(folder, days)
        return folder

    def image(self, digit: str, days: float, arch: str = "") -> Path:
        path = self.images / f"{digit * 64}{arch}.sqsh"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * 1000)
        path.with_suffix(".json").write_text("{}")
        self.age(path.with_suffix(".json"), days)
        return path

    def attempt(self, script: str, *left: str, name: str = "job.sh") -> Path:
        folder = self.workspace / "runs" / f"run-{len(list(self.workspace.glob('runs/*')))}" / "a1"
        path = folder / name
        path.parent.mkdir(parents=True)
        path.write_text(script)
        (folder / "attempt.json").write_text("{}")
        for file in left:
            (folder / file).write_text("0\n")
        return folder

    @staticmethod
    def age(path: Path, days: float) -> None:
        when = time.time() - days * DAY_SECONDS
        os.utime(path, (when, when))


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path / "workspace")


def test_an_old_checkout_is_removed_and_a_newer_one_stays(place: Place) -> None:
    old, new = place.checkout("a", 40, "+submodules-0123456789ab"), place.checkout("b", 3)

    found = find_old_checkouts(place.workspace, Policy())
    assert [removal.path for removal in found] == [old]
    assert found[0].size > 0
    assert old.exists()

    assert remove_checkouts(place.workspace, found) == found
    assert sorted(path.name for path in old.parent.iterdir()) == [new.name]


@pytest.mark.parametrize(
    "name", ["job.sh", "launcher.log", "nemorun/experiments/a/a_1/a/scripts/a.sh"], ids=lambda name: name[-10:]
)
def test_a_checkout_that_a_live_job_names_stays_until_the_job_has_ended(place: Place, name: str) -> None:
    old = place.checkout("a", 40)
    attempt = place.attempt(f"python {old}/code.py\n", name=name)

    assert find_old_checkouts(place.workspace, Policy()) == []
    (attempt / "exit_code").write_text("0\n")
    assert [removal.path for removal in find_old_checkouts(place.workspace, Policy())] == [old]


def test_a_job_that_names_the_workspace_in_another_way_holds_its_things_as_well(place: Place) -> None:
    checkout, image = place.checkout("a", 40), place.image("b", 40)
    place.attempt(f"srun --container-image /mnt/other/images/{image.name} python /mnt/other/{checkout.name}/code.py\n")

    assert find_old_checkouts(place.workspace, Policy()) == []
    assert find_old_images(place.workspace, place.images, Policy()) == []


def test_a_job_that_never_left_its_end_holds_things_for_two_weeks(place: Place) -> None:
    old = place.checkout("a", 40)
    attempt = place.attempt(f"python {old}/code.py\n")
    place.age(attempt / "attempt.json", 15)

    assert [removal.path for removal in find_old_checkouts(place.workspace, Policy())] == [old]


def test_a_checkout_that_is_wanted_between_listing_and_removal_stays(place: Place) -> None:
    wanted, used = place.checkout("a", 40), place.checkout("b", 41)
    found = find_old_checkouts(place.workspace, Policy())
    os.utime(wanted)
    place.attempt(f"python {used}/code.py\n")

    assert remove_checkouts(place.workspace, found) == []
    assert wanted.exists()
    assert used.exists()


def test_old_images_go_with_their_sidecars_and_what_people_brought_stays(place: Place) -> None:
    old, new, used = place.image("a", 40, "-aarch64"), place.image("b", 3), place.image("c", 50)
    same = place.image("a", 3)
    brought = place.images / "nemo.sqsh"
    brought.write_bytes(b"x")
    place.age(brought, 400)
    place.attempt(f"srun --container-image {used} true\n")

    found = find_old_images(place.workspace, place.images, Policy())
    assert [removal.path for removal in found] == [old]
    assert remove_images(place.workspace, place.images, found) == found

    left = {path.name for path in place.images.iterdir()}
    kept = {f"{path.stem}{suffix}" for path in (same, new, used) for suffix in (".sqsh", ".json")}
    assert left == kept | {"nemo.sqsh"}


def test_what_killed_check_outs_left_goes_and_what_may_still_be_at_work_stays(place: Place) -> None:
    new = place.checkout("a", 3)
    dead, at_work = (new.with_name(f".{digit * 40}.{digit * 32}.tmp") for digit in "bc")
    for folder, days in ((dead, 1.1), (at_work, 0.1)):
        (folder / "tree").mkdir(parents=True)
        place.age(folder, days)

    found = find_old_checkouts(place.workspace, Policy())

    assert [(removal.path, removal.reason) for removal in found] == [(dead, "left by an interrupted checkout")]
    assert remove_checkouts(place.workspace, found) == found
    assert sorted(new.parent.iterdir()) == sorted([new, at_work])


def test_a_changed_tree_goes_when_nobody_asks_any_more(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    new, used = place.checkout("a", 3), place.checkout("b", 3)
    changed = [folder.rename(folder.with_name(f"changed-{folder.name}.{'c' * 32}")) for folder in (new, used)]
    place.attempt(f"python {used}/code.py\n")  # began before the tree was set aside
    assert find_old_checkouts(place.workspace, Policy()) == []

    monkeypatch.setattr("nightbridge.repos.checkouts.CHANGED_TREES_KEPT_SECONDS", -1.0)
    found = find_old_checkouts(place.workspace, Policy())

    assert [removal.path for removal in found] == [changed[0]]
    assert remove_checkouts(place.workspace, found) == found
    assert list(new.parent.iterdir()) == [changed[1]]


def test_what_killed_imports_left_goes_here_and_where_they_worked(place: Place) -> None:
    temp = place.workspace / "temp"
    settings = ImageImport(temp=temp)
    dead: list[Path] = []
    at_work: list[Path] = []
    for digit, days, folders in (("d", 1.1, dead), ("e", 0.1, at_work)):
        with unfinished(place.images, digit * 64) as output:
            folders += [output.parent, temp / scratch_name(output)]
        for folder in folders:
            (folder / "rootfs").mkdir(parents=True)
            (folder / "rootfs").chmod(0o500)
            place.age(folder, days)
    (temp / "somebody-else").mkdir()

    found = find_old_images(place.workspace, place.images, Policy(), settings)

    assert sorted(removal.path for removal in found) == sorted(dead)
    assert {removal.reason for removal in found} == {"left by an interrupted import"}
    assert remove_images(place.workspace, place.images, found) == found
    assert not any(folder.exists() for folder in dead)
    assert all(folder.exists() for folder in (*at_work, temp / "somebody-else"))


def test_an_image_that_a_job_of_another_workspace_uses_stays(place: Place, tmp_path: Path) -> None:
    shared = Place(tmp_path / "other")
    shared.images = place.images
    old, used = place.image("a", 40), place.image("b", 50)
    for user in (place, shared):
        add_workspace_ref(place.images, user.workspace)
    attempt = shared.attempt(f"srun --container-image {used} true\n")

    assert [removal.path for removal in find_old_images(place.workspace, place.images, Policy())] == [old]
    (attempt / "exit_code").write_text("0\n")
    found = find_old_images(place.workspace, place.images, Policy())
    assert [removal.path for removal in found] == [used, old]
    (attempt / "exit_code").unlink()
    assert [removal.path for removal in remove_images(place.workspace, place.images, found)] == [old]


def test_nothing_goes_while_nobody_knows_what_another_workspace_uses(place: Place) -> None:
    place.image("a", 40)
    (place.images / ".workspace-0123.json").write_text("{")

    with pytest.raises(PermanentError, match=r"images: cannot read which workspaces use these images"):
        find_old_images(place.workspace, place.images, Policy())


def test_nothing_goes_while_another_user_lets_nobody_see_what_his_jobs_use(place: Place, tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    theirs = Place(tmp_path / "other")
    used = place.image("b", 50)
    add_workspace_ref(place.images, theirs.workspace)
    theirs.attempt(f"srun --container-image {used} true\n")
    theirs.workspace.chmod(0o700)
    for parent in (tmp_path, *list(tmp_path.parents)[:3]):
        parent.chmod(parent.stat().st_mode | 0o011)

    os.seteuid(65534)
    try:
        with pytest.raises(PermanentError, match=r"other.*: cannot read which images .* the jobs of this workspace"):
            find_old_images(place.workspace, place.images, Policy())
    finally:
        os.seteuid(0)


def test_an_image_that_is_wanted_between_listing_and_removal_stays(place: Place) -> None:
    old = place.image("a", 40)
    found = find_old_images(place.workspace, place.images, Policy())
    os.utime(old.with_suffix(".json"))

    assert remove_images(place.workspace, place.images, found) == []
    assert old.exists()


def test_what_another_prune_has_removed_meanwhile_and_a_link_to_nothing_end_nothing(place: Place) -> None:
    for folder, name in (("checkouts/repository", "c" * 40), ("images", f"{'d' * 64}.sqsh"), ("envs", "e" * 16)):
        (place.workspace / folder).mkdir(parents=True, exist_ok=True)
        (place.workspace / folder / name).symlink_to("gone")
    assert find_old_checkouts(place.workspace, Policy()) == []
    assert find_old_images(place.workspace, place.workspace / "images", Policy()) == []
    assert find_old_environments(place.workspace / "envs", Policy()) == []


def test_the_command_lists_first_and_removes_when_it_is_told(place: Place, capsys: Any) -> None:
    checkout, image = place.checkout("a", 40), place.image("b", 40)

    assert run(["prune", "--workspace", str(place.workspace)]) == 0
    listed = capsys.readouterr()
    assert str(checkout) in listed.out
    assert str(image) in listed.out
    assert (
        "would remove 1 checkouts, 1 images, 0 launcher environments, 0 folders of runs and 0 stored runs" in listed.err
    )
    assert "stored runs have no limit set" in listed.err
    assert checkout.exists()
    assert image.exists()

    assert run(["prune", "--workspace", str(place.workspace), "--store-nights", "2"]) == 0
    assert "stored runs beyond their limits that a verdict of a run that stays" in capsys.readouterr().err

    assert run(["prune", "--workspace", str(place.workspace), "--yes", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["removed"] is True
    assert [removal["path"] for removal in told["removals"]] == [str(checkout), str(image)]
    assert not checkout.exists()
    assert not image.exists()


def environment(folder: Path, name: str, days: float, base: str = "") -> Path:
    """A layer of a launcher environment on a base that was used so long ago, or that base."""
    made = folder / (f"{name}.0123abcd" if name.startswith("base-") else name)
    (made / "bin").mkdir(parents=True)
    (made / "bin" / "python").write_text("#!/bin/sh\n")
    (made / "bin" / "python").chmod(0o755)
    if base:
        record = {"digest": name, "python_version": "3.11", "base": base, "url": "u", "commit": "c", "project": "p"}
        more = {
            "project_version": "1",
            "nemo_run_version": "1",
            "nemo_run_from": "layer",
            "made_at": "2026-11-01T00:00Z",
        }
        (made / "environment.json").write_text(json.dumps(record | more))
    else:
        (folder / name).symlink_to(made.name)
    then = time.time() - days * DAY_SECONDS
    os.utime(made, (then, then))
    return folder / name


def test_old_launcher_environments_go_and_bases_that_no_kept_one_needs(tmp_path: Path) -> None:
    needed, unneeded = (environment(tmp_path, f"base-{letter * 16}", 40) for letter in "ab")
    young = environment(tmp_path, "c" * 16, 2, base=needed.name)
    old = environment(tmp_path, "d" * 16, 40, base=unneeded.name)
    used_meanwhile = environment(tmp_path, "e" * 16, 40, base=unneeded.name)

    found = find_old_environments(tmp_path, Policy(days=30))
    os.utime(used_meanwhile)
    os.utime(unneeded)
    removed = remove_environments(found)

    assert {removal.path for removal in found} == {old, used_meanwhile, unneeded}
    assert {removal.path for removal in removed} == {old}
    again = remove_environments(find_old_environments(tmp_path, Policy(days=30)))
    assert again == []
    then = time.time() - 40 * DAY_SECONDS
    for path in (used_meanwhile, unneeded):
        os.utime(path, (then, then))
    assert [each.path for each in remove_environments(find_old_environments(tmp_path, Policy()))] == [
        used_meanwhile,
        unneeded,
    ]
    assert {path.name for path in tmp_path.iterdir() if not path.name.startswith(".")} == {
        needed.name,
        f"{needed.name}.0123abcd",
        young.name,
    }


# --- what runs wrote --------------------------------------------------------------------------------------------------


OLD_NIGHT = "2026-10-01"


def old_run(place: Place, digit: str, days: float = 20, *, ended: bool = True, stored: str = "1") -> Path:
    """A run's folder in the workspace, with one attempt, and what the store has of it."""
    run_key = f"llama-small-{OLD_NIGHT}-{digit * 10}"
    attempt = place.workspace / "runs" / run_key / "a1"
    attempt.mkdir(parents=True)
    (attempt / "attempt.json").write_text("{}")
    (attempt / "weights").write_bytes(bytes(1_000_000))
    if ended:
        (attempt / "ended.json").write_text("{}")
        place.age(attempt / "ended.json", days)
    for number in stored:
        prefix = f"runs/llama-small/{OLD_NIGHT}/{run_key}/a{number}"
        manifest = place.workspace / "store" / prefix / "manifest.json"
        manifest.parent.mkdir(parents=True)
        manifest.write_text("{}")
        verdict = Verdict(test_id="t", night=OLD_NIGHT, run_key=run_key, prefix=prefix, status=VerdictStatus.PASSED)
        (manifest.parents[1] / "verdict.json").write_text(verdict.model_dump_json())
    place.age(attempt.parent, days)
    return attempt.parent


def run_folders(place: Place, days: float | None = 14) -> list[Removal]:
    settings = StoreSettings(url=f"file://{place.workspace}/store")
    return find_old_run_folders(place.workspace, Policy(run_days=days), lambda: open_store(settings))


def old_night(place: Place) -> NightStart:
    return NightStart(
        night=OLD_NIGHT,
        scenario="s",
        cluster="c",
        workspace=place.workspace,
        begun_at=utc_now(),
        flow_run="f1",
    )


def test_what_runs_wrote_goes_once_it_is_stored_and_old_and_only_where_a_limit_is_set(place: Place) -> None:
    old, young = old_run(place, "a"), old_run(place, "b", 3)
    at_work, unstored = old_run(place, "c", ended=False), old_run(place, "d", stored="")
    again = old_run(place, "e")
    (again / "a2").mkdir()
    (again / "a2/ended.json").write_text("{}")
    place.age(again / "a2/ended.json", 20)

    found = run_folders(place)

    assert run_folders(place, None) == []
    assert [(removal.path, removal.reason) for removal in found] == [(old, "stored, and ended 20 days ago")]
    assert found[0].size >= 1_000_000
    assert remove_run_folders(place.workspace, found) == found
    assert {*old.parent.iterdir()} == {young, at_work, unstored, again}


def test_the_runs_of_a_night_at_work_stay_and_so_do_those_that_a_live_job_names(place: Place) -> None:
    run, named = old_run(place, "a"), old_run(place, "b")
    place.attempt(f"train --load {named}/a1/weights\n")
    start = old_night(place)
    found = run_folders(place)

    with alive(place.workspace, "f1"):
        assert run_folders(place) == []  # which night it is, nobody knows yet
        assert remove_run_folders(place.workspace, found) == []
        site = Site(workspace=place.workspace)
        write_plan(NightPlan(start=start, scenario=Scenario(name="s", tests=()), runs=(), site=site))
        assert run_folders(place) == []
        another = start.model_copy(update={"night": "2026-11-01"})
        write_plan(NightPlan(start=another, scenario=Scenario(name="s", tests=()), runs=(), site=site))
        assert [removal.path for removal in run_folders(place)] == [run]

    assert [removal.path for removal in found] == [run]


def test_the_runs_of_a_night_without_an_end_stay(place: Place) -> None:
    """It was killed: whoever starts it again goes on with what its runs left."""
    run = old_run(place, "a")
    start, store = old_night(place), open_store(StoreSettings(url=f"file://{place.workspace}/store"))
    record_start(store, start)

    assert run_folders(place) == []
    record_end(store, NightReport(scenario=start.scenario, night=start.night, verdicts=()))
    record_start(store, start.model_copy(update={"night": "small"}))  # by hand, killed, and a word of the test's id
    assert [removal.path for removal in run_folders(place)] == [run]


@pytest.mark.parametrize("verdict_of", [None, "a2"])
def test_a_run_that_is_stored_and_not_judged_stays(place: Place, verdict_of: str | None) -> None:
    """A search would run it again."""
    run = old_run(place, "a")
    verdict = next(place.workspace.glob(f"store/runs/*/*/{run.name}/verdict.json"))
    text = verdict.read_text()
    verdict.unlink()
    if verdict_of:
        verdict.write_text(text.replace("/a1", f"/{verdict_of}"))

    assert run_folders(place) == []


def test_a_run_that_waited_for_the_store_after_its_end_goes_as_well(place: Place) -> None:
    run = old_run(place, "a")
    note_waiting(run.name, place.workspace, "the store")
    note_waiting(run.name, place.workspace, None)

    found = run_folders(place)

    assert remove_run_folders(place.workspace, found) == found != []


def test_what_one_prune_removes_another_does_not_take_for_left(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    run = old_run(place, "a")
    found = run_folders(place)
    others: list[list[Removal]] = []

    def removed(folder: Path) -> None:
        others.append(run_folders(place))
        remove_tree(folder)

    monkeypatch.setattr("nightbridge.prune.remove_tree", removed)

    assert remove_run_folders(place.workspace, found) == found
    assert others == [[]]
    assert not run.exists()


def test_what_another_user_left_stays_where_it_is(place: Place, tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    run = old_run(place, "a")
    found = run_folders(place)
    os.chown(run.parent, 65534, 65534)
    for parent in (tmp_path, *list(tmp_path.parents)[:3]):
        parent.chmod(parent.stat().st_mode | 0o011)

    os.seteuid(65534)
    try:
        assert remove_run_folders(place.workspace, found) == []
    finally:
        os.seteuid(0)

    assert (run / "a1/ended.json").exists()


def test_what_cannot_be_removed_is_not_said_to_be(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    old_run(place, "a")
    found = run_folders(place)
    monkeypatch.setattr("nightbridge.prune.remove_tree", lambda folder: None)

    assert remove_run_folders(place.workspace, found) == []


def test_folders_deeper_than_python_goes_are_removed(place: Place) -> None:
    run = old_run(place, "a")
    deep_folders(run / "a1/deep", levels=1500)
    found = run_folders(place)

    assert remove_run_folders(place.workspace, found) == found != []
    assert [*run.parent.iterdir()] == []


def test_a_checkout_with_folders_deeper_than_python_goes_is_removed(place: Place) -> None:
    checkout = place.checkout("a", 40)
    deep_folders(checkout / "deep", levels=1500)
    place.age(checkout, 40)
    found = find_old_checkouts(place.workspace, Policy())

    assert remove_checkouts(place.workspace, found) == found != []
    assert [*checkout.parent.iterdir()] == []


def test_a_run_that_somebody_put_elsewhere_stays_there(place: Place, tmp_path: Path) -> None:
    run = old_run(place, "a")
    run.symlink_to(run.rename(tmp_path / "elsewhere"))

    assert run_folders(place) == []


def test_a_copy_that_somebody_made_of_an_attempt_is_none(place: Place) -> None:
    run = old_run(place, "a")
    (run / "a1-copy").mkdir()
    (run / "a1-copy/ended.json").write_text("{}")
    place.age(run / "a1-copy/ended.json", 20)

    assert [removal.path for removal in run_folders(place)] == [run]


def test_a_run_whose_night_begins_while_it_is_removed_is_put_back(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = old_run(place, "a")
    found = run_folders(place)
    begun = contextlib.ExitStack()
    rename = Path.rename

    def renamed(path: Path, target: Path) -> Path:
        if path == run:
            begun.enter_context(alive(place.workspace, "f1"))
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", renamed)
    with begun:
        assert remove_run_folders(place.workspace, found) == []

    assert (run / "a1/ended.json").exists()


def test_a_run_that_was_tried_again_after_it_was_listed_stays(place: Place) -> None:
    run = old_run(place, "a")
    found = run_folders(place)
    (run / "a2").mkdir()

    assert remove_run_folders(place.workspace, found) == []
    assert (run / "a1/weights").exists()


def test_the_next_prune_removes_the_rest_of_what_a_killed_one_had_begun(place: Place) -> None:
    run = old_run(place, "a")
    rest = run.rename(run.with_name(f".{run.name}.{'0' * 32}.tmp"))

    found = run_folders(place)

    assert [(removal.path, removal.reason) for removal in found] == [(rest, "left by an interrupted prune")]
    assert remove_run_folders(place.workspace, found) == found
    assert [*rest.parent.iterdir()] == []


def test_the_command_removes_what_runs_wrote(place: Place, capsys: Any) -> None:
    run_folder = old_run(place, "a")
    options = ["--workspace", str(place.workspace), "--run-days", "14"]

    assert run(["prune", *options]) == 0
    listed = capsys.readouterr()
    assert f"{run_folder}  1 MB" in listed.out
    assert "1 folders of runs" in listed.err
    assert run(["prune", *options, "--yes"]) == 0

    assert not run_folder.exists()


def test_du_shows_every_part_and_the_total(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "ws" / "checkouts" / "Megatron-Bridge").mkdir(parents=True)
    (tmp_path / "ws" / "checkouts" / "Megatron-Bridge" / "file").write_bytes(bytes(3_000_000))
    (tmp_path / "ws" / "store" / "runs" / "llama" / "n1").mkdir(parents=True)
    (tmp_path / "ws" / "store" / "runs" / "llama" / "n1" / "data").write_bytes(bytes(2_000_000))

    assert run(["du", "--workspace", str(tmp_path / "ws")]) == 0

    shown = capsys.readouterr()
    assert [line.split()[0] for line in shown.out.splitlines()] == ["3.0", "2.0"]
    assert "store, runs of llama" in shown.out
    assert shown.err.startswith("0.01 GB in all")


def test_folders_of_any_depth_have_a_size(tmp_path: Path) -> None:
    deep_folders(tmp_path / "runs", levels=1100)
    (tmp_path / "runs/file").write_bytes(bytes(8192))

    try:
        assert size_of(tmp_path / "runs") >= 8192
    finally:
        subprocess.run(["rm", "-r", tmp_path / "runs"], check=True)


def test_old_things_go_from_a_disk_without_room_for_one_more_file(small_disk: Path) -> None:
    place = Place(small_disk)
    old = place.checkout("a", 40), place.image("b", 40), environment(small_disk / "envs", "d" * 16, 40, base="gone")
    with contextlib.suppress(OSError):
        (small_disk / "filler").write_bytes(b"x" * (1 << 20))

    code = run(["prune", "--workspace", str(small_disk), "--yes"])

    assert code == 0
    assert [path for path in old if path.exists()] == []
    assert [*small_disk.rglob("*.lease")] == []
