"""Exports a model for programs without Megatron.

    python -m megakit.models.export CHECKPOINT --onnx model.onnx --input-shape 1,28,28

Run this command in the folder of `model_components.py`; for another module, give --components. Each
file is written under a temporary name, read back and compared with the model. Then it gets its
name, and the name is printed. Exit status: 0 success; 1 a file's outputs differ from the model's,
or a file cannot be written; 2 wrong options or an unusable checkpoint.
"""

import argparse
import contextlib
import dataclasses
import importlib
import importlib.util
import io
import json
import math
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megakit.checkpoints.manifest import read_manifest
from megakit.errors import UserError
from megakit.runtime import installed_versions

if TYPE_CHECKING:
    import torch

#: Packages that each format needs besides torch.
PACKAGES = {"onnx": ("onnx", "onnxscript", "onnxruntime"), "safetensors": ("safetensors",)}
#: Tolerance between the outputs of an exported model and of the model, as a share of the model's
#: largest output, or absolute if that is below 1. Another order of float32 additions changes small
#: outputs by as much as large ones.
TOLERANCE = 1e-5


class ExportError(Exception):
    """The outputs of an exported file differ from the model's."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    options = _parser().parse_args(arguments)
    try:
        targets = _check(options)
        # Hides the frameworks' messages on import.
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            model = _load(options)
        if options.input_shape is not None:
            _check_input_shape(model, options)
    except UserError as error:
        for problem in error.problems:
            print(f"export: {problem}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"export: {error}", file=sys.stderr)
        return 1
    # A format that fails does not stop the others.
    written = [_succeeds(partial(export, model, options=options), path) for export, path in targets]
    return 0 if all(written) else 1


def _succeeds(write: Callable[[Path], None], path: Path) -> bool:
    """Writes a file, and prints its path or why it was not written; returns whether it was."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _write(path, write)
    except (ExportError, OSError) as error:
        print(f"export: {path} was not written: {error}", file=sys.stderr)
        return False
    print(path)
    return True


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
    sizes = tuple(int(size) for size in text.split(","))
    if min(sizes) < 1:
        raise ValueError(text)
    return sizes


def _check(options: argparse.Namespace) -> list[tuple[Callable[..., None], Path]]:
    """Checks the options, before any import or output; returns the export functions and paths.

    Raises:
        UserError: Options cannot be used; the error lists all problems.
    """
    formats = {
        "onnx": (export_onnx, options.onnx),
        "torch-export": (export_program, options.torch_export),
        "safetensors": (export_weights, options.safetensors),
    }
    wanted = {name: target for name, target in formats.items() if target[1] is not None}
    problems = []
    if not options.checkpoint.is_dir():
        problems.append(
            f"{options.checkpoint}: there is no such checkpoint. "
            "Name a folder such as runs/finetune/checkpoints/step=000500."
        )
    if not wanted:
        problems.append("nothing to write; give --onnx, --torch-export or --safetensors FILE.")
    problems += missing_module(options.components)
    if wanted.keys() & {"onnx", "torch-export"} and options.input_shape is None:
        problems.append("--input-shape is missing; for images of 28 x 28 pixels: 1,28,28.")
    paths = [path.absolute() for _, path in wanted.values()]
    for name, (_, path) in wanted.items():
        if paths.count(path.absolute()) > 1:
            problems.append(f"--{name} {path}: named twice. Use another file for each format.")
        elif path.is_dir() or (path.exists() and not options.force):
            problems.append(f"--{name} {path}: exists. Choose another name, or give --force.")
        elif not path.parent.is_dir():
            problems.append(f"--{name} {path}: there is no folder {path.parent}. Make it first.")
        absent = [package for package in PACKAGES.get(name, ()) if not _is_importable(package)]
        if absent:
            problems.append(
                f"--{name} needs {', '.join(absent)}: ./run setup export installs what it needs; "
                "elsewhere, install it with pip."
            )
    if problems:
        raise UserError(problems)
    return list(wanted.values())


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


