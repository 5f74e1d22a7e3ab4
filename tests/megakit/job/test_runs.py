"""Run directories: what identifies a run, where it starts and goes on, who may use it."""

import os
import shutil
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest

from megakit.checkpoints.folders import MANIFEST, checkpoint_name
from megakit.checkpoints.manifest import list_files, read_manifest, verify, write_manifest
from megakit.checkpoints.select import remove
from megakit.errors import UserError
from megakit.job import runs
from megakit.job.identity import differences
from megakit.job.options import TrainingOptions
from megakit.job.runs import (
    RUN_FILE,
    SUMMARY,
    RunDirectory,
    check_writable,
    find_resumption,
    find_start,
)
from megakit.job.stage import Stage
from tests.fabricate import make_checkpoint, make_run, prepare_run

FIRST = Stage(name="first", script="first.py", model="Encoder", width=8, num_pipeline_stages=2)
SECOND = Stage(name="second", script="second.py", model="Classifier", before=FIRST)
#: The checkpoint of a finished run's last step.
LAST = checkpoint_name(TrainingOptions.max_steps)


@dataclass(kw_only=True)
class FirstOptions(TrainingOptions):
    dataset: str = "plums"

    def resolve_dataset(self, previous, report, *how):
        return self.dataset


@dataclass(kw_only=True)
class SecondOptions(FirstOptions):
    checkpoint: str | None = None


@dataclass(kw_only=True)
class FewLabelsOptions(FirstOptions):
    num_labels: int | None = None

    def choice(self):
        return self.best_by if self.num_labels is None else "last"


@pytest.fixture
def lines():
    return []


@pytest.fixture
def options(tmp_path):
    return FirstOptions(output_dir=tmp_path / "runs", accelerator="cpu")


def problem_of(function, *args):
    with pytest.raises(UserError) as error:
        function(*args)
    (problem,) = error.value.problems
    return problem


def spoil(checkpoint):
    (checkpoint / "weights" / "__0_0.distcp").write_bytes(b"spoilt")


class TestRunDirectory:
    def test_nothing_there(self, tmp_path):
        directory = RunDirectory(tmp_path / "first")
        assert directory.identity() is None
        assert directory.newest_step is None
        assert directory.best_checkpoint() is None
        assert not directory.path.exists()

    def test_identity_comes_back(self, tmp_path):
        directory = RunDirectory(tmp_path / "runs" / "first")
        identity = {"seed": 1, "lr": 1e-3, "num_labels": None, "dataset": "plums"}
        directory.write_identity(identity)
        assert directory.identity() == identity
        assert [path.name for path in directory.path.iterdir()] == [RUN_FILE]

    @pytest.mark.parametrize("in_file", ["{", '{"seed": 3}', None], ids=str)
    def test_the_checkpoints_say_more_than_the_file(self, tmp_path, in_file):
        directory = RunDirectory(tmp_path)
        make_checkpoint(directory.checkpoints, 10, run={"seed": 1})
        make_checkpoint(directory.checkpoints, 20, run={"seed": 2})
        if in_file is not None:
            (tmp_path / RUN_FILE).write_text(in_file)
        assert directory.identity() == {"seed": 2}
        directory.write_identity({"seed": 1})
        assert directory.identity() == {"seed": 1}

    @pytest.mark.parametrize("content", ["", "{", "[]", "null", "\x00\x01", '"text"'])
    def test_damaged_identity(self, tmp_path, content):
        directory = RunDirectory(tmp_path)
        (tmp_path / RUN_FILE).write_text(content)
        problem = problem_of(directory.identity)
        assert str(tmp_path / RUN_FILE) in problem
        assert "--fresh" in problem

    def test_an_identity_that_is_no_text(self, tmp_path):
        (tmp_path / RUN_FILE).write_bytes(b"\xff\xfe{}")
        assert "--fresh" in problem_of(RunDirectory(tmp_path).identity)

    def test_the_best_checkpoint_is_chosen_as_the_run_says(self, tmp_path):
        for by, step in (("val_loss", 10), ("last", 20)):
            directory = RunDirectory(tmp_path / by)
            make_checkpoint(directory.checkpoints, 10, val_loss=0.1, run={"best_by": by})
            make_checkpoint(directory.checkpoints, 20, val_loss=0.2, run={"best_by": by})
            assert directory.best_checkpoint() == directory.checkpoints / checkpoint_name(step)

    def test_no_best_checkpoint_among_those_of_two_runs(self, tmp_path):
        directory = RunDirectory(tmp_path)
        for step, seed in ((10, 1), (20, 2)):
            make_checkpoint(directory.checkpoints, step, val_loss=0.1, run={"seed": seed})
        problem = problem_of(directory.best_checkpoint)
        for part in (str(directory.checkpoints / "step=000010"), "another run", "--checkpoint"):
            assert part in problem

    def test_each_renamed_run_gets_a_name_of_its_own(self, tmp_path):
        directory = RunDirectory(tmp_path / "first")
        for number in (1, 2, 3):
            directory.write_identity({"seed": number})
            aside = tmp_path / f"first.{number}"
            assert directory.rename() == aside
            assert RunDirectory(aside).identity() == {"seed": number}
            assert not directory.path.exists()


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


