"""Which changes of a script and the modules that it imports count, and by which name."""

import sys
from pathlib import Path

import pytest

from megakit.job.program import code_of

SCRIPT = '''
"""A script."""

from dataclasses import dataclass

STEPS = 7


@dataclass
class Options:
    lr: float = 1.0


def work(run):
    """Trains."""
    import parts
    from parts import Loss

    if run:
        return Loss(), parts.build(STEPS)
    return None


if __name__ == "__main__":
    run_script(STAGE, Options, work)
'''
PARTS = """
from torch.nn import functional as F

from deeper import depth

print("on import")


class Loss:
    def forward(self, x):
        return F.mse_loss(x, x)


def build(steps):
    return Net(depth() + steps)


class Net:
    width: int = 64
"""
FILES = {"train.py": SCRIPT, "parts.py": PARTS, "deeper.py": "def depth():\n    return 3\n"}


def code(folder: Path, files: dict[str, str]) -> dict[str, str]:
    """The code of `train.py` in a folder with these files."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return code_of(folder / "train.py")


def changed(folder: Path, module: str, old: str, new: str) -> list[str]:
    """The names that a change in one of the files above changes."""
    before = code(folder, FILES)
    name = f"{module}.py"
    assert old in FILES[name]
    after = code(folder, {name: FILES[name].replace(old, new)})
    return sorted(name for name in before.keys() | after if before.get(name) != after.get(name))


@pytest.mark.parametrize(
    ("module", "old", "new", "names"),
    [
        ("parts", "mse_loss", "l1_loss", ["Loss.forward"]),
        ("parts", "import functional as F", "import mine as F", ["Loss.forward"]),
        ("parts", "width: int = 64", "width: int = 32", ["Net.width"]),
        ("parts", "class Loss", "class Loss(Net)", ["Loss"]),
        ("deeper", "3", "4", ["depth"]),
        ("train", "STEPS = 7", "STEPS = 8", ["STEPS"]),
        ("train", "if run:", "if not run:", ["work"]),
        # What computes the same is no change.
        ("train", '"""Trains."""', '"""Trains a model, at length."""', []),
        ("train", "    if run:", "    # When there is one.\n    if run:", []),
        ("train", "return Loss(), parts", "return (\n            Loss()), parts", []),
        ("train", "lr: float = 1.0", "lr: float = 2.0", []),  # options count by their values
    ],
)
def test_a_change_is_named(
    tmp_path: Path, module: str, old: str, new: str, names: list[str]
) -> None:
    assert changed(tmp_path, module, old, new) == names


def test_the_order_of_definitions_does_not_count(tmp_path: Path) -> None:
    loss, build = PARTS[PARTS.index("class Loss") :].split("\n\n\n")[:2]
    assert changed(tmp_path, "parts", f"{loss}\n\n\n{build}", f"{build}\n\n\n{loss}") == []


def test_nothing_is_imported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert code(tmp_path, FILES)
    assert capsys.readouterr().out == ""
    assert not {"parts", "deeper"} & {*sys.modules}


F = "def f(): return 1"
#: What the script imports and runs, and other files.
PROJECTS: dict[str, tuple[str, str, dict[str, str]]] = {
    "a folder without __init__": ("from src.extra import f", "f", {"src/extra.py": F}),
    "circular imports": (
        *("from p import f", "f"),
        {"p.py": "from q import x\ndef f(): return x, 1", "q.py": "x = 2\ndef g(): import p"},
    ),
    "relative imports in a package": (
        *("import kit", "kit.f"),
        {"kit/__init__.py": "from .inner import f", "kit/inner.py": F},
    ),
    "a star import": ("from losses import *", "f", {"losses.py": F}),
    "a module that is imported for what it does": (
        *("import patches", "None"),
        {"patches.py": "import torch\ntorch.x = 1"},
    ),
    "the library, whose version is recorded": (
        *("from megakit.x import f", "f"),
        {"megakit/__init__.py": "", "megakit/x.py": F},
    ),
}


def script(imports: str, run: str) -> str:
    """A script that imports and runs something."""
    return f"{imports}\nif __name__ == '__main__':\n    run_script(None, None, {run})\n"


@pytest.mark.parametrize("project", PROJECTS)
def test_what_imports_lead_to(tmp_path: Path, project: str) -> None:
    imports, run, files = PROJECTS[project]
    before = code(tmp_path, {**files, "train.py": script(imports, run)})
    after = code(tmp_path, {name: text.replace("1", "7") for name, text in files.items()})
    assert (before == after) is project.startswith("the library")


def test_same_named_functions_of_two_modules_are_told_apart(tmp_path: Path) -> None:
    files = {"one.py": F, "two.py": F, "train.py": script("import one, two", "one.f, two.f")}
    before = code(tmp_path, files)
    after = code(tmp_path, {"two.py": F.replace("1", "2")})
    assert [name for name in before if before[name] != after[name]] == ["f in two"]


def test_installed_packages_and_those_beside_the_project_do_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NVIDIA's containers have NeMo and Megatron outside of site-packages."""
    project = tmp_path / "project"
    files = {"pyproject.toml": "", "train.py": script("from ours import f", "f")}
    for folder in (tmp_path / "opt", project / ".venv" / "site-packages", project):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "ours.py").write_text(F)
        with monkeypatch.context() as path:
            path.syspath_prepend(folder)
            assert ("f" in code(project, files)) is (folder == project)
        (folder / "ours.py").unlink()
