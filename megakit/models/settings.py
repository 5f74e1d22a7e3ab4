"""Records settings, so that a checkpoint's context contains their current values."""

import enum
from pathlib import Path
from typing import Any

import torch
from nemo.lightning import io


class IOMixinWithGettersSetters(io.IOMixin):
    """NeMo's IOMixin that also records attributes that change after construction.

    NeMo records a constructor's arguments in `__io__` and writes them into the context of each
    checkpoint. NeMo does not record later assignments; this class does. Values that a checkpoint
    cannot contain, such as the strategy's functions and timers, are not recorded.
    """

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        recorded = self.__dict__.get("__io__")
        if recorded is None or name not in recorded.__signature_info__.parameters:
            return
        if _can_be_recorded(value):
            setattr(recorded, name, value)

    def get_hparam(self, name: str) -> Any:
        """Returns the recorded value of a constructor argument.

        Raises:
            KeyError: The constructor has no such argument, or no value is recorded.
        """
        return self.get_hparams()[name]

    def get_hparams(self) -> dict[str, Any]:
        """Returns all recorded values by name."""
        return dict(self.__io__.__arguments__)

    def set_hparam(self, name: str, value: object, also_change_value: bool = True) -> None:
        """Records a constructor argument's value for the contexts of later checkpoints.

        Args:
            name: Name of the argument.
            value: The value.
            also_change_value: Whether to set the attribute of this name, too.
        """
        if also_change_value:
            setattr(self, name, value)
        setattr(self.__io__, name, value)


def _can_be_recorded(value: object) -> bool:
    if isinstance(value, dict):
        return _can_be_recorded([*value, *value.values()])
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(_can_be_recorded, value))
    plain = (bool, int, float, str, Path, enum.Enum, torch.dtype, type)
    return value is None or isinstance(value, plain)
