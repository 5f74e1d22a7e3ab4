"""Copies an example and the files that it imports, as scripts in a project's own folder."""

import ast
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"
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


def copy_example(name: str, project: Path) -> None:
    """Copies an example's modules and tests, and all modules that they import, to a project.

    Args:
        name: The example's folder in `examples`.
        project: The project's folder.
    """
    begin = [*(EXAMPLES / name).glob("*.py"), *ROOT.glob(f"tests/examples/test_{name}.py")]
    for file in find_imported(file for file in begin if file.name != "__init__.py"):
        copied = project / target(file)
        copied.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, copied)
        adapt(copied)


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
