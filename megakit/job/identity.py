"""Says what a training run's result depends on, and refuses to resume another run."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megakit.checkpoints.manifest import CHANGES, CODE, Manifest, same_run
from megakit.errors import UserError
from megakit.job.code import changed_names, code_of, listed
from megakit.job.option_types import flag
from megakit.job.options import TrainingOptions
from megakit.job.runs import RunDirectory
from megakit.reporting.console import Console

#: Value of an entry that one of two identities lacks.
ABSENT = "absent"


def identify(
    options: TrainingOptions, dataset: str, precision: str, start: str | None, script: Path | None
) -> dict[str, Any]:
    """Returns everything that a run's result depends on, in the form that manifests store."""
    identity = options.identity() | {
        "dataset": dataset,
        "precision": precision,
        "start": start,
        "best_by": options.selects_by(),
        CODE: code_of(script) if script else {},
        CHANGES: [],
    }
    content: dict[str, Any] = json.loads(json.dumps(identity))
    return content


def refuse_another_run(
    directory: RunDirectory, identity: Mapping[str, Any], start: str | None
) -> None:
    """Raises UserError if the run in the directory is not the requested run."""
    old, new = directory.identity(), identity
    if old is None or same_run(old, new):
        return
    problems = []
    for name in sorted((old.keys() | new.keys()) - {CODE, CHANGES, "start"}):
        before, now = old.get(name, ABSENT), new.get(name, ABSENT)
        if before != now:
            problems.append(f"{flag(name)} was {before!s:.200}, now {now}")
    if old.get("start", ABSENT) != new["start"]:
        problems.append(
            f"it started from another checkpoint than {start or 'none'} (the previous stage "
            "has a newer result, or --checkpoint changed)"
        )
    raise UserError(
        f"{directory.path} holds another run: {'; '.join(problems)}. Use the old values to resume "
        "that run, --fresh to start over (the old run is kept under another name), or another "
        f"--output-dir{f' with --checkpoint {start}' if start else ''}."
    )


def refuse_changed_code(
    directory: RunDirectory,
    identity: Mapping[str, Any],
    newest: Manifest | None,
    options: TrainingOptions,
) -> None:
    """Raises UserError if the code has changed since the newest checkpoint of the run."""
    changed = changed_names(newest, identity[CODE]) if newest else []
    if newest is None or not changed or options.keep_changes:
        return
    remedy = "--fresh starts over with the new code (the old run is kept under another name)"
    if newest.ends(options.max_steps):
        remedy += "; without the changes the run has already ended"
    else:
        remedy += "; --keep-changes resumes the run, and its result then comes from both versions"
    raise UserError(
        f"{directory.path}: the code was changed since its last checkpoint: {listed(changed)}. "
        f"{remedy}."
    )


def record_code_changes(identity: dict[str, Any], newest: Manifest, console: Console) -> None:
    """Adds to a run's identity which code has changed since its newest checkpoint."""
    identity[CHANGES] = [*newest.run.get(CHANGES, [])]
    if not identity[CODE]:  # a notebook resumes the run of a script
        identity[CODE] = newest.run.get(CODE, {})
    if changed := changed_names(newest, identity[CODE]):
        identity[CHANGES].append({"step": newest.step, "names": changed})
        console.say(f"Resuming with changed code: {listed(changed)}.")
