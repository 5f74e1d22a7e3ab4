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
import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from megakit.errors import UserError, reason_of
from megakit.models.export_formats import (
    Dims,
    Example,
    export_onnx,
    export_program,
    export_weights,
)
from megakit.models.import_weights import missing_module
from megakit.models.inference import load_for_inference, quiet
from megakit.runtime import use_accelerator


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


if __name__ == "__main__":
    sys.exit(main())
