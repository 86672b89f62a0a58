"""Night ids: which night a run belongs to, fixed once and never "today".

What is kept of a night: when it began, with which runs, and how it ended.

    <workspace>/nights/<flow run id>.json            NightPlan: every run and the site, for a restart and a cancellation
    <store>/nights/<night>/<scenario>/begun.json     NightStart: when, why then, and which runs
    <store>/nights/<night>/<scenario>/ended.json     NightEnd: every verdict, and where the report is

The plan lies where the flow run can find it without reading the scenario or the site file again: either may have been
edited, broken or removed while the night went on.
"""

import hashlib
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import TypeVar

from pydantic import Field, TypeAdapter, ValidationError

from nightbridge.errors import InvalidInput
from nightbridge.files import read_model, write_model
from nightbridge.models import (
    GOOD_VERDICTS,
    ClusterLimits,
    Model,
    NightId,
    NightReport,
    RunSpec,
    Scenario,
    Site,
    StoredModel,
    Verdict,
    VerdictStatus,
    has_date,
    is_run_key,
    night_order,
    slug,
    slug_in,
    utc_now,
    worst_status,
)
from nightbridge.store.object_store import ObjectStore, read_stored
from nightbridge.store.parallel import in_parallel

_NIGHT_ID: TypeAdapter[str] = TypeAdapter(NightId)


def night_of_slot(slot: datetime, slots_of_the_day: Iterable[datetime]) -> str:
    """The night of a scheduled flow run, from the schedule's own slot.

    `YYYY-MM-DD` for the first slot of a day, `YYYY-MM-DD-HHMM` for each further one. Where clocks are set back, the
    same local time comes twice: the second one ends in `-2`.

    Args:
        slot: When the schedule wanted the run to start, in the schedule's own time zone.
        slots_of_the_day: Those slots of the deployment on the slot's local date that have a flow run, in any order.
    """
    return slot.date().isoformat() if slot <= min(slots_of_the_day, default=slot) else night_of_further_slot(slot)


def night_of_further_slot(slot: datetime) -> str:
    """The night of a slot that is not its day's first."""
    is_second_time_round = slot.fold == 1 and slot.utcoffset() != slot.replace(fold=0).utcoffset()
    return f"{slot:%Y-%m-%d-%H%M}{'-2' if is_second_time_round else ''}"


def new_night(started: datetime | None = None) -> str:
    """A night id for a run by hand: its start (default now) in UTC, `YYYY-MM-DD-HHMMSS`.

    It sorts between the scheduled nights of its own and of the next day.
    """
    return (started or utc_now()).astimezone(UTC).strftime("%Y-%m-%d-%H%M%S")


def checked_night(text: str) -> str:
    """Return `text` if it can be a night id.

    Raises:
        InvalidInput: It cannot; it becomes a part of job names and paths.
    """
    try:
        return _NIGHT_ID.validate_python(text)
    except ValidationError as error:
        raise InvalidInput(
            "not a night id", subject=text, advice="Use up to 40 lower-case letters, digits and dashes, as 2026-11-21"
        ) from error


_NEWEST = ("", "last", "last-good")

LATE = timedelta(minutes=30)
"""A scheduled night that begins later after its slot than this is late."""

_M = TypeVar("_M", bound=StoredModel)

_RECORD = re.compile(r"(nights/([^/]+)/[^/]+)/(begun|ended)\.json")


class NightTest(Model):
    """A run of a night, in short."""

    test_id: str
    run_key: str


class NightStart(StoredModel):
    """That a night has begun: written before its first run is started."""

    night: NightId
    scenario: str = Field(description="The scenario's name.")
    cluster: str
    workspace: Path
    begun_at: datetime
    slot: datetime | None = Field(None, description="When the schedule wanted it to begin; none for a night by hand.")
    flow_run: str = Field("", description="Id of the Prefect flow run that began it last.")
    deployment: str = Field("", description="Name of the flow run's deployment; empty without one.")
    tests: tuple[NightTest, ...] = ()
    invalid: tuple[str, ...] = Field((), description="Ids of the tests that cannot run.")
    site_options: str = Field("", description="What names its site behind a command that the report proposes.")

    @property
    def test_ids(self) -> tuple[str, ...]:
        """Of all its tests, those last that cannot run; each once."""
        return tuple(dict.fromkeys((*(test.test_id for test in self.tests), *self.invalid)))

    @property
    def late_by(self) -> timedelta | None:
        """How long after its slot it began, where that was longer than `LATE`."""
        late = self.begun_at - self.slot if self.slot else timedelta()
        return late if late > LATE else None