class TestDifferences:
    def test_none(self, tmp_path):
        directory = RunDirectory(tmp_path)
        assert differences(directory, {"seed": 1}, None) == []
        directory.write_identity({"seed": 1, "lr": 0.1})
        assert differences(directory, {"lr": 0.1, "seed": 1}, None) == []

    def test_each_is_named_with_both_values(self, tmp_path):
        directory = RunDirectory(tmp_path)
        directory.write_identity({"seed": 1, "lr": 0.1, "num_labels": None, "max_steps": 7})
        asked = {"seed": 2, "lr": 0.2, "num_labels": 100, "max_steps": 7}
        (problem,) = differences(directory, asked, None)
        for part in ("--seed was 1, now 2", "--lr was 0.1, now 0.2"):
            assert part in problem
        assert "--num-labels was None, now 100" in problem
        assert "--max-steps" not in problem
        assert str(tmp_path) in problem
        assert "--fresh" in problem

    @pytest.mark.parametrize(
        ("old", "asked", "part"),
        [
            ({}, {"dropout": None}, "--dropout was absent, now None"),
            ({"dropout": None}, {}, "--dropout was None, now absent"),
            ({"best_by": "val_loss"}, {"best_by": "last"}, "--best-by was val_loss, now last"),
        ],
    )
    def test_what_makes_checkpoints_foreign_is_named_before(self, tmp_path, old, asked, part):
        directory = RunDirectory(tmp_path)
        directory.write_identity({"seed": 1, **old})
        (problem,) = differences(directory, {"seed": 1, **asked}, None)
        assert part in problem

    def test_another_start(self, tmp_path):
        directory = RunDirectory(tmp_path)
        directory.write_identity({"start": "abc"})
        (problem,) = differences(directory, {"start": "def"}, "runs/first/step=000020")
        assert "runs/first/step=000020" in problem
        assert "abc" not in problem
        assert "--fresh" in problem


