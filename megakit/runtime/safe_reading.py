"""Reads Megatron's checkpoints without running code that the files contain.

Megatron and torch read parts of a checkpoint with Python's unpickler, which calls every function
that a file names. The readers here create only metadata, tensors and plain values.
tests/megakit/runtime/readers.md lists all places of the stack that could read a file.
"""

import contextlib
import dataclasses
import functools
import pathlib
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.distributed.checkpoint import default_planner, metadata as torch_metadata, planner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader

from megakit.errors import USE_ANOTHER, reading
from megakit.runtime.patching import patch, require_attribute

_DIST = "megatron.core.dist_checkpointing"
#: Paths are plain values. Python 3.13 pickles them under another module.
_PATHS = {(module, "PosixPath"): pathlib.PosixPath for module in ("pathlib", "pathlib._local")}


@functools.cache
def _names() -> dict[tuple[str, str], Any]:
    """Returns what `.metadata` may name: data classes, Enums, and functions without effects."""
    # torch 2.15 keeps the plans of megatron-core 0.19, from which a later save could skip a step.
    plans = planner.SavePlan, planner.WriteItem, planner.TensorWriteData, planner.BytesIOWriteData
    enums = require_attribute(torch_metadata, "_MEM_FORMAT_ENCODING"), planner.WriteItemType
    classes = [getattr(torch_metadata, name) for name in torch_metadata.__all__]
    classes += [require_attribute("torch.distributed.checkpoint.filesystem", "_StorageInfo")]
    return {
        **{(one.__module__, one.__name__): one for one in (*classes, *plans, *enums)},
        # megatron-core 0.15's subclass, which later versions have as an empty class.
        (f"{_DIST}.strategies.torch", "MCoreMetadata"): torch_metadata.Metadata,
        **{("torch", n): one for n, one in vars(torch).items() if isinstance(one, torch.dtype)},
        ("torch", "Size"): torch.Size,
        ("torch.serialization", "_get_layout"): require_attribute(
            torch.serialization, "_get_layout"
        ),
        # Python 3.11.2 pickles a member of an Enum as a call of getattr.
        ("builtins", "getattr"): lambda enum, name: enums[enums.index(enum)][name],
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
        return _dictionary(load_plain(path))


def _dictionary(common: Any) -> dict[str, Any]:
    if not isinstance(common, dict):
        raise ValueError(f"it is a {type(common).__name__} instead of a dictionary")
    return common


@contextlib.contextmanager
def first_failure() -> Iterator[None]:
    """Raises the first rank's error itself instead of torch's, which contains those of all ranks.

    Torch's is a `BaseException`, which nobody expects of a file that cannot be read.
    """
    try:
        yield
    except CheckpointException as error:
        raise next(iter(error.failures.values()))[0] from error


@functools.cache
def install_safe_readers() -> None:
    """Replaces the readers of torch and Megatron, once; imports Megatron."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import core, serialization, validation
    from megatron.core.dist_checkpointing.strategies import common, torch as strategies

    load_strategy = strategies.TorchDistLoadShardedStrategy
    load_config = require_attribute(core, "maybe_load_config")
    read_tensors = require_attribute(FileSystemReader, "read_data")
    load = require_attribute(load_strategy, "load")
    set_element = require_attribute(default_planner, "set_element")
    load_common_state = require_attribute(serialization, "load_common_state_dict")

    def load_bytes(self: Any, read_item: Any, value: Any) -> None:
        """Reads Megatron's extra state, the only objects among the tensors."""
        name = read_item.dest_index.fqn
        if self.flatten_state_dict:
            set_element(self.original_state_dict, self.mappings[name], load_plain(value))
        else:
            self.state_dict[name] = load_plain(value)

    def read_data(self: Any, plan: Any, planner: Any) -> Any:
        with reading(self.path, USE_ANOTHER), only_plain_names():
            return read_tensors(self, plan, planner)

    def maybe_load_config(folder: Any) -> Any:
        """Refuses formats such as `zarr`, which Megatron reads with an unrestricted unpickler."""
        with reading(f"{folder}/metadata.json", USE_ANOTHER):
            found = load_config(folder)
            if found not in (None, core.CheckpointingConfig("torch_dist")):
                raise ValueError(f"its format is {found}; only 'torch_dist' is read")
            return found

    def load_sharded(self: Any, *args: Any, **options: Any) -> Any:
        with first_failure():
            return load(self, *args, **options)

    def common_state(folder: Any) -> Any:
        """Reads `common.pt`, or the common state among the objects."""
        read_metadata(Path(folder, ".metadata"))  # torch takes a file with an error for absent
        with reading(folder, USE_ANOTHER), first_failure():
            return _dictionary(load_common_state(folder))

    common_readers = [(common, "load_common"), (serialization, "load_common")]
    states = [(one, "load_common_state_dict") for one in (dist_checkpointing, serialization)]
    if hasattr(common, "TorchCommonLoadStrategy"):  # before megatron-core 0.19
        common_readers, states = [(common.TorchCommonLoadStrategy, "load_common")], []

    unsafe = "an unpickler calls every function that the file names"
    formats = "other formats than `torch_dist` are read by an unrestricted unpickler"
    registered = "torch also calls two dozen classes that NeMo and Megatron register"
    errors = "torch raises no `Exception` for a file that cannot be read"
    for owner, name, function, reason in (
        (
            FileSystemReader,
            "read_metadata",
            lambda self, *_, **__: read_metadata(self.path / ".metadata"),
            unsafe,
        ),
        (FileSystemReader, "read_data", read_data, registered),
        (default_planner.DefaultLoadPlanner, "load_bytes", load_bytes, unsafe),
        *(
            (*one, lambda *args: read_common(Path(args[-1], "common.pt")), unsafe)
            for one in common_readers
        ),
        *(
            (one, "maybe_load_config", maybe_load_config, formats)
            for one in (core, validation)
            if hasattr(one, "maybe_load_config")
        ),
        (load_strategy, "load", load_sharded, errors),
        *((*one, common_state, errors) for one in states),
    ):
        patch(owner, name, function, group="safe", reason=reason)


def ignore_modelopt() -> None:
    """Replaces NeMo's reader; imports NeMo."""
    from nemo.collections.llm.modelopt import model_utils

    reason = "the state of ModelOpt has a reader of its own"
    name, ignore = "restore_modelopt_state", lambda *args, **kwargs: None
    patch(model_utils, name, ignore, group="safe", reason=reason)
