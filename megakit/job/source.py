"""Parses a project's modules: their definitions, their imports, and what their import runs.

All supported Python versions give the same result, although their syntax trees differ.
"""

import ast
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain, groupby
from pathlib import Path
from typing import Any

#: Fields of a syntax tree that do not change what the code computes.
IGNORED_FIELDS = {"kind", "type_comment"}
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


def parse(file: Path, name: str, package: str) -> Module:
    """Parses a module; relative imports start from `package`."""
    content = file.read_bytes()
    module = Module(name)
    try:
        tree = ast.parse(content, str(file))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        # Python says what is wrong with the file, if it is imported at all.
        module.on_import = [ast.Expr(ast.Call(ast.Constant(digest([content.hex()])), [], []))]
        return module
    in_functions = {n for f in ast.walk(tree) if is_function(f) for n in ast.walk(f)}
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
        names = {*assigned_names(statement)}
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
                kept = [s for s in statements if not isinstance(s, ImportNode) and not is_idle(s)]
                plain = [_without_annotation(s) if s in in_functions else s for s in kept]
                setattr(node, block, plain)


def _without_annotation(statement: ast.AST) -> ast.AST:
    if isinstance(statement, ast.AnnAssign) and statement.value is not None:
        return ast.copy_location(ast.Assign([statement.target], statement.value), statement)
    return statement


def _acts_on_import(statement: ast.stmt, names: set[str]) -> bool:
    """Tells whether a statement of a module does more on import than to define names."""
    if isinstance(statement, ast.If) and not names:
        # Conditions of imports count, except for those that only type checkers see.
        return not any("TYPE_CHECKING" in dotted for dotted in names_in(statement.test))
    compound = (ast.If, ast.For, ast.While, ast.With, ast.Try, ast.Match)
    return not names or "_" in names or isinstance(statement, compound)


def assigned_names(statement: ast.AST) -> Iterator[str]:
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
                yield from assigned_names(below)


def is_function(node: ast.AST) -> bool:
    """Tells whether a node is a function, a method or a lambda."""
    return isinstance(node, FunctionNode | ast.Lambda)


def is_field(member: ast.AST) -> bool:
    """Tells whether a member of a dataclass is a field."""
    return isinstance(member, ast.AnnAssign) and not any(
        "ClassVar" in dotted for dotted in names_in(member.annotation)
    )


def is_idle(node: ast.AST) -> bool:
    """Tells whether a node is a docstring, another constant on its own, or `pass`."""
    is_constant = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return is_constant or isinstance(node, ast.Pass)


def _is_main_guard(statement: ast.AST) -> bool:
    if not isinstance(statement, ast.If) or not isinstance(statement.test, ast.Compare):
        return False
    sides = statement.test.left, *statement.test.comparators
    is_short = all(isinstance(side, ast.Name | ast.Constant) for side in sides)
    return is_short and ast.unparse(statement.test) in MAIN_GUARDS


def names_in(root: ast.AST) -> Iterator[list[str]]:
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


def flatten(root: ast.AST) -> list[Any]:
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


def digest(parts: list[str]) -> str:
    """Returns the start of the SHA-256 of texts, 16 letters."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:DIGEST_LETTERS]
