"""Runs inside a process that goes on afterwards; the notebook's own test trains in one."""

import os
import sys
from pathlib import Path

import pytest

from megakit.errors import UserError
from megakit.job.interactive import open_run
from megakit.reporting.streams import diverted
from model_pretrain import PRETRAIN, PretrainOptions


def test_all_goes_to_the_file_and_later_not(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log.txt"
    log.write_text("before\n")
    with diverted(log):
        print("out")
        print("err", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        os.write(1, b"one\n")  # as C++ does, past Python's streams
        os.write(2, b"two\n")
    print("after")
    assert log.read_text() == "before\nout\nerr\none\ntwo\n"
    assert capfd.readouterr() == ("after\n", "")


def test_an_error_ends_it_too(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="inside"), diverted(tmp_path / "log"):
        raise ValueError("inside")
    os.write(1, b"shown")
    assert capfd.readouterr().out == "shown"


def test_several_processes_are_refused(tmp_path: Path) -> None:
    options = PretrainOptions(dataset="digits", accelerator="cpu", output_dir=tmp_path, devices=2)
    run = open_run(PRETRAIN, options)
    with pytest.raises(UserError, match=r"--devices 2: .* single process.*model_pretrain\.py"):
        run.__enter__()
