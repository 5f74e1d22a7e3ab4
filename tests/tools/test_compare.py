"""The rule of `./run compare` at its limits, and what it refuses; the rows are made up."""

import json
from math import inf, nan
from typing import Any

import pytest

from megakit.training.metrics_csv import Metrics, MetricsFile
from tools.compare import LAST_STEP, LIMITS, MIXED, compare, main, read_run

OPTIONS = {"dataset": "made-up", "lr": 0.1, "precision": "32", "start": None}


def write(folder, changes=(), steps=(1, 10, 20, 30), **options):
    """A run whose columns are all 1, but for changes by (column, step)."""
    folder.mkdir(parents=True)
    file = MetricsFile(folder / "metrics.csv")
    for step in steps:
        columns = [column for column in LIMITS["32"] if column != "val_loss" or step == 30]
        values: Any = dict.fromkeys(columns, 1.0)
        values |= {column: value for (column, at), value in dict(changes).items() if at == step}
        file.append(Metrics(step, 8 * step, **values))
    place = str(folder)
    further = {"files": {place: ""}, "changes": [place], "code": {place: ""}, "places": place}
    (folder / "run.json").write_text(json.dumps({**OPTIONS, **options, **further}))
    return folder


@pytest.fixture
def found(tmp_path):
    """Compares a run with another, which differs by changes."""

    def make(changes):
        one, other = write(tmp_path / "one"), write(tmp_path / "other", changes)
        return compare(read_run(one), read_run(other))

    return make


@pytest.mark.parametrize("precision", ["32", "bf16-mixed"])
@pytest.mark.parametrize("column", ["train_loss", "grad_norm"])
@pytest.mark.parametrize("step", [1, LAST_STEP])
def test_early_differences_are_a_bug_from_the_limit_on(tmp_path, precision, column, step):
    limit = LIMITS[precision][column] * step
    one = write(tmp_path / "one", precision=precision)
    for name, factor, is_bug in (("below", 0.99, False), ("above", 1.01, True)):
        changes = {(column, step): 1 - factor * limit}
        other = write(tmp_path / name, changes, precision=precision)
        assert compare(read_run(one), read_run(other)).is_bug == is_bug


def test_later_differences_are_named_and_no_bug(found):
    result = found({("train_loss", 20): 0.5, ("val_loss", 30): 0.5})
    assert result.beyond == (20, "train_loss")
    assert not result.is_bug
    told = "\n".join(result.lines())
    assert "Above the limit from step 20 on" in told
    assert "Verdict: rounding up to step 10. Later steps are not judged" in told


def test_another_learning_rate_is_a_bug_at_any_step(found):
    result = found({("train_loss", 20): 0.5, ("lr", 30): 0.99})
    assert (result.beyond, result.is_bug) == ((30, "lr"), True)


def test_a_validation_is_judged_while_the_training_losses_agree(found):
    result = found({("val_loss", 30): 0.5, ("grad_norm", 20): 0.5})
    assert (result.beyond, result.is_bug) == ((30, "val_loss"), True)


def test_a_run_that_ended_early_is_told(tmp_path):
    whole, part = write(tmp_path / "whole"), write(tmp_path / "part", steps=(1, 10))
    for one, other in ((whole, part), (part, whole)):
        told = "\n".join(compare(read_run(one), read_run(other)).lines())
        assert f"{part} ends at step 10, and {whole} at step 30." in told
        assert "Verdict: equal in the common steps." in told


@pytest.mark.parametrize("value", [nan, inf, -1.0])
def test_values_that_are_no_usual_losses(tmp_path, value):
    """If both runs have them, there is no difference."""
    one, other = (write(tmp_path / name, {("train_loss", 1): value}) for name in "ab")
    assert compare(read_run(one), read_run(other)).beyond == (0, "")
    assert compare(read_run(one), read_run(write(tmp_path / "c"))).is_bug


@pytest.mark.parametrize(
    ("precisions", "starts", "limits"),
    [
        (("32", "32"), "ab", "32"),
        (("32", "bf16-mixed"), "aa", MIXED),
        (("bf16-mixed", "bf16-mixed"), "aa", "bf16-mixed"),
        (("bf16-mixed", "bf16-mixed"), "ab", MIXED),
    ],
)
def test_precisions_and_start_checkpoints_choose_the_limits(tmp_path, precisions, starts, limits):
    one, other = (
        write(tmp_path / name, precision=precision, start=start)
        for name, precision, start in zip("ab", precisions, starts, strict=True)
    )
    assert compare(read_run(one), read_run(other)).limits == limits