def _check_input_shape(model: "torch.nn.Module", options: argparse.Namespace) -> None:
    try:
        model(_example(options))
    except RuntimeError as error:
        raise UserError(
            f"--input-shape {','.join(map(str, options.input_shape))}: {type(model).__name__} does "
            f"not take such a sample ({str(error).splitlines()[0]})."
        ) from error


def _write(path: Path, write: Callable[[Path], None]) -> None:
    """Writes a file under a temporary name, and renames it after `write` has succeeded."""
    partial_path = path.with_name(f".partial-{path.name}")
    try:
        write(partial_path)
        partial_path.replace(path)
    finally:
        partial_path.unlink(missing_ok=True)


def export_onnx(model: "torch.nn.Module", path: Path, options: argparse.Namespace) -> None:
    """Writes an ONNX file for batches of any size, with the names of the model's outputs.

    Raises:
        ExportError: onnxruntime computes other outputs from the file.
    """
    import onnxruntime
    import torch

    outputs = _named(model(_example(options)))
    torch.onnx.export(
        model,
        (_example(options),),
        path,
        input_names=["input"],
        output_names=list(outputs),
        dynamic_shapes=({0: "batch"},),
        dynamo=True,
        external_data=False,
        verbose=False,
    )
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])

    def run(example: "torch.Tensor") -> dict[str, Any]:
        return dict(zip(outputs, session.run(None, {"input": example.numpy()}), strict=True))

    _compare(model, run, options)


def export_program(model: "torch.nn.Module", path: Path, options: argparse.Namespace) -> None:
    """Writes a program for `torch.export.load`, for batches of any size.

    Raises:
        ExportError: The program computes other outputs.
    """
    import torch

    batch = torch.export.Dim("batch")
    program = torch.export.export(model, (_example(options),), dynamic_shapes=({0: batch},))
    with path.open("wb") as file:
        torch.export.save(program, file)
    with path.open("rb") as file:
        loaded = torch.export.load(file).module()
    _compare(model, lambda example: _named(loaded(example)), options)


def export_weights(model: "torch.nn.Module", path: Path, options: argparse.Namespace) -> None:
    """Writes the weights as safetensors, with facts of the checkpoint's manifest as metadata.

    Raises:
        ExportError: The weights read back from the file differ.
    """
    from safetensors.torch import load_file, save

    # Copies, because safetensors rejects tensors that share memory.
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    path.write_bytes(save(weights, _metadata(model, options.checkpoint)))
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


def _example(options: argparse.Namespace, size: int = 2) -> "torch.Tensor":
    """Returns a random batch in [0, 1). To export, torch needs at least 2 samples.

    torch.export treats a batch dimension of 1 as a constant.
    """
    import torch

    generator = torch.Generator().manual_seed(size)
    return torch.rand(size, *options.input_shape, generator=generator)


def _named(output: Any) -> dict[str, "torch.Tensor"]:
    if isinstance(output, dict):
        return {str(name): tensor for name, tensor in output.items()}
    if isinstance(output, list | tuple):
        return {f"output_{number}": tensor for number, tensor in enumerate(output)}
    return {"output": output}


def _compare(
    model: "torch.nn.Module",
    exported: Callable[["torch.Tensor"], dict[str, Any]],
    options: argparse.Namespace,
) -> None:
    import torch

    for size in (1, 5):
        example = _example(options, size)
        found = exported(example)
        for name, tensor in _named(model(example)).items():
            expected, other = tensor.double(), torch.as_tensor(found[name]).double()
            finite = expected[expected.isfinite()].abs()
            largest = finite.max().item() if finite.numel() else 0.0
            allowed = TOLERANCE * max(1.0, largest)
            if not torch.allclose(other, expected, rtol=0, atol=allowed):
                difference = (other - expected).abs().nan_to_num(nan=0, posinf=math.inf).amax()
                raise ExportError(
                    f"{name}: the exported model's output differs from the model's by up to "
                    f"{difference:.1e}. For outputs of up to {largest:.2g}, {allowed:.1e} is "
                    "allowed."
                )


if __name__ == "__main__":
    sys.exit(main())
