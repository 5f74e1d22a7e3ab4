"""Finds the weights whose first gradients differ between two trainings.

After one step, Adam's first moment is the gradient, up to a factor that all weights share. A
checkpoint of Megatron has it as a whole tensor, under any layout.
"""

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megakit.errors import UserError, reading

MOMENT = "exp_avg."
#: In the name of a weight of all layers; otherwise, the layer's number follows.
STACKED = re.compile(r"\blayers\.(?!\d)")
#: The largest relative difference of a gradient that rounding explains in float32.
LIMIT = 1e-4
#: Options of the repeated step, which replace those of the run.
STOCK = "MEGAKIT_STOCK=1"
ONE_STEP = ("--max-steps", "1", "--save-interval", "1", "--precision", "32", "--fresh")


class Difference(NamedTuple):
    """How a gradient differs from that of the other training, without the common factor.

    Attributes:
        weight: Name of the weight.
        relative: Norm of the difference, divided by the norm of the first gradient.
        ratio: Norm of the second gradient, divided by the norm of the first.
    """

    weight: str
    relative: float
    ratio: float


def find_checkpoint(path: Path, folder: Path) -> Path:
    """Returns a checkpoint of step 1: the path itself, or one that the run writes anew.

    Args:
        path: A checkpoint of step 1, or a run directory, whose first step is repeated in float32.
        folder: For the repeated step.

    Raises:
        UserError: The path is neither, or the repeated step fails.
    """
    for weights in (path, path / "weights", path / "iter_0000001"):  # the last is Megatron-LM's
        if (weights / ".metadata").is_file():
            return weights
    log = path / "log.txt"
    with reading(log, "Name a run directory, or a checkpoint of step 1."):
        first, _, command = log.read_text().partition("\n")[0].partition("command: ")
    if first or not command:
        raise UserError(f"{log}: does not begin with a command. Name a checkpoint of step 1.")
    path = path.resolve()
    for other in path.parent.iterdir():  # the stage that the run may have started from
        if other.is_dir() and other != path:
            (folder / other.name).symlink_to(other)
    words = [sys.executable, *shlex.split(command), *ONE_STEP, "--output-dir", str(folder)]
    words.sort(key=STOCK.__ne__)  # `env` reads it, in front of the command
    done = subprocess.run(["env", *words], capture_output=True, text=True)
    found = [*(folder / path.name).glob("checkpoints/step=*1/weights")]
    if done.returncode or len(found) != 1:
        raise UserError(f"{path}: its first step cannot be repeated. {done.stderr.strip()}")
    return found[0]


def read_gradients(checkpoint: Path) -> dict[str, Tensor]:
    """Reads the first moments of a checkpoint, by the names of the weights, from last to first."""
    from megakit.runtime import use_megatron

    use_megatron("cpu")  # the description of a checkpoint has a class of Megatron's
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    reader = FileSystemReader(checkpoint)
    described: dict[str, Any] = reader.read_metadata().state_dict_metadata
    state: dict[str, Any] = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in described.items()
        if MOMENT in name and hasattr(entry, "size")
    }
    load(state, storage_reader=reader, no_dist=True)
    moments = {name.partition(MOMENT)[2]: moment.double() for name, moment in state.items()}
    # The order of the model, in which the description lists the weights of each rank.
    parts = [*dict.fromkeys(name.rpartition(".")[0] for name in described if name in moments)]
    places = {name: (parts.index(name.rpartition(".")[0]), 0, 0) for name in moments}
    # Megatron's transformers save a weight of all layers as one tensor.
    stacked = [name for name in moments if STACKED.search(name)]
    first = min((places[name][0] for name in stacked), default=0)
    for name in stacked:
        for number, part in enumerate(moments.pop(name)):
            new = STACKED.sub(f"layers.{number}.", name)
            moments[new], places[new] = part, (first, number, places[name][0])
    return dict(sorted(moments.items(), key=lambda one: places[one[0]], reverse=True))


def compare_gradients(
    first: dict[str, Tensor], second: dict[str, Tensor]
) -> tuple[float, list[Difference]]:
    """Returns the common factor of the norms, and the difference of each gradient without it.

    Clipping by the norm multiplies all gradients, so the factor is the most frequent ratio, if it
    is more frequent than by chance, and else 1.

    Raises:
        UserError: The trainings have other weights.
    """
    shapes = [{name: moment.shape for name, moment in one.items()} for one in (first, second)]
    if shapes[0] != shapes[1] or not first:
        other = sorted({name for name, _ in shapes[0].items() ^ shapes[1].items()})
        raise UserError(f"other weights: {', '.join(other) or 'none'}. Compare equal models.")
    ratios = {
        name: float(second[name].norm() / moment.norm().clamp_min(1e-300))
        for name, moment in first.items()
    }
    found = [*ratios.values()]
    count, factor = max((sum(abs(one - x) <= LIMIT * x for x in found), one) for one in found)
    factor = factor if factor and count >= max(2, len(found) / 10) else 1.0
    return factor, [
        Difference(
            name,
            float((moment - second[name] / factor).norm() / moment.norm().clamp_min(1e-300)),
            ratios[name] / factor,
        )
        for name, moment in first.items()
    ]


def in_lines(factor: float, found: list[Difference]) -> Iterator[str]:
    """Yields the differences in words, from the last weight of the model to the first."""
    if abs(factor - 1) > LIMIT:
        same = sum(abs(one.ratio - 1) <= LIMIT for one in found)
        if same >= 0.9 * len(found):
            yield f"All gradients have {factor:.6g} times the norm."
        else:
            yield f"{same} gradients have {factor:.6g} times the norm; others are relative to it."
    beyond = [one for one in found if not one.relative <= LIMIT]
    if beyond:
        yield "Gradients of step 1, from the last layer to the first:"
        width = max(len(one.weight) for one in beyond) + 2
        yield f"{'weight':{width}}difference     norm"
        for one in beyond:
            yield f"{one.weight:{width}}{one.relative:10.1e}  x {one.ratio:.6g}"
    others = [one.relative for one in found if one.relative <= LIMIT]
    if others:
        rest = "The gradients of all other" if beyond else "The first gradients of all"
        yield f"{rest} {len(others)} weights agree within {max(others):.1e}."
    if not beyond:
        yield "Look for what comes after them: the optimizer, the learning rate, later samples, the"
        yield "validation; if these trainings do not clip, clipping: compare them with it, too."
