"""Replaces attributes of modules and classes, and puts the originals back."""

import functools
from collections.abc import Callable
from typing import Any

from megakit.runtime.patching import require_attribute


class Replacements:
    """Replaced attributes, and what else has to be undone."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], Any]] = []

    def set(self, owner: Any, **attributes: Any) -> None:
        """Replaces existing attributes; inherited ones are removed at the end."""
        for name, value in attributes.items():
            require_attribute(owner, name)
            if name in vars(owner):
                self.at_end(functools.partial(setattr, owner, name, vars(owner)[name]))
            else:
                self.at_end(functools.partial(delattr, owner, name))
            setattr(owner, name, value)

    def at_end(self, undo: Callable[[], Any]) -> None:
        """Calls a function at the end, before those that were added earlier."""
        self._undo.append(undo)

    def undo(self) -> None:
        """Puts everything back."""
        while self._undo:
            self._undo.pop()()
