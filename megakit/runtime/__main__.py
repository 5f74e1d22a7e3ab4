"""Prints the table of the patches that megakit makes: `python -m megakit.runtime`."""

import pkgutil
from itertools import groupby

from megakit.runtime.accelerator import use_accelerator
from megakit.runtime.patching import PATCHES, Patch

#: Functions that make further patches when a strategy or an optimizer needs them. They have names
#: here, because nothing in `megakit.runtime` imports `megakit.training`.
FUNCTIONS = (
    "megakit.runtime.writer_threads:write_in_threads",
    "megakit.runtime.fused_adam:patch_optimizers",
    "megakit.training.short_schedule:is_used",
    "megakit.training.timeouts:replace_timeouts",
)

OWNERS = {"lightning": "Lightning", "nemo": "NeMo", "megatron": "Megatron-Core"}


def table(patches: list[Patch]) -> str:
    """Returns the table, in Markdown; patches of one owner with one reason share a row."""
    rows = ["| group | what | whose | why | worth | when |", "|---|---|---|---|---|---|"]
    ordered = sorted(patches, key=lambda one: ("needed", "safe", "fast").index(one.group))
    for (owner, group, reason, worth, when), same in groupby(
        ordered, lambda one: (one.owner, one.group, one.reason, one.worth, one.when)
    ):
        names = ", ".join(f"`{one.name}`" for one in same if one.name)
        what = f"`{owner}`: {names}" if names else f"`{owner}`"
        root = owner.partition(".")[0]
        cells = group, what, OWNERS.get(root, root), reason, worth, when
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


if __name__ == "__main__":
    use_accelerator("cpu")  # with a GPU, it makes the same patches without those for a CPU
    for function in FUNCTIONS:
        pkgutil.resolve_name(function)()
    print(table(PATCHES))
