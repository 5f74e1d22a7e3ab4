"""What of the tutorial's components and of the library depends on NeMo, Megatron and Lightning.

    python benchmarks/dependence.py [--write]

Counts by reading the source: which definitions use, and which modules import, which of their names.
`--write` puts the tables into docs/porting.md.
"""

import argparse
import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from report import REPOSITORY, write_section

PAGE = REPOSITORY / "docs" / "porting.md"
FRAMEWORKS = {"nemo": "NeMo", "megatron": "Megatron", "lightning": "Lightning"}
Used = dict[str, set[str]]  # names by framework


def bindings(tree: ast.AST) -> dict[str, tuple[str, bool]]:
    """What each name means that a source imports from a framework, and whether it is a module."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                found[alias.asname or alias.name] = alias.name, True
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                # Judged by its style; functions look like modules, and are shown like them.
                found[alias.asname or alias.name] = whole, alias.name.islower()
    return {name: what for name, what in found.items() if what[0].split(".")[0] in FRAMEWORKS}


def names_used(tree: ast.AST, bound: dict[str, tuple[str, bool]]) -> Used:
    """The frameworks' names that a piece of source uses, those of modules with their module."""
    used: Used = defaultdict(set)
    inner = {
        id(node.value): node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in bound:
            whole, is_module = bound[node.id]
            short = whole.split(".")[-1]
            if is_module and id(node) in inner:
                short += f".{inner[id(node)]}"
            used[whole.split(".")[0]].add(short)
    return used


def definitions(path: Path) -> Iterator[tuple[str, Used]]:
    """Each class and function at the top of a module, with what it uses itself."""
    tree = ast.parse(path.read_text())
    bound = bindings(tree)
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            yield node.name, names_used(node, bound)


def modules() -> dict[str, Used]:
    """Each module of the library, with what it imports from the frameworks."""
    found = {}
    for path in sorted((REPOSITORY / "megakit").rglob("*.py")):
        used: Used = defaultdict(set)
        for whole, is_module in bindings(ast.parse(path.read_text())).values():
            parts = whole.split(".")
            used[parts[0]].add(".".join(parts[-2:] if is_module else parts[-1:]))
        found[path.relative_to(REPOSITORY).as_posix()] = used
    return found


def table(what: str, rows: dict[str, Used]) -> list[str]:
    """Those rows that use anything, and how many there are in all."""
    lines = [f"| {what} | {' | '.join(FRAMEWORKS.values())} |", "|---|---|---|---|"]
    for name, used in rows.items():
        cells = [", ".join(f"`{one}`" for one in sorted(used.get(f, ()))) for f in FRAMEWORKS]
        if any(cells):
            lines.append(f"| `{name}` | {' | '.join(cells)} |")
    counts = [sum(bool(used.get(f)) for used in rows.values()) for f in FRAMEWORKS]
    return [*lines, f"| of {len(rows)} | {' | '.join(map(str, counts))} |"]


def text() -> str:
    """Both tables."""
    components = dict(definitions(REPOSITORY / "model_components.py"))
    return "\n".join(
        [
            "`model_components.py`, by definition:",
            "",
            *table("uses itself", components),
            "",
            "`megakit`, by module:",
            "",
            *table("imports", modules()),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--write", action="store_true", help="into docs/porting.md")
    if parser.parse_args().write:
        write_section("dependence", text(), PAGE)
    print(text())


if __name__ == "__main__":
    main()
