"""Checks of checkpoints by Megatron alone, a program for environments without NeMo and pytest.

`test_newest.py` runs it: `python -m tests.megakit.runtime.megatron_alone FOLDER`.
"""

import importlib
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megakit.runtime.accelerator import use_accelerator

use_accelerator("cpu", uses_nemo=False)

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor

from megakit.errors import UserError
from megakit.runtime.safe_reading import read_metadata
from megakit.runtime.writer_threads import write_in_threads
from megakit.testing.parallel_state import distributed_model_parallel_state
from tests.megakit.poison import OTHER_PROGRAMS, OWNERS, archive, running_programs, text, whole

WEIGHT, OBJECT, COMMON = "weight", "extra/shard_0_1", "common_state/shard_0_1"


def state(fill: float) -> dict[str, Any]:
    weight = ShardedTensor.from_rank_offsets(WEIGHT, torch.full((8, 6), fill))
    extra = ShardedObject("extra", {"fill": fill}, (1,), (0,))
    return {"model": {"weight": weight, "extra": extra}, "step": int(fill), "folder": Path("/runs")}


def load(folder: Path) -> dict[str, Any]:
    return dict(dist_checkpointing.load(state(0), str(folder)))


def put(folder: Path, place: str, content: bytes) -> None:
    """Puts content in the place of a file, or of an entry of the checkpoint."""
    if place.endswith((".pt", ".json", ".metadata")):
        (folder / place).write_bytes(content)
        return
    metadata = read_metadata(folder / ".metadata")
    (folder / "__9_0.distcp").write_bytes(content)
    for key, stored in metadata.storage_data.items():
        if key.fqn == place:
            stored.relative_path, stored.offset, stored.length = "__9_0.distcp", 0, len(content)
    import pickle

    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def refusal(folder: Path) -> str:
    try:
        load(folder)
    except Exception as error:
        assert isinstance(error, UserError), repr(error)
        return str(error)
    raise AssertionError("it was loaded")


def check_programs(saved: Path, folder: Path) -> dict[str, int]:
    """Puts every program of `poison.py` in every place that is read; returns their numbers."""
    trace = folder / "trace"
    names = [owner.rpartition(".") for owner in OWNERS]
    owners = [getattr(importlib.import_module(module), name) for module, _, name in names]
    before = [dict(vars(owner)) for owner in owners]
    keys = {key.fqn for key in read_metadata(saved / ".metadata").storage_data}
    places = [".metadata", "common.pt", *sorted(keys)]
    programs = running_programs(trace) | OTHER_PROGRAMS
    for place in places:
        for number, (name, program) in enumerate(programs.items()):
            copy = folder / "copy"
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(saved, copy)
            is_pickle = place == ".metadata" or number % 4 == 3
            put(copy, place, whole(program) if is_pickle else archive(whole(program)))
            message = refusal(copy)
            file = f"/{place}" if "." in place else ""
            assert message.startswith(f"{copy}{file}: cannot be read"), (place, name, message)
            assert not trace.exists(), (place, name)
            assert [dict(vars(owner)) for owner in owners] == before, (place, name)
    return dict.fromkeys(places, len(programs))


def check_damage(saved: Path, folder: Path) -> int:
    """Damages each file, and puts values of wrong types in each place."""
    keys = sorted({key.fqn for key in read_metadata(saved / ".metadata").storage_data})
    a_list = archive(whole(b"]" + text("x") + b"a"))
    damages: list[tuple[str, bytes]] = [
        *((place, content) for place in (".metadata", "common.pt") for content in (b"", b"no")),
        *(("metadata.json", content) for content in (b"{}", b"[" * 100_000, b"no")),
        ("metadata.json", b'{"sharded_backend": "zarr"}'),
        *((key, content) for key in keys for content in (b"", b"no")),
        ("common.pt", a_list),
        *((key, a_list) for key in keys if key != OBJECT),
    ]
    for place, content in damages:
        copy = folder / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(saved, copy)
        put(copy, place, content)
        message = refusal(copy)
        assert message.startswith(str(copy)), (place, content[:20], message)
        assert "cannot be read" in message, (place, content[:20], message)
    return len(damages)


def main(folder: Path) -> None:
    saved = folder / "saved"
    saved.mkdir()
    with distributed_model_parallel_state():
        write_in_threads()
        dist_checkpointing.save(state(3), str(saved), **OPTIONS)
        found = load(saved)
        assert found["model"]["weight"].equal(torch.full((8, 6), 3.0)), found
        assert (found["model"]["extra"], found["step"]) == ({"fill": 3}, 3), found
        told = {
            "version": dist_checkpointing.__name__ and importlib.metadata.version("megatron-core"),
            "nemo": "nemo" in sys.modules,
            "programs": check_programs(saved, folder),
            "damages": check_damage(saved, folder),
        }
    print(json.dumps(told))


OPTIONS: dict[str, Any] = {}
Check = Callable[[Path], None]
if __name__ == "__main__":
    main(Path(sys.argv[1]))
