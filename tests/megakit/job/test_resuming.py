"""Which run goes on, which one is done, and what `--fresh` does, through `prepare`."""

import shutil
from dataclasses import replace

import pytest

from megakit.checkpoints.manifest import MANIFEST, read_manifest, write_manifest
from megakit.job.runs import RUN_FILE, SUMMARY, find_start
from tests.fabricate import make_checkpoint, make_run, prepare_run
from tests.hostile import problem as problem_of
from tests.megakit.job.stages import FIRST, LAST, SECOND, SecondOptions, spoil
from tests.scripts import read_json


class TestWhatARunIs:
    def test_one_that_ended_early_is_done(self, options, lines):
        options = replace(options, stop_after=2)
        directory = make_run(FIRST, options, (10, 20), done=False)
        last = directory.checkpoints / "step=000020"
        assert not prepare_run(FIRST, options).is_done
        write_manifest(last, replace(read_manifest(last), final=True))
        assert not prepare_run(FIRST, options).is_done  # before it has reported its end
        (directory.path / SUMMARY).write_text("{}")
        assert prepare_run(FIRST, options).is_done
        found = find_start(SECOND, None, options.output_dir, lines.append)
        assert found is not None
        found[2].close()
        assert lines == []  # the stage before is not under way

    def test_it_is_not_done_without_its_last_checkpoint(self, options):
        """The checkpoints were removed, and a new start was killed after its first save."""
        directory = make_run(FIRST, options, (10,))
        shutil.rmtree(directory.checkpoints / LAST)
        plan = prepare_run(FIRST, options)
        assert plan.resume == str(directory.checkpoints / "step=000010")
        assert not plan.is_done
        assert not (directory.path / SUMMARY).exists()

    def test_it_is_not_done_without_its_summary(self, options):
        directory = make_run(FIRST, options, (10,))
        assert prepare_run(FIRST, options).is_done
        (directory.path / SUMMARY).unlink()
        assert not prepare_run(FIRST, options).is_done

    @pytest.mark.parametrize("harm", ["damaged", "renamed", "another seed's"])
    def test_it_is_not_done_with_a_last_checkpoint_that_is_not_its_own(self, options, harm):
        directory = make_run(FIRST, options, (10,))
        last = directory.checkpoints / LAST
        if harm == "damaged":
            spoil(last)
        elif harm == "renamed":
            shutil.rmtree(last)
            shutil.copytree(directory.checkpoints / "step=000010", last)
        else:
            manifest = read_manifest(last)
            write_manifest(last, replace(manifest, run=manifest.run | {"seed": 7}))
        plan = prepare_run(FIRST, options)
        assert plan.resume == str(directory.checkpoints / "step=000010")
        assert not plan.is_done
        (aside,) = directory.checkpoints.glob(f"*-{LAST}")
        assert aside.name.startswith("foreign" if "seed" in harm else "damaged")
        assert (aside / MANIFEST).is_file()

    def test_the_manifests_say_whose_run_it_is(self, options):
        """A run.json that is missing or was edited counts for nothing."""
        directory = make_run(FIRST, replace(options, seed=7), (10,))
        path = directory.path / RUN_FILE
        path.write_text(path.read_text().replace('"seed": 7', '"seed": 42'))
        assert "--seed was 7, now 42" in problem_of(prepare_run, FIRST, options)
        path.unlink()
        assert "--seed was 7, now 42" in problem_of(prepare_run, FIRST, options)
        assert prepare_run(FIRST, replace(options, seed=7)).is_done
        assert read_json(path)["seed"] == 7

    def test_a_run_may_move(self, options, tmp_path):
        make_run(FIRST, options, (10,), done=False)
        options.output_dir.rename(tmp_path / "moved")
        plan = prepare_run(FIRST, replace(options, output_dir=tmp_path / "moved"))
        assert plan.resume == str(tmp_path / "moved" / "first" / "checkpoints" / "step=000010")

    def test_its_dataset_stays_where_none_is_named(self, options):
        auto = replace(options, dataset="auto")
        assert prepare_run(FIRST, auto).dataset == "plums"
        shutil.rmtree(options.output_dir)
        make_run(FIRST, replace(options, dataset="pears"), (10,), done=False)
        assert prepare_run(FIRST, auto).dataset == "pears"
        assert prepare_run(FIRST, replace(auto, fresh=True)).dataset == "plums"

    def test_a_damaged_best_checkpoint_of_a_finished_run_is_set_aside(self, options):
        directory = make_run(FIRST, options, (10,))
        best, last = directory.checkpoints / "step=000010", directory.checkpoints / LAST
        write_manifest(best, replace(read_manifest(best), val_loss=0.0))
        assert directory.best_checkpoint() == best
        spoil(best)
        assert prepare_run(FIRST, options).is_done
        assert directory.best_checkpoint() == last

    def test_fresh_keeps_the_old_run_under_another_name(self, options):
        make_run(FIRST, options, (10,))
        plan = prepare_run(FIRST, replace(options, fresh=True, seed=1))
        assert (plan.resume, plan.is_done) == (None, False)
        assert plan.old_run == str(options.output_dir / "first.1")
        assert (options.output_dir / "first.1" / "checkpoints" / "step=000010").is_dir()
        assert (options.output_dir / "first.1" / "summary.json").is_file()

    def test_a_newer_result_of_the_stage_before(self, options):
        before = make_run(FIRST, options, (10,))
        second = SecondOptions(output_dir=options.output_dir, accelerator="cpu")
        make_run(SECOND, second, (5,), done=False)
        assert prepare_run(SECOND, second).resume
        newer = make_checkpoint(
            before.checkpoints,
            2000,
            stage="first",
            model="Encoder",
            val_loss=0.0001,
            run=before.identity(),
        )
        problem = problem_of(prepare_run, SECOND, second)
        for part in (str(newer), "previous stage", "--fresh"):
            assert part in problem
