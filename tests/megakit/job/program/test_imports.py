"""The code of a run is followed through imports, and told apart by module."""

from pathlib import Path

import pytest

from megakit.job.program import code_of
from tests.megakit.job.program.written import GUARD, F, changes, written


def test_packages_submodules_and_relative_imports(tmp_path: Path) -> None:
    (tmp_path / "kit").mkdir()
    (tmp_path / "kit" / "__init__.py").write_text("from .inner import one\n")
    (tmp_path / "kit" / "inner.py").write_text("from . import other\ndef one():\n    other.two()\n")
    (tmp_path / "kit" / "other.py").write_text("def two():\n    return 2\n")
    script = tmp_path / "train.py"
    script.write_text(f"import kit\n{GUARD}run_script(None, kit.one, work=None)\n")
    assert [*code_of(script)] == ["main block of the script", "one", "two"]


#: The script, other files, what the script runs, and what is replaced by what.
CHANGES: dict[str, tuple[str, dict[str, str], str, str, str]] = {
    "a folder without __init__": (
        *("from src.models.extra import f", {"src/models/extra.py": F}),
        *("f", "return 1", "return 2"),
    ),
    "circular imports": (
        "from p import f",
        {
            "p.py": "from q import x\ndef f():\n    return x",
            "q.py": "x = 1\ndef late():\n    from p import x\n    return x",
        },
        *("f", "x = 1", "x = 2"),
    ),
    "a star import": ("from losses import *", {"losses.py": F}, "f", "return 1", "return 2"),
    "a module that is imported for what it does": (
        *("import patches", {"patches.py": "import torch\ntorch.x = 1"}),
        *("None", "torch.x = 1", "torch.x = 2"),
    ),
    "a package that does something": (
        *("import kit.a", {"kit/__init__.py": "import torch\ntorch.x = 1", "kit/a.py": ""}),
        *("None", "torch.x = 1", "torch.x = 2"),
    ),
    "a module of a package that does something": (
        *("import kit.a", {"kit/__init__.py": "", "kit/a.py": "import torch\ntorch.x = 1"}),
        *("None", "torch.x = 1", "torch.x = 2"),
    ),
    "a registry": (
        "import nets\nfrom reg import REG",
        {
            "nets.py": "from reg import put\n@put\nclass Net:\n    width = 1",
            "reg.py": "REG = []\ndef put(x):\n    REG.append(x)",
        },
        *("REG[0]", "width = 1", "width = 2"),
    ),
    "names that are exchanged in an import": (
        "from aug import weak as a, strong as b",
        {"aug.py": "def weak(): return 1\ndef strong(): return 2"},
        *("a(b)", "weak as a, strong as b", "strong as a, weak as b"),
    ),
    "a condition of an import": (
        "F = 1\nif F:\n    import a as x\nelse:\n    import b as x",
        *({"a.py": "", "b.py": ""}, "x", "if F:", "if not F:"),
    ),
    "a long chain of functions": (
        "".join(f"def f{n}(): return f{n + 1}()\n" for n in range(2000)) + "f2000 = 1",
        *({}, "f0", "f2000 = 1", "f2000 = 2"),
    ),
    "a file that this Python cannot read": (
        "try:\n    import new\nexcept SyntaxError:\n    pass",
        *({"new.py": "def f(:"}, "None", "def f(:", "def g(:"),
    ),
    "a module named as one of Python's": (
        *("import profile", {"profile.py": F}, "profile.f", "return 1", "return 2"),
    ),
    "a module that is used as a value": (
        *("import losses", {"losses.py": "from l1 import f", "l1.py": F}),
        *("getattr(losses, 'f')", "return 1", "return 2"),
    ),
    "a relative import from a package above": (
        "from a.b.c import g",
        {
            **dict.fromkeys(("a/__init__.py", "a/b/__init__.py", "d.py"), ""),
            **{"a/b/c.py": "from ..d import f\ndef g(): return f()", "a/d.py": F},
        },
        *("g", "return 1", "return 2"),
    ),
}
SAME: dict[str, tuple[str, dict[str, str], str, str, str]] = {
    "imports of a name that is nowhere": (
        *("from p import x", {"p.py": "from q import x", "q.py": "from p import x"}),
        *("x", "from q import x", "from q import x as x"),
    ),
    "an import for type checkers": (
        *("X = 1\nif TYPE_CHECKING:\n    from a import f", {"a.py": F}),
        *("X", "if TYPE_CHECKING:", "if typing.TYPE_CHECKING and 1:"),
    ),
    "a module that only an unused function imports": (
        *("X = 1\ndef unused():\n    import patches", {"patches.py": "torch.x = 1"}),
        *("X", "torch.x = 1", "torch.x = 2"),
    ),
    "the library, where it belongs to the project": (
        *("from megakit.x import f", {"megakit/__init__.py": "", "megakit/x.py": F}),
        *("f", "return 1", "return 2"),
    ),
    "the place of an import from the library": (
        *("from megakit.training import x", {}),
        *("x", "megakit.training import x", "megakit.training.losses import x"),
    ),
}


@pytest.mark.parametrize("case", [*CHANGES, *SAME])
def test_what_imports_lead_to(tmp_path: Path, case: str) -> None:
    before, after = changes(tmp_path, *{**CHANGES, **SAME}[case])
    assert (before != after) is (case in CHANGES)


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
