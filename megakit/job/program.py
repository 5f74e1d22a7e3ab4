"""Computes a digest of each function, class and constant that a script's result depends on.

The source is parsed and not imported, so that scripts start quickly. The digests cover the code
that the arguments of `run_script(...)` refer to by name, directly or indirectly, in the modules of
the script's project. Comments, docstrings, formatting and the order of definitions do not change a
digest. All Python versions compute the same digests.
"""

import ast
import hashlib
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

#: The library's code has no digests: checkpoints record the library's version.
LIBRARY = "megakit"
#: Methods of options classes without a digest: their results are compared or reported to the user.
CHECKS = {"problems", "resolve_dataset", "adapt", "choice"}
#: Fields of a syntax tree that do not affect the computation.
SILENT = {"ctx", "kind", "type_comment"}
#: Length of a shortened digest: enough to distinguish versions of one function.
DIGEST_LETTERS = 16

Imports = dict[str, list[str]]


@dataclass
class Module:
    """A parsed module of the project.

    Attributes:
        name: The module's dotted name.
        definitions: Top-level statements that bind a name, by name.
        imports: Full dotted names of imported objects, by the name that an import binds at the
            top level or inside a function.
        loose: Top-level statements that bind no name; they run on import.
        runs: Calls of `run_script`.
    """

    name: str
    definitions: dict[str, list[ast.stmt]] = field(default_factory=dict)
    imports: Imports = field(default_factory=dict)
    loose: list[ast.stmt] = field(default_factory=list)
    runs: list[ast.Call] = field(default_factory=list)


def code_of(script: Path) -> dict[str, str]:
    """Returns digests of the code that decides what a script computes, by name.

    Each member of a class has its own digest (`Config.width`). Top-level statements that bind no
    name share a digest under the module's name. Only the values of options count, so fields of the
    options class are left out.

    Args:
        script: A file that calls `run_script(stage, OptionsClass, work)`.
    """
    program = _Program(_root_of(script), [str(script.parent), *sys.path])
    main = program.read(script, script.stem)
    for call in main.runs:
        arguments = [*call.args, *(keyword.value for keyword in call.keywords)]
        for argument in arguments[1:]:  # the first is the stage; its fields are compared
            program.mark_options(main, argument)
        for argument in arguments[1:]:
            program.follow(main, argument)
    return {name: _digest(sorted(parts)) for name, parts in sorted(program.parts.items())}


class _Program:
    """Collects the code that a script refers to by name, directly or indirectly."""

    def __init__(self, root: Path, path: list[str]) -> None:
        self.root, self.path = root, path
        self.parts: dict[str, list[str]] = {}
        self.modules: dict[str, Module | None] = {}
        self.reached: set[tuple[str, str]] = set()
        self.options: set[int] = set()  # `id` of the syntax node of each options class

    def read(self, file: Path, name: str) -> Module:
        """Parses a module, and adds the statements that run when it is imported."""
        self.modules[name] = module = _parse(file, name)
        for statement in module.loose:
            self._add(module, name, statement)
        return module

    def mark_options(self, module: Module, expression: ast.AST) -> None:
        """Marks the class that an expression names, and its bases, as options classes."""
        for chain in _names(expression):
            for owner, name in self._resolve(module, chain):
                for node in owner.definitions.get(name, ()):
                    if isinstance(node, ast.ClassDef) and id(node) not in self.options:
                        self.options.add(id(node))
                        for base in node.bases:
                            self.mark_options(owner, base)

    def follow(self, module: Module, node: ast.AST) -> list[str]:
        """Adds the project code that a node uses; returns the foreign names that it uses."""
        foreign = set()
        for chain in _names(node):
            for target in module.imports.get(chain[0], ()):
                if self._find_longest(target) is None:
                    foreign.add(f"{chain[0]} = {target}")
            for owner, name in self._resolve(module, chain):
                self._reach(owner, name)
        return sorted(foreign)

    def _resolve(self, module: Module, chain: list[str]) -> Iterator[tuple[Module, str]]:
        """Yields the modules and names in the project that a dotted name refers to."""
        if chain[0] in module.definitions:
            yield module, chain[0]
        for target in module.imports.get(chain[0], ()):
            if (found := self._find_longest(".".join([target, *chain[1:]]))) is None:
                continue
            owner, rest = found
            if rest and rest[0] in owner.definitions.keys() | owner.imports.keys():
                yield from self._resolve(owner, rest)
            else:  # the module itself is used, so every definition in it counts
                for name in owner.definitions:
                    yield owner, name

    def _reach(self, module: Module, name: str) -> None:
        if (module.name, name) in self.reached:
            return
        self.reached.add((module.name, name))
        for statement in module.definitions[name]:
            if isinstance(statement, ast.ClassDef):
                self._reach_class(module, statement)
            else:
                self._add(module, name, statement)

    def _reach_class(self, module: Module, node: ast.ClassDef) -> None:
        is_options = id(node) in self.options
        if is_options:
            for base in node.bases:
                self.follow(module, base)
        else:
            self._add(module, node.name, *node.decorator_list, *node.bases, *node.keywords)
        for member in node.body:
            name = next(_bound(member), None)
            if is_options and (name in CHECKS or isinstance(member, ast.AnnAssign)):
                continue
            if not _is_silent(member):
                self._add(module, f"{node.name}.{name}" if name else node.name, member)

    def _add(self, module: Module, name: str, *nodes: ast.AST) -> None:
        foreign = [one for node in nodes for one in self.follow(module, node)]
        content = json.dumps([[_plain(node) for node in nodes], sorted(foreign)])
        self.parts.setdefault(name, []).append(content)

    def _find_longest(self, dotted: str) -> tuple[Module, list[str]] | None:
        """Returns the project's module that a dotted name begins with, and the rest of the name."""
        parts = dotted.split(".")
        for length in range(len(parts), 0, -1):
            if (module := self._find(".".join(parts[:length]))) is not None:
                return module, parts[length:]
        return None

    def _find(self, name: str) -> Module | None:
        if name not in self.modules:
            self.modules[name] = None
            if (file := _find_file(name, self.root, self.path)) is not None:
                return self.read(file, name)
        return self.modules[name]


