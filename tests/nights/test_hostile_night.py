"""A night in which all tests but one leave what could hurt a night: that one gets all that it would have got."""

import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from examples.practice.git_writer import Change, add_commits, git
from examples.practice.repositories import install_torchrun, make_practice_repositories, move_main
from nightbridge.errors import DamagedData
from nightbridge.flows import nightly_regression
from nightbridge.harvest import harvesting
from nightbridge.harvest.manifest import Manifest, load_record, read_manifest
from nightbridge.harvest.restore import verify_run
from nightbridge.harvest.upload import upload
from nightbridge.models import GOOD_VERDICTS, NightReport, StoreSettings, Verdict, VerdictStatus
from nightbridge.outputs import checkpoints, measurements, run_evidence
from nightbridge.outputs.reader_process import read_in_child
from nightbridge.store.object_store import ObjectStore, open_store
from tests.flows.practice_night import Entry, write_scenario, write_site
from tests.flows.test_secrets import spellings
from tests.nights import timed_readers
from tests.nights.hostile_job import FOREIGN, ROWS, SHAPED, swap_logs

pytestmark = [pytest.mark.launcher, pytest.mark.timeout(420), pytest.mark.usefixtures("flows_here")]

PROGRAM = "examples/mimo/train_hetero.py"
ATTACK = Path(__file__).with_name("hostile_job.py")
STEPS = {"train_samples": 80, "save_interval": 10}
PLANTED = "correct&horse'battery%staple-77"
SECONDS = 5
"""Of processor time, what reading all that a row left may take, its evidence, summary and checkpoints: an idle machine
takes as long by the clock, and a busy one by the processor. What waits takes none, but ends with the death of its reader.
"""


@dataclass(frozen=True)
class Night:
    """A night, and the processor time of what read its jobs' files, in seconds for each test."""

    report: NightReport
    store: ObjectStore
    workspace: Path
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def verdict(self, test_id: str) -> Verdict:
        (found,) = (verdict for verdict in self.report.verdicts if verdict.test_id == test_id)
        return found

    def manifest(self, test_id: str) -> Manifest:
        found = read_manifest(self.store, self.verdict(test_id).prefix)
        assert found is not None
        return found

    def problems(self, test_id: str) -> str:
        """All that the night says about a test's output."""
        verdict = self.verdict(test_id)
        if not verdict.prefix:  # nothing of it could be stored
            return "\n".join(verdict.reasons)
        manifest = self.manifest(test_id)
        found = [*verdict.reasons, *(f"{each.path}: {each.reason}" for each in manifest.left_out)]
        if manifest.record is not None:
            found += [*manifest.record.summary.damage, *manifest.record.summary.notes]
            found += [f"{each.path.name}: {each.reason}" for each in manifest.record.checkpoints]
        return "\n".join(map(str, found))


@pytest.fixture(scope="module")
def night(tmp_path_factory: pytest.TempPathFactory, environments_dir: Path, launcher_python: Path) -> Night:
    folder = tmp_path_factory.mktemp("hostile")
    repositories = make_practice_repositories(folder / "practice")
    install_torchrun(folder / "practice", launcher_python)
    repository = Path(repositories.megatron_lm_url)
    good = git(repository, "rev-parse", "main")
    program = git(repository, "show", f"main:{PROGRAM}")
    hostile = f"import runpy\n\nrunpy.run_path({str(ATTACK)!r}, {{'PLANTED': {PLANTED!r}}})\n{program}\n".encode()
    add_commits(
        repository, [Change(message="Hostile", made_at=datetime(2026, 3, 1, tzinfo=UTC), files={PROGRAM: hostile})]
    )
    commit = git(repository, "rev-parse", "main")
    move_main(repositories, good, "megatron_lm")
    workspace = folder / "workspace"
    site = write_site(folder / "site.toml", workspace=workspace, environments=environments_dir)
    site.write_text(f'git_credentials = "env:PLANTED_GIT"\n{site.read_text()}')
    scenario = write_scenario(
        folder / "conf",
        repositories,
        "hostile",
        *(Entry(id=test_id, sample="vlm_small", cmd_args=STEPS, commit=commit) for test_id in ("hostile", *ROWS)),
        Entry(id="neighbour", sample="vlm_small", cmd_args=STEPS),
    )
    seconds: dict[str, float] = defaultdict(float)

    def timed(reader: Any, *arguments: Any, subject: str) -> Any:
        (test_id,) = (each for each in (*ROWS, "hostile", "neighbour") if f"{each}-n1-" in subject)
        try:
            answer, data = read_in_child(getattr(timed_readers, reader.__name__), *arguments, subject=subject)
        except DamagedData as error:
            seconds[test_id] += float(error.advice)
            raise
        seconds[test_id] += timed_readers.SECONDS.unpack(data[-8:])[0]
        return answer, data[:-8]

    def uploaded(store: ObjectStore, prefix: str, units: Any, *, scratch: Path, **rest: Any) -> Any:
        if prefix.split("/")[1] in ("hostile", "swapped"):
            swap_logs(scratch.parents[1])
        return upload(store, prefix, units, scratch=scratch, **rest)

    accomplice = subprocess.Popen([sys.executable, ATTACK, workspace])
    try:
        with pytest.MonkeyPatch.context() as patched:
            patched.setenv("PLANTED_GIT", f"machine git.example.org login me password {PLANTED}")
            patched.setattr(harvesting, "upload", uploaded)
            for module in (run_evidence, measurements, checkpoints):
                patched.setattr(module, "read_in_child", timed)
            started = time.monotonic()
            report = nightly_regression(scenario, night="n1", system=str(site))
    finally:
        accomplice.kill()
        accomplice.wait()
    rows = ", ".join(f"{test_id} {taken:.1f}" for test_id, taken in sorted(seconds.items()))
    print(f"a hostile night: {time.monotonic() - started:.0f} s; reading, in seconds of processor time: {rows}")
    return Night(report, open_store(StoreSettings(url=f"file://{workspace}/store")), workspace, seconds)


