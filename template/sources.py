"""Copies the scripts and tests of a project, and all files of this repository that they import."""

import ast
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import distribution
from importlib.util import resolve_name
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TEMPLATE, EXAMPLES, LIBRARY = ROOT / "template", ROOT / "examples", ROOT / "megakit"
#: The example without NeMo. Its projects have components of their own, and `tutorial.py`.
WITHOUT_NEMO = "megatron"
#: Scripts of the tutorial. `template/tutorial` has another `model_predict.py`, without `--input`.
TUTORIAL = ("model_pretrain.py", "model_finetune.py", "mnist/tutorial.py")
#: What a project has in place of the modules that choose and read MNIST.
DATA = TEMPLATE / "data.py"
DIGITS = "sklearn/datasets/data/digits.csv.gz"
MNIST = ("mnist.files", "mnist.dataset", "mnist.digits")
DATA_NAMES = ("Batch", "DataOptions", "Digits", "Split", "read_splits")
#: Files that lie in the project's own folder, as those of examples do.
OWN = (DATA, ROOT / "mnist/sizes.py", ROOT / "mnist/tutorial.py")
#: What the first lines of `model_components.py` say in a project of an example.
PARTS = '"""Defines parts that the project has in common with the tutorial."""\n'
VIEWS, FIGURES = "mnist.views", ROOT / "mnist/prediction_figures.py"

OWN_FOLDER = """\
if sys.flags.safe_path:  # with this flag, sys.path lacks the folder of the script
    sys.path.insert(0, str(Path(__file__).resolve().parent))
"""
FROM_MNIST = r"from mnist\.(?:files|dataset|digits) import (?:\([^)]*\)|.*)\n"
Rules = tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...]


def names_of_data(found: re.Match[str]) -> str:
    """Returns one import, of the names that `data.py` has, for all imports from it."""
    names = {*re.findall(r"\w+", found[0])} & {*DATA_NAMES}
    return f"{found[1]}from data import {', '.join(sorted(names))}\n"


#: Regular expressions and replacements for every file, because files move to the project's folder.
EVERYWHERE: Rules = (
    (r"(# Python adds .*\n)?sys\.path\.insert\(0, .*parents\[2\]\)\).*\n", OWN_FOLDER),
    (r"\bfrom examples\.\w+ import\b", "import"),
    (r"\bexamples\.\w+\.", ""),
    (r"\bexamples/\w+/", ""),
    (r'Path\("runs/\w+"\)', 'Path("runs")'),
    (r'\A"""(Stage .*) on MNIST\b', r'"""\1'),
    (r"`MNISTCustom` in `mnist/dataset\.py`", "in `data.py`"),
    (r"\bMnistBatch\b", "Batch"),
    (r"\bMnistItem\b", "Any"),
    (r"\bread_splits\(\s*((?:[^,()]|\([^()]*\))+),[^()]*\)", r"read_splits(\1)"),
    (rf"( *){FROM_MNIST}(\1{FROM_MNIST})*", names_of_data),
    (r"\bfrom mnist\.sizes import\b", "from sizes import"),
)
#: Rules for one file, by its path here. Each has to find something.
IN_FILES: dict[str, Rules] = {
    "model_components.py": (
        (r"MNIST has 55,000.* (The base class .*)\n +", r"\1 "),
        (r"that contains `MNIST/raw`; None if.*", "of the data."),
        (r"`mnist`, or `digits` from scikit-learn\.", "What `DataOptions.fingerprint` returns."),
        (r'dataset: str = "mnist"', 'dataset: str = ""'),
        # Names that only the published tutorial uses.
        (r".* # only the published tutorial uses it\n", ""),
        (r"    another_name,\n", ""),
        (r"\n    # The published tutorial's names\..*\n(    mnist_.*\n)+", ""),
    ),
    "mnist/tutorial.py": (
        (r'if __name__ == "__main__":  # the scripts and.*\n.*\n\n', ""),
        (r"\.parents\[1\]", ".parent"),
    ),
    "examples/own_images/make_sample.py": (
        (r"import Split", "import Digits, Split"),
        (r"read_digits\(part\)", "vars(Digits(part)).values()"),
    ),
    "tests/examples/test_vit.py": ((r'"--dataset", "digits", ', ""),),
    "run": ((r"mnist/tutorial\.py", "tutorial.py"),),
}
#: Further rules for a project without NeMo.
NO_NEMO: dict[str, Rules] = {
    "mnist/tutorial.py": (
        (
            r"for module in \((.*\n)*?.*import_module\(module\)",
            'importlib.import_module("training_loop")',
        ),
        (r"def import_figures(.*\n)*?\n\n(?=def )", ""),
        (r"\(work, import_figures\)", "(work)"),
    ),
    "template/tutorial/tests/project.py": (
        (r"(MORE_LAYOUTS.* = \{)", r'\1"sharded Adam": ("--distributed-optimizer",)'),
    ),
    "run_setup.sh": (
        (r"# A project without NeMo .*\n", ""),
        ("5.5 GB", "5.4 GB"),
        ("=3.11 ", "=3.12 "),
        (r"NEEDED=.*", "NEEDED=(megatron-core==0.19. torch==)"),
        (r"IN_WORDS=.*", 'IN_WORDS="Megatron-Core 0.19 and torch"'),
    ),
    "pyproject.toml": (  # of megakit's wheel
        (r"description = .*\nreadme = .*\n", ""),
        (r"\ndependencies = \[\n(.*\n)*?\]", ""),
    ),
}
#: Further rules for the scripts that train, in a project without pictures in TensorBoard.
NO_VIEWS: Rules = (
    (rf" +from {re.escape(VIEWS)} import .*\n", ""),
    (r", callbacks=\[LogPictures\(\w+\)\]", ""),
)
SHOW = """\
    from mnist.prediction_figures import write_figures

    return run.finish(
        trainer,
        show=lambda folder, found: write_figures(folder, found, data.test_set.images),
    )
"""
#: Further rules for the script that predicts, in a project with pictures.
WITH_FIGURES: Rules = ((r"    return run\.finish\(trainer\)\n", SHOW),)


