"""Writes a plain model as ONNX, torch.export's program or safetensors, and checks the file."""

import contextlib
import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megakit.checkpoints.manifest import installed_versions, read_manifest
from megakit.errors import UserError
from megakit.models.model_inputs import ModelInput, dynamic_sizes, examples

if TYPE_CHECKING:
    import torch

#: Tolerance between the outputs of an exported model and of the model, as a share of the model's
#: largest output, or absolute if that is below 1. Another order of float32 additions changes small
#: outputs by as much as large ones.
TOLERANCE = 1e-5
#: The largest size of a dimension in a comparison, unless its least size is larger. The memory of
#: attention grows with the square of the sequence.
LARGEST_COMPARED = 1024


class ExportError(Exception):
    """The outputs of an exported file differ from the model's."""


def export_onnx(model: "torch.nn.Module", path: Path, *, inputs: Mapping[str, ModelInput]) -> None:
    """Writes an ONNX file with the names of the model's inputs and outputs.

    Raises:
        ExportError: onnxruntime computes other outputs from the file.
        Exception: torch's exporter cannot convert the model.
    """
    import onnxruntime
    import torch

    example = _example(inputs)
    outputs = named_outputs(model(*example))
    torch.onnx.export(
        model,
        example,
        path,
        input_names=list(inputs),
        output_names=list(outputs),
        dynamic_shapes=_dynamic_shapes(inputs),
        dynamo=True,
        external_data=False,
        verbose=False,
    )
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])

    def run(*tensors: "torch.Tensor") -> dict[str, Any]:
        given = {name: tensor.numpy() for name, tensor in zip(inputs, tensors, strict=True)}
        return dict(zip(outputs, session.run(None, given), strict=True))

    compare(model, run, inputs)


def export_program(
    model: "torch.nn.Module", path: Path, *, inputs: Mapping[str, ModelInput]
) -> None:
    """Writes a program for `torch.export.load`.

    Raises:
        ExportError: The program computes other outputs.
        Exception: torch cannot trace the model.
    """
    import torch

    shapes = _dynamic_shapes(inputs)
    program = torch.export.export(model, _example(inputs), dynamic_shapes=shapes)
    with path.open("wb") as file:
        torch.export.save(program, file)
    with path.open("rb") as file:
        loaded = torch.export.load(file).module()
    compare(model, lambda *tensors: named_outputs(loaded(*tensors)), inputs)


def export_weights(model: "torch.nn.Module", path: Path, *, checkpoint: Path) -> None:
    """Writes the weights as safetensors, with facts of the checkpoint's manifest as metadata.

    Raises:
        ExportError: The weights read back from the file differ.
    """
    from safetensors.torch import load_file, save

    # Copies, because safetensors rejects tensors that share memory.
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    path.write_bytes(save(weights, _metadata(model, checkpoint)))
    found = load_file(path)
    if any(not found[name].equal(weight) for name, weight in weights.items()):
        raise ExportError("the weights read back from the file differ.")


def _metadata(model: "torch.nn.Module", checkpoint: Path) -> dict[str, str]:
    """Returns the metadata as strings, as safetensors requires; other values become JSON."""
    facts: dict[str, Any] = {"versions": installed_versions()}
    with contextlib.suppress(UserError):  # checkpoints that NeMo wrote have no manifest
        manifest = dataclasses.asdict(read_manifest(checkpoint))
        facts = {name: manifest[name] for name in ("stage", "dataset", "step", "val_loss", "run")}
        facts["versions"] = manifest["versions"]
    told = {"model": type(model).__name__, "checkpoint": str(checkpoint)} | facts
    return {key: v if isinstance(v, str) else json.dumps(v) for key, v in told.items()}


def _example(inputs: Mapping[str, ModelInput]) -> tuple["torch.Tensor", ...]:
    """Returns the inputs of the traced call.

    torch.export treats a dimension of size 1 as a constant. Each size occurs once, so that torch
    cannot treat two dimensions as one.
    """
    sizes = {}
    for number, (name, (least, most)) in enumerate(dynamic_sizes(inputs).items()):
        size = max(least, 2 + number)
        sizes[name] = size if most is None else min(size, most)
    return examples(inputs, sizes)


def _dynamic_shapes(inputs: Mapping[str, ModelInput]) -> tuple[dict[int, Any], ...]:
    from torch.export import Dim

    dims = {
        name: Dim(name, min=least, max=most)
        for name, (least, most) in dynamic_sizes(inputs).items()
    }
    return tuple(
        {axis: dims[name] for axis, name in enumerate(given.sizes) if name in dims}
        for given in inputs.values()
    )


def named_outputs(output: Any) -> dict[str, "torch.Tensor"]:
    """Returns a model's outputs by name.

    Raises:
        ExportError: The model returns something other than tensors.
    """
    import torch

    outputs = {"output": output}
    if isinstance(output, dict):
        outputs = {str(name): tensor for name, tensor in output.items()}
    if isinstance(output, list | tuple):
        outputs = {f"output_{number}": tensor for number, tensor in enumerate(output)}
    if wrong := [name for name, tensor in outputs.items() if not torch.is_tensor(tensor)]:
        kinds = ", ".join(f"{name} ({type(outputs[name]).__name__})" for name in wrong)
        raise ExportError(f"the model's {kinds} is not a tensor. Return tensors from its forward.")
    return outputs


def compare(
    model: "torch.nn.Module",
    exported: Callable[..., dict[str, Any]],
    inputs: Mapping[str, ModelInput],
) -> None:
    """Compares an exported model with the model, for the least and the most of all sizes.

    Raises:
        ExportError: The outputs differ by more than the tolerance.
    """
    import torch

    for sizes in _compared_sizes(inputs):
        example = examples(inputs, sizes)
        found = exported(*example)
        for name, tensor in named_outputs(model(*example)).items():
            expected, other = tensor.double(), torch.as_tensor(found[name]).double()
            finite = expected[expected.isfinite()].abs()
            largest = finite.max().item() if finite.numel() else 0.0
            allowed = TOLERANCE * max(1.0, largest)
            if other.shape != expected.shape:
                raise ExportError(
                    f"{name}: the exported model's output has the shape {tuple(other.shape)}, the "
                    f"model's {tuple(expected.shape)}."
                )
            if not torch.allclose(other, expected, rtol=0, atol=allowed):
                difference = (other - expected).abs().nan_to_num(nan=0, posinf=math.inf).amax()
                raise ExportError(
                    f"{name}: the exported model's output differs from the model's by up to "
                    f"{difference:.1e}. For outputs of up to {largest:.2g}, {allowed:.1e} is "
                    "allowed."
                )


def _compared_sizes(inputs: Mapping[str, ModelInput]) -> Iterator[dict[str, int]]:
    """Yields all combinations of the least and the most size of each dynamic dimension."""
    ranges = dynamic_sizes(inputs)
    choices = [
        (least, least + 4 if most is None else max(least, min(most, LARGEST_COMPARED)))
        for least, most in ranges.values()
    ]
    for sizes in itertools.product(*choices):
        yield dict(zip(ranges, sizes, strict=True))
