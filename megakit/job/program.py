"""Computes digests of the code that decides what a script computes, one for each name.

The source is parsed and not imported, so a start stays fast. The code that counts is reachable by
name from the script's call `run_script(...)`, through the modules of the script's project.
Comments, docstrings, formatting, annotations of functions and the order of functions do not count.
All supported Python versions compute the same digests.
"""

import ast
import hashlib
import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, groupby, takewhile
from pathlib import Path
from typing import Any

#: Its version is recorded in the checkpoints instead.
LIBRARY = "megakit"
#: Members of options classes whose values are compared or shown to the user.
CHECKS = {"problems", "resolve_dataset", "adapt", "choice", "harmless", "model_sizes"}
#: Fields of a syntax tree that do not change what the code computes.
IGNORED_FIELDS = {"kind", "type_comment"}
#: Names of the code that the script runs outside of functions and classes.
TOP_LEVEL, MAIN_BLOCK = "top level of the script", "main block of the script"
DIGEST_LETTERS = 16

MAIN_GUARDS = ("__name__ == '__main__'", "'__main__' == __name__")

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
ImportNode = ast.Import | ast.ImportFrom
#: Fields of a statement that contain statements.
BLOCKS = ("body", "orelse", "finalbody")


@dataclass
class Module:
    """A parsed module of the project.

    Attributes:
        name: The dotted name.
        definitions: The statements that assign a name, by name.
        imports: The full dotted names that an imported name may stand for. The name `*` stands for
            the modules of which all names are imported.
        loaded: The full dotted names that the module imports when it is imported itself.
        on_import: The statements that run on import and are no plain definitions.
        main_block: The statements below `if __name__ == "__main__"`.
    """

    name: str
    definitions: dict[str, list[ast.stmt]] = field(default_factory=dict)
    imports: dict[str, list[str]] = field(default_factory=dict)
    loaded: list[str] = field(default_factory=list)
    on_import: list[ast.stmt] = field(default_factory=list)
    main_block: list[ast.stmt] = field(default_factory=list)


def code_of(script: Path) -> dict[str, str]:
    """Returns digests of the code that decides what a script computes, by name.

    Members of a class have their own names (`Config.width`). A name that several modules define is
    followed by its module (`scale in transforms`). Options count by their values, so the fields of
    the options class are left out.

    Args:
        script: A file with a call `run_script(stage, OptionsClass, work)`.
    """
    program = _Program(script)
    program.follow_script(script)
    digests = {}
    for name, by_module in program.parts.items():
        for module, parts in by_module.items():
            key = name if len(by_module) == 1 else f"{name} in {module}"
            digests[key] = _digest([json.dumps(parts)])
    return dict(sorted(digests.items()))


