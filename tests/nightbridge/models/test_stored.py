"""Stored documents: what any release wrote is read by this one, and what a newer one writes is read as far as known."""

import json
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from nightbridge.attribution.attribution_plan import AttributionPlan, PlannedRun
from nightbridge.attribution.attribution_result import AttributionResult
from nightbridge.bisect.plan import BisectPlan
from nightbridge.bisect.result import BisectResult
from nightbridge.gate.decisions import Decision, Withdrawal
from nightbridge.gate.paired_trial import Trial
from nightbridge.harvest.manifest import Manifest
from nightbridge.history.reading import Alias
from nightbridge.history.rows import HistoryRow
from nightbridge.images.image import ImagePin, ImageRecord, WorkspaceRef
from nightbridge.locking import Holder
from nightbridge.models import Job, RunRecord, StoredModel, Summary, TestDefinition, Verdict
from nightbridge.nights.records import NightEnd, NightPlan, NightStart
from nightbridge.repos.commits import CommitPin
from nightbridge.repos.environments import EnvironmentRecord
from nightbridge.slurm.attempt_files import AttemptContext, Cancellation, Intent, Submission, SubmitRefusal, Waiting

ROOT = Path(__file__).parents[3]
RELEASED = ROOT / "tests" / "data" / "released"

KINDS: dict[str, type[StoredModel]] = {
    "attempt": AttemptContext,
    "attribution_design": PlannedRun,
    "attribution_plan": AttributionPlan,
    "attribution_result": AttributionResult,
    "bisect_plan": BisectPlan,
    "bisect_result": BisectResult,
    "cancellation": Cancellation,
    "decision": Decision,
    "ended": Job,
    "environment": EnvironmentRecord,
    "history_row": HistoryRow,
    "image": ImageRecord,
    "image_pin": ImagePin,
    "intent": Intent,
    "lease": Holder,
    "manifest": Manifest,
    "night_end": NightEnd,
    "night_plan": NightPlan,
    "night_start": NightStart,
    "pin": CommitPin,
    "record": RunRecord,
    "refusal": SubmitRefusal,
    "series_alias": Alias,
    "submission": Submission,
    "summary": Summary,
    "trial": Trial,
    "verdict": Verdict,
    "waiting": Waiting,
    "withdrawal": Withdrawal,
    "workspace_ref": WorkspaceRef,
}
"""Every kind of document that is written to the store or to a workspace, by the name of its samples."""

SAMPLES = sorted(RELEASED.glob("*/*.json"))

with_every_sample = pytest.mark.parametrize(
    "sample", SAMPLES, ids=lambda path: str(path.relative_to(RELEASED).with_suffix(""))
)


def models_in(value: object) -> Iterator[BaseModel]:
    """A model, and every model in it."""
    if isinstance(value, BaseModel):
        yield value
        value = list(vars(value).values())
    elif isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for inner in value:
            yield from models_in(inner)


def with_future_fields(value: object, document: Any) -> Any:
    """A document with a field that no release has, in each of its models."""
    if isinstance(value, BaseModel):
        fields = {name: with_future_fields(getattr(value, name), inner) for name, inner in document.items()}
        return fields | {"of_the_future": {"deep": [1]}}
    if isinstance(value, tuple):
        return [with_future_fields(one, inner) for one, inner in zip(value, document, strict=True)]
    return document


def without_new_fields(value: Any, older: Any) -> Any:
    """A document with the fields only that an older one has."""
    if isinstance(value, dict) and isinstance(older, dict):
        return {name: without_new_fields(value[name], older[name]) for name in older}
    if isinstance(value, list) and isinstance(older, list):
        return [without_new_fields(*pair) for pair in zip(value, older, strict=True)]
    return value


@with_every_sample
def test_what_a_release_wrote_is_read_whole(sample: Path) -> None:
    written = json.loads(sample.read_bytes())

    read = json.loads(KINDS[sample.stem].model_validate_json(sample.read_bytes()).model_dump_json())

    assert without_new_fields(read, written) == written


@with_every_sample
def test_what_a_newer_release_adds_is_ignored_at_every_depth(sample: Path) -> None:
    document = KINDS[sample.stem].model_validate_json(sample.read_bytes())
    newer = with_future_fields(document, json.loads(document.model_dump_json()))

    assert KINDS[sample.stem].model_validate_json(json.dumps(newer)) == document
    assert json.dumps(newer).count("of_the_future") == len(list(models_in(document)))


@with_every_sample
def test_what_another_release_pickled_has_the_fields_of_this_one(sample: Path) -> None:
    """Prefect pickles what a flow returned, and a night that is started again after an upgrade takes it for its run's."""
    document, pickled = (KINDS[sample.stem].model_validate_json(sample.read_bytes()) for _ in range(2))
    for model in models_in(pickled):
        for name in type(model).model_fields.keys() - model.model_fields_set:
            del vars(model)[name]
        vars(model)["of_the_future"] = [1]

    assert pickle.loads(pickle.dumps(pickled)) == document


def test_every_release_has_samples_of_what_it_wrote() -> None:
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")

    assert re.findall(r"^## \[(\d[\d.]*)\]", changes, re.MULTILINE) == sorted({path.parent.name for path in SAMPLES})


def _subclasses(kind: type[StoredModel]) -> Iterator[type[StoredModel]]:
    for inner in kind.__subclasses__():
        yield inner
        yield from _subclasses(inner)


def test_every_kind_of_document_is_among_these() -> None:
    # Those of tests aside, all stored models are imported by now.
    assert {kind for kind in _subclasses(StoredModel) if kind.__module__.startswith("nightbridge.")} == {
        *KINDS.values()
    }


@pytest.mark.parametrize("kind", KINDS.values(), ids=lambda kind: kind.__name__)
def test_every_document_names_the_version_of_its_schema(kind: type[StoredModel]) -> None:
    assert kind.model_fields["schema_version"].default == 1


def test_a_document_of_the_wrong_kind_is_refused() -> None:
    with pytest.raises(ValidationError, match="Field required"):
        Verdict.model_validate_json((RELEASED / "0.1.0" / "pin.json").read_bytes())


def test_what_a_user_writes_is_still_refused_with_an_unknown_field() -> None:
    with pytest.raises(ValidationError, match="Extra inputs are not permitted"):
        TestDefinition.model_validate({"id": "a", "gate": {"step_tme": 0.1}})
