"""What `prepare` locks, says and refuses after all checks have passed."""

import os
import time
from dataclasses import replace

import pytest

from megakit.checkpoints.select import remove
from megakit.job.cluster import Cluster
from megakit.job.options import CommonOptions
from megakit.job.preparation import prepare
from megakit.job.run_lock import lock, lock_inode
from megakit.job.runs import RunDirectory
from megakit.reporting.console import Console
from megakit.runtime.accelerator import Accelerator
from tests.fabricate import make_checkpoint, make_run, prepare_run
from tests.hostile import problem as problem_of
from tests.megakit.job.stages import FIRST, LAST, SECOND, SecondOptions


def test_a_prediction_is_planned_each_time(options):
    class Prediction(CommonOptions):
        def resolve_dataset(self, previous, report, may_download=True):
            return previous

    start = make_run(FIRST, options, (10,)).checkpoints / LAST
    prediction = Prediction(output_dir=options.output_dir, accelerator="cpu")
    for _ in range(2):
        plan = prepare_run(SECOND, prediction)
        assert (plan.start, plan.dataset) == (str(start), "digits")
        assert (plan.resume, plan.is_done, plan.identity) == (None, False, {})


class TestLocks:
    def test_the_directory_and_the_start_are_protected_until_the_job_ends(self, options):
        start = make_run(FIRST, options, (10,)).checkpoints / LAST
        second = SecondOptions(output_dir=options.output_dir, accelerator="cpu")
        plan, guard = prepare(SECOND, second, Cluster(), Console(silent=True))
        assert plan.start == str(start)
        assert plan.lock == lock_inode(options.output_dir / "second")
        assert "is in use by" in problem_of(prepare_run, SECOND, second)
        assert not remove(start)
        child = os.fork()  # such as a data loader's worker, which may live longer
        if child == 0:
            time.sleep(30)
            os._exit(0)
        try:
            time.sleep(0.1)
            guard.close()
            prepare_run(SECOND, second)
            assert remove(start)
        finally:
            os.kill(child, 9)
            os.waitpid(child, 0)

    def test_a_run_that_is_in_use_is_not_renamed(self, options):
        directory = make_run(FIRST, options, (10,))
        own = lock(directory.path)
        problem = problem_of(prepare_run, FIRST, replace(options, fresh=True))
        assert "is in use by" in problem
        assert directory.newest_step == options.max_steps
        own.close()


def test_remarks_of_the_device(options, monkeypatch, capsys):
    accelerator = Accelerator("cpu", "x", 2, "The GPU is not used: it is old.")
    monkeypatch.setattr("megakit.job.checks.find_accelerator", lambda *_, **__: accelerator)
    options = replace(options, devices=3, global_batch_size=6)
    prepare(FIRST, options, Cluster(), Console())[1].close()
    said = capsys.readouterr().err
    assert "The GPU is not used: it is old." in said
    assert "3 processes share the 2 CPU cores" in said


def write_script(folder, name, result):
    """A script with one function, which returns the given number."""
    (folder / name).write_text(
        "from megakit.job.script import run_script\n"
        f"def work(run): return {result}\n"
        "if __name__ == '__main__': run_script(None, None, work)\n"
    )
    return folder / name


class TestChangedCode:
    @pytest.fixture
    def script(self, tmp_path):
        return write_script(tmp_path, "first.py", 1)

    def save(self, options, plan, step):
        folder = options.output_dir / "first" / "checkpoints"
        make_checkpoint(folder, step, stage="first", model="Encoder", run=plan.identity)

    def test_each_change_that_is_kept_is_recorded(self, options, tmp_path, script):
        self.save(options, prepare_run(FIRST, options, script), 10)
        keeping, changes = replace(options, keep_changes=True), []
        leftover = options.output_dir / "first" / "checkpoints" / ".step=000040"
        for step in (20, 30):
            leftover.mkdir()
            write_script(tmp_path, "first.py", step)
            problem = problem_of(prepare_run, FIRST, options, script)
            assert "the code was changed since its last checkpoint: work." in problem
            assert "--keep-changes resumes the run" in problem
            assert leftover.is_dir()  # what is refused changes nothing
            plan = prepare_run(FIRST, keeping, script)
            changes.append({"step": step - 10, "names": ["work"]})
            assert plan.identity["changes"] == changes
            assert RunDirectory(options.output_dir / "first").identity() == plan.identity
            self.save(options, plan, step)
        # A notebook, which compares no code, leaves what is known of it.
        assert prepare_run(FIRST, options).identity == plan.identity

    def test_a_run_that_has_ended_cannot_keep_them(self, options, tmp_path, script):
        self.save(options, prepare_run(FIRST, options, script), options.max_steps)
        write_script(tmp_path, "first.py", 2)
        problem = problem_of(prepare_run, FIRST, options, script)
        assert "without the changes the run has already ended" in problem
        assert "--keep-changes" not in problem
