"""What a save that fails says, and what it leaves behind."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megakit.checkpoints.manifest import verify
from megakit.checkpoints.writer import CheckpointWriter
from megakit.errors import RunDirectoryLostError
from tests.megakit.checkpoints.writer.training import names, no_space, run_to


class Wrapped(BaseException):
    """As torch's CheckpointException, which is no Exception."""

    def __init__(self, *causes: BaseException) -> None:
        self.failures = {rank: (cause, None) for rank, cause in enumerate(causes)}


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (no_space(), "No space left on device"),
        (Wrapped(RuntimeError("Worker failure"), no_space()), "No space left on device"),
        (Wrapped(RuntimeError(f"Worker failure: {no_space()}")), "No space left on device"),
        (RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos"), "completely"),
    ],
    ids=["full", "wrapped", "text", "torch's archive"],
)
def test_a_failed_save(
    writer: CheckpointWriter,
    trainer: Any,
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    reason: str,
) -> None:
    free = {writer.folder.parent: 7e6}
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free[path]))
    run_to(writer, trainer, 10, 0.5)

    def fail(folder: Path) -> None:
        (folder / "weights").mkdir()
        (folder / "weights" / "half").write_text("half")
        raise error

    trainer.save_checkpoint, save = fail, trainer.save_checkpoint
    with pytest.raises(OSError, match=rf"step=000020: .*{reason} \(7 MB are free"):
        run_to(writer, trainer, 20, 0.4)
    assert names(writer) == ["step=000010"]
    verify(writer.folder / "step=000010")

    trainer.save_checkpoint = save
    run_to(writer, trainer, 20, 0.4)
    assert names(writer) == ["step=000020"]


def test_a_save_that_fails_on_another_rank_is_removed_by_rank_0(
    writer: CheckpointWriter, trainer: Any
) -> None:
    def fail(folder: Path) -> None:
        raise no_space()

    (writer.folder / ".step=000010").mkdir(parents=True)
    trainer.is_global_zero, trainer.save_checkpoint = False, fail
    with pytest.raises(OSError, match="No space left"):
        run_to(writer, trainer, 10, 0.5)
    assert names(writer) == [".step=000010"]


def test_an_error_of_the_program_stays_what_it_is(writer: CheckpointWriter, trainer: Any) -> None:
    def fail(folder: Path) -> None:
        raise ValueError("a bug")

    trainer.save_checkpoint = fail
    with pytest.raises(ValueError, match="a bug"):
        run_to(writer, trainer, 10, 0.5)
    assert names(writer) == []


def test_nothing_is_written_where_the_folder_is_no_longer_the_runs(
    writer: CheckpointWriter, trainer: Any
) -> None:
    def lost() -> None:
        raise RunDirectoryLostError("removed")

    writer.check_place = lost
    with pytest.raises(RunDirectoryLostError):
        run_to(writer, trainer, 10, 0.5)
    assert not writer.folder.exists()
