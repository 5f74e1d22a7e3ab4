"""Reads Megatron's checkpoints without running code that the files contain.

Megatron and torch read parts of a checkpoint with Python's unpickler, which calls every function
that a file names. The readers here create only metadata, tensors and plain values.
docs/readers.md lists all places of the stack that could read a file.
"""

import contextlib
import dataclasses
import functools
import math
import pathlib
import pickle
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.distributed.checkpoint import default_planner
from torch.distributed.checkpoint import metadata as torch_metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader

from megakit.errors import USE_ANOTHER, UserError, printable, reading, reason_of
from megakit.runtime.patching import patch, require_attribute

#: What the message about a checkpoint without optimizer state says.
NO_OPTIMIZER = (
    "has no optimizer state, so training cannot continue. NeMo omits this state from the last "
    "checkpoint of a training, unless ModelCheckpoint has save_optim_on_train_end=True. Resume "
    "from an earlier checkpoint with AutoResume(resume_from_path=...), or use only the weights: "
    "name the checkpoint as initial_ckpt_path in the model's config."
)
#: What the message about another error than of a file's content ends with.
SEE_LOG = "The traceback shows which code failed; the scripts write it to log.txt."
#: Paths are plain values. Python 3.13 pickles them under another module.
_PATHS = {(module, "PosixPath"): pathlib.PosixPath for module in ("pathlib", "pathlib._local")}


@functools.cache
def _names() -> dict[tuple[str, str], Any]:
    """Returns what `.metadata` may name: data classes, an Enum, and functions without effects."""
    from megatron.core.dist_checkpointing.strategies.torch import MCoreMetadata

    formats = require_attribute(torch_metadata, "_MEM_FORMAT_ENCODING")
    classes = [getattr(torch_metadata, name) for name in torch_metadata.__all__]
    classes += [require_attribute("torch.distributed.checkpoint.filesystem", "_StorageInfo")]
    return {
        **{(one.__module__, one.__name__): one for one in (*classes, MCoreMetadata, formats)},
        **{("torch", n): one for n, one in vars(torch).items() if isinstance(one, torch.dtype)},
        ("torch", "Size"): torch.Size,
        ("torch.serialization", "_get_layout"): require_attribute(
            torch.serialization, "_get_layout"
        ),
        # Python 3.11.2 pickles a member of an Enum as a call of getattr; there is one Enum here.
        ("builtins", "getattr"): lambda _, name: formats[name],
        **_PATHS,
    }


class _MetadataUnpickler(pickle._Unpickler):
    """Creates only what `_names` lists; Python's version, since C's cannot restrict BUILD."""

    stack: list[Any]
    dispatch: ClassVar[dict[int, Any]] = {**pickle._Unpickler.dispatch}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _names():
            raise ValueError(f"it names {module}.{name}, which no checkpoint needs")
        return _names()[module, name]

    def load_build(self) -> None:
        """Sets attributes of an instance; those of a class would change the whole process."""
        kind = type(self.stack[-2])
        if not dataclasses.is_dataclass(kind):
            raise ValueError(f"it sets attributes of a {kind.__name__}")
        require_attribute(pickle._Unpickler, "load_build")(self)

    dispatch[pickle.BUILD[0]] = load_build


def read_metadata(path: Path) -> Any:
    """Returns the content of `.metadata`; raises a `UserError` if it is damaged or unsafe."""
    with reading(path, USE_ANOTHER):
        with path.open("rb") as file:
            metadata = _MetadataUnpickler(file).load()
        if not isinstance(metadata, torch_metadata.Metadata):
            raise ValueError(f"it is a {type(metadata).__name__}")
        for place in metadata.storage_data.values():
            name = place.relative_path
            if type(name) is not str or Path(name).name != name:
                raise ValueError(f"it names {name}, which is not a file in the same folder")
        # Torch's planner leaves numbers in missing parts of a tensor unset.
        for name, entry in metadata.state_dict_metadata.items():
            if type(name) is not str:
                raise ValueError(f"it names a tensor {name!r}")
            if isinstance(entry, torch_metadata.TensorStorageMetadata):
                stored = sum(math.prod(chunk.sizes) for chunk in entry.chunks)
                if stored != (wanted := math.prod(entry.size)):
                    raise ValueError(f"{name} has {stored:,} of {wanted:,} numbers")
        if not require_attribute(default_planner, "_validate_global_plan")([], metadata):
            raise ValueError("parts of a tensor overlap or lie outside of it")
        return metadata


@contextlib.contextmanager
def only_plain_names() -> Iterator[None]:
    """Lets `torch.load(weights_only=True)` create tensors and plain values only.

    Otherwise it also calls two dozen classes and functions that NeMo and Megatron register.
    """
    registered = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    torch.serialization.add_safe_globals([(cls, ".".join(name)) for name, cls in _PATHS.items()])
    try:
        yield
    except pickle.UnpicklingError as error:  # its message advises to load the file unsafely
        raise ValueError("it contains more than tensors and plain values") from error
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(registered)


def load_plain(file: Any) -> Any:
    """Returns the tensors and plain values in a file of `torch.save`, tensors on the CPU."""
    with only_plain_names():
        # An explicit argument takes precedence over TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD.
        return torch.load(file, map_location="cpu", weights_only=True)


def read_common(path: Path) -> dict[str, Any]:
    """Returns the content of `common.pt`; raises a `UserError` if it is damaged or unsafe."""
    with reading(path, USE_ANOTHER):
        common = load_plain(path)
        if not isinstance(common, dict):
            raise ValueError(f"it is a {type(common).__name__} instead of a dictionary")
        return common