def copy_sources(origin: str, project: Path, has_pictures: bool) -> None:
    """Copies what the project runs, and what this imports, except megakit.

    Args:
        origin: `tutorial`, or the name of an example's folder.
        project: The project's folder.
        has_pictures: Whether the tutorial's pictures are copied, too.
    """
    left_out = ("megakit.",) if has_pictures else ("megakit.", VIEWS)
    started = [*started_files(origin), *([FIGURES] if has_pictures else [])]
    for file in find_imported(started, lambda name: not name.startswith(left_out)):
        copied = project / target(file)
        copied.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, copied)
        package = file.with_name("__init__.py")
        if copied.parent != project and package.is_file():
            shutil.copy(package, copied.parent)
        name = str(file.relative_to(ROOT))
        rules = IN_FILES.get(name, ())
        if origin == WITHOUT_NEMO:
            rules += NO_NEMO.get(name, ())
        if name in TUTORIAL[:2] and not has_pictures:
            rules += NO_VIEWS
        if name == "template/tutorial/model_predict.py" and has_pictures:
            rules += WITH_FIGURES
        copied.write_text(adapted(name, file.read_text(), rules))
    if origin not in ("tutorial", WITHOUT_NEMO):
        leave_out_unused(project)
    if (project / DATA.name).is_file():
        (project / "digits").mkdir()
        shutil.copy(str(distribution("scikit-learn").locate_file(DIGITS)), project / "digits")


def copy_library(project: Path, scratch: Path) -> None:
    """Copies the modules of megakit that a project without NeMo imports."""

    def is_taken(name: str) -> bool:
        return name.startswith("megakit.") and not name.startswith("megakit.nemo.")

    found = find_imported([*project.rglob("*.py"), *LIBRARY.glob("*.py")], is_taken)
    for package in {file.parent for file in found if file.is_relative_to(LIBRARY)}:
        copied = scratch / package.relative_to(ROOT)
        copied.mkdir(parents=True, exist_ok=True)
        for file in package.iterdir():
            if file in found or file.name in ("__init__.py", "py.typed"):
                shutil.copy(file, copied)
            elif file.suffix == ".pyi":  # names what the subpackage exports
                nodes: list[Any] = ast.parse(file.read_text()).body
                kept = (ast.unparse(one) for one in nodes if package / f"{one.module}.py" in found)
                (copied / file.name).write_text("\n".join([*kept, ""]))


def leave_out_unused(project: Path) -> None:
    """Leaves in `model_components.py` what the project's other files need; likewise `sizes.py`."""
    parts, sizes = project / "model_components.py", project / "sizes.py"
    others = {
        name for file in project.rglob("*.py") if file != parts for name in imported_names(file)
    }
    used = {name.partition(".")[2] for name in others if name.startswith(f"{parts.stem}.")}
    if parts.is_file():
        parts.write_text(only_used(parts.read_text(), used))
        others.update(imported_names(parts))
    if not any(name.startswith("sizes.") for name in others):
        sizes.unlink(missing_ok=True)


