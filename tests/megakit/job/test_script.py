"""The frame around every script, as a process."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megakit.runtime.signals import exit_status
from tests.scripts import REPOSITORY, Result, environment, run_python


@pytest.mark.parametrize(
    ("number", "said"), [(signal.SIGTERM, ""), (signal.SIGINT, "Interrupted.\n")]
)
def test_a_signal_before_training_begins(tmp_path: Path, number: int, said: str) -> None:
    """To the script alone. Which statuses there are: tests/megakit/runtime/test_signals.py."""
    script = subprocess.Popen(
        [
            *(sys.executable, REPOSITORY / "model_pretrain.py", "--dataset", "digits"),
            *("--output-dir", tmp_path),
        ],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        # The frameworks' import comes next and takes seconds.
        while not (tmp_path / "pretrain" / "run.json").exists():
            assert script.poll() is None
            time.sleep(0.01)
        script.send_signal(number)
        _, err = script.communicate(timeout=60)
        assert script.returncode == exit_status(number), err
        assert err.endswith(said)
        assert "Traceback" not in err
    finally:
        script.kill()
        script.communicate()


SCRIPT = """
import shutil
from dataclasses import dataclass
from pathlib import Path

from megakit.errors import UserError
from megakit.job import script
from megakit.job.options import TrainingOptions
from megakit.job.stage import Stage

script.use_accelerator = lambda name: None  # imports torch, which this work does not use


@dataclass(kw_only=True)
class Options(TrainingOptions):
    refuses: bool = False

    def resolve_dataset(self, previous, report, may_download=True):
        print("looking for plums")
        if self.refuses:
            raise UserError("there are no plums.")
        return "plums"


def work(run):
    print("eating plums")
    shutil.rmtree(run.path)
    return Path(run.path / "stones").rename("jar")


if __name__ == "__main__":
    script.run_script(Stage(name="eat", script="eat.py", model="Eater"), Options, work)
"""


def eat(folder: Path, *arguments: object) -> Result:
    """A script of the reader's own."""
    script = folder / "eat.py"
    script.write_text(SCRIPT)
    options = ("--output-dir", folder, "--accelerator", "cpu")
    return run_python(script, *options, *arguments, PYTHONUNBUFFERED="")


def test_what_a_script_printed_is_not_lost_at_its_end(tmp_path: Path) -> None:
    """Python would flush its streams; `os._exit` does not."""
    done = eat(tmp_path, "--refuses")
    assert done.err == "eat.py: there are no plums.\n"
    assert (done.status, done.out) == (2, "looking for plums\n")


def test_an_error_of_a_file_in_a_removed_folder_is_explained(tmp_path: Path) -> None:
    done = eat(tmp_path)
    assert (done.status, done.out) == (1, "looking for plums\n")
    (line,) = done.err.splitlines()
    assert line.startswith(
        f"eat.py: {tmp_path / 'eat'} was removed or renamed while this run was writing"
    )
