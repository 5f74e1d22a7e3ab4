"""Checks what a checkpoint brings into a run that goes on, before any of it is used.

Lightning and torch restore loops and schedulers by copying the saved attributes as they are. A
value of another type fails many steps later, in a place that says nothing of the checkpoint.
"""

from pathlib import Path
from typing import Any

import torch

from megakit.checkpoints.folders import MANIFEST, WEIGHTS
from megakit.checkpoints.manifest import read_manifest
from megakit.models.finite import check_finite

_PROGRESS = "epoch_loop.automatic_optimization.optim_progress"


def check_restored(checkpoint: Any, folder: Path, trainer: Any) -> None:
    """Compares what was read from a checkpoint with the state of the run that goes on.

    Args:
        checkpoint: What NeMo's strategy returned for a fit.
        folder: The checkpoint's. Without a manifest in it, the step is not compared.
        trainer: Of the run, set up but not yet restored.

    Raises:
        ValueError: Something is missing, has another type, or contradicts the manifest.
        KeyError: Something is missing.
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
        # Other people's callbacks may save another form each time.
        if type(callback).__module__.startswith("megakit."):
            found = checkpoint["callbacks"].get(callback.state_key, {})
            check_form(found, callback.state_dict() if found else {}, callback.state_key)
    _check_optimizers(checkpoint["optimizer"], trainer.strategy.optimizers)
    step = progress[_PROGRESS]["optimizer"]["step"]["total"]["completed"]
    steps = {"global_step": checkpoint["global_step"], "the optimizer": step}
    folder = folder.parent if folder.name == WEIGHTS else folder  # NeMo names the weights' folder
    if (folder / MANIFEST).is_file():
        steps["the manifest"] = read_manifest(folder).step
    if len(set(steps.values())) != 1:
        told = ", ".join(f"{name} says {value}" for name, value in steps.items())
        raise ValueError(f"its steps differ: {told}")


def check_form(found: Any, own: Any, place: str) -> None:
    """Compares a saved value with the run's own by keys, lengths and types.

    Raises:
        ValueError: They differ. None and numbers may stand for each other: a value that is not
            known yet is None. An integer does for a float.
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
    """Compares the settings of the groups of weights; the states themselves have checked shapes."""
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
    """All values under a name, anywhere in dictionaries and lists."""
    if isinstance(value, dict):
        found = [value[name]] if name in value else []
        return found + [one for part in value.values() for one in _values_of(part, name)]
    if isinstance(value, list):
        return [one for part in value for one in _values_of(part, name)]
    return []
