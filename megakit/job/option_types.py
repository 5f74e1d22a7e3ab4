"""Types of options: the values that an option may have, and what `Annotated` adds to a type."""

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

from megakit.errors import UserError, brief

#: Largest number of steps or samples, and largest seed: frameworks store them in 32 bits.
INT32_MAX = 2**31 - 1


@dataclass(frozen=True)
class Range:
    """The values that a numeric option may have: `lr: Annotated[float, Range(above=0)]`.

    `least` and `most` are inclusive bounds, `above` and `below` are exclusive ones.
    """

    least: float = -math.inf
    most: float = math.inf
    above: float = -math.inf
    below: float = math.inf

    def rule(self, value: float) -> str | None:
        """Returns the rule that a value breaks, as in "has to be RULE"; None for a valid value."""
        if not -math.inf < value < math.inf:  # or not a number
            return "a finite number"
        if value < self.least:
            return f"at least {self.least:,}"
        if value > self.most:
            return f"at most {self.most:,}"
        if value <= self.above:
            return f"above {self.above:,}"
        if value >= self.below:
            return f"below {self.below:,}"
        return None


class Size(Range):
    """Marks a size of the model: `hidden_size: Annotated[int, Size(least=1)] = 64`.

    If the command leaves the option out, the size in the start checkpoint counts.
    """


Count = Annotated[int, Range(least=1, most=INT32_MAX)]
#: The bound keeps the product of batch size and number of steps within 64 bits.
BatchSize = Annotated[int, Range(least=1, most=2**24)]
Seed = Annotated[int, Range(least=0, most=INT32_MAX)]
LearningRate = Annotated[float, Range(above=0, most=100)]


def flag(name: str) -> str:
    """Returns an option as users type it."""
    return "--" + name.replace("_", "-")


def extras_of(options: type) -> Mapping[str, list[Any]]:
    """Returns what `Annotated` adds to each field's type, also if only a base class adds it."""
    extras: dict[str, list[Any]] = defaultdict(list)
    for owner in options.__mro__:
        for name, hint in get_type_hints(owner, include_extras=True).items():
            for one in (hint, *get_args(hint)):  # also inside of `Annotated[...] | None`
                extras[name] += getattr(one, "__metadata__", ())
    return extras


def broken_rules(options: Any) -> list[str]:
    """Returns one message per field of a dataclass of options with an invalid number."""
    found, all_extras = [], extras_of(type(options))
    for name in (field.name for field in fields(options)):
        value = getattr(options, name)
        if isinstance(value, int | float):
            allowed = next((one for one in all_extras[name] if isinstance(one, Range)), Range())
            if rule := allowed.rule(value):
                found.append(f"{flag(name)} {brief(str(value))}: has to be {rule}.")
    return found


def given_of(options: Any) -> frozenset[str]:
    """Returns the names of the options that the user has given.

    Of options that are built in Python, these are the options without their default value.
    """
    changed = (one.name for one in fields(options) if getattr(options, one.name) != one.default)
    return getattr(options, "given", frozenset(changed))


def use_sizes_of(options: Any, settings: Mapping[str, Any], start: Path) -> None:
    """Sets the options that are sizes of the model to the sizes in the start checkpoint.

    Args:
        options: Options of the command line.
        settings: The settings of the checkpoint's model.
        start: Path of the checkpoint, for the message.

    Raises:
        UserError: The user has given other sizes.
    """
    problems, given = [], given_of(options)
    for name, extras in extras_of(type(options)).items():
        if name not in settings or not any(isinstance(one, Size) for one in extras):
            continue
        value, size = getattr(options, name), settings[name]
        if name in given and value != size:
            problems.append(
                f"{flag(name)} {value}: the model of {start} has {size}, and its weights fit no "
                f"other size. Leave {flag(name)} out, or start from fresh weights with "
                "--checkpoint none."
            )
        setattr(options, name, size)
    if problems:
        raise UserError(problems)
