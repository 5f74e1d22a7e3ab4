"""A checkpoint that was made to run code between two starts."""

import pickle
from dataclasses import replace
from pathlib import Path

import pytest

from megakit.checkpoints.manifest import list_files, read_manifest, write_manifest
from tests.faults.harness import BEFORE_STEP, Fault, Training
from tests.megakit.poison import Bomb


@pytest.mark.long
def test_a_resumption_does_not_run_it(tmp_path: Path) -> None:
    """Of a start checkpoint: tests/megakit/runtime/test_safe_reading.py."""
    training = Training(tmp_path / "runs")
    assert training.start(Fault(BEFORE_STEP, 8, name="SIGTERM")).status == 143

    # An error of code that runs while a checkpoint is loaded is not called damage.
    place = "megatron.core.optimizer.optimizer:ChainedOptimizer.load_state_dict"
    failed = training.start(Fault(place, name="TypeError"))
    assert failed.status == 1, failed.err
    assert "TypeError: made to fail here" in failed.err
    assert "damaged" not in failed.err

    (checkpoint,) = training.checkpoints.iterdir()
    trace = tmp_path / "trace"
    (checkpoint / "weights" / ".metadata").write_bytes(pickle.dumps(Bomb(trace)))
    manifest = replace(read_manifest(checkpoint), files=list_files(checkpoint))
    write_manifest(checkpoint, manifest)
    refused = training.start()
    assert refused.status == 2, refused.err
    assert f"{checkpoint}/weights/.metadata: cannot be read" in refused.err
    assert "Traceback" not in refused.err
    assert not trace.exists()