class NightPlan(StoredModel):
    """Everything that a night runs, as it was fixed when it began."""

    start: NightStart
    scenario: Scenario
    runs: tuple[RunSpec, ...]
    site: Site
    limits: ClusterLimits | None = Field(None, description="The cluster's limits, where a sweep needed them.")

    def run_keys(self) -> Iterator[str]:
        """The keys of every run that it may have started: its own, and the pairs or re-runs that confirm them."""
        # Here: the weighing of pairs is heavy, and whoever lists nights does without it.
        from nightbridge.gate.control_arm import most_pairs

        for run in self.runs:
            for number in range(2 * (most_pairs(run.test.gate) + 1) + 1):  # one pair more may try suspect nodes
                yield run.model_copy(update={"repeat": number}).run_key


class NightVerdict(Model):
    """A verdict of a night, in short."""

    test_id: str
    run_key: str
    status: VerdictStatus
    job_id: int | None = None
    prefix: str = ""
    gpu_hours: float = 0.0
    confirmation_gpu_hours: float = 0.0
    stored_bytes: int = Field(0, description="What the store got of the run.")
    step_time: float | None = Field(None, description="Seconds; None where it was not measured.")


_SHARED = NightVerdict.model_fields.keys() & Verdict.model_fields.keys()
"""What a verdict has in short as in full."""


class NightEnd(StoredModel):
    """How a night ended: written together with its report."""

    night: NightId
    scenario: str
    ended_at: datetime
    exit_code: int
    verdicts: tuple[NightVerdict, ...]
    report: str = ""
    cancelled: bool = Field(False, description="Whether a user cancelled it before it had its report.")

    @property
    def title(self) -> str:
        """The night's worst verdict, as states and tables show it; `cancelled` for one that a person cancelled."""
        if self.cancelled:
            return VerdictStatus.CANCELLED.value
        return worst_status(verdict.status for verdict in self.verdicts).value


class Night(Model):
    """What the store knows of a night."""

    start: NightStart
    end: NightEnd | None = None

    @property
    def ended(self) -> NightEnd | None:
        """How it ended; None where it was begun again since."""
        return self.end if self.end and self.end.ended_at >= self.start.begun_at else None


def plan_path(workspace: Path, flow_run: str) -> Path:
    """Where the plan of a flow run's night is kept."""
    return workspace / "nights" / f"{flow_run}.json"


def write_plan(plan: NightPlan) -> Path:
    """Keep a night's plan in its workspace, and return its path."""
    path = plan_path(plan.site.workspace, plan.start.flow_run)
    write_model(path, plan)
    return path


def read_plan(path: Path) -> NightPlan | None:
    """Read a night's plan; None where there is none.

    Raises:
        DamagedData: The file does not hold one.
    """
    return read_model(path, NightPlan, what="not the plan of a night", advice="Remove it; the night is planned again")


def claim_start(store: ObjectStore, start: NightStart) -> NightStart | None:
    """Say in the store that a night has begun, unless one of this id has; return what is there of this scenario."""
    key = f"{_folder(store, start.night, start.scenario)}/begun.json"
    if store.put_if_absent(key, start.model_dump_json(indent=2).encode()):
        return start
    return read_start(store, start.night, start.scenario)


def record_start(store: ObjectStore, start: NightStart) -> None:
    """Say in the store that a night has begun.

    A later flow run of the same night replaces the record of an earlier one, but for the slot of the schedule.
    """
    earlier = read_start(store, start.night, start.scenario) if start.slot is None else None
    if earlier is not None:
        start = start.model_copy(update={"slot": earlier.slot})
    store.put(f"{_folder(store, start.night, start.scenario)}/begun.json", start.model_dump_json(indent=2).encode())


def record_end(store: ObjectStore, report: NightReport, *, cancelled: bool = False) -> NightEnd:
    """Say in the store how a night ended: with its report, or cancelled by a person."""

    def size(verdict: Verdict) -> int:
        return sum(found.size for found in store.list(f"{verdict.prefix}/")) if verdict.prefix else 0

    sizes = in_parallel(size, report.verdicts)
    end = NightEnd(
        night=report.night,
        scenario=report.scenario,
        ended_at=utc_now(),
        exit_code=report.exit_code,
        verdicts=tuple(
            _in_short(verdict).model_copy(update={"stored_bytes": stored})
            for verdict, stored in zip(report.verdicts, sizes, strict=True)
        ),
        report=report.report,
        cancelled=cancelled,
    )
    store.put(f"{_folder(store, end.night, end.scenario)}/ended.json", end.model_dump_json(indent=2).encode())
    return end