class _Program:
    """Collects the parts of the code that are reachable from a script.

    Attributes:
        parts: The collected parts, by name and by module.
        modules: The parsed modules by dotted name; None for a module outside of the project.
        options: The options class, and its base classes in the project.
    """

    def __init__(self, script: Path) -> None:
        root = _root_of(script)
        folders = [script.resolve().parent, *(Path(entry).resolve() for entry in sys.path)]
        self.folders = [f for f in dict.fromkeys(folders) if f.is_relative_to(root)]
        self.parts: dict[str, dict[str, list[str]]] = {}
        self.modules: dict[str, Module | None] = {}
        self.reached: set[tuple[str, str]] = set()
        self.waiting: list[tuple[Module, str]] = []  # reached, and not collected yet
        self.options: set[ast.AST] = set()

    def follow_script(self, script: Path) -> None:
        """Collects all code that is reachable from the calls of `run_script` in a script."""
        packages = takewhile(lambda f: (f / "__init__.py").is_file(), script.resolve().parents)
        package = ".".join(reversed([folder.name for folder in packages]))
        main = self._read(script, script.stem, package, TOP_LEVEL)
        statements = chain(main.main_block, main.on_import, *main.definitions.values())
        nodes = [node for statement in statements for node in ast.walk(statement)]
        calls = [node for node in nodes if isinstance(node, ast.Call) and _runs(main, node)]
        arguments = [_arguments_of(call) for call in calls]
        for options, *_ in arguments:
            self._mark_options(main, options)
        if calls:
            others = [s for s in main.main_block if {*calls}.isdisjoint(ast.walk(s))]
            self._add(main, MAIN_BLOCK, *others, *chain(*arguments))
        while self.waiting:
            module, name = self.waiting.pop()
            for node in module.definitions[name]:
                if isinstance(node, ast.ClassDef):
                    self._add_class(module, node)
                else:
                    self._add(module, name, node)

    def _read(self, file: Path, name: str, package: str, label: str) -> Module:
        """Parses a module, and collects what its import runs."""
        self.modules[name] = module = _parse(file, name, package)
        for target in module.loaded:
            self._find_longest(target)
        for statement in module.on_import:
            self._add(module, label, statement)
        for node in [*chain(*module.definitions.values())]:
            for decorator in getattr(node, "decorator_list", []):
                # A decorator of the project may register what it decorates.
                if any(self._resolve(module, dotted) for dotted in _names(decorator)):
                    self._reach(module, node.name)  # type: ignore[attr-defined]
        return module

    def _mark_options(self, module: Module, expression: ast.AST) -> None:
        for dotted in _names(expression):
            for owner, name in self._resolve(module, dotted):
                for node in owner.definitions[name]:
                    if isinstance(node, ast.ClassDef) and node not in self.options:
                        self.options.add(node)
                        for base in node.bases:
                            self._mark_options(owner, base)

    def _reach(self, module: Module, name: str) -> None:
        if (module.name, name) not in self.reached:
            self.reached.add((module.name, name))
            self.waiting.append((module, name))

    def _add_class(self, module: Module, node: ast.ClassDef) -> None:
        is_options = node in self.options
        if is_options:
            self._follow(module, node.bases)
        else:
            # The order of fields decides what positional arguments mean.
            fields = [member for member in node.body if not _is_function(member)]
            members = [name for member in fields for name in _bound(member)]
            self._add(module, node.name, *node.decorator_list, *node.bases, *node.keywords)
            self.parts[node.name][module.name].append(json.dumps(members))
        for member in node.body:
            name = next(_bound(member), None)
            if is_options and _is_field(member):
                self._follow(module, [member.annotation])  # type: ignore[attr-defined]
            elif not (is_options and name in CHECKS) and not _is_idle(member):
                self._add(module, f"{node.name}.{name}" if name else node.name, member)

    def _add(self, module: Module, name: str, *nodes: ast.AST) -> None:
        """Collects nodes under a name, and what the nodes use."""
        content = json.dumps([[*map(_flatten, nodes)], self._follow(module, nodes)])
        self.parts.setdefault(name, {}).setdefault(module.name, []).append(content)

    def _follow(self, module: Module, nodes: Iterable[ast.AST]) -> list[str]:
        """Collects what nodes use; returns the imported names whose meaning is not their name."""
        bindings = set()
        for dotted in chain.from_iterable(map(_names, nodes)):
            for target in module.imports.get(dotted[0], ()):
                is_foreign = self._find_longest(target) is None
                if is_foreign and target.partition(".")[0] != LIBRARY:
                    bindings.add(f"{dotted[0]} = {target}")
                elif target.rpartition(".")[2] != dotted[0]:
                    bindings.add(f"{dotted[0]} = {target.rpartition('.')[2]}")
            for owner, name in self._resolve(module, dotted):
                self._reach(owner, name)
        return sorted(bindings)

    def _resolve(self, module: Module, dotted: list[str]) -> list[tuple[Module, str]]:
        """Returns the definitions in the project that a dotted name may stand for."""
        found: list[tuple[Module, str]] = []
        seen: set[tuple[str, str]] = set()
        waiting = [(module, dotted)]
        while waiting:
            owner, (name, *rest) = waiting.pop()
            if (owner.name, name) in seen:
                continue
            seen.add((owner.name, name))
            if name in owner.definitions:
                found.append((owner, name))
                continue
            targets = [".".join([target, *rest]) for target in owner.imports.get(name, ())]
            targets = targets or [f"{star}.{name}" for star in owner.imports.get("*", ())]
            for next_owner, names in filter(None, map(self._find_longest, targets)):
                if names:
                    waiting.append((next_owner, names))
                else:  # the module itself is used: any part of it may be
                    every = next_owner.definitions.keys() | next_owner.imports.keys()
                    waiting += [(next_owner, [one]) for one in every]
        return found

    def _find_longest(self, dotted: str) -> tuple[Module, list[str]] | None:
        """Returns the project's module that a dotted name starts with, and the rest of the name."""
        parts = dotted.split(".")
        found = None
        for length in range(1, len(parts) + 1):  # packages run before their modules
            if (module := self._find(".".join(parts[:length]))) is not None:
                found = module, parts[length:]
        return found

    def _find(self, name: str) -> Module | None:
        """Returns a module of the project; None for another module."""
        if name not in self.modules:
            self.modules[name] = None
            parts = name.split(".")
            places = [folder.joinpath(*parts) for folder in self.folders if parts[0] != LIBRARY]
            for file in chain(*((p / "__init__.py", p.with_name(f"{p.name}.py")) for p in places)):
                if file.is_file() and "site-packages" not in file.parts:
                    package = name if file.name == "__init__.py" else name.rpartition(".")[0]
                    return self._read(file, name, package, f"top level of {name}")
        return self.modules[name]


