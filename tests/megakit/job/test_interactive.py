"""Runs inside a process that goes on afterwards; the notebook's own test trains in one."""

import logging
import os
import sys
from pathlib import Path

import pytest

from megakit.errors import UserError
from megakit.job.interactive import open_run
from megakit.reporting.streams import diverted
from model_pretrain import PRETRAIN, PretrainOptions
from tests.fabricate import make_run
from tests.scripts import read_csv, run_python


def written_by(descriptor: int, text: str) -> None:
    """Writes as C++ does, past Python's streams."""
    os.write(descriptor, text.encode())


class TestDiverted:
    def test_all_goes_to_the_file_and_later_not(
        self, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        log = tmp_path / "log.txt"
        log.write_text("before\n")
        with diverted(log):
            print("out")
            print("err", file=sys.stderr)
            sys.stdout.flush()
            sys.stderr.flush()
            written_by(1, "one\n")
            written_by(2, "two\n")
        print("after")
        assert log.read_text() == "before\nout\nerr\none\ntwo\n"
        assert capfd.readouterr() == ("after\n", "")

    def test_a_logger_made_inside_keeps_a_stream_that_works(
        self, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        logger = logging.Logger("made inside")
        with diverted(tmp_path / "first"):
            logger.addHandler(logging.StreamHandler())
            logger.warning("1")
        with diverted(tmp_path / "second"):
            logger.warning("2")
        assert (tmp_path / "first").read_text() == "1\n"
        assert (tmp_path / "second").read_text() == "2\n"

    def test_an_error_ends_it_too(self, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(ValueError, match="inside"), diverted(tmp_path / "log"):
            raise ValueError("inside")
        written_by(1, "shown")
        assert capfd.readouterr().out == "shown"


REFUSED = """
import sys
from pathlib import Path

from megakit.errors import UserError
from megakit.job.interactive import open_run
from model_pretrain import PRETRAIN, PretrainOptions

folder, devices = sys.argv[1:]
options = PretrainOptions(
    dataset="digits",
    accelerator="cpu",
    output_dir=Path(folder),
    fresh=True,
    devices=int(devices),
)
with open_run(PRETRAIN, options):
    raise UserError("The model needs another option.")
"""


class TestOpenRun:
    @staticmethod
    def options(folder: Path, **changes: object) -> PretrainOptions:
        return PretrainOptions(
            dataset="digits",
            accelerator="cpu",
            output_dir=folder,
            **changes,  # type: ignore[arg-type]
        )

    def test_several_processes_are_refused(self, tmp_path: Path) -> None:
        run = open_run(PRETRAIN, self.options(tmp_path, devices=2))
        with pytest.raises(UserError, match=r"--devices 2: .* single process.*model_pretrain\.py"):
            run.__enter__()

    @pytest.mark.parametrize("devices", [1, 2])
    def test_a_refused_fresh_start_leaves_the_old_run_in_its_place(
        self, tmp_path: Path, devices: int
    ) -> None:
        """In a process of its own, because `open_run` ends this one's process groups."""
        old = make_run(PRETRAIN, self.options(tmp_path), (10,))
        refused = run_python("-c", REFUSED, tmp_path, devices)
        assert refused.err.splitlines()[-1].startswith("megakit.errors.UserError")
        assert [path.name for path in tmp_path.iterdir()] == ["pretrain"]
        assert old.newest_step == PretrainOptions.max_steps

    def test_all_problems_are_told_at_once(self, tmp_path: Path) -> None:
        run = open_run(PRETRAIN, self.options(tmp_path, lr=-1.0, max_steps=0))
        with pytest.raises(UserError) as caught:
            run.__enter__()
        assert len(caught.value.problems) == 2


SESSION = """
import sys
sys.ps1 = ">>> "  # by which Lightning knows a prompt or a notebook
from pathlib import Path
from megakit.job.interactive import import_stack, open_run
import_stack(64)
from model_finetune import FINETUNE, FinetuneOptions, finetune
from model_pretrain import PRETRAIN, PretrainOptions, pretrain

common = dict(dataset="digits", accelerator="cpu", output_dir=Path(sys.argv[1]), max_steps=4)
for batch in (64, 32):  # two jobs of different sizes, one after the other
    with open_run(PRETRAIN, PretrainOptions(**common, micro_batch_size=batch, fresh=True)) as run:
        print(pretrain(run).name)
with open_run(FINETUNE, FinetuneOptions(**common)) as run:
    best = finetune(run)
print(best.relative_to(common["output_dir"]))

import signal
from megakit.errors import UserError
from megakit.runtime.signals import handle_signals
try:
    with open_run(PRETRAIN, PretrainOptions(**common, fresh=True)):
        handle_signals(lambda number, frame: None)  # as training that ends with an exception
        raise UserError("ended")
except UserError:
    print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)
"""


@pytest.mark.long
def test_one_run_after_another_without_a_word_of_the_frameworks(tmp_path: Path) -> None:
    done = run_python("-c", SESSION, tmp_path)
    assert done.output() == "finetune/checkpoints/step=000004\nTrue\n"
    assert done.err == ""
    for run in ("pretrain", "pretrain.1", "finetune"):
        assert read_csv(tmp_path / run / "metrics.csv")[-1]["step"] == "4"
    assert "step=000004" in (tmp_path / "pretrain" / "log.txt").read_text()
