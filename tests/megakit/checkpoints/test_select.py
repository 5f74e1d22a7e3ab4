"""The best of a checkpoints folder, and what a run does with checkpoints that are not its own."""

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
    write_manifest,
)
from megakit.checkpoints.select import (
    best_checkpoint,
    keep_own_checkpoints,
    own_checkpoints,
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
        ((None, None), 2),  # the last
        ((math.nan, 0.5), 2),
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
