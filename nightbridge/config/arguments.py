"""The `[cmd_args]` table: keys, types and older spellings, checked against the launcher's flag table.

That of a heterogeneous-parallel test is checked against its own model: two grids, a schedule, and where it saves.
"""

import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, StringConstraints, TypeAdapter

from nightbridge import secrets
from nightbridge.config.documents import Findings, KeyPath, meant, unknown_key, validated
from nightbridge.launch.flags import NO_EFFECT, TEST_FLAGS, Flag, FlagKind, without_variables
from nightbridge.launch.hetero_arguments import Finite, HeteroArguments, Whole
from nightbridge.models import Model, SecretRef, SweepAxis

REFERENCE_PREFIXES = ("env:", "block:", "toml:")
"""Prefixes of a value that refers to a secret: a variable, a Prefect block, or `FILE#dotted.key`."""

SECRET_NAME = re.compile(r"(?:^|_)(?:TOKEN|(?:API)?KEY|SECRET|PASSWORD|PASSWD|CREDENTIALS?)$", re.IGNORECASE)
"""Names of environment variables that hold a secret."""

_BLOCK_NAME = re.compile(r"[a-z0-9]{1,20}(?:-[a-z0-9]{1,20})*")
"""Names of blocks, of short words: one may begin as a service's tokens do, which have capitals or are longer."""

_SWITCH = re.compile(r"true|false|yes|no|on|off|none|[0-9]", re.IGNORECASE)
_PLAIN = re.compile(r"[A-Za-z]{1,7}|[+-]?[0-9.]{1,7}")
"""Numbers and short words, as in HF_HUB_DISABLE_IMPLICIT_TOKEN = "true" or MAX_TOKEN = "4096": no token or key is as
easily guessed, and to mask such a value wherever it is found would destroy what is stored. Of passwords that holds for
switches alone."""

# A token is often the user of an https address; ssh's user, and the one before an image's registry, is public.
_IN_ADDRESS = re.compile(r"https?://[^/@\s]+@|(?:[a-z][a-z0-9+.-]*://)?[^/@#\s]*:[^/@#\s]+@(?!sha256:)", re.IGNORECASE)


def shows_secret(address: str) -> bool:
    """Whether the address of a repository or an image carries a password or a token."""
    return _IN_ADDRESS.match(address.strip()) is not None


def looks_secret(text: str) -> bool:
    """Whether a text holds a token of a known form or an address with a password; `${NAME}` is neither."""
    return secrets.holds_secret(without_variables(text))


def names_secret(name: str, value: str) -> bool:
    """Whether an environment variable is named like a secret, and its value may be one."""
    plain = _PLAIN if name.upper().endswith(("TOKEN", "KEY")) else _SWITCH
    return bool(value and SECRET_NAME.search(name) and not plain.fullmatch(value))


def read_secret(value: str, path: KeyPath, findings: Findings, *, variable: str = "NAME") -> SecretRef | None:
    """A reference to the secret: `env:NAME`, `block:NAME`, `toml:FILE#KEY`, or a literal's own file and key.

    No message shows its value.

    Args:
        value: As it is written.
        path: Where.
        findings: Get the warning about a literal, and the problem of a reference to nothing, which is None.
        variable: The variable that usually holds such a secret.
    """
    value = value.strip()
    layer = findings.source.origin(path)
    if value.startswith(REFERENCE_PREFIXES):
        kind, _, name = value.partition(":")
        ref = SecretRef.model_validate({"source": kind, "name": name.strip()})
        is_token = secrets.holds_secret(ref.name) and not _BLOCK_NAME.fullmatch(ref.name)
        is_none = not all(ref.name.rpartition("#")) if ref.source == "toml" else is_token
        if not ref.name or is_none:
            findings.problem(
                path, f"is not a valid secret reference; write env:{variable}, block:NAME or toml:FILE#KEY"
            )
            return None
        if ref.source != "toml":
            return ref
        # For a process in any folder: the file is sought beside the document, then in the current folder.
        file, _, key = ref.name.rpartition("#")
        written = Path(os.path.expanduser(file))  # as it is for a user that is not known here
        beside = layer.document.path.parent / written
        found = next(filter(os.path.isfile, (beside, written)), beside)
        return ref.model_copy(update={"name": f"{found.absolute()}#{key}"})
    findings.warn(path, "the file contains a token; prefer env:NAME or block:NAME, or set only the variable")
    key = ".".join(map(str, (*layer.base, *path)))
    return SecretRef(source="toml", name=f"{layer.document.path.absolute()}#{key}")


