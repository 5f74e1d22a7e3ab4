"""manifest.json: what it says comes back, and every kind of damage is found and named."""

import hashlib
import json
import math
import os
import time
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from megakit.checkpoints import manifest as manifest_module
from megakit.checkpoints.folders import (
    MANIFEST,
    checkpoint_name,
    list_checkpoints,
    step_of,
    weights_folder,
)
from megakit.checkpoints.manifest import (
    FORMAT_VERSION,
    OWN_DIGEST,
    Manifest,
    list_files,
    read_manifest,
    verify,
    verify_if_possible,
    write_manifest,
)
from megakit.errors import UserError
from tests.fabricate import make_checkpoint

WEIGHTS = "weights/__0_0.distcp"


@pytest.fixture
def checkpoint(tmp_path):
    return make_checkpoint(tmp_path, 500, val_loss=0.125, run={"seed": 1, "lr": 1e-3, "n": None})


def problem_of(function, *args):
    with pytest.raises(UserError) as error:
        function(*args)
    (problem,) = error.value.problems
    return problem


def change(checkpoint, **changes):
    """Edits the manifest as somebody does who also makes its own digest right again."""
    path = checkpoint / MANIFEST
    content = json.loads(path.read_text()) | changes
    del content[OWN_DIGEST]
    text = json.dumps(content, sort_keys=True)
    content[OWN_DIGEST] = hashlib.sha256(text.encode()).hexdigest()
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    "changes",
    [
        {"dataset": ["\x1b[2J"]},
        {"dataset": "x" * 1000},
        {"files": {"\x1b[2J": {"size": 1, "sha256": ""}}},
        {"files": {"../\x1b[2J": {"size": 1, "sha256": ""}}},
        {"files": {f"weights/{n}": {"size": 1, "sha256": ""} for n in range(10_000)}},
        {"files": {f"../{n}": {"size": 1, "sha256": ""} for n in range(10_000)}},
        {"format_version": "\x1b[2J" * 1000},
    ],
)
def test_a_message_is_short_and_has_no_terminal_commands(checkpoint, changes):
    change(checkpoint, **changes)
    problem = problem_of(verify, checkpoint)
    assert problem.isprintable()
    assert len(problem) < 3000


class TestNames:
    @pytest.mark.parametrize(
        ("step", "name"),
        [(0, "step=000000"), (500, "step=000500"), (12345678, "step=12345678")],
    )
    def test_steps(self, tmp_path, step, name):
        assert checkpoint_name(step) == name
        assert step_of(tmp_path / name) == step

    @pytest.mark.parametrize("name", ["step=5", "damaged-step=000500", ".step=000500", "last"])
    def test_other_names(self, tmp_path, name):
        with pytest.raises(ValueError, match="step=000500"):
            step_of(tmp_path / name)

    def test_oldest_first_by_number(self, tmp_path):
        names = ["step=1000000", "step=000009", "step=999999", "step=000010"]
        for name in (*names, ".step=000011", "damaged-step=000012", "step=000013.2"):
            (tmp_path / name).mkdir()
        (tmp_path / "step=000014").write_text("a file")
        assert [step_of(path) for path in list_checkpoints(tmp_path)] == [9, 10, 999999, 1000000]
        assert list_checkpoints(tmp_path / "nothing") == []

    def test_weights_lie_below_or_at_the_top(self, checkpoint, tmp_path):
        assert weights_folder(checkpoint) == checkpoint / "weights"
        (tmp_path / "old").mkdir()
        assert weights_folder(tmp_path / "old") == tmp_path / "old"


