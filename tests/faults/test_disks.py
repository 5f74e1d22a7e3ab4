"""Disks that are full or read-only: the job ends with a sentence, and loses nothing."""

import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.faults.harness import Training
from tests.once import Chain
from tests.refusals import FINETUNE_PY, PRETRAIN_PY, run_forked
from tests.scripts import REPOSITORY, Result, run, run_script

#: The system's reason, or where torch hides it.
FULL = r"(No space left on device|a file could not be written completely, as on a full disk)"
OPTIONS = ("--dataset", "digits", "--accelerator", "cpu")
#: What fails first: run.json, the log, metrics.csv, the log in training, a file that torch writes
#: without Python, and weights.
SIZES = ("4k", "8k", "16k", "28k", "48k", "400k")


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mounts a disk in memory with the given options, and removes it; or mounts it again."""
    folder = tmp_path / "disk"

    def mount(options: str) -> Path:
        folder.mkdir(exist_ok=True)
        command = ("mount", "-t", "tmpfs", "-o", options, "none", folder)
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"this user may not mount a disk: {done.stderr}")
        return folder

    yield mount
    subprocess.run(("umount", folder), capture_output=True, check=False)


def assert_told(result: Result, folder: Path) -> None:
    assert (result.status, result.out) == (1, ""), result.err
    told = rf"{PRETRAIN_PY}: [a-z ]*{folder}[^:]*: {FULL}\. Complete checkpoints are unchanged\."
    assert re.fullmatch(told, result.err.splitlines()[-1]), result.err
    assert "Traceback" not in result.err


def test_a_log_that_cannot_be_written(tmp_path: Path) -> None:
    log = Training(tmp_path).path / "log.txt"
    log.parent.mkdir()
    log.symlink_to("/dev/full")
    assert_told(run_script(PRETRAIN_PY, *OPTIONS, "--output-dir", tmp_path), Path("/dev/full"))


def test_standard_error_that_cannot_be_written(tmp_path: Path) -> None:
    """There is nobody to tell that pretraining comes first, but the status does."""
    command = f"{sys.executable} {REPOSITORY / FINETUNE_PY} --output-dir {tmp_path} 2>/dev/full"
    assert run("bash", "-c", command) == Result(2, "", "")


@pytest.mark.parametrize(
    "size", [size if size == "4k" else pytest.param(size, marks=pytest.mark.long) for size in SIZES]
)
def test_a_full_disk(size: str, mount: Callable[[str], Path]) -> None:
    folder = mount(f"size={size}")
    assert_told(Training(folder).start(), folder)


@pytest.mark.long
def test_a_disk_that_is_full_after_a_save(mount: Callable[[str], Path]) -> None:
    training = Training(mount("size=2m"))
    assert_told(training.start(), training.folder)
    mount("remount,size=9m")
    done = training.start()
    assert done.status == 0
    assert "Resuming from" in done.err


def test_a_run_that_is_done_in_a_read_only_folder(
    chain: Chain, mount: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = mount("size=9m")
    shutil.copytree(chain.runs / "pretrain", folder / "pretrain")
    mount("remount,ro")
    command = (PRETRAIN_PY, *OPTIONS, "--output-dir", folder)
    done = run_forked(*command, folder=tmp_path, cwd=tmp_path)
    assert f"pretrain is already done: {folder}/pretrain." in done.err
    assert done.output() == f"{folder}/pretrain/checkpoints/step=000500\n"
    fresh = run_forked(*command, "--fresh", folder=tmp_path, cwd=tmp_path)
    told = f"{PRETRAIN_PY}: {folder}/pretrain: cannot be written. Use another --output-dir.\n"
    assert (fresh.status, fresh.err) == (2, told)
