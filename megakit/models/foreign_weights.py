"""Reads the weights of another program, and copies them into a model under the model's names."""

import contextlib
import pickle
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from megakit.errors import UserError, brief, reading
from megakit.models.renaming import Assignment, assign
from megakit.runtime.foreign_files import regular_file_size

#: The entry with the weights in a Lightning checkpoint.
LIGHTNING_KEY = "state_dict"
RENAME = (
    "Rename tensors or modules with --map OLD=NEW (in Python: names={OLD: NEW}), and leave them "
    "out with --skip NAME (in Python: skip=[NAME])."
)
OTHER_SIZES = "For a model of other sizes, give --set FIELD=VALUE (in Python: another config)."


def read_weights(path: Path) -> dict[str, Tensor]:
    """Reads a state dict on the CPU, from a safetensors file or a file of `torch.save`.

    The suffix `.safetensors` selects the format. torch's restricted unpickler reads all other
    files. It builds tensors and plain values only. Classes that libraries have registered with
    torch are not available to the file.

    Raises:
        UserError: The file cannot be read, needs other classes, or has no state dict: see
            `find_state_dict`.
    """
    remedy = (
        "Give a safetensors file, or a file of torch.save(model.state_dict(), FILE) without other "
        "objects."
    )
    with reading(path, remedy):
        regular_file_size(path, sys.maxsize)  # opening a FIFO would wait
        if path.suffix == ".safetensors":
            return load_file(path)
        try:
            with _without_registered_classes():
                content = torch.load(path, map_location="cpu", weights_only=True)
        except (pickle.UnpicklingError, RuntimeError) as error:
            raise ValueError(_reason(str(error))) from error
        return find_state_dict(content)


def _reason(message: str) -> str:
    """Returns why torch refuses a file; torch's messages advise to let the file run code."""
    if named := re.search(r"GLOBAL (\S+)", message):
        return f"it needs {named[1][:200]}; only tensors and plain values are read"
    if "TorchScript" in message:
        return "it is a TorchScript program"
    return "it is damaged, or torch.save did not write it"


@contextlib.contextmanager
def _without_registered_classes() -> Iterator[None]:
    """Hides the classes that NeMo, Megatron and others have registered with torch's unpickler."""
    registered = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    try:
        yield
    finally:
        torch.serialization.add_safe_globals(registered)


def find_state_dict(content: Any) -> dict[str, Tensor]:
    """Returns the tensors by name: the content itself, its `state_dict`, or its only state dict.

    A checkpoint of Lightning has other entries than `state_dict`, such as the optimizer's state.
    These entries are left out, and so are entries of the state dict that are no tensors, such as a
    step.

    Raises:
        ValueError: The content has no state dict, or several.
    """
    if not isinstance(content, Mapping):
        raise ValueError(f"it is a {type(content).__name__} instead of a state dict")
    nested = {key: value for key, value in content.items() if _is_state_dict(value)}
    found = content if _is_state_dict(content) else nested.get(LIGHTNING_KEY)
    if found is None and len(nested) == 1:
        (found,) = nested.values()
    if found is None:
        keys = brief(", ".join(map(str, nested or content)))
        raise ValueError(f"it has {len(nested)} state dicts instead of one; its entries: {keys}")
    return {name: value for name, value in found.items() if isinstance(value, Tensor)}


def _is_state_dict(value: Any) -> bool:
    """Tells whether a value contains tensors by name, and no further dictionaries with content."""
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        return False
    has_tensors = any(isinstance(one, Tensor) for one in value.values())
    return has_tensors and not any(isinstance(one, Mapping) and one for one in value.values())


