"""When a checkpoint is written, what it says of itself, and when it appears."""

from pathlib import Path
from typing import Any

import pytest

from megakit.checkpoints.folders import checkpoint_name
from megakit.checkpoints.manifest import read_manifest, verify
from megakit.checkpoints.writer import CheckpointWriter
from tests.disk import Disk
from tests.megakit.checkpoints.writer.training import Trainer, names, run_to


@pytest.mark.parametrize("validates", [True, False])
def test_saved_at_the_interval_and_after_the_last_step(
    writer: CheckpointWriter, validates: bool
) -> None:
    trainer: Any = Trainer(val_every=7, max_steps=25)
    trainer.enable_validation = validates
    saved = []
    for step in range(1, 26):
        run_to(writer, trainer, step, 1 / step)
        saved += [step] if (writer.folder / checkpoint_name(step)).exists() else []
    assert saved == [10, 20, 25]
    last = verify(writer.folder / "step=000025")
    assert last.val_loss == (1 / 25 if validates else None)
    assert not last.final  # it is the last one by its step


def test_saved_where_that_is_wanted_and_where_the_run_stops_early(
    writer: CheckpointWriter, trainer: Any
) -> None:
    writer.wanted_step = 3
    run_to(writer, trainer, 3)
    assert not read_manifest(writer.folder / "step=000003").final
    trainer.should_stop = True
    run_to(writer, trainer, 5, 0.5)
    assert read_manifest(writer.folder / "step=000005").final
    trainer.max_steps = 7
    run_to(writer, trainer, 7, 0.5)
    assert not read_manifest(writer.folder / "step=000007").final


@pytest.mark.parametrize("changed", ["fn", "sanity_checking"])
def test_only_validations_of_training_save(
    writer: CheckpointWriter, trainer: Any, changed: str
) -> None:
    """Not `trainer.validate()`, and not the check before training."""
    if changed == "fn":
        trainer.state.fn = "validate"
    else:
        trainer.sanity_checking = True
    trainer.callback_metrics["val_loss"] = 0.1
    for step in (0, 10, trainer.max_steps):
        trainer.global_step = step
        writer.on_validation_end(trainer, trainer.lightning_module)
    assert not writer.folder.exists()


def test_any_validated_value_may_choose_the_best(writer: CheckpointWriter, trainer: Any) -> None:
    writer.best_by, writer.best_is_highest = "val_top", True
    for step, top in ((10, 0.7), (20, 0.9), (30, 0.8)):
        trainer.callback_metrics |= {"val_top": top, "train_loss": 1.0}
        run_to(writer, trainer, step, step / 100)
    assert names(writer) == ["step=000020", "step=000030"]
    assert Path(writer.best_model_path).name == "step=000020"
    best = read_manifest(writer.folder / "step=000020")
    assert (best.val_loss, best.values, best.higher_is_better) == (0.2, {"val_top": 0.9}, True)


def test_a_checkpoint_knows_its_own_validation_loss(writer: CheckpointWriter) -> None:
    """One that was not validated knows none."""
    trainer: Any = Trainer(val_every=15)
    losses = {10: None, 15: 0.5, 20: None, 30: 0.2}
    for step, loss in losses.items():
        run_to(writer, trainer, step, loss)
        if step != 15:
            last = writer.folder / checkpoint_name(step)
            assert writer.last_model_path == str(last)
            assert (verify(last).step, verify(last).val_loss) == (step, loss)
    assert writer.best_model_path == writer.last_model_path


def test_a_stop_after_a_validated_step_does_not_count_either(writer: CheckpointWriter) -> None:
    trainer: Any = Trainer(val_every=5)
    run_to(writer, trainer, 5, 0.1)
    writer.save(trainer, store_values=False)
    assert read_manifest(writer.folder / "step=000005").val_loss is None


def test_a_stop_after_a_save_saves_nothing(writer: CheckpointWriter, trainer: Any) -> None:
    run_to(writer, trainer, 10, 0.5)
    before = read_manifest(writer.folder / "step=000010")
    writer.save(trainer, store_values=False)
    assert read_manifest(writer.folder / "step=000010") == before


def test_a_resumed_start_knows_the_time_of_earlier_saves(
    writer: CheckpointWriter, trainer: Any
) -> None:
    run_to(writer, trainer, 10, 0.5)
    assert writer.state_dict() == {"seconds": writer.seconds}
    assert writer.seconds > 0
    writer.load_state_dict({"seconds": 100.0})
    run_to(writer, trainer, 20, 0.4)
    assert 100 < writer.seconds < 200


def test_each_has_a_copy_of_the_files_that_were_named(
    writer: CheckpointWriter, trainer: Any, tmp_path: Path
) -> None:
    writer.copied = [tmp_path / "metrics.csv", tmp_path / "not there"]
    (tmp_path / "metrics.csv").write_text("step\n10\n")
    run_to(writer, trainer, 10, 0.5)
    checkpoint = writer.folder / "step=000010"
    assert (checkpoint / "metrics.csv").read_text() == "step\n10\n"
    assert "metrics.csv" in verify(checkpoint).files


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_0_writes_and_the_others_wait(
    writer: CheckpointWriter, trainer: Any, rank: int
) -> None:
    """Each rank writes its weights after the folder is made, and goes on after it is whole."""
    seen = []

    def see(name: str) -> None:
        seen.append((name, [path.name for path in writer.folder.glob("*")]))

    trainer.is_global_zero = rank == 0
    trainer.strategy.barrier = see
    trainer.save_checkpoint = lambda folder: see("weights")
    run_to(writer, trainer, 10, 0.5)
    partial, whole = ([".step=000010"], ["step=000010"]) if rank == 0 else ([], [])
    assert seen == [("folder made", partial), ("weights", partial), ("checkpoint complete", whole)]


def test_a_checkpoint_appears_when_it_is_whole_and_on_the_disk(
    writer: CheckpointWriter, trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a power failure at any moment, a checkpoint is whole, or the one before is there."""

    def check(source: Path, target: Path) -> None:
        if target == writer.folder / "step=000020":
            verify(source)

    disk = Disk(monkeypatch, check)
    run_to(writer, trainer, 10, 0.5)
    run_to(writer, trainer, 20, 0.4)
    appears = disk.events.index("rename .step=000020 to step=000020")
    assert disk.events[appears + 1 :] == [
        "flush checkpoints",
        "rename step=000010 to .removing-step=000010",
    ]
