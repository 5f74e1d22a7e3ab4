"""Imports the names of a subpackage when they are first used, from where its `.pyi` file says."""

import ast
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any


def names_of_stub(
    package: str, file: str
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Returns `__getattr__`, `__dir__` and `__all__` of a package, from its `__init__.pyi`.

    So `import megakit.data` takes no time, and type checkers read the same file.

    Args:
        package: The package's `__name__`.
        file: The package's `__file__`.
    """
    tree = ast.parse(Path(file).with_suffix(".pyi").read_text())
    froms = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    modules = {
        alias.name: importlib.util.resolve_name(f"{'.' * node.level}{node.module}", package)
        for node in froms
        for alias in node.names
    }

    def import_name(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(modules[name]), name)

    return import_name, lambda: [*modules], [*modules]
