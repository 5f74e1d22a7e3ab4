"""The best of a run's checkpoints; those that a run cannot use, and those that are removed."""

import errno
import math
import os
from dataclasses import replace
from pathlib import Path

import pytest

from megakit.checkpoints.manifest import (
    MANIFEST,
    OtherFormatError,
    read_manifest,
    verify,
    write_manifest,
)
from megakit.checkpoints.select import (
    best_checkpoint,
    keep_own_checkpoints,
    lock_checkpoint,
    own_checkpoints,
    remove,
    remove_leftovers,
)
from megakit.errors import UserError
from tests.fabricate import make_checkpoint

RUN = {"seed": 1}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def cut(checkpoint: Path) -> None:
    (checkpoint / "weights" / "__0_0.distcp").write_bytes(b"")


@pytest.mark.parametrize(
    ("losses", "best"),
    [
        ((0.3, 0.1, 0.2), 2),
        ((0.2, 0.1, 0.1), 2),  # of two equal ones the older
        ((None, 0.2, None), 2),
        ((None, None), 2),  # the last
        ((math.nan, 0.5), 2),
        ((0.5, math.nan), 1),
        ((math.nan, math.nan), 1),
        ((), None),
    ],
)
def test_the_lowest_loss_is_the_best_and_nan_the_worst(
    tmp_path: Path, losses: tuple[float | None, ...], best: int | None
) -> None:
    made = [make_checkpoint(tmp_path, n, val_loss=loss) for n, loss in enumerate(losses, start=1)]
    (tmp_path / ".step=000009").mkdir()
    assert best_checkpoint(tmp_path) == (made[best - 1] if best else None)
    assert best_checkpoint(tmp_path, by="last") == (made[-1] if made else None)


@pytest.mark.parametrize(("is_highest", "best"), [(True, 2), (False, 3)])
def test_another_value_may_choose(tmp_path: Path, is_highest: bool, best: int) -> None:
    made = [make_checkpoint(tmp_path, step, val_loss=0.5) for step in range(4)]
    for checkpoint, value in zip(made, (math.nan, 0.3, 0.9, 0.1), strict=True):
        manifest = replace(read_manifest(checkpoint), values={"val_top": value})
        write_manifest(checkpoint, replace(manifest, higher_is_better=is_highest))
    assert best_checkpoint(tmp_path, by="val_top") == made[best]
    assert best_checkpoint(tmp_path) == made[0]


def test_a_run_keeps_its_own_and_renames_the_others(tmp_path: Path) -> None:
    made = {step: make_checkpoint(tmp_path, step, run=RUN) for step in (10, 20, 30, 40, 50)}
    cut(made[10])
    (made[30] / MANIFEST).write_text("{")
    write_manifest(made[40], replace(read_manifest(made[40]), run={"seed": 2}))
    write_manifest(made[50], replace(read_manifest(made[50]), stage="finetune"))
    assert list(own_checkpoints(tmp_path, "pretrain", RUN)) == [made[10], made[20]]
    (tmp_path / "damaged-step=000010").mkdir()  # of an earlier start
    lines: list[str] = []
    assert list(keep_own_checkpoints(tmp_path, "pretrain", RUN, lines.append)) == [made[20]]
    renamed = ["damaged-step=000010.2", "damaged-step=000030"]
    renamed += ["foreign-step=000040", "foreign-step=000050"]
    assert names(tmp_path) == ["damaged-step=000010", *renamed, "step=000020"]
    for line, name in zip(lines, renamed, strict=True):
        assert line.endswith(f"The checkpoint was renamed to {name}.")


def test_what_may_be_undamaged_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint of another version, and a disk that cannot be read now."""
    path = make_checkpoint(tmp_path, 10) / MANIFEST
    content = path.read_text()
    path.write_text(content.replace('"format_version": 2', '"format_version": 1'))
    with pytest.raises(OtherFormatError, match=r"format version 1; .* --fresh"):
        keep_own_checkpoints(tmp_path, "pretrain", {}, print)

    def fail(path: Path) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    path.write_text(content)
    monkeypatch.setattr(Path, "read_bytes", fail)
    with pytest.raises(UserError, match="Input/output error"):
        keep_own_checkpoints(tmp_path, "pretrain", {}, print)
    monkeypatch.undo()
    assert list(keep_own_checkpoints(tmp_path, "pretrain", {}, print)) == [path.parent]


def test_a_locked_checkpoint_is_not_removed(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path, 10)
    with lock_checkpoint(checkpoint), lock_checkpoint(checkpoint):
        assert not remove(checkpoint)
        verify(checkpoint)
    assert remove(checkpoint)
    assert names(tmp_path) == []
    assert not remove(checkpoint)
    with pytest.raises(FileNotFoundError):
        lock_checkpoint(checkpoint)


def test_remains_are_removed_and_nothing_else(tmp_path: Path) -> None:
    (make_checkpoint(tmp_path, 20)).rename(tmp_path / ".step=000020")
    others = [".snapshots", "damaged-step=000030"]
    for name in (".removing-step=000005", *others):
        (tmp_path / name).mkdir()
    make_checkpoint(tmp_path, 10)
    remove_leftovers(tmp_path)
    assert names(tmp_path) == [*others, "step=000010"]
