"""What counts as the code of a run, and what does not."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megakit.job.program import code_of
from tests.scripts import REPOSITORY

SCRIPT = '''
"""A script."""

import json as js
from dataclasses import dataclass

from megakit.job.script import run_script
from options import DataOptions

STAGE = Stage(name="train", script="train.py", model="Model")
STEPS = 7


@dataclass
class Options(DataOptions):
    """Train."""

    lr: float = 1.0
    """How fast."""

    def problems(self):
        return checked(self)

    @property
    def peak(self):
        return self.lr * 2


def checked(options):
    return []


def work(run):
    """Trains."""
    import parts
    from parts import Loss

    if run:
        return Loss(), parts.build(STEPS), js.dumps({}), f"{run} steps" "!"
    return None


def unused():
    return 1


if __name__ == "__main__":
    run_script(STAGE, Options, work)
'''
PARTS = """
import torch.nn.functional as F
from torch import nn

from deeper import depth

print("on import")


class Base:
    weight = 1.0


class Loss(Base):
    def forward(self, x):
        return F.mse_loss(x, x)


def build(steps):
    return Net(depth() + steps)


class Net(nn.Module):
    width: int = 64


class Elsewhere:
    pass
"""
OPTIONS = """
class DataOptions:
    where: str = 'data'

    def grow(self):
        return 1
