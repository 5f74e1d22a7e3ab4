"""Reading Megatron's checkpoints without running what a stranger put into them.

A checkpoint's `weights/` holds three kinds of pickle: `.metadata`, which torch's distributed reader
unpickles without any restriction; small objects among the tensors, unpickled likewise; and
`common.pt`, for which torch's default is safe but can be turned off by an environment variable.
Here each of them may only name what Megatron itself puts there. File names in `.metadata` may not
lead out of the folder.
"""

import functools
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megakit.errors import UserError
from megakit.runtime.patching import existing, replace

METADATA = ".metadata"
COMMON = "common.pt"

#: What `.metadata` is made of; torch's data types come on top.
ALLOWED = {
    *(("torch", name) for name in ("Size", "device")),
    ("torch.serialization", "_get_layout"),  # turns a string such as "torch.strided" into a layout
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("megatron.core.dist_checkpointing.strategies.torch", "MCoreMetadata"),
    ("megatron.core.dist_checkpointing.strategies.torch", "MCoreSavePlan"),
    *(
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex"),
            *("StorageMeta", "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
        )
    ),
    ("pathlib", "PosixPath"),
    ("collections", "OrderedDict"),
}


class _MetadataUnpickler(pickle.Unpickler):
    """Finds nothing but what is allowed."""

    def find_class(self, module: str, name: str) -> Any:
        import torch

        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and (module, name) not in ALLOWED:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint needs")
        return super().find_class(module, name)


def read_metadata(path: Path) -> Any:
    """Reads a `.metadata` file.

    Raises:
        UserError: It is damaged, names something untrusted, or points out of its folder.
    """
    try:
        metadata = _MetadataUnpickler(io.BytesIO(path.read_bytes())).load()
        names = {info.relative_path for info in metadata.storage_data.values()}
        for name in sorted(map(str, names)):
            if Path(name).name != name:
                raise pickle.UnpicklingError(f"it names {name}, which is not a file beside it")
    except OSError:
        raise
    except Exception as error:  # a pickle can fail in any way
        raise refusal(path, error) from error
    return metadata


def load_plain(path: Path, file: Any = None) -> Any:
    """What `torch.load` reads of tensors and plain containers, to the CPU.

    Raises:
        UserError: It is damaged, or names something untrusted.
    """
    import torch

    try:
        # Transformer Engine keeps its extra state in one of these.
        with torch.serialization.safe_globals([io.BytesIO]):
            return torch.load(file or path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:
        raise refusal(path, error) from error


def refusal(path: Path, error: Exception) -> UserError:
    """The message for a file that will not be read."""
    lines = [line.strip() for line in str(error).splitlines()]
    # torch says on its first line what one could do to read it all the same.
    telling = next((line for line in lines if "GLOBAL" in line or "it names" in line), None)
    reason = telling or (lines[0] if lines else repr(error))
    return UserError(
        f"{path}: damaged or not to be trusted, and not read: {reason}. Use another checkpoint."
    )


def metadata_is_read_safely() -> None:
    """Megatron's readers are torch's; theirs unpickles whatever stands in `.metadata`."""
    from megatron.core.dist_checkpointing.strategies import torch as strategies
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import StorageMeta

    class SafeReader(FileSystemReader):
        """Reads at once: later, errors come wrapped in torch's."""

        def __init__(self, path: Any, *args: Any, **kwargs: Any) -> None:
            super().__init__(path, *args, **kwargs)
            self._read = read_metadata(Path(path) / METADATA)

        def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
            if getattr(self._read, "storage_meta", None) is None:
                self._read.storage_meta = StorageMeta()
            self._read.storage_meta.load_id = self.load_id
            return self._read

    replace(strategies, "FileSystemReader", SafeReader)
    replace(strategies, "CachedMetadataFileSystemReader", SafeReader)


def objects_among_tensors_are_read_safely() -> None:
    """Megatron's extra state, the one kind of object it keeps among the tensors."""
    from megatron.core.dist_checkpointing.strategies import torch as strategies
    from torch.distributed.checkpoint._traverse import set_element  # as torch's own does

    def load_bytes(self: Any, read_item: Any, value: io.BytesIO) -> None:
        key = read_item.dest_index.fqn
        set_element(self.original_state_dict, self.mappings[key], load_plain(Path(key), value))

    replace(strategies.MCoreLoadPlanner, "load_bytes", load_bytes)


def common_state_is_read_safely() -> None:
    """Whatever `TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD` says."""
    from megatron.core.dist_checkpointing.strategies import common

    def load_common(self: Any, checkpoint_dir: Any) -> Any:
        return load_plain(Path(checkpoint_dir) / COMMON)

    replace(common.TorchCommonLoadStrategy, "load_common", load_common)


def refusals_come_through() -> None:
    """What a rank raises while reading, torch wraps into an error that says nothing to a user."""
    from megatron.core.dist_checkpointing.strategies import torch as strategies
    from torch.distributed.checkpoint.api import CheckpointException

    original = existing(strategies.TorchDistLoadShardedStrategy, "load")

    @functools.wraps(original)
    def load(self: Any, sharded_state_dict: Any, checkpoint_dir: Any) -> Any:
        try:
            return original(self, sharded_state_dict, checkpoint_dir)
        except CheckpointException as error:
            causes = [cause for cause, _ in error.failures.values()]
            reasons = [
                problem for c in causes if isinstance(c, UserError) for problem in c.problems
            ]
            if not reasons:
                reasons = [f"it cannot be read: {causes[0]!r}. Use another checkpoint."]
            raise UserError([f"{checkpoint_dir}: {reason}" for reason in reasons]) from error

    replace(strategies.TorchDistLoadShardedStrategy, "load", load)


PATCHES: tuple[Callable[[], None], ...] = (
    metadata_is_read_safely,
    objects_among_tensors_are_read_safely,
    common_state_is_read_safely,
    refusals_come_through,
)


@functools.cache
def read_safely() -> None:
    """Applies the patches, once; imports Megatron."""
    for patch in PATCHES:
        patch()
