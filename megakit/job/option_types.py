"""Types of options: the values that an option may have, and what `Annotated` adds to a type."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

from megakit.errors import brief

#: Largest number of steps or samples, and largest seed: frameworks store them in 32 bits.
INT32_MAX = 2**31 - 1
#: Marks a text option that is no name: `prompt: Annotated[str, FREE_TEXT]` may have any characters.
FREE_TEXT = "free text"


@dataclass(frozen=True)
class Range:
    """The values that a numeric option may have: `lr: Annotated[float, Range(above=0)]`.

    `least` and `most` are inclusive bounds, `above` and `below` are exclusive ones.
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


Count = Annotated[int, Range(least=1, most=INT32_MAX)]
#: The bound keeps the product of batch size and number of steps within 64 bits.
BatchSize = Annotated[int, Range(least=1, most=2**24)]
Seed = Annotated[int, Range(least=0, most=INT32_MAX)]
LearningRate = Annotated[float, Range(above=0, most=100)]


def flag(name: str) -> str:
    """Returns an option as users type it."""
    return "--" + name.replace("_", "-")


def extras_of(options: type, name: str) -> Iterator[Any]:
    """Yields what `Annotated` adds to a field's type, also if only a base class adds it."""
    for owner in options.__mro__:
        if name in vars(owner).get("__annotations__", {}):
            hint = get_type_hints(owner, include_extras=True)[name]
            for one in (hint, *get_args(hint)):  # also inside of `Annotated[...] | None`
                yield from getattr(one, "__metadata__", ())


def broken_rules(options: Any) -> list[str]:
    """Returns one message per field of a dataclass of options with an invalid value."""
    found = []
    for field in fields(options):
        value = getattr(options, field.name)
        extras = [*extras_of(type(options), field.name)]
        rule = None
        if isinstance(value, str | Path) and FREE_TEXT not in extras:
            is_clean = all(ord(character) >= 32 for character in str(value))
            rule = None if is_clean else "contains a control character. Use another name"
        elif isinstance(value, int | float):
            bounds = [one for one in extras if isinstance(one, Range)] or [Range()]
            broken = bounds[0].rule(value)
            rule = broken and f"has to be {broken}"
        if rule:
            found.append(f"{flag(field.name)} {brief(str(value))}: {rule}.")
    return found


def members(kind: Any) -> tuple[Any, ...]:
    """Returns the types of a union, or the values of a literal; else the type itself."""
    return get_args(kind) or (kind,)


def use_sizes_of(options: Any, settings: Any, start: Path) -> None:
    """TEMP."""
    from megakit.errors import UserError

    problems = []
    for option in fields(options):
        if option.default is not None or option.name not in settings:
            continue
        given, size = getattr(options, option.name), settings[option.name]
        if given not in (None, size):
            problems.append(
                f"{flag(option.name)} {given}: the model of {start} has {size}, and its weights "
                f"fit no other size. Leave {flag(option.name)} out, or start from fresh weights "
                "with --checkpoint none."
            )
        setattr(options, option.name, size)
    if problems:
        raise UserError(problems)
