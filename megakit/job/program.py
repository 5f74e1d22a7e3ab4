"""Computes digests of the code that decides what a script computes, one for each name.

The source is parsed and not imported, so a start stays fast. The code that counts is reachable by
name from the script's call `run_script(...)`, through the modules of the script's project.
Comments, docstrings, formatting, annotations of functions and the order of functions do not count.
All supported Python versions compute the same digests.
"""

import ast
import json
import sys
from collections.abc import Iterable
from itertools import chain, takewhile
from pathlib import Path

from megakit.job.source import (
    Module,
    assigned_names,
    digest,
    flatten,
    is_field,
    is_function,
    is_idle,
    names_in,
    parse,
)

#: Its version is recorded in the checkpoints instead.
LIBRARY = "megakit"
#: Members of options classes whose values are compared or shown to the user.
CHECKS = {
    *("problems", "resolve_dataset", "recall", "places", "adapt", "choice", "harmless"),
    "model_sizes",
}
#: Names of the code that the script runs outside of functions and classes.
TOP_LEVEL, MAIN_BLOCK = "top level of the script", "main block of the script"


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
            # If two modules define a used name, the import decides which of them is meant.
            meant = sorted(
                f"{used} in {owner}"
                for owner, used in program.uses[module, name]
                if len(program.parts.get(used, ())) > 1
            )
            digests[key] = digest([json.dumps(parts), *meant])
    return dict(sorted(digests.items()))


class _Program:
    """Collects the parts of the code that are reachable from a script.

    Attributes:
        parts: The collected parts, by name and by module.
        uses: The project's definitions that a module's name uses, each by module and name.
        modules: The parsed modules by dotted name; None for a module outside of the project.
        options: The options class, and its base classes in the project.
    """

    def __init__(self, script: Path) -> None:
        root = _root_of(script)
        folders = [script.resolve().parent, *(Path(entry).resolve() for entry in sys.path)]
        self.folders = [f for f in dict.fromkeys(folders) if f.is_relative_to(root)]
        self.parts: dict[str, dict[str, list[str]]] = {}
        self.uses: dict[tuple[str, str], set[tuple[str, str]]] = {}
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
        self.modules[name] = module = parse(file, name, package)
        for target in module.loaded:
            self._find_longest(target)
        for statement in module.on_import:
            self._add(module, label, statement)
        for node in [*chain(*module.definitions.values())]:
            for decorator in getattr(node, "decorator_list", []):
                # A decorator of the project may register what it decorates.
                if any(self._resolve(module, dotted) for dotted in names_in(decorator)):
                    self._reach(module, node.name)  # type: ignore[attr-defined]
        return module

    def _mark_options(self, module: Module, expression: ast.AST) -> None:
        for dotted in names_in(expression):
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
            fields = [member for member in node.body if not is_function(member)]
            members = [name for member in fields for name in assigned_names(member)]
            self._add(module, node.name, *node.decorator_list, *node.bases, *node.keywords)
            self.parts[node.name][module.name].append(json.dumps(members))
        for member in node.body:
            name = next(assigned_names(member), None)
            if is_options and is_field(member):
                self._follow(module, [member.annotation])  # type: ignore[attr-defined]
            elif not (is_options and name in CHECKS) and not is_idle(member):
                self._add(module, f"{node.name}.{name}" if name else node.name, member)

    def _add(self, module: Module, name: str, *nodes: ast.AST) -> None:
        """Collects nodes under a name, and what the nodes use."""
        bindings, used = self._follow(module, nodes)
        content = json.dumps([[*map(flatten, nodes)], bindings])
        self.parts.setdefault(name, {}).setdefault(module.name, []).append(content)
        self.uses.setdefault((module.name, name), set()).update(used)

    def _follow(
        self, module: Module, nodes: Iterable[ast.AST]
    ) -> tuple[list[str], set[tuple[str, str]]]:
        """Collects what nodes use.

        Returns:
            The imported names whose meaning is not their name, and the definitions in the project.
        """
        bindings, used = set(), set()
        for dotted in chain.from_iterable(map(names_in, nodes)):
            for target in module.imports.get(dotted[0], ()):
                is_foreign = self._find_longest(target) is None
                if is_foreign and target.partition(".")[0] != LIBRARY:
                    bindings.add(f"{dotted[0]} = {target}")
                elif target.rpartition(".")[2] != dotted[0]:
                    bindings.add(f"{dotted[0]} = {target.rpartition('.')[2]}")
            for owner, name in self._resolve(module, dotted):
                self._reach(owner, name)
                used.add((owner.name, name))
        return sorted(bindings), used

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


def _runs(module: Module, call: ast.Call) -> bool:
    """Tells whether a call is one of `run_script`, perhaps under another imported name."""
    return any(
        ".".join([target, *rest]).endswith("run_script")
        for name, *rest in names_in(call.func)
        for target in (name, *module.imports.get(name, ()))
    )


def _arguments_of(call: ast.Call) -> list[ast.expr]:
    """Returns the arguments of `run_script` without the stage, the options class first."""
    named = {keyword.arg: keyword.value for keyword in call.keywords}
    options = [named.pop("options_class")] if "options_class" in named else []
    values = call.args if named.pop("stage", None) else call.args[1:] or call.args
    return [*options, *values, *named.values()] or [call]
