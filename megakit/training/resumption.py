"""Checks the state in a checkpoint before a resumed run uses it.

Lightning and torch restore loops and schedulers by copying the saved attributes unchanged. A value
of a wrong type causes an error many steps later, and the error does not mention the checkpoint.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from megakit.checkpoints.manifest import MANIFEST, WEIGHTS, read_manifest
from megakit.models.loading import check_finite
from megakit.runtime.patching import require_attribute

#: Lightning's name for the optimizer's counters in the state of the fit loop.
_PROGRESS = "epoch_loop.automatic_optimization.optim_progress"


def check_restored(checkpoint: dict[str, Any], folder: Path, trainer: pl.Trainer) -> None:
    """Compares the content of a checkpoint with the state of the resumed run.

    `folder` is the checkpoint's folder, or the weights folder in it. Without a manifest, the step
    is not compared with the manifest's step. The trainer is set up, but not yet restored.

    Raises:
        ValueError: An entry is missing, is NaN or infinite, or has another type; or the steps in
            the checkpoint differ.
        KeyError: An entry is missing.
    """
    check_finite({key: part for key, part in checkpoint.items() if key != "callbacks"})
    progress = checkpoint["loops"]["fit_loop"]
    check_structure(progress, trainer.fit_loop.state_dict(), "loops.fit_loop")
    schedulers = [one.scheduler.state_dict() for one in trainer.lr_scheduler_configs]
    check_structure(checkpoint["lr_schedulers"], schedulers, "lr_schedulers")
    data = require_attribute(trainer, "datamodule")
    if data is not None and (name := type(data).__qualname__) in checkpoint:
        check_structure(checkpoint[name], data.state_dict(), name)
    for callback in require_attribute(trainer, "callbacks"):
        # Callbacks of users may save a different structure each time.
        saved = checkpoint["callbacks"].get(callback.state_key, {})
        if saved and type(callback).__module__.startswith("megakit."):
            check_structure(saved, callback.state_dict(), callback.state_key)
    _check_optimizers(checkpoint["optimizer"], trainer.strategy.optimizers)
    step = progress[_PROGRESS]["optimizer"]["step"]["total"]["completed"]
    steps = {"global_step": checkpoint["global_step"], "the optimizer": step}
    # NeMo passes the path of the weights folder.
    folder = folder.parent if folder.name == WEIGHTS else folder
    if (folder / MANIFEST).is_file():
        steps["the manifest"] = read_manifest(folder).step
    if len(set(steps.values())) != 1:
        differing = ", ".join(f"{name} says {value}" for name, value in steps.items())
        raise ValueError(f"its steps differ: {differing}")


def check_structure(saved: object, expected: object, path: str) -> None:
    """Checks that a saved value has the keys, lengths and types of the resumed run's own value.

    If the expected value is None, because it is not known yet, the saved value may be a number. If
    the expected value is a float, the saved value may be an integer.

    Raises:
        ValueError: The keys, lengths or types differ; the message contains the path of the keys.
    """
    if expected is None:
        fits = saved is None or type(saved) in (bool, int, float)
    elif type(expected) is float:
        fits = type(saved) in (int, float)
    else:
        fits = type(saved) is type(expected)
    if not fits:
        raise ValueError(f"{path} is a {type(saved).__name__}, not a {type(expected).__name__}")
    if isinstance(expected, dict) and isinstance(saved, dict):
        if saved.keys() != expected.keys():
            raise ValueError(f"{path} has other entries than this run's")
        for key in expected:
            check_structure(saved[key], expected[key], f"{path}.{key}")
    elif isinstance(expected, list | tuple) and isinstance(saved, list | tuple):
        if len(saved) != len(expected):
            raise ValueError(f"{path} has {len(saved)} entries, not {len(expected)}")
        for number, (its, own) in enumerate(zip(saved, expected, strict=True)):
            check_structure(its, own, f"{path}.{number}")


def _check_optimizers(states: object, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Checks the settings of the parameter groups, and that the step counts are numbers.

    The shapes of the optimizer's states were checked when the checkpoint was loaded.
    """
    saved, expected = (
        [group for groups in _values_of(value, "param_groups") for group in groups]
        for value in (states, [optimizer.state_dict() for optimizer in optimizers])
    )
    if len(saved) != len(expected):
        raise ValueError(f"its optimizer has {len(saved)} groups of weights, not {len(expected)}")
    for number, groups in enumerate(zip(saved, expected, strict=True)):
        its, own = ({key: group[key] for key in group if key != "params"} for group in groups)
        check_structure(its, own, f"the optimizer's group {number}")
    for step in _values_of(states, "common_step") + _values_of(states, "step"):
        is_number = isinstance(step, torch.Tensor) and step.dim() == 0 and not step.is_complex()
        if not is_number and type(step) not in (int, float):
            raise ValueError(f"the optimizer's step is a {type(step).__name__} instead of a number")


def _values_of(value: object, name: str) -> list[Any]:
    """Returns all values under a key, at any depth of dictionaries and lists."""
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    own = [value[name]] if isinstance(value, dict) and name in value else []
    return own + [found for part in parts for found in _values_of(part, name)]
