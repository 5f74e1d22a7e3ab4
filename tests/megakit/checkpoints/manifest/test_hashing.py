"""A checkpoint is verified several times in a process, and hashed once."""

import hashlib
import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from megakit.checkpoints import manifest as manifest_module
from megakit.checkpoints.manifest import list_files, verify, verify_if_possible
from tests.hostile import problem as problem_of
from tests.megakit.checkpoints.manifest.changing import WEIGHTS


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
        """The names of the files that were hashed; a file is settled after 50 ms.

        A file of an earlier test may have had the same inode, size and times.
        """
        hashed = []
        original = hashlib.file_digest

        def file_digest(file, name):
            hashed.append(Path(file.name).name)
            return original(file, name)

        monkeypatch.setattr(hashlib, "file_digest", file_digest)
        monkeypatch.setattr(manifest_module, "SETTLED_SECONDS", 0.05)
        monkeypatch.setattr(manifest_module, "_digests", {})
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
        # Not this machine's clock, which a network's file system need not follow.
        monkeypatch.setattr(time, "time", lambda: checkpoint.stat().st_ctime)
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
