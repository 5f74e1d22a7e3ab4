"""Computes digests of the code that a run's result depends on, one for each name.

The code is that of the script and of the project's modules that it imports, also inside of
functions; other scripts and this library do not count. It is parsed and not imported, so that a
start stays quick. Comments, docstrings, formatting and the order of definitions do not count. A
name that is defined or imported and not used counts.
"""

import ast
import hashlib
import platform
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from megakit.checkpoints.manifest import CODE, Manifest

#: Its version is recorded in the checkpoints instead.
LIBRARY = "megakit"
#: A module that assigns this name is left out: what it computes is only shown.
REPORTS_ONLY = "REPORTS_ONLY"
#: Classes with a name or a base that ends like this are left out. Options count by their values;
#: callbacks and loggers only report.
LEFT_OUT = ("Options", "Callback", "Logger", "Profiler")
#: Arguments that only report.
REPORTING_ARGUMENTS = ("callbacks", "logger", "log_every_n_steps", "profiler", "next_verb")
#: Number of changed names that a message lists.
LISTED = 8


def code_of(script: Path) -> dict[str, str]:
    """Returns digests of the code that a script's result depends on, by name.

    Members of a class have names of their own (`Config.width`). A name that several modules define
    is followed by its module (`scale in transforms`).
    """
    parts: dict[str, dict[str, list[str]]] = {}
    for module, tree in _modules(script):
        for name, node in _named_parts(tree, module):
            parts.setdefault(name, {}).setdefault(module, []).append(ast.unparse(node))
    return {
        name if len(by_module) == 1 else f"{name} in {module}": _digest(sources)
        for name, by_module in sorted(parts.items())
        for module, sources in by_module.items()
    }


def changed_names(checkpoint: Manifest, code: Mapping[str, str]) -> list[str]:
    """Returns the names whose code differs from the code that made a checkpoint.

    The list is empty if one of the two has no code, such as a notebook, or if another minor version
    of Python made the checkpoint, which may write the same code differently.
    """
    before = checkpoint.run.get(CODE) or {}
    python = str(checkpoint.versions.get("python")).split(".")[:2]
    if not before or not code or python != platform.python_version().split(".")[:2]:
        return []
    names = sorted(before.keys() | code.keys())
    return [name for name in names if before.get(name) != code.get(name)]


def listed(names: list[str]) -> str:
    """Joins names for a message: the first `LISTED`, and the number of further names."""
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + more


def project_of(script: Path) -> Path:
    """Returns the folder of the project that a script belongs to; else the script's own folder."""
    above = script.resolve().parents
    marks = ("pyproject.toml", ".git")
    return next((f for f in above if any((f / mark).exists() for mark in marks)), above[0])


def _modules(script: Path) -> Iterator[tuple[str, ast.Module]]:
    """Yields the syntax trees of the script and of its project's modules that it imports."""
    root = project_of(script)
    folders = [script.resolve().parent, *(Path(entry).resolve() for entry in sys.path)]
    folders = [
        folder
        for folder in dict.fromkeys(folders)
        if folder.is_relative_to(root) and not folder.is_relative_to(sys.prefix)
    ]
    waiting, seen = [(script.stem, script)], {script.stem}
    while waiting:
        module, file = waiting.pop()
        tree = ast.parse(file.read_bytes(), str(file))
        if file != script:
            guarded = [one for one in tree.body if _is_main_guard(one)]
            if any("run_script(" in ast.unparse(one) for one in guarded):
                continue  # another script
            tree.body = [one for one in tree.body if one not in guarded]
        if any(REPORTS_ONLY in _targets(one) for one in tree.body):
            continue
        package = module if file.name == "__init__.py" else module.rpartition(".")[0]
        for name in {*_imports(tree, package)} - seen:
            seen.add(name)
            path = _find(name, folders)
            if path is not None and name.partition(".")[0] != LIBRARY:
                waiting.append((name, path))
        yield module, tree  # at the end, because `_named_parts` changes the tree


def _find(module: str, folders: list[Path]) -> Path | None:
    """Returns the file of a module in the first folder that has it; None if no folder has it."""
    for path in (folder.joinpath(*module.split(".")) for folder in folders):
        for file in (path / "__init__.py", path.with_suffix(".py")):
            if file.is_file() and "site-packages" not in file.parts:
                return file
    return None


def _imports(tree: ast.Module, package: str) -> Iterator[str]:
    """Yields the names of all modules that may be imported."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = ".".join([*(above if node.level else []), *filter(None, [node.module])])
            yield from (base, *(f"{base}.{alias.name}" for alias in node.names))


def _named_parts(tree: ast.Module, module: str) -> Iterator[tuple[str, ast.AST]]:
    """Yields the parts of a module with their names, without what does not count."""
    yield f"imports of {module}", ast.Constant(", ".join(sorted({*_bindings(tree)})))
    for statement in _Stripper().visit(tree).body:
        if not isinstance(statement, ast.ClassDef):
            for name in _targets(statement) or [f"top level of {module}"]:
                yield name, statement
        elif not any(
            name.endswith(LEFT_OUT) for name in [statement.name, *map(ast.unparse, statement.bases)]
        ):
            members, statement.body = statement.body, []
            yield statement.name, statement
            for member in members:
                for name in _targets(member) or ["body"]:
                    yield f"{statement.name}.{name}", member


def _bindings(tree: ast.Module) -> Iterator[str]:
    """Yields what names stand for that a module imports, except for what does not count."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            base = getattr(node, "module", "") or ""
            if base.partition(".")[0] != LIBRARY:
                names = [one for one in node.names if not one.name.endswith(LEFT_OUT)]
                yield from (f"{one.asname or one.name} = {base}.{one.name}" for one in names)


class _Stripper(ast.NodeTransformer):
    """Removes docstrings, imports, and the arguments that only report."""

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        return None if isinstance(node.value, ast.Constant) else self.generic_visit(node)

    def visit_Import(self, node: ast.Import) -> None: ...

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None: ...

    def visit_Call(self, node: ast.Call) -> ast.AST:
        node.keywords = [one for one in node.keywords if one.arg not in REPORTING_ARGUMENTS]
        return self.generic_visit(node)


def _targets(statement: ast.stmt) -> list[str]:
    """Returns the names that a statement defines at its top."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [statement.name]
    targets = [*getattr(statement, "targets", []), getattr(statement, "target", None)]
    nodes = [node for target in filter(None, targets) for node in ast.walk(target)]
    return [n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]


def _is_main_guard(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.If) and "__name__" in ast.unparse(statement.test)


def _digest(sources: list[str]) -> str:
    return hashlib.sha256("\0".join(sources).encode()).hexdigest()[:16]
