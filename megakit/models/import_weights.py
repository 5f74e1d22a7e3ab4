"""Turns the weights of another program into a checkpoint that any layout loads.

    python -m megakit.models.import_weights weights.safetensors --config MyConfig --output DIR

WEIGHTS is a safetensors file or a file of torch.save. The latter contains a state dict, or a
dictionary with one, such as a Lightning checkpoint. WEIGHTS must have exactly the model's tensors,
after --map and --skip. Run this command in the folder of
`model_components.py`; for another module, give --components. The checkpoint is written under a
temporary name. Then it gets its name, and the name is printed. Exit status: 0 success; 1 the
checkpoint cannot be written; 2 wrong options or unusable weights.
"""

import argparse
import ast
import contextlib
import dataclasses
import gc
import hashlib
import importlib
import io
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megakit.checkpoints.manifest import IMPORTED, Manifest, installed_versions, step_in_name
from megakit.errors import UserError
from megakit.models.export import missing_module
from megakit.runtime import find_accelerator, use_accelerator

if TYPE_CHECKING:
    import torch

    from megakit.models.config import MegatronBioNeMoTrainableModelConfig as Config


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    options = _parser().parse_args(arguments)
    remarks: list[str] = []
    written, reason = None, ""
    try:
        _check(options)
        # Hides the frameworks' messages.
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            use_accelerator("cpu")
            try:
                written = checkpoint_from_weights(
                    options.weights,
                    _build_config(options),
                    options.output,
                    names=dict(options.map),
                    skip=options.skip,
                    report=remarks.append,
                )
            except OSError as error:
                reason = str(error)
            # After a failed write, torch's files print an error when they are deleted.
            gc.collect()
    except UserError as error:
        for problem in error.problems:
            print(f"import_weights: {problem}", file=sys.stderr)
        return 2
    if written is None:
        print(f"import_weights: {reason}", file=sys.stderr)
        return 1
    for remark in remarks:
        print(f"import_weights: {remark}", file=sys.stderr)
    print(written)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m megakit.models.import_weights",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("weights", metavar="WEIGHTS", type=Path, help="the file with the weights")
    add("--config", required=True, metavar="CLASS", help="the class of the model's config")
    add("--output", required=True, type=Path, metavar="DIR", help="the checkpoint to create")
    several: Any = {"nargs": "+", "action": "extend", "default": []}
    help = "rename a tensor, or all tensors of a module; an empty name is the whole model"
    add("--map", type=_pair, metavar="OLD=NEW", help=help, **several)
    add("--skip", metavar="NAME", help="leave out a tensor, or all tensors of a module", **several)
    help = "set fields of the config, such as hidden_size=128"
    add("--set", type=_pair, metavar="FIELD=VALUE", help=help, **several)
    help = "the module that defines the config (%(default)s), found from the current folder"
    add("--components", default="model_components", metavar="MODULE", help=help)
    return parser


def _pair(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not separator:
        raise ValueError(text)
    return name, value


def _check(options: argparse.Namespace) -> None:
    """Checks the options, before any import or output.

    Raises:
        UserError: Options cannot be used; the error lists all problems.
    """
    problems = missing_module(options.components) + _problems_of(options.output)
    if not options.weights.exists():
        problems.append(f"{options.weights}: there is no such file.")
    for option, pairs in (("--map", options.map), ("--set", options.set)):
        names = [name for name, _ in pairs]
        twice = sorted({name for name in names if names.count(name) > 1})
        problems += [f"{option} {name}: given twice. Choose one." for name in twice]
    if problems:
        raise UserError(problems)


def _problems_of(output: Path) -> list[str]:
    """Returns why a checkpoint cannot be created at a path."""
    if output.exists() or output.is_symlink():
        return [f"--output {output}: exists. Choose another name, or remove it first."]
    if not output.absolute().parent.is_dir():
        return [f"--output {output}: there is no folder {output.parent}. Make it first."]
    return []


def _build_config(options: argparse.Namespace) -> "Config":
    """Imports the components, and builds the config that the options name.

    Raises:
        UserError: There is no such class or field, or the class refuses the values.
    """
    module = importlib.import_module(options.components)
    from megakit.models.config import MegatronBioNeMoTrainableModelConfig

    classes = {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, MegatronBioNeMoTrainableModelConfig)
    }
    if options.config not in classes:
        raise UserError(
            f"--config {options.config}: {options.components} has no such class of a config. Its "
            f"classes are {', '.join(classes) or 'of other kinds'}."
        )
    cls = classes[options.config]
    fields = {field.name for field in dataclasses.fields(cls) if field.init}
    if unknown := [name for name, _ in options.set if name not in fields]:
        raise UserError(f"--set {', '.join(unknown)}: {options.config} has no such field.")
    classes_of = {f.name for f in dataclasses.fields(cls) if isinstance(f.default, type)}
    if refused := [name for name, _ in options.set if name in classes_of]:
        raise UserError(f"--set {', '.join(refused)}: is a class. Change the config in its module.")
    values = {name: _value(text) for name, text in options.set}
    try:
        config: Config = cls(**values)
    except (TypeError, ValueError, ArithmeticError, AssertionError) as error:
        raise UserError(f"--set: {options.config} refuses the values ({error}).") from error
    return config


