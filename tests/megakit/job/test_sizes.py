"""The model's sizes: from the checkpoint that a stage starts from, else from the options."""

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from megakit.errors import UserError
from megakit.job.options import TrainingOptions
from megakit.job.runs import RUN_FILE
from megakit.job.sizes import Sizes, check_sizes, expected_work, stated_sizes
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


def expected_width(stage: Stage, options: TrainingOptions) -> int:
    """The width before anything is checked, from the work of a sample with one token."""
    options.micro_batch_size = 1
    return math.isqrt(expected_work(stage, options))


def test_a_number_is_the_width() -> None:
    stage = Stage(name="first", script="first.py", model="Encoder", width=7)
    assert check_sizes(stage, FirstOptions(), None).width == expected_width(stage, FirstOptions())
    assert expected_width(stage, FirstOptions()) == 7


LAYERED = Stage(
    name="gpt",
    script="gpt.py",
    model="Gpt",
    width="breadth",
    num_heads="heads",
    num_pipeline_stages="layers",
    tokens="block",
)
SAMPLING = Stage(
    name="sample",
    script="sample.py",
    model="Gpt",
    before=FIRST,
    width="breadth",
    num_heads="heads",
    num_pipeline_stages="layers",
)


@dataclass(kw_only=True)
class LayeredOptions(FirstOptions):
    heads: int = 4
    layers: int = 6
    block: int = 32


def test_every_size_may_be_an_option(tmp_path: Path) -> None:
    sizes = check_sizes(LAYERED, LayeredOptions(layers=3, block=16), None)
    assert (sizes.width, sizes.num_heads, sizes.num_pipeline_stages, sizes.tokens) == (24, 4, 3, 16)
    given: dict[str, Any] = {"output_dir": tmp_path, "accelerator": "cpu", "global_batch_size": 12}
    prepare_run(LAYERED, LayeredOptions(devices=3, pipeline_parallel=3, **given))
    for devices, asked, message in (
        (4, {"pipeline_parallel": 4}, "can be split into 1 or 2 or 3 or 6 stages. Try 3."),
        (6, {"tensor_parallel": 6}, "has to divide the number of attention heads, 4. Try 4."),
        (4, {"tensor_parallel": 4, "breadth": 6}, "the width of the split layers, 6. Try 3."),
    ):
        options = LayeredOptions(**{**given, **asked, "devices": devices})
        assert problem_of(LAYERED, options).endswith(message)


def test_a_script_without_the_options_uses_the_checkpoint_s_sizes(tmp_path: Path) -> None:
    checkpoint(tmp_path, breadth=30, heads=6, layers=5)
    given: dict[str, Any] = {"output_dir": tmp_path, "accelerator": "cpu", "global_batch_size": 30}
    options = FirstOptions(pipeline_parallel=2, devices=2, **given)
    assert problem_of(SAMPLING, options).endswith("can be split into 1 or 5 stages. Try 1.")
    options = FirstOptions(tensor_parallel=5, devices=5, **given)
    assert problem_of(SAMPLING, options).endswith("number of attention heads, 6. Try 3.")


def test_numbers_of_a_stage_count_although_its_checkpoint_is_missing(tmp_path: Path) -> None:
    assert stated_sizes(LAYERED) == Sizes()
    stage = replace(LAYERED, num_pipeline_stages=4, before=FIRST)
    assert stated_sizes(stage) == Sizes(num_pipeline_stages=4)
    options = second(tmp_path, devices=3, pipeline_parallel=3, global_batch_size=30)
    with pytest.raises(UserError) as error:
        prepare_run(stage, options)
    problems = "\n".join(error.value.problems)
    assert "can be split into 1 or 2 or 4 stages" in problems
    assert "no checkpoint to start from" in problems


def test_the_work_of_an_operation() -> None:
    """Tokens of a micro batch x width x width."""
    options = LayeredOptions(micro_batch_size=8)
    assert expected_work(LAYERED, options) == 8 * 32 * 24 * 24
    assert expected_work(FIRST, FirstOptions(global_batch_size=100)) == 100 * 24 * 24
    assert expected_work(FIRST, FirstOptions(global_batch_size=10_000)) == 1024 * 24 * 24
    assert expected_work(FIRST, FirstOptions(micro_batch_size=-1)) == 0  # refused as an option
    assert expected_work(LAYERED, FirstOptions()) == 0  # has no such options


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
