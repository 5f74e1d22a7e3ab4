"""Replaces parts of the frameworks at run time: one function, one list, one switch.

A patch belongs to one of three groups. `needed`: without it nothing runs here. `safe`: it reads and
writes checkpoints safely, prevents a wrong result, or ends a rank that waits. `fast`: it saves
time, and `MEGAKIT_STOCK=1` leaves it out. `python -m megakit.runtime` prints the list.
"""

import importlib
import os
import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

Group = Literal["needed", "safe", "fast"]


@dataclass(frozen=True)
class Patch:
    """Describes one replaced attribute.

    Attributes:
        owner: The full name of the module or class.
        name: The attribute; empty if the whole module is replaced.
        group: Why the patch exists; see the top of this file.
        reason: What the frameworks do without the patch.
        worth: What the patch saves, by measurement.
        when: The condition under which the patch is made or takes effect.
    """

    owner: str
    name: str
    group: Group
    reason: str
    worth: str
    when: str


#: The patches of this process, in the order in which they were made.
PATCHES: list[Patch] = []


def is_stock() -> bool:
    """Returns whether `MEGAKIT_STOCK=1` is set, which leaves out patches of the group `fast`."""
    return os.environ.get("MEGAKIT_STOCK") == "1"


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


def patch(
    owner: Any,
    name: str,
    replacement: Any,
    *,
    group: Group,
    reason: str,
    worth: str = "",
    when: str = "always",
) -> None:
    """Replaces an attribute of a module or class that `require_attribute` finds."""
    require_attribute(owner, name)
    parts = [getattr(owner, key, "") for key in ("__module__", "__qualname__")]
    full_name = ".".join(parts) if isinstance(owner, type) else getattr(owner, "__name__", "")
    if record(full_name, name, group=group, reason=reason, worth=worth, when=when):
        setattr(owner, name, replacement)


def stand_in(
    module: str, attributes: dict[str, Any], *, group: Group, reason: str, when: str = "always"
) -> None:
    """Installs a module in the place of one that is not imported yet."""
    if module not in sys.modules and record(module, "", group=group, reason=reason, when=when):
        sys.modules[module] = ModuleType(module, doc=f"Stand-in: {reason}.")
        vars(sys.modules[module]).update(attributes)


def record(
    owner: str, name: str, *, group: Group, reason: str, worth: str = "", when: str = "always"
) -> bool:
    """Adds a patch to `PATCHES`; returns False, and adds nothing, if the switch leaves it out."""
    is_made = not (group == "fast" and is_stock())
    made = Patch(owner, name, group, reason, worth, when)
    if is_made and made not in PATCHES:
        PATCHES.append(made)
    return is_made
