"""What `prepare` locks, says and refuses after all checks have passed."""

import os
import time
from dataclasses import replace

import pytest

from megakit.checkpoints.select import remove
from megakit.errors import UserError
from megakit.job.cluster import Cluster
from megakit.job.options import CommonOptions
from megakit.job.preparation import prepare
from megakit.job.run_lock import check_still_ours, lock, lock_inode
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


@pytest.mark.parametrize("verbose", [False, True])
def test_what_fails_between_the_checks_is_a_problem_too(options, monkeypatch, capsys, verbose):
    def fail(*arguments):
        raise RecursionError("deep")

    monkeypatch.setattr("megakit.job.preparation.find_resumption", fail)
    with pytest.raises(UserError, match=r"the preparation: the check failed \(Rec.*deep"):
        prepare_run(FIRST, replace(options, verbose=verbose))
    assert ("Traceback" in capsys.readouterr().err) == verbose


@pytest.mark.parametrize("can_withdraw", [True, False])
def test_a_fresh_start_that_fails_gives_the_old_run_its_name_back(
    options, monkeypatch, can_withdraw
):
    old = make_run(FIRST, options, (10,))

    def fail(*arguments):
        raise OSError(28, "No space left on device")

    def cannot(*arguments):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("megakit.job.runs.RunDirectory.write_identity", fail)
    if not can_withdraw:
        monkeypatch.setattr("megakit.job.runs.RunDirectory.withdraw", cannot)
    with pytest.raises(UserError, match="No space left on device"):  # the first error
        prepare_run(FIRST, replace(options, fresh=True))
    if can_withdraw:
        assert [path.name for path in options.output_dir.iterdir()] == ["first"]
        assert old.newest_step == options.max_steps


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

    def test_a_fresh_start_leaves_the_run_of_another_process_alone(self, options, monkeypatch):
        """It took the place after the old run was renamed, and before the lock."""
        directory = make_run(FIRST, options, (10,))
        others = []

        def comes_first(folder):
            if not folder.exists():
                others.append(lock(folder))
                directory.write_identity({"seed": 7})
            return lock(folder)

        monkeypatch.setattr("megakit.job.preparation.lock", comes_first)
        assert "is in use by" in problem_of(prepare_run, FIRST, replace(options, fresh=True))
        check_still_ours(directory.path, others[0].inode)
        assert directory.identity() == {"seed": 7}
        assert (options.output_dir / "first.1" / "checkpoints" / LAST).is_dir()

    def test_a_fresh_start_that_cannot_lock_gives_the_old_run_its_name_back(
        self, options, monkeypatch
    ):
        directory = make_run(FIRST, options, (10,))

        def fails_without_folder(folder):
            if not folder.exists():
                raise OSError(28, "No space left on device")
            return lock(folder)

        monkeypatch.setattr("megakit.job.preparation.lock", fails_without_folder)
        problem = problem_of(prepare_run, FIRST, replace(options, fresh=True))
        assert "No space left on device" in problem
        assert [path.name for path in options.output_dir.iterdir()] == ["first"]
        assert directory.newest_step == options.max_steps

    def test_another_run_that_came_between_the_checks_and_the_lock(self, options, monkeypatch):
        def comes_first(folder):
            monkeypatch.undo()
            make_run(FIRST, replace(options, seed=7), (10,))
            return lock(folder)

        monkeypatch.setattr("megakit.job.preparation.lock", comes_first)
        assert "--seed was 7, now 42" in problem_of(prepare_run, FIRST, options)


class TestRemarks:
    def said(self, capsys, stage, options, script=None):
        """What `prepare` says to the user."""
        _, guard = prepare(stage, options, Cluster(), Console(), script)
        guard.close()
        return capsys.readouterr().err

    @pytest.mark.parametrize("devices", [2, 3])
    def test_of_the_device(self, options, monkeypatch, capsys, devices):
        accelerator = Accelerator("cpu", "x", 2, "The GPU is not used: it is old.")
        monkeypatch.setattr("megakit.job.checks.find_accelerator", lambda *_, **__: accelerator)
        said = self.said(capsys, FIRST, replace(options, devices=devices, global_batch_size=6))
        assert "The GPU is not used: it is old." in said
        assert ("processes share the 2 CPU cores" in said) == (devices == 3)

    def test_of_a_resumption(self, options, capsys):
        assert self.said(capsys, FIRST, options) == ""
        make_run(FIRST, options, (10,), done=False)
        said = self.said(capsys, FIRST, options)
        assert said.endswith("checkpoints/step=000010, step 10.\n")

    def test_of_a_start_whose_script_has_changed(self, options, capsys, tmp_path):
        first, second = (write_script(tmp_path, stage.script, 1) for stage in (FIRST, SECOND))
        plan = prepare_run(FIRST, options, first)
        run = plan.identity
        checkpoints = RunDirectory(options.output_dir / "first").checkpoints
        make_checkpoint(checkpoints, 1000, stage="first", model="Encoder", run=run)
        later = SecondOptions(output_dir=options.output_dir, accelerator="cpu")
        assert self.said(capsys, SECOND, later, second) == ""
        write_script(tmp_path, FIRST.script, 2)
        said = self.said(capsys, SECOND, later, second)
        assert (
            f"The code of first.py or of its imports has changed since it made "
            f"{checkpoints}/step=001000: work."
        ) in said
        first.unlink()
        assert self.said(capsys, SECOND, later, second) == ""


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

    def test_a_change_that_came_between_the_checks_and_the_lock(
        self, options, tmp_path, script, monkeypatch
    ):
        """Another process, with other code, saved the first checkpoint meanwhile."""
        other = prepare_run(FIRST, options, write_script(tmp_path, "other.py", 2))

        def comes_first(folder):
            self.save(options, other, 10)
            return lock(folder)

        monkeypatch.setattr("megakit.job.preparation.lock", comes_first)
        assert "the code was changed" in problem_of(prepare_run, FIRST, options, script)
