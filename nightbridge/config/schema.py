"""The tables of a test and of a scenario, as CloudAI's files have them, with nightbridge's own [harvest] and [gate].

`editor_schema` is the JSON Schema of these files, for completion and checks while they are written (taplo, VS Code);
`explain_key` says in words what it has of a key.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError

from nightbridge.config.arguments import MOVED, RENAMED
from nightbridge.config.cloudai_compat import AgentFields, TrainingReport
from nightbridge.config.documents import ELSEWHERE, OTHER_NAMES, Findings, KeyPath, Layered, unknown_key, validated
from nightbridge.errors import InvalidInput
from nightbridge.launch.config_schema import released_schema
from nightbridge.launch.flags import CHOICES, NO_EFFECT, TEST_FLAGS, Flag, FlagKind
from nightbridge.launch.hetero_arguments import HeteroArguments, Text
from nightbridge.launch.versions import HEAD
from nightbridge.models import Compat, GatePolicy, GitRepo, HarvestPolicy, Model, SweepPolicy

IGNORED: Mapping[str, str] = {
    "nsys": "has no effect for this workload, in CloudAI either; use cmd_args.enable_nsys",
    "predictor": "has no effect for this workload, in CloudAI either",
    **dict.fromkeys(("weight", "sol", "ideal_perf"), "has no effect: a test is judged by its [gate]"),
}
"""Fields of a test or an entry that are accepted and do nothing here, with the reason."""

SCENARIO_IGNORED: Mapping[str, str] = {
    "job_status_check": "has no effect: a failed test never stops the others",
    "pre_test": "has no effect: this version runs no hooks",
    "post_test": "has no effect: this version runs no hooks",
    "reports": "has no effect: every night has one report",
    "sol_path": "has no effect, in CloudAI either",
    "description": "has no effect",
}
"""Fields of a scenario that are accepted and do nothing here."""

REFUSED_FOR_CLOUDAI = frozenset({"pre_test", "post_test", "reports", "job_status_check"})
"""Those of them that have an effect in CloudAI: a test with `compat = "cloudai"` cannot do without it."""

SCENARIO_KEYS = frozenset({"name", "Tests", *SCENARIO_IGNORED})
ENTRY_KEYS = frozenset({"id", "test_name"})


def _listed(value: object) -> object:
    """A text alone is a list of one, as in CloudAI."""
    return [value] if isinstance(value, str) else value


class DependencyTable(Model):
    """An entry of `[[Tests.dependencies]]`."""

    type: Literal["start_post_comp", "start_post_init", "start_post_success", "end_post_comp"] = Field(
        description="Start after the other test ended, started, or succeeded. `end_post_comp` has no effect."
    )
    id: Text = Field(description="Id of the other test.")


class TestTable(AgentFields):
    """One test after its scenario entry has been laid over it. `cmd_args` is read by `arguments.py`."""

    __test__ = False  # not a pytest class

    name: Text = Field(description="Name of the test.")
    description: str = Field("", description="Shown in reports.")
    test_template_name: Literal["MegatronBridge", "HeteroMIMO"] = Field(description="The workload.")
    cmd_args: dict[str, Any] = Field(description="Arguments of the launcher or program; see below.")
    extra_env_vars: dict[str, str | tuple[str, ...]] = Field(
        default={}, description="Environment variables of the job. A list is a sweep; `env:NAME` names a secret."
    )
    extra_cmd_args: dict[str, str] = Field(
        default={}, description="Overrides of the recipe (Hydra's `key=value`), or further options."
    )
    extra_container_mounts: tuple[str, ...] = Field((), description="Mounts, each `HOST_PATH:/CONTAINER_PATH[:flags]`.")
    git_repos: tuple[GitRepo, ...] = Field(min_length=1, description="Repositories to pin; one is Megatron-Bridge.")
    nemo_run_repo: GitRepo | None = Field(None, description="NeMo-Run; `main` of the official repository when unset.")
    time_limit: str | None = Field(None, description="`HH:MM:SS`; the launcher's own limit when unset.")
    iterations: int = Field(1, ge=1, le=10_000, description="How often the test runs each night.")
    nodes: tuple[str, ...] = Field((), description="Hosts to run on, as in `host-[01-03]`.")
    exclude_nodes: tuple[str, ...] = Field((), description="Hosts not to run on.")
    harvest: HarvestPolicy = Field(HarvestPolicy(), description="What is stored of a run.")
    gate: GatePolicy = Field(GatePolicy(), description="When a result is a regression.")
    canary: bool = Field(False, description="Separate the cluster's drift from the code's; needs full commits as pins.")
    compat: Compat = Field("none", description="`cloudai` checks by CloudAI's own constraints.")
    sweep: SweepPolicy = Field(SweepPolicy(), description="How lists are expanded.")
    dependencies: tuple[DependencyTable, ...] = Field((), description="Tests of the scenario to wait for.")
    dse_excluded_args: Annotated[tuple[str, ...], BeforeValidator(_listed)] = Field(
        (), description="Keys whose list is one value and no sweep (CloudAI)."
    )
    num_nodes: int | str | tuple[int, ...] | None = Field(
        None, description="A list sweeps over the number of nodes; a single number has no effect."
    )
    extra_srun_args: str | tuple[str, ...] = Field((), description="Further options of the job, as `--name=value`.")
    training_report: TrainingReport | None = Field(None, description="Steps that statistics leave out (CloudAI).")


def keys_by_table(*, hetero: bool) -> Mapping[str, Iterable[str]]:
    """The keys of each table of a test, by what a message calls it; `hetero` for two grids."""
    return {
        "the site's file": ("account", "partition"),
        "[[git_repos]]": GitRepo.model_fields,
        "[sweep]": SweepPolicy.model_fields,
        "[harvest]": HarvestPolicy.model_fields,
        "[gate]": GatePolicy.model_fields,
        "[cmd_args]": HeteroArguments.model_fields if hetero else TEST_FLAGS,
        "the test itself, before its tables": TestTable.model_fields,
    }


def check_table(source: Layered, findings: Findings) -> TestTable | None:
    """Validate the merged table of a test; every problem goes to `findings`.

    Returns:
        The table without what cannot be read; None where that leaves no test.
    """
    table = findings.taken(source.table, IGNORED)
    if isinstance(repos := table.get("git_repos"), list):
        ignored = {"installed_path": "has no effect: the checkout is nightbridge's own"}
        table["git_repos"] = [
            findings.taken(repo, ignored, ("git_repos", index)) if isinstance(repo, dict) else repo
            for index, repo in enumerate(repos)
        ]
    return validated(TestTable, table, findings, also_known=IGNORED) or _readable(table)


def _readable(table: dict[str, Any]) -> TestTable | None:
    """What of a wrong table can be read, so that all that is right in it is checked as well."""
    try:
        TestTable.model_validate(table)
    except ValidationError as error:
        for problem in error.errors(include_url=False, include_context=False, include_input=False):
            table = _without(table, problem["loc"])
    try:
        return TestTable.model_validate({"name": "?", "test_template_name": "MegatronBridge", **table})
    except ValidationError:
        return None


def _without(container: Any, path: KeyPath) -> Any:
    """A table without the value at a path, or without the nearest one around it that is written."""
    head, *rest = path
    inner = container.get(head) if isinstance(container, dict) else None
    if isinstance(container, list) and isinstance(head, int) and rest and head < len(container):
        return [*container[:head], _without(container[head], tuple(rest)), *container[head + 1 :]]
    if isinstance(container, dict) and rest and isinstance(inner, dict | list):
        return {**container, head: _without(inner, tuple(rest))}
    return {key: value for key, value in container.items() if key != head} if isinstance(container, dict) else []


# --- for editors -----------------------------------------------------------------------------------------------------

_TYPES: Mapping[FlagKind, tuple[str, ...]] = {
    **dict.fromkeys(("text", "texts", "text_or_none"), ("string",)),
    **dict.fromkeys(("integer", "integers", "integer_or_none"), ("integer", "string")),
    "number": ("number", "string"),
    "boolean": ("boolean", "integer", "string"),
}


def editor_schema() -> dict[str, Any]:
    """JSON Schema (2020-12) of a test file, or of a scenario with its tests."""
    test = TestTable.model_json_schema(ref_template="#/$defs/{model}")
    hetero = HeteroArguments.model_json_schema(ref_template="#/$defs/{model}")
    definitions = {**test.pop("$defs"), **hetero.pop("$defs")}
    required, keys = test.pop("required"), test["properties"]
    keys |= {key: _deprecated(reason) for key, reason in IGNORED.items()}
    keys["cmd_args"] = {"$ref": "#/$defs/cmd_args"}
    keys["extra_cmd_args"]["properties"] = {path: {"type": "string"} for path in released_schema(HEAD).paths}
    entry = {
        **test,
        "title": "An entry of a scenario",
        "properties": {**keys, **{key: {"type": "string"} for key in sorted(ENTRY_KEYS)}},
        "required": ["id"],
    }
    scenario_keys = {
        "name": {"type": "string"},
        "Tests": {"type": "array", "items": entry, "minItems": 1},
        **{key: _deprecated(reason) for key, reason in SCENARIO_IGNORED.items()},
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Test or scenario of nightbridge",
        "$defs": {
            **definitions,
            "cmd_args": {"anyOf": [_object("MegatronBridge", _launcher_keys()), _with_sweeps(hetero)]},
        },
        "if": {"required": ["Tests"]},
        "then": {**_object("A scenario", scenario_keys), "required": ["name", "Tests"]},
        "else": {**test, "required": required},
    }


def _launcher_keys() -> dict[str, Any]:
    keys = {field: _key(flag) for field, flag in TEST_FLAGS.items()}
    named = {**RENAMED, **MOVED, **dict.fromkeys(("model_name", "model_size"), "model_recipe_name")}
    older = {**NO_EFFECT, **{key: f"write {new}" for key, new in named.items()}}
    return keys | {key: _deprecated(reason) for key, reason in older.items()}


def _object(title: str, properties: Mapping[str, Any]) -> dict[str, Any]:
    return {"title": title, "type": "object", "properties": properties, "additionalProperties": False}


def _deprecated(reason: str) -> dict[str, Any]:
    return {"description": reason, "deprecated": True}


def _key(flag: Flag) -> dict[str, Any]:
    """A key's value: one, or a list of them, which is a sweep."""
    one: dict[str, Any] = {"type": list(_TYPES[flag.kind])}
    if flag.field in CHOICES:
        words = dict.fromkeys(word for _, allowed in CHOICES[flag.field] for word in allowed)
        one = (
            {"type": "string", "enum": list(words)} if flag.kind == "text" else {"anyOf": [{"enum": list(words)}, one]}
        )
    several = {"type": "array", "items": {"anyOf": [one, {"type": "array"}]}}
    return {"description": f"{flag.option or flag.field} of the launcher", "anyOf": [one, several]}


