"""Assigns the names of another program's weights to the names of a model."""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from megakit.errors import brief


@dataclass(frozen=True)
class Assignment:
    """Maps each name in a model to the names of the given weights for it.

    Attributes:
        sources: The given names by name in the model; several names for one are an error.
        left_over: The given names that lead to no name in the model.
        prefix: The prefix that was removed from names without a rule.
        problems: One message for each rule without an effect, and for an ambiguous prefix.
    """

    sources: dict[str, list[str]]
    left_over: list[str]
    prefix: str
    problems: list[str]


def assign(
    given: Collection[str],
    wanted: Collection[str],
    rules: Mapping[str, str],
    skip: Collection[str],
) -> Assignment:
    """Assigns names by rules; without a rule, by equal names or by names after a common prefix.

    A rule OLD: NEW renames the tensor OLD, or all tensors of the module OLD; of several rules, the
    one with the longest OLD applies. An empty OLD or NEW is the whole model. One prefix, such as
    `module.`, is removed from the names without a rule, if more of them are then the model's names.

    Args:
        given: The names of the weights.
        wanted: The names in the model.
        rules: New names by old names.
        skip: Names of tensors and modules to leave out.
    """
    rules = {old.removesuffix("."): new.removesuffix(".") for old, new in rules.items()}
    skip = [name.removesuffix(".") for name in skip]
    problems = [
        f"{option} {brief(name)}: there is no tensor and no module of this name."
        for option, names in (("--map", rules), ("--skip", skip))
        for name in names
        if not any(_is_within(one, name) for one in given)
    ]
    kept = [name for name in given if not any(_is_within(name, one) for one in skip)]
    renamed = {name: _rename(name, rules) for name in kept}
    free = set(wanted) - set(renamed.values())
    prefixes = _prefixes([name for name, new in renamed.items() if new is None], free)
    if len(prefixes) > 1:
        modules = ", ".join(brief(one.removesuffix(".")) for one in prefixes)
        problems.append(f"The modules {modules} fit equally well. Leave all out but one.")
    prefix = prefixes[0] if len(prefixes) == 1 else ""
    sources: dict[str, list[str]] = {}
    left_over = []
    for name, new in renamed.items():
        target = name.removeprefix(prefix) if new is None else new
        if target in wanted:
            sources.setdefault(target, []).append(name)
        else:
            left_over.append(name)
    return Assignment(sources, left_over, prefix, problems)


def _is_within(name: str, module: str) -> bool:
    """Tells whether a tensor has a name, or is a tensor of the module of this name."""
    return not module or name == module or name.startswith(f"{module}.")


def _rename(name: str, rules: Mapping[str, str]) -> str | None:
    """Returns the name that the rules give a tensor; None without a rule."""
    fitting = [old for old in rules if _is_within(name, old)]
    if not fitting:
        return None
    old = max(fitting, key=len)
    rest = name.removeprefix(old).removeprefix(".")
    return ".".join(part for part in (rules[old], rest) if part)


def _prefixes(given: Collection[str], wanted: Collection[str]) -> list[str]:
    """Returns the prefixes whose removal gives the most names in the model; "" comes first."""
    counts = Counter({"": sum(name in wanted for name in given)})
    for name in given:
        for position, character in enumerate(name):
            if character == "." and name[position + 1 :] in wanted:
                counts[name[: position + 1]] += 1
    most = max(counts.values())
    best = [prefix for prefix, count in counts.items() if count == most]
    return best[:1] if best[0] == "" else best