def _value(text: str) -> Any:
    """Returns the number or other literal that a text is; otherwise the text."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _print_to_stderr(line: str) -> None:
    print(line, file=sys.stderr)


def checkpoint_from_weights(
    weights: "str | Path | Mapping[str, torch.Tensor]",
    config: "Config",
    output: str | Path,
    *,
    names: Mapping[str, str] | None = None,
    skip: Collection[str] = (),
    report: Callable[[str], None] = _print_to_stderr,
) -> Path:
    """Writes a checkpoint with the weights of another program, for any layout.

    The weights have to be exactly those of the model, with the names of
    `load_for_inference(...).state_dict()`. A prefix of all names, such as `module.`, is removed.
    Call this function in a process that is not a rank of a running job.

    Args:
        weights: A safetensors file, a file of `torch.save`, or a state dict.
        config: Builds the model. The checkpoint's context gets its fields.
        output: The checkpoint, a folder that does not exist.
        names: New names of tensors or modules, by their names in `weights`; "" is the whole model.
        skip: Names of tensors or modules to leave out.
        report: Receives a line if a prefix was removed, or if numbers were rounded.

    Returns:
        The path of the checkpoint.

    Raises:
        UserError: The weights cannot be read, or do not fit the model; or the output exists.
        OSError: The checkpoint cannot be written. Nothing is left at `output`.
    """
    output = Path(output)
    if problems := _problems_of(output):
        raise UserError(problems)
    use_accelerator(find_accelerator().name)
    from megakit.errors import reading
    from megakit.models.foreign_weights import copy_weights, find_state_dict, read_weights
    from megakit.models.inference import single_rank_state
    from megakit.models.new_checkpoint import for_one_rank, write_new_checkpoint

    if isinstance(weights, Mapping):
        source: str | Path = "the state dict"
        with reading(source, "Give a state dict: tensors by name."):
            state, origin = find_state_dict(weights), {}
    else:
        source = Path(weights)
        state, origin = (
            read_weights(source),
            {"weights": source.name, "sha256": _sha256(source)},
        )
    with single_rank_state():
        try:
            model = for_one_rank(config).configure_model()
        except (RuntimeError, TypeError, ValueError, ArithmeticError, AssertionError) as error:
            raise UserError(f"{type(config).__name__} cannot build its model ({error}).") from error
        try:
            remarks = copy_weights(model, state, names or {}, skip)
        except UserError as error:
            raise UserError(f"{source}: {error}") from error
        manifest = Manifest(
            stage=IMPORTED,
            model=type(model).__name__,
            dataset="",  # unknown; scripts then choose as without a checkpoint
            step=step_in_name(output) or 0,
            run=origin,
            versions=installed_versions(),
        )
        write_new_checkpoint(output, model, config, manifest)
    for remark in remarks:
        report(f"{source}: {remark}")
    return output


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


if __name__ == "__main__":
    sys.exit(main())