def was_reported(earlier: NightEnd | None, verdicts: Iterable[Verdict]) -> bool:
    """Whether the night had ended before with these very jobs, so that nothing was run again."""
    if earlier is None or earlier.cancelled:
        return False
    jobs = {(verdict.run_key, verdict.job_id, verdict.prefix) for verdict in earlier.verdicts}
    return jobs == {(verdict.run_key, verdict.job_id, verdict.prefix) for verdict in map(_in_short, verdicts)}


def read_start(store: ObjectStore, night: str, scenario: str) -> NightStart | None:
    """The beginning of a night; None when it has not begun."""
    found = _read(store, f"{_folder(store, night, scenario)}/begun.json", NightStart)
    return found if found and found.scenario == scenario else None


def read_end(store: ObjectStore, night: str, scenario: str) -> NightEnd | None:
    """The end of a night; None while it has none."""
    found = _end_in(store, _folder(store, night, scenario))
    return found if found and found.scenario == scenario else None


def read_night(store: ObjectStore, folder: str) -> Night | None:
    """The night whose records are in a folder of the store; None where it has not begun.

    Raises:
        DamagedData: A record cannot be read.
    """
    start, end = _read(store, f"{folder}/begun.json", NightStart), _end_in(store, folder)
    if start is None:
        return None
    # In 0.1 two scenarios of one slug wrote to the same folder.
    return Night(start=start, end=end if end and end.scenario == start.scenario else None)


def find_nights(store: ObjectStore, *, limit: int | None = None, night: str | None = None) -> list[Night]:
    """The nights in the store, the newest first.

    Args:
        store: Where they are.
        limit: How many ids at most; all when None. A night with several scenarios counts once.
        night: Only this one.

    Raises:
        DamagedData: A record cannot be read.
    """
    folders = _folders(store, f"nights/{night}/" if night else "nights/")
    chosen = list(dict.fromkeys(found for found, _ in folders))[:limit]
    nights = in_parallel(partial(read_night, store), [folder for found, folder in folders if found in chosen])
    return [read for read in nights if read]


def newest_first(store: ObjectStore) -> Iterator[Night]:
    """Every night of the store, each read when it is reached. Raises as `find_nights` does."""
    return filter(None, (read_night(store, folder) for _, folder in _folders(store, "nights/")))


def nights_without_end(store: ObjectStore) -> set[str]:
    """The ids of the nights that have begun and have no end, so that whoever starts one again goes on with it."""
    records = list(filter(None, (_RECORD.fullmatch(item.key) for item in store.list("nights/"))))
    ended = {record[1] for record in records if record[3] == "ended"}
    return {record[2] for record in records if record[1] not in ended}


def find_run(store: ObjectStore, name: str) -> str:
    """The run key that a name means.

    Args:
        store: Where the nights are.
        name: A run key, which is returned as it is; or `TEST`, `TEST@NIGHT`, `TEST@last`, `TEST@last-good`; or `last`
            and `last-good`, where the night has one run. Without a night the newest that has the test is meant.

    Raises:
        InvalidInput: There is no such run, or several, as of a sweep; those are listed.
        DamagedData: A record cannot be read.
    """
    if is_run_key(name):
        return name
    _night, found = _runs_of_name(store, name)
    if len(found) > 1:
        raise _ambiguous(store, name, found)
    return found[0].run_key


def find_test(store: ObjectStore, name: str) -> tuple[str, str | None]:
    """The id of the test that a name means, and the night up to which its history is meant.

    Args:
        store: Where the nights are.
        name: A test's id, which is returned as it is, with no night; or any name that `find_run` takes.

    Raises:
        InvalidInput: There is no such run, or runs of several tests; those are listed.
        DamagedData: A record cannot be read.
    """
    if name not in _NEWEST and "@" not in name and not is_run_key(name):
        return name, None
    night, found = _runs_of_name(store, name)
    if len({run.test_id for run in found}) > 1:
        raise _ambiguous(store, name, found)
    return found[0].test_id, night


def _runs_of_name(store: ObjectStore, name: str) -> tuple[str, list[NightTest]]:
    """The newest night that has runs of this name, and these."""
    test, _, when = ("", "", name) if name in _NEWEST else name.partition("@")
    nights = newest_first(store) if when in _NEWEST else find_nights(store, night=when)
    known: set[str] = set()
    for night_id, scenarios in itertools.groupby(nights, key=lambda night: night.start.night):
        every = [run for night in scenarios for run in night.start.tests]
        known |= {run.test_id for run in every}
        runs = [run for run in every if test in ("", run.test_id, run.run_key)]
        if when == "last-good":
            verdicts = {run.run_key: read_verdict(store, run.run_key, night_id) for run in runs}
            good = {key for key, verdict in verdicts.items() if verdict and verdict.status in GOOD_VERDICTS}
            runs = [run for run in runs if run.run_key in good]
        if runs:
            return night_id, runs
    near = ", ".join(get_close_matches(test, known - {test}))
    advice = f"Name one of: {near}" if near else "`nightbridge ls` lists the runs"
    raise InvalidInput("no runs of this name", subject=f"{name} in {store.url}", advice=advice)


