"""Records settings, so that a checkpoint's context contains their current values."""

import copy
import enum
from pathlib import Path
from typing import Any

import torch
from nemo.lightning import io


class IOMixinWithGettersSetters(io.IOMixin):
    """NeMo's IOMixin that also records attributes that change after construction.

    NeMo records a constructor's arguments in `__io__` and writes them into the context of each
    checkpoint. Values that a checkpoint cannot contain, such as functions, are not recorded.
    """

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        recorded = self.__dict__.get("__io__")
        is_argument = recorded is not None and name in recorded.__signature_info__.parameters
        if is_argument and _can_be_recorded(value):
            setattr(recorded, name, value)

    def __copy__(self) -> "IOMixinWithGettersSetters":
        # Without a record of its own, a copy would record its changes for the original, too.
        copied = object.__new__(type(self))
        copied.__dict__ |= {**vars(self), "__io__": copy.copy(self.__io__)}
        return copied

    def set_hparam(self, attribute: str, value: Any, also_change_value: bool = True) -> None:
        """Records a constructor argument's value; by default also sets the attribute."""
        if also_change_value:
            setattr(self, attribute, value)
        setattr(self.__io__, attribute, value)

    def get_hparam(self, attribute: str) -> Any:
        """Returns the recorded value of a constructor argument, or the argument's default."""
        try:
            return getattr(self.__io__, attribute)
        except AttributeError as error:
            raise KeyError(
                f"{type(self).__name__} has no constructor argument {attribute!r} with a value."
            ) from error


def _can_be_recorded(value: object) -> bool:
    if isinstance(value, dict):
        return _can_be_recorded([*value, *value.values()])
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(_can_be_recorded, value))
    plain = (bool, int, float, str, Path, enum.Enum, torch.dtype, type)
    return value is None or isinstance(value, plain)


class ImportedModule(io.IOMixin):
    """Takes the place of a Lightning module in the context of an imported checkpoint."""

    def __init__(self, config: Any) -> None:
        self.config = config