CMD_ARGS = "cmd_args"

RENAMED: Mapping[str, str] = {"wandb_prj_name": "wandb_project_name", "wandb_exp_name": "wandb_experiment_name"}
"""Older spellings of CloudAI, with the key that replaced them."""

MOVED: Mapping[str, str] = {
    "time_limit": "time_limit of the test or of the scenario's entry",
    "custom_mounts": "extra_container_mounts of the test",
}
"""Older keys whose value has moved."""

# The only two families in CloudAI's files that differ from the letters that the name begins with.
_FAMILIES: Mapping[str, str] = {"gpt_oss": "gpt_oss", "qwen3_vl": "qwen_vl"}


@dataclass(frozen=True, slots=True)
class SweepChoice:
    """Which lists of a test are sweeps.

    Attributes:
        fields: Keys that take a list and are to sweep over it nevertheless.
        excluded: CloudAI's `dse_excluded_args`: paths, and everything below them, that never sweep.
        drawn: Keys that take a list, of which each point gets one value (CloudAI's `env_params`).
    """

    fields: Sequence[str] = ()
    excluded: Sequence[str] = ()
    drawn: Collection[str] = ()

    def excludes(self, field: str) -> bool:
        """Whether the key of `[cmd_args]` never sweeps."""
        path = f"{CMD_ARGS}.{field}"
        return any(path == prefix or path.startswith(f"{prefix}.") for prefix in map(str.strip, self.excluded))


class Arguments(Model):
    """The content of a `[cmd_args]` table."""

    values: dict[str, Any] = Field(default={})
    axes: tuple[SweepAxis, ...] = ()
    secrets: dict[str, SecretRef] = Field(default={})
    time_limit: str | None = None
    mounts: tuple[str, ...] = ()


def read_arguments(findings: Findings, choice: SweepChoice) -> Arguments:
    """Read the merged `[cmd_args]` of what `findings` are about; problems and warnings go there.

    A list is a sweep, unless the flag itself takes a list: then it is one value, and a list of lists is a sweep.
    """
    table = findings.source.table.get(CMD_ARGS)
    if not isinstance(table, Mapping):
        return Arguments()
    written = dict(table)
    time_limit = _moved_text(written, "time_limit", findings)
    mounts = _moved_text(written, "custom_mounts", findings)
    _use_current_names(written, findings)
    values: dict[str, Any] = {}
    axes: list[SweepAxis] = []
    secrets: dict[str, SecretRef] = {}
    for key, value in written.items():
        path = (CMD_ARGS, key)
        flag = TEST_FLAGS.get(key)
        if key in NO_EFFECT:
            findings.warn(path, NO_EFFECT[key])
        elif flag is None:
            findings.unknown(path, {*TEST_FLAGS, *NO_EFFECT})
        elif flag.secret:
            if ref := _secret(flag, value, path, findings):
                secrets[flag.secret] = ref
        elif isinstance(value, list) and _is_sweep(flag, value, choice):
            axes.extend(_axis(flag, value, path, choice, findings))
        else:
            _read_value(flag, value, path, values, choice, findings)
    _check_choice(choice, axes, findings)
    if "gpus_per_node" in values:
        findings.warn((CMD_ARGS, "gpus_per_node"), "belongs to the cluster's settings, which win where they have it")
    return Arguments(
        values=values,
        axes=tuple(axes),
        secrets=secrets,
        time_limit=time_limit,
        mounts=tuple(mount.strip() for mount in (mounts or "").split(",") if mount.strip()),
    )


