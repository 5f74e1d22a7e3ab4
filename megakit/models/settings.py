"""Records settings, so that a checkpoint's context contains their current values."""

import copy
import dataclasses
import enum
import inspect
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import torch
from nemo.lightning import io


class WillHaveGetSetHparam(ABC):
    """Declares the methods of `IOMixinWithGettersSetters` for a base class without NeMo's IOMixin.

    A dataclass that calls `set_hparam` derives from this class; its subclasses also derive from
    `IOMixinWithGettersSetters`, which implements the methods.
    """

    @abstractmethod
    def set_hparam(self, attribute: str, value: Any, also_change_value: bool = True) -> None:
        """Records the value of a constructor argument."""

    @abstractmethod
    def get_hparam(self, attribute: str) -> Any:
        """Returns the recorded value of a constructor argument, or the argument's default."""

    @abstractmethod
    def get_hparams(self) -> dict[str, Any]:
        """Returns all recorded values by name."""


class IOMixinWithGettersSetters(WillHaveGetSetHparam, io.IOMixin):
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

    def __copy__(self) -> "IOMixinWithGettersSetters":
        # Without a record of its own, a copy would record its changes for the original, too.
        copied = object.__new__(type(self))
        copied.__dict__ |= {**vars(self), "__io__": copy.copy(self.__io__)}
        return copied

    def get_hparam(self, attribute: str) -> Any:
        """Returns the recorded value of a constructor argument, or the argument's default.

        Raises:
            KeyError: The constructor has no such argument, or the argument has neither a recorded
                value nor a default.
        """
        try:
            return getattr(self.__io__, attribute)
        except AttributeError:
            names = ", ".join(sorted(self.__io__.__signature_info__.parameters))
            raise KeyError(
                f"{type(self).__name__} has no constructor argument {attribute!r} with a value. "
                f"Its arguments are {names}."
            ) from None

    def get_hparams(self) -> dict[str, Any]:
        """Returns the recorded values that differ from the arguments' defaults, by name.

        Values that the constructor itself assigns, for example in `__post_init__`, are recorded.
        """
        recorded = self.__io__.__arguments__
        return {name: recorded[name] for name in self.get_non_default_hparams()}

    def get_non_default_hparams(self) -> list[str]:
        """Returns the names of the arguments whose recorded values differ from their defaults."""
        defaults = _defaults(type(self))
        recorded = self.__io__.__arguments__.items()
        missing = dataclasses.MISSING
        return [name for name, value in recorded if _differ(value, defaults.get(name, missing))]

    def set_hparam(self, attribute: str, value: Any, also_change_value: bool = True) -> None:
        """Records a constructor argument's value for the contexts of later checkpoints.

        Args:
            attribute: Name of the argument.
            value: The value.
            also_change_value: Whether to set the attribute of this name, too.
        """
        if also_change_value:
            setattr(self, attribute, value)
        setattr(self.__io__, attribute, value)


def _differ(value: Any, default: Any) -> bool:
    try:
        return bool(value != default)
    except (ValueError, RuntimeError):  # arrays and tensors
        return value is not default


def _defaults(cls: Any) -> dict[str, Any]:
    """Returns the defaults of a constructor's arguments; those of a dataclass from its fields."""
    if not dataclasses.is_dataclass(cls):
        return {name: one.default for name, one in inspect.signature(cls).parameters.items()}
    return {
        field.name: field.default
        if field.default_factory is dataclasses.MISSING
        else field.default_factory()
        for field in dataclasses.fields(cls)
    }


def _can_be_recorded(value: object) -> bool:
    if isinstance(value, dict):
        return _can_be_recorded([*value, *value.values()])
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(_can_be_recorded, value))
    plain = (bool, int, float, str, Path, enum.Enum, torch.dtype, type)
    return value is None or isinstance(value, plain)
