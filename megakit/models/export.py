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
import importlib
import importlib.util
import inspect
import io
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from megakit.errors import UserError
from megakit.models.exporters import ExportError, export_onnx, export_program, export_weights
from megakit.models.model_inputs import (
    ModelInput,
    described_inputs,
    dynamic_sizes,
    examples,
    sample_input,
)

if TYPE_CHECKING:
    import torch

#: Packages that each format needs besides torch.
PACKAGES = {"onnx": ("onnx", "onnxscript", "onnxruntime"), "safetensors": ("safetensors",)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    options = _parser().parse_args(arguments)
    try:
        paths = _check(options)
        with _quiet():
            model = _load(options)
        inputs: dict[str, ModelInput] = {}
        if paths.keys() - {"safetensors"} or options.input_shape is not None:
            inputs = _inputs(model, options)
    except UserError as error:
        for problem in error.problems:
            print(f"export: {problem}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"export: {error}", file=sys.stderr)
        return 1
    write = {
        "onnx": partial(export_onnx, model, inputs=inputs),
        "torch-export": partial(export_program, model, inputs=inputs),
        "safetensors": partial(export_weights, model, checkpoint=options.checkpoint),
    }
    # A format that fails does not stop the others.
    written = [_succeeds(model, write[name], path) for name, path in paths.items()]
    return 0 if all(written) else 1


def _succeeds(model: "torch.nn.Module", write: Callable[[Path], None], path: Path) -> bool:
    """Writes a file, and prints its path or why it was not written; returns whether it was."""
    try:
        with _quiet():
            _write(path, write)
    except (ExportError, OSError) as error:
        print(f"export: {path} was not written: {error}", file=sys.stderr)
        return False
    except Exception as error:  # the exporters raise many classes, for all that they cannot convert
        print(f"export: {path} was not written: {_reason(error, model)}", file=sys.stderr)
        return False
    print(path)
    return True


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hides warnings and what the frameworks print, on import and when an export fails."""
    with (
        contextlib.redirect_stderr(io.StringIO()),
        contextlib.redirect_stdout(io.StringIO()),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        yield


def _reason(error: BaseException, model: "torch.nn.Module") -> str:
    """Returns the first line of the error that caused an error, and the line of `forward`."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    file = inspect.getfile(type(model).forward)
    places = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == file]
    where = f", at {Path(file).name}:{places[-1].lineno}" if places else ""
    return f"{': '.join([type(error).__name__, *lines[:1]])}{where}"


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
    help = (
        "of one sample of the model's float32 input, without the batch, which comes first; "
        "not for a config that describes the model's inputs"
    )
    add("--input-shape", type=_shape, metavar="N,N,...", help=help)
    help = "where the model's config is defined (%(default)s), found from the current folder"
    add("--components", default="model_components", metavar="MODULE", help=help)
    add("--force", action="store_true", help="replace files that exist")
    return parser


def _shape(text: str) -> tuple[int, ...]:
    sizes = tuple(int(size) for size in text.split(","))
    if min(sizes) < 1:
        raise ValueError(text)
    return sizes


def _check(options: argparse.Namespace) -> dict[str, Path]:
    """Checks the options, before any import or output; returns the files by format.

    Raises:
        UserError: Options cannot be used; the error lists all problems.
    """
    formats = {
        "onnx": options.onnx,
        "torch-export": options.torch_export,
        "safetensors": options.safetensors,
    }
    wanted: dict[str, Path] = {name: path for name, path in formats.items() if path is not None}
    problems = []
    if not options.checkpoint.is_dir():
        problems.append(
            f"{options.checkpoint}: there is no such checkpoint. "
            "Name a folder such as runs/finetune/checkpoints/step=000500."
        )
    if not wanted:
        problems.append("nothing to write; give --onnx, --torch-export or --safetensors FILE.")
    problems += missing_module(options.components)
    paths = [path.absolute() for path in wanted.values()]
    for name, path in wanted.items():
        if paths.count(path.absolute()) > 1:
            problems.append(f"--{name} {path}: named twice. Use another file for each format.")
        elif path.is_dir() or (path.exists() and not options.force):
            problems.append(f"--{name} {path}: exists. Choose another name, or give --force.")
        elif not path.parent.is_dir():
            problems.append(f"--{name} {path}: there is no folder {path.parent}. Make it first.")
        absent = [package for package in PACKAGES.get(name, ()) if not _is_importable(package)]
        if absent:
            problems.append(
                f"--{name} needs {', '.join(absent)}: ./run setup --dev installs what it needs; "
                "elsewhere, install it with pip."
            )
    if problems:
        raise UserError(problems)
    return wanted


def missing_module(components: str) -> list[str]:
    """Returns a message if the module that `--components` names does not exist."""
    if _is_importable(components):
        return []
    return [
        f"--components {components}: there is no such module in {Path.cwd()}. Run this in the "
        "folder of the module that defines the model's config, or name another."
    ]


def _is_importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # the parent package is missing; the name is invalid
        return False


def _load(options: argparse.Namespace) -> "torch.nn.Module":
    from megakit.runtime import use_accelerator

    use_accelerator("cpu")
    importlib.import_module(options.components)
    from megakit.models.inference import load_for_inference

    return load_for_inference(options.checkpoint)


def _inputs(model: "torch.nn.Module", options: argparse.Namespace) -> dict[str, ModelInput]:
    """Returns the model's inputs, as its config describes them or of --input-shape.

    Raises:
        UserError: They are not described, or the model does not take them.
    """
    described, shape = described_inputs(model), options.input_shape
    hook = f"{type(model.config).__name__}.export_inputs"
    hint = f"For another input than one float32 tensor, define {hook}."
    if described is None and shape is None:
        raise UserError(f"--input-shape is missing; for images of 28 x 28 pixels: 1,28,28. {hint}")
    if described is not None and shape is not None:
        raise UserError(f"--input-shape: {hook} describes the input. Leave out this option.")
    inputs = described or sample_input(shape)
    try:
        model(
            *examples(inputs, {name: least for name, (least, _) in dynamic_sizes(inputs).items()})
        )
    except Exception as error:  # models raise many classes for inputs that they do not take
        takes_not = f"{type(model).__name__} does not take such a sample ({_reason(error, model)})."
        if described:
            raise UserError(f"{hook}: {takes_not}") from error
        given = ",".join(map(str, shape))
        raise UserError(f"--input-shape {given}: {takes_not} {hint}") from error
    return inputs


def _write(path: Path, write: Callable[[Path], None]) -> None:
    """Writes a file under a temporary name, and renames it after `write` has succeeded."""
    partial_path = path.with_name(f".partial-{path.name}")
    try:
        write(partial_path)
        partial_path.replace(path)
    finally:
        partial_path.unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main())
