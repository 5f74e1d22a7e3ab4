"""The checkpoint that a stage starts from: found, verified and protected."""

import pytest

from megakit.checkpoints.folders import MANIFEST
from megakit.checkpoints.manifest import verify
from megakit.checkpoints.select import remove
from megakit.job import runs
from megakit.job.runs import RunDirectory, find_start
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

    def test_a_first_stage_starts_from_nothing(self, tmp_path, lines):
        assert find_start(FIRST, None, tmp_path, lines.append) is None

    def test_a_fresh_start_is_asked_for_by_name(self, options):
        make_run(FIRST, options, (10,))
        assert self.start("none", options.output_dir) is None

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

    def test_a_named_one_that_is_not_there(self, tmp_path):
        assert str(tmp_path / "none here") in problem_of(
            self.start, str(tmp_path / "none here"), tmp_path
        )

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

    def test_an_edited_validation_loss_does_not_choose_the_best(self, options):
        folder = make_run(FIRST, options, (10,)).checkpoints
        manifest = folder / "step=000010" / MANIFEST
        manifest.write_text(manifest.read_text().replace('"val_loss": 0.1', '"val_loss": 1e-9'))
        problem = problem_of(self.start, None, options.output_dir)
        assert str(manifest) in problem
        assert "edited" in problem

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

    @pytest.mark.parametrize("moment", ["best_checkpoint", "lock_checkpoint"])
    def test_where_the_best_was_just_removed_another_is_chosen(self, options, monkeypatch, moment):
        """Pretraining, still under way, saves a better one and removes the one that was chosen."""
        folder = make_run(FIRST, options, (10,), done=False).checkpoints
        identity = RunDirectory(folder.parent).identity()

        def replace_best(*_):
            if (folder / "step=000010").exists():
                make_checkpoint(
                    folder, 20, stage="first", model="Encoder", val_loss=0.01, run=identity
                )
                assert remove(folder / "step=000010")

        place = {"best_checkpoint": "best_of"}.get(moment, moment)
        original = getattr(runs, place)

        def replaced_meanwhile(*args):
            if place == "lock_checkpoint":
                replace_best()
                return original(*args)
            chosen = original(*args)
            replace_best()
            return chosen

        monkeypatch.setattr(runs, place, replaced_meanwhile)
        found = self.start(None, options.output_dir)
        assert found is not None
        assert found[0] == folder / "step=000020"

    @pytest.mark.parametrize(
        ("stage", "model"), [("second", "Classifier"), ("first", "Other"), ("other", "Encoder")]
    )
    def test_one_of_another_model(self, tmp_path, stage, model):
        checkpoint = make_checkpoint(tmp_path, 10, stage=stage, model=model)
        problem = problem_of(self.start, str(checkpoint), tmp_path)
        for part in (str(checkpoint), model, stage, "Encoder", "first.py", "--checkpoint"):
            assert part in problem
