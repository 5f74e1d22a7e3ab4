"""The model's sizes: from the checkpoint that a stage starts from, else from the options."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest

from megakit.errors import UserError
from megakit.job.options import TrainingOptions
from megakit.job.runs import RUN_FILE
from megakit.job.sizes import check_sizes
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


LAYERED = Stage(
    name="gpt",
    script="gpt.py",
    model="Gpt",
    width="breadth",
    num_heads="heads",
    num_pipeline_stages="layers",
)


@dataclass(kw_only=True)
class LayeredOptions(FirstOptions):
    heads: int = 4
    layers: int = 6


def test_every_size_may_be_an_option(tmp_path: Path) -> None:
    sizes = check_sizes(LAYERED, LayeredOptions(layers=3), None)
    assert (sizes.width, sizes.num_heads, sizes.num_pipeline_stages) == (24, 4, 3)
    given: dict[str, Any] = {"output_dir": tmp_path, "accelerator": "cpu", "global_batch_size": 12}
    prepare_run(LAYERED, LayeredOptions(devices=3, pipeline_parallel=3, **given))
    for devices, asked, message in (
        (4, {"pipeline_parallel": 4}, "can be split into 1 or 2 or 3 or 6 stages. Try 3."),
        (6, {"tensor_parallel": 6}, "has to divide the number of attention heads, 4. Try 4."),
        (4, {"tensor_parallel": 4, "breadth": 6}, "the width of the split layers, 6. Try 3."),
    ):
        options = LayeredOptions(**{**given, **asked, "devices": devices})
        assert problem_of(LAYERED, options).endswith(message)


def test_fresh_weights_have_the_option_s_width(tmp_path: Path) -> None:
    options = second(tmp_path, checkpoint="none", breadth=12)
    sizes = check_sizes(SECOND, options, None)
    assert (sizes.width, sizes.by_option) == (12, {"breadth": 12})


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


def test_settings_that_are_no_size(tmp_path: Path) -> None:
    checkpoint(tmp_path, breadth=-8)
    problem = problem_of(SECOND, second(tmp_path))
    assert "its setting breadth is -8, not a positive whole number." in problem
