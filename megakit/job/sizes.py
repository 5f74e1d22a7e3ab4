"""Determines the sizes of a stage's model, from the start checkpoint or else from the options."""

import contextlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megakit.checkpoints.context import read_model_settings
from megakit.errors import UserError
from megakit.job.options import CommonOptions
from megakit.job.ranges import flag
from megakit.job.runs import RunDirectory
from megakit.job.stage import Stage
from megakit.runtime.foreign_files import USE_ANOTHER, brief


@dataclass(frozen=True)
class Sizes:
    """Sizes of the model that a stage trains or uses; 0 if no checkpoint and no option sets it.

    Attributes:
        width: Size that tensor parallelism splits.
        num_heads: Attention heads, which tensor parallelism splits; 0 also for a model without.
        num_pipeline_stages: The number of pipeline stages has to divide this number.
        tokens: Positions of a sample.
        by_option: The sizes that options can set, by the option's name.
    """

    width: int = 0
    num_heads: int = 0
    num_pipeline_stages: int = 0
    tokens: int = 0
    by_option: dict[str, Any] = field(default_factory=dict)


#: The attributes of a `Stage` that are a number, or the name of a config field.
NAMES = ("width", "num_heads", "num_pipeline_stages", "tokens")


def check_sizes(stage: Stage, options: CommonOptions, start: Path | None) -> Sizes:
    """Checks the options against the checkpoint's model, and returns the sizes to use.

    Args:
        stage: The script's stage in the chain.
        options: Options of the command line.
        start: The checkpoint that the stage starts from; None for fresh weights.

    Raises:
        UserError: An option differs from the checkpoint's size, or the checkpoint's settings are
            damaged.
    """
    names = options.model_sizes
    settings = read_model_settings(start) if start and (names or _names_a_field(stage)) else {}
    asked = {name: getattr(options, name) for name in names}
    problems = [
        f"{flag(name)} {value}: the model of {start} has {settings[name]}, and its weights fit no "
        f"other size. Leave {flag(name)} out, or start from fresh weights with --checkpoint none."
        for name, value in asked.items()
        if value is not None and settings.get(name, value) != value
    ]
    if problems:
        raise UserError(problems)
    by_option = {name: settings.get(name, options.size(name)) for name in names}
    return _sizes(stage, options, settings, start, by_option)


def stated_sizes(stage: Stage) -> Sizes:
    """Returns the sizes that the stage states as numbers; the sizes that it names are 0."""
    stated = {name: getattr(stage, name) for name in NAMES}
    numbers: dict[str, Any] = {name: size for name, size in stated.items() if type(size) is int}
    return Sizes(**numbers)


def expected_work(stage: Stage, options: CommonOptions) -> int:
    """Returns the work of an operation before anything is checked; 0 if a size is unknown.

    The work is the number of multiplications in the product of a micro batch's tokens and a square
    weight of the model's width. Every rank needs it before torch is imported: see `limit_threads`.
    """
    with contextlib.suppress(Exception):  # `check_sizes` reports the error
        settings: dict[str, Any] = {}
        start = None
        if _names_a_field(stage) and stage.before is not None:
            named = options.named_checkpoint
            before = RunDirectory(options.output_dir / stage.before.name)
            start = before.best_checkpoint() if named is None else Path(named)
            settings = read_model_settings(start) if start and named != "none" else {}
        sizes = _sizes(stage, options, settings, start, {})
        most = options.largest_micro_batch
        samples = options.micro_batch_size or min(getattr(options, "global_batch_size", most), most)
        return max(0, samples) * sizes.tokens * sizes.width**2
    return 0


def _names_a_field(stage: Stage) -> bool:
    return any(isinstance(getattr(stage, name), str) for name in NAMES)


def _sizes(
    stage: Stage,
    options: CommonOptions,
    settings: dict[str, Any],
    start: Path | None,
    by_option: dict[str, Any],
) -> Sizes:
    sizes = {name: _size(getattr(stage, name), options, settings, start) for name in NAMES}
    return Sizes(**sizes, by_option=by_option)


def _size(
    name: int | str, options: CommonOptions, settings: dict[str, Any], start: Path | None
) -> int:
    """Returns a number, or the setting of this name, or else the value of the option."""
    if isinstance(name, int):
        return name
    if name not in settings:
        value = options.size(name)
        # `find_problems` reports a value out of range.
        return value if type(value) is int and value >= 1 else 0
    value = settings[name]
    if type(value) is not int or value < 1:
        raise UserError(
            f"{start}: its setting {name} is {brief(str(value))}, not a positive whole number. "
            f"{USE_ANOTHER}"
        )
    return value
