"""Writes a model in the formats of other programs, and compares each file with the model."""

import contextlib
import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megakit.checkpoints.manifest import read_manifest
from megakit.errors import UserError

#: Inputs by name, and the `Dim` of each dynamic dimension by its number.
Example = Mapping[str, Tensor]
Dims = Mapping[str, Mapping[int, Any]]

#: Tolerance between the outputs of an exported model and of the model, as a share of the model's
#: largest output, or absolute if that is below 1. Another order of float32 additions changes small
#: outputs by as much as large ones.
TOLERANCE = 1e-5


def export_onnx(model: nn.Module, path: Path, example: Example, dims: Dims) -> None:
    """Writes an ONNX file with the names of the model's inputs and outputs.

    Raises:
        ValueError: onnxruntime computes other outputs from the file.
    """
    import onnxruntime

    outputs = list(_named(model(*example.values())))
    torch.onnx.export(
        model,
        tuple(example.values()),
        path,
        input_names=list(example),
        output_names=outputs,
        dynamic_shapes=tuple(dims.get(name) for name in example),
        dynamo=True,
        external_data=False,
        verbose=False,
    )
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])

    def run(*inputs: Tensor) -> dict[str, Any]:
        given = {name: tensor.numpy() for name, tensor in zip(example, inputs, strict=True)}
        return dict(zip(outputs, session.run(None, given), strict=True))

    compare(model, run, example, dims)


def export_program(model: nn.Module, path: Path, example: Example, dims: Dims) -> None:
    """Writes a program for `torch.export.load`.

    Raises:
        ValueError: The program computes other outputs.
    """
    # Not the `Dim` itself: torch rejects it where it cannot prove a condition for all sizes.
    shapes = tuple(dict.fromkeys(dims.get(name, {}), torch.export.Dim.DYNAMIC) for name in example)
    program = torch.export.export(model, tuple(example.values()), dynamic_shapes=shapes)
    with path.open("wb") as file:
        torch.export.save(program, file)
    with path.open("rb") as file:
        loaded = torch.export.load(file).module()
    compare(model, lambda *inputs: _named(loaded(*inputs)), example, dims)


def export_weights(model: nn.Module, path: Path, checkpoint: Path) -> None:
    """Writes the weights as safetensors, with the fields of the checkpoint's manifest as metadata.

    Raises:
        ValueError: The weights read back from the file differ.
    """
    from safetensors.torch import load_file, save

    facts: dict[str, Any] = {"model": type(model).__name__, "checkpoint": str(checkpoint)}
    with contextlib.suppress(UserError):  # checkpoints that NeMo wrote have no manifest
        facts |= dataclasses.asdict(read_manifest(checkpoint))
    texts = {key: v if isinstance(v, str) else json.dumps(v) for key, v in facts.items()}
    # Copies, because safetensors rejects tensors that share memory.
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    path.write_bytes(save(weights, texts))
    found = load_file(path)
    if any(not found[name].equal(weight) for name, weight in weights.items()):
        raise ValueError("the weights read back from the file differ.")


def _named(output: Any) -> dict[str, Any]:
    """Returns a model's outputs by name."""
    if isinstance(output, list | tuple):
        output = {f"output_{number}": tensor for number, tensor in enumerate(output)}
    return output if isinstance(output, dict) else {"output": output}


def compare(
    model: nn.Module, exported: Callable[..., dict[str, Any]], example: Example, dims: Dims
) -> None:
    """Compares an exported model with the model, for the example and for the least sizes.

    Raises:
        ValueError: The outputs differ by more than the tolerance.
    """
    least = dict(example)
    for name, sizes in dims.items():
        for axis, dim in sizes.items():
            least[name] = least[name].narrow(axis, 0, dim.min or 1)
    for inputs in (example.values(), least.values()):
        found = exported(*inputs)
        for name, tensor in _named(model(*inputs)).items():
            expected, other = tensor.double(), torch.as_tensor(found[name]).double()
            allowed = TOLERANCE * max(1.0, expected.nan_to_num(0, 0, 0).abs().max().item())
            is_close = other.shape == expected.shape and torch.allclose(
                other, expected, rtol=0, atol=allowed
            )
            if not is_close:
                raise ValueError(f"{name}: the file's output differs by more than {allowed:.1e}.")