def copy_weights(
    model: nn.Module,
    weights: Mapping[str, Tensor],
    rules: Mapping[str, str],
    skip: Collection[str],
) -> list[str]:
    """Copies weights into a model on the CPU; each weight needs a counterpart on the other side.

    Numbers are converted to the model's type: float16 and bfloat16 to float32 without a change,
    float64 with rounding. Integers must have the model's type.

    Args:
        model: The model; its weights are undefined after an error.
        weights: The tensors by name.
        rules: New names by old names: see `assign`.
        skip: Names of tensors and modules to leave out.

    Returns:
        Remarks for the user: about a removed prefix, and about rounded numbers.

    Raises:
        UserError: Tensors are missing, left over, or of another shape or type; or a number is NaN
            or infinite. The error has one table of all problems.
    """
    targets = {
        name: value
        for name, value in model.state_dict(keep_vars=True).items()
        if isinstance(value, Tensor)  # Megatron's layers also have None
    }
    found = assign(weights, targets, rules, skip)
    pairs = {name: weights[source[0]].detach() for name, source in found.sources.items()}
    misfits = {name: _misfit(targets[name], weight) for name, weight in pairs.items()}
    misfits |= {
        name: f"given by {' and '.join(map(brief, sources))}"
        for name, sources in found.sources.items()
        if len(sources) > 1
    }
    copied = {name: weight.cpu() for name, weight in pairs.items() if not misfits[name]}
    with torch.no_grad():
        for name, weight in copied.items():
            targets[name].copy_(weight)
        misfits |= {name: _damage(targets[name], weight) for name, weight in copied.items()}
    table = _table(targets, weights, found, misfits)
    if table:
        head = f"the tensors do not fit {type(model).__name__}:"
        if table == found.problems:
            head = "the names in the options are wrong:"
        raise UserError("\n".join([head, *table]))
    remarks = []
    if found.prefix:
        remarks.append(f"the prefix {brief(found.prefix)} was removed from the names.")
    rounded = [name for name in copied if not targets[name].double().equal(copied[name].double())]
    if rounded:
        remarks.append(
            f"the numbers of {len(rounded)} tensors were rounded to the model's type, for example "
            f"{rounded[0]} from {_name(pairs[rounded[0]])} to {_name(targets[rounded[0]])}."
        )
    return remarks


def _misfit(target: Tensor, weight: Tensor) -> str:
    """Returns why a tensor cannot be copied; "" if it can."""
    if type(weight) not in (Tensor, nn.Parameter) or weight.layout != torch.strided:
        return f"given as {type(weight).__name__} ({weight.layout}), not as a dense tensor"
    if weight.is_meta or weight.is_quantized:
        return "given as a meta or quantized tensor"
    is_float = target.is_floating_point() and weight.is_floating_point()
    if weight.shape != target.shape or not (is_float or weight.dtype == target.dtype):
        return f"{_described(target)} in the model, {_described(weight)} given"
    return ""


def _damage(target: Tensor, weight: Tensor) -> str:
    """Returns how copying changed the numbers of a tensor; "" if it did not."""
    converted = weight.to(target)
    if target.is_floating_point() and not converted.isfinite().all():
        return f"has numbers that are NaN or infinite in {_name(target)}"
    if not target.equal(converted):
        return "shared with another tensor of the model, for which other numbers are given"
    return ""


def _table(
    targets: Mapping[str, Tensor],
    weights: Mapping[str, Tensor],
    found: Assignment,
    misfits: Mapping[str, str],
) -> list[str]:
    """Returns a line for each missing, left-over or unfit tensor, and what to do about them."""
    # Of names that share a tensor in the model, one is enough.
    given = {id(targets[name]) for name in found.sources}
    missing = [name for name, value in targets.items() if id(value) not in given]
    rows = [
        *(("missing", name, _described(targets[name])) for name in missing),
        *(("left over", brief(name), _described(weights[name])) for name in found.left_over),
        *(("unfit", name, problem) for name, problem in misfits.items() if problem),
    ]
    width = max((len(name) for _, name, _ in rows), default=0)
    table = [
        f"  {kind:9}  {name:{width}}  {detail}" for kind, name, detail in rows
    ] + found.problems
    if missing or found.left_over:
        table.append(RENAME)
    if any(targets[name].shape != weights[one].shape for name, (one, *_) in found.sources.items()):
        table.append(OTHER_SIZES)
    return table


def _described(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {_name(tensor)}"


def _name(tensor: Tensor) -> str:
    """Returns the name of a tensor's data type."""
    return str(tensor.dtype).removeprefix("torch.")
