"""The shape of the project: imports run one way, light modules stay light, names stay apart."""

import ast
import graphlib
import io
import re
import sys
import tokenize
from functools import cache
from pathlib import Path

import pytest

from tests.scripts import REPOSITORY, output_of, run, run_python

SCRIPTS = ("model_pretrain", "model_finetune", "model_predict")
ABOVE = {*SCRIPTS, "model_components", "model_trainer", "mnist"}
SUBPACKAGES = {
    *("checkpoints", "data", "job", "models", "nemo", "runtime", "testing", "training"),
}
#: What each part of the library may use besides itself, `megakit` itself and `megakit.errors`. The
#: stubs of the subpackages also name what is in `nemo`.
MAY_USE = {
    "runtime": set(),
    "checkpoints": {"runtime"},
    "data": {"runtime"},
    "models": {"checkpoints", "runtime"},
    "job": {"checkpoints", "runtime", "training"},
    "training": SUBPACKAGES - {"nemo", "testing"},
    "nemo": SUBPACKAGES - {"testing"},
    "testing": SUBPACKAGES,
}
#: Who may use `nemo` or name NeMo, Lightning and their packages, inside functions, beside `nemo`.
NAME_NEMO = {
    "megakit/job/run.py": "what a run adds to a trainer of Lightning",
    "megakit/runtime/megatron_on_cpu.py": "patches of NeMo, if the program uses it",
    "megakit/runtime/safe_reading.py": "a reader of NeMo's, likewise",
    "megakit/testing/forked_from.py": "imported once for all ranks, if it is installed",
}
FRAMEWORKS = {"torch", "nemo", "lightning", "megatron", "torchvision", "fiddle", "sklearn"}

#: Modules that no script, no test of a copy and no example imports, and who uses them.
OTHERWISE_USED = {
    "megakit/lazy.py": "each subpackage's `__init__.py`",
    "megakit/runtime/__main__.py": "prints the table of patches",
    "megakit/job/notebook.py": "the notebook",
    "megakit/testing/forked_from.py": "preloaded by name, for the processes that ranks fork from",
    "megakit/nemo/imported_weights.py": "docs/inference.md: weights of another program",
    "megakit/data/resampling.py": "code for BioNeMo names PRNGResampleDataset",
}

LIBRARY = sorted(
    path
    for suffix in ("*.py", "*.pyi")
    for path in (REPOSITORY / "megakit").rglob(suffix)
    if "__pycache__" not in path.parts
)


#: The scripts, and what they use besides the library.
OUTSIDE = [
    *(REPOSITORY / f"{name}.py" for name in (*SCRIPTS, "model_components", "model_trainer")),
    *sorted((REPOSITORY / "mnist").glob("*.py")),
]


def imports(path):
    """The modules that a file imports, at its top or inside functions, by full name."""
    yield from imports_of(ast.parse(path.read_text(), str(path)), path)


def imports_of(tree, path):
    package = path.relative_to(REPOSITORY).parent.parts
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            # `from megakit import data` imports megakit.data
            yield from (f"{module}.{alias.name}" for alias in node.names)


def parts_used(path):
    """The subpackages of the library that a file imports from."""
    names = [name.split(".") for name in imports(path)]
    return {part for package, *below in names if package == "megakit" for part in below[:1]} & (
        SUBPACKAGES
    )


def roots_used(path):
    """The first part of each name that a file imports."""
    return {name.split(".")[0] for name in imports(path)}


def module_of(path):
    """The dotted name of a file."""
    return ".".join(path.relative_to(REPOSITORY).with_suffix("").parts).removesuffix(".__init__")


def identify(path):
    return str(path.relative_to(REPOSITORY))


