"""The configuration classes of a Megatron-Bridge checkout, read as source and never imported.

An override such as `train.train_iters=50` names a field of a dataclass: of Megatron-Bridge, or of Megatron-Core, which
is a submodule and whose classes Megatron-Bridge extends. Importing them would need torch; here they are read with
`ast`: fields with their annotations, bases, enumerations, and aliases of types.
"""

import ast
import json
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from nightbridge.launch import syntax_tree
from nightbridge.launch.config_schema import ANY, CONTAINER, ConfigClass, ConfigSchema, released_schema
from nightbridge.launch.versions import Version

_CONTAINER_MODULE, _CONTAINER_NAME = CONTAINER.split(":")
_SOURCE = Path("src")
_MEGATRON_LM = Path("3rdparty/Megatron-LM")

_SUBCLASSES_IN = ("models", "data", "peft", "training")
"""Packages of megatron.bridge in which a section's class may have subclasses, which recipes use in its place."""

_SUBCLASS_FILES = re.compile(r"^class \w+\(.*(?:Config|Provider|PEFT)\b", re.MULTILINE)
_WITHOUT_FIELDS = frozenset({"ABC", "Generic", "Protocol", "object", "Enum", "str", "int"})
_ENUMS = frozenset({"Enum", "IntEnum", "StrEnum"})
_KEPT = frozenset({"int", "float", "bool", "str", "list", "dict", "None"})
_SPELLINGS = {
    **dict.fromkeys(("List", "tuple", "Tuple", "Sequence", "Iterable", "set", "Set"), "list"),
    **dict.fromkeys(("Dict", "Mapping", "MutableMapping", "DictConfig"), "dict"),
    **dict.fromkeys(("Path", "PathLike"), "str"),
}
"""What the container types of an annotation are once OmegaConf has read the value."""