def _with_sweeps(model: dict[str, Any]) -> dict[str, Any]:
    """A model's schema in which each value may be a list, which is a sweep."""
    swept = {key: {"anyOf": [value, {"type": "array", "items": value}]} for key, value in model["properties"].items()}
    return {**model, "title": "HeteroMIMO", "properties": swept}


# --- in words -----------------------------------------------------------------------------------------------------


def explain_key(key: str) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    """The part of `editor_schema` that is about a key of a test file, and the same in words, a line each.

    Args:
        key: With its table or without, or a whole table.

    Raises:
        InvalidInput: There is no such key, or several tables have it.
    """
    schema = editor_schema()
    found: Mapping[str, Any] = schema["else"]
    tables = _properties(found, schema)
    if key not in tables and "." not in key:
        ours = ELSEWHERE.get(key, key)
        inside = [f"{table}.{ours}" for table in tables if ours in _properties(tables[table], schema)]
        if len(inside) > 1:
            raise InvalidInput("several tables have this key", subject=key, advice=f"Name one of {', '.join(inside)}")
        key = inside[0] if inside else key
    for part in key.split("."):
        known = _properties(found, schema)
        if part not in known:
            raise InvalidInput(unknown_key(part, known), subject=key, advice="`nightbridge schema` prints all keys")
        found = known[part]
    return found, tuple(_explanation(key, found, schema))