def _moved_text(written: dict[str, Any], key: str, findings: Findings) -> str | None:
    if key not in written:
        return None
    value = written.pop(key)
    if not isinstance(value, str):
        findings.problem((CMD_ARGS, key), "must be text")
        return None
    is_twice = key in findings.source.table
    said = f"has no effect: {key} of the test is written, too" if is_twice else f"has moved; write it as {MOVED[key]}"
    findings.warn((CMD_ARGS, key), said)
    return value


def _use_current_names(written: dict[str, Any], findings: Findings) -> None:
    for old, new in RENAMED.items():
        if old in written:
            value = written.pop(old)
            findings.warn((CMD_ARGS, old), f"is an older spelling of {new}")
            if new in written:
                findings.problem((CMD_ARGS, old), f"is set together with {new}, which replaced it; keep one")
            written.setdefault(new, value)
    _use_recipe_name(written, findings)


def _use_recipe_name(written: dict[str, Any], findings: Findings) -> None:
    """`model_name = "llama3"` with `model_size = "8b"` is family llama, recipe llama3_8b."""
    if "model_name" not in written and "model_size" not in written:
        return
    key = "model_name" if "model_name" in written else "model_size"
    name, size = written.pop("model_name", None), written.pop("model_size", None)
    if not isinstance(name, str) or not isinstance(size, str) or not name.strip() or not size.strip():
        findings.problem((CMD_ARGS, key), "older spelling: model_name and model_size are both needed, as text")
        return
    name = name.strip()
    letters = re.match(r"[A-Za-z]*", name)
    family = _FAMILIES.get(name, letters[0] if letters else name)
    recipe = f"{name}_{size.strip()}"
    findings.warn(
        (CMD_ARGS, key),
        f"is an older spelling, taken as model_family_name = {family!r} and model_recipe_name = {recipe!r}",
    )
    written.setdefault("model_family_name", family)
    if (named := written.setdefault("model_recipe_name", recipe)) != recipe:
        findings.problem((CMD_ARGS, key), f"is set together with model_recipe_name = {named!r}; keep one of them")


def _secret(flag: Flag, value: object, path: KeyPath, findings: Findings) -> SecretRef | None:
    if not isinstance(value, str):
        findings.problem(path, "must be text: env:NAME, block:NAME or a token")
        return None
    # "" means the environment's value in CloudAI's files.
    return read_secret(value, path, findings, variable=str(flag.secret)) if value.strip() else None


def _is_sweep(flag: Flag, value: list[Any], choice: SweepChoice) -> bool:
    if flag.kind not in ("texts", "integers") or flag.field in choice.fields or flag.field in choice.drawn:
        return True
    return bool(value) and all(isinstance(item, list) for item in value)


def _axis(
    flag: Flag, written: list[Any], path: KeyPath, choice: SweepChoice, findings: Findings
) -> Iterator[SweepAxis]:
    """One axis, or the reason why there is none."""
    read, wants = _KINDS[flag.kind]
    if choice.excludes(flag.field):
        findings.problem(path, "is a list, and dse_excluded_args excludes it from sweeps; write one value")
        return
    values: dict[str, Any] = {}
    for item in written:
        try:
            value = read(item)
        except ValueError:
            findings.problem(path, f"must be {wants}, or a list of such to sweep over, not {_shortened(item)}")
            return
        if repr(value) in values:
            findings.warn(path, f"lists {_shortened(item)} twice; it runs once")
        else:
            values[repr(value)] = value
    if values:
        yield SweepAxis(field=f"{CMD_ARGS}.{flag.field}", values=tuple(values.values()))
    else:
        findings.problem(path, "is an empty list, a sweep over nothing; write a value or remove it")


def _check_choice(choice: SweepChoice, axes: Sequence[SweepAxis], findings: Findings) -> None:
    swept = {axis.name for axis in axes}
    for index, field in enumerate(choice.fields):
        path = ("sweep", "fields", index)
        if field not in TEST_FLAGS:
            findings.problem(path, f"{field!r} is not a key of [cmd_args]; {unknown_key(field, TEST_FLAGS)}")
        elif field not in swept:
            findings.problem(path, f"{field!r} is not a list in [cmd_args]; write its values there")
    for index, prefix in enumerate(choice.excluded):
        table, dot, key = prefix.strip().partition(".")
        known = {*TEST_FLAGS, *NO_EFFECT, *RENAMED, *MOVED}
        if table != CMD_ARGS or (dot and key.partition(".")[0] not in known):
            hint = meant(key or table, TEST_FLAGS)
            findings.warn(
                ("dse_excluded_args", index),
                f"{prefix!r} has no effect: it names no key of [cmd_args], as cmd_args.tp does{hint}",
            )


