"""Reads Megatron's checkpoints without running code that the files contain.

Megatron, NeMo and torch read a checkpoint with Python's unpickler and `torch.load`. The patches
here install our own readers, which return only tensors and plain values (`plain_pickle`,
`plain_archive`, `plain_metadata`). Every failure of a load becomes one `UserError`.
docs/readers.md lists every place that reads a file, and how this place is protected.
"""

import contextlib
import functools
import io
import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import default_planner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType
from torch.futures import Future

from megakit.errors import USE_ANOTHER, UserError, reading
from megakit.runtime.foreign_files import JSON_BYTES, read_regular_file
from megakit.runtime.patching import existing, replace
from megakit.runtime.plain_archive import read_archive
from megakit.runtime.plain_metadata import read_plain_metadata

#: The accepted formats. For other formats, such as `zarr`, Megatron uses readers that run code.
FORMATS = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
#: Largest accepted `common.pt`. It has counters and settings; an optimizer may add small tensors.
COMMON_BYTES = 1 << 30

#: What the message about a checkpoint without optimizer state says.
NO_OPTIMIZER = (
    "has no optimizer state, without which training cannot continue. NeMo omits this state from "
    "the last checkpoint of a complete training, unless its ModelCheckpoint has "
    "save_optim_on_train_end=True. Resume from an earlier checkpoint with "
    "AutoResume(resume_from_path=...), or use only the weights: name the checkpoint as "
    "initial_ckpt_path in the model's config."
)


def read_metadata(path: Path) -> Any:
    """Returns the content of a `.metadata` file.

    Raises:
        UserError: The file is damaged, does more than build plain values, or refers to files
            outside of its folder.
    """
    with reading(path, USE_ANOTHER):
        return read_plain_metadata(path)


def read_common(path: Path) -> dict[str, Any]:
    """Returns the content of a `common.pt` file: plain values and tensors on the CPU.

    Raises:
        UserError: The file is damaged, or does more than build tensors and plain values.
    """
    with reading(path, USE_ANOTHER):
        common = read_archive(read_regular_file(path, COMMON_BYTES))
        if type(common) is not dict or any(type(key) is not str for key in common):
            raise ValueError("it is not a dictionary of names")
        return common


def read_config(path: Path) -> dict[str, Any]:
    """Returns the formats that a `metadata.json` names.

    Raises:
        UserError: The file is damaged, or names a format that is not accepted.
    """
    with reading(path, USE_ANOTHER):
        content = json.loads(read_regular_file(path, JSON_BYTES))
        if type(content) is not dict or "sharded_backend" not in content:
            raise ValueError("it names no format")
        found = FORMATS | content
        if unknown := sorted(found.keys() - FORMATS.keys()):
            raise ValueError(f"it has unknown fields: {', '.join(unknown)[:200]}")
        for name, known in FORMATS.items():
            if type(found[name]) is not type(known) or found[name] != known:
                raise ValueError(f"{name} is {str(found[name])[:100]!r}; only {known!r} is read")
        return found


def replace_tensor_reader() -> None:
    """Replaces Megatron's readers, which unpickle `.metadata` and load tensors by `torch.load`."""
    from megatron.core.dist_checkpointing.strategies import torch as strategies

    class SafeReader(FileSystemReader):
        """Reads `.metadata` in the constructor, since torch wraps later errors in its own."""

        def __init__(self, path: Any) -> None:
            super().__init__(path)
            self._metadata = read_metadata(Path(path) / ".metadata")

        def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
            self._metadata.storage_meta.load_id = self.load_id
            return self._metadata

        def read_data(self, plan: Any, planner: Any) -> Any:
            """Reads the items of a plan; torch's own method uses `torch.load`."""
            for item in sorted(plan.items, key=self._place):
                name, offset, length = self._place(item)
                path = Path(self.path) / name
                with reading(path, USE_ANOTHER), path.open("rb") as file:
                    file.seek(offset)
                    content = file.read(length)  # `read_metadata` has checked offset and length
                    if item.type == LoadItemType.BYTE_IO:
                        planner.load_bytes(item, io.BytesIO(content))
                    else:
                        _copy_part(content, item, planner)
            done: Future[None] = Future()
            done.set_result(None)
            return done

        def _place(self, item: Any) -> tuple[str, int, int]:
            place = self.storage_data[item.storage_index]
            return place.relative_path, place.offset, place.length

    replace(strategies, "FileSystemReader", SafeReader)
    replace(strategies, "CachedMetadataFileSystemReader", SafeReader)


