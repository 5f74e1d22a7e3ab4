"""A checkpoint that would run code, put where the scripts look for one."""

import os
import pickle
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megakit.checkpoints.manifest import list_files, read_manifest, write_manifest
from tests.faults.harness import BEFORE_STEP, Fault, Training

pytestmark = pytest.mark.long


class Bomb:
    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.trace}",)


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
        assert f"{folder}/weights/.metadata: damaged or not to be trusted" in refused.err
        assert "posix.system" in refused.err
        assert "Traceback" not in refused.err
    assert not trace.exists()
