"""How real processes end, and what goes to which stream.

The statuses of trainings that are stopped or killed on the way are in tests/faults, those of jobs
of several ranks in tests/parallel/test_starting.py.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.faults.harness import Training
from tests.refusals import run_forked
from tests.scripts import REPOSITORY, environment, read_json, run_python, run_script

DIGITS = ("--dataset", "digits", "--accelerator", "cpu")


def test_a_signal_before_training_begins(tmp_path: Path, script: str) -> None:
    """The frameworks' import takes seconds, and hears a signal."""
    training = Training(tmp_path, script)
    started = training.process()
    while not (training.path / "run.json").exists():
        assert started.poll() is None
        time.sleep(0.01)
    started.send_signal(signal.SIGINT)
    out, err = started.communicate(timeout=60)
    assert (started.returncode, out) == (130, ""), err
    assert "Traceback" not in err


OWN_SCRIPT = """
from dataclasses import dataclass

from megakit.errors import UserError
from megakit.job import Stage, TrainingOptions, run_script

@dataclass(kw_only=True)
class Options(TrainingOptions):
    fails: bool = False

    def fingerprint(self):
        print("looking for plums")
        if not self.fails:
            raise UserError(["there are no plums.", "nor pears."])
        return "plums"

def work(run):
    print("eating plums")
    raise RuntimeError("a stone")

if __name__ == "__main__":
    run_script(Stage("eat"), Options, work)
"""


def test_errors_of_a_script_of_the_reader_s_own(tmp_path: Path) -> None:
    """One that the user can mend; and another one, whose traceback is there for its author."""
    (tmp_path / "eat.py").write_text(OWN_SCRIPT)
    options = ("--output-dir", tmp_path, "--accelerator", "cpu")
    refused = run_forked(tmp_path / "eat.py", *options, folder=tmp_path, cwd=tmp_path)
    told = "eat.py: there are no plums.\neat.py: nor pears.\n"
    assert (refused.status, refused.out, refused.err) == (2, "looking for plums\n", told)

    failed = run_python(tmp_path / "eat.py", *options, "--fails")
    assert (failed.status, failed.out) == (1, "looking for plums\n")
    assert "RuntimeError: a stone" in failed.err
    log = tmp_path / "eat" / "log.txt"
    assert failed.err.endswith(f"eat.py failed; the log is {log}.\n")
    assert "eating plums" in log.read_text()  # as all that is printed once the work has begun


@pytest.mark.long
def test_what_a_rank_refuses_before_it_is_connected_is_told_once(tmp_path: Path) -> None:
    """Such as a file that exists on one machine only; here it is not rank 0 that refuses."""
    refuses = (
        'import time; run.is_main and time.sleep(60)\n    raise UserError("there are no plums.")'
    )
    (tmp_path / "eat.py").write_text(OWN_SCRIPT.replace('print("eating plums")', refuses))
    options = ("--output-dir", tmp_path, "--accelerator", "cpu", "--devices", 2)
    refused = run_python(tmp_path / "eat.py", *options, "--fails")
    assert (refused.status, refused.err) == (2, "eat.py: there are no plums.\n")


def test_a_help_that_nobody_reads_to_its_end() -> None:
    """As in `./run layout --help | head -1`."""
    reader, writer = os.pipe()
    os.close(reader)
    command = (REPOSITORY / "run", "layout", "--help")
    done = subprocess.run(
        command, env=environment(VENV=sys.prefix), stdout=writer, stderr=subprocess.PIPE, text=True
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.long
def test_a_processor_that_emulates_bfloat16_computes_in_float32(tmp_path: Path) -> None:
    """Emulated, pretraining takes four times as long."""
    command = ("model_pretrain.py", *DIGITS, "--max-steps", 2, "--output-dir", tmp_path)
    slow = run_script(*command, ONEDNN_MAX_CPU_ISA="AVX2", timeout=200)
    slow.output()
    assert slow.err.count(", 32 (this CPU only emulates bfloat16)\n") == 1
    for name in ("summary.json", "run.json"):
        assert read_json(tmp_path / "pretrain" / name)["precision"] == "32"