def _root_of(script: Path) -> Path:
    """Returns the folder of a script's project.

    This is the nearest folder above the script with a pyproject.toml or .git, else the highest one
    on Python's search path, else the script's own folder.
    """
    above = script.resolve().parents
    for folder in above:
        if (folder / "pyproject.toml").is_file() or (folder / ".git").exists():
            return folder
    searched = {Path(entry).resolve() for entry in sys.path}
    return next((folder for folder in reversed(above) if folder in searched), above[0])


def _parse(file: Path, name: str, package: str) -> Module:
    """Parses a module; relative imports start from `package`."""
    content = file.read_bytes()
    module = Module(name)
    try:
        tree = ast.parse(content, str(file))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        # Python says what is wrong with the file, if it is imported at all.
        module.on_import = [ast.Expr(ast.Call(ast.Constant(_digest([content.hex()])), [], []))]
        return module
    in_functions = {n for f in ast.walk(tree) if _is_function(f) for n in ast.walk(f)}
    for node in ast.walk(tree):
        for bound, target in _imported(node, package):
            module.imports.setdefault(bound, []).append(target)
            if node not in in_functions:
                module.loaded.append(target)
    _normalize(tree, in_functions)
    for statement in tree.body:
        if _is_main_guard(statement):
            module.main_block += statement.body  # type: ignore[attr-defined]
            continue
        names = {*_bound(statement)}
        for bound in names:
            module.definitions.setdefault(bound, []).append(statement)
        if _acts_on_import(statement, names):
            module.on_import.append(statement)
    return module