class TestManifest:
    def test_it_comes_back(self, checkpoint):
        manifest = read_manifest(checkpoint)
        assert (manifest.stage, manifest.model) == ("pretrain", "PretrainModel")
        assert (manifest.step, manifest.val_loss) == (500, 0.125)
        assert manifest.run == {"seed": 1, "lr": 1e-3, "n": None}
        assert manifest.format_version == FORMAT_VERSION == 2
        assert verify(checkpoint) == manifest

    def test_files_with_size_and_sha256(self, checkpoint):
        files = read_manifest(checkpoint).files
        weights = ["weights/.metadata", WEIGHTS, "weights/metadata.json"]
        assert list(files) == ["context/io.json", *weights]
        content = b"weights of step 500"
        assert files[WEIGHTS] == {
            "size": len(content),
            "sha256": hashlib.sha256(content).hexdigest(),
        }

    def test_only_the_manifest_itself_is_left_out(self, checkpoint):
        (checkpoint / "weights" / MANIFEST).write_text("another's")
        assert f"weights/{MANIFEST}" in list_files(checkpoint)
        assert MANIFEST not in list_files(checkpoint)

    def test_the_digest_tells_checkpoints_apart(self, checkpoint):
        manifest = read_manifest(checkpoint)
        assert len(manifest.digest) == 64
        assert manifest.digest == Manifest(**asdict(manifest)).digest
        spoilt = {WEIGHTS: {"size": 19, "sha256": "0" * 64}}
        for other in (
            replace(manifest, step=501),
            replace(manifest, val_loss=None),
            replace(manifest, run={}),
            replace(manifest, files=spoilt),
            replace(manifest, values={"val_top": 0.5}),
            replace(manifest, higher_is_better=True),
            replace(manifest, final=True),
        ):
            assert other.digest != manifest.digest

    def test_the_digest_does_not_depend_on_the_order_in_the_file(self, checkpoint):
        before = read_manifest(checkpoint)
        content = json.loads((checkpoint / MANIFEST).read_text())
        content["files"] = dict(reversed(content["files"].items()))
        (checkpoint / MANIFEST).write_text(json.dumps(dict(reversed(content.items()))))
        assert read_manifest(checkpoint).digest == before.digest

    def test_numbers_survive_exactly(self, tmp_path):
        written = Manifest("s", "m", "d", 0, val_loss=0.1 + 0.2, run={"lr": 1 / 3})
        for values in ({}, {"val_top": 0.1 + 0.2, "val_none": math.inf}):
            written = replace(written, values=values, higher_is_better=bool(values))
            write_manifest(tmp_path, written)
            assert read_manifest(tmp_path) == written

    def test_one_from_before_there_were_further_values(self, tmp_path):
        content = {
            **{"stage": "s", "model": "m", "dataset": "d", "step": 1, "val_loss": 0.5},
            **{"run": {}, "versions": {}, "files": {}, "format_version": 2},
        }
        digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
        (tmp_path / MANIFEST).write_text(json.dumps(content | {"sha256": digest}))
        manifest = read_manifest(tmp_path)
        assert manifest.digest == digest
        assert (manifest.values, manifest.final) == ({}, False)
        write_manifest(tmp_path, manifest)  # and readable by the version before
        assert json.loads((tmp_path / MANIFEST).read_text()) == content | {"sha256": digest}

    def test_which_checkpoint_ends_a_run(self):
        last = Manifest("s", "m", "d", 7)
        assert last.ends(7)
        assert not last.ends(6)
        assert not last.ends(8)
        assert not last.ends(None)
        assert replace(last, final=True).ends(8)


class TestUnreadable:
    def test_no_checkpoint(self, tmp_path):
        problem = problem_of(read_manifest, tmp_path / "x")
        assert problem.startswith(f"{tmp_path / 'x'}: there is no such checkpoint. Name a folder")

    def test_a_file_instead(self, tmp_path):
        (tmp_path / "x").write_text("")
        assert "no such checkpoint" in problem_of(verify, tmp_path / "x")

    def test_unfinished(self, checkpoint):
        (checkpoint / MANIFEST).unlink()
        problem = problem_of(verify, checkpoint)
        for part in (str(checkpoint), "not a complete checkpoint", MANIFEST):
            assert part in problem

    @pytest.mark.parametrize(
        "content", [b"", b"{", b"[]", b"null", b"7", b"{}", b"\xff\xfe", b'{"format_version": 2}']
    )
    def test_damaged(self, checkpoint, content):
        (checkpoint / MANIFEST).write_bytes(content)
        problem = problem_of(verify, checkpoint)
        assert str(checkpoint / MANIFEST) in problem
        assert "cannot be read" in problem

    def test_cut_anywhere(self, checkpoint):
        whole = (checkpoint / MANIFEST).read_bytes()
        for length in range(len(whole.rstrip())):
            (checkpoint / MANIFEST).write_bytes(whole[:length])
            assert "cannot be read" in problem_of(verify, checkpoint)

    @pytest.mark.parametrize(
        "changes",
        [
            {"files": None},
            {"files": []},
            {"files": {WEIGHTS: None}},
            {"files": {WEIGHTS: {}}},
            {"files": {WEIGHTS: "a" * 64}},
            {"step": "many"},
            {"val_loss": "low"},
            {"step": True},
            {"val_loss": 10**400},
            {"model": "M" * 100_000},
            {"stage": "s" * 1000},
            {"step": -1},
            {"files": {WEIGHTS: {"size": "19", "sha256": "a" * 64}}},
            {"files": {WEIGHTS: {"size": 19, "sha256": 7}}},
            {"unknown": 1},
            {"values": []},
            {"values": {"val_top": "high"}},
            {"values": {"val_top": True}},
            {"higher_is_better": 1},
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

    def test_a_sparse_file_is_not_hashed(self, checkpoint):
        size = 1 << 40
        os.truncate(checkpoint / WEIGHTS, size)
        files = read_manifest(checkpoint).files | {WEIGHTS: {"size": size, "sha256": "0" * 64}}
        change(checkpoint, files=files)
        assert f"{WEIGHTS} is large and almost empty" in problem_of(verify, checkpoint)

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            *(("val_loss", 1e-9), ("val_loss", None), ("step", 501), ("stage", "finetune")),
            *(("values", {"val_top": 0.5}), ("higher_is_better", True), ("final", True)),
            *(("run", {"seed": 2}), ("files", {}), ("dataset", "mnist"), ("versions", {"a": "1"})),
        ],
    )
    def test_edited(self, checkpoint, name, value):
        path = checkpoint / MANIFEST
        path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))
        for read in (read_manifest, verify):
            problem = problem_of(read, checkpoint)
            assert str(path) in problem
            assert "it was edited" in problem

    def test_nested_thousands_deep(self, checkpoint):
        (checkpoint / MANIFEST).write_text("[" * 100_000)
        assert "cannot be read" in problem_of(verify, checkpoint)

    def test_a_pipe_instead(self, checkpoint):
        (checkpoint / MANIFEST).unlink()
        os.mkfifo(checkpoint / MANIFEST)
        assert "not a regular file" in problem_of(read_manifest, checkpoint)

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


