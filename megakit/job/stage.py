"""Describes a script's stage in a chain of scripts."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One stage in a chain of scripts.

    `width`, `num_heads`, `num_pipeline_stages` and `tokens` are numbers, or names of fields of the
    model's config. The start checkpoint or else the option of this name then sets the number.

    Attributes:
        name: Name of the stage, and of its folder below the output directory.
        script: Name of the script that runs the stage.
        model: Name of the model's class.
        title: The model's name in messages, with its article.
        before: The previous stage, whose best checkpoint this stage starts from; None if there is
            no previous stage.
        width: Size that tensor parallelism splits.
        num_pipeline_stages: The number of pipeline stages has to divide this number.
        num_heads: Attention heads, which tensor parallelism splits; 0 for a model without them.
        tokens: Positions of a sample, such as a text's tokens or an image's patches. With the width
            and the micro batch, they determine how many threads an operation uses on a CPU.
        view: Selects what TensorBoard shows of a batch and the model's output. A change of a
            stage's view does not change the code that identifies a run.
    """

    name: str
    script: str
    model: str
    title: str = "a model"
    before: "Stage | None" = None
    width: int | str = 1
    num_pipeline_stages: int | str = 1
    num_heads: int | str = 0
    tokens: int | str = 1
    view: Callable[[Any, Any], Any] | None = None
