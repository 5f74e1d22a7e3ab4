"""What a script is within a chain of scripts."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One stage of a chain of scripts.

    Attributes:
        name: Also the name of its folder below the output directory.
        script: The file that runs it.
        model: Name of the model's class.
        title: What a person calls the model, with its article.
        before: The stage whose best checkpoint this one starts from, if any.
        width: What tensor parallelism cuts: a number, or the name of a field of the model's
            config. A checkpoint that the stage starts from then gives the number, else the option
            of that name.
        num_pipeline_stages: Stages that the model can be cut into, or a divisor of them.
        num_heads: Attention heads, which tensor parallelism deals out; 0 for a model without.
    """

    name: str
    script: str
    model: str
    title: str = "a model"
    before: "Stage | None" = None
    width: int | str = 1
    num_pipeline_stages: int = 1
    num_heads: int = 0
