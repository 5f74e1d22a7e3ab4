"""Replaces functions of the frameworks."""

from typing import Any


def existing(owner: Any, name: str) -> Any:
    """Returns an attribute of a module or class, so that its replacement can call it.

    Raises:
        RuntimeError: The attribute does not exist: the patch is for other framework versions.
    """
    if not hasattr(owner, name):
        raise RuntimeError(
            f"{getattr(owner, '__name__', owner)}.{name} is gone from this version of the stack; "
            "megakit's patches were made for the versions in requirements.lock."
        )
    return getattr(owner, name)


def replace(owner: Any, name: str, replacement: Any) -> None:
    """Replaces an attribute of a module or class.

    Raises:
        RuntimeError: The attribute does not exist, see `existing`.
    """
    existing(owner, name)
    setattr(owner, name, replacement)
