"""Exports a model for programs without Megatron.

    python -m megakit.models.export CHECKPOINT --onnx model.onnx --input-shape 1,28,28

Run this command in the folder of `model_components.py`; for another module, give --components. The
method `export_inputs` of the model's config describes the inputs of the model. Without this method,
the input is one float32 tensor of --input-shape. Each file is written under a temporary name, read
back and compared with the model. Then it gets its name, and the name is printed. Exit status: 0
success; 1 a file's outputs differ from the model's, or a file cannot be written; 2 wrong options or
an unusable checkpoint.
"""

import argparse
import contextlib
import dataclasses
import importlib
import importlib.util
import io
import json
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megakit.checkpoints.manifest import read_manifest
from megakit.errors import UserError, reason_of
from megakit.models.import_weights import missing_module
from megakit.models.inference import load_for_inference
from megakit.runtime import use_accelerator

#: Inputs by name, and the `Dim` of each dynamic dimension by its number.
Example = Mapping[str, Tensor]
Dims = Mapping[str, Mapping[int, Any]]

#: Tolerance between the outputs of an exported model and of the model, as a share of the model's
#: largest output, or absolute if that is below 1. Another order of float32 additions changes small
#: outputs by as much as large ones.
TOLERANCE = 1e-5


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    options = _parser().parse_args(arguments)
    try:
        _check(options)
        with quiet():
            use_accelerator("cpu")
            importlib.import_module(options.components)
            model = load_for_inference(options.checkpoint)
        is_traced = options.onnx or options.torch_export or options.input_shape
        inputs = _inputs(model, options.input_shape) if is_traced else ({}, {})
    except UserError as error:
        for problem in error.problems:
            print(f"export: {problem}", file=sys.stderr)
        return 2
    writers: list[tuple[Path | None, Callable[[Path], None]]] = [
        (options.onnx, lambda path: export_onnx(model, path, *inputs)),
        (options.torch_export, lambda path: export_program(model, path, *inputs)),
        (options.safetensors, lambda path: export_weights(model, path, options.checkpoint)),
    ]
    # A format that fails does not stop the others.
    written = [_write(path, write) for path, write in writers if path]
    return 0 if all(written) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m megakit.models.export",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("checkpoint", metavar="CHECKPOINT", type=Path)
    add("--onnx", type=Path, metavar="FILE", help="for onnxruntime and the like")
    add("--torch-export", type=Path, metavar="FILE", help="for torch.export.load, as model.pt2")
    add("--safetensors", type=Path, metavar="FILE", help="the weights alone, by their names")
    help = "of one sample of the model's float32 input, without the batch, which comes first"
    add("--input-shape", type=_shape, metavar="N,N,...", help=help)
    help = "where the model's config is defined (%(default)s), found from the current folder"
    add("--components", default="model_components", metavar="MODULE", help=help)
    add("--force", action="store_true", help="replace files that exist")
    return parser


def _shape(text: str) -> tuple[int, ...]:
    return tuple(int(size) for size in text.split(","))


def _check(options: argparse.Namespace) -> None:
    """Raises a UserError with all problems of the options."""
    problems = missing_module(options.components)
    if not options.checkpoint.is_dir():
        problems.append(
            f"{options.checkpoint}: there is no such checkpoint. "
            "Name a folder such as runs/finetune/checkpoints/step=000500."
        )
    paths = [path for path in (options.onnx, options.torch_export, options.safetensors) if path]
    if not paths:
        problems.append("nothing to write; give --onnx, --torch-export or --safetensors FILE.")
    problems += [
        f"{path}: exists. Choose another name, or give --force."
        for path in paths
        if path.exists() and not options.force
    ]
    if len(set(paths)) < len(paths):
        problems.append("two formats with one FILE. Give each format a file of its own.")
    problems += [
        f"{path}: there is no folder {path.parent}. Create it, or choose another name."
        for path in paths
        if not path.parent.is_dir()
    ]
    if options.onnx and missing_module("onnxruntime"):
        problems.append("--onnx needs onnx, onnxscript and onnxruntime. Run ./run setup --dev.")
    if problems:
        raise UserError(problems)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hides warnings and what the frameworks print, on import and when an export fails."""
    logging.disable()
    with (
        contextlib.redirect_stderr(io.StringIO()),
        contextlib.redirect_stdout(io.StringIO()),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)


def _inputs(model: Any, shape: tuple[int, ...] | None) -> tuple[Example, Dims]:
    """Returns an example and the dynamic dimensions of the model's inputs.

    Raises:
        UserError: Neither the config nor --input-shape gives an input that the model accepts.
    """
    hook = f"{type(model.config).__name__}.export_inputs"
    hint = f"For another input than one float32 tensor, define {hook}."
    if shape is None and not hasattr(model.config, "export_inputs"):
        raise UserError(f"--input-shape is missing; for images of 28 x 28 pixels: 1,28,28. {hint}")
    try:
        if shape is None:
            example, dims = model.config.export_inputs()
        else:
            example = {"input": torch.rand(2, *shape)}
            dims = {"input": {0: torch.export.Dim("batch")}}
        model(*example.values())
    except Exception as error:  # models raise many classes for inputs that they do not take
        source = hook if shape is None else f"--input-shape {','.join(map(str, shape))}"
        takes_not = f"{type(model).__name__} does not take such a sample ({reason_of(error)})."
        raise UserError(f"{source}: {takes_not} {hint}") from error
    return example, dims


def _write(path: Path, write: Callable[[Path], None]) -> bool:
    """Writes a file under a temporary name and renames it; prints its path, or why it failed."""
    partial = path.with_name(f".partial-{path.name}")
    try:
        with quiet():
            write(partial)
        partial.replace(path)
    except Exception as error:  # torch raises many classes, for all that it cannot convert
        while isinstance(error.__cause__, Exception):
            error = error.__cause__
        print(f"export: {path} was not written: {reason_of(error)}", file=sys.stderr)
        return False
    finally:
        partial.unlink(missing_ok=True)
    print(path)
    return True


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


if __name__ == "__main__":
    sys.exit(main())
