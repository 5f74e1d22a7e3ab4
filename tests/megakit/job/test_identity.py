"""What identifies a run, and how a message names the differences between two runs."""

from dataclasses import fields, replace

import pytest

from megakit.job.identity import changed_names
from tests.fabricate import make_run, prepare_run
from tests.hostile import problem as problem_of
from tests.megakit.job.stages import FIRST, FewLabelsOptions, FirstOptions

#: Every option with another value than the default: those that make another run, and the others.
DECIDE = {
    **{"seed": 1, "precision": "32", "global_batch_size": 128, "lr": 0.5, "max_steps": 7},
    **{"limit_val_batches": 3, "dataset": "pears", "best_by": "val_other", "stop_after": 3},
}
MAY_CHANGE = {
    **{"devices": 4, "num_nodes": 1, "tensor_parallel": 2, "pipeline_parallel": 2},
    **{"micro_batch_size": 8, "num_workers": 2, "verbose": True, "timeout": 5},
    **{"val_interval": 3, "save_interval": 7, "accelerator": "auto", "keep_changes": True},
}


def test_functions_that_are_new_gone_or_different_have_changed():
    old = {"code": {"gone": "1", "same": "1", "other": "1"}}
    new = {"code": {"same": "1", "other": "2", "new": "1"}}
    assert changed_names(old, new) == ["gone", "new", "other"]
    assert changed_names(old, old) == changed_names(old, {"code": {}}) == []


class TestOptions:
    """Through `prepare`, as a script does it."""

    @pytest.mark.parametrize(
        ("change", "problem"),
        [
            ({"val_interval": 100}, "--val-interval was 250, now 100"),
            ({"stop_after": None}, "--stop-after was 2, now None"),
        ],
    )
    def test_what_makes_one_that_may_end_early_another(self, options, change, problem):
        options = replace(options, stop_after=2)
        make_run(FIRST, options, (10,), done=False)
        assert problem in problem_of(prepare_run, FIRST, replace(options, **change))

    def test_every_option_is_in_one_of_the_tables(self):
        names = {option.name for option in fields(FirstOptions)}
        assert DECIDE.keys() | MAY_CHANGE.keys() == names - {"output_dir", "fresh"}

    @pytest.mark.parametrize(("name", "value"), MAY_CHANGE.items())
    def test_what_may_change_between_starts(self, options, name, value):
        make_run(FIRST, options, (10,), done=False)
        assert prepare_run(FIRST, replace(options, **{"devices": 2, name: value})).resume

    @pytest.mark.parametrize(("name", "value"), DECIDE.items())
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

    @pytest.mark.parametrize("labels", [(None, 100), (100, None)])
    def test_best_by_is_not_named_if_it_follows_from_another_option(self, options, labels):
        before, now = [
            FewLabelsOptions(**vars(options), num_labels=num_labels) for num_labels in labels
        ]
        make_run(FIRST, before, (10,), done=False)
        problem = problem_of(prepare_run, FIRST, now)
        assert f"--num-labels was {labels[0]}, now {labels[1]}" in problem
        assert "--best-by" not in problem