"""
GUARD = 'if __name__ == "__main__":\n    '
F = "def f():\n    return 1"
FILES = {
    "train.py": SCRIPT,
    "parts.py": PARTS,
    "options.py": OPTIONS,
    "deeper.py": "def depth():\n    return 3\n",
}


def code(folder: Path, **changes: tuple[str, str]) -> dict[str, str]:
    """The code of the script above, after replacing text in some of its files."""
    folder.mkdir(exist_ok=True)
    for name, text in FILES.items():
        old, new = changes.get(name.removesuffix(".py"), ("", ""))
        assert old in text
        (folder / name).write_text(text.replace(old, new) if old else text)
    return code_of(folder / "train.py")


@pytest.fixture
def before(tmp_path: Path) -> dict[str, str]:
    return code(tmp_path / "before")


def changed(tmp_path: Path, before: dict[str, str], **changes: tuple[str, str]) -> list[str]:
    after = code(tmp_path / "after", **changes)
    return sorted(name for name in before.keys() | after if before.get(name) != after.get(name))


def test_what_is_reached(before: dict[str, str]) -> None:
    assert [*before] == sorted(
        [
            *("Base", "Base.weight", "DataOptions.grow", "Loss", "Loss.forward", "Net"),
            *("Net.width", "Options.peak", "STEPS", "build", "depth", "work"),
            *("main block of the script", "top level of parts"),
        ]
    )


@pytest.mark.parametrize(
    ("module", "old", "new", "names"),
    [
        ("parts", "mse_loss", "l1_loss", ["Loss.forward"]),
        ("parts", "F.mse_loss(x, x)", "F.mse_loss(x, x) + 1", ["Loss.forward"]),
        ("parts", "torch.nn.functional as F", "mine.functional as F", ["Loss.forward"]),
        ("parts", "width: int = 64", "width: int = 32", ["Net.width"]),
        ("parts", "width: int = 64", "width: int = 64\n    depth: int = 2", ["Net", "Net.depth"]),
        ("parts", "    weight = 1.0", "    pass", ["Base", "Base.weight"]),
        ("parts", "class Loss(Base)", "class Loss(Net, Base)", ["Loss"]),
        ("parts", 'print("on import")', 'print("at import")', ["top level of parts"]),
        ("deeper", "3", "4", ["depth"]),
        ("train", "STEPS = 7", "STEPS = 8", ["STEPS"]),
        ("train", "self.lr * 2", "self.lr * 3", ["Options.peak"]),
        ("train", "{run} steps", "{run!r} steps", ["work"]),
        ("train", "if run:", "if not run:", ["work"]),
        ("train", "Options, work)", "Options, lambda run: work(1))", ["main block of the script"]),
        (
            "train",
            "    run_script(",
            "    STEPS = 9\n    run_script(",
            ["main block of the script"],
        ),
        ("train", "lr: float = 1.0", "lr: float = 1.0\n    warm: ClassVar = 2", ["Options.warm"]),
        ("parts", "width: int = 64", "width: int = 64\n    a, b = 1, 2", ["Net", "Net.a"]),
        ("options", "return 1", "return 2", ["DataOptions.grow"]),
        ("train", "lr: float = 1.0", "lr: checked = 1.0", ["checked"]),  # the type of an option
    ],
)
def test_a_change_is_named(
    tmp_path: Path, before: dict[str, str], module: str, old: str, new: str, names: list[str]
) -> None:
    assert changed(tmp_path, before, **{module: (old, new)}) == names


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        ("train", '"""Trains."""', '"""Trains a model, at length."""'),
        ("train", '    """Trains."""\n', ""),
        ("train", "    if run:", "    # When there is one.\n    if run:"),
        ("train", 'f"{run} steps" "!"', "f'{run} steps!'"),
        ("train", "return Loss(), parts", "return (\n            Loss()), parts"),
        ("train", "lr: float = 1.0", "lr: float = 2.0"),  # options count by their values
        ("train", "return []", "return [1]"),  # and what their checks find is told
        ("train", "def unused():\n    return 1", "def unused():\n    return 2"),
        ("train", 'name="train"', 'name="training"'),  # the stage is compared itself
        ("train", "import json as js\n", "import json as js\nimport os\n"),
        (
            "train",
            "    import parts\n    from parts import Loss\n",
            "    from parts import Loss\n    import parts\n",
        ),
        ("parts", "def forward(self, x):", "def forward(self, x: int) -> int:"),
        ("options", "'data'", "'elsewhere'"),
        *(
            ("train", "def problems(self):", f"def {check}(self):")
            for check in ("resolve_dataset", "adapt", "choice", "harmless", "model_sizes")
        ),
        ("train", "(STAGE, Options, work)", "(work=work, stage=STAGE, options_class=Options)"),
        ("train", 'if __name__ == "__main__":', "if '__main__' == __name__:"),
        ("deeper", "def depth():", "\n\n\ndef depth():  # three"),
        ("parts", "class Elsewhere:\n    pass", 'class Elsewhere:\n    """Not here."""'),
    ],
)
def test_what_computes_the_same_is_no_change(
    tmp_path: Path, before: dict[str, str], module: str, old: str, new: str
) -> None:
    assert changed(tmp_path, before, **{module: (old, new)}) == []


def test_the_order_of_definitions_does_not_count(tmp_path: Path, before: dict[str, str]) -> None:
    base, loss = PARTS[PARTS.index("class Base") :].split("\n\n\n")[:2]
    assert changed(tmp_path, before, parts=(f"{base}\n\n\n{loss}", f"{loss}\n\n\n{base}")) == []


def test_nothing_is_imported(before: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert before
    assert capsys.readouterr().out == ""
    assert not {"parts", "deeper"} & {*sys.modules}


def test_packages_submodules_and_relative_imports(tmp_path: Path) -> None:
    (tmp_path / "kit").mkdir()
    (tmp_path / "kit" / "__init__.py").write_text("from .inner import one\n")
    (tmp_path / "kit" / "inner.py").write_text("from . import other\ndef one():\n    other.two()\n")
    (tmp_path / "kit" / "other.py").write_text("def two():\n    return 2\n")
    script = tmp_path / "train.py"
    script.write_text(f"import kit\n{GUARD}run_script(None, kit.one, work=None)\n")
    assert [*code_of(script)] == ["main block of the script", "one", "two"]


def written(folder: Path, files: dict[str, str], run: str) -> dict[str, str]:
    """The code of a script that calls `run_script(None, Options, run)`, with other files."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    imported = files.get("train.py", "")
    (folder / "train.py").write_text(f"{imported}\n{GUARD}run_script(None, None, {run})\n")
    return code_of(folder / "train.py")


