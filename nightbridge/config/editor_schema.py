"""The JSON Schema of test and scenario files, for completion and checks while they are written (taplo, VS Code)."""

from collections.abc import Mapping
from typing import Any

from nightbridge.config.arguments import MOVED, RENAMED
from nightbridge.config.schema import ENTRY_KEYS, IGNORED, SCENARIO_IGNORED, TestTable
from nightbridge.launch.config_schema import released_schema
from nightbridge.launch.flags import CHOICES, HEAD, NO_EFFECT, TEST_FLAGS, Flag, Kind
from nightbridge.launch.hetero_arguments import HeteroArguments

_TYPES: Mapping[Kind, tuple[str, ...]] = {
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
    scenario = {
        "title": "A scenario",
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "Tests": {"type": "array", "items": entry, "minItems": 1},
            **{key: _deprecated(reason) for key, reason in SCENARIO_IGNORED.items()},
        },
        "required": ["name", "Tests"],
        "additionalProperties": False,
    }
    launcher = {
        "title": "MegatronBridge",
        "type": "object",
        "properties": _launcher_keys(),
        "additionalProperties": False,
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Test or scenario of nightbridge",
        "$defs": {**definitions, "cmd_args": {"anyOf": [launcher, _with_sweeps(hetero)]}},
        "if": {"required": ["Tests"]},
        "then": scenario,
        "else": {**test, "required": required},
    }


def _launcher_keys() -> dict[str, Any]:
    keys = {field: _key(flag) for field, flag in TEST_FLAGS.items()}
    named = {**RENAMED, **MOVED, **dict.fromkeys(("model_name", "model_size"), "model_recipe_name")}
    older = {**NO_EFFECT, **{key: f"write {new}" for key, new in named.items()}}
    return keys | {key: _deprecated(reason) for key, reason in older.items()}


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
