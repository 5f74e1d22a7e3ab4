"""What identifies a run, and how a message names the differences between two runs."""

from dataclasses import replace

import pytest

from megakit.job.identity import changed_names, differences, listed
from megakit.job.runs import RunDirectory
from tests.fabricate import make_run, prepare_run
from tests.hostile import problem as problem_of
from tests.megakit.job.stages import FIRST, FewLabelsOptions


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


class TestCode:
    def test_functions_that_are_new_gone_or_different_have_changed(self):
        old = {"code": {"gone": "1", "same": "1", "other": "1"}}
        new = {"code": {"same": "1", "other": "2", "new": "1"}}
        assert changed_names(old, new) == ["gone", "new", "other"]
        assert changed_names(old, old) == changed_names(old, {"code": {}}) == []

    def test_a_message_lists_eight_names(self):
        names = [f"f{number}" for number in range(10)]
        assert listed(names[:8]) == "f0, f1, f2, f3, f4, f5, f6, f7"
        assert listed(names) == "f0, f1, f2, f3, f4, f5, f6, f7 and 2 more"


class TestOptions:
    """Through `prepare`, as a script does it."""

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
        options = replace(options, precision="bf16-mixed")
        make_run(FIRST, options, (10,), done=False)
        problem = problem_of(prepare_run, FIRST, replace(options, **{name: value}))
        option = "--" + name.replace("_", "-")
        assert f"{option} was {getattr(options, name)}, now {value}" in problem
        assert problem.count(" was ") == 1

    @pytest.mark.parametrize("precision", ["bf16-mixed", "32"])
    def test_a_run_keeps_its_precision(self, options, precision):
        """Also on a machine where another one is the default."""
        make_run(FIRST, replace(options, precision=precision), (10,), done=False)
        plan = prepare_run(FIRST, options)
        assert plan.resume
        assert plan.precision == plan.identity["precision"] == precision

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
