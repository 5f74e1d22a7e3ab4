"""Looks up and replaces functions of the frameworks; fails clearly if a name does not exist."""

import importlib
from typing import Any


def require_attribute(owner: Any, name: str) -> Any:
    """Returns an attribute of a module or class of the frameworks, which may be private.

    Args:
        owner: The class or module, or the name of a module to import.
        name: The attribute.

    Raises:
        RuntimeError: The attribute does not exist in the installed versions of the frameworks.
    """
    if isinstance(owner, str):
        owner = importlib.import_module(owner)
    if not hasattr(owner, name):
        raise RuntimeError(
            f"{getattr(owner, '__name__', owner)}.{name} is gone from this version of the stack. "
            "Install the versions in requirements.lock, for which megakit's patches were made."
        )
    return getattr(owner, name)


def patch(owner: Any, name: str, replacement: Any) -> None:
    """Replaces an attribute of a module or class that `require_attribute` finds."""
    require_attribute(owner, name)
    setattr(owner, name, replacement)