def refusal_of(folder: Any, error: Any) -> UserError:
    """Returns the `UserError` for an error, or for torch's that contains those of all ranks."""
    failures = error.failures if isinstance(error, CheckpointException) else {0: [error]}
    cause = next(iter(failures.values()))[0]
    if isinstance(cause, UserError):
        return cause
    if isinstance(cause, KeyError) and str(cause).strip("\"'").startswith("optimizer."):
        return UserError(f"{folder}: {NO_OPTIMIZER}")
    reason = reason_of(cause)
    text = f"{folder}: could not be loaded ({reason}). {SEE_LOG}"
    if "is not a distributed checkpoint" in reason:  # `metadata.json` is missing
        text = f"{folder}: cannot be read ({reason}). {USE_ANOTHER}"
    return UserError(printable(text))


@contextlib.contextmanager
def loading(folder: Any) -> Iterator[None]:
    """Turns every error of a load, on any rank, into a `UserError` that names the checkpoint.

    The readers of the files have refused what is damaged; other errors may come from any code.
    """
    try:
        yield
    except UserError:
        raise
    except (Exception, CheckpointException) as error:  # torch's is a BaseException
        raise refusal_of(folder, error) from error


_patch = functools.partial(patch, group="safe")


def _guard(
    owner: Any, name: str, context: Callable[..., AbstractContextManager[None]], reason: str
) -> None:
    """Lets a function of the frameworks run in a context, which gets the same arguments."""
    original = require_attribute(owner, name)

    @functools.wraps(original)
    def guarded(*args: Any) -> Any:
        with context(*args):
            return original(*args)

    _patch(owner, name, guarded, reason=reason)


@functools.cache
def install_safe_readers() -> None:
    """Replaces the readers of torch, Megatron, NeMo and Lightning, once; imports Megatron."""
    from megatron.core.dist_checkpointing import core, validation
    from megatron.core.dist_checkpointing.strategies import common
    from megatron.core.dist_checkpointing.strategies import torch as strategies
    from nemo.collections.llm.modelopt import model_utils
    from nemo.lightning.resume import AutoResume

    set_element = require_attribute(default_planner, "set_element")
    load_config = require_attribute(core, "maybe_load_config")

    def load_bytes(self: Any, read_item: Any, value: Any) -> None:
        """Reads Megatron's extra state, the only objects among the tensors."""
        name = read_item.dest_index.fqn
        if self.flatten_state_dict:
            set_element(self.original_state_dict, self.mappings[name], load_plain(value))
        else:
            self.state_dict[name] = load_plain(value)

    def maybe_load_config(folder: Any) -> Any:
        """Refuses formats such as `zarr`, which Megatron reads with an unrestricted unpickler."""
        with reading(f"{folder}/metadata.json", USE_ANOTHER):
            found = load_config(folder)
            if found not in (None, core.CheckpointingConfig("torch_dist")):
                raise ValueError(f"its format is {found}; only 'torch_dist' is read")
            return found

    @contextlib.contextmanager
    def reading_data(self: Any, *_: Any) -> Iterator[None]:
        with reading(self.path, USE_ANOTHER), only_plain_names():
            yield

    def refuse_adapter(self: Any, adapter_meta_path: Any, model: Any) -> Any:
        """An adapter's file would make NeMo read another folder."""
        raise UserError(f"{adapter_meta_path}: adapters are not read. Use another checkpoint.")

    unsafe = "an unpickler calls every function that the file names"
    _patch(
        *(FileSystemReader, "read_metadata"),
        lambda self, *_, **__: read_metadata(self.path / ".metadata"),
        reason=unsafe,
    )
    registered = "torch also calls two dozen classes that NeMo and Megatron register"
    _guard(FileSystemReader, "read_data", reading_data, registered)
    _patch(default_planner.DefaultLoadPlanner, "load_bytes", load_bytes, reason=unsafe)
    _patch(
        *(common.TorchCommonLoadStrategy, "load_common"),
        lambda self, folder: read_common(Path(folder, "common.pt")),
        reason=unsafe,
    )
    formats = "other formats than `torch_dist` are read by an unrestricted unpickler"
    _patch(core, "maybe_load_config", maybe_load_config, reason=formats)
    _patch(validation, "maybe_load_config", maybe_load_config, reason=formats)
    adapters = "an adapter's file names another folder to read"
    _patch(AutoResume, "_get_base_model_path_for_adapter", refuse_adapter, reason=adapters)
    quantization = "the state of ModelOpt has a reader of its own"
    _patch(model_utils, "restore_modelopt_state", lambda *args, **kwargs: None, reason=quantization)

    load_strategy = strategies.TorchDistLoadShardedStrategy
    damaged = "an error in a file's content does not name the checkpoint"
    _guard(load_strategy, "load", lambda self, state, folder: loading(folder), damaged)
    # Lightning restores callbacks, loops, optimizers and schedulers from unchecked content.
    connectors = "lightning.pytorch.trainer.connectors.checkpoint_connector"
    connector = require_attribute(connectors, "_CheckpointConnector")
    _guard(
        *(connector, "_restore_modules_and_callbacks"),
        lambda self, path=None: loading(path),
        damaged,
    )
    _guard(
        *(connector, "restore_training_state"),
        lambda self: loading(require_attribute(self, "_ckpt_path")),
        damaged,
    )