class TestOneWay:
    def test_every_part_has_its_rule(self):
        folders = {path.parent.name for path in (REPOSITORY / "megakit").glob("*/__init__.py")}
        assert folders <= SUBPACKAGES == MAY_USE.keys()

    @pytest.mark.parametrize("path", LIBRARY, ids=identify)
    def test_within_the_library(self, path):
        inside = path.relative_to(REPOSITORY / "megakit").parts
        own = inside[0] if len(inside) > 1 else None
        allowed = MAY_USE[own] | {own} if own else set()
        if identify(path) in NAME_NEMO or path.suffix == ".pyi":
            allowed = allowed | {"nemo"}
        assert parts_used(path) <= allowed
        assert not roots_used(path) & (ABOVE | {"tests"})

    def test_one_part_needs_nemo(self):
        packages = {"nemo", "lightning", "torchmetrics", "fiddle"}
        found = {identify(path) for path in LIBRARY if roots_used(path) & packages}
        outside = {path for path in found if not path.startswith("megakit/nemo/")}
        assert outside <= NAME_NEMO.keys()

    def test_no_circle_among_the_library_s_modules(self):
        modules = {module_of(path): path for path in LIBRARY if path.suffix == ".py"}
        graph: dict[str, set[str]] = {}
        for name, path in modules.items():
            parts = [full.split(".") for full in imports(path)]
            longest = (
                [".".join(full[:length]) for length in range(len(full), 0, -1)] for full in parts
            )
            used = {next((known for known in names if known in modules), "") for names in longest}
            graph[name] = used - {name, ""}
        assert len(list(graphlib.TopologicalSorter(graph).static_order())) == len(modules)

    def test_what_runs_reaches_every_module(self):
        """A module is there because a copy's scripts, its tests or an example run it."""
        scripts = [REPOSITORY / f"{name}.py" for name in SCRIPTS]
        copied = (REPOSITORY / "template").rglob("*.py")
        found = closure({*scripts, *copied, *(REPOSITORY / "examples").rglob("*.py")})
        modules = {path for path in LIBRARY if path.suffix == ".py" and path.stem != "__init__"}
        unused = {path.relative_to(REPOSITORY).as_posix() for path in modules - found}
        assert unused == OTHERWISE_USED.keys()

    @pytest.mark.parametrize("path", OUTSIDE, ids=identify)
    def test_outside_the_library(self, path):
        """Scripts import earlier ones and components, not the other way; none uses `testing`."""
        later = SCRIPTS[SCRIPTS.index(path.stem) :] if path.stem in SCRIPTS else SCRIPTS
        assert not roots_used(path) & {*later}
        assert path.parent == REPOSITORY or "model_components" not in roots_used(path)
        assert "testing" not in parts_used(path)
        if path.stem in ("files", "own_pictures"):  # where the images come from
            assert parts_used(path) == set()


def closure(files):
    """Files of this repository, and all that they import."""
    found, waiting = set(), [*files]
    while waiting:
        path = waiting.pop()
        if path not in found:
            found.add(path)
            waiting += files_used(path)
    return found


def files_used(path):
    """The files of this repository that a file imports, also through the lazy subpackages."""
    names = (exported().get(name, name).split(".") for name in imports(path))
    return {*filter(None, map(file_of, names))}


def file_of(parts):
    """The file of a module, or of a name inside a module; None if it is not of this repository."""
    files = (REPOSITORY.joinpath(*parts[:n]).with_suffix(".py") for n in range(len(parts), 0, -1))
    return next((file for file in files if file.is_file()), None)


@cache
def exported():
    """The full names of what the library's subpackages export: `megakit.data.take` and so on."""
    return {
        f"{module_of(path)}.{name.split('.')[-1]}": name
        for path in LIBRARY
        if path.suffix == ".pyi"
        for name in imports(path)
    }


class TestLight:
    @pytest.mark.parametrize(
        "module",
        [
            *("megakit", "megakit.errors", "megakit.training", "megakit.checkpoints"),
            *("megakit.models", "megakit.data", "megakit.runtime"),
        ],
    )
    def test_packages(self, module):
        assert not loaded_by(module) & {*FRAMEWORKS, "numpy", "PIL", "matplotlib"}

    def test_all_that_a_script_needs_for_its_help(self):
        job = [f"megakit.job.{path.stem}" for path in (REPOSITORY / "megakit/job").glob("*.py")]
        mnist = ("mnist.files", "mnist.own_pictures", "mnist.sizes", "mnist.tutorial")
        modules = [*job, *SCRIPTS, *mnist, "experiments.experiment"]
        assert not loaded_by(*modules) & FRAMEWORKS

    def test_importing_writes_and_prints_nothing(self, tmp_path):
        code = "import megakit, megakit.job.script, model_predict, mnist.tutorial"
        done = run_python("-c", code, cwd=tmp_path, HOME=str(tmp_path))
        assert (done.output(), done.err) == ("", "")
        assert list(tmp_path.iterdir()) == []


