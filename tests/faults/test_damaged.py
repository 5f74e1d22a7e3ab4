"""A checkpoint that was damaged between two starts is set aside by name; the one before serves."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.faults.harness import BEFORE_PRUNING, Fault, Training
from tests.left_behind import list_checkpoints, lowest_loss, read_whole
from tests.scripts import run_script


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Training:
    """A run that has the checkpoints of steps 20 and 30, and did not come further."""
    training = Training(tmp_path_factory.mktemp("killed"))
    assert training.start(Fault(BEFORE_PRUNING, 3)).status == -9
    assert [path.name for path in list_checkpoints(training.checkpoints)][-2:] == [
        *("step=000020", "step=000030")
    ]
    return training


def test_a_named_start_is_an_error_and_stays(killed: Training, tmp_path: Path) -> None:
    checkpoint = tmp_path / "mine" / "step=000030"
    shutil.copytree(killed.checkpoints / "step=000030", checkpoint)
    flip_a_bit(checkpoint / "weights" / "__0_0.distcp")
    options = ("--checkpoint", checkpoint, "--output-dir", tmp_path / "runs")
    ended = run_script("model_finetune.py", "--dataset", "digits", *options)
    assert (ended.status, ended.out) == (2, "")
    assert "weights/__0_0.distcp" in ended.err
    assert [path.name for path in checkpoint.parent.iterdir()] == ["step=000030"]
    assert not (tmp_path / "runs").exists()


def test_resuming_goes_on_from_the_one_before(
    killed: Training, never_stopped: dict[str, Any]
) -> None:
    flip_a_bit(killed.checkpoints / "step=000030" / "weights" / "__0_1.distcp")
    start = killed.start()
    assert start.status == 0, start.err
    assert f"Resuming from {killed.checkpoints}/step=000020, step 20." in start.err
    (line,) = [line for line in start.err.splitlines() if "__0_1.distcp" in line]
    assert "step=000030" in line
    assert (killed.checkpoints / "damaged-step=000030").is_dir()
    best = lowest_loss(list_checkpoints(killed.checkpoints))
    assert best is not None
    assert best.name == never_stopped["best"]
    found = read_whole(best)["files"]["weights/__0_0.distcp"]["sha256"]
    assert found == never_stopped["checkpoints"][best.name]["__0_0.distcp"]
    assert (killed.path / "metrics.csv").read_text() == never_stopped["metrics.csv"]