def _imported(node: ast.AST, package: str) -> Iterator[tuple[str, str]]:
    """Yields the names that an import assigns, and the full names that they stand for."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            top = alias.name.partition(".")[0]
            yield (alias.asname, alias.name) if alias.asname else (top, top)
            if not alias.asname and alias.name != top:
                yield top, alias.name  # `import a.b` makes a.b reachable by a
    elif isinstance(node, ast.ImportFrom):
        above = package.split(".") if package and node.level else []
        base = [*above[: len(above) - node.level + 1], *filter(None, [node.module])]
        for alias in node.names:
            names = base if alias.name == "*" else [*base, alias.name]
            yield alias.asname or alias.name, ".".join(names)


def _normalize(tree: ast.Module, in_functions: set[ast.AST]) -> None:
    """Removes from a tree what does not change results: docstrings, imports, annotations."""
    for node in ast.walk(tree):
        if isinstance(node, FunctionNode):
            node.returns = None
        elif isinstance(node, ast.arg):
            node.annotation = None
        elif isinstance(node, ast.JoinedStr):
            node.values = _join(node.values)  # Python versions split its text differently
        for block in BLOCKS:
            statements = getattr(node, block, None)
            if isinstance(statements, list):
                kept = [s for s in statements if not isinstance(s, ImportNode) and not _is_idle(s)]
                plain = [_without_annotation(s) if s in in_functions else s for s in kept]
                setattr(node, block, plain)


def _without_annotation(statement: ast.AST) -> ast.AST:
    if isinstance(statement, ast.AnnAssign) and statement.value is not None:
        return ast.copy_location(ast.Assign([statement.target], statement.value), statement)
    return statement


def _acts_on_import(statement: ast.stmt, names: set[str]) -> bool:
    """Whether a statement of a module does more on import than to define names."""
    if isinstance(statement, ast.If) and not names:
        # Conditions of imports count, except for those that only type checkers see.
        return not any("TYPE_CHECKING" in dotted for dotted in _names(statement.test))
    compound = (ast.If, ast.For, ast.While, ast.With, ast.Try, ast.Match)
    return not names or "_" in names or isinstance(statement, compound)


def _bound(statement: ast.AST) -> Iterator[str]:
    """Yields the names that a statement assigns, in source order, also in nested blocks."""
    if isinstance(statement, FunctionNode | ast.ClassDef):
        yield statement.name
    elif not _is_main_guard(statement):
        targets = [*getattr(statement, "targets", []), getattr(statement, "target", None)]
        targets += [item.optional_vars for item in getattr(statement, "items", [])]
        for node in chain.from_iterable(map(ast.walk, filter(None, targets))):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                yield node.id
        for block in (*BLOCKS, "handlers", "cases"):
            for below in getattr(statement, block, []):
                yield from _bound(below)


def _is_function(node: ast.AST) -> bool:
    return isinstance(node, FunctionNode | ast.Lambda)


def _is_field(member: ast.AST) -> bool:
    """Whether a member of a dataclass is a field."""
    return isinstance(member, ast.AnnAssign) and not any(
        "ClassVar" in dotted for dotted in _names(member.annotation)
    )


def _is_idle(node: ast.AST) -> bool:
    """Whether a node is a docstring, another constant on its own, or `pass`."""
    is_constant = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return is_constant or isinstance(node, ast.Pass)


def _is_main_guard(statement: ast.AST) -> bool:
    if not isinstance(statement, ast.If) or not isinstance(statement.test, ast.Compare):
        return False
    sides = statement.test.left, *statement.test.comparators
    is_short = all(isinstance(side, ast.Name | ast.Constant) for side in sides)
    return is_short and ast.unparse(statement.test) in MAIN_GUARDS


def _runs(module: Module, call: ast.Call) -> bool:
    """Whether a call is one of `run_script`, perhaps under another imported name."""
    return any(
        ".".join([target, *rest]).endswith("run_script")
        for name, *rest in _names(call.func)
        for target in (name, *module.imports.get(name, ()))
    )


def _arguments_of(call: ast.Call) -> list[ast.expr]:
    """Returns the arguments of `run_script` without the stage, the options class first."""
    named = {keyword.arg: keyword.value for keyword in call.keywords}
    options = [named.pop("options_class")] if "options_class" in named else []
    values = call.args if named.pop("stage", None) else call.args[1:] or call.args
    return [*options, *values, *named.values()] or [call]


def _names(root: ast.AST) -> Iterator[list[str]]:
    """Yields the dotted names below a node: `nn.functional.mse_loss` as three parts."""
    inner: set[ast.AST] = set()
    for node in ast.walk(root):
        parts: list[str] = []
        end = node
        while isinstance(end, ast.Attribute) and node not in inner:
            parts.append(end.attr)
            end = end.value
            inner.add(end)
        if isinstance(end, ast.Name) and node not in inner:
            yield [end.id, *reversed(parts)]


def _flatten(root: ast.AST) -> list[Any]:
    """Returns the nodes of a syntax tree with their fields, the same under every Python version.

    The list is flat, since an expression of hundreds of terms is nested too deeply for recursion.
    """
    flat = []
    for node in ast.walk(root):
        fields = [(n, _flat_value(v)) for n, v in ast.iter_fields(node) if n not in IGNORED_FIELDS]
        flat.append([type(node).__name__, {n: v for n, v in fields if v not in (None, [])}])
    return flat


def _flat_value(value: Any) -> Any:
    """Returns the value of a field; for a node, which the flat list contains itself, a mark."""
    if isinstance(value, list):
        return [_flat_value(item) for item in value]
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, ast.AST):
        return "node"
    # `repr` refuses very long integers.
    return [type(value).__name__, hex(value) if type(value) is int else repr(value)]


def _join(values: list[ast.expr]) -> list[ast.expr]:
    """Returns the values of an f-string with adjacent constants joined."""
    joined: list[ast.expr] = []
    for is_text, group in groupby(values, lambda value: isinstance(value, ast.Constant)):
        if not is_text:
            joined += group
        elif text := "".join(str(value.value) for value in group):  # type: ignore[attr-defined]
            joined.append(ast.Constant(text))
    return joined


def _digest(parts: list[str]) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:DIGEST_LETTERS]