def _parse(file: Path, name: str) -> Module:
    tree = ast.parse(file.read_bytes(), str(file))
    package = name if file.name == "__init__.py" else name.rpartition(".")[0]
    module = Module(name)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            for bound, target in _imported(node, package):
                module.imports.setdefault(bound, []).append(target)
        elif isinstance(node, ast.Call) and _called(node) == "run_script":
            module.runs.append(node)
    for statement in tree.body:
        names = set(_bound(statement))
        for bound in names:
            module.definitions.setdefault(bound, []).append(statement)
        if not names and not _is_silent(statement):
            module.loose.append(statement)
    return module


def _root_of(script: Path) -> Path:
    """Returns the nearest folder above a script with a pyproject.toml, else the script's folder."""
    above = script.resolve().parents
    return next((folder for folder in above if (folder / "pyproject.toml").is_file()), above[0])


def _find_file(name: str, root: Path, path: list[str]) -> Path | None:
    """Returns the file of a module; None if the module is not part of the project."""
    searched: list[str] | None = path
    found, parts = None, name.split(".")
    if parts[0] == LIBRARY or parts[0] in sys.stdlib_module_names:
        return None
    for length in range(1, len(parts) + 1):
        spec = PathFinder.find_spec(".".join(parts[:length]), searched)
        if spec is None:
            return None
        found, searched = spec.origin, spec.submodule_search_locations
        if length < len(parts) and searched is None:
            return None
    if not found or not found.endswith(".py"):
        return None
    file = Path(found).resolve()
    return file if file.is_relative_to(root) and "site-packages" not in file.parts else None


def _imported(node: ast.Import | ast.ImportFrom, package: str) -> Iterator[tuple[str, str]]:
    """Yields each name that an import binds, with the full name of the imported object."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield (
                (alias.asname, alias.name)
                if alias.asname
                else (
                    (top := alias.name.partition(".")[0]),
                    top,
                )
            )
        return
    above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
    base = ".".join([*above, *([node.module] if node.module else [])])
    for alias in node.names:
        yield alias.asname or alias.name, f"{base}.{alias.name}"


def _bound(statement: ast.stmt) -> Iterator[str]:
    """Yields the names that a statement binds, also inside an `if`, `try`, `with` or loop."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield statement.name
        return
    if _is_main_guard(statement):
        return
    for node in ast.iter_child_nodes(statement):
        if isinstance(node, ast.stmt):
            yield from _bound(node)
        elif isinstance(node, ast.ExceptHandler):
            for inner in node.body:
                yield from _bound(inner)
        elif not isinstance(statement, ast.Expr):
            for name in ast.walk(node):
                if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store):
                    yield name.id


def _is_silent(statement: ast.stmt) -> bool:
    """Returns whether a statement has no digest, such as a docstring, import or main guard."""
    if isinstance(statement, ast.Import | ast.ImportFrom) or _is_idle(statement):
        return True
    if isinstance(statement, ast.If):
        inner = [*statement.body, *statement.orelse]
        return _is_main_guard(statement) or all(map(_is_silent, inner))
    return False


def _is_main_guard(statement: ast.stmt) -> bool:
    if not isinstance(statement, ast.If) or not isinstance(statement.test, ast.Compare):
        return False
    left = statement.test.left
    return isinstance(left, ast.Name) and left.id == "__name__"


def _called(call: ast.Call) -> str | None:
    function = call.func
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else None


def _names(node: ast.AST) -> Iterator[list[str]]:
    """Yields the dotted names below a node, `nn.functional.mse_loss` as a list of three parts."""
    parts: list[str] = []
    inner: ast.AST = node
    while isinstance(inner, ast.Attribute):
        parts.append(inner.attr)
        inner = inner.value
    if isinstance(inner, ast.Name):
        yield [inner.id, *reversed(parts)]
        return
    for child in ast.iter_child_nodes(inner):
        yield from _names(child)


def _plain(node: Any) -> Any:
    """Returns a syntax tree as lists, dictionaries and strings, the same in all Python versions."""
    if isinstance(node, list):
        return [_plain(item) for item in node if not _is_idle(item)]
    if not isinstance(node, ast.AST):
        return node if isinstance(node, str) else repr(node)
    fields = {name: value for name, value in ast.iter_fields(node) if name not in SILENT}
    if isinstance(node, ast.Constant):
        return ["Constant", type(node.value).__name__, _plain(node.value)]
    if isinstance(node, ast.JoinedStr):  # Python versions split the text between values differently
        fields["values"] = _join(node.values)
    plain = {name: _plain(value) for name, value in fields.items() if value is not None}
    return [type(node).__name__, {name: value for name, value in plain.items() if value != []}]


def _is_idle(node: Any) -> bool:
    """Returns whether a node is `pass` or a statement of one constant, such as a docstring."""
    is_constant = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return is_constant or isinstance(node, ast.Pass)


def _join(values: list[ast.expr]) -> list[ast.expr]:
    joined: list[ast.expr] = []
    for value in values:
        before = joined[-1] if joined else None
        if isinstance(value, ast.Constant) and isinstance(before, ast.Constant):
            joined[-1] = ast.Constant(str(before.value) + str(value.value))
        elif not isinstance(value, ast.Constant) or value.value:
            joined.append(value)
    return joined


def _digest(parts: list[str]) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:DIGEST_LETTERS]
