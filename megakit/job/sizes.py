"""The sizes of a stage's model: those of the checkpoint that it starts from, else the options'."""

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
from megakit.runtime.foreign_files import brief


@dataclass(frozen=True)
class Sizes:
    """Sizes of the model that a stage trains or uses.

    Attributes:
        width: What tensor parallelism cuts; 0 if neither the checkpoint nor an option gives it.
        by_option: The sizes that options can set, by name.
    """

    width: int = 0
    by_option: dict[str, Any] = field(default_factory=dict)


def check_sizes(stage: Stage, options: CommonOptions, start: Path | None) -> Sizes:
    """Checks the options against the checkpoint's model, and returns the sizes that count.

    Args:
        stage: What the script is within the chain.
        options: The command line's.
        start: The checkpoint that the stage starts from; None for fresh weights.

    Raises:
        UserError: An option asks for another size than the checkpoint's, or the checkpoint's
            settings are damaged.
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
    """Returns the width as far as it can be told before anything is checked; 0 if it cannot.

    Every rank needs it before torch is imported: see `limit_threads`.
    """
    with contextlib.suppress(Exception):  # `check_sizes` reports what is wrong
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
        # A value out of range is reported with the other options.
        return value if type(value) is int and value >= 1 else 0
    value = settings[name]
    if type(value) is not int or value < 1:
        raise UserError(
            f"{start}: its setting {name} is {brief(str(value))}, not a positive whole number. "
            "It is damaged or not to be trusted. Use another checkpoint."
        )
    return value
