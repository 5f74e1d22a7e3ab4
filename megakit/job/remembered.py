"""Finds the paths that earlier runs used, for options that a command leaves out."""

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from megakit.errors import UserError
from megakit.job.options import CommonOptions
from megakit.job.runs import PLACES, RUN_FILE, StartCheckpoint
from megakit.job.stage import Stage
from megakit.runtime.foreign_files import JSON_BYTES, read_regular_file, reading


class EarlierRun(NamedTuple):
    """What an earlier run used.

    Attributes:
        path: The run directory.
        relation: `own`: the run that the command resumes. `start`: the run of the start checkpoint.
            `nearby`: a run of the same chain in the parent folder of `--output-dir`, or in this
            option's default.
        places: Absolute paths by name of the option, from `CommonOptions.places`.
        dataset: Name of the dataset of the start checkpoint; None for another relation.
    """

    path: Path
    relation: Literal["own", "start", "nearby"]
    places: Mapping[str, str]
    dataset: Any = None


def earlier_runs(
    stage: Stage, output_dir: Path, start: StartCheckpoint | None = None
) -> list[EarlierRun]:
    """Returns the runs whose paths a command may use, the first choice first.

    Args:
        stage: The stage to run.
        output_dir: The folder of the command's runs.
        start: The checkpoint that the stage starts from, if any.
    """
    own = output_dir / stage.name
    found = [EarlierRun(own, "own", read_places(own))]
    if start is not None:
        run = start.path.absolute().parent.parent  # above `checkpoints`
        near = output_dir / start.manifest.stage
        shown = near if near.absolute() == run else run
        found.append(EarlierRun(shown, "start", read_places(run), start.manifest.dataset))
    for folder in dict.fromkeys((output_dir.parent, CommonOptions.output_dir)):
        link: Stage | None = stage
        while link is not None:
            nearby = folder / link.name
            found.append(EarlierRun(nearby, "nearby", read_places(nearby)))
            link = link.before
    return found


def read_places(run: Path) -> dict[str, str]:
    """Returns the paths that a run remembers, by option; a damaged run.json has none."""
    path = run / RUN_FILE
    with contextlib.suppress(UserError), reading(path, "Use another run."):
        content = json.loads(read_regular_file(path, JSON_BYTES))
        places = content.get(PLACES, {})
        return {name: value for name, value in places.items() if _is_usable(value)}
    return {}


def _is_usable(value: Any) -> bool:
    return isinstance(value, str) and value.isprintable() and Path(value).is_absolute()
