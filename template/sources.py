"""Copies the scripts and tests of a project, and all files of this repository that they import."""

import ast
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TEMPLATE, EXAMPLES = ROOT / "template", ROOT / "examples"
#: Scripts of the tutorial. `template/tutorial` has another `model_predict.py`, without pictures.
TUTORIAL = ("model_pretrain.py", "model_finetune.py", "mnist/tutorial.py")
OWN_FOLDER = """\
if sys.flags.safe_path:  # with this flag, sys.path lacks the folder of the script
    sys.path.insert(0, str(Path(__file__).resolve().parent))
"""
#: What is replaced in each file, because the example's files move to the project's folder.
REPLACED = (
    (r"(# Python adds .*\n)?sys\.path\.insert\(0, .*parents\[2\]\)\).*\n", OWN_FOLDER),
    (r"\bfrom examples\.\w+ import\b", "import"),
    (r"\bexamples\.\w+\.", ""),
    (r"\bexamples/\w+/", ""),
    (r'Path\("runs/\w+"\)', 'Path("runs")'),
)


def copy_sources(origin: str, project: Path) -> None:
    """Copies what the project runs, and what this imports, except the template's files and megakit.

    Args:
        origin: `tutorial`, or the name of an example's folder.
        project: The project's folder.
    """
    for file in find_imported([*started_files(origin)]):
        if not file.is_relative_to(TEMPLATE):
            copied = project / target(file)
            copied.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, copied)
            adapt(copied)


def started_files(origin: str) -> Iterator[Path]:
    """Yields the scripts and the tests of a project."""
    for part in ("common", origin):
        yield from (TEMPLATE / part).rglob("*.py")
    if origin == "tutorial":
        yield from (ROOT / name for name in TUTORIAL)
    else:
        yield from (EXAMPLES / origin).glob("[!_]*.py")
        yield from ROOT.glob(f"tests/examples/test_{origin}.py")


def find_imported(files: Iterable[Path]) -> set[Path]:
    """Returns files, and all files of this repository that they import, except megakit's."""
    found: set[Path] = set()
    waiting = [*files]
    while waiting:
        file = waiting.pop()
        if file not in found:
            found.add(file)
            waiting += filter(None, map(file_of, imported_names(file)))
    packages = {file.with_name("__init__.py") for file in found}
    return found | {file for file in packages if file.is_file() and not is_example(file)}


def imported_names(file: Path) -> Iterator[str]:
    """Yields the modules, and names of modules, that a file imports; no import is relative."""
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def file_of(name: str) -> Path | None:
    """Returns the file of a module of this repository, or of a name that the module defines."""
    parts = name.split(".")
    if parts[0] == "megakit":
        return None
    files = (ROOT.joinpath(*parts[:n]).with_suffix(".py") for n in range(len(parts), 0, -1))
    return next((file for file in files if file.is_file()), None)


def target(file: Path) -> Path:
    """Returns a file's path in the project: modules of examples are in the project's folder."""
    if is_example(file):
        return Path(file.name)
    path = file.relative_to(ROOT)
    return Path("tests", file.name) if path.parts[:2] == ("tests", "examples") else path


def is_example(file: Path) -> bool:
    """Tells whether a file belongs to an example."""
    return file.is_relative_to(EXAMPLES)


def adapt(file: Path) -> None:
    """Replaces the imports and paths of examples in a file of the project."""
    text = file.read_text()
    for pattern, replacement in REPLACED:
        text = re.sub(pattern, replacement, text)
    file.write_text(text)
