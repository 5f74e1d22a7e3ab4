"""Every kind of damage, to a manifest or to a file that it lists, is found and named."""

import json
import os

import pytest

from megakit.checkpoints.folders import MANIFEST
from megakit.checkpoints.manifest import FORMAT_VERSION, read_manifest, verify, verify_if_possible
from tests.hostile import problem as problem_of
from tests.megakit.checkpoints.manifest.changing import WEIGHTS, change


class TestUnreadable:
    @pytest.mark.parametrize("read", [read_manifest, verify])
    def test_no_checkpoint(self, tmp_path, read):
        (tmp_path / "file").write_text("")
        for path in (tmp_path / "x", tmp_path / "file"):
            problem = problem_of(read, path)
            assert problem.startswith(f"{path}: there is no such checkpoint. Name a folder")

    def test_unfinished(self, checkpoint):
        (checkpoint / MANIFEST).unlink()
        problem = problem_of(verify, checkpoint)
        for part in (str(checkpoint), "not a complete checkpoint", MANIFEST):
            assert part in problem

    @pytest.mark.parametrize(
        "content",
        [b"", b"[]", b"{}", b"\xff\xfe", b'{"format_version": 2}', b"[" * 100_000],
        ids=lambda content: repr(content[:30]),
    )
    def test_damaged(self, checkpoint, content):
        (checkpoint / MANIFEST).write_bytes(content)
        problem = problem_of(verify, checkpoint)
        assert str(checkpoint / MANIFEST) in problem
        assert "cannot be read" in problem

    @pytest.mark.parametrize(
        "changes",
        [
            {"files": None},
            {"files": {WEIGHTS: None}},
            {"step": "many"},
            {"val_loss": "low"},
            {"model": "M" * 100_000},
            {"step": -1},
            {"files": {WEIGHTS: {"size": "19", "sha256": "a" * 64}}},
            {"unknown": 1},
            {"values": {"val_top": "high"}},
            {"final": "yes"},
        ],
        ids=str,
    )
    def test_of_the_wrong_form(self, checkpoint, changes):
        change(checkpoint, **changes)
        problem = problem_of(verify, checkpoint)
        assert str(checkpoint) in problem
        assert "cannot be read" in problem
        assert len(problem) < 1000

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            *(("val_loss", 1e-9), ("step", 501), ("values", {"val_top": 0.5}), ("final", True)),
            *(("run", {"seed": 2}), ("files", {}), ("versions", {"a": "1"})),
        ],
    )
    def test_edited(self, checkpoint, name, value):
        path = checkpoint / MANIFEST
        path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))
        for read in (read_manifest, verify):
            problem = problem_of(read, checkpoint)
            assert str(path) in problem
            assert "it was edited" in problem

    def test_a_folder_that_was_renamed(self, checkpoint, tmp_path):
        renamed = checkpoint.rename(tmp_path / "step=000600")
        problem = problem_of(verify, renamed)
        for part in (str(renamed), "step 500", "renamed"):
            assert part in problem

    def test_of_another_format(self, checkpoint):
        change(checkpoint, format_version=99)
        problem = problem_of(verify, checkpoint)
        assert "version 99" in problem
        assert f"version {FORMAT_VERSION}" in problem


@pytest.mark.parametrize(
    "changes",
    [
        {"dataset": ["\x1b[2J"]},
        {"files": {"../\x1b[2J": {"size": 1, "sha256": ""}}},
        {"files": {f"../{n}": {"size": 1, "sha256": ""} for n in range(10_000)}},
    ],
)
def test_a_message_is_short_and_has_no_terminal_commands(checkpoint, changes):
    change(checkpoint, **changes)
    problem = problem_of(verify, checkpoint)
    assert problem.isprintable()
    assert len(problem) < 3000


class TestDamage:
    def test_a_missing_file(self, checkpoint):
        (checkpoint / WEIGHTS).unlink()
        assert f"{WEIGHTS} is missing" in problem_of(verify, checkpoint)

    @pytest.mark.parametrize("size", [7, 20])
    def test_a_file_of_another_size(self, checkpoint, size):
        os.truncate(checkpoint / WEIGHTS, size)
        assert f"{WEIGHTS} has {size} bytes, not 19" in problem_of(verify, checkpoint)

    def test_one_bit(self, checkpoint):
        content = bytearray((checkpoint / WEIGHTS).read_bytes())
        content[5] ^= 1
        (checkpoint / WEIGHTS).write_bytes(content)
        problem = problem_of(verify, checkpoint)
        assert WEIGHTS in problem
        assert "sha256" in problem

    def test_a_file_too_many(self, checkpoint):
        (checkpoint / "weights" / "__1_0.distcp").write_text("of another layout")
        assert "weights/__1_0.distcp does not belong to the" in problem_of(verify, checkpoint)

    def test_all_at_once(self, checkpoint):
        (checkpoint / WEIGHTS).unlink()
        (checkpoint / "context" / "io.json").write_text("other")
        (checkpoint / "more").write_text("")
        problem = problem_of(verify, checkpoint)
        for part in (str(checkpoint), WEIGHTS, "context/io.json", "more", "another checkpoint"):
            assert part in problem

    def test_a_copy_elsewhere_is_as_good(self, checkpoint, tmp_path):
        moved = checkpoint.rename(tmp_path / "best of all")
        assert verify(moved).step == 500


@pytest.mark.parametrize(
    ("job", "is_verified"),
    [
        *(({}, True), ({"RANK": "1"}, False), ({"SLURM_PROCID": "1"}, False)),
        ({"RANK": "0", "SLURM_PROCID": "1"}, True),  # torchrun in a task of Slurm
    ],
)
def test_rank_0_verifies_for_all_ranks(checkpoint, monkeypatch, job, is_verified):
    for name in ("RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in job.items():
        monkeypatch.setenv(name, value)
    verify_if_possible(checkpoint)
    os.truncate(checkpoint / WEIGHTS, 7)
    if is_verified:
        assert "damaged" in problem_of(verify_if_possible, checkpoint)
    else:
        verify_if_possible(checkpoint)
