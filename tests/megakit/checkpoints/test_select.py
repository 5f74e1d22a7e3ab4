"""The best of a checkpoints folder, and what a run does with checkpoints that are not its own."""

import errno
import math
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from megakit.checkpoints.manifest import (
    MANIFEST,
    Manifest,
    OtherFormatError,
    read_manifest,
    write_manifest,
)
from megakit.checkpoints.select import (
    best_of,
    keep_own_checkpoints,
    own_checkpoints,
)
from megakit.errors import UserError
from tests.fabricate import make_checkpoint

RUN = {"seed": 1}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def damage(checkpoint: Path, change: Callable[[bytes], bytes]) -> None:
    path = checkpoint / "weights" / "__0_0.distcp"
    path.write_bytes(change(path.read_bytes()))


def cut(content: bytes) -> bytes:
    return content[:-1]


def flip(content: bytes) -> bytes:
    return bytes([content[0] ^ 1]) + content[1:]


@pytest.mark.parametrize(
    ("losses", "best"),
    [
        ((0.3, 0.1, 0.2), 2),
        ((0.2, 0.1, 0.1), 2),  # of two equal ones the older
        ((None, None), 2),  # the last
        ((math.nan, 0.5), 2),
        ((math.nan, math.nan), 2),
        ((), None),
    ],
)
def test_the_lowest_loss_is_the_best_and_nan_is_none(
    losses: tuple[float | None, ...], best: int | None
) -> None:
    steps = [Path(str(step)) for step in range(1, len(losses) + 1)]
    manifests = {
        step: Manifest("pretrain", "M", "digits", 0, val_loss=loss)
        for step, loss in zip(steps, losses, strict=True)
    }
    assert best_of(manifests, "val_loss") == (steps[best - 1] if best else None)
    assert best_of(manifests, "last") == (steps[-1] if steps else None)


def test_a_run_keeps_its_own_and_renames_the_others(tmp_path: Path) -> None:
    made = {step: make_checkpoint(tmp_path, step, run=RUN) for step in (10, 20, 30, 40, 50)}
    damage(made[10], cut)
    (made[30] / MANIFEST).write_text("{")
    write_manifest(made[40], replace(read_manifest(made[40]), run={"seed": 2}))
    write_manifest(made[50], replace(read_manifest(made[50]), stage="finetune"))
    assert list(own_checkpoints(tmp_path, "pretrain", RUN)) == [made[10], made[20]]
    (tmp_path / "damaged-step=000010").mkdir()  # of an earlier start
    lines: list[str] = []
    newest = keep_own_checkpoints(tmp_path, "pretrain", RUN, lines.append)
    assert newest == (made[20], read_manifest(made[20]))
    renamed = ["damaged-step=000010.1", "damaged-step=000030"]
    renamed += ["foreign-step=000040", "foreign-step=000050"]
    assert names(tmp_path) == ["damaged-step=000010", *renamed, "step=000020"]
    for line, name in zip(lines, reversed(renamed), strict=True):
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
    assert keep_own_checkpoints(tmp_path, "pretrain", {}, print)[0] == path.parent


def test_only_the_checkpoint_that_a_run_uses_is_verified_by_hash(tmp_path: Path) -> None:
    older, newer = (make_checkpoint(tmp_path, step, run=RUN) for step in (10, 20))
    damage(older, flip)
    newest, _ = keep_own_checkpoints(tmp_path, "pretrain", RUN, print)
    assert newest == newer
    damage(newer, flip)
    assert keep_own_checkpoints(tmp_path, "pretrain", RUN, print) == (None, None)
    assert names(tmp_path) == ["damaged-step=000010", "damaged-step=000020"]