class TestNames:
    @pytest.mark.parametrize("path", LIBRARY, ids=identify)
    def test_the_library_names_nothing_of_this_project(self, path):
        """Neither MNIST nor a model or a dataset."""
        names = rf"\b({'|'.join(own_names())}|vit|linear[1-4])\b|(?i:mnist|(?<!is)digit)"
        lines = enumerate(path.read_text().splitlines(), start=1)
        assert [f"line {n}: {line.strip()}" for n, line in lines if re.search(names, line)] == []

    def test_no_file_names_a_package_index(self):
        """Who installs uses the index of their own configuration."""
        hosts = [
            *(("pypi", "org"), ("pypi", "python", "org"), ("pythonhosted", "org")),
            *(("anaconda", "org"), ("download", "pytorch", "org"), ("pypi", "nvidia", "com")),
        ]
        pattern = re.compile("|".join(re.escape(".".join(host)) for host in hosts), re.IGNORECASE)
        found = [
            f"{path}: {match[0]}"
            for path in tracked_files()
            if (match := pattern.search((REPOSITORY / path).read_text(errors="replace")))
        ]
        assert found == []


class TestGpus:
    """A machine with a GPU may have neither our locks nor a network."""

    def test_their_tests_are_in_one_folder(self):
        marked = [
            path.relative_to(REPOSITORY / "tests").as_posix()
            for path in (REPOSITORY / "tests").rglob("*.py")
            if re.search(r"^(pytestmark = |@)pytest\.mark\.gpu", path.read_text(), re.MULTILINE)
        ]
        assert marked == ["gpu/test_gpu.py"]

    def test_the_folder_needs_pytest_alone(self):
        """Beyond what the tutorial itself needs; also the test helpers that it imports."""
        found, left = (
            set(),
            [*(REPOSITORY / "tests/gpu").glob("*.py"), REPOSITORY / "tests/conftest.py"],
        )
        while left:
            path = left.pop()
            if path in found:
                continue
            found.add(path)
            tree = ast.parse(path.read_text())
            tree.body = [
                node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)
            ]
            names = {*imports_of(tree, path)}
            roots = {name.partition(".")[0] for name in names} - {*sys.stdlib_module_names}
            allowed = {"pytest", "numpy", "filelock", "wrapt", "megakit", "mnist", "tests"}
            assert roots <= allowed, path
            ours = (name.split(".")[:3] for name in names if name.startswith("tests."))
            files = (
                REPOSITORY.joinpath(*parts[:n]).with_suffix(".py") for parts in ours for n in (2, 3)
            )
            left += [file for file in files if file.is_file()]
        assert REPOSITORY / "tests/scripts.py" in found


#: Most tokens of code of each room: names, operators and literals of its Python, words of its
#: shell, without comments and docstrings. A number only goes down; where it has to go up, a
#: sentence beside it says why.
ROOMS = {
    "megakit": 62320,  # grew by what runs without NeMo, beside what NeMo's half shares
    "megakit/job": 13040,  # grew by ranks that meet only in their own job, and by full disks
    "megakit/runtime": 8930,  # grew by Adam's patches, a later Megatron-Core, and gloo's race
    "megakit/checkpoints": 3310,
    "megakit/training": 6510,  # what both chains share
    "megakit/data": 7200,
    "megakit/models": 3890,
    "megakit/nemo": 15590,  # what needs NeMo or Lightning, from five rooms
    "megakit/testing": 3270,
    "mnist": 9690,
    "tools": 24310,  # grew by check: values of a step, judgement, layouts, what would check nothing
    "model_components.py": 1690,
    "model_trainer.py": 230,
    "model_pretrain.py": 330,
    "model_finetune.py": 380,
    "model_predict.py": 560,
    "ladder": 11400,  # grew by the second ladder, and by rows that fail
    "exercises": 7060,  # grew by what was accepted though wrong, and by ranks that are slow
    "examples": 12920,  # grew by the chain without NeMo
    "experiments": 4830,
    "template": 6580,  # grew by a project without NeMo, with a part of megakit
    "docs": 4780,  # grew by the course's pictures, most of them drawn from what Megatron does
    "notebooks": 3310,
    "benchmarks": 19940,  # grew by the loop without NeMo beside the others
    "tests": 139560,  # grew by the course: its parts, faults, pictures and language
    "run": 800,  # grew by help before the set-up
    "run_setup.sh": 1170,
    ".ci/run": 320,
}
#: A room that is smaller by more than this has to have its number lowered.
SLACK = 300
KINDS = (".py", ".pyi", ".sh")


