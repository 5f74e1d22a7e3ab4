"""Checks the values of options: numbers have bounds, and names have to be usable as file names."""

import math
import os
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

from megakit.runtime.foreign_files import brief

#: Largest number of steps or samples, and largest seed: frameworks store them in 32 bits.
INT32_MAX = 2**31 - 1
#: Linux's limits on one part of a path and on a whole path. The second limit leaves 400 bytes for
#: the files and folders that are created below a given folder.
_PART_BYTES, _PATH_BYTES = 255, 4096 - 400


@dataclass(frozen=True)
class Range:
    """The values that a numeric option may have: `lr: Annotated[float, Range(above=0)]`.

    Attributes:
        least: Smallest valid value, or None.
        most: Largest valid value, or None.
        above: Exclusive lower bound, or None.
        below: Exclusive upper bound, or None.
    """

    least: float | None = None
    most: float | None = None
    above: float | None = None
    below: float | None = None

    def rule(self, value: float) -> str | None:
        """Returns the rule that a value breaks, as in "has to be RULE"; None for a valid value."""
        if not math.isfinite(value):
            return "a finite number"
        if self.above is not None and not value > self.above:
            return "a positive number" if self.above == 0 else f"above {self.above:,}"
        if self.least is not None and not value >= self.least:
            return f"at least {self.least:,}"
        if self.most is not None and not value <= self.most:
            return f"at most {self.most:,}"
        if self.below is not None and not value < self.below:
            return f"below {self.below:,}"
        return None


#: Marks a text option that is no name: `prompt: Annotated[str, FREE_TEXT]` may have any characters.
FREE_TEXT = "free text"
#: Ranges of numeric options whose type has no `Range`.
_DEFAULT = {int: Range(-INT32_MAX, INT32_MAX), float: Range()}


def flag(name: str) -> str:
    """Returns an option as users type it."""
    return "--" + name.replace("_", "-")


def find_problems(options: Any) -> list[str]:
    """Checks every field of an options dataclass by its type.

    Args:
        options: An instance. A field's bounds are a `Range` in its `Annotated` type.

    Returns:
        One message for each invalid value.
    """
    problems = []
    for field in fields(options):
        value = getattr(options, field.name)
        name = flag(field.name)
        rule = None
        if isinstance(value, str | Path):
            is_text = FREE_TEXT in _metadata(type(options), field.name)
            rule = None if is_text else why_unusable(value)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            broken = _range(type(options), field.name, type(value)).rule(value)
            rule = broken and f"has to be {broken}"
        if rule:
            problems.append(f"{name} {brief(str(value))}: {rule}.")
    return problems


def _range(options: type, name: str, kind: type) -> Range:
    """Returns a field's range, also if a subclass only changes the field's default."""
    ranges = (one for one in _metadata(options, name) if isinstance(one, Range))
    return next(ranges, _DEFAULT[kind])


def _metadata(options: type, name: str) -> Iterator[Any]:
    """Yields what `Annotated` adds to a field's type, also in the base classes."""
    for owner in options.__mro__:
        if name in vars(owner).get("__annotations__", {}):
            hint = get_type_hints(owner, include_extras=True)[name]
            for one in (hint, *get_args(hint)):  # also inside of `Annotated[...] | None`
                yield from getattr(one, "__metadata__", ())


def names_are_usable(options: Any) -> bool:
    """Returns whether the file system accepts every path and name among the options."""
    values = [
        getattr(options, field.name)
        for field in fields(options)
        if FREE_TEXT not in _metadata(type(options), field.name)
    ]
    return not any(why_unusable(value) for value in values if isinstance(value, str | Path))


def why_unusable(name: str | Path) -> str | None:
    """Returns why a user's name cannot be the name of a file; None for a usable name."""
    text = str(name)
    if not text:
        return "is empty. Leave the option out for its default"
    if any(unicodedata.category(character) == "Cs" for character in text):
        return "is not valid UTF-8. Use another name"
    if any(unicodedata.category(character) in ("Cc", "Zl", "Zp") for character in text):
        return "contains a control character. Use another name"
    if any(len(os.fsencode(part)) > _PART_BYTES for part in text.split("/")):
        return f"one part of it is longer than {_PART_BYTES} bytes. Use a shorter name"
    if isinstance(name, Path) and len(os.fsencode(name.absolute())) > _PATH_BYTES:
        return f"the absolute path is longer than {_PATH_BYTES} bytes. Use a shorter path"
    return None
