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
    """Sizes of the model that a stage trains or uses.

    Attributes:
        width: Size that tensor parallelism splits; 0 if no checkpoint and no option sets it.
        by_option: The sizes that options can set, by the option's name.
    """

    width: int = 0
    by_option: dict[str, Any] = field(default_factory=dict)


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
    is_needed = names or isinstance(stage.width, str)
    settings = read_model_settings(start) if start and is_needed else {}
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
    return Sizes(_width(stage, options, settings, start), by_option)


def expected_width(stage: Stage, options: CommonOptions) -> int:
    """Returns the width before anything is checked; 0 if the width is unknown.

    Every rank needs the width before torch is imported: see `limit_threads`.
    """
    with contextlib.suppress(Exception):  # `check_sizes` reports the error
        settings: dict[str, Any] = {}
        start = None
        if isinstance(stage.width, str) and stage.before is not None:
            named = options.named_checkpoint
            before = RunDirectory(options.output_dir / stage.before.name)
            start = before.best_checkpoint() if named is None else Path(named)
            settings = read_model_settings(start) if start and named != "none" else {}
        return _width(stage, options, settings, start)
    return 0


def _width(
    stage: Stage, options: CommonOptions, settings: dict[str, Any], start: Path | None
) -> int:
    name = stage.width
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
