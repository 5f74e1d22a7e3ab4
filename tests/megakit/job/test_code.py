"""Which changes of a script and the modules that it imports count, and by which name."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megakit.checkpoints.manifest import Manifest
from megakit.job.code import changed_names, code_of

SCRIPT = '''
"""A script."""

from dataclasses import dataclass

STEPS = 7


@dataclass
class WorkOptions:
    lr: float = 1.0


def work(run):
    """Trains."""
    import parts
    from losses import distance as measure
    from parts import Loss

    if run:
        return Loss(), parts.build(STEPS, callbacks=[1])
    return None


if __name__ == "__main__":
    run_script(STAGE, WorkOptions, work)
'''
PARTS = """
from kit.deeper import depth
from pictures import draw
from other_script import STAGE

print("on import")


class Loss:
    def forward(self, x):
        return mse_loss(x, x)


class Watch(pl.Callback):
    seconds = 10


def build(steps):
    return Net(depth() + steps)


class Net:
    width: int = 64
"""
FILES = {
    "train.py": SCRIPT,
    "parts.py": PARTS,
    "kit/__init__.py": "from . import deeper\n",
    "kit/deeper.py": "def depth():\n    return 3\n",
    "pictures.py": "REPORTS_ONLY = True\n\ndef draw():\n    return 5\n",
    "other_script.py": "STAGE = 6\nif __name__ == '__main__':\n    run_script(STAGE)\n",
    "unused.py": "x = 4\n",
    "megakit/__init__.py": "x = 1\n",
}


def code(folder: Path, files: dict[str, str]) -> dict[str, str]:
    """The code of `train.py` in a folder with these files."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return code_of(folder / "train.py")


@pytest.mark.parametrize(
    ("file", "old", "new", "names"),
    [
        ("parts.py", "mse_loss", "l1_loss", ["Loss.forward"]),
        ("parts.py", "class Loss", "class Loss(Net)", ["Loss"]),
        ("parts.py", "on import", "at import", ["top level of parts"]),  # nothing is imported
        ("kit/deeper.py", "3", "4", ["depth"]),
        ("train.py", "import distance as", "import other as", ["imports of train"]),
        # What only reports is no change.
        ("train.py", "lr: float = 1.0", "lr: float = 2.0", []),  # options count by their values
        ("train.py", "callbacks=[1]", "callbacks=[1, 2]", []),
        ("parts.py", "seconds = 10", "seconds = 20", []),
        ("pictures.py", "5", "6", []),
        ("other_script.py", "6", "7", []),
        ("unused.py", "4", "5", []),
        ("megakit/__init__.py", "1", "2", []),
    ],
)
def test_a_change_is_named(file: str, old: str, new: str, names: list[str], tmp_path: Path) -> None:
    before = code(tmp_path, FILES)
    assert old in FILES[file]
    after = code(tmp_path, {file: FILES[file].replace(old, new)})
    made = Manifest("pretrain", "Net", "digits", 0, run={"code": before}, versions=versions())
    assert changed_names(made, after) == names


def test_installed_packages_and_those_beside_the_project_do_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NVIDIA's containers have NeMo and Megatron outside of site-packages."""
    project = tmp_path / "project"
    files = {"pyproject.toml": "", "train.py": "from ours import f\n"}
    for folder in (tmp_path / "opt", project / ".venv" / "site-packages", project):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "ours.py").write_text("def f(): return 1")
        with monkeypatch.context() as path:
            path.syspath_prepend(folder)
            assert ("f" in code(project, files)) is (folder == project)
        (folder / "ours.py").unlink()


def test_code_of_another_python_or_of_no_script_is_not_compared() -> None:
    made = Manifest("pretrain", "Net", "digits", 0, run={"code": {"f": "1"}}, versions=versions())
    assert changed_names(made, {"f": "2"}) == ["f"]
    assert changed_names(made, {}) == []
    assert changed_names(replace(made, versions={"python": "3.9.1"}), {"f": "2"}) == []


def versions() -> dict[str, str]:
    return {"python": ".".join(map(str, sys.version_info[:3]))}
