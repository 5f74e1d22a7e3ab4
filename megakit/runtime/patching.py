"""Replacing a function of the stack by another."""

from typing import Any


def existing(owner: Any, name: str) -> Any:
    """An attribute of a module or class, for its replacement to fall back on.

    Raises:
        RuntimeError: It is not there: the patch was made for another version of the stack.
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
        RuntimeError: As by `existing`.
    """
    existing(owner, name)
    setattr(owner, name, replacement)