class TestWhatARunIs:
    """Through `prepare`, as a script does it."""

    def test_the_same_command_goes_on(self, options):
        make_run(FIRST, options, (10, 20), done=False)
        plan = prepare_run(FIRST, options)
        assert plan.resume == str(options.output_dir / "first" / "checkpoints" / "step=000020")
        assert not plan.is_done

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

    def test_only_its_own_newest_checkpoint_counts(self, tmp_path):
        """One of another run that was copied in is no sign of changed code."""
        directory = RunDirectory(tmp_path)
        own = {"seed": 1, "code": {"f": "1"}}
        make_checkpoint(directory.checkpoints, 10, stage="first", run=own)
        make_checkpoint(directory.checkpoints, 20, stage="first", run={**own, "seed": 2})
        make_checkpoint(directory.checkpoints, 30, stage="second", run=own)
        changed = {"seed": 1, "code": {"f": "2"}}
        newest = directory.newest_of("first", changed)
        assert newest is not None
        assert (newest.step, newest.run) == (10, own)
        assert directory.newest_of("third", own) is None

    @pytest.mark.parametrize(
        ("change", "problem"),
        [
            ({"val_interval": 100}, "--val-interval was 250, now 100"),
            ({"stop_after": 3}, "--stop-after was 2, now 3"),
            ({"stop_after": None}, "--stop-after was 2, now None"),
            ({"best_by": "val_other"}, "--best-by was val_loss, now val_other"),
        ],
    )
    def test_what_makes_one_that_may_end_early_another(self, options, change, problem):
        options = replace(options, stop_after=2)
        make_run(FIRST, options, (10,), done=False)
        assert problem in problem_of(prepare_run, FIRST, replace(options, **change))

    def test_one_that_was_refused_before_its_first_checkpoint_leaves_no_claim(self, options):
        prepare_run(FIRST, replace(options, best_by="val_mistyped"))
        RunDirectory(options.output_dir / "first").withdraw()
        assert prepare_run(FIRST, options).resume is None
        directory = make_run(FIRST, options, (10,), done=False)
        directory.withdraw()
        assert (directory.path / RUN_FILE).is_file()

    def test_a_finished_one_is_done(self, options):
        make_run(FIRST, options, (10,))
        assert prepare_run(FIRST, options).is_done

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
        (directory.path / SUMMARY).unlink()
        assert not prepare_run(FIRST, options).is_done

    @pytest.mark.parametrize("harm", ["damaged", "renamed", "another seed's", "untrusted"])
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
            if harm == "untrusted":
                (last / "context" / "io.json").write_text('{"type": "pyref", "module": "os"}')
            else:
                manifest = replace(manifest, run=manifest.run | {"seed": 7})
            write_manifest(last, replace(manifest, files=list_files(last)))
        plan = prepare_run(FIRST, options)
        assert plan.resume == str(directory.checkpoints / "step=000010")
        assert not plan.is_done
        (aside,) = directory.checkpoints.glob(f"*-{LAST}")
        assert aside.name.startswith("foreign" if "seed" in harm else "damaged")
        assert (aside / MANIFEST).is_file()

    @pytest.mark.parametrize("in_file", [None, "{", "edited"], ids=str)
    def test_the_manifests_say_whose_run_it_is(self, options, in_file):
        """A run.json that is missing or was edited counts for nothing."""
        directory = make_run(FIRST, replace(options, seed=7), (10,))
        path = directory.path / RUN_FILE
        if in_file == "edited":
            path.write_text(path.read_text().replace('"seed": 7', '"seed": 42'))
        elif in_file:
            path.write_text(in_file)
        else:
            path.unlink()
        assert "--seed was 7, now 42" in problem_of(prepare_run, FIRST, options)
        assert prepare_run(FIRST, replace(options, seed=7)).is_done

    @pytest.mark.parametrize(
        "change",
        [
            {"devices": 4, "tensor_parallel": 2, "pipeline_parallel": 2},
            {"micro_batch_size": 8},
            {"num_workers": 2, "verbose": True, "timeout": 5},
            {"val_interval": 3, "save_interval": 7},
            {"accelerator": "auto"},
        ],
        ids=str,
    )
    def test_what_may_change_between_starts(self, options, change):
        make_run(FIRST, options, (10,), done=False)
        assert prepare_run(FIRST, replace(options, **change)).resume

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            *(("seed", 1), ("precision", "32"), ("global_batch_size", 128), ("lr", 0.5)),
            *(("max_steps", 7), ("limit_val_batches", 3), ("dataset", "pears")),
        ],
    )
    def test_what_makes_another_run(self, options, name, value):
        make_run(FIRST, options, (10,), done=False)
        problem = problem_of(prepare_run, FIRST, replace(options, **{name: value}))
        option = "--" + name.replace("_", "-")
        assert f"{option} was {getattr(options, name)}, now {value}" in problem
        assert problem.count(" was ") == 1

    @pytest.mark.parametrize(("before", "now"), [("val_loss", "last"), ("last", "val_loss")])
    def test_best_by_is_named_among_other_options(self, options, before, now):
        make_run(FIRST, replace(options, best_by=before), (10,), done=False)
        problem = problem_of(prepare_run, FIRST, replace(options, best_by=now, lr=0.5))
        assert f"--best-by was {before}, now {now}; --lr was 0.001, now 0.5" in problem

    @pytest.mark.parametrize("labels", [(None, 100), (100, None)])
    def test_best_by_is_not_named_if_it_follows_from_another_option(self, options, labels):
        before, now = [
            FewLabelsOptions(**vars(options), num_labels=num_labels) for num_labels in labels
        ]
        make_run(FIRST, before, (10,), done=False)
        problem = problem_of(prepare_run, FIRST, now)
        assert f"--num-labels was {labels[0]}, now {labels[1]}" in problem
        assert "--best-by" not in problem

    def test_a_run_may_move(self, options, tmp_path):
        make_run(FIRST, options, (10,), done=False)
        options.output_dir.rename(tmp_path / "moved")
        plan = prepare_run(FIRST, replace(options, output_dir=tmp_path / "moved"))
        assert plan.resume == str(tmp_path / "moved" / "first" / "checkpoints" / "step=000010")

    def test_fresh_keeps_the_old_run_under_another_name(self, options):
        make_run(FIRST, options, (10,))
        plan = prepare_run(FIRST, replace(options, fresh=True, seed=1))
        assert (plan.resume, plan.is_done) == (None, False)
        assert (options.output_dir / "first.1" / "checkpoints" / "step=000010").is_dir()
        assert (options.output_dir / "first.1" / "summary.json").is_file()

    def test_fresh_also_where_the_old_run_is_damaged(self, options):
        directory = make_run(FIRST, options, (10,))
        (directory.path / RUN_FILE).write_text("{")
        assert prepare_run(FIRST, replace(options, fresh=True)).resume is None

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

    def test_checkpoints_whose_run_is_unknown_are_not_gone_on_from(self, options):
        """Without run.json the manifests still tell that seed 1 made them."""
        directory = make_run(FIRST, replace(options, seed=1), (10,), done=False)
        (directory.path / RUN_FILE).unlink()
        assert "--fresh" in problem_of(prepare_run, FIRST, options)

    def test_nothing_is_written_by_what_is_refused(self, options):
        with pytest.raises(UserError):
            prepare_run(FIRST, replace(options, max_steps=0))
        assert not options.output_dir.exists()