def _ambiguous(store: ObjectStore, name: str, found: Sequence[NightTest]) -> InvalidInput:
    choices = ", ".join(f"{run.test_id} ({run.run_key})" for run in found)
    what = f"{len(found)} runs of this name"
    return InvalidInput(what, subject=f"{name} in {store.url}", advice=f"Name one of: {choices}")


def like_test(store: ObjectStore, test_id: str) -> str:
    """Advice where a test is not known: the ids of the last nights that read like this one. Raises as `find_nights`."""
    known = {run.test_id for night in find_nights(store, limit=3) for run in night.start.tests}
    near = ", ".join(get_close_matches(test_id, known - {test_id}))
    return f"Did you mean {near}?" if near else "Check test id and store; `nightbridge history` lists the tests"


def read_verdict(store: ObjectStore, run_key: str, night: str) -> Verdict | None:
    """The stored verdict of a run; None while it has none.

    Raises:
        DamagedData: It cannot be read.
    """
    key = f"runs/{slug_in(run_key, night)}/{night}/{run_key}/verdict.json"
    return read_stored(store, key, Verdict, what="not a verdict", advice="Run the night again")


def verdict_since(store: ObjectStore, run: NightVerdict, night: str) -> Verdict:
    """The verdict of a run of a night that has ended, as it is by now: in short where the store has none in full.

    One that died before its harvest has none, and what is stored then speaks of an earlier attempt.

    Raises:
        DamagedData: It cannot be read.
    """
    stored = read_verdict(store, run.run_key, night)
    if stored and (run.prefix or not stored.prefix):
        return stored
    return Verdict(**run.model_dump(include=_SHARED), night=night)


def confirmation_cost(store: ObjectStore, month: str) -> float:
    """GPU-hours that the ended nights of a month (`2026-11`) have spent on confirmation.

    One without a date in its name is of the month in which it ended.

    Raises:
        DamagedData: A record cannot be read.
    """
    nights = _folders(store, "nights/")
    ends = (_end_in(store, folder) for night, folder in nights if night.startswith(month) or not has_date(night))
    mine = (end for end in ends if end and night_order(end.night, end.ended_at).startswith(month))
    return sum(verdict.confirmation_gpu_hours for end in mine for verdict in end.verdicts)


def _folders(store: ObjectStore, prefix: str) -> list[tuple[str, str]]:
    """Night and folder of every record, the newest night first.

    A night that is named by a word instead of a date, as one by hand may be, counts from when its records were written:
    by its name it would be the newest for ever.
    """
    found: set[tuple[str, str]] = set()
    when: dict[str, str] = {}
    for item in store.list(prefix):
        if match := _RECORD.fullmatch(item.key):
            night = match[2]
            found.add((night, match[1]))
            written = night_order(night, item.modified) if item.modified else night
            when[night] = max(when.get(night, written), written)
    return sorted(found, key=lambda key: (when[key[0]], *key), reverse=True)


def _read(store: ObjectStore, key: str, kind: type[_M]) -> _M | None:
    return read_stored(store, key, kind, what="not the record of a night", advice="Remove it")


def _end_in(store: ObjectStore, folder: str) -> NightEnd | None:
    return _read(store, f"{folder}/ended.json", NightEnd)


def _folder(store: ObjectStore, night: str, scenario: str) -> str:
    """Where the records of a night are: the scenario's name, with a hash where the slug of it is another.

    In 0.1 scenarios whose slugs agree shared one place. A night that was recorded there stays there.
    """
    short = slug(scenario)
    shared = f"nights/{night}/{short}"
    if short == scenario:
        return shared
    known = _read(store, f"{shared}/begun.json", NightStart) or _end_in(store, shared)
    if known and known.scenario == scenario:
        return shared
    return f"{shared}-{hashlib.sha256(scenario.encode()).hexdigest()[:10]}"


def _in_short(verdict: Verdict) -> NightVerdict:
    step_time = verdict.metric("step_time")
    return NightVerdict(**verdict.model_dump(include=_SHARED), step_time=step_time.value if step_time else None)