def test_the_neighbour_has_its_verdict_its_report_and_its_harvest(night: Night) -> None:
    verdict = night.verdict("neighbour")
    record = load_record(night.store, verdict.prefix)

    assert record is not None
    assert verdict.status is VerdictStatus.NO_BASELINE
    assert record.summary.steps_done == 10
    assert record.summary.damage == ()
    # The practice workload's shards are no archives, so nothing in them proves what they hold.
    assert [checkpoint.state for checkpoint in record.checkpoints] == ["unproven"]
    assert verify_run(night.store, verdict.prefix) == []
    assert "neighbour" in Path(night.report.report.removeprefix("file://")).read_text()


@pytest.mark.parametrize("test_id", ["hostile", "records", "linked"])
def test_a_test_whose_evidence_is_gone_has_a_verdict_that_is_not_good(test_id: str, night: Night) -> None:
    verdict = night.verdict(test_id)

    assert verdict.status not in GOOD_VERDICTS
    assert verdict.reasons


NAMED = {
    "yaml": [
        "run_config.yaml cannot be parsed: more than 64 levels or 200000 values",
        "a number of more than 400 digits",
        "a merge key",
    ],
    "lines": ["lines of the log are longer than 8192 bytes", "steps without a finite loss"],
    "metadata": ["damaged: the checkpoint's metadata refers to `tuples within tuples`", "refers to `posix.system`"],
    "fifos": [
        "iter_0000010: in_progress",
        "latest_checkpointed_iteration.txt: it is not a regular file",
        "events.out.tfevents.1799999998.fifo: cannot read the event file: it is not a regular file",
        "_9.out: cannot read the log: it is not a regular file",
        ".log: it is not a regular file",
        "claim: not a file with a number",
        "exit_code: not a file with a number",
    ],
    "records": ["cancellation.json: cannot be read as Cancellation"],
    "numbers": [
        "lines of the log are longer than 8192 bytes",
        "5 steps with a count that is not a whole number, first `inf`",
        "exit_code: not a file with a number",
    ],
    "swapped": [
        "logs/log-hetero",
        "not a regular file",
        "a link to outside the run's folder was not followed",
        "its folders lie more than 64 deep",
        "its name has characters that cannot be shown",
    ],
    "linked": ["0 of 10 steps recorded", "output: a link to outside the run's folder was not followed"],
    "sparse": [
        "1799999999.sparse: corrupt at byte 0 of 2147483648 (a record of 2147483648 bytes",
        "a record of 18446744073709551615 bytes",
    ],
    "hostile": [
        "damaged: the checkpoint's metadata",
        "latest_checkpointed_iteration.txt: it is not a regular file",
        "tfevents.1799999999",
        "not a regular file",
    ],
}
"""What the night says of each row. Of printed secrets it says how many it masked."""


@pytest.mark.parametrize("test_id", [*NAMED])
def test_what_cannot_be_read_is_named(test_id: str, night: Night) -> None:
    problems = night.problems(test_id)

    assert [words for words in NAMED[test_id] if words not in problems] == [], problems


def test_every_row_is_named() -> None:
    assert NAMED.keys() == {*ROWS, "hostile"} - {"secrets"}


@pytest.mark.parametrize("test_id", [*ROWS, "hostile", "neighbour"])
def test_what_a_test_left_was_read_in_five_seconds_and_no_reader_died_over_it(test_id: str, night: Night) -> None:
    assert 0 < night.seconds[test_id] < SECONDS
    assert "its reader d" not in night.problems(test_id)


def test_what_is_no_number_counts_for_nothing(night: Night) -> None:
    record = load_record(night.store, night.verdict("numbers").prefix)

    assert record is not None
    assert (record.summary.steps_done, record.job.exit_file_code) == (10, None)
    assert (record.summary.skipped_iterations, record.summary.nan_iterations) == (0, 0)
    assert "\\u0000" not in record.model_dump_json(), "a name or a commit with a NUL is a fact"


def test_nothing_of_this_machine_is_in_the_store(night: Night) -> None:
    foreign = FOREIGN.read_bytes()
    stored = [path for path in (night.workspace / "store").rglob("*") if path.is_file()]

    assert len(stored) > 20
    assert not [path for path in stored if path.stat().st_size == len(foreign) and path.read_bytes() == foreign]
    assert max(path.stat().st_size for path in stored) < 64 << 20


@pytest.mark.parametrize("test_id", ["secrets"])
def test_printed_secrets_were_masked_in_every_form(test_id: str, night: Night) -> None:
    assert night.manifest(test_id).masks > 30


def test_no_form_of_a_secret_is_in_the_store(night: Night) -> None:
    texts = {SHAPED.encode(), *spellings(PLANTED)}
    stored = [path for path in (night.workspace / "store").rglob("*") if path.is_file()]
    printed = [path for path in night.workspace.glob("runs/secrets*/a1/nemorun/**/*.out")]

    assert all(any(text in path.read_bytes() for path in printed) for text in (SHAPED.encode(), PLANTED.encode()))
    for path in stored:
        data = path.read_bytes()
        joined = b"".join(data.replace(b"\x1b[1m", b"").split())
        assert not [text for text in texts if text in data or text in joined], path
