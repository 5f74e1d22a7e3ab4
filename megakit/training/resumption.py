"""Checks the state in a checkpoint before a resumed run uses it.

Lightning and torch restore loops and schedulers by copying the saved attributes unchanged. A value
of a wrong type causes an error many steps later, and the error does not mention the checkpoint.
"""

from pathlib import Path
from typing import Any

import torch

from megakit.checkpoints.folders import MANIFEST, WEIGHTS
from megakit.checkpoints.manifest import read_manifest
from megakit.models.finite import check_finite

_PROGRESS = "epoch_loop.automatic_optimization.optim_progress"


def check_restored(checkpoint: Any, folder: Path, trainer: Any) -> None:
    """Compares the content of a checkpoint with the state of the resumed run.

    Args:
        checkpoint: The content that NeMo's strategy loaded for training.
        folder: The checkpoint's folder, or the weights folder in it. Without a manifest, the step
            is not compared with the manifest's step.
        trainer: The trainer of the resumed run, set up but not yet restored.

    Raises:
        ValueError: An entry is missing, is NaN or infinite, or has another type; or the steps in
            the checkpoint differ.
        KeyError: An entry is missing.
    """
    check_finite({key: part for key, part in checkpoint.items() if key != "callbacks"})
    progress = checkpoint["loops"]["fit_loop"]
    check_form(progress, trainer.fit_loop.state_dict(), "loops.fit_loop")
    schedulers = [one.scheduler.state_dict() for one in trainer.lr_scheduler_configs]
    check_form(checkpoint["lr_schedulers"], schedulers, "lr_schedulers")
    data = trainer.datamodule
    if data is not None and (name := type(data).__qualname__) in checkpoint:
        check_form(checkpoint[name], data.state_dict(), name)
    for callback in trainer.callbacks:
        # Callbacks of users may save a different structure each time.
        if type(callback).__module__.startswith("megakit."):
            found = checkpoint["callbacks"].get(callback.state_key, {})
            check_form(found, callback.state_dict() if found else {}, callback.state_key)
    _check_optimizers(checkpoint["optimizer"], trainer.strategy.optimizers)
    step = progress[_PROGRESS]["optimizer"]["step"]["total"]["completed"]
    steps = {"global_step": checkpoint["global_step"], "the optimizer": step}
    # NeMo passes the path of the weights folder.
    folder = folder.parent if folder.name == WEIGHTS else folder
    if (folder / MANIFEST).is_file():
        steps["the manifest"] = read_manifest(folder).step
    if len(set(steps.values())) != 1:
        told = ", ".join(f"{name} says {value}" for name, value in steps.items())
        raise ValueError(f"its steps differ: {told}")


def check_form(found: Any, own: Any, place: str) -> None:
    """Checks that a saved value has the keys, lengths and types of the run's own value.

    If the run's own value is None, because it is not known yet, the saved value may be a number. If
    the run's own value is a float, the saved value may be an integer.

    Raises:
        ValueError: The keys, lengths or types differ.
    """
    if own is None:
        fits = found is None or type(found) in (bool, int, float)
    elif type(own) is float:
        fits = type(found) in (int, float)
    else:
        fits = type(found) is type(own)
    if not fits:
        raise ValueError(f"{place} is a {type(found).__name__}, not a {type(own).__name__}")
    if isinstance(own, dict):
        if found.keys() != own.keys():
            raise ValueError(f"{place} has other entries than this run's")
        for key in own:
            check_form(found[key], own[key], f"{place}.{key}")
    elif isinstance(own, list | tuple):
        if len(found) != len(own):
            raise ValueError(f"{place} has {len(found)} entries, not {len(own)}")
        for number, (its, ours) in enumerate(zip(found, own, strict=True)):
            check_form(its, ours, f"{place}.{number}")


def _check_optimizers(states: Any, optimizers: Any) -> None:
    """Checks the settings of the parameter groups, and that the step counts are numbers.

    The shapes of the optimizer's states were checked when the checkpoint was loaded.
    """
    found, own = list(_groups(states)), list(_groups([one.state_dict() for one in optimizers]))
    if len(found) != len(own):
        raise ValueError(f"its optimizer has {len(found)} groups of weights, not {len(own)}")
    for number, groups in enumerate(zip(found, own, strict=True)):
        its, ours = ({key: group[key] for key in group if key != "params"} for group in groups)
        check_form(its, ours, f"the optimizer's group {number}")
    for step in _values_of(states, "common_step") + _values_of(states, "step"):
        is_number = isinstance(step, torch.Tensor) and step.dim() == 0 and not step.is_complex()
        if not is_number and type(step) not in (int, float):
            raise ValueError(f"the optimizer's step is a {type(step).__name__} that is no number")


def _groups(value: Any) -> Any:
    return [group for groups in _values_of(value, "param_groups") for group in groups]


def _values_of(value: Any, name: str) -> list[Any]:
    """Returns all values under a key, at any depth of dictionaries and lists."""
    if isinstance(value, dict):
        found = [value[name]] if name in value else []
        return found + [one for part in value.values() for one in _values_of(part, name)]
    if isinstance(value, list):
        return [one for part in value for one in _values_of(part, name)]
    return []
