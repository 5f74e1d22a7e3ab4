"""A checkpoint that was damaged, or made to run code, between two starts."""

import pickle
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megakit.checkpoints.manifest import list_files, read_manifest, write_manifest
from tests.faults.harness import BEFORE_PRUNING, BEFORE_STEP, Fault, Training
from tests.megakit.poison import Bomb

pytestmark = pytest.mark.long


def test_a_damaged_checkpoint_is_set_aside(tmp_path: Path, never_stopped: dict[str, Any]) -> None:
    """By name; the one before serves."""
    training = Training(tmp_path)
    assert training.start(Fault(BEFORE_PRUNING, 3)).status == -9
    damaged = training.checkpoints / "step=000030" / "weights" / "__0_1.distcp"
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    start = training.start()
    assert start.status == 0, start.err
    assert f"Resuming from {training.checkpoints}/step=000020, step 20." in start.err
    (line,) = [line for line in start.err.splitlines() if "__0_1.distcp" in line]
    assert "step=000030" in line
    shutil.rmtree(training.checkpoints / "damaged-step=000030")
    assert training.result() == never_stopped


def test_neither_resumption_nor_a_named_start_runs_it(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    training = Training(tmp_path / "runs")
    assert training.start(Fault(BEFORE_STEP, 8, name="SIGTERM")).status == 143
    (checkpoint,) = training.checkpoints.iterdir()
    (checkpoint / "weights" / ".metadata").write_bytes(pickle.dumps(Bomb(trace)))
    manifest = replace(read_manifest(checkpoint), files=list_files(checkpoint))
    write_manifest(checkpoint, manifest)
    named = Path(shutil.copytree(checkpoint, tmp_path / checkpoint.name))

    resumption = training.start()
    start = Training(tmp_path / "next", "model_finetune.py", ("--checkpoint", named)).start()
    for refused, folder in ((resumption, checkpoint), (start, named)):
        assert refused.status == 2, refused.err
        assert f"{folder}/weights/.metadata: cannot be read" in refused.err
        assert "Traceback" not in refused.err
    assert not trace.exists()


def test_an_error_of_the_code_is_not_called_damage(tmp_path: Path) -> None:
    """The frameworks and a reader's callbacks also run while a checkpoint is loaded."""
    training = Training(tmp_path)
    assert training.start(Fault(BEFORE_STEP, 8, name="SIGTERM")).status == 143
    place = "megatron.core.optimizer.optimizer:ChainedOptimizer.load_state_dict"
    refused = training.start(Fault(place, name="TypeError"))
    assert refused.status == 2, refused.err
    assert "/weights: could not be loaded (made to fail here). The traceback" in refused.err
    assert "damaged" not in refused.err
    assert "Traceback" not in refused.err
    assert "TypeError: made to fail here" in (training.path / "log.txt").read_text()
    assert training.start().status == 0
