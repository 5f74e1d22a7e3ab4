"""Says what a training run's result depends on, and refuses to resume another run."""

import ast
import hashlib
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from megakit.checkpoints.manifest import ABOUT_CODE, CHANGES, FILES
from megakit.errors import UserError
from megakit.job.option_types import flag
from megakit.job.options import TrainingOptions

#: Its version is recorded in the checkpoints instead of its files.
LIBRARY = "megakit"
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
        FILES: files_of(script) if script else {},
        CHANGES: [],
    }
    content: dict[str, Any] = json.loads(json.dumps(identity))
    return content


def refuse(
    folder: Path, old: Mapping[str, Any], new: Mapping[str, Any], start: str | None
) -> NoReturn:
    """Raises a UserError that names what the requested run has other than the run in the folder."""
    problems = []
    for name in sorted((old.keys() | new.keys()) - {*ABOUT_CODE, "start"}):
        before, now = old.get(name, ABSENT), new.get(name, ABSENT)
        if before != now:
            problems.append(f"{flag(name)} was {before!s:.200}, now {now}")
    if old.get("start", ABSENT) != new["start"]:
        problems.append(
            f"it started from another checkpoint than {start or 'none'} (the previous stage "
            "has a newer result, or --checkpoint changed)"
        )
    raise UserError(
        f"{folder} holds another run: {'; '.join(problems)}. Use the old values to resume "
        "that run, --fresh to start over (the old run is kept under another name), or another "
        f"--output-dir{f' with --checkpoint {start}' if start else ''}."
    )


# --- Files of code --------------------------------------------------------------------------------


def files_of(script: Path) -> dict[str, str]:
    """Returns the sha256 of a script and of each project file that it imports, by path.

    The files are parsed and not imported, so that a start stays quick. Imports inside of functions
    count, too.
    """
    root, prefix = project_of(script), Path(sys.prefix).resolve()
    found = [script.resolve().parent, *(Path(entry).resolve() for entry in sys.path)]
    own = [one for one in found if one.is_relative_to(root) and not one.is_relative_to(prefix)]
    own = [one for one in own if "site-packages" not in one.parts]  # of the user, in a home folder
    waiting, files = [script.resolve()], dict[str, str]()
    while waiting:
        file = waiting.pop()
        name = os.path.relpath(file, root)  # a package's script may import from above its folder
        if name not in files:
            content = file.read_bytes()
            files[name] = hashlib.sha256(content).hexdigest()
            waiting += _imported(file, ast.parse(content), own)
    return dict(sorted(files.items()))


def changed_files(before: Mapping[str, Any], files: Mapping[str, str]) -> list[str]:
    """Returns which files differ from those in the identity of a run.

    The list is empty if one of the two has no files, such as a notebook.
    """
    old = before.get(FILES)
    if not old or not files:
        return []
    names = sorted(old.keys() | files.keys())
    return [name for name in names if old.get(name) != files.get(name)]


def project_of(script: Path) -> Path:
    """Returns the folder of the project that a script belongs to; else the script's own folder."""
    above = script.resolve().parents
    marks = ("pyproject.toml", ".git")
    return next((f for f in above if any((f / mark).exists() for mark in marks)), above[0])


def _imported(file: Path, tree: ast.Module, folders: Sequence[Path]) -> Iterator[Path]:
    """Yields the files that a file imports from the folders, or relative to itself."""
    for node in ast.walk(tree):
        names, places = [], folders
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module or ''}.{alias.name}".lstrip(".") for alias in node.names]
            if node.level:
                places = [file.parents[node.level - 1]]
        for name in names:
            parts = name.split(".")
            if parts[0] == LIBRARY:
                continue
            for place in places:
                for number in range(1, len(parts) + 1):  # a package's own file, too
                    path = place.joinpath(*parts[:number])
                    candidates = (path / "__init__.py", path.with_suffix(".py"))
                    yield from filter(Path.is_file, candidates)
