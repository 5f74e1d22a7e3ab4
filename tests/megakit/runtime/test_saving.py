"""Megatron's checkpoint writer in threads of this process: the same files, no process beside it."""

import os
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("megatron", "writers_as_our_strategy_has_them")


@pytest.fixture
def writers_as_our_strategy_has_them() -> None:
    from megakit.runtime.saving import write_in_threads

    write_in_threads()


def state() -> dict[str, Any]:
    import torch
    from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor

    numbers = {f"w{k}": torch.arange(1000.0) * k for k in range(5)}
    sharded: dict[str, Any] = {
        key: ShardedTensor.from_rank_offsets(key, value) for key, value in numbers.items()
    }
    sharded["extra"] = ShardedObject("extra", {"a": 1}, (1,), (0,))
    return {**sharded, "common": [1, "two"]}


def test_round_trip_without_a_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from megatron.core import dist_checkpointing

    def fork() -> int:
        raise AssertionError("a process was started")

    monkeypatch.setattr(os, "fork", fork)
    for step in range(2):
        folder = tmp_path / str(step)
        folder.mkdir()
        dist_checkpointing.save(state(), str(folder))
        loaded = dist_checkpointing.load(state(), str(folder))
        assert loaded["common"] == [1, "two"]
        assert loaded["extra"] == {"a": 1}
        for k in range(5):
            assert torch.equal(loaded[f"w{k}"], torch.arange(1000.0) * k)
    files = [sorted(path.name for path in (tmp_path / name).iterdir()) for name in ("0", "1")]
    assert files[0] == files[1]
    assert "__0_0.distcp" in files[0]
    assert "__0_1.distcp" in files[0]