class Module:
    """One module: the classes and functions that it defines, what it imports, and its aliases of types."""

    def __init__(self, name: str, path: Path) -> None:
        self.name = name
        self.package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        self.classes: dict[str, ast.ClassDef] = {}
        self.functions: dict[str, ast.FunctionDef] = {}
        self.imports: dict[str, tuple[str, str]] = {}
        self.stars: list[str] = []
        self.aliases: dict[str, ast.expr] = {}
        self.tree = syntax_tree(path.read_text(encoding="utf-8", errors="replace"))
        for statement in _statements(self.tree.body):
            self.read(statement)

    def read(self, statement: ast.stmt) -> None:
        """Take a statement's names into the module's."""
        if isinstance(statement, ast.ClassDef):
            self.classes[statement.name] = statement
        elif isinstance(statement, ast.FunctionDef):
            self.functions[statement.name] = statement
        elif isinstance(statement, ast.ImportFrom):
            parents = self.package.split(".")[: len(self.package.split(".")) - statement.level + 1]
            source = ".".join([*parents, *filter(None, [statement.module])]) if statement.level else statement.module
            for alias in statement.names:
                if alias.name == "*":
                    self.stars.append(source or "")
                else:
                    self.imports[alias.asname or alias.name] = (source or "", alias.name)
        elif isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            self.aliases[statement.targets[0].id] = statement.value


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a module, those below `try` and `if` among them."""
    for statement in body:
        yield statement
        if isinstance(statement, ast.Try | ast.If):
            yield from _statements([*statement.body, *statement.orelse])


Definition = ast.ClassDef | ast.FunctionDef | ast.expr


class ClassReader:
    """Reads classes and the classes that their fields lead to, without importing them.

    Args:
        checkout: Root of a checkout.
        roots: Folders below it in which packages lie.
        others: Classes for the modules that the checkout lacks, as a submodule's that was not fetched.
    """

    def __init__(
        self,
        checkout: Path,
        roots: tuple[Path, ...] = (_SOURCE, _MEGATRON_LM),
        others: Mapping[str, ConfigClass] | None = None,
    ) -> None:
        self._checkout = checkout
        self._roots = roots
        self._others = others or {}
        self._modules: dict[str, Module | None] = {}
        self.classes: dict[str, ConfigClass] = {}

    def module(self, name: str) -> Module | None:
        """A module by its name; None where the checkout has none that can be read."""
        if name not in self._modules:
            self._modules[name] = None  # an import circle ends here
            path = self._path(name)
            with suppress(OSError, SyntaxError, ValueError):
                self._modules[name] = Module(name, path) if path else None
        return self._modules[name]

    def _path(self, name: str) -> Path | None:
        for root in self._roots:
            below = self._checkout / root / name.replace(".", "/")
            for path in (below.with_name(f"{below.name}.py"), below / "__init__.py"):
                if path.is_file():
                    return path
        return None

    def find(self, module: Module, name: str, depth: int = 0) -> tuple[Module, Definition] | None:
        """Where a name is defined: a class, a function, or the expression that it is an alias of."""
        if depth > 12:
            return None
        if name in module.classes or name in module.functions:
            return module, module.classes.get(name) or module.functions[name]
        if name in module.imports:
            source, original = module.imports[name]
            found = self.module(source)
            return self.find(found, original, depth + 1) if found else None
        if name in module.aliases:
            return module, module.aliases[name]
        for star in module.stars:
            if (found := self.module(star)) and (result := self.find(found, name, depth + 1)):
                return result
        return None

    def _borrowed(self, module: Module, name: str, depth: int = 0) -> str | None:
        """The qualified name of a class of another commit that stands for one whose module the checkout lacks."""
        if name not in module.imports or depth > 12:
            return None
        source, original = module.imports[name]
        if inner := self.module(source):
            return self._borrowed(inner, original, depth + 1)
        # A package hands on what its modules define.
        known = (other for other in self._others if other.endswith(f":{original}"))
        found = next((other for other in known if other.startswith((f"{source}:", f"{source}."))), None)
        if found is not None:
            self._borrow(found)
        return found

    def _borrow(self, qualified: str) -> None:
        if qualified in self._others and qualified not in self.classes:
            definition = self.classes[qualified] = self._others[qualified]
            types = (kind for annotation in definition.fields.values() for kind in annotation.split(" | "))
            for name in (*definition.bases, *types):
                self._borrow(name)

    def add(self, module: Module, definition: ast.ClassDef) -> str:
        """Read a class, its bases, and the classes that its fields lead to; returns its qualified name."""
        qualified = f"{module.name}:{definition.name}"
        if qualified in self.classes:
            return qualified
        self.classes[qualified] = ConfigClass()  # a class may lead to itself
        bases, is_open = [], False
        for base in definition.bases:
            expression = base.value if isinstance(base, ast.Subscript) else base
            name = expression.id if isinstance(expression, ast.Name) else getattr(expression, "attr", "")
            found = self.find(module, name) if isinstance(expression, ast.Name) else None
            if found and isinstance(found[1], ast.ClassDef):
                bases.append(self.add(found[0], found[1]))
            elif name in _ENUMS:
                words = (each.targets[0] for each in definition.body if isinstance(each, ast.Assign))
                members = tuple(word.id for word in words if isinstance(word, ast.Name))
                self.classes[qualified] = ConfigClass(members=members)
                return qualified
            elif borrowed := self._borrowed(module, name):
                bases.append(borrowed)
            elif name not in _WITHOUT_FIELDS:
                is_open = True
        fields = {name: self.type_of(module, field) for name, field in fields_of(definition)}
        defaults = dict(_literal_defaults(definition))
        self.classes[qualified] = ConfigClass(bases=tuple(bases), fields=fields, open=is_open, defaults=defaults)
        return qualified

    def type_of(self, module: Module, field: ast.AnnAssign) -> str:
        """A field's annotation in the form of `ConfigClass.fields`; many fields are None by default all the same."""
        parts = dict.fromkeys(self._alternatives(module, field.annotation, 0))
        if default_is(None, field):
            parts["None"] = None
        return ANY if ANY in parts else " | ".join(parts)

    def _alternatives(self, module: Module, node: ast.expr, depth: int) -> Iterator[str]:
        if isinstance(node, ast.Constant):
            yield from self._constant(module, node, depth)
        elif isinstance(node, ast.BinOp):
            yield from self._alternatives(module, node.left, depth)
            yield from self._alternatives(module, node.right, depth)
        elif isinstance(node, ast.Subscript):
            yield from self._subscript(module, node, depth)
        elif isinstance(node, ast.Name):
            yield from self._name(module, node.id, depth)
        elif isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.dtype":
            yield "dtype"
        elif isinstance(node, ast.Attribute):
            yield from self._name(module, node.attr, depth) if node.attr in _SPELLINGS else (ANY,)
        else:
            yield ANY

    def _constant(self, module: Module, node: ast.Constant, depth: int) -> Iterator[str]:
        if not isinstance(node.value, str):
            yield "None" if node.value is None else ANY
            return
        try:
            expression = syntax_tree(node.value, "eval").body
        except SyntaxError:
            yield ANY
        else:
            yield from self._alternatives(module, expression, depth)

    def _subscript(self, module: Module, node: ast.Subscript, depth: int) -> Iterator[str]:
        name = node.value.id if isinstance(node.value, ast.Name) else getattr(node.value, "attr", "")
        inner = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        if name == "Literal":
            yield from (repr(item.value) if isinstance(item, ast.Constant) else ANY for item in inner)
        elif name in ("Optional", "Union", "Annotated"):
            for item in inner[:1] if name == "Annotated" else inner:
                yield from self._alternatives(module, item, depth)
            if name == "Optional":
                yield "None"
        elif name != "ClassVar":
            yield from self._name(module, name, depth)

    def _name(self, module: Module, name: str, depth: int) -> Iterator[str]:
        found = self.find(module, name) if depth < 8 else None
        if found is None:
            spelling = _SPELLINGS.get(name, name)
            yield spelling if spelling in _KEPT else self._borrowed(module, name) or ANY
        elif isinstance(found[1], ast.ClassDef):
            yield self.add(found[0], found[1]) if _is_configuration(found[1]) else ANY
        elif isinstance(found[1], ast.FunctionDef):
            yield ANY
        else:
            yield from self._alternatives(found[0], found[1], depth + 1)

    def add_subclasses(self) -> None:
        """Read every class of Megatron-Bridge that extends one that was read: a recipe may use it in its place."""
        root = self._checkout / _SOURCE / "megatron" / "bridge"
        for package in _SUBCLASSES_IN:
            for path in sorted((root / package).rglob("*.py")):
                text = path.read_text(encoding="utf-8", errors="replace")
                if "@dataclass" in text and _SUBCLASS_FILES.search(text):
                    name = ".".join(path.relative_to(self._checkout / _SOURCE).with_suffix("").parts)
                    if module := self.module(name.removesuffix(".__init__")):
                        for definition in module.classes.values():
                            if self._extends(module, definition):
                                self.add(module, definition)

    def _extends(self, module: Module, definition: ast.ClassDef, depth: int = 0) -> bool:
        """Whether a class extends one that was read, at any distance."""
        names = [base.id for base in definition.bases if isinstance(base, ast.Name)]
        for found in (self.find(module, name) for name in names if depth < 12):
            if found and isinstance(found[1], ast.ClassDef):
                is_read = f"{found[0].name}:{found[1].name}" in self.classes
                if is_read or self._extends(found[0], found[1], depth + 1):
                    return True
        return False


