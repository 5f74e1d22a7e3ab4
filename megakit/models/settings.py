"""Settings that a checkpoint's context holds as they were when it was saved."""

import enum
from pathlib import Path
from typing import Any

import torch
from nemo.lightning import io


class IOMixinWithGettersSetters(io.IOMixin):
    """NeMo's IOMixin, kept up to date when an attribute changes after construction.

    NeMo records a constructor's arguments in `__io__` and writes that into the context of each
    checkpoint. What is assigned later would be forgotten; here it is recorded as well. Values that
    no checkpoint can hold (functions that the strategy plugs in, timers) are not.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        recorded = self.__dict__.get("__io__")
        if recorded is None or name not in recorded.__signature_info__.parameters:
            return
        if _can_be_recorded(value):
            setattr(recorded, name, value)

    def get_hparam(self, name: str) -> Any:
        """The value recorded under this name.

        Raises:
            KeyError: The constructor has no such argument, or none was recorded.
        """
        return self.get_hparams()[name]

    def get_hparams(self) -> dict[str, Any]:
        """Everything recorded, by name."""
        return dict(self.__io__.__arguments__)

    def set_hparam(self, name: str, value: Any, also_change_value: bool = True) -> None:
        """Records a value under a constructor argument's name.

        Args:
            name: The argument.
            value: What the context of the next checkpoint shall hold.
            also_change_value: Whether the attribute of this name changes too.
        """
        if also_change_value:
            setattr(self, name, value)
        setattr(self.__io__, name, value)


def _can_be_recorded(value: Any) -> bool:
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(_can_be_recorded, value))
    if isinstance(value, dict):
        return all(map(_can_be_recorded, value)) and all(map(_can_be_recorded, value.values()))
    plain = (bool, int, float, str, Path, enum.Enum, torch.dtype, type)
    return value is None or isinstance(value, plain)
