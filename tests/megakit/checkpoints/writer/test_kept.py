"""Which checkpoints are kept, which are removed, and which are left alone."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megakit.checkpoints.manifest import read_manifest, verify, write_manifest
from megakit.checkpoints.select import lock_checkpoint
from megakit.checkpoints.writer import CheckpointWriter
from tests.megakit.checkpoints.writer.training import names, run_to


def test_best_and_last_are_kept(writer: CheckpointWriter, trainer: Any) -> None:
    kept = []
    for step, loss in ((10, 0.5), (20, 0.3), (30, 0.4), (40, 0.35), (50, 0.2)):
        run_to(writer, trainer, step, loss)
        kept.append([int(name.removeprefix("step=")) for name in names(writer)])
    assert kept == [[10], [20], [20, 30], [20, 40], [50]]


def test_a_stops_checkpoint_is_never_the_best_and_goes(
    writer: CheckpointWriter, trainer: Any
) -> None:
    run_to(writer, trainer, 10, 0.5)
    trainer.global_step = 15
    writer.save(trainer, store_values=False)
    assert names(writer) == ["step=000010", "step=000015"]
    assert writer.best_model_path.endswith("step=000010")
    run_to(writer, trainer, 20, 0.6)
    assert names(writer) == ["step=000010", "step=000020"]


def test_an_earlier_starts_checkpoints_are_known(writer: CheckpointWriter, trainer: Any) -> None:
    run_to(writer, trainer, 10, 0.5)
    run_to(writer, trainer, 20, 0.6)
    again = CheckpointWriter(writer.folder, writer.manifest, 10)
    again.setup(trainer, trainer.lightning_module, "fit")
    assert Path(again.best_model_path).name == "step=000010"
    assert Path(again.last_model_path).name == "step=000020"
    again.save(trainer, store_values=False)  # a stop before the next step
    assert names(writer) == ["step=000010", "step=000020"]
    assert read_manifest(writer.folder / "step=000020").val_loss == 0.6


@pytest.mark.parametrize(
    ("rank", "stage", "is_removed"), [(0, "fit", True), (1, "fit", False), (0, "validate", False)]
)
def test_one_that_a_killed_start_left_is_removed(
    writer: CheckpointWriter,
    trainer: Any,
    monkeypatch: pytest.MonkeyPatch,
    rank: int,
    stage: str,
    is_removed: bool,
) -> None:
    """It was killed after the rename of its last checkpoint; no later save may follow."""
    monkeypatch.setattr(writer, "_prune", lambda last: None)
    for step, loss in ((10, 0.6), (20, 0.4), (30, 0.5)):
        run_to(writer, trainer, step, loss)
    assert len(names(writer)) == 3
    again = CheckpointWriter(writer.folder, writer.manifest, 10)
    trainer.is_global_zero = rank == 0
    again.setup(trainer, trainer.lightning_module, stage)
    assert names(again) == ["step=000010", "step=000020", "step=000030"][is_removed:]


def test_one_that_is_being_read_is_kept_until_the_next_save(
    writer: CheckpointWriter, trainer: Any
) -> None:
    run_to(writer, trainer, 10, 0.5)
    run_to(writer, trainer, 20, 0.6)
    with lock_checkpoint(writer.folder / "step=000010"):
        run_to(writer, trainer, 30, 0.3)
        assert names(writer) == ["step=000010", "step=000030"]
        verify(writer.folder / "step=000010")
    run_to(writer, trainer, 40, 0.2)
    assert names(writer) == ["step=000040"]


def test_strangers_are_neither_chosen_nor_removed(writer: CheckpointWriter, trainer: Any) -> None:
    run_to(writer, trainer, 10, 0.5)
    for step, change in ((11, {"run": {"seed": 7}}), (12, {"stage": "finetune"})):
        stranger = shutil.copytree(
            writer.folder / "step=000010", writer.folder / f"step=0000{step}"
        )
        manifest = replace(read_manifest(writer.folder / "step=000010"), step=step, **change)
        write_manifest(stranger, replace(manifest, val_loss=0.001))
    damaged = Path(shutil.copytree(writer.folder / "step=000010", writer.folder / "step=000013"))
    run_to(writer, trainer, 20, 0.4)
    assert names(writer) == [*(f"step=0000{step}" for step in (11, 12, 13)), "step=000020"]
    assert Path(writer.best_model_path).name == "step=000020"
    assert damaged.is_dir()