#: Files, what the script runs, what is replaced by what, and whether that is a change.
CASES: dict[str, tuple[dict[str, str], str, str, str, bool]] = {
    "a folder without __init__": (
        {
            "train.py": "from src.models.extra import f",
            "src/models/extra.py": F,
        },
        *("f", "return 1", "return 2", True),
    ),
    "circular imports": (
        {
            "train.py": "from p import f",
            "p.py": "from q import x\ndef f():\n    return x",
            "q.py": "x = 1\ndef late():\n    from p import x\n    return x",
        },
        *("f", "x = 1", "x = 2", True),
    ),
    "imports of a name that is nowhere": (
        {"train.py": "from p import x", "p.py": "from q import x", "q.py": "from p import x"},
        *("x", "from q import x", "from q import x as x", False),
    ),
    "a star import": (
        {"train.py": "from losses import *", "losses.py": F},
        *("f", "return 1", "return 2", True),
    ),
    "a module that is imported for what it does": (
        {"train.py": "import patches", "patches.py": "import torch\ntorch.x = 1"},
        *("None", "torch.x = 1", "torch.x = 2", True),
    ),
    "a package that does something": (
        {
            "train.py": "import kit.a",
            "kit/__init__.py": "import torch\ntorch.x = 1",
            "kit/a.py": "",
        },
        *("None", "torch.x = 1", "torch.x = 2", True),
    ),
    "a module of a package that does something": (
        {
            "train.py": "import kit.a",
            "kit/__init__.py": "",
            "kit/a.py": "import torch\ntorch.x = 1",
        },
        *("None", "torch.x = 1", "torch.x = 2", True),
    ),
    "a registry": (
        {
            "train.py": "import nets\nfrom reg import REG",
            "nets.py": "from reg import put\n@put\nclass Net:\n    width = 1",
            "reg.py": "REG = []\ndef put(x):\n    REG.append(x)",
        },
        *("REG[0]", "width = 1", "width = 2", True),
    ),
    "names that are exchanged in an import": (
        {
            "train.py": "from aug import weak as a, strong as b",
            "aug.py": "def weak(): return 1\ndef strong(): return 2",
        },
        *("a(b)", "weak as a, strong as b", "strong as a, weak as b", True),
    ),
    "a condition of an import": (
        {
            "train.py": "F = 1\nif F:\n    import a as x\nelse:\n    import b as x",
            "a.py": "",
            "b.py": "",
        },
        *("x", "if F:", "if not F:", True),
    ),
    "the order of fields": (
        {"train.py": "class A:\n    a: int = 1\n    b: int = 1"},
        *("A", "a: int = 1\n    b: int = 1", "b: int = 1\n    a: int = 1", True),
    ),
    "the order of methods": (
        {"train.py": "class A:\n    def a(self): return 1\n    def b(self): return 2"},
        *("A", "def a(self): return 1\n    def b(self): return 2"),
        *("def b(self): return 2\n    def a(self): return 1", False),
    ),
    "a loop on import": (
        {"train.py": "class A: pass\nfor c in (A,):\n    c.w = 1"},
        *("None", "c.w = 1", "c.w = 2", True),
    ),
    "a long expression": (
        {"train.py": "X = " + " + ".join(["1"] * 3000)},
        *("X", "1 + 1", "1 + 2", True),
    ),
    "a long comparison": (
        {"train.py": "X = 1\nif " + " + ".join(["X"] * 900) + " == 0:\n    X = 2"},
        *("None", "X = 2", "X = 3", True),
    ),
    "a long chain of functions": (
        {
            "train.py": "".join(f"def f{n}(): return f{n + 1}()\n" for n in range(2000))
            + "f2000 = 1"
        },
        *("f0", "f2000 = 1", "f2000 = 2", True),
    ),
    "an integer of thousands of digits": (
        {"train.py": f"X = 0x{'f' * 5000}"},
        *("X", "0xf", "0xe", True),
    ),
    "a file that this Python cannot read": (
        {"train.py": "try:\n    import new\nexcept SyntaxError:\n    pass", "new.py": "def f(:"},
        *("None", "def f(:", "def g(:", True),
    ),
    "a module named as one of Python's": (
        {"train.py": "import profile", "profile.py": F},
        *("profile.f", "return 1", "return 2", True),
    ),
    "a module that is used as a value": (
        {
            "train.py": "import losses",
            "losses.py": "from l1 import f",
            "l1.py": F,
        },
        *("getattr(losses, 'f')", "return 1", "return 2", True),
    ),
    "a keyword of a class": (
        {"train.py": "import abc\nclass A(abc.ABC, frozen=True): pass"},
        *("A", "frozen=True", "frozen=False", True),
    ),
    "a decorator of a class": (
        {"train.py": "from dataclasses import dataclass\n@dataclass(order=True)\nclass A: pass"},
        *("A", "order=True", "order=False", True),
    ),
    "an asynchronous function": (
        {"train.py": "async def f(x: int = 1) -> int: return x"},
        *("f", "x: int = 1) -> int", "x=1)", False),
    ),
    "an import for type checkers": (
        {"train.py": "X = 1\nif TYPE_CHECKING:\n    from a import f", "a.py": F},
        *("X", "if TYPE_CHECKING:", "if typing.TYPE_CHECKING and 1:", False),
    ),
    "a call whose result is thrown away": (
        {"train.py": "class A: pass\n_ = setattr(A, 'w', 1)"},
        *("A", "'w', 1", "'w', 2", True),
    ),
    "a block that is not used for its name": (
        {"train.py": "class A: pass\nwith A() as X: A.w = 1"},
        *("None", "w = 1", "w = 2", True),
    ),
    "values that count as false": ({"train.py": "X = ''"}, *("X", "''", "None", True)),
    "values that are equal": ({"train.py": "X = 1"}, *("X", "X = 1", "X = True", True)),
    "the prefix of a text": ({"train.py": "X = 'a'"}, *("X", "'a'", "u'a'", False)),
    "an annotation inside of a function": (
        {"train.py": "def f():\n    x = 1\n    return x"},
        *("f", "x = 1", "x: int = 1", False),
    ),
    "a relative import from a package above": (
        {
            "train.py": "from a.b.c import g",
            **dict.fromkeys(("a/__init__.py", "a/b/__init__.py", "d.py"), ""),
            "a/b/c.py": "from ..d import f\ndef g(): return f()",
            "a/d.py": F,
        },
        *("g", "return 1", "return 2", True),
    ),
    "a module that only an unused function imports": (
        {"train.py": "X = 1\ndef unused():\n    import patches", "patches.py": "torch.x = 1"},
        *("X", "torch.x = 1", "torch.x = 2", False),
    ),
    "a placeholder in a class": (
        {"train.py": "class A:\n    pass\n    x = 1"},
        *("A", "    pass\n", "", False),
    ),
    "a variable of a comprehension": (
        {"train.py": "UNUSED = [i for i in range(3)]\ndef f():\n    i = 1\n    return i"},
        *("f", "range(3)", "range(4)", False),
    ),
    "the library, where it belongs to the project": (
        {"train.py": "from megakit.x import f", "megakit/__init__.py": "", "megakit/x.py": F},
        *("f", "return 1", "return 2", False),
    ),
    "the place of an import from the library": (
        {"train.py": "from megakit.training import x"},
        *("x", "megakit.training import x", "megakit.training.losses import x", False),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_cases(tmp_path: Path, case: str) -> None:
    files, run, old, new, is_change = CASES[case]
    before = written(tmp_path, files, run)
    assert any(old in text for text in files.values())
    after = written(tmp_path, {n: t.replace(old, new, 1) for n, t in files.items()}, run)
    assert (before != after) is is_change


def test_same_named_functions_of_two_modules_are_told_apart(tmp_path: Path) -> None:
    def code_with(one: int, two: int) -> dict[str, str]:
        files = {
            "train.py": "import one, two",
            "one.py": f"def scale(): return {one}",
            "two.py": f"def scale(): return {two}",
        }
        return written(tmp_path, files, "one.scale, two.scale")

    before, exchanged, after = code_with(1, 2), code_with(2, 1), code_with(1, 3)
    assert {name for name in before if before[name] != exchanged[name]} == {
        "scale in one",
        "scale in two",
    }
    assert [name for name in before if before[name] != after[name]] == ["scale in two"]


def test_an_import_from_the_other_module_is_a_change(tmp_path: Path) -> None:
    """Both functions are reached before and after; the import tells which of them `f` calls."""

    def code_with(module: str) -> dict[str, str]:
        files = {
            "train.py": f"import one, two\nfrom {module} import scale\ndef f(): return scale()",
            "one.py": "def scale(): return 1",
            "two.py": "def scale(): return 2",
        }
        return written(tmp_path, files, "f, one.scale, two.scale")

    before, after = code_with("one"), code_with("two")
    assert [name for name in before if before[name] != after[name]] == ["f"]


def test_the_script_s_name_does_not_count(tmp_path: Path) -> None:
    before = written(tmp_path, {"train.py": "import torch\ntorch.x = 1\ndef f(): pass"}, "f")
    (tmp_path / "train.py").rename(tmp_path / "other.py")
    assert code_of(tmp_path / "other.py") == before


def test_a_script_below_a_folder_that_it_adds_to_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own.py").write_text(F)
    monkeypatch.syspath_prepend(tmp_path)
    code = written(tmp_path / "examples" / "vit", {"train.py": "from own import f"}, "f")
    assert "f" in code


def test_installed_packages_and_those_beside_the_project_do_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NVIDIA's containers have NeMo and Megatron outside of site-packages."""
    project = tmp_path / "project"
    (project / "scripts").mkdir(parents=True)
    (project / "pyproject.toml").touch()
    (project / "own.py").write_text("import ours\ndef one():\n    return ours.two()\n")
    script = project / "scripts" / "train.py"
    script.write_text("import own\nrun_script(None, own.one)\n")
    monkeypatch.syspath_prepend(tmp_path / "opt")
    monkeypatch.syspath_prepend(project)
    for folder, installed in (
        ("opt", True),
        ("project/.venv/site-packages", True),
        ("project", False),
    ):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / folder / "ours.py").write_text("def two():\n    return 2\n")
        monkeypatch.syspath_prepend(tmp_path / folder)
        assert ("two" in code_of(script)) is not installed
        (tmp_path / folder / "ours.py").unlink()


def test_a_folder_with_its_own_history_is_a_project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Modules above it belong to another one."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "project" / ".git").mkdir(parents=True)
    (tmp_path / "above.py").write_text(F)
    files = {"train.py": "from above import f\ndef g(): return f()"}
    assert [*written(tmp_path / "project", files, "g")] == ["g", "main block of the script"]


@pytest.mark.parametrize(
    ("imported", "call"),
    [
        ("from megakit.job.script import run_script", "run_script(None, None, f)"),
        ("from megakit.job.script import run_script as go", "go(None, None, f)"),
        ("from megakit.job import script", "script.run_script(None, None, f)"),
        ("import megakit.job.script", "megakit.job.script.run_script(*JOB)"),
    ],
)
def test_the_call_is_found_by_any_name(tmp_path: Path, imported: str, call: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"{imported}\n{F}\nJOB = None, None, f\n{GUARD}{call}\n")
    assert "f" in code_of(script)
    script.write_text("run_script()\n")  # Python says what is wrong with it
    code_of(script)


def test_a_script_that_runs_nothing_has_no_code(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("def f():\n    pass\n")
    assert code_of(tmp_path / "a.py") == {}


SCRIPTS = sorted(
    path.relative_to(REPOSITORY)
    for path in [*REPOSITORY.glob("model_*.py"), *REPOSITORY.glob("examples/*/model_*.py")]
    if "run_script(" in path.read_text()
)


@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13"])
def test_every_python_gives_the_same(version: str) -> None:
    """A run that one Python began may go on under another."""
    python = find_python(version)
    if python is None:
        pytest.skip(f"no Python {version} here")
    ours = {str(path): code_of(REPOSITORY / path) for path in SCRIPTS}
    assert len(ours) >= 5
    program = (
        "import sys, types; from pathlib import Path; "
        # The one package that `megakit.job` itself imports; other Pythons do not have it.
        "lazy = types.SimpleNamespace(attach_stub=lambda *_: (None, None, None)); "
        "sys.modules['lazy_loader'] = lazy; "
        "from megakit.job.program import code_of; "
        f"print({{str(p): code_of(Path({str(REPOSITORY)!r}) / p) for p in {[*ours]!r}}})"
    )
    done = subprocess.run(
        [python, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(ours)


def find_python(version: str) -> Path | None:
    """Another Python of this machine: on the path, or one of pyenv's."""
    folders = [Path(folder) for folder in os.environ["PATH"].split(os.pathsep)]
    folders += sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin"))
    for folder in folders:
        python = folder / f"python{version}"
        if (
            python.is_file()
            and not subprocess.run([python, "-c", ""], capture_output=True, check=False).returncode
        ):
            return python
    return None
