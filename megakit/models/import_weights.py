"""Turns the weights of another program into a checkpoint that any layout loads.

    python -m megakit.models.import_weights weights.safetensors --config MyConfig --output DIR

WEIGHTS is a safetensors file or a file of torch.save. The latter contains a state dict, or a
dictionary with one, such as a Lightning checkpoint. WEIGHTS must have exactly the model's tensors,
after --map and --skip. Run this command in the folder of `model_components.py`; for another module,
give --components. The checkpoint's name is printed when it is complete. Exit status: 0 success;
1 the checkpoint cannot be written; 2 wrong options or unusable weights.
"""

import argparse
import ast
import contextlib
import dataclasses
import importlib
import importlib.util
import io
import shutil
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megakit.checkpoints import manifest as manifests
from megakit.errors import UserError, reading, reason_of
from megakit.runtime import find_accelerator, use_accelerator

if TYPE_CHECKING:
    from torch import Tensor

    from megakit.models.config import MegatronBioNeMoTrainableModelConfig as Config


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    options = _parser().parse_args(arguments)
    console, hidden = sys.stderr, io.StringIO()  # the frameworks' messages are hidden
    try:
        with contextlib.redirect_stderr(hidden), contextlib.redirect_stdout(hidden):
            written = checkpoint_from_weights(
                options.weights,
                _build_config(options),
                options.output,
                names=dict(options.map),
                skip=options.skip,
                report=lambda remark: print(f"import_weights: {remark}", file=console),
            )
    except (UserError, OSError) as error:
        print(f"import_weights: {error}", file=console)
        return 2 if isinstance(error, UserError) else 1
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
    name, value = text.split("=", maxsplit=1)
    return name, value


def _build_config(options: argparse.Namespace) -> Any:
    """Imports the components, and builds the config that the options name."""
    if problems := missing_module(options.components):
        raise UserError(problems)
    use_accelerator("cpu")
    module = importlib.import_module(options.components)
    values = dict[str, Any](options.set)
    for name, text in options.set:
        with contextlib.suppress(ValueError, SyntaxError):  # the text is a string
            values[name] = ast.literal_eval(text)
    from megakit.models.config import MegatronBioNeMoTrainableModelConfig as Base

    classes = {name: cls for name, cls in vars(module).items() if isinstance(cls, type)}
    configs = {name: cls for name, cls in classes.items() if issubclass(cls, Base) and cls != Base}
    if options.config not in configs:
        raise UserError(
            f"--config {options.config}: not a config of {options.components}. "
            f"Name one of {', '.join(sorted(configs))}."
        )
    try:
        return configs[options.config](**values)
    except (TypeError, ValueError, ArithmeticError, AssertionError) as error:
        what = f"--config {options.config}, --set: this config cannot be built ({error})"
        raise UserError(f"{what}. Correct the fields.") from error


def missing_module(components: str) -> list[str]:
    """Returns a message if the module that `--components` names does not exist."""
    with contextlib.suppress(ImportError, ValueError):  # no parent package; not a name
        if importlib.util.find_spec(components):
            return []
    return [
        f"--components {components}: there is no such module in {Path.cwd()}. Run this in the "
        "folder of the module that defines the model's config, or name another."
    ]


def checkpoint_from_weights(
    weights: "str | Path | Mapping[str, Tensor]",
    config: "Config",
    output: str | Path,
    *,
    names: Mapping[str, str] | None = None,
    skip: Collection[str] = (),
    report: Callable[[str], None] = lambda line: print(line, file=sys.stderr),
) -> Path:
    """Writes a checkpoint with the weights of another program, for any layout.

    The weights have to be exactly those of the model, with the names of
    `load_for_inference(...).state_dict()`. Call this in a process that is not a rank of a job.
    Unusable weights raise a `UserError`, a full disk an `OSError`; `output` then does not exist.

    Args:
        weights: A safetensors file, a file of `torch.save`, or a state dict.
        config: Builds the model. The checkpoint's context gets its fields.
        output: The checkpoint, a folder that does not exist.
        names: New names of tensors or modules, by their names in `weights`; "" is the whole model.
        skip: Names of tensors or modules to leave out.
        report: Receives remarks about removed prefixes and rounded numbers.
    """
    output = Path(output)
    if output.exists() or not output.absolute().parent.is_dir():
        raise UserError(f"--output {output}: exists, or is in no folder. Name a new folder.")
    use_accelerator(find_accelerator().name)
    from megakit.models.foreign_weights import load_exactly, read_weights, rename
    from megakit.models.inference import ONE_RANK, single_rank_state
    from megakit.models.partial_loading import check_finite

    source = "the state dict" if isinstance(weights, Mapping) else str(weights)
    with reading(source, "Give a safetensors file, or a file of torch.save(model.state_dict())."):
        given = read_weights(weights)
        check_finite(given)
    with single_rank_state():
        try:
            model = dataclasses.replace(config, **ONE_RANK).configure_model()
        except (TypeError, ValueError, RuntimeError, ArithmeticError, AssertionError) as error:
            what = f"{type(config).__name__}: it builds no model ({reason_of(error)})."
            raise UserError(f"{what} Correct --set, or the config.") from error
        rules = {**(names or {}), **dict.fromkeys(skip)}
        state = rename(given, model.state_dict(), rules, report)
        if rounded := load_exactly(model, state, source):
            report(f"the numbers of {rounded} tensors were rounded to the model's type.")
        _write(output, model, config, source)
    return output


def _write(checkpoint: Path, model: Any, config: "Config", source: str) -> None:
    """Writes a checkpoint into a hidden folder, and renames the folder when it is complete."""
    from megatron.core import dist_checkpointing

    from megakit.checkpoints.model_settings import write_context
    from megakit.checkpoints.writer import why_not_written
    from megakit.models.partial_loading import PREFIX
    from megakit.models.settings import ImportedModule
    from megakit.runtime.atomic_files import publish
    from megakit.runtime.writer_threads import write_in_threads

    partial = checkpoint.with_name(f".partial-{checkpoint.name}")
    weights = partial / manifests.WEIGHTS
    write_in_threads()
    try:
        shutil.rmtree(partial, ignore_errors=True)  # of a killed import
        weights.mkdir(parents=True)
        dist_checkpointing.save(model.sharded_state_dict(prefix=PREFIX), str(weights))
        write_context(partial / manifests.CONTEXT, ImportedModule(config))
        manifest = manifests.Manifest(
            manifests.IMPORTED,
            type(model).__name__,
            dataset="",  # unknown; scripts then choose as without a checkpoint
            step=manifests.step_in_name(checkpoint) or 0,
            run={"weights": Path(source).name},
            versions=manifests.installed_versions(),
            files=manifests.list_files(partial),
        )
        manifests.write_manifest(partial, manifest)
        publish(partial, checkpoint)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if reason := why_not_written(error):
            raise OSError(f"cannot write {checkpoint}: {reason}") from error
        raise


if __name__ == "__main__":
    sys.exit(main())