def test_what_differs_first_decides_what_to_look_for(found):
    told = "\n".join(found({("lr", 1): 0.9, ("train_loss", 10): 0.5}).lines())
    assert "the learning rate differs by 1.0e-01" in told
    assert "Look for another learning rate" in told


class TestBatchNorm:
    """Statistics are those of a micro batch; each micro batch updates running statistics."""

    @pytest.fixture
    def compared(self, tmp_path):
        """The status of a comparison, by micro batch size and data-parallel size of two runs."""

        def make(*sizes):
            for name, (samples, data) in zip("ab", sizes, strict=True):
                changes = {("val_loss", 30): 0.5} if name == "a" else ()
                folder = write(tmp_path / name, changes)
                parallel = {"tensor": 1, "pipeline": 1, "data": data}
                summary = {"parallel": parallel, "batch_norm_samples": samples} if data else {}
                (folder / "summary.json").write_text(json.dumps(summary))
            return main([str(tmp_path / "a"), str(tmp_path / "b")])

        return make

    def test_other_micro_batches_are_refused(self, capsys, compared):
        assert compared((64, 1), (32, 2)) == 2
        told = capsys.readouterr().err
        assert "BatchNorm, whose statistics are those of a micro batch, of 64 and 32" in told
        assert "Train both with the same one: --micro-batch-size 32." in told

    @pytest.mark.parametrize("other", [(32, 2), (None, None)])  # or it has no summary yet
    def test_other_numbers_of_micro_batches_are_not_validated_alike(self, capsys, compared, other):
        assert compared((32, 1), other) == 0
        told = capsys.readouterr().out
        assert "validation loss    not judged: each micro batch updates" in told
        assert "Verdict: equal." in told

    @pytest.mark.parametrize("sizes", [((32, 2), (32, 2)), ((None, 1), (None, 2))])
    def test_all_else_is_judged(self, compared, sizes):
        assert compared(*sizes) == 1


class TestRefusals:
    @pytest.fixture(autouse=True)
    def runs(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        write(tmp_path / "runs" / "one")
        write(tmp_path / "runs" / "two", dataset="other", lr=0.2)
        write(tmp_path / "stage", dataset="other", num_labels=8)
        write(tmp_path / "late", steps=[20, 30])
        write(tmp_path / "unknown", precision="16")
        (tmp_path / "damaged").mkdir()
        (tmp_path / "damaged" / "metrics.csv").write_text("a,b\n1,2\n")
        write(tmp_path / "lists")
        (tmp_path / "lists" / "summary.json").write_text('{"parallel": [1]}')

    @pytest.mark.parametrize(
        ("command", "told"),
        [
            ("runs/one none", ["none: contains no single run (found: none)"]),
            ("runs runs/one", ["runs: contains no single run (found: one, two)"]),
            ("runs/one runs/two", ["dataset is made-up and other", "lr is 0.1 and 0.2"]),
            ("runs/one stage", ["only one has num_labels. Compare two runs of one stage."]),
            ("runs/one late", ["no common steps up to 10"]),
            ("runs/one unknown", ["Add --precision"]),
            ("runs/one damaged", ["damaged/metrics.csv: cannot be read"]),
            ("runs/one lists", ["lists/summary.json: cannot be read", "Name another run."]),
        ],
    )
    def test_what_cannot_be_compared(self, capsys, command, told):
        assert main(command.split()) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert len(captured.err.splitlines()) == (2 if "two" in command.split()[-1] else 1)
        for part in told:
            assert part in captured.err

    def test_a_metrics_csv_alone_needs_its_precision(self, capsys, tmp_path):
        for run in ("one", "two"):
            (tmp_path / "runs" / run / "run.json").unlink()
        files = ["runs/one/metrics.csv", "runs/two/metrics.csv"]
        assert main(files) == 2
        assert main([*files, "--precision", "32"]) == 0
        assert "Verdict: equal." in capsys.readouterr().out