def only_used(text: str, used: set[str]) -> str:
    """Returns a module's text with the definitions that are used, and what these need."""
    lines, (docstring, *nodes) = text.splitlines(keepends=True), ast.parse(text).body
    needs = {name_of(node): names_in(node) for node in nodes}
    while more := set[str]().union(*(needs.get(name, ()) for name in used)) - used:
        used = used | more
    kept, header = PARTS, ""
    for before, node in pairwise([docstring, *nodes]):
        part = "".join(lines[before.end_lineno : node.end_lineno])
        if isinstance(node, ast.ImportFrom):
            aliases = [one for one in node.names if (one.asname or one.name) in used]
            names = [*map(ast.unparse, aliases)]
            body = f"from {node.module} import {', '.join(names)}\n" if names else ""
            if len(body) > 101:
                listed = ",\n    ".join(names)
                body = f"from {node.module} import (\n    {listed},\n)\n"
            kept += part.replace(f"{ast.get_source_segment(text, node)}\n", body)
        elif isinstance(node, ast.Import):
            kept += part
        else:
            if found := re.match(r"\s*# --- .*\n(#.*\n)*", part):
                header = found[0]
            if name_of(node) in used:
                kept += part if found else header + part
                header = ""
    return re.sub(r"\n{3,}(?=from |import )", "\n\n", kept)


def name_of(node: Any) -> str:
    """Returns the name that a statement of a module defines; "" for an import."""
    target = getattr(node, "target", None) or getattr(node, "targets", [node])[0]
    return getattr(node, "name", "") or getattr(target, "id", "")


def names_in(node: ast.AST) -> set[str]:
    """Returns the names that a statement uses, also in quotes."""
    found = (one for one in ast.walk(node) if isinstance(one, ast.Name | ast.Constant))
    return {str(getattr(one, "id", getattr(one, "value", ""))) for one in found}


def adapted(name: str, text: str, rules: Rules) -> str:
    """Returns a file's text for a project.

    Raises:
        ValueError: One of the rules for this file finds nothing to replace.
    """
    for pattern, replacement in EVERYWHERE:
        text = re.sub(pattern, replacement, text)
    for pattern, replacement in rules:
        text, count = re.subn(pattern, replacement, text)
        if not count:
            raise ValueError(f"{name}: nothing to replace for {pattern}")
    return text


def started_files(origin: str) -> Iterator[Path]:
    """Yields the scripts and the tests of a project."""
    for part in ("common", origin):
        yield from (TEMPLATE / part).rglob("*.py")
    if origin == "tutorial":
        yield from (ROOT / name for name in TUTORIAL)
    else:
        yield from (EXAMPLES / origin).glob("[!_]*.py")
        if origin == WITHOUT_NEMO:
            yield from (ROOT / "mnist/tutorial.py", TEMPLATE / "tutorial/tests/project.py")
        yield from ROOT.glob(f"tests/examples/test_{origin}.py")


def find_imported(files: Iterable[Path], is_taken: Callable[[str], bool]) -> set[Path]:
    """Returns files, and those files of this repository that they import and that are taken."""
    exported = {  # the full names of what megakit's subpackages export
        f"megakit.{stub.parent.name}.{name.rpartition('.')[2]}": name
        for stub in LIBRARY.rglob("*.pyi")
        for name in imported_names(stub)
    }
    found: set[Path] = set()
    waiting = [*files]
    while waiting:
        file = waiting.pop()
        if file not in found:
            found.add(file)
            names = (exported.get(name, name) for name in imported_names(file))
            waiting += filter(None, map(file_of, filter(is_taken, names)))
    return found


def imported_names(file: Path) -> Iterator[str]:
    """Yields the modules, and names of modules, that a file imports, also by names in quotes."""
    package = ".".join(file.parts[len(ROOT.parts) : -1])  # only stubs of megakit are relative
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = resolve_name("." * node.level + str(node.module), package)
            yield from (f"{module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and re.fullmatch(r"megakit[.\w]+", str(node.value)):
            yield str(node.value)


def file_of(name: str) -> Path | None:
    """Returns the file of a module of this repository, or of a name that the module defines."""
    parts = name.split(".")
    if name.startswith(MNIST):
        return DATA
    files = (ROOT.joinpath(*parts[:n]).with_suffix(".py") for n in range(len(parts), 0, -1))
    return next((file for file in files if file.is_file()), None)


def target(file: Path) -> Path:
    """Returns a file's path in the project: modules of examples are in the project's folder."""
    if file in OWN or file.is_relative_to(EXAMPLES):
        return Path(file.name)
    path = file.relative_to(ROOT)
    if path.parts[0] == "template":
        return Path(*path.parts[2:])
    return Path("tests", file.name) if path.parts[:2] == ("tests", "examples") else path