class TestResumption:
    RUN: ClassVar = {"seed": 1}

    def find(self, directory, lines):
        return find_resumption(directory, "pretrain", self.RUN, lines.append)

    def test_nothing_to_go_on_from(self, tmp_path, lines):
        assert self.find(RunDirectory(tmp_path), lines) is None

    def test_the_last_one_and_not_the_best(self, tmp_path, lines):
        directory = RunDirectory(tmp_path)
        make_checkpoint(directory.checkpoints, 10, val_loss=0.1, run=self.RUN)
        last = make_checkpoint(directory.checkpoints, 20, val_loss=0.2, run=self.RUN)
        assert self.find(directory, lines) == (last, verify(last))
        assert lines == []

    def test_damaged_and_foreign_ones_are_set_aside_by_name(self, tmp_path, lines):
        directory = RunDirectory(tmp_path)
        steps = (10, 20, 30, 40, 50)
        made = [make_checkpoint(directory.checkpoints, step, run=self.RUN) for step in steps]
        spoil(made[1])
        for checkpoint, change in ((made[2], {"stage": "finetune"}), (made[3], {"run": {}})):
            write_manifest(checkpoint, replace(read_manifest(checkpoint), **change))
        (made[4] / MANIFEST).unlink()
        found = self.find(directory, lines)
        assert found is not None
        assert found[0] == made[0]
        assert sorted(path.name for path in directory.checkpoints.iterdir()) == [
            *("damaged-step=000020", "damaged-step=000050"),
            *("foreign-step=000030", "foreign-step=000040", "step=000010"),
        ]
        assert len(lines) == 4
        for line, checkpoint in zip(lines, made[1:], strict=True):
            assert str(checkpoint) in line
            assert f"-{checkpoint.name}." in line

    def test_what_a_kill_left_behind_is_removed(self, tmp_path, lines):
        directory = RunDirectory(tmp_path)
        whole = make_checkpoint(directory.checkpoints, 10, run=self.RUN)
        for name in (".step=000020", ".removing-step=000005"):
            (directory.checkpoints / name / "weights").mkdir(parents=True)
        assert self.find(directory, lines) is not None
        assert list(directory.checkpoints.iterdir()) == [whole]


class TestWritable:
    def test_a_folder_that_is_not_there_yet(self, tmp_path):
        assert check_writable(tmp_path / "a" / "b") == []
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize("below", ["", "runs", "runs/deeper"])
    def test_a_file_in_its_place(self, tmp_path, below):
        (tmp_path / "file").write_text("")
        (problem,) = check_writable(tmp_path / "file" / below)
        for part in ("--output-dir", str(tmp_path / "file" / below), "is a file"):
            assert part in problem

    def test_a_folder_without_permission(self, tmp_path):
        tmp_path.chmod(0o500)
        if os.access(tmp_path, os.W_OK):
            pytest.skip("this user may write everywhere")
        try:
            for folder in (tmp_path, tmp_path / "deeper"):
                (problem,) = check_writable(folder)
                assert "cannot be written" in problem
        finally:
            tmp_path.chmod(0o700)