def _copy_part(content: bytes, item: Any, planner: Any) -> None:
    """Copies a stored tensor, or the part that a rank needs, into the target tensor."""
    name = item.storage_index.fqn
    stored = read_archive(content)
    target = planner.resolve_tensor(item).detach()
    if type(stored) is not torch.Tensor or stored.dim() != len(item.storage_offsets):
        raise ValueError(f"{name} is not a tensor of {target.dim()} dimensions")
    if stored.is_floating_point() != target.is_floating_point() or (
        stored.is_complex() != target.is_complex()
    ):
        raise ValueError(f"{name} has the type {stored.dtype} instead of {target.dtype}")
    for axis, (begin, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
        stored = stored.narrow(axis, begin, length)
    if stored.size() != target.size():
        raise ValueError(f"{name} has the shape {tuple(stored.size())}, not {tuple(target.size())}")
    target.copy_(stored)
    planner.commit_tensor(item, target)


def check_tensors_are_complete() -> None:
    """Raises an error if `.metadata` lists too few parts of a tensor.

    Torch's planner leaves the numbers in missing parts unset.
    """
    original = existing(default_planner.DefaultLoadPlanner, "create_local_plan")
    list_chunks = existing("torch.distributed.checkpoint.planner_helpers", "_create_chunk_list")

    @functools.wraps(original)
    def create_local_plan(self: Any) -> Any:
        plan = original(self)
        planned: Counter[str] = Counter()
        for item in plan.items:
            planned[item.dest_index.fqn] += math.prod(item.lengths)
        partial = getattr(self, "allow_shape_mismatch_sharded_tensors", None) or {}
        for name, target in self.state_dict.items():
            saved = self.metadata.state_dict_metadata.get(name)
            if type(saved) is not TensorStorageMetadata or name in partial:
                continue
            wanted = sum(math.prod(chunk.sizes) for chunk in list_chunks(target))
            if planned[name] != wanted:
                raise ValueError(f"{name} has {planned[name]:,} of {wanted:,} numbers")
        return plan

    replace(default_planner.DefaultLoadPlanner, "create_local_plan", create_local_plan)


def replace_object_reader() -> None:
    """Reads Megatron's extra state, the only objects among the tensors, without `torch.load`."""
    # torch's own method uses it
    set_element = existing("torch.distributed.checkpoint._traverse", "set_element")

    def load_bytes(self: Any, read_item: Any, value: io.BytesIO) -> None:
        key = read_item.dest_index.fqn
        content = read_archive(value.getvalue())
        if self.flatten_state_dict:
            set_element(self.original_state_dict, self.mappings[key], content)
        else:
            self.state_dict[key] = content

    replace(default_planner.DefaultLoadPlanner, "load_bytes", load_bytes)


def replace_common_reader() -> None:
    """Reads `common.pt` without `torch.load`."""
    from megatron.core.dist_checkpointing.strategies import common

    def load_common(self: Any, checkpoint_dir: Any) -> Any:
        return read_common(Path(checkpoint_dir) / "common.pt")

    def load_sharded_objects(self: Any, sharded_objects_state_dict: Any, folder: Any) -> Any:
        raise UserError(f"{folder}: objects in separate files are not read. {USE_ANOTHER}")

    replace(common.TorchCommonLoadStrategy, "load_common", load_common)
    replace(common.TorchCommonLoadStrategy, "load_sharded_objects", load_sharded_objects)


def refuse_unknown_formats() -> None:
    """Refuses other formats in `metadata.json`, which selects Megatron's reader."""
    from megatron.core.dist_checkpointing import core, validation

    def maybe_load_config(checkpoint_dir: Any) -> Any:
        path = Path(checkpoint_dir) / "metadata.json"
        if not checkpoint_dir or not path.exists():
            return None
        return core.CheckpointingConfig(**read_config(path))

    replace(core, "maybe_load_config", maybe_load_config)
    replace(validation, "maybe_load_config", maybe_load_config)


def unwrap_refusals() -> None:
    """Raises a rank's own error, which torch wraps into an error that does not help a user."""
    from megatron.core.dist_checkpointing.strategies import torch as strategies

    original = existing(strategies.TorchDistLoadShardedStrategy, "load")

    @functools.wraps(original)
    def load(self: Any, sharded_state_dict: Any, checkpoint_dir: Any) -> Any:
        try:
            with reading(checkpoint_dir, USE_ANOTHER):
                return original(self, sharded_state_dict, checkpoint_dir)
        except CheckpointException as error:
            raise refusal_of(checkpoint_dir, error) from error

    replace(strategies.TorchDistLoadShardedStrategy, "load", load)


def refusal_of(folder: Any, error: Any) -> UserError:
    """Returns the `UserError` for a torch error that contains the errors of all ranks."""
    problems: list[str] = []
    for cause, _ in error.failures.values():
        try:
            with reading(folder, USE_ANOTHER):
                if isinstance(cause, KeyError) and str(cause).strip("\"'").startswith("optimizer."):
                    raise UserError(f"{folder}: {NO_OPTIMIZER}")
                raise cause
        except UserError as refused:
            problems += [one for one in refused.problems if one not in problems]
    return UserError(problems)


def explain_failed_resumptions() -> None:
    """Turns errors of Lightning while it resumes into a `UserError` that names the checkpoint.

    Lightning restores callbacks, loops, optimizers and schedulers from unchecked content.
    """
    connectors = "lightning.pytorch.trainer.connectors.checkpoint_connector"
    connector = existing(connectors, "_CheckpointConnector")
    for name in ("_restore_modules_and_callbacks", "restore_training_state"):
        original = existing(connector, name)

        def restore(self: Any, *path: Any, original: Any = original) -> None:
            loaded, ckpt_path = existing(self, "_loaded_checkpoint"), existing(self, "_ckpt_path")
            checkpoint = path[0] if path else loaded and ckpt_path
            with reading(checkpoint, USE_ANOTHER) if checkpoint else contextlib.nullcontext():
                original(self, *path)

        replace(connector, name, functools.wraps(original)(restore))


def refuse_files_of_other_tools() -> None:
    """Refuses adapters, and skips the state of ModelOpt.

    Their files in a checkpoint make NeMo read another folder, or use ModelOpt's own reader.
    """
    from nemo.collections.llm.modelopt import model_utils
    from nemo.lightning.resume import AutoResume

    def refuse_adapter(self: Any, adapter_meta_path: Any, model: Any) -> Any:
        raise UserError(f"{adapter_meta_path}: adapters are not read. Use another checkpoint.")

    replace(AutoResume, "_get_base_model_path_for_adapter", refuse_adapter)
    replace(model_utils, "restore_modelopt_state", lambda *args, **kwargs: None)


@functools.cache
def install_safe_readers() -> None:
    """Applies the patches, once; imports Megatron."""
    replace_tensor_reader()
    check_tensors_are_complete()
    replace_object_reader()
    replace_common_reader()
    refuse_unknown_formats()
    unwrap_refusals()
    explain_failed_resumptions()
    refuse_files_of_other_tools()
