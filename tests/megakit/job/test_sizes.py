"""The model's sizes: from the checkpoint that a stage starts from, else from the options."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest

from megakit.errors import UserError
from megakit.job.options import TrainingOptions
from megakit.job.runs import RUN_FILE
from megakit.job.sizes import check_sizes, expected_width
from megakit.job.stage import Stage
from tests.fabricate import CONTEXT, make_checkpoint, prepare_run

FIRST = Stage(name="first", script="first.py", model="Encoder", width="breadth")
SECOND = Stage(name="second", script="second.py", model="Head", before=FIRST, width="breadth")


@dataclass(kw_only=True)
class FirstOptions(TrainingOptions):
    breadth: int = 24

    def resolve_dataset(self, previous: Any, *how: Any) -> str:
        return "plums"


@dataclass(kw_only=True)
class SecondOptions(FirstOptions):
    checkpoint: str | None = None
    breadth: int | None = None  # type: ignore[assignment]

    model_sizes: ClassVar[tuple[str, ...]] = ("breadth",)

    def size(self, name: str) -> Any:
        return FirstOptions.breadth if self.breadth is None else self.breadth


def checkpoint(runs: Path, **settings: Any) -> Path:
    """A checkpoint of the first stage whose model was configured like this."""
    context: Any = json.loads(json.dumps(CONTEXT))
    context["objects"]["config"]["items"] = [
        [f"Attr(name='{name}')", {"type": "leaf", "value": value}]
        for name, value in settings.items()
    ]
    return make_checkpoint(
        runs / "first" / "checkpoints",
        TrainingOptions.max_steps,
        stage="first",
        model="Encoder",
        val_loss=0.1,
        run={"max_steps": TrainingOptions.max_steps},
        context=context,
    )


def second(runs: Path, **options: Any) -> SecondOptions:
    return SecondOptions(output_dir=runs, accelerator="cpu", **options)


def problem_of(stage: Stage, options: Any) -> str:
    with pytest.raises(UserError) as error:
        prepare_run(stage, options)
    (problem,) = error.value.problems
    return problem


def test_a_number_is_the_width() -> None:
    stage = Stage(name="first", script="first.py", model="Encoder", width=7)
    assert check_sizes(stage, FirstOptions(), None).width == expected_width(stage, FirstOptions())
    assert expected_width(stage, FirstOptions()) == 7


def test_the_first_stage_s_width_is_an_option() -> None:
    for options, width in ((FirstOptions(), 24), (FirstOptions(breadth=10), 10)):
        assert check_sizes(FIRST, options, None).width == width
        assert expected_width(FIRST, options) == width
    assert expected_width(FIRST, FirstOptions(breadth=-1)) == 0  # refused as an option


def test_the_checkpoint_s_width_counts(tmp_path: Path) -> None:
    start = checkpoint(tmp_path, breadth=10)
    for options in (second(tmp_path), second(tmp_path, checkpoint=str(start), breadth=10)):
        sizes = check_sizes(SECOND, options, start)
        assert (sizes.width, sizes.by_option) == (10, {"breadth": 10})
        assert expected_width(SECOND, options) == 10
    without_that_option = TrainingOptions(output_dir=tmp_path)
    assert check_sizes(SECOND, without_that_option, start).width == 10


def test_fresh_weights_have_the_option_s_width(tmp_path: Path) -> None:
    checkpoint(tmp_path, breadth=10)
    for given, width in ((None, 24), (12, 12)):
        options = second(tmp_path, checkpoint="none", breadth=given)
        sizes = check_sizes(SECOND, options, None)
        assert (sizes.width, sizes.by_option) == (width, {"breadth": width})
        assert expected_width(SECOND, options) == width


def test_another_size_than_the_checkpoint_s_is_refused(tmp_path: Path) -> None:
    start = checkpoint(tmp_path, breadth=10)
    problem = problem_of(SECOND, second(tmp_path, breadth=12))
    assert problem.startswith(f"--breadth 12: the model of {start} has 10,")
    assert problem.endswith(
        "Leave --breadth out, or start from fresh weights with --checkpoint none."
    )


def test_tensor_parallelism_has_to_divide_the_checkpoint_s_width(tmp_path: Path) -> None:
    checkpoint(tmp_path, breadth=10)
    problem = problem_of(SECOND, second(tmp_path, devices=4, tensor_parallel=4))
    assert problem.startswith("--tensor-parallel 4: has to divide the width of the split layers,")
    assert problem.endswith(" 10. Try 2.")
    prepare_run(SECOND, second(tmp_path, devices=5, tensor_parallel=5, global_batch_size=10))


def test_a_size_that_is_given_or_left_out_makes_the_same_run(tmp_path: Path) -> None:
    checkpoint(tmp_path, breadth=10)
    prepare_run(SECOND, second(tmp_path))
    assert json.loads((tmp_path / "second" / RUN_FILE).read_text())["breadth"] == 10
    prepare_run(SECOND, second(tmp_path, breadth=10))


@pytest.mark.parametrize("value", ["many", -8, 0, True, 2.5], ids=str)
def test_settings_that_are_no_size(tmp_path: Path, value: object) -> None:
    checkpoint(tmp_path, breadth=value)
    problem = problem_of(SECOND, second(tmp_path))
    assert f"its setting breadth is {value}, not a positive whole number." in problem
    assert expected_width(SECOND, second(tmp_path)) == 0


def test_without_a_checkpoint_nothing_is_said_of_sizes(tmp_path: Path) -> None:
    options = second(tmp_path, devices=4, tensor_parallel=4, breadth=10)
    assert "no checkpoint to start from" in problem_of(SECOND, options)
    assert expected_width(SECOND, second(tmp_path)) == 24