def _read_value(
    flag: Flag, value: object, path: KeyPath, values: dict[str, Any], choice: SweepChoice, findings: Findings
) -> None:
    read, wants = _KINDS[flag.kind]
    try:
        values[flag.field] = read(value)
    except ValueError:
        findings.problem(path, f"must be {wants}, not {_shortened(value)}")
        return
    if isinstance(value, list) and not choice.excludes(flag.field):
        findings.warn(path, "is one value, a list; CloudAI would sweep over it (add it to sweep.fields to do the same)")


def _shortened(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


def _listed(value: object) -> object:
    """Make a list of a text that separates by commas, and of a single value."""
    if isinstance(value, str):
        return value.split(",") if value.strip() else []
    return value if isinstance(value, list) else [value]


_Text = Annotated[str, StringConstraints(strip_whitespace=True)]
_Integer = Annotated[Whole, Field(ge=-(2**63), le=2**63)]
# pydantic's own reading, as CloudAI has it: also 1 and 0, "yes" and "no", "on" and "off".
_Boolean = Annotated[bool, BeforeValidator(lambda value: value.strip() if isinstance(value, str) else value)]

_TYPES: dict[FlagKind, tuple[Any, str]] = {
    "text": (_Text, "text"),
    "integer": (_Integer, "a whole number"),
    "number": (Finite, "a finite number"),
    "boolean": (_Boolean, "true or false"),
    "texts": (_Text | list[_Text], "text or a list of texts"),
    "integers": (Annotated[list[_Integer], BeforeValidator(_listed)], "a whole number or a list of them"),
    "integer_or_none": (Literal["None"] | _Integer, 'a whole number or "None"'),
    "text_or_none": (_Text, "text"),
}
_KINDS: Mapping[FlagKind, tuple[Callable[[object], Any], str]] = {
    kind: (TypeAdapter(type_).validate_python, words) for kind, (type_, words) in _TYPES.items()
}
"""What a value must be: a reader that raises ValueError, and the words for it."""


_GRIDS = frozenset({"encoder", "language_model"})


def read_hetero_arguments(findings: Findings) -> Arguments:
    """Read the merged `[cmd_args]` of a heterogeneous-parallel test, which `findings` are about; problems go there.

    A list where one value is expected is a sweep; a grid is swept over by one test per topology.
    """
    table = findings.source.table.get(CMD_ARGS)
    if not isinstance(table, Mapping):
        return Arguments()
    swept = {key: values for key, values in table.items() if isinstance(values, list)}
    wrong = dict.fromkeys(_GRIDS & swept.keys(), "is a list, and grids are not swept over; write a test for each")
    empty = (key for key, values in swept.items() if not values)
    wrong |= dict.fromkeys(empty, "is an empty list, a sweep over nothing; write a value or remove it")
    for key in filter(wrong.get, swept):
        findings.problem((CMD_ARGS, key), wrong[key])
    if wrong:
        return Arguments()
    first = {**table, **{key: values[0] for key, values in swept.items()}}
    kept = _read(first, findings)
    points = {key: [_read({**first, key: value}, findings) for value in values] for key, values in swept.items()}
    if kept is None or any(None in read for read in points.values()):
        return Arguments()
    taken = {key: dict.fromkeys(point[key] for point in read if point) for key, read in points.items()}
    axes = tuple(SweepAxis(field=f"{CMD_ARGS}.{key}", values=tuple(values)) for key, values in taken.items())
    return Arguments(values={key: value for key, value in kept.items() if key not in swept}, axes=axes)


def _read(table: Mapping[str, Any], findings: Findings) -> dict[str, Any] | None:
    read = validated(HeteroArguments, table, findings, base=(CMD_ARGS,))
    return None if read is None else read.model_dump(exclude_unset=True, exclude_none=True)