#: Tokens of Python that are no code.
LAYOUT = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    tokenize.ENDMARKER,
}
#: From Python 3.12 on, an f-string has these tokens and its parts. It counts as one, as before.
F_STRING_START, F_STRING_END = (
    getattr(tokenize, f"FSTRING_{name}", -1) for name in ("START", "END")
)


def tokens_in(path):
    text = path.read_text()
    if path.suffix not in (".py", ".pyi"):
        lines = (line.strip() for line in text.splitlines())
        return sum(len(line.split()) for line in lines if not line.startswith("#"))
    docstrings = {
        (node.lineno, node.col_offset)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr) and isinstance(getattr(node.value, "value", None), str)
    }
    count = inside = 0
    for one in tokenize.generate_tokens(io.StringIO(text).readline):
        if not inside and one.type not in LAYOUT and one.start not in docstrings:
            count += 1
        inside += (one.type == F_STRING_START) - (one.type == F_STRING_END)
    return count


def tokens_of(room):
    place = REPOSITORY / room
    files = [place] if place.is_file() else place.rglob("*")
    return sum(tokens_in(path) for path in files if path.suffix in KINDS or path == place)


class TestSizes:
    def test_no_room_grows(self):
        """With `-s`, pytest shows the table."""
        found = {room: tokens_of(room) for room in ROOMS}
        print(
            *("", *(f"{room:<20} {found[room]:>6} of {ROOMS[room]:>6}" for room in ROOMS)), sep="\n"
        )
        grown = [f"{room}: {found[room]} tokens" for room in ROOMS if found[room] > ROOMS[room]]
        assert grown == [], "remove from the room as much as you add, or say why beside the number"
        shrunk = {room: found[room] for room in ROOMS if found[room] < ROOMS[room] - SLACK}
        assert shrunk == {}, "these rooms became smaller: lower their numbers"

    def test_every_file_is_in_a_room(self):
        """A new folder needs a row, and so does a new part of the library."""
        rooms = [{path.as_posix(), *map(str, path.parents)} & ROOMS.keys() for path in code_files()]
        lost = [path for path, found in zip(code_files(), rooms, strict=True) if not found]
        assert lost == []
        parts = {f"megakit/{path.parent.name}" for path in REPOSITORY.glob("megakit/*/__init__.py")}
        assert parts <= ROOMS.keys()


def code_files():
    return [path for path in tracked_files() if path.suffix in KINDS]


@cache
def own_names():
    """Classes of models, configs and data in the components files of the project's models."""
    kinds = ("Model", "Trunk", "Classifier", "Config", "Item", "Output", "DataModule", "Custom")
    examples = (REPOSITORY / "examples").glob("*/*_components.py")
    mnist = (REPOSITORY / "mnist").glob("*.py")
    return {
        node.name
        for path in (REPOSITORY / "model_components.py", *mnist, *examples)
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and node.name.endswith(kinds)
    }


def loaded_by(*modules):
    """The packages and modules that importing some modules loads in a fresh process."""
    imported = "; ".join(f"import {module}" for module in modules)
    code = f"import sys; {imported}; print(*sorted({{name.split('.')[0] for name in sys.modules}}))"
    found = set(output_of(code).split())
    assert {module.split(".")[0] for module in modules} <= found
    return found


def tracked_files():
    if not (REPOSITORY / ".git").exists():
        pytest.skip("not a git checkout")
    listed = run("git", "-c", f"safe.directory={REPOSITORY}", "ls-files", "-z", cwd=REPOSITORY)
    paths = [Path(name) for name in listed.output().split("\0") if name]
    assert Path("pyproject.toml") in paths
    return [path for path in paths if (REPOSITORY / path).is_file()]