class TestDamage:
    def test_a_missing_file(self, checkpoint):
        (checkpoint / WEIGHTS).unlink()
        assert f"{WEIGHTS} is missing" in problem_of(verify, checkpoint)

    @pytest.mark.parametrize("size", [7, 20, 1 << 20])  # the last one is sparse, but small
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

    def test_a_folder_in_a_file_s_place(self, checkpoint):
        (checkpoint / WEIGHTS).unlink()
        (checkpoint / WEIGHTS).mkdir()
        assert f"{WEIGHTS} is missing" in problem_of(verify, checkpoint)

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
        *(({}, True), ({"RANK": "0"}, True), ({"SLURM_PROCID": "0"}, True)),
        *(({"RANK": "1"}, False), ({"SLURM_PROCID": "1"}, False)),
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


class TestHashing:
    """A checkpoint is verified several times in a process, and hashed once."""

    @pytest.fixture
    def hashed(self, checkpoint, monkeypatch):
        """The names of the files that were hashed; a file is settled after 50 ms."""
        hashed = []
        original = hashlib.file_digest

        def file_digest(file, name):
            hashed.append(Path(file.name).name)
            return original(file, name)

        monkeypatch.setattr(hashlib, "file_digest", file_digest)
        monkeypatch.setattr(manifest_module, "SETTLED_SECONDS", 0.05)
        return hashed

    def test_an_unchanged_checkpoint_is_hashed_once(self, checkpoint, hashed):
        time.sleep(0.1)
        for _ in range(3):
            verify(checkpoint)
        assert sorted(hashed) == sorted(Path(name).name for name in list_files(checkpoint))

    @pytest.mark.parametrize("how", ["in place", "replaced"])
    def test_a_file_altered_after_a_verification(self, checkpoint, hashed, how):
        """Neither the size nor the time of the last modification shows it."""
        time.sleep(0.1)
        verify(checkpoint)
        path = checkpoint / WEIGHTS
        status, content = path.stat(), path.read_bytes()
        altered = path if how == "in place" else path.with_name("new")
        altered.write_bytes(bytes([content[0] ^ 1]) + content[1:])
        os.utime(altered, ns=(status.st_atime_ns, status.st_mtime_ns))
        altered.rename(path)
        time.sleep(0.1)
        assert path.stat().st_mtime_ns == status.st_mtime_ns
        assert f"{WEIGHTS} was altered" in problem_of(verify, checkpoint)

    def test_a_file_that_has_just_been_written_is_hashed_each_time(
        self, checkpoint, hashed, monkeypatch
    ):
        monkeypatch.setattr(manifest_module, "SETTLED_SECONDS", 60)
        for _ in range(2):
            verify(checkpoint)
        assert len(hashed) == 2 * len(list_files(checkpoint))

    def test_a_digest_of_a_file_that_has_just_been_written_is_not_kept(
        self, checkpoint, hashed, monkeypatch
    ):
        """The next write may come within the same tick of the clock, and leave the same times."""
        now, fstat = [100.0], os.fstat

        def same_times(descriptor):
            status = fstat(descriptor)
            fields = {name: getattr(status, name) for name in ("st_dev", "st_ino", "st_size")}
            return SimpleNamespace(**fields, st_ctime=100.0, st_ctime_ns=100 * 10**9)

        monkeypatch.setattr(os, "fstat", same_times)
        monkeypatch.setattr(time, "time", lambda: now[0])
        before = list_files(checkpoint)[WEIGHTS]
        (checkpoint / WEIGHTS).write_bytes(b"weights of step 501")
        now[0] += 60
        assert list_files(checkpoint)[WEIGHTS] != before
