"""The forms of the deployments: the types of their fields, and their choices.

Prefect's UI draws a form from the JSON schema of a flow's parameters, and its server refuses what the schema does not
allow, each field with its own message. The types are the flow's; what exists at a site, such as scenarios and tests, is
only known when it is deployed, and becomes choices in that deployment's schema.
"""

import contextlib
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any
from zoneinfo import available_timezones

from prefect.blocks.core import Block
from prefect.client.orchestration import SyncPrefectClient
from prefect.exceptions import ObjectNotFound
from prefect.flows import Flow
from pydantic import Field

from nightbridge import config, models
from nightbridge.blocks import HarvestStore, SiteBlock, SlurmCluster
from nightbridge.errors import InvalidInput
from nightbridge.models import MetricName, Scenario, SiteChoice
from nightbridge.models.base import NightId

SystemField = SiteBlock | str | None
ClusterField = SlurmCluster | str | None
StoreField = HarvestStore | str | None
"""A block, its name, or what `SiteChoice` says of the field of the same name."""
ClockField = Annotated[str, Field(pattern=r"^([01]\d|2[0-3]):[0-5]\d$", examples=["08:00"])]
RunField = Annotated[str, Field(min_length=1, examples=["llama-small@last-good"])]
TextField = Annotated[str, Field(min_length=1)]
NightField = Annotated[NightId, Field(examples=["2026-12-05"])]
MetricsField = tuple[MetricName, ...]

Schema = dict[str, Any]


def own_scenarios(definitions: Iterable[Mapping[str, Any]]) -> set[Path]:
    """The scenarios that the definitions of a prefect.yaml are for; a checkout has those of the shipped one.

    Raises:
        InvalidInput: One is not in this folder.
    """
    own = {Path(each["parameters"]["scenario"]) for each in definitions if "scenario" in each.get("parameters", {})}
    if missing := sorted(str(file) for file in own if not file.is_file()):
        what = "deployed by prefect.yaml where no FILE is named, and not in this folder"
        raise InvalidInput(what, subject=", ".join(missing), advice="Name your own: nightbridge deploy FILE...")
    return own


def scenarios_beside(files: Collection[Path]) -> dict[str, Scenario]:
    """The files that a drop-down of scenarios offers: these, and the tests and scenarios in the same folders.

    Raises:
        InvalidInput: One of the files cannot be read, or none of its tests.
    """
    found = {str(file): config.load(file) for file in files}
    for file, scenario in found.items():
        if not scenario.tests:
            violations = [violation.line(test.id) for test in scenario.invalid for violation in test.findings]
            raise InvalidInput("no test of it can run", subject=file, violations=violations)
    for other in sorted({path for file in files for path in file.parent.glob("*.toml")} - set(files)):
        try:
            found[str(other)] = config.load(other)
        except InvalidInput:  # a site file, or one that is being written
            continue
    return found


def form_of(
    flow: Flow[..., Any], fixed: Mapping[str, Any], scenarios: Mapping[str, Scenario], *, swept: bool
) -> Schema:
    """The schema of a deployment's form.

    Args:
        flow: The flow.
        fixed: The deployment's parameters: what they name is among the choices.
        scenarios: The scenarios to choose from, by their paths.
        swept: Whether only tests with a sweep can be chosen.
    """
    schema: Schema = flow.parameters.model_dump()  # a copy of what Prefect made of the signature when it was imported
    properties: dict[str, Schema] = schema["properties"]
    for name, field in properties.items():
        properties[name] = _plain(field, fixed.get(name))
        if known := SiteChoice.model_fields.get(name):
            properties[name].setdefault("description", known.description)
    for block in schema["definitions"].values():
        if "block_type_slug" in block:
            # A reference to a block would otherwise pass as a block of defaults, too, and Prefect wants one of the two.
            block["required"] = ["block_type_slug"]
    for name, choose in _CHOICES.items():
        if name in properties and (choices := choose(scenarios, swept)):
            target = properties[name]["items"] if properties[name].get("type") == "array" else properties[name]
            target["enum"] = choices
    # Of a field itself the UI keeps its type and choices only, and asks the server about all fields at once: so the
    # limits stand here. When a run is started anyway, the server refuses it with the first error alone.
    schema["allOf"] = [_limits_of(schema, schema["definitions"])]
    if "scenario" in properties and (chosen := {"tests", "test_id"} & properties.keys()):
        tests = {path: set(_test_ids([scenario], swept)) for path, scenario in scenarios.items()}
        everything = set().union(*tests.values())
        schema["allOf"] += [
            _not_these(path, next(iter(chosen)), everything - own) for path, own in tests.items() if everything - own
        ]
    return schema


