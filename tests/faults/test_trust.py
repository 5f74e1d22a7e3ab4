"""A checkpoint that would run code, put where the scripts look for one."""

import json
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megakit.checkpoints.manifest import list_files, read_manifest, write_manifest
from tests.faults.harness import ACCUMULATED, BEFORE_STEP, Fault, Training
from tests.megakit.poison import Bomb

pytestmark = pytest.mark.long


def renew_manifest(checkpoint: Path) -> None:
    manifest = replace(read_manifest(checkpoint), files=list_files(checkpoint))
    write_manifest(checkpoint, manifest)


def change_common(checkpoint: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    import torch

    path = checkpoint / "weights" / "common.pt"
    common = torch.load(path, weights_only=True)
    change(common)
    torch.save(common, path)


def objects_in_files_of_their_own(checkpoint: Path) -> None:
    """As the format `zarr` has them, which Megatron reads with a bare `torch.load`."""
    import torch

    weights = checkpoint / "weights"
    formats = json.loads((weights / "metadata.json").read_text())
    (weights / "metadata.json").write_text(json.dumps(formats | {"sharded_backend": "zarr"}))
    for number in range(1, 5):
        folder = weights / f"module.linear{number}._extra_state"
        folder.mkdir()
        torch.save(Bomb(checkpoint.parent / "trace"), folder / "shard_0_1.pt")


def _set_step(common: dict[str, Any]) -> None:
    common["loops"]["fit_loop"]["epoch_loop.state_dict"]["step"] = 3


CHANGES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "no loops": (lambda common: common.pop("loops"), "KeyError: 'loops'"),
    "no optimizer": (lambda common: common.pop("optimizer"), "cannot be read"),
    "another step": (_set_step, "its steps differ"),
}


@pytest.mark.parametrize("precision", ["32", "bf16-mixed"])
def test_what_a_resumption_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    training = Training(tmp_path / "runs", options=(*ACCUMULATED, "--precision", precision))
    assert training.start(Fault(BEFORE_STEP, 8, name="SIGTERM")).status == 143
    (checkpoint,) = training.checkpoints.iterdir()
    intact = shutil.copytree(checkpoint, tmp_path / "intact")

    def refused(told: str) -> None:
        renew_manifest(checkpoint)
        start = training.start()
        assert start.status == 2, start.err
        assert f"{checkpoint}" in start.err
        assert told in start.err
        assert "Traceback" not in start.err
        shutil.rmtree(checkpoint)
        shutil.copytree(intact, checkpoint)

    objects_in_files_of_their_own(checkpoint)
    refused("only 'torch_dist' is read")
    assert not (training.checkpoints / "trace").exists()
    for change, told in CHANGES.values():
        change_common(checkpoint, change)
        refused(told)
    assert training.start().status == 0


def test_neither_resumption_nor_a_named_start_runs_it(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    training = Training(tmp_path / "runs")
    assert training.start(Fault(BEFORE_STEP, 8, name="SIGTERM")).status == 143
    (checkpoint,) = training.checkpoints.iterdir()
    (checkpoint / "weights" / ".metadata").write_bytes(pickle.dumps(Bomb(trace)))
    renew_manifest(checkpoint)
    named = Path(shutil.copytree(checkpoint, tmp_path / checkpoint.name))

    resumption = training.start()
    start = Training(tmp_path / "next", "model_finetune.py", ("--checkpoint", named)).start()
    for refused, folder in ((resumption, checkpoint), (start, named)):
        assert refused.status == 2, refused.err
        assert f"{folder}/weights/.metadata: cannot be read" in refused.err
        assert "posix.system" in refused.err
        assert "Traceback" not in refused.err
    assert not trace.exists()
