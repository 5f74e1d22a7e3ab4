"""manifest.json: every damage to it, or to a file that it lists, is refused by name."""

import hashlib
import json
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megakit.checkpoints.manifest import (
    MANIFEST,
    VERIFIED,
    Manifest,
    checkpoint_name,
    list_checkpoints,
    list_files,
    read_manifest,
    step_in_name,
    verify,
    verify_if_possible,
    write_manifest,
)
from megakit.errors import UserError
from tests.fabricate import make_checkpoint
from tests.refusals import problem as problem_of

WEIGHTS = "weights/__0_0.distcp"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path, 500, val_loss=0.1 + 0.2, run={"lr": 1 / 3, "n": None})


def edit(checkpoint: Path, **changes: Any) -> None:
    path = checkpoint / MANIFEST
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def flip_a_bit(checkpoint: Path) -> None:
    content = bytearray((checkpoint / WEIGHTS).read_bytes())
    content[5] ^= 1
    (checkpoint / WEIGHTS).write_bytes(content)


def link(checkpoint: Path) -> None:
    outside = (checkpoint / "weights").rename(checkpoint.parent / "elsewhere")
    (checkpoint / "weights").symlink_to(outside)


def list_outside(checkpoint: Path) -> None:
    (checkpoint.parent / "secret").write_text("")
    outside = {"../secret": list_files(checkpoint)[WEIGHTS]}
    manifest = read_manifest(checkpoint)
    write_manifest(checkpoint, replace(manifest, files=manifest.files | outside))


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no checkpoint": (shutil.rmtree, "there is no such checkpoint"),
    "unfinished": (lambda path: (path / MANIFEST).unlink(), "not a complete checkpoint"),
    "another file": (lambda path: (path / MANIFEST).write_text("[]"), "cannot be read"),
    "deep nesting": (lambda path: (path / MANIFEST).write_text("[" * 100_000), "cannot be read"),
    "unknown field": (lambda path: edit(path, unknown=1), "cannot be read"),
    "edited loss": (lambda path: edit(path, val_loss=1e-9), "it was edited"),
    "another format": (lambda path: edit(path, format_version=9), "version 9; this program reads"),
    "missing file": (lambda path: (path / WEIGHTS).unlink(), f"elsewhere: {WEIGHTS}."),
    "one bit": (flip_a_bit, f"elsewhere: {WEIGHTS}."),
    "another file too": (lambda path: (path / "more").write_text(""), "elsewhere: more."),
    "a link": (link, WEIGHTS),
    "a path outside": (list_outside, "elsewhere: ../secret."),
}


@pytest.mark.parametrize(("damage", "told"), DAMAGES.values(), ids=DAMAGES)
def test_damage_is_refused_by_name(
    checkpoint: Path, damage: Callable[[Path], Any], told: str
) -> None:
    damage(checkpoint)
    problem = problem_of(verify, checkpoint)
    assert str(checkpoint) in problem
    assert told in problem


def test_a_job_hashes_a_checkpoint_once_unless_it_changes(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The processes that a job starts inherit the variable."""
    hashed, digest = list[str](), hashlib.file_digest

    def counted(file: Any, name: str) -> Any:
        hashed.append(file.name)
        return digest(file, name)

    monkeypatch.setattr(hashlib, "file_digest", counted)

    def number_hashed(by_hash: bool = True) -> int:
        hashed.clear()
        verify(checkpoint, by_hash)
        return len(hashed)

    monkeypatch.setenv(VERIFIED, "")
    written = max(file.stat().st_ctime for file in checkpoint.rglob("*"))
    monkeypatch.setattr(time, "time", lambda: written + 0.5)
    files = number_hashed()
    assert number_hashed() == files > 0, "just written: a change could still have the same time"
    monkeypatch.setattr(time, "time", lambda: written + 2)
    assert number_hashed(by_hash=False) == 0
    assert [number_hashed() for _ in range(3)] == [files, 0, 0]
    time.sleep(0.02)  # the clock of files has steps of up to 10 ms
    flip_a_bit(checkpoint)
    with pytest.raises(UserError, match=f"elsewhere: {WEIGHTS}"):
        verify(checkpoint)


def test_a_checkpoint_under_the_name_of_another_step_is_refused(checkpoint: Path) -> None:
    assert verify(checkpoint.rename(checkpoint.with_name("the best of all"))).step == 500
    renamed = checkpoint.with_name("the best of all").rename(checkpoint.with_name("step=000600"))
    assert "step 500, so the folder was renamed" in problem_of(read_manifest, renamed)


def test_what_is_written_comes_back(checkpoint: Path) -> None:
    manifest = verify(checkpoint)
    assert (manifest.val_loss, manifest.run) == (0.1 + 0.2, {"lr": 1 / 3, "n": None})
    changed = replace(manifest, values={"val_top": 1 / 3}, higher_is_better=True, final=True)
    write_manifest(checkpoint, changed)
    assert verify(checkpoint) == changed


def test_digests_of_released_checkpoints_stay() -> None:
    """The next stage's run records the digest; another one would make it another run."""
    manifest = Manifest(
        *("pretrain", "M", "digits", 10, 0.5),
        run={"seed": 1},
        versions={"torch": "2"},
        files={"weights/a": {"size": 1, "sha256": "0" * 64}},
    )
    assert manifest.digest == "3330d8ddc038c1bc16a082fbb2f31d278926051389562e7dd9164cfc0441d0fe"
    named = replace(manifest, values={"val_top": 0.5}, higher_is_better=True, final=True)
    assert named.digest == "fb225a2522cf67418494ac4ef7ac5b6e0094ce44cf3d4e3f2647f5ebb74799bb"


def test_checkpoints_are_listed_by_step(tmp_path: Path) -> None:
    names = (".step=000011", "damaged-step=000012", "step=000013.2", "step=5")
    for name in (*map(checkpoint_name, (1_000_000, 9, 999_999)), *names):
        (tmp_path / name).mkdir()
    (tmp_path / "step=000014").write_text("a file")
    assert [step_in_name(path) for path in list_checkpoints(tmp_path)] == [9, 999_999, 1_000_000]
    assert list_checkpoints(tmp_path / "nothing") == []


def test_a_checkpoint_of_nemo_s_own_is_read_with_a_warning(checkpoint: Path) -> None:
    flip_a_bit(checkpoint)
    assert WEIGHTS in problem_of(verify_if_possible, checkpoint)
    (checkpoint / MANIFEST).unlink()
    with pytest.warns(UserWarning, match="could not be verified"):
        verify_if_possible(checkpoint)
