"""Checks of checkpoints and imports by Megatron alone, for environments without NeMo and pytest.

`test_megatron_alone.py` runs it: `python -m tests.megakit.runtime.megatron_alone FOLDER [SAVED]`,
in which SAVED is a checkpoint that it made with another version.
"""

import importlib
import json
import os
import pickle
import pkgutil
import resource
import shutil
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import megakit
from megakit.errors import UserError
from tests.megakit.poison import OTHER_PROGRAMS, OWNERS, archive, running_programs, text, whole

WEIGHT, EXTRA = "weight", "extra/shard_0_1"
FILES = (".metadata", "common.pt", "metadata.json")
A_LIST = b"]" + text("x") + b"a"


def state(number: int) -> dict[str, Any]:
    import torch
    from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor

    weight = ShardedTensor.from_rank_offsets(WEIGHT, torch.full((8, 6), float(number)))
    extra = ShardedObject("extra", {"number": number}, (1,), (0,))
    return {"model": {WEIGHT: weight, "extra": extra}, "step": number, "folder": Path("/runs")}


def save(number: int, folder: Path) -> Path:
    from megatron.core import dist_checkpointing

    folder.mkdir()
    dist_checkpointing.save(state(number), str(folder))
    return folder


def load(folder: Path) -> dict[str, Any]:
    from megatron.core import dist_checkpointing

    return dict(dist_checkpointing.load(state(0), str(folder)))


def assert_loads(folder: Path) -> None:
    found = load(folder)
    assert found["model"][WEIGHT].tolist() == [[3.0] * 6] * 8
    assert (found["model"]["extra"], found["step"], found["folder"]) == (
        {"number": 3},
        3,
        Path("/runs"),
    )


def metadata_of(folder: Path) -> Any:
    from megakit.runtime.safe_reading import read_metadata

    return read_metadata(folder / ".metadata")


def refusal(saved: Path, copy: Path, place: str, content: bytes) -> str:
    """What loading says about a copy with this content in a file, or in the place of an entry."""
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(saved, copy)
    if place in FILES:
        (copy / place).write_bytes(content)
    else:
        metadata = metadata_of(copy)
        (copy / "__9_0.distcp").write_bytes(content)
        for key, stored in metadata.storage_data.items():
            if key.fqn == place:
                stored.relative_path, stored.offset, stored.length = "__9_0.distcp", 0, len(content)
        (copy / ".metadata").write_bytes(pickle.dumps(metadata))
    try:
        load(copy)
    except UserError as error:
        return str(error)
    raise AssertionError(f"{content[:40]!r} in {place} was loaded")


def check_programs(saved: Path, copy: Path) -> list[str]:
    """Puts every program in every place; returns the places."""
    trace = copy.with_name("trace")
    names = [owner.rpartition(".") for owner in OWNERS]
    owners = [getattr(importlib.import_module(module), name) for module, _, name in names]
    before = [dict(vars(owner)) for owner in owners]
    entries = {key.fqn for key in metadata_of(saved).storage_data}
    for place in (*FILES[:2], *entries):
        programs = running_programs(trace) | OTHER_PROGRAMS
        for number, (name, program) in enumerate(programs.items()):
            is_pickle = place == ".metadata" or number % 4 == 3
            content = whole(program) if is_pickle else archive(whole(program))
            message = refusal(saved, copy, place, content)
            file = f"/{place}" if place in FILES else ""
            assert message.startswith(f"{copy}{file}: cannot be read"), (place, name, message)
            assert not trace.exists(), (place, name)
            assert [dict(vars(owner)) for owner in owners] == before, (place, name)
    return sorted({*FILES[:2], *entries})


def check_damage(saved: Path, copy: Path) -> None:
    entries = {key.fqn for key in metadata_of(saved).storage_data}
    damages: list[tuple[str, bytes]] = [
        *((place, content) for place in (*FILES[:2], *entries) for content in (b"", b"no")),
        *(("metadata.json", content) for content in (b"{}", b"[" * 100_000, b"no")),
        ("metadata.json", b'{"sharded_backend": "zarr"}'),
        *((place, archive(whole(A_LIST))) for place in ("common.pt", *(entries - {EXTRA}))),
    ]
    for place, content in damages:
        message = refusal(saved, copy, place, content)
        assert message.startswith(str(copy)), (place, content[:20], message)
        assert "cannot be read" in message, (place, content[:20], message)


def children() -> list[str]:
    """This process's child processes."""
    tasks = Path("/proc/self/task").glob("*/children")
    return [child for task in tasks for child in task.read_text().split()]


def reason_of_a_failed_save(folder: Path) -> str:
    """What a save says to whom the system allows only small files."""
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, most))
    try:
        save(3, folder)
    except BaseException as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    raise AssertionError("it was saved")


def check_imports() -> dict[str, str]:
    """Imports all modules that are for programs without NeMo; returns those that cannot be."""
    failed = {}
    for module in pkgutil.walk_packages(megakit.__path__, "megakit."):
        # `forked_from` is for a process of its own, whose output it closes.
        if not module.name.startswith("megakit.nemo") and not module.name.endswith("forked_from"):
            try:
                importlib.import_module(module.name)
            except ImportError as error:
                failed[module.name] = str(error.name)
    return failed


def main(folder: Path, *others: Path) -> None:
    from megakit.runtime.accelerator import use_accelerator

    use_accelerator("cpu", uses_nemo=False)
    from megakit.runtime.writer_threads import write_in_threads
    from megakit.testing.parallel_state import distributed_model_parallel_state

    told: dict[str, Any] = {"imports": check_imports(), "version": version("megatron-core")}
    with distributed_model_parallel_state():
        write_in_threads()
        saved = save(3, folder / "saved")
        told["children"] = children()
        for one in (saved, *others):
            assert_loads(one)
            check_damage(one, folder / "copy")
            told.setdefault("places", []).append(check_programs(one, folder / "copy"))
        told["error"] = reason_of_a_failed_save(folder / "failed")
    print(json.dumps(told))


if __name__ == "__main__":
    for name in os.environ.get("BLOCKED", "").split():
        sys.modules[name] = None  # type: ignore[assignment]  # an import of it fails
    main(*map(Path, sys.argv[1:]))
