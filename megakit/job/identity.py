"""Collects everything that a training run's result depends on, and compares two runs."""

import json
from collections.abc import Mapping
from copy import copy
from pathlib import Path
from typing import Any

from megakit.checkpoints.manifest import CHANGES, CODE, same_run
from megakit.job.options import TrainingOptions
from megakit.job.program import code_of
from megakit.job.ranges import flag
from megakit.job.runs import RunDirectory
from megakit.job.stage import Stage

#: Entries of an identity that are not options.
NOT_OPTIONS = ("model",)
#: Value of an entry that one of two identities lacks.
ABSENT = "absent"
#: Number of changed names that a message lists.
LISTED = 8


def identify(
    stage: Stage,
    options: TrainingOptions,
    dataset: Any,
    start: str | None,
    script: Path | None = None,
) -> dict[str, Any]:
    """Returns everything that a run's result depends on, in the form that manifests store.

    Args:
        stage: The run's stage.
        options: Options of the command line.
        dataset: Name of the dataset.
        start: Digest of the checkpoint that the run starts from.
        script: The script whose code the run executes; None: the code is not compared.
    """
    identity = options.identity() | {
        "model": stage.model,
        "dataset": dataset,
        "start": start,
        "best_by": options.choice(),
        CODE: code_of(script) if script else {},
        CHANGES: [],
    }
    content: dict[str, Any] = json.loads(json.dumps(identity, default=str))
    return content


def differences(
    directory: RunDirectory,
    identity: Mapping[str, Any],
    start: str | None,
    options: TrainingOptions | None = None,
) -> list[str]:
    """Compares the run in a directory with the requested run.

    Args:
        directory: The run directory.
        identity: Identity of the requested run.
        start: Checkpoint that the requested run starts from.
        options: Options of the requested run. With them, the message leaves out a value of
            `--best-by` that follows from another option.

    Returns:
        One message that lists all differences, or no message.
    """
    old = directory.identity()
    if old is None or same_run(old, identity):
        return []
    # A missing option differs from None: `same_run` compares whole identities.
    changed = {
        name
        for name in (identity.keys() | old.keys()) - {CODE, CHANGES}
        if old.get(name, ABSENT) != identity.get(name, ABSENT)
    }
    if options is not None:
        # The criterion that the old run had if its --best-by was the one of this command.
        old_options = copy(options)
        vars(old_options).update((name, old.get(name)) for name in changed - {"best_by"})
        if old_options.choice() == old.get("best_by"):
            changed.discard("best_by")  # follows from another option in the list: --num-labels
    if ABSENT in (old.get("val_interval", ABSENT), identity.get("val_interval", ABSENT)):
        changed.discard("val_interval")  # an entry only together with --stop-after, which is named
    problems = []
    for name in changed:
        if name == "start":
            problems.append(
                f"it started from another checkpoint than {start or 'none'} "
                f"(the previous stage has a newer result, or --checkpoint changed)"
            )
        else:
            label = name.replace("_", " ") if name in NOT_OPTIONS else flag(name)
            before, now = old.get(name, ABSENT), identity.get(name, ABSENT)
            problems.append(f"{label} was {before!s:.200}, now {now}")
    return [
        f"{directory.path} holds another run: {'; '.join(sorted(problems))}. Use the old values "
        "to resume that run, --fresh to start over (the old run is kept under another name), or "
        "another --output-dir."
    ]


def changed_names(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Returns the functions, classes and constants whose code differs between two identities.

    The list is empty if one identity has no code, such as one that no script made.
    """
    before, now = old.get(CODE) or {}, new.get(CODE) or {}
    if not before or not now:
        return []
    return sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))


def listed(names: list[str]) -> str:
    """Joins names for a message: the first `LISTED`, and the number of further names."""
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + more