_BLOCK_OF: Mapping[str, type[Block]] = {"system": SiteBlock, "cluster": SlurmCluster, "store": HarvestStore}


def site_parameters(client: SyncPrefectClient, choice: SiteChoice) -> dict[str, Any]:
    """The site as parameters: a block that is named becomes a reference to it, which a form shows as a choice."""
    given = {name: value for name, value in choice.parameters().items() if value}
    for name, kind in _BLOCK_OF.items():
        with contextlib.suppress(ObjectNotFound):
            if name in given:
                document = client.read_block_document_by_name(given[name], kind.get_block_type_slug())
                given[name] = {"$ref": {"block_document_id": str(document.id)}}
    return given


def site_of_form(flow: Flow[..., Any], given: Mapping[str, Any], site: models.Site) -> dict[str, Any]:
    """Those parameters of the site that a flow has; one that has a store alone gets that of a named workspace."""
    known = flow.parameters.properties
    found = {name: value for name, value in given.items() if name in known}
    if "workspace" in given.keys() - known.keys() and "store" in known and site.store is None:
        return {**found, "store": site.store_settings.url}
    return found


def _limits_of(field: Schema, definitions: Mapping[str, Schema]) -> Schema:
    """The limits of a field and of those in it, taken out of it."""
    target = definitions.get(field.get("$ref", "").rpartition("/")[2], field)
    if "block_type_slug" in target:
        return {}
    limits = {name: target.pop(name) for name in _LIMITS & target.keys()}
    inner = {name: _limits_of(each, definitions) for name, each in target.get("properties", {}).items()}
    return limits | ({"properties": found} if (found := {name: each for name, each in inner.items() if each}) else {})


_LIMITS = frozenset({"pattern", "minLength", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"})


def _plain(field: Schema, value: object) -> Schema:
    """A field that may be empty as one of its type alone: a form then shows no choice between a type and `None`.

    Where the deployment has a block, another block can be picked; else a name, a file or a URL can be typed as well.
    """
    kinds = [kind for kind in field.get("anyOf", ()) if kind.get("type") != "null"]
    if not kinds:
        return field
    if isinstance(value, dict):
        kinds = [kind for kind in kinds if "$ref" in kind]
    kept = {name: value for name, value in field.items() if name != "anyOf" and (name, value) != ("default", None)}
    return {**kept, **(kinds[0] if len(kinds) == 1 else {"anyOf": kinds})}


def _test_ids(scenarios: Collection[Scenario], swept: bool) -> list[str]:
    tests = [test for scenario in scenarios for test in scenario.tests]
    return sorted({test.id for test in tests if test.axes or not swept})


def _not_these(path: str, field: str, others: Collection[str]) -> Schema:
    """No test is chosen that the chosen scenario lacks: a condition on the field, since no UI shows those on items."""
    chosen = {"properties": {"scenario": {"const": path}}, "required": ["scenario"]}
    named = {"enum": sorted(others)}
    return {"if": chosen, "then": {"properties": {field: {"not": {"contains": named} if field == "tests" else named}}}}


_CHOICES: Mapping[str, Callable[[Mapping[str, Scenario], bool], list[str]]] = {
    "scenario": lambda scenarios, swept: sorted(
        path for path, scenario in scenarios.items() if not swept or _test_ids([scenario], swept)
    ),
    "scenarios": lambda scenarios, _: sorted(scenarios),
    "tests": lambda scenarios, swept: _test_ids([*scenarios.values()], swept),
    "test_id": lambda scenarios, _: _test_ids([*scenarios.values()], swept=False),
    "timezone": lambda *_: sorted(available_timezones()),
}
"""What a field can be chosen from, by its name."""
