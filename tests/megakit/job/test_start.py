"""The checkpoint that a stage starts from: found, verified and protected."""

import pytest

from megakit.checkpoints.manifest import MANIFEST, verify
from megakit.checkpoints.select import remove
from megakit.job.runs import find_start
from tests.fabricate import make_checkpoint, make_run
from tests.hostile import problem as problem_of
from tests.megakit.job.stages import FIRST, LAST, SECOND, spoil


class TestStart:
    def start(self, named, output_dir, lines=None):
        report = lines.append if lines is not None else print
        found = find_start(SECOND, named, output_dir, report)
        if found is None:
            return None
        checkpoint, manifest, file = found
        file.close()
        return checkpoint, manifest

    def test_the_best_of_the_stage_before(self, options, lines):
        directory = make_run(FIRST, options, (10, 20))
        best = directory.checkpoints / LAST
        assert self.start(None, options.output_dir, lines) == (best, verify(best))
        assert lines == []

    def test_one_that_was_named(self, options, lines):
        make_run(FIRST, options, (10, 20))
        named = options.output_dir / "first" / "checkpoints" / "step=000010"
        assert self.start(str(named), options.output_dir / "nothing", lines) == (
            named,
            verify(named),
        )

    def test_a_stage_before_that_is_under_way_is_remarked(self, options, lines):
        directory = make_run(FIRST, options, (10,), done=False)
        assert self.start(None, options.output_dir, lines) is not None
        (line,) = lines
        assert str(directory.path) in line

    def test_no_checkpoint_names_the_script_that_makes_it(self, tmp_path):
        problem = problem_of(self.start, None, tmp_path)
        for part in (str(tmp_path / "first" / "checkpoints"), "first.py", "--checkpoint"):
            assert part in problem

    def test_an_unfinished_one(self, options):
        checkpoint = make_run(FIRST, options, (10,)).checkpoints / "step=000010"
        (checkpoint / MANIFEST).unlink()
        problem = problem_of(self.start, str(checkpoint), options.output_dir)
        assert str(checkpoint) in problem
        assert "not a complete checkpoint" in problem

    @pytest.mark.parametrize("by_name", [True, False])
    def test_a_damaged_one_is_an_error_and_not_set_aside(self, options, by_name):
        folder = make_run(FIRST, options, (10,)).checkpoints
        best = folder / LAST
        spoil(best)
        named = str(best) if by_name else None
        problem = problem_of(self.start, named, options.output_dir)
        assert str(best) in problem
        assert "damaged" in problem
        assert sorted(path.name for path in folder.iterdir()) == ["step=000010", LAST]

    def test_a_renamed_one_is_an_error(self, options):
        folder = make_run(FIRST, options, (10,), done=False).checkpoints
        renamed = (folder / "step=000010").rename(folder / "step=000500")
        for named in (str(renamed), None):
            problem = problem_of(self.start, named, options.output_dir)
            for part in (str(renamed), "step 10", "renamed"):
                assert part in problem

    def test_one_under_a_name_of_the_users_own(self, options, tmp_path):
        folder = make_run(FIRST, options, (10,)).checkpoints
        mine = (folder / "step=000010").rename(tmp_path / "mine")
        assert self.start(str(mine), options.output_dir) == (mine, verify(mine))

    def test_one_that_its_run_is_about_to_remove_is_kept(self, options):
        checkpoint = make_run(FIRST, options, (10,)).checkpoints / "step=000010"
        found = find_start(SECOND, str(checkpoint), options.output_dir, print)
        assert found is not None
        *_, file = found
        assert not remove(checkpoint)
        assert verify(checkpoint)
        file.close()
        assert remove(checkpoint)
        assert not checkpoint.exists()

    @pytest.mark.parametrize(("stage", "model"), [("second", "Classifier"), ("first", "Other")])
    def test_one_of_another_model(self, tmp_path, stage, model):
        checkpoint = make_checkpoint(tmp_path, 10, stage=stage, model=model)
        problem = problem_of(self.start, str(checkpoint), tmp_path)
        for part in (str(checkpoint), model, stage, "Encoder", "first.py", "--checkpoint"):
            assert part in problem
