"""Which files of a script's project count as its code. Changes by name: tests/test_changes.py."""

import platform
from dataclasses import replace
from pathlib import Path

import pytest
from megakit.job.code import changed_names, code_of

from megakit.checkpoints.manifest import Manifest

FILES = {
    "train.py": "def work():\n    import parts\n    from losses import distance\n",
    "parts.py": "from kit.deeper import depth\nfrom pictures import draw\n"
    "from other_script import STAGE\nprint('on import')\n"
    "class Watch(pl.Callback):\n    seconds = 10\n",
    "kit/__init__.py": "from . import deeper\n",
    "kit/deeper.py": "def depth():\n    return 3\n",
    "pictures.py": "REPORTS_ONLY = True\n\ndef draw():\n    return 5\n",
    "other_script.py": "STAGE = 6\nif __name__ == '__main__':\n    run_script(STAGE)\n",
    "megakit/__init__.py": "x = 1\n",
}


def code(folder: Path, files: dict[str, str]) -> dict[str, str]:
    """The code of `train.py` in a folder with these files."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return code_of(folder / "train.py")


def made_by(code: dict[str, str]) -> Manifest:
    versions = {"python": platform.python_version()}
    return Manifest("pretrain", "Net", "digits", 0, run={"code": code}, versions=versions)


@pytest.mark.parametrize(
    ("file", "old", "new", "names"),
    [
        ("parts.py", "on import", "at import", ["top level of parts"]),  # nothing is imported
        ("kit/deeper.py", "3", "4", ["depth"]),
        ("train.py", "import distance", "import other", ["imports of train"]),
        ("parts.py", "seconds = 10", "seconds = 20", []),
        ("pictures.py", "5", "6", []),
        ("other_script.py", "6", "7", []),
        ("megakit/__init__.py", "1", "2", []),
    ],
)
def test_a_change_is_named(file: str, old: str, new: str, names: list[str], tmp_path: Path) -> None:
    made = made_by(code(tmp_path, FILES))
    assert old in FILES[file]
    after = code(tmp_path, {file: FILES[file].replace(old, new)})
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
    made = made_by({"f": "1"})
    assert changed_names(made, {"f": "2"}) == ["f"]
    assert changed_names(made, {}) == []
    assert changed_names(replace(made, versions={"python": "3.9.1"}), {"f": "2"}) == []
