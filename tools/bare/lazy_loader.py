"""Stands in for the package of this name, so that `run` can show help before it sets up."""

import ast
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any


def attach_stub(package: str, file: str) -> tuple[Callable[[str], Any], None, list[str]]:
    """Returns a package's `__getattr__`, which imports the names of its .pyi file on demand."""
    tree = ast.parse(Path(file).with_suffix(".pyi").read_text())
    froms = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    modules = {alias.name: f"{package}.{node.module}" for node in froms for alias in node.names}

    def import_name(name: str) -> Any:
        if name not in modules:
            raise AttributeError(name)
        return getattr(importlib.import_module(modules[name]), name)

    return import_name, None, [*modules]