def _explanation(key: str, found: Mapping[str, Any], schema: Mapping[str, Any]) -> Iterator[str]:
    resolved = _resolved(found, schema)
    about = found.get("description") or resolved.get("description", "")
    yield f"{key}: {about}".rstrip(": ")
    for name in ("type", "enum", "minimum", "maximum", "default"):
        value = resolved.get(name, found.get(name))
        if value is not None and not isinstance(value, dict):
            shown = ", ".join(map(str, value)) if isinstance(value, list) else value
            yield f"  {name:8} {shown}"
    if others := OTHER_NAMES.get(key.rpartition(".")[2]):
        yield f"  {'as':8} {', '.join(others.split())} elsewhere"
    for name, value in _properties(found, schema).items():
        yield f"  {name}  {_resolved(value, schema).get('description', '')}".rstrip()


def _resolved(found: Mapping[str, Any], schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a part of the schema refers to; of alternatives the first one that says most."""
    while "$ref" in found:
        found = schema["$defs"][found["$ref"].rpartition("/")[2]]
    choices = [_resolved(one, schema) for one in found.get("anyOf", ()) if one.get("type") != "null"]
    return {**choices[0], **found} if choices else found


def _properties(found: Mapping[str, Any], schema: Mapping[str, Any]) -> Mapping[str, Any]:
    resolved = _resolved(found, schema)
    if resolved.get("type") == "array":
        resolved = _resolved(resolved.get("items", {}), schema)
    found_here: Mapping[str, Any] = resolved.get("properties", {})
    return found_here
