"""What a training run's result depends on, and how two runs differ in it."""

import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megakit.checkpoints.manifest import CHANGES, CODE, same_run
from megakit.job.options import CommonOptions, TrainingOptions
from megakit.job.program import code_of
from megakit.job.ranges import flag
from megakit.job.runs import RunDirectory
from megakit.job.stage import Stage

#: Entries that are no options.
NO_OPTIONS = ("model",)
#: Where one of two identities has no such name.
ABSENT = "absent"
#: How many changed names a message lists.
LISTED = 8


def identify(
    stage: Stage, options: TrainingOptions, dataset: str, start: str | None
) -> dict[str, Any]:
    """Returns all that a run's result depends on, as its manifests have it.

    Args:
        stage: The run's stage.
        options: The command line's.
        dataset: Name of the dataset.
        start: Digest of the checkpoint that it starts from.
    """
    identity = options.identity() | {
        "model": stage.model,
        "dataset": dataset,
        "start": start,
        "best_by": options.choice(),
        CODE: code_of(script_of(options)),
        CHANGES: [],
    }
    content: dict[str, Any] = json.loads(json.dumps(identity, default=str))
    return content


def script_of(options: CommonOptions) -> Path:
    """The script that options belong to."""
    return Path(inspect.getfile(type(options)))


def differences(
    directory: RunDirectory, identity: Mapping[str, Any], start: str | None
) -> list[str]:
    """In which options the run that lives in a directory differs from the one asked for.

    Args:
        directory: The run directory.
        identity: What identifies the run that was asked for.
        start: The checkpoint that this one starts from.
    """
    old = directory.identity()
    if old is None or same_run(old, identity):
        return []
    # An option that the other lacks differs from None too: checkpoints are compared as a whole.
    changed = {
        name
        for name in (identity.keys() | old.keys()) - {CODE, CHANGES}
        if old.get(name, ABSENT) != identity.get(name, ABSENT)
    }
    if len(changed) > 1 and "last" in (old.get("best_by"), identity.get("best_by")):
        changed.discard("best_by")  # follows from an option, such as --num-labels, which is named
    problems = []
    for name in changed:
        if name == "start":
            problems.append(
                f"it started from another checkpoint than {start or 'none'} "
                f"(the stage before has a newer result, or --checkpoint changed)"
            )
        else:
            label = name.replace("_", " ") if name in NO_OPTIONS else flag(name)
            before, now = old.get(name, ABSENT), identity.get(name, ABSENT)
            problems.append(f"{label} was {before!s:.200}, now {now}")
    return [
        f"{directory.path} holds another run: {'; '.join(sorted(problems))}. Give the old values "
        "to go on with it, --fresh to start over (the old run is kept under another name), or "
        "another --output-dir."
    ]


def changed_names(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Which functions, classes and constants differ between the code of two identities.

    Of one of them without code, such as one that no script made, nothing is known.
    """
    before, now = old.get(CODE) or {}, new.get(CODE) or {}
    if not before or not now:
        return []
    return sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))


def listed(names: list[str]) -> str:
    """Names for a message; of many, the first."""
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + more