def _is_configuration(definition: ast.ClassDef) -> bool:
    """Whether a value of this class is a table of fields or a word of an enumeration; other objects are opaque."""
    dataclass = any("dataclass" in ast.unparse(decorator) for decorator in definition.decorator_list)
    return dataclass or any(ast.unparse(base).rsplit(".", 1)[-1] in _ENUMS for base in definition.bases)


def fields_of(definition: ast.ClassDef) -> Iterator[tuple[str, ast.AnnAssign]]:
    """A class's own fields, each with the statement that declares it."""
    for statement in definition.body:
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        if "ClassVar" not in ast.unparse(statement.annotation) and not statement.target.id.startswith("_"):
            yield statement.target.id, statement


def keywords_of(node: ast.expr | None) -> dict[str, ast.expr]:
    """The keyword arguments of a call; none of anything else."""
    return {each.arg: each.value for each in node.keywords if each.arg} if isinstance(node, ast.Call) else {}


def _default(field: ast.AnnAssign) -> ast.expr | None:
    """The expression of a field's default: `= VALUE`, or `= field(default=VALUE)`."""
    return keywords_of(field.value).get("default") if isinstance(field.value, ast.Call) else field.value


def default_is(constant: object, field: ast.AnnAssign) -> bool:
    """Whether a field's default is written as this constant."""
    default = _default(field)
    return isinstance(default, ast.Constant) and default.value is constant


def _literal_defaults(definition: ast.ClassDef) -> Iterator[tuple[str, bool | int | float | str | None]]:
    for name, field in fields_of(definition):
        with suppress(ValueError):
            value = ast.literal_eval(_default(field) or ast.Name("computed"))
            if value is None or isinstance(value, bool | int | float | str):
                yield name, value


def read_schema(checkout: Path, version: Version | None = None) -> ConfigSchema | None:
    """Read the configuration classes of a Megatron-Bridge checkout, its submodule Megatron-LM included.

    Args:
        checkout: The checkout's root.
        version: Whose shipped classes stand for those of a submodule that was not fetched; None for no others.

    Returns:
        The schema; None where the checkout has no `ConfigContainer`. A class that extends one which is not in the
        checkout (a submodule that was not fetched, another package) is `open`: names that it does not have may exist.
    """
    others = released_schema(version) if version else None
    reader = ClassReader(checkout, others=others.classes if others else None)
    module = reader.module(_CONTAINER_MODULE)
    if module is None or _CONTAINER_NAME not in module.classes:
        return None
    reader.add(module, module.classes[_CONTAINER_NAME])
    reader.add_subclasses()
    return ConfigSchema(classes=reader.classes)


# python -m nightbridge.launch.config_source CHECKOUT COMMIT > .../config_schemas/vX.Y.Z.json
if __name__ == "__main__":
    found = read_schema(Path(sys.argv[1]))
    if found is None:
        sys.exit(f"{sys.argv[1]} holds no {CONTAINER}")
    lines = (
        f"{json.dumps(name)}: {definition.model_dump_json(exclude={'defaults'}, exclude_defaults=True)}"
        for name, definition in sorted(found.classes.items())
    )
    sys.stdout.write(f'{{"commit": "{sys.argv[2]}", "classes": {{\n' + ",\n".join(lines) + "\n}}\n")
