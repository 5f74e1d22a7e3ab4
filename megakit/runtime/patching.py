"""Looks up and replaces functions of the frameworks; fails clearly if a name does not exist."""

import importlib
from typing import Any


def existing(owner: Any, name: str) -> Any:
    """Returns an attribute of a module or class of the frameworks.

    Args:
        owner: The class or module, or the name of a module to import.
        name: The attribute, which may be private.

    Raises:
        RuntimeError: The attribute does not exist in the installed versions of the frameworks.
    """
    try:
        return getattr(importlib.import_module(owner) if isinstance(owner, str) else owner, name)
    except (AttributeError, ModuleNotFoundError) as error:
        if isinstance(error, ModuleNotFoundError) and not str(owner).startswith(str(error.name)):
            raise  # the module needs another package
        where = owner if isinstance(owner, str) else getattr(owner, "__name__", owner)
        raise RuntimeError(
            f"{where}.{name} is gone from this version of the stack. "
            "Install the versions in requirements.lock, for which megakit's patches were made."
        ) from error


def replace(owner: Any, name: str, replacement: Any) -> None:
    """Replaces an attribute of a module or class.

    Raises:
        RuntimeError: The attribute does not exist, see `existing`.
    """
    existing(owner, name)
    setattr(owner, name, replacement)
